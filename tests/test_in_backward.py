"""Weights that are updated in the backward pass, as soon as their gradients are complete."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import trimtab
from shared_jobs import shared_job
from test_layers import whole_and_few
from test_recompute_dial import JOB as DIAL
from test_recompute_dial import live_bytes
from test_run import Drill, far, network, samples, squared
from test_time import HOST, Even
from test_train_command import command
from test_ways_to_fit import Adapters, Whole
from trimtab.catalog.clusters import parse_cluster
from trimtab.engine.in_backward import InBackwardGradients
from trimtab.engine.in_backward_rules import find_in_backward_refusal, refuse_in_backward
from trimtab.engine.step import prepare_job, run_step
from trimtab.errors import JobFailed, NothingFits, WrongUse
from trimtab.planner.pins import find_contradictions, read_pins, read_ways
from trimtab.predict.memory import estimate_memory
from trimtab.predict.mix_recompute import RecomputeMix
from trimtab.predict.step_time import run_clocks
from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.spec import (
    BaseFormat,
    Mesh,
    Offload,
    OptimizerImplementation,
    OptimizerRule,
    Precision,
    Recompute,
    Setting,
    Strategy,
    Trace,
    Workload,
)
from trimtab.spec.trace import UPDATE_CALL
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.training.run import Run
from trimtab.training.task import divide_setting

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.spec import Incident

pytestmark = pytest.mark.xdist_group("in backward")  # its fixture is made once

IN_BACKWARD = Setting(micro_batch=4, global_batch=4, optimizer_in_backward=True)


# Training: the same numbers.


def train(job: Any, **changes: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    setting = Setting(micro_batch=4, global_batch=4, **changes)
    state = prepare_job(job, setting, "cpu")
    losses = [float(run_step(state, [job.batch(4)])) for _ in range(3)]
    return losses, [parameter.detach().clone() for parameter in state.parameters], state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "changes"),
    [
        (Whole(), {"recompute": Recompute.FULL, "optimizer": OptimizerImplementation.FOREACH}),
        (Whole(), {"optimizer_rule": OptimizerRule.ADAFACTOR, "offload": (Offload.ACTIVATIONS,)}),
        (Adapters(), {"base": BaseFormat.INT8_AO, "recompute": Recompute.EVERY_2}),
    ],
)
def test_losses_and_weights_are_the_same(job: Any, changes: dict[str, Any]) -> None:
    losses, weights, plain = train(job, **changes)
    other_losses, other_weights, state = train(job, **changes, optimizer_in_backward=True)
    assert other_losses == losses
    for weight, other in zip(weights, other_weights, strict=True):
        assert torch.equal(weight, other)
    # The state is that of the usual step, so checkpoints fit both.
    optimizers = [[named.optimizer for named in each.phases[0].optimizers] for each in (plain, state)]
    for optimizer, other_optimizer in zip(*optimizers, strict=True):
        saved, other_saved = optimizer.state_dict(), other_optimizer.state_dict()
        assert saved["param_groups"] == other_saved["param_groups"]
        assert str(sorted(saved["state"].items())) == str(sorted(other_saved["state"].items()))
    assert all(parameter.grad is None for parameter in state.parameters)


def test_gradients_never_exist_together() -> None:
    state = prepare_job(Whole(), IN_BACKWARD, "cpu")
    gradients = state.phases[0].gradients
    assert isinstance(gradients, InBackwardGradients)
    seen = []
    gradients.before_update = lambda _: seen.append(len(gradients.local_gradients()))
    run_step(state, [state.job.batch(4)])
    assert seen == [1] * len(state.parameters)


def test_a_schedule_changes_the_rate_of_the_next_step() -> None:
    for in_backward in (False, True):
        state = prepare_job(Whole(), IN_BACKWARD.replace(optimizer_in_backward=in_backward), "cpu")
        optimizer = state.phases[0].optimizers[0].optimizer
        optimizer.param_groups[0]["lr"] = 0.0
        before = [parameter.detach().clone() for parameter in state.parameters]
        run_step(state, [state.job.batch(4)])
        assert all(torch.equal(*pair) for pair in zip(before, state.parameters, strict=True))
        # Loading a state replaces the groups.
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        run_step(state, [state.job.batch(4)])
        assert not any(torch.equal(*pair) for pair in zip(before, state.parameters, strict=True))


# What does not go together.


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"strategy": Strategy.DDP, "mesh": Mesh(dp_replicate=2), "global_batch": 8}, "exchange gradients"),
        ({"strategy": Strategy.FSDP, "mesh": Mesh(dp_shard=2), "global_batch": 8}, "exchange gradients"),
        ({"accumulation": 2, "global_batch": 8}, "added up"),
        ({"precision": Precision.FP16}, "overflow"),
        ({"compile": True}, "compiled code"),
        ({"offload": (Offload.OPTIMIZER,)}, "on the CPU"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], found: str) -> None:
    setting = IN_BACKWARD.replace(**changes)
    refusal = find_in_backward_refusal(setting)
    assert refusal is not None
    assert found in refusal.found
    with pytest.raises(WrongUse, match="--optimizer-in-backward with strategy") as raised:
        refuse_in_backward(setting)
    assert "Leave --optimizer-in-backward out, or" in raised.value.cure
    assert find_in_backward_refusal(setting.replace(optimizer_in_backward=False)) is None


class Clipped(Whole):
    clip = 1.0


class Embeds(Whole):
    def embed(self, model: Any, batch: Any) -> Any:
        return model(batch)

    def loss_of(self, embeddings: Any) -> Any:
        return embeddings.sum()


def test_jobs_that_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"gradients clipped to 1 \(the job's clip\)"):
        prepare_job(Clipped(), IN_BACKWARD, "cpu")
    # No norm is above infinity, so nothing would be clipped.
    refuse_in_backward(IN_BACKWARD, Whole(), clip=math.inf)
    with pytest.raises(WrongUse, match=r"embed\(\) and loss_of\(\)"):
        prepare_job(Embeds(), IN_BACKWARD, "cpu")
    state = prepare_job(Whole(), IN_BACKWARD, "cpu")
    with pytest.raises(WrongUse, match=r"gradients clipped to 0.5 \(--clip\)"):
        run_step(state, [state.job.batch(4)], clip=0.5)
    with (
        Run(IN_BACKWARD.replace(micro_batch=10, global_batch=10)) as run,
        pytest.raises(WrongUse, match="clipped to 2"),
    ):
        run.prepare(network(), loss=squared, clip=2.0)


class Counting(torch.optim.SGD):
    """Keeps a number for all weights of a group together, as some optimizers without schedules do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Counts(Whole):
    def optimizer(self, parameters: Any) -> Any:
        return Counting(parameters, lr=0.1)


