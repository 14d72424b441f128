"""Check whether the loss of a batch is the weighted mean of the losses of its parts (an additive loss).

Only then can a batch be split over micro-batches and ranks without changing the training. Losses that compare
samples with each other (contrastive losses, triplets mined in the batch) and losses that are sums are not
additive. `compare_halves` computes the loss of a small batch and of its halves with the same random numbers.
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

TEST_SAMPLES = 8
"""Number of samples in the test batch. With few samples, a loss that compares samples differs more."""
MAX_LOSS_GAP = 0.02
"""A loss is not additive if it differs from the mean of its halves by more than this relative gap. A
load-balancing term of a mixture of experts has a gap below this and above rounding; such losses are usually
split in practice."""
MAX_GRADIENT_GAP = 0.1
"""The same limit for the gradient."""
SEED_COUNT = 3
"""Number of random seeds to try if the first comparison finds a difference."""
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative rounding error of the loss by dtype; other dtypes count as half precision."""
HALF_ROUNDING = 0.02
NARROW_ROUNDING = 1e-6
"""Rounding error of a loss in float64 if a model computes a part in float32, as state space models do."""


class HalvesResult(NamedTuple):
    """Loss of a batch and losses of its halves."""

    batch: float
    """Loss of the batch."""
    mean: float
    """Weighted mean of the losses of the halves."""
    total: float
    """Sum of the losses of the halves."""
    gradient_gap: float | None
    """Relative distance between the gradients; None if they were not computed."""
    narrows: bool = False
    """Whether something in float64 was converted to float32."""

    @property
    def gap(self) -> float:
        """Difference between batch and halves, relative to the loss."""
        scale = max(abs(self.batch), abs(self.mean))
        return abs(self.batch - self.mean) / scale if scale else 0.0

    @property
    def is_sum(self) -> bool:
        """Whether the loss of the batch is the sum of the losses of its halves."""
        scale = max(abs(self.batch), abs(self.total))
        return bool(scale) and abs(self.batch - self.total) / scale < MAX_LOSS_GAP / 10


class SameNoise(TorchDispatchMode):
    """Give every sample of a batch the same random numbers, for any batch size.

    A batch then has the same dropout, noise and random timesteps as its halves. Random numbers that are not
    drawn per row, such as a permutation of the batch, are not changed.
    """

    def __init__(self, samples: int, seed: int) -> None:
        super().__init__()
        self._samples = samples
        self._seed = seed
        self._calls = 0
        self.narrows = False
        """Whether something in float64 was converted to float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and replace the random numbers that it drew."""
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.narrows |= (args[0].dtype, output.dtype) == (torch.float64, torch.float32)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        draw = _DRAWS.get(func.overloadpacket.__name__)
        values = output[1] if isinstance(output, tuple) else output
        if draw is None or not isinstance(values, torch.Tensor) or not self._has_rows(values):
            return output
        self._calls += 1
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self._calls)
        rows = values.shape[0] // self._samples
        uniform = torch.rand((rows, *values.shape[1:]), generator=generator, dtype=torch.float64)
        uniform = uniform.repeat(self._samples, *[1] * (values.dim() - 1)).to(values.device)
        return draw(uniform, output, args)

    def _has_rows(self, values: torch.Tensor) -> bool:
        return values.dim() > 0 and values.shape[0] > 0 and values.shape[0] % self._samples == 0


def _draw_uniform(uniform: torch.Tensor, output: Any, args: Any) -> Any:
    low, high = (args[1], args[2]) if len(args) > 2 and isinstance(args[1], int | float) else (0.0, 1.0)  # noqa: PLR2004
    return output.copy_(low + uniform * (high - low))


def _draw_normal(uniform: torch.Tensor, output: Any, args: Any) -> Any:
    mean, deviation = 0.0, 1.0
    if args and isinstance(args[0], torch.Tensor) and all(isinstance(arg, int | float) for arg in args[1:3]):
        mean, deviation = (*args[1:3], mean, deviation)[:2] if len(args) > 2 else (mean, deviation)  # noqa: PLR2004
    normal = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    return output.copy_(mean + deviation * normal)


def _draw_integer(uniform: torch.Tensor, output: Any, args: Any) -> Any:
    bounds = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    if not bounds:
        return output
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    return output.copy_((low + uniform * (high - low)).floor())


def _draw_bernoulli(uniform: torch.Tensor, output: Any, args: Any) -> Any:
    probability = args[1] if len(args) > 1 and args[1] is not None else 0.5
    return output.copy_(uniform < probability)


