"""The verbs of trimtab as functions; `trimtab.detect()` and the command `trimtab detect` are one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trimtab.catalog.words import Word
    from trimtab.configs.applying import Proposal
    from trimtab.configs.files import Prepared, Written
    from trimtab.configs.knobs import Wired
    from trimtab.configs.showing import Display
    from trimtab.diagnosis.judge import Diagnosis
    from trimtab.errors import TrimtabError
    from trimtab.exams.sit import Marks
    from trimtab.pages.story import Story
    from trimtab.planner.foresight import Foresight, Memo
    from trimtab.predict.memory import Memory
    from trimtab.predict.timeline import Timeline
    from trimtab.predict.traces import Family
    from trimtab.spec import (
        Calibration,
        Cluster,
        Device,
        Estimate,
        JobView,
        Launch,
        Plan,
        Policy,
        Sample,
        Setting,
        Stage,
        StagedPlan,
        Trace,
        Workload,
    )
    from trimtab.trace.standing import Standing
    from trimtab.trace.worker import Request
    from trimtab.training.start import Fleet
    from trimtab.training.task import Ending, Task

VERBS = (
    "detect",
    "explain",
    "estimate",
    "exam",
    "profile",
    "calibrate",
    "plan",
    "apply",
    "show",
    "revert",
    "train",
    "launch",
    "jobs",
    "cancel",
    "doctor",
    "report",
    "watch",
)
"""What works today."""
FUNCTIONS = {"jobs": "list_jobs"}
"""Verbs whose function has another name, since a room of the package has theirs."""


def detect() -> Cluster:
    """The hardware that this process may use.

    >>> trimtab.detect().nodes[0].devices  # doctest: +SKIP
    (Device(index=0, name='NVIDIA H200', ...),)
    """
    from trimtab.probe.detect import detect as look

    return look()


def cluster(on: str | Path | None = None) -> Cluster:
    """The cluster that a string or a detect file describes, without the hardware; None is this machine.

    >>> len(cluster("4xA100-40GB").nodes[0].devices)
    4
    """
    from os import PathLike, fspath
    from pathlib import Path

    from trimtab.catalog.clusters import from_file, stated
    from trimtab.errors import WrongUse

    if on is None:
        return detect()
    if isinstance(on, PathLike):
        return from_file(Path(fspath(on)))
    if not isinstance(on, str):
        raise WrongUse(
            f"cluster({on!r})",
            found=f"it is of type {type(on).__name__}",
            cure="Give a string such as '4xA100-40GB', the path of a detect file, or None for this machine.",
        )
    return stated(on)


def explain(word: str) -> Word:
    """A knob, strategy or term in plain English, or a kind of what `trimtab doctor` finds.

    >>> explain("oom").name
    'out-of-memory'
    """
    from trimtab.catalog.words import word as look_up
    from trimtab.diagnosis.words import kind_words

    return look_up(word, VERBS, more=kind_words())


def all_words() -> dict[str, Word]:
    """Every entry that `explain` has, by name: our own words, and kinds of what `trimtab doctor` finds."""
    from trimtab.catalog.words import words
    from trimtab.diagnosis.words import kind_words

    ours = words(VERBS)
    return ours | {name: one for name, one in kind_words().items() if name not in ours}


def doctor(*logs: str | Path, say: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """What made a run fail, from its logs, folders and records; without any, what is wrong with this machine.

    >>> trimtab.doctor("slurm-4711.out").findings[0].kind  # doctest: +SKIP
    'out-of-memory'
    """
    if logs:
        from os import fspath

        from trimtab.diagnosis.diagnose import diagnose

        return diagnose([fspath(one) for one in logs], say)
    from trimtab.diagnosis.machine import examine

    return examine()


def load(name: str, **options: Any) -> Any:
    """The job of that name, built, with some of its attributes set.

    trimtab.load("train.py:MyJob")
    trimtab.load("slm", layers=24, vocab=50_304)
    trimtab.load("hf:./llama", lora=16)
    """
    from trimtab.jobs.load import load as find

    return find(name, options)


def estimate(  # noqa: PLR0913 - each is a field of Setting, under the name people type
    job: Any,
    on: str | Cluster | None = None,
    *,
    micro_batch: int = 1,
    precision: str = "bf16",
    recompute: str = "none",
    compile: bool = False,  # noqa: A002 - the contract's name
    strategy: str = "single",
    gpus: int | None = None,
    optimizer: str = "fused",
    allocator: str = "default",
    clip: float | None = None,
    options: dict[str, Any] | None = None,
    cache: bool = True,
) -> Estimate:
    """What one configuration would need, without running it and without a GPU.

    trimtab.estimate("job.py:MyJob", "H200", micro_batch=16).process_bytes
    trimtab.estimate("slm", "A100-40GB", micro_batch=20, options={"vocab": 50_304}).fits
    trimtab.estimate(MyJob, "8xH100", micro_batch=4, strategy="fsdp").fits
    """
    where = on if on is not None and not isinstance(on, str) else cluster(on) if on else detect()
    device = first_device(where)
    setting = make_setting(
        micro_batch=micro_batch,
        precision=precision,
        recompute=recompute,
        compile=compile,
        strategy=strategy,
        gpus=gpus if gpus is not None else len(where.devices),
        optimizer=optimizer,
        allocator=allocator,
        nodes=len(where.nodes),
        **spread_of(job, strategy, options),
    )
    return look_closely(job, setting, device, where=where, options=options, clip=clip, cache=cache)[0]


def look_closely(  # noqa: PLR0913 - a question and where it is asked
    job: Any,
    setting: Setting,
    device: Device,
    *,
    where: Cluster | None = None,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
) -> tuple[Estimate, Memory, Trace]:
    """The estimate of a setting with what it rests on."""
    from trimtab.errors import TrimtabError

    (found,) = look_at_all(job, [setting], device, where=where, options=options, clip=clip, cache=cache)
    if isinstance(found, TrimtabError):
        raise found
    return found


def refuse_emulated(setting: Setting, device: Device, *, cure: str) -> None:
    """Raise where a setting computes in bf16 and the device only pretends to."""
    from trimtab.errors import WrongUse
    from trimtab.spec import Precision

    if device.bf16 is False and setting.precision in (Precision.BF16, Precision.BF16_TRUE):
        raise WrongUse(
            f"{setting.precision} on {device.name}",
            found=f"{device.name} does not compute in bf16",
            cure=cure,
        )


def look_at_all(  # noqa: PLR0913 - as above
    job: Any,
    settings: Sequence[Setting],
    device: Device,
    *,
    where: Cluster | None = None,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
) -> list[tuple[Estimate, Memory, Trace] | TrimtabError]:
    """The estimates of several settings of a job, each with what it rests on, or why there is none.

    All that has to be traced is traced in one go.
    """
    from trimtab.errors import TrimtabError
    from trimtab.jobs.load import name_of
    from trimtab.pace.store import recall
    from trimtab.predict.estimate import estimate as judge
    from trimtab.predict.traces import traces

    for one in settings:
        refuse_emulated(one, device, cure="Use --precision fp16 or fp32, or look at another GPU.")

    name, changed = name_of(job)
    own = recall(device)
    found = traces(name, settings, device, overrides=changed | (options or {}), clip=clip, cache=cache)
    return [
        one
        if isinstance(one, TrimtabError)
        else _with_rounds(*judge(one, setting, device, cluster=where, calibration=own), one, setting)
        for one, setting in zip(found, settings, strict=True)
    ]


def _with_rounds(
    found: Estimate, details: Memory, trace: Trace, setting: Setting
) -> tuple[Estimate, Memory, Trace]:
    from trimtab.predict.accumulate import accumulated

    return accumulated(found, trace, setting), details, trace


def is_known(  # noqa: PLR0913 - as above
    job: Any,
    setting: Setting,
    device: Device,
    *,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
) -> bool:
    """Whether a setting can be estimated without tracing, because it or its like have been traced."""
    from trimtab.predict.traces import is_known as is_cached

    return cache and is_cached(make_request(job, setting, device, options=options, clip=clip))


def make_request(
    job: Any, setting: Setting, device: Device, *, options: dict[str, Any] | None, clip: float | None
) -> Request:
    """What another process needs to know to run a job."""
    from trimtab.jobs.load import name_of
    from trimtab.trace.worker import Request

    name, changed = name_of(job)
    return Request(job=name, overrides=changed | (options or {}), setting=setting, device=device, clip=clip)


def first_device(where: Cluster) -> Device:
    """The device that an estimate is for: the one with the least memory."""
    from trimtab.errors import WrongUse

    if not where.devices:
        raise WrongUse(
            "no --on", found="this machine has no GPU", cure="Name one, as in --on H200 or --on 4xA100-40GB."
        )
    return min(where.devices, key=lambda one: one.free_bytes or one.memory_bytes)


def gpu_here(verb: str = "profile") -> Device:
    """The first GPU of this machine."""
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
    nodes: int = 1,
    branches: int = 0,
    global_batch: int | None = None,
) -> Setting:
    """A Setting from words, with an error that lists the words there are.

    One micro-batch on every rank; but in a pipeline, and where branches have unlike numbers of ranks, as many
    as `global_batch` takes.
    """
    from trimtab.errors import WrongUse
    from trimtab.predict.meshes import spread
    from trimtab.spec import (
        Allocator,
        OptimizerImplementation,
        Precision,
        Recompute,
        Setting,
        Strategy,
    )

    def word(kind: Any, text: str, option: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            known = ", ".join(one.value for one in kind)
            raise WrongUse(
                f"--{option} {text}", found=f"it is none of {known}", cure="Use one of those."
            ) from None

    how = word(Strategy, strategy, "strategy")
    if compile and how is not Strategy.SINGLE:
        raise WrongUse(
            f"--compile with --strategy {strategy}",
            found="compiled code is estimated on one device only",
            cure="Leave one of the two out.",
        )
    if micro_batch < 1:
        raise WrongUse(f"--micro-batch {micro_batch}", found="it is below 1", cure="Give at least 1 sample.")
    mesh = spread(how, gpus, nodes=nodes, branches=branches)
    whole = micro_batch * mesh.data_parallel
    if mesh.copies or mesh.pp > 1:
        whole = max(global_batch or 0, whole)
    return Setting(
        strategy=how,
        mesh=mesh,
        micro_batch=micro_batch,
        accumulation=-(-whole // (micro_batch * mesh.data_parallel)),
        global_batch=whole,
        precision=word(Precision, precision, "precision"),
        recompute=word(Recompute, recompute, "recompute"),
        compile=compile,
        optimizer=word(OptimizerImplementation, optimizer, "optimizer"),
        allocator=word(Allocator, allocator, "allocator"),
    )


def spread_of(job: Any, strategy: str, options: dict[str, Any] | None = None) -> dict[str, int]:
    """What a strategy has to know of a job; reading a job by name runs its file.

    Branch and hybrid ask how many branches it has; hybrid, whose branches may take unlike numbers of
    micro-batches, and pipeline, which idles for as long as one, ask for the global batch.
    """
    from trimtab.jobs.load import name_of
    from trimtab.spec import Strategy
    from trimtab.trace.summary import summary

    if strategy not in (Strategy.BRANCH, Strategy.HYBRID, Strategy.PIPELINE):
        return {}
    name, changed = name_of(job)
    found = summary(name, changed | (options or {}))
    if strategy == Strategy.BRANCH:
        return {"branches": len(found.branches)}
    return {"branches": len(found.branches), "global_batch": found.global_batch}


def exam(only: str = "*", *, cache: bool = True) -> Marks:
    """Every recorded measurement against today's predictor."""
    from trimtab.exams.sit import sit

    return sit(only, cache=cache)


