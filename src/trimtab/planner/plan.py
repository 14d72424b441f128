"""Make a plan: run the search with a tracing worker process, the caches and prefetched traces."""

from __future__ import annotations

import gc
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.cache import ESTIMATES, PLANS, SEARCHES, TRACES, code_fingerprint, fingerprint
from trimtab.errors import CannotFollow, JobFailed, TrimtabError, WrongUse
from trimtab.planner.decision import PlanQuestion, choose_among, choose_plan
from trimtab.planner.estimator import (
    EstimateCache,
    TraceEstimator,
    is_guessed,
    strip_device,
    summarize_setting,
)
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.layout_candidates import (
    ERROR,
    MOST_TRACED_GPUS,
    add_layouts,
    explain_formulas,
    list_spaces,
    propose_layouts,
)
from trimtab.planner.layout_plans import AXES, NOT_ESTIMATING, make_layout_plan, make_setting
from trimtab.planner.plan_files import collect_fingerprints, read_versions
from trimtab.planner.search_cache import SearchCache, StoredQuestion, drop_run
from trimtab.planner.space import list_shard_counts
from trimtab.planner.usual_batch import assume_batch
from trimtab.planner.verify import note_unverified, verify_choice
from trimtab.predict.calibration import own_folder, read_own_calibration
from trimtab.predict.derive import direct_shards
from trimtab.predict.traces import get_traces, interpolate_family
from trimtab.spec import Plan, Trace
from trimtab.trace.job_summary import NamedJob, has_summary, named_job_key, summarize_job
from trimtab.trace.loss_check import LossCheck
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.trace.tracer import family_key, trace_key
from trimtab.units import format_figure, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from trimtab.planner.layout_candidates import LayoutProposal
    from trimtab.planner.layouts import RankedLayout
    from trimtab.planner.search import Evaluation
    from trimtab.predict.traces import Family
    from trimtab.spec import Cluster, Device, Policy, Setting, Workload

QUICK_CHECK_S = 0.5
"""If checking the loss takes longer, the search begins meanwhile."""
LAYOUTS_TRACED_S = 45.0
"""Seconds since the start of a plan after which layouts that formulas propose are no longer traced."""
TRACED_TOO_LONG = "not traced: that takes too long on this machine"
LEAST_TRACED_S = 15.0
"""Seconds that tracing them gets in any case."""


class SearchIsOver(Exception):  # noqa: N818 - not an error: the real search begins
    """A search ahead ends, as it is known by now how the loss depends on the batch."""


@dataclass(kw_only=True)
class JobTracer:
    """Traces of one job for one plan, from one worker process."""

    job: str
    overrides: dict[str, Any]
    worker: WorkerProcess
    clip: float | None = None
    cache: bool = True
    is_ahead: bool = False
    """Whether settings that are likely to be asked for may be traced while the search computes."""
    started: float = field(default_factory=monotonic)
    """Moment of `monotonic()` at which the plan was asked for."""
    ends_at: float | None = None
    """Moment of `monotonic()` at which tracing fails; None: only by the usual limits."""
    verify_s: float | None = None
    """Seconds in which torch's compiler may verify the choice; None: it is not verified."""
    is_over: Callable[[], bool] = lambda: False
    """Whether a search ahead has to end."""
    families: dict[str, Family] = field(default_factory=dict)
    is_cut_short: bool = False
    """Whether a trace was not made because time was up."""

    def trace_all(
        self, settings: Sequence[Setting], device: Device, changes: dict[str, Any]
    ) -> list[Trace | TrimtabError]:
        """Return the trace of each setting, or why there is none; `changes` are further job options."""
        if self.is_over():
            raise SearchIsOver
        start = monotonic()
        self.worker.last = None
        if self.ends_at is not None and start > self.ends_at:
            return [self._make_timeout()] * len(settings)
        try:
            found = get_traces(
                self.job,
                settings,
                device,
                overrides={**self.overrides, **changes},
                clip=self.clip,
                cache=self.cache,
                families=self.families,
                worker=self.worker,
                # A second micro-batch for later questions would delay this one.
                partner=False,
                timeout_s=None if self.ends_at is None else self.ends_at - start,
            )
        except JobFailed:
            if self.ends_at is None or monotonic() < self.ends_at:
                raise
            return [self._make_timeout()] * len(settings)
        return found

    def _make_timeout(self) -> TrimtabError:
        self.is_cut_short = True
        return CannotFollow(
            f"job {self.job}",
            found=TRACED_TOO_LONG,
            cure="Plan again while the machine is less busy, or pin degrees: --pin tp=8.",
        )

    def is_derivable(
        self, setting: Setting, device: Device, changes: dict[str, Any], sizes: Collection[int]
    ) -> bool:
        """Whether the traces at these micro-batches give the trace of a setting."""
        request = TraceRequest(
            job=self.job,
            overrides={**self.overrides, **changes},
            setting=setting,
            device=device,
            clip=self.clip,
        )
        family = self.families.get(family_key(request), {})
        traced = {size: family[size] for size in sizes if size in family}
        return interpolate_family(traced, setting.micro_batch) is not None

    def can_prefetch(self) -> bool:
        """Whether the worker process may trace what is likely to be asked for: it has nothing else to do."""
        return self.is_ahead and self.worker.is_idle()

    def prefetch(self, settings: Sequence[Setting], device: Device) -> bool:
        """Start tracing settings that are likely to be asked for; False if the worker process is busy."""
        if self.is_ahead and not self.can_prefetch():
            return False
        if self.is_ahead:
            requests = TraceRequests(
                job=self.job,
                overrides=self.overrides,
                settings=tuple(dict.fromkeys(settings)),
                device=device,
                clip=self.clip,
            )
            self._send_ahead(requests)
        return True

    def _send_ahead(self, likely: TraceRequests) -> None:
        """Send the requests whose traces are not on disk."""
        missing = tuple(request.setting for request in likely.each() if not TRACES.has(trace_key(request)))
        if missing:
            self.worker.prefetch(likely.replace(settings=missing))


