"""What training with trimtab costs and survives, on the GPU of this machine.

    python bench/training.py plan               plans of the settings below; needs no GPU
    python bench/training.py speed              a GPT of 124 million parameters, compiled: tokens a second
    python bench/training.py overhead           the same steps in a loop written by hand, and in trimtab's
    python bench/training.py memory             a micro-batch that is far too large for a capped card

Loops compared run in one process, one after the other, over the same samples. Results: training.json.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import trimtab
from trimtab.jobs.slm import LanguageModel
from trimtab.spec import Plan
from trimtab.training.loading import build_sample_order
from trimtab.training.loop import train
from trimtab.training.task import TrainTask

HERE = Path(__file__).parent
PLANS, RESULTS = HERE / "training_plans.json", HERE / "training.json"
GPT = {"vocab": 50304, "dropout": 0.0, "global_batch": 64, "samples": 100_000, "pieces": 2}
WANTED: dict[str, dict[str, Any]] = {
    "compiled": {"options": GPT, "pins": ["micro_batch=64", "compile=true", "recompute=none"]},
    "eager": {"options": GPT, "pins": ["micro_batch=64", "compile=false", "recompute=none"]},
    "small": {
        "options": {**GPT, "global_batch": 16},
        "pins": ["micro_batch=16", "compile=false", "recompute=none"],
    },
}
WARM, TIMED = 12, 60
CAP_BYTES = 16 * 2**30


def plan() -> None:
    """Plans of the settings, for an H200."""
    found = {
        key: trimtab.plan("slm", "H200", options=one["options"], pins=one["pins"]).to_builtins()
        for key, one in WANTED.items()
    }
    PLANS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def planned(key: str) -> Plan:
    """A plan from the file."""
    return Plan.from_builtins(json.loads(PLANS.read_text(encoding="utf-8"))[key])


def fresh() -> None:
    """Forget the run before."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


class Usual(LanguageModel):
    """The same GPT as it is usually written: a stream in fp32, all logits at once, GELU by erf."""

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean loss of a token."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        block: Any
        for block in self.blocks:
            x = x + block.attention(block.attention_norm(x))
            x = x + block.narrow(functional.gelu(block.wide(block.wide_norm(x))))
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(key: str, *, steps: int = WARM + TIMED, usual: bool = False) -> dict[str, Any]:
    """The loop that one would write: the same model, data, precision, optimizer, clip and schedule."""
    fresh()
    choice, options = planned(key).choice, WANTED[key]["options"]
    job = trimtab.load("slm", **options)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Usual(job) if usual else job.model()
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    schedule = job.schedule(optimizer)
    compiled = torch.compile(model) if choice.compile else model
    samples = job.dataset()
    # The samples that trimtab takes, in its order: the losses of both are of the same things.
    order = build_sample_order(samples, choice.global_batch, 0)
    loader = torch.utils.data.DataLoader(
        samples,
        batch_sampler=[order.batch(step).indices.tolist() for step in range(steps)],
        num_workers=choice.workers,
        pin_memory=True,
    )
    losses = []
    for number, host in enumerate(loader):
        batch = [one.to("cuda", non_blocking=True) for one in host]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = job.loss(compiled, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        schedule.step()
        if number == WARM:
            torch.cuda.synchronize()
            start = time.perf_counter()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return {
        "step_s": (time.perf_counter() - start) / (steps - WARM - 1),
        "losses": [float(loss) for loss in losses[:: steps // 8]],
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def by_trimtab(key: str, *, steps: int = WARM + TIMED) -> dict[str, Any]:
    """The same steps by `trimtab train`, in this process."""
    fresh()
    plan = planned(key)
    with tempfile.TemporaryDirectory() as out:
        task = TrainTask(
            job="slm",
            options=WANTED[key]["options"],
            plan=plan,
            out=out,
            steps=steps,
            every=steps // 4,
            keep=1,
        )
        train(task)
        lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (Path(out) / "events.jsonl").read_text().splitlines()]
    # The last step writes the checkpoint.
    timed = [line["time_s"] for line in lines[WARM:-1]]
    return {
        "step_s": sum(timed) / len(timed),
        "median_s": statistics.median(timed),
        "first_s": [round(line["time_s"], 2) for line in lines[:4]],
        "losses": [line["loss"] for line in lines[:: steps // 8]],
        "reserved_bytes": lines[-1]["reserved_bytes"],
        "micro_batch": lines[-1]["micro_batch"],
        "attempts": [line["attempts"] for line in lines if line["attempts"] > 1],
        "data_wait_s": sum(line["data_wait_s"] for line in lines[WARM:-1]) / len(timed),
        "events": events,
    }


def tokens(key: str, run: dict[str, Any]) -> float:
    """Tokens a second."""
    return float(WANTED[key]["options"]["global_batch"] * 1024 / run["step_s"])


def speed() -> dict[str, Any]:
    """Compiled, 64 sequences of 1024 tokens; beside it the same GPT as it is usually written, by hand."""
    run, usual = by_trimtab("compiled"), by_hand("compiled", usual=True)
    return {
        "trimtab": run,
        "usual": usual,
        "tokens_per_s": tokens("compiled", run),
        "usual_tokens_per_s": tokens("compiled", usual),
        "ratio": usual["step_s"] / run["step_s"],
    }


def overhead(keys: tuple[str, ...] = ("compiled", "small")) -> dict[str, Any]:
    """By hand, by trimtab, and by hand once more, so that a drift of the card shows."""
    found = {}
    for key in keys:
        first, ours, again = by_hand(key), by_trimtab(key), by_hand(key)
        hand_s = min(first["step_s"], again["step_s"])
        found[key] = {
            "by_hand": [first, again],
            "trimtab": ours,
            "share": hand_s / ours["step_s"],
            "tokens_per_s": tokens(key, ours),
            "by_hand_tokens_per_s": WANTED[key]["options"]["global_batch"] * 1024 / hand_s,
        }
    return found


def memory() -> dict[str, Any]:
    """64 sequences at once under a cap that a third of them fills."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total)
    begin = time.perf_counter()
    ours = by_trimtab("eager", steps=30)
    took = time.perf_counter() - begin
    right = {}
    for micro in (8, 16, 24, 32):
        right[micro] = pace_at(micro)
    torch.cuda.set_per_process_memory_fraction(1.0)
    best = min((one for one in right.values() if one is not None), default=None)
    share = best / ours["median_s"] if best else None
    return {"trimtab": ours, "took_s": took, "right_step_s": right, "share": share}


def pace_at(micro: int) -> float | None:
    """Seconds of an optimizer step by hand in micro-batches of that size; None: out of memory."""
    fresh()
    job = trimtab.load("slm", **GPT)
    try:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = job.model()
            whole = job.batch(64)
        optimizer = job.optimizer(model.parameters())
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        parts = list(zip(*(one.split(micro) for one in whole), strict=True))
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            for part in parts:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = job.loss(model, part) * (part[0].size(0) / 64)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[3:])
    except torch.OutOfMemoryError:
        return None


def main(verbs: list[str]) -> None:
    """Run what is asked for, and keep what was found."""
    if "plan" in verbs:
        plan()
        return
    file = Path(os.environ.get("OUT", HERE)) / RESULTS.name
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "date": datetime.now(UTC).date().isoformat(),
    }
    for verb in verbs:
        found[verb] = {
            "speed": speed,
            "overhead": overhead,
            "small": lambda: overhead(("small",)),
            "memory": memory,
        }[verb]()
        print(verb, json.dumps({k: v for k, v in found[verb].items() if k != "events"})[:3000], flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or ["overhead", "memory"])
