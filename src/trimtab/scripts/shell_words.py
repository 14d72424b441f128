"""Read the commands of a shell script word by word, with the place of each word in the text.

    commands = read_commands(text, "run.sh")
    commands[0].words[0].text, commands[0].words[0].start

Understood are quotes, line continuations, comments, here-documents, redirections, and variables and arrays
that the script sets to plain text. What a shell would compute stays as it is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trimtab.errors import BrokenFile
from trimtab.scripts.prefixes import word_set

_GAP = re.compile(r"(?:[ \t]|\\(?:\r\n|\r|\n))+")
_COMMENT = re.compile(r"#[^\r\n]*")
_REDIRECTION = re.compile(r"\d*(?:<<<|>>|>\||&>>?|[<>]&?)[ \t]*")
_HERE = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2")
_END = re.compile(r"\r\n|[\r\n]|&&|\|\||\|&|;;|[;&|()]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?(?::?-([^{}$`'\"\\]*))?\})")
_SPECIAL = re.compile(r"\$[@*#?$!\d-]|\$\{[@*\d](?::?-([^{}$`'\"\\]*))?\}")
_KEYWORDS = word_set("if then elif else fi do done while until for case esac time ! { }")
_SETTERS = word_set("export declare local readonly typeset env")
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True)
class ShellPiece:
    """A part of a word: plain text, or something that the shell expands."""

    text: str
    """Plain text without its quotes; the source of an expansion."""
    name: str = ""
    """The variable, if it is one."""
    is_plain: bool = False
    is_array: bool = False
    is_quoted: bool = False
    default: tuple[int, int] | None = None
    """Where the text after :- is."""


@dataclass(frozen=True)
class ShellWord:
    """A word of a command."""

    start: int
    end: int
    pieces: tuple[ShellPiece, ...]

    @property
    def is_plain(self) -> bool:
        """Whether no part of it is expanded by the shell."""
        return all(piece.is_plain for piece in self.pieces)

    @property
    def text(self) -> str:
        """The word without quotes; expansions as they are written."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class ShellAssignment:
    """A variable that is set: to one word, or an array to several."""

    name: str
    start: int
    words: tuple[ShellWord, ...]
    is_array: bool = False
    is_added: bool = False
    """Whether it is NAME+=..."""


