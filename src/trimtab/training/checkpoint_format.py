"""One checkpoint on the disk: tensors by torch.distributed.checkpoint, and a manifest that vouches for all.

Reading runs nothing that a file says: tensors are read by weights_only, the index by an unpickler that knows
only the classes that an index is made of.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trimtab.errors import WrongUse
from trimtab.spec.base import Noun, check_minimum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
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


class FileChecksum(Noun, frozen=True, kw_only=True):
    """How long a file is, and what it holds."""

    size_bytes: int
    sha256: str

    def faults(self) -> list[str]:
        """A digest is 64 hex digits."""
        wrong = check_minimum(0, size_bytes=self.size_bytes)
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
    files: dict[str, FileChecksum]

    def faults(self) -> list[str]:
        """Steps count from 0, ranks from 1."""
        return check_minimum(0, step=self.step) + check_minimum(1, world=self.world)


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


class StagingBuffers:
    """Copies of tensors in host memory, which are used again by the next checkpoint."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the local part of each, and return when it is done."""
        copied = {}
        devices = set()
        for name, tensor in tensors.items():
            local = get_local_part(tensor)
            room = self.buffers.get(name)
            if room is None or room.shape != local.shape or room.dtype != local.dtype:
                room = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            room.copy_(local, non_blocking=True)
            copied[name] = room
            if local.is_cuda:
                devices.add(local.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self.buffers = copied
        return dict(copied)


def get_local_part(tensor: torch.Tensor) -> torch.Tensor:
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


class CheckpointReader:
    """A checkpoint's tensors, to be read by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = SafeReader(folder).read_metadata()

    def describe_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
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


def compute_checksum(file: Path) -> FileChecksum:
    """Length and digest of a file."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileChecksum(size_bytes=size, sha256=digest.hexdigest())


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it is missing or damaged."""
    return Manifest.from_file(folder / MANIFEST)


def find_fault(
    folder: Path, rank: int = 0, size: int = 1, mark: Callable[[Path], FileChecksum] = compute_checksum
) -> str:
    """What is wrong with a checkpoint, in words, by the files that fall to one of several ranks; or ''."""
    manifest = read_manifest(folder)
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
    extra = [
        path.name for path in folder.iterdir() if path.name not in known and not path.name.startswith(".")
    ]
    return f"{min(extra)} does not belong to it" if extra else ""


# What there is to save of a training, by name: tensors that may be sharded, and plain values.
#
# Every tensor goes by the name that its parameter has in the model, whatever wraps the model and however it
# is spread over ranks, so that a checkpoint of one strategy and number of ranks is read by any other.


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and activation checkpointing put between those of the model."""
_FLAGS = ("fused", "foreach", "capturable", "differentiable")
"""How an optimizer runs: the plan's choice, never the checkpoint's."""


@dataclass
class Snapshot:
    """What one rank has to save: references, not copies."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that take no gradient: the same in every checkpoint."""
    values: dict[str, Any] = field(default_factory=dict)
    """All the rest, by object."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors, over all ranks."""
        held = (*self.tensors.values(), *self.frozen.values())
        return sum(one.numel() * one.element_size() for one in held)


def take_snapshot(objects: Mapping[str, Any], rank: int = 0, size: int = 1) -> Snapshot:
    """Gather the state of modules, optimizers, and whatever else has state_dict()."""
    taken = Snapshot()
    for label, one in objects.items():
        if isinstance(one, nn.Module):
            _add_module(taken, label, one)
        elif isinstance(one, torch.optim.Optimizer):
            _add_optimizer(taken, label, one, collect_parameter_names(objects), (rank, size))
        else:
            taken.values[label] = one.state_dict()
    return taken


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module without what compiling or DistributedDataParallel put around it."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def strip_wrappers(name: str) -> str:
    """A parameter's name without the wrappers along the way.

    >>> plain_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def collect_parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of all modules, by identity; a tied one has its first."""
    names: dict[int, str] = {}
    for label, one in objects.items():
        if isinstance(one, nn.Module):
            for name, parameter in unwrap_module(one).named_parameters():
                names.setdefault(id(parameter), f"{label}:{strip_wrappers(name)}")
    return names


def _iterate_state(label: str, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Own name, name to save under and value of what a module keeps; a tied tensor comes once."""
    seen: set[int] = set()
    for name, value in unwrap_module(module).state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield name, f"{label}:{strip_wrappers(name)}", value


def _add_module(taken: Snapshot, label: str, module: nn.Module) -> None:
    rest = {}
    for _, key, value in _iterate_state(label, module):
        if not isinstance(value, torch.Tensor):
            rest[key] = value
        elif isinstance(value, nn.Parameter) and not value.requires_grad:
            taken.frozen[key] = value.detach()
        else:
            taken.tensors[key] = value.detach()
    taken.values[label] = rest


def _add_optimizer(
    taken: Snapshot,
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    place: tuple[int, int],
) -> None:
    groups, rest = [], {}
    for group in optimizer.param_groups:
        held = [_get_name(names, label, one) for one in group["params"]]
        options = {key: value for key, value in group.items() if key != "params" and key not in _FLAGS}
        groups.append({"params": held, "options": options})
        for name, parameter in zip(held, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    mark = _rank_suffix(parameter, value, place)
                    taken.tensors[f"{label}:{name}:{key}{mark}"] = value.detach()
                else:
                    rest[f"{label}:{name}:{key}"] = value
    taken.values[label] = {"groups": groups, "rest": rest}


def _get_name(names: Mapping[int, str], label: str, parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise WrongUse(
            f"objects[{label!r}]",
            found=f"the optimizer has a parameter of shape {tuple(parameter.shape)} that no module here has",
            cure="Give the modules whose parameters it updates as well.",
        )
    return names[id(parameter)]


def _rank_suffix(parameter: nn.Parameter, value: torch.Tensor, place: tuple[int, int]) -> str:
    """What the name of an optimizer's tensor ends in where it fits only the same rank of as many.

    That is what belongs to one rank's shard of a parameter, and does not say so by being a DTensor.
    """
    lone = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1
    return f"@{place[0]}/{place[1]}" if lone else ""


@dataclass
class RestorePlan:
    """Tensors to be filled from a checkpoint, and what to do with them then."""

    targets: dict[str, torch.Tensor]
    missing: list[str]
    """Parameters that the checkpoint does not have."""
    mismatched: list[str]
    """A phrase for each tensor that has another shape."""


def match_tensors(objects: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> RestorePlan:
    """The tensors of the modules, to be filled in place; what the checkpoint has no match for is named."""
    found = RestorePlan({}, [], [])
    for label, one in objects.items():
        if not isinstance(one, nn.Module):
            continue
        for _, key, value in _iterate_state(label, one):
            if not isinstance(value, torch.Tensor):
                continue
            if key not in shapes:
                found.missing.append(key)
            elif tuple(value.shape) != shapes[key]:
                found.mismatched.append(f"{key} is {list(shapes[key])} there and {list(value.shape)} here")
            else:
                found.targets[key] = value.detach()
    return found


def allocate_optimizer_state(
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    place: tuple[int, int],
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """New tensors for the saved state of an optimizer, sharded as its parameters are.

    Second: parameters whose state was one rank's own among another number of ranks.
    """
    by_parameter: dict[str, list[str]] = {}
    for full in saved:
        name, _, _ = full.rpartition(":")
        by_parameter.setdefault(name, []).append(full)
    targets: dict[str, torch.Tensor] = {}
    lost = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            keys = by_parameter.get(f"{label}:{_get_name(names, label, parameter)}", [])
            lone = [key for key in keys if "@" in key.rpartition(":")[2]]
            here = [key for key in lone if key.endswith(f"@{place[0]}/{place[1]}")]
            if lone and not here:
                lost.append(_get_name(names, label, parameter))
                continue
            for key in [*here, *(key for key in keys if key not in lone)]:
                targets[key] = _allocate_state(parameter, key, *saved[key])
    return targets, lost


def _allocate_state(
    parameter: nn.Parameter, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Room for a tensor of an optimizer. A count of steps lies where load_state_dict() then wants it."""
    if tuple(parameter.shape) == shape and not key.endswith(":step"):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device="cpu")


def load_optimizer(
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    filled: Mapping[str, torch.Tensor],
    values: list[dict[str, Any]],
) -> None:
    """Give an optimizer its saved state; `values` are those of every rank that saved."""
    rest = {key: value for one in values for key, value in one["rest"].items()}
    options = {name: one["options"] for value in values for one in value["groups"] for name in one["params"]}
    by_parameter: dict[str, dict[str, Any]] = {}
    for full, value in (*rest.items(), *filled.items()):
        name, _, key = full.rpartition(":")
        by_parameter.setdefault(name, {})[key.partition("@")[0]] = value
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group in optimizer.param_groups:
        held = [_get_name(names, label, one) for one in group["params"]]
        for number, name in enumerate(held):
            if f"{label}:{name}" in by_parameter:
                state[count + number] = by_parameter[f"{label}:{name}"]
        own = {key: value for key, value in group.items() if key != "params"}
        saved = options.get(held[0], {}) if held else {}
        groups.append({**own, **saved, "params": list(range(count, count + len(held)))})
        count += len(held)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_module(label: str, module: nn.Module, values: list[dict[str, Any]]) -> None:
    """Give a module what is not a tensor, through its own load_state_dict(); tensors are filled by now."""
    rest = {key: value for one in values for key, value in one.items()}
    own: dict[str, Any] = OrderedDict(unwrap_module(module).state_dict(keep_vars=False))
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            own[name] = rest.get(f"{label}:{strip_wrappers(name)}", value)
    unwrap_module(module).load_state_dict(own)


def get_random_states() -> dict[str, Any]:
    """Where the random number generators of this process stand."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - what datasets draw from
    name, words, place, has_gauss, gauss = numpy
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.astype(np.int64)), int(place), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put the random number generators where they stood."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, numbers, *rest = states["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def pack_values(values: dict[str, Any]) -> bytes:
    """Plain values as bytes that can be read without running anything.

    An error names those that cannot, among them each of `objects` by its own name.
    """
    plain = _without_numpy(values)
    data = _serialize(plain)
    if _is_safe(data):
        return data
    each = {**{name: one for name, one in plain.items() if name != "objects"}, **plain.get("objects", {})}
    guilty = [name for name, one in each.items() if not _is_safe(_serialize(one))]
    raise WrongUse(
        f"the state of {', '.join(guilty)}",
        found="it holds objects of classes of its own, which a checkpoint could not be read back safely with",
        cure="Let state_dict() return tensors, numbers, texts, and dicts, lists and tuples of them.",
    )


def unpack_values(data: bytes) -> dict[str, Any]:
    """What `packed` packed."""
    value: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return value


def _serialize(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _is_safe(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - whatever it is, it could not be read back
        return False
    return True


def _without_numpy(value: Any) -> Any:
    """Numbers of numpy, which measurements are full of, as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if type(value) is dict:
        return {key: _without_numpy(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_numpy(one) for one in value)
    return value
