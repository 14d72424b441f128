"""Ten more jobs of 2026 for bench/zoo.py, written to check predictions: none of them has led to a rule.

Each has published widths, or those of a small published variant, and a batch that people use on one GPU.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from bench.zoo_models import WrittenJob
    from bench.zoo_newest import QWEN_WORDS, GatedPerceptron, import_transformers, pad_texts
else:
    # zoo.py has loaded them under these names.
    from trimtab_zoo_models import WrittenJob
    from trimtab_zoo_newest import QWEN_WORDS, GatedPerceptron, import_transformers, pad_texts


def encode_sine(position: Tensor, width: int) -> Tensor:
    """Return sines and cosines of each position, at rates from 1 to 1/10,000."""
    half = width // 2
    rates = torch.exp(-math.log(10_000.0) * torch.arange(half, device=position.device) / half)
    angle = position[..., None].float() * rates
    return torch.cat([angle.cos(), angle.sin()], -1)


def split_heads(merged: Tensor, heads: int) -> Tensor:
    """Return (batch, heads, tokens, width of a head) of (batch, tokens, width)."""
    return merged.unflatten(-1, (heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]


def merge_heads(heads: Tensor) -> Tensor:
    """Return (batch, tokens, width) of (batch, heads, tokens, width of a head)."""
    return heads.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention of tokens to each other, or to those of a context."""

    def __init__(self, width: int, heads: int, *, context: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(context or width, 2 * width, bias=bias)
        self.outward = nn.Linear(width, width, bias=bias)

    def forward(  # noqa: D102
        self, seen: Tensor, context: Tensor | None = None, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        key, value = self.key_value(seen if context is None else context).chunk(2, -1)
        query, key, value = (split_heads(part, self.heads) for part in (self.query(seen), key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        out: Tensor = self.outward(merge_heads(mixed))
        return out


def build_perceptron(width: int, hidden: int, dropout: float = 0.0) -> nn.Sequential:
    """Return the feed-forward layer of a transformer."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width)
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- sound


class CodecBlock(nn.Module):
    """A decoder block that also attends to a description."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.attend = Attention(width, heads, bias=False)
        self.cross = Attention(width, heads, bias=False)
        self.wide = build_perceptron(width, 4 * width, 0.1)

    def forward(self, seen: Tensor, text: Tensor) -> Tensor:  # noqa: D102
        seen = seen + self.attend(self.norms[0](seen), causal=True)
        seen = seen + self.cross(self.norms[1](seen), text)
        updated: Tensor = seen + self.wide(self.norms[2](seen))
        return updated


class CodecLanguageModel(nn.Module):
    """Four codebooks of a sound codec, each a frame later than the one before (MusicGen small)."""

    def __init__(self, width: int = 1024, layers: int = 24, words: int = 2048, books: int = 4) -> None:
        super().__init__()
        self.words, self.width = words, width
        self.embeds = nn.ModuleList([nn.Embedding(words + 1, width) for _ in range(books)])
        self.text = nn.Linear(768, width)
        self.blocks = nn.ModuleList([CodecBlock(width, 16) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleList([nn.Linear(width, words, bias=False) for _ in range(books)])

    def delay(self, codes: Tensor) -> Tensor:
        """Shift codebook k by k + 1 frames; empty frames have a word of their own."""
        size, books, length = codes.shape
        shifted = codes.new_full((size, books, length + books), self.words)
        for book in range(books):
            shifted[:, book, book + 1 : book + 1 + length] = codes[:, book]
        return shifted

    def forward(self, codes: Tensor, text: Tensor) -> Tensor:  # noqa: D102
        shifted = self.delay(codes)
        before, target = shifted[..., :-1], shifted[..., 1:]
        place = encode_sine(torch.arange(before.shape[-1], device=codes.device), self.width)
        seen = sum(embed(before[:, book]) for book, embed in enumerate(self.embeds)) + place
        # A tenth of the sounds is trained without a description, for guidance.
        stays = torch.rand(len(text), 1, 1, device=text.device) > 0.1  # noqa: PLR2004
        described = self.text(text) * stays
        for block in self.blocks:
            seen = block(seen, described)
        seen = self.norm(seen)
        losses = [
            functional.cross_entropy(
                head(seen).float().flatten(0, 1), target[:, book].flatten(), ignore_index=self.words
            )
            for book, head in enumerate(self.heads)
        ]
        return torch.stack(losses).mean()


class CodecLanguageJob(WrittenJob):
    """Music from a description, as tokens of a codec."""

    name, micro_batch, network = "codec_language", 16, CodecLanguageModel
    global_batch = 64

    def batch(self, size: int) -> dict[str, Tensor]:
        """Fifteen seconds at 50 frames a second, and encoded descriptions."""
        return {"codes": torch.randint(2048, (size, 4, 750)), "text": torch.randn(size, 48, 768)}


class ConformerBlock(nn.Module):
    """Two half feed-forward layers around attention and a depthwise convolution."""

    def __init__(self, width: int, heads: int, kernel: int = 9) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1),
            nn.Linear(4 * width, width), nn.Dropout(0.1),
        )  # fmt: skip
        self.second = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1),
            nn.Linear(4 * width, width), nn.Dropout(0.1),
        )  # fmt: skip
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.attend = Attention(width, heads)
        self.pointwise = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Sequential(
            nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width), nn.BatchNorm1d(width),
            nn.SiLU(), nn.Conv1d(width, width, 1), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, seen: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        seen = seen + 0.5 * self.first(seen)
        seen = seen + self.attend(self.norms[0](seen), mask=mask[:, None, None])
        local = functional.glu(self.pointwise(self.norms[1](seen).transpose(1, 2)), 1)
        seen = seen + self.depthwise(local * mask[:, None]).transpose(1, 2)
        seen = seen + 0.5 * self.second(seen)
        out: Tensor = self.norms[2](seen)
        return out


def score_alignments(blank: Tensor, emit: Tensor, frames: Tensor, words: Tensor) -> Tensor:
    """Return the log-probability of each text, over all its alignments (RNN-T).

    A row of the lattice is a recurrence over frames, so it is one logcumsumexp.
    """
    waited = functional.pad(blank.cumsum(1)[:, :-1], (0, 0, 1, 0))
    rows = [waited[..., 0]]
    for word in range(emit.shape[-1]):
        entered = rows[-1] + emit[..., word] - waited[..., word + 1]
        rows.append(waited[..., word + 1] + torch.logcumsumexp(entered, 1))
    ends = torch.stack(rows, -1) + blank
    last = ends.gather(1, (frames - 1)[:, None, None].expand(-1, 1, ends.shape[-1])).squeeze(1)
    return last.gather(1, words[:, None]).squeeze(1)


class SpeechTransducer(nn.Module):
    """A conformer, a recurrent network over the text so far, and a network that joins the two."""

    def __init__(self, width: int = 512, layers: int = 17, joint: int = 640, words: int = 1024) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv2d(1, 256, 3, 2, 1), nn.ReLU(), nn.Conv2d(256, 256, 3, 2, 1, groups=256),
            nn.Conv2d(256, 256, 1), nn.ReLU(), nn.Conv2d(256, 256, 3, 2, 1, groups=256),
            nn.Conv2d(256, 256, 1), nn.ReLU(),
        )  # fmt: skip
        self.inward = nn.Linear(256 * 10, width)
        self.blocks = nn.ModuleList([ConformerBlock(width, 8) for _ in range(layers)])
        self.embed = nn.Embedding(words + 1, joint)
        self.recurrent = nn.LSTM(joint, joint, batch_first=True)
        self.sound, self.text = nn.Linear(width, joint), nn.Linear(joint, joint)
        self.join = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(joint, words + 1))

    def forward(self, sound: Tensor, frames: Tensor, text: Tensor, words: Tensor) -> Tensor:  # noqa: D102
        seen = self.inward(self.shrink(sound[:, None]).transpose(1, 2).flatten(2))
        frames = (frames + 7) // 8
        mask = torch.arange(seen.shape[1], device=sound.device) < frames[:, None]
        for block in self.blocks:
            seen = block(seen, mask)
        # The first word, 0, is also that of a blank.
        said, _ = self.recurrent(self.embed(functional.pad(text, (1, 0))))
        logits = self.join(self.sound(seen)[:, :, None] + self.text(said)[:, None])
        each = logits.float().log_softmax(-1)
        chosen = text[:, None, :, None].expand(-1, each.shape[1], -1, -1)
        emit = each[:, :, :-1].gather(-1, chosen).squeeze(-1)
        return -(score_alignments(each[..., 0], emit, frames, words) / words).mean()


