"""JSON, with the comments and trailing commas that many programs allow in it.

Not covered: the other liberties of JSON5 (keys without quotes, single quotes, hexadecimal numbers).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from trimtab.configs.text_edit import (
    DEEPEST,
    ConfigFormat,
    KeyPath,
    NewKeys,
    ParsedConfig,
    Splice,
    TextNode,
    duplicate_error,
    format_float,
    parse_error_at,
    parse_text,
    refuse_leaf,
)
from trimtab.errors import WrongUse

_COMMENT = r"//[^\r\n]*|/\*(?:[^*]|\*(?!/))*\*/"
_BLANK = re.compile(rf"(?:[ \t\r\n]+|{_COMMENT})*")
_REST_OF_LINE = re.compile(r"[ \t]*(?://[^\r\n]*|/\*[^\r\n]*?\*/)")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"-?[A-Za-z]+")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}


def read_json(text: str, origin: str) -> ParsedConfig:
    """Parse a JSON text.

    >>> read_json('{"a": [1, 2,], /* b */ "c": true}', "a.json").edit({("c",): False})
    '{"a": [1, 2,], /* b */ "c": false}'
    """
    return parse_text(text, origin, JSON)


@dataclass
class _JsonReader:
    """Recursive parser that keeps the place of every value."""

    text: str
    origin: str
    at: int = 0

    def fail(self, found: str, at: int | None = None) -> NoReturn:
        raise parse_error_at(self.origin, self.text, self.at if at is None else at, found, kind="JSON")

    def skip(self) -> None:
        """Skip blanks and comments."""
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at
        if self.text.startswith("/*", self.at):
            self.fail("a comment begins here and never ends")

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def whole(self) -> TextNode:
        if not self.peek():
            self.fail("the file is empty" if not self.text.strip() else "there is no value in it")
        node = self.node(0)
        if self.peek():
            self.fail(f"the value ends before {self.peek()!r}")
        return node

    def node(self, depth: int) -> TextNode:
        if depth > DEEPEST:
            self.fail(f"more than {DEEPEST} levels of brackets")
        letter = self.peek()
        if letter == "{":
            return self.section(depth)
        if letter == "[":
            return self.list(depth)
        start = self.at
        if letter == '"':
            return TextNode(start, self.string(), json.loads(self.text[start : self.at]))
        number = _NUMBER.match(self.text, start)
        if number:
            self.at = number.end()
            is_float = bool(number[1] or number[2])
            return TextNode(
                start, self.at, float(number[0]) if is_float else self.whole_number(number[0], start)
            )
        word = _WORD.match(self.text, start)
        if word and word[0] in _WORDS:
            self.at = word.end()
            return TextNode(start, self.at, _WORDS[word[0]])
        if not letter:
            self.fail("the file ends where a value should be")
        return self.fail(f"a value cannot begin with {word[0] if word else letter!r}")

    def whole_number(self, text: str, start: int) -> int:
        try:
            return int(text)
        except ValueError:
            return self.fail(f"a number of {len(text)} digits", start)

    def string(self) -> int:
        match = _STRING.match(self.text, self.at)
        if match is None:
            self.fail("text in quotes that does not end, or that holds a line break or an unknown escape")
        self.at = match.end()
        return self.at

    def section(self, depth: int) -> TextNode:
        node = TextNode(self.at, 0, items={}, extra={})
        self.at += 1
        while self.peek() != "}":
            start = self.at
            if self.peek() != '"':
                self.fail("a key in double quotes should be here" if self.peek() else "a { is never closed")
            key = json.loads(self.text[start : self.string()])
            if key in node.extra:
                raise duplicate_error(self.origin, self.text, key, (node.extra[key], start), kind="JSON")
            if self.peek() != ":":
                self.fail(f"a colon should follow the key {key!r}")
            self.at += 1
            node.extra[key] = start
            node.items[key] = self.node(depth + 1)  # type: ignore[index]
            self.comma("}")
        self.at += 1
        node.end = self.at
        return node

    def list(self, depth: int) -> TextNode:
        node = TextNode(self.at, 0, items={}, is_list=True)
        self.at += 1
        while self.peek() != "]":
            node.items[len(node.items)] = self.node(depth + 1)  # type: ignore[index,arg-type]
            self.comma("]")
        self.at += 1
        node.end = self.at
        return node

    def comma(self, closing: str) -> None:
        if self.peek() == ",":
            self.at += 1
        elif self.peek() != closing:
            found = f"found {self.peek()!r}" if self.peek() else "the file ends"
            self.fail(f"a comma or {closing} should be here; {found}")


def format_json(value: Any, like: str = "") -> str:
    """Format a value as JSON."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WrongUse(f"the value {value}", found="JSON has no such number", cure="Give a finite one.")
        return format_float(value, like)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {format_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_json, value)) + "]"
    return json.dumps(value, ensure_ascii="\\u" in like)


