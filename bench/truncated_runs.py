"""Cut each file of a run folder at every byte, and read the folder with every reader: nothing may crash.

    python bench/truncated_runs.py               every byte of every file
    python bench/truncated_runs.py --cuts 40     at most 40 cuts of each file

It trains a small job first. Every reader reads each cut folder; `train` resumes in it for three cuts of each
file. A reader may refuse a folder with an error of trimtab, or must say what is lost; all else is a bug.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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


def list_cuts(size: int, most: int | None = None) -> range:
    """Return the lengths that a file of some size is cut to: all, or at most so many.

    >>> list(list_cuts(3)), len(list_cuts(10**6, most=10))
    ([0, 1, 2], 10)
    """
    return range(0, size, -(-size // most) if most and size > most else 1)


class Reading(NamedTuple):
    """What a reader took from a folder, and what it said is wrong with it."""

    content: Any
    notes: tuple[str, ...] = ()


def _report(folder: Path) -> Reading:
    from trimtab.pages.page import build_page, draw_figures
    from trimtab.pages.report_data import read_report_data

    data = read_report_data(folder)
    build_page(data, draw_figures(data))
    run = data.run
    return Reading(run and (run.plan, run.identity, run.attempt, run.lines, run.events), data.missing)


def _watch(folder: Path) -> Reading:
    from trimtab.probe.machine import this_machine
    from trimtab.watching.watch import RunFollower

    run = RunFollower(folder).look(time.time(), this_machine(), ())
    return Reading(run.replace(damage=(), silent_s=None), run.damage)


def _diagnose(folder: Path) -> Reading:
    from trimtab.diagnosis.diagnose import diagnose_logs

    diagnosis = diagnose_logs([str(folder)])
    return Reading(json.dumps([finding.to_builtins() for finding in diagnosis.findings]), diagnosis.notes)


def _list_jobs(folder: Path) -> Reading:
    from trimtab.launching.jobs import find_folders, read_progress, slurm_job_of

    run = read_progress(folder)
    damage = () if run is None else run.damage
    return Reading(
        (find_folders([folder.parent]), slurm_job_of(folder), run and run.replace(damage=())), damage
    )


def _summarize(folder: Path) -> Reading:
    from trimtab.launching.run_summary import read_summary

    return Reading(read_summary(folder))


def _read_plan(folder: Path) -> Reading:
    from trimtab.planner.plan_files import read_plan_file

    return Reading(read_plan_file(folder / "plan.json"))


def _check_checkpoints(folder: Path) -> Reading:
    """Check each checkpoint as a run does before it loads one."""
    from trimtab.training.checkpoint_format import find_fault

    faults = [find_fault(checkpoint) for checkpoint in sorted((folder / "checkpoints").glob("step-*"))]
    return Reading(None, tuple(filter(None, faults)))


def _open(folder: Path) -> Reading:
    """Open the folder as a resumed run does, and load its newest checkpoint."""
    import torch

    from trimtab.training.checkpoints import CheckpointManager
    from trimtab.training.run_folder import RunFolder, RunIdentity

    identity = RunIdentity.from_json((folder / "run.json").read_bytes(), origin="run.json")
    opened = RunFolder.open(folder, identity=identity, plan=identity)
    incidents: list[str] = []
    try:
        content: list[Any] = [opened.read_events(), opened.read_lines()]
        opened.rewind(2)
        model = torch.nn.Linear(4, 1).double()
        objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        manager = CheckpointManager(opened.checkpoints, report=lambda event: incidents.append(event.text))
        loaded = manager.load_latest(objects)
        content.append(loaded and (loaded.step, loaded.extra))
    finally:
        opened.close()
    return Reading(content, (*opened.damage, *incidents))


READERS: dict[str, Callable[[Path], Reading]] = {
    "report": _report,
    "watch": _watch,
    "doctor": _diagnose,
    "jobs": _list_jobs,
    "jobs --summary": _summarize,
    "plan file": _read_plan,
    "checkpoint": _check_checkpoints,
    "resume": _open,
}
WRITES = "resume"
"""The reader that changes the folder: it locks it, and sets a damaged checkpoint aside."""
DATA = (".distcp", ".pt")
"""Endings of files with a checkpoint's data. "checkpoint" makes the check of "resume" at every byte."""
DATA_CUTS = 100
"""Cuts of such files that are resumed from."""


