"""Checkpoint manager: write checkpoints atomically in the background, load them on any number of ranks.

    checkpoints/step-00000200/        manifest.json, .metadata, tensors and plain values of each rank
    checkpoints/frozen-00000100/      weights that are never updated, written once
    checkpoints/.writing-...          being written; renamed when every byte is on the disk
    checkpoints/broken-step-00000300  damaged; kept until the next damaged one

An error while a checkpoint is written never stops training: it is reported as an incident, and earlier
checkpoints are not touched.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from trimtab.errors import TrimtabError, WrongUse
from trimtab.files import sync_folder, write_synced
from trimtab.spec import Incident, IncidentKind
from trimtab.training import checkpoint_format
from trimtab.training.checkpoint_format import (
    INDEX,
    MANIFEST,
    CheckpointReader,
    FileChecksum,
    Manifest,
    StagedPlanner,
    StagingBuffers,
    compute_checksum,
    find_fault,
    get_local_part,
    read_manifest,
)
from trimtab.training.run_folder import is_disk_full

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAME = re.compile(r"step-(\d{8,})")
_MOST_NAMES = 3
"""Tensor names that an error lists."""


class LoadedCheckpoint(NamedTuple):
    """The checkpoint that was loaded."""

    step: int
    """Optimizer steps done before it was saved."""
    extra: dict[str, Any]
    metric: float | None
    path: Path
    same_world: bool
    """Whether as many ranks wrote it; only then are random number generators restored."""


class SavedCheckpoint(NamedTuple):
    """A checkpoint on the disk."""

    step: int
    path: Path
    manifest: Manifest | None


class CheckpointFailure(NamedTuple):
    """Why a rank could not write its files."""

    text: str
    full: bool = False


@dataclass
class _WriteTask:
    """Everything that the writer thread needs, copied, because training goes on meanwhile."""

    step: int
    metric: float | None
    pieces: list[tuple[str, StagedPlanner, bytes | None]]
    """Folder name, tensors and plain values of each folder to write; frozen weights come first."""
    frozen: str | None


class CheckpointManager:
    """Saves and restores the objects of a training run.

    manager = CheckpointManager(folder.checkpoints, report=folder.log_event)
    loaded = manager.load_latest({"model": model, "optimizer": optimizer, "loader": loader})
    manager.save(step, {"model": model, "optimizer": optimizer, "loader": loader}, {"losses": losses})
    manager.finish()

    Every rank calls each of these, in the same order. `report` is called with incidents on rank 0 only, maybe
    from the writer thread. `before_write` is called with the step on every rank before files are written, and
    may raise an OSError (for fault injection).
    """

    def __init__(  # noqa: PLR0913 - the outside world, each with a default
        self,
        folder: str | Path,
        *,
        last: int = 3,
        report: Callable[[Incident], None] | None = None,
        before_write: Callable[[int], None] | None = None,
        timeout_min: float = 10,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self.last = last
        self.report = report
        self.before_write = before_write
        self.clock = clock
        self.ranks = CheckpointRanks(timeout_min)
        self.waited_s = 0.0
        """Seconds that training waited for checkpoints, copying included."""
        self.last_saved: int | None = None
        """Step of the last complete checkpoint."""
        self._stage = StagingBuffers()
        self._frozen: str | None = None
        self._signatures: dict[str, tuple[int, int]] = {}
        self._writer: threading.Thread | None = None
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        extra: dict[str, Any] | None = None,
        *,
        metric: float | None = None,
        wait: bool = False,
    ) -> None:
        """Copy the state of all objects and write it in the background; `wait` until it is done."""
        began = time.monotonic()
        self._join()
        task = self._make_task(step, objects, extra or {}, metric)
        self._writer = threading.Thread(target=self._write, args=(task,), name="checkpoint", daemon=True)
        self._writer.start()
        if wait:
            self._join()
        self.waited_s += time.monotonic() - began

    def finish(self) -> int | None:
        """Wait for the writer thread; return the step of the last complete checkpoint."""
        self._join()
        return self.last_saved

    def load_latest(
        self, objects: Mapping[str, Any], *, before: int | None = None
    ) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint into the objects; return None if there is none.

        A damaged checkpoint is renamed, and the one before it is tried. With `before`, checkpoints of that
        step and later are deleted first.
        """
        self._join()
        for candidate in reversed(self._candidates(before)):
            fault = next(
                filter(None, self.ranks.all_gather(find_fault(candidate, self.ranks.rank, self.ranks.size))),
                "",
            )
            if not fault:
                return self._load(candidate, objects)
            self._set_aside(candidate, fault)
        return None

    def list_checkpoints(self) -> list[SavedCheckpoint]:
        """List the checkpoints in the folder, oldest first."""
        checkpoints = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match:
                checkpoints.append(SavedCheckpoint(int(match[1]), path, read_manifest(path)))
        return sorted(checkpoints)

    # Saving

    def _make_task(
        self, step: int, objects: Mapping[str, Any], extra: dict[str, Any], metric: float | None
    ) -> _WriteTask:
        snapshot = checkpoint_format.take_snapshot(objects, self.ranks.rank, self.ranks.size)
        values = {
            "rank": self.ranks.rank,
            "random": checkpoint_format.get_random_states(),
            "objects": snapshot.values,
            "extra": extra if self.ranks.first else {},
        }
        data = checkpoint_format.pack_values(values)
        pieces: list[tuple[str, StagedPlanner, bytes | None]] = []
        signatures = {name: _signature(tensor) for name, tensor in snapshot.frozen.items()}
        if snapshot.frozen and self._frozen is None:
            self._frozen, self._signatures = f"frozen-{step:08d}", signatures
            # Written once in a run: the staging buffers are not kept.
            pieces.append((self._frozen, self._stage_tensors(snapshot.frozen, StagingBuffers()), None))
        changed = {
            name: tensor
            for name, tensor in snapshot.frozen.items()
            if self._signatures.get(name) != signatures[name]
        }
        tensors = {**snapshot.tensors, **changed}
        pieces.append((f"step-{step:08d}", self._stage_tensors(tensors, self._stage), data))
        return _WriteTask(step, metric, pieces, self._frozen)

    def _stage_tensors(self, tensors: dict[str, torch.Tensor], stage: StagingBuffers) -> StagedPlanner:
        return StagedPlanner(tensors, stage.copy(tensors), self.ranks.first)

    def _write(self, task: _WriteTask) -> None:
        """Run the writer thread: all ranks make the same collective calls, even if one of them fails."""
        try:
            failure = next(filter(None, (self._write_piece(task, *piece) for piece in task.pieces)), None)
        except Exception as error:  # noqa: BLE001 - a rank is lost; the training loop notices by itself
            failure = _describe_failure(error)
        if failure is None:
            self.last_saved = task.step
            if self.ranks.first:
                self._prune()
            return
        if task.pieces[0][0] == task.frozen:
            # The next checkpoint writes the frozen weights again.
            self._frozen, self._signatures = None, {}
        if self.ranks.first:
            for name, _, _ in task.pieces:
                shutil.rmtree(self.folder / f".writing-{name}", ignore_errors=True)
            self._incident(
                IncidentKind.FULL_DISK if failure.full else IncidentKind.BAD_CHECKPOINT,
                task.step,
                f"the checkpoint of step {task.step} could not be written: {failure.text}",
                "what there was of it is removed, earlier ones are untouched, and training goes on",
            )

    def _write_piece(
        self, task: _WriteTask, name: str, planner: StagedPlanner, data: bytes | None
    ) -> CheckpointFailure | None:
        folder = self.folder / f".writing-{name}"
        # Files are hashed after writing, from the page cache: simpler than hashing while writing.
        writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(self.ranks.first)
        index: list[Any] = []

        def make_global_plan(plans: list[Any]) -> list[Any]:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            plans, metadata = planner.create_global_plan(plans)
            index.append(metadata)
            return writer.prepare_global_plan(plans)

        def get_local_plan() -> Any:
            if self.before_write is not None:
                self.before_write(task.step)
            return planner.local

        plan = self.ranks.gather_and_scatter(get_local_plan, make_global_plan)
        if isinstance(plan, CheckpointFailure):
            return plan

        def write_files() -> tuple[Any, dict[str, FileChecksum]]:
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
            # Listed by name: a rank without tensors writes an empty file that is not in the results.
            files = {path.name for path in folder.glob(f"__{self.ranks.rank}_*")}
            if data is not None:
                plain = f"plain-{self.ranks.rank}.pt"
                write_synced(folder / plain, data)
                files.add(plain)
            return results, {file: compute_checksum(folder / file) for file in files}

        def finish_folder(parts: list[tuple[Any, dict[str, FileChecksum]]]) -> None:
            writer.finish(index[0], [results for results, _ in parts])
            checksums = {name: checksum for _, some in parts for name, checksum in some.items()}
            self._publish(task, folder, name, {**checksums, INDEX: compute_checksum(folder / INDEX)})

        return self.ranks.gather_and_reduce(write_files, finish_folder)

    def _publish(self, task: _WriteTask, folder: Path, name: str, checksums: dict[str, FileChecksum]) -> None:
        """Write the manifest and give the folder its final name."""
        unseen = [file for file in checksums if not (folder / file).exists()]
        if unseen:
            raise OSError(
                0,
                f"{unseen[0]} was written by another node and is not seen by this one; the folder "
                "has to be on a disk that all nodes share",
            )
        manifest = Manifest(
            step=task.step,
            world=self.ranks.size,
            saved_at_s=self.clock(),
            metric=task.metric,
            frozen=task.frozen,
            files=checksums,
        )
        write_synced(folder / MANIFEST, manifest.to_json(indent=2).encode())
        sync_folder(folder)
        place = self.folder / name
        if place.exists():
            self._remove(place)
        folder.rename(place)
        sync_folder(self.folder)

    def _prune(self) -> None:
        """Delete all checkpoints but the last few and the best, and frozen weights that none of them uses."""
        checkpoints = [entry for entry in self.list_checkpoints() if entry.manifest is not None]
        keep = checkpoints[-self.last :]
        rated = [
            (entry.manifest.metric, -entry.step, entry)
            for entry in checkpoints
            if entry.manifest and entry.manifest.metric is not None
        ]
        if rated:
            keep = [*keep, min(rated)[2]]
        for checkpoint in checkpoints:
            if checkpoint not in keep:
                self._remove(checkpoint.path)
        used = {checkpoint.manifest.frozen for checkpoint in keep if checkpoint.manifest}
        for path in self.folder.glob("frozen-*"):
            if path.name not in used:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename the folder, then delete it: a half-deleted folder must not look like a checkpoint."""
        renamed = self.folder / f".removing-{path.name}"
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)

    # Loading

    def _candidates(self, before: int | None) -> list[Path]:
        """Return rank 0's checkpoints, oldest first; those of step `before` and later are deleted."""
        paths: list[Path] = []
        if self.ranks.first:
            for checkpoint in self.list_checkpoints():
                if before is not None and checkpoint.step >= before:
                    self._remove(checkpoint.path)
                else:
                    paths.append(checkpoint.path)
        candidates: list[Path] = self.ranks.broadcast(paths)
        return candidates

    def _load(self, path: Path, objects: Mapping[str, Any]) -> LoadedCheckpoint:
        """Load a checkpoint into the objects; an error on one rank is raised on all."""
        manifest = read_manifest(path)
        assert manifest is not None  # noqa: S101 - it was verified
        frozen = self._find_frozen(manifest)
        try:
            loaded, problem = self._fill_objects(path, manifest, frozen, objects), None
        except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised below
            loaded, problem = None, error
        problems = [*filter(None, self.ranks.all_gather(problem and _to_trimtab_error(problem, path)))]
        if problem is not None:
            raise _to_trimtab_error(problem, path) from problem
        if problems:
            raise problems[0]
        assert loaded is not None  # noqa: S101 - there was no problem
        self.last_saved = loaded.step
        return loaded

    def _fill_objects(
        self, path: Path, manifest: Manifest, frozen_at: Path | None, objects: Mapping[str, Any]
    ) -> LoadedCheckpoint:
        source, frozen = CheckpointReader(path), None if frozen_at is None else CheckpointReader(frozen_at)
        own, others = source.describe_tensors(), {} if frozen is None else frozen.describe_tensors()
        shapes = {name: shape for name, (shape, _) in (others | own).items()}
        plan = checkpoint_format.match_tensors(objects, shapes)
        self._check_match(path, plan, lenient=manifest.frozen is not None and frozen is None, objects=objects)
        plain = [
            checkpoint_format.unpack_values((path / f"plain-{rank}.pt").read_bytes())
            for rank in range(manifest.world)
        ]
        names = checkpoint_format.collect_parameter_names(objects)
        place = self.ranks.rank, self.ranks.size
        fresh: dict[str, dict[str, torch.Tensor]] = {}
        for label, value in objects.items():
            if isinstance(value, torch.optim.Optimizer):
                fresh[label], lost = checkpoint_format.allocate_optimizer_state(
                    label, value, names, own, place
                )
                self._report_lost_state(manifest, path, label, lost)
        source.fill(
            {name: target for name, target in plan.targets.items() if name in own}
            | {name: tensor for some in fresh.values() for name, tensor in some.items()}
        )
        if frozen is not None:
            frozen.fill({name: target for name, target in plan.targets.items() if name not in own})
        same = manifest.world == self.ranks.size
        mine = plain[self.ranks.rank if same else 0]
        for label, value in objects.items():
            saved = [rank["objects"][label] for rank in plain if label in rank["objects"]]
            if not saved:
                continue
            if label in fresh:
                checkpoint_format.load_optimizer(label, value, names, fresh[label], saved)
            elif isinstance(value, torch.nn.Module):
                checkpoint_format.load_module(label, value, saved)
            else:
                value.load_state_dict(mine["objects"][label])
        if same:
            checkpoint_format.set_random_states(mine["random"])
        self._remember_frozen(manifest, objects, others, own, is_stored=frozen is not None)
        return LoadedCheckpoint(manifest.step, plain[0]["extra"], manifest.metric, path, same)

    def _find_frozen(self, manifest: Manifest) -> Path | None:
        """Return the folder of the frozen weights; None if there are none or they are damaged."""
        if manifest.frozen is None:
            return None
        folder = self.folder / manifest.frozen
        faults = self.ranks.all_gather(find_fault(folder, self.ranks.rank, self.ranks.size))
        fault = next(filter(None, faults), "")
        if not fault:
            return folder
        self._incident(
            IncidentKind.BAD_CHECKPOINT,
            manifest.step,
            f"the frozen weights in {folder.name} cannot be used: {fault}",
            "those that the job's model() built are taken, and written with the next checkpoint",
        )
        return None

    def _remember_frozen(
        self,
        manifest: Manifest,
        objects: Mapping[str, Any],
        stored: Mapping[str, Any],
        own: Mapping[str, Any],
        *,
        is_stored: bool,
    ) -> None:
        """Note which frozen weights are stored as they are now and need not be written again."""
        if not is_stored:
            self._frozen, self._signatures = None, {}
            return
        frozen = checkpoint_format.take_snapshot(_select_modules(objects)).frozen
        self._frozen = manifest.frozen
        self._signatures = {
            name: _signature(tensor) for name, tensor in frozen.items() if name in stored and name not in own
        }

    def _check_match(
        self, path: Path, plan: checkpoint_format.RestorePlan, *, lenient: bool, objects: Mapping[str, Any]
    ) -> None:
        """Raise if the checkpoint is of another model; if `lenient`, frozen weights may be missing."""
        missing = plan.missing
        if lenient:
            frozen = checkpoint_format.take_snapshot(_select_modules(objects)).frozen
            missing = [name for name in missing if name not in frozen]
        if plan.mismatched or missing:
            some = plan.mismatched[:_MOST_NAMES] or [f"it has no {name}" for name in missing[:_MOST_NAMES]]
            count = len(plan.mismatched) or len(missing)
            rest = f", and {count - _MOST_NAMES} more" if count > _MOST_NAMES else ""
            raise WrongUse(
                f"checkpoint {path}",
                found=f"it is of another model: {'; '.join(some)}{rest}",
                cure="Resume with the job as it was, or start a new run in another folder.",
            )

    def _report_lost_state(self, manifest: Manifest, path: Path, label: str, lost: list[str]) -> None:
        if lost:
            self._incident(
                IncidentKind.BAD_CHECKPOINT,
                manifest.step,
                f"{path.name} has the {label}'s state of {lost[0]} and {len(lost) - 1} more for "
                f"{manifest.world} ranks alone, and there are {self.ranks.size}",
                "that state is reset",
            )

    def _set_aside(self, path: Path, fault: str) -> None:
        if self.ranks.first:
            for earlier in self.folder.glob("broken-*"):
                shutil.rmtree(earlier, ignore_errors=True)
            path.rename(self.folder / f"broken-{path.name}")
        self._incident(
            IncidentKind.BAD_CHECKPOINT,
            int(path.name.rpartition("-")[2]),
            f"{path.name} cannot be used: {fault}",
            f"it is set aside as broken-{path.name}, and the one before it is taken",
        )

    def _incident(self, kind: IncidentKind, step: int, why: str, done: str) -> None:
        if self.ranks.first and self.report is not None:
            self.report(Incident(kind=kind, at_s=self.clock(), step=step, rank=0, why=why, done=done))

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


