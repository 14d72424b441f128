"""GPT-2 of transformers with its loss named: by default the library warns, which splits compiled code."""

from __future__ import annotations

from typing import Any

from trimtab.exams.jobs import HFGPT2


class NamedLoss(HFGPT2):
    """The loss is the same as without the name."""

    def model(self) -> Any:
        """Build the model, and name the loss that it would take by default."""
        model: Any = super().model()  # type: ignore[no-untyped-call]
        model.loss_type = "ForCausalLM"
        return model
