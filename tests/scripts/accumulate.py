"""Train a small encoder with loss scaling, gradient accumulation and activation checkpointing, all by hand."""
import argparse
import csv
import logging
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger("train")


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, width, depth, recompute):
        super().__init__()
        self.embed = nn.Linear(24, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 24)
        self.recompute = recompute

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulation_steps", type=int, default=2)
    parser.add_argument("--seq_len", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--log", default="train_log.csv")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Encoder(args.width, args.depth, args.gradient_checkpointing).to(device)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    if device == "cpu":
        args.precision = "fp32"
    groups = [
        {"params": model.embed.parameters(), "lr": 1e-4},
        {"params": [*model.layers.parameters(), *model.head.parameters()], "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-4, 1e-3], total_steps=args.steps + 1)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    with open(args.log, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss", "grad_norm", "scale", "lr", "seconds"])
        optimizer.zero_grad()
        for micro in range(args.steps * args.accumulation_steps):
            began = time.perf_counter()
            x = torch.randn(args.batch_size, args.seq_len, 24).to(device)
            with torch.autocast(device, dtype=dtype, enabled=args.precision != "fp32"):
                loss = nn.functional.mse_loss(model(x), x) / args.accumulation_steps
            if not torch.isfinite(loss):
                raise RuntimeError(f"loss is {loss.item()} at micro-step {micro}")
            scaler.scale(loss).backward()
            if (micro + 1) % args.accumulation_steps:
                continue
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            step = (micro + 1) // args.accumulation_steps
            seconds = time.perf_counter() - began
            rows.writerow([step, float(loss), norm.item(), scaler.get_scale(), schedule.get_last_lr()[0], seconds])
            log.info("step %d loss %.4f grad norm %.3f", step, loss.item(), norm)
    torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "encoder.pt")


if __name__ == "__main__":
    main()
