"""Whether the loss of a batch is the weighted mean of the losses of its parts.

Cutting a batch over micro-batches and ranks keeps the training the same only then. It is not so for losses
that compare samples with each other (contrastive, triplets mined in the batch), nor for a loss that is a sum.
`compare` computes the loss of a small batch and of its halves, all with the same random numbers.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from trimtab.spec import BatchLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES = 8
"""In the batch that is compared with its halves: the fewer, the more a comparison of samples shows."""
REFUSED = 0.02
"""A loss that differs from that of the halves by more than this share is not additive. Below it, and above
rounding, is what a load-balancing term of a mixture of experts does, which everybody cuts."""
REFUSED_GRADIENT = 0.1
"""The same for the gradient."""
SEEDS = 3
"""Random numbers that are tried where the first comparison finds a difference."""
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
"""What rounding makes of the loss; anything coarser counts as half precision."""
HALF_ROUNDING = 0.02


class Halves(NamedTuple):
    """One comparison."""

    whole: float
    mean: float
    """Weighted mean of the losses of the halves."""
    total: float
    """Their sum."""
    gradient_gap: float | None

    @property
    def gap(self) -> float:
        """The difference as a share of the loss."""
        scale = max(abs(self.whole), abs(self.mean))
        return abs(self.whole - self.mean) / scale if scale else 0.0

    @property
    def is_sum(self) -> bool:
        """Whether the loss of the batch is the sum of those of its halves."""
        scale = max(abs(self.whole), abs(self.total))
        return bool(scale) and abs(self.whole - self.total) / scale < REFUSED / 10


class SameNoise(TorchDispatchMode):
    """Gives every sample of a batch the same random numbers, whatever the size of the batch.

    Dropout, noise and random times of a batch are then those of its halves. What is not drawn by row, such
    as a permutation of the batch, is left alone.
    """

    def __init__(self, samples: int, seed: int) -> None:
        super().__init__()
        self._samples = samples
        self._seed = seed
        self._calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; replace what it drew."""
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return found
        draw = _DRAWS.get(func.overloadpacket.__name__)
        values = found[1] if isinstance(found, tuple) else found
        if draw is None or not isinstance(values, torch.Tensor) or not self._is_by_row(values):
            return found
        self._calls += 1
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self._calls)
        rows = values.shape[0] // self._samples
        uniform = torch.rand((rows, *values.shape[1:]), generator=generator, dtype=torch.float64)
        uniform = uniform.repeat(self._samples, *[1] * (values.dim() - 1)).to(values.device)
        return draw(uniform, found, args)

    def _is_by_row(self, values: torch.Tensor) -> bool:
        return values.dim() > 0 and values.shape[0] > 0 and values.shape[0] % self._samples == 0


def _uniform(uniform: torch.Tensor, found: Any, args: Any) -> Any:
    low, high = (args[1], args[2]) if len(args) > 2 and isinstance(args[1], int | float) else (0.0, 1.0)  # noqa: PLR2004
    return found.copy_(low + uniform * (high - low))


def _normal(uniform: torch.Tensor, found: Any, args: Any) -> Any:
    mean, deviation = 0.0, 1.0
    if args and isinstance(args[0], torch.Tensor) and all(isinstance(arg, int | float) for arg in args[1:3]):
        mean, deviation = (*args[1:3], mean, deviation)[:2] if len(args) > 2 else (mean, deviation)  # noqa: PLR2004
    normal = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    return found.copy_(mean + deviation * normal)


def _integer(uniform: torch.Tensor, found: Any, args: Any) -> Any:
    bounds = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    if not bounds:
        return found
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    return found.copy_((low + uniform * (high - low)).floor())


def _bernoulli(uniform: torch.Tensor, found: Any, args: Any) -> Any:
    likely = args[1] if len(args) > 1 and args[1] is not None else 0.5
    return found.copy_(uniform < likely)


