"""Guess from an eager trace which kernels torch.compile would run.

Inductor fuses neighbouring operations with little arithmetic into one kernel; tensors that only this kernel
uses never reach memory. Here, operations that are not separated by a matrix product, attention, convolution
or other library call make one kernel. It reads tensors from outside and writes tensors that are read outside.
Three more rules follow torch's own:

* A tensor that the eager step saves for the backward pass is not written if a backward kernel can recompute
  it from tensors that are in memory anyway: the partitioner prefers to recompute it.
* A reduction whose result the same kernel needs for every element reads its input a second time, unless a row
  is short enough to stay in a cache.
* Matrix products with unaligned sides are padded if that is faster, and convolutions run with channels last.

Running the compiler itself is more accurate (`trimtab.trace.compiled`), but takes a minute per setting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import lru_cache
from itertools import combinations, islice
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from trimtab.cache import MemoryCache
from trimtab.spec import PARTS, Work
from trimtab.spec.precision import DTYPE_BYTES, FLOAT8, FLOAT32, TF32
from trimtab.spec.trace import CACHED_ROW_BYTES, CHANNELS_LAST, ENTER, LEAVE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from trimtab.predict.op_time import Pace, Rates
    from trimtab.spec import Setting, Trace


# Data flow: which tensors each operation of a trace reads and makes.
#
# A trace lists allocations and operations separately. An allocation has the name of its operation, so walking
# both lists together shows what each operation makes. Its inputs are inferred: the most recently used live
# tensors whose sizes add up to the bytes that it reads, or tensors that are freed right after it, as those
# saved for the backward pass are.


MAX_RECENT = 12
"""Number of most recently used tensors that can be inputs of an operation."""
FREED_WITHIN = 6
"""Events within which a tensor is freed after the last operation that reads it."""
RESULT_WITHIN = 24
"""Entries of the sequence within which the operation of an allocation follows."""
MAX_OPERANDS = 3
SIZE_TOLERANCE = 0.01
"""Share of the bytes read that may be small tensors beside the inferred inputs: biases, means, indices."""
MANY_RESULTS = ("convolution", "attention", "recurrent")
"""Kinds whose results are larger than `write_bytes`."""
WORKSPACE = PARTS.index("workspace")
OPERAND_PARTS = (PARTS.index("weights"), PARTS.index("inputs"))


class SizedRead(NamedTuple):
    """A tensor, and how many bytes of it are read."""

    tensor: int
    size: int


class Flow(NamedTuple):
    """Data flow of a trace: an entry per operation of the sequence; tensors are indices of `sizes`."""

    reads: list[tuple[SizedRead, ...]]
    unknown: list[int]
    """Bytes read from unidentified tensors: weights, inputs, or inputs that could not be inferred."""
    makes: list[tuple[int, ...]]
    sizes: list[int]
    makers: dict[int, int]
    """The operation that made a tensor."""
    dies: dict[int, int]
    """The operation before which a tensor was freed."""


class FlowShape(NamedTuple):
    """A Flow without sizes: who makes and reads which tensors, assumed equal at every micro-batch."""

    reads: list[tuple[TensorRead, ...]]
    rests: list[bool]
    """Whether an operation also reads unidentified tensors."""
    partial: list[bool]
    """Whether an operation reads a part of a tensor."""
    makes: list[tuple[int, ...]]
    makers: dict[int, int]
    dies: dict[int, int]
    rewrites: list[int]
    """In-place operations: each makes one more tensor, numbered after the trace's own."""


class TensorRead(NamedTuple):
    """A tensor that is read, entirely or as many bytes as the operation reads."""

    tensor: int
    is_whole: bool


def infer_flow(trace: Trace) -> Flow:
    """Return the data flow of the last step of a trace."""
    return apply_sizes(infer_flow_shape(trace), trace)


def infer_flow_shape(trace: Trace) -> FlowShape:
    """Return the part of a flow that is the same for all traces of one program, whatever their sizes."""
    begin = trace.marks.get("step2", 0)
    walk = _FlowWalk(trace, trace.order[begin : trace.marks.get("end", len(trace.order))])
    for place, number in enumerate(trace.sequence):
        walk.visit(place, trace.works[number])
    walk.end(len(trace.sequence))
    return walk.shape


