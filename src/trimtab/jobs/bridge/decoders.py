"""Frozen decoders of transformers: of a shape, or from a local folder and mapped from its files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.pretrained import library

KIND = torch.bfloat16
"""What frozen weights are kept in, on every GPU and on a CPU that multiplies bf16 matrices."""
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NEEDED = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "initializer_range")
"""What the config of a decoder of Llama's kind says; BERT, which also can be one, has other names."""
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""The files that a tokenizer can be made of."""
WHO = "the job bridge"


def config_of(folder: str, flag: str) -> Any:
    """The config of a folder, as transformers understands it; `flag` is what named the folder."""
    from trimtab.jobs.huggingface import read_config

    given = f"{flag} {folder}"
    text = read_config(folder, given=given)
    transformers = library(WHO)
    kind = text["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise WrongUse(
            given,
            found=f"transformers {transformers.__version__} has no model_type {kind!r}",
            cure="Name a folder with a decoder such as Llama or Qwen2.",
        )
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    lacking = [name for name in NEEDED if not hasattr(config, name)]
    unlike = type(config) not in transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001
    if unlike or lacking or getattr(config, "is_encoder_decoder", False):
        raise WrongUse(
            given,
            found=f"a {kind} is no decoder that says one token after the other",
            cure="Name a folder with a decoder such as Llama or Qwen2.",
        )
    config.use_cache = False
    return config


def weight_files(folder: str, flag: str) -> list[Path]:
    """The files that hold a folder's weights; empty where it has none."""
    place, given = Path(folder), f"{flag} {folder}"
    index = place / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WrongUse(given, found=f"{INDEX} cannot be read ({error})", cure="Get it again.") from error
        absent = [name for name in named if not (place / name).is_file()]
        if absent:
            raise WrongUse(
                given,
                found=f"{len(absent)} of {len(named)} files of weights are missing, {absent[0]} for one",
                cure="Download the rest of the folder.",
            )
        return [place / name for name in named]
    found = sorted(place.glob("*.safetensors"))
    if not found and any((place / name).is_file() for name in PICKLED):
        raise WrongUse(
            given,
            found="its weights are pickled (.bin), which runs whatever code is in them",
            cure="Use a folder with .safetensors files.",
        )
    return found


def is_pretence() -> bool:
    """Whether tensors made now have no values: nothing is read from disk for them."""
    from torch._subclasses.fake_tensor import FakeTensor

    made = torch.empty(0)
    return made.is_meta or isinstance(made, FakeTensor)


def random_dtype() -> torch.dtype:
    """Return the dtype of frozen random weights: fp32 on a CPU without bf16 matrix products."""
    return torch.float32 if synthetic.trains_on_slow_cpu() and not is_pretence() else KIND


def random_decoder(config: Any) -> Any:
    """A decoder of that shape with random weights, on the default device."""
    auto = library(WHO).AutoModelForCausalLM
    return checked(auto.from_config(config, dtype=random_dtype(), attn_implementation="sdpa"))


def mapped_decoder(config: Any, folder: str, flag: str) -> Any:
    """A decoder whose weights lie in the mapped files of a folder: processes of one machine share the pages.

    A page is read when it is used, and a weight leaves the mapping when it is moved to a device. Weights that
    are stored in another dtype are cast, and are then this process's own.
    """
    given = f"{flag} {folder}"
    with torch.device("meta"):
        built = random_decoder(config)
    held = _mapped(weight_files(folder, flag), given)
    wanted = built.state_dict()
    tied = bool(getattr(config, "tie_word_embeddings", False))
    lacking = [name for name in wanted if name not in held and not (tied and name == "lm_head.weight")]
    unlike = [name for name in wanted if name in held and held[name].shape != wanted[name].shape]
    if lacking or unlike:
        name = (lacking or unlike)[0]
        found = f"the files have no {name}" if lacking else f"{name} has the shape {tuple(held[name].shape)}"
        raise WrongUse(
            given,
            found=f"{found}, and config.json asks for {tuple(wanted[name].shape)}",
            cure="Use the config.json and the weights of one model.",
        )
    cast = {name: held[name].to(KIND) for name in wanted if name in held}
    built.load_state_dict(cast, strict=False, assign=True)
    if tied:
        built.tie_weights()
    _settle_buffers(built, config, given)
    return built


def _mapped(files: list[Path], given: str) -> dict[str, torch.Tensor]:
    """All tensors of some files, without reading them."""
    from safetensors import SafetensorError, safe_open

    held: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    held[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WrongUse(
                given, found=f"{file.name} cannot be read ({error})", cure="Get the file again."
            ) from error
    return held


def _settle_buffers(built: Any, config: Any, given: str) -> None:
    """Tables that are computed and not stored, such as those of rotary positions, were made on meta."""
    for parent in list(built.modules()):
        for name, child in list(parent.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                with torch.device("cpu"):
                    setattr(parent, name, type(child)(config=config))
    left = [name for name, one in (*built.named_parameters(), *built.named_buffers()) if one.is_meta]
    if left:
        raise WrongUse(
            given, found=f"{left[0]} is not in its files", cure="Use a decoder such as Llama or Qwen2."
        )


def checked(model: Any) -> Any:
    """The decoder, if its logits are its last hidden state times a table and nothing else."""
    head: Any = model.get_output_embeddings()
    softened = getattr(model.config, "final_logit_softcapping", None)
    if getattr(head, "bias", None) is not None or not hasattr(head, "weight") or softened:
        raise WrongUse(
            f"a decoder of type {type(model).__name__}",
            found="its head is more than one matrix",
            cure="Use a decoder such as Llama or Qwen2.",
        )
    return model


def say_random(names: list[str], job: str) -> None:
    """Tell the user, once a run, that weights are random."""
    if names and os.environ.get("RANK", "0") == "0":
        flags = " and ".join(f"--{name} FOLDER" for name in names)
        sys.stderr.write(f"{job}: random weights for {' and '.join(names)}; {flags} would load some\n")


def tokenizer_of(folder: str, flag: str) -> Any:
    """The tokenizer of a folder."""
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
        return library(WHO).AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise EnvironmentFault(given, found=str(error), cure="Install what it asks for.") from error
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        raise WrongUse(
            given, found=f"its tokenizer cannot be read ({text})", cure="Get its files again."
        ) from error
