"""Stand in for the package flash_attn where it is not installed, as on a machine without a GPU.

Its functions call the flash kernel of torch, which is the same kernel: it saves queries, keys, values, the
result and the log of the softmax's sums, and costs the squares of the lengths of documents. Code of the job
that imports the package gets the stand-in, and so does transformers where a model asks for
`flash_attention_2`. Other libraries do not see it: many have another way if the package is missing.
"""

from __future__ import annotations

# ruff: noqa: ARG001, ARG002, PLR0913, PLR0917 - the functions have the arguments of the package
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from trimtab.jobs.library_files import is_library_file
from trimtab.trace.block_masks import find_recorder
from trimtab.trace.fake_cuda import MODULE_PATCHES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

PACKAGE = "flash_attn"
VERSION = "2.8.3"
"""The release whose functions are here."""
HALF_DTYPES = (torch.float16, torch.bfloat16)
NOTE = (
    "the package flash_attn is not installed here: its kernels are taken to cost what torch's flash kernels "
    "cost. Training needs the package"
)
SWITCH = "_check_and_adjust_attn_implementation"
"""Method of a model of transformers that finds the kernels of the attention it is asked for."""


def stand_in_for_flash_attn() -> None:
    """Let the job import flash_attn, unless it is installed."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return
    finder = FlashAttnFinder()
    sys.meta_path.append(finder)
    library = "transformers.modeling_utils"
    patch = functools.partial(_patch_transformers, finder=finder)
    MODULE_PATCHES[library] = patch
    if library in sys.modules:
        patch(sys.modules[library])


class FlashAttnFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of the stand-in."""

    def __init__(self) -> None:
        self.for_libraries = False
        """Whether installed packages see the stand-in too."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module, if the importer may see it."""
        if fullname not in MODULES or not (self.for_libraries or _is_asked_by_job()):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == PACKAGE)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Take Python's own empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        vars(module).update(MODULES[module.__name__], __version__=VERSION)


def _is_asked_by_job() -> bool:
    """Whether code of the job runs the import, instead of an installed package."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not is_library_file(frame.f_code.co_filename)


def _patch_transformers(library: Any, finder: FlashAttnFinder) -> None:
    """Show the stand-in to transformers when a model asks for flash attention."""
    find_kernels = getattr(library.PreTrainedModel, SWITCH, None)
    if find_kernels is None:
        return

    @functools.wraps(find_kernels)
    def check(model: Any, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation is not None and implementation.endswith("flash_attention_2"):
            finder.for_libraries = True
            checks = importlib.import_module("transformers.utils.import_utils")
            checks.PACKAGE_DISTRIBUTION_MAPPING[PACKAGE] = ["flash-attn"]
            for name in ("is_flash_attn_2_available", "is_flash_attn_greater_or_equal"):
                forget = getattr(getattr(checks, name, None), "cache_clear", None)
                if forget is not None:
                    forget()
        return find_kernels(model, implementation, *args, **kwargs)

    setattr(library.PreTrainedModel, SWITCH, check)


def attend(
    query: Any, key: Any, value: Any, ends: Any, longest: Any, options: dict[str, Any], *, probabilities: bool
) -> Any:
    """Return attention by torch's flash kernel; with `probabilities` also the log of the softmax's sums."""
    if query.dtype not in HALF_DTYPES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    size = query.shape[-1]
    # As the package: heads are multiples of 8.
    query, key, value = (
        functional.pad(part, [0, -size % 8]) if size % 8 else part for part in (query, key, value)
    )
    left, right = options["window_size"]
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        *(part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value)),
        *ends,
        *longest,
        options["dropout_p"],
        options["causal"],
        False,
        scale=options["softmax_scale"] if options["softmax_scale"] is not None else size**-0.5,
        window_size_left=None if left < 0 else left,
        window_size_right=None if right < 0 else right,
    )
    out = out[..., :size]
    return (out, sums, None) if probabilities else out


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of rows: batch, tokens, heads, size."""
    options = {
        "dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size
    }  # fmt: skip
    longest = q.shape[1], k.shape[1]
    return attend(q, k, v, (None, None), longest, options, probabilities=return_attn_probs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Return attention within documents of one row: tokens, heads, size."""
    options = {
        "dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size
    }  # fmt: skip
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (int(max_seqlen_q), int(max_seqlen_k))
    return attend(q, k, v, ends, longest, options, probabilities=return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **kwargs: Any) -> Any:
    """Return attention of rows of queries, keys and values in one tensor."""
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
    """Return attention of rows of queries, and keys and values in one tensor."""
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return attention within documents of queries, keys and values in one tensor."""
    query, key, value = qkv.unbind(1)
    ends, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
    return flash_attn_varlen_func(query, key, value, *ends, *longest, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
    """Return attention within documents of queries, and keys and values in one tensor."""
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **kwargs)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    """Refuse: generation is no training."""
    raise NotImplementedError("trimtab stands in for the training functions of flash_attn only")


def index_first_axis(values: Any, indices: Any) -> Any:
    """Return some rows of a tensor."""
    return values[indices]


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """Return a tensor of zeros with some rows set."""
    rows = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return rows.index_put((indices,), values)


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    """Return the tokens that a mask leaves, their places, the ends of the documents and the longest."""
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    ends = functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), places), places, ends, lengths.max().item(), used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Return tokens in rows again."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


FUNCTIONS = {
    function.__name__: function
    for function in (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_qkvpacked_func,
        flash_attn_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_with_kvcache,
    )
}
PADDING_FUNCTIONS = {
    function.__name__: function
    for function in (index_first_axis, index_put_first_axis, unpad_input, pad_input)
}


def _with_note(function: Any) -> Any:
    """Return a function of the package that tells the user that it is a stand-in."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (recorder := find_recorder()) is not None:
            recorder.kernels.assume(NOTE)
        return function(*args, **kwargs)

    return run


NOTED_FUNCTIONS = {name: _with_note(function) for name, function in FUNCTIONS.items()}
MODULES: dict[str, dict[str, Any]] = {
    PACKAGE: NOTED_FUNCTIONS,
    f"{PACKAGE}.flash_attn_interface": NOTED_FUNCTIONS,
    f"{PACKAGE}.bert_padding": PADDING_FUNCTIONS,
}
"""The modules that there are a stand-in for, with their contents."""
