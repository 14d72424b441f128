"""Jobs of further kinds for bench/zoo.py, each written for one blind check of the step time.

They were written after the rules of the step time, predicted before their first step ran, and timed then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from bench.zoo_models import WrittenJob
else:
    # zoo.py has loaded it under this name.
    from trimtab_zoo_models import WrittenJob


# ------------------------------------------------------------------------------------------------ language


class RecurrentGate(nn.Module):
    """A gated linear recurrence in chunks (minimal GRU style), with a feed-forward layer."""

    def __init__(self, width: int, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.inward = nn.Linear(width, 3 * width, bias=False)
        self.outward = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        value, decay, gate = self.inward(self.norms[0](x)).chunk(3, -1)
        pace: Any = functional.logsigmoid(decay.float())
        rows = pace.unflatten(1, (-1, self.chunk)).cumsum(2)
        value = value.float().unflatten(1, (-1, self.chunk))
        inside = torch.exp(rows) * torch.cumsum(value * torch.exp(-rows.clamp(min=-20)), 2)
        carried = torch.cumsum(inside[:, :, -1], 1).roll(1, 1)[:, :, None]
        mixed = (inside + torch.exp(rows) * carried).flatten(1, 2).to(x.dtype)
        x = x + self.outward(mixed * functional.silu(gate))
        updated: Tensor = x + self.down(functional.relu(self.up(self.norms[1](x))).square())
        return updated


class RecurrentLanguageModel(nn.Module):
    """A language model without attention."""

    def __init__(self, width: int = 1024, layers: int = 16, words: int = 32_768) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([RecurrentGate(width, 64) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class RecurrentLanguageJob(WrittenJob):
    """A language model of linear recurrences."""

    name, micro_batch, network = "linear_recurrence", 8, RecurrentLanguageModel
    global_batch = 16

    def batch(self, size: int) -> dict[str, Tensor]:
        """Text."""
        return {"tokens": torch.randint(32_768, (size, 1024))}


class LatentReader(nn.Module):
    """A few latent vectors that attend to a long input, then to each other (Perceiver)."""

    def __init__(self, width: int = 512, latents: int = 256, layers: int = 8, words: int = 262) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Parameter(torch.randn(4096, width) * 0.02)
        self.latents = nn.Parameter(torch.randn(latents, width) * 0.02)
        self.read = nn.MultiheadAttention(width, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.write = nn.MultiheadAttention(width, 8, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, letters: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        seen = self.embed(letters) + self.place
        latents = self.latents.expand(len(letters), -1, -1)
        latents = latents + self.read(latents, seen, seen, need_weights=False)[0]
        latents = self.layers(latents)
        places = self.place.expand(len(letters), -1, -1)
        out = self.norm(self.write(places, latents, latents, need_weights=False)[0])
        return functional.cross_entropy(self.head(out).flatten(0, 1).float(), target.flatten())


class LatentReaderJob(WrittenJob):
    """Bytes of text through a few latent vectors."""

    name, micro_batch, network = "latent_reader", 16, LatentReader
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Bytes."""
        return {"letters": torch.randint(262, (size, 4096)), "target": torch.randint(262, (size, 4096))}


class TwoTowers(nn.Module):
    """Questions and passages whose vectors are compared in the batch (dense retrieval)."""

    def __init__(self, width: int = 384, layers: int = 6, words: int = 30_522) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width, padding_idx=0), nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def encode(self, tokens: Tensor) -> Tensor:
        """Return a unit vector for each text."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.embed(tokens) + self.place(place), src_key_padding_mask=tokens == 0)
        kept = (tokens != 0)[..., None]
        return functional.normalize((x * kept).sum(1) / kept.sum(1), dim=-1)

    def forward(self, question: Tensor, passage: Tensor) -> Tensor:  # noqa: D102
        scores = self.encode(question) @ self.encode(passage).T * self.scale.exp()
        target = torch.arange(len(scores), device=scores.device)
        return functional.cross_entropy(scores.float(), target)


class TwoTowersJob(WrittenJob):
    """Dense retrieval with negatives from the batch."""

    name, micro_batch, network = "two_towers", 256, TwoTowers
    global_batch = 512

    def batch(self, size: int) -> dict[str, Tensor]:
        """Texts of different lengths."""
        question, passage = torch.randint(1, 30_522, (size, 32)), torch.randint(1, 30_522, (size, 192))
        return {"question": question, "passage": passage}


# -------------------------------------------------------------------------------------------------- images


class ResidualUp(nn.Module):
    """A residual block with group norms."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, inward), nn.GroupNorm(32, outward)])
        self.first = nn.Conv2d(inward, outward, 3, padding=1)
        self.second = nn.Conv2d(outward, outward, 3, padding=1)
        self.skip = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.first(functional.silu(self.norms[0](x)))
        updated: Tensor = self.skip(x) + self.second(functional.silu(self.norms[1](y)))
        return updated


