"""What the layers of common models cost the host: forward, backward, and backward into existing gradients.

    python bench/host_ops.py            one line of JSON, on the GPU of this machine

Tensors are tiny, so the device waits for the host. A layer is measured as a row of copies of it, each with
its own weights, under autocast to bf16. `ops` names what torch dispatches for one layer, so that the costs of
single operations follow from layers that share them.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

COPIES, ROUNDS = 60, 7
WIDTH, HEADS, SEQ, BATCH, SIDE = 64, 2, 16, 2, 8


class Function(nn.Module):
    """A layer without weights."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.run(x)


class Scaled(nn.Module):
    """RMSNorm written out, as many models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Table(nn.Module):
    """An embedding whose rows are added."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(128, WIDTH)
        self.register_buffer("ids", torch.randint(0, 128, (BATCH, SEQ)))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        rows: Tensor = self.rows(self.ids)
        return x + rows


def attend(x: Tensor, **options: Any) -> Tensor:
    """Attention of a tensor to itself."""
    heads = x.view(BATCH, SEQ, HEADS, -1).transpose(1, 2)
    seen = functional.scaled_dot_product_attention(heads, heads, heads, **options)
    return seen.transpose(1, 2).reshape(x.shape)


def attend_written(x: Tensor) -> Tensor:
    """The same from single operations."""
    heads = x.view(BATCH, SEQ, HEADS, -1).transpose(1, 2)
    seen = (heads @ heads.transpose(-2, -1) * 0.2).softmax(-1) @ heads
    return seen.transpose(1, 2).reshape(x.shape)


def turn(x: Tensor) -> Tensor:
    """A copy in another layout."""
    return x.view(BATCH, 4, SEQ // 4, WIDTH).transpose(1, 2).reshape(x.shape)


ROWS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "linear of fp32": lambda: nn.Sequential(Function(lambda x: x.float()), nn.Linear(WIDTH, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "rms norm written out": Scaled,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "dropout": lambda: nn.Dropout(0.1),
    "add": lambda: Function(lambda x: x + x),
    "multiply": lambda: Function(lambda x: x * x),
    "cast": lambda: Function(lambda x: x.to(torch.float32 if x.dtype is torch.bfloat16 else torch.bfloat16)),
    "view": lambda: Function(lambda x: x.view(BATCH * SEQ, WIDTH).view(BATCH, SEQ, WIDTH)),
    "turn": lambda: Function(turn),
    "roll": lambda: Function(lambda x: torch.roll(x, (1, 1), (0, 1))),
    "split": lambda: Function(lambda x: torch.cat(x.chunk(2, -1), -1)),
    "softmax": lambda: Function(lambda x: x.softmax(-1)),
    "mean": lambda: Function(lambda x: x + x.mean(-1, keepdim=True)),
    "attention": lambda: Function(attend),
    "attention, masked": lambda: Function(
        lambda x: attend(x, attn_mask=torch.zeros(BATCH, 1, SEQ, SEQ, dtype=x.dtype, device=x.device))
    ),
    "attention written out": lambda: Function(attend_written),
    "embedding": Table,
    "index": lambda: Function(lambda x: x[torch.arange(BATCH, device=x.device)]),
    "call": nn.Identity,
}
LINES: dict[str, Callable[[], nn.Module]] = {
    "convolution of signals": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "depthwise convolution of signals": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
    "batch norm of signals": lambda: nn.BatchNorm1d(WIDTH),
    "glu": lambda: Function(lambda x: functional.glu(torch.cat([x, x], 1), 1)),
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
    "convolution with bias": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    "convolution 1x1": lambda: nn.Conv2d(WIDTH, WIDTH, 1, bias=False),
    "depthwise convolution": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False),
    "batch norm": lambda: nn.BatchNorm2d(WIDTH),
    "group norm": lambda: nn.GroupNorm(8, WIDTH),
    "relu in place": lambda: nn.Sequential(Function(lambda x: x * 1.0), nn.ReLU(inplace=True)),
    "relu": nn.ReLU,
    "upsample and pool": lambda: Function(
        lambda x: functional.max_pool2d(functional.interpolate(x, scale_factor=2.0), 2)
    ),
}


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1  # noqa: SLF001 - the name that traces use
        return func(*args, **(kwargs or {}))


def measure_layer(make: Callable[[], nn.Module], source: Tensor, last: torch.memory_format) -> dict[str, Any]:
    """Return microseconds of the host for one layer, and its operations."""
    model: Any = nn.Sequential(*(make() for _ in range(COPIES))).cuda()
    model = model.to(memory_format=last)
    x = source.clone(memory_format=torch.preserve_format).requires_grad_()
    times: dict[str, list[float]] = {"forward": [], "backward": [], "again": []}

    def run(which: str) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        middle = time.perf_counter()
        loss = out.float().sum()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        if which != "again":
            times["forward"].append((middle - begin) * 1e6 / COPIES)
        times[which].append((end - start) * 1e6 / COPIES)

    for _ in range(ROUNDS + 2):
        model.zero_grad(set_to_none=True)
        x.grad = None
        run("backward")
        run("again")
    with torch.autocast("cuda", dtype=torch.bfloat16), Names() as forward:
        out = model(x)
    loss = out.float().sum()
    with Names() as backward:
        loss.backward()
    counts = [
        {name: round(count / COPIES, 2) for name, count in names.counts.items() if count >= COPIES}
        for names in (forward, backward)
    ]
    found: dict[str, Any] = {name: round(statistics.median(taken[2:]), 2) for name, taken in times.items()}
    return found | {"ops": counts, "weights": len(list(model.parameters())) / COPIES}


def measure_layers() -> dict[str, Any]:
    """Return every layer by name; a layer that this torch cannot run says why."""
    torch.manual_seed(0)
    plain, last = torch.contiguous_format, torch.channels_last
    rows = torch.randn(BATCH, SEQ, WIDTH, device="cuda", dtype=torch.bfloat16)
    lines = torch.randn(BATCH, WIDTH, SEQ, device="cuda", dtype=torch.bfloat16)
    images = torch.randn(BATCH, WIDTH, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    groups = [("", ROWS, rows, plain), ("", LINES, lines, plain), ("", IMAGES, images, plain)]
    groups.append((", channels last", IMAGES, images.to(memory_format=last), last))
    found: dict[str, Any] = {}
    gc.disable()
    for suffix, layers, source, layout in groups:
        for name, make in layers.items():
            try:
                found[name + suffix] = measure_layer(make, source, layout)
            except Exception as error:  # noqa: BLE001 - the others still count
                found[name + suffix] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            gc.collect()
    return found


if __name__ == "__main__":
    print(json.dumps(measure_layers()))
