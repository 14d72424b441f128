"""Replays allocations and frees through the rules of PyTorch's CUDA caching allocator.

    replay([("alloc", 1, 3 << 20, 0), ("free", 1, 0, 0)]).peak_reserved    # 20 MiB

What is covered, as torch 2.11 to 2.13 do it (c10/cuda/CUDACachingAllocator.cpp): rounding of sizes,
the small and the large pool of each stream, best fit, splitting and merging, `max_split_size`,
`garbage_collection_threshold`, `roundup_power2_divisions`, expandable segments with mapping and
unmapping of pages, the memory fraction, and the chain of retries before out of memory.

What is not covered: private pools (CUDA graphs, `torch.cuda.MemPool`), the `cudaMallocAsync`
backend, settings changed during the run, and the time at which a block used on another stream
(`record_stream`) comes back: the caller puts the "free" where the block becomes reusable. The real
`allocated` falls when the free is asked for, so it may be lower than ours in between.

Two assumptions. Segments lie where `_Addresses` says: addresses decide only between free blocks of
equal size (which still moved a real peak by 4.5%), but the driver promises nothing, so
`segment_addresses` takes known ones. And the driver gives exactly what is asked for until
`capacity_bytes` is used up: what it keeps for itself is for the caller to take off.
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
"""The largest request, once rounded, that the small pool serves; and the largest remainder that a
block of the large pool keeps rather than splits off."""
SMALL_BUFFER = 2 << 20
"""The segment, or the page of an expandable segment, of the small pool."""
MIN_LARGE_ALLOC = 10 << 20
"""From here on a request gets a segment of its own size; below it, one of `large_segment_size`."""
ROUND_LARGE = 2 << 20
"""Segments of their own size are rounded up to a multiple of this."""
LARGE_SEGMENT = 20 << 20
"""The default of `large_segment_size`; also the page of a large expandable segment."""
ONE_EXBIBYTE = 1 << 60
"""The real allocator refuses this size and more without looking."""

_POWER2_INTERVALS = 16
_POWER2_FIRST = SMALL_SIZE.bit_length() - 1
_ADDRESS_STEP = 32 << 20
_FIRST_ADDRESS = 1 << 64
_NEVER = 1 << 62
_BELOW_ALL = -(1 << 100)

Kind = Literal["alloc", "free", "empty_cache"]
Event = tuple[Kind, int, int, int]
"""Kind, id, size in bytes, stream. "free" reads only the id, "empty_cache" none of the three.
Parallel lists become events with `zip(kinds, ids, sizes, streams)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorConfig:
    """The allocator's settings, in bytes where the environment variable says MB.

    Config(expandable=True, capacity_bytes=79 << 30)    # expandable_segments:True on 79 GiB
    """

    expandable: bool = False
    """`expandable_segments`."""
    max_split_size: int | None = None
    """`max_split_size_mb`: larger blocks are never split. None: all may be."""
    max_non_split_rounding: int | None = None
    """`max_non_split_rounding_mb`: how much larger than the request an oversize block may be. None:
    as `large_segment_size`, the default."""
    large_segment_size: int = LARGE_SEGMENT
    """`large_segment_size_mb`."""
    roundup_power2_divisions: int | tuple[int, ...] = 0
    """Steps between two powers of two: one number for all sizes, or 16 for 1 MiB, 2 MiB, ... 32 GiB
    and more (what lies below 1 MiB goes with the first). 0 and 1: off."""
    garbage_collection_threshold: float | None = None
    """The share of `limit_bytes` above which idle segments are freed. Without a limit the real
    allocator ignores it, and so do we."""
    limit_bytes: int | None = None
    """What `torch.cuda.set_per_process_memory_fraction` allows, when the fraction is below 1."""
    capacity_bytes: int | None = None
    """Device memory that this allocator can have. None: without end."""

    def __post_init__(self) -> None:
        """Refuse what the real parser refuses."""
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
    """The allocation that could not be had, after everything cached was given back."""

    index: int
    """Which event, counted from 0."""
    requested_bytes: int
    """What it asked for, before rounding."""
    short_bytes: int
    """How much more capacity (or limit) that last attempt needed."""


class ReplayPeaks(NamedTuple):
    """The highest values of one stretch of events, as torch counts them."""

    allocated: int
    """`torch.cuda.max_memory_allocated`: sum of block sizes, unsplit remainders included."""
    requested: int
    """`requested_bytes.all.peak`: sum of the sizes asked for."""
    reserved: int
    """`torch.cuda.max_memory_reserved`: segments, or mapped pages of expandable ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What the allocator did. After out of memory: what it had done until then."""

    windows: tuple[ReplayPeaks, ...]
    """Peaks of each stretch between resets; one where there was none."""
    allocated: int
    """At the end."""
    requested: int
    """At the end."""
    reserved: int
    """At the end."""
    num_segments: int
    """Segments held at the end; an expandable segment counts once, however far it has grown.
    (torch's own `segment.all.current` leaves expandable ones out.)"""
    num_retries: int
    """Cache flushes forced by a failed attempt: torch's `num_alloc_retries`."""
    out_of_memory: OutOfMemory | None
    """Where the replay had to stop, if it had to."""

    @property
    def peak_allocated(self) -> int:
        """Since the last reset, as torch would report it at the end."""
        return self.windows[-1].allocated

    @property
    def peak_requested(self) -> int:
        """Since the last reset."""
        return self.windows[-1].requested

    @property
    def peak_reserved(self) -> int:
        """Since the last reset."""
        return self.windows[-1].reserved


def replay(
    events: Iterable[Event],
    config: AllocatorConfig | None = None,
    *,
    reset_peak_at: Iterable[int] = (),
    segment_addresses: Iterable[int] = (),
) -> Replay:
    """Run the events through a fresh allocator.

    replay(events, Config(expandable=True)).peak_reserved
    replay(zip(kinds, ids, sizes, streams), reset_peak_at=[len(kinds) // 2])

    Args:
        events: what happens, in order.
        config: the allocator's settings; None is torch's default.
        reset_peak_at: before which events the peaks fall back to the current values, as
            `torch.cuda.reset_peak_memory_stats` does; the number of events resets after the last.
        segment_addresses: where the first segments lie, in order of creation, when it is known.

    Raises:
        ValueError: for an event that cannot happen, with its index.
    """
    allocator = CachingAllocator(config or AllocatorConfig(), segment_addresses=segment_addresses)
    resets = sorted(set(reset_peak_at))
    if resets and resets[0] < 0:
        raise ValueError(f"reset_peak_at={resets[0]}: indices count from 0")
    windows: list[ReplayPeaks] = []
    failed: OutOfMemory | None = None
    index = -1
    pending = set(resets)
    for index, event in enumerate(events):
        if index in pending:
            windows.append(allocator.reset_peaks())
        try:
            short = allocator.apply(event)
        except ValueError as error:
            raise ValueError(f"event {index} {event!r}: {error}") from error
        if short:
            failed = OutOfMemory(index=index, requested_bytes=event[2], short_bytes=short)
            break
    if failed is None and resets and resets[-1] > index:
        if resets[-1] > index + 1:
            raise ValueError(f"reset_peak_at={resets[-1]}: there are only {index + 1} events")
        windows.append(allocator.reset_peaks())
    return _summary(allocator, windows, failed)


def _summary(allocator: CachingAllocator, windows: list[ReplayPeaks], failed: OutOfMemory | None) -> Replay:
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
    """The block a request needs: the next multiple of 512, or of a share of its power of two.

    With 4 divisions, 1200 KiB lies between 1024 and 2048 KiB, whose steps are 256 KiB: 1280 KiB.
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
    """What `cudaMalloc` is asked for when no cached block serves a rounded size."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def splits(remaining: int, size: int, config: AllocatorConfig) -> bool:
    """Whether a block with `remaining` bytes beyond the rounded size is cut in two.

    In the small pool and in expandable segments any remainder of 512 bytes is cut off. In the large
    pool up to 1 MiB stays with the block, and counts as allocated.
    """
    if size <= SMALL_SIZE or config.expandable:
        return remaining >= MIN_BLOCK
    cap = config.max_split_size
    return remaining > SMALL_SIZE and (cap is None or size < cap)


class BlockPlace(NamedTuple):
    """Where a live block lies."""

    segment: int
    """The how-manieth segment ever made, from 0."""
    offset: int
    """Bytes from the segment's start."""
    size: int
    """The block's size: the rounded request, and a remainder that was not split off."""


class Span(NamedTuple):
    """One block of the layout."""

    segment: int
    address: int
    size: int
    state: Literal["live", "free", "unmapped"]


class _Segment:
    """One `cudaMalloc`, or one reserved address range."""

    __slots__ = ("base", "ordinal")

    def __init__(self, ordinal: int, base: int) -> None:
        self.ordinal = ordinal
        self.base = base


class _Pool:
    """The blocks of one size class on one stream that are not in use."""

    __slots__ = ("free", "page", "small", "unmapped")

    def __init__(self, page: int, *, small: bool) -> None:
        self.small = small
        self.page = page
        self.free: list[tuple[int, int, _Block]] = []
        """By size, then by address, which no two share: the third is never compared."""
        self.unmapped: list[tuple[int, _Block]] = []
        """By address."""


class _Block:
    """A stretch of a segment, linked to its neighbours."""

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

    def put_after(self, before: _Block | None, after: _Block | None) -> None:
        """Link in between two neighbours, either of which may be missing."""
        self.prev = before
        self.next = after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def reach(self) -> int:
        """The size, and what could be mapped right behind it."""
        after = self.next
        return self.size if after is None or after.mapped else self.size + after.size


_EDGE = _Block(0, 0, _Pool(0, small=True), _Segment(0, 0))
"""Stands in a search key where a block would; `_BELOW_ALL` sorts before every real address."""


class _Range(NamedTuple):
    """A stretch of addresses: one that the driver set aside, or an unused one."""

    start: int
    end: int


class _Addresses:
    """Where `cudaMalloc` puts segments, as seen with driver 580 on Linux (NOTES.md).

    The driver sets addresses aside in ranges of whole 32 MiB, each right below the lowest one, or
    at the top of the highest hole that holds it. A segment lies at the start of its new range. What
    is left of the ranges serves later segments first, lowest address first. A range that holds
    nothing any more becomes a hole.
    """

    __slots__ = ("_floor", "_holes", "_ranges", "_spare", "_used")

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._holes: list[_Range] = []
        self._ranges: list[_Range] = []
        self._used: dict[int, int] = {}
        """Bytes in use, by the start of the range."""
        self._spare: list[_Range] = []
        """What is left of the ranges. All three lists: by address."""

    def take(self, size: int) -> int:
        """Where a new segment begins."""
        for at, (start, end) in enumerate(self._spare):
            if end - start >= size:
                self._spare[at : at + 1] = [_Range(start + size, end)] if end - start > size else []
                self._used[self._home(start).start] += size
                return start
        home = self._set_aside(-(-size // _ADDRESS_STEP) * _ADDRESS_STEP)
        insort(self._ranges, home)
        self._used[home.start] = size
        if home.start + size < home.end:
            insort(self._spare, _Range(home.start + size, home.end))
        return home.start

    def give_back(self, start: int, size: int) -> None:
        """A segment is gone."""
        home = self._home(start)
        self._used[home.start] -= size
        _join(self._spare, _Range(start, start + size), within=home)
        if self._used[home.start]:
            return
        del self._used[home.start]
        self._ranges.remove(home)
        self._spare.remove(home)
        _join(self._holes, home)
        if self._holes[0].start == self._floor:
            self._floor = self._holes.pop(0).end

    def state(self) -> Hashable:
        """What decides where the next segments lie."""
        return self._floor, tuple(self._holes), tuple(self._ranges), tuple(self._spare)

    def _home(self, address: int) -> _Range:
        return self._ranges[bisect_right(self._ranges, (address, _NEVER * _NEVER)) - 1]

    def _set_aside(self, size: int) -> _Range:
        for at in reversed(range(len(self._holes))):
            start, end = self._holes[at]
            if end - start >= size:
                self._holes[at : at + 1] = [_Range(start, end - size)] if end - start > size else []
                return _Range(end - size, end)
        self._floor -= size
        return _Range(self._floor, self._floor + size)


def _join(ranges: list[_Range], new: _Range, within: _Range | None = None) -> None:
    """Put a stretch into a sorted list, as one with those that it touches."""
    at = bisect_left(ranges, new)
    first, last, start, end = at, at, new.start, new.end
    if at and ranges[at - 1].end == start and (within is None or start > within.start):
        first, start = at - 1, ranges[at - 1].start
    if at < len(ranges) and ranges[at].start == end and (within is None or end < within.end):
        last, end = at + 1, ranges[at].end
    ranges[first:last] = [_Range(start, end)]


class CachingAllocator:
    """The caching allocator of one device, one step at a time. `replay` is the usual way in."""

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
        self._given = list(segment_addresses)[::-1]
        self._known = set(self._given)
        self._top = _FIRST_ADDRESS + max(self._given, default=0)
        lowest = min(self._given, default=_FIRST_ADDRESS)
        self._addresses = _Addresses(lowest // _ADDRESS_STEP * _ADDRESS_STEP)
        self._oversize = _NEVER if config.max_split_size is None else config.max_split_size
        slack = config.max_non_split_rounding
        self._slack = config.large_segment_size if slack is None else slack
        self._plain_rounding = config.roundup_power2_divisions in (0, 1)
        share, limit = config.garbage_collection_threshold, config.limit_bytes
        self._collects = share is not None and limit is not None
        self._large_searches = 0

    def apply(self, event: Event) -> int:
        """Do what one event says; the bytes that were missing, 0 when all went well."""
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
        """Find or make a block; the bytes that were missing if none could be had, else 0.

        A size of zero takes nothing and counts nothing, as in the real one, but its id is live.
        """
        if ident in self._live:
            raise ValueError(f"id {ident} is live already: free it first, or use a new id")
        if not 0 < size < ONE_EXBIBYTE:
            return self._alloc_odd(ident, size)
        rounded = (size + 511) & -512 if self._plain_rounding else round_size(size, self.config)
        pool = self._pools.get((stream, rounded <= SMALL_SIZE)) or self._add_pool(stream, rounded)
        block = self._cached(pool, rounded) or self._grown(pool, rounded)
        if block is None:
            return self._short
        if block.size != rounded and splits(block.size - rounded, rounded, self.config):
            block = self._front(block, rounded)
        block.live = True
        block.requested = size
        self._live[ident] = block
        self._seen.add(ident)
        self._count(block.size, size)
        return 0

    def free(self, ident: int) -> None:
        """Put a live block back into its pool, merged with free neighbours."""
        try:
            block = self._live.pop(ident)
        except KeyError:
            raise ValueError(self._not_live(ident)) from None
        if block is None:
            return
        self.allocated -= block.size
        self.requested -= block.requested
        block.live = False
        _merge(block, block.prev)
        _merge(block, block.next)
        self._cache(block)

    def empty_cache(self) -> None:
        """Give back every segment, or page of an expandable one, that holds no live block."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.config.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def reset_peaks(self) -> ReplayPeaks:
        """The peaks so far; from here on they start from the current values."""
        peaks = ReplayPeaks(self._peak_allocated, self._peak_requested, self._peak_reserved)
        self._peak_allocated = self.allocated
        self._peak_requested = self.requested
        self._peak_reserved = self.reserved
        return peaks

    def place(self, ident: int) -> BlockPlace | None:
        """Where a live block lies; None for one of size zero."""
        if ident not in self._live:
            raise ValueError(self._not_live(ident))
        block = self._live[ident]
        if block is None:
            return None
        return BlockPlace(block.segment.ordinal, block.address - block.segment.base, block.size)

    def state(self, names: Mapping[int, int]) -> Hashable:
        """Everything that decides what happens next, to compare with another moment of the same replay.

        `names` gives other ids than their own to blocks that play the same part at both moments. The age of
        blocks, which only garbage collection looks at, is left out.
        """
        live = sorted((names.get(key, key), block.address) for key, block in self._live.items() if block)
        pools = tuple(
            (key, tuple(one[:2] for one in pool.free), tuple(at for at, _ in pool.unmapped))
            for key, pool in self._pools.items()
        )
        return tuple(live), pools, self._addresses.state()

    def layout(self) -> list[Span]:
        """Every block, by address."""
        pools = self._pools.values()
        live = (block for block in self._live.values() if block is not None)
        idle = (block for pool in pools for _, _, block in pool.free)
        unmapped = (block for pool in pools for _, block in pool.unmapped)
        spans = [_span(block) for block in chain(live, idle, unmapped)]
        return sorted(spans, key=lambda span: span.address)

    def _count(self, size: int, requested: int) -> None:
        self.allocated += size
        self.requested += requested
        self._peak_allocated = max(self._peak_allocated, self.allocated)
        self._peak_requested = max(self._peak_requested, self.requested)

    def _alloc_odd(self, ident: int, size: int) -> int:
        if size < 0:
            raise ValueError(f"size {size} is negative: give the bytes asked for")
        if size:
            return size - (self.config.capacity_bytes or 0)
        self._live[ident] = None
        self._seen.add(ident)
        return 0

    def _not_live(self, ident: int) -> str:
        if ident in self._seen:
            return f"id {ident} was freed already: drop the second free"
        return f"id {ident} was never allocated: its alloc must come first"

    def _add_pool(self, stream: int, rounded: int) -> _Pool:
        small = rounded <= SMALL_SIZE
        pool = _Pool(SMALL_BUFFER if small else self.config.large_segment_size, small=small)
        self._pools[stream, small] = pool
        return pool

    def _cache(self, block: _Block) -> None:
        block.since = self._large_searches
        insort(block.pool.free, (block.size, block.address, block))

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough, lowest address first (`get_free_block`)."""
        if self._collects and not pool.small:
            self._large_searches += 1
        free = pool.free
        at = bisect_left(free, (size, _BELOW_ALL, _EDGE))
        if at == len(free):
            return None
        if self.config.expandable:
            at = _past_growable(free, at)
        found = free[at][0]
        if found >= (self._oversize if size < self._oversize else size + self._slack):
            return None
        return free.pop(at)[2]

    def _front(self, block: _Block, size: int) -> _Block:
        """Cut the first `size` bytes off a free block; the rest goes back to the pool."""
        front = _Block(block.address, size, block.pool, block.segment)
        front.put_after(block.prev, block)
        block.address += size
        block.size -= size
        self._cache(block)
        return front

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """A block that was not cached, after as much freeing as it takes (`malloc`)."""
        if self._collects:
            self._collect()
        block = self._reserve(pool, size)
        if block is None and self._drop_oversize(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._reserve(pool, size)
        return block

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        """One attempt at new memory (`alloc_block`).

        The memory fraction is held against a whole segment, even where an expandable one would map
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
        """Take bytes from the device, if it has them."""
        capacity = self.config.capacity_bytes
        after = self.reserved + size
        if capacity is not None and after > capacity:
            self._short = after - capacity
            return False
        self.reserved = after
        self._peak_reserved = max(self._peak_reserved, after)
        return True

    def _new_segment(self, size: int) -> _Segment:
        if self._given:
            base = self._given.pop()
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
        """Give a whole segment back (`release_block`)."""
        _drop(block)
        self.reserved -= block.size
        self.num_segments -= 1
        if block.address not in self._known:
            self._addresses.give_back(block.address, block.size)

    def _drop_oversize(self, pool: _Pool, size: int) -> bool:
        """Give back one oversize block that suffices, or the largest ones until they do.

        Only with `max_split_size` (`release_available_cached_blocks`); blocks of expandable
        segments are passed over, so with those it never helps.
        """
        if self._oversize == _NEVER or self.config.expandable:
            return False
        wanted = max(size, self._oversize)
        at = bisect_left(pool.free, (wanted, _BELOW_ALL, _EDGE))
        if at < len(pool.free):
            self._release(pool.free[at][2])
            return True
        released = 0
        while at and released < wanted and pool.free[at - 1][0] >= self._oversize:
            at -= 1
            released += pool.free[at][0]
            self._release(pool.free[at][2])
        return released >= wanted

    def _collect(self) -> None:
        """Give back idle large segments, oldest first (`garbage_collect_cached_blocks`).

        A block's age is how many searches of the large pool it has sat through. Each round frees
        all that are at least of mean age, until enough is free or nothing more can be.
        """
        share = self.config.garbage_collection_threshold or 0.0
        excess = self.reserved - int(share * (self.config.limit_bytes or 0))
        pools = [pool for pool in self._pools.values() if not pool.small]
        idle = [block for pool in pools for _, _, block in pool.free if _is_whole(block)]
        while excess > 0 and idle:
            mean = sum(self._large_searches - block.since for block in idle) / len(idle)
            old = [block for block in idle if self._large_searches - block.since >= mean]
            idle = [block for block in idle if self._large_searches - block.since < mean]
            for block in old:
                excess -= block.size
                self._release(block)

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """A block at the lowest address where mapping pages makes enough room."""
        block = self._room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None  # noqa: S101 - _room counted the room behind the block
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        _drop(block)
        return block

    def _room(self, pool: _Pool, size: int) -> _Block:
        """The first free or unmapped block with enough address space (`find_expandable_block`)."""
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
        """Reserve addresses for nine eighths of the device, none of them mapped."""
        total = self.config.capacity_bytes
        wanted = _NEVER if total is None else total + total // 8
        size = max(1, -(-wanted // pool.page)) * pool.page
        segment = self._new_segment(size)
        block = _Block(segment.base, size, pool, segment)
        block.mapped = False
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Back the front of an unmapped block with whole pages; all of them or none."""
        pool = block.pool
        mapped = -(-size // pool.page) * pool.page
        if not self._claim(mapped):
            return False
        _drop(block)
        block.mapped = True
        if mapped < block.size:
            rest = _Block(block.address + mapped, block.size - mapped, pool, block.segment)
            rest.mapped = False
            rest.put_after(block, block.next)
            insort(pool.unmapped, (rest.address, rest))
            block.size = mapped
        _merge(block, block.prev)
        _merge(block, block.next)
        self._cache(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Give back the pages that lie wholly inside a free block (`unmap_block`)."""
        pool, base = block.pool, block.segment.base
        start = base + -(-(block.address - base) // pool.page) * pool.page
        end = base + (block.address + block.size - base) // pool.page * pool.page
        if start >= end:
            return
        _drop(block)
        if block.address < start:
            before = _Block(block.address, start - block.address, pool, block.segment)
            before.put_after(block.prev, block)
            self._cache(before)
        if block.address + block.size > end:
            after = _Block(end, block.address + block.size - end, pool, block.segment)
            after.put_after(block, block.next)
            self._cache(after)
        block.address, block.size, block.mapped = start, end - start, False
        self.reserved -= block.size
        _merge(block, block.prev)
        _merge(block, block.next)
        if _is_whole(block):
            self.num_segments -= 1
        else:
            insort(pool.unmapped, (block.address, block))


def _is_whole(block: _Block) -> bool:
    return block.prev is None and block.next is None


def _span(block: _Block) -> Span:
    state: Literal["live", "free", "unmapped"] = "free" if block.mapped else "unmapped"
    state = "live" if block.live else state
    return Span(block.segment.ordinal, block.address, block.size, state)


def _drop(block: _Block) -> None:
    """Take an idle block out of its pool's list."""
    pool = block.pool
    if block.mapped:
        del pool.free[bisect_left(pool.free, (block.size, block.address, block))]
    else:
        del pool.unmapped[bisect_left(pool.unmapped, (block.address, block))]


def _merge(block: _Block, neighbour: _Block | None) -> None:
    """Swallow a neighbour that is idle and equally mapped."""
    if neighbour is None or neighbour.live or neighbour.mapped is not block.mapped:
        return
    _drop(neighbour)
    if neighbour is block.prev:
        block.address = neighbour.address
        block.put_after(neighbour.prev, block.next)
    else:
        block.put_after(block.prev, neighbour.next)
    block.size += neighbour.size


def _past_growable(free: list[tuple[int, int, _Block]], at: int) -> int:
    """Spare the block that can still grow: it counts as the size it could reach."""
    while at + 1 < len(free) and free[at + 1][2].reach() < free[at][2].reach():
        at += 1
    return at