def apply_sizes(shape: FlowShape, trace: Trace, only: Iterable[int] | None = None) -> Flow:
    """Return the flow of a trace from the shape of its program; with `only`, reads of those operations."""
    works, sequence = trace.works, trace.sequence
    sizes = [*trace.sizes, *(works[sequence[place]].write_bytes for place in shape.rewrites)]
    every: list[tuple[SizedRead, ...]] = [()] * len(shape.reads)
    unknown = [0] * len(shape.reads)
    for place in range(len(shape.reads)) if only is None else only:
        inputs, rests = shape.reads[place], shape.rests[place]
        wanted = 0
        if rests or shape.partial[place]:
            wanted = _count_read_bytes(
                works[sequence[place]], sum([sizes[make] for make in shape.makes[place]])
            )
        every[place] = tuple(
            [SizedRead(tensor, sizes[tensor] if whole else wanted) for tensor, whole in inputs]
        )
        if rests:
            unknown[place] = max(0, wanted - sum([size for _, size in every[place]]))
    return Flow(every, unknown, shape.makes, sizes, shape.makers, shape.dies)


def _count_read_bytes(work: Work, made_bytes: int) -> int:
    """Return the bytes of an operation's inputs; `read_bytes` of a convolution counts more than these."""
    if work.kind != "convolution":
        return work.read_bytes
    moved = work.read_bytes // max(1, work.kernels)
    forward = not work.op.endswith("_backward")
    return max(0, moved - made_bytes) if forward else moved


def _operands_before_step(trace: Trace) -> set[int]:
    """Return the weights and inputs that are live when the last step begins."""
    alive: set[int] = set()
    for event in trace.order[: trace.marks.get("step2", 0)]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return {number for number in alive if trace.parts[number] in OPERAND_PARTS}


