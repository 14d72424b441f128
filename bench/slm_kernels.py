"""Where the time of a compiled step of slm goes on the GPU of this machine, beside nanoGPT's model.

    python bench/slm_kernels.py [--nanogpt FOLDER] [--pieces 2]

Steps of 64 x 1024 tokens in bf16 autocast, with clipping and a fused AdamW, as `trimtab train` runs them. The
batches are from the sources of Python. FOLDER is a checkout of karpathy/nanoGPT. Prints one line of
JSON a model, with all losses, and the kernels of slm by their time.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import itertools
import json
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

import trimtab
from trimtab.engine.gradients import sum_squares

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB, SEQ, SAMPLES = 50_304, 1024, 64
WARM, TIMED, PROFILED = 12, 40, 3
RATE = 3e-4
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False}


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of bytes of Python's own sources as tokens: their frequencies are those of a text."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    first, second = data[: len(data) // 2 * 2].long().view(-1, 2).unbind(1)
    tokens = (first * 197 + second * 31 + first * second) % VOCAB
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        starts = torch.randint(len(tokens) - SEQ - 1, (SAMPLES,), generator=generator).tolist()
        rows = torch.stack([tokens[start : start + SEQ + 1] for start in starts]).cuda()
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


def make_slm(pieces: int) -> tuple[Any, Any, Callable[..., Any]]:
    """The model, its optimizer and its loss."""
    job: Any = trimtab.load("slm", vocab=VOCAB, dropout=0.0, global_batch=SAMPLES, pieces=pieces)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = job.model()
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False, lr=RATE)
    return model, optimizer, job.loss


def make_nanogpt(folder: str) -> tuple[Any, Any, Callable[..., Any]]:
    """The same of nanoGPT: its own model and its own optimizer."""
    sys.path.insert(0, folder)
    source: Any = importlib.import_module("model")
    torch.manual_seed(0)
    model = source.GPT(source.GPTConfig(block_size=SEQ, vocab_size=VOCAB, **SHAPE)).cuda()
    optimizer = model.configure_optimizers(0.1, RATE, (0.9, 0.95), "cuda")
    return model, optimizer, lambda call, batch: call(*batch)[1]


def make_step(
    parts: tuple[Any, Any, Callable[..., Any]], batches: list[Any]
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that runs the next step, and the list that it adds the losses to."""
    model, optimizer, loss_of = parts
    call = torch.compile(model, dynamic=False)
    parameters = list(model.parameters())
    losses: list[torch.Tensor] = []

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(call, batches[len(losses) % len(batches)])
        loss.backward()
        norm = sum_squares([parameter.grad for parameter in parameters], loss.device).sqrt()
        # The optimizer divides by the scale, which clips without another pass over the gradients.
        optimizer.found_inf = torch.zeros((), device="cuda")
        optimizer.grad_scale = torch.clamp(norm + 1e-6, min=1.0).float()
        optimizer.step()
        losses.append(loss.detach())

    return run, losses


def time_steps(name: str, parts: tuple[Any, Any, Callable[..., Any]], batches: list[Any]) -> Any:
    """Print the median step; return the function that runs a step."""
    torch.cuda.reset_peak_memory_stats()
    run, losses = make_step(parts, batches)
    marks: list[Any] = []
    make_mark: Any = torch.cuda.Event
    for _ in range(WARM + TIMED):
        run()
        marks.append(make_mark(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    timed = marks[WARM - 1 :]
    step_ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(timed))
    line = {
        "name": name,
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "step_ms": step_ms,
        "tokens_per_s": SAMPLES * SEQ * 1e3 / step_ms,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": torch.stack(losses).tolist(),
    }
    print(json.dumps(line), flush=True)
    return run


def print_kernels(run: Callable[[], None]) -> None:
    """Print the kernels of a step, the longest first."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - begin) / PROFILED * 1e3
    times: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for event in recorded.key_averages():
        times[event.key] += event.self_device_time_total / PROFILED / 1e3
        launches[event.key] += event.count / PROFILED
    print(f"{sum(times.values()):.2f} ms of kernels in {wall_ms:.2f} ms")
    for name, kernel_ms in times.most_common(40):
        print(f"{kernel_ms:8.3f} ms x{launches[name]:6.1f}  {name[:120]}")


def main() -> None:
    """Time nanoGPT's model, if its folder is given, then slm; show the kernels of slm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nanogpt", metavar="FOLDER")
    parser.add_argument("--pieces", type=int, default=2)
    options = parser.parse_args()
    batches = make_batches(WARM + TIMED)
    if options.nanogpt:
        time_steps("nanoGPT", make_nanogpt(options.nanogpt), batches)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    print_kernels(time_steps("slm", make_slm(options.pieces), batches))


if __name__ == "__main__":
    main()
