"""From traces of a model with few of its repeated blocks to the trace with all of them.

A model of many equal blocks runs the same program for each: its trace is some beginning, a stretch for every
block, some end, and that again for the backward pass, the optimizer and whatever else goes through the
blocks. Two traces, of a model with k blocks and with k + 1, show where the stretch of one block was put in.
`extended` puts in as many more as are wanted, and says for every free which allocation it is of.

Nothing is taken for granted: the stretch that was put in has to be the one before it once more, everything
else has to be the same in both traces, and what refers to a block has to do so by counting from the first
block, from the last, or along with the stretch it is in. Where that is not so there is no answer, and the
caller traces the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from trimtab.trace.workspace_formulas import launches

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from trimtab.spec import Trace, Work


FEW = 3
"""Blocks of the smaller of two models: the first and the last may be special, and so may what is beside."""


class BlocksDiffer(Exception):  # noqa: N818 - no error: the answer is that there is none
    """Two traces are not of the same program with one block more."""


class Zone(NamedTuple):
    """Where the stretch of one more block was put in."""

    begin: int
    """Its first position in the longer list."""
    length: int
    start: int
    """Where the stretches begin that are all the same; it may have been put in anywhere among them."""
    end: int


class Spot(NamedTuple):
    """A position among equal stretches: turn 0 is what was put in, those before it count down from -1."""

    zone: int
    turn: int
    place: int


def matched(
    few: Sequence[Hashable], more: Sequence[Hashable], alike: Sequence[Hashable], likes: Sequence[Hashable]
) -> list[Zone]:
    """Find what was put into `few` to make `more`.

    `alike` and `likes` say of each entry of the two what has to agree even where the entries do not: their
    sizes may grow with the number of blocks.
    """
    zones: list[Zone] = []
    left, right = 0, 0
    while right < len(more):
        if left < len(few) and few[left] == more[right]:
            left, right = left + 1, right + 1
            continue
        length = _put_in(alike, more, likes, left, right)
        if length:
            before = zones[-1].end if zones else 0
            zones.append(Zone(right, length, _start(more, right, length, before), right + length))
            right += length
        elif left < len(few) and alike[left] == likes[right]:
            left, right = left + 1, right + 1
        else:
            raise BlocksDiffer(f"at {left} of {len(few)} and {right} of {len(more)}")
    if left < len(few):
        raise BlocksDiffer(f"{len(few) - left} are missing at the end")
    return zones


def _put_in(
    alike: Sequence[Hashable], more: Sequence[Hashable], likes: Sequence[Hashable], left: int, right: int
) -> int:
    """The length of the stretch that was put in here: the one after which most agrees; 0 for none."""
    best, best_agrees = 0, -1
    for length in range(1, min(right, len(more) - len(alike) - (right - left)) + 1):
        if more[right - length] != more[right] or more[right - 1] != more[right + length - 1]:
            continue
        if more[right - length : right] != more[right : right + length]:
            continue
        agrees = _agreement(alike, likes, left, right + length)
        if agrees > best_agrees and (agrees or left == len(alike)):
            best, best_agrees = length, agrees
    return best


def _agreement(few: Sequence[Hashable], more: Sequence[Hashable], left: int, right: int) -> int:
    count = 0
    while left + count < len(few) and right + count < len(more) and few[left + count] == more[right + count]:
        count += 1
    return count


def _start(more: Sequence[Hashable], begin: int, length: int, least: int) -> int:
    start = begin
    while start > least and more[start - 1] == more[start - 1 + length]:
        start -= 1
    return start


Entry = int | str
"""Of a trace's order: an allocation, a free (inverted), or the name of a phase that begins here."""


