"""The Python half of a CUDA device that is not there: `torch.cuda` answers as the target would.

Jobs and libraries ask for names, capabilities, streams and free memory, and choose kernels and dtypes by the
answer. Only for a child process that traces and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import inspect
import math
import mmap
import platform
import re
import struct
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn import init

from trimtab.catalog.devices import capability, has_bf16
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Device


# Makes torch, in this process, believe in a CUDA device that is not there.
#
# Covers what stands between fake tensors and CUDA in torch's C++ half: the device guard and the hooks that
# say whether CUDA exists. With them in place autograd, autocast, optimizers and every `is_cuda` take the same
# way as on a GPU, on a build without CUDA too; no kernel ever runs, because FakeTensorMode answers before one
# is chosen. Does not cover `torch.cuda`, whose Python half `trimtab.trace.fake_cuda` replaces.
#
# It works by writing two tables of function pointers. A guard whose every function returns the constant 1
# reads, by the ABI's rules for small structs, as "device type 1 (CUDA), index 0, default stream", so one
# function serves all of them whatever their order. The hooks are copied, and the answers that matter are
# replaced by name; `show_cuda` puts the real ones back for a while. Only for a child process that does
# nothing else.


CUDA_DEVICE_TYPE = 1
CUDNN_VERSION = 91002
"""The cuDNN that is pretended: what torch 2.11 to 2.13 ship for CUDA 13."""

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_MOST_SLOTS = 96
_BEFORE_VTABLE = 2
"""Two words stand before the functions of a vtable: the offset to the top and the type."""

YES = (
    "isBuilt isAvailable hasPrimaryContext deviceCount hasCUDA hasCUDART hasCuDNN hasCuSOLVER hasCuBLASLt "
    "compiledWithCuDNN supportsDilatedConvolutionWithCuDNN supportsDepthwiseConvolutionWithCuDNN "
    "supportsBFloat16ConvolutionWithCuDNNv8 supportsBFloat16RNNWithCuDNN getNumGPUs"
)
NOTHING = (
    "init setCurrentDevice getCurrentDevice exchangeDevice maybeExchangeDevice current_device "
    "deviceSynchronize"
)
ANSWERS = (
    dict.fromkeys(YES.split(), 1)
    | dict.fromkeys(NOTHING.split(), 0)
    | {"versionCuDNN": CUDNN_VERSION, "versionRuntimeCuDNN": CUDNN_VERSION}
)
"""What each function of the hooks answers from now on, by name."""

ZERO_REAL = "batchnormMinEpsilonCuDNN"
"""The one function of them that answers with a real number, here 0.0."""

_kept: list[object] = []
"""Memory that torch now points into: it must live as long as the process."""


_hooks: dict[str, Any] = {}
"""Where torch looks for its CUDA hooks, the address of the real ones, and of ours."""


def show_cuda(visible: bool) -> None:
    """Let torch's C++ half see the pretended device, or what there really is."""
    if _hooks:
        _hooks["pointer"].value = _hooks["ours" if visible else "real"]


def pretend_cuda() -> None:
    """Install the guard and the hooks."""
    import torch

    folder = Path(torch.__file__).parent
    codes = [_returning(1), _returning_zero_real(), *map(_returning, ANSWERS.values())]
    one, zero, *answers = _functions(codes)
    _install_guard(_library(folder, "c10"), one)
    functions = dict(zip(ANSWERS, answers, strict=True)) | {ZERO_REAL: zero}
    _install_hooks(_library(folder, "torch_cpu"), _hook_names(folder / "include"), functions)


def _library(folder: Path, name: str) -> ctypes.CDLL:
    suffix = {"Darwin": "dylib"}.get(platform.system(), "so")
    return ctypes.CDLL(str(folder / "lib" / f"lib{name}.{suffix}"))


def _is_intel() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _returning(value: int) -> bytes:
    """Machine code of a function that returns a constant, with the second return register zero."""
    if _is_intel():
        # mov eax, value; xor edx, edx; ret
        return b"\xb8" + struct.pack("<I", value) + b"\x31\xd2\xc3"
    # movz x0, low; movk x0, high, lsl 16; movz x1, 0; ret
    low, high = value & 0xFFFF, value >> 16
    return struct.pack("<4I", 0xD2800000 | low << 5, 0xF2A00000 | high << 5, 0xD2800001, 0xD65F03C0)


