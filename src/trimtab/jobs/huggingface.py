"""hf:FOLDER: a job made from a folder's config.json, with its weights and tokenizer where it has any.

Planning reads the config alone. Nothing comes from the network, and no code of the folder's is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.errors import JobFailed, TrimtabError, UnknownName, WrongUse, nearest
from trimtab.jobs.head import IGNORED
from trimtab.jobs.job import Job
from trimtab.jobs.lora import adapt
from trimtab.jobs.pretrained import in_autocast, is_planned, library, loaded, stored
from trimtab.jobs.synthetic import CPU, Synthetic, integer
from trimtab.jobs.text.blocks import TokenBlocks, described, laid_out
from trimtab.jobs.text.byte_pairs import BYTES
from trimtab.jobs.text.corpus import find
from trimtab.jobs.text.model_tokenizer import tokenizer_in
from trimtab.jobs.text.tokens import Learnt, tokenised

if TYPE_CHECKING:
    from torch import nn

    from trimtab.jobs.text.blocks import BlockLayout
    from trimtab.jobs.text.model_tokenizer import Foreign
    from trimtab.jobs.text.tokens import Tokens

LONGEST = 1024
"""Tokens a sample where --seq is not given and the model can take that many."""
MASKED = 0.15
"""Share of tokens that a masked language model has to say."""
HIDDEN = 255
"""The byte that stands for a hidden token where the tokenizer has none: in UTF-8 it stands for nothing."""


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """What a head is for."""

    name: str
    endings: tuple[str, ...]
    """How the names of such architectures end."""
    auto: str
    """The class of transformers that builds them."""


TASKS = (
    HeadTask(name="seq2seq", endings=("ForConditionalGeneration",), auto="AutoModelForSeq2SeqLM"),
    HeadTask(name="masked LM", endings=("ForMaskedLM",), auto="AutoModelForMaskedLM"),
    HeadTask(name="causal LM", endings=("ForCausalLM", "LMHeadModel"), auto="AutoModelForCausalLM"),
    HeadTask(
        name="image classification",
        endings=("ForImageClassification",),
        auto="AutoModelForImageClassification",
    ),
    HeadTask(
        name="sequence classification",
        endings=("ForSequenceClassification",),
        auto="AutoModelForSequenceClassification",
    ),
)
"""In the order in which they are tried where a config names no architecture."""
SUPPORTED = (
    "It can be ...ForCausalLM, ...LMHeadModel, ...ForMaskedLM, ...ForConditionalGeneration (text to text), "
)
SUPPORTED += "...ForSequenceClassification or ...ForImageClassification."
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of the longest sequence a model takes, in the configs of transformers."""
COUNTED_FROM_PADDING = frozenset(
    (
        *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
"""Model types whose first position is the one after the padding token's."""


class HuggingFace(Job):
    """A model built from a config; --seq, --lora and --frozen shape it."""

    name = "hf"
    additive = True
    global_batch = 64
    samples: int | None = 10_000
    folder = ""
    seq: int | None = None
    """Tokens a sample."""
    lora: int | None = None
    """Rank of adapters beside every linear layer but the head's; everything else is frozen."""
    frozen = False
    """Only the head learns."""
    rate = 1e-4
    data = ""
    """A file of text, or a folder with such files; empty for the sources of Python's standard library."""
    pretrained = True
    """Whether the folder's safetensors are read, where it has any."""
    validation_batches = 8
    """Global batches of held-out text that an evaluation takes, as far as there is so much."""
    _weights = ""
    """Where the weights came from."""
    _eager = False
    """Whether the model has no fused attention."""

    def __init__(self, folder: str) -> None:
        read_config(folder)
        self.folder = folder
        self.name = Path(folder).resolve().name

    @cached_property
    def _config(self) -> Any:
        """The config, as transformers understands it."""
        text = read_config(self.folder)
        transformers = library(self._given)
        kind = text["model_type"]
        known = transformers.CONFIG_MAPPING
        if kind not in known:
            close = nearest(kind, list(known))
            listed = f" (near it: {', '.join(close)})" if close else ""
            raise UnknownName(
                self._given,
                found=f"transformers {transformers.__version__} has no model_type {kind!r}{listed}",
                cure="Correct config.json, or install a transformers that knows it.",
            )
        try:
            config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            raise WrongUse(
                self._given,
                found=f"transformers cannot read it: {_first_line(error)}",
                cure="Correct config.json.",
            ) from error
        config.use_cache = False
        if getattr(config, "pad_token_id", None) is None:
            # Classifiers look for it to find the last token, and decoders start from it.
            config.pad_token_id = 0
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id
        return config

    @property
    def _given(self) -> str:
        return f"job hf:{self.folder}"

    @cached_property
    def _task(self) -> HeadTask:
        """What the architecture in the config is for."""
        named = read_config(self.folder).get("architectures") or []
        config = self._config
        if not named:
            found = next((task for task in TASKS if self._maps(task)), None)
        else:
            fitting = (task for task in TASKS if named[0].endswith(task.endings))
            found = next((one for one in fitting if self._maps(one)), None)
        if found is None:
            what = (
                f"the architecture {named[0]}" if named else f"no head for model_type {config.model_type!r}"
            )
            raise WrongUse(
                self._given, found=f"config.json names {what}, which cannot be trained here", cure=SUPPORTED
            )
        return found

    def _maps(self, task: HeadTask) -> bool:
        return type(self._config) in getattr(library(self._given), task.auto)._model_mapping  # noqa: SLF001

    def import_ahead(self) -> None:
        """The library, and the file of the architecture, which it loads late."""
        _ = getattr(library(self._given), self._task.auto)._model_mapping[type(self._config)]  # noqa: SLF001

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was chosen for the user; an estimate lists it."""
        said = []
        if self.seq is None and not self._is_image:
            said.append(f"sequences of {self.tokens} tokens (--seq)")
        if not read_config(self.folder).get("architectures"):
            said.append(f"config.json names no architecture: taken as {self._task.name}")
        if (self.lora or self.frozen) and self._frozen_dtype is not torch.get_default_dtype():
            said.append(
                f"frozen weights in {str(self._frozen_dtype).removeprefix('torch.')}, as in config.json"
            )
        if self._eager and hasattr(self._config, "num_attention_heads"):
            said.append("attention without fused kernels: this model has no other")
        return tuple(said)

    @property
    def _is_image(self) -> bool:
        return self._task.name == "image classification"

    @property
    def _text_config(self) -> Any:
        return self._config.get_text_config()

    @property
    def _limit(self) -> int | None:
        """The longest sequence that the model takes."""
        config = self._text_config
        # XLNet has -1 for none.
        found = next(
            (limit for position in POSITIONS if (limit := getattr(config, position, None) or 0) > 0), None
        )
        if found is not None and config.model_type in COUNTED_FROM_PADDING:
            return int(found) - (config.pad_token_id or 0) - 1
        return found

    @property
    def tokens(self) -> int:
        """Tokens a sample."""
        limit = self._limit
        if self.seq is None:
            return min(limit or LONGEST, LONGEST)
        if self._is_image:
            raise WrongUse(f"--seq {self.seq}", found="this model reads images", cure="Leave it out.")
        if self.seq < 1:
            raise WrongUse(f"--seq {self.seq}", found="it is below 1", cure="Give at least 1 token.")
        # A model without a table of positions (T5) names a number and does not mind.
        if limit is not None and self.seq > limit and not self._counts_distances:
            raise WrongUse(
                f"--seq {self.seq}",
                found=f"{self._given.removeprefix('job ')} has {limit} positions",
                cure=f"Give at most {limit}.",
            )
        return self.seq

    @property
    def sample_length(self) -> int | None:
        """Tokens a sample, whether chosen or assumed; None for a model that reads images."""
        return None if self._is_image else self.tokens

    @property
    def _counts_distances(self) -> bool:
        return hasattr(self._text_config, "relative_attention_num_buckets")

    @property
    def _frozen_dtype(self) -> torch.dtype:
        """Frozen weights stay as they are stored, where nothing asks for narrower ones."""
        default = torch.get_default_dtype()
        text = read_config(self.folder)
        stored = getattr(torch, str(text.get("dtype") or text.get("torch_dtype")), None)
        tied = bool(getattr(self._text_config, "tie_word_embeddings", False)) and not self.lora
        if default is not torch.float32 or not isinstance(stored, torch.dtype) or tied:
            return default
        return stored

    def model(self) -> nn.Module:
        """The model with random weights, with adapters or frozen as asked."""
        if self.lora is not None and self.lora < 1:
            raise WrongUse(f"--lora {self.lora}", found="it is below 1", cure="Give a rank such as 8 or 16.")
        _ = self.tokens  # Before a large model is built in vain.
        built = self._built()
        if not self.lora and not self.frozen:
            return built
        heads = head_modules(built)
        built.requires_grad_(False)
        if self.lora and not adapt(built, self.lora, alpha=2 * self.lora, but=heads):
            raise WrongUse(
                f"--lora {self.lora}",
                found=f"{type(built).__name__} has no linear layer but its head",
                cure="Use --frozen, or train all of it.",
            )
        # The head of a classifier is new, so it learns beside the adapters.
        if not self.lora or "classification" in self._task.name:
            for head in heads:
                _let_learn(head)
        return built

    def _built(self) -> nn.Module:
        transformers = library(self._given)
        auto = getattr(transformers, self._task.auto)
        dtype = self._frozen_dtype if self.lora or self.frozen else torch.get_default_dtype()
        files = stored(Path(self.folder)) if self.pretrained and not is_planned() else []
        make = partial(loaded, auto, self.folder, self._config) if files else partial(self._random, auto)
        try:
            try:
                built, self._weights = make(dtype=dtype, attn_implementation="sdpa")
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
                self._eager = True
                built, self._weights = make(dtype=dtype, attn_implementation="eager")
        except TrimtabError:
            raise
        except Exception as error:
            raise JobFailed(
                self._given,
                found=f"transformers cannot build it: {type(error).__name__}: {_first_line(error)}",
                cure="Mend the folder: its weights do not fit config.json; or use --set pretrained=false."
                if files
                else "Correct config.json: its sizes may not fit together.",
            ) from error
        if built.main_input_name not in ("input_ids", "pixel_values"):
            raise WrongUse(
                self._given,
                found=f"{type(built).__name__} reads {built.main_input_name}, which cannot be made up here",
                cure=SUPPORTED,
            )
        in_autocast(built)
        return built

    def _random(self, auto: Any, **how: Any) -> tuple[Any, str]:
        pickled = any(Path(self.folder).glob("*.bin"))
        why = "as asked" if not self.pretrained else f"{self.folder} has no safetensors"
        why += "; pickled weights are not read, as reading them runs code" if pickled else ""
        return auto.from_config(self._config, **how), f"random, {why}"

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Random tokens or pixels, with labels."""
        if self._is_image:
            shape = self._image_shape
            made = {"pixel_values": torch.randn(size, *shape)}
            return made | {"labels": torch.randint(self._config.num_labels, (size,))}
        ids = torch.randint(self._vocab, (size, self.tokens))
        if self._task.name == "sequence classification":
            return {"input_ids": ids, "labels": self._classes((size,), None)}
        if self._task.name == "masked LM":
            return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < MASKED, ids, IGNORED)}
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """The model's own."""
        return model(**batch).loss

    def weight(self, batch: dict[str, torch.Tensor]) -> Any:
        """Tokens that have a label, or samples."""
        labels = batch["labels"]
        if "LM" not in self._task.name:
            return labels.numel() if self._task.name == "seq2seq" else labels.shape[0]
        # A causal model says nothing about the first token.
        counted = labels[:, 1:] if self._task.name == "causal LM" else labels
        return (counted != IGNORED).sum()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(params, lr=self.rate)

    def dataset(self) -> Synthetic | TokenBlocks:
        """Blocks of text, without those that are held out; or images of which each class has a brightness."""
        if self._is_image:
            return Synthetic(self.samples or 0, self._image)
        tokens, layout, _ = self._text()
        sample = partial(self._sample, blocks=layout.blocks, hidden=self._hidden, fixed=False)
        return TokenBlocks(tokens, self.tokens, layout.samples, layout.block, sample)

    def validation(self) -> TokenBlocks | None:
        """Blocks that are held out, evenly spaced; None for images and for texts too short for any."""
        if self._is_image:
            return None
        tokens, layout, _ = self._text()
        count = min(layout.held_out, self.validation_batches * self.global_batch)
        if count < 1:
            return None
        sample = partial(self._sample, blocks=layout.blocks, hidden=self._hidden, fixed=True)
        return TokenBlocks(tokens, self.tokens, count, partial(layout.held_out_block, samples=count), sample)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is trained on, and where the weights came from."""
        weights = (f"weights: {self._weights}",) if self._weights else ()
        if self._is_image:
            return (*weights, "images: made up, of a brightness that says their class")
        tokens, layout, foreign = self._text()
        own = () if foreign else (f"{self.folder} has no tokenizer: tokens are learnt from the text",)
        return (*weights, *described(tokens, layout, self.tokens), *own)

    def _text(self) -> tuple[Tokens, BlockLayout, Foreign | None]:
        foreign = self._tokenizer
        if foreign is None and self._vocab < BYTES:
            raise WrongUse(
                self._given,
                found=f"config.json has vocab_size {self._vocab}, and text is made of {BYTES} kinds of bytes",
                cure=f"Give the folder a tokenizer, or a vocab_size of {BYTES} or more.",
            )
        tokens = tokenised(find(self.data), foreign or Learnt(self._vocab))
        return tokens, laid_out(tokens, self.tokens, self.samples), foreign

    @cached_property
    def _tokenizer(self) -> Foreign | None:
        """The folder's own, where it has one."""
        named = getattr(self._text_config, "eos_token_id", None)
        ends = [one for one in (named if isinstance(named, list) else [named]) if isinstance(one, int)]
        end = next((end for end in ends if 0 <= end < self._vocab), None)
        return tokenizer_in(Path(self.folder), self._vocab, end)

    @cached_property
    def _hidden(self) -> int:
        """The token in place of one that is to be said."""
        mask = None if self._tokenizer is None else self._tokenizer.mask()
        return min(HIDDEN, self._vocab - 1) if mask is None else mask

    @property
    def _vocab(self) -> int:
        return int(self._text_config.vocab_size)

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        size = getattr(self._config, "image_size", 224)
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        return int(getattr(self._config, "num_channels", 3)), int(high), int(wide)

    def _classes(self, shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
        """Labels of sequences; a model of one label has a number to say."""
        labels = self._config.num_labels
        made = torch.randint(max(2, labels), shape, generator=generator)
        return made.to(torch.get_default_dtype()) if labels == 1 else made

    def _image(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        kind = integer(generator, 0, self._config.num_labels)
        noise = torch.randn(*self._image_shape, generator=generator)
        return {"pixel_values": noise + 4 * kind / self._config.num_labels, "labels": torch.tensor(kind)}

    def _sample(
        self, ids: torch.Tensor, number: int, *, blocks: int, hidden: int, fixed: bool
    ) -> dict[str, torch.Tensor]:
        """Block `number` of so many with its labels; what is hidden is drawn anew unless it is `fixed`."""
        if self._task.name == "sequence classification":
            return {"input_ids": ids, "labels": self._place(number / blocks)}
        if self._task.name == "causal LM":
            return {"input_ids": ids, "labels": ids.clone()}
        draw = torch.Generator().manual_seed(number) if fixed else torch.default_generator
        asked = torch.rand(ids.shape, generator=draw, device=CPU) < MASKED
        # A sample without a question would have no loss.
        asked[int(torch.randint(len(ids), (), generator=draw, device=CPU))] = True
        shown = ids.masked_fill(asked, hidden)
        if self._task.name == "masked LM":
            return {"input_ids": shown, "labels": torch.where(asked, ids, IGNORED)}
        return {"input_ids": shown, "labels": ids.clone()}

    def _place(self, share: float) -> torch.Tensor:
        """Which part of the text it is, of as many as there are labels; a model of one says how far it is."""
        labels = int(self._config.num_labels)
        return torch.tensor(share if labels == 1 else int(share * labels))


def head_modules(model: Any) -> list[nn.Module]:
    """What lies outside of the base model, or the output layer of a model that is its own base."""
    base = model.base_model
    if base is model:
        output = model.get_output_embeddings()
        return [] if output is None else [output]
    within = {id(part) for part in base.modules()}
    outside = [child for child in model.children() if id(child) not in within]
    return [child for child in outside if any(True for _ in child.parameters())]


def _let_learn(head: nn.Module) -> None:
    """Train a head in the dtype of the day, whatever the frozen model hands it."""
    head.requires_grad_(True)
    head.to(torch.get_default_dtype())

    def fitted(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        kind = next(module.parameters())
        if torch.is_autocast_enabled(kind.device.type):
            return given
        return tuple(
            item.to(kind.dtype) if torch.is_tensor(item) and item.is_floating_point() else item
            for item in given
        )

    head.register_forward_pre_hook(fitted)


def read_config(folder: str, *, given: str = "") -> dict[str, Any]:
    """The text of FOLDER/config.json, if it is one that can be built without anybody's code."""
    cure = "Name a folder with a Hugging Face config.json"
    cure += "." if given else ", as in hf:./my-model."
    given = given or f"job hf:{folder}"
    place = Path(folder)
    file = place / "config.json"
    if not folder or not place.is_dir():
        raise WrongUse(given, found="there is no such folder", cure=cure)
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongUse(given, found="the folder has no config.json", cure=cure) from None
    except OSError as error:
        raise WrongUse(given, found=f"config.json cannot be read ({error.strerror})", cure=cure) from error
    except ValueError as error:
        raise WrongUse(given, found=f"config.json is not JSON ({error})", cure="Correct the file.") from error
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        raise WrongUse(given, found="config.json has no model_type", cure="Say which model it is.")
    if text.get("auto_map"):
        raise WrongUse(
            given,
            found="config.json has an auto_map: the model is code that comes with the folder",
            cure="Write a job file that builds it, and name that as FILE.py:NAME.",
        )
    if text.get("quantization_config"):
        raise WrongUse(
            given,
            found="config.json has a quantization_config, and quantized weights cannot be trained here",
            cure="Take that entry out to see the model unquantized.",
        )
    return text


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
