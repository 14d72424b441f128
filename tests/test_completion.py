"""Completion, as bash asks for it: the script that trimtab prints is sourced, and its function is called."""

from __future__ import annotations

import doctest
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.cli import completion

BASH = """
trimtab --show-completion > completion.sh
source completion.sh
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$(complete -p trimtab | sed 's/.*-F \\([^ ]*\\).*/\\1/') trimtab
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(folder: Path, *words: str) -> list[str]:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", "trimtab", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=env,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("de",), ["detect"]),
        (("plan", "--dead"), ["--deadline"]),
        (("plan", "sl"), ["slm", "slm:tiny"]),
        (("plan", "slm", "--on", "4xMI30"), ["4xMI300X", "4xMI300X-192GB"]),
        (("detect", "--on", "2x8xMI30"), ["2x8xMI300X", "2x8xMI300X-192GB"]),
        (("explain", "hsd"), ["hsdp"]),
        (("help", "es"), ["estimate"]),
        # bash completes file names itself where nothing is offered.
        (("plan", "job.p"), []),
        (("nonsense", "x"), []),
    ],
)
def test_bash_completes_commands_options_jobs_devices_and_words(
    tmp_path: Path, words: tuple[str, ...], expected: list[str]
) -> None:
    assert complete(tmp_path, *words) == expected
    assert not (tmp_path / ".bashrc").exists()


def test_every_device_that_is_offered_is_known() -> None:
    from trimtab.catalog.clusters import parse_cluster

    names = completion.complete_devices("")
    assert len(names) > 60
    for name in names:
        assert parse_cluster(name).devices


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(completion).failed == 0
