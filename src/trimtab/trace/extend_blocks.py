"""Extend traces of a model with few repeated blocks to the trace with all blocks.

A model of many equal blocks runs the same program for each. Its trace is a beginning, a stretch of entries
for every block, and an end; the same again for the backward pass, the optimizer and any other loop over the
blocks. Two traces, with k blocks and with k + 1, show where the stretch of one block was inserted (with k + 2
for compiled code that treats blocks in pairs). `extend_blocks` inserts as many more as needed, and determines
for every free which allocation it frees.

Everything is checked. The inserted stretch must equal the one before it. All other entries must be the same
in both traces. References to blocks must count from the first block, from the last, or along with their own
stretch. If a check fails, the result is None, and the caller traces the whole model.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate
from operator import neg
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.trace.workspace_formulas import count_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from trimtab.spec import Trace, Work


FEW_BLOCKS = 3
"""Blocks of the smaller model: the first and the last block, and their neighbours, may be special."""


TRIALS = ("tuning", "trial")
"""Operations of inductor's benchmarks, which run once for each kernel or product."""


class BlocksDiffer(Exception):  # noqa: N818 - not an error: the result is None
    """Two traces are not of the same program with one more block."""


class Zone(NamedTuple):
    """Where the stretch of one more block was inserted."""

    begin: int
    """First position of the inserted stretch in the longer list."""
    length: int
    start: int
    """Where the equal stretches begin; the new one may have been inserted anywhere among them."""
    end: int


class Spot(NamedTuple):
    """A position among equal stretches: turn 0 is the last one, those before it count down from -1."""

    zone: int
    turn: int
    place: int


def match_blocks(
    few: Sequence[Hashable],
    more: Sequence[Hashable],
    few_kinds: Sequence[Hashable],
    more_kinds: Sequence[Hashable],
) -> list[Zone]:
    """Return the zones that were inserted into `few` to make `more`.

    `few_kinds` and `more_kinds` are the entries without their sizes, which may grow with the number of
    blocks: they have to agree even if the entries do not.
    """
    few, more = _number_tokens(few, more)
    few_kinds, more_kinds = _number_tokens(few_kinds, more_kinds)
    zones: list[Zone] = []
    left, right = 0, 0
    while right < len(more):
        if left < len(few) and few[left] == more[right]:
            left, right = left + 1, right + 1
            continue
        length = _inserted_length(few, more, few_kinds, more_kinds, left, right)
        if length:
            before = zones[-1].end if zones else 0
            zones.append(Zone(right, length, _find_start(more, right, length, before), right + length))
            right += length
        elif left < len(few) and few_kinds[left] == more_kinds[right]:
            left, right = left + 1, right + 1
        else:
            raise BlocksDiffer(f"at {left} of {len(few)} and {right} of {len(more)}")
    if left < len(few):
        raise BlocksDiffer(f"{len(few) - left} are missing at the end")
    return zones


