"""bridge: two frozen language models that learn to read the same few latents, through one small encoder.

Bytes go through an encoder into 32 latents; an adapter a model turns them into a prefix in that model's
width; the model then has to say its answer. Gradients flow through the frozen models and stop at the
encoder and the adapters, the only parts that learn. The loss is a sum over the two models.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from trimtab.jobs.head import IGNORED, token_losses
from trimtab.jobs.job import Job
from trimtab.jobs.synthetic import Synthetic, integer
from trimtab.jobs.transformer_models import library

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES = 256
CLASSES = 8
"""Kinds of sample in the made-up data."""
FORCED, AHEAD, TAUGHT = 1.0, 0.5, 1.0
"""What the parts of a model's loss weigh."""
TEMPERATURE = 2.0


class Pooler(nn.Module):
    """A few learned queries, and what they find in a long sequence."""

    def __init__(self, latents: int, width: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, width) / math.sqrt(width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.gate = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        queries = self.queries.expand(x.size(0), -1, -1)
        found, _ = self.attention(queries, x, x, key_padding_mask=padded, need_weights=False)
        x = self.norm(queries + torch.sigmoid(self.gate(found)) * found)
        return self.last_norm(x + self.narrow(functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """From bytes to latents."""

    waves: torch.Tensor

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        width = job.latent_width
        self.bytes = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, job.encoder_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(job.encoder_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.pooler = Pooler(job.latents, width, job.encoder_heads)
        self.register_buffer("waves", _waves(job.source, width), persistent=False)

    def forward(self, source: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        padded = torch.arange(source.size(1), device=source.device) >= length[:, None]
        x = self.bytes(source) + self.waves
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padded)
        return self.pooler(self.norm(x), padded)


def _waves(length: int, width: int) -> torch.Tensor:
    """Sines and cosines of every position, from fast to slow."""
    speeds = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Adapter(nn.Module):
    """From latents to a prefix that a frozen model reads as if it were words."""

    def __init__(self, job: Bridge, width: int) -> None:
        super().__init__()
        narrow = job.latent_width
        self.position = nn.Parameter(torch.randn(job.latents, narrow) * 0.02)
        self.length = nn.Linear(1, narrow)
        self.norm = nn.LayerNorm(narrow)
        self.deep = nn.Sequential(
            nn.Linear(narrow, 2 * narrow),
            nn.GELU(),
            nn.Linear(2 * narrow, 2 * narrow),
            nn.GELU(),
            nn.Linear(2 * narrow, width),
        )
        self.skip = nn.Linear(narrow, width)
        self.film_scale = nn.Linear(narrow, width)
        self.film_shift = nn.Linear(narrow, width)
        self.last_norm = nn.LayerNorm(width)
        # As large as the words that the model is used to.
        self.scale = nn.Parameter(torch.full((), job.spread))

    def forward(self, latents: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """`share` is how long the answer is, of the longest."""
        x = self.norm(latents + self.position + self.length(share[:, None])[:, None])
        whole = x.mean(dim=1, keepdim=True)
        y = self.deep(x) + self.skip(x)
        y = y * (1 + self.film_scale(whole)) + self.film_shift(whole)
        return self.last_norm(y) * self.scale


class BridgeModel(nn.Module):
    """The encoder, the adapters, and two frozen models under their own names."""

    llama: nn.Module | None
    qwen: nn.Module | None

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        self.job = job
        self.encoder = Encoder(job)
        self.adapters = nn.ModuleDict(
            {name: Adapter(job, getattr(job, name)["hidden_size"]) for name in job.branches}
        )
        for name, model in job.frozen_models():
            setattr(self, name, model.requires_grad_(False).eval())

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The loss of every model that is here."""
        latents = self.encoder(batch["source"], batch["source_length"])
        # A model that another rank keeps is None, or a stand-in that is false.
        here = [name for name in self.job.branches if getattr(self, name)]
        return {name: self.branch_loss(name, latents, batch["answers"][name]) for name in here}

    def branch_loss(self, name: str, latents: torch.Tensor, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over samples of what one model's answer costs."""
        model: Any = getattr(self, name)
        ids, length = answer["ids"], answer["length"]
        words = model.get_input_embeddings()
        prefix = self.adapters[name](latents, length / ids.size(1)).to(words.weight.dtype)
        hidden = self._read(model, torch.cat([prefix, words(ids[:, :-1])], dim=1))
        # The last of the prefix says the first token.
        hidden = hidden[:, prefix.size(1) - 1 :]
        unsaid = torch.arange(ids.size(1), device=ids.device) >= length[:, None]
        targets = ids.masked_fill(unsaid, IGNORED)
        losses = token_losses(hidden, model.lm_head.weight, targets, pieces=self.job.pieces)
        total = FORCED * (losses.sum(dim=1) / length).mean()
        taught = self._taught(model, words, answer) if self.job.teacher else None
        for step in range(self.job.ahead):
            text = torch.cat([prefix, words(ids[:, :step])], dim=1)
            logits = model.lm_head(self._read(model, text)[:, -1]).float()
            total = total + AHEAD * functional.cross_entropy(logits, ids[:, step]) / self.job.ahead
            if taught is not None:
                total = total + TAUGHT * _distance(logits, taught[:, step]) / self.job.ahead
        return total

    @staticmethod
    def _read(model: Any, embedded: torch.Tensor) -> torch.Tensor:
        return model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _taught(self, model: Any, words: Any, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the same model would say after the text itself, for the first tokens of the answer."""
        text = torch.cat([answer["prompt"], answer["ids"][:, : self.job.ahead - 1]], dim=1)
        logits: torch.Tensor = model.lm_head(self._read(model, words(text))[:, -self.job.ahead :])
        return logits.float()


def _distance(logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """How far apart two models' choices are, the mean over samples."""
    said = functional.log_softmax(logits / TEMPERATURE, dim=-1)
    right = functional.log_softmax(taught / TEMPERATURE, dim=-1)
    return functional.kl_div(said, right, reduction="batchmean", log_target=True) * TEMPERATURE**2


class Bridge(Job):
    """Llama-3.1-8B and Qwen2.5-7B, frozen in bf16, and 16,089,090 parameters that learn."""

    name = "bridge"
    global_batch = 64
    samples: int | None = 5000
    epochs = 8
    branches: ClassVar[dict[str, str]] = {"llama": "llama", "qwen": "qwen"}
    llama_layers = 32
    qwen_layers = 28
    llama: ClassVar[dict[str, int]] = {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    }
    qwen: ClassVar[dict[str, int]] = {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    }
    spread = 0.02
    """Standard deviation of the frozen models' weights."""
    latents = 32
    latent_width = 256
    encoder_layers = 6
    encoder_heads = 8
    source = 512
    """Bytes of a sample, padded."""
    answer = 224
    """Tokens of an answer, padded; with the latents, 256 a model."""
    prompt = 246
    """Tokens of the text that a teacher reads."""
    ahead = 0
    """Forward passes more a model, one for each of the first tokens of the answer."""
    teacher = False
    """Whether those passes also learn from the frozen model reading the text itself."""
    rate = 1e-4
    pieces = 8
    """Tokens whose logits are there at once; 0 for all of them."""
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 320,
        "epochs": 2,
        "llama_layers": 2,
        "qwen_layers": 3,
        "llama": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
        },
        "qwen": {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1152,
        },
        "spread": 0.2,
        "latents": 4,
        "latent_width": 32,
        "encoder_layers": 2,
        "encoder_heads": 2,
        "source": 24,
        "answer": 12,
        "prompt": 16,
        "rate": 3e-3,
        "pieces": 2,
    }

    def frozen_models(self) -> Iterator[tuple[str, nn.Module]]:
        """The two models, built from their configs with random weights; nothing is downloaded."""
        transformers = library("the job bridge")
        shared = {"initializer_range": self.spread, "tie_word_embeddings": False, "use_cache": False}
        kinds = {
            "llama": (transformers.LlamaConfig, self.llama_layers, self.llama, 500_000.0),
            "qwen": (transformers.Qwen2Config, self.qwen_layers, self.qwen, 1_000_000.0),
        }
        for name, (kind, layers, shape, theta) in kinds.items():
            rope = {"rope_type": "default", "rope_theta": theta}
            config = kind(num_hidden_layers=layers, rope_parameters=rope, **shared, **shape)
            yield (
                name,
                transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.bfloat16, attn_implementation="sdpa"
                ),
            )

    def model(self) -> BridgeModel:
        """The whole, of which encoder and adapters learn."""
        return BridgeModel(self)

    def batch(self, size: int) -> dict[str, Any]:
        """Random bytes, and random answers for each model."""
        return {
            "source": torch.randint(BYTES, (size, self.source)),
            "source_length": torch.randint(self.source // 2, self.source + 1, (size,)),
            "answers": {name: self._random_answer(size, self._vocab(name)) for name in self.branches},
        }

    def _random_answer(self, size: int, vocab: int) -> dict[str, torch.Tensor]:
        made = {
            "ids": torch.randint(vocab, (size, self.answer)),
            "length": torch.randint(self.answer // 2, self.answer + 1, (size,)),
        }
        return made | ({"prompt": torch.randint(vocab, (size, self.prompt))} if self.teacher else {})

    def losses(self, model: Any, batch: dict[str, Any]) -> Any:
        """One loss a frozen model; a model that is not there (None) has none."""
        return model(batch)

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        """The sum of them, each the mean over samples."""
        return sum(self.losses(model, batch).values())

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(params, lr=self.rate)

    def dataset(self) -> Synthetic:
        """Bytes of eight kinds, each with an answer of its own."""
        return Synthetic(self.samples or 0, self._sample)

    def _vocab(self, name: str) -> int:
        return int(getattr(self, name)["vocab_size"])

    def _sample(self, generator: torch.Generator) -> dict[str, Any]:
        kind = integer(generator, 0, CLASSES)
        # A kind uses a window of the alphabet that it shares in part with its neighbours.
        letters = kind * 24 + torch.randint(48, (self.source,), generator=generator)
        length = integer(generator, self.source // 2, self.source + 1)
        said = integer(generator, self.answer // 2, self.answer + 1)
        return {
            "source": letters.masked_fill(torch.arange(self.source) >= length, 0),
            "source_length": torch.tensor(length),
            "answers": {name: self._answer(generator, kind, said, name) for name in self.branches},
        }

    def _answer(self, generator: torch.Generator, kind: int, said: int, name: str) -> dict[str, torch.Tensor]:
        vocab = self._vocab(name)
        # Two words a kind, in turns: what a prefix can make a model with random weights say.
        words = torch.tensor([11 + 7 * kind, 401 + 5 * kind])[torch.arange(self.answer) % 2] % vocab
        made = {"ids": words, "length": torch.tensor(said)}
        if self.teacher:
            made["prompt"] = torch.randint(vocab, (self.prompt,), generator=generator)
        return made
