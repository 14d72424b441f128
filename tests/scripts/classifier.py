#!/usr/bin/env python
"""Train an image classifier on generated images."""
import argparse
import json
import os
import random
import shutil
import time
from pathlib import Path

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, Subset

parser = argparse.ArgumentParser(description="Image classifier")
parser.add_argument("-a", "--arch", default="small", choices=["small", "wide"])
parser.add_argument("-j", "--workers", default=0, type=int, metavar="N")
parser.add_argument("--epochs", default=2, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=16, type=int, metavar="N")
parser.add_argument("--image-size", default=32, type=int)
parser.add_argument("--samples", default=80, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=2, type=int)
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--data-parallel", action="store_true")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--resume", default="", type=str, metavar="PATH")
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--logdir", default="runs", type=Path)


class Images(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % 10


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.body(x))


def build(arch):
    width = {"small": 16, "wide": 64}[arch]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width),
        nn.MaxPool2d(2),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count, self.val = name, 0.0, 0, 0.0

    def update(self, value, n=1):
        self.val = value
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class ScalarWriter:
    """Writes scalars to a file of events."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"events.{int(time.time())}.jsonl", "a")

    def add_scalar(self, tag, value, step):
        self.file.write(json.dumps({"tag": tag, "value": float(value), "step": step}) + "\n")
        self.file.flush()


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(maxk, -1))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def train(loader, model, criterion, optimizer, epoch, device, args, writer):
    losses, top1, data_time = AverageMeter("Loss"), AverageMeter("Acc@1"), AverageMeter("Data")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        data_time.update(time.time() - end)
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        if args.channels_last:
            images = images.to(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            output = model(images)
            loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = epoch * len(loader) + i
        writer.add_scalar("train/loss", loss, step)
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i + 1}/{len(loader)}] Loss {losses.val:.4e} ({losses.avg:.4e}) Acc@1 {top1.val:6.2f}")
        end = time.time()


def validate(loader, model, criterion, device, args):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0].item(), images.size(0))
    print(f" *   Acc@1 {top1.avg:.3f}")
    return top1.avg


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    print(f"=> creating model '{args.arch}'")
    model = build(args.arch).to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if args.data_parallel:
        model = nn.DataParallel(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    start, best = 0, 0.0
    if args.resume:
        if os.path.isfile(args.resume):
            checkpoint = torch.load(args.resume, map_location=device)
            start, best = checkpoint["epoch"], checkpoint["best"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
        else:
            print(f"=> no checkpoint found at '{args.resume}'")
    images = Images(args.samples, args.image_size)
    split = int(0.8 * len(images))
    loader = DataLoader(
        Subset(images, range(split)),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
    )
    val_loader = DataLoader(Subset(images, range(split, len(images))), batch_size=args.batch_size)
    writer = ScalarWriter(args.logdir)
    for epoch in range(start, args.epochs):
        train(loader, model, criterion, optimizer, epoch, device, args, writer)
        acc1 = validate(val_loader, model, criterion, device, args)
        writer.add_scalar("val/acc", acc1, epoch)
        scheduler.step()
        is_best = acc1 >= best
        best = max(acc1, best)
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best": best,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, "checkpoint.pth.tar")
        if is_best:
            shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")


if __name__ == "__main__":
    main()
