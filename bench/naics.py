"""A step of naics at full size beside the naive one, on the GPU of this machine: speed and memory.

    python bench/naics.py [--small] [--limit SECONDS] [--out FOLDER]

Both compute the same loss from the same weights over the same rows, in one process, one after the other, in
bf16 autocast with fused AdamW: the naive one as bench/naics_naive.py has it, with every layer recomputed;
ours as it is, with every layer recomputed, and with the layers compiled. `--small` tries the program out on
a CPU. Results: naics.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.data import default_collate

import trimtab
from trimtab.engine.recompute import enable_recompute
from trimtab.jobs.naics.job import EncoderLayer
from trimtab.spec import Recompute

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.naics_naive import Naive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCHES = (16, 45)
WARM, TIMED = 2, 4
BEGAN = time.monotonic()


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


class Bench:
    """What is measured, and what was found."""

    def __init__(self, *, small: bool, limit_s: float) -> None:
        self.small, self.limit_s = small, limit_s
        if small:
            # Small models on several threads spend their time waiting for each other.
            torch.set_num_threads(1)
        self.device = torch.device("cpu" if small else "cuda")
        options = {"negatives": 4} if small else {}
        self.job = trimtab.load("naics:tiny" if small else "naics", **options)
        self.batches = (2, 3) if small else BATCHES
        self.rows = self.job.dataset()
        self.results: list[dict[str, Any]] = []

    def batch(self, anchors: int, number: int) -> dict[str, torch.Tensor]:
        """The same rows for whoever asks."""
        rows = [self.rows[(number * 1009 + 31 * index) % len(self.rows)] for index in range(anchors)]
        return {name: one.to(self.device) for name, one in default_collate(rows).items()}

    def model(self) -> Any:
        """The job's, always with the same weights."""
        torch.manual_seed(0)
        with self.device:
            return self.job.model()

    def measured(self, name: str, anchors: int, make: Callable[[], Any], *, within_s: float = 1e9) -> None:
        """Take some steps, and note time and memory."""
        if time.monotonic() - BEGAN > min(self.limit_s, within_s):
            say(f"{name}, {anchors} anchors: left out, the time is up")
            return
        found: dict[str, Any] = {"what": name, "anchors": anchors}
        try:
            found |= self.steps(make(), anchors)
        except torch.OutOfMemoryError as error:
            found["out_of_memory"] = str(error).split(".")[0]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.results.append(found)
        say(json.dumps(found))

    def steps(self, model: Any, anchors: int) -> dict[str, Any]:
        """Optimizer steps of one batch each."""
        cuda = self.device.type == "cuda"
        learn = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learn, lr=2e-4, weight_decay=0.01, fused=cuda)
        model.train()
        losses, times = [], []
        began = time.monotonic()
        for number in range(WARM + TIMED):
            batch = self.batch(anchors, number)
            self.settle()
            if number == WARM:
                warm_s = time.monotonic() - began
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
            start = time.monotonic()
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.settle()
            times.append(time.monotonic() - start)
            losses.append(loss.item())
        step_s = statistics.median(times[WARM:])
        return {
            "step_s": round(step_s, 4),
            "anchors_per_s": round(anchors / step_s, 2),
            "texts_per_s": round(anchors * (2 + self.job.negatives) / step_s, 1),
            "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
            "warm_s": round(warm_s, 1),
            "losses": [round(loss, 4) for loss in losses],
        }

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ours(self, how: Recompute = Recompute.NONE) -> Any:
        """The job's model, as trimtab trains it."""
        model = self.model()
        enable_recompute(model, how)
        return model

    def attention(self) -> None:
        """What the mask of the padding costs in attention, forward and backward."""
        if self.device.type != "cuda":
            return
        texts = 16 * (2 + self.job.negatives)
        shape = (texts, self.job.heads, self.job.text, self.job.width // self.job.heads)
        query, key, value = (
            torch.randn(shape, device=self.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        lengths = torch.randint(self.job.text // 4, self.job.text + 1, (texts, 1, 1, 1), device=self.device)
        mask = torch.arange(self.job.text, device=self.device) < lengths
        kinds = torch.nn.attention.SDPBackend
        ways: dict[str, tuple[Any, Any]] = {
            "masked, torch's choice": (mask, contextlib.nullcontext),
            "masked, cuDNN": (mask, lambda: torch.nn.attention.sdpa_kernel(kinds.CUDNN_ATTENTION)),
            "without a mask, flash": (None, lambda: torch.nn.attention.sdpa_kernel(kinds.FLASH_ATTENTION)),
        }
        for name, (given, context) in ways.items():
            try:
                times = []
                for _ in range(6):
                    self.settle()
                    start = time.monotonic()
                    with context():
                        seen: Any = functional.scaled_dot_product_attention(
                            query, key, value, attn_mask=given
                        )
                        seen.sum().backward()
                    self.settle()
                    times.append(time.monotonic() - start)
                say(f"attention of {texts} texts, {name}: {1000 * statistics.median(times[2:]):.2f} ms")
                self.results.append({"what": f"attention, {name}", "step_s": statistics.median(times[2:])})
            except RuntimeError as error:
                say(f"attention, {name}: {str(error).splitlines()[0][:200]}")

    def profiled(self, name: str, model: Any, anchors: int) -> None:
        """Where the device's time goes."""
        if self.device.type != "cuda" or time.monotonic() - BEGAN > self.limit_s:
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.autocast("cuda", torch.bfloat16):
                model(self.batch(anchors, 0)).backward()
            self.settle()
        events = sorted(profile.key_averages(), key=lambda key_average: -key_average.device_time_total)[:12]
        total = sum(key_average.device_time_total for key_average in profile.key_averages())
        say(f"{name}: {total / 1000:.1f} ms on the device, of which")
        for event in events:
            print(
                f"          {event.device_time_total / 1000:8.2f} ms  {event.count:5d} x  {event.key[:90]}",
                flush=True,
            )


@contextlib.contextmanager
def compiled_layers() -> Iterator[None]:
    """Every layer of every encoder through one compiled function: they differ in their weights alone."""
    plain = EncoderLayer.forward
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - torch has no other name for it before 2.12
    EncoderLayer.forward = torch.compile(plain, dynamic=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        EncoderLayer.forward = plain  # type: ignore[method-assign]


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=100.0)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    asked = parser.parse_args()
    bench = Bench(small=asked.small, limit_s=asked.limit)
    say(f"torch {torch.__version__} on {'a CPU' if asked.small else torch.cuda.get_device_name()}")
    bench.attention()
    for anchors in bench.batches:
        bench.measured("naive", anchors, lambda: Naive(bench.model()))
        bench.measured("ours, eager", anchors, bench.ours)
        bench.measured("ours, eager, recompute full", anchors, lambda: bench.ours(Recompute.FULL))
        with compiled_layers():
            bench.measured("ours, layers compiled", anchors, bench.ours)
    bench.profiled("naive", Naive(bench.model()), bench.batches[0])
    bench.profiled("ours, eager", bench.ours(), bench.batches[0])
    first = bench.batches[0]
    bench.measured(
        "ours, compiled whole", first, lambda: torch.compile(bench.ours(), dynamic=False), within_s=70
    )
    for anchors in bench.batches:
        speeds = {
            result["what"]: result["anchors_per_s"]
            for result in bench.results
            if result.get("anchors") == anchors and "anchors_per_s" in result
        }
        for name, speed in speeds.items():
            if name != "naive" and "naive" in speeds:
                say(f"{anchors} anchors: {name} is {speed / speeds['naive']:.2f} x the naive step")
    kept = {"torch": torch.__version__, "device": str(bench.device), "results": bench.results}
    if not asked.small:
        kept["device"] = torch.cuda.get_device_name()
    (Path(asked.out) / "naics.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
