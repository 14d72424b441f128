"""Micro-batches of a step: the context manager of user loops, gradient caching, and the split check.

- MicroBatch: one forward and one backward pass; StepOutcome: the result of a step
- CachedSteps: exact steps for jobs with embed() and loss_of(), by gradient caching
- SplitGuard: refuses to split a batch whose loss is not the mean over its micro-batches
"""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

import msgspec
import torch
import torch.distributed as dist

from trimtab.engine import gradient_caching
from trimtab.engine.additive_loss import (
    HALF_ROUNDING,
    TEST_SAMPLES,
    LossUnderTest,
    check_additivity,
    rounding_tolerance,
)
from trimtab.engine.step import check_loss
from trimtab.errors import WrongUse
from trimtab.jobs.embeddings import Embeddings, check_samples, compute_embeddings, direct_loss, to_comparable
from trimtab.jobs.job import stated_additive
from trimtab.spec import BatchLoss
from trimtab.strategies import STRATEGIES
from trimtab.training import optimizer_step
from trimtab.training.loading import move_to_device
from trimtab.training.oom_recovery import is_out_of_memory, restarts_after_oom

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from trimtab.engine.gradient_caching import GlobalBatchLoss
    from trimtab.spec import Setting
    from trimtab.training import prepare
    from trimtab.training.loading import Window
    from trimtab.training.optimizer_step import LossScale
    from trimtab.training.process_group import RankGroups, World


class StepRunner(Protocol):
    """What micro-batches need of the object that runs the step: a Stepper, or a stub in a test."""

    setting: Setting
    world: World
    groups: RankGroups
    device: torch.device
    autocast: torch.dtype | None
    scale: LossScale

    def inject_fault(self, point: str) -> Any:
        """Inject the fault that is scheduled for a point, if there is one."""

    def begin_forward(self, micro_batch: MicroBatch) -> None:
        """Prepare the forward pass of a micro-batch."""

    def end_backward(self) -> None:
        """Finish the backward pass of a micro-batch."""

    def backward(self, loss: Any, fraction: Any) -> None:
        """Run the backward pass of a loss that is this fraction of the step's loss."""

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch whose loss has been counted already."""

    def set_loss(self, loss: torch.Tensor) -> None:
        """Set this rank's contribution to the loss of the step."""

    def give_up(self, why: str) -> None:
        """End the run on all ranks with a cause: no smaller micro-batch helps."""

    def count_statistics(self, prepared: Any, micro_batch: MicroBatch) -> None:
        """Let BatchNorm's statistics over all ranks see only samples that count."""

    def describe_recoverable(self, error: BaseException) -> str | None:
        """Describe an error that the step recovers from; return None for any other."""

    def restart_smaller(self, prepared: Any, window: Window, why: str, size: int) -> NoReturn:
        """Leave the run with a smaller micro-batch: other ranks wait for this one in the middle of a pass."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one optimizer step; the same on all ranks except `parts` and `micro_batch`."""

    step: int
    epoch: int
    loss: float
    """Loss of the whole global batch."""
    weight: float
    """Weight that the loss is a mean over: samples, or tokens."""
    samples: int
    """Samples of the whole global batch."""
    grad_norm: float
    """Norm of the whole gradient, before clipping."""
    skipped: str = ""
    """Why the update was skipped; empty if it was not."""
    attempts: int = 1
    parts: int = 1
    """Forward passes on this rank, in the last attempt."""
    micro_batch: int
    """Micro-batch of the next step."""
    rollback_needed: bool = False
    """Whether a rank's weights differ from the others': go back to a checkpoint."""
    asked: float = 0.0
    """Sum of Run.asked over ranks."""
    losses: dict[str, float] = {}
    """Every loss of this step by the name of its optimizers, if the job has several losses."""
    ended_s: float | None = None
    """When the device finished the passes, by time.perf_counter(), if the host was a step ahead; None if the
    host waited for it."""


