"""Task: what one `trimtab train` is asked to do, as its processes tell each other."""

from __future__ import annotations

from pathlib import Path
from signal import Signals
from typing import Any

from trimtab.errors import JobFailed, WrongUse
from trimtab.spec import Plan
from trimtab.spec.base import Noun, below
from trimtab.training.faults import Fault
from trimtab.training.signals import exit_code

CHECKPOINT_S = 600.0
KEPT = 3
RUNS = Path("runs")
"""Where runs are kept that are given no folder."""


class Task(Noun, frozen=True, kw_only=True):
    """A job, a plan, where to keep the run, and how far to go."""

    job: str
    """As load() finds it."""
    options: dict[str, Any] = {}
    """Members of the job that were set from outside."""
    plan: Plan | None = None
    """None in a rank that learns it from rank 0."""
    out: str
    begin_from: str = ""
    """The folder of a run whose weights this one begins with, as a stage of a curriculum does."""
    steps: int | None = None
    """Optimizer steps in all; None: to the job's horizon."""
    seed: int = 0
    checkpoint_steps: int | None = None
    """Steps between checkpoints, beside the time between them."""
    checkpoint_s: float = CHECKPOINT_S
    keep: int = KEPT
    """Checkpoints that are kept beside the best."""
    evaluate_steps: int | None = None
    """Steps between evaluations; None: at the end of every epoch."""
    every: int | None = None
    """Steps between printed lines; None: by the length of the run."""
    json: bool = False
    faults_due: tuple[Fault, ...] = ()
    """Of a drill."""
    timeout_min: float = 10.0
    """How long a collective may wait for a rank."""

    def faults(self) -> list[str]:
        """Counts start at one."""
        return [
            *below(
                1,
                steps=self.steps,
                checkpoint_steps=self.checkpoint_steps,
                evaluate_steps=self.evaluate_steps,
                every=self.every,
                keep=self.keep,
            ),
            *below(0, seed=self.seed, checkpoint_s=self.checkpoint_s),
        ]


class Ending(Noun, frozen=True, kw_only=True):
    """How a run, or this attempt at it, ended."""

    step: int
    """Optimizer steps that the run has taken."""
    loss: float | None = None
    """Of the last step."""
    out: str
    """The run's folder."""
    asked: str = ""
    """The signal that ended it before its time; empty where it is done."""

    @property
    def exit_code(self) -> int:
        """What the command line leaves with: 0, or 128 and the signal's number."""
        return exit_code(Signals[self.asked]) if self.asked else 0


def check(**counts: float | None) -> None:
    """Raise for a count of the command line that cannot be; some may be 0."""
    for name, value in counts.items():
        least = 0 if name in {"seed", "checkpoint_minutes"} else 1
        if value is not None and not least <= value < float("inf"):  # false for not-a-number too
            option = f"--{name.replace('_', '-')}"
            found = f"it is below {least}" if value < least else "it is no finite number"
            raise WrongUse(f"{option} {value:g}", found=found, cure=f"Give {option} at least {least}.")


def check_trainable(job: Any, name: str) -> None:
    """Raise for a job that can be planned and not trained."""
    if not callable(getattr(job, "dataset", None)):
        raise JobFailed(
            f"job {name}",
            found="it has no dataset(), which planning does without and training does not",
            cure="Give it dataset(): a torch dataset whose items collate to what batch() returns.",
        )


def place(out: Path | str | None, job: str) -> Path:
    """The folder of a run: the one given, or one by the name of the job.

    >>> place(None, "work/job.py:MyJob").as_posix(), place(None, "slm:tiny").as_posix()
    ('runs/job-MyJob', 'runs/slm-tiny')
    """
    if out is not None:
        return Path(out)
    file, _, attribute = job.rpartition(":")
    stem = Path(file).stem if file.endswith(".py") else Path(file).name if file else ""
    name = "-".join(part for part in (stem, Path(attribute).name) if part)
    return RUNS / "".join(one if one.isalnum() or one in "-._" else "-" for one in name)
