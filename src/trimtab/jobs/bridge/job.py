"""Job bridge: train an encoder and adapters that feed the same latents to two frozen language models.

An encoder turns bytes into 32 latents; one adapter per model turns them into a prefix in that model's
width; the model then predicts the answer. Gradients flow through the frozen models to the encoder and the
adapters, the only trained parts. The loss is the sum over the two models.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from trimtab.errors import WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.bridge import data, decoders
from trimtab.jobs.head import TeacherTargets, weighted_token_loss
from trimtab.jobs.job import Job
from trimtab.jobs.lora import add_adapters, without_adapters
from trimtab.jobs.pretrained import import_transformers
from trimtab.jobs.synthetic import CPU, Synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# The model. The losses of the first token, of the first K tokens and of the distance from a teacher use the
# logits of one causal pass over the answer. The teacher reads the text once, without gradients.


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Names of the linear layers of attention in decoders."""
BYTES = 256


class Pooler(nn.Module):
    """Pool a long sequence into a few latents by attention with learned queries."""

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
        attended, _ = self.attention(queries, x, x, key_padding_mask=padded, need_weights=False)
        x = self.norm(queries + torch.sigmoid(self.gate(attended)) * attended)
        return self.last_norm(x + self.narrow(functional.gelu(self.wide(x))))


class LatentEncoder(nn.Module):
    """Encode bytes as latents."""

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
        self.register_buffer("waves", _sinusoids(job.source, width), persistent=False)

    def forward(self, source: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        padded = torch.arange(source.size(1), device=source.device) >= length[:, None]
        x = self.bytes(source) + self.waves
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padded)
        return self.pooler(self.norm(x), padded)


