"""Synchronised BatchNorm: compute statistics over a micro-batch of all ranks together.

In the forward pass each layer gathers mean, deviation and count of every rank; in the backward pass it sums
two values per channel over ranks. The means are weighted by the counts, so ranks may have different numbers
of samples. A rank whose pass must not count takes part with count 0. On a GPU the kernels are those of
SyncBatchNorm.

torch's own SyncBatchNorm refuses CPU tensors, makes the host wait for the GPU in every layer, and deadlocks
if one rank raises an exception. Here a pass of one sample before the first step records the sequence of
collectives. A rank that runs out of memory answers the rest of the sequence with count 0, and all ranks
repeat the step.

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

from trimtab.engine.additive_loss import find_batch_norms
from trimtab.engine.gradients import Reducer
from trimtab.errors import JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.engine.context_parallel import ContextCollective, ContextGroup

PASS, FORWARD = "pass", "forward"
"""Kinds of passes: forward and backward; forward without gradients."""
PLANES, VOLUMES = 4, 5
"""Dimensions of a batch of images and of a batch of volumes."""
EMPTY_COUNT = 1e-30
"""Count of a rank without samples: practically 0, but a mean over it is not NaN."""


class NormCollective(NamedTuple):
    """One collective of a BatchNorm layer."""

    gathers: bool
    """Whether it gathers statistics; else it sums gradients over ranks."""
    length: int
    """Elements that this rank sends."""
    dtype: torch.dtype

    def answer(self, device: torch.device) -> None:
        """Take part without samples."""
        if self.gathers:
            gather_values(make_empty_statistics(self.length // 2, self.dtype, device))
        else:
            dist.all_reduce(torch.zeros(self.length, dtype=self.dtype, device=device))


class SharedStatistics:
    """State that the synchronised layers of a model share; it runs their collectives."""

    in_collective = False
    """Whether a layer of this process is in a collective; a tracer reads it to exclude gradients."""

    def __init__(self) -> None:
        self.is_counted = True
        """Whether the samples of the current pass are part of the statistics."""
        self.record: Callable[[NormCollective], None] | None = None
        """Called just before each collective."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, one row per rank."""
        with self._mark_collective(values, gathers=True):
            return gather_values(values)

    def sum(self, values: torch.Tensor) -> None:
        """Replace values by their sum over all ranks."""
        with self._mark_collective(values, gathers=False):
            dist.all_reduce(values)

    @contextlib.contextmanager
    def _mark_collective(self, values: torch.Tensor, *, gathers: bool) -> Iterator[None]:
        if self.record is not None:
            self.record(NormCollective(gathers, values.numel(), values.dtype))
        SharedStatistics.in_collective = True
        try:
            yield
        finally:
            SharedStatistics.in_collective = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same object: copies of a layer share it."""
        return self


def gather_values(values: torch.Tensor) -> torch.Tensor:
    """Return the values of all ranks, one row per rank."""
    ranks = dist.get_world_size()
    gathered = values.new_empty((ranks * values.numel(),))
    _all_gather_into(gathered, values)
    return gathered.view(ranks, -1)


def _all_gather_into(into: torch.Tensor, values: torch.Tensor) -> None:
    # Newer versions of torch have a new name for this function, and warn about the old one.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(into, values)


def make_empty_statistics(channels: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the statistics of a rank without samples: any mean and deviation, and count 0."""
    statistics = torch.ones(2 * channels + 1, dtype=dtype, device=device)
    statistics[-1] = EMPTY_COUNT
    return statistics


def synchronise_batch_norms(model: nn.Module) -> SharedStatistics | None:
    """Make all BatchNorm layers of a model compute statistics over all ranks; return None if it has none."""
    layers = find_batch_norms(model)
    if not layers:
        return None
    statistics = SharedStatistics()
    for layer in layers:
        layer.__dict__["_trimtab_statistics"] = statistics
        layer.__class__ = _extend_class(type(layer), _Synchronised)  # type: ignore[arg-type]
    return statistics


