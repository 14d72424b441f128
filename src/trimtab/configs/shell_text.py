"""Shell scripts: variables of .env files and `export` lines, and the `#SBATCH` options of batch scripts.

    export BATCH_SIZE=4             # a comment
    LR='2e-4' OMP_NUM_THREADS=8 python train.py

Everything is text to a shell; a word that looks like a number or a boolean is read as that. A value with `$`
or backquotes is computed. Here-documents and quoted text over several lines are skipped.
Not covered: arrays, `declare`, and other ways in which a script changes its variables.

    --tensor-model-parallel-size 8  ("args", "tensor-model-parallel-size"), in a command or an array
    --seq-length $SEQ               ("args", "seq-length") is the value of SEQ, if the script sets it

Options are read from scripts that start Megatron-LM: they hold its degrees of parallelism.

    #SBATCH -N 2                    ("nodes",), as for --nodes=2, --nodes 2 and -N2
    #SBATCH --gres=gpu:a100:4       ("gres",) is 'gpu:a100:4', and ("gres", "gpu") the 4 in it
    #SBATCH --gpus-per-node=h100:8  ("gpus-per-node",), and ("gpus-per-node", "count") the 8 in it
    export OMP_NUM_THREADS=8        ("env", "OMP_NUM_THREADS")

As in sbatch, options count only above the first command, and the last one wins if it is given twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from trimtab.configs.text_edit import (
    ConfigFormat,
    KeyPath,
    NewKeys,
    ParsedConfig,
    Splice,
    TextNode,
    format_float,
    format_path,
    parse_error_at,
    parse_text,
    refuse_leaf,
    same_value,
)
from trimtab.errors import WrongUse
from trimtab.units import parse_whole

_GAP = re.compile(r"(?:[ \t]|\\(?:\r\n|\r|\n))*")
_SEPARATOR = re.compile(r"[;&|]+|[\r\n]+")
_NAME = re.compile(r"([A-Za-z_]\w*)=", re.ASCII)
_LOOSE_NAME = re.compile(r"([A-Za-z_][\w.]*)[ \t]*=[ \t]*", re.ASCII)
_PLAIN = re.compile(r"[^\s;&|#<'\"\\$`]+")
_EXPORT = re.compile(r"export[ \t]+")
_HERE = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2")
_SAFE = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
_INT = re.compile(r"[-+]?(?:0|[1-9]\d{0,17})")
_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
_PAIRS = (("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0"))


def read_shell(text: str, origin: str) -> ParsedConfig:
    """Parse a shell script or a .env file.

    >>> read_shell("export BATCH=4  # small", "run.sh").edit({("BATCH",): 8})
    'export BATCH=8  # small'
    """
    return parse_text(text, origin, SHELL)


def parse_word(text: str) -> Any:
    """Return a word as the number or boolean that it looks like, or as text.

    >>> [parse_word(word) for word in ("4", "1e-4", "True", "007", "a")]
    [4, 0.0001, True, '007', 'a']
    """
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text.lower() == "true" if text.lower() in ("true", "false") else text


def word_node(start: int, end: int, word: str, *, style: str = "word", computed: str = "") -> TextNode:
    """Return the node of a word, which also keeps its spelling."""
    return TextNode(start, end, computed or parse_word(word), style=style, computed=computed, extra=word)


@dataclass(slots=True)
class _ShellExtra:
    """Where new variables go."""

    exported: bool = True
    after: int | None = None
    """Inside of the last line that sets variables and stands at the left edge."""
    first_command: int | None = None
    loose: bool = False


@dataclass
class _ShellScanner:
    """Scanner of a script, one command at a time."""

    text: str
    origin: str
    loose: bool
    at: int = 0
    here: list[tuple[bool, str]] = field(default_factory=list)
    more: _ShellExtra = field(default_factory=_ShellExtra)
    root: TextNode = field(default_factory=lambda: TextNode(0, 0, items={}, style="variables"))

    def scan(self) -> TextNode:
        self.more.loose = self.loose
        self.more.exported = not self.loose
        self.root.extra = self.more
        while self.at < len(self.text):
            self.command()
        self.root.end = len(self.text)
        return self.root

    def fail(self, at: int, found: str) -> None:
        raise parse_error_at(self.origin, self.text, at, found, kind="shell")

    def command(self) -> None:
        """Read the variables at the head of a command, then skip to the next command."""
        match = _GAP.match(self.text, self.at)
        self.at = start = match.end() if match else self.at
        export = _EXPORT.match(self.text, self.at)
        if export:
            self.at = export.end()
        found = 0
        while self.variable():
            found += 1
            if self.loose:
                break
            gap = _GAP.match(self.text, self.at)
            self.at = gap.end() if gap else self.at
        ended = self.at
        alone = self.rest()
        at_edge = start == 0 or self.text[start - 1] in "\r\n"
        if found and alone and at_edge:
            self.more.after = ended
            if self.loose:  # what a script sets is for the programs that it starts, and is always exported
                self.more.exported = bool(export)
        elif not found and not alone and self.more.first_command is None:
            self.more.first_command = start

    def variable(self) -> bool:
        match = (_LOOSE_NAME if self.loose else _NAME).match(self.text, self.at)
        if match is None:
            return False
        start = self.at = match.end()
        if self.loose and self.text[start : start + 1] not in ("'", '"'):
            return self.loose_word(match[1], start)
        value, asks = self.word()
        computed = self.text[start : self.at] if asks else ""
        self.put(match[1], word_node(start, self.at, computed or value, computed=computed))
        return True

    def loose_word(self, name: str, start: int) -> bool:
        """Read the unquoted value of a .env file, up to a comment or the end of the line."""
        match = re.compile(r"[^\r\n]*?(?=[ \t]+#|[ \t]*(?:[\r\n]|\Z))").match(self.text, start)
        self.at = match.end() if match else start
        value = self.text[start : self.at]
        self.put(name, word_node(start, self.at, value, computed=value if "$" in value else ""))
        return True

    def put(self, name: str, node: TextNode) -> None:
        items = self.root.items if self.root.items is not None else {}
        if name in items:
            self.root.repeats.setdefault(name, [items[name].start]).append(node.start)
        items[name] = node

    def word(self) -> tuple[str, bool]:
        """Read a word without its quotes; return it, and whether the shell computes a part of it."""
        value, computed = "", False
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|()<>":
            letter = self.text[self.at]
            if letter in "'\"":
                part, asks = self.quoted(letter)
                value, computed = value + part, computed or asks
                continue
            if letter in "$`":
                self.expansion()
                computed = True
                continue
            if letter == "\\":
                self.at += 1
            value += self.text[self.at : self.at + 1]
            self.at += 1
        return value, computed

    def quoted(self, quote: str) -> tuple[str, bool]:
        start = self.at
        body = r"'([^']*)'" if quote == "'" else r'"((?:[^"\\]|\\.)*)"'
        match = re.compile(body, re.DOTALL).match(self.text, start)
        if match is None:
            self.fail(start, f"a {quote} that is never closed")
            raise AssertionError
        self.at = match.end()
        if quote == "'":
            return match[1], False
        asks = bool(re.search(r"(?<!\\)(?:\\\\)*[$`]", match[1]))
        return re.sub(r'\\([\\"$`])', r"\1", match[1]), asks

    def expansion(self) -> None:
        """Skip `$X`, `${X:-4}`, `$(...)` or text in backquotes."""
        start = self.at
        opener = self.text[start : start + 2]
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            if end < 0:
                self.fail(start, "a ` that is never closed")
            self.at = end + 1
        elif opener in ("${", "$("):
            self.at = start + 2
            self.balanced(start, "}" if opener == "${" else ")")
        else:
            self.at += 1

    def balanced(self, start: int, closing: str) -> None:
        opening = {"}": "{", ")": "("}[closing]
        depth = 1
        while depth:
            letter = self.text[self.at : self.at + 1]
            if not letter:
                self.fail(start, f"a ${opening} that is never closed")
            if letter in "'\"":
                self.quoted(letter)
                continue
            depth += (letter == opening) - (letter == closing)
            self.at += 2 if letter == "\\" else 1

    def rest(self) -> bool:
        """Skip what is left of a command; return whether there was nothing."""
        empty = True
        while self.at < len(self.text):
            letter = self.text[self.at]
            end = _SEPARATOR.match(self.text, self.at)
            if end:
                self.at = end.end()
                if self.here and end[0][0] in "\r\n":
                    self.at = end.start() + (2 if end[0].startswith("\r\n") else 1)
                    self.skip_here()
                break
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                empty, self.at = False, plain.end()
            elif letter in " \t":
                self.at += 1
            elif letter == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\r\n;"):
                match = re.compile(r"[^\r\n]*").match(self.text, self.at)
                self.at = match.end() if match else self.at
            else:
                empty = False
                self.piece(letter)
        return empty

    def piece(self, letter: str) -> None:
        document = _HERE.match(self.text, self.at)
        if document and not self.text.startswith("<<<", self.at):
            self.here.append((bool(document[1]), document[3]))
            self.at = document.end()
        elif letter in "'\"":
            self.quoted(letter)
        elif letter == "\\":
            self.at += 2
        elif self.text.startswith("$(", self.at) or letter == "`":
            self.expansion()
        else:
            self.at += 3 if self.text.startswith("<<<", self.at) else 1

    def skip_here(self) -> None:
        for tabs, word in self.here:
            blanks = r"[ \t]*"
            pattern = re.compile(rf"^{blanks if tabs else ''}{word}{blanks}$", re.MULTILINE)
            match = pattern.search(self.text.replace("\r", "\n"), self.at)
            self.at = match.end() if match else len(self.text)
        self.here = []


def format_word(value: Any, like: str = "", *, loose: bool = False) -> str:
    """Format a value as a word, in the quotes of the old text."""
    text = value_text(value, like)
    quote = like[:1] if like[:1] in ("'", '"') else ""
    if not quote and _SAFE.fullmatch(text):
        return text
    if quote in ("'", "") and "'" not in text:
        return f"'{text}'"
    if "\n" in text and loose:
        raise WrongUse(f"the value {text!r}", found="it runs over lines", cure="Give it on one line.")
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'


def value_text(value: Any, like: str = "") -> str:
    """Return a value as the shell holds it: text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        old = like.strip("'\"")
        pair = next((pair for pair in _PAIRS if old.lower() in pair), None)
        word = (pair or _PAIRS[0])[0 if value else 1]
        if pair is None:
            return word
        return word.upper() if old.isupper() else word.capitalize() if old[:1].isupper() else word
    if isinstance(value, float):
        return format_float(value, like.strip("'\""))
    if isinstance(value, list | tuple):
        return ",".join(map(value_text, value))
    return str(value)


