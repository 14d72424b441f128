"""`trimtab doctor` beside a plan: a slow step is in a bucket, or in several that it names; never a guess."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import run_samples
import trimtab
from test_cli import trimtab_cli
from trimtab.diagnosis.step_times import NAMES, TESTS
from trimtab.errors import WrongUse
from trimtab.spec import GpuReading, Plan, Severity, StepTime
from trimtab.training.device_gauge import INTERVAL_S, DeviceGauge, count_compiled_graphs
from trimtab.training.step_log import StepLine

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.diagnosis.findings import Diagnosed, Diagnosis

PREDICTED_S = 0.5


def plan_of(*, gpus: int = 1, compile: bool = False, accumulation: int = 4) -> Plan:  # noqa: A002
    plan = run_samples.plan()
    times = StepTime(compute_s=0.36, memory_s=0.1, launch_s=0.02, communication_s=0.02)
    choice = run_samples.setting(gpus, 8, accumulation).replace(compile=compile, workers=2)
    return plan.replace(choice=choice, estimate=plan.estimate.replace(step_s=PREDICTED_S, step_time=times))


def run_of(root: Path, plan: Plan | None = None, **changes: Any) -> Path:
    """A run of 40 steps; a change may be a function of the step."""
    plan = plan or plan_of()
    assert plan.workload is not None
    done = plan.replace(workload=plan.workload.replace(samples=40 * plan.choice.global_batch))
    folder = run_samples.run(root, steps=40, of=done, events=())

    def value(of: Any, step: int) -> Any:
        return of(step) if callable(of) else of

    changes = {"validation_loss": None, "gpus": plan.choice.gpus} | changes
    lines = [
        run_samples.line(step, **{name: value(of, step) for name, of in changes.items()})
        for step in range(1, 41)
    ]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return folder


def about_steps(found: Diagnosis) -> list[Diagnosed]:
    return [
        finding
        for finding in found.findings
        if finding.kind and finding.kind.startswith(("slow-", "step-", "waits-for-data"))
    ]


def only(found: Diagnosis) -> Diagnosed:
    (finding,) = about_steps(found)
    return finding


def test_a_loader_that_is_waited_for_is_named_with_its_seconds(tmp_path: Path) -> None:
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=0.9, data_wait_s=0.38)))
    assert finding.kind == "slow-loader"
    assert finding.severity is Severity.WARNING
    assert "takes 0.900s and was predicted to take 0.500s" in finding.what
    assert "Of the 0.400s more, 0.380s are waiting for data" in finding.what
    assert "waited 0.380s a step for data (2 loader workers in the plan)" in finding.cause
    assert finding.file == str(tmp_path / "log.jsonl")


def test_a_low_clock_is_named_with_the_drivers_reason(tmp_path: Path) -> None:
    gauge: dict[str, Any] = {
        "clock_hz": 1.0e9,
        "top_clock_hz": 2.0e9,
        "throttles": ["power brake"],
    }
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=0.9, **gauge)))
    assert finding.kind == "slow-clock"
    assert "50% of its highest clock: power brake" in finding.cause


def test_an_idle_gpu_with_data_waits_for_launches(tmp_path: Path) -> None:
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=1.0, gpu_busy=0.45)))
    assert finding.kind == "slow-launches"
    assert "ran nothing for 0.550s" in finding.cause


def test_graphs_that_are_compiled_late_are_recompilation(tmp_path: Path) -> None:
    folder = run_of(tmp_path, plan_of(compile=True), time_s=0.8, compiled_graphs=lambda step: 1 + step // 4)
    finding = only(trimtab.doctor(folder))
    assert finding.kind == "slow-recompiling"
    assert "compiled 5 more graphs" in finding.cause


def test_two_buckets_are_both_named_the_larger_first(tmp_path: Path) -> None:
    slow: dict[str, Any] = {"clock_hz": 1.5e9, "top_clock_hz": 2.0e9, "throttles": ["power cap"]}
    findings = about_steps(trimtab.doctor(run_of(tmp_path, time_s=1.0, data_wait_s=0.3, **slow)))
    assert [finding.kind for finding in findings] == ["slow-loader", "slow-clock"]


def test_what_nothing_decides_lists_what_is_left_and_how_to_tell(tmp_path: Path) -> None:
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=0.8)))
    assert finding.kind == "slow-step"
    for kind in ("slow-launches", "slow-clock"):
        assert NAMES[kind] in finding.what
        assert TESTS[kind] in finding.cure
    # One GPU, eager, no offload, and 2 ms of waiting rule out the others.
    for kind in ("slow-loader", "slow-communication", "slow-offload", "slow-recompiling"):
        assert NAMES[kind] not in finding.what
        assert NAMES[kind] in finding.cause


def test_several_gpus_may_wait_for_each_other(tmp_path: Path) -> None:
    finding = only(trimtab.doctor(run_of(tmp_path, plan_of(gpus=2, accumulation=2), time_s=0.8)))
    assert finding.kind == "slow-step"
    assert NAMES["slow-communication"] in finding.what
    assert "run on one GPU" in finding.cure


def test_if_all_is_ruled_out_the_prediction_is_in_doubt(tmp_path: Path) -> None:
    gauge: dict[str, Any] = {"clock_hz": 2.0e9, "top_clock_hz": 2.0e9, "gpu_busy": 0.99}
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=0.8, **gauge)))
    assert "the prediction itself may be off" in finding.what
    assert "trimtab calibrate" in finding.cure


def test_little_evidence_does_not_decide(tmp_path: Path) -> None:
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=1.0, data_wait_s=0.1)))
    assert finding.kind == "slow-step"
    assert "waited 0.100s" in finding.cause
    assert "less than half" in finding.cause


def test_a_smaller_micro_batch_than_planned_is_said(tmp_path: Path) -> None:
    finding = only(trimtab.doctor(run_of(tmp_path, time_s=0.8, micro_batch=4)))
    assert "micro-batch 4 in place of 8" in finding.cause


@pytest.mark.parametrize(("time_s", "words"), [(0.55, "as predicted"), (0.3, "faster than predicted")])
def test_a_step_as_predicted_is_no_fault(tmp_path: Path, time_s: float, words: str) -> None:
    found = trimtab.doctor(run_of(tmp_path, time_s=time_s))
    finding = only(found)
    assert (finding.kind, finding.severity) == ("step-as-predicted", Severity.INFO)
    assert words in finding.cause
    assert found.exit_code == 0


def test_steps_that_were_repeated_skipped_or_evaluated_do_not_count(tmp_path: Path) -> None:
    folder = run_of(
        tmp_path,
        time_s=lambda step: 0.5 if step % 4 == 0 else 9.0,
        attempts=lambda step: 3 if step % 4 == 1 else 1,
        skipped=lambda step: "bad loss" if step % 4 == 2 else None,
        validation_loss=lambda step: 1.0 if step % 4 == 3 else None,
    )
    assert only(trimtab.doctor(folder)).kind == "step-as-predicted"


def test_another_number_of_gpus_is_not_compared_and_said(tmp_path: Path) -> None:
    found = trimtab.doctor(run_of(tmp_path, time_s=5.0, gpus=3))
    assert about_steps(found) == []
    assert any("1 GPUs and the run has 3 processes" in note for note in found.notes)


def test_a_plan_without_a_time_is_said(tmp_path: Path) -> None:
    plan = plan_of()
    plan = plan.replace(estimate=plan.estimate.replace(step_s=None, step_time=None))
    folder = run_of(tmp_path, plan, time_s=5.0)
    # A run on a CPU has no prediction, and nobody asked for a comparison.
    assert about_steps(trimtab.doctor(folder)) == []
    assert trimtab.doctor(folder).notes == ()
    found = trimtab.doctor(folder, plan=folder / "plan.json")
    assert any("predicts no step time" in note for note in found.notes)


def nanogpt(ms: float) -> str:
    return "".join(f"iter {step}: loss 3.1, time {ms:.2f}ms, mfu 31.20%\n" for step in range(12))


def own(ms: float, wait: float) -> str:
    return "".join(
        f"iter {step}: loss 3.1, time {ms:.2f}ms, mfu 31.20%, 60 samples/s, data wait {wait:.1f}ms\n"
        for step in range(12)
    )


def litgpt(ms: float) -> str:
    return "".join(
        f"Epoch 1 | iter {step} step {step // 4} | loss train: 2.1 | iter time: {ms:.2f} ms (step)\n"
        for step in range(12)
    )


TRAINER = "{'train_runtime': 80.2, 'train_samples_per_second': 40.0, 'train_steps_per_second': 1.25}\n"
LIGHTNING = "Epoch 0: 100%|####| 400/400 [01:20<00:00,  5.00it/s, v_num=3, loss=2.1]\n"
DEEPSPEED = "[2026-11-16] [INFO] [timer.py:264:stop] RunningAvgSamplesPerSec=40.0, MemAllocated=1GB\n"


@pytest.mark.parametrize(
    ("text", "kind", "measured"),
    [
        (nanogpt(510), "step-as-predicted", "0.510s"),
        (nanogpt(800), "slow-step", "0.800s"),
        (own(900, 380), "slow-loader", "0.900s"),
        (litgpt(200), "slow-step", "0.800s"),
        (litgpt(125), "step-as-predicted", "0.500s"),
        (TRAINER, "slow-step", "0.800s"),
        (LIGHTNING, "slow-step", "0.800s"),
        (LIGHTNING.replace("5.00it/s", "0.20s/it"), "slow-step", "0.800s"),
        (DEEPSPEED, "slow-step", "0.800s"),
    ],
)
def test_logs_of_other_trainers_are_compared_with_a_named_plan(
    tmp_path: Path, text: str, kind: str, measured: str
) -> None:
    log, plan = tmp_path / "train.log", tmp_path / "plan.json"
    log.write_text(text, encoding="utf-8")
    plan.write_text(plan_of().to_json(), encoding="utf-8")
    finding = only(trimtab.doctor(log, plan=plan))
    assert finding.kind == kind
    assert measured in finding.what
    # Without the plan there is nothing to compare with.
    assert [finding.kind for finding in about_steps(trimtab.doctor(log))] in ([], ["waits-for-data"])


def table(nccl: str, copies: str, cuda: str, cpu: str = "2.400s") -> str:
    """A table of torch.profiler of three steps, cut to the rows that matter."""
    row = "{:>40}  1.00%  10.000ms  1.00%  10.000ms  10.000us  {:>10}  30.00%  {:>10}  1.000ms  {:>8}\n"
    return (
        row.format("ProfilerStep*", "0.000us", "2.400s", 3)
        + row.format("aten::mm", "900.000ms", "900.000ms", 300)
        + row.format("ncclDevKernel_AllReduce_Sum_f32_RING...", nccl, nccl, 12)
        + row.format("Memcpy HtoD (Pinned -> Device)", copies, copies, 12)
        + f"Self CPU time total: {cpu}\nSelf CUDA time total: {cuda}\n"
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (table("900.000ms", "1.000ms", "2.400s"), "slow-communication"),
        (table("1.000ms", "900.000ms", "2.400s"), "slow-offload"),
        (table("1.000ms", "1.000ms", "1.300s"), "slow-launches"),
        # Computing takes all of the step, so NCCL and copies are hidden behind it.
        (table("900.000ms", "1.000ms", "3.300s"), "slow-step"),
    ],
)
def test_a_table_of_the_profiler_names_the_bucket(tmp_path: Path, text: str, kind: str) -> None:
    log, plan = tmp_path / "profile.txt", tmp_path / "plan.json"
    log.write_text(text, encoding="utf-8")
    plan.write_text(plan_of(gpus=2, accumulation=2).to_json(), encoding="utf-8")
    finding = only(trimtab.doctor(log, plan=plan))
    assert finding.kind == kind
    assert "0.800s" in finding.what
    assert "under torch.profiler" in finding.evidence


def test_lines_of_recompilation_and_offload_are_evidence(tmp_path: Path) -> None:
    log, plan = tmp_path / "train.log", tmp_path / "plan.json"
    plan.write_text(plan_of(compile=True).to_json(), encoding="utf-8")
    lines = "V1116 dynamo/guards.py:2813] [0/1] [__recompiles] Recompiling function forward in a.py:3\n"
    log.write_text(nanogpt(800) + lines * 4, encoding="utf-8")
    assert only(trimtab.doctor(log, plan=plan)).kind == "slow-recompiling"
    plan.write_text(plan_of().to_json(), encoding="utf-8")
    created = "Adam Optimizer #0 is created with AVX512 arithmetic capability.\n"
    log.write_text(created + nanogpt(800), encoding="utf-8")
    assert NAMES["slow-offload"] in only(trimtab.doctor(log, plan=plan)).what


def test_a_log_without_times_is_said_and_a_bad_plan_refused(tmp_path: Path) -> None:
    log, plan = tmp_path / "train.log", tmp_path / "plan.json"
    log.write_text("epoch 1 done\n", encoding="utf-8")
    plan.write_text(plan_of().to_json(), encoding="utf-8")
    found = trimtab.doctor(log, plan=plan)
    assert any("no step time was found" in note for note in found.notes)
    with pytest.raises(WrongUse, match="cannot be read"):
        trimtab.doctor(log, plan=tmp_path / "none.json")
    plan.write_text("{}", encoding="utf-8")
    with pytest.raises(WrongUse, match="--plan"):
        trimtab.doctor(log, plan=plan)
    with pytest.raises(WrongUse, match="no log is given"):
        trimtab.doctor(plan=plan)


def test_the_plan_of_the_command_line_wins_over_the_folders(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", time_s=0.5)
    plan = plan_of()
    faster = plan.replace(estimate=plan.estimate.replace(step_s=0.2))
    (tmp_path / "plan.json").write_text(faster.to_json(), encoding="utf-8")
    done = trimtab_cli("doctor", str(folder), "--plan", str(tmp_path / "plan.json"), "--json")
    assert done.returncode == 0, done.stderr
    kinds = [finding["kind"] for finding in json.loads(done.stdout)["findings"]]
    assert "slow-step" in kinds


def gauge_of(**changes: Any) -> GpuReading:
    values: dict[str, Any] = {"key": "gpu0", "index": 0, "uuid": "GPU-12ab", "clock_hz": 1e9}
    return GpuReading(**values | {"top_clock_hz": 2e9, "busy": 0.5, "throttles": ("power cap",)} | changes)


def test_the_clock_is_read_seldom_and_only_of_the_own_gpu() -> None:
    asked: list[int] = []
    clock = [0.0]

    def read_all() -> tuple[GpuReading, ...]:
        asked.append(1)
        return (gauge_of(uuid="GPU-other", clock_hz=5.0), gauge_of())

    gauge = DeviceGauge("12ab", read_all, now=lambda: clock[0])
    first = gauge.read_fields()
    assert first == {"clock_hz": 1e9, "top_clock_hz": 2e9, "gpu_busy": 0.5, "throttles": ("power cap",)}
    assert gauge.read_fields() == first
    assert len(asked) == 1
    clock[0] = INTERVAL_S
    gauge.read_fields()
    assert len(asked) == 2
    line = run_samples.line(1, **first)
    assert StepLine.from_builtins(json.loads(json.dumps(line))).throttles == ("power cap",)


@pytest.mark.parametrize("uuid", [None, "ffff"])
def test_without_such_a_gpu_the_log_has_no_clock(uuid: str | None) -> None:
    assert DeviceGauge(uuid, lambda: (gauge_of(),)).read_fields() == {}


def test_a_driver_that_fails_does_not_fail_the_run() -> None:
    def broken() -> tuple[GpuReading, ...]:
        raise OSError("driver gone")

    assert DeviceGauge("12ab", broken).read_fields() == {}


def test_compiled_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch._dynamo.utils import counters

    assert torch.__version__
    monkeypatch.setitem(counters["stats"], "unique_graphs", 7)
    assert count_compiled_graphs() == 7
    monkeypatch.setitem(counters["stats"], "unique_graphs", 0)
    assert count_compiled_graphs() is None
