"""A recurrent model, updated without an optimizer: parameters lose a share of their gradients."""
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.5)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(100, 32)
        self.rnn = nn.GRU(32, 32, 2)
        self.decoder = nn.Linear(32, 100)

    def forward(self, tokens, hidden):
        states, hidden = self.rnn(self.encoder(tokens), hidden)
        return torch.log_softmax(self.decoder(states).view(-1, 100), dim=1), hidden


model = Words().to(device)
data = torch.randint(0, 100, (args.bptt * args.steps + 1, args.batch_size)).to(device)
hidden = torch.zeros(2, args.batch_size, 32, device=device)
model.train()
for step in range(args.steps):
    start = step * args.bptt
    model.zero_grad()
    hidden = hidden.detach()
    output, hidden = model(data[start : start + args.bptt], hidden)
    loss = nn.functional.nll_loss(output, data[start + 1 : start + 1 + args.bptt].reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-args.lr)
    print(f"step {step} loss {loss.item():.3f}")
torch.save(model, "words.pt")
