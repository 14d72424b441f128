"""Read the sizes of a transformer from a config.json, without torch and without building the model."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.jobs.registry import FOLDER
from trimtab.units import LARGEST_COUNT, parse_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_LONGEST = 1024
"""Maximum tokens per sample of a job hf:FOLDER without --seq."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of a config.json for the longest sequence of a model."""
KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k"),
    "expert_intermediate": ("moe_intermediate_size",),
    "head_width": ("head_dim",),
}
"""Keys of a config.json for each size, as the models of transformers name them."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a transformer; None where nobody has said it."""

    layers: int | None = None
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    hidden: int | None = None
    intermediate: int | None = None
    """Width of the feed-forward layers; with experts, of one expert if no other key says that."""
    vocab: int | None = None
    experts: int | None = None
    """Experts of a layer; 0: the model has none."""
    experts_per_token: int | None = None
    expert_intermediate: int | None = None
    head_width: int | None = None
    seq: int | None = None
    """Tokens of a sample in training."""

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the model itself."""
        return any(getattr(self, name) is not None for name in KEYS)

    @property
    def kv_share(self) -> float:
        """Heads of keys and values for each attention head.

        >>> ModelSizes(heads=32, kv_heads=8).kv_share
        0.25
        """
        return (self.kv_heads or 1) / self.heads if self.heads and self.kv_heads else 1.0

    @property
    def layer_weights(self) -> int | None:
        """Weights of a layer that one token is multiplied by; None if too little is known.

        Queries and output, keys and values, and three matrices of the feed-forward layer, as in Llama:
        2 * 4096^2 * (1 + 8/32) + 3 * 4096 * 14336 = 218 million for Llama 3.1 8B.
        """
        width = (self.expert_intermediate if self.experts else None) or self.intermediate
        if not self.hidden or not width:
            return None
        active = (self.experts_per_token or 1) if self.experts else 1
        head_widths = (self.heads or 0) * (self.head_width or 0) or self.hidden
        attention = 2 * self.hidden * head_widths * (1 + self.kv_share)
        return round(attention + 3 * self.hidden * width * active)


def read_model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes in the content of a config.json; keys with other values than counts are left out.

    >>> read_model_sizes({"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": "x"}).kv_heads
    32
    """
    nested = [config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)]
    tables = [*nested, config]
    found = {name: _find_count(tables, keys) for name, keys in KEYS.items()}
    if found["kv_heads"] is None and config.get("multi_query") is True:
        found["kv_heads"] = 1
    if found["kv_heads"] is None:
        found["kv_heads"] = found["heads"]
    if found["experts"] is None and found["layers"] is not None:
        found["experts"] = 0
    if found["intermediate"] is None and config.get("model_type") == "gpt2" and found["hidden"]:
        found["intermediate"] = 4 * found["hidden"]
    return ModelSizes(**found)


def _find_count(tables: list[Mapping[str, Any]], keys: tuple[str, ...]) -> int | None:
    for table in tables:
        for key in keys:
            value = table.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST_COUNT:
                return value
    return None


def read_folder_sizes(folder: str | Path) -> ModelSizes:
    """Return the sizes in FOLDER/config.json; what is wrong with the folder is for the job itself to say."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ModelSizes()
    if not isinstance(config, dict):
        return ModelSizes()
    longest = _find_count([config], POSITIONS)
    return replace(read_model_sizes(config), seq=min(DEFAULT_LONGEST, longest or DEFAULT_LONGEST))


def read_job_sizes(name: str, options: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of a job hf:FOLDER, with its options; of another job, only the options say any."""
    sizes = read_folder_sizes(name.removeprefix(FOLDER)) if name.startswith(FOLDER) else ModelSizes()
    stated = {
        field.name: count
        for field in fields(ModelSizes)
        if (count := _read_option(options.get(field.name))) is not None
    }
    return replace(sizes, **stated)


def _read_option(value: Any) -> int | None:
    """Return an option of a job as a count; None if it is none."""
    return parse_whole(str(value)) or None
