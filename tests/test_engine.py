"""The step program that tracer and trainer share: blocks, entries, sharding unit by unit, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.engine.build import EntryPoints, find_entries, find_repeated_blocks, find_shard_units
from trimtab.engine.fsdp import choose_shard_placement, make_device_mesh, move_module
from trimtab.engine.gradients import LocalGradients
from trimtab.engine.step import prepare_job, run_step
from trimtab.predict.derive import add_buckets, bucket_sizes
from trimtab.predict.memory import estimate_memory
from trimtab.predict.step_time import gradient_bytes
from trimtab.spec import Mesh, Precision, Setting, Strategy
from trimtab.spec.trace import ZERO_GRADIENTS
from trimtab.trace.tracer import trace_settings
from worlds import together, world_of

MIB = 2**20
JOB = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


class Tied(nn.Module):
    def __init__(self, width=512, words=4096, depth=12):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    name, global_batch, samples, epochs = "tied", 64, 1000, 1

    def model(self):
        return Tied()

    def batch(self, size):
        return torch.randint(0, 4096, (size, 64))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Deep(Job):
    def model(self):
        return Tied(depth=48)


class Nested(Job):
    '''Lists of lists, as diffusion models have them: the inner lists hold modules of several classes.'''

    def model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.downs = nn.ModuleList(
                    nn.ModuleList([Block(256), Block(256), nn.Sequential(nn.Linear(256, 256), nn.Tanh())])
                    for _ in range(3)
                )

            def forward(self, x):
                for first, second, third in self.downs:
                    x = third(second(first(x)))
                return x

        return Net()

    def batch(self, size):
        return torch.randn(size, 256)

    def loss(self, model, batch):
        return model(batch).square().mean()


class ByMethod(Nested):
    '''loss() never calls the model itself.'''

    def model(self):
        net = super().model()
        kind = type(net)

        class Whole(kind):
            def encode(self, x):
                return kind.forward(self, x)

            def forward(self, x):
                raise NotImplementedError

        whole = Whole()
        return whole

    def loss(self, model, batch):
        return model.encode(batch).square().mean()


class Penalty(Nested):
    def loss(self, model, batch):
        batch = batch.requires_grad_()
        loss = model(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + slope.square().mean()


class ByInnerParts(Nested):
    def loss(self, model, batch):
        for first, second, third in model.downs:
            batch = third(second(first(batch)))
        return batch.square().mean()


class ByParts(Job):
    def loss(self, model, batch):
        x = model.table(batch)
        for block in model.blocks:
            x = block(x)
        return nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch.flatten())
"""


@pytest.fixture
def job() -> str:
    return shared_job(JOB).rpartition(":")[0]


def loaded(file: str, name: str) -> Any:
    return trimtab.load(f"{file}:{name}")


def test_lists_of_lists_are_no_blocks_and_their_modules_are_units(job: str) -> None:
    model = loaded(job, "Nested").model()
    assert find_repeated_blocks(model) == []
    units = find_shard_units(model)
    assert len(units) == 9
    assert not any(isinstance(unit, nn.ModuleList) for unit in units)


def test_inner_lists_of_one_class_are_the_repeated_blocks() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = nn.ModuleList([nn.ModuleList([block(), block()]), nn.ModuleList([block(), block()])])
    assert [name for name, _ in find_repeated_blocks(model)] == ["0", "1"]
    assert len(find_shard_units(model)) == 4


def test_a_loss_that_calls_methods_or_parts_of_a_model_says_so(job: str) -> None:
    plain, method, parts = (loaded(job, name) for name in ("Job", "ByMethod", "ByParts"))
    assert find_entries(plain, plain.model()) == EntryPoints()
    assert find_entries(method, method.model()).methods == ("encode",)
    assert find_entries(parts, parts.model()).children == ("head", "table")


def test_a_tensor_with_two_names_stays_one_tensor_when_it_is_placed(job: str) -> None:
    model = loaded(job, "Job").model()
    with torch.device("meta"):
        empty = loaded(job, "Job").model()
    filled: list[torch.Tensor] = []
    move_module(empty, "cpu", {}, lambda _, moved: filled.append(moved))
    assert empty.head.weight is empty.table.weight
    assert not any(parameter.is_meta for parameter in empty.parameters())
    assert len(filled) == len(list(model.parameters()))


def test_a_step_is_the_same_over_one_micro_batch_or_several(job: str) -> None:
    mine = loaded(job, "Nested")
    torch.manual_seed(0)
    batch = torch.randn(8, 256)
    ends = []
    for count in (1, 4):
        torch.manual_seed(1)
        setting = Setting(
            micro_batch=8 // count, global_batch=8, accumulation=count, precision=Precision.FP32
        )
        state = prepare_job(mine, setting, "cpu")
        assert isinstance(state.phases[0].gradients, LocalGradients)
        run_step(state, batch.chunk(count), clip=1.0)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in state.parameters]))
    assert torch.allclose(ends[0], ends[1], atol=1e-6)


