"""What torch leaves behind beside logs: memory snapshots, NCCL flight records, torchrun's error files.

Each becomes sightings, as if a log had said so.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.diagnosis.lines import plain, rank_of_path
from trimtab.diagnosis.scan import Scanner, Sighting
from trimtab.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_BLOCKS = 2_000_000
"""Blocks and events of a snapshot that are looked at."""
IDLE_SHARE = 0.25
WAITING = ("scheduled", "started")


def kind_of(value: Any) -> str | None:
    """What a plain value is: "snapshot", "flight", "error" or none of them."""
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


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, dict))


# ---------------------------------------------------------------------------- error files


def error_file(value: dict[str, Any], name: str) -> Iterator[Sighting]:
    """What the process wrote as it failed: its message and its traceback, read as a log."""
    message = value["message"]
    extra = message.get("extraInfo") if isinstance(message.get("extraInfo"), dict) else {}
    stack = str(extra.get("py_callstack") or message.get("message"))
    at = _year_seconds(extra.get("timestamp"))
    scanner = Scanner(name)
    parts = iter([stack.encode("utf-8", "replace"), b""])
    for sighting in scanner.read(lambda _: next(parts, b""), lambda _: None):
        yield Sighting(
            of=sighting.of,
            file=name,
            line=1,
            text=sighting.text,
            captured=sighting.captured,
            rank=sighting.rank,
            at=at,
            frames=sighting.frames,
            is_fact=sighting.is_fact,
        )


def _year_seconds(timestamp: Any) -> float | None:
    try:
        moment = time.gmtime(float(timestamp))
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    days = (moment.tm_mon * 31 + moment.tm_mday) * 24 + moment.tm_hour
    return (days * 60 + moment.tm_min) * 60 + moment.tm_sec + float(timestamp) % 1


# ---------------------------------------------------------------------------- snapshots


def snapshot(value: dict[str, Any], name: str) -> Iterator[Sighting]:
    """Out of memory, where the trace has it; else what lies idle."""
    by_device: dict[int, list[dict[Any, Any]]] = {}
    for segment in _dicts(value["segments"]):
        by_device.setdefault(_whole(segment.get("device")), []).append(segment)
    failed = False
    traces = value.get("device_traces")
    for device, trace in enumerate(traces if isinstance(traces, list | tuple) else ()):
        for number, event in enumerate(itertools.islice(_dicts(trace), MOST_BLOCKS)):
            if event.get("action") == "oom":
                failed = True
                yield _oom(event, number, device, by_device.get(device, []), name)
                break
    for device, segments in by_device.items():
        held = _held(segments)
        if not failed and held.idle >= max(GIB, IDLE_SHARE * held.reserved):
            yield Sighting(
                of="idle-memory",
                file=name,
                line=1,
                text=f"GPU {device}: {held.words}",
                captured={
                    "idle": format_bytes(held.idle),
                    "reserved": format_bytes(held.reserved),
                    "largest": format_bytes(held.largest_idle),
                },
            )


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the segments of a device hold."""

    reserved: int
    allocated: int
    largest_idle: int
    holders: tuple[tuple[str, int], ...]

    @property
    def idle(self) -> int:
        """Reserved, and not in use."""
        return self.reserved - self.allocated

    @property
    def words(self) -> str:
        """All of it in a phrase."""
        most = "; ".join(f"{where} {format_bytes(count)}" for where, count in self.holders)
        return (
            f"{format_bytes(self.allocated)} allocated of {format_bytes(self.reserved)} reserved, the "
            f"largest idle block {format_bytes(self.largest_idle)}"
            + (f"; most are held by {most}" if most else "")
        )


def _held(segments: Iterable[dict[Any, Any]]) -> Held:
    reserved = allocated = largest = looked_at = 0
    holders: Counter[str] = Counter()
    for segment in segments:
        reserved += _whole(segment.get("total_size"))
        allocated += _whole(segment.get("allocated_size"))
        for block in _dicts(segment.get("blocks")):
            looked_at += 1
            if looked_at > MOST_BLOCKS:
                break
            size = _whole(block.get("size"))
            if block.get("state") == "inactive":
                largest = max(largest, size)
            elif block.get("state") == "active_allocated":
                holders[_frame(block.get("frames"))] += size
    holders.pop("", None)
    return Held(
        reserved=reserved,
        allocated=min(allocated, reserved),
        largest_idle=largest,
        holders=tuple(holders.most_common(3)),
    )


def _frame(frames: Any) -> str:
    """The innermost frame of Python code that is not torch's own."""
    for frame in itertools.islice(_dicts(frames), 200):
        file, line = str(frame.get("filename", "")), frame.get("line")
        if file.endswith(".py") and "/torch/" not in file:
            return plain(f"{file[-80:]}:{line} {str(frame.get('name', ''))[:60]}")
    return ""