class SpeechTransducerJob(WrittenJob):
    """Speech recognition by a transducer."""

    name, micro_batch, network = "speech_transducer", 32, SpeechTransducer
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Up to twelve seconds of speech with up to 48 words."""
        frames, words = torch.randint(600, 1201, (size,)), torch.randint(24, 49, (size,))
        frames[0], words[0] = 1200, 48
        return {
            "sound": torch.randn(size, 1200, 80), "frames": frames,
            "text": torch.randint(1, 1025, (size, 48)), "words": words,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------ text


class RewardModel(nn.Module):
    """A decoder, all of it in bf16, that gives a number to each answer (Bradley-Terry)."""

    def __init__(self, width: int = 2048, layers: int = 12) -> None:
        super().__init__()
        transformers = import_transformers()
        config = transformers.Qwen3Config(
            vocab_size=QWEN_WORDS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, use_cache=False, num_labels=1,
            pad_token_id=0,
        )  # fmt: skip
        self.decoder = transformers.Qwen3ForSequenceClassification(config).to(torch.bfloat16)
        self.decoder.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids: Tensor, mask: Tensor, margin: Tensor) -> Tensor:  # noqa: D102
        # Chosen answers come first, then the rejected ones.
        flat = ids.transpose(0, 1).flatten(0, 1), mask.transpose(0, 1).flatten(0, 1)
        rewards = self.decoder(input_ids=flat[0], attention_mask=flat[1]).logits.float().squeeze(-1)
        chosen, rejected = rewards.chunk(2)
        ranked = -functional.logsigmoid(chosen - rejected - margin).mean()
        loss: Tensor = ranked + 0.01 * (chosen + rejected).square().mean()
        return loss


class RewardJob(WrittenJob):
    """A reward model from pairs of answers."""

    name, micro_batch, network = "reward_model", 6, RewardModel
    global_batch = 48

    def batch(self, size: int) -> dict[str, Tensor]:
        """Pairs of a chosen and a rejected conversation, padded."""
        ids, mask = pad_texts(QWEN_WORDS, 2 * size, 1024)
        return {
            "ids": (ids * mask).view(size, 2, -1), "mask": mask.view(size, 2, -1), "margin": torch.rand(size),
        }  # fmt: skip


def rotate_at(heads: Tensor, position: Tensor) -> Tensor:
    """Rotary positions for (batch, heads, tokens, width) at positions (batch, tokens)."""
    half = heads.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=heads.device) / half)
    angle = position[:, None, :, None] * rates
    cosine, sine = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    left, right = heads.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


class QueryBlock(nn.Module):
    """A decoder block with one key and value for all heads, and normalized queries and keys."""

    def __init__(self, width: int, head: int = 128) -> None:
        super().__init__()
        self.heads, self.head = width // head, head
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.inward = nn.Linear(width, width + 2 * head, bias=False)
        self.outward = nn.Linear(width, width, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(head), nn.RMSNorm(head)
        self.wide = GatedPerceptron(width, 2816)

    def forward(self, seen: Tensor, position: Tensor) -> Tensor:
        """Return what the block adds to its input."""
        mixed = split_heads(self.inward(self.norms[0](seen)), self.heads + 2)
        query, key, value = mixed.split((self.heads, 1, 1), 1)  # type: ignore[no-untyped-call]
        query = rotate_at(self.query_norm(query), position).to(value.dtype)
        key = rotate_at(self.key_norm(key), position).to(value.dtype)
        attended = functional.scaled_dot_product_attention(
            query, key.expand_as(query), value.expand_as(query), is_causal=True
        )
        change = self.outward(merge_heads(attended))
        added: Tensor = change + self.wide(self.norms[1](seen + change))
        return added


class MixtureOfDepths(nn.Module):
    """A decoder in which every second block sees only the eighth of the tokens that it chooses."""

    def __init__(
        self, width: int = 1024, layers: int = 20, words: int = 50_304, share: float = 0.125
    ) -> None:
        super().__init__()
        self.share = share
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([QueryBlock(width) for _ in range(layers)])
        self.routers = nn.ModuleList([nn.Linear(width, 1, bias=False) for _ in range(layers // 2)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def route(self, seen: Tensor, position: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Update the chosen tokens; the second is a loss that lets a router do without later tokens."""
        score = self.routers[number // 2](seen).squeeze(-1).float()
        _, chosen = score.topk(int(self.share * seen.shape[1]), sorted=False)
        chosen = chosen.sort(-1).values
        index = chosen[..., None].expand(-1, -1, seen.shape[-1])
        added = self.blocks[number](seen.gather(1, index), position.gather(1, chosen))
        weight = score.gather(1, chosen).sigmoid()[..., None]
        target = torch.zeros_like(score).scatter_(1, chosen, 1.0)
        routing = functional.binary_cross_entropy_with_logits(score, target)
        return seen.scatter_add(1, index, (weight * added).to(seen.dtype)), routing

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        seen, routings = self.embed(tokens), []
        for number, block in enumerate(self.blocks):
            if number % 2:
                seen, routing = self.route(seen, position, number)
                routings.append(routing)
            else:
                seen = seen + block(seen, position)
        # The head is capped, and its largest logits are held down.
        logits = 15 * torch.tanh(self.head(self.norm(seen))[:, :-1].float() / 15)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 1e-4 * logits.logsumexp(-1).square().mean() + 0.01 * torch.stack(routings).mean()


class MixtureOfDepthsJob(WrittenJob):
    """A decoder with a mixture of depths, one key and value for all heads, and capped logits."""

    name, micro_batch, network = "mixture_of_depths", 8, MixtureOfDepths
    global_batch = 64

    def batch(self, size: int) -> dict[str, Tensor]:
        """Text."""
        return {"tokens": torch.randint(50_304, (size, 2048))}


# ---------------------------------------------------------------------------------------------- images


class FactorizedBlock(nn.Module):
    """Attention within a frame or along time, shifted and scaled by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)]
        )
        self.attend = Attention(width, heads)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, seen: Tensor, condition: Tensor) -> Tensor:  # noqa: D102
        changes = self.condition(condition)[:, None].chunk(6, -1)
        attended = self.attend(self.norms[0](seen) * (1 + changes[0]) + changes[1])
        seen = seen + changes[2] * attended
        wide = self.wide(self.norms[1](seen) * (1 + changes[3]) + changes[4])
        updated: Tensor = seen + changes[5] * wide
        return updated


class VideoTransformer(nn.Module):
    """Noise and latents of a video on a straight line, with attention over space and time in turn (Latte)."""

    def __init__(self, width: int = 1024, layers: int = 24, channels: int = 4, classes: int = 101) -> None:
        super().__init__()
        self.width = width
        self.patch = nn.Conv2d(channels, width, 2, 2)
        self.place = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList([FactorizedBlock(width, 16) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.shift = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, 4 * channels)

    def forward(self, video: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        size, frames = video.shape[:2]
        time = torch.randn(size, device=video.device).sigmoid()
        noise, level = torch.randn_like(video), time[:, None, None, None, None]
        noisy = (1 - level) * video + level * noise
        label = torch.where(torch.rand(size, device=label.device) < 0.1, 101, label)  # noqa: PLR2004
        condition = self.time(encode_sine(1000 * time, 256)) + self.label(label)
        seen = self.patch(noisy.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        steps = encode_sine(torch.arange(frames, device=video.device), self.width)
        patches = seen.shape[1]
        for number, block in enumerate(self.blocks):
            if number % 2:
                seen = seen.unflatten(0, (size, frames)).transpose(1, 2).flatten(0, 1)
                seen = seen + steps if number == 1 else seen
                seen = block(seen, condition.repeat_interleave(patches, 0))
                seen = seen.unflatten(0, (size, patches)).transpose(1, 2).flatten(0, 1)
            else:
                seen = block(seen, condition.repeat_interleave(frames, 0))
        scale, shift = self.shift(condition).repeat_interleave(frames, 0)[:, None].chunk(2, -1)
        made = self.head(self.norm(seen) * (1 + scale) + shift).transpose(1, 2).unflatten(2, (16, 16))
        made = functional.pixel_shuffle(made, 2).unflatten(0, (size, frames))  # type: ignore[no-untyped-call]
        return functional.mse_loss(made.float(), noise - video)


class VideoTransformerJob(WrittenJob):
    """Diffusion of videos by a transformer."""

    name, micro_batch, network = "video_transformer", 5, VideoTransformer
    global_batch = 40

    def batch(self, size: int) -> dict[str, Tensor]:
        """Latents of 16 frames with 256 x 256 pixels."""
        return {"video": torch.randn(size, 16, 4, 32, 32), "label": torch.randint(101, (size,))}


class VisionBlock(nn.Module):
    """A block of a vision transformer with scaled branches, some of which are left out."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.norms = nn.ModuleList([nn.LayerNorm(width, eps=1e-6) for _ in range(2)])
        self.scales = nn.ParameterList([nn.Parameter(torch.full((width,), 1e-5)) for _ in range(2)])
        self.attend, self.wide = Attention(width, heads), build_perceptron(width, 4 * width)

    def stay(self, change: Tensor) -> Tensor:
        """Leave out the change of some samples."""
        if not self.training or not self.drop:
            return change
        return change * change.new_empty(len(change), 1, 1).bernoulli_(1 - self.drop).div_(1 - self.drop)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        seen = seen + self.stay(self.scales[0] * self.attend(self.norms[0](seen)))
        return seen + self.stay(self.scales[1] * self.wide(self.norms[1](seen)))


class CropEncoder(nn.Module):
    """A ViT-S/16 that takes crops of several sizes, with a head of many prototypes."""

    def __init__(
        self, width: int = 384, layers: int = 12, prototypes: int = 65_536, drop: float = 0.1
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, width, 14, 14) * 0.02)
        self.blocks = nn.Sequential(
            *[VisionBlock(width, 6, drop * number / layers) for number in range(layers)]
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Sequential(
            nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256)
        )
        self.prototypes = nn.utils.parametrizations.weight_norm(nn.Linear(256, prototypes, bias=False))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of each image and its likeness to each prototype."""
        seen = self.patch(image)
        place = functional.interpolate(self.place, size=seen.shape[2:], mode="bicubic", align_corners=False)
        seen = (seen + place).flatten(2).transpose(1, 2)
        seen = torch.cat([self.first.expand(len(seen), -1, -1).to(seen.dtype), seen], 1)
        feature = self.norm(self.blocks(seen)[:, 0])
        return feature, self.prototypes(functional.normalize(self.head(feature), dim=-1, eps=1e-6))


class SelfDistillation(nn.Module):
    """All crops should say what a slow copy of the network says of the two large ones (DINOv2)."""

    def __init__(self, layers: int = 12, prototypes: int = 65_536, momentum: float = 0.994) -> None:
        super().__init__()
        self.momentum = momentum
        self.student = CropEncoder(layers=layers, prototypes=prototypes)
        self.teacher = CropEncoder(layers=layers, prototypes=prototypes, drop=0.0)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        """Move the teacher towards the student."""
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.mul_(self.momentum).add_(new.detach(), alpha=1 - self.momentum)

    @torch.no_grad()
    def assign(self, logits: Tensor) -> Tensor:
        """Give each prototype the same share of the images (Sinkhorn-Knopp)."""
        share = (logits.float() / 0.07).exp().t()
        share = share / share.sum()
        for _ in range(3):
            share = share / share.sum(1, keepdim=True) / share.shape[0]
            share = share / share.sum(0, keepdim=True) / share.shape[1]
        return (share * share.shape[1]).t()

    def forward(self, large: Tensor, small: Tensor) -> Tensor:  # noqa: D102
        self.update()
        # (crops, images): a crop of all images lies together.
        wide, near = large.transpose(0, 1).flatten(0, 1), small.transpose(0, 1).flatten(0, 1)
        with torch.no_grad():
            targets = self.assign(self.teacher(wide)[1]).chunk(large.shape[1])
        feature, logits = self.student(wide)
        guesses = [*logits.chunk(large.shape[1]), *self.student(near)[1].chunk(small.shape[1])]
        losses = []
        for number, guess in enumerate(guesses):
            each = functional.log_softmax(guess.float() / 0.1, -1)
            losses += [
                -(target * each).sum(-1).mean() for other, target in enumerate(targets) if other != number
            ]
        spread = []
        for crop in feature.chunk(large.shape[1]):
            unit = functional.normalize(crop.float(), dim=-1)
            with torch.no_grad():
                nearest = (unit @ unit.t()).fill_diagonal_(-1).argmax(1)
            spread.append(-(functional.pairwise_distance(unit, unit[nearest]) + 1e-8).log().mean())
        return torch.stack(losses).mean() + 0.1 * torch.stack(spread).mean()


class SelfDistillationJob(WrittenJob):
    """Self-supervised images with many crops and a slow teacher."""

    name, micro_batch, network = "self_distillation", 96, SelfDistillation
    global_batch = 384

    def batch(self, size: int) -> dict[str, Tensor]:
        """Two large and eight small crops of each image."""
        return {"large": torch.randn(size, 2, 3, 224, 224), "small": torch.randn(size, 8, 3, 96, 96)}


class ResidualBlock(nn.Module):
    """Two normalized convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(32, before, eps=1e-6), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(32, after, eps=1e-6), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1),
        )  # fmt: skip
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        updated: Tensor = self.skip(image) + self.layers(image)
        return updated


