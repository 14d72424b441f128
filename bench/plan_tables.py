"""Prints the two tables of docs/planning.md as Markdown: presets by hand and rules by hand, beside plans.

    python bench/plan_tables.py presets
    python bench/plan_tables.py strategies

What was written by hand stands in plan_tables.json: a tuning guide's presets for a small language model, and
what a rule of thumb picks for a job with two frozen models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trimtab
from trimtab.errors import TrimtabError
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

HAND = json.loads((Path(__file__).parent / "plan_tables.json").read_text(encoding="utf-8"))


def planned(job: str, on: str, **options: Any) -> tuple[str, str, str]:
    """What a plan picks, what it needs and how fast it is; or why there is none."""
    try:
        plan = trimtab.plan(job, on, **options)
    except TrimtabError as error:
        return f"nothing fits: {error.found}", "-", "-"
    one, found = plan.choice, plan.estimate
    how = f"{one.strategy}, {one.micro_batch} x {one.accumulation}, {one.precision}"
    how += "" if one.recompute.value == "none" else f", recompute {one.recompute}"
    how += ", compiled" if one.compile else ""
    rate = "-" if found.samples_per_s is None else f"{found.samples_per_s:.3g}"
    return how, format_bytes(found.process_bytes), rate


def presets() -> Iterator[str]:
    """The small language model on every GPU of the guide."""
    yield from (
        "| GPU | by hand: amp, length, batch | batch for good MFU | plan | memory | samples/s |",
        "|---|---|---|---|--:|--:|",
    )
    for row in HAND["presets"]:
        by_hand = "-" if row["amp"] is None else f"{row['amp']}, {row['max_length']}, {row['batch']}"
        how, memory, rate = planned("slm", row["on"])
        yield f"| {row['gpu']} | {by_hand} | {row['mfu_batch'] or '-'} | {how} | {memory} | {rate} |"


def strategies() -> Iterator[str]:
    """Two frozen models on one to four GPUs: the rule's choice and the plan's, both estimated."""
    yield from (
        "| GPUs | the rule | batch (effective) | estimated | plan | memory | samples/s |",
        "|---|---|--:|---|---|--:|--:|",
    )
    for row in HAND["strategies"]:
        on = f"{row['gpus']}x{row['on']}"
        how, memory, rate = planned("bridge", on, pins={"gpus": row["gpus"]})
        said = f"{row['batch']} ({row['effective']})"
        yield f"| {on} | {row['rule']} | {said} | {ruled(row, on)} | {how} | {memory} | {rate} |"


def ruled(row: dict[str, Any], on: str) -> str:
    """What the rule's choice would need."""
    if row["batch"] < 1:
        return "cannot be: the batch is negative"
    ranks = row["gpus"] if row["strategy"] == "ddp" else max(1, row["gpus"] // 2)
    micro = max(1, row["batch"] // ranks)
    try:
        found = trimtab.estimate("bridge", on, micro_batch=micro, strategy=row["strategy"])
    except TrimtabError as error:
        return error.found
    return f"{format_bytes(found.process_bytes)}, {'fits' if found.fits else 'does not fit'}"


def main() -> None:
    """Print the table that was asked for."""
    tables = {"presets": presets, "strategies": strategies}
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted not in tables:
        sys.exit(f"usage: python bench/plan_tables.py {' | '.join(tables)}")
    for line in tables[wanted]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
