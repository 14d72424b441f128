"""Make torch behave as if the target GPU were present, on a machine without one.

Jobs and libraries query names, capabilities, streams and free memory, and choose kernels and dtypes by the
answers. `install_fake_cuda` replaces `torch.cuda` and torch's C++ hooks, so that they answer as on the GPU.
Only for a child process that traces and then exits.
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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn import init

from trimtab.catalog.devices import has_bf16, parse_capability
from trimtab.jobs.library_files import is_library_file
from trimtab.trace.common_devices import note_special_fact
from trimtab.trace.followed_functions import is_fake_tensor
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Device


# Torch's C++ side: the device guard, and the hooks that report whether CUDA exists. With both replaced,
# autograd, autocast, optimizers and every `is_cuda` take the same path as on a GPU, even on a build without
# CUDA. No kernel ever runs, because FakeTensorMode answers before one is chosen.
#
# Both are tables of function pointers. By the ABI's rules for small structs, a guard function that returns
# the constant 1 means "device type 1 (CUDA), index 0, default stream", so one function serves all slots of
# the guard in any order. The hooks are copied, and some are replaced by name; `set_hooks_visible` can restore
# the real ones for a while.


CUDA_DEVICE_TYPE = 1
CUDNN_VERSION = 91900
"""The cuDNN version that a build of torch without cuDNN reports: that of torch 2.11 to 2.13 for CUDA 13."""

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_MAX_SLOTS = 96
_VTABLE_HEADER_WORDS = 2
"""Words before the functions of a vtable: the offset to the top and the type."""

HOOKS_ANSWERING_ONE = (
    "isBuilt isAvailable hasPrimaryContext deviceCount hasCUDA hasCUDART hasCuDNN hasCuSOLVER hasCuBLASLt "
    "compiledWithCuDNN supportsDilatedConvolutionWithCuDNN supportsDepthwiseConvolutionWithCuDNN "
    "supportsBFloat16ConvolutionWithCuDNNv8 supportsBFloat16RNNWithCuDNN getNumGPUs"
)
HOOKS_ANSWERING_ZERO = (
    "init setCurrentDevice getCurrentDevice exchangeDevice maybeExchangeDevice current_device "
    "deviceSynchronize"
)
VERSION_HOOKS = ("versionCuDNN", "versionRuntimeCuDNN")

FLOAT_HOOK = "batchnormMinEpsilonCuDNN"
"""The only replaced hook that returns a floating-point number, here 0.0."""

_pinned_memory: list[object] = []
"""Memory that torch points into: it must live as long as the process."""

_hooks: dict[str, Any] = {}
"""pointer: where torch reads the address of its CUDA hooks; real, fake: the two addresses."""


def set_hooks_visible(visible: bool) -> None:
    """Switch torch's C++ side to the fake device, or to the real machine."""
    if _hooks:
        _hooks["pointer"].value = _hooks["fake" if visible else "real"]


def list_hook_answers(*, has_cudnn: bool) -> dict[str, int]:
    """Return the constant that each replaced hook returns, by name; a build with cuDNN knows its version."""
    return (
        dict.fromkeys(HOOKS_ANSWERING_ONE.split(), 1)
        | dict.fromkeys(HOOKS_ANSWERING_ZERO.split(), 0)
        | dict.fromkeys(() if has_cudnn else VERSION_HOOKS, CUDNN_VERSION)
    )


def install_cuda_hooks() -> None:
    """Install the device guard and the hooks."""
    folder = Path(torch.__file__).parent
    constants = list_hook_answers(has_cudnn=torch._C._has_cudnn)
    codes = [
        _encode_constant_function(1),
        _encode_zero_float_function(),
        *map(_encode_constant_function, constants.values()),
    ]
    return_one, return_zero_float, *answers = _load_machine_code(codes)
    _install_guard(_load_library(folder, "c10"), return_one)
    functions = dict(zip(constants, answers, strict=True)) | {FLOAT_HOOK: return_zero_float}
    _install_hooks(_load_library(folder, "torch_cpu"), _read_hook_names(folder / "include"), functions)


