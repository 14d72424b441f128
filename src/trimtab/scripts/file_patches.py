"""Watch the checkpoints of a script, and read weights without their data."""

from __future__ import annotations

import functools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.scripts.observer import SAVE, Observer, find_script_line, put
from trimtab.trace.fake_cuda import MODULE_PATCHES
from trimtab.trace.fake_ops import list_storage_tensors

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
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap") is None and isinstance(f, str | os.PathLike):
            # Map the file: pages are read only if something needs their values.
            kwargs["mmap"] = zipfile.is_zipfile(f)
        kwargs["map_location"] = kwargs.get("map_location") if callable(kwargs.get("map_location")) else "cpu"
        found = original_load(f, *args, **kwargs)
        return saved[found[SAVED_KEY]] if isinstance(found, dict) and SAVED_KEY in found else found

    _patch_downloads(observer)
    put(torch, "save", save)
    put(torch, "load", load)
    for module in IDENTIFYING_MODULES:
        MODULE_PATCHES[module] = _patch_storage_ids
    _patch_safetensors(observer, fake_mode)


def _count_bytes(obj: Any) -> int:
    """Return the bytes of the tensors in an object, each storage once."""
    tensors = [leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.Tensor)]
    shards = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    parts = [part for shard in shards for part in list_storage_tensors(shard)]
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


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
