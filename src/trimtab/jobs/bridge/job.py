"""bridge: two frozen language models that learn to read the same few latents, through one small encoder.

Bytes go through an encoder into 32 latents; an adapter a model turns them into a prefix in that model's
width; the model then has to say its answer. Gradients flow through the frozen models and stop at the
encoder and the adapters, the only parts that learn. The loss is a sum over the two models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trimtab.errors import WrongUse
from trimtab.jobs import cpu
from trimtab.jobs.bridge import data, decoders
from trimtab.jobs.bridge.model import BYTES, BridgeModel
from trimtab.jobs.job import Job
from trimtab.jobs.synthetic import CPU, Synthetic
from trimtab.jobs.transformer_models import library

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

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
        return (f"{cpu.NO_BF16}: frozen models without weights of their own are in fp32, on a GPU in bf16",)

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
