"""Measure host overhead per operation, which bounds small uncompiled jobs, and copy bandwidths."""

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
    """Measure the host's seconds for each kind of work in a step, by name."""
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
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loop()
        times.append((time.perf_counter() - begin) / COUNT)
    return statistics.median(times)


def measure_copy_rates() -> dict[str, float]:
    """Measure bytes per second between pinned host memory and the device, in both directions."""
    size = 256 * 2**20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, (target, source) in {"to_device": (device, host), "to_host": (host, device)}.items():
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        rates[name] = size / best
    return rates


def measure_peer_rates() -> dict[str, float]:
    """Measure bytes per second from the first GPU to each other GPU of this machine."""
    size = 256 * 2**20
    rates = {}
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
        rates[f"0-{other}"] = size / best
    return rates
