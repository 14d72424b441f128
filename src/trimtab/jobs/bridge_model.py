"""The model of the job bridge: an encoder, adapters, two frozen decoders, and what their answers cost.

By causality the first tokens of an answer are positions of the one pass over all of it: the losses of the
first token, of the first K tokens and of the distance from a teacher are shares of the same logits, not
passes of their own. The teacher reads the text once, without gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.errors import WrongUse
from trimtab.jobs.bridge_parts import Adapter, DeepPrefix, Encoder, GivenKeys, Refiner
from trimtab.jobs.head import Lesson, weighted_token_loss
from trimtab.jobs.lora import adapt, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.jobs.bridge import Bridge

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linear layers of attention, by the names that decoders give them."""


class BridgeModel(nn.Module):
    """The encoder, the adapters, and two frozen models under their own names."""

    llama: nn.Module | None
    qwen: nn.Module | None

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        self.job = job
        self.encoder = Encoder(job)
        self.refiner = Refiner(job) if job.refiner else None
        frozen: dict[str, Any] = dict(job.frozen_models())
        self.adapters = nn.ModuleDict(
            {
                name: Adapter(job, model.config.hidden_size, model.config.initializer_range)
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
