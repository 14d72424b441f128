"""What a trace leaves out of torch's sharding propagation changes nothing where shards are strided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import _sharding_prop as propagation
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from trimtab.trace.worker import look_once_for_strided_shards

NAME = "_propagate_use_strided_shard_flag"


class Schema:
    """Placements of the tensors of an operation; counts how often they are looked at."""

    def __init__(self, *places: Any) -> None:
        self.places, self.looks = places, 0

    @property
    def args_spec(self) -> list[Any]:
        self.looks += 1
        return [SimpleNamespace(placements=(place,)) for place in self.places]


@pytest.mark.skipif(
    not hasattr(propagation, NAME), reason=f"torch {torch.__version__} does not look for them"
)
def test_strided_shards_are_looked_for_once_in_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed: list[tuple[Any, Any]] = []
    monkeypatch.setattr(propagation, NAME, lambda *given: fixed.append(given))
    look_once_for_strided_shards()
    fix = getattr(propagation, NAME)
    plain, strided = Schema(Shard(0), Shard(1)), Schema(Shard(0), _StridedShard(0, split_factor=2))
    for schema in (plain, strided, plain):
        for strategy in range(3):
            fix(strategy, schema)
    assert fixed == [(0, strided), (1, strided), (2, strided)]
    assert (plain.looks, strided.looks) == (2, 1)