class CheckpointRanks:
    """Collectives of the writer thread, in a process group apart from that of training."""

    def __init__(self, timeout_min: float) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_min)) if together else None
        )

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which renames, prunes and reports."""
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gather_and_scatter(self, make: Callable[[], Any], divide: Callable[[list[Any]], list[Any]]) -> Any:
        """Gather what each rank makes, let rank 0 divide it, and return this rank's part.

        If any rank fails, all get its CheckpointFailure.
        """
        made = self._gather(make)
        divided: list[Any] = []
        if self.first:
            divided = self._combine(made, divide)
        if self.group is None:
            return divided[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, divided if self.first else None, src=0, group=self.group)
        return own[0]

    def gather_and_reduce(
        self, make: Callable[[], Any], combine: Callable[[list[Any]], Any]
    ) -> CheckpointFailure | None:
        """Gather what each rank makes and let rank 0 combine it.

        If any rank fails, all get its CheckpointFailure.
        """
        made = self._gather(make)
        failure = None
        if self.first:
            failure = self._combine(made, lambda parts: [combine(parts)])[0]
        result: CheckpointFailure | None = self.broadcast(failure)
        return result

    def _gather(self, make: Callable[[], Any]) -> list[Any]:
        """Return on rank 0 what each rank made, or its CheckpointFailure."""
        try:
            value = make()
        except Exception as error:  # noqa: BLE001 - without this rank the others would wait for ever
            value = _describe_failure(error)
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def _combine(self, made: list[Any], combine: Callable[[list[Any]], list[Any]]) -> list[Any]:
        failure = next((item for item in made if isinstance(item, CheckpointFailure)), None)
        if failure is None:
            try:
                return combine(made)
            except Exception as error:  # noqa: BLE001 - as above
                failure = _describe_failure(error)
        return [failure] * self.size


def _describe_failure(error: Exception) -> CheckpointFailure:
    """Turn an error into something that can be sent to another rank."""
    if isinstance(error, OSError):
        return CheckpointFailure(error.strerror or str(error), full=is_disk_full(error))
    text = str(error).strip().split("\n")[0][:300]
    return CheckpointFailure(f"{type(error).__name__}: {text}")


def _to_trimtab_error(error: Exception, path: Path) -> TrimtabError:
    """Turn an error while loading into a TrimtabError."""
    if isinstance(error, TrimtabError):
        return error
    return WrongUse(
        f"checkpoint {path}",
        found=f"{type(error).__name__}: {str(error).strip()[:300]}",
        cure="Resume with the job as it was, or start a new run in another folder.",
    )


def _select_modules(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {label: value for label, value in objects.items() if isinstance(value, torch.nn.Module)}


def _signature(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes when the tensor is written to or replaced."""
    local = get_local_part(tensor)
    return local.data_ptr(), local._version  # noqa: SLF001 - torch has no public name for it
