"""What the CPU of this machine can compute in half precision."""

from __future__ import annotations

import warnings

import torch

NO_BF16 = "this CPU has no bf16 matrix products"
WARNING = "mkldnn_matmul failed, switching to BLAS"
"""How torch's own warning about it begins; it prints a stack trace of C++ with it."""


def has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 matrices in hardware, as torch sees it."""
    question = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    # A torch without oneDNN does not say; it has kernels of its own and does not warn.
    return question is None or bool(question())


def trains_on_slow_cpu() -> bool:
    """Return whether jobs can only run on this CPU, and it has no bf16 matrix products."""
    return not torch.cuda.is_available() and not has_bf16()


def silence_bf16_warning() -> None:
    """Keep torch from warning at the first bf16 matrix product; whoever calls this says it in words."""
    warnings.filterwarnings("ignore", message=WARNING)