def _returning_zero_real() -> bytes:
    """Xorps xmm0, xmm0; ret, or fmov d0, xzr; ret."""
    return bytes.fromhex("0f57c0c3" if _is_intel() else "e003679ec0035fd6")


def _functions(codes: list[bytes]) -> list[int]:
    """The address of a function for each piece of machine code."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _kept.append(page)
    for number, code in enumerate(codes):
        page.seek(number * 16)
        page.write(code)
    return [start + number * 16 for number in range(len(codes))]


def _install_guard(library: ctypes.CDLL, number: int) -> None:
    registry = (ctypes.c_void_p * (CUDA_DEVICE_TYPE + 1)).in_dll(library, _REGISTRY)
    vtable = (ctypes.c_void_p * _MOST_SLOTS)(*([number] * _MOST_SLOTS))
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(vtable))
    _kept.extend((vtable, guard))
    registry[CUDA_DEVICE_TYPE] = ctypes.addressof(guard)


def _hook_names(include: Path) -> list[str]:
    """The virtual functions of the CUDA hooks in order, from the headers that come with torch."""
    names = ["destructor", "deleting destructor"]
    for header in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):
        text = (include / "ATen" / "detail" / header).read_text(encoding="utf-8")
        found = re.findall(r"^\s*virtual\s+[^;{]*?([~\w]+)\s*\(", text, re.MULTILINE)
        names += [name for name in found if not name.startswith("~")]
    return names


def _install_hooks(library: ctypes.CDLL, names: list[str], functions: dict[str, int]) -> None:
    get_hooks = getattr(library, _GET_HOOKS)
    get_hooks.restype = ctypes.c_void_p
    vtable_pointer = ctypes.c_void_p.from_address(get_hooks())
    word = ctypes.sizeof(ctypes.c_void_p)
    assert vtable_pointer.value is not None  # noqa: S101 - an object has a vtable
    begin = vtable_pointer.value - _BEFORE_VTABLE * word
    count = len(names) + _BEFORE_VTABLE
    copy = (ctypes.c_void_p * count)(*(ctypes.c_void_p * count).from_address(begin))
    for slot, name in enumerate(names):
        if name in functions:
            copy[slot + _BEFORE_VTABLE] = functions[name]
    _kept.append(copy)
    _hooks.update(pointer=vtable_pointer, real=vtable_pointer.value)
    _hooks["ours"] = vtable_pointer.value = ctypes.addressof(copy) + _BEFORE_VTABLE * word


# Turns the pretended CUDA device off while installed packages are imported.
#
# Packages ask torch for its CUDA at import: for its version, for a driver, for kernels to load. On a build of
# torch without CUDA such a question fails, or a package loads code that is not there. The job's own files,
# and all code after it was imported, go on seeing the device. So do torch and the libraries that are known
# to import well with it, because they choose kernels by what they see at import.


SEES_CUDA = {"torch", "triton", "transformers", "trimtab"}
"""Top-level packages that are imported with the pretended device."""
INSTALLED = ("site-packages", "dist-packages")


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in names})


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the job.

    >>> is_installed("/usr/lib/python3/dist-packages/numpy/__init__.py"), is_installed("/home/me/job.py")
    (True, False)
    """
    path = Path(file)
    return any(part in INSTALLED for part in path.parts) or any(
        folder in path.parents for folder in _library_folders()
    )


def _match_without_values(module: Any) -> None:
    """Let scipy's linear_sum_assignment answer for costs without values: the sizes are what matters.

    Losses of detection match what a model found with what is there. Any matching has as many pairs.
    """
    whole = module.linear_sum_assignment

    @functools.wraps(whole)
    def linear_sum_assignment(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(cost_matrix, "fake_mode"):
            return whole(cost_matrix, *args, **kwargs)
        import numpy as np

        pairs = min(cost_matrix.shape)
        return np.arange(pairs), np.arange(pairs)

    module.linear_sum_assignment = linear_sum_assignment


STAND_INS: dict[str, Callable[[Any], None]] = {"scipy.optimize": _match_without_values}
"""What is changed in a module after it was imported."""


def turn_off_at_import(turn: Callable[[bool], bool]) -> None:
    """From now on call `turn(False)` before a module of an installed package runs, and undo it afterwards.

    `turn` says whether the device was seen before.
    """
    whole = importlib.machinery.SourceFileLoader.exec_module

    def exec_module(loader: Any, module: Any) -> None:
        name, file = module.__name__, getattr(loader, "path", "") or ""
        sees = name.partition(".")[0] in SEES_CUDA or not is_installed(str(file))
        before = turn(sees)
        try:
            whole(loader, module)
        finally:
            turn(before)
        if name in STAND_INS:
            STAND_INS[name](module)

    importlib.machinery.SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign,assignment]


