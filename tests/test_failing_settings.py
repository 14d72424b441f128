"""Jobs whose steps fail in some settings only: a plan goes on without those, and says why."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trimtab
from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import CannotFollow, JobFailed, WrongUse
from trimtab.planner.ways import list_changed, may_use_head
from trimtab.spec import (
    PARTS,
    Band,
    BaseFormat,
    Estimate,
    Footprint,
    Mesh,
    Policy,
    Precision,
    Setting,
    Strategy,
    Trace,
)
from trimtab.strategies.base import ALIKE
from trimtab.trace import cpu_check, worker
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.server import WorkerProcess, decode_answer, encode_error
from trimtab.units import GIB

JOB = """
import torch
from torch import nn
import trimtab

class Picky(trimtab.Job):
    name = "picky"
    global_batch = 4
    refuses = ""

    def model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def batch(self, size):
        return torch.randn(size, 8), torch.rand(size, 1)

    def loss(self, model, batch):
        inputs, targets = batch
        sharded = any(hasattr(one, "_local_tensor") for one in model.parameters())
        if self.refuses == "all" or sharded:
            raise RuntimeError("this loss does not know sharded weights")
        return nn.BCELoss()(model(inputs), targets)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = tmp_path / "picky.py"
    file.write_text(JOB, encoding="utf-8")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return f"{file}:Picky"


PINS = ("recompute=none", "compile=false")


def test_a_loss_that_refuses_autocast_and_shards_is_planned_without_both(job: str) -> None:
    plan = trimtab.plan(job, "2xH100", pins=(*PINS, "gpus=2"))
    assert plan.choice.precision is Precision.TF32
    assert plan.choice.strategy is Strategy.DDP
    told = " ".join(one.why for one in plan.rejected)
    assert "unsafe to autocast" in told
    assert "does not know sharded weights" in told


def test_a_loss_that_always_fails_says_why(job: str) -> None:
    with pytest.raises(JobFailed, match="does not know sharded weights"):
        trimtab.plan(job, "H100", pins=PINS, options={"refuses": "all"})


@pytest.mark.usefixtures("own_cache")
def test_fsdp_names_the_parameters_that_it_cannot_shard(tmp_path: Path) -> None:
    file = tmp_path / "clip.py"
    scaled = JOB.replace("        return nn.Sequential", "        net = nn.Sequential").replace(
        "nn.Sigmoid())", "nn.Sigmoid())\n        net.scale = nn.Parameter(torch.ones(()))\n        return net"
    )
    file.write_text(scaled, encoding="utf-8")
    with pytest.raises(WrongUse, match="without a dimension: scale"):
        trimtab.estimate(f"{file}:Picky", "2xH100", micro_batch=2, strategy="fsdp", precision="fp32")


def test_a_plan_without_devices_is_wrong_use_in_words(job: str) -> None:
    somewhere = trimtab.cluster("H100")
    nowhere = somewhere.replace(nodes=(somewhere.nodes[0].replace(devices=()),), links=())
    with pytest.raises(WrongUse, match="this machine has no GPU"):
        trimtab.plan(job, nowhere)
    for verb in (trimtab.plan, trimtab.estimate):
        with pytest.raises(WrongUse, match="it is empty"):
            verb(job, "")


def test_a_job_that_was_traced_as_it_is_is_not_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[int] = []

    def check_on_cpu(query: cpu_check.CpuCheck) -> cpu_check.CpuCheckResult:
        ran.append(query.micro_batch)
        return cpu_check.CpuCheckResult()

    monkeypatch.setattr(worker, "check_on_cpu", check_on_cpu)
    checks = worker.JobChecks()
    checks.sizes |= {2, 64}
    failed = encode_error(CannotFollow("loss()", found="mm has no rule", cure="Profile it."))
    device = parse_cluster("H100").devices[0]
    plain, quantised = Setting(micro_batch=2, global_batch=2), {"base": BaseFormat.NF4}
    # Between 2 and 64 samples, the job itself may refuse a number; with another base, it is likely the base.
    for micro_batch, changes, runs in ((64, {}, []), (8, quantised, []), (8, {}, [8]), (1, quantised, [8])):
        setting = plain.replace(micro_batch=micro_batch, global_batch=micro_batch, **changes)
        request = TraceRequest(job="slm:tiny", setting=setting, device=device)
        error = decode_answer(worker._check_failure(failed, request, checks))  # noqa: SLF001 - no trace of a job
        assert isinstance(error, CannotFollow)
        assert error.found == "mm has no rule"
        assert "The job itself is fine" in error.cure
        assert ran == runs


def test_a_batch_of_another_size_than_requested_is_noticed() -> None:
    has_samples = worker._has_samples  # noqa: SLF001 - a trace for each batch would take seconds
    rows = torch.zeros(8, 2)
    for batch in (
        rows,
        {"x": rows, "y": rows[0]},
        [rows[0]] * 8,
        {"texts": ["a"] * 8, "x": rows.T},
        "no tensor",
    ):
        assert has_samples(batch, 8)
    assert not has_samples({"x": rows, "y": rows.T}, 4)


@pytest.mark.parametrize(("longest", "noted"), [(9, False), (999, True)])
def test_a_batch_of_random_sizes_is_noticed(longest: int, *, noted: bool) -> None:
    class Ragged:
        def batch(self, size: int) -> list[torch.Tensor]:
            return [
                torch.zeros(int(torch.randint(9, longest + 1, (), device="cpu")), device="cpu")
                for _ in range(size)
            ]

    notes: list[str] = []
    recorder = SimpleNamespace(discard_changes=nullcontext, kernels=SimpleNamespace(assume=notes.append))
    request = SimpleNamespace(job="job.py:Ragged", setting=Setting(micro_batch=4, global_batch=4))
    built: Any = SimpleNamespace(job=Ragged(), recorder=recorder, request=request)
    worker._note_varying_sizes(built, Ragged().batch(4))  # noqa: SLF001 - no trace of a job
    assert notes == [worker.VARYING_SIZES] * noted


