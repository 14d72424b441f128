"""What torch.compile would make of an eager step, guessed from the eager trace.

Inductor fuses neighbouring operations that do no arithmetic to speak of into one kernel: what is made and
used up inside of it never reaches memory. Here, operations that no matrix product, attention, convolution or
other library call separates make one kernel. It reads what comes from outside and writes what is read
outside. Three more rules follow torch's own:

* What the eager step keeps for the backward pass, and a kernel there could work out again from what is in
  memory anyway, is not written: the partitioner would rather compute it again.
* A reduction whose result the same kernel needs for every element reads its input a second time, unless a row
  is short enough to stay in a cache.
* Matrix products with awkward sides are padded where that is faster, and convolutions run with channels last.

Running the compiler itself says it better (`trimtab.trace.compiled`), and takes a minute a setting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from functools import lru_cache
from itertools import combinations
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from trimtab.cache import MemoryCache
from trimtab.spec import PARTS, Work
from trimtab.spec.precision import DTYPE_BYTES, FLOAT32, TF32
from trimtab.spec.trace import ENTER, LEAVE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.predict.op_time import Pace, Rates
    from trimtab.spec import Setting, Trace


# Which tensors each operation of a trace reads and makes, as far as the trace tells.
#
# A trace names allocations and operations apart from each other. An allocation carries the name of the
# operation that asked for it, so the two columns can be read side by side, and that says what each operation
# made. What it read is inferred: of the tensors that are there, the latest touched whose sizes add up to the
# bytes that it reads, or those that are given back right after it, as what is kept for the backward pass is.


RECENT = 12
"""Tensors that an operation is taken to choose its inputs from: the last that were touched."""
SOON = 6
"""Events within which a tensor that an operation was the last to read is given back."""
NEAR = 24
"""Entries of the sequence within which the operation is that asked for an allocation."""
OPERANDS = 3
LOOSE = 0.01
"""Share of the bytes read that may be small tensors beside the ones found: biases, means, indices."""
MANY_RESULTS = ("convolution", "attention", "recurrent")
"""Kinds whose results are more than `write_bytes` tells."""
WORKSPACE = PARTS.index("workspace")
OPERAND_PARTS = (PARTS.index("weights"), PARTS.index("inputs"))


class Read(NamedTuple):
    """A tensor, and how much of it is read."""

    tensor: int
    size: int


class Flow(NamedTuple):
    """One entry an operation, in the order of the trace's sequence; tensors are numbers into `sizes`."""

    reads: list[tuple[Read, ...]]
    unknown: list[int]
    """Bytes read of tensors that could not be told: weights, inputs, or what was not found."""
    makes: list[tuple[int, ...]]
    sizes: list[int]
    makers: dict[int, int]
    """The operation that made a tensor."""
    dies: dict[int, int]
    """The operation before which a tensor was given back."""


class FlowShape(NamedTuple):
    """A Flow without its sizes: who makes and reads what, taken to be the same at every micro-batch."""

    reads: list[tuple[TensorRead, ...]]
    rests: list[bool]
    """Whether an operation reads something that could not be told as well."""
    makes: list[tuple[int, ...]]
    makers: dict[int, int]
    dies: dict[int, int]
    rewrites: list[int]
    """Operations in place: each makes one more tensor, numbered after the trace's own."""


class TensorRead(NamedTuple):
    """A tensor that is read, the whole of it or as much as the operation reads."""

    tensor: int
    is_whole: bool


def flow(trace: Trace) -> Flow:
    """Read the last step's operations and allocations side by side."""
    return sized(links(trace), trace)


def links(trace: Trace) -> FlowShape:
    """What of a flow holds for all traces of one program, whatever their sizes."""
    begin = trace.marks.get("step2", 0)
    walk = _Walk(trace, trace.order[begin : trace.marks.get("end", len(trace.order))])
    for place, number in enumerate(trace.sequence):
        walk.pass_by(place, trace.works[number])
    walk.end(len(trace.sequence))
    return walk.found


