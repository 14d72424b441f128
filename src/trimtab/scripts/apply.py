"""Write the plan of a training command into config files, and into shell scripts that hold the command."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.configs.apply import Proposal, parse_aim
from trimtab.configs.files import FileChange, PreparedFile, prepare_files
from trimtab.configs.formats import SUFFIXES, decode_text, read_bytes, read_config
from trimtab.configs.plan_edits import Edit
from trimtab.configs.text_edit import format_path
from trimtab.errors import TrimtabError, WrongUse
from trimtab.scripts.shell_edit import rewrite_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.configs.apply import Aim
    from trimtab.configs.text_edit import KeyPath, ParsedConfig
    from trimtab.spec import Plan, ScriptPlan
    from trimtab.spec.script import ScriptChange

SHELL_KINDS = ("shell", "sbatch")


@dataclass
class CommandProposal(Proposal):
    """What a plan of a training command changes in files, before anything is written."""

    ready: list[PreparedFile] = field(default_factory=list)
    command: str = ""
    """What to type, where no file holds the command."""

    def prepare(self, *, beside: bool = False) -> list[PreparedFile]:
        """Return every file before and after; `beside` was used already when the proposal was made."""
        return self.ready


def propose_command_edits(plan: Plan, places: Sequence[str], *, beside: bool = False) -> CommandProposal:
    """Find the edits that write a command's plan into its config files and into shell scripts.

    `places` are shell scripts that hold the command (FILE or FILE:LINE), or config files of the plan.
    Without any, the config files of the plan are edited.
    """
    script = plan.script
    assert script is not None  # noqa: S101 - callers check it
    aims = [parse_aim(place) for place in places]
    shells = [aim for aim in aims if _is_shell(aim.file)]
    configs = [aim for aim in aims if aim not in shells]
    proposal = CommandProposal()
    in_files = [change for change in script.edits if change.file]
    on_line = [change for change in script.edits if not change.file]
    _edit_configs(proposal, plan, in_files, configs, beside=beside)
    for aim in shells:
        _edit_shell(proposal, plan, script, on_line, aim, beside=beside)
    if not script.edits:
        proposal.said.append("The plan keeps the command as it is: there is nothing to write.")
    elif on_line and not shells:
        proposal.command = script.command_after_apply or script.command
        names = ", ".join(change.names[0] for change in on_line)
        proposal.said.append(
            f"No file is named that holds the command, so {names} must be typed. To write a shell script "
            "that holds the command: trimtab apply PLAN FILE.sh"
        )
    elif in_files and not on_line and shells:
        proposal.said.append("The command in the script stays as it is: only config files change.")
    return proposal


def _is_shell(file: Path) -> bool:
    """Return whether a file is a shell script, by its name or its first line."""
    kind = SUFFIXES.get(file.suffix.lower(), "")
    if kind or not file.is_file():
        return kind in SHELL_KINDS
    head = file.open("rb").read(4096)
    return bool(re.match(rb"#!.*\b(?:ba|z|da|k)?sh\b", head) or re.search(rb"^#SBATCH\b", head, re.MULTILINE))


def locate_config(plan: Plan, file: str) -> str:
    """Return the path of a plan's config file as seen from the current folder."""
    path = Path(plan.folder or ".", file)
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return os.path.normpath(path.absolute())


def _edit_configs(
    proposal: CommandProposal,
    plan: Plan,
    changes: Sequence[ScriptChange],
    aims: Sequence[Aim],
    *,
    beside: bool,
) -> None:
    named = {aim.file.resolve(): aim for aim in aims}
    by_file: dict[str, list[ScriptChange]] = {}
    for change in changes:
        by_file.setdefault(locate_config(plan, change.file), []).append(change)
    known = {Path(file).resolve() for file in by_file}
    for real, aim in named.items():
        if not aim.file.exists():
            raise WrongUse(aim.name, found="there is no such file", cure="Name one that is there.")
        if real not in known:
            holds = (
                f"it changes keys of {', '.join(by_file)}" if by_file else "it changes the command line only"
            )
            raise WrongUse(
                aim.name,
                found=f"the plan changes nothing in it; {holds}",
                cure="Name one of those, or a shell script that holds the command.",
            )
    wanted = []
    for file, items in by_file.items():
        if named and Path(file).resolve() not in named:
            keys = ", ".join(format_path(change.key) for change in items)
            proposal.said.append(
                f"{file} is not written, since you named other files; the plan changes {keys} there."
            )
            continue
        document = read_config(Path(file))
        proposal.edits += [_make_edit(document, file, change) for change in items]
        proposal.files.append(file)
        new = {change.key: change.after for change in items}
        wanted.append(FileChange(file=file, changes=new, beside=beside, add=True))
    proposal.ready += prepare_files(wanted)


