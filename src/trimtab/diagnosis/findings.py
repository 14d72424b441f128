"""Turn sightings into findings: each kind once, the cause first, its consequences below it.

Also computes what a message allows: what would have fitted, and by how much memory it was short.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.diagnosis.fault_kinds import ENVIRONMENT, load_kinds
from trimtab.diagnosis.log_scanner import MOST_SIGHTINGS, PYTHON_ERROR, Sighting, shorten_line
from trimtab.diagnosis.own_runs import STATES
from trimtab.errors import WrongUse
from trimtab.spec import Finding, Severity
from trimtab.spec.base import Noun, check_minimum
from trimtab.units import GIB, KIB, MIB, TIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trimtab.diagnosis.fault_kinds import DiagnosisKind

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
    """The numbers of an out-of-memory message; None if it does not say."""

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
        """By how many bytes it failed."""
        return None if self.tried is None or self.free is None else max(0, self.tried - self.free)

    @property
    def is_fragmented(self) -> bool:
        """Whether the request would have fitted in one piece into idle and free memory."""
        return bool(self.tried and self.idle and self.idle + (self.free or 0) >= self.tried)

    @property
    def is_taken(self) -> bool:
        """Whether it would have fitted without other processes."""
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
    """Parse bytes as torch prints them.

    >>> parse_size("20.00 MiB"), parse_size("0 bytes"), parse_size("many")
    (20971520, 0, None)
    """
    number, _, unit = text.partition(" ")
    try:
        return round(float(number) * _UNITS[unit.lower()])
    except (ValueError, KeyError, OverflowError):
        return None


def parse_shortage(text: str, captured: Mapping[str, str]) -> Shortage:
    """Parse the numbers of a message of torch 1 or 2, or of a snapshot's event."""
    sizes: dict[str, int | None] = {}
    for name, forms in _NUMBERS.items():
        match = next((hit for form in forms if (hit := re.search(form, text))), None)
        stated = captured.get(f"{name}_bytes", "")
        sizes[name] = int(stated) if stated.isdecimal() else parse_size(match.group(1)) if match else None
    reserved = sizes.pop("reserved")
    if sizes["idle"] is None and reserved is not None and sizes["allocated"] is not None:
        sizes["idle"] = max(0, reserved - sizes["allocated"])
    others = sum(parse_size(text_size) or 0 for text_size in _OTHERS.findall(text))
    return Shortage(**sizes, others=others)


def is_evaluating(frames: Sequence[str]) -> bool:
    """Return whether a traceback goes through an evaluation function."""
    return any(frame.rpartition(", in ")[2] in EVALUATING for frame in frames)


