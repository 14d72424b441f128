"""Scripts from outside the usual frameworks: old calls, processes of their own, downloads, no GPU at all."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trimtab.errors import CannotFollow, JobFailed, WrongUse
from trimtab.probe.detect import as_cluster
from trimtab.scripts import nvidia_smi
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.scripts.follow import follow_script
from trimtab.spec import PARTS

if TYPE_CHECKING:
    from trimtab.scripts.estimate import ScriptEstimate

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def follow(script: str, *arguments: str, on: str = "H200", launcher: tuple[str, ...] = ()) -> ScriptEstimate:
    words = [sys.executable, *launcher, str(SCRIPTS / script), *arguments]
    return estimate_script(parse_command(words, environment=os.environ), as_cluster(on))


def values_of(found: ScriptEstimate) -> dict[str, str]:
    return {fact.name: fact.value for fact in found.script.found}


@pytest.fixture(autouse=True)
def in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_calls_of_ten_years_work() -> None:
    found = follow("old_style.py")
    assert values_of(found)["micro_batch"] == "4"
    assert not [note for note in found.estimate.assumptions if "failed" in note]
    assert [note for note in found.estimate.assumptions if note.startswith("the GPU kernels of blur")]
    # Weights of the lazy layer are on the GPU too: 12 x 16, a GRU of 16 and a head of 16 x 8.
    assert found.trace.parameters == 12 * 16 + 16 + 6 * 16 * 16 + 6 * 16 + 16 * 8 + 8


def test_training_on_the_cpu_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"trains on the CPU.*on_cpu\.py:1") as caught:
        follow("on_cpu.py")
    assert "--cuda" in caught.value.cure


@pytest.mark.slow
def test_an_optimizer_that_steps_less_often_is_waited_for() -> None:
    found = follow("critic.py")
    values = values_of(found)
    assert values["optimizer"] == "RMSprop (foreach)"
    assert values["optimizers"].endswith("x, Adam 2x")
    # Both states of the generator's Adam, and one of the critic's RMSprop.
    generator = 16 * 512 + 512 + 512 * 784 + 784
    critic = 784 * 128 + 128 + 128 + 1
    assert found.estimate.parts.optimizer >= 4 * (2 * generator + critic)
    rare = follow("critic.py", "--n-critic", "30")
    assert [note for note in rare.estimate.assumptions if "Adam (foreach) stepped 0 times" in note]


@pytest.mark.slow
def test_the_first_of_several_training_processes_is_followed() -> None:
    found = follow("shared_model.py")
    assert values_of(found)["micro_batch"] == "16"
    notes = [note for note in found.estimate.assumptions if "training processes" in note]
    assert len(notes) == 1
    assert "3 training processes" in notes[0]
    assert "shared_model.py:2" in notes[0]


@pytest.mark.slow
def test_tensor_parallelism_is_a_fact_and_shards_the_weights() -> None:
    found = follow("parallel.py", on="2xH200", launcher=TORCHRUN)
    values = values_of(found)
    assert (values["tensor_parallel"], values["gpus"], values["global_batch"]) == ("2", "2", "8")
    assert [note for note in found.estimate.assumptions if "tensor parallelism over 2 GPUs" in note]
    assert not [note for note in found.estimate.assumptions if "processes were started" in note]
    whole = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert whole / 2 <= found.estimate.parts.weights < 0.6 * whole


@pytest.mark.slow
def test_ddp_moves_inputs_and_takes_its_bucket_size() -> None:
    found = follow("parallel.py", "--ddp", "--width", "8192", on="2xH200", launcher=TORCHRUN)
    assert values_of(found)["strategy"] == "ddp"
    assert PARTS.index("inputs") in found.trace.parts


@pytest.mark.slow
def test_rpc_is_refused_at_its_line() -> None:
    with pytest.raises(CannotFollow, match=r"rpc.*parallel\.py:19"):
        follow("parallel.py", "--rpc", on="2xH200", launcher=TORCHRUN)


@pytest.mark.slow
def test_missing_weights_are_no_obstacle_and_missing_data_is() -> None:
    found = follow("pretrained.py")
    notes = [note for note in found.estimate.assumptions if "were not loaded" in note]
    assert "pretrained.py:10" in notes[0]
    # The file that was not written has the size of its tensors: 8 x 8 + 8 and 8 x 2 + 2 numbers.
    assert [line for line in found.script.writes if "net.pt (360 B)" in line]
    with pytest.raises(JobFailed, match=r"data\.example\.org") as caught:
        follow("pretrained.py", "--data")
    assert "once without trimtab" in caught.value.cure


def test_nvidia_smi_shows_the_pretended_gpus(tmp_path: Path) -> None:
    nvidia_smi.write_program(tmp_path, name="NVIDIA H200", memory_bytes=150_000 * 2**20, count=2)
    words = ["--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader"]
    shown = subprocess.run([tmp_path / "nvidia-smi", *words], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == [
        "0, NVIDIA H200, 150000 MiB, 0 MiB",
        "1, NVIDIA H200, 150000 MiB, 0 MiB",
    ]
    plain = nvidia_smi.describe_gpus("NVIDIA H200", 150_000, 1, [])
    assert "NVIDIA H200" in plain
    assert nvidia_smi.describe_gpus("A", 5, 1, ["--query-gpu=name,count"]).splitlines() == [
        "name, count",
        "A, 1",
    ]


@pytest.mark.slow
def test_a_script_finds_a_terminal_where_the_user_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    script = (
        "import os, sys\nrows, columns = os.popen('stty size', 'r').read().split()\nsys.exit(int(columns))"
    )
    Path("ask.py").write_text(script, encoding="utf-8")
    command = parse_command([sys.executable, "ask.py"], environment=os.environ)
    with os.fdopen(terminal) as source, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", source)
        termios.tcsetwinsize(terminal, (24, 91))
        with pytest.raises(WrongUse, match="exit code 91"):
            follow_script(command, as_cluster("H200").devices[0])
    os.close(keyboard)


SPAWNED = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def train(rank, width):
    dist.init_process_group("nccl", init_method="tcp://localhost:29500", rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(nn.Linear(width, width).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        net(torch.randn(4, width).cuda()).sum().backward()
        optimizer.step()

def main(devices):
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    mp.spawn(fn=train, nprocs=2, args=(512,), join=False).join()

if __name__ == "__main__":
    mp.Process(target=main, args=("0,1",)).start()
"""


def test_processes_that_nobody_waits_for_are_followed() -> None:
    Path("spawned.py").write_text(SPAWNED, encoding="utf-8")
    command = parse_command([sys.executable, "spawned.py"], environment=os.environ)
    found = estimate_script(command, as_cluster("2xH200"))
    values, parameters = values_of(found), 4 * (512 * 512 + 512)
    assert (values["strategy"], values["global_batch"]) == ("ddp", "8")
    # The buckets in which gradients are sent are no weights.
    assert parameters <= found.estimate.parts.weights < 1.5 * parameters
    assert found.estimate.parts.communication >= parameters