def means_value(node: TextNode, wanted: Any) -> bool:
    """Return whether a word means a value: 1 means true if true was wanted, 1e-4 means 0.0001.

    A text is only itself, because 1.1 is another version than 1.10; nor is 8.0 a whole number to a program
    that reads the word.

    >>> [means_value(word_node(0, 3, word), 8) for word in ("8", "8.0")]
    [True, False]
    >>> means_value(word_node(0, 3, "1.1"), "1.10")
    False
    """
    word = node.extra if isinstance(node.extra, str) else value_text(node.value)
    if isinstance(wanted, bool):
        return any(word.lower() == pair[0 if wanted else 1] for pair in _PAIRS)
    if isinstance(wanted, float):
        return same_value(node.value, wanted)
    return value_text(wanted) == word


class _ShellFormat(ConfigFormat):
    """The format."""

    kind = "shell"

    def parse(self, text: str, origin: str) -> TextNode:
        name = PurePath(origin).name
        loose = name.startswith(".env") or name.endswith(".env")
        root = scan_variables(text, origin, loose=loose)
        arguments = None if loose else scan_arguments(text, root)
        if root.items is not None and arguments is not None:
            root.items[ARGS] = arguments
        return root

    def replace(self, page: ParsedConfig, node: TextNode, value: Any, _: set[int]) -> list[Splice]:
        if node.style in ("flag", "reference"):
            return [replace_argument(page, node, value)]
        return [replace_word(page, node, value, loose=page.root.extra.loose)]

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        if path == (ARGS,):
            return [add_arguments(node, new)]
        return [add_variables(page, path, node, new)]

    def keep_beside(self, page: ParsedConfig, node: TextNode) -> list[Splice]:
        return [keep_in_comment(page, node)]

    def means(self, node: TextNode, wanted: Any) -> bool:
        return means_value(node, wanted)