class _FlowWalk:
    """Walk through operations and allocations together, building a FlowShape."""

    def __init__(self, trace: Trace, events: Sequence[int]) -> None:
        self._trace, self._events = trace, events
        self._at = 0
        self._old_sizes = {trace.sizes[number] for number in _operands_before_step(trace)}
        """Sizes of the weights and inputs from before the step."""
        self._ops = [trace.op_names[op] for op in trace.ops]
        self._places: dict[str, list[int]] = {}
        """Positions of operations in the sequence, by name."""
        for place, number in enumerate(trace.sequence):
            self._places.setdefault(trace.works[number].op, []).append(place)
        self._recent: dict[int, None] = {}
        """Tensors, most recently used last."""
        self._next: tuple[int, int, int | None] = 0, 0, None
        """The next result, with the place and the event from which to search for it again."""
        self._version: dict[int, int] = {}
        """The current tensor of an allocation: writing in place makes a new tensor."""
        self._sizes = list(trace.sizes)
        self._results = {self._ops[event] for event in events if event >= 0}
        """Names of operations that allocate."""
        self.shape = FlowShape([], [], [], [], {}, {}, [])

    def visit(self, place: int, work: Work) -> None:
        """Process one operation: its results, then its inputs."""
        shape = self.shape
        made = self._take_results(place, work) if work.op in self._results else ()
        reads: tuple[TensorRead, ...] = ()
        rests = False
        if work.kernels and work.kind not in ("wait", "optimizer", "collective"):
            reads, rests = self._infer_reads(work, made)
        if not made and work.write_bytes and reads:
            made = self._record_overwrite(place, work, reads)
        shape.reads.append(reads)
        shape.rests.append(rests)
        shape.partial.append(not all(read.is_whole for read in reads))
        shape.makes.append(made)
        for read in reads:
            self._touch(read.tensor)
        for tensor in sorted(made, key=self._sizes.__getitem__):
            shape.makers[tensor] = place
            self._touch(tensor)

    def end(self, place: int) -> None:
        """Process the frees after the last operation."""
        while self._at < len(self._events):
            self._skip_event(place)

    def _touch(self, tensor: int) -> None:
        self._recent.pop(tensor, None)
        self._recent[tensor] = None

    def _skip_event(self, place: int) -> None:
        """Skip one event that is not a result: a free, or an allocation by an unknown operation."""
        event = self._events[self._at]
        self._at += 1
        if event < 0:
            tensor = self._version.pop(~event, ~event)
            self.shape.dies[tensor] = place
            self._recent.pop(tensor, None)

    def _take_results(self, place: int, work: Work) -> tuple[int, ...]:
        """Return the allocations with the operation's name, until they have the bytes of its results."""
        made: list[int] = []
        left = work.write_bytes
        while (ahead := self._find_next_result(place)) is not None and self._ops[
            self._events[ahead]
        ] == work.op:
            while self._at < ahead:
                self._skip_event(place)
            made.append(self._events[self._at])
            self._at += 1
            left -= self._trace.sizes[made[-1]]
            if left <= 0 and work.kind not in MANY_RESULTS:
                break
        return tuple(made)

    def _find_next_result(self, place: int) -> int | None:
        """Return the index of the next event that is a result of an operation.

        Workspaces and allocations of no nearby operation are not results.
        """
        until, before, found = self._next
        if place < until and self._at < before:
            return found
        found, until, before = None, len(self._trace.sequence), len(self._events) + 1
        for at in range(self._at, len(self._events)):
            event = self._events[at]
            if event < 0 or self._trace.parts[event] == WORKSPACE:
                continue
            places = self._places.get(self._ops[event], [])
            index = bisect_left(places, place)
            if index == len(places):
                continue
            if places[index] <= place + RESULT_WITHIN:
                found, until, before = at, min(until, places[index] + 1), at + 1
                break
            until = min(until, places[index] - RESULT_WITHIN)
        self._next = until, before, found
        return found

    def _infer_reads(self, work: Work, made: tuple[int, ...]) -> tuple[tuple[TensorRead, ...], bool]:
        soon = [tensor for tensor in self._soon_freed() if tensor not in made]
        recent = list(islice(reversed(self._recent), MAX_RECENT))
        candidates = list(dict.fromkeys([*recent[:1], *soon, *recent]))
        sizes = self._sizes
        wanted = _count_read_bytes(work, sum([sizes[number] for number in made]))
        chosen, rest = choose_operands(wanted, tuple([sizes[tensor] for tensor in candidates]), 1 + len(soon))
        alone = len(chosen) == 1 and chosen[0][1] == sizes[candidates[chosen[0][0]]]
        if not alone and wanted in self._old_sizes:
            # More likely a weight than a coincidence.
            return (), True
        reads = tuple(
            [TensorRead(candidates[index], size == sizes[candidates[index]]) for index, size in chosen]
        )
        return reads, rest > 0

    def _soon_freed(self) -> list[int]:
        """Return the tensors of this step that are freed within the next events."""
        gone = [~event for event in self._events[self._at : self._at + FREED_WITHIN] if event < 0]
        now = [self._version.get(allocation, allocation) for allocation in gone]
        return [tensor for tensor in now if tensor in self.shape.makers]

    def _record_overwrite(self, place: int, work: Work, reads: tuple[TensorRead, ...]) -> tuple[int, ...]:
        """Record an in-place operation: the overwritten allocation holds a new tensor from now on."""
        alike = [read.tensor for read in reads if self._sizes[read.tensor] == work.write_bytes]
        if not alike:
            return ()
        dying = set(self._soon_freed())
        same = next((tensor for tensor in alike if tensor not in dying), alike[0])
        holder = next((key for key, version in self._version.items() if version == same), same)
        new = len(self._sizes)
        self._sizes.append(work.write_bytes)
        self.shape.rewrites.append(place)
        self._version[holder] = new
        self._recent.pop(same, None)
        return (new,)


