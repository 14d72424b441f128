"""One checkpoint on the disk: tensors by torch.distributed.checkpoint, and a manifest that vouches for all.

Reading runs nothing that a file says: tensors are read by weights_only, the index by an unpickler that knows
only the classes that an index is made of.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trimtab.spec.base import Noun, below

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan

MANIFEST = "manifest.json"
INDEX = ".metadata"
"""What torch.distributed.checkpoint calls its own."""
_BLOCK_BYTES = 1 << 22
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class FileMark(Noun, frozen=True, kw_only=True):
    """How long a file is, and what it holds."""

    size_bytes: int
    sha256: str

    def faults(self) -> list[str]:
        """A digest is 64 hex digits."""
        wrong = below(0, size_bytes=self.size_bytes)
        return wrong if len(self.sha256) == 64 else [*wrong, "sha256 is not of 64 digits"]  # noqa: PLR2004


class Manifest(Noun, frozen=True, kw_only=True):
    """What a checkpoint is of, and a mark of every file in it."""

    step: int
    """Optimizer steps that were done."""
    world: int
    """Ranks that wrote it."""
    saved_at_s: float
    metric: float | None = None
    """What the best is chosen by; lower is better."""
    frozen: str | None = None
    """The folder beside it that holds the weights that are never updated."""
    files: dict[str, FileMark]

    def faults(self) -> list[str]:
        """Steps count from 0, ranks from 1."""
        return below(0, step=self.step) + below(1, world=self.world)


class StagedPlanner(DefaultSavePlanner):
    """Plans by the tensors as they are spread over ranks, and writes copies of them that are at rest."""

    def __init__(
        self, live: dict[str, torch.Tensor], staged: Mapping[str, torch.Tensor], first: bool
    ) -> None:
        super().__init__()
        self.staged = staged
        self.set_up_planner(live, is_coordinator=first)
        self.local = self.create_local_plan()
        # The plan says all that is needed of them.
        self.state_dict = {}

    def create_local_plan(self) -> SavePlan:
        """As planned when the copies were taken."""
        return self.local if hasattr(self, "local") else super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The copy."""
        return self.staged[index.fqn]


class Stage:
    """Copies of tensors in host memory, which are used again by the next checkpoint."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the local part of each, and return when it is done."""
        copied = {}
        devices = set()
        for name, tensor in tensors.items():
            local = local_part(tensor)
            room = self.held.get(name)
            if room is None or room.shape != local.shape or room.dtype != local.dtype:
                room = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            room.copy_(local, non_blocking=True)
            copied[name] = room
            if local.is_cuda:
                devices.add(local.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self.held = copied
        return dict(copied)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


class SafeReader(FileSystemReader):
    """Reads the index without running anything."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index of a checkpoint."""
        with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "rb") as stream:
            found = _IndexUnpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"the index is a {type(found).__name__}")
        return found


class _IndexUnpickler(pickle.Unpickler):
    """Knows only the classes that an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if an index may have it."""
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or (found is not None and found is torch.Size):
            return found
        allowed = _INDEX_CLASSES.get(module, set())
        if allowed is None or name in allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index has no {module}.{name}")


class Source:
    """A checkpoint's tensors, to be read by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = SafeReader(folder).read_metadata()

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each."""
        return {
            name: (tuple(one.size), one.properties.dtype)
            for name, one in self.metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def fill(self, targets: dict[str, torch.Tensor]) -> None:
        """Read into tensors that are there, each rank what it has of them; no rank waits for another."""
        planner, reader = DefaultLoadPlanner(), SafeReader(self.folder)
        planner.set_up_planner(dict(targets), self.metadata)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


def mark_of(file: Path) -> FileMark:
    """Length and digest of a file."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileMark(size_bytes=size, sha256=digest.hexdigest())


def manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it is missing or damaged."""
    return Manifest.from_file(folder / MANIFEST)


def fault_in(folder: Path, rank: int = 0, size: int = 1, mark: Callable[[Path], FileMark] = mark_of) -> str:
    """What is wrong with a checkpoint, in words, by the files that fall to one of several ranks; or ''."""
    manifest = manifest_of(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or torn"
    for number, (name, told) in enumerate(sorted(manifest.files.items())):
        if number % size != rank:
            continue
        try:
            found = mark(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found.size_bytes != told.size_bytes:
            return f"{name} has {found.size_bytes} bytes, and {told.size_bytes} were written"
        if found.sha256 != told.sha256:
            return f"{name} does not hold what was written"
    # Hidden files come from network file systems and desktops, not from us.
    known = {MANIFEST, *manifest.files}
    extra = [one.name for one in folder.iterdir() if one.name not in known and not one.name.startswith(".")]
    return f"{min(extra)} does not belong to it" if extra else ""
