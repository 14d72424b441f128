"""Weights from the safetensors of a model's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

if TYPE_CHECKING:
    from pathlib import Path

NAMED = 3
"""Tensors that are named where several are new."""


def is_planned() -> bool:
    """Whether what is built now has no memory behind it, so that there is nothing to load into."""
    return _get_current_dispatch_mode() is not None or torch.get_default_device().type == "meta"


def stored(folder: Path) -> list[Path]:
    """The files with weights. Pickles are not among them: reading one runs what is in it."""
    return sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.safetensors.index.json"))


def loaded(auto: Any, folder: str, config: Any, **how: Any) -> tuple[Any, str]:
    """The model with the weights of a folder, and in words which of them it has."""
    # transformers reads onto the CPU and moves nothing by itself.
    with torch.device("cpu"):
        how |= {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        model, about = auto.from_pretrained(folder, config=config, **how)
    new = sorted(about["missing_keys"])
    words = f"from the safetensors in {folder}"
    if new:
        more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
        words += f"; not in them, so random: {', '.join(new[:NAMED])}{more}"
    # Ready to learn, as a model that is built from a config is.
    return model.train().to(torch.get_default_device()), words
