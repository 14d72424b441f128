"""The best configuration that fits, and plans as files."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from trimtab.api.asking import cluster, detect, find_cluster, stated_network
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trimtab.errors import TrimtabError
    from trimtab.planner.foresight import Foresight, Kept
    from trimtab.planner.search import Seen
    from trimtab.predict.traces import Family
    from trimtab.spec import (
        Cluster,
        Device,
        Plan,
        Policy,
        Setting,
        Trace,
        Workload,
    )
    from trimtab.trace.standing import Standing

SLOW_S = 3.0
"""Traces that take longer are worth beginning before they are asked for."""
TOO_SLOW_S = 20.0
"""Traces that take longer than this are not: what is asked for instead would have to wait for them."""


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
    network: str | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
    say_best: Callable[[str], None] = lambda _: None,
    partial: bool = False,
) -> Plan:
    """The best configuration that fits, with reasons, without a GPU.

    trimtab.plan("job.py:MyJob", "4xA100-40GB").choice
    trimtab.plan(MyJob, "8xH100", deadline="12h", objective="gpus", compare=[1, 2, 4, 8]).recommendation

    `say` is told what is being done, `say_best` the best so far. With `partial`, Ctrl-C gives the best so far
    as a plan that is not `complete`; without it, or where nothing was found, KeyboardInterrupt is raised.
    """
    from trimtab.api.predicting import first_device
    from trimtab.jobs.load import name_of
    from trimtab.planner.decide import Question, decide
    from trimtab.planner.foresight import plain_device
    from trimtab.planner.outlook import room_bytes
    from trimtab.planner.space import shard_counts
    from trimtab.planner.stale import fingerprints
    from trimtab.predict.derive import direct_shards
    from trimtab.trace.standing import Standing
    from trimtab.trace.summary import is_known
    from trimtab.trace.tracer import cache_folder, keep
    from trimtab.trace.worker import Requests

    policy = make_policy(memory, deadline, objective, price, pins)
    where = find_cluster(on)
    where = where if network is None else stated_network(where, network)
    first_device(where)
    name, changed = name_of(job)
    overrides = changed | (options or {})
    given = {"global_batch": global_batch, "samples": samples, "epochs": epochs}
    with Standing() as standing:
        if not (cache and is_known(name, overrides)):
            # It will be needed: let it load the job while this process asks what the job says of itself.
            device = plain_device(min(where.devices, key=room_bytes))
            standing.warm(Requests(job=name, overrides=overrides, settings=(), device=device))
        workload = workload_of(name, overrides, given, cache=cache, say=say)
        workload = with_batch_loss(name, overrides, workload, cache=cache, say=say)
        question = Question(job=name, workload=workload, cluster=where, policy=policy, compare=tuple(compare))
        # The loss of a cached step is over the whole global batch, which its trace has to know.
        traced = overrides | ({"global_batch": global_batch} if workload.cached and global_batch else {})
        prints = _prints(name, traced, clip)
        file = cache_folder() / f"plan-{_digest(*prints, question)}.json"
        found = _same_plan(file) if cache else None
        if found is not None:
            return found.replace(folder=str(Path.cwd()))
        kept_in = cache_folder() / f"outlook-{'-'.join(prints)}.json" if cache else None
        open_question = "recompute" not in policy.pins
        outlook, save = foresight(
            name, traced, standing, clip=clip, kept_in=kept_in, ahead=open_question, say=say
        )
        outlook.direct |= direct_shards(shard_counts(workload, where, policy))
        try:
            found = decide(question, outlook, notice=lambda seen: say_best(_best_words(seen)))
        finally:
            save()
        if not (found.complete or partial):
            raise KeyboardInterrupt
        told = fingerprints(name, workload, found.places, versions())
        found = found.replace(fingerprints=told, options=overrides)
        if found.complete:
            keep(file, found.to_json())
        return found.replace(folder=str(Path.cwd()))


def _best_words(seen: Seen) -> str:
    """A setting with its speed, for whoever waits."""
    from trimtab.planner.foresight import spoken

    setting, step_s = seen.setting, seen.estimate.step_s
    speed = "" if not step_s else f", {setting.global_batch / step_s:.3g} samples/s"
    return f"{spoken(setting)} on {setting.gpus} GPU{'s' * (setting.gpus > 1)}{speed}"


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
    from trimtab.trace.summary import summary

    for key, value in given.items():
        if value is not None and value < 1:
            option = f"--{key.replace('_', '-')}"
            raise WrongUse(f"{option} {value}", found="it is below 1", cure=f"Give {option} at least 1.")
    say("reading the job")
    found = summary(job, overrides, cache=cache)
    return found.replace(**{key: value for key, value in given.items() if value is not None})


def with_batch_loss(
    job: str,
    overrides: dict[str, Any],
    workload: Workload,
    *,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Workload:
    """The workload with what a small batch shows of its loss; not asked of a job that says it itself."""
    from trimtab.trace.batch_loss import batch_loss

    if workload.batch_loss is not None or workload.cached or workload.global_batch == 1:
        return workload
    say("comparing the loss of a small batch with those of its halves")
    return workload.replace(batch_loss=batch_loss(job, overrides, cache=cache))


def make_policy(
    memory: float,
    deadline: str | float | None,
    objective: str,
    price: float | None,
    pins: Mapping[str, Any] | Iterable[str],
) -> Policy:
    """A Policy from what people type."""
    from collections.abc import Mapping as AnyMapping

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
    if price is not None and not 0 <= price < float("inf"):
        found = "it is below 0" if price < 0 else "it is no amount of money"
        raise WrongUse(f"--price {price:g}", found=found, cure="Give a price per GPU and hour.")
    return Policy(
        objective=Objective(objective),
        memory_share=memory,
        deadline_s=parse_duration(deadline, "--deadline") if isinstance(deadline, str) else deadline,
        price_per_gpu_hour=price,
        pins=taken(pins) if isinstance(pins, AnyMapping) else read(pins),
    )


def foresight(  # noqa: PLR0913 - what a job is traced with
    job: str,
    overrides: dict[str, Any],
    standing: Standing,
    *,
    clip: float | None = None,
    kept_in: Path | None = None,
    ahead: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Foresight, Callable[[], None]]:
    """What the planner asks, and how to keep what it worked out: in `kept_in`, or nowhere without it.

    With `ahead`, where tracing takes long, the next way of recomputing is traced while the planner thinks.
    """
    from trimtab.pace.store import recall
    from trimtab.planner.foresight import Foresight, Kept
    from trimtab.predict.traces import traces
    from trimtab.trace.tracer import keep

    families: dict[str, Family] = {}
    slow = False

    def trace_all(
        settings: Sequence[Setting], device: Device, changes: dict[str, Any]
    ) -> list[Trace | TrimtabError]:
        nonlocal slow
        began = monotonic()
        standing.last = None
        found = traces(
            job,
            settings,
            device,
            overrides={**overrides, **changes},
            clip=clip,
            cache=kept_in is not None,
            families=families,
            standing=standing,
        )
        took = monotonic() - began
        slow = slow or took > SLOW_S
        if ahead and slow and took < TOO_SLOW_S:
            _expect(standing)
        return found

    kept = _kept(kept_in) if kept_in else Kept()

    def save() -> None:
        if kept_in and kept.changed:
            import msgspec

            kept.changed = False
            keep(kept_in, msgspec.json.encode(kept).decode())

    return Foresight(trace_all=trace_all, recall=recall, say=say, kept=kept), save


def _kept(file: Path) -> Kept:
    """What earlier questions about a job have left; nothing where it cannot be read."""
    import msgspec

    from trimtab.planner.foresight import Kept

    try:
        return msgspec.convert(msgspec.json.decode(file.read_bytes()), Kept)
    except (msgspec.MsgspecError, OSError):
        return Kept()


def _expect(standing: Standing) -> None:
    """Let what was traced last be traced once more with the next way of recomputing: that comes next."""
    last = standing.last
    if last is None:
        return
    from trimtab.spec import Recompute
    from trimtab.trace.tracer import cache_file

    # The planner looks first at what takes least time.
    after = {Recompute.NONE: Recompute.SELECTIVE, Recompute.SELECTIVE: Recompute.FULL}
    settings = [
        one.replace(recompute=after[one.recompute]) for one in last.settings if one.recompute in after
    ]
    likely = last.replace(settings=tuple(settings))
    missing = tuple(one.setting for one in likely.each() if not cache_file(one).exists())
    if missing:
        standing.expect(likely.replace(settings=missing))


def _prints(job: str, overrides: dict[str, Any], clip: float | None) -> tuple[str, str]:
    """What an answer depends on beside the question: the job's code, and ours with what was measured here."""
    from trimtab.trace.summary import Named, fingerprint

    return fingerprint(Named(job=job, overrides={**overrides, "clip": clip})), _predictor()


