"""Sets a recorded trace of the real CUDA caching allocator beside our replay of the same requests.

    python compare.py trace.json.gz --capacity 150109880320
    python compare.py trace.json.gz --expandable
    python compare.py trace-*.json.gz --measurements measurements.jsonl

The file holds `torch.cuda.memory._snapshot()["device_traces"][0]` as gzip'ed JSON: a list of
objects with `action`, `addr`, `size` and `stream`, or what `measure.py` makes of it: an object with
`id`, `actions`, `events` of [action's index, addr, size, stream], and `marks`, the number of events
after building ("build"), the first and the second step ("step1", "step2"). Record it from the first
allocation of the process, in one piece (`_record_memory_history(max_entries=...)` large enough).

With `--measurements`, the peaks of building, of the first step and of the later ones are set beside
what torch itself reported. (It measured later steps than the trace holds, too.)

In that trace the size of `alloc`, `free_requested` and `free_completed` is what was asked for,
before rounding; that of the `segment_` actions is what the device gave. So real `reserved` is read
off, while real `allocated` is worked out: a block starts where a free stretch started, hence its
length, with the remainder that was or was not split off, follows from the addresses.

Not covered: private pools, and settings other than those of the command line. Freed segments are
taken for `torch.cuda.empty_cache()`, unless `--capacity` is given and new memory or out of memory
follows. Where each request first found its block (`place`) is compared for `cudaMalloc` segments
only: the trace of an expandable one does not say where its address range begins.
"""

from __future__ import annotations

