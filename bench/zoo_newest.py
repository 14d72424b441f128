"""Jobs of 2026 for bench/zoo.py: fine-tuning, distillation and networks that the other files do not have.

They were predicted before their first step ran, and timed then. No rule was made from them.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention

if TYPE_CHECKING:
    from bench.zoo_models import WrittenJob
else:
    # zoo.py has loaded it under this name.
    from trimtab_zoo_models import WrittenJob

LLAMA_WORDS, QWEN_WORDS = 128_256, 151_936
"""Published sizes of vocabularies."""


def pad_texts(words: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and a mask of texts between half and all of `length` long; the first one is whole."""
    lengths = torch.randint(length // 2, length + 1, (size,))
    lengths[0] = length
    return torch.randint(10, words, (size, length)), (torch.arange(length) < lengths[:, None]).long()


# -------------------------------------------------------------------------- fine-tuning language models


def import_transformers() -> Any:
    """Return the package: most of it has no types."""
    import transformers

    return transformers


class SentenceEncoder(nn.Module):
    """BERT with mean pooling; a query is compared with all positives and hard negatives of the batch."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_transformers()
        self.bert = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)

    def encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return a unit vector for each text."""
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return functional.normalize(mean.float(), dim=-1)

    def forward(  # noqa: D102
        self, query: Tensor, query_mask: Tensor, passage: Tensor, passage_mask: Tensor
    ) -> Tensor:
        anchors = self.encode(query, query_mask)
        # (samples, positive and negatives, tokens): positives come first in the scores.
        texts = self.encode(passage.transpose(0, 1).flatten(0, 1), passage_mask.transpose(0, 1).flatten(0, 1))
        scores = anchors @ texts.T * 20.0
        target = torch.arange(len(scores), device=scores.device)
        forth = functional.cross_entropy(scores, target)
        back = functional.cross_entropy(scores[:, : len(target)].T, target)
        return (forth + back) / 2


class SentenceEncoderJob(WrittenJob):
    """Sentence embeddings with three hard negatives for each query."""

    name, micro_batch, network = "sentence_embedding", 64, SentenceEncoder
    global_batch = 128

    def batch(self, size: int) -> dict[str, Tensor]:
        """Queries, each with a positive and three negatives."""
        query, query_mask = pad_texts(30_522, size, 64)
        passage, passage_mask = pad_texts(30_522, 4 * size, 192)
        return {
            "query": query, "query_mask": query_mask,
            "passage": passage.view(size, 4, -1), "passage_mask": passage_mask.view(size, 4, -1),
        }  # fmt: skip


class PreferenceModel(nn.Module):
    """A Llama that should prefer one of two answers more than its frozen copy does (DPO)."""

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        transformers = import_transformers()
        config = transformers.LlamaConfig(
            vocab_size=LLAMA_WORDS, hidden_size=2048, intermediate_size=8192, num_hidden_layers=8,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
            tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.beta = beta
        self.policy = transformers.LlamaForCausalLM(config)
        self.reference = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False).eval()

    @staticmethod
    def log_probability(model: Any, ids: Tensor, mask: Tensor, answer: Tensor) -> Tensor:
        """Return the log-probability of each answer."""
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        each = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2)
        return (each * answer[:, 1:]).sum(-1)

    def forward(self, ids: Tensor, mask: Tensor, answer: Tensor) -> Tensor:  # noqa: D102
        flat = ids.flatten(0, 1), mask.flatten(0, 1), answer.flatten(0, 1)
        with torch.no_grad():
            before = self.log_probability(self.reference, *flat).view(-1, 2)
        now = self.log_probability(self.policy, *flat).view(-1, 2)
        gain = (now[:, 0] - now[:, 1]) - (before[:, 0] - before[:, 1])
        return -functional.logsigmoid(self.beta * gain).mean()


class PreferenceJob(WrittenJob):
    """Direct preference optimization."""

    name, micro_batch, network = "preference_pairs", 4, PreferenceModel
    global_batch = 8

    def batch(self, size: int) -> dict[str, Tensor]:
        """Pairs of a chosen and a rejected answer to a prompt of 128 tokens."""
        ids, mask = pad_texts(LLAMA_WORDS, 2 * size, 512)
        answer = mask * (torch.arange(512) >= 128)  # noqa: PLR2004
        return {
            "ids": ids.view(size, 2, -1), "mask": mask.view(size, 2, -1), "answer": answer.view(size, 2, -1),
        }  # fmt: skip


