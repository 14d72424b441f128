from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import trimtab
from compare_traces import compare, load
from shared_jobs import shared_job
from test_cli import trimtab_cli
from trimtab import cache
from trimtab.api import make_request, make_setting
from trimtab.errors import JobFailed, UnknownName, WrongUse
from trimtab.exams.measure import StepMeasurement, make_case
from trimtab.exams.run import append_case, predict_case, read_cases, run_exam
from trimtab.predict.allocator import AllocatorConfig
from trimtab.spec import PARTS

if TYPE_CHECKING:
    from trimtab.spec import Estimate

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
GIB = 2**30


@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.name.split(".")[0])
def test_the_allocator_reserves_what_a_real_h200_did(file: Path) -> None:
    found = compare(load(file).entries, AllocatorConfig(), real_addresses=True)
    assert found.reserved == found.real_reserved
    assert found.allocated == found.real_allocated


JOB = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    global_batch = 64

    def model(self):
        return Net()

    def batch(self, size):
        return torch.randn(size, 128, 256), torch.randint(0, 10, (size, 128))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""


def job_file(folder: Path, text: str = JOB) -> str:
    file = folder / "job.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return f"{file}:Job"


def estimate(job: str, on: str = "H200", **options: Any) -> Estimate:
    return trimtab.estimate(job, on, **({"micro_batch": 8} | options))


def test_parts_are_what_the_shapes_say() -> None:
    found = estimate(shared_job(JOB), precision="fp32")
    numbers = 4 * (2 * 256 + 256 * 1024 * 2 + 1024 + 256) + 256 * 10 + 10
    assert found.parts.weights == pytest.approx(numbers * 4, rel=0.01)
    assert found.parts.optimizer == pytest.approx(numbers * 8, rel=0.02)
    assert found.parts.inputs == pytest.approx(8 * 128 * 256 * 4 + 8 * 128 * 8, rel=0.01)
    # One block of cuBLAS for the forward thread, one for the backward thread, and the kernel at the peak.
    assert 64 * 2**20 <= found.parts.workspace < 128 * 2**20
    assert found.allocated_bytes <= found.reserved_bytes < found.process_bytes
    assert found.fits is True


def test_activations_grow_with_the_micro_batch_and_weights_do_not() -> None:
    job = shared_job(JOB)
    small, large = estimate(job, micro_batch=64), estimate(job, micro_batch=256)
    assert large.parts.weights == small.parts.weights
    assert large.parts.activations == pytest.approx(4 * small.parts.activations, rel=0.25)


@pytest.mark.slow
def test_recomputing_keeps_less_and_half_precision_too() -> None:
    job = shared_job(JOB)
    sizes = {
        how: estimate(job, micro_batch=64, **how_options).allocated_bytes
        for how, how_options in {
            "fp32": {"precision": "fp32"},
            "bf16": {"precision": "bf16"},
            "full": {"precision": "bf16", "recompute": "full"},
            "selective": {"precision": "bf16", "recompute": "selective"},
        }.items()
    }
    assert sizes["full"] < sizes["selective"] < sizes["bf16"] < sizes["fp32"]


