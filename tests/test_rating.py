"""Ratings of MFU: against published figures, with those figures named, or not at all."""

from __future__ import annotations

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.tables import devices, mfu_references
from trimtab.predict.estimate import RATINGS, find_mfu_reference, model_kind, rate_mfu, warn_high_mfu
from trimtab.spec import Precision, Trace, Work

EMPTY: dict[str, object] = dict.fromkeys(
    ("order", "sizes", "streams", "parts", "modules", "ops", "module_names", "op_names"), ()
)


def trace_of(**flops: int) -> Trace:
    """A trace of one operation a kind; `grouped` is a grouped matrix product."""
    works = tuple(
        Work(
            op="aten::_grouped_mm" if kind == "grouped" else f"aten::{kind}",
            kind="matrix" if kind == "grouped" else kind,
            dtype="bfloat16",
            flops=count,
        )
        for kind, count in flops.items()
    )
    return Trace(**EMPTY, marks={}, works=works, sequence=tuple(range(len(works))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flops", "kind"),
    [
        ({"matrix": 95, "attention": 5}, "transformer"),
        ({"matrix": 90, "attention": 5, "convolution": 1}, "transformer"),
        ({"matrix": 50, "attention": 5, "convolution": 45}, None),
        ({"matrix": 100}, None),
        ({"convolution": 100}, None),
        ({"matrix": 50, "attention": 5, "grouped": 45}, None),
        ({}, None),
    ],
)
def test_the_kind_of_a_model_is_told_by_what_it_computes(flops: dict[str, int], kind: str | None) -> None:
    assert model_kind(trace_of(**flops)) == kind


@pytest.mark.parametrize("name", ["H100", "H200", "A100-80GB", "A100-40GB"])
def test_28_percent_is_never_excellent(name: str) -> None:
    usual = find_mfu_reference("transformer", parse_cluster(name).devices[0], Precision.BF16.dtypes)
    assert usual is not None
    assert rate_mfu(0.28, usual) == "fair"
    assert rate_mfu(usual.low, usual) == "good"
    assert rate_mfu(usual.high + 0.01, usual) == "excellent"
    assert rate_mfu(0.05, usual) == "poor"
    assert "runs" in usual.figures


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [
        ("H100", None, Precision.BF16),
        ("H100", "transformer", Precision.FP32),
        ("RTX4090", "transformer", Precision.BF16),
    ],
)
def test_without_figures_there_is_no_adjective(name: str, kind: str | None, precision: Precision) -> None:
    usual = find_mfu_reference(kind, parse_cluster(name).devices[0], precision.dtypes)
    assert usual is None
    assert rate_mfu(0.9, usual) is None


def test_every_row_has_known_devices_and_a_range() -> None:
    known = {row.name for row in devices()}
    for row in mfu_references():
        assert set(row.devices) <= known
        assert 0 < row.low < row.high <= 100
        assert row.source.startswith("https://")
    assert len(RATINGS) == 4


def test_a_predicted_mfu_above_all_published_runs_is_doubted() -> None:
    usual = find_mfu_reference("transformer", parse_cluster("H100").devices[0], Precision.BF16.dtypes)
    assert usual is not None
    doubt = warn_high_mfu(usual.high + 0.08, usual)
    assert "54%" in doubt
    assert usual.figures in doubt
    assert warn_high_mfu(usual.high, usual) == warn_high_mfu(None, usual) == warn_high_mfu(0.9, None) == ""
