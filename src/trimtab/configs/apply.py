"""Apply a plan to files: which files it goes into, and what changes in each. Nothing is written here.

Stages are files beside a config; each changes the job for a part of the training. More negatives per anchor
are more samples in memory, so the fastest micro-batch differs from stage to stage; all keep one global batch.
More positives per anchor change what is drawn, not what is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.configs.files import FileChange, PreparedFile, prepare_files
from trimtab.configs.interpret import ConfigWarning, parse_count
from trimtab.configs.plan_edits import Draft, Edit, draft_edits, make_edit, make_exact
from trimtab.configs.targets import KeyIndex, Knob, find_roots, find_site, find_sites, find_target, split_key
from trimtab.configs.text_edit import format_path, parse_path
from trimtab.errors import NothingFits, UnknownName, WrongUse
from trimtab.spec import Estimate, Noun, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.configs.targets import ConfigTarget, StageFormat, TargetSite
    from trimtab.configs.text_edit import Entry, KeyPath, ParsedConfig
    from trimtab.spec import Plan

SAME = ("strategy", "precision", "recompute", "compile")
"""What all stages of a training have in common: only the cut of the batch may differ."""


class StageConfig(Noun, frozen=True, kw_only=True):
    """A stage as its file describes it."""

    name: str
    file: str
    root: tuple[str | int, ...] = ()
    options: dict[str, Any] = {}
    """Options of the job that the stage sets."""
    micro_batch: int | None = None
    """Its own; None where the main config's counts."""
    accumulation: int | None = None


class StagePlan(Noun, frozen=True, kw_only=True):
    """The setting and the estimate of a stage."""

    name: str
    file: str
    options: dict[str, Any] = {}
    setting: Setting
    estimate: Estimate


class AppliedEdit(Noun, frozen=True, kw_only=True):
    """A value that `trimtab apply` changes in a file."""

    file: str
    key: str
    before: Any = None
    """Null where the key is added."""
    after: Any = None
    line: int | None = None
    """Null where the key is added."""


class ApplyOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab apply --json`."""

    edits: tuple[AppliedEdit, ...]
    command: str | None
    """The command line to type, where no file holds the training command; else null."""
    backup: str | None
    """Backup of the first file; null if nothing was written."""
    backups: tuple[str, ...]
    written: tuple[str, ...]
    """Files that were written; empty without --yes."""
    files: tuple[str, ...]
    """Every file that was looked at for the plan, changed or not."""
    diff: str
    stages: tuple[StagePlan, ...]
    warnings: tuple[ConfigWarning, ...]
    """Where a file will differ from the plan."""
    said: tuple[str, ...]
    """Everything there is to say, the warnings included."""


def read_stage(document: ParsedConfig, stage: StageFormat, *, file: str, stem: str) -> StageConfig | None:
    """Return the stage that a document describes; None if it is something else."""
    entries = document.entries()
    stage_roots = find_roots(stage.marks, KeyIndex(entries))
    if not stage_roots:
        return None
    root = stage_roots[0]
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
    return parse_count(Knob(field="micro_batch", keys=("-",)), entry.value)


def plan_stages(
    stages: Sequence[StageConfig], plan: Plan, replan: Callable[[dict[str, Any]], Plan]
) -> tuple[tuple[StagePlan, ...], list[str]]:
    """Find the fastest split of the batch for each stage; return the stages and notes.

    `replan` finds the best plan for the job with some options changed, all else pinned as in the plan.
    """
    plans: dict[str, Plan] = {}
    notes: list[str] = []
    chosen = []
    for stage in stages:
        key = repr(sorted(stage.options.items()))
        if key not in plans:
            plans[key] = _plan_stage(stage, plan, replan, notes)
        setting, _ = make_exact(plans[key].choice, f"plan for stage {stage.name}")
        chosen.append(
            StagePlan(
                name=stage.name,
                file=stage.file,
                options=stage.options,
                setting=setting,
                estimate=plans[key].estimate,
            )
        )
    return tuple(chosen), notes


def _plan_stage(
    stage: StageConfig, plan: Plan, replan: Callable[[dict[str, Any]], Plan], notes: list[str]
) -> Plan:
    if all(plan.options.get(name) == value for name, value in stage.options.items()):
        return plan
    try:
        return replan(stage.options)
    except UnknownName as problem:
        notes.append(
            f"All stages run as the plan does: {problem.found}, so it cannot be told what they change."
        )
        return plan
    except NothingFits as problem:
        nothing = NothingFits(f"stage {stage.name}: {problem.given}", found=problem.found, cure=problem.cure)
        nothing.nearest = problem.nearest
        raise nothing from problem


def stage_pins(setting: Setting) -> dict[str, Any]:
    """Return the pins that a stage's plan takes from the plan of the training."""
    return {"gpus": setting.gpus, **{name: getattr(setting, name) for name in SAME}, **way_pins(setting)}


def way_pins(setting: Setting) -> dict[str, Any]:
    """Return the pins for what no search changes: the base, the loss, the optimizer and the offload."""
    plain = Setting(micro_batch=1, global_batch=1)
    pins = {name: getattr(setting, name) for name in ("base", "loss", "optimizer_in_backward")}
    if setting.optimizer_rule is not plain.optimizer_rule:
        pins["optimizer"] = setting.optimizer_rule
    pins = {name: value for name, value in pins.items() if value is not getattr(plain, name)}
    return {**pins, "offload": ",".join(setting.offload)} if setting.offload else pins


def safest_setting(plan: Plan, stages: Sequence[StagePlan]) -> Setting:
    """Return the setting that is safe for every stage: the smallest micro-batch of all."""
    choice = make_exact(plan.choice, f"plan for {plan.job}")[0]
    return min((choice, *(stage.setting for stage in stages)), key=lambda setting: setting.micro_batch)


def edit_stage(
    stage: StageFormat,
    config: StageConfig,
    chosen: StagePlan,
    document: ParsedConfig,
    *,
    main: Setting | None,
) -> list[Edit]:
    """Return the edits of a stage's file; none if the stage runs as the main config says."""
    values = {entry.path: entry for entry in document.entries()}
    new_values = {
        stage.micro_batch: ("micro_batch", chosen.setting.micro_batch),
        stage.accumulation: ("accumulation", chosen.setting.accumulation),
    }
    paths = {key: config.root + split_key(key) for key in new_values}
    same = main is not None and all(getattr(main, name) == value for name, value in new_values.values())
    if same and not any(path in values for path in paths.values()):
        return []
    edits = []
    for key, (field_name, value) in new_values.items():
        entry = values.get(paths[key])
        if entry is not None and not entry.computed and _stage_number(entry) == value:
            continue
        edits.append(make_edit(config.file, paths[key], entry, value, field_name))
    return edits


SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".jsonc")
"""What is looked at in a folder; other kinds of files have to be named."""
MOST_FILES = 500
DEEPEST = 4


@dataclass(frozen=True)
class Aim:
    """A file or a folder that the user named, and a place inside of it."""

    file: Path
    below: KeyPath = ()

    @property
    def name(self) -> str:
        """The name as people write it."""
        return f"{self.file}:{format_path(self.below)}" if self.below else str(self.file)


def parse_aim(text: str) -> Aim:
    """Parse FILE or FILE:PATH. A file whose own name has a colon is found first."""
    path = Path(text)
    if path.exists() or ":" not in text:
        return Aim(path)
    file, _, below = text.rpartition(":")
    while ":" in file and not Path(file).exists():
        file, _, more = file.rpartition(":")
        below = f"{more}:{below}"
    return Aim(Path(file), parse_path(below))


@dataclass(frozen=True)
class OpenedConfig:
    """A parsed config, and the target that it is."""

    file: Path
    document: ParsedConfig
    site: TargetSite


@dataclass(frozen=True)
class ConfigLayout:
    """The configs that belong together: a main one, and stages of its training."""

    main: OpenedConfig | None
    stage: StageFormat | None = None
    stages: tuple[tuple[StageConfig, ParsedConfig], ...] = ()


@dataclass
class Proposal:
    """The edits of a plan before anything is written."""

    edits: list[Edit] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    warnings: list[ConfigWarning] = field(default_factory=list)
    """Where a file will differ from the plan."""
    stages: tuple[StagePlan, ...] = ()
    files: list[str] = field(default_factory=list)
    """Every file that was looked at for the plan, changed or not."""
    folders: list[Path] = field(default_factory=list)
    """Folders that the user named: the files in them were not named one by one."""

    def prepare(self, *, beside: bool = False) -> list[PreparedFile]:
        """Prepare every file, before and after; an error in one is an error for all."""
        changes: dict[str, dict[KeyPath, Any]] = {name: {} for name in self.files}
        for edit in self.edits:
            changes[edit.file][edit.path] = edit.after
        wanted = [
            FileChange(file=file, changes=new, beside=beside, add=True, named=not self._in_folder(file))
            for file, new in changes.items()
            if new
        ]
        return prepare_files(wanted, roots=self.folders)

    def _in_folder(self, file: str) -> bool:
        return any(Path(file).is_relative_to(folder) for folder in self.folders)


def propose_edits(  # noqa: PLR0913 - what goes where, and whom to ask
    aims: Sequence[Aim],
    plan: Plan,
    known: Sequence[ConfigTarget],
    *,
    opened: Callable[[Path], ParsedConfig],
    name: str | None = None,
    beside: bool = False,
    replan: Callable[[dict[str, Any]], Plan],
) -> Proposal:
    """Find the edits that write a plan into all the files, and what none of them can hold."""
    proposal = Proposal()
    drafts: list[Draft] = []
    for target_aim in aims:
        layout = find_layout(target_aim, known, opened=opened, name=name)
        proposal.folders += [target_aim.file] if target_aim.file.is_dir() else []
        stages, said = plan_stages([config for config, _ in layout.stages], plan, replan)
        proposal.said += said
        chosen = safest_setting(plan, stages) if stages else None
        if layout.main is not None:
            file = str(layout.main.file)
            where, document = layout.main.site, layout.main.document
            drafts.append(draft_edits(where, document, plan, file=file, setting=chosen, beside=beside))
            proposal.files.append(file)
        for (config, document), how in zip(layout.stages, stages, strict=True):
            assert layout.stage is not None  # noqa: S101 - stages come from it
            new = edit_stage(layout.stage, config, how, document, main=chosen if layout.main else None)
            drafts.append(Draft(file=config.file, edits=new, settled={"micro_batch", "accumulation"}))
            if new and layout.stage.caveat:
                drafts[-1].say(layout.stage.caveat)
            proposal.files.append(config.file)
        proposal.stages += stages
    _merge_drafts(proposal, drafts)
    return proposal


def _merge_drafts(proposal: Proposal, drafts: Sequence[Draft]) -> None:
    """Merge all edits; report what a file cannot hold only if no other file holds it."""
    settled = set().union(*(draft.settled for draft in drafts))
    if settled & {"gpus", "gpus_per_node"}:
        settled.add("gpus")
    taken: dict[tuple[str, KeyPath], Any] = {}
    for draft in drafts:
        for edit in draft.edits:
            place = (str(Path(edit.file).resolve()), edit.path)
            if taken.setdefault(place, edit.after) == edit.after and edit not in proposal.edits:
                proposal.edits.append(edit)
        proposal.said += [text for text in draft.said if text not in proposal.said]
        for field_name, missing in draft.missing.items():
            if field_name in settled:
                continue
            if field_name == "gpus":
                # Every launcher has to be given it: that is how these frameworks are started.
                proposal.said += [missing.text] * (missing.text not in proposal.said)
            else:
                _add_warning(proposal, missing)
        for warning in draft.warnings:
            _add_warning(proposal, warning)


def _add_warning(proposal: Proposal, warning: ConfigWarning) -> None:
    if all((warning.text, warning.file) != (other.text, other.file) for other in proposal.warnings):
        proposal.warnings.append(warning)


def find_layout(
    aim: Aim,
    known: Sequence[ConfigTarget],
    *,
    opened: Callable[[Path], ParsedConfig],
    name: str | None = None,
) -> ConfigLayout:
    """Find out what a file is, or what the files of a folder are together."""
    if not aim.file.exists():
        raise WrongUse(aim.name, found="there is no such file or folder", cure="Name one that is there.")
    if not aim.file.is_dir():
        return _lay_out_file(aim, known, opened(aim.file), name)
    if aim.below:
        raise WrongUse(
            aim.name, found="a folder has no keys inside", cure=f"Name a file of {aim.file} instead."
        )
    return _lay_out_folder(aim.file, known, opened, name)


def _lay_out_file(
    aim: Aim, known: Sequence[ConfigTarget], document: ParsedConfig, name: str | None
) -> ConfigLayout:
    """Lay out a file that was named: a main config, or a single stage."""
    among = [find_target(name, known)] if name else list(known)
    if not find_sites(document, among, aim.below):
        for target in among:
            stage = target.stage
            if stage and (config := read_stage(document, stage, file=str(aim.file), stem=aim.file.stem)):
                return ConfigLayout(main=None, stage=stage, stages=((config, document),))
    where = find_site(document, known, origin=str(aim.file), name=name, below=aim.below)
    return ConfigLayout(main=OpenedConfig(aim.file, document, where))


def _lay_out_folder(
    folder: Path, known: Sequence[ConfigTarget], opened: Callable[[Path], ParsedConfig], name: str | None
) -> ConfigLayout:
    among = [find_target(name, known)] if name else list(known)
    documents = [(file, opened(file)) for file in list_configs(folder)]
    mains = [
        OpenedConfig(file, document, found)
        for file, document in documents
        for found in find_sites(document, among)
    ]
    if len(mains) > 1:
        listed = ", ".join(f"{main.file} ({main.site.target.name})" for main in mains)
        raise WrongUse(
            str(folder), found=f"it holds {len(mains)} configs: {listed}", cure="Name the one that you mean."
        )
    main = mains[0] if mains else None
    staged = [main.site.target] if main else [target for target in among if target.stage]
    for target in staged:
        stage = target.stage
        if stage is None:
            continue
        stages = [
            (config, document)
            for file, document in documents
            if (main is None or file != main.file)
            and (config := read_stage(document, stage, file=str(file), stem=file.stem)) is not None
        ]
        if stages:
            return ConfigLayout(main=main, stage=stage, stages=tuple(stages))
    if main is None:
        raise WrongUse(
            str(folder),
            found=f"none of its {len(documents)} files is a config that is known here",
            cure="Name a file; `trimtab apply --list-targets` shows what is known.",
        )
    return ConfigLayout(main=main)


def list_configs(folder: Path) -> list[Path]:
    """List the files of a folder that may be configs, without hidden ones and backups."""
    files = sorted(_walk_configs(folder, DEEPEST))
    if len(files) > MOST_FILES:
        raise WrongUse(
            str(folder),
            found=f"it holds more than {MOST_FILES} files that may be configs",
            cure="Name one of them.",
        )
    return files


def _walk_configs(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            if depth > 1:
                yield from _walk_configs(path, depth - 1)
        elif path.suffix in SUFFIXES and path.is_file() and path.name != "trimtab.toml":
            yield path
