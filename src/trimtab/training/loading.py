"""Load the samples of each optimizer step: sample order, data loader, and helpers for batches.

A window is one rank's samples of one global batch. Worker processes read it ahead of time. A rank then splits
it into micro-batches, and may split it differently in the next attempt without reading it again.
Random augmentation is seeded by sample and epoch. It does not depend on ranks, workers or resumes.
"""

from __future__ import annotations

import dataclasses
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
from trimtab.jobs.load import job_error
from trimtab.spec.base import Noun, check_minimum

if TYPE_CHECKING:
    from collections.abc import Sequence

    Indices = np.ndarray[Any, np.dtype[np.int64]]
    Words = np.ndarray[Any, np.dtype[np.uint64]]
    from collections.abc import Callable, Iterable, Iterator


# Sample order. The seed and the epoch alone determine the permutation of an epoch. A step takes the next
# `global_batch` samples, and ranks divide them. The order does not depend on ranks, micro-batch or workers.

_MASK = 2**64 - 1
_ROUNDS = 8
_MAX_SORTED = 4096
"""Datasets up to this size are sorted by a hash of each index: a Feistel network over few bits has too few
permutations to shuffle them well."""


class SampleOrder(Noun, frozen=True, kw_only=True):
    """All inputs that determine the order of samples.

    >>> order = SampleOrder(samples=10, global_batch=4, seed=1)
    >>> [len(order.batch(step).indices) for step in range(4)]
    [4, 4, 2, 4]
    """

    derived = ("steps_per_epoch",)

    samples: int
    """Samples in the dataset."""
    global_batch: int
    """Samples per optimizer step; the last step of an epoch takes the rest."""
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one epoch."""
        return -(-self.samples // self.global_batch)

    def faults(self) -> list[str]:
        """Return what is wrong: an epoch needs at least one global batch."""
        wrong = check_minimum(1, global_batch=self.global_batch)
        if self.samples < self.global_batch:
            wrong.append(f"{self.samples} samples do not make one global_batch of {self.global_batch}")
        return wrong

    def batch(self, step: int) -> GlobalBatch:
        """Return the samples of an optimizer step; steps count from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.samples)
        return GlobalBatch(step, epoch, epoch_order(self.seed, epoch, self.samples, start, stop))


class GlobalBatch(NamedTuple):
    """Dataset indices of the samples of one optimizer step."""

    step: int
    epoch: int
    indices: Indices


def epoch_order(seed: int, epoch: int, samples: int, start: int = 0, stop: int | None = None) -> Indices:
    """Return positions start to stop of the permutation of an epoch.

    A Feistel network keyed by seed and epoch permutes the numbers below a power of two. A number outside of
    the dataset goes through the network again until it is inside (cycle walking), so the result is a
    permutation. Each position is computed independently: a step costs the same for 10^12 samples as for 10^4,
    and no rank holds the whole order. Small datasets are sorted by a hash instead.

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
    """Apply the Feistel network: XOR each half in turn with a hash of the other."""
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
    """Hash keyed words with the finalizer of splitmix64; numpy's unsigned words wrap around silently."""
    words = values + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mix_seed(*numbers: int) -> int:
    """Return a 64-bit hash of several integers: the same on every machine and version.

    >>> mix_seed(1, 2) == mix_seed(1, 2), mix_seed(1, 2) == mix_seed(2, 1)
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
    """Return the start of each rank's slice of a batch, and the end of the last slice.

    Equal ranks differ by one sample at most. `shares` are the samples that each rank takes of a full global
    batch, if ranks differ: a full batch is divided exactly so, a short one in proportion.

    >>> rank_slice_bounds(10, 4), rank_slice_bounds(10, 2, shares=[30, 10])
    ([0, 2, 5, 7, 10], [0, 7, 10])
    """
    weights = list(shares) or [1] * data_parallel
    assert len(weights) == data_parallel  # noqa: S101 - a Setting checks its shares
    total, before = sum(weights), 0
    bounds = [0]
    for weight in weights:
        before += weight
        bounds.append(samples * before // total)
    return bounds


def rank_slice(indices: Indices, rank: int, data_parallel: int, shares: Sequence[int] = ()) -> Indices:
    """Return one data-parallel rank's slice of a batch; empty if there are too few samples."""
    bounds = rank_slice_bounds(len(indices), data_parallel, shares)
    return indices[bounds[rank] : bounds[rank + 1]]


_PREFETCH = 2
"""Windows that each worker prefetches."""


