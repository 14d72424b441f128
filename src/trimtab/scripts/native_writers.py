"""Give libraries that open files in native code the path in the scratch folder.

Each is changed when the script imports it, or at once if it is loaded already; none is imported here. What is
not in these tables is stopped by the kernel's guard, and the script gets a PermissionError.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.scripts.overlay import MOST_COPIED_BYTES, real
from trimtab.scripts.placeholders import Placeholders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from trimtab.scripts.overlay import Overlay
    from trimtab.scripts.sandbox_record import SandboxRecord


class NativePath(NamedTuple):
    """An argument of a native function that is a path."""

    module: str
    attribute: str
    position: int
    keyword: str
    mode: str
    """r, w, a (changes it), folder (writes files into it); `arg` if the next argument is a mode like r+."""


NATIVE_PATHS = (
    NativePath("safetensors", "safe_open", 0, "filename", "r"),
    NativePath("safetensors", "serialize_file", 1, "filename", "w"),
    NativePath("tokenizers", "Tokenizer.save", 1, "path", "w"),
    NativePath("tokenizers", "Tokenizer.from_file", 0, "path", "r"),
    NativePath("tokenizers", "models.Model.save", 1, "folder", "folder"),
    NativePath("pyarrow", "memory_map", 0, "path", "arg"),
    NativePath("pyarrow", "OSFile", 0, "path", "arg"),
    NativePath("pyarrow", "input_stream", 0, "source", "r"),
    NativePath("pyarrow", "output_stream", 0, "source", "w"),
    NativePath("pyarrow.parquet", "ParquetWriter.__init__", 1, "where", "w"),
    NativePath("pyarrow.parquet", "ParquetFile.__init__", 1, "source", "r"),
    NativePath("pyarrow.parquet", "read_table", 0, "source", "r"),
    NativePath("h5py", "File.__init__", 1, "name", "arg"),
    NativePath("soundfile", "SoundFile.__init__", 1, "file", "arg"),
    NativePath("cv2", "imwrite", 0, "filename", "w"),
    NativePath("cv2", "imread", 0, "filename", "r"),
    NativePath("torch._C", "PyTorchFileWriter", 0, "", "w"),
    NativePath("torch._C", "PyTorchFileReader", 0, "", "r"),
    NativePath("torch.jit", "save", 1, "f", "w"),
    NativePath("torch.jit", "load", 0, "f", "r"),
    NativePath("torch.autograd.profiler", "profile.export_chrome_trace", 1, "path", "w"),
)


def install(
    overlay: Overlay, record: SandboxRecord, is_pretended: Callable[[Any], bool] | None
) -> dict[int, Any]:
    """Change what is loaded, and the rest when it is imported; return new functions by the old ones' ids."""
    patches = _Patches(overlay, record, Placeholders(overlay, record, is_pretended))
    for name in patches.by_module:
        if name in sys.modules:
            patches.apply(sys.modules[name])
    sys.meta_path.insert(0, _PatchFinder(patches))
    return patches.replaced


