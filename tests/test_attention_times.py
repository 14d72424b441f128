"""The time of fused attention: whole tiles, instructions of an A100 on later GPUs, fp32 made of tf32."""

from __future__ import annotations

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.predict.op_time import (
    CUDNN,
    CUDNN_BACKWARD,
    EFFICIENT,
    FLASH,
    Pace,
    Rates,
    ampere_share,
    device_rates,
    roofline_s,
)
from trimtab.spec import Work

A100 = "A100-80GB"


def rates(name: str) -> Rates:
    found = device_rates(parse_cluster(f"1x{name}").devices[0])
    assert found is not None
    return found


def attend(op: str, tokens: int, *, heads: int = 65_536, dtype: str = "bfloat16", causal: int = 0) -> Work:
    flops = 4 * heads * tokens * tokens * 64 // (1 + causal)
    return Work(
        op=op, kind="attention", dtype=dtype, flops=flops, dims=(heads, 1, tokens, tokens, 64, causal)
    )


def arithmetic_s(work: Work, name: str) -> float:
    device = rates(name)
    return roofline_s(work, device) - roofline_s(work.replace(flops=0), device)


@pytest.mark.parametrize("tokens", [8, 64, 127])
def test_cudnns_forward_kernel_takes_as_long_for_few_tokens_as_for_a_tile(tokens: int) -> None:
    assert arithmetic_s(attend(CUDNN, tokens), "H200") == pytest.approx(
        arithmetic_s(attend(CUDNN, 128), "H200")
    )


def test_one_token_above_a_tile_takes_another_tile() -> None:
    one, two = (arithmetic_s(attend(CUDNN, tokens), "H200") for tokens in (128, 129))
    assert two == pytest.approx(4 * one)


@pytest.mark.parametrize("op", [FLASH, EFFICIENT])
def test_older_kernels_have_tiles_of_64(op: str) -> None:
    assert arithmetic_s(attend(op, 49), A100) == pytest.approx(arithmetic_s(attend(op, 64), A100))


def test_cudnns_backward_kernel_grows_with_the_tokens_but_not_with_their_square() -> None:
    few, more, tile = (arithmetic_s(attend(CUDNN_BACKWARD, tokens), "H200") for tokens in (8, 64, 128))
    assert tile / more == pytest.approx(169 / 105, rel=0.01)
    assert more / few == pytest.approx(105 / 49, rel=0.01)


def test_causal_attention_within_a_tile_saves_nothing() -> None:
    assert arithmetic_s(attend(CUDNN, 128, causal=1), "H200") == pytest.approx(
        arithmetic_s(attend(CUDNN, 128), "H200")
    )
    both, causal = (
        arithmetic_s(attend(CUDNN, 8192, heads=8, causal=causal), "H200") for causal in (False, True)
    )
    assert causal / both == pytest.approx(65 / 128)


@pytest.mark.parametrize(
    ("name", "share"), [(A100, 1.0), ("RTX4090", 1.0), ("RTX5090", 1.0), ("H100", 0.6), ("B200", 0.6)]
)
def test_instructions_of_an_a100_reach_less_on_later_gpus_of_data_centres(name: str, share: float) -> None:
    assert ampere_share(parse_cluster(f"1x{name}").devices[0]) == share


def test_flash_attention_is_slowed_by_its_instructions_and_cudnns_is_not() -> None:
    slowed = arithmetic_s(attend(FLASH, 1024, heads=64), "H200")
    assert slowed == pytest.approx(arithmetic_s(attend(CUDNN, 1024, heads=64), "H200") / 0.6)
    assert arithmetic_s(attend(FLASH, 1024, heads=64), A100) == pytest.approx(
        arithmetic_s(attend(CUDNN, 1024, heads=64), A100)
    )


def test_fp32_attention_takes_three_products_in_tf32_whatever_torch_allows() -> None:
    exact, allowed = (
        arithmetic_s(attend(EFFICIENT, 1024, heads=64, dtype=dtype), A100) for dtype in ("float32", "tf32")
    )
    half = arithmetic_s(attend(EFFICIENT, 1024, heads=64), A100)
    # Products in tf32 run at half the rate of bf16.
    assert exact == allowed == pytest.approx(6 * half)


def test_without_tf32_attention_runs_at_the_rate_of_fp32() -> None:
    device = rates("T4")
    work = attend(EFFICIENT, 1024, heads=64, dtype="float32")
    assert device.split is None
    assert roofline_s(work, device) > work.flops / device.float32


def test_a_measured_time_in_tf32_corrects_attention_in_fp32() -> None:
    from trimtab.predict.op_time import calibration_points
    from trimtab.spec import Calibration

    device = rates("H200")
    works = tuple(
        attend(EFFICIENT, tokens, heads=64, dtype="tf32") for tokens in (256, 512, 1024, 2048, 4096)
    )
    taken = Calibration(
        device="H200",
        versions={},
        taken_on="2026-11-20",
        works=works,
        seconds=tuple(3 * roofline_s(work, device) for work in works),
    )
    pace = Pace(device, calibration_points(taken, device))
    work = works[2].replace(dtype="float32")
    assert pace.seconds(work) == pytest.approx(3 * roofline_s(work, device))
