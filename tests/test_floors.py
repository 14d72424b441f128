"""Imports go down the floors: a module imports from its own floor or from below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trimtab

PACKAGE = Path(trimtab.__file__).parent

FLOORS = [
    {"units", "errors", "version", "files", "cache"},
    {"spec"},
    {"strategies"},
    {"catalog", "jobs"},
    {"engine", "probe"},
    {"trace"},
    {"predict"},
    {"planner"},
    {"configs", "launching", "training", "diagnosis", "exams", "calibration", "watching"},
    {"scripts"},
    {"cli", "api", "calculator", "integrations", "render", "pages", "__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
SEVENTH = len(FLOORS) - 1


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> list[tuple[int, str]]:
    """Line and room of every import from trimtab, the ones inside functions included."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        dotted = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module == "trimtab":
            dotted = [f"trimtab.{name}" for name in dotted]
        elif isinstance(node, ast.ImportFrom):
            dotted = [node.module or ""]
        found += [(node.lineno, name.split(".")[1]) for name in dotted if name.startswith("trimtab.")]
    return found


def upward(room: str, source: str) -> list[str]:
    floor = FLOOR_OF[room]
    return [
        f"line {line}: {room} (floor {floor}) imports {other} (floor {FLOOR_OF[other]})"
        for line, other in imported_rooms(source)
        if FLOOR_OF[other] > floor
    ]


MODULES = [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_floor_and_below(file: Path) -> None:
    assert upward(room_of(file), file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_uses_relative_imports(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]


@pytest.mark.parametrize(
    "source",
    [
        "from trimtab.probe.detect import detect",
        "import trimtab.probe.detect",
        "from trimtab import api",
        "def late():\n    from trimtab.cli import main\n",
        "if True:\n    import trimtab.render\n",
    ],
)
def test_an_upward_import_is_caught(source: str) -> None:
    assert len(upward("catalog", source)) == 1


def test_a_sideways_and_a_downward_import_are_allowed() -> None:
    source = "from trimtab.catalog import lookup\nfrom trimtab.units import GIB\nfrom trimtab import version"
    assert upward("catalog", source) == []


def test_the_package_itself_imports_nothing_when_it_is_imported() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    names = [n.module for n in tree.body if isinstance(n, ast.ImportFrom)]
    assert names == ["__future__", "typing", "trimtab.version"]


def test_every_room_has_a_floor() -> None:
    assert {room_of(file) for file in MODULES} <= set(FLOOR_OF)
