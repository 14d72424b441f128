"""Find and set options on a training command line, in the way that its owner wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.scripts.script_options import OptionForm, OptionValue, ScriptOption
from trimtab.spec.script import ScriptChange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trimtab.spec.script import ScriptCommand

TRUE, FALSE = ("true", "1", "yes", "on", "t", "y"), ("false", "0", "no", "off", "f", "n")
_LIKE = {"True": ("True", "False"), "1": ("1", "0"), "yes": ("yes", "no"), "on": ("on", "off")}
"""How true and false are written, by what a command has or a script has as its default."""
_VALUELESS = (OptionValue.SWITCH, OptionValue.PAIR)


class OptionSpot(NamedTuple):
    """Where an option is in a list of words."""

    start: int
    length: int
    """Words that it takes: 1 for --name=value, 2 for --name value."""
    text: str
    """Its value as typed; true or false for a switch."""
    name: str
    """Its name as typed."""


def is_true(text: str) -> bool:
    """Return whether a value means true.

    >>> is_true("True"), is_true("0")
    (True, False)
    """
    return text.lower() in TRUE


def split_command(command: ScriptCommand) -> tuple[list[str], list[str]]:
    """Return the words up to the script, and the words that the script gets."""
    count = len(command.arguments)
    return list(command.words[: len(command.words) - count]), list(command.arguments)


def find_value(command: ScriptCommand, option: ScriptOption, *, launcher: bool = False) -> str | None:
    """Return the value that a command gives an option; None if it does not have it."""
    if option.form is OptionForm.VARIABLE:
        return command.environment.get(option.names[0])
    head, arguments = split_command(command)
    spots = find_spots(head if launcher else arguments, option)
    return spots[-1].text if spots else None


def find_spots(words: Sequence[str], option: ScriptOption) -> list[OptionSpot]:
    """Return where an option is in a list of words; the last one counts."""
    spots: list[OptionSpot] = []
    if option.form in (OptionForm.CONFIG, OptionForm.VARIABLE):
        return spots
    for start, word in enumerate(words):
        name, equals, value = word.partition("=")
        following = words[start + 1] if start + 1 < len(words) else None
        if option.form is OptionForm.KEY:
            if name in option.names and equals:
                spots.append(OptionSpot(start, 1, value, name))
        elif option.off_name and word == option.off_name:
            spots.append(OptionSpot(start, 1, "false", word))
        elif name in option.names and equals:
            spots.append(OptionSpot(start, 1, value, name))
        elif word in option.names:
            spots.append(_spot_of_flag(option, start, word, following))
        elif short := _find_short(word, option):
            spots.append(OptionSpot(start, 1, word[len(short) :], short))
    return spots


def _spot_of_flag(option: ScriptOption, start: int, word: str, following: str | None) -> OptionSpot:
    is_optional = option.value in (OptionValue.OPTIONAL_BOOLEAN, OptionValue.BOOLEAN)
    takes_next = following is not None and not (is_optional and following.lower() not in (*TRUE, *FALSE))
    if option.value in _VALUELESS or not takes_next or following is None:
        return OptionSpot(start, 1, "true" if option.value in _VALUELESS or is_optional else "", word)
    return OptionSpot(start, 2, following, word)


def _find_short(word: str, option: ScriptOption) -> str | None:
    """Return the short name of a word such as -b64."""
    return next(
        (
            name
            for name in option.names
            if len(name) == 2 and name[0] == "-" and word.startswith(name) and word[2:].isdigit()  # noqa: PLR2004 - -b
        ),
        None,
    )


def list_typed_options(
    command: ScriptCommand, known: Iterable[ScriptOption], is_knob: Callable[[str], bool]
) -> list[ScriptOption]:
    """Return the options on a command line whose names are wanted, and that are not known yet."""
    names = {name for option in known for name in (*option.names, option.off_name) if name}
    typed: dict[str, ScriptOption] = {}
    _, arguments = split_command(command)
    for number, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names or name in typed or not is_knob(name):
            continue
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        if not word.startswith("-"):
            if equals:
                typed[name] = _typed_option(name, OptionForm.KEY, value)
        elif equals:
            typed[name] = _typed_option(name, OptionForm.FLAG, value)
        elif not following or (following.startswith("-") and not following[1:].isdigit()):
            typed[name] = ScriptOption(names=(name,), value=OptionValue.SWITCH, default="False", where=_PLACE)
        else:
            typed[name] = _typed_option(name, OptionForm.FLAG, following)
    for name, value in command.environment.items():
        if name not in names and is_knob(name):
            typed[name] = _typed_option(name, OptionForm.VARIABLE, value)
    return list(typed.values())


_PLACE = "the command line"


def _typed_option(name: str, form: OptionForm, value: str) -> ScriptOption:
    kind = OptionValue.TEXT
    if value.isdigit():
        kind = OptionValue.INTEGER
    elif value.lower() in (*TRUE, *FALSE):
        kind = OptionValue.BOOLEAN
    return ScriptOption(
        names=(name,), form=form, value=kind, where=_PLACE, variable=name.lstrip("-").replace("-", "_")
    )


def parse_file_value(text: str, option: ScriptOption) -> Any:
    """Return a value as a config file holds it: a number and a truth value as such, in the file's own way."""
    if isinstance(option.in_file, str) and option.value in (OptionValue.TEXT, OptionValue.INTEGER):
        return text
    if text in ("true", "false") and option.value not in (OptionValue.TEXT, OptionValue.INTEGER):
        return text == "true"
    return int(text) if text.isdigit() and option.value is not OptionValue.TEXT else text


