"""TrimtabCallback for the Trainer of Lightning.

    trainer = L.Trainer(callbacks=[TrimtabCallback(out="runs/mine")])
    trainer.fit(module, loader)

At the first batch, before any forward pass, it predicts memory and speed. If the batch would not fit, it is
run in smaller micro-batches with the same gradient. The same happens after an out-of-memory error. Measured
figures are logged beside predicted ones.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from trimtab.integrations.batches import count_samples
from trimtab.integrations.live_model import LiveParts, read_loss
from trimtab.integrations.monitor import RunMonitor
from trimtab.integrations.prediction import LIMIT_S
from trimtab.integrations.recovery import StepFunctions
from trimtab.integrations.run_facts import RunFacts

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
except ModuleNotFoundError:
    # The same framework under its older name.
    from pytorch_lightning import Callback
    from pytorch_lightning.loops.optimization.automatic import ClosureResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trimtab.integrations.run_log import RunLog
    from trimtab.spec import Cluster, Plan

PRECISIONS = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16-true"}
"""Lightning's names of precisions, and ours."""


class LightningCallback(Callback):
    """Predicts, logs and protects a run of Lightning; see `trimtab.integrations.lightning`.

    `plan` is a plan or its file to check; without it one is made. `on` names GPUs other than this machine's.
    `adapt` says when batches may be split: "if-needed", "fastest" or "never". `memory` is the share of the
    GPU that may be used. With `recover=False` an out-of-memory error ends the run.
    """

    def __init__(  # noqa: PLR0913 - options, all with defaults
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
        super().__init__()
        self.monitor = RunMonitor(
            out=out, plan=plan, on=on, adapt=adapt, memory=memory, recover=recover, limit_s=limit_s
        )
        self._loss: Any = 0.0
        self._samples = 0
        self._kwargs: Any = None
        self._closure: Any = None
        self._extra: dict[str, Any] = {}
        self._has_begun = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the closures of automatic optimization."""
        self._has_begun = False
        if pl_module.automatic_optimization and self.monitor.recover:
            self._wrap_closures(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Predict the run at its first batch."""
        del batch_idx
        if not self._has_begun:
            self._has_begun = True
            self._begin(trainer, pl_module, batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the line of an optimizer step after its last batch."""
        del batch_idx
        loss = read_loss(outputs) if outputs else None
        if loss is not None:
            self._loss = self._loss + loss.detach()
        self._samples += count_samples(batch)
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():  # noqa: SLF001
            return
        rates = [group["lr"] for optimizer in trainer.optimizers[:1] for group in optimizer.param_groups]
        figures = self.monitor.end_step(
            trainer.global_step,
            self._loss,
            epoch=trainer.current_epoch,
            lr=float(rates[0]) if rates else None,
            samples=self._samples,
        )
        self._loss, self._samples = 0.0, 0
        pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the run folder."""
        del pl_module
        vars(_optimization(trainer)).pop("_make_closure", None)
        if self.monitor.log is not None:
            self.monitor.log.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what ended the run."""
        del trainer, pl_module
        self.monitor.record_failure(exception)

    def _begin(self, trainer: Any, module: Any, batch: Any) -> None:
        facts = read_facts(trainer, module, count_samples(batch))
        optimizers = trainer.optimizers

        def read_parts() -> LiveParts:
            made = (type(optimizers[0]), dict(optimizers[0].defaults))
            return LiveParts(module, batch, facts.micro_batch, method="training_step", optimizer=made)

        self.monitor.predict(
            read_parts, facts, name=type(module).__name__, problem=why_not_predicted(trainer, module)
        )
        if not module.automatic_optimization:
            self.monitor.recover = False
            self.monitor.notes.append("with manual optimization trimtab cannot repeat a step")
        steps = trainer.estimated_stepping_batches
        self.monitor.begin(
            trainer.strategy.model,
            lambda log: self._make_functions(trainer, module, log),
            step=trainer.global_step,
            steps=int(steps) if 0 < steps < float("inf") else None,
            batch=facts.micro_batch,
        )

    def _wrap_closures(self, trainer: Any) -> None:
        """Run the passes of each batch under recovery: the closure is what the optimizer calls."""
        optimization = _optimization(trainer)
        vars(optimization).pop("_make_closure", None)
        plain = optimization._make_closure  # noqa: SLF001

        def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            closure = plain(kwargs, optimizer, batch_idx)
            if self.monitor.recovery is not None and "batch" in kwargs:
                closure.closure = self._recovering(trainer, closure, kwargs, batch_idx)
            return closure

        optimization._make_closure = make_closure  # noqa: SLF001

    def _recovering(
        self, trainer: Any, closure: Any, kwargs: Any, batch_idx: int
    ) -> Callable[..., ClosureResult]:
        @torch.enable_grad()
        def compute(*_: Any, **__: Any) -> ClosureResult:
            recovery = self.monitor.recovery
            assert recovery is not None  # noqa: S101 - checked by the caller
            self._closure, self._kwargs, self._extra = closure, kwargs, {}
            if closure._zero_grad_fn is not None:  # noqa: SLF001
                closure._zero_grad_fn()  # noqa: SLF001
            if batch_idx % trainer.accumulate_grad_batches == 0:
                recovery.begin_step()
            last = not trainer.fit_loop._should_accumulate()  # noqa: SLF001
            loss = recovery.run(kwargs["batch"], last=last)
            return ClosureResult(loss, extra=self._extra)

        return compute

    def _make_functions(self, trainer: Any, module: Any, log: RunLog) -> StepFunctions:
        optimization = _optimization(trainer)

        def run(batch: Any, factor: float) -> torch.Tensor:
            kwargs = type(self._kwargs)(self._kwargs)
            kwargs["batch"] = batch
            result = optimization._make_step_fn(kwargs)()  # noqa: SLF001
            if result.closure_loss is None:
                return torch.zeros((), device=module.device)
            loss = result.closure_loss * factor
            self._extra = result.extra
            self._closure._backward_fn(loss)  # noqa: SLF001
            detached: torch.Tensor = loss.detach()
            return detached

        def loss(batch: Any) -> Any:
            kwargs = type(self._kwargs)(self._kwargs)
            kwargs["batch"] = batch
            with _without_logging(module), trainer.precision_plugin.train_step_context():
                return read_loss(module.training_step(*kwargs.values())) / trainer.accumulate_grad_batches

        return StepFunctions(run, loss, log.record_memory_event, lambda: trainer.global_step + 1)


def _optimization(trainer: Any) -> Any:
    return trainer.fit_loop.epoch_loop.automatic_optimization


@contextlib.contextmanager
def _without_logging(module: Any) -> Iterator[None]:
    """Ignore what a training step logs while its loss is examined."""
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            vars(module).pop(name, None)


def read_facts(trainer: Any, module: Any, micro_batch: int) -> RunFacts:
    """Return how Lightning trains; recomputation is in the module's own code."""
    ranks = trainer.world_size
    options = trainer.optimizers[0].defaults if trainer.optimizers else {}
    steps = trainer.estimated_stepping_batches
    step_samples = micro_batch * trainer.accumulate_grad_batches * ranks
    known = 0 < steps < float("inf")
    del module
    return RunFacts(
        micro_batch=micro_batch,
        accumulation=trainer.accumulate_grad_batches,
        precision=PRECISIONS.get(str(trainer.precision), "fp32"),
        optimizer="fused" if options.get("fused") else "foreach",
        strategy="single" if ranks == 1 else "ddp",
        clip=trainer.gradient_clip_val or None,
        samples=int(steps) * step_samples if known else None,
    )


def why_not_predicted(trainer: Any, module: Any) -> str:
    """Return why this run cannot be predicted; empty if it can."""
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "only automatic optimization with one optimizer is predicted"
    if str(trainer.precision) not in PRECISIONS:
        return f"precision {trainer.precision} is not predicted"
    if getattr(module, "_compiler_ctx", None) is not None:
        return "a compiled module is not predicted"
    strategy = type(trainer.strategy).__name__
    if strategy not in ("SingleDeviceStrategy", "DDPStrategy"):
        return f"{strategy} is not predicted"
    return ""


TrimtabCallback = LightningCallback
"""The name for users; class names are unique in the package."""
