"""Gradient caching: exact micro-batched steps for losses that compare the samples of a batch.

A job gives `embed(model, batch)` and `loss_of(embeddings)`. A step then has three phases:

1. embed every micro-batch without gradients, and store the embeddings;
2. compute the loss of all embeddings of the global batch, and its gradient with respect to them;
3. embed every micro-batch again, now with gradients, and run the backward pass from the stored gradient.

The gradient is that of one large batch: d loss / d weights = sum over samples of
(d loss / d embedding) x (d embedding / d weights). See Gao et al. 2021, arXiv:2101.06983.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimtab.errors import JobFailed
from trimtab.jobs.embeddings import (
    Embeddings,
    compute_embeddings,
    compute_loss,
    loss_takes_model,
    to_comparable,
)
from trimtab.jobs.job import has_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn


class GlobalBatchLoss(NamedTuple):
    """Loss of a global batch, with its gradients."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    """With respect to each tensor of the embeddings; None for a tensor without gradient."""
    parameters: list[tuple[Any, torch.Tensor]]
    """Parameters that loss_of() itself uses, each with its gradient."""


def compute_global_loss(
    job: Any, model: nn.Module, embeddings: Embeddings, check: Callable[[Any], None]
) -> GlobalBatchLoss:
    """Compute the loss of all embeddings of a global batch, and its gradients.

    The gradients are those of the embeddings and of the parameters that loss_of() uses. `check` raises an
    error if the result is not a loss.
    """
    leaves = [
        to_comparable(tensor).detach().requires_grad_(tensor.is_floating_point())
        for tensor in embeddings.tensors
    ]
    with torch.enable_grad(), _collect_loss_parameters(model, used=loss_takes_model(job)) as parameters:
        loss = compute_loss(job, model, Embeddings(leaves, embeddings.structure))
        check(loss)
        differentiable = [leaf for leaf in leaves if leaf.requires_grad]
        owners, used = [owner for owner, _ in parameters], [tensor for _, tensor in parameters]
        gradients = torch.autograd.grad(loss, [*differentiable, *used], allow_unused=True)
    by_leaf = dict(zip(map(id, differentiable), gradients, strict=False))
    return GlobalBatchLoss(
        loss.detach(),
        [by_leaf.get(id(leaf)) for leaf in leaves],
        [
            (owner, gradient)
            for owner, gradient in zip(owners, gradients[len(differentiable) :], strict=True)
            if gradient is not None
        ],
    )


class _GatheringParameters(dict[str, Any]):
    """Parameters of a module; a sharded parameter is gathered when loss_of() first reads it.

    All ranks read the same parameters in the same order, so that their collectives match.
    """

    def __init__(self, own: dict[str, Any], gathered: dict[int, tuple[Any, torch.Tensor]]) -> None:
        super().__init__(own)
        self._gathered = gathered

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if not hasattr(parameter, "full_tensor"):
            return parameter
        if id(parameter) not in self._gathered:
            full = parameter.full_tensor().detach().requires_grad_(parameter.requires_grad)
            self._gathered[id(parameter)] = (parameter, full)
        return self._gathered[id(parameter)][1]


class _LossParameters:
    """Parameters that a loss may use, each with its full tensor; sharded ones only after they were read."""

    def __init__(self, plain: list[Any], gathered: dict[int, tuple[Any, torch.Tensor]]) -> None:
        self._plain = plain
        self._gathered = gathered

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        yield from ((parameter, parameter) for parameter in self._plain)
        yield from (pair for pair in self._gathered.values() if pair[1].requires_grad)


@contextlib.contextmanager
def _collect_loss_parameters(model: nn.Module, *, used: bool) -> Iterator[Iterable[tuple[Any, torch.Tensor]]]:
    """Yield the trainable parameters that loss_of() may use, and gather sharded ones on access."""
    if not used:
        yield []
        return
    gathered: dict[int, tuple[Any, torch.Tensor]] = {}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in trainable if not hasattr(parameter, "full_tensor")]
    owners = [module for module in model.modules() if module.__dict__["_parameters"]]
    originals = [module.__dict__["_parameters"] for module in owners]
    try:
        for module, own in zip(owners, originals, strict=True):
            module.__dict__["_parameters"] = _GatheringParameters(own, gathered)
        yield _LossParameters(plain, gathered)
    finally:
        for module, own in zip(owners, originals, strict=True):
            module.__dict__["_parameters"] = own


def make_surrogate_loss(embeddings: Embeddings, gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """Return a scalar whose gradient with respect to the embeddings is `gradients`: the sum of products."""
    terms = [
        (to_comparable(tensor) * gradient).sum()
        for tensor, gradient in zip(embeddings.tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if not terms:
        raise JobFailed(
            "embed() and loss_of()",
            found="the embeddings that the loss uses do not depend on any trainable parameter",
            cure="Let loss_of() use what embed() computes with the model.",
        )
    return torch.stack(terms).sum() if len({term.dtype for term in terms}) == 1 else sum(terms[1:], terms[0])


def make_zero_gradients(
    embeddings: Embeddings, like: list[torch.Tensor | None] | None = None
) -> list[torch.Tensor | None]:
    """Return zero gradients for samples of weight 0; `like` is None for tensors without gradient."""
    templates = like or [tensor if tensor.requires_grad else None for tensor in embeddings.tensors]
    return [
        None if template is None else torch.zeros_like(to_comparable(tensor))
        for tensor, template in zip(embeddings.tensors, templates, strict=True)
    ]


def join_embeddings(parts: list[Embeddings]) -> Embeddings:
    """Concatenate the embeddings of several micro-batches."""
    columns = zip(*(part.tensors for part in parts), strict=True)
    return Embeddings([torch.cat(list(column)) for column in columns], parts[0].structure)


def slice_gradients(gradients: list[torch.Tensor | None], begin: int, end: int) -> list[torch.Tensor | None]:
    """Return the gradients of samples `begin` to `end`."""
    return [None if gradient is None else gradient[begin:end] for gradient in gradients]


def add_gradients(parameters: list[tuple[Any, torch.Tensor]], scale: float = 1.0) -> None:
    """Add to the gradients of parameters; for a sharded parameter, only this rank's shard."""
    for parameter, gradient in parameters:
        scaled = gradient.to(parameter.dtype) * scale
        if hasattr(parameter, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            # Every rank has the full gradient, so nothing is sent.
            scaled = distribute_tensor(
                scaled, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = scaled
            else:
                parameter.grad.add_(scaled)


def count_cached_samples(job: Any, micro_batch: int, gpus: int) -> int:
    """Return the number of samples in the loss of a step with gradient caching; 0 if caching is not needed.

    It is not needed if one device takes the whole global batch in one pass.
    """
    if not has_embeddings(job):
        return 0
    samples = max(int(getattr(job, "global_batch", 0) or 0), micro_batch * gpus)
    return 0 if gpus == 1 and micro_batch >= samples else samples


def forward_twice(
    job: Any, model: nn.Module, batch: Any, samples: int, check: Callable[[Any], None]
) -> torch.Tensor:
    """Run both forward passes of one micro-batch of a step over `samples`; return a scalar for backward().

    This is for tracing and measuring, where values do not matter: the embeddings of other micro-batches and
    ranks are zeros of the right size.
    """
    with torch.no_grad():
        first = compute_embeddings(job, model, batch)
        embedded = [to_comparable(tensor).clone() for tensor in first.tensors]
        structure = first.structure
        del first
        # The second pass needs gradients: it cannot use weights that autocast has cast without them.
        torch.clear_autocast_cache()
        all_embeddings = [tensor.new_zeros((samples, *tensor.shape[1:])) for tensor in embedded]
        for tensor, mine in zip(all_embeddings, embedded, strict=True):
            tensor[: mine.shape[0]] = mine
    result = compute_global_loss(job, model, Embeddings(all_embeddings, structure), check)
    count = embedded[0].shape[0]
    del all_embeddings, embedded
    add_gradients(result.parameters)
    return make_surrogate_loss(
        compute_embeddings(job, model, batch), slice_gradients(result.gradients, 0, count)
    )
