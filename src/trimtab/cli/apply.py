"""The commands `trimtab apply`, `trimtab show` and `trimtab revert`, for your own config files."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from trimtab import api
from trimtab.cli.console import Json, print_json, print_notes, print_text
from trimtab.cli.options import Yes, command, state_devices
from trimtab.cli.progress import progress
from trimtab.errors import WrongUse
from trimtab.render import (
    COMMAND_WIDTH,
    Columns,
    _make_words_table,
    describe_setting,
    escape_control,
    render_labelled,
)
from trimtab.spec.requests import ApplyRequest, ShowRequest
from trimtab.strategies import strategy_of
from trimtab.units import format_bytes, format_duration, format_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trimtab.configs.apply import StagePlan
    from trimtab.configs.files import WriteResult
    from trimtab.configs.show import Display, ShownStage
    from trimtab.configs.targets import ConfigTarget

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
NOTHING_WRITTEN = "nothing was written; --yes writes"


@command(ApplyRequest)
def apply(
    request: ApplyRequest,
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="The same as --to: a config file, or a shell script that holds the training command.",
        ),
    ] = None,
    yes: Yes = False,
    list_targets: Annotated[
        bool, typer.Option("--list-targets", help="List the config formats that trimtab understands.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a plan into your own config files, with a backup.

    The diff comes first. Comments, order and formatting stay. Nothing is written if any file fails, or
    without a yes. What a config cannot hold is reported. The plan of a training command goes into the config
    files that the command names, and into the shell script that you name.
    """
    request = request.replace(to=(*api.config_places(request.to), *(files or ())))
    if list_targets:
        _list_targets(api.config_places(request.to), json=json)
        return
    if request.plan is None:
        raise WrongUse(
            "trimtab apply",
            found="there is no PLAN",
            cure="Write it like: trimtab apply plan.json --to config.yaml",
        )
    if request.network is not None and request.on is None:
        raise WrongUse(
            f"--network {request.network}",
            found="the plan holds the devices and their network already",
            cure="Give --on DEVICES too, or state it where the plan is made: trimtab plan --network.",
        )
    request = state_devices(request)
    with progress("planning") as shown:
        plan, proposal = api.propose(request.replace(say=shown.say))
    ready = proposal.prepare(beside=request.beside)
    preview = api.applied(proposal, ready, None)
    if not json:
        _show_proposal(preview, proposal.stages)
        if preview.get("command"):
            print_text(_render_typed(preview["command"]))
        print_notes(proposal.said)
        print_notes((warning.text for warning in proposal.warnings), label="warning", style="bold red")
    changes = bool(preview["diff"])
    written = api.write_plan(ready, plan) if changes and (yes or (not json and _confirmed())) else None
    if json:
        print_json(api.applied(proposal, ready, written))
    elif written:
        print_text(_written(written))
    elif changes:
        print_text(NOTHING_WRITTEN, errors=True)


def _show_proposal(preview: dict[str, Any], stages: Sequence[StagePlan]) -> None:
    if stages:
        print_text(_stage_plans(stages))
        print_text("")
    if preview["diff"]:
        _print_diff(preview["diff"])
    elif preview["files"]:
        print_text(f"{', '.join(preview['files'])}: says what the plan does already; nothing to write")


def _render_typed(line: str) -> RenderableType:
    """Return the command line to type, where no file holds the command."""
    import shlex

    from trimtab.launching.quoting import shell_line

    text = line if len(line) <= COMMAND_WIDTH else shell_line(shlex.split(line))
    return Group(Text(" type this", style="bold"), Text(f"   {escape_control(text)}", style="bold green"))


