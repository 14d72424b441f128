"""Detect the format of a config file and parse it.

>>> read_config(b'{"batch": 4}', "ds_config.json").kind
'json'
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from trimtab.configs.text_edit import ParsedConfig, line_and_column
from trimtab.errors import BrokenFile, EnvironmentFault, WrongUse
from trimtab.units import format_bytes

LARGEST = 20 * 10**6
"""Bytes. A config has thousands; what has more is data with a misleading name."""

KINDS = ("yaml", "toml", "json", "python", "shell", "sbatch")
SUFFIXES = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".jsonc": "json",
    ".json5": "json",
    ".py": "python",
    ".env": "shell",
    ".sh": "shell",
    ".bash": "shell",
    ".sbatch": "sbatch",
    ".slurm": "sbatch",
    ".sub": "sbatch",
    ".job": "sbatch",
}
_SBATCH = re.compile(r"^#SBATCH\b", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^(?:export +)?[A-Za-z_]\w*=", re.MULTILINE)
_HEADER = re.compile(r"^\s*\[\[?[^\]\n]+\]\]?\s*(?:#.*)?$", re.MULTILINE)
_EQUATION = re.compile(r"^\s*[\w.\"'-]+\s+=\s", re.MULTILINE)
_COLON = re.compile(r"^\s*(?:- )?[\w.\"'/-]+\s*:(?:\s|$)", re.MULTILINE)


def read_config(source: Path | bytes | str, origin: str = "", kind: str | None = None) -> ParsedConfig:
    """Parse a config from a path or its content; `origin` is its name in messages."""
    if isinstance(source, Path):
        origin = origin or str(source)
        source = read_bytes(source, origin)
    text = decode_text(source, origin) if isinstance(source, bytes) else source
    format_name = kind or guess_format(text, origin)
    if format_name not in KINDS:
        raise WrongUse(
            f"the format {format_name}",
            found="it is not one that is known",
            cure=f"Name one of {_list_formats()}.",
        )
    module = import_module(f"trimtab.configs.{'shell' if format_name == 'sbatch' else format_name}_text")
    page: ParsedConfig = getattr(module, f"read_{format_name}")(text, origin)
    return page


def read_bytes(path: Path, origin: str = "") -> bytes:
    """Read the bytes of a config file; check its size first."""
    origin = origin or str(path)
    try:
        about = path.stat()
        if path.is_dir():
            raise WrongUse(origin, found="it is a folder", cure="Name a file in it.")
        if not path.is_file():
            raise WrongUse(origin, found="it is no ordinary file", cure="Name a config file.")
        if about.st_size > LARGEST:
            raise _size_error(origin, about.st_size)
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise WrongUse(origin, found="there is no such file", cure="Check the name.") from None
    except OSError as problem:
        cure = "Make it readable, or name another."
        raise EnvironmentFault(origin, found=f"it cannot be read: {problem.strerror}", cure=cure) from None
    if len(data) > LARGEST:  # it grew, or its size was not told
        raise _size_error(origin, len(data))
    return data


def _size_error(origin: str, size: int) -> WrongUse:
    found = f"it has {format_bytes(size)}; a config has at most {format_bytes(LARGEST)}"
    return WrongUse(origin, found=found, cure="Name the config, not the data.")


def decode_text(data: bytes, origin: str) -> str:
    """Decode bytes as UTF-8; a byte order mark stays in front."""
    if len(data) > LARGEST:
        raise _size_error(origin, len(data))
    for mark, name in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if data.startswith(mark):
            raise BrokenFile(origin, found=f"it is {name}, not UTF-8", cure="Save it as UTF-8 first.")
    if b"\0" in data:
        at = data.index(b"\0")
        raise BrokenFile(origin, found=f"it is binary: byte {at + 1} is zero", cure="Name a config in text.")
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        before = data[: problem.start].decode()
        line, column = line_and_column(before, len(before))
        raise BrokenFile(
            f"{origin}:{line}:{column}",
            found=f"byte 0x{data[problem.start]:02x} is not UTF-8",
            cure="Save the file as UTF-8 first.",
        ) from None


def guess_format(text: str, origin: str) -> str:
    """Guess the format by the file's name, then by its content."""
    name = Path(origin).name
    kind = (
        "shell" if name == ".env" or name.startswith(".env.") else SUFFIXES.get(Path(name).suffix.lower(), "")
    )
    if kind == "shell" and _SBATCH.search(text):
        return "sbatch"
    return kind or _guess_by_content(text, origin)


def _guess_by_content(text: str, origin: str) -> str:
    body = text.lstrip("\ufeff \t\r\n")
    if _SBATCH.search(text):
        return "sbatch"
    if body.startswith(("{", "//", "/*")):
        return "json"
    tables = len(_HEADER.findall(text)) + len(_EQUATION.findall(text))
    counts = {
        "toml": tables,
        "yaml": len(_COLON.findall(text)),
        "shell": len(_ASSIGNMENT.findall(text)),
    }
    best = max(counts, key=lambda kind: counts[kind])
    if not counts[best] or list(counts.values()).count(counts[best]) > 1:
        raise WrongUse(
            origin or "the text",
            found="neither its name nor its content tells the format",
            cure=f"Name one of {_list_formats()}, or give the file its usual suffix.",
        )
    return best


def _list_formats() -> str:
    return ", ".join(KINDS)
