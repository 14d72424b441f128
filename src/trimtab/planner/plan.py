"""Make a plan: run the search with a tracing worker process, the caches and prefetched traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.cache import ESTIMATES, PLANS, TRACES, code_fingerprint, fingerprint
from trimtab.errors import WrongUse
from trimtab.planner.decision import PlanQuestion, choose_plan
from trimtab.planner.estimator import EstimateCache, TraceEstimator, strip_device, summarize_setting
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.plan_files import collect_fingerprints, read_versions
from trimtab.planner.space import list_shard_counts
from trimtab.predict.calibration import own_folder, read_own_calibration
from trimtab.predict.derive import direct_shards
from trimtab.predict.traces import get_traces, interpolate_family
from trimtab.spec import Plan, Recompute
from trimtab.trace.job_summary import NamedJob, has_summary, named_job_key, summarize_job
from trimtab.trace.loss_check import check_batch_loss
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.trace.tracer import NOT_TRACING, family_key, trace_key
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from trimtab.errors import TrimtabError
    from trimtab.planner.search import Evaluation
    from trimtab.predict.traces import Family
    from trimtab.spec import Cluster, Device, Policy, Setting, Trace, Workload

SLOW_S = 3.0
"""If one round of traces takes longer, the next round is traced ahead."""
TOO_SLOW_S = 20.0
"""If one round takes longer than this, nothing is traced ahead: a wrong guess would make the search wait."""
NEXT_RECOMPUTE = {Recompute.NONE: Recompute.SELECTIVE, Recompute.SELECTIVE: Recompute.FULL}
"""The search tries the fastest way of recomputing first."""
NOT_ESTIMATING = NOT_TRACING - {"predict", "planner"}
"""Packages of trimtab that no plan depends on."""


@dataclass(kw_only=True)
class JobTracer:
    """Traces of one job for one plan, from one worker process."""

    job: str
    overrides: dict[str, Any]
    worker: WorkerProcess
    clip: float | None = None
    cache: bool = True
    is_ahead: bool = False
    """Whether the next way of recomputing may be traced while the search computes."""
    families: dict[str, Family] = field(default_factory=dict)
    is_slow: bool = False

    def trace_all(
        self, settings: Sequence[Setting], device: Device, changes: dict[str, Any]
    ) -> list[Trace | TrimtabError]:
        """Return the trace of each setting, or why there is none; `changes` are further job options."""
        start = monotonic()
        self.worker.last = None
        found = get_traces(
            self.job,
            settings,
            device,
            overrides={**self.overrides, **changes},
            clip=self.clip,
            cache=self.cache,
            families=self.families,
            worker=self.worker,
        )
        seconds = monotonic() - start
        self.is_slow = self.is_slow or seconds > SLOW_S
        if self.is_ahead and self.is_slow and seconds < TOO_SLOW_S:
            self._trace_ahead()
        return found

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

    def _trace_ahead(self) -> None:
        """Send the last requests once more with the next way of recomputing: the search asks for it next."""
        last = self.worker.last
        if last is None:
            return
        settings = [
            setting.replace(recompute=NEXT_RECOMPUTE[setting.recompute])
            for setting in last.settings
            if setting.recompute in NEXT_RECOMPUTE
        ]
        likely = last.replace(settings=tuple(settings))
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
) -> Plan:
    """Return the best configuration of a job on a cluster, with reasons.

    `overrides` are options of the job. `given` replaces values of its workload: `global_batch`,
    `samples`, `epochs`. `say` gets each activity in words, `say_best` the best setting so far. With
    `partial`, Ctrl-C returns the best so far as a plan that is not `complete`.
    """
    given = given or {}
    with WorkerProcess() as worker:
        if not (cache and has_summary(job, overrides)):
            # The worker process will be needed: it loads the job while this process reads the workload.
            device = strip_device(min(cluster.devices, key=available_bytes))
            worker.load_job(TraceRequests(job=job, overrides=overrides, settings=(), device=device))
        workload = read_workload(job, overrides, given, cache=cache, say=say)
        workload = add_batch_loss(job, overrides, workload, cache=cache, say=say)
        question = PlanQuestion(
            job=job, workload=workload, cluster=cluster, policy=policy, compare=tuple(compare)
        )
        # The loss of a cached step is over the whole global batch, which its trace has to know.
        batch = given.get("global_batch")
        traced = overrides | ({"global_batch": batch} if workload.cached and batch else {})
        key = _estimates_key(NamedJob(job=job, overrides={**traced, "clip": clip}))
        plan_key = fingerprint(key, question)
        plan = PLANS.load(plan_key, Plan.from_json) if cache else None
        if plan is None:
            tracing = JobTracer(
                job=job,
                overrides=traced,
                worker=worker,
                clip=clip,
                cache=cache,
                is_ahead="recompute" not in policy.pins,
            )
            plan = _search_plan(question, tracing, key, say=say, say_best=say_best)
            if not (plan.complete or partial):
                raise KeyboardInterrupt
            assumed = collect_fingerprints(job, workload, plan.places, read_versions())
            plan = plan.replace(fingerprints=assumed, options=overrides)
            if plan.complete:
                PLANS.store(plan_key, plan.to_json())
    return plan.replace(folder=str(Path.cwd()))


def _search_plan(
    question: PlanQuestion,
    tracing: JobTracer,
    key: str,
    *,
    say: Callable[[str], None],
    say_best: Callable[[str], None],
) -> Plan:
    """Return the plan by a search; store the estimates that it computed, even if it fails."""
    cached = ESTIMATES.load(key, _read_estimates) if tracing.cache else None
    estimates = cached or EstimateCache()
    estimator = TraceEstimator(
        mixes="recompute" not in question.policy.pins,
        trace_all=tracing.trace_all,
        is_derivable=tracing.is_derivable,
        calibration_of=read_own_calibration,
        say=say,
        cache=estimates,
    )
    estimator.direct |= direct_shards(list_shard_counts(question.workload, question.cluster, question.policy))
    try:
        return choose_plan(question, estimator, notice=lambda seen: say_best(_describe_best(seen)))
    finally:
        if tracing.cache and estimates.changed:
            estimates.changed = False
            ESTIMATES.store(key, msgspec.json.encode(estimates))


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


def add_batch_loss(
    job: str,
    overrides: dict[str, Any],
    workload: Workload,
    *,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Workload:
    """Add to the workload whether its loss is additive, from a small batch; skip it if the job says so."""
    if workload.batch_loss is not None or workload.cached or workload.global_batch == 1:
        return workload
    say("comparing the loss of a small batch with those of its halves")
    return workload.replace(batch_loss=check_batch_loss(job, overrides, cache=cache))


def _describe_best(seen: Evaluation) -> str:
    """Return a setting with its speed in words."""
    setting, step_s = seen.setting, seen.estimate.step_s
    speed = "" if not step_s else f", {setting.global_batch / step_s:.3g} samples/s"
    return f"{summarize_setting(setting)} on {plural(setting.gpus, 'GPU')}{speed}"


def _read_estimates(data: bytes) -> EstimateCache:
    return msgspec.json.decode(data, type=EstimateCache)


def _estimates_key(named: NamedJob) -> str:
    """Return the cache key of all estimates of a job: the job, our code and the user's own calibrations."""
    files = sorted(own_folder().glob("*.json"))
    calibrations = [(file.name, file.read_bytes()) for file in files if file.is_file()]
    return fingerprint(named_job_key(named), code_fingerprint(NOT_ESTIMATING), calibrations)
