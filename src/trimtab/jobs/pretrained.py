"""Load pretrained weights and models with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from trimtab.errors import EnvironmentFault

if TYPE_CHECKING:
    from pathlib import Path


MOST_NAMED = 3
"""Maximum number of new tensors that a message names."""


def is_planning() -> bool:
    """Return whether tensors are fake or meta, so that weights cannot be loaded."""
    return _get_current_dispatch_mode() is not None or torch.get_default_device().type == "meta"


def list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Pickles are left out: reading one runs code."""
    return sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.safetensors.index.json"))


def load_pretrained(auto: Any, folder: str, config: Any, **how: Any) -> tuple[Any, str]:
    """Return the model with the weights of a folder, and a description of their origin."""
    # transformers reads onto the CPU and moves nothing by itself.
    with torch.device("cpu"):
        how |= {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        model, info = auto.from_pretrained(folder, config=config, **how)
    new = sorted(info["missing_keys"])
    description = f"from the safetensors in {folder}"
    if new:
        more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
        description += f"; not in them, so random: {', '.join(new[:MOST_NAMED])}{more}"
    # In training mode, like a model that is built from a config.
    return model.train().to(torch.get_default_device()), description


def import_transformers(user: str) -> Any:
    """Return the module `transformers`; raise EnvironmentFault with the way to install it."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            user,
            found=f"it needs the package 'transformers', which cannot be imported here ({error})",
            cure="Install it: pip install 'trimtab[jobs]'",
        ) from error
    return transformers


EXPERTS = "trimtab_autocast"


def run_experts_in_autocast(model: Any) -> None:
    """Make experts compute in the dtype of autocast, as linear layers do.

    Their weights are bare parameters in a grouped matrix product, which autocast does not cast: under bf16
    they would be multiplied in fp32, and torch traces that product only in bf16.
    """
    can_set = getattr(model, "_can_set_experts_implementation", None)
    if (
        can_set is None
        or not can_set()
        or getattr(model.config, "_experts_implementation", None) != "grouped_mm"
    ):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        kind = hidden.device.type
        if not torch.is_autocast_enabled(kind):
            return grouped_mm_experts_forward(self, hidden, index, weights)
        half = torch.get_autocast_dtype(kind)
        narrow: Any = _NarrowExperts(self, half)
        output = grouped_mm_experts_forward(narrow, hidden.to(half), index, weights)
        return output.to(hidden.dtype)

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, forward)
    model.set_experts_implementation(EXPERTS)


class _NarrowExperts:
    """Wrap experts so that their weights have another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value
