"""TrimtabRun for training loops with Accelerate.

    run = TrimtabRun(accelerator, model, optimizer, compute_loss, out="runs/mine")
    with run:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = run.backward(batch)  # forward and backward pass
                optimizer.step()
                optimizer.zero_grad()

`compute_loss(model, batch)` returns the loss. At the first batch, before any forward pass, the run is
predicted. If the batch would not fit, it is run in smaller micro-batches with the same gradient. The same
happens after an out-of-memory error. Figures go to accelerator.log().
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from trimtab.integrations.batches import count_samples
from trimtab.integrations.live_model import LiveParts
from trimtab.integrations.monitor import RunMonitor
from trimtab.integrations.prediction import LIMIT_S
from trimtab.integrations.recovery import StepFunctions
from trimtab.integrations.run_facts import RunFacts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from trimtab.integrations.run_log import RunLog
    from trimtab.spec import Cluster, Plan

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""Accelerate's names of precisions, and ours."""
REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Ways to distribute in which every rank has all weights."""


class TrimtabRun:
    """Predicts, logs and protects a training loop with Accelerate; see `trimtab.integrations.accelerate`.

    `plan` is a plan or its file to check; without it one is made. `on` names GPUs other than this machine's.
    `adapt` says when batches may be split: "if-needed", "fastest" or "never". `memory` is the share of the
    GPU that may be used. With `recover=False` an out-of-memory error ends the run. `steps` is the length of
    the run in optimizer steps, and `clip` the norm to which you clip gradients.
    """

    def __init__(  # noqa: PLR0913 - the objects of the loop, and options with defaults
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        loss: Callable[[Any, Any], Any],
        *,
        steps: int | None = None,
        first_step: int = 0,
        clip: float | None = None,
        out: str | Path | None = None,
        plan: Plan | str | Path | None = None,
        on: str | Cluster | None = None,
        adapt: str = "if-needed",
        memory: float = 0.9,
        recover: bool = True,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`model` and `optimizer` are what accelerator.prepare() returned."""
        self.monitor = RunMonitor(
            out=out, plan=plan, on=on, adapt=adapt, memory=memory, recover=recover, limit_s=limit_s
        )
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.compute_loss = loss
        self.steps = steps
        self.step = first_step
        """Optimizer steps so far."""
        self.clip = clip
        self.figures: dict[str, float] = {}
        """Measured and predicted figures of the last step."""
        self._loss: Any = 0.0
        self._samples = 0
        self._is_first = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        self.end(error)

    def backward(self, batch: Any) -> torch.Tensor:
        """Run the forward and backward pass of a batch, and return its loss without a graph."""
        if self.monitor.log is None:
            self._begin(batch)
        recovery, last = self.monitor.recovery, bool(self.accelerator.sync_gradients)
        if recovery is None:
            loss = self._run_pass(batch, 1.0)
        else:
            if self._is_first:
                recovery.begin_step()
            loss = recovery.run(batch, last=last)
        self._is_first = last
        self._loss = self._loss + loss
        self._samples += count_samples(batch)
        if last:
            self._end_step()
        whole: torch.Tensor = loss * self.accelerator.gradient_accumulation_steps
        return whole

    def end(self, error: BaseException | None = None) -> None:
        """Close the run folder; a `with` statement does it."""
        if self.monitor.log is None:
            return
        if error is None:
            self.monitor.log.end()
        else:
            self.monitor.record_failure(error)

    def _end_step(self) -> None:
        self.step += 1
        rate = self.optimizer.param_groups[0].get("lr")
        self.figures = self.monitor.end_step(
            self.step, self._loss, lr=None if rate is None else float(rate), samples=self._samples
        )
        self._loss, self._samples = 0.0, 0
        if getattr(self.accelerator, "trackers", None):
            self.accelerator.log(self.figures, step=self.step)

    def _begin(self, batch: Any) -> None:
        facts = self._read_facts(count_samples(batch))
        inner = self.accelerator.unwrap_model(self.model)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)

        def read_parts() -> LiveParts:
            made = (type(optimizer), dict(optimizer.defaults))
            return LiveParts(inner, batch, facts.micro_batch, loss=self.compute_loss, optimizer=made)

        self.monitor.predict(
            read_parts, facts, name=type(inner).__name__, problem=self._why_not_predicted(inner)
        )
        self.monitor.begin(
            self.model, self._make_functions, step=self.step, steps=self.steps, batch=facts.micro_batch
        )

    def _read_facts(self, micro_batch: int) -> RunFacts:
        accelerator = self.accelerator
        options = getattr(self.optimizer, "defaults", {})
        ranks, accumulation = accelerator.num_processes, accelerator.gradient_accumulation_steps
        samples = None if self.steps is None else self.steps * micro_batch * accumulation * ranks
        return RunFacts(
            micro_batch=micro_batch,
            accumulation=accumulation,
            precision=PRECISIONS.get(accelerator.mixed_precision, "fp32"),
            optimizer="fused" if options.get("fused") else "foreach",
            strategy="single" if ranks == 1 else "ddp",
            clip=self.clip,
            samples=samples,
        )

    def _why_not_predicted(self, model: Any) -> str:
        kind = str(self.accelerator.distributed_type).rpartition(".")[2]
        if kind not in REPLICATED:
            return f"{kind} is not predicted"
        if self.accelerator.mixed_precision not in PRECISIONS:
            return f"mixed precision {self.accelerator.mixed_precision} is not predicted"
        if hasattr(model, "_orig_mod"):
            return "a compiled model is not predicted"
        return ""

    def _run_pass(self, batch: Any, factor: float) -> torch.Tensor:
        loss = self.compute_loss(self.model, batch) * factor
        self.accelerator.backward(loss)
        detached: torch.Tensor = loss.detach() / self.accelerator.gradient_accumulation_steps
        return detached

    def _make_functions(self, log: RunLog) -> StepFunctions:
        inner = self.accelerator.unwrap_model(self.model)

        def loss(batch: Any) -> Any:
            with self.accelerator.autocast():
                return self.compute_loss(inner, batch)

        return StepFunctions(self._run_pass, loss, log.record_memory_event, lambda: self.step + 1)