class Program:
    """A trace as a list of entries that can be compared with another's."""

    def __init__(self, trace: Trace, blocks: str) -> None:
        self.trace = trace
        self.entries: list[Entry] = list(_in_order(trace))
        names = [_without_number(name, blocks) for name in trace.module_names]
        self.numbers = [_number(name, blocks) for name in trace.module_names]
        rules = {number: trace.causes[at] for number, at in trace.caused}
        self.likes = [
            (
                trace.streams[index],
                trace.parts[index],
                trace.op_names[trace.ops[index]],
                names[trace.modules[index]],
                rules.get(index),
            )
            for index in range(len(trace.sizes))
        ]
        """Of each allocation, all but its size."""
        self.made = {
            entry: at for at, entry in enumerate(self.entries) if isinstance(entry, int) and entry >= 0
        }
        """Where each allocation is."""

    def tokens(self, *, sized: bool) -> list[Hashable]:
        """What each entry is, whatever its number."""
        sizes = self.trace.sizes

        def token(entry: Entry) -> Hashable:
            if isinstance(entry, str):
                return entry
            number = entry if entry >= 0 else ~entry
            return (entry >= 0, self.likes[number], sizes[number] if sized else 0)

        return [token(entry) for entry in self.entries]

    def block(self, at: int) -> int | None:
        """The block that an allocation was made in."""
        return self.numbers[self.trace.modules[self.number(at)]]

    def number(self, at: int) -> int:
        """The number of the allocation at a position."""
        entry = self.entries[at]
        assert isinstance(entry, int)  # noqa: S101 - an allocation
        return entry

    def freed(self, at: int) -> int:
        """Where the allocation is that this entry frees."""
        return self.made[~self.number(at)]


def _in_order(trace: Trace) -> Iterator[Entry]:
    """The order, with the names of phases, and frees in a row by number: torch may free in any order."""
    begins: dict[int, list[str]] = {}
    for name, at in trace.marks.items():
        begins.setdefault(at, []).append(name)
    frees: list[int] = []
    for at in range(len(trace.order) + 1):
        number = trace.order[at] if at < len(trace.order) else 0
        if frees and (number >= 0 or at in begins):
            yield from sorted(frees, reverse=True)
            frees = []
        yield from begins.get(at, ())
        if at == len(trace.order):
            return
        if number >= 0:
            yield number
        else:
            frees.append(number)


def _without_number(name: str, blocks: str) -> str:
    number = _number(name, blocks)
    return name if number is None else f"{blocks}.*{name[len(f'{blocks}.{number}') :]}"


def _number(name: str, blocks: str) -> int | None:
    """The number of the block that a module belongs to.

    >>> _number("model.layers.12.mlp", "model.layers"), _number("model.norm", "model.layers")
    (12, None)
    """
    if not name.startswith(f"{blocks}."):
        return None
    head = name[len(blocks) + 1 :].partition(".")[0]
    return int(head) if head.isdecimal() else None


def extended(few: Trace, more: Trace, *, blocks: str, known: int, wanted: int) -> Trace | None:
    """The trace with `wanted` blocks, from those with `known - 1` and `known`; None where they do not tell.

    `blocks` is the name of the list that the blocks are in.
    """
    if wanted == known:
        return more
    try:
        return _Extension(few, more, blocks, known, wanted).result()
    except BlocksDiffer:
        return None


class Way(NamedTuple):
    """How an entry refers to an allocation, whatever the number of blocks."""

    there: int
    """The allocation's position in the longer trace, for the entry as it stands in that one."""
    turns: int = 0
    """By how many turns the allocation lies further on for each turn that this entry does."""
    extra: int = 0
    """And for each block more."""


