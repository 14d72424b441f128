"""Checkpoints: whole or not there, read by any number of ranks, and no trouble to training."""

from __future__ import annotations

import errno
import os
import pickle
import random
import resource
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.tensor import DTensor

from trimtab.engine.branches import keep_branch
from trimtab.errors import WrongUse
from trimtab.spec import Incident, IncidentKind
from trimtab.training import checkpoint_format
from trimtab.training.checkpoint_format import MANIFEST, SafeReader, find_fault
from trimtab.training.checkpoints import CheckpointManager
from trimtab.training.loading import Loader, build_sample_order
from worlds import together, world_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.xdist_group("checkpoints")  # its fixture is made once
GLOBAL_BATCH = 6


class Net(nn.Module):
    """Frozen, tied, normalised and unused parameters, a width that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 7)
        self.base.requires_grad_(False)
        self.left = nn.Linear(7, 2)
        self.right = nn.Linear(7, 2)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 4)
        self.embed = nn.Embedding(4, 7)
        self.embed.weight = self.head.weight
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.base(x))
        terms = [one(hidden).square().mean() for one in (self.left, self.right) if one]
        return torch.stack([*terms, self.head(hidden).square().mean()]).sum()


def build(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net().double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    }


def advance(objects: dict[str, Any], steps: int, *, average: bool = False) -> float:
    """Steps on data that depend on the number of the step alone; every rank sees all of them."""
    import torch.distributed as dist

    loss = torch.zeros(())
    for _ in range(steps):
        drawn = torch.Generator().manual_seed(objects["scheduler"].last_epoch)
        loss = objects["model"](torch.randn(5, 4, generator=drawn, dtype=torch.float64))
        objects["optimizer"].zero_grad()
        loss.backward()
        if average:
            for parameter in objects["model"].parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        objects["optimizer"].step()
        objects["scheduler"].step()
    return float(loss.detach())


@pytest.fixture
def incidents() -> list[Incident]:
    return []


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, to be copied."""
    folder = tmp_path_factory.mktemp("two")
    saved(folder, (2, 4))
    return folder


def saved(
    folder: Path, steps: tuple[int, ...], incidents: list[Incident] | None = None, **kwargs: Any
) -> CheckpointManager:
    keeper = CheckpointManager(folder, report=(incidents if incidents is not None else []).append, **kwargs)
    objects = build(0)
    for step in steps:
        advance(objects, step - objects["scheduler"].last_epoch)
        keeper.save(step, objects, {"losses": [step]}, wait=True)
    return keeper


def expected(steps: int) -> float:
    return advance(build(0), steps)


# In one process


def test_a_resumed_run_goes_on_to_the_same_loss_with_the_same_random_numbers(tmp_path: Path) -> None:
    first = build(0)
    advance(first, 3)
    keeper = CheckpointManager(tmp_path)
    keeper.save(3, first, {"losses": [1.5, 2.5]}, wait=True)
    drawn = random.random(), np.random.rand(), torch.rand(2)  # noqa: S311, NPY002
    wanted = advance(first, 3)
    second = build(1)
    loaded = CheckpointManager(tmp_path).load_latest(second)
    assert loaded is not None
    assert (loaded.step, loaded.extra, loaded.same_world) == (3, {"losses": [1.5, 2.5]}, True)
    again = random.random(), np.random.rand(), torch.rand(2)  # noqa: S311, NPY002
    assert (again[:2], again[2].tolist()) == (drawn[:2], drawn[2].tolist())
    assert advance(second, 3) == wanted == expected(6)
    assert second["model"].embed.weight is second["model"].head.weight
    assert second["optimizer"].param_groups[0]["lr"] == first["optimizer"].param_groups[0]["lr"]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path: Path) -> None:
    objects, held = build(0), threading.Event()
    advance(objects, 2)

    def slow(_: int) -> None:
        held.wait(30)

    keeper = CheckpointManager(tmp_path, before_write=slow)
    keeper.save(2, objects)
    assert keeper.last_saved is None
    advance(objects, 4)
    held.set()
    assert keeper.finish() == 2
    other = build(1)
    CheckpointManager(tmp_path).load_latest(other)
    assert advance(other, 4) == expected(6)


