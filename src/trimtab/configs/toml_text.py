"""TOML: Python's own reader says what the values are, a scanner of ours says where they stand.

The scanner runs only over text that the reader has accepted, so that it need not judge, and its findings are
compared with the reader's. Dates and times are entries of text.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from trimtab.configs.text_edit import (
    ConfigFormat,
    KeyPath,
    NewKeys,
    ParsedConfig,
    Splice,
    TextNode,
    duplicate_error,
    format_float,
    parse_error,
    parse_error_at,
    parse_text,
    refuse_leaf,
)
from trimtab.errors import BrokenFile, TrimtabError, WrongUse

_COMMENT = r"#[^\r\n]*"
_GAP = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\r\n]|\\.)*"|\'[^\'\r\n]*\'', re.DOTALL
)
_SCALAR = re.compile(r"[^\s,\]}#]+(?: \d\d:[^\s,\]}#]+)?")
_WHERE = re.compile(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)


def read_toml(text: str, origin: str) -> ParsedConfig:
    """Parse a TOML text.

    >>> read_toml("training.batch = 4  # small", "a.toml").edit({("training", "batch"): 8})
    'training.batch = 8  # small'
    """
    return parse_text(text, origin, TOML)


@dataclass(slots=True)
class _TomlExtra:
    """Places of a TOML table."""

    flow: bool = False
    """Written in braces."""
    header: int | None = None
    """Where its own header begins; None for one that only the headers of others imply."""
    last: int | None = None
    """The end of its last own key and value."""
    first: int | None = None
    """Where its first own key begins."""
    prefix: str = ""
    """What its keys carry in front where they are dotted, as in `a.b = 1`."""
    keys: dict[str, int] = field(default_factory=dict)


@dataclass
class _TomlScanner:
    """Scanner of valid TOML."""

    text: str
    origin: str
    at: int = 0
    root: TextNode = field(default_factory=lambda: _make_table(0, header=0))

    def skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return self.text[self.at : self.at + 1]

    def scan(self) -> TextNode:
        home = self.root
        while self.skip(_GAP):
            home = self.header() if self.text[self.at] == "[" else self.pair(home)
        self.root.end = len(self.text)
        return self.root

    def header(self) -> TextNode:
        start = self.at
        many = self.text.startswith("[[", start)
        self.at += 2 if many else 1
        path = self.key()
        self.skip(_BLANK)
        self.at += 2 if many else 1
        home = self.root
        for name in path[:-1]:
            home = self.step(home, name, start)
        if many:
            items = _items(home)
            group = items.setdefault(path[-1], TextNode(start, start, items={}, is_list=True, style="tables"))
            made = _make_table(start, header=start)
            _items(group)[len(group.items or {})] = made
        else:
            made = self.step(home, path[-1], start)
            if made.extra.header is not None or made.extra.first is not None:
                places = (made.start, start)
                raise duplicate_error(self.origin, self.text, ".".join(path), places, kind="TOML")
            made.extra.header = made.start = start
        made.end = made.extra.last = self.at
        return made

    def step(self, home: TextNode, name: str, start: int) -> TextNode:
        """Return the table of this name inside of another; of an array of tables, the last one."""
        child = _items(home).setdefault(name, _make_table(start))
        if child.is_list and child.style == "tables":
            return list(_items(child).values())[-1]
        return child

    def key(self) -> list[str]:
        path = []
        while True:
            self.skip(_BLANK)
            match = _STRING.match(self.text, self.at) or _BARE.match(self.text, self.at)
            if match is None:
                raise parse_error_at(self.origin, self.text, self.at, "a key should be here", kind="TOML")
            self.at = match.end()
            path.append(_unquote_key(match[0]))
            if self.skip(_BLANK) != ".":
                return path
            self.at += 1

    def pair(self, home: TextNode) -> TextNode:
        start = self.at
        path = self.key()
        self.at += 1  # the equals sign
        owner = home
        for name in path[:-1]:
            home = self.step(home, name, start)
            home.extra.prefix = self.text[start : self.at].rpartition(".")[0].strip() + "."
        if path[-1] in _items(home):
            first = _items(home)[path[-1]]
            places = (home.extra.keys.get(path[-1], first.start), start)
            raise duplicate_error(self.origin, self.text, path[-1], places, kind="TOML")
        home.extra.keys[path[-1]] = start
        _items(home)[path[-1]] = self.value()
        for table in (owner, home):
            table.extra.last = self.at
            table.extra.first = start if table.extra.first is None else table.extra.first
        return owner

    def value(self) -> TextNode:
        self.skip(_BLANK)
        start = self.at
        letter = self.text[start]
        if letter == "[":
            return self.array()
        if letter == "{":
            return self.inline_table()
        match = _STRING.match(self.text, start) or _SCALAR.match(self.text, start)
        if match is None:
            raise parse_error_at(self.origin, self.text, start, "a value should be here", kind="TOML")
        self.at = match.end()
        return TextNode(start, self.at)

    def array(self) -> TextNode:
        node = TextNode(self.at, 0, items={}, is_list=True, style="flow")
        self.at += 1
        while self.skip(_GAP) != "]":
            _items(node)[len(node.items or {})] = self.value()
            if self.skip(_GAP) == ",":
                self.at += 1
        self.at += 1
        node.end = self.at
        return node

    def inline_table(self) -> TextNode:
        node = _make_table(self.at, flow=True)
        self.at += 1
        while self.skip(_GAP) != "}":
            self.pair(node)
            if self.skip(_GAP) == ",":
                self.at += 1
        self.at += 1
        node.end = self.at
        return node


def _make_table(start: int, *, header: int | None = None, flow: bool = False) -> TextNode:
    return TextNode(start, start, items={}, style="table", extra=_TomlExtra(header=header, flow=flow))


def _items(node: TextNode) -> dict[str | int, TextNode]:
    return node.items if node.items is not None else {}


def _unquote_key(text: str) -> str:
    if text[:1] not in "\"'":
        return text
    try:
        return str(next(iter(tomllib.loads(f"{text} = 0"))))
    except tomllib.TOMLDecodeError:
        # The reader refuses the whole text, with the place of the mistake.
        return text


def _fill_values(node: TextNode, value: Any, origin: str) -> None:
    """Fill the values of the reader into the scanner's tree; both must have the same shape."""
    shape = dict(enumerate(value)) if isinstance(value, list) else value
    if node.items is None and not isinstance(value, dict | list):
        is_moment = isinstance(value, dt.date | dt.time)
        node.value = value.isoformat() if is_moment else value
        return
    if not isinstance(shape, dict) or node.items is None or set(node.items) != set(shape):
        raise TrimtabError(
            origin,
            found="two ways to read this TOML disagree",
            cure="Nothing was written. This is a bug of trimtab: please report the file.",
        )
    for key, child in node.items.items():
        _fill_values(child, shape[key], origin)


