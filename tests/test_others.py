"""The formulas of other estimators, as bench/others.py has them, give what their authors published."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bench import others

from trimtab.errors import BrokenFile, EnvironmentFault
from trimtab.exams.run import read_cases
from trimtab.units import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9
FOUR_ENCODERS = others.Encoder(parameters=105_207_680, layers=6, heads=12, width=384, length=512, channels=4)


def test_deepspeed_for_3b_on_eight_gpus_as_its_documentation_prints_it() -> None:
    assert f"{others.zero2(2851e6, 8) / GIB:.2f}" == "15.93"
    assert f"{others.zero3(2851e6, 32e6, 8) / GIB:.2f}" == "6.09"


def test_deepspeed_for_t5_large_on_four_gpus_as_its_documentation_prints_it() -> None:
    # To the MB, from parameters that are printed in units of 10,000.
    assert others.zero3(737.67e6, 32.90e6, 4) / MIB == pytest.approx(3291, abs=1)


@pytest.mark.parametrize("gpus", [1, 2, 16])
def test_more_gpus_never_need_more_each(gpus: int) -> None:
    assert others.zero2(1e9, gpus + 1) < others.zero2(1e9, gpus)
    assert others.zero3(1e9, 1e7, gpus + 1) < others.zero3(1e9, 1e7, gpus)


def test_guides_a_and_b_on_the_models_they_were_written_for() -> None:
    assert others.guide_a(others.FULL, 60, 0) == pytest.approx((14 + 13 + 8) * GB)
    assert others.guide_a(others.FULL, 60, 8) - others.guide_a(others.FULL, 60, 0) == pytest.approx(6 * GB)
    assert others.guide_b(others.FULL, 60, 4) == pytest.approx(34 * GB)


def test_guides_refuse_a_single_decoder() -> None:
    with pytest.raises(ValueError, match="shorter"):
        others.guide_a(others.FULL[:1], 32, 8)


@pytest.mark.parametrize(("batch", "printed"), [(4, 4.2), (45, 19.8), (128, 51.5)])
def test_guide_c_on_the_batches_it_publishes(batch: int, printed: float) -> None:
    """An anchor, a positive and 24 negatives a batch item; 1500 MB of context on top."""
    needed = others.guide_c(FOUR_ENCODERS, 26 * batch, recompute=True) + 1500 * MIB
    assert needed / GIB == pytest.approx(printed, abs=0.05)


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 16), ("float16", 8)])
def test_accelerate_counts_by_its_own_code(dtype: str, per_parameter: int) -> None:
    pytest.importorskip("accelerate")
    with torch.device("meta"):
        model = torch.nn.Linear(1000, 1000, bias=False)
    assert others.training_using_adam(model)[dtype] == per_parameter * 1_000_000


def test_without_accelerate_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("accelerate"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentFault, match="pip install accelerate"):
        others.training_using_adam(torch.nn.Linear(1, 1))


def test_what_an_estimator_does_not_cover_is_marked() -> None:
    """SGD, sharding and fp32 are none of their claims; plain mixed precision with AdamW is."""
    pytest.importorskip("accelerate")
    found = {}
    for name in ("gpt-bf16-b16", "gpt-sgd-fp32-b8", "fsdp16-gpt-fp32-b8"):
        case = read_cases(name)[0]
        model = others.built(case)
        found[name] = (others.accelerate_figure(case, model), others.deepspeed_figure(case, model))
    accelerate, deepspeed = found["gpt-bf16-b16"]
    assert accelerate is not None
    assert accelerate.covered
    assert deepspeed.covered
    # 124 million parameters, the tied head counted once.
    assert deepspeed.bytes == pytest.approx(20 * 124.4e6, rel=0.001)
    accelerate, deepspeed = found["gpt-sgd-fp32-b8"]
    assert accelerate is not None
    assert not accelerate.covered
    assert not deepspeed.covered
    assert found["fsdp16-gpt-fp32-b8"][0] is None


def test_errors_are_read_from_the_page_and_from_an_exam(tmp_path: Path) -> None:
    page = (
        f"text\n{others.EXAM_BEGIN}| | median |\n|---|--:|\n| allocated | 1% |\n\n"
        "| case | allocated GiB | error | reserved GiB | error |\n|---|--:|--:|--:|--:|\n"
        f"| one | 14.51 | -0.82% | 18.25 | +5.00% |\n{others.EXAM_END}\n"
    )
    assert others.errors_in_page(page) == {"one": pytest.approx(-0.0082)}
    exam = tmp_path / "exam.json"
    exam.write_text(
        '{"cases": [{"case": "one", "error": {"allocated_bytes": 0.5}}, {"case": "two", "failed": "why"}]}'
    )
    assert others.errors_in_exam(exam) == {"one": 0.5}


def test_every_predicted_case_of_the_page_is_a_recorded_one() -> None:
    found = others.errors_in_page(others.PAGE.read_text(encoding="utf-8"))
    assert set(found) <= {case.id for case in read_cases()}
    assert len(found) > 50


def test_tables_go_between_the_marks_and_nowhere_else() -> None:
    page = f"before\n{others.BEGIN}old\n{others.END}\nafter\n"
    assert others.placed(page, "new\n") == page.replace("old", "new")
    with pytest.raises(BrokenFile, match="marks"):
        others.placed(f"{others.BEGIN}the end is missing", "new\n")


def test_a_page_or_an_exam_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match=r"memory_exam\.py"):
        others.errors_in_page("no table here")
    with pytest.raises(BrokenFile, match="cannot be read"):
        others.errors_in_exam(tmp_path / "missing.json")
    for text in ("not json", "[]", '{"cases": [{}]}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(BrokenFile, match="trimtab exam --json"):
            others.errors_in_exam(tmp_path / "wrong.json")


def test_the_program_ends_with_a_message_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, others.__file__, "--exam", str(tmp_path / "missing.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 2
    assert "missing.json" in done.stderr
    assert "Traceback" not in done.stderr
