"""Writes src/trimtab/catalog/yardsticks.jsonl: what the jobs of the exam reach, for rating MFU.

    python bench/yardsticks.py

Flops and the split of time come from the prediction, the time itself from the measurement. Single-device
cases that were not compiled, because that is how most jobs run.
"""

from __future__ import annotations

from pathlib import Path

from trimtab.catalog.clusters import row_device
from trimtab.catalog.lookup import reported
from trimtab.exams.sit import cases, predict
from trimtab.predict.rating import PEAK_OF, Yardstick

FILE = Path(__file__).parent.parent / "src" / "trimtab" / "catalog" / "yardsticks.jsonl"


def main() -> None:
    """Predict every case and write the file."""
    lines = []
    for case in cases():
        run = case.measurement
        row = reported(run.device)
        if run.setting.gpus > 1 or run.setting.compile or row is None or run.step_s is None:
            continue
        found = predict(case)
        if found.mfu is None or found.step_time is None or found.step_s is None:
            continue
        peak = getattr(row_device(row, 0, "bench").peaks, PEAK_OF[run.setting.precision])
        scale = run.step_s / found.step_s
        one = Yardstick(
            case=case.id,
            device=row.name,
            precision=run.setting.precision,
            flops=round(found.mfu * found.step_s * peak),
            arithmetic_s=round(found.step_time.compute_s * scale, 6),
            other_s=round((found.step_s - found.step_time.compute_s) * scale, 6),
        )
        print(f"{case.id:32} MFU {one.flops / run.step_s / peak:.1%}")
        lines.append(one.to_json())
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
