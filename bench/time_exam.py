"""Writes the table of docs/time.md: the step time of every recorded case, measured and predicted.

    python bench/time_exam.py

Each case is predicted twice: as trimtab does, and with the operations of the exam's own jobs left out of the
calibration, so that only the menu of `trimtab calibrate` is known. The second is what to expect for a job
that nobody has measured. Takes some minutes the first time.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from machine import machine  # type: ignore[import-not-found] # beside this file

from trimtab.errors import TrimtabError
from trimtab.exams.run import Case, predict_case, read_cases
from trimtab.predict.calibration import read_calibration

PAGE = Path(__file__).parent.parent / "docs" / "time.md"
BEGIN, END = "<!-- exam begins -->\n", "<!-- exam ends -->"


def errors(case: Case) -> tuple[float, float] | None:
    """The error with everything that was measured, and with the menu alone."""
    try:
        whole, menu = predict_case(case), predict_case(case, calibration=read_calibration("h200.json"))
    except TrimtabError as error:
        print(f"{case.id}: {error}")
        return None
    measured = case.measurement.step_s
    if not whole.step_s or not menu.step_s or not measured:
        return None
    return whole.step_s / measured - 1, menu.step_s / measured - 1


def summary(name: str, found: list[float]) -> str:
    """Median and worst of some errors."""
    sizes = [abs(value) for value in found]
    near = sum(size <= 0.2 for size in sizes)  # noqa: PLR2004 - the figure that is asked for
    return f"| {name} | {statistics.median(sizes):.1%} | {max(sizes):.1%} | {near} of {len(sizes)} |"


def main() -> None:
    """Predict every case and write the page."""
    print(machine())
    rows, whole, menu = [], [], []
    for case in read_cases():
        found = errors(case)
        if found is None:
            continue
        print(f"{case.id} {found[0]:+.1%} {found[1]:+.1%}")
        whole.append(found[0])
        menu.append(found[1])
        measured = (case.measurement.step_s or 0.0) * 1e3
        rows.append(f"| {case.id} | {measured:.1f} | {found[0]:+.1%} | {found[1]:+.1%} |")
    table = [
        "| calibration | median error | worst | within 20 % |",
        "|---|--:|--:|--:|",
        summary("menu and jobs, as shipped", whole),
        summary("menu alone", menu),
        "",
        "| case | measured ms | as shipped | menu alone |",
        "|---|--:|--:|--:|",
        *rows,
    ]
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(table) + "\n" + END + after, encoding="utf-8")
    print("\n".join(table[2:4]))


if __name__ == "__main__":
    main()