def cut_copy(run: Path, target: Path, name: str, length: int) -> None:
    """Make a copy of a run in which one file has lost its end."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run, target)
    with (target / name).open("rb+") as file:
        file.truncate(length)


def list_files(run: Path) -> list[str]:
    """Return the names of the files of a run."""
    return sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())


_opened: set[str] | None = None
"""Files that were opened since it was set; None: not recorded."""


def _hear_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
        _opened.add(os.fspath(arguments[0]))


sys.addaudithook(_hear_open)


def list_opened(read: Callable[[Path], Reading], folder: Path) -> set[str]:
    """Return the files of a folder that a reader opens."""
    global _opened  # noqa: PLW0603 - an audit hook cannot be removed
    _opened = set()
    try:
        with contextlib.suppress(TrimtabError):
            read(folder)
        return {name for name in list_files(folder) if str(folder / name) in _opened}
    finally:
        _opened = None


def read_cuts(
    run: Path, target: Path, most: int | None = None, limits: Mapping[str, int] | None = None
) -> tuple[Counter[str], dict[str, str]]:
    """Cut every file at every byte, or at most so often; return counts by reader and outcome, and faults.

    `limits` are the most cuts of a file for readers that are slow.

    A cut is lossless if a reader shows the same as before, reported if it says what is wrong, refused if it
    raises an error of trimtab. A fault is another exception, or a loss without a word. A file that a reader
    never opens is cut at three places for it.
    """
    counts: Counter[str] = Counter()
    faults: dict[str, str] = {}
    for word, read in READERS.items():
        cut_copy(run, target, "run.lock", (run / "run.lock").stat().st_size)
        opened = list_opened(read, target)
        cut_copy(run, target, "run.lock", (run / "run.lock").stat().st_size)
        whole = read(target)
        for name in list_files(run):
            data = (run / name).read_bytes()
            bounds = [most, None if name in opened else 3, (limits or {}).get(word)]
            bounds.append(DATA_CUTS if word == WRITES and name.endswith(DATA) else None)
            limit = min(filter(None, bounds), default=None)
            for length in list_cuts(len(data), limit):
                if word == WRITES:
                    cut_copy(run, target, name, length)
                else:
                    (target / name).write_bytes(data[:length])
                outcome, fault = _read_cut(read, target, whole)
                counts[f"{word}: {outcome}"] += 1
                if fault:
                    faults.setdefault(f"{word}, {name}: {outcome}", f"cut to {length} bytes: {fault}")
            if word != WRITES:
                (target / name).write_bytes(data)
    return counts, faults


def _read_cut(read: Callable[[Path], Reading], folder: Path, whole: Reading) -> tuple[str, str]:
    """Return the outcome of reading a cut folder, and what is wrong with it, if anything."""
    try:
        reading = read(folder)
    except TrimtabError:
        return "refused", ""
    except Exception:  # noqa: BLE001 - it is what this program looks for
        return "fails", traceback.format_exc()
    if set(reading.notes) - set(whole.notes):
        return "reported", ""
    if reading.content == whole.content:
        return "lossless", ""
    return "silent", f"{whole.content}\n{reading.content}"


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
    parser.add_argument("--cuts", type=int)
    options = parser.parse_args()
    from machine import machine  # type: ignore[import-not-found] # beside this file

    print(f"{time.strftime('%Y-%m-%d', time.gmtime())}, {machine()}")
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - memory, if there is any
    with tempfile.TemporaryDirectory(dir=place) as folder:
        home = Path(folder)
        run = make_run(home)
        sizes = [(run / name).stat().st_size for name in list_files(run)]
        cuts = sum(len(list_cuts(size, options.cuts)) for size in sizes)
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
