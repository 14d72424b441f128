"""Environments without torch: the declared dependencies of trimtab, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import trimtab

ROOT = Path(__file__).parent.parent


def make_environment(folder: Path) -> Path:
    """Make a virtual environment without pip, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return folder / "bin" / "python"


def link_dependencies(python: Path) -> None:
    """Link this source tree and what it requires, recursively, from the environment of the tests."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = python.parent.parent / "lib" / version / "site-packages"
    for name in sorted(find_required("trimtab") - {"trimtab"}):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            (site / top).symlink_to(Path(str(package.locate_file(top))))
    (site / "trimtab").symlink_to(Path(trimtab.__file__).parent)


def find_required(name: str) -> set[str]:
    """Return a package and all that it requires without an extra."""
    names: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in names:
            names.add(current)
            required = distribution(current).requires or []
            needed = [text for text in required if "extra ==" not in text and applies(text)]
            waiting += [
                re.split(r"[^\w.-]", text, maxsplit=1)[0].lower().replace("_", "-") for text in needed
            ]
    return names


def applies(requirement: str) -> bool:
    """Return whether a requirement holds for this machine: those of Windows and old Pythons do not."""
    marker = requirement.partition(";")[2]
    return not marker or not re.search(r"win32|Windows|python_version < |python_full_version < ", marker)


def run_bare(python: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run trimtab with that Python, without this machine's Slurm."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM"))}
    return subprocess.run(
        [str(python), "-m", "trimtab", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env=env | {"PATH": str(python.parent), "TRIMTAB_CACHE": str(cwd / "cache"), "COLUMNS": "80"},
    )
