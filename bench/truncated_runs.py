"""Cut each file of a run folder at every byte, and read the folder with every reader: nothing may crash.

    python bench/truncated_runs.py               every byte of files up to 4 KiB, 400 cuts of larger ones
    python bench/truncated_runs.py --cuts 40     fewer

It trains a small job first. `report`, `watch`, `doctor` and `jobs` read each cut folder; `train` resumes in
it for three cuts of each file. A reader may refuse a folder with an error of trimtab; all else is a bug.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SMALL_BYTES = 4096
"""Files up to this size are cut at every byte."""
CUTS = 400
JOB = """
import torch
from torch.utils.data import TensorDataset


class Job:
    name = "job"
    global_batch, epochs = 8, 100

    def model(self):
        return torch.nn.Linear(4, 1).double()

    def batch(self, size):
        return [torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def dataset(self):
        x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())
"""


def make_run(home: Path, steps: int = 4) -> Path:
    """Train a small job with a fault in it; return its run folder."""
    (home / "job.py").write_text(JOB, encoding="utf-8")
    faults = home / "faults.json"
    faults.write_text(json.dumps([{"kind": "not-a-number", "step": 2, "rank": 0}]), encoding="utf-8")
    continue_run(home, home / "run", steps, faults=str(faults), checkpoint_steps=2)
    return home / "run"


def continue_run(home: Path, folder: Path, steps: int, **options: Any) -> None:
    """Train to a number of steps, from where the folder is."""
    import trimtab

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trimtab.train(f"{home / 'job.py'}:Job", steps=steps, out=str(folder), **options)


def list_cuts(size: int, most: int = CUTS) -> Iterable[int]:
    """Return the lengths that a file of some size is cut to.

    >>> list(list_cuts(3)), len(list(list_cuts(10**6, most=10)))
    ([0, 1, 2], 10)
    """
    return range(size) if size <= min(SMALL_BYTES, most) else range(0, size, -(-size // most))


def _report(folder: Path) -> None:
    from trimtab.pages.page import build_page, draw_figures
    from trimtab.pages.report_data import read_report_data

    data = read_report_data(folder)
    build_page(data, draw_figures(data))


def _watch(folder: Path) -> None:
    from trimtab.probe.machine import this_machine
    from trimtab.watching.watch import RunFollower

    RunFollower(folder).look(time.time(), this_machine(), ()).to_json()


def _diagnose(folder: Path) -> None:
    from trimtab.diagnosis.diagnose import diagnose_logs

    json.dumps(diagnose_logs([str(folder)]).to_builtins())


def _list_jobs(folder: Path) -> None:
    from trimtab.launching.jobs import find_folders, read_progress, slurm_job_of
    from trimtab.launching.run_summary import read_summary

    find_folders([folder.parent])
    read_progress(folder)
    slurm_job_of(folder)
    read_summary(folder)


def _open(folder: Path) -> None:
    """Open the folder as a resumed run does, and load its newest checkpoint."""
    import torch

    from trimtab.spec import Plan
    from trimtab.training.checkpoints import CheckpointManager
    from trimtab.training.run_folder import RunFolder, RunIdentity, read_run_plan

    identity = RunIdentity.from_json((folder / "run.json").read_bytes(), origin="run.json")
    plan = read_run_plan(folder)
    if not isinstance(plan, Plan):
        return
    opened = RunFolder.open(folder, identity=identity, plan=plan)
    try:
        opened.read_events()
        opened.rewind(2)
        model = torch.nn.Linear(4, 1).double()
        objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        CheckpointManager(opened.checkpoints).load_latest(objects)
    finally:
        opened.close()


READERS: dict[str, Callable[[Path], None]] = {
    "report": _report,
    "watch": _watch,
    "doctor": _diagnose,
    "jobs": _list_jobs,
    "resume": _open,
}


def cut_copy(run: Path, target: Path, name: str, length: int) -> None:
    """Make a copy of a run in which one file has lost its end."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run, target)
    with (target / name).open("rb+") as file:
        file.truncate(length)


def list_files(run: Path) -> list[str]:
    """Return the names of the files of a run."""
    return sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())


def read_cuts(run: Path, target: Path, most: int) -> tuple[Counter[str], dict[str, str]]:
    """Read every cut of every file; return counts by reader and outcome, and the tracebacks."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for name in list_files(run):
        for length in list_cuts((run / name).stat().st_size, most):
            for word, read in READERS.items():
                # Reading may change a folder: a damaged checkpoint is set aside.
                cut_copy(run, target, name, length)
                try:
                    read(target)
                    counts[f"{word} reads it"] += 1
                except TrimtabError:
                    counts[f"{word} refuses it"] += 1
                except Exception:  # noqa: BLE001 - it is what this program looks for
                    counts[f"{word} fails"] += 1
                    failures.setdefault(f"{word}: {name} cut to {length} bytes", traceback.format_exc())
    return counts, failures


def resume_cuts(
    home: Path, run: Path, target: Path, names: Iterable[str] = ()
) -> tuple[Counter[str], dict[str, str]]:
    """Resume training in a folder with a cut file, for three cuts of each file, or of those named."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for name in names or list_files(run):
        size = (run / name).stat().st_size
        for length in sorted({0, size // 2, max(0, size - 1)}):
            cut_copy(run, target, name, length)
            try:
                continue_run(home, target, 6)
                counts["train resumes"] += 1
            except TrimtabError:
                counts["train refuses it"] += 1
            except Exception:  # noqa: BLE001 - it is what this program looks for
                counts["train fails"] += 1
                failures[f"train: {name} cut to {length} bytes"] = traceback.format_exc()
    return counts, failures


def main() -> None:
    """Cut, read and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=CUTS)
    options = parser.parse_args()
    from machine import machine  # type: ignore[import-not-found] # beside this file

    print(f"{time.strftime('%Y-%m-%d', time.gmtime())}, {machine()}")
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - memory, if there is any
    with tempfile.TemporaryDirectory(dir=place) as folder:
        home = Path(folder)
        run = make_run(home)
        sizes = [(run / name).stat().st_size for name in list_files(run)]
        cuts = sum(len(list(list_cuts(size, options.cuts))) for size in sizes)
        print(f"{len(sizes)} files, {sum(sizes):,} bytes, {cuts:,} cuts")
        target = home / "cut"
        for counts, failures in (read_cuts(run, target, options.cuts), resume_cuts(home, run, target)):
            for what, count in sorted(counts.items()):
                print(f"{count:>8,} {what}")
            for what, trace in failures.items():
                print(f"{what}\n{trace[-900:]}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
