"""Read what torch leaves besides logs: memory snapshots, NCCL flight records, torchrun's error files.

Each becomes sightings, as if a log had said so.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trimtab.diagnosis.log_scanner import LogScanner, Sighting, rank_from_path, strip_escapes
from trimtab.units import GIB, LARGEST_COUNT, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_BLOCKS = 2_000_000
"""Blocks and events of a snapshot that are looked at."""
IDLE_SHARE = 0.25
WAITING = ("scheduled", "started")


def detect_record(value: Any) -> str | None:
    """Return what a plain value is: "snapshot", "flight", "error" or None."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("segments"), list) and "device_traces" in value:
        return "snapshot"
    if isinstance(value.get("entries"), list) and ("version" in value or "pg_config" in value):
        return "flight"
    message = value.get("message")
    if isinstance(message, dict) and "message" in message:
        return "error"
    return None


def _as_count(value: Any) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_COUNT
    return value if is_count else 0


def _only_dicts(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, dict))


# ---------------------------------------------------------------------------- error files


def read_error_file(value: dict[str, Any], name: str) -> Iterator[Sighting]:
    """Read the message and the traceback that a process wrote as it failed, as a log."""
    message = value["message"]
    extra = message.get("extraInfo") if isinstance(message.get("extraInfo"), dict) else {}
    stack = str(extra.get("py_callstack") or message.get("message"))
    at = _year_seconds(extra.get("timestamp"))
    scanner = LogScanner(name)
    parts = iter([stack.encode("utf-8", "replace"), b""])
    for sighting in scanner.scan(lambda _: next(parts, b""), lambda _: None):
        yield replace(sighting, file=name, line=1, at=at)


def _year_seconds(timestamp: Any) -> float | None:
    try:
        moment = time.gmtime(float(timestamp))
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    days = (moment.tm_mon * 31 + moment.tm_mday) * 24 + moment.tm_hour
    return (days * 60 + moment.tm_min) * 60 + moment.tm_sec + float(timestamp) % 1


# ---------------------------------------------------------------------------- snapshots


def read_snapshot(value: dict[str, Any], name: str) -> Iterator[Sighting]:
    """Yield an out-of-memory if the trace has one; else large idle memory."""
    by_device: dict[int, list[dict[Any, Any]]] = {}
    for segment in _only_dicts(value["segments"]):
        by_device.setdefault(_as_count(segment.get("device")), []).append(segment)
    failed = False
    traces = value.get("device_traces")
    for device, trace in enumerate(traces if isinstance(traces, list | tuple) else ()):
        for number, event in enumerate(itertools.islice(_only_dicts(trace), MOST_BLOCKS)):
            if event.get("action") == "oom":
                failed = True
                yield _oom_sighting(event, number, device, by_device.get(device, []), name)
                break
    for device, segments in by_device.items():
        totals = _sum_segments(segments)
        if not failed and totals.idle >= max(GIB, IDLE_SHARE * totals.reserved):
            yield Sighting(
                of="idle-memory",
                file=name,
                line=1,
                text=f"GPU {device}: {totals.words}",
                captured={
                    "idle": format_bytes(totals.idle),
                    "reserved": format_bytes(totals.reserved),
                    "largest": format_bytes(totals.largest_idle),
                },
            )


@dataclass(frozen=True, kw_only=True)
class SegmentTotals:
    """Sums over the memory segments of a device."""

    reserved: int
    allocated: int
    largest_idle: int
    holders: tuple[tuple[str, int], ...]

    @property
    def idle(self) -> int:
        """Reserved bytes that are not in use."""
        return self.reserved - self.allocated

    @property
    def words(self) -> str:
        """The numbers in a phrase."""
        most = "; ".join(f"{where} {format_bytes(count)}" for where, count in self.holders)
        return (
            f"{format_bytes(self.allocated)} allocated of {format_bytes(self.reserved)} reserved, the "
            f"largest idle block {format_bytes(self.largest_idle)}"
            + (f"; most are held by {most}" if most else "")
        )


def _sum_segments(segments: Iterable[dict[Any, Any]]) -> SegmentTotals:
    reserved = allocated = largest = looked_at = 0
    holders: Counter[str] = Counter()
    for segment in segments:
        reserved += _as_count(segment.get("total_size"))
        allocated += _as_count(segment.get("allocated_size"))
        for block in _only_dicts(segment.get("blocks")):
            looked_at += 1
            if looked_at > MOST_BLOCKS:
                break
            size = _as_count(block.get("size"))
            if block.get("state") == "inactive":
                largest = max(largest, size)
            elif block.get("state") == "active_allocated":
                holders[_innermost_frame(block.get("frames"))] += size
    holders.pop("", None)
    return SegmentTotals(
        reserved=reserved,
        allocated=min(allocated, reserved),
        largest_idle=largest,
        holders=tuple(holders.most_common(3)),
    )


def _innermost_frame(frames: Any) -> str:
    """Return the innermost frame of Python code that is not torch's own."""
    for frame in itertools.islice(_only_dicts(frames), 200):
        file, line = str(frame.get("filename", "")), frame.get("line")
        if file.endswith(".py") and "/torch/" not in file:
            return strip_escapes(f"{file[-80:]}:{line} {str(frame.get('name', ''))[:60]}")
    return ""