def describe_file_change(option: ScriptOption, after: Any) -> str:
    """Return the change of a key of a config file in words; empty if it has the value already."""
    if option.in_file is not None and option.in_file == after and type(option.in_file) is type(after):
        return ""
    name = ".".join(map(str, option.key))
    before = "" if option.in_file is None else f" instead of {_show_value(option.in_file)}"
    return f"{name}: {_show_value(after)}{before or ' added'} in {option.file}"


def _show_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class OptionEditor:
    """Changes options of a command, and keeps everything else as it was typed."""

    def __init__(self, command: ScriptCommand, *, in_files: bool = False) -> None:
        self._command = command
        self._in_files = in_files
        """Whether to change config files where they hold an option, instead of overriding them."""
        self.changes = {change.names: change for change in command.changes}
        self.head, self.arguments = split_command(command)
        self.launcher_arguments = list(command.launcher_arguments)
        self.environment = dict(command.environment)

    def command(self) -> ScriptCommand:
        """Return the changed command."""
        return self._command.replace(
            words=(*self.head, *self.arguments),
            arguments=tuple(self.arguments),
            launcher_arguments=tuple(self.launcher_arguments),
            environment=self.environment,
            changes=tuple(self.changes.values()),
        )

    def set_value(self, option: ScriptOption, value: str, *, launcher: bool = False) -> str:
        """Set an option to a value, `true` or `false` for switches; return the change in words."""
        is_typed = bool(find_spots(self.head if launcher else self.arguments, option))
        in_file = option.form is OptionForm.CONFIG or (self._in_files and option.file and not is_typed)
        after = parse_file_value(value, option) if in_file else None
        text = (
            describe_file_change(option, after)
            if in_file
            else self._set_on_line(option, value, launcher=launcher)
        )
        if text:
            self.changes[option.names] = ScriptChange(
                names=option.names,
                value=value,
                text=text,
                form=option.form.value,
                kind=option.value.value,
                off_name=option.off_name,
                default=option.default,
                is_launcher=launcher,
                file=option.file if in_file else "",
                key=option.key if in_file else (),
                before=option.in_file if in_file else None,
                after=after,
            )
        return text

    def _set_on_line(self, option: ScriptOption, value: str, *, launcher: bool) -> str:
        if option.form is OptionForm.VARIABLE:
            return self._set_variable(option.names[0], self._spell(option, value, None))
        if not launcher:
            return self._set_in(self.arguments, option, value, place=len(self.arguments))
        self._set_in(self.launcher_arguments, option, value, place=0)
        return self._set_in(self.head, option, value, place=self._launcher_end())

    def _set_in(self, words: list[str], option: ScriptOption, value: str, *, place: int) -> str:
        """Set an option in a list of words, at `place` if it is not there; return the change in words."""
        spots = find_spots(words, option)
        last = spots[-1] if spots else OptionSpot(place, 0, "", "")
        before = " ".join(words[last.start : last.start + last.length])
        new = self.build_words(option, value, spots[-1] if spots else None)
        words[last.start : last.start + last.length] = new
        for spot in reversed(spots[:-1]):
            # An earlier one counts for nothing, but a reader would take it for the value.
            del words[spot.start : spot.start + spot.length]
        after = " ".join(new)
        if before == after:
            return ""
        if not after:
            return f"without {before}"
        if before:
            return f"{after} instead of {before}"
        here = "" if option.in_file is None else f" (it is {_show_value(option.in_file)} in {option.file})"
        return f"{after} added{here}"

    def _set_variable(self, name: str, value: str) -> str:
        before = self.environment.get(name)
        self.environment[name] = value
        for number, word in enumerate(self.head):
            if word.startswith(f"{name}="):
                self.head[number] = f"{name}={value}"
                break
        else:
            self.head.insert(0, f"{name}={value}")
        return f"{name}={value} instead of {before}" if before is not None else f"{name}={value} added"

    def _launcher_end(self) -> int:
        """Return where to add an option of the launcher: after its name."""
        for number, word in enumerate(self.head):
            if word in ("launch", "torch.distributed.run", "torch.distributed.launch") or word.endswith(
                "torchrun"
            ):
                return number + 1
        return max(0, len(self.head) - (2 if self._command.is_module else 1))

    def build_words(self, option: ScriptOption, value: str, spot: OptionSpot | None) -> list[str]:
        """Return the words that set an option, in the way of `spot` if it is there already."""
        name = spot.name if spot is not None else option.name
        if option.value in _VALUELESS:
            return self._build_switch(option, name, on=is_true(value))
        default_is_value = option.default is not None and is_true(option.default) == is_true(value)
        if option.value is OptionValue.OPTIONAL_BOOLEAN and option.form is OptionForm.FLAG:
            if default_is_value:
                return []
            if is_true(value) and (spot is None or spot.length == 1):
                return [name]
        text = self._spell(option, value, spot)
        if option.form is OptionForm.KEY:
            return [f"{name}={text}"]
        is_joined = option.form is OptionForm.JOINED
        if spot is not None and spot.length == 1 and spot.text and len(name) == 2:  # noqa: PLR2004 - -b64
            return [f"{name}{text}"]
        if spot is not None:
            is_joined = is_joined or (spot.length == 1 and bool(spot.text))
        return [f"{name}={text}"] if is_joined else [name, text]

    def _build_switch(self, option: ScriptOption, name: str, *, on: bool) -> list[str]:
        default = option.default is not None and is_true(option.default)
        if option.value is OptionValue.SWITCH:
            return [name] if on else []
        if on == default:
            return []
        return [option.name] if on else [option.off_name]

    def _spell(self, option: ScriptOption, value: str, spot: OptionSpot | None) -> str:
        """Return a truth value in the letters that the command or the script uses; others as they are."""
        if option.value not in (OptionValue.BOOLEAN, OptionValue.OPTIONAL_BOOLEAN):
            return value
        if value not in ("true", "false"):
            return value
        sample = spot.text if spot is not None else option.default or ""
        pair = next(
            (texts for texts in _LIKE.values() if sample in texts),
            ("True", "False") if option.form is OptionForm.JOINED else ("true", "false"),
        )
        return pair[0] if value == "true" else pair[1]
