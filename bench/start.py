"""How long commands take from start to exit, as a person waits for them.

    python bench/start.py

Prints the median and the best of ten runs each, and the ratio to a bare `python -c pass`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from machine import machine  # type: ignore[import-not-found] # beside this file

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "trimtab --help": ["-m", "trimtab", "--help"],
    "trimtab explain bf16": ["-m", "trimtab", "explain", "bf16"],
    "trimtab detect": ["-m", "trimtab", "detect"],
    "trimtab detect --on 2x8xH100": ["-m", "trimtab", "detect", "--on", "2x8xH100"],
}
RUNS = 10


def seconds(args: list[str]) -> list[float]:
    """Wall-clock time of each run."""
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *args], capture_output=True, check=False)
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    """Print the table."""
    print(f"{machine()}, {RUNS} runs each")
    print(f"{'command':32} {'median':>8} {'best':>8} {'ratio':>7}")
    bare = None
    for name, args in COMMANDS.items():
        taken = seconds(args)
        median = statistics.median(taken)
        bare = bare or median
        print(f"{name:32} {median:7.3f}s {min(taken):7.3f}s {median / bare:6.1f}x")


if __name__ == "__main__":
    main()
