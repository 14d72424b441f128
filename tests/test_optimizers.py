"""Jobs with several optimizers: by parameter name, with losses of their own, and at their own frequency."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from shared_jobs import shared_job
from trimtab.engine.optimizer import make_optimizer
from trimtab.engine.step import prepare_job
from trimtab.errors import JobFailed, WrongUse
from trimtab.jobs.load import load_job
from trimtab.jobs.optimizers import OptimizerPart, collect_losses, read_optimizers
from trimtab.spec import Mesh, OptimizerImplementation, Precision, Setting, Strategy
from trimtab.training.run import Run
from worlds import everywhere

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = 8
STEPS = 5

pytestmark = pytest.mark.usefixtures("doubles")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, batch: torch.Tensor) -> Any:
        return batch + self.down(torch.tanh(self.up(batch)))


def tower(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), *[Block(8) for _ in range(2)], nn.Linear(8, outputs))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = tower(4, 2)
        self.discriminator = tower(2, 1)


class Gan(trimtab.Job):
    """The generator updates in every second step."""

    global_batch = WHOLE
    every = 2

    def model(self) -> Any:
        torch.manual_seed(0)
        return TwoTowers()

    def batch(self, size: int) -> Any:
        return data(0, size)

    def discriminator_loss(self, model: Any, batch: Any) -> Any:
        real = model.discriminator(batch["real"])
        fake = model.discriminator(model.generator(batch["noise"]))
        return functional.softplus(-real).mean() + functional.softplus(fake).mean()

    def generator_loss(self, model: Any, batch: Any) -> Any:
        return functional.softplus(-model.discriminator(model.generator(batch["noise"]))).mean()

    def optimizers(self, named_parameters: Any) -> Any:
        halves = split_by_name(named_parameters, lambda name: name.startswith("discriminator."))
        return {
            "discriminator": OptimizerPart(
                torch.optim.AdamW(halves[True], lr=0.01), loss=self.discriminator_loss, schedule=decay
            ),
            "generator": OptimizerPart(
                torch.optim.SGD(halves[False], lr=0.1, momentum=0.9),
                loss=self.generator_loss,
                every=self.every,
            ),
        }


class Muons(Gan):
    """Muon for the matrices of blocks, AdamW for the rest; one loss."""

    clip = 0.5

    def model(self) -> Any:
        torch.manual_seed(0)
        return tower(2, 1)

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch["real"]).squeeze(1) - batch["real"].prod(1)).square().mean()

    def optimizers(self, named_parameters: Any) -> Any:
        halves = split_by_name(named_parameters, lambda name: name.endswith(("up.weight", "down.weight")))
        return [torch.optim.Muon(halves[True], lr=0.02), torch.optim.AdamW(halves[False], lr=0.01)]


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)


def split_by_name(named_parameters: Any, rule: Any) -> dict[bool, list[Any]]:
    halves: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named_parameters:
        halves[bool(rule(name))].append(parameter)
    return halves


def data(step: int, count: int = WHOLE) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    dtype = torch.get_default_dtype()
    return {
        "real": torch.randn(count, 2, generator=made, dtype=dtype) + 1,
        "noise": torch.randn(count, 4, generator=made, dtype=dtype),
    }


Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def expected(job: Any) -> Result:
    """The same training as people write it, with the whole batch."""
    model = job.model()
    parts = read_optimizers(job, list(model.named_parameters()))
    schedules = {name: part.schedule(part.optimizer) for name, part in parts.items() if part.schedule}
    losses: list[dict[str, float]] = []
    for step in range(STEPS):
        losses.append({})
        for name, part in parts.items():
            if (step + 1) % part.every == 0:
                model.zero_grad()
                loss = (part.loss or job.loss)(model, data(step))
                loss.backward()
                part.optimizer.step()
                losses[-1][name] = loss.item()
                if name in schedules:
                    schedules[name].step()
    return losses, weights_of(model)


class CountingDrill:
    """Runs out of memory, or gives NaN, at given calls of a point on a rank; calls count from 0."""

    def __init__(self, point: str, rank: int, *calls: int) -> None:
        self.point, self.rank, self.calls = point, rank, calls
        self.seen = 0

    def at(self, point: str, step: int, rank: int) -> Any:  # noqa: ARG002
        if (point, rank) != (self.point, self.rank):
            return None
        self.seen += 1
        if self.seen - 1 not in self.calls:
            return None
        if point == "gradient":
            return "nan"
        raise torch.OutOfMemoryError("a drill")


def trained(setting: Setting, job: Any, drill: Any = None) -> Result:
    """Losses and weights of a run on the ranks that there are."""
    if setting.gpus > 1:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    with Run(setting, job=job, faults=drill, join_s=60) as run:
        model, _ = run.prepare()
        share = WHOLE // run.groups.data_parallel
        start = share * run.groups.data_rank
        outcomes = []
        for step in range(STEPS):
            batch = {name: value[start : start + share] for name, value in data(step).items()}
            outcomes.append(run.step(batch))
        assert not any(outcome.skipped for outcome in outcomes)
        assert run.steps == STEPS
        return [outcome.losses or {"loss": outcome.loss} for outcome in outcomes], weights_of(model)


def assert_close(result: Result, reference: Result, within: float = 1e-12) -> None:
    for losses, others in zip(result[0], reference[0], strict=True):
        assert losses == pytest.approx(others, rel=within)
    for name, weight in reference[1].items():
        assert (result[1][name] - weight).abs().max().item() < within, name


def alone(micro: int, **others: Any) -> Setting:
    return Setting(micro_batch=micro, accumulation=WHOLE // micro, global_batch=WHOLE, **others)


def ddp(size: int, micro: int) -> Setting:
    return Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=size), micro_batch=micro,
        accumulation=WHOLE // (micro * size), global_batch=WHOLE,
    )  # fmt: skip


def fsdp(size: int, micro: int) -> Setting:
    return ddp(size, micro).replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=size))


# --- losses in turn ---


@pytest.mark.parametrize("micro", [8, 4, 1])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_losses_in_turn_are_those_of_a_plain_loop(micro: int, every: int) -> None:
    job = Gan()
    job.every = every
    assert_close(trained(alone(micro), job), expected(job))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "backward", "gradient", "optimizer"])
@pytest.mark.parametrize("call", [0, 3, 5])
def test_a_fault_in_any_of_the_losses_changes_nothing(point: str, call: int) -> None:
    drill = CountingDrill(point, 0, call)
    assert_close(trained(alone(4), Gan(), drill), expected(Gan()))
    assert drill.seen > call


def losses_on_ranks(size: int) -> list[Result]:
    """Under ddp and fsdp, calm and with a rank that runs out of memory in the first and the second loss."""
    torch.set_default_dtype(torch.float64)
    results = []
    for make in (ddp, fsdp):
        results.append(trained(make(size, 2), Gan()))
        passes = 2 * WHOLE // (2 * size)
        for point in ("forward", "backward"):
            drill = CountingDrill(point, size - 1, passes // 2, passes + passes // 2)
            results.append(trained(make(size, 2), Gan(), drill))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_in_turn_are_the_same_on_every_number_of_ranks(size: int) -> None:
    for results in everywhere(size, losses_on_ranks, size):
        for result in results:
            assert_close(result, expected(Gan()))


def test_a_bad_second_loss_is_skipped_alone_and_says_so() -> None:
    class Bad(Gan):
        every = 1

        def generator_loss(self, model: Any, batch: Any) -> Any:
            return super().generator_loss(model, batch) * float("nan")

    with Run(alone(8), job=Bad()) as run:
        model, _ = run.prepare()
        before = weights_of(model)
        outcome = run.step(data(0))
        after = weights_of(model)
        assert run.steps == 1
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert outcome.skipped == "generator: the loss is nan (discriminator had been updated before)"
    changed = {name.split(".")[0] for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"discriminator"}


def test_own_loops_and_settings_that_cannot_take_turns_are_refused() -> None:
    with Run(alone(8), job=Gan()) as run:
        run.prepare()
        with pytest.raises(WrongUse, match="several losses, which a step computes in turn"):
            run.parts(data(0))
    with pytest.raises(WrongUse, match="does not run with compile"):
        prepare_job(Gan(), alone(8, compile=True, precision=Precision.FP32), "cpu")
    staged = Setting(
        strategy=Strategy.PIPELINE, mesh=Mesh(pp=2), micro_batch=4, accumulation=2, global_batch=8
    )
    with pytest.raises(WrongUse, match=r"the job has optimizers\(\), and a rank would hold only a part"):
        prepare_job(Gan(), staged, "cpu")


# --- one loss, several optimizers ---


def test_muon_and_adamw_are_those_of_a_plain_loop_and_clip_the_whole_gradient() -> None:
    job = Muons()
    model = job.model()
    muon, adamw = (part.optimizer for part in read_optimizers(job, list(model.named_parameters())).values())
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        loss = job.loss(model, data(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        muon.step()
        adamw.step()
        losses.append({"loss": loss.item()})
    assert_close(trained(alone(8), job), (losses, weights_of(model)))
    # Muon rounds gradients to bf16, so that another order of a sum may show.
    assert_close(trained(alone(2), job), (losses, weights_of(model)), within=0.02)


def muons_on_ranks(size: int) -> list[Result]:
    torch.set_default_dtype(torch.float64)
    return [trained(make(size, 2), Muons()) for make in (ddp, fsdp)]


@pytest.mark.slow
def test_muon_on_two_ranks_differs_by_its_rounding_only() -> None:
    alone_result = trained(alone(4), Muons())
    ranks = everywhere(2, muons_on_ranks, 2)
    for results in ranks:
        for result in results:
            assert_close(result, alone_result, within=0.02)
    # All ranks have the same weights.
    for first, second in zip(*ranks, strict=True):
        assert_close(first, second, within=1e-15)


# --- what optimizers() may return ---


HINGE: Any = "hinge"


def one_parameter() -> Any:
    return [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda _: [], "it returned no optimizer"),
        (lambda _: {"main": "adam"}, "main is a str, not an optimizer"),
        (lambda ps: OptimizerPart(torch.optim.SGD(ps), every=0), "every of sgd is 0"),
        (lambda ps: OptimizerPart(torch.optim.SGD(ps), every=True), "every of sgd is True"),
        (lambda ps: OptimizerPart(torch.optim.SGD(ps), every=2), "no optimizer steps in every step"),
        (lambda ps: OptimizerPart(torch.optim.SGD(ps), loss=HINGE), "the loss of sgd is a str"),
        (lambda ps: torch.optim.SGD(ps[:1]), "no optimizer has 1.weight, 1.bias, 2.weight and 1 more"),
        (lambda ps: [torch.optim.SGD(ps), torch.optim.SGD(ps[1:])], "0.bias belongs to sgd1 and to sgd2"),
        (lambda ps: torch.optim.SGD([*ps, *one_parameter()]), r"sgd has a parameter of shape \(2,\) that"),
    ],
)
def test_optimizers_that_are_none_are_refused(returned: Any, found: str) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])

    class Wrong(Muons):
        def optimizers(self, named_parameters: Any) -> Any:
            return returned([parameter for _, parameter in named_parameters][: 5 if "1 more" in found else 6])

    named = list(model.named_parameters())
    if "1 more" in found:
        named = named[:1] + named[2:]
    with pytest.raises(JobFailed, match=found) as error:
        read_optimizers(Wrong(), named)
    assert error.value.given == "optimizers()"


@pytest.mark.parametrize(
    ("returned", "found"), [(list, "it returned a list"), (lambda _: None, "returned None")]
)
def test_one_optimizer_is_refused_if_it_is_none(returned: Any, found: str) -> None:
    with pytest.raises(JobFailed, match=rf"^optimizer\(\): .*{found}.*optimizers\(named_parameters\)"):
        make_optimizer(SimpleNamespace(optimizer=returned), [], OptimizerImplementation.PLAIN)


def test_losses_are_listed_once_and_a_job_needs_no_loss_beside_them() -> None:
    named = list(Gan().model().named_parameters())
    assert [name for name, _ in collect_losses(Gan(), named)] == [
        "the loss of discriminator",
        "the loss of generator",
    ]
    assert [name for name, _ in collect_losses(Muons(), list(Muons().model().named_parameters()))] == [
        "loss()"
    ]
    assert load_job(f"{__name__}:Gan").global_batch == WHOLE


def test_parameter_groups_by_name_need_one_optimizer() -> None:
    class Decayed(Muons):
        clip = None  # type: ignore[assignment]

        def optimizers(self, named_parameters: Any) -> Any:
            halves = split_by_name(named_parameters, lambda name: name.endswith("weight"))
            groups: Any = [{"params": halves[True]}, {"params": halves[False], "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3)

    with Run(alone(8), job=Decayed()) as run:
        _, optimizer = run.prepare()
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
        assert run.optimizers == {"adamw": optimizer}


# --- estimates ---

PAIR = """
    import torch
    import trimtab
    from torch import nn


    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Linear(1024, 1024, bias=False)
            self.large = nn.Linear(1024, 4096, bias=False)


    class Pair:
        global_batch = 8

        def model(self):
            return Halves()

        def batch(self, size):
            return torch.randn(size, 1024)

        def small_loss(self, model, batch):
            return model.small(batch).square().mean()

        def large_loss(self, model, batch):
            return model.large(model.small(batch)).square().mean()

        def optimizers(self, named_parameters):
            named = dict(named_parameters)
            return {
                "small": trimtab.OptimizerPart(
                    torch.optim.Adam([named["small.weight"]]), loss=self.small_loss
                ),
                "large": trimtab.OptimizerPart(
                    torch.optim.SGD([named["large.weight"]], momentum=0.9), loss=self.large_loss, every=4
                ),
            }


    class Compared(Pair):
        def large_loss(self, model, batch):
            outputs = nn.functional.normalize(model.large(model.small(batch)))
            return (outputs @ outputs.T).softmax(1).diagonal().mean()
