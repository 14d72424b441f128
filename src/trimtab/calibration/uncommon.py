"""Calibration programs of operations that few models have: no common layer says how long they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from trimtab.calibration.program import CalibrationProgram, use_precision

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((64, 128, 512), (16, 1024, 2048), (256, 64, 1024), (4096, 64, 40), (8, 32, 65_536))
"""Samples, channels, steps."""
WINDOWS = (3, 9, 25)
TABLES = ((8, 16, 2_000_000), (512, 8, 4_000_000), (50_000, 64, 500_000), (1000, 256, 200_000))
"""Rows and columns of an embedding, and how many rows are taken."""
MOST_ADDED = 10_000
"""Rows that are added to one: more wait for each other, which takes seconds and says nothing else."""
ODD_CHANNELS = ((128, 65, 64, 32), (64, 129, 129, 28), (32, 36, 100, 56), (256, 3, 50, 32))
"""Samples, channels in and out, side: channels that do not fill the loads of tensor cores."""


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)


def _backward(result: torch.Tensor) -> None:
    result.backward(torch.ones_like(result))


REDUCTIONS: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    lambda x, dim: x.max(dim).values,
    lambda x, dim: x.min(dim).values,
    lambda x, dim: x.amax(dim),
    lambda x, dim: x.logsumexp(dim),
    lambda x, dim: x.std(dim),
    lambda x, dim: x.var(dim),
    lambda x, dim: x.norm(dim=dim),
    lambda x, dim: x.abs().mean(dim),
    lambda x, dim: x.sum(dim),
)
SCANS: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    lambda x, dim: x.cumsum(dim),
    lambda x, dim: x.flip(dim),
    lambda x, dim: x.roll(1, dim),
    lambda x, dim: x.sort(dim).values,
    lambda x, dim: functional.normalize(x, dim=dim),
)
CURVES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.mish,
    functional.softplus,
    functional.elu,
    functional.logsigmoid,
    functional.hardtanh,
    torch.atan,
    torch.sin,
    torch.erf,
    torch.log1p,
)


def _reductions(dtype: torch.dtype, shape: tuple[int, int, int]) -> CalibrationProgram:
    """Reductions and scans over the last and over the middle dimension."""

    def run() -> None:
        x = _numbers(shape, dtype)
        for dim in (1, 2):
            for compute in (*REDUCTIONS, *SCANS):
                _backward(compute(x, dim))
            (x.detach().argmax(dim), x.detach().argmin(dim))
            if shape[dim] > max(WINDOWS):
                _backward(x.topk(8, dim).values)

    return CalibrationProgram(f"reductions, {shape}, {dtype}", 4 * _count(shape) * 12, run)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _curves(dtype: torch.dtype, shape: tuple[int, int, int]) -> CalibrationProgram:
    """Functions of single numbers, and losses."""

    def run() -> None:
        x = _numbers(shape, dtype)
        for compute in CURVES:
            _backward(compute(x))
        target = torch.rand(shape, dtype=dtype, device="cuda")
        _backward(functional.smooth_l1_loss(x, target))
        _backward(functional.huber_loss(x, target))
        _backward(functional.kl_div(x, target, reduction="batchmean"))
        _backward(functional.binary_cross_entropy_with_logits(x, target))
        _backward(torch.logaddexp(x, target))
        _backward(torch.where(target > 0, x, target).clamp(min=-1, max=1))

    return CalibrationProgram(f"curves, {shape}, {dtype}", 4 * _count(shape) * 12, run)


def _pools(dtype: torch.dtype, shape: tuple[int, int, int]) -> CalibrationProgram:
    """Pooling, interpolation and windows over steps and over images."""

    def run() -> None:
        x = _numbers(shape, dtype)
        side = round(shape[2] ** 0.5)
        image = _numbers((shape[0], shape[1], side, side), dtype)
        for window in WINDOWS:
            _backward(functional.avg_pool1d(x, window, 1, window // 2))
            _backward(functional.max_pool1d(x, window, 1, window // 2))
        for window in (2, 3):
            _backward(functional.avg_pool2d(image, window))
            _backward(functional.unfold(image, window))
        _backward(functional.interpolate(x, scale_factor=2, mode="linear"))
        _backward(functional.pad(image, (1, 1, 1, 1), mode="reflect"))
        _backward(functional.adaptive_avg_pool1d(x, 8))

    return CalibrationProgram(f"pools, {shape}, {dtype}", 4 * _count(shape) * 40, run)


def _spectra(shape: tuple[int, int, int]) -> CalibrationProgram:
    """Fourier transforms of steps and images."""

    def run() -> None:
        x = _numbers(shape, torch.float32)
        steps = 1 << (shape[2].bit_length() - 1)
        _backward(torch.fft.irfft(torch.fft.rfft(x), n=shape[2]))
        _backward(torch.fft.irfft(torch.fft.rfft(x[..., :steps], dim=-1) * 2.0, n=steps))
        _backward(torch.fft.fft(x[..., :steps]).abs())
        side = round(shape[2] ** 0.5)
        image = _numbers((shape[0], shape[1], side, side), torch.float32)
        _backward(torch.fft.irfft2(torch.fft.rfft2(image), s=(side, side)))

    return CalibrationProgram(f"spectra, {shape}", 8 * _count(shape) * 12, run)


def _rows(dtype: torch.dtype, rows: int, columns: int, taken: int) -> CalibrationProgram:
    """Rows of tables that are taken, added and put back."""

    def run() -> None:
        table = _numbers((rows, columns), dtype)
        picks = torch.randint(rows, (taken,), device="cuda")
        _backward(functional.embedding(picks, table))
        _backward(table[picks])
        _backward(table.index_select(0, picks))
        if taken > MOST_ADDED * rows:
            return
        source = _numbers((taken, columns), dtype)
        into = torch.zeros(rows, columns, dtype=dtype, device="cuda")
        _backward(into.index_add(0, picks, source))
        _backward(into.index_put((picks,), source, accumulate=True))
        wide = picks[:, None].expand(-1, columns)
        _backward(into.scatter_add(0, wide, source))
        _backward(table.gather(0, wide))
        _backward(into.scatter_reduce(0, wide, source, "mean"))

    need = (rows + taken) * columns * 4 * 10
    return CalibrationProgram(f"{taken} of {rows} rows of {columns}, {dtype}", need, run)


def _odd_convolutions(kind: str, shape: tuple[int, int, int, int], *, last: bool) -> CalibrationProgram:
    """Convolutions and transposed ones with channels that are not multiples of eight."""
    batch, inner, outer, side = shape

    def run() -> None:
        layout = torch.channels_last if last else torch.contiguous_format
        with use_precision(kind):
            x = torch.randn(batch, inner, side, side, requires_grad=True).to(memory_format=layout)
            layers: list[Any] = [
                nn.Conv2d(inner, outer, 3, padding=1),
                nn.Conv2d(outer, outer, 3, padding=1, bias=False),
                nn.ConvTranspose2d(outer, inner, 4, stride=2, padding=1),
            ]
            for layer in layers:
                x = layer.to(memory_format=layout)(x)
            loss = x.float().square().mean()
        loss.backward()

    name = f"odd convolutions {inner} to {outer} x {side}^2, batch {batch}, {kind}{' channels-last' * last}"
    return CalibrationProgram(name, batch * (inner + outer) * side * side * 4 * 60, run)


def list_uncommon_programs() -> list[CalibrationProgram]:
    """Return the programs, in fp32 and bf16."""
    dtypes = (torch.float32, torch.bfloat16)
    return [
        *(_reductions(dtype, shape) for shape in SHAPES for dtype in dtypes),
        *(_rows(dtype, *table) for table in TABLES for dtype in dtypes),
        *(_pools(dtype, shape) for shape in SHAPES for dtype in dtypes),
        *(_curves(dtype, shape) for shape in SHAPES[:3] for dtype in dtypes),
        *(_spectra(shape) for shape in SHAPES),
        *(_odd_convolutions("bf16", shape, last=last) for shape in ODD_CHANNELS for last in (False, True)),
    ]
