"""Save and load checkpoints whose tensors have no memory: record their size, and write a placeholder.

A placeholder of `torch.save` is the object as pickled, with the shape in place of each tensor. `torch.load`
gives it back with tensors of zeros. A placeholder of safetensors is a valid file whose data is a hole.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.scripts.overlay import real

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.overlay import Overlay
    from trimtab.scripts.sandbox_record import SandboxRecord

MAGIC = b"TRIMTAB-PLACEHOLDER-1\n"
METADATA = ".metadata"
"""The file by which torch.distributed.checkpoint recognises a checkpoint."""
MOST_SAVED_BYTES = 64 * 2**20
"""More than this is not written, even if it is real."""
MOST_KEPT_BYTES = 2**20
"""Real tensors up to this size keep their values in a placeholder."""

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}


@dataclass(frozen=True)
class SavedTensor:
    """What is kept of a tensor that has no memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: str
    requires_grad: bool
    is_parameter: bool
    storage: int
    offset: int


@dataclass
class TensorCount:
    """The tensors of an object, and the bytes of their storages, each counted once."""

    tensors: list[Any] = field(default_factory=list)
    bytes: int = 0
    has_pretended: bool = False
    _storages: set[int] = field(default_factory=set)

    def add(self, tensor: Any, is_pretended: Callable[[Any], bool]) -> int:
        """Count a tensor; return its number."""
        self.tensors.append(tensor)
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's shard
        key, size = _storage_of(local)
        if key not in self._storages:
            self._storages.add(key)
            self.bytes += size
        self.has_pretended = self.has_pretended or is_pretended(local)
        return len(self.tensors) - 1


def _storage_of(tensor: Any) -> tuple[int, int]:
    """Return an identifier of a tensor's storage, and its bytes."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
        return id(tensor), tensor.numel() * tensor.element_size()


def _is_storage(obj: object) -> bool:
    import torch

    return isinstance(obj, torch.UntypedStorage | torch.TypedStorage)


def is_without_memory(tensor: Any) -> bool:
    """Return whether a tensor cannot be saved: it is fake, on meta, or on a GPU that is not there."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type != "cpu"


def find_tensors(obj: Any) -> list[Any]:
    """Return the tensors in containers and in the attributes of objects, each once."""
    import torch

    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [obj]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), value)
        elif id(value) not in seen and not isinstance(value, type | str | bytes | int | float):
            seen.add(id(value))
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, list | tuple | set | frozenset):
                waiting.extend(value)
            elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
                waiting.extend(vars(value).values())
            elif isinstance(value, torch.nn.Module):
                waiting.extend((value.state_dict(), vars(value)))
    return list(found.values())