def _draw_bernoulli_like(uniform: torch.Tensor, output: Any, args: Any) -> Any:
    probability = args[1] if len(args) > 1 and isinstance(args[1], float) else args[0]
    return output.copy_(uniform < probability)


def _draw_dropout(uniform: torch.Tensor, output: Any, args: Any) -> Any:
    values, rate, mask = args[0], args[1], output[1]
    mask.copy_(uniform >= rate)
    output[0].copy_(values * mask / (1 - rate) if rate < 1 else values * 0)
    return output


_DRAWS: dict[str, Callable[[torch.Tensor, Any, Any], Any]] = {
    "rand": _draw_uniform,
    "rand_like": _draw_uniform,
    "uniform_": _draw_uniform,
    "randn": _draw_normal,
    "randn_like": _draw_normal,
    "normal_": _draw_normal,
    "randint": _draw_integer,
    "randint_like": _draw_integer,
    "random_": _draw_integer,
    "bernoulli_": _draw_bernoulli,
    "bernoulli": _draw_bernoulli_like,
    "native_dropout": _draw_dropout,
}


def slice_batch(batch: Any, start: int, stop: int, samples: int) -> Any:
    """Return samples `start` to `stop` of a batch: rows of its tensors, items of its lists of samples."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, dict):
        return {key: slice_batch(value, start, stop, samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(slice_batch(value, start, stop, samples) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == samples and not any(_has_rows(value, samples) for value in batch):
            return batch[start:stop]
        return type(batch)(slice_batch(value, start, stop, samples) for value in batch)
    return batch


def _has_rows(value: Any, samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == samples


@contextlib.contextmanager
def _freeze_batch_norms(model: Any) -> Iterator[None]:
    """Let BatchNorm layers use their running statistics; `BatchLoss.batch_norms` reports them separately."""
    norms = [module for module in find_batch_norms(model) if module.training]
    for module in norms:
        module.training = False
    try:
        yield
    finally:
        for module in norms:
            module.training = True


def find_batch_norms(model: Any) -> list[nn.Module]:
    """Return the layers that compute statistics over the batch."""
    if not isinstance(model, nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@contextlib.contextmanager
def _seed_random(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch, Python and numpy; restore their state afterwards."""
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


class LossUnderTest(NamedTuple):
    """The loss function to check, with its model and the weights of the parts of a batch."""

    model: Any
    loss: Callable[[Any, Any], Any]
    weight: Callable[[Any], Any] | None
    """Weight of a part of the batch; None: its number of samples."""
    cast: Callable[[], Any] = contextlib.nullcontext
    """Context manager for each forward pass, such as autocast."""
    after: Callable[[], None] | None = None
    """Called after each forward pass."""


def compare_halves(
    test: LossUnderTest, batch: Any, samples: int, *, gradients: bool, seed: int = 0
) -> HalvesResult | None:
    """Compute the loss of a batch and of its halves; return None if a half has weight 0."""
    half = samples // 2
    parts = [(0, samples), (0, half), (half, samples)]
    losses, weights, gradient_lists, narrows = [], [], [], False
    for start, stop in parts:
        part = batch if (start, stop) == (0, samples) else slice_batch(batch, start, stop, samples)
        weights.append(float(stop - start if test.weight is None else test.weight(part)))
        noise = SameNoise(stop - start, seed)
        loss, loss_gradients = _compute_loss(test, part, noise, gradients=gradients, seed=seed)
        narrows |= noise.narrows
        losses.append(loss)
        gradient_lists.append(loss_gradients)
    total_weight = sum(weights[1:])
    if not total_weight or not all(weights[1:]):
        return None
    shares = [weight / total_weight for weight in weights[1:]]
    mean = sum(share * loss for share, loss in zip(shares, losses[1:], strict=True))
    distance = _gradient_distance(gradient_lists, shares) if gradients else None
    return HalvesResult(losses[0], mean, sum(losses[1:]), distance, narrows)


def _compute_loss(
    test: LossUnderTest, batch: Any, noise: SameNoise, *, gradients: bool, seed: int
) -> tuple[float, list[torch.Tensor | None]]:
    with _seed_random(seed), _freeze_batch_norms(test.model), torch.set_grad_enabled(gradients):
        with noise, test.cast():
            loss = test.loss(test.model, batch)
        loss_gradients: list[torch.Tensor | None] = []
        if gradients:
            parameters = [parameter for parameter in test.model.parameters() if parameter.requires_grad]
            loss_gradients = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    if test.after is not None:
        test.after()
    return float(loss.detach()), loss_gradients


