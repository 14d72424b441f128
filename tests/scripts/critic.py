"""A critic with a gradient penalty steps each time, the generator every fourth time."""
import argparse

import torch
from torch import autograd, nn

parser = argparse.ArgumentParser()
parser.add_argument("--n-critic", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()
generator = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 784)).cuda()
critic = nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).cuda()
generator_optimizer = torch.optim.Adam(generator.parameters(), betas=(0.5, 0.9))
critic_optimizer = torch.optim.RMSprop(critic.parameters())


def find_penalty(real, fake):
    mix = torch.rand(real.shape[0], 1, device="cuda")
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    scores = critic(between)
    (slopes,) = autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
    return (slopes.norm(2, dim=1) - 1).pow(2).mean()


for step in range(40):
    real = torch.randn(args.batch_size, 784).cuda()
    noise = torch.randn(args.batch_size, 16, device="cuda")
    critic_optimizer.zero_grad()
    fake = generator(noise).detach()
    loss = critic(fake).mean() - critic(real).mean() + 10 * find_penalty(real, fake)
    loss.backward()
    critic_optimizer.step()
    if (step + 1) % args.n_critic == 0:
        generator_optimizer.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        generator_optimizer.step()
    print(f"{step} {loss.item():.3f}")