class CollatedSamples(NamedTuple):
    """Some samples of a window, collated for one forward and backward pass."""

    batch: Any
    samples: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Window:
    """One rank's samples of the global batch of one optimizer step."""

    step: int = 0
    """Counted from 0 over all epochs."""
    epoch: int = 0
    samples: int
    """Samples of the whole global batch, over all ranks."""
    indices: tuple[int, ...] = ()
    """Dataset indices of this rank's samples; empty for a wrapped plain batch."""
    size: int
    """Number of this rank's samples."""
    batch: Any = None
    """This rank's samples, collated. If `size` is 0, one filler sample. None if `items` is used."""
    items: Sequence[Any] = ()
    """The samples one by one, if the job has its own collate()."""
    collate: Callable[[list[Any]], Any] | None = None
    pin: bool = False

    def slice(self, start: int, stop: int) -> CollatedSamples:
        """Return samples start to stop of this rank, as views without a copy unless the job collates."""
        if self.collate is not None:
            batch = _collate_items(list(self.items[start:stop]), self.collate)
            batch = pin_batch(batch) if self.pin else batch
        elif (start, stop) == (0, self.size):
            batch = self.batch
        else:
            batch = slice_batch(self.batch, start, stop)
        return CollatedSamples(batch, stop - start, self.indices[start:stop])

    def micro_batches(self, micro_batch: int) -> list[CollatedSamples]:
        """Split the window into micro-batches of that size; the last may be smaller, and there may be none.

        >>> [micro_batch.samples for micro_batch in wrap_batch(torch.zeros(5, 2)).micro_batches(2)]
        [2, 2, 1]
        """
        starts = range(0, self.size, micro_batch)
        return [self.slice(start, min(start + micro_batch, self.size)) for start in starts]

    def split_sequences(self, split: Callable[[Any], Any]) -> Window:
        """Return the window with one rank's part of every sequence."""
        collate = self.collate
        if collate is not None:
            return dataclasses.replace(self, collate=lambda items: split(collate(items)))
        batch = split(self.batch)
        return dataclasses.replace(self, batch=pin_batch(batch) if self.pin else batch)

    def filler(self) -> Any:
        """Return one sample of the global batch, for a rank that must take part without its own samples."""
        return self.slice(0, 1).batch if self.size else self._collate_filler()

    def _collate_filler(self) -> Any:
        if self.collate is None:
            return self.batch
        batch = _collate_items(list(self.items), self.collate)
        return pin_batch(batch) if self.pin else batch


def wrap_batch(batch: Any, *, samples: int | None = None, step: int = 0, epoch: int = 0) -> Window:
    """Wrap a plain batch as a window; `samples` is the sum over ranks, if there are several."""
    try:
        size = samples_in(batch)
    except (TypeError, IndexError, StopIteration, AttributeError, RecursionError) as error:
        raise WrongUse(
            f"a batch of type {type(batch).__name__}",
            found="there is no tensor in it whose first dimension counts samples",
            cure="Give tensors, or dicts, lists or tuples of them, or a window of run.loader().",
        ) from error
    return Window(
        step=step, epoch=epoch, samples=size if samples is None else samples, size=size, batch=batch
    )


