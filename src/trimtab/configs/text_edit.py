"""Edit a config file as text, and change nothing but the values named. All formats share this code.

    >>> from trimtab.configs import json_text
    >>> document = json_text.read_json('{"batch": 4}  // small', "a.json")
    >>> document.entries()[0].value
    4
    >>> document.edit({("batch",): 8})
    '{"batch": 8}  // small'

A format says where its values are (a tree of `TextNode`), how to write a value there and where a new key
goes. Everything else is here. An edit replaces only the characters of a value. The result is parsed again,
and refused if anything but the named values has changed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from trimtab.errors import BrokenFile, TrimtabError, UnknownName, WrongUse, find_nearest, shorten
from trimtab.spec.base import Noun

KeyPath = tuple[str | int, ...]
"""Keys from the outside in; a number is a place in a list."""
Changes = Mapping[KeyPath, Any]
NewKeys = dict[str | int, Any]
"""Keys to add to a section; a dict among the values becomes a section."""

DEEPEST = 200
"""Levels of nesting. A config has five; a file made to break parsers has a hundred thousand."""
MOST_NODES = 200_000
"""Values in one file, those that YAML aliases repeat included."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_BOM = "\ufeff"


def find_line_starts(text: str) -> list[int]:
    """Return the offset of each line."""
    return [0, *(match.end() for match in _LINE_END.finditer(text))]


class Entry(Noun, frozen=True, kw_only=True):
    """A value of a file and its place; line and column count from 1."""

    path: tuple[str | int, ...]
    value: Any
    """A string, a number, a boolean, None, a list of these, or an empty dict."""
    line: int
    column: int
    computed: str = ""
    """The source text, where it is no literal but something that a program works out."""


@dataclass(slots=True, eq=False)
class TextNode:
    """A value in the text. A section has `items`; a leaf has a `value`."""

    start: int
    end: int
    value: Any = None
    items: dict[str | int, TextNode] | None = None
    is_list: bool = False
    parts: dict[str | int, TextNode] | None = None
    """Values inside of a leaf that can be changed alone, as the count in `gpu:a100:4`."""
    computed: str = ""
    style: str = ""
    """How it is written, in the words of the format."""
    shared: str = ""
    """Through what it is read from elsewhere, as YAML aliases are."""
    inherited: bool = False
    """A key that its section reads from elsewhere: changing it means adding it to the section."""
    repeats: dict[str | int, list[int]] = field(default_factory=dict)
    """Keys that stand here more than once, with every place."""
    extra: Any = None
    """What else the format wants to remember."""

    @property
    def is_section(self) -> bool:
        """Whether it has keys, or could have."""
        return self.items is not None and not self.is_list


@dataclass(frozen=True, slots=True)
class Splice:
    """A replacement: these characters are replaced by this text."""

    start: int
    end: int
    text: str
    order: int = 0
    """Among those at one place, the lower comes first."""


