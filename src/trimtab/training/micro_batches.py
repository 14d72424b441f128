"""A part of a step, as a loop handles it, and what becomes of a step."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

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
from trimtab.jobs.embeddings import Embeddings, check_samples, comparable, direct_loss, embed
from trimtab.jobs.job import stated_additive
from trimtab.spec import BatchLoss
from trimtab.strategies import STRATEGIES
from trimtab.training import optimizer_step
from trimtab.training.loading import move_to_device
from trimtab.training.oom_recovery import is_out_of_memory

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
    """What the passes of a step ask of the object that runs the step: a Stepper, or one in a test."""

    setting: Setting
    world: World
    groups: RankGroups
    device: torch.device
    autocast: torch.dtype | None
    scale: LossScale

    def at(self, point: str) -> Any:
        """Inject the fault that is scheduled for a point, if there is one."""

    def enter(self, part: MicroBatch) -> None:
        """Prepare the forward pass of a micro-batch."""

    def left(self) -> None:
        """Finish the backward pass of a micro-batch."""

    def backward(self, loss: Any, share: Any) -> None:
        """Run the backward pass of a loss that has this share in the loss of the step."""

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch whose loss has been counted already."""

    def counts(self, loss: torch.Tensor) -> None:
        """Take a loss as this rank's part in the loss of the step."""

    def gives_up(self, why: str) -> None:
        """End the run on all ranks with a cause: no smaller micro-batch helps."""

    def count_statistics(self, ready: Any, part: MicroBatch) -> None:
        """Let BatchNorm's statistics over all ranks see only samples that count."""

    def swallows(self, error: BaseException) -> str | None:
        """Describe an error that the step recovers from; return None for any other."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one optimizer step; the same on all ranks but for `parts` and `micro_batch`."""

    step: int
    epoch: int
    loss: float
    """Of the whole global batch."""
    weight: float
    """What the loss is a mean over."""
    samples: int
    """Of the whole global batch."""
    grad_norm: float
    """Of the whole gradient, before clipping."""
    skipped: str = ""
    """Why nothing was learnt from it; empty where something was."""
    attempts: int = 1
    parts: int = 1
    """Forward passes on this rank, in the attempt that counted."""
    micro_batch: int
    """For the next step."""
    rollback_needed: bool = False
    """A rank's weights are not what the others have: go back to a checkpoint."""
    asked: float = 0.0
    """Sum over ranks of what Run.asked was."""
    ended_s: float | None = None
    """When the device was done with the passes, by time.perf_counter(), where the host was a step ahead and
    came to know of it later; None where the host waited."""


class MicroBatch:
    """Some of the samples of a step: one forward and one backward pass.

    with part:
        part.backward(loss(model, part.batch))
    """

    __slots__ = (
        "_batch",
        "_cast",
        "_entered",
        "_share",
        "_stepper",
        "count",
        "done",
        "error",
        "host",
        "number",
        "samples",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - made by the stepper alone
        self, stepper: StepRunner, host: Any, *, samples: int, share: Any, number: int, count: int
    ) -> None:
        self._stepper = stepper
        self.host = host
        """The samples where they were read; None once they have been let go."""
        self._batch: Any = None
        self._share = share
        self._cast: Any = None
        self._entered = False
        self.samples = samples
        """0 for a part that only keeps the other ranks company."""
        self.number = number
        self.count = count
        self.done = False
        self.error: str | None = None
        """Why this part, and with it this attempt, came to nothing."""

    @property
    def batch(self) -> Any:
        """The samples, on the device."""
        if self._batch is None:
            self._stepper.at("forward")
            self._batch = move_to_device(self.host, self._stepper.device)
        return self._batch

    @property
    def share(self) -> Any:
        """Of this part's loss in the loss of the whole global batch."""
        return self._share

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A forward pass by itself, as a stage of a pipeline makes it; its samples are let go afterwards."""
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
        self._stepper.enter(self)
        if self._stepper.autocast is not None:
            self._cast = torch.autocast(self._stepper.device.type, dtype=self._stepper.autocast)
            self._cast.__enter__()
        return self

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of this part's loss, weighted by its share of the global batch."""
        if not self._entered or self.done:
            raise WrongUse(
                "part.backward()",
                found="it was called twice" if self.done else "it was called outside of `with part:`",
                cure="Call it once inside of `with part:`.",
            )
        self._leave_autocast()
        self._stepper.backward(loss, self._share)
        self.done = True

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """The backward pass of gradient caching, whose loss was computed before, over the global batch."""
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
            self._stepper.left()
            return False
        self.error = self._stepper.swallows(error)
        if self.error is None:
            return False
        # What the failed pass left behind hangs on the frames that it came through.
        traceback.clear_frames(trace)
        return True

    def let_go(self) -> None:
        """Of the samples, so that their memory can be given back."""
        self._batch = self.host = None

    def _leave_autocast(self) -> None:
        if self._cast is not None:
            cast, self._cast = self._cast, None
            cast.__exit__(None, None, None)


