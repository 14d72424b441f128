"""torch.compile for micro-batches of the planned size alone, with a way back.

A micro-batch of another size (what is left of a share) runs the module as it is: compiling again for it would
take longer than it ever saves. What is compiled is what loss() calls: the model, methods of it, or its direct
submodules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.build import Entries

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Say = Callable[[str, str], None]

CALL = "_compiled_call_impl"
"""What nn.Module calls instead of its own forward pass, where it is set."""


class Compiling:
    """Switches the compiled calls of a module on and off; the module itself stays what it was."""

    def __init__(self, model: nn.Module, say: Say, entries: Entries | None = None) -> None:
        """`say` is told what happens and why; `entries` are what loss() calls beside the model."""
        self._model = model
        self._say = say
        self._entries = entries or Entries()
        self._proven: set[int] = set()
        self._trying: int | None = None
        self._calls: list[tuple[nn.Module, str, Any]] | None = None
        """Module, name of the attribute, compiled function."""
        self.on = True
        """Whether it has not been given up."""

    def start(self) -> None:
        """Make the compiled calls; they compile when they first run."""
        if self._calls is None:
            self._calls = self._compiled()

    def use(self, samples: int, regular: int) -> None:
        """Prepare for a micro-batch of so many samples, where most have `regular`."""
        wanted = self.on and samples == regular
        self._trying = samples if wanted and samples not in self._proven else None
        if self._trying is not None:
            self._say(
                f"the first step with {samples} samples at once compiles the model",
                "warming up: this takes up to a few minutes, once",
            )
            try:
                self.start()
            except Exception as error:  # noqa: BLE001 - whatever it is, the model runs without
                self.gives_up(error)
        self._switch(on=wanted)

    def done(self) -> None:
        """Note that the micro-batch that use() was called for went through forward and backward."""
        if self._trying is not None:
            self._proven.add(self._trying)
            self._trying = None

    def gives_up(self, error: BaseException) -> bool:
        """Whether an error may be the compiler's, so that the micro-batch is tried again without it."""
        if self._trying is None:
            return False
        text = (str(error).strip().split("\n") or [""])[0][:300]
        self._say(f"compiling failed: {type(error).__name__}: {text}", "going on without torch.compile")
        self._switch(on=False)
        self._calls = self._trying = None
        self.on = False
        return True

    def off(self) -> None:
        """Run the module as it is, until the next use()."""
        self._switch(on=False)

    def _compiled(self) -> list[tuple[nn.Module, str, Any]]:
        model, entries = self._model, self._entries
        children = dict(model.named_children())
        modules = [model, *(children[name] for name in entries.children)]
        calls: list[tuple[nn.Module, str, Any]] = [
            (module, CALL, torch.compile(module._call_impl, dynamic=False)) for module in modules
        ]
        calls += [
            (model, name, torch.compile(getattr(model, name), dynamic=False)) for name in entries.methods
        ]
        return calls

    def _switch(self, *, on: bool) -> None:
        for module, name, compiled in self._calls or ():
            if on:
                module.__dict__[name] = compiled
            elif name == CALL:
                module.__dict__[name] = None
            else:
                module.__dict__.pop(name, None)
