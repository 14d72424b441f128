"""A training command as its owner types it, and what was found out by following it."""

from __future__ import annotations

from typing import Any

from trimtab.spec.base import Noun


class ScriptChange(Noun, frozen=True, kw_only=True):
    """An option of a training command that gets another value: on the command line, or in a config file."""

    names: tuple[str, ...]
    """As typed: --batch-size and -b."""
    value: str
    """The new value; true or false for a switch."""
    text: str
    """The change in words: '--batch-size 16 instead of --batch-size 64'."""
    form: str = "flag"
    """How it is written: flag, joined, key, variable, or config for a key that only a file holds."""
    kind: str = "text"
    """What values it takes: text, integer, switch, pair, boolean or optional-boolean."""
    off_name: str = ""
    default: str | None = None
    is_launcher: bool = False
    """Whether it is an option of torchrun or accelerate, before the script."""
    file: str = ""
    """The config file that holds it; empty for an option of the command line."""
    key: tuple[str | int, ...] = ()
    """Where it is in the file, from the outside in."""
    before: Any = None
    """The value in the file; None if the key is added."""
    after: Any = None
    """The value for the file."""

    def faults(self) -> list[str]:
        """Check that it says where it is."""
        wrong = [] if self.names and all(self.names) else ["a change has no name"]
        return wrong + (["a change of a file has no key"] if self.file and not self.key else [])


class ScriptCommand(Noun, frozen=True, kw_only=True):
    """A training command, taken apart."""

    words: tuple[str, ...]
    """The command as it was typed."""
    launcher: str
    """What starts the processes: python, torchrun, accelerate, or console for an installed program."""
    interpreter: str
    """The Python that runs it: a path."""
    target: str
    """A file, or with `is_module` the name of a module."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    """What the script itself gets: the words after the target."""
    environment: dict[str, str] = {}
    """Variables that the command sets."""
    processes: int = 1
    """Processes on each node."""
    processes_follow_gpus: bool = False
    """The launcher starts a process for each GPU of a node; `processes` is then a placeholder."""
    nodes: int = 1
    interpreter_options: tuple[str, ...] = ()
    """Options of Python itself: -u, -O, -W ignore."""
    launcher_arguments: tuple[str, ...] = ()
    """Options of torchrun or accelerate launch."""
    added_arguments: tuple[str, ...] = ()
    """Words that the launcher puts before `arguments`: --local-rank=0 of torch.distributed.launch."""
    notes: tuple[str, ...] = ()
    """What was left out of the command or assumed about it, for the user to see."""
    changes: tuple[ScriptChange, ...] = ()
    """What differs from the command that was given; those of files are not in `words`."""

    @property
    def world_size(self) -> int:
        """Return the number of processes on all nodes."""
        return self.processes * self.nodes

    def faults(self) -> list[str]:
        """Check that there is at least one process."""
        return [] if self.processes >= 1 and self.nodes >= 1 else ["fewer than one process"]


class ScriptFact(Noun, frozen=True, kw_only=True):
    """Something that was found out about a script."""

    name: str
    """micro_batch, accumulation, precision, compile, recompute, optimizer, gpus, strategy, sequence..."""
    value: str
    where: str
    """Where it was seen: a line of the script, a flag, or the call that showed it."""


class PhasePeak(Noun, frozen=True, kw_only=True):
    """The memory at the peak of one phase of a run."""

    name: str
    """first step, steady step, evaluation, save."""
    allocated_bytes: int
    reserved_bytes: int
    note: str = ""


class ScriptReport(Noun, frozen=True, kw_only=True):
    """What was found out about a training command."""

    command: str
    """The command line."""
    found: tuple[ScriptFact, ...]
    writes: tuple[str, ...] = ()
    """Files that the script would have written, with their sizes; nothing was written."""
    notes: tuple[str, ...] = ()
    is_cached: bool = False
    """Whether the script was not run again: the same command and files were followed before."""


class ScriptPlan(Noun, frozen=True, kw_only=True):
    """The training command of a plan: what to type, and what was found out about it."""

    command: str
    """The command line to type."""
    words: tuple[str, ...]
    """The same, word by word."""
    original: str
    """The command line that was given."""
    changes: tuple[str, ...] = ()
    """What differs: '--batch-size 16 instead of --batch-size 64'."""
    found: tuple[ScriptFact, ...] = ()
    writes: tuple[str, ...] = ()
    """Files that the script would have written, with their sizes; nothing was written."""
    notes: tuple[str, ...] = ()
    """What was assumed about the script's options, for the user to see."""
    edits: tuple[ScriptChange, ...] = ()
    """What `trimtab apply` writes: options of the command, and keys of config files."""
    command_after_apply: str = ""
    """The command line to type once config files are written; empty if it is `command`."""

    def faults(self) -> list[str]:
        """Check that there is a command."""
        return [] if self.words and self.command else ["the command is empty"]