class Placeholders:
    """Functions that replace those which save and load tensors."""

    def __init__(
        self, overlay: Overlay, record: SandboxRecord, is_pretended: Callable[[Any], bool] | None = None
    ) -> None:
        self.overlay = overlay
        self.record = record
        self._is_pretended = is_pretended

    def is_pretended(self, tensor: Any) -> bool:
        """Return whether a tensor has no memory, by the caller's rule or by ours."""
        return is_without_memory(tensor) or (self._is_pretended is not None and self._is_pretended(tensor))

    # torch.save and torch.load.

    def make_save(self, original: Any) -> Any:
        """Return a function that replaces torch.save."""

        def save(obj: object, f: Any, pickle_module: Any = pickle, *arguments: Any, **options: Any) -> None:
            is_path = isinstance(f, str | os.PathLike)
            # A storage is saved on its own when Python pickles a real tensor; it must not be pickled again.
            payload, count = (None, TensorCount()) if _is_storage(obj) else self._pickle(obj, pickle_module)
            if not count.has_pretended and not (is_path and count.bytes > MOST_SAVED_BYTES):
                target = self._write_path(os.fsdecode(f), None) if is_path else f
                original(obj, target, pickle_module, *arguments, **options)
                return
            content = MAGIC + pickle.dumps((payload, [self._describe(tensor) for tensor in count.tensors]))
            if not is_path:
                f.write(content)
                return
            with real.open_file(self._write_path(os.fsdecode(f), count.bytes), "wb") as stream:
                stream.write(content)

        return save

    def _write_path(self, path: str, size: int | None) -> str:
        """Return where to write a path, and record it; with its size if it is a placeholder."""
        found = self.overlay.prepare_write(path, keep=False)
        write = self.record.add_write(self.overlay, path, found)
        if write is not None:
            write.is_placeholder = size is not None
            write.bytes = size
        return found

    def _pickle(self, obj: object, pickle_module: Any) -> tuple[bytes | None, TensorCount]:
        """Pickle an object without its tensors; None if that fails, with the tensors that were found."""
        import torch

        count, is_pretended = TensorCount(), self.is_pretended
        seen: dict[int, int] = {}

        class Pickler(pickle_module.Pickler):  # type: ignore[misc]
            def persistent_id(self, value: Any) -> tuple[str, int] | None:
                if not isinstance(value, torch.Tensor):
                    return None
                if id(value) not in seen:
                    seen[id(value)] = count.add(value, is_pretended)
                return "tensor", seen[id(value)]

        buffer = io.BytesIO()
        try:
            Pickler(buffer, protocol=2).dump(obj)
        except (pickle.PicklingError, AttributeError, TypeError):
            count = TensorCount()
            for tensor in find_tensors(obj):
                count.add(tensor, self.is_pretended)
            if not count.has_pretended:
                return None, count  # torch.save will fail in the same way, with its own message
            self.record.notes.append(
                "a checkpoint cannot be pickled without its tensors; it cannot be loaded again"
            )
            return None, count
        return buffer.getvalue(), count

    def _describe(self, tensor: Any) -> Any:
        """Return what to keep of a tensor: itself if it is small and real, else its shape."""
        import torch

        is_parameter = isinstance(tensor, torch.nn.Parameter)
        local = getattr(tensor, "_local_tensor", tensor)
        key, size = _storage_of(local)
        if not self.is_pretended(local) and size <= MOST_KEPT_BYTES:
            return tensor
        strided = local.layout == torch.strided
        return SavedTensor(
            size=tuple(local.shape),
            stride=tuple(local.stride()) if strided else (),
            dtype=local.dtype,
            device=str(local.device),
            requires_grad=local.requires_grad and local.is_leaf,
            is_parameter=is_parameter,
            storage=key,
            offset=local.storage_offset() if strided else 0,
        )

    def make_load(self, original: Any) -> Any:
        """Return a function that replaces torch.load."""

        def load(f: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                found = self.overlay.find(os.fsdecode(f))
                if not _starts_with_magic(found):
                    return original(
                        found if found != os.fsdecode(f) else f, map_location, *arguments, **options
                    )
                with real.open_file(found, "rb") as stream:
                    return self._restore(stream.read(), map_location, str(f))
            content = _read_magic_stream(f)
            if content is None:
                return original(f, map_location, *arguments, **options)
            return self._restore(content, map_location, str(getattr(f, "name", "the buffer")))

        return load

    def _restore(self, content: bytes, map_location: Any, name: str) -> Any:
        """Return the object of a placeholder, with tensors of zeros."""
        payload, described = pickle.loads(content[len(MAGIC) :])  # noqa: S301 - written by this process
        if payload is None:
            raise RuntimeError(
                f"{name} is a placeholder of trimtab: the script saved tensors of the pretended GPU in an "
                "object that cannot be pickled without them, so they cannot be loaded again"
            )
        built: dict[Any, Any] = {}
        tensors = [_build(shape, map_location, built) for shape in described]

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, identifier: Any) -> Any:
                return tensors[identifier[1]]

        return Unpickler(io.BytesIO(payload)).load()

    # safetensors.

    def make_save_file(self, original: Any) -> Any:
        """Return a function that replaces safetensors.torch.save_file."""

        def save_file(tensors: dict[str, Any], filename: Any, metadata: Any = None) -> None:
            count = TensorCount()
            for tensor in tensors.values():
                count.add(tensor, self.is_pretended)
            if not count.has_pretended and count.bytes <= MOST_SAVED_BYTES:
                original(tensors, filename, metadata)
                return
            header, size = _safetensors_header(tensors, metadata)
            with real.open_file(self._write_path(os.fsdecode(filename), size), "wb") as stream:
                stream.write(header)
                stream.truncate(len(header) + size)

        return save_file

    # torch.distributed.checkpoint.

    def make_checkpoint_save(self, original: Any) -> Any:
        """Return a function that replaces torch.distributed.checkpoint.save."""

        def save(state_dict: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            _, count = self._pickle(state_dict, pickle)
            folder = _checkpoint_folder(arguments, options)
            if folder is None or (not count.has_pretended and count.bytes <= MOST_SAVED_BYTES):
                return original(state_dict, *arguments, **options)
            self._make_folders(folder)
            with real.open_file(self._write_path(f"{folder}/{METADATA}", count.bytes), "wb") as stream:
                stream.write(MAGIC)
            return None

        return save

    def make_checkpoint_async_save(self, original: Any) -> Any:
        """Return a function that replaces torch.distributed.checkpoint.async_save."""
        from concurrent.futures import Future

        def async_save(state_dict: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            _, count = self._pickle(state_dict, pickle)
            if _checkpoint_folder(arguments, options) is None or not count.has_pretended:
                return original(state_dict, *arguments, **options)
            done: Future[None] = Future()
            done.set_result(self.make_checkpoint_save(original)(state_dict, *arguments, **options))
            return done

        return async_save

    def make_checkpoint_load(self, original: Any) -> Any:
        """Return a function that replaces torch.distributed.checkpoint.load.

        A placeholder has nothing to load, and the tensors stay as they are.
        """

        def load(state_dict: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            folder = _checkpoint_folder(arguments, options)
            if folder is not None and _starts_with_magic(self.overlay.find(f"{folder}/{METADATA}")):
                return None
            return original(state_dict, *arguments, **options)

        return load

    def _make_folders(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)  # the replaced function: it goes to the scratch folder


def _checkpoint_folder(arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """Return the folder of a distributed checkpoint; None if it does not go to a folder."""
    given = options.get("checkpoint_id") or next(
        (argument for argument in arguments if isinstance(argument, str | os.PathLike)), None
    )
    if given is None:
        storage = (
            options.get("storage_writer") or options.get("storage_reader") or next(iter(arguments), None)
        )
        given = getattr(storage, "path", None)
    return os.fsdecode(given) if isinstance(given, str | os.PathLike) and "://" not in str(given) else None


def _starts_with_magic(path: str) -> bool:
    try:
        with real.open_file(path, "rb") as stream:
            return bool(stream.read(len(MAGIC)) == MAGIC)
    except OSError:
        return False


def _read_magic_stream(stream: Any) -> bytes | None:
    """Return the rest of a stream if it is a placeholder; else leave it where it was."""
    try:
        start = stream.tell()
        head = stream.read(len(MAGIC))
        if head == MAGIC:
            return bytes(head + stream.read())
        stream.seek(start)
    except (AttributeError, OSError, ValueError):
        pass
    return None


def _build(shape: Any, map_location: Any, built: dict[Any, Any]) -> Any:
    """Return the tensor for a shape, the same one for tied weights."""
    import torch

    if not isinstance(shape, SavedTensor):
        return shape
    key = (shape.storage, shape.offset, shape.size, shape.stride)
    if key not in built:
        device = _map_device(shape.device, map_location)
        tensor = torch.zeros(shape.size, dtype=shape.dtype, device=device)
        if shape.stride and tensor.stride() != shape.stride and tensor.numel():
            tensor = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=device).zero_()
        if shape.is_parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=shape.requires_grad)
        elif shape.requires_grad:
            tensor.requires_grad_()
        built[key] = tensor
    return built[key]


def _map_device(device: str, map_location: Any) -> Any:
    """Return where torch.load puts a tensor of a device."""
    if map_location is None:
        return device
    if isinstance(map_location, dict):
        return map_location.get(device, device)
    return "cpu" if callable(map_location) else map_location


def _safetensors_header(tensors: dict[str, Any], metadata: Any) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and the bytes of data after it."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {
            "dtype": SAFETENSORS_NAMES.get(dtype, dtype.upper()),
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end