class MicroBatch:
    """Some samples of a step: one forward and one backward pass.

    with part:
        part.backward(loss(model, part.batch))
    """

    __slots__ = (
        "_batch",
        "_cast",
        "_entered",
        "_fraction",
        "_stepper",
        "count",
        "done",
        "error",
        "host",
        "number",
        "samples",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - created only by the stepper
        self, stepper: StepRunner, host: Any, *, samples: int, fraction: Any, number: int, count: int
    ) -> None:
        self._stepper = stepper
        self.host = host
        """The samples in host memory; None after free()."""
        self._batch: Any = None
        self._fraction = fraction
        self._cast: Any = None
        self._entered = False
        self.samples = samples
        """Number of samples; 0 for a filler that only takes part in collectives."""
        self.number = number
        self.count = count
        self.done = False
        self.error: str | None = None
        """Why this micro-batch, and with it the attempt, failed."""

    @property
    def batch(self) -> Any:
        """The samples, on the device."""
        if self._batch is None:
            self._stepper.inject_fault("forward")
            self._batch = move_to_device(self.host, self._stepper.device)
        return self._batch

    @property
    def fraction(self) -> Any:
        """Weight of this loss as a fraction of the global batch's weight."""
        return self._fraction

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast for a separate forward pass, as in a pipeline stage; free the device copy afterwards."""
        stepper = self._stepper
        try:
            with torch.autocast(
                stepper.device.type, dtype=stepper.autocast, enabled=stepper.autocast is not None
            ):
                yield
        finally:
            self._batch = None

    def __enter__(self) -> Self:
        self._entered = True
        self._stepper.begin_forward(self)
        if self._stepper.autocast is not None:
            self._cast = torch.autocast(self._stepper.device.type, dtype=self._stepper.autocast)
            self._cast.__enter__()
        return self

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the loss, weighted by its fraction of the global batch."""
        if not self._entered or self.done:
            raise WrongUse(
                "part.backward()",
                found="it was called twice" if self.done else "it was called outside of `with part:`",
                cure="Call it once inside of `with part:`.",
            )
        self._leave_autocast()
        self._stepper.backward(loss, self._fraction)
        self.done = True

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """Run the backward pass of gradient caching, whose loss over the global batch is known already."""
        self._leave_autocast()
        self._stepper.backward_from(surrogate)
        self.done = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._leave_autocast()
        self._entered = False
        self._batch = None
        if error is None:
            if not self.done:
                raise WrongUse(
                    "with part:",
                    found="part.backward() was not called",
                    cure="Call it with the loss of the part.",
                )
            self._stepper.end_backward()
            return False
        self.error = self._stepper.describe_recoverable(error)
        if self.error is None:
            return False
        # The frames of the traceback keep the tensors of the failed pass alive.
        traceback.clear_frames(trace)
        return True

    def free(self) -> None:
        """Drop the samples, so that their memory can be released."""
        self._batch = self.host = None

    def _leave_autocast(self) -> None:
        if self._cast is not None:
            cast, self._cast = self._cast, None
            cast.__exit__(None, None, None)


LOSS_ATTEMPTS = 2
"""Attempts at the loss of the global batch before the run ends for lack of memory."""


class RandomState(NamedTuple):
    """Random state of this process, on host and device."""

    host: torch.Tensor
    device: torch.Tensor | None


