"""The functions `estimate`, `profile`, `exam` and `calibrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from trimtab.api.detecting import detect
from trimtab.spec.requests import EstimateRequest, accepts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from trimtab.errors import TrimtabError
    from trimtab.exams.run import ExamResult
    from trimtab.predict.memory import MemoryPeaks
    from trimtab.scripts.estimate import ScriptEstimate
    from trimtab.spec import Calibration, Cluster, Device, Estimate, Offload, Recompute, Setting, Trace
    from trimtab.spec.requests import CommandRequest
    from trimtab.strategies.base import ParallelStrategy
    from trimtab.trace.request import TraceRequest


@accepts(EstimateRequest)
def estimate(request: EstimateRequest) -> Estimate:
    """Estimate the memory and the speed of one configuration, without running it and without a GPU.

    trimtab.estimate("job.py:MyJob", "H200", micro_batch=16).process_bytes
    trimtab.estimate("slm", "A100-40GB", micro_batch=20, options={"vocab": 50_304}).fits
    trimtab.estimate(MyJob, "8xH100", micro_batch=4, strategy="fsdp").fits
    trimtab.estimate(on="H100", command=["python", "train.py", "--lr", "1e-4"]).step_s
    """
    if request.command:
        return estimate_command(request).estimate
    where, setting = requested_setting(request)
    return look_closely(
        request.job,
        setting,
        first_device(where),
        where=where,
        options=request.options,
        clip=request.clip,
        cache=request.cache,
        always_least=True,
    )[0]


def estimate_command(request: EstimateRequest, say: Callable[[str], None] | None = None) -> ScriptEstimate:
    """Follow a training command on the pretended GPU; return its estimate and what was found out.

    `say` gets the last line that the script has printed.
    """
    import os

    from trimtab.probe.detect import as_cluster
    from trimtab.scripts.command import parse_command
    from trimtab.scripts.estimate import estimate_script

    refuse_job_options(request)
    cluster = as_cluster(request.on, network=request.network)
    first_device(cluster)
    return estimate_script(
        parse_command(request.command, environment=os.environ), cluster, say=say, cache=request.cache
    )


SCRIPT_FIELDS = frozenset({"job", "on", "network", "command", "cache"})
"""Fields of a request that concern a training command; the others are the script's own choice."""


def refuse_job_options(request: CommandRequest, fields: frozenset[str] = SCRIPT_FIELDS) -> None:
    """Raise if a request sets what only the script itself decides: an option that is not in `fields`."""
    from trimtab.errors import WrongUse
    from trimtab.spec.requests import list_options

    for name, option in list_options(type(request)).items():
        if name not in fields and getattr(request, name) not in (option.default, {}):
            flag = option.flag or f"--{name}"
            raise WrongUse(
                flag,
                found="it is for a job; in a training command the script decides this",
                cure=f"Leave {flag} out, and change the command after -- instead.",
            )


def requested_setting(request: EstimateRequest, *, any_batch: bool = False) -> tuple[Cluster, Setting]:
    """Return the cluster and the setting that an estimate is asked for.

    With `any_batch`, a schedule that cannot have the micro-batches of a step gets some more.
    """
    from trimtab.engine.in_backward_rules import refuse_in_backward
    from trimtab.probe.detect import as_cluster

    where = as_cluster(request.on, network=request.network, host_memory=request.host_memory)
    first_device(where)
    setting = make_setting(
        any_batch=any_batch,
        micro_batch=request.micro_batch,
        precision=request.precision,
        base=_find_base(request),
        loss=request.loss,
        recompute=request.recompute,
        offload=request.offload,
        compile=request.compile,
        strategy=request.strategy,
        schedule=request.schedule,
        virtual_stages=request.virtual_stages,
        gpus=request.gpus if request.gpus is not None else len(where.devices),
        pp=request.pp,
        tp=request.tp,
        cp=request.cp,
        cp_method=request.cp_method,
        ep=request.ep,
        expert_imbalance=request.expert_imbalance,
        optimizer=request.optimizer,
        optimizer_in_backward=request.optimizer_in_backward,
        allocator=request.allocator,
        sync_batchnorm=request.sync_batchnorm,
        nodes=len(where.nodes),
        **_spread_of(request.job, request.strategy, request.options, stages=request.pp),
    )
    refuse_in_backward(setting)
    return where, setting


