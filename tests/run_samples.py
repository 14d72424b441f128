"""Plans and run folders to look at: written here, in the form that planning and training write them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from trimtab.spec import (
    Band,
    Candidate,
    Comparison,
    Estimate,
    EstimatedSetting,
    Footprint,
    Incident,
    IncidentKind,
    Mesh,
    MfuReference,
    Plan,
    Policy,
    RankPlacement,
    Reason,
    Rejection,
    Setting,
    StepTime,
    Strategy,
    WhatIf,
    Workload,
)
from trimtab.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

STARTED_S = 1_700_000_000.0


def setting(gpus: int = 1, micro: int = 8, rounds: int = 4) -> Setting:
    return Setting(
        strategy=Strategy.DDP if gpus > 1 else Strategy.SINGLE,
        mesh=Mesh(dp_replicate=gpus),
        micro_batch=micro,
        accumulation=rounds,
        global_batch=gpus * micro * rounds,
    )


def estimate(gib: float = 20.0, step_s: float = 0.5, samples: int = 32) -> Estimate:
    reserved = round((gib - 1) * GIB)
    parts = Footprint(
        weights=reserved // 8,
        optimizer=reserved // 4,
        gradients=reserved // 8,
        activations=reserved // 3,
        context=GIB,
    )
    return Estimate(
        allocated_bytes=parts.total - GIB,
        reserved_bytes=reserved,
        process_bytes=reserved + GIB,
        capacity_bytes=40 * GIB,
        fits=gib < 40,
        parts=parts,
        band=Band(low_bytes=reserved, high_bytes=round(1.05 * (reserved + GIB))),
        step_s=step_s,
        step_time=StepTime(compute_s=step_s * 0.7, memory_s=step_s * 0.2, launch_s=step_s * 0.1),
        samples_per_s=samples / step_s,
        mfu=0.4,
        mfu_rating="good",
        mfu_reference=MfuReference(low=0.36, high=0.46, model="transformer", figures="published runs"),
        hours=10_000 * step_s / 3600,
        gpu_hours=10_000 * step_s / 3600,
        assumptions=("nothing was measured",),
    )


def plan(job: str = "job.py:Job", *, words: str = "Use 1 GPU of 4.") -> Plan:
    """With every part that a plan can have."""
    choice, found = setting(), estimate()
    others = [
        (setting(1, micro, 32 // micro), estimate(4 + 4 * micro, 0.9 - micro / 40)) for micro in (1, 2, 4)
    ]
    large = setting(1, 16, 2)
    return Plan(
        job=job,
        choice=choice,
        estimate=found,
        policy=Policy(deadline_s=7200.0),
        reasons=(Reason(subject="micro_batch", value="8", why=words),),
        runners_up=tuple(Candidate(setting=one, estimate=two, why=words) for one, two in others),
        looked_at=(
            EstimatedSetting(
                setting=choice, process_bytes=20 * GIB, high_bytes=21 * GIB, samples_per_s=64.0, fits=True
            ),
            EstimatedSetting(
                setting=large, process_bytes=50 * GIB, high_bytes=52 * GIB, samples_per_s=70.0, fits=False
            ),
        ),
        rejected=(Rejection(why=words, count=12),),
        comparison=(
            Comparison(gpus=1, setting=choice, estimate=found, meets_deadline=True, scaling_efficiency=1.0),
            Comparison(
                gpus=2,
                setting=setting(2, 8, 2),
                estimate=estimate(20.0, 0.3),
                meets_deadline=False,
                scaling_efficiency=0.83,
            ),
            Comparison(gpus=4, why=words),
        ),
        what_if=(WhatIf(change=words, gpus=1, setting=choice, estimate=found, meets_deadline=True),),
        places=(RankPlacement(node=0, node_name="here", device=0, name="A100 40GB"),),
        workload=Workload(name=job, global_batch=32, samples=320_000),
        left_out=(words,),
        recommendation=words,
    )


def line(step: int, *, gpu: bool = True, **changes: object) -> dict[str, object]:
    """A line of log.jsonl."""
    time_s = 0.52 + 0.02 * math.sin(step)
    return {
        "step": step,
        "epoch": 0,
        "loss": 2 + 8 * math.exp(-step / 150) + 0.1 * math.sin(step * 1.7),
        "time_s": time_s,
        "samples": 32,
        "samples_per_s": 32 / time_s,
        "tokens_per_s": None,
        "mfu": 0.39 if gpu else None,
        "allocated_bytes": round(16.5 * GIB) if gpu else None,
        "reserved_bytes": round(18.8 * GIB) if gpu else None,
        "data_wait_s": 0.002,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "micro_batch": 8,
        "gpus": 1,
        "attempts": 1,
        "skipped": None,
        "validation_loss": 2.5 if step % 200 == 0 else None,
        **changes,
    }


def incident(step: int = 70, *, why: str = "1.5 GiB too much", done: str = "split it") -> Incident:
    return Incident(
        kind=IncidentKind.OUT_OF_MEMORY, at_s=STARTED_S + step, step=step, rank=0, why=why, done=done
    )


def run(
    root: Path,
    *,
    steps: int = 300,
    of: Plan | None = None,
    events: tuple[Incident, ...] | None = None,
    state: str = "ended",
) -> Path:
    """A run's folder."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "plan.json").write_text((of or plan()).to_json(indent=2), encoding="utf-8")
    (root / "log.jsonl").write_text(
        "".join(f"{json.dumps(line(step))}\n" for step in range(1, steps + 1)), encoding="utf-8"
    )
    told = (incident(), incident(180)) if events is None else events
    (root / "events.jsonl").write_text("".join(f"{one.to_json()}\n" for one in told), encoding="utf-8")
    attempt = {"attempt": 1, "procs": 1, "state": state, "at_s": STARTED_S}
    (root / "attempt.json").write_text(json.dumps(attempt), encoding="utf-8")
    identity = {"job": "job.py:Job", "options": {}, "global_batch": 32, "seed": 0}
    (root / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    return root
