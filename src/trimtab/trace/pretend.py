"""Makes torch, in this process, believe in a CUDA device that is not there.

Covers what stands between fake tensors and CUDA in torch's C++ half: the device guard and the hooks that
say whether CUDA exists. With them in place autograd, autocast, optimizers and every `is_cuda` take the same
way as on a GPU, on a build without CUDA too; no kernel ever runs, because FakeTensorMode answers before one
is chosen. Does not cover `torch.cuda`, whose Python half `trimtab.trace.imitate` replaces.

It works by writing two tables of function pointers. A guard whose every function returns the constant 1
reads, by the ABI's rules for small structs, as "device type 1 (CUDA), index 0, default stream", so one
function serves all of them whatever their order. The hooks are copied, and the answers that matter are
replaced by name; `show_cuda` puts the real ones back for a while. Only for a child process that does nothing
else.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import struct
from pathlib import Path
from typing import Any

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


def _install_guard(library: ctypes.CDLL, one: int) -> None:
    registry = (ctypes.c_void_p * (CUDA_DEVICE_TYPE + 1)).in_dll(library, _REGISTRY)
    vtable = (ctypes.c_void_p * _MOST_SLOTS)(*([one] * _MOST_SLOTS))
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
