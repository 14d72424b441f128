"""Gradient caching: an exact step for losses that compare the samples of a batch with each other.

A job gives `embed(model, batch)` and `loss_of(embeddings)`. A step then has three phases:

1. embed every micro-batch without gradients, and keep the embeddings;
2. compute the loss of all embeddings of the global batch, and its gradient with respect to them;
3. embed every micro-batch again, now with gradients, and go backward from the kept gradient.

The gradient is that of one large batch: d loss / d weights = sum over samples of
(d loss / d embedding) x (d embedding / d weights). See Gao et al. 2021, arXiv:2101.06983.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimtab.errors import JobFailed
from trimtab.jobs.embeddings import Embeddings, comparable, embed, loss_of, takes_model
from trimtab.jobs.job import is_cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn


class WholeLoss(NamedTuple):
    """The loss of a global batch, and its gradients."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    """With respect to each tensor of the embeddings; None for one that takes no gradient."""
    parameters: list[tuple[Any, torch.Tensor]]
    """Parameters that loss_of() itself uses, each with its gradient."""


def whole_loss(job: Any, model: nn.Module, embeddings: Embeddings, check: Callable[[Any], None]) -> WholeLoss:
    """The loss of all embeddings of a global batch, with gradients for them and for loss_of()'s parameters.

    `check` raises for what is no loss.
    """
    leaves = [
        comparable(tensor).detach().requires_grad_(tensor.is_floating_point())
        for tensor in embeddings.tensors
    ]
    with torch.enable_grad(), _parameters(model, used=takes_model(job)) as parameters:
        loss = loss_of(job, model, Embeddings(leaves, embeddings.structure))
        check(loss)
        sought = [leaf for leaf in leaves if leaf.requires_grad]
        owners, held = [owner for owner, _ in parameters], [tensor for _, tensor in parameters]
        found = torch.autograd.grad(loss, [*sought, *held], allow_unused=True)
    by_leaf = dict(zip(map(id, sought), found, strict=False))
    return WholeLoss(
        loss.detach(),
        [by_leaf.get(id(leaf)) for leaf in leaves],
        [
            (owner, gradient)
            for owner, gradient in zip(owners, found[len(sought) :], strict=True)
            if gradient is not None
        ],
    )


class _Gathering(dict[str, Any]):
    """A module's parameters, each sharded one gathered when loss_of() first reads it.

    All ranks read the same ones in the same order, so that their collectives match.
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


class _Used:
    """Parameters that a loss may use, each with the tensor that stands for it; sharded ones once read."""

    def __init__(self, plain: list[Any], gathered: dict[int, tuple[Any, torch.Tensor]]) -> None:
        self._plain = plain
        self._gathered = gathered

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        yield from ((parameter, parameter) for parameter in self._plain)
        yield from (pair for pair in self._gathered.values() if pair[1].requires_grad)


@contextlib.contextmanager
def _parameters(model: nn.Module, *, used: bool) -> Iterator[Iterable[tuple[Any, torch.Tensor]]]:
    """The trainable parameters that loss_of() may use, while it runs."""
    if not used:
        yield []
        return
    gathered: dict[int, tuple[Any, torch.Tensor]] = {}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in trainable if not hasattr(parameter, "full_tensor")]
    owners = [module for module in model.modules() if module.__dict__["_parameters"]]
    before = [module.__dict__["_parameters"] for module in owners]
    try:
        for module, own in zip(owners, before, strict=True):
            module.__dict__["_parameters"] = _Gathering(own, gathered)
        yield _Used(plain, gathered)
    finally:
        for module, own in zip(owners, before, strict=True):
            module.__dict__["_parameters"] = own


def surrogate(embeddings: Embeddings, gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """A scalar whose gradient with respect to the embeddings is the given one: the sum of their products."""
    terms = [
        (comparable(tensor) * gradient).sum()
        for tensor, gradient in zip(embeddings.tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if not terms:
        raise JobFailed(
            "embed() and loss_of()",
            found="no trainable parameter has a part in the embeddings that the loss uses",
            cure="Let loss_of() use what embed() computes with the model.",
        )
    return torch.stack(terms).sum() if len({term.dtype for term in terms}) == 1 else sum(terms[1:], terms[0])


def no_gradients(
    embeddings: Embeddings, like: list[torch.Tensor | None] | None = None
) -> list[torch.Tensor | None]:
    """Zeros for the backward pass of samples that count for nothing; `like` says which tensors take one."""
    wanted = like or [tensor if tensor.requires_grad else None for tensor in embeddings.tensors]
    return [
        None if other is None else torch.zeros_like(comparable(tensor))
        for tensor, other in zip(embeddings.tensors, wanted, strict=True)
    ]


def joined(parts: list[Embeddings]) -> Embeddings:
    """The embeddings of several micro-batches as those of one batch."""
    columns = zip(*(part.tensors for part in parts), strict=True)
    return Embeddings([torch.cat(list(column)) for column in columns], parts[0].structure)


def rows(gradients: list[torch.Tensor | None], begin: int, end: int) -> list[torch.Tensor | None]:
    """The gradients of samples begin to end."""
    return [None if gradient is None else gradient[begin:end] for gradient in gradients]


def add_gradients(parameters: list[tuple[Any, torch.Tensor]], scale: float = 1.0) -> None:
    """Add gradients to those that the parameters hold; of a sharded parameter, the rows of this rank."""
    for parameter, gradient in parameters:
        scaled = gradient.to(parameter.dtype) * scale
        if hasattr(parameter, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            # Every rank has the whole gradient: nothing is sent.
            scaled = distribute_tensor(
                scaled, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = scaled
            else:
                parameter.grad.add_(scaled)


def rows_of_step(job: Any, micro_batch: int, gpus: int) -> int:
    """Samples in the loss of a step that gradient caching cuts; 0 where a step is one plain pass.

    One pass is enough where one device takes the whole global batch at once.
    """
    if not is_cached(job):
        return 0
    whole = max(int(getattr(job, "global_batch", 0) or 0), micro_batch * gpus)
    return 0 if gpus == 1 and micro_batch >= whole else whole


def forward_twice(
    job: Any, model: nn.Module, batch: Any, whole: int, check: Callable[[Any], None]
) -> torch.Tensor:
    """The passes of one micro-batch of a cached step over `whole` samples; a scalar to go backward from.

    For tracing and measuring, where values do not matter: the embeddings of other micro-batches and ranks
    are stood in for by memory of their size.
    """
    with torch.no_grad():
        first = embed(job, model, batch)
        kept = [comparable(tensor).clone() for tensor in first.tensors]
        structure = first.structure
        del first
        # Weights that autocast has cast without gradients are of no use to the second pass.
        torch.clear_autocast_cache()
        everyone = [tensor.new_zeros((whole, *tensor.shape[1:])) for tensor in kept]
        for tensor, mine in zip(everyone, kept, strict=True):
            tensor[: mine.shape[0]] = mine
    found = whole_loss(job, model, Embeddings(everyone, structure), check)
    own = kept[0].shape[0]
    del everyone, kept
    add_gradients(found.parameters)
    return surrogate(embed(job, model, batch), rows(found.gradients, 0, own))