_LONG_KEY = re.compile(r"(?<![\w.-])(?:[\w-]+\.){200}")
"""A key of so many parts is damage; the reader's time grows with the cube of their number."""


def load_toml(text: str, origin: str) -> dict[str, Any]:
    """Return the values of a TOML text; raise BrokenFile with the place of what is wrong."""
    if long_key := _LONG_KEY.search(text):
        raise parse_error_at(origin, text, long_key.start(), "a key of more than 200 parts", kind="TOML")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        _find_duplicate(text, origin, str(problem))
        where = _WHERE.match(str(problem))
        if where and where[2]:
            raise parse_error(origin, int(where[2]), int(where[3]), where[1], kind="TOML") from None
        message = f"the file ends too early: {where[1]}" if where else str(problem)
        raise parse_error_at(origin, text, len(text), message, kind="TOML") from None
    except RecursionError:
        raise parse_error(origin, 1, 1, "it is nested too deeply", kind="TOML") from None
    except ValueError as problem:
        raise parse_error(origin, 1, 1, str(problem), kind="TOML") from None


def _find_duplicate(text: str, origin: str, said: str) -> None:
    """Raise an error that names both lines if the reader objects to a duplicate key."""
    if "overwrite" not in said and "declare" not in said and "uplicate" not in said:
        return
    try:
        _TomlScanner(text, origin).scan()
    except BrokenFile as problem:
        if "twice" in problem.found:
            raise
    except (AttributeError, IndexError):
        return  # text that the reader refused may lead the scanner anywhere


