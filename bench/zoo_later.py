"""More jobs in the style of public repositories, for bench/zoo.py: kinds that zoo_models.py does not have.

They were written after the rules of the step time, predicted before their first step ran, and timed then.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.zoo_models import WrittenJob
else:
    # zoo.py has loaded it under this name.
    from trimtab_zoo_models import WrittenJob

DROPPED = 0.1
"""Share of samples without their class."""


# ---------------------------------------------------------------------------------------------- images


class ModulatedBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by a condition (AdaLN-zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(
            [nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)]
        )
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:  # noqa: D102
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        seen = self.norms[0](tokens) * (1 + scale) + shift
        query, key, value = self.inward(seen).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + gate * self.outward(seen)
        seen = self.wide(self.norms[1](tokens) * (1 + scale2) + shift2)
        updated: Tensor = tokens + gate2 * seen
        return updated


class DiffusionTransformer(nn.Module):
    """Noise in latent images, predicted by a transformer over their patches."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, classes: int = 1000) -> None:
        super().__init__()
        self.width = width
        self.stem = nn.Conv2d(4, width, 2, 2)
        self.place = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList([ModulatedBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, 2 * 2 * 4)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        size = image.shape[0]
        time = torch.rand(size, device=image.device)
        noise = torch.randn_like(image)
        noisy = (1 - time)[:, None, None, None] * image + time[:, None, None, None] * noise
        rates = torch.exp(-math.log(10_000) * torch.arange(128, device=image.device) / 128)
        waves = time[:, None] * 1000 * rates
        label = torch.where(torch.rand(size, device=image.device) < DROPPED, 1000, label)
        condition = self.times(torch.cat([waves.cos(), waves.sin()], -1)) + self.labels(label)
        tokens = self.stem(noisy).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        out = self.head(self.norm(tokens) * (1 + scale) + shift)
        out = out.view(size, 16, 16, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(image.shape)
        return functional.mse_loss(out.float(), noise - image)


class DiffusionTransformerJob(WrittenJob):
    """A diffusion transformer, as DiT-B/2."""

    name, micro_batch, network = "diffusion_transformer", 64, DiffusionTransformer

    def batch(self, size: int) -> dict[str, Tensor]:
        """Latent images of 32 x 32 and their classes."""
        return {"image": torch.randn(size, 4, 32, 32), "label": torch.randint(1000, (size,))}


class GatedUNet(nn.Module):
    """A U-Net whose skip connections pass gates of attention."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self.convolve(before, now) for before, now in itertools.pairwise((3, *widths))]
        )
        pairs = list(itertools.pairwise(reversed(widths)))
        self.rise = nn.ModuleList([nn.ConvTranspose2d(before, now, 2, 2) for before, now in pairs])
        self.up = nn.ModuleList([self.convolve(2 * now, now) for _, now in pairs])
        self.gates = nn.ModuleList(
            [
                nn.ModuleList(
                    [nn.Conv2d(*sizes, 1) for sizes in ((now, now // 2), (now, now // 2), (now // 2, 1))]
                )
                for now in widths[-2::-1]
            ]
        )  # fmt: skip
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def convolve(before: int, now: int) -> nn.Sequential:
        """Two convolutions with norms."""
        layers: list[nn.Module] = []
        for source in (before, now):
            layers += [nn.Conv2d(source, now, 3, padding=1), nn.BatchNorm2d(now), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        skips: list[Tensor] = []
        seen = image
        for number, layer in enumerate(self.down):
            seen = layer(functional.max_pool2d(seen, 2) if number else seen)
            skips.append(seen)
        skips.pop()
        for rise, layer, gate in zip(self.rise, self.up, self.gates, strict=True):
            seen, skip = rise(seen), skips.pop()
            layers = list(gate.children())
            skip = skip * torch.sigmoid(layers[2](functional.relu(layers[0](seen) + layers[1](skip))))
            seen = layer(torch.cat([skip, seen], 1))
        logits = self.head(seen).float()
        share = logits.softmax(1)
        target = functional.one_hot(mask, logits.shape[1]).permute(0, 3, 1, 2).float()
        overlap = (share * target).sum((2, 3))
        dice = 1 - (2 * overlap + 1) / (share.sum((2, 3)) + target.sum((2, 3)) + 1)
        loss: Tensor = functional.cross_entropy(logits, mask) + dice.mean()
        return loss


class GatedUNetJob(WrittenJob):
    """Segmentation of images by an attention U-Net."""

    name, micro_batch, network = "attention_unet", 16, GatedUNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images and the class of each pixel."""
        return {"image": torch.randn(size, 3, 256, 256), "mask": torch.randint(4, (size, 256, 256))}


class EnlargingNet(nn.Module):
    """Residual blocks without norms, then pixels from channels (EDSR)."""

    def __init__(self, width: int = 64, blocks: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1))  # noqa: E501
                for _ in range(blocks)
            ]
        )  # fmt: skip
        self.tail = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.enlarge = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))
            ),
            nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, small: Tensor, large: Tensor) -> Tensor:  # noqa: D102
        seen = first = self.stem(small - 0.5)
        for block in self.blocks:
            seen = seen + 0.1 * block(seen)
        return functional.l1_loss(self.enlarge(first + self.tail(seen)) + 0.5, large)