class ImageCompressor(nn.Module):
    """A variational autoencoder of images, as latent diffusion uses it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        down: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        up: list[nn.Module] = [nn.Conv2d(4, sizes[-1], 3, padding=1)]
        for before, after in zip([width, *sizes], sizes, strict=False):
            down += [ResidualUp(before, after), nn.Conv2d(after, after, 3, 2, 1)]
        for before, after in zip(sizes[::-1], [*sizes[-2::-1], width], strict=True):
            up += [nn.ConvTranspose2d(before, before, 4, 2, 1), ResidualUp(before, after)]
        self.encoder = nn.Sequential(*down, nn.Conv2d(sizes[-1], 8, 3, padding=1))
        self.decoder = nn.Sequential(*up, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        mean, spread = self.encoder(image).float().chunk(2, 1)
        spread = spread.clamp(-30, 20)
        drawn = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).mean()
        loss: Tensor = functional.l1_loss(self.decoder(drawn).float(), image) + 1e-6 * divergence
        return loss


class ImageCompressorJob(WrittenJob):
    """A variational autoencoder."""

    name, micro_batch, network = "image_compressor", 16, ImageCompressor
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.rand(size, 3, 256, 256)}


class GatedMixer(nn.Module):
    """A layer of multi-layer perceptrons over patches and over channels (MLP-Mixer)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.patches = nn.Sequential(nn.Linear(patches, 384), nn.GELU(), nn.Linear(384, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        updated: Tensor = x + self.channels(self.norms[1](x))
        return updated


class PatchMixer(nn.Module):
    """Images without convolutions or attention."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.Sequential(*(GatedMixer(196, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        x = self.layers(self.stem(image).flatten(2).transpose(1, 2))
        return functional.cross_entropy(self.head(self.norm(x).mean(1)).float(), label, label_smoothing=0.1)


class PatchMixerJob(WrittenJob):
    """MLP-Mixer."""

    name, micro_batch, network = "patch_mixer", 128, PatchMixer
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images with labels."""
        return {"image": torch.rand(size, 3, 224, 224), "label": torch.randint(1000, (size,))}


class DenseBlock(nn.Module):
    """Layers that each see all earlier ones (DenseNet)."""

    def __init__(self, inward: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.BatchNorm2d(inward + number * growth), nn.ReLU(),
                    nn.Conv2d(inward + number * growth, 4 * growth, 1, bias=False),
                    nn.BatchNorm2d(4 * growth), nn.ReLU(),
                    nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                )
                for number in range(layers)
            ]
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class DenseClassifier(nn.Module):
    """DenseNet-121."""

    def __init__(self, growth: int = 32) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        width = 64
        for number, layers in enumerate((6, 12, 24, 16)):
            parts.append(DenseBlock(width, growth, layers))
            width += layers * growth
            if number < 3:  # noqa: PLR2004 - the last block has no transition
                parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False)]
                parts.append(nn.AvgPool2d(2))
                width //= 2
        self.parts = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        return functional.cross_entropy(self.head(self.parts(image).mean((2, 3))).float(), label)


