"""Generator against discriminator: two models, two optimizers, one loop."""
import argparse
import os

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nz", type=int, default=32, help="size of the latent vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--niter", type=int, default=6)
parser.add_argument("--critic-steps", type=int, default=1, help="discriminator steps for each generator step")
parser.add_argument("--outf", default="samples")
opt = parser.parse_args()
os.makedirs(opt.outf, exist_ok=True)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    if "Conv" in m.__class__.__name__:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in m.__class__.__name__:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, opt.ngf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(opt.ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(opt.ngf * 2, opt.ngf, 4, 2, 1, bias=False),
    nn.BatchNorm2d(opt.ngf),
    nn.ReLU(True),
    nn.ConvTranspose2d(opt.ngf, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netD = nn.Sequential(
    nn.Conv2d(3, opt.ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(opt.ndf, opt.ndf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(opt.ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(opt.ndf * 2, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(device)
netG.apply(weights_init)
netD.apply(weights_init)
print(netG, netD, sep="\n")
criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(opt.niter):
    for _ in range(opt.critic_steps):
        netD.zero_grad()
        real = torch.rand(opt.batchSize, 3, 16, 16).to(device)
        label = torch.full((opt.batchSize,), 1.0, device=device)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        fake = netG(torch.randn(opt.batchSize, opt.nz, 1, 1, device=device))
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    errG.backward()
    optimizerG.step()
    print("[%d/%d] Loss_D: %.4f Loss_G: %.4f D(x): %.4f D(G(z)): %.4f" % (
        i, opt.niter, (errD_real + errD_fake).item(), errG.item(), D_x, D_G_z1))
    if i % 2 == 0:
        with torch.no_grad():
            grid = netG(fixed_noise).cpu().numpy()
        grid.tofile(f"{opt.outf}/fake_{i:03d}.raw")
torch.save(netG.state_dict(), f"{opt.outf}/netG.pth")
torch.save(netD.state_dict(), f"{opt.outf}/netD.pth")
