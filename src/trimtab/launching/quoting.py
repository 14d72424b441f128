"""Text that nothing given can break out of: a word of a shell, a value of #SBATCH, a document of YAML.

Three languages, three rules. A shell word may hold anything but NUL. A value of `#SBATCH` is read by sbatch
itself, line by line, so that what it cannot hold is refused. YAML is written by its own library.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:+@=/-]*")
"""What partitions, accounts and the like are called."""
_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@=/%-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL_MOST = 40
"""Kubernetes allows 63; the number of a pod and a random ending come behind."""


class Raw(str):
    """A word such as "$address:$port" that the shell must expand."""

    __slots__ = ()


def shell_word(text: str) -> str:
    r"""Quote any text as one shell word.

    >>> shell_word("a b"), shell_word("$(id)"), shell_word("it's")
    ("'a b'", "'$(id)'", '\'it\'"\'"\'s\'')
    """
    if "\0" in text:
        raise _name_error(text, "it holds the character NUL, which no command can be given")
    _check_text(text)
    return shlex.quote(text)


def shell_line(words: Sequence[str]) -> str:
    r"""Format a command, each of its options on its own line.

    >>> print(shell_line(["train", "my job", "--steps", "3"]))
    train 'my job' \
      --steps 3
    """
    text = ""
    for number, word in enumerate(words):
        starts_option = word.startswith("--") and number > 0
        text += " \\\n  " if starts_option else " " if number else ""
        text += word if isinstance(word, Raw) else shell_word(word)
    return text


def shell_assignment(name: str, value: str) -> str:
    """Format `NAME=value` for a shell; the name is checked, since it cannot be quoted."""
    if not _VARIABLE.fullmatch(name):
        raise _name_error(name, "it is no name of a variable")
    return f"{name}={shell_word(value)}"


def batch_option(option: str, value: str | int) -> str:
    """Format a line of `#SBATCH`.

    >>> batch_option("nodes", 2), batch_option("chdir", "/data/my runs")
    ('#SBATCH --nodes=2', '#SBATCH --chdir="/data/my runs"')
    """
    return f"#SBATCH --{option}={batch_value(option, str(value))}"


def batch_value(option: str, text: str) -> str:
    """Format a value as sbatch reads it, in double quotes if needed."""
    _check_text(text)
    if not text or any(not letter.isprintable() for letter in text) or set(text) & {'"', "\\"}:
        raise WrongUse(
            f"{option} {shorten(text)!r}",
            found="a line of #SBATCH holds no line break, quotation mark, backslash or control character",
            cure="Give it a name without; a folder or a file can be reached through a link.",
        )
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def batch_name(option: str, text: str) -> str:
    """Check the name of a partition, an account or the like."""
    if not _NAME.fullmatch(text):
        raise WrongUse(
            f"--{option} {shorten(text)!r}",
            found="such a name has letters, digits and . _ - , : + @ = / and nothing else",
            cure=f"Give the {option} as `sinfo` or `sacctmgr` writes it.",
        )
    return text


def escape_percent(path: str) -> str:
    """Escape a path for --output, where sbatch expands %j and the like.

    >>> escape_percent("runs/100%")
    'runs/100%%'
    """
    return path.replace("%", "%%")


def format_comment(text: str) -> str:
    """Format one comment line of a script.

    >>> format_comment("a" + chr(10) + "rm -rf b")
    '# a rm -rf b'
    """
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text)


def make_label(text: str) -> str:
    """Make a name for Kubernetes and schedulers: small letters, digits and dashes.

    >>> make_label("trimtab slm:tiny"), make_label("___")
    ('trimtab-slm-tiny', 'trimtab')
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LABEL_MOST].strip("-")
    if not label:
        return "trimtab"
    return label if label[0].isalpha() else f"t-{label}"[:_LABEL_MOST]


def dump_yaml(documents: Sequence[Any]) -> str:
    """Dump YAML documents, texts of several lines as blocks if possible."""
    import yaml

    class Writer(yaml.SafeDumper):  # type: ignore[misc] # yaml has no types
        """Writes texts of several lines as blocks, without aliases."""

        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    def write(writer: Any, text: str) -> Any:
        _check_text(text)
        # What YAML takes for a line break or drops at the edge of a line survives in quotation marks alone.
        odd = any(not letter.isprintable() and letter != "\n" for letter in text)
        style = '"' if odd else "|" if "\n" in text else None
        return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Writer.add_representer(str, write)
    return str(yaml.dump_all(documents, Dumper=Writer, sort_keys=False, width=110, allow_unicode=True))


def check_path(what: str, path: str) -> str:
    """Check a path that goes into scripts and listings: it must be printable."""
    if any(not letter.isprintable() for letter in path):
        raise WrongUse(
            f"{what} {path!r}",
            found="its name holds a line break or another character that cannot be shown",
            cure="Rename it, or reach it through a link with a plain name.",
        )
    return path


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _name_error(text, "it is not text: some of its bytes are no UTF-8") from error


def _name_error(text: str, found: str) -> WrongUse:
    return WrongUse(shorten(repr(text)), found=found, cure="Give it another name.")
