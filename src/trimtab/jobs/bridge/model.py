"""The model of the job bridge: an encoder, adapters, two frozen decoders, and what their answers cost.

By causality the first tokens of an answer are positions of the one pass over all of it: the losses of the
first token, of the first K tokens and of the distance from a teacher are shares of the same logits, not
passes of their own. The teacher reads the text once, without gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from trimtab.errors import WrongUse
from trimtab.jobs.head import Lesson, weighted_token_loss
from trimtab.jobs.lora import adapt, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.jobs.bridge.job import Bridge

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linear layers of attention, by the names that decoders give them."""
BYTES = 256


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


class LatentEncoder(nn.Module):
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


class PrefixAdapter(nn.Module):
    """From latents to a prefix that a frozen model reads as if it were words."""

    def __init__(self, job: Bridge, width: int, spread: float) -> None:
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
        # One number in a list: fsdp shards lists alone.
        self.scale = nn.Parameter(torch.full((1,), spread))

    @torch.no_grad()
    def as_large_as(self, words: torch.Tensor) -> None:
        """Begin with prefixes of the size of the words that a model is used to.

        Their root mean square is found once, when the model is built. A slice at a time: a table in bf16 of
        half a billion numbers would be another two GiB in fp32.
        """
        squares = sum(some.float().square().sum() for some in words.split(8192))
        self.scale.copy_((squares / words.numel()) ** 0.5)

    def forward(self, latents: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """`share` is how long the answer is, of the longest."""
        x = self.norm(latents + self.position + self.length(share[:, None])[:, None])
        whole = x.mean(dim=1, keepdim=True)
        y = self.deep(x) + self.skip(x)
        y = y * (1 + self.film_scale(whole)) + self.film_shift(whole)
        return self.last_norm(y) * self.scale


class Refiner(nn.Module):
    """A few more layers over the latents alone, which then know of each other."""

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        width = job.latent_width
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, job.encoder_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(job.refiner)
        )

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            latents = layer(latents)
        return latents


