"""Watch the checkpoints of a script, and read weights without their data."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.scripts.observer import SAVE, Observer, find_script_line, put
from trimtab.trace.fake_cuda import MODULE_PATCHES
from trimtab.trace.fake_ops import list_storage_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

SAVED_KEY = "trimtab_saved_object"


def patch_files(observer: Observer, fake_mode: Any) -> None:
    """Watch checkpoints, and read weights without their data."""
    original_save, original_load = torch.save, torch.load

    saved: dict[str, Any] = {}

    @functools.wraps(original_save)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if observer.windows:
            observer.open_window(SAVE)
        # Tensors without memory cannot be written: the file holds a key, and loading it finds the object.
        key = str(len(saved))
        saved[key] = tree_map(functools.partial(_drop_memory, fake_mode), obj)
        out = original_save({SAVED_KEY: key}, *args, **kwargs)
        file = args[0] if args else kwargs.get("f")
        path = getattr(file, "name", file)
        if isinstance(path, str | os.PathLike):
            observer.saved_sizes[os.path.normpath(Path(path).absolute())] = _count_bytes(obj)
        observer.check_time()
        return out

    @functools.wraps(original_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap") is None and isinstance(f, str | os.PathLike):
            # Map the file: pages are read only if something needs their values.
            kwargs["mmap"] = zipfile.is_zipfile(f)
        if callable(map_location):
            found = original_load(f, map_location, *args, **kwargs)
            return saved[found[SAVED_KEY]] if isinstance(found, dict) and SAVED_KEY in found else found
        places = SavedPlaces(map_location)
        found = original_load(f, places.read_storage, *args, **kwargs)
        if isinstance(found, dict) and SAVED_KEY in found:
            found = saved[found[SAVED_KEY]]
        return tree_map(places.put_back, found)

    _patch_downloads(observer)
    _patch_pickles(observer, fake_mode)
    put(torch, "save", save)
    put(torch, "load", load)
    for module in IDENTIFYING_MODULES:
        MODULE_PATCHES[module] = _patch_storage_ids
    _patch_safetensors(observer, fake_mode)


class SavedPlaces:
    """Devices of the tensors of a file: a script that loads onto the GPU has its memory taken there."""

    def __init__(self, map_location: Any) -> None:
        self._map_location = map_location
        self._devices: dict[int, torch.device] = {}
        """Device of each storage, by the storage's id."""
        self._moved: dict[tuple[Any, ...], torch.Tensor] = {}
        self._parameters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def read_storage(self, storage: Any, location: str) -> Any:
        """Return a storage that was read, on the CPU, and note the device that the script asks for."""
        self._devices[storage._cdata] = self._find_device(location)
        return storage

    def put_back(self, leaf: Any) -> Any:
        """Return a tensor or a module on its device; parts that share memory are moved once."""
        if isinstance(leaf, torch.nn.Module):
            return leaf._apply(self._move)
        if not isinstance(leaf, torch.nn.Parameter):
            return self._move(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if leaf not in self._parameters:
            moved = self._move(leaf.detach())
            on_cpu = moved.device.type == "cpu"
            self._parameters[leaf] = leaf if on_cpu else torch.nn.Parameter(moved, leaf.requires_grad)
        return self._parameters[leaf]

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return tensor
        storage = tensor.untyped_storage()._cdata
        # What this process saved has no storage in the file.
        device = self._devices.get(storage) or self._find_device("cpu")
        if device.type != "cuda":
            return tensor
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in self._moved:
            self._moved[key] = tensor.to(device)
        return self._moved[key]

    def _find_device(self, location: str) -> torch.device:
        wanted = self._map_location
        if isinstance(wanted, dict):
            wanted = wanted.get(location)
        return torch.device(location if wanted is None else wanted)


def _count_bytes(obj: Any) -> int:
    """Return the bytes of the tensors in an object, each storage once."""
    return sum(_list_storages(leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.Tensor)).values())


def _list_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors, by its address."""
    shards = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    parts = [part for shard in shards for part in list_storage_tensors(shard)]
    return {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}


class Pickles:
    """How Python pickles tensors without memory: by their shape."""

    fake_mode: Any = None
    dumped: dict[int, int] | None = None
    """Bytes of the storages in the file that is being written, by address; None while none is written."""


class PickledTensor(NamedTuple):
    """What a pickle keeps of a tensor without memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    is_parameter: bool


def _pickle_tensor(tensor: Any, _protocol: Any) -> Any:
    """Return how to build a tensor again from a pickle; torch's own way reads its memory."""
    if tensor.requires_grad and not tensor.is_leaf:
        # It pickles no tensor that was computed either.
        raise RuntimeError("only tensors that were made explicitly by the user can be pickled")
    if Pickles.dumped is not None:
        Pickles.dumped |= _list_storages([tensor])
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
    return build_tensor, (PickledTensor(*shape, tensor.requires_grad, is_parameter),)


def build_tensor(kept: PickledTensor) -> torch.Tensor:
    """Return a tensor like the one that was pickled; on the GPU it takes memory."""
    with contextlib.ExitStack() as hidden:
        if torch.device(kept.device).type == "cpu":
            hidden.enter_context(_disable_current_modes())
            hidden.enter_context(Pickles.fake_mode)
        made = torch.empty_strided(kept.size, kept.stride, dtype=kept.dtype, device=kept.device)
    if kept.is_parameter:
        return torch.nn.Parameter(made, kept.requires_grad)
    return made.requires_grad_(kept.requires_grad)


