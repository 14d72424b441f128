"""YAML as people mean it, for the files that jobs read: strict where the usual readers keep silent.

A key that is there twice is an error that names both lines, `2e-4` is a number. Where a value stands is kept,
so that an error can say it. Not covered: merge keys, several documents, tags. trimtab.configs edits files in
place, and has a reader of its own for that.
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
_DEEPEST, _MOST = 40, 20_000
"""Levels and values of a file, aliases counted: beyond that it is no config."""
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class YamlPage:
    """What a file says, and on which lines."""

    file: Path
    values: dict[str, Any]
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)

    def at(self, *path: str | int) -> str:
        """The file and the line of a value, for an error."""
        line = self.lines.get(path)
        return f"{self.file}, line {line}" if line else str(self.file)


def read_yaml(file: Path) -> YamlPage:
    """A file whose top is a section; raises what is wrong with it."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WrongUse(
            str(file), found=f"it cannot be read ({error.strerror})", cure="Name another."
        ) from None
    except UnicodeDecodeError as error:
        raise WrongUse(str(file), found=f"it is no text ({error.reason})", cure="Save it as UTF-8.") from None
    try:
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        said = ", ".join(part for part in (problem.context, problem.problem) if part)
        raise WrongUse(where, found=said or "it is not YAML", cure="Mend the line.") from None
    except yaml.YAMLError as problem:
        found = str(problem).split("\n")[0]
        raise WrongUse(str(file), found=found, cure="Mend the file.") from None
    page = YamlPage(file, {})
    if root is None:
        return page
    found = _Reading(page).value(root, ())
    if not isinstance(found, dict):
        raise WrongUse(
            str(file),
            found=f"it holds a {type(found).__name__}",
            cure="Begin it with keys, as in name: 01_stage.",
        )
    page.values.update(found)
    return page


class _Reading:
    """From nodes to values."""

    def __init__(self, page: YamlPage) -> None:
        self.page = page
        self.count = 0

    def value(self, node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        self.page.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if len(path) > _DEEPEST or self.count > _MOST:
            raise WrongUse(
                str(self.page.file), found="it is too large or too deep", cure="Use fewer aliases."
            )
        if not node.tag.startswith(_TAG):
            raise WrongUse(
                self.page.at(*path),
                found=f"the tag {node.tag} means nothing here",
                cure="Write the value itself.",
            )
        kind = type(node).__name__
        if kind == "MappingNode":
            return self.section(node, path)
        if kind == "SequenceNode":
            return [self.value(one, (*path, number)) for number, one in enumerate(node.value)]
        return node.value if node.style else resolved(node.value)

    def section(self, node: yaml.Node, path: tuple[str | int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if type(key).__name__ != "ScalarNode" or (name == "<<" and not key.style):
                raise WrongUse(
                    f"{self.page.file}, line {line}",
                    found="a key that is a list, a section or << is not read here",
                    cure="Write the keys out.",
                )
            if name in first:
                raise WrongUse(
                    str(self.page.file),
                    found=f"{name} is there twice, on lines {first[name]} and {line}",
                    cure="Keep one of them: most readers take the last without a word.",
                )
            first[name] = self.page.lines[*path, name] = line
            found[name] = self.value(value, (*path, name))
        return found


def resolved(text: str) -> Any:
    """What plain text means in YAML 1.1 or 1.2, the number that people mean by 2e-4 included.

    >>> [resolved(one) for one in ("4", "2e-4", "yes", "~", "0o17", "017", "bf16", ".inf", "1_000")]
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
            return _in_base(text, base)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


def _in_base(text: str, base: int) -> int | str:
    digits = re.sub(r"^([-+]?)0[box]?", r"\1", text).replace("_", "")
    try:
        return int(digits or "0", base)
    except ValueError:
        return text