def _sinusoids(length: int, width: int) -> torch.Tensor:
    """Return sinusoidal position encodings."""
    speeds = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class PrefixAdapter(nn.Module):
    """Turn latents into a prefix that a frozen model reads like word embeddings."""

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
        # A tensor of one element: fsdp cannot shard scalars.
        self.scale = nn.Parameter(torch.full((1,), spread))

    @torch.no_grad()
    def match_scale(self, words: torch.Tensor) -> None:
        """Set the initial scale of prefixes to the root mean square of a model's word embeddings.

        Computed once, when the model is built, in slices: a bf16 table of half a billion numbers would take
        another two GiB in fp32.
        """
        squares = sum(part.float().square().sum() for part in words.split(8192))
        self.scale.copy_((squares / words.numel()) ** 0.5)

    def forward(self, latents: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return the prefix; `share` is the answer's length divided by the longest."""
        x = self.norm(latents + self.position + self.length(share[:, None])[:, None])
        mean = x.mean(dim=1, keepdim=True)
        y = self.deep(x) + self.skip(x)
        y = y * (1 + self.film_scale(mean)) + self.film_shift(mean)
        return self.last_norm(y) * self.scale


class Refiner(nn.Module):
    """Additional transformer layers over the latents."""

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
    """Compute keys and values of a prefix for every layer of a frozen model."""

    def __init__(self, width: int, layers: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.shape = layers, 2, heads, head_width
        self.mix = nn.Linear(width, width, bias=False)
        self.spread = nn.Linear(width, math.prod(self.shape), bias=False)

    def forward(self, prefix: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape (layer, key or value, sample, head, position, width)."""
        projected = self.spread(functional.gelu(self.mix(prefix)))
        return projected.unflatten(-1, self.shape).permute(2, 3, 0, 4, 1, 5)


class PrefixKeys:
    """A key-value cache with a deep prefix. It is read-only, so that recomputation can repeat a pass."""

    is_compileable = False

    def __init__(self, prefix: torch.Tensor) -> None:
        self.prefix = prefix

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer, after those of the prefix."""
        before = self.prefix[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def mask(self, length: int) -> torch.Tensor:
        """Return the attention mask: each position sees all of the prefix and the positions before it."""
        prefix_length = self.prefix.size(4)
        mask = torch.ones(length, prefix_length + length, dtype=torch.bool, device=self.prefix.device)
        return mask.tril(diagonal=prefix_length)[None, None]


class BridgeModel(nn.Module):
    """The encoder, the adapters, and two frozen models as attributes llama and qwen."""

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
            if job.loads_weights(name):
                adapter.match_scale(model.get_input_embeddings().weight)
            if job.lora:
                add_adapters(
                    model,
                    job.lora,
                    alpha=2.0 * job.lora,
                    exclude=_modules_without_adapters(model, job.lora_on),
                )
            if job.compile_layers:
                for layer in model.get_decoder().layers:
                    layer.compile(dynamic=False)

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the loss of every frozen model on this rank."""
        latents = self.encoder(batch["source"], batch["source_length"])
        if self.refiner is not None:
            latents = self.refiner(latents)
        # A model on another rank is None, or a placeholder that is false.
        local = [name for name in self.job.branches if getattr(self, name)]
        answers = batch["answers"]
        if not self.job.sequential:
            return {name: self.branch_loss(name, latents, answers[name]) for name in local}
        return {name: self._sequential_loss(name, latents, answers[name]) for name in local}

    def branch_loss(self, name: str, latents: torch.Tensor, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return one model's loss, the mean over samples."""
        model: Any = getattr(self, name)
        job, ids, length = self.job, answer["ids"], answer["length"]
        words = model.get_input_embeddings()
        prefix = self.adapters[name](latents, (length / ids.size(1)).to(latents.dtype))
        keys = PrefixKeys(self.deep[name](prefix).to(words.weight.dtype)) if name in self.deep else None
        prefix = prefix.to(words.weight.dtype)
        hidden = _run_decoder(model, torch.cat([prefix, words(ids[:, :-1])], dim=1), keys)
        # The last position of the prefix predicts the first token.
        hidden = hidden[:, prefix.size(1) - 1 :]
        shares, first = self._token_shares(ids, length, torch.promote_types(hidden.dtype, torch.float32))
        head = model.get_output_embeddings().weight
        if not job.teacher:
            return weighted_token_loss(hidden, head, ids, shares, pieces=job.pieces)
        ahead = job.ahead
        teacher = TeacherTargets(
            self._teacher_hidden(model, words, answer), first * job.teacher_weight, job.temperature
        )
        loss = weighted_token_loss(
            hidden[:, :ahead], head, ids[:, :ahead], shares[:, :ahead], pieces=job.pieces, teacher=teacher
        )
        if ahead == ids.size(1):
            return loss
        rest = hidden[:, ahead:], head, ids[:, ahead:], shares[:, ahead:]
        return loss + weighted_token_loss(*rest, pieces=job.pieces)

    def _token_shares(
        self, ids: torch.Tensor, length: torch.Tensor, kind: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of every token in the loss, and of each of the first K tokens in their mean."""
        job = self.job
        place = torch.arange(ids.size(1), device=ids.device)
        valid = (place < length[:, None]).to(kind)
        shares = job.forced_weight * valid / valid.sum(dim=1, keepdim=True)
        shares = shares + job.first_weight * (place == 0).to(kind)
        early = valid[:, : job.ahead]
        if job.ahead:
            early = early / early.sum(dim=1, keepdim=True)
            shares = torch.cat([shares[:, : job.ahead] + job.ahead_weight * early, shares[:, job.ahead :]], 1)
        return shares / ids.size(0), early / ids.size(0)

    @torch.no_grad()
    def _teacher_hidden(self, model: Any, words: Any, answer: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the frozen model's last hidden state before each of the first K tokens, given the text."""
        text = torch.cat([answer["prompt"], answer["ids"][:, : self.job.ahead - 1]], dim=1)
        if not self.job.lora:
            return _run_decoder(model, words(text))[:, -self.job.ahead :]
        with without_adapters(model):
            return _run_decoder(model, words(text))[:, -self.job.ahead :]

    # Dynamo cannot trace a backward pass inside a forward pass; it compiles the functions called here.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch has no types for it
    def _sequential_loss(
        self, name: str, latents: torch.Tensor, answer: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of one model after its backward pass to the latents, without its activations."""
        if not torch.is_grad_enabled():
            return self.branch_loss(name, latents, answer)
        own = [self.adapters[name], getattr(self, name)] + ([self.deep[name]] if name in self.deep else [])
        trained = [
            parameter for module in own for parameter in module.parameters() if parameter.requires_grad
        ]
        _check_sequential(type(self), latents.device.type)
        return _ImmediateBackward.apply(
            lambda detached: self.branch_loss(name, detached, answer), latents, *trained
        )


def _run_decoder(model: Any, embedded: torch.Tensor, keys: PrefixKeys | None = None) -> torch.Tensor:
    """Return the last hidden state of a decoder."""
    options: dict[str, Any] = {}
    if keys is not None:
        place = torch.arange(embedded.size(1), device=embedded.device)[None]
        mask = keys.mask(embedded.size(1))
        options = {"past_key_values": keys, "attention_mask": mask, "position_ids": place}
    return model.get_decoder()(inputs_embeds=embedded, use_cache=False, **options).last_hidden_state


def _deep_prefix(config: Any) -> DeepPrefix:
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DeepPrefix(config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, head_width)


def _modules_without_adapters(model: Any, which: str) -> list[nn.Module]:
    """Return the modules without adapters: the head, and all but attention if `which` is attention."""
    excluded = [model.get_output_embeddings()]
    if which == "attention":
        excluded += [
            part
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) and not name.endswith(ATTENTION)
        ]
    return excluded


class _ImmediateBackward(torch.autograd.Function):
    """Compute a loss and its gradients in the forward pass, so that no activations are kept."""

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[[torch.Tensor], torch.Tensor], latents: torch.Tensor, *trained: Any
    ) -> torch.Tensor:
        """Return the loss; save the gradients by latents and parameters for backward."""
        detached = latents.detach().requires_grad_()
        with torch.enable_grad():
            loss = loss_of(detached)
        # A backward pass runs without autocast.
        with torch.autocast(latents.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, [detached, *trained], allow_unused=True)
        ctx.save_for_backward(*gradients)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the saved gradients times the gradient of the loss."""
        scaled = (
            None if saved_tensor is None else saved_tensor * above[0] for saved_tensor in ctx.saved_tensors
        )
        return None, *scaled


def _check_sequential(model: type, kind: str) -> None:
    """Raise WrongUse for settings that would give wrong gradients."""
    given = "sequential=true"
    # fully_shard() adds this class; importing it to compare would take a second.
    if any(base.__name__ == "FSDPModule" for base in model.__mro__):
        raise WrongUse(
            given,
            found="the weights are sharded over ranks (fsdp), and are gathered for only one backward pass",
            cure="Use the strategy single, ddp or branch, or sequential=false.",
        )
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
        raise WrongUse(
            given,
            found="in fp16 the gradients have to be scaled before the scale is known here",
            cure="Use --precision bf16, or sequential=false.",
        )


LORA_ON = ("all", "attention")
WEIGHTS = ("forced_weight", "first_weight", "ahead_weight", "teacher_weight")
THETA = {"llama": 500_000.0, "qwen": 1_000_000.0}
"""Base of the rotary position frequencies."""
WORDS_PER_REPEAT = 5
"""Words by which the start of a passage moves each time it is reused."""


class Bridge(Job):
    """Llama-3.1-8B and Qwen2.5-7B, frozen in bf16, with 16,089,090 trained parameters."""

    name = "bridge"
    additive = True
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
    """Bytes per sample, with padding."""
    answer = 224
    """Tokens per answer, with padding; with the latents, 256 per model."""
    prompt = 246
    """Tokens of text that the teacher reads."""
    forced_weight = 1.0
    """Loss weight of the mean over all tokens of the answer."""
    first_weight = 0.0
    """Additional loss weight of the first token."""
    ahead = 0
    """K: number of first tokens with an additional loss, compared with the teacher's."""
    ahead_weight = 0.5
    """Loss weight of the mean over the first K tokens."""
    teacher = False
    """Whether to distil the first K tokens from the frozen model that reads the text."""
    teacher_weight = 1.0
    temperature = 2.0
    sequential = False
    """Whether to run forward and backward of one frozen model at a time."""
    lora = 0
    """Rank of LoRA adapters on the linear layers of the frozen models; 0 for none."""
    lora_on = "all"
    """Layers with LoRA adapters: all or attention."""
    deep_prefix = False
    """Whether every layer gets keys and values of the prefix, in addition to the prefix."""
    refiner = 0
    """Additional transformer layers over the latents."""
    compile_layers = False
    """Whether to compile each layer of the frozen models separately: equal layers share one program, so this
    takes seconds instead of minutes for the full model."""
    llama_folder = ""
    """Local Hugging Face folder; empty for random weights of the shape above."""
    qwen_folder = ""
    rate = 1e-4
    pieces = 8
    """Number of pieces in which logits are computed; 0 or 1 for all at once."""
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 320,
        "epochs": 4,
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
        "latents": 16,
        "latent_width": 32,
        "encoder_layers": 2,
        "encoder_heads": 2,
        "source": 24,
        "answer": 12,
        "prompt": 16,
        "rate": 3e-3,
        "pieces": 2,
    }

    def check_options(self) -> Bridge:
        """Return the job; raise WrongUse if its options do not fit together."""
        negative = [name for name in (*WEIGHTS, "ahead", "lora", "refiner") if getattr(self, name) < 0]
        if negative:
            name = negative[0]
            raise WrongUse(f"{name}={getattr(self, name)}", found="it is below 0", cure="Give 0 or more.")
        if self.ahead > self.answer:
            raise WrongUse(
                f"ahead={self.ahead}",
                found=f"an answer has {self.answer} tokens",
                cure=f"Give at most {self.answer}, or a longer answer.",
            )
        if self.teacher and not self.ahead:
            raise WrongUse(
                "teacher=true", found="ahead is 0: no token is compared", cure="Set ahead too, as in ahead=4."
            )
        if self.temperature <= 0:
            raise WrongUse(
                f"temperature={self.temperature}", found="it is not above 0", cure="Give 2, for instance."
            )
        if self.lora_on not in LORA_ON:
            raise WrongUse(
                f"lora_on={self.lora_on}", found="there is no such choice", cure="Give all or attention."
            )
        if not any(getattr(self, name) for name in WEIGHTS[:2]) and not (
            self.ahead and (self.ahead_weight or (self.teacher and self.teacher_weight))
        ):
            raise WrongUse(
                "the weights of the losses", found="all of them are 0", cure="Give one of them more than 0."
            )
        return self

    def folder_of(self, name: str) -> str:
        """Return the folder of a model; empty for none."""
        return str(getattr(self, f"{name}_folder"))

    def config_of(self, name: str) -> Any:
        """Return the config of a model."""
        if folder := self.folder_of(name):
            return decoders.read_decoder_config(folder, f"--{name}")
        transformers = import_transformers(decoders.JOB)
        kind = {"llama": transformers.LlamaConfig, "qwen": transformers.Qwen2Config}[name]
        return kind(
            num_hidden_layers=getattr(self, f"{name}_layers"),
            rope_parameters={"rope_type": "default", "rope_theta": THETA[name]},
            initializer_range=self.spread,
            tie_word_embeddings=False,
            use_cache=False,
            **getattr(self, name),
        )

    def import_ahead(self) -> None:
        """Import transformers and the modules of both architectures, which it loads lazily."""
        mapping = import_transformers(decoders.JOB).AutoModelForCausalLM._model_mapping  # noqa: SLF001
        for name in self.branches:
            _ = mapping[type(self.config_of(name))]

    def frozen_models(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the two models, each from its folder or with random weights; nothing is downloaded."""
        for name in self.branches:
            folder, config = self.folder_of(name), self.config_of(name)
            if self.loads_weights(name):
                yield name, decoders.load_mapped_decoder(config, folder, f"--{name}")
            else:
                yield name, decoders.build_random_decoder(config)

    def loads_weights(self, name: str) -> bool:
        """Return whether weights are loaded: the folder has some, and tensors are real."""
        folder = self.folder_of(name)
        return bool(folder and decoders.find_weight_files(folder, f"--{name}") and not decoders.is_fake())

    @property
    def remarks(self) -> tuple[str, ...]:
        """A note if the CPU decides the dtype of the frozen models."""
        if all(map(self.loads_weights, self.branches)) or decoders.random_dtype() is decoders.FROZEN_DTYPE:
            return ()
        return (f"{synthetic.NO_BF16}: frozen models with random weights are in fp32, on a GPU in bf16",)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Folders without weights, listed in an estimate."""
        return tuple(
            f"random weights for {name}: its folder has a config and no weights"
            for name in self.branches
            if (folder := self.folder_of(name)) and not decoders.find_weight_files(folder, f"--{name}")
        )

    def model(self) -> BridgeModel:
        """Return the model; trained are encoder, adapters, and what lora, deep_prefix and refiner add."""
        built = BridgeModel(self.check_options())
        if not decoders.is_fake():
            decoders.warn_of_random_weights(
                [name for name in self.branches if not self.loads_weights(name)], self.name
            )
        return built

    def batch(self, size: int) -> dict[str, Any]:
        """Return random bytes, and random answers for each model."""
        self.check_options()
        return {
            "source": torch.randint(BYTES, (size, self.source)),
            "source_length": torch.randint(self.source // 2, self.source + 1, (size,)),
            "answers": {name: self._random_answer(size, self.vocab_of(name)) for name in self.branches},
        }

    def _random_answer(self, size: int, vocab: int) -> dict[str, torch.Tensor]:
        answer = {
            "ids": torch.randint(vocab, (size, self.answer)),
            "length": torch.randint(max(1, self.answer // 2), self.answer + 1, (size,)),
        }
        return answer | ({"prompt": torch.randint(vocab, (size, self.prompt))} if self.teacher else {})

    def losses(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the loss of each frozen model on this rank."""
        return model(batch)

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the sum of the models' losses, each a mean over samples."""
        return sum(self.losses(model, batch).values())

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=self.rate)

    def vocab_of(self, name: str) -> int:
        """Return the vocabulary size of a model."""
        if self.folder_of(name):
            return int(self.config_of(name).vocab_size)
        return int(getattr(self, name)["vocab_size"])

    def dataset(self) -> Synthetic:
        """Return passages from Python's help(); the answer is the topic, then the passage."""
        self.check_options()
        tokenisers = {name: self._tokeniser(name) for name in self.branches}
        texts = data.load_passages()

        def sample(generator: torch.Generator) -> dict[str, Any]:
            # The seed of the generator is the number of the sample.
            lap, number = divmod(generator.initial_seed(), len(texts))
            passage = _skip_words(texts[number], WORDS_PER_REPEAT * lap)
            before = texts[number - 1].text
            source = passage.text.encode()[: self.source]
            return {
                "source": _pad(list(source), self.source),
                "source_length": torch.tensor(len(source)),
                "answers": {
                    name: self._answer(tokenise, passage, before) for name, tokenise in tokenisers.items()
                },
            }

        return Synthetic(self.samples or 0, sample)

    def _tokeniser(self, name: str) -> data.Tokenise:
        if folder := self.folder_of(name):
            return data.wrap_tokenizer(decoders.load_tokenizer(folder, f"--{name}"))
        return data.make_hash_tokenizer(self.vocab_of(name))

    def _answer(self, tokenise: data.Tokenise, passage: data.Passage, before: str) -> dict[str, torch.Tensor]:
        ids = tokenise(f"{passage.topic}: {passage.text}")[: self.answer]
        answer = {"ids": _pad(ids, self.answer), "length": torch.tensor(len(ids))}
        if self.teacher:
            text = tokenise(passage.text.encode()[: self.source].decode(errors="ignore"))
            # The teacher reads the same number of tokens per sample: pad a short text with the one before.
            context = tokenise(before)
            while len(text) < self.prompt:
                text = context + text
            answer["prompt"] = torch.tensor(text[-self.prompt :])
        return answer


def _skip_words(passage: data.Passage, words: int) -> data.Passage:
    """Return a passage without its first words; the count wraps around at its end."""
    parts = passage.text.split()
    return passage._replace(text=" ".join(parts[words % max(1, len(parts) - 1) :]))


def _pad(numbers: list[int], length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.int64, device=CPU)
    padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device=CPU)
    return padded