# Numbers that are drawn again until all are within bounds: a loop without an end if there are no values.


def bound_redraws() -> None:
    """Let torch.nn.init.trunc_normal_ draw as often as it takes on average, and no longer."""
    # Before torch 2.13 it needed one draw.
    if "while" in inspect.getsource(init._no_grad_trunc_normal_):
        init._no_grad_trunc_normal_ = _truncated


def _truncated(  # noqa: PLR0913, PLR0917 - torch's own
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """What torch does, with the number of rounds worked out instead of seen."""
    outside = 1 - (math.erf((b - mean) / std / 2**0.5) - math.erf((a - mean) / std / 2**0.5)) / 2
    with torch.no_grad():
        result = tensor.normal_(mean, std, generator=generator)
        for _ in range(redraws(tensor.numel(), outside)):
            wrong = (result < a) | (result > b)
            result = torch.where(wrong, torch.empty_like(result).normal_(mean, std), result)
        _ = (result < a) | (result > b)
        return tensor if tensor is result else tensor.copy_(result)


def redraws(count: int, outside: float) -> int:
    """Rounds until less than one of `count` numbers is expected outside: count * outside^(rounds + 1) < 1.

    >>> redraws(1_000_000, 0.0455), redraws(1_000_000, 0.0), redraws(10, 0.01)
    (4, 0, 0)
    """
    if count * outside < 1:
        return 0
    return math.ceil(math.log(count) / -math.log(min(outside, 0.99))) - 1


WARP = 32
CACHE_MIB = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126}
"""L2 by compute capability, as the best-known chip of each has it."""
H200_CACHE_MIB = 60
"""Seen on one."""
H100_SHARED = {"block": 49152, "optin": 232448, "multiprocessor": 233472}


@dataclass(frozen=True)
class FakeProperties:
    """What torch.cuda.get_device_properties gives."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: str = "00000000-0000-0000-0000-000000000000"
    gcnArchName: str = ""  # noqa: N815 - torch's spelling
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    warp_size: int = WARP
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = H100_SHARED["block"]
    shared_memory_per_block_optin: int = H100_SHARED["optin"]
    shared_memory_per_multiprocessor: int = H100_SHARED["multiprocessor"]
    L2_cache_size: int = 50 * 2**20
    clock_rate: int = 1_830_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120


class FakeStream:
    """A stream on which nothing ever waits. It has a number, because the allocator keeps a pool for each."""

    device_index = 0
    device_type = 1
    made = 0
    current = 0
    """The number of the stream that work goes to now; 0 is the default one."""

    def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)
        if number is None:
            FakeStream.made += 1
            number = FakeStream.made
        self.stream_id = self.cuda_stream = number
        self._outside = 0

    def __enter__(self) -> Self:
        self._outside, FakeStream.current = FakeStream.current, self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        FakeStream.current = self._outside

    def is_capturing(self) -> bool:
        """No graph is being captured."""
        return False

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event that has happened."""
        return event or FakeEvent()

    def wait_stream(self, *_: object) -> None:
        """Nothing to wait for."""

    wait_event = synchronize = wait_stream


class FakeEvent:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, _: FakeEvent) -> float:
        """Some milliseconds."""
        return 1.0

    def record(self, *_: object) -> None:
        """Nothing to do."""

    wait = synchronize = record


def _on_stream(stream: FakeStream | None) -> Any:
    """`with torch.cuda.stream(s):`, which takes None as well."""
    return contextlib.nullcontext() if stream is None else stream


