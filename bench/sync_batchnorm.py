"""Compare synchronised BatchNorm on a GPU with one layer that sees all samples, and time it.

    python bench/sync_batchnorm.py

Three processes share one GPU and talk through gloo: 24, 8 and 0 samples each. A process without samples takes
part with a batch that does not count. Prints, for each dtype and layout, the largest differences of
output, gradients and running statistics, and milliseconds of one layer beside a plain one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path[:0] = [str(Path(__file__).parent.parent / "src")]

from trimtab.engine.sync_norm import synchronise_batch_norms  # noqa: E402

SHARES = (24, 8, 0)
CHANNELS, SIDE = 64, 14
KINDS = [
    (torch.float32, torch.float32, torch.contiguous_format),
    (torch.float32, torch.float32, torch.channels_last),
    (torch.bfloat16, torch.float32, torch.contiguous_format),
    (torch.bfloat16, torch.float32, torch.channels_last),
    (torch.bfloat16, torch.bfloat16, torch.contiguous_format),
    (torch.bfloat16, torch.bfloat16, torch.channels_last),
]
"""Dtypes of batch and weights, and the layout. fsdp gathers weights in half precision."""


def passed(layer: nn.Module, batch: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of input, weight and bias."""
    source = batch.detach().requires_grad_()
    output = layer(source)
    output.backward(gradient)
    return [
        output.detach(),
        *(tensor.grad.float() for tensor in (source, *layer.parameters()) if tensor.grad is not None),
    ]


def milliseconds(layer: nn.Module, batch: torch.Tensor) -> float:
    """One forward and backward pass, on the median."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        layer(batch.detach().requires_grad_()).sum().backward()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def rank_of(rank: int, store: str) -> None:
    """What one process does."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, len(SHARES)),  # type: ignore[attr-defined]
        rank=rank,
        world_size=len(SHARES),
    )
    for dtype, weights, layout in KINDS:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (sum(SHARES), CHANNELS, SIDE, SIDE)
        drawn = [3 * torch.randn(shape, device="cuda", generator=generator) + 1 for _ in range(2)]
        whole, gradient = (tensor.to(dtype).contiguous(memory_format=layout) for tensor in drawn)
        plain, layer = nn.BatchNorm2d(CHANNELS).cuda(), nn.BatchNorm2d(CHANNELS).cuda()
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(weights)
        expected = passed(plain, whole, gradient)
        statistics = synchronise_batch_norms(layer)
        begin = sum(SHARES[:rank])
        count = SHARES[rank]
        rows = slice(begin, begin + count) if count else slice(0, 2)
        if statistics is not None and not count:
            statistics.is_counted = False
        found = passed(layer, whole[rows], gradient[rows])
        line: dict[str, Any] = {
            "dtype": str(dtype),
            "weights": str(weights),
            "layout": str(layout),
            "rank": rank,
            "samples": count,
        }
        if count:
            for index in (2, 3):
                # The sums over ranks that a reducer would make.
                dist.all_reduce(found[index])
            wanted = [expected[0][rows], expected[1][rows], *expected[2:]]
            names = ("output", "input_gradient", "weight_gradient", "bias_gradient")
            for name, mine, other in zip(names, found, wanted, strict=True):
                scale = float(other.float().abs().max())
                line[name] = float((mine.float() - other.float()).abs().max()) / scale
        else:
            for index in (2, 3):
                dist.all_reduce(torch.zeros_like(found[index]))
        line["running_mean"] = float((layer.running_mean - plain.running_mean).abs().max())  # type: ignore[operator]
        line["running_var"] = float((layer.running_var - plain.running_var).abs().max())  # type: ignore[operator]
        line["finite"] = all(bool(tensor.isfinite().all()) for tensor in found)
        line["plain_ms"], line["sync_ms"] = milliseconds(plain, whole[rows]), milliseconds(layer, whole[rows])
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (f"{folder}/store",), nprocs=len(SHARES))  # type: ignore[attr-defined,no-untyped-call]
