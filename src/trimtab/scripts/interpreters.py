"""Find the Python that runs a training command, and whether trimtab is installed for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.catalog.torch_release import require_supported_torch
from trimtab.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

PYTHON_NAME = re.compile(r"^(python|pypy)(\d+(\.\d+)*t?)?(\.exe)?$")
HEAD_BYTES = 1024
"""Enough of a file for its first lines: pip writes long paths of interpreters on the second."""
ANSWER_S = 60.0
"""Longest wait for an interpreter to say what it is; a network file system can be slow the first time."""

_DESCRIBE = """
import json, sys
from importlib.util import find_spec
said = {"prefix": sys.prefix, "version": list(sys.version_info[:3]), "torch": find_spec("torch") is not None}
try:
    from trimtab.version import VERSION
    said["trimtab"] = VERSION
    said["missing"] = [name for name in ("msgspec", "numpy") if find_spec(name) is None]
except ImportError:
    said["trimtab"] = None
print(json.dumps(said))
"""


def is_python(word: str) -> bool:
    """Return whether a word is the name or the path of a Python.

    >>> is_python("/usr/bin/python3.11"), is_python("pythonista")
    (True, False)
    """
    return PYTHON_NAME.match(os.path.basename(word)) is not None  # noqa: PTH119 - a word, not a path yet


def find_program(word: str, environment: Mapping[str, str]) -> Path | None:
    """Return the file that a shell would run for a word; None if there is none."""
    path = environment.get("PATH", os.defpath)
    match = shutil.which(word, path=path)
    return Path(os.path.abspath(match)) if match else None  # noqa: PTH100 - a venv's symlink must not be resolved


def read_head(file: Path) -> str:
    """Return the first lines of a file as text; empty if it cannot be read or is a binary."""
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError:
        return ""
    return "" if b"\0" in head else head.decode("utf-8", errors="replace")


def read_shebang(file: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the Python that a file's first lines name; None if they name another program or none.

    A path that is too long for the kernel is on the second line, after `#!/bin/sh`.
    """
    lines = read_head(file).splitlines()
    if not lines or not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if len(lines) > 1 and lines[1].startswith("'''exec'"):
        words = [lines[1].removeprefix("'''exec'").split('"$0"')[0].strip().strip('"')]
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or not is_python(words[0]):
        return None
    return Path(words[0]) if "/" in words[0] else find_program(words[0], environment)


def find_shim_target(file: Path, environment: Mapping[str, str]) -> Path:
    """Return the program behind a shim of pyenv, or the file itself."""
    if "pyenv" not in read_head(file):
        return file
    pyenv = find_program("pyenv", environment)
    if pyenv is None:
        return file
    done = _run([str(pyenv), "which", file.name], environment)
    return Path(done.strip()) if done.strip() else file


def _run(words: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Return what a program prints; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own interpreter, named in the user's own command
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_S,
            env=None if environment is None else dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@cache
def describe_interpreter(interpreter: str) -> dict[str, Any] | None:
    """Return what an interpreter says about itself; None if it does not run.

    Keys: prefix, version, torch (whether it is installed), trimtab (its version, or None), missing.
    """
    text = _run([interpreter, "-c", _DESCRIBE])
    try:
        said = json.loads(text.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def is_own_environment(interpreter: str) -> bool:
    """Return whether an interpreter has the same installed packages as trimtab."""
    # A venv's python is a symlink to the base's, so the folder counts, not the file behind it.
    folder = Path(interpreter).parent
    if os.path.realpath(folder.parent) == os.path.realpath(sys.prefix):
        return True
    said = describe_interpreter(interpreter)
    return said is not None and os.path.realpath(str(said["prefix"])) == os.path.realpath(sys.prefix)


def can_import_trimtab(interpreter: str) -> str | None:
    """Return None if an interpreter can run this trimtab and torch, else the reason why not."""
    if is_own_environment(interpreter):
        require_supported_torch()
        return None
    said = describe_interpreter(interpreter)
    if said is None:
        return f"{interpreter} does not run"
    return _find_lack(interpreter, said)


def _find_lack(interpreter: str, said: Mapping[str, Any]) -> str | None:
    """Return what an interpreter lacks to run this trimtab; None if nothing."""
    if tuple(said["version"]) < (3, 11):
        version = ".".join(map(str, said["version"]))
        return f"{interpreter} is Python {version}, and trimtab needs 3.11 or newer"
    if said["trimtab"] is None:
        return f"{interpreter} has no trimtab; install it there: {interpreter} -m pip install trimtab"
    if said["trimtab"] != VERSION:
        return f"{interpreter} has trimtab {said['trimtab']}, and this is {VERSION}"
    if said["missing"] or not said["torch"]:
        lacking = ", ".join([*said["missing"], *([] if said["torch"] else ["torch"])])
        return f"{interpreter} has trimtab, but not what it needs: {lacking}"
    return None
