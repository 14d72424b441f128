"""Python source as a config: parsed, never executed.

    slm_config = {"batch_size": 4}              ("slm_config", "batch_size")
    opts = dict(lr=1e-4)                        ("opts", "lr")
    BATCH = 4                                   ("BATCH",)
    class Train: lr: float = 1e-4               ("Train", "lr"), and field(default=1e-4)
    args = TrainingArguments(bf16=True)         ("TrainingArguments", "bf16"), wherever the call stands
    config["batch_size"] = 4; config.lr = 1     ("config", "batch_size"), ("config", "lr")

Names inside of a function come under its name, with the defaults of its parameters. A call that occurs
several times comes with a number: ("AdamW", 0, "lr"). What is set twice can be read (the last one counts) but
not changed.
Not covered: values that Python must work out. They are entries with their source in `computed`.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
import warnings
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

from trimtab.configs.text_edit import (
    ConfigFormat,
    KeyPath,
    NewKeys,
    ParsedConfig,
    Splice,
    TextNode,
    find_line_starts,
    format_float,
    format_path,
    parse_error,
    parse_text,
    refuse_leaf,
    replace_list,
    walk_nodes,
)
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMENT = r"#[^\r\n]*"
_DICTS = {"dict", "OrderedDict", "SimpleNamespace", "Namespace", "DictConfig", "ConfigDict"}
"""Calls that are a section with keys and no more."""


def read_python(text: str, origin: str) -> ParsedConfig:
    """Parse a Python text.

    >>> read_python("config = {'batch': 4}  # small", "a.py").edit({("config", "batch"): 8})
    "config = {'batch': 8}  # small"
    """
    return parse_text(text, origin, PYTHON)


def _parse_tree(text: str, origin: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in the user's strings are not our business
            return ast.parse(text)
    except SyntaxError as problem:
        message = f"Python cannot read it: {problem.msg}"
        raise parse_error(origin, problem.lineno or 1, problem.offset or 1, message, kind="Python") from None
    except (RecursionError, MemoryError):
        raise parse_error(origin, 1, 1, "it is nested too deeply for Python", kind="Python") from None
    except ValueError as problem:
        raise parse_error(origin, 1, 1, f"Python cannot read it: {problem}", kind="Python") from None


@dataclass
class _Collector:
    """Collects nodes from Python's syntax tree."""

    text: str
    origin: str
    root: TextNode = field(default_factory=lambda: _make_section(0, 0))
    calls: dict[str, list[TextNode]] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[int]:
        return find_line_starts(self.text)

    @cached_property
    def is_ascii(self) -> bool:
        return self.text.isascii()

    def offset(self, line: int, column: int) -> int:
        """Return the place in the text; Python's columns count bytes."""
        start = self.lines[line - 1]
        if self.is_ascii:
            return start + column
        end = self.lines[line] if line < len(self.lines) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.expr) -> tuple[int, int]:
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset),
        )

    def collect(self) -> TextNode:
        tree = _parse_tree(self.text, self.origin)
        self.body(tree.body, self.root)
        for call in _list_calls(tree):
            self.named_call(call)
        for name, found in self.calls.items():
            self.place_calls(name, found)
        self.root.end = len(self.text)
        return self.root

    def place_calls(self, name: str, found: list[TextNode]) -> None:
        """Put calls under the name of what is called, numbered if there are several."""
        items = self.root.items if self.root.items is not None else {}
        if name in items:  # a class or a function of this file: its own values stay where they are
            return
        if len(found) == 1:
            items[name] = found[0]
            return
        items[name] = TextNode(
            found[0].start, found[-1].end, items=dict(enumerate(found)), is_list=True, style="calls"
        )

    def named_call(self, call: ast.Call) -> None:
        name = _last_name(call.func)
        if not name or name in _DICTS or name == "field" or not any(word.arg for word in call.keywords):
            return
        node = self.keywords(call)
        self.calls.setdefault(name, []).append(node)

    def body(self, statements: list[ast.stmt], home: TextNode) -> None:
        for statement in statements:
            self.statement(statement, home)

    def statement(self, statement: ast.stmt, home: TextNode) -> None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self.assign(target, statement.value, home, chained=len(statement.targets) > 1)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self.assign(statement.target, statement.value, home)
        elif isinstance(statement, ast.AugAssign):
            self.again(statement, home)
        elif isinstance(statement, ast.ClassDef):
            inner = self.inner(statement.name, statement, home)
            self.body(statement.body, inner)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = self.inner(statement.name, statement, home)
            self.defaults(statement.args, inner)
            self.body(statement.body, inner)
        else:
            for block in ("body", "orelse", "finalbody"):
                self.body(
                    [inner for inner in getattr(statement, block, []) if isinstance(inner, ast.stmt)], home
                )
            for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                self.body(part.body, home)

    def inner(self, name: str, statement: ast.stmt, home: TextNode) -> TextNode:
        items = home.items if home.items is not None else {}
        start = self.offset(statement.lineno, statement.col_offset)
        if name in items and items[name].style == "scope":
            return items[name]
        items[name] = _make_section(
            start, self.offset(statement.end_lineno or statement.lineno, 0), style="scope"
        )
        items[name].extra = statement
        return items[name]

    def defaults(self, arguments: ast.arguments, home: TextNode) -> None:
        plain = [*arguments.posonlyargs, *arguments.args]
        for argument, value in zip(
            plain[len(plain) - len(arguments.defaults) :], arguments.defaults, strict=True
        ):
            self.put(home, argument.arg, self.value(value), value)
        for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if given is not None:
                self.put(home, argument.arg, self.value(given), given)

    def assign(self, target: ast.expr, value: ast.expr, home: TextNode, *, chained: bool = False) -> None:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            if len(target.elts) == len(value.elts):
                for name, part in zip(target.elts, value.elts, strict=True):
                    self.assign(name, part, home, chained=chained)
            return
        keys = _target_keys(target)
        if not keys:
            return
        for key in keys[:-1]:
            child = (home.items or {}).get(key)
            if child is None or not child.is_section:
                child = _make_section(*self.span(target), style="scattered")
                (home.items if home.items is not None else {})[key] = child
            home = child
        node = self.value(value)
        if chained:
            for _, inner in walk_nodes(node):
                inner.shared = "the same assignment"
        self.put(home, keys[-1], node, value)

    def again(self, statement: ast.AugAssign, home: TextNode) -> None:
        """Note that `x += 1` makes the value of x unknown."""
        keys = _target_keys(statement.target)
        for key in keys[:-1]:
            home = (home.items or {}).get(key, home)
        if keys and keys[-1] in (home.items or {}):
            self.note_repeat(home, keys[-1], self.span(statement.target)[0])

    def note_repeat(self, home: TextNode, key: str | int, start: int) -> None:
        first = (home.items or {})[key]
        home.repeats.setdefault(key, [first.start]).append(start)

    def put(self, home: TextNode, key: str | int, node: TextNode, value: ast.expr) -> None:
        items = home.items if home.items is not None else {}
        if key in items:
            self.note_repeat(home, key, self.span(value)[0])
        items[key] = node

    def value(self, node: ast.expr) -> TextNode:
        start, end = self.span(node)
        if isinstance(node, ast.Dict):
            return self.dict(node)
        if isinstance(node, ast.List | ast.Tuple) and not any(
            isinstance(item, ast.Starred) for item in node.elts
        ):
            items: dict[str | int, TextNode] = {
                number: self.value(item) for number, item in enumerate(node.elts)
            }
            return TextNode(start, end, items=items, is_list=True, style=type(node).__name__)
        if isinstance(node, ast.Call):
            return self.call(node)
        try:
            literal = _literal_value(node)
        except ValueError:
            return TextNode(start, end, computed=self.text[start:end], extra=node)
        return TextNode(start, end, literal, extra=node)

    def call(self, node: ast.Call) -> TextNode:
        """Read a call: `dict(...)` is a section, `field(default=...)` its default, any other is computed."""
        start, end = self.span(node)
        name = _last_name(node.func)
        if name == "field":
            for word in node.keywords:
                if word.arg == "default":
                    return self.value(word.value)
                if word.arg == "default_factory" and isinstance(word.value, ast.Lambda):
                    return self.value(word.value.body)
        if name in _DICTS and not node.args:
            return self.keywords(node)
        return TextNode(start, end, computed=self.text[start:end], extra=node)

    def keywords(self, node: ast.Call) -> TextNode:
        start, end = self.span(node)
        section = _make_section(start, end, style="call")
        section.extra = node
        for word in node.keywords:
            if word.arg:
                self.put(section, word.arg, self.value(word.value), word.value)
        return section

    def dict(self, node: ast.Dict) -> TextNode:
        start, end = self.span(node)
        section = _make_section(start, end, style="dict")
        section.extra = node
        for key, value in zip(node.keys, node.values, strict=True):
            name = _constant_key(key)
            if key is not None and name is not None:
                self.put(section, name, self.value(value), key)
        return section


