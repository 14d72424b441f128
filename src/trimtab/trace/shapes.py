"""Results of operations that fake tensors cannot answer for: torch describes them only in its CUDA half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

LSTM, GRU = 2, 3
GATES = {LSTM: 4, GRU: 3}
"""Gates of a cell by cuDNN's mode; plain cells have one."""


def _batch_norm(args: tuple[Any, ...]) -> Any:
    source, weight = args[0], args[1]
    moments = source.new_empty((weight.numel(),), dtype=torch.float32)
    return (
        torch.empty_like(source),
        moments,
        torch.empty_like(moments),
        source.new_empty((0,), dtype=torch.uint8),
    )


def _batch_norm_backward(args: tuple[Any, ...]) -> Any:
    source, weight = args[0], args[2]
    return torch.empty_like(source), torch.empty_like(weight), torch.empty_like(weight)


def _rnn(args: tuple[Any, ...]) -> Any:
    """Output, last states, what cuDNN keeps for the backward pass, and the flat weights.

    Per layer and direction it keeps every gate and the cell of each step, and between layers the input; one
    bit a number where dropout acts.
    """
    source, _, _, flat, _, _, mode, size, _, layers, first, dropout, train, both = args[:14]
    ways = 2 if both else 1
    steps = source.shape[1] if first else source.shape[0]
    batch = source.shape[0] if first else source.shape[1]
    shape = (batch, steps, size * ways) if first else (steps, batch, size * ways)
    cells = batch * steps * size * ways
    kept = source.element_size() * cells * (GATES.get(mode, 1) * layers + layers + layers - 1)
    kept += (layers - 1) * cells // 8 if dropout else 0
    reserve = source.new_empty(((kept + 256) if train else 0,), dtype=torch.uint8)
    states = (layers * ways, batch, size)
    cell = source.new_empty(states if mode == LSTM else (0,))
    # In fp32 the parameters are the flat buffer; under autocast they are copied into one.
    buffer = flat if flat is not None else source.new_empty((0,))
    return source.new_empty(shape), source.new_empty(states), cell, reserve, buffer


def _rnn_backward(args: tuple[Any, ...]) -> Any:
    source, weights, hidden, cell = args[0], args[1], args[4], args[5]
    none = source.new_empty((0,))
    return (
        torch.empty_like(source),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else none,
        [torch.empty_like(one) for one in weights],
    )


def _ctc_loss(args: tuple[Any, ...]) -> Any:
    """The loss of each sample, and the sums over all ways to read it."""
    steps, batch = args[0].shape[0], args[0].shape[1]
    longest = args[1].shape[-1] if args[1].dim() > 1 else args[1].numel()
    return args[0].new_empty((batch,)), args[0].new_empty((batch, steps, 2 * longest + 1))


def _nothing(_: tuple[Any, ...]) -> None:
    return None


COMPOSITE_WITHOUT_CUDA = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operations that a build without CUDA takes apart, and a build with CUDA runs as one kernel."""


def keep_whole(library: torch.library.Library) -> None:
    """Give those operations a CUDA kernel, so that they are not taken apart. It is never run."""

    def never(*_: Any) -> None:
        raise AssertionError("a fake tensor reached a kernel")

    for name in COMPOSITE_WITHOUT_CUDA:
        library.impl(name, never, "CUDA")


RESULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _rnn_backward,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": lambda args: torch.empty_like(args[1]),
    "aten::_use_cudnn_ctc_loss": lambda _: False,
    "aten::_use_miopen_ctc_loss": lambda _: False,
    "aten::_fused_sgd_": _nothing,
    "aten::_fused_adagrad_": _nothing,
}


DENSE_RESULTS = {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
"""Operations whose first result is dense on CUDA, however its input lies."""


def with_dense_first(out: Any) -> Any:
    """The results with the first one dense."""
    first = out[0]
    if first is None or first.is_contiguous():
        return out
    return (torch.empty(first.shape, dtype=first.dtype, device=first.device), *out[1:])


def register_rnn(library: torch.library.Library) -> None:
    """Send recurrent layers to cuDNN, as a CUDA build does."""

    def run(mode: int, source: Any, states: list[Any], weights: list[Any], settings: tuple[Any, ...]) -> Any:
        biases, layers, dropout, train, both, first = settings
        if torch.is_autocast_enabled("cuda") and source.dtype == torch.float32:
            # Autocast hands cuDNN's recurrent layers fp16, whatever dtype it is set to.
            half = torch.float16
            source, states = source.to(half), [one.to(half) for one in states]
            weights = [one.to(half) for one in weights]
        size = states[0].shape[2]
        cell = states[1] if len(states) > 1 else None
        out, hidden, cell, *_ = torch.ops.aten._cudnn_rnn(
            source, weights, 4 if biases else 2, None, states[0], cell, mode, size, 0, layers, first,
            dropout, train, both, [], None,
        )  # fmt: skip
        return (out, hidden, cell) if mode == LSTM else (out, hidden)

    def lstm(source: Any, states: Any, weights: Any, *settings: Any) -> Any:
        return run(LSTM, source, list(states), list(weights), settings)

    def gru(source: Any, state: Any, weights: Any, *settings: Any) -> Any:
        return run(GRU, source, [state], list(weights), settings)

    library.impl("lstm.input", lstm, "AutogradCUDA")
    library.impl("gru.input", gru, "AutogradCUDA")
