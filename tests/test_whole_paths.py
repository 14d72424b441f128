"""Paths are never broken in what people read, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab import render
from trimtab.errors import WrongUse

LONG = "/data/" + "a-folder-of-experiments/" * 6 + "train_config.yaml"
SENTENCE = f"the file {LONG} is not here, and these words are many enough to need several lines by themselves"


def table() -> Table:
    made = Table(box=None)
    made.add_column("key", no_wrap=True)
    made.add_column("value", overflow="fold")
    made.add_row("micro_batch", SENTENCE)
    return made


def shown(what: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(render.WholePaths(what), crop=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [30, 80, 120, 400])
@pytest.mark.parametrize(
    "what",
    [
        Text(SENTENCE),
        SENTENCE,
        render.render_error(WrongUse(f"--to {LONG}", found=SENTENCE, cure="Name another file.")),
        render.render_labelled("note", SENTENCE, "yellow"),
        table(),
        Group(Text("first"), Padding(table(), (0, 0, 0, 1), expand=False)),
    ],
    ids=["text", "string", "error", "note", "table", "padded"],
)
def test_a_path_stays_whole_at_every_width(what: RenderableType, width: int) -> None:
    lines = shown(what, width)
    assert any(LONG in line for line in lines)
    assert " ".join(SENTENCE.split()) in " ".join(" ".join(lines).replace("micro_batch", "").split())


def test_only_the_path_itself_is_wider_than_the_terminal() -> None:
    error = WrongUse("--to", found=SENTENCE, cure="Name another file.")
    lines = shown(Group(Text("word " * 40), render.render_error(error)), 40)
    assert [line.strip() for line in lines if len(line) > 40] == [LONG]


def test_lines_of_a_note_begin_below_each_other() -> None:
    first, *others = shown(render.render_labelled("note", "word " * 30, "yellow"), 40)
    assert first.startswith("  note: word")
    assert all(line.startswith(" " * 8 + "word") for line in others)
