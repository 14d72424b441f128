"""Split the batch of another framework exactly: by rows, weighted by what its loss is a mean over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trimtab.engine.additive_loss import find_batch_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IGNORED_LABEL = -100
"""Label that cross-entropy ignores by default."""
MOST_SAMPLES = 8
"""Samples of the batch on which the loss is examined."""
MOST_ELEMENTS = 1 << 20
"""Size of a parameter whose gradient is compared."""
MOST_PARAMETERS = 8
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
NARROW_TOLERANCE = 0.03
"""Relative difference that rounding explains, by the dtype of the weights; the last for half precision."""


class SplitRule(NamedTuple):
    """How the loss of a batch follows from the losses of its parts."""

    name: str
    weight: Callable[[Any], float] | None
    """Weight of a part; None if the loss is a sum over the parts."""

    def shares(self, parts: list[Any]) -> list[float]:
        """Return the factor of each part's loss; 0 for a part that has no weight."""
        if self.weight is None:
            return [1.0] * len(parts)
        weights = [self.weight(part) for part in parts]
        total = sum(weights)
        return [weight / total if total else 1 / len(parts) for weight in weights]


def iterate_tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif hasattr(batch, "items"):
        for value in batch.values():
            yield from iterate_tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from iterate_tensors(value)


def count_samples(batch: Any) -> int:
    """Return the samples in a batch: the rows of its first tensor that has any; 0 without one.

    >>> count_samples({"ids": torch.zeros(4, 7), "rate": torch.tensor(1.0)})
    4
    """
    return next((int(tensor.shape[0]) for tensor in iterate_tensors(batch) if tensor.dim()), 0)


def why_not_rows(batch: Any) -> str:
    """Return why a batch cannot be cut by rows; empty if it can."""
    samples = count_samples(batch)
    odd = [tensor for tensor in iterate_tensors(batch) if tensor.dim() and tensor.shape[0] != samples]
    if not odd:
        return ""
    return f"a tensor of it has {odd[0].shape[0]} rows, and the batch {samples} samples"