ARGS = "args"
_MEGATRON = re.compile(r"--(?:(?:tensor|pipeline|expert)-model|context)-parallel-size\b")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\r\n]*", re.MULTILINE)
_OPTION = re.compile(
    r"(?<![\w-])--([A-Za-z][\w-]*)(?:(?:=|[ \t]+)"
    r"(\"[^\"\r\n]*\"|'[^'\r\n]*'|[^\s\"'()\\;&|<>-][^\s\"'()\\;&|<>]*))?"
)
_LAUNCHER = {"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port"}
"""Options of torchrun, which come before Megatron's. It spells most of them with underscores too."""
_REFERENCE = re.compile(r"\"?\$(?:\{(\w+)\}|(\w+))\"?", re.ASCII)


def scan_arguments(text: str, variables: TextNode) -> TextNode | None:
    """Scan the options of a Megatron-LM command; None if the script has none."""
    bare = _COMMENT.sub(lambda match: " " * len(match[0]), text)
    anchor = None
    node = TextNode(0, len(text), items={}, style="arguments")
    for match in _OPTION.finditer(bare):
        name, word = match[1], match[2]
        if "_" in name or name in _LAUNCHER:
            continue
        if _MEGATRON.match(match[0]) and anchor is None:
            anchor = match.end()
        items = node.items if node.items is not None else {}
        if name in items:
            node.repeats.setdefault(name, [items[name].start]).append(match.start())
        items[name] = _read_argument(match, word, variables)
    node.extra = anchor
    return None if anchor is None else node


