"""Experts on different ranks: the same training as on one device, its memory, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import expert_jobs
import trimtab
from trimtab.engine.expert_parallel import check_experts, find_experts
from trimtab.engine.expert_rules import refuse_expert_split
from trimtab.errors import WrongUse
from trimtab.spec import (
    BaseFormat,
    IncidentKind,
    Mesh,
    Offload,
    Precision,
    Recompute,
    Setting,
    Strategy,
    Work,
)
from trimtab.strategies import STRATEGIES
from trimtab.strategies.base import Traffic
from trimtab.training.run import Run
from worlds import Drill, everywhere, free_port, measure_gap

STEPS, BATCH = 3, 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def make_setting(strategy: Strategy, **more: Any) -> Setting:
    axes = {name: more.pop(name) for name in ("dp_replicate", "dp_shard", "ep", "cp") if name in more}
    mesh = Mesh(**axes)
    share = BATCH // mesh.data_parallel
    micro = min(more.pop("micro_batch", share), share)
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=-(-share // micro),
        global_batch=BATCH,
        **more,
    )


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def train_steps(
    setting: Setting, name: str, dtype: torch.dtype = torch.float64, faults: Any = None
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Return the losses, the weights after some steps, and the incidents."""
    torch.set_default_dtype(dtype)
    job = getattr(expert_jobs, name)()
    seen: list[Any] = []
    with Run(setting, job=job, faults=faults, listen=seen.append, join_s=60) as run:
        torch.manual_seed(0)
        run.prepare(job.model().to(dtype), make_optimizer, clip=0.5)
        loader = run.loader(job.dataset()[: STEPS * BATCH], seed=5)
        losses = [run.step(window).loss for window in loader]
        weights = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in run.model.parameters()
        ]
        return losses, [weight.detach().clone() for weight in weights], seen


def train_all(cases: list[tuple[Setting, str, torch.dtype]], port: int) -> list[Any]:
    """Train every case, one after the other."""
    found = []
    for number, case in enumerate(cases):
        os.environ["MASTER_PORT"] = str(port + number)
        found.append(train_steps(*case)[:2])
    return found


JOBS = (("Named", torch.float64), ("Mixtral", torch.float64), ("Grouped", torch.float32))
SETTINGS = [
    make_setting(Strategy.FSDP, dp_shard=2, ep=2, micro_batch=1),
    make_setting(Strategy.FSDP, dp_shard=2, ep=2, recompute=Recompute.FULL),
    make_setting(Strategy.FSDP, dp_shard=4, ep=2),
    make_setting(Strategy.FSDP, dp_shard=4, ep=4, micro_batch=1),
    make_setting(Strategy.HSDP, dp_replicate=2, dp_shard=2, ep=2, recompute=Recompute.SELECTIVE),
]


