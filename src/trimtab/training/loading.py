"""Reads the samples of each optimizer step: windows, which a rank cuts into parts of any size.

A window is what one rank takes of one global batch. It is read as a whole, ahead of time, by as many worker
processes as planned; how it is then cut may change from one attempt to the next without reading it again.
Random augmentation is seeded by sample and epoch, so ranks, workers and resumes have no say in it.
"""

from __future__ import annotations

import functools
import pickle
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from trimtab.engine.precision import dtype_name
from trimtab.errors import EnvironmentFault, JobFailed, TrimtabError, WrongUse
from trimtab.jobs.job import samples_in
from trimtab.jobs.load import failed
from trimtab.spec.base import Noun, check_minimum

if TYPE_CHECKING:
    from collections.abc import Sequence

    Indices = np.ndarray[Any, np.dtype[np.int64]]
    Words = np.ndarray[Any, np.dtype[np.uint64]]
    from collections.abc import Callable, Iterable, Iterator


# Which samples an optimizer step takes, and which of them a rank takes: pure sums.
#
# The order of an epoch is one permutation of the samples, drawn from the seed and the epoch alone. A step
# takes the next `global_batch` of them and ranks share that out, so the number of ranks, the micro-batch
# and the workers have no say in what is learnt from when.


_MASK = 2**64 - 1
_ROUNDS = 8
_MAX_SORTED = 4096
"""Datasets up to this size are put in the order of a hash of each number: a network over few bits has too few
permutations to be fair to them."""


class SampleOrder(Noun, frozen=True, kw_only=True):
    """What decides the order of samples, and nothing else does.

    >>> order = Order(samples=10, global_batch=4, seed=1)
    >>> [len(order.batch(step).indices) for step in range(4)]
    [4, 4, 2, 4]
    """

    derived = ("steps_per_epoch",)

    samples: int
    """In the dataset."""
    global_batch: int
    """Samples an optimizer step; the last step of an epoch takes what is left."""
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample once."""
        return -(-self.samples // self.global_batch)

    def faults(self) -> list[str]:
        """An epoch holds at least one global batch."""
        wrong = check_minimum(1, global_batch=self.global_batch)
        if self.samples < self.global_batch:
            wrong.append(f"{self.samples} samples do not make one global_batch of {self.global_batch}")
        return wrong

    def batch(self, step: int) -> GlobalBatch:
        """The samples of an optimizer step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.samples)
        return GlobalBatch(step, epoch, epoch_order(self.seed, epoch, self.samples, start, stop))


class GlobalBatch(NamedTuple):
    """The samples of one optimizer step."""

    step: int
    epoch: int
    indices: Indices


def epoch_order(seed: int, epoch: int, samples: int, start: int = 0, stop: int | None = None) -> Indices:
    """Places start to stop of the permutation of an epoch.

    A Feistel network keyed by seed and epoch permutes the numbers below a power of two; a number that lands
    outside of the dataset is sent through again until it lands inside, which keeps it a permutation. Each
    place is computed alone: a step of a dataset of 10^12 costs what a step of 10^4 does, and no rank ever
    holds the whole order. Small datasets are sorted by a hash instead.

    >>> sorted(epoch_order(seed=3, epoch=0, samples=5).tolist())
    [0, 1, 2, 3, 4]
    """
    stop = samples if stop is None else stop
    if samples <= _MAX_SORTED:
        keyed = _hash_words(np.arange(samples, dtype=np.uint64), mix_seed(seed, epoch))
        return np.argsort(keyed, kind="stable")[start:stop].astype(np.int64)
    values = np.arange(start, stop, dtype=np.uint64)
    bits = (samples - 1).bit_length()
    keys = [mix_seed(seed, epoch, number) for number in range(_ROUNDS)]
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _permute(values[outside], bits, keys)
        outside = values >= samples
    return values.astype(np.int64)


