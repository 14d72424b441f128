"""Let transformers' text generation go on to its longest: nobody knows which tokens a model would choose.

Evaluation with `generate`, and training on a model's own answers, need the most memory when no answer ends
early. So each chosen token is taken to be an ordinary one, never one that ends the text.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.scripts.observer import put
from trimtab.trace.data_dependent import REAL_ATTRIBUTE
from trimtab.trace.fake_cuda import MODULE_PATCHES

if TYPE_CHECKING:
    from trimtab.scripts.observer import Observer

MODULE = "transformers.generation.stopping_criteria"
ORDINARY = 100
"""A token that most tokenizers have a letter for; special tokens are the very first or last."""
GENERATION_NOTE = (
    "generated texts are taken to be as long as they may get: no model decides here where to stop"
)


def patch_generation(observer: Observer) -> None:
    """Give generated tokens values that end no text, as soon as transformers is imported."""

    def patch(module: Any) -> None:
        original = module.StoppingCriteriaList.__call__

        @functools.wraps(original)
        def is_done(criteria: Any, input_ids: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(input_ids, FakeTensor) and not hasattr(input_ids, REAL_ATTRIBUTE):
                observer.notes[GENERATION_NOTE] = None
                _choose_tokens(input_ids, find_end_tokens(criteria))
            return original(criteria, input_ids, scores, *args, **kwargs)

        put(module.StoppingCriteriaList, "__call__", is_done)

    MODULE_PATCHES[MODULE] = patch
    if MODULE in sys.modules:
        patch(sys.modules[MODULE])


def find_end_tokens(criteria: Any) -> set[int]:
    """Return the tokens that end a text, of all criteria that have some."""
    ends: set[int] = set()
    for criterion in criteria:
        tokens = getattr(criterion, "eos_token_id", None)
        if isinstance(tokens, torch.Tensor):
            real = getattr(tokens, REAL_ATTRIBUTE, tokens)
            with _disable_current_modes():
                ends.update(() if isinstance(real, FakeTensor) else real.flatten().tolist())
    return ends


def _choose_tokens(input_ids: Any, ends: set[int]) -> None:
    """Set the known values of a tensor of tokens to one that ends no text."""
    token = next(number for number in range(ORDINARY, ORDINARY + len(ends) + 1) if number not in ends)
    with _disable_current_modes():
        setattr(input_ids, REAL_ATTRIBUTE, torch.full(tuple(input_ids.shape), token, dtype=input_ids.dtype))