def _make_section(start: int, end: int, style: str = "scope") -> TextNode:
    return TextNode(start, end, items={}, style=style)


def _list_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """List calls in the order of the text."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return iter(sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _target_keys(target: ast.expr) -> list[str | int]:
    """Return `a.b["c"]` as keys; nothing if a part of it is computed."""
    keys: list[str | int] = []
    while not isinstance(target, ast.Name):
        if isinstance(target, ast.Attribute):
            keys.insert(0, target.attr)
        elif isinstance(target, ast.Subscript) and (key := _constant_key(target.slice)) is not None:
            keys.insert(0, key)
        else:
            return []
        target = target.value
    return [target.id, *keys]


def _constant_key(node: ast.expr | None) -> str | int | None:
    """Return a key that is literal text or a literal whole number, else None."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _literal_value(node: ast.expr) -> Any:
    """Return a literal value; raise ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("computed")


def format_python(value: Any, like: str = "", quote: str = '"') -> str:
    """Format a value as Python; numbers and brackets follow the old text."""
    if isinstance(value, float):
        return _format_float(value, like)
    if isinstance(value, dict):
        inner = ", ".join(
            f"{format_python(key, '', quote)}: {format_python(item, '', quote)}"
            for key, item in value.items()
        )
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        inner = ", ".join(format_python(item, "", quote) for item in value)
        if like.startswith("("):
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return f"[{inner}]"
    return _quote_text(value, quote) if isinstance(value, str) else repr(value)


def _format_float(value: float, like: str) -> str:
    if not math.isfinite(value):
        return f'float("{value}")'
    text = format_float(value, like)
    dotless = re.fullmatch(r"[-+]?\d+[eE].*", like)
    return re.sub(r"\.0(?=[eE])", "", text) if dotless else text


def _quote_text(value: str, quote: str) -> str:
    return quote + "".join(_escape_letter(letter, quote) for letter in value) + quote


def _escape_letter(letter: str, quote: str) -> str:
    if letter in "'\"":
        return f"\\{letter}" if letter == quote else letter
    return repr(letter)[1:-1]


def _find_quote(text: str) -> str:
    return next((letter for letter in text if letter in "'\""), "")


class _PythonFormat(ConfigFormat):
    """The format."""

    kind = "python"
    comment = _COMMENT

    def parse(self, text: str, origin: str) -> TextNode:
        return _Collector(text, origin).collect()

    def write(self, value: Any, like: str = "") -> str:
        return format_python(value, like)

    def replace(self, page: ParsedConfig, node: TextNode, value: Any, moving: set[int]) -> list[Splice]:
        old = page.text[node.start : node.end]
        quote = _find_quote(old) or _house_quote(page)
        if isinstance(value, list | tuple) and node.is_list and node.style != "calls":
            is_tuple = node.style == "Tuple"
            write = partial(format_python, quote=quote)
            around = self.edit_list(page, node, value, moving, write=write, lone_comma=is_tuple)
            if around is not None:
                return around
            old = "(" if is_tuple else "["
        return [replace_list(page, node, format_python(value, old, quote), _COMMENT)]

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        if node.style in ("dict", "call"):
            return _add_to_brackets(page, node, new)
        if node.style == "scope" and path and isinstance(node.extra, ast.ClassDef):
            return [_add_to_class(page, path, node, new)]
        if node.style == "scope" and not path:
            return [_add_at_end(page, new)]
        return _refuse_place(page, path, node)

    def keep_beside(self, page: ParsedConfig, node: TextNode) -> list[Splice]:
        return [_add_comment(page, node)]


def _refuse_place(page: ParsedConfig, path: KeyPath, node: TextNode) -> NoReturn:
    if node.items is None:
        refuse_leaf(page, path, node)
    raise WrongUse(
        f"{page.locate(node.start)}: {format_path(path)}",
        found="there is no dict, call or class here that a key could be added to",
        cure="Add it by hand.",
    )


def _house_quote(page: ParsedConfig) -> str:
    """Return the quotes that this file uses more often."""
    return "'" if page.text.count("'") > page.text.count('"') else '"'


def _list_tokens(page: ParsedConfig) -> list[tuple[int, int, int]]:
    """List kind, start and end of every token."""
    lines = page.line_starts
    found = tokenize.generate_tokens(io.StringIO(page.text, newline="").readline)
    return [
        (token.type, lines[token.start[0] - 1] + token.start[1], lines[token.end[0] - 1] + token.end[1])
        for token in found
        if token.type != tokenize.ENDMARKER
    ]


def _add_comment(page: ParsedConfig, node: TextNode) -> Splice:
    """Add the old expression as a comment at the end of its line."""
    at = page.line_end(node.end)
    ends = {start for kind, start, _ in _list_tokens(page) if kind in (tokenize.NEWLINE, tokenize.NL)}
    if at not in ends and at != len(page.text):
        raise WrongUse(
            page.locate(node.start),
            found="the line goes on behind this value, so that no comment can stand there",
            cure="Change it by hand.",
        )
    return Splice(at, at, f"  # was: {' '.join(node.computed.split())}")


def _add_to_brackets(page: ParsedConfig, node: TextNode, new: NewKeys) -> list[Splice]:
    """Add keys after the last one of a dict or a call, on their own lines if it has its own."""
    quote = _house_quote(page)
    is_call = node.style == "call"
    body = [
        f"{key}={format_python(value, quote=quote)}"
        if is_call
        else format_python({key: value}, quote=quote)[1:-1]
        for key, value in new.items()
    ]
    close = node.end - 1
    skipped = (tokenize.COMMENT, tokenize.NL)
    inside = [
        token for token in _list_tokens(page) if node.start <= token[1] < close and token[0] not in skipped
    ]
    end = inside[-1][2]
    mark = page.text[end - 1]
    if mark in "{(" and end - 1 == inside[-1][1] and not node.items and _is_opening(node, page, end):
        return [Splice(end, end, ", ".join(body))]
    trailing = mark == ","
    lead = _own_line_indent(page, node)
    if lead is None:
        return [Splice(end, end, ("" if trailing else ",") + " " + ", ".join(body))]
    rest = re.compile(r"[ \t]*#[^\r\n]*").match(page.text, end)
    at = rest.end() if rest else end
    text = page.newline + lead + f",{page.newline}{lead}".join(body) + ("," if trailing else "")
    if trailing:
        return [Splice(at, at, text)]
    return [Splice(end, end, ","), Splice(at, at, text)] if at > end else [Splice(end, end, "," + text)]


def _is_opening(node: TextNode, page: ParsedConfig, end: int) -> bool:
    """Return whether this bracket is the one that the node itself opens."""
    if isinstance(node.extra, ast.Dict):
        return end == node.start + 1
    return not node.extra.args and not node.extra.keywords and page.text[end - 1] == "("


def _own_line_indent(page: ParsedConfig, node: TextNode) -> str | None:
    """Return the blanks before the last key if it begins its line, else None."""
    place = _Collector(page.text, page.origin)
    if isinstance(node.extra, ast.Dict):
        last = node.extra.keys[-1] or node.extra.values[-1]
    else:
        parts: list[Any] = [*node.extra.args, *node.extra.keywords]
        last = max(parts, key=lambda part: (part.lineno, part.col_offset))
    start = place.offset(last.lineno, last.col_offset)
    before = page.text[page.line_start(start) : start]
    return page.indent(start) if not before.strip(" \t*") else None


def _add_at_end(page: ParsedConfig, new: NewKeys) -> Splice:
    quote = _house_quote(page)
    return page.insert_lines(
        len(page.text), [f"{key} = {format_python(value, quote=quote)}" for key, value in new.items()]
    )


def _add_to_class(page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> Splice:
    """Add a default after the last field of a class, with a type if the class is a dataclass."""
    body = node.extra.body
    place = _Collector(page.text, page.origin)
    first = place.offset(body[0].lineno, body[0].col_offset)
    if page.text[page.line_start(first) : first].strip():
        _refuse_place(page, path, node)
    # Before the first method: a default below methods is easily overlooked.
    fields = [
        statement
        for statement in body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    end = place.offset(fields[-1].end_lineno, 0) if fields else None
    at = page.next_line(end) if end is not None else page.line_start(first)
    typed = any("dataclass" in ast.unparse(decorator) for decorator in node.extra.decorator_list)
    quote = _house_quote(page)
    lines = [
        f"{page.indent(first)}{key}{f': {_type_name(value)}' if typed else ''} = "
        f"{format_python(value, quote=quote)}"
        for key, value in new.items()
    ]
    return page.insert_lines(at, lines)


def _type_name(value: Any) -> str:
    return "object" if value is None else type(value).__name__


PYTHON = _PythonFormat()
