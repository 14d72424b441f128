"""Stages: files beside a config of which each changes the job for a part of the training.

More negatives to an anchor are more samples in memory, so each stage has a micro-batch of its own that is
fastest; all keep one global batch. How many positives an anchor has changes what is drawn, not what is in
memory: one positive goes through the model with each anchor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.configs import words
from trimtab.configs.edits import Edit, make_exact
from trimtab.configs.targets import KeyIndex, Knob, find_roots, split_key
from trimtab.configs.texts import format_path
from trimtab.errors import NothingFits, UnknownName
from trimtab.spec import Estimate, Noun, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.configs.targets import StageFormat
    from trimtab.configs.texts import ConfigDocument, Entry
    from trimtab.spec import Plan

SAME = ("strategy", "precision", "recompute", "compile")
"""What all stages of a training have in common: only the cut of the batch may differ."""


class StageConfig(Noun, frozen=True, kw_only=True):
    """A stage as its file has it."""

    name: str
    file: str
    root: tuple[str | int, ...] = ()
    options: dict[str, Any] = {}
    """Options of the job that the stage sets."""
    micro_batch: int | None = None
    """Its own; None where the main config's counts."""
    accumulation: int | None = None


class StagePlan(Noun, frozen=True, kw_only=True):
    """How a stage will run."""

    name: str
    file: str
    options: dict[str, Any] = {}
    setting: Setting
    estimate: Estimate


def read_stage(document: ConfigDocument, stage: StageFormat, *, file: str, stem: str) -> StageConfig | None:
    """The stage that a document describes; None where it is something else."""
    entries = document.entries()
    found = find_roots(stage.marks, KeyIndex(entries))
    if not found:
        return None
    root = found[0]
    values = {entry.path: entry for entry in entries}
    options = {
        option: entry.value
        for option, key in stage.options.items()
        if (entry := values.get(root + split_key(key))) is not None and not entry.computed
    }
    named = values.get((*root, "name"))
    return StageConfig(
        name=named.value if named is not None and isinstance(named.value, str) else stem,
        file=file,
        root=root,
        options=options,
        micro_batch=_stage_number(values.get(root + split_key(stage.micro_batch))),
        accumulation=_stage_number(values.get(root + split_key(stage.accumulation))),
    )


def _stage_number(entry: Entry | None) -> int | None:
    if entry is None or entry.computed:
        return None
    return words.parse_count(Knob(field="micro_batch", keys=("-",)), entry.value)


def plan_stages(
    stages: Sequence[StageConfig], plan: Plan, replan: Callable[[dict[str, Any]], Plan]
) -> tuple[tuple[StagePlan, ...], list[str]]:
    """Each stage with the cut of the batch that is fastest for it, what that needs, and what is to be said.

    `replan` finds the best plan for the job with some options changed, all else pinned as in the plan.
    """
    found: dict[str, Plan] = {}
    said: list[str] = []
    chosen = []
    for stage in stages:
        key = repr(sorted(stage.options.items()))
        if key not in found:
            found[key] = _plan_stage(stage, plan, replan, said)
        setting, _ = make_exact(found[key].choice, f"plan for stage {stage.name}")
        chosen.append(
            StagePlan(
                name=stage.name,
                file=stage.file,
                options=stage.options,
                setting=setting,
                estimate=found[key].estimate,
            )
        )
    return tuple(chosen), said


def _plan_stage(
    stage: StageConfig, plan: Plan, replan: Callable[[dict[str, Any]], Plan], said: list[str]
) -> Plan:
    if all(plan.options.get(name) == value for name, value in stage.options.items()):
        return plan
    try:
        return replan(stage.options)
    except UnknownName as problem:
        said.append(
            f"All stages run as the plan does: {problem.found}, so it cannot be told what they change."
        )
        return plan
    except NothingFits as problem:
        nothing = NothingFits(f"stage {stage.name}: {problem.given}", found=problem.found, cure=problem.cure)
        nothing.nearest = problem.nearest
        raise nothing from problem


def stage_pins(setting: Setting) -> dict[str, Any]:
    """What a stage's plan takes over from the plan of the training."""
    return {"gpus": setting.gpus, **{name: getattr(setting, name) for name in SAME}}


def safest_setting(plan: Plan, stages: Sequence[StagePlan]) -> Setting:
    """The cut that is safe for every stage: the smallest micro-batch of all."""
    choice = make_exact(plan.choice, f"plan for {plan.job}")[0]
    return min((choice, *(stage.setting for stage in stages)), key=lambda setting: setting.micro_batch)


def edit_stage(
    stage: StageFormat,
    config: StageConfig,
    chosen: StagePlan,
    document: ConfigDocument,
    *,
    main: Setting | None,
) -> list[Edit]:
    """What changes in a stage's file; a stage that runs as the main config says needs no keys of its own."""
    values = {entry.path: entry for entry in document.entries()}
    wanted = {
        stage.micro_batch: ("micro_batch", chosen.setting.micro_batch),
        stage.accumulation: ("accumulation", chosen.setting.accumulation),
    }
    paths = {key: config.root + split_key(key) for key in wanted}
    same = main is not None and all(getattr(main, field) == value for field, value in wanted.values())
    if same and not any(path in values for path in paths.values()):
        return []
    found = []
    for key, (field, value) in wanted.items():
        entry = values.get(paths[key])
        if entry is not None and not entry.computed and _stage_number(entry) == value:
            continue
        found.append(
            Edit(
                file=config.file,
                key=format_path(paths[key]),
                before=None if entry is None else entry.computed or entry.value,
                after=value,
                path=paths[key],
                line=None if entry is None else entry.line,
                field=field,
            )
        )
    return found
