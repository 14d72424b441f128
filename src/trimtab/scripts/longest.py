"""Find the longest sequence that the data set of a script can give, without heavy work.

Looked at are a column of lengths or of lists in a `datasets.Dataset`, lists of lengths that a data set holds,
and else the first samples, for a second or two. Collators and data sets that pad or cut to a length are
taken at their word. Runs in the process that follows the script.
"""

from __future__ import annotations

import random
import time
from importlib import import_module
from typing import Any

from trimtab.spec.base import Noun

LENGTH_COLUMNS = ("length", "lengths", "num_tokens", "n_tokens", "seq_len")
TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids", "input_values")
LIMITS = (
    "max_seq_length",
    "max_seq_len",
    "max_length",
    "block_size",
    "seq_length",
    "seq_len",
    "context_length",
)
"""Attributes of data sets and collators that cut or pad samples."""
MOST_SAMPLES = 1000
MOST_S = 2.0
NO_LENGTH = 10**6
"""A tokenizer without a limit says a number beyond this."""


class LongestSample(Noun, frozen=True, kw_only=True):
    """The longest sequence that a data set can give."""

    length: int
    where: str
    """How it is known, and of how many samples."""


def find_longest(loader: Any) -> LongestSample | None:
    """Return the longest sequence of a loader's data set; None if it is not known."""
    dataset = getattr(loader, "dataset", None)
    limit = _find_limit(getattr(loader, "collate_fn", None), dataset)
    longest = _measure(dataset)
    if longest is None:
        return limit if limit is not None and "cuts" not in limit.where else None
    if limit is not None and limit.length < longest.length:
        return limit
    if limit is not None and "pads" in limit.where:
        return limit
    return longest


def _measure(dataset: Any) -> LongestSample | None:
    """Return the longest sample of a data set."""
    inner = dataset
    for _ in range(4):
        # Subset, IterableWrapper and the like: an upper bound of what they choose from.
        if _read_columns(inner) is not None or not hasattr(inner, "dataset"):
            break
        inner = inner.dataset
    parts = getattr(inner, "datasets", None)
    if isinstance(parts, list | tuple):
        known = [_measure(part) for part in parts]
        lengths = [part for part in known if part is not None]
        return max(lengths, key=lambda part: part.length) if len(lengths) == len(parts) and parts else None
    return _read_columns(inner) or _read_lengths(inner) or _sample(inner)


def _read_columns(dataset: Any) -> LongestSample | None:
    """Read the lengths of a datasets.Dataset from its table."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):
        return None
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None:
        return None
    try:
        compute: Any = import_module("pyarrow.compute")
        for name in LENGTH_COLUMNS:
            if name in columns:
                longest = compute.max(table.column(name)).as_py()
                if isinstance(longest, int):
                    where = f"the column {name} of {len(dataset):,} samples"
                    return LongestSample(length=longest, where=where)
        for name in TOKEN_COLUMNS:
            if name in columns:
                longest = compute.max(compute.list_value_length(table.column(name))).as_py()
                if longest:
                    where = f"the column {name} of {len(dataset):,} samples"
                    return LongestSample(length=longest, where=where)
    except Exception:  # noqa: BLE001 - another kind of table: the samples are looked at
        return None
    return None


def _read_lengths(dataset: Any) -> LongestSample | None:
    """Read a list of lengths that a data set holds."""
    for name in ("lengths", "sizes", "length_list"):
        values = getattr(dataset, name, None)
        if isinstance(values, list | tuple) and values and all(type(value) is int for value in values):
            return LongestSample(length=max(values), where=f"{name} of the data set, {len(values):,} samples")
    return None


def _sample(dataset: Any) -> LongestSample | None:
    """Look at the first samples, for a short time; the script's random numbers stay as they are."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002 - the script's
    ends_at = time.monotonic() + MOST_S
    longest = seen = 0
    try:
        count = len(dataset)
        for number in range(min(count, MOST_SAMPLES)):
            length = measure_sample(dataset[number])
            if length is None:
                return None
            longest, seen = max(longest, length), seen + 1
            if time.monotonic() > ends_at:
                break
    except Exception:  # noqa: BLE001 - the script's own data set; what it cannot give is not known
        return None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - the script's
        torch.random.set_rng_state(states[2])
    if not seen:
        return None
    part = "all" if seen == count else f"the first {seen:,} of"
    return LongestSample(length=longest, where=f"{part} {count:,} samples of the data set")


def measure_sample(sample: Any) -> int | None:
    """Return the length of a sample: of its tokens, or of its first row of whole numbers.

    >>> measure_sample({"input_ids": [1, 2, 3], "label": 0}), measure_sample([0.5, 0.5])
    (3, None)
    """
    if isinstance(sample, dict):
        named = [sample[name] for name in TOKEN_COLUMNS if name in sample]
        values = named or list(sample.values())
    else:
        is_row = isinstance(sample, list) and all(type(value) is int for value in sample)
        values = [sample] if is_row or not isinstance(sample, list | tuple) else list(sample)
    for value in values:
        length = _measure_row(value)
        if length is not None:
            return length
    return None


def _measure_row(value: Any) -> int | None:
    shape, dtype = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
    if shape is not None:
        return int(shape[0]) if len(shape) == 1 and "int" in dtype else None
    is_row = isinstance(value, list) and value and all(type(number) is int for number in value)
    return len(value) if is_row else None


def _find_limit(collator: Any, dataset: Any) -> LongestSample | None:
    """Return the length to which a collator or a data set pads or cuts."""
    name = type(collator).__name__
    length = getattr(collator, "max_length", None)
    if type(length) is int and 0 < length < NO_LENGTH:
        pads = getattr(collator, "padding", None) == "max_length"
        return LongestSample(length=length, where=f"{name} {'pads' if pads else 'cuts'} to {length:,}")
    for limit in LIMITS:
        length = getattr(dataset, limit, None)
        if type(length) is int and 0 < length < NO_LENGTH:
            return LongestSample(length=length, where=f"{limit} of {type(dataset).__name__}")
    return None
