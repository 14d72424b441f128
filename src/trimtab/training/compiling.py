"""torch.compile for parts of the planned size alone, with a way back.

A part of another size (what is left of a share) runs the module as it is: compiling again for it would take
longer than it ever saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Say = Callable[[str, str], None]


class Compiling:
    """Switches the compiled call of a module on and off; the module itself stays what it was."""

    def __init__(self, model: nn.Module, say: Say) -> None:
        """`say` is told what happens and why."""
        self._model = model
        self._say = say
        self._proven: set[int] = set()
        self._trying: int | None = None
        self._call: Any = None
        self.on = True
        """Whether it has not been given up."""

    def use(self, samples: int, regular: int) -> None:
        """Before a part of so many samples, where parts mostly have `regular`."""
        wanted = self.on and samples == regular
        self._trying = samples if wanted and samples not in self._proven else None
        if self._trying is not None:
            self._say(
                f"the first step with {samples} samples at once compiles the model",
                "warming up: this takes up to a few minutes, once",
            )
            if self._call is None:
                try:
                    self._call = torch.compile(self._model._call_impl, dynamic=False)
                except Exception as error:  # noqa: BLE001 - whatever it is, the model runs without
                    self.gives_up(error)
        self._model.__dict__["_compiled_call_impl"] = self._call if wanted else None

    def done(self) -> None:
        """The part that use() was called for has gone through forward and backward."""
        if self._trying is not None:
            self._proven.add(self._trying)
            self._trying = None

    def gives_up(self, error: BaseException) -> bool:
        """Whether an error may be the compiler's, so that the part is tried again without it."""
        if self._trying is None:
            return False
        text = (str(error).strip().split("\n") or [""])[0][:300]
        self._say(f"compiling failed: {type(error).__name__}: {text}", "going on without torch.compile")
        self._call = self._trying = None
        self.on = False
        self._model.__dict__["_compiled_call_impl"] = None
        return True

    def off(self) -> None:
        """The module as it is, until the next use()."""
        self._model.__dict__["_compiled_call_impl"] = None