def _make_edit(document: ParsedConfig, file: str, change: ScriptChange) -> Edit:
    path: KeyPath = change.key
    entry = next((entry for entry in document.entries() if entry.path == path), None)
    return Edit(
        file=file,
        key=format_path(path),
        before=None if entry is None else entry.computed or entry.value,
        after=change.after,
        path=path,
        line=None if entry is None else entry.line,
    )


def _edit_shell(  # noqa: PLR0913 - a plan, what of it, and where
    proposal: CommandProposal,
    plan: Plan,
    script: ScriptPlan,
    changes: Sequence[ScriptChange],
    aim: Aim,
    *,
    beside: bool,
) -> None:
    """Change the command in a shell script, and the GPUs in its #SBATCH lines."""
    file = str(aim.file)
    line = _read_line(aim)
    before = read_bytes(aim.file, file)
    text = decode_text(before, file)
    rewritten = rewrite_command(text, file, script.original, changes, line=line, beside=beside)
    proposal.edits += [
        Edit(file=file, key=edit.name, before=edit.before, after=edit.after, line=edit.line)
        for edit in rewritten.edits
    ]
    proposal.said += [f"{file}: {note}." for note in rewritten.notes]
    after = rewritten.text
    if any(change.is_launcher for change in changes) and re.search(r"^#SBATCH\b", after, re.MULTILINE):
        after = _edit_header(proposal, plan, after, file, beside=beside)
    proposal.files.append(file)
    proposal.ready.append(
        PreparedFile(file=file, real=aim.file.resolve(), before=before, after=after.encode())
    )


def _read_line(aim: Aim) -> int | None:
    if not aim.below:
        return None
    if len(aim.below) == 1 and str(aim.below[0]).isdigit():
        return int(aim.below[0])
    raise WrongUse(
        aim.name,
        found=f"{format_path(aim.below)} is no line of a shell script",
        cure=f"Name the file, or a line of it: {aim.file}:12.",
    )


def _edit_header(proposal: CommandProposal, plan: Plan, text: str, file: str, *, beside: bool) -> str:
    """Return the script with the plan's GPUs and nodes in its #SBATCH lines."""
    from trimtab.configs.plan_edits import draft_edits
    from trimtab.configs.targets import find_sites, find_target, list_targets

    document = read_config(text, file)
    sites = find_sites(document, [find_target("slurm", list_targets([Path(file)]))])
    if not sites:
        return text
    draft = draft_edits(sites[0], document, plan, file=file, beside=beside)
    edits = [edit for edit in draft.edits if edit.field in ("gpus", "gpus_per_node", "nodes")]
    proposal.edits += edits
    return document.edit({edit.path: edit.after for edit in edits}, beside=beside, add=True)


def list_file_texts(changes: Sequence[ScriptChange], folder: Path | None = None) -> dict[str, str]:
    """Return the texts of config files with the changes of a command, by absolute path."""
    texts = {}
    for file in dict.fromkeys(change.file for change in changes if change.file):
        path = Path(folder or Path.cwd(), file).resolve()
        texts[str(path)] = edit_text(decode_text(read_bytes(path, file), file), file, changes)
    return texts


def edit_text(text: str, file: str, changes: Sequence[ScriptChange]) -> str:
    """Return the text of a config file with the changes that concern it; computed values go too."""
    new = {change.key: change.after for change in changes if change.file == file}
    return read_config(text, file).edit(new, add=True, beside=True)


def list_missing_edits(plan: Plan) -> list[str]:
    """Return the changes of config files that a plan's command needs and that are not written yet."""
    changes = [change for change in (plan.script.edits if plan.script else ()) if change.form == "config"]
    missing = []
    for change in changes:
        try:
            entries = read_config(Path(locate_config(plan, change.file))).entries()
        except TrimtabError:
            entries = []
        if not any(entry.path == change.key and entry.value == change.after for entry in entries):
            missing.append(change.text)
    return missing