class CachedSteps:
    """Runs the steps of a job with embed() and loss_of() by gradient caching (engine/gradient_caching.py).

    The result is exact, however the batch is split. Ranks communicate twice in a step: when all have embedded
    their samples, and at the end. If a rank runs out of memory while it embeds, all ranks repeat the step
    with smaller micro-batches.
    """

    def __init__(self, stepper: StepRunner, job: Any) -> None:
        allowed = [strategy.word for strategy in STRATEGIES.values() if strategy.runs_whole_model]
        if stepper.setting.strategy not in allowed:
            raise WrongUse(
                f"strategy {stepper.setting.strategy} for a job with embed() and loss_of()",
                found="gradient caching needs ranks that each hold the whole model or shards of it",
                cure=f"Use one of the strategies {', '.join(allowed)}.",
            )
        self._stepper = stepper
        self._job = job
        self._loss_failures = 0

    def run(self, prepared: prepare.PreparedRun, micro_batches: list[MicroBatch]) -> int | None:
        """Run forward and backward over all micro-batches; return the index of a failed one, else None."""
        groups = self._stepper.groups
        if groups.is_data_alone and len(micro_batches) == 1:
            return self._run_unsplit(prepared, micro_batches[0])
        states, embeddings, failed_at = self._embed_all(prepared, micro_batches)
        finish = getattr(prepared.gradients, "finish_forwards", None)
        if finish is not None:
            finish(failed_at, len(micro_batches))
        counts, failed = self._exchange_counts(
            sum(micro_batch.samples for micro_batch in micro_batches), failed=failed_at is not None
        )
        if failed:
            return failed_at
        global_loss, begin = self._global_loss(prepared, micro_batches, embeddings, counts)
        if global_loss is None:
            return 0
        embeddings.clear()
        prepared.buffers.restore()
        return self._second_pass(prepared, micro_batches, states, global_loss, begin)

    def rehearse(self, prepared: prepare.PreparedRun, micro_batch: MicroBatch) -> None:
        """Run both passes of a filler micro-batch, to record their collectives."""
        self._embed_micro_batch(prepared, micro_batch)
        with micro_batch:
            embeddings = compute_embeddings(self._job, prepared.model, micro_batch.batch)
            micro_batch.backward_from(
                gradient_caching.make_surrogate_loss(
                    embeddings, gradient_caching.make_zero_gradients(embeddings)
                )
            )

    def _run_unsplit(self, prepared: prepare.PreparedRun, micro_batch: MicroBatch) -> int | None:
        """Run a micro-batch that is the whole global batch in a single pass."""
        with micro_batch:
            micro_batch.backward(direct_loss(self._job, prepared.model, micro_batch.batch))
        return None if micro_batch.error is None else micro_batch.number

    def _embed_all(
        self, prepared: prepare.PreparedRun, micro_batches: list[MicroBatch]
    ) -> tuple[list[RandomState], list[Embeddings], int | None]:
        """Return the random state before each micro-batch, all embeddings, and the index of a failed one."""
        states: list[RandomState] = []
        embeddings: list[Embeddings] = []
        for micro_batch in micro_batches:
            states.append(self._random_state())
            embedded = self._embed_micro_batch(prepared, micro_batch)
            if embedded is None:
                embeddings.clear()
                return states, embeddings, micro_batch.number
            if micro_batch.samples:
                check_samples(embedded, micro_batch.samples)
                embeddings.append(embedded)
            elif not embeddings and micro_batch.number == len(micro_batches) - 1:
                # A rank without samples still needs the shapes.
                embeddings.append(Embeddings([tensor[:0] for tensor in embedded.tensors], embedded.structure))
        return states, embeddings, None

    def _embed_micro_batch(self, prepared: prepare.PreparedRun, micro_batch: MicroBatch) -> Embeddings | None:
        """Return the embeddings of a micro-batch, without gradients; None if it failed (see its error)."""
        before = getattr(prepared.gradients, "before_forward", None)
        if before is not None:
            before()
        self._stepper.count_statistics(prepared, micro_batch)
        if prepared.compiling is not None and prepared.compiling.is_enabled:
            prepared.compiling.prepare_for(micro_batch.samples, prepared.regular)
        try:
            with torch.no_grad(), micro_batch.computing():
                embedded = compute_embeddings(self._job, prepared.model, micro_batch.batch)
                # Float32 from here on, and no views that keep larger tensors alive.
                copies = Embeddings(
                    [to_comparable(tensor).clone() for tensor in embedded.tensors], embedded.structure
                )
        except Exception as error:
            micro_batch.error = self._stepper.describe_recoverable(error)
            if micro_batch.error is None:
                raise
            traceback.clear_frames(error.__traceback__)
            return None
        if before is not None:
            prepared.gradients.after_forward()  # type: ignore[attr-defined]  # comes with before_forward
        return copies

    def _exchange_counts(self, samples: int, *, failed: bool) -> tuple[list[int], bool]:
        """Return the number of samples of each rank, and whether a rank failed. All ranks call it."""
        groups, device = self._stepper.groups, self._stepper.device
        mine = torch.tensor([samples, int(failed)], dtype=torch.int64, device=device)
        if groups.is_data_alone:
            return [samples], failed
        gathered = [torch.empty_like(mine) for _ in range(groups.data_parallel)]
        dist.all_gather(gathered, mine, group=groups.data_group)
        rows = torch.stack(gathered).tolist()
        return [count for count, _ in rows], any(flag for _, flag in rows)

    def _global_loss(
        self,
        prepared: prepare.PreparedRun,
        micro_batches: list[MicroBatch],
        embeddings: list[Embeddings],
        counts: list[int],
    ) -> tuple[GlobalBatchLoss | None, int]:
        """Return the loss of the global batch (None if it failed), and where this rank's samples begin."""
        groups = self._stepper.groups
        begin = sum(counts[: groups.data_rank])
        structure = embeddings[0].structure if embeddings else None
        try:
            mine = gradient_caching.join_embeddings(embeddings) if embeddings else Embeddings([], structure)
            gathered = (
                mine
                if groups.is_data_alone
                else gather_embeddings(mine, counts, groups, self._stepper.device)
            )
            global_loss = gradient_caching.compute_global_loss(
                self._job, prepared.model, gathered, check_loss
            )
        except Exception as error:
            why = self._stepper.describe_recoverable(error)
            if why is None or not micro_batches:
                raise
            traceback.clear_frames(error.__traceback__)
            micro_batches[0].error = why
            self._count_loss_failure(why, sum(counts))
            return None, begin
        self._loss_failures = 0
        first = groups.data_rank == 0
        self._stepper.set_loss(global_loss.loss if first else torch.zeros_like(global_loss.loss))
        return global_loss, begin

    def _count_loss_failure(self, why: str, samples: int) -> None:
        self._loss_failures += 1
        if self._loss_failures >= LOSS_ATTEMPTS:
            self._stepper.give_up(
                f"loss_of() cannot be cut, and the {samples} samples of the global batch are too many: {why}"
            )

    def _second_pass(
        self,
        prepared: prepare.PreparedRun,
        micro_batches: list[MicroBatch],
        states: list[RandomState],
        global_loss: GlobalBatchLoss,
        begin: int,
    ) -> int | None:
        """Run every micro-batch again, with gradients; return the index of a failed one, else None."""
        stepper = self._stepper
        sharded = hasattr(prepared.gradients, "before_forward")
        if not sharded and stepper.groups.data_rank == 0:
            # Gradients are summed over ranks: only one rank adds those of loss_of() itself.
            gradient_caching.add_gradients(global_loss.parameters, stepper.scale.value)
        for micro_batch, state in zip(micro_batches, states, strict=True):
            self._set_random_state(state)
            gradients = gradient_caching.slice_gradients(
                global_loss.gradients, begin, begin + micro_batch.samples
            )
            begin += micro_batch.samples
            with micro_batch:
                embeddings = compute_embeddings(self._job, prepared.model, micro_batch.batch)
                if not micro_batch.samples:
                    gradients = gradient_caching.make_zero_gradients(embeddings, global_loss.gradients)
                micro_batch.backward_from(gradient_caching.make_surrogate_loss(embeddings, gradients))
            if micro_batch.error is not None:
                return micro_batch.number
        if sharded:
            # Sharded gradients are already summed, and every rank has its own shard.
            gradient_caching.add_gradients(global_loss.parameters, stepper.scale.value)
        return None

    def _random_state(self) -> RandomState:
        device = self._stepper.device
        return RandomState(
            torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        )

    def _set_random_state(self, state: RandomState) -> None:
        torch.set_rng_state(state.host)
        if state.device is not None:
            torch.cuda.set_rng_state(state.device, self._stepper.device)


