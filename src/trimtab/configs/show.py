"""Show what a config would use, stage by stage, and what would be better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.configs.degrees import lint_config
from trimtab.configs.interpret import ConfigWarning, FoundKey, Reading, interpret_config, make_setting
from trimtab.configs.plan_edits import make_exact
from trimtab.configs.targets import find_place
from trimtab.errors import JobFailed, NothingFits, TrimtabError, UnknownName
from trimtab.files import is_file
from trimtab.jobs.model_sizes import read_job_sizes
from trimtab.planner.degrees import ClusterShape, DegreeFinding
from trimtab.spec import Noun, Setting
from trimtab.strategies import STRATEGIES
from trimtab.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.configs.apply import ConfigLayout, OpenedConfig, StageConfig
    from trimtab.configs.targets import ConfigTarget, Subject
    from trimtab.configs.text_edit import Entry
    from trimtab.spec import Estimate, Plan

WORTH = 1.03
"""How many times as fast something has to be to be advised."""
TIGHT = 0.9
"""Share of the memory above which a setting has no room for what differs from step to step."""


class ShownStage(Noun, frozen=True, kw_only=True):
    """A stage, or the whole training if it has no stages."""

    name: str
    file: str
    setting: Setting
    options: dict[str, Any] = {}
    """What the config says of the job."""
    memory_bytes: int | None = None
    capacity_bytes: int | None = None
    utilization: float | None = None
    """Share of the GPU's memory."""
    fits: bool | None = None
    rating: str | None = None
    """poor, fair, good or excellent use of the GPU's arithmetic; `does not fit` where it does not."""
    step_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    advice: tuple[str, ...] = ()


class Display(Noun, frozen=True, kw_only=True):
    """A config as it is, and what would be better."""

    file: str
    target: str
    title: str
    job: str | None = None
    device: str | None = None
    found: tuple[FoundKey, ...] = ()
    """The keys that were understood."""
    global_batch: int | None = None
    seq: int | None = None
    """Tokens of one sample, where a key or the framework's default says it."""
    stages: tuple[ShownStage, ...]
    degrees: tuple[DegreeFinding, ...] = ()
    """What is illegal or unwise about the degrees of parallelism, the errors first."""
    said: tuple[str, ...] = ()
    """Everything there is to say, the warnings included."""
    warnings: tuple[ConfigWarning, ...] = ()
    """What the file says that neither the setting nor an estimate holds."""


class JobEstimator(Protocol):
    """Estimates and plans the job of a config."""

    def estimate(self, options: dict[str, Any], setting: Setting) -> Estimate:
        """Estimate memory and speed of a setting."""

    def better(self, options: dict[str, Any], setting: Setting) -> Plan:
        """Plan the fastest way to run the same global batch on as many GPUs in the same precision."""


def find_job(target: ConfigTarget, opened: OpenedConfig | None) -> tuple[str | None, str]:
    """Return the job that a config describes, or where it was looked for.

    A model's folder is looked for as the framework would, from the current folder, and then beside the file.
    """
    subject = target.subject
    if subject.name or opened is None:
        return subject.name or None, ""
    entries = {entry.path: entry for entry in opened.document.entries()}
    bases = dict.fromkeys(base.resolve() for base in (Path(), opened.file.parent))
    sought: list[str] = []
    for key in subject.folders():
        entry = entries.get(find_place(opened.site.root, key, entries))
        if entry is None or (entry.value is None and not entry.computed):
            continue
        if entry.computed or not isinstance(entry.value, str):
            sought.append(f"{key} is {entry.computed or entry.value}, which names no folder")
            continue
        for base in (Path(), opened.file.parent):
            folder = base / Path(entry.value).expanduser()
            if is_file(folder / "config.json"):
                return f"hf:{folder}", ""
        places = [Path(entry.value).expanduser()] if Path(entry.value).expanduser().is_absolute() else None
        looked = places or [base / Path(entry.value).expanduser() for base in bases]
        sought.append(
            f"{key} is {entry.value}, and there is no config.json in {' or in '.join(map(str, looked))}"
        )
    return None, "; ".join(sought)


def read_options(subject: Subject, root: tuple[str | int, ...], entries: Sequence[Entry]) -> dict[str, Any]:
    """Read options of the job from the keys that hold them, or from the framework's defaults."""
    values = {entry.path: entry for entry in entries}
    found = subject.read_options(root, values)
    return {option: value for option, (_, value) in found.items() if value is not None}


