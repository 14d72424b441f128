"""What can be computed from the numbers in a message: what would have fitted, and what it was short of."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.units import GIB, KIB, MIB, TIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.diagnosis.scan import Sighting

_UNITS = {"bytes": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes|B))"
_NUMBERS = {
    "tried": (rf"Tried to allocate {_SIZE}",),
    "total": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"; {_SIZE} free"),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "idle": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
}
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
EVALUATING = frozenset(
    (
        "eval",
        "eval_epoch",
        "eval_step",
        "estimate_loss",
        "evaluate",
        "evaluation_loop",
        "prediction_loop",
        "prediction_step",
        "run_validation",
        "test_step",
        "validate",
        "validation_step",
    )
)
"""Functions that evaluate, in transformers, Lightning, nanoGPT and common scripts."""
LOW_MFU = 5.0
"""Percent: chosen so that hardly any job that is set up well is below it; not measured."""
LONG_WAIT = 0.2
"""The share of a step that waiting for data may take before it is worth a word."""
FEWEST = 5
"""Lines that have to say so: a single slow step says nothing."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The numbers of an out-of-memory message; None where it does not tell."""

    tried: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    """By live tensors."""
    idle: int | None = None
    """Reserved by PyTorch and not in use."""
    others: int = 0
    """Held by other processes."""

    @property
    def short(self) -> int | None:
        """By how much it failed."""
        return None if self.tried is None or self.free is None else max(0, self.tried - self.free)

    @property
    def is_fragmented(self) -> bool:
        """Whether what was asked for would have fitted into what lay idle and free, in one piece."""
        return bool(self.tried and self.idle and self.idle + (self.free or 0) >= self.tried)

    @property
    def is_taken(self) -> bool:
        """Whether it would have fitted but for other processes."""
        return bool(self.others and self.short is not None and self.others >= self.short)

    @property
    def words(self) -> str:
        """The numbers in a phrase."""
        parts = [
            f"{format_bytes(count)} {name}"
            for name, count in (
                ("asked for", self.tried),
                ("free", self.free),
                ("allocated", self.allocated),
                ("reserved and idle", self.idle),
                ("in other processes", self.others or None),
                ("in all", self.total),
            )
            if count is not None
        ]
        return ", ".join(parts)


def parse_size(text: str) -> int | None:
    """Bytes, as torch prints them.

    >>> parse_size("20.00 MiB"), parse_size("0 bytes"), parse_size("many")
    (20971520, 0, None)
    """
    number, _, unit = text.partition(" ")
    try:
        return round(float(number) * _UNITS[unit.lower()])
    except (ValueError, KeyError, OverflowError):
        return None


def parse_shortage(text: str, captured: Mapping[str, str]) -> Shortage:
    """The numbers of a message of torch 1 or 2, or of a snapshot's event."""
    found: dict[str, int | None] = {}
    for name, forms in _NUMBERS.items():
        match = next((hit for form in forms if (hit := re.search(form, text))), None)
        stated = captured.get(f"{name}_bytes", "")
        found[name] = int(stated) if stated.isdecimal() else parse_size(match.group(1)) if match else None
    reserved = found.pop("reserved")
    if found["idle"] is None and reserved is not None and found["allocated"] is not None:
        found["idle"] = max(0, reserved - found["allocated"])
    others = sum(parse_size(text_size) or 0 for text_size in _OTHERS.findall(text))
    return Shortage(**found, others=others)


def is_evaluating(frames: Sequence[str]) -> bool:
    """Whether a traceback goes through a function that evaluates."""
    return any(frame.rpartition(", in ")[2] in EVALUATING for frame in frames)


def largest_fitting(short: Shortage, micro_batch: int, fixed_bytes: int = 0) -> int | None:
    """The largest micro-batch that could have fitted where `micro_batch` did not; None where it is not known.

    What is allocated and what was asked for, less what does not depend on the batch, grows with it; so
    N' = N * (budget - fixed) / (needed - fixed). With fixed = 0, where nobody knows it, the true answer is no
    larger than this. The step may have asked for more later: again, no larger.
    An A100 with 38 GiB allocated, 1 free, 3 asked for, at micro-batch 8: 8 * 39 / 41 = 7.6, so 7 at most.
    """
    if short.tried is None or short.allocated is None or short.free is None or micro_batch < 1:
        return None
    budget, needed = short.allocated + short.free, short.allocated + short.tried
    if needed <= fixed_bytes or budget <= fixed_bytes:
        return 0
    most = int(micro_batch * (budget - fixed_bytes) / (needed - fixed_bytes))
    return min(most, micro_batch - 1)


def same_global_batch(most: int, micro_batch: int, accumulation: int) -> tuple[int, int]:
    """A micro-batch of at most `most` and the accumulation that keeps the batch of a rank exactly.

    >>> same_global_batch(7, 8, 2), same_global_batch(34, 45, 5)
    ((4, 4), (25, 9))
    """
    whole = micro_batch * accumulation
    micro = max(divisor for divisor in range(1, most + 1) if whole % divisor == 0)
    return micro, whole // micro


def out_of_memory_advice(short: Shortage, facts: Mapping[str, int], fixed_bytes: int = 0) -> str:
    """What would have fitted, in a sentence; empty where the message or the log does not tell enough."""
    micro, accumulation = facts.get("micro_batch"), facts.get("accumulation", 1)
    if micro is None:
        return ""
    most = largest_fitting(short, micro, fixed_bytes)
    if most is None:
        return ""
    if most < 1:
        return f"No micro-batch below {micro} would have fitted: use recomputing, fsdp or shorter sequences."
    fitting, rounds = same_global_batch(most, micro, accumulation)
    return (
        f"At most micro-batch {most} in place of {micro} would have fitted: {fitting} with accumulation "
        f"{rounds} (was {accumulation}) keeps the global batch (--pin micro_batch={fitting})."
    )


def late_median(values: Sequence[float]) -> float | None:
    """The median of the later half, where there are enough: the first steps warm up.

    >>> late_median([90, 1, 2, 3, 2, 1, 2, 1]), late_median([1.0])
    (1.5, None)
    """
    if len(values) < FEWEST:
        return None
    return float(statistics.median(values[len(values) // 2 :]))


def find_mismatch(sightings: Sequence[Sighting]) -> tuple[Sighting, Sighting] | None:
    """Two ranks that timed out in the same collective by number, and not in the same by kind or size."""
    by_number: dict[str, Sighting] = {}
    calls: dict[int, set[str]] = {}
    for sighting in sightings:
        if sighting.rank is not None and "seq" in sighting.captured:
            calls.setdefault(sighting.rank, set()).add(sighting.captured["seq"])
    for sighting in sightings:
        number = sighting.captured.get("seq")
        # Ranks with several groups reuse numbers: only a rank that waits in one thing says what it waits in.
        if number is None or sighting.rank is None or len(calls[sighting.rank]) > 1:
            continue
        other = by_number.setdefault(number, sighting)
        if other.rank != sighting.rank and describe_call(other) != describe_call(sighting):
            return other, sighting
    return None


def describe_call(sighting: Sighting) -> str:
    """The collective that a rank waits in."""
    numel = sighting.captured.get("numel")
    return sighting.captured.get("op", "?") + (f" of {numel} elements" if numel else "")
