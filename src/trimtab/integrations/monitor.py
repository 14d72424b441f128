"""The part of a callback that is the same in every framework: predict, log, recover."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import CannotFollow, EnvironmentFault, WrongUse
from trimtab.integrations.live_model import write_live_job
from trimtab.integrations.prediction import ADAPT, LIMIT_S, RunPrediction, predict_or_measure
from trimtab.integrations.recovery import (
    MicroBatchRecovery,
    RecoveryFailedError,
    StepFunctions,
    why_not_recoverable,
)
from trimtab.integrations.run_log import RunLog, find_world
from trimtab.training.oom_recovery import is_out_of_memory
from trimtab.training.task import count_nodes, run_on_rank_zero

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trimtab.integrations.live_model import LiveParts
    from trimtab.integrations.run_facts import RunFacts
    from trimtab.spec import Cluster, Plan

DEFAULT_FOLDER = Path("runs/trimtab")


class RunMonitor:
    """Predicts a run before it starts, logs it, and goes on after an out-of-memory error.

    All ranks call the same methods at the same points.
    """

    def __init__(  # noqa: PLR0913 - the options of a callback
        self,
        *,
        out: str | Path | None = None,
        plan: Plan | str | Path | None = None,
        on: str | Cluster | None = None,
        adapt: str = "if-needed",
        memory: float = 0.9,
        recover: bool = True,
        limit_s: float = LIMIT_S,
    ) -> None:
        if adapt not in ADAPT:
            raise WrongUse(
                f"adapt={adapt!r}", found=f"it is none of {', '.join(ADAPT)}", cure="Use one of those."
            )
        self.out = Path(out) if out is not None else DEFAULT_FOLDER
        self.given_plan = plan
        self.on = on
        self.adapt = adapt
        self.memory = memory
        self.recover = recover
        self.limit_s = limit_s
        self.prediction: RunPrediction | None = None
        self.log: RunLog | None = None
        self.recovery: MicroBatchRecovery | None = None
        self.why_not = ""
        """Why trimtab cannot go on after an out-of-memory error; empty if it can."""
        self.notes: list[str] = []
        """What the user should know before the first step."""

    def predict(
        self, read_parts: Callable[[], LiveParts], facts: RunFacts, *, name: str, problem: str = ""
    ) -> RunPrediction:
        """Check or make the plan on rank 0; all ranks get it. With a `problem`, nothing is predicted."""
        world = find_world()
        facts = facts._replace(ranks=world.size, nodes=count_nodes(world))

        def build_job() -> tuple[str, list[str]]:
            if problem:
                raise CannotFollow(
                    name, found=problem, cure="Measured figures are logged without a prediction."
                )
            return write_live_job(
                self.out.absolute(),
                read_parts(),
                global_batch=facts.global_batch,
                samples=facts.samples,
                epochs=facts.epochs,
            )

        def act() -> RunPrediction:
            return predict_or_measure(
                build_job,
                facts,
                name=name,
                plan=self.given_plan,
                on=self.on,
                adapt=self.adapt,
                memory=self.memory,
                limit_s=self.limit_s,
                say=_say,
            )

        self.prediction = run_on_rank_zero(world, act)
        assert self.prediction is not None  # noqa: S101 - act() returns it or raises
        self.notes += self.prediction.notes
        return self.prediction

    def begin(  # noqa: PLR0913 - a model, its functions and the length of the run
        self,
        model: Any,
        functions: Callable[[RunLog], StepFunctions],
        *,
        step: int,
        steps: int | None,
        batch: int,
        seed: int = 0,
    ) -> None:
        """Open the run folder and prepare recovery; `batch` is how many samples the loader gives at once."""
        assert self.prediction is not None  # noqa: S101 - predict() comes first
        log = self.log = RunLog(self.out, self.prediction, seed=seed)
        log.begin(step=step, steps=steps)
        self.why_not = why = why_not_recoverable(model) if self.recover else "recover=False"
        planned = self.prediction.micro_batch if self.prediction.micro_batch < batch else None
        if why:
            self.notes.append(f"after an out-of-memory error the run ends: {why}")
        else:
            self.recovery = MicroBatchRecovery(
                model,
                functions(log),
                group=log.group,
                micro_batch=planned,
                estimate=self.prediction.plan.estimate if self.prediction.is_predicted else None,
            )
            self.recovery.gathered_events = log.gather_events
            if self.recovery.is_distributed:
                self.notes.append(
                    "gradients are averaged after the backward pass, not during it, so that a rank that runs "
                    "out of memory can repeat a pass (recover=False keeps the overlap)"
                )
        if planned is not None and why:
            raise WrongUse(
                f"micro-batch {planned} for batches of {batch} samples",
                found=f"trimtab cannot split the batches of this run: {why}",
                cure=f"Set the batch size of the data loader to {planned} and accumulate more gradients.",
            )
        for note in dict.fromkeys(self.notes):
            log.say(note)
        if self.prediction.is_predicted:
            log.say(describe_prediction(self.prediction))

    def record_failure(self, error: BaseException) -> None:
        """Write that an error ends the run, and for an out-of-memory error why trimtab could not go on."""
        if self.log is None:
            return
        if not is_out_of_memory(error) and not isinstance(error, RecoveryFailedError):
            self.log.end(error)
            return
        first = str(error).strip().split("\n")[0][:160]
        if self.recovery is None and self.log.world.size == 1:
            self.log.record_memory_event(
                f"a pass ran out of memory: {first}", f"the run ends: {self.why_not}"
            )
        self.log.end(
            EnvironmentFault(
                "a training step",
                found=f"it ran out of memory: {first}",
                cure="Use less memory: gradient checkpointing, a shorter sequence, or more GPUs.",
            )
        )

    def end_step(self, step: int, loss: float | torch.Tensor, **fields: Any) -> dict[str, float]:
        """Write the line of a step, and return figures for the framework's own log."""
        assert self.log is not None  # noqa: S101 - begin() comes first
        recovery = self.recovery
        self.log.end_step(
            step,
            loss=float(loss),
            micro_batch=None if recovery is None else recovery.micro_batch,
            attempts=1 if recovery is None else recovery.attempts,
            **fields,
        )
        return self.log.figures()


def _say(text: str) -> None:
    """Print a note before there is a run folder."""
    sys.stderr.write(f"trimtab: {text}\n")
    sys.stderr.flush()


def describe_prediction(prediction: RunPrediction) -> str:
    """Return the prediction in a line."""
    from trimtab.units import format_bytes, format_duration

    plan, estimate = prediction.plan, prediction.plan.estimate
    choice = plan.choice
    split = f"micro-batch {choice.micro_batch} x accumulation {choice.accumulation} x {choice.data_parallel}"
    parts = [f"predicted for {split} = global batch {choice.global_batch}:"]
    parts.append(format_bytes(estimate.process_bytes))
    if estimate.capacity_bytes:
        parts.append(f"of {format_bytes(estimate.capacity_bytes)}")
    if estimate.step_s:
        parts.append(f"a GPU, {format_duration(estimate.step_s)} a step")
    if prediction.took_s is not None:
        parts.append(f"(predicted in {prediction.took_s:.0f} s)")
    return " ".join(parts)