@pytest.mark.slow
def test_sharding_divides_what_a_rank_keeps() -> None:
    job = shared_job(JOB)
    one = estimate(job, precision="fp32")
    shard = estimate(job, "8xH100", precision="fp32", strategy="fsdp")
    copy = estimate(job, "8xH100", precision="fp32", strategy="ddp")
    assert shard.parts.optimizer == pytest.approx(one.parts.optimizer / 8, rel=0.1)
    # Gradients are views of the buckets that are summed: there is one copy of each.
    assert copy.parts.gradients == pytest.approx(one.parts.weights, rel=0.02)
    assert copy.parts.communication == copy.nccl_bytes > 0


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_second_question_is_answered_from_the_cache_and_a_changed_job_is_not(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    first = estimate(job)
    (entry,) = cache.TRACES.folder.glob("*-8.json")
    before = entry.stat().st_mtime_ns
    assert estimate(job) == first
    assert entry.stat().st_mtime_ns == before
    job_file(tmp_path, JOB.replace("1024", "512"))
    assert estimate(job).parts.weights < first.parts.weights
    entry.write_text("{", encoding="utf-8")
    job_file(tmp_path)
    assert estimate(job) == first


def test_a_class_and_an_instance_are_jobs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_job_module.py"
    file.write_text(JOB, encoding="utf-8")
    import own_job_module  # type: ignore[import-not-found]

    by_class = trimtab.estimate(own_job_module.Job, "H200", micro_batch=8)
    assert by_class == trimtab.estimate(f"{file}:Job", "H200", micro_batch=8)


DEVICE_QUESTIONS = """
import torch
from torch import nn


class Job:
    def model(self):
        net = nn.Linear(64, 64).cuda()
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_name() == "NVIDIA H200"
        assert torch.cuda.get_device_capability() == (9, 0)
        assert next(net.parameters()).is_cuda and next(net.parameters()).device.type == "cuda"
        return net

    def batch(self, size):
        return torch.randn(size, 64, device="cpu").to("cuda")

    def loss(self, model, batch):
        assert torch.is_autocast_enabled("cuda")
        out = model(batch)
        assert out.dtype == torch.bfloat16
        assert torch.softmax(out, -1).dtype == torch.float32
        return out.float().square().mean()
"""


def test_the_job_sees_the_target_device() -> None:
    notes = estimate(shared_job(DEVICE_QUESTIONS)).assumptions
    # So small a step waits for the host.
    assert [note for note in notes if "waits for the host" not in note] == []


DATA_DEPENDENT = """
import torch
from torch import nn


class Job:
    def model(self):
        return nn.Linear(64, 8)

    def batch(self, size):
        return torch.randn(size, 64), torch.randint(1, 33, (size,))

    def loss(self, model, batch):
        x, lengths = batch
        assert 1 <= int(lengths.max().item()) <= 32
        out = model(x)
        if out.mean().item() > 0:
            out = out * 2
        best = out.argmax(-1)
        picked = out[best == 3]
        rest = out[torch.nonzero(out[:, 0] > 0).squeeze(-1)]
        return picked.square().sum() + rest.square().mean()
"""


def test_what_depends_on_values_is_assumed_and_listed() -> None:
    found = estimate(shared_job(DATA_DEPENDENT), precision="fp32")
    assert any(".item()" in assumption for assumption in found.assumptions)
    assert any("half of the entries of a mask" in assumption for assumption in found.assumptions)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("def model(self):", "def mdel(self):"), r"it lacks model\(\)"),
        (("return Net()", "return 3"), "it returned a int"),
        (("return Net()", "return Nett()"), r"NameError: .*job.py, line 33"),
        (("import torch\n", "import torch, absent_package\n"), "needs the package 'absent_package'"),
        (("import torch\n", "import torch (\n"), r"SyntaxError: (?!.*\(job).*, line 2"),
        ((".flatten(0, 1), batch[1].flatten())", ".flatten(0, 1), batch[1])"), r"job.py, line 39"),
        (("return nn.functional.cross", "return 1.0; nn.functional.cross"), "a float"),
        (("nn.functional.cross_entropy(model", "model(batch[0]);(lambda *a: 0)(model"), r"shape.*mean\(\)"),
        (("torch.randn(size, 128, 256)", "torch.randn(size, 128, 250)"), r"RuntimeError: .*job.py"),
        (("model(batch[0])", "model(batch[0] + torch.ones(256))"), r"cuda:0 and cpu.*line 39.*device="),
        (("return torch.randn", "torch.randn"), r"batch\(8\): it returned None"),
    ],
)  # fmt: skip
def test_a_job_that_fails_is_told_where(change: tuple[str, str], found: str) -> None:
    assert change[0] in JOB
    with pytest.raises(JobFailed, match=found) as caught:
        estimate(shared_job(JOB.replace(*change)))
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"micro_batch": 0}, "it is below 1"),
        ({"precision": "fp7"}, "it is none of fp32, tf32, bf16, fp16, bf16-true"),
        ({"strategy": "fsdp"}, "there is one GPU"),
        ({"strategy": "pipeline"}, "there is one GPU"),
        ({"recompute": "some"}, "it is none of none, full, selective"),
    ],
)
def test_options_that_cannot_be_are_refused_before_tracing(options: dict[str, Any], found: str) -> None:
    with pytest.raises(WrongUse, match=found):
        estimate(shared_job(JOB), **options)


def test_bf16_is_refused_where_the_hardware_only_pretends() -> None:
    with pytest.raises(WrongUse, match=r"Tesla T4 does not compute in bf16\. Use --precision fp16"):
        trimtab.estimate(shared_job(JOB), "T4")


def test_a_job_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="has no Jobb; it has Job"):
        estimate(shared_job(JOB) + "b")
    with pytest.raises(WrongUse, match="no such file"):
        estimate(f"{tmp_path}/missing.py:Job")


def test_a_crash_in_the_tracing_process_is_an_error_message() -> None:
    text = JOB.replace("return Net()", "import os; os.abort()")
    with pytest.raises(JobFailed, match="ended with signal 6"):
        estimate(shared_job(text))


def test_deep_copies_of_tensors_stay_in_the_mode_they_were_made_in() -> None:
    # A copied mode gives torch's weak references to storages back twice, which corrupts the heap.
    text = JOB.replace("import torch\n", "import copy\nimport torch\n", 1).replace(
        "self.head = nn.Linear(256, 10)",
        "self.head = nn.Linear(256, 10)\n"
        "        table = torch.arange(8.0).clone()\n"
        "        assert copy.deepcopy(table).fake_mode is table.fake_mode\n"
        "        self.average = copy.deepcopy(self.blocks).requires_grad_(False)\n"
        "        assert not any(one.requires_grad for one in self.average.parameters())",
    )
    with_average = estimate(shared_job(text)).parts.weights
    alone = estimate(shared_job(JOB)).parts.weights
    assert 1.9 < with_average / alone < 2.1