def test_what_there_is_of_optimizers_and_other_objects_is_kept_whatever_they_are(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        """Counts in plain numbers, as some optimizers do."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for param_group in self.param_groups[0]["params"]:
                self.state[param_group]["seen"] = self.state[param_group].get("seen", 0) + 1

    def make() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        return {"model": torch.compile(model, backend="eager"), "optimizer": Odd(model.parameters(), lr=0.1)}

    one = make()
    one["model"](torch.ones(3, 2)).sum().backward()
    one["optimizer"].step()
    CheckpointManager(tmp_path).save(1, one, {"best": np.float64(0.5), "curve": np.arange(3)}, wait=True)
    two = make()
    loaded = CheckpointManager(tmp_path).load_latest(two)
    assert loaded is not None
    assert loaded.extra["best"] == 0.5
    assert loaded.extra["curve"].tolist() == [0, 1, 2]
    assert two["optimizer"].state[two["model"].weight]["seen"] == 1
    assert two["model"].weight.tolist() == one["model"].weight.tolist()


def test_how_an_optimizer_runs_is_not_taken_from_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, (2,))
    other = build(1)
    other["optimizer"].param_groups[0]["foreach"] = True
    CheckpointManager(tmp_path).load_latest(other)
    assert other["optimizer"].param_groups[0]["foreach"] is True
    assert other["optimizer"].param_groups[0]["weight_decay"] == 0.1


def test_the_position_in_the_data_is_kept(tmp_path: Path) -> None:
    def loader() -> Loader:
        return Loader(dataset=range(20), order=build_sample_order(range(20), GLOBAL_BATCH, 5))

    one = loader()
    seen = [window.indices for window in one.windows(2)]
    CheckpointManager(tmp_path).save(2, {"loader": one}, wait=True)
    other = loader()
    CheckpointManager(tmp_path).load_latest({"loader": other})
    seen += [window.indices for window in other]
    assert sorted(index for some in seen for index in some) == list(range(20))


def test_the_last_few_and_the_best_are_kept_and_frozen_weights_once(tmp_path: Path) -> None:
    keeper, objects = CheckpointManager(tmp_path, last=2), build(0)
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 5.0], start=1):
        keeper.save(step, objects, metric=metric, wait=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["frozen-00000001", "step-00000002", "step-00000004", "step-00000005"]
    index = SafeReader(tmp_path / "step-00000005").read_metadata().state_dict_metadata
    assert "model:head.weight" in index
    assert "model:embed.weight" not in index  # tied: written once
    assert "model:base.weight" not in index
    assert set(SafeReader(tmp_path / "frozen-00000001").read_metadata().state_dict_metadata) == {
        "model:base.weight",
        "model:base.bias",
    }


def test_a_frozen_weight_that_was_changed_is_written_again(tmp_path: Path) -> None:
    keeper, objects = CheckpointManager(tmp_path), build(0)
    keeper.save(1, objects, wait=True)
    with torch.no_grad():
        objects["model"].base.weight.fill_(2.0)
    keeper.save(2, objects, wait=True)
    other = build(1)
    loaded = CheckpointManager(tmp_path).load_latest(other)
    assert loaded is not None
    assert loaded.step == 2
    assert torch.equal(other["model"].base.weight, objects["model"].base.weight)
    assert torch.equal(other["model"].base.bias, objects["model"].base.bias)


def test_going_back_drops_what_came_after(tmp_path: Path) -> None:
    saved(tmp_path, (1, 2, 3))
    loaded = CheckpointManager(tmp_path).load_latest(build(1), before=2)
    assert loaded is not None
    assert loaded.step == 1
    assert [checkpoint.step for checkpoint in CheckpointManager(tmp_path).list_checkpoints()] == [1]


def test_there_may_be_nothing_to_load(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "new").load_latest(build(0)) is None
    assert CheckpointManager(tmp_path / "new").finish() is None


# What goes wrong on the disk


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _stray(file: Path) -> None:
    (file.parent / "stray.txt").write_text("?")


HARM: dict[str, Callable[[Path], None]] = {"cut": _cut, "flip": _flip, "gone": Path.unlink, "stray": _stray}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "plain-0.pt", MANIFEST])
@pytest.mark.parametrize("harm", HARM)
def test_a_torn_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, two: Path, incidents: list[Incident], harm: str, file: str
) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    target = tmp_path / "step-00000004" / file
    if (harm, file) == ("flip", MANIFEST):
        # In the middle of a digest: any other place may be a space.
        text = target.read_text()
        place = text.index('"sha256": "') + 20
        target.write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])
    else:
        HARM[harm](target)
    other = build(1)
    loaded = CheckpointManager(tmp_path, report=incidents.append).load_latest(other)
    assert loaded is not None
    assert loaded.step == 2
    assert [incident.kind for incident in incidents] == [IncidentKind.BAD_CHECKPOINT]
    assert incidents[0].step == 4
    named = {("stray", file): "stray.txt", ("flip", MANIFEST): "does not hold what was written"}
    assert named.get((harm, file), file) in incidents[0].why
    assert advance(other, 4) == expected(6)
    # It is neither tried nor reported again.
    assert CheckpointManager(tmp_path, report=incidents.append).load_latest(build(1)) is not None
    assert len(incidents) == 1


def test_when_all_are_torn_there_is_nothing_to_load_and_each_is_told(
    tmp_path: Path, incidents: list[Incident]
) -> None:
    saved(tmp_path, (1, 2))
    for path in tmp_path.glob("step-*"):
        _cut(path / "__0_0.distcp")
    assert CheckpointManager(tmp_path, report=incidents.append).load_latest(build(1)) is None
    assert [incident.step for incident in incidents] == [2, 1]


def test_torn_frozen_weights_are_taken_from_the_model_and_written_again(
    tmp_path: Path, incidents: list[Incident]
) -> None:
    saved(tmp_path, (2,))
    _flip(tmp_path / "frozen-00000002" / "__0_0.distcp")
    other, keeper = build(0), CheckpointManager(tmp_path, report=incidents.append)
    loaded = keeper.load_latest(other)
    assert loaded is not None
    assert "frozen weights" in incidents[0].why
    assert advance(other, 4) == expected(6)
    keeper.save(6, other, wait=True)
    assert find_fault(tmp_path / "frozen-00000006") == ""


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path, incidents: list[Incident]) -> None:
    saved(tmp_path, (1,))

    def full(step: int) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keeper, objects = CheckpointManager(tmp_path, report=incidents.append, before_write=full), build(0)
    keeper.save(2, objects, wait=True)
    assert keeper.finish() is None
    assert [incident.kind for incident in incidents] == [IncidentKind.FULL_DISK]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen-00000001", "step-00000001"]
    keeper.save(3, objects, wait=True)
    assert keeper.finish() == 3
    assert len(incidents) == 1


def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing_behind(
    tmp_path: Path, incidents: list[Incident]
) -> None:
    keeper = saved(tmp_path, (1,), incidents)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that comes with it, so that the write itself fails, in the middle of a file.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        keeper.save(2, build(0), wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [incident.kind for incident in incidents] == [IncidentKind.FULL_DISK]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen-00000001", "step-00000001"]


def test_what_a_killed_process_left_half_written_is_swept_away(tmp_path: Path) -> None:
    saved(tmp_path, (1,))
    half = tmp_path / ".writing-step-00000002"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    loaded = CheckpointManager(tmp_path).load_latest(build(1))
    assert loaded is not None
    assert loaded.step == 1
    assert not half.exists()


# What cannot be meant, and what must not be run


def test_a_checkpoint_of_another_model_is_refused_and_not_set_aside(tmp_path: Path) -> None:
    saved(tmp_path, (1,))
    other = build(0)
    other["model"].left = nn.Linear(7, 3).double()
    with pytest.raises(
        WrongUse, match=r"another model: model:left.weight is \[2, 7\] there and \[3, 7\] here"
    ):
        CheckpointManager(tmp_path).load_latest(other)
    other = build(0)
    other["model"].more = nn.Linear(7, 3).double()
    with pytest.raises(WrongUse, match=r"it has no model:more\.weight"):
        CheckpointManager(tmp_path).load_latest(other)
    assert [checkpoint.step for checkpoint in CheckpointManager(tmp_path).list_checkpoints()] == [1]


class _Strange:
    """Has a state that only its own class could read."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


def test_a_state_that_could_not_be_read_back_safely_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="the state of strange"):
        CheckpointManager(tmp_path).save(1, {"strange": _Strange(), **build(0)})
    assert CheckpointManager(tmp_path).list_checkpoints() == []


