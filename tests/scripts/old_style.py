"""Everything that scripts ask of a GPU beside computing, in the styles of ten years."""
import subprocess

import numpy as np
import torch
from torch import nn
from torch.utils.cpp_extension import load
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor


class Shards(IterableDataset):
    """Each worker reads its own share; there is no other way to read."""

    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id, 64, worker.num_workers):
            yield np.full((20, 12), index, dtype=np.float32)


def set_up_worker(index):
    get_worker_info().dataset.opened = index


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.LazyLinear(16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, frames, mixing):
        states, _ = self.rnn(self.entry(frames))
        mixed = torch.sparse.mm(mixing, states.flatten(1)).view_as(states)
        return self.head(mixed).log_softmax(-1)


print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout)
query = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"
total_mib = int(subprocess.check_output(query, shell=True))
free, total = torch.cuda.mem_get_info()
assert abs(total / 2**20 - total_mib) < 2
torch.cuda.memory._record_memory_history(max_entries=1000)
with torch.cuda.device(0):
    noise = Tensor(np.random.normal(0, 1, (4, 20, 12)))
assert isinstance(noise, torch.cuda.FloatTensor) and noise.type() == "torch.cuda.FloatTensor"
torch.set_default_tensor_type("torch.cuda.FloatTensor")
assert torch.Tensor([10.0]).is_cuda and torch.zeros(1).is_cuda
torch.set_default_tensor_type(torch.FloatTensor)
assert not torch.Tensor([10.0]).is_cuda
try:
    blur = load("blur", ["blur.cpp", "blur.cu"])
except Exception:  # the script has a slower way
    blur = None
mixing = torch.eye(4).to_sparse().cuda()
model = Speech().cuda()
model.share_memory()
model(noise, mixing)
assert model.entry.weight.is_cuda and model.entry.weight.shape == (16, 12)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(Shards(), batch_size=4, num_workers=2, worker_init_fn=set_up_worker)
side = torch.cuda.Stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
losses = []
for frames in loader:
    torch.cuda.nvtx.range_push("step")
    start.record()
    with torch.cuda.stream(side):
        frames = frames.cuda(non_blocking=True)
    frames.record_stream(torch.cuda.current_stream())
    out = model(frames, mixing).transpose(0, 1)
    targets = torch.randint(1, 8, (4, 5))
    loss = nn.functional.ctc_loss(out, targets, torch.full((4,), 20), torch.full((4,), 5))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    end.record()
    torch.cuda.nvtx.range_pop()
    used = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    print(f"{torch.tensor(losses).mean():.3f} {start.elapsed_time(end):.1f} ms, {used} bytes")
