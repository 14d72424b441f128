"""From sightings to findings: each kind once, the cause first, and what only followed from it below it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.diagnosis import sums
from trimtab.diagnosis.kinds import ENVIRONMENT, kinds
from trimtab.diagnosis.lines import shown
from trimtab.diagnosis.scan import MOST_SIGHTINGS, PYTHON_ERROR, Sighting
from trimtab.diagnosis.stories import STATES
from trimtab.errors import WrongUse
from trimtab.spec import Finding, Severity
from trimtab.spec.base import Noun, below
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trimtab.diagnosis.kinds import Kind

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
        first = next((one for one in self.findings if one.severity is Severity.ERROR), None)
        if not self.read and self.notes:
            return WrongUse.exit_code
        return 0 if first is None else 5 if first.realm == ENVIRONMENT else 4


@dataclass(frozen=True, kw_only=True)
class Group:
    """All sightings of one kind."""

    kind: Kind
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
        return tuple(dict.fromkeys(one.rank for one in self.sightings if one.rank is not None))


def judged(
    sightings: Sequence[Sighting], *, known: Mapping[str, int] | None = None, fixed_bytes: int = 0
) -> tuple[Diagnosed, ...]:
    """The findings. `known` are facts from elsewhere (a run folder's plan), which win over the logs'."""
    facts = _facts(sightings) | dict(known or {})
    told = _uncaught(_without_repeats([one for one in sightings if not one.is_fact]))
    told += _computed(sightings)
    groups = [
        refined
        for name in dict.fromkeys(one.of for one in told)
        if (refined := _refined(name, _in_order([one for one in told if one.of == name]), facts, fixed_bytes))
    ]
    groups.sort(key=lambda group: _moment(group.first, _one_file(told)))
    return _ranked(groups, facts)


def _one_file(told: Iterable[Sighting]) -> bool:
    return len({one.file for one in told}) <= 1


def _moment(one: Sighting, one_file: bool) -> tuple[float, str, int]:
    """When something was said: by lines within a file, by clocks between files."""
    clock = 0.0 if one_file else one.at if one.at is not None else float("inf")
    return (clock, one.file, one.line)


def _in_order(told: list[Sighting]) -> tuple[Sighting, ...]:
    alone = _one_file(told)
    return tuple(sorted(told, key=lambda one: _moment(one, alone)))


def _facts(sightings: Iterable[Sighting]) -> dict[str, int]:
    """What logs say of the run; the last word counts, since launchers repeat defaults first."""
    return {
        one.of: int(one.captured["value"])
        for one in sightings
        if one.is_fact and one.captured.get("value", "").isdecimal() and len(one.captured["value"]) < 9  # noqa: PLR2004
    }


def _without_repeats(told: list[Sighting]) -> list[Sighting]:
    """Without the exceptions whose message is one of a kind that is known."""
    named: dict[str, list[Sighting]] = {}
    for one in told:
        if one.of != PYTHON_ERROR:
            named.setdefault(one.file, []).append(one)
    return [
        one
        for one in told
        if one.of != PYTHON_ERROR or not any(_is_message(other, one) for other in named.get(one.file, ()))
    ]


def _uncaught(told: list[Sighting]) -> list[Sighting]:
    """Without the exceptions after which the run went on, unless a launcher saw a process fail."""
    failed = {one.file for one in told if one.of in SAID_BY_LAUNCHERS}
    return [one for one in told if one.file in failed or one.captured.get("signs_of_life", "0") == "0"]


def _is_message(told: Sighting, error: Sighting) -> bool:
    """Whether a sighting is on the line of an exception, or on one of those that its message goes on to."""
    distance = told.line - error.line
    if distance == 0:
        return True
    if kinds()[told.of].follows:
        # Launchers and other ranks speak soon after an exception too: theirs is no part of it.
        return 0 < distance <= NEXT_LINES and told.rank == error.rank and told.of in SAID_BY_EXCEPTIONS
    return 0 < distance <= SAME_PLACE and (told.rank == error.rank or None in (told.rank, error.rank))


def _computed(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Kinds that no single line tells."""
    found = []
    timeouts = [one for one in sightings if one.of == "nccl-timeout"]
    if pair := sums.different_calls(timeouts):
        first, second = pair
        words = {
            "first": f"rank {first.rank} in {sums.call(first)}",
            "second": f"rank {second.rank} in {sums.call(second)}",
        }
        found.append(replace(second, of="mismatched-collectives", captured=words))
    rates = [one for one in sightings if one.of == "mfu"]
    usual = sums.usual([float(one.captured["value"]) for one in rates])
    if usual is not None and usual < sums.LOW_MFU:
        found.append(replace(rates[-1], of="low-mfu", captured={"mfu": f"{usual:.1f}"}, is_fact=False))
    waits = [one for one in sightings if one.of == "data_wait"]
    shares = [
        float(one.captured["value"]) / step for one in waits if (step := float(one.captured["step"])) > 0
    ]
    share = sums.usual(shares)
    if share is not None and share > sums.LONG_WAIT:
        captured = {"share": f"{100 * share:.0f}"}
        found.append(replace(waits[-1], of="waits-for-data", captured=captured, is_fact=False))
    return found


def _refined(
    name: str, told: tuple[Sighting, ...], facts: Mapping[str, int], fixed_bytes: int
) -> Group | None:
    """The group of a kind; None where there is too little of it. Some turn into a more precise kind."""
    kind = kinds()[name]
    if len(told) < kind.times:
        return None
    captured = dict(told[0].captured)
    if name == "out-of-memory":
        return _memory(told, facts, fixed_bytes)
    if name == "gradient-overflow":
        captured |= {"count": _count(len(told)), "scale": told[-1].captured.get("scale", "?")}
    if name == PYTHON_ERROR:
        captured |= {"error": shown(captured["error"])}
    return Group(kind=kind, sightings=told, captured=captured)


def _memory(told: tuple[Sighting, ...], facts: Mapping[str, int], fixed_bytes: int) -> Group:
    # The first message with numbers: libraries repeat it without.
    best = next((one for one in told if "Tried" in one.text or "tried_bytes" in one.captured), told[0])
    short = sums.shortage(best.text, best.captured)
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
    ordered = (best, *(one for one in told if one is not best)) if best is not told[0] else told
    return Group(kind=kinds()[name], sightings=ordered, captured=captured, cure=advice, cause=missing)


def _ranked(groups: list[Group], facts: Mapping[str, int]) -> tuple[Diagnosed, ...]:
    """Causes in order, each with its consequences; then warnings; then what is only worth knowing."""
    causes = [one for one in groups if one.kind.severity is Severity.ERROR and not _explained(one, groups)]
    roots = [one for one in causes if not one.kind.follows] or causes[:1]
    rest = [one for one in groups if one not in roots]
    below_of: dict[str, list[Group]] = {}
    for one in rest:
        if roots and (one.kind.severity is Severity.ERROR or one.kind.follows):
            cause = next((root for root in roots if _names(one.kind.after, root.kind.name)), roots[0])
            below_of.setdefault(cause.kind.name, []).append(one)
    followers = {one.kind.name for found in below_of.values() for one in found}
    alone = [one for one in rest if one.kind.name not in followers]
    kept = [*roots, *(one for one in alone if one.kind.severity is not Severity.ERROR)]
    kept.sort(key=lambda one: _order(one.kind))
    return tuple(_finding(one, below_of.get(one.kind.name, []), facts) for one in kept)


def _names(after: Sequence[str], name: str) -> bool:
    return name in after or f"{BEFORE}{name}" in after


def _order(kind: Kind) -> tuple[bool, bool, int]:
    """Errors, then how a run of ours stands, then the rest by severity."""
    is_error = kind.severity is Severity.ERROR
    return (not is_error, kind.name not in STATES, SEVERITIES.index(kind.severity))


def _explained(one: Group, groups: Sequence[Group]) -> bool:
    """Whether another group is what this one comes from."""
    # Groups are in the order in which they were first seen.
    earlier = groups[: groups.index(one)]
    if "*" in one.kind.after:
        # An exception that nobody knows: whatever is known and came no later explains it.
        return any(
            other.kind.severity is Severity.ERROR
            and not other.kind.follows
            and other.kind.name != one.kind.name
            for other in earlier
        )
    return any(other.kind.name in one.kind.after for other in groups) or any(
        f"{BEFORE}{other.kind.name}" in one.kind.after for other in earlier
    )


def _finding(one: Group, followers: Sequence[Group], facts: Mapping[str, int]) -> Diagnosed:
    kind, first = one.kind, one.first
    captured = one.captured
    what = kind.told(kind.what, captured)
    named = bool(re.search(r"\brank\b", what, re.IGNORECASE))
    if len(one.ranks) > 1 or (one.ranks and kind.severity is Severity.ERROR and not named):
        what = f"{what.rstrip('.')} ({_ranks_words(one.ranks)})."
    cause = " ".join(part for part in (one.cause, kind.told(kind.cause, captured)) if part)
    silent = _silent(one, facts) if kind.follows else ""
    cure = " ".join(part for part in (one.cure, silent, kind.told(kind.cure, captured)) if part)
    where = f"{first.file}:{first.line}: " if first.file else ""
    frame = f" (at {captured['frame']})" if captured.get("frame") else ""
    return Diagnosed(
        severity=kind.severity,
        what=what,
        evidence=f"{where}{shown(first.text)}{frame}{_other_runs(one)}",
        cause=cause,
        cure=cure,
        kind=kind.name,
        realm=kind.realm,
        file=first.file or None,
        line=first.line,
        ranks=one.ranks,
        times=len(one.sightings),
        consequences=tuple(_consequence(other) for other in followers),
    )


def _other_runs(one: Group) -> str:
    """The other runs that stand as the first does."""
    others = [other.file for other in one.sightings[1:] if other.file != one.first.file]
    if one.kind.name not in STATES or not others:
        return ""
    more = f" and {len(others) - MOST_RANKS} more" if len(others) > MOST_RANKS else ""
    return f" (and {', '.join(others[:MOST_RANKS])}{more})"


def _consequence(one: Group) -> str:
    what = one.kind.told(one.kind.what, one.captured).rstrip(".")
    ranks = f" ({_ranks_words(one.ranks)})" if one.ranks else ""
    more = f", and {len(one.sightings) - 1} more" if len(one.sightings) > 1 else ""
    return f"{what}{ranks}: {one.first.file}:{one.first.line}{more}"


def _silent(one: Group, facts: Mapping[str, int]) -> str:
    """The rank that did not report, where all the others did."""
    world = facts.get("world_size")
    missing = set(range(world or 0)) - set(one.ranks)
    if not world or not one.ranks or not missing or len(missing) > MOST_RANKS or len(missing) == world:
        return ""
    listed = ", ".join(map(str, sorted(missing)))
    return f"{'Rank' if len(missing) == 1 else 'Ranks'} {listed} of {world} did not report: begin there."


def _ranks_words(ranks: Sequence[int]) -> str:
    """Ranks as people list them, the first to say so first.

    >>> _ranks_words((3,)), _ranks_words((3, 0, 1)), _ranks_words(range(64))
    ('rank 3', 'rank 3 first, then 0, 1', 'rank 0 first, then 63 others')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_RANKS:
        return f"rank {ranks[0]} first, then {len(ranks) - 1} others"
    return f"rank {ranks[0]} first, then {', '.join(map(str, ranks[1:]))}"


def _count(number: int) -> str:
    return f"{number} or more" if number >= MOST_SIGHTINGS else str(number)


def counted(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings there are of each severity."""
    found = Counter(one.severity for one in findings)
    return {one.value: found[one] for one in SEVERITIES if found[one]}
