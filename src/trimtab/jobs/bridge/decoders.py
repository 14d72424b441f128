"""Build frozen transformers decoders with random weights, or memory-map them from a local folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.pretrained import import_transformers

FROZEN_DTYPE = torch.bfloat16
"""Dtype of frozen weights on GPUs and on CPUs with bf16 matrix products."""
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
REQUIRED_KEYS = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "initializer_range")
"""Required config keys, as in Llama; BERT, which can be a decoder too, has other names."""
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Sets of files that define a tokenizer."""
JOB = "the job bridge"


def read_decoder_config(folder: str, flag: str) -> Any:
    """Return the transformers config of a folder; errors name it with `flag`."""
    from trimtab.jobs.huggingface import read_config

    given = f"{flag} {folder}"
    text = read_config(folder, given=given)
    transformers = import_transformers(JOB)
    kind = text["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise WrongUse(
            given,
            found=f"transformers {transformers.__version__} has no model_type {kind!r}",
            cure="Name a folder with a decoder such as Llama or Qwen2.",
        )
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    lacking = [name for name in REQUIRED_KEYS if not hasattr(config, name)]
    not_causal = type(config) not in transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001
    if not_causal or lacking or getattr(config, "is_encoder_decoder", False):
        raise WrongUse(
            given,
            found=f"{kind} is not a causal decoder",
            cure="Name a folder with a decoder such as Llama or Qwen2.",
        )
    config.use_cache = False
    return config


def find_weight_files(folder: str, flag: str) -> list[Path]:
    """Return the files with a folder's weights; empty if it has none."""
    place, given = Path(folder), f"{flag} {folder}"
    index = place / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WrongUse(
                given, found=f"{INDEX} cannot be read ({error})", cure="Download it again."
            ) from error
        absent = [name for name in named if not (place / name).is_file()]
        if absent:
            raise WrongUse(
                given,
                found=f"{len(absent)} of {len(named)} files of weights are missing, {absent[0]} for one",
                cure="Download the rest of the folder.",
            )
        return [place / name for name in named]
    files = sorted(place.glob("*.safetensors"))
    if not files and any((place / name).is_file() for name in PICKLED):
        raise WrongUse(
            given,
            found="its weights are pickled (.bin), which runs whatever code is in them",
            cure="Use a folder with .safetensors files.",
        )
    return files


def is_fake() -> bool:
    """Return whether new tensors have no values, so that nothing is read from disk."""
    from torch._subclasses.fake_tensor import FakeTensor

    made = torch.empty(0)
    return made.is_meta or isinstance(made, FakeTensor)


def random_dtype() -> torch.dtype:
    """Return the dtype of frozen random weights: fp32 on a CPU without bf16 matrix products."""
    return torch.float32 if synthetic.has_only_slow_cpu() and not is_fake() else FROZEN_DTYPE


def build_random_decoder(config: Any) -> Any:
    """Return a decoder of that shape with random weights on the default device."""
    auto = import_transformers(JOB).AutoModelForCausalLM
    return check_decoder(auto.from_config(config, dtype=random_dtype(), attn_implementation="sdpa"))


def load_mapped_decoder(config: Any, folder: str, flag: str) -> Any:
    """Return a decoder whose weights are memory-mapped from a folder; processes of a machine share the pages.

    A page is read when it is used, and a weight leaves the mapping when it is moved to a device. Weights
    stored in another dtype are cast, which copies them into this process.
    """
    given = f"{flag} {folder}"
    with torch.device("meta"):
        built = build_random_decoder(config)
    stored = _map_tensors(find_weight_files(folder, flag), given)
    expected = built.state_dict()
    tied = bool(getattr(config, "tie_word_embeddings", False))
    lacking = [name for name in expected if name not in stored and not (tied and name == "lm_head.weight")]
    misshapen = [name for name in expected if name in stored and stored[name].shape != expected[name].shape]
    if lacking or misshapen:
        name = (lacking or misshapen)[0]
        found = (
            f"the files have no {name}" if lacking else f"{name} has the shape {tuple(stored[name].shape)}"
        )
        raise WrongUse(
            given,
            found=f"{found}, and config.json asks for {tuple(expected[name].shape)}",
            cure="Use the config.json and the weights of one model.",
        )
    cast = {name: stored[name].to(FROZEN_DTYPE) for name in expected if name in stored}
    built.load_state_dict(cast, strict=False, assign=True)
    if tied:
        built.tie_weights()
    _compute_buffers(built, config, given)
    return built


def _map_tensors(files: list[Path], given: str) -> dict[str, torch.Tensor]:
    """Return all tensors of some files, mapped and not yet read."""
    from safetensors import SafetensorError, safe_open

    stored: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    stored[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WrongUse(
                given, found=f"{file.name} cannot be read ({error})", cure="Download the file again."
            ) from error
    return stored


def _compute_buffers(built: Any, config: Any, given: str) -> None:
    """Compute the buffers that are not stored, such as rotary positions: they are still on meta."""
    for parent in list(built.modules()):
        for name, child in list(parent.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                with torch.device("cpu"):
                    setattr(parent, name, type(child)(config=config))
    left = [name for name, tensor in (*built.named_parameters(), *built.named_buffers()) if tensor.is_meta]
    if left:
        raise WrongUse(
            given, found=f"{left[0]} is not in its files", cure="Use a decoder such as Llama or Qwen2."
        )


def check_decoder(model: Any) -> Any:
    """Return the decoder if its logits are exactly its last hidden state times a matrix; else raise."""
    head: Any = model.get_output_embeddings()
    softened = getattr(model.config, "final_logit_softcapping", None)
    if getattr(head, "bias", None) is not None or not hasattr(head, "weight") or softened:
        raise WrongUse(
            f"a decoder of type {type(model).__name__}",
            found="its head is more than one matrix",
            cure="Use a decoder such as Llama or Qwen2.",
        )
    return model


def warn_of_random_weights(names: list[str], job: str) -> None:
    """Print on rank 0 that weights are random."""
    if names and os.environ.get("RANK", "0") == "0":
        flags = " and ".join(f"--{name} FOLDER" for name in names)
        sys.stderr.write(f"{job}: random weights for {' and '.join(names)}; {flags} would load some\n")


def load_tokenizer(folder: str, flag: str) -> Any:
    """Return the tokenizer of a folder."""
    given = f"{flag} {folder}"
    place = Path(folder)
    if not place.is_dir():
        raise WrongUse(given, found="there is no such folder", cure="Name one with a model in it.")
    if not any(all((place / name).is_file() for name in files) for files in TOKENIZERS):
        raise WrongUse(
            given,
            found="there is no tokenizer.json, no tokenizer.model, no vocab.json with merges.txt",
            cure="Download the tokenizer's files into the folder too.",
        )
    try:
        return import_transformers(JOB).AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise EnvironmentFault(given, found=str(error), cure="Install what it asks for.") from error
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        raise WrongUse(
            given, found=f"its tokenizer cannot be read ({text})", cure="Download its files again."
        ) from error
