"""Cache the searches of a question, for the same question with another deadline, price or run length.

A search for speed does not depend on those, unless the deadline separates settings that are within a tie. So
a second question takes the results of its searches from disk, and only its totals, rows and words are new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimtab.cache import fingerprint
from trimtab.errors import error_from_dict
from trimtab.planner.search import MARGIN, TIE, Evaluation, SearchResult, is_late
from trimtab.spec import Estimate, Objective, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trimtab.planner.estimator_interface import Layout
    from trimtab.planner.space import Space
    from trimtab.spec import Policy, Workload


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation, with its layout by number."""

    setting: Setting
    layout: int
    estimate: Estimate
    allowed_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredSearch:
    """The result of a search, with evaluations, families and layouts by their numbers in the space."""

    evaluations: list[StoredEvaluation]
    best: int | None
    fastest: int | None
    runners_up: list[int]
    too_large: list[tuple[int, int, int]]
    limits: list[tuple[int, int]]
    beaten: list[tuple[int, int, float]]
    too_late: int
    failed: list[tuple[int, dict[str, str]]]
    """Number of settings and the first error, by cause."""


@dataclass(frozen=True)
class ChangedEstimate:
    """The plan's setting with a way to fit; None: it was not traced, because that takes long."""

    change: str
    setting: Setting
    estimate: Estimate | None


@dataclass
class StoredQuestion:
    """Results of the searches of one question."""

    searches: dict[str, StoredSearch] = field(default_factory=dict)
    ways: dict[str, list[ChangedEstimate]] = field(default_factory=dict)
    """What ways to fit would buy, by the setting of the plan."""


@dataclass
class SearchCache:
    """Results of an earlier question that had the same searches, and of this one, for the caller to store.

    Results of this question are never used again in it: a search also depends on what was traced before.
    """

    earlier: StoredQuestion = field(default_factory=StoredQuestion)
    new: StoredQuestion = field(default_factory=StoredQuestion)

    def has(self, space: Space) -> bool:
        """Whether there is the result of a search."""
        return name_space(space) in self.earlier.searches

    def search(
        self, space: Space, compute: Callable[[], SearchResult], *, margin: float | None = None
    ) -> SearchResult:
        """Return the result of a search; search on a cache miss, or if the deadline makes a difference."""
        key = name_space(space, margin)
        stored = self.earlier.searches.get(key)
        if stored is not None:
            result = restore_search(stored, space)
            if not depends_on_deadline(result, space):
                return result
        result = compute()
        if result.complete and not depends_on_deadline(result, space):
            self.new.searches[key] = store_search(result, space)
        return result

    def list_ways(
        self, setting: Setting, compute: Callable[[], Iterable[ChangedEstimate]]
    ) -> list[ChangedEstimate]:
        """Return what ways to fit would buy; compute it on a cache miss."""
        key = fingerprint(setting)
        if key in self.earlier.ways:
            return self.earlier.ways[key]
        self.new.ways[key] = list(compute())
        return self.new.ways[key]


def drop_run(policy: Policy, workload: Workload) -> tuple[Policy, Workload]:
    """Return both without price, and without deadline and run length if no search depends on them."""
    free = policy.replace(price_per_gpu_hour=None)
    if policy.deadline_s is not None and policy.objective is not Objective.SPEED:
        return free, workload
    return free.replace(deadline_s=None), workload.replace(samples=None, epochs=1)


def name_space(space: Space, margin: float | None = None) -> str:
    """Return the key of a search among those of one question."""
    return fingerprint(
        drop_run(space.policy, space.workload),
        space.failed_precisions,
        space.allocators,
        space.tight,
        margin,
        [(family.layout.gpus, len(family.splits)) for family in space.families],
    )


def depends_on_deadline(result: SearchResult, space: Space) -> bool:
    """Whether a deadline separates settings that are within a tie of the fastest one."""
    first = result.fastest or result.best
    if first is None or first.estimate.step_s is None or space.policy.objective is not Objective.SPEED:
        return False
    times = first.estimate.step_s, first.estimate.step_s * (1 + TIE)
    return any(
        len({is_late(space.workload, space.policy, step_s, margin=margin) for step_s in times}) > 1
        for margin in (MARGIN, 0.0)
    )


def _list_layouts(space: Space) -> list[Layout]:
    return list(dict.fromkeys(family.layout for family in space.families))


def store_search(result: SearchResult, space: Space) -> StoredSearch:
    """Return the result of a search without its families and layouts."""
    layouts = {layout: number for number, layout in enumerate(_list_layouts(space))}
    families = {family: number for number, family in enumerate(space.families)}
    numbers = {id(evaluation): number for number, evaluation in enumerate(result.evaluations)}
    return StoredSearch(
        evaluations=[
            StoredEvaluation(seen.setting, layouts[seen.layout], seen.estimate, seen.allowed_bytes)
            for seen in result.evaluations
        ],
        best=None if result.best is None else numbers[id(result.best)],
        fastest=None if result.fastest is None else numbers[id(result.fastest)],
        runners_up=[numbers[id(runner_up)] for runner_up in result.runners_up],
        too_large=[(families[family], *counted) for family, counted in result.too_large.items()],
        limits=[(families[family], most) for family, most in result.limits.items()],
        beaten=[(families[family], *counted) for family, counted in result.beaten.items()],
        too_late=result.too_late,
        failed=[(count, error.to_dict()) for count, error in result.failed.values()],
    )


def restore_search(stored: StoredSearch, space: Space) -> SearchResult:
    """Return the result of a search in an equal space."""
    layouts = _list_layouts(space)
    evaluations = [
        Evaluation(seen.setting, layouts[seen.layout], seen.estimate, seen.allowed_bytes)
        for seen in stored.evaluations
    ]
    errors = [(count, error_from_dict(parts)) for count, parts in stored.failed]
    return SearchResult(
        best=None if stored.best is None else evaluations[stored.best],
        fastest=None if stored.fastest is None else evaluations[stored.fastest],
        runners_up=[evaluations[number] for number in stored.runners_up],
        evaluations=evaluations,
        too_large={space.families[number]: (count, least) for number, count, least in stored.too_large},
        limits={space.families[number]: most for number, most in stored.limits},
        too_late=stored.too_late,
        beaten={space.families[number]: (count, least) for number, count, least in stored.beaten},
        failed={error.found: (count, error) for count, error in errors},
    )