def _permute(values: Words, bits: int, keys: Sequence[int]) -> Words:
    """The Feistel network: each half in turn is changed by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_hash_words(high, key) & low_mask)
        else:
            high = high ^ (_hash_words(low, key) & high_mask)
    return (high << low_bits) | low


def _hash_words(values: Words, key: int) -> Words:
    """The finalizer of splitmix64, over keyed words; numpy's unsigned words wrap around silently."""
    words = values + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mix_seed(*numbers: int) -> int:
    """One word of 64 bits from several whole numbers: the same on every machine and version.

    >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
    (True, False)
    """
    word = 0
    for number in numbers:
        word = (word ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
        word ^= word >> 31
    return word


def rank_slice_bounds(samples: int, data_parallel: int, shares: Sequence[int] = ()) -> list[int]:
    """Where the share of each rank begins, and where the last one ends.

    Ranks that are alike differ by one sample at most. `shares` are the samples of a full global batch that
    unlike ranks take: a full batch is shared out exactly so, a short one in proportion.

    >>> bounds(10, 4), bounds(40, 2, shares=[30, 10]), bounds(10, 2, shares=[30, 10])
    ([0, 2, 5, 7, 10], [0, 30, 40], [0, 7, 10])
    """
    weights = list(shares) or [1] * data_parallel
    assert len(weights) == data_parallel  # noqa: S101 - a Setting checks its shares
    total, before = sum(weights), 0
    places = [0]
    for weight in weights:
        before += weight
        places.append(samples * before // total)
    return places


def rank_slice(indices: Indices, rank: int, data_parallel: int, shares: Sequence[int] = ()) -> Indices:
    """What one data-parallel rank takes of a batch: a run of it, empty where there are too few samples."""
    places = rank_slice_bounds(len(indices), data_parallel, shares)
    return indices[places[rank] : places[rank + 1]]


_PREFETCH = 2
"""Windows that each worker has ready."""


class CollatedSamples(NamedTuple):
    """Some samples of a window, collated: one forward and backward pass."""

    batch: Any
    samples: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one rank takes of the global batch of one optimizer step."""

    step: int = 0
    """Counted from 0 over all epochs."""
    epoch: int = 0
    samples: int
    """Of the whole global batch, over all ranks."""
    indices: tuple[int, ...] = ()
    """Of this rank's samples in the dataset; empty where a plain batch was wrapped."""
    size: int
    """This rank's samples."""
    batch: Any = None
    """All of them collated, one more than `size` (the filler) where there are none; None where `items` are
    kept instead."""
    items: Sequence[Any] = ()
    """The samples one by one, where the job collates them itself."""
    collate: Callable[[list[Any]], Any] | None = None
    pin: bool = False

    def part(self, start: int, stop: int) -> CollatedSamples:
        """Samples start to stop of this rank; free of charge where they are slices."""
        if self.collate is not None:
            batch = _collate_items(list(self.items[start:stop]), self.collate)
            batch = _map_batch(batch, _pin_tensor) if self.pin else batch
        elif (start, stop) == (0, self.size):
            batch = self.batch
        else:
            batch = slice_batch(self.batch, start, stop)
        return CollatedSamples(batch, stop - start, self.indices[start:stop])

    def parts(self, micro_batch: int) -> list[CollatedSamples]:
        """All of the window in parts of that size; the last may be smaller, and there may be none.

        >>> [one.samples for one in window_of(torch.zeros(5, 2)).parts(2)]
        [2, 2, 1]
        """
        starts = range(0, self.size, micro_batch)
        return [self.part(start, min(start + micro_batch, self.size)) for start in starts]

    def filler(self) -> Any:
        """One sample of the global batch, for a rank that has to take part without samples of its own."""
        return self.part(0, 1).batch if self.size else self._lone()

    def _lone(self) -> Any:
        if self.collate is None:
            return self.batch
        batch = _collate_items(list(self.items), self.collate)
        return _map_batch(batch, _pin_tensor) if self.pin else batch


def wrap_batch(batch: Any, *, samples: int | None = None, step: int = 0, epoch: int = 0) -> Window:
    """A plain batch as a window; `samples` is the sum over ranks, where there are several."""
    try:
        size = samples_in(batch)
    except (TypeError, IndexError, StopIteration, AttributeError, RecursionError) as error:
        raise WrongUse(
            f"a batch of type {type(batch).__name__}",
            found="there is no tensor in it whose first length counts samples",
            cure="Give tensors, or dicts, lists or tuples of them, or a window of run.loader().",
        ) from error
    return Window(
        step=step, epoch=epoch, samples=size if samples is None else samples, size=size, batch=batch
    )


@dataclass(kw_only=True)
class Loader:
    """Windows of one rank, in the order that seed and epoch decide, from where it stands.

    for window in loader:              # what is left of this epoch
        run.step(window)

    `windows(until)` goes on over epochs. `step` counts the optimizer steps that were handed out.
    """

    dataset: Any
    order: SampleOrder
    rank: int = 0
    """Among the data-parallel ranks."""
    data_parallel: int = 1
    shares: tuple[int, ...] = ()
    """Samples of a full global batch that each rank takes, where they are unlike."""
    workers: int = 0
    """Processes that read; 0 reads in this one, when the window is asked for."""
    pin: bool = False
    """Put batches where a GPU can copy them from while it computes."""
    collate: Callable[[list[Any]], Any] | None = None
    """The job's own; without it, samples are stacked."""
    clock: Callable[[], float] = time.monotonic
    step: int = field(default=0, init=False)
    waited_s: float = field(default=0.0, init=False)
    """Seconds spent waiting for samples, in all."""
    _moves: int = field(default=0, init=False)
    _reader: DataLoader[Any] | None = field(default=None, init=False)
    _asked: list[int] = field(default_factory=lambda: [0, 0], init=False)

    @property
    def epoch(self) -> int:
        """That the next window is of."""
        return self.step // self.order.steps_per_epoch

    def __len__(self) -> int:
        """Windows an epoch."""
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[Window]:
        yield from self.windows((self.epoch + 1) * self.order.steps_per_epoch)

    def windows(self, until: int) -> Iterator[Window]:
        """The windows of steps `self.step` to until - 1; goes on from elsewhere if the position is moved."""
        while self.step < until:
            moves = self._moves
            read = iter(self._reading(until))
            while self.step < until and moves == self._moves:
                began = self.clock()
                window = self._next(read)
                self.waited_s += self.clock() - began
                # Before it is handed out: what is saved after this step goes on with the one that follows.
                self.step += 1
                yield window

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved position, on any number of ranks."""
        for name, now in self._identity().items():
            if state[name] != now:
                raise WrongUse(
                    "the position in the data of this checkpoint",
                    found=f"it was saved with {name} {state[name]}, and this run has {now}",
                    cure=f"Resume with {name} {state[name]}, or start a new run in another folder.",
                )
        self.move(state["step"])

    def move(self, step: int) -> None:
        """Hand out that step next."""
        self.step = step
        self._moves += 1

    def close(self) -> None:
        """End the workers."""
        self._reader = None

    def _identity(self) -> dict[str, int]:
        order = self.order
        return {"samples": order.samples, "global_batch": order.global_batch, "seed": order.seed}

    def _share(self) -> functools.partial[Any]:
        return functools.partial(
            rank_slice, rank=self.rank, data_parallel=self.data_parallel, shares=self.shares
        )

    def _reading(self, until: int) -> DataLoader[Any]:
        """The reader, told where to begin; made once, so that its workers live through epochs."""
        self._asked[:] = self.step, until
        if self._reader is None:
            source = _WindowDataset(
                self.dataset, self.order, self._share(), separate=self.collate is not None
            )
            self._reader = DataLoader(
                source,
                batch_size=None,
                sampler=_StepSampler(self._asked),
                num_workers=self.workers,
                pin_memory=self.pin and self.collate is None,
                prefetch_factor=_PREFETCH if self.workers else None,
                persistent_workers=self.workers > 0,
                # Its own generator: the reader would draw a seed from the one that training draws from.
                generator=torch.Generator(),
            )
        return self._reader

    def _next(self, read: Iterator[Any]) -> Window:
        try:
            fetched = next(read)
        except RuntimeError as error:
            if "worker" not in str(error):
                raise
            raise EnvironmentFault(
                f"reading samples with {self.workers} workers",
                found=str(error).strip().split("\n")[0],
                cure="A worker was ended from outside, mostly for lack of memory or of room in /dev/shm: use "
                "fewer, as in --pin workers=0.",
            ) from error
        if isinstance(fetched, TrimtabError):
            raise fetched
        batch, packed = fetched
        all_of_it = self.order.batch(self.step)
        mine = self._share()(all_of_it.indices)
        return Window(
            step=self.step,
            epoch=all_of_it.epoch,
            samples=len(all_of_it.indices),
            indices=tuple(mine.tolist()),
            size=len(mine),
            batch=batch,
            items=() if packed is None else pickle.loads(packed),  # noqa: S301 - our own worker packed it
            collate=self.collate,
            pin=self.pin,
        )


def build_sample_order(dataset: Any, global_batch: int, seed: int = 0) -> SampleOrder:
    """The order of a dataset's samples; an error where it has none that can be kept."""
    if dataset is None:
        raise JobFailed("dataset()", found="it returned None", cure="Return the dataset to train on.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise JobFailed(
            "dataset()",
            found=f"a {type(dataset).__name__} gives its samples in an order of its own",
            cure="Return a dataset with __len__ and __getitem__(index): only such a one can be shared over "
            "ranks and resumed without losing or repeating a sample.",
        )
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise JobFailed(
            "dataset()",
            found=f"a {type(dataset).__name__} does not say how many samples it has",
            cure="Give it __len__.",
        ) from error
    if samples < global_batch:
        raise WrongUse(
            f"a dataset of {samples} samples",
            found=f"one optimizer step takes global_batch {global_batch}",
            cure=f"Give it at least {global_batch} samples, or a global_batch of at most {max(samples, 1)}.",
        )
    return SampleOrder(samples=samples, global_batch=global_batch, seed=seed)


class _StepSampler:
    """The steps to read, as the loader last asked for them."""

    def __init__(self, asked: list[int]) -> None:
        self.asked = asked

    def __iter__(self) -> Iterator[int]:
        return iter(range(*self.asked))


class _WindowDataset(Dataset[Any]):
    """Maps a step to the collated samples of one rank; what goes wrong is returned, whole, not raised.

    A worker process cannot raise an error of ours: the reader would rebuild it from a text.
    """

    def __init__(
        self, dataset: Any, order: SampleOrder, share: Callable[[Any], Any], *, separate: bool
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.share = share
        self.separate = separate

    def __getitem__(self, step: int) -> tuple[Any, bytes | None] | TrimtabError:
        wanted = self.order.batch(step)
        mine = self.share(wanted.indices).tolist() or wanted.indices[:1].tolist()
        try:
            items = self._items(wanted.epoch, mine)
            if self.separate:
                # As bytes: tensors by the thousand would each take a file descriptor on their way here.
                return None, pickle.dumps(items)
            return _collate_items(items, default_collate), None
        except TrimtabError as error:
            return error

    def _items(self, epoch: int, indices: Iterable[int]) -> list[Any]:
        """The samples, each read under random numbers of its own; those of training are left alone."""
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        items = []
        try:
            for index in indices:
                seed = mix_seed(self.order.seed, epoch, index)
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002 - what datasets draw from
                # Not torch.manual_seed, which would also seed the GPU that trains.
                torch.default_generator.manual_seed(seed % 2**63)
                try:
                    items.append(self.dataset[index])
                except Exception as error:
                    raise failed(
                        f"dataset()[{index}]", error, "Mend the sample, or the code that reads it."
                    ) from error
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])
        return items


def _collate_items(items: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    try:
        return collate(items)
    except Exception as error:
        cure = "Mend collate(items)."
        if collate is default_collate:
            cure = "Give samples of one shape, or a job with collate(items) that makes a batch of them."
        raise failed(f"a batch of {len(items)} samples", error, cure) from error


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Samples start to stop of a collated batch: views of its tensors, slices of its lists of texts."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, list | tuple) and batch and all(isinstance(one, str | bytes) for one in batch):
        return batch[start:stop]
    return _map_container(batch, lambda one: slice_batch(one, start, stop))


def copy_batch(batch: Any) -> Any:
    """A batch of its own in the host's memory: a part of another one would hold all of it."""
    return _map_batch(batch, lambda one: one.detach().to("cpu", copy=True))


def _map_batch(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return _map_container(batch, lambda one: _map_batch(one, change))


def _map_container(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with everything in it changed; anything else as it is."""
    if isinstance(batch, dict):
        changed = {key: change(one) for key, one in batch.items()}
        return changed if type(batch) is dict else _rebuild_mapping(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(one) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(one) for one in batch)
    return batch


def _rebuild_mapping(batch: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A dict of some other class, as tokenizers give it; a plain one where the class takes no dict."""
    try:
        return type(batch)(changed)
    except TypeError:
        return changed


def _pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


# Batches of any shape, brought to a device.


def move_to_device(batch: Any, device: torch.device) -> Any:
    """The batch on a device; from pinned memory without waiting for the copy.

    >>> on_device({"ids": [torch.ones(2)], "name": "a"}, torch.device("cpu"))
    {'ids': [tensor([1., 1.])], 'name': 'a'}
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: move_to_device(one, device) for key, one in batch.items()}
        return moved if type(batch) is dict else _rebuild_moved(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to_device(one, device) for one in batch)
    return batch


def _rebuild_moved(batch: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of some other class, as tokenizers give it; a plain one where the class takes no dict."""
    try:
        return type(batch)(moved)
    except TypeError:
        return moved


# Sets a batch that was read from a dataset beside one that the job's batch() makes, in words.


MAX_DIFFERENCES = 3
"""Differences that are told of."""
_MAX_ENTRIES = 8
"""Entries of a container that are shown."""


def describe_batch(batch: Any) -> str:
    """What a batch is made of; n stands for its samples.

    >>> sketch({"x": torch.zeros(4, 8), "y": [torch.zeros(4), "a"]})
    '{x: float32 (n, 8), y: [float32 (n), str]}'
    """
    if isinstance(batch, torch.Tensor):
        shape = ["n", *map(str, batch.shape[1:])] if batch.dim() else []
        return f"{dtype_name(batch.dtype)} ({', '.join(shape)})"
    if isinstance(batch, Mapping):
        return "{" + _join_entries([f"{key}: {describe_batch(one)}" for key, one in batch.items()]) + "}"
    if isinstance(batch, list | tuple):
        return "[" + _join_entries([describe_batch(one) for one in batch]) + "]"
    return type(batch).__name__


def compare_batches(made: Any, read: Any, at: str = "batch") -> list[str]:
    """A phrase for each place in which what dataset() gives is not like what batch() makes.

    How many samples there are does not count, and neither do lists for tuples: stacking makes them so.

    >>> differences({"x": torch.zeros(2, 8)}, {"x": torch.zeros(4, 8, dtype=torch.float64)})
    ["batch['x'] is float32 (n, 8) from batch() and float64 (n, 8) from dataset()"]
    """
    if _leaf_kind(made) == _leaf_kind(read):
        return []
    if isinstance(made, Mapping) and isinstance(read, Mapping):
        both = [key for key in made if key in read]
        inside = [
            compare_batch
            for key in both
            for compare_batch in compare_batches(made[key], read[key], f"{at}[{key!r}]")
        ]
        if len(both) == len(made) == len(read):
            return inside
        here, there = (_join_entries([str(key) for key in one]) or "nothing" for one in (made, read))
        return [f"{at} has {here} from batch() and {there} from dataset()", *inside]
    if isinstance(made, list | tuple) and isinstance(read, list | tuple) and len(made) == len(read):
        pairs = enumerate(zip(made, read, strict=True))
        return [
            compare_batch
            for number, pair in pairs
            for compare_batch in compare_batches(*pair, f"{at}[{number}]")
        ]
    return [f"{at} is {describe_batch(made)} from batch() and {describe_batch(read)} from dataset()"]


def _leaf_kind(item: Any) -> Any:
    """What two leaves are alike in; containers are none, but for a list with a text for each sample."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.dim(), item.shape[1:]
    if isinstance(item, Mapping | list | tuple):
        return "texts" if _is_text_list(item) else id(item)
    return type(item)


def _is_text_list(item: Any) -> bool:
    """Whether it is a list of texts, one a sample."""
    return (
        isinstance(item, list | tuple) and bool(item) and all(isinstance(text, str | bytes) for text in item)
    )


def _join_entries(words: list[str]) -> str:
    left = len(words) - _MAX_ENTRIES
    return ", ".join(words[:_MAX_ENTRIES] + ([f"and {left} more"] if left > 0 else []))