# The steps of a job that gives embed() and loss_of(): exact, however the batch is cut
# (engine/gradient_caching.py).
#
# Ranks meet twice in a step: when all have embedded their samples, and at the end. A rank that runs out of
# memory while it embeds says so at the first meeting; all ranks then begin the step again, in smaller parts.


LOSS_ATTEMPTS = 2
"""How often the loss of the global batch is tried before its memory is found too small."""


class RandomState(NamedTuple):
    """Where the random numbers of this process stand."""

    host: torch.Tensor
    device: torch.Tensor | None


class CachedSteps:
    """Computes the parts of an attempt in two passes over them."""

    def __init__(self, stepper: StepRunner, job: Any) -> None:
        whole = [strategy.word for strategy in STRATEGIES.values() if strategy.runs_whole_model]
        if stepper.setting.strategy not in whole:
            raise WrongUse(
                f"strategy {stepper.setting.strategy} for a job with embed() and loss_of()",
                found="gradient caching needs ranks that each hold the whole model or shards of it",
                cure=f"Use one of the strategies {', '.join(whole)}.",
            )
        self._stepper = stepper
        self._job = job
        self._loss_failures = 0

    def run(self, ready: prepare.PreparedRun, parts: list[MicroBatch]) -> int | None:
        """Forward and backward over all parts; the number of the part that failed, if one did."""
        groups = self._stepper.groups
        if groups.data_alone and len(parts) == 1:
            return self._uncut(ready, parts[0])
        states, kept, failed_at = self._embedded(ready, parts)
        finish = getattr(ready.wiring, "finish_forwards", None)
        if finish is not None:
            finish(failed_at, len(parts))
        counts, failed = self._meet(sum(part.samples for part in parts), failed=failed_at is not None)
        if failed:
            return failed_at
        whole, begin = self._whole(ready, parts, kept, counts)
        if whole is None:
            return 0
        kept.clear()
        ready.buffers.back()
        return self._second_pass(ready, parts, states, whole, begin)

    def rehearse(self, ready: prepare.PreparedRun, part: MicroBatch) -> None:
        """Both passes of a part that counts for nothing: they show what ranks say to each other in them."""
        self._embed_part(ready, part)
        with part:
            embeddings = embed(self._job, ready.model, part.batch)
            part.backward_from(
                gradient_caching.make_surrogate_loss(
                    embeddings, gradient_caching.make_zero_gradients(embeddings)
                )
            )

    def _uncut(self, ready: prepare.PreparedRun, part: MicroBatch) -> int | None:
        """One part is the whole global batch: one pass is enough."""
        with part:
            part.backward(direct_loss(self._job, ready.model, part.batch))
        return None if part.error is None else part.number

    def _embedded(
        self, ready: prepare.PreparedRun, parts: list[MicroBatch]
    ) -> tuple[list[RandomState], list[Embeddings], int | None]:
        """The embeddings of all parts, with the random state before each; and the part that failed."""
        states: list[RandomState] = []
        kept: list[Embeddings] = []
        for part in parts:
            states.append(self._random_state())
            found = self._embed_part(ready, part)
            if found is None:
                kept.clear()
                return states, kept, part.number
            if part.samples:
                check_samples(found, part.samples)
                kept.append(found)
            elif not kept and part.number == len(parts) - 1:
                # A rank without samples: it still has to know the shapes.
                kept.append(Embeddings([tensor[:0] for tensor in found.tensors], found.structure))
        return states, kept, None

    def _embed_part(self, ready: prepare.PreparedRun, part: MicroBatch) -> Embeddings | None:
        """The embeddings of one part, without gradients; None where it failed, which part.error explains."""
        before = getattr(ready.wiring, "before_forward", None)
        if before is not None:
            before()
        self._stepper.count_statistics(ready, part)
        if ready.compiling is not None and ready.compiling.on:
            ready.compiling.use(part.samples, ready.regular)
        try:
            with torch.no_grad(), part.computing():
                found = embed(self._job, ready.model, part.batch)
                # Float32 from here on, and no view that holds a larger tensor.
                kept = Embeddings([comparable(tensor).clone() for tensor in found.tensors], found.structure)
        except Exception as error:
            part.error = self._stepper.swallows(error)
            if part.error is None:
                raise
            traceback.clear_frames(error.__traceback__)
            return None
        if before is not None:
            ready.wiring.after_forward()  # type: ignore[attr-defined]  # comes with before_forward
        return kept

    def _meet(self, samples: int, *, failed: bool) -> tuple[list[int], bool]:
        """How many samples each rank has, and whether a rank has failed. All ranks call it."""
        groups, device = self._stepper.groups, self._stepper.device
        mine = torch.tensor([samples, int(failed)], dtype=torch.int64, device=device)
        if groups.data_alone:
            return [samples], failed
        heard = [torch.empty_like(mine) for _ in range(groups.data_parallel)]
        dist.all_gather(heard, mine, group=groups.data_group)
        told = torch.stack(heard).tolist()
        return [count for count, _ in told], any(flag for _, flag in told)

    def _whole(
        self, ready: prepare.PreparedRun, parts: list[MicroBatch], kept: list[Embeddings], counts: list[int]
    ) -> tuple[GlobalBatchLoss | None, int]:
        """The loss of the global batch; and where in it the samples of this rank begin."""
        groups = self._stepper.groups
        begin = sum(counts[: groups.data_rank])
        structure = kept[0].structure if kept else None
        try:
            mine = gradient_caching.join_embeddings(kept) if kept else Embeddings([], structure)
            whole = (
                mine if groups.data_alone else gather_embeddings(mine, counts, groups, self._stepper.device)
            )
            found = gradient_caching.compute_global_loss(self._job, ready.model, whole, check_loss)
        except Exception as error:
            why = self._stepper.swallows(error)
            if why is None or not parts:
                raise
            traceback.clear_frames(error.__traceback__)
            parts[0].error = why
            self._loss_failed(why, sum(counts))
            return None, begin
        self._loss_failures = 0
        first = groups.data_rank == 0
        self._stepper.counts(found.loss if first else torch.zeros_like(found.loss))
        return found, begin

    def _loss_failed(self, why: str, samples: int) -> None:
        self._loss_failures += 1
        if self._loss_failures >= LOSS_ATTEMPTS:
            self._stepper.gives_up(
                f"loss_of() cannot be cut, and the {samples} samples of the global batch are too many: {why}"
            )

    def _second_pass(
        self,
        ready: prepare.PreparedRun,
        parts: list[MicroBatch],
        states: list[RandomState],
        whole: GlobalBatchLoss,
        begin: int,
    ) -> int | None:
        """Every part once more, with gradients."""
        stepper = self._stepper
        sharded = hasattr(ready.wiring, "before_forward")
        if not sharded and stepper.groups.data_rank == 0:
            # Ranks add their gradients up: one of them brings in those of loss_of() itself.
            gradient_caching.add_gradients(whole.parameters, stepper.scale.value)
        for part, state in zip(parts, states, strict=True):
            self._set_random_state(state)
            gradients = gradient_caching.slice_gradients(whole.gradients, begin, begin + part.samples)
            begin += part.samples
            with part:
                embeddings = embed(self._job, ready.model, part.batch)
                if not part.samples:
                    gradients = gradient_caching.make_zero_gradients(embeddings, whole.gradients)
                part.backward_from(gradient_caching.make_surrogate_loss(embeddings, gradients))
            if part.error is not None:
                return part.number
        if sharded:
            # Sharded gradients are sums already, and every rank has its rows of these.
            gradient_caching.add_gradients(whole.parameters, stepper.scale.value)
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
    """The embeddings of all ranks, in the order of ranks; each rank may have another number of samples.

    A rank that has embedded nothing learns shapes and structure from one that has.
    """
    mine = _with_shapes(mine, counts, groups)
    most = max(counts)
    found = []
    for tensor in mine.tensors:
        sent = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
        padded = torch.zeros((most, *sent.shape[1:]), dtype=sent.dtype, device=device)
        padded[: sent.shape[0]] = sent
        heard = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(heard, padded, group=groups.data_group)
        rows = torch.cat([one[:count] for one, count in zip(heard, counts, strict=True)])
        found.append(rows.to(tensor.dtype))
    return Embeddings(found, mine.structure)