@dataclass(kw_only=True)
class Loader:
    """Iterate over the windows of one rank, in an order given by seed and epoch, from the current position.

    for window in loader:              # the rest of this epoch
        run.step(window)

    `windows(until)` continues over epochs. `step` counts the optimizer steps whose windows were returned.
    """

    dataset: Any
    order: SampleOrder
    rank: int = 0
    """Index among the data-parallel ranks."""
    data_parallel: int = 1
    shares: tuple[int, ...] = ()
    """Samples of a full global batch that each rank takes, if ranks differ."""
    workers: int = 0
    """Worker processes; 0 reads in this process, on demand."""
    pin: bool = False
    """Use pinned memory, which a GPU can copy from while it computes."""
    collate: Callable[[list[Any]], Any] | None = None
    """The job's collate function; None stacks the samples."""
    split: Callable[[Any], Any] | None = None
    """Returns this rank's part of the sequences of a batch; None if sequences are whole."""
    clock: Callable[[], float] = time.monotonic
    step: int = field(default=0, init=False)
    waited_s: float = field(default=0.0, init=False)
    """Total seconds spent waiting for samples."""
    _seeks: int = field(default=0, init=False)
    _reader: DataLoader[Any] | None = field(default=None, init=False)
    _step_range: list[int] = field(default_factory=lambda: [0, 0], init=False)

    @property
    def epoch(self) -> int:
        """Epoch of the next window."""
        return self.step // self.order.steps_per_epoch

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[Window]:
        yield from self.windows((self.epoch + 1) * self.order.steps_per_epoch)

    def windows(self, until: int) -> Iterator[Window]:
        """Yield the windows of steps `self.step` to until - 1; follow seek() if the position changes."""
        while self.step < until:
            seeks = self._seeks
            read = iter(self._open_reader(until))
            while self.step < until and seeks == self._seeks:
                began = self.clock()
                window = self._next(read)
                self.waited_s += self.clock() - began
                # Count before the yield: a checkpoint saved after this step must resume with the next one.
                self.step += 1
                yield window

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the sample order that it belongs to."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position, on any number of ranks."""
        for name, now in self._identity().items():
            if state[name] != now:
                raise WrongUse(
                    "the position in the data of this checkpoint",
                    found=f"it was saved with {name} {state[name]}, and this run has {now}",
                    cure=f"Resume with {name} {state[name]}, or start a new run in another folder.",
                )
        self.seek(state["step"])

    def seek(self, step: int) -> None:
        """Continue with the window of that step."""
        self.step = step
        self._seeks += 1

    def close(self) -> None:
        """Stop the workers."""
        self._reader = None

    def _identity(self) -> dict[str, int]:
        order = self.order
        return {"samples": order.samples, "global_batch": order.global_batch, "seed": order.seed}

    def _rank_slice(self) -> functools.partial[Any]:
        return functools.partial(
            rank_slice, rank=self.rank, data_parallel=self.data_parallel, shares=self.shares
        )

    def _open_reader(self, until: int) -> DataLoader[Any]:
        """Set the reader's range of steps; create it once, so that its workers persist over epochs."""
        self._step_range[:] = self.step, until
        if self._reader is None:
            source = _WindowDataset(
                self.dataset, self.order, self._rank_slice(), separate=self.collate is not None
            )
            self._reader = DataLoader(
                source,
                batch_size=None,
                sampler=_StepSampler(self._step_range),
                num_workers=self.workers,
                pin_memory=self.pin and self.collate is None,
                prefetch_factor=_PREFETCH if self.workers else None,
                persistent_workers=self.workers > 0,
                # A separate generator, or the reader would draw its seed from the random numbers of training.
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
                cure="Something killed a worker, usually for lack of memory or of space in /dev/shm: use "
                "fewer workers, as in --pin workers=0.",
            ) from error
        if isinstance(fetched, TrimtabError):
            raise fetched
        batch, packed = fetched
        global_batch = self.order.batch(self.step)
        mine = self._rank_slice()(global_batch.indices)
        window = Window(
            step=self.step,
            epoch=global_batch.epoch,
            samples=len(global_batch.indices),
            indices=tuple(mine.tolist()),
            size=len(mine),
            batch=batch,
            items=() if packed is None else pickle.loads(packed),  # noqa: S301 - packed by our worker
            collate=self.collate,
            pin=self.pin,
        )
        return window if self.split is None else window.split_sequences(self.split)


