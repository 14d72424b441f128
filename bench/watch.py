"""Watches a real training on a real GPU, and checks that everything a driver can tell is told.

    python bench/watch.py [SECONDS]

Trains slm for a while in a folder of its own, samples it each second, prints the samples as lines, and writes
them to $OUT/watch.jsonl where OUT is set. Ends with 1 where a reading or the run's GPU is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine  # type: ignore[import-not-found] # beside this file

import trimtab
from trimtab.cli.watch import Lines

SECONDS = 60
READINGS = ("memory_bytes", "used_bytes", "busy", "memory_busy", "power_w", "temperature_c", "clock_hz")


def main() -> int:
    """Train, watch, judge."""
    print(machine())
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        log = (Path(name) / "train.log").open("w", encoding="utf-8")
        argv = [sys.executable, "-m", "trimtab", "train", "slm", "--steps", "100000", "--out", str(run)]
        training = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            samples = []
            lines = Lines()
            for sample in trimtab.watch([name], interval_s=1.0, samples=seconds):
                samples.append(sample)
                for line in lines.of(sample):
                    print(line)
                if training.poll() is not None:
                    break
        finally:
            training.terminate()
            training.wait()
            log.close()
        tail = (Path(name) / "train.log").read_text(encoding="utf-8").splitlines()[-5:]
    out = os.environ.get("OUT")
    if out:
        Path(out, "watch.jsonl").write_text(
            "".join(sample.to_json() + "\n" for sample in samples), encoding="utf-8"
        )
    last = samples[-1]
    missing = [reading for reading in READINGS if last.gpus and getattr(last.gpus[0], reading) is None]
    found = bool(last.runs and last.runs[0].devices)
    print(f"missing: {', '.join(missing) or 'no reading'}")
    print(f"the run's GPU is {'known' if found else 'not known'}")
    if not found:
        print("the end of the training's own words:", *tail, sep="\n")
    return 0 if last.gpus and not missing and found else 1


if __name__ == "__main__":
    raise SystemExit(main())
