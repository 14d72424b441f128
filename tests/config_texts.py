"""Config files as people might write them: a tree of values, laid out in every style that a format has."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

keys = st.from_regex(r"[a-z][a-z_]{0,7}", fullmatch=True).filter(
    lambda key: key not in ("on", "off", "yes", "no", "true", "false", "null") and not _is_reserved(key)
)
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Cn")), max_size=8)
scalars: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(10**12), 10**12),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    words,
    st.sampled_from(
        ["bf16", "auto", "2e-4", "yes", "1:30", "2020-01-01", "# no", "a: b", "", "0x1f", "- a", "~"]
    ),
)
lists = st.lists(scalars, max_size=4)
leaves = scalars | lists


def _is_reserved(key: str) -> bool:
    import keyword

    return keyword.iskeyword(key)


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    section = st.dictionaries(keys, leaf, min_size=1, max_size=4)
    for _ in range(2):
        section = st.dictionaries(keys, leaf | section, min_size=1, max_size=4)
    return section


@dataclass
class Pen:
    """Where the choices of style and the comments come from; each comment is there once."""

    random: Random
    newline: str = "\n"
    comments: list[str] = field(default_factory=list)
    mark: str = "#"
    anchors: dict[tuple[str, Any], str] = field(default_factory=dict)

    def comment(self, often: float = 0.4) -> str:
        if self.random.random() > often:
            return ""
        self.comments.append(f"{self.mark} c{len(self.comments)} 'it\"s: [x] {{y}}")
        return "  " + self.comments[-1]

    def own_lines(self, indent: str) -> list[str]:
        lines = [""] * (self.random.random() < 0.1)
        comment = self.comment(0.2).strip()
        return lines + ([indent + comment] if comment else [])

    def maybe(self, often: float = 0.5) -> bool:
        return self.random.random() < often


@dataclass(frozen=True)
class Sample:
    """A text, the tree that it holds, and every comment in it."""

    text: str
    tree: dict[str, Any]
    comments: list[str]


def samples(render: Any, leaf: st.SearchStrategy[Any], mark: str = "#") -> st.SearchStrategy[Sample]:
    def build(tree: dict[str, Any], seed: int) -> Sample:
        pen = Pen(Random(seed), mark=mark)  # noqa: S311 - a choice of style is no secret
        pen.newline = pen.random.choice(["\n", "\n", "\r\n"])
        lines = render(pen, tree)
        end = pen.newline if pen.maybe(0.8) else ""
        bom = "\ufeff" if pen.maybe(0.1) else ""
        return Sample(text=bom + pen.newline.join(lines) + end, tree=tree, comments=pen.comments)

    return st.builds(build, trees(leaf), st.integers(0, 2**32))


def _escaped(value: str) -> str:
    """In double quotes, as both YAML and TOML read them."""
    letters = (one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08X}" for one in value)
    return '"' + "".join(letters) + '"'


# YAML


def yaml_scalar(pen: Pen, value: Any) -> str:
    """A value, now and then with an anchor; an equal one further on may then be an alias."""
    known = pen.anchors.get((type(value).__name__, value))
    if known and pen.maybe(0.6):
        return f"*{known} " if pen.maybe() else f"*{known}"
    if pen.maybe(0.1):
        name = f"a{len(pen.anchors)}"
        text = f"&{name} {yaml_word(pen, value)}"
        pen.anchors[type(value).__name__, value] = name
        return text
    return yaml_word(pen, value)


def yaml_word(pen: Pen, value: Any) -> str:
    if value is None or isinstance(value, bool):
        words = {None: ["null", "~"], True: ["true", "True", "yes", "on"], False: ["false", "FALSE", "no"]}
        return pen.random.choice(words[value])
    if isinstance(value, int | float):
        return f"{value:.20e}" if "e" in repr(value) else repr(value)
    choices = [_escaped(value)]
    reserved = ("yes", "no", "on", "off", "true", "false", "null")
    if value.isascii() and value.isalpha() and value.lower() not in reserved:
        choices.append(str(value))
    if value.isprintable():
        choices.append("'" + value.replace("'", "''") + "'")
    return pen.random.choice(choices)


def yaml_flow(pen: Pen, value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_flow(pen, one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        blank = " " if pen.maybe(0.2) else ""
        return "[" + blank + ", ".join(yaml_flow(pen, one) for one in value) + blank + "]"
    return yaml_scalar(pen, value)


def yaml_lines(pen: Pen, tree: dict[str, Any], indent: str = "", step: str | None = None) -> list[str]:
    step = step or pen.random.choice(["  ", "    ", "   "])
    lines = [f"---{pen.comment()}"] if not indent and pen.maybe(0.2) else []
    for key, value in tree.items():
        lines += pen.own_lines(indent)
        name = indent + (f'"{key}"' if pen.maybe(0.1) else key) + (" " if pen.maybe(0.05) else "")
        if isinstance(value, dict) and pen.maybe(0.8):
            lines += [f"{name}:{pen.comment()}", *yaml_lines(pen, value, indent + step, step)]
        elif isinstance(value, list) and value and pen.maybe():
            dash = indent + ("" if pen.maybe() else step) + "-" + pen.random.choice([" ", "   "])
            lines += [f"{name}:{pen.comment()}"]
            lines += [f"{dash}{yaml_scalar(pen, one)}{pen.comment()}" for one in value]
        else:
            gap = pen.random.choice([" ", " ", "   ", f"{pen.newline}{indent}{step}"])
            lines.append(f"{name}:{gap}{yaml_flow(pen, value)}{pen.comment()}")
    return lines


# JSON with comments


def json_lines(pen: Pen, tree: dict[str, Any]) -> list[str]:
    text = json_value(pen, tree, "", pen.random.choice(["  ", "\t", "    "]), wide=pen.maybe(0.8))
    return [*pen.own_lines(""), *text.split("\n"), *pen.own_lines("")]


def json_value(pen: Pen, value: Any, indent: str, step: str, *, wide: bool) -> str:
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=pen.maybe())
    inner = indent + step
    pairs = value.items() if isinstance(value, dict) else [(None, one) for one in value]
    parts = [
        (f"{json.dumps(key)}: " if key is not None else "") + json_value(pen, one, inner, step, wide=wide)
        for key, one in pairs
    ]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    trailing = "," if pen.maybe(0.2) else ""
    if not wide or (isinstance(value, list) and pen.maybe()):
        return opening + ", ".join(parts) + trailing + closing
    lines = [
        f"{inner}{part}{',' if number < len(parts) - 1 else trailing}{pen.comment()}"
        for number, part in enumerate(parts)
    ]
    return "\n".join([opening + pen.comment(0.1), *lines, indent + closing])


# TOML


def toml_scalar(pen: Pen, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if pen.maybe() and "'" not in value and value.isprintable():
            return f"'{value}'"
        return _escaped(value)
    if isinstance(value, list):
        gap = f"{pen.newline}  " if pen.maybe(0.3) else " "
        trailing = "," if value and pen.maybe(0.3) else ""
        return "[" + f",{gap}".join(toml_scalar(pen, one) for one in value) + trailing + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {toml_scalar(Pen(Random(1)), one)}" for key, one in value.items())  # noqa: S311
        return f"{{ {inner} }}"
    return repr(value)


def toml_lines(pen: Pen, tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    lines: list[str] = []
    later: list[tuple[str, dict[str, Any]]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and pen.maybe(0.7):
            later.append((key, value))
        elif (
            isinstance(value, dict)
            and not any(isinstance(one, dict) for one in value.values())
            and pen.maybe()
        ):
            lines += [f"{key}.{name} = {toml_scalar(pen, one)}{pen.comment()}" for name, one in value.items()]
        else:
            lines += pen.own_lines("")
            lines.append(
                f"{key}{pen.random.choice([' = ', '=', '  = '])}{toml_scalar(pen, value)}{pen.comment()}"
            )
    for key, value in later:
        lines += [*pen.own_lines(""), f"[{'.'.join((*path, key))}]{pen.comment()}"]
        lines += toml_lines(pen, value, (*path, key))
    return lines


# Python


def python_value(pen: Pen, value: Any, indent: str = "") -> str:
    if isinstance(value, dict) and pen.maybe(0.8):
        inner = indent + "    "
        is_call = pen.maybe(0.3)
        lines = [
            f"{inner}{f'{key}=' if is_call else f'{key!r}: '}{python_value(pen, one, inner)},{pen.comment()}"
            for key, one in value.items()
        ]
        opening, closing = ("dict(", ")") if is_call else ("{", "}")
        return pen.newline.join([opening + pen.comment(0.2), *lines, indent + closing])
    if isinstance(value, list) and pen.maybe() and value:
        return "(" + ", ".join(python_value(pen, one, indent) for one in value) + ",)"
    if isinstance(value, str) and pen.maybe():
        return json.dumps(value) if value.isascii() else repr(value)
    return repr(value)


def python_lines(pen: Pen, tree: dict[str, Any]) -> list[str]:
    lines = ['"""Settings: {not: [real]}."""', "import os as _os  # noqa"]
    for key, value in tree.items():
        lines += pen.own_lines("")
        note = ": object" if pen.maybe(0.2) else ""
        lines.append(f"{key}{note} = {python_value(pen, value)}{pen.comment()}")
    return lines


# Shell


def shell_lines(pen: Pen, tree: dict[str, Any]) -> list[str]:
    from shlex import quote

    lines = ["#!/bin/bash", "set -e"]
    for key, value in tree.items():
        lines += pen.own_lines("")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        shown = quote(text) if pen.maybe(0.7) or any(one in text for one in '\\"$`!') else f'"{text}"'
        lines.append(f"{'export ' if pen.maybe() else ''}{key.upper()}={shown}{pen.comment()}")
    return [*lines, "python train.py --lr 1e-4 \\", "    --name 'A=5 # no'"]


def sbatch_lines(pen: Pen, tree: dict[str, Any]) -> list[str]:
    lines = ["#!/bin/bash"]
    short = {"nodes": "N", "ntasks": "n", "gpus": "G"}
    for key, value in tree.items():
        spelled = f"-{short[key]}" if key in short and pen.maybe() else f"--{key}"
        joint = pen.random.choice(["", " "]) if spelled[1] != "-" else pen.random.choice(["=", " "])
        lines += pen.own_lines("")
        lines.append(f"#SBATCH {spelled}{joint}{value}{pen.comment()}")
    return [*lines, "", "export OMP_NUM_THREADS=4", "#SBATCH --nodes=99", "srun python train.py"]