def _predictor() -> str:
    """Changes with what turns traces into estimates: the source, and the user's own calibrations."""
    import hashlib

    import trimtab
    from trimtab.pace import store

    own = Path(trimtab.__file__).parent
    files = [one for part in ("predict", "planner", "catalog") for one in own.glob(f"{part}/**/*")]
    files = [one for one in files if "__pycache__" not in one.parts]
    files += store.folder().glob("*.json")
    return hashlib.sha256(b"".join(one.read_bytes() for one in sorted(files) if one.is_file())).hexdigest()[
        :12
    ]


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

    return still_true(read(file), str(file), job=job, on=on)


def still_true(
    found: Plan,
    origin: str,
    *,
    job: Any = None,
    on: str | Cluster | None = None,
    moved: bool = False,
) -> Plan:
    """The plan, refused where something is not what it assumed.

    With `moved`, `job` is the plan's own job by a longer path.
    """
    from trimtab.jobs.load import name_of
    from trimtab.planner.stale import changes, fingerprints, refuse

    name, overrides = name_of(found.job if job is None else job)
    workload = workload_of(name, overrides or found.options, {})
    if found.workload is not None:
        # What the command line said instead of the job holds for the plan, not for the job.
        workload = workload.replace(global_batch=found.workload.global_batch)
    where = None if on is None else cluster(on) if isinstance(on, str) else on
    now = fingerprints(found.job if moved else name, workload, found.places, versions())
    refuse(found, origin, changes(found, now, where))
    return found


