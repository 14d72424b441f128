"""trimtab.toml: a project teaches trimtab its own config.

    [[target]]
    name = "ours"
    title = "our trainer"
    marks = [["optim.samples_per_gpu"]]

    [[target.knobs]]
    field = "micro_batch"
    keys = ["optim.samples_per_gpu"]

The form is that of targets.toml. A target of the same name as a built-in takes its place.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trimtab.configs.targets import ConfigTarget, builtin_targets
from trimtab.errors import BrokenFile

if TYPE_CHECKING:
    from collections.abc import Iterable

PROJECT_FILE = "trimtab.toml"
_CURE = "Mend it as docs/configs.md describes; `trimtab apply --list-targets` shows what is known."


def read_targets(file: Path) -> tuple[ConfigTarget, ...]:
    """The targets of a trimtab.toml."""
    given = str(file)
    try:
        held = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenFile(given, found=f"it cannot be read ({error.strerror})", cure=_CURE) from error
    except UnicodeDecodeError as error:
        raise BrokenFile(given, found="it is not UTF-8 text", cure=_CURE) from error
    except tomllib.TOMLDecodeError as error:
        raise BrokenFile(given, found=f"it is not TOML: {error}", cure=_CURE) from error
    rows = held.get("target", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BrokenFile(
            given, found="target is no list of tables", cure="Write [[target]], with two brackets."
        )
    found = []
    for row in rows:
        try:
            found.append(msgspec.convert(row, ConfigTarget))
        except msgspec.ValidationError as error:
            name = row.get("name", "without a name")
            raise BrokenFile(given, found=f"the target {name} is not right: {error}", cure=_CURE) from error
    return tuple(found)


def find_target_files(files: Iterable[Path]) -> list[Path]:
    """The trimtab.toml of each config: in its folder or the nearest one above it that has any.

    Nothing above the current folder counts for a config within it: what lies there belongs to someone else.
    """
    here = Path.cwd()
    found: dict[Path, None] = {}
    for file in files:
        start = file.absolute() if file.is_dir() else file.absolute().parent
        for folder in (start, *start.parents):
            if (folder / PROJECT_FILE).is_file():
                found[folder / PROJECT_FILE] = None
                break
            if folder == here:
                break
    return list(found)


def list_targets(files: Iterable[Path] = ()) -> tuple[ConfigTarget, ...]:
    """The targets that hold for these configs: the projects' own first, then those that come with trimtab."""
    own = [target for file in find_target_files(files) for target in read_targets(file)]
    names = {target.name for target in own}
    return (*own, *(target for target in builtin_targets() if target.name not in names))
