"""BatchNorm with the statistics of a micro-batch of all ranks together.

In the forward pass each layer gathers mean, deviation and count of every rank; in the backward pass it sums
two values a channel over ranks. Counts weigh them, so ranks may have different numbers of samples, and a rank
whose pass counts for nothing takes part with count 0. On a GPU the kernels are those of SyncBatchNorm.

torch's own SyncBatchNorm refuses CPU tensors, has the host wait for the GPU in every layer, and an exception
on one rank leaves the others waiting for ever. Here the sequence of collectives is written down in a pass of
one sample before the first step. A rank that runs out of memory answers the rest of the sequence with count
0, and all ranks repeat the step.

Layers stay the same objects with the same parameters, buffers and names: checkpoints are interchangeable.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from trimtab.engine.additive_loss import batch_norms
from trimtab.engine.gradients import Reducer
from trimtab.errors import JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PASS, FORWARD = "pass", "forward"
"""Kinds of passes: forward and backward, and forward without gradients."""
PLANES, VOLUMES = 4, 5
"""Dimensions of a batch of images, and of volumes."""


ABSENT = 1e-30
"""Samples of a rank that has none: as good as 0, but that a mean over them is a number."""


class NormCollective(NamedTuple):
    """One collective of a layer."""

    gathers: bool
    """Whether statistics are gathered; else sums of gradients are summed."""
    length: int
    """Elements that this rank puts in."""
    dtype: torch.dtype

    def answer(self, device: torch.device) -> None:
        """Take part without any samples."""
        if self.gathers:
            gather(no_statistics(self.length // 2, self.dtype, device))
        else:
            dist.all_reduce(torch.zeros(self.length, dtype=self.dtype, device=device))


class Statistics:
    """What the synchronised layers of a model share: their way to other ranks, and whether a pass counts."""

    is_talking = False
    """Whether a layer of this process is in a collective: a tracer tells these from those of gradients."""

    def __init__(self) -> None:
        self.counts = True
        """Whether the samples of the pass under way are part of the statistics."""
        self.note: Callable[[NormCollective], None] | None = None
        """Is called just before a collective."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all ranks, one rank a row."""
        with self._talking(values, gathers=True):
            return gather(values)

    def sum(self, values: torch.Tensor) -> None:
        """Replace values by their sum over all ranks."""
        with self._talking(values, gathers=False):
            dist.all_reduce(values)

    @contextlib.contextmanager
    def _talking(self, values: torch.Tensor, *, gathers: bool) -> Iterator[None]:
        if self.note is not None:
            self.note(NormCollective(gathers, values.numel(), values.dtype))
        Statistics.is_talking = True
        try:
            yield
        finally:
            Statistics.is_talking = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies of a layer speak to the same ranks."""
        return self


def gather(values: torch.Tensor) -> torch.Tensor:
    """The values of all ranks, one rank a row."""
    ranks = dist.get_world_size()
    found = values.new_empty((ranks * values.numel(),))
    _all_gather(found, values)
    return found.view(ranks, -1)


def _all_gather(into: torch.Tensor, values: torch.Tensor) -> None:
    # Newer versions of torch have another name for it, and warn of the old one.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(into, values)


def no_statistics(channels: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank without samples tells: any mean and deviation, and no count."""
    found = torch.ones(2 * channels + 1, dtype=dtype, device=device)
    found[-1] = ABSENT
    return found


def synchronise(model: nn.Module) -> Statistics | None:
    """Make all BatchNorm layers of a model compute statistics over all ranks; None where it has none."""
    layers = batch_norms(model)
    if not layers:
        return None
    statistics = Statistics()
    for layer in layers:
        layer.__dict__["_trimtab_statistics"] = statistics
        layer.__class__ = _extended(type(layer), _Synchronised)  # type: ignore[arg-type]
    return statistics


def is_synchronised(module: nn.Module) -> bool:
    """Whether a layer computes its statistics over all ranks."""
    return isinstance(module, _Synchronised)


