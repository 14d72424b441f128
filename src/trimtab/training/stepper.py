"""Carries a step through: parts, attempts, what ranks say to each other, and what is done about it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from trimtab.engine.additive_loss import find_batch_norms
from trimtab.engine.precision import autocast_dtype
from trimtab.engine.step import check_loss
from trimtab.errors import NothingFits, WrongUse
from trimtab.jobs.job import is_cached
from trimtab.spec import Incident, IncidentKind
from trimtab.training import optimizer_step
from trimtab.training import prepare as prepare_module
from trimtab.training.loading import Window, copy_batch, rank_slice_bounds, wrap_batch
from trimtab.training.micro_batches import CachedSteps, MicroBatch, SplitGuard, StepOutcome
from trimtab.training.oom_recovery import SizeChange, is_out_of_memory
from trimtab.training.optimizer_step import LossScale, OptimizerInterrupted, StepStatus, initial_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Setting
    from trimtab.training.pipeline import PipelineRunner
    from trimtab.training.process_group import RankGroups, World

    Faults = Any
    """What is asked at "forward", "backward", "gradient" and "optimizer": at(point, step, rank)."""

MAX_ATTEMPTS = 40
"""Of one step; more means that something else than memory or numbers is wrong."""
_COMPILER_FAILED = "the compiler failed"
_OTHER_STAGE_FAILED = "another stage failed"
SINGLE_SAMPLE_RETRIES = 3
"""How often one sample is tried again: others may have had the memory for a moment."""


@dataclass(kw_only=True)
class StepInFlight:
    """A step whose outcome is not known yet, and what repeating it would begin with."""

    window: Window
    total: Any
    """Weight of the whole global batch."""
    random: torch.Tensor
    device_random: torch.Tensor | None
    copies: dict[int, torch.Tensor]
    """Buffers before the step."""
    attempts: int = 0
    parts: int = 0
    failed_at: int | None = None
    limit: float | None = None
    """The spike limit that the device has judged by."""


class Stepper:
    """The steps of one process; Run is its face."""

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
        self.outcome: StepOutcome | None = None
        self._listen = listen
        self._exchange = optimizer_step.StatusExchange(self.device, world.size)
        self._proposed: SizeChange | None = None
        self._fatal: str | None = None
        self._window: Window | None = None
        self._open = self._rehearsing = False
        self._arrived = 0
        self._strikes_at = 1
        self._random = torch.empty(0)
        self._device_random: torch.Tensor | None = None
        self._pieces: tuple[int, list[tuple[Any, Any]]] | None = None
        self._sample: Any = None
        """One that counted, of whichever rank: what a rank whose share counts for nothing runs along with."""
        self._void = False
        """Whether no sample that counts was met yet, on any rank."""
        self.caching: CachedSteps | None = None
        """How a job that gives embed() and loss_of() computes a step."""
        self.divisible: SplitGuard | None = None
        """Whether the batch may be cut; None where gradient caching does it."""

    def prepare(self, wanted: prepare_module.PrepareRequest) -> prepare_module.PreparedRun:
        """Make everything ready for the first step."""
        is_cutting = wanted.loss is None and is_cached(wanted.job)
        if not is_cutting:
            self.divisible = SplitGuard(self, wanted.job)
            self.divisible.check_statement()
        mid_backward = self.mid_backward if self.faults is not None else None
        self.prepared = prepare_module.prepare(wanted, self.say_compile, mid_backward)
        self._strikes_at = max(1, self.prepared.wiring.arrivals // 3)
        if is_cutting:
            self.caching = CachedSteps(self, wanted.job)
            # loss_of() itself says what it is a mean over.
            self.prepared.weight = None
        return self.prepared

    def parts(self, batch: Any) -> Iterator[MicroBatch]:
        """The parts of a step, again and in other sizes until all ranks have succeeded; update() follows."""
        ready = self.ready()
        self.outcome = None
        window, total = self._opened(ready, batch)
        self._remember(ready)
        if not ready.wiring.rehearsed:
            yield from self._rehearsal(ready, window)
        yield from self._attempts(ready, window, total)

    def _attempts(
        self,
        ready: prepare_module.PreparedRun,
        window: Window,
        total: Any,
        *,
        attempts: int = 0,
        bad: int = 0,
    ) -> Iterator[MicroBatch]:
        """One attempt after the other, until one stands or is skipped."""
        while True:
            attempts += 1
            _check_attempts(window, attempts)
            self._start_over(ready)
            parts = self._split(ready, window, total)
            failed_at = None
            if ready.pipe is not None:
                # Forward and backward of the parts take turns: nobody else can say when.
                failed_at = self._piped(ready, ready.pipe, parts)
            elif self.caching is not None:
                failed_at = self.caching.run(ready, parts)
            else:
                for part in parts:
                    yield part
                    if part.error is None and not part.done:
                        raise WrongUse(
                            "run.parts()", found="a part was not used", cure="Enter it: `with part:`."
                        )
                    if part.error is not None:
                        failed_at = part.number
                        break
            if failed_at is not None:
                self._recover(ready, window, parts[failed_at])
                alone = not ready.wiring.sent_any and not ready.wiring.equal_parts and self.caching is None
                if self._fatal is None and alone:
                    # Nobody has heard of it: the others wait, and this rank tries again.
                    continue
            verdict, heard = self._close(ready, window, failed_at, len(parts))
            again = self._answer(ready, window, verdict, heard, bad)
            if again is None:
                self._end(ready, window, heard, verdict, attempts=attempts, parts=len(parts))
                return
            bad += again

    def _piped(
        self, ready: prepare_module.PreparedRun, pipe: PipelineRunner, parts: list[MicroBatch]
    ) -> int | None:
        """The parts of an attempt through this stage of a pipeline; the part that failed, if one did."""
        loss = ready.loss
        if loss is None:
            raise WrongUse(
                "strategy pipeline",
                found="prepare() was given no loss, and the run no job",
                cure="Give prepare(loss=...): stages take turns with forward and backward passes.",
            )

        def forward(part: MicroBatch) -> torch.Tensor:
            with part.computing():
                return pipe.relay.run(lambda: loss(ready.model, part.batch))

        def backward(part: MicroBatch, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            ready.wiring.before(part.number, part.count)
            if gradient is None:
                self.backward(output, part.share)
            else:
                self._engine(output, gradient)

        failure = pipe.run(parts, forward, backward)
        if failure is None:
            return None
        parts[failure.part].error = failure.why or _OTHER_STAGE_FAILED
        return failure.part

    # a step ahead

    def flies(self) -> bool:
        """Whether nothing of the next passes depends on the outcome of this step."""
        ready = self.ready()
        return (
            ready.updater.on_device
            and ready.loss is not None
            and self.caching is None
            and self.faults is None
            and self.scale.value == 1.0
            and ready.wiring.rehearsed
            and not ready.wiring.equal_parts
            and ready.buffers.is_settled(self.world.size)
        )

    def passes(self, batch: Any) -> StepInFlight:
        """Forward and backward over a window, again in smaller parts while nobody else has heard of it."""
        ready = self.ready()
        window, total = self._opened(ready, batch)
        self._remember(ready)
        flight = StepInFlight(
            window=window,
            total=total,
            random=self._random,
            device_random=self._device_random,
            copies=ready.buffers.copies,
        )
        while True:
            flight.attempts += 1
            _check_attempts(window, flight.attempts)
            self._start_over(ready)
            parts = self._split(ready, window, total)
            flight.failed_at, flight.parts = None, len(parts)
            for part in parts:
                with part:
                    part.backward(ready.loss(ready.model, part.batch))  # type: ignore[misc]  # flies() looked
                if part.error is not None:
                    flight.failed_at = part.number
                    self._recover(ready, window, part)
                    break
            if flight.failed_at is None or self._fatal is not None or ready.wiring.sent_any:
                return flight

    def take_off(self, flight: StepInFlight) -> None:
        """Tell the others, and start the update; the outcome is asked for later."""
        flight.limit = self.spike_limit
        self._send(self.ready(), flight.window, flight.failed_at, flight.parts)

    def landed(self, flight: StepInFlight) -> bool:
        """Wait for the outcome of a step, and repeat it where it is bad; whether it was good at once."""
        ready, window = self.ready(), flight.window
        later = self._window, self._pieces, self._random, self._device_random
        self._window, self._pieces = window, None
        heard = self._exchange.wait()
        verdict = optimizer_step.judge_status(heard, limit=flight.limit, scale=self.scale.value)
        if verdict.kind == optimizer_step.GOOD:
            self._end(ready, window, heard, verdict, attempts=flight.attempts, parts=flight.parts)
            assert self.outcome is not None  # noqa: S101 - it has just been made
            self.outcome = msgspec.structs.replace(self.outcome, ended_s=self._exchange.ended_s)
            self._window, self._pieces, self._random, self._device_random = later
            return True
        self._random, self._device_random = flight.random, flight.device_random
        ready.buffers.copies = flight.copies
        again = self._answer(ready, window, verdict, heard, 0)
        if again is None:
            self._end(ready, window, heard, verdict, attempts=flight.attempts, parts=flight.parts)
        else:
            for part in self._attempts(ready, window, flight.total, attempts=flight.attempts, bad=again):
                with part:
                    part.backward(ready.loss(ready.model, part.batch))  # type: ignore[misc]  # as above
        return False

    def _rehearsal(self, ready: prepare_module.PreparedRun, window: Window) -> Iterator[MicroBatch]:
        """Passes of one sample that count for nothing: they show what ranks say to each other in a pass."""
        self._rehearsing = True
        self._start_over(ready)
        for number in range(2):
            part = MicroBatch(self, self._filler(ready, window), samples=0, share=0.0, number=number, count=2)
            if self.caching is not None:
                self.caching.rehearse(ready, part)
            else:
                yield part
            if part.error is not None:
                raise NothingFits(
                    "the first pass of this run",
                    found=f"a single sample ran out of memory: {part.error}",
                    cure="Use more recomputation, more devices, or devices with more memory.",
                )
        ready.wiring.finish(None, 2)
        self._rehearsing = False

    def ready(self) -> prepare_module.PreparedRun:
        """What prepare() made; an error where it was not called."""
        if self.prepared is None:
            raise WrongUse(
                "Run", found="nothing is prepared", cure="Call run.prepare(model, optimizer) first."
            )
        return self.prepared

    def _opened(self, ready: prepare_module.PreparedRun, batch: Any) -> tuple[Window, Any]:
        """The window of this step, and the weight of the whole global batch."""
        own = not isinstance(batch, Window)
        window = wrap_batch(batch, step=self.steps) if own else batch
        self._window = window
        if self.divisible is not None:
            self.divisible.check_first(ready, window)
        self._pieces, self._void = None, False
        groups = self.groups
        unknown = own and groups.data_parallel > 1
        if ready.weight is None and not unknown:
            return window, window.samples
        self._pieces = self._cut(ready, window)
        if ready.wiring.equal_parts:
            if self._sample is None:
                self._sample = share_counting_sample(self._counting(ready, window), groups)
            self._void = self._sample is None
        local = sum(weight for _, weight in self._pieces[1])
        if groups.data_alone:
            return window, local
        if isinstance(local, torch.Tensor):
            whole = local.double().to(self.device).reshape(())
        else:
            # Filled on the device: a copy from here would wait for the optimizer.
            whole = torch.full((), float(local), dtype=torch.float64, device=self.device)
        dist.all_reduce(whole, group=groups.data_group)
        return window, whole

    def _cut(self, ready: prepare_module.PreparedRun, window: Window) -> tuple[int, list[tuple[Any, Any]]]:
        """The window in parts of the micro-batch, each with its weight.

        Parts that count for nothing are left out: a mean over nothing is not a number, whatever it counts.
        """
        size, weigh = ready.fitting.sizes.current, ready.weight
        pieces = window.parts(size)
        if weigh is None:
            return size, [(piece, piece.samples) for piece in pieces]
        weighed = [(piece, _weigh_batch(weigh, piece.batch)) for piece in pieces]
        return size, [(one, weight) for one, weight in weighed if _has_weight(weight)]

    def _remember(self, ready: prepare_module.PreparedRun) -> None:
        """What a repetition begins with again: random numbers and buffers."""
        self._random = torch.get_rng_state()
        cuda = self.device.type == "cuda"
        self._device_random = torch.cuda.get_rng_state(self.device) if cuda else None
        ready.buffers.begin()
        self._first = True
        self._lone_failures = 0

    def _start_over(self, ready: prepare_module.PreparedRun) -> None:
        if not self._first:
            torch.set_rng_state(self._random)
            if self._device_random is not None:
                torch.cuda.set_rng_state(self._device_random, self.device)
            ready.buffers.back()
        self._first = False
        ready.wiring.begin()
        self._loss: torch.Tensor | None = None

    def _split(self, ready: prepare_module.PreparedRun, window: Window, total: Any) -> list[MicroBatch]:
        """The parts of this attempt, with the share of each in the loss of the whole global batch."""
        size = ready.fitting.sizes.current
        if self._pieces is None or self._pieces[0] != size:
            self._pieces = self._cut(ready, window)
        kept = self._pieces[1]
        count = len(kept)
        if ready.wiring.equal_parts:
            count = self._most_parts(window, size)
        if ready.statistics is not None and ready.weight is not None:
            # BatchNorm has no statistics in a pass in which no sample of any rank counts.
            count = int(
                optimizer_step.all_reduce_extreme(len(kept), self.device, self.world.size, least=False)
            )
        parts = [
            MicroBatch(
                self,
                one.batch,
                samples=one.samples,
                share=_loss_fraction(weight, total),
                number=number,
                count=count,
            )
            for number, (one, weight) in enumerate(kept)
        ]
        self._weight: Any = sum(weight for _, weight in kept)
        filler = self._filler(ready, window) if len(parts) < count else None
        parts += [
            MicroBatch(self, filler, samples=0, share=0.0, number=number, count=count)
            for number in range(len(parts), count)
        ]
        ready.regular = min(size, ready.regular_share)
        return parts

    def _filler(self, ready: prepare_module.PreparedRun, window: Window) -> Any:
        """One sample to keep the others company with.

        One that counts: what a mean over nothing comes to is not a number, and neither is nought times it.
        """
        found = self._counting(ready, window)
        if found is None:
            found = self._sample
        return window.filler() if found is None else found

    def _counting(self, ready: prepare_module.PreparedRun, window: Window) -> Any:
        """The first sample of this rank that counts; None where there is none."""
        if self._pieces is not None and not self._pieces[1]:
            return None
        for start in range(window.size):
            found = window.part(start, start + 1).batch
            if ready.weight is None or float(ready.weight(found)):
                return found
        return None

    def _most_parts(self, window: Window, size: int) -> int:
        """How many parts the rank with the largest share has; all have to run as many."""
        # Ranks with shares of different sizes may have different micro-batches too.
        if not self.setting.shares and (window.indices or window.samples != window.size):
            places = rank_slice_bounds(window.samples, self.groups.data_parallel, [])
            largest = max(stop - start for start, stop in pairwise(places))
            return -(-largest // size)
        return int(
            optimizer_step.all_reduce_extreme(
                -(-window.size // size), self.device, self.world.size, least=False
            )
        )

    def enter(self, part: MicroBatch) -> None:
        """Before the forward pass of a part."""
        ready = self.ready()
        ready.wiring.before(part.number, part.count)
        self.count_statistics(ready, part)
        if ready.compiling is not None and ready.compiling.on:
            ready.compiling.use(part.samples, ready.regular)

    def count_statistics(self, ready: prepare_module.PreparedRun, part: MicroBatch) -> None:
        """Let BatchNorm's statistics over all ranks see the samples of a part only where they count."""
        if ready.statistics is not None:
            ready.statistics.counts = part.samples > 0 or self._rehearsing

    def at(self, point: str) -> Any:
        """A drill, where one is on."""
        if self.faults is None or self._window is None or self._rehearsing:
            return None
        return self.faults.at(point, self._window.step, self.world.rank)

    def mid_backward(self) -> None:
        """Called as gradients come; a drill strikes when some have been sent and others not."""
        self._arrived += 1
        if self._open and self._arrived >= self._strikes_at:
            self.at("backward")

    def backward(self, loss: Any, share: Any) -> None:
        """The backward pass of a part whose loss has that share in the loss of the step."""
        check_loss(loss)
        weighted = loss if isinstance(share, float) and share == 1.0 else loss * share
        if self.faults is not None and self.at("gradient") == "nan":
            weighted = weighted * float("nan")
        told = weighted.detach()
        self._loss = told.double() if self._loss is None else self._loss + told
        if self.scale.value != 1.0:
            weighted = weighted * self.scale.value
        try:
            self._engine(weighted)
        except BaseException:
            # A loop of one's own may still hold the loss, and by it all that the pass has kept.
            loss.detach_()
            raise

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """The backward pass of a part whose loss counts already: gradient caching computes it first."""
        if self.faults is not None and self.at("gradient") == "nan":
            surrogate = surrogate * float("nan")
        self._engine(surrogate if self.scale.value == 1.0 else surrogate * self.scale.value)

    def counts(self, loss: torch.Tensor) -> None:
        """Take a loss as this rank's part in the loss of the step."""
        self._loss = loss.double()

    def gives_up(self, why: str) -> None:
        """No smaller micro-batch helps: all ranks hear it, and the run ends with that cause."""
        self._fatal = why

    def _engine(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Autograd's own pass; drills strike while it runs."""
        self._open, self._arrived = True, 0
        try:
            output.backward(gradient)
        finally:
            self._open = False

    def left(self) -> None:
        """After the backward pass of a part."""
        ready = self.ready()
        if ready.compiling is not None:
            ready.compiling.done()

    def swallows(self, error: BaseException) -> str | None:
        """What to say of an error that the step recovers from; None for one that it does not."""
        ready = self.ready()
        if is_out_of_memory(error):
            return f"out of memory: {_first_line(error)}"
        if not isinstance(error, Exception):
            return None
        if ready.compiling is not None and ready.compiling.gives_up(error):
            return _COMPILER_FAILED
        return None

    def _recover(self, ready: prepare_module.PreparedRun, window: Window, part: MicroBatch) -> None:
        """Give memory back and choose smaller parts; notes where there is nothing smaller."""
        self._loss = None
        why = part.error or ""
        part.let_go()
        ready.wiring.abandon()
        ready.fitting.release()
        if why in (_COMPILER_FAILED, _OTHER_STAGE_FAILED):
            return
        whole = "" if self.divisible is None or part.count > 1 else self.divisible.why_whole(ready, window)
        if whole:
            self._fatal = (
                f"the batch of {window.size} samples ran out of memory and cannot be cut: {whole}; {why}"
            )
            return
        size = max(part.samples, 1)
        move = ready.fitting.failed(size=size, share=max(window.size, 1), step=self.steps)
        if move is not None:
            self._tell(IncidentKind.OUT_OF_MEMORY, why, move.why + self._seen_by_norms(ready, move))
            return
        self._lone_failures += 1
        known = ready.fitting.room().said()
        if self._lone_failures > SINGLE_SAMPLE_RETRIES:
            self._fatal = f"one sample at once ran out of memory {self._lone_failures} times ({known}); {why}"
            return
        again = f"memory was given back, and one sample is tried again; {known}"
        self._tell(IncidentKind.OUT_OF_MEMORY, why, again)

    def _close(
        self, ready: prepare_module.PreparedRun, window: Window, failed_at: int | None, count: int
    ) -> tuple[optimizer_step.StepVerdict, StepStatus]:
        """Sum over ranks, and update where all is well."""
        self._send(ready, window, failed_at, count)
        heard = self._exchange.wait()
        scale = self.scale.value
        verdict = optimizer_step.judge_status(heard, limit=self.spike_limit, scale=scale)
        updater = ready.updater
        if verdict.kind == optimizer_step.GOOD and not updater.on_device:
            norm = heard.squares**0.5 / scale
            gradients = ready.wiring.gradients()
            self._stepping(ready, lambda: updater.apply(gradients, norm, scale, ready.fitting.release))
        return verdict, heard

    def _send(
        self, ready: prepare_module.PreparedRun, window: Window, failed_at: int | None, count: int
    ) -> None:
        """Let all ranks know, and start the update where the device can call it off."""
        wiring, failed = ready.wiring, failed_at is not None
        wiring.finish(failed_at, count)
        if self._void:
            # Whatever the passes came to, they were there for the sake of their collectives.
            for gradient in wiring.gradients():
                gradient.zero_()
            self._loss = None
        scale = self.scale.value
        counts = self.groups.counts
        weight = self._weight if counts else 0.0
        told = StepStatus(
            failed=float(failed),
            fatal=float(self._fatal is not None),
            weight=0.0 if isinstance(weight, torch.Tensor) else float(weight),
            samples=float(window.size) if counts else 0.0,
            asked=float(self.asked),
            rollback=float(self.rollback),
            strays=float(ready.buffers.strays()),
            resize=float(self._proposed is not None),
        )
        squares = None if failed else wiring.squares()
        self._exchange.send(told, loss=self._loss, squares=squares, weight=weight)
        updater = ready.updater
        if updater.on_device and not failed:
            found_bad = self._exchange.found_bad(self.spike_limit)
            divisor = self._exchange.divisor(updater.clip, scale)
            self._stepping(ready, lambda: updater.launch(found_bad, divisor, ready.fitting.release))

    def _stepping(self, ready: prepare_module.PreparedRun, act: Callable[[], None]) -> None:
        if self.faults is not None:
            ready.updater.before = lambda: self.at("optimizer")
        try:
            act()
        except OptimizerInterrupted as error:
            self.rollback = True
            self._tell(
                IncidentKind.OUT_OF_MEMORY,
                f"the optimizer step ran out of memory halfway: {_first_line(error)}",
                "all ranks are told at the next step, and go back to the last checkpoint",
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NothingFits(
                "the optimizer step",
                found=f"it ran out of memory again and again: {_first_line(error)}",
                cure="Use a sharded strategy, an optimizer with less state, or devices with more memory.",
            ) from error

    def _answer(
        self,
        ready: prepare_module.PreparedRun,
        window: Window,
        verdict: optimizer_step.StepVerdict,
        heard: StepStatus,
        bad: int,
    ) -> int | None:
        """None where the step is over; else how much nearer to being skipped the next attempt is."""
        if verdict.kind == optimizer_step.FATAL:
            raise NothingFits(
                f"optimizer step {window.step} on {self.world.size} processes",
                found=self._fatal or "another rank has no memory left for a single sample",
                cure="Use more recomputation, a sharded strategy, or devices with more memory.",
            )
        if verdict.kind == optimizer_step.REPLAY:
            self._agree_on_size(ready)
            return 0
        if verdict.kind == optimizer_step.NOT_FINITE and self.scale.can_shrink and _is_finite(heard.loss):
            self.scale = self.scale.halved()
            return 0
        if verdict.kind in (optimizer_step.NOT_FINITE, optimizer_step.SPIKE) and not bad:
            if self.world.is_main:
                kind = (
                    IncidentKind.LOSS_SPIKE
                    if verdict.kind == optimizer_step.SPIKE
                    else IncidentKind.NOT_A_NUMBER
                )
                self._tell(kind, verdict.why, "the same samples are tried once more")
            return 1
        return None

    def _agree_on_size(self, ready: prepare_module.PreparedRun) -> None:
        """Ranks that have to run the same number of parts take the smallest micro-batch of any."""
        if not ready.wiring.equal_parts:
            return
        fitting = ready.fitting
        least = int(
            optimizer_step.all_reduce_extreme(fitting.sizes.current, self.device, self.world.size, least=True)
        )
        if least != fitting.sizes.current:
            moved = fitting.sizes.replace(current=least, changed_at=self.steps)
            fitting.take(SizeChange(sizes=moved, why="another rank has less room"))

    def _end(  # noqa: PLR0913 - what is known of the step
        self,
        ready: prepare_module.PreparedRun,
        window: Window,
        heard: StepStatus,
        verdict: optimizer_step.StepVerdict,
        *,
        attempts: int,
        parts: int,
    ) -> None:
        norm = heard.squares**0.5 / self.scale.value
        if heard.strays:
            ready.buffers.learn(self.device)
        good = verdict.kind == optimizer_step.GOOD
        if good:
            ready.buffers.settle()
            self.scale = self.scale.after_good()
            if ready.schedule is not None:
                ready.schedule.step()
        else:
            ready.buffers.back()
            self.rollback = self.rollback and verdict.kind != optimizer_step.ROLLBACK
            # It may be the one with the bad number: the next step finds another.
            self._sample = None
        self.steps += 1
        self._fit(ready, window, heard)
        samples = int(heard.samples)
        self.outcome = StepOutcome(
            step=window.step,
            epoch=window.epoch,
            loss=heard.loss,
            weight=heard.weight,
            samples=samples,
            grad_norm=norm,
            skipped="" if good else verdict.why,
            attempts=attempts,
            parts=parts,
            micro_batch=ready.fitting.sizes.current,
            rollback_needed=verdict.kind == optimizer_step.ROLLBACK,
            asked=heard.asked,
        )

    def _fit(self, ready: prepare_module.PreparedRun, window: Window, heard: StepStatus) -> None:
        """Another micro-batch between steps, where memory or pace suggest one."""
        fitting = ready.fitting
        if heard.resize:
            # All ranks heard it: those that have to be alike take the least that any wants.
            wanted = self._proposed.sizes.current if self._proposed is not None else fitting.sizes.current
            least = int(optimizer_step.all_reduce_extreme(wanted, self.device, self.world.size, least=True))
            why = self._proposed.why if self._proposed is not None else "another rank has less room"
            self._proposed = None
            if least != fitting.sizes.current:
                moved = fitting.sizes.replace(current=least, changed_at=self.steps)
                self._move(ready, SizeChange(sizes=moved, why=why))
            return
        move = fitting.after_step(share=window.size, step=self.steps)
        if move is None:
            return
        if ready.wiring.equal_parts:
            self._proposed = move
        else:
            self._move(ready, move)

    def _move(self, ready: prepare_module.PreparedRun, move: SizeChange) -> None:
        before = ready.fitting.sizes.current
        ready.fitting.take(move)
        done = f"from {before} to {move.sizes.current} samples at once{self._seen_by_norms(ready, move)}"
        self._tell(IncidentKind.MICRO_BATCH, move.why, done)

    def _seen_by_norms(self, ready: prepare_module.PreparedRun, move: SizeChange) -> str:
        """What another micro-batch means for BatchNorm, which sees nothing else; empty without any."""
        if not any(module.training for module in find_batch_norms(ready.model)):
            return ""
        sees = move.sizes.current * (1 if ready.statistics is None else self.groups.data_parallel)
        return f"; BatchNorm computes its statistics over {sees} samples from now on"

    def say_compile(self, why: str, done: str) -> None:
        """Pass on what compiling comes to."""
        self._tell(IncidentKind.COMPILE, why, done)

    def _tell(self, kind: IncidentKind, why: str, done: str) -> None:
        if self._listen is not None:
            step = self._window.step if self._window is not None else self.steps
            self._listen(
                Incident(kind=kind, at_s=time.time(), step=step, rank=self.world.rank, why=why, done=done)
            )


def share_counting_sample(mine: Any, groups: RankGroups) -> Any:
    """A sample for each of the ranks that share data: its own, or else that of the first which has one.

    None where none has. All of them call it.
    """
    mine = None if mine is None else copy_batch(mine)
    if groups.data_alone:
        return mine
    having: list[Any] = [None] * groups.data_parallel
    dist.all_gather_object(having, mine is not None, group=groups.data_group)
    if all(having) or not any(having):
        return mine
    told = [mine]
    dist.broadcast_object_list(told, src=groups.first + having.index(True), group=groups.data_group)
    return told[0] if mine is None else mine


def _check_attempts(window: Window, attempts: int) -> None:
    if attempts > MAX_ATTEMPTS:
        raise NothingFits(
            f"optimizer step {window.step}",
            found=f"it failed {MAX_ATTEMPTS} times",
            cure="Look at the events before this one.",
        )


def _weigh_batch(weight: Callable[[Any], Any], batch: Any) -> Any:
    found = weight(batch)
    if isinstance(found, torch.Tensor) and found.device.type == "cpu":
        return float(found)
    return found


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
