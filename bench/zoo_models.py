"""Jobs in the style of well-known public repositories, for bench/zoo.py: graphs, diffusion, GANs and more.

Each is written as its authors would write it, with no thought of being traced: loops over steps and experts,
boolean masks, nested lists of modules, scripted functions, a second backward pass, sparse gradients.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

JOBS: list[type[WrittenJob]] = []
"""All jobs of this file."""


class WrittenJob:
    """A job whose batch is a dict of tensors and whose model computes the loss of it."""

    name: ClassVar[str] = ""
    micro_batch: ClassVar[int] = 8
    global_batch = 256
    samples = 100_000
    network: ClassVar[type[nn.Module]]

    def __init_subclass__(cls) -> None:
        JOBS.append(cls)

    def model(self) -> nn.Module:
        """The network with its default sizes."""
        return self.network()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """What the model says of a batch."""
        found: Tensor = model(**batch)
        return found


# ---------------------------------------------------------------------------------------------- graphs


class SageLayer(nn.Module):
    """The mean of the neighbours' features, summed up edge by edge."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:  # noqa: D102
        source, target = edges
        gathered = torch.zeros_like(nodes).index_add_(0, target, nodes[source])
        count = nodes.new_zeros(nodes.shape[0]).index_add_(0, target, nodes.new_ones(target.shape[0]))
        return functional.relu(self.own(nodes) + self.others(gathered / count.clamp(min=1)[:, None]))


class GraphSage(nn.Module):
    """Three layers of scattered messages, a class a node."""

    def __init__(self, width: int = 128, hidden: int = 512, classes: int = 47) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [SageLayer(width, hidden), SageLayer(hidden, hidden), SageLayer(hidden, hidden)]
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return functional.cross_entropy(self.head(nodes), labels)


def random_graph(
    size: int, width: int, classes: int, nodes: int = 10_000, degree: int = 15
) -> dict[str, Tensor]:
    """`size` graphs in one, as loaders of graphs join them."""
    count = size * nodes
    first = torch.arange(size).repeat_interleave(nodes * degree) * nodes
    return {
        "nodes": torch.randn(count, width),
        "edges": torch.randint(nodes, (2, count * degree)) + first,
        "labels": torch.randint(classes, (count,)),
    }


class GraphScatter(WrittenJob):
    """A GraphSAGE with index_add."""

    name, micro_batch, network = "graph_scatter", 4, GraphSage

    def batch(self, size: int) -> dict[str, Tensor]:
        """A few graphs."""
        return random_graph(size, 128, 47)


class Gat(nn.Module):
    """Attention over edges, with a softmax over the edges that meet in a node."""

    def __init__(self, width: int = 128, heads: int = 8, size: int = 64, classes: int = 40) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.layers = nn.ModuleList(
            [nn.Linear(width if not layer else heads * size, heads * size) for layer in range(3)]
        )
        self.marks = nn.ParameterList([nn.Parameter(torch.randn(2, heads, size) * 0.02) for _ in range(3)])
        self.head = nn.Linear(heads * size, classes)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        source, target = edges
        for layer, mark in zip(self.layers, self.marks, strict=True):
            seen = layer(nodes).view(-1, self.heads, self.size)
            score = (seen[source] * mark[0]).sum(-1) + (seen[target] * mark[1]).sum(-1)
            score = functional.leaky_relu(score, 0.2)
            index = target[:, None].expand_as(score)
            highest = torch.full_like(score[: seen.shape[0]], -math.inf).scatter_reduce(
                0, index, score, "amax"
            )
            weight = (score - highest[target]).exp()
            total = torch.zeros_like(highest).scatter_add(0, index, weight)
            weight = weight / (total[target] + 1e-16)
            message = seen[source] * weight[..., None].to(seen.dtype)
            nodes = functional.elu(torch.zeros_like(seen).index_add(0, target, message).flatten(1))
        return functional.cross_entropy(self.head(nodes), labels)


class GraphAttention(WrittenJob):
    """A graph attention network with scatter_reduce."""

    name, micro_batch, network = "graph_attention", 2, Gat

    def batch(self, size: int) -> dict[str, Tensor]:
        """A few graphs."""
        return random_graph(size, 128, 40)


class Gcn(nn.Module):
    """Messages by a product with the sparse matrix of neighbours."""

    def __init__(self, width: int = 128, hidden: int = 512, classes: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, classes)]
        )

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        count = nodes.shape[0]
        share = torch.full((edges.shape[1],), 1 / 15, device=edges.device)
        near = torch.sparse_coo_tensor(edges, share, (count, count))
        for number, layer in enumerate(self.layers):
            seen = layer(nodes).float()
            with torch.autocast(nodes.device.type, enabled=False):
                # torch has no product of sparse matrices in 16 bits.
                nodes = torch.sparse.mm(near, seen)
            if number < len(self.layers) - 1:
                nodes = functional.dropout(functional.relu(nodes), 0.5, self.training)
        return functional.cross_entropy(nodes, labels)


class GraphSparse(WrittenJob):
    """A graph convolution with torch.sparse.mm."""

    name, micro_batch, network = "graph_sparse", 4, Gcn

    def batch(self, size: int) -> dict[str, Tensor]:
        """A few graphs."""
        return random_graph(size, 128, 40)