class GroupedPolicy(nn.Module):
    """A Qwen3 with the clipped loss of GRPO and a penalty for leaving the reference."""

    def __init__(self, prompt: int = 256) -> None:
        super().__init__()
        transformers = import_transformers()
        self.prompt = prompt
        self.policy = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=QWEN_WORDS, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
                use_cache=False,
            )
        )  # fmt: skip

    def forward(  # noqa: D102
        self, ids: Tensor, mask: Tensor, before: Tensor, reference: Tensor, reward: Tensor
    ) -> Tensor:
        answers = ids.shape[1] - self.prompt
        logits = self.policy(input_ids=ids, attention_mask=mask, logits_to_keep=answers + 1).logits
        logits, chosen = logits[:, :-1] / 0.9, ids[:, self.prompt :]
        # A text at a time, so that not all log-softmaxes exist at once.
        now = torch.stack(
            [
                functional.log_softmax(text, -1).gather(-1, words[:, None]).squeeze(-1)
                for text, words in zip(logits, chosen, strict=True)
            ]
        ).float()
        groups = reward.view(-1, 4)
        gain = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        gain = gain.view(-1, 1)
        ratio = torch.exp(now - before)
        policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
        apart = torch.exp(reference - now) - (reference - now) - 1
        answer = mask[:, self.prompt :]
        return ((policy + 0.04 * apart) * answer).sum() / answer.sum().clamp(min=1)


class GroupedPolicyJob(WrittenJob):
    """A policy update of GRPO, with groups of four answers."""

    name, micro_batch, network = "grouped_policy", 8, GroupedPolicy
    global_batch = 16

    def batch(self, size: int) -> dict[str, Tensor]:
        """Prompts of 256 tokens with answers of up to 768."""
        ids, mask = pad_texts(QWEN_WORDS, size, 1024)
        return {
            "ids": ids, "mask": mask, "before": -torch.rand(size, 768) * 5,
            "reference": -torch.rand(size, 768) * 5, "reward": torch.rand(size),
        }  # fmt: skip


class DistilledDecoder(nn.Module):
    """A small Qwen2 that learns the distribution of a larger frozen one."""

    def __init__(self, temperature: float = 2.0) -> None:
        super().__init__()
        transformers = import_transformers()

        def decoder(width: int, hidden: int, layers: int, heads: int) -> Any:
            config = transformers.Qwen2Config(
                vocab_size=QWEN_WORDS, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
            )  # fmt: skip
            return transformers.Qwen2ForCausalLM(config)

        self.temperature = temperature
        self.student = decoder(896, 4864, 24, 14)
        self.teacher = decoder(1536, 8960, 28, 12).to(torch.bfloat16).requires_grad_(False).eval()

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        with torch.no_grad():
            taught = self.teacher(input_ids=ids).logits
        out = self.student(input_ids=ids, labels=ids)
        apart = functional.kl_div(
            functional.log_softmax(out.logits.float() / self.temperature, -1),
            functional.log_softmax(taught.float() / self.temperature, -1),
            reduction="none",
            log_target=True,
        )
        loss: Tensor = 0.5 * out.loss + 0.5 * self.temperature**2 * apart.sum(-1).mean()
        return loss


class DistilledDecoderJob(WrittenJob):
    """Distillation of a language model."""

    name, micro_batch, network = "distilled_decoder", 4, DistilledDecoder
    global_batch = 8

    def batch(self, size: int) -> dict[str, Tensor]:
        """Text."""
        return {"ids": torch.randint(QWEN_WORDS, (size, 1024))}


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 16, alpha: float = 32.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.dropout = nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        change = self.up(self.down(self.dropout(seen.to(self.down.weight.dtype)))) * self.scale
        updated: Tensor = self.base(seen) + change
        return updated


class AdaptedDecoder(nn.Module):
    """A frozen Llama in bf16 with adapters in all linear layers of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_transformers()
        config = transformers.LlamaConfig(
            vocab_size=LLAMA_WORDS, hidden_size=3072, intermediate_size=8192, num_hidden_layers=14,
            num_attention_heads=24, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
            tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.decoder = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
        for block in self.decoder.model.layers:
            for part in (block.self_attn, block.mlp):
                for name, layer in list(part.named_children()):
                    if isinstance(layer, nn.Linear):
                        setattr(part, name, AdaptedLinear(layer))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        loss: Tensor = self.decoder(input_ids=ids, attention_mask=mask, labels=labels).loss
        return loss


class AdaptedDecoderJob(WrittenJob):
    """Fine-tuning with adapters that are written by hand."""

    name, micro_batch, network = "adapted_decoder", 4, AdaptedDecoder
    global_batch = 8

    def batch(self, size: int) -> dict[str, Tensor]:
        """Conversations that are padded."""
        ids, mask = pad_texts(LLAMA_WORDS, size, 1024)
        return {"ids": ids, "mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# ------------------------------------------------------------------------------ language models by hand


def rotate(heads: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary positions for (batch, heads, tokens, width)."""
    length, half = heads.shape[-2], heads.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=heads.device) / half)
    angle = torch.arange(length, device=heads.device)[:, None] * rates
    cosine, sine = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    left, right = heads.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


