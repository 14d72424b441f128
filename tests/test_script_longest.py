"""The longest batch that a script's data set can give, and the memory that it should need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from trimtab.scripts.estimate import judge_longest, scale_longest
from trimtab.scripts.longest import LongestSample, find_longest
from trimtab.scripts.result import ScriptResult
from trimtab.scripts.script_search import need_with_longest
from trimtab.spec import Band, Estimate, Footprint, Verdict

GIB = 2**30


class Rows:
    """A data set of lists of tokens."""

    def __init__(self, lengths: list[int], **attributes: Any) -> None:
        self.rows = [{"input_ids": list(range(length)), "label": 0} for length in lengths]
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.rand(1)
        return self.rows[index]


def look(dataset: Any, collator: Any = None) -> tuple[int, str] | None:
    found = find_longest(SimpleNamespace(dataset=dataset, collate_fn=collator))
    return None if found is None else (found.length, found.where)


def test_samples_are_looked_at_and_leave_no_trace() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    assert look(Rows([3, 9, 4])) == (9, "all 3 samples of the data set")
    assert torch.equal(torch.random.get_rng_state(), state)
    many = Rows([5] * 1500 + [99])
    assert look(many) == (5, "the first 1,000 of 1,501 samples of the data set")


def test_lengths_that_a_data_set_holds_are_read() -> None:
    assert look(Rows([], sizes=[4, 70, 6])) == (70, "sizes of the data set, 3 samples")
    parts: Any = ConcatDataset([Rows([3]), Rows([8])])  # type: ignore[list-item]
    assert look(parts) == (8, "all 1 samples of the data set")
    subset: Any = Subset(Rows([3, 12]), [0])  # type: ignore[arg-type]
    assert look(subset) == (12, "all 2 samples of the data set")
    tensors = TensorDataset(torch.zeros(4, 16, dtype=torch.long))
    assert look(DataLoader(tensors).dataset) == (16, "all 4 samples of the data set")


def test_collators_and_data_sets_pad_and_cut() -> None:
    cuts = SimpleNamespace(max_length=6, padding=True)
    pads = SimpleNamespace(max_length=64, padding="max_length")
    assert look(Rows([3, 9]), cuts) == (6, "SimpleNamespace cuts to 6")
    assert look(Rows([3, 4]), cuts) == (4, "all 2 samples of the data set")
    assert look(Rows([3, 9]), pads) == (64, "SimpleNamespace pads to 64")
    assert look(Rows([3, 9], block_size=5)) == (5, "block_size of Rows")
    assert look(object(), cuts) is None


@pytest.mark.parametrize(
    "dataset", [None, iter([1]), [], [{"x": 0.5}], [torch.zeros(3, 4)], Rows([]), SimpleNamespace(dataset=3)]
)
def test_what_is_not_known_is_not_guessed(dataset: Any) -> None:
    assert look(dataset) is None


class Broken(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError("no such image")


def test_a_data_set_that_fails_does_not_stop_the_script() -> None:
    assert look(Broken([3])) is None


def make_estimate(activations: int = 6) -> Estimate:
    size = (2 + activations) * GIB
    return Estimate(
        allocated_bytes=size,
        reserved_bytes=size,
        process_bytes=size + GIB,
        capacity_bytes=16 * GIB,
        parts=Footprint(weights=2 * GIB, activations=activations * GIB, context=GIB),
        band=Band(low_bytes=size + GIB, high_bytes=size + GIB),
        fits=True,
        verdict=Verdict.FITS,
    )


def test_memory_at_the_longest_batch_is_scaled_and_counts_in_the_verdict() -> None:
    longest = LongestSample(length=1024, where="all 8 samples")
    result = ScriptResult(lengths=((256, 1), (512, 2)), longest=longest)
    estimate = make_estimate()
    phase = scale_longest(estimate, result)
    assert phase is not None
    assert phase.allocated_bytes == 14 * GIB
    assert "1,024 tokens (all 8 samples), scaled from 512" in phase.note
    assert need_with_longest(estimate, (phase,)) == 15 * GIB
    assert judge_longest(estimate, phase) == estimate
    large = make_estimate(activations=8)
    judged = judge_longest(large, scale_longest(large, result) or phase)
    assert (judged.fits, judged.verdict) == (False, Verdict.DOES_NOT_FIT)
    assert "the longest of the data set should need 19.0 GiB of 16.0 GiB" in judged.verdict_reason


def test_nothing_is_scaled_where_the_longest_was_seen_or_is_not_known() -> None:
    estimate = make_estimate()
    seen = LongestSample(length=512, where="all")
    assert scale_longest(estimate, ScriptResult(lengths=((512, 3),), longest=seen)) is None
    assert scale_longest(estimate, ScriptResult(lengths=((512, 3),))) is None
    assert scale_longest(estimate, ScriptResult(longest=seen)) is None
    assert need_with_longest(estimate, ()) == estimate.need_bytes
