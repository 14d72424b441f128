"""Launch: what would be run, as text, before anything is."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun


class LaunchKind(StrEnum):
    """Who starts the processes."""

    TORCHRUN = "torchrun"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    """An Indexed Job and a headless Service."""
    KUBEFLOW = "kubeflow"
    """A TrainJob."""
    SKY = "sky"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"


class Launch(Noun, frozen=True, kw_only=True):
    """A command with its variables, and the script or manifest that it is given."""

    kind: LaunchKind
    command: tuple[str, ...]
    """The words of the command that starts it all."""
    environment: dict[str, str] = {}
    """Variables that it is given beside those that are there."""
    why: dict[str, str] = {}
    """The reason for each variable."""
    script: str | None = None
    """The batch script or manifest; None where the command is all there is."""
    script_file: str | None = None
    """Where the script is written."""
    files: dict[str, str] = {}
    """Other files that it needs, by their paths."""
    starts: tuple[str, ...] = ()
    """What the command starts on every node in turn; the words of torchrun."""
    out: str | None = None
    """The run's folder."""
    notes: tuple[str, ...] = ()
    """What was chosen and what was not checked, in sentences."""
    fault: str = ""
    """Why the run would end before its first step; empty where nothing is known against it."""
    job_id: str | None = None
    """The scheduler's number, once it is submitted."""

    def faults(self) -> list[str]:
        """A command has a word, a script a place, and every reason a variable."""
        wrong = [] if self.command and self.command[0] else ["command is empty"]
        if (self.script is None) != (self.script_file is None):
            wrong.append("a script and the file for it go together")
        return wrong + [
            f"there is a reason for {name}, and no such variable"
            for name in self.why
            if name not in self.environment
        ]