"""


def test_an_estimate_has_the_states_of_all_optimizers_and_both_losses() -> None:
    estimate = trimtab.estimate(shared_job(PAIR, "Pair"), "H200", micro_batch=64, precision="fp32")
    small, large = 1024 * 1024 * 4, 1024 * 4096 * 4
    assert estimate.parts.weights == small + large
    # Adam has two states, and SGD has one; step counts take 512 bytes.
    assert estimate.parts.optimizer == pytest.approx(2 * small + large, abs=4096)
    assert any("a step in which large is updated, which is one in 4" in note for note in estimate.assumptions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Pair", "Compared"])
def test_a_plan_knows_when_one_of_the_losses_cannot_be_split(name: str) -> None:
    from trimtab.trace.loss_check import check_batch_loss

    result = check_batch_loss(shared_job(PAIR, name))
    assert result.additive is (name == "Pair")
    assert result.why.startswith("the loss of large: ") is (name == "Compared")


# --- the command ---

TRAINED = """
    import copy

    import torch
    import trimtab
    from test_kinds import Ema
    from test_optimizers import Gan, Muons, data

    torch.set_default_dtype(torch.float64)


    class Data:
        epochs = 2

        def dataset(self):
            return [{name: value[0] for name, value in data(step, 1).items()} for step in range(24)]


    class TrainedGan(Data, Gan):
        pass


    class TrainedMuons(Data, Muons):
        pass


    class TrainedEma(Data, Ema):
        evaluate = None

        def batch(self, size):
            return data(0, size)

        def loss(self, model, batch):
            return model(torch.cat([batch["noise"], batch["real"]], 1)).square().mean()
