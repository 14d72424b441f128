"""Run torch.compile for micro-batches of the planned size, and fall back to eager mode.

A micro-batch of another size (the remainder of a rank's samples) runs in eager mode: compiling for it would
take longer than it saves. The compiled calls are those that loss() makes: the model, its methods, or its
direct submodules. With a budget, the compiler stores only that share of the activations and recomputes the
rest; eager mode has no budget and stores all.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as partitioner

from trimtab.engine.build import EntryPoints
from trimtab.engine.causal_attention import decide_masks_as_in_eager_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Say = Callable[[str, str], None]

CALL = "_compiled_call_impl"
"""Attribute that nn.Module calls instead of its forward pass if it is set."""


class CompileSwitch:
    """Switch the compiled calls of a model on and off; the model object stays the same."""

    def __init__(
        self, model: nn.Module, say: Say, entries: EntryPoints | None = None, budget: float | None = None
    ) -> None:
        """Prepare to compile a model.

        Args:
            model: the model.
            say: shows a message, as say(why, done).
            entries: methods and submodules that loss() calls besides the model.
            budget: share of the activations to store; None: as many as the compiler likes.
        """
        self._model = model
        self._budget = budget
        self._say = say
        self._entries = entries or EntryPoints()
        self._proven: set[int] = set()
        self._trying: int | None = None
        self._calls: list[tuple[nn.Module, str, Any]] | None = None
        """Module, name of the attribute, compiled function."""
        self.is_enabled = True
        """False after compilation has failed."""

    def start(self) -> None:
        """Wrap the calls in torch.compile; compilation happens when they first run."""
        if self._calls is None:
            self._calls = self._compile_calls()

    def prepare_for(self, samples: int, regular: int) -> None:
        """Choose compiled or eager mode for a micro-batch of `samples`; `regular` is the planned size."""
        is_compiled = self.is_enabled and samples == regular
        self._trying = samples if is_compiled and samples not in self._proven else None
        if self._trying is not None:
            self._say(
                f"the first step with {samples} samples at once compiles the model",
                "warming up: this takes up to a few minutes, once",
            )
            try:
                self.start()
            except Exception as error:  # noqa: BLE001 - on any error, run in eager mode
                self.handle_error(error)
        self._switch(on=is_compiled)

    def mark_done(self) -> None:
        """Record that the current micro-batch finished its forward and backward pass."""
        if self._trying is not None:
            self._proven.add(self._trying)
            self._trying = None

    def handle_error(self, error: BaseException) -> bool:
        """Disable compilation if it may have caused the error; return whether to retry the micro-batch."""
        if self._trying is None:
            return False
        text = (str(error).strip().split("\n") or [""])[0][:300]
        lost = "" if self._budget is None else "; eager mode has no budget, and stores all activations"
        self._say(
            f"compiling failed: {type(error).__name__}: {text}", f"going on without torch.compile{lost}"
        )
        self._switch(on=False)
        self._calls = self._trying = None
        self.is_enabled = False
        return True

    def disable(self) -> None:
        """Use eager mode until the next prepare_for()."""
        self._switch(on=False)

    def _compile_calls(self) -> list[tuple[nn.Module, str, Any]]:
        model, entries = self._model, self._entries
        decide_masks_as_in_eager_mode(model)
        children = dict(model.named_children())
        modules = [model, *(children[name] for name in entries.children)]
        calls: list[tuple[nn.Module, str, Any]] = [
            (module, CALL, self._compile(module._call_impl)) for module in modules
        ]
        calls += [(model, name, self._compile(getattr(model, name))) for name in entries.methods]
        return calls

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function; it is compiled under the budget, whenever that happens."""
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        if self._budget is None:
            return compiled

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            # The first call with new shapes traces forward and backward, and decides what is stored.
            with partitioner.patch(activation_memory_budget=self._budget):
                return compiled(*args, **kwargs)

        return run

    def _switch(self, *, on: bool) -> None:
        for module, name, compiled in self._calls or ():
            if on:
                module.__dict__[name] = compiled
            elif name == CALL:
                module.__dict__[name] = None
            else:
                module.__dict__.pop(name, None)