def build_sample_order(dataset: Any, global_batch: int, seed: int = 0) -> SampleOrder:
    """Return the sample order of a dataset; raise an error if it cannot be indexed or is too small."""
    if dataset is None:
        raise JobFailed("dataset()", found="it returned None", cure="Return the dataset to train on.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise JobFailed(
            "dataset()",
            found=f"a {type(dataset).__name__} has no index, only its own order of samples",
            cure="Return a dataset with __len__ and __getitem__(index): only such a dataset can be divided "
            "over ranks and resumed without losing or repeating a sample.",
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
    """Sampler that yields the steps which the loader last requested."""

    def __init__(self, step_range: list[int]) -> None:
        self.step_range = step_range

    def __iter__(self) -> Iterator[int]:
        return iter(range(*self.step_range))


class _WindowDataset(Dataset[Any]):
    """Map a step to the collated samples of one rank; return errors instead of raising them.

    A DataLoader worker cannot raise a TrimtabError: the main process would rebuild it from its text.
    """

    def __init__(
        self, dataset: Any, order: SampleOrder, slice_rank: Callable[[Any], Any], *, separate: bool
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.slice_rank = slice_rank
        self.separate = separate

    def __getitem__(self, step: int) -> tuple[Any, bytes | None] | TrimtabError:
        global_batch = self.order.batch(step)
        mine = self.slice_rank(global_batch.indices).tolist() or global_batch.indices[:1].tolist()
        try:
            items = self._items(global_batch.epoch, mine)
            if self.separate:
                # As bytes: thousands of tensors would each take a file descriptor between the processes.
                return None, pickle.dumps(items)
            return _collate_items(items, default_collate), None
        except TrimtabError as error:
            return error

    def _items(self, epoch: int, indices: Iterable[int]) -> list[Any]:
        """Read the samples, each with its own random seed; leave the random state of training unchanged."""
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
                    raise job_error(
                        f"dataset()[{index}]", error, "Fix the sample, or the code that reads it."
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
        cure = "Fix collate(items)."
        if collate is default_collate:
            cure = "Give samples of one shape, or a job with collate(items) that makes a batch of them."
        raise job_error(f"a batch of {len(items)} samples", error, cure) from error


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return samples start to stop of a collated batch: views of tensors, slices of lists of strings."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, list | tuple) and batch and all(isinstance(item, str | bytes) for item in batch):
        return batch[start:stop]
    return _map_container(batch, lambda item: slice_batch(item, start, stop))


def copy_batch(batch: Any) -> Any:
    """Copy a batch to host memory; a slice would keep the whole original in memory."""
    return _map_batch(batch, lambda tensor: tensor.detach().to("cpu", copy=True))


def _map_batch(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return _map_container(batch, lambda item: _map_batch(item, change))


def _map_container(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same container with `change` applied to each entry; return other values unchanged."""
    if isinstance(batch, dict):
        changed = {key: change(item) for key, item in batch.items()}
        return changed if type(batch) is dict else _rebuild_mapping(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(item) for item in batch)
    return batch


def _rebuild_mapping(batch: Any, changed: dict[Any, Any]) -> Any:
    """Return a mapping of the original class, such as a tokenizer's; a plain dict if it takes no dict."""
    try:
        return type(batch)(changed)
    except TypeError:
        return changed


def pin_batch(batch: Any) -> Any:
    """Return the batch with its tensors in pinned host memory; those on a device stay there."""
    # Elements of an expanded tensor share memory, and torch cannot write to a copy that does.
    return _map_batch(
        batch, lambda tensor: tensor.contiguous().pin_memory() if tensor.device.type == "cpu" else tensor
    )


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on a device; do not wait for a copy from pinned memory.

    >>> move_to_device({"ids": [torch.ones(2)], "name": "a"}, torch.device("cpu"))
    {'ids': [tensor([1., 1.])], 'name': 'a'}
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: move_to_device(item, device) for key, item in batch.items()}
        return moved if type(batch) is dict else _rebuild_mapping(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to_device(item, device) for item in batch)
    return batch


MAX_DIFFERENCES = 3
"""Differences between batch() and dataset() that an error shows."""
_MAX_ENTRIES = 8
"""Entries of a container that are shown."""


def describe_batch(batch: Any) -> str:
    """Describe the structure of a batch; n is the number of samples.

    >>> describe_batch({"x": torch.zeros(4, 8), "y": [torch.zeros(4), "a"]})
    '{x: float32 (n, 8), y: [float32 (n), str]}'
    """
    if isinstance(batch, torch.Tensor):
        shape = ["n", *map(str, batch.shape[1:])] if batch.dim() else []
        return f"{dtype_name(batch.dtype)} ({', '.join(shape)})"
    if isinstance(batch, Mapping):
        return "{" + _join_entries([f"{key}: {describe_batch(item)}" for key, item in batch.items()]) + "}"
    if isinstance(batch, list | tuple):
        return "[" + _join_entries([describe_batch(item) for item in batch]) + "]"
    return type(batch).__name__


def compare_batches(made: Any, read: Any, at: str = "batch") -> list[str]:
    """Describe each difference between a batch made by batch() and one read from dataset().

    The number of samples does not matter, nor lists instead of tuples: default_collate makes lists.

    >>> compare_batches({"x": torch.zeros(2, 8)}, {"x": torch.zeros(4, 8, dtype=torch.float64)})
    ["batch['x'] is float32 (n, 8) from batch() and float64 (n, 8) from dataset()"]
    """
    if _leaf_kind(made) == _leaf_kind(read):
        return []
    if isinstance(made, Mapping) and isinstance(read, Mapping):
        both = [key for key in made if key in read]
        inside = [
            difference
            for key in both
            for difference in compare_batches(made[key], read[key], f"{at}[{key!r}]")
        ]
        if len(both) == len(made) == len(read):
            return inside
        here, there = (_join_entries([str(key) for key in batch]) or "nothing" for batch in (made, read))
        return [f"{at} has {here} from batch() and {there} from dataset()", *inside]
    if isinstance(made, list | tuple) and isinstance(read, list | tuple) and len(made) == len(read):
        pairs = enumerate(zip(made, read, strict=True))
        return [
            difference for number, pair in pairs for difference in compare_batches(*pair, f"{at}[{number}]")
        ]
    return [f"{at} is {describe_batch(made)} from batch() and {describe_batch(read)} from dataset()"]


def _leaf_kind(item: Any) -> Any:
    """Return a key that equal leaves share; a container has its own, except a list of strings."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.dim(), item.shape[1:]
    if isinstance(item, Mapping | list | tuple):
        return "texts" if _is_text_list(item) else id(item)
    return type(item)


def _is_text_list(item: Any) -> bool:
    """Return whether an item is a list of strings, one per sample."""
    return (
        isinstance(item, list | tuple) and bool(item) and all(isinstance(text, str | bytes) for text in item)
    )


def _join_entries(words: list[str]) -> str:
    left = len(words) - _MAX_ENTRIES
    return ", ".join(words[:_MAX_ENTRIES] + ([f"and {left} more"] if left > 0 else []))
