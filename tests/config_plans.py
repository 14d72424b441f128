"""Plans to write into configs: one of every kind, and a grid that has every pair of choices."""

from __future__ import annotations

from itertools import cycle, product

from trimtab.spec import (
    Allocator,
    Band,
    BaseFormat,
    Estimate,
    Footprint,
    LossForm,
    Mesh,
    Offload,
    OptimizerImplementation,
    OptimizerRule,
    Plan,
    Precision,
    RankPlacement,
    Recompute,
    Setting,
    Strategy,
    Workload,
)

ESTIMATE = Estimate(
    allocated_bytes=1,
    reserved_bytes=1,
    process_bytes=1,
    parts=Footprint(),
    band=Band(low_bytes=1, high_bytes=1),
)


def plan(setting: Setting, nodes: int = 1, *, seq: int | None = None, job: str = "job.py:Mine") -> Plan:
    """A plan for that many nodes, of a job with samples of `seq` tokens."""
    places = tuple(
        RankPlacement(node=index * nodes // setting.gpus, node_name="n", device=index, name="T4")
        for index in range(setting.gpus)
    )
    workload = Workload(name="mine", global_batch=setting.global_batch, seq=seq, sample_length=seq)
    return Plan(job=job, choice=setting, estimate=ESTIMATE, places=places, workload=workload)


LAYOUTS = (
    (Strategy.SINGLE, Mesh(), 1),
    (Strategy.DDP, Mesh(dp_replicate=4), 1),
    (Strategy.FSDP, Mesh(dp_shard=8), 2),
    (Strategy.HSDP, Mesh(dp_replicate=2, dp_shard=4), 2),
)
SIZES = ((8, 4, 4096), (1, 1, 512), (3, 5, None), (20, 2, 2048), (1, 16, 77))
"""Micro-batch, accumulation and sequence length."""


OFFLOADS = (
    (),
    tuple(Offload),
    (Offload.OPTIMIZER,),
    (),
    (Offload.PARAMS, Offload.OPTIMIZER),
    (Offload.ACTIVATIONS,),
    (Offload.PARAMS,),
)


def _grid() -> tuple[Plan, ...]:
    sizes, workers = cycle(SIZES), cycle((0, 6, 2))
    optimizers, allocators = cycle(OptimizerImplementation), cycle((*Allocator, Allocator.DEFAULT))
    bases, rules = cycle((*BaseFormat, BaseFormat.NONE)), cycle((OptimizerRule.JOB, *OptimizerRule))
    losses, offloads = cycle((*LossForm, LossForm.WHOLE)), cycle(OFFLOADS)
    found = []
    for (row, (strategy, mesh, nodes)), (column, precision) in product(
        enumerate(LAYOUTS), enumerate(Precision)
    ):
        micro, rounds, seq = next(sizes)
        setting = Setting(
            strategy=strategy,
            mesh=mesh,
            micro_batch=micro,
            accumulation=rounds,
            global_batch=micro * rounds * mesh.data_parallel,
            precision=precision,
            # Diagonals: each meets every layout and every precision.
            recompute=tuple(Recompute)[(row + column) % 3],
            compile=bool((row + column) % 2),
            sync_batchnorm=row > 0 and column == row,
            base=next(bases),
            loss=next(losses),
            offload=next(offloads),
            optimizer=next(optimizers),
            optimizer_rule=next(rules),
            optimizer_in_backward=mesh.size == 1 and not (row + column) % 2,
            allocator=next(allocators),
            workers=next(workers),
        )
        found.append(plan(setting, nodes, seq=seq))
    return tuple(found)


GRID = _grid()
