"""Search the space of settings: exact, best-first by lower bounds.

Every setting has a lower bound on its time, which an Estimator gives without tracing. The search estimates
the setting with the lowest bound, and its time replaces the bound. It ends when the lowest entry is an
estimated setting that fits: no other can be better. The search assumes two things: a larger micro-batch of
the same family needs no less memory, and the lower bounds are valid.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.ways import list_changed
from trimtab.spec import Objective, Recompute, Verdict
from trimtab.strategies import STRATEGIES, strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.planner.estimator_interface import Estimator, Layout
    from trimtab.planner.space import BatchSplit, Family, Space
    from trimtab.spec import Estimate, Policy, Setting, Strategy, Workload

RUNNERS_UP = 5
MARGIN = 0.1
"""Share of a deadline to keep free: the median error of predicted time, plus checkpoints and evaluation."""

TIE = 0.02
"""Predicted times that differ by less count as equal, because the median prediction error is larger, also
on calibrated devices. The search then takes the simpler plan."""

RECOMPUTES = (
    *(Recompute.NONE, Recompute.SELECTIVE, Recompute.EVERY_4, Recompute.EVERY_3, Recompute.EVERY_2),
    *(Recompute.ALL_BUT_3, Recompute.ALL_BUT_4, Recompute.FULL),
    *(way for way in Recompute if way.way.budget is not None),
)
"""Ways of recomputing, the one that repeats least first; then budgets of the compiler, which are pinned."""

Notice = Callable[["Evaluation"], None]


def ignore_notice(_: Evaluation) -> None:
    """Do nothing with a setting that is better than all before it."""


Value = tuple[float, ...]
"""The objective's value of a setting; smaller is better."""


@dataclass(frozen=True)
class Evaluation:
    """A setting with its estimate and memory limit."""

    setting: Setting
    layout: Layout
    estimate: Estimate
    allowed_bytes: int
    least_s: float | None = None
    """Lower bound on the step time of all settings, when this one was noticed; None if it is not known."""

    @property
    def fits(self) -> bool:
        """Whether the upper band is within the share of memory that the policy allows."""
        host = self.estimate.host
        return self.estimate.need_bytes <= self.allowed_bytes and not (host is not None and host.shortage)

    @property
    def is_tight(self) -> bool:
        """Whether it fits only because torch releases cached blocks."""
        return self.fits and self.estimate.verdict is Verdict.FITS_TIGHT

    @property
    def missing_bytes(self) -> int:
        """Bytes above the memory limit; 0 if it fits."""
        return max(0, self.estimate.need_bytes - self.allowed_bytes)


@dataclass
class SearchResult:
    """Result of a search."""

    best: Evaluation | None = None
    fastest: Evaluation | None = None
    """The best by the objective, if a simpler setting within TIE was chosen instead."""
    runners_up: list[Evaluation] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    """Every setting that was estimated, whether it fits or not."""
    too_large: dict[Family, tuple[int, int]] = field(default_factory=dict)
    """Number of settings that do not fit, and the least bytes that one of them needs."""
    limits: dict[Family, int] = field(default_factory=dict)
    """The largest micro-batch that may fit, if a larger one does not; 0 if none fits. It does fit in families
    that were evaluated before the choice was made."""
    too_late: int = 0
    """Number of settings that fit but miss the deadline."""
    beaten: dict[Family, tuple[int, float]] = field(default_factory=dict)
    """Number of settings that cannot be better, and the least time of one of them."""
    failed: dict[str, tuple[int, TrimtabError]] = field(default_factory=dict)
    """Number of settings that could not be estimated and the first error, by cause."""
    complete: bool = True
    """False if the search was interrupted: `best` is then the best so far."""


def objective_value(setting: Setting, step_s: float | None, objective: Objective) -> Value:
    """Return the value of a setting: smaller is better, and a lower time never makes it larger.

    Without a time (a device without peak rates), prefer fewer rounds, less recomputing and no compiling.
    """
    if step_s is None:
        rounds = float(setting.accumulation)
        guess = (rounds, float(RECOMPUTES.index(setting.recompute)), float(setting.compile))
        return (float(setting.gpus), *guess) if objective is Objective.GPUS else (math.inf, *guess)
    if objective is Objective.GPUS:
        return (float(setting.gpus), step_s)
    return (step_s * setting.gpus, step_s) if objective is Objective.COST else (step_s,)