def _patch_pickles(observer: Observer, fake_mode: Any) -> None:
    """Pickle tensors without memory, and watch checkpoints that are written with Python's pickle."""
    original = pickle.dump

    @functools.wraps(original)
    def dump(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        # A storage in the memory of this process is pickled with torch.save, which calls this again.
        before, Pickles.dumped = Pickles.dumped, {}
        try:
            original(obj, file, *args, **kwargs)
        finally:
            dumped, Pickles.dumped = Pickles.dumped, before
        path = getattr(file, "name", None)
        if dumped and isinstance(path, str):
            if observer.windows:
                observer.open_window(SAVE)
            observer.saved_sizes[os.path.normpath(Path(path).absolute())] = sum(dumped.values())
            observer.check_time()

    Pickles.fake_mode = fake_mode
    put(FakeTensor, "__reduce_ex__", _pickle_tensor)
    put(pickle, "dump", dump)


class MissingWeights(dict[str, Any]):
    """Weights that are not on this machine: a model takes them as they should be."""


def _patch_downloads(observer: Observer) -> None:
    """Let a script go on without weights that it would download: the model has their shapes."""
    original_download, original_load = torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict
    missing: list[str] = []

    @functools.wraps(original_download)
    def load_state_dict_from_url(url: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_download(url, *args, **kwargs)
        except OSError:
            missing.append(url)
            observer.notes[
                f"the weights at {url} are not on this machine, and were not loaded ({find_script_line()})"
            ] = None
            return MissingWeights()

    @functools.wraps(original_load)
    def load_state_dict(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # A function that renames the weights leaves an empty dictionary of another type.
        if isinstance(state_dict, MissingWeights) or (missing and not state_dict):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return original_load(module, state_dict, *args, **kwargs)

    put(torch.hub, "load_state_dict_from_url", load_state_dict_from_url)
    put(torch.nn.Module, "load_state_dict", load_state_dict)
    # This check asks GitHub even where the repository is on the disk.
    put(torch.hub, "_validate_not_a_forked_repo", lambda *_, **__: None)


def _drop_memory(fake_mode: Any, leaf: Any) -> Any:
    """Return a tensor on the CPU without memory, for one that is saved."""
    if not isinstance(leaf, FakeTensor):
        return leaf.detach().clone() if type(leaf) is torch.Tensor else leaf
    with _disable_current_modes(), fake_mode:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")


def _patch_safetensors(observer: Observer, fake_mode: Any) -> None:
    """Return tensors of safetensors files without their data, and write such files."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return
    WeightFile.open_real, WeightFile.fake_mode = safetensors.safe_open, fake_mode
    WeightFile.dtypes = safetensors.torch._TYPES
    _patch_storage_ids(safetensors.torch)
    for place in (safetensors, safetensors.torch):
        put(place, "safe_open", WeightFile)
    names = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if observer.windows:
            observer.open_window(SAVE)
        write_hollow_weights(tensors, filename, metadata, names)
        observer.check_time()

    put(safetensors.torch, "save_file", save_file)


def write_hollow_weights(tensors: Any, filename: Any, metadata: Any, names: dict[Any, str]) -> None:
    """Write a safetensors file with the names and shapes of tensors, and a hole where their data would be."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    with open(filename, "wb") as file:  # noqa: PTH123 - the script's own kind of name
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


IDENTIFYING_MODULES = ("transformers.pytorch_utils", "accelerate.utils.modeling", "safetensors.torch")
"""Modules that find tensors with shared memory by their addresses, which fake tensors do not have."""


def _patch_storage_ids(module: Any) -> None:
    def find_storage(tensor: Any) -> int:
        return int(tensor.untyped_storage()._cdata)

    if hasattr(module, "storage_ptr"):
        put(module, "storage_ptr", find_storage)
    if hasattr(module, "id_tensor_storage"):
        put(
            module,
            "id_tensor_storage",
            lambda tensor: (tensor.device, find_storage(tensor), tensor.untyped_storage().nbytes()),
        )


class WeightFile:
    """A safetensors file whose data is never read."""

    open_real: Any
    fake_mode: Any
    dtypes: Any

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> None:
        self._file: Any = type(self).open_real(filename, framework=framework, device="cpu", **kwargs)
        self._device = device

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor of the file, without its data."""
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> Any:
        """Return a tensor of the file, of which parts can be taken."""
        return WeightSlice(self, self._file.get_slice(name))

    def make_fake(self, shape: Any, dtype: str) -> Any:
        """Return a tensor without data on the device of this file."""
        with _disable_current_modes(), self.fake_mode:
            made = torch.empty(list(shape), dtype=self.dtypes[dtype], device="cpu")
        return made if torch.device(self._device or "cpu").type == "cpu" else made.to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class WeightSlice:
    """A tensor of a file; indexing gives a part of it."""

    def __init__(self, file: WeightFile, inner: Any) -> None:
        self._file, self._inner = file, inner
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, index: Any) -> Any:
        whole = self._file.make_fake(self.get_shape(), self.get_dtype())
        return whole if index == slice(None) else whole[index]
