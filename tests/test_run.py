"""One process: exact gradients, and steps that survive what goes wrong in them."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import trimtab
from trimtab.engine.compile import CALL, CompileSwitch
from trimtab.errors import EnvironmentFault, JobFailed, NothingFits, WrongUse
from trimtab.spec import Incident, IncidentKind, Mesh, OptimizerImplementation, Precision, Setting, Strategy
from trimtab.training import oom_recovery, stepper
from trimtab.training.bad_steps import find_bad_module
from trimtab.training.evaluation import evaluate_run
from trimtab.training.loading import wrap_batch
from trimtab.training.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.usefixtures("doubles")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(16, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.last(torch.relu(self.first(batch)))


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def squared(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def samples(count: int = 10, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def setting(micro: int, whole: int = 10, **others: Any) -> Setting:
    return Setting(micro_batch=micro, accumulation=-(-whole // micro), global_batch=whole, **others)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Drill:
    """Raises or returns once for each (point, step) that it is given."""

    def __init__(self, *due: tuple[str, int], answer: Callable[[], Any] | None = None) -> None:
        self.due = list(due)
        self.answer = answer

    def at(self, point: str, step: int, rank: int) -> Any:
        del rank
        if (point, step) not in self.due:
            return None
        self.due.remove((point, step))
        if point == "gradient":
            return "nan"
        if self.answer is not None:
            return self.answer()
        raise torch.OutOfMemoryError("a drill")


def expected(
    steps: int, *, loss: Any = squared, make: Any = sgd, clip: float | None = None, batch: Any = None
) -> tuple[list[float], list[torch.Tensor]]:
    """What one big batch a step comes to, by hand."""
    model = network()
    optimizer = make(model.parameters())
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        found = loss(model, samples(seed=number) if batch is None else batch)
        found.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(found.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def far(found: Any, weights: list[torch.Tensor]) -> float:
    return max(float((a.detach() - b).abs().max()) for a, b in zip(found.parameters(), weights, strict=True))


def trained(
    micro: int, steps: int = 3, *, faults: Any = None, seen: list[Incident] | None = None, **prepared: Any
) -> tuple[Any, list[Any]]:
    listen = None if seen is None else seen.append
    with Run(setting(micro), faults=faults, listen=listen) as run:
        model, _ = run.prepare(network(), prepared.pop("optimizer", sgd), loss=squared, **prepared)
        return model, [run.step(samples(seed=number)) for number in range(steps)]


@pytest.mark.parametrize("micro", [1, 3, 4, 10])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_parts_of_any_size_make_the_step_of_the_whole_batch(micro: int, clip: float | None) -> None:
    model, outcomes = trained(micro, clip=clip)
    losses, weights = expected(3, clip=clip)
    assert far(model, weights) < 1e-12
    assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=1e-12)
    assert [outcome.parts for outcome in outcomes] == [-(-10 // micro)] * 3
    assert {outcome.samples for outcome in outcomes} == {10}


def test_a_loss_over_tokens_is_weighted_by_them_and_a_part_without_any_does_not_count() -> None:
    mask = torch.tensor([[1.0, 1, 0]] * 3 + [[0, 0, 0]] * 3 + [[1, 1, 1]] * 4)
    batch = {"x": samples(), "mask": mask}

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"]).square() * batch["mask"]).sum() / batch["mask"].sum()

    with Run(setting(3)) as run:
        model, _ = run.prepare(network(), sgd, loss=loss, weight=lambda batch: batch["mask"].sum())
        outcomes = [run.step(batch) for _ in range(3)]
    losses, weights = expected(3, loss=loss, batch=batch)
    assert far(model, weights) < 1e-12
    assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=1e-12)
    assert (outcomes[0].weight, outcomes[0].samples, outcomes[0].parts) == (18.0, 10, 3)


def test_samples_that_count_for_nothing_do_not_spoil_an_evaluation() -> None:
    mask = torch.tensor([[1.0, 1, 0]] * 3 + [[0, 0, 0]] * 3 + [[1, 1, 1]] * 4)
    whole = {"x": samples(), "mask": mask}
    dataset = [{name: one[number] for name, one in whole.items()} for number in range(10)]

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"]).square() * batch["mask"]).sum() / batch["mask"].sum()

    with Run(setting(3)) as run:
        run.prepare(network(), sgd, loss=loss, weight=lambda batch: batch["mask"].sum())
        with torch.no_grad():
            right = loss(network(), whole).item()
        assert evaluate_run(run, dataset)["loss"] == pytest.approx(right, rel=1e-12)
        assert math.isnan(evaluate_run(run, dataset[3:6])["loss"])


def test_a_loop_by_hand_is_the_same_step() -> None:
    with Run(setting(4), faults=Drill(("forward", 1), ("backward", 2))) as run:
        model, _ = run.prepare(network(), sgd)
        for number in range(3):
            for part in run.parts(samples(seed=number)):
                with part:
                    part.backward(squared(model, part.batch))
            outcome = run.update()
            assert outcome.attempts == (2 if number else 1)
    assert far(model, expected(3)[1]) < 1e-12


@pytest.mark.parametrize("point", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW])
def test_out_of_memory_anywhere_changes_nothing_but_the_parts(point: str, make: Any) -> None:
    seen: list[Incident] = []
    model, outcomes = trained(5, faults=Drill((point, 0), (point, 1)), seen=seen, optimizer=make)
    losses, weights = expected(3, make=make)
    assert far(model, weights) < 1e-12
    assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=1e-12)
    assert not any(outcome.skipped for outcome in outcomes)
    if point != "optimizer":
        assert {incident.kind for incident in seen} == {IncidentKind.OUT_OF_MEMORY}
        assert [outcome.micro_batch for outcome in outcomes] == [2, 1, 1]
        assert "2 are tried" in seen[0].done


@pytest.mark.slow
def test_one_sample_that_never_fits_is_said_so() -> None:
    class Full:
        def at(self, point: str, *_: Any) -> None:
            if point == "forward":
                raise torch.OutOfMemoryError("full")

    with Run(setting(4), faults=Full()) as run:
        run.prepare(network(), sgd, loss=squared)
        with pytest.raises(NothingFits, match="one sample at once ran out of memory"):
            run.step(samples())


def test_memory_held_by_the_failed_pass_is_let_go_before_the_next_try() -> None:
    import weakref

    alive: list[Any] = []

    def loss(model: Any, batch: Any) -> Any:
        held = model(batch)
        if not alive:
            alive.append(weakref.ref(held))
            raise torch.OutOfMemoryError("a drill")
        assert alive[0]() is None
        return held.square().mean()

    with Run(setting(10)) as run:
        run.prepare(network(), sgd, loss=loss)
        assert run.step(samples()).attempts == 2


def test_a_loss_that_a_loop_still_holds_does_not_hold_the_failed_pass() -> None:
    with Run(setting(10), faults=Drill(("backward", 0))) as run:
        model, _ = run.prepare(network(), sgd)
        held = []
        for part in run.parts(samples()):
            with part:
                held.append(squared(model, part.batch))
                part.backward(held[-1])
        run.update()
    assert [one.grad_fn is None for one in held] == [True, False, False]


def test_a_passing_not_a_number_leaves_no_trace_and_a_lasting_one_skips_the_step() -> None:
    seen: list[Incident] = []
    model, outcomes = trained(4, faults=Drill(("gradient", 1)), seen=seen)
    assert far(model, expected(3)[1]) < 1e-12
    assert [outcome.attempts for outcome in outcomes] == [1, 2, 1]
    assert [incident.kind for incident in seen] == [IncidentKind.NOT_A_NUMBER]
    faults = Drill(("gradient", 1), ("gradient", 1))
    faults.due = [("gradient", 1)] * 9
    model, outcomes = trained(10, 2, faults=faults)
    assert far(model, expected(1)[1]) < 1e-12
    assert [outcome.skipped for outcome in outcomes] == ["", "the loss is nan"]


def test_a_loss_above_the_limit_is_skipped_and_the_same_on_a_gradient_that_is_not_finite() -> None:
    with Run(setting(4)) as run:
        model, _ = run.prepare(network(), sgd, loss=squared)
        run.spike_limit = 1e-6
        outcome = run.step(samples())
        assert "above 1e-06" in outcome.skipped
        assert far(model, [parameter.detach() for parameter in network().parameters()]) == 0
        run.spike_limit = None
        assert not run.step(samples()).skipped

        def root(model: Any, batch: Any) -> Any:
            # The loss is nought, its slope has no end.
            return (model(batch) * 0).abs().sqrt().sum()

        run._stepper.get_prepared().loss = root  # noqa: SLF001
        outcome = run.step(samples())
        assert "the norm of the gradients is nan" in outcome.skipped


def test_a_repetition_has_the_same_random_numbers_and_buffers() -> None:
    def build() -> Any:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def run_with(faults: Any) -> Any:
        with Run(setting(10), faults=faults) as run:
            model, _ = run.prepare(build(), sgd, loss=squared)
            torch.manual_seed(5)
            for number in range(3):
                run.step(samples(seed=number))
        return model

    calm, shaken = run_with(None), run_with(Drill(("gradient", 0), ("gradient", 2)))
    for name, value in calm.state_dict().items():
        assert torch.equal(value, shaken.state_dict()[name]), name
    assert int(shaken[1].num_batches_tracked) == 3


def test_fp16_lowers_its_scale_and_tries_again_instead_of_skipping() -> None:
    torch.set_default_dtype(torch.float32)

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch).float() * 40).square().mean()

    with Run(setting(10, precision=Precision.FP16)) as run:
        model, _ = run.prepare(network(), sgd, loss=loss, clip=0.1)
        outcome = run.step(samples().float())
        assert not outcome.skipped
        assert run._stepper.scale.value * 2 ** (outcome.attempts - 1) == 2.0**16  # noqa: SLF001
    by_hand = network()
    optimizer = sgd(by_hand.parameters())
    loss(by_hand, samples().float()).backward()
    norm = nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
    optimizer.step()
    assert outcome.grad_norm == pytest.approx(float(norm), rel=0.02)
    assert far(model, [parameter.detach() for parameter in by_hand.parameters()]) < 1e-3


def test_an_optimizer_that_is_interrupted_halfway_asks_for_a_rollback() -> None:
    class Halfway(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                self.broken = False
                raise torch.OutOfMemoryError("halfway")
            return super().step(closure)

    with Run(setting(10)) as run:
        model, optimizer = run.prepare(network(), lambda some: Halfway(some, lr=0.1), loss=squared)
        assert not run.step(samples()).rollback_needed
        optimizer.broken = True
        assert not run.step(samples()).rollback_needed
        assert run.rollback_needed()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        outcome = run.step(samples())
        assert outcome.rollback_needed
        assert "interrupted halfway" in outcome.skipped
        assert far(model, before) == 0
        assert not run.step(samples()).rollback_needed


def test_a_state_that_was_half_made_is_made_again() -> None:
    made: list[int] = []

    class Greedy(torch.optim.AdamW):
        def _init_group(self, group: Any, *args: Any) -> Any:
            if not made:
                made.append(1)
                first = group["params"][0]
                self.state[first] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(first)}
                raise torch.OutOfMemoryError("no room for the second moment")
            return super()._init_group(group, *args)  # type: ignore[no-untyped-call]

    model, _ = trained(10, optimizer=lambda some: Greedy(some, lr=1e-3))
    assert made
    assert far(model, expected(3, make=lambda some: torch.optim.AdamW(some, lr=1e-3))[1]) < 1e-12


def test_the_micro_batch_grows_back() -> None:
    seen: list[Incident] = []
    model, outcomes = trained(10, 60, faults=Drill(("forward", 0)), seen=seen)
    assert [outcomes[number].micro_batch for number in (0, 48, 59)] == [5, 5, 10]
    assert seen[-1].kind is IncidentKind.MICRO_BATCH
    assert "from 5 to 10" in seen[-1].done
    assert far(model, expected(60)[1]) < 1e-12


def test_the_rate_follows_the_steps_that_were_taken() -> None:
    with Run(setting(4)) as run:
        _, optimizer = run.prepare(
            network(),
            torch.optim.SGD,
            loss=squared,
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        rate = optimizer.param_groups[0]["lr"]
        run.step(samples())
        run.spike_limit = 0.0
        run.step(samples())
        assert optimizer.param_groups[0]["lr"] == rate / 2


class Tiny(trimtab.Job):
    global_batch = 6
    clip = 0.05

    def model(self) -> Any:
        return network()

    def batch(self, size: int) -> Any:
        return samples(size)

    def loss(self, model: Any, batch: Any) -> Any:
        return squared(model, batch)

    def dataset(self) -> Any:
        return list(samples(20))

    def optimizer(self, params: Any) -> Any:
        return sgd(params)


def test_a_job_brings_model_loss_and_optimizer_and_its_data_in_one_order() -> None:
    ends = []
    for micro in (2, 6):
        with Run(setting(micro, 6), job=Tiny()) as run:
            model, _ = run.prepare()
            outcomes = [run.step(window) for window in run.loader(Tiny().dataset(), seed=7)]
            assert [outcome.samples for outcome in outcomes] == [6, 6, 6, 2]
            ends.append([parameter.detach() for parameter in model.parameters()])
    assert max((a - b).abs().max().item() for a, b in zip(*ends, strict=True)) < 1e-12


def test_frozen_weights_keep_their_dtype_because_a_job_may_average_into_them() -> None:
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    with Run(setting(10, precision=Precision.BF16)) as run:
        run.prepare(model, sgd, loss=squared)
        run.step(samples().float())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_compiling_is_for_the_regular_size_and_gives_up_with_a_reason() -> None:
    said: list[tuple[str, str]] = []
    model = network()
    compiling = CompileSwitch(model, lambda why, done: said.append((why, done)))
    compiling._calls = [(model, CALL, lambda *_: torch.ones(1))]  # noqa: SLF001
    compiling.prepare_for(4, 4)
    assert torch.equal(model(samples()), torch.ones(1))
    assert "compiles the model" in said[0][0]
    compiling.mark_done()
    compiling.prepare_for(2, 4)
    assert model(samples()).shape == (10, 1)
    assert len(said) == 1
    compiling.prepare_for(4, 4)
    assert not compiling.handle_error(RuntimeError("a bug of one's own, long after compiling"))
    compiling.prepare_for(3, 3)
    assert compiling.handle_error(RuntimeError("no compiler\nhere"))
    assert said[-1] == ("compiling failed: RuntimeError: no compiler", "going on without torch.compile")
    assert not compiling.is_enabled
    assert model(samples()).shape == (10, 1)


def test_a_compiler_that_fails_does_not_stop_the_run() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    seen: list[Incident] = []
    with Run(setting(4, compile=True), listen=seen.append) as run:
        model, _ = run.prepare(network(), sgd, loss=squared)
        compiling = run._stepper.get_prepared().compiling  # noqa: SLF001
        assert compiling is not None
        compiling._calls = [(model, CALL, broken)]  # noqa: SLF001
        outcomes = [run.step(samples(seed=number)) for number in range(3)]
    assert [outcome.attempts for outcome in outcomes] == [2, 1, 1]
    assert [incident.kind for incident in seen] == [IncidentKind.COMPILE] * 2
    assert far(model, expected(3)[1]) < 1e-12


def test_an_error_of_the_job_is_not_mistaken_for_anything_else() -> None:
    def loss(model: Any, batch: Any) -> Any:
        del model, batch
        raise ValueError("a bug of one's own")

    with Run(setting(4)) as run:
        run.prepare(network(), sgd, loss=loss)
        with pytest.raises(ValueError, match="a bug of one's own"):
            run.step(samples())


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda model, batch: model(batch), r"a tensor of shape \(4, 1\)"),
        (lambda *_: 1.0, "it returned a float"),
        (lambda *_: torch.zeros(()), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_is_no_scalar_is_an_error_that_says_so(loss: Any, text: str) -> None:
    with Run(setting(4)) as run:
        run.prepare(network(), sgd, loss=loss)
        with pytest.raises(JobFailed, match=text):
            run.step(samples())


def test_wrong_use_is_said_to_be() -> None:
    with Run(setting(4)) as run:
        with pytest.raises(WrongUse, match="nothing is prepared"):
            run.step(samples())
        with pytest.raises(WrongUse, match="neither a model nor a job"):
            run.prepare()
        with pytest.raises(WrongUse, match="it is no module"):
            run.prepare("model")
        with pytest.raises(WrongUse, match="are not the model's"):
            run.prepare(network(), sgd(network().parameters()))
        with pytest.raises(WrongUse, match="neither an optimizer nor a function"):
            run.prepare(network(), 3)
        model, _ = run.prepare(network(), sgd)
        with pytest.raises(WrongUse, match="called twice"):
            run.prepare(network())
        with pytest.raises(WrongUse, match="no loss"):
            run.step(samples())
        with pytest.raises(WrongUse, match="no finished step"):
            run.update()
        with pytest.raises(WrongUse, match="no such operation"):
            run.all_reduce(1.0, "median")
        with pytest.raises(WrongUse, match="first dimension"):
            next(iter(run.parts(3)))
        part = next(iter(run.parts(samples())))
        with pytest.raises(WrongUse, match="outside of"):
            part.backward(squared(model, samples()))
        with pytest.raises(WrongUse, match=r"part.backward\(\) was not called"), part:
            pass
        parts = run.parts(samples())
        next(parts)
        with pytest.raises(WrongUse, match="a part was not used"):
            next(parts)


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (Setting(strategy=Strategy.DDP, mesh=Mesh(dp_replicate=2), micro_batch=5, global_batch=10),
         EnvironmentFault, "a plan for 2 devices: there is one process"),
        ("/no/such/plan.json", WrongUse, "cannot be read"),
        (7, WrongUse, "neither a Plan"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_run_here_is_an_error(plan: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Run(plan)


def test_a_setting_by_hand_may_be_in_words() -> None:
    with Run(Setting(micro_batch=10, global_batch=10, precision="bf16-true")) as run:  # type: ignore[arg-type]
        model, _ = run.prepare(network(), sgd, loss=squared)
        assert run.setting.precision is Precision.BF16_TRUE
        assert model.first.weight.dtype is torch.bfloat16


def test_a_run_without_a_plan_takes_batches_whole_and_numbers_over_ranks_are_themselves() -> None:
    with trimtab.Run() as run:
        run.prepare(network(), sgd, loss=squared)
        assert run.step(samples()).parts == 1
        assert run.is_main
        assert (run.rank, run.size, run.local_rank) == (0, 1, 0)
        assert (run.all_reduce(2.5), run.all_reduce(3, "max")) == (2.5, 3)
        assert torch.equal(run.all_reduce(torch.ones(2), "mean"), torch.ones(2))
        run.barrier()
        run.asked = 3.0
        assert run.step(samples()).asked == 3.0
        assert run.memory() == {}


def test_what_was_learnt_about_sizes_survives_a_checkpoint() -> None:
    with Run(setting(10), faults=Drill(("forward", 0))) as run:
        run.prepare(network(), sgd, loss=squared)
        run.step(samples())
        state = run.state()
    with Run(setting(10)) as run:
        run.prepare(network(), sgd, loss=squared)
        run.load_state(state)
        assert (run.micro_batch, run.steps) == (5, 1)
    with Run(setting(4)) as run:
        run.prepare(network(), sgd, loss=squared)
        run.load_state(state)
        assert run.micro_batch == 4


def test_passes_of_ones_own_leave_no_gradient() -> None:
    with Run(setting(10)) as run:
        model, _ = run.prepare(network(), sgd, loss=squared)
        with run.quiet(), run.computing():
            squared(model, run.on_device(samples())).backward()
        run.step(samples())
    assert far(model, expected(1, batch=samples())[1]) < 1e-12


def test_the_planned_implementation_of_the_optimizer_is_used() -> None:
    plan = setting(10, optimizer=OptimizerImplementation.PLAIN)
    with Run(plan) as run:
        _, optimizer = run.prepare(network(), torch.optim.AdamW)
        assert optimizer.defaults["foreach"] is False
        assert optimizer.defaults["fused"] is False
    with Run(plan) as run:
        given = torch.optim.AdamW((model := network()).parameters(), lr=0.5)
        assert run.prepare(model, given)[1] is given


def test_there_is_an_end_to_trying() -> None:
    def unlucky() -> Any:
        raise torch.OutOfMemoryError("again")

    class Always:
        def at(self, point: str, *_: Any) -> None:
            if point == "optimizer":
                unlucky()

    with Run(setting(10), faults=Always()) as run:
        run.prepare(network(), sgd, loss=squared)
        with pytest.raises(NothingFits, match="again and again"):
            run.step(samples())


def test_copies_of_a_model_are_not_touched() -> None:
    model = network()
    kept = copy.deepcopy(model)
    with Run(setting(10)) as run:
        run.prepare(model, sgd, loss=squared)
        run.step(samples())
    assert far(kept, [parameter.detach() for parameter in network().parameters()]) == 0
    assert stepper.MAX_ATTEMPTS > oom_recovery.RETRY_AFTER_STEPS / 2


@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd])
def test_a_step_that_the_device_calls_off_leaves_no_trace(make: Any) -> None:
    """The way of a GPU, with a fused optimizer that can be called off on a CPU just as well."""
    ends = []
    for device_decides in (False, True):
        with Run(setting(5, optimizer=OptimizerImplementation.FUSED), faults=Drill(("gradient", 2))) as run:
            model, _ = run.prepare(network(), make, loss=squared, clip=0.05)
            updater = run._stepper.get_prepared().updater  # noqa: SLF001
            updater._can_skip_on_device = device_decides  # noqa: SLF001
            outcomes = [run.step(samples(seed=number)) for number in range(3)]
            run.spike_limit = 0.0
            skipped = run.step(samples())
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
        assert updater.skips_on_device is device_decides
        assert [outcome.attempts for outcome in outcomes] == [1, 1, 2]
        assert skipped.skipped
    assert max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True)) < 1e-6
    assert far(model, expected(3, make=make, clip=0.05)[1]) < 1e-6


class Endless(nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch / 0


def test_what_counts_for_nothing_hides_no_bad_module() -> None:
    """Its loss is a mean over nothing, which is not a number whatever the modules do."""

    def counted(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch[batch[:, 0] > 0]).square().mean()
        return found

    batch = samples(4)
    batch[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    model = nn.Sequential(nn.Linear(8, 4), nn.Identity(), nn.Linear(4, 1))
    with Run(setting(2, 4)) as run:
        run.prepare(model, sgd, loss=counted, weight=lambda one: int((one[:, 0] > 0).sum()))
        assert find_bad_module(run, wrap_batch(batch)) is None
        model[1] = Endless()
        found = find_bad_module(run, wrap_batch(batch))
    assert found is not None
    assert (found.module, found.phase) == ("1", "forward")