def tie_break_key(setting: Setting) -> tuple[int, ...]:
    """Return the order of equal values: fewer GPUs, simpler strategy, less recompute, eager, less memory."""
    return (
        setting.gpus,
        strategy_of(setting).complexity,
        RECOMPUTES.index(setting.recompute),
        setting.compile,
        setting.micro_batch,
    )


def simplicity_key(setting: Setting) -> tuple[int, ...]:
    """Return the order within a tie: fewer GPUs, then the simpler strategy."""
    return tie_break_key(setting)[:2]


def is_tie(value: Value, best: Value) -> bool:
    """Whether a value is within TIE of the best, in all of its parts.

    >>> is_tie((1.01,), (1.0,)), is_tie((1.03,), (1.0,)), is_tie((1.0, 2.0), (1.0, 1.0))
    (True, False, False)
    """
    return len(value) == len(best) and all(
        own <= other * (1 + TIE) for own, other in zip(value, best, strict=True)
    )


def memory_limit(layout: Layout, policy: Policy) -> int:
    """Return the bytes that a plan may use on the fullest device."""
    return int(policy.memory_share * available_bytes(layout.device))


def compute_run_s(workload: Workload, step_s: float | None) -> float | None:
    """Return the seconds of the whole run; None if the step time or the number of steps is unknown."""
    return None if step_s is None or workload.steps is None else step_s * workload.steps


def is_late(workload: Workload, policy: Policy, step_s: float | None, *, margin: float = MARGIN) -> bool:
    """Whether a run would end after the deadline less the margin."""
    needed = compute_run_s(workload, step_s)
    return policy.deadline_s is not None and needed is not None and needed > policy.deadline_s * (1 - margin)


def search_space(
    space: Space,
    estimator: Estimator,
    *,
    known: Iterable[Evaluation] = (),
    margin: float | None = None,
    notice: Notice = ignore_notice,
) -> SearchResult:
    """Return the best setting that fits, with all that was estimated and refused.

    `known` are settings estimated elsewhere (those on different devices), which compete here. `margin`
    refuses settings that end after the deadline less this share. `notice` is called with every setting that
    is better than all before it. After Ctrl-C return the best so far, marked as not complete; if there is
    none, raise KeyboardInterrupt.
    """
    return _Search(space, estimator, margin, notice).run(known)


LINE_MARGIN = 1.04
"""A micro-batch is not estimated if the line through two others predicts more than this times the limit."""


def predict_on_line(points: dict[int, int], micro: int) -> float | None:
    """Return the bytes of a micro-batch by the line through the two nearest points; None with fewer points.

    >>> predict_on_line({2: 100, 10: 500}, 6), predict_on_line({2: 100}, 6)
    (300.0, None)
    """
    if len(points) < 2:  # noqa: PLR2004 - a line
        return None
    first, second = sorted(points, key=lambda point: abs(point - micro))[:2]
    slope = (points[second] - points[first]) / (second - first)
    return points[first] + slope * (micro - first)


def _is_clearly_beyond(micro: int, points: dict[int, int], most: int) -> bool:
    expected = predict_on_line(points, micro)
    return expected is not None and expected > most * LINE_MARGIN


def end_splits(splits: tuple[BatchSplit, ...]) -> list[BatchSplit]:
    """Return the splits from which all others are derived: the largest micro-batch and the smallest above 1.

    One sample often runs other operations (a dimension of size 1 is broadcast), so it is traced separately
    if it matters.

    >>> end_splits(((8, 1), (4, 2), (2, 4), (1, 8)))
    [(8, 1), (2, 4)]
    """
    several = [split for split in splits if split[0] > 1] or list(splits)
    return list(dict.fromkeys((several[0], several[-1])))


def _memory_strain(seen: Evaluation) -> tuple[int, float]:
    """Return the missing bytes and the releases of cached blocks per step; less is better."""
    return seen.missing_bytes, seen.estimate.releases_per_step or 0.0


Entry = tuple[Value, bool, tuple[int, ...], int, "Family | None", "BatchSplit", Evaluation | None]
"""Value or bound, whether it is a bound, its order among equals, and its setting. Of equal values, an
estimate comes before a bound."""


def _setting_of(entry: Entry) -> Setting:
    family, split, seen = entry[4:]
    if seen is not None:
        return seen.setting
    assert family is not None  # noqa: S101 - a bound belongs to a family
    return family.setting(split)