class _Synchronised:
    """Mixin for the class of a BatchNorm layer: its calls of batch_norm() are synchronised."""

    training: bool
    _buffers: dict[str, torch.Tensor | None]
    _trimtab_statistics: SharedStatistics

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the other base class has it
        # If recomputed in a backward pass, the running statistics already include these samples.
        is_recomputed = torch._C._current_graph_task_id() != -1
        tracked = self._buffers.get("num_batches_tracked")
        if is_recomputed and tracked is not None:
            self._buffers["num_batches_tracked"] = None
        try:
            with _Intercept(self._trimtab_statistics, updates_running=not is_recomputed) as intercept:
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            # torch ends recomputation early with an exception.
            if is_recomputed and tracked is not None:
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
def _extend_class(kind: type[nn.Module], before: type) -> type[nn.Module]:
    """Return a subclass of a layer's class with the mixin `before` first, under the layer's own name."""
    if issubclass(kind, before):
        return kind
    # The forward() of SyncBatchNorm communicates by itself and cannot recover from out-of-memory.
    communicates = before is _Synchronised and issubclass(kind, nn.SyncBatchNorm)
    return type(kind.__name__, (before, _AnyShape if communicates else kind), {"__module__": kind.__module__})


def widen_norms(model: nn.Module) -> None:
    """Let BatchNorm layers compute with fp32 weights if FSDP gathers them in half precision.

    Their running statistics are fp32, and torch refuses weights of another dtype with them.
    """
    for layer in find_batch_norms(model):
        layer.__class__ = _extend_class(type(layer), _WideWeights)  # type: ignore[arg-type]


