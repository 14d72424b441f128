"""Precisions are rows of dtypes: no module tests the name of one, and a new one takes a row alone."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

import trimtab
from trimtab.catalog.clusters import parse_cluster
from trimtab.configs.targets import WORDS as CONFIG_WORDS
from trimtab.engine.precision import HALF, dtype_name, torch_dtype
from trimtab.engine.step import prepare_job, run_step
from trimtab.planner import pins
from trimtab.planner.space import _explain_precision, can_run
from trimtab.spec import Dtypes, Precision, Setting
from trimtab.spec.hardware import PEAK_NAMES
from trimtab.spec.precision import DTYPE_BYTES, without_float8
from trimtab.training.optimizer_step import initial_scale

PACKAGE = Path(trimtab.__file__).parent
DOCS = PACKAGE.parent.parent / "docs"
MODULES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "spec" / "precision.py")
OLDER = list(Precision)[:5]
WORDS = {precision.value for precision in Precision}
JOB = """\
import torch
from torch import nn


class Job:
    def model(self):
        frozen = nn.Linear(256, 256).requires_grad_(False)
        return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), frozen, nn.Linear(256, 256))

    def batch(self, count):
        return torch.randn(count, 256)

    def loss(self, model, batch):
        return model(batch).float().square().mean()

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)
"""


def is_member(node: ast.AST) -> bool:
    """Whether an expression is one precision by name: Precision.BF16, or a tuple that has one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(is_member, node.elts))
    return isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "Precision"


def has_word(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and part.value in WORDS for part in ast.walk(node))


def compares_name(node: ast.AST) -> bool:
    """Whether a piece of code tests a precision's name: a comparison, a case, a table by name."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        about = any("precision" in ast.unparse(side).lower() for side in sides)
        return any(map(is_member, sides)) or (about and any(map(has_word, sides)))
    if isinstance(node, ast.Dict):
        return any(key is not None and is_member(key) for key in node.keys)
    return isinstance(node, ast.MatchValue) and is_member(node.value)


def name_tests(source: str) -> list[str]:
    if "precision" not in source.lower():
        return []
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if compares_name(node)]


def test_no_module_tests_the_name_of_a_precision() -> None:
    found = {file.relative_to(PACKAGE): name_tests(file.read_text(encoding="utf-8")) for file in MODULES}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "setting.precision is Precision.BF16",
        "setting.precision in (spec.Precision.FP32, spec.Precision.TF32)",
        "choice.precision == 'bf16'",
        "NAMES = {Precision.BF16: 'bf16'}",
        "match precision:\n    case Precision.BF16:\n        pass",
    ],
)
def test_a_test_of_the_name_is_caught(source: str) -> None:
    assert len(name_tests(source)) == 1


def test_a_word_as_data_is_allowed() -> None:
    assert name_tests("precision = 'bf16'\nchosen = Precision.BF16\nsetting.precision is chosen") == []


@pytest.mark.parametrize("precision", Precision)
def test_json_has_the_word_and_nothing_else(precision: Precision) -> None:
    setting = Setting(micro_batch=1, global_batch=1, precision=precision)
    assert json.loads(setting.to_json())["precision"] == precision.value
    assert Setting.from_json(setting.to_json()) == setting
    assert setting.dtypes is precision.dtypes


def test_the_fingerprint_of_a_setting_is_that_of_earlier_versions() -> None:
    # It changes only if Setting gets a field, as with base, loss, offload, stage_layers and the mesh's ep.
    settings = [Setting(micro_batch=1, global_batch=1, precision=precision) for precision in OLDER]
    found = [setting.fingerprint() for setting in settings]
    assert found == ["6d672b9aa1a5", "75b4d2bac7eb", "4cc7587cb9ff", "d15f272b001b", "65033fbbcfd2"]


@pytest.mark.parametrize(
    "wrong",
    [{"autocast": "float32"}, {"weights": "bf16"}, {"reductions": "nf4"}],
    ids=str,
)
def test_a_row_that_cannot_be_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="Dtypes"):
        Dtypes(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", Precision)
def test_every_row_has_one_without_fp8(precision: Precision) -> None:
    wide = without_float8(precision)
    assert wide.dtypes.products_format is None
    assert (wide is precision) is (precision.dtypes.products_format is None)


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_names_of_dtypes_are_those_of_torch(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name
    assert torch_dtype(name).itemsize == DTYPE_BYTES[name]
    assert (torch_dtype(name) in HALF) == (DTYPE_BYTES[name] < 4)
    assert name in PEAK_NAMES


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "job.py"
    file.write_text(JOB, encoding="utf-8")
    return f"{file}:Job"


@pytest.mark.parametrize("precision", Precision)
def test_the_engine_takes_a_step_as_the_row_says(job: str, precision: Precision) -> None:
    dtypes = precision.dtypes
    loaded = trimtab.load(job)
    setting = Setting(micro_batch=4, global_batch=4, precision=precision)
    before = torch.get_default_dtype()
    state = prepare_job(loaded, setting, "cpu")
    assert torch.get_default_dtype() is before
    assert torch.backends.cuda.matmul.allow_tf32 is dtypes.tf32_products
    seen: list[torch.dtype] = []
    first = next(module for module in state.model.modules() if isinstance(module, torch.nn.Linear))
    first.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    run_step(state, [torch.randn(4, 256, dtype=torch_dtype(dtypes.weights))])
    assert [dtype_name(dtype) for dtype in seen] == [dtypes.compute]
    for parameter in state.model.parameters():
        wanted = dtypes.weights if parameter.requires_grad else dtypes.frozen_weights
        assert dtype_name(parameter.dtype) == wanted
        assert parameter.grad is None or dtype_name(parameter.grad.dtype) == dtypes.gradients
    moments = [kept["exp_avg"].dtype for kept in state.phases[0].optimizers[0].optimizer.state.values()]
    assert {dtype_name(dtype) for dtype in moments} == {dtypes.optimizer_states}
    assert (initial_scale(dtypes).value > 1.0) is dtypes.scales_loss


@pytest.mark.parametrize("precision", Precision)
def test_every_face_knows_a_precision(precision: Precision) -> None:
    assert pins.check_pin("precision", precision.value, "--pin") == precision.value
    assert precision.value in CONFIG_WORDS["precision"]
    assert precision.value in str(trimtab.explain(precision.value))
    b200, v100 = (parse_cluster(name).devices[0] for name in ("B200", "V100-32GB"))
    assert can_run(b200, precision)
    assert b200.peaks.get_rate(precision.dtypes.products)
    assert can_run(v100, precision) is (v100.peaks.get_rate(precision.dtypes.products) is not None)


@pytest.mark.parametrize(("precision", "chosen"), [*permutations(Precision, 2)])
def test_a_plan_says_why_it_does_not_take_a_precision(precision: Precision, chosen: Precision) -> None:
    if chosen.dtypes.keeps_float32:
        assert precision.value in _explain_precision(precision, chosen, parse_cluster("H100").devices)


def test_the_documentation_lists_the_rows() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    for precision in Precision:
        dtypes = precision.dtypes
        cells = [precision.value, dtypes.products, dtypes.weights, dtypes.gradients]
        cells += [dtypes.optimizer_states, dtypes.reductions, "yes" if dtypes.scales_loss else "no"]
        assert cells in rows


NEW = """\
    FP16_TRUE = "fp16-true", Dtypes(weights=FLOAT16, frozen_weights=FLOAT16, reductions=FLOAT16)
    BF16_SUMS = "bf16-sums", Dtypes(autocast=BFLOAT16, reductions=BFLOAT16)