class ConfigFormat:
    """Base of the formats: what a format must define, and what most of them share."""

    kind: str
    comment: str = ""
    """The pattern of its comments."""

    def parse(self, text: str, origin: str) -> TextNode:
        """Return the tree of a text, or raise BrokenFile."""
        raise NotImplementedError

    def write(self, value: Any, like: str = "") -> str:
        """Format a value in the style of the old text."""
        raise NotImplementedError

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        """Add keys to a section; a dict among the values becomes a section."""
        raise NotImplementedError

    def replace(self, page: ParsedConfig, node: TextNode, value: Any, moving: set[int], /) -> list[Splice]:
        """Replace a value: a list item by item if possible, anything else as a whole.

        `moving` holds the ids of all nodes that change.
        """
        splices = self.edit_list(page, node, value, moving) if node.is_list else None
        if splices is not None:
            return splices
        return [replace_list(page, node, self.write(value, page.text[node.start : node.end]), self.comment)]

    def edit_list(  # noqa: PLR0913 - a list, its new items, and how they are written
        self,
        page: ParsedConfig,
        node: TextNode,
        value: Any,
        moving: set[int],
        *,
        write: Callable[[Any], str] | None = None,
        lone_comma: bool = False,
    ) -> list[Splice] | None:
        """Change a list in brackets item by item; make it longer or shorter around its comments.

        Return None if the whole list should be written again: there is no comment to keep, or something else
        is between its items. `lone_comma`: a single item needs a comma, as in Python's tuples.
        """
        if not isinstance(value, list | tuple):
            return None
        children = list((node.items or {}).values())
        changed = [
            splice
            for child, new in zip(children, value, strict=False)
            if child.computed or not same_value(_comparable_value(child), new)
            for splice in self.replace(page, child, new, moving)
        ]
        if len(children) == len(value):
            return changed
        edges = [node.start + 1, *(edge for child in children for edge in (child.start, child.end))]
        gaps = list(zip(edges[::2], [*edges[1::2], node.end - 1], strict=True))
        bare = {
            start: re.sub(self.comment, lambda match: " " * len(match[0]), page.text[start:end])
            for start, end in gaps
            if start <= end
        }
        saves = any(page.text[start:end] != bare.get(start) for start, end in gaps)
        if not saves or any(gap.strip() not in ("", ",") for gap in bare.values()):
            return None
        if len(value) > len(children):
            new_items = ", ".join(map(write or self.write, value[len(children) :]))
            return changed + _extend_list(page, node, new_items, self.comment)
        commas = [start + gap.index(",") for start, gap in bare.items() if "," in gap]
        after = children[len(value) - 1].end if value else node.start
        gone = [comma for comma in commas if comma >= after][lone_comma and len(value) == 1 :]
        dropped = [Splice(child.start, child.end, "") for child in children[len(value) :]]
        return changed + dropped + [Splice(comma, comma + 1, "") for comma in gone]

    def keep_beside(self, page: ParsedConfig, node: TextNode) -> list[Splice]:
        """Keep the old expression in a comment on its line; raise WrongUse if the format has none."""
        found = f"{self.kind.upper()} has no computed values"
        raise WrongUse(page.locate(node.start), found=found, cure="Change it by hand.")

    def means(self, node: TextNode, wanted: Any) -> bool:
        """Return whether a leaf means the wanted value."""
        return same_value(node_value(node), wanted)


