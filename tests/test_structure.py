"""The shape of the source: no import cycles, unique class names, short functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.xdist_group("structure")  # its fixture is made once

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "bench" / "structure.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules(structure: ModuleType) -> Any:
    return structure.read_modules(ROOT / "src")


def test_no_modules_import_each_other_in_a_circle(structure: ModuleType, modules: Any) -> None:
    """Imports inside functions and for typing count as well."""
    assert structure.find_cycles(modules) == []


def test_a_circle_is_found(structure: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "first.py").write_text("from package import second\n", encoding="utf-8")
    (package / "second.py").write_text("def late():\n    from package.first import x\n", encoding="utf-8")
    assert structure.find_cycles(structure.read_modules(tmp_path)) == [["package.first", "package.second"]]


def test_a_class_name_is_unique_in_the_package(structure: ModuleType, modules: Any) -> None:
    assert structure.find_repeated_classes(modules) == {}


def test_functions_stay_short(structure: ModuleType, modules: Any) -> None:
    lengths = structure.function_lengths(modules)
    assert lengths[-1][0] <= 90, lengths[-1]
    assert lengths[len(lengths) // 2][0] <= 8