@lru_cache(maxsize=65536)
def choose_operands(
    wanted: int, sizes: tuple[int, ...], likely: int = 1
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the tensors whose sizes add up to the bytes read, with their sizes, and the bytes left over.

    Earlier tensors are the better guess; one of the first `likely` is nearly always among them. If none add
    up, a part of one tensor is read, as through a view; or some of them and an unidentified rest.

    >>> choose_operands(75, (25, 30, 50))
    (((0, 25), (2, 50)), 0)
    >>> choose_operands(10, (30, 50))
    (((0, 10),), 0)
    """
    if not wanted:
        return (), 0
    room = SIZE_TOLERANCE * wanted
    useful = [index for index, size in enumerate(sizes) if room < size <= wanted + room]
    best: tuple[int, ...] = ()
    rank = (True, True, len(sizes))
    for count in range(1, MAX_OPERANDS + 1):
        for chosen in combinations(useful, count):
            mine = (chosen[0] >= likely, count == MAX_OPERANDS, chosen[-1])
            if mine < rank and abs(sum(sizes[index] for index in chosen) - wanted) <= room:
                best, rank = chosen, mine
    if best:
        return tuple((index, sizes[index]) for index in best), 0
    larger = next((index for index, size in enumerate(sizes) if size > wanted), None)
    if larger is not None and (not useful or larger < useful[0]):
        return ((larger, wanted),), 0
    taken, left = [], wanted
    for index in useful[:MAX_OPERANDS]:
        if sizes[index] <= left + room:
            taken.append((index, sizes[index]))
            left -= sizes[index]
    return tuple(taken), max(0, left)


FUSED_KINDS = ("pointwise", "reduction", "gather")
LIBRARY_OPS = (
    "_embedding_bag",
    "sort",
    "topk",
    "nonzero",
    "ctc_loss",
    "_unique",
    "histc",
    "bincount",
    "cdist",
    "token_loss_slopes",
)
"""Parts of the names of operations that inductor does not fuse but calls."""
RANDOM_OPS = ("dropout", "bernoulli", "rand", "uniform", "normal_")
"""Operations whose random numbers are saved: drawing them again would give different ones."""
WIDE_SHARE = 1 / 64
"""A reduction that writes more than this share of its input includes the step after it: a norm, a softmax."""
SCATTERED_NORMS = ("batch_norm", "group_norm")
"""Norms whose rows are scattered over memory, or are whole images."""
RECOMPUTE_LIMIT = 2.0
"""A tensor is recomputed if reading its inputs moves at most this times its own bytes: writing and reading it
would move as much."""
ALIGNED_BYTES = 16
PADDED_GAIN = 1.1
"""Inductor pads if it measures at least this speed-up."""
BALANCE_SHARE = 0.5
NODES_A_CONVOLUTION = 300
"""In a graph with more operations than this per convolution, inductor does not change the layout."""
SMALL_CHANNELS = 64
FUSED_OP = "fused"
BACKWARD_START = "aten::ones_like"
"""First operation of a backward pass: the gradient of the loss with respect to itself."""


class MemoryReads(NamedTuple):
    """Bytes to read from memory, by tensor, and bytes of unidentified tensors."""

    tensors: dict[int, int]
    unknown: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.tensors.values()) + self.unknown


def fuse_trace(trace: Trace, setting: Setting, pace: Pace) -> Trace:
    """Return the trace with the operations of the compiled step; allocations stay those of the eager step."""
    groups = find_fusion_groups(trace)
    plan = _KernelPlan(trace, groups)
    half = setting.dtypes.autocast
    # A step has thousands of library calls, but only about a hundred different ones.
    calls: dict[tuple[int, bool], tuple[Work, ...]] = {}
    works: list[Work] = []
    places: list[int] = []
    for place, number in enumerate(trace.sequence):
        kernels: tuple[Work, ...]
        if not groups.inside[place]:
            kernels = (trace.works[number],)
        elif place in groups.group_of:
            kernels = plan.kernels.get(place, ())
        else:
            how = number, half is not None and place >= plan.backward
            if how not in calls:
                work = trace.works[number]
                work = cast_to_half(work, half) if half and how[1] else work
                called = _library_calls(work, pace, channels_last=plan.channels_last)
                calls[how] = tuple(work for work in called if work.kernels)
            kernels = calls[how]
        works += kernels
        places += [place] * len(kernels)
    numbers: dict[Work, int] = {}
    sequence = tuple(numbers.setdefault(work, len(numbers)) for work in works)
    return trace.replace(
        works=tuple(numbers),
        sequence=sequence,
        phases={name: bisect_left(places, at) for name, at in trace.phases.items()},
    )


def cast_to_half(work: Work, half: str) -> Work:
    """Return a matrix product of a compiled backward pass in half precision: autocast applies there too."""
    if work.kind != "matrix" or work.dtype not in (FLOAT32, TF32):
        return work
    alignment = work.dims[4] // 2 if work.dims[4:] and work.dims[4] < ALIGNED_BYTES else ALIGNED_BYTES
    return work.replace(
        dtype=half,
        read_bytes=work.read_bytes // 2,
        write_bytes=work.write_bytes // 2,
        dims=(*work.dims[:4], alignment),
    )


def _library_calls(work: Work, pace: Pace, *, channels_last: bool) -> tuple[Work, ...]:
    """Return the calls that inductor makes for an operation of a library."""
    if work.kind == "matrix" and work.dtype not in FLOAT8:
        return pad_product(work, pace)
    if work.kind == "convolution" and channels_last and _is_flat(work):
        return (work.replace(dims=(*work.dims[:4], CHANNELS_LAST, *work.dims[5:])),)
    return (work,)


def pad_product(work: Work, pace: Pace) -> tuple[Work, ...]:
    """Return the calls for a matrix product: its sides padded to multiples of 16 bytes if that is faster.

    Operands with a side to pad are copied first.
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
        op=FUSED_OP,
        kind="pointwise",
        dtype=work.dtype,
        read_bytes=copied,
        write_bytes=copied,
        dims=(0, inner),
    )
    even = work.replace(
        dims=(batch, *longer, ALIGNED_BYTES), flops=2 * batch * longer[0] * longer[1] * longer[2]
    )
    faster = pace.seconds(work) > PADDED_GAIN * (pace.seconds(copy) + pace.seconds(even))
    return (copy, even) if faster else (work,)