@dataclass(frozen=True)
class ParsedConfig:
    """A config: its text, its tree, and its format."""

    text: str
    origin: str
    root: TextNode
    format: ConfigFormat
    bom: str = ""

    @property
    def kind(self) -> str:
        """The format: yaml, toml, json, python, shell or sbatch."""
        return self.format.kind

    @cached_property
    def line_starts(self) -> list[int]:
        """The offset of each line."""
        return find_line_starts(self.text)

    @cached_property
    def newline(self) -> str:
        """The line ending of this file: its first one."""
        match = _LINE_END.search(self.text)
        return match[0] if match else "\n"

    def place(self, offset: int) -> tuple[int, int]:
        """Return line and column, counted from 1."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def locate(self, offset: int) -> str:
        """Return `FILE:LINE:COLUMN`."""
        line, column = self.place(offset)
        return f"{self.origin}:{line}:{column}"

    def line_end(self, offset: int) -> int:
        """Return the end of the line at this place, before its line ending."""
        match = _LINE_END.search(self.text, offset)
        return match.start() if match else len(self.text)

    def line_start(self, offset: int) -> int:
        """Return the start of the line at this place."""
        return self.line_starts[bisect_right(self.line_starts, offset) - 1]

    def next_line(self, offset: int) -> int:
        """Return the start of the line after this place, or the end of the text."""
        match = _LINE_END.search(self.text, offset)
        return match.end() if match else len(self.text)

    def indent(self, offset: int) -> str:
        """Return the blanks that begin the line at this place."""
        start = self.line_start(offset)
        match = re.compile(r"[ \t]*").match(self.text, start)
        return match[0] if match else ""

    def insert_lines(self, at: int, lines: list[str]) -> Splice:
        """Insert lines at the start of a line, or after a last line without an end."""
        body = self.newline.join(lines)
        if at == len(self.text) and at > self.line_starts[-1]:
            return Splice(at, at, self.newline + body)
        return Splice(at, at, body + self.newline)

    def entries(self) -> list[Entry]:
        """Return all values, in the order of the file."""
        return [self._entry(path, node) for path, node in walk_nodes(self.root) if is_entry(node)]

    def _entry(self, path: KeyPath, node: TextNode) -> Entry:
        line, column = self.place(node.start)
        return Entry(path=path, value=node_value(node), line=line, column=column, computed=node.computed)

    def edit(self, changes: Changes, *, beside: bool = False, add: bool = False) -> str:
        """Return the whole text with these values changed, and nothing else."""
        _refuse_impossible(self, changes)
        try:
            return self.bom + self._edit(changes, beside=beside, add=add)
        except TrimtabError as problem:
            if isinstance(problem, WrongUse) or len(changes) == 1:
                raise
        # Two values can be entangled, as an anchor and a list that reads it are: one after the other, then.
        page = self
        for path, value in changes.items():
            page = reparse_text(self, page._edit({path: value}, beside=beside, add=add))
        verify_edit(self, page, changes, [Splice(0, len(self.text), page.text)])
        return self.bom + page.text

    def _edit(self, changes: Changes, *, beside: bool, add: bool) -> str:
        splices = _build_splices(self, changes, beside=beside, add=add)
        if not splices:
            return self.text
        after = apply_splices(self.text, splices)
        verify_edit(self, reparse_text(self, after), changes, splices)
        return after


def parse_text(text: str, origin: str, fmt: ConfigFormat) -> ParsedConfig:
    """Parse a text; keep a byte order mark apart."""
    bom = _BOM if text.startswith(_BOM) else ""
    body = text[len(bom) :]
    return ParsedConfig(text=body, origin=origin, root=fmt.parse(body, origin), format=fmt, bom=bom)


def reparse_text(before: ParsedConfig, text: str) -> ParsedConfig:
    """Parse the edited text again; a failure here is a bug of trimtab, not the user's mistake."""
    try:
        return parse_text(text, before.origin, before.format)
    except WrongUse as problem:
        raise TrimtabError(
            f"the edit of {before.origin}",
            found=f"the edited text would not be {before.kind} any more ({problem.found})",
            cure="Nothing was written. This is a bug of trimtab: please report the line that was edited.",
        ) from problem


def format_path(path: KeyPath) -> str:
    """Format a path as people write it.

    >>> format_path(("stages", 0, "batch"))
    'stages[0].batch'
    """
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            shown = key if re.fullmatch(r"[^\s.\[\]\"]+", key) else '"' + key.replace('"', '\\"') + '"'
            text += f".{shown}" if text else shown
    return text or "(the whole file)"


_STEP = re.compile(r'\[(\d+)\]|(?:(?<!^)\.)?(?:"((?:[^"\\]|\\.)*)"|([^.\[\]"]+))')


def parse_path(text: str) -> KeyPath:
    """Parse a path as people write it; the document resolves `stages.0.batch`, since it knows its lists.

    >>> parse_path('stages[0]."a.b".c')
    ('stages', 0, 'a.b', 'c')
    """
    path: list[str | int] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        if match is None:
            raise WrongUse(
                f"the key {shorten(text)!r}",
                found=f"it cannot be read from character {at + 1} on",
                cure='Write keys with dots, places in lists as [0], odd keys in quotes: stages[0]."a.b".',
            )
        index, quoted, bare = match.groups()
        path.append(int(index) if index else re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else bare)
        at = match.end()
    return tuple(path)


def walk_nodes(node: TextNode, path: KeyPath = ()) -> Iterator[tuple[KeyPath, TextNode]]:
    """Yield this node and every node below it, with its path."""
    stack = [(path, node)]
    while stack:
        path, node = stack.pop()
        yield path, node
        inner = node.items or node.parts
        if inner:
            stack += [((*path, key), child) for key, child in reversed(inner.items())]