def test_an_optimizer_of_parameters_that_are_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no module here has"):
        CheckpointManager(tmp_path).save(1, {"optimizer": build(0)["optimizer"]})


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


def test_an_index_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(pickle.UnpicklingError, match=r"an index has no posix\.system"):
        SafeReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"not": "an index"}))
    with pytest.raises(pickle.UnpicklingError, match="the index is a dict"):
        SafeReader(tmp_path).read_metadata()


class _Attribute:
    """What Python 3.11.2 writes for a member of an enumeration, and what somebody else may write."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.args


def test_an_index_has_members_of_enumerations_and_no_other_attributes(tmp_path: Path) -> None:
    index = tmp_path / ".metadata"
    index.write_bytes(pickle.dumps(_Attribute(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")))
    with pytest.raises(pickle.UnpicklingError, match="the index is a _MEM_FORMAT_ENCODING"):
        SafeReader(tmp_path).read_metadata()
    for args in ((_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__")):
        index.write_bytes(pickle.dumps(_Attribute(*args)))
        with pytest.raises(pickle.UnpicklingError, match="an index has no attribute"):
            SafeReader(tmp_path).read_metadata()


# Several processes

PHASES = ((2, "ddp", 0, 2), (3, "fsdp", 2, 5), (2, "branch", 5, 5), (2, "fsdp", 5, 7))
"""Ranks, strategy, and the steps from and to which they train."""


def alike(model: nn.Module) -> dict[str, Any]:
    """An optimizer and a schedule as all phases have them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.05, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": schedule}