def _is_bound_by_arithmetic(work: Work, device: Rates) -> bool:
    """Inductor's test: products per number touched, against half of the device's operations per byte."""
    _, rows, columns, inner, *_ = work.dims
    touched = rows * inner + inner * columns + rows * columns
    return rows * columns * inner > touched * BALANCE_SHARE * device.peak(work.dtype) / device.bandwidth


def _is_flat(work: Work) -> bool:
    """Return whether a convolution is over images: its kernel is a square."""
    area = work.dims[5]
    return isqrt(area) ** 2 == area


def uses_channels_last(works: list[Work]) -> bool:
    """Return whether inductor uses channels last in a graph of these operations."""
    convolutions = [work for work in works if work.op.endswith("convolution") and work.kind == "convolution"]
    flat = [work for work in convolutions if _is_flat(work)]
    if not flat or len(works) >= NODES_A_CONVOLUTION * len(convolutions):
        return False
    shapes = [(work.dims[0], work.dims[2], work.dims[3] // work.dims[5], work.dims[5]) for work in flat]
    if any(groups > 1 and inner > 1 for groups, _, inner, _ in shapes):
        return False
    if any(groups * outer * 2 <= inner and area > 1 for groups, outer, inner, area in shapes):
        return False
    return not all(
        groups * outer <= SMALL_CHANNELS and inner <= SMALL_CHANNELS for groups, outer, inner, _ in shapes
    )


def find_compiled(works: list[Work], backward: int, optimizer: int) -> list[bool]:
    """Return for each operation whether it is in a compiled graph: in the model's call or its backward pass.

    A loss outside of the model stays eager. Its backward pass runs first, and is assumed to have as many
    operations. In a trace without module calls, everything counts as compiled; in one with calls but none of
    the model, nothing.
    """
    whole = not any(work.kind == "call" for work in works)
    depth, compiled = int(whole), []
    eager = 0
    for work in works[:backward]:
        if work.kind == "call" and work.op == ENTER:
            depth, eager = depth + 1, 0
        compiled.append(depth > 0)
        if work.kind == "call" and work.op == LEAVE:
            depth = max(0, depth - 1)
        eager += work.kernels > 0 and not depth and work.op != BACKWARD_START
    none = not whole and not any(compiled)
    for work in works[backward:optimizer]:
        compiled.append(eager <= 0 and not none)
        eager -= work.kernels > 0
    return [*compiled, *[False] * (len(works) - len(compiled))]


class SharedTensor(NamedTuple):
    """A tensor that is made in one generated kernel and read in others."""

    tensor: int
    place: int
    limit: float
    """It is recomputed if that reads at most so many times its bytes."""
    is_random: bool
    """Whether it may be a random mask, which is always written."""


class FusionGroups(NamedTuple):
    """Which operations are fused together, assumed equal at every micro-batch of a program."""

    shape: FlowShape
    inside: list[bool]
    group_of: dict[int, int]
    members: dict[int, list[int]]
    written: set[int]
    """Tensors that generated kernels write to memory, whatever their sizes."""
    shared: list[SharedTensor]
    """Tensors that generated kernels write to memory unless other kernels recompute them."""


_GROUPS: MemoryCache[FusionGroups] = MemoryCache(max_entries=32)


def find_fusion_groups(trace: Trace) -> FusionGroups:
    """Return which operations of a trace are fused together; cached by program, whatever its sizes.

    Analysing a program takes far longer than computing the bytes of its kernels.
    """
    works = [trace.works[number] for number in trace.sequence]
    key = trace.order, tuple([work.op for work in works]), *trace.phases.items()
    return _GROUPS.get(key, lambda: _group_works(trace, works))


def _group_works(trace: Trace, works: list[Work]) -> FusionGroups:
    """Return groups of connected operations with equally many library calls before them.

    A path between two of them through a library call would have one more call, so no kernel waits for itself.
    """
    backward = trace.phases.get("backward", len(works))
    compiled = find_compiled(works, backward, trace.phases.get("optimizer", len(works)))
    shape = infer_flow_shape(trace)
    flow = apply_sizes(shape, trace)
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
            # A new graph begins here.
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
                    parents[_find_group(parents, other)] = _find_group(parents, place)
    group_of = {place: _find_group(parents, place) for place in mine}
    members: dict[int, list[int]] = defaultdict(list)
    for place, name in group_of.items():
        members[name].append(place)
    written, shared = _find_written(works, flow, backward, readers, group_of)
    return FusionGroups(shape, compiled, group_of, dict(members), written, shared)


def _find_written(
    works: list[Work], flow: Flow, backward: int, readers: dict[int, list[int]], group_of: dict[int, int]
) -> tuple[set[int], list[SharedTensor]]:
    """Return the tensors of generated kernels that reach memory, and those that only may reach it."""
    last = {group: place for place, group in group_of.items()}
    written: set[int] = set()
    shared = []
    for place, group in group_of.items():
        for tensor in flow.makes[place]:
            outside = [reader for reader in readers.get(tensor, ()) if group_of.get(reader) != group]
            dies = flow.dies.get(tensor, len(works))
            if any(reader not in group_of for reader in outside):
                written.add(tensor)
            elif outside:
                later = all(reader >= backward > place for reader in outside)
                is_random = any(word in works[place].op for word in RANDOM_OPS)
                shared.append(SharedTensor(tensor, place, RECOMPUTE_LIMIT if later else 1.0, is_random))
            # If no reader was identified, only eager code keeps a tensor alive into the backward pass.
            elif tensor not in readers and (
                tensor not in flow.dies or (dies > last[group] + 1 and not place < backward <= dies)
            ):
                written.add(tensor)
    return written, shared


def is_fused(work: Work) -> bool:
    """Return whether an operation becomes a part of a kernel that inductor generates."""
    return work.kernels > 0 and work.kind in FUSED_KINDS and not any(word in work.op for word in LIBRARY_OPS)


def _neighbours(place: int, work: Work, flow: Flow, readers: dict[int, list[int]]) -> list[int]:
    """Return the earlier operations that made an input of this one, or read the same tensor."""
    bulk = max(work.read_bytes, work.write_bytes)
    neighbours = []
    for read in flow.reads[place]:
        maker = flow.makers.get(read.tensor)
        neighbours += [maker] if maker is not None else []
        if 2 * read.size >= bulk:
            neighbours += [other for other in readers[read.tensor] if other < place]
    return neighbours


class _KernelPlan:
    """The kernels of the compiled step, with the bytes that each reads and writes."""

    def __init__(self, trace: Trace, groups: FusionGroups) -> None:
        self.works = [trace.works[number] for number in trace.sequence]
        self.backward = trace.phases.get("backward", len(self.works))
        self.group_of = groups.group_of
        own = [work for work, compiled in zip(self.works, groups.inside, strict=True) if compiled]
        self.channels_last = uses_channels_last(own)
        self.flow = apply_sizes(groups.shape, trace, groups.group_of)
        self.cached_reads: dict[int, MemoryReads] = {}
        self.written = set(groups.written)
        """Tensors that generated kernels write to memory."""
        made = {tensor for place in groups.group_of for tensor in self.flow.makes[place]}
        self.unwritten = made - self.written
        """Tensors of generated kernels that never reach memory."""
        for shared in groups.shared:
            if self._is_written(shared):
                self.written.add(shared.tensor)
                self.unwritten.discard(shared.tensor)
        self.kernels = {max(members): self._kernels(members) for members in groups.members.values()}

    def _is_written(self, shared: SharedTensor) -> bool:
        """Return whether a tensor is written to memory, as recomputing it would read more."""
        if shared.is_random and shared.tensor == self._drawn_mask(shared.place):
            return True
        return self._find_reads(shared.tensor).total > self.flow.sizes[shared.tensor] * shared.limit

    def _drawn_mask(self, place: int) -> int:
        """Return the random mask of an operation: the smallest of its results."""
        return min(self.flow.makes[place], key=self.flow.sizes.__getitem__)

    def _find_reads(self, tensor: int) -> MemoryReads:
        """Return the reads from memory that recompute a tensor."""
        if tensor not in self.cached_reads:
            self.cached_reads[tensor] = self._sum_reads([self.flow.makers[tensor]])
        return self.cached_reads[tensor]

    def _sum_reads(self, places: list[int], inner: Collection[int] = ()) -> MemoryReads:
        """Return what operations read from memory, without `inner` tensors."""
        sizes = self.flow.sizes
        tensors: dict[int, int] = {}
        unknown = 0
        for place in places:
            unknown += self.flow.unknown[place]
            for tensor, size in self.flow.reads[place]:
                if tensor in inner:
                    continue
                if tensor not in self.unwritten:
                    tensors[tensor] = min(sizes[tensor], tensors.get(tensor, 0) + size)
                    continue
                needed = self._find_reads(tensor)
                unknown += needed.unknown
                for source, bulk in needed.tensors.items():
                    tensors[source] = min(sizes[source], tensors.get(source, 0) + bulk)
        return MemoryReads(tensors, unknown)

    def _kernels(self, members: list[int]) -> tuple[Work, ...]:
        """Return the kernels of a group: first separate reductions, then the kernel that writes."""
        reductions = [place for place in members if _is_reduction(self.works[place])]
        apart = [place for place in reductions if self._is_separate(place, members)]
        rest = [place for place in members if place not in apart] if apart else members
        works = [self.works[place].replace(op=FUSED_OP) for place in apart]
        if not rest:
            return tuple(works)
        made = [tensor for place in rest for tensor in self.flow.makes[place]]
        once = []
        for place in reductions:
            if place in apart:
                continue
            if self._reads_twice(place, rest):
                read_bytes = self._sum_reads([place]).total
                works.append(_make_kernel((self.works[place],), read_bytes, 0, "reduction"))
            else:
                once.append(place)
        writes = sum([self.flow.sizes[tensor] for tensor in made if tensor in self.written])
        writes += sum([self.works[place].write_bytes for place in rest if not self.flow.makes[place]])
        parts = tuple([self.works[place] for place in rest])
        # The second pass only uses what the first pass has reduced.
        kind = "reduction" if once else "pointwise"
        return (*works, _make_kernel(parts, self._sum_reads(rest, set(made)).total, writes, kind))

    def _is_separate(self, place: int, members: list[int]) -> bool:
        """Return whether a reduction is a separate kernel: input in memory, result not used here."""
        work = self.works[place]
        if work.write_bytes > WIDE_SHARE * work.read_bytes:
            return False
        inputs = [read.tensor for read in self.flow.reads[place]]
        group = self.group_of[place]
        ready = all(
            input_ in self.written or self.group_of.get(self.flow.makers.get(input_, -1)) != group
            for input_ in inputs
        )
        return ready and not self._leads_to(place, members, WIDE_SHARE * work.read_bytes)

    def _reads_twice(self, place: int, members: list[int]) -> bool:
        """Return whether a kernel reads the input of a reduction again after reducing it."""
        work = self.works[place]
        bulk = WIDE_SHARE * work.read_bytes
        if work.write_bytes > bulk:
            row = work.dims[1] * DTYPE_BYTES.get(work.dtype, 4) if len(work.dims) > 1 else 0
            long = row > CACHED_ROW_BYTES or any(word in work.op for word in SCATTERED_NORMS)
        else:
            long = 4 * work.read_bytes > CACHED_ROW_BYTES * max(1, work.write_bytes)
        return long and self._leads_to(place, members, bulk, written=True)

    def _leads_to(self, place: int, members: list[int], bulk: float, *, written: bool = False) -> bool:
        """Return whether a large (with `written`: written) tensor of the kernel depends on an operation."""
        reached = set(self.flow.makes[place])
        if written and any(self.flow.sizes[tensor] >= bulk for tensor in reached & self.written):
            return True
        for other in members:
            if other <= place or not reached & {read.tensor for read in self.flow.reads[other]}:
                continue
            reached |= set(self.flow.makes[other])
            large = [make for make in self.flow.makes[other] if self.flow.sizes[make] >= bulk]
            if any(not written or tensor in self.written for tensor in large):
                return True
        return False


def _is_reduction(work: Work) -> bool:
    """Return whether an operation really reduces; the backward pass of a sum or a loss only broadcasts."""
    return work.kind == "reduction" and 2 * work.read_bytes >= work.write_bytes > 0


def _find_group(parents: dict[int, int], place: int) -> int:
    while parents[place] != place:
        parents[place] = parents[parents[place]]
        place = parents[place]
    return place


COSTLY_OPS = {
    "aten::gelu": 45,
    "aten::gelu_backward": 65,
    "aten::native_dropout": 100,
    "aten::bernoulli_": 100,
    "aten::silu": 18,
    "aten::silu_backward": 24,
    "aten::tanh": 25,
    "aten::_log_softmax": 45,
    "aten::_softmax": 45,
}
"""Instructions for each number of operations that are slow to compute, as trace.compiled counts them."""


def _count_instructions(parts: Sequence[Work]) -> int:
    numbers = [max(part.read_bytes, part.write_bytes) // DTYPE_BYTES.get(part.dtype, 4) for part in parts]
    return sum(COSTLY_OPS.get(part.op, 1) * count for part, count in zip(parts, numbers, strict=True))


@lru_cache(maxsize=4096)
def _make_kernel(parts: tuple[Work, ...], read_bytes: int, write_bytes: int, kind: str) -> Work:
    lead = max(parts, key=lambda part: part.read_bytes + part.write_bytes)
    last = lead.dims[1] if len(lead.dims) > 1 else 1
    return Work(
        op=FUSED_OP,
        kind=kind,
        dtype=lead.dtype,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        dims=(0, last),
        instructions=_count_instructions(parts),
    )
