"""The verbs of trimtab as functions; `trimtab.detect()` and the command `trimtab detect` are one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.catalog.words import Word
    from trimtab.exams.sit import Marks
    from trimtab.predict.memory import Memory
    from trimtab.spec import Calibration, Cluster, Device, Estimate, Setting, Trace

VERBS = ("detect", "explain", "estimate", "exam", "profile", "calibrate")
"""What works today."""


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
    """A knob, strategy or term in plain English.

    >>> explain("oom").name
    'out-of-memory'
    """
    from trimtab.catalog.words import word as look_up

    return look_up(word, VERBS)


def load(name: str) -> Any:
    """The job of that name, built."""
    from trimtab.jobs.load import load as find

    return find(name)


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
    cache: bool = True,
) -> Estimate:
    """What one configuration would need, without running it and without a GPU.

    trimtab.estimate("job.py:MyJob", "H200", micro_batch=16).process_bytes
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
    )
    return look_closely(job, setting, device, where=where, clip=clip, cache=cache)[0]


def look_closely(  # noqa: PLR0913 - a question and where it is asked
    job: Any,
    setting: Setting,
    device: Device,
    *,
    where: Cluster | None = None,
    clip: float | None = None,
    cache: bool = True,
) -> tuple[Estimate, Memory, Trace]:
    """The estimate of a setting with what it rests on."""
    from trimtab.pace.store import recall
    from trimtab.predict.estimate import estimate as judge
    from trimtab.trace.tracer import traced
    from trimtab.trace.worker import Request

    name, overrides = job_name(job)
    request = Request(job=name, overrides=overrides, setting=setting, device=device, clip=clip)
    trace = traced(request, cache=cache)
    found = judge(trace, setting, device, cluster=where, calibration=recall(device))
    return (*found, trace)


def job_name(job: Any) -> tuple[str, dict[str, Any]]:
    """How another process finds a job: its name, and what was changed on the instance."""
    import inspect

    from trimtab.errors import WrongUse

    if isinstance(job, str):
        return job, {}
    cls = job if isinstance(job, type) else type(job)
    try:
        file = inspect.getfile(cls)
    except (TypeError, OSError):
        file = ""
    if not file.endswith(".py") or "<locals>" in cls.__qualname__:
        raise WrongUse(
            f"job {cls.__qualname__}",
            found="it is not defined at the top of a file, where another process could find it",
            cure="Put the class into a .py file of its own.",
        )
    return f"{file}:{cls.__qualname__}", {} if isinstance(job, type) else dict(vars(job))


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
) -> Setting:
    """A Setting from words, with an error that lists the words there are."""
    from trimtab.errors import WrongUse
    from trimtab.spec import (
        Allocator,
        Mesh,
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
    if how not in (Strategy.SINGLE, Strategy.DDP, Strategy.FSDP):
        raise WrongUse(
            f"--strategy {strategy}", found="it cannot be estimated yet", cure="Use single, ddp or fsdp."
        )
    if compile and how is not Strategy.SINGLE:
        raise WrongUse(
            f"--compile with --strategy {strategy}",
            found="compiled code is estimated on one device only",
            cure="Leave one of the two out.",
        )
    if micro_batch < 1:
        raise WrongUse(f"--micro-batch {micro_batch}", found="it is below 1", cure="Give at least 1 sample.")
    world = 1 if how is Strategy.SINGLE else gpus
    if how is not Strategy.SINGLE and world < 2:  # noqa: PLR2004 - several
        raise WrongUse(
            f"--strategy {strategy}", found="there is one GPU", cure="Name several, as in --on 8xH100."
        )
    mesh = Mesh(dp_shard=world) if how is Strategy.FSDP else Mesh(dp_replicate=world)
    return Setting(
        strategy=how,
        mesh=mesh,
        micro_batch=micro_batch,
        global_batch=micro_batch * world,
        precision=word(Precision, precision, "precision"),
        recompute=word(Recompute, recompute, "recompute"),
        compile=compile,
        optimizer=word(OptimizerImplementation, optimizer, "optimizer"),
        allocator=word(Allocator, allocator, "allocator"),
    )


def exam(only: str = "*", *, cache: bool = True) -> Marks:
    """Every recorded measurement against today's predictor."""
    from trimtab.exams.sit import sit

    return sit(only, cache=cache)


def profile(job: Any, setting: Setting, device: Device, *, clip: float | None = None) -> dict[str, Any]:
    """Run a setting for real for a few steps, and set prediction against measurement."""
    from trimtab.exams.measure import measured
    from trimtab.trace.worker import Request

    name, overrides = job_name(job)
    found = measured(Request(job=name, overrides=overrides, setting=setting, device=device, clip=clip))
    predicted, _, _ = look_closely(job, setting, device, clip=clip)
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
