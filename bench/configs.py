"""How long the edit of a config of 10,000 lines takes, in memory and on disk.

    python bench/configs.py

Prints the best of five for each format: read, edit three values, read the result again and compare every
value; then the same with the write, its backup and the way back.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from machine import machine  # type: ignore[import-not-found] # beside this file

from trimtab.configs import files, formats

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.configs.text_edit import KeyPath

LINES = 10_000
RUNS = 5


def yaml_text() -> str:
    """Stages of a curriculum, one below the other."""
    return "".join(
        f"stage_{number}:\n  batch_size: {number}  # of {number}\n  name: 'stage {number}'\n  lr: 2.0e-4\n"
        for number in range(LINES // 4)
    )


def toml_text() -> str:
    """The same in TOML."""
    return "".join(
        f"[stage_{number}]\nbatch_size = {number}  # of stage {number}\nname = 'stage {number}'\nlr = 2e-4\n"
        for number in range(LINES // 4)
    )


def json_text() -> str:
    """The same in JSON."""
    stages = ",\n".join(
        f'  "stage_{number}": {{\n    "batch_size": {number},\n    "lr": 2e-4\n  }}'
        for number in range(LINES // 4)
    )
    return f"{{\n{stages}\n}}\n"


def python_text() -> str:
    """The same in Python."""
    return "".join(
        f'stage_{number} = {{\n    "batch_size": {number},  # of stage {number}\n    "lr": 2e-4,\n}}\n'
        for number in range(LINES // 4)
    )


TEXTS: dict[str, Callable[[], str]] = {
    "big.yaml": yaml_text,
    "big.toml": toml_text,
    "big.json": json_text,
    "big.py": python_text,
}


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    """Print the table."""
    middle = LINES // 8
    changes: dict[KeyPath, int] = {(f"stage_{at}", "batch_size"): -1 for at in (0, middle, LINES // 4 - 1)}
    print(f"{machine()}, {LINES} lines, best of {RUNS}")
    print(f"{'file':10} {'edit':>9} {'write and revert':>18}")
    for name, text in TEXTS.items():
        source = text()

        def edit(source: str = source, name: str = name) -> str:
            return formats.read_config(source, name).edit(changes)

        def there_and_back(source: str = source, name: str = name) -> None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / name
                file.write_text(source, encoding="utf-8")
                files.write_files(files.prepare_files([files.FileChange(file=str(file), changes=changes)]))
                files.revert_file(str(file))

        print(f"{name:10} {best(edit):8.3f}s {best(there_and_back):17.3f}s")


if __name__ == "__main__":
    main()
