"""How long a report takes and how large it is: a plan, and a run of 60,000 steps.

    PYTHONPATH=src:tests python bench/report.py

Prints seconds from the start of the program to its end (median and best of five), the processor time that
`trimtab.report` itself takes, and the size of the page. Ends with 1 where a page takes a second or has 2 MB.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine  # type: ignore[import-not-found] # beside this file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

RUNS = 5
STEPS = 60_000
MOST_S, MOST_BYTES = 1.0, 2_000_000


def main() -> int:
    """Print the table."""
    import run_samples
    import trimtab

    good = True
    print(f"{machine()}, {RUNS} runs each")
    print(f"{'what':24} {'program':>9} {'best':>7} {'function':>9} {'size':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(run_samples.plan().to_json(), encoding="utf-8")
        places = {"plan": folder / "plan.json", f"run of {STEPS:,} steps": folder / "run"}
        run_samples.run(folder / "run", steps=STEPS)
        for what, place in places.items():
            out = folder / "page.html"
            whole, inside = [], []
            for _ in range(RUNS):
                start = time.perf_counter()
                argv = [sys.executable, "-m", "trimtab", "report", str(place), "-o", str(out)]
                subprocess.run(argv, check=True, capture_output=True)
                whole.append(time.perf_counter() - start)
                start = time.process_time()
                trimtab.report(place, out)
                inside.append(time.process_time() - start)
            size = out.stat().st_size
            print(
                f"{what:24} {statistics.median(whole):8.2f}s {min(whole):6.2f}s {min(inside):8.2f}s "
                f"{size / 1e3:6.0f} kB"
            )
            good &= min(inside) < MOST_S and size < MOST_BYTES
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
