"""torchrun in other ways: a device mesh without a process group, tensor parallelism, inputs left on the CPU."""
import argparse
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--rpc", action="store_true")
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if args.rpc:
    from torch.distributed import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
mesh = init_device_mesh("cuda", (world,))
model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 64)).to(f"cuda:{rank}")
if args.ddp:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)
    inputs = torch.randn(8, 64)
else:
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(8, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for step in range(4):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