def sized(known: FlowShape, trace: Trace, only: Iterable[int] | None = None) -> Flow:
    """The flow of a trace whose program has these links; with `only`, what those operations read."""
    works, sequence = trace.works, trace.sequence
    sizes = [*trace.sizes, *(works[sequence[place]].write_bytes for place in known.rewrites)]
    every: list[tuple[Read, ...]] = [()] * len(known.reads)
    unknown = [0] * len(known.reads)
    for place in range(len(known.reads)) if only is None else only:
        found, rests = known.reads[place], known.rests[place]
        wanted = 0
        if rests or not all(whole for _, whole in found):
            wanted = _wanted(works[sequence[place]], sum(sizes[make] for make in known.makes[place]))
        every[place] = tuple([Read(tensor, sizes[tensor] if whole else wanted) for tensor, whole in found])
        if rests:
            unknown[place] = max(0, wanted - sum(size for _, size in every[place]))
    return Flow(every, unknown, known.makes, sizes, known.makers, known.dies)


def _wanted(work: Work, made_bytes: int) -> int:
    """Bytes of what an operation reads; a convolution counts its result too, and each of its passes."""
    if work.kind != "convolution":
        return work.read_bytes
    moved = work.read_bytes // max(1, work.kernels)
    forward = not work.op.endswith("_backward")
    return max(0, moved - made_bytes) if forward else moved


def _standing(trace: Trace) -> set[int]:
    """Weights and inputs that are there when the last step begins."""
    alive: set[int] = set()
    for event in trace.order[: trace.marks.get("step2", 0)]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return {number for number in alive if trace.parts[number] in OPERAND_PARTS}


class _Walk:
    """The walk through both columns."""

    def __init__(self, trace: Trace, events: Sequence[int]) -> None:
        self._trace, self._events = trace, events
        self._at = 0
        self._old = {trace.sizes[one] for one in _standing(trace)}
        """Sizes of what was there before the step: weights and inputs."""
        self._ops = [trace.op_names[one] for one in trace.ops]
        self._places: dict[str, list[int]] = {}
        """Where operations of a name are in the sequence."""
        for place, number in enumerate(trace.sequence):
            self._places.setdefault(trace.works[number].op, []).append(place)
        self._recent: deque[int] = deque()
        """Tensors by when they were last touched, the latest first."""
        self._version: dict[int, int] = {}
        """The tensor that an allocation holds now: writing in place makes another one."""
        self._sizes = list(trace.sizes)
        self.found = FlowShape([], [], [], {}, {}, [])

    def pass_by(self, place: int, work: Work) -> None:
        """One operation: what it made, then what it read."""
        found = self.found
        made = self._made(place, work)
        reads: tuple[TensorRead, ...] = ()
        rests = False
        if work.kernels and work.kind not in ("wait", "optimizer", "collective"):
            reads, rests = self._read(work, made)
        if not made and work.write_bytes and reads:
            made = self._written_over(place, work, reads)
        found.reads.append(reads)
        found.rests.append(rests)
        found.makes.append(made)
        for read in reads:
            self._touch(read.tensor)
        for tensor in sorted(made, key=self._sizes.__getitem__):
            found.makers[tensor] = place
            self._touch(tensor)

    def end(self, place: int) -> None:
        """What is given back after the last operation."""
        while self._at < len(self._events):
            self._next(place)

    def _touch(self, tensor: int) -> None:
        if tensor in self._recent:
            self._recent.remove(tensor)
        self._recent.appendleft(tensor)

    def _next(self, place: int) -> None:
        """Pass one event that is no result: memory given back, or taken by nobody that is known."""
        event = self._events[self._at]
        self._at += 1
        if event < 0:
            tensor = self._version.pop(~event, ~event)
            self.found.dies[tensor] = place
            if tensor in self._recent:
                self._recent.remove(tensor)

    def _made(self, place: int, work: Work) -> tuple[int, ...]:
        """The allocations that bear the operation's name, as many as its results are long."""
        made: list[int] = []
        left = work.write_bytes
        while (ahead := self._ahead(place)) is not None and self._ops[self._events[ahead]] == work.op:
            while self._at < ahead:
                self._next(place)
            made.append(self._events[self._at])
            self._at += 1
            left -= self._trace.sizes[made[-1]]
            if left <= 0 and work.kind not in MANY_RESULTS:
                break
        return tuple(made)

    def _ahead(self, place: int) -> int | None:
        """Where the next result of an operation lies among the events.

        Workspaces are no results, and neither is what no operation near asked for.
        """
        for at in range(self._at, len(self._events)):
            event = self._events[at]
            if event < 0 or self._trace.parts[event] == WORKSPACE:
                continue
            known = self._places.get(self._ops[event], [])
            index = bisect_left(known, place)
            if index < len(known) and known[index] <= place + NEAR:
                return at
        return None

    def _read(self, work: Work, made: tuple[int, ...]) -> tuple[tuple[TensorRead, ...], bool]:
        soon = [one for one in self._dying() if one not in made]
        recent = [one for one, _ in zip(self._recent, range(RECENT), strict=False)]
        there = list(dict.fromkeys([*recent[:1], *soon, *recent]))
        sizes = self._sizes
        wanted = _wanted(work, sum(sizes[number] for number in made))
        chosen, rest = operands(wanted, tuple(sizes[one] for one in there), 1 + len(soon))
        alone = len(chosen) == 1 and chosen[0][1] == sizes[there[chosen[0][0]]]
        if not alone and wanted in self._old:
            # More likely a weight than a coincidence.
            return (), True
        found = tuple(TensorRead(there[index], size == sizes[there[index]]) for index, size in chosen)
        return found, rest > 0

    def _dying(self) -> list[int]:
        """Tensors of this step that are given back within the next events."""
        gone = [~event for event in self._events[self._at : self._at + SOON] if event < 0]
        now = [self._version.get(one, one) for one in gone]
        return [one for one in now if one in self.found.makers]

    def _written_over(self, place: int, work: Work, reads: tuple[TensorRead, ...]) -> tuple[int, ...]:
        """An operation in place: what it wrote over is another tensor from now on."""
        alike = [read.tensor for read in reads if self._sizes[read.tensor] == work.write_bytes]
        if not alike:
            return ()
        dying = set(self._dying())
        same = next((one for one in alike if one not in dying), alike[0])
        holder = next((key for key, version in self._version.items() if version == same), same)
        new = len(self._sizes)
        self._sizes.append(work.write_bytes)
        self.found.rewrites.append(place)
        self._version[holder] = new
        if same in self._recent:
            self._recent.remove(same)
        return (new,)


