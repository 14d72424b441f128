"""Run recurrent layers and cells on fake tensors as on CUDA: cuDNN for layers, fused kernels for cells.

torch implements these operations only for CUDA, so FakeTensorMode does not support them. Sizes follow torch's
sources (RNN.cpp, RNN.cu, PackedSequence.cpp); cuDNN's workspaces were measured
(`catalog/calibrations/h200.toml`). Packed sequences depend on the lengths in the batch. Unknown lengths count
as full length, which is an assumption of the estimate.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.catalog.facts import fallback_facts
from trimtab.trace.data_dependent import REAL_ATTRIBUTE, read_known_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's modes."""
GATES = {LSTM: 4, GRU: 3}
"""Gates of a cell by mode; plain cells have one."""
STATES = {LSTM: 1, GRU: 3}
"""Numbers per hidden unit that cuDNN saves besides the gates, by mode; plain cells save none."""
GRU_SAVED = 5
"""Numbers per hidden unit that a fused GRU cell saves for its backward pass."""


def read_extent(source: torch.Tensor, batch_sizes: Any, *, batch_first: bool) -> tuple[int, int, int]:
    """Return samples, steps and inputs of a layer. Inputs are samples x steps, or fewer if packed."""
    if batch_sizes:
        return int(batch_sizes[0]), len(batch_sizes), source.shape[0]
    samples, steps = source.shape[:2] if batch_first else (source.shape[1], source.shape[0])
    return samples, steps, samples * steps


def make_layer_result(args: tuple[Any, ...]) -> Any:
    """Return the output, the last states, cuDNN's saved values for the backward pass, and the flat weights.

    cuDNN saves every gate and the states of each step per layer and direction, and the input between layers.
    With dropout it also saves one bit per number and direction of the padded sequences.
    """
    source, _, _, flat, _, _, mode, size, _, layers, first, dropout, train, both = args[:14]
    directions = 2 if both else 1
    packed = args[14] if len(args) > 14 else ()  # noqa: PLR2004 - the position of batch_sizes
    batch, steps, inputs = read_extent(source, packed, batch_first=first)
    cells = inputs * size * directions
    numbers = (GATES.get(mode, 1) + STATES.get(mode, 0)) * layers + layers - 1
    saved = source.element_size() * cells * numbers
    saved += (layers - 1) * batch * steps * size * directions * directions // 8 if dropout else 0
    reserve = source.new_empty(((saved + 256) if train else 0,), dtype=torch.uint8)
    states = (layers * directions, batch, size)
    cell = source.new_empty(states if mode == LSTM else (0,))
    # In fp32 the parameters are the flat buffer; under autocast they are copied into one.
    buffer = flat if flat is not None else source.new_empty((0,))
    out = source.new_empty((*source.shape[:-1], size * directions))
    return out, source.new_empty(states), cell, reserve, buffer


def workspace_bytes(  # noqa: PLR0913 - cuDNN's own
    source: torch.Tensor,
    mode: int,
    hidden: int,
    layers: int,
    *,
    first: bool,
    dropout: float,
    both: bool,
    packed: Any,
) -> int:
    """Return the bytes of cuDNN's workspace for a recurrent layer, the same forward and backward.

    It has gates and states of each input, states of each sample, a copy of the weights, and 8 MiB for each
    layer and direction. Inputs that are wide compared to the hidden state need more. A packed bidirectional
    LSTM of 2 layers, 300 to 512 wide, with 2742 inputs of 64 samples in fp16 takes 88,580,352 bytes.
    """
    batch, _, inputs = read_extent(source, packed, batch_first=first)
    directions, width = 2 if both else 1, source.shape[-1]
    kind = mode if mode in GATES else TANH
    facts = fallback_facts().recurrent
    cell = {LSTM: facts.lstm, GRU: facts.gru}.get(kind, facts.plain)
    per_input, per_sample = cell.numbers(packed=bool(packed), both=bool(both))
    rows, states = inputs * hidden * directions, layers * batch * hidden * directions
    numbers = per_input * rows + per_sample * states
    if dropout and not both:
        numbers += rows
    if packed:
        fewer = 1 if kind == TANH and not both else 3
        wide = inputs * width * (4 if both else 1) + (min(layers, 2) if both else 1) * rows
        numbers = max(numbers, wide + (5 if kind == LSTM and both else fewer) * states)
    else:
        numbers += inputs * width
        if hidden <= facts.narrow and kind != TANH and not both:
            numbers += inputs * (10 * hidden + max(2 * width, 6 * hidden))
    gates = GATES.get(mode, 1)
    numbers += sum(
        gates * hidden * ((hidden * directions if layer else width) + hidden) * directions
        for layer in range(layers)
    )
    return (
        source.element_size() * numbers
        + facts.kernel_bytes * layers * directions
        + (0 if packed else 8 * batch)
        + 256
    )