# ---------------------------------------------------------------------------------------------- images


class TimedBlock(nn.Module):
    """Two convolutions that are told the time, around a short cut."""

    def __init__(self, source: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, source), nn.SiLU(), nn.Conv2d(source, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(
            nn.GroupNorm(32, out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, padding=1)
        )
        self.short: nn.Module = nn.Conv2d(source, out, 1) if source != out else nn.Identity()

    def forward(self, image: Tensor, time: Tensor) -> Tensor:  # noqa: D102
        seen = self.first(image) + self.time(functional.silu(time))[:, :, None, None]
        found: Tensor = self.second(seen) + self.short(image)
        return found


class PictureAttention(nn.Module):
    """Attention between all pixels."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), heads
        self.into, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        batch, width, high, wide = image.shape
        query, key, value = self.into(self.norm(image)).view(batch, 3, self.heads, -1, high * wide).unbind(1)
        score = torch.einsum("bhcq,bhck->bhqk", query, key) * (width // self.heads) ** -0.5
        seen = torch.einsum("bhqk,bhck->bhcq", score.softmax(-1), value)
        found: Tensor = image + self.out(seen.reshape(batch, width, high, wide))
        return found


class DiffusionNet(nn.Module):
    """The U-Net of denoising diffusion, 128 wide."""

    def __init__(self, width: int = 128, wider: tuple[int, ...] = (1, 2, 2, 4)) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        now, kept = width, [width]
        for level, more in enumerate(wider):
            for _ in range(2):
                blocks = nn.ModuleList([TimedBlock(now, width * more, time)])
                now = width * more
                if level == 2:  # noqa: PLR2004 - at 16 pixels
                    blocks.append(PictureAttention(now))
                self.down.append(blocks)
                kept.append(now)
            if level < len(wider) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(now, now, 3, stride=2, padding=1)]))
                kept.append(now)
        self.middle = nn.ModuleList(
            [TimedBlock(now, now, time), PictureAttention(now), TimedBlock(now, now, time)]
        )
        for level, more in reversed(list(enumerate(wider))):
            for number in range(3):
                blocks = nn.ModuleList([TimedBlock(now + kept.pop(), width * more, time)])
                now = width * more
                if level == 2:  # noqa: PLR2004
                    blocks.append(PictureAttention(now))
                if level and number == 2:  # noqa: PLR2004
                    blocks.append(nn.Upsample(scale_factor=2))
                self.up.append(blocks)
        self.head = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def run(self, blocks: nn.ModuleList, image: Tensor, time: Tensor) -> Tensor:
        """Blocks that are told the time, and others."""
        for block in blocks:
            image = block(image, time) if isinstance(block, TimedBlock) else block(image)
        return image

    def forward(self, clean: Tensor, steps: Tensor) -> Tensor:  # noqa: D102
        noise = torch.randn_like(clean)
        level = torch.cos(steps.float() / 1000 * math.pi / 2)[:, None, None, None]
        image = level * clean + (1 - level**2).sqrt() * noise
        rates = torch.exp(
            -math.log(10_000) * torch.arange(self.width // 2, device=clean.device) / (self.width // 2)
        )
        angles = steps[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        image = self.stem(image)
        kept = [image]
        for blocks in self.down:
            image = self.run(blocks, image, time)
            kept.append(image)
        image = self.run(self.middle, image, time)
        for blocks in self.up:
            image = self.run(blocks, torch.cat([image, kept.pop()], dim=1), time)
        return functional.mse_loss(self.head(image), noise)


class Diffusion(WrittenJob):
    """Denoising diffusion of images of 64 pixels."""

    name, micro_batch, network = "diffusion_unet", 16, DiffusionNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images and steps."""
        return {"clean": torch.randn(size, 3, 64, 64), "steps": torch.randint(1000, (size,))}


class VolumeBlock(nn.Sequential):
    """Two convolutions over a volume."""

    def __init__(self, source: int, out: int) -> None:
        super().__init__(
            nn.Conv3d(source, out, 3, padding=1, bias=False),
            nn.InstanceNorm3d(out, affine=True),
            nn.LeakyReLU(0.01),
            nn.Conv3d(out, out, 3, padding=1, bias=False),
            nn.InstanceNorm3d(out, affine=True),
            nn.LeakyReLU(0.01),
        )  # fmt: skip


class VolumeNet(nn.Module):
    """A U-Net for scans, as in medicine."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [VolumeBlock(before, now) for before, now in zip((4, *widths), widths, strict=False)]
        )
        pairs = list(itertools.pairwise(widths))[::-1]
        self.grow = nn.ModuleList([nn.ConvTranspose3d(wide, narrow, 2, stride=2) for narrow, wide in pairs])
        self.up = nn.ModuleList([VolumeBlock(2 * narrow, narrow) for narrow, _ in pairs])
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, scan: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        kept = []
        for number, block in enumerate(self.down):
            scan = block(functional.max_pool3d(scan, 2) if number else scan)
            kept.append(scan)
        kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            scan = block(torch.cat([grow(scan), kept.pop()], dim=1))
        logits = self.head(scan)
        share = logits.float().softmax(1)
        hot = functional.one_hot(labels, logits.shape[1]).movedim(-1, 1).float()
        overlap = (2 * (share * hot).sum((2, 3, 4)) + 1) / ((share + hot).sum((2, 3, 4)) + 1)
        return functional.cross_entropy(logits, labels) + 1 - overlap.mean()


class Volume(WrittenJob):
    """Segmentation of scans with convolutions over volumes."""

    name, micro_batch, network = "unet3d", 2, VolumeNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Scans of four kinds, with a class a voxel."""
        return {"scan": torch.randn(size, 4, 96, 96, 96), "labels": torch.randint(4, (size, 96, 96, 96))}


class VideoBlock(nn.Module):
    """A convolution over space, then one over time."""

    def __init__(self, source: int, out: int, stride: int) -> None:
        super().__init__()
        middle = out * source * 27 // (out * 3 + source * 9)
        self.space = nn.Conv3d(
            source, middle, (1, 3, 3), stride=(1, stride, stride), padding=(0, 1, 1), bias=False
        )
        self.time = nn.Conv3d(middle, out, (3, 1, 1), stride=(stride, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm3d(middle), nn.BatchNorm3d(out)
        self.short = nn.Conv3d(source, out, 1, stride=stride, bias=False) if source != out else nn.Identity()

    def forward(self, clip: Tensor) -> Tensor:  # noqa: D102
        seen = self.norm_b(self.time(functional.relu(self.norm_a(self.space(clip)))))
        return functional.relu(seen + self.short(clip))


class VideoNet(nn.Module):
    """R(2+1)D with ten blocks."""

    def __init__(self, classes: int = 400) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 64, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False),
            nn.BatchNorm3d(64),
            nn.ReLU(),
        )
        widths = ((64, 64), (64, 128), (128, 256), (256, 512))
        self.stages = nn.ModuleList(
            [nn.ModuleList([VideoBlock(a, b, 1 + (a != b)), VideoBlock(b, b, 1)]) for a, b in widths]
        )
        self.head = nn.Linear(512, classes)

    def forward(self, clip: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        clip = self.stem(clip)
        for stage in self.stages:
            for block in stage:
                clip = block(clip)
        return functional.cross_entropy(self.head(clip.mean((2, 3, 4))), labels)


class Video(WrittenJob):
    """Classes of clips."""

    name, micro_batch, network = "video_resnet", 8, VideoNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Clips of 16 frames."""
        return {"clip": torch.randn(size, 3, 16, 112, 112), "labels": torch.randint(400, (size,))}


class Generator(nn.Module):
    """Noise to images of 64 pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (100, 8 * width, 4 * width, 2 * width, width)
        layers: list[nn.Module] = []
        for number, (before, now) in enumerate(itertools.pairwise(widths)):
            stride, padding = (2, 1) if number else (1, 0)
            layers += [
                nn.ConvTranspose2d(before, now, 4, stride, padding, bias=False),
                nn.BatchNorm2d(now),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:  # noqa: D102
        found: Tensor = self.layers(noise)
        return found


class Critic(nn.Module):
    """Images of 64 pixels to a score."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        widths = (3, width, 2 * width, 4 * width, 8 * width)
        self.layers = nn.ModuleList(
            [norm(nn.Conv2d(before, now, 4, 2, 1)) for before, now in itertools.pairwise(widths)]
        )
        self.head = nn.Conv2d(8 * width, 1, 4)

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            image = functional.leaky_relu(layer(image), 0.2)
        found: Tensor = self.head(image).flatten()
        return found


class GanNet(nn.Module):
    """Both parts of a GAN; the losses of both are summed, as in training both at once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Generator(), Critic()

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:  # noqa: D102
        made = self.generator(noise)
        critic = (
            functional.relu(1 - self.critic(real)).mean()
            + functional.relu(1 + self.critic(made.detach())).mean()
        )
        return critic - self.critic(made).mean()


class Gan(WrittenJob):
    """Generator and critic of a GAN with spectral normalisation."""

    name, micro_batch, network = "gan", 64, GanNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images and noise."""
        return {"real": torch.randn(size, 3, 64, 64), "noise": torch.randn(size, 100, 1, 1)}


class PenaltyNet(GanNet):
    """A critic whose slope is held at one: a gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.generator.requires_grad_(requires_grad=False)

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:  # noqa: D102
        with torch.no_grad():
            made = self.generator(noise)
        share = torch.rand(real.shape[0], 1, 1, 1, device=real.device)
        between = (share * real + (1 - share) * made).requires_grad_()
        score = self.critic(between)
        (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


class GradientPenalty(Gan):
    """A Wasserstein critic with a gradient penalty."""

    name, micro_batch, network = "gradient_penalty", 64, PenaltyNet


class Windows(nn.Module):
    """Attention within windows that are shifted every second block, by rolled and permuted views."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        batch, high, wide, width = image.shape
        size = self.window
        seen = torch.roll(self.norm_a(image), (-self.shift, -self.shift), (1, 2))
        seen = seen.view(batch, high // size, size, wide // size, size, width).permute(0, 1, 3, 2, 4, 5)
        seen = seen.reshape(-1, size * size, width)
        query, key, value = self.into(seen).view(len(seen), size**2, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = (query * (width // self.heads) ** -0.5) @ key.transpose(-2, -1) + self.bias
        seen = self.out((score.softmax(-1) @ value).transpose(1, 2).reshape(seen.shape))
        seen = seen.view(batch, high // size, wide // size, size, size, width).permute(0, 1, 3, 2, 4, 5)
        image = image + torch.roll(seen.reshape(image.shape), (self.shift, self.shift), (1, 2))
        found: Tensor = image + self.feed(self.norm_b(image))
        return found


class WindowNet(nn.Module):
    """Four stages of windowed attention."""

    def __init__(self, width: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for stage, depth in enumerate(depths):
            now = width * 2**stage
            self.stages.append(
                nn.ModuleList([Windows(now, 3 * 2**stage, 7, 3 * (index % 2)) for index in range(depth)])
            )
            if stage < len(depths) - 1:
                self.merges.append(
                    nn.Sequential(nn.LayerNorm(4 * now), nn.Linear(4 * now, 2 * now, bias=False))
                )
        self.head = nn.Linear(width * 2 ** (len(depths) - 1), classes)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        seen = self.stem(image).permute(0, 2, 3, 1)
        for number, stage in enumerate(self.stages):
            for block in stage:
                seen = block(seen)
            if number < len(self.merges):
                parts = [seen[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
                seen = self.merges[number](torch.cat(parts, -1))
        return functional.cross_entropy(self.head(seen.mean((1, 2))), labels)


class WindowedAttention(WrittenJob):
    """A classifier of images with shifted windows."""

    name, micro_batch, network = "window_attention", 32, WindowNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.randn(size, 3, 224, 224), "labels": torch.randint(1000, (size,))}


class ConvBlock(nn.Module):
    """A plain residual block."""

    def __init__(self, source: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(source, out, 3, stride, 1, bias=False),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
        )
        self.norm_a, self.norm_b = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = (
            nn.Sequential(nn.Conv2d(source, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1 or source != out
            else nn.Identity()
        )

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        seen = self.norm_b(self.two(functional.relu(self.norm_a(self.one(image)))))
        return functional.relu(seen + self.short(image))


def residual_net(out: int) -> nn.Sequential:
    """An 18-layer residual network."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    for before, now in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [ConvBlock(before, now, 1 + (before != now)), ConvBlock(now, now)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, out))


class MetricNet(nn.Module):
    """Embeddings whose hardest pairs of a batch are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = residual_net(128)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        seen = functional.normalize(self.encoder(image).float(), dim=1)
        apart = torch.cdist(seen, seen)
        same = labels[:, None] == labels[None]
        furthest = apart.masked_fill(~same, 0).max(1).values
        nearest = apart.masked_fill(same, math.inf).min(1).values
        wrong = functional.relu(furthest - nearest + 0.2)
        return wrong[wrong > 0].mean()


class MetricLearning(WrittenJob):
    """Triplets of the hardest samples of a batch."""

    name, micro_batch, network = "metric_learning", 64, MetricNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images, four of a kind."""
        return {"image": torch.randn(size, 3, 224, 224), "labels": torch.arange(size) // 4}


class MomentumNet(nn.Module):
    """Two encoders, of which one follows the other slowly, and a queue of earlier keys."""

    queue: Tensor

    def __init__(self, size: int = 128, length: int = 65_536) -> None:
        super().__init__()
        self.query = residual_net(size)
        self.key = copy.deepcopy(self.query).requires_grad_(requires_grad=False)
        self.register_buffer("queue", functional.normalize(torch.randn(size, length), dim=0))

    def forward(self, tensor: Tensor, other: Tensor) -> Tensor:  # noqa: D102
        query = functional.normalize(self.query(tensor), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.mul_(0.999).add_(theirs, alpha=0.001)
            key = functional.normalize(self.key(other), dim=1)
        near = (query * key).sum(1, keepdim=True)
        far = query @ self.queue.clone()
        logits = torch.cat([near, far], 1) / 0.07
        with torch.no_grad():
            self.queue[:, : len(key)] = key.T
        return functional.cross_entropy(logits, torch.zeros(len(key), dtype=torch.long, device=key.device))


class MomentumContrast(WrittenJob):
    """Contrast with a momentum encoder and a queue."""

    name, micro_batch, network = "momentum_contrast", 32, MomentumNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Two views of each image."""
        return {"tensor": torch.randn(size, 3, 224, 224), "other": torch.randn(size, 3, 224, 224)}


class FuseNet(nn.Module):
    """Branches of several resolutions that are mixed again and again: lists of lists of modules."""

    def __init__(self, width: int = 32, branches: int = 3, rounds: int = 4, classes: int = 19) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.start = nn.ModuleList([nn.Conv2d(width, width * 2**b, 3, 2**b, 1) for b in range(branches)])
        self.rounds = nn.ModuleList(
            [nn.ModuleList([nn.ModuleList([ConvBlock(width * 2**b, width * 2**b) for _ in range(2)])
                            for b in range(branches)])
             for _ in range(rounds)]
        )  # fmt: skip
        self.mixes = nn.ModuleList(
            [nn.ModuleList([nn.ModuleList([nn.Conv2d(width * 2**a, width * 2**b, 1) for a in range(branches)])
                            for b in range(branches)]) for _ in range(rounds)]
        )  # fmt: skip
        self.head = nn.Conv2d(width * (2**branches - 1), classes, 1)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        image = self.stem(image)
        seen = [start(image) for start in self.start]
        for blocks, mixes in zip(self.rounds, self.mixes, strict=True):
            for place, branch in enumerate(blocks):
                for block in branch:
                    seen[place] = block(seen[place])
            seen = [
                sum(
                    functional.interpolate(mix(one), size=seen[place].shape[2:], mode="bilinear")
                    for mix, one in zip(row, seen, strict=True)
                )
                for place, row in enumerate(mixes)
            ]
        size = labels.shape[1:]
        joined = torch.cat(
            [functional.interpolate(one, size=seen[0].shape[2:], mode="bilinear") for one in seen], 1
        )
        return functional.cross_entropy(
            functional.interpolate(self.head(joined), size=size, mode="bilinear"), labels
        )


class NestedLists(WrittenJob):
    """Segmentation with branches of high resolution."""

    name, micro_batch, network = "nested_lists", 4, FuseNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Street scenes."""
        return {"image": torch.randn(size, 3, 512, 512), "labels": torch.randint(19, (size, 512, 512))}


class DetectorNet(nn.Module):
    """One stage of detection: every spot says a class, a box and how central it is."""

    def __init__(self, classes: int = 80, width: int = 256) -> None:
        super().__init__()
        layers = list(residual_net(1)[:-3])
        self.stem, self.low, self.high = (
            nn.Sequential(*layers[:8]),
            nn.Sequential(*layers[8:10]),
            nn.Sequential(*layers[10:]),
        )
        self.sides = nn.ModuleList([nn.Conv2d(channels, width, 1) for channels in (128, 256, 512)])
        self.towers = nn.ModuleList(
            [nn.Sequential(*[layer for _ in range(4) for layer in
                             (nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(32, width), nn.ReLU())])
             for _ in range(2)]
        )  # fmt: skip
        self.kind, self.box = nn.Conv2d(width, classes, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)

    def forward(self, image: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        first = self.stem(image)
        second = self.low(first)
        maps = [side(one) for side, one in zip(self.sides, (first, second, self.high(second)), strict=True)]
        for place in (1, 0):
            maps[place] = maps[place] + functional.interpolate(maps[place + 1], size=maps[place].shape[2:])
        kinds, sizes, spots = [], [], []
        for seen, stride in zip(maps, (8, 16, 32), strict=True):
            kinds.append(self.kind(self.towers[0](seen)).flatten(2).transpose(1, 2))
            sizes.append(
                functional.softplus(self.box(self.towers[1](seen))).flatten(2).transpose(1, 2) * stride
            )
            rows, columns = (
                torch.arange(n, device=image.device) * stride + stride // 2 for n in seen.shape[2:]
            )
            spots.append(torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).view(-1, 2))
        kind, size, spot = torch.cat(kinds, 1), torch.cat(sizes, 1).float(), torch.cat(spots).float()
        sides = torch.cat(
            [spot[None, :, None] - boxes[:, None, :, :2], boxes[:, None, :, 2:] - spot[None, :, None]], -1
        )
        inside = sides.min(-1).values > 0
        area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
        best, which = area[:, None].masked_fill(~inside, math.inf).min(-1)
        hit = best < math.inf
        target = torch.zeros_like(kind, dtype=torch.float32)
        chosen = labels.gather(1, which)
        target[hit, chosen[hit]] = 1
        share = kind.float().sigmoid()
        focal = functional.binary_cross_entropy_with_logits(kind.float(), target, reduction="none")
        focal = (focal * (target - share).abs().square()).sum() / hit.sum().clamp(min=1)
        wanted = sides.gather(2, which[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)[hit]
        given = size[hit]
        shared = torch.minimum(given, wanted)
        common = (shared[:, 0] + shared[:, 2]) * (shared[:, 1] + shared[:, 3])
        union = sum((one[:, 0] + one[:, 2]) * (one[:, 1] + one[:, 3]) for one in (given, wanted)) - common
        return focal - torch.log((common + 1) / (union + 1)).mean()


class Detector(WrittenJob):
    """A detector in one stage, with its own matching of boxes."""

    name, micro_batch, network = "detector", 4, DetectorNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images with ten boxes each."""
        low = torch.rand(size, 10, 2) * 300
        boxes = torch.cat([low, low + 20 + torch.rand(size, 10, 2) * 150], -1)
        return {
            "image": torch.randn(size, 3, 512, 512),
            "boxes": boxes,
            "labels": torch.randint(80, (size, 10)),
        }


class QuantisedNet(nn.Module):
    """An autoencoder whose code is the nearest of 1024 words; the words follow by a moving mean."""

    words: Tensor
    counts: Tensor

    def __init__(self, width: int = 256, words: int = 1024) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 64, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(64, width, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip
        self.register_buffer("words", torch.randn(words, 64))
        self.register_buffer("counts", torch.ones(words))

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        code = self.encoder(image).float()
        flat = code.permute(0, 2, 3, 1).reshape(-1, 64)
        apart = flat.square().sum(1, keepdim=True) - 2 * flat @ self.words.T + self.words.square().sum(1)
        which = apart.argmin(1)
        with torch.no_grad():
            hot = functional.one_hot(which, len(self.words)).float()
            self.counts.mul_(0.99).add_(hot.sum(0), alpha=0.01)
            self.words.mul_(0.99).add_((hot.T @ flat) / self.counts[:, None].clamp(min=1e-5), alpha=0.01)
        near = self.words[which].view(code.shape[0], *code.shape[2:], 64).permute(0, 3, 1, 2)
        close = functional.mse_loss(code, near)
        near = code + (near - code).detach()
        return functional.mse_loss(self.decoder(near), image) + 0.25 * close


class Quantised(WrittenJob):
    """A vector-quantised autoencoder."""

    name, micro_batch, network = "vq_vae", 32, QuantisedNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.randn(size, 3, 128, 128)}


# ---------------------------------------------------------------------------------------------- sequences


class TaggerNet(nn.Module):
    """A tag a word, by an LSTM in both directions over packed sentences."""

    def __init__(self, words: int = 30_000, width: int = 300, hidden: int = 512, tags: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, words: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:  # noqa: D102
        packed = pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        seen, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return functional.cross_entropy(self.head(seen).flatten(0, 1), tags.flatten(), ignore_index=-100)


class Tagger(WrittenJob):
    """Packed sequences through an LSTM."""

    name, micro_batch, network = "packed_lstm", 64, TaggerNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Sentences of 80 words and fewer, of the same lengths in every run."""
        lengths = 80 - torch.arange(size) % 71
        there = torch.arange(80) < lengths[:, None]
        return {
            "words": torch.randint(1, 30_000, (size, 80)) * there,
            "lengths": lengths,
            "tags": torch.where(there, torch.randint(50, (size, 80)), torch.full((size, 80), -100)),
        }


class TranslatorNet(nn.Module):
    """A GRU reads, a GRU cell writes word by word and looks back at what was read."""

    def __init__(self, words: int = 30_000, width: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.reader, self.cell = nn.GRU(width, width, batch_first=True), nn.GRUCell(2 * width, width)
        self.look, self.head = nn.Linear(width, width), nn.Linear(2 * width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        read, last = self.reader(self.source(source))
        state, context, said = last[0], read[:, -1], []
        keys = self.look(read)
        for step in range(target.shape[1] - 1):
            state = self.cell(torch.cat([self.target(target[:, step]), context.to(state.dtype)], -1), state)
            weight = torch.softmax((keys @ state[..., None].to(keys.dtype)).squeeze(-1), -1)
            context = (weight[:, None].to(read.dtype) @ read).squeeze(1)
            said.append(torch.cat([state.to(context.dtype), context], -1))
        return functional.cross_entropy(
            self.head(torch.stack(said, 1)).flatten(0, 1), target[:, 1:].flatten()
        )


class Translator(WrittenJob):
    """A loop over a GRU cell with attention."""

    name, micro_batch, network = "gru_decoder", 64, TranslatorNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Pairs of sentences."""
        return {"source": torch.randint(30_000, (size, 40)), "target": torch.randint(30_000, (size, 24))}


@torch.jit.script
def bias_gelu(seen: Tensor, bias: Tensor) -> Tensor:
    """A bias and a smooth step in one."""
    moved = seen + bias
    return moved * 0.5 * (1.0 + torch.tanh(0.79788456 * moved * (1.0 + 0.044715 * moved * moved)))


@torch.jit.script
def dropout_add(seen: Tensor, bias: Tensor, short: Tensor, share: float, train: bool) -> Tensor:
    """A bias, dropout and the short cut in one."""
    return short + torch.nn.functional.dropout(seen + bias, p=share, training=train)


class ScriptedBlock(nn.Module):
    """A block with scripted functions, as in large public trainers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.wide, self.narrow = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        self.bias_a, self.bias_b = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.bias_wide = nn.Parameter(torch.zeros(4 * width))

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        batch, length, width = seen.shape
        query, key, value = (
            self.into(self.norm_a(seen)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        read = self.out(read.transpose(1, 2).reshape(batch, length, width))
        seen = dropout_add(read, self.bias_a, seen, 0.1, self.training)
        read = self.narrow(bias_gelu(self.wide(self.norm_b(seen)), self.bias_wide))
        return dropout_add(read, self.bias_b, seen, 0.1, self.training)


class ScriptedNet(nn.Module):
    """A decoder of scripted blocks."""

    def __init__(self, words: int = 50_304, width: int = 1024, layers: int = 12, length: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([ScriptedBlock(width, 16) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        seen = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            seen = block(seen)
        logits = self.head(self.norm(seen))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Scripted(WrittenJob):
    """Functions under torch.jit.script."""

    name, micro_batch, network = "scripted_gpt", 4, ScriptedNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Token ids."""
        return {"ids": torch.randint(50_304, (size, 1024))}


class Experts(nn.Module):
    """Each token goes to two of eight experts, which are looped over with masks."""

    def __init__(self, width: int, count: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(count)
            ]
        )

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        flat = seen.reshape(-1, seen.shape[-1])
        weight, chosen = torch.topk(self.gate(flat).float().softmax(-1), 2)
        weight = weight / weight.sum(-1, keepdim=True)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            result.index_add_(0, token, (expert(flat[token]) * weight[token, place, None]).to(flat.dtype))
        return result.view_as(seen)


class MixtureNet(nn.Module):
    """A small decoder with a mixture of experts in every block."""

    def __init__(self, words: int = 32_000, width: int = 768, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.attends = nn.ModuleList(
            [nn.MultiheadAttention(width, 12, batch_first=True) for _ in range(layers)]
        )
        self.experts = nn.ModuleList([Experts(width) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        seen = self.words(ids)
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for number, (attend, experts) in enumerate(zip(self.attends, self.experts, strict=True)):
            read = self.norms[2 * number](seen)
            seen = seen + attend(read, read, read, attn_mask=mask, need_weights=False)[0]
            seen = seen + experts(self.norms[2 * number + 1](seen))
        return functional.cross_entropy(self.head(seen[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Mixture(WrittenJob):
    """A loop over experts with masks."""

    name, micro_batch, network = "masked_experts", 4, MixtureNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Token ids."""
        return {"ids": torch.randint(32_000, (size, 512))}


class WaveNet(nn.Module):
    """Convolutions over sound that reach ever further back."""

    def __init__(self, width: int = 128, layers: int = 20) -> None:
        super().__init__()
        self.stem = nn.Embedding(256, width)
        reach = [2 ** (number % 10) for number in range(layers)]
        self.gates = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=one) for one in reach])
        self.outs = nn.ModuleList([nn.Conv1d(width, 2 * width, 1) for _ in reach])
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, sound: Tensor) -> Tensor:  # noqa: D102
        seen, total = self.stem(sound).transpose(1, 2), torch.tensor(0.0, device=sound.device)
        for gate, out in zip(self.gates, self.outs, strict=True):
            value, share = gate(functional.pad(seen, (gate.dilation[0], 0))).chunk(2, 1)
            kept, more = out(value.tanh() * share.sigmoid()).chunk(2, 1)
            seen, total = seen + kept, total + more
        return functional.cross_entropy(self.head(total)[..., :-1], sound[:, 1:])


class Wave(WrittenJob):
    """Dilated convolutions over sound."""

    name, micro_batch, network = "wavenet", 8, WaveNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """A second of sound in 256 steps."""
        return {"sound": torch.randint(256, (size, 16_000))}


# ---------------------------------------------------------------------------------------------- others


class FieldNet(nn.Module):
    """Colour and density of points along rays, added up to pixels."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Linear(63 if not index else width + 63 * (index == layers // 2), width)
                for index in range(layers)
            ]
        )
        self.density, self.colour = (
            nn.Linear(width, 1),
            nn.Sequential(nn.Linear(width + 3, 128), nn.ReLU(), nn.Linear(128, 3)),
        )

    def forward(self, origin: Tensor, towards: Tensor, pixels: Tensor) -> Tensor:  # noqa: D102
        depth = torch.linspace(2, 6, 192, device=origin.device)
        depth = depth + torch.rand(origin.shape[0], 192, device=origin.device) * (4 / 192)
        point = origin[:, None] + towards[:, None] * depth[..., None]
        scales = 2.0 ** torch.arange(10, device=origin.device)
        waves = (point[..., None] * scales).flatten(-2)
        place = torch.cat([point, waves.sin(), waves.cos()], -1)
        seen = place
        for number, layer in enumerate(self.layers):
            seen = functional.relu(
                layer(torch.cat([seen, place], -1) if number == len(self.layers) // 2 else seen)
            )
        density = functional.softplus(self.density(seen).squeeze(-1).float())
        colour = self.colour(torch.cat([seen, towards[:, None].expand(-1, 192, -1)], -1)).sigmoid()
        stops = 1 - torch.exp(-density * (4 / 192))
        passes = torch.cumprod(torch.cat([torch.ones_like(stops[:, :1]), 1 - stops + 1e-10], 1), 1)[:, :-1]
        return functional.mse_loss(((stops * passes)[..., None] * colour).sum(1), pixels)


class Field(WrittenJob):
    """A radiance field, as NeRF."""

    name, micro_batch, network = "nerf", 2048, FieldNet
    global_batch = 4096

    def batch(self, size: int) -> dict[str, Tensor]:
        """Rays and their colours."""
        towards = functional.normalize(torch.randn(size, 3), dim=-1)
        return {"origin": torch.randn(size, 3), "towards": towards, "pixels": torch.rand(size, 3)}


def taken(points: Tensor, index: Tensor) -> Tensor:
    """Points by their numbers, cloud by cloud."""
    flat = index.flatten(1)[..., None].expand(-1, -1, points.shape[-1])
    return points.gather(1, flat).view(*index.shape, points.shape[-1])


class CloudNet(nn.Module):
    """Points are thinned out, and each that stays looks at its neighbours."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        shapes = ((3, (64, 64, 128)), (131, (128, 128, 256)))
        self.layers = nn.ModuleList()
        for source, widths in shapes:
            layers: list[nn.Module] = []
            for before, now in zip((source, *widths), widths, strict=False):
                layers += [nn.Conv2d(before, now, 1), nn.BatchNorm2d(now), nn.ReLU()]
            self.layers.append(nn.Sequential(*layers))
        self.head = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.4), nn.Linear(256, classes))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        seen: Tensor | None = None
        for layer, count in zip(self.layers, (64, 16), strict=True):
            chosen = self.furthest(points, count)
            centre = taken(points, chosen)
            near = torch.cdist(centre, points).topk(32, dim=-1, largest=False).indices
            group = taken(points, near) - centre[:, :, None]
            group = group if seen is None else torch.cat([group, taken(seen, near)], -1)
            seen = layer(group.permute(0, 3, 1, 2)).max(-1).values.transpose(1, 2)
            points = centre
        assert seen is not None  # noqa: S101 - there are layers
        return functional.cross_entropy(self.head(seen.max(1).values), labels)

    def furthest(self, points: Tensor, count: int) -> Tensor:
        """Numbers of points that are far from each other, one after another."""
        apart = torch.full(points.shape[:2], math.inf, device=points.device)
        last = torch.zeros(len(points), dtype=torch.long, device=points.device)
        chosen = [last]
        for _ in range(count - 1):
            step = (points - taken(points, last[:, None])).square().sum(-1)
            apart = torch.minimum(apart, step)
            last = apart.argmax(1)
            chosen.append(last)
        return torch.stack(chosen, 1)


class Cloud(WrittenJob):
    """Classes of point clouds."""

    name, micro_batch, network = "point_cloud", 32, CloudNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Clouds of 1024 points."""
        return {"points": torch.randn(size, 1024, 3), "labels": torch.randint(40, (size,))}


class FlowStep(nn.Module):
    """A step of a flow that can be undone: scale, mix channels, move one half by the other."""

    def __init__(self, width: int, hidden: int = 512) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.zeros(1, width, 1, 1)),
            nn.Parameter(torch.zeros(1, width, 1, 1)),
        )
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0])
        self.net = nn.Sequential(
            nn.Conv2d(width // 2, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, hidden, 1), nn.ReLU(),
            nn.Conv2d(hidden, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        pixels = image.shape[2] * image.shape[3]
        image = (image + self.shift) * self.scale.exp()
        grown = pixels * (self.scale.sum() + torch.slogdet(self.mix.float())[1])
        image = functional.conv2d(image, self.mix[..., None, None])
        one, other = image.chunk(2, 1)
        shift, scale = self.net(one).float().chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        return torch.cat([one, (other + shift) * scale], 1), grown + scale.log().flatten(1).sum(1)


class FlowNet(nn.Module):
    """A flow of eight steps on each of three scales."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            [nn.ModuleList([FlowStep(12 * 2**index) for _ in range(8)]) for index in range(3)]
        )

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        numbers, total = image[0].numel(), image.new_zeros(image.shape[0])
        for number, steps in enumerate(self.scales):
            image = functional.pixel_unshuffle(image, 2)
            for step in steps:
                image, grown = step(image)
                total = total + grown
            if number < len(self.scales) - 1:
                image, ready = image.chunk(2, 1)
                total = total - 0.5 * ready.float().square().flatten(1).sum(1)
        total = total - 0.5 * image.float().square().flatten(1).sum(1)
        return -(total / numbers).mean()


class Flow(WrittenJob):
    """A normalising flow, as Glow."""

    name, micro_batch, network = "normalizing_flow", 32, FlowNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.rand(size, 3, 32, 32)}


class ClickNet(nn.Module):
    """Tables of ids and a few numbers, multiplied pair by pair."""

    def __init__(self, tables: int = 26, rows: int = 200_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables)]
        )
        self.low = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.high = nn.Sequential(
            nn.Linear(width + (tables + 1) * tables // 2, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, numbers: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:  # noqa: D102
        low = self.low(numbers)
        rows = [table(one) for table, one in zip(self.tables, ids.unbind(1), strict=True)]
        seen = torch.stack([low, *(row.to(low.dtype) for row in rows)], 1)
        pairs = seen @ seen.transpose(1, 2)
        row, column = torch.tril_indices(seen.shape[1], seen.shape[1], -1, device=seen.device)
        logits = self.high(torch.cat([low, pairs[:, row, column]], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


class Clicks(WrittenJob):
    """A recommender with sparse gradients of its embeddings."""

    name, micro_batch, network = "sparse_embeddings", 2048, ClickNet
    global_batch = 4096

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Plain SGD, which takes sparse gradients."""
        return torch.optim.SGD(params, lr=0.1)

    def batch(self, size: int) -> dict[str, Tensor]:
        """Numbers, ids and whether there was a click."""
        return {
            "numbers": torch.randn(size, 13),
            "ids": torch.randint(200_000, (size, 26, 4)),
            "clicked": torch.randint(2, (size,)).float(),
        }


class StepModule(nn.Module):
    """A module with training_step(), as Lightning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = residual_net(512)
        self.head = nn.Linear(512, 100)

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        found: Tensor = self.head(functional.relu(self.encoder(image)))
        return found

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        """The loss of a batch."""
        del number
        return functional.cross_entropy(self(batch["image"]), batch["labels"], label_smoothing=0.1)


class Stepped(WrittenJob):
    """A job whose loss() calls training_step()."""

    name, micro_batch, network = "training_step", 64, StepModule

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.randn(size, 3, 224, 224), "labels": torch.randint(100, (size,))}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """The module's own."""
        found: Tensor = model.training_step(batch, 0)
        return found