@lru_cache(maxsize=65536)
def operands(wanted: int, sizes: tuple[int, ...], likely: int = 1) -> tuple[tuple[tuple[int, int], ...], int]:
    """Which of some tensors add up to the bytes read, and what is left over.

    The first ones are the better guess; one of the first `likely` is nearly always among them. Where none
    add up, a part of one is read, as of a view; or some of them, and something unknown beside.

    >>> operands(75, (25, 30, 50))
    (((0, 25), (2, 50)), 0)
    >>> operands(10, (30, 50))
    (((0, 10),), 0)
    """
    if not wanted:
        return (), 0
    room = LOOSE * wanted
    useful = [index for index, size in enumerate(sizes) if room < size <= wanted + room]
    best: tuple[int, ...] = ()
    rank = (True, True, len(sizes))
    for count in range(1, OPERANDS + 1):
        for chosen in combinations(useful, count):
            mine = (chosen[0] >= likely, count == OPERANDS, chosen[-1])
            if mine < rank and abs(sum(sizes[index] for index in chosen) - wanted) <= room:
                best, rank = chosen, mine
    if best:
        return tuple((index, sizes[index]) for index in best), 0
    larger = next((index for index, size in enumerate(sizes) if size > wanted), None)
    if larger is not None and (not useful or larger < useful[0]):
        return ((larger, wanted),), 0
    taken, left = [], wanted
    for index in useful[:OPERANDS]:
        if sizes[index] <= left + room:
            taken.append((index, sizes[index]))
            left -= sizes[index]
    return tuple(taken), max(0, left)