def _read_argument(match: re.Match[str], word: str | None, variables: TextNode) -> TextNode:
    """Return the node of an option: its value, or that of the variable it is read from, or a flag."""
    if word is None:
        return TextNode(match.end(), match.end(), True, style="flag")
    start, end = match.span(2)
    reference = _REFERENCE.fullmatch(word)
    name = (reference[1] or reference[2]) if reference else ""
    variable = (variables.items or {}).get(name)
    if variable is not None and not variable.computed:
        return TextNode(start, end, variable.value, style="reference", extra=name)
    plain = _unquote_word(word)
    return word_node(start, end, plain, computed=word if re.search(r"[$`]", word) else "")


def replace_argument(page: ParsedConfig, node: TextNode, value: Any) -> Splice:
    """Replace the value of an option, also where it is a variable's; raise if the option takes none."""
    if node.style == "flag":
        raise WrongUse(
            page.locate(node.start),
            found="this option takes no value",
            cure="Remove it by hand if it is not wanted.",
        )
    return Splice(node.start, node.end, format_word(value))


def add_arguments(node: TextNode, new: NewKeys) -> Splice:
    """Add options behind the first degree of parallelism."""
    words = "".join(f" --{name} {format_word(value)}" for name, value in new.items())
    return Splice(node.extra, node.extra, words)


def scan_variables(text: str, origin: str, *, loose: bool = False) -> TextNode:
    """Scan the variables of a script."""
    return _ShellScanner(text, origin, loose).scan()


def replace_word(page: ParsedConfig, node: TextNode, value: Any, *, loose: bool = False) -> Splice:
    """Replace a word by another."""
    return Splice(node.start, node.end, format_word(value, page.text[node.start : node.end], loose=loose))


def add_variables(page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> Splice:
    """Add variables below the last that are set, or above the first command."""
    if node.style != "variables":
        refuse_leaf(page, path, node)
    for key, value in new.items():
        if isinstance(value, dict) or not re.fullmatch(r"[A-Za-z_]\w*", str(key), re.ASCII):
            raise WrongUse(
                f"{page.origin}: {format_path((*path, key))}",
                found="a variable has one name, of letters, digits and underscores",
                cure="Name the variable.",
            )
    export = "export " if node.extra.exported else ""
    lines = [f"{export}{key}={format_word(value, loose=node.extra.loose)}" for key, value in new.items()]
    first = node.extra.first_command
    if node.extra.after is not None:
        at = page.next_line(node.extra.after)
    else:
        at = page.line_start(first) if first is not None else len(page.text)
    put = page.insert_lines(at, lines)
    return Splice(put.start, put.end, put.text, order=1)  # below options of a batch script that go there too


def keep_in_comment(page: ParsedConfig, node: TextNode) -> Splice:
    """Keep the old words in a comment at the end of the line."""
    at = page.line_end(node.end)
    rest = page.text[node.end : at]
    if re.search(r"['\"`]|\\$", rest.partition(" #")[0]) or "<<" in rest:
        raise WrongUse(
            page.locate(node.start),
            found="the command goes on behind this value, so that no comment can stand there",
            cure="Change it by hand.",
        )
    return Splice(at, at, f"  # was: {' '.join(node.computed.split())}")


SHELL = _ShellFormat()


SHORT = {
    "A": "account",
    "a": "array",
    "B": "extra-node-info",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "O": "overcommit",
    "o": "output",
    "p": "partition",
    "Q": "quiet",
    "q": "qos",
    "S": "core-spec",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "W": "wait",
    "w": "nodelist",
    "x": "exclude",
}
"""Source: https://slurm.schedmd.com/sbatch.html"""
FLAGS = {
    "contiguous",
    "exclusive",
    "get-user-env",
    "hold",
    "ignore-pbs",
    "no-kill",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "parsable",
    "propagate",
    "quiet",
    "reboot",
    "requeue",
    "spread-job",
    "test-only",
    "use-min-nodes",
    "verbose",
    "wait",
}
"""Options that take no value, or one only behind an equals sign."""
COUNTED = {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"}
ENV = "env"

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_TOKEN = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\\r\n]|\\.)*"|'[^'\r\n]*')+""")
_LONG = re.compile(r"--([A-Za-z][\w-]*)(=?)")
_COUNT = re.compile(r"(?:^|:)(\d+)$")


