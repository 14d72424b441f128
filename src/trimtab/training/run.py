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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from trimtab.engine.precision import set_tf32_flags
from trimtab.errors import WrongUse
from trimtab.jobs.job import samples_in
from trimtab.jobs.load import load
from trimtab.planner import validity
from trimtab.spec import Plan, Setting
from trimtab.strategies import usual_strategy
from trimtab.training import optimizer_step, process_group
from trimtab.training import prepare as prepare_module
from trimtab.training.loading import Loader, build_sample_order, move_to_device
from trimtab.training.micro_batches import MicroBatch, StepOutcome
from trimtab.training.oom_recovery import MicroBatchSizes
from trimtab.training.optimizer_step import LossScale
from trimtab.training.process_group import make_groups
from trimtab.training.stepper import StepInFlight, Stepper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trimtab.spec import Incident
    from trimtab.training.loading import Window
    from trimtab.training.process_group import World
    from trimtab.training.stepper import Faults

__all__ = ["MicroBatch", "Run", "StepOutcome"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "mean": dist.ReduceOp.SUM,
}


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
        join_s: float = process_group.JOIN_S,
        connected: World | None = None,
    ) -> None:
        """`plan` is a Plan, its file, a Setting, or nothing: then all samples of a batch go at once.

        `connected` is the world of a caller who has made the process group, and will leave it.
        """
        self.job = load(job) if isinstance(job, str) else job
        self.plan = validity.read_plan_file(Path(plan)) if isinstance(plan, str | Path) else plan
        gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        self._connects = connected is None
        self.world: World = connected or process_group.read_world(os.environ, gpus)
        self.setting = self._chosen()
        prepare_module.check_world_size(self.setting, self.world)
        self.torch_device = torch.device(self.world.device)
        if self.torch_device.type == "cuda":
            torch.cuda.set_device(self.torch_device)
        set_tf32_flags(self.setting.dtypes)
        if self._connects:
            process_group.connect(self.world, timeout_min=timeout_min, join_s=join_s)
        self.groups = make_groups(self.setting, self.world)
        self._stepper = Stepper(self.setting, self.world, self.groups, faults=faults, listen=listen)
        self.ahead = False
        """Whether the passes of the next window have been computed already, in over()."""
        self._moved = False

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
    def steps(self) -> int:
        """Optimizer steps taken, skipped ones included."""
        return self._stepper.steps

    @property
    def asked(self) -> float:
        """Summed over ranks in the next step, and handed back in its Outcome."""
        return self._stepper.asked

    @asked.setter
    def asked(self, value: float) -> None:
        self._stepper.asked = value

    @property
    def spike_limit(self) -> float | None:
        """A loss above it counts as not a number."""
        return self._stepper.spike_limit

    @spike_limit.setter
    def spike_limit(self, value: float | None) -> None:
        self._stepper.spike_limit = value

    @property
    def model(self) -> Any:
        """The module that prepare() returned."""
        return self._stepper.ready().model

    @property
    def optimizer(self) -> Any:
        """The optimizer that prepare() returned."""
        return self._stepper.ready().updater.optimizer

    @property
    def micro_batch(self) -> int:
        """Samples in a part, as of now."""
        return self._stepper.ready().fitting.sizes.current

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
        strategy, mesh = usual_strategy(size)
        return Setting(
            strategy=strategy,
            mesh=mesh,
            micro_batch=-(-batch // size),
            global_batch=batch,
        )

    @property
    def schedule(self) -> Any:
        """The LR scheduler that is stepped with every update; None where there is none."""
        return self._stepper.ready().schedule

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
        if self._stepper.prepared is not None:
            raise WrongUse("run.prepare()", found="it was called twice", cure="Make a second Run.")
        ready = self._stepper.prepare(
            prepare_module.PrepareRequest(
                job=self.job, model=model, optimizer=optimizer, loss=loss, weight=weight, clip=clip,
                schedule=schedule, setting=self.setting, world=self.world, groups=self.groups,
                estimate=self.plan.estimate if isinstance(self.plan, Plan) else None,
                pinned=isinstance(self.plan, Plan) and "micro_batch" in self.plan.policy.pins,
            )
        )  # fmt: skip
        return ready.model, ready.updater.optimizer

    def loader(self, dataset: Any, seed: int = 0) -> Loader:
        """Windows of this rank: its samples of each global batch."""
        return Loader(
            dataset=dataset,
            order=build_sample_order(dataset, self.setting.global_batch, seed),
            rank=self.groups.data_rank,
            data_parallel=self.groups.data_parallel,
            shares=tuple(share.samples for share in self.setting.shares),
            workers=self.setting.workers,
            pin=self.torch_device.type == "cuda",
            collate=getattr(self.job, "collate", None),
        )

    # one optimizer step

    def step(self, batch: Any) -> StepOutcome:
        """One optimizer step with a window of loader(), or with this rank's share of a batch of one's own."""
        ready = self._stepper.ready()
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

    def over(
        self, windows: Iterable[Window], settles: Callable[[Window], bool] | None = None
    ) -> Iterator[tuple[Window, StepOutcome]]:
        """Steps over windows, each with its outcome, in order; what comes of it is the same as with step().

        Where the device itself decides whether an update happens, the host does not wait for the outcome: it
        hands out the passes of the next window meanwhile, and says so in `ahead`. After a window for which
        `settles` is true it does wait: what is saved or evaluated then is the state after that step.
        """
        stepper = self._stepper
        flight: StepInFlight | None = None
        for window in windows:
            passes = stepper.passes(window) if stepper.flies() else None
            if flight is not None:
                before, flight = flight, None
                good = stepper.landed(before)
                # What was computed on top of a bad step is thrown away.
                passes = passes if good else None
                self.ahead, self._moved = passes is not None, False
                yield before.window, self.update()
                self.ahead = False
                if self._moved:
                    # The run has gone back: this window comes again when its time has come.
                    stepper.ready().wiring.begin()
                    continue
            if passes is None:
                yield window, self.step(window)
                continue
            stepper.take_off(passes)
            if settles is not None and settles(window):
                stepper.landed(passes)
                yield window, self.update()
            else:
                flight = passes
        if flight is not None:
            stepper.landed(flight)
            yield flight.window, self.update()

    def parts(self, batch: Any) -> Iterator[MicroBatch]:
        """The parts of a step, again and in other sizes until all ranks have succeeded; update() follows."""
        return self._stepper.parts(batch)

    def update(self) -> StepOutcome:
        """Finish the step whose parts() have been gone through."""
        outcome, self._stepper.outcome = self._stepper.outcome, None
        if outcome is None:
            raise WrongUse(
                "run.update()",
                found="there is no finished step",
                cure="Go through all of run.parts() before, once for every update.",
            )
        return outcome

    # for everybody

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """A number or a tensor over all ranks: sum, mean, max or min. All ranks call it."""
        if op not in _REDUCE_OPS:
            raise WrongUse(
                f"op {op!r}", found="there is no such operation", cure=f"Use {', '.join(_REDUCE_OPS)}."
            )
        if isinstance(value, torch.Tensor):
            held = value.detach().clone().to(self.torch_device)
        else:
            held = torch.tensor(value, dtype=torch.float64, device=self.torch_device)
        if self.size > 1:
            dist.all_reduce(held, op=_REDUCE_OPS[op])
        if op == "mean":
            held = held / self.size
        return held if isinstance(value, torch.Tensor) else type(value)(held.item())

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        if self.size > 1:
            optimizer_step.all_reduce_extreme(0.0, self.torch_device, self.size, least=True)

    def rollback_needed(self) -> bool:
        """Whether the optimizer of a rank was interrupted halfway in the last step. All ranks call it."""
        return bool(
            optimizer_step.all_reduce_extreme(
                float(self._stepper.rollback), self.torch_device, self.size, least=False
            )
        )

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
        stepper = self._stepper
        sizes = stepper.prepared.fitting.sizes.to_builtins() if stepper.prepared is not None else None
        return {"steps": stepper.steps, "scale": stepper.scale.to_builtins(), "sizes": sizes}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what state() said; a micro-batch is taken over where the plan still means the same."""
        stepper = self._stepper
        stepper.steps = int(state.get("steps", stepper.steps))
        if state.get("scale") and stepper.scale.value != 1.0:
            stepper.scale = LossScale.from_builtins(state["scale"])
        stepper.rollback, self._moved = False, True
        if state.get("sizes") and stepper.prepared is not None:
            saved = MicroBatchSizes.from_builtins(state["sizes"])
            if saved.planned == stepper.prepared.fitting.sizes.planned:
                stepper.prepared.fitting.sizes = saved

    def on_device(self, batch: Any) -> Any:
        """A batch, where this process computes."""
        return move_to_device(batch, self.torch_device)

    def loss_of(self, batch: Any) -> torch.Tensor:
        """This rank's loss of a batch that is on the device, for passes of one's own.

        In a pipeline all stages ask for it, without gradients; all but the last get nought.
        """
        ready = self._stepper.ready()
        assert ready.loss is not None  # noqa: S101 - there is a job
        compute = ready.loss
        if ready.pipe is not None:
            return ready.pipe.evaluated(lambda: compute(ready.model, batch))
        loss: torch.Tensor = compute(ready.model, batch)
        return loss

    def passed(self, batch: Any) -> torch.Tensor | None:
        """A forward and a backward pass over a batch that is on the device, in quiet(); its loss.

        None where it comes to be on another rank: in a pipeline all stages call it.
        """
        ready = self._stepper.ready()
        assert ready.loss is not None  # noqa: S101 - there is a job
        compute = ready.loss

        def loss() -> torch.Tensor:
            with self.computing():
                found: torch.Tensor = compute(ready.model, batch)
            return found

        if ready.pipe is not None:
            return ready.pipe.passed(loss)
        whole = loss()
        whole.backward()
        return whole.detach()

    def weight_of(self, batch: Any) -> float:
        """What the loss of a batch is a mean over."""
        ready = self._stepper.ready()
        return float(samples_in(batch) if ready.weight is None else ready.weight(batch))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast as in a part, for passes of one's own."""
        with contextlib.ExitStack() as stack:
            if self._stepper.autocast is not None:
                stack.enter_context(torch.autocast(self.torch_device.type, dtype=self._stepper.autocast))
            yield

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Passes of one's own that tell no other rank anything and do not compile; gradients are dropped.

        Sharded parameters still gather: all ranks have to make the same passes.
        """
        ready = self._stepper.ready()
        if ready.compiling is not None:
            ready.compiling.off()
        try:
            ready.wiring.begin()
            yield
        finally:
            ready.wiring.begin()

    def close(self) -> None:
        """Leave the other processes; the model stays usable."""
        ready = self._stepper.prepared
        if ready is not None:
            ready.wiring.close()
            if ready.compiling is not None:
                ready.compiling.off()
        if self._connects:
            process_group.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