class EnlargingJob(WrittenJob):
    """Super-resolution by a factor of four."""

    name, micro_batch, network = "super_resolution", 32, EnlargingNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images in two sizes."""
        return {"small": torch.rand(size, 3, 96, 96), "large": torch.rand(size, 3, 384, 384)}


class FlowField(nn.Module):
    """Motion between two images: all pairs of features, looked up again and again (RAFT)."""

    def __init__(self, width: int = 128, rounds: int = 8, radius: int = 4) -> None:
        super().__init__()
        self.rounds, self.radius, self.width = rounds, radius, width

        def encode(norm: type[nn.Module]) -> nn.Sequential:
            widths = (3, 64, 96, width)
            return nn.Sequential(
                *(
                    layer
                    for before, now in itertools.pairwise(widths)
                    for layer in (nn.Conv2d(before, now, 3, 2, 1), norm(now), nn.ReLU(), nn.Conv2d(now, now, 3, 1, 1), norm(now), nn.ReLU())  # noqa: E501
                ),
                nn.Conv2d(width, width, 1),
            )  # fmt: skip

        self.features, self.context = encode(nn.InstanceNorm2d), encode(nn.BatchNorm2d)
        self.motion = nn.Conv2d(3 * (2 * radius + 1) ** 2 + 2, 128, 3, padding=1)
        half = width // 2
        self.gates = nn.Conv2d(half + 128 + half, 2 * half, 3, padding=1)
        self.candidate = nn.Conv2d(half + 128 + half, half, 3, padding=1)
        self.head = nn.Sequential(
            nn.Conv2d(half, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 2, 3, padding=1)
        )

    def look_up(self, pyramid: list[Tensor], place: Tensor) -> Tensor:
        """Correlations around each place, on every scale."""
        size, _, height, width = place.shape
        reach = torch.linspace(-self.radius, self.radius, 2 * self.radius + 1, device=place.device)
        around = torch.stack(torch.meshgrid(reach, reach, indexing="ij"), -1)[None]
        seen = []
        for level, volume in enumerate(pyramid):
            centre = place.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) / 2**level
            rows, columns = volume.shape[-2:]
            scale = torch.tensor([columns - 1, rows - 1], device=place.device)
            grid = 2 * (centre + around) / scale - 1
            seen.append(
                functional.grid_sample(volume, grid, align_corners=True).view(size, height, width, -1)
            )
        return torch.cat(seen, -1).permute(0, 3, 1, 2)

    def forward(self, first: Tensor, second: Tensor, motion: Tensor) -> Tensor:  # noqa: D102
        one, other = self.features(torch.cat([first, second])).float().chunk(2)
        size, channels, height, width = one.shape
        volume = one.flatten(2).transpose(1, 2) @ other.flatten(2) / channels**0.5
        volume = volume.float().view(size * height * width, 1, height, width)
        pyramid = [volume, functional.avg_pool2d(volume, 2), functional.avg_pool2d(volume, 4)]
        state, context = self.context(first).chunk(2, 1)
        state, context = state.tanh(), context.relu()
        rows, columns = torch.meshgrid(
            *(torch.arange(count, device=first.device, dtype=torch.float) for count in (height, width)),
            indexing="ij",
        )
        start = torch.stack([columns, rows])[None].expand(size, -1, -1, -1)
        place, loss = start, torch.zeros((), device=first.device)
        for number in range(self.rounds):
            place = place.detach()
            seen = self.look_up(pyramid, place)
            moved = functional.relu(self.motion(torch.cat([seen, place - start], 1)))
            update, reset = self.gates(torch.cat([state, context, moved], 1)).sigmoid().chunk(2, 1)
            new = self.candidate(torch.cat([reset * state, context, moved], 1)).tanh()
            state = (1 - update) * state + update * new
            place = place + self.head(state).float()
            large = functional.interpolate(8 * (place - start), scale_factor=8, mode="bilinear")
            loss = loss + 0.8 ** (self.rounds - 1 - number) * (large - motion).abs().mean()
        return loss


class FlowFieldJob(WrittenJob):
    """Optical flow, as RAFT."""

    name, micro_batch, network = "optical_flow", 4, FlowField

    def batch(self, size: int) -> dict[str, Tensor]:
        """Pairs of images and the motion of each pixel."""
        image = torch.rand(2, size, 3, 256, 384)
        return {"first": image[0], "second": image[1], "motion": torch.randn(size, 2, 256, 384)}


# ---------------------------------------------------------------------------------------------- sound


class VocoderBlock(nn.Module):
    """Dilated convolutions of one width, with weight norms."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                weight_norm(
                    nn.Conv1d(width, width, kernel, dilation=reach, padding=reach * (kernel - 1) // 2)
                )
                for reach in (1, 3, 5)
            ]
        )

    def forward(self, sound: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            sound = sound + layer(functional.leaky_relu(sound, 0.1))
        return sound


class VocoderNet(nn.Module):
    """Spectra to sound by transposed convolutions (HiFi-GAN's generator)."""

    def __init__(self, width: int = 256, rates: Iterable[int] = (8, 8, 4)) -> None:
        super().__init__()
        self.stem = weight_norm(nn.Conv1d(80, width, 7, padding=3))
        self.rise, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            rising = nn.ConvTranspose1d(width, width // 2, 2 * rate, rate, rate // 2)
            self.rise.append(weight_norm(rising))
            width //= 2
            self.blocks.append(nn.ModuleList([VocoderBlock(width, kernel) for kernel in (3, 7, 11)]))
        self.head = weight_norm(nn.Conv1d(width, 1, 7, padding=3))

    def forward(self, spectrum: Tensor, sound: Tensor) -> Tensor:  # noqa: D102
        seen = self.stem(spectrum)
        for rise, blocks in zip(self.rise, self.blocks, strict=True):
            seen = rise(functional.leaky_relu(seen, 0.1))
            seen = torch.stack([block(seen) for block in blocks]).mean(0)  # type: ignore[attr-defined]
        made = self.head(functional.leaky_relu(seen)).tanh().squeeze(1).float()
        window = torch.hann_window(1024, device=sound.device)
        spectra = [
            torch.stft(wave, 1024, 256, window=window, return_complex=True).abs() for wave in (made, sound)
        ]
        return functional.l1_loss(spectra[0], spectra[1])


class VocoderJob(WrittenJob):
    """The generator of a vocoder."""

    name, micro_batch, network = "vocoder", 16, VocoderNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Spectra of 64 steps and their sound."""
        return {"spectrum": torch.randn(size, 80, 64), "sound": torch.randn(size, 64 * 256)}


class SeparationBlock(nn.Module):
    """A depthwise dilated convolution between two of one step."""

    def __init__(self, width: int, hidden: int, reach: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(width, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden, eps=1e-8),
            nn.Conv1d(hidden, hidden, 3, padding=reach, dilation=reach, groups=hidden), nn.PReLU(),
            nn.GroupNorm(1, hidden, eps=1e-8),
        )  # fmt: skip
        self.stay, self.skip = nn.Conv1d(hidden, width, 1), nn.Conv1d(hidden, width, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        hidden = self.layers(seen)
        return seen + self.stay(hidden), self.skip(hidden)


class SeparationNet(nn.Module):
    """Voices of a mixture by masks over a learned basis (Conv-TasNet)."""

    def __init__(self, basis: int = 512, width: int = 128, hidden: int = 512, voices: int = 2) -> None:
        super().__init__()
        self.voices, self.basis = voices, basis
        self.encoder = nn.Conv1d(1, basis, 16, 8, bias=False)
        self.norm, self.narrow = nn.GroupNorm(1, basis, eps=1e-8), nn.Conv1d(basis, width, 1)
        self.blocks = nn.ModuleList([SeparationBlock(width, hidden, 2 ** (n % 8)) for n in range(24)])
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(width, voices * basis, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(basis, 1, 16, 8, bias=False)

    def forward(self, mixture: Tensor, parts: Tensor) -> Tensor:  # noqa: D102
        spectrum = functional.relu(self.encoder(mixture[:, None]))
        seen = self.narrow(self.norm(spectrum))
        total = torch.zeros_like(seen)
        for block in self.blocks:
            seen, skip = block(seen)
            total = total + skip
        masks = self.masks(total).unflatten(1, (self.voices, self.basis))
        made = self.decoder((masks * spectrum[:, None]).flatten(0, 1)).float()
        made = made.view(parts.shape)
        parts = parts - parts.mean(-1, keepdim=True)
        made = made - made.mean(-1, keepdim=True)
        scale = (made * parts).sum(-1, keepdim=True) / (parts.square().sum(-1, keepdim=True) + 1e-8)
        true = scale * parts
        ratio = true.square().sum(-1) / ((made - true).square().sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()


class SeparationJob(WrittenJob):
    """Separation of voices, as Conv-TasNet."""

    name, micro_batch, network = "source_separation", 8, SeparationNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """Three seconds at 8 kHz."""
        parts = torch.randn(size, 2, 24_000)
        return {"mixture": parts.sum(1), "parts": parts}


# ---------------------------------------------------------------------------------------------- others


class PairBlock(nn.Module):
    """Rows of related sequences and pairs of positions inform each other (Evoformer)."""

    def __init__(self, width: int = 128, pair: int = 128, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.row_norm, self.pair_norm = nn.LayerNorm(width), nn.LayerNorm(pair)
        self.inward, self.bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(pair, heads, bias=False)
        self.gate, self.outward = nn.Linear(width, width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.outer_norm = nn.LayerNorm(width)
        self.left, self.right = nn.Linear(width, 32), nn.Linear(width, 32)
        self.outer = nn.Linear(32 * 32, pair)
        self.triangle_norm, self.triangle_last = nn.LayerNorm(pair), nn.LayerNorm(pair)
        self.sides, self.openings = nn.Linear(pair, 2 * pair), nn.Linear(pair, 2 * pair)
        self.triangle_gate, self.triangle_out = nn.Linear(pair, pair), nn.Linear(pair, pair)
        self.pair_wide = nn.Sequential(
            nn.LayerNorm(pair), nn.Linear(pair, 4 * pair), nn.ReLU(), nn.Linear(4 * pair, pair)
        )

    def forward(self, rows: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        seen = self.row_norm(rows)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.inward(seen).chunk(3, -1))
        score = torch.einsum("bsihd,bsjhd->bshij", query, key) / query.shape[-1] ** 0.5
        score = score + self.bias(self.pair_norm(pairs)).permute(0, 3, 1, 2)[:, None]
        mixed = torch.einsum("bshij,bsjhd->bsihd", score.softmax(-1).to(value.dtype), value).flatten(-2)
        rows = rows + self.outward(mixed * self.gate(seen).sigmoid())
        rows = rows + self.wide(rows)
        seen = self.outer_norm(rows)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(seen), self.right(seen)) / rows.shape[1]
        pairs = pairs + self.outer(outer.flatten(-2))
        seen = self.triangle_norm(pairs)
        left, right = (self.sides(seen) * self.openings(seen).sigmoid()).chunk(2, -1)
        closed = self.triangle_last(torch.einsum("bikc,bjkc->bijc", left, right))
        pairs = pairs + self.triangle_out(closed) * self.triangle_gate(seen).sigmoid()
        return rows, pairs + self.pair_wide(pairs)


class FoldingNet(nn.Module):
    """Distances between residues from aligned sequences."""

    def __init__(self, width: int = 128, blocks: int = 4, bins: int = 64) -> None:
        super().__init__()
        self.letters, self.apart = nn.Embedding(23, width), nn.Embedding(65, width)
        self.blocks = nn.ModuleList([PairBlock(width, width) for _ in range(blocks)])
        self.head = nn.Linear(width, bins)

    def forward(self, aligned: Tensor, distance: Tensor) -> Tensor:  # noqa: D102
        place = torch.arange(aligned.shape[-1], device=aligned.device)
        apart = (place[:, None] - place).clamp(-32, 32) + 32
        rows, pairs = self.letters(aligned), self.apart(apart)[None].expand(len(aligned), -1, -1, -1)
        for block in self.blocks:
            rows, pairs = block(rows, pairs)
        logits = self.head(pairs + pairs.transpose(1, 2))
        return functional.cross_entropy(logits.flatten(0, -2).float(), distance.flatten())


class FoldingJob(WrittenJob):
    """Pairs of residues of proteins, as the Evoformer of AlphaFold 2."""

    name, micro_batch, network = "protein_pairs", 2, FoldingNet

    def batch(self, size: int) -> dict[str, Tensor]:
        """64 aligned sequences of 192 residues."""
        return {
            "aligned": torch.randint(23, (size, 64, 192)),
            "distance": torch.randint(64, (size, 192, 192)),
        }


class AttendingDecoder(nn.Module):
    """An LSTM that reads, and one that writes word by word with additive attention."""

    def __init__(self, words: int = 16_000, width: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.reader = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.keys, self.query, self.score = (
            nn.Linear(2 * width, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.writer = nn.LSTMCell(3 * width, width)
        self.head = nn.Linear(3 * width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        memory, _ = self.reader(self.source(source))
        keys, words = self.keys(memory), self.target(target)
        state = memory.new_zeros(2, len(source), keys.shape[-1]).unbind(0)
        outs = []
        for step in range(target.shape[1] - 1):
            score = self.score(torch.tanh(keys + self.query(state[0])[:, None]))
            context = (score.softmax(1).to(memory.dtype) * memory).sum(1)
            state = self.writer(torch.cat([words[:, step], context], -1), state)
            outs.append(torch.cat([state[0], context], -1))
        logits = self.head(torch.stack(outs, 1))
        return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


class AttendingJob(WrittenJob):
    """Translation by recurrent networks with attention."""

    name, micro_batch, network = "recurrent_translation", 64, AttendingDecoder

    def batch(self, size: int) -> dict[str, Tensor]:
        """Sentences of 40 words."""
        return {"source": torch.randint(16_000, (size, 40)), "target": torch.randint(16_000, (size, 40))}


class PolicyNet(nn.Module):
    """Actions and values of small observations, with the clipped loss of PPO."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()

        def perceptron(out: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)
            )

        self.actor, self.critic = perceptron(8), perceptron(1)
        self.spread = nn.Parameter(torch.zeros(8))

    def forward(  # noqa: D102
        self, seen: Tensor, action: Tensor, before: Tensor, gain: Tensor, reward: Tensor
    ) -> Tensor:
        policy: Any = torch.distributions.Normal(self.actor(seen).float(), self.spread.exp())
        now = policy.log_prob(action).sum(-1)
        ratio = (now - before).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        value_loss = functional.mse_loss(self.critic(seen).squeeze(-1).float(), reward)
        loss: Tensor = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().sum(-1).mean()
        return loss


class PolicyJob(WrittenJob):
    """Reinforcement learning: a small policy and its critic."""

    name, micro_batch, network = "actor_critic", 4096, PolicyNet
    global_batch = 8192

    def batch(self, size: int) -> dict[str, Tensor]:
        """Steps of a simulation."""
        numbers = torch.randn(3, size)
        return {
            "seen": torch.randn(size, 64), "action": torch.randn(size, 8),
            "before": numbers[0] - 11, "gain": numbers[1], "reward": numbers[2],
        }  # fmt: skip


class TableTransformer(nn.Module):
    """Every column of a table is a token (FT-Transformer)."""

    def __init__(self, numbers: int = 60, categories: int = 40, width: int = 192, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(numbers, width) * 0.02)
        self.shift = nn.Parameter(torch.zeros(numbers, width))
        self.tables = nn.ModuleList([nn.Embedding(100, width) for _ in range(categories)])
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 8, 256, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, categories: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        known = torch.stack(
            [table(column) for table, column in zip(self.tables, categories.unbind(1), strict=True)], 1
        )
        tokens = torch.cat(
            [self.first.expand(len(numbers), -1, -1), numbers[..., None] * self.scale + self.shift, known], 1
        )
        logits = self.head(self.layers(tokens)[:, 0]).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits.float(), label)


class TableJob(WrittenJob):
    """A transformer over the columns of a table."""

    name, micro_batch, network = "table_transformer", 1024, TableTransformer
    global_batch = 2048

    def batch(self, size: int) -> dict[str, Tensor]:
        """Numbers and categories of rows."""
        return {
            "numbers": torch.randn(size, 60), "categories": torch.randint(100, (size, 40)),
            "label": torch.randint(2, (size,)).float(),
        }  # fmt: skip