def _number_tokens(few: Sequence[Hashable], more: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return both lists with a number for each token, which is equal for equal tokens and fast to compare."""
    numbers: dict[Hashable, int] = {}
    first, second = ([numbers.setdefault(token, len(numbers)) for token in tokens] for tokens in (few, more))
    return first, second


def _inserted_length(  # noqa: PLR0913, PLR0917 - two lists, as entries and as kinds
    few: Sequence[Hashable],
    more: Sequence[Hashable],
    few_kinds: Sequence[Hashable],
    more_kinds: Sequence[Hashable],
    left: int,
    right: int,
) -> int:
    """Return the length of the stretch that was inserted here: the best match after it; 0 for none.

    Many kinds in a row may be equal, as in a loop over parameters: then the entries themselves decide. At the
    end of the shorter list all that is left was inserted: the longest stretch is it.
    """
    at_end = left == len(few)
    best, best_agrees = 0, (-1, -1, -1)
    for length in range(1, min(right, len(more) - len(few_kinds) - (right - left)) + 1):
        if more[right - length] != more[right] or more[right - 1] != more[right + length - 1]:
            continue
        if more[right - length : right] != more[right : right + length]:
            continue
        alike = _count_equal(few_kinds, more_kinds, left, right + length)
        agrees = alike, _count_equal(few, more, left, right + length), length * at_end
        if agrees > best_agrees and (alike or at_end):
            best, best_agrees = length, agrees
    return best


def _count_equal(few: Sequence[Hashable], more: Sequence[Hashable], left: int, right: int) -> int:
    count = 0
    while left + count < len(few) and right + count < len(more) and few[left + count] == more[right + count]:
        count += 1
    return count


def _find_start(more: Sequence[Hashable], begin: int, length: int, least: int) -> int:
    start = begin
    while start > least and more[start - 1] == more[start - 1 + length]:
        start -= 1
    return start


Entry = int | str
"""Entry of a trace's order: an allocation, a free (inverted), or the name of a phase that begins here."""


class Program:
    """A trace as a list of entries that can be compared with those of another trace."""

    def __init__(self, trace: Trace, blocks: str, *, reuses: bool = False) -> None:
        self.trace = trace
        names = [_mask_block_number(name, blocks) for name in trace.module_names]
        self.numbers = [_block_number(name, blocks) for name in trace.module_names]
        rules = {number: trace.causes[at] for number, at in trace.caused}
        self.kinds = [
            (
                trace.streams[index],
                trace.parts[index],
                trace.op_names[trace.ops[index]],
                names[trace.modules[index]],
                rules.get(index),
            )
            for index in range(len(trace.sizes))
        ]
        """Everything about each allocation except its size."""
        # Consecutive frees are sorted, as torch may free in any order.
        sort_key = self._describe_freed if reuses else neg
        self.entries: list[Entry] = list(_list_entries(trace, sort_key))
        self.positions = {
            entry: at for at, entry in enumerate(self.entries) if isinstance(entry, int) and entry >= 0
        }
        """Position of each allocation."""

    def tokens(self, *, sized: bool) -> list[Hashable]:
        """Return comparable tokens of the entries, without allocation numbers."""
        sizes = self.trace.sizes

        def token(entry: Entry) -> Hashable:
            if isinstance(entry, str):
                return entry
            number = entry if entry >= 0 else ~entry
            return (entry >= 0, self.kinds[number], sizes[number] if sized else 0)

        return [token(entry) for entry in self.entries]

    def _describe_freed(self, free: int) -> tuple[str, int]:
        return str(self.kinds[~free]), self.trace.sizes[~free]

    def block(self, at: int) -> int | None:
        """Return the block that made an allocation."""
        return self.numbers[self.trace.modules[self.number(at)]]

    def number(self, at: int) -> int:
        """Return the number of the allocation at a position."""
        entry = self.entries[at]
        assert isinstance(entry, int)  # noqa: S101 - an allocation
        return entry

    def freed_position(self, at: int) -> int:
        """Return the position of the allocation that this entry frees."""
        return self.positions[~self.number(at)]


def _list_entries(trace: Trace, sort_key: Callable[[int], Any]) -> Iterator[Entry]:
    """Yield the order with phase names; consecutive frees are sorted."""
    begins: dict[int, list[str]] = {}
    for name, at in trace.marks.items():
        begins.setdefault(at, []).append(name)
    frees: list[int] = []
    for at in range(len(trace.order) + 1):
        number = trace.order[at] if at < len(trace.order) else 0
        if frees and (number >= 0 or at in begins):
            yield from sorted(frees, key=sort_key)
            frees = []
        yield from begins.get(at, ())
        if at == len(trace.order):
            return
        if number >= 0:
            yield number
        else:
            frees.append(number)


def _mask_block_number(name: str, blocks: str) -> str:
    number = _block_number(name, blocks)
    return name if number is None else f"{blocks}.*{name[len(f'{blocks}.{number}') :]}"


def _block_number(name: str, blocks: str) -> int | None:
    """Return the number of the block that a module belongs to.

    >>> _block_number("model.layers.12.mlp", "model.layers"), _block_number("model.norm", "model.layers")
    (12, None)
    """
    if not name.startswith(f"{blocks}."):
        return None
    head = name[len(blocks) + 1 :].partition(".")[0]
    return int(head) if head.isdecimal() else None


def extend_blocks(  # noqa: PLR0913 - two traces and how they differ
    few: Trace,
    more: Trace,
    *,
    blocks: str,
    traced: int,
    total: int,
    reuses: bool = False,
    elsewhere: int = 0,
    step: int = 1,
) -> Trace | None:
    """Return the trace with `total` blocks from `traced - step` and `traced` ones; None if a check fails.

    `blocks` is the module name of the list of blocks. `reuses` is for code that gives the memory of tensors
    to later ones of the same size, as compiled code does. Which of several equal allocations it frees then
    depends on the number of blocks, but changes no sum: the latest is taken. `elsewhere` are the blocks of
    the list on other ranks, which are not counted in `traced` and `total`. `step` blocks together repeat:
    compiled code may add up what two blocks return before it writes the sum.
    """
    if total == traced:
        return more
    if (total - traced) % step:
        return None
    try:
        return _Extension(
            few, more, blocks, traced, total, reuses=reuses, elsewhere=elsewhere, step=step
        ).extend()
    except BlocksDiffer:
        return None


class AllocationRef(NamedTuple):
    """How an entry refers to an allocation, for any number of blocks."""

    there: int
    """Position of the allocation in the longer trace."""
    turns: int = 0
    """Turns by which the allocation moves for each turn of this entry."""
    extra: int = 0
    """Turns by which the allocation moves for each additional block."""


class _Source(NamedTuple):
    """An entry of the longer trace in a zone, and how its copies differ from it."""

    entry: int
    reference: AllocationRef | None
    """What it refers to; None if it frees the latest allocation of its kind."""
    size: int
    block: int | None
    """The block of an allocation in the extended trace, before it is moved by turns."""
    numbers: dict[int, int] | None
    """Numbers of allocations at a place of a zone, by turn: this one's place, or the one that it frees. None
    if it frees an allocation outside of all zones."""
    turn: int
    """Turn of the allocation that it frees."""
    moves: int
    """Blocks by which an allocation moves for each turn; turns, for a free."""


class _Place(NamedTuple):
    """A place of a zone, with the entries that the longer trace has there."""

    inserted: int
    """The turn that counts as the inserted one."""
    sources: dict[int, _Source]
    """By turn."""


class _Extension:
    """Extends one list of blocks from `traced` to `total`."""

    def __init__(  # noqa: PLR0913 - as extend_blocks()
        self,
        few: Trace,
        more: Trace,
        blocks: str,
        traced: int,
        total: int,
        *,
        reuses: bool = False,
        elsewhere: int = 0,
        step: int = 1,
    ) -> None:
        self.reuses, self.elsewhere, self.step = reuses, elsewhere, step
        self.alive: dict[Hashable, list[int]] = {}
        """Allocations that are not freed yet, by everything about them; only with `reuses`."""
        self.few, self.more = (Program(trace, blocks, reuses=reuses) for trace in (few, more))
        self.blocks, self.traced, self.extra = blocks, traced, (total - traced) // step
        self.zones = match_blocks(
            self.few.tokens(sized=True),
            self.more.tokens(sized=True),
            self.few.tokens(sized=False),
            self.more.tokens(sized=False),
        )
        self._check_trials()
        self.put_before = [0, *accumulate(zone.length for zone in self.zones)]
        self.begins_in_few = [
            zone.begin - before for zone, before in zip(self.zones, self.put_before, strict=False)
        ]
        """Where each zone was inserted into the shorter trace."""
        self.order: list[int] = []
        self.sources: list[int] = []
        """For each new allocation, the allocation of the longer trace that it copies."""
        self.sizes: list[int] = []
        self.names: list[int | None] = []
        """The block of each allocation."""
        self.fixed: dict[int, int] = {}
        """Numbers of allocations outside of all zones, by position in the longer trace."""
        self.repeated: dict[tuple[int, int], dict[int, int]] = {}
        """Numbers of allocations in zones, by zone and place, then by turn; turns run on to `extra`."""
        self.inserted_turns: dict[tuple[int, int], int] = {}
        """By zone and place: the turn that counts as the inserted one."""
        self.marks: dict[str, int] = {}
        self.spots = self._list_spots()
        """Place of each position of the longer trace in its zone."""
        self.references: dict[int, AllocationRef | None] = {}
        """What each entry of a zone refers to, by position in the longer trace."""
        self.places: dict[tuple[int, int], _Place] = {}
        """By zone and place."""

    def extend(self) -> Trace:
        """Return the extended trace."""
        few, more = self.few.trace, self.more.trace
        for spot in self.spots:
            if spot is not None and spot.turn == 0:
                self._locate_insertion(spot)
        self._copy_entries()
        self._check()
        works, sequence, phases = _extend_works(few, more, self.extra, reuses=self.reuses)
        return more.replace(
            order=tuple(self.order),
            sizes=tuple(self.sizes),
            **self._columns(),
            marks=self.marks,
            **self._causes(),
            works=works,
            sequence=sequence,
            phases=phases,
            recomputed_flops=self._extrapolate(few.recomputed_flops, more.recomputed_flops),
            parameters=self._extrapolate(few.parameters, more.parameters),
            trainable=self._extrapolate(few.trainable, more.trainable),
            recomputed=self._recomputed(),
            kept_bytes=self._extrapolate(few.kept_bytes, more.kept_bytes),
            assumptions=self._extend_assumptions(),
            pinned_sizes=_repeat_insertion(few.pinned_sizes, more.pinned_sizes, self.extra),
            host_state_bytes=self._extrapolate(few.host_state_bytes, more.host_state_bytes),
            checkpoint_bytes=self._extrapolate(few.checkpoint_bytes, more.checkpoint_bytes),
            host_sizes=_repeat_insertion(few.host_sizes, more.host_sizes, self.extra),
        )

    def _copy_entries(self) -> None:
        """Copy all entries of the longer trace, and repeat the last turn of each zone."""
        last_turns = {zone.begin: (index, zone.length) for index, zone in enumerate(self.zones)}
        at = 0
        while at < len(self.more.entries):
            spot = self._spot(at)
            if at in last_turns:
                index, length = last_turns[at]
                places = [self._place(index, place) for place in range(length)]
                for turn in range(self.extra + 1):
                    self._repeat_entries(places, turn)
                at += length
                continue
            if spot is not None:
                self._repeat_entries([self._place(spot.zone, spot.place)], spot.turn)
            else:
                self._copy_entry(at)
            at += 1

    def _check_trials(self) -> None:
        """Check that no block repeats what compiled code tries out once, such as kernel configurations."""
        for zone in self.zones:
            entries = self.more.entries[zone.begin : zone.end]
            numbers = [entry for entry in entries if isinstance(entry, int) and entry >= 0]
            if any(self.more.trace.op_names[self.more.trace.ops[number]] in TRIALS for number in numbers):
                raise BlocksDiffer("each block tries something out")

    def _extrapolate(self, few: int, more: int) -> int:
        return more + self.extra * (more - few)

    def _locate_insertion(self, last: Spot) -> None:
        """Find the inserted one of equal entries at a place: the one for which all references agree.

        References of the turns before and after it then count from the first block or from the last. It may
        be another turn for each place: some entries are special at the first turns, others at the last.
        """
        zone = self.zones[last.zone]
        turns = self._turns(last.zone, last.place)
        positions = [zone.begin + turn * zone.length + last.place for turn in turns]
        wrong: BlocksDiffer | None = None
        for inserted in reversed(turns[1:]):
            self.inserted_turns[last.zone, last.place] = inserted
            try:
                for at in positions:
                    self.references[at] = self._reference(at)
            except BlocksDiffer as error:
                wrong = wrong or error
            else:
                return
        raise wrong or BlocksDiffer("no stretch before it is the same")

    def _turns(self, zone_index: int, place: int) -> range:
        """Return the turns that the longer trace has of a place in a zone."""
        zone = self.zones[zone_index]
        return range((zone.start - zone.begin - place + zone.length - 1) // zone.length, 1)

    def _zone(self, at: int) -> int:
        """Return the number of zones that begin before a position."""
        return bisect_right(self.zones, at, key=lambda zone: zone.begin)

    def _partner(self, at: int) -> int | None:
        """Return the position in the shorter trace; None for an inserted entry."""
        spot = self._spot(at)
        if spot is None:
            return at - self.put_before[self._zone(at)]
        inserted = self.inserted_turns[spot.zone, spot.place]
        if spot.turn == inserted:
            return None
        moved = self.zones[spot.zone].length if spot.turn > inserted else 0
        return at - moved - self.put_before[spot.zone]

    def _position_in_more(self, left: int) -> int:
        """Return the position in the longer trace of an entry of the shorter trace."""
        return left + self.put_before[bisect_right(self.begins_in_few, left)]

    def _spot(self, at: int) -> Spot | None:
        return self.spots[at] if at >= 0 else None

    def _list_spots(self) -> list[Spot | None]:
        """Return the place of each position of the longer trace in its zone, and of the end."""
        spots: list[Spot | None] = [None] * (len(self.more.entries) + 1)
        for index, zone in enumerate(self.zones):
            for at in range(zone.start, zone.end):
                spots[at] = Spot(index, *divmod(at - zone.begin, zone.length))
        return spots

    def _reference(self, at: int) -> AllocationRef | None:
        """Return what an entry refers to: a free to its allocation, an allocation to its block."""
        entry, partner = self.more.entries[at], self._partner(at)
        if isinstance(entry, str) or (entry < 0 and self.reuses):
            return None
        if partner is None:
            spot = self._spot(at)
            assert spot is not None  # noqa: S101 - only zones have inserted entries
            return self._reference_inserted(at, at - self.zones[spot.zone].length, free=entry < 0)
        return self._reference_common(at, partner, free=entry < 0)

    def _reference_inserted(self, at: int, before: int, *, free: bool) -> AllocationRef:
        """Return the reference of an inserted entry, by comparison with the stretch before it."""
        if not free:
            turns = self._count_turns(self.more.block(before), self.more.block(at))
            return AllocationRef(at, *self._direction(turns)) if turns else AllocationRef(at)
        there, then_there = self.more.freed_position(at), self.more.freed_position(before)
        spot, other = self._spot(there), self._spot(then_there)
        if spot is not None and other is not None:
            if (spot.zone, spot.place) != (other.zone, other.place):
                raise BlocksDiffer("two turns free at different places")
            return AllocationRef(there, *self._direction(spot.turn - other.turn))
        if spot is None and other is None:
            return AllocationRef(there, self.more.number(there) - self.more.number(then_there))
        step = self._count_blocks_between(then_there, there)
        if spot is None or not step:
            raise BlocksDiffer("one turn frees what was put in, another what was not")
        return AllocationRef(there, *self._direction(step))

    def _count_blocks_between(self, before: int, there: int) -> int:
        """Return by how many blocks two equal allocations are apart; 0 if they are not equal.

        The first block may be no equal stretch, as it does not free what the embedding allocated, but it
        allocates the same.
        """
        first, last = self.more.number(before), self.more.number(there)
        if self._describe(first) != self._describe(last):
            return 0
        if self.more.block(before) is None and self.more.block(there) is None:
            return self._count_equal_turns(first, last, self._spot(there))
        return self._count_turns(self.more.block(before), self.more.block(there))

    def _count_equal_turns(self, first: int, last: int, spot: Spot | None) -> int:
        """Return by how many turns two equal allocations of no block are apart; 0 if not by full turns.

        FSDP allocates its buffers between blocks. Count the equal allocations from the first to the last, and
        those in one turn.
        """
        if spot is None:
            return 0
        zone = self.zones[spot.zone]
        in_turn = sum(
            isinstance(entry, int) and entry >= 0 and self._describe(entry) == self._describe(last)
            for entry in self.more.entries[zone.begin : zone.end]
        )
        between = sum(self._describe(number) == self._describe(last) for number in range(first, last))
        return 0 if between % in_turn else between // in_turn

    def _count_turns(self, first: int | None, last: int | None) -> int:
        """Return by how many turns two blocks are apart; 0 if an entry belongs to none."""
        if first is None or last is None:
            return 0
        turns, rest = divmod(last - first, self.step)
        if rest:
            raise BlocksDiffer(f"block {last} is no repetition of {first}")
        return turns

    def _direction(self, step: int) -> tuple[int, int]:
        """Return the direction of a reference: forward with the entry, or backward from the last turn."""
        if step == 1:
            return 1, 0
        if step == -1:
            return -1, 1
        raise BlocksDiffer(f"from turn to turn it moves by {step}")

    def _reference_common(self, at: int, partner: int, *, free: bool) -> AllocationRef:
        """Return the reference of an entry of both traces, by comparison with the shorter one."""
        if not free:
            now, then = self.more.block(at), self.few.block(partner)
            turns = self._count_turns(then, now)
            if turns not in (0, 1):
                raise BlocksDiffer(f"block {then} became {now}")
            return AllocationRef(at, 0, turns)
        there = self.more.freed_position(at)
        before = self._position_in_more(self.few.freed_position(partner))
        spot, other = self._spot(there), self._spot(before)
        if spot is None:
            if before == there:
                return AllocationRef(there)
            raise BlocksDiffer(f"the free at {at} is of {there}, and was of {before}")
        if other is None or (spot.zone, spot.place) != (other.zone, other.place):
            raise BlocksDiffer(f"the free at {at} is of {spot}, and was of {other}")
        step = spot.turn - other.turn
        if step not in (0, 1):
            raise BlocksDiffer(f"the free at {at} moved by {step}")
        return AllocationRef(there, 0, step)

    def _copy_entry(self, at: int) -> None:
        """Copy an entry that both traces have."""
        entry, reference = self.more.entries[at], self._reference(at)
        if isinstance(entry, str):
            self.marks[entry] = len(self.order)
        elif entry >= 0 and reference is not None:
            partner = self._partner(at)
            size = self.few.trace.sizes[self.few.number(partner or 0)]
            block = self.more.block(at)
            if block is not None:
                block += self.step * self.extra * reference.extra
            size = self._extrapolate(size, self.more.trace.sizes[entry])
            if size < 0:
                raise BlocksDiffer("a size falls below zero")
            self._add_allocation(entry, size, block)
            self.fixed[at] = self.order[-1]
        else:
            self._add_free(entry, reference, 0)

    def _place(self, zone_index: int, place: int) -> _Place:
        """Return the entries at a place of a zone, and how they are copied."""
        key = zone_index, place
        if key not in self.places:
            zone = self.zones[zone_index]
            turns = self._turns(*key)
            sources = {turn: self._source(zone.begin + turn * zone.length + place) for turn in turns}
            self.places[key] = _Place(self.inserted_turns[key], sources)
        return self.places[key]

    def _source(self, at: int) -> _Source:
        """Return how copies of an entry of a zone differ from it."""
        entry, reference = self.more.entries[at], self.references[at]
        assert isinstance(entry, int)  # noqa: S101 - phases begin once
        if reference is None:
            return _Source(entry, None, 0, None, None, 0, 0)
        spot = self._spot(reference.there)
        numbers = None if spot is None else self.repeated.setdefault((spot.zone, spot.place), {})
        if entry < 0:
            turn = 0 if spot is None else spot.turn + self.extra * reference.extra
            return _Source(entry, reference, 0, None, numbers, turn, reference.turns)
        block = self.more.block(at)
        if block is not None:
            block += self.step * self.extra * reference.extra
        moves = self.step * reference.turns
        return _Source(entry, reference, self.more.trace.sizes[entry], block, numbers, 0, moves)

    def _repeat_entries(self, places: list[_Place], turn: int) -> None:
        """Add entries of a zone for a turn, which may be one that the longer trace does not have."""
        extra, order, sizes, names = self.extra, self.order, self.sizes, self.names
        for place in places:
            copies = turn - place.inserted
            if 0 < copies <= extra:
                # The inserted entry is repeated for every additional block.
                source = place.sources[place.inserted]
            else:
                source = place.sources[turn - extra if copies > 0 else turn]
                copies = 0
            entry, reference, size, block, numbers, freed_turn, moves = source
            if numbers is None:
                self._add_free(entry, reference, copies)
            elif entry >= 0:
                numbers[turn] = number = len(sizes)
                sizes.append(size)
                self.sources.append(entry)
                names.append(None if block is None else block + copies * moves)
                order.append(number)
                if self.reuses:
                    self.alive.setdefault(self._describe(entry), []).append(number)
            else:
                freed = numbers.get(freed_turn + copies * moves)
                if freed is None:
                    raise BlocksDiffer("a free comes before its allocation")
                order.append(~freed)

    def _add_allocation(self, source: int, size: int, block: int | None) -> None:
        number = len(self.sizes)
        self.sizes.append(size)
        self.sources.append(source)
        self.names.append(block)
        self.order.append(number)
        if self.reuses:
            self.alive.setdefault(self._describe(source), []).append(number)

    def _add_free(self, entry: int, reference: AllocationRef | None, turn: int) -> None:
        """Free what an entry of the longer trace refers to, or the latest allocation of its kind."""
        if reference is not None:
            self.order.append(~self._target(reference, turn))
            return
        equal = self.alive.get(self._describe(~entry))
        if not equal:
            raise BlocksDiffer("a free comes before its allocation")
        self.order.append(~equal.pop())

    def _describe(self, number: int) -> Hashable:
        """Return everything about an allocation of the longer trace."""
        return self.more.kinds[number], self.more.trace.sizes[number]

    def _target(self, reference: AllocationRef, turn: int) -> int:
        """Return the number of the allocation that is referred to."""
        spot = self._spot(reference.there)
        number: int | None
        if spot is None:
            number = self._find_outside(reference, turn)
        else:
            there = spot.turn + turn * reference.turns + self.extra * reference.extra
            number = self.repeated.get((spot.zone, spot.place), {}).get(there)
        if number is None:
            raise BlocksDiffer("a free comes before its allocation")
        return number

    def _find_outside(self, reference: AllocationRef, turn: int) -> int | None:
        """Return an allocation outside of all zones, at equal distances from turn to turn."""
        kinds, sizes = self.more.kinds, self.more.trace.sizes
        last = self.more.number(reference.there)
        number = last + turn * reference.turns
        is_equal = 0 <= number < len(kinds) and (kinds[number], sizes[number]) == (kinds[last], sizes[last])
        return self.fixed.get(self.more.positions.get(number, -1)) if is_equal else None

    def _check(self) -> None:
        """Check that nothing is freed twice or before its allocation."""
        alive: set[int] = set()
        allocate, free = alive.add, alive.remove
        try:
            for number in self.order:
                if number >= 0:
                    allocate(number)
                else:
                    free(~number)
        except KeyError:
            raise BlocksDiffer("something is freed twice") from None

    def _columns(self) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
        trace = self.more.trace
        names: dict[str, int] = {}
        moved: dict[tuple[int, int | None], int] = {}
        modules = []
        for source, block in zip(self.sources, self.names, strict=True):
            key = trace.modules[source], block
            if key not in moved:
                moved[key] = names.setdefault(self._rename(*key), len(names))
            modules.append(moved[key])
        return {
            "streams": tuple(map(trace.streams.__getitem__, self.sources)),
            "parts": tuple(map(trace.parts.__getitem__, self.sources)),
            "ops": tuple(map(trace.ops.__getitem__, self.sources)),
            "modules": tuple(modules),
            "module_names": tuple(names),
        }

    def _rename(self, module: int, block: int | None) -> str:
        """Return the name of a module of the longer trace in another block."""
        name = self.more.trace.module_names[module]
        number = self.more.numbers[module]
        if number is None or block is None:
            return name
        return f"{self.blocks}.{block}{name[len(f'{self.blocks}.{number}') :]}"

    def _causes(self) -> dict[str, tuple[tuple[int, int], ...]]:
        causes = dict(self.more.trace.caused)
        caused = [(number, causes[source]) for number, source in enumerate(self.sources) if source in causes]
        return {"caused": tuple(caused)}

    def _recomputed(self) -> tuple[str, ...]:
        """Return the names of recomputed lists, which contain the number of blocks."""

        def counted(names: tuple[str, ...], before: int, after: int) -> tuple[str, ...]:
            was, now = (f"{self.blocks} ({count + self.elsewhere} blocks)" for count in (before, after))
            return tuple(now if name == was else name for name in names)

        few, more = self.few.trace, self.more.trace
        if counted(few.recomputed, self.traced - self.step, self.traced) != more.recomputed:
            raise BlocksDiffer("the recomputed blocks of the two differ")
        return counted(more.recomputed, self.traced, self.traced + self.step * self.extra)

    def _extend_assumptions(self) -> tuple[str, ...]:
        """Return the assumptions; numbers in them that grow with the blocks grow on."""
        few, more = self.few.trace.assumptions, self.more.trace.assumptions
        if len(few) != len(more):
            raise BlocksDiffer("the assumptions of the two differ")
        return tuple(_extend_text(*texts, self.extra) for texts in zip(few, more, strict=True))


def _extend_text(few: str, more: str, extra: int) -> str:
    """Return a text whose whole numbers grow with each block, as in: 6 linear layers.

    >>> _extend_text("tp: 8 ranks split 6 layers", "tp: 8 ranks split 8 layers", 10)
    'tp: 8 ranks split 28 layers'
    """
    parts = [re.split(r"(?<![\d.])(\d+)(?![\d.])", text) for text in (few, more)]
    if few == more:
        return more
    if len(parts[0]) != len(parts[1]) or parts[0][::2] != parts[1][::2]:
        raise BlocksDiffer(f"an assumption differs: {more}")
    for index in range(1, len(parts[1]), 2):
        before, after = int(parts[0][index]), int(parts[1][index])
        parts[1][index] = str(after + extra * (after - before))
    return "".join(parts[1])


def _repeat_insertion(few: tuple[int, ...], more: tuple[int, ...], extra: int) -> tuple[int, ...]:
    """Return `more` with `extra` more copies of what it has beyond `few`.

    >>> _repeat_insertion((1, 2, 3, 9), (1, 2, 3, 2, 3, 9), 2)
    (1, 2, 3, 2, 3, 2, 3, 2, 3, 9)
    """
    length = len(more) - len(few)
    begin = next(
        (at for at, sizes in enumerate(zip(few, more, strict=False)) if sizes[0] != sizes[1]), len(few)
    )
    if length < 0 or few != (*more[:begin], *more[begin + length :]):
        raise BlocksDiffer("copies on the host are no repetition")
    return (*more[: begin + length], *more[begin : begin + length] * extra, *more[begin + length :])


def _extend_works(
    few: Trace, more: Trace, extra: int, *, reuses: bool
) -> tuple[tuple[Work, ...], tuple[int, ...], dict[str, int]]:
    """Return works, sequence and phases with `extra` more blocks."""
    lists = [_list_works(trace) for trace in (few, more)]
    if reuses:
        # Compiled code takes no time for views, and needs other ones where it uses memory again.
        lists = [[work for work in works if isinstance(work, str) or work.kind != "view"] for works in lists]
    tokens = [[_round_work(work) if reuses else work for work in works] for works in lists]
    kinds = [[_work_signature(work) for work in works] for works in lists]
    zones = {zone.begin: zone.length for zone in match_blocks(*tokens, *kinds)}
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
            begin = len(sequence)
            for work in lists[1][at : at + zones[at]]:
                if not isinstance(work, str):
                    put(work)
            sequence += sequence[begin:] * extra
            at += zones[at]
            continue
        other = lists[0][left]
        left += 1
        if isinstance(items, str) or isinstance(other, str):
            phases[str(items)] = len(sequence)
        else:
            put(items if items == other else _extend_work(other, items, extra))
        at += 1
    return tuple(places), tuple(sequence), phases


def _list_works(trace: Trace) -> list[Work | str]:
    begins = {at: name for name, at in trace.phases.items()}
    entries: list[Work | str] = []
    for at, number in enumerate(trace.sequence):
        if at in begins:
            entries.append(begins[at])
        entries.append(trace.works[number])
    if len(trace.sequence) in begins:
        entries.append(begins[len(trace.sequence)])
    return entries


def _round_work(work: Work | str) -> Hashable:
    """Return an operation without the last digits of the bytes that it reads.

    Kernels that the compiler makes for dropout read the seeds of all blocks.
    """
    return work if isinstance(work, str) else (f"{work.read_bytes:.3g}", work.replace(read_bytes=0))


def _work_signature(work: Work | str) -> Hashable:
    return (
        work if isinstance(work, str) else (work.op, work.kind, work.dtype, work.kernels > 0, len(work.dims))
    )


def _extend_work(few: Work, more: Work, extra: int) -> Work:
    """Extend an operation over all blocks at once, such as an optimizer step."""

    def line(number: int, other: int) -> int:
        return other + extra * (other - number)

    dims = tuple(line(dim, other) for dim, other in zip(few.dims, more.dims, strict=True))
    sizes = {
        name: line(getattr(few, name), getattr(more, name)) for name in ("flops", "read_bytes", "write_bytes")
    }
    if min(*sizes.values(), *dims, 0) < 0:
        raise BlocksDiffer("an operation falls below zero")
    kernels = count_launches(*dims) if more.kind == "optimizer" else line(few.kernels, more.kernels)
    return more.replace(**sizes, dims=dims, kernels=kernels)
