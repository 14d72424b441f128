"""Keeps a run from cutting a batch whose loss is not the mean over its parts: that is another training.

A job says it in `additive`, or the first samples of the run show it: their loss is compared with those of
their halves (engine/additive.py). A run that does not cut the batch is checked when it runs out of memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.additive import HALF_ROUNDING, SAMPLES, Question, judge, rounding_of
from trimtab.errors import WrongUse
from trimtab.jobs.job import stated_additive
from trimtab.spec import BatchLoss
from trimtab.training import status
from trimtab.training.batches import on_device
from trimtab.training.recovery import is_out_of_memory

if TYPE_CHECKING:
    from trimtab.training import preparing
    from trimtab.training.loading import Window
    from trimtab.training.parts import StepRunner

STATED = "the job says additive = False"


class Divisible:
    """Whether the batch of a run may be cut; found out when it matters."""

    def __init__(self, stepper: StepRunner, job: Any) -> None:
        self._stepper = stepper
        stated = None if job is None else stated_additive(job)
        self._found = None if stated is None else BatchLoss(additive=stated, stated=True, why=STATED)

    @property
    def is_cut(self) -> bool:
        """Whether the setting cuts the batch, over micro-batches or ranks."""
        setting = self._stepper.setting
        return setting.accumulation > 1 or self._stepper.groups.data_parallel > 1

    def check_statement(self) -> None:
        """Refuse to cut the batch of a job that says it cannot be; before anything is built."""
        if self.is_cut and self._found is not None and self._found.additive is False:
            raise refusal(self._stepper, self._found)

    def check_first(self, ready: preparing.Prepared, window: Window) -> None:
        """Before the first step of a run that cuts the batch; all ranks call it."""
        if self._found is not None or not self.is_cut or ready.loss is None or ready.pipe is not None:
            return
        self._found = found = self._look(ready, window)
        refused = found.additive is False
        stepper = self._stepper
        if status.agree(float(refused), stepper.device, stepper.world.size, least=False):
            elsewhere = BatchLoss(additive=False, why="so the samples of another rank show")
            raise refusal(stepper, found if refused else elsewhere)

    def why_whole(self, ready: preparing.Prepared, window: Window) -> str:
        """Why a batch that was in one piece so far may not be cut; empty where it may."""
        if self.is_cut or ready.loss is None or ready.pipe is not None:
            return ""
        if self._found is None:
            self._found = self._look(ready, window)
        return self._found.why if self._found.additive is False else ""

    def _look(self, ready: preparing.Prepared, window: Window) -> BatchLoss:
        """The verdict by the first samples of this rank; unknown where they are too few or do not run."""
        stepper = self._stepper
        samples = min(SAMPLES, window.size, max(2, ready.fitting.sizes.current))
        enough = samples >= 2  # noqa: PLR2004 - halves
        if ready.wiring.equal_parts:
            # Sharded ranks make the same passes, or none of them makes any.
            enough = bool(status.agree(float(enough), stepper.device, stepper.world.size, least=True))
        if not enough:
            return BatchLoss()
        if ready.compiling is not None:
            ready.compiling.off()
        given = on_device(window.part(0, samples).batch, stepper.device)
        compute = ready.loss
        assert compute is not None  # noqa: S101 - the caller has looked
        question = Question(
            model=ready.model,
            loss=compute,
            weight=ready.weight,
            cast=self._cast,
            after=getattr(ready.wiring, "after_forward", None),
        )
        ready.buffers.begin()
        try:
            rounding = HALF_ROUNDING if stepper.setting.dtypes.is_narrow else rounding_of(ready.model, None)
            found = judge(
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


def refusal(stepper: StepRunner, found: BatchLoss) -> WrongUse:
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