def _oom(
    event: dict[Any, Any], number: int, device: int, segments: list[dict[Any, Any]], name: str
) -> Sighting:
    held = _held(segments)
    tried, free = _whole(event.get("size")), _whole(event.get("device_free"))
    return Sighting(
        of="out-of-memory",
        file=name,
        line=number + 1,
        text=f"event {number} of GPU {device}: oom, {format_bytes(tried)} asked for, "
        f"{format_bytes(free)} free; {held.words}",
        captured={
            "tried": format_bytes(tried, digits=2),
            "tried_bytes": str(tried),
            "free_bytes": str(free),
            "allocated_bytes": str(held.allocated),
            "idle_bytes": str(held.idle),
        },
    )


# ---------------------------------------------------------------------------- flight records


@dataclass(frozen=True, kw_only=True)
class Flight:
    """The collectives of one process group on one rank."""

    rank: int
    file: str
    entries: dict[int, dict[str, Any]]
    """By number."""

    @property
    def last(self) -> int:
        """The newest that was begun."""
        return max(self.entries)

    @property
    def waits_in(self) -> int | None:
        """The oldest that has not ended."""
        open_ones = [number for number, entry in self.entries.items() if entry.get("state") in WAITING]
        return min(open_ones, default=None)


def flights(found: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Sighting]:
    """What the records of several ranks say together: who is late, who does something else, or nobody."""
    groups: dict[str, list[Flight]] = {}
    for order, (name, value) in enumerate(found):
        rank = rank_of_path(name)
        rank = rank if rank is not None else _whole(value.get("rank", order))
        for group, entries in _by_group(value).items():
            groups.setdefault(group, []).append(Flight(rank=rank, file=name, entries=entries))
    for group, ranks in sorted(groups.items()):
        yield from _judged(group, sorted(ranks, key=lambda flight: flight.rank))


def _by_group(value: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in _dicts(value["entries"]):
        if entry.get("is_p2p"):
            continue
        group = entry.get("process_group", entry.get("pg_id", 0))
        name = str(group[0]) if isinstance(group, list | tuple) and group else str(group)
        number = _whole(entry.get("collective_seq_id", entry.get("seq_id")))
        found.setdefault(name, {})[number] = entry
    return found


def _op(entry: dict[str, Any]) -> str:
    return plain(str(entry.get("profiling_name", "?"))).removeprefix("nccl:")[:60]


def _shape(entry: dict[str, Any]) -> str:
    return f"{_op(entry)} of {str(entry.get('input_sizes', '?'))[:60]}"


def _judged(group: str, ranks: list[Flight]) -> Iterator[Sighting]:
    waits = [flight.waits_in for flight in ranks if flight.waits_in is not None]
    if not waits:
        return
    number = min(waits)
    late = [flight for flight in ranks if flight.last < number]
    there = [flight for flight in ranks if number in flight.entries]
    shapes = {_shape(flight.entries[number]): flight for flight in there}
    if late:
        yield _late(late[0], there, number, group)
    elif len(shapes) > 1:
        (first, flight), (second, two) = list(shapes.items())[:2]
        yield Sighting(
            of="mismatched-collectives",
            file=flight.file,
            line=1,
            text=f"group {group}, collective {number}: rank {flight.rank} {first}"
            f"{_at_frame(flight.entries[number])}, rank {two.rank} {second}{_at_frame(two.entries[number])}",
            captured={"first": f"rank {flight.rank} in {first}", "second": f"rank {two.rank} in {second}"},
            rank=two.rank,
        )
    elif len(there) > 1 and all(flight.waits_in == number for flight in there):
        entry = there[0].entries[number]
        yield Sighting(
            of="stuck-collective",
            file=there[0].file,
            line=1,
            text=f"group {group}: ranks {', '.join(str(flight.rank) for flight in there)} in {_shape(entry)}",
            captured={"op": _op(entry), "seq": str(number)},
        )
    elif there:
        entry = there[0].entries[number]
        yield Sighting(
            of="nccl-timeout",
            file=there[0].file,
            line=1,
            text=f"group {group}: rank {there[0].rank} waits in {_shape(entry)}{_at_frame(entry)}",
            captured={"op": _op(entry), "seq": str(number), "timeout": str(entry.get("timeout_ms", "?"))},
            rank=there[0].rank,
        )


def _late(flight: Flight, there: list[Flight], number: int, group: str) -> Sighting:
    last = flight.entries[flight.last]
    waiting = there[0].entries[number] if there else {}
    return Sighting(
        of="late-rank",
        file=flight.file,
        line=1,
        text=f"group {group}: rank {flight.rank} last did {_shape(last)}, number {flight.last}"
        f"{_at_frame(last)}; ranks {', '.join(str(other.rank) for other in there)} "
        f"wait in {_shape(waiting)}, number {number}",
        captured={"rank": str(flight.rank), "op": _op(last), "seq": str(flight.last)},
        rank=flight.rank,
    )


def _at_frame(entry: dict[str, Any]) -> str:
    frame = _frame(entry.get("frames"))
    return f" at {frame}" if frame else ""
