"""One rank of a pipeline, measured alone: the trainer's own runner, with messages that go nowhere.

The rank runs the actions of its schedule in order, with as many micro-batches in flight as in a real
pipeline. What it would receive is an empty tensor of the right shape. So its memory is that of a real rank,
and its time is the time for which such a rank computes.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trimtab.engine import step as steps
from trimtab.engine.build import find_entries, use_build_defaults
from trimtab.engine.optimizer import choose_implementation, make_optimizers
from trimtab.engine.pipeline_stage import keep_stage
from trimtab.engine.precision import autocast_dtype
from trimtab.training.pipeline import PipelineRunner, StageMessage
from trimtab.training.prepare import list_reduced
from trimtab.training.process_group import HoldingRanks, RankGroups

if TYPE_CHECKING:
    from torch import nn

    from trimtab.engine.pipeline_stage import BlockRelay, StageSplit
    from trimtab.spec import Setting
    from trimtab.training.pipeline import PassKey

WARM_UP, TIMED = 2, 5


class LocalRunner(PipelineRunner):
    """Runs the passes of one rank; sends nothing, and receives tensors without values."""

    def receive(self, local: torch.Tensor) -> torch.Tensor:
        """Return the input of a stage, as large as on a real rank."""
        self._received = True
        received = torch.empty_like(local.detach()).requires_grad_()
        self._owed_gradients.add(self._pass)
        self._inputs[self._pass] = received
        return received

    def _send_tensor(self, *_: Any, **__: Any) -> None:
        """Send nothing."""

    def _receive_tensor(self, is_gradient: bool, key: PassKey) -> StageMessage:
        del is_gradient
        return StageMessage(torch.empty_like(self._outputs[key].detach()))


class LocalStage:
    """A job's pipeline rank, ready for its steps."""

    def __init__(self, job: Any, setting: Setting, stage: int, device: str) -> None:
        self.setting, self.device = setting, device
        self.job = job
        groups = RankGroups(size=setting.gpus, stage=stage, stages=setting.mesh.pp)
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.gpus)
        self.pipe = LocalRunner(groups, torch.device(device), setting.schedule, setting.virtual_stages)

        def install(model: nn.Module, split: StageSplit) -> BlockRelay:
            self.pipe.relay = keep_stage(
                model,
                stage,
                setting.mesh.pp,
                self.pipe.receive,
                virtual_stages=setting.virtual_stages,
                strict=False,
                split=split,
                form=steps.find_stand_in_form(setting, device),
            ).relay
            if self.pipe.weight_gradients is not None:
                self.pipe.weight_gradients.install(model)
            return self.pipe.relay

        def find_holding(name: str) -> HoldingRanks:
            return HoldingRanks(None, max(1, len(self.pipe.relay.holders.find(name))), 0)

        # The GPU makes values faster than the host, where a trainer builds the model.
        with use_build_defaults(setting.dtypes, device):
            model = job.model().cpu()
        if device == "cuda":
            torch.cuda.empty_cache()
        state = steps.arrange_model(
            model,
            setting,
            device,
            entries=find_entries(job, model),
            optimizers=lambda named: make_optimizers(
                job, named, choose_implementation(model, setting.optimizer), setting.optimizer_rule
            ),
            install_stage=install,
            reduced=lambda model: list_reduced(model, find_holding),
            follow=steps.make_meta_loss(job, setting),
        )
        self.state = steps.PreparedJob(**vars(state), job=job, setting=setting, device=device)

    def run_step(self) -> None:
        """Run all passes of a step, and update the weights."""
        (phase,) = self.state.phases
        rounds = self.setting.accumulation
        micro_batches = [
            _Numbered(number, steps.make_batch(self.job, self.setting, self.device))
            for number in range(rounds)
        ]
        half = autocast_dtype(self.setting)

        def forward(micro_batch: _Numbered, place: int) -> torch.Tensor:
            with torch.autocast(self.device, dtype=half, enabled=half is not None):
                return self.pipe.relay.run(lambda: self.job.loss(self.state.model, micro_batch.batch), place)

        def backward(_: _Numbered, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            if gradient is None:
                (output / rounds).backward()  # type: ignore[no-untyped-call]
            else:
                output.backward(gradient)  # type: ignore[no-untyped-call]

        phase.gradients.start_attempt()
        self.pipe.gradients = phase.gradients
        failure = self.pipe.run(micro_batches, forward, backward)
        if failure is not None:
            raise torch.OutOfMemoryError(failure.why)
        phase.gradients.finish_attempt(None, rounds)
        steps.update_weights(self.state, phase, 1.0, None)


class _Numbered:
    """A micro-batch with its number."""

    def __init__(self, number: int, batch: Any) -> None:
        self.number, self.batch = number, batch


def measure_stage(job: Any, setting: Setting, stage: int) -> dict[str, Any]:
    """Return the memory of a rank and the seconds for which it computes, on this GPU."""
    rank = LocalStage(job, setting, stage, "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WARM_UP + TIMED):
        torch.cuda.synchronize()
        start = time.perf_counter()
        rank.run_step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_s": statistics.median(times[WARM_UP:]),
        "layers": list(rank.pipe.relay.layers),
    }