def gather_embeddings(mine: Embeddings, counts: list[int], groups: Any, device: torch.device) -> Embeddings:
    """Return the embeddings of all ranks, in the order of ranks, which may have different sample counts.

    A rank without samples receives shapes and structure from one that has samples.
    """
    mine = _with_shapes(mine, counts, groups)
    most = max(counts)
    tensors = []
    for tensor in mine.tensors:
        sent = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
        padded = torch.zeros((most, *sent.shape[1:]), dtype=sent.dtype, device=device)
        padded[: sent.shape[0]] = sent
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=groups.data_group)
        rows = torch.cat([rank_rows[:count] for rank_rows, count in zip(gathered, counts, strict=True)])
        tensors.append(rows.to(tensor.dtype))
    return Embeddings(tensors, mine.structure)


def _with_shapes(mine: Embeddings, counts: list[int], groups: Any) -> Embeddings:
    """Return this rank's embeddings; empty ones of the right shapes if it has no samples."""
    if min(counts):
        return mine
    source = next(rank for rank, count in enumerate(counts) if count)
    shapes = [(tuple(tensor.shape[1:]), tensor.dtype, tensor.device.type) for tensor in mine.tensors]
    layout: list[Any] = [shapes, mine.structure]
    dist.broadcast_object_list(layout, group_src=source, group=groups.data_group)
    if mine.tensors:
        return mine
    return Embeddings(
        [torch.zeros((0, *shape), dtype=dtype, device=device) for shape, dtype, device in layout[0]],
        layout[1],
    )


STATED_REASON = "the job says additive = False"