@pytest.mark.slow
def test_sharding_never_puts_the_whole_model_on_a_device(job: str) -> None:
    few, many = (
        trimtab.estimate(f"{job}:{name}", "64xH100", precision="fp32", micro_batch=1, strategy="fsdp")
        for name in ("Job", "Deep")
    )
    # 36 blocks more, of 1024 x 512 x 2 weights each, come to the device one at a time.
    assert many.reserved_bytes - few.reserved_bytes < 0.5 * 36 * 4 * 2**20


@pytest.mark.parametrize("name", ["Nested", "ByMethod", "ByParts"])
@pytest.mark.slow
def test_models_that_are_entered_elsewhere_are_sharded_too(job: str, name: str) -> None:
    found = trimtab.estimate(f"{job}:{name}", "4xH100", precision="bf16", micro_batch=2, strategy="fsdp")
    alone = trimtab.estimate(f"{job}:{name}", "H100", precision="bf16", micro_batch=2)
    assert found.parts.optimizer == pytest.approx(alone.parts.optimizer / 4, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((8, 28672, 4096), 64, 1),
        ((8, 100, 4096), 64, 2),
        ((8, 28672, 4096), 8, None),
        ((100, 4096), 64, None),
        ((8, 100), 64, None),
        ((8,), 64, None),
    ],
)
def test_a_parameter_is_sharded_along_a_dimension_that_reaches_all_ranks(
    shape: tuple[int, ...], shards: int, dim: int | None
) -> None:
    found = choose_shard_placement(torch.Size(shape), shards)
    assert (None if found is None else found.dim) == dim


class Stacked(nn.Module):
    """Weights of a few experts, stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(1, 16, 8))
        self.down = nn.Parameter(torch.randn(1, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(x @ self.up[0].t()) @ self.down[0].t()


class StackedJob(trimtab.Job):
    name = "stacked"
    global_batch = 4

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Stacked().double() for _ in range(4)))

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(batch)
        return output.square().mean()


def train_stacked(rank: int, size: int, store: str) -> tuple[list[torch.Tensor], list[int]]:
    """The weights after two steps, whole, and the sizes of this rank's shards."""
    mine = StackedJob()
    setting = Setting(
        micro_batch=4 // size, global_batch=4, precision=Precision.FP32,
        strategy=Strategy.FSDP if size > 1 else Strategy.SINGLE, mesh=Mesh(dp_shard=size),
    )  # fmt: skip
    with world_of(size, rank, Path(store)):
        state = prepare_job(mine, setting, "cpu")
        for _ in range(2):
            run_step(state, [mine.batch(4).chunk(size)[rank]], clip=None)
        shards = [getattr(parameter, "_local_tensor", parameter).numel() for parameter in state.parameters]
        whole = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in state.parameters
        ]
        return [one.detach().clone() for one in whole], shards


def test_stacked_experts_learn_the_same_over_two_ranks_as_on_one(tmp_path: Path) -> None:
    (alone, sizes), *_ = together(1, train_stacked, str(tmp_path / "one"), folder=tmp_path / "a")
    for weights, shards in together(2, train_stacked, str(tmp_path / "two"), folder=tmp_path / "b"):
        assert shards == [size // 2 for size in sizes]
        for mine, other in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


class NormedJob(StackedJob):
    name = "normed"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*blocks)

    def batch(self, size: int) -> torch.Tensor:
        return super().batch(size).float()


def train_normed(rank: int, size: int, store: str) -> dict[str, torch.Tensor]:
    """The state of the model after two steps in bf16."""
    mine = NormedJob()
    setting = Setting(
        micro_batch=2, global_batch=4, precision=Precision.BF16,
        strategy=Strategy.FSDP, mesh=Mesh(dp_shard=size),
    )  # fmt: skip
    with world_of(size, rank, Path(store)):
        state = prepare_job(mine, setting, "cpu")
        for _ in range(2):
            run_step(state, [mine.batch(4).chunk(size)[rank]], clip=None)
        held = state.model.state_dict().items()
        return {name: getattr(one, "full_tensor", lambda one=one: one)().clone() for name, one in held}


def test_batch_norm_trains_under_fsdp_in_half_precision(tmp_path: Path) -> None:
    before = NormedJob().model().state_dict()
    for found in together(2, train_normed, str(tmp_path / "store"), folder=tmp_path / "world"):
        assert list(found) == list(before)
        for name, value in found.items():
            assert value.dtype is before[name].dtype
            assert bool(value.isfinite().all())
            assert not torch.equal(value, before[name])


