"""Read YAML files strictly, with the line of each value for error messages.

A duplicate key is an error that names both lines, and `2e-4` is a number. Not supported: merge keys, several
documents, tags. trimtab.configs has a separate reader to edit files in place.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from pathlib import Path

    import yaml

_TRUE = {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}
_FALSE = {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}
NULL = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_BASES = {
    2: re.compile(r"[-+]?0b[01_]+"),
    8: re.compile(r"[-+]?0o?[0-7_]+"),
    16: re.compile(r"[-+]?0x[0-9a-fA-F_]+"),
}
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(NULL),
    **dict.fromkeys(_TRUE, True),
    **dict.fromkeys(_FALSE, False),
    **{f"{sign}.{word}": math.inf for word in ("inf", "Inf", "INF") for sign in ("", "+")},
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_MOST_DIGITS = 1000
_MOST_LEVELS, _MOST_VALUES = 40, 20_000
"""Maximum levels and values of a file, aliases included."""
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class YamlPage:
    """The values of a file and their lines."""

    file: Path
    values: dict[str, Any]
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)

    def at(self, *path: str | int) -> str:
        """Return the file and line of a value, for an error."""
        line = self.lines.get(path)
        return f"{self.file}, line {line}" if line else str(self.file)


def read_yaml(file: Path) -> YamlPage:
    """Read a YAML file with keys at the top level; raise WrongUse if it is invalid."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WrongUse(
            str(file), found=f"it cannot be read ({error.strerror})", cure="Name another."
        ) from None
    except UnicodeDecodeError as error:
        raise WrongUse(
            str(file), found=f"it is not text ({error.reason})", cure="Save it as UTF-8."
        ) from None
    try:
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        fault = ", ".join(part for part in (problem.context, problem.problem) if part)
        raise WrongUse(where, found=fault or "it is not YAML", cure="Fix the line.") from None
    except yaml.YAMLError as problem:
        fault = str(problem).split("\n")[0]
        raise WrongUse(str(file), found=fault, cure="Fix the file.") from None
    page = YamlPage(file, {})
    if root is None:
        return page
    values = _YamlReader(page).value(root, ())
    if not isinstance(values, dict):
        raise WrongUse(
            str(file),
            found=f"it contains a {type(values).__name__}",
            cure="Start it with keys, as in name: 01_stage.",
        )
    page.values.update(values)
    return page


class _YamlReader:
    """Convert YAML nodes to values."""

    def __init__(self, page: YamlPage) -> None:
        self.page = page
        self.count = 0

    def value(self, node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        self.page.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if len(path) > _MOST_LEVELS or self.count > _MOST_VALUES:
            raise WrongUse(
                str(self.page.file), found="it is too large or too deep", cure="Use fewer aliases."
            )
        if not node.tag.startswith(_TAG):
            raise WrongUse(
                self.page.at(*path),
                found=f"the tag {node.tag} is not supported",
                cure="Write the value itself.",
            )
        kind = type(node).__name__
        if kind == "MappingNode":
            return self.section(node, path)
        if kind == "SequenceNode":
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        return node.value if node.style else parse_scalar(node.value)

    def section(self, node: yaml.Node, path: tuple[str | int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if type(key).__name__ != "ScalarNode" or (name == "<<" and not key.style):
                raise WrongUse(
                    f"{self.page.file}, line {line}",
                    found="a key that is a list, a section or << is not supported",
                    cure="Write the keys out.",
                )
            if name in first:
                raise WrongUse(
                    str(self.page.file),
                    found=f"{name} occurs twice, on lines {first[name]} and {line}",
                    cure="Keep one of them: most readers silently take the last.",
                )
            first[name] = self.page.lines[*path, name] = line
            values[name] = self.value(value, (*path, name))
        return values


def parse_scalar(text: str) -> Any:
    """Return the value of unquoted text in YAML 1.1 or 1.2; 2e-4 is a number.

    >>> [parse_scalar(text) for text in ("4", "2e-4", "yes", "~", "0o17", "017", "bf16", ".inf", "1_000")]
    [4, 0.0002, True, None, 15, 15, 'bf16', inf, 1000]
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INT.fullmatch(text) and len(text) <= _MOST_DIGITS:
        return int(text.replace("_", ""))
    for base, pattern in _BASES.items():
        if pattern.fullmatch(text):
            return _parse_in_base(text, base)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


def _parse_in_base(text: str, base: int) -> int | str:
    digits = re.sub(r"^([-+]?)0[box]?", r"\1", text).replace("_", "")
    try:
        return int(digits or "0", base)
    except ValueError:
        return text
