"""Compute the loss of jobs that compare samples, with embed() and loss_of() instead of loss()."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimtab.errors import JobFailed

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Embeddings in these dtypes are compared in float32."""


class Embeddings(NamedTuple):
    """The tensors that embed() returned as a flat list, and the structure to rebuild it."""

    tensors: list[torch.Tensor]
    structure: Any

    def rebuild(self) -> Any:
        """Return the tensors in the structure that embed() returned."""
        return tree_unflatten(self.tensors, self.structure)


def loss_takes_model(job: Any) -> bool:
    """Return whether loss_of() has the form loss_of(model, embeddings)."""
    required = [
        parameter
        for parameter in inspect.signature(job.loss_of).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    return len(required) > 1


def compute_embeddings(job: Any, model: Any, batch: Any) -> Embeddings:
    """Return the embeddings of a batch; raise JobFailed unless samples are the first dimension of each."""
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
            cure="Make the samples of the batch the first dimension of every tensor.",
        )
    return Embeddings(tensors, structure)


def check_samples(embeddings: Embeddings, samples: int) -> None:
    """Raise JobFailed if embed() returned more or fewer rows than the batch has samples."""
    rows = embeddings.tensors[0].shape[0]
    if rows != samples:
        raise JobFailed(
            "embed()",
            found=f"it returned {rows} rows for {samples} samples",
            cure="Return one row per sample; put several views of it into a second dimension or tensor.",
        )


def to_comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor for loss_of(): half precision becomes float32."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def compute_loss(job: Any, model: Any, embeddings: Embeddings) -> torch.Tensor:
    """Return the job's loss of embeddings, in float32 or float64, outside of autocast."""
    comparable = Embeddings([to_comparable(tensor) for tensor in embeddings.tensors], embeddings.structure)
    device = embeddings.tensors[0].device.type
    with torch.autocast(device, enabled=False):
        rebuilt = comparable.rebuild()
        loss: torch.Tensor = job.loss_of(model, rebuilt) if loss_takes_model(job) else job.loss_of(rebuilt)
    return loss


def direct_loss(job: Any, model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch without gradient caching: loss_of(embed(model, batch))."""
    return compute_loss(job, model, compute_embeddings(job, model, batch))