def take_rows(batch: Any, rows: Any) -> Any:
    """Return these rows of every tensor: a slice, or a list of numbers."""
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.dim() else batch
    if hasattr(batch, "items"):
        return {key: take_rows(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take_rows(value, rows) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(take_rows(value, rows) for value in batch)
    return batch


def split_rows(batch: Any, size: int) -> list[Any]:
    """Return the batch in parts of at most `size` samples."""
    samples = count_samples(batch)
    return [take_rows(batch, slice(start, start + size)) for start in range(0, samples, size)]


def _find_labels(batch: Any) -> torch.Tensor | None:
    labels = batch.get("labels") if hasattr(batch, "get") else None
    return labels if isinstance(labels, torch.Tensor) and labels.dim() > 1 else None


def count_labels(batch: Any) -> float:
    """Return the labels that count for the loss."""
    labels = _find_labels(batch)
    return 0.0 if labels is None else float((labels != IGNORED_LABEL).sum())


def count_shifted_labels(batch: Any) -> float:
    """Return the labels that count for the loss of a causal language model, which has none for the first."""
    labels = _find_labels(batch)
    return 0.0 if labels is None else float((labels[:, 1:] != IGNORED_LABEL).sum())


SAMPLES = SplitRule("a mean over samples", lambda batch: float(count_samples(batch)))
RULES = (
    SplitRule("a sum", None),
    SAMPLES,
    SplitRule("a mean over labelled tokens", count_labels),
    SplitRule("a mean over predicted tokens", count_shifted_labels),
)


@contextlib.contextmanager
def use_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def detect_autocast(model: nn.Module) -> Iterator[list[bool]]:
    """Give a list that is not empty once a layer of the model has run under autocast."""
    seen: list[bool] = []

    def look(_: Any, inputs: Any) -> None:
        kinds = {tensor.device.type for tensor in iterate_tensors(inputs)}
        if not seen and any(torch.is_autocast_enabled(kind) for kind in kinds):
            seen.append(True)

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_pre_hook(look) for module in leaves]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the random state of torch, Python and numpy, so that reading a batch changes no training."""
    import random

    import numpy as np

    states = (random.getstate(), np.random.get_state(), torch.random.get_rng_state())  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.random.set_rng_state(states[2])


def find_split_rule(
    model: nn.Module, loss: Callable[[Any], Any], batch: Any, *, most: int = MOST_SAMPLES
) -> tuple[SplitRule | None, str]:
    """Return how the loss of this batch can be split, or None and the reason.

    Up to `most` samples are compared with their two halves, without dropout: the loss, and the gradients of
    a few small parameters. Losses that compare samples with each other match no rule.
    """
    why = why_not_rows(batch)
    if why:
        return None, why
    if any(module.training for module in find_batch_norms(model)):
        return None, "the model has BatchNorm layers, whose statistics depend on the micro-batch"
    samples = count_samples(batch)
    count = 2 * max(1, min(most, samples // 2) // 2)
    if samples < 2:  # noqa: PLR2004 - halves
        return None, "it has a single sample"
    rows = _pick_rows(batch, samples, count)
    whole = take_rows(batch, rows)
    halves = [take_rows(batch, rows[: count // 2]), take_rows(batch, rows[count // 2 :])]
    parameters = _pick_parameters(model)
    with use_evaluation_mode(model), torch.random.fork_rng(), detect_autocast(model) as casts:
        together, *apart = [_measure(loss, part, parameters) for part in (whole, *halves)]
    tolerance = max(TOLERANCES.get(parameter.dtype, NARROW_TOLERANCE) for parameter in model.parameters())
    if casts or together.dtype not in TOLERANCES:
        tolerance = NARROW_TOLERANCE
    gaps = [(_gap(together, apart, rule.shares(halves)), number) for number, rule in enumerate(RULES)]
    gap, best = min((gap, number) for gap, number in gaps if gap == gap)  # noqa: PLR0124 - not NaN
    if gap > tolerance:
        return None, (
            f"the loss of {count} samples does not follow from the losses of their halves ({gap:.1%} apart): "
            "it compares samples with each other, or is a mean over something that trimtab does not know"
        )
    return RULES[best], ""


def _pick_rows(batch: Any, samples: int, count: int) -> list[int]:
    """Return samples whose numbers of labels differ as much as possible, to tell the rules apart."""
    labels = _find_labels(batch)
    if labels is None or labels.shape[0] != samples:
        return list(range(count))
    counts = (labels != IGNORED_LABEL).flatten(1).sum(1).tolist()
    ordered = sorted(range(samples), key=lambda row: counts[row])
    return ordered[: count // 2] + ordered[-(count // 2) :]


def _pick_parameters(model: nn.Module) -> list[nn.Parameter]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small = [parameter for parameter in trained if parameter.numel() <= MOST_ELEMENTS]
    # The last ones are near the loss: their gradients cost little.
    return (small or trained)[-MOST_PARAMETERS:]


def _measure(loss: Callable[[Any], Any], part: Any, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return the gradients of the parameters, and the loss, as one vector."""
    with torch.enable_grad():
        value = loss(part)
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    pieces = [gradient.flatten().double() for gradient in gradients if gradient is not None]
    return torch.cat([*pieces, value.detach().double().reshape(1)]).to(value.dtype)


def _gap(together: torch.Tensor, apart: list[torch.Tensor], shares: list[float]) -> float:
    if any(len(part) != len(together) for part in apart):
        return float("inf")
    mean = sum((share * part.double() for share, part in zip(shares, apart, strict=True)), torch.zeros(()))
    wide = together.double()
    gradient = float((wide - mean)[:-1].norm() / wide[:-1].norm().clamp_min(1e-30))
    value = float((wide - mean)[-1].abs() / wide[-1].abs().clamp_min(1e-30))
    return max(gradient, value)