def format_toml(value: Any, like: str = "") -> str:
    """Format a value as TOML."""
    if value is None:
        raise WrongUse("the value None", found="TOML has no word for nothing", cure="Leave the key out.")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return format_float(value, like) if math.isfinite(value) else f"{value}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        inner = ", ".join(f"{_format_key(key)} = {format_toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_toml, value)) + "]"
    literal = like.startswith("'") and "'" not in value and value.isprintable()
    return f"'{value}'" if literal else _quote_text(value)


def _quote_text(value: str) -> str:
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", quoted)


def _format_key(name: str | int) -> str:
    text = str(name)
    return text if _BARE.fullmatch(text) else _quote_text(text)


class _TomlFormat(ConfigFormat):
    """The format."""

    kind = "toml"
    comment = _COMMENT

    def parse(self, text: str, origin: str) -> TextNode:
        values = load_toml(text, origin)
        root = _TomlScanner(text, origin).scan()
        try:
            _fill_values(root, values, origin)
        except RecursionError:
            raise parse_error(origin, 1, 1, "it is nested too deeply", kind="TOML") from None
        return root

    def write(self, value: Any, like: str = "") -> str:
        return format_toml(value, like)

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        if not node.is_section:
            refuse_leaf(page, path, node)
        if node.extra.flow:
            return [_add_to_braces(node, new)]
        values = {key: value for key, value in new.items() if not isinstance(value, dict)}
        tables = {key: value for key, value in new.items() if isinstance(value, dict)}
        splices = [_add_to_table(page, path, node, values)] if values else []
        if tables:
            splices.append(_add_tables(page, path, tables))
        return splices


def _add_to_braces(node: TextNode, new: NewKeys) -> Splice:
    body = ", ".join(f"{_format_key(key)} = {format_toml(value)}" for key, value in new.items())
    if node.extra.last is None:
        return Splice(node.start + 1, node.end - 1, f" {body} ")
    return Splice(node.extra.last, node.extra.last, f", {body}")


def _add_to_table(page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> Splice:
    """Add keys after the last one of a table, or in a new table if it has no place of its own."""
    own = node.extra.header is not None or node.extra.last is not None
    if not own:
        return _add_tables(page, path[:-1], {path[-1]: new})
    indent = page.indent(node.extra.first) if node.extra.first is not None else ""
    lines = [
        f"{indent}{node.extra.prefix}{_format_key(key)} = {format_toml(value)}" for key, value in new.items()
    ]
    if node.extra.last is None:  # the top of a file that begins with a header, or with nothing
        at = min((child.start for child in _items(node).values()), default=len(page.text))
        return page.insert_lines(page.line_start(at) if node.items else at, lines)
    return page.insert_lines(page.next_line(node.extra.last), lines)


def _add_tables(page: ParsedConfig, path: KeyPath, tables: NewKeys) -> Splice:
    """Add tables at the end of the file."""
    lines: list[str] = []
    for name, table in tables.items():
        lines += _format_table((*path, name), table)
    blank = [""] if page.text.strip() and not re.search(r"(?:\r?\n){2}\Z", page.text) else []
    put = page.insert_lines(len(page.text), blank + lines)
    return Splice(put.start, put.end, put.text, order=1)  # below keys that an open table gains there


def _format_table(path: KeyPath, table: NewKeys) -> list[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{_format_key(key)} = {format_toml(value)}" for key, value in values.items()]
    if lines or not table:
        name = ".".join(_format_key(part) for part in path if isinstance(part, str))
        lines.insert(0, f"[{name}]")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _format_table((*path, key), value)
    return lines


TOML = _TomlFormat()
