"""Tensor parallelism: which ranks share data, how layers are split, and training on real processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import trimtab
from shared_jobs import shared_job
from tensor_jobs import JOBS, make_setting, train_alone, train_together
from trimtab.engine.step import make_meta_loss
from trimtab.engine.tensor_plan import find_tensor_plan
from trimtab.engine.tensor_rules import refuse_tensor_split
from trimtab.errors import TrimtabError, WrongUse
from trimtab.spec import Mesh, Precision, Setting, Strategy
from trimtab.strategies import STRATEGIES
from trimtab.training.process_group import RankGroups, World, make_groups
from worlds import everywhere

pytestmark = pytest.mark.usefixtures("doubles")


def list_groups(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[RankGroups]:
    """Return the groups of every rank; a process group is the list of its ranks."""
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks: ranks)
    size = setting.gpus
    return [make_groups(setting, World(rank=rank, size=size, address="a", port=9)) for rank in range(size)]


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


RUNS_OF_TWO = [
    ("plain", {}, {"tp": 2}, None),
    ("plain", {"tied": True}, {"tp": 2, "micro_batch": 2}, 0.5),
    ("llama", {"heads": 8}, {"tp": 2}, 0.5),
    ("chain", {}, {"tp": 2}, None),
]
RUNS_OF_FOUR = [
    ("plain", {}, {"tp": 4}, 0.5),
    ("llama", {"tied": True}, {"tp": 4}, None),
    ("plain", {}, {"tp": 2, "dp_shard": 2}, 0.5),
    ("llama", {"heads": 8}, {"tp": 2, "dp_shard": 2}, None),
    ("plain", {}, {"tp": 2, "dp_replicate": 2}, 0.5),
    ("chain", {}, {"tp": 2, "dp_shard": 2}, 0.5),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs", [RUNS_OF_TWO, pytest.param(RUNS_OF_FOUR, marks=pytest.mark.slow)], ids=["2", "4"]
)
def test_ranks_that_split_layers_learn_what_one_process_learns(runs: list[Any]) -> None:
    size = make_setting(**runs[0][2]).gpus
    for rank in everywhere(size, train_together, runs):
        for (name, options, mesh, clip), got in zip(runs, rank, strict=True):
            alone = train_alone(JOBS[name](**options), clip)
            where = f"{name} {options} {mesh}"
            assert got["losses"] == pytest.approx(alone["losses"], abs=1e-10), where
            assert got["norms"] == pytest.approx(alone["norms"], abs=1e-10), where
            kinds = ["weights"] if clip else ["weights", "gradients"]
            for kind in kinds:
                torch.testing.assert_close(got[kind], alone[kind], atol=1e-10, rtol=0, msg=where)


def find_roles(job: Any, tp: int = 2, samples: int = 2) -> dict[str, str]:
    setting = Setting(micro_batch=samples, global_batch=samples)
    return dict(find_tensor_plan(job.model(), tp, make_meta_loss(job, setting)).roles)


def test_a_plan_is_derived_from_the_data_that_layers_read() -> None:
    roles = find_roles(JOBS["plain"]())
    block = {name.removeprefix("blocks.1."): role for name, role in roles.items() if "blocks.1." in name}
    assert {name for name, role in block.items() if role == "row"} == {"attention.out", "down"}
    assert {name for name, role in block.items() if role == "column"} == {
        "attention.query",
        "attention.key",
        "attention.value",
        "gate",
        "up",
    }
    others = {name: role for name, role in roles.items() if not name.startswith("blocks.")}
    assert others == {"words": "embedding", "places": "replicated", "head": "head"}


def test_a_chain_of_layers_is_split_in_pairs() -> None:
    assert list(find_roles(JOBS["chain"]()).values()) == ["column", "row", "column", "row"]


def test_a_model_of_transformers_has_its_own_plan() -> None:
    roles = find_roles(JOBS["llama"]())
    plain = {name.split(".")[-1]: role for name, role in roles.items() if role != "column"}
    assert plain == {"embed_tokens": "embedding", "o_proj": "row", "down_proj": "row", "lm_head": "head"}


def test_a_vocabulary_that_does_not_divide_is_whole_on_every_rank() -> None:
    job = JOBS["plain"](words=33, tied=True)
    plan = find_tensor_plan(job.model(), 2, make_meta_loss(job, Setting(micro_batch=2, global_batch=2)))
    assert {plan.roles["words"], plan.roles["head"]} == {"replicated"}
    assert plan.notes == [
        f"tp: {name} is whole on every rank: 33 entries do not divide by 2" for name in ("words", "head")
    ]


class Fused(nn.Module):
    """Query, key and value of one layer, and a loss that is no cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def test_a_layer_that_computes_several_things_is_gathered() -> None:
    model = Fused()
    plan = find_tensor_plan(model, 2, lambda model: model(torch.empty(2, 4, 8, device="meta")).sum())
    assert plan.roles == {"all": "gathered", "out": "row"}