def test_an_optimizer_with_a_state_of_the_whole_group_is_refused() -> None:
    state = prepare_job(Counts(), IN_BACKWARD, "cpu")
    with pytest.raises(WrongUse, match="Counting") as raised:
        run_step(state, [state.job.batch(4)])
    assert "changes k of the whole parameter group" in raised.value.found


class Twice(nn.Module):
    """One weight in two blocks that are recomputed by nested backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        batch = batch.requires_grad_()
        for _ in range(2):
            batch = checkpoint(self.shared, batch, use_reentrant=True)
        return batch


class Nested(trimtab.Job):
    name = "nested"
    global_batch = 4

    def model(self) -> Any:
        return Twice()

    def batch(self, size: int) -> Any:
        return samples(size)

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch).square().mean()


def test_a_second_gradient_after_the_update_is_an_error() -> None:
    state = prepare_job(Nested(), IN_BACKWARD, "cpu")
    with pytest.raises(JobFailed, match="backward") as raised:
        run_step(state, [state.job.batch(4)])
    assert "use_reentrant=False" in raised.value.cure


# Steps that fail.


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def run_steps(
    *faults: tuple[str, int], in_backward: bool = True, seen: list[Incident] | None = None
) -> tuple[Any, list[Any]]:
    setting = Setting(micro_batch=10, global_batch=10, optimizer_in_backward=in_backward)
    listen = None if seen is None else seen.append
    with Run(setting, faults=Drill(*faults), listen=listen) as run:
        model, _ = run.prepare(network(), adam, loss=squared)
        return model, [run.step(samples(seed=number)) for number in range(3)]


def test_a_run_learns_the_same() -> None:
    model, outcomes = run_steps(in_backward=False)
    other, others = run_steps()
    assert far(other, [weight.detach() for weight in model.parameters()]) == 0
    assert [outcome.loss for outcome in others] == [outcome.loss for outcome in outcomes]
    norms = [outcome.grad_norm for outcome in outcomes]
    assert [outcome.grad_norm for outcome in others] == pytest.approx(norms)


def test_out_of_memory_before_the_first_update_repeats_the_step() -> None:
    seen: list[Incident] = []
    model, _ = run_steps(in_backward=False)
    other, others = run_steps(("forward", 1), seen=seen)
    # The first half of the samples leaves its gradients to the second.
    assert [outcome.parts for outcome in others] == [1, 2, 2]
    assert not any(outcome.rollback_needed for outcome in others)
    assert far(other, [weight.detach() for weight in model.parameters()]) < 1e-6
    assert [incident.kind.value for incident in seen] == ["out-of-memory"]


def test_out_of_memory_after_the_first_update_needs_a_checkpoint() -> None:
    seen: list[Incident] = []
    _, outcomes = run_steps(("backward", 1), seen=seen)
    assert [outcome.rollback_needed for outcome in outcomes] == [False, True, False]
    assert "halfway" in outcomes[1].skipped
    assert "goes back to the last checkpoint" in seen[1].done


def test_a_bad_loss_updates_nothing() -> None:
    setting = Setting(micro_batch=10, global_batch=10, optimizer_in_backward=True)
    with Run(setting) as run:
        model, _ = run.prepare(network(), adam, loss=squared)
        run.step(samples())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        outcome = run.step(samples() * math.nan)
        assert outcome.skipped == "the loss is nan"
        assert not outcome.rollback_needed
        assert far(model, before) == 0
        run.spike_limit = 1.0
        outcome = run.step(samples() * 1000)
        assert "above 1" in outcome.skipped
        assert far(model, before) == 0
        assert not run.step(samples()).skipped
        assert far(model, before) > 0


TRAINED = """
    import torch
    import trimtab

    class Root(torch.autograd.Function):
        '''Returns 0, and has a gradient that is not a number if a sample says so.'''

        @staticmethod
        def forward(ctx, given, marks):
            ctx.save_for_backward(marks)
            return given.sum() * 0

        @staticmethod
        def backward(ctx, gradient):
            (marks,) = ctx.saved_tensors
            return gradient * torch.where(marks.any(), torch.nan, 0.0).expand(8), None

    class Job(trimtab.Job):
        name = "small"
        global_batch = 4
        bad = -1

        def model(self):
            layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
            return torch.nn.Sequential(*layers)

        def dataset(self):
            torch.manual_seed(3)
            return [(torch.randn(8), number == self.bad) for number in range(24)]

        def batch(self, size):
            return [torch.randn(size, 8), torch.zeros(size, dtype=torch.bool)]

        def loss(self, model, batch):
            given, marks = batch
            out = model(given)
            return out.square().mean() + Root.apply(model[0].bias, marks)
