"""Job hf:FOLDER: train the model of a Hugging Face folder, with its weights and tokenizer if present.

Planning reads only config.json. Nothing is downloaded, and no code from the folder is run.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.errors import JobFailed, TrimtabError, UnknownName, WrongUse, find_nearest
from trimtab.jobs.head import IGNORE_INDEX
from trimtab.jobs.job import Job
from trimtab.jobs.lora import add_adapters
from trimtab.jobs.model_sizes import DEFAULT_LONGEST, POSITIONS
from trimtab.jobs.pretrained import (
    import_transformers,
    is_planning,
    list_weight_files,
    load_pretrained,
    run_experts_in_autocast,
)
from trimtab.jobs.registry import FOLDER_SAMPLES, require_folder
from trimtab.jobs.stored_base import find_stored_base, read_base_format
from trimtab.jobs.synthetic import CPU, Synthetic, draw_integer
from trimtab.jobs.text.blocks import TokenBlocks, describe_text, lay_out_blocks
from trimtab.jobs.text.byte_pairs import BYTES
from trimtab.jobs.text.corpus import find_text
from trimtab.jobs.text.documents import make_typical_row, read_lengths
from trimtab.jobs.text.model_tokenizer import find_tokenizer
from trimtab.jobs.text.tokens import BytePairTokenizer, tokenize
from trimtab.units import plural

if TYPE_CHECKING:
    from torch import nn

    from trimtab.jobs.text.blocks import BlockLayout
    from trimtab.jobs.text.documents import DocumentRow
    from trimtab.jobs.text.model_tokenizer import ModelTokenizer
    from trimtab.jobs.text.tokens import Tokens
    from trimtab.spec import BaseFormat

MASKED_SHARE = 0.15
"""Share of tokens that are masked for a masked language model."""
ATTENTIONS = ("sdpa", "flash_attention_2", "flex_attention", "eager")
"""Attention implementations of transformers, by its names."""
WHOLE_ROW = ("sdpa", "eager")
"""Those that compute attention of a whole row and mask out other documents."""
FULL_ROW = 0.995
"""Share of a row from which it is said to be full."""
GOLDEN_SECTION = 0.618034
SHIFTED = "shift_labels"
"""Key of labels that are aligned with the inputs, as transformers calls them."""
MASK_BYTE = 255
"""Byte that replaces a masked token if the tokenizer has no mask token; it is not used in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """A training task, by the head of the model."""

    name: str
    endings: tuple[str, ...]
    """Endings of the names of such architectures."""
    auto: str
    """The class of transformers that builds the model."""


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
"""In the order in which they are tried if a config names no architecture."""
SUPPORTED = (
    "It can be ...ForCausalLM, ...LMHeadModel, ...ForMaskedLM, ...ForConditionalGeneration (text to text), "
)
SUPPORTED += (
    "...ForSequenceClassification or ...ForImageClassification. For another task, write a job whose model() "
    "builds this one, and name it as FILE.py:NAME."
)
COUNTED_FROM_PADDING = frozenset(
    (
        *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
"""Model types whose positions start after the id of the padding token."""


PLAIN_DECODERS = frozenset(("llama", "mistral", "mixtral", "qwen2", "qwen3"))
"""Model types of decoders whose config.json states the longest sequence."""


class HuggingFace(Job):
    """Train a model of a Hugging Face folder, with options such as --seq, --lora and --packed."""

    name = "hf"
    additive = True
    global_batch = 64
    samples: int | None = FOLDER_SAMPLES
    folder = ""
    seq: int | None = None
    """Tokens per sample."""
    lora: int | None = None
    """Rank of LoRA adapters on every linear layer except the head; the rest is frozen."""
    packed: Any = None
    """Tokens of each of the documents that share a row: a number, a list, or a file of lengths."""
    lengths: Any = None
    """Tokens of the samples, which are padded to the longest: a number, a list, or a file of lengths."""
    attention = ""
    """Attention of transformers, such as flex_attention; empty: sdpa, or eager if the model has no sdpa."""
    layers: int | None = None
    """Number of hidden layers, instead of the config's own."""
    frozen = False
    """Train only the head."""
    rate = 1e-4
    data = ""
    """Text file, or folder of text files; empty for the sources of Python's standard library."""
    pretrained = True
    """Whether to load the folder's safetensors, if it has any."""
    validation_batches = 8
    """Maximum global batches of held-out text per evaluation."""
    _weights = ""
    """Origin of the weights, for a note."""
    _eager = False
    """Whether the model has no fused attention."""

    def __init__(self, folder: str) -> None:
        read_config(folder, quantized=True)
        self.folder = folder
        self.name = Path(folder).resolve().name

    @cached_property
    def _config(self) -> Any:
        """The config as a transformers object."""
        text = read_config(self.folder, quantized=True)
        transformers = import_transformers(self._given)
        kind = text["model_type"]
        mapping = transformers.CONFIG_MAPPING
        if kind not in mapping:
            close = find_nearest(kind, list(mapping))
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
        # The engine stores frozen layers in their format; transformers would need bitsandbytes for it.
        if self.stored_base.storage.is_quantized:
            del config.quantization_config
        if getattr(config, "pad_token_id", None) is None:
            # Classifiers use it to find the last token, and decoders start with it.
            config.pad_token_id = 0
        if self.layers is not None:
            _set_layers(config, self.layers, self._given)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id
        return config

    def settle(self, given: frozenset[str]) -> None:
        """Check the options for lengths and attention."""
        if self.attention not in ("", *ATTENTIONS):
            close = find_nearest(self.attention, ATTENTIONS)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise WrongUse(
                f"--attention {self.attention}",
                found=f"trimtab knows no such attention of transformers{meant}",
                cure=f"Use {', '.join(ATTENTIONS)}.",
            )
        if self.packed is not None and self.lengths is not None:
            raise WrongUse(
                f"--packed {self.packed} and --lengths {self.lengths}",
                found="documents are packed or padded, not both",
                cure=f"Write --packed {self.lengths} to pack documents of these lengths, or --lengths alone "
                "to pad them.",
            )
        for name in ("packed", "lengths"):
            if name in given and getattr(self, name) is not None:
                read_lengths(getattr(self, name), f"--{name}")

    @cached_property
    def _row(self) -> DocumentRow | None:
        """The documents of a row, if they are packed."""
        if self.packed is None:
            return None
        self._refuse_other_tasks(f"--packed {self.packed}")
        return make_typical_row(read_lengths(self.packed, "--packed"), self.tokens)

    @cached_property
    def _padded_lengths(self) -> tuple[int, ...]:
        """The lengths of padded samples; empty if all are equally long."""
        if self.lengths is None:
            return ()
        self._refuse_other_tasks(f"--lengths {self.lengths}")
        return read_lengths(self.lengths, "--lengths")

    def _refuse_other_tasks(self, given: str) -> None:
        if self._task.name != "causal LM":
            raise WrongUse(
                given,
                found=f"this model is trained as {self._task.name}",
                cure="Leave it out: only causal language models have lengths of documents here.",
            )

    @property
    def _is_flat(self) -> bool:
        """Whether all rows are laid one after another: flash attention finds documents in one row only."""
        return self._row is not None and self.attention.startswith("flash")

    @property
    def _given(self) -> str:
        return f"job hf:{self.folder}"

    @property
    def stored_base(self) -> BaseFormat:
        """Format of the weights in the folder, by the quantization_config in config.json."""
        return find_stored_base(f"hf:{self.folder}")

    @cached_property
    def _task(self) -> HeadTask:
        """The task of the architecture in the config."""
        named = read_config(self.folder, quantized=True).get("architectures") or []
        config = self._config
        if not named:
            chosen = next((task for task in TASKS if self._supports(task)), None)
        else:
            fitting = (task for task in TASKS if named[0].endswith(task.endings))
            chosen = next((task for task in fitting if self._supports(task)), None)
        if chosen is None:
            what = (
                f"the architecture {named[0]}" if named else f"no head for model_type {config.model_type!r}"
            )
            raise WrongUse(
                self._given, found=f"config.json names {what}, which cannot be trained here", cure=SUPPORTED
            )
        return chosen

    def _supports(self, task: HeadTask) -> bool:
        return type(self._config) in getattr(import_transformers(self._given), task.auto)._model_mapping  # noqa: SLF001

    def import_ahead(self) -> None:
        """Import transformers and the module of the architecture, which it loads lazily."""
        _ = getattr(import_transformers(self._given), self._task.auto)._model_mapping[type(self._config)]  # noqa: SLF001

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Choices made for the user, listed in an estimate."""
        notes = []
        if self.seq is None and not self._is_image and not self._padded_lengths:
            notes.append(f"sequences of {self.tokens} tokens (--seq)")
        if not read_config(self.folder, quantized=True).get("architectures"):
            notes.append(f"config.json names no architecture: taken as {self._task.name}")
        if (self.lora or self.frozen) and self._frozen_dtype is not torch.get_default_dtype():
            notes.append(
                f"frozen weights in {str(self._frozen_dtype).removeprefix('torch.')}, as in config.json"
            )
        if self.stored_base.storage.is_quantized:
            notes.append(
                f"config.json stores linear layers as {self.stored_base}: that is the base unless another is "
                "named"
            )
        notes += self._describe_lengths()
        if self.layers is not None:
            notes.append(f"{self.layers} hidden layers, which config.json does not say (--set layers)")
        if self._eager and hasattr(self._config, "num_attention_heads"):
            notes.append("attention without fused kernels: this model has no fused ones")
        return tuple(notes)

    def _describe_lengths(self) -> list[str]:
        """Return what is assumed about documents in rows, and what their attention costs."""
        if self._padded_lengths:
            longest = self.tokens
            mean = sum(min(length, longest) for length in self._padded_lengths) / len(self._padded_lengths)
            text = (
                f"every sample is padded to the longest, {longest:,} tokens: {1 - mean / longest:.0%} of the "
            )
            text += "tokens are padding. Batches without a long sample take less; --packed takes no padding"
            return [text]
        row = self._row
        if row is None:
            return []
        attention = "eager" if self._eager else self.attention or "sdpa"
        text = f"{attention} attention over rows of {plural(len(row.lengths), 'packed document')}"
        if len(set(row.lengths)) > 1:
            text += f" ({min(row.lengths):,} to {max(row.lengths):,} tokens)"
        if row.filled < FULL_ROW:
            text += f", which are {row.filled:.0%} full"
        if row.cut:
            text += f"; {row.cut:.0%} of the documents are longer than a row, and are cut"
        notes = [text]
        if attention in WHOLE_ROW:
            notes.append(
                f"{attention} makes a mask over the whole row, so that memory and time grow with its square: "
                "--attention flash_attention_2 or flex_attention costs the squares of the documents"
            )
        return notes

    @property
    def _is_image(self) -> bool:
        return self._task.name == "image classification"

    @property
    def _text_config(self) -> Any:
        return self._config.get_text_config()

    @property
    def _limit(self) -> int | None:
        """The longest sequence of the model; None if unlimited."""
        config = self._text_config
        # XLNet has -1 for no limit.
        longest = next(
            (limit for position in POSITIONS if (limit := getattr(config, position, None) or 0) > 0), None
        )
        if longest is not None and config.model_type in COUNTED_FROM_PADDING:
            return int(longest) - (config.pad_token_id or 0) - 1
        return longest

    @property
    def tokens(self) -> int:
        """Tokens per sample."""
        limit = self._limit
        if self.seq is None and self._padded_lengths:
            return min(limit or self._padded_lengths[-1], self._padded_lengths[-1])
        if self.seq is None:
            return min(limit or DEFAULT_LONGEST, DEFAULT_LONGEST)
        if self._is_image:
            raise WrongUse(f"--seq {self.seq}", found="this model reads images", cure="Leave it out.")
        if self.seq < 1:
            raise WrongUse(f"--seq {self.seq}", found="it is below 1", cure="Give at least 1 token.")
        # A model with relative positions (T5) states a number but can exceed it.
        if limit is not None and self.seq > limit and not self._has_relative_positions:
            raise WrongUse(
                f"--seq {self.seq}",
                found=f"{self._given.removeprefix('job ')} has {limit} positions",
                cure=f"Give at most {limit}.",
            )
        return self.seq

    @property
    def limits(self) -> dict[str, tuple[int, str]]:
        """The largest value of some options, and what sets it, for `trimtab max`."""
        limits = {}
        if not self._is_image and self._limit is not None and not self._has_relative_positions:
            limits["seq"] = self._limit, f"the model has {self._limit:,} positions"
        width = getattr(self._text_config, "hidden_size", None)
        if isinstance(width, int) and width > 0:
            limits["lora"] = width, f"the model is {width:,} wide: a larger rank cannot express more"
        return limits

    @property
    def sample_length(self) -> int | None:
        """Tokens per sample, given or assumed; None for an image model."""
        limit = self._find_plain_limit()
        if limit is not None and self.seq is None:
            return min(limit, DEFAULT_LONGEST)
        if limit is not None and self.seq is not None and 1 <= self.seq <= limit:
            return self.seq
        return None if self._is_image else self.tokens

    def _find_plain_limit(self) -> int | None:
        """Return the longest sequence of a usual decoder, without an import of transformers; else None.

        The import takes seconds, and a plan waits for it.
        """
        text = read_config(self.folder, quantized=True)
        named, limit = text.get("architectures") or [""], text.get(POSITIONS[0])
        is_plain = text["model_type"] in PLAIN_DECODERS and str(named[0]).endswith("ForCausalLM")
        is_plain = is_plain and self.packed is None and self.lengths is None and self.layers is None
        if not is_plain or not isinstance(limit, int) or limit < 1 or find_spec("transformers") is None:
            return None
        return limit

    @property
    def _has_relative_positions(self) -> bool:
        return hasattr(self._text_config, "relative_attention_num_buckets")

    @property
    def _frozen_dtype(self) -> torch.dtype:
        """Dtype of frozen weights: as stored, unless the default dtype is narrower."""
        default = torch.get_default_dtype()
        text = read_config(self.folder, quantized=True)
        stored_dtype = getattr(torch, str(text.get("dtype") or text.get("torch_dtype")), None)
        tied = bool(getattr(self._text_config, "tie_word_embeddings", False)) and not self.lora
        if default is not torch.float32 or not isinstance(stored_dtype, torch.dtype) or tied:
            return default
        return stored_dtype

    def model(self) -> nn.Module:
        """Return the model, with adapters or frozen weights if chosen."""
        if self.lora is not None and self.lora < 1:
            raise WrongUse(f"--lora {self.lora}", found="it is below 1", cure="Give a rank such as 8 or 16.")
        # Check these options before a large model is built.
        _ = self.tokens, self._row, self._padded_lengths
        if self.stored_base.storage.is_quantized and not self.lora and not self.frozen:
            raise WrongUse(
                self._given,
                found=f"its weights are stored as {self.stored_base}, which cannot be trained themselves",
                cure="Train adapters on them with --lora 16, or take quantization_config out of config.json.",
            )
        built = self._build()
        if not self.lora and not self.frozen:
            return built
        heads = head_modules(built)
        built.requires_grad_(False)
        if self.lora and not add_adapters(built, self.lora, alpha=2 * self.lora, exclude=heads):
            raise WrongUse(
                f"--lora {self.lora}",
                found=f"{type(built).__name__} has no linear layer except its head",
                cure="Use --frozen, or train all of it.",
            )
        # The head of a classifier is new, so it is trained with the adapters.
        if not self.lora or "classification" in self._task.name:
            for head in heads:
                _unfreeze_head(head)
        return built

    def _build(self) -> nn.Module:
        transformers = import_transformers(self._given)
        auto = getattr(transformers, self._task.auto)
        dtype = self._frozen_dtype if self.lora or self.frozen else torch.get_default_dtype()
        files = list_weight_files(Path(self.folder)) if self.pretrained and not is_planning() else []
        if files and self.stored_base.storage.is_quantized:
            raise WrongUse(
                self._given,
                found=f"its weights are stored as {self.stored_base}, and trimtab reads 16 and 32 bits only",
                cure=f"Name the folder of the unquantized model with --base {self.stored_base}, or use --set "
                "pretrained=false to try it with random weights.",
            )
        build = (
            partial(load_pretrained, auto, self.folder, self._config)
            if files
            else partial(self._build_random, auto)
        )
        try:
            try:
                built, self._weights = build(dtype=dtype, attn_implementation=self.attention or "sdpa")
            except (ValueError, ImportError) as error:
                if self.attention:
                    raise self._attention_error(error) from error
                if "scaled_dot_product_attention" not in str(error):
                    raise
                self._eager = True
                built, self._weights = build(dtype=dtype, attn_implementation="eager")
        except TrimtabError:
            raise
        except Exception as error:
            raise JobFailed(
                self._given,
                found=f"transformers cannot build it: {type(error).__name__}: {_first_line(error)}",
                cure="Fix the folder: its weights do not fit config.json; or use --set pretrained=false."
                if files
                else "Correct config.json: its sizes may not fit together.",
            ) from error
        if built.main_input_name not in ("input_ids", "pixel_values"):
            raise WrongUse(
                self._given,
                found=f"{type(built).__name__} reads {built.main_input_name}, which trimtab cannot generate",
                cure=SUPPORTED,
            )
        if self._row is not None and "position_ids" not in inspect.signature(built.forward).parameters:
            raise WrongUse(
                f"--packed {self.packed}",
                found=f"{type(built).__name__} takes no positions, so that it cannot tell documents apart",
                cure="Leave it out.",
            )
        run_experts_in_autocast(built)
        return built

    def _attention_error(self, error: Exception) -> WrongUse:
        missing = "flash" in self.attention and isinstance(error, ImportError)
        return WrongUse(
            f"--attention {self.attention}",
            found=f"transformers cannot use it: {_first_line(error)}",
            cure="Install flash-attn on a machine with a GPU, or use --attention flex_attention."
            if missing
            else "Leave it out, or name another one.",
        )

    def _build_random(self, auto: Any, **options: Any) -> tuple[Any, str]:
        pickled = any(Path(self.folder).glob("*.bin"))
        why = "as chosen" if not self.pretrained else f"{self.folder} has no safetensors"
        why += "; pickled weights are not read, as reading them runs code" if pickled else ""
        return auto.from_config(self._config, **options), f"random, {why}"

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Return random tokens or pixels, with labels."""
        if self._is_image:
            shape = self._image_shape
            images = {"pixel_values": torch.randn(size, *shape)}
            return images | {"labels": torch.randint(self._config.num_labels, (size,))}
        ids = torch.randint(self._vocab, (size, self.tokens))
        if self._task.name == "sequence classification":
            return {"input_ids": ids, "labels": self._classes((size,), None)}
        if self._task.name == "masked LM":
            return {
                "input_ids": ids,
                "labels": torch.where(torch.rand(ids.shape) < MASKED_SHARE, ids, IGNORE_INDEX),
            }
        return self._add_documents({"input_ids": ids, "labels": ids.clone()})

    def _add_documents(self, batch: dict[str, torch.Tensor], first: int = 0) -> dict[str, torch.Tensor]:
        """Give rows the positions of packed documents, or a mask of padding; `first` numbers the samples."""
        ids, labels = batch["input_ids"], batch["labels"]
        if self._row is not None:
            positions = torch.tensor(self._row.positions)
            # A document does not follow from the one before it.
            labels = labels.masked_fill(positions == 0, IGNORE_INDEX)
            return batch | {"labels": labels, "position_ids": positions.expand_as(ids).contiguous()}
        if self._padded_lengths:
            samples = 1 if ids.dim() == 1 else ids.shape[0]
            lengths = torch.tensor(self._choose_lengths(samples, first)).view(*ids.shape[:-1], 1)
            mask = torch.arange(self.tokens) < lengths
            return batch | {
                "labels": labels.masked_fill(~mask, IGNORE_INDEX), "attention_mask": mask.to(torch.int64)
            }  # fmt: skip
        return batch

    def _choose_lengths(self, samples: int, first: int) -> list[int]:
        """Return lengths of samples: the longest first, then others in an order without a pattern."""
        known = self._padded_lengths
        # Steps of the golden section visit all lengths evenly, in any number of samples.
        places = [round(number * GOLDEN_SECTION * len(known)) for number in range(first, first + samples)]
        return [min(known[-1 - place % len(known)], self.tokens) for place in places]

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return the model's own loss."""
        if self._is_flat:
            batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
        if SHIFTED in batch:
            # A part of a sequence may have no label, and its mean would be NaN.
            counted = (batch[SHIFTED] != IGNORE_INDEX).sum().clamp(min=1)
            return model(**batch, num_items_in_batch=counted).loss
        return model(**batch).loss

    def split_sequence(self, batch: dict[str, torch.Tensor], part: Any) -> dict[str, torch.Tensor]:
        """Return one rank's part of the sequences, with labels that are shifted before."""
        given = f"cp={part.size}"
        if self._task.name != "causal LM":
            raise WrongUse(
                given,
                found=f"this model is trained as {self._task.name}; only causal language models are split",
                cure="Leave cp out.",
            )
        if self._row is not None or "attention_mask" in batch:
            option = "--packed" if self._row is not None else "--lengths"
            raise WrongUse(
                given,
                found=f"{option} needs a mask for the documents of a row, whose columns are on other ranks",
                cure=f"Leave {option} out, or cp.",
            )
        ids = batch["input_ids"]
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        positions = part.positions(ids.shape[1]).to(ids.device).expand(ids.shape[0], -1)
        labels = part.select(shifted)
        # transformers computes a loss where there are `labels`, and takes `shift_labels` as they are.
        return {
            "input_ids": part.select(ids), "labels": labels, SHIFTED: labels, "position_ids": positions
        }  # fmt: skip

    def weight(self, batch: dict[str, torch.Tensor]) -> Any:
        """Return the number of tokens with a label, or of samples."""
        labels = batch["labels"]
        if SHIFTED in batch:
            return (batch[SHIFTED] != IGNORE_INDEX).sum()
        if "LM" not in self._task.name:
            return labels.numel() if self._task.name == "seq2seq" else labels.shape[0]
        # A causal model does not predict the first token.
        counted = labels[:, 1:] if self._task.name == "causal LM" else labels
        return (counted != IGNORE_INDEX).sum()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=self.rate)

    def dataset(self) -> Synthetic | TokenBlocks:
        """Return the training blocks of the text, or images whose brightness depends on the class."""
        if self._is_image:
            return Synthetic(self.samples or 0, self._image)
        tokens, layout, _ = self._text()
        sample = partial(self._sample, blocks=layout.blocks, mask=self._mask_token, fixed=False)
        return TokenBlocks(tokens, self.tokens, layout.samples, layout.block, sample)

    def validation(self) -> TokenBlocks | None:
        """Return held-out blocks, evenly spaced; None for images and for a text that is too short."""
        if self._is_image:
            return None
        tokens, layout, _ = self._text()
        count = min(layout.held_out, self.validation_batches * self.global_batch)
        if count < 1:
            return None
        sample = partial(self._sample, blocks=layout.blocks, mask=self._mask_token, fixed=True)
        return TokenBlocks(tokens, self.tokens, count, partial(layout.held_out_block, samples=count), sample)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on the training data and the origin of the weights."""
        weights = [f"weights: {self._weights}"] if self._weights else []
        if self.layers is not None:
            weights.append(f"layers: {self.layers}, as chosen with layers={self.layers}; not config.json's")
        if self._is_image:
            return (*weights, "images: synthetic, with a brightness that depends on the class")
        tokens, layout, tokenizer = self._text()
        own: tuple[str, ...] = ()
        if tokenizer is None:
            own = (f"{self.folder} has no tokenizer: a tokenizer is trained on the text",)
        if self._row is not None or self._padded_lengths:
            own += ("documents: the text is cut at the lengths that were given",)
        return (*weights, *describe_text(tokens, layout, self.tokens), *own)

    def _text(self) -> tuple[Tokens, BlockLayout, ModelTokenizer | None]:
        tokenizer = self._tokenizer
        if tokenizer is None and self._vocab < BYTES:
            raise WrongUse(
                self._given,
                found=f"config.json has vocab_size {self._vocab}, and text is made of {BYTES} kinds of bytes",
                cure=f"Give the folder a tokenizer, or a vocab_size of {BYTES} or more.",
            )
        tokens = tokenize(find_text(self.data), tokenizer or BytePairTokenizer(self._vocab))
        return tokens, lay_out_blocks(tokens, self.tokens, self.samples), tokenizer

    @cached_property
    def _tokenizer(self) -> ModelTokenizer | None:
        """The folder's tokenizer, if it has one."""
        named = getattr(self._text_config, "eos_token_id", None)
        ends = [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]
        end = next((end for end in ends if 0 <= end < self._vocab), None)
        return find_tokenizer(Path(self.folder), self._vocab, end)

    @cached_property
    def _mask_token(self) -> int:
        """The token that replaces a masked token."""
        mask = None if self._tokenizer is None else self._tokenizer.mask_token()
        return min(MASK_BYTE, self._vocab - 1) if mask is None else mask

    @property
    def _vocab(self) -> int:
        return int(self._text_config.vocab_size)

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        size = getattr(self._config, "image_size", 224)
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        return int(getattr(self._config, "num_channels", 3)), int(high), int(wide)

    def _classes(self, shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
        """Return labels of sequences: numbers for a model with one label, else classes."""
        labels = self._config.num_labels
        classes = torch.randint(max(2, labels), shape, generator=generator)
        return classes.to(torch.get_default_dtype()) if labels == 1 else classes

    def _image(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        kind = draw_integer(generator, 0, self._config.num_labels)
        noise = torch.randn(*self._image_shape, generator=generator)
        return {"pixel_values": noise + 4 * kind / self._config.num_labels, "labels": torch.tensor(kind)}

    def _sample(
        self, ids: torch.Tensor, number: int, *, blocks: int, mask: int, fixed: bool
    ) -> dict[str, torch.Tensor]:
        """Return a block with its labels; masked positions are redrawn each time unless `fixed`."""
        if self._task.name == "sequence classification":
            return {"input_ids": ids, "labels": self._position_label(number / blocks)}
        if self._task.name == "causal LM":
            return self._add_documents({"input_ids": ids, "labels": ids.clone()}, first=number)
        draw = torch.Generator().manual_seed(number) if fixed else torch.default_generator
        masked = torch.rand(ids.shape, generator=draw, device=CPU) < MASKED_SHARE
        # A sample without a masked token would have no loss.
        masked[int(torch.randint(len(ids), (), generator=draw, device=CPU))] = True
        shown = ids.masked_fill(masked, mask)
        if self._task.name == "masked LM":
            return {"input_ids": shown, "labels": torch.where(masked, ids, IGNORE_INDEX)}
        return {"input_ids": shown, "labels": ids.clone()}

    def _position_label(self, share: float) -> torch.Tensor:
        """Return the part of the text as a class, or the position in it for a model with one label."""
        labels = int(self._config.num_labels)
        return torch.tensor(share if labels == 1 else int(share * labels))


def head_modules(model: Any) -> list[nn.Module]:
    """Return the modules outside of the base model, or the output layer if the model is its own base."""
    base = model.base_model
    if base is model:
        output = model.get_output_embeddings()
        return [] if output is None else [output]
    within = {id(part) for part in base.modules()}
    outside = [child for child in model.children() if id(child) not in within]
    return [child for child in outside if any(True for _ in child.parameters())]


def _unfreeze_head(head: nn.Module) -> None:
    """Make a head trainable in the default dtype, and cast its inputs."""
    head.requires_grad_(True)
    head.to(torch.get_default_dtype())

    def cast_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        kind = next(module.parameters())
        if torch.is_autocast_enabled(kind.device.type):
            return inputs
        return tuple(
            item.to(kind.dtype) if torch.is_tensor(item) and item.is_floating_point() else item
            for item in inputs
        )

    head.register_forward_pre_hook(cast_inputs)


DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
"""Config keys for the layers of a decoder next to an encoder."""


def _set_layers(config: Any, layers: int, given: str) -> None:
    """Give a config another number of hidden layers, in lists with an entry for each layer too.

    The entries of such a list, as for layers with a window and without, are repeated in their order.
    """
    text = config.get_text_config()
    before = getattr(text, "num_hidden_layers", None)
    if layers < 1:
        raise WrongUse(f"layers={layers}", found="it is below 1", cure="Give at least 1 layer.")
    if not isinstance(before, int) or before < 1:
        raise WrongUse(
            f"layers={layers}",
            found=f"the config of {given.removeprefix('job ')} has no num_hidden_layers",
            cure="Leave it out, and edit config.json instead.",
        )
    names = [name for name in DECODER_LAYERS if isinstance(getattr(text, name, None), int)]
    if any(getattr(text, name) != before for name in names):
        raise WrongUse(
            f"layers={layers}",
            found=f"the encoder has {before} layers and the decoder {getattr(text, names[0])}",
            cure="Leave it out, and edit config.json instead.",
        )
    for name, entries in vars(text).items():
        if "layer" in name and isinstance(entries, list | tuple) and len(entries) == before:
            setattr(text, name, [entries[index % before] for index in range(layers)])
    for name in ("num_hidden_layers", *names):
        setattr(text, name, layers)


def read_config(folder: str, *, given: str = "", quantized: bool = False) -> dict[str, Any]:
    """Return FOLDER/config.json; raise WrongUse if it is invalid or needs code from the folder.

    `quantized`: weights in a format of bitsandbytes are accepted.
    """
    cure = "Name a folder with a Hugging Face config.json"
    cure += "." if given else ", as in hf:./my-model."
    given = given or f"job hf:{folder}"
    require_folder(folder, given, cure)
    place = Path(folder)
    file = place / "config.json"
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongUse(given, found="the folder has no config.json", cure=cure) from None
    except OSError as error:
        raise WrongUse(given, found=f"config.json cannot be read ({error.strerror})", cure=cure) from error
    except ValueError as error:
        raise WrongUse(given, found=f"config.json is not JSON ({error})", cure="Correct the file.") from error
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        raise WrongUse(given, found="config.json has no model_type", cure="Add a model_type.")
    if text.get("auto_map"):
        raise WrongUse(
            given,
            found="config.json has an auto_map: the model is code that comes with the folder",
            cure="Write a job file that builds it, and name that as FILE.py:NAME.",
        )
    if text.get("quantization_config"):
        read_base_format(text["quantization_config"], given)
        if not quantized:
            raise WrongUse(
                given,
                found="config.json has a quantization_config, and this job does not read quantized weights",
                cure="Take that entry out to see the model unquantized.",
            )
    return text


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
