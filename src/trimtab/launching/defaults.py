"""Read launch defaults from the table [launch] of trimtab.toml.

    [launch]
    partition = "gpu"
    account = "vision"
    modules = ["cuda/12.8", "python/3.12"]
    activate = "/home/ada/venv"
    sbatch = ["--constraint=nvlink"]
    lines = ["ulimit -n 65536"]

Options of the command line override it. An unknown key is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.configs.targets import PROJECT_FILE
from trimtab.configs.toml_text import load_toml
from trimtab.errors import BrokenFile, find_nearest
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from pathlib import Path

TABLE = "launch"
TABLES = ("target", TABLE)
"""Everything that a trimtab.toml may hold."""


class LaunchDefaults(Noun, frozen=True, kw_only=True):
    """Defaults of every launch from a folder."""

    modules: tuple[str, ...] = ()
    """Loaded with `module load`, in this order."""
    activate: str = ""
    """A virtual environment, or the script that activates it."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Time limit, as in 12h; otherwise from the estimate."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, as in --constraint=nvlink."""
    lines: tuple[str, ...] = ()
    """Lines of shell before the run, as they are."""
    environment: dict[str, str] = {}
    offline: bool = False
    """Whether nodes are kept from asking Hugging Face for files that they could not get."""
    image: str | None = None
    """Of containers."""
    namespace: str | None = None
    claim: str | None = None
    """A PersistentVolumeClaim that all pods share."""
    mount: str = "/workspace"
    """Where it is in the pods; runs are kept below it."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""

    def faults(self) -> list[str]:
        """Every text is one line."""
        lists = {
            name: getattr(self, name) for name in ("modules", "sbatch", "lines") if getattr(self, name)
        } | {"environment": tuple(self.environment.values())}
        single = (
            "activate",
            "partition",
            "account",
            "qos",
            "image",
            "namespace",
            "claim",
            "mount",
            "runtime",
        )
        lists |= {name: (getattr(self, name),) for name in single if getattr(self, name)}
        wrong = [
            f"{name} holds a line break"
            for name, texts in lists.items()
            if any("\n" in text or "\r" in text or "\0" in text for text in texts)
        ]
        wrong += [
            f"sbatch has {option!r}, which begins with no --" for option in self.sbatch if option[:2] != "--"
        ]
        return wrong + [f"{name} is empty" for name in ("modules", "lines") if "" in getattr(self, name)]


def read_defaults(folder: Path) -> LaunchDefaults:
    """Read the launch defaults of a folder's trimtab.toml; none if there is no such file or table."""
    file = folder / PROJECT_FILE
    try:
        content = load_toml(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        return LaunchDefaults()
    except OSError as error:
        raise _file_error(file, f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _file_error(file, f"it is not TOML: {error}") from error
    except BrokenFile as error:
        raise _file_error(file, f"it is not TOML: {error.found}") from None
    return parse_defaults(content, file)


def parse_defaults(content: dict[str, Any], file: Path) -> LaunchDefaults:
    """Convert the content of a trimtab.toml to launch defaults."""
    strange = [key for key in content if key not in TABLES]
    if strange:
        raise _file_error(file, f"there is {_name_unknown(strange[0], TABLES)}")
    table = content.get(TABLE, {})
    if not isinstance(table, dict):
        raise _file_error(file, f"{TABLE} is no table: write [{TABLE}] on a line of its own")
    fields = LaunchDefaults.__struct_fields__
    strange = [key for key in table if key not in fields]
    if strange:
        raise _file_error(file, f"[{TABLE}] has {_name_unknown(strange[0], fields)}")
    try:
        return msgspec.convert(table, LaunchDefaults)
    except msgspec.ValidationError as error:
        raise _file_error(file, f"[{TABLE}] is not right: {error}") from error


def _name_unknown(name: str, names: tuple[str, ...]) -> str:
    close = find_nearest(name, names, count=1)
    hint = f" (perhaps {close[0]})" if close else ""
    return f"{name!r}, which is none of {', '.join(names)}{hint}"


def _file_error(file: Path, found: str) -> BrokenFile:
    return BrokenFile(
        str(file), found=found, cure="Fix it as docs/launching.md describes, or take the line out."
    )
