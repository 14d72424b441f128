"""Derive the trace with some blocks recomputed from the traces with none and with all of them recomputed.

Both run the same program, but the second runs the forward pass of a block again before its backward pass. So
the allocations of the first trace are in the second one too, and the others belong to recomputed blocks. What
differs is when memory is freed. The operations of a block hold its activations if it is not recomputed; if it
is, it holds only its input. Memory is freed when the last holder releases it.

Everything is checked. If the two traces do not match in this way, TracesDiffer is raised, and the caller has
to trace the setting itself. Operations stay those without recomputation: the caller mixes the times.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from trimtab.spec import PARTS
from trimtab.spec.trace import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from trimtab.spec import RecomputeWay, Trace

GRADIENTS = PARTS.index("gradients")
LAST = 2**31
"""Place of a common allocation: after all that is recomputed or freed before it."""

LIST = re.compile(r"(?P<name>.*) \((?P<count>\d+) blocks\)")
"""A list of blocks in `Trace.recomputed`, as "layers (12 blocks)"."""


class TracesDiffer(Exception):  # noqa: N818 - not an error: the setting is traced
    """Two traces are not of the same program without and with recomputation."""


class Moment(NamedTuple):
    """A time between allocations."""

    common: int
    """How many allocations and phases of both traces come before it."""
    again: int = 0
    """How many allocations of a recomputed block come between those and it."""


class ListedBlock(NamedTuple):
    """A block that is recomputed."""

    list_name: str
    """Name of the list that has it."""
    number: int
    """Its number in the list, from 0."""


class Region(NamedTuple):
    """A recomputed block: neighbouring allocations of the second trace that the first does not have."""

    block: ListedBlock
    common: int
    """How many common allocations and phases come before it."""
    numbers: tuple[int, ...]


class RecomputeMix:
    """The traces of a setting without and with full recomputation, matched with each other."""

    def __init__(self, none: Trace, full: Trace) -> None:
        """Match the traces; raise TracesDiffer if they do not have the same program."""
        if none.beside or full.beside:
            raise TracesDiffer("ranks differ")
        self.none, self.full = none, full
        self.pairs: dict[int, int] = {}
        """Number in the second trace of each allocation of the first."""
        self.lists = _parse_lists(full)
        self.regions = self._find_regions()
        self.starts = [region.common for region in self.regions]
        self.blocks = self._list_blocks()
        """Number in its list of each recomputed block."""
        self.marks = [at for at, item in enumerate(_list_items(none)) if isinstance(item, str)]
        skipped = {number: region for region in self.regions for number in region.numbers}
        self.frees = _find_frees(none, {}), _find_frees(full, skipped)

    def _find_regions(self) -> list[Region]:
        """Pair the common allocations, and collect the others by block."""
        own, other = _list_items(self.none), _list_items(self.full)
        describe, describe_other = _descriptions(self.none), _descriptions(self.full)
        again = _find_recomputed(self.none, self.full, self.lists)
        extra: list[tuple[ListedBlock | None, int, int]] = []
        at = 0
        for item in other:
            block = None if isinstance(item, str) else again.get(item)
            if block is None and at < len(own) and _is_same(own[at], item, describe, describe_other):
                if not isinstance(item, str):
                    self.pairs[int(own[at])] = item
                at += 1
                continue
            if isinstance(item, str) or _is_gradient(self.full, item):
                raise TracesDiffer(f"at {at} of {len(own)}")
            if block is None and extra and extra[-1][1] == at:
                # The last operations of a block are outside of its modules.
                block = extra[-1][0]
            extra.append((block, at, item))
        if at < len(own):
            raise TracesDiffer("the trace with recomputation ends earlier")
        for place in range(len(extra) - 1, -1, -1):
            # So may be the first ones.
            block, common, number = extra[place]
            if block is None:
                if place + 1 == len(extra) or extra[place + 1][1] != common:
                    raise TracesDiffer("something is recomputed outside of all blocks")
                extra[place] = extra[place + 1][0], common, number
        return [
            Region(block, common, tuple(number for *_, number in group))
            for (block, common), group in groupby(extra, key=lambda entry: entry[:2])
            if block is not None
        ]

    def _list_blocks(self) -> tuple[int, ...]:
        """Return the blocks; each has to be recomputed once in a step, the last one of a list first."""
        blocks = tuple(number for count in self.lists.values() for number in range(count))
        if not blocks or len(self.regions) % len(blocks):
            raise TracesDiffer("blocks are recomputed unequally often")
        for name, count in self.lists.items():
            order = [region.block.number for region in self.regions if region.block.list_name == name]
            if order != list(range(count))[::-1] * (len(self.regions) // len(blocks)):
                raise TracesDiffer("blocks are not recomputed one after the other")
        return blocks

    def mix(self, way: RecomputeWay) -> Trace:
        """Return the trace in which the blocks are recomputed that `way` names."""
        chosen = [region for region in self.regions if way.has_block(region.block.number)]
        extra: dict[int, int] = {}
        events: list[tuple[int, int, int, int | str]] = []
        for at, item in enumerate(_list_items(self.none)):
            events.append((at, LAST, 1, item))
        for region in chosen:
            for place, number in enumerate(region.numbers):
                extra[number] = len(self.none.sizes) + len(extra)
                events.append((region.common, place, 1, extra[number]))
        for number, other in self.pairs.items():
            if (moment := self._choose_free(number, other, way)) is not None:
                events.append((*moment, 0, ~number))
        for number, mixed in extra.items():
            if number in self.frees[1]:
                events.append((*self.frees[1][number], 0, ~mixed))
        events.sort(key=lambda event: event[:3])
        order: list[int] = []
        marks: dict[str, int] = {}
        for *_, item in events:
            if isinstance(item, str):
                marks[item] = len(order)
            else:
                order.append(item)
        return self._assemble(order, marks, extra, way)

    def _choose_free(self, number: int, other: int, way: RecomputeWay) -> Moment | None:
        """Return when a common allocation is freed: when the last of its holders releases it."""
        none, full = self.frees[0].get(number), self.frees[1].get(other)
        if none is None or full is None:
            if none is not full:
                raise TracesDiffer("only one of the traces frees it")
            return None
        holders = ((none, self._block_at(none), False), (full, self._block_at(full), True))
        releases = [
            moment
            for moment, block, recomputed in holders
            if block is None or way.has_block(block.number) is recomputed
        ]
        # Only the second trace shows on which side of a recomputed block a free is.
        moment = full if none.common == full.common else max(releases, default=min(none, full))
        at = bisect_right(self.starts, moment.common) - 1
        is_beside = at >= 0 and self.starts[at] == moment.common
        return moment if is_beside and way.has_block(self.regions[at].block.number) else Moment(moment.common)

    def _block_at(self, moment: Moment) -> ListedBlock | None:
        """Return the block in whose backward pass a moment is; None outside of all."""
        at = bisect_right(self.starts, moment.common) - 1
        if at >= 0 and self.starts[at] == moment.common and not moment.again:
            at -= 1
        if at < 0:
            return None
        region = self.regions[at]
        ended = bisect_right(self.marks, region.common) < bisect_right(self.marks, moment.common - 1)
        return None if ended else region.block

    def _assemble(
        self, order: list[int], marks: dict[str, int], extra: dict[int, int], way: RecomputeWay
    ) -> Trace:
        none, full = self.none, self.full
        count = sum(map(way.has_block, self.blocks))
        names = {name: at for at, name in enumerate(none.module_names)}
        ops = {name: at for at, name in enumerate(none.op_names)}
        causes = {cause: at for at, cause in enumerate(none.causes)}
        formulas = dict(full.caused)
        modules = [names.setdefault(full.module_names[full.modules[number]], len(names)) for number in extra]
        used = [ops.setdefault(full.op_names[full.ops[number]], len(ops)) for number in extra]
        caused = [
            (mixed, causes.setdefault(full.causes[formulas[number]], len(causes)))
            for number, mixed in extra.items()
            if number in formulas
        ]
        return none.replace(
            order=tuple(order),
            sizes=(*none.sizes, *(full.sizes[number] for number in extra)),
            streams=(*none.streams, *(full.streams[number] for number in extra)),
            parts=(*none.parts, *(full.parts[number] for number in extra)),
            modules=(*none.modules, *modules),
            ops=(*none.ops, *used),
            module_names=tuple(names),
            op_names=tuple(ops),
            marks=marks,
            causes=tuple(causes),
            caused=(*none.caused, *caused),
            recomputed_flops=0,
            recomputed=(f"{count} of {len(self.blocks)} blocks",),
            assumptions=tuple(dict.fromkeys((*none.assumptions, *full.assumptions))),
        )


def _list_items(trace: Trace) -> list[int | str]:
    """Return the allocations in order, and the name of each phase where it begins."""
    begins: dict[int, list[str]] = {}
    for name, at in trace.marks.items():
        begins.setdefault(at, []).append(name)
    items: list[int | str] = []
    for at, number in enumerate(trace.order):
        items += begins.get(at, ())
        if number >= 0:
            items.append(number)
    return [*items, *begins.get(len(trace.order), ())]


def _descriptions(trace: Trace) -> list[Hashable]:
    """Return what has to be equal in both traces, for every allocation."""
    return [
        (size, stream, part, trace.op_names[op], trace.module_names[module])
        for size, stream, part, op, module in zip(
            trace.sizes, trace.streams, trace.parts, trace.ops, trace.modules, strict=True
        )
    ]


def _is_same(own: int | str, other: int | str, describe: list[Hashable], like: list[Hashable]) -> bool:
    if isinstance(own, str) or isinstance(other, str):
        return own == other
    return describe[own] == like[other]


def _is_gradient(trace: Trace, number: int) -> bool:
    return trace.parts[number] == GRADIENTS or trace.op_names[trace.ops[number]] == GRADIENT


def _parse_lists(trace: Trace) -> dict[str, int]:
    """Return the lists of blocks that a trace recomputes, each with the number of its blocks."""
    counts = [LIST.fullmatch(text) for text in trace.recomputed]
    return {match["name"]: int(match["count"]) for match in counts if match}


def _name_blocks(trace: Trace, lists: Iterable[str]) -> list[ListedBlock | None]:
    """Return the block of each name in `module_names`; None if it is outside of all blocks.

    A number in a name may also be a place outside of the lists: of "1.layers.3.norm1", 3 is the block if
    "1.layers" is the list.
    """
    prefixes = {name: f"{name}." if name else "" for name in lists}

    def find(module: str) -> ListedBlock | None:
        for name, prefix in prefixes.items():
            word = module.removeprefix(prefix).partition(".")[0]
            if module.startswith(prefix) and word.isdecimal():
                return ListedBlock(name, int(word))
        return None

    return [find(module) for module in trace.module_names]


def _find_blocks(trace: Trace, lists: Iterable[str]) -> list[ListedBlock | None]:
    """Return the block whose forward pass made each allocation; None for any other."""
    names = _name_blocks(trace, lists)
    return [
        None if _is_gradient(trace, number) else names[module] for number, module in enumerate(trace.modules)
    ]


def _find_recomputed(none: Trace, full: Trace, lists: Iterable[str]) -> dict[int, ListedBlock]:
    """Return the allocations of recomputed blocks, each with its block.

    In every phase, blocks allocate first in the forward pass, as often as without recomputation.
    """
    blocks, blocks_of_full = _find_blocks(none, lists), _find_blocks(full, lists)
    counts: list[int] = []
    for item in _list_items(none):
        if isinstance(item, str):
            counts.append(0)
        elif counts and blocks[item] is not None:
            counts[-1] += 1
    recomputed: dict[int, ListedBlock] = {}
    phase, seen, run = -1, 0, list[int]()
    for item in _list_items(full):
        if isinstance(item, str):
            phase, seen, run = phase + 1, 0, []
            continue
        block = blocks_of_full[item]
        seen += block is not None
        if phase < 0 or phase >= len(counts) or seen <= counts[phase]:
            continue
        run.append(item)
        if block is not None:
            # What is between two allocations of one block belongs to it too.
            if recomputed.get(run[0]) != block:
                run = run[-1:]
            recomputed |= dict.fromkeys(run, block)
            run = run[-1:]
    return recomputed


def _find_frees(trace: Trace, skipped: dict[int, Region]) -> dict[int, Moment]:
    """Return when each allocation is freed; `skipped` are those of recomputed blocks."""
    begins = sorted(trace.marks.values())
    frees: dict[int, Moment] = {}
    common = again = passed = 0
    for at, number in enumerate(trace.order):
        while passed < len(begins) and begins[passed] <= at:
            common, again, passed = common + 1, 0, passed + 1
        if number < 0:
            frees[~number] = Moment(common, again)
        elif number in skipped:
            again += 1
        else:
            common, again = common + 1, 0
    return frees