def read_sbatch(text: str, origin: str) -> ParsedConfig:
    """Parse a batch script of Slurm.

    >>> read_sbatch("#SBATCH -N 2 --gres=gpu:4", "run.sbatch").edit({("nodes",): 1, ("gres", "gpu"): 8})
    '#SBATCH -N 1 --gres=gpu:8'
    """
    return parse_text(text, origin, SBATCH)


@dataclass(slots=True)
class _SbatchExtra:
    """Where new options go."""

    after: int | None = None
    """Inside of the last #SBATCH line."""
    shebang: bool = False
    variables: TextNode | None = None


@dataclass
class _SbatchHeader:
    """Scanner of the #SBATCH options."""

    text: str
    origin: str
    root: TextNode = field(
        default_factory=lambda: TextNode(0, 0, items={}, style="options", extra=_SbatchExtra())
    )

    def scan(self) -> TextNode:
        at = 0
        self.root.end = len(self.text)
        self.root.extra.shebang = self.text.startswith("#!")
        while at < len(self.text):
            match = _LINE.match(self.text, at)
            line = match[0] if match else ""
            if line.strip() and not line.startswith("#"):
                break
            if re.match(r"#SBATCH[ \t]", line):
                self.root.extra.after = at
                self.options(at + len("#SBATCH"), at + len(line.rstrip("\r\n")))
            at += len(line)
        return self.root

    def tokens(self, at: int, end: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while True:
            while at < end and self.text[at] in " \t":
                at += 1
            if at >= end or self.text[at] == "#":
                return found
            match = _TOKEN.match(self.text, at, end)
            if match is None:
                raise parse_error_at(
                    self.origin, self.text, at, "a quote that is never closed", kind="#SBATCH line"
                )
            found.append((at, match.end()))
            at = match.end()

    def options(self, at: int, end: int) -> None:
        tokens = self.tokens(at, end)
        while tokens:
            start, stop = tokens.pop(0)
            word = self.text[start:stop]
            long = _LONG.match(word)
            if long and long[2]:
                self.put(long[1], start, start + long.end(), stop)
            elif long:
                self.separate(long[1], (start, stop), tokens)
            elif word.startswith("-") and len(word) > 1 and word[1] in SHORT:
                name = SHORT[word[1]]
                joined = len(word) > 2 and name not in FLAGS  # noqa: PLR2004 - a dash and a letter
                if joined:
                    self.put(name, start, start + 2, stop)
                else:
                    self.separate(name, (start, stop), tokens)
            else:
                found = f"{word} is no option of sbatch"
                raise parse_error_at(self.origin, self.text, start, found, kind="#SBATCH line")

    def separate(self, name: str, span: tuple[int, int], tokens: list[tuple[int, int]]) -> None:
        """Read an option whose value, if it takes one, is the next word."""
        if name in FLAGS:
            self.keep(name, span[0], TextNode(span[1], span[1], True, style="flag"))
            return
        if not tokens:
            found = f"--{name} has no value"
            raise parse_error_at(self.origin, self.text, span[0], found, kind="#SBATCH line")
        self.put(name, span[0], *tokens.pop(0))

    def put(self, name: str, begin: int, start: int, end: int) -> None:
        text = _unquote_word(self.text[start:end])
        node = word_node(start, end, text, style="option")
        if text == self.text[start:end]:
            node.parts = _find_counts(name, text, start) or None
        self.keep(name, begin, node)

    def keep(self, name: str, begin: int, node: TextNode) -> None:
        items = self.root.items if self.root.items is not None else {}
        if name in items:
            self.root.repeats.setdefault(name, [items[name].start]).append(begin)
        items[name] = node


def _unquote_word(text: str) -> str:
    return re.sub(r"""\\(.)|["']""", r"\1", text)


def _find_counts(name: str, text: str, start: int) -> dict[str | int, TextNode]:
    """Find the counts in `gpu:a100:4` and `h100:8`; `gpu` alone is one."""
    if name in COUNTED:
        count = _COUNT.search(text)
        return {"count": _make_count(start, text, count)} if count else {}
    if name not in ("gres", "tres-per-node", "tres-per-task"):
        return {}
    found: dict[str | int, TextNode] = {}
    at = start
    for part in text.split(","):
        resource = part.removeprefix("gres/").removeprefix("gres:")
        found.setdefault(re.split(r"[:=/]", resource)[0], _make_count(at, part, _COUNT.search(part)))
        at += len(part) + 1
    return found


def _make_count(at: int, text: str, match: re.Match[str] | None) -> TextNode:
    if match is None:
        return TextNode(at + len(text), at + len(text), 1, style="one")
    count = parse_whole(match[1])
    if count is None:  # too many digits for a count
        return TextNode(at + match.start(1), at + match.end(1), match[1], style="count")
    return TextNode(at + match.start(1), at + match.end(1), count, style="count")


class _SbatchFormat(ConfigFormat):
    """The format."""

    kind = "sbatch"

    def parse(self, text: str, origin: str) -> TextNode:
        root = _SbatchHeader(text, origin).scan()
        variables = scan_variables(text, origin)
        root.extra.variables = variables
        if root.items is not None and variables.items:
            root.items[ENV] = variables
        arguments = scan_arguments(text, variables)
        if root.items is not None and arguments is not None:
            root.items[ARGS] = arguments
        return root

    def replace(self, page: ParsedConfig, node: TextNode, value: Any, _: set[int]) -> list[Splice]:
        if node.style == "flag":
            raise WrongUse(
                page.locate(node.start),
                found="this option takes no value",
                cure="Remove it by hand if it is not wanted.",
            )
        if node.style == "reference":
            return [replace_argument(page, node, value)]
        if node.style in ("count", "one"):
            return [Splice(node.start, node.end, f":{value}" if node.style == "one" else str(value))]
        return [replace_word(page, node, value)]

    def add(self, page: ParsedConfig, path: KeyPath, node: TextNode, new: NewKeys) -> list[Splice]:
        if path == (ARGS,):
            return [add_arguments(node, new)]
        if path == (ENV,):
            return [add_variables(page, path, node, new)]
        if path:
            refuse_leaf(page, path, node)
        variables = new.pop(ENV, None)
        splices = [add_variables(page, (ENV,), node.extra.variables, variables)] if variables else []
        return splices + ([self.new_options(page, node, new)] if new else [])

    def new_options(self, page: ParsedConfig, node: TextNode, new: NewKeys) -> Splice:
        for name, value in new.items():
            if isinstance(value, dict) or not re.fullmatch(r"[a-z][a-z0-9-]*", str(name)):
                raise WrongUse(
                    f"{page.origin}: {name}",
                    found="an option of sbatch has one name, in small letters",
                    cure="Name it as sbatch does, without dashes in front.",
                )
        lines = [
            f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={format_word(value)}"
            for name, value in new.items()
        ]
        if node.extra.after is not None:
            return page.insert_lines(page.next_line(node.extra.after), lines)
        return page.insert_lines(page.next_line(0) if node.extra.shebang else 0, lines)

    def keep_beside(self, page: ParsedConfig, node: TextNode) -> list[Splice]:
        return [keep_in_comment(page, node)]

    def means(self, node: TextNode, wanted: Any) -> bool:
        return means_value(node, wanted)


SBATCH = _SbatchFormat()
