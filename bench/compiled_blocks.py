"""Compare the trace of a compiled model with the one that is composed of models with few blocks.

    python bench/compiled_blocks.py [JOB..]

For each job, torch.compile runs on the whole model and on models with few blocks, on the CPU for a pretended
H200. Prints the CPU seconds of both with their ratio, and the differences: peak of allocated memory,
predicted step time, and the number of kernels. Without jobs: GPT-2, Llama with tied weights, BERT,
GPT-2 medium and ViT. Needs transformers; takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from trimtab.catalog.clusters import parse_cluster
from trimtab.predict.estimate import estimate_trace
from trimtab.spec import Setting, Trace
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess

DEVICE = parse_cluster("H200").devices[0]
MICRO_BATCH = 6
TIMEOUT_S = 1800.0
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "gpt2-medium": {**GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
}


class Traced(NamedTuple):
    """A trace, how it was made, and what it cost."""

    trace: Trace
    how: str
    cpu_s: float
    wall_s: float


def trace_compiled(job: str, *, whole: bool) -> Traced:
    """Trace a compiled job in a new worker process; count its CPU time and that of its forks."""
    setting = Setting(micro_batch=MICRO_BATCH, global_batch=MICRO_BATCH, compile=True)
    requests = TraceRequests(
        job=job, settings=(setting,), device=DEVICE, clip=1.0, timeout_s=TIMEOUT_S, whole=whole
    )
    start, used = monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with WorkerProcess() as worker:
        (answer,) = worker.ask_all(requests, timeout_s=TIMEOUT_S)
    seconds, after = monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not isinstance(answer, dict):
        raise answer
    trace = Trace.from_builtins(answer["trace"])
    return Traced(trace, answer["how"], after.ru_utime - used.ru_utime, seconds)


def describe_difference(whole: Trace, few: Trace) -> str:
    """Return the relative differences of peak and step time, and that of the number of kernels."""
    setting = Setting(micro_batch=MICRO_BATCH, global_batch=MICRO_BATCH, compile=True)
    expected, composed = (estimate_trace(trace, setting, DEVICE)[0] for trace in (whole, few))
    peak = composed.allocated_bytes / expected.allocated_bytes - 1
    step = (composed.step_s or 0.0) / (expected.step_s or 1.0) - 1
    kernels = len(few.sequence) - len(whole.sequence)
    same = "" if peak or step or kernels else " (the same)"
    return f"peak {peak:+.3%}, step {step:+.3%}, kernels {kernels:+d}{same}"


def main() -> None:
    """Print one line per job."""
    jobs = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items() if not jobs else ():
            place = Path(folder) / name
            place.mkdir()
            (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
            jobs.append(f"hf:{place}")
        for job in jobs:
            whole, few = (trace_compiled(job, whole=is_whole) for is_whole in (True, False))
            print(
                f"{Path(job).name:<12} whole {whole.cpu_s:5.1f} s CPU, {whole.wall_s:5.1f} s; "
                f"{few.how:<7} {few.cpu_s:5.1f} s CPU, {few.wall_s:5.1f} s; "
                f"ratio {whole.cpu_s / few.cpu_s:.2f} CPU, {whole.wall_s / few.wall_s:.2f}; "
                + describe_difference(whole.trace, few.trace),
                flush=True,
            )


if __name__ == "__main__":
    main()