"""


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run, "log.jsonl")]


def train_job(run: Path, *arguments: str, faults: Any = (), bad: int = -1) -> Path:
    file = run.with_suffix(".json")
    file.write_text(json.dumps(list(faults)), encoding="utf-8")
    words = ["train", shared_job(TRAINED), "--steps", "6", "--checkpoint-every", "2", *arguments]
    done = command(*words, "--out", run, "--faults", file, "--set", f"bad={bad}")
    assert done.code == 0, done.err
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(train_job(tmp_path_factory.mktemp("plain") / "run"))


def test_a_training_run_learns_the_same(tmp_path: Path, undisturbed: list[float]) -> None:
    run = train_job(tmp_path / "run", "--pin", "optimizer_in_backward=true")
    assert losses_of(run) == undisturbed
    assert (run / "checkpoints").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_out_of_memory_halfway_goes_back_to_a_checkpoint(
    tmp_path: Path, undisturbed: list[float], step: int
) -> None:
    """In the first step too: a checkpoint is saved before it."""
    fault = {"kind": "out-of-memory", "step": step, "point": "backward"}
    run = train_job(tmp_path / "run", "--pin", "optimizer_in_backward=true", faults=[fault])
    assert losses_of(run) == pytest.approx(undisturbed, rel=1e-6)
    events = read_lines(run, "events.jsonl")
    assert [event["kind"] for event in events] == ["out-of-memory", "out-of-memory", "resume"]
    assert "some weights had been updated" in events[1]["done"]
    assert f"goes on from step {2 * ((step - 1) // 2)}" in events[2]["done"]
    # The smaller micro-batch stays.
    assert {line["micro_batch"] for line in read_lines(run, "log.jsonl")[step - 1 :]} == {2}


def test_gradients_that_are_not_finite_are_undone_and_skipped(tmp_path: Path) -> None:
    pin = ("--pin", "optimizer_in_backward=true")
    runs = [train_job(tmp_path / name, *pins, bad=9) for name, pins in (("plain", ()), ("run", pin))]
    assert losses_of(runs[1]) == losses_of(runs[0])
    skipped = [[line.get("skipped") for line in read_lines(run, "log.jsonl")] for run in runs]
    assert skipped[1] == skipped[0]
    assert len([why for why in skipped[1] if why]) == 1
    events = read_lines(runs[1], "events.jsonl")
    assert "weights had been updated in the backward pass" in events[0]["why"]
    assert "its updates wait" in events[0]["done"]


def test_one_sample_that_never_fits_ends_the_run() -> None:
    setting = Setting(micro_batch=1, global_batch=1, optimizer_in_backward=True)
    with Run(setting, faults=Drill(*[("backward", 0)] * 9)) as run:
        run.prepare(network(), adam, loss=squared)
        for _ in range(3):
            assert run.step(samples(1)).rollback_needed
            # As after a checkpoint was loaded.
            run.load_state({"steps": 0})
        with pytest.raises(NothingFits, match="step 0") as raised:
            run.step(samples(1))
    assert "4 times" in raised.value.found


def test_a_run_on_other_devices_turns_it_off_visibly() -> None:
    setting, words = divide_setting(IN_BACKWARD, 2)
    assert not setting.optimizer_in_backward
    assert "optimizer not in backward any more (ranks exchange gradients" in words


# Prediction.


STACK = """
    import torch
    import trimtab

    class Job(trimtab.Job):
        name = "stack"
        global_batch = 4
        clip = None

        def model(self):
            return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)))

        def batch(self, size):
            return torch.randn(size, 1024)

        def loss(self, model, batch):
            return model(batch).square().mean()
