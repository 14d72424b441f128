"""GPUs of one compute capability share traces, unless a job asks for more of its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.predict.traces import get_traces, has_trace
from trimtab.spec import Mesh, Setting, Trace
from trimtab.trace import tracer
from trimtab.trace.fake_cuda import SPECIAL_PROPERTIES, FakeProperties
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.server import WorkerProcess

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.spec import Device

JOB = """
import torch
from torch import nn


class Asks:
    def model(self):
        facts = torch.cuda.get_device_properties(0)
        width = {width}
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))

    def batch(self, samples):
        return torch.zeros(samples, 64, device="cuda")

    def loss(self, model, batch):
        return model(batch).square().mean()
"""
CAPABILITY = "64 * (facts.major + torch.cuda.get_device_capability()[0])"
SPECIAL = {
    "memory": "64 * (facts.total_memory >> 30)",
    "multiprocessors": "64 * facts.multi_processor_count",
    "cache": "64 * (facts.L2_cache_size >> 20)",
    "name": "64 * (2 if 'H200' in facts.name else 1)",
    "device name": "64 * (2 if 'H200' in torch.cuda.get_device_name() else 1)",
    "free memory": "64 * (torch.cuda.mem_get_info()[1] >> 30)",
}
SETTING = Setting(micro_batch=2, global_batch=2)
LONG_S = 300.0


def device(name: str) -> Device:
    return parse_cluster(name).devices[0]


def write_job(folder: Path, width: str) -> str:
    file = folder / "job.py"
    file.write_text(JOB.format(width=width), encoding="utf-8")
    return f"{file}:Asks"


def trace(job: str, name: str, **changes: Any) -> Trace:
    (found,) = get_traces(job, [SETTING], device(name), partner=False, **changes)
    assert isinstance(found, Trace), found
    return found


def is_known(job: str, name: str, setting: Setting = SETTING) -> bool:
    return has_trace(TraceRequest(job=job, setting=setting, device=device(name)))


def test_a_trace_of_one_gpu_serves_others_with_the_same_kernels(tmp_path: Path) -> None:
    job = write_job(tmp_path, CAPABILITY)
    assert not is_known(job, "H200")
    made = trace(job, "H20")
    assert is_known(job, "H200")
    assert not is_known(job, "A100-80GB"), "its kernels differ"
    assert not is_known(job, "GH200"), "its host differs"
    assert trace(job, "H200") == made


@pytest.mark.slow
@pytest.mark.parametrize("width", SPECIAL.values(), ids=SPECIAL)
def test_a_job_that_asks_for_more_is_traced_for_each_gpu(tmp_path: Path, width: str) -> None:
    job = write_job(tmp_path, width)
    with WorkerProcess() as worker:
        first, second = (trace(job, name, worker=worker) for name in ("H20", "H200"))
    assert sum(second.sizes) > sum(first.sizes)
    assert trace(job, "H20") == first, "from the cache, each its own"
    assert trace(job, "H200") == second


def test_what_a_process_has_learned_holds_without_the_cache_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, SPECIAL["memory"])
    families: dict[str, Any] = {}
    asked: list[str] = []
    ask_worker = tracer._ask_worker  # noqa: SLF001 - to see what is asked

    def noting(requests: TraceRequests, *args: Any) -> Any:
        asked.append(requests.device.name)
        return ask_worker(requests, *args)

    monkeypatch.setattr(tracer, "_ask_worker", noting)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file" / "cache"))
    kept = [trace(job, name, cache=False, families=families) for name in ("H20", "H200", "H20", "H200")]
    assert sum(kept[0].sizes) < sum(kept[1].sizes)
    assert kept[:2] == kept[2:]
    assert asked == [device(name).name for name in ("H20", "H200")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "starts"), [(CAPABILITY, 1), (SPECIAL["name"], 2)], ids=["common", "special"]
)
def test_a_worker_process_traces_for_alike_gpus_until_a_job_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: str, starts: int
) -> None:
    job = write_job(tmp_path, width)
    started: list[str] = []
    start = WorkerProcess._start  # noqa: SLF001 - to see what is started

    def noting(self: WorkerProcess) -> None:
        started.append(job)
        start(self)

    monkeypatch.setattr(WorkerProcess, "_start", noting)
    with WorkerProcess() as worker:
        answers = [
            worker.ask_all(
                TraceRequests(job=job, settings=(SETTING,), device=device(name)), timeout_s=LONG_S
            )[0]
            for name in ("H20", "H200")
        ]
    first, second = answers
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["trace"] == second["trace"]) == (starts == 1)
    assert len(started) == starts


def test_a_failure_is_found_again_on_the_gpu_that_it_is_reported_for(tmp_path: Path) -> None:
    broken = "64 if 'H200' in facts.name else int('no H200')"
    job = write_job(tmp_path, broken)
    with WorkerProcess() as worker:
        first, second = (
            get_traces(job, [SETTING], device(name), worker=worker)[0] for name in ("H20", "H200")
        )
    assert "no H200" in str(first)
    assert isinstance(second, Trace)


def test_compiled_code_is_for_one_gpu() -> None:
    compiled = SETTING.replace(compile=True)
    h20, h200 = (
        tracer.family_key(TraceRequest(job="slm:tiny", setting=compiled, device=device(name)))
        for name in ("H20", "H200")
    )
    assert h20 != h200


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp", "ddp"])
def test_the_engine_itself_asks_for_nothing_more(strategy: str) -> None:
    meshes = {"single": Mesh(), "fsdp": Mesh(dp_shard=2), "ddp": Mesh(dp_replicate=2)}
    mesh = meshes[strategy]
    setting = Setting(strategy=strategy, mesh=mesh, micro_batch=2, global_batch=2 * mesh.size)  # type: ignore[arg-type]
    requests = TraceRequests(job="slm:tiny", settings=(setting,), device=device("H20"))
    with WorkerProcess() as worker:
        (answer,) = worker.ask_all(requests, timeout_s=LONG_S)
    assert isinstance(answer, dict)
    assert answer["is_for_one_device"] is False


def test_every_special_property_exists() -> None:
    assert set(FakeProperties.__dataclass_fields__) > SPECIAL_PROPERTIES
