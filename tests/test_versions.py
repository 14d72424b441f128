from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import machines as m
from trimtab.catalog import tables, torch_release
from trimtab.errors import EnvironmentFault
from trimtab.probe import versions
from trimtab.probe.detect import detect
from trimtab.probe.machine import replay_machine
from trimtab.version import VERSION


def whats(record: dict[str, object]) -> list[str]:
    return [finding.what for finding in detect(replay_machine(record)).findings]


def test_versions_that_fit_have_nothing_to_say() -> None:
    assert whats(m.machine([m.h100()])) == []


def test_torchs_cuda_release_is_read_without_importing_torch() -> None:
    found = detect(replay_machine(m.recorded("h200"))).versions
    assert (found.torch, found.torch_cuda, found.torch_hip) == ("2.11.0", "13.0", None)
    assert (found.driver, found.driver_cuda, found.nccl) == ("580.159.04", "13.0", "2.28.9")


@pytest.mark.parametrize(
    ("driver", "cuda", "old"),
    [
        ("580.65.06", "13.0", False),
        ("580.65.05", "13.0", True),
        ("575.57.08", "13.2", True),
        ("525.60.13", "12.8", False),
        ("520.61.05", "12.6", True),
        ("610.43.02", "13.0", False),
    ],
)
def test_a_driver_too_old_for_torchs_cuda_is_an_error(driver: str, cuda: str, old: bool) -> None:
    record = m.machine([m.h100()], driver=driver, torch_cuda=cuda)
    assert any("driver is too old" in what for what in whats(record)) == old


def test_the_cure_for_an_old_driver_names_both_ways_out() -> None:
    found = detect(replay_machine(m.machine([m.h100()], driver="570.26"))).findings[0]
    assert found.severity.value == "error"
    assert "Update the driver to 580.65.06" in found.cure
    assert "torch built for CUDA 12" in found.cure


def test_a_cpu_build_beside_a_gpu_is_a_warning() -> None:
    record = m.machine([m.h100()], torch="2.13.0+cpu", torch_cuda=None)
    assert whats(record) == ["torch is a CPU build: it cannot use the GPU here."]


@pytest.mark.parametrize(
    ("torch", "fits"),
    [
        ("2.8.1", False),
        ("2.9.1", False),
        ("2.11.0", True),
        ("2.11.0+cu126", True),
        ("2.13.1", True),
        ("2.15.0", True),
        ("2.16.0a0+git1234", False),
        ("3.0", False),
        ("1.13.1", False),
    ],
)
@pytest.mark.parametrize("gpus", [None, [m.h100()]])
def test_a_torch_that_trimtab_is_not_made_for_is_a_warning(
    torch: str, fits: bool, gpus: list[m.Gpu] | None
) -> None:
    found = detect(replay_machine(m.machine(gpus, torch=torch))).findings
    said = [one for one in found if "releases that trimtab is made for" in one.what]
    assert len(said) == (not fits)
    assert all(one.severity.value == "warning" for one in said)
    assert all("'torch>=2.11,<2.16'" in one.cure for one in said)


def test_the_releases_of_torch_are_those_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    row = tables.torch_releases()
    major, minor = row.newest.split(".")
    assert f'"torch>={row.oldest},<{major}.{int(minor) + 1}"' in text


@pytest.mark.parametrize(("cuda", "nccl"), [("13.0", "2.28.9"), ("12.8", "2.27.3")])
def test_nccl_is_the_one_for_torchs_cuda(cuda: str, nccl: str) -> None:
    both = {"package:nvidia-nccl-cu13": "2.28.9", "package:nvidia-nccl-cu12": "2.27.3"}
    found = detect(replay_machine(m.machine([m.h100()], torch_cuda=cuda, host=both))).versions
    assert found.nccl == nccl
    assert found.sources["nccl"] == f"detected: metadata of nvidia-nccl-cu{cuda[:2]}"


@pytest.mark.parametrize(
    ("count", "torch_cuda", "said"), [(2, "13.0", True), (1, "13.0", False), (2, None, False)]
)
def test_several_gpus_without_nccl_are_a_warning(count: int, torch_cuda: str | None, said: bool) -> None:
    none = {"package:nvidia-nccl-cu13": None, "package:nvidia-nccl-cu12": "2.27.3"}
    record = m.machine([m.h100() for _ in range(count)], torch_cuda=torch_cuda, host=none)
    assert any("no NCCL for torch's CUDA 13.0" in what for what in whats(record)) == said


def test_no_torch_is_nothing_to_complain_about() -> None:
    assert whats(m.machine([m.h100()], torch=None)) == []


@pytest.mark.parametrize(
    ("capability", "cuda", "reached"),
    [
        ((7, 0), "13.0", False),
        ((7, 0), "12.6", True),
        ((7, 5), "13.0", True),
        ((8, 9), "13.0", True),
        ((10, 0), "12.6", False),
        ((10, 3), "12.8", True),
        ((12, 1), "13.0", True),
        ((13, 0), "13.0", True),
        ((13, 0), "12.8", False),
    ],
)
def test_a_device_that_torchs_build_has_no_code_for_is_an_error(
    capability: tuple[int, int], cuda: str, reached: bool
) -> None:
    gpu = m.h100(name="NVIDIA Something", capability=capability)
    found = whats(m.machine([gpu], torch_cuda=cuda))
    assert any("carries no code" in what for what in found) != reached


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(versions).failed == 0


def test_a_torch_that_is_not_supported_is_refused_by_name_before_a_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release, found in (("2.10.0+cu128", "supports torch 2.11 to 2.15"), ("2.16.1", "2.11 to 2.15")):
        monkeypatch.setattr(torch_release, "version", lambda _, release=release: release)
        with pytest.raises(EnvironmentFault) as caught:
            torch_release.require_supported_torch()
        assert caught.value.given == f"torch {release}"
        assert found in caught.value.found
        assert "pip install 'torch>=2.11,<2.16'" in caught.value.cure
    # The first command that needs torch says it, before the job's own code is touched.
    package = tmp_path / "torch-2.8.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n", encoding="utf-8"
    )
    job = tmp_path / "job.py"
    job.write_text("raise SystemExit('the job was run')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "estimate", f"{job}:Any", "--on", "H200", "--micro-batch", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TRIMTAB_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 5
    assert done.stderr.startswith("error: torch 2.8.0\n")
    assert "the job was run" not in done.stderr


def test_the_changelog_and_the_citation_have_this_version() -> None:
    root = Path(__file__).parent.parent
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)", headings[1])
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert f"({citation['date-released']})" in headings[1]