class SpotAttention(nn.Module):
    """Attention with one head between all spots of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.GroupNorm(32, width, eps=1e-6), Attention(width, 1)

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        spots = self.norm(image).flatten(2).transpose(1, 2)
        return image + self.attend(spots).transpose(1, 2).unflatten(2, image.shape[2:])  # type: ignore[no-any-return]


class FrozenFeatures(nn.Module):
    """VGG-16 up to its last convolution, whose features say how far two images are apart (LPIPS)."""

    def __init__(self) -> None:
        super().__init__()
        before, stages = 3, []
        for number, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
            layers: list[nn.Module] = [nn.MaxPool2d(2)] if number else []
            for _ in range(count):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
                before = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.weights = nn.ModuleList(
            [nn.Sequential(nn.Dropout(), nn.Conv2d(n, 1, 1, bias=False)) for n in (64, 128, 256, 512, 512)]
        )
        self.requires_grad_(False)

    def forward(self, made: Tensor, image: Tensor) -> Tensor:  # noqa: D102
        apart = made.new_zeros(len(made), 1, 1, 1)
        for stage, weight in zip(self.stages, self.weights, strict=True):
            made, image = stage(made), stage(image)
            units = [seen / (seen.square().sum(1, keepdim=True).sqrt() + 1e-10) for seen in (made, image)]
            apart = apart + weight((units[0] - units[1]).square()).mean((2, 3), keepdim=True)
        return apart.mean()


class PerceptualAutoencoder(nn.Module):
    """The autoencoder of latent diffusion, with a frozen network in its loss."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 512, 512), latent: int = 16) -> None:
        super().__init__()
        last = widths[-1]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        encoder: list[nn.Module] = []
        for before, after in itertools.pairwise((widths[0], *widths)):
            encoder += [nn.Conv2d(before, before, 3, 2, 1)] if encoder else []
            encoder += [ResidualBlock(before, after), ResidualBlock(after, after)]
        self.encoder = nn.Sequential(
            *encoder, ResidualBlock(last, last), SpotAttention(last), ResidualBlock(last, last),
            nn.GroupNorm(32, last, eps=1e-6), nn.SiLU(), nn.Conv2d(last, 2 * latent, 3, padding=1),
        )  # fmt: skip
        decoder: list[nn.Module] = [
            nn.Conv2d(latent, last, 3, padding=1), ResidualBlock(last, last), SpotAttention(last),
            ResidualBlock(last, last),
        ]  # fmt: skip
        for number, (before, after) in enumerate(itertools.pairwise((last, *reversed(widths)))):
            if number:
                decoder += [nn.Upsample(scale_factor=2), nn.Conv2d(before, before, 3, padding=1)]
            decoder += [ResidualBlock(before, after), ResidualBlock(after, after)]
        self.decoder = nn.Sequential(
            *decoder, nn.GroupNorm(32, widths[0], eps=1e-6), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1)
        )
        self.features = FrozenFeatures().eval()

    def train(self, mode: bool = True) -> PerceptualAutoencoder:
        """Leave the frozen network as it is."""
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        mean, spread = self.encoder(self.stem(image)).float().chunk(2, 1)
        spread = spread.clamp(-30, 20)
        made = self.decoder(mean + (0.5 * spread).exp() * torch.randn_like(mean))
        surprise = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum((1, 2, 3)).mean()
        loss: Tensor = (made.float() - image).abs().mean() + self.features(made, image) + 1e-6 * surprise
        return loss


