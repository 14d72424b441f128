"""Writes a report: reads what there is, puts the page together, and leaves a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.files import write_atomic
from trimtab.pages import page, pictures
from trimtab.pages.story import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trimtab.pages.story import Story


def write(
    place: Path,
    out: Path,
    *,
    figures: Path | None = None,
    complete: Callable[[Story], Story] = lambda story: story,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the page of a plan or a run to `out`; what was written and what is missing in it.

    `complete` adds what lies outside the file or folder, such as the trace of a plan.
    """
    story = complete(read(place))
    shown = page.drawn(story)
    _whole(out, page.page(story, shown))
    files, notes = ([], []) if figures is None else pictures.write(shown, figures, say=say)
    return {
        "file": str(out),
        "figures": [str(one) for one in files],
        "shown": [one.name for one in shown],
        "missing": list(story.missing),
        "notes": list(notes),
    }


def _whole(out: Path, text: str) -> None:
    """Write a file in one instant: whoever has it open in a browser sees the old page or the new one."""
    try:
        if out.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        write_atomic(out, text)
    except OSError as error:
        raise WrongUse(
            f"-o {out}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a file in a folder that exists and that you may write to.",
        ) from error