def make_layer_gradients(args: tuple[Any, ...]) -> Any:
    """Return the gradients of input, states and weights; the weight gradients share one buffer."""
    source, weights, hidden, cell = args[0], args[1], args[4], args[5]
    empty = source.new_empty((0,))
    return (
        torch.empty_like(source),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else empty,
        _make_buffer_views(weights, source.dtype),
    )


def _make_buffer_views(weights: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return views of one new buffer, each with the shape of a weight."""
    flat = weights[0].new_empty((sum(weight.numel() for weight in weights),), dtype=dtype)
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]


def make_lstm_cell_result(args: tuple[Any, ...]) -> Any:
    """Return hidden state, cell state, and the gates for the backward pass."""
    gates, cell = args[0], args[2]
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(gates)


def make_lstm_cell_gradients(args: tuple[Any, ...]) -> Any:
    """Return the gradients of the gates, of the cell state and of the bias."""
    cell, saved, has_bias = args[2], args[4], args[5]
    bias = saved.new_empty(saved.shape[1:] if has_bias else (0,))
    return torch.empty_like(saved), torch.empty_like(cell), bias


def make_gru_cell_result(args: tuple[Any, ...]) -> Any:
    """Return the hidden state, and five numbers per unit for the backward pass."""
    hidden = args[2]
    return torch.empty_like(hidden), hidden.new_empty((hidden.shape[0], GRU_SAVED * hidden.shape[1]))


def make_gru_cell_gradients(args: tuple[Any, ...]) -> Any:
    """Return the gradients of the gates of input and state, of the state, and of both biases."""
    gradient, saved, has_bias = args[0], args[1], args[2]
    rows, size = saved.shape[0], saved.shape[1] // GRU_SAVED * GATES[GRU]
    biases = [saved.new_empty((size,) if has_bias else (0,)) for _ in range(2)]
    return saved.new_empty((rows, size)), saved.new_empty((rows, size)), torch.empty_like(gradient), *biases


RESULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::_cudnn_rnn": make_layer_result,
    "aten::_cudnn_rnn_backward": make_layer_gradients,
    "aten::_thnn_fused_lstm_cell": make_lstm_cell_result,
    "aten::_thnn_fused_lstm_cell_backward_impl": make_lstm_cell_gradients,
    "aten::_thnn_fused_gru_cell": make_gru_cell_result,
    "aten::_thnn_fused_gru_cell_backward": make_gru_cell_gradients,
}


def register_recurrent(library: torch.library.Library, assume: Callable[[str], None]) -> None:
    """Run recurrent layers with cuDNN, and pack sequences by their known or assumed lengths."""
    for name, mode in {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}.items():
        library.impl(f"{name}.input", functools.partial(_run_padded, mode), "AutogradCUDA")
        library.impl(f"{name}.data", functools.partial(_run_packed, mode), "AutogradCUDA")

    def pack(source: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        sizes = _compute_batch_sizes(lengths, source.shape[1 if batch_first else 0], assume)
        return _PackSequence.apply(source, sizes, batch_first), make_known_tensor(sizes)

    for key in ("AutogradCUDA", "CUDA"):
        library.impl("_pack_padded_sequence", pack, key)
    library.impl("_pad_packed_sequence", _pad_packed, "AutogradCUDA")


def _run_padded(mode: int, source: Any, states: Any, weights: Any, *settings: Any) -> Any:
    return _run_cudnn(mode, source, list(states) if mode == LSTM else [states], list(weights), settings)


def _run_packed(mode: int, source: Any, batch_sizes: Any, states: Any, weights: Any, *settings: Any) -> Any:
    state_list = list(states) if mode == LSTM else [states]
    return _run_cudnn(mode, source, state_list, list(weights), settings, _read_batch_sizes(batch_sizes))


def _run_cudnn(  # noqa: PLR0913, PLR0917 - cuDNN's own
    mode: int,
    source: Any,
    states: list[Any],
    weights: list[Any],
    settings: tuple[Any, ...],
    packed: list[int] | None = None,
) -> Any:
    biases, layers, dropout, train, both, *first = settings
    if torch.is_autocast_enabled("cuda") and source.dtype != torch.float64:
        # Autocast always runs cuDNN's recurrent layers in fp16, whatever its dtype and that of the input.
        half = torch.float16
        if any(weight.dtype != half for weight in weights):
            weights = list(_CastWeights.apply(half, *weights))
        source, states = source.to(half), [state.to(half) for state in states]
    size = states[0].shape[2]
    cell = states[1] if len(states) > 1 else None
    out, hidden, cell, *_ = torch.ops.aten._cudnn_rnn(
        source, weights, 4 if biases else 2, None, states[0], cell, mode, size, 0, layers,
        bool(first and first[0]), dropout, train, both, packed or [], None,
    )  # fmt: skip
    return (out, hidden, cell) if mode == LSTM else (out, hidden)


def _compute_batch_sizes(lengths: torch.Tensor, longest: int, assume: Callable[[str], None]) -> list[int]:
    """Return the number of samples of each step."""
    values = read_known_values(lengths)
    if values is None:
        assume("sequences of unknown length are packed as if all had the full length")
        values = [longest] * lengths.shape[0]
    return [sum(1 for length in values if length > step) for step in range(max(values))]


def _read_batch_sizes(batch_sizes: torch.Tensor) -> list[int]:
    sizes = read_known_values(batch_sizes)
    if sizes is None:
        # The packed sequence was not made by packing a padded batch.
        raise NotImplementedError("a packed sequence whose batch_sizes follow from data")
    return [int(size) for size in sizes]


def _pad_packed(data: Any, batch_sizes: Any, batch_first: bool, value: Any, total: int = -1) -> Any:
    """Return the padded batch and lengths of a packed one, with the operations that torch uses."""
    sizes = _read_batch_sizes(batch_sizes)
    out = data.new_full((max(total, len(sizes)), sizes[0], *data.shape[1:]), value)
    offset = 0
    for begin, end in _equal_size_ranges(sizes):
        count = (end - begin) * sizes[begin]
        piece = data[offset : offset + count].view(end - begin, sizes[begin], *data.shape[1:])
        out[begin:end, : sizes[begin]].copy_(piece)
        offset += count
    lengths = make_known_tensor([sum(1 for size in sizes if size > index) for index in range(sizes[0])])
    return (out.transpose(0, 1) if batch_first else out), lengths


def _equal_size_ranges(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last step (exclusive) of each range of steps with the same number of samples.

    >>> list(_equal_size_ranges([3, 3, 2, 1, 1]))
    [(0, 2), (2, 3), (3, 5)]
    """
    begin = 0
    for step, size in enumerate([*sizes[1:], 0], 1):
        if size != sizes[begin]:
            yield begin, step
            begin = step


def make_known_tensor(values: list[int]) -> torch.Tensor:
    """Return integers on the host whose values later operations can read; fake where everything is."""
    with _disable_current_modes():
        real = torch.tensor(values, dtype=torch.int64)
    made = torch.empty((len(values),), dtype=torch.int64, device="cpu")
    if not isinstance(made, FakeTensor):
        return real
    setattr(made, REAL_ATTRIBUTE, real)
    return made


class _CastWeights(torch.autograd.Function):
    """Casts weights to another dtype, in one buffer as cuDNN requires."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> Any:
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(_make_buffer_views(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (
            None,
            *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)),
        )


class _PackSequence(torch.autograd.Function):
    """Packs a padded batch, with the operations that torch uses."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, sizes: list[int], batch_first: bool) -> torch.Tensor:
        ctx.sizes, ctx.shape, ctx.batch_first = sizes, source.shape, batch_first
        ordered = source.transpose(0, 1) if batch_first else source
        pieces = [
            ordered[begin:end, : sizes[begin]].contiguous().view(-1, *ordered.shape[2:])
            for begin, end in _equal_size_ranges(sizes)
        ]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, offset = gradients[0].new_zeros(ctx.shape), 0
        ordered = gradient.transpose(0, 1) if ctx.batch_first else gradient
        for step, size in enumerate(ctx.sizes):
            ordered[step, :size].copy_(gradients[0][offset : offset + size])
            offset += size
        return gradient, None, None