class _Extension:
    """One list of blocks growing from `known` to `wanted`."""

    def __init__(self, few: Trace, more: Trace, blocks: str, known: int, wanted: int) -> None:
        self.few, self.more = Program(few, blocks), Program(more, blocks)
        self.blocks, self.known, self.extra = blocks, known, wanted - known
        self.zones = matched(
            self.few.tokens(sized=True),
            self.more.tokens(sized=True),
            self.few.tokens(sized=False),
            self.more.tokens(sized=False),
        )
        self.put_before = [0, *accumulate(zone.length for zone in self.zones)]
        self.order: list[int] = []
        self.sources: list[int] = []
        """Of each allocation that is made, the one of the longer trace that it is like."""
        self.sizes: list[int] = []
        self.names: list[int | None] = []
        """The block of each."""
        self.fixed: dict[int, int] = {}
        """Numbers of allocations outside of what is put in, by position in the longer trace."""
        self.put_in: dict[Spot, int] = {}
        self.marks: dict[str, int] = {}

    def result(self) -> Trace:
        """All of it, in order."""
        few, more = self.few.trace, self.more.trace
        for index in range(len(self.zones)):
            self._settle(index)
        zones = {zone.begin: (index, zone) for index, zone in enumerate(self.zones)}
        at = 0
        while at < len(self.more.entries):
            if at in zones:
                index, zone = zones[at]
                for turn in range(self.extra + 1):
                    for place in range(zone.length):
                        self._again(Spot(index, turn, place), zone)
                at += zone.length
            else:
                self._as_before(at)
                at += 1
        self._check()
        works, sequence, phases = _longer(few, more, self.extra)
        return more.replace(
            order=tuple(self.order),
            sizes=tuple(self.sizes),
            **self._columns(),
            marks=self.marks,
            **self._causes(),
            works=works,
            sequence=sequence,
            phases=phases,
            recomputed_flops=self._line(few.recomputed_flops, more.recomputed_flops),
            parameters=self._line(few.parameters, more.parameters),
            trainable=self._line(few.trainable, more.trainable),
            recomputed=self._recomputed(),
        )

    def _line(self, few: int, more: int) -> int:
        return more + self.extra * (more - few)

    def _settle(self, index: int) -> None:
        """Among equal stretches, find the one that was put in: that for which all that is referred to agrees.

        What the stretches before it refer to is counted from the first block then, or from the last, and so
        is what those behind it refer to.
        """
        zone = self.zones[index]
        wrong: BlocksDiffer | None = None
        for begin in range(zone.begin, zone.start + zone.length - 1, -1):
            self.zones[index] = zone._replace(begin=begin)
            try:
                for at in range(zone.start, zone.end):
                    self._way(at)
            except BlocksDiffer as error:
                wrong = wrong or error
            else:
                return
        raise wrong or BlocksDiffer("no stretch before it is the same")

    def _zone(self, at: int) -> int:
        """How many zones have begun before a position."""
        return bisect_right(self.zones, at, key=lambda zone: zone.begin)

    def _partner(self, at: int) -> int | None:
        """The position in the shorter trace; None for what was put in."""
        count = self._zone(at)
        if count and at < self.zones[count - 1].begin + self.zones[count - 1].length:
            return None
        return at - self.put_before[count]

    def _back(self, left: int) -> int:
        """The position in the longer trace of one in the shorter."""
        count = 0
        while count < len(self.zones) and self.zones[count].begin <= left + self.put_before[count]:
            count += 1
        return left + self.put_before[count]

    def _spot(self, at: int) -> Spot | None:
        index = bisect_right(self.zones, at, key=lambda zone: zone.start) - 1
        if index < 0 or at >= self.zones[index].end:
            return None
        zone = self.zones[index]
        return Spot(index, *divmod(at - zone.begin, zone.length))

    def _way(self, at: int) -> Way | None:
        """How an entry refers to an allocation: a free to what it frees, an allocation to its block."""
        entry, partner = self.more.entries[at], self._partner(at)
        if isinstance(entry, str):
            return None
        if partner is None:
            zone = self.zones[self._zone(at) - 1]
            return self._way_along(at, at - zone.length, free=entry < 0)
        return self._way_beside(at, partner, free=entry < 0)

    def _way_along(self, at: int, before: int, *, free: bool) -> Way:
        """Of what was put in, by what the stretch before it refers to."""
        if not free:
            now, then = self.more.block(at), self.more.block(before)
            step = now - then if now is not None and then is not None else 0
            return Way(at, *self._direction(step)) if step else Way(at)
        there, then_there = self.more.freed(at), self.more.freed(before)
        one, other = self._spot(there), self._spot(then_there)
        if one is not None and other is not None:
            if (one.zone, one.place) != (other.zone, other.place):
                raise BlocksDiffer("two turns free at different places")
            return Way(there, *self._direction(one.turn - other.turn))
        if one is None and other is None:
            return Way(there, self.more.number(there) - self.more.number(then_there))
        raise BlocksDiffer("one turn frees what was put in, another what was not")

    def _direction(self, step: int) -> tuple[int, int]:
        """Turn by turn along with the entry, or against it, which begins at the last one then."""
        if step == 1:
            return 1, 0
        if step == -1:
            return -1, 1
        raise BlocksDiffer(f"from turn to turn it moves by {step}")

    def _way_beside(self, at: int, partner: int, *, free: bool) -> Way:
        """Of what both traces have, by what it refers to in the shorter one."""
        if not free:
            now, then = self.more.block(at), self.few.block(partner)
            step = now - then if now is not None and then is not None else 0
            if step not in (0, 1):
                raise BlocksDiffer(f"block {then} became {now}")
            return Way(at, 0, step)
        there = self.more.freed(at)
        before = self._back(self.few.freed(partner))
        one, other = self._spot(there), self._spot(before)
        if one is None:
            if before == there:
                return Way(there)
            raise BlocksDiffer(f"the free at {at} is of {there}, and was of {before}")
        if other is None or (one.zone, one.place) != (other.zone, other.place):
            raise BlocksDiffer(f"the free at {at} is of {one}, and was of {other}")
        # In the shorter trace the turns behind the one that it lacks have moved up.
        step = one.turn - (other.turn - 1 if other.turn > 0 else other.turn)
        if step not in (0, 1):
            raise BlocksDiffer(f"the free at {at} moved by {step}")
        return Way(there, 0, step)

    def _as_before(self, at: int) -> None:
        """An entry that both traces have."""
        entry, way = self.more.entries[at], self._way(at)
        if isinstance(entry, str) or way is None:
            self.marks[str(entry)] = len(self.order)
        elif entry >= 0:
            partner = self._partner(at)
            size = self.few.trace.sizes[self.few.number(partner or 0)]
            self.fixed[at] = self._new(entry, self._line(size, self.more.trace.sizes[entry]))
            self._name(self.more.block(at), way, 0)
        else:
            self.order.append(~self._target(way, 0))

    def _again(self, spot: Spot, zone: Zone) -> None:
        """An entry of a stretch that is put in, for one of its turns."""
        at = zone.begin + spot.place
        entry, way = self.more.entries[at], self._way(at)
        assert isinstance(entry, int) and way is not None  # noqa: S101, PT018 - phases begin once
        if entry >= 0:
            self.put_in[spot] = self._new(entry, self.more.trace.sizes[entry])
            self._name(self.more.block(at), way, spot.turn)
        else:
            self.order.append(~self._target(way, spot.turn))

    def _name(self, block: int | None, way: Way, turn: int) -> None:
        self.names[-1] = None if block is None else block + turn * way.turns + self.extra * way.extra

    def _target(self, way: Way, turn: int) -> int:
        """The number of the allocation that is referred to."""
        spot = self._spot(way.there)
        found: int | None
        if spot is None:
            found = self._further(way, turn)
        else:
            zone = self.zones[spot.zone]
            there = spot.turn + turn * way.turns + self.extra * way.extra
            if 0 <= there <= self.extra:
                found = self.put_in.get(spot._replace(turn=there))
            else:
                there -= self.extra if there > 0 else 0
                found = self.fixed.get(zone.begin + there * zone.length + spot.place)
        if found is None:
            raise BlocksDiffer("a free comes before its allocation")
        return found

    def _further(self, way: Way, turn: int) -> int | None:
        """What lies outside of all zones, at even distances from turn to turn."""
        likes, sizes = self.more.likes, self.more.trace.sizes
        last = self.more.number(way.there)
        number = last + turn * way.turns
        alike = 0 <= number < len(likes) and (likes[number], sizes[number]) == (likes[last], sizes[last])
        return self.fixed.get(self.more.made.get(number, -1)) if alike else None

    def _new(self, source: int, size: int) -> int:
        if size < 0:
            raise BlocksDiffer("a size falls below zero")
        number = len(self.sizes)
        self.sizes.append(size)
        self.sources.append(source)
        self.names.append(self.more.numbers[self.more.trace.modules[source]])
        self.order.append(number)
        return number

    def _check(self) -> None:
        """Nothing is given back twice, or before it is there."""
        alive: set[int] = set()
        for number in self.order:
            if number >= 0:
                alive.add(number)
            elif ~number in alive:
                alive.remove(~number)
            else:
                raise BlocksDiffer("something is freed twice")

    def _columns(self) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
        trace = self.more.trace
        names: dict[str, int] = {}
        modules = []
        for source, block in zip(self.sources, self.names, strict=True):
            name = trace.module_names[trace.modules[source]]
            number = _number(name, self.blocks)
            if number is not None and block is not None:
                name = f"{self.blocks}.{block}{name[len(f'{self.blocks}.{number}') :]}"
            modules.append(names.setdefault(name, len(names)))
        return {
            "streams": tuple(trace.streams[source] for source in self.sources),
            "parts": tuple(trace.parts[source] for source in self.sources),
            "ops": tuple(trace.ops[source] for source in self.sources),
            "modules": tuple(modules),
            "module_names": tuple(names),
        }

    def _causes(self) -> dict[str, tuple[tuple[int, int], ...]]:
        known = dict(self.more.trace.caused)
        caused = [(number, known[source]) for number, source in enumerate(self.sources) if source in known]
        return {"caused": tuple(caused)}

    def _recomputed(self) -> tuple[str, ...]:
        """Names of lists say how many blocks they have."""

        def counted(names: tuple[str, ...], before: int, after: int) -> tuple[str, ...]:
            was, now = (f"{self.blocks} ({count} blocks)" for count in (before, after))
            return tuple(now if name == was else name for name in names)

        few, more = self.few.trace, self.more.trace
        same = counted(few.recomputed, self.known - 1, self.known) == more.recomputed
        if not same or few.assumptions != more.assumptions:
            raise BlocksDiffer("what was said of the two differs")
        return counted(more.recomputed, self.known, self.known + self.extra)