def _find_base(request: EstimateRequest) -> str:
    """Return the storage of frozen layers: as requested, else as the job's folder has them."""
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.stored_base import find_stored_base
    from trimtab.spec import BaseFormat

    if request.base != BaseFormat.NONE.value or request.job is None:
        return request.base
    return find_stored_base(find_job_name(request.job)[0]).value


def look_closely(  # noqa: PLR0913 - a question and where it is asked
    job: Any,
    setting: Setting,
    device: Device,
    *,
    where: Cluster | None = None,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    always_least: bool = False,
) -> tuple[Estimate, MemoryPeaks, Trace]:
    """Return the estimate of a setting, its memory in detail, and its trace."""
    from trimtab.errors import TrimtabError

    asked: dict[str, Any] = {"options": options, "clip": clip, "cache": cache, "always_least": always_least}
    (found,) = look_at_all(job, [setting], device, where=where, **asked)
    if isinstance(found, TrimtabError):
        raise found
    return found


def batch_warnings(
    job: Any, setting: Setting, options: dict[str, Any] | None = None, *, cache: bool = True
) -> tuple[str, ...]:
    """Return warnings about a setting that splits the job's batch; runs the job's code on a small batch."""
    return begin_batch_warnings(job, setting, options, cache=cache)()


def begin_batch_warnings(
    job: Any, setting: Setting, options: dict[str, Any] | None = None, *, cache: bool = True
) -> Callable[[], tuple[str, ...]]:
    """Begin `batch_warnings` beside other work; the function that is returned waits for them."""
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.registry import comes_with_trimtab
    from trimtab.planner.batch_loss_rules import list_warnings
    from trimtab.trace.loss_check import LossCheck

    name, changed = find_job_name(job)
    if comes_with_trimtab(name):
        return lambda: ()
    check = LossCheck(name, changed | (options or {}), cache=cache)
    return lambda: list_warnings(check.result(), setting)


def look_at_all(  # noqa: PLR0913 - as above
    job: Any,
    settings: Sequence[Setting],
    device: Device,
    *,
    where: Cluster | None = None,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    always_least: bool = False,
) -> list[tuple[Estimate, MemoryPeaks, Trace] | TrimtabError]:
    """Return the estimate, memory and trace of each setting of a job, or the error.

    All that has to be traced is traced in one go. `always_least` finds the smallest capacity that runs also
    for settings that fit, which takes several replays.
    """
    from trimtab.jobs.load import find_job_name
    from trimtab.planner.estimates import estimate_settings

    name, changed = find_job_name(job)
    return estimate_settings(
        name,
        settings,
        device,
        cluster=where,
        overrides=changed | (options or {}),
        clip=clip,
        cache=cache,
        always_least=always_least,
    )


def is_known(  # noqa: PLR0913 - as above
    job: Any,
    setting: Setting,
    device: Device,
    *,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
) -> bool:
    """Return whether a setting can be estimated from cached traces."""
    from trimtab.predict.traces import has_trace as is_cached

    return cache and is_cached(make_request(job, setting, device, options=options, clip=clip))


def make_request(
    job: Any, setting: Setting, device: Device, *, options: dict[str, Any] | None, clip: float | None
) -> TraceRequest:
    """Return the request that a worker process needs to trace a job."""
    from trimtab.jobs.load import find_job_name
    from trimtab.trace.request import TraceRequest

    name, changed = find_job_name(job)
    return TraceRequest(
        job=name, overrides=changed | (options or {}), setting=setting, device=device, clip=clip
    )


def first_device(where: Cluster) -> Device:
    """Return the device that an estimate is for: the one with the least memory."""
    from trimtab.planner.estimates import smallest_device as least

    return least(where)


def gpu_here(verb: str = "profile") -> Device:
    """Return the first GPU of this machine."""
    from trimtab.errors import EnvironmentFault

    found = detect().devices
    if not found:
        raise EnvironmentFault(
            verb,
            found="this machine has no GPU that can be used",
            cure="Use `trimtab estimate --on DEVICES`, which needs none.",
        )
    return found[0]


