"""Writes a report: reads what there is, puts the page together, and leaves a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.pages import page, pictures
from trimtab.pages.story import read_report_data

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trimtab.pages.story import ReportData


def write_report(
    place: Path,
    out: Path,
    *,
    figures: Path | None = None,
    complete: Callable[[ReportData], ReportData] = lambda story: story,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the page of a plan or a run to `out`; what was written and what is missing in it.

    `complete` adds what lies outside the file or folder, such as the trace of a plan.
    """
    story = complete(read_report_data(place))
    shown = page.draw_figures(story)
    _write_page(out, page.build_page(story, shown))
    files, notes = ([], []) if figures is None else pictures.write_figures(shown, figures, say=say)
    return {
        "file": str(out),
        "figures": [str(file) for file in files],
        "shown": [figure.name for figure in shown],
        "missing": list(story.missing),
        "notes": list(notes),
    }


def _write_page(out: Path, text: str) -> None:
    """Write a file in one instant: whoever has it open in a browser sees the old page or the new one."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        if out.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(out)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise WrongUse(
            f"-o {out}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a file in a folder that exists and that you may write to.",
        ) from error
