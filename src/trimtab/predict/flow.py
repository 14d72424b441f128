"""Which tensors each operation of a trace reads and makes, as far as the trace tells.

A trace names allocations and operations apart from each other. An allocation carries the name of the
operation that asked for it, so the two columns can be read side by side, and that says what each operation
made. What it read is inferred: of the tensors that are there, the latest touched whose sizes add up to the
bytes that it reads, or those that are given back right after it, as what is kept for the backward pass is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from trimtab.spec import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.spec import Trace, Work

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


class Links(NamedTuple):
    """A Flow without its sizes: who makes and reads what, taken to be the same at every micro-batch."""

    reads: list[tuple[Link, ...]]
    rests: list[bool]
    """Whether an operation reads something that could not be told as well."""
    makes: list[tuple[int, ...]]
    makers: dict[int, int]
    dies: dict[int, int]
    rewrites: list[int]
    """Operations in place: each makes one more tensor, numbered after the trace's own."""


class Link(NamedTuple):
    """A tensor that is read, the whole of it or as much as the operation reads."""

    tensor: int
    is_whole: bool


def flow(trace: Trace) -> Flow:
    """Read the last step's operations and allocations side by side."""
    return sized(links(trace), trace)


def links(trace: Trace) -> Links:
    """What of a flow holds for all traces of one program, whatever their sizes."""
    begin = trace.marks.get("step2", 0)
    walk = _Walk(trace, trace.order[begin : trace.marks.get("end", len(trace.order))])
    for place, number in enumerate(trace.sequence):
        walk.pass_by(place, trace.works[number])
    walk.end(len(trace.sequence))
    return walk.found


def sized(known: Links, trace: Trace, only: Iterable[int] | None = None) -> Flow:
    """The flow of a trace whose program has these links; with `only`, what those operations read."""
    works, sequence = trace.works, trace.sequence
    sizes = [*trace.sizes, *(works[sequence[place]].write_bytes for place in known.rewrites)]
    every: list[tuple[Read, ...]] = [()] * len(known.reads)
    unknown = [0] * len(known.reads)
    for place in range(len(known.reads)) if only is None else only:
        found, rests = known.reads[place], known.rests[place]
        wanted = 0
        if rests or not all(whole for _, whole in found):
            wanted = _wanted(works[sequence[place]], sum(sizes[one] for one in known.makes[place]))
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
    return {one for one in alive if trace.parts[one] in OPERAND_PARTS}


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
        self.found = Links([], [], [], {}, {}, [])

    def pass_by(self, place: int, work: Work) -> None:
        """One operation: what it made, then what it read."""
        found = self.found
        made = self._made(place, work)
        reads: tuple[Link, ...] = ()
        rests = False
        if work.kernels and work.kind not in ("wait", "optimizer", "collective"):
            reads, rests = self._read(work, made)
        if not made and work.write_bytes and reads:
            made = self._written_over(place, work, reads)
        found.reads.append(reads)
        found.rests.append(rests)
        found.makes.append(made)
        for one in reads:
            self._touch(one.tensor)
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

    def _read(self, work: Work, made: tuple[int, ...]) -> tuple[tuple[Link, ...], bool]:
        soon = [one for one in self._dying() if one not in made]
        recent = [one for one, _ in zip(self._recent, range(RECENT), strict=False)]
        there = list(dict.fromkeys([*recent[:1], *soon, *recent]))
        sizes = self._sizes
        wanted = _wanted(work, sum(sizes[one] for one in made))
        chosen, rest = operands(wanted, tuple(sizes[one] for one in there), 1 + len(soon))
        alone = len(chosen) == 1 and chosen[0][1] == sizes[there[chosen[0][0]]]
        if not alone and wanted in self._old:
            # More likely a weight than a coincidence.
            return (), True
        found = tuple(Link(there[index], size == sizes[there[index]]) for index, size in chosen)
        return found, rest > 0

    def _dying(self) -> list[int]:
        """Tensors of this step that are given back within the next events."""
        gone = [~event for event in self._events[self._at : self._at + SOON] if event < 0]
        now = [self._version.get(one, one) for one in gone]
        return [one for one in now if one in self.found.makers]

    def _written_over(self, place: int, work: Work, reads: tuple[Link, ...]) -> tuple[int, ...]:
        """An operation in place: what it wrote over is another tensor from now on."""
        alike = [one.tensor for one in reads if self._sizes[one.tensor] == work.write_bytes]
        if not alike:
            return ()
        dying = set(self._dying())
        same = next((one for one in alike if one not in dying), alike[0])
        holder = next((one for one, version in self._version.items() if version == same), same)
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
