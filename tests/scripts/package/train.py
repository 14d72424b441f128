"""python -m package.train --width 64"""
import argparse
from pathlib import Path

import torch

from .nets import mlp

HERE = Path(__file__).parent


def main(argv=None):
    parser = argparse.ArgumentParser(prog="package-train")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=5)
    args = parser.parse_args(argv)
    assert (HERE / "nets.py").exists()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = mlp(args.width, args.depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(args.max_steps):
        x = torch.randn(args.batch_size, args.width, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
