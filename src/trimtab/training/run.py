"""trimtab.Run: carry out a plan or a setting in your own training loop.

    with trimtab.Run("plan.json") as run:
        model, optimizer = run.prepare(model, optimizer, loss=loss)
        for window in run.loader(dataset):
            outcome = run.step(window)

A step is exact: micro-batches ("parts") of any size, any number of ranks and token-weighted losses give the
gradient of the whole global batch. A step recovers: after an out-of-memory error the same samples are
computed again in smaller parts; after NaN they are tried once more and then skipped. Ranks agree through one
small all-reduce at the end of a step.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from trimtab.engine.precision import set_tf32_flags
from trimtab.engine.sequence_split import choose_part, split_batch
from trimtab.errors import WrongUse
from trimtab.jobs.job import samples_in
from trimtab.jobs.load import load_job
from trimtab.planner import plan_files
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

    def __init__(  # noqa: PLR0913 - all but the plan are rarely used
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
        """Take a Plan, its file, a Setting, or no plan: then each batch is one micro-batch.

        `connected` is the world of a caller that creates and destroys the process group itself.
        """
        self.job = load_job(job) if isinstance(job, str) else job
        self.plan = plan_files.read_plan_file(Path(plan)) if isinstance(plan, str | Path) else plan
        gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        self._connects = connected is None
        self.world: World = connected or process_group.read_world(os.environ, gpus)
        self.setting = self._choose_setting()
        prepare_module.check_world_size(self.setting, self.world)
        self.torch_device = torch.device(self.world.device)
        if self.torch_device.type == "cuda":
            torch.cuda.set_device(self.torch_device)
        set_tf32_flags(self.setting.dtypes)
        if self._connects:
            process_group.connect(self.world, timeout_min=timeout_min, join_s=join_s)
        self.groups = make_groups(self.setting, self.world)
        self._stepper = Stepper(self.setting, self.world, self.groups, faults=faults, listen=listen)
        if self.groups.context_parallel > 1:
            self._stepper.split_sequences = self.split_sequences
        self.ahead = False
        """Whether over() has already run the passes of the next window."""
        self._was_restored = False

    # rank, device and state

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Total number of processes."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self.world.local_rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and output."""
        return self.world.is_main

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.torch_device

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far, including skipped ones."""
        return self._stepper.steps

    @property
    def asked(self) -> float:
        """A number of your own that the next step sums over ranks; the sum is in StepOutcome.asked."""
        return self._stepper.asked

    @asked.setter
    def asked(self, value: float) -> None:
        self._stepper.asked = value

    @property
    def spike_limit(self) -> float | None:
        """A step with a loss above this limit is treated like one with a NaN loss; None for no limit."""
        return self._stepper.spike_limit

    @spike_limit.setter
    def spike_limit(self, value: float | None) -> None:
        self._stepper.spike_limit = value

    @property
    def model(self) -> Any:
        """The module that prepare() returned."""
        return self._stepper.get_prepared().model

    @property
    def optimizer(self) -> Any:
        """The optimizer that prepare() returned; the first one of a job with several."""
        return next(iter(self.optimizers.values()))

    @property
    def optimizers(self) -> dict[str, Any]:
        """All optimizers by name; the only one is called `optimizer`, unless the job names it."""
        losses = self._stepper.get_prepared().losses
        return {named.name: named.optimizer for loss in losses for named in loss.phase.optimizers}

    @property
    def schedules(self) -> dict[str, Any]:
        """The LR schedulers by the name of their optimizer; each steps with its optimizer."""
        losses = self._stepper.get_prepared().losses
        return {name: schedule for loss in losses for name, schedule in loss.schedules.items()}

    @property
    def micro_batch(self) -> int:
        """Current number of samples in a micro-batch."""
        return self._stepper.get_prepared().fitter.sizes.current

    def _choose_setting(self) -> Setting:
        if isinstance(self.plan, Plan):
            return self.plan.choice
        if isinstance(self.plan, Setting):
            # A setting written by hand may have plain strings instead of enum members.
            return Setting.from_builtins(self.plan.to_builtins())
        if self.plan is not None:
            raise WrongUse(
                f"a plan of type {type(self.plan).__name__}",
                found="it is neither a Plan, a Setting nor the name of a file",
                cure="Give what trimtab.plan() returns, or the file that `trimtab plan --json` wrote.",
            )
        size = self.world.size
        # Without a plan and a job, the batch that the caller passes is the only limit.
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
        """The first LR scheduler, which is stepped with every update; None if there is none."""
        return next(iter(self.schedules.values()), None)

    @property
    def branches(self) -> int:
        """Number of rank groups that each compute one branch of the loss; 1 without branches."""
        return self.setting.mesh.branch

    # preparation

    def prepare(  # noqa: PLR0913 - each is optional
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
        clip: float | None = None,
        schedule: Any = None,
    ) -> tuple[Any, Any]:
        """Place, cast, distribute and compile a model, and return it with its optimizer.

        `optimizer` is an optimizer, or a function of the parameters that returns one. step() needs
        `loss(model, batch)`; `weight(batch)` is what it is a mean over, by default samples. `clip` is the
        maximum norm of the whole gradient. `schedule` is an LR scheduler, or a function of the optimizer that
        returns one; it is stepped with every update. Missing arguments come from the job.
        """
        if self._stepper.prepared is not None:
            raise WrongUse("run.prepare()", found="it was called twice", cure="Make a second Run.")
        prepared = self._stepper.prepare(
            prepare_module.PrepareRequest(
                job=self.job, model=model, optimizer=optimizer, loss=loss, weight=weight, clip=clip,
                schedule=schedule, setting=self.setting, world=self.world, groups=self.groups,
                estimate=self.plan.estimate if isinstance(self.plan, Plan) else None,
                pinned=isinstance(self.plan, Plan) and "micro_batch" in self.plan.policy.pins,
            )
        )  # fmt: skip
        return prepared.model, self.optimizer

    def loader(self, dataset: Any, seed: int = 0) -> Loader:
        """Return a loader of windows: this rank's samples of each global batch."""
        return Loader(
            dataset=dataset,
            order=build_sample_order(dataset, self.setting.global_batch, seed),
            rank=self.groups.data_rank,
            data_parallel=self.groups.data_parallel,
            shares=tuple(share.samples for share in self.setting.shares),
            workers=self.setting.workers,
            pin=self.torch_device.type == "cuda",
            collate=getattr(self.job, "collate", None),
            split=self._stepper.split_sequences,
        )

    def split_sequences(self, batch: Any) -> Any:
        """Return this rank's part of the sequences of a batch; the batch itself if sequences are whole."""
        if self.groups.context_parallel == 1:
            return batch
        return split_batch(self.job, batch, choose_part(self.setting))

    # one optimizer step

    def step(self, batch: Any) -> StepOutcome:
        """Run one optimizer step with a window of loader(), or with this rank's share of your own batch."""
        prepared = self._stepper.get_prepared()
        if prepared.loss is None:
            raise WrongUse(
                "run.step()",
                found="prepare() was given no loss, and the run no job",
                cure="Give prepare(loss=...), or use run.parts() and run.update().",
            )
        stepper = self._stepper
        for part in stepper.micro_batches(batch):
            with part:
                # A job with several losses computes them in turn.
                part.backward(stepper.get_prepared().loss(prepared.model, part.batch))  # type: ignore[misc]
        return self.update()

    def over(
        self, windows: Iterable[Window], settles: Callable[[Window], bool] | None = None
    ) -> Iterator[tuple[Window, StepOutcome]]:
        """Yield each window with the outcome of its step, in order; the results are the same as with step().

        If the device itself can skip an update, the host does not wait for the outcome: it launches the
        passes of the next window meanwhile, and sets `ahead`. After a window for which `settles` is true it
        does wait, so that you can save or evaluate the state after exactly that step.
        """
        stepper = self._stepper
        flight: StepInFlight | None = None
        for window in windows:
            passes = stepper.run_passes(window) if stepper.can_run_ahead() else None
            if flight is not None:
                before, flight = flight, None
                good = stepper.finish_in_flight(before)
                # Discard passes that were computed on top of a bad step.
                passes = passes if good else None
                self.ahead, self._was_restored = passes is not None, False
                yield before.window, self.update()
                self.ahead = False
                if self._was_restored:
                    # The run went back to a checkpoint: the loader will return this window again.
                    stepper.get_prepared().gradients.start_attempt()
                    continue
            if passes is None:
                yield window, self.step(window)
                continue
            stepper.start_update(passes)
            if settles is not None and settles(window):
                stepper.finish_in_flight(passes)
                yield window, self.update()
            else:
                flight = passes
        if flight is not None:
            stepper.finish_in_flight(flight)
            yield flight.window, self.update()

    def parts(self, batch: Any) -> Iterator[MicroBatch]:
        """Yield the micro-batches ("parts") of a step, again in other sizes until all ranks succeed."""
        if self._stepper.has_several_losses:
            raise WrongUse(
                "run.parts()",
                found="the job has several losses, which a step computes in turn",
                cure="Use run.step() instead.",
            )
        return self._stepper.micro_batches(batch)

    def update(self) -> StepOutcome:
        """Finish the step after the loop over parts(), and return its outcome."""
        outcome, self._stepper.outcome = self._stepper.outcome, None
        if outcome is None:
            raise WrongUse(
                "run.update()",
                found="there is no finished step",
                cure="Go through all of run.parts() before, once for every update.",
            )
        return outcome

    # collectives, memory and checkpoints

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """Reduce a number or a tensor over all ranks: sum, mean, max or min. All ranks call it."""
        if op not in _REDUCE_OPS:
            raise WrongUse(
                f"op {op!r}", found="there is no such operation", cure=f"Use {', '.join(_REDUCE_OPS)}."
            )
        if isinstance(value, torch.Tensor):
            reduced = value.detach().clone().to(self.torch_device)
        else:
            reduced = torch.tensor(value, dtype=torch.float64, device=self.torch_device)
        if self.size > 1:
            dist.all_reduce(reduced, op=_REDUCE_OPS[op])
        if op == "mean":
            reduced = reduced / self.size
        return reduced if isinstance(value, torch.Tensor) else type(value)(reduced.item())

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        if self.size > 1:
            optimizer_step.all_reduce_extreme(0.0, self.torch_device, self.size, least=True)

    def rollback_needed(self) -> bool:
        """Return whether a rank's optimizer was interrupted halfway in the last step. All ranks call it."""
        return bool(
            optimizer_step.all_reduce_extreme(
                float(self._stepper.rollback), self.torch_device, self.size, least=False
            )
        )

    def memory(self) -> dict[str, int]:
        """Return this process's bytes on its device, now and at the peak; empty on a CPU."""
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
        """Return this rank's step count, loss scale and micro-batch sizes, for a checkpoint."""
        stepper = self._stepper
        sizes = stepper.prepared.fitter.sizes.to_builtins() if stepper.prepared is not None else None
        return {"steps": stepper.steps, "scale": stepper.scale.to_builtins(), "sizes": sizes}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state(); the micro-batch is restored only if the planned one is the same."""
        stepper = self._stepper
        stepper.steps = int(state.get("steps", stepper.steps))
        if state.get("scale") and stepper.scale.value != 1.0:
            stepper.scale = LossScale.from_builtins(state["scale"])
        stepper.rollback, self._was_restored = False, True
        keeps_sizes, stepper.keeps_sizes = stepper.keeps_sizes, False
        if state.get("sizes") and stepper.prepared is not None and not keeps_sizes:
            saved = MicroBatchSizes.from_builtins(state["sizes"])
            if saved.planned == stepper.prepared.fitter.sizes.planned:
                stepper.prepared.fitter.sizes = saved

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device of this process."""
        return move_to_device(batch, self.torch_device)

    def use_micro_batch(self, size: int) -> None:
        """Use at most so many samples at once from the next step on."""
        fitter = self._stepper.get_prepared().fitter
        fitter.sizes = fitter.sizes.replace(current=min(size, fitter.sizes.current))

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Return this rank's loss of a batch that is on the device, for your own passes.

        In a pipeline all stages call it, without gradients; all but the last get zero.
        """
        prepared = self._stepper.get_prepared()
        assert prepared.loss is not None  # noqa: S101 - there is a job
        compute = prepared.loss
        if prepared.pipe is not None:
            return prepared.pipe.evaluate(lambda: compute(prepared.model, batch))
        loss: torch.Tensor = compute(prepared.model, batch)
        return loss

    def forward_backward(self, batch: Any) -> torch.Tensor | None:
        """Run forward and backward over a batch on the device, inside of quiet(); return the loss.

        In a pipeline all stages call it, and all but the last get None.
        """
        prepared = self._stepper.get_prepared()
        assert prepared.loss is not None  # noqa: S101 - there is a job
        compute = prepared.loss

        def loss() -> torch.Tensor:
            with self.computing():
                value: torch.Tensor = compute(prepared.model, batch)
            return value

        if prepared.pipe is not None:
            prepared.pipe.gradients = prepared.gradients
            return prepared.pipe.forward_backward(loss)
        total = loss()
        total.backward()
        return total.detach()

    def find_stage(self, module: str) -> tuple[int, int]:
        """Return the pipeline stage of a module of this rank, and the number of stages; 0 and 1 without."""
        pipe = self._stepper.get_prepared().pipe
        return (0, 1) if pipe is None else pipe.find_stage(module)

    def weight_of(self, batch: Any) -> float:
        """Return the weight of a batch: what its loss is a mean over."""
        prepared = self._stepper.get_prepared()
        return float(samples_in(batch) if prepared.weight is None else prepared.weight(batch))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast as in a step, for your own passes."""
        with contextlib.ExitStack() as stack:
            if self._stepper.autocast is not None:
                stack.enter_context(torch.autocast(self.torch_device.type, dtype=self._stepper.autocast))
            yield

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Run your own passes without gradient reduction or compilation; gradients are dropped.

        Sharded parameters are still gathered: all ranks must run the same passes.
        """
        prepared = self._stepper.get_prepared()
        if prepared.compiling is not None:
            prepared.compiling.disable()
        try:
            prepared.gradients.start_attempt()
            yield
        finally:
            prepared.gradients.start_attempt()

    def close(self) -> None:
        """Leave the process group; the model stays usable."""
        prepared = self._stepper.prepared
        if prepared is not None:
            prepared.gradients.close()
            if prepared.compiling is not None:
                prepared.compiling.disable()
        if self._connects:
            process_group.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