class DenseClassifierJob(WrittenJob):
    """DenseNet."""

    name, micro_batch, network = "dense_classifier", 64, DenseClassifier
    global_batch = 128

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images with labels."""
        return {"image": torch.rand(size, 3, 224, 224), "label": torch.randint(1000, (size,))}


# ----------------------------------------------------------------------------------- graphs and science


class MessageLayer(nn.Module):
    """Messages along edges, summed at nodes, with a recurrent update (MPNN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.update, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        sent = self.message(torch.cat([nodes[source], nodes[target], edges], -1))
        received = torch.zeros_like(nodes, dtype=sent.dtype).index_add(0, target, sent)
        updated: Tensor = self.norm(self.update(received, nodes))
        return updated


class MoleculeModel(nn.Module):
    """A property of molecules from their atoms and bonds."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(100, width), nn.Linear(16, width)
        self.layers = nn.ModuleList([MessageLayer(width) for _ in range(layers)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, atom: Tensor, bond: Tensor, source: Tensor, target: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        size, count = atom.shape
        shift = torch.arange(size, device=atom.device)[:, None] * count
        nodes, edges = self.atoms(atom.flatten()), self.bonds(bond.flatten(0, 1))
        source, target = (source + shift).flatten(), (target + shift).flatten()
        for layer in self.layers:
            nodes = layer(nodes, edges, source, target)
        guessed = self.head(nodes.unflatten(0, (size, count)).sum(1)).squeeze(-1)
        return functional.smooth_l1_loss(guessed.float(), value)


class MoleculeJob(WrittenJob):
    """Message passing over molecules."""

    name, micro_batch, network = "molecule", 512, MoleculeModel
    global_batch = 1024

    def batch(self, size: int) -> dict[str, Tensor]:
        """Molecules of 32 atoms and 128 directed bonds."""
        return {
            "atom": torch.randint(100, (size, 32)), "bond": torch.randn(size, 128, 16),
            "source": torch.randint(32, (size, 128)), "target": torch.randint(32, (size, 128)),
            "value": torch.randn(size),
        }  # fmt: skip


class SpectralLayer(nn.Module):
    """A convolution by FFT with weights for the lowest frequencies (Fourier neural operator)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        with torch.autocast("cuda", enabled=False):
            waves = torch.fft.rfft2(x.float())
            weight = torch.view_as_complex(self.weight.float())
            mixed = torch.zeros_like(waves)
            low = slice(self.modes)
            mixed[:, :, low, low] = torch.einsum("bixy,ioxy->boxy", waves[:, :, low, low], weight[0])
            high = slice(-self.modes, None)
            mixed[:, :, high, low] = torch.einsum("bixy,ioxy->boxy", waves[:, :, high, low], weight[1])
            seen = torch.fft.irfft2(mixed, s=x.shape[-2:])
        return functional.gelu(seen + self.local(x))


class FlowOperator(nn.Module):
    """The next state of a field from its last ones."""

    def __init__(self, width: int = 32, modes: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.inward, self.outward = nn.Conv2d(12, width, 1), nn.Conv2d(width, 1, 1)
        self.layers = nn.Sequential(*(SpectralLayer(width, modes) for _ in range(layers)))

    def forward(self, field: Tensor, after: Tensor) -> Tensor:  # noqa: D102
        return functional.mse_loss(self.outward(self.layers(self.inward(field))).float(), after)


class FlowOperatorJob(WrittenJob):
    """A Fourier neural operator."""

    name, micro_batch, network = "flow_operator", 32, FlowOperator
    global_batch = 64

    def batch(self, size: int) -> dict[str, Tensor]:
        """Fields on a grid."""
        return {"field": torch.randn(size, 12, 128, 128), "after": torch.randn(size, 1, 128, 128)}


class SequentialRecommender(nn.Module):
    """The next item of a customer: causal attention over a history, scored against all items (SASRec)."""

    def __init__(self, items: int = 60_000, width: int = 128, length: int = 200, layers: int = 4) -> None:
        super().__init__()
        self.items, self.place = nn.Embedding(items, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.2, "relu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, history: Tensor, following: Tensor) -> Tensor:  # noqa: D102
        place = torch.arange(history.shape[1], device=history.device)
        mask: Any = self.mask
        x = self.layers(self.items(history) + self.place(place), mask=mask, is_causal=True)
        scores = x[:, -32:] @ self.items.weight.to(x.dtype).T
        return functional.cross_entropy(scores.flatten(0, 1).float(), following.flatten())


class SequentialRecommenderJob(WrittenJob):
    """Sequential recommendation."""

    name, micro_batch, network = "sequential_recommender", 128, SequentialRecommender
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Histories of items."""
        return {"history": torch.randint(60_000, (size, 200)), "following": torch.randint(60_000, (size, 32))}
