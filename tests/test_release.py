"""What `make release-check` refuses: a wheel or a source archive with wrong contents."""

from __future__ import annotations

import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
from bench import release

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {
    "trimtab/__init__.py": "",
    "trimtab-1.0.dist-info/METADATA": "Requires-Dist: torch>=2.11; extra == 'torch'\n",
}


def write_wheel(folder: Path, files: dict[str, str]) -> Path:
    wheel = folder / "trimtab-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def test_a_wheel_of_the_package_alone_passes(tmp_path: Path) -> None:
    assert release.check_wheel(write_wheel(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("tests/test_cli.py", "", "contains tests/test_cli.py"),
        ("trimtab/docs/page.md", "", "contains trimtab/docs/page.md"),
        ("setup.py", "", "contains setup.py"),
        ("trimtab-1.0.dist-info/METADATA", "Requires-Dist: torch>=2.11\n", "requires torch>=2.11"),
        ("trimtab/large.bin", "x" * 3_000_001, "more than 3,000,000"),
    ],
)
def test_a_wheel_with_a_fault_is_refused(tmp_path: Path, name: str, text: str, fault: str) -> None:
    faults = release.check_wheel(write_wheel(tmp_path, GOOD | {name: text}))
    assert faults
    assert fault in faults[0]


def test_a_source_archive_without_its_tests_is_refused(tmp_path: Path) -> None:
    sdist = tmp_path / "trimtab-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in release.IN_SDIST:
            if not name.startswith("tests/"):
                archive.add(release.ROOT / name, f"trimtab-1.0/{name}")
    assert release.check_sdist(sdist) == [f"{sdist.name} lacks tests/conftest.py"]


def test_the_lowest_versions_are_the_bounds_of_the_package() -> None:
    lowest = release.lowest_requirements()
    assert "rich==13.8" in lowest
    assert all("==" in requirement and ">" not in requirement for requirement in lowest)
    assert not any(requirement.startswith("torch") for requirement in lowest)


def test_the_readme_has_commands_to_run() -> None:
    commands = release.list_readme_commands()
    assert "trimtab plan job.py:Reader --on RTX4090 --out plan.json" in commands
    assert set(release.INLINE) <= set(commands)