def _load_library(folder: Path, name: str) -> ctypes.CDLL:
    suffix = {"Darwin": "dylib"}.get(platform.system(), "so")
    return ctypes.CDLL(str(folder / "lib" / f"lib{name}.{suffix}"))


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _encode_constant_function(value: int) -> bytes:
    """Return machine code of a function that returns a constant, with the second return register zero."""
    if _is_x86():
        # mov eax, value; xor edx, edx; ret
        return b"\xb8" + struct.pack("<I", value) + b"\x31\xd2\xc3"
    # movz x0, low; movk x0, high, lsl 16; movz x1, 0; ret
    low, high = value & 0xFFFF, value >> 16
    return struct.pack("<4I", 0xD2800000 | low << 5, 0xF2A00000 | high << 5, 0xD2800001, 0xD65F03C0)


def _encode_zero_float_function() -> bytes:
    """Return machine code of a function that returns 0.0."""
    # xorps xmm0, xmm0; ret, or fmov d0, xzr; ret
    return bytes.fromhex("0f57c0c3" if _is_x86() else "e003679ec0035fd6")


def _load_machine_code(codes: list[bytes]) -> list[int]:
    """Load functions given as machine code, and return their addresses."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _pinned_memory.append(page)
    for number, code in enumerate(codes):
        page.seek(number * 16)
        page.write(code)
    return [start + number * 16 for number in range(len(codes))]


def _install_guard(library: ctypes.CDLL, function: int) -> None:
    registry = (ctypes.c_void_p * (CUDA_DEVICE_TYPE + 1)).in_dll(library, _REGISTRY)
    vtable = (ctypes.c_void_p * _MAX_SLOTS)(*([function] * _MAX_SLOTS))
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(vtable))
    _pinned_memory.extend((vtable, guard))
    registry[CUDA_DEVICE_TYPE] = ctypes.addressof(guard)


def _read_hook_names(include: Path) -> list[str]:
    """Return the virtual functions of the CUDA hooks in order, from the headers that come with torch."""
    names = ["destructor", "deleting destructor"]
    for header in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):
        text = (include / "ATen" / "detail" / header).read_text(encoding="utf-8")
        functions = re.findall(r"^\s*virtual\s+[^;{]*?([~\w]+)\s*\(", text, re.MULTILINE)
        names += [name for name in functions if not name.startswith("~")]
    return names


def _install_hooks(library: ctypes.CDLL, names: list[str], functions: dict[str, int]) -> None:
    get_hooks = getattr(library, _GET_HOOKS)
    get_hooks.restype = ctypes.c_void_p
    vtable_pointer = ctypes.c_void_p.from_address(get_hooks())
    word = ctypes.sizeof(ctypes.c_void_p)
    assert vtable_pointer.value is not None  # noqa: S101 - an object has a vtable
    begin = vtable_pointer.value - _VTABLE_HEADER_WORDS * word
    count = len(names) + _VTABLE_HEADER_WORDS
    copy = (ctypes.c_void_p * count)(*(ctypes.c_void_p * count).from_address(begin))
    for slot, name in enumerate(names):
        if name in functions:
            copy[slot + _VTABLE_HEADER_WORDS] = functions[name]
    _pinned_memory.append(copy)
    _hooks.update(pointer=vtable_pointer, real=vtable_pointer.value)
    _hooks["fake"] = vtable_pointer.value = ctypes.addressof(copy) + _VTABLE_HEADER_WORDS * word


# The fake device is hidden while installed packages are imported. At import, packages query torch's CUDA
# version and driver, and load kernels. On a build of torch without CUDA this fails, or a package loads code
# that does not exist. The job's own files, and all code that runs after its import, still see the device. So
# do torch and the libraries in SEES_CUDA, which import well with it and choose kernels at import.


SEES_CUDA = {"torch", "triton", "transformers", "trimtab", "liger_kernel"}
"""Top-level packages that see the fake device when they are imported."""


def _patch_linear_sum_assignment(module: Any) -> None:
    """Let scipy's linear_sum_assignment accept fake tensors, which have no values.

    Detection losses use it to match predictions with targets. Every matching has the same number of pairs.
    """
    original = module.linear_sum_assignment

    @functools.wraps(original)
    def linear_sum_assignment(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(cost_matrix, "fake_mode"):
            return original(cost_matrix, *args, **kwargs)
        import numpy as np

        pairs = min(cost_matrix.shape)
        return np.arange(pairs), np.arange(pairs)

    module.linear_sum_assignment = linear_sum_assignment


MODULE_PATCHES: dict[str, Callable[[Any], None]] = {"scipy.optimize": _patch_linear_sum_assignment}
"""Patches applied to a module after its import."""


def hide_cuda_at_import(set_visible: Callable[[bool], bool]) -> None:
    """Call `set_visible(False)` before each module of an installed package runs, and undo it afterwards.

    `set_visible` returns whether the device was visible before.
    """
    original = importlib.machinery.SourceFileLoader.exec_module

    def exec_module(loader: Any, module: Any) -> None:
        name, file = module.__name__, getattr(loader, "path", "") or ""
        visible = name.partition(".")[0] in SEES_CUDA or not is_library_file(str(file))
        before = set_visible(visible)
        try:
            original(loader, module)
        finally:
            set_visible(before)
        if name in MODULE_PATCHES:
            MODULE_PATCHES[name](module)

    importlib.machinery.SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign,assignment]


def limit_redraws() -> None:
    """Limit torch.nn.init.trunc_normal_ to the expected number of draws.

    It draws until all numbers are within bounds, which never ends for fake tensors without values.
    """
    # Before torch 2.13 it needs only one draw.
    if "while" in inspect.getsource(init._no_grad_trunc_normal_):
        init._no_grad_trunc_normal_ = _fake_trunc_normal


def _fake_trunc_normal(  # noqa: PLR0913, PLR0917 - torch's own
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """Run torch's trunc_normal_ with the expected number of rounds."""
    outside = 1 - (math.erf((b - mean) / std / 2**0.5) - math.erf((a - mean) / std / 2**0.5)) / 2
    with torch.no_grad():
        result = tensor.normal_(mean, std, generator=generator)
        for _ in range(expected_redraws(tensor.numel(), outside)):
            outliers = (result < a) | (result > b)
            result = torch.where(outliers, torch.empty_like(result).normal_(mean, std), result)
        _ = (result < a) | (result > b)
        return tensor if tensor is result else tensor.copy_(result)


