"""Pipelines whose stages are sharded learn what one process learns, also after failures and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from test_ways import (
    STEPS,
    WHOLE,
    Truth,
    adamw,
    among,
    data,
    evaluated_loss,
    loss,
    network,
    piped,
    pipeline,
    resumed,
    suspected,
)
from trimtab.spec import Mesh, Recompute, Schedule, Setting, Strategy
from trimtab.strategies import limits
from worlds import Drill, everywhere

pytestmark = pytest.mark.usefixtures("doubles")

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2},
    "zero bubble": {"schedule": Schedule.ZERO_BUBBLE},
}


def sharded(*, micro: int = 2, dp_shard: int = 2, dp_replicate: int = 1, **others: Any) -> Setting:
    """Return a setting of two stages, each with so many shards and copies of them."""
    share = -(-WHOLE // (dp_shard * dp_replicate))
    return Setting(
        strategy=Strategy.PIPELINE,
        mesh=Mesh(pp=2, dp_shard=dp_shard, dp_replicate=dp_replicate),
        micro_batch=micro,
        accumulation=-(-share // micro),
        global_batch=WHOLE,
        **others,
    )


def four_ranks(folder: str) -> dict[str, Any]:
    """Train two sharded stages by each schedule, with failures; evaluate, and resume on other meshes."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    drills = [("forward", 0, 1), ("backward", 1, 2), ("gradient", 2, 3), ("backward", 3, 0)]
    for name, given in SCHEDULES.items():
        with among(4):
            found[name] = piped(sharded(**given), clip=0.3)
        with among(4):
            found[f"{name} drill"] = piped(sharded(micro=3, **given), drill=Drill(*drills))
    with among(4):
        found["recomputed"] = piped(sharded(micro=1, recompute=Recompute.FULL, **SCHEDULES["interleaved"]))
    with among(4):
        # Every micro-batch scatters its gradients, as on a device with little memory.
        limits.KEEPS_WHOLE, before = 0.0, limits.KEEPS_WHOLE
        found["scattered"] = piped(sharded(micro=1))
        limits.KEEPS_WHOLE = before
    with among(4):
        found["evaluated"] = evaluated_loss(sharded())
    with among(4):
        found["suspects"] = suspected(sharded())
    alone = Setting(micro_batch=5, accumulation=2, global_batch=WHOLE)
    return found | resumed(Path(folder), [alone, sharded(), alone, pipeline(2, 2), sharded(micro=1)])


@pytest.mark.slow
def test_sharded_stages_learn_what_one_process_learns(tmp_path: Path) -> None:
    reports = everywhere(4, four_ranks, str(tmp_path), timeout_s=600)
    batches = [data(step) for step in range(STEPS)]
    plain, clipped = Truth(network(), loss, batches), Truth(network(), loss, batches, 0.3)
    with torch.no_grad():
        right = loss(network().eval(), data(7)).item()
    for rank, found in enumerate(reports):
        for name in SCHEDULES:
            clipped.check(found[name])
            plain.check(found[f"{name} drill"])
            attempts = [outcome.attempts for outcome in found[f"{name} drill"][0]]
            # A zero-bubble schedule sends its gradients after the backward pass.
            assert attempts == ([2, 1, 2, 1] if name == "zero bubble" else [2, 2, 2, 2])
        plain.check(found["recomputed"])
        plain.check(found["scattered"])
        assert found["evaluated"] == pytest.approx(right, rel=1e-12)
        for kind, phase in (("Endless", "forward"), ("Steep", "backward")):
            for number in range(5):
                text = found["suspects"][f"{kind} {number}"]
                assert (text.module, text.phase) == (f"blocks.{number}.drop", phase)
        # One process, two sharded stages, one process, two copied stages: each resumes the one before.
        for number, ranks in enumerate((1, 4, 1, 4, 4)):
            truth = adamw(2 * number + 2)
            for name, value in (found[f"kept {number}"][1] if rank < ranks else {}).items():
                # Ranks give what is not used a gradient of 0, and AdamW then decays it.
                if not name.startswith("unused"):
                    assert (value - truth[name]).abs().max() < 1e-10, name


def eight_ranks() -> Any:
    """Train two stages with two copies of two shards each, and a failure."""
    torch.set_default_dtype(torch.float64)
    limits.KEEPS_WHOLE = 0.0
    with among(8):
        return piped(sharded(micro=1, dp_replicate=2), clip=0.3, drill=Drill(("backward", 1, 5)))


@pytest.mark.slow
def test_copies_of_sharded_stages_learn_what_one_process_learns() -> None:
    truth = Truth(network(), loss, [data(step) for step in range(STEPS)], 0.3)
    for trained in everywhere(8, eight_ranks, timeout_s=300):
        truth.check(trained)
