"""TrimtabCallback for the Trainer of transformers.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TrimtabCallback(out="runs/mine")])
    trainer.train()

Before training it predicts memory and speed, and changes the micro-batch if it would not fit; the global
batch stays. It logs measured beside predicted figures, and goes on with smaller micro-batches after an
out-of-memory error.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback

from trimtab.integrations.batches import count_samples, keep_random_state
from trimtab.integrations.live_model import LiveParts, read_loss
from trimtab.integrations.monitor import RunMonitor
from trimtab.integrations.prediction import LIMIT_S
from trimtab.integrations.recovery import StepFunctions
from trimtab.integrations.run_facts import RunFacts

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.integrations.run_log import RunLog
    from trimtab.spec import Cluster, Plan

SCANNED_SAMPLES = 1000
"""Samples of the data set among which the longest are found."""
OWN_METHODS = ("training_step", "log", "compute_loss", "get_batch_samples")
"""Methods of the Trainer that the callback wraps on the instance."""


class TransformersCallback(TrainerCallback):
    """Predicts, logs and protects a run of the Trainer; see `trimtab.integrations.transformers`.

    `plan` is a plan or its file to check; without it one is made. `on` names GPUs other than this machine's.
    `adapt` says when the micro-batch may change: "if-needed", "fastest" or "never". `memory` is the share of
    the GPU that may be used. With `recover=False` an out-of-memory error ends the run.
    """

    def __init__(  # noqa: PLR0913 - options, all with defaults
        self,
        trainer: Trainer | None = None,
        *,
        out: str | Path | None = None,
        plan: Plan | str | Path | None = None,
        on: str | Cluster | None = None,
        adapt: str = "if-needed",
        memory: float = 0.9,
        recover: bool = True,
        limit_s: float = LIMIT_S,
        batch: Any = None,
    ) -> None:
        """`batch` is a collated batch to predict memory for, such as the longest; default: from the data set.

        `trainer` is needed only with trainer.add_callback().
        """
        self.monitor = RunMonitor(
            out=out, plan=plan, on=on, adapt=adapt, memory=memory, recover=recover, limit_s=limit_s
        )
        self._given_batch = batch
        self._trainer: Any = trainer
        self._loss: Any = 0.0
        self._samples = 0
        self._factor = 1.0
        self._items: Any = None
        self._wait_s = 0.0
        self._figures: dict[str, float] = {}
        if trainer is not None:
            self._prepare(trainer)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Predict the run when the Trainer is built, before it makes its data loader."""
        del args, state, control, kwargs
        if self._trainer is None:
            self._trainer = _find_trainer(self)
            self._prepare(self._trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run folder and take over the steps."""
        del control
        trainer = self._trainer
        if trainer is None:
            trainer = self._trainer = _find_trainer(self)
            self.monitor.adapt = "never"
            self._prepare(trainer)
        model = kwargs.get("model") if trainer.model_wrapped is None else trainer.model_wrapped
        self._wrap_methods(trainer)
        self.monitor.begin(
            model,
            self._make_functions,
            step=state.global_step,
            steps=state.max_steps,
            batch=trainer._train_batch_size,  # noqa: SLF001
            seed=args.seed,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an optimizer step."""
        del args, state, control, kwargs
        self._loss, self._samples = 0.0, 0
        if self.monitor.recovery is not None:
            self.monitor.recovery.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the line of an optimizer step."""
        del args, control
        scheduler = kwargs.get("lr_scheduler")
        rates = scheduler.get_last_lr() if scheduler is not None else None
        self._figures = self.monitor.end_step(
            state.global_step,
            self._loss,
            epoch=state.epoch or 0.0,
            lr=float(rates[0]) if rates else None,
            data_wait_s=self._wait_s,
            samples=self._samples,
        )
        self._wait_s = 0.0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run folder."""
        del args, state, control, kwargs
        if self.monitor.log is not None:
            self.monitor.log.end()
        for name in OWN_METHODS:
            vars(self._trainer).pop(name, None)

    def _prepare(self, trainer: Any) -> None:
        """Predict the run, and set the micro-batch that the prediction chose."""
        args = trainer.args
        facts = read_facts(trainer)
        if args.auto_find_batch_size:
            self.monitor.notes.append(
                "auto_find_batch_size changes the global batch; trimtab keeps it, and comes first"
            )
        found = self.monitor.predict(
            lambda: read_parts(trainer, facts.micro_batch, self._given_batch),
            facts,
            name=type(trainer.model).__name__,
            problem=why_not_predicted(trainer),
        )
        choice = found.plan.choice
        if choice.micro_batch != facts.micro_batch:
            args.per_device_train_batch_size = choice.micro_batch
            args.gradient_accumulation_steps = choice.accumulation
            trainer._train_batch_size = args.train_batch_size  # noqa: SLF001

    def _wrap_methods(self, trainer: Any) -> None:
        """Replace methods of this Trainer: passes run under recovery, and logs have our figures."""
        for name in OWN_METHODS:
            vars(trainer).pop(name, None)
        plain_step, plain_log = trainer.training_step, trainer.log
        plain_loss, plain_samples = trainer.compute_loss, trainer.get_batch_samples
        self._plain_step, self._plain_loss = plain_step, plain_loss

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self._items = num_items_in_batch
            recovery = self.monitor.recovery
            try:
                if recovery is None:
                    loss = plain_step(model, inputs, num_items_in_batch)
                else:
                    last = trainer.accelerator.gradient_state.sync_gradients
                    loss = recovery.run(dict(inputs), last=last)
            except Exception as error:
                self.monitor.record_failure(error)
                raise
            self._loss = self._loss + loss.detach()
            self._samples += count_samples(inputs)
            return loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # Some losses take labels out of the inputs, which a repeated pass needs again.
            result = plain_loss(model, dict(inputs), *args, **kwargs)
            if self._factor == 1.0:
                return result
            if isinstance(result, tuple):
                return result[0] * self._factor, *result[1:]
            return result * self._factor

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            return plain_log(logs | self._figures if "loss" in logs else logs, *args, **kwargs)

        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            samples = plain_samples(*args, **kwargs)
            self._wait_s += time.perf_counter() - began
            return samples

        trainer.training_step, trainer.compute_loss = training_step, compute_loss
        trainer.log, trainer.get_batch_samples = log, get_batch_samples

    def _make_functions(self, log: RunLog) -> StepFunctions:
        trainer = self._trainer

        def run(batch: Any, factor: float) -> torch.Tensor:
            self._factor = factor
            try:
                result: torch.Tensor = self._plain_step(trainer.model_wrapped, batch, self._items)
                return result
            finally:
                self._factor = 1.0

        def loss(batch: Any) -> Any:
            inner = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            with trainer.compute_loss_context_manager():
                return self._plain_loss(
                    inner,
                    dict(trainer._prepare_inputs(batch)),  # noqa: SLF001
                    num_items_in_batch=self._items,
                )

        return StepFunctions(run, loss, log.record_memory_event, lambda: trainer.state.global_step + 1)


def _find_trainer(callback: TrainerCallback) -> Any:
    """Return the Trainer that is calling this callback: transformers does not pass it."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back
    from trimtab.errors import WrongUse

    raise WrongUse(
        "TrimtabCallback()",
        found="no Trainer calls it",
        cure="Give it to the Trainer: callbacks=[TrimtabCallback()], or TrimtabCallback(trainer).",
    )


def read_facts(trainer: Any) -> RunFacts:
    """Return how the Trainer will train."""
    args = trainer.args
    options = _read_optimizer(trainer)[1]
    half = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
    tf32 = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
    samples = _count_training_samples(trainer)
    share = args.train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)
    epochs = max(1, round(args.num_train_epochs))
    if args.max_steps > 0:
        samples, epochs = args.max_steps * share, 1
    sharded = trainer.is_fsdp_enabled
    return RunFacts(
        micro_batch=args.train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        precision=half or ("tf32" if tf32 else "fp32"),
        recompute="full" if args.gradient_checkpointing else "none",
        compile=bool(args.torch_compile),
        optimizer="fused" if options.get("fused") else "foreach",
        strategy="single" if args.world_size <= 1 else "fsdp" if sharded else "ddp",
        clip=args.max_grad_norm or None,
        samples=samples,
        epochs=epochs,
    )


def why_not_predicted(trainer: Any) -> str:
    """Return why this run cannot be predicted; empty if it can."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed is not predicted"
    if trainer.args.n_gpu > 1:
        return "DataParallel over several GPUs of one process is not predicted; start it with torchrun"
    if trainer.args.torch_compile and trainer.args.world_size > 1:
        return "compiled code is predicted on one GPU only"
    if getattr(trainer.model, "is_quantized", False):
        return "a quantised model is not predicted here"
    return ""


def read_parts(trainer: Any, micro_batch: int, given: Any = None) -> LiveParts:
    """Return the model, a batch of the data set and the optimizer of a Trainer."""
    batch = given if given is not None else _collate_longest(trainer, micro_batch)
    samples = count_samples(batch)
    loss = None
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None or _has_own_loss(trainer):
        loss = CustomLoss(type(trainer), trainer.compute_loss_func, trainer.label_smoother)
    cls, options = _read_optimizer(trainer)
    return LiveParts(trainer.model, dict(batch), samples, loss=loss, optimizer=(cls, options))


class CustomLoss:
    """A loss that is not the model's own: label smoothing, a function, or a subclass of Trainer."""

    def __init__(self, trainer: Any, function: Any, smoother: Any) -> None:
        self.trainer = trainer
        self.function = function
        self.smoother = smoother

    def __call__(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the loss of a batch."""
        if self.trainer.compute_loss is not Trainer.compute_loss:
            owner = self.trainer.__new__(self.trainer)
            return read_loss(self.trainer.compute_loss(owner, model, dict(batch)))
        inputs = dict(batch)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if self.function is not None:
            return self.function(outputs, labels, num_items_in_batch=labels.numel())
        return self.smoother(outputs, labels, shift_labels="CausalLM" in type(model).__name__)


def _has_own_loss(trainer: Any) -> bool:
    return type(trainer).compute_loss is not Trainer.compute_loss


def _read_optimizer(trainer: Any) -> tuple[Any, dict[str, Any]]:
    if trainer.optimizer is not None:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return type(optimizer), dict(optimizer.defaults)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    return cls, {name: value for name, value in options.items() if name not in ("params", "model")}


def _count_training_samples(trainer: Any) -> int | None:
    try:
        return len(trainer.train_dataset) or None
    except TypeError:
        return None


def _collate_longest(trainer: Any, size: int) -> Any:
    """Return a batch of the longest of the first samples, with the random state as before."""
    from trimtab.errors import CannotFollow

    data = trainer.train_dataset
    if data is None or (not hasattr(data, "__getitem__") and iter(data) is data):
        raise CannotFollow(
            "the data set of the Trainer",
            found="reading a sample from it would take the sample away from training",
            cure="Give a batch: TrimtabCallback(batch=...).",
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)  # noqa: SLF001
    with keep_random_state():
        if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            count = len(data)
            first = data[0]
            scanned = min(count, SCANNED_SAMPLES) if _has_length(first) else min(count, size)
            samples = [first, *(data[index] for index in range(1, scanned))]
        else:
            samples = list(islice(iter(data), SCANNED_SAMPLES))
        if samples and _has_length(samples[0]):
            samples.sort(key=lambda sample: -len(sample["input_ids"]))
        chosen = [samples[index % len(samples)] for index in range(size)]
        return collate(chosen)


def _has_length(sample: Any) -> bool:
    return hasattr(sample, "get") and hasattr(sample.get("input_ids"), "__len__")


TrimtabCallback = TransformersCallback
"""The name for users; class names are unique in the package."""
