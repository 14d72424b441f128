"""What a run shows and writes about every step: loss, speed, memory, waiting.

A step's loss comes with its outcome, which the host waits for anyway; nothing here asks the device to stop.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from trimtab.spec.base import Noun
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from rich.live import Live

    from trimtab.spec import Estimate, Incident

SMOOTHING = 0.9
"""Share of the old value in the speed that the live line shows."""
OFTEN, SELDOM, LONG = 1, 10, 1000
"""Steps between two printed lines: of short runs, of long ones, and from how many steps a run is long."""


class StepLine(Noun, frozen=True, kw_only=True):
    """One optimizer step, as log.jsonl has it. Unknown is None."""

    step: int
    """From 1: how many the run has taken."""
    epoch: int
    """From 0."""
    loss: float | None
    """Of the whole global batch; None where the step was skipped for a bad one."""
    time_s: float
    """Since the step before."""
    samples: int
    samples_per_s: float
    tokens_per_s: float | None = None
    mfu: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    data_wait_s: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    micro_batch: int | None = None
    gpus: int = 1
    """Processes that took part."""
    attempts: int = 1
    """How often the step was computed until it stood."""
    skipped: str | None = None
    """Why the weights stayed as they were."""
    validation_loss: float | None = None
    indices: tuple[int, ...] | None = None
    """Which samples the ranks computed, in a drill."""

    @property
    def text(self) -> str:
        """The line for a log: `iter N: loss X, time Yms, mfu Z%`, then the rest."""
        mfu = "-" if self.mfu is None else f"{self.mfu * 100:.2f}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        parts = [f"iter {self.step}: loss {loss}", f"time {self.time_s * 1000:.2f}ms", f"mfu {mfu}%"]
        parts.append(f"{_format_speed(self.samples_per_s)} samples/s")
        if self.tokens_per_s is not None:
            parts.append(f"{_format_speed(self.tokens_per_s)} tokens/s")
        if self.allocated_bytes is not None:
            parts.append(f"allocated {format_bytes(self.allocated_bytes)}")
        if self.reserved_bytes is not None:
            parts.append(f"reserved {format_bytes(self.reserved_bytes)}")
        if self.data_wait_s is not None:
            parts.append(f"data wait {self.data_wait_s * 1000:.1f}ms")
        if self.validation_loss is not None:
            parts.append(f"validation {self.validation_loss:.4f}")
        if self.skipped:
            parts.append(f"skipped: {self.skipped}")
        return ", ".join(parts)

    def to_log(self) -> dict[str, Any]:
        """As log.jsonl and --json have it; indices only where there are some."""
        return {key: value for key, value in self.to_builtins().items() if key != "indices" or value}

    def fit_to_width(self, width: int) -> str:
        """As much of it as a terminal of that width shows in one line, from the left."""
        text = self.text
        while len(text) > width and ", " in text:
            text = text.rpartition(", ")[0]
        return text


def _format_speed(value: float) -> str:
    """A speed in as few digits as a person reads.

    >>> _short(572_345.0), _short(31.27), _short(0.0532)
    ('572,345', '31.3', '0.0532')
    """
    if value >= 100:  # noqa: PLR2004 - no decimals from three digits on
        return f"{value:,.0f}"
    return f"{value:.3g}"


def compute_mfu(
    estimate: Estimate | None, planned_gpus: int, gpus: int, share: float, time_s: float
) -> float | None:
    """The MFU of a step from what the plan expected: model operations are the same, time and devices differ.

    `share` is the samples of the step over the planned global batch.
    """
    if estimate is None or not estimate.mfu or not estimate.step_s or time_s <= 0:
        return None
    return estimate.mfu * estimate.step_s * planned_gpus * share / (time_s * gpus)


def count_tokens(samples: int, weight: float | None, seq: int | None) -> float | None:
    """Tokens of a step: the job's own weight where it counts other things than samples, or seq a sample.

    >>> tokens_in(4, 512.0, None), tokens_in(4, 4.0, 64), tokens_in(4, 4.0, None)
    (512.0, 256.0, None)
    """
    if weight is not None and weight > samples:
        return weight
    return None if seq is None else float(samples * seq)


def print_interval(steps: int | None) -> int:
    """How many steps lie between two printed lines.

    >>> printed_every(20), printed_every(60_000), printed_every(None)
    (1, 10, 10)
    """
    return SELDOM if steps is None or steps > LONG else OFTEN


class StepLog:
    """Shows and keeps the lines of one run; only rank 0 has one."""

    def __init__(  # noqa: PLR0913 - each is a field
        self,
        *,
        every: int,
        steps: int | None,
        as_json: bool = False,
        quiet: bool = False,
        stream: TextIO | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        self.every = every
        self.steps = steps
        self.as_json = as_json
        self.quiet = quiet
        self.stream = stream or sys.stdout
        self._speed: float | None = None
        self._live: Live | None = None
        self._board = _open_tensorboard(tensorboard)
        self._last: StepLine | None = None
        self._shown = True

    def show_step(self, line: StepLine) -> None:
        """Show one step, as often as asked."""
        self._last, self._shown = line, False
        old = self._speed
        self._speed = (
            line.samples_per_s if old is None else SMOOTHING * old + (1 - SMOOTHING) * line.samples_per_s
        )
        if self._board is not None:
            self._to_board(line)
        if self._is_live():
            self._update(line)
        if line.step % self.every == 0 or line.step == self.steps or line.skipped:
            self._print(line)

    def show_event(self, incident: Incident) -> None:
        """Show what happened, on stderr, where it does not disturb what a program reads."""
        self._say(incident.text)

    def say(self, text: str) -> None:
        """A word on what goes on, for a person."""
        self._say(text)

    def close(self) -> None:
        """Put the terminal back, with the last step in sight."""
        if self._last is not None and not self._shown:
            self._print(self._last)
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _is_live(self) -> bool:
        return not self.as_json and not self.quiet and self.stream.isatty()

    def _print(self, line: StepLine) -> None:
        self._shown = True
        if self.quiet:
            return
        if self.as_json:
            self.write(json.dumps(line.to_log()))
        elif self._live is not None:
            # A terminal keeps only what is worth scrolling back to.
            if line.skipped or line.validation_loss is not None or line.step == self.steps:
                self._live.console.print(line.text, markup=False, highlight=False, soft_wrap=True)
        else:
            self.write(line.text)

    def write(self, text: str) -> None:
        """A line of the answer; a reader that has gone away does not end a training."""
        try:
            self.stream.write(text + "\n")
            self.stream.flush()
        except OSError:
            self.quiet = True

    def _say(self, text: str) -> None:
        if self.quiet:
            return
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        with contextlib.suppress(OSError):
            sys.stderr.write(f"trimtab: {text}\n")
            sys.stderr.flush()

    def _update(self, line: StepLine) -> None:
        from rich.text import Text

        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self.stream), refresh_per_second=4, transient=True)
            self._live.start()
        left = ""
        if self.steps and self._speed:
            from trimtab.units import format_duration

            ahead = (self.steps - line.step) * line.samples / self._speed
            left = f" of {self.steps}" + (f", {format_duration(ahead)} left" if ahead else "")
        width = self._live.console.width - len(left)
        self._live.update(Text(line.fit_to_width(width).replace(":", f"{left}:", 1)))

    def _to_board(self, line: StepLine) -> None:
        assert self._board is not None  # noqa: S101 - asked before
        for name, value in line.to_builtins().items():
            if isinstance(value, int | float) and name not in ("step", "gpus"):
                self._board.add_scalar(name, value, line.step)


def _open_tensorboard(folder: Path | None) -> Any:
    """TensorBoard's writer, where it is installed."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


class StepClock:
    """Times steps from the end of one to the end of the next.

    The host may be a step ahead of the device: it then hears of the end of a step only after it has handed
    out the passes of the next, and of the last step at once. So a step says itself when it ended.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew, so that what lay in between does not count."""
        self._since = time.perf_counter()

    def lap(self, ended_s: float | None = None) -> float:
        """Seconds since the last lap, to `ended_s` of time.perf_counter() or to now."""
        now = time.perf_counter()
        if ended_s is not None and self._since < ended_s < now:
            now = ended_s
        passed, self._since = now - self._since, now
        return passed
