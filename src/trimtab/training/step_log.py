"""Step log: what a run prints and writes about every step (loss, speed, memory, data wait).

Nothing here synchronizes with the device: the loss comes with the step's outcome, which the host waits for
anyway.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from trimtab.spec.base import Noun, check_minimum
from trimtab.units import format_bytes, format_figure

if TYPE_CHECKING:
    from pathlib import Path

    from rich.live import Live

    from trimtab.spec import Estimate, Incident

SMOOTHING = 0.9
"""Weight of the old value in the moving average of the speed on the live line."""
OFTEN, SELDOM, LONG = 1, 10, 1000
"""Steps between two printed lines of short runs and of long runs; runs of more than LONG steps are long."""


class StepLine(Noun, frozen=True, kw_only=True):
    """One optimizer step, as in log.jsonl. Unknown is None."""

    may_lack = ("indices", "losses", "metrics")

    step: int
    """Counts from 1."""
    epoch: int
    """Counts from 0."""
    loss: float | None
    """Mean over the global batch; None if the step was skipped because its loss was bad."""
    time_s: float
    """Seconds since the step before."""
    samples: int
    samples_per_s: float
    tokens_per_s: float | None = None
    mfu: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    data_wait_s: float | None = None
    """Seconds that rank 0 waited for its loader."""
    clock_hz: float | None = None
    """Clock of rank 0's GPU, read every few seconds; None without a driver that tells."""
    top_clock_hz: float | None = None
    """Its highest clock."""
    gpu_busy: float | None = None
    """Share of the time in which it ran a kernel, from 0 to 1, as the driver counts it."""
    throttles: tuple[str, ...] = ()
    """Why its clock is reduced, in the driver's words."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile has compiled so far; None if nothing was compiled."""
    grad_norm: float | None = None
    lr: float | None = None
    micro_batch: int | None = None
    gpus: int = 1
    """Processes that took part."""
    attempts: int = 1
    """How often the step was computed."""
    skipped: str | None = None
    """Why the weights were not updated; None if they were."""
    validation_loss: float | None = None
    losses: dict[str, float] | None = None
    """Every loss of the step by the name of its optimizers; None if the job has one loss."""
    metrics: dict[str, float] | None = None
    """Further metrics of the job's own evaluate(), by name; None if there are none."""
    indices: tuple[int, ...] | None = None
    """Which samples the ranks computed, if faults are injected."""

    def faults(self) -> list[str]:
        """Check that times, sizes and rates are possible."""
        return check_minimum(
            0,
            time_s=self.time_s,
            samples=self.samples,
            samples_per_s=self.samples_per_s,
            tokens_per_s=self.tokens_per_s,
            mfu=self.mfu,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            data_wait_s=self.data_wait_s,
        )

    @property
    def text(self) -> str:
        """The printed line: `iter N: loss X, time Yms, mfu Z%`, then the rest."""
        mfu = "-" if self.mfu is None else f"{self.mfu * 100:.2f}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        if self.losses:
            loss = ", ".join(f"{name} {value:.4f}" for name, value in self.losses.items())
        parts = [f"iter {self.step}: loss {loss}", f"time {self.time_s * 1000:.2f}ms", f"mfu {mfu}%"]
        parts.append(f"{format_figure(self.samples_per_s)} samples/s")
        if self.tokens_per_s is not None:
            parts.append(f"{format_figure(self.tokens_per_s)} tokens/s")
        if self.allocated_bytes is not None:
            parts.append(f"allocated {format_bytes(self.allocated_bytes)}")
        if self.reserved_bytes is not None:
            parts.append(f"reserved {format_bytes(self.reserved_bytes)}")
        if self.data_wait_s is not None:
            parts.append(f"data wait {self.data_wait_s * 1000:.1f}ms")
        if self.validation_loss is not None:
            parts.append(f"validation {self.validation_loss:.4f}")
        parts += [f"{name} {value:.4f}" for name, value in (self.metrics or {}).items()]
        if self.skipped:
            parts.append(f"skipped: {self.skipped}")
        return ", ".join(parts)

    def to_log(self) -> dict[str, Any]:
        """Return the dict for log.jsonl and --json; without indices, losses and metrics if there are none."""
        return {key: value for key, value in self.to_builtins().items() if key not in self.may_lack or value}

    def fit_to_width(self, width: int) -> str:
        """Return the printed line without the last parts that do not fit into this width."""
        text = self.text
        while len(text) > width and ", " in text:
            text = text.rpartition(", ")[0]
        return text


def compute_mfu(
    estimate: Estimate | None, planned_gpus: int, gpus: int, share: float, time_s: float
) -> float | None:
    """Compute the MFU of a step by scaling the plan's MFU with the measured time and number of GPUs.

    `share` is the samples of the step divided by the planned global batch.
    """
    if estimate is None or not estimate.mfu or not estimate.step_s or time_s <= 0:
        return None
    return estimate.mfu * estimate.step_s * planned_gpus * share / (time_s * gpus)


def count_tokens(samples: int, weight: float | None, seq: int | None) -> float | None:
    """Return the tokens of a step: its weight if that is above the samples, else `seq` for each sample.

    >>> count_tokens(4, 512.0, None), count_tokens(4, 4.0, 64), count_tokens(4, 4.0, None)
    (512.0, 256.0, None)
    """
    if weight is not None and weight > samples:
        return weight
    return None if seq is None else float(samples * seq)


def print_interval(steps: int | None) -> int:
    """Return the steps between two printed lines of a run.

    >>> print_interval(20), print_interval(60_000), print_interval(None)
    (1, 10, 10)
    """
    return SELDOM if steps is None or steps > LONG else OFTEN


class StepLog:
    """Prints the steps and incidents of one run, on rank 0."""

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
        """Update the live line, and print every `every`-th step."""
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
        """Print an incident on stderr, so that stdout has only step lines."""
        self._say(incident.text)

    def say(self, text: str) -> None:
        """Print a note for people on stderr."""
        self._say(text)

    def close(self) -> None:
        """Print the last step if it was not printed, and restore the terminal."""
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
            # Below the live line, print only what is worth scrolling back to.
            is_evaluated = line.validation_loss is not None or line.metrics is not None
            if line.skipped or is_evaluated or line.step == self.steps:
                self._live.console.print(line.text, markup=False, highlight=False, soft_wrap=True)
        else:
            self.write(line.text)

    def write(self, text: str) -> None:
        """Write a line to the output; if its reader is gone, be quiet instead of failing."""
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
        assert self._board is not None  # noqa: S101 - the caller checks
        for name, value in line.to_builtins().items():
            if isinstance(value, int | float) and name not in ("step", "gpus"):
                self._board.add_scalar(name, value, line.step)
        for kind, values in (("losses", line.losses), ("metrics", line.metrics)):
            for name, value in (values or {}).items():
                self._board.add_scalar(f"{kind}/{name}", value, line.step)


def _open_tensorboard(folder: Path | None) -> Any:
    """Return a TensorBoard writer; None without a folder or if TensorBoard is not installed."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


class StepClock:
    """Times steps from the end of one to the end of the next.

    The host may be a step ahead of the device: it then learns that a step ended only after it has queued the
    next one. So the caller passes the time when the step ended.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart the clock, so that the time since the last lap does not count."""
        self._since = time.perf_counter()

    def lap(self, ended_s: float | None = None) -> float:
        """Return the seconds since the last lap, up to `ended_s` of time.perf_counter() or up to now."""
        now = time.perf_counter()
        if ended_s is not None and self._since < ended_s < now:
            now = ended_s
        passed, self._since = now - self._since, now
        return passed
