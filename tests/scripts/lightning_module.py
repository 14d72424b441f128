"""python lightning_module.py --max_epochs 1 --precision bf16-mixed"""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning as L
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
except ImportError:
    import pytorch_lightning as L
    from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger


class AutoEncoder(L.LightningModule):
    def __init__(self, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 784))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_epochs", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()
    L.seed_everything(0)
    images = TensorDataset(torch.rand(128, 784))
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate_grad_batches,
        devices=args.devices,
        strategy=args.strategy,
        accelerator="auto",
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger("lightning_logs"),
        callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()],
    )
    trainer.fit(
        AutoEncoder(),
        DataLoader(images, batch_size=args.batch_size, shuffle=True),
        DataLoader(images, batch_size=args.batch_size),
    )


if __name__ == "__main__":
    main()
