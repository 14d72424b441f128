"""The order of samples, their loading, and the folder of a run."""

from __future__ import annotations

import doctest
import errno
import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from trimtab.errors import EnvironmentFault, JobFailed, TrimtabError, WrongUse
from trimtab.files import write_atomic
from trimtab.spec import Incident, IncidentKind, Setting
from trimtab.training import checkpoint_format, loading
from trimtab.training import loading as loading_module
from trimtab.training import run_folder as folder_module
from trimtab.training.loading import (
    Loader,
    SampleOrder,
    Window,
    build_sample_order,
    epoch_order,
    rank_slice,
    rank_slice_bounds,
    slice_batch,
    wrap_batch,
)
from trimtab.training.run_folder import RunFolder, RunIdentity, make_folder_error

# Loading


def test_a_batch_with_an_expanded_tensor_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
        # Nothing can be pinned without a GPU; there torch copies into memory of the same strides.
        return torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", copy_with_strides)
    positions = torch.arange(4).expand(3, 4)
    assert torch.equal(loading.pin_batch([positions])[0], positions)


# Order


@given(seed=st.integers(-10, 2**70), epoch=st.integers(0, 10**6), samples=st.integers(1, 9000))
@settings(max_examples=80, deadline=None)
def test_an_epoch_is_a_permutation_and_its_pieces_are_pieces_of_it(
    seed: int, epoch: int, samples: int
) -> None:
    whole = epoch_order(seed, epoch, samples)
    assert sorted(whole.tolist()) == list(range(samples))
    start, stop = samples // 3, samples - samples // 4
    assert epoch_order(seed, epoch, samples, start, stop).tolist() == whole[start:stop].tolist()


def test_epochs_and_seeds_have_orders_of_their_own_which_do_not_change_with_versions() -> None:
    assert epoch_order(0, 0, 1000).tolist() != epoch_order(0, 1, 1000).tolist()
    assert epoch_order(0, 1, 1000).tolist() != epoch_order(1, 0, 1000).tolist()
    # A run that is resumed under another version of anything has to go on in the same order.
    assert epoch_order(7, 3, 1000, 0, 8).tolist() == [332, 501, 445, 96, 9, 769, 871, 697]
    assert epoch_order(7, 3, 10**9, 10**8, 10**8 + 3).tolist() == [900792951, 617806044, 80627239]


