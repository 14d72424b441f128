"""Commands that need no torch work where it is not installed; the others name what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import run_samples
from bare_environments import ROOT, link_dependencies, make_environment, run_bare
from trimtab.jobs.decoder_shape import describe_decoder_job
from trimtab.planner.plan_files import UNCHECKED, collect_fingerprints
from trimtab.spec import Plan
from trimtab.trace.job_summary import hash_source_file, summarize_job
from trimtab.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

JOB = """\
import torch
from tokens import count


class Mine:
    global_batch = 32

    def model(self):
        return torch.nn.Linear(4, 4)

    def batch(self, size):
        return torch.zeros(size, count)

    def loss(self, model, batch):
        return model(batch).mean()
"""
CONFIG = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nbf16: true\n"
LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
MODEL = ROOT / "bench" / "models" / "llama-8b"

WORKING = {
    "detect": ("This machine",),
    "detect --json": ('"nodes"',),
    "detect --on 2x8xH100": ("H100",),
    "detect --list": ("MI300X",),
    "explain fsdp": ("FSDP2",),
    "doctor": ("torch is not installed for this Python",),
    "apply plan.json --to config.yaml": ("+per_device_train_batch_size: 8",),
    "apply plan.json --to config.yaml --yes": ("written: config.yaml",),
    "revert config.yaml": ("+per_device_train_batch_size: 4",),
    "apply --list-targets": ("transformers",),
    "show config.yaml": ("per_device_train_batch_size",),
    "launch plan.json": ("trimtab train", "--plan plan.json"),
    "launch plan.json --slurm": ("#SBATCH",),
    "launch plan.json --json": ('"command"',),
    "jobs": ("no job",),
    "watch run --samples 1": ("run: ",),
    "watch run --samples 1 --json": ('"runs"',),
    "report plan.json -o plan.html": ("plan.html",),
    "report run -o run.html": ("run.html",),
    "exam --outside --source torchtune": ("torchtune",),
    "--version": (f"trimtab {VERSION}",),
    "--help": ("Commands:",),
    "train --help": ("Usage: trimtab train",),
    "launch --help": ("Usage: trimtab launch",),
}
"""For each command a part of what it prints."""
NEED_TORCH = (
    "estimate job.py:Mine --on H100 --micro-batch 1",
    "estimate --on H100 -- {python} job.py",
    "plan job.py:Mine --on H100",
    "plan slm --stages default --on H100",
    "max slm --on H100 --of micro_batch",
    "explore slm --on H100 --no-browser",
    "train slm:tiny --out new",
    "train slm:tiny --stages default --out new",
    "launch job.py:Mine --on H100",
    "calibrate",
    "calibrate --links --procs 2",
    "exam",
)


def write_inputs(folder: Path) -> None:
    """Write a job, a plan of it, a run by that plan, a log and a config."""
    (folder / "tokens.py").write_text("count = 4\n", encoding="utf-8")
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (folder / "oom.log").write_text(LOG, encoding="utf-8")
    plan = run_samples.plan("job.py:Mine")
    assert plan.workload is not None
    files = {name: hash_source_file(folder / name) for name in ("job.py", "tokens.py")}
    versions = {"trimtab": VERSION, "torch": "2.13.0"}
    assumed = collect_fingerprints(plan.job, plan.workload.replace(files=files), plan.places, versions)
    plan = plan.replace(fingerprints=assumed, folder=str(folder))
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    run_samples.run(folder / "run", of=plan)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = make_environment(tmp_path_factory.mktemp("bare") / "venv")
    link_dependencies(python)
    return python


def check_working(python: Path, folder: Path) -> None:
    """Run every command that needs no torch, and compare what it prints."""
    for command, parts in WORKING.items():
        done = run_bare(python, *command.split(), cwd=folder)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        missing = [part for part in parts if part not in done.stdout]
        assert not missing, f"{command}: {missing} not in {done.stdout}"


@pytest.mark.slow
def test_commands_that_need_no_torch_work_without_it(bare: Path, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    check_working(bare, tmp_path)
    assert "times the prediction" in run_bare(bare, "doctor", "run", cwd=tmp_path).stdout
    failed = run_bare(bare, "doctor", "oom.log", "--json", cwd=tmp_path)
    assert json.loads(failed.stdout)["findings"][0]["kind"] == "out-of-memory"
    words = ("layouts", f"hf:{MODEL}", "--on", "8xH100", "--out", "layout.json")
    ranked = run_bare(bare, *words, cwd=tmp_path)
    assert ranked.returncode == 0, ranked.stderr
    # A plan that was made without torch is not stale where there is one.
    assert Plan.from_json((tmp_path / "layout.json").read_text(encoding="utf-8")).fingerprints.keys() == {
        *("job", "batch", "cluster", "trimtab")
    }


@pytest.mark.parametrize("command", NEED_TORCH)
def test_commands_that_need_torch_say_so_and_how_to_get_it(bare: Path, tmp_path: Path, command: str) -> None:
    write_inputs(tmp_path)
    done = run_bare(bare, *command.format(python=bare).split(), cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert f"torch is not installed for {bare}" in said
    assert "pip install 'torch>=2.11,<2.16'" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["apply plan.json --to config.yaml", "launch plan.json"])
def test_a_plan_is_compared_with_its_source_files_and_the_rest_is_named(
    bare: Path, tmp_path: Path, command: str
) -> None:
    write_inputs(tmp_path)
    done = run_bare(bare, *command.split(), cwd=tmp_path)
    assert UNCHECKED in " ".join(done.stderr.split())
    (tmp_path / "tokens.py").write_text("count = 5\n", encoding="utf-8")
    stale = run_bare(bare, *command.split(), cwd=tmp_path)
    assert stale.returncode == 2
    assert "it is stale: tokens.py has changed" in stale.stderr
    (tmp_path / "tokens.py").unlink()
    assert "tokens.py is gone" in run_bare(bare, *command.split(), cwd=tmp_path).stderr


def test_an_unsupported_torch_without_metadata_is_found_by_its_version_file(
    bare: Path, tmp_path: Path
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    (package / "version.py").write_text("__version__ = '2.4.0a0+git1'\n", encoding="utf-8")
    done = run_bare(bare, "plan", "slm", "--on", "H100", cwd=tmp_path)
    assert done.returncode == 5
    assert "error: torch 2.4.0a0+git1" in done.stderr
    assert f"{bare} has 2.4.0a0+git1" in " ".join(done.stderr.split())


def test_a_layouts_workload_is_that_of_its_job() -> None:
    job = f"hf:{MODEL}"
    expected = summarize_job(job, {"seq": 4096}).replace(global_batch=1024)
    assert describe_decoder_job(job, sequence=4096, global_batch=1024) == expected


@pytest.mark.slow
def test_the_wheel_alone_installs_no_torch_and_reads_what_planning_and_training_wrote(
    tmp_path: Path,
) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    python = make_environment(tmp_path / "venv")
    limits = str(ROOT / "constraints.txt")
    install = [*pip, "--python", str(python), "install", "-c", limits, str(wheel)]
    subprocess.run(install, check=True, timeout=600)
    listed = subprocess.run(
        [*pip, "--python", str(python), "list"], capture_output=True, text=True, check=True
    )
    assert "torch" not in listed.stdout.split()
    write_inputs(tmp_path)
    for words in (
        ("plan", "job.py:Mine", "--on", "H100", "--pin", "micro_batch=8", "--out", "plan.json"),
        ("train", "slm:tiny", "--steps", "2", "--out", "real"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", *words],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    check_working(python, tmp_path)
    for command in ("doctor real", "watch real --samples 1", "report real -o real.html"):
        done = run_bare(python, *command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
