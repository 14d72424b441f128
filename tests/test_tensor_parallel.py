"""Tensor parallelism: which ranks share data, how layers are split, and training on real processes."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.spec import Mesh, Setting, Strategy
from trimtab.training import process_group
from trimtab.training.process_group import RankGroups, World, make_groups


def list_groups(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[RankGroups]:
    """Return the groups of every rank; a process group is the list of its ranks."""
    monkeypatch.setattr(process_group.dist, "new_group", lambda ranks: ranks)
    size = setting.gpus
    return [make_groups(setting, World(rank=rank, size=size, address="a", port=9)) for rank in range(size)]


def make_setting(**mesh: int) -> Setting:
    axes = Mesh(**mesh)
    return Setting(strategy=Strategy.FSDP, mesh=axes, micro_batch=1, global_batch=axes.data_parallel)


def test_the_ranks_of_a_layer_are_neighbours_and_see_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = list_groups(make_setting(dp_shard=2, tp=2), monkeypatch)
    assert [group.data_rank for group in groups] == [0, 0, 1, 1]
    assert [group.tensor_rank for group in groups] == [0, 1, 0, 1]
    assert [group.data_group for group in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [group.counts_samples for group in groups] == [True, False, True, False]
    assert [group.reports_loss for group in groups] == [True, False, True, False]


def test_stages_hold_whole_groups_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = list_groups(make_setting(dp_replicate=2, tp=2, pp=2), monkeypatch)
    assert [group.stage for group in groups] == [0] * 4 + [1] * 4
    assert [group.stage_rank(1) for group in groups[:4]] == [4, 5, 6, 7]
    assert {group.buffer_source for group in groups} == {4}


def test_a_mesh_counts_its_tensor_ranks_as_devices_but_not_as_data_parallel() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=3, tp=4)
    assert (mesh.size, mesh.data_parallel) == (24, 6)