def _longer(few: Trace, more: Trace, extra: int) -> tuple[tuple[Work, ...], tuple[int, ...], dict[str, int]]:
    """The operations with as many more blocks."""
    lists = [_works(few), _works(more)]
    likes = [[_like(work) for work in works] for works in lists]
    zones = {zone.begin: zone.length for zone in matched(lists[0], lists[1], likes[0], likes[1])}
    left = 0
    places: dict[Work, int] = {}
    sequence: list[int] = []
    phases: dict[str, int] = {}

    def put(work: Work) -> None:
        sequence.append(places.setdefault(work, len(places)))

    at = 0
    while at < len(lists[1]):
        items = lists[1][at]
        if at in zones:
            stretch = [work for work in lists[1][at : at + zones[at]] if not isinstance(work, str)]
            for _ in range(extra + 1):
                for work in stretch:
                    put(work)
            at += zones[at]
            continue
        other = lists[0][left]
        left += 1
        if isinstance(items, str) or isinstance(other, str):
            phases[str(items)] = len(sequence)
        else:
            put(items if items == other else _grown(other, items, extra))
        at += 1
    return tuple(places), tuple(sequence), phases


def _works(trace: Trace) -> list[Work | str]:
    begins = {at: name for name, at in trace.phases.items()}
    found: list[Work | str] = []
    for at, number in enumerate(trace.sequence):
        if at in begins:
            found.append(begins[at])
        found.append(trace.works[number])
    if len(trace.sequence) in begins:
        found.append(begins[len(trace.sequence)])
    return found


def _like(work: Work | str) -> Hashable:
    return (
        work if isinstance(work, str) else (work.op, work.kind, work.dtype, work.kernels > 0, len(work.dims))
    )


def _grown(few: Work, more: Work, extra: int) -> Work:
    """An operation over all blocks at once, such as the step of an optimizer."""

    def line(number: int, other: int) -> int:
        return other + extra * (other - number)

    dims = tuple(line(dim, other) for dim, other in zip(few.dims, more.dims, strict=True))
    sizes = {
        name: line(getattr(few, name), getattr(more, name)) for name in ("flops", "read_bytes", "write_bytes")
    }
    if min(*sizes.values(), *dims, 0) < 0:
        raise BlocksDiffer("an operation falls below zero")
    kernels = launches(*dims) if more.kind == "optimizer" else line(few.kernels, more.kernels)
    return more.replace(**sizes, dims=dims, kernels=kernels)