def resharded(rank: int, folder: str, phase: tuple[int, str, int, int]) -> dict[str, Any]:
    """Take up what there is, under one strategy, go on to `stop`, and save; what was seen."""
    from torch.distributed.fsdp import fully_shard

    size, how, start, stop = phase
    incidents: list[Incident] = []
    # Only the very first phase begins with the weights that the reference begins with.
    model = build(start)["model"]
    if how == "fsdp":
        fully_shard(model.left)
        fully_shard(model)
    if how == "branch":
        keep_branch(model, {"left": "left", "right": "right"}, ("left", "right")[rank])
    objects = alike(model)
    keeper = CheckpointManager(folder, report=incidents.append)
    loaded = keeper.load_latest(objects)
    loss = advance(objects, stop - start, average=how == "ddp")
    keeper.save(stop, objects, {"by": size})
    kept = keeper.finish()
    sharded = isinstance(model.head.weight, DTensor)
    return {
        "loss": loss,
        "kept": kept,
        "loaded": loaded and loaded[:3],
        "incidents": incidents,
        "sharded": sharded,
    }


def disturbed(rank: int, folder: str) -> dict[str, Any]:
    """A disk that is full on one rank alone, a torn file, another model on one rank."""
    incidents: list[Incident] = []

    def full(step: int) -> None:
        if rank == 1 and step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    objects = build(0)
    keeper = CheckpointManager(folder, report=incidents.append, before_write=full)
    for step in (1, 2, 3):
        keeper.save(step, objects)
    kept = keeper.finish()
    files = sorted(path.name for path in Path(folder, "step-00000003").iterdir())
    if rank == 0:
        _cut(Path(folder, "step-00000003", "plain-1.pt"))
    keeper.ranks.broadcast(None)
    loaded = CheckpointManager(folder, report=incidents.append).load_latest(objects)
    if rank == 1:
        objects["model"].left = nn.Linear(7, 3).double()
    try:
        CheckpointManager(folder, report=incidents.append).load_latest(objects)
        raised = ""
    except WrongUse as error:
        raised = str(error)
    return {
        "kept": kept,
        "files": files,
        "step": loaded and loaded.step,
        "incidents": incidents,
        "raised": raised,
    }