def devices_of(found: Plan) -> Cluster:
    """The devices that a plan is for, from its own words."""
    from trimtab.planner.stale import used

    nodes = len({one.node for one in found.places})
    if not nodes:
        return detect()
    each = "+".join(used(found.places).removeprefix(f"{nodes} nodes of ").split(" + "))
    return cluster(f"{nodes}x{each}" if nodes > 1 else each)


def plan_from(file: Path | str) -> tuple[Plan, str]:
    """A plan from its file, refused where it is stale; and a note about where its job was found, if at all.

    A relative path in the plan starts at the folder the plan was made in. Where the job is not there any
    more, it is looked for beside the plan's file and in the current folder. The plan comes back with the path
    at which its job was found.
    """
    from trimtab.errors import UnknownName
    from trimtab.planner.stale import read

    path = Path(file)
    found = read(path)
    prefix, place, rest = _place_in(found.job)
    if not place:
        try:
            return still_true(found, str(path)), ""
        except UnknownName as problem:
            if ":" not in found.job:
                raise
            return found, f"Whether the plan still holds was not checked: {problem.found}."
    bases = dict.fromkeys(
        base.resolve() for base in (Path(found.folder or "."), path.resolve().parent, Path())
    )
    places = list(dict.fromkeys(base / place for base in bases))
    there = [one for one in places if (one / "config.json" if prefix else one).is_file()]
    if not there:
        looked = " and ".join(dict.fromkeys(str(one.parent) for one in places))
        return found, (
            f"{place} is not here: whether the plan still holds for it was not checked. Looked in {looked}."
        )
    stale: list[WrongUse] = []
    for one in there:
        try:
            return _at(found, str(path), f"{prefix}{one}{rest}", place)
        except WrongUse as problem:
            stale.append(problem)
    raise stale[0]


def _at(found: Plan, origin: str, job: str, place: str) -> tuple[Plan, str]:
    """The plan with its job at this path, refused where it is stale; with a note where that is elsewhere."""
    name = found.job if Path(place).is_absolute() or Path(place).resolve() == _path_of(job) else job
    still_true(found, origin, job=name, moved=True)
    if name == found.job:
        return found, ""
    return found.replace(job=job), f"{place} is {_path_of(job)}: paths in a plan start where it was made."


def _path_of(job: str) -> Path:
    return Path(_place_in(job)[1])


def _place_in(job: str) -> tuple[str, str, str]:
    """A job's name cut around the path in it: hf:FOLDER, FILE.py:NAME; no path where it names none."""
    if job.startswith("hf:"):
        return "hf:", job.removeprefix("hf:"), ""
    source, colon, name = job.rpartition(":")
    return ("", source, f"{colon}{name}") if source.endswith(".py") else ("", "", "")
