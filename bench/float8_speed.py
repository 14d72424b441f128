"""`slm` with matrix products in fp8 beside bf16: tokens per second and losses of the same steps on a GPU.

    python bench/float8_speed.py [--steps 200] [--only PRECISION] [--out FILE]

It prints one line of JSON a precision. With --only, FILE keeps the other precisions that it has.

All runs are compiled, with the same seed and samples: 64 sequences of 1,024 tokens a step. Results:
float8_speed.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("float8_speed.json")
SAMPLES, SEQ, WARM = 64, 1024, 20
PRECISIONS = ("bf16", "fp8-tensorwise", "fp8-rowwise")


def run_training(precision: str, steps: int) -> dict[str, Any]:
    """Train, and return the speed of the steps and some of their losses."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "trimtab", "train", "slm", "--set", f"global_batch={SAMPLES}"]
        command += [
            "--set",
            f"seq={SEQ}",
            "--steps",
            str(steps),
            "--out",
            out,
            "--checkpoint-every",
            "100000",
        ]
        pins = f"compile=true,micro_batch={SAMPLES},precision={precision},recompute=none"
        done = subprocess.run([*command, "--pin", pins], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"precision": precision, "failed": done.stderr[-1500:]}
        lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    # The last step writes the checkpoint.
    step_s = statistics.median(line["time_s"] for line in lines[WARM:-1])
    losses = [line["loss"] for line in lines]
    return {
        "precision": precision,
        "step_s": step_s,
        "tokens_per_s": SAMPLES * SEQ / step_s,
        "reserved_bytes": lines[-1]["reserved_bytes"],
        "losses": {step: round(losses[step - 1], 4) for step in range(20, steps + 1, 20)},
        "last_mean": statistics.fmean(losses[-20:]),
    }


def main() -> None:
    """Run all precisions and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=PRECISIONS)
    given = parser.parse_args()
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
    }
    runs = json.loads(given.out.read_text(encoding="utf-8"))["runs"] if given.only else []
    runs = [run for run in runs if run["precision"] != given.only]
    for precision in [given.only] if given.only else PRECISIONS:
        runs.append(run_training(precision, given.steps))
        print(json.dumps(runs[-1]), flush=True)
        given.out.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
