"""How long the host takes to hand operations to the GPU: what bounds small jobs that are not compiled."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 400
ROUNDS = 5


def measure_host_costs() -> dict[str, float]:  # noqa: C901 - a list of small loops
    """Seconds of the host for each thing a step does, by name."""
    small = torch.ones(64, device="cuda")
    weight = torch.ones(64, device="cuda", requires_grad=True)
    layer = nn.Identity()
    matrix = torch.ones(64, 64, device="cuda", requires_grad=True)
    rows = torch.ones(8, 64, device="cuda")

    def forward() -> Any:
        out = weight
        for _ in range(COUNT):
            out = out * small
        return out

    def plain() -> None:
        for _ in range(COUNT):
            torch.mul(small, small)

    def views() -> None:
        for _ in range(COUNT):
            weight.view(8, 8)

    def calls() -> None:
        for _ in range(COUNT):
            layer(small)

    def casts() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for _ in range(COUNT):
                nn.functional.linear(rows, matrix)

    def backward() -> float:
        out = forward().sum()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out.backward()
        return time.perf_counter() - begin

    def waits() -> None:
        for _ in range(COUNT):
            small[0].item()

    return {
        "plain_s": _time_loop(plain),
        "forward_s": _time_loop(forward),
        "view_s": _time_loop(views),
        "call_s": _time_loop(calls),
        "linear_s": _time_loop(casts),
        "backward_s": statistics.median(backward() for _ in range(ROUNDS)) / COUNT,
        "wait_s": _time_loop(waits),
    }


def _time_loop(loop: Callable[[], Any]) -> float:
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loop()
        taken.append((time.perf_counter() - begin) / COUNT)
    return statistics.median(taken)


def measure_copy_rates() -> dict[str, float]:
    """Bytes a second between host and device, from pinned memory."""
    size = 256 * 2**20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    found = {}
    for name, (target, source) in {"to_device": (device, host), "to_host": (host, device)}.items():
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        found[name] = size / best
    return found


def measure_peer_rates() -> dict[str, float]:
    """Bytes a second from the first device to each other one of this machine."""
    size = 256 * 2**20
    found = {}
    for other in range(1, torch.cuda.device_count()):
        source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{other}")
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize(0)
            begin = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(other)
            best = min(best, time.perf_counter() - begin)
        found[f"0-{other}"] = size / best
    return found