def expected_redraws(count: int, outside: float) -> int:
    """Return the rounds until fewer than 1 of `count` is expected outside: count * outside^(rounds + 1) < 1.

    >>> expected_redraws(1_000_000, 0.0455), expected_redraws(1_000_000, 0.0), expected_redraws(10, 0.01)
    (4, 0, 0)
    """
    if count * outside < 1:
        return 0
    return math.ceil(math.log(count) / -math.log(min(outside, 0.99))) - 1


WARP = 32
CACHE_MIB = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126}
"""L2 cache by compute capability, of the best-known chip of each."""
H200_CACHE_MIB = 60
"""Measured on an H200."""
H100_SHARED_MEMORY = {"block": 49152, "optin": 232448, "multiprocessor": 233472}
SPECIAL_PROPERTIES = {"name", "total_memory", "multi_processor_count", "L2_cache_size"}
"""Properties that differ between GPUs of the same compute capability."""
SPECIAL_ANSWERS = {"get_device_name", "mem_get_info"}
"""Functions of torch.cuda that do."""


@dataclass(frozen=True)
class FakeProperties:
    """Result of torch.cuda.get_device_properties."""

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
    shared_memory_per_block: int = H100_SHARED_MEMORY["block"]
    shared_memory_per_block_optin: int = H100_SHARED_MEMORY["optin"]
    shared_memory_per_multiprocessor: int = H100_SHARED_MEMORY["multiprocessor"]
    L2_cache_size: int = 50 * 2**20
    clock_rate: int = 1_830_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; note if it differs between GPUs of the same compute capability."""
        if name in SPECIAL_PROPERTIES:
            note_special_fact()
        return super().__getattribute__(name)


class FakeStream:
    """Stream on which nothing ever waits. It has a number, because the allocator has a pool per stream."""

    device_index = 0
    device_type = 1
    count = 0
    current = 0
    """Number of the current stream; 0 is the default stream."""
    current_part = ""
    """Purpose of the memory of the current stream; empty if it is communication."""
    part = ""

    def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        if number is None:
            FakeStream.count += 1
            number = FakeStream.count
        self.stream_id = self.cuda_stream = number
        self._previous = (0, "")

    def __enter__(self) -> Self:
        self._previous = FakeStream.current, FakeStream.current_part
        FakeStream.current, FakeStream.current_part = self.stream_id, self.part
        return self

    def __exit__(self, *_: object) -> None:
        FakeStream.current, FakeStream.current_part = self._previous

    def is_capturing(self) -> bool:
        """Return False: no graph is being captured."""
        return False

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Return an event that has already happened."""
        return event or FakeEvent()

    def wait_stream(self, *_: object) -> None:
        """Do nothing: there is nothing to wait for."""

    wait_event = synchronize = wait_stream