class GatedPerceptron(nn.Module):
    """The feed-forward layer of Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        out: Tensor = self.down(functional.silu(self.gate(seen)) * self.up(seen))
        return out


class RotaryAttention(nn.Module):
    """Attention with rotary positions and normalized queries and keys."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inward = nn.Linear(width, 3 * width, bias=False)
        self.outward = nn.Linear(width, width, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
        """Attend to all tokens, or to all earlier ones."""
        del blocks
        return functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def forward(self, seen: Tensor, blocks: Any = None) -> Tensor:  # noqa: D102
        query, key, value = self.inward(seen).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query = rotate(self.query_norm(query)).to(value.dtype)
        key = rotate(self.key_norm(key)).to(value.dtype)
        out: Tensor = self.outward(self.mix(query, key, value, blocks).transpose(1, 2).flatten(2))
        return out


class SortedExperts(nn.Module):
    """Tokens are sorted by expert, so that each expert takes one slice; no token is dropped."""

    def __init__(self, width: int, hidden: int, count: int = 16, top: int = 2) -> None:
        super().__init__()
        self.count, self.top = count, top
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList([GatedPerceptron(width, hidden) for _ in range(count)])

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        flat = seen.flatten(0, 1)
        share = self.router(flat).float().softmax(-1)
        weight, chosen = share.topk(self.top, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        token = order // self.top
        slices = torch.split(flat[token], counts.tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, slices, strict=True)])
        done = done * weight.flatten()[order, None].to(done.dtype)
        mixed = torch.zeros_like(flat).index_add_(0, token, done.to(flat.dtype))
        balance = self.count * (share.mean(0) * counts / counts.sum()).sum()
        return mixed.view_as(seen), balance


