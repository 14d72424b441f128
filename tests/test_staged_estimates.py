"""An estimate of a pipeline with sharded stages: what a rank holds, what is sent, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import trimtab
from trimtab.errors import WrongUse

WAYS = {"copies": "ddp", "shards": "fsdp"}


@pytest.mark.slow
def test_shards_of_a_stage_take_their_share_of_its_memory_and_communication() -> None:
    copies, shards = (
        trimtab.estimate("slm:tiny", "4xH100", pp=2, strategy=way, micro_batch=4) for way in WAYS.values()
    )
    # The fullest stage is another one: the last has the head, the first positions beside the embedding.
    assert copies.fullest_rank == "stage 2 of 2"
    assert shards.fullest_rank == "stage 1 of 2"
    assert shards.parts.weights == pytest.approx(copies.parts.weights / 2, rel=0.1)
    assert shards.parts.optimizer == pytest.approx(copies.parts.optimizer / 2, rel=0.1)
    # Copies in bf16 of whole weights count as activations.
    assert 0.5 * copies.parts.activations < shards.parts.activations < 1.1 * copies.parts.activations
    assert copies.pipeline is not None
    assert shards.pipeline is not None
    assert shards.pipeline.layers == copies.pipeline.layers == (1, 1)
    assert copies.step_time is not None
    assert shards.step_time is not None
    # Every pass gathers the weights of its blocks, and waits for the first of them.
    assert shards.step_time.communication_s > copies.step_time.communication_s


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"pp": 3}, "do not divide by 3"),
        ({"pp": 0}, "below 1"),
        ({"pp": 2, "tp": 4}, "do not divide by 4"),
        ({"pp": 2, "cp": 3}, "do not divide by 3"),
        ({"pp": 2, "ep": 3}, "which 3 does not divide"),
        ({"pp": 2, "strategy": "hybrid"}, "shards or copies"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_anything_is_traced(
    given: dict[str, Any], found: str
) -> None:
    with pytest.raises(WrongUse, match=found):
        trimtab.estimate("slm:tiny", "4xH100", **given)
