"""Tests of one group run in one process, so that what they share is made once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

GROUP = """
import os
import pytest

pytestmark = pytest.mark.xdist_group("together")

@pytest.mark.parametrize("number", range(8))
def test_where(number):
    with open(os.environ["PLACES"], "a") as file:
        file.write(f"{os.getpid()}\\n")
"""


def test_a_group_runs_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_group.py").write_text(GROUP, encoding="utf-8")
    places = tmp_path / "places"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-c", os.devnull]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env=environment | {"PLACES": str(places)},
        check=True,
        capture_output=True,
    )
    written = places.read_text(encoding="utf-8").split()
    assert len(written) == 8
    assert len(set(written)) == 1
