"""Small trainings with Lightning, with and without our callback and injected failures."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from framework_runs import Limit, TextModel, text_samples
from trimtab.integrations.lightning import LightningCallback


class TextModule(pl.LightningModule):
    """The text model as people write it for Lightning."""

    def __init__(self, limit: Limit | None = None) -> None:
        super().__init__()
        self.model = TextModel(limit)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        loss = self.model(**batch)["loss"]
        self.log("train_loss", loss, prog_bar=False)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ManualModule(TextModule):
    """A module that steps its optimizer itself."""

    def __init__(self, limit: Limit | None = None) -> None:
        super().__init__(limit)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Losses(pl.Callback):
    """Collects the loss of every batch, and what was logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        del pl_module
        if outputs:
            self.losses.append(float(outputs["loss"]))
        self.logged |= {name: float(value) for name, value in trainer.callback_metrics.items()}


def train_lightning(
    *, module: Any = None, callback: Any = None, steps: int = 4, accumulation: int = 2
) -> dict[str, Any]:
    """Train; return losses, weights and logged figures."""
    warnings.filterwarnings("ignore", module="torch|lightning|pytorch_lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = module if module is not None else TextModule()
    losses = Losses()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # As torchrun sets it; otherwise Lightning believes that it started the processes itself.
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "test")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[*([callback] if callback else []), losses],
    )
    trainer.fit(module, torch.utils.data.DataLoader(text_samples(), batch_size=4))  # type: ignore[arg-type]
    return {
        "losses": losses.losses,
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
        "logged": losses.logged,
    }


def all_lightning_runs(folder: str) -> dict[str, Any]:
    """Run a rank of several trainings: plain, watched, and with failures on some ranks."""
    place = Path(folder)
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1

    def run(name: str, limit: Limit | None = None) -> dict[str, Any]:
        return train_lightning(module=TextModule(limit), callback=LightningCallback(out=place / name))

    return {
        "plain": train_lightning(),
        "watched": run("watched"),
        "forward": run("forward", Limit(2, rank=last)),
        "backward": run("backward", Limit(1, backward=True, from_call=1)),
    }
