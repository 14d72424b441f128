"""Writes the table of docs/memory.md: every recorded case, measured and predicted.

    python bench/memory_exam.py

Replaces what stands between the two marks in the page; takes some minutes the first time.
"""

from __future__ import annotations

from pathlib import Path

from machine import machine  # type: ignore[import-not-found] # beside this file

from trimtab.exams.run import CaseResult, ExamResult, read_cases, run_exam, summarize_results
from trimtab.units import GIB

FIGURES = ("allocated_bytes", "reserved_bytes", "process_bytes")
PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- exam begins -->\n", "<!-- exam ends -->"


def row(answer: CaseResult) -> str:
    """One case as a line of the table."""
    cells = [f"{answer.measured[name] / GIB:.2f} | {answer.error[name]:+.2%}" for name in FIGURES]
    return f"| {answer.case} | {' | '.join(cells)} |"


def table(title: str, marks: ExamResult) -> str:
    """The summary and the table."""
    head = [
        f"### {title}",
        "",
        "| | median error | worst | largest underestimate |",
        "|---|--:|--:|--:|",
        *(
            f"| {name.removesuffix('_bytes')} | {marks.median[name]:.2%} | {marks.worst[name]:.2%} | "
            f"{min(0.0, marks.lowest[name]):.2%} |"
            for name in FIGURES
        ),
        "",
        "| case | allocated GiB | error | reserved GiB | error | process GiB | error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*head, *map(row, marks.cases)]) + "\n\n"


def tables(marks: ExamResult) -> str:
    """Eager runs and compiled ones."""
    compiled = {case.id for case in read_cases() if case.measurement.setting.compile}
    apart = [
        tuple(case for case in marks.cases if (case.case in compiled) is wanted) for wanted in (False, True)
    ]
    return "".join(
        table(f"{len(some)} {kind} runs", summarize_results(some))
        for kind, some in zip(("eager", "compiled"), apart, strict=True)
    ).removesuffix("\n")


def main() -> None:
    """Sit the exam and write the page."""
    print(machine())
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + tables(run_exam()) + END + after, encoding="utf-8")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