@pytest.fixture(scope="module")
def trained_alone() -> dict[str, Any]:
    alone = make_setting(Strategy.SINGLE)
    cases = [(alone, name, dtype) for name, dtype in (*JOBS, ("Lonely", torch.float64))]
    (found,) = everywhere(1, train_all, cases, free_port())
    return {name: trained for (_, name, _), trained in zip(cases, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_different_ranks_learn_what_one_process_learns(
    ranks: int, trained_alone: dict[str, Any]
) -> None:
    settings = [setting for setting in SETTINGS if setting.gpus == ranks]
    # Products of other kinds differ between ranks in nothing that four of them would show.
    cases = [(setting, *job) for setting, job in product(settings, JOBS if ranks == 2 else JOBS[:1])]
    cases += [(settings[0], *JOBS[1])]
    # Of 4 ranks, those with the last two experts get no token at all.
    cases += [(setting, "Lonely", torch.float64) for setting in settings]
    found = everywhere(ranks, train_all, cases, free_port(), timeout_s=300)
    for (setting, name, dtype), *ours in zip(cases, *found, strict=True):
        for trained in ours:
            assert measure_gap(trained, trained_alone[name]) < TOLERANCE[dtype], (setting, name)


@pytest.mark.slow
def test_a_recomputed_block_gives_the_experts_the_dtypes_of_the_forward_pass() -> None:
    """Routers return float32 on a GPU, and FSDP of torch 2.11 casts it in the forward pass only."""
    setting = make_setting(
        Strategy.FSDP, dp_shard=2, ep=2, recompute=Recompute.FULL, precision=Precision.BF16
    )
    ((trained,), _) = everywhere(2, train_uncast, setting, free_port(), timeout_s=120)
    assert trained[-1] < trained[0]


def train_uncast(setting: Setting, port: int) -> list[list[float]]:
    """Train with an FSDP that casts no inputs when a block is recomputed."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    state_class: Any = FSDPState
    cast = state_class._cast_forward_inputs  # noqa: SLF001 - another version of it

    def cast_in_forward(state: Any, args: Any, kwargs: Any) -> Any:
        is_recomputed = state._training_state is TrainingState.PRE_BACKWARD  # noqa: SLF001
        return (args, kwargs) if is_recomputed else cast(state, args, kwargs)

    state_class._cast_forward_inputs = cast_in_forward  # noqa: SLF001
    os.environ["MASTER_PORT"] = str(port)
    return [train_steps(setting, "Float32Router", torch.float32)[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        make_setting(Strategy.FSDP, dp_shard=2, ep=2),
        make_setting(Strategy.FSDP, dp_shard=2, ep=2, recompute=Recompute.FULL),
    ],
)
def test_a_rank_without_memory_does_not_stop_the_others(
    setting: Setting, trained_alone: dict[str, Any]
) -> None:
    drill = Drill(("forward", 1, 1), ("backward", 2, 0))
    found = everywhere(2, train_steps, setting, "Named", torch.float64, drill)
    for losses, weights, _ in found:
        assert measure_gap((losses, weights), trained_alone["Named"]) < TOLERANCE[torch.float64]
    assert {incident.kind for _, _, seen in found for incident in seen} == {IncidentKind.OUT_OF_MEMORY}


def run_train(folder: Path, procs: int, steps: int, *pins: str) -> list[float]:
    """Return the losses of the steps that a command trains."""
    command = ["train", f"{Path(expert_jobs.__file__)}:Named", "--procs", str(procs), "--steps", str(steps)]
    command += ["--json", "--out", str(folder), *(word for pin in pins for word in ("--pin", pin))]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line["loss"] for line in lines if "loss" in line and "step" in line]


@pytest.mark.slow
def test_a_run_resumes_on_other_meshes(tmp_path: Path) -> None:
    expected = run_train(tmp_path / "alone", 1, 6)
    first = run_train(tmp_path / "spread", 4, 2, "ep=2")
    second = run_train(tmp_path / "spread", 1, 4)
    third = run_train(tmp_path / "spread", 2, 6, "ep=2")
    assert [*first, *second, *third] == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------ which modules, which settings


def test_experts_are_found_by_their_form_and_by_name() -> None:
    with torch.device("meta"):
        model = expert_jobs.Mixtral().model()
        named = expert_jobs.Named().model()
    assert find_experts(model) == {"model.layers.0.mlp.experts": 4, "model.layers.1.mlp.experts": 4}
    assert find_experts(named) == {}
    assert find_experts(named, ("blocks.*.feed",)) == {"blocks.0.feed": 4, "blocks.1.feed": 4}
    with pytest.raises(WrongUse, match=r"no such module; it has embedding, blocks"):
        find_experts(named, ("layers.*.feed",))
    with pytest.raises(WrongUse, match=r"blocks.0 \(Block\) is not a module with weights of one first dim"):
        find_experts(named, ("blocks.0",))
    listed = nn.Sequential(nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]))
    with pytest.raises(WrongUse, match=r"0 \(ModuleList\) is not a module.*Move the list and the loop"):
        find_experts(listed, ("0",))


@pytest.mark.parametrize("name", ["Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss", "Ernie4_5_Moe"])
def test_models_of_transformers_have_experts(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=4, hidden_size=64, intermediate_size=64, vocab_size=64, layer_types=None
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(config)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    found = find_experts(model)
    assert found
    assert set(found.values()) == {experts}


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"no experts that trimtab can spread.*expert_modules"):
        check_experts({}, 2)
    with pytest.raises(WrongUse, match=r"layer has 6 experts, which 4 ranks.*Use one of 1, 2, 3, 6"):
        check_experts({"layer": 6}, 4)


@pytest.mark.parametrize(
    ("strategy", "changes", "found"),
    [
        (Strategy.FSDP, {"compile": True}, "ep 2 with compile"),
        (Strategy.FSDP, {"offload": (Offload.ACTIVATIONS,)}, "ep 2 with offload activations"),
        (Strategy.FSDP, {"base": BaseFormat.NF4}, "ep 2 with base nf4"),
        (Strategy.FSDP, {"sync_batchnorm": True}, "ep 2 with sync_batchnorm"),
        (Strategy.DDP, {}, "only the ranks of fsdp or hsdp hold different experts"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(
    strategy: Strategy, changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(WrongUse, match=found):
        refuse_expert_split(make_setting(strategy, dp_shard=2, ep=2, **changes))


def test_experts_need_no_devices_of_their_own() -> None:
    mesh = Mesh(dp_shard=8, ep=4)
    assert (mesh.size, mesh.data_parallel, mesh.shards) == (8, 8, 8)
    assert Mesh(dp_shard=2, cp=2, ep=4).size == 4
    with pytest.raises(ValueError, match="ep 3 does not divide dp_shard x cp x tp, which is 8"):
        Mesh(dp_shard=8, ep=3)
    with pytest.raises(ValueError, match=r"expert_imbalance is 0\.5, which is below 1"):
        make_setting(Strategy.FSDP, dp_shard=2, ep=2, expert_imbalance=0.5)


def test_fewer_processes_keep_experts_apart_if_they_can() -> None:
    rules = STRATEGIES[Strategy.FSDP]
    mesh = Mesh(dp_shard=8, ep=4)
    assert rules.resized(mesh, 4) == (Strategy.FSDP, Mesh(dp_shard=4, ep=4))
    assert rules.resized(mesh, 6) == (Strategy.FSDP, Mesh(dp_shard=6))
    assert rules.resized(mesh, 1)[1] == Mesh()


# ------------------------------------------------------------------------ predictions


def test_tokens_travel_between_experts_and_nothing_hides_it() -> None:
    works = [
        Work(op="expert_parallel send c10d::alltoall_base_", kind="collective", dtype="", read_bytes=64),
        # Of experts: two ranks hold the same ones. Then of all other weights.
        Work(op="c10d::_allgather_base_", kind="collective", dtype="float32", read_bytes=40, write_bytes=20),
        Work(op="c10d::_allgather_base_", kind="collective", dtype="float32", read_bytes=80, write_bytes=10),
    ]
    calls: list[tuple[Any, ...]] = []

    class Links:
        def all_to_all_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
            calls.append(("all_to_all", size, ranks, apart))
            return 1.0

        def all_gather_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
            calls.append(("all_gather", size, ranks, apart))
            return 0.0

    setting = make_setting(Strategy.FSDP, dp_shard=8, ep=4)
    trace = SimpleNamespace(works=works, sequence=[0, 0, 1, 2], trainable=0)
    traffic = Traffic(
        trace=trace,  # type: ignore[arg-type]
        setting=setting,
        links=Links(),  # type: ignore[arg-type]
        gradient_bytes=0,
        hidden_forward_s=9.0,
        hidden_backward_s=9.0,
    )
    assert STRATEGIES[Strategy.FSDP].exposed_s(traffic) == pytest.approx(2.0)
    assert {("all_to_all", 64, 4, 1), ("all_gather", 40, 2, 4), ("all_gather", 80, 8, 1)} == set(calls)


@pytest.mark.slow
def test_an_estimate_has_the_memory_and_the_traffic_of_the_experts_of_one_rank() -> None:
    job = f"{Path(expert_jobs.__file__)}:Grouped"
    options = {"width": 512, "experts": 8}
    whole, spread, uneven = (
        trimtab.estimate(job, "8xH100", strategy="fsdp", micro_batch=64, options=options, cache=False, **more)
        for more in ({}, {"ep": 8}, {"ep": 8, "expert_imbalance": 3.0})
    )
    assert spread.parts.weights < 1.05 * whole.parts.weights
    # A rank gathers one expert of a layer instead of eight, and NCCL connects every pair of ranks.
    gathered_spread, gathered_whole = (
        found.parts.communication - found.nccl_bytes for found in (spread, whole)
    )
    assert gathered_spread < gathered_whole
    assert spread.nccl_bytes > whole.nccl_bytes
    assert uneven.parts.activations > 1.2 * spread.parts.activations
    assert (uneven.step_s or 0) > (spread.step_s or 0)
    assert any("every rank gets as many tokens" in note for note in spread.assumptions)
    assert any("3 times as many tokens as the mean rank" in note for note in uneven.assumptions)


def test_an_estimate_refuses_degrees_before_it_traces() -> None:
    job = f"{Path(expert_jobs.__file__)}:Named"
    with pytest.raises(
        WrongUse, match=r"experts share the 8 ranks of dp_shard x cp x tp, which 3.*1, 2, 4, 8"
    ):
        trimtab.estimate(job, "8xH100", ep=3)
    with pytest.raises(WrongUse, match="--ep 2 with --strategy ddp"):
        trimtab.estimate(job, "8xH100", strategy="ddp", ep=2)
    with pytest.raises(WrongUse, match=r"--expert-imbalance 0\.5: it is below 1"):
        trimtab.estimate(job, "8xH100", ep=2, expert_imbalance=0.5)