def _gradient_distance(gradient_lists: list[list[torch.Tensor | None]], shares: list[float]) -> float:
    """Return the distance between the batch's gradient and the mean of its halves', relative to the first."""
    squared_distance = squared_norm = 0.0
    for batch_gradient, *halves in zip(*gradient_lists, strict=True):
        total = torch.zeros(()) if batch_gradient is None else batch_gradient
        pairs = zip(shares, halves, strict=True)
        mean = sum((share * half for share, half in pairs if half is not None), torch.zeros_like(total))
        squared_distance += float((total - mean).double().square().sum())
        squared_norm += float(total.double().square().sum())
    return (squared_distance / squared_norm) ** 0.5 if squared_norm else 0.0


def check_additivity(  # noqa: PLR0913 - the test and its tolerance
    test: LossUnderTest,
    batch: Any,
    samples: int,
    *,
    gradients: bool,
    rounding: float,
    all_seeds: bool = False,
) -> BatchLoss:
    """Return whether the loss is additive, with the measured gaps; unknown if the loss is too random.

    With `all_seeds` the number of passes is always the same, as ranks that shard weights need it.
    """
    norms = len(find_batch_norms(test.model))
    first = compare_halves(test, batch, samples, gradients=gradients)
    more = _compare_other_seeds(test, batch, samples) if all_seeds else None
    if first is None:
        return BatchLoss(why="weight() is 0 for a half of the batch", batch_norms=norms)
    if not all(value - value == 0 for value in (first.batch, first.mean)):
        return BatchLoss(why=f"the loss of {samples} samples is {first.batch}", batch_norms=norms)
    if _is_equal(first, rounding):
        return BatchLoss(
            additive=True,
            gap=first.gap,
            gradient_gap=first.gradient_gap,
            batch_norms=norms,
            why=f"the loss of {samples} samples is the weighted mean of those of its halves",
        )
    more = _compare_other_seeds(test, batch, samples) if more is None else more
    gaps = [result.batch - result.mean for result in (first, *more) if result is not None]
    mean_gap = sum(gaps) / len(gaps)
    if max(gaps) - min(gaps) > 2 * abs(mean_gap):
        why = "the loss is too random to compare a batch with its halves"
        return BatchLoss(gap=first.gap, why=why, batch_norms=norms)
    return _describe_difference(first, samples, norms)


def _compare_other_seeds(test: LossUnderTest, batch: Any, samples: int) -> list[HalvesResult | None]:
    """Repeat the comparison with other random seeds."""
    return [compare_halves(test, batch, samples, gradients=False, seed=seed) for seed in range(1, SEED_COUNT)]


def _is_equal(result: HalvesResult, rounding: float) -> bool:
    gradient_gap = result.gradient_gap
    rounding = max(rounding, NARROW_ROUNDING if result.narrows else 0.0)
    is_close = gradient_gap is None or gradient_gap <= max(rounding, 1e-6) * 10
    return result.gap <= rounding and is_close


def _describe_difference(result: HalvesResult, samples: int, norms: int) -> BatchLoss:
    """Explain a difference that is not random: refused, or a small term over the whole batch."""
    gradient_gap = result.gradient_gap or 0.0
    numbers = f"the loss of {samples} samples is {result.batch:.4g}, the mean of its halves {result.mean:.4g}"
    if gradient_gap > MAX_GRADIENT_GAP and result.gap <= MAX_LOSS_GAP:
        numbers += f"; their gradients differ by {gradient_gap:.0%}"
    refused = result.gap > MAX_LOSS_GAP or gradient_gap > MAX_GRADIENT_GAP
    if refused and result.is_sum:
        why = f"{numbers}: it is a sum over samples, not a mean"
    elif refused:
        why = f"{numbers}: it compares samples of a batch with each other"
    else:
        why = (
            f"{numbers} ({100 * result.gap:.2g} % apart): a small term depends on the whole batch, or the "
            "loss is a mean over something that weight() does not count"
        )
    return BatchLoss(
        additive=not refused,
        gap=result.gap,
        gradient_gap=result.gradient_gap,
        is_near=not refused,
        is_sum=refused and result.is_sum,
        batch_norms=norms,
        why=why,
    )


def convert_to_double(batch: Any) -> Any:
    """Return the batch with its floating-point tensors in float64."""
    return tree_map(
        lambda value: (
            value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        ),
        batch,
    )


def rounding_tolerance(model: nn.Module, cast: torch.dtype | None) -> float:
    """Return the relative rounding error to tolerate in a loss of this model."""
    if cast is not None:
        return HALF_ROUNDING
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max((ROUNDING.get(kind, HALF_ROUNDING) for kind in kinds), default=ROUNDING[torch.float32])
