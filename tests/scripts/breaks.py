"""A training script that fails in the way its argument names."""
import sys
from pathlib import Path

import torch
from torch import nn

where = sys.argv[1] if len(sys.argv) > 1 else "loss"
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Logger:
    """Writes to a log too, as many scripts do; a stream has more methods."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.stream.write(text)


def batches():
    for index in range(4):
        if where == "data" and index == 1:
            Path("shard-0001.tar").read_bytes()
        yield torch.randn(4, 8 if where != "shape" or index < 1 else 7)


if where == "loss":
    sys.stdout, sys.stderr = Logger(sys.stdout), Logger(sys.stderr)
if where == "arguments":
    print("usage: breaks.py WHERE", file=sys.stderr)
    sys.exit(2)
if where == "no-step":
    print("nothing to train")
    sys.exit(0)
if where == "import":
    import a_module_that_nobody_has  # noqa: F401
for batch in batches():
    loss = model(batch.to(device)).square().mean()
    if where == "loss":
        raise ValueError("loss is not finite")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
