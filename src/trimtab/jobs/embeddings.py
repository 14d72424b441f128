"""Jobs whose loss compares samples: embed() and loss_of() in place of loss()."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimtab.errors import JobFailed

LOW = (torch.bfloat16, torch.float16)
"""Embeddings in these dtypes are compared in float32."""


class Embeddings(NamedTuple):
    """What embed() returned, as a flat list of tensors and the structure to rebuild it."""

    tensors: list[torch.Tensor]
    structure: Any

    def rebuilt(self) -> Any:
        """The same tensors in the structure that embed() returned."""
        return tree_unflatten(self.tensors, self.structure)


def takes_model(job: Any) -> bool:
    """Whether loss_of() has the form loss_of(model, embeddings)."""
    required = [
        parameter
        for parameter in inspect.signature(job.loss_of).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    return len(required) > 1


def embed(job: Any, model: Any, batch: Any) -> Embeddings:
    """The embeddings of a batch; raises where they are no tensors with samples in their first dimension."""
    returned = job.embed(model, batch)
    tensors, structure = tree_flatten(returned)
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        kinds = ", ".join(sorted({type(tensor).__name__ for tensor in tensors})) or "nothing"
        raise JobFailed(
            "embed()", found=f"it returned {kinds}", cure="Return a tensor, or a dict or tuple of tensors."
        )
    lengths = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(lengths) > 1 or None in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise JobFailed(
            "embed()",
            found=f"it returned tensors of shapes {shapes}",
            cure="Let the first dimension of every tensor count the samples of the batch.",
        )
    return Embeddings(tensors, structure)


def check_samples(embeddings: Embeddings, samples: int) -> None:
    """Raise where embed() returned more or fewer rows than the batch has samples."""
    rows = embeddings.tensors[0].shape[0]
    if rows != samples:
        raise JobFailed(
            "embed()",
            found=f"it returned {rows} rows for {samples} samples",
            cure="Return one row per sample; several views of it go into a second dimension or tensor.",
        )


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as loss_of() gets it: half precision becomes float32."""
    return tensor.float() if tensor.dtype in LOW else tensor


def loss_of(job: Any, model: Any, embeddings: Embeddings) -> torch.Tensor:
    """The job's loss of embeddings, in float32 or better, outside of autocast."""
    exact = Embeddings([comparable(tensor) for tensor in embeddings.tensors], embeddings.structure)
    device = embeddings.tensors[0].device.type
    with torch.autocast(device, enabled=False):
        given = exact.rebuilt()
        loss: torch.Tensor = job.loss_of(model, given) if takes_model(job) else job.loss_of(given)
    return loss


def direct_loss(job: Any, model: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch that is not cut: loss_of(embed(model, batch))."""
    return loss_of(job, model, embed(job, model, batch))