class PerceptualAutoencoderJob(WrittenJob):
    """The first stage of latent diffusion."""

    name, micro_batch, network = "perceptual_autoencoder", 8, PerceptualAutoencoder
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.rand(size, 3, 256, 256) * 2 - 1}


# ---------------------------------------------------------------------------- graphs, series and robots


class GraphLayer(nn.Module):
    """Messages along edges and attention between all nodes, side by side (GraphGPS)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.message, self.own = nn.Linear(width, width), nn.Linear(width, width)
        self.attend, self.wide = Attention(width, heads), build_perceptron(width, 2 * width, 0.1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, seen: Tensor, step: Tensor, bias: Tensor) -> Tensor:  # noqa: D102
        sent = functional.gelu(self.own(seen) + step @ self.message(seen))
        near = self.norms[0](seen + self.dropout(sent))
        far = self.norms[1](seen + self.dropout(self.attend(seen, mask=bias.to(seen.dtype))))
        seen = near + far
        updated: Tensor = self.norms[2](seen + self.wide(seen))
        return updated


class GraphTransformer(nn.Module):
    """Attention between all nodes, with a bias from random walks on a dense adjacency matrix (GRIT)."""

    def __init__(self, width: int = 512, layers: int = 10, heads: int = 16, walks: int = 12) -> None:
        super().__init__()
        self.walks = walks
        self.node, self.edge = nn.Embedding(64, width), nn.Embedding(8, heads)
        self.start = nn.Linear(walks, width)
        self.walk = nn.Sequential(nn.Linear(walks, 32), nn.GELU(), nn.Linear(32, heads))
        self.layers = nn.ModuleList([GraphLayer(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 11))

    def forward(self, node: Tensor, edge: Tensor, nodes: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        real = torch.arange(node.shape[1], device=node.device) < nodes[:, None]
        linked = ((edge > 0) & real[:, None] & real[:, :, None]).float()
        step = linked / linked.sum(-1, keepdim=True).clamp(min=1)
        powers = [torch.eye(node.shape[1], device=node.device).expand_as(step), step]
        while len(powers) < self.walks:
            powers.append((powers[-1] @ step).float())
        walks = torch.stack(powers, -1)
        bias = (self.walk(walks) + self.edge(edge)).permute(0, 3, 1, 2)
        bias = bias.masked_fill(~real[:, None, None], torch.finfo(bias.dtype).min)
        seen = self.node(node) + self.start(walks.diagonal(dim1=1, dim2=2).transpose(1, 2))
        for layer in self.layers:
            seen = layer(seen, step, bias)
        mean = (seen * real[..., None]).sum(1) / nodes[:, None]
        return functional.l1_loss(self.head(mean).float(), target)


class GraphTransformerJob(WrittenJob):
    """Properties of peptides by attention between all atoms."""

    name, micro_batch, network = "graph_transformer", 128, GraphTransformer
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Graphs of 64 to 160 nodes with two to three edges each."""
        nodes = torch.randint(64, 161, (size,))
        nodes[0] = 160
        kind = torch.randint(1, 8, (size, 160, 160))
        edge = torch.where(torch.rand(size, 160, 160) < 2 / 160, kind, 0)
        return {
            "node": torch.randint(64, (size, 160)), "edge": torch.maximum(edge, edge.transpose(1, 2)),
            "nodes": nodes, "target": torch.randn(size, 11),
        }  # fmt: skip