class FakeEvent:
    """Event that has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def elapsed_time(self, _: FakeEvent) -> float:
        """Return an arbitrary number of milliseconds."""
        return 1.0

    def record(self, *_: object) -> None:
        """Do nothing."""

    wait = synchronize = record


def _enter_stream(stream: FakeStream | None) -> Any:
    """Return the context of `with torch.cuda.stream(s):`, which accepts None as well."""
    return contextlib.nullcontext() if stream is None else stream


def install_fake_cuda(target: Device) -> None:
    """Make torch and torch.cuda answer as on the target GPU."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from trimtab.trace.fake_ops import disable_scripting

    config = torch._C._show_config()
    install_cuda_hooks()
    # torch would otherwise query its CUDA library.
    torch._C._show_config = _make_constant(config)
    limit_redraws()
    disable_scripting()
    # Fake tensors on the host cannot be pinned, and need not be.
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    for name, value in _list_answers(target).items():
        answer = _answer_if_visible(value, getattr(torch.cuda, name))
        setattr(torch.cuda, name, _note_use(answer) if name in SPECIAL_ANSWERS else answer)
    raw = {"getDeviceCount": 1, "getDevice": 0, "isCurrentStreamCapturing": False, "getCurrentRawStream": 0}
    quiet = "setDevice exchangeDevice maybeExchangeDevice"
    for name, value in (raw | dict.fromkeys(quiet.split(), 0)).items():
        # A build without CUDA has no such function, and no device.
        real = getattr(torch._C, f"_cuda_{name}", _make_constant(0))
        setattr(torch._C, f"_cuda_{name}", _answer_if_visible(value, real))
    for place in (torch.cuda, torch.accelerator):
        for name in ("current_stream", "default_stream"):
            setattr(place, name, lambda *_, **__: FakeStream(number=FakeStream.current))
    torch.cuda.Stream = FakeStream  # type: ignore[assignment,misc]
    torch.cuda.Event = FakeEvent  # type: ignore[assignment,misc]
    torch.cuda.stream = _enter_stream  # type: ignore[assignment]
    torch.cuda.set_stream = _make_constant(None)
    torch.cuda.amp.common.amp_definitely_not_available = _make_constant(value=False)
    torch.backends.cuda.is_built = _make_constant(value=True)
    real_version = torch.version.cuda
    torch.version.cuda = torch.version.cuda or "13.0"
    fake_version = torch.version.cuda

    def set_visible(visible: bool) -> bool:
        before, Visibility.is_visible = Visibility.is_visible, visible
        if visible != before:
            set_hooks_visible(visible)
            torch.version.cuda = fake_version if visible else real_version
        return before

    hide_cuda_at_import(set_visible)
    # On builds with CUDA it would initialise the real CUDA before the first fake tensor.
    torch._subclasses.fake_tensor.init_gpu_context = _make_constant(None)  # type: ignore[assignment]
    # Recurrent layers call cuDNN to arrange their weights.
    torch.nn.RNNBase.flatten_parameters = _make_constant(None)  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply_to_module  # type: ignore[method-assign]
    FakeTensor.__copy__ = _copy_tensor  # type: ignore[attr-defined]
    FakeTensor.__deepcopy__ = _deepcopy_tensor  # type: ignore[method-assign]
    # By default a deep copy of a tensor copies its mode, and with it torch's weak references to storages.
    # They are then freed twice, which corrupts the heap. So all copies share one mode.
    FakeTensorMode.__deepcopy__ = lambda mode, _: mode  # type: ignore[attr-defined]
    lift_constants_in_backward()
    FakeTensorMode.create_symbolic_nested_int = _make_ragged_length  # type: ignore[method-assign,assignment]


