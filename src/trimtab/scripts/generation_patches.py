"""Let transformers' text generation go on to its longest: nobody knows which tokens a model would choose.

Evaluation with `generate`, and training on a model's own answers, need the most memory when no answer ends
early. So each chosen token is taken to be an ordinary one, never one that ends the text.

A model with a growing cache of keys and values does nearly the same work for each token. The first tokens and
the last are followed; for the others the cache grows, and the work of a token is counted again.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.scripts.observer import put
from trimtab.trace.data_dependent import REAL_ATTRIBUTE
from trimtab.trace.fake_cuda import MODULE_PATCHES

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.observer import Observer

MODULE = "transformers.generation.stopping_criteria"
GROWING_LAYER = "DynamicLayer"
"""Class of transformers for the keys and values of a layer that grow with each token."""
FOLLOWED_TOKENS = 2
REPEATED_NOTE = (
    "of a generated text, the first tokens and the last are followed; the others repeat their work and memory"
)
ORDINARY = 100
"""A token that most tokenizers have a letter for; special tokens are the very first or last."""
GENERATION_NOTE = (
    "generated texts are taken to be as long as they may get: no model decides here where to stop"
)


class Decoding:
    """The calls of a model that give one token each, with the keys and values of all tokens before."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._cache: Callable[[], Any] = lambda: None
        """The cache of the last call, as long as it exists."""
        self._tokens = 0
        self._work: tuple[list[int], list[bool]] = ([], [])
        self._kind: tuple[Any, Any, dict[str, Any]] | None = None
        """Class of the model's output, and the shape and kind of its logits."""
        self.left: int | None = None
        """Tokens that may still be generated; None if nobody knows."""

    def is_decoding(self, kwargs: dict[str, Any]) -> bool:
        """Return whether a call gives the next token with a cache that grows."""
        tokens, layers = kwargs.get("input_ids"), getattr(kwargs.get("past_key_values"), "layers", None)
        return (
            isinstance(tokens, torch.Tensor)
            and tokens.dim() > 1
            and tokens.shape[1] == 1
            and bool(layers)
            and all(type(layer).__name__ == GROWING_LAYER and layer.is_initialized for layer in layers or ())
        )

    def call(self, run: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        """Run a model for the next token, or repeat the work of the token before."""
        cache = kwargs["past_key_values"]
        recorder = self._observer.recorder
        self._tokens = self._tokens + 1 if self._cache() is cache else 1
        self._cache = weakref.ref(cache)
        is_inner = self._tokens > FOLLOWED_TOKENS and self.left is not None and self.left > 1
        if is_inner and self._kind is not None:
            self._observer.notes[REPEATED_NOTE] = None
            for layer in cache.layers:
                layer.update(*(_make_next(tensor) for tensor in (layer.keys, layer.values)))
            recorder.sequence.extend(self._work[0])
            recorder.by_engine.extend(self._work[1])
            kind, shape, options = self._kind
            return kind(logits=torch.empty(shape, **options), past_key_values=cache)
        begin = len(recorder.sequence)
        out = run()
        self._work = (recorder.sequence[begin:], recorder.by_engine[begin:])
        logits = getattr(out, "logits", None)
        self._kind = None
        if isinstance(logits, torch.Tensor):
            self._kind = (type(out), logits.shape, {"dtype": logits.dtype, "device": logits.device})
        return out


def _make_next(tensor: torch.Tensor) -> torch.Tensor:
    """Return the keys or values of one more token."""
    return tensor.new_empty((*tensor.shape[:-2], 1, tensor.shape[-1]))


def patch_generation(observer: Observer) -> None:
    """Give generated tokens values that end no text, as soon as transformers is imported."""
    decoding = observer.decoding = Decoding(observer)

    def patch(module: Any) -> None:
        original = module.StoppingCriteriaList.__call__

        @functools.wraps(original)
        def is_done(criteria: Any, input_ids: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(input_ids, FakeTensor) and not hasattr(input_ids, REAL_ATTRIBUTE):
                observer.notes[GENERATION_NOTE] = None
                _choose_tokens(input_ids, find_end_tokens(criteria))
            longest = criteria.max_length
            decoding.left = None if longest is None else longest - input_ids.shape[1]
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