def _with_shapes(mine: Embeddings, counts: list[int], groups: Any) -> Embeddings:
    """This rank's embeddings; empty ones of the right shapes where it has no samples."""
    if min(counts):
        return mine
    source = next(rank for rank, count in enumerate(counts) if count)
    shapes = [(tuple(tensor.shape[1:]), tensor.dtype, tensor.device.type) for tensor in mine.tensors]
    told: list[Any] = [shapes, mine.structure]
    dist.broadcast_object_list(told, src=groups.first + source, group=groups.data_group)
    if mine.tensors:
        return mine
    return Embeddings(
        [torch.zeros((0, *shape), dtype=dtype, device=device) for shape, dtype, device in told[0]], told[1]
    )


# Keeps a run from cutting a batch whose loss is not the mean over its parts: that is another training.
#
# A job says it in `additive`, or the first samples of the run show it: their loss is compared with those of
# their halves (engine/additive_loss.py). A run that does not cut the batch is checked when it runs out of
# memory.


STATED_REASON = "the job says additive = False"


class SplitGuard:
    """Whether the batch of a run may be cut; found out when it matters."""

    def __init__(self, stepper: StepRunner, job: Any) -> None:
        self._stepper = stepper
        stated = None if job is None else stated_additive(job)
        self._found = None if stated is None else BatchLoss(additive=stated, stated=True, why=STATED_REASON)

    @property
    def is_cut(self) -> bool:
        """Whether the setting cuts the batch, over micro-batches or ranks."""
        setting = self._stepper.setting
        return setting.accumulation > 1 or self._stepper.groups.data_parallel > 1

    def check_statement(self) -> None:
        """Refuse to cut the batch of a job that says it cannot be; before anything is built."""
        if self.is_cut and self._found is not None and self._found.additive is False:
            raise split_error(self._stepper, self._found)

    def check_first(self, ready: prepare.PreparedRun, window: Window) -> None:
        """Before the first step of a run that cuts the batch; all ranks call it."""
        if self._found is not None or not self.is_cut or ready.loss is None or ready.pipe is not None:
            return
        self._found = found = self._look(ready, window)
        refused = found.additive is False
        stepper = self._stepper
        if optimizer_step.all_reduce_extreme(float(refused), stepper.device, stepper.world.size, least=False):
            elsewhere = BatchLoss(additive=False, why="so the samples of another rank show")
            raise split_error(stepper, found if refused else elsewhere)

    def why_whole(self, ready: prepare.PreparedRun, window: Window) -> str:
        """Why a batch that was in one piece so far may not be cut; empty where it may."""
        if self.is_cut or ready.loss is None or ready.pipe is not None:
            return ""
        if self._found is None:
            self._found = self._look(ready, window)
        return self._found.why if self._found.additive is False else ""

    def _look(self, ready: prepare.PreparedRun, window: Window) -> BatchLoss:
        """The verdict by the first samples of this rank; unknown where they are too few or do not run."""
        stepper = self._stepper
        samples = min(TEST_SAMPLES, window.size, max(2, ready.fitting.sizes.current))
        enough = samples >= 2  # noqa: PLR2004 - halves
        if ready.wiring.equal_parts:
            # Sharded ranks make the same passes, or none of them makes any.
            enough = bool(
                optimizer_step.all_reduce_extreme(
                    float(enough), stepper.device, stepper.world.size, least=True
                )
            )
        if not enough:
            return BatchLoss()
        if ready.compiling is not None:
            ready.compiling.off()
        given = move_to_device(window.part(0, samples).batch, stepper.device)
        compute = ready.loss
        assert compute is not None  # noqa: S101 - the caller has looked
        question = LossUnderTest(
            model=ready.model,
            loss=compute,
            weight=ready.weight,
            cast=self._cast,
            after=getattr(ready.wiring, "after_forward", None),
        )
        ready.buffers.begin()
        try:
            rounding = (
                HALF_ROUNDING if stepper.setting.dtypes.is_narrow else rounding_tolerance(ready.model, None)
            )
            found = check_additivity(
                question,
                given,
                samples,
                gradients=False,
                rounding=rounding,
                all_seeds=ready.wiring.equal_parts,
            )
        except Exception as error:  # noqa: BLE001 - the step itself will show what is wrong
            if is_out_of_memory(error):
                ready.fitting.release()
            return BatchLoss()
        finally:
            ready.buffers.back()
        return found

    def _cast(self) -> Any:
        dtype = self._stepper.autocast
        return (
            contextlib.nullcontext()
            if dtype is None
            else torch.autocast(self._stepper.device.type, dtype=dtype)
        )


def split_error(stepper: StepRunner, found: BatchLoss) -> WrongUse:
    """The error of a run that would cut a batch whose loss cannot be cut."""
    setting = stepper.setting
    ways = (
        "Give the job embed(model, batch) and loss_of(embeddings), which can be cut exactly; or use one "
        f"process with micro_batch {setting.global_batch}, the whole global batch; or set additive = True on "
        "the job, to accept the change."
    )
    if found.is_sum:
        ways = (
            "Return the mean over samples in loss(), or set additive = True on the job to accept the change."
        )
    return WrongUse(
        f"micro_batch {setting.micro_batch} x accumulation {setting.accumulation} x data_parallel "
        f"{setting.data_parallel}",
        found=f"the batch cannot be cut: {found.why}; so cut, it would be another training",
        cure=ways,
    )
