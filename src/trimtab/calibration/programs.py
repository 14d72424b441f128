"""Calibration programs: small training steps with the operations of common models, over sizes and precisions.

Each program is a training step of one kind of layer. Only the operations and their sizes matter, not the
results; the stopwatch times each different operation once.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.calibration.layers import list_layer_programs, list_plain_programs
from trimtab.calibration.program import CalibrationProgram, use_precision
from trimtab.calibration.uncommon import list_uncommon_programs

GIB = 2**30
THRESHOLD = 0.5


class CalibrationAttention(nn.Module):
    """Self-attention with grouped heads, with torch's fused kernels or as separate operations."""

    def __init__(self, width: int, heads: int, groups: int, *, causal: bool, spelt_out: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.spelt_out = heads, groups, causal, spelt_out
        size = width // heads
        self.query = nn.Linear(width, width)
        self.keys = nn.Linear(width, 2 * groups * size)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform a tensor of shape (batch, steps, width)."""
        batch, steps, width = x.shape
        size = width // self.heads
        query = self.query(x).view(batch, steps, self.heads, size).transpose(1, 2)
        key, value = (
            projected.reshape(batch, steps, self.groups, size)
            .transpose(1, 2)
            .repeat_interleave(self.heads // self.groups, 1)
            for projected in self.keys(x).chunk(2, -1)
        )
        if self.spelt_out:
            scores = query @ key.transpose(-1, -2) / size**0.5
            blocked = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(blocked, float("-inf"))
            mixed = functional.dropout(scores.softmax(-1), 0.1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, steps, width))
        return out


class CalibrationBlock(nn.Module):
    """A transformer block, in GPT-2 style (layer norm, GELU) or Llama style (RMS norm, gated SiLU)."""

    def __init__(self, width: int, inner: int, attention: CalibrationAttention, *, gated: bool) -> None:
        super().__init__()
        self.attention, self.gated = attention, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.up = nn.Linear(width, inner, bias=not gated)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.down = nn.Linear(inner, width, bias=not gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform a tensor of shape (batch, steps, width)."""
        x = x + self.attention(self.first(x))
        y = self.second(x)
        if self.gate is not None:
            y = functional.silu(self.gate(y)) * self.up(y)
        else:
            y = functional.gelu(self.up(y))
        return x + functional.dropout(self.down(y), 0.1)


class CalibrationLanguageModel(nn.Module):
    """A language model of an embedding, one block and a head."""

    def __init__(self, block: CalibrationBlock, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block, self.norm = block, nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits over the vocabulary."""
        out: torch.Tensor = self.head(self.norm(self.block(self.embed(tokens))))
        return out


def _language(  # noqa: PLR0913, PLR0917 - the sizes of a transformer
    kind: str,
    width: int,
    heads: int,
    batch: int,
    steps: int,
    vocabulary: int,
    *,
    inner: int = 0,
    groups: int = 0,
    gated: bool = False,
    causal: bool = True,
    spelt_out: bool = False,
) -> CalibrationProgram:
    inner = inner or 4 * width

    def run() -> None:
        with use_precision(kind):
            attention = CalibrationAttention(
                width, heads, groups or heads, causal=causal, spelt_out=spelt_out
            )
            model = CalibrationLanguageModel(
                CalibrationBlock(width, inner, attention, gated=gated), width, vocabulary
            )
            tokens = torch.randint(vocabulary, (batch, steps))
            logits = model(tokens)
            loss = functional.cross_entropy(logits.view(-1, vocabulary), tokens.view(-1))
        loss.backward()

    need = batch * steps * (vocabulary * 16 + inner * 40 + width * 120)
    need += (batch * heads * steps * steps * 24) * spelt_out + 8 * width * (vocabulary * 2 + 3 * inner)
    style = "gated " if gated else "spelt out " if spelt_out else ""
    return CalibrationProgram(f"{style}transformer {width} wide, {batch} x {steps}, {kind}", need, run)


FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def _attention(  # noqa: PLR0913 - the sizes and the kernel of an attention
    length: int,
    heads: int,
    size: int,
    *,
    causal: bool = True,
    kernel: SDPBackend | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> CalibrationProgram:
    """Fused attention over long sequences, with the kernel that torch chooses, or with another one.

    Kernels get nearer to the peak with the number of tokens: those of a transformer block of 2,048 tokens say
    too little about 32,768. Flash attention is timed by itself because other packages call it directly. The
    memory-efficient kernel gets a mask: it is the only one that takes a mask on GPUs before Hopper.
    """
    masked = kernel is EFFICIENT

    def run() -> None:
        query, key, value = (
            torch.randn(1, heads, length, size, dtype=dtype, device="cuda", requires_grad=True)
            for _ in range(3)
        )
        mask = torch.zeros(1, 1, length, length, dtype=dtype, device="cuda") if masked else None
        with contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel):
            mixed = functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal and not masked
            )
        mixed.backward(torch.randn_like(mixed))

    style = f"{'flash ' * (kernel is FLASH)}{'masked ' * masked}attention{'' if causal else ' both ways'}"
    need = heads * length * size * 80 + masked * length**2 * 16
    wide = ", fp32" * (dtype is torch.float32)
    return CalibrationProgram(f"{style}, {length} x {heads} x {size}{wide}", need, run)


class AttentionShape(NamedTuple):
    """Sizes of a fused attention."""

    batch: int
    heads: int
    length: int
    size: int


def _masked_attention(
    shape: AttentionShape, *, masked: bool, dropout: float = 0.0, learned: bool = False
) -> CalibrationProgram:
    """Fused attention with a mask or dropout: variants of the same kernels, up to five times as slow.

    A learned mask, as of relative positions, has a number for each head, and a gradient.
    """
    batch, heads, length, size = shape

    def run() -> None:
        query, key, value = (
            torch.randn(batch, heads, length, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for _ in range(3)
        )
        mask = torch.zeros(batch, 1, length, length, dtype=torch.bfloat16, device="cuda") if masked else None
        if learned:
            mask = torch.zeros(1, heads, length, length, dtype=torch.bfloat16, device="cuda")
            mask.requires_grad_(True)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        mixed.backward(torch.randn_like(mixed))

    traits = f"{' masked' * masked}{' learned' * learned}{' dropout' * bool(dropout)}" or " plain"
    need = batch * heads * length * size * 40 + batch * (heads if learned else 1) * length**2 * 8
    return CalibrationProgram(f"attention{traits}, {batch} x {heads} x {length} x {size}", need, run)


MASKED_SHAPES = (
    AttentionShape(256, 12, 128, 64),
    AttentionShape(64, 12, 256, 64),
    AttentionShape(32, 16, 512, 64),
    AttentionShape(16, 12, 1024, 64),
    AttentionShape(4, 16, 2048, 128),
    AttentionShape(8, 32, 1024, 128),
    AttentionShape(32, 8, 512, 32),
    AttentionShape(128, 12, 197, 64),
)
SHORT_SHAPES = (
    AttentionShape(8192, 8, 8, 32),
    AttentionShape(4096, 8, 12, 64),
    AttentionShape(2048, 12, 24, 64),
    AttentionShape(1024, 12, 49, 32),
    AttentionShape(1024, 8, 64, 64),
    AttentionShape(256, 8, 136, 64),
)
"""Windows, rows of a table, groups of series: far fewer tokens than kernels are made for."""


def _list_masked_attention() -> list[CalibrationProgram]:
    """Return programs of attention over usual lengths, with and without mask and dropout."""
    usual = [
        _masked_attention(shape, masked=masked, dropout=dropout)
        for masked, dropout in ((False, 0.0), (True, 0.0), (False, 0.1), (True, 0.1))
        for shape in MASKED_SHAPES
    ]
    short = [_masked_attention(shape, masked=masked) for masked in (False, True) for shape in SHORT_SHAPES]
    learned = [
        _masked_attention(shape, masked=False, learned=True)
        for shape in (SHORT_SHAPES[3], SHORT_SHAPES[5], *MASKED_SHAPES[:4])
    ]
    return [*usual, *short, *learned]


def _list_attention() -> list[CalibrationProgram]:
    """Return the programs of attention: 8,192 to 131,072 tokens, and for flash attention also fewer.

    Fewer heads for more tokens: without those with a mask, which were not timed, the programs take 1 s on
    an H200 and 10 s on a GPU that is ten times slower.
    """
    sizes = (128, 64)
    longest = [_attention(131_072, 2, size) for size in sizes]
    plain = [_attention(length, heads, size) for length, heads in ((8192, 32), (32768, 8)) for size in sizes]
    both_ways = [_attention(length, heads, 128, causal=False) for length, heads in ((4096, 24), (32768, 4))]
    flash = [
        _attention(length, heads, size, kernel=FLASH)
        for length, heads in ((512, 128), (2048, 64), (8192, 32), (32768, 8))
        for size in sizes
    ]
    masked = [
        _attention(length, heads, size, kernel=EFFICIENT)
        for length, heads in ((512, 128), (2048, 64), (8192, 32))
        for size in sizes
    ]
    # Heads of 256 do not fit into the registers of these kernels.
    wide = [
        _attention(length, heads, 256, kernel=kernel)
        for kernel in (FLASH, EFFICIENT)
        for length, heads in ((1024, 32), (8192, 8))
    ]
    exact = [
        _attention(length, heads, size, kernel=EFFICIENT, dtype=torch.float32)
        for length, heads in ((1024, 32), (8192, 8))
        for size in (*sizes, 256)
    ]
    return [*plain, *both_ways, *flash, *masked, *wide, *exact, *longest]


def _set_layout(layer: Any, layout: torch.memory_format) -> Any:
    return layer.to(memory_format=layout)


def _convolutions(  # noqa: PLR0913 - the sizes of a convolution
    kind: str, batch: int, side: int, channels: int, *, last: bool, groups: int = 1
) -> CalibrationProgram:
    """Convolutions, norms and activations, as in a residual network and a U-Net."""

    def run() -> None:
        layout = torch.channels_last if last else torch.contiguous_format
        with use_precision(kind):
            x = torch.randn(batch, channels, side, side, requires_grad=True).to(memory_format=layout)
            narrow = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
            wide = nn.Conv2d(channels, 2 * channels, 1, bias=False)
            half = nn.Conv2d(2 * channels, channels, 3, stride=2, padding=1)
            batch_norm, group_norm = nn.BatchNorm2d(channels), nn.GroupNorm(min(32, channels), 2 * channels)
            for layer in (narrow, wide, half):
                _set_layout(layer, layout)
            y = functional.relu(batch_norm(narrow(x))) + x
            y = functional.silu(group_norm(wide(y)))
            z = half(y)
            z = torch.cat([functional.interpolate(z, size=(side, side), mode="nearest"), x], 1)
            loss = functional.max_pool2d(z, 2).float().square().mean() + functional.relu(y).mean()
        loss.backward()

    need = batch * channels * side * side * 4 * 40
    style = " channels-last" if last else ""
    return CalibrationProgram(f"convolutions {channels} x {side}^2, batch {batch}, {kind}{style}", need, run)


def _stem(kind: str, batch: int, side: int, *, last: bool) -> CalibrationProgram:
    def run() -> None:
        layout = torch.channels_last if last else torch.contiguous_format
        with use_precision(kind):
            x = torch.randn(batch, 3, side, side).to(memory_format=layout)
            first = _set_layout(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), layout)
            y = functional.max_pool2d(functional.relu(nn.BatchNorm2d(64)(first(x))), 3, 2, 1)
            patches = nn.Conv2d(3, 768, 16, stride=16)(x)
            loss = y.float().mean() + patches.float().mean()
        loss.backward()

    return CalibrationProgram(f"stem {side}^2, batch {batch}, {kind}", batch * side * side * 64 * 30, run)


def _sound(kind: str, batch: int, steps: int, channels: int) -> CalibrationProgram:
    """Convolutions over time: wide, depthwise, and strided over raw sound."""

    def run() -> None:
        with use_precision(kind):
            raw = torch.randn(batch, 1, steps * 20)
            first = nn.Conv1d(1, channels, 10, stride=5)(raw)
            x = torch.randn(batch, channels, steps, requires_grad=True)
            depth = nn.Conv1d(channels, channels, 31, padding=15, groups=channels)
            wide = nn.Conv1d(channels, 2 * channels, 1)
            y = functional.glu(wide(depth(x)), 1)
            y = functional.silu(nn.BatchNorm1d(channels)(y))
            loss = (
                y.float().square().mean() + functional.gelu(nn.GroupNorm(8, channels)(first)).float().mean()
            )
        loss.backward()

    return CalibrationProgram(
        f"sound {channels} x {steps}, batch {batch}, {kind}", batch * steps * channels * 4 * 80, run
    )


def _recurrent(
    kind: str, layer: type[nn.LSTM | nn.GRU], batch: int, steps: int, width: int
) -> CalibrationProgram:
    def run() -> None:
        with use_precision(kind):
            model = layer(width, width, num_layers=2, batch_first=True)
            x = torch.randn(batch, steps, width, requires_grad=True)
            out, _ = model(x)
            loss = out.float().square().mean()
        loss.backward()

    name = layer.__name__
    return CalibrationProgram(
        f"{name} {width} wide, {batch} x {steps}, {kind}", batch * steps * width * 4 * 60, run
    )


def _tables(kind: str, batch: int) -> CalibrationProgram:
    """A recommender: embedding tables, their products, small dense layers."""

    def run() -> None:
        with use_precision(kind):
            tables = nn.ModuleList(nn.Embedding(400_000, 64) for _ in range(4))
            bag = nn.EmbeddingBag(400_000, 64, mode="sum")
            picks = torch.randint(400_000, (batch, 4))
            rows = [table(picks[:, place]) for place, table in enumerate(tables)] + [bag(picks)]
            x = torch.stack(rows, 1)
            products = torch.bmm(x, x.transpose(1, 2)).flatten(1)
            y = nn.Sequential(
                nn.Linear(25, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
            )
            loss = functional.binary_cross_entropy_with_logits(
                y(products).float().squeeze(-1), torch.rand(batch)
            )
        loss.backward()

    return CalibrationProgram(f"tables, batch {batch}, {kind}", 4 * GIB, run)


def _experts(kind: str, tokens: int, width: int) -> CalibrationProgram:
    """A mixture of experts: scores, the best two, rows selected and added back."""

    def run() -> None:
        with use_precision(kind):
            x = torch.randn(tokens, width, requires_grad=True)
            scores = nn.Linear(width, 8)(x).float().softmax(-1)
            weight, chosen = scores.topk(2, -1)
            rows = torch.arange(tokens // 4)
            picked = x[rows]
            y = nn.Linear(width, 4 * width)(picked)
            out = torch.zeros_like(x).index_add(
                0, rows, nn.Linear(4 * width, width)(functional.gelu(y)).to(x)
            )
            loss = out.float().square().mean() + weight.mean() + (chosen == 1).float().mean() * scores.mean()
        loss.backward()

    return CalibrationProgram(f"experts, {tokens} tokens, {width} wide, {kind}", tokens * width * 4 * 60, run)


def _elementwise(dtype: torch.dtype, count: int) -> CalibrationProgram:
    """Elementwise operations and reductions on tensors of one size."""

    def run() -> None:
        with torch.device("cuda"):
            x = torch.randn(count // 512, 512, dtype=dtype, requires_grad=True)
            y = torch.rand(count // 512, 512, dtype=dtype)
            z = (x * y + 1.0) / (y + 2.0) - x
            z = (
                torch.tanh(z)
                + torch.sigmoid(x)
                + torch.exp(-y)
                + y.clamp(min=0.1).sqrt()
                + torch.rsqrt(y + 1)
            )
            z = torch.where(y > THRESHOLD, z, x) + x.pow(2) + x.abs() + functional.leaky_relu(x)
            z = functional.dropout(z, 0.1).masked_fill(y > THRESHOLD, 0.0)
            square = z.view(-1, 8, 64, 512 // 64 * 8)[:, :, :, :64]
            loss = square.transpose(1, 2).contiguous().float().mean() + z.float().sum(0).mean()
            loss = loss + z.mean(-1).float().mean() + torch.cat([x, z], -1).float().norm()
            loss = loss + functional.mse_loss(z, y).float() + z.cumsum(-1).float().mean() + z.amax(-1).mean()
            loss = loss + functional.softmax(x, -1).float().std()
        loss.backward()

    return CalibrationProgram(f"plain operations, {count} x {dtype}", count * 4 * 60, run)


def _optimizers(sizes: list[int], dtype: torch.dtype, what: str) -> CalibrationProgram:
    def run() -> None:
        weights = [torch.randn(size, dtype=dtype, device="cuda").requires_grad_(True) for size in sizes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        makers: list[Any] = [
            lambda: torch.optim.AdamW(weights, fused=True),
            lambda: torch.optim.AdamW(weights, foreach=True),
            lambda: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=True),
            lambda: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
            lambda: torch.optim.Adagrad(weights, foreach=True),
            lambda: torch.optim.AdamW(weights[:4], foreach=False),
        ]
        nn.utils.clip_grad_norm_(weights, 1.0)
        for make in makers:
            make().step()

    return CalibrationProgram(f"optimizers, {what}", sum(sizes) * 4 * 10, run)


def list_programs() -> list[CalibrationProgram]:
    """Return all programs, the most important first."""
    layers = [768 * 768 * 4, 768 * 3072, 3072 * 768, 768, 768, 3072] * 12 + [50304 * 768]
    wide = [4096 * 4096] * 8 + [4096 * 14336] * 3 + [4096] * 20
    narrow = [512 * 512 * 9, 512, 512, 256 * 256 * 9, 256, 256] * 8
    programs = [
        _language("bf16", 768, 12, 16, 1024, 50304),
        _language("bf16", 4096, 32, 2, 2048, 128_256, inner=14336, groups=8, gated=True),
        _optimizers(layers, torch.float32, "124 M in 73 tensors"),
        _optimizers(wide, torch.bfloat16, "310 M in 31 bf16 tensors"),
        _optimizers(narrow, torch.float32, "24 M in 48 tensors"),
        _convolutions("bf16", 64, 56, 64, last=True),
        _convolutions("bf16", 64, 14, 256, last=True),
        _convolutions("bf16", 64, 32, 128, last=False),
        _stem("bf16", 128, 224, last=True),
        _recurrent("bf16", nn.LSTM, 64, 128, 1024),
        _tables("fp32", 16384),
        *_list_attention(),
        *_list_masked_attention(),
    ]
    programs += [*list_layer_programs("bf16"), *list_plain_programs()]
    for kind in ("bf16", "bf16-true", "fp16", "tf32", "fp32"):
        programs += [
            _language(kind, 256, 4, 16, 256, 1024),
            _language(kind, 512, 8, 32, 512, 8192, causal=False),
            _language(kind, 768, 12, 4, 1024, 50304),
            _language(kind, 1024, 16, 8, 512, 30522, causal=False),
            _language(kind, 2048, 16, 4, 2048, 32000, inner=5632, groups=4, gated=True),
            _language(kind, 4096, 32, 4, 1024, 4096, inner=14336, groups=8, gated=True),
            _language(kind, 768, 12, 4, 1024, 1024, spelt_out=True),
            _language(kind, 1024, 8, 32, 128, 512),
            # An odd vocabulary size: the rows of the logits are not aligned.
            _language(kind, 768, 12, 4, 1024, 50257),
        ]
        for last in (True, False):
            programs += [
                _convolutions(kind, 32, 64, 128, last=last),
                _convolutions(kind, 128, 56, 64, last=last),
                _convolutions(kind, 128, 28, 128, last=last),
                _convolutions(kind, 128, 14, 256, last=last),
                _convolutions(kind, 128, 7, 512, last=last),
                _convolutions(kind, 32, 16, 512, last=last),
                _stem(kind, 64, 224, last=last),
            ]
        programs += [
            _sound(kind, 16, 400, 512),
            _sound(kind, 32, 800, 256),
            _recurrent(kind, nn.LSTM, 64, 128, 512),
            _recurrent(kind, nn.LSTM, 64, 256, 1024),
            _recurrent(kind, nn.GRU, 32, 128, 1024),
            _experts(kind, 8192, 1024),
            _tables(kind, 32768),
            _convolutions(kind, 32, 28, 192, last=False, groups=192),
        ]
    for dtype in (torch.float32, torch.bfloat16):
        programs += [_elementwise(dtype, 1 << size) for size in (16, 20, 23, 26)]
    programs += list_uncommon_programs()
    # The menu takes about 100 s on an H200: what is last here is left out where there is no time.
    for kind in ("fp16", "fp32"):
        programs += list_layer_programs(kind)
    return programs
