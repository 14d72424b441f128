"""Format of a checkpoint: tensors by torch.distributed.checkpoint, plain values, a manifest of checksums.

Reading a checkpoint never runs code from it: plain values are read with weights_only, and the index by an
unpickler that allows only the classes of an index.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, EnumType
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
"""File name that torch.distributed.checkpoint gives its index."""
_BLOCK_BYTES = 1 << 22
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class FileChecksum(Noun, frozen=True, kw_only=True):
    """Length and digest of a file."""

    size_bytes: int
    sha256: str

    def faults(self) -> list[str]:
        """List what is wrong: a negative length, or a digest without 64 digits."""
        wrong = check_minimum(0, size_bytes=self.size_bytes)
        return wrong if len(self.sha256) == 64 else [*wrong, "sha256 is not of 64 digits"]  # noqa: PLR2004


class Manifest(Noun, frozen=True, kw_only=True):
    """What a checkpoint contains, with a checksum of every file."""

    step: int
    """Optimizer steps done before it was saved."""
    world: int
    """Number of ranks that wrote it."""
    saved_at_s: float
    metric: float | None = None
    """The best checkpoint is chosen by it; lower is better."""
    frozen: str | None = None
    """Name of the folder beside it with the weights that are never updated."""
    files: dict[str, FileChecksum]

    def faults(self) -> list[str]:
        """List what is wrong: steps below 0, or ranks below 1."""
        return check_minimum(0, step=self.step) + check_minimum(1, world=self.world)


class StagedPlanner(DefaultSavePlanner):
    """Plan by the sharded live tensors, and write copies of them that training does not change."""

    def __init__(
        self, live: dict[str, torch.Tensor], staged: Mapping[str, torch.Tensor], first: bool
    ) -> None:
        super().__init__()
        self.staged = staged
        self.set_up_planner(live, is_coordinator=first)
        self.local = self.create_local_plan()
        # The plan has all that is needed of the live tensors.
        self.state_dict = {}

    def create_local_plan(self) -> SavePlan:
        """Return the plan made when the copies were snapshot."""
        return self.local if hasattr(self, "local") else super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the copy of a tensor."""
        return self.staged[index.fqn]


class StagingBuffers:
    """Copies of tensors in host memory; the next checkpoint reuses the memory."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the local part of each tensor; return when all copies are done."""
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
    """Return this rank's part of a tensor."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


class SafeReader(FileSystemReader):
    """Read the index without running code from it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index of a checkpoint."""
        with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "rb") as stream:
            index = _IndexUnpickler(stream).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"the index is a {type(index).__name__}")
        return index


class _IndexUnpickler(pickle.Unpickler):
    """Allow only the classes that an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of that name if an index may contain it, else raise UnpicklingError."""
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or (value is not None and value is torch.Size):
            return value
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 write members of an enumeration as getattr(class, name).
            return _get_member
        allowed = _INDEX_CLASSES.get(module, set())
        if allowed is None or name in allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index has no {module}.{name}")


def _get_member(kind: Any, name: Any) -> Enum:
    """Return a member of an enumeration; raise UnpicklingError for any other attribute."""
    if not (isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"an index has no attribute {name!r}")
    member: Enum = kind.__members__[name]
    return member


class CheckpointReader:
    """Reads the tensors of a checkpoint by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = SafeReader(folder).read_metadata()

    def describe_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor by name."""
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def fill(self, targets: dict[str, torch.Tensor]) -> None:
        """Fill existing tensors in place, each rank its own shards; there is no communication."""
        planner, reader = DefaultLoadPlanner(), SafeReader(self.folder)
        planner.set_up_planner(dict(targets), self.metadata)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


def compute_checksum(file: Path) -> FileChecksum:
    """Return length and digest of a file."""
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
    folder: Path, rank: int = 0, size: int = 1, checksum: Callable[[Path], FileChecksum] = compute_checksum
) -> str:
    """Return what is wrong with a checkpoint, or ''. Each of `size` ranks checks its share of the files."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or torn"
    for number, (name, expected) in enumerate(sorted(manifest.files.items())):
        if number % size != rank:
            continue
        try:
            actual = checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if actual.size_bytes != expected.size_bytes:
            return f"{name} has {actual.size_bytes} bytes, and {expected.size_bytes} were written"
        if actual.sha256 != expected.sha256:
            return f"{name} does not hold what was written"
    # Hidden files come from network file systems and desktops, not from trimtab.
    expected_names = {MANIFEST, *manifest.files}
    extra = [
        path.name
        for path in folder.iterdir()
        if path.name not in expected_names and not path.name.startswith(".")
    ]
    return f"{min(extra)} does not belong to it" if extra else ""