class Apart(nn.Module):
    """A norm over all outputs of a layer: a rank would need all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.norm(self.up(x)))


@pytest.mark.parametrize(
    ("job", "tp", "found"),
    [
        (JOBS["llama"](heads=2), 4, "2 attention heads, which do not divide by 4"),
        (JOBS["llama"](heads=8), 8, "4 key and value heads, which do not divide by 8"),
        (JOBS["plain"](heads=2), 4, "attention.query has 2 heads, which do not divide by 4"),
        (JOBS["chain"](), 3, "outputs, which do not divide by 3"),
    ],
    ids=["heads", "key heads", "derived heads", "widths"],
)
def test_what_does_not_divide_is_refused(job: Any, tp: int, found: str) -> None:
    with pytest.raises(WrongUse, match=found):
        find_roles(job, tp)


class Turned(nn.Module):
    """Two layers as GPT-2 in transformers has them: no nn.Linear, and inputs first."""

    def __init__(self) -> None:
        super().__init__()
        make: Any = Conv1D
        self.layers = nn.ModuleList([make(8, 8), make(8, 8)])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_are_no_linear_ones_are_named() -> None:
    with pytest.raises(WrongUse, match="layers only, and the model has 2 Conv1D layers"):
        find_tensor_plan(Turned(), 2, lambda model: model(torch.empty(2, 8, device="meta")).sum())


def test_a_model_without_pairs_of_layers_is_refused() -> None:
    with pytest.raises(WrongUse, match="no layer can be split"):
        find_tensor_plan(Apart(), 2, lambda model: model(torch.empty(2, 8, device="meta")).sum())
    with pytest.raises(WrongUse, match="there is no job whose loss"):
        find_tensor_plan(Apart(), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": Strategy.DDP, "mesh": Mesh(tp=2)},
        {"loss": "chunked"},
        {"offload": ("activations",)},
        {"precision": Precision.MXFP8},
        {"compile": True},
        {"sync_batchnorm": True},
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_it_are_refused(changes: dict[str, Any]) -> None:
    plain = {"strategy": "fsdp", "mesh": {"tp": 2}, "micro_batch": 1, "global_batch": 1}
    setting = Setting.from_builtins(plain | msgspec.to_builtins(changes))
    with pytest.raises(WrongUse, match="tp 2"):
        refuse_tensor_split(setting)


JOB = """
    import torch
    from torch import nn
    import trimtab

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(1024, 256)
            self.blocks = nn.ModuleList([Block(256) for _ in range(3)])
            self.head = nn.Linear(256, 1024)

        def forward(self, ids):
            x = self.words(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Job(trimtab.Job):
        additive = True

        def model(self):
            return Model()

        def batch(self, n):
            return torch.randint(0, 1024, (n, 128))

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

        def optimizer(self, parameters):
            return torch.optim.AdamW(parameters)
"""


@pytest.mark.slow
def test_an_estimate_has_the_memory_and_the_traffic_of_one_part_of_every_layer() -> None:
    job = shared_job(JOB)
    whole, split = (trimtab.estimate(job, "4xH100", strategy="fsdp", tp=tp, micro_batch=4) for tp in (1, 4))
    # One copy of the model either way; activations of a fourth of each layer, for the same samples.
    assert split.parts.activations < 0.5 * whole.parts.activations
    assert split.parts.weights == pytest.approx(whole.parts.weights, rel=0.1)
    layers = "derived from the model's layers: 3 column, 3 row, 1 embedding, 1 head"
    assert f"tp: 4 ranks split layers ({layers})" in split.assumptions


def test_an_estimate_refuses_what_cannot_be_split() -> None:
    job = shared_job(JOB)
    with pytest.raises(WrongUse, match="8 GPUs, which do not divide by 3"):
        trimtab.estimate(job, "8xH100", tp=3)
    with pytest.raises(WrongUse, match="only the ranks of fsdp or hsdp split layers"):
        trimtab.estimate(job, "8xH100", tp=2, strategy="ddp")
    with pytest.raises(TrimtabError, match="which do not divide by 6"):
        trimtab.estimate(job, "6xH100", tp=6)


@pytest.mark.parametrize(
    ("strategy", "ranks", "got"),
    [
        ("fsdp", 8, ("fsdp", Mesh(dp_shard=4, tp=2))),
        ("fsdp", 2, ("fsdp", Mesh(tp=2))),
        ("fsdp", 3, ("fsdp", Mesh(dp_shard=3))),
        ("hsdp", 6, ("fsdp", Mesh(dp_shard=3, tp=2))),
        ("fsdp", 1, ("single", Mesh())),
    ],
)
def test_another_number_of_ranks_keeps_the_split_where_it_divides(
    strategy: str, ranks: int, got: tuple[str, Mesh]
) -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=2, tp=2)
    assert STRATEGIES[Strategy(strategy)].resized(mesh, ranks) == got