@pytest.mark.parametrize("samples", [4, 7, 300, 5000, 100_000])
def test_every_sample_is_as_likely_in_every_place(samples: int) -> None:
    epochs, most = 1500, min(samples, 50)
    for place in (0, samples // 2, samples - 1):
        drawn = [int(epoch_order(11, epoch, samples, place, place + 1)[0]) for epoch in range(epochs)]
        counted = np.bincount(np.array(drawn) * most // samples, minlength=most)
        widths = np.bincount(np.arange(samples) * most // samples) / samples
        chi = float(((counted - epochs * widths) ** 2 / (epochs * widths)).sum())
        # Five standard deviations of chi-square above its mean.
        assert chi < most - 1 + 5 * (2 * (most - 1)) ** 0.5


def test_every_order_of_a_small_dataset_is_as_likely() -> None:
    orders = Counter(tuple(epoch_order(1, epoch, 4).tolist()) for epoch in range(4800))
    assert len(orders) == 24
    assert 140 < min(orders.values()) <= max(orders.values()) < 260


@pytest.mark.parametrize("samples", [300, 100_000])
def test_a_sample_says_nothing_about_the_one_after_it(samples: int) -> None:
    pairs = [epoch_order(2, epoch, samples, 10, 12) for epoch in range(2000)]
    steps = np.array([(int(b) - int(a)) % samples for a, b in pairs]) * 20 // samples
    counted = np.bincount(steps, minlength=20)
    assert 50 < counted.min() <= counted.max() < 150


@given(
    samples=st.integers(1, 400),
    batch=st.integers(1, 60),
    ranks=st.integers(1, 9),
    epoch=st.integers(0, 3),
    unlike=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_or_seen_twice_in_an_epoch_on_any_number_of_ranks(
    samples: int, batch: int, ranks: int, epoch: int, unlike: bool
) -> None:
    batch = min(batch, samples)
    shares = tuple(range(1, ranks + 1)) if unlike else ()
    sample_order = SampleOrder(samples=samples, global_batch=batch, seed=5)
    seen: list[int] = []
    for step in range(epoch * sample_order.steps_per_epoch, (epoch + 1) * sample_order.steps_per_epoch):
        taken = sample_order.batch(step)
        assert (taken.step, taken.epoch) == (step, epoch)
        parts = [rank_slice(taken.indices, rank, ranks, shares).tolist() for rank in range(ranks)]
        # In one piece and in order: the global batch is the same on any number of ranks.
        assert [index for part in parts for index in part] == taken.indices.tolist()
        seen += taken.indices.tolist()
    assert sorted(seen) == list(range(samples))
    assert len(sample_order.batch(0).indices) == batch


@given(samples=st.integers(0, 500), weights=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_unlike_ranks_take_their_shares_exactly_and_short_batches_in_proportion(
    samples: int, weights: list[int]
) -> None:
    total = sum(weights)
    full = rank_slice_bounds(total, len(weights), weights)
    assert [b - a for a, b in pairwise(full)] == weights
    short = rank_slice_bounds(samples, len(weights), weights)
    for weight, a, b in zip(weights, short, short[1:], strict=False):
        assert abs((b - a) - samples * weight / total) < 1
    alike = rank_slice_bounds(samples, len(weights))
    sizes = [b - a for a, b in pairwise(alike)]
    assert max(sizes) - min(sizes) <= 1


def test_a_step_of_a_huge_dataset_costs_no_more_than_its_samples() -> None:
    taken = SampleOrder(samples=10**12, global_batch=64).batch(12_345_678_901)
    assert len(set(taken.indices.tolist())) == 64
    assert 0 <= taken.indices.min() <= taken.indices.max() < 10**12


def test_an_order_of_less_than_one_batch_cannot_be() -> None:
    with pytest.raises(ValueError, match="3 samples do not make one global_batch of 4"):
        SampleOrder(samples=3, global_batch=4)
    with pytest.raises(ValueError, match="global_batch is 0"):
        SampleOrder(samples=3, global_batch=0)


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (loading_module, loading, folder_module, checkpoint_format):
        assert doctest.testmod(module).failed == 0


# Loading


class Rows:
    """Samples with everything that a batch may hold, and random numbers of each kind."""

    def __init__(self, count: int = 23, broken: int = -1) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ZeroDivisionError("no such luck")
        return {
            "x": torch.full((2,), float(index)),
            "pair": (torch.tensor(index), [torch.tensor([index])]),
            "text": f"sample {index}",
            "noise": (torch.rand(()), random.random(), np.random.rand()),  # noqa: S311, NPY002
        }


class Lines(Rows):
    """Samples of unlike lengths."""

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index % 4 + 1)


def padded(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1)


def loader(dataset: Any = None, batch: int = 5, **kwargs: Any) -> Loader:
    dataset = Rows() if dataset is None else dataset
    return Loader(dataset=dataset, order=build_sample_order(dataset, batch, 1), **kwargs)


def noises(window: Window) -> dict[int, tuple[float, ...]]:
    columns = [one.tolist() for one in window.batch["noise"]]
    return dict(zip(window.indices, zip(*columns, strict=True), strict=True))


def test_augmentation_is_the_same_for_any_number_of_ranks_and_workers_and_differs_by_epoch() -> None:
    plain = [noises(window) for window in loader().windows(10)]
    assert plain[0].keys().isdisjoint(plain[1])
    by_epoch = [{key: value for some in plain[a : a + 5] for key, value in some.items()} for a in (0, 5)]
    assert by_epoch[0].keys() == by_epoch[1].keys() == set(range(23))
    assert all(by_epoch[0][index] != by_epoch[1][index] for index in range(23))
    assert len({value for some in by_epoch for one in some.values() for value in one}) == 2 * 3 * 23
    ranks = [
        [noises(window) for window in loader(rank=rank, data_parallel=3, workers=2 * (rank == 1)).windows(10)]
        for rank in range(3)
    ]
    assert [{**a, **b, **c} for a, b, c in zip(*ranks, strict=True)] == plain


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_the_random_numbers_of_training_alone(workers: int) -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    wanted = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: S311, NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    list(loader(workers=workers))
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == wanted  # noqa: S311, NPY002


def test_a_window_is_cut_into_parts_that_are_views_of_it() -> None:
    window = next(iter(loader(batch=7)))
    assert (window.step, window.epoch, window.samples, window.size) == (0, 0, 7, 7)
    parts = window.micro_batches(3)
    assert [part.samples for part in parts] == [3, 3, 1]
    assert sum((part.indices for part in parts), ()) == window.indices
    for part in parts:
        assert part.batch["x"][:, 0].tolist() == list(part.indices)
        assert part.batch["pair"][0].tolist() == list(part.indices)
        assert part.batch["pair"][1][0][:, 0].tolist() == list(part.indices)
        assert list(part.batch["text"]) == [f"sample {index}" for index in part.indices]
        assert part.batch["x"].untyped_storage().data_ptr() == window.batch["x"].untyped_storage().data_ptr()
    assert window.micro_batches(7)[0].batch is window.batch
    assert window.micro_batches(100)[0].samples == 7
    assert window.filler()["x"].shape == (1, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_job_that_collates_does_so_for_each_part(workers: int) -> None:
    read = loader(Lines(), batch=6, workers=workers, collate=padded)
    window = next(iter(read))
    for part in window.micro_batches(2):
        lengths = [index % 4 + 1 for index in part.indices]
        assert part.batch.shape == (2, max(lengths))
        assert (part.batch >= 0).sum(1).tolist() == lengths
    assert window.batch is None


@pytest.mark.parametrize("collate", [None, padded], ids=["stacked", "own"])
def test_a_rank_without_samples_has_no_parts_and_a_filler(collate: Any) -> None:
    dataset = Rows(9) if collate is None else Lines(9)
    read = [loader(dataset, 4, rank=rank, data_parallel=3, collate=collate) for rank in range(3)]
    last = [list(one)[-1] for one in read]
    assert [one.size for one in last] == [0, 0, 1]
    assert {one.samples for one in last} == {1}
    assert last[0].micro_batches(2) == []
    assert last[0].indices == ()
    filler = last[0].filler()
    assert len(filler["x"] if collate is None else filler) == 1
    assert repr(filler) == repr(last[2].filler())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_another_stood_also_on_other_ranks(workers: int) -> None:
    one = loader(workers=workers)
    seen = [window.indices for _, window in zip(range(7), one.windows(99), strict=False)]
    state = json.loads(json.dumps(one.state_dict()))
    assert (one.step, one.epoch, state["step"]) == (7, 1, 7)
    rest = [loader(rank=rank, data_parallel=2) for rank in range(2)]
    for other in rest:
        other.load_state_dict(state)
    seen += [a.indices + b.indices for a, b in zip(*rest, strict=True)]
    assert Counter(index for some in seen for index in some) == dict.fromkeys(range(23), 2)
    assert len(rest[0]) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_is_moved_while_windows_are_handed_out_is_noticed(workers: int) -> None:
    one = loader(workers=workers)
    steps = []
    for window in one.windows(6):
        steps.append(window.step)
        if steps == [0, 1, 2, 3]:
            one.seek(1)
    assert steps == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert [window.step for window in one] == [6, 7, 8, 9]
    one.close()


def test_waiting_for_samples_is_measured() -> None:
    ticks = iter(range(0, 1000, 2))
    one = loader(clock=lambda: float(next(ticks)))
    list(one)
    assert one.waited_s == 10.0


def test_a_plain_batch_is_a_window() -> None:
    class Pair(NamedTuple):
        ids: torch.Tensor
        mask: torch.Tensor

    window = wrap_batch(Pair(torch.arange(5), torch.ones(5, 2)), samples=10, step=3)
    assert (window.size, window.samples, window.step) == (5, 10, 3)
    parts = window.micro_batches(4)
    assert [part.batch.ids.tolist() for part in parts] == [[0, 1, 2, 3], [4]]
    assert isinstance(parts[0].batch, Pair)
    assert slice_batch({"rate": torch.tensor(1.0), "n": 3}, 0, 1) == {"rate": torch.tensor(1.0), "n": 3}


@pytest.mark.parametrize("batch", [{}, [], 5, "text"])
def test_a_batch_without_samples_is_refused(batch: Any) -> None:
    with pytest.raises(WrongUse, match="no tensor in it"):
        wrap_batch(batch)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "kind", "match"),
    [
        (None, JobFailed, "returned None"),
        (Stream(), JobFailed, "own order of samples.*__len__ and __getitem__"),
        (iter([1]), JobFailed, "own order of samples"),
        (Endless(), JobFailed, "does not say how many.*Give it __len__"),
        (range(7), WrongUse, "a dataset of 7 samples: one optimizer step takes global_batch 8.*at most 7"),
        ([], WrongUse, "a dataset of 0 samples"),
    ],
)
def test_a_dataset_that_cannot_be_trained_on_says_why(
    dataset: Any, kind: type[TrimtabError], match: str
) -> None:
    with pytest.raises(kind, match=match):
        build_sample_order(dataset, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_goes_wrong_in_a_dataset_names_the_sample(workers: int) -> None:
    with pytest.raises(JobFailed, match=r"dataset\(\)\[4\]: ZeroDivisionError: no such luck \(.*line"):
        list(loader(Rows(broken=4), workers=workers))
    with pytest.raises(JobFailed, match="Give samples of one shape, or a job with collate"):
        list(loader(Lines(), workers=workers))
    with pytest.raises(JobFailed, match="a batch of 2 samples: TypeError"):
        next(iter(loader(collate=torch.stack))).micro_batches(2)


class Deadly(Rows):
    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), 9)
        return index


def test_a_worker_that_is_killed_is_an_error_with_a_cure() -> None:
    with pytest.raises(EnvironmentFault, match=r"with 1 workers: .*(killed|exited).*--pin workers=0"):
        list(loader(Deadly(), workers=1))


@pytest.mark.parametrize(("name", "value"), [("samples", 24), ("global_batch", 6), ("seed", 2)])
def test_a_position_in_other_data_is_refused(name: str, value: int) -> None:
    state = loader().state_dict() | {name: value}
    with pytest.raises(WrongUse, match=f"saved with {name} {value}"):
        loader().load_state_dict(state)


# The run folder

IDENTITY = RunIdentity(job="jobs/mine.py:Mine", options={"width": 8}, global_batch=8, seed=1)
PLAN = Setting(micro_batch=2, accumulation=4, global_batch=8)


def opened(out: Path, **changes: Any) -> RunFolder:
    given: dict[str, Any] = {"identity": IDENTITY, "plan": PLAN, "patience_s": 0.3}
    return RunFolder.open(out, **(given | changes))


def incident(step: int = 1) -> Incident:
    return Incident(kind=IncidentKind.RESIZE, at_s=1.0, step=step, why="two ranks are left", done="replanned")


def test_a_run_folder_holds_plan_log_and_events_and_is_taken_up_again(tmp_path: Path) -> None:
    first = opened(tmp_path / "new" / "run")
    first.log_step({"step": 1, "loss": 2.5})
    first.log_event(incident())
    first.close()
    again = opened(tmp_path / "new" / "run", plan=PLAN.replace(micro_batch=8, accumulation=1))
    again.log_step({"step": 2, "loss": 2.25})
    assert again.read_lines() == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    assert again.read_events() == [incident()]
    assert Setting.from_json(again.plan_file.read_text()).micro_batch == 8
    assert sorted(path.name for path in again.root.iterdir()) == [
        "checkpoints",
        "events.jsonl",
        "log.jsonl",
        "plan.json",
        "run.json",
        "run.lock",
    ]
    again.close()


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    other = opened(tmp_path / "run", main=False)
    other.log_step({"step": 1})
    other.log_event(incident())
    other.write_plan(PLAN)
    assert other.rewind(0) == 0
    assert not (tmp_path / "run").exists()


def test_steps_that_are_taken_again_have_one_line_each(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for step in range(1, 8):
        folder.log_step({"step": step, "loss": 1 / step})
    assert folder.rewind(4) == 3
    assert folder.rewind(4) == 0
    folder.log_step({"step": 5, "loss": 0.2})
    assert [line["step"] for line in folder.read_lines()] == [1, 2, 3, 4, 5]
    folder.close()


def test_a_line_that_a_crash_has_torn_is_taken_off(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.log_step({"step": 1})
    folder.close()
    with folder.log_file.open("ab") as stream:
        stream.write(b'{"step": 2, "lo')
    again = opened(tmp_path)
    again.log_step({"step": 2})
    assert [line["step"] for line in again.read_lines()] == [1, 2]
    assert folder.log_file.read_bytes().count(b"\n") == 2
    again.close()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"job": "jobs/other.py:Mine"}, "job mine.py:Mine, not other.py:Mine"),
        ({"global_batch": 16}, "global_batch 8, not 16"),
        ({"seed": 2}, "seed 1, not 2"),
        ({"options": {"width": 9}}, "options {'width': 8}, not {'width': 9}"),
    ],
)
def test_the_folder_of_another_run_is_refused_and_left_as_it_was(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    opened(tmp_path).close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(WrongUse, match=f"another run's: that one has {match}"):
        opened(tmp_path, identity=IDENTITY.replace(**changes), plan=PLAN.replace(workers=2))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_the_same_job_named_from_another_folder_is_the_same_run(tmp_path: Path) -> None:
    opened(tmp_path).close()
    opened(tmp_path, identity=IDENTITY.replace(job="/home/me/jobs/mine.py:Mine")).close()


def test_a_namesake_is_another_file_with_something_else_in_it(tmp_path: Path) -> None:
    one, copied, other = (tmp_path / name for name in ("one.py", "copied.py", "other.py"))
    for file, text in ((one, "a"), (copied, "a"), (other, "b")):
        file.write_text(text)
    begun = IDENTITY.with_file(one)
    assert begun.is_namesake(IDENTITY.with_file(other))
    assert not begun.is_namesake(IDENTITY.with_file(copied))
    one.write_text("edited")
    assert not begun.is_namesake(IDENTITY.with_file(one))
    # What is not known does not count: built-in jobs, files that are gone, folders of earlier versions.
    for unknown in (IDENTITY.with_file(None), IDENTITY.with_file(tmp_path / "gone.py")):
        assert unknown == IDENTITY
        assert not begun.is_namesake(unknown)
        assert not unknown.is_namesake(begun)
    assert not begun.differences(IDENTITY.with_file(other))


def test_the_folder_of_stages_is_not_a_runs(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text("{}")
    with pytest.raises(WrongUse, match="the folder of a training in stages"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["stages.json"]


def test_a_folder_that_something_else_wrote_is_refused_but_other_files_are_no_harm(tmp_path: Path) -> None:
    (tmp_path / "slurm.out").write_text("hello")
    (tmp_path / "plan.json").write_text("{}")
    opened(tmp_path).close()
    other = tmp_path / "other"
    other.mkdir()
    (other / "log.jsonl").write_text("mine")
    with pytest.raises(WrongUse, match=r"a log.jsonl in it that no run of ours wrote"):
        opened(other)
    assert (other / "log.jsonl").read_text() == "mine"


def test_a_run_json_that_is_torn_is_said(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "run.json").write_text('{"job": ')
    with pytest.raises(WrongUse, match=r"run.json: it is not JSON"):
        opened(tmp_path)


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WrongUse, match="it is a file"):
        opened(tmp_path / "file")
    with pytest.raises(WrongUse, match="a part of its path is a file"):
        opened(tmp_path / "file" / "below")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place that nobody can write to")
def test_a_folder_that_cannot_be_made_is_a_fault_of_the_environment() -> None:
    with pytest.raises(EnvironmentFault, match=r"--out /proc/trimtab: it cannot be"):
        opened(Path("/proc/trimtab"))


@pytest.mark.parametrize(
    ("code", "kind", "match"),
    [
        (errno.EROFS, EnvironmentFault, "cannot be written: Read-only file system"),
        (errno.EACCES, EnvironmentFault, "cannot be written: Permission denied"),
        (errno.ENOSPC, EnvironmentFault, "its disk is full"),
        (errno.EDQUOT, EnvironmentFault, "your share of it"),
        (errno.ENOTDIR, WrongUse, "a part of its path is a file"),
        (errno.EIO, EnvironmentFault, "cannot be used: Input/output error"),
    ],
)
def test_what_a_disk_says_is_said_in_words(code: int, kind: type[TrimtabError], match: str) -> None:
    told = make_folder_error("--out x", OSError(code, os.strerror(code), "x"))
    assert isinstance(told, kind)
    assert match in told.found


def test_a_disk_without_room_for_checkpoints_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="are free there, and the checkpoints of this run take"):
        opened(tmp_path, needs_bytes=2**60)
    # It was let go of again.
    opened(tmp_path).close()


_HOLDER = """
import sys, time
from pathlib import Path
from trimtab.training.run_folder import RunFolder, RunIdentity
from trimtab.spec import Setting
RunFolder.open(sys.argv[1], identity=RunIdentity.from_json(sys.argv[2]), plan=Setting.from_json(sys.argv[3]))
print("held", flush=True)
time.sleep(60)
"""


def test_two_processes_do_not_train_into_one_folder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path), IDENTITY.to_json(), PLAN.to_json()],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentFault, match=f"process {holder.pid} on .* is training into it"):
            opened(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    opened(tmp_path).close()


def test_a_full_disk_does_not_stop_what_is_only_told(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    folder.log_step({"step": 1})
    folder.close()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_atomic(file, b"old", sync=True)
    for sync in (False, True):
        with pytest.raises(TypeError):
            write_atomic(file, 7, sync=sync)  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