import argparse
import gzip
import json
from bisect import bisect_right, insort
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.predict.allocator import (
    AllocatorConfig,
    CachingAllocator,
    Event,
    ReplayPeaks,
    round_size,
    should_split,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Entry = dict[str, Any]
"""One entry of the trace."""

GROWS = ("segment_alloc", "segment_map")
SHRINKS = ("segment_free", "segment_unmap")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One file."""

    entries: list[Entry]
    ident: str
    marks: dict[str, int]
    """Number of entries when something ended; empty where it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One request of the trace, and what the real allocator held after it."""

    index: int
    """Its place in the trace."""
    event: Event
    reserved: int
    """Real, in bytes."""
    place: tuple[int, int] | None
    """Real segment, numbered by creation, and offset in it; None where it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first request after which the two differ."""

    index: int
    event: Event
    what: str
    real: object
    modelled: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Real against modelled peaks, in bytes."""

    num_requests: int
    num_unknown_frees: int
    """Frees of blocks that were allocated before the trace began."""
    real_reserved: int
    reserved: int
    real_allocated: int | None
    """None where the trace does not explain itself."""
    allocated: int
    num_retries: int
    out_of_memory: bool
    divergences: tuple[Divergence, ...]
    """The first in `reserved`, the first in `place`; neither when all agree."""
    windows: tuple[ReplayPeaks, ...]
    """Modelled peaks of each stretch between the resets asked for."""
    real_segments: tuple[int, ...]
    """Sizes in order of creation; for expandable segments, of each mapping."""
    segments: tuple[int, ...]
    """Ours, as growth of `reserved`: the pages that one request maps count as one."""
    num_moved: int
    """Allocations that ended up in another segment, or elsewhere in it, than the real ones."""


class RealHeap:
    """The real allocator's free stretches and blocks, from the addresses of its trace."""

    def __init__(self, config: AllocatorConfig) -> None:
        self.config = config
        self.reserved = self.peak_reserved = 0
        self.allocated = self.peak_allocated = 0
        self.explained = True
        self._free: dict[int, int] = {}
        """End of each free stretch, by its start."""
        self._starts: dict[int, int] = {}
        """And the other way round."""
        self._blocks: dict[int, int] = {}
        self._segments: dict[int, tuple[int, int]] = {}
        """Ordinal and end of each `cudaMalloc`, by its start."""
        self._bases: list[int] = []
        self._made = 0

    def see(self, entry: Entry) -> None:
        """Take one entry in."""
        action, start, size = entry["action"], entry["addr"], entry["size"]
        if action in GROWS:
            self._grow(start, size, bounded=action == "segment_alloc")
        elif action in SHRINKS:
            self.reserved -= size
            if self._segments.pop(start, None) is not None:
                self._bases.remove(start)
            self._cut(start, start + size)
        elif action == "alloc":
            self._take(start, round_size(size, self.config))
        elif action == "free_requested":
            self.allocated -= self._blocks.get(start, 0)
        elif action == "free_completed" and start in self._blocks:
            self._add(start, start + self._blocks.pop(start))

    def place(self, address: int) -> tuple[int, int] | None:
        """Which segment an address lies in, by creation, and how far; only for `cudaMalloc`'s."""
        at = bisect_right(self._bases, address) - 1
        if at < 0 or address >= self._segments[self._bases[at]][1]:
            return None
        return self._segments[self._bases[at]][0], address - self._bases[at]

    def _grow(self, start: int, size: int, *, bounded: bool) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if bounded:
            self._segments[start] = (self._made, start + size)
            insort(self._bases, start)
            self._made += 1
        self._add(start, start + size)

    def _add(self, start: int, end: int) -> None:
        """A free stretch, merged with its neighbours unless a segment begins between them."""
        before = self._starts.get(start)
        if before is not None and start not in self._segments:
            del self._starts[start]
            start = before
        after = self._free.get(end)
        if after is not None and end not in self._segments:
            del self._free[end]
            end = after
        self._free[start] = end
        self._starts[end] = start

    def _take(self, start: int, size: int) -> None:
        end = self._free.pop(start, None)
        if end is None or end - start < size:
            self.explained = False
            end = start + size
        else:
            del self._starts[end]
        stop = start + size if should_split(end - start - size, size, self.config) else end
        if stop < end:
            self._free[stop] = end
            self._starts[end] = stop
        self._blocks[start] = stop - start
        self.allocated += stop - start
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _cut(self, start: int, end: int) -> None:
        """Take a stretch out of the free one that holds it."""
        for left, right in self._free.items():
            if left <= start and end <= right:
                break
        else:
            self.explained = False
            return
        del self._free[left], self._starts[right]
        for low, high in ((left, start), (end, right)):
            if low < high:
                self._free[low] = high
                self._starts[high] = low


def load(path: Path) -> Trace:
    """Read a file of either form."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        held = json.load(file)
    name = path.name.removesuffix(".json.gz")
    if isinstance(held, list):
        return Trace(entries=held, ident=name, marks={})
    if not isinstance(held, dict) or "events" not in held or "actions" not in held:
        raise ValueError(f"{path}: is no trace. Dump device_traces[0], or use measure.py.")
    if held.get("kept_events", 0) < held.get("total_events", 0):
        raise ValueError(f"{path}: the trace was cut short. Record fewer steps.")
    entries = [
        {"action": held["actions"][action], "addr": addr, "size": size, "stream": stream}
        for action, addr, size, stream in held["events"]
    ]
    return Trace(entries=entries, ident=held.get("id", name), marks=held.get("marks", {}))


def compare(
    trace: Sequence[Entry],
    config: AllocatorConfig,
    *,
    real_addresses: bool = False,
    reset_peak_at: Sequence[int] = (),
) -> Comparison:
    """Replay the requests of a trace and set the outcome beside the real one."""
    bases = [entry["addr"] for entry in trace if entry["action"] == "segment_alloc"]
    ours = CachingAllocator(config, segment_addresses=bases if real_addresses else ())
    heap = RealHeap(config)
    unknown: list[int] = []
    first: dict[str, Divergence] = {}
    windows: list[ReplayPeaks] = []
    segments: list[int] = []
    resets = sorted(reset_peak_at)
    count = moved = 0
    failed = False
    for step in _steps(trace, heap, unknown, flushes_itself=config.capacity_bytes is not None):
        count += 1
        if failed:
            continue
        while resets and resets[0] <= step.index:
            windows.append(ours.reset_peaks())
            del resets[0]
        held = ours.reserved
        failed = bool(ours.apply(step.event))
        if ours.reserved > held:
            segments.append(ours.reserved - held)
        for found in _differences(step, ours, failed=failed):
            moved += found.what == "place"
            first.setdefault(found.what, found)
    windows += [ours.reset_peaks() for _ in range(len(resets) + 1)]
    return Comparison(
        num_requests=count,
        num_unknown_frees=len(unknown),
        real_reserved=heap.peak_reserved,
        reserved=max(peaks.reserved for peaks in windows),
        real_allocated=heap.peak_allocated if heap.explained else None,
        allocated=max(peaks.allocated for peaks in windows),
        num_retries=ours.num_retries,
        out_of_memory=failed,
        divergences=tuple(first.values()),
        windows=tuple(windows),
        real_segments=tuple(entry["size"] for entry in trace if entry["action"] in GROWS),
        segments=tuple(segments),
        num_moved=moved,
    )


def _steps(
    trace: Sequence[Entry], heap: RealHeap, unknown: list[int], *, flushes_itself: bool
) -> Iterator[Step]:
    """The requests of a trace; the heap is kept one entry ahead of each."""
    ids: dict[int, int] = {}
    for index, entry in enumerate(trace):
        heap.see(entry)
        event: Event | None = None
        place: tuple[int, int] | None = None
        if entry["action"] == "alloc":
            ids[entry["addr"]] = index
            event = ("alloc", index, entry["size"], entry["stream"])
            place = heap.place(entry["addr"])
        elif entry["action"] == "free_completed":
            ident = ids.pop(entry["addr"], None)
            event = None if ident is None else ("free", ident, 0, 0)
            if ident is None:
                unknown.append(index)
        elif _empties_cache(trace, index, flushes_itself=flushes_itself):
            event = ("empty_cache", 0, 0, 0)
        if event is not None:
            yield Step(index=index, event=event, reserved=heap.reserved, place=place)


def _empties_cache(trace: Sequence[Entry], index: int, *, flushes_itself: bool) -> bool:
    """Whether this entry ends a run of frees that the replay would not make by itself."""
    if trace[index]["action"] not in SHRINKS:
        return False
    after = trace[index + 1]["action"] if index + 1 < len(trace) else ""
    if after in SHRINKS:
        return False
    return not (flushes_itself and after in (*GROWS, "oom"))


def _differences(step: Step, ours: CachingAllocator, *, failed: bool) -> Iterator[Divergence]:
    pairs: list[tuple[str, object, object]] = [("reserved", step.reserved, ours.reserved)]
    if failed:
        pairs.append(("out of memory", False, True))
    elif step.place is not None:
        place = ours.place(step.event[1])
        pairs.append(("place", step.place, None if place is None else place[:2]))
    for what, real, modelled in pairs:
        if real != modelled:
            yield Divergence(index=step.index, event=step.event, what=what, real=real, modelled=modelled)


def render(comparison: Comparison) -> str:
    """The comparison as a few lines of text."""
    rows = [
        f"{comparison.num_requests} requests, {comparison.num_retries} modelled retries",
        f"{'':9} {'real MiB':>12} {'model MiB':>12} {'error':>8}",
        _row("reserved", comparison.real_reserved, comparison.reserved),
        _row("allocated", comparison.real_allocated, comparison.allocated),
    ]
    if comparison.num_unknown_frees:
        rows.append(f"{comparison.num_unknown_frees} frees of blocks from before the trace: ignored")
    if comparison.out_of_memory:
        rows.append("the model ran out of memory where the real one did not, and stopped there")
    rows += [
        f"{item.what} first differs at entry {item.index} {item.event}: "
        f"real {item.real}, model {item.modelled}"
        for item in comparison.divergences
    ]
    if comparison.num_moved:
        rows.append(f"{comparison.num_moved} allocations lie elsewhere")
    if not comparison.divergences:
        rows.append("no divergence")
    return "\n".join(rows)


def render_measured(windows: Sequence[ReplayPeaks], measured: Entry) -> str:
    """Modelled peaks of building, first and later steps beside torch's own statistics."""
    rows = []
    for name, peaks in zip(("build", "first", "later"), windows, strict=True):
        for what, value in peaks._asdict().items():
            real = measured[name][what]
            rows.append(_row(f"{name} {what}", real, value) + f"   {value - real:+d} bytes")
    return "\n".join(rows)


def _row(name: str, real: int | None, modelled: int) -> str:
    if real is None:
        return f"{name:9} {'unknown':>12} {modelled / MIB:12.2f}"
    error = f"{100 * (modelled - real) / real:+7.2f}%" if real else ""
    return f"{name:9} {real / MIB:12.2f} {modelled / MIB:12.2f} {error:>8}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare files; the exit code says whether anything diverged."""
    parser = argparse.ArgumentParser(description="Real against modelled CUDA caching allocator.")
    parser.add_argument("traces", type=Path, nargs="+", help="gzip'ed JSON of device_traces[0]")
    parser.add_argument("--expandable", action="store_true", help="expandable_segments:True was set")
    parser.add_argument("--capacity", type=int, help="bytes the device could give the allocator")
    parser.add_argument("--max-split-mb", type=int, help="max_split_size_mb, if it was set")
    parser.add_argument(
        "--real-addresses", action="store_true", help="put our segments where the real ones lay"
    )
    parser.add_argument("--measurements", type=Path, help="measure.py's, one JSON object a line")
    given = parser.parse_args(argv)
    config = AllocatorConfig(
        expandable=given.expandable,
        capacity_bytes=given.capacity,
        max_split_size=None if given.max_split_mb is None else given.max_split_mb * MIB,
    )
    measured: dict[str, Entry] = {}
    if given.measurements:
        lines = given.measurements.read_text(encoding="utf-8").splitlines()
        measured = {case["id"]: case for case in map(json.loads, lines)}
    diverged = False
    for path in given.traces:
        trace = load(path)
        known = measured.get(trace.ident)
        resets = [trace.marks["build"], trace.marks["step1"]] if known else []
        found = compare(trace.entries, config, real_addresses=given.real_addresses, reset_peak_at=resets)
        report = [f"== {trace.ident}"] * (len(given.traces) > 1) + [render(found)]
        if known:
            report.append(render_measured(found.windows, known))
        print("\n".join(report))  # noqa: T201 - this is a program
        diverged = diverged or bool(found.divergences)
    return int(diverged)


if __name__ == "__main__":
    raise SystemExit(main())
