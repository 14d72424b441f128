"""Run: a setting carried out, for loops of one's own.

    with trimtab.Run("plan.json") as run:
        model, optimizer = run.prepare(model, optimizer, loss=loss)
        for window in run.loader(dataset):
            outcome = run.step(window)

A step is exact: parts of any size, any number of ranks and token-weighted losses give the gradient of the
whole global batch. A step also holds: out of memory, the same samples are tried again in smaller parts; not
a number, they are tried once more and then skipped. Ranks agree through one tiny sum at the end of a step.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
import torch.distributed as dist

from trimtab.errors import NothingFits, WrongUse
from trimtab.jobs.job import samples_in
from trimtab.jobs.load import load
from trimtab.spec import Incident, IncidentKind, Mesh, Plan, Setting, Strategy
from trimtab.training import preparing, status, world
from trimtab.training.batches import on_device
from trimtab.training.loading import Loader, Window, checked_order, window_of
from trimtab.training.order import bounds
from trimtab.training.precision import LossScale, autocast_dtype, configure, first_scale
from trimtab.training.recovery import Move, Sizes, is_out_of_memory
from trimtab.training.reduce import make_groups
from trimtab.training.status import Status
from trimtab.training.updating import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from trimtab.training.world import World

    Faults = Any
    """What is asked at "forward", "backward", "gradient" and "optimizer": at(point, step, rank)."""

MOST_ATTEMPTS = 40
"""Of one step; more means that something else than memory or numbers is wrong."""
_COMPILER = "the compiler failed"
LONE_TRIES = 3
"""How often one sample is tried again: others may have had the memory for a moment."""
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "mean": dist.ReduceOp.SUM,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
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


class Part:
    """Some of the samples of a step: one forward and one backward pass.

    with part:
        part.backward(loss(model, part.batch))
    """

    __slots__ = ("_batch", "_cast", "_entered", "_host", "_run", "_share", "count", "done", "error", "number",
                 "samples")  # fmt: skip

    def __init__(  # noqa: PLR0913 - made in two places, both here
        self, run: Run, host: Any, *, samples: int, share: Any, number: int, count: int
    ) -> None:
        self._run = run
        self._host = host
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
            self._run._at("forward")
            self._batch = on_device(self._host, self._run.torch_device)
        return self._batch

    def __enter__(self) -> Self:
        self._entered = True
        self._run._enter(self)
        if self._run.autocast is not None:
            self._cast = torch.autocast(self._run.torch_device.type, dtype=self._run.autocast)
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
        self._run._backward(loss, self._share)
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
            self._run._left()
            return False
        self.error = self._run._swallows(error)
        if self.error is None:
            return False
        # What the failed pass left behind hangs on the frames that it came through.
        traceback.clear_frames(trace)
        return True

    def _leave_autocast(self) -> None:
        if self._cast is not None:
            cast, self._cast = self._cast, None
            cast.__exit__(None, None, None)


class Run:
    """One process of a training run."""

    def __init__(  # noqa: PLR0913 - all but the plan are rarely given
        self,
        plan: Plan | Setting | str | Path | None = None,
        *,
        job: Any = None,
        timeout_min: float = 10,
        listen: Callable[[Incident], None] | None = None,
        faults: Faults = None,
        device: str | None = None,
        join_s: float = world.JOIN_S,
        connected: World | None = None,
    ) -> None:
        """`plan` is a Plan, its file, a Setting, or nothing: then all samples of a batch go at once.

        `connected` is the world of a caller who has made the process group, and will leave it.
        """
        self.job = load(job) if isinstance(job, str) else job
        self.plan = _read(plan) if isinstance(plan, str | Path) else plan
        gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        self._connects = connected is None
        self.world: World = connected or world.read(os.environ, gpus)
        self.setting = self._chosen()
        preparing.check(self.setting, self.world)
        self.torch_device = torch.device(self.world.device)
        if self.torch_device.type == "cuda":
            torch.cuda.set_device(self.torch_device)
        configure(self.setting)
        self.autocast = autocast_dtype(self.setting)
        if self._connects:
            world.connect(self.world, timeout_min=timeout_min, join_s=join_s)
        self.groups = make_groups(self.setting, self.world)
        self.asked = 0.0
        """Summed over ranks in the next step, and handed back in its Outcome."""
        self.spike_limit: float | None = None
        """A loss above it counts as not a number."""
        self.steps = 0
        """Optimizer steps taken, skipped ones included."""
        self._listen = listen
        self._faults = faults
        self._prepared: preparing.Prepared | None = None
        self._exchange = status.Exchange(self.torch_device, self.world.size)
        self._scale: LossScale = first_scale(self.setting.precision)
        self._rollback = False
        self._proposed: Move | None = None
        self._fatal: str | None = None
        self._window: Window | None = None
        self._open = self._rehearsing = False
        self._outcome: Outcome | None = None

    # who and where

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.world.local_rank

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return self.world.is_main

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.torch_device

    @property
    def model(self) -> Any:
        """The module that prepare() returned."""
        return self._ready().model

    @property
    def optimizer(self) -> Any:
        """The optimizer that prepare() returned."""
        return self._ready().updater.optimizer

    @property
    def micro_batch(self) -> int:
        """Samples in a part, as of now."""
        return self._ready().fitting.sizes.current

    def _chosen(self) -> Setting:
        if isinstance(self.plan, Plan):
            return self.plan.choice
        if isinstance(self.plan, Setting):
            # One that was written by hand may have plain words where the choices are.
            return Setting.from_builtins(self.plan.to_builtins())
        if self.plan is not None:
            raise WrongUse(
                f"a plan of type {type(self.plan).__name__}",
                found="it is neither a Plan, a Setting nor the name of a file",
                cure="Give what trimtab.plan() returns, or the file that `trimtab plan --json` wrote.",
            )
        size = self.world.size
        # Without a plan and a job there is no limit but what a batch brings.
        batch = int(getattr(self.job, "global_batch", 0) or size * 2**20)
        return Setting(
            strategy=Strategy.DDP if size > 1 else Strategy.SINGLE,
            mesh=Mesh(dp_replicate=size),
            micro_batch=-(-batch // size),
            global_batch=batch,
        )

    @property
    def schedule(self) -> Any:
        """The LR scheduler that is stepped with every update; None where there is none."""
        return self._ready().schedule

    @property
    def branches(self) -> int:
        """Groups of ranks that each compute a term of the loss; 1 where every rank computes all of it."""
        return self.setting.mesh.branch

    # getting ready

    def prepare(  # noqa: PLR0913 - the parts of a step
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
        clip: float | None = None,
        schedule: Any = None,
    ) -> tuple[Any, Any]:
        """Place, cast, spread and compile a model, and give it its optimizer.

        `optimizer` is one, or a function that makes one of parameters. `loss(model, batch)` is for step();
        `weight(batch)` says what it is a mean over, samples without it. `clip` bounds the norm of the whole
        gradient. `schedule` is an LR scheduler, or a function that makes one of the optimizer; it is stepped
        with every update. What is not given comes from the job.
        """
        if self._prepared is not None:
            raise WrongUse("run.prepare()", found="it was called twice", cure="Make a second Run.")
        self._prepared = preparing.prepare(
            preparing.Wanted(
                job=self.job, model=model, optimizer=optimizer, loss=loss, weight=weight, clip=clip,
                schedule=schedule, setting=self.setting, world=self.world, groups=self.groups,
                estimate=self.plan.estimate if isinstance(self.plan, Plan) else None,
                pinned=isinstance(self.plan, Plan) and "micro_batch" in self.plan.policy.pins,
            ),
            self._say_compile,
            self._mid_backward if self._faults is not None else None,
        )  # fmt: skip
        self._strikes_at = max(1, self._prepared.wiring.arrivals // 3)
        return self._prepared.model, self._prepared.updater.optimizer

    def loader(self, dataset: Any, seed: int = 0) -> Loader:
        """Windows of this rank: its samples of each global batch."""
        return Loader(
            dataset=dataset,
            order=checked_order(dataset, self.setting.global_batch, seed),
            rank=self.groups.data_rank,
            data_parallel=self.groups.data_parallel,
            shares=tuple(one.samples for one in self.setting.shares),
            workers=self.setting.workers,
            pin=self.torch_device.type == "cuda",
            collate=getattr(self.job, "collate", None),
        )

    # one optimizer step

    def step(self, batch: Any) -> Outcome:
        """One optimizer step with a window of loader(), or with this rank's share of a batch of one's own."""
        ready = self._ready()
        if ready.loss is None:
            raise WrongUse(
                "run.step()",
                found="prepare() was given no loss, and the run no job",
                cure="Give prepare(loss=...), or use run.parts() and run.update().",
            )
        for part in self.parts(batch):
            with part:
                part.backward(ready.loss(ready.model, part.batch))
        return self.update()

    def parts(self, batch: Any) -> Iterator[Part]:
        """The parts of a step, again and in other sizes until all ranks have succeeded; update() follows."""
        ready = self._ready()
        self._outcome = None
        window, total = self._opened(ready, batch)
        attempts = bad = 0
        self._remember(ready)
        if not ready.wiring.rehearsed:
            yield from self._rehearsal(ready, window)
        while True:
            attempts += 1
            if attempts > MOST_ATTEMPTS:
                raise NothingFits(
                    f"optimizer step {window.step}",
                    found=f"it failed {MOST_ATTEMPTS} times",
                    cure="Look at the events before this one.",
                )
            self._start_over(ready)
            parts = self._split(ready, window, total)
            failed_at = None
            for part in parts:
                yield part
                if part.error is None and not part.done:
                    raise WrongUse("run.parts()", found="a part was not used", cure="Enter it: `with part:`.")
                if part.error is not None:
                    failed_at = part.number
                    break
            if failed_at is not None:
                self._recover(ready, window, parts[failed_at])
                if self._fatal is None and not ready.wiring.sent_any and not ready.wiring.equal_parts:
                    # Nobody has heard of it: the others wait, and this rank tries again.
                    continue
            verdict, heard = self._close(ready, window, failed_at, len(parts))
            again = self._answer(ready, window, verdict, heard, bad)
            if again is None:
                self._end(ready, window, heard, verdict, attempts=attempts, parts=len(parts))
                return
            bad += again

    def _rehearsal(self, ready: preparing.Prepared, window: Window) -> Iterator[Part]:
        """Passes of one sample that count for nothing: they show what ranks say to each other in a pass."""
        self._rehearsing = True
        self._start_over(ready)
        for number in range(2):
            part = Part(self, self._filler(ready, window), samples=0, share=0.0, number=number, count=2)
            yield part
            if part.error is not None:
                raise NothingFits(
                    "the first pass of this run",
                    found=f"a single sample ran out of memory: {part.error}",
                    cure="Use more recomputation, more devices, or devices with more memory.",
                )
        ready.wiring.finish(None, 2)
        self._rehearsing = False

    def update(self) -> Outcome:
        """Finish the step whose parts() have been gone through."""
        if self._outcome is None:
            raise WrongUse(
                "run.update()",
                found="there is no finished step",
                cure="Go through all of run.parts() before, once for every update.",
            )
        outcome, self._outcome = self._outcome, None
        return outcome

    # for everybody

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """A number or a tensor over all ranks: sum, mean, max or min. All ranks call it."""
        if op not in _OPS:
            raise WrongUse(f"op {op!r}", found="there is no such operation", cure=f"Use {', '.join(_OPS)}.")
        if isinstance(value, torch.Tensor):
            held = value.detach().clone().to(self.torch_device)
        else:
            held = torch.tensor(value, dtype=torch.float64, device=self.torch_device)
        if self.size > 1:
            dist.all_reduce(held, op=_OPS[op])
        if op == "mean":
            held = held / self.size
        return held if isinstance(value, torch.Tensor) else type(value)(held.item())

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        if self.size > 1:
            status.agree(0.0, self.torch_device, self.size, least=True)

    def rollback_needed(self) -> bool:
        """Whether the optimizer of a rank was interrupted halfway in the last step. All ranks call it."""
        return bool(status.agree(float(self._rollback), self.torch_device, self.size, least=False))

    def memory(self) -> dict[str, int]:
        """Bytes of this process on its device, now and at the peak; empty on a CPU."""
        if self.torch_device.type != "cuda":
            return {}
        device = self.torch_device
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }

    def state(self) -> dict[str, Any]:
        """What this rank has learnt, for a checkpoint: plain numbers."""
        sizes = self._prepared.fitting.sizes.to_builtins() if self._prepared is not None else None
        return {"steps": self.steps, "scale": self._scale.to_builtins(), "sizes": sizes}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what state() said; a micro-batch is taken over where the plan still means the same."""
        self.steps = int(state.get("steps", self.steps))
        if state.get("scale") and self._scale.value != 1.0:
            self._scale = LossScale.from_builtins(state["scale"])
        self._rollback = False
        if state.get("sizes") and self._prepared is not None:
            saved = Sizes.from_builtins(state["sizes"])
            if saved.planned == self._prepared.fitting.sizes.planned:
                self._prepared.fitting.sizes = saved

    def on_device(self, batch: Any) -> Any:
        """A batch, where this process computes."""
        return on_device(batch, self.torch_device)

    def loss_of(self, batch: Any) -> torch.Tensor:
        """This rank's loss of a batch that is on the device, for passes of one's own."""
        ready = self._ready()
        assert ready.loss is not None  # noqa: S101 - there is a job
        loss: torch.Tensor = ready.loss(ready.model, batch)
        return loss

    def weight_of(self, batch: Any) -> float:
        """What the loss of a batch is a mean over."""
        ready = self._ready()
        return float(samples_in(batch) if ready.weight is None else ready.weight(batch))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast as in a part, for passes of one's own."""
        with contextlib.ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.torch_device.type, dtype=self.autocast))
            yield

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Passes of one's own that tell no other rank anything and do not compile; gradients are dropped.

        Sharded parameters still gather: all ranks have to make the same passes.
        """
        ready = self._ready()
        if ready.compiling is not None:
            ready.compiling.off()
        try:
            ready.wiring.begin()
            yield
        finally:
            ready.wiring.begin()

    def close(self) -> None:
        """Leave the other processes; the model stays usable."""
        if self._prepared is not None:
            self._prepared.wiring.close()
            if self._prepared.compiling is not None:
                self._prepared.compiling.off()
        if self._connects:
            world.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside a step

    def _ready(self) -> preparing.Prepared:
        if self._prepared is None:
            raise WrongUse(
                "Run", found="nothing is prepared", cure="Call run.prepare(model, optimizer) first."
            )
        return self._prepared

    def _opened(self, ready: preparing.Prepared, batch: Any) -> tuple[Window, Any]:
        """The window of this step, and the weight of the whole global batch."""
        own = not isinstance(batch, Window)
        window = window_of(batch, step=self.steps) if own else batch
        self._window = window
        self._pieces: tuple[int, list[tuple[Any, Any]]] | None = None
        groups = self.groups
        unknown = own and groups.data_parallel > 1
        if ready.weight is None and not unknown:
            return window, window.samples
        self._pieces = self._cut(ready, window)
        local = sum(weight for _, weight in self._pieces[1])
        if groups.data_alone:
            return window, local
        if isinstance(local, torch.Tensor):
            whole = local.double().to(self.torch_device).reshape(())
        else:
            # Filled on the device: a copy from here would wait for the optimizer.
            whole = torch.full((), float(local), dtype=torch.float64, device=self.torch_device)
        dist.all_reduce(whole, group=groups.data_group)
        return window, whole

    def _cut(self, ready: preparing.Prepared, window: Window) -> tuple[int, list[tuple[Any, Any]]]:
        """The window in parts of the micro-batch, each with its weight.

        Parts that count for nothing are left out: a mean over nothing is not a number, whatever it counts.
        """
        size, weigh = ready.fitting.sizes.current, ready.weight
        pieces = window.parts(size)
        if weigh is None:
            return size, [(one, one.samples) for one in pieces]
        weighed = [(one, _weight(weigh, one.batch)) for one in pieces]
        return size, [(one, weight) for one, weight in weighed if _counts(weight)]

    def _remember(self, ready: preparing.Prepared) -> None:
        """What a repetition begins with again: random numbers and buffers."""
        self._random = torch.get_rng_state()
        if self.torch_device.type == "cuda":
            self._device_random = torch.cuda.get_rng_state(self.torch_device)
        ready.buffers.begin()
        self._first = True
        self._lone_failures = 0

    def _start_over(self, ready: preparing.Prepared) -> None:
        if not self._first:
            torch.set_rng_state(self._random)
            if self.torch_device.type == "cuda":
                torch.cuda.set_rng_state(self._device_random, self.torch_device)
            ready.buffers.back()
        self._first = False
        ready.wiring.begin()
        self._loss: torch.Tensor | None = None

    def _split(self, ready: preparing.Prepared, window: Window, total: Any) -> list[Part]:
        """The parts of this attempt, with the share of each in the loss of the whole global batch."""
        size = ready.fitting.sizes.current
        if self._pieces is None or self._pieces[0] != size:
            self._pieces = self._cut(ready, window)
        kept = self._pieces[1]
        count = len(kept)
        if ready.wiring.equal_parts:
            count = self._most_parts(window, size)
        parts = [
            Part(
                self, one.batch, samples=one.samples, share=_share(weight, total), number=number, count=count
            )
            for number, (one, weight) in enumerate(kept)
        ]
        self._weight: Any = sum(weight for _, weight in kept)
        parts += [
            Part(self, self._filler(ready, window), samples=0, share=0.0, number=number, count=count)
            for number in range(len(parts), count)
        ]
        ready.regular = min(size, ready.regular_share)
        return parts

    def _filler(self, ready: preparing.Prepared, window: Window) -> Any:
        """One sample to keep the others company with; one that counts, so that its loss is a number."""
        if ready.weight is not None:
            for start in range(window.size):
                found = window.part(start, start + 1).batch
                if _counts(_weight(ready.weight, found)):
                    return found
        return window.filler()

    def _most_parts(self, window: Window, size: int) -> int:
        """How many parts the rank with the largest share has; all have to run as many."""
        if window.indices or window.samples != window.size:
            shares = [one.samples for one in self.setting.shares]
            places = bounds(window.samples, self.groups.data_parallel, shares)
            largest = max(stop - start for start, stop in pairwise(places))
            return -(-largest // size)
        return int(status.agree(-(-window.size // size), self.torch_device, self.size, least=False))

    def _enter(self, part: Part) -> None:
        ready = self._ready()
        ready.wiring.before(part.number, part.count)
        if ready.compiling is not None and ready.compiling.on:
            ready.compiling.use(part.samples, ready.regular)

    def _at(self, point: str) -> Any:
        """A drill, where one is on."""
        if self._faults is None or self._window is None or self._rehearsing:
            return None
        return self._faults.at(point, self._window.step, self.rank)

    def _mid_backward(self) -> None:
        """Called as gradients come; a drill strikes when some have been sent and others not."""
        self._arrived += 1
        if self._open and self._arrived >= self._strikes_at:
            self._at("backward")

    def _backward(self, loss: Any, share: Any) -> None:
        preparing.check_loss(loss)
        weighted = loss if isinstance(share, float) and share == 1.0 else loss * share
        if self._faults is not None and self._at("gradient") == "nan":
            weighted = weighted * float("nan")
        told = weighted.detach()
        self._loss = told.double() if self._loss is None else self._loss + told
        if self._scale.value != 1.0:
            weighted = weighted * self._scale.value
        self._open, self._arrived = True, 0
        try:
            weighted.backward()
        except BaseException:
            # A loop of one's own may still hold the loss, and by it all that the pass has kept.
            loss.detach_()
            raise
        finally:
            self._open = False

    def _left(self) -> None:
        ready = self._ready()
        if ready.compiling is not None:
            ready.compiling.done()

    def _swallows(self, error: BaseException) -> str | None:
        """What to say of an error that the step recovers from; None for one that it does not."""
        ready = self._ready()
        if is_out_of_memory(error):
            return f"out of memory: {_line(error)}"
        if not isinstance(error, Exception):
            return None
        if ready.compiling is not None and ready.compiling.gives_up(error):
            return _COMPILER
        return None

    def _recover(self, ready: preparing.Prepared, window: Window, part: Part) -> None:
        """Give memory back and choose smaller parts; notes where there is nothing smaller."""
        self._loss = None
        why = part.error or ""
        part._batch = part._host = None
        ready.wiring.abandon()
        ready.fitting.release()
        if why == _COMPILER:
            return
        size = max(part.samples, 1)
        move = ready.fitting.failed(size=size, share=max(window.size, 1), step=self.steps)
        if move is not None:
            self._tell(IncidentKind.OUT_OF_MEMORY, why, move.why)
            return
        self._lone_failures += 1
        known = ready.fitting.room().said()
        if self._lone_failures > LONE_TRIES:
            self._fatal = f"one sample at once ran out of memory {self._lone_failures} times ({known}); {why}"
            return
        again = f"memory was given back, and one sample is tried again; {known}"
        self._tell(IncidentKind.OUT_OF_MEMORY, why, again)

    def _close(
        self, ready: preparing.Prepared, window: Window, failed_at: int | None, count: int
    ) -> tuple[status.Verdict, Status]:
        """Sum over ranks, let all of them know, and start the update where the device can call it off."""
        wiring, failed = ready.wiring, failed_at is not None
        wiring.finish(failed_at, count)
        scale = self._scale.value
        counts = self.groups.branch == 0
        weight = self._weight if counts else 0.0
        told = Status(
            failed=float(failed),
            fatal=float(self._fatal is not None),
            weight=0.0 if isinstance(weight, torch.Tensor) else float(weight),
            samples=float(window.size) if counts else 0.0,
            asked=float(self.asked),
            rollback=float(self._rollback),
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
        heard = self._exchange.wait()
        verdict = status.judged(heard, limit=self.spike_limit, scale=scale)
        if verdict.kind == status.GOOD and not updater.on_device:
            norm = heard.squares**0.5 / scale
            gradients = wiring.gradients()
            self._stepping(ready, lambda: updater.apply(gradients, norm, scale, ready.fitting.release))
        return verdict, heard

    def _stepping(self, ready: preparing.Prepared, act: Callable[[], None]) -> None:
        if self._faults is not None:
            ready.updater.before = lambda: self._at("optimizer")
        try:
            act()
        except Interrupted as error:
            self._rollback = True
            self._tell(
                IncidentKind.OUT_OF_MEMORY,
                f"the optimizer step ran out of memory halfway: {_line(error)}",
                "all ranks are told at the next step, and go back to the last checkpoint",
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NothingFits(
                "the optimizer step",
                found=f"it ran out of memory again and again: {_line(error)}",
                cure="Use a sharded strategy, an optimizer with less state, or devices with more memory.",
            ) from error

    def _answer(
        self, ready: preparing.Prepared, window: Window, verdict: status.Verdict, heard: Status, bad: int
    ) -> int | None:
        """None where the step is over; else how much nearer to being skipped the next attempt is."""
        if verdict.kind == status.FATAL:
            raise NothingFits(
                f"optimizer step {window.step} on {self.size} processes",
                found=self._fatal or "another rank has no memory left for a single sample",
                cure="Use more recomputation, a sharded strategy, or devices with more memory.",
            )
        if verdict.kind == status.REPLAY:
            self._agree_on_size(ready)
            return 0
        if verdict.kind == status.NOT_FINITE and self._scale.can_shrink and _finite(heard.loss):
            self._scale = self._scale.halved()
            return 0
        if verdict.kind in (status.NOT_FINITE, status.SPIKE) and not bad:
            if self.is_main:
                kind = IncidentKind.LOSS_SPIKE if verdict.kind == status.SPIKE else IncidentKind.NOT_A_NUMBER
                self._tell(kind, verdict.why, "the same samples are tried once more")
            return 1
        return None

    def _agree_on_size(self, ready: preparing.Prepared) -> None:
        """Ranks that have to run the same number of parts take the smallest micro-batch of any."""
        if not ready.wiring.equal_parts:
            return
        fitting = ready.fitting
        least = int(status.agree(fitting.sizes.current, self.torch_device, self.size, least=True))
        if least != fitting.sizes.current:
            moved = fitting.sizes.replace(current=least, changed_at=self.steps)
            fitting.take(Move(sizes=moved, why="another rank has less room"))

    def _end(  # noqa: PLR0913 - what is known of the step
        self,
        ready: preparing.Prepared,
        window: Window,
        heard: Status,
        verdict: status.Verdict,
        *,
        attempts: int,
        parts: int,
    ) -> None:
        norm = heard.squares**0.5 / self._scale.value
        if heard.strays:
            ready.buffers.learn(self.torch_device)
        good = verdict.kind == status.GOOD
        if good:
            ready.buffers.settle()
            self._scale = self._scale.after_good()
            if ready.schedule is not None:
                ready.schedule.step()
        else:
            ready.buffers.back()
            self._rollback = self._rollback and verdict.kind != status.ROLLBACK
        self.steps += 1
        self._fit(ready, window, heard)
        samples = int(heard.samples)
        self._outcome = Outcome(
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
            rollback_needed=verdict.kind == status.ROLLBACK,
            asked=heard.asked,
        )

    def _fit(self, ready: preparing.Prepared, window: Window, heard: Status) -> None:
        """Another micro-batch between steps, where memory or pace suggest one."""
        fitting = ready.fitting
        if heard.resize:
            # All ranks heard it: those that have to be alike take the least that any wants.
            wanted = self._proposed.sizes.current if self._proposed is not None else fitting.sizes.current
            least = int(status.agree(wanted, self.torch_device, self.size, least=True))
            why = self._proposed.why if self._proposed is not None else "another rank has less room"
            self._proposed = None
            if least != fitting.sizes.current:
                moved = fitting.sizes.replace(current=least, changed_at=self.steps)
                self._move(ready, Move(sizes=moved, why=why))
            return
        move = fitting.after_step(share=window.size, step=self.steps)
        if move is None:
            return
        if ready.wiring.equal_parts:
            self._proposed = move
        else:
            self._move(ready, move)

    def _move(self, ready: preparing.Prepared, move: Move) -> None:
        before = ready.fitting.sizes.current
        ready.fitting.take(move)
        self._tell(
            IncidentKind.MICRO_BATCH, move.why, f"from {before} to {move.sizes.current} samples at once"
        )

    def _say_compile(self, why: str, done: str) -> None:
        self._tell(IncidentKind.COMPILE, why, done)

    def _tell(self, kind: IncidentKind, why: str, done: str) -> None:
        if self._listen is not None:
            step = self._window.step if self._window is not None else self.steps
            self._listen(Incident(kind=kind, at_s=time.time(), step=step, rank=self.rank, why=why, done=done))


def _read(file: str | Path) -> Plan:
    path = Path(file)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise WrongUse(
            f"plan {path}", found=f"it cannot be read: {error.strerror}", cure="Give the file of a plan."
        ) from error
    return Plan.from_json(text, origin=str(path))


def _weight(weight: Callable[[Any], Any], batch: Any) -> Any:
    found = weight(batch)
    if isinstance(found, torch.Tensor) and found.device.type == "cpu":
        return float(found)
    return found


def _counts(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) or bool(weight)


def _share(weight: Any, total: Any) -> Any:
    if isinstance(total, torch.Tensor):
        return weight / total.clamp(min=1e-30)
    return weight / total if total else 0.0


def _finite(value: float) -> bool:
    return value - value == 0


def _line(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0][:200] or type(error).__name__
