"""The loss on samples that nothing is learnt from, shared over ranks."""

from __future__ import annotations

import gc
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset, default_collate

from trimtab.errors import JobFailed
from trimtab.jobs.job import samples_in
from trimtab.strategies import strategy_of
from trimtab.training.loading import cut
from trimtab.training.order import bounds
from trimtab.training.recovery import is_out_of_memory

if TYPE_CHECKING:
    from trimtab.training.run import Run


def validation_of(job: Any) -> Any:
    """The job's dataset for evaluation; None where it has none."""
    make = getattr(job, "validation", None)
    dataset = make() if callable(make) else None
    if dataset is None:
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        raise JobFailed(
            "validation()",
            found=f"a {type(dataset).__name__} has no samples that can be counted and shared out",
            cure="Return a dataset with __len__ and __getitem__(index), or None.",
        )
    return dataset


def rounds(samples: int, ranks: int, size: int) -> int:
    """Passes that the rank with the most samples makes; sharded ranks must all make as many.

    >>> rounds(10, 4, 2), rounds(3, 4, 2)
    (2, 1)
    """
    places = bounds(samples, ranks)
    most = max(stop - start for start, stop in pairwise(places))
    return -(-most // size)


def evaluate(run: Run, dataset: Any) -> float:
    """The mean loss over a dataset, weighted as in training; not a number where none of it counts.

    Memory is given back afterwards.
    """
    total, weight = _shared(run, dataset)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    whole = run.all_reduce(torch.tensor([total, weight], dtype=torch.float64))
    # Every branch and every stage counted the same samples.
    mesh = run.setting.mesh
    return float(whole[0]) * mesh.branch * mesh.pp / float(whole[1]) if whole[1] else nan


def _shared(run: Run, dataset: Any) -> tuple[float, float]:
    """The weighted loss of this rank's samples, and their weight."""
    ranks, size = run.groups.data_parallel, run.micro_batch
    places = bounds(len(dataset), ranks)
    mine = range(places[run.groups.data_rank], places[run.groups.data_rank + 1])
    reader: DataLoader[Any] = DataLoader(
        Subset(dataset, mine),
        batch_size=size,
        num_workers=run.setting.workers if len(mine) > size else 0,
        collate_fn=getattr(run.job, "collate", None) or default_collate,
        generator=torch.Generator(),
    )
    total = weight = 0.0
    modes = {name: one.training for name, one in run.model.named_modules()}
    run.model.eval()
    try:
        with torch.no_grad(), run.quiet():
            for batch in reader:
                counted = float(run.weight_of(batch))
                found = _loss(run, batch)
                # A mean over nothing is not a number, and neither is nought times it.
                total += found * counted if counted else 0.0
                weight += counted
            for _ in range(rounds(len(dataset), ranks, size) - len(reader)):
                _loss(run, (getattr(run.job, "collate", None) or default_collate)([dataset[0]]))
    finally:
        for name, one in run.model.named_modules():
            one.training = modes[name]
    return total, weight


def _loss(run: Run, batch: Any) -> float:
    """The loss of a batch; in halves where it does not fit."""
    try:
        with run.computing():
            return float(run.loss_of(run.on_device(batch)))
    except Exception as error:
        samples = samples_in(batch)
        # Ranks that compute together, each with a share of the weights, cannot take halves alone.
        shares = strategy_of(run.setting).weight_shares(run.setting.mesh) or 1
        if not is_out_of_memory(error) or samples < 2 or shares > 1:  # noqa: PLR2004 - halves
            raise
    gc.collect()
    torch.cuda.empty_cache()
    half = samples // 2
    parts = [cut(batch, 0, half), cut(batch, half, samples)]
    weights = [float(run.weight_of(one)) for one in parts]
    known = [_loss(run, one) * share for one, share in zip(parts, weights, strict=True) if share]
    return sum(known) / sum(weights) if known else nan