class _JsonFormat(ConfigFormat):
    """The format."""

    kind = "json"
    comment = _COMMENT

    def parse(self, text: str, origin: str) -> TextNode:
        return _JsonReader(text, origin).whole()

    def write(self, value: Any, like: str = "") -> str:
        return format_json(value, like)

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        if not node.is_section:
            refuse_leaf(page, path, node)
        members = [(json.dumps(key), value) for key, value in new.items()]
        if not node.items:
            return [_fill_empty(page, node, members)]
        key_start, last = node.extra[list(node.items)[-1]], list(node.items.values())[-1]
        if page.text[page.line_start(key_start) : key_start].strip(" \t"):
            return _append_members(
                page, last.end, ",".join(f" {key}: {format_json(value)}" for key, value in members)
            )
        indent, step = page.indent(key_start), _json_indent(page)
        lead = page.newline + indent
        body = [f"{lead}{key}: {_format_section(value, page, indent, step)}" for key, value in members]
        return _append_members(page, last.end, ",".join(body))


def _append_members(page: ParsedConfig, end: int, body: str) -> list[Splice]:
    """Add members after the last one, with a trailing comma if the file has one there.

    Members on lines of their own go below a comment that stands behind the last one.
    """
    blank = _BLANK.match(page.text, end)
    comma = blank.end() if blank else end
    trailing = page.text.startswith(",", comma)
    at = comma + 1 if trailing else end
    below = _REST_OF_LINE.match(page.text, at) if body.startswith(page.newline) else None
    put = Splice(below.end(), below.end(), body) if below else Splice(at, at, body)
    if trailing:
        return [Splice(put.start, put.end, body + ",")]
    if put.start == end:
        return [Splice(end, end, "," + body)]
    return [Splice(end, end, ","), put]


def _fill_empty(page: ParsedConfig, node: TextNode, members: list[tuple[str, Any]]) -> Splice:
    """Add members to `{}`, whatever comments are in it."""
    step = _json_indent(page)
    if "\n" not in page.text.strip():
        return Splice(node.start + 1, node.start + 1, ", ".join(f"{k}: {format_json(v)}" for k, v in members))
    inner = page.indent(node.start) + step
    lines = [
        f"{page.newline}{inner}{key}: {_format_section(value, page, inner, step)}" for key, value in members
    ]
    blank = not page.text[node.start + 1 : node.end - 1].strip(" \t")
    tail = page.newline + page.indent(node.start) if blank else ""
    return Splice(node.start + 1, node.end - 1 if blank else node.start + 1, ",".join(lines) + tail)


def _format_section(value: Any, page: ParsedConfig, indent: str, step: str) -> str:
    """Format a new section over several lines, as the file around it is."""
    if not isinstance(value, dict):
        return format_json(value)
    inner = indent + step
    lines = [f"{inner}{json.dumps(k)}: {_format_section(v, page, inner, step)}" for k, v in value.items()]
    return "{" + page.newline + f",{page.newline}".join(lines) + page.newline + indent + "}"


def _json_indent(page: ParsedConfig) -> str:
    """Return one level of this file's indentation: the blanks before its first indented line."""
    match = re.search(r"[\r\n]([ \t]+)\S", page.text)
    return match[1] if match else "  "


JSON = _JsonFormat()
