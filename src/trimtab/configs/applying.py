"""Which files a plan goes into, and what changes in each: everything about `apply` but the writing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.configs.edits import Draft, drafted
from trimtab.configs.files import Prepared, Wanted, prepared
from trimtab.configs.stages import StageConfig, StagePlan, planned, safest, stage_edits, stage_in
from trimtab.configs.targets import named, site, sites
from trimtab.configs.texts import dotted, undotted
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.configs.edits import Edit
    from trimtab.configs.reading import ConfigWarning
    from trimtab.configs.targets import Site, Stage, Target
    from trimtab.configs.texts import Document, KeyPath
    from trimtab.spec import Plan

SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".jsonc")
"""What is looked at in a folder; other kinds of files have to be named."""
MOST_FILES = 500
DEEPEST = 4


@dataclass(frozen=True)
class Aim:
    """What somebody named: a file or a folder, and a place inside of it."""

    file: Path
    below: KeyPath = ()

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.file}:{dotted(self.below)}" if self.below else str(self.file)


def aim(text: str) -> Aim:
    """FILE or FILE:PATH. A file whose own name has a colon is found before anything is cut off."""
    whole = Path(text)
    if whole.exists() or ":" not in text:
        return Aim(whole)
    file, _, below = text.rpartition(":")
    while ":" in file and not Path(file).exists():
        file, _, more = file.rpartition(":")
        below = f"{more}:{below}"
    return Aim(Path(file), undotted(below))


@dataclass(frozen=True)
class Opened:
    """A config that was read, and what it is."""

    file: Path
    document: Document
    site: Site


@dataclass(frozen=True)
class Layout:
    """The configs that belong together: a main one, and stages of its training."""

    main: Opened | None
    stage: Stage | None = None
    stages: tuple[tuple[StageConfig, Document], ...] = ()


@dataclass
class Proposal:
    """What would change, before anything does."""

    edits: list[Edit] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    warnings: list[ConfigWarning] = field(default_factory=list)
    """Where a file will differ from the plan."""
    stages: tuple[StagePlan, ...] = ()
    files: list[str] = field(default_factory=list)
    """Every file that was looked at for the plan, changed or not."""
    folders: list[Path] = field(default_factory=list)
    """Folders that the user named: the files in them were not named one by one."""

    def prepared(self, *, beside: bool = False) -> list[Prepared]:
        """Every file before and after; an error for one is an error for all."""
        changes: dict[str, dict[KeyPath, Any]] = {name: {} for name in self.files}
        for edit in self.edits:
            changes[edit.file][edit.path] = edit.after
        wanted = [
            Wanted(file=file, changes=new, beside=beside, add=True, named=not self._in_folder(file))
            for file, new in changes.items()
            if new
        ]
        return prepared(wanted, roots=self.folders)

    def _in_folder(self, file: str) -> bool:
        return any(Path(file).is_relative_to(folder) for folder in self.folders)


def proposed(  # noqa: PLR0913 - what goes where, and whom to ask
    aims: Sequence[Aim],
    plan: Plan,
    known: Sequence[Target],
    *,
    opened: Callable[[Path], Document],
    name: str | None = None,
    beside: bool = False,
    replan: Callable[[dict[str, Any]], Plan],
) -> Proposal:
    """The edits that write a plan into all the files, and what none of them can hold."""
    found = Proposal()
    drafts: list[Draft] = []
    for target_aim in aims:
        layout = laid_out(target_aim, known, opened=opened, name=name)
        found.folders += [target_aim.file] if target_aim.file.is_dir() else []
        stages, said = planned([config for config, _ in layout.stages], plan, replan)
        found.said += said
        chosen = safest(plan, stages) if stages else None
        if layout.main is not None:
            file = str(layout.main.file)
            where, document = layout.main.site, layout.main.document
            drafts.append(drafted(where, document, plan, file=file, setting=chosen, beside=beside))
            found.files.append(file)
        for (config, document), how in zip(layout.stages, stages, strict=True):
            assert layout.stage is not None  # noqa: S101 - stages come from it
            new = stage_edits(layout.stage, config, how, document, main=chosen if layout.main else None)
            drafts.append(Draft(file=config.file, edits=new, settled={"micro_batch", "accumulation"}))
            if new and layout.stage.caveat:
                drafts[-1].say(layout.stage.caveat)
            found.files.append(config.file)
        found.stages += stages
    _merge(found, drafts)
    return found


def _merge(found: Proposal, drafts: Sequence[Draft]) -> None:
    """All edits; what one file cannot hold is said only where no other file does."""
    settled = set().union(*(draft.settled for draft in drafts))
    if settled & {"gpus", "gpus_per_node"}:
        settled.add("gpus")
    taken: dict[tuple[str, KeyPath], Any] = {}
    for draft in drafts:
        for edit in draft.edits:
            place = (str(Path(edit.file).resolve()), edit.path)
            if taken.setdefault(place, edit.after) == edit.after and edit not in found.edits:
                found.edits.append(edit)
        found.said += [text for text in draft.said if text not in found.said]
        for field_name, missing in draft.missing.items():
            if field_name in settled:
                continue
            if field_name == "gpus":
                # Every launcher has to be given it: that is how these frameworks are started.
                found.said += [missing.text] * (missing.text not in found.said)
            else:
                _add_warning(found, missing)
        for warning in draft.warnings:
            _add_warning(found, warning)


def _add_warning(found: Proposal, warning: ConfigWarning) -> None:
    if all((warning.text, warning.file) != (other.text, other.file) for other in found.warnings):
        found.warnings.append(warning)


def laid_out(
    aim: Aim, known: Sequence[Target], *, opened: Callable[[Path], Document], name: str | None = None
) -> Layout:
    """What a file is, or what the files of a folder are together."""
    if not aim.file.exists():
        raise WrongUse(aim.name, found="there is no such file or folder", cure="Name one that is there.")
    if not aim.file.is_dir():
        return _alone(aim, known, opened(aim.file), name)
    if aim.below:
        raise WrongUse(
            aim.name, found="a folder has no keys inside", cure=f"Name a file of {aim.file} instead."
        )
    return _folder(aim.file, known, opened, name)


def _alone(aim: Aim, known: Sequence[Target], document: Document, name: str | None) -> Layout:
    """A file that was named: a main config, or a single stage."""
    among = [named(name, known)] if name else list(known)
    if not sites(document, among, aim.below):
        for target in among:
            stage = target.stage
            if stage and (config := stage_in(document, stage, file=str(aim.file), stem=aim.file.stem)):
                return Layout(main=None, stage=stage, stages=((config, document),))
    where = site(document, known, origin=str(aim.file), name=name, below=aim.below)
    return Layout(main=Opened(aim.file, document, where))


def _folder(
    folder: Path, known: Sequence[Target], opened: Callable[[Path], Document], name: str | None
) -> Layout:
    among = [named(name, known)] if name else list(known)
    documents = [(file, opened(file)) for file in configs_in(folder)]
    mains = [
        Opened(file, document, found) for file, document in documents for found in sites(document, among)
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
            and (config := stage_in(document, stage, file=str(file), stem=file.stem)) is not None
        ]
        if stages:
            return Layout(main=main, stage=stage, stages=tuple(stages))
    if main is None:
        raise WrongUse(
            str(folder),
            found=f"none of its {len(documents)} files is a config that is known here",
            cure="Name a file; `trimtab apply --list-targets` shows what is known.",
        )
    return Layout(main=main)


def configs_in(folder: Path) -> list[Path]:
    """The files of a folder that may be configs, hidden ones and backups left out."""
    found = sorted(_walked(folder, DEEPEST))
    if len(found) > MOST_FILES:
        raise WrongUse(
            str(folder),
            found=f"it holds more than {MOST_FILES} files that may be configs",
            cure="Name one of them.",
        )
    return found


def _walked(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            if depth > 1:
                yield from _walked(path, depth - 1)
        elif path.suffix in SUFFIXES and path.is_file() and path.name != "trimtab.toml":
            yield path