"""
WEIGHT = 4 * 1024 * 1024


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Traces of the usual step, and of one with updates in the backward pass."""
    settings = IN_BACKWARD.replace(optimizer_in_backward=False), IN_BACKWARD
    device = parse_cluster("H200").devices[0]
    with WorkerProcess() as worker:
        answers = worker.ask_all(
            TraceRequests(job=shared_job(STACK), settings=settings, device=device), timeout_s=300
        )
    return [Trace.from_builtins(answer["trace"]) for answer in answers if isinstance(answer, dict)]


def test_the_peak_has_a_single_gradient(traces: list[Trace]) -> None:
    plain, found = (estimate_memory(trace) for trace in traces)
    # Six weights, two states of each, one gradient; then inputs and outputs of the layers, the gradient of
    # one of them, step counts of 512 bytes and numbers.
    known = 6 * WEIGHT + 12 * WEIGHT + WEIGHT + found.parts.workspace
    activations = (6 + 2) * 4 * 1024 * 4
    assert known < found.allocated_bytes <= known + activations + 20 * 512
    assert found.parts.gradients == WEIGHT
    assert plain.parts.gradients == 6 * WEIGHT
    saved = plain.allocated_bytes - found.allocated_bytes
    assert 5 * WEIGHT - activations < saved <= 5 * WEIGHT


