"""Evaluate a run on its validation set: the mean loss, or the metrics of the job's own evaluate().

All ranks evaluate together, each on its share of the samples. Means are weighted as in training.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset, default_collate

from trimtab.engine.tensor_parallel import gather_loss
from trimtab.errors import JobFailed
from trimtab.jobs.job import samples_in
from trimtab.strategies import strategy_of
from trimtab.training.loading import rank_slice_bounds, slice_batch
from trimtab.training.oom_recovery import is_out_of_memory
from trimtab.training.task import gather_values

if TYPE_CHECKING:
    from trimtab.training.run import Run

    Metrics = dict[str, float]

LOSS = "loss"
"""Metric that chooses the best checkpoint: lower is better."""


def build_validation_set(job: Any) -> Any:
    """Return the job's dataset for evaluation; None if it has none."""
    make = getattr(job, "validation", None)
    dataset = make() if callable(make) else None
    if dataset is None:
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        raise JobFailed(
            "validation()",
            found=f"a {type(dataset).__name__} is empty, or has no __len__ or __getitem__",
            cure="Return a dataset with __len__ and __getitem__(index), or None.",
        )
    return dataset


def count_passes(samples: int, ranks: int, size: int) -> int:
    """Return the passes of the rank with the most samples; sharded ranks must all run as many.

    >>> count_passes(10, 4, 2), count_passes(3, 4, 2)
    (2, 1)
    """
    bounds = rank_slice_bounds(samples, ranks)
    most = max(stop - start for start, stop in pairwise(bounds))
    return -(-most // size)


def evaluate_run(run: Run, dataset: Any) -> Metrics:
    """Return the mean of every metric over a dataset, weighted as in training; NaN if its weight is zero.

    Without the job's own evaluate(), the loss is the only metric. All ranks call it. It releases cached
    memory afterwards.
    """
    totals, weight = _sum_own_metrics(run, dataset)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    names = sorted(totals)
    if len(set(map(tuple, gather_values(run.world, names, everyone=True)))) > 1:
        raise _names_error(names, "those of another rank")
    sums = run.all_reduce(torch.tensor([weight, *map(totals.get, names)], dtype=torch.float64)).tolist()
    # Every branch and every stage counted the same samples, each for its own part of the loss. Ranks that
    # split layers counted both the samples and the loss.
    mesh = run.setting.mesh
    scale = mesh.branch * mesh.pp / sums[0] if sums[0] else nan
    return {name: total * scale for name, total in zip(names, sums[1:], strict=True)}


def _sum_own_metrics(run: Run, dataset: Any) -> tuple[Metrics, float]:
    """Return the weighted metrics of this rank's samples, and their weight."""
    ranks, size = run.groups.data_parallel, run.micro_batch
    bounds = rank_slice_bounds(len(dataset), ranks)
    mine = range(bounds[run.groups.data_rank], bounds[run.groups.data_rank + 1])
    collate = getattr(run.job, "collate", None) or default_collate
    reader: DataLoader[Any] = DataLoader(
        Subset(dataset, mine),
        batch_size=size,
        num_workers=run.setting.workers if len(mine) > size else 0,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    totals: Metrics = {}
    weight = 0.0
    modes = {name: module.training for name, module in run.model.named_modules()}
    run.model.eval()
    try:
        with torch.no_grad(), run.quiet():
            for whole_batch in reader:
                batch = run.split_sequences(whole_batch)
                batch_weight = float(run.weight_of(batch))
                _add_metrics(totals, _evaluate_batch(run, batch), batch_weight)
                weight += batch_weight
            for _ in range(count_passes(len(dataset), ranks, size) - len(reader)):
                _add_metrics(totals, _evaluate_batch(run, run.split_sequences(collate([dataset[0]]))), 0.0)
    finally:
        for name, module in run.model.named_modules():
            module.training = modes[name]
    return totals, weight


def _add_metrics(totals: Metrics, metrics: Metrics, weight: float) -> None:
    """Add weighted metrics to totals; raise if their names differ from those of earlier batches."""
    if totals and totals.keys() != metrics.keys():
        raise _names_error(sorted(metrics), f"those of an earlier batch, {', '.join(sorted(totals))}")
    for name, value in metrics.items():
        # A mean over nothing is NaN, and so is zero times NaN.
        totals[name] = totals.get(name, 0.0) + (value * weight if weight else 0.0)


def _names_error(names: list[str], others: str) -> JobFailed:
    return JobFailed(
        "evaluate()",
        found=f"it returned {', '.join(names)}, which are not {others}",
        cure="Return the same names for every batch.",
    )


def _evaluate_batch(run: Run, batch: Any) -> Metrics:
    """Return the metrics of a batch; compute them in halves if it does not fit."""
    try:
        with run.computing():
            return _compute_metrics(run, run.on_device(batch))
    except Exception as error:
        samples = samples_in(batch)
        # Ranks with shards of weights or parts of sequences run every pass together: no rank can split its
        # batch alone.
        shares = strategy_of(run.setting).weight_shares(run.setting.mesh) or 1
        alone = shares == 1 and run.groups.context_parallel == 1
        if not is_out_of_memory(error) or samples < 2 or not alone:  # noqa: PLR2004 - halves
            raise
    gc.collect()
    torch.cuda.empty_cache()
    half = samples // 2
    halves = [slice_batch(batch, 0, half), slice_batch(batch, half, samples)]
    weights = [float(run.weight_of(half_batch)) for half_batch in halves]
    totals: Metrics = {}
    for half_batch, weight in zip(halves, weights, strict=True):
        _add_metrics(totals, _evaluate_batch(run, half_batch), weight)
    return {name: total / sum(weights) if sum(weights) else nan for name, total in totals.items()}


def _compute_metrics(run: Run, batch: Any) -> Metrics:
    """Return the metrics of a batch on the device: what the job's evaluate() returns, or the loss."""
    evaluate = getattr(run.job, "evaluate", None)
    result = run.loss_of(batch) if evaluate is None else evaluate(run.model, batch)
    metrics = result if isinstance(result, dict) else {LOSS: result}
    metrics = {name: gather_loss(value) for name, value in metrics.items()}
    wrong = [name for name, value in metrics.items() if not _is_scalar(value)]
    if not metrics or wrong:
        found = f"{wrong[0]} is a {type(metrics[wrong[0]]).__name__}, not a number" if wrong else "no metric"
        raise JobFailed(
            "evaluate()" if evaluate is not None else "loss()",
            found=found,
            cure="Return a number, or a dict of names and numbers: means over the samples of the batch.",
        )
    return {str(name): float(value) for name, value in metrics.items()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
