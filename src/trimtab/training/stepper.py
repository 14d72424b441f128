"""Run one optimizer step on a rank: micro-batches, retries, the status exchange and the recovery.

A step is repeated with smaller micro-batches after an out-of-memory error, and once more if its loss is NaN
or too large. All ranks take the same decision, from the status that they sum at the end of every attempt.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from trimtab.engine.additive_loss import find_batch_norms
from trimtab.engine.in_backward import InBackwardGradients
from trimtab.engine.precision import autocast_dtype
from trimtab.engine.step import check_loss
from trimtab.engine.tensor_parallel import gather_loss
from trimtab.errors import NothingFits, WrongUse
from trimtab.jobs.job import has_embeddings
from trimtab.jobs.load import job_error
from trimtab.spec import Incident, IncidentKind
from trimtab.training import optimizer_step
from trimtab.training import prepare as prepare_module
from trimtab.training.loading import Window, copy_batch, rank_slice_bounds, wrap_batch
from trimtab.training.micro_batches import CachedSteps, MicroBatch, SplitGuard, StepOutcome
from trimtab.training.oom_recovery import (
    RestartWithSmaller,
    SizeChange,
    is_out_of_memory,
    restarts_after_oom,
)
from trimtab.training.optimizer_step import LossScale, OptimizerInterrupted, StepStatus, initial_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Setting
    from trimtab.training.pipeline import PipelineRunner
    from trimtab.training.process_group import RankGroups, World

    Faults = Any
    """Fault injection: at(point, step, rank), with the points forward, backward, gradient and optimizer."""

MAX_ATTEMPTS = 40
"""Attempts at one step; more mean that the cause is neither memory nor NaN."""
_COMPILER_FAILED = "the compiler failed"
_OTHER_STAGE_FAILED = "another stage failed"
SINGLE_SAMPLE_RETRIES = 3
"""Retries with a single sample: another process may have used the memory for a moment."""


@dataclass(kw_only=True)
class StepInFlight:
    """A step whose outcome is not known yet, and the state that a retry would start from."""

    window: Window
    total: Any
    """Weight of the whole global batch."""
    random: torch.Tensor
    device_random: torch.Tensor | None
    copies: dict[int, torch.Tensor]
    """Buffers before the step."""
    attempts: int = 0
    micro_batches: int = 0
    failed_at: int | None = None
    limit: float | None = None
    """The spike limit that the device has used."""


class Stepper:
    """Runs the steps of one process; Run is its public interface."""

    def __init__(
        self,
        setting: Setting,
        world: World,
        groups: RankGroups,
        *,
        faults: Faults,
        listen: Callable[[Incident], None] | None,
    ) -> None:
        self.setting = setting
        self.world = world
        self.groups = groups
        self.device = torch.device(world.device)
        self.autocast = autocast_dtype(setting)
        self.faults = faults
        self.prepared: prepare_module.PreparedRun | None = None
        self.asked = 0.0
        self.spike_limit: float | None = None
        self.steps = 0
        self.scale: LossScale = initial_scale(setting.dtypes)
        self.rollback = False
        """Whether the optimizer of this rank was interrupted halfway."""
        self.keeps_sizes = False
        """Whether the micro-batch of a step that is undone shrank: a checkpoint must not reset it then."""
        self.outcome: StepOutcome | None = None
        self._interruptions: dict[int, int] = {}
        """By step, how often a single sample ran out of memory after weights had been updated."""
        self._held_steps: set[int] = set()
        """Steps whose gradients were bad after weights had been updated: their updates wait for the end."""
        self._listen = listen
        self._exchange = optimizer_step.StatusExchange(self.device, world.size)
        self._proposed: SizeChange | None = None
        self._fatal: str | None = None
        self._window: Window | None = None
        self._open = self._rehearsing = False
        self._arrived = 0
        self._fault_after = 1
        self._random = torch.empty(0)
        self._device_random: torch.Tensor | None = None
        self._weighed: tuple[int, list[tuple[Any, Any]]] | None = None
        self._counting_sample: Any = None
        """A sample with weight, of any rank, for passes of a rank whose own samples have none."""
        self._nothing_counts = False
        """Whether no rank has had a sample with weight yet."""
        self.split_sequences: Callable[[Any], Any] | None = None
        """Returns this rank's part of the sequences of a batch; None if sequences are whole."""
        self.cached_steps: CachedSteps | None = None
        """Runs the steps of a job with embed() and loss_of(); None for other jobs."""
        self._guards: list[SplitGuard] = []
        """One for each loss."""
        self._is_last_loss = True
        self.split_guard: SplitGuard | None = None
        """Checks whether the batch may be split; None with gradient caching, which splits any batch."""

    def prepare(self, request: prepare_module.PrepareRequest) -> prepare_module.PreparedRun:
        """Prepare model and optimizer for the first step."""
        uses_caching = request.loss is None and has_embeddings(request.job)
        if not uses_caching:
            self.split_guard = SplitGuard(self, request.job)
            self.split_guard.check_statement()
        on_gradient = self.on_gradient if self.faults is not None else None
        self.prepared = prepare_module.prepare(request, self.report_compile, on_gradient)
        # All ranks have found the same.
        for note in self.prepared.stage_notes if self.world.rank == 0 else ():
            found, _, done = note.removeprefix("pipeline: ").partition(", because ")
            self._report(IncidentKind.PIPELINE, done, found)
        if self.split_guard is not None:
            others = self.prepared.losses[1:]
            self._guards = [self.split_guard, *(SplitGuard(self, request.job) for _ in others)]
        self._enter_loss(self.prepared)
        self._leave_losses()
        if uses_caching:
            self.cached_steps = CachedSteps(self, request.job)
            # loss_of() itself defines what it is a mean over.
            self.prepared.weight = None
        return self.prepared

    def micro_batches(self, batch: Any) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a step; repeat in other sizes until all ranks succeed."""
        due = [loss for loss in self.get_prepared().losses if loss.phase.is_due(self.steps + 1)]
        outcomes: dict[str, StepOutcome] = {}
        try:
            for prepared in due:
                self._enter_loss(prepared)
                self._is_last_loss = prepared is due[-1]
                window, total = self._open_step(prepared, batch)
                self._save_state(prepared)
                if not prepared.gradients.is_rehearsed:
                    yield from self._rehearse(prepared, window)
                yield from self._attempts(prepared, window, total)
                assert self.outcome is not None  # noqa: S101 - set by _attempts()
                outcomes[prepared.phase.name] = self.outcome
                if self.outcome.skipped:
                    break
        finally:
            self._leave_losses()
        if self.has_several_losses:
            self.outcome = merge_outcomes(outcomes, self.get_prepared().phase.name)

    @property
    def has_several_losses(self) -> bool:
        """Whether the optimizers of the job have different losses, which a step computes in turn."""
        return len(self.get_prepared().losses) > 1

    def _enter_loss(self, prepared: prepare_module.PreparedRun) -> None:
        """Begin with one loss of a step: only its parameters get gradients, only its optimizers step."""
        self.prepared, self.outcome = prepared, None
        self._fault_after = max(1, prepared.gradients.max_arrivals // 3)
        if self._guards:
            places = {id(loss): place for place, loss in enumerate(prepared.losses)}
            self.split_guard = self._guards[places[id(prepared)]]
        due = (named.optimizer for named in prepared.phase.optimizers if named.is_due(self.steps + 1))
        prepared.updater.due = tuple(due)
        if isinstance(prepared.gradients, InBackwardGradients):
            prepared.gradients.due = prepared.updater.due
        prepared.phase.enter()

    def _leave_losses(self) -> None:
        """End a step: all parameters get gradients, and the first loss of every step is the current one."""
        losses = self.get_prepared().losses
        losses[0].phase.leave()
        self.prepared = next(loss for loss in losses if loss.phase.every == 1)

    def _attempts(
        self,
        prepared: prepare_module.PreparedRun,
        window: Window,
        total: Any,
        *,
        attempts: int = 0,
        bad: int = 0,
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of attempt after attempt, until one succeeds or the step is skipped."""
        while True:
            attempts += 1
            _check_attempts(window, attempts)
            self._start_attempt(prepared)
            micro_batches = self._make_micro_batches(prepared, window, total)
            failed_at = None
            if prepared.pipe is not None:
                # The schedule alternates forward and backward passes, so the caller cannot run them.
                failed_at = self._run_pipeline(prepared, prepared.pipe, micro_batches)
            elif self.cached_steps is not None:
                failed_at = self.cached_steps.run(prepared, micro_batches)
            else:
                for micro_batch in micro_batches:
                    yield micro_batch
                    if micro_batch.error is None and not micro_batch.done:
                        raise WrongUse(
                            "run.parts()", found="a part was not used", cure="Enter it: `with part:`."
                        )
                    if micro_batch.error is not None:
                        failed_at = micro_batch.number
                        break
            if failed_at is not None:
                repeats, failed_at = self._recover_attempt(prepared, window, micro_batches[failed_at])
                if repeats:
                    continue
            verdict, status = self._finish_attempt(prepared, window, failed_at, len(micro_batches))
            again = self._decide_retry(prepared, window, verdict, status, bad)
            if again is None:
                self._record_outcome(
                    prepared, window, status, verdict, attempts=attempts, passes=len(micro_batches)
                )
                return
            bad += again

    def _recover_attempt(
        self, prepared: prepare_module.PreparedRun, window: Window, micro_batch: MicroBatch
    ) -> tuple[bool, int | None]:
        """Recover from a failed micro-batch.

        Return whether this rank repeats the attempt alone, and the index of the micro-batch to report as
        failed; None if it is not repeated, because weights have been updated already.
        """
        if restarts_after_oom(self.setting.mesh) and self.world.size > 1:
            why, size = micro_batch.error or "", micro_batch.samples
            micro_batch.free()
            self.restart_smaller(prepared, window, why, size)
        interrupted = has_updated(prepared)
        self._recover(prepared, window, micro_batch)
        if interrupted:
            self._give_back(window, micro_batch)
            return False, None
        gradients = prepared.gradients
        # No other rank knows of the failure yet: they wait, and this rank tries again.
        alone = not gradients.sent_any and not gradients.equal_micro_batches and self.cached_steps is None
        return alone and self._fatal is None, micro_batch.number

    def _run_pipeline(
        self, prepared: prepare_module.PreparedRun, pipe: PipelineRunner, micro_batches: list[MicroBatch]
    ) -> int | None:
        """Run the micro-batches through this pipeline stage; return the index of a failed one, else None."""
        loss = prepared.loss
        if loss is None:
            raise WrongUse(
                "strategy pipeline",
                found="prepare() was given no loss, and the run no job",
                cure="Give prepare(loss=...): stages take turns with forward and backward passes.",
            )

        def forward(micro_batch: MicroBatch, stage: int) -> torch.Tensor:
            with micro_batch.computing():
                return pipe.relay.run(lambda: loss(prepared.model, micro_batch.batch), stage)

        def backward(micro_batch: MicroBatch, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            if gradient is None:
                self.backward(output, micro_batch.fraction)
            else:
                self._run_backward(output, gradient)

        pipe.gradients = prepared.gradients
        failure = pipe.run(micro_batches, forward, backward)
        if failure is None:
            return None
        micro_batches[failure.micro_batch].error = failure.why or _OTHER_STAGE_FAILED
        return failure.micro_batch

    # running one step ahead of the device

    def can_run_ahead(self) -> bool:
        """Return whether the next passes do not depend on the outcome of this step."""
        prepared = self.get_prepared()
        return (
            prepared.updater.skips_on_device
            and prepared.loss is not None
            and prepared.after_step is None
            and len(prepared.losses) == 1
            and all(named.every == 1 for named in prepared.phase.optimizers)
            and self.cached_steps is None
            and self.faults is None
            and self.scale.value == 1.0
            and prepared.gradients.is_rehearsed
            and not prepared.gradients.equal_micro_batches
            and prepared.buffers.needs_no_broadcast(self.world.size)
        )

    def run_passes(self, batch: Any) -> StepInFlight:
        """Run the passes of a window; retry in smaller micro-batches unless gradients have been sent."""
        prepared = self.get_prepared()
        window, total = self._open_step(prepared, batch)
        self._save_state(prepared)
        flight = StepInFlight(
            window=window,
            total=total,
            random=self._random,
            device_random=self._device_random,
            copies=prepared.buffers.copies,
        )
        while True:
            flight.attempts += 1
            _check_attempts(window, flight.attempts)
            self._start_attempt(prepared)
            micro_batches = self._make_micro_batches(prepared, window, total)
            flight.failed_at, flight.micro_batches = None, len(micro_batches)
            for micro_batch in micro_batches:
                with micro_batch:
                    micro_batch.backward(prepared.loss(prepared.model, micro_batch.batch))  # type: ignore[misc]
                if micro_batch.error is not None:
                    flight.failed_at = micro_batch.number
                    self._recover(prepared, window, micro_batch)
                    break
            if flight.failed_at is None or self._fatal is not None or prepared.gradients.sent_any:
                return flight

    def start_update(self, flight: StepInFlight) -> None:
        """Send the status and launch the update, without waiting for the outcome."""
        flight.limit = self.spike_limit
        self._send_status(self.get_prepared(), flight.window, flight.failed_at, flight.micro_batches)

    def finish_in_flight(self, flight: StepInFlight) -> bool:
        """Wait for the outcome of a step, and repeat a bad one; return whether the first attempt was good."""
        prepared, window = self.get_prepared(), flight.window
        next_state = self._window, self._weighed, self._random, self._device_random
        self._window, self._weighed = window, None
        status = self._exchange.wait()
        verdict = optimizer_step.judge_status(status, limit=flight.limit, scale=self.scale.value)
        if verdict.kind == optimizer_step.GOOD:
            self._record_outcome(
                prepared, window, status, verdict, attempts=flight.attempts, passes=flight.micro_batches
            )
            assert self.outcome is not None  # noqa: S101 - set by _record_outcome()
            self.outcome = msgspec.structs.replace(self.outcome, ended_s=self._exchange.ended_s)
            self._window, self._weighed, self._random, self._device_random = next_state
            return True
        self._random, self._device_random = flight.random, flight.device_random
        prepared.buffers.copies = flight.copies
        again = self._decide_retry(prepared, window, verdict, status, 0)
        if again is None:
            self._record_outcome(
                prepared, window, status, verdict, attempts=flight.attempts, passes=flight.micro_batches
            )
        else:
            for micro_batch in self._attempts(
                prepared, window, flight.total, attempts=flight.attempts, bad=again
            ):
                with micro_batch:
                    micro_batch.backward(prepared.loss(prepared.model, micro_batch.batch))  # type: ignore[misc]
        return False

    def _rehearse(self, prepared: prepare_module.PreparedRun, window: Window) -> Iterator[MicroBatch]:
        """Run two passes of one sample with zero weight, to record the sequence of collectives."""
        self._rehearsing = True
        self._start_attempt(prepared)
        if prepared.context is not None:
            prepared.context.start_attempt([1, 1])
        micro_batches = [
            MicroBatch(self, self._filler(prepared, window), samples=0, fraction=0.0, number=number, count=2)
            for number in range(2)
        ]
        if prepared.pipe is not None:
            self._run_pipeline(prepared, prepared.pipe, micro_batches)
            prepared.gradients.finish_attempt(None, 2)
            self._rehearsing = False
            return
        for micro_batch in micro_batches:
            if self.cached_steps is not None:
                self.cached_steps.rehearse(prepared, micro_batch)
            else:
                yield micro_batch
            if micro_batch.error is not None:
                raise NothingFits(
                    "the first pass of this run",
                    found=f"a single sample ran out of memory: {micro_batch.error}",
                    cure="Use more recomputation, more devices, or devices with more memory.",
                )
        prepared.gradients.finish_attempt(None, 2)
        if prepared.context is not None:
            prepared.context.finish_rehearsal(2)
        self._rehearsing = False

    def get_prepared(self) -> prepare_module.PreparedRun:
        """Return what prepare() made; raise WrongUse if it was not called."""
        if self.prepared is None:
            raise WrongUse(
                "Run", found="nothing is prepared", cure="Call run.prepare(model, optimizer) first."
            )
        return self.prepared

    def _open_step(self, prepared: prepare_module.PreparedRun, batch: Any) -> tuple[Window, Any]:
        """Return the window of this step, and the weight of the whole global batch."""
        own = not isinstance(batch, Window)
        window = wrap_batch(batch, step=self.steps) if own else batch
        if own and self.split_sequences is not None:
            window = window.split_sequences(self.split_sequences)
        self._window = window
        if self.split_guard is not None:
            self.split_guard.check_first_window(prepared, window)
        self._weighed, self._nothing_counts = None, False
        groups = self.groups
        unknown = own and groups.data_parallel > 1
        if prepared.weight is None and not unknown:
            return window, window.samples * groups.context_parallel
        self._weighed = self._split_window(prepared, window)
        if prepared.gradients.equal_micro_batches:
            if self._counting_sample is None:
                self._counting_sample = share_counting_sample(
                    self._find_counting_sample(prepared, window), groups
                )
            self._nothing_counts = self._counting_sample is None
        local = sum(weight for _, weight in self._weighed[1])
        if groups.is_data_alone:
            return window, local
        if isinstance(local, torch.Tensor):
            total = local.double().to(self.device).reshape(())
        else:
            # Filled on the device: a copy from the host would wait for the optimizer.
            total = torch.full((), float(local), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=groups.data_group)
        return window, total

    def _split_window(
        self, prepared: prepare_module.PreparedRun, window: Window
    ) -> tuple[int, list[tuple[Any, Any]]]:
        """Return the micro-batch size, and the window's micro-batches of that size with their weights.

        Micro-batches of zero weight are left out: a mean over nothing is NaN, even when multiplied by zero.
        """
        size, weigh = prepared.fitter.sizes.current, prepared.weight
        pieces = window.micro_batches(size)
        if weigh is None:
            return size, [(piece, piece.samples) for piece in pieces]
        weighed = [(piece, _weigh_batch(weigh, piece.batch)) for piece in pieces]
        if prepared.context is not None:
            # Another rank may have weight in the same sequences: all of their ranks run the same passes.
            return size, weighed
        return size, [(piece, weight) for piece, weight in weighed if _has_weight(weight)]

    def _save_state(self, prepared: prepare_module.PreparedRun) -> None:
        """Save the state that a retry starts from: random state and buffers."""
        self._random = torch.get_rng_state()
        cuda = self.device.type == "cuda"
        self._device_random = torch.cuda.get_rng_state(self.device) if cuda else None
        prepared.buffers.save()
        self._first = True
        self._single_failures = 0

    def _start_attempt(self, prepared: prepare_module.PreparedRun) -> None:
        if not self._first:
            torch.set_rng_state(self._random)
            if self._device_random is not None:
                torch.cuda.set_rng_state(self._device_random, self.device)
            prepared.buffers.restore()
        self._first = False
        if isinstance(prepared.gradients, InBackwardGradients) and self._window is not None:
            prepared.gradients.is_enabled = self._window.step not in self._held_steps
        prepared.gradients.start_attempt()
        self._loss: torch.Tensor | None = None

    def _make_micro_batches(
        self, prepared: prepare_module.PreparedRun, window: Window, total: Any
    ) -> list[MicroBatch]:
        """Return the micro-batches of this attempt, each with its fraction of the global batch's loss."""
        size = prepared.fitter.sizes.current
        if self._weighed is None or self._weighed[0] != size:
            self._weighed = self._split_window(prepared, window)
        weighed = self._weighed[1]
        count = len(weighed)
        if prepared.gradients.equal_micro_batches:
            count = self._count_most_micro_batches(window, size)
        if prepared.statistics is not None and prepared.weight is not None:
            # BatchNorm has no statistics in a pass without any sample of nonzero weight.
            count = int(
                optimizer_step.all_reduce_extreme(len(weighed), self.device, self.world.size, least=False)
            )
        micro_batches = [
            MicroBatch(
                self,
                piece.batch,
                samples=piece.samples,
                fraction=_loss_fraction(weight, total),
                number=number,
                count=count,
            )
            for number, (piece, weight) in enumerate(weighed)
        ]
        self._weight: Any = sum(weight for _, weight in weighed)
        filler = self._filler(prepared, window) if len(micro_batches) < count else None
        micro_batches += [
            MicroBatch(self, filler, samples=0, fraction=0.0, number=number, count=count)
            for number in range(len(micro_batches), count)
        ]
        prepared.regular = min(size, prepared.regular_share)
        if prepared.context is not None:
            prepared.context.start_attempt([micro_batch.samples or 1 for micro_batch in micro_batches])
        return micro_batches

    def _filler(self, prepared: prepare_module.PreparedRun, window: Window) -> Any:
        """Return a sample for passes that only take part in collectives.

        It has weight if possible: a mean over nothing is NaN, and so is zero times NaN.
        """
        sample = self._find_counting_sample(prepared, window)
        if sample is None:
            sample = self._counting_sample
        return window.filler() if sample is None else sample

    def _find_counting_sample(self, prepared: prepare_module.PreparedRun, window: Window) -> Any:
        """Return this rank's first sample with weight; None if there is none."""
        if self._weighed is not None and not self._weighed[1]:
            return None
        for start in range(window.size):
            sample = window.slice(start, start + 1).batch
            if prepared.weight is None or float(prepared.weight(sample)):
                return sample
        return None

    def _count_most_micro_batches(self, window: Window, size: int) -> int:
        """Return the number of micro-batches of the rank with the most samples; all ranks run as many."""
        # Ranks with shares of different sizes may have different micro-batches too.
        if not self.setting.shares and (window.indices or window.samples != window.size):
            bounds = rank_slice_bounds(window.samples, self.groups.data_parallel, [])
            largest = max(stop - start for start, stop in pairwise(bounds))
            return -(-largest // size)
        return int(
            optimizer_step.all_reduce_extreme(
                -(-window.size // size), self.device, self.world.size, least=False
            )
        )

    def begin_forward(self, micro_batch: MicroBatch) -> None:
        """Prepare the forward pass of a micro-batch."""
        prepared = self.get_prepared()
        if prepared.context is not None:
            prepared.context.calls = 0
        prepared.gradients.prepare_micro_batch(micro_batch.number, micro_batch.count)
        self.count_statistics(prepared, micro_batch)
        if prepared.compiling is not None and prepared.compiling.is_enabled:
            prepared.compiling.prepare_for(micro_batch.samples, prepared.regular)

    def count_statistics(self, prepared: prepare_module.PreparedRun, micro_batch: MicroBatch) -> None:
        """Let synchronised BatchNorm count a micro-batch only if it has samples."""
        if prepared.statistics is not None:
            prepared.statistics.is_counted = micro_batch.samples > 0 or self._rehearsing

    def inject_fault(self, point: str) -> Any:
        """Inject the fault that is scheduled for a point, if there is one."""
        if self.faults is None or self._window is None or self._rehearsing:
            return None
        return self.faults.at(point, self._window.step, self.world.rank)

    def on_gradient(self) -> None:
        """Called for every gradient; inject a fault when some gradients have been sent and others not."""
        self._arrived += 1
        if self._open and self._arrived >= self._fault_after:
            self.inject_fault("backward")

    def backward(self, loss: Any, fraction: Any) -> None:
        """Run the backward pass of a micro-batch whose loss is this fraction of the step's loss."""
        check_loss(loss)
        if (context := self.get_prepared().context) is not None:
            context.check_called()
        loss = gather_loss(loss)
        weighted = loss if isinstance(fraction, float) and fraction == 1.0 else loss * fraction
        if self.faults is not None and self.inject_fault("gradient") == "nan":
            weighted = weighted * float("nan")
        detached = weighted.detach()
        self._loss = detached.double() if self._loss is None else self._loss + detached
        if not self._may_update(self.get_prepared()):
            return
        if self.scale.value != 1.0:
            weighted = weighted * self.scale.value
        try:
            self._run_backward(weighted)
        except BaseException:
            # A custom loop may still refer to the loss, and through it to all saved activations.
            loss.detach_()
            raise

    def _may_update(self, prepared: prepare_module.PreparedRun) -> bool:
        """Return False if the backward pass would update weights, and the loss is bad."""
        if not isinstance(prepared.gradients, InBackwardGradients) or not prepared.gradients.will_update:
            return True
        assert self._loss is not None  # noqa: S101 - set by backward()
        loss = float(self._loss)
        return _is_finite(loss) and (self._limit is None or loss <= self._limit)

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """Run the backward pass of gradient caching, whose loss has been counted already."""
        if self.faults is not None and self.inject_fault("gradient") == "nan":
            surrogate = surrogate * float("nan")
        self._run_backward(surrogate if self.scale.value == 1.0 else surrogate * self.scale.value)

    def set_loss(self, loss: torch.Tensor) -> None:
        """Set this rank's contribution to the loss of the step."""
        self._loss = loss.double()

    def give_up(self, why: str) -> None:
        """End the run on all ranks with this cause: no smaller micro-batch helps."""
        self._fatal = why

    def _run_backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Run autograd; faults are injected only while it runs."""
        self._open, self._arrived = True, 0
        try:
            output.backward(gradient)
        finally:
            self._open = False

    def end_backward(self) -> None:
        """Finish the backward pass of a micro-batch."""
        prepared = self.get_prepared()
        if prepared.compiling is not None:
            prepared.compiling.mark_done()

    def describe_recoverable(self, error: BaseException) -> str | None:
        """Describe an error that the step recovers from; return None for any other."""
        prepared = self.get_prepared()
        if is_out_of_memory(error):
            return f"out of memory: {_first_line(error)}"
        if not isinstance(error, Exception):
            return None
        if prepared.compiling is not None and prepared.compiling.handle_error(error):
            return _COMPILER_FAILED
        return None

    def _recover(self, prepared: prepare_module.PreparedRun, window: Window, micro_batch: MicroBatch) -> None:
        """Free memory and choose a smaller micro-batch; set `_fatal` if there is none."""
        self._loss = None
        why = micro_batch.error or ""
        micro_batch.free()
        prepared.gradients.discard_micro_batch()
        prepared.fitter.release()
        if why in (_COMPILER_FAILED, _OTHER_STAGE_FAILED):
            return
        unsplittable = (
            ""
            if self.split_guard is None or micro_batch.count > 1
            else self.split_guard.why_not_splittable(prepared, window)
        )
        if unsplittable:
            self._fatal = (
                f"the batch of {window.size} samples ran out of memory and cannot be cut: {unsplittable}; "
                f"{why}"
            )
            return
        size = max(micro_batch.samples, 1)
        change = prepared.fitter.shrink_after_oom(size=size, share=max(window.size, 1), step=self.steps)
        if change is not None:
            self._report(
                IncidentKind.OUT_OF_MEMORY, why, change.why + self._describe_batch_norm(prepared, change)
            )
            return
        self._single_failures += 1
        memory = prepared.fitter.measure_budget().describe()
        if self._single_failures > SINGLE_SAMPLE_RETRIES:
            self._fatal = (
                f"one sample at once ran out of memory {self._single_failures} times ({memory}); {why}"
            )
            return
        again = f"memory was given back, and one sample is tried again; {memory}"
        self._report(IncidentKind.OUT_OF_MEMORY, why, again)

    def restart_smaller(
        self, prepared: prepare_module.PreparedRun, window: Window, why: str, size: int
    ) -> NoReturn:
        """Leave the run with a smaller micro-batch: other ranks wait for this one in the middle of a pass."""
        prepared.fitter.release()
        change = prepared.fitter.shrink_after_oom(
            size=max(size, 1), share=max(window.size, 1), step=self.steps
        )
        if change is None:
            raise NothingFits(
                f"optimizer step {window.step} on {self.world.size} processes",
                found=f"one sample at once ran out of memory; {why}",
                cure="Use a larger tp, cp or pp, more recomputation, or devices with more memory.",
            )
        raise RestartWithSmaller(why, change.sizes.current)

    def _give_back(self, window: Window, micro_batch: MicroBatch) -> None:
        """Undo a step that failed after some of its weights were updated: go back to a checkpoint."""
        self.rollback = self.keeps_sizes = True
        done = "some weights had been updated in the backward pass; the run goes back to the last checkpoint"
        self._report(IncidentKind.OUT_OF_MEMORY, micro_batch.error or "", done)
        if micro_batch.samples > 1:
            return
        times = self._interruptions[window.step] = self._interruptions.get(window.step, 0) + 1
        if times > SINGLE_SAMPLE_RETRIES:
            self._fatal = f"one sample at once ran out of memory {times} times; {micro_batch.error}"

    def _finish_attempt(
        self, prepared: prepare_module.PreparedRun, window: Window, failed_at: int | None, count: int
    ) -> tuple[optimizer_step.StepVerdict, StepStatus]:
        """Exchange the status over ranks, and update the weights if all ranks succeeded."""
        self._send_status(prepared, window, failed_at, count)
        status = self._exchange.wait()
        scale = self.scale.value
        verdict = optimizer_step.judge_status(status, limit=self._limit, scale=scale)
        updater = prepared.updater
        if verdict.kind == optimizer_step.NOT_FINITE and has_updated(prepared):
            return self._undo_bad_update(window, verdict), status
        is_open = not updater.skips_on_device and not has_updated(prepared)
        if verdict.kind == optimizer_step.GOOD and is_open:
            norm = status.squares**0.5 / scale
            gradients = prepared.gradients.local_gradients()
            self._run_optimizer(
                prepared, lambda: updater.apply(gradients, norm, scale, prepared.fitter.release)
            )
        return verdict, status

    def _undo_bad_update(
        self, window: Window, verdict: optimizer_step.StepVerdict
    ) -> optimizer_step.StepVerdict:
        """Go back to a checkpoint after bad gradients have updated weights; then hold that step's updates."""
        self._held_steps.add(window.step)
        self._report(
            IncidentKind.NOT_A_NUMBER,
            f"{verdict.why}; weights had been updated in the backward pass",
            "the run goes back to the last checkpoint; when this step comes again, its updates wait until "
            "all gradients are known",
        )
        return optimizer_step.StepVerdict(optimizer_step.ROLLBACK, verdict.why)

    @property
    def _limit(self) -> float | None:
        """The spike limit; None with several losses, whose history it does not know."""
        return None if self.has_several_losses else self.spike_limit

    def _send_status(
        self, prepared: prepare_module.PreparedRun, window: Window, failed_at: int | None, count: int
    ) -> None:
        """Send the status to all ranks; launch the update if the device can skip it."""
        gradients, failed = prepared.gradients, failed_at is not None
        gradients.finish_attempt(failed_at, count)
        if self._nothing_counts:
            # The passes only took part in collectives: discard their gradients.
            for gradient in gradients.local_gradients():
                gradient.zero_()
            self._loss = None
        scale = self.scale.value
        counts = self.groups.counts_samples
        # Samples count once; tokens are counted by every rank that has a part of the sequences.
        weighs = counts if prepared.weight is None else self.groups.counts_weight
        weight = self._weight if weighs else 0.0
        own_status = StepStatus(
            failed=float(failed),
            fatal=float(self._fatal is not None),
            weight=0.0 if isinstance(weight, torch.Tensor) else float(weight),
            samples=float(window.size) if counts else 0.0,
            asked=float(self.asked),
            rollback=float(self.rollback),
            strays=float(prepared.buffers.count_unexpected()),
            resize=float(self._proposed is not None),
        )
        squares = None if failed else gradients.squared_norm()
        loss = self._loss if self.groups.reports_loss else None
        self._exchange.send(own_status, loss=loss, squares=squares, weight=weight)
        updater = prepared.updater
        if updater.skips_on_device and not failed:
            bad_flag = self._exchange.bad_flag(self._limit)
            divisor = self._exchange.divisor(updater.clip, scale)
            self._run_optimizer(prepared, lambda: updater.launch(bad_flag, divisor, prepared.fitter.release))

    def _run_optimizer(self, prepared: prepare_module.PreparedRun, act: Callable[[], None]) -> None:
        if self.faults is not None:
            prepared.updater.before = lambda: self.inject_fault("optimizer")
        try:
            act()
        except OptimizerInterrupted as error:
            self.rollback = True
            self._report(
                IncidentKind.OUT_OF_MEMORY,
                f"the optimizer step ran out of memory halfway: {_first_line(error)}",
                "all ranks go back to the last checkpoint at the next step",
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NothingFits(
                "the optimizer step",
                found=f"it ran out of memory again and again: {_first_line(error)}",
                cure="Use a sharded strategy, an optimizer with less state, or devices with more memory.",
            ) from error

    def _decide_retry(
        self,
        prepared: prepare_module.PreparedRun,
        window: Window,
        verdict: optimizer_step.StepVerdict,
        status: StepStatus,
        bad: int,
    ) -> int | None:
        """Return None if the step is finished, else 0 or 1 to add to the count of bad attempts."""
        if verdict.kind == optimizer_step.FATAL:
            raise NothingFits(
                f"optimizer step {window.step} on {self.world.size} processes",
                found=self._fatal or "another rank has no memory left for a single sample",
                cure="Use more recomputation, a sharded strategy, or devices with more memory.",
            )
        if verdict.kind == optimizer_step.REPLAY:
            self._agree_on_size(prepared)
            return 0
        if verdict.kind == optimizer_step.NOT_FINITE and self.scale.can_shrink and _is_finite(status.loss):
            self.scale = self.scale.after_overflow()
            return 0
        if verdict.kind in (optimizer_step.NOT_FINITE, optimizer_step.SPIKE) and not bad:
            if self.world.is_main:
                kind = (
                    IncidentKind.LOSS_SPIKE
                    if verdict.kind == optimizer_step.SPIKE
                    else IncidentKind.NOT_A_NUMBER
                )
                self._report(kind, verdict.why, "the same samples are tried once more")
            return 1
        return None

    def _agree_on_size(self, prepared: prepare_module.PreparedRun) -> None:
        """Use the smallest micro-batch of any rank, if ranks must run equally many."""
        if not prepared.gradients.equal_micro_batches:
            return
        fitter = prepared.fitter
        least = int(
            optimizer_step.all_reduce_extreme(fitter.sizes.current, self.device, self.world.size, least=True)
        )
        if least != fitter.sizes.current:
            sizes = fitter.sizes.replace(current=least, changed_at=self.steps)
            fitter.apply(SizeChange(sizes=sizes, why="another rank has less room"))

    def _record_outcome(  # noqa: PLR0913 - the results of the step
        self,
        prepared: prepare_module.PreparedRun,
        window: Window,
        status: StepStatus,
        verdict: optimizer_step.StepVerdict,
        *,
        attempts: int,
        passes: int,
    ) -> None:
        """Finish a good or skipped step, and set its outcome."""
        norm = status.squares**0.5 / self.scale.value
        if status.strays:
            prepared.buffers.agree_on_changed(self.device)
        good = verdict.kind == optimizer_step.GOOD
        if good:
            prepared.buffers.broadcast_changed()
            self.scale = self.scale.after_update()
            for named in prepared.phase.optimizers:
                if named.name in prepared.schedules and named.is_due(self.steps + 1):
                    prepared.schedules[named.name].step()
            if prepared.after_step is not None and self._is_last_loss:
                run_after_step(prepared.after_step, prepared.model)
        else:
            prepared.buffers.restore()
            self.rollback = self.rollback and verdict.kind != optimizer_step.ROLLBACK
            # This sample may be the one that gives NaN: the next step chooses another.
            self._counting_sample = None
        if self._is_last_loss or not good:
            self.steps += 1
            self._adjust_size(prepared, window, status)
        samples = int(status.samples)
        self.outcome = StepOutcome(
            step=window.step,
            epoch=window.epoch,
            loss=status.loss,
            weight=status.weight,
            samples=samples,
            grad_norm=norm,
            skipped="" if good else verdict.why,
            attempts=attempts,
            parts=passes,
            micro_batch=prepared.fitter.sizes.current,
            rollback_needed=verdict.kind == optimizer_step.ROLLBACK,
            asked=status.asked,
        )

    def _adjust_size(self, prepared: prepare_module.PreparedRun, window: Window, status: StepStatus) -> None:
        """Change the micro-batch between steps, if memory or time per sample suggest it."""
        fitter = prepared.fitter
        if status.resize:
            # All ranks know of the proposal: ranks that must be equal take the smallest proposed size.
            proposed = self._proposed.sizes.current if self._proposed is not None else fitter.sizes.current
            least = int(optimizer_step.all_reduce_extreme(proposed, self.device, self.world.size, least=True))
            why = self._proposed.why if self._proposed is not None else "another rank has less room"
            self._proposed = None
            if least != fitter.sizes.current:
                sizes = fitter.sizes.replace(current=least, changed_at=self.steps)
                self._change_size(prepared, SizeChange(sizes=sizes, why=why))
            return
        change = fitter.after_step(share=window.size, step=self.steps)
        if change is None:
            return
        if prepared.gradients.equal_micro_batches:
            self._proposed = change
        else:
            self._change_size(prepared, change)

    def _change_size(self, prepared: prepare_module.PreparedRun, change: SizeChange) -> None:
        before = prepared.fitter.sizes.current
        prepared.fitter.apply(change)
        note = self._describe_batch_norm(prepared, change)
        done = f"from {before} to {change.sizes.current} samples at once{note}"
        self._report(IncidentKind.MICRO_BATCH, change.why, done)

    def _describe_batch_norm(self, prepared: prepare_module.PreparedRun, change: SizeChange) -> str:
        """Describe the effect on BatchNorm, which sees only one micro-batch; empty without BatchNorm."""
        if not any(module.training for module in find_batch_norms(prepared.model)):
            return ""
        sees = change.sizes.current * (1 if prepared.statistics is None else self.groups.data_parallel)
        return f"; BatchNorm computes its statistics over {sees} samples from now on"

    def report_compile(self, why: str, done: str) -> None:
        """Report an event of the compiler."""
        self._report(IncidentKind.COMPILE, why, done)

    def _report(self, kind: IncidentKind, why: str, done: str) -> None:
        if self._listen is not None:
            step = self._window.step if self._window is not None else self.steps
            self._listen(
                Incident(kind=kind, at_s=time.time(), step=step, rank=self.world.rank, why=why, done=done)
            )


def has_updated(prepared: prepare_module.PreparedRun) -> bool:
    """Return whether the backward pass of this attempt has begun to update weights."""
    return isinstance(prepared.gradients, InBackwardGradients) and prepared.gradients.has_begun


def merge_outcomes(outcomes: dict[str, StepOutcome], main: str) -> StepOutcome:
    """Return the outcome of a step from those of its losses, by the name of their optimizers.

    Its loss is that of `main`, or of the last one if that was skipped.
    """
    *before, last = outcomes
    outcome = outcomes[last if outcomes[last].skipped else main]
    skipped = outcome.skipped
    if skipped:
        updated = f" ({' and '.join(before)} had been updated before)" if before else ""
        skipped = f"{last}: {skipped}{updated}"
    return msgspec.structs.replace(
        outcome,
        skipped=skipped,
        attempts=max(each.attempts for each in outcomes.values()),
        parts=sum(each.parts for each in outcomes.values()),
        micro_batch=outcomes[last].micro_batch,
        asked=outcomes[last].asked,
        losses={name: each.loss for name, each in outcomes.items()},
    )


@torch.no_grad()
def run_after_step(after_step: Callable[[Any], Any], model: Any) -> None:
    """Call the job's after_step() on the model; all ranks do, after every update."""
    try:
        after_step(model)
    except Exception as error:
        cure = "Fix after_step(model): it runs on every rank, without gradients, after every update."
        raise job_error("after_step()", error, cure) from error


def share_counting_sample(mine: Any, groups: RankGroups) -> Any:
    """Return this rank's sample with weight, or else that of the first data-parallel rank that has one.

    Return None if no rank has one. All ranks of the data group call it.
    """
    mine = None if mine is None else copy_batch(mine)
    if groups.is_data_alone:
        return mine
    having: list[Any] = [None] * groups.data_ranks
    dist.all_gather_object(having, mine is not None, group=groups.data_group)
    if all(having) or not any(having):
        return mine
    shared = [mine]
    dist.broadcast_object_list(shared, group_src=having.index(True), group=groups.data_group)
    return shared[0] if mine is None else mine


def _check_attempts(window: Window, attempts: int) -> None:
    if attempts > MAX_ATTEMPTS:
        raise NothingFits(
            f"optimizer step {window.step}",
            found=f"it failed {MAX_ATTEMPTS} times",
            cure="Look at the events before this one.",
        )


def _weigh_batch(weight: Callable[[Any], Any], batch: Any) -> Any:
    value = weight(batch)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return float(value)
    return value


def _has_weight(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) or bool(weight)


def _loss_fraction(weight: Any, total: Any) -> Any:
    if isinstance(total, torch.Tensor):
        return weight / total.clamp(min=1e-30)
    return weight / total if total else 0.0


def _is_finite(value: float) -> bool:
    return value - value == 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0][:200] or type(error).__name__
