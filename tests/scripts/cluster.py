"""torchrun --nnodes 2 --nproc-per-node 1 cluster.py --resume"""
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--checkpoint", default="cluster.pt")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
parser.add_argument("--fail-at", type=int, default=-1, help="step at which the data is broken")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, 4)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if args.resume and os.path.exists(args.checkpoint):
    state = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
wrapped = DistributedDataParallel(model)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts at step {first}", flush=True)
for step in range(first, args.steps):
    if step == args.fail_at:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    x = torch.randn(args.batch_size, 16, device=device)
    loss = torch.nn.functional.cross_entropy(wrapped(x), torch.zeros(len(x), dtype=torch.long, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, args.checkpoint + ".new")
        os.replace(args.checkpoint + ".new", args.checkpoint)
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    time.sleep(args.pause)
dist.destroy_process_group()