class DeepPrefix(nn.Module):
    """Keys and values of a prefix for every layer of a frozen model, made from the prefix itself."""

    def __init__(self, width: int, layers: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.shape = layers, 2, heads, head_width
        self.mix = nn.Linear(width, width, bias=False)
        self.spread = nn.Linear(width, math.prod(self.shape), bias=False)

    def forward(self, prefix: torch.Tensor) -> torch.Tensor:
        """In the shape (layer, key or value, sample, head, position, width)."""
        found = self.spread(functional.gelu(self.mix(prefix)))
        return found.unflatten(-1, self.shape).permute(2, 3, 0, 4, 1, 5)


class GivenKeys:
    """A deep prefix as attention asks for what came before; asking changes nothing, so it can be repeated."""

    is_compileable = False

    def __init__(self, made: torch.Tensor) -> None:
        self.made = made

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer, after those of the prefix."""
        before = self.made[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def mask(self, length: int) -> torch.Tensor:
        """What a sequence of that length may look at: all of the prefix, and itself up to each position."""
        given = self.made.size(4)
        seen = torch.ones(length, given + length, dtype=torch.bool, device=self.made.device)
        return seen.tril(diagonal=given)[None, None]


class BridgeModel(nn.Module):
    """The encoder, the adapters, and two frozen models under their own names."""

    llama: nn.Module | None
    qwen: nn.Module | None

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        self.job = job
        self.encoder = LatentEncoder(job)
        self.refiner = Refiner(job) if job.refiner else None
        frozen: dict[str, Any] = dict(job.frozen_models())
        self.adapters = nn.ModuleDict(
            {
                name: PrefixAdapter(job, model.config.hidden_size, model.config.initializer_range)
                for name, model in frozen.items()
            }
        )
        self.deep = nn.ModuleDict(
            {name: _deep_prefix(model.config) for name, model in frozen.items() if job.deep_prefix}
        )
        for name, model in frozen.items():
            setattr(self, name, model.requires_grad_(False).eval())
            adapter: Any = self.adapters[name]
            if job.loads(name):
                adapter.as_large_as(model.get_input_embeddings().weight)
            if job.lora:
                adapt(model, job.lora, alpha=2.0 * job.lora, but=_spared(model, job.lora_on))
            if job.compile_layers:
                for layer in model.get_decoder().layers:
                    layer.compile(dynamic=False)

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The loss of every model that is here."""
        latents = self.encoder(batch["source"], batch["source_length"])
        if self.refiner is not None:
            latents = self.refiner(latents)
        # A model that another rank keeps is None, or a stand-in that is false.
        here = [name for name in self.job.branches if getattr(self, name)]
        answers = batch["answers"]
        if not self.job.sequential:
            return {name: self.branch_loss(name, latents, answers[name]) for name in here}
        return {name: self._alone(name, latents, answers[name]) for name in here}

    def branch_loss(self, name: str, latents: torch.Tensor, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over samples of what one model's answer costs."""
        model: Any = getattr(self, name)
        job, ids, length = self.job, answer["ids"], answer["length"]
        words = model.get_input_embeddings()
        prefix = self.adapters[name](latents, (length / ids.size(1)).to(latents.dtype))
        keys = GivenKeys(self.deep[name](prefix).to(words.weight.dtype)) if name in self.deep else None
        prefix = prefix.to(words.weight.dtype)
        hidden = _read(model, torch.cat([prefix, words(ids[:, :-1])], dim=1), keys)
        # The last of the prefix says the first token.
        hidden = hidden[:, prefix.size(1) - 1 :]
        shares, first = self._shares(ids, length, torch.promote_types(hidden.dtype, torch.float32))
        head = model.get_output_embeddings().weight
        if not job.teacher:
            return weighted_token_loss(hidden, head, ids, shares, pieces=job.pieces)
        some = job.ahead
        lesson = Lesson(self._taught(model, words, answer), first * job.teacher_weight, job.temperature)
        loss = weighted_token_loss(
            hidden[:, :some], head, ids[:, :some], shares[:, :some], pieces=job.pieces, lesson=lesson
        )
        if some == ids.size(1):
            return loss
        rest = hidden[:, some:], head, ids[:, some:], shares[:, some:]
        return loss + weighted_token_loss(*rest, pieces=job.pieces)

    def _shares(
        self, ids: torch.Tensor, length: torch.Tensor, kind: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What every token counts in a model's loss, and what each of the first K counts in their mean."""
        job = self.job
        place = torch.arange(ids.size(1), device=ids.device)
        said = (place < length[:, None]).to(kind)
        shares = job.forced_weight * said / said.sum(dim=1, keepdim=True)
        shares = shares + job.first_weight * (place == 0).to(kind)
        early = said[:, : job.ahead]
        if job.ahead:
            early = early / early.sum(dim=1, keepdim=True)
            shares = torch.cat([shares[:, : job.ahead] + job.ahead_weight * early, shares[:, job.ahead :]], 1)
        return shares / ids.size(0), early / ids.size(0)

    @torch.no_grad()
    def _taught(self, model: Any, words: Any, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden state of the same model after the text itself, before each of the first tokens."""
        text = torch.cat([answer["prompt"], answer["ids"][:, : self.job.ahead - 1]], dim=1)
        if not self.job.lora:
            return _read(model, words(text))[:, -self.job.ahead :]
        with without_adapters(model):
            return _read(model, words(text))[:, -self.job.ahead :]

    # Dynamo cannot follow a backward pass inside of a forward pass; what is called from here it compiles.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch has no types for it
    def _alone(self, name: str, latents: torch.Tensor, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one model, its backward pass done as far as the latents, and nothing of it kept."""
        if not torch.is_grad_enabled():
            return self.branch_loss(name, latents, answer)
        own = [self.adapters[name], getattr(self, name)] + ([self.deep[name]] if name in self.deep else [])
        learning = [one for module in own for one in module.parameters() if one.requires_grad]
        _check_alone(type(self), latents.device.type)
        return _Now.apply(lambda seen: self.branch_loss(name, seen, answer), latents, *learning)


def _read(model: Any, embedded: torch.Tensor, keys: GivenKeys | None = None) -> torch.Tensor:
    """The last hidden state of a decoder."""
    more: dict[str, Any] = {}
    if keys is not None:
        place = torch.arange(embedded.size(1), device=embedded.device)[None]
        mask = keys.mask(embedded.size(1))
        more = {"past_key_values": keys, "attention_mask": mask, "position_ids": place}
    return model.get_decoder()(inputs_embeds=embedded, use_cache=False, **more).last_hidden_state


def _deep_prefix(config: Any) -> DeepPrefix:
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DeepPrefix(config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, head_width)


def _spared(model: Any, which: str) -> list[nn.Module]:
    """What gets no adapters: the head, and where attention alone has them, everything else."""
    found = [model.get_output_embeddings()]
    if which == "attention":
        found += [
            part
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) and not name.endswith(ATTENTION)
        ]
    return found


class _Now(torch.autograd.Function):
    """A loss whose gradients are worked out in the forward pass, so that nothing else of it is kept."""

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[[torch.Tensor], torch.Tensor], latents: torch.Tensor, *learning: Any
    ) -> torch.Tensor:
        """The loss; gradients with respect to latents and parameters wait for what it will count."""
        seen = latents.detach().requires_grad_()
        with torch.enable_grad():
            loss = loss_of(seen)
        # A backward pass runs without autocast, here as anywhere.
        with torch.autocast(latents.device.type, enabled=False):
            found = torch.autograd.grad(loss, [seen, *learning], allow_unused=True)
        ctx.save_for_backward(*found)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What was found, times what the loss counts."""
        scaled = (None if one is None else one * above[0] for one in ctx.saved_tensors)
        return None, *scaled


def _check_alone(model: type, kind: str) -> None:
    """Refuse what would give wrong gradients."""
    given = "sequential=true"
    # What fully_shard() has been called with has its class too; importing that one takes a second.
    if any(one.__name__ == "FSDPModule" for one in model.__mro__):
        raise WrongUse(
            given,
            found="the weights are sharded over ranks (fsdp), and are gathered for one backward pass alone",
            cure="Use the strategy single, ddp or branch, or sequential=false.",
        )
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
        raise WrongUse(
            given,
            found="in fp16 the gradients have to be scaled before the scale is known here",
            cure="Use --precision bf16, or sequential=false.",
        )