class SortedExpertModel(nn.Module):
    """A decoder with sorted experts in every block."""

    def __init__(self, width: int = 1024, layers: int = 8, words: int = 50_304) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2 * layers + 1)])
        self.attends = nn.ModuleList([RotaryAttention(width, 16, causal=True) for _ in range(layers)])
        self.experts = nn.ModuleList([SortedExperts(width, 1408) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        seen, balance = self.embed(tokens), []
        for number, (attend, experts) in enumerate(zip(self.attends, self.experts, strict=True)):
            seen = seen + attend(self.norms[2 * number](seen))
            mixed, uneven = experts(self.norms[2 * number + 1](seen))
            seen = seen + mixed
            balance.append(uneven)
        logits = self.head(self.norms[-1](seen))[:, :-1].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.01 * torch.stack(balance).mean()


class SortedExpertJob(WrittenJob):
    """A mixture of experts without dropped tokens."""

    name, micro_batch, network = "sorted_experts", 8, SortedExpertModel
    global_batch = 16

    def batch(self, size: int) -> dict[str, Tensor]:
        """Text."""
        return {"tokens": torch.randint(50_304, (size, 2048))}


@functools.cache
def compiled_flex() -> Any:
    """Return flex_attention as its documentation says to call it: compiled."""
    return torch.compile(flex_attention.flex_attention, dynamic=False)


class WindowAttention(RotaryAttention):
    """Attention to the last 1024 tokens through flex_attention."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
        """Attend within the window."""
        out: Tensor = compiled_flex()(query, key, value, block_mask=blocks)
        return out


class WindowDecoder(nn.Module):
    """A decoder whose layers see a window, except for every fourth."""

    def __init__(self, width: int = 1024, layers: int = 12, words: int = 65_536) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2 * layers + 1)])
        self.attends = nn.ModuleList(
            [
                (RotaryAttention if number % 4 == 3 else WindowAttention)(width, 16, causal=True)  # noqa: PLR2004
                for number in range(layers)
            ]
        )
        self.wides = nn.ModuleList([GatedPerceptron(width, 2816) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        def is_near(_: Tensor, __: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & (row - column < 1024)  # noqa: PLR2004

        length = tokens.shape[1]
        blocks = flex_attention.create_block_mask(
            is_near, None, None, length, length, device=tokens.device.type
        )
        seen = self.embed(tokens)
        for number, (attend, wide) in enumerate(zip(self.attends, self.wides, strict=True)):
            seen = seen + attend(self.norms[2 * number](seen), blocks)
            seen = seen + wide(self.norms[2 * number + 1](seen))
        logits = 30 * torch.tanh(self.head(self.norms[-1](seen))[:, :-1].float() / 30)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class WindowDecoderJob(WrittenJob):
    """A decoder with sliding windows."""

    name, micro_batch, network = "sliding_window", 2, WindowDecoder
    global_batch = 4

    def batch(self, size: int) -> dict[str, Tensor]:
        """Long texts."""
        return {"tokens": torch.randint(65_536, (size, 8192))}


class MaskedDiffusion(nn.Module):
    """Words that a random share of masks hides are guessed at once (LLaDA)."""

    def __init__(self, width: int = 768, layers: int = 12, words: int = 50_304) -> None:
        super().__init__()
        self.mask = words - 1
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2 * layers + 1)])
        self.attends = nn.ModuleList([RotaryAttention(width, 12, causal=False) for _ in range(layers)])
        self.wides = nn.ModuleList([GatedPerceptron(width, 2048) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        size, length = tokens.shape
        time = torch.rand(size, 1, device=tokens.device) * 0.999 + 0.001
        hidden = torch.rand(size, length, device=tokens.device) < time
        seen = self.embed(torch.where(hidden, self.mask, tokens))
        for number, (attend, wide) in enumerate(zip(self.attends, self.wides, strict=True)):
            seen = seen + attend(self.norms[2 * number](seen))
            seen = seen + wide(self.norms[2 * number + 1](seen))
        logits = self.head(self.norms[-1](seen)[hidden])
        each = functional.cross_entropy(logits.float(), tokens[hidden], reduction="none")
        loss: Tensor = (each / time.expand(-1, length)[hidden]).sum() / tokens.numel()
        return loss


class MaskedDiffusionJob(WrittenJob):
    """A language model by masked diffusion."""

    name, micro_batch, network = "masked_diffusion", 16, MaskedDiffusion
    global_batch = 32

    def batch(self, size: int) -> dict[str, Tensor]:
        """Text."""
        return {"tokens": torch.randint(50_000, (size, 1024))}


class DeltaLayer(nn.Module):
    """A linear attention that overwrites what its keys held before, in chunks (gated DeltaNet)."""

    def __init__(self, width: int, heads: int, chunk: int = 64) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.inward, self.outward = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.short = nn.Conv1d(3 * width, 3 * width, 4, groups=3 * width, padding=3)
        self.rates, self.gate = nn.Linear(width, 2 * heads), nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width // heads)

    def forward(self, seen: Tensor) -> Tensor:  # noqa: D102
        length = seen.shape[1]
        parts = functional.silu(self.short(self.inward(seen).transpose(1, 2))[..., :length]).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2).unflatten(2, (-1, self.chunk)).float()  # type: ignore[no-untyped-call]
            for part in parts.chunk(3, -1)
        )
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        strength, decay = (
            rate.transpose(1, 2).unflatten(2, (-1, self.chunk))
            for rate in self.rates(seen).float().chunk(2, -1)
        )
        strength, fade = strength.sigmoid()[..., None], functional.logsigmoid(decay).cumsum(-1)
        between = (fade[..., :, None] - fade[..., None, :]).tril().exp().tril()
        unit = torch.eye(self.chunk, device=seen.device)
        inner = ((strength * key) @ key.transpose(-1, -2) * between).tril(-1)
        solved = torch.linalg.solve_triangular(
            unit + inner,
            torch.cat([strength * value, strength * key * fade[..., None].exp()], -1),
            upper=False,
        )
        fresh, stale = solved.chunk(2, -1)
        local = query @ key.transpose(-1, -2) * between
        state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
        outs = []
        for number in range(key.shape[2]):
            change = fresh[:, :, number] - stale[:, :, number] @ state
            now = fade[:, :, number]
            outs.append((query[:, :, number] * now[..., None].exp()) @ state + local[:, :, number] @ change)
            kept = key[:, :, number] * (now[..., -1:] - now).exp()[..., None]
            state = state * now[..., -1, None, None].exp() + kept.transpose(-1, -2) @ change
        mixed = self.norm(torch.stack(outs, 2).flatten(2, 3)).transpose(1, 2).flatten(2)
        out: Tensor = self.outward(mixed.to(seen.dtype) * functional.silu(self.gate(seen)))
        return out


class DeltaModel(nn.Module):
    """A language model of gated delta layers."""

    def __init__(self, width: int = 1024, layers: int = 6, words: int = 32_768) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2 * layers + 1)])
        self.mixers = nn.ModuleList([DeltaLayer(width, 8) for _ in range(layers)])
        self.wides = nn.ModuleList([GatedPerceptron(width, 2816) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        seen = self.embed(tokens)
        for number, (mixer, wide) in enumerate(zip(self.mixers, self.wides, strict=True)):
            seen = seen + mixer(self.norms[2 * number](seen))
            seen = seen + wide(self.norms[2 * number + 1](seen))
        logits = self.head(self.norms[-1](seen))[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class DeltaJob(WrittenJob):
    """A language model with a recurrence over chunks."""

    name, micro_batch, network = "delta_recurrence", 8, DeltaModel
    global_batch = 16

    def batch(self, size: int) -> dict[str, Tensor]:
        """Text."""
        return {"tokens": torch.randint(32_768, (size, 1024))}


class SparseDictionary(nn.Module):
    """Activations as sums of a few of many directions (TopK sparse autoencoder)."""

    fired: Tensor

    def __init__(self, width: int = 2304, features: int = 49_152, top: int = 64) -> None:
        super().__init__()
        self.top = top
        self.bias = nn.Parameter(torch.zeros(width))
        self.encoder = nn.Linear(width, features)
        self.decoder = nn.Parameter(self.encoder.weight.detach().clone())
        self.register_buffer("fired", torch.zeros(features))

    def forward(self, activation: Tensor) -> Tensor:  # noqa: D102
        strength = functional.relu(self.encoder(activation - self.bias))
        best, which = strength.topk(self.top, -1, sorted=False)
        sparse = torch.zeros_like(strength).scatter_(-1, which, best)
        with torch.no_grad():
            self.fired.mul_(0.999).add_((sparse > 0).float().mean(0))
        made = sparse @ self.decoder + self.bias
        apart = (made.float() - activation).square().sum(-1)
        loss: Tensor = (apart / (activation - activation.mean(0)).square().sum(-1)).mean()
        return loss


class SparseDictionaryJob(WrittenJob):
    """A sparse autoencoder of activations."""

    name, micro_batch, network = "sparse_dictionary", 16_384, SparseDictionary
    global_batch = 32_768
    samples = 100_000_000

    def batch(self, size: int) -> dict[str, Tensor]:
        """Activations of tokens."""
        return {"activation": torch.randn(size, 2304)}


# ---------------------------------------------------------------------------------------------- images


class SqueezedBlock(nn.Module):
    """An inverted bottleneck with a depthwise convolution, squeeze-excite and stochastic depth."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, wider: int, drop: float) -> None:  # noqa: PLR0913, PLR0917
        super().__init__()
        hidden = wider * before
        self.skips, self.drop = stride == 1 and before == after, drop
        self.widen = nn.Sequential(
            nn.Conv2d(before, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden), nn.SiLU(inplace=True),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, before // 4, 1), nn.SiLU(inplace=True),
            nn.Conv2d(before // 4, hidden, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.narrow = nn.Sequential(nn.Conv2d(hidden, after, 1, bias=False), nn.BatchNorm2d(after))

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        seen = self.depthwise(self.widen(image))
        seen = self.narrow(seen * self.squeeze(seen))
        if not self.skips:
            return seen  # type: ignore[no-any-return]
        if self.training and self.drop:
            stays = seen.new_empty(len(seen), 1, 1, 1).bernoulli_(1 - self.drop).div_(1 - self.drop)
            seen = seen * stays
        updated: Tensor = image + seen
        return updated


class SqueezedNet(nn.Module):
    """A classifier with EfficientNet-B2's widths and depths."""

    STAGES: ClassVar = (
        (24, 2, 3, 2, 6), (48, 3, 5, 2, 6), (88, 4, 3, 2, 6), (120, 4, 5, 1, 6), (208, 5, 5, 2, 6),
        (352, 2, 3, 1, 6),
    )  # fmt: skip
    """Width, layers, kernel, stride and how much wider the bottleneck is."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        before = 32
        for after, layers, kernel, stride, wider in self.STAGES:
            for number in range(layers):
                blocks.append(
                    SqueezedBlock(
                        before, after, kernel, 1 if number else stride, wider, 0.2 * len(blocks) / 20
                    )
                )
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(
            nn.Conv2d(before, 1408, 1, bias=False), nn.BatchNorm2d(1408), nn.SiLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(1408, classes),
        )  # fmt: skip

    def forward(self, image: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        share, other = 0.8, torch.randperm(len(image), device=image.device)
        image = image.to(memory_format=torch.channels_last)
        logits = self.last(self.blocks(self.stem(share * image + (1 - share) * image[other])))
        first, second = (
            functional.cross_entropy(logits.float(), target, label_smoothing=0.1)
            for target in (label, label[other])
        )
        return share * first + (1 - share) * second


class SqueezedJob(WrittenJob):
    """Depthwise convolutions in channels_last with mixed-up images."""

    name, micro_batch, network = "squeezed_depthwise", 192, SqueezedNet
    global_batch = 384

    def model(self) -> nn.Module:
        """The network in channels_last."""
        network: nn.Module = self.network()
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images with labels."""
        return {"image": torch.randn(size, 3, 260, 260), "label": torch.randint(1000, (size,))}


class TimedConvNext(nn.Module):
    """A ConvNeXt block that a time shifts and scales."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.GroupNorm(8, width)
        self.time = nn.Linear(times, 2 * width)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-2))

    def forward(self, image: Tensor, time: Tensor) -> Tensor:  # noqa: D102
        scale, shift = self.time(time)[..., None, None].chunk(2, 1)
        seen = self.norm(self.depthwise(image)) * (1 + scale) + shift
        updated: Tensor = image + self.scale * self.down(functional.silu(self.up(seen)))
        return updated


class ConvNextUNet(nn.Module):
    """A denoiser of images with the weights of EDM."""

    def __init__(self, widths: tuple[int, ...] = (96, 192, 384, 768), times: int = 384) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(64, times), nn.SiLU(), nn.Linear(times, times), nn.SiLU())
        self.stem, self.head = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.last = nn.Sequential(nn.GroupNorm(8, widths[0]), nn.SiLU())

        def stage(width: int) -> nn.ModuleList:
            return nn.ModuleList([TimedConvNext(width, times) for _ in range(2)])

        self.down, self.up = nn.ModuleList(map(stage, widths)), nn.ModuleList(map(stage, widths[-2::-1]))
        pairs = list(itertools.pairwise(widths))
        self.shrink = nn.ModuleList([nn.Conv2d(*pair, 2, 2) for pair in pairs])
        self.grow = nn.ModuleList([nn.Conv2d(2 * low + high - low, low, 1) for low, high in reversed(pairs)])

    def forward(self, image: Tensor) -> Tensor:  # noqa: D102
        noise = (torch.randn(len(image), device=image.device) * 1.2 - 1.2).exp()
        level = noise[:, None, None, None]
        noisy = image + level * torch.randn_like(image)
        rates = torch.exp(torch.linspace(0, 6, 32, device=image.device))
        waves = noise.log()[:, None] * 0.25 * rates
        time = self.times(torch.cat([waves.cos(), waves.sin()], -1))
        skips, seen = [], self.stem(noisy / (level.square() + 0.25).sqrt())
        for number, blocks in enumerate(self.down):
            seen = self.shrink[number - 1](seen) if number else seen
            for block in blocks:  # type: ignore[attr-defined]
                seen = block(seen, time)
            skips.append(seen)
        skips.pop()
        for grow, blocks in zip(self.grow, self.up, strict=True):
            seen = functional.interpolate(seen, scale_factor=2, mode="nearest")
            seen = grow(torch.cat([seen, skips.pop()], 1))
            for block in blocks:  # type: ignore[attr-defined]
                seen = block(seen, time)
        out = self.head(self.last(seen)).float()
        made = 0.25 / (level.square() + 0.25) * noisy + level * 0.5 / (level.square() + 0.25).sqrt() * out
        weight = (level.square() + 0.25) / (level * 0.5).square()
        loss: Tensor = (weight * (made - image).square()).mean()
        return loss


class ConvNextUNetJob(WrittenJob):
    """Diffusion of images by a U-Net of ConvNeXt blocks."""

    name, micro_batch, network = "convnext_unet", 32, ConvNextUNet
    global_batch = 64

    def batch(self, size: int) -> dict[str, Tensor]:
        """Images."""
        return {"image": torch.randn(size, 3, 128, 128)}


class FlowField(nn.Module):
    """The change of an image at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, width) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Conv2d(width + 1, width, 3, padding=1) for _ in range(2)])

    def forward(self, time: float, seen: Tensor) -> Tensor:  # noqa: D102
        for norm, layer in zip(self.norms, self.layers, strict=True):
            seen = functional.silu(norm(seen))
            seen = layer(torch.cat([seen, torch.full_like(seen[:, :1], time)], 1))
        return seen


class DifferentialNet(nn.Module):
    """One block that is integrated over eight Runge-Kutta steps (neural ODE)."""

    def __init__(self, width: int = 128, steps: int = 8, classes: int = 100) -> None:
        super().__init__()
        self.steps, self.field = steps, FlowField(width)
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.GroupNorm(32, width), nn.SiLU())
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:  # noqa: D102
        seen, step = self.stem(image).float(), 1 / self.steps
        for number in range(self.steps):
            time = number * step
            first = self.field(time, seen)
            second = self.field(time + step / 2, seen + step / 2 * first)
            third = self.field(time + step / 2, seen + step / 2 * second)
            fourth = self.field(time + step, seen + step * third)
            seen = seen + step / 6 * (first + 2 * second + 2 * third + fourth)
        return functional.cross_entropy(self.head(seen.mean((2, 3))).float(), label)


