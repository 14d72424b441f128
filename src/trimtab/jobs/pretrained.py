"""Weights from the safetensors of a model's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from trimtab.errors import EnvironmentFault

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


# The transformers library, for the jobs that need it: an extra, so it may be missing.


def library(who: str) -> Any:
    """The module `transformers`, or an error that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            who,
            found=f"it needs the package 'transformers', which cannot be imported here ({error})",
            cure="Install it: pip install 'trimtab[jobs]'",
        ) from error
    return transformers


EXPERTS = "trimtab_autocast"


def in_autocast(model: Any) -> None:
    """Let experts compute in the dtype of autocast, as linear layers do.

    Their weights are bare parameters that go through a grouped product, which autocast does not know: under
    bf16 they would be multiplied in fp32, and torch predicts that product in bf16 alone.
    """
    able = getattr(model, "_can_set_experts_implementation", None)
    if able is None or not able() or getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        kind = hidden.device.type
        if not torch.is_autocast_enabled(kind):
            return grouped_mm_experts_forward(self, hidden, index, weights)
        half = torch.get_autocast_dtype(kind)
        narrow: Any = _Narrow(self, half)
        found = grouped_mm_experts_forward(narrow, hidden.to(half), index, weights)
        return found.to(hidden.dtype)

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, forward)
    model.set_experts_implementation(EXPERTS)


class _Narrow:
    """Experts whose weights come in another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        return found.to(self._dtype) if isinstance(found, torch.nn.Parameter) else found