def all_phases(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Every test of several ranks in one start of processes, which takes seconds."""
    del size
    seen: dict[str, Any] = {}
    for number, phase in enumerate(PHASES):
        with world_of(phase[0], rank, Path(folder, f"store-{number}")) as taking_part:
            if taking_part:
                seen[f"{number}"] = resharded(rank, f"{folder}/curve", phase)
    with world_of(2, rank, Path(folder, "store-disturbed")) as taking_part:
        if taking_part:
            seen["disturbed"] = disturbed(rank, f"{folder}/disturbed")
    return seen


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("several")
    return folder, together(3, all_phases, str(folder), folder=folder / "worlds")


@pytest.mark.slow
def test_two_ranks_then_three_sharded_then_two_of_branches_then_one_continue_the_same_curve(
    several: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, answers = several
    reference = alike(build(0)["model"])
    for number, (ranks, how, start, stop) in enumerate(PHASES):
        seen = [answer[f"{number}"] for answer in answers[:ranks]]
        if how != "branch":
            wanted = advance(reference, stop - start)
            assert [one["loss"] for one in seen] == pytest.approx([wanted] * ranks, abs=1e-12)
        assert {one["kept"] for one in seen} == {stop}
        assert [rank["incidents"] for rank in seen] == [[]] * ranks
        assert {one["sharded"] for one in seen} == {how == "fsdp"}
        assert {one["loaded"] and one["loaded"][0] for one in seen} == {start or None}
    objects = alike(build(9)["model"])
    loaded = CheckpointManager(folder / "curve").load_latest(objects)
    assert loaded is not None
    assert (loaded.step, loaded.extra, loaded.same_world) == (7, {"by": 2}, False)
    assert advance(objects, 3) == pytest.approx(advance(reference, 3), abs=1e-12)


def test_all_ranks_agree_on_what_one_of_them_could_not_write_or_read(
    several: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, second = (path["disturbed"] for path in several[1][:2])
    assert first["kept"] == second["kept"] == 3
    assert {"plain-0.pt", "plain-1.pt", "manifest.json"} < set(first["files"])
    assert first["step"] == second["step"] == 1
    assert [incident.kind for incident in first["incidents"]] == [
        IncidentKind.FULL_DISK,
        IncidentKind.BAD_CHECKPOINT,
    ]
    assert second["incidents"] == []
    assert "model:left.weight" in first["raised"]
    assert "model:left.weight" in second["raised"]


# Names


def test_wrappers_do_not_change_names() -> None:
    plain = set(checkpoint_format.take_snapshot({"model": Net()}).tensors)
    assert (
        set(checkpoint_format.take_snapshot({"model": torch.compile(Net(), backend="eager")}).tensors)
        == plain
    )
    inner = Net()
    inner.left = torch.compile(inner.left, backend="eager")  # type: ignore[assignment]
    assert set(checkpoint_format.take_snapshot({"model": inner}).tensors) == plain


def test_the_size_of_what_is_saved_is_told_before() -> None:
    objects = build(0)
    before = checkpoint_format.take_snapshot(objects).size_bytes
    advance(objects, 1)
    trained = sum(parameter.numel() for parameter in objects["model"].parameters() if parameter.requires_grad)
    unused = objects["model"].unused.numel()
    assert checkpoint_format.take_snapshot(objects).size_bytes > before + 2 * 8 * (trained - unused)