def profile(  # noqa: PLR0913 - a question and what to do with the answer
    job: Any,
    setting: Setting,
    device: Device,
    *,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Run a setting for real for a few steps, and set prediction against measurement.

    `keep` names a file of cases that the run is added to, for `trimtab exam --cases`.
    """
    from trimtab.exams.measure import case_of, measured
    from trimtab.exams.sit import keep as add

    request = make_request(job, setting, device, options=options, clip=clip)
    found = measured(request)
    if keep is not None and not found.out_of_memory:
        add(case_of(request, found), keep)
    predicted, _, _ = look_closely(job, setting, device, options=options, clip=clip)
    figures = ("allocated_bytes", "reserved_bytes", "process_bytes", "step_s")
    guess = {figure: getattr(predicted, figure) for figure in figures}
    truth = {figure: getattr(found, figure) for figure in figures}
    error = {
        figure: guess[figure] / truth[figure] - 1 if guess[figure] and truth[figure] else None
        for figure in figures
    }
    return {"predicted": guess, "measured": truth, "error": error, "run": found.to_builtins()}


def calibrate(*, budget_s: float | None = None) -> tuple[Calibration, Path]:
    """Measure the GPU of this machine and remember it; the calibration and the file it is kept in."""
    from trimtab.pace.measure import BUDGET_S, calibrated
    from trimtab.pace.store import remember

    device = gpu_here("calibrate")
    found = calibrated(device.model or device.name, budget_s=budget_s or BUDGET_S)
    return found, remember(found)


def plan(  # noqa: PLR0913 - each is an option of the command
    job: Any,
    on: str | Cluster | None = None,
    *,
    global_batch: int | None = None,
    samples: int | None = None,
    epochs: int | None = None,
    memory: float = 0.9,
    deadline: str | float | None = None,
    objective: str = "speed",
    compare: Iterable[int] = (),
    price: float | None = None,
    pins: Mapping[str, Any] | Iterable[str] = (),
    clip: float | None = None,
    options: dict[str, Any] | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The best configuration that fits, with reasons, without a GPU.

    trimtab.plan("job.py:MyJob", "4xA100-40GB").choice
    trimtab.plan(MyJob, "8xH100", deadline="12h", objective="gpus", compare=[1, 2, 4, 8]).recommendation
    """
    from trimtab.jobs.load import name_of
    from trimtab.planner.decide import Question, decide
    from trimtab.planner.foresight import plain_device
    from trimtab.planner.outlook import room_bytes
    from trimtab.planner.stale import fingerprints
    from trimtab.trace.standing import Standing
    from trimtab.trace.summary import is_known
    from trimtab.trace.tracer import keep
    from trimtab.trace.worker import Requests

    policy = make_policy(memory, deadline, objective, price, pins)
    where = on if on is not None and not isinstance(on, str) else cluster(on) if on else detect()
    name, changed = name_of(job)
    overrides = changed | (options or {})
    given = {"global_batch": global_batch, "samples": samples, "epochs": epochs}
    with Standing() as standing:
        if not (cache and is_known(name, overrides)):
            # It will be needed: let it load the job while this process asks what the job says of itself.
            device = plain_device(min(where.devices, key=room_bytes))
            standing.warm(Requests(job=name, overrides=overrides, settings=(), device=device))
        workload = workload_of(name, overrides, given, cache=cache, say=say)
        question = Question(job=name, workload=workload, cluster=where, policy=policy, compare=tuple(compare))
        outlook, save, known = foresight(name, overrides, standing, clip=clip, cache=cache, say=say)
        file = known.with_name(f"plan-{_digest(known.name, question)}.json")
        found = _same_plan(file) if cache else None
        if found is not None:
            return found
        try:
            found = decide(question, outlook)
        finally:
            save()
        prints = fingerprints(name, workload, found.places, versions())
        found = found.replace(fingerprints=prints, options=overrides)
        keep(file, found.to_json())
        return found


def _digest(*parts: Any) -> str:
    import hashlib

    import msgspec

    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]