@pytest.mark.slow
def test_the_two_frozen_models_at_full_depth_are_traced() -> None:
    text = """
    from trimtab.exams.jobs import Bridge


    class Job(Bridge):
        layers_a, layers_b = 32, 28
    """
    found = trimtab.estimate(shared_job(textwrap.dedent(text)), "H200", micro_batch=4)
    # Measured on an H200: 41.69 GiB.
    assert found.process_bytes / GIB == pytest.approx(41.69, rel=0.03)


def test_a_model_a_hundred_times_too_large_is_answered_without_memory() -> None:
    text = JOB.replace("nn.Linear(256, 10)", "nn.Linear(256, 2_000_000_000)").replace("0, 10,", "0, 100,")
    found = estimate(shared_job(text), micro_batch=1)
    assert found.fits is False
    assert found.process_bytes > 100 * 80 * GIB


@pytest.mark.usefixtures("own_cache")
def test_the_command_prints_a_verdict_and_json_has_the_contract() -> None:
    job = shared_job(JOB)
    done = trimtab_cli("estimate", job, "--on", "H200", "--micro-batch", "256")
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
    assert "--recompute full" in done.stdout
    # A path that ends in a number tells nobody what is meant.
    assert " (Block)  " in done.stdout
    # A path is never broken, however long the temporary folder's name is.
    assert all(len(line) <= 80 or job in line for line in done.stdout.splitlines())
    found = json.loads(trimtab_cli("estimate", job, "--on", "H200", "--micro-batch", "8", "--json").stdout)
    for key in ("allocated_bytes", "reserved_bytes", "process_bytes", "capacity_bytes", "fits", "band"):
        assert found[key] is not None
    assert (found["verdict"], found["verdict_reason"], found["releases_per_step"]) == ("fits", "", 0)
    assert found["allocated_bytes"] <= found["least_bytes"] <= found["process_bytes"]
    for key in ("step_s", "samples_per_s", "mfu", "assumptions"):
        assert key in found
    assert set(found["parts"]) == {*PARTS, "context"}
    classes = {one["name"]: one["class"] for one in found["peak"]["modules"]}
    assert "Block" in classes.values()
    assert all(name[-1].isdecimal() == (told is not None) for name, told in classes.items())


def test_where_no_class_can_be_told_the_path_stays() -> None:
    assert trimtab.api.module_classes("nowhere.py:Job", ["h.0.mlp"]) == {}
    assert trimtab.api.module_classes("nowhere.py:Job", ["0"]) == {}
    broken = shared_job(JOB.replace("return Net()", "raise OSError"))
    assert trimtab.api.module_classes(broken, ["0"]) == {}


def test_what_does_not_fit_leaves_with_exit_code_3() -> None:
    options = ("--on", "T4", "--micro-batch", "20000", "--precision", "fp16")
    done = trimtab_cli("estimate", shared_job(JOB), *options)
    assert done.returncode == 3
    assert "does not fit" in done.stdout


FEW = ["gpt-bf16-b16", "llama4-bf16true-b4", "lstm-bf16-b64", "fsdp16-gpt-fp32-b8"]


@pytest.mark.parametrize("name", FEW)
def test_recorded_cases_are_predicted_within_two_percent(name: str) -> None:
    (case,) = read_cases(name)
    found = predict_case(case)
    assert found.allocated_bytes == pytest.approx(case.measurement.allocated_bytes, rel=0.02)
    assert found.reserved_bytes == pytest.approx(case.measurement.reserved_bytes, rel=0.02)
    assert found.process_bytes == pytest.approx(case.measurement.process_bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.xdist_group("exam")
def test_the_whole_exam_does_not_get_worse() -> None:
    marks = run_exam()
    assert [case.case for case in marks.cases if case.failed] == []
    assert marks.median["allocated_bytes"] <= 0.001
    assert marks.median["reserved_bytes"] <= 0.005
    assert marks.median["process_bytes"] <= 0.005
    assert marks.median["step_s"] <= 0.05
    assert len(marks.cases) >= 50


def test_a_profiled_run_is_kept_as_a_case_and_sat_again(tmp_path: Path) -> None:
    device = trimtab.cluster("H200").devices[0]
    setting = make_setting(
        micro_batch=8, precision="bf16", recompute="none", compile=False, strategy="single", gpus=1,
        optimizer="fused", allocator="default",
    )  # fmt: skip
    request = make_request(shared_job(JOB), setting, device, options=None, clip=None)
    truth = estimate(shared_job(JOB))
    run = StepMeasurement(
        allocated_bytes=truth.allocated_bytes,
        reserved_bytes=2 * truth.reserved_bytes,
        step_s=0.001,
        device="NVIDIA H200",
        torch="2.11.0",
    )
    file = tmp_path / "cases.jsonl"
    append_case(make_case(request, run), file)
    (answer,) = run_exam(own=file).cases
    assert answer.error["allocated_bytes"] == 0
    assert answer.error["reserved_bytes"] == -0.5
    # The driver did not say what the process took.
    assert "process_bytes" not in answer.error
    with pytest.raises(WrongUse, match="cannot be read"):
        run_exam(own=tmp_path / "none.jsonl")
    with pytest.raises(WrongUse, match="cannot be written"):
        append_case(make_case(request, run), tmp_path / "none" / "cases.jsonl")