class SeriesBlock(nn.Module):
    """Attention along the time of a series, then between the series of a group."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(3)])
        self.time = Attention(width, heads, bias=False)
        self.group = Attention(width, heads, bias=False)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(4 * width, width, bias=False), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, seen: Tensor, known: Tensor) -> Tensor:  # noqa: D102
        size, series = seen.shape[:2]
        flat = self.norms[0](seen).flatten(0, 1)
        seen = seen + self.time(flat, mask=known.flatten(0, 1)[:, None, None]).unflatten(0, (size, series))
        across = self.norms[1](seen).transpose(1, 2)
        mixed = self.group(across.flatten(0, 1)).unflatten(0, across.shape[:2])
        seen = seen + mixed.transpose(1, 2)
        updated: Tensor = seen + self.wide(self.norms[2](seen))
        return updated


class GroupForecaster(nn.Module):
    """Quantiles of groups of series that know of each other, from patches (Chronos-2)."""

    def __init__(self, width: int = 512, layers: int = 10, patch: int = 16, quantiles: int = 21) -> None:
        super().__init__()
        self.patch, self.quantiles = patch, quantiles
        self.inward = nn.Sequential(nn.Linear(2 * patch, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.future = nn.Parameter(torch.randn(8, width) * 0.02)
        self.place = nn.Embedding(160, width)
        self.blocks = nn.ModuleList([SeriesBlock(width, 8) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, patch * quantiles)

    def forward(self, past: Tensor, known: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        count = known.sum(-1, keepdim=True).clamp(min=1)
        level = (past * known).sum(-1, keepdim=True) / count
        spread = (((past - level) * known).square().sum(-1, keepdim=True) / count).sqrt() + 1e-5
        scaled = torch.asinh((past - level) / spread) * known
        patches = torch.cat([part.unflatten(-1, (-1, self.patch)) for part in (scaled, known.float())], -1)  # type: ignore[no-untyped-call]
        seen = self.inward(patches)
        seen = torch.cat([seen, self.future.to(seen.dtype).expand(*seen.shape[:2], -1, -1)], 2)
        seen = seen + self.place(torch.arange(seen.shape[2], device=past.device))
        some = known.unflatten(-1, (-1, self.patch)).any(-1)  # type: ignore[no-untyped-call]
        some = functional.pad(some, (0, len(self.future)), value=True)
        for block in self.blocks:
            seen = block(seen, some)
        made = self.head(self.norm(seen[:, :, -len(self.future) :])).float()
        made = made.unflatten(-1, (self.quantiles, self.patch)).transpose(-1, -2).flatten(2, 3)
        wanted = torch.asinh((target - level) / spread)[..., None]
        rank = torch.linspace(0.02, 0.98, self.quantiles, device=past.device)
        apart = wanted - made
        return torch.maximum(rank * apart, (rank - 1) * apart).sum(-1).mean()


class GroupForecasterJob(WrittenJob):
    """Forecasts of series that belong together."""

    name, micro_batch, network = "group_forecast", 48, GroupForecaster
    global_batch = 192

    def batch(self, size: int) -> dict[str, Tensor]:
        """Groups of 12 series, of which some begin late."""
        begin = torch.randint(0, 1024, (size, 12, 1))
        return {
            "past": torch.randn(size, 12, 2048).cumsum(-1), "known": torch.arange(2048) >= begin,
            "target": torch.randn(size, 12, 128),
        }  # fmt: skip


class JointBlock(nn.Module):
    """Two sets of weights, one for what is seen and one for actions, that share their attention."""

    def __init__(self, widths: tuple[int, int], heads: int, head: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.ModuleList([nn.RMSNorm(width) for width in widths])
        self.second = nn.ModuleList([nn.RMSNorm(width) for width in widths])
        self.inward = nn.ModuleList([nn.Linear(width, 3 * heads * head, bias=False) for width in widths])
        self.outward = nn.ModuleList([nn.Linear(heads * head, width, bias=False) for width in widths])
        self.wide = nn.ModuleList([GatedPerceptron(width, 4 * width) for width in widths])

    def forward(self, streams: list[Tensor], position: Tensor, mask: Tensor) -> list[Tensor]:  # noqa: D102
        mixed = torch.cat(
            [inward(norm(seen)) for inward, norm, seen in zip(self.inward, self.first, streams, strict=True)],
            1,
        )
        query, key, value = (split_heads(part, self.heads) for part in mixed.chunk(3, -1))
        query, key = rotate_at(query, position), rotate_at(key, position)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        parts = merge_heads(attended).split([seen.shape[1] for seen in streams], 1)  # type: ignore[no-untyped-call]
        after = [seen + out(part) for seen, out, part in zip(streams, self.outward, parts, strict=True)]
        return [
            seen + wide(norm(seen)) for seen, wide, norm in zip(after, self.wide, self.second, strict=True)
        ]


class RobotPolicy(nn.Module):
    """Images and an instruction lead to a chunk of actions, by flow matching (pi0)."""

    def __init__(self, layers: int = 14, vision: int = 10, words: int = 32_768, actions: int = 32) -> None:
        super().__init__()
        widths = (1024, 512)
        self.patch = nn.Conv2d(3, 768, 16, 16)
        self.place = nn.Parameter(torch.randn(1, 196, 768) * 0.02)
        self.vision = nn.Sequential(*[VisionBlock(768, 12, 0.0) for _ in range(vision)], nn.LayerNorm(768))
        self.project = nn.Linear(768, widths[0])
        self.embed = nn.Embedding(words, widths[0])
        self.state = nn.Linear(actions, widths[1])
        self.act = nn.Linear(actions, widths[1])
        self.time = nn.Sequential(
            nn.Linear(2 * widths[1], widths[1]), nn.SiLU(), nn.Linear(widths[1], widths[1])
        )
        self.blocks = nn.ModuleList([JointBlock(widths, 8, 128) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(widths[1]), nn.Linear(widths[1], actions)

    def forward(  # noqa: D102
        self, image: Tensor, ids: Tensor, mask: Tensor, state: Tensor, action: Tensor
    ) -> Tensor:
        size, cameras = image.shape[:2]
        spots = self.patch(image.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        spots = self.project(self.vision(spots)).unflatten(0, (size, cameras)).flatten(1, 2)
        text = self.embed(ids) * math.sqrt(self.embed.embedding_dim)
        time = torch.rand(size, device=image.device) ** (1 / 1.5) * 0.999 + 0.001
        noise, level = torch.randn_like(action), time[:, None, None]
        moved = self.act(level * noise + (1 - level) * action)
        when = encode_sine(1000 * time, moved.shape[-1])[:, None].expand_as(moved)
        moved = self.time(torch.cat([moved, when.to(moved.dtype)], -1))
        streams = [
            torch.cat([spots, text.to(spots.dtype)], 1),
            torch.cat([self.state(state)[:, None], moved], 1),
        ]
        real = torch.cat([mask.new_ones(size, spots.shape[1]), mask, mask.new_ones(streams[1].shape[:2])], 1)
        # What is seen attends to itself, the state also to what is seen, and actions to all.
        turn = torch.zeros(real.shape[1], device=image.device, dtype=torch.long)
        turn[-moved.shape[1] - 1 :] += 1
        turn[-moved.shape[1] :] += 1
        allowed = (turn[:, None] >= turn) & (real[:, None] > 0)
        position = real.cumsum(1) - 1
        for block in self.blocks:
            streams = block(streams, position, allowed[:, None])
        made = self.head(self.norm(streams[1][:, 1:])).float()
        return functional.mse_loss(made, noise - action)


class RobotPolicyJob(WrittenJob):
    """A policy of a robot from two cameras, an instruction and its state."""

    name, micro_batch, network = "robot_policy", 32, RobotPolicy
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Two images, up to 48 words, and the next 50 actions."""
        ids, mask = pad_texts(32_768, size, 48)
        return {
            "image": torch.randn(size, 2, 3, 224, 224), "ids": ids, "mask": mask,
            "state": torch.randn(size, 32), "action": torch.randn(size, 50, 32),
        }  # fmt: skip