def build_display(  # noqa: PLR0913 - what to show, and for whom
    layout: ConfigLayout,
    target: ConfigTarget,
    *,
    job: str | None,
    gpus: int | None,
    device: str | None,
    seer: JobEstimator | None,
    no_device: bool = False,
    sought: str = "",
    shape: ClusterShape | None = None,
) -> Display:
    """Describe the config, with an estimate for every stage if there is an estimator.

    `sought` says where the model's folder was looked for and not found. `shape` is the cluster.
    """
    opened = layout.main
    entries = opened.document.entries() if opened else []
    reading = interpret_config(opened.site, entries, gpus=gpus) if opened else Reading(target=target.name)
    assumed = {name: word for name, word in target.subject.assumes.items() if name not in reading.facts}
    reading = reading.replace(facts=reading.facts | assumed)
    setting = make_setting(reading, gpus=gpus or 1)
    sizes = read_job_sizes(job or "", {})
    shape = shape or ClusterShape()
    findings = lint_config(opened.site, entries, reading, sizes, shape) if opened else []
    root = opened.site.root if opened else ()
    options = read_options(target.subject, root, entries)
    seq = reading.number("seq")
    if seq is not None and (target.subject.name or target.subject.folder):
        options.setdefault("seq", seq)
    notes = [*reading.said, *_note_unknown(reading, target, gpus), *_note_single_gpu(reading, setting, gpus)]
    notes += [
        f"{name} {word} is assumed: no key says it, and the model of this layout does it."
        for name, word in assumed.items()
    ]
    if no_device:
        notes.append("This machine has no GPU: name one with --on for memory and time.")
    elif seer is None and not target.partial and not sought:
        notes.append("Which job this trains is not in the file: name it with --job for memory and time.")
    if sought:
        notes.append(f"The model was not found: {sought}. Name it with --job hf:FOLDER for memory and time.")
    notes += [warning.text for warning in reading.warnings]
    if seer is not None and (split := _name_split(reading)):
        notes.append(f"Memory and time are not estimated: show estimates configs without {split}.")
        seer = None
    file = str(opened.file) if opened else layout.stages[0][0].file
    plain = [
        ShownStage(
            name=stage.name,
            file=stage.file,
            options=options | stage.options,
            setting=_stage_setting(setting, stage),
        )
        for stage, _ in layout.stages
    ] or [ShownStage(name=Path(file).stem, file=file, options=options, setting=setting)]
    shown = [_estimate_stage(stage, seer, notes) for stage in plain]
    return Display(
        file=file,
        target=target.name,
        title=target.title,
        job=job,
        device=device,
        found=reading.found,
        global_batch=reading.number("global_batch"),
        seq=seq,
        degrees=tuple(findings),
        stages=tuple(shown),
        said=tuple(dict.fromkeys(notes)),
        warnings=tuple(warning.replace(file=file) for warning in reading.warnings),
    )


def _name_split(reading: Reading) -> str:
    """Return the degrees by which a config splits the model, in words; empty if it does not."""
    degrees = {"tensor": "tp", "context": "cp", "pp": "pp", "expert": "ep"}
    split = [
        f"{name}={count}" for field, name in degrees.items() if (count := reading.number(field) or 1) > 1
    ]
    return " and ".join(split)


def _note_unknown(reading: Reading, target: ConfigTarget, gpus: int | None) -> list[str]:
    """Note what is assumed where the config leaves it open."""
    notes = []
    if reading.number("micro_batch") is None and not target.partial:
        notes.append("The micro-batch is not known: 1 is assumed.")
    asked = reading.number("gpus")
    if asked and gpus and asked > gpus:
        notes.append(f"The config asks for {asked} GPUs, and there {'is' if gpus == 1 else 'are'} {gpus}.")
    return notes


def _note_single_gpu(reading: Reading, setting: Setting, gpus: int | None) -> list[str]:
    """Explain why a strategy for several GPUs is shown on one, and how to see it on more."""
    strategy = reading.facts.get("strategy")
    if setting.gpus > 1 or strategy is None or not STRATEGIES[str(strategy)].needs_config_key:
        return []
    on_one = "on one it runs as single"
    more = f"--on 4xA100-40GB, or the GPUs that you have, shows it as {strategy}."
    head = f"The config's strategy is {strategy}, and"
    if gpus == 1:
        return [f"{head} one GPU is looked at: {on_one}. {more}"]
    if reading.number("gpus") == 1:
        return [f"{head} it asks for one GPU: {on_one}."]
    unsaid = "the file does not say on how many GPUs"
    return [f"{head} {unsaid}: without --on one is assumed, and {on_one}. {more}"]


