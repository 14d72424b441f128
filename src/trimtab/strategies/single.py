"""One device, which holds the whole model and talks to nobody."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trimtab.spec import Allocator, Mesh, Schedule, Strategy
from trimtab.strategies.base import ParallelStrategy, Refusal, Traffic, Wrapping, usual_strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from trimtab.spec import Setting


class SingleStrategy(ParallelStrategy):
    """One device."""

    word = Strategy.SINGLE
    wrapping = Wrapping.WHOLE
    complexity = 0
    probe_order = 1
    needs_several_gpus = False
    degrees = (False, False)
    needs_config_key = False
    also_spelt = (Strategy.DDP,)
    # One process runs alone and under DDP alike.

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return one device, however many there are."""
        return Mesh()

    def meshes(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Iterator[Mesh]:
        """Yield the mesh of one device: a plan leaves no device idle."""
        if gpus == 1:
            yield Mesh()

    def pin_conflicts(self, pins: Mapping[str, Any], available: int, branches: int) -> list[Refusal]:
        """List a number of GPUs that is more than one."""
        gpus = pins.get("gpus")
        if (gpus or 1) > 1:
            return [Refusal(f"strategy=single runs on one GPU, and gpus={gpus}", "leave one of the two out")]
        return []

    def pinned_data_parallel(self, gpus: int | None) -> int | None:
        """Return one rank, whatever is pinned."""
        return 1

    def resized(self, mesh: Mesh, ranks: int, *, nodes: int = 1, branches: int = 0) -> tuple[Strategy, Mesh]:
        """Return replicas of what one device holds."""
        return usual_strategy(ranks)

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return itself."""
        return self.word, mesh

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """Return the setting itself."""
        return [setting]

    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return one."""
        return 1

    def exposed_s(self, traffic: Traffic) -> float:
        """Return zero: nothing is sent."""
        return 0.0

    def explain(self, mesh: Mesh) -> str:
        """Say that there is nothing to spread."""
        return "one GPU needs none"


def one_micro_batch(setting: Setting) -> Setting:
    """Return one micro-batch of the setting on one device."""
    return setting.replace(
        strategy=Strategy.SINGLE,
        mesh=Mesh(),
        accumulation=1,
        global_batch=setting.micro_batch,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        shares=(),
    )


@lru_cache(maxsize=2**16)
def one_replica(setting: Setting) -> Setting:
    """Return the micro-batches of one replica of the setting, on one device."""
    return setting.replace(
        strategy=Strategy.SINGLE,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        mesh=Mesh(),
        global_batch=setting.micro_batch * setting.accumulation,
        allocator=Allocator.DEFAULT,
        shares=(),
    )
