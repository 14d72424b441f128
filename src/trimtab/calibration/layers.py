"""Calibration programs of layers that are slow for a reason of their own.

Depthwise and grouped convolutions leave tensor cores without work, norms over the batch run a thread block a
channel, sums into chosen rows and upsampling backward add up by atomic operations, and tensors of many
dimensions are broadcast without vector loads. No other layer says how long these take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trimtab.calibration.program import CalibrationProgram, use_precision


def _layout(*, last: bool) -> torch.memory_format:
    return torch.channels_last if last else torch.contiguous_format


def _inverted(  # noqa: PLR0913 - the sizes of a convolution
    kind: str, batch: int, side: int, channels: int, *, kernel: int = 3, stride: int = 1, last: bool = False
) -> CalibrationProgram:
    """A block of mobile networks: wide, depthwise with the kernel, gates of the whole image, narrow."""

    def run() -> None:
        layout = _layout(last=last)
        with use_precision(kind):
            x = torch.randn(batch, channels // 4, side, side, requires_grad=True).to(memory_format=layout)
            wide = nn.Conv2d(channels // 4, channels, 1, bias=False)
            depth = nn.Conv2d(
                channels, channels, kernel, stride=stride, padding=kernel // 2, groups=channels, bias=False
            )
            squeeze, excite = nn.Conv2d(channels, channels // 16, 1), nn.Conv2d(channels // 16, channels, 1)
            narrow = nn.Conv2d(channels, channels // 4, 1, bias=False)
            norms = [nn.BatchNorm2d(size) for size in (channels, channels, channels // 4)]
            y = functional.relu6(norms[0](wide(functional.pad(x, (0, 1, 0, 1)))))
            y = functional.silu(norms[1](depth(y)))
            gate = torch.sigmoid(excite(functional.relu(squeeze(functional.adaptive_avg_pool2d(y, 1)))))
            loss = functional.hardswish(norms[2](narrow(y * gate))).float().square().mean()
        loss.backward()

    need = batch * channels * side * side * 4 * 30
    name = f"depthwise {kernel}^2 / {stride}, {channels} x {side}^2, batch {batch}, {kind}"
    return CalibrationProgram(name + " channels-last" * last, need, run)


def _large_depthwise(
    kind: str, batch: int, side: int, channels: int, *, last: bool = False
) -> CalibrationProgram:
    """Depthwise convolutions of 7 x 7 with layer norms over channels, and strided ones without overlap."""

    def run() -> None:
        with use_precision(kind):
            x = torch.randn(batch, channels, side, side, requires_grad=True)
            x = x.to(memory_format=_layout(last=last))
            depth = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
            y = nn.LayerNorm(channels)(depth(x).permute(0, 2, 3, 1))
            y = functional.gelu(nn.Linear(channels, 4 * channels)(y))
            y = torch.rand(channels) * nn.Linear(4 * channels, channels)(y)
            y = x + y.permute(0, 3, 1, 2)
            half = nn.Conv2d(channels, 2 * channels, 2, stride=2)
            loss = half(y).float().square().mean()
        loss.backward()

    need = batch * channels * side * side * 4 * 40
    name = f"depthwise 7^2, {channels} x {side}^2, batch {batch}, {kind}"
    return CalibrationProgram(name + " channels-last" * last, need, run)


def _grouped(kind: str, batch: int, side: int, channels: int, *, groups: int) -> CalibrationProgram:
    """Grouped, dilated and transposed convolutions."""

    def run() -> None:
        with use_precision(kind):
            x = torch.randn(batch, channels, side, side, requires_grad=True)
            grouped = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
            strided = nn.Conv2d(channels, channels, 3, padding=1, stride=2, groups=groups, bias=False)
            dilated = nn.Conv2d(channels, channels, 3, padding=6, dilation=6, bias=False)
            up = nn.ConvTranspose2d(channels, channels // 2, 4, stride=2, padding=1)
            y = functional.relu(nn.BatchNorm2d(channels)(grouped(x)))
            z = functional.leaky_relu(up(strided(y)), 0.2)
            loss = dilated(y).float().square().mean() + torch.tanh(z).float().mean()
        loss.backward()

    need = batch * channels * side * side * 4 * 30
    name = f"convolutions in {groups} groups, {channels} x {side}^2, batch {batch}, {kind}"
    return CalibrationProgram(name, need, run)


def _norms(kind: str, batch: int, sizes: tuple[tuple[int, int], ...]) -> CalibrationProgram:
    """Norms over the batch with few to many channels, in both layouts, after plain convolutions."""

    def run() -> None:
        for channels, side in sizes:
            for last in (False, True):
                with use_precision(kind):
                    x = torch.randn(batch, channels, side, side, requires_grad=True)
                    x = x.to(memory_format=_layout(last=last))
                    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
                    point = nn.Conv2d(channels, channels, 1, bias=False)
                    y = nn.BatchNorm2d(channels)(layer(x))
                    y = functional.relu(nn.BatchNorm2d(channels)(point(y)), inplace=True)
                    z = functional.max_pool2d(y, 3, 2, 1).float().mean()
                    loss = z + functional.avg_pool2d(y, 2).float().square().mean()
                loss.backward()

    need = max(batch * channels * side * side * 4 * 30 for channels, side in sizes)
    return CalibrationProgram(f"batch norms, batch {batch}, {kind}", need, run)


def _group_norms(kind: str, sizes: tuple[tuple[int, int, int, int], ...]) -> CalibrationProgram:
    """Norms over groups of channels, with few and large groups too: samples, channels, positions, groups."""

    def run() -> None:
        for batch, channels, positions, groups in sizes:
            with use_precision(kind):
                x = torch.randn(batch, channels, positions, requires_grad=True)
                loss = nn.GroupNorm(groups, channels)(x).float().square().mean()
            loss.backward()

    need = max(batch * channels * positions * 4 * 12 for batch, channels, positions, _ in sizes)
    return CalibrationProgram(f"group norms of {len(sizes)} sizes, {kind}", need, run)


def _volumes(kind: str, batch: int, frames: int, side: int, channels: int) -> CalibrationProgram:
    """Convolutions over three dimensions, as for videos and scans."""

    def run() -> None:
        with use_precision(kind):
            x = torch.randn(batch, 3, frames, side, side)
            stem = nn.Conv3d(3, channels, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
            y = functional.relu(nn.BatchNorm3d(channels)(stem(x)))
            whole = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
            flat = nn.Conv3d(
                channels, 2 * channels, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), bias=False
            )
            y = functional.relu(nn.BatchNorm3d(channels)(whole(y)))
            z = functional.leaky_relu(nn.InstanceNorm3d(2 * channels, affine=True)(flat(y)))
            up = nn.ConvTranspose3d(2 * channels, channels, 2, stride=2)
            z = functional.max_pool3d(z, 2)
            loss = up(z).float().square().mean() + functional.adaptive_avg_pool3d(y, 1).float().mean()
        loss.backward()

    need = batch * channels * frames * side * side * 4 * 20
    return CalibrationProgram(f"volumes {channels} x {frames} x {side}^2, batch {batch}, {kind}", need, run)


def _upsampling(kind: str, batch: int, side: int, channels: int) -> CalibrationProgram:
    """Images made larger by interpolation, pooled to few pixels, and a loss a pixel."""

    def run() -> None:
        with use_precision(kind):
            x = torch.randn(batch, channels, side, side, requires_grad=True)
            y = nn.Conv2d(channels, channels, 1)(x)
            loss: Any = 0.0
            for tensor in (x, y):
                for scale in (2, 4, 8, 16):
                    large = functional.interpolate(tensor[:, :64], scale_factor=scale, mode="bilinear")
                    loss = loss + large.float().square().mean()
                wide = functional.interpolate(tensor, size=2 * side + 1, mode="bicubic")
                for pixels in (1, 3, 6):
                    pooled = functional.adaptive_avg_pool2d(tensor, pixels)
                    loss = loss + functional.interpolate(pooled, size=side, mode="bilinear").float().mean()
                loss = loss + wide.float().mean()
            classes = nn.Conv2d(channels, 150, 1)(x).float()
            loss = loss + functional.cross_entropy(classes, torch.randint(150, (batch, side, side)))
        loss.backward()

    need = batch * (channels * 80 + 64 * 1500) * side * side * 4
    return CalibrationProgram(f"upsampling {channels} x {side}^2, batch {batch}, {kind}", need, run)


def _positions(
    kind: str, count: int, width: int, sides: tuple[int, int], resized: tuple[int, int]
) -> CalibrationProgram:
    """Position embeddings for images of another size: bicubic, with the channels of a pixel side by side."""

    def run() -> None:
        with use_precision(kind):
            table = torch.randn(count, sides[0] * sides[1], width, requires_grad=True)
            image = table.transpose(1, 2).view(count, width, *sides)
            resized_image = functional.interpolate(image, size=resized, mode="bicubic", align_corners=False)
            loss = resized_image.flatten(2).transpose(1, 2).float().square().mean()
        loss.backward()

    pixels = sides[0] * sides[1] + resized[0] * resized[1]
    name = f"{count} x {width} position embeddings, {sides} to {resized}, {kind}"
    return CalibrationProgram(name, count * width * pixels * 4 * 8, run)


def _wide_upsampling(kind: str, batch: int, side: int, channels: int) -> CalibrationProgram:
    """Images with channels last, made larger."""

    def run() -> None:
        with use_precision(kind):
            image = torch.randn(batch, channels, side, side, requires_grad=True)
            x = image.to(memory_format=torch.channels_last)
            loss: Any = 0.0
            for scale in (2, 4, 8):
                large = functional.interpolate(x, scale_factor=scale, mode="bilinear")
                loss = loss + large.float().square().mean()
        loss.backward()

    need = batch * channels * side * side * 4 * 64 * 5
    return CalibrationProgram(
        f"upsampling channels-last {channels} x {side}^2, batch {batch}, {kind}", need, run
    )


def _graph(dtype: torch.dtype, nodes: int, edges: int, width: int) -> CalibrationProgram:
    """Messages along the edges of a graph: rows taken, weighted, and added into the rows of their targets."""

    def run() -> None:
        with torch.device("cuda"):
            x = torch.randn(nodes, width, dtype=dtype, requires_grad=True)
            source, target = torch.randint(nodes, (2, edges))
            scores = torch.randn(edges, 4, dtype=dtype, requires_grad=True)
            places = target[:, None].expand(-1, 4)
            highest = torch.zeros(nodes, 4, dtype=dtype).scatter_reduce(0, places, scores.detach(), "amax")
            weights = torch.exp(scores - highest[target])
            sums = torch.zeros(nodes, 4, dtype=dtype).scatter_add(0, places, weights)
            weights = weights / sums.index_select(0, target)
            sent = x[source].view(edges, 4, -1) * weights[:, :, None]
            out = torch.zeros(nodes, width, dtype=dtype).index_add_(0, target, sent.flatten(1))
            other = torch.zeros(nodes, width, dtype=dtype)
            other = other.scatter_add_(0, target[:, None].expand(-1, width), x.index_select(0, source))
            degree = torch.zeros(nodes, dtype=dtype).index_add(0, target, torch.ones(edges, dtype=dtype))
            loss = (out / degree.clamp(min=1)[:, None]).float().square().mean() + other.float().mean()
        loss.backward()

    return CalibrationProgram(f"graph of {edges} edges, {width} wide, {dtype}", edges * width * 4 * 30, run)


def _scan(batch: int, steps: int, heads: int, size: int) -> CalibrationProgram:
    """A state-space layer by plain operations: products of broadcast tensors with five dimensions."""
    chunk, state = 64, 64

    def run() -> None:
        with torch.device("cuda"):
            shape = (batch, steps // chunk, chunk, heads)
            values = torch.randn(*shape, size, requires_grad=True)
            keys = torch.randn(*shape, state, requires_grad=True)
            queries = torch.randn(*shape, state, requires_grad=True)
            decay = (torch.rand(*shape, requires_grad=True).permute(0, 3, 1, 2)).cumsum(-1)
            mask = torch.ones(chunk, chunk, dtype=torch.bool).tril()
            gaps = (decay[..., :, None] - decay[..., None, :]).masked_fill(~mask, -1e9).exp()
            scores = (queries[:, :, :, None] * keys[:, :, None]).sum(-1)
            weights = (scores[..., None] * gaps.permute(0, 2, 3, 4, 1)[..., None]).sum(-1)
            mixed = (weights[..., None] * values[:, :, None]).sum(3)
            states = (keys[..., None, :] * values[..., None]).sum(2)
            loss = mixed.square().mean() + states.mean()
        loss.backward()

    need = batch * steps * chunk * heads * state * 4 * 5
    return CalibrationProgram(f"scan of {batch} x {steps}, {heads} heads of {size}", need, run)


def _dilated(kind: str, batch: int, steps: int, channels: int) -> CalibrationProgram:
    """Gated causal convolutions over time with holes, and their sums."""

    def run() -> None:
        with use_precision(kind):
            x = torch.randn(batch, channels, steps, requires_grad=True)
            total: Any = 0.0
            y = x
            for dilation in (1, 16, 256):
                padded = functional.pad(y, (dilation, 0))
                wide = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)(padded)
                left, right = wide.chunk(2, 1)
                gated = torch.tanh(left) * torch.sigmoid(right)
                total = total + nn.Conv1d(channels, channels, 1)(gated)
                y = y + nn.Conv1d(channels, channels, 1)(gated)
            points = functional.relu(nn.BatchNorm1d(channels)(total)).amax(-1)
            loss = total.float().square().mean() + points.float().mean() + y.float().mean()
        loss.backward()

    need = batch * channels * steps * 4 * 60
    return CalibrationProgram(f"dilated convolutions {channels} x {steps}, batch {batch}, {kind}", need, run)


def _points(kind: str, batch: int, count: int) -> CalibrationProgram:
    """Points in space: distances, neighbours by sorting, and layers for each point."""

    def run() -> None:
        with use_precision(kind):
            places = torch.rand(batch, count, 3)
            near = torch.cdist(places, places).topk(16, largest=False).indices
            features = torch.randn(batch, count, 64, requires_grad=True)
            rows = torch.arange(batch)[:, None, None]
            picked = features[rows, near] - features[:, :, None]
            y = functional.relu(nn.Conv1d(64, 128, 1)(picked.amax(2).transpose(1, 2)))
            order = y.detach().float().sum(1).sort(-1).indices
            z = torch.gather(y, 2, order[:, None].expand(-1, 128, -1))
            loss = functional.normalize(z.float(), dim=1).mean() + functional.softmax(z, -1).float().std()
        loss.backward()

    return CalibrationProgram(
        f"{batch} x {count} points, {kind}", batch * count * (count + 1024) * 4 * 8, run
    )


def list_layer_programs(kind: str) -> list[CalibrationProgram]:
    """Return the programs for a precision, the most important first."""
    return [
        _norms(kind, 128, ((16, 112), (64, 56), (256, 28), (1024, 14))),
        _group_norms(
            kind,
            (
                (8, 512, 4096, 1),
                (4, 256, 4096, 1),
                (32, 128, 8192, 1),
                (4, 256, 4096, 16),
                (64, 256, 1024, 32),
            ),
        ),
        _inverted(kind, 128, 56, 144),
        _inverted(kind, 128, 28, 240, kernel=5, stride=2),
        _inverted(kind, 64, 28, 192, last=True),
        _inverted(kind, 128, 14, 672),
        _large_depthwise(kind, 64, 56, 96),
        _large_depthwise(kind, 64, 14, 384),
        _large_depthwise(kind, 128, 56, 96, last=True),
        _large_depthwise(kind, 128, 14, 384, last=True),
        _grouped(kind, 64, 28, 256, groups=8),
        _grouped(kind, 64, 56, 96, groups=4),
        _volumes(kind, 8, 8, 112, 64),
        _volumes(kind, 2, 32, 64, 32),
        _upsampling(kind, 8, 64, 256),
        _upsampling(kind, 16, 16, 512),
        _wide_upsampling(kind, 8, 64, 64),
        _wide_upsampling(kind, 16, 32, 256),
        _positions(kind, 1, 768, (14, 14), (24, 24)),
        _positions(kind, 1, 384, (37, 37), (28, 28)),
        _positions(kind, 12, 384, (24, 24), (32, 32)),
        _positions(kind, 4, 1024, (20, 30), (40, 48)),
        _dilated(kind, 8, 8192, 64),
        _dilated(kind, 16, 16_384, 128),
        _points(kind, 32, 1024),
    ]


def list_plain_programs() -> list[CalibrationProgram]:
    """Return the programs that autocast does not change."""
    graphs = [
        _graph(dtype, nodes, edges, width)
        for dtype in (torch.float32, torch.bfloat16)
        for nodes, edges, width in ((40_000, 400_000, 128), (160_000, 1_000_000, 256), (4_000, 60_000, 64))
    ]
    return [*graphs, _scan(2, 512, 24, 64), _scan(1, 256, 8, 64)]