"""
ASK = """\
import json, sys, trimtab
from trimtab.spec import Precision
job = sys.argv[1]
found = {}
for on, strategy, precision in (
    ("H100", "single", "fp32"),
    ("H100", "single", "fp16-true"),
    ("2x2xH100", "fsdp", "bf16"),
    ("2x2xH100", "fsdp", "bf16-sums"),
):
    network = "1Gb/node" if "x" in on else None
    options = dict(precision=precision, strategy=strategy, micro_batch=4, network=network)
    made = trimtab.estimate(job, on, **options)
    found[precision] = json.loads(made.to_json())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_new_row_is_all_that_a_new_precision_takes(job: str, tmp_path: Path) -> None:
    package = tmp_path / "source" / "trimtab"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    table = package / "spec" / "precision.py"
    text = table.read_text(encoding="utf-8")
    table.write_text(re.sub(r"(?m)^    FP32 = ", f"{NEW}    FP32 = ", text), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, job], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    half, whole = found["fp16-true"], found["fp32"]
    for part in ("weights", "gradients", "optimizer"):
        assert half["parts"][part] == pytest.approx(whole["parts"][part] / 2, rel=0.1)
    assert half["step_s"] > 0
    # Gradients are sent in half the bytes, over a network that cannot hide them.
    narrow, wide = found["bf16-sums"], found["bf16"]
    assert narrow["parts"]["weights"] == wide["parts"]["weights"]
    assert narrow["allocated_bytes"] <= wide["allocated_bytes"]
    assert narrow["step_time"]["communication_s"] < wide["step_time"]["communication_s"]