def _oom_sighting(
    event: dict[Any, Any], number: int, device: int, segments: list[dict[Any, Any]], name: str
) -> Sighting:
    totals = _sum_segments(segments)
    tried, free = _as_count(event.get("size")), _as_count(event.get("device_free"))
    return Sighting(
        of="out-of-memory",
        file=name,
        line=number + 1,
        text=f"event {number} of GPU {device}: oom, {format_bytes(tried)} asked for, "
        f"{format_bytes(free)} free; {totals.words}",
        captured={
            "tried": format_bytes(tried, digits=2),
            "tried_bytes": str(tried),
            "free_bytes": str(free),
            "allocated_bytes": str(totals.allocated),
            "idle_bytes": str(totals.idle),
        },
    )


# ---------------------------------------------------------------------------- flight records


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """The collectives of one process group on one rank."""

    rank: int
    file: str
    entries: dict[int, dict[str, Any]]
    """By number."""

    @property
    def last(self) -> int:
        """The newest collective that was begun."""
        return max(self.entries)

    @property
    def waits_in(self) -> int | None:
        """The oldest collective that has not ended."""
        open_ones = [number for number, entry in self.entries.items() if entry.get("state") in WAITING]
        return min(open_ones, default=None)


def compare_flights(records: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Sighting]:
    """Compare the records of several ranks: who is late, who does something else, or nobody."""
    groups: dict[str, list[FlightRecord]] = {}
    for order, (name, value) in enumerate(records):
        rank = rank_from_path(name)
        rank = rank if rank is not None else _as_count(value.get("rank", order))
        for group, entries in _group_entries(value).items():
            groups.setdefault(group, []).append(FlightRecord(rank=rank, file=name, entries=entries))
    for group, ranks in sorted(groups.items()):
        yield from _judge_group(group, sorted(ranks, key=lambda flight: flight.rank))


def _group_entries(value: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in _only_dicts(value["entries"]):
        if entry.get("is_p2p"):
            continue
        group = entry.get("process_group", entry.get("pg_id", 0))
        name = str(group[0]) if isinstance(group, list | tuple) and group else str(group)
        number = _as_count(entry.get("collective_seq_id", entry.get("seq_id")))
        groups.setdefault(name, {})[number] = entry
    return groups


def _op_name(entry: dict[str, Any]) -> str:
    return strip_escapes(str(entry.get("profiling_name", "?"))).removeprefix("nccl:")[:60]


def _describe_op(entry: dict[str, Any]) -> str:
    return f"{_op_name(entry)} of {str(entry.get('input_sizes', '?'))[:60]}"


def _judge_group(group: str, ranks: list[FlightRecord]) -> Iterator[Sighting]:
    waits = [flight.waits_in for flight in ranks if flight.waits_in is not None]
    if not waits:
        return
    number = min(waits)
    late = [flight for flight in ranks if flight.last < number]
    there = [flight for flight in ranks if number in flight.entries]
    shapes = {_describe_op(flight.entries[number]): flight for flight in there}
    if late:
        yield _late_sighting(late[0], there, number, group)
    elif len(shapes) > 1:
        (first, flight), (second, two) = list(shapes.items())[:2]
        yield Sighting(
            of="mismatched-collectives",
            file=flight.file,
            line=1,
            text=f"group {group}, collective {number}: rank {flight.rank} {first}"
            f"{_format_frame(flight.entries[number])}, rank {two.rank} "
            f"{second}{_format_frame(two.entries[number])}",
            captured={"first": f"rank {flight.rank} in {first}", "second": f"rank {two.rank} in {second}"},
            rank=two.rank,
        )
    elif len(there) > 1 and all(flight.waits_in == number for flight in there):
        entry = there[0].entries[number]
        yield Sighting(
            of="stuck-collective",
            file=there[0].file,
            line=1,
            text=f"group {group}: ranks {', '.join(str(flight.rank) for flight in there)} in "
            f"{_describe_op(entry)}",
            captured={"op": _op_name(entry), "seq": str(number)},
        )
    elif there:
        entry = there[0].entries[number]
        yield Sighting(
            of="nccl-timeout",
            file=there[0].file,
            line=1,
            text=f"group {group}: rank {there[0].rank} waits in {_describe_op(entry)}{_format_frame(entry)}",
            captured={
                "op": _op_name(entry),
                "seq": str(number),
                "timeout": str(entry.get("timeout_ms", "?")),
            },
            rank=there[0].rank,
        )


def _late_sighting(flight: FlightRecord, there: list[FlightRecord], number: int, group: str) -> Sighting:
    last = flight.entries[flight.last]
    waiting = there[0].entries[number] if there else {}
    return Sighting(
        of="late-rank",
        file=flight.file,
        line=1,
        text=f"group {group}: rank {flight.rank} last did {_describe_op(last)}, number {flight.last}"
        f"{_format_frame(last)}; ranks {', '.join(str(other.rank) for other in there)} "
        f"wait in {_describe_op(waiting)}, number {number}",
        captured={"rank": str(flight.rank), "op": _op_name(last), "seq": str(flight.last)},
        rank=flight.rank,
    )


def _format_frame(entry: dict[str, Any]) -> str:
    frame = _innermost_frame(entry.get("frames"))
    return f" at {frame}" if frame else ""