def largest_fitting(short: Shortage, micro_batch: int, fixed_bytes: int = 0) -> int | None:
    """Return the largest micro-batch that could have fitted in place of `micro_batch`; None if unknown.

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
    """Return a micro-batch of at most `most` and the accumulation that keep the batch of a rank.

    >>> same_global_batch(7, 8, 2), same_global_batch(34, 45, 5)
    ((4, 4), (25, 9))
    """
    rank_batch = micro_batch * accumulation
    micro = max(divisor for divisor in range(1, most + 1) if rank_batch % divisor == 0)
    return micro, rank_batch // micro


def out_of_memory_advice(short: Shortage, facts: Mapping[str, int], fixed_bytes: int = 0) -> str:
    """Say what would have fitted; empty if the message or the log does not tell enough."""
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
    """Return the median of the later half, if there are enough: the first steps warm up.

    >>> late_median([90, 1, 2, 3, 2, 1, 2, 1]), late_median([1.0])
    (1.5, None)
    """
    if len(values) < FEWEST:
        return None
    return float(statistics.median(values[len(values) // 2 :]))


def find_mismatch(sightings: Sequence[Sighting]) -> tuple[Sighting, Sighting] | None:
    """Return two ranks that timed out in the same collective by number, but of another kind or size."""
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
    """Describe the collective that a rank waits in."""
    numel = sighting.captured.get("numel")
    return sighting.captured.get("op", "?") + (f" of {numel} elements" if numel else "")


SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)
MOST_RANKS = 8
"""More ranks or runs than this are counted, not listed."""
SAME_PLACE, NEXT_LINES = 12, 3
"""Lines within which an exception and a message of a known kind are one thing."""
BEFORE = "before "
"""In `after` of a kind: what explains it only where it came first."""
SAID_BY_LAUNCHERS = ("rank-failed", "process-killed", "process-aborted")
SAID_BY_EXCEPTIONS = ("nccl-peer-lost", "nccl-timeout", "rendezvous-timeout")
"""Consequences that an exception of the same rank may tell in its later lines."""


class Diagnosed(Finding, frozen=True, kw_only=True):
    """A finding with its kind, its place, and its consequences."""

    kind: str | None = None
    """A row of kinds.toml; None for a finding about this machine."""
    realm: str = ENVIRONMENT
    """Whether the job is to be changed, or what it runs on."""
    file: str | None = None
    line: int | None = None
    ranks: tuple[int, ...] = ()
    """That said so; the first of them first."""
    times: int = 1
    """How often it was seen; from 1000 on it was not counted further."""
    consequences: tuple[str, ...] = ()
    """What other ranks and launchers said because of it."""

    def faults(self) -> list[str]:
        """Lines and times count from one."""
        return [*super().faults(), *check_minimum(1, line=self.line, times=self.times)]


class Diagnosis(Noun, frozen=True, kw_only=True):
    """The files that were read, and the findings."""

    derived = ("exit_code",)

    findings: tuple[Diagnosed, ...] = ()
    """The cause first."""
    read: tuple[str, ...] = ()
    """Files that were read, or "this machine"."""
    notes: tuple[str, ...] = ()
    """What could not be read, and how far."""

    @property
    def exit_code(self) -> int:
        """0: no error; 4: one of the job; 5: of what it runs on; 2: nothing could be read."""
        first = next((finding for finding in self.findings if finding.severity is Severity.ERROR), None)
        if not self.read and self.notes:
            return WrongUse.exit_code
        return 0 if first is None else 5 if first.realm == ENVIRONMENT else 4


@dataclass(frozen=True, kw_only=True)
class FindingGroup:
    """All sightings of one kind."""

    kind: DiagnosisKind
    sightings: tuple[Sighting, ...]
    captured: dict[str, str]
    cure: str = ""
    """What goes before the row's cure."""
    cause: str = ""

    @property
    def first(self) -> Sighting:
        """The earliest sighting."""
        return self.sightings[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, in the order in which they reported."""
        return tuple(dict.fromkeys(sighting.rank for sighting in self.sightings if sighting.rank is not None))


def judge_sightings(
    sightings: Sequence[Sighting], *, known: Mapping[str, int] | None = None, fixed_bytes: int = 0
) -> tuple[Diagnosed, ...]:
    """Return the findings. `known` are facts from a run folder's plan; they win over the logs'."""
    facts = _collect_facts(sightings) | dict(known or {})
    kept = _drop_caught(_drop_repeats([sighting for sighting in sightings if not sighting.is_fact]))
    kept += _compute_kinds(sightings)
    groups = [
        refined
        for name in dict.fromkeys(sighting.of for sighting in kept)
        if (
            refined := _refine_group(
                name,
                _sort_sightings([sighting for sighting in kept if sighting.of == name]),
                facts,
                fixed_bytes,
            )
        )
    ]
    groups.sort(key=lambda group: _sort_key(group.first, _is_one_file(kept)))
    return _rank_groups(groups, facts)


def _is_one_file(sightings: Iterable[Sighting]) -> bool:
    return len({sighting.file for sighting in sightings}) <= 1


def _sort_key(sighting: Sighting, one_file: bool) -> tuple[float, str, int]:
    """Return when something was said: by lines within a file, by clocks between files."""
    clock = 0.0 if one_file else sighting.at if sighting.at is not None else float("inf")
    return (clock, sighting.file, sighting.line)


def _sort_sightings(sightings: list[Sighting]) -> tuple[Sighting, ...]:
    alone = _is_one_file(sightings)
    return tuple(sorted(sightings, key=lambda sighting: _sort_key(sighting, alone)))


def _collect_facts(sightings: Iterable[Sighting]) -> dict[str, int]:
    """Collect facts about the run; the last one counts, since launchers print defaults first."""
    return {
        sighting.of: int(sighting.captured["value"])
        for sighting in sightings
        if sighting.is_fact
        and sighting.captured.get("value", "").isdecimal()
        and len(sighting.captured["value"]) < 9  # noqa: PLR2004
    }


def _drop_repeats(sightings: list[Sighting]) -> list[Sighting]:
    """Drop exceptions whose message is of a known kind."""
    named: dict[str, list[Sighting]] = {}
    for sighting in sightings:
        if sighting.of != PYTHON_ERROR:
            named.setdefault(sighting.file, []).append(sighting)
    return [
        sighting
        for sighting in sightings
        if sighting.of != PYTHON_ERROR
        or not any(_is_message(other, sighting) for other in named.get(sighting.file, ()))
    ]


def _drop_caught(sightings: list[Sighting]) -> list[Sighting]:
    """Drop exceptions after which the run continued, unless a launcher saw a process fail."""
    failed = {sighting.file for sighting in sightings if sighting.of in SAID_BY_LAUNCHERS}
    return [
        sighting
        for sighting in sightings
        if sighting.file in failed or sighting.captured.get("signs_of_life", "0") == "0"
    ]


def _is_message(message: Sighting, error: Sighting) -> bool:
    """Return whether a sighting is on the line of an exception, or on the next lines of its message."""
    distance = message.line - error.line
    if distance == 0:
        return True
    if load_kinds()[message.of].follows:
        # Launchers and other ranks speak soon after an exception too: theirs is no part of it.
        return 0 < distance <= NEXT_LINES and message.rank == error.rank and message.of in SAID_BY_EXCEPTIONS
    return 0 < distance <= SAME_PLACE and (message.rank == error.rank or None in (message.rank, error.rank))


def _compute_kinds(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Return sightings of kinds that no single line tells."""
    computed = []
    timeouts = [sighting for sighting in sightings if sighting.of == "nccl-timeout"]
    if pair := find_mismatch(timeouts):
        first, second = pair
        words = {
            "first": f"rank {first.rank} in {describe_call(first)}",
            "second": f"rank {second.rank} in {describe_call(second)}",
        }
        computed.append(replace(second, of="mismatched-collectives", captured=words))
    rates = [sighting for sighting in sightings if sighting.of == "mfu"]
    usual = late_median([float(rate.captured["value"]) for rate in rates])
    if usual is not None and usual < LOW_MFU:
        computed.append(replace(rates[-1], of="low-mfu", captured={"mfu": f"{usual:.1f}"}, is_fact=False))
    waits = [sighting for sighting in sightings if sighting.of == "data_wait"]
    shares = [
        float(wait.captured["value"]) / step for wait in waits if (step := float(wait.captured["step"])) > 0
    ]
    share = late_median(shares)
    if share is not None and share > LONG_WAIT:
        captured = {"share": f"{100 * share:.0f}"}
        computed.append(replace(waits[-1], of="waits-for-data", captured=captured, is_fact=False))
    return computed


def _refine_group(
    name: str, sightings: tuple[Sighting, ...], facts: Mapping[str, int], fixed_bytes: int
) -> FindingGroup | None:
    """Return the group of a kind, maybe of a more precise kind; None if there is too little of it."""
    kind = load_kinds()[name]
    if len(sightings) < kind.times:
        return None
    captured = dict(sightings[0].captured)
    if name == "out-of-memory":
        return _refine_out_of_memory(sightings, facts, fixed_bytes)
    if name == "gradient-overflow":
        captured |= {
            "count": _format_count(len(sightings)),
            "scale": sightings[-1].captured.get("scale", "?"),
        }
    if name == PYTHON_ERROR:
        captured |= {"error": shorten_line(captured["error"])}
    return FindingGroup(kind=kind, sightings=sightings, captured=captured)


def _refine_out_of_memory(
    sightings: tuple[Sighting, ...], facts: Mapping[str, int], fixed_bytes: int
) -> FindingGroup:
    # The first message with numbers: libraries repeat it without.
    best = next(
        (
            sighting
            for sighting in sightings
            if "Tried" in sighting.text or "tried_bytes" in sighting.captured
        ),
        sightings[0],
    )
    short = parse_shortage(best.text, best.captured)
    name = "out-of-memory"
    if is_evaluating(best.frames):
        name = "evaluation-out-of-memory"
    elif short.is_fragmented:
        name = "fragmented-memory"
    elif short.is_taken:
        name = "memory-taken"
    captured = dict(best.captured)
    captured |= {"idle": format_bytes(short.idle or 0), "others": format_bytes(short.others)}
    advice = out_of_memory_advice(short, facts, fixed_bytes) if name == "out-of-memory" else ""
    missing = f"It was short of {format_bytes(short.short)}: {short.words}." if short.short else ""
    ordered = (
        (best, *(sighting for sighting in sightings if sighting is not best))
        if best is not sightings[0]
        else sightings
    )
    return FindingGroup(
        kind=load_kinds()[name], sightings=ordered, captured=captured, cure=advice, cause=missing
    )


def _rank_groups(groups: list[FindingGroup], facts: Mapping[str, int]) -> tuple[Diagnosed, ...]:
    """Order the causes, each with its consequences; then warnings; then information."""
    causes = [
        group
        for group in groups
        if group.kind.severity is Severity.ERROR and not _is_explained(group, groups)
    ]
    roots = [cause for cause in causes if not cause.kind.follows] or causes[:1]
    rest = [group for group in groups if group not in roots]
    below_of: dict[str, list[FindingGroup]] = {}
    for group in rest:
        if roots and (group.kind.severity is Severity.ERROR or group.kind.follows):
            cause = next((root for root in roots if _is_named(group.kind.after, root.kind.name)), roots[0])
            below_of.setdefault(cause.kind.name, []).append(group)
    followers = {group.kind.name for found in below_of.values() for group in found}
    alone = [group for group in rest if group.kind.name not in followers]
    kept = [*roots, *(group for group in alone if group.kind.severity is not Severity.ERROR)]
    kept.sort(key=lambda group: _kind_order(group.kind))
    return tuple(_build_finding(group, below_of.get(group.kind.name, []), facts) for group in kept)


def _is_named(after: Sequence[str], name: str) -> bool:
    return name in after or f"{BEFORE}{name}" in after


def _kind_order(kind: DiagnosisKind) -> tuple[bool, bool, int]:
    """Sort errors first, then the state of trimtab's own runs, then the rest by severity."""
    is_error = kind.severity is Severity.ERROR
    return (not is_error, kind.name not in STATES, SEVERITIES.index(kind.severity))


def _is_explained(group: FindingGroup, groups: Sequence[FindingGroup]) -> bool:
    """Return whether another group is the cause of this one."""
    # Groups are in the order in which they were first seen.
    earlier = groups[: groups.index(group)]
    if "*" in group.kind.after:
        # An exception that nobody knows: whatever is known and came no later explains it.
        return any(
            other.kind.severity is Severity.ERROR
            and not other.kind.follows
            and other.kind.name != group.kind.name
            for other in earlier
        )
    return any(other.kind.name in group.kind.after for other in groups) or any(
        f"{BEFORE}{other.kind.name}" in group.kind.after for other in earlier
    )


def _build_finding(
    group: FindingGroup, followers: Sequence[FindingGroup], facts: Mapping[str, int]
) -> Diagnosed:
    kind, first = group.kind, group.first
    captured = group.captured
    what = kind.fill_template(kind.what, captured)
    named = bool(re.search(r"\brank\b", what, re.IGNORECASE))
    if len(group.ranks) > 1 or (group.ranks and kind.severity is Severity.ERROR and not named):
        what = f"{what.rstrip('.')} ({_format_ranks(group.ranks)})."
    cause = " ".join(part for part in (group.cause, kind.fill_template(kind.cause, captured)) if part)
    silent = _name_silent_ranks(group, facts) if kind.follows else ""
    cure = " ".join(part for part in (group.cure, silent, kind.fill_template(kind.cure, captured)) if part)
    where = f"{first.file}:{first.line}: " if first.file else ""
    frame = f" (at {captured['frame']})" if captured.get("frame") else ""
    return Diagnosed(
        severity=kind.severity,
        what=what,
        evidence=f"{where}{shorten_line(first.text)}{frame}{_format_other_runs(group)}",
        cause=cause,
        cure=cure,
        kind=kind.name,
        realm=kind.realm,
        file=first.file or None,
        line=first.line,
        ranks=group.ranks,
        times=len(group.sightings),
        consequences=tuple(_format_consequence(other) for other in followers),
    )


def _format_other_runs(group: FindingGroup) -> str:
    """Name the other runs in the same state as the first."""
    others = [other.file for other in group.sightings[1:] if other.file != group.first.file]
    if group.kind.name not in STATES or not others:
        return ""
    more = f" and {len(others) - MOST_RANKS} more" if len(others) > MOST_RANKS else ""
    return f" (and {', '.join(others[:MOST_RANKS])}{more})"


def _format_consequence(group: FindingGroup) -> str:
    what = group.kind.fill_template(group.kind.what, group.captured).rstrip(".")
    ranks = f" ({_format_ranks(group.ranks)})" if group.ranks else ""
    more = f", and {len(group.sightings) - 1} more" if len(group.sightings) > 1 else ""
    return f"{what}{ranks}: {group.first.file}:{group.first.line}{more}"


def _name_silent_ranks(group: FindingGroup, facts: Mapping[str, int]) -> str:
    """Name the ranks that did not report, if the others did."""
    world = facts.get("world_size")
    missing = set(range(world or 0)) - set(group.ranks)
    if not world or not group.ranks or not missing or len(missing) > MOST_RANKS or len(missing) == world:
        return ""
    listed = ", ".join(map(str, sorted(missing)))
    return f"{'Rank' if len(missing) == 1 else 'Ranks'} {listed} of {world} did not report: begin there."


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for people, the first to report first.

    >>> _format_ranks((3,)), _format_ranks((3, 0, 1)), _format_ranks(range(64))
    ('rank 3', 'rank 3 first, then 0, 1', 'rank 0 first, then 63 others')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_RANKS:
        return f"rank {ranks[0]} first, then {len(ranks) - 1} others"
    return f"rank {ranks[0]} first, then {', '.join(map(str, ranks[1:]))}"


def _format_count(number: int) -> str:
    return f"{number} or more" if number >= MOST_SIGHTINGS else str(number)


def count_severities(findings: Iterable[Finding]) -> dict[str, int]:
    """Count the findings of each severity."""
    counts = Counter(finding.severity for finding in findings)
    return {severity.value: counts[severity] for severity in SEVERITIES if counts[severity]}