"""


def train(out: Path, job: str, *options: str, faults: list[dict[str, Any]] | None = None) -> list[Any]:
    """The losses in the log of `trimtab train`, in processes of their own."""
    command = [sys.executable, "-m", "trimtab", "train", job, "--out", str(out), *options]
    if faults:
        file = out.with_suffix(".json")
        file.write_text(json.dumps(faults), encoding="utf-8")
        command += ["--faults", str(file)]
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])  # noqa: PTH120
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    return [row.get("losses", row["loss"]) for row in rows]


@pytest.mark.slow
def test_a_run_with_two_losses_stops_and_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    job = shared_job(TRAINED, "TrainedGan")
    calm = train(tmp_path / "calm", job)
    assert [list(losses) for losses in calm[:2]] == [["discriminator"], ["discriminator", "generator"]]
    fault = {"kind": "terminate", "step": 3, "rank": 0}
    with pytest.raises(AssertionError):
        train(tmp_path / "cut", job, faults=[fault])
    assert train(tmp_path / "cut", job) == calm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TrainedGan", "TrainedEma", "TrainedMuons"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_kind_survives_a_killed_rank_and_memory_on_one_two_and_four_processes(
    tmp_path: Path, name: str, strategy: str
) -> None:
    job = shared_job(TRAINED, name)
    calm = train(tmp_path / "calm", job)
    for size in (2, 4):
        options = ("--procs", str(size), "--pin", f"strategy={strategy}", "--checkpoint-every", "2")
        kill = [{"kind": "slow", "step": 3, "seconds": 2.0}, {"kind": "kill", "step": 4, "rank": 1}]
        memory = [{"kind": "out-of-memory", "step": 2, "rank": 1, "point": "backward"}]
        whole = train(tmp_path / f"whole{size}", job, *options)
        # A checkpoint restores every bit, and so does a run without a fault.
        assert train(tmp_path / f"kill{size}", job, *options, faults=kill) == whole
        within = 0.02 if name == "TrainedMuons" else 1e-9
        again = train(tmp_path / f"memory{size}", job, *options, faults=memory)
        for results in (whole, again):
            for losses, others in zip(results, calm, strict=True):
                assert losses == pytest.approx(others, rel=within)
