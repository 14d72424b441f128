"""Processes that train one model together, each with its own data."""
import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model, device):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        loss = model(torch.randn(16, 32, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(rank, step, loss.item())


if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model, device)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