class _WideWeights:
    """Mixin for the class of a BatchNorm layer: its weights are read in fp32."""

    _parameters: dict[str, torch.Tensor | None]
    _buffers: dict[str, torch.Tensor | None]

    @property
    def weight(self) -> torch.Tensor | None:
        """The weight, in the dtype of the running statistics."""
        return self._widen_parameter("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, in the dtype of the running statistics."""
        return self._widen_parameter("bias")

    def _widen_parameter(self, name: str) -> torch.Tensor | None:
        parameter = self._parameters.get(name)
        # A sharded parameter is only inspected, never computed with.
        if parameter is None or hasattr(parameter, "full_tensor"):
            return parameter
        if parameter.dtype is accumulation_dtype(parameter.dtype):
            return parameter
        running = self._buffers.get("running_mean")
        return parameter.to(torch.float32 if running is None else running.dtype)


class _AnyShape(_BatchNorm):
    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        """Accept any shape, as torch's SyncBatchNorm does."""


class _Intercept(TorchFunctionMode):
    """Intercept the calls of batch_norm() in the forward pass of one layer."""

    def __init__(self, statistics: SharedStatistics, *, updates_running: bool) -> None:
        super().__init__()
        self._statistics = statistics
        self._updates_running = updates_running
        self.is_called = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.is_called = True
        call = _Call(*args, **(kwargs or {}))
        if not call.training:
            return func(*args, **(kwargs or {}))
        has_running = self._updates_running and call.running_mean is not None
        running = (call.running_mean, call.running_var) if has_running else None
        return _Normalise.apply(
            call.input, call.weight, call.bias, running, call.momentum, call.eps, self._statistics
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
        statistics: SharedStatistics,
    ) -> torch.Tensor:
        source = _make_dense(source)
        channels = source.shape[1]
        kernels = _kernels(source)
        count = source.numel() // channels if statistics.is_counted else 0
        wide = accumulation_dtype(source.dtype)
        if count:
            own, scale = kernels.moments(source, eps)
            mine = torch.cat([own, scale, own.new_full((1,), count)])
        else:
            mine = make_empty_statistics(channels, wide, source.device)
        every = statistics.gather(mine)
        means, scales, counts = every[:, :channels], every[:, channels:-1], every[:, -1]
        updated = running if running is not None and running[0].dtype is wide else None
        mean, scale = kernels.combine(means, scales, counts, updated, momentum, eps)
        if running is not None and updated is None:
            _update_running(running, mean, scale.pow(-2) - eps, counts.sum(), momentum)
        ctx.save_for_backward(source, weight, mean, scale, counts.to(torch.int32))
        ctx.statistics, ctx.counts = statistics, count > 0
        return kernels.normalise(source, weight, bias, mean, scale, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight, mean, scale, counts = ctx.saved_tensors
        gradient = _make_dense(gradient)
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
            for_source = kernels.compute_gradient(
                gradient, source, mean, scale, weight, first, second, counts
            )
        return (for_source, for_weight, for_bias, None, None, None, None)


def _update_running(
    running: tuple[torch.Tensor, torch.Tensor],
    mean: torch.Tensor,
    variance: torch.Tensor,
    total: torch.Tensor,
    momentum: float,
) -> None:
    """Update the running statistics with those of the batch."""
    unbiased = variance * (total / (total - 1.0).clamp(min=1.0))
    for average, new in zip(running, (mean, unbiased), strict=True):
        average.copy_(average + momentum * (new - average))


def _make_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in contiguous memory, channels first or last."""
    if tensor.dim() == PLANES and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    if tensor.dim() == VOLUMES and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor
    return tensor.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute statistics in, for values of a dtype."""
    return torch.promote_types(dtype, torch.float32)


class _Gpu:
    """torch's kernels for batches that are spread over ranks; CUDA only."""

    @staticmethod
    def moments(source: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and inverse deviation of this rank's batch, by channel."""
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
        """Combine the statistics of all ranks; update the running statistics, which have the same dtype."""
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
        """Return the normalised batch."""
        return torch.batch_norm_elemt(source, _widen(weight, mean), _widen(bias, mean), mean, scale, eps)

    @staticmethod
    def reduce(  # noqa: PLR0913, PLR0917 - as torch has it
        gradient: torch.Tensor,
        source: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return sums of gradients and of gradients x (x - mean) by channel; gradients of weight and bias."""
        first, second, for_weight, for_bias = torch.batch_norm_backward_reduce(
            gradient, source, mean, scale, _widen(weight, mean), *needed
        )
        dtype = mean.dtype if weight is None else weight.dtype
        return (
            first,
            second,
            for_weight.to(dtype) if needed[1] else None,
            for_bias.to(dtype) if needed[2] else None,
        )

    @staticmethod
    def compute_gradient(  # noqa: PLR0913, PLR0917 - as torch has it
        gradient: torch.Tensor,
        source: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor | None,
        total_gradient: torch.Tensor,
        total_product: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient of the batch."""
        return torch.batch_norm_backward_elemt(
            gradient, source, mean, scale, _widen(weight, mean), total_gradient, total_product, counts
        )


def _widen(values: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor | None:
    """Cast weights to the dtype of the statistics: kernels refuse half precision, as in bf16-true."""
    return None if values is None else values.to(mean.dtype)


class _Host:
    """The same functions in plain operations, for the CPU."""

    @staticmethod
    def moments(source: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        wide = source.to(accumulation_dtype(source.dtype))
        variance, mean = torch.var_mean(wide, _reduced_dims(source), correction=0)
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
            _update_running(running, mean, variance, total, momentum)
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
        output = (source.to(scale.dtype) - _expand_channels(mean, source)) * _expand_channels(factor, source)
        if bias is not None:
            output += _expand_channels(bias.to(scale.dtype), source)
        return output.to(source.dtype)

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
        first = wide.sum(_reduced_dims(source))
        second = (wide * (source.to(scale.dtype) - _expand_channels(mean, source))).sum(_reduced_dims(source))
        dtype = scale.dtype if weight is None else weight.dtype
        return (
            first,
            second,
            (second * scale).to(dtype) if needed[1] else None,
            first.to(dtype) if needed[2] else None,
        )

    @staticmethod
    def compute_gradient(  # noqa: PLR0913, PLR0917 - as above
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
        distance = source.to(scale.dtype) - _expand_channels(mean, source)
        along = _expand_channels(scale * scale * total_product / total, source) * distance
        centred = gradient.to(scale.dtype) - _expand_channels(total_gradient / total, source) - along
        return (centred * _expand_channels(factor, source)).to(source.dtype)


def _kernels(source: torch.Tensor) -> type[_Gpu | _Host]:
    return _Gpu if source.device.type == "cuda" else _Host


def _reduced_dims(source: torch.Tensor) -> list[int]:
    """Return all dimensions except the channels."""
    return [0, *range(2, source.dim())]


def _expand_channels(values: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Reshape values by channel so that they broadcast over a batch."""
    return values.view(1, -1, *[1] * (source.dim() - 2))


class SyncReducer(Reducer):
    """Sum gradients of ranks that exchange BatchNorm statistics, or parts of sequences, in every pass.

    All ranks run the same number of passes. Buckets are sent after the last pass: on the same stream, they
    would delay the statistics.
    """

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, Any, int]], statistics: SharedStatistics | ContextGroup
    ) -> None:
        super().__init__(parameters, equal_micro_batches=True)
        self._statistics = statistics
        statistics.record = self._record
        self._device = parameters[0][0].device
        self._sequences: dict[str, list[NormCollective | ContextCollective]] = {}
        self._current: list[NormCollective | ContextCollective] = []
        self._kind = ""
        self._done = 0
        self._skips_finish = False

    @property
    def is_rehearsed(self) -> bool:  # type: ignore[override]  # always true in Reducer
        """Whether the collectives of a pass are recorded."""
        return PASS in self._sequences

    def start_attempt(self) -> None:
        """Set all gradients to zero and count samples in the statistics again."""
        super().start_attempt()
        self._kind = ""
        self._statistics.is_counted = True

    def prepare_micro_batch(self, number: int, count: int) -> None:
        """Prepare for a micro-batch."""
        del number, count
        self._save_sequence()
        self._kind = PASS

    def before_forward(self) -> None:
        """Prepare for a forward pass without gradients, as gradient caching runs first."""
        self._save_sequence()
        self._kind = FORWARD

    def after_forward(self) -> None:
        """Do nothing: that pass leaves no state."""

    def finish_forwards(self, failed_at: int | None, count: int) -> None:
        """Join the remaining collectives of `count` such passes if this rank failed in pass `failed_at`."""
        if failed_at is None:
            self._save_sequence()
            return
        self.discard_micro_batch()
        # All ranks now repeat the step: this attempt sends no more statistics.
        self._skips_finish = True
        self._answer(FORWARD, count - failed_at - 1)

    def discard_micro_batch(self) -> None:
        """Forget the collectives of the failed pass and reset the gradients."""
        self._done = len(self._current)
        self._current, self._kind = [], ""
        super().discard_micro_batch()

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Join the remaining collectives after a failure, then send all buckets."""
        if failed_at is None:
            self._save_sequence()
        elif not self._skips_finish:
            self._answer(PASS, count - failed_at - 1)
        self._skips_finish = False
        super().finish_attempt(failed_at, count)

    def _record(self, exchange: NormCollective | ContextCollective) -> None:
        self._current.append(exchange)

    def _save_sequence(self) -> None:
        """Store the collectives of the pass that has just succeeded."""
        if self._kind:
            self._sequences[self._kind] = self._current
        self._current, self._kind = [], ""

    def _answer(self, kind: str, more: int) -> None:
        """Take part without samples in the rest of a failed pass and in `more` full passes."""
        each = self._sequences[kind]
        for exchange in (*each[self._done :], *each * more):
            exchange.answer(self._device)