class DifferentialJob(WrittenJob):
    """A neural ODE."""

    name, micro_batch, network = "neural_ode", 128, DifferentialNet
    global_batch = 256

    def batch(self, size: int) -> dict[str, Tensor]:
        """Small images with labels."""
        return {"image": torch.randn(size, 3, 64, 64), "label": torch.randint(100, (size,))}


# ------------------------------------------------------------------------------------------ sound, series


class ResidualUnit(nn.Module):
    """Two convolutions, the first of them dilated."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ELU(), nn.Conv1d(width, width // 2, 3, padding=reach, dilation=reach),
            nn.ELU(), nn.Conv1d(width // 2, width, 1),
        )  # fmt: skip

    def forward(self, sound: Tensor) -> Tensor:  # noqa: D102
        updated: Tensor = sound + self.layers(sound)
        return updated


class ResidualCodec(nn.Module):
    """Sound through eight codebooks, each of which codes what the last one left over."""

    def __init__(self, width: int = 32, strides: tuple[int, ...] = (2, 4, 5, 8), code: int = 128) -> None:
        super().__init__()
        down: list[nn.Module] = [nn.Conv1d(1, width, 7, padding=3)]
        up: list[nn.Module] = [nn.Conv1d(width, 1, 7, padding=3), nn.ELU()]
        for stride in strides:
            kernel, pad = 2 * stride, (stride + 1) // 2
            down += [*(ResidualUnit(width, reach) for reach in (1, 3, 9)), nn.ELU()]
            down += [nn.Conv1d(width, 2 * width, kernel, stride, pad)]
            up += [ResidualUnit(width, reach) for reach in (9, 3, 1)]
            up += [nn.ConvTranspose1d(2 * width, width, kernel, stride, pad, stride % 2), nn.ELU()]
            width *= 2
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*reversed(up))
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True)
        self.inward, self.outward = nn.Linear(width, code), nn.Conv1d(code, width, 1)
        self.books = nn.ModuleList([nn.Embedding(1024, code) for _ in range(8)])

    def quantise(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the nearest codes, and how far they are."""
        rest, total, loss = seen, torch.zeros_like(seen), seen.new_zeros(())
        for book in self.books:
            which = torch.cdist(rest.flatten(0, 1), book.weight).argmin(-1).view(rest.shape[:2])  # type: ignore[arg-type]
            near = book(which)
            loss = loss + functional.mse_loss(near, rest.detach())
            loss = loss + 0.25 * functional.mse_loss(rest, near.detach())
            total, rest = total + near, rest - near.detach()
        return seen + (total - seen).detach(), loss

    def forward(self, sound: Tensor) -> Tensor:  # noqa: D102
        seen = self.encoder(sound[:, None]).transpose(1, 2)
        seen = seen + self.recurrent(seen)[0]
        codes, loss = self.quantise(self.inward(seen).float())
        made = self.decoder(self.outward(codes.transpose(1, 2))).squeeze(1).float()
        loss = loss + functional.l1_loss(made, sound)
        for size in (2048, 1024, 512, 256, 128):
            window = torch.hann_window(size, device=sound.device)
            first, second = (
                torch.stft(wave, size, size // 4, window=window, return_complex=True).abs()
                for wave in (made, sound)
            )
            loss = loss + functional.l1_loss(first, second)
            loss = loss + (first.clamp(min=1e-5).log() - second.clamp(min=1e-5).log()).abs().mean()
        return loss


class ResidualCodecJob(WrittenJob):
    """A codec of sound with residual vector quantization."""

    name, micro_batch, network = "residual_codec", 24, ResidualCodec
    global_batch = 48

    def batch(self, size: int) -> dict[str, Tensor]:
        """Two seconds at 24 kHz."""
        return {"sound": torch.randn(size, 48_000) * 0.1}


class ForecastStack(nn.Module):
    """Blocks that each explain a part of the past and add to the future (N-BEATS)."""

    def __init__(self, past: int = 336, future: int = 96, width: int = 512, blocks: int = 30) -> None:
        super().__init__()
        self.past, self.future = past, future
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                    nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                    nn.Linear(width, past + future, bias=False),
                )
                for _ in range(blocks)
            ]
        )  # fmt: skip

    def forward(self, series: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        level = series.mean(1, keepdim=True)
        spread = series.std(1, keepdim=True) + 1e-5
        rest = (series - level) / spread
        total = torch.zeros_like(target)
        for block in self.blocks:
            explained, more = block(rest).split((self.past, self.future), -1)
            rest, total = rest - explained, total + more
        made = total * spread + level
        loss: Tensor = 200 * ((made - target).abs() / (made.abs() + target.abs() + 1e-5).detach()).mean()
        return loss


class ForecastStackJob(WrittenJob):
    """Forecasts of many small series, where the host has most of the work."""

    name, micro_batch, network = "forecast_stack", 1024, ForecastStack
    global_batch = 2048

    def batch(self, size: int) -> dict[str, Tensor]:
        """Series and how they go on."""
        return {"series": torch.randn(size, 336), "target": torch.randn(size, 96)}


# ---------------------------------------------------------------------------------------------- atoms


class VectorMessage(nn.Module):
    """Atoms send each other numbers and directions (PaiNN)."""

    def __init__(self, width: int, waves: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width))
        self.filter = nn.Linear(waves, 3 * width)
        self.left, self.right = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(  # noqa: D102, PLR0913, PLR0917
        self, kind: Tensor, arrow: Tensor, source: Tensor, target: Tensor, wave: Tensor, way: Tensor
    ) -> tuple[Tensor, Tensor]:
        sent = self.message(kind)[source] * self.filter(wave)
        plain, along, aside = sent.float().chunk(3, -1)
        moved = aside[:, None] * way[..., None] + along[:, None] * arrow[source]
        kind = kind + torch.zeros_like(kind).index_add_(0, target, plain)
        arrow = arrow + torch.zeros_like(arrow).index_add_(0, target, moved)
        left, right = self.left(arrow).float(), self.right(arrow).float()
        length = (right.square().sum(1) + 1e-8).sqrt()
        scale, mixed, shift = self.update(torch.cat([kind, length], -1)).float().chunk(3, -1)
        return kind + shift + mixed * (left * right).sum(1), arrow + scale[:, None] * left