def _stage_setting(setting: Setting, stage: StageConfig) -> Setting:
    """Return the main config's setting with the stage's own split of the batch."""
    micro = stage.micro_batch or setting.micro_batch
    rounds = stage.accumulation or setting.accumulation
    return setting.replace(
        micro_batch=micro, accumulation=rounds, global_batch=micro * rounds * setting.data_parallel
    )


def _estimate_stage(plain: ShownStage, seer: JobEstimator | None, notes: list[str]) -> ShownStage:
    """Add an estimate and advice to a stage."""
    if seer is None:
        return plain
    asked, setting = plain.options, plain.setting
    try:
        try:
            estimate = seer.estimate(asked, setting)
        except UnknownName as problem:
            # The user's own job need not have the options that the built-in one has.
            notes.append(f"{problem.given} is left out: {problem.found}.")
            asked = {}
            estimate = seer.estimate(asked, setting)
    except TrimtabError as problem:
        notes.append(f"{plain.name} cannot be estimated: {problem.found}. {problem.cure}")
        if isinstance(problem, JobFailed):
            raise
        return plain
    capacity = estimate.capacity_bytes
    return plain.replace(
        memory_bytes=estimate.process_bytes,
        capacity_bytes=capacity,
        utilization=estimate.process_bytes / capacity if capacity else None,
        fits=estimate.fits,
        rating="does not fit" if estimate.fits is False else estimate.mfu_rating,
        step_s=estimate.step_s,
        samples_per_s=estimate.samples_per_s,
        mfu=estimate.mfu,
        advice=(
            *([estimate.verdict_reason] if estimate.fits and estimate.verdict_reason else []),
            *_build_advice(asked, setting, estimate, seer),
        ),
    )


def _build_advice(
    options: dict[str, Any], setting: Setting, found: Estimate, seer: JobEstimator
) -> list[str]:
    """Return what would be better, with its numbers."""
    try:
        best = seer.better(options, setting)
    except NothingFits as problem:
        return [f"nothing fits with a global batch of {setting.global_batch}: {problem.cure}"]
    except TrimtabError as problem:
        return [f"nothing better was looked for: {problem.found}"]
    choice, note = make_exact(best.choice, "advice")
    estimate = seer.estimate(options, choice) if note else best.estimate
    better = _say_better(setting, found, choice, estimate)
    return [better] if better else [_say_good(setting, found)]


def _say_good(setting: Setting, found: Estimate) -> str:
    share = _memory_share(found)
    tight = "; there is little room left" if share is not None and share > TIGHT else ""
    return f"{_format_batch(setting)} is as fast as anything that keeps {setting.global_batch}{tight}"


def _say_better(setting: Setting, found: Estimate, choice: Setting, estimate: Estimate) -> str:
    """Return a sentence if the other choice is better, else nothing."""
    before, after = found.step_s, estimate.step_s
    faster = before / after if before and after else None
    if found.fits is not False and (faster is None or faster < WORTH):
        return ""
    how = _format_batch(choice)
    how += f" with recompute {choice.recompute}" if choice.recompute is not setting.recompute else ""
    kept = f"keeps {choice.global_batch} exactly and uses {_format_use(estimate)}"
    if found.fits is False:
        room = f" of {format_bytes(found.capacity_bytes)}" if found.capacity_bytes else ""
        return f"{_format_batch(setting)} needs {format_bytes(found.process_bytes)}{room}: {how} {kept}"
    assert before is not None  # noqa: S101 - faster comes from them
    assert after is not None  # noqa: S101
    return (
        f"{_format_batch(setting)} uses {_format_use(found)}: {how} {kept}; it would be {faster:.1f} x as "
        "fast "
        f"({format_duration(after)} a step instead of {format_duration(before)})"
    )


def _format_batch(setting: Setting) -> str:
    return f"micro-batch {setting.micro_batch} x {setting.accumulation}"


def _memory_share(found: Estimate) -> float | None:
    return found.process_bytes / found.capacity_bytes if found.capacity_bytes else None


def _format_use(found: Estimate) -> str:
    share = _memory_share(found)
    return f"{share:.0%} of this GPU" if share is not None else format_bytes(found.process_bytes)
