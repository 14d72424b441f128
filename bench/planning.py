"""How long `trimtab plan` takes for a large model over many GPUs, with nothing known and with everything.

python bench/planning.py             8B on 64 GPUs: cold, the same again, another deadline, another GPU
python bench/planning.py usual       plans of small and middle-sized jobs, each cold, with its first answer
python bench/planning.py large       plans of large models with the batch that a plan assumes, each cold
python bench/planning.py large 10k   only those whose name contains the words

Prints seconds from start to exit, and seconds of all processors: cold (nothing cached), the same question
again, and other questions about the same job, for which the traces are there and the plan is not (traces of
H100 serve H200 too). Run it on an otherwise idle machine.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine  # type: ignore[import-not-found] # beside this file

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
WHERE = "8x8xH100"
MODELS = Path(__file__).parent / "models"
LARGE = {
    "70B on 256": ("llama-70b", "--on", "32x8xH100"),
    "Mixtral on 16": ("mixtral-8x7b", "--on", "2x8xH100"),
    "8B, 131072 tokens": ("llama-8b", "--on", "8xH100", "--seq", "131072"),
    "405B on 1024": ("llama-405b", "--on", "128x8xH100"),
    "405B on 2048": ("llama-405b", "--on", "256x8xH100"),
    "70B on 10k": ("llama-70b", "--on", "1280x8xH100"),
}
USUAL = {
    "slm on 2": ("slm", "--on", "2xA30"),
    "slm on H100": ("slm", "--on", "H100"),
    "LoRA 8B on 4090": (f"hf:{MODELS / 'llama-8b'}", "--lora", "16", "--on", "RTX4090"),
    "DiT on 2": (f"{MODELS / 'dit.py'}:Pictures", "--on", "2xA100-40GB"),
    "bridge on 1": ("bridge", "--on", "A100-80GB"),
    "bridge on 2": ("bridge", "--on", "2xA100-40GB"),
    "bridge on 4": ("bridge", "--on", "4xA100-40GB"),
    "8B on 64": (f"hf:{MODELS / 'llama-8b'}", "--on", WHERE, "--global-batch", "512"),
    "70B on 64": (f"hf:{MODELS / 'llama-70b'}", "--on", WHERE),
}
NOTHING_FITS = 3
"""The exit code of a plan that suggests changes instead."""
FIRST_ANSWER = re.compile(r"trimtab: (\d+) s,.*best so far")


def cpu_seconds() -> float:
    """Processor time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(cache: Path, *arguments: str) -> tuple[float, float, str]:
    """What a plan took, elapsed and of all processors, and what it chose."""
    took, cpu, chosen, _ = time_plan(cache, *arguments)
    return took, cpu, chosen


def time_plan(cache: Path, *arguments: str) -> tuple[float, float, str, str]:
    """What a plan took, elapsed and of all processors, what it chose, and when there was a first answer."""
    began, used = time.perf_counter(), cpu_seconds()
    file = cache / "plan.json"
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "plan", *arguments, "--out", str(file)],
        env={**os.environ, "TRIMTAB_CACHE": str(cache), "TRIMTAB_PROGRESS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - began
    if done.returncode == NOTHING_FITS:
        return took, cpu_seconds() - used, "nothing fits", "at the end"
    done.check_returncode()
    plan = json.loads(file.read_text(encoding="utf-8"))
    first = FIRST_ANSWER.search(done.stderr)
    choice = plan["choice"]
    degrees = [
        f"{axis} {choice['mesh'][axis]}" for axis in ("tp", "cp", "ep", "pp") if choice["mesh"][axis] > 1
    ]
    words = [choice["strategy"], *degrees, f"{choice['micro_batch']} x {choice['accumulation']}"]
    words += ["by formulas"] * plan["by_formulas"]
    return took, cpu_seconds() - used, " ".join(words), f"{first[1]} s" if first else "at the end"


def time_usual(words: list[str]) -> None:
    """Ask for plans of usual jobs, each with an empty cache."""
    for name, arguments in USUAL.items():
        if all(word in name for word in words):
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as cache:
                took, cpu, chosen, first = time_plan(Path(cache), *arguments)
            print(
                f"{name:18} {took:6.1f} s {cpu:6.1f} s CPU   first answer {first:10} {chosen}   "
                f"load before {load:.1f}",
                flush=True,
            )


def time_large(words: list[str]) -> None:
    """Ask for plans of large models, each with an empty cache."""
    for name, (model, *options) in LARGE.items():
        if all(word in name for word in words):
            with tempfile.TemporaryDirectory() as cache:
                took, cpu, chosen = seconds(Path(cache), f"hf:{MODELS / model}", *options)
            print(f"{name:18} {took:6.1f} s {cpu:6.1f} s CPU   {chosen}", flush=True)


def main() -> None:
    """Ask three times."""
    print(machine())
    if sys.argv[1:2] == ["usual"]:
        time_usual(sys.argv[2:])
        return
    if sys.argv[1:2] == ["large"]:
        time_large(sys.argv[2:])
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch) / "llama-8b", Path(scratch) / "cache"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        asked = (f"hf:{folder}", "--global-batch", "512")
        for words, where, more in (
            ("cold", WHERE, ()),
            ("the same again", WHERE, ()),
            ("another deadline", WHERE, ("--deadline", "20h")),
            ("H200, not H100", WHERE.replace("H100", "H200"), ()),
        ):
            took, cpu, chosen = seconds(cache, *asked, "--on", where, *more)
            print(f"{words:18} {took:6.1f} s {cpu:6.1f} s CPU   {chosen}")


if __name__ == "__main__":
    main()
