"""A Slurm batch script: its `#SBATCH` options and the variables that it sets.

    #SBATCH -N 2                    ("nodes",), as for --nodes=2, --nodes 2 and -N2
    #SBATCH --gres=gpu:a100:4       ("gres",) is 'gpu:a100:4', and ("gres", "gpu") the 4 in it
    #SBATCH --gpus-per-node=h100:8  ("gpus-per-node",), and ("gpus-per-node", "count") the 8 in it
    export OMP_NUM_THREADS=8        ("env", "OMP_NUM_THREADS")

As sbatch does, it reads options only above the first command, and takes the last where one is given twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trimtab.configs import shell_text, texts
from trimtab.configs.texts import KeyPath, ParsedConfig, Splice, TextNode
from trimtab.errors import WrongUse

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
    """The document of a script.

    >>> read_sbatch("#SBATCH -N 2 --gres=gpu:4", "run.sbatch").edit({("nodes",): 1, ("gres", "gpu"): 8})
    '#SBATCH -N 1 --gres=gpu:8'
    """
    return texts.parse_text(text, origin, SBATCH)


@dataclass(slots=True)
class _SbatchExtra:
    """Where new options go."""

    after: int | None = None
    """Inside of the last #SBATCH line."""
    shebang: bool = False
    variables: TextNode | None = None


@dataclass
class _SbatchHeader:
    """A pass over the options."""

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
                raise texts.parse_error_at(
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
                raise texts.parse_error_at(self.origin, self.text, start, found, kind="#SBATCH line")

    def separate(self, name: str, span: tuple[int, int], tokens: list[tuple[int, int]]) -> None:
        """An option whose value, if it takes one, is the next word."""
        if name in FLAGS:
            self.keep(name, span[0], TextNode(span[1], span[1], True, style="flag"))
            return
        if not tokens:
            found = f"--{name} has no value"
            raise texts.parse_error_at(self.origin, self.text, span[0], found, kind="#SBATCH line")
        self.put(name, span[0], *tokens.pop(0))

    def put(self, name: str, begin: int, start: int, end: int) -> None:
        text = _unquote_word(self.text[start:end])
        node = shell_text.word_node(start, end, text, style="option")
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
    """The counts inside of `gpu:a100:4` and `h100:8`; `gpu` alone is one."""
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
    return TextNode(at + match.start(1), at + match.end(1), int(match[1]), style="count")


class _SbatchFormat:
    """The format."""

    kind = "sbatch"

    def parse(self, text: str, origin: str) -> TextNode:
        root = _SbatchHeader(text, origin).scan()
        variables = shell_text.scan_variables(text, origin)
        root.extra.variables = variables
        if root.items is not None and variables.items:
            root.items[ENV] = variables
        return root

    def replace(self, page: ParsedConfig, node: TextNode, value: Any, _: set[int]) -> list[Splice]:
        if node.style == "flag":
            raise WrongUse(
                page.locate(node.start),
                found="this option takes no value",
                cure="Remove it by hand if it is not wanted.",
            )
        if node.style in ("count", "one"):
            return [Splice(node.start, node.end, f":{value}" if node.style == "one" else str(value))]
        return [shell_text.replace_word(page, node, value)]

    def add(
        self, page: ParsedConfig, path: KeyPath, node: TextNode, new: dict[str | int, Any]
    ) -> list[Splice]:
        if path == (ENV,):
            return [shell_text.add_variables(page, path, node, new)]
        if path:
            texts.refuse_leaf(page, path, node)
        variables = new.pop(ENV, None)
        splices = (
            [shell_text.add_variables(page, (ENV,), node.extra.variables, variables)] if variables else []
        )
        return splices + ([self.new_options(page, node, new)] if new else [])

    def new_options(self, page: ParsedConfig, node: TextNode, new: dict[str | int, Any]) -> Splice:
        for name, value in new.items():
            if isinstance(value, dict) or not re.fullmatch(r"[a-z][a-z0-9-]*", str(name)):
                raise WrongUse(
                    f"{page.origin}: {name}",
                    found="an option of sbatch has one name, in small letters",
                    cure="Name it as sbatch does, without dashes in front.",
                )
        lines = [
            f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shell_text.format_word(value)}"
            for name, value in new.items()
        ]
        if node.extra.after is not None:
            return page.insert_lines(page.next_line(node.extra.after), lines)
        return page.insert_lines(page.next_line(0) if node.extra.shebang else 0, lines)

    def keep_beside(self, page: ParsedConfig, node: TextNode) -> list[Splice]:
        return [shell_text.keep_in_comment(page, node)]

    def means(self, node: TextNode, wanted: Any) -> bool:
        return shell_text.means_value(node, wanted)


SBATCH = _SbatchFormat()