class ForceField(nn.Module):
    """Energies of molecules, and forces as their derivatives, which are trained as well."""

    def __init__(self, width: int = 128, layers: int = 4, waves: int = 20, reach: float = 5.0) -> None:
        super().__init__()
        self.waves, self.reach = waves, reach
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList([VectorMessage(width, waves) for _ in range(layers)])
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, 1))

    def forward(  # noqa: D102
        self, number: Tensor, place: Tensor, edges: Tensor, energy: Tensor, force: Tensor
    ) -> Tensor:
        size, atoms = number.shape
        place = place.flatten(0, 1).detach().requires_grad_()
        start = torch.arange(size, device=edges.device)[:, None] * atoms
        source, target = (edges[:, side] + start for side in (0, 1))
        source, target = source.flatten(), target.flatten()
        apart = place[source] - place[target]
        length = (apart.square().sum(-1, keepdim=True) + 1e-8).sqrt()
        order = torch.arange(1, self.waves + 1, device=place.device)
        wave = torch.sin(order * math.pi * length / self.reach) / length
        wave = wave * (0.5 * (torch.cos(math.pi * length / self.reach) + 1)).where(length < self.reach, 0.0)
        kind = self.embed(number.flatten())
        arrow = kind.new_zeros(len(kind), 3, kind.shape[-1])
        for layer in self.layers:
            kind, arrow = layer(kind, arrow, source, target, wave, apart / length)
        made = self.head(kind).float().view(size, atoms).sum(1)
        slope = torch.autograd.grad(made.sum(), place, create_graph=True)[0]
        return functional.mse_loss(made, energy) + 100 * functional.l1_loss(-slope.view_as(force), force)


class ForceFieldJob(WrittenJob):
    """An interatomic potential with forces."""

    name, micro_batch, network = "force_field", 64, ForceField
    global_batch = 128

    def batch(self, size: int) -> dict[str, Tensor]:
        """Molecules of 32 atoms with 16 neighbours each."""
        target = torch.arange(32).repeat_interleave(16).expand(size, -1)
        source = (target + torch.randint(1, 32, (size, 512))) % 32
        return {
            "number": torch.randint(1, 100, (size, 32)), "place": torch.rand(size, 32, 3) * 6,
            "edges": torch.stack([source, target], 1), "energy": torch.randn(size),
            "force": torch.randn(size, 32, 3),
        }  # fmt: skip
