"""What compiled code costs the host: launches, library calls, weights and graphs.

    python bench/host_compiled.py --out FILE [--workers N]      needs a GPU

Tensors are tiny, so the device waits for the host. A line of JSON for each program has the microseconds of
the host for its forward and its backward pass, and what a bare operation took right before and after: shared
hosts change their speed within minutes. Programs differ in one thing at a time, so that the cost of that
thing is a difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench.gpu_queue import GpuLock, run_forks
from bench.host_ops import BATCH, SEQ, SIDE, WIDTH, Function, attend
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

COPIES, WARM_UP, ROUNDS = 40, 4, 15


class Program(NamedTuple):
    """Something to compile."""

    id: str
    make: Callable[[], tuple[Any, Tensor]]
    """Return a model and its input."""
    gradients: bool = True
    autocast: bool = False


class Apart(nn.Module):
    """Operations on tensors of different sizes, which no kernel can share."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_buffer(f"part{number}", torch.ones(64 + 8 * number, device="cuda"))

    def forward(self, x: Tensor) -> list[Tensor]:  # noqa: D102
        del x
        return [part * 2 + 1 for part in self.buffers()]


class Repeated(nn.Module):
    """One layer, many times: a weight for all of them."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for _ in range(self.count):
            x = self.layer(x)
        return x


class Broken(nn.Module):
    """Layers with a graph break after each."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()  # noqa: SLF001 - the public name is deprecated
        return x


def make_rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A few rows of a transformer."""
    return torch.randn(BATCH, SEQ, WIDTH, device="cuda", dtype=dtype)


def make_images() -> Tensor:
    """A few images with channels last."""
    image = torch.randn(BATCH, WIDTH, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    return image.to(memory_format=torch.channels_last)


def make_linears(count: int, dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    """Layers of one product each."""
    return [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=dtype) for _ in range(count)]


def make_blocks(count: int) -> nn.Module:
    """Norm, product, activation and product, with weights in fp32."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(WIDTH, device="cuda"),
                nn.Linear(WIDTH, WIDTH, device="cuda"),
                nn.GELU(),
                nn.Linear(WIDTH, WIDTH, device="cuda"),
            )
            for _ in range(count)
        )
    )


def make_convolutions(count: int) -> nn.Module:
    """Convolutions with an activation after each."""
    layers = [
        nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False, device="cuda", dtype=torch.bfloat16), nn.ReLU()
        )
        for _ in range(count)
    ]
    model: Any = nn.Sequential(*layers)
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


PROGRAMS = [
    Program("kernels-10", lambda: (Apart(10), make_rows()), gradients=False),
    Program("kernels-50", lambda: (Apart(50), make_rows()), gradients=False),
    Program("products-1-weight", lambda: (Repeated(make_linears(1)[0], COPIES), make_rows())),
    Program("products-40-weights", lambda: (nn.Sequential(*make_linears(COPIES)), make_rows())),
    Program("products-10-weights", lambda: (nn.Sequential(*make_linears(10)), make_rows())),
    Program("graphs-20", lambda: (Broken(make_linears(20)), make_rows())),
    Program("graphs-5", lambda: (Broken(make_linears(5)), make_rows())),
    Program("attention-20", lambda: (Repeated(Function(attend), 20), make_rows())),
    Program("attention-5", lambda: (Repeated(Function(attend), 5), make_rows())),
    Program("convolutions-30", lambda: (make_convolutions(30), make_images())),
    Program("convolutions-10", lambda: (make_convolutions(10), make_images())),
    Program("blocks-20", lambda: (make_blocks(20), make_rows(torch.float32)), autocast=True),
    Program("blocks-5", lambda: (make_blocks(5), make_rows(torch.float32)), autocast=True),
]


def measure_program(program: Program) -> dict[str, Any]:
    """Return the host's microseconds of a compiled program."""
    from torch.profiler import ProfilerActivity, profile

    from trimtab.calibration.host import measure_host_costs

    torch.manual_seed(0)
    lock = GpuLock()
    with lock.shared():
        model, x = program.make()
        run: Any = torch.compile(model, dynamic=False)
        x.requires_grad = program.gradients

        def step() -> tuple[float, float]:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=program.autocast):
                out = run(x)
            middle = time.perf_counter()
            if not program.gradients:
                return middle - begin, 0.0
            loss: Any = functional.mse_loss(out.float(), torch.zeros_like(out, dtype=torch.float32))
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss.backward()
            return middle - begin, time.perf_counter() - start

        for _ in range(WARM_UP):
            step()
    with lock.exclusive():
        before = measure_host_costs()
        taken = [step() for _ in range(ROUNDS)]
        after = measure_host_costs()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            step()
            torch.cuda.synchronize()
    names = [event.name[:60] for event in recorded.events() if str(event.device_type).endswith("CUDA")]
    return {
        "id": program.id,
        "forward_us": statistics.median(each[0] for each in taken) * 1e6,
        "backward_us": statistics.median(each[1] for each in taken) * 1e6,
        "bare_us": (before["forward_s"] + after["forward_s"]) / 2 * 1e6,
        "weights": len(list(model.parameters())),
        "kernels": {name: names.count(name) for name in dict.fromkeys(names)},
    }


def main() -> None:
    """Measure each program in a fork of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=5)
    given = parser.parse_args()

    def write_line(program: Any) -> None:
        line = measure_program(program)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    run_forks(write_line, list(PROGRAMS), given.workers)


if __name__ == "__main__":
    main()