def _list_answers(target: Device) -> dict[str, Any]:
    """Return what each replaced function of torch.cuda answers."""
    numbers = parse_capability(target.compute_capability or "9.0") or (9, 0)
    free = target.free_bytes if target.free_bytes is not None else target.memory_bytes
    properties = FakeProperties(
        name=target.name,
        major=numbers[0],
        minor=numbers[1],
        total_memory=target.memory_bytes,
        multi_processor_count=target.multiprocessors or 1,
        L2_cache_size=_l2_cache_bytes(target, numbers),
    )
    silent = (
        "_lazy_init init set_device synchronize empty_cache reset_peak_memory_stats ipc_collect manual_seed "
        "manual_seed_all seed seed_all reset_max_memory_allocated set_per_process_memory_fraction"
    )
    return dict.fromkeys(silent.split()) | {
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
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }


def lift_constants_in_backward() -> None:
    """Let `torch.tensor(1.0, device="cuda")` work in the backward pass of a custom function.

    Such constants are made on the host by a switch of torch that each thread has for itself, and autograd
    runs backward passes in a thread of its own.
    """
    original = torch.autograd.function.BackwardCFunction.apply

    def apply(function: Any, *args: Any) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)
        return original(function, *args)

    torch.autograd.function.BackwardCFunction.apply = apply  # type: ignore[method-assign]


def _make_ragged_length(mode: Any, *, nt_tensor_id: int | None = None) -> Any:
    """Return the ragged dimension of a jagged tensor; torch's own method needs symbolic shapes."""
    from torch.nested._internal.nested_int import NestedIntNode

    if nt_tensor_id is None:
        nt_tensor_id = mode.nt_tensor_id_counter
        mode.nt_tensor_id_counter += 1
    return torch.SymInt(NestedIntNode(nt_tensor_id, 1))


def _copy_tensor(tensor: Any) -> Any:
    """Return another tensor with the same memory, as `copy.copy` does."""
    copied: Any = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _deepcopy_tensor(tensor: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a fake tensor. torch's own method sets storages, which fake tensors do not support."""
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


def _l2_cache_bytes(target: Device, numbers: tuple[int, int]) -> int:
    size = H200_CACHE_MIB if "H200" in target.name else CACHE_MIB.get(numbers, CACHE_MIB[9, 0])
    return size * MIB


class Visibility:
    """Whether the running code sees the fake device; packages that are being imported do not."""

    is_visible = True


def _answer_if_visible(value: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives the target's answer while the device is visible, else the real answer."""
    return lambda *args, **kwargs: value if Visibility.is_visible else real(*args, **kwargs)


def _note_use(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, noting at each call that what it answers differs between GPUs."""

    def answer_and_note(*args: Any, **kwargs: Any) -> Any:
        note_special_fact()
        return answer(*args, **kwargs)

    return answer_and_note


def _make_constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def hide_fake_tensors() -> None:
    """Hide fake tensors from libraries that run their models differently when they see them."""
    MODULE_PATCHES[CHECKING_MODULE] = hide_from_module
    library = sys.modules.get(CHECKING_MODULE)
    if library is not None:
        hide_from_module(library)


CHECKING_MODULE = "transformers.utils.import_utils"
"""It asks for fake tensors; models then make masks of attention that they would leave out."""


def hide_from_module(library: Any) -> None:
    """Let the module find no fake tensors; the function is one that the compiler follows."""
    library.is_fake_tensor = is_fake_tensor


def _apply_to_module(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Implement `Module.to`, `.half` and similar methods for fake parameters.

    torch replaces fake parameters by new objects, which fails if there is a weak reference to a parameter. On
    a GPU it gives the old parameter new memory, and this function does the same.
    """
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
