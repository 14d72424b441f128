"""torchrun --standalone --nproc_per_node=2 ddp.py 2 1"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, save_every, snapshot):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.model = model.to(self.device)
        self.loader, self.optimizer, self.save_every, self.snapshot = loader, optimizer, save_every, snapshot
        if os.path.exists(snapshot):
            self.model.load_state_dict(torch.load(snapshot, map_location=self.device))
        ids = [self.local_rank] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            print(f"[{self.device}] Epoch {epoch} | Steps: {len(self.loader)}")
            for source, targets in self.loader:
                halves = list(zip(source.to(self.device).chunk(2), targets.to(self.device).chunk(2)))
                with self.model.no_sync():
                    F.cross_entropy(self.model(halves[0][0]), halves[0][1]).backward()
                loss = F.cross_entropy(self.model(halves[1][0]), halves[1][1])
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                total = loss.detach().clone()
                dist.all_reduce(total)
                if self.rank == 0:
                    print(f"loss {total.item() / dist.get_world_size():.4f}")
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save(self.model.module.state_dict(), self.snapshot)
            dist.barrier()


def main():
    parser = argparse.ArgumentParser(description="distributed training")
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=16, type=int, help="batch size on each device")
    parser.add_argument("--width", default=64, type=int)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 20), torch.randint(10, (128,)))
    model = torch.nn.Sequential(
        torch.nn.Linear(20, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, 10)
    )
    loader = DataLoader(data, batch_size=args.batch_size, pin_memory=True, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    Trainer(model, loader, optimizer, args.save_every, "snapshot.pt").train(args.total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