def is_entry(node: TextNode) -> bool:
    """Return whether a node is an entry: a leaf, an empty section, or a list of values only."""
    return node.items is None or not node.items or (node.is_list and is_flat(node))


def is_flat(node: TextNode) -> bool:
    """Return whether a node is a value, or a list of values and such lists."""
    if node.items is None:
        return True
    return node.is_list and all(is_flat(child) for child in node.items.values())


def node_value(node: TextNode) -> Any:
    """Return the value of an entry's node."""
    if node.items is None:
        return node.value
    return [node_value(child) for child in node.items.values()] if node.is_list else {}


def same_value(found: Any, wanted: Any) -> bool:
    """Return whether two values are the same to a reader: 4 and 4.0 are, 1 and True are not.

    >>> same_value(4, 4.0), same_value(1, True), same_value([1, "a"], [1, "a"])
    (True, False, True)
    """
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same_value, found, wanted))
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, float) and isinstance(wanted, float) and math.isnan(found):
        return math.isnan(wanted)
    numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
    return bool(found == wanted) and (numbers or type(found) is type(wanted))


def replace_list(page: ParsedConfig, node: TextNode, text: str, comment: str) -> Splice:
    """Replace a whole list in brackets; its comments follow the new text."""
    pattern = re.compile(comment)
    at, comments = node.start, []
    leaves = sorted((leaf.start, leaf.end) for _, leaf in walk_nodes(node) if leaf.items is None)
    for start, end in [*leaves, (node.end, node.end)] if node.items else []:
        comments += [match[0] for match in pattern.finditer(page.text, at, max(at, start))]
        at = end
    if not comments:
        return Splice(node.start, node.end, text)
    rest = page.text[node.end : page.line_end(node.end)]
    ends_line = not rest.strip() or pattern.match(page.text, node.end + len(rest) - len(rest.lstrip()))
    tail = "" if ends_line else page.newline + page.indent(node.start)
    return Splice(node.start, node.end, f"{text}  {' '.join(comments)}{tail}")


def _extend_list(page: ParsedConfig, node: TextNode, text: str, comment: str) -> list[Splice]:
    """Add items after the last one; below the comment that follows it, if there is one."""
    if not node.items:
        return [Splice(node.start + 1, node.start + 1, text)]
    last = list(node.items.values())[-1]
    rest = re.compile(rf"[ \t]*(,?)[ \t]*(?:{comment})", re.DOTALL).match(page.text, last.end)
    if not rest:
        return [Splice(last.end, last.end, f", {text}")]
    below = f"{page.newline}{page.indent(last.start)}{text}"
    if rest[1]:
        return [Splice(rest.end(), rest.end(), below + ",")]
    return [Splice(last.end, last.end, ","), Splice(rest.end(), rest.end(), below)]


def apply_splices(text: str, splices: list[Splice]) -> str:
    """Return the text with these parts replaced; insertions at one place keep their order."""
    pieces, at = [], 0
    done: Splice | None = None
    for splice in sorted(splices, key=lambda splice: (splice.start, splice.order, splice.end)):
        if splice == done and splice.start < splice.end:
            continue  # two names of one value, both with the same new one
        done = splice
        if splice.start < at:
            raise TrimtabError(
                "an edit of two values at once",
                found="their places overlap",
                cure="Nothing was written. Change one of them at a time.",
            )
        pieces += [text[at : splice.start], splice.text]
        at = splice.end
    return "".join([*pieces, text[at:]])


def verify_edit(before: ParsedConfig, after: ParsedConfig, changes: Changes, splices: list[Splice]) -> None:
    """Refuse a result in which a named value is not the wanted one, or another value has changed.

    An expression that holds a named value, as a call holds its arguments, changes with it.
    """
    old, new = _map_entries(before), _map_entries(after)
    for path, value in changes.items():
        found = new.get(path)
        if found is None or not after.format.means(found, value):
            shown = "nothing" if found is None else repr(node_value(found))
            _raise_bug(before, f"{format_path(path)} would read {shown} and not {value!r}")
    above = {path[:size] for path in changes for size in range(len(path) + 1)}
    others = [path for path in old.keys() | new.keys() if path not in above and not _is_inside(path, changes)]
    moved = [path for path in others if not _is_unmoved(old.get(path), new.get(path), splices)]
    if moved:
        _refuse_moved(before, sorted(moved, key=str), old, changes)


