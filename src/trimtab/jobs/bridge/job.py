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

from trimtab.errors import WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.bridge import data, decoders
from trimtab.jobs.head import Lesson, weighted_token_loss
from trimtab.jobs.job import Job
from trimtab.jobs.lora import adapt, without_adapters
from trimtab.jobs.pretrained import library
from trimtab.jobs.synthetic import CPU, Synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# The model of the job bridge: an encoder, adapters, two frozen decoders, and what their answers cost.
#
# By causality the first tokens of an answer are positions of the one pass over all of it: the losses of the
# first token, of the first K tokens and of the distance from a teacher are shares of the same logits, not
# passes of their own. The teacher reads the text once, without gradients.


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
        learning = [
            parameter for module in own for parameter in module.parameters() if parameter.requires_grad
        ]
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
        scaled = (
            None if saved_tensor is None else saved_tensor * above[0] for saved_tensor in ctx.saved_tensors
        )
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


LORA_ON = ("all", "attention")
WEIGHTS = ("forced_weight", "first_weight", "ahead_weight", "teacher_weight")
THETA = {"llama": 500_000.0, "qwen": 1_000_000.0}
"""How slowly the slowest rotary position turns."""
WORDS_A_LAP = 5
"""Words that a passage is begun later when it is used again."""


