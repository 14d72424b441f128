"""Configs as people read them on a terminal: edits, settings found, stages."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from trimtab.render import Columns, _indented, _words_table, inert, setting_words
from trimtab.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trimtab.configs.apply import StagePlan
    from trimtab.configs.files import WriteResult
    from trimtab.configs.interpret import ConfigWarning
    from trimtab.configs.show import Display, ShownStage
    from trimtab.configs.targets import ConfigTarget
    from trimtab.spec import Launch

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def diff(text: str) -> Text:
    """A unified diff, coloured where colours are shown."""
    shown = Text(no_wrap=True, overflow="ignore")
    for line in text.splitlines():
        bold = line.startswith(("+++", "---"))
        shown.append(f"{inert(line)}\n", style="bold" if bold else _COLOURS.get(line[:1]))
    shown.rstrip()
    return shown


def written(done: WriteResult) -> RenderableType:
    """Which files are new, and the way back."""
    count = len(done.files)
    many = f"{count} files" if count > 1 else done.files[0]
    lines = [Text(inert(f"written: {many}"), style="bold")]
    return Group(
        *lines,
        *(_indented("backup", one, "dim") for one in done.backups),
        _indented("back", "; ".join(f"trimtab revert {one}" for one in done.files), "dim"),
        *notes(done.said),
    )


def notes(said: Sequence[str]) -> list[RenderableType]:
    """What has to be said beside the edits."""
    return [_indented("note", one, "yellow") for one in said]


def warnings(found: Sequence[ConfigWarning]) -> list[RenderableType]:
    """Where a config differs from a plan, or from what is estimated."""
    return [_indented("warning", one.text, "bold red") for one in found]


def stage_plans(stages: Sequence[StagePlan]) -> RenderableType:
    """How each stage will run."""
    rows = tuple(
        (
            one.name,
            f"{one.setting.micro_batch} x {one.setting.accumulation}",
            str(one.setting.global_batch),
            format_bytes(one.estimate.process_bytes),
            _share(one.estimate.process_bytes, one.estimate.capacity_bytes),
            _seconds(one.estimate.step_s),
        )
        for one in stages
    )
    return Columns(
        ("stage", "batch", "global", "memory", "of GPU", "step"), rows, left=("stage",), folds="stage"
    )


def display(found: Display) -> RenderableType:
    """A config: what was found, what each stage needs, what would be better."""
    where = f" on {found.device}" if found.device and found.job else ""
    job = f", job {found.job}{where}" if found.job else ""
    parts: list[RenderableType] = [Text(inert(f"{found.file}: {found.title}{job}"), style="bold"), Text()]
    table = _words_table("left", "left", "left")
    for one in found.found:
        line = "default" if one.line is None else f"line {one.line}"
        table.add_row(inert(one.key), inert(_value(one.computed or one.value)), line)
    parts.append(Padding(table, (0, 0, 0, 1), expand=False))
    if found.stages:
        parts += [_indented("runs as", _as_it_runs(found), "dim"), Text()]
    if any(one.memory_bytes is not None for one in found.stages):
        parts.append(Padding(_stages(found.stages), (0, 0, 0, 1), expand=False))
    parts += [_indented(stage.name, line, "green") for stage in found.stages for line in stage.advice]
    warned = {one.text for one in found.warnings}
    return Group(*parts, *notes([one for one in found.said if one not in warned]), *warnings(found.warnings))


def _as_it_runs(found: Display) -> str:
    setting = found.stages[0].setting
    batch = f", global batch {found.global_batch}" if found.global_batch else ""
    length = f", {found.seq} tokens a sample" if found.seq else ""
    return f"{setting_words(setting)}{batch}{length}"


def _stages(stages: Sequence[ShownStage]) -> Columns:
    rows = tuple(
        (
            one.name,
            f"{one.setting.micro_batch} x {one.setting.accumulation}",
            format_bytes(one.memory_bytes) if one.memory_bytes is not None else "-",
            _share(one.memory_bytes, one.capacity_bytes),
            one.rating or "-",
            _seconds(one.step_s),
            f"{one.samples_per_s:.1f}" if one.samples_per_s else "-",
        )
        for one in stages
    )
    headings = ("stage", "batch", "memory", "of GPU", "rating", "step", "samples/s")
    return Columns(headings, rows, left=("stage", "rating"), folds="stage", narrowest=10)


def targets(known: Sequence[ConfigTarget]) -> RenderableType:
    """Every target, with the keys it is known by."""
    table = _words_table("left", "left")
    for one in known:
        marks = "; ".join(" or ".join(group[:3]) for group in one.marks)
        kinds = f" ({', '.join(one.formats)})" if one.formats else ""
        table.add_row(one.name, inert(f"{one.title}{kinds}. Known by {marks}."))
    return Group(Text("targets", style="bold"), table)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else "-"


def _seconds(value: float | None) -> str:
    return format_duration(value) if value else "-"


def launch_text(one: Launch, *, several: bool) -> str:
    """What a launch would run, as a shell would take it: the script, or the command with its variables."""
    from trimtab.launching.quoting import format_comment, shell_assignment, shell_line

    head = f"{format_comment(one.script_file or '')}\n" if several else ""
    if one.script is not None:
        return head + one.script
    sets = [f"{shell_assignment(name, value)} \\\n" for name, value in one.environment.items()]
    return head + "".join(sets) + shell_line(one.command) + "\n"


def launch_notes(found: Sequence[Launch]) -> list[RenderableType]:
    """What there is to say about launches, beside their text."""
    lines: dict[str, None] = {}
    for one in found:
        if one.fault:
            lines[f"this run would end at once: {one.fault}"] = None
        if one.script is None:
            lines |= {f"{name}: {why}": None for name, why in one.why.items()}
        if one.starts:
            lines[f"which starts: {shlex.join(one.starts)}"] = None
        lines |= dict.fromkeys(one.notes)
    return notes(list(lines))