class _Synchronised:
    """Stands before the class of a BatchNorm layer; what the layer hands to batch_norm() is summed."""

    training: bool
    _buffers: dict[str, torch.Tensor | None]
    _trimtab_statistics: Statistics

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the class behind this one has it
        # In a backward pass it is computed again: the running statistics have seen these samples.
        again = torch._C._current_graph_task_id() != -1
        tracked = self._buffers.get("num_batches_tracked")
        if again and tracked is not None:
            self._buffers["num_batches_tracked"] = None
        try:
            with _Intercept(self._trimtab_statistics, follows=not again) as intercept:
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            # Recomputing ends with an exception when it has what it needs.
            if again and tracked is not None:
                self._buffers["num_batches_tracked"] = tracked
        if not intercept.is_called:
            raise JobFailed(
                f"sync_batchnorm with a layer of class {type(self).__name__}",
                found="its forward() does not call torch.nn.functional.batch_norm, so that its statistics "
                "cannot be synchronised",
                cure="Use torch's own BatchNorm layers, or leave sync_batchnorm out.",
            )
        return output


@functools.cache
def _extended(kind: type[nn.Module], before: type) -> type[nn.Module]:
    """Return the class of a layer with another class before it, under the layer's own name."""
    if issubclass(kind, before):
        return kind
    # The forward() of SyncBatchNorm would sum over ranks by itself, and not survive an out-of-memory.
    sums_itself = before is _Synchronised and issubclass(kind, nn.SyncBatchNorm)
    return type(kind.__name__, (before, _AnyShape if sums_itself else kind), {"__module__": kind.__module__})


def widen_norms(model: nn.Module) -> None:
    """Let BatchNorm layers compute with fp32 weights, where fsdp gathers these in half precision.

    Their running statistics are fp32, and torch refuses weights of another dtype beside them.
    """
    for layer in batch_norms(model):
        layer.__class__ = _extended(type(layer), _WideWeights)  # type: ignore[arg-type]