def test_replicas_derived_from_one_device_hold_what_traced_replicas_hold(job: str) -> None:
    cluster = parse_cluster("2xH100")
    single = Setting(micro_batch=4, global_batch=4, precision=Precision.BF16)
    double = single.replace(strategy=Strategy.DDP, mesh=Mesh(dp_replicate=2), global_batch=8)
    one, two = trace_settings(f"{job}:Job", [single, double], cluster.devices[0])
    assert not isinstance(one, Exception)
    assert not isinstance(two, Exception)
    derived, traced = estimate_memory(add_buckets(one, gradient_bytes(one, double))), estimate_memory(two)
    assert derived.allocated_bytes == pytest.approx(traced.allocated_bytes, rel=0.001)
    assert derived.reserved_bytes == pytest.approx(traced.reserved_bytes, rel=0.02)
    assert derived.parts.gradients == pytest.approx(traced.parts.gradients, rel=0.001)
    for trace in (add_buckets(one, gradient_bytes(one, double)), two):
        # A further micro-batch adds to the buckets, which are set to zero before the first one alone.
        zeroed = [trace.works[place].op == ZERO_GRADIENTS for place in trace.sequence]
        assert zeroed.index(True) < trace.phases["forward"] == sum(zeroed)
    # The gradients are there once: what a device alone holds at its peak, and at most the buckets more.
    assert traced.allocated_bytes < estimate_memory(one).allocated_bytes + gradient_bytes(one, double)


def test_buckets_are_closed_by_the_gradient_that_fills_them() -> None:
    assert bucket_sizes([30 * MIB, MIB, MIB], 32 * MIB) == [30 * MIB, 2 * MIB]
    assert bucket_sizes([], 5 * MIB) == [5 * MIB]


@pytest.mark.slow
def test_no_gain_is_promised_where_nothing_is_compiled_or_the_compiler_fails(job: str) -> None:
    def why(name: str) -> str:
        setting = Setting(micro_batch=2, global_batch=2, precision=Precision.BF16)
        (found,) = trace_settings(f"{job}:{name}", [setting], parse_cluster("H100").devices[0])
        assert not isinstance(found, Exception)
        return found.no_compile_gain

    assert [why(name) for name in ("Nested", "ByMethod", "ByParts")] == ["", "", ""]
    assert "differentiates a gradient" in why("Penalty")
    assert "nothing is compiled" in why("ByInnerParts")


def test_products_with_vectors_take_the_workspace_of_cublas_too(tmp_path: Path) -> None:
    text = JOB + (
        "\n\nclass Vectors(Nested):\n"
        "    def loss(self, model, batch):\n"
        "        x = model(batch)\n"
        "        return torch.dot(x.flatten(), x.flatten()) / x.numel()\n"
        "\n    def model(self):\n"
        "        class Net(nn.Module):\n"
        "            def __init__(self):\n"
        "                super().__init__()\n"
        "                self.scale = nn.Parameter(torch.ones(256))\n\n"
        "            def forward(self, x):\n"
        "                return x * self.scale\n\n"
        "        return Net()\n"
    )
    file = tmp_path / "vectors.py"
    file.write_text(text, encoding="utf-8")
    found = trimtab.estimate(f"{file}:Vectors", "H100", precision="fp32", micro_batch=2)
    assert found.parts.workspace == 32 * MIB


def test_a_check_of_the_order_of_two_tensors_is_taken_to_hold(tmp_path: Path) -> None:
    text = JOB + (
        "\n\nclass Checked(Nested):\n"
        "    def loss(self, model, batch):\n"
        "        x = model(batch)\n"
        "        if not (x.abs() >= x).all():\n"
        "            raise ValueError('not ordered')\n"
        "        return x.square().mean()\n"
    )
    file = tmp_path / "checked.py"
    file.write_text(text, encoding="utf-8")
    found = trimtab.estimate(f"{file}:Checked", "H100", precision="fp32", micro_batch=2)
    assert any("taken to hold" in assumption for assumption in found.assumptions)


def test_a_mesh_is_made_for_the_kind_of_a_device_that_has_an_index(tmp_path: Path) -> None:
    # torch refuses cuda:0 for a mesh; ranks on GPUs have such names.
    setting = Setting(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=1), micro_batch=1, global_batch=1)
    with world_of(1, 0, tmp_path / "store"):
        mesh, _, _ = make_device_mesh(setting, "cpu:0")
        assert mesh.device_type == "cpu"