def make_plan(  # noqa: PLR0913 - what a plan depends on
    job: str,
    overrides: dict[str, Any],
    cluster: Cluster,
    policy: Policy,
    *,
    given: Mapping[str, int | None] | None = None,
    compare: Iterable[int] = (),
    clip: float | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
    say_best: Callable[[str], None] = lambda _: None,
    partial: bool = False,
    verify_s: float | None = None,
) -> Plan:
    """Return the best configuration of a job on a cluster, with reasons.

    `overrides` are options of the job. `given` replaces values of its workload: `global_batch`,
    `samples`, `epochs`. `say` gets each activity in words, `say_best` the best setting so far. With
    `partial`, Ctrl-C returns the best so far as a plan that is not `complete`. With `verify_s`, torch's
    compiler verifies the choice, for so many seconds.
    """
    started = monotonic()
    overrides, given, assumed_batch = assume_batch(job, overrides, given or {}, cluster)
    with WorkerProcess() as worker, _pause_garbage_collection():
        if not (cache and has_summary(job, overrides)):
            # The worker process will be needed: it loads the job while this process reads the workload.
            device = strip_device(min(cluster.devices, key=available_bytes))
            worker.load_job(TraceRequests(job=job, overrides=overrides, settings=(), device=device))
        workload = read_workload(job, overrides, given, cache=cache, say=say)
        question = PlanQuestion(
            job=job, workload=workload, cluster=cluster, policy=policy, compare=tuple(compare)
        )

        tracing = JobTracer(
            job=job,
            overrides=overrides,
            worker=worker,
            clip=clip,
            cache=cache,
            is_ahead="recompute" not in policy.pins,
            started=started,
            verify_s=verify_s,
        )

        def search_ahead(is_over: Callable[[], bool]) -> None:
            ahead = replace(tracing, is_over=is_over, verify_s=None)
            _search_ahead(question, ahead, _name_estimates(job, overrides, clip), say=say, say_best=say_best)

        workload = add_batch_loss(job, overrides, workload, cache=cache, say=say, meanwhile=search_ahead)
        question = replace(question, workload=workload)
        # The loss of a cached step is over the whole global batch, which its trace has to know.
        batch = given.get("global_batch")
        traced = overrides | ({"global_batch": batch} if workload.cached and batch else {})
        key = _name_estimates(job, traced, clip)
        plan_key = fingerprint(key, question, *["verified"] * (verify_s is not None))
        plan = PLANS.load(plan_key, Plan.from_json) if cache else None
        if plan is None:
            tracing = replace(tracing, overrides=traced)
            plan = _plan_layouts(question, tracing, key, say=say, say_best=say_best)
            if plan is None:
                plan = _search_plan(question, tracing, key, say=say, say_best=say_best)
            elif verify_s is not None:
                plan = note_unverified(plan, "compiled code is traced on one device only")
            if not (plan.complete or partial):
                raise KeyboardInterrupt
            assumed = collect_fingerprints(job, workload, plan.places, read_versions())
            plan = plan.replace(fingerprints=assumed, options=overrides, is_cut_short=tracing.is_cut_short)
            is_verified = verify_s is None or plan.estimate.verified or not is_guessed(plan.choice)
            is_sure = plan.complete and not plan.by_formulas and not plan.is_cut_short
            if is_sure and is_verified:
                PLANS.store(plan_key, plan.to_json())
    reasons = tuple(
        reason for reason in plan.reasons if assumed_batch == () or reason.subject != "global_batch"
    )
    return plan.replace(folder=str(Path.cwd()), reasons=(*reasons, *assumed_batch))


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Collect no reference cycles: a plan makes few, and looking for them takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan_layouts(
    question: PlanQuestion,
    tracing: JobTracer,
    key: str,
    *,
    say: Callable[[str], None],
    say_best: Callable[[str], None],
) -> Plan | None:
    """Return the plan among layouts that formulas propose; None if they propose none, or none fits."""
    say("ranking layouts by formulas")
    proposal = propose_layouts(
        question,
        tracing.overrides,
        notice=lambda ranked: say_best(describe_layout(ranked)),
        cache=tracing.cache,
    )
    if proposal is None:
        return None
    why = f"not traced: there are more than {MOST_TRACED_GPUS:,} GPUs"
    if proposal.is_traced:
        ends_at = max(tracing.started + LAYOUTS_TRACED_S, monotonic() + LEAST_TRACED_S)
        limited = replace(tracing, is_ahead=False, ends_at=ends_at)
        with _open_estimator(question, limited, key, say=say) as estimator:
            made = _trace_layouts(proposal, question, estimator, say_best)
        tracing.is_cut_short = limited.is_cut_short
        if made is None or (isinstance(made, TrimtabError) and proposal.needs_search):
            return None
        if isinstance(made, Plan):
            made = add_layouts(made, proposal)
            if not proposal.needs_search:
                return made
            other = _search_plan(question, tracing, key, say=say, say_best=say_best)
            return min(made, other, key=lambda plan: plan.estimate.step_s or 0.0)
        why = made.found
    made = make_layout_plan(
        proposal.study,
        proposal.best,
        job=question.job,
        workload=question.workload,
        policy=question.policy,
        among=proposal.runnable,
    )
    return explain_formulas(add_layouts(made, proposal), why)