class Bridge(Job):
    """Llama-3.1-8B and Qwen2.5-7B, frozen in bf16, and 16,089,090 parameters that learn."""

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
    """Bytes of a sample, padded."""
    answer = 224
    """Tokens of an answer, padded; with the latents, 256 a model."""
    prompt = 246
    """Tokens of the text that a teacher reads."""
    forced_weight = 1.0
    """What the mean over all tokens of the answer counts."""
    first_weight = 0.0
    """What the first token counts beside that."""
    ahead = 0
    """K: how many of the first tokens count once more, and are compared with the teacher's."""
    ahead_weight = 0.5
    """What the mean over those counts."""
    teacher = False
    """Whether the first K tokens also learn from the frozen model reading the text itself."""
    teacher_weight = 1.0
    temperature = 2.0
    sequential = False
    """One frozen model at a time, forward and backward, before the next."""
    lora = 0
    """Rank of adapters beside the linear layers of the frozen models; 0 for none."""
    lora_on = "all"
    """all, or attention alone."""
    deep_prefix = False
    """Whether every layer gets keys and values of the prefix, beside the prefix itself."""
    refiner = 0
    """Layers over the latents."""
    compile_layers = False
    """Whether every layer of the frozen models is compiled by itself: equal layers share one program, so that
    this takes seconds where the whole takes minutes."""
    llama_folder = ""
    """A local Hugging Face folder; without, random weights of the shape above."""
    qwen_folder = ""
    rate = 1e-4
    pieces = 8
    """Tokens whose logits are there at once; 0 for all of them."""
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

    def checked(self) -> Bridge:
        """The job, if its options go together."""
        negative = [name for name in (*WEIGHTS, "ahead", "lora", "refiner") if getattr(self, name) < 0]
        if negative:
            name = negative[0]
            raise WrongUse(
                f"{name}={getattr(self, name)}", found="it is below 0", cure="Give 0, or more than that."
            )
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
                "the weights of the losses", found="nothing counts", cure="Give one of them more than 0."
            )
        return self

    def folder_of(self, name: str) -> str:
        """The folder of one of the models; empty for none."""
        return str(getattr(self, f"{name}_folder"))

    def config_of(self, name: str) -> Any:
        """The config of one of the models."""
        if folder := self.folder_of(name):
            return decoders.config_of(folder, f"--{name}")
        transformers = library(decoders.WHO)
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
        """The library, and the files of both architectures, which it loads late."""
        known = library(decoders.WHO).AutoModelForCausalLM._model_mapping  # noqa: SLF001
        for name in self.branches:
            _ = known[type(self.config_of(name))]

    def frozen_models(self) -> Iterator[tuple[str, nn.Module]]:
        """The two models, each from its folder, or from its config with random weights; no downloads."""
        for name in self.branches:
            folder, config = self.folder_of(name), self.config_of(name)
            if self.loads(name):
                yield name, decoders.mapped_decoder(config, folder, f"--{name}")
            else:
                yield name, decoders.random_decoder(config)

    def loads(self, name: str) -> bool:
        """Whether weights are read: there are some, and the model is built for real."""
        folder = self.folder_of(name)
        return bool(folder and decoders.weight_files(folder, f"--{name}") and not decoders.is_pretence())

    @property
    def remarks(self) -> tuple[str, ...]:
        """The dtype of the frozen models, where the CPU decides it."""
        if all(map(self.loads, self.branches)) or decoders.random_dtype() is decoders.KIND:
            return ()
        return (
            f"{synthetic.NO_BF16}: frozen models without weights of their own are in fp32, on a GPU in bf16",
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What an estimate lists: folders whose weights are not there."""
        return tuple(
            f"random weights for {name}: its folder has a config and no weights"
            for name in self.branches
            if (folder := self.folder_of(name)) and not decoders.weight_files(folder, f"--{name}")
        )

    def model(self) -> BridgeModel:
        """The whole, of which encoder and adapters learn, and what lora, deep_prefix and refiner add."""
        built = BridgeModel(self.checked())
        if not decoders.is_pretence():
            decoders.say_random([name for name in self.branches if not self.loads(name)], self.name)
        return built

    def batch(self, size: int) -> dict[str, Any]:
        """Random bytes, and random answers for each model."""
        self.checked()
        return {
            "source": torch.randint(BYTES, (size, self.source)),
            "source_length": torch.randint(self.source // 2, self.source + 1, (size,)),
            "answers": {name: self._random_answer(size, self.vocab_of(name)) for name in self.branches},
        }

    def _random_answer(self, size: int, vocab: int) -> dict[str, torch.Tensor]:
        made = {
            "ids": torch.randint(vocab, (size, self.answer)),
            "length": torch.randint(max(1, self.answer // 2), self.answer + 1, (size,)),
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

    def vocab_of(self, name: str) -> int:
        """How many words one of the models knows."""
        if self.folder_of(name):
            return int(self.config_of(name).vocab_size)
        return int(getattr(self, name)["vocab_size"])

    def dataset(self) -> Synthetic:
        """Passages of the texts of Python's help(); a model has to say its topic, and then the passage."""
        self.checked()
        tokenisers = {name: self._tokeniser(name) for name in self.branches}
        texts = data.passages()

        def sample(generator: torch.Generator) -> dict[str, Any]:
            # A sample is known by the number that its generator was made from.
            lap, number = divmod(generator.initial_seed(), len(texts))
            passage = _later(texts[number], WORDS_A_LAP * lap)
            before = texts[number - 1].text
            source = passage.text.encode()[: self.source]
            return {
                "source": _padded(list(source), self.source),
                "source_length": torch.tensor(len(source)),
                "answers": {
                    name: self._answer(tokenise, passage, before) for name, tokenise in tokenisers.items()
                },
            }

        return Synthetic(self.samples or 0, sample)

    def _tokeniser(self, name: str) -> data.Tokenise:
        if folder := self.folder_of(name):
            return data.from_tokenizer(decoders.tokenizer_of(folder, f"--{name}"))
        return data.made_up(self.vocab_of(name))

    def _answer(self, tokenise: data.Tokenise, passage: data.Passage, before: str) -> dict[str, torch.Tensor]:
        ids = tokenise(f"{passage.topic}: {passage.text}")[: self.answer]
        made = {"ids": _padded(ids, self.answer), "length": torch.tensor(len(ids))}
        if self.teacher:
            text = tokenise(passage.text.encode()[: self.source].decode(errors="ignore"))
            # A teacher reads as many tokens of every sample: what came before a short text comes first.
            around = tokenise(before)
            while len(text) < self.prompt:
                text = around + text
            made["prompt"] = torch.tensor(text[-self.prompt :])
        return made


def _later(passage: data.Passage, words: int) -> data.Passage:
    """A passage from some words on; from the beginning again where it has no more."""
    parts = passage.text.split()
    return passage._replace(text=" ".join(parts[words % max(1, len(parts) - 1) :]))


def _padded(numbers: list[int], length: int) -> torch.Tensor:
    found = torch.zeros(length, dtype=torch.int64, device=CPU)
    found[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device=CPU)
    return found