def _map_entries(page: ParsedConfig) -> dict[KeyPath, TextNode]:
    return {path: node for path, node in walk_nodes(page.root) if is_entry(node)}


def _is_inside(path: KeyPath, changes: Changes) -> bool:
    return any(path[:size] in changes for size in range(len(path) + 1))


def _is_unmoved(was: TextNode | None, now: TextNode | None, splices: list[Splice]) -> bool:
    if was is None or now is None:
        return False
    if (
        was.computed
        and now.computed
        and any(was.start <= splice.start and splice.end <= was.end for splice in splices)
    ):
        return True
    return was.computed == now.computed and same_value(node_value(was), node_value(now))


def _raise_bug(page: ParsedConfig, found: str) -> NoReturn:
    raise TrimtabError(
        f"the edit of {page.origin}",
        found=found,
        cure="Nothing was written. This is a bug of trimtab: please report the line that was edited.",
    )


def _refuse_moved(
    page: ParsedConfig, moved: list[KeyPath], old: dict[KeyPath, TextNode], changes: Changes
) -> NoReturn:
    """Raise because something else would change too: a reader of an alias, or a bug of trimtab."""
    readers = [path for path in moved if path in old and old[path].shared]
    named = ", ".join(format_path(path) for path in changes)
    if not readers:
        _raise_bug(page, f"{format_path(moved[0])} would change as well as {named}")
    shown = ", ".join(f"{format_path(path)} (through {old[path].shared})" for path in readers[:4])
    raise WrongUse(
        f"{page.origin}: {named}",
        found=f"the same value is read by {shown}, which would change with it",
        cure="Change those keys instead, or write the value out where it is shared.",
    )


def _refuse_impossible(page: ParsedConfig, changes: Changes) -> None:
    """Refuse values that no config holds, and changes that contradict each other."""
    for path, value in changes.items():
        if not path:
            raise WrongUse(page.origin, found="no key was named", cure="Name the key to change.")
        if not _is_writable(value):
            raise WrongUse(
                f"{page.origin}: {format_path(path)} = {shorten(repr(value))}",
                found="only text, numbers, booleans, None and lists of these can be written",
                cure="Name the keys inside of it one by one.",
            )
        outer = next((path[:size] for size in range(len(path)) if path[:size] in changes), None)
        if outer is not None:
            raise WrongUse(
                f"{page.origin}: {format_path(outer)} and {format_path(path)}",
                found="one is inside the other",
                cure="Change one of them.",
            )


def _is_writable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_writable, value))
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return False  # half a character: no file can hold it
    return value is None or isinstance(value, str | bool | int | float)


def _build_splices(page: ParsedConfig, changes: Changes, *, beside: bool, add: bool) -> list[Splice]:
    nodes = {path: _find_node(page, path) for path in changes}
    stays = {
        path
        for path, node in nodes.items()
        if node is not None
        and (not node.computed or isinstance(changes[path], str))
        and is_entry(node)
        and page.format.means(node, changes[path])
    }
    moving = {
        id(inner)
        for path, node in nodes.items()
        if node is not None and path not in stays
        for inner in _changing_nodes(node, changes[path])
    }
    splices: list[Splice] = []
    missing: list[KeyPath] = []
    for path, node in nodes.items():
        if path in stays:
            continue
        if node is None or node.inherited:
            missing.append(path)
            continue
        _refuse_section(page, path, node)
        if node.computed:
            splices += _keep_beside(page, path, node, allowed=beside)
        splices += page.format.replace(page, node, changes[path], moving)
    if not add:
        absent = next((path for path in missing if nodes[path] is None), None)
        if absent is not None:
            _refuse_missing(page, absent)
    return splices + _add_keys(page, {path: changes[path] for path in missing})