def _pick_plainest(families: Iterable[Family]) -> list[Family]:
    """Return one family of every strategy: the least recomputing and compiling, on the most devices."""
    plainest: dict[Strategy, Family] = {}
    for family in sorted(
        families, key=lambda family: (RECOMPUTES.index(family.recompute), family.compile, -family.layout.gpus)
    ):
        plainest.setdefault(family.strategy, family)
    return list(plainest.values())


class _Search:
    """State of one search: a heap of settings, ordered by value or lower bound."""

    def __init__(self, space: Space, estimator: Estimator, margin: float | None, notice: Notice) -> None:
        self.space = space
        self.policy = space.policy
        self.estimator = estimator
        self.margin = margin
        self.notice = notice
        self.result = SearchResult()
        self.known: list[Entry] = []
        """Every estimated setting that fits."""
        self.heap: list[Entry] = []
        self.numbers = count()
        self.limits = self.result.limits
        self.evaluated_families: set[Family] = set()
        self.estimated: dict[tuple[Family, BatchSplit], Evaluation | None] = {}
        self.failed_families: dict[Family, TrimtabError] = {}
        """Families that cannot be estimated at any micro-batch."""
        self.prepared: set[Recompute] = set()
        """Recompute modes whose families were traced together."""
        self.sent_families: set[Family] = set()
        """Families that are traced ahead."""
        self.expected: Setting | None = None
        """The choice when the ways to fit that a plan mentions were traced ahead."""
        self.shown_families: set[Family] = set()
        """Families of the choice and the runners-up so far."""
        self.spare_splits: list[tuple[Family, BatchSplit]] = []
        """Other splits of those families, to fill up the runners-up."""
        self.last_failure: TrimtabError | None = None
        self.noticed: tuple[Value, tuple[int, ...]] | None = None
        """The best setting that was noticed."""
        self.plainest = _pick_plainest(space.families)

    def run(self, known: Iterable[Evaluation]) -> SearchResult:
        try:
            for evaluated in known:
                self._add_known(evaluated)
            for family in self.space.families:
                for split in family.splits:
                    self._push_bound(family, split, self._bound(family, split))
            self._search_heap()
            self._fill_runners_up()
        except KeyboardInterrupt:
            self._take_best_so_far()
        return self.result

    def _take_best_so_far(self) -> None:
        """Take the best estimated setting after an interrupt."""
        self.result.complete = False
        if self.result.best is None:
            if not self.known:
                raise KeyboardInterrupt
            first, *others = sorted(self.known)
            self.result.best = first[-1]
            self.result.runners_up = [entry[-1] for entry in others[:RUNNERS_UP] if entry[-1] is not None]

    def _search_heap(self) -> None:
        while self.heap:
            entry = heapq.heappop(self.heap)
            bound, is_bound, _, _, family, split, _ = entry
            if is_bound:
                assert family is not None  # noqa: S101 - a bound belongs to a family
                self._evaluate(family, split, bound)
                continue
            if self.result.best is None:
                entry = self._pick_simplest(entry)
            self._accept(entry)
            self._trace_ways()

    def _pick_simplest(self, first: Entry) -> Entry:
        """Return the simplest entry within a tie of the best, which is given.

        Every setting that may be simpler and within the tie is estimated first, so that the choice does not
        depend on the order of estimates.
        """
        won, aside = first, []
        most = first[0][0] * (1 + TIE)
        while self.heap and self.heap[0][0][0] <= most:
            entry = heapq.heappop(self.heap)
            value, is_bound, _, _, family, split, _ = entry
            if not is_tie(value, first[0]) or simplicity_key(_setting_of(entry)) >= simplicity_key(
                _setting_of(won)
            ):
                aside.append(entry)
            elif is_bound:
                assert family is not None  # noqa: S101 - a bound belongs to a family
                self._evaluate(family, split, value)
            elif self._is_later(entry, first):
                aside.append(entry)
            else:
                aside.append(won)
                won = entry
        for entry in aside:
            heapq.heappush(self.heap, entry)
        if won is not first:
            self.result.fastest = first[-1]
        return won

    def _is_later(self, entry: Entry, first: Entry) -> bool:
        """Whether an entry misses the deadline, or its margin, where the best meets it."""
        evaluation, best = entry[-1], first[-1]
        assert evaluation is not None  # noqa: S101 - both are known
        assert best is not None  # noqa: S101
        return any(
            is_late(self.space.workload, self.policy, evaluation.estimate.step_s, margin=margin)
            and not is_late(self.space.workload, self.policy, best.estimate.step_s, margin=margin)
            for margin in (MARGIN, 0.0)
        )

    def _accept(self, entry: Entry) -> None:
        """Accept the best remaining entry as the choice, or as the next runner-up."""
        family, seen = entry[4], entry[-1]
        assert seen is not None  # noqa: S101 - what is known was seen
        if family is not None:
            self.shown_families.add(family)
        if self.result.best is None:
            self.result.best = seen
        elif len(self.result.runners_up) < RUNNERS_UP:
            self.result.runners_up.append(seen)

    def _fill_runners_up(self) -> None:
        """Add other micro-batches of the shown families if there are too few runners-up.

        One new trace is made at most: where the program changes between the traced micro-batches, it gives
        the others.
        """
        traces_left = 1
        for family, split in self.spare_splits:
            if len(self.result.runners_up) >= RUNNERS_UP:
                break
            if split[0] > self.limits.get(family, split[0]):
                continue
            if not self._can_run_up(family, split):
                if split[0] == 1 or not traces_left:
                    continue
                traces_left -= 1
            seen = self._get_estimate(family, split)
            if seen is not None and seen.fits and not self._is_late(seen):
                self.result.runners_up.append(seen)
        self.result.runners_up.sort(
            key=lambda runner_up: objective_value(
                runner_up.setting, runner_up.estimate.step_s, self.policy.objective
            )
        )

    def _push_bound(self, family: Family, split: BatchSplit, bound: Value) -> None:
        order = self._order(family, split)
        heapq.heappush(self.heap, (bound, True, order, next(self.numbers), family, split, None))

    def _order(self, family: Family, split: BatchSplit) -> tuple[int, ...]:
        """Return the order of equal bounds: the largest micro-batch first, as it bounds the smaller ones."""
        setting = family.setting(split)
        first = STRATEGIES[family.strategy].probe_order, -family.layout.gpus
        return (*first, *tie_break_key(setting)[2:-1], -split[0])

    def _bound(self, family: Family, split: BatchSplit) -> Value:
        setting = family.setting(split)
        floor = self.estimator.lower_bound(setting, family.layout)
        return objective_value(setting, floor.step_s, self.policy.objective)

    def _evaluate(self, family: Family, split: BatchSplit, bound: Value) -> None:
        """Estimate a setting, unless it can be skipped by now."""
        if self._can_skip(family, split, bound):
            return
        if family not in self.evaluated_families:
            self.evaluated_families.add(family)
            if self.result.best is None:
                self._prepare(family, split, bound)
                self._trace_next()
        seen = self._get_estimate(family, split)
        if seen is None:
            self._record_failure(family)
        elif seen.fits:
            self._add_known(seen, family)
        elif self.result.best is None:
            self._find_limit(family, split, seen)
        else:
            self._lower_limit(family, split, seen)

    def _can_skip(self, family: Family, split: BatchSplit, bound: Value) -> bool:  # noqa: PLR0911 - one per cause
        setting = family.setting(split)
        if self.result.best is not None and not self._can_run_up(family, split):
            self._count_beaten(family, setting, bound)
            return True
        if self.result.best is not None and family in self.shown_families:
            self.spare_splits.append((family, split))
            return True
        floor = self.estimator.lower_bound(setting, family.layout)
        if floor.need_bytes > memory_limit(family.layout, self.policy):
            self._count_too_large(family, floor.need_bytes)
            return True
        if family in self.failed_families:
            self._count_failure(self.failed_families[family])
            return True
        if split[0] > self.limits.get(family, split[0]):
            self._count_too_large(family, 0)
            return True
        value = objective_value(setting, floor.step_s, self.policy.objective)
        if value > bound:
            self._push_bound(family, split, value)
            return True
        bounded = STRATEGIES[family.strategy].is_bounded_by_one_device
        if family not in self.evaluated_families and (bounded or family.recompute not in self.prepared):
            sharp = self.estimator.tighten_bound(setting, family.layout)
            value = objective_value(setting, sharp.step_s, self.policy.objective)
            if value > bound:
                self._push_bound(family, split, value)
                return True
        return False

    def _count_beaten(self, family: Family, setting: Setting, bound: Value) -> None:
        """Count a setting that cannot be better, and keep the least time of its family."""
        many, least = self.result.beaten.get(family, (0, math.inf))
        is_speed = self.policy.objective is Objective.SPEED
        if not (is_speed and many and bound[0] >= least):
            step_s = self.estimator.cached_bound(setting, family.layout).step_s or 0.0
            # Both are lower bounds: take the larger.
            least = min(least, max(step_s, bound[0]) if is_speed and step_s else step_s)
        self.result.beaten[family] = (many + 1, least)

    def _can_run_up(self, family: Family, split: BatchSplit) -> bool:
        """Whether a setting can become a runner-up after the choice is made: only without a new trace.

        One sample always needs its own trace.
        """
        alone = split[0] == 1 and len(family.splits) > 1
        lacking = len(self.result.runners_up) < RUNNERS_UP
        return lacking and not alone and self.estimator.has_traces(family.setting(split), family.layout)

    def _prepare(self, family: Family, split: BatchSplit, bound: Value) -> None:
        """Trace a family, and others with the same recompute mode that have their turn now too.

        If nothing is known yet, the family comes first, and its `split` is estimated as a first answer; if
        that does not fit, the smallest traced one is.
        """
        largest: dict[str, Family] = {}
        if family.recompute not in self.prepared:
            self.prepared.add(family.recompute)
            for other in self.space.families:
                # The most devices of each strategy: traces of fewer follow from the same lines.
                is_alike = other.recompute is family.recompute and not other.compile
                # A bound from one device is mostly enough for these.
                if is_alike and not STRATEGIES[other.strategy].is_bounded_by_one_device:
                    known = largest.get(other.strategy)
                    if known is None or other.layout.gpus > known.layout.gpus:
                        largest[other.strategy] = other
        first = [family]
        if not self.known:
            self._prepare_families(first)
            seen = self._get_estimate(family, split)
            if seen is not None and not seen.fits:
                self._get_estimate(family, end_splits(family.splits)[-1])
            first = []
        # The static memory is known now, so families that are too large are not traced.
        others = [other for other in largest.values() if self._can_fit(other) and self._can_win(other)]
        if family.recompute is not Recompute.NONE:
            # The times of all others bound those that recompute, mostly enough to leave some out.
            most = bound[0] * (1 + TIE)
            others = [other for other in others if self._least_bound(other)[0] <= most]
        self._prepare_families([*first, *others])

    def _trace_next(self) -> None:
        """Let the family that has its turn next be traced while this one is computed.

        None is, if another that needs no trace may come first: bounds may rise until then.
        """
        if self.notice is ignore_notice or not self.heap or not self.estimator.can_prefetch():
            return
        most = self.heap[0][0]
        untraced = [
            (self._cached_least_bound(family), self._order(family, family.splits[0]), number, family)
            for number, family in enumerate(self.space.families)
            if family not in self.evaluated_families | self.failed_families.keys() | self.sent_families
        ]
        for least, *_, family in sorted(untraced):
            if least > most:
                return
            if least[-1] <= 0:
                # Nothing is known of its time.
                continue
            ends = [(family.setting(split), family.layout) for split in end_splits(family.splits)]
            if all(self.estimator.has_traces(*end) for end in ends) or not self._can_fit(family):
                continue
            self.sent_families.add(family)
            self.estimator.prefetch(ends)
            return

    def _trace_ways(self) -> None:
        """Let the ways to fit of the choice be traced while the search computes the runners-up.

        The plan says what they would buy.
        """
        best = self.result.best
        if self.notice is ignore_notice or best is None or best.setting == self.expected:
            return
        trace = self.estimator.get_trace(best.setting, best.layout)
        changed = list_changed(best.setting, best.estimate, best.allowed_bytes, self.policy, trace)
        if self.estimator.prefetch(
            [(setting, best.layout) for way, setting in changed if not way.is_slow_to_trace]
        ):
            self.expected = best.setting

    def _prepare_families(self, families: list[Family]) -> None:
        self.estimator.prepare(
            [
                (family.setting(split), family.layout)
                for family in families
                for split in end_splits(family.splits)
            ]
        )

    def _can_fit(self, family: Family) -> bool:
        floor = self.estimator.lower_bound(family.setting(family.splits[-1]), family.layout)
        return floor.need_bytes <= memory_limit(family.layout, self.policy)

    def _can_win(self, family: Family) -> bool:
        """Whether the bounds of two micro-batches of a family are below the best so far.

        A family that is wrongly left out here is traced later, when its bound is the lowest.
        """
        best = min(self.known, default=None)
        return best is None or self._least_bound(family)[0] <= best[0][0] * (1 + TIE)

    def _least_bound(self, family: Family) -> Value:
        """Return the lower of the bounds of two micro-batches of a family."""
        return min(self._bound(family, split) for split in end_splits(family.splits))

    def _cached_least_bound(self, family: Family) -> Value:
        """Return the same from stored times: what is only traced ahead must not change later bounds."""
        settings = [family.setting(split) for split in end_splits(family.splits)]
        return min(
            objective_value(
                setting,
                self.estimator.cached_bound(setting, family.layout).step_s,
                self.policy.objective,
            )
            for setting in settings
        )

    def _get_estimate(self, family: Family, split: BatchSplit) -> Evaluation | None:
        """Return the setting with the first allocator that makes it fit, else the one that needs least."""
        if (family, split) not in self.estimated:
            self.estimated[family, split] = self._compute_estimate(family, split)
        return self.estimated[family, split]

    def _compute_estimate(self, family: Family, split: BatchSplit) -> Evaluation | None:
        best: Evaluation | None = None
        for allocator in self.space.allocators:
            setting = family.setting(split, allocator)
            try:
                estimate = self.estimator.estimate(setting, family.layout)
            except TrimtabError as error:
                self._count_failure(error)
                self.last_failure = error
                return None
            evaluation = Evaluation(
                setting, family.layout, estimate, memory_limit(family.layout, self.policy)
            )
            if self.space.tight and not evaluation.fits:
                evaluation = replace(
                    evaluation,
                    estimate=self.estimator.judge_within(setting, family.layout, evaluation.allowed_bytes),
                )
            if best is None or _memory_strain(evaluation) < _memory_strain(best):
                best = evaluation
            if evaluation.fits and not evaluation.is_tight:
                break
        assert best is not None  # noqa: S101 - there is an allocator
        self.result.evaluations.append(best)
        self._notice_better(best)
        return best

    def _notice_better(self, seen: Evaluation) -> None:
        """Call `notice` with a setting that fits if it is better than all before it."""
        if self.notice is ignore_notice or not seen.fits or self._is_late(seen):
            return
        value = objective_value(seen.setting, seen.estimate.step_s, self.policy.objective)
        rank = value, tie_break_key(seen.setting)
        if self.noticed is None or rank < self.noticed:
            self.noticed = rank
            self.notice(replace(seen, least_s=self._least_s()))

    def _least_s(self) -> float | None:
        """Return a lower bound on the step time of all settings, from stored times; None if there is none."""
        if self.policy.objective is not Objective.SPEED:
            return None
        bounds = [
            self.estimator.cached_bound(family.setting(split), family.layout).step_s
            for family in self.space.families
            for split in end_splits(family.splits)
        ]
        return min((bound or 0.0 for bound in bounds), default=0.0) or None

    def _count_failure(self, error: TrimtabError) -> None:
        many, first = self.result.failed.get(error.found, (0, error))
        self.result.failed[error.found] = (many + 1, first)

    def _record_failure(self, family: Family) -> None:
        """Record a family as failed if its smallest micro-batch cannot be estimated either.

        Other families are still tried. If the plainest setting of every strategy fails, the job itself
        fails, and no other setting is tried.
        """
        error = self.last_failure
        assert error is not None  # noqa: S101 - the caller has seen the failure
        if self._get_estimate(family, end_splits(family.splits)[-1]) is None:
            self.failed_families[family] = error
        for plain in self.plainest:
            if self.result.evaluations:
                return
            if (
                plain not in self.failed_families
                and self._get_estimate(plain, end_splits(plain.splits)[-1]) is None
            ):
                self.failed_families[plain] = self.last_failure or error
        first = next(iter(self.failed_families.values()), None)
        if first is not None and not self.result.evaluations:
            self.failed_families = {
                family: self.failed_families.get(family, first) for family in self.space.families
            }

    def _find_limit(self, family: Family, split: BatchSplit, seen: Evaluation) -> None:
        """Find the largest micro-batch that fits, by the line through the memory of two others.

        Memory is nearly linear in the micro-batch, so the first guess is mostly right. Micro-batches that
        the line puts clearly above the limit are not estimated. One sample may need a trace of its own: it
        is left for the time when its bound is the lowest.
        """
        self._count_too_large(family, seen.estimate.need_bytes)
        smaller = [other for other in family.splits if other[0] < split[0]]
        small = next((end for end in end_splits(family.splits)[::-1] if end[0] < split[0]), None)
        points = {split[0]: seen.estimate.need_bytes}
        if small is not None and (other := self._get_estimate(family, small)) is not None:
            points[small[0]] = other.estimate.need_bytes
        untraced = smaller[-1:] == [family.splits[-1]] and not self._has_last_trace(family)
        low, high = 0, len(smaller) - untraced
        while low < high:
            guess = self._guess_fitting(smaller[low:high], points, seen.allowed_bytes) + low
            need = self._need_bytes(family, smaller[guess])
            if need is not None:
                points[smaller[guess][0]] = need
            if need is None or need <= seen.allowed_bytes:
                high = guess
                while low < high and _is_clearly_beyond(smaller[low][0], points, seen.allowed_bytes):
                    low += 1
            else:
                low = guess + 1
        if untraced and low == len(smaller) - 1 and _is_clearly_beyond(1, points, seen.allowed_bytes):
            low += 1
        self.limits[family] = smaller[low][0] if low < len(smaller) else 0

    def _lower_limit(self, family: Family, split: BatchSplit, seen: Evaluation) -> None:
        """Lower the limit of a family after the choice is made: smaller micro-batches follow in the heap.

        The exact limit is not worth finding then. What the line through the memory of this and of the
        smallest micro-batch puts clearly above the limit is left out.
        """
        self._count_too_large(family, seen.estimate.need_bytes)
        left = [other for other in family.splits if other[0] < split[0]]
        small = next((end for end in end_splits(family.splits)[::-1] if end[0] < split[0]), None)
        points = {split[0]: seen.estimate.need_bytes}
        if small is not None and self._can_run_up(family, small):
            other = self._get_estimate(family, small)
            points |= {} if other is None else {small[0]: other.estimate.need_bytes}
        while left and _is_clearly_beyond(left[0][0], points, seen.allowed_bytes):
            del left[0]
        self.limits[family] = left[0][0] if left else 0

    def _has_last_trace(self, family: Family) -> bool:
        """Whether the smallest micro-batch is not one sample that needs a trace of its own."""
        split = family.splits[-1]
        return split[0] > 1 or self.estimator.has_traces(family.setting(split), family.layout)

    def _guess_fitting(self, left: list[BatchSplit], points: dict[int, int], most: int) -> int:
        """Return the index of the first micro-batch that fits by the line; `left` starts with the largest."""
        for index, split in enumerate(left):
            expected = predict_on_line(points, split[0])
            if expected is not None and expected <= most:
                return index
        return (len(left) - 1) // 2 if len(points) < 2 else len(left) - 1  # noqa: PLR2004 - a line

    def _need_bytes(self, family: Family, split: BatchSplit) -> int | None:
        """Return the upper band of a setting, or a bound above the limit; None if it cannot be estimated."""
        floor = self.estimator.lower_bound(family.setting(split), family.layout)
        if floor.need_bytes > memory_limit(family.layout, self.policy):
            return floor.need_bytes
        seen = self._get_estimate(family, split)
        return None if seen is None else seen.estimate.need_bytes

    def _count_too_large(self, family: Family, need_bytes: int) -> None:
        many, least = self.result.too_large.get(family, (0, 0))
        least = min(least, need_bytes) if least and need_bytes else least or need_bytes
        self.result.too_large[family] = (many + 1, least)

    def _is_late(self, seen: Evaluation) -> bool:
        return self.margin is not None and is_late(
            self.space.workload, self.policy, seen.estimate.step_s, margin=self.margin
        )

    def _add_known(self, seen: Evaluation, family: Family | None = None) -> None:
        """Add an estimated setting to the heap if it fits and meets the deadline."""
        if not seen.fits:
            return
        if self._is_late(seen):
            self.result.too_late += 1
            return
        value = objective_value(seen.setting, seen.estimate.step_s, self.policy.objective)
        entry: Entry = (value, False, tie_break_key(seen.setting), next(self.numbers), family, (0, 0), seen)
        heapq.heappush(self.heap, entry)
        self._notice_better(seen)
        self.known.append(entry)
