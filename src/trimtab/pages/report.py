"""Write a report: the page, and each figure as SVG, and as PNG if a converter is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.files import write_atomic
from trimtab.pages import page
from trimtab.pages.page import read_asset
from trimtab.pages.report_data import read_report_data
from trimtab.pages.svg import WIDE
from trimtab.spec import ReportOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.pages.figures import Figure
    from trimtab.pages.report_data import ReportData

BORDER = 20
"""Around a figure that stands alone."""
SHARPNESS = 2
"""Dots of a PNG for one of the drawing."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NO_PNG = (
    "no PNG was written: nothing here turns SVG into it. Install one: pip install cairosvg, or rsvg-convert "
    "(package librsvg2-bin), or chromium"
)
PATIENCE_S = 60.0


def build_svg_file(figure: Figure) -> str:
    """Build an SVG file of a figure: light, on white, with its title and literal colours."""
    drawing = str(figure.draw(WIDE))
    head, _, rest = drawing.partition(">")
    width, height = (int(head.partition(f' {name}="')[2].partition('"')[0]) for name in ("width", "height"))
    wide, high = width + 2 * BORDER, height + 2 * BORDER
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-BORDER} {-BORDER} {wide} {high}" width="{wide}" '
        f'height="{high}" class="chart" role="group"><style>{_read_plain_style()}</style>'
        f'<rect x="{-BORDER}" y="{-BORDER}" width="{wide}" height="{high}" fill="#ffffff"/>{rest}\n'
    )


def _read_plain_style() -> str:
    """Return the rules for figures with literal light colours, for programs without CSS variables."""
    text = read_asset("style.css")
    light = text[text.index("{") + 1 : text.index("}")]
    colours = (rule.split(":", 1) for rule in light.split(";") if ":" in rule)
    rules = "\n".join(line for line in text.splitlines() if line.startswith(".chart"))
    for name, value in colours:
        rules = rules.replace(f"var({name.strip()})", value.strip())
    return rules


def write_figures(
    figures: Sequence[Figure], folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Path], list[str]]:
    """Write every figure; return the files, and notes on what could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for figure in figures:
            file = folder / f"{figure.name}.svg"
            file.write_text(build_svg_file(figure), encoding="utf-8")
            files.append(file)
    except OSError as error:
        raise WrongUse(
            f"--figures {folder}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a folder that you may write to.",
        ) from error
    convert = find_png_converter()
    if convert is None:
        return files, [NO_PNG]
    for file in list(files):
        picture = file.with_suffix(".png")
        say(picture.name)
        convert(file, picture)
        files.append(picture)
    return sorted(files), []


def find_png_converter() -> Callable[[Path, Path], None] | None:
    """Return an installed converter from SVG to PNG, the lightest first; None if there is none."""
    try:
        import cairosvg  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, OSError):
        # OSError: the package is there and the library that it calls is not.
        pass
    else:
        return lambda file, picture: cairosvg.svg2png(url=str(file), write_to=str(picture), scale=SHARPNESS)
    program = shutil.which("rsvg-convert")
    if program is not None:
        return lambda file, picture: _run_converter(
            [program, "-z", str(SHARPNESS), "-o", str(picture), str(file)], picture
        )
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    return None if browser is None else lambda file, picture: _convert_by_browser(browser, file, picture)


def _convert_by_browser(browser: str, file: Path, picture: Path) -> None:
    head = file.read_text(encoding="utf-8").partition(">")[0]
    size = [head.partition(f' {name}="')[2].partition('"')[0] for name in ("width", "height")]
    with tempfile.TemporaryDirectory(prefix="trimtab-") as profile:
        argv = [
            browser,
            "--headless=new",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--force-device-scale-factor={SHARPNESS}",
            f"--window-size={','.join(size)}",
            f"--screenshot={picture.resolve()}",
            file.resolve().as_uri(),
        ]
        # Chromium refuses to run as root with its sandbox; what it opens here is a drawing of ours.
        argv[1:1] = ["--no-sandbox"] if os.geteuid() == 0 else []
        _run_converter(argv, picture)


def _run_converter(argv: list[str], picture: Path) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)  # noqa: S603
        failed = "" if done.returncode == 0 and picture.is_file() else done.stderr.strip()[-200:] or "no file"
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if failed:
        raise EnvironmentFault(
            f"--figures: {Path(argv[0]).name}",
            found=f"it could not draw {picture.name}: {failed}",
            cure="Install another that can: pip install cairosvg. The SVG files are written.",
        )


def write_report(
    place: Path,
    out: Path,
    *,
    figures: Path | None = None,
    complete: Callable[[ReportData], ReportData] = lambda data: data,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the page of a plan or a run to `out`; return what was written and what is missing.

    `complete` adds what is outside the file or folder, such as the trace of a plan.
    """
    data = complete(read_report_data(place))
    shown = page.draw_figures(data)
    _write_page(out, page.build_page(data, shown))
    files, notes = ([], []) if figures is None else write_figures(shown, figures, say=say)
    return ReportOutput(
        file=str(out),
        figures=tuple(str(file) for file in files),
        shown=tuple(figure.name for figure in shown),
        missing=tuple(data.missing),
        notes=tuple(notes),
    ).to_builtins()


def _write_page(out: Path, text: str) -> None:
    """Write the file atomically: an open browser sees the old page or the new one."""
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
