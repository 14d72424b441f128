"""Replay allocations and frees through a model of PyTorch's CUDA caching allocator.

    replay([("alloc", 1, 3 << 20, 0), ("free", 1, 0, 0)]).peak_reserved    # 20 MiB

Covered, as in torch 2.11 to 2.13 (c10/cuda/CUDACachingAllocator.cpp): rounding of sizes,
the small and the large pool of each stream, best fit, splitting and merging, `max_split_size`,
`garbage_collection_threshold`, `roundup_power2_divisions`, expandable segments with mapping and
unmapping of pages, the memory fraction, and the chain of retries before out of memory.

Not covered: private pools (CUDA graphs, `torch.cuda.MemPool`), the `cudaMallocAsync` backend,
settings changed during the run, and the delay before a block used on another stream
(`record_stream`) is reusable. For such a block, put the "free" event where it becomes reusable. The
real `allocated` falls at the call of free, so it may be lower than ours in between.

Two assumptions:

* Segments get the addresses that `_Addresses` predicts. Addresses only decide between free blocks of
  equal size, yet this moved a real peak by 4.5%. The driver guarantees no addresses, so pass measured
  ones as `segment_addresses` if you have them.
* The driver gives exactly the requested size until `capacity_bytes` is used up. Subtract what the
  driver needs for itself before you pass `capacity_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

MIN_BLOCK = 512
"""Every size is rounded up to a multiple of this."""
SMALL_SIZE = 1 << 20
"""The largest rounded request that the small pool serves; also the largest remainder that a block
of the large pool keeps instead of splitting it off."""
SMALL_BUFFER = 2 << 20
"""Segment size of the small pool; also its page size in expandable segments."""
MIN_LARGE_ALLOC = 10 << 20
"""A request of at least this size gets a segment of its own size; a smaller one of the large pool
gets a segment of `large_segment_size`."""
ROUND_LARGE = 2 << 20
"""Segments of their own size are rounded up to a multiple of this."""
LARGE_SEGMENT = 20 << 20
"""The default of `large_segment_size`; also the page size of a large expandable segment."""
ONE_EXBIBYTE = 1 << 60
"""The real allocator refuses requests of this size or more at once."""

_POWER2_INTERVALS = 16
_POWER2_FIRST = SMALL_SIZE.bit_length() - 1
_ADDRESS_STEP = 32 << 20
_FIRST_ADDRESS = 1 << 64
_NEVER = 1 << 62
_BELOW_ALL = -(1 << 100)

Kind = Literal["alloc", "free", "empty_cache"]
Event = tuple[Kind, int, int, int]
"""Kind, id, size in bytes, stream. "free" uses only the id, "empty_cache" none of the three.
To make events from parallel lists, use `zip(kinds, ids, sizes, streams)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorConfig:
    """The allocator's settings; sizes are in bytes, where the environment variable has MB.

    AllocatorConfig(expandable=True, capacity_bytes=79 << 30)    # expandable_segments:True on 79 GiB
    """

    expandable: bool = False
    """`expandable_segments`."""
    max_split_size: int | None = None
    """`max_split_size_mb`: larger blocks are never split. None: any block can be split."""
    max_non_split_rounding: int | None = None
    """`max_non_split_rounding_mb`: how much larger than the request an oversize block can be. None,
    the default: `large_segment_size`."""
    large_segment_size: int = LARGE_SEGMENT
    """`large_segment_size_mb`."""
    roundup_power2_divisions: int | tuple[int, ...] = 0
    """Steps between two powers of two: one number for all sizes, or 16 for 1 MiB, 2 MiB, ... 32 GiB
    and more (sizes below 1 MiB use the first). 0 and 1: off."""
    garbage_collection_threshold: float | None = None
    """The share of `limit_bytes` above which idle segments are freed. Ignored without a limit, as in
    the real allocator."""
    limit_bytes: int | None = None
    """Limit set by `torch.cuda.set_per_process_memory_fraction`, if the fraction is below 1."""
    capacity_bytes: int | None = None
    """Device memory available to this allocator. None: unlimited."""

    def __post_init__(self) -> None:
        """Reject the values that the real parser rejects."""
        wrong = [text for bad, text in self._faults() if bad]
        if wrong:
            raise ValueError("Config: " + "; ".join(wrong))

    def _faults(self) -> Iterator[tuple[bool, str]]:
        large = self.large_segment_size
        bad = large <= MIN_LARGE_ALLOC
        yield bad, f"large_segment_size={large} must be above {MIN_LARGE_ALLOC}"
        yield bool(large % SMALL_SIZE), f"large_segment_size={large} must be whole MiB"
        for name in ("max_split_size", "max_non_split_rounding"):
            value = getattr(self, name)
            bad = value is not None and value < large
            yield bad, f"{name}={value} must be at least large_segment_size={large}"
        for name in ("limit_bytes", "capacity_bytes"):
            value = getattr(self, name)
            yield value is not None and value < 0, f"{name}={value} must not be negative"
        share = self.garbage_collection_threshold
        bad = share is not None and not 0 < share < 1
        yield bad, f"garbage_collection_threshold={share} must lie between 0 and 1"
        steps = self.roundup_power2_divisions
        table = (steps,) * _POWER2_INTERVALS if isinstance(steps, int) else steps
        bad = any(step < 0 or step & (step - 1) for step in table)
        yield bad, f"roundup_power2_divisions={steps} must be powers of two, or 0"
        bad = len(table) != _POWER2_INTERVALS
        yield bad, f"roundup_power2_divisions={steps} must be one number or {_POWER2_INTERVALS}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The allocation that failed even after all cached segments were released."""

    index: int
    """Index of the event, from 0."""
    requested_bytes: int
    """Its requested size, before rounding."""
    short_bytes: int
    """How much more capacity (or limit) the last attempt needed."""


class ReplayPeaks(NamedTuple):
    """Peak values of the events between two resets, as torch counts them."""

    allocated: int
    """`torch.cuda.max_memory_allocated`: sum of block sizes, unsplit remainders included."""
    requested: int
    """`requested_bytes.all.peak`: sum of the requested sizes."""
    reserved: int
    """`torch.cuda.max_memory_reserved`: segments, or mapped pages of expandable segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Result of a replay; after out of memory, the result up to that event."""

    windows: tuple[ReplayPeaks, ...]
    """Peaks between resets; a single entry if there was no reset."""
    allocated: int
    """At the end."""
    requested: int
    """At the end."""
    reserved: int
    """At the end."""
    num_segments: int
    """Segments at the end; an expandable segment counts once, whatever its size.
    (torch's own `segment.all.current` does not count expandable ones.)"""
    num_retries: int
    """Cache flushes forced by a failed attempt: torch's `num_alloc_retries`."""
    out_of_memory: OutOfMemory | None
    """The event at which the replay stopped; None if it ran to the end."""

    @property
    def peak_allocated(self) -> int:
        """Peak since the last reset, as torch would report it at the end."""
        return self.windows[-1].allocated

    @property
    def peak_requested(self) -> int:
        """Peak since the last reset."""
        return self.windows[-1].requested

    @property
    def peak_reserved(self) -> int:
        """Peak since the last reset."""
        return self.windows[-1].reserved


def replay(
    events: Iterable[Event],
    config: AllocatorConfig | None = None,
    *,
    reset_peak_at: Iterable[int] = (),
    segment_addresses: Iterable[int] = (),
) -> Replay:
    """Run the events through a new allocator and return its statistics.

    replay(events, AllocatorConfig(expandable=True)).peak_reserved
    replay(zip(kinds, ids, sizes, streams), reset_peak_at=[len(kinds) // 2])

    Args:
        events: allocations, frees and cache flushes, in order.
        config: the allocator's settings; None for torch's defaults.
        reset_peak_at: indices of events before which peaks are reset to the current values, as
            `torch.cuda.reset_peak_memory_stats` does; the number of events resets after the last.
        segment_addresses: addresses of the first segments, in order of creation, if known.

    Raises:
        ValueError: for an impossible event, with its index.
    """
    allocator = CachingAllocator(config or AllocatorConfig(), segment_addresses=segment_addresses)
    resets = sorted(set(reset_peak_at))
    if resets and resets[0] < 0:
        raise ValueError(f"reset_peak_at={resets[0]}: indices count from 0")
    windows: list[ReplayPeaks] = []
    failed: OutOfMemory | None = None
    index = -1
    pending = set(resets)
    event: Event = ("empty_cache", 0, 0, 0)
    alloc, free = allocator.alloc, allocator.free
    try:
        for index, event in enumerate(events):
            if index in pending:
                windows.append(allocator.reset_peaks())
            kind, ident, size, stream = event
            if kind == "free":
                free(ident)
            elif short := alloc(ident, size, stream) if kind == "alloc" else allocator.apply(event):
                failed = OutOfMemory(index=index, requested_bytes=size, short_bytes=short)
                break
    except ValueError as error:
        raise ValueError(f"event {index} {event!r}: {error}") from error
    if failed is None and resets and resets[-1] > index:
        if resets[-1] > index + 1:
            raise ValueError(f"reset_peak_at={resets[-1]}: there are only {index + 1} events")
        windows.append(allocator.reset_peaks())
    return _summarize_replay(allocator, windows, failed)


def _summarize_replay(
    allocator: CachingAllocator, windows: list[ReplayPeaks], failed: OutOfMemory | None
) -> Replay:
    return Replay(
        windows=(*windows, allocator.reset_peaks()),
        allocated=allocator.allocated,
        requested=allocator.requested,
        reserved=allocator.reserved,
        num_segments=allocator.num_segments,
        num_retries=allocator.num_retries,
        out_of_memory=failed,
    )


def round_size(size: int, config: AllocatorConfig) -> int:
    """Return the block size of a request: the next multiple of 512, or of a share of its power of two.

    With 4 divisions, 1200 KiB is between 1024 and 2048 KiB, whose steps are 256 KiB: 1280 KiB.
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    steps = config.roundup_power2_divisions
    if not isinstance(steps, int):
        interval = size.bit_length() - 1 - _POWER2_FIRST
        steps = steps[min(max(interval, 0), _POWER2_INTERVALS - 1)]
    step = MIN_BLOCK
    if steps > 1 and size > MIN_BLOCK * steps:
        step = (1 << (size.bit_length() - 1)) // steps
    return -(-size // step) * step


def segment_size(size: int, config: AllocatorConfig) -> int:
    """Return the size to request from `cudaMalloc` when no cached block fits a rounded size."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def should_split(remaining: int, size: int, config: AllocatorConfig) -> bool:
    """Return whether a block with `remaining` bytes beyond the rounded size is split.

    In the small pool and in expandable segments, any remainder of at least 512 bytes is split off. In
    the large pool, up to 1 MiB stays with the block and counts as allocated.
    """
    if size <= SMALL_SIZE or config.expandable:
        return remaining >= MIN_BLOCK
    cap = config.max_split_size
    return remaining > SMALL_SIZE and (cap is None or size < cap)


class BlockPlace(NamedTuple):
    """Position of a live block."""

    segment: int
    """Index of the segment in order of creation, from 0."""
    offset: int
    """Bytes from the segment's start."""
    size: int
    """The block's size: the rounded request, plus a remainder that was not split off."""


class Span(NamedTuple):
    """One block of the layout."""

    segment: int
    address: int
    size: int
    state: Literal["live", "free", "unmapped"]


class _Segment:
    """Memory of one `cudaMalloc`, or one reserved address range."""

    __slots__ = ("base", "ordinal")

    def __init__(self, ordinal: int, base: int) -> None:
        self.ordinal = ordinal
        self.base = base


class _Pool:
    """Unused blocks of one size class on one stream."""

    __slots__ = ("free", "page", "small", "unmapped")

    def __init__(self, page: int, *, small: bool) -> None:
        self.small = small
        self.page = page
        self.free: list[tuple[int, int, _Block]] = []
        """Sorted by size, then by address. Addresses are unique, so blocks are never compared."""
        self.unmapped: list[tuple[int, _Block]] = []
        """Sorted by address."""


class _Block:
    """A contiguous part of a segment, linked to its neighbours."""

    __slots__ = (
        "address",
        "live",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "segment",
        "since",
        "size",
    )

    def __init__(self, address: int, size: int, pool: _Pool, segment: _Segment) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.segment = segment
        self.requested = 0
        self.live = False
        self.mapped = True
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.since = 0

    def link_between(self, before: _Block | None, after: _Block | None) -> None:
        """Link this block between two neighbours; either can be None."""
        self.prev = before
        self.next = after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def reachable_size(self) -> int:
        """Return the size, plus the unmapped space right after the block."""
        after = self.next
        return self.size if after is None or after.mapped else self.size + after.size


_EDGE = _Block(0, 0, _Pool(0, small=True), _Segment(0, 0))
"""Placeholder for a block in search keys; `_BELOW_ALL` sorts before every real address."""


class _Range(NamedTuple):
    """A range of addresses, reserved by the driver or unused."""

    start: int
    end: int


class _Addresses:
    """Model of the addresses that `cudaMalloc` returns, as observed with driver 580 on Linux (NOTES.md).

    The driver reserves ranges in multiples of 32 MiB. A new range goes right below the lowest one, or
    to the top of the highest hole that is large enough. A segment starts at the start of its new range.
    Later segments first use the remaining space of the ranges, lowest address first. An empty range
    becomes a hole.
    """

    __slots__ = ("_floor", "_holes", "_ranges", "_spare", "_used")

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._holes: list[_Range] = []
        self._ranges: list[_Range] = []
        self._used: dict[int, int] = {}
        """Bytes in use, by the start of the range."""
        self._spare: list[_Range] = []
        """Remaining space of the ranges. All three lists are sorted by address."""

    def take(self, size: int) -> int:
        """Return the start address of a new segment."""
        for at, (start, end) in enumerate(self._spare):
            if end - start >= size:
                self._spare[at : at + 1] = [_Range(start + size, end)] if end - start > size else []
                self._used[self._range_at(start).start] += size
                return start
        home = self._reserve_range(-(-size // _ADDRESS_STEP) * _ADDRESS_STEP)
        insort(self._ranges, home)
        self._used[home.start] = size
        if home.start + size < home.end:
            insort(self._spare, _Range(home.start + size, home.end))
        return home.start

    def give_back(self, start: int, size: int) -> None:
        """Free the addresses of a released segment."""
        home = self._range_at(start)
        self._used[home.start] -= size
        _insert_range(self._spare, _Range(start, start + size), within=home)
        if self._used[home.start]:
            return
        del self._used[home.start]
        self._ranges.remove(home)
        self._spare.remove(home)
        _insert_range(self._holes, home)
        if self._holes[0].start == self._floor:
            self._floor = self._holes.pop(0).end

    def state(self) -> Hashable:
        """Return everything that determines the addresses of later segments."""
        return self._floor, tuple(self._holes), tuple(self._ranges), tuple(self._spare)

    def _range_at(self, address: int) -> _Range:
        return self._ranges[bisect_right(self._ranges, (address, _NEVER * _NEVER)) - 1]

    def _reserve_range(self, size: int) -> _Range:
        for at in reversed(range(len(self._holes))):
            start, end = self._holes[at]
            if end - start >= size:
                self._holes[at : at + 1] = [_Range(start, end - size)] if end - start > size else []
                return _Range(end - size, end)
        self._floor -= size
        return _Range(self._floor, self._floor + size)


def _insert_range(ranges: list[_Range], new: _Range, within: _Range | None = None) -> None:
    """Insert a range into a sorted list, merged with adjacent ranges."""
    at = bisect_left(ranges, new)
    first, last, start, end = at, at, new.start, new.end
    if at and ranges[at - 1].end == start and (within is None or start > within.start):
        first, start = at - 1, ranges[at - 1].start
    if at < len(ranges) and ranges[at].start == end and (within is None or end < within.end):
        last, end = at + 1, ranges[at].end
    ranges[first:last] = [_Range(start, end)]


class CachingAllocator:
    """The caching allocator of one device, driven event by event; most callers use `replay`."""

    def __init__(self, config: AllocatorConfig, *, segment_addresses: Iterable[int] = ()) -> None:
        self.config = config
        self.allocated = 0
        self.requested = 0
        self.reserved = 0
        self.num_segments = 0
        self.num_retries = 0
        self._peak_allocated = 0
        self._peak_requested = 0
        self._peak_reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._live: dict[int, _Block | None] = {}
        self._seen: set[int] = set()
        self._short = 0
        self._made = 0
        self._next_addresses = list(segment_addresses)[::-1]
        self._given_addresses = set(self._next_addresses)
        self._top = _FIRST_ADDRESS + max(self._next_addresses, default=0)
        lowest = min(self._next_addresses, default=_FIRST_ADDRESS)
        self._addresses = _Addresses(lowest // _ADDRESS_STEP * _ADDRESS_STEP)
        self._oversize = _NEVER if config.max_split_size is None else config.max_split_size
        slack = config.max_non_split_rounding
        self._slack = config.large_segment_size if slack is None else slack
        self._plain_rounding = config.roundup_power2_divisions in (0, 1)
        share, limit = config.garbage_collection_threshold, config.limit_bytes
        self._collects = share is not None and limit is not None
        self._large_searches = 0
        self._is_plain = not self._collects and not config.expandable and self._oversize == _NEVER
        """Whether the smallest free block that is large enough is always taken."""

    def apply(self, event: Event) -> int:
        """Apply one event; return the number of missing bytes, 0 on success."""
        kind, ident, size, stream = event
        if kind == "alloc":
            return self.alloc(ident, size, stream)
        if kind == "free":
            self.free(ident)
        elif kind == "empty_cache":
            self.empty_cache()
        else:
            raise ValueError(f"unknown kind {kind!r}: use 'alloc', 'free' or 'empty_cache'")
        return 0

    def alloc(self, ident: int, size: int, stream: int = 0) -> int:
        """Find or create a block; return the number of missing bytes, 0 on success.

        A size of zero takes no memory and is not counted, as in torch, but its id is live.
        """
        if ident in self._live:
            raise ValueError(f"id {ident} is live already: free it first, or use a new id")
        if not 0 < size < ONE_EXBIBYTE:
            return self._alloc_empty_or_huge(ident, size)
        rounded = (size + 511) & -512 if self._plain_rounding else round_size(size, self.config)
        pool = self._pools.get((stream, rounded <= SMALL_SIZE)) or self._add_pool(stream, rounded)
        if self._is_plain:
            # As `_take_cached`, without the calls: a replay has tens of thousands of events.
            free = pool.free
            at = bisect_left(free, (rounded,))
            block = free.pop(at)[2] if at < len(free) else self._allocate_new(pool, rounded)
        else:
            block = self._take_cached(pool, rounded) or self._allocate_new(pool, rounded)
        if block is None:
            return self._short
        spare = block.size - rounded
        if spare >= MIN_BLOCK and should_split(spare, rounded, self.config):
            block = self._split_front(block, rounded)
        block.live = True
        block.requested = size
        self._live[ident] = block
        self._seen.add(ident)
        self.allocated = allocated = self.allocated + block.size
        self.requested = requested = self.requested + size
        if allocated > self._peak_allocated:  # noqa: PLR1730 - a call takes longer
            self._peak_allocated = allocated
        if requested > self._peak_requested:  # noqa: PLR1730
            self._peak_requested = requested
        return 0

    def free(self, ident: int) -> None:
        """Return a live block to its pool, merged with free neighbours."""
        try:
            block = self._live.pop(ident)
        except KeyError:
            raise ValueError(self._explain_not_live(ident)) from None
        if block is None:
            return
        self.allocated -= block.size
        self.requested -= block.requested
        block.live = False
        free = block.pool.free
        before, after = block.prev, block.next
        # As `_merge` and `_add_to_pool`, without the calls.
        if before is not None and not before.live and before.mapped:
            del free[bisect_left(free, (before.size, before.address))]
            block.address = before.address
            block.size += before.size
            block.prev = before = before.prev
            if before is not None:
                before.next = block
        if after is not None and not after.live and after.mapped:
            del free[bisect_left(free, (after.size, after.address))]
            block.size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        block.since = self._large_searches
        insort(free, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """Release every segment, or page of an expandable one, without live blocks."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.config.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def reset_peaks(self) -> ReplayPeaks:
        """Return the peaks so far and reset them to the current values."""
        peaks = ReplayPeaks(self._peak_allocated, self._peak_requested, self._peak_reserved)
        self._peak_allocated = self.allocated
        self._peak_requested = self.requested
        self._peak_reserved = self.reserved
        return peaks

    def place(self, ident: int) -> BlockPlace | None:
        """Return the position of a live block; None for a block of size zero."""
        if ident not in self._live:
            raise ValueError(self._explain_not_live(ident))
        block = self._live[ident]
        if block is None:
            return None
        return BlockPlace(block.segment.ordinal, block.address - block.segment.base, block.size)

    def state(self, names: Mapping[int, int]) -> Hashable:
        """Return all state that later events depend on, to compare two moments of one replay.

        `names` maps ids of blocks that have the same role at both moments to a common id. The age of blocks
        is left out: only garbage collection uses it.
        """
        live = sorted((names.get(key, key), block.address) for key, block in self._live.items() if block)
        pools = tuple(
            (key, tuple(entry[:2] for entry in pool.free), tuple(at for at, _ in pool.unmapped))
            for key, pool in self._pools.items()
        )
        return tuple(live), pools, self._addresses.state()

    def layout(self) -> list[Span]:
        """Return every block, sorted by address."""
        pools = self._pools.values()
        live = (block for block in self._live.values() if block is not None)
        idle = (block for pool in pools for _, _, block in pool.free)
        unmapped = (block for pool in pools for _, block in pool.unmapped)
        spans = [_span(block) for block in chain(live, idle, unmapped)]
        return sorted(spans, key=lambda span: span.address)

    def _alloc_empty_or_huge(self, ident: int, size: int) -> int:
        if size < 0:
            raise ValueError(f"size {size} is negative: give the bytes asked for")
        if size:
            return size - (self.config.capacity_bytes or 0)
        self._live[ident] = None
        self._seen.add(ident)
        return 0

    def _explain_not_live(self, ident: int) -> str:
        if ident in self._seen:
            return f"id {ident} was freed already: drop the second free"
        return f"id {ident} was never allocated: its alloc must come first"

    def _add_pool(self, stream: int, rounded: int) -> _Pool:
        small = rounded <= SMALL_SIZE
        pool = _Pool(SMALL_BUFFER if small else self.config.large_segment_size, small=small)
        self._pools[stream, small] = pool
        return pool

    def _add_to_pool(self, block: _Block) -> None:
        block.since = self._large_searches
        insort(block.pool.free, (block.size, block.address, block))

    def _take_cached(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block that is large enough, lowest address first (`get_free_block`)."""
        if self._collects and not pool.small:
            self._large_searches += 1
        free = pool.free
        at = bisect_left(free, (size, _BELOW_ALL, _EDGE))
        if at == len(free):
            return None
        if self.config.expandable:
            at = _skip_growable(free, at)
        found_size = free[at][0]
        if found_size >= (self._oversize if size < self._oversize else size + self._slack):
            return None
        return free.pop(at)[2]

    def _split_front(self, block: _Block, size: int) -> _Block:
        """Split the first `size` bytes off a free block; return the rest to the pool."""
        address, before, pool = block.address, block.prev, block.pool
        front = _Block(address, size, pool, block.segment)
        front.prev, front.next = before, block
        if before is not None:
            before.next = front
        block.prev = front
        block.address = address = address + size
        block.size = size = block.size - size
        block.since = self._large_searches
        insort(pool.free, (size, address, block))
        return front

    def _allocate_new(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of new memory, releasing cached memory if necessary (`malloc`)."""
        if self._collects:
            self._collect_garbage()
        block = self._reserve(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._reserve(pool, size)
        return block

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        """Try once to get new memory (`alloc_block`).

        The memory fraction is checked against a whole segment, even if an expandable one would map
        less.
        """
        whole = segment_size(size, self.config)
        limit = self.config.limit_bytes
        if limit is not None and self.reserved + whole > limit:
            self._short = self.reserved + whole - limit
            return None
        if self.config.expandable:
            return self._expand(pool, size)
        if not self._claim(whole):
            return None
        segment = self._new_segment(whole)
        return _Block(segment.base, whole, pool, segment)

    def _claim(self, size: int) -> bool:
        """Reserve bytes of the device; return False if it has too few."""
        capacity = self.config.capacity_bytes
        after = self.reserved + size
        if capacity is not None and after > capacity:
            self._short = after - capacity
            return False
        self.reserved = after
        self._peak_reserved = max(self._peak_reserved, after)
        return True

    def _new_segment(self, size: int) -> _Segment:
        if self._next_addresses:
            base = self._next_addresses.pop()
        elif self.config.expandable:
            base = self._top
            self._top += size
        else:
            base = self._addresses.take(size)
        segment = _Segment(self._made, base)
        self._made += 1
        self.num_segments += 1
        return segment

    def _release(self, block: _Block) -> None:
        """Release a whole segment (`release_block`)."""
        _remove_from_pool(block)
        self.reserved -= block.size
        self.num_segments -= 1
        if block.address not in self._given_addresses:
            self._addresses.give_back(block.address, block.size)

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Release one large enough oversize block, or the largest ones until there is enough.

        Only with `max_split_size` (`release_available_cached_blocks`). Blocks of expandable
        segments are skipped, so it never helps with those.
        """
        if self._oversize == _NEVER or self.config.expandable:
            return False
        needed = max(size, self._oversize)
        at = bisect_left(pool.free, (needed, _BELOW_ALL, _EDGE))
        if at < len(pool.free):
            self._release(pool.free[at][2])
            return True
        released = 0
        while at and released < needed and pool.free[at - 1][0] >= self._oversize:
            at -= 1
            released += pool.free[at][0]
            self._release(pool.free[at][2])
        return released >= needed

    def _collect_garbage(self) -> None:
        """Release idle large segments, oldest first (`garbage_collect_cached_blocks`).

        A block's age is the number of searches of the large pool since it was freed. Each round
        releases all blocks of at least the mean age, until enough is free or none is left.
        """
        share = self.config.garbage_collection_threshold or 0.0
        excess = self.reserved - int(share * (self.config.limit_bytes or 0))
        pools = [pool for pool in self._pools.values() if not pool.small]
        idle = [block for pool in pools for _, _, block in pool.free if _is_whole_segment(block)]
        while excess > 0 and idle:
            mean = sum(self._large_searches - block.since for block in idle) / len(idle)
            old = [block for block in idle if self._large_searches - block.since >= mean]
            idle = [block for block in idle if self._large_searches - block.since < mean]
            for block in old:
                excess -= block.size
                self._release(block)

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block at the lowest address where mapping pages gives enough room."""
        block = self._find_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None  # noqa: S101 - _find_room counted the room behind the block
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        _remove_from_pool(block)
        return block

    def _find_room(self, pool: _Pool, size: int) -> _Block:
        """Return the first free or unmapped block with enough address space (`find_expandable_block`)."""
        for _, hole in pool.unmapped:
            before = hole.prev
            start = hole if before is None or before.live else before
            room = 0
            block: _Block | None = start
            while block is not None and not block.live and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return start
        return self._new_range(pool)

    def _new_range(self, pool: _Pool) -> _Block:
        """Reserve unmapped addresses for 9/8 of the device's memory."""
        total = self.config.capacity_bytes
        needed = _NEVER if total is None else total + total // 8
        size = max(1, -(-needed // pool.page)) * pool.page
        segment = self._new_segment(size)
        block = _Block(segment.base, size, pool, segment)
        block.mapped = False
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Map whole pages at the front of an unmapped block; all of them or none."""
        pool = block.pool
        mapped = -(-size // pool.page) * pool.page
        if not self._claim(mapped):
            return False
        _remove_from_pool(block)
        block.mapped = True
        if mapped < block.size:
            rest = _Block(block.address + mapped, block.size - mapped, pool, block.segment)
            rest.mapped = False
            rest.link_between(block, block.next)
            insort(pool.unmapped, (rest.address, rest))
            block.size = mapped
        _merge(block, block.prev)
        _merge(block, block.next)
        self._add_to_pool(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Unmap the pages that are entirely inside a free block (`unmap_block`)."""
        pool, base = block.pool, block.segment.base
        start = base + -(-(block.address - base) // pool.page) * pool.page
        end = base + (block.address + block.size - base) // pool.page * pool.page
        if start >= end:
            return
        _remove_from_pool(block)
        if block.address < start:
            before = _Block(block.address, start - block.address, pool, block.segment)
            before.link_between(block.prev, block)
            self._add_to_pool(before)
        if block.address + block.size > end:
            after = _Block(end, block.address + block.size - end, pool, block.segment)
            after.link_between(block, block.next)
            self._add_to_pool(after)
        block.address, block.size, block.mapped = start, end - start, False
        self.reserved -= block.size
        _merge(block, block.prev)
        _merge(block, block.next)
        if _is_whole_segment(block):
            self.num_segments -= 1
        else:
            insort(pool.unmapped, (block.address, block))


def _is_whole_segment(block: _Block) -> bool:
    return block.prev is None and block.next is None


def _span(block: _Block) -> Span:
    state: Literal["live", "free", "unmapped"] = "free" if block.mapped else "unmapped"
    state = "live" if block.live else state
    return Span(block.segment.ordinal, block.address, block.size, state)


def _remove_from_pool(block: _Block) -> None:
    """Remove an idle block from its pool."""
    pool = block.pool
    if block.mapped:
        del pool.free[bisect_left(pool.free, (block.size, block.address, block))]
    else:
        del pool.unmapped[bisect_left(pool.unmapped, (block.address, block))]


def _merge(block: _Block, neighbour: _Block | None) -> None:
    """Merge with a neighbour that is idle and mapped (or unmapped) like this block."""
    if neighbour is None or neighbour.live or neighbour.mapped is not block.mapped:
        return
    _remove_from_pool(neighbour)
    if neighbour is block.prev:
        block.address = neighbour.address
        block.link_between(neighbour.prev, block.next)
    else:
        block.link_between(block.prev, neighbour.next)
    block.size += neighbour.size


def _skip_growable(free: list[tuple[int, int, _Block]], at: int) -> int:
    """Skip blocks that can still grow: a block counts with the size that it could reach."""
    while at + 1 < len(free) and free[at + 1][2].reachable_size() < free[at][2].reachable_size():
        at += 1
    return at
