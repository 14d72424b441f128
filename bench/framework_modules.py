"""Modules of Lightning that bench/framework_cases.py trains; they need Lightning to be installed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class LanguageModule(pl.LightningModule):
    """A language model of transformers, trained with AdamW."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's own loss."""
        del batch_idx
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        """Return fused AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class LossRecorder(pl.Callback):
    """Remembers the loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """Store the loss, without waiting for the GPU."""
        del trainer, module, args
        self.losses.append(outputs["loss"].detach())
