"""From sightings to findings: each kind once, the cause first, and what only followed from it below it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.diagnosis import sums
from trimtab.diagnosis.kinds import ENVIRONMENT, load_kinds
from trimtab.diagnosis.lines import shorten_line
from trimtab.diagnosis.scan import MOST_SIGHTINGS, PYTHON_ERROR, Sighting
from trimtab.diagnosis.stories import STATES
from trimtab.errors import WrongUse
from trimtab.spec import Finding, Severity
from trimtab.spec.base import Noun, below
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trimtab.diagnosis.kinds import FaultKind

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
    """A finding with its kind, where it was seen, and what followed from it."""

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
        return [*super().faults(), *below(1, line=self.line, times=self.times)]


class Diagnosis(Noun, frozen=True, kw_only=True):
    """What was read, and what was found in it."""

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

    kind: FaultKind
    sightings: tuple[Sighting, ...]
    captured: dict[str, str]
    cure: str = ""
    """What goes before the row's cure."""
    cause: str = ""

    @property
    def first(self) -> Sighting:
        """The earliest."""
        return self.sightings[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """In the order in which they said so."""
        return tuple(dict.fromkeys(sighting.rank for sighting in self.sightings if sighting.rank is not None))


def judge_sightings(
    sightings: Sequence[Sighting], *, known: Mapping[str, int] | None = None, fixed_bytes: int = 0
) -> tuple[Diagnosed, ...]:
    """The findings. `known` are facts from elsewhere (a run folder's plan), which win over the logs'."""
    facts = _collect_facts(sightings) | dict(known or {})
    told = _drop_caught(_drop_repeats([sighting for sighting in sightings if not sighting.is_fact]))
    told += _compute_kinds(sightings)
    groups = [
        refined
        for name in dict.fromkeys(sighting.of for sighting in told)
        if (
            refined := _refine_group(
                name,
                _sort_sightings([sighting for sighting in told if sighting.of == name]),
                facts,
                fixed_bytes,
            )
        )
    ]
    groups.sort(key=lambda group: _sort_key(group.first, _is_one_file(told)))
    return _rank_groups(groups, facts)


def _is_one_file(told: Iterable[Sighting]) -> bool:
    return len({sighting.file for sighting in told}) <= 1


def _sort_key(sighting: Sighting, one_file: bool) -> tuple[float, str, int]:
    """When something was said: by lines within a file, by clocks between files."""
    clock = 0.0 if one_file else sighting.at if sighting.at is not None else float("inf")
    return (clock, sighting.file, sighting.line)


def _sort_sightings(told: list[Sighting]) -> tuple[Sighting, ...]:
    alone = _is_one_file(told)
    return tuple(sorted(told, key=lambda sighting: _sort_key(sighting, alone)))


def _collect_facts(sightings: Iterable[Sighting]) -> dict[str, int]:
    """What logs say of the run; the last word counts, since launchers repeat defaults first."""
    return {
        sighting.of: int(sighting.captured["value"])
        for sighting in sightings
        if sighting.is_fact
        and sighting.captured.get("value", "").isdecimal()
        and len(sighting.captured["value"]) < 9  # noqa: PLR2004
    }


def _drop_repeats(told: list[Sighting]) -> list[Sighting]:
    """Without the exceptions whose message is one of a kind that is known."""
    named: dict[str, list[Sighting]] = {}
    for sighting in told:
        if sighting.of != PYTHON_ERROR:
            named.setdefault(sighting.file, []).append(sighting)
    return [
        sighting
        for sighting in told
        if sighting.of != PYTHON_ERROR
        or not any(_is_message(other, sighting) for other in named.get(sighting.file, ()))
    ]


def _drop_caught(told: list[Sighting]) -> list[Sighting]:
    """Without the exceptions after which the run went on, unless a launcher saw a process fail."""
    failed = {sighting.file for sighting in told if sighting.of in SAID_BY_LAUNCHERS}
    return [
        sighting
        for sighting in told
        if sighting.file in failed or sighting.captured.get("signs_of_life", "0") == "0"
    ]


def _is_message(told: Sighting, error: Sighting) -> bool:
    """Whether a sighting is on the line of an exception, or on one of those that its message goes on to."""
    distance = told.line - error.line
    if distance == 0:
        return True
    if load_kinds()[told.of].follows:
        # Launchers and other ranks speak soon after an exception too: theirs is no part of it.
        return 0 < distance <= NEXT_LINES and told.rank == error.rank and told.of in SAID_BY_EXCEPTIONS
    return 0 < distance <= SAME_PLACE and (told.rank == error.rank or None in (told.rank, error.rank))


def _compute_kinds(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Kinds that no single line tells."""
    found = []
    timeouts = [sighting for sighting in sightings if sighting.of == "nccl-timeout"]
    if pair := sums.find_mismatch(timeouts):
        first, second = pair
        words = {
            "first": f"rank {first.rank} in {sums.describe_call(first)}",
            "second": f"rank {second.rank} in {sums.describe_call(second)}",
        }
        found.append(replace(second, of="mismatched-collectives", captured=words))
    rates = [sighting for sighting in sightings if sighting.of == "mfu"]
    usual = sums.late_median([float(rate.captured["value"]) for rate in rates])
    if usual is not None and usual < sums.LOW_MFU:
        found.append(replace(rates[-1], of="low-mfu", captured={"mfu": f"{usual:.1f}"}, is_fact=False))
    waits = [sighting for sighting in sightings if sighting.of == "data_wait"]
    shares = [
        float(wait.captured["value"]) / step for wait in waits if (step := float(wait.captured["step"])) > 0
    ]
    share = sums.late_median(shares)
    if share is not None and share > sums.LONG_WAIT:
        captured = {"share": f"{100 * share:.0f}"}
        found.append(replace(waits[-1], of="waits-for-data", captured=captured, is_fact=False))
    return found


def _refine_group(
    name: str, told: tuple[Sighting, ...], facts: Mapping[str, int], fixed_bytes: int
) -> FindingGroup | None:
    """The group of a kind; None where there is too little of it. Some turn into a more precise kind."""
    kind = load_kinds()[name]
    if len(told) < kind.times:
        return None
    captured = dict(told[0].captured)
    if name == "out-of-memory":
        return _refine_out_of_memory(told, facts, fixed_bytes)
    if name == "gradient-overflow":
        captured |= {"count": _format_count(len(told)), "scale": told[-1].captured.get("scale", "?")}
    if name == PYTHON_ERROR:
        captured |= {"error": shorten_line(captured["error"])}
    return FindingGroup(kind=kind, sightings=told, captured=captured)


def _refine_out_of_memory(
    told: tuple[Sighting, ...], facts: Mapping[str, int], fixed_bytes: int
) -> FindingGroup:
    # The first message with numbers: libraries repeat it without.
    best = next(
        (sighting for sighting in told if "Tried" in sighting.text or "tried_bytes" in sighting.captured),
        told[0],
    )
    short = sums.parse_shortage(best.text, best.captured)
    name = "out-of-memory"
    if sums.is_evaluating(best.frames):
        name = "evaluation-out-of-memory"
    elif short.is_fragmented:
        name = "fragmented-memory"
    elif short.is_taken:
        name = "memory-taken"
    captured = dict(best.captured)
    captured |= {"idle": format_bytes(short.idle or 0), "others": format_bytes(short.others)}
    advice = sums.out_of_memory_advice(short, facts, fixed_bytes) if name == "out-of-memory" else ""
    missing = f"It was short of {format_bytes(short.short)}: {short.words}." if short.short else ""
    ordered = (
        (best, *(sighting for sighting in told if sighting is not best)) if best is not told[0] else told
    )
    return FindingGroup(
        kind=load_kinds()[name], sightings=ordered, captured=captured, cure=advice, cause=missing
    )


def _rank_groups(groups: list[FindingGroup], facts: Mapping[str, int]) -> tuple[Diagnosed, ...]:
    """Causes in order, each with its consequences; then warnings; then what is only worth knowing."""
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


def _kind_order(kind: FaultKind) -> tuple[bool, bool, int]:
    """Errors, then how a run of ours stands, then the rest by severity."""
    is_error = kind.severity is Severity.ERROR
    return (not is_error, kind.name not in STATES, SEVERITIES.index(kind.severity))


def _is_explained(group: FindingGroup, groups: Sequence[FindingGroup]) -> bool:
    """Whether another group is what this one comes from."""
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
    """The other runs that stand as the first does."""
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
    """The rank that did not report, where all the others did."""
    world = facts.get("world_size")
    missing = set(range(world or 0)) - set(group.ranks)
    if not world or not group.ranks or not missing or len(missing) > MOST_RANKS or len(missing) == world:
        return ""
    listed = ", ".join(map(str, sorted(missing)))
    return f"{'Rank' if len(missing) == 1 else 'Ranks'} {listed} of {world} did not report: begin there."


def _format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as people list them, the first to say so first.

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
    """How many findings there are of each severity."""
    found = Counter(finding.severity for finding in findings)
    return {severity.value: found[severity] for severity in SEVERITIES if found[severity]}
