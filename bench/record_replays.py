"""Predict the fine-tuning jobs of `trimtab exam --outside` and record it in src/trimtab/exams/replays.json.

    python bench/record_replays.py [--all] [--source NAME]

Jobs that are recorded are left out unless --all is given. Each takes about ten seconds on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from trimtab.errors import TrimtabError
from trimtab.exams.outside import read_replays, read_rows
from trimtab.exams.replays import replay_row
from trimtab.trace.server import WorkerProcess

FILE = Path(__file__).parents[1] / "src" / "trimtab" / "exams" / "replays.json"
DIGITS = 4


def main() -> int:
    """Record what is missing, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--source")
    options = parser.parse_args()
    recorded = {key: replay.to_builtins() for key, replay in read_replays().items()}
    rows = {row.key: row for row in read_rows() if row.is_job and not row.reason}
    chosen = [row for row in rows.values() if options.source in {None, row.source}]
    failed = 0
    # A worker process serves one device.
    for gpu in dict.fromkeys(row.gpu for row in chosen):
        with WorkerProcess() as worker:
            for row in chosen:
                if row.gpu != gpu or (row.key in recorded and not options.all):
                    continue
                try:
                    replay = replay_row(row, worker=worker)
                except TrimtabError as reason:
                    failed += 1
                    print(f"{row.key}: {reason}", flush=True)
                    continue
                recorded[row.key] = replay.to_builtins() | {"step_s": _round_seconds(replay.step_s)}
                kept = {key: recorded[key] for key in sorted(recorded) if key in rows}
                FILE.write_text(f"{json.dumps(kept, indent=0)}\n", encoding="utf-8")
                print(row.key, flush=True)
    return failed > 0


def _round_seconds(seconds: float | None) -> float | None:
    if not seconds:
        return seconds
    return round(seconds, DIGITS - 1 - math.floor(math.log10(seconds)))


if __name__ == "__main__":
    sys.exit(main())