def test_the_time_has_a_call_for_every_weight(traces: list[Trace]) -> None:
    plain, found = ([trace.works[number] for number in trace.sequence] for trace in traces)
    assert [work.op for work in found].count(UPDATE_CALL) == 6
    assert [work.op for work in plain].count(UPDATE_CALL) == 0
    updates = [[work for work in works if work.kind == "optimizer"] for works in (plain, found)]
    # One kernel counts the steps, one updates.
    assert [work.dims[0] for work in updates[0]] == [6] * 2
    assert [work.dims[0] for work in updates[1]] == [1] * 12
    moved = [sum(work.read_bytes + work.write_bytes for work in works) for works in updates]
    assert moved[0] == moved[1]
    # The host reads the loss once.
    assert [work.kind for work in found].count("wait") == [work.kind for work in plain].count("wait") + 1
    # All of it is in the backward pass.
    assert not [work for work in found[traces[1].phases["optimizer"] :] if work.kernels]
    host_s = []
    for works, trace in zip((plain, found), traces, strict=True):
        backward = range(trace.phases["backward"], trace.phases["optimizer"])
        host_s.append(run_clocks(works, Even(), HOST, backward=backward).host_s)  # type: ignore[arg-type]
    # Ten kernels more, six calls, and the wait.
    assert host_s[1] - host_s[0] == pytest.approx(10 * HOST.forward_s + 6 * HOST.update_s + HOST.wait_s)