def _same_plan(file: Path) -> Plan | None:
    """The plan that the same question got before."""
    from trimtab.errors import BrokenFile
    from trimtab.spec import Plan

    try:
        return Plan.from_json(file.read_bytes(), origin=str(file))
    except (OSError, BrokenFile):
        return None


def workload_of(
    job: str,
    overrides: dict[str, Any],
    given: Mapping[str, int | None],
    *,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Workload:
    """What a job says of itself, with what the caller says instead."""
    from trimtab.errors import WrongUse
    from trimtab.trace.summary import summary

    for key, value in given.items():
        if value is not None and value < 1:
            option = f"--{key.replace('_', '-')}"
            raise WrongUse(f"{option} {value}", found="it is below 1", cure=f"Give {option} at least 1.")
    say("reading the job")
    found = summary(job, overrides, cache=cache)
    return found.replace(**{key: value for key, value in given.items() if value is not None})


def make_policy(
    memory: float,
    deadline: str | float | None,
    objective: str,
    price: float | None,
    pins: Mapping[str, Any] | Iterable[str],
) -> Policy:
    """A Policy from what people type."""
    from collections.abc import Mapping as AnyMapping

    from trimtab.errors import WrongUse
    from trimtab.planner.pins import read, taken
    from trimtab.spec import Objective, Policy
    from trimtab.units import parse_duration

    if not 0 < memory <= 1:
        raise WrongUse(
            f"--memory {memory:g}", found="it is no share of the free memory", cure="Give one from 0.1 to 1."
        )
    if objective not in set(Objective):
        known = ", ".join(one.value for one in Objective)
        raise WrongUse(f"--objective {objective}", found=f"it is none of {known}", cure="Use one of those.")
    if price is not None and price < 0:
        raise WrongUse(f"--price {price:g}", found="it is below 0", cure="Give a price per GPU and hour.")
    return Policy(
        objective=Objective(objective),
        memory_share=memory,
        deadline_s=parse_duration(deadline) if isinstance(deadline, str) else deadline,
        price_per_gpu_hour=price,
        pins=taken(pins) if isinstance(pins, AnyMapping) else read(pins),
    )


def foresight(  # noqa: PLR0913 - what a job is traced with
    job: str,
    overrides: dict[str, Any],
    standing: Standing,
    *,
    clip: float | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Foresight, Callable[[], None], Path]:
    """What the planner asks, how to keep what it learnt, and where that is kept."""
    from trimtab.pace.store import recall
    from trimtab.planner.foresight import Foresight
    from trimtab.predict.traces import traces
    from trimtab.trace.summary import Named, fingerprint
    from trimtab.trace.tracer import cache_folder, keep

    families: dict[str, Family] = {}

    def trace_all(
        settings: Sequence[Setting], device: Device, changes: dict[str, Any]
    ) -> list[Trace | TrimtabError]:
        return traces(
            job,
            settings,
            device,
            overrides={**overrides, **changes},
            clip=clip,
            cache=cache,
            families=families,
            standing=standing,
        )

    named = Named(job=job, overrides={**overrides, "clip": clip})
    file = cache_folder() / f"outlook-{fingerprint(named)}-{_predictor()}.json"
    found = Foresight(trace_all=trace_all, recall=recall, say=say, memo=_memo(file) if cache else _memo(None))

    def save() -> None:
        if cache and found.memo.changed:
            import msgspec

            keep(file, msgspec.json.encode(found.memo).decode())

    return found, save, file


def _memo(file: Path | None) -> Memo:
    import msgspec

    from trimtab.planner.foresight import Memo

    if file is None or not file.is_file():
        return Memo()
    try:
        return msgspec.convert(msgspec.json.decode(file.read_bytes()), Memo)
    except (msgspec.MsgspecError, OSError):
        return Memo()


def _predictor() -> str:
    """Changes with the source that turns traces into estimates."""
    import hashlib
    from pathlib import Path

    own = Path(__file__).parent
    files = sorted([*own.glob("predict/*"), *own.glob("planner/*.py"), *own.glob("catalog/*.toml")])
    return hashlib.sha256(b"".join(one.read_bytes() for one in files if one.is_file())).hexdigest()[:12]


def versions() -> dict[str, str]:
    """The versions that a plan depends on."""
    from importlib.metadata import PackageNotFoundError, version

    from trimtab import __version__

    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    return {"trimtab": __version__, "torch": torch}


def read_plan(file: Path, *, job: Any = None, on: str | Cluster | None = None) -> Plan:
    """A plan from its file; refused where the job, the versions or the cluster are not what it assumed.

    Without `job` the job that the plan names is looked at; without `on` the cluster is left out, so that a
    plan can be read anywhere.
    """
    from trimtab.planner.stale import read

    return _still_true(read(file), str(file), job=job, on=on)


def _still_true(found: Plan, origin: str, *, job: Any = None, on: str | Cluster | None = None) -> Plan:
    """The plan, refused where something is not what it assumed."""
    from trimtab.jobs.load import name_of
    from trimtab.planner.stale import changes, fingerprints, refuse

    name, overrides = name_of(found.job if job is None else job)
    workload = workload_of(name, overrides or found.options, {})
    if found.workload is not None:
        # What the command line said instead of the job holds for the plan, not for the job.
        workload = workload.replace(global_batch=found.workload.global_batch)
    where = None if on is None else cluster(on) if isinstance(on, str) else on
    now = fingerprints(name, workload, found.places, versions())
    refuse(found, origin, changes(found, now, where))
    return found


def propose(  # noqa: PLR0913 - each is an option of the command
    plan: Plan,
    to: Sequence[str],
    *,
    target: str | None = None,
    on: str | Cluster | None = None,
    beside: bool = False,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Proposal:
    """What `apply` would change, before it changes anything."""
    from trimtab.configs.applying import aim, proposed
    from trimtab.configs.documents import read
    from trimtab.configs.mapping import known

    aims = [aim(str(one)) for one in to]

    def replan(options: dict[str, Any]) -> Plan:
        return _same_but(plan, options, on, cache=cache, say=say)

    among = known(one.file for one in aims)
    return proposed(aims, plan, among, opened=read, name=target, beside=beside, replan=replan)


def _same_but(
    found: Plan, options: dict[str, Any], on: str | Cluster | None, *, cache: bool, say: Callable[[str], None]
) -> Plan:
    """The best plan for the job with some options changed, all but the cut of the batch as it was."""
    from trimtab.configs.stages import pins_of

    return plan(
        found.job,
        on if on is not None else devices_of(found),
        global_batch=found.choice.global_batch,
        memory=found.policy.memory_share,
        pins=pins_of(found.choice),
        options={**found.options, **options},
        cache=cache,
        say=say,
    )


def devices_of(found: Plan) -> Cluster:
    """The devices that a plan is for, from its own words."""
    from trimtab.planner.stale import used

    nodes = len({one.node for one in found.places})
    if not nodes:
        return detect()
    each = "+".join(used(found.places).removeprefix(f"{nodes} nodes of ").split(" + "))
    return cluster(f"{nodes}x{each}" if nodes > 1 else each)


def apply(  # noqa: PLR0913 - each is an option of the command
    plan: Plan | Path | str,
    to: str | Path | Sequence[str | Path],
    *,
    target: str | None = None,
    on: str | Cluster | None = None,
    beside: bool = False,
    dry: bool = False,
    cache: bool = True,
) -> dict[str, Any]:
    """Write a plan into config files: all of them, or none where one of them fails.

    trimtab.apply(trimtab.plan("slm", "2xA30"), "config.py:slm_config")["edits"]
    trimtab.apply("plan.json", ["conf/config.yaml", "train.sbatch"], dry=True)["diff"]
    """
    from os import PathLike

    found = plan_from(plan)[0] if isinstance(plan, str | PathLike) else plan
    places = [to] if isinstance(to, str | PathLike) else list(to)
    proposal = propose(found, [str(one) for one in places], target=target, on=on, beside=beside, cache=cache)
    ready = proposal.prepared(beside=beside)
    return applied(proposal, ready, None if dry else write_plan(ready, found))


def write_plan(ready: Sequence[Prepared], plan: Plan) -> Written:
    """Write files that are ready, with backups that say what for."""
    from trimtab.configs.files import write
    from trimtab.render import setting_words

    return write(ready, words=f"{plan.job}: {setting_words(plan.choice)}", fingerprint=plan.fingerprint())


def applied(proposal: Proposal, ready: Sequence[Prepared], written: Written | None) -> dict[str, Any]:
    """What `apply` answers: the edits and the diff, and where the backup is once they are written."""
    backups = list(written.backups) if written else []
    return {
        "edits": [
            {"file": one.file, "key": one.key, "before": one.before, "after": one.after, "line": one.line}
            for one in proposal.edits
        ],
        "backup": backups[0] if backups else None,
        "backups": backups,
        "written": list(written.files) if written else [],
        "files": proposal.files,
        "diff": "".join(one.diff() for one in ready),
        "stages": [one.to_builtins() for one in proposal.stages],
        "said": [*proposal.said, *(written.said if written and written.files else ())],
    }


def revert(file: str | Path, *, backup: int | None = None, force: bool = False) -> dict[str, Any]:
    """Put back a config that `apply` wrote; what is there now becomes a backup too."""
    from trimtab.configs.files import revert as put_back

    done = put_back(str(file), number=backup, force=force)
    return {
        "restored": done.file if done.backup else None,
        "file": done.file,
        "number": done.number,
        "backup": done.backup,
        "diff": done.diff,
    }


def plan_from(file: Path | str) -> tuple[Plan, str]:
    """A plan from its file, refused where it is stale; and a word where nobody could tell."""
    from pathlib import Path

    from trimtab.planner.stale import read

    path = Path(file)
    found = read(path)
    source = found.job.rpartition(":")[0]
    if source.endswith(".py") and not Path(source).is_file():
        return found, f"{source} is not here: whether the plan still holds for it was not checked."
    return _still_true(found, str(path)), ""


def show(  # noqa: PLR0913 - each is an option of the command
    file: str | Path,
    on: str | Cluster | None = None,
    *,
    job: Any = None,
    target: str | None = None,
    options: dict[str, Any] | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Display:
    """What a config would use, stage by stage, and what would be better.

    trimtab.show("conf", "RTX 6000").stages[0].advice
    """
    from trimtab.configs.applying import aim, laid_out
    from trimtab.configs.documents import read
    from trimtab.configs.mapping import known
    from trimtab.configs.showing import display, job_of
    from trimtab.configs.targets import named

    one = aim(str(file))
    among = known([one.file])
    layout = laid_out(one, among, opened=read, name=target)
    meant = layout.main.site.target if layout.main else None
    if meant is None:
        meant = (
            named(target, among) if target else next(known for known in among if known.stage is layout.stage)
        )
    asked = job if job is not None else job_of(meant, layout.main)
    where = on if on is not None and not isinstance(on, str) else cluster(on) if on else detect()
    if not where.devices:
        return display(layout, meant, job=asked, gpus=None, device=None, seer=None, no_device=True)
    seer = _Seer(asked, where, options or {}, cache=cache, say=say) if asked is not None else None
    return display(
        layout,
        meant,
        job=asked if isinstance(asked, str) or asked is None else _name(asked),
        gpus=len(where.devices),
        device=first_device(where).name,
        seer=seer,
    )


def _name(job: Any) -> str:
    from trimtab.jobs.load import name_of

    return name_of(job)[0]


class _Seer:
    """Answers what `show` asks about a job on some devices."""

    def __init__(
        self, job: Any, where: Cluster, options: dict[str, Any], *, cache: bool, say: Callable[[str], None]
    ) -> None:
        self.job, self.where, self.options, self.cache, self.say = job, where, options, cache, say

    def estimate(self, options: dict[str, Any], setting: Setting) -> Estimate:
        """What a setting needs, and how fast it is."""
        from trimtab.errors import WrongUse

        if setting.compile and setting.gpus > 1:
            raise WrongUse(
                "compiled code on several GPUs",
                found="compiled code is estimated on one device only",
                cure="Look at --on one of them.",
            )
        device = first_device(self.where)
        refuse_emulated(setting, device, cure="Write fp16 or fp32 into the config, or look at another GPU.")
        self.say("estimating")
        both = {**options, **self.options}
        return look_closely(self.job, setting, device, where=self.where, options=both, cache=self.cache)[0]

    def better(self, options: dict[str, Any], setting: Setting) -> Plan:
        """The fastest way to run the same global batch on as many GPUs in the same precision.

        Without recomputing where the config has none and something fits so: that takes few traces.
        """
        from trimtab.errors import NothingFits
        from trimtab.spec import Recompute

        pins: dict[str, Any] = {
            "gpus": setting.gpus,
            "precision": setting.precision,
            "compile": setting.compile,
        }
        if setting.gpus > 1:
            pins["strategy"] = setting.strategy
        if setting.recompute is Recompute.NONE:
            try:
                return self._planned(options, setting, {**pins, "recompute": setting.recompute})
            except NothingFits:
                pass
        return self._planned(options, setting, pins)

    def _planned(self, options: dict[str, Any], setting: Setting, pins: dict[str, Any]) -> Plan:
        return plan(
            self.job,
            self.where,
            global_batch=setting.global_batch,
            pins=pins,
            options={**options, **self.options},
            cache=self.cache,
            say=self.say,
        )


def turn_knobs(  # noqa: PLR0913 - what knobs may meet
    job: Any,
    given: dict[str, Any] | Sequence[str] = (),
    *,
    config: str | Path | None = None,
    where: Cluster | None = None,
    ranks: int | None = None,
    options: Mapping[str, Any] | None = None,
    pins: Sequence[str] = (),
) -> Wired:
    """What knobs such as batch_size set here, with those of a config file; `given` counts before the file.

    `ranks` is how many processes will train, where that is settled; else as many as there are GPUs. What is
    also in `options` or `pins` is refused, so that nothing is said twice.
    """
    from trimtab.configs import knobs
    from trimtab.configs.applying import aim
    from trimtab.configs.documents import read
    from trimtab.errors import WrongUse
    from trimtab.jobs.load import load as find
    from trimtab.jobs.load import name_of
    from trimtab.planner.pins import read as read_pins

    asked: dict[str, Any] = {}
    if config is not None:
        place = aim(str(config))
        asked |= knobs.read(read(place.file), str(config), place.below)
    asked |= given if isinstance(given, dict) else knobs.split(tuple(given))
    if not asked:
        return knobs.Wired()
    fixed, chosen = read_pins(pins), dict(options or {})
    devices = () if where is None else where.devices
    found = knobs.wire(
        asked,
        ranks=int(fixed.get("gpus") or ranks or len(devices) or 1),
        bf16=all(one.bf16 is not False for one in devices),
        joint="global_batch" not in chosen,
    )
    for key in (*found.options, *found.pins):
        if key in (chosen if key in found.options else fixed):
            flag = "--set" if key in found.options else "--pin"
            raise WrongUse(
                f"knob {found.by[key]}", found=f"{flag} {key} is given too", cure="Leave one of them out."
            )
    name, changed = name_of(job)
    subject = find(name, changed | chosen)
    kept = {}
    for key, value in found.options.items():
        if hasattr(subject, key):
            kept[key] = value
        elif key not in found.spare:
            raise WrongUse(
                f"knob {found.by[key]}",
                found=f"it sets the option {key!r}, which the job {name} does not have",
                cure="Leave it out, or give the job such an attribute.",
            )
    return found.replace(options=kept)


def train(job: Any, plan: Plan | Path | str | None = None, **asked: Any) -> Ending:
    """Train a job, elastically: by a plan, or by one that is made here for this machine.

    trimtab.train("slm:tiny", steps=20, out="runs/first")
    trimtab.train(MyJob, "plan.json", out="runs/big")
    trimtab.train("bridge:tiny", procs=2, pins={"strategy": "branch"}, steps=20)

    `asked` is what `prepare_training` takes. What is found in `out` is resumed, on any number of processes.
    Started by torchrun or srun, it is one rank; otherwise it starts the ranks that the plan asks for.
    """
    return run_training(*prepare_training(job, plan, **asked))


def prepare_training(  # noqa: PLR0913 - each is an option of the command
    job: Any,
    plan: Plan | Path | str | None = None,
    *,
    steps: int | None = None,
    procs: int | None = None,
    nodes: str = "1",
    rendezvous: str | None = None,
    restarts: int | None = None,
    pins: Mapping[str, Any] | Iterable[str] = (),
    out: Path | str | None = None,
    seed: int = 0,
    checkpoint_steps: int | None = None,
    checkpoint_s: float | None = None,
    keep: int | None = None,
    evaluate_steps: int | None = None,
    every: int | None = None,
    faults: Path | None = None,
    timeout_min: float = 10.0,
    options: dict[str, Any] | None = None,
    json: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Task, Fleet | None]:
    """What is to be trained, checked and planned, and the processes that have to be started for it.

    `steps` optimizer steps in all; `procs` processes here; `pins` fix choices of the plan; `checkpoint_steps`
    or `checkpoint_s` lie between checkpoints, of which `keep` stay; `evaluate_steps` between evaluations; a
    line is printed `every` so many steps; `faults` is the file of a drill.
    """
    import os

    from trimtab.errors import WrongUse
    from trimtab.jobs.load import load as find
    from trimtab.jobs.load import name_of
    from trimtab.training import start, task
    from trimtab.training.faults import read as read_faults
    from trimtab.training.world import ALONE, SRUN, World
    from trimtab.training.world import read as read_world
    from trimtab.units import parse_whole

    name, changed = name_of(job)
    overrides = changed | (options or {})
    here = detect()
    world = read_world(os.environ, len(here.devices))
    places, meeting = start.read_nodes(nodes, rendezvous)
    if world.launcher == SRUN and meeting:
        # srun has started one of us a node, and torchrun will start the ranks of it.
        world = World()
    if world.launcher != ALONE and procs is not None:
        raise WrongUse(
            f"--procs {procs}",
            found=f"this process is rank {world.rank} of {world.size} already (started {world.launcher})",
            cure="Leave --procs out, or start `trimtab train` without the launcher.",
        )
    schedule = read_faults(faults) if faults is not None else ()
    task.check(
        procs=procs,
        steps=steps,
        checkpoint_every=checkpoint_steps,
        keep=keep,
        evaluate_every=evaluate_steps,
        every=every,
        seed=seed,
        timeout_min=timeout_min,
    )
    loaded = find(name, overrides)
    task.check_trainable(loaded, name)
    chosen = None
    if world.is_main:
        # One rank plans; the others learn it from that one.
        most_nodes = start.node_range(places)[1]
        ranks = world.size if world.launcher != ALONE else procs and procs * most_nodes
        told = parse_whole(os.environ.get("LOCAL_WORLD_SIZE", ""))
        together = told or min(world.size, len(here.devices) or world.size)
        per_node = together if world.launcher != ALONE else procs if meeting else None
        question = (name, loaded, overrides, here)
        chosen = plan_to_train(question, plan, ranks, pins, per_node=per_node, say=say)
    asked = task.Task(
        job=name,
        options=overrides,
        plan=chosen,
        out=str(task.place(out, name)),
        steps=steps,
        seed=seed,
        checkpoint_steps=checkpoint_steps,
        checkpoint_s=task.CHECKPOINT_S if checkpoint_s is None else checkpoint_s,
        keep=task.KEPT if keep is None else keep,
        evaluate_steps=evaluate_steps,
        every=every,
        json=json,
        faults_due=tuple(schedule),
        timeout_min=timeout_min,
    )
    count = procs or (1 if chosen is None else -(-chosen.choice.gpus // start.node_range(places)[1]))
    if world.launcher != ALONE or (count == 1 and not meeting):
        return asked, None
    many = start.RESTARTS if restarts is None else restarts
    return asked, start.Fleet(procs=count, nodes=places, rendezvous=meeting, restarts=many)


def run_training(task: Task, fleet: Fleet | None) -> Ending:
    """Train, in this process or in those that it starts."""
    from trimtab.errors import EnvironmentFault
    from trimtab.training import start, worker

    if fleet is not None:
        return start.launch(task, fleet)
    try:
        return worker.run(task)
    except Exception as error:
        if not worker.is_lost(error):
            raise
        raise EnvironmentFault(
            "trimtab train",
            found=f"another rank is gone: {str(error).splitlines()[0][:200]}",
            cure="Look at what that rank said; the same command resumes from the last checkpoint.",
        ) from error


def plan_to_train(  # noqa: PLR0913 - what a plan is made of
    question: tuple[str, Any, dict[str, Any], Cluster],
    given: Plan | Path | str | None,
    ranks: int | None,
    pins: Mapping[str, Any] | Iterable[str],
    *,
    per_node: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The plan that a run follows: the one given, one made for these GPUs, or a plain one for the CPU.

    The question is the job's name, the job, what was changed on it, and this machine. `ranks` is how many
    processes there will be, where that is settled, and `per_node` how many of them a launcher has started
    on this node.
    """
    from pathlib import Path

    from trimtab.errors import WrongUse
    from trimtab.planner.stale import read
    from trimtab.spec import Plan
    from trimtab.trace.summary import described
    from trimtab.training.resize import cpu_plan, several_nodes

    name, job, overrides, here = question
    policy = make_policy(0.9, None, "speed", None, pins)
    if given is not None:
        if policy.pins:
            raise WrongUse(
                "--plan with --pin",
                found="the plan has made its choices",
                cure="Pin them where it is made: trimtab plan JOB --pin KEY=VALUE --out FILE.",
            )
        found = given if isinstance(given, Plan) else read(Path(given))
        if not isinstance(given, Plan):
            # Of other nodes no more is known than that they are like this one.
            planned_nodes = len({one.node for one in found.places}) if per_node is not None else 1
            found = _still_true(found, str(given), job=name, on=several_nodes(here, planned_nodes))
        if ranks is not None and per_node is None and ranks != found.choice.gpus:
            raise WrongUse(
                f"--procs {ranks} with a plan for {found.choice.gpus} processes",
                found="they are not as many",
                cure=f"Leave --procs out, or plan again with --pin gpus={ranks}.",
            )
        return found
    if not here.devices:
        return cpu_plan(name, described(job, name), ranks or 1, policy.pins, overrides)
    nodes = 1 if per_node is None or ranks is None else max(1, ranks // per_node)
    if ranks is not None and ranks > nodes * len(here.devices):
        raise WrongUse(
            f"--procs {ranks}",
            found=f"this machine has {len(here.devices)} GPU{'s' * (len(here.devices) > 1)}",
            cure=f"Use --procs {len(here.devices)} or fewer: one process trains on one GPU.",
        )
    fixed = policy.pins | ({"gpus": ranks} if ranks is not None else {})
    return plan(name, several_nodes(here, nodes), pins=fixed, options=overrides, say=say)


def report(
    place: Path | str,
    out: Path | str,
    *,
    figures: Path | str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write one self-contained page about a plan's file, a run's folder or a profile; `figures` is a folder.

    trimtab.report("plan.json", "plan.html")["file"]
    trimtab.report("runs/slm", "slm.html", figures="figures")["missing"]
    """
    from pathlib import Path

    from trimtab.pages.writing import write

    folder = None if figures is None else Path(figures)
    return write(Path(place), Path(out), figures=folder, complete=_with_timeline, say=say)


def _with_timeline(story: Story) -> Story:
    """The story with the memory of a step, where a trace of the plan's setting is at hand."""
    from dataclasses import replace

    found = story.plan
    if found is None or not found.estimate.process_bytes:
        return story
    line, words = step_of(found)
    if line is None:
        return replace(story, missing=(*story.missing, f"memory through a step: {words}"))
    return replace(story, timeline=line, timeline_of=words)


def step_of(found: Plan) -> tuple[Timeline | None, str]:
    """What a step of a plan holds at every moment, from traces that are kept; and a word on them, or why not.

    Nothing is traced for it, and no code of the job's is run.
    """
    from trimtab.errors import TrimtabError
    from trimtab.planner.foresight import plain_device, traced_as
    from trimtab.predict.derive import derived, simpler
    from trimtab.predict.timeline import timeline
    from trimtab.predict.traces import kept

    again = f"`trimtab plan {found.job}` for the same devices traces it again"
    asked = traced_as(found.choice)
    try:
        device = plain_device(devices_of(found).devices[0])
        parts = [
            kept(make_request(found.job, one, device, options=found.options, clip=None))
            for one in simpler(asked)
        ]
    except TrimtabError as error:
        return None, f"its devices are not known here ({error.found})"
    held = [one for one in parts if one is not None]
    trace = derived(asked, held) if held and len(held) == len(parts) else None
    line = None if trace is None else timeline(trace)
    if line is None:
        return None, f"no trace of the setting is kept on this machine; {again}"
    words = [f"One micro-batch of {found.choice.micro_batch}"]
    words += ["without compiling, which may need less"] if found.choice.compile else []
    words += [f"of {found.choice.accumulation} a step"] if found.choice.accumulation > 1 else []
    return line, f"{', '.join(words)}."


def stages_of(
    job: Any, files: str | Path | None = None, options: dict[str, Any] | None = None
) -> tuple[str, dict[str, Any], tuple[Stage, ...]]:
    """The name of a job, what was changed on it, and its stages: its own, or those of a folder."""
    from trimtab.errors import WrongUse
    from trimtab.jobs.load import load as find
    from trimtab.jobs.load import name_of

    name, changed = name_of(job)
    overrides = changed | (options or {})
    # Only to find the stages: what they set is all that counts from then on, wherever the files are.
    loaded = find(name, overrides | ({} if files is None else {"stage_files": str(files)}))
    own = getattr(loaded, "stages", None)
    if not callable(own):
        raise WrongUse(
            f"--stages for job {name}",
            found="it has no stages()",
            cure="Leave --stages out, or give the job stages(): a list of trimtab.Stage.",
        )
    return name, overrides, tuple(own())


def plan_stages(
    job: Any,
    on: str | Cluster | None = None,
    *,
    files: str | Path | None = None,
    options: dict[str, Any] | None = None,
    **asked: Any,
) -> StagedPlan:
    """A plan for every stage of a job: each with the fastest cut of one global batch.

    trimtab.plan_stages("naics", "H200").stages[0].plan.choice.micro_batch

    `files` is a folder of stages, `asked` what `plan` takes. What a stage changes without a step feeling it
    (rates, which samples) costs no tracing.
    """
    from trimtab.jobs.load import load as find
    from trimtab.spec import PlannedStage, StagedPlan
    from trimtab.trace.summary import described

    name, overrides, stages = stages_of(job, files, options)
    say = asked.get("say") or (lambda _: None)
    where = on if on is not None and not isinstance(on, str) else cluster(on)
    found = []
    for stage in stages:
        say(f"stage {stage.name}")
        whole = overrides | stage.options
        loaded = find(name, whole)
        unfelt = getattr(loaded, "unfelt", ())
        horizon = described(loaded, name)
        felt = {key: value for key, value in whole.items() if key not in unfelt}
        given = {
            "global_batch": asked.get("global_batch") or horizon.global_batch,
            "samples": asked.get("samples") or horizon.samples,
            "epochs": asked.get("epochs") or stage.epochs or horizon.epochs,
        }
        one = plan(name, where, options=felt, **{**asked, **given})
        found.append(PlannedStage(stage=stage, plan=one.replace(options=whole)))
    return StagedPlan(job=name, stages=tuple(found))


def train_stages(  # noqa: PLR0913 - a training, and how it is cut
    job: Any,
    plan: StagedPlan | Path | str | None = None,
    *,
    files: str | Path | None = None,
    options: dict[str, Any] | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    seed: int = 0,
    pins: Mapping[str, Any] | Iterable[str] = (),
    say: Callable[[str], None] = lambda _: None,
    **asked: Any,
) -> Ending:
    """Train the stages of a job one after the other, each with the weights of the one before.

    trimtab.train_stages("naics:tiny", out="runs/curriculum", steps=20)

    Each has a folder in `out` and takes `steps` steps, or its epochs; the same call resumes wherever the last
    one ended. `asked` is what `prepare_training` takes.
    """
    import os
    from pathlib import Path

    from trimtab.errors import WrongUse
    from trimtab.training import chain, task
    from trimtab.training.world import ALONE
    from trimtab.training.world import read as read_world

    name, overrides, stages = stages_of(job, files, options)
    here = detect()
    launcher = read_world(os.environ, len(here.devices)).launcher
    if launcher != ALONE:
        raise WrongUse(
            "--stages in a process that was started by a launcher",
            found=f"each stage starts its own, and this one is a rank already (started {launcher})",
            cure="Start `trimtab train JOB --stages ...` by itself, with --procs for several processes.",
        )
    if isinstance(plan, str | Path):
        plan = _staged(Path(plan))
    if plan is None and here.devices:
        procs = asked.get("procs")
        fixed = make_policy(0.9, None, "speed", None, pins).pins | ({} if procs is None else {"gpus": procs})
        plan, pins = plan_stages(job, here, files=files, options=options, pins=fixed, say=say), ()
    planned = _plans_of(plan, stages)

    def train_one(stage: Stage, place: Path, before: Path | None) -> Ending:
        whole = overrides | stage.options
        told = {"options": whole, "out": place, "steps": steps, "seed": seed, "pins": pins, "say": say}
        ready, fleet = prepare_training(name, planned.get(stage.name), **{**asked, **told})
        return run_training(ready.replace(begin_from="" if before is None else str(before)), fleet)

    identity = chain.Chain(job=name, options=overrides, stages=stages, steps=steps, seed=seed)
    return chain.run(identity, task.place(out, name), train_one, _told)


def _told(text: str) -> None:
    import sys

    sys.stderr.write(f"trimtab: {text}\n")


def _staged(file: Path) -> StagedPlan:
    """The plans of all stages, from the file of `trimtab plan --stages --out`."""
    from trimtab.errors import WrongUse
    from trimtab.spec import StagedPlan

    try:
        return StagedPlan.from_json(file.read_bytes(), origin=str(file))
    except OSError as error:
        raise WrongUse(
            f"--plan {file}",
            found=f"it cannot be read ({error.strerror})",
            cure="Name a file that `trimtab plan JOB --stages ... --out FILE` wrote.",
        ) from error


def _plans_of(plan: StagedPlan | None, stages: Sequence[Stage]) -> dict[str, Plan]:
    """The plan of each stage by its name; refused where they are not the stages that were planned."""
    from trimtab.errors import WrongUse

    if plan is None:
        return {}
    if tuple(one.stage for one in plan.stages) != tuple(stages):
        raise WrongUse(
            "--plan with --stages",
            found="the plan is for other stages: " + ", ".join(one.stage.name for one in plan.stages),
            cure="Plan again: trimtab plan JOB --stages ... --out FILE.",
        )
    return {one.stage.name: one.plan for one in plan.stages}


def launch(plan_or_job: Any, **asked: Any) -> Launch | tuple[Launch, ...]:
    """What would be run for a plan: a command, a batch script, a manifest; with `yes` it is run.

    trimtab.launch("plan.json").command
    trimtab.launch("plan.json", kind="slurm", partition="gpu", yes=True).job_id
    trimtab.launch("slm", on="4xH100", kind="slurm", compare=[1, 2, 4])[0].script

    `asked` is what `prepare_launch` takes. With `compare` there is one for each number of GPUs.
    """
    yes = asked.pop("yes", False)
    found = prepare_launch(plan_or_job, **asked)
    if yes:
        found = tuple(start_launch(one) for one in found)
    return found if asked.get("compare") else found[0]


def start_launch(one: Launch) -> Launch:
    """Submit a launch, or run it here to its end."""
    import os

    from trimtab.launching import doing

    doing.check_runs(one)
    return doing.submit(one) if one.script is not None else doing.run(one, os.environ)


def prepare_launch(  # noqa: PLR0913 - each is an option of the command
    plan_or_job: Any,
    *,
    kind: str = "torchrun",
    on: str | Cluster | None = None,
    nodes: str | None = None,
    procs: int | None = None,
    rendezvous: str | None = None,
    restarts: int | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    activate: str | None = None,
    image: str | None = None,
    script: str | None = None,
    compare: Iterable[int] = (),
    pins: Mapping[str, Any] | Iterable[str] = (),
    extra: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Launch, ...]:
    """What would be run, as text; nothing is written or started.

    `procs` are processes on each node, for a job on CPUs; `nodes` 2, or 1:2 for a run that goes on with what
    is left; `extra` are further words for `trimtab train`, or for `script` where accelerate or deepspeed run
    one; the rest is as in trimtab.toml, and wins over it.
    """
    import os
    import sys
    from pathlib import Path

    from trimtab.launching import doing, habits, orders
    from trimtab.spec import LaunchKind

    wanted = LaunchKind(kind)
    named = {"partition": partition, "account": account, "qos": qos, "activate": activate}
    others = {"time": time, "rendezvous": rendezvous, "image": image, "script": script}
    orders.refuse_unheard(wanted, named | others)
    told = habits.read(Path.cwd())
    given = {name: value for name, value in (named | {"image": image}).items() if value is not None}
    told = told.replace(**given)
    order = orders.Order(
        kind=wanted,
        nodes=nodes,
        rendezvous=rendezvous,
        restarts=restarts,
        out=None if out is None else str(out),
        steps=steps,
        time=time,
        script=script,
        extra=tuple(extra),
        folder=str(Path.cwd()),
        python=sys.executable,
        compares=bool(tuple(compare)),
    )
    site, silence = doing.slurm_site() if wanted is LaunchKind.SLURM else (None, "")
    question = (options or {}, pins, tuple(compare), cache, say)
    plans = plans_to_launch(plan_or_job, on, procs, start_nodes(nodes), question)
    cores = detect().cpu_cores if wanted is LaunchKind.TORCHRUN else None
    return tuple(
        orders.ordered(order, found, file, told, site=site, silence=silence, cores=cores, here=os.environ)
        for found, file in plans
    )


def plans_to_launch(
    plan_or_job: Any,
    on: str | Cluster | None,
    procs: int | None,
    nodes: int,
    question: tuple[dict[str, Any], Any, tuple[int, ...], bool, Callable[[str], None]],
) -> list[tuple[Plan, str | None]]:
    """The plans to launch, each with its file where it has one.

    The question holds what else a plan is made of: options, pins, numbers of GPUs to compare, whether traces
    are cached, and who is told.
    """
    from pathlib import Path

    from trimtab.errors import WrongUse
    from trimtab.jobs.load import name_of
    from trimtab.spec import Plan
    from trimtab.trace.summary import described
    from trimtab.training.resize import cpu_plan

    options, pins, counts, cache, say = question
    fixed = make_policy(0.9, None, "speed", None, pins).pins
    file, found = None, plan_or_job if isinstance(plan_or_job, Plan) else None
    if isinstance(plan_or_job, str | Path) and _is_plan_file(str(plan_or_job)):
        file = str(plan_or_job)
        found, _ = plan_from(file)
    if found is not None:
        if fixed or options or on is not None or procs is not None:
            raise WrongUse(
                "--pin, --set, --on or --procs with a plan",
                found="the plan has made its choices",
                cure="Give them where it is made: trimtab plan JOB --on DEVICES --pin KEY=VALUE --out FILE.",
            )
        where: Any = devices_of(found)
        if not counts:
            return [(found, file)]
        name, overrides = found.job, found.options
    else:
        name, changed = name_of(plan_or_job)
        overrides, where = changed | options, cluster(on) if isinstance(on, str) else on or detect()
    if not where.devices:
        if counts:
            raise WrongUse(
                f"--compare {','.join(map(str, counts))}",
                found="there is no GPU here to compare numbers of",
                cure="Say for which devices: --on 4xA100-40GB.",
            )
        loaded = load(name, **overrides)
        return [(cpu_plan(name, described(loaded, name), (procs or 1) * nodes, fixed, overrides), None)]
    if procs is not None:
        fixed = fixed | {"gpus": procs * nodes}
    pinned = [fixed | {"gpus": one} for one in counts] or [fixed]
    return [(plan(name, where, pins=one, options=overrides, cache=cache, say=say), None) for one in pinned]


def start_nodes(nodes: str | None) -> int:
    """The most nodes of MIN:MAX."""
    from trimtab.training.start import node_range

    return 1 if nodes is None else node_range(nodes)[1]


def _is_plan_file(name: str) -> bool:
    """Whether a word names a plan rather than a job; a job's file is Python and has a name behind it."""
    from pathlib import Path

    return name.endswith(".json") or (Path(name).is_file() and not name.endswith(".py"))


def list_jobs(*places: Path | str, tail: int = 5) -> list[JobView]:
    """Our jobs: in Slurm's queue, in the folders of runs (those in ./runs, unless told), on this machine.

    >>> [job.state for job in trimtab.list_jobs()]  # doctest: +SKIP
    ['running', 'pending']
    """
    found, silences = find_jobs(*places, tail=tail)
    if silences and not found:
        raise silences[0]
    return found


def find_jobs(*places: Path | str, tail: int = 5) -> tuple[list[JobView], list[TrimtabError]]:
    """Our jobs, and why others could not be asked after."""
    from pathlib import Path

    from trimtab.launching.jobs import desk, listed

    return listed(desk(), [Path(one) for one in places], lines=tail)


def cancel(job_id: str | int, *, force: bool = False) -> JobView:
    """End a job, by its number, its id or its run's folder; what it was.

    >>> trimtab.cancel(4711).state  # doctest: +SKIP
    'running'
    """
    from trimtab.launching.jobs import cancel as end
    from trimtab.launching.jobs import desk

    return end(str(job_id), desk(), force=force)


def watch(
    runs: Sequence[Path | str] = (), *, interval_s: float = 2.0, samples: int | None = None
) -> Iterator[Sample]:
    """GPUs of this machine and runs in some folders, one sample each interval.

    for sample in trimtab.watch(["runs/slm"]):
        print(sample.gpus[0].busy, sample.runs[0].loss, sample.runs[0].advice)
    """
    from pathlib import Path

    from trimtab.probe.world import here
    from trimtab.watching.watch import Watcher

    return Watcher(world=here(), places=[Path(one) for one in runs]).samples(interval_s, samples)