def _changing_nodes(node: TextNode, value: Any) -> Iterator[TextNode]:
    """Yield a node that gets this value, and the items of its list that change or go with it."""
    yield node
    children = list((node.items or {}).values())
    kept = value if node.is_list and isinstance(value, list | tuple) else ()
    for child, new in zip(children, kept, strict=False):
        if child.computed or not same_value(node_value(child), new):
            yield from _changing_nodes(child, new)
    for child in children[len(kept) :]:
        yield from (inner for _, inner in walk_nodes(child))


def _comparable_value(node: TextNode) -> Any:
    """Return the value of a node, or something that equals no value."""
    return node_value(node) if is_entry(node) else node


def _find_node(page: ParsedConfig, path: KeyPath) -> TextNode | None:
    """Return the node of a path; None if a key of it is missing."""
    node = page.root
    for size, key in enumerate(path):
        if key in node.repeats:
            _refuse_repeats(page, path[: size + 1], node.repeats[key])
        child = (node.items or node.parts or {}).get(key)
        if child is None:
            return None
        node = child
    return node


def _refuse_repeats(page: ParsedConfig, path: KeyPath, places: list[int]) -> NoReturn:
    lines = [str(page.place(place)[0]) for place in places]
    raise WrongUse(
        f"{page.origin}: {format_path(path)}",
        found=f"it is set more than once, in lines {' and '.join(lines)}",
        cure="Remove all but one of them, so that it is clear which counts.",
    )


def _refuse_section(page: ParsedConfig, path: KeyPath, node: TextNode) -> None:
    if not is_entry(node) or (node.is_section and not node.items):
        kind = "a list of sections" if node.is_list else "a section"
        inner = ", ".join(str(key) for key in list(node.items or {})[:4])
        raise WrongUse(
            f"{page.locate(node.start)}: {format_path(path)}",
            found=f"it is {kind}, not a value",
            cure=f"Name a key inside of it: {inner or 'it has none yet'}.",
        )


def _keep_beside(page: ParsedConfig, path: KeyPath, node: TextNode, *, allowed: bool) -> list[Splice]:
    if allowed:
        return page.format.keep_beside(page, node)
    raise WrongUse(
        f"{page.locate(node.start)}: {format_path(path)}",
        found=f"its value is computed: {shorten(node.computed)}",
        cure="Change it by hand, or let the literal be written and the old expression kept in a comment.",
    )


def _refuse_missing(page: ParsedConfig, path: KeyPath) -> NoReturn:
    known = {
        format_path(key_path): node
        for key_path, node in walk_nodes(page.root)
        if is_entry(node) or node.items
    }
    known.pop(format_path(()), None)
    wanted = format_path(path)
    close = find_nearest(wanted, known) or find_nearest(
        str(path[-1]), {name.rpartition(".")[2] for name in known}
    )
    lines = [f"{name} (line {page.place(known[name].start)[0]})" if name in known else name for name in close]
    raise UnknownName(
        f"{page.origin}: {wanted}",
        found="there is no such key" + (f"; the nearest are {', '.join(lines[:3])}" if lines else ""),
        cure="Name a key that the file has, or let it be added.",
    )


def _add_keys(page: ParsedConfig, changes: dict[KeyPath, Any]) -> list[Splice]:
    """Add keys, all that go into one section together."""
    sections: dict[KeyPath, dict[str | int, Any]] = {}
    for path, value in changes.items():
        home = _find_section(page, path)
        if not all(isinstance(key, str) for key in path[len(home) :]):
            _refuse_home(page, home, _find_node(page, home))
        level = sections.setdefault(home, {})
        for key in path[len(home) : -1]:
            level = level.setdefault(key, {})
        level[path[-1]] = value
    splices: list[Splice] = []
    # Two sections may end at one place: what goes into the inner one comes first.
    for home, new in sorted(sections.items(), key=lambda item: -len(item[0])):
        node = _find_node(page, home)
        if node is None or node.is_list or node.inherited:
            _refuse_home(page, home, node)
        splices += page.format.add(page, home, node, new)
    return splices