@pytest.mark.slow
def test_partial_recomputation_follows_from_none_and_full(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(DIAL, encoding="utf-8")
    ways = (Recompute.NONE, Recompute.FULL, Recompute.EVERY_2)
    settings = tuple(
        IN_BACKWARD.replace(micro_batch=8, global_batch=8, precision=Precision.BF16, recompute=way)
        for way in ways
    )
    asked = TraceRequests(job=f"{file}:Dial", settings=settings, device=parse_cluster("H100").devices[0])
    with WorkerProcess() as worker:
        answers = worker.ask_all(asked, timeout_s=300)
    none, full, some = (Trace.from_builtins(each["trace"]) for each in answers if isinstance(each, dict))
    assert live_bytes(RecomputeMix(none, full).mix(Recompute.EVERY_2.way)) == live_bytes(some)


@pytest.mark.slow
def test_few_blocks_give_the_trace_of_all(tmp_path: Path) -> None:
    setting = Setting(micro_batch=2, global_batch=2, precision=Precision.BF16, optimizer_in_backward=True)
    whole, few = whole_and_few(tmp_path, "Job", setting, clip=None)
    assert estimate_memory(few) == estimate_memory(whole)


def test_the_command_line_refuses_what_does_not_work() -> None:
    with pytest.raises(WrongUse, match="--optimizer-in-backward with strategy single"):
        trimtab.estimate(shared_job(STACK), "H200", optimizer_in_backward=True, compile=True)


# Plans.


WORKLOAD = Workload(name="job", global_batch=8)


def test_pins_that_contradict_it() -> None:
    pins = read_pins(["optimizer-in-backward=yes"])
    assert read_ways(pins) == {"optimizer_in_backward": True}
    assert not find_contradictions(pins, WORKLOAD, 4)
    for pin in (
        "gpus=2",
        "strategy=fsdp",
        "compile=true",
        "precision=fp16",
        "accumulation=2",
        "micro_batch=4",
    ):
        wrong = find_contradictions(pins | read_pins([pin]), WORKLOAD, 4)
        assert "optimizer_in_backward=true" in wrong[0][0], pin
    assert not find_contradictions(read_pins(["optimizer_in_backward=off", "gpus=2"]), WORKLOAD, 4)


BIG = """
    import torch
    import trimtab

    class Job(trimtab.Job):
        name = "big"
        global_batch = 2

        def model(self):
            return torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(14)))

        def batch(self, size):
            return torch.randn(size, 8192)

        def loss(self, model, batch):
            return model(batch).square().mean()
"""


@pytest.mark.slow
def test_a_plan_says_what_it_would_buy_and_uses_it_if_allowed() -> None:
    """14 weights of 256 MiB: with states 10.5 GiB, with gradients too much for a T4."""
    job = shared_job(BIG)
    fits = trimtab.plan(job, on="RTX3090")
    (row,) = [row for row in fits.what_if if row.change.startswith("optimizer in backward")]
    assert "--pin optimizer_in_backward=true" in row.change
    assert " instead of " in row.why
    assert row.estimate is not None
    assert row.setting is not None
    # Not 3.5 GiB: autocast's copies of the weights are freed when the last gradients come.
    assert row.estimate.process_bytes < fits.estimate.process_bytes - 1.4 * 2**30
    assert row.setting.optimizer_in_backward
    assert not row.setting.compile
    pins = {"precision": "fp32", "optimizer": "adamw"}
    with pytest.raises(NothingFits) as raised:
        trimtab.plan(job, on="T4", pins=pins)
    assert "--pin optimizer_in_backward=true" in str(raised.value)
    plan = trimtab.plan(job, on="T4", pins=pins, allow="optimizer")
    assert plan.choice.optimizer_in_backward
    assert plan.choice.accumulation == 1
    (reason,) = [reason for reason in plan.reasons if reason.subject == "optimizer_in_backward"]
    assert "--allow optimizer" in reason.why


# Scripts.


SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6))).cuda()
if "--shared" in sys.argv:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-3, "fused": True})
    step = lambda: None
elif "--hooks" in sys.argv:
    optimizers = {weight: torch.optim.AdamW([weight], lr=1e-3, fused=True) for weight in model.parameters()}

    def update(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    step = lambda: None
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        optimizer.step()
        optimizer.zero_grad()

for _ in range(8):
    model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
    step()
"""


@pytest.mark.parametrize("flag", ["--hooks", pytest.param("--shared", marks=pytest.mark.slow)])
def test_a_script_with_hooks_is_followed(
    flag: str, traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    parsed = parse_command([sys.executable, "train.py", flag], environment=os.environ)
    found = estimate_script(parsed, as_cluster("H200"))
    # As for the job above, which has the same weights.
    expected = estimate_memory(traces[1])
    assert found.estimate.parts.gradients == WEIGHT
    assert found.estimate.parts.optimizer == expected.parts.optimizer
    assert abs(found.estimate.allocated_bytes - expected.allocated_bytes) < 2**15
    facts = {fact.name: fact for fact in found.script.found}
    assert facts["optimizer_in_backward"].value == "true"
    assert "a hook of a parameter" in facts["optimizer_in_backward"].where
    assert ("train.py:" in facts["optimizer_in_backward"].where) is (flag == "--hooks")
    assert facts["optimizers"].value == "6 x AdamW"
    assert facts["accumulation"].value == "1"
    assert found.setting.optimizer_in_backward
    assert [found.trace.works[number].op for number in found.trace.sequence].count(UPDATE_CALL) == 6


@pytest.mark.slow
def test_a_script_without_hooks_is_described_as_before(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    parsed = parse_command([sys.executable, "train.py"], environment=os.environ)
    found = estimate_script(parsed, as_cluster("H200"))
    assert found.estimate.allocated_bytes == estimate_memory(traces[0]).allocated_bytes
    assert "optimizer_in_backward" not in {fact.name for fact in found.script.found}