FUSED_KINDS = ("pointwise", "reduction", "gather")
LIBRARY = ("_embedding_bag", "sort", "topk", "nonzero", "ctc_loss", "_unique", "histc", "bincount", "cdist")
"""Parts of the names of operations that inductor calls as they are."""
RANDOM = ("dropout", "bernoulli", "rand", "uniform", "normal_")
"""Of which the numbers drawn are kept: drawing them again would give others."""
IN_CACHE = 2**16
"""Bytes of a row that a kernel finds in a cache when it reads it again."""
WIDE = 1 / 64
"""A reduction that writes this share of what it reads has the step after it within: a norm, a softmax."""
ACROSS = ("batch_norm", "group_norm")
"""Norms whose rows lie all over memory, or are whole images."""
AGAIN = 2.0
"""A tensor is computed again where reading what it follows from moves no more than this times its own bytes,
which writing and reading it would."""
ALIGNED_BYTES = 16
PADDED_GAIN = 1.1
"""Inductor pads where its own measurement says that it is so much faster."""
BALANCE = 0.5
NODES_A_CONVOLUTION = 300
"""In a graph of more operations than this for each convolution, inductor leaves the layout as it is."""
SMALL_CHANNELS = 64
CHANNELS_LAST = 1
NAME = "fused"
SEED = "aten::ones_like"
"""What a backward pass begins with: the gradient of the loss by itself."""


class Roots(NamedTuple):
    """What has to be read from memory: tensors, how much of each, and bytes of what is not known."""

    tensors: dict[int, int]
    unknown: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.tensors.values()) + self.unknown


def fused(trace: Trace, setting: Setting, pace: Pace) -> Trace:
    """The trace with the operations that the compiled step would have; allocations stay the eager ones."""
    known = groups(trace)
    plan = _Plan(trace, known)
    half = setting.dtypes.autocast
    # A step has thousands of calls of libraries, and a hundred different ones.
    calls: dict[tuple[int, bool], tuple[Work, ...]] = {}
    works: list[Work] = []
    places: list[int] = []
    for place, number in enumerate(trace.sequence):
        kept: tuple[Work, ...]
        if not known.inside[place]:
            kept = (trace.works[number],)
        elif place in known.group_of:
            kept = plan.kernels.get(place, ())
        else:
            how = number, half is not None and place >= plan.backward
            if how not in calls:
                work = trace.works[number]
                work = halved(work, half) if half and how[1] else work
                called = _called(work, pace, channels_last=plan.channels_last)
                calls[how] = tuple(work for work in called if work.kernels)
            kept = calls[how]
        works += kept
        places += [place] * len(kept)
    numbers: dict[Work, int] = {}
    sequence = tuple(numbers.setdefault(work, len(numbers)) for work in works)
    return trace.replace(
        works=tuple(numbers),
        sequence=sequence,
        phases={name: sum(place < at for place in places) for name, at in trace.phases.items()},
    )


def halved(work: Work, half: str) -> Work:
    """A matrix product of a compiled backward pass: autocast holds there too, whatever it did before."""
    if work.kind != "matrix" or work.dtype not in (FLOAT32, TF32):
        return work
    alignment = work.dims[4] // 2 if work.dims[4:] and work.dims[4] < ALIGNED_BYTES else ALIGNED_BYTES
    return work.replace(
        dtype=half,
        read_bytes=work.read_bytes // 2,
        write_bytes=work.write_bytes // 2,
        dims=(*work.dims[:4], alignment),
    )


def _called(work: Work, pace: Pace, *, channels_last: bool) -> tuple[Work, ...]:
    """An operation that inductor leaves to a library, as it calls it."""
    if work.kind == "matrix":
        return padded(work, pace)
    if work.kind == "convolution" and channels_last and _is_flat(work):
        return (work.replace(dims=(*work.dims[:4], CHANNELS_LAST, *work.dims[5:])),)
    return (work,)