def _find_section(page: ParsedConfig, path: KeyPath) -> KeyPath:
    """Return the longest part of a path that exists already."""
    size = len(path) - 1
    while size and _find_node(page, path[:size]) is None:
        size -= 1
    return path[:size]


def _refuse_home(page: ParsedConfig, home: KeyPath, node: TextNode | None) -> NoReturn:
    where = page.locate(node.start) if node is not None else page.origin
    if node is not None and node.shared:
        found = "it comes from elsewhere as a whole"
    elif node is not None and node.is_list:
        found = f"it is a list of {len(node.items or ())}, with no such place"
    else:
        found = "it has no place in a list that could be made"
    raise WrongUse(
        f"{where}: {format_path(home)}", found=found, cure="Write it there by hand, then try again."
    )


def refuse_leaf(page: ParsedConfig, path: KeyPath, node: TextNode) -> NoReturn:
    """Raise because a key was to be added inside of a value."""
    raise WrongUse(
        f"{page.locate(node.start)}: {format_path(path)}",
        found=f"it is the value {shorten(repr(_comparable_value(node)))}, so that nothing can be added "
        "inside of it",
        cure="Name another key, or make it a section by hand.",
    )


def parse_error(origin: str, line: int, column: int, found: str, *, kind: str) -> BrokenFile:
    """Return an error for text that its format does not allow."""
    return BrokenFile(
        f"{origin}:{line}:{column}",
        found=found,
        cure=f"Correct the {kind} there, or name another format if it is none.",
    )


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Return line and column of a place in a text that is not parsed yet."""
    ends = [match.end() for match in _LINE_END.finditer(text, 0, offset)]
    return len(ends) + 1, offset - (ends[-1] if ends else 0) + 1


def parse_error_at(origin: str, text: str, offset: int, found: str, *, kind: str) -> BrokenFile:
    """Return the same error from a place in the text."""
    return parse_error(origin, *line_and_column(text, offset), found, kind=kind)


def duplicate_error(origin: str, text: str, key: str, places: tuple[int, int], *, kind: str) -> BrokenFile:
    """Return an error for a key that is twice in one section."""
    first, second = (line_and_column(text, place) for place in places)
    return BrokenFile(
        f"{origin}:{second[0]}:{second[1]}",
        found=f"the key {shorten(key)} is there twice, in lines {first[0]} and {second[0]}",
        cure=f"Remove one of them: programs that read {kind} take the last, or refuse.",
    )


_READABLE = (0.01, 10_000)
"""Numbers that nobody writes with an exponent."""


def format_float(value: float, like: str = "") -> str:
    """Format a float so that every reader takes it for a float: with a point and a signed exponent.

    The exponent is kept where `like`, the old text, has one and the number needs one.

    >>> format_float(0.0002), format_float(0.0002, "1e-4"), format_float(1e22), format_float(5.0)
    ('0.0002', '2.0e-4', '1.0e+22', '5.0')
    """
    text = repr(float(value))
    mantissa, _, exponent = text.partition("e")
    if (
        not exponent
        and not _READABLE[0] <= abs(value) < _READABLE[1]
        and value
        and re.fullmatch(r"[-+]?[\d._]+[eE][-+]?\d+", like)
    ):
        mantissa, exponent = _shortest_exponent(value)
    if not exponent:
        return text
    if "." not in mantissa:
        mantissa += ".0"
    sign = "-" if int(exponent) < 0 else "+"
    letter = "E" if "E" in like else "e"
    return f"{mantissa}{letter}{sign}{abs(int(exponent))}"


def _shortest_exponent(value: float) -> tuple[str, str]:
    """Return mantissa and exponent with the fewest digits that read back as the same float."""
    for digits in range(17):
        text = f"{value:.{digits}e}"
        if float(text) == value:
            break
    mantissa, _, exponent = text.partition("e")
    return mantissa, exponent
