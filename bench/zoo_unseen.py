"""Sixteen more jobs for bench/zoo.py, of kinds that the other files do not have.

They are a blind check of predictions, and none of them has led to a rule. Each is written as published code
of its kind is: with loops, masks, updates in place and losses that read single numbers.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

if TYPE_CHECKING:
    from bench.zoo_check import (
        Attention,
        VisionBlock,
        build_perceptron,
        encode_sine,
        merge_heads,
        split_heads,
    )
    from bench.zoo_models import WrittenJob
    from bench.zoo_newest import GatedPerceptron, import_transformers, pad_texts, rotate
else:
    # zoo.py has loaded them under these names.
    from trimtab_zoo_check import (
        Attention,
        VisionBlock,
        build_perceptron,
        encode_sine,
        merge_heads,
        split_heads,
    )
    from trimtab_zoo_models import WrittenJob
    from trimtab_zoo_newest import GatedPerceptron, import_transformers, pad_texts, rotate

# ------------------------------------------------------------------------------------------------ text


class OffsetNorm(nn.Module):
    """A root-mean-square norm in fp32 whose weight is counted from one (Gemma)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        exact = seen.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return (exact * (1.0 + self.weight.float())).type_as(seen)


class CappedAttention(nn.Module):
    """Attention by hand, with scores that a tanh keeps between two limits."""

    def __init__(self, width: int, heads: int, groups: int, head: int, cap: float = 50.0) -> None:
        super().__init__()
        self.heads, self.groups, self.head, self.cap = heads, groups, head, cap
        self.query = nn.Linear(width, heads * head, bias=False)
        self.key = nn.Linear(width, groups * head, bias=False)
        self.value = nn.Linear(width, groups * head, bias=False)
        self.outward = nn.Linear(heads * head, width, bias=False)

    def forward(self, seen: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        query = rotate(split_heads(self.query(seen), self.heads))
        key = rotate(split_heads(self.key(seen), self.groups))
        value = split_heads(self.value(seen), self.groups)
        key = key.repeat_interleave(self.heads // self.groups, 1)
        value = value.repeat_interleave(self.heads // self.groups, 1)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.head**-0.5
        scores = torch.tanh(scores / self.cap) * self.cap
        scores = scores + mask
        share = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out: Tensor = self.outward(merge_heads(torch.matmul(share, value)))
        return out


class CappedBlock(nn.Module):
    """A decoder block with a norm before and after each of its two parts."""

    def __init__(self, width: int, heads: int, groups: int, head: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([OffsetNorm(width) for _ in range(4)])
        self.attend = CappedAttention(width, heads, groups, head)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, seen: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        seen = seen + self.norms[1](self.attend(self.norms[0](seen), mask))
        before = self.norms[2](seen)
        wide = self.down(functional.gelu(self.gate(before), approximate="tanh") * self.up(before))
        updated: Tensor = seen + self.norms[3](wide)
        return updated


class SoftCappedDecoder(nn.Module):
    """A decoder with soft caps on scores and logits; every other layer sees a window (Gemma 2)."""

    def __init__(
        self, width: int = 1536, layers: int = 14, words: int = 256_000, window: int = 1024, cap: float = 30.0
    ) -> None:
        super().__init__()
        self.width, self.window, self.cap = width, window, cap
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.blocks = nn.ModuleList([CappedBlock(width, 8, 4, 256) for _ in range(layers)])
        self.norm = OffsetNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def build_masks(self, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what is added to the scores, within the window and without one."""
        length = mask.shape[1]
        position = torch.arange(length, device=mask.device)
        apart = position[:, None] - position
        lowest = torch.finfo(dtype).min
        causal = (apart >= 0)[None, None] & mask[:, None, None].bool()
        whole = torch.zeros(causal.shape, dtype=dtype, device=mask.device).masked_fill(~causal, lowest)
        return whole.masked_fill(apart >= self.window, lowest), whole

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        seen = self.embed(ids)
        seen = seen * torch.tensor(self.width**0.5, dtype=seen.dtype, device=seen.device)
        masks = self.build_masks(mask, seen.dtype)
        for number, block in enumerate(self.blocks):
            seen = block(seen, masks[number % 2])
        logits = self.head(self.norm(seen))
        logits = torch.tanh(logits / self.cap) * self.cap
        return functional.cross_entropy(
            logits[:, :-1].float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
        )


class SoftCappedDecoderJob(WrittenJob):
    """Fine-tuning of a decoder with soft caps on instructions and answers."""

    name, micro_batch, network = "soft_capped_decoder", 2, SoftCappedDecoder
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Padded texts whose first 256 tokens are the instruction."""
        ids, mask = pad_texts(256_000, size, 2048)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :256] = -100
        return {"ids": ids * mask, "mask": mask, "labels": labels}


class LateInteraction(nn.Module):
    """A BERT with a vector per token; a text matches by the best token for each query token (ColBERT)."""

    def __init__(self, width: int = 768, layers: int = 12, space: int = 128) -> None:
        super().__init__()
        transformers = import_transformers()
        config = transformers.BertConfig(
            hidden_size=width, num_hidden_layers=layers, intermediate_size=4 * width
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.project = nn.Linear(width, space, bias=False)
        self.register_buffer("punctuation", torch.arange(999, 1032), persistent=False)
        self.punctuation: Tensor

    def encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return a unit vector for each token."""
        seen = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return functional.normalize(self.project(seen), p=2, dim=2)

    def forward(  # noqa: D102
        self, query: Tensor, query_mask: Tensor, text: Tensor, text_mask: Tensor, teacher: Tensor
    ) -> Tensor:
        asked = self.encode(query, query_mask)
        # (questions, texts of a question, words) as one batch of texts.
        flat, flat_mask = text.flatten(0, 1), text_mask.flatten(0, 1)
        told = self.encode(flat, flat_mask)
        counts = flat_mask.bool() & ~torch.isin(flat, self.punctuation)
        likeness = torch.einsum("qid,pjd->qpij", asked, told)
        likeness = likeness.masked_fill(~counts[None, :, None], -9999.0)
        scores = likeness.max(-1).values.sum(-1).float()
        each = text.shape[1]
        rows = torch.arange(len(query), device=query.device)
        in_batch = functional.cross_entropy(scores, rows * each)
        own = scores.view(len(query), len(query), each)[rows, rows]
        taught = functional.kl_div(
            own.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return in_batch + taught


class LateInteractionJob(WrittenJob):
    """Training of a retriever with vectors per token, in-batch negatives and a teacher."""

    name, micro_batch, network = "late_interaction", 48, LateInteraction
    global_batch = 48

    def batch(self, size: int) -> dict[str, Tensor]:
        """Queries of 32 tokens, filled with mask tokens, with four texts of up to 180 tokens each."""
        query, mask = pad_texts(30_522, size, 32)
        text, text_mask = pad_texts(30_522, 4 * size, 180)
        return {
            "query": query.masked_fill(mask == 0, 103), "query_mask": mask,
            "text": text.view(size, 4, -1), "text_mask": text_mask.view(size, 4, -1),
            "teacher": torch.randn(size, 4) * 3,
        }  # fmt: skip


class CausalBlock(nn.Module):
    """A decoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.attend, self.wide = Attention(width, heads), build_perceptron(width, 4 * width)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        seen = seen + self.attend(self.norms[0](seen), causal=True)
        updated: Tensor = seen + self.wide(self.norms[1](seen))
        return updated


class BytePatches(nn.Module):
    """A large decoder over patches of eight bytes and a small decoder within each patch (MEGABYTE)."""

    def __init__(
        self, wide: int = 1280, narrow: int = 640, layers: int = 16, inner: int = 6, patch: int = 8
    ) -> None:
        super().__init__()
        self.patch, self.narrow, self.pad = patch, narrow, 256
        self.embed = nn.Embedding(257, wide // patch)
        self.place = nn.Embedding(1024, wide)
        self.outer = nn.ModuleList([CausalBlock(wide, wide // 64) for _ in range(layers)])
        self.outer_norm = nn.LayerNorm(wide)
        self.project = nn.Linear(wide // patch, narrow)
        self.local = nn.Embedding(257, narrow)
        self.inner = nn.ModuleList([CausalBlock(narrow, narrow // 64) for _ in range(inner)])
        self.inner_norm = nn.LayerNorm(narrow)
        self.head = nn.Linear(narrow, 257, bias=False)

    def forward(self, text: Tensor) -> Tensor:  # noqa: D102
        size, length = text.shape
        spare = -length % self.patch
        text = functional.pad(text, (0, spare), value=self.pad)
        # A patch is predicted from the patches before it, a byte from the bytes before it in its patch.
        shifted = functional.pad(text, (self.patch, -self.patch), value=self.pad)
        seen = self.embed(shifted).view(size, -1, self.patch * self.embed.embedding_dim)
        seen = seen + self.place(torch.arange(seen.shape[1], device=text.device))
        for block in self.outer:
            seen = block(seen)
        seen = self.outer_norm(seen).view(size * seen.shape[1], self.patch, -1)
        pieces = text.view(-1, self.patch)
        before = functional.pad(pieces, (1, -1), value=self.pad)
        near = self.project(seen) + self.local(before)
        for block in self.inner:
            near = block(near)
        logits = self.head(self.inner_norm(near))
        loss = functional.cross_entropy(logits.float().flatten(0, 1), pieces.flatten(), reduction="none")
        real = (pieces.flatten() != self.pad).float()
        return (loss * real).sum() / real.sum() / math.log(2)


class BytePatchesJob(WrittenJob):
    """A language model over bytes, without a tokenizer."""

    name, micro_batch, network = "byte_patches", 6, BytePatches
    global_batch = 48

    def batch(self, size: int) -> dict[str, Tensor]:
        """Just under 8,192 bytes each."""
        return {"text": torch.randint(256, (size, 8189))}


def sum_segments(steps: Tensor) -> Tensor:
    """Return the sum of the steps after j up to i for each i and j; minus infinity if i is before j."""
    length = steps.shape[-1]
    rows = steps[..., None].expand(*steps.shape, length)
    earlier = torch.tril(torch.ones(length, length, device=steps.device, dtype=torch.bool), diagonal=-1)
    sums = rows.masked_fill(~earlier, 0).cumsum(-2)
    ends = torch.tril(torch.ones(length, length, device=steps.device, dtype=torch.bool))
    return sums.masked_fill(~ends, -torch.inf)


class StateSpaceLayer(nn.Module):
    """A state space with a scalar decay, computed in chunks by einsum (Mamba 2)."""

    def __init__(self, width: int, state: int = 64, head: int = 64, chunk: int = 64) -> None:
        super().__init__()
        self.inner, self.state, self.head, self.chunk = 2 * width, state, head, chunk
        self.heads = self.inner // head
        channels = self.inner + 2 * state
        self.inward = nn.Linear(width, self.inner + channels + self.heads, bias=False)
        self.local = nn.Conv1d(channels, channels, 4, groups=channels, padding=3)
        self.rate = nn.Parameter(torch.log(torch.arange(1.0, self.heads + 1)))
        self.step = nn.Parameter(torch.randn(self.heads) * 0.5 - 4)
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(self.inner)
        self.outward = nn.Linear(self.inner, width, bias=False)

    def scan(self, value: Tensor, decay: Tensor, write: Tensor, read: Tensor) -> Tensor:
        """Return what is read of the state at each step, within a chunk and from the chunks before."""
        size, length = value.shape[:2]
        value, decay, write, read = (
            part.reshape(size, length // self.chunk, self.chunk, *part.shape[2:])
            for part in (value, decay, write, read)
        )
        decay = decay.permute(0, 3, 1, 2)
        total = decay.cumsum(-1)
        near = torch.exp(sum_segments(decay))
        within = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", read, write, near, value)
        fade = torch.exp(total[..., -1:] - total)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", write, fade, value)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        between = torch.exp(sum_segments(functional.pad(total[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        across = torch.einsum("bcln,bchpn,bhcl->bclhp", read, states, torch.exp(total))
        return (within + across).reshape(size, length, self.heads, self.head)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        gate, mixed, step = self.inward(seen).split(
            [self.inner, self.inner + 2 * self.state, self.heads], dim=-1
        )
        mixed = functional.silu(self.local(mixed.transpose(1, 2))[..., : seen.shape[1]]).transpose(1, 2)
        value, write, read = mixed.split([self.inner, self.state, self.state], dim=-1)  # type: ignore[no-untyped-call]
        value = value.unflatten(-1, (self.heads, self.head))
        step = functional.softplus(step.float() + self.step)
        out = self.scan(value * step[..., None], -torch.exp(self.rate) * step, write.float(), read.float())
        out = (out + self.skip[:, None] * value).flatten(2)
        made: Tensor = self.outward(self.norm(out * functional.silu(gate)))
        return made


class HybridBlock(nn.Module):
    """A state space or attention, then a gated feed-forward layer."""

    def __init__(self, width: int, *, attends: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.attends = attends
        self.mix = Attention(width, width // 64, bias=False) if attends else StateSpaceLayer(width)
        self.wide = GatedPerceptron(width, 7 * width // 2)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        before = self.norms[0](seen)
        seen = seen + (self.mix(before, causal=True) if self.attends else self.mix(before))
        updated: Tensor = seen + self.wide(self.norms[1](seen))
        return updated


class HybridStateSpace(nn.Module):
    """State spaces with attention in every eighth layer (Jamba)."""

    def __init__(self, width: int = 1024, layers: int = 16, words: int = 65_536) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([HybridBlock(width, attends=number % 8 == 4) for number in range(layers)])  # noqa: PLR2004
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        seen = self.embed(ids[:, :-1])
        for block in self.blocks:
            seen = block(seen)
        logits = self.head(self.norm(seen)).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        # Keeps logits small, as PaLM does.
        return loss + 1e-4 * logits.logsumexp(-1).square().mean()  # type: ignore[no-any-return]


class HybridStateSpaceJob(WrittenJob):
    """Pre-training of a hybrid of state spaces and attention."""

    name, micro_batch, network = "hybrid_state_space", 4, HybridStateSpace
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Packed texts."""
        return {"ids": torch.randint(65_536, (size, 2049))}


class SequenceTagger(nn.Module):
    """Letters by a convolution, words by two LSTMs, tags by a conditional random field."""

    def __init__(self, words: int = 400_000, tags: int = 19, hidden: int = 512) -> None:
        super().__init__()
        self.tags = tags
        self.letters = nn.Embedding(128, 50, padding_idx=0)
        self.spell = nn.ModuleList([nn.Conv1d(50, 64, kernel, padding=kernel // 2) for kernel in (3, 5)])
        self.words = nn.Embedding(words, 300, padding_idx=0)
        self.dropout = nn.Dropout(0.5)
        self.recurrent = nn.LSTM(428, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.emit = nn.Linear(2 * hidden, tags)
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))
        self.turn = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def score(self, emit: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Return the score of the given tags."""
        rows = torch.arange(len(tags), device=tags.device)
        score = self.start[tags[:, 0]] + emit[rows, 0, tags[:, 0]]
        for place in range(1, tags.shape[1]):
            step = self.turn[tags[:, place - 1], tags[:, place]] + emit[rows, place, tags[:, place]]
            score = score + step * mask[:, place]
        last = tags.gather(1, (mask.sum(1) - 1)[:, None]).squeeze(1)
        return score + self.end[last]

    def normalize(self, emit: Tensor, mask: Tensor) -> Tensor:
        """Return the log of the sum over all tags of a text."""
        score = self.start + emit[:, 0]
        for place in range(1, emit.shape[1]):
            after = torch.logsumexp(score[:, :, None] + self.turn + emit[:, place, None], 1)
            score = torch.where(mask[:, place, None].bool(), after, score)
        return torch.logsumexp(score + self.end, 1)

    def forward(self, words: Tensor, letters: Tensor, tags: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        spelled = self.letters(letters.flatten(0, 1)).transpose(1, 2)
        spelled = torch.cat([functional.relu(layer(spelled)).amax(-1) for layer in self.spell], -1)
        seen = torch.cat([self.words(words), spelled.unflatten(0, words.shape)], -1)  # type: ignore[no-untyped-call]
        seen, _ = self.recurrent(self.dropout(seen))
        emit = self.emit(self.dropout(seen)).float()
        return (self.normalize(emit, mask) - self.score(emit, tags, mask)).mean()


class SequenceTaggerJob(WrittenJob):
    """Named entities by letters, words and tags that follow each other."""

    name, micro_batch, network = "sequence_tagger", 256, SequenceTagger
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Up to 96 words of up to 16 letters."""
        words, mask = pad_texts(400_000, size, 96)
        return {
            "words": words * mask, "letters": torch.randint(1, 128, (size, 96, 16)) * mask[..., None],
            "tags": torch.randint(19, (size, 96)), "mask": mask,
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------- images


def take(seen: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of each sample at the sample's places."""
    return seen.gather(1, index[..., None].expand(-1, -1, seen.shape[-1]))


class JointEmbedding(nn.Module):
    """The features of hidden blocks, as a slow copy sees them, from the rest of an image (I-JEPA)."""

    def __init__(
        self, width: int = 768, layers: int = 12, narrow: int = 384, momentum: float = 0.996, side: int = 14
    ) -> None:
        super().__init__()
        self.momentum = momentum
        places = encode_sine(torch.arange(side * side), width)[None]
        self.register_buffer("place", places, persistent=False)
        self.register_buffer("narrow_place", encode_sine(torch.arange(side * side), narrow)[None])
        self.place: Tensor
        self.narrow_place: Tensor
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.context = self.build_encoder(width, layers)
        self.slow_patch = nn.Conv2d(3, width, 16, 16)
        self.target = self.build_encoder(width, layers)
        self.target.load_state_dict(self.context.state_dict())
        self.slow_patch.load_state_dict(self.patch.state_dict())
        for slow in (self.target, self.slow_patch):
            slow.requires_grad_(False)
        self.inward, self.hidden = nn.Linear(width, narrow), nn.Parameter(torch.zeros(1, 1, narrow))
        self.predictor = nn.Sequential(
            *[VisionBlock(narrow, narrow // 32, 0.0) for _ in range(layers // 2)], nn.LayerNorm(narrow)
        )
        self.outward = nn.Linear(narrow, width)

    @staticmethod
    def build_encoder(width: int, layers: int) -> nn.Sequential:
        """Return the blocks of a vision transformer."""
        return nn.Sequential(
            *[VisionBlock(width, width // 64, 0.0) for _ in range(layers)], nn.LayerNorm(width)
        )

    @torch.no_grad()
    def update(self) -> None:
        """Move the slow copy towards the encoder."""
        fast = itertools.chain(self.context.parameters(), self.patch.parameters())
        slow = itertools.chain(self.target.parameters(), self.slow_patch.parameters())
        for old, new in zip(slow, fast, strict=True):
            old.data.mul_(self.momentum).add_((1.0 - self.momentum) * new.detach().data)

    def forward(self, image: Tensor, context: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        self.update()
        size, blocks = targets.shape[:2]
        with torch.no_grad():
            wanted = self.target(self.slow_patch(image).flatten(2).transpose(1, 2) + self.place)
            wanted = functional.layer_norm(wanted, (wanted.shape[-1],))
            wanted = torch.cat([take(wanted, targets[:, block]) for block in range(blocks)])
        seen = self.patch(image).flatten(2).transpose(1, 2) + self.place
        seen = self.inward(self.context(take(seen, context)))
        places = self.narrow_place.expand(size, -1, -1)
        seen = seen + take(places, context)
        asked = torch.cat([take(places, targets[:, block]) for block in range(blocks)]) + self.hidden
        made = self.predictor(torch.cat([seen.repeat(blocks, 1, 1), asked], 1))
        made = self.outward(made[:, context.shape[1] :])
        return functional.smooth_l1_loss(made.float(), wanted.float())


class JointEmbeddingJob(WrittenJob):
    """Self-supervised images by prediction of features."""

    name, micro_batch, network = "joint_embedding", 160, JointEmbedding
    global_batch = 2048

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images with 84 visible patches and four blocks of 30 patches to predict."""
        order = torch.rand(size, 196).argsort(1)
        targets = torch.rand(size, 4, 196).argsort(2)[..., :30]
        return {
            "image": torch.randn(size, 3, 224, 224), "context": order[:, :84].sort(1).values,
            "targets": targets.sort(2).values,
        }  # fmt: skip


class TimedBlock(nn.Module):
    """A residual block that is told the noise level; frames of all videos are a batch of images."""

    def __init__(self, before: int, after: int, level: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)
        )
        self.level = nn.Sequential(nn.SiLU(), nn.Linear(level, 2 * after))
        self.norm = nn.GroupNorm(32, after)
        self.second = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(after, after, 3, padding=1))
        self.around = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, seen: Tensor, level: Tensor) -> Tensor:  # noqa: D102
        scale, shift = self.level(level)[..., None, None].chunk(2, 1)
        made = self.norm(self.first(seen)) * (1 + scale) + shift
        updated: Tensor = self.around(seen) + self.second(made)
        return updated


class SpaceTimeBlock(nn.Module):
    """Attention within a frame, to a text, and along the frames of each place."""

    def __init__(self, width: int, text: int = 768, head: int = 64) -> None:
        super().__init__()
        self.group = nn.GroupNorm(32, width, eps=1e-6)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(4)])
        self.space, self.cross = (
            Attention(width, width // head),
            Attention(width, width // head, context=text),
        )
        self.time = Attention(width, width // head)
        self.inward, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.local = nn.Conv3d(width, width, (3, 1, 1), padding=(1, 0, 0))
        nn.init.zeros_(self.local.weight)
        nn.init.zeros_(self.time.outward.weight)

    def forward(self, seen: Tensor, text: Tensor, frames: int) -> Tensor:  # noqa: D102
        height, width = seen.shape[-2:]
        flat = self.group(seen).flatten(2).transpose(1, 2)
        flat = flat + self.space(self.norms[0](flat))
        flat = flat + self.cross(self.norms[1](flat), text.repeat_interleave(frames, 0))
        # (videos, frames, places, width) to (videos and places, frames, width), and back.
        along = flat.unflatten(0, (-1, frames)).transpose(1, 2)
        along = along.reshape(-1, frames, flat.shape[-1])
        place = encode_sine(torch.arange(frames, device=seen.device), flat.shape[-1]).to(along.dtype)
        along = along + self.time(self.norms[2](along + place))
        flat = along.view(len(text), -1, frames, flat.shape[-1]).transpose(1, 2).reshape(flat.shape)
        value, gate = self.inward(self.norms[3](flat)).chunk(2, -1)
        flat = flat + self.down(value * functional.gelu(gate))
        image = flat.transpose(1, 2).unflatten(2, (height, width))
        video = image.unflatten(0, (-1, frames)).transpose(1, 2)
        near = self.local(video).transpose(1, 2).flatten(0, 1)
        return seen + image + near  # type: ignore[no-any-return]


class LatentVideo(nn.Module):
    """A U-Net of images that attends along time too, for latent videos (AnimateDiff)."""

    def __init__(self, widths: tuple[int, ...] = (256, 512, 768), channels: int = 4) -> None:
        super().__init__()
        level = 4 * widths[0]
        self.width, self.widths = widths[0], widths
        self.time = nn.Sequential(nn.Linear(widths[0], level), nn.SiLU(), nn.Linear(level, level))
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.shrink, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        kept, before = [widths[0]], widths[0]
        for width in widths:
            for _ in range(2):
                self.down.append(nn.ModuleList([TimedBlock(before, width, level), SpaceTimeBlock(width)]))
                before = width
                kept.append(width)
            self.shrink.append(nn.Conv2d(width, width, 3, 2, 1))
        self.middle = nn.ModuleList([TimedBlock(before, before, level), SpaceTimeBlock(before)])
        for width in reversed(widths):
            for _ in range(2):
                self.up.append(
                    nn.ModuleList([TimedBlock(before + kept.pop(), width, level), SpaceTimeBlock(width)])
                )
                before = width
        self.last = nn.Sequential(
            nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, channels, 3, padding=1)
        )
        keep = torch.cos(torch.linspace(0.02, math.pi / 2 - 0.02, 1000)).square()
        self.register_buffer("keep", keep, persistent=False)
        self.keep: Tensor

    def estimate(self, seen: Tensor, level: Tensor, text: Tensor, frames: int) -> Tensor:
        """Return the velocity of each frame."""
        seen, skips = self.stem(seen), []
        for number, (block, attend) in enumerate(self.down):  # type: ignore[misc]
            seen = attend(block(seen, level), text, frames)  # type: ignore[has-type]
            skips.append(seen)
            if number % 2:
                seen = self.shrink[number // 2](seen)
        block, attend = self.middle
        seen = attend(block(seen, level), text, frames)
        for number, (block, attend) in enumerate(self.up):  # type: ignore[misc]
            if not number % 2:
                seen = functional.interpolate(seen, scale_factor=2.0, mode="nearest")
            seen = attend(block(torch.cat([seen, skips.pop()], 1), level), text, frames)
        made: Tensor = self.last(seen)
        return made

    def forward(self, video: Tensor, text: Tensor) -> Tensor:  # noqa: D102
        size, frames = video.shape[:2]
        step = torch.randint(len(self.keep), (size,), device=video.device)
        keep = self.keep[step][:, None, None, None, None]
        noise = torch.randn_like(video)
        noisy = keep.sqrt() * video + (1 - keep).sqrt() * noise
        level = self.time(encode_sine(step, self.width)).repeat_interleave(frames, 0)
        some = torch.rand(size, device=video.device) < 0.1  # noqa: PLR2004
        text = text.masked_fill(some[:, None, None], 0.0)
        made = self.estimate(noisy.flatten(0, 1), level, text, frames).unflatten(0, (size, frames))  # type: ignore[no-untyped-call]
        wanted = keep.sqrt() * noise - (1 - keep).sqrt() * video
        loss = (made.float() - wanted).square().mean((1, 2, 3, 4))
        ratio = self.keep[step] / (1 - self.keep[step])
        return (loss * ratio.clamp(max=5) / (ratio + 1)).mean()  # type: ignore[no-any-return]


class LatentVideoJob(WrittenJob):
    """Latent video diffusion from texts."""

    name, micro_batch, network = "latent_video", 4, LatentVideo
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Sixteen latent frames of 32 x 32, and encoded texts."""
        return {"video": torch.randn(size, 16, 4, 32, 32), "text": torch.randn(size, 77, 768)}


class EqualLinear(nn.Module):
    """A linear layer whose weights all have the same learning rate."""

    def __init__(self, before: int, after: int, start: float = 0.0, rate: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before) / rate)
        self.bias = nn.Parameter(torch.full((after,), start / rate))
        self.scale, self.rate = rate / math.sqrt(before), rate

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(seen, self.weight * self.scale, self.bias * self.rate)


def blur(image: Tensor, kernel: Tensor) -> Tensor:
    """Return the image, smoothed by a kernel of four by four, a pixel smaller."""
    channels = image.shape[1]
    return functional.conv2d(
        functional.pad(image, (1, 1, 1, 1)), kernel.to(image.dtype).expand(channels, 1, 4, 4), groups=channels
    )


class ModulatedConv(nn.Module):
    """A convolution whose weights differ for each image: all images are groups of a single one."""

    def __init__(  # noqa: PLR0913 - a shape
        self,
        before: int,
        after: int,
        style: int,
        kernel: int = 3,
        *,
        normalize: bool = True,
        up: bool = False,
    ) -> None:
        super().__init__()
        self.normalize, self.up = normalize, up
        self.weight = nn.Parameter(torch.randn(1, after, before, kernel, kernel))
        self.scale = 1 / math.sqrt(before * kernel**2)
        self.style = EqualLinear(style, before, start=1.0)

    def forward(self, image: Tensor, style: Tensor, fir: Tensor) -> Tensor:  # noqa: D102
        size, before, height, width = image.shape
        weight = self.scale * self.weight * self.style(style)[:, None, :, None, None]
        if self.normalize:
            weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        after, kernel = weight.shape[1], weight.shape[-1]
        image = image.reshape(1, size * before, height, width)
        if self.up:
            weight = weight.transpose(1, 2).reshape(size * before, after, kernel, kernel)
            out = functional.conv_transpose2d(image, weight, stride=2, groups=size)
            return blur(out.view(size, after, *out.shape[-2:]), 4 * fir)
        weight = weight.reshape(size * after, before, kernel, kernel)
        out = functional.conv2d(image, weight, padding=kernel // 2, groups=size)
        return out.view(size, after, height, width)


class StyledLayer(nn.Module):
    """A modulated convolution with noise and a leaky activation."""

    def __init__(self, before: int, after: int, style: int, *, up: bool = False) -> None:
        super().__init__()
        self.conv = ModulatedConv(before, after, style, up=up)
        self.noise = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(1, after, 1, 1))

    def forward(self, image: Tensor, style: Tensor, fir: Tensor) -> Tensor:  # noqa: D102
        image = self.conv(image, style, fir)
        noise = image.new_empty(len(image), 1, *image.shape[2:]).normal_()
        image = image + self.noise * noise
        return functional.leaky_relu(image + self.bias, 0.2) * math.sqrt(2)


class StyledGenerator(nn.Module):
    """A mapping of noise to a style, and layers that the style modulates."""

    def __init__(self, widths: tuple[int, ...], style: int = 512) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [EqualLinear(style, style, rate=0.01), nn.LeakyReLU(0.2)]
        self.mapping = nn.Sequential(*layers)
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.first = StyledLayer(widths[0], widths[0], style)
        self.ups, self.flats, self.colours = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for before, after in itertools.pairwise(widths):
            self.ups.append(StyledLayer(before, after, style, up=True))
            self.flats.append(StyledLayer(after, after, style))
            self.colours.append(ModulatedConv(after, 3, style, 1, normalize=False))

    def forward(self, noise: Tensor, fir: Tensor) -> Tensor:  # noqa: D102
        noise = noise * torch.rsqrt(noise.pow(2).mean(1, keepdim=True) + 1e-8)
        first, second = self.mapping(noise).chunk(2)
        image = self.first(self.start.repeat(len(first), 1, 1, 1), first, fir)
        out: Tensor | None = None
        for number, (up, flat, colour) in enumerate(zip(self.ups, self.flats, self.colours, strict=True)):
            # Styles are mixed: coarse layers have one, fine layers another.
            style = first if number < len(self.ups) // 2 else second
            image = flat(up(image, style, fir), style, fir)
            made = colour(image, style, fir)
            if out is not None:
                made = made + functional.interpolate(
                    out, scale_factor=2.0, mode="bilinear", align_corners=False
                )
            out = made
        assert out is not None  # noqa: S101 - there is a layer
        return out


class StyledCritic(nn.Module):
    """Residual layers on blurred images, with the spread within groups of images as a channel."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 1)
        self.firsts, self.seconds, self.around = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for before, after in itertools.pairwise(widths):
            self.firsts.append(nn.Conv2d(before, before, 3, padding=1))
            self.seconds.append(nn.Conv2d(before, after, 3, 2))
            self.around.append(nn.Conv2d(before, after, 1, 2, bias=False))
        self.last = nn.Conv2d(widths[-1] + 1, widths[-1], 3, padding=1)
        self.head = nn.Sequential(
            EqualLinear(widths[-1] * 16, widths[-1]), nn.LeakyReLU(0.2), EqualLinear(widths[-1], 1)
        )

    def forward(self, image: Tensor, fir: Tensor) -> Tensor:  # noqa: D102
        seen = functional.leaky_relu(self.stem(image), 0.2)
        for first, second, around in zip(self.firsts, self.seconds, self.around, strict=True):
            made = functional.leaky_relu(first(seen), 0.2)
            made = functional.leaky_relu(second(functional.pad(blur(made, fir), (1, 1, 1, 1))), 0.2)
            short = around(functional.pad(blur(seen, fir), (0, 1, 0, 1)))
            seen = (made + short) / math.sqrt(2)
        group = min(len(seen), 4)
        spread = seen.float().view(group, -1, *seen.shape[1:])
        spread = (spread.var(0, unbiased=False) + 1e-8).sqrt().mean([1, 2, 3], keepdim=True)
        spread = spread.repeat(group, 1, *seen.shape[2:]).to(seen.dtype)
        seen = functional.leaky_relu(self.last(torch.cat([seen, spread], 1)), 0.2)
        out: Tensor = self.head(seen.flatten(1))
        return out


class ModulatedPair(nn.Module):
    """A generator and a critic with their two losses in one step (StyleGAN 2 at 128 pixels)."""

    def __init__(self, widths: tuple[int, ...] = (512, 512, 512, 512, 256, 128)) -> None:
        super().__init__()
        self.generator = StyledGenerator(widths)
        self.critic = StyledCritic(tuple(reversed(widths)))
        line = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("fir", (line[:, None] * line / 64)[None, None])
        self.fir: Tensor

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:  # noqa: D102
        made = self.generator(noise.flatten(0, 1), self.fir)
        # The generator's loss must not change the critic.
        fixed = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        generator = functional.softplus(-functional_call(self.critic, fixed, (made, self.fir))).mean()
        real, fake = self.critic(torch.cat([image, made.detach().to(image.dtype)]), self.fir).chunk(2)
        critic = functional.softplus(-real).mean() + functional.softplus(fake).mean()
        loss: Tensor = generator + critic
        return loss


class ModulatedPairJob(WrittenJob):
    """A generator of images with styles, and its critic."""

    name, micro_batch, network = "modulated_generator", 32, ModulatedPair
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images, and noise for two styles."""
        return {
            "image": torch.rand(size, 3, 128, 128) * 2 - 1,
            "noise": torch.randn(2, size, 512).movedim(0, 1),
        }


class DocumentReader(nn.Module):
    """A Swin encoder of large pages and an MBart decoder of transformers (Donut)."""

    def __init__(self, height: int = 1280, width: int = 960, layers: int = 4, words: int = 57_525) -> None:
        super().__init__()
        transformers = import_transformers()
        encoder = transformers.DonutSwinConfig(
            image_size=(height, width), window_size=10, embed_dim=128, depths=[2, 2, 14, 2],
            num_heads=[4, 8, 16, 32],
        )  # fmt: skip
        decoder = transformers.MBartConfig(
            vocab_size=words, d_model=1024, decoder_layers=layers, decoder_attention_heads=16,
            decoder_ffn_dim=4096, max_position_embeddings=1024, is_decoder=True, add_cross_attention=True,
            scale_embedding=True, add_final_layer_norm=True, is_encoder_decoder=False, use_cache=False,
        )  # fmt: skip
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.decoder_start_token_id, config.pad_token_id = 2, 1
        self.reader = transformers.VisionEncoderDecoderModel(config=config)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        loss: Tensor = self.reader(pixel_values=image, labels=labels).loss
        return loss


class DocumentReaderJob(WrittenJob):
    """Fields of scanned pages as text."""

    name, micro_batch, network = "document_reader", 2, DocumentReader
    global_batch = 16

    def batch(self, size: int) -> dict[str, Tensor]:
        """Pages with up to 512 tokens."""
        ids, mask = pad_texts(57_525, size, 512)
        return {"image": torch.randn(size, 3, 1280, 960), "labels": ids.masked_fill(mask == 0, -100)}


def relate(length: int, table: Tensor) -> Tensor:
    """Return the row of the table for each pair of places along one side."""
    place = torch.arange(length, device=table.device)
    return table[place[:, None] - place + length - 1]


class RelativeAttention(nn.Module):
    """Attention by hand with a bias for rows and one for columns, both from the query (SAM)."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rows = nn.Parameter(torch.zeros(2 * side - 1, width // heads))
        self.columns = nn.Parameter(torch.zeros(2 * side - 1, width // heads))

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        size, height, width, _ = seen.shape
        parts = self.inward(seen).reshape(size, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.reshape(3, size * self.heads, height * width, -1).unbind(0)
        scores = (query * self.scale) @ key.transpose(-2, -1)
        grid = query.reshape(size * self.heads, height, width, -1)
        down = torch.einsum("bhwc,hkc->bhwk", grid, relate(height, self.rows))
        right = torch.einsum("bhwc,wkc->bhwk", grid, relate(width, self.columns))
        scores = scores.view(-1, height, width, height, width) + down[..., None] + right[..., None, :]
        share = scores.view(-1, height * width, height * width).softmax(-1)
        mixed = (share @ value).view(size, self.heads, height, width, -1).permute(0, 2, 3, 1, 4)
        out: Tensor = self.outward(mixed.reshape(size, height, width, -1))
        return out


class PageBlock(nn.Module):
    """A block whose attention sees a window of 14 by 14, or the whole image."""

    def __init__(self, width: int, heads: int, window: int, side: int) -> None:
        super().__init__()
        self.window = window
        self.norms = nn.ModuleList([nn.LayerNorm(width, eps=1e-6) for _ in range(2)])
        self.attend = RelativeAttention(width, heads, window or side)
        self.wide = build_perceptron(width, 4 * width)

    def look(self, seen: Tensor) -> Tensor:
        """Attend within windows; the image is padded to whole windows."""
        if not self.window:
            attended: Tensor = self.attend(seen)
            return attended
        size, height, width, channels = seen.shape
        window = self.window
        padded = functional.pad(seen, (0, 0, 0, -width % window, 0, -height % window))
        down, right = padded.shape[1] // window, padded.shape[2] // window
        tiles = padded.view(size, down, window, right, window, channels).permute(0, 1, 3, 2, 4, 5)
        tiles = self.attend(tiles.contiguous().view(-1, window, window, channels))
        tiles = tiles.view(size, down, right, window, window, channels).permute(0, 1, 3, 2, 4, 5)
        joined = tiles.contiguous().view(size, down * window, right * window, channels)
        return joined[:, :height, :width].contiguous()  # type: ignore[no-any-return]

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        seen = seen + self.look(self.norms[0](seen))
        updated: Tensor = seen + self.wide(self.norms[1](seen))
        return updated


class MaskDecoder(nn.Module):
    """Prompts and the image attend to each other; small networks give the weights of each mask."""

    def __init__(self, width: int = 256, masks: int = 4) -> None:
        super().__init__()
        self.masks = masks
        self.tokens = nn.Embedding(masks + 1, width)
        self.own = nn.ModuleList([Attention(width, 8) for _ in range(2)])
        self.toward = nn.ModuleList([Attention(width, 8) for _ in range(2)])
        self.back = nn.ModuleList([Attention(width, 8) for _ in range(2)])
        self.wide = nn.ModuleList([build_perceptron(width, 2048) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(8)])
        self.enlarge = nn.Sequential(
            nn.ConvTranspose2d(width, width // 4, 2, 2), nn.GroupNorm(1, width // 4), nn.GELU(),
            nn.ConvTranspose2d(width // 4, width // 8, 2, 2), nn.GELU(),
        )  # fmt: skip
        self.weights = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width // 8))
                for _ in range(masks)
            ]
        )
        self.quality = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, masks))

    def forward(self, image: Tensor, place: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the masks of each prompt and how good they should be."""
        own = self.tokens.weight[None].expand(len(prompts), -1, -1)
        tokens = torch.cat([own.to(prompts.dtype), prompts], 1)
        first = tokens
        side = image.shape[-1]
        spots, where = image.flatten(2).transpose(1, 2), place.flatten(2).transpose(1, 2)
        for number in range(2):
            norms = self.norms[4 * number : 4 * number + 4]
            tokens = norms[0](tokens + self.own[number](tokens + first))
            tokens = norms[1](tokens + self.toward[number](tokens + first, spots + where))
            tokens = norms[2](tokens + self.wide[number](tokens))
            spots = norms[3](spots + self.back[number](spots + where, tokens + first))
        large = self.enlarge(spots.transpose(1, 2).unflatten(2, (side, side)))  # type: ignore[no-untyped-call]
        weights = torch.stack([layer(tokens[:, 1 + number]) for number, layer in enumerate(self.weights)], 1)
        return torch.einsum("bmc,bchw->bmhw", weights, large), self.quality(tokens[:, 0])


class PromptableSegmentation(nn.Module):
    """An encoder of 1,024 pixels and a decoder that cuts out what a point means (SAM)."""

    def __init__(self, width: int = 768, layers: int = 12, side: int = 64, space: int = 256) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(1, side, side, width))
        whole = {number - 1 for number in range(layers // 4, layers + 1, layers // 4)}
        self.blocks = nn.Sequential(
            *[PageBlock(width, width // 64, 0 if number in whole else 14, side) for number in range(layers)]
        )
        self.neck = nn.Sequential(
            nn.Conv2d(width, space, 1, bias=False), nn.GroupNorm(1, space),
            nn.Conv2d(space, space, 3, padding=1, bias=False), nn.GroupNorm(1, space),
        )  # fmt: skip
        self.register_buffer("waves", torch.randn(2, space // 2))
        self.waves: Tensor
        self.kinds = nn.Embedding(2, space)
        self.decoder = MaskDecoder(space)

    def locate(self, point: Tensor) -> Tensor:
        """Return random waves at points between 0 and 1."""
        angle = 2 * math.pi * ((2 * point - 1) @ self.waves)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def forward(self, image: Tensor, points: Tensor, kinds: Tensor, masks: Tensor) -> Tensor:  # noqa: D102
        seen = self.patch(image).permute(0, 2, 3, 1) + self.place
        seen = self.neck(self.blocks(seen).permute(0, 3, 1, 2))
        objects, side = points.shape[1], seen.shape[-1]
        line = (torch.arange(side, device=image.device) + 0.5) / side
        rows, columns = torch.meshgrid(line, line, indexing="ij")
        place = self.locate(torch.stack([columns, rows], -1)).permute(2, 0, 1)[None]
        prompts = self.locate(points.flatten(0, 1)) + self.kinds(kinds.flatten(0, 1))
        seen = torch.repeat_interleave(seen, objects, dim=0)
        made, quality = self.decoder(seen, place.expand(len(seen), -1, -1, -1), prompts)
        made, target = made.float(), masks.flatten(0, 1)[:, None].expand_as(made)
        share = made.sigmoid()
        each = functional.binary_cross_entropy_with_logits(made, target, reduction="none")
        right = share * target + (1 - share) * (1 - target)
        focal = (0.25 * each * (1 - right) ** 2).mean((2, 3))
        both = (share * target).sum((2, 3))
        dice = 1 - (2 * both + 1) / (share.sum((2, 3)) + target.sum((2, 3)) + 1)
        # Only the best of the masks of a prompt is trained.
        loss, best = (20 * focal + dice).min(1)
        with torch.no_grad():
            cut = made > 0
            met = (cut & (target > 0)).sum((2, 3)) / (cut | (target > 0)).sum((2, 3)).clamp(min=1)
        guess = quality.float().gather(1, best[:, None])
        return loss.mean() + functional.mse_loss(guess, met.gather(1, best[:, None]))  # type: ignore[no-any-return]


class PromptableSegmentationJob(WrittenJob):
    """Masks of whatever points in an image are on."""

    name, micro_batch, network = "promptable_segmentation", 2, PromptableSegmentation
    global_batch = 16

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images with 16 things, each with three points and a mask."""
        return {
            "image": torch.randn(size, 3, 1024, 1024), "points": torch.rand(size, 16, 3, 2),
            "kinds": torch.randint(2, (size, 16, 3)),
            "masks": (torch.rand(size, 16, 256, 256) > 0.9).float(),  # noqa: PLR2004
        }  # fmt: skip


def group_neighbours(points: Tensor, near: int) -> Tensor:
    """Return, for each point and neighbour, how they differ, and the point (DGCNN)."""
    size, channels, count = points.shape
    inner = -2 * torch.matmul(points.transpose(2, 1), points)
    square = torch.sum(points**2, dim=1, keepdim=True)
    index = (-square - inner - square.transpose(2, 1)).topk(near, dim=-1)[1]
    start = torch.arange(size, device=points.device).view(-1, 1, 1) * count
    flat = points.transpose(2, 1).contiguous()
    chosen = flat.view(size * count, -1)[(index + start).view(-1), :].view(size, count, near, channels)
    own = flat.view(size, count, 1, channels).repeat(1, 1, near, 1)
    return torch.cat([chosen - own, own], 3).permute(0, 3, 1, 2).contiguous()


class EdgeConvolution(nn.Module):
    """Parts of shapes; neighbours are found anew in the features of each layer."""

    def __init__(self, near: int = 40, parts: int = 50, space: int = 1024) -> None:
        super().__init__()
        self.near = near
        self.first = nn.Sequential(*self.layer2d(6, 64), *self.layer2d(64, 64))
        self.second = nn.Sequential(*self.layer2d(128, 64), *self.layer2d(64, 64))
        self.third = nn.Sequential(*self.layer2d(128, 64))
        self.whole = nn.Sequential(
            nn.Conv1d(192, space, 1, bias=False), nn.BatchNorm1d(space), nn.LeakyReLU(0.2)
        )
        self.kind = nn.Sequential(nn.Conv1d(16, 64, 1, bias=False), nn.BatchNorm1d(64), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Conv1d(space + 64 + 192, 256, 1, bias=False), nn.BatchNorm1d(256), nn.LeakyReLU(0.2),
            nn.Dropout(0.5), nn.Conv1d(256, 128, 1, bias=False), nn.BatchNorm1d(128), nn.LeakyReLU(0.2),
            nn.Conv1d(128, parts, 1),
        )  # fmt: skip

    @staticmethod
    def layer2d(before: int, after: int) -> list[nn.Module]:
        """Return a layer over all pairs of neighbours."""
        return [nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]

    def forward(self, points: Tensor, kind: Tensor, parts: Tensor) -> Tensor:  # noqa: D102
        count = points.shape[2]
        first = self.first(group_neighbours(points, self.near)).max(dim=-1, keepdim=False)[0]
        second = self.second(group_neighbours(first, self.near)).max(dim=-1, keepdim=False)[0]
        third = self.third(group_neighbours(second, self.near)).max(dim=-1, keepdim=False)[0]
        near = torch.cat([first, second, third], 1)
        whole = self.whole(near).max(dim=-1, keepdim=True)[0]
        label = self.kind(functional.one_hot(kind, 16).float()[..., None])
        whole = torch.cat([whole, label], 1).repeat(1, 1, count)
        logits = self.head(torch.cat([whole, near], 1)).float()
        logits = logits.permute(0, 2, 1).contiguous().view(-1, logits.shape[1])
        # Smoothed labels by hand.
        sure = torch.zeros_like(logits).scatter(1, parts.view(-1, 1), 1)
        sure = sure * (1 - 0.2) + (1 - sure) * 0.2 / (logits.shape[1] - 1)
        return -(sure * functional.log_softmax(logits, dim=1)).sum(1).mean()  # type: ignore[no-any-return]


class EdgeConvolutionJob(WrittenJob):
    """Segmentation of clouds of points by graphs of neighbours."""

    name, micro_batch, network = "edge_convolution", 16, EdgeConvolution
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Clouds of 2,048 points."""
        return {
            "points": torch.randn(size, 3, 2048), "kind": torch.randint(16, (size,)),
            "parts": torch.randint(50, (size, 2048)),
        }  # fmt: skip


# ----------------------------------------------------------------------------------------------- sound


class FrameBlock(nn.Module):
    """Attention over a sequence and two convolutions, all of them without what is padded (FastPitch)."""

    def __init__(self, width: int, hidden: int, kernel: int = 3) -> None:
        super().__init__()
        self.attend = Attention(width, width // 64)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.first = nn.Conv1d(width, hidden, kernel, padding=kernel // 2)
        self.second = nn.Conv1d(hidden, width, kernel, padding=kernel // 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, seen: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        attended = self.dropout(self.attend(seen, mask=mask[:, None, None]))
        seen = self.norms[0](seen + attended) * mask[..., None]
        local = self.second(functional.relu(self.first(seen.transpose(1, 2)))).transpose(1, 2)
        return self.norms[1](seen + self.dropout(local)) * mask[..., None]  # type: ignore[no-any-return]


class TonePredictor(nn.Module):
    """A number per token, by convolutions."""

    def __init__(self, width: int, hidden: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(before, hidden, 3, padding=1) for before in (width, hidden)])
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(2)])
        self.head, self.dropout = nn.Linear(hidden, 1), nn.Dropout(0.1)

    def forward(self, seen: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        for layer, norm in zip(self.layers, self.norms, strict=True):
            seen = functional.relu(layer((seen * mask[..., None]).transpose(1, 2))).transpose(1, 2)
            seen = self.dropout(norm(seen))
        return self.head(seen).squeeze(-1) * mask  # type: ignore[no-any-return]


class SpeechSynthesis(nn.Module):
    """Spectra of all frames at once; an aligner learns how long each letter lasts."""

    def __init__(self, width: int = 384, layers: int = 6, mels: int = 80, letters: int = 148) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width, padding_idx=0)
        self.encoder = nn.ModuleList([FrameBlock(width, 4 * width) for _ in range(layers)])
        self.decoder = nn.ModuleList([FrameBlock(width, 4 * width) for _ in range(layers)])
        self.key = nn.Sequential(
            nn.Conv1d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * width, mels, 1)
        )
        self.query = nn.Sequential(
            nn.Conv1d(mels, 2 * mels, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * mels, mels, 1), nn.ReLU(),
            nn.Conv1d(mels, mels, 1),
        )  # fmt: skip
        self.lasting, self.pitch = TonePredictor(width), TonePredictor(width)
        self.tone = nn.Conv1d(1, width, 3, padding=1)
        self.head = nn.Linear(width, mels)
        self.after = nn.LSTM(mels, 256, batch_first=True, bidirectional=True)
        self.correct = nn.Linear(512, mels)

    @staticmethod
    def align_loss(shares: Tensor, letters: Tensor, frames: Tensor) -> Tensor:
        """Return how unlikely it is that letters follow each other, a text at a time (CTC)."""
        padded = functional.pad(shares, (1, 0), value=-1.0)
        total = shares.new_zeros(())
        for number in range(len(shares)):
            count, length = int(letters[number]), int(frames[number])
            own = padded[number, :length, : count + 1].log_softmax(-1)[:, None]
            total = total + functional.ctc_loss(
                own, torch.arange(1, count + 1, device=shares.device)[None], frames[number : number + 1],
                letters[number : number + 1], zero_infinity=True,
            )  # fmt: skip
        return total / len(shares)

    def forward(  # noqa: D102
        self, text: Tensor, letters: Tensor, mel: Tensor, frames: Tensor, pitch: Tensor
    ) -> Tensor:
        text_mask = torch.arange(text.shape[1], device=text.device) < letters[:, None]
        frame_mask = torch.arange(mel.shape[1], device=text.device) < frames[:, None]
        seen = self.embed(text)
        place = encode_sine(torch.arange(mel.shape[1], device=text.device), seen.shape[-1])
        seen = seen + place[: text.shape[1]]
        query, key = self.query(mel.transpose(1, 2)).float(), self.key(seen.transpose(1, 2)).float()
        shares = -0.0005 * (query[:, :, :, None] - key[:, :, None]).square().sum(1)
        aligned = self.align_loss(shares, letters, frames)
        share = shares.masked_fill(~text_mask[:, None], -torch.inf).softmax(-1) * frame_mask[..., None]
        lasts = share.sum(1).detach()
        for block in self.encoder:
            seen = block(seen, text_mask)
        duration = self.lasting(seen.detach(), text_mask).float()
        guess = self.pitch(seen, text_mask).float()
        seen = seen + self.tone(pitch[:, None]).transpose(1, 2)
        # Each frame is a mean of letters, by its distance from the middle of each letter.
        middle = lasts.cumsum(1) - 0.5 * lasts
        time = torch.arange(mel.shape[1], device=text.device)
        apart = -0.1 * (time[None, :, None] + 0.5 - middle[:, None]).square()
        apart = apart.masked_fill(~text_mask[:, None], torch.finfo(apart.dtype).min)
        seen = torch.bmm(apart.softmax(-1), seen.float()) + place
        for block in self.decoder:
            seen = block(seen, frame_mask)
        made = self.head(seen)
        better = made + self.correct(self.after(made)[0])
        real = frame_mask[..., None].expand_as(mel)
        loss = functional.mse_loss(made.float()[real], mel[real])
        loss = loss + functional.l1_loss(better.float()[real], mel[real])
        loss = loss + 0.1 * functional.mse_loss(duration[text_mask], (lasts + 1).log()[text_mask])
        loss = loss + 0.1 * functional.mse_loss(guess[text_mask], pitch[text_mask])
        return loss + aligned


class SpeechSynthesisJob(WrittenJob):
    """Text to speech, with an aligner of its own."""

    name, micro_batch, network = "speech_synthesis", 32, SpeechSynthesis
    global_batch = 64

    def batch(self, size: int) -> dict[str, Tensor]:
        """Up to 160 letters and 800 frames."""
        letters, frames = torch.randint(60, 161, (size,)), torch.randint(400, 801, (size,))
        letters[0], frames[0] = 160, 800
        text = torch.randint(1, 148, (size, 160)) * (torch.arange(160) < letters[:, None])
        return {
            "text": text, "letters": letters, "mel": torch.randn(size, 800, 80), "frames": frames,
            "pitch": torch.randn(size, 160),
        }  # fmt: skip


# ------------------------------------------------------------------------- tables, games, physics, series


class CrossNetwork(nn.Module):
    """Clicks from 26 ids, a history and 13 numbers, by crosses of low rank (DCN 2)."""

    def __init__(self, width: int = 64, layers: int = 4, rank: int = 512) -> None:
        super().__init__()
        sizes = [1_000_000] * 3 + [300_000] * 4 + [40_000] * 6 + [2_000] * 7 + [100] * 6
        self.tables = nn.ModuleList([nn.EmbeddingBag(count, width, mode="sum") for count in sizes])
        self.history = nn.EmbeddingBag(500_000, width, mode="sum")
        self.numbers = nn.Sequential(
            nn.BatchNorm1d(13), nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU()
        )
        whole = (len(sizes) + 2) * width
        self.down = nn.ModuleList([nn.Linear(whole, rank, bias=False) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(rank, whole) for _ in range(layers)])
        pairs = torch.triu_indices(len(sizes) + 2, len(sizes) + 2, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.pairs: Tensor
        self.deep = nn.Sequential(
            nn.Linear(whole + pairs.shape[1], 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1024),
            nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1),
        )  # fmt: skip
        self.rate = 0.0

    def forward(  # noqa: D102
        self, ids: Tensor, items: Tensor, weights: Tensor, numbers: Tensor, clicked: Tensor
    ) -> Tensor:
        parts = [
            table(ids[:, number : number + 1] % table.num_embeddings)  # type: ignore[operator]
            for number, table in enumerate(self.tables)
        ]
        # The histories as a single list, with where each one starts.
        starts = torch.arange(len(items), device=items.device) * items.shape[1]
        parts.append(self.history(items.flatten(), starts, per_sample_weights=weights.flatten()))
        parts.append(self.numbers(torch.log1p(numbers)).float())
        fields = torch.stack(parts, 1)
        start = fields.flatten(1)
        seen = start
        for down, up in zip(self.down, self.up, strict=True):
            seen = start * up(down(seen)) + seen
        both = torch.bmm(fields, fields.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.deep(torch.cat([seen, both.to(seen.dtype)], 1)).squeeze(1).float()
        loss = functional.binary_cross_entropy_with_logits(logits, clicked)
        self.rate = 0.99 * self.rate + 0.01 * logits.detach().sigmoid().mean().item()
        return loss


class CrossNetworkJob(WrittenJob):
    """Clicks on advertisements, with all embeddings in dense gradients."""

    name, micro_batch, network = "click_crosses", 65_536, CrossNetwork
    global_batch, samples = 65_536, 40_000_000

    def batch(self, size: int) -> dict[str, Tensor]:
        """Ids of which few are frequent, 20 items of history, and counts."""
        ids = (torch.rand(size, 26) ** 4 * 1_000_000).long()
        return {
            "ids": ids, "items": (torch.rand(size, 20) ** 3 * 500_000).long(),
            "weights": torch.rand(size, 20), "numbers": torch.rand(size, 13) * 100,
            "clicked": (torch.rand(size) < 0.03).float(),  # noqa: PLR2004
        }  # fmt: skip


class NoisyLinear(nn.Module):
    """A linear layer whose weights have learned noise."""

    def __init__(self, before: int, after: int, start: float = 0.5) -> None:
        super().__init__()
        self.before, self.after = before, after
        reach = 1 / math.sqrt(before)
        self.weight = nn.Parameter(torch.empty(after, before).uniform_(-reach, reach))
        self.weight_spread = nn.Parameter(torch.full((after, before), start * reach))
        self.bias = nn.Parameter(torch.empty(after).uniform_(-reach, reach))
        self.bias_spread = nn.Parameter(torch.full((after,), start * reach))
        self.register_buffer("noise_in", torch.zeros(before))
        self.register_buffer("noise_out", torch.zeros(after))
        self.noise_in: Tensor
        self.noise_out: Tensor

    def renew(self) -> None:
        """Draw other noise."""
        for noise in (self.noise_in, self.noise_out):
            drawn = torch.randn(noise.shape, device=noise.device)
            noise.copy_(drawn.sign().mul_(drawn.abs().sqrt_()))

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        weight = self.weight + self.weight_spread * self.noise_out.ger(self.noise_in)
        return functional.linear(seen, weight, self.bias + self.bias_spread * self.noise_out)


class ScreenUnit(nn.Module):
    """Two convolutions around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        updated: Tensor = seen + self.second(functional.relu(self.first(functional.relu(seen))))
        return updated


class ValueNetwork(nn.Module):
    """A distribution of returns for each action, from screens (Rainbow on an IMPALA network)."""

    def __init__(self, actions: int, atoms: int, widths: tuple[int, ...] = (64, 128, 128)) -> None:
        super().__init__()
        self.actions, self.atoms = actions, atoms
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((4, *widths)):
            layers += [nn.Conv2d(before, after, 3, 1, 1), nn.MaxPool2d(3, 2, 1)]
            layers += [ScreenUnit(after), ScreenUnit(after)]
        self.screen = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
        flat = 11 * 11 * widths[-1]
        self.value = nn.Sequential(NoisyLinear(flat, 512), nn.ReLU(), NoisyLinear(512, atoms))
        self.gain = nn.Sequential(NoisyLinear(flat, 512), nn.ReLU(), NoisyLinear(512, actions * atoms))

    def renew(self) -> None:
        """Draw other noise for all heads."""
        for layer in self.modules():
            if isinstance(layer, NoisyLinear):
                layer.renew()

    def forward(self, screen: Tensor) -> Tensor:
        """Return the log-probability of each atom."""
        seen = self.screen(screen)
        value = self.value(seen).view(-1, 1, self.atoms)
        gain = self.gain(seen).view(-1, self.actions, self.atoms)
        return functional.log_softmax((value + gain - gain.mean(1, keepdim=True)).float(), dim=2)


class DistributionalQ(nn.Module):
    """A Q-function of distributions with a slow target and shifted screens (C51 with DrQ)."""

    def __init__(self, actions: int = 18, atoms: int = 51, low: float = -10.0, high: float = 10.0) -> None:
        super().__init__()
        self.atoms, self.low, self.high = atoms, low, high
        self.step = (high - low) / (atoms - 1)
        self.register_buffer("support", torch.linspace(low, high, atoms))
        self.support: Tensor
        self.online, self.target = ValueNetwork(actions, atoms), ValueNetwork(actions, atoms)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    @staticmethod
    def shift(screen: Tensor, pad: int = 4) -> Tensor:
        """Move each screen by up to four pixels."""
        size, side = len(screen), screen.shape[-1]
        padded = functional.pad(screen, (pad,) * 4, "replicate")
        reach = 1.0 / (side + 2 * pad)
        line = torch.linspace(-1 + reach, 1 - reach, side + 2 * pad, device=screen.device)[:side]
        grid = line.repeat(side, 1)[..., None]
        grid = torch.cat([grid, grid.transpose(1, 0)], 2)[None].repeat(size, 1, 1, 1)
        moved = torch.randint(0, 2 * pad + 1, (size, 1, 1, 2), device=screen.device) * 2 * reach
        return functional.grid_sample(padded, grid + moved, padding_mode="zeros", align_corners=False)

    @torch.no_grad()
    def project(self, after: Tensor, reward: Tensor, going: Tensor) -> Tensor:
        """Return the distribution of the return after a step, on the atoms."""
        size = len(after)
        choice = (self.support * self.online(after).exp()).sum(2).argmax(1)
        self.target.renew()
        chance = self.target(after).exp()[torch.arange(size, device=after.device), choice]
        moved = reward[:, None] + going[:, None] * 0.99**3 * self.support[None]
        place = (moved.clamp(min=self.low, max=self.high) - self.low) / self.step
        lower, upper = place.floor().to(torch.int64), place.ceil().to(torch.int64)
        lower[(upper > 0) * (lower == upper)] -= 1
        upper[(lower < (self.atoms - 1)) * (lower == upper)] += 1
        made = chance.new_zeros(size, self.atoms)
        start = torch.linspace(0, (size - 1) * self.atoms, size, device=after.device).long()[:, None]
        made.view(-1).index_add_(0, (lower + start).view(-1), (chance * (upper.float() - place)).view(-1))
        made.view(-1).index_add_(0, (upper + start).view(-1), (chance * (place - lower.float())).view(-1))
        return made  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self) -> None:
        """Move the target towards the network."""
        for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
            old.lerp_(new, 0.005)

    def forward(  # noqa: D102, PLR0913, PLR0917 - what a buffer keeps
        self, before: Tensor, after: Tensor, action: Tensor, reward: Tensor, going: Tensor, weight: Tensor
    ) -> Tensor:
        self.update()
        self.online.renew()
        screens = self.shift(before.float().div_(255)), self.shift(after.float().div_(255))
        made = self.online(screens[0])[torch.arange(len(action), device=action.device), action]
        wanted = self.project(screens[1], reward, going)
        loss = -(wanted * made).sum(1)
        return (weight * loss).mean()  # type: ignore[no-any-return]


class DistributionalQJob(WrittenJob):
    """Updates of a Q-function from a replay buffer of games."""

    name, micro_batch, network = "distributional_q", 512, DistributionalQ
    global_batch = 512

    def batch(self, size: int) -> dict[str, Tensor]:
        """Four screens in bytes before and after a step, with the weights of a prioritized buffer."""
        screens = torch.randint(256, (2, size, 4, 84, 84), dtype=torch.uint8)
        return {
            "before": screens[0].clone(), "after": screens[1].clone(), "action": torch.randint(18, (size,)),
            "reward": torch.randn(size).clamp(-1, 1), "going": (torch.rand(size) > 0.01).float(),  # noqa: PLR2004
            "weight": torch.rand(size),
        }  # fmt: skip


def differentiate(made: Tensor, place: Tensor) -> Tensor:
    """Return the derivative of each number by its own place, to be differentiated again."""
    return torch.autograd.grad(made, place, torch.ones_like(made), create_graph=True, retain_graph=True)[0]


class PhysicsInformed(nn.Module):
    """A flow that obeys Navier-Stokes, by derivatives of derivatives (a modified MLP, in fp32)."""

    def __init__(self, width: int = 512, layers: int = 6, waves: int = 128, viscosity: float = 0.01) -> None:
        super().__init__()
        self.viscosity = viscosity
        self.register_buffer("waves", torch.randn(3, waves) * 2)
        self.waves: Tensor
        self.first, self.second = nn.Linear(2 * waves, width), nn.Linear(2 * waves, width)
        self.layers = nn.ModuleList(
            [nn.Linear(before, width) for before in (2 * waves, *[width] * (layers - 1))]
        )
        self.head = nn.Linear(width, 3)

    def evaluate(self, time: Tensor, right: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        """Return both velocities and the pressure."""
        angle = torch.cat([time, right, up], 1) @ self.waves
        seen = torch.cat([angle.sin(), angle.cos()], 1)
        left, other = torch.tanh(self.first(seen)), torch.tanh(self.second(seen))
        for layer in self.layers:
            gate = torch.tanh(layer(seen))
            seen = gate * left + (1 - gate) * other
        return self.head(seen).split(1, 1)  # type: ignore[no-any-return]

    def forward(self, inside: Tensor, edge: Tensor, edge_flow: Tensor) -> Tensor:  # noqa: D102
        with torch.autocast(inside.device.type, enabled=False):
            time, right, up = (part.clone().requires_grad_(True) for part in inside.split(1, 1))  # type: ignore[no-untyped-call]
            flow, rise, pressure = self.evaluate(time, right, up)
            flow_t, flow_x, flow_y = (differentiate(flow, place) for place in (time, right, up))
            rise_t, rise_x, rise_y = (differentiate(rise, place) for place in (time, right, up))
            pressure_x, pressure_y = differentiate(pressure, right), differentiate(pressure, up)
            flow_xx, flow_yy = differentiate(flow_x, right), differentiate(flow_y, up)
            rise_xx, rise_yy = differentiate(rise_x, right), differentiate(rise_y, up)
            residuals = (
                flow_t + flow * flow_x + rise * flow_y + pressure_x - self.viscosity * (flow_xx + flow_yy),
                rise_t + flow * rise_x + rise * rise_y + pressure_y - self.viscosity * (rise_xx + rise_yy),
                flow_x + rise_y,
            )
            # What happens early matters most (causal training).
            order = inside[:, :1].argsort(0).squeeze(1)
            momentum = (residuals[0] ** 2 + residuals[1] ** 2)[order].view(32, -1).mean(1)
            weight = torch.exp(-1.0 * (momentum.detach().cumsum(0) - momentum.detach()))
            given = torch.cat(self.evaluate(*edge.split(1, 1))[:2], 1)  # type: ignore[no-untyped-call]
            loss = (weight * momentum).mean() + (residuals[2] ** 2).mean()
            return loss + 100 * functional.mse_loss(given, edge_flow)


class PhysicsInformedJob(WrittenJob):
    """A flow from its equations alone."""

    name, micro_batch, network = "physics_informed", 16_384, PhysicsInformed
    global_batch, samples = 16_384, 10_000_000

    def batch(self, size: int) -> dict[str, Tensor]:
        """Points in time and space, and points at the edge with their flow."""
        return {"inside": torch.rand(size, 3), "edge": torch.rand(size, 3), "edge_flow": torch.randn(size, 2)}


def decompose(series: Tensor, kernel: int = 25) -> tuple[Tensor, Tensor]:
    """Return what remains of a series, and its moving mean."""
    front = series[:, :1].repeat(1, (kernel - 1) // 2, 1)
    end = series[:, -1:].repeat(1, (kernel - 1) // 2, 1)
    padded = torch.cat([front, series, end], 1)
    mean = functional.avg_pool1d(padded.permute(0, 2, 1), kernel, stride=1).permute(0, 2, 1)
    return series - mean, mean


class AutoCorrelation(nn.Module):
    """Values shifted by the delays at which queries and keys agree most, found by FFT (Autoformer)."""

    def __init__(self, width: int, heads: int, factor: int = 3) -> None:
        super().__init__()
        self.heads, self.factor = heads, factor
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.outward = nn.Linear(width, width), nn.Linear(width, width)

    def shift(self, values: Tensor, agreement: Tensor) -> Tensor:
        """Add values at the best delays of the batch."""
        count = int(self.factor * math.log(values.shape[-1]))
        mean = agreement.mean(1).mean(1)
        delays = torch.topk(mean.mean(0), count, dim=-1)[1]
        weights = torch.softmax(torch.stack([mean[:, delays[place]] for place in range(count)], -1), -1)
        total = torch.zeros_like(values).float()
        for place in range(count):
            moved = torch.roll(values, -int(delays[place]), -1)
            total = total + moved * weights[:, place, None, None, None]
        return total

    def forward(self, seen: Tensor, context: Tensor) -> Tensor:  # noqa: D102
        size, length, _ = seen.shape
        query = self.query(seen).view(size, length, self.heads, -1)
        key = self.key(context).view(size, context.shape[1], self.heads, -1)
        value = self.value(context).view(size, context.shape[1], self.heads, -1)
        if length > context.shape[1]:
            zeros = torch.zeros_like(query[:, : length - context.shape[1]]).float()
            key, value = torch.cat([key, zeros], 1), torch.cat([value, zeros], 1)
        else:
            key, value = key[:, :length], value[:, :length]
        first = torch.fft.rfft(query.permute(0, 2, 3, 1).contiguous().float(), dim=-1)
        second = torch.fft.rfft(key.permute(0, 2, 3, 1).contiguous().float(), dim=-1)
        agreement = torch.fft.irfft(first * torch.conj(second), n=length, dim=-1)
        mixed = self.shift(value.permute(0, 2, 3, 1).contiguous(), agreement).permute(0, 3, 1, 2)
        out: Tensor = self.outward(mixed.contiguous().view(size, length, -1))
        return out


class SeriesEncoderLayer(nn.Module):
    """Agreement of delays and a feed-forward layer, with the trend taken out after each."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attend, self.dropout = AutoCorrelation(width, heads), nn.Dropout(0.05)
        self.first, self.second = (
            nn.Conv1d(width, hidden, 1, bias=False),
            nn.Conv1d(hidden, width, 1, bias=False),
        )

    def widen(self, seen: Tensor) -> Tensor:
        """Return the feed-forward layer's output."""
        wide = self.dropout(functional.gelu(self.first(seen.transpose(-1, 1))))
        out: Tensor = self.dropout(self.second(wide).transpose(-1, 1))
        return out

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        seen, _ = decompose(seen + self.dropout(self.attend(seen, seen)))
        return decompose(seen + self.widen(seen))[0]


class SeriesDecoderLayer(SeriesEncoderLayer):
    """The same with a look at the encoder; the trends are added up."""

    def __init__(self, width: int, heads: int, hidden: int, channels: int) -> None:
        super().__init__(width, heads, hidden)
        self.cross = AutoCorrelation(width, heads)
        self.trend = nn.Conv1d(width, channels, 3, padding=1, padding_mode="circular", bias=False)

    def follow(self, seen: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Return the season and the trend of the channels."""
        seen, first = decompose(seen + self.dropout(self.attend(seen, seen)))
        seen, second = decompose(seen + self.dropout(self.cross(seen, past)))
        seen, third = decompose(seen + self.widen(seen))
        return seen, self.trend((first + second + third).permute(0, 2, 1)).transpose(1, 2)


class SeasonNorm(nn.Module):
    """A norm whose mean over time is taken out again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        normal: Tensor = self.norm(seen)
        return normal - normal.mean(1)[:, None].repeat(1, seen.shape[1], 1)


class SeasonForecaster(nn.Module):
    """Seasons by agreement of delays, trends by moving means."""

    def __init__(self, channels: int = 321, width: int = 512, ahead: int = 336) -> None:
        super().__init__()
        self.ahead = ahead
        self.inward = nn.ModuleList(
            [nn.Conv1d(channels, width, 3, padding=1, padding_mode="circular", bias=False) for _ in range(2)]
        )
        self.dates = nn.ModuleList([nn.Linear(4, width, bias=False) for _ in range(2)])
        self.encoder = nn.ModuleList([SeriesEncoderLayer(width, 8, 4 * width) for _ in range(2)])
        self.decoder = nn.ModuleList([SeriesDecoderLayer(width, 8, 4 * width, channels)])
        self.norms = nn.ModuleList([SeasonNorm(width) for _ in range(2)])
        self.head = nn.Linear(width, channels)

    def embed(self, number: int, series: Tensor, dates: Tensor) -> Tensor:
        """Return the features of a series and its dates."""
        seen: Tensor = self.inward[number](series.permute(0, 2, 1)).transpose(1, 2)
        embedded: Tensor = seen + self.dates[number](dates)
        return embedded

    def forward(self, past: Tensor, past_dates: Tensor, dates: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        label = past.shape[1] // 2
        season, trend = decompose(past)
        mean = past.mean(1, keepdim=True).repeat(1, self.ahead, 1)
        trend = torch.cat([trend[:, -label:], mean], 1)
        season = torch.cat([season[:, -label:], torch.zeros_like(mean)], 1)
        seen = self.embed(0, past, past_dates)
        for layer in self.encoder:
            seen = layer(seen)
        seen = self.norms[0](seen)
        made = self.embed(1, season, dates)
        for layer in self.decoder:
            made, moved = layer.follow(made, seen)  # type: ignore[operator]
            trend = trend + moved
        made = self.head(self.norms[1](made)) + trend
        return functional.mse_loss(made[:, -self.ahead :].float(), target)


class SeasonForecasterJob(WrittenJob):
    """Forecasts of the use of electricity."""

    name, micro_batch, network = "auto_correlation", 64, SeasonForecaster
    global_batch = 64

    def batch(self, size: int) -> dict[str, Tensor]:
        """Two weeks of 321 meters, and the two weeks after them."""
        return {
            "past": torch.randn(size, 336, 321), "past_dates": torch.randn(size, 336, 4),
            "dates": torch.randn(size, 504, 4), "target": torch.randn(size, 336, 321),
        }  # fmt: skip