def _trace_layouts(
    proposal: LayoutProposal,
    question: PlanQuestion,
    estimator: TraceEstimator,
    say_best: Callable[[str], None],
) -> Plan | TrimtabError | None:
    """Return the plan among the traced layouts; None if none fits or runs, an error if time is up."""
    for space in list_spaces(proposal, question):
        estimator.direct |= {family.mesh.dp_shard for family in space.families}
        # Data parallelism alone is traced first: it is the safest answer if the time is up.
        plain = [
            family
            for family in space.families
            if family.mesh.size == family.mesh.data_parallel and family.mesh.ep == 1
        ]
        if not estimator.searches.has(space):
            estimator.prepare([(family.setting(family.splits[0]), family.layout) for family in plain[:1]])
        made = choose_among(space, question, estimator, notice=lambda seen: say_best(_describe_best(seen)))
        is_failed = isinstance(made, TrimtabError) and made.found != TRACED_TOO_LONG
        if made is not None and not is_failed:
            return made
    return None


@contextmanager
def _open_estimator(
    question: PlanQuestion, tracing: JobTracer, key: str, *, say: Callable[[str], None]
) -> Iterator[TraceEstimator]:
    """Yield an estimator with the cached estimates of a job; store those that it computed, even on errors."""
    cached = ESTIMATES.load(key, _read_estimates) if tracing.cache else None
    estimates = cached or EstimateCache()
    # Searches with verified times are other ones.
    is_cached = tracing.cache and tracing.verify_s is None
    searches_key = _name_searches(key, question, is_layouts=tracing.ends_at is not None)
    earlier = SEARCHES.load(searches_key, _read_searches) if is_cached else None
    searches = SearchCache(earlier or StoredQuestion())
    try:
        yield TraceEstimator(
            mixes="recompute" not in question.policy.pins,
            trace_all=tracing.trace_all,
            prefetch_all=tracing.prefetch,
            can_prefetch=tracing.can_prefetch,
            is_derivable=tracing.is_derivable,
            calibration_of=read_own_calibration,
            say=say,
            cache=estimates,
            searches=searches,
        )
        # With more time, a search finds more.
        if is_cached and searches.new.searches and earlier is None and not tracing.is_cut_short:
            SEARCHES.store(searches_key, msgspec.json.encode(searches.new))
    finally:
        if tracing.cache and estimates.changed:
            estimates.changed = False
            ESTIMATES.store(key, msgspec.json.encode(estimates))


def _search_ahead(
    question: PlanQuestion,
    tracing: JobTracer,
    key: str,
    *,
    say: Callable[[str], None],
    say_best: Callable[[str], None],
) -> None:
    """Search as if the loss were additive, as most are; the real search uses the same traces and estimates.

    Its plan is not used, and its errors are not shown: the real search makes the same ones.
    """
    with suppress(SearchIsOver, TrimtabError):
        plan = _search_plan(question, tracing, key, say=say, say_best=say_best)
        if not plan.complete:
            raise KeyboardInterrupt


