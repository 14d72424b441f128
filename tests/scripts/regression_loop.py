# Fit a polynomial. Stops when the loss is small enough.
from itertools import count

import torch
import torch.nn.functional as F

DEGREE = 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
target_w = torch.randn(DEGREE, 1, device=device) * 5
target_b = torch.randn(1, device=device) * 5
fc = torch.nn.Linear(DEGREE, 1).to(device)
optimizer = torch.optim.SGD(fc.parameters(), lr=0.05)
for batch_idx in count(1):
    x = torch.randn(32, device=device).unsqueeze(1)
    x = torch.cat([x**i for i in range(1, DEGREE + 1)], 1) / 10
    y = x.mm(target_w) + target_b.item()
    optimizer.zero_grad()
    output = F.smooth_l1_loss(fc(x), y)
    loss = output.item()
    output.backward()
    optimizer.step()
    if loss < 1e-1 or batch_idx > 200:
        break
print(f"Loss: {loss:.6f} after {batch_idx} batches")
print("==> learned", [f"{w:+.2f}" for w in fc.weight.view(-1).tolist()])