class _WideWeights:
    """Stands before the class of a BatchNorm layer; its weights are read in fp32."""

    _parameters: dict[str, torch.Tensor | None]
    _buffers: dict[str, torch.Tensor | None]

    @property
    def weight(self) -> torch.Tensor | None:
        """The weight, in the dtype of the running statistics."""
        return self._widened("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, in the dtype of the running statistics."""
        return self._widened("bias")

    def _widened(self, name: str) -> torch.Tensor | None:
        parameter = self._parameters.get(name)
        # A sharded parameter is only looked at, never computed with.
        if parameter is None or hasattr(parameter, "full_tensor"):
            return parameter
        if parameter.dtype is accumulated(parameter.dtype):
            return parameter
        running = self._buffers.get("running_mean")
        return parameter.to(torch.float32 if running is None else running.dtype)


class _AnyShape(_BatchNorm):
    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        """Take any shape, as torch's SyncBatchNorm does."""


class _Intercept(TorchFunctionMode):
    """Takes the calls of batch_norm() in the forward pass of one layer."""

    def __init__(self, statistics: Statistics, *, follows: bool) -> None:
        super().__init__()
        self._statistics = statistics
        self._follows = follows
        self.is_called = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.is_called = True
        given = _Call(*args, **(kwargs or {}))
        if not given.training:
            return func(*args, **(kwargs or {}))
        has_running = self._follows and given.running_mean is not None
        running = (given.running_mean, given.running_var) if has_running else None
        return _Normalise.apply(
            given.input, given.weight, given.bias, running, given.momentum, given.eps, self._statistics
        )


class _Call(NamedTuple):
    """The arguments of torch.nn.functional.batch_norm."""

    input: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - as batch_norm() has them
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        momentum: float,
        eps: float,
        statistics: Statistics,
    ) -> torch.Tensor:
        source = _dense(source)
        channels = source.shape[1]
        kernels = _kernels(source)
        count = source.numel() // channels if statistics.counts else 0
        wide = accumulated(source.dtype)
        if count:
            own, scale = kernels.moments(source, eps)
            mine = torch.cat([own, scale, own.new_full((1,), count)])
        else:
            mine = no_statistics(channels, wide, source.device)
        every = statistics.gather(mine)
        means, scales, counts = every[:, :channels], every[:, channels:-1], every[:, -1]
        followed = running if running is not None and running[0].dtype is wide else None
        mean, scale = kernels.combine(means, scales, counts, followed, momentum, eps)
        if running is not None and followed is None:
            _follow(running, mean, scale.pow(-2) - eps, counts.sum(), momentum)
        ctx.save_for_backward(source, weight, mean, scale, counts.to(torch.int32))
        ctx.statistics, ctx.counts = statistics, count > 0
        return kernels.normalise(source, weight, bias, mean, scale, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight, mean, scale, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        kernels = _kernels(source)
        reduced = kernels.reduce(gradient, source, mean, scale, weight, ctx.needs_input_grad[:3])
        total_gradient, total_product, for_weight, for_bias = reduced
        for_source = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([total_gradient, total_product])
            if not ctx.counts:
                sums.zero_()
            ctx.statistics.sum(sums)
            if not ctx.counts:
                # The statistics do not depend on these samples.
                sums.zero_()
            first, second = sums.chunk(2)
            for_source = kernels.spread(gradient, source, mean, scale, weight, first, second, counts)
        return (for_source, for_weight, for_bias, None, None, None, None)


def _follow(
    running: tuple[torch.Tensor, torch.Tensor],
    mean: torch.Tensor,
    variance: torch.Tensor,
    total: torch.Tensor,
    momentum: float,
) -> None:
    """Move running statistics towards those of the batch."""
    unbiased = variance * (total / (total - 1.0).clamp(min=1.0))
    for held, new in zip(running, (mean, unbiased), strict=True):
        held.copy_(held + momentum * (new - held))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece, channels first or last."""
    if tensor.dim() == PLANES and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    if tensor.dim() == VOLUMES and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor
    return tensor.contiguous()


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that statistics of values of a dtype are computed in."""
    return torch.promote_types(dtype, torch.float32)


class _Gpu:
    """torch's own kernels for batches that are spread over ranks; these are for CUDA alone."""

    @staticmethod
    def moments(source: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and inverse deviation of this rank's batch, by channel."""
        return torch.batch_norm_stats(source, eps)

    @staticmethod
    def combine(  # noqa: PLR0913, PLR0917 - as torch has it
        means: torch.Tensor,
        scales: torch.Tensor,
        counts: torch.Tensor,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        momentum: float,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the batches of all ranks; running statistics, of the same dtype, follow."""
        first, second = running or (None, None)
        return torch.batch_norm_gather_stats_with_counts(
            means, means, scales, first, second, momentum, eps, counts
        )

    @staticmethod
    def normalise(  # noqa: PLR0913, PLR0917 - as torch has it
        source: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """The normalised batch."""
        return torch.batch_norm_elemt(source, _wide(weight, mean), _wide(bias, mean), mean, scale, eps)

    @staticmethod
    def reduce(  # noqa: PLR0913, PLR0917 - as torch has it
        gradient: torch.Tensor,
        source: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """By channel: sum of gradients, sum of gradients times distance to the mean; for weight and bias."""
        found = torch.batch_norm_backward_reduce(gradient, source, mean, scale, _wide(weight, mean), *needed)
        first, second, for_weight, for_bias = found
        dtype = mean.dtype if weight is None else weight.dtype
        return (
            first,
            second,
            for_weight.to(dtype) if needed[1] else None,
            for_bias.to(dtype) if needed[2] else None,
        )

    @staticmethod
    def spread(  # noqa: PLR0913, PLR0917 - as torch has it
        gradient: torch.Tensor,
        source: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor | None,
        total_gradient: torch.Tensor,
        total_product: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the batch."""
        return torch.batch_norm_backward_elemt(
            gradient, source, mean, scale, _wide(weight, mean), total_gradient, total_product, counts
        )


def _wide(values: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor | None:
    """Weights in the dtype of the statistics: kernels refuse those in half precision, as in bf16-true."""
    return None if values is None else values.to(mean.dtype)


class _Host:
    """The same in plain operations, for the CPU."""

    @staticmethod
    def moments(source: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        wide = source.to(accumulated(source.dtype))
        variance, mean = torch.var_mean(wide, _others(source), correction=0)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def combine(  # noqa: PLR0913, PLR0917 - as above
        means: torch.Tensor,
        scales: torch.Tensor,
        counts: torch.Tensor,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        momentum: float,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = counts.sum()
        shares = (counts / total)[:, None]
        mean = (shares * means).sum(0)
        variance = (shares * (scales.pow(-2) - eps + (means - mean).square())).sum(0)
        if running is not None:
            _follow(running, mean, variance, total, momentum)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def normalise(  # noqa: PLR0913, PLR0917 - as above
        source: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        del eps
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        found = (source.to(scale.dtype) - _column(mean, source)) * _column(factor, source)
        if bias is not None:
            found += _column(bias.to(scale.dtype), source)
        return found.to(source.dtype)

    @staticmethod
    def reduce(  # noqa: PLR0913, PLR0917 - as above
        gradient: torch.Tensor,
        source: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        wide = gradient.to(scale.dtype)
        first = wide.sum(_others(source))
        second = (wide * (source.to(scale.dtype) - _column(mean, source))).sum(_others(source))
        dtype = scale.dtype if weight is None else weight.dtype
        return (
            first,
            second,
            (second * scale).to(dtype) if needed[1] else None,
            first.to(dtype) if needed[2] else None,
        )

    @staticmethod
    def spread(  # noqa: PLR0913, PLR0917 - as above
        gradient: torch.Tensor,
        source: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor | None,
        total_gradient: torch.Tensor,
        total_product: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        total = counts.sum()
        distance = source.to(scale.dtype) - _column(mean, source)
        along = _column(scale * scale * total_product / total, source) * distance
        found = gradient.to(scale.dtype) - _column(total_gradient / total, source) - along
        return (found * _column(factor, source)).to(source.dtype)


def _kernels(source: torch.Tensor) -> type[_Gpu | _Host]:
    return _Gpu if source.device.type == "cuda" else _Host


def _others(source: torch.Tensor) -> list[int]:
    """All dimensions but the channels."""
    return [0, *range(2, source.dim())]


def _column(values: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Values by channel in the shape that goes with a batch."""
    return values.view(1, -1, *[1] * (source.dim() - 2))


class SyncReducer(Reducer):
    """Gradients of ranks that exchange statistics in every pass.

    All ranks run the same number of passes. Buckets are sent after the last pass: on one stream with
    statistics, these would only hold them up.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Any, int]], statistics: Statistics) -> None:
        super().__init__(parameters, equal_parts=True)
        self._statistics = statistics
        statistics.note = self._note
        self._device = parameters[0][0].device
        self._known: dict[str, list[NormCollective]] = {}
        self._now: list[NormCollective] = []
        self._kind = ""
        self._done = 0
        self._stays_out = False

    @property
    def rehearsed(self) -> bool:  # type: ignore[override]  # the other one always is
        """Whether the sequence of a pass is known."""
        return PASS in self._known

    def begin(self) -> None:
        """Gradients are zero, and nothing has been sent."""
        super().begin()
        self._kind = ""
        self._statistics.counts = True

    def before(self, number: int, count: int) -> None:
        """Part `number` of `count` follows."""
        del number, count
        self._learn()
        self._kind = PASS

    def before_forward(self) -> None:
        """A forward pass without gradients follows, as gradient caching makes them before the parts."""
        self._learn()
        self._kind = FORWARD

    def after_forward(self) -> None:
        """Nothing is left of that pass."""

    def finish_forwards(self, failed_at: int | None, count: int) -> None:
        """Take part in what is left of `count` such passes, where this rank failed in one."""
        if failed_at is None:
            self._learn()
            return
        self.abandon()
        # All ranks repeat the step from here: no statistics follow in this attempt.
        self._stays_out = True
        self._answer(FORWARD, count - failed_at - 1)

    def abandon(self) -> None:
        """The part under way has failed."""
        self._done = len(self._now)
        self._now, self._kind = [], ""
        super().abandon()

    def finish(self, failed_at: int | None, count: int) -> None:
        """Take part in what the others still wait for; then send all buckets."""
        if failed_at is None:
            self._learn()
        elif not self._stays_out:
            self._answer(PASS, count - failed_at - 1)
        self._stays_out = False
        super().finish(failed_at, count)

    def _note(self, exchange: NormCollective) -> None:
        self._now.append(exchange)

    def _learn(self) -> None:
        """The pass that has just gone well shows how such passes go."""
        if self._kind:
            self._known[self._kind] = self._now
        self._now, self._kind = [], ""

    def _answer(self, kind: str, more: int) -> None:
        """Take part without samples: in the rest of a pass that has failed, and in so many whole ones."""
        each = self._known[kind]
        for exchange in (*each[self._done :], *each * more):
            exchange.answer(self._device)