def make_setting(  # noqa: PLR0913 - each is a field of Setting
    *,
    micro_batch: int,
    precision: str,
    recompute: str,
    compile: bool,  # noqa: A002
    strategy: str,
    gpus: int,
    optimizer: str,
    allocator: str,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    cp_method: str = "ring",
    ep: int = 1,
    expert_imbalance: float = 1.0,
    base: str = "none",
    loss: str = "whole",
    offload: str = "none",
    optimizer_in_backward: bool = False,
    sync_batchnorm: bool = False,
    schedule: str = "1f1b",
    virtual_stages: int | None = None,
    nodes: int = 1,
    branches: int = 0,
    global_batch: int | None = None,
    any_batch: bool = False,
) -> Setting:
    """Return a Setting from words; an unknown word raises an error that lists the known ones.

    Every rank takes one micro-batch; in a pipeline, and if branches have different numbers of ranks, as many
    as `global_batch` needs. With `any_batch`, a schedule that cannot have so many gets some more.
    """
    from trimtab.spec import (
        Allocator,
        BaseFormat,
        ContextMethod,
        LossForm,
        Precision,
        Recompute,
        Setting,
        Strategy,
    )
    from trimtab.strategies import STRATEGIES, make_mesh, strategy_by_degrees

    rules = STRATEGIES[_read_word(Strategy, strategy, "strategy")]
    degrees = {"pp": pp, "tp": tp, "cp": cp, "ep": ep}
    if max(degrees.values()) > 1 and not rules.needs_several_gpus:
        # The GPUs that are left share the weights of every part of a layer.
        rules = STRATEGIES[strategy_by_degrees(replicated=False, sharded=True)]
    if compile and rules.needs_several_gpus:
        _refuse_with_strategy("--compile", strategy, "compiled code is estimated on one device only")
    _refuse_eager_budget(way := _read_word(Recompute, recompute, "recompute"), compiled=compile)
    if sync_batchnorm and rules.why_not_synchronised:
        _refuse_with_strategy("--sync-batchnorm", strategy, rules.why_not_synchronised)
    _refuse_below_one(micro_batch=micro_batch, expert_imbalance=expert_imbalance, **degrees)
    rules, mesh = make_mesh(rules, gpus, nodes=nodes, branches=branches, **degrees)
    whole = micro_batch * mesh.data_parallel
    if rules.uses_global_batch(mesh):
        whole = max(global_batch or 0, whole)
    setting = Setting(
        strategy=rules.word,
        mesh=mesh,
        micro_batch=micro_batch,
        accumulation=-(-whole // (micro_batch * mesh.data_parallel)),
        global_batch=whole,
        precision=_read_word(Precision, precision, "precision"),
        base=_read_word(BaseFormat, base, "base"),
        loss=_read_word(LossForm, loss, "loss"),
        cp_method=_read_word(ContextMethod, cp_method, "cp-method"),
        expert_imbalance=expert_imbalance,
        recompute=way,
        offload=_read_offload(offload),
        compile=compile,
        **_read_optimizer(optimizer),
        optimizer_in_backward=optimizer_in_backward,
        allocator=_read_word(Allocator, allocator, "allocator"),
        sync_batchnorm=sync_batchnorm,
        **_read_schedule(schedule, virtual_stages),
    )
    setting = _add_micro_batches(setting, rules) if any_batch else setting
    _refuse_illegal(setting, rules)
    return setting


def _refuse_with_strategy(flag: str, strategy: str, found: str) -> NoReturn:
    """Raise: an option does not go with a strategy."""
    from trimtab.errors import WrongUse

    raise WrongUse(f"{flag} with --strategy {strategy}", found=found, cure="Leave one of the two out.")


def _refuse_below_one(**numbers: float) -> None:
    """Raise if one of the options is below 1."""
    from trimtab.errors import WrongUse

    for name, number in numbers.items():
        if number < 1:
            flag = f"--{name.replace('_', '-')}"
            raise WrongUse(f"{flag} {number:g}", found="it is below 1", cure="Give at least 1.")


def _read_schedule(schedule: str, virtual_stages: int | None) -> dict[str, Any]:
    """Return the fields of a Setting for a schedule; raise if they contradict each other."""
    from trimtab.errors import WrongUse
    from trimtab.planner.pins import read_schedule
    from trimtab.spec import Schedule

    word = _read_word(Schedule, schedule, "schedule")
    pins = {"virtual_stages": virtual_stages} if virtual_stages is not None else {}
    # Several virtual stages without a schedule are interleaved.
    fields = read_schedule(pins | ({"schedule": word} if word is not Schedule.ONE_F_ONE_B else {}))
    wrong = fields["schedule"].check_virtual_stages(fields["virtual_stages"]) if fields else []
    if wrong or (virtual_stages is not None and virtual_stages < 1):
        raise WrongUse(
            f"--schedule {schedule} --virtual-stages {virtual_stages}",
            found=wrong[0] if wrong else f"virtual_stages is {virtual_stages}",
            cure="Leave --virtual-stages out, or give 2 or more with interleaved-1f1b.",
        )
    return fields


def _add_micro_batches(setting: Setting, rules: ParallelStrategy) -> Setting:
    """Return the setting with as many micro-batches, or some more, as its schedule can have."""
    while rules.has_schedule and rules.explain_illegal(setting):
        rounds = setting.accumulation + 1
        whole = rounds * setting.micro_batch * setting.data_parallel
        setting = setting.replace(accumulation=rounds, global_batch=whole)
    return setting


def _refuse_illegal(setting: Setting, rules: ParallelStrategy) -> None:
    """Raise if the fields of a setting do not go together: offload, tensor parallelism, schedule."""
    from trimtab.engine.offload_rules import refuse_state_offload
    from trimtab.engine.tensor_rules import refuse_tensor_split
    from trimtab.errors import WrongUse

    # The tracer refuses these too, after it has loaded the job.
    refuse_state_offload(setting)
    refuse_tensor_split(setting)

    if found := rules.explain_illegal(setting):
        raise WrongUse(
            f"--schedule {setting.schedule} with --strategy {setting.strategy}",
            found=found,
            cure="Use --strategy pipeline with another --micro-batch, or leave --schedule out.",
        )


def _read_optimizer(text: str) -> dict[str, Any]:
    """Return the fields of a Setting for an optimizer; raise if it is unknown."""
    from trimtab.errors import WrongUse
    from trimtab.spec import OptimizerImplementation, OptimizerRule
    from trimtab.spec.setting import read_optimizer

    fields: dict[str, Any] = dict(read_optimizer(text))
    if not fields:
        known = ", ".join(word.value for word in (*OptimizerImplementation, *OptimizerRule))
        raise WrongUse(f"--optimizer {text}", found=f"it is none of {known}", cure="Use one of those.")
    return fields


def _refuse_eager_budget(recompute: Recompute, *, compiled: bool) -> None:
    """Raise if activations have a budget of the compiler, and nothing is compiled."""
    from trimtab.errors import WrongUse

    if recompute.way.budget is not None and not compiled:
        raise WrongUse(
            f"--recompute {recompute}",
            found="only torch.compile has a budget of activations, and --compile is not given",
            cure="Add --compile, or use --recompute selective, every-2 or full.",
        )


def _read_word(kind: Any, text: str, option: str) -> Any:
    """Return the member of an enum; raise if the word is unknown."""
    from trimtab.errors import WrongUse

    try:
        return kind(text)
    except ValueError:
        known = ", ".join(word.value for word in kind)
        raise WrongUse(
            f"--{option} {text}", found=f"it is none of {known}", cure="Use one of those."
        ) from None


def _read_offload(words: str) -> tuple[Offload, ...]:
    """Return what is in the memory of the host; raise if a word is unknown."""
    from trimtab.errors import WrongUse
    from trimtab.spec.setting import read_offload

    try:
        return read_offload(words)
    except ValueError as error:
        raise WrongUse(
            f"--offload {words}", found=str(error), cure="Use those, separated by commas."
        ) from None


def module_classes(
    job: Any, paths: Iterable[str], options: dict[str, Any] | None = None, *, cache: bool = True
) -> dict[str, str]:
    """Return the classes of the modules whose paths end in a number, which does not say what they are.

    Runs the job's model() in a child process, without memory; empty where no path is like that.
    """
    from trimtab.jobs.load import find_job_name
    from trimtab.training.job_queries import list_module_classes

    bare = {path for path in paths if path.rpartition(".")[2].isdecimal()}
    if not bare:
        return {}
    name, changed = find_job_name(job)
    known = list_module_classes(name, changed | (options or {}), cache=cache)
    return {path: known[path] for path in sorted(bare) if path in known}


def _spread_of(
    job: Any, strategy: str, options: dict[str, Any] | None = None, *, stages: int = 1
) -> dict[str, int]:
    """Return what a strategy has to know of a job; reading a job by name runs its file.

    Branch and hybrid ask how many branches it has; hybrid, whose branches may take different numbers of
    micro-batches, and pipeline, which idles for as long as one, ask for the global batch.
    """
    from trimtab.jobs.load import find_job_name
    from trimtab.strategies import STRATEGIES, strategy_by_degrees
    from trimtab.trace.job_summary import summarize_job

    if stages > 1:
        strategy = strategy_by_degrees(replicated=False, sharded=False, staged=True)
    # A word that is no strategy is refused where the setting is made.
    facts = STRATEGIES[strategy].job_facts if strategy in STRATEGIES else ()
    if not facts:
        return {}
    name, changed = find_job_name(job)
    found = summarize_job(name, changed | (options or {}))
    known = {"branches": len(found.branches), "global_batch": found.global_batch}
    return {name: known[name] for name in facts}


def exam(only: str = "*", *, cache: bool = True) -> ExamResult:
    """Compare every recorded measurement with today's predictions."""
    from trimtab.exams.run import run_exam

    return run_exam(only, cache=cache)


def profile(  # noqa: PLR0913 - a question and what to do with the answer
    job: Any,
    setting: Setting,
    device: Device,
    *,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    keep: Path | str | None = None,
) -> dict[str, Any]:
    """Run a setting for a few steps, and compare prediction with measurement.

    `keep` names a file of cases that the run is added to, for `trimtab exam --cases`.
    """
    from pathlib import Path

    from trimtab.exams.measure import compare_measurement, make_case, measure_in_child
    from trimtab.exams.run import append_case as add

    request = make_request(job, setting, device, options=options, clip=clip)
    found = measure_in_child(request)
    if keep is not None and not found.out_of_memory:
        add(make_case(request, found), Path(keep))
    predicted, _, _ = look_closely(job, setting, device, options=options, clip=clip)
    return compare_measurement(predicted, found).to_builtins()


def calibrate(*, budget_s: float | None = None, owner: str = "") -> tuple[Calibration, Path]:
    """Measure the GPU of this machine; return the calibration and the file that stores it.

    `owner` is written into the file, for those you share it with.
    """
    from trimtab.calibration.measure import BUDGET_S, calibrate_in_child
    from trimtab.catalog.torch_release import require_supported_torch
    from trimtab.predict.calibration import read_own_calibration, write_own_calibration

    require_supported_torch()
    device = gpu_here("calibrate")
    found = calibrate_in_child(device.kind, budget_s=budget_s or BUDGET_S).replace(owner=owner)
    earlier = read_own_calibration(device, imported=False)
    if earlier is not None:
        found = found.replace(collectives=earlier.collectives)
    return found, write_own_calibration(found)


CPU = "CPU"
"""Device of a calibration of links between CPU processes."""


def calibrate_links(*, procs: int | None = None) -> tuple[Calibration, Path | None]:
    """Measure collectives between processes; return them with the file that stores them.

    Uses the processes that torchrun or srun started, else starts one for each GPU of this machine, or `procs`
    processes on CPUs. Only the first process of a launcher stores the result; others return no file.
    """
    import os
    from datetime import UTC, datetime

    from trimtab.calibration import links
    from trimtab.catalog.torch_release import require_supported_torch
    from trimtab.predict.calibration import read_own_calibration, write_own_calibration
    from trimtab.spec import Calibration

    require_supported_torch()
    devices = detect().devices
    backend = "nccl" if devices else "gloo"
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    measured = (
        links.measure_links_here(backend)
        if launched
        else links.measure_local_links(count_link_ends(len(devices), procs), backend)
    )
    earlier = read_own_calibration(devices[0], imported=False) if devices else None
    found = (earlier or Calibration(device=devices[0].kind if devices else CPU)).replace(
        collectives=tuple(measured), taken_on=datetime.now(UTC).date().isoformat()
    )
    if launched and os.environ["RANK"] != "0":
        return found, None
    return found, write_own_calibration(found)


def count_link_ends(gpus: int, procs: int | None) -> int:
    """Return how many processes to start; raise where there is no link to measure."""
    from trimtab.errors import EnvironmentFault, WrongUse

    given = "calibrate --links" + (f" --procs {procs}" if procs is not None else "")
    if gpus == 1:
        raise EnvironmentFault(
            given,
            found="this machine has one GPU, so there is no link to measure",
            cure="Run it where there are several, or start it on every node with torchrun or srun.",
        )
    if not gpus and procs is None:
        raise EnvironmentFault(
            given,
            found="this machine has no GPU that can be used",
            cure="Run it on the machine with the GPUs; --procs 2 measures gloo between two CPU processes.",
        )
    if gpus and procs is not None and procs > gpus:
        raise WrongUse(given, found=f"there are {gpus} GPUs", cure=f"Name 2 to {gpus}, or leave it out.")
    return procs if procs is not None else gpus
