"""A package whose compiled code does not match torch is named as the cause, not the job or trimtab."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from trimtab.catalog.torch_release import find_torch_release
from trimtab.errors import CannotFollow, JobFailed
from trimtab.jobs.load import job_error, tracing_error

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = """
import torch

@torch.library.register_fake("compiledops::nms")
def nms(boxes, scores, threshold):
    return boxes
"""
JOB = """
import torch


class Detector:
    def model(self):
        import compiledops
        return torch.nn.Linear(4, 4)

    def batch(self, samples):
        return torch.zeros(samples, 4)

    def loss(self, model, batch):
        return model(batch).mean()
"""
SCRIPT = "import compiledops\n"


def run_estimate(folder: Path, *arguments: str) -> str:
    (folder / "compiledops").mkdir()
    (folder / "compiledops" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "estimate", "--on", "H100", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == JobFailed.exit_code
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("arguments", [("job.py:Detector",), ("--", sys.executable, "train.py")])
def test_a_job_or_script_is_not_blamed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    text = run_estimate(tmp_path, *arguments)
    assert "operator compiledops::nms does not exist" in text
    assert f"compiledops was built for another torch than the installed {find_torch_release()}" in text
    assert "Fix model()" not in text
    assert "bug in trimtab" not in text


def test_a_symbol_that_torch_no_longer_has_means_the_same() -> None:
    message = "/lib/fast_ops.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    error = job_error("model()", ImportError(message), "Install what is missing.")
    assert error.cure.startswith("fast_ops was built for another torch than")
    other = ImportError("/lib/fast_ops.so: undefined symbol: PyFloat_Type")
    assert job_error("model()", other, "Install what is missing.").cure == "Install what is missing."


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "import torch._six",
            "torch {release}, which is installed, has no torch._six: install the release of",
        ),
        (
            "from torch.optim.adam import NAdamW",
            "torch.optim.adam of torch {release}, which is installed, has no NAdamW: install",
        ),
        ("import a_module_that_nobody_has", "Install what is missing."),
        ("from mine import missing", "Install what is missing."),
    ],
)
def test_an_installed_package_of_another_release_is_named(
    line: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("there = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as raised:
        exec(line, {})  # noqa: S102 - an import of the user's
    error = job_error("the script", raised.value, "Install what is missing.")
    assert error.cure.startswith(found.format(release=version("torch")))


def test_a_traceback_shows_imports_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.is_available()\nimport layers\n", "utf-8")
    (tmp_path / "layers.py").write_text("import torch._six\n", encoding="utf-8")
    command = ["estimate", "--on", "H100", "--", sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == JobFailed.exit_code
    files = [line.split('"')[1] for line in done.stderr.splitlines() if line.startswith('  File "')]
    assert [file.rpartition("/")[2] for file in files] == ["train.py", "layers.py"]


def test_an_operator_that_the_job_itself_lacks_stays_its_own_error() -> None:
    error = RuntimeError("operator mine::scale does not exist")
    assert isinstance(tracing_error("loss()", error, "Write it otherwise."), CannotFollow)
    assert job_error("loss()", error, "Fix loss().").cure == "Fix loss()."


def test_the_cause_of_an_import_error_is_looked_at() -> None:
    cause = ImportError("/lib/scatter_ops.so: undefined symbol: _ZN2at4_ops3addE")
    error = RuntimeError("Failed to import models.graph")
    error.__cause__ = cause
    assert job_error("model()", error, "Fix it.").cure.startswith("scatter_ops was built")