def _bernoulli_of(uniform: torch.Tensor, found: Any, args: Any) -> Any:
    likely = args[1] if len(args) > 1 and isinstance(args[1], float) else args[0]
    return found.copy_(uniform < likely)


def _dropout(uniform: torch.Tensor, found: Any, args: Any) -> Any:
    given, dropped, mask = args[0], args[1], found[1]
    mask.copy_(uniform >= dropped)
    found[0].copy_(given * mask / (1 - dropped) if dropped < 1 else given * 0)
    return found


_DRAWS: dict[str, Callable[[torch.Tensor, Any, Any], Any]] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "uniform_": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "normal_": _normal,
    "randint": _integer,
    "randint_like": _integer,
    "random_": _integer,
    "bernoulli_": _bernoulli,
    "bernoulli": _bernoulli_of,
    "native_dropout": _dropout,
}


def cut(batch: Any, start: int, stop: int, samples: int) -> Any:
    """Samples start to stop of a batch: rows of its tensors, and of its lists that count samples."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, dict):
        return {key: cut(value, start, stop, samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value, start, stop, samples) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == samples and not any(_has_rows(value, samples) for value in batch):
            return batch[start:stop]
        return type(batch)(cut(value, start, stop, samples) for value in batch)
    return batch


def _has_rows(value: Any, samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == samples


@contextlib.contextmanager
def _calm(model: Any) -> Iterator[None]:
    """Normalisations over the batch use their running statistics: they are spoken of by themselves."""
    norms = [module for module in batch_norms(model) if module.training]
    for module in norms:
        module.training = False
    try:
        yield
    finally:
        for module in norms:
            module.training = True


def batch_norms(model: Any) -> list[nn.Module]:
    """The normalisations that compute statistics of the batch."""
    if not isinstance(model, nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch, Python and numpy from a seed; put back afterwards."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what jobs draw from
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


class LossComparison(NamedTuple):
    """What is compared: a loss of batches, and how the parts of a batch are weighted."""

    model: Any
    loss: Callable[[Any, Any], Any]
    weight: Callable[[Any], Any] | None
    """None where samples count."""
    cast: Callable[[], Any] = contextlib.nullcontext
    """The context that each forward pass runs in."""
    after: Callable[[], None] | None = None
    """Called after each forward pass without gradients."""


def compare(
    question: LossComparison, batch: Any, samples: int, *, gradients: bool, seed: int = 0
) -> Halves | None:
    """The loss of a batch beside those of its halves; None where a half counts for nothing."""
    half = samples // 2
    parts = [(0, samples), (0, half), (half, samples)]
    losses, weights, slopes = [], [], []
    for start, stop in parts:
        part = batch if (start, stop) == (0, samples) else cut(batch, start, stop, samples)
        weights.append(float(stop - start if question.weight is None else question.weight(part)))
        loss, slope = _loss(question, part, stop - start, gradients=gradients, seed=seed)
        losses.append(loss)
        slopes.append(slope)
    counted = sum(weights[1:])
    if not counted or not all(weights[1:]):
        return None
    shares = [weight / counted for weight in weights[1:]]
    mean = sum(share * loss for share, loss in zip(shares, losses[1:], strict=True))
    return Halves(losses[0], mean, sum(losses[1:]), _apart(slopes, shares) if gradients else None)


def _loss(
    question: LossComparison, batch: Any, samples: int, *, gradients: bool, seed: int
) -> tuple[float, list[torch.Tensor | None]]:
    with _seeded(seed), _calm(question.model), torch.set_grad_enabled(gradients):
        with SameNoise(samples, seed), question.cast():
            loss = question.loss(question.model, batch)
        slopes: list[torch.Tensor | None] = []
        if gradients:
            parameters = [parameter for parameter in question.model.parameters() if parameter.requires_grad]
            slopes = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    if question.after is not None:
        question.after()
    return float(loss.detach()), slopes


def _apart(slopes: list[list[torch.Tensor | None]], shares: list[float]) -> float:
    """The distance between the gradient of the whole and the mean of those of its halves, as a share."""
    far = long = 0.0
    for whole, *halves in zip(*slopes, strict=True):
        total = torch.zeros(()) if whole is None else whole
        pairs = zip(shares, halves, strict=True)
        mean = sum((share * one for share, one in pairs if one is not None), torch.zeros_like(total))
        far += float((total - mean).double().square().sum())
        long += float(total.double().square().sum())
    return (far / long) ** 0.5 if long else 0.0


def judge(  # noqa: PLR0913 - what is compared, and how closely
    question: LossComparison,
    batch: Any,
    samples: int,
    *,
    gradients: bool,
    rounding: float,
    all_seeds: bool = False,
) -> BatchLoss:
    """Whether the loss is additive, with the numbers; unknown where chance has too much of a say.

    With `all_seeds` every caller makes as many passes, as ranks that share weights have to.
    """
    norms = len(batch_norms(question.model))
    first = compare(question, batch, samples, gradients=gradients)
    more = _others(question, batch, samples) if all_seeds else None
    if first is None:
        return BatchLoss(why="a half of the batch counts for nothing by weight()", batch_norms=norms)
    if not all(value - value == 0 for value in (first.whole, first.mean)):
        return BatchLoss(why=f"the loss of {samples} samples is {first.whole}", batch_norms=norms)
    if _agree(first, rounding):
        return BatchLoss(
            additive=True,
            gap=first.gap,
            gradient_gap=first.gradient_gap,
            batch_norms=norms,
            why=f"the loss of {samples} samples is the weighted mean of those of its halves",
        )
    more = _others(question, batch, samples) if more is None else more
    gaps = [one.whole - one.mean for one in (first, *more) if one is not None]
    middle = sum(gaps) / len(gaps)
    if max(gaps) - min(gaps) > 2 * abs(middle):
        why = "the loss is random in a way that does not repeat for halves of a batch"
        return BatchLoss(gap=first.gap, why=why, batch_norms=norms)
    return _verdict(first, samples, norms)


def _others(question: LossComparison, batch: Any, samples: int) -> list[Halves | None]:
    """The same comparison with other random numbers."""
    return [compare(question, batch, samples, gradients=False, seed=seed) for seed in range(1, SEEDS)]


def _agree(found: Halves, rounding: float) -> bool:
    slope = found.gradient_gap
    return found.gap <= rounding and (slope is None or slope <= max(rounding, 1e-6) * 10)


def _verdict(found: Halves, samples: int, norms: int) -> BatchLoss:
    """What a difference that is no chance means."""
    slope = found.gradient_gap or 0.0
    numbers = f"the loss of {samples} samples is {found.whole:.4g}, the mean of its halves {found.mean:.4g}"
    if slope > REFUSED_GRADIENT and found.gap <= REFUSED:
        numbers += f"; their gradients differ by {slope:.0%}"
    refused = found.gap > REFUSED or slope > REFUSED_GRADIENT
    if refused and found.is_sum:
        why = f"{numbers}: it is a sum over samples, not a mean"
    elif refused:
        why = f"{numbers}: it compares samples of a batch with each other"
    else:
        why = (
            f"{numbers} ({100 * found.gap:.2g} % apart): a small term of it looks at the whole batch, or it "
            "is a mean over something that weight() does not count"
        )
    return BatchLoss(
        additive=not refused,
        gap=found.gap,
        gradient_gap=found.gradient_gap,
        is_near=not refused,
        is_sum=refused and found.is_sum,
        batch_norms=norms,
        why=why,
    )


def in_double(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return tree_map(
        lambda value: (
            value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        ),
        batch,
    )


def rounding_of(model: nn.Module, cast: torch.dtype | None) -> float:
    """What rounding may make of a loss that this model computes."""
    if cast is not None:
        return HALF_ROUNDING
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max((ROUNDING.get(kind, HALF_ROUNDING) for kind in kinds), default=ROUNDING[torch.float32])