# Every tensor is saved under the name that its parameter has in the unwrapped, unsharded model. So any
# strategy and number of ranks can read a checkpoint of any other.


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and activation checkpointing put between those of the model."""
_FLAGS = ("fused", "foreach", "capturable", "differentiable")
"""Optimizer options that the plan decides; they are never snapshot from a checkpoint."""


@dataclass
class Snapshot:
    """The state that one rank saves: references, not copies."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters without a gradient: the same in every checkpoint."""
    values: dict[str, Any] = field(default_factory=dict)
    """All other values, by object."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors, over all ranks."""
        tensors = (*self.tensors.values(), *self.frozen.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def take_snapshot(objects: Mapping[str, Any], rank: int = 0, size: int = 1) -> Snapshot:
    """Collect the state of modules, optimizers and other objects with state_dict()."""
    snapshot = Snapshot()
    for label, value in objects.items():
        if isinstance(value, nn.Module):
            _add_module(snapshot, label, value)
        elif isinstance(value, torch.optim.Optimizer):
            _add_optimizer(snapshot, label, value, collect_parameter_names(objects), (rank, size))
        else:
            snapshot.values[label] = value.state_dict()
    return snapshot


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module without the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without the names of wrappers.

    >>> strip_wrappers("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def collect_parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of all parameters of all modules by id(); a tied parameter has its first name."""
    names: dict[int, str] = {}
    for label, value in objects.items():
        if isinstance(value, nn.Module):
            for name, parameter in unwrap_module(value).named_parameters():
                names.setdefault(id(parameter), f"{label}:{strip_wrappers(name)}")
    return names


def _iterate_state(label: str, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield name, name to save under and value of each entry of a module's state; a tied tensor once."""
    seen: set[int] = set()
    for name, value in unwrap_module(module).state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield name, f"{label}:{strip_wrappers(name)}", value


def _add_module(snapshot: Snapshot, label: str, module: nn.Module) -> None:
    rest = {}
    for _, key, value in _iterate_state(label, module):
        if not isinstance(value, torch.Tensor):
            rest[key] = value
        elif isinstance(value, nn.Parameter) and not value.requires_grad:
            snapshot.frozen[key] = value.detach()
        else:
            snapshot.tensors[key] = value.detach()
    snapshot.values[label] = rest


def _add_optimizer(
    snapshot: Snapshot,
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    place: tuple[int, int],
) -> None:
    groups, rest = [], {}
    for group in optimizer.param_groups:
        parameters = [_get_name(names, label, parameter) for parameter in group["params"]]
        options = {key: value for key, value in group.items() if key != "params" and key not in _FLAGS}
        groups.append({"params": parameters, "options": options})
        for name, parameter in zip(parameters, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    suffix = _rank_suffix(parameter, value, place)
                    snapshot.tensors[f"{label}:{name}:{key}{suffix}"] = value.detach()
                else:
                    rest[f"{label}:{name}:{key}"] = value
    snapshot.values[label] = {"groups": groups, "rest": rest}


def _get_name(names: Mapping[int, str], label: str, parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise WrongUse(
            f"objects[{label!r}]",
            found=f"the optimizer has a parameter of shape {tuple(parameter.shape)} that no module here has",
            cure="Give the modules whose parameters it updates as well.",
        )
    return names[id(parameter)]


def _rank_suffix(parameter: nn.Parameter, value: torch.Tensor, place: tuple[int, int]) -> str:
    """Return a name suffix for optimizer tensors that only the same rank of the same world size can load.

    These belong to one rank's shard of a parameter but are plain tensors, not DTensors. Others get ''.
    """
    lone = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1
    return f"@{place[0]}/{place[1]}" if lone else ""


@dataclass
class RestorePlan:
    """Which tensors to fill from a checkpoint, and which do not match."""

    targets: dict[str, torch.Tensor]
    missing: list[str]
    """Parameters that the checkpoint does not have."""
    mismatched: list[str]
    """A phrase for each tensor with a different shape."""


def match_tensors(objects: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> RestorePlan:
    """Match the modules' tensors with those of a checkpoint by name and shape."""
    plan = RestorePlan({}, [], [])
    for label, module in objects.items():
        if not isinstance(module, nn.Module):
            continue
        for _, key, value in _iterate_state(label, module):
            if not isinstance(value, torch.Tensor):
                continue
            if key not in shapes:
                plan.missing.append(key)
            elif tuple(value.shape) != shapes[key]:
                plan.mismatched.append(f"{key} is {list(shapes[key])} there and {list(value.shape)} here")
            else:
                plan.targets[key] = value.detach()
    return plan


def allocate_optimizer_state(
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    place: tuple[int, int],
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Allocate tensors for the saved state of an optimizer, sharded as its parameters are.

    Also return the names of parameters whose state was saved per rank by another number of ranks; it is lost.
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
    """Allocate a tensor of an optimizer's state; step counts on the CPU, as load_state_dict() expects."""
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
    """Load the saved state of an optimizer; `values` has one entry for each rank that saved."""
    rest = {key: value for saved in values for key, value in saved["rest"].items()}
    options = {
        name: group["options"] for saved in values for group in saved["groups"] for name in group["params"]
    }
    by_parameter: dict[str, dict[str, Any]] = {}
    for full, value in (*rest.items(), *filled.items()):
        name, _, key = full.rpartition(":")
        by_parameter.setdefault(name, {})[key.partition("@")[0]] = value
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group in optimizer.param_groups:
        parameters = [_get_name(names, label, parameter) for parameter in group["params"]]
        for number, name in enumerate(parameters):
            if f"{label}:{name}" in by_parameter:
                state[count + number] = by_parameter[f"{label}:{name}"]
        own = {key: value for key, value in group.items() if key != "params"}
        group_options = options.get(parameters[0], {}) if parameters else {}
        groups.append({**own, **group_options, "params": list(range(count, count + len(parameters)))})
        count += len(parameters)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_module(label: str, module: nn.Module, values: list[dict[str, Any]]) -> None:
    """Load the values of a module that are not tensors; its tensors are filled already."""
    rest = {key: value for saved in values for key, value in saved.items()}
    own: dict[str, Any] = OrderedDict(unwrap_module(module).state_dict(keep_vars=False))
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            own[name] = rest.get(f"{label}:{strip_wrappers(name)}", value)
    unwrap_module(module).load_state_dict(own)


def get_random_states() -> dict[str, Any]:
    """Return the states of this process's random number generators."""
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
    """Set this process's random number generators to saved states."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, numbers, *rest = states["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def pack_values(values: dict[str, Any]) -> bytes:
    """Serialize plain values to bytes that can be read back with weights_only.

    Raises WrongUse with the names of values that cannot; entries of `objects` are named one by one.
    """
    plain = _without_numpy(values)
    data = _serialize(plain)
    if _is_safe(data):
        return data
    entries = {name: value for name, value in plain.items() if name != "objects"}
    entries |= plain.get("objects", {})
    unsafe = [name for name, value in entries.items() if not _is_safe(_serialize(value))]
    raise WrongUse(
        f"the state of {', '.join(unsafe)}",
        found="it holds objects of classes of its own, which a checkpoint could not be read back safely with",
        cure="Let state_dict() return tensors, numbers, texts, and dicts, lists and tuples of them.",
    )


def unpack_values(data: bytes) -> dict[str, Any]:
    """Deserialize the bytes of pack_values()."""
    value: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return value


def _serialize(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _is_safe(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - any error means that it cannot be read back
        return False
    return True


def _without_numpy(value: Any) -> Any:
    """Convert NumPy numbers to Python's and NumPy arrays to tensors; measurements contain many."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if type(value) is dict:
        return {key: _without_numpy(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_numpy(entry) for entry in value)
    return value