class _Patches:
    """The changes to each module."""

    def __init__(self, overlay: Overlay, record: SandboxRecord, placeholders: Placeholders) -> None:
        self.overlay = overlay
        self.record = record
        self.replaced: dict[int, Any] = {}
        self._kept: list[Any] = []
        self.by_module: dict[str, list[Callable[[ModuleType], None]]] = {}
        for row in NATIVE_PATHS:
            self.by_module.setdefault(row.module, []).append(functools.partial(self._redirect, row))
        for module, patch in (
            ("sqlite3", self._patch_sqlite),
            ("numpy", self._patch_memmap),
            ("subprocess", self._patch_popen),
            ("wandb", self._patch_wandb),
            ("torch", self._patch_torch(placeholders)),
            ("safetensors.torch", self._patch_safetensors(placeholders)),
            ("torch.distributed.checkpoint.state_dict_saver", self._patch_checkpoint_saver(placeholders)),
            ("torch.distributed.checkpoint.state_dict_loader", self._patch_checkpoint_loader(placeholders)),
        ):
            self.by_module.setdefault(module, []).append(patch)

    def apply(self, module: ModuleType) -> None:
        """Change a module that is loaded now."""
        for patch in self.by_module.get(module.__name__, ()):
            patch(module)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function, method or class of an owner, if it has it."""
        if not hasattr(owner, name):
            return
        original = getattr(owner, name)
        replacement = functools.wraps(original, updated=())(make(original))
        is_static = isinstance(owner, type) and isinstance(vars(owner).get(name), staticmethod)
        is_bound = isinstance(owner, type) and getattr(original, "__self__", None) is not None
        try:
            setattr(owner, name, staticmethod(replacement) if is_static or is_bound else replacement)
        except TypeError:
            self.record.notes.append(f"{owner.__name__}.{name} cannot be redirected; the kernel guards it")
            return
        self.replaced[id(original)] = replacement
        self._kept.append(original)  # else its id could be used again

    def locate(self, path: Any, mode: str) -> Any:
        """Return where a library finds or writes a path; what is no path comes back as it is."""
        if not isinstance(path, str | os.PathLike) or "://" in str(path):
            return path
        text = os.fsdecode(path)
        if mode == "r":
            return self.overlay.find(text)
        if mode == "folder":
            found = self.overlay.upper + self.overlay.resolve(text)
            if self.overlay.is_folder(self.overlay.resolve(text)):
                self.overlay.make_folder(self.overlay.resolve(text))
                return found
            return text
        found = self.overlay.prepare_write(text, keep=mode != "w")
        self.record.add_write(self.overlay, text, found)
        return found

    def _redirect(self, row: NativePath, module: ModuleType) -> None:
        owner: Any = module
        *parents, name = row.attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        if owner is None:
            return

        def make(original: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                values, mode = list(arguments), row.mode
                if mode == "arg":
                    after = row.position + 1
                    given = options.get("mode", values[after] if len(values) > after else "r")
                    mode = _simplify_mode(str(given or "r"))
                if row.keyword in options:
                    options[row.keyword] = self.locate(options[row.keyword], mode)
                elif len(values) > row.position:
                    values[row.position] = self.locate(values[row.position], mode)
                return original(*values, **options)

            return call

        self.replace(owner, name, make)

    def _patch_sqlite(self, module: ModuleType) -> None:
        """Open a copy of a data base; one that is too large to copy is opened for reading only."""

        def make(original: Any) -> Any:
            def connect(database: Any, *arguments: Any, **options: Any) -> Any:
                text = os.fsdecode(database) if isinstance(database, str | bytes | os.PathLike) else ""
                if text in ("", ":memory:") or text.startswith("file:"):
                    return original(database, *arguments, **options)
                return original(self.locate(text, "a"), *arguments, **options)

            return connect

        self.replace(module, "connect", make)
        module.dbapi2.connect = module.connect

    def _patch_memmap(self, module: ModuleType) -> None:
        """Map a large file of the user so that changes stay in memory, in place of copying it."""
        original = module.memmap.__new__

        def make(
            cls: Any, filename: Any, dtype: Any = module.uint8, mode: str = "r+", *rest: Any, **options: Any
        ) -> Any:
            if mode in ("r+", "readwrite") and isinstance(filename, str | os.PathLike):
                found = self.overlay.find(os.fsdecode(filename))
                is_users = not found.startswith(self.overlay.scratch)
                if is_users and _size(found) > MOST_COPIED_BYTES:
                    mode = "c"
            return original(cls, filename, dtype, mode, *rest, **options)

        module.memmap.__new__ = make

    def _patch_popen(self, module: ModuleType) -> None:
        """Let a program start in a folder that exists only for the script."""

        def make(original: Any) -> Any:
            def start(popen: Any, *arguments: Any, **options: Any) -> None:
                folder = options.get("cwd")
                if isinstance(folder, str | os.PathLike) and not _is_users_folder(os.fsdecode(folder)):
                    options["cwd"] = self.overlay.find(os.fsdecode(folder))
                original(popen, *arguments, **options)

            return start

        self.replace(module.Popen, "__init__", make)

    def _patch_wandb(self, module: ModuleType) -> None:
        """Switch wandb off also where the script asks for another mode."""

        def make(original: Any) -> Any:
            def init(*arguments: Any, **options: Any) -> Any:
                return original(*arguments, **{**options, "mode": "disabled"})

            return init

        self.replace(module, "init", make)
        self.replace(module, "login", lambda _: lambda *_, **__: True)

    def _patch_torch(self, placeholders: Placeholders) -> Callable[[ModuleType], None]:
        def patch(module: ModuleType) -> None:
            self.replace(module, "save", placeholders.make_save)
            self.replace(module, "load", placeholders.make_load)
            for name in ("save", "load"):
                setattr(module.serialization, name, getattr(module, name))

        return patch

    def _patch_safetensors(self, placeholders: Placeholders) -> Callable[[ModuleType], None]:
        return lambda module: self.replace(module, "save_file", placeholders.make_save_file)

    def _patch_checkpoint_saver(self, placeholders: Placeholders) -> Callable[[ModuleType], None]:
        def patch(module: ModuleType) -> None:
            self.replace(module, "save", placeholders.make_checkpoint_save)
            self.replace(module, "async_save", placeholders.make_checkpoint_async_save)

        return patch

    def _patch_checkpoint_loader(self, placeholders: Placeholders) -> Callable[[ModuleType], None]:
        return lambda module: self.replace(module, "load", placeholders.make_checkpoint_load)


def _simplify_mode(mode: str) -> str:
    """Return r, w or a for a mode of a library."""
    if mode.startswith("w"):
        return "w"
    return "a" if mode[:1] in ("a", "x") or "+" in mode else "r"


def _size(path: str) -> int:
    try:
        return int(real.stat(path).st_size)
    except OSError:
        return 0


def _is_users_folder(path: str) -> bool:
    try:
        return bool(real.stat(path).st_mode & 0o040000)
    except OSError:
        return False


class _PatchFinder(importlib.abc.MetaPathFinder):
    """Let modules be imported as usual, and change them right after."""

    def __init__(self, patches: _Patches) -> None:
        self._patches = patches
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is to be changed, with a loader that does so."""
        if fullname not in self._patches.by_module or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = next(
                (
                    found
                    for finder in sys.meta_path
                    if finder is not self and (found := finder.find_spec(fullname, path, target)) is not None
                ),
                None,
            )
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._patches.apply(module)

            # The loader stays the same object: importlib.resources and inspect ask it for more.
            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