def _search_plan(
    question: PlanQuestion,
    tracing: JobTracer,
    key: str,
    *,
    say: Callable[[str], None],
    say_best: Callable[[str], None],
) -> Plan:
    """Return the plan by a search; store the estimates that it computed, even if it fails."""
    shards = direct_shards(list_shard_counts(question.workload, question.cluster, question.policy))
    with _open_estimator(question, tracing, key, say=say) as estimator:
        estimator.direct |= shards

        def search() -> Plan:
            return choose_plan(question, estimator, notice=lambda seen: say_best(_describe_best(seen)))

        if tracing.verify_s is None:
            return search()
        plan = search()
        ends_at = monotonic() + tracing.verify_s
        limited = replace(tracing, is_ahead=False, ends_at=ends_at)
        return verify_choice(plan, search, estimator, limited.trace_all, ends_at=ends_at, say=say)


def read_workload(
    job: str,
    overrides: dict[str, Any],
    given: Mapping[str, int | None],
    *,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Workload:
    """Return the workload that a job describes, with the values in `given` instead of the job's."""
    for key, value in given.items():
        if value is not None and value < 1:
            option = f"--{key.replace('_', '-')}"
            raise WrongUse(f"{option} {value}", found="it is below 1", cure=f"Give {option} at least 1.")
    say("reading the job")
    workload = summarize_job(job, overrides, cache=cache)
    return workload.replace(**{key: value for key, value in given.items() if value is not None})


def add_batch_loss(  # noqa: PLR0913 - a job, and what to do while it is checked
    job: str,
    overrides: dict[str, Any],
    workload: Workload,
    *,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
    meanwhile: Callable[[Callable[[], bool]], None] = lambda _: None,
) -> Workload:
    """Add to the workload whether its loss is additive, from a small batch; skip it if the job says so.

    The check runs the model on the CPU. If it takes long, `meanwhile` is called with a function that says
    whether the check is over.
    """
    if workload.batch_loss is not None or workload.cached or workload.global_batch == 1:
        return workload
    say("comparing the loss of a small batch with those of its halves")
    check = LossCheck(job, overrides, cache=cache)
    if not check.is_over(QUICK_CHECK_S):
        meanwhile(check.is_over)
    return workload.replace(batch_loss=check.result())


def _describe_best(seen: Evaluation) -> str:
    """Return a setting with its speed, and a bound on the speed of all settings, in words.

    A bound of 770 samples/s above a speed of 700 says that the search can still gain 10 %.
    """
    setting, step_s = seen.setting, seen.estimate.step_s
    speed = "" if not step_s else f", {format_figure(setting.global_batch / step_s)} samples/s"
    if step_s and seen.least_s and seen.least_s < step_s:
        speed += f" (none above {format_figure(setting.global_batch / seen.least_s)})"
    return f"{summarize_setting(setting)} on {plural(setting.gpus, 'GPU')}{speed}"


def describe_layout(ranked: RankedLayout) -> str:
    """Return a layout with its speed by formulas in words."""
    setting = make_setting(ranked.layout)
    degrees = "".join(f", {axis} {degree}" for axis in AXES if (degree := getattr(ranked.layout, axis)) > 1)
    speed = format_figure(setting.global_batch / ranked.time.total_s)
    return (
        f"{summarize_setting(setting)}{degrees} on {plural(setting.gpus, 'GPU')}, about {speed} samples/s "
        f"by formulas (error {ERROR:.0%})"
    )


def _read_estimates(data: bytes) -> EstimateCache:
    return msgspec.json.decode(data, type=EstimateCache)


def _read_searches(data: bytes) -> StoredQuestion:
    return msgspec.json.decode(data, type=StoredQuestion)


def _name_searches(key: str, question: PlanQuestion, *, is_layouts: bool) -> str:
    """Return the cache key of the searches of a question: all but the price, the deadline and the run."""
    policy, workload = drop_run(question.policy, question.workload)
    return fingerprint(key, replace(question, policy=policy, workload=workload), is_layouts)


def _name_estimates(job: str, overrides: dict[str, Any], clip: float | None) -> str:
    """Return the cache key of all estimates of a job: the job, our code and the user's own calibrations."""
    named = NamedJob(job=job, overrides={**overrides, "clip": clip})
    files = sorted(own_folder().glob("*.json"))
    calibrations = [(file.name, file.read_bytes()) for file in files if file.is_file()]
    return fingerprint(named_job_key(named), code_fingerprint(NOT_ESTIMATING), calibrations)
