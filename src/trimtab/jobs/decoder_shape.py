"""Read the shape of a decoder from a config.json, without torch and without building the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.jobs.model_sizes import POSITIONS, read_model_sizes
from trimtab.jobs.registry import FOLDER, FOLDER_SAMPLES
from trimtab.spec import BatchLoss, DecoderShape, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

UNGATED = frozenset(
    (
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "opt",
        "bloom",
        "mpt",
        "phi",
        "falcon",
        "starcoder2",
    )
)
"""Model types of transformers whose feed-forward part has no gate."""


def read_decoder_shape(job: str) -> tuple[DecoderShape, int | None]:
    """Return the shape of a job hf:FOLDER, and the longest sequence that its config states."""
    if not isinstance(job, str) or not job.startswith(FOLDER):
        raise WrongUse(
            str(job),
            found="layouts are ranked by the sizes of a decoder, which only a config.json states",
            cure="Give hf:FOLDER with the model's config.json; for other jobs use `trimtab plan`.",
        )
    path = Path(job.removeprefix(FOLDER)) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongUse(
            job, found=f"{path} cannot be read: {error.strerror}", cure="Name a folder with a config.json."
        ) from error
    except ValueError as error:
        raise WrongUse(job, found=f"{path} is no JSON: {error}", cure="Correct the file.") from error
    if not isinstance(config, dict):
        raise WrongUse(job, found=f"{path} holds no object", cure="Give the config.json of a model.")
    return make_decoder_shape(config, str(path)), _find_longest(config)


def describe_decoder_job(job: str, *, sequence: int, global_batch: int) -> Workload:
    """Return the workload of a job hf:FOLDER that trains on blocks of `sequence` tokens."""
    return Workload(
        name=Path(job.removeprefix(FOLDER)).resolve().name,
        global_batch=global_batch,
        samples=FOLDER_SAMPLES,
        seq=sequence,
        batch_loss=BatchLoss(additive=True, stated=True, why="the job says additive = True"),
        sample_length=sequence,
    )


def make_decoder_shape(config: Mapping[str, Any], name: str) -> DecoderShape:
    """Return the shape that a config states; raise WrongUse where it leaves out what is needed."""
    sizes = read_model_sizes(config)
    needed = {"the number of layers": sizes.layers, "the number of heads": sizes.heads}
    needed |= {"the width": sizes.hidden, "the size of the vocabulary": sizes.vocab}
    needed["the feed-forward width"] = sizes.expert_intermediate or sizes.intermediate
    missing = [word for word, value in needed.items() if not value]
    if missing:
        raise WrongUse(
            name,
            found=f"it does not state {', '.join(missing)}",
            cure="Give the config.json of a decoder, such as Llama, Qwen or Mixtral.",
        )
    experts = sizes.experts or 0
    inner = sizes.expert_intermediate if experts and sizes.expert_intermediate else sizes.intermediate
    heads = sizes.heads or 1
    dense = _read_count(config, "first_k_dense_replace") if experts and sizes.expert_intermediate else 0
    shape = DecoderShape(
        layers=sizes.layers or 1,
        width=sizes.hidden or 1,
        heads=heads,
        key_value_heads=sizes.kv_heads or heads,
        head_size=sizes.head_width or (sizes.hidden or 1) // heads,
        feed_forward=inner or sizes.expert_intermediate or 1,
        vocabulary=sizes.vocab or 1,
        gated=config.get("model_type") not in UNGATED,
        tied=bool(config.get("tie_word_embeddings", config.get("model_type") in UNGATED)),
        experts=experts,
        experts_per_token=(sizes.experts_per_token or 1) if experts else 0,
        shared_experts=_read_count(config, "n_shared_experts") if experts else 0,
        dense_layers=min(dense, sizes.layers or 1) if sizes.intermediate else 0,
        dense_feed_forward=(sizes.intermediate or 0) if dense else 0,
    )
    return _add_compression(shape, config, name)


def _add_compression(shape: DecoderShape, config: Mapping[str, Any], name: str) -> DecoderShape:
    """Return the shape with the sizes of compressed attention where the config has them, as DeepSeek's do."""
    rank = _read_count(config, "kv_lora_rank")
    if not rank:
        return shape
    plain, rope = _read_count(config, "qk_nope_head_dim"), _read_count(config, "qk_rope_head_dim")
    values = _read_count(config, "v_head_dim")
    if not (plain and rope and values):
        raise WrongUse(
            name,
            found="its attention is compressed (kv_lora_rank), and a size of its heads is missing",
            cure="State qk_nope_head_dim, qk_rope_head_dim and v_head_dim in the config.json.",
        )
    return shape.replace(
        key_value_heads=shape.heads,
        head_size=plain + rope,
        rope_size=rope,
        value_size=values,
        key_value_rank=rank,
        query_rank=_read_count(config, "q_lora_rank"),
    )


def _read_count(config: Mapping[str, Any], key: str) -> int:
    """Return a count in a config; 0 where it has none."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _find_longest(config: Mapping[str, Any]) -> int | None:
    return next((config[key] for key in POSITIONS if isinstance(config.get(key), int)), None)
