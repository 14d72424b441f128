"""Change the options of a training command inside of a shell script, and nothing else of the script."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError, WrongUse, shorten
from trimtab.scripts.command_options import OptionEditor, find_spots
from trimtab.scripts.prefixes import ASSIGNMENT, word_set
from trimtab.scripts.script_options import OptionForm, OptionValue, ScriptOption
from trimtab.scripts.shell_words import ShellScript, quote_like
from trimtab.spec.script import ScriptCommand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.scripts.shell_words import ResolvedWord, ShellCommand, ShellPiece
    from trimtab.spec.script import ScriptChange

_SILENT = word_set("echo printf cat cp ls cd mkdir sbatch source . rm test [ tee grep")
"""Programs that name a script without starting it."""
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_ALL_ARGUMENTS = ("$@", "${@}", "$*")


@dataclass(frozen=True)
class ShellEdit:
    """A change in a shell script: the option, its text before and after, and the line."""

    name: str
    before: str | None
    after: str | None
    line: int


@dataclass
class ShellRewrite:
    """A shell script with a changed command."""

    text: str
    edits: list[ShellEdit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_option(change: ScriptChange) -> ScriptOption:
    """Return the option that a change is about."""
    return ScriptOption(
        names=change.names,
        off_name=change.off_name,
        form=OptionForm(change.form),
        value=OptionValue(change.kind),
        default=change.default,
    )


def find_target(words: Sequence[str]) -> str:
    """Return what a command runs: its script, its module, or the installed program.

    >>> find_target(["A=1", "torchrun", "--nproc-per-node", "8", "src/train.py", "--lr", "1"])
    'src/train.py'
    >>> find_target(["python", "-m", "package.train", "x"]), find_target(["trl", "sft"])
    ('package.train', 'trl')
    """
    plain = [word for word in words if not ASSIGNMENT.match(word)]
    modules = [following for word, following in itertools.pairwise(plain) if word in ("-m", "--module")]
    module = next((name for name in modules if name not in _LAUNCHERS), "")
    script = next((word for word in plain if word.endswith(".py")), "")
    if script and not (module and plain.index(module) < plain.index(script)):
        return script
    return module or (plain[0] if plain else "")


def rewrite_command(  # noqa: PLR0913 - a script, a command in it, and what changes
    text: str,
    origin: str,
    original: str,
    changes: Sequence[ScriptChange],
    *,
    line: int | None = None,
    beside: bool = False,
) -> ShellRewrite:
    """Return a shell script with other options for its training command.

    `original` is the command that the plan was made for. `line` chooses among several commands that start
    the same script. With `beside`, words that the shell computes are replaced too, and kept in a comment.
    """
    script = ShellScript(text, origin)
    command = _find_command(script, original, line)
    editor = _ShellEditor(script, command, find_target(shlex.split(original)), beside=beside)
    for change in changes:
        editor.change(change)
    after = editor.finish()
    _verify(after, origin, script.commands.index(command), editor, changes)
    return ShellRewrite(after, editor.edits, editor.notes)


def _find_command(script: ShellScript, original: str, line: int | None) -> ShellCommand:
    """Return the command of a script that starts the same training as `original`."""
    words = shlex.split(original)
    target = find_target(words)
    starting = [command for command in script.commands if _runs(script, command, target)]
    if line is not None:
        starting = [
            command for command in starting if script.line(command.start) <= line <= script.line(command.end)
        ]
    if not starting:
        others = [
            f"line {script.line(command.start)}: {shorten(' '.join(word.text for word in command.words))}"
            for command in script.commands
            if any(word.text.endswith(".py") for word in command.words)
        ]
        seen = f"; it has {'; '.join(others[:3])}" if others else ""
        where = script.origin if line is None else f"{script.origin}:{line}"
        raise WrongUse(
            where,
            found=f"no command there starts {target}{seen}",
            cure="Name the script that holds the command of the plan, or type the plan's command.",
        )
    scores = {
        id(command): sum(word.text in words for word in script.resolve(command.words)) for command in starting
    }
    best = [command for command in starting if scores[id(command)] == max(scores.values())]
    if len(best) > 1:
        lines = [str(script.line(command.start)) for command in best]
        raise WrongUse(
            script.origin,
            found=f"{target} is started in lines {' and '.join(lines)}",
            cure=f"Say which one: {script.origin}:{lines[0]}.",
        )
    return best[0]


def _runs(script: ShellScript, command: ShellCommand, target: str) -> bool:
    words = [word.text for word in script.resolve(command.words)]
    if not words or words[0] in _SILENT:
        return False
    return find_target_position(words, target) is not None


def find_target_position(words: Sequence[str], target: str) -> int | None:
    """Return where a command names what it runs; None if it runs something else."""
    name = PurePath(target).name
    for position, word in enumerate(words):
        if PurePath(word).name == name and (target.endswith(".py") or "/" not in target):
            return position
    return None


class _ShellEditor:
    """Collects the replacements for one command."""

    def __init__(self, script: ShellScript, command: ShellCommand, target: str, *, beside: bool) -> None:
        self.script, self.shell_command, self.target, self.beside = script, command, target, beside
        self.words = script.resolve(command.words)
        texts = [word.text for word in self.words]
        self.at = (find_target_position(texts, target) or 0) + 1
        self.splices: list[tuple[int, int, str]] = []
        self.added: dict[int, list[str]] = {}
        """Words to add, by the place in the text after which they go."""
        self.edits: list[ShellEdit] = []
        self.notes: list[str] = []
        self.comments: list[str] = []

    def change(self, change: ScriptChange) -> None:
        """Note what replaces what for one change."""
        option = make_option(change)
        if option.form is OptionForm.VARIABLE:
            self._set_variable(option.names[0], change.value)
            return
        scope = self.words[: self.at] if change.is_launcher else self.words[self.at :]
        texts = [word.text for word in scope]
        spots = find_spots(texts, option)
        editor = OptionEditor(
            ScriptCommand(words=tuple(texts), launcher="", interpreter="", target="", arguments=tuple(texts))
        )
        new = editor.build_words(option, change.value, spots[-1] if spots else None)
        if not spots:
            hidden = [word.text for word in scope if not word.is_known and "$" in word.text[:2]]
            if hidden and not change.is_launcher:
                self.notes.append(
                    f"{option.name} is added; if {', '.join(hidden)} holds it too, remove it there"
                )
            self._add(option, new, launcher=change.is_launcher)
            return
        for spot in spots[:-1]:
            self._remove(scope[spot.start : spot.start + spot.length])
        last = scope[spots[-1].start : spots[-1].start + spots[-1].length]
        before = " ".join(word.text for word in last)
        if [word.text for word in last] == new:
            return
        self._note(option.name, before, " ".join(new) or None, last[0].source.start)
        if not new:
            self._remove(last)
            return
        for word, text in zip(last, new, strict=False):
            if word.text != text:
                self._replace(word, text)
        self._remove(last[len(new) :])
        if len(new) > len(last):
            self.added.setdefault(last[-1].source.end, []).append(
                " " + " ".join(map(shlex.quote, new[len(last) :]))
            )

    def _note(self, name: str, before: str | None, after: str | None, at: int) -> None:
        self.edits.append(ShellEdit(name, before, after, self.script.line(at)))

    def _replace(self, word: ResolvedWord, text: str) -> None:
        """Replace a word; where a variable holds it, the variable's value."""
        source = word.source
        if source.is_plain:
            old = self.script.text[source.start : source.end]
            self.splices.append((source.start, source.end, quote_like(text, old)))
            return
        pieces = [piece for piece in source.pieces if piece.text]
        prefix = "".join(piece.text for piece in pieces[:-1])
        is_simple = all(piece.is_plain for piece in pieces[:-1]) and text.startswith(prefix)
        value = text[len(prefix) :]
        if is_simple and (pieces[-1].name or pieces[-1].default) and self._set_value(pieces[-1], value):
            return
        if not self.beside:
            raise WrongUse(
                f"{self.script.origin}:{self.script.line(source.start)}: {source.text}",
                found=f"the shell computes it, and the plan needs {text}",
                cure="Change it by hand, or give --beside: the old word then stays in a comment.",
            )
        self.splices.append((source.start, source.end, shlex.quote(text)))
        self.comments.append(f"was: {self.script.text[source.start : source.end]}")

    def _set_value(self, piece: ShellPiece, value: str) -> bool:
        """Set the value of a variable where the script sets it; return whether it does."""
        assigned = self.script.assignments.get(piece.name, []) if piece.name else []
        if not assigned and piece.default is not None:
            self.splices.append((*piece.default, value))
            self.notes.append(f"a value from outside for {piece.text} still counts more than the one written")
            return True
        assignment = self.script.find_assignment(piece.name)
        if assignment is None:
            return False
        word = assignment.words[0]
        if word.is_plain:
            old = self.script.text[word.start : word.end]
            self.splices.append((word.start, word.end, quote_like(value, old)))
        elif len(word.pieces) == 1 and word.pieces[0].default is not None:
            self.splices.append((*word.pieces[0].default, value))
            self.notes.append(f"a value from outside for {word.text} still counts more than the one written")
        else:
            return False
        uses = [
            self.script.line(match.start())
            for match in re.finditer(rf"\$\{{?{piece.name}\b", self.script.text)
        ]
        if len(uses) > 1:
            lines = ", ".join(map(str, dict.fromkeys(uses)))
            self.notes.append(f"{piece.name} is used in lines {lines}: all of them get {value}")
        return True

    def _remove(self, words: Sequence[ResolvedWord]) -> None:
        """Remove words with the blanks and line continuations before them."""
        for word in words:
            start = word.source.start
            gap = re.search(r"(?:[ \t]|\\(?:\r\n|\r|\n))+\Z", self.script.text[:start])
            self.splices.append((gap.start() if gap else start, word.source.end, ""))

    def _add(self, option: ScriptOption, new: list[str], *, launcher: bool) -> None:
        if not new:
            return
        self._note(option.name, None, " ".join(new), self.shell_command.start)
        quoted = " ".join(map(shlex.quote, new))
        if launcher:
            names = [word.text for word in self.shell_command.words]
            place = next(
                (
                    number
                    for number, name in enumerate(names)
                    if name == "launch" or name in _LAUNCHERS or PurePath(name).name == "torchrun"
                ),
                0,
            )
            self.added.setdefault(self.shell_command.words[place].end, []).append(f" {quoted}")
            return
        words = self.shell_command.words
        last = len(words) - 1
        while last > 0 and words[last].text in _ALL_ARGUMENTS:
            last -= 1
        self.added.setdefault(words[last].end, []).append(f"{self._separator()}{quoted}")

    def _separator(self) -> str:
        """Return what is between two options: a blank, or the line continuation that the command has."""
        words = self.shell_command.words
        gaps = [
            self.script.text[before.end : word.start]
            for before, word in itertools.pairwise(words)
            if "\n" in self.script.text[before.end : word.start]
        ]
        return gaps[-1] if gaps else " "

    def _set_variable(self, name: str, value: str) -> None:
        """Set a variable before the command, or where the script sets it."""
        own = next((item for item in self.shell_command.assignments if item.name == name), None)
        assignment = own or self.script.find_assignment(name)
        if assignment is None and self.script.assignments.get(name):
            raise WrongUse(
                f"{self.script.origin}: {name}",
                found=f"it is set {len(self.script.assignments[name])} times",
                cure="Leave one of them, so that it is clear which counts.",
            )
        if assignment is None:
            start = self.shell_command.start
            self._note(name, None, value, start)
            self.splices.append((start, start, f"{name}={shlex.quote(value)} "))
            return
        word = assignment.words[0]
        old = self.script.text[word.start : word.end]
        self._note(name, old, value, word.start)
        if word.is_plain:
            self.splices.append((word.start, word.end, quote_like(value, old)))
        else:
            self._replace(self.script.resolve([word])[0], value)

    def finish(self) -> str:
        """Return the text of the script with all replacements."""
        text = self.script.text
        splices = [*self.splices, *((at, at, "".join(parts)) for at, parts in self.added.items())]
        if self.comments:
            start = text.rfind("\n", 0, self.shell_command.start) + 1
            indent = re.match(r"[ \t]*", text[start:])
            blanks = indent[0] if indent else ""
            splices.append((start, start, "".join(f"{blanks}# {comment}\n" for comment in self.comments)))
        for start, end, new in sorted(set(splices), reverse=True):
            text = text[:start] + new + text[end:]
        return text


def _verify(
    after: str, origin: str, number: int, editor: _ShellEditor, changes: Sequence[ScriptChange]
) -> None:
    """Raise if the written script does not say what the plan wants, or if its other words have changed."""
    script = ShellScript(after, origin)
    command = script.commands[number] if number < len(script.commands) else None
    words = [word.text for word in script.resolve(command.words)] if command is not None else []
    position = find_target_position(words, editor.target)
    for change in changes:
        option = make_option(change)
        if option.form is OptionForm.VARIABLE:
            continue
        scope = words[: (position or 0) + 1] if change.is_launcher else words[(position or 0) + 1 :]
        spots = find_spots(scope, option)
        expected = OptionEditor(
            ScriptCommand(words=tuple(scope), launcher="", interpreter="", target="", arguments=tuple(scope))
        ).build_words(option, change.value, spots[-1] if spots else None)
        is_there = [word for spot in spots for word in scope[spot.start : spot.start + spot.length]]
        if position is None or is_there != expected:
            raise TrimtabError(
                f"the edit of {origin}",
                found=f"{option.name} would be {' '.join(is_there) or 'missing'}, not {' '.join(expected)}",
                cure="Nothing was written. This is a bug of trimtab: please report the command there.",
            )