@dataclass
class ShellCommand:
    """A command of a script, with the variables that it sets for itself."""

    start: int
    words: list[ShellWord] = field(default_factory=list)
    assignments: list[ShellAssignment] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Where its last word ends."""
        return self.words[-1].end


def read_commands(text: str, origin: str) -> list[ShellCommand]:
    r"""Return the commands of a shell script; those that only set variables have no words.

    >>> commands = read_commands("A=1\npython a.py \\\n -b $A", "run.sh")
    >>> [[word.text for word in command.words] for command in commands]
    [[], ['python', 'a.py', '-b', '$A']]
    """
    return _ShellReader(text, origin).scan_script()


class _ShellReader:
    """Goes through the text once."""

    def __init__(self, text: str, origin: str) -> None:
        self.text, self.origin = text, origin
        self.at, self.stop = 0, len(text)
        self.commands: list[ShellCommand] = []
        self.current: ShellCommand | None = None
        self.here: list[tuple[bool, str]] = []

    def fail(self, at: int, found: str) -> BrokenFile:
        line = self.text.count("\n", 0, at) + 1
        return BrokenFile(
            f"{self.origin}:{line}", found=found, cure="Correct the shell script there, or name another file."
        )

    def scan_script(self) -> list[ShellCommand]:
        while self.at < len(self.text):
            if gap := _GAP.match(self.text, self.at):
                self.at = gap.end()
            elif (comment := _COMMENT.match(self.text, self.at)) and not self._inside_word():
                self.at = comment.end()
            elif here := _HERE.match(self.text, self.at):
                self.here.append((bool(here[1]), here[3]))
                self.at = here.end()
            elif redirection := _REDIRECTION.match(self.text, self.at):
                self.at = redirection.end()
                self.word()
            elif end := _END.match(self.text, self.at):
                self.at = end.end()
                self.close()
                if end[0][0] in "\r\n":
                    self.skip_here()
            else:
                self.part()
        self.close()
        return self.commands

    def _inside_word(self) -> bool:
        return self.at > 0 and self.text[self.at - 1] not in " \t\r\n;&|()"

    def close(self) -> None:
        if self.current is not None and (self.current.words or self.current.assignments):
            self.commands.append(self.current)
        self.current = None

    def part(self) -> None:
        """Read an assignment or a word of the current command."""
        start = self.at
        command = self.current = self.current or ShellCommand(start)
        sets = not command.words or all(word.text in _SETTERS for word in command.words)
        match = _ASSIGNMENT.match(self.text, start) if sets else None
        if match is not None:
            self.at = match.end()
            command.assignments.append(self.assignment(match[1], is_added=bool(match[2])))
            return
        word = self.word()
        if word.end == start:
            self.at += 1
        elif not command.words and not command.assignments and word.text in _KEYWORDS:
            self.current = None
        elif command.words or word.text not in _SETTERS or word.text == "env":
            command.words.append(word)

    def assignment(self, name: str, *, is_added: bool) -> ShellAssignment:
        start = self.at
        if self.text[start : start + 1] != "(":
            return ShellAssignment(name, start, (self.word(),), is_added=is_added)
        self.at += 1
        words = []
        while self.text[self.at : self.at + 1] != ")":
            if self.at >= len(self.text):
                raise self.fail(start, "a ( that is never closed")
            if gap := re.compile(r"(?:\s|\\(?:\r\n|\r|\n))+").match(self.text, self.at):
                self.at = gap.end()
            elif comment := _COMMENT.match(self.text, self.at):
                self.at = comment.end()
            else:
                word = self.word()
                self.at += word.end == word.start
                words.append(word)
        self.at += 1
        return ShellAssignment(name, start, tuple(words), is_array=True, is_added=is_added)

    def word(self) -> ShellWord:
        start = self.at
        pieces: list[ShellPiece] = []
        while self.at < self.stop and self.text[self.at] not in " \t\r\n;&|()<>":
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", "\r"):
                break
            if letter == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self.fail(self.at, "a ' that is never closed")
                pieces.append(ShellPiece(self.text[self.at + 1 : end], is_plain=True, is_quoted=True))
                self.at = end + 1
            elif letter == '"':
                self.double_quoted(pieces)
            elif letter in "$`":
                pieces.append(self.expansion(is_quoted=False))
            elif letter == "\\":
                pieces.append(ShellPiece(self.text[self.at + 1 : self.at + 2], is_plain=True))
                self.at += 2
            else:
                pieces.append(ShellPiece(letter, is_plain=True))
                self.at += 1
        return ShellWord(start, self.at, tuple(pieces))

    def double_quoted(self, pieces: list[ShellPiece]) -> None:
        start = self.at
        self.at += 1
        pieces.append(ShellPiece("", is_plain=True, is_quoted=True))
        while self.text[self.at : self.at + 1] != '"':
            letter = self.text[self.at : self.at + 1]
            if not letter:
                raise self.fail(start, 'a " that is never closed')
            if letter in "$`":
                pieces.append(self.expansion(is_quoted=True))
            elif letter == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('"\\$`'):
                pieces.append(ShellPiece(self.text[self.at + 1], is_plain=True, is_quoted=True))
                self.at += 2
            else:
                pieces.append(ShellPiece(letter, is_plain=True, is_quoted=True))
                self.at += 1
        self.at += 1

    def expansion(self, *, is_quoted: bool) -> ShellPiece:
        """Read $X, ${X:-4}, $(...) or text in backquotes."""
        start = self.at
        match = _NAME.match(self.text, start) or _SPECIAL.match(self.text, start)
        if match is not None:
            self.at = match.end()
            is_variable = match.re is _NAME
            last = 4 if is_variable else 1
            return ShellPiece(
                match[0],
                name=(match[1] or match[2] or "") if is_variable else "",
                is_array=bool(is_variable and match[3]),
                is_quoted=is_quoted,
                default=match.span(last) if match[last] is not None else None,
            )
        opener = self.text[start : start + 2]
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            if end < 0:
                raise self.fail(start, "a ` that is never closed")
            self.at = end + 1
        elif opener in ("${", "$("):
            self.at += 2
            self.skip_balanced(start, *("{", "}") if opener == "${" else ("(", ")"))
        else:
            self.at += 1
            return ShellPiece("$", is_plain=True, is_quoted=is_quoted)
        return ShellPiece(self.text[start : self.at], is_quoted=is_quoted)

    def skip_balanced(self, start: int, opening: str, closing: str) -> None:
        depth = 1
        while depth:
            letter = self.text[self.at : self.at + 1]
            if not letter:
                raise self.fail(start, f"a ${opening} that is never closed")
            if letter == "'":
                self.at = self.text.find("'", self.at + 1)
                if self.at < 0:
                    raise self.fail(start, "a ' that is never closed")
            depth += (letter == opening) - (letter == closing)
            self.at += 2 if letter == "\\" else 1

    def skip_here(self) -> None:
        for may_indent, word in self.here:
            blanks = r"\t*" if may_indent else ""
            end = re.compile(rf"^{blanks}{word}[ \t]*$", re.MULTILINE)
            match = end.search(self.text, self.at)
            self.at = match.end() if match else len(self.text)
        self.here = []


@dataclass(frozen=True)
class ResolvedWord:
    """A word of a command as the program gets it, and where its text is written."""

    text: str
    """With the values of variables that the script sets to plain text; others as they are written."""
    source: ShellWord
    """The word in the script: in the command, in an array, or in the value of a variable."""
    is_known: bool = True
    """Whether its text is what the program gets."""


class ShellScript:
    """A shell script: its commands, and the variables that it sets."""

    def __init__(self, text: str, origin: str) -> None:
        self.text, self.origin = text, origin
        self.commands = read_commands(text, origin)
        self.assignments: dict[str, list[ShellAssignment]] = {}
        for command in self.commands:
            if not command.words:
                for assignment in command.assignments:
                    self.assignments.setdefault(assignment.name, []).append(assignment)

    def line(self, at: int) -> int:
        """Return the line of a place, counted from 1."""
        return self.text.count("\n", 0, at) + 1

    def find_assignment(self, name: str) -> ShellAssignment | None:
        """Return the only assignment of a variable to a single word; None if there are more or none."""
        known = self.assignments.get(name, [])
        return known[0] if len(known) == 1 and not (known[0].is_array or known[0].is_added) else None

    def resolve(self, words: list[ShellWord]) -> list[ResolvedWord]:
        """Return the words that a program gets, with arrays and plain variables filled in."""
        return [resolved for word in words for resolved in self._resolve_word(word)]

    def _resolve_word(self, word: ShellWord, depth: int = 0) -> list[ResolvedWord]:
        pieces = [piece for piece in word.pieces if piece.text or not piece.is_plain]
        whole = pieces[0] if len(pieces) == 1 and pieces[0].name and depth < 4 else None  # noqa: PLR2004 - A=$B
        known = self.assignments.get(whole.name, []) if whole is not None else []
        if whole is not None and whole.is_array and known and all(item.is_array for item in known):
            return [
                resolved
                for item in known
                for inner in item.words
                for resolved in self._resolve_word(inner, depth + 1)
            ]
        if whole is not None and not whole.is_quoted and len(known) == 1 and not known[0].is_array:
            parts = self._split_value(known[0])
            if len(parts) > 1:
                return parts
        return [self._fill_in(word)]

    def _split_value(self, assignment: ShellAssignment) -> list[ResolvedWord]:
        """Return the words in a value such as "--lr 1e-4 --batch 8"."""
        word = assignment.words[0]
        source = self.text[word.start : word.end]
        inner = source[1:-1] if len(source) > 1 and source[0] == source[-1] and source[0] in "'\"" else source
        if re.search(r"['\"\\`]|\$\(", inner.replace("\\\n", "  ")):
            return []
        shift = word.start + (inner != source)
        parts = []
        for match in re.finditer(r"(?:[^\s\\]|\\(?![\r\n]))+", inner):
            start = shift + match.start()
            reader = _ShellReader(self.text, self.origin)
            reader.at, reader.stop = start, shift + match.end()
            pieces = reader.word().pieces
            inside = ShellWord(start, shift + match.end(), pieces)
            parts.append(self._fill_in(inside))
        return parts

    def _fill_in(self, word: ShellWord) -> ResolvedWord:
        """Return a word with the values of plain variables."""
        text, is_known = "", True
        for piece in word.pieces:
            value = piece.text if piece.is_plain else self.read_value(piece)
            is_known = is_known and value is not None
            text += piece.text if value is None else value
        return ResolvedWord(text, word, is_known)

    def read_value(self, piece: ShellPiece) -> str | None:
        """Return the plain text that a variable has; None if it is computed or comes from outside."""
        known = self.assignments.get(piece.name, []) if piece.name else []
        if not known:
            return self.text[slice(*piece.default)] if piece.default else None
        assignment = self.find_assignment(piece.name)
        if assignment is None:
            return None
        word = assignment.words[0]
        if word.is_plain:
            return word.text
        last = word.pieces[-1]
        return self.text[slice(*last.default)] if len(word.pieces) == 1 and last.default else None


def quote_like(text: str, before: str) -> str:
    """Quote a word as the old one was quoted.

    >>> quote_like("16", '"32"'), quote_like("a b", "c"), quote_like("16", "32")
    ('"16"', "'a b'", '16')
    """
    if _SAFE.fullmatch(text):
        mark = (
            before[:1] if before[:1] in ("'", '"') and before[:1] == before[-1:] and len(before) > 1 else ""
        )
        return f"{mark}{text}{mark}"
    return "'" + text.replace("'", "'\"'\"'") + "'"