def padded(work: Work, pace: Pace) -> tuple[Work, ...]:
    """A matrix product as inductor would call it: its sides padded to whole 16 bytes where that is faster.

    Operands with a side to pad are copied before.
    """
    size = DTYPE_BYTES.get(work.dtype, 4)
    unit = ALIGNED_BYTES // size
    batch, rows, columns, inner, *_ = work.dims
    longer = tuple(-(-side // unit) * unit for side in (rows, columns, inner))
    if longer == (rows, columns, inner) or not _is_bound_by_arithmetic(work, pace.target):
        return (work,)
    left = rows * inner if (rows, inner) != (longer[0], longer[2]) else 0
    right = columns * inner if (columns, inner) != (longer[1], longer[2]) else 0
    copied = size * batch * (left + right)
    copy = Work(
        op=NAME, kind="pointwise", dtype=work.dtype, read_bytes=copied, write_bytes=copied, dims=(0, inner)
    )
    even = work.replace(
        dims=(batch, *longer, ALIGNED_BYTES), flops=2 * batch * longer[0] * longer[1] * longer[2]
    )
    faster = pace.seconds(work) > PADDED_GAIN * (pace.seconds(copy) + pace.seconds(even))
    return (copy, even) if faster else (work,)


def _is_bound_by_arithmetic(work: Work, device: Rates) -> bool:
    """As inductor asks: products for each number touched, against half of what the device could do a byte."""
    _, rows, columns, inner, *_ = work.dims
    touched = rows * inner + inner * columns + rows * columns
    return rows * columns * inner > touched * BALANCE * device.peak(work.dtype) / device.bandwidth


def _is_flat(work: Work) -> bool:
    """Whether a convolution is over images: its kernel is a square."""
    area = work.dims[5]
    return isqrt(area) ** 2 == area


def channels_last(works: list[Work]) -> bool:
    """Whether inductor lays images out with channels last in a graph of these operations."""
    found = [work for work in works if work.op.endswith("convolution") and work.kind == "convolution"]
    flat = [one for one in found if _is_flat(one)]
    if not flat or len(works) >= NODES_A_CONVOLUTION * len(found):
        return False
    shapes = [(one.dims[0], one.dims[2], one.dims[3] // one.dims[5], one.dims[5]) for one in flat]
    if any(groups > 1 and inner > 1 for groups, _, inner, _ in shapes):
        return False
    if any(groups * outer * 2 <= inner and area > 1 for groups, outer, inner, area in shapes):
        return False
    return not all(
        groups * outer <= SMALL_CHANNELS and inner <= SMALL_CHANNELS for groups, outer, inner, _ in shapes
    )


def inside(works: list[Work], backward: int, optimizer: int) -> list[bool]:
    """Of each operation, whether it is in a compiled graph: of the model's call, or of its backward pass.

    A loss outside of the model stays eager. Its backward pass comes first, and is taken to have as many
    operations. A trace without calls of modules is taken for all of it; one with calls, none of which is of
    the model, has nothing that torch.compile would compile.
    """
    whole = not any(work.kind == "call" for work in works)
    depth, found = int(whole), []
    eager = 0
    for work in works[:backward]:
        if work.kind == "call" and work.op == ENTER:
            depth, eager = depth + 1, 0
        found.append(depth > 0)
        if work.kind == "call" and work.op == LEAVE:
            depth = max(0, depth - 1)
        eager += work.kernels > 0 and not depth and work.op != SEED
    none = not whole and not any(found)
    for work in works[backward:optimizer]:
        found.append(eager <= 0 and not none)
        eager -= work.kernels > 0
    return [*found, *[False] * (len(works) - len(found))]


class FusionGroups(NamedTuple):
    """Who fuses with whom, which is taken to be the same at every micro-batch of a program."""

    links: FlowShape
    inside: list[bool]
    readers: dict[int, list[int]]
    """Who reads a tensor."""
    group_of: dict[int, int]
    members: dict[int, list[int]]


_GROUPS: MemoryCache[FusionGroups] = MemoryCache(max_entries=32)


def groups(trace: Trace) -> FusionGroups:
    """Return who fuses with whom in a trace; cached, as a plan asks for one program with many sizes.

    Reading a program takes far longer than working out what its kernels move.
    """
    works = [trace.works[number] for number in trace.sequence]
    key = trace.order, tuple(work.op for work in works)
    return _GROUPS.get(key, lambda: _grouped(trace, works))


def _grouped(trace: Trace, works: list[Work]) -> FusionGroups:
    """Groups of connected operations with equally many library calls before them.

    A way from one to another of them through a library call would have one more, so that no kernel waits for
    itself.
    """
    backward = trace.phases.get("backward", len(works))
    compiled = inside(works, backward, trace.phases.get("optimizer", len(works)))
    known = links(trace)
    flow = sized(known, trace)
    readers: dict[int, list[int]] = defaultdict(list)
    for place, reads in enumerate(flow.reads):
        for read in reads:
            readers[read.tensor].append(place)
    levels: dict[int, int] = {}
    mine: dict[int, int] = {}
    parents: dict[int, int] = {}
    floor = highest = 0
    for place, work in enumerate(works):
        if place == backward or work.kind == "wait" or not compiled[place]:
            # Another graph begins here.
            floor = highest + 1
        level = max([floor, *(levels.get(read.tensor, 0) for read in flow.reads[place])])
        fuses = compiled[place] and is_fused(work)
        for tensor in flow.makes[place]:
            levels[tensor] = level if fuses else level + 1
        highest = max(highest, level + 1)
        if fuses:
            mine[place], parents[place] = level, place
            for other in _neighbours(place, work, flow, readers):
                if mine.get(other) == level:
                    parents[_top(parents, other)] = _top(parents, place)
    group_of = {place: _top(parents, place) for place in mine}
    members: dict[int, list[int]] = defaultdict(list)
    for place, name in group_of.items():
        members[name].append(place)
    return FusionGroups(known, compiled, dict(readers), group_of, dict(members))


def is_fused(work: Work) -> bool:
    """Whether an operation becomes a part of a kernel that inductor writes."""
    return work.kernels > 0 and work.kind in FUSED_KINDS and not any(word in work.op for word in LIBRARY)


def _neighbours(place: int, work: Work, flow: Flow, readers: dict[int, list[int]]) -> list[int]:
    """Earlier operations that made what this one reads, or read the same."""
    bulk = max(work.read_bytes, work.write_bytes)
    found = []
    for read in flow.reads[place]:
        maker = flow.makers.get(read.tensor)
        found += [maker] if maker is not None else []
        if 2 * read.size >= bulk:
            found += [other for other in readers[read.tensor] if other < place]
    return found


class _Plan:
    """What each kernel moves."""

    def __init__(self, trace: Trace, known: FusionGroups) -> None:
        self.works = [trace.works[number] for number in trace.sequence]
        self.backward = trace.phases.get("backward", len(self.works))
        self.inside, self.readers = known.inside, known.readers
        self.group_of, self.members = known.group_of, known.members
        own = [work for work, compiled in zip(self.works, self.inside, strict=True) if compiled]
        self.channels_last = channels_last(own)
        self.flow = sized(known.links, trace, known.group_of)
        self.known_roots: dict[int, Roots] = {}
        self.written: set[int] = set()
        """Tensors that kernels write to memory."""
        for place in self.group_of:
            for tensor in self.flow.makes[place]:
                if self._is_written(tensor, place):
                    self.written.add(tensor)
        self.kernels = {max(members): self._kernels(members) for members in self.members.values()}

    def _is_written(self, tensor: int, place: int) -> bool:
        """Whether a tensor that is made inside of a kernel has to reach memory."""
        group = self.group_of[place]
        outside = [reader for reader in self.readers.get(tensor, ()) if self.group_of.get(reader) != group]
        size = self.flow.sizes[tensor]
        if any(one not in self.group_of for one in outside):
            return True
        if outside:
            if any(word in self.works[place].op for word in RANDOM) and tensor == self._drawn(place):
                return True
            later = all(one >= self.backward > place for one in outside)
            found = self.roots(tensor)
            return sum(found.tensors.values()) + found.unknown > size * (AGAIN if later else 1.0)
        if self.readers.get(tensor, ()):
            return False
        dies = self.flow.dies.get(tensor)
        if dies is None:
            return True
        # Who reads it was not found. What lives on into the backward pass is kept there by eager code alone.
        return dies > max(self.members[group]) + 1 and not place < self.backward <= dies

    def _drawn(self, place: int) -> int:
        """What an operation drew: of its results the smallest, a mask."""
        return min(self.flow.makes[place], key=self.flow.sizes.__getitem__)

    def roots(self, tensor: int) -> Roots:
        """What is in memory that a tensor can be worked out from: itself, where it is."""
        maker = self.flow.makers.get(tensor)
        if tensor in self.written or maker is None or maker not in self.group_of:
            return Roots({tensor: self.flow.sizes[tensor]}, 0)
        if tensor not in self.known_roots:
            self.known_roots[tensor] = self._sources([maker])
        return self.known_roots[tensor]

    def _sources(self, places: list[int], inner: frozenset[int] = frozenset()) -> Roots:
        """What operations read from memory, `inner` tensors left out."""
        tensors: dict[int, int] = {}
        unknown = 0
        for place in places:
            unknown += self.flow.unknown[place]
            for read in self.flow.reads[place]:
                if read.tensor in inner:
                    continue
                found = self.roots(read.tensor)
                unknown += found.unknown
                alone = len(found.tensors) == 1 and read.tensor in found.tensors
                for tensor, size in found.tensors.items():
                    more = read.size if alone else size
                    tensors[tensor] = min(self.flow.sizes[tensor], tensors.get(tensor, 0) + more)
        return Roots(tensors, unknown)

    def _kernels(self, members: list[int]) -> tuple[Work, ...]:
        """The kernels that a group becomes: reductions that go before, then the one that writes."""
        apart = [member for member in members if self._is_apart(member, members)]
        rest = sorted(set(members) - set(apart))
        works = [self.works[one].replace(op=NAME) for one in apart]
        if not rest:
            return tuple(works)
        inner = frozenset(tensor for one in rest for tensor in self.flow.makes[one])
        twice = {one for one in rest if self._reads_twice(one, rest)}
        works += [
            _kernel([self.works[one]], self._sources([one]).total, 0, "reduction") for one in sorted(twice)
        ]
        made = [tensor for one in rest for tensor in self.flow.makes[one]]
        writes = sum(self.flow.sizes[tensor] for tensor in made if tensor in self.written)
        writes += sum(self.works[one].write_bytes for one in rest if not self.flow.makes[one])
        parts = [self.works[one] for one in rest]
        # What a first pass has reduced, the second only uses.
        reduces = any(_reduces(self.works[one]) for one in rest if one not in twice)
        kind = "reduction" if reduces else "pointwise"
        return (*works, _kernel(parts, self._sources(rest, inner).total, writes, kind))

    def _is_apart(self, place: int, members: list[int]) -> bool:
        """Whether a reduction is a kernel of its own: of something in memory, and for nobody here."""
        work = self.works[place]
        if not _reduces(work) or work.write_bytes > WIDE * work.read_bytes:
            return False
        inputs = [read.tensor for read in self.flow.reads[place]]
        group = self.group_of[place]
        ready = all(
            input_ in self.written or self.group_of.get(self.flow.makers.get(input_, -1)) != group
            for input_ in inputs
        )
        return ready and not self._leads_to(place, members, WIDE * work.read_bytes)

    def _reads_twice(self, place: int, members: list[int]) -> bool:
        work = self.works[place]
        if not _reduces(work):
            return False
        bulk = WIDE * work.read_bytes
        if work.write_bytes > bulk:
            row = work.dims[1] * DTYPE_BYTES.get(work.dtype, 4) if len(work.dims) > 1 else 0
            long = row > IN_CACHE or any(word in work.op for word in ACROSS)
        else:
            long = 4 * work.read_bytes > IN_CACHE * max(1, work.write_bytes)
        return long and self._leads_to(place, members, bulk, written=True)

    def _leads_to(self, place: int, members: list[int], bulk: float, *, written: bool = False) -> bool:
        """Whether something large follows from an operation within its kernel, to be written if asked."""
        reached = set(self.flow.makes[place])
        if written and any(self.flow.sizes[one] >= bulk for one in reached & self.written):
            return True
        for other in members:
            if other <= place or not reached & {read.tensor for read in self.flow.reads[other]}:
                continue
            reached |= set(self.flow.makes[other])
            large = [make for make in self.flow.makes[other] if self.flow.sizes[make] >= bulk]
            if any(not written or one in self.written for one in large):
                return True
        return False


def _reduces(work: Work) -> bool:
    """Whether an operation reads for what it writes; the backward pass of a sum or a loss only spreads it."""
    return work.kind == "reduction" and 2 * work.read_bytes >= work.write_bytes > 0


def _top(parents: dict[int, int], place: int) -> int:
    while parents[place] != place:
        parents[place] = parents[parents[place]]
        place = parents[place]
    return place


def _kernel(parts: list[Work], read_bytes: int, write_bytes: int, kind: str) -> Work:
    lead = max(parts, key=lambda part: part.read_bytes + part.write_bytes)
    last = lead.dims[1] if len(lead.dims) > 1 else 1
    return Work(
        op=NAME, kind=kind, dtype=lead.dtype, read_bytes=read_bytes, write_bytes=write_bytes, dims=(0, last)
    )
