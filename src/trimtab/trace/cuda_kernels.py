"""Follow kernels in CUDA C++ that code compiles itself with torch.cuda._compile_kernel, and run nothing.

torch compiles them with NVRTC, which needs the toolkit of CUDA, and loads them with the driver. Here a launch
allocates nothing, and its time follows from its tensors: it reads those that its source declares `const`, and
reads and writes all others.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from trimtab.trace.triton_kernels import is_on_gpu, record_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.trace.recorder import Recorder

LAUNCH_NOTE = (
    "time: CUDA kernels that the code compiles itself are counted by the tensors that they read and write"
)
SMALL_MEMORY = 48 * 1024
"""Bytes of shared memory that a kernel may use without asking for more."""


def patch_cuda_kernels(find_recorder: Callable[[], Recorder | None]) -> None:
    """Record launches of kernels that are compiled from now on.

    `find_recorder` returns the recorder of the running trace; without one, a launch does nothing.
    """

    def compile_kernel(kernel_source: str, kernel_name: str, *_: Any, **__: Any) -> CudaKernel:
        return CudaKernel(kernel_source, kernel_name, find_recorder)

    torch.cuda._compile_kernel = compile_kernel


class CudaKernel:
    """A kernel that is not run: a launch is recorded."""

    def __init__(self, source: str, name: str, find_recorder: Callable[[], Recorder | None]) -> None:
        self.name = name
        self._is_constant = find_constants(source, name)
        self._find_recorder = find_recorder
        self._shared_bytes = SMALL_MEMORY

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Allow launches with so much shared memory."""
        self._shared_bytes = max(self._shared_bytes, shared_mem_bytes)

    def __call__(
        self,
        grid: Any = (1, 1, 1),
        block: Any = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        """Record a launch."""
        del grid, block, stream
        if shared_mem > self._shared_bytes:
            raise RuntimeError(
                f"Kernel requires {shared_mem} bytes of shared memory, but set_shared_memory_config allows "
                f"{self._shared_bytes}"
            )
        recorder = self._find_recorder()
        if recorder is None or recorder.paused:
            return
        given = list(args or ())
        # A macro in the source can hide parameters: then every tensor counts as written too.
        constants = self._is_constant if len(given) == len(self._is_constant) else [False] * len(given)
        written = [
            value
            for value, is_constant in zip(given, constants, strict=True)
            if is_on_gpu(value) and not is_constant
        ]
        recorder.kernels.assume(LAUNCH_NOTE)
        record_kernel(recorder, f"cuda::{self.name}", list(filter(is_on_gpu, given)), written)


def find_constants(source: str, name: str) -> list[bool]:
    """Return for each parameter of a kernel whether it is read only: a number, or a pointer to `const`.

    >>> find_constants('__global__ void add(const float* a, float* b, int n) {}', "add")
    [True, False, True]
    """
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(name)}\s*\(([^)]*)\)", source)
    if found is None:
        return []
    parameters = [text.strip() for text in found[1].split(",") if text.strip()]
    return ["*" not in text or bool(re.search(r"\bconst\b[^*]*\*", text)) for text in parameters]