def imitate(target: Device) -> None:
    """Replace torch.cuda's answers by the target's, and make torch believe in CUDA."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from trimtab.trace.fake_ops import follow_scripts

    config = torch._C._show_config()
    pretend_cuda()
    # torch would ask its CUDA half to describe itself.
    torch._C._show_config = _constant(config)
    bound_redraws()
    follow_scripts()
    numbers = capability(target.compute_capability or "9.0") or (9, 0)
    free = target.free_bytes if target.free_bytes is not None else target.memory_bytes
    properties = FakeProperties(
        name=target.name,
        major=numbers[0],
        minor=numbers[1],
        total_memory=target.memory_bytes,
        multi_processor_count=target.multiprocessors or 1,
        L2_cache_size=_cache_bytes(target, numbers),
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": target.name,
        "get_device_capability": numbers,
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{numbers[0]}{numbers[1]}"],
        "is_bf16_supported": has_bf16(target.compute_capability or "9.0"),
        "is_current_stream_capturing": False,
        "mem_get_info": (free, target.memory_bytes),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "can_device_access_peer": True,
        "utilization": 0,
        "_get_device_index": 0,
    }
    silent = (
        "_lazy_init init set_device synchronize empty_cache reset_peak_memory_stats ipc_collect manual_seed "
        "manual_seed_all seed seed_all reset_max_memory_allocated set_per_process_memory_fraction"
    )
    for name, value in (answers | dict.fromkeys(silent.split())).items():
        setattr(torch.cuda, name, _while_seen(value, getattr(torch.cuda, name)))
    raw = {"getDeviceCount": 1, "getDevice": 0, "isCurrentStreamCapturing": False, "getCurrentRawStream": 0}
    quiet = "setDevice exchangeDevice maybeExchangeDevice"
    for name, value in (raw | dict.fromkeys(quiet.split(), 0)).items():
        # A build without CUDA has no such function, and no device.
        real = getattr(torch._C, f"_cuda_{name}", _constant(0))
        setattr(torch._C, f"_cuda_{name}", _while_seen(value, real))
    for place in (torch.cuda, torch.accelerator):
        for name in ("current_stream", "default_stream"):
            setattr(place, name, lambda *_, **__: FakeStream(number=FakeStream.current))
    torch.cuda.Stream = FakeStream  # type: ignore[assignment,misc]
    torch.cuda.Event = FakeEvent  # type: ignore[assignment,misc]
    torch.cuda.stream = _on_stream  # type: ignore[assignment]
    torch.cuda.set_stream = _constant(None)
    torch.cuda.amp.common.amp_definitely_not_available = _constant(value=False)
    torch.backends.cuda.is_built = _constant(value=True)
    real_version = torch.version.cuda
    torch.version.cuda = torch.version.cuda or "13.0"
    seen_version = torch.version.cuda

    def turn(seen: bool) -> bool:
        before, Visibility.now = Visibility.now, seen
        if seen != before:
            show_cuda(seen)
            torch.version.cuda = seen_version if seen else real_version
        return before

    turn_off_at_import(turn)
    # It would start CUDA for real, on builds that have it, before the first fake tensor.
    torch._subclasses.fake_tensor.init_gpu_context = _constant(None)  # type: ignore[assignment]
    # Recurrent layers lay their weights out for cuDNN by asking cuDNN itself.
    torch.nn.RNNBase.flatten_parameters = _constant(None)  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    # A tensor's deep copy copied its mode with it, and with that torch's weak references to storages, which
    # were then given back twice and corrupted the heap. One mode for all copies.
    FakeTensorMode.__deepcopy__ = lambda mode, _: mode  # type: ignore[attr-defined]


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy as of a real tensor; torch's own way sets storages, which fake ones do not take."""
    import torch

    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that were made explicitly by the user can be copied deeply")
    copied: Any = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def _cache_bytes(target: Device, numbers: tuple[int, int]) -> int:
    size = H200_CACHE_MIB if "H200" in target.name else CACHE_MIB.get(numbers, CACHE_MIB[9, 0])
    return size * MIB


class Visibility:
    """Whether code that runs now sees the pretended device: packages that are being imported do not."""

    now = True


def _while_seen(value: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives the target's answer; and the real one to packages that are being imported."""
    return lambda *args, **kwargs: value if Visibility.now else real(*args, **kwargs)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def hide_tracing() -> None:
    """Libraries that look for fake tensors go another way through their models: tell them there are none."""
    import sys

    library = sys.modules.get("transformers.utils.import_utils")
    if library is not None:
        library.is_fake_tensor = _constant(value=False)  # type: ignore[attr-defined]


def _apply(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module.to`, `.half` and the like for fake parameters: new memory under the old parameter.

    torch swaps fake parameters as whole objects, which fails as soon as anything refers to one weakly; on a
    GPU it puts new memory under the old one, and so does this.
    """
    import torch

    if recurse:
        for child in module.children():
            child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
        if changed is parameter:
            continue
        if changed.device == parameter.device:
            parameter.data = changed
        else:
            module._parameters[name] = torch.nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module
