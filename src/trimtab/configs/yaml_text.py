"""YAML with comments, anchors, aliases, merge keys, flow and block style and several documents.

PyYAML's parser says what stands where.

A value is written so that readers of YAML 1.1 (PyYAML and all that stands on it) and of YAML 1.2 agree about
it: floats have a point and a signed exponent, text that looks like something else is quoted. It is read as it
was meant: `2e-4` is a number here, though PyYAML alone takes it for text, and `yes` is true.

An alias is replaced where it stands, and a key that `<<` inherits is overridden where it is inherited: what
others read does not change. With several documents in a file, a path begins with the number of one, from 0.

Not covered: keys that are lists or mappings (they are left alone), and making a section in place of a value.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.configs.text_edit import (
    DEEPEST,
    MOST_NODES,
    ConfigFormat,
    KeyPath,
    NewKeys,
    ParsedConfig,
    Splice,
    TextNode,
    duplicate_error,
    format_float,
    node_value,
    parse_error,
    parse_error_at,
    parse_text,
    refuse_leaf,
    replace_list,
    same_value,
    walk_nodes,
)
from trimtab.errors import WrongUse
from trimtab.jobs.yaml_files import NULL, parse_scalar

if TYPE_CHECKING:
    from collections.abc import Iterator

    import yaml

_PROPERTIES = re.compile(r"(?:[&!][^\s,\[\]{}]*(?:[ \t]+|$|(?=[\s,\]}]))|[\r\n][ \t]*|#[^\r\n]*)*")
_GAP = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_COMMENT = r"(?<=[ \t\r\n])#[^\r\n]*"
_COLON = re.compile(r"\s*:")
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_TAG}{name}": name for name in ("str", "int", "float", "bool", "null")}

_PAIRS = {"true": "false", "yes": "no", "on": "off"}
_LOOKS_LIKE_MORE = re.compile(r"[-+]?\d[\d_]*(?::[\d.]+)+|\d{4}-\d\d?-\d\d?.*|=|<<|[-+]?[\d_.]*", re.DOTALL)
"""Text that some reader takes for a time, a date, a boolean or a number."""
_SAFE = re.compile(r"[A-Za-z0-9_./][\w./+@-]*(?: [\w./+@-]+)*", re.ASCII)


def read_yaml(text: str, origin: str) -> ParsedConfig:
    """Parse a YAML text of one or several documents.

    >>> read_yaml("lr: 2e-4  # small", "a.yaml").edit({("lr",): 5e-5})
    'lr: 5.0e-5  # small'
    """
    return parse_text(text, origin, YAML)


@dataclass(slots=True)
class _YamlExtra:
    """Places and properties of a YAML node."""

    begin: int
    """Where it begins with its anchor and tag."""
    flow: bool = True
    """Inside of brackets, or a scalar."""
    anchor: str = ""
    tag: str = ""
    readers: list[TextNode] = field(default_factory=list)
    """The aliases of this anchor."""
    keys: dict[str | int, int] = field(default_factory=dict)
    """Where its own keys begin."""
    size: int = 1
    """Values in it, itself included."""
    last: TextNode | None = None
    """The value that ends it."""
    after: int | None = None
    """Where a value on the line of its key could begin."""


@dataclass
class _Composer:
    """Composes nodes from the parser's events."""

    text: str
    origin: str
    anchors: dict[str, TextNode] = field(default_factory=dict)
    open_anchors: set[str] = field(default_factory=set)
    count: int = 0

    def documents(self) -> Iterator[TextNode]:
        events = self.events()
        for event in events:
            if type(event).__name__ == "DocumentStartEvent":
                self.anchors = {}
                root = self.node(next(events), events, 0)
                if root.items is None and root.extra.begin == root.end:
                    root.style = "void"
                yield root

    def events(self) -> Iterator[yaml.Event]:
        import yaml

        try:
            yield from yaml.parse(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.MarkedYAMLError as problem:
            mark = problem.problem_mark or problem.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            message = ", ".join(part for part in (problem.context, problem.problem) if part)
            raise parse_error(self.origin, line, column, message or "not YAML", kind="YAML") from None
        except yaml.reader.ReaderError as problem:
            at = problem.position if isinstance(problem.position, int) else 0
            found = f"a character that YAML does not allow ({problem.reason})"
            raise parse_error_at(self.origin, self.text, at, found, kind="YAML") from None

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> TextNode:
        self.count += 1
        name = type(event).__name__
        if depth > DEEPEST or self.count > MOST_NODES:
            self.refuse_size(event.start_mark.index, deep=depth > DEEPEST)
        if name == "AliasEvent":
            return self.alias(event)
        if name == "ScalarEvent":
            node = self.scalar(event)
        else:
            node = self.begun(event, is_list=name == "SequenceStartEvent")
        if event.anchor:
            self.refuse_glued_anchor(event)
            node.extra.anchor = event.anchor
            self.anchors[event.anchor] = node
        if node.items is None:
            return node
        if event.anchor:
            self.open_anchors.add(event.anchor)
        before = self.count
        (self.fill_list if node.is_list else self.fill_section)(node, events, depth)
        node.extra.size = 1 + self.count - before
        self.open_anchors.discard(event.anchor or "")
        return node

    def refuse_glued_anchor(self, event: yaml.Event) -> None:
        """Refuse `&name:value`: some readers take all of it for the name, and others only its start."""
        at = self.text.index(f"&{event.anchor}", event.start_mark.index)
        behind = at + 1 + len(event.anchor)
        if self.text[behind : behind + 1] in ("?", ":", "%", "@", "`"):
            found = f"the anchor &{event.anchor} and what follows it have no blank between them"
            raise parse_error_at(self.origin, self.text, at, found, kind="YAML")

    def refuse_size(self, at: int, *, deep: bool) -> None:
        found = (
            f"more than {DEEPEST} levels of nesting"
            if deep
            else f"more than {MOST_NODES} values, aliases counted"
        )
        raise parse_error_at(self.origin, self.text, at, found, kind="YAML")

    def begun(self, event: yaml.Event, *, is_list: bool) -> TextNode:
        begin = event.start_mark.index
        properties = _PROPERTIES.match(self.text, begin) if event.anchor or event.tag else None
        start = properties.end() if properties else begin
        more = _YamlExtra(begin=begin, flow=bool(event.flow_style))
        custom = event.tag and event.tag not in (f"{_TAG}map", f"{_TAG}seq", "!")
        return TextNode(
            start,
            -1,
            items={},
            is_list=is_list,
            extra=more,
            style="flow" if more.flow else "block",
            computed=self.text[begin : self.line_end(begin)] if custom else "",
        )

    def line_end(self, at: int) -> int:
        match = re.compile(r"[\r\n]").search(self.text, at)
        return match.start() if match else len(self.text)

    def scalar(self, event: yaml.Event) -> TextNode:
        begin, end = event.start_mark.index, event.end_mark.index
        start = begin
        if event.anchor or event.tag:
            properties = _PROPERTIES.match(self.text, begin, end)
            start = properties.end() if properties else begin
        tag = event.tag or ""
        node = TextNode(start, end, style=event.style or "", extra=_YamlExtra(begin=begin, tag=tag))
        if tag and tag != "!" and tag not in _PLAIN_TAGS:
            node.value = event.value
            node.computed = self.text[begin:end]
            return node
        node.value = _resolve_scalar(event.value, tag, plain=not event.style)
        if isinstance(node.value, str) and "${" in node.value:
            node.computed = node.value
        return node

    def alias(self, event: yaml.Event) -> TextNode:
        begin, end = event.start_mark.index, event.end_mark.index
        target = self.anchors.get(event.anchor)
        if target is None:
            found = f"*{event.anchor} is read here, and no anchor &{event.anchor} comes before it"
            raise parse_error_at(self.origin, self.text, begin, found, kind="YAML")
        through = f"*{event.anchor}"
        if event.anchor in self.open_anchors:
            return TextNode(
                begin, end, value=None, computed=through, extra=_YamlExtra(begin=begin), style="alias"
            )
        if self.count + target.extra.size > MOST_NODES:
            self.refuse_size(begin, deep=False)
        node = self.cloned(target, through)
        node.start, node.end, node.style = begin, end, "alias"
        node.extra = _YamlExtra(begin=begin, anchor=event.anchor, size=target.extra.size)
        target.extra.readers.append(node)
        if node.is_section:
            for child in (node.items or {}).values():
                child.inherited = True
        return node

    def cloned(self, node: TextNode, through: str) -> TextNode:
        """Copy a node for an alias, with the spans of the original."""
        self.count += 1
        if self.count > MOST_NODES:
            self.refuse_size(node.start, deep=False)
        items = None
        if node.items is not None:
            items = {key: self.cloned(child, through) for key, child in node.items.items()}
        return TextNode(
            node.start,
            node.end,
            value=node.value,
            items=items,
            is_list=node.is_list,
            computed=node.computed,
            style=node.style,
            shared=through,
            extra=_YamlExtra(begin=node.start),
        )

    def fill_list(self, node: TextNode, events: Iterator[yaml.Event], depth: int) -> None:
        items: dict[str | int, TextNode] = {}
        for event in events:
            if type(event).__name__ == "SequenceEndEvent":
                node.end = event.end_mark.index
                break
            node.extra.last = items[len(items)] = self.node(event, events, depth + 1)
        node.items = items

    def key(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> tuple[str | None, bool]:
        """Return the text of a key, and whether it has no quotes; None for a key that is no scalar."""
        if type(event).__name__ == "ScalarEvent" and not event.anchor:
            return str(event.value), not event.style
        node = self.node(event, events, depth + 1)
        if node.items is not None:
            return None, False
        return str(getattr(event, "value", None) or node.value), not node.style

    def fill_section(self, node: TextNode, events: Iterator[yaml.Event], depth: int) -> None:
        items: dict[str | int, TextNode] = {}
        inherited: list[TextNode] = []
        for event in events:
            if type(event).__name__ == "MappingEndEvent":
                node.end = event.end_mark.index
                break
            name, is_plain = self.key(event, events, depth)
            node.extra.last = value = self.node(next(events), events, depth + 1)
            colon = _COLON.match(self.text, event.end_mark.index)
            value.extra.after = _value_start(value, colon.end() if colon else None)
            if colon is None and node.style == "block" and value.items is None:
                value.style = "unsaid"
            if name is None:
                continue
            if name == "<<" and is_plain:
                inherited += list((value.items or {}).values()) if value.is_list else [value]
                continue
            begin = event.start_mark.index
            if name in items:
                places = (node.extra.keys[name], begin)
                raise duplicate_error(self.origin, self.text, name, places, kind="YAML")
            items[name] = value
            node.extra.keys[name] = begin
        for source in inherited:
            for own, child in (source.items or {}).items():
                if own not in items:
                    items[own] = self.cloned(child, child.shared or "<<")
                    items[own].inherited = True
        node.items = items


def _value_start(value: TextNode, colon: int | None) -> int | None:
    """Return the place after the anchor of a value, or after the colon of its key."""
    if value.items is None or value.extra.begin == value.start:
        return colon
    return int(value.start) if value.style == "flow" else int(value.extra.begin) + 1 + len(value.extra.anchor)


def _resolve_scalar(text: str, tag: str, *, plain: bool) -> Any:
    """Return the value of a scalar."""
    wanted = _PLAIN_TAGS.get(tag, "str" if tag == "!" or not plain else "")
    if wanted == "str":
        return text
    if wanted == "float":
        number = parse_scalar(text)
        return float(number) if isinstance(number, int) and not isinstance(number, bool) else number
    return parse_scalar(text)


def format_yaml(value: Any, like: str = "") -> str:
    """Format a value on one line, in the style of the old text."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{format_yaml(key)}: {format_yaml(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_yaml, value)) + "]"
    if isinstance(value, str):
        return _format_text(value, like)
    if value is None:
        return like if like in NULL and like else "null"
    return _format_boolean(value, like) if isinstance(value, bool) else _format_number(value, like)


def _format_number(value: float, like: str) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return format_float(value, like)
    return "-.inf" if value < 0 else f".{value}"


def _format_boolean(value: bool, like: str) -> str:
    """Format a boolean in the words and the case of the old one: True, yes, ON."""
    low = like.lower()
    yes = next((word for word, no in _PAIRS.items() if low in (word, no)), "true")
    word = yes if value else _PAIRS[yes]
    if low not in (yes, _PAIRS[yes]):
        return word
    return word.upper() if like.isupper() else word.capitalize() if like[0].isupper() else word


def _format_text(value: str, like: str) -> str:
    quote = like[:1] if like[:1] in ("'", '"') else ""
    is_plain = (
        _SAFE.fullmatch(value)
        and isinstance(parse_scalar(value), str)
        and not _LOOKS_LIKE_MORE.fullmatch(value)
    )
    if is_plain and not quote:
        return value
    if quote == "'" and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    return '"' + "".join(map(_escape_letter, value)) + '"'


def _escape_letter(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter.isprintable():
        return letter
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(letter)
    code = ord(letter)
    wide = f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 - the width of \u
    return short or wide


class _YamlFormat(ConfigFormat):
    """The format."""

    kind = "yaml"
    comment = _COMMENT

    def parse(self, text: str, origin: str) -> TextNode:
        documents = list(_Composer(text, origin).documents())
        if len(documents) == 1:
            return documents[0]
        if not documents:
            return TextNode(
                len(text), len(text), items={}, style="nothing", extra=_YamlExtra(begin=len(text))
            )
        return TextNode(
            0,
            len(text),
            items=dict(enumerate(documents)),
            is_list=True,
            style="documents",
            extra=_YamlExtra(begin=0),
        )

    def write(self, value: Any, like: str = "") -> str:
        return format_yaml(value, like)

    def replace(self, page: ParsedConfig, node: TextNode, value: Any, moving: set[int]) -> list[Splice]:
        if node.style == "alias":
            return [Splice(node.start, node.end, format_yaml(value))]
        if node.style == "void":
            found = "this document is empty"
            raise WrongUse(page.locate(node.start), found=found, cure="Name a key to be added to it.")
        if node.shared:
            _refuse_inherited(page, node)
        if node.computed and node.items is None and node.extra.tag not in _PLAIN_TAGS:
            begin = node.extra.begin if node.extra.tag not in ("", "!") else node.start
            return [Splice(begin, node.end, format_yaml(value))]
        kept = _move_anchor(page, node, moving)
        if node.items is not None:
            return kept + _replace_block_list(self, page, node, value, moving)
        return kept + _drop_tag(page, node, value) + _replace_scalar(page, node, value)

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        if node.style == "alias" and node.is_section:
            merged = ", ".join(f"{format_yaml(key)}: {format_yaml(value)}" for key, value in new.items())
            return [Splice(node.start, node.end, f"{{<<: *{node.extra.anchor}, {merged}}}")]
        if node.style == "nothing":
            return [page.insert_lines(len(page.text), _format_lines(new, "", _yaml_indent(page)))]
        if node.is_section:
            return (
                [_add_to_flow(page, node, new)] if node.style == "flow" else [_add_to_block(page, node, new)]
            )
        if node.value is not None or node.computed:
            refuse_leaf(page, path, node)
        return _replace_null(page, path, node, new)

    def keep_beside(self, page: ParsedConfig, node: TextNode) -> list[Splice]:
        end = page.line_end(node.end)
        return [Splice(end, end, f"  # was: {' '.join(node.computed.split())}")]


def _refuse_inherited(page: ParsedConfig, node: TextNode) -> None:
    raise WrongUse(
        page.locate(node.start),
        found=f"this value is read elsewhere through {node.shared}, as a part of a whole",
        cure="Change it where it stands, or write the section out where it is read.",
    )


def _move_anchor(page: ParsedConfig, node: TextNode, moving: set[int]) -> list[Splice]:
    """Keep the value of aliases: the first of them takes over the anchor and the old text."""
    taken = _hand_over_anchor(page, node, moving)
    if not taken:
        return []
    start = page.text.index("&", node.extra.begin)
    name = re.compile(r"&[^\s,\[\]{}]*[ \t]*").match(page.text, start)
    return [Splice(start, name.end() if name else start + 1, ""), *taken]


def _save_anchors(page: ParsedConfig, dropped: list[TextNode], moving: set[int]) -> list[Splice]:
    """Do the same for everything inside values that are removed."""
    inside = [inner for child in dropped for _, inner in walk_nodes(child)]
    gone = moving | {id(inner) for inner in inside}
    own = [inner for inner in inside if inner.style != "alias" and not inner.shared]
    return [splice for inner in own for splice in _hand_over_anchor(page, inner, gone)]


def _hand_over_anchor(page: ParsedConfig, node: TextNode, moving: set[int]) -> list[Splice]:
    readers = [reader for reader in node.extra.readers if id(reader) not in moving]
    if not readers:
        return []
    old = page.text[node.start : node.end] or "null"
    if node.items is not None or "\n" in old or "\r" in old:
        raise WrongUse(
            page.locate(node.start),
            found=f"{len(readers)} other places read this value through *{node.extra.anchor}",
            cure="Write the value out there, or change all of them.",
        )
    first = min(readers, key=lambda reader: reader.start)
    return [Splice(first.start, first.end, f"&{node.extra.anchor} {old}")]


def _drop_tag(page: ParsedConfig, node: TextNode, value: Any) -> list[Splice]:
    """Drop a tag that says another type than the new value has."""
    tag = _PLAIN_TAGS.get(node.extra.tag, "str" if node.extra.tag == "!" else "")
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "null": type(None)}
    if not tag or type(value) is kinds[tag]:
        return []
    match = re.compile(r"![^\s,\[\]{}]*[ \t]*").search(page.text, node.extra.begin, node.start)
    return [Splice(match.start(), match.end(), "")] if match else []


def _replace_scalar(page: ParsedConfig, node: TextNode, value: Any) -> list[Splice]:
    old = page.text[node.start : node.end]
    if node.style == "unsaid" and not old:
        raise WrongUse(
            page.locate(node.start),
            found="a key that begins with ? and has no value",
            cure="Write it with a colon, then try again.",
        )
    if node.style in ("|", ">"):
        return _replace_block_text(page, node, value)
    if node.start < node.end:
        # Behind a quote a comment may begin at once; behind anything else it needs a blank.
        gap = " " if page.text.startswith("#", node.end) else ""
        return [Splice(node.start, node.end, format_yaml(value, old) + gap)]
    before = page.text[node.start - 1 : node.start]
    text = format_yaml(value)
    if before in (":", "-") or not before.strip():
        return [Splice(node.start, node.end, text if not before.strip() else f" {text}")]
    # `{key}` and `? key` have no colon yet; an anchor or a tag needs a blank.
    return [Splice(node.start, node.end, f" {text}" if node.extra.begin < node.start else f": {text}")]


def _replace_block_text(page: ParsedConfig, node: TextNode, value: Any) -> list[Splice]:
    """Replace `|` and its lines; a comment after the `|` stays."""
    header = re.compile(r"[|>][-+0-9]*").match(page.text, node.start)
    head_end = header.end() if header else node.start + 1
    line_end = page.line_end(node.start)
    end = _content_end(page, node)
    # A `|` may stand in a column of its own that is too far left for anything else; its lines are not.
    inner = page.indent(page.next_line(node.start))
    alone = not page.text[page.line_start(node.start) : node.start].strip()
    pad = inner[page.place(node.start)[1] - 1 :] if alone else ""
    if alone and not node.value:  # no line of text shows how far to the right is far enough
        pad = " " * len(page.text[: node.start].rstrip().splitlines()[-1])
    gap = " " if page.text.startswith("#", head_end) else ""
    splices = [Splice(node.start, head_end, pad + format_yaml(value) + gap)]
    return splices + ([Splice(line_end, end, "")] if end > line_end else [])


def _content_end(page: ParsedConfig, node: TextNode) -> int:
    """Return the end of the last character of a node."""
    if node.style in ("|", ">") and node.items is None:
        text = page.text[node.start : node.end]
        header = re.match(r"[|>][-+0-9]*", text)
        if header and "+" in header[0]:
            return node.start + len(re.sub(r"(?:\r\n|\r|\n)[ \t]*\Z", "", text))
        return node.start + len(text.rstrip(" \t\r\n"))
    if node.items is None or node.style in ("flow", "alias"):
        return node.end
    return _content_end(page, node.extra.last) if node.extra.last is not None else node.start


def _replace_block_list(
    fmt: _YamlFormat, page: ParsedConfig, node: TextNode, value: Any, moving: set[int]
) -> list[Splice]:
    children = list((node.items or {}).values())
    if not isinstance(value, list | tuple):
        return _write_inline(page, node, format_yaml(value)) + _save_anchors(page, children, moving)
    if node.style == "flow":
        return _replace_flow_list(fmt, page, node, value, moving)
    changed = [
        splice
        for child, new in zip(children, value, strict=False)
        if child.computed or not same_value(node_value(child), new)
        for splice in fmt.replace(page, child, new, moving)
    ]
    if len(children) == len(value):
        return changed
    changed += _save_anchors(page, children[len(value) :], moving)
    if not value:
        return _write_inline(page, node, "[]") + changed
    if len(value) > len(children):
        dash = " " * (page.place(node.start)[1] - 1) + "- "
        at = page.next_line(_content_end(page, children[-1]))
        return [
            *changed,
            page.insert_lines(at, [dash + format_yaml(item) for item in value[len(children) :]]),
        ]
    dashes = _find_dashes(page, node)
    return changed + [
        _remove_item(page, dash, _content_end(page, child))
        for dash, child in list(zip(dashes, children, strict=True))[len(value) :]
    ]


def _replace_flow_list(
    fmt: _YamlFormat, page: ParsedConfig, node: TextNode, value: Any, moving: set[int]
) -> list[Splice]:
    around = fmt.edit_list(page, node, value, moving)
    children = list((node.items or {}).values())
    if around is None:
        return [
            replace_list(page, node, format_yaml(value), _COMMENT),
            *_save_anchors(page, children, moving),
        ]
    return around + _save_anchors(page, children[len(value) :], moving)


def _write_inline(page: ParsedConfig, node: TextNode, text: str) -> list[Splice]:
    """Write a value on the line of the key, in place of a list below it."""
    if node.style == "flow":
        return [replace_list(page, node, text, _COMMENT)]
    if node.extra.after is None:
        raise WrongUse(
            page.locate(node.start),
            found="a list of lists, one below the other",
            cure="Change its values one by one.",
        )
    children = (node.items or {}).values()
    gone = [
        _remove_item(page, dash, _content_end(page, child))
        for dash, child in zip(_find_dashes(page, node), children, strict=True)
    ]
    return [Splice(node.extra.after, node.extra.after, f" {text}"), *gone]


def _find_dashes(page: ParsedConfig, node: TextNode) -> list[int]:
    """Find the dashes of a block list: all in the column of the first."""
    column = page.place(node.start)[1] - 1
    dashes = [node.start]
    children = list((node.items or {}).values())
    for child in children[:-1]:
        at = page.next_line(_content_end(page, child))
        while page.text[at : at + column].strip(" ") or page.text[at + column : at + column + 1] != "-":
            at = page.next_line(at)
        dashes.append(at + column)
    return dashes


def _remove_item(page: ParsedConfig, start: int, end: int) -> Splice:
    """Remove an item with its line, or only the item if a comment is on the line."""
    before = page.text[page.line_start(start) : start]
    after = page.text[end : page.line_end(end)]
    if not before.strip() and not after.strip():
        return Splice(page.line_start(start), page.next_line(end), "")
    return Splice(start, end + len(after) - len(after.lstrip()), "")


def _add_to_flow(page: ParsedConfig, node: TextNode, new: NewKeys) -> Splice:
    quoted = any(page.text[at] == '"' for at in node.extra.keys.values())
    names = [_quote_text(str(key)) if quoted else format_yaml(key) for key in new]
    members = zip(names, new.values(), strict=True)
    body = ", ".join(f"{name}: {format_yaml(value)}" for name, value in members)
    if node.extra.last is None:
        return Splice(node.start + 1, node.start + 1, body)
    end = node.extra.last.end
    gap = _GAP.match(page.text, end)
    comma = gap.end() if gap else end
    if page.text.startswith(",", comma):
        return Splice(comma + 1, comma + 1, f" {body},")
    return Splice(end, end, f", {body}")


def _quote_text(text: str) -> str:
    return '"' + "".join(map(_escape_letter, text)) + '"'


def _add_to_block(page: ParsedConfig, node: TextNode, new: NewKeys) -> Splice:
    indent = " " * (page.place(node.start)[1] - 1)
    at = page.next_line(_content_end(page, node))
    return page.insert_lines(at, _format_lines(new, indent, _yaml_indent(page)))


def _replace_null(page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
    """Make a section of `key:` with nothing or null."""
    parent = page.root
    for key in path[:-1]:
        parent = (parent.items or {})[key]
    simple = node.extra.begin == node.start and parent.style == "block" and not parent.is_list
    if not path or (parent.style == "documents" and len(path) == 1):
        if page.text[node.start : node.end].strip():
            return [Splice(node.start, node.end, format_yaml(new))]
        at = node.end if node.end in page.line_starts else page.next_line(node.end)
        return [page.insert_lines(at, _format_lines(new, "", _yaml_indent(page)))]
    if not simple:
        blank = "" if page.text[node.start - 1 : node.start].strip() == "" else " "
        return [Splice(node.start, node.end, blank + format_yaml(new))]
    indent = " " * (page.place(parent.start)[1] - 1) + _yaml_indent(page)
    lines = page.insert_lines(page.next_line(node.end), _format_lines(new, indent, _yaml_indent(page)))
    return [Splice(node.start, node.end, ""), lines]


def _format_lines(new: NewKeys, indent: str, step: str) -> list[str]:
    lines = []
    for key, value in new.items():
        if isinstance(value, dict):
            lines += [f"{indent}{format_yaml(key)}:", *_format_lines(value, indent + step, step)]
        else:
            lines.append(f"{indent}{format_yaml(key)}: {format_yaml(value)}")
    return lines


def _yaml_indent(page: ParsedConfig) -> str:
    """Return one level of this file's indentation."""
    for _, node in walk_nodes(page.root):
        if node.style != "block" or node.is_list:
            continue
        column = page.place(node.start)[1]
        for child in (node.items or {}).values():
            if child.is_section and child.style == "block" and not child.shared:
                return " " * (page.place(child.start)[1] - column)
    return "  "


YAML = _YamlFormat()