def test_ways_to_fit_that_a_strategy_refuses_are_not_traced() -> None:
    branch = Setting(
        micro_batch=8, global_batch=8, strategy=Strategy.BRANCH, mesh=Mesh(branch=2), precision=Precision.BF16
    )
    sharded = branch.replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=2), global_batch=16)
    parts = Footprint(weights=10 * GIB, optimizer=20 * GIB, gradients=10 * GIB, activations=10 * GIB)
    estimate = Estimate(
        allocated_bytes=50 * GIB,
        reserved_bytes=50 * GIB,
        process_bytes=50 * GIB,
        parts=parts,
        band=Band(low_bytes=50 * GIB, high_bytes=52 * GIB),
    )
    moved = {
        setting.strategy: {way.name for way, _ in list_changed(setting, estimate, 70 * GIB, Policy())}
        for setting in (branch, sharded)
    }
    assert "weights and optimizer on the CPU" in moved[Strategy.FSDP] - moved[Strategy.BRANCH]
    assert "loss in pieces" in moved[Strategy.BRANCH]


@pytest.mark.parametrize(
    ("module", "part", "tried"),
    [
        ("model.lm_head", "activations", True),
        ("lm_head.weight", "gradients", True),
        ("model.layers.0.mlp", "activations", False),
        ("lm_header", "activations", False),
        # Without names of modules, the trace does not show what the job calls.
        ("", "activations", True),
        ("layers.0.weight", "gradients", True),
    ],
)
def test_a_loss_in_pieces_is_tried_only_if_the_model_computes_logits(
    module: str, part: str, *, tried: bool
) -> None:
    trace = Trace(
        order=(0,), sizes=(512,), streams=(0,), parts=(PARTS.index(part),), modules=(0,), ops=(0,),
        module_names=(module,), op_names=("aten::mm",), marks={"step0": 0},
    )  # fmt: skip
    assert may_use_head(trace) is tried
    other = trace.replace(module_names=("model.layers.0.mlp",), parts=(PARTS.index("activations"),))
    assert may_use_head(other.replace(beside=(trace,))) is tried
    setting = Setting(micro_batch=8, global_batch=8)
    estimate = Estimate(
        allocated_bytes=GIB,
        reserved_bytes=GIB,
        process_bytes=GIB,
        parts=Footprint(activations=GIB),
        band=Band(low_bytes=GIB, high_bytes=GIB),
    )
    names = {way.name for way, _ in list_changed(setting, estimate, GIB, Policy(), trace)}
    assert ("loss in pieces" in names) is tried


def test_settings_that_differ_in_the_micro_batch_share_a_model() -> None:
    setting = Setting(micro_batch=2, global_batch=2, precision=Precision.BF16)
    larger = setting.replace(micro_batch=8, global_batch=8)
    sharded = larger.replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=2), global_batch=16)
    compiled = [setting.replace(compile=True), larger.replace(compile=True)]
    device = parse_cluster("H100").devices[0]
    parts = [
        worker._RankRequest(number, TraceRequest(job="slm:tiny", setting=each, device=device), rank)  # noqa: SLF001
        for number, (each, rank) in enumerate(
            [
                *((each, ALIKE) for each in (setting, sharded, larger, *compiled)),
                (larger, ALIKE._replace(branch="wide")),
            ]
        )
    ]
    assert worker._group_alike(parts) == [[0, 2], [1], [3], [4], [5]]  # noqa: SLF001 - no trace of a job


@pytest.mark.usefixtures("own_cache")
def test_an_error_of_the_model_is_that_of_every_micro_batch(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(JOB.replace("nn.Linear(8, 8)", "nn.Linear(8, self.width)"), encoding="utf-8")
    setting = Setting(micro_batch=2, global_batch=2)
    requests = TraceRequests(
        job=f"{file}:Picky",
        settings=(setting, setting.replace(micro_batch=4, global_batch=4)),
        device=parse_cluster("H100").devices[0],
    )
    with WorkerProcess() as process:
        answers = process.ask_all(requests, timeout_s=300)
    assert len(answers) == 2
    for answer in answers:
        assert isinstance(answer, JobFailed)
        assert "no attribute 'width'" in answer.found


@pytest.mark.usefixtures("own_cache")
def test_micro_batches_that_share_a_model_have_the_traces_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "picky.py"
    file.write_text(JOB, encoding="utf-8")
    setting = Setting(micro_batch=2, global_batch=2)
    both = (setting, setting.replace(micro_batch=4, global_batch=4))
    requests = TraceRequests(job=f"{file}:Picky", settings=both, device=parse_cluster("H100").devices[0])
    with WorkerProcess() as process:
        together = process.ask_all(requests, timeout_s=300)
    with WorkerProcess() as process:
        alone = [
            *process.ask_all(requests.replace(settings=both[:1]), timeout_s=300),
            *process.ask_all(requests.replace(settings=both[1:]), timeout_s=300),
        ]
    traces, expected = (
        [answer["trace"] for answer in answers if isinstance(answer, dict)] for answers in (together, alone)
    )
    assert traces == expected
    assert len(traces) == len(both)
