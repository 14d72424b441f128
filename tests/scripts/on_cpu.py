"""A policy on the CPU: no option puts it on a GPU."""
import torch
from torch import nn

policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(5):
    terms = []
    for step in range(3):
        choice = torch.distributions.Categorical(logits=policy(torch.randn(4)))
        terms.append(choice.log_prob(choice.sample()))
    optimizer.zero_grad()
    torch.stack(terms).sum().backward()
    optimizer.step()