class SplitGuard:
    """Checks whether the batch may be split: its loss must be the mean over its micro-batches.

    The job states it in `additive`, or the first samples of the run show it: their loss is compared with the
    losses of their halves (engine/additive_loss.py). A run that does not split the batch is checked only when
    it runs out of memory.
    """

    def __init__(self, stepper: StepRunner, job: Any) -> None:
        self._stepper = stepper
        stated = None if job is None else stated_additive(job)
        self._verdict = None if stated is None else BatchLoss(additive=stated, stated=True, why=STATED_REASON)

    @property
    def is_split(self) -> bool:
        """Whether the setting splits the batch, over micro-batches or ranks."""
        setting, prepared = self._stepper.setting, getattr(self._stepper, "prepared", None)
        # All ranks may have started again with less, after one of them ran out of memory.
        is_smaller = prepared is not None and prepared.fitter.sizes.current < setting.micro_batch
        is_split = setting.accumulation > 1 or self._stepper.groups.data_parallel > 1
        return is_split or (is_smaller and restarts_after_oom(setting.mesh))

    def check_statement(self) -> None:
        """Raise WrongUse if the setting splits the batch of a job that says it cannot be split."""
        if self.is_split and self._verdict is not None and self._verdict.additive is False:
            raise split_error(self._stepper, self._verdict)

    def check_first_window(self, prepared: prepare.PreparedRun, window: Window) -> None:
        """Check the loss before the first step of a run that splits the batch; all ranks call it."""
        if (
            self._verdict is not None
            or not self.is_split
            or prepared.loss is None
            or prepared.pipe is not None
        ):
            return
        self._verdict = verdict = self._compare_losses(prepared, window)
        refused = verdict.additive is False
        stepper = self._stepper
        if optimizer_step.all_reduce_extreme(float(refused), stepper.device, stepper.world.size, least=False):
            elsewhere = BatchLoss(additive=False, why="so the samples of another rank show")
            raise split_error(stepper, verdict if refused else elsewhere)

    def why_not_splittable(self, prepared: prepare.PreparedRun, window: Window) -> str:
        """Return why a batch that was not split so far cannot be split; empty if it can."""
        if self.is_split or prepared.loss is None or prepared.pipe is not None:
            return ""
        if self._verdict is None:
            self._verdict = self._compare_losses(prepared, window)
        return self._verdict.why if self._verdict.additive is False else ""

    def _compare_losses(self, prepared: prepare.PreparedRun, window: Window) -> BatchLoss:
        """Judge by the first samples of this rank; unknown if they are too few or fail."""
        stepper = self._stepper
        samples = min(TEST_SAMPLES, window.size, max(2, prepared.fitter.sizes.current))
        enough = samples >= 2  # noqa: PLR2004 - halves
        if prepared.gradients.equal_micro_batches:
            # Sharded ranks must all run the same passes, or none.
            enough = bool(
                optimizer_step.all_reduce_extreme(
                    float(enough), stepper.device, stepper.world.size, least=True
                )
            )
        if not enough:
            return BatchLoss()
        if prepared.compiling is not None:
            prepared.compiling.disable()
        batch = move_to_device(window.slice(0, samples).batch, stepper.device)
        compute = prepared.loss
        assert compute is not None  # noqa: S101 - checked by the caller
        comparison = LossUnderTest(
            model=prepared.model,
            loss=compute,
            weight=prepared.weight,
            cast=self._cast,
            after=getattr(prepared.gradients, "after_forward", None),
        )
        prepared.buffers.save()
        try:
            rounding = (
                HALF_ROUNDING
                if stepper.setting.dtypes.is_narrow
                else rounding_tolerance(prepared.model, None)
            )
            verdict = check_additivity(
                comparison,
                batch,
                samples,
                gradients=False,
                rounding=rounding,
                all_seeds=prepared.gradients.equal_micro_batches,
            )
        except Exception as error:  # noqa: BLE001 - the step itself will show what is wrong
            if is_out_of_memory(error):
                if prepared.gradients.equal_micro_batches and stepper.world.size > 1:
                    # The other ranks wait for this one in a collective of the same pass.
                    stepper.restart_smaller(prepared, window, f"out of memory: {error}", samples)
                prepared.fitter.release()
            return BatchLoss()
        finally:
            prepared.buffers.restore()
        return verdict

    def _cast(self) -> Any:
        dtype = self._stepper.autocast
        return (
            contextlib.nullcontext()
            if dtype is None
            else torch.autocast(self._stepper.device.type, dtype=dtype)
        )


def split_error(stepper: StepRunner, batch_loss: BatchLoss) -> WrongUse:
    """Return the error of a run that would split a batch whose loss cannot be split."""
    setting = stepper.setting
    cure = (
        "Give the job embed(model, batch) and loss_of(embeddings), which can be cut exactly; or use one "
        f"process with micro_batch {setting.global_batch}, the whole global batch; or set additive = True on "
        "the job, to accept the change."
    )
    if batch_loss.is_sum:
        cure = (
            "Return the mean over samples in loss(), or set additive = True on the job to accept the change."
        )
    return WrongUse(
        f"micro_batch {setting.micro_batch} x accumulation {setting.accumulation} x data_parallel "
        f"{setting.data_parallel}",
        found=f"the batch cannot be cut: {batch_loss.why}; a split would change the training",
        cure=cure,
    )