def _confirmed() -> bool:
    """Ask for a yes at the prompt; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    sys.stdout.flush()
    sys.stderr.write("Write this? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _list_targets(places: Sequence[str], *, json: bool) -> None:
    from trimtab.configs.apply import parse_aim
    from trimtab.configs.targets import TargetsOutput, list_targets

    targets = list_targets([parse_aim(place).file for place in places] or [parse_aim(".").file])
    if json:
        print_json(TargetsOutput(targets=tuple(targets)).to_builtins())
    else:
        print_text(_targets(targets))


@command(ShowRequest)
def show(request: ShowRequest, *, json: Json = False) -> None:
    """Show what a config would use, and what would be better.

    Stage by stage, if the config has stages. Degrees of parallelism are checked against the model and the
    GPUs. Nothing is written. Exit code 3 when a stage does not fit, 2 when a degree is illegal.
    """
    with progress("planning") as shown:
        display = api.show(**state_devices(request).replace(say=shown.say).arguments())
    if json:
        print_json(display.to_builtins())
    else:
        print_text(show_display(display))
    if any(finding.severity == "error" for finding in display.degrees):
        raise typer.Exit(2)
    if any(stage.fits is False for stage in display.stages):
        raise typer.Exit(3)


def revert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A config file that `trimtab apply` wrote.")],
    backup: Annotated[
        int | None, typer.Option(metavar="N", help="Number of the backup to restore; default: the last.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Restore even if the file was edited since; see the diff first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking at a terminal.")] = False,
    json: Json = False,
) -> None:
    """Put back the config that `trimtab apply` saved before it wrote.

    At a terminal the diff is shown and you are asked for a yes; a script is not asked. The present content is
    kept as another backup.
    """
    asks = sys.stdin.isatty() and not (yes or json)
    done = api.revert(file, backup=backup, force=force, write=not asks)
    if json:
        print_json(done)
        return
    if done["diff"]:
        _print_diff(done["diff"])
    if asks and done["diff"]:
        if not _confirmed():
            print_text(NOTHING_WRITTEN, errors=True)
            return
        done = api.revert(file, backup=done["number"], force=force)
    before = f"as before write {done['number']}"
    if done["restored"]:
        print_text(f"{file}: put back {before}; what was there is kept in {done['backup']}")
    else:
        print_text(f"{file}: is {before} already; nothing was written")


def _print_diff(diff: str) -> None:
    """Print a unified diff, in colours on a terminal."""
    if not sys.stdout.isatty():
        sys.stdout.write(diff)
        return
    text = Text(no_wrap=True, overflow="ignore")
    for line in diff.splitlines():
        bold = line.startswith(("+++", "---"))
        text.append(f"{escape_control(line)}\n", style="bold" if bold else _COLOURS.get(line[:1]))
    text.rstrip()
    print_text(text)


def _written(written: WriteResult) -> RenderableType:
    """Return which files are new, and how to revert them."""
    files = f"{len(written.files)} files" if len(written.files) > 1 else written.files[0]
    return Group(
        Text(escape_control(f"written: {files}"), style="bold"),
        *(render_labelled("backup", backup, "dim") for backup in written.backups),
        render_labelled("back", "; ".join(f"trimtab revert {file}" for file in written.files), "dim"),
        *(render_labelled("note", note, "yellow") for note in written.said),
    )


def _stage_plans(stages: Sequence[StagePlan]) -> RenderableType:
    """Return how each stage will run."""
    rows = tuple(
        (
            stage.name,
            f"{stage.setting.micro_batch} x {stage.setting.accumulation}",
            str(stage.setting.global_batch),
            format_bytes(stage.estimate.process_bytes),
            _share(stage.estimate.process_bytes, stage.estimate.capacity_bytes),
            _seconds(stage.estimate.step_s),
        )
        for stage in stages
    )
    return Columns(
        ("stage", "batch", "global", "memory", "of GPU", "step"), rows, left=("stage",), folds="stage"
    )


LONGEST_VALUE = 30
"""Characters of a value in the table of `show`."""


def show_display(found: Display) -> RenderableType:
    """Return a config: what was found, what each stage needs, what would be better."""
    where = f" on {found.device}" if found.device and found.job else ""
    job = f", job {found.job}{where}" if found.job else ""
    parts: list[RenderableType] = [
        Text(escape_control(f"{found.file}: {found.title}{job}"), style="bold"),
        Text(),
    ]
    table = _make_words_table("left", "left", "left")
    # A key may hold two of our fields, as `optim` does.
    for item in {item.key: item for item in found.found}.values():
        line = "default" if item.line is None else f"line {item.line}"
        value = format_value(item.computed or item.value)
        # The end of a long value says more: torchtune.modules.loss.LinearCrossEntropyLoss.
        shown = value if len(value) <= LONGEST_VALUE else f"...{value[3 - LONGEST_VALUE :]}"
        table.add_row(Text(escape_control(item.key)), Text(escape_control(shown)), line)
    parts.append(Padding(table, (0, 0, 0, 1), expand=False))
    if found.stages:
        parts += [render_labelled("runs as", _as_it_runs(found), "dim"), Text()]
    for finding in found.degrees:
        colour = "red" if finding.severity == "error" else "yellow"
        parts.append(render_labelled(finding.severity.value, finding.sentence(), colour))
    if found.degrees:
        parts.append(Text())
    if any(stage.memory_bytes is not None for stage in found.stages):
        parts.append(Padding(_stages(found.stages), (0, 0, 0, 1), expand=False))
    parts += [render_labelled(stage.name, line, "green") for stage in found.stages for line in stage.advice]
    warnings = [warning.text for warning in found.warnings]
    parts += [render_labelled("note", note, "yellow") for note in found.said if note not in warnings]
    return Group(*parts, *(render_labelled("warning", warning, "bold red") for warning in warnings))


def _as_it_runs(found: Display) -> str:
    setting = found.stages[0].setting
    batch = f", global batch {found.global_batch}" if found.global_batch else ""
    length = f", {found.seq} tokens a sample" if found.seq else ""
    words = describe_setting(setting)
    # A pipeline names its stages itself.
    named_already = ("pp",) if strategy_of(setting).has_schedule else ()
    for axis in ("tp", "cp", "pp"):
        degree = getattr(setting.mesh, axis, 1)
        if degree > 1 and f"{axis} {degree}" not in words and axis not in named_already:
            words += f", {axis} {degree}"
    return f"{words}{batch}{length}"


def _stages(stages: Sequence[ShownStage]) -> Columns:
    rows = tuple(
        (
            stage.name,
            f"{stage.setting.micro_batch} x {stage.setting.accumulation}",
            format_bytes(stage.memory_bytes) if stage.memory_bytes is not None else "-",
            _share(stage.memory_bytes, stage.capacity_bytes),
            stage.rating or "-",
            _seconds(stage.step_s),
            f"{stage.samples_per_s:.1f}" if stage.samples_per_s else "-",
        )
        for stage in stages
    )
    headings = ("stage", "batch", "memory", "of GPU", "rating", "step", "samples/s")
    return Columns(headings, rows, left=("stage", "rating"), folds="stage", narrowest=10)


def _targets(targets: Sequence[ConfigTarget]) -> RenderableType:
    """Return every target, with the keys it is known by."""
    table = _make_words_table("left", "left")
    for target in targets:
        marks = "; ".join(" or ".join(group[:3]) for group in target.marks)
        kinds = f" ({', '.join(target.formats)})" if target.formats else ""
        table.add_row(target.name, Text(escape_control(f"{target.title}{kinds}. Known by {marks}.")))
    return Group(Text("targets", style="bold"), table)


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else "-"


def _seconds(value: float | None) -> str:
    return format_duration(value) if value else "-"
