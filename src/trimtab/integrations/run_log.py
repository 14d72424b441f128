"""Write the run folder of a training that another framework runs, and compare it with its prediction."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.launching.run_summary import build_summary, remove_summary, write_summary
from trimtab.spec import Incident, IncidentKind
from trimtab.training.events import EventLog
from trimtab.training.process_group import World
from trimtab.training.run_folder import RunFolder, RunIdentity
from trimtab.training.step_log import StepClock, StepLine, StepLog, compute_mfu
from trimtab.training.task import run_on_rank_zero
from trimtab.units import GIB, parse_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trimtab.integrations.prediction import RunPrediction


def find_world() -> World:
    """Return this process among its peers, from torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return World()
    local = parse_whole(os.environ.get("LOCAL_RANK", "")) or 0
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=local, launcher="torchrun")


def measure_memory() -> tuple[int | None, int | None]:
    """Return the peaks of allocated and reserved memory of this process; None without a GPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class RunLog:
    """The run folder during training: rank 0 writes, all ranks call the same methods."""

    def __init__(self, out: Path, prediction: RunPrediction, *, seed: int = 0) -> None:
        self.world = find_world()
        self.prediction = prediction
        self.plan = prediction.plan
        self.steps = StepLog(every=1, steps=None)
        identity = RunIdentity(job=self.plan.job, global_batch=self.plan.choice.global_batch, seed=seed)

        def open_folder() -> None:
            self.folder = RunFolder.open(out, identity=identity, plan=self.plan, main=self.world.is_main)

        # Every rank has a view of the folder; what is wrong with it is raised on all of them.
        run_on_rank_zero(self.world, open_folder)
        if not self.world.is_main:
            open_folder()
        self.events = EventLog(self.world, self.folder, self.steps)
        self.group: Any = dist.new_group(backend="gloo") if self.world.size > 1 else None
        """Sends small values between hosts without waiting for devices."""
        self.last: StepLine | None = None
        self._clock = StepClock()
        self._is_open = True

    def say(self, text: str) -> None:
        """Print a note on rank 0, on stderr."""
        if self.world.is_main:
            self.steps.say(text)

    def begin(self, *, step: int, steps: int | None) -> None:
        """Begin an attempt after `step` steps; `steps` is the length of the run."""
        self.folder.rewind(step)
        if self.world.is_main:
            remove_summary(self.folder.root)
        self.events.begin_attempt()
        self.events.step = step
        if steps:
            self.events.set_total_steps(steps)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self._clock.restart()

    def record_memory_event(self, why: str, done: str) -> None:
        """Record that this rank ran out of memory; rank 0 writes it at gather_events()."""
        ranked = f"rank {self.world.rank}: {why}" if self.world.size > 1 else why
        incident = Incident(
            kind=IncidentKind.OUT_OF_MEMORY,
            at_s=time.time(),
            step=self.events.step + 1,
            rank=self.world.rank,
            why=ranked,
            done=done,
        )
        self.events.pending.append(incident)
        if self.world.size == 1:
            self.gather_events()

    def gather_events(self) -> None:
        """Send the events of all ranks to rank 0, which writes them."""
        mine = [incident.to_json() for incident in self.events.pending]
        self.events.pending = []
        texts: list[Any] = [mine]
        if self.world.size > 1:
            texts = [None] * self.world.size
            dist.all_gather_object(texts, mine, group=self.group)
        if self.world.is_main:
            for text in (text for own in texts for text in own):
                self.events.write(Incident.from_json(text))

    def end_step(  # noqa: PLR0913 - the fields of a line
        self,
        step: int,
        *,
        loss: float,
        epoch: float = 0.0,
        lr: float | None = None,
        data_wait_s: float | None = None,
        micro_batch: int | None = None,
        attempts: int = 1,
        samples: int | None = None,
    ) -> StepLine:
        """Write the line of a step; all ranks call it with their own loss and samples."""
        choice = self.plan.choice
        size = self.world.size
        if size > 1:
            own = choice.global_batch / size if samples is None else samples
            sums = torch.tensor([loss, own], dtype=torch.float64)
            dist.all_reduce(sums, group=self.group)
            loss, samples = float(sums[0]) / size, round(float(sums[1]))
        taken = choice.global_batch if samples is None else samples
        time_s = max(self._clock.lap(), 1e-9)
        share = taken / choice.global_batch
        # A run on the CPU has no MFU, whatever device was predicted.
        mfu = compute_mfu(self.plan.estimate, choice.gpus, size, share, time_s)
        allocated, reserved = measure_memory()
        line = StepLine(
            step=step,
            epoch=int(epoch),
            loss=loss if loss - loss == 0 else None,
            time_s=time_s,
            samples=taken,
            samples_per_s=taken / time_s,
            mfu=mfu if self.prediction.is_predicted and allocated is not None else None,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            data_wait_s=data_wait_s,
            lr=lr,
            micro_batch=min(micro_batch or choice.micro_batch, choice.micro_batch),
            gpus=self.world.size,
            attempts=attempts,
            skipped=None if loss - loss == 0 else f"the loss is {loss}",
        )
        self.folder.log_step(line.to_log())
        self.events.step = step
        self.last = line
        return line

    def figures(self) -> dict[str, float]:
        """Return measured and predicted figures of the last step, for the framework's own log."""
        line = self.last
        if line is None:
            return {}
        values: dict[str, float | None] = {
            "step_s": line.time_s,
            "samples_per_s": line.samples_per_s,
            "mfu": line.mfu,
            "allocated_gib": _to_gib(line.allocated_bytes),
            "reserved_gib": _to_gib(line.reserved_bytes),
        }
        if self.prediction.is_predicted:
            estimate = self.plan.estimate
            values |= {
                "predicted_step_s": estimate.step_s,
                "predicted_samples_per_s": estimate.samples_per_s,
                "predicted_mfu": estimate.mfu,
                "predicted_allocated_gib": _to_gib(estimate.allocated_bytes),
                "predicted_reserved_gib": _to_gib(estimate.reserved_bytes),
            }
        return {f"trimtab/{name}": float(value) for name, value in values.items() if value is not None}

    def end(self, error: BaseException | None = None) -> None:
        """End the attempt, and say how the prediction did."""
        if not self._is_open:
            return
        self._is_open = False
        self.events.end_attempt(error)
        if error is None:
            self._write_summary()
        for text in self._compare():
            self.say(text)
        self.folder.close()

    def _write_summary(self) -> None:
        lines = self.folder.read_lines() if self.world.is_main else []
        if not lines:
            return
        on_gpu = torch.cuda.is_available()
        workload = self.plan.workload
        epoch_samples = None if workload is None else workload.samples
        summary = build_summary(
            self.plan.job,
            self.plan,
            self.events.attempt,
            lines,
            self.folder.read_events(),
            epoch_samples=epoch_samples or self.plan.choice.global_batch,
            device=torch.cuda.get_device_name() if on_gpu else None,
            gpus_there=None,
            now_s=time.time(),
        )
        write_summary(self.folder.root, summary)

    def _compare(self) -> list[str]:
        if self.last is None or not self.prediction.is_predicted:
            return []
        predicted, line = self.plan.estimate, self.last
        pairs: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
            ("allocated", predicted.allocated_bytes, line.allocated_bytes, _format_gib),
            ("reserved", predicted.reserved_bytes, line.reserved_bytes, _format_gib),
        ]
        return [
            f"{name}: predicted {show(guess)}, measured {show(truth)} ({guess / truth - 1:+.1%})"
            for name, guess, truth, show in pairs
            if guess and truth
        ]


def _to_gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _format_gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
