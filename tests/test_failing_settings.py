"""Jobs whose steps fail in some settings only: a plan goes on without those, and says why."""

from pathlib import Path

import pytest

import trimtab
from trimtab.errors import JobFailed, WrongUse
from trimtab.spec import Precision, Strategy

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
