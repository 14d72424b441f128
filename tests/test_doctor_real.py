"""Faults that are made for real, in this process: what the installed torch says of them is recognised.

The sample logs were written by hand; this is what notices when a release changes its words.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from trimtab.diagnosis.diagnose import diagnose_logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def state_dict(_: Path) -> None:
    nn.ModuleDict({"wte": nn.Embedding(4, 3)}).load_state_dict({"wte.weight": torch.zeros(5, 3)})


def two_dtypes(_: Path) -> None:
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


def shapes(_: Path) -> None:
    nn.Linear(3, 4)(torch.ones(2, 5))


def unequal_samples(_: Path) -> None:
    torch.stack([torch.ones(2), torch.ones(3)])


def no_gradient(_: Path) -> None:
    torch.ones(1).sum().backward()  # type: ignore[no-untyped-call]


def second_backward(_: Path) -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def in_place(_: Path) -> None:
    out = torch.ones(2, requires_grad=True).exp()
    out.add_(1)
    out.sum().backward()  # type: ignore[no-untyped-call]


def token_id(_: Path) -> None:
    nn.Embedding(4, 3)(torch.tensor([9]))


def label(_: Path) -> None:
    nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([7]))


def meta_moved(_: Path) -> None:
    nn.Linear(3, 4, device="meta").to("cpu")


def cuda_without(_: Path) -> None:
    torch.zeros(1).cuda()


def world_size(_: Path) -> None:
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo")


def no_group(_: Path) -> None:
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def cut_checkpoint(folder: Path) -> None:
    file = folder / "a.pt"
    torch.save(torch.zeros(100_000), file)
    file.write_bytes(file.read_bytes()[:-200_000])
    torch.load(file)


def broken_safetensors(folder: Path) -> None:
    from safetensors.torch import load_file

    file = folder / "a.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    load_file(file)


def untrusted(folder: Path) -> None:
    torch.save(Exception("x"), folder / "a.pt")
    torch.load(folder / "a.pt")


def too_large(_: Path) -> None:
    torch.empty(2**52)


def taken_port(_: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)


def silent_port(_: Path) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=300))


def anomaly(_: Path) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        value = torch.zeros(1, requires_grad=True)
        (value * float("nan")).sqrt().sum().backward()  # type: ignore[no-untyped-call]


def bad_probabilities(_: Path) -> None:
    torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)


def half_weights(_: Path) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    weight.grad = torch.ones(1, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([weight], 0.1))


def missing_file(folder: Path) -> None:
    (folder / "no.bin").read_bytes()


def missing_module(_: Path) -> None:
    import trimtab_has_no_such_module  # type: ignore[import-not-found] # noqa: F401


def hf_arguments(_: Path) -> None:
    from dataclasses import dataclass

    parser = pytest.importorskip("transformers").HfArgumentParser

    @dataclass
    class Given:
        rate: float = 0.1

    parser(Given).parse_args_into_dataclasses(["--rte", "1"])


def no_batch(_: Path) -> None:
    memory = pytest.importorskip("accelerate.utils.memory")

    @memory.find_executable_batch_size(starting_batch_size=1)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> None:  # noqa: ARG001 - as its decorator wants it
        raise RuntimeError("CUDA error: out of memory.")

    train()


FAULTS: dict[Callable[[Path], None], str] = {
    state_dict: "checkpoint-mismatch",
    two_dtypes: "dtype-mismatch",
    shapes: "shape-mismatch",
    unequal_samples: "shape-mismatch",
    no_gradient: "no-gradient",
    second_backward: "second-backward",
    in_place: "in-place-change",
    token_id: "index-out-of-range",
    label: "index-out-of-range",
    meta_moved: "fsdp-not-materialised",
    cuda_without: "cpu-build",
    world_size: "world-not-set",
    no_group: "world-not-set",
    cut_checkpoint: "checkpoint-broken",
    broken_safetensors: "checkpoint-broken",
    untrusted: "checkpoint-not-trusted",
    too_large: "host-memory-refused",
    taken_port: "port-in-use",
    silent_port: "rendezvous-timeout",
    anomaly: "not-a-number",
    bad_probabilities: "not-a-number",
    half_weights: "fp16-weights-scaled",
    missing_file: "file-not-found",
    missing_module: "module-not-found",
    hf_arguments: "setting-not-applied",
    no_batch: "no-batch-fits",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_real_fault_is_recognised(
    fault: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is cuda_without and torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fault(tmp_path)
        except Exception:  # noqa: BLE001 - whatever it is that is raised is the point
            said = traceback.format_exc()
    assert said, "nothing was raised"
    log = tmp_path / "run.log"
    log.write_text(f"step 1 loss 2.0\n{said}", encoding="utf-8")
    assert [finding.kind for finding in diagnose_logs([str(log)]).findings] == [FAULTS[fault]], said


JOB = """
import datetime, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    for step in range(3):
        total = torch.ones(4)
        dist.all_reduce(total)
        print(f"step {step} loss {total.sum().item()}", flush=True)
        if step == 1 and dist.get_rank() == 1:
            raise KeyError("labels")
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--tee", "3", "--log-dir", "logs"]])
def test_what_torchrun_leaves_behind_names_the_rank_that_failed(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env: dict[str, Any] = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    done = subprocess.run(
        [*command, *options, "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=env,
    )
    assert done.returncode == 1
    (tmp_path / "all.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    for name in ("all.log", *(["logs"] if options else [])):
        first = diagnose_logs([str(tmp_path / name)]).findings[0]
        assert first.what == "The program raised KeyError: 'labels' (rank 1)."
        assert any("lost the connection" in consequence for consequence in first.consequences)
