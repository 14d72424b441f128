"""How long `trimtab plan` takes for a large model over many GPUs, with nothing known and with everything.

python bench/planning.py

Prints seconds from start to exit: cold (nothing cached), the same question again, and another question about
the same job, for which the traces are there and the plan is not. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import json
import os
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


def seconds(cache: Path, *arguments: str) -> tuple[float, str]:
    """What a plan took, and what it chose."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "plan", *arguments, "--json"],
        env={**os.environ, "TRIMTAB_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    took = time.perf_counter() - began
    choice = json.loads(done.stdout)["choice"]
    return took, f"{choice['strategy']} {choice['micro_batch']} x {choice['accumulation']}"


def main() -> None:
    """Ask three times."""
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch) / "llama-8b", Path(scratch) / "cache"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        asked = (f"hf:{folder}", "--on", WHERE, "--global-batch", "512")
        for words, more in (
            ("cold", ()),
            ("the same again", ()),
            ("another deadline", ("--deadline", "20h")),
        ):
            took, chosen = seconds(cache, *asked, *more)
            print(f"{words:18} {took:6.1f} s   {chosen}")


if __name__ == "__main__":
    main()
