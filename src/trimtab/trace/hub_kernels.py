"""Stand in for flash attention that the package `kernels` loads from the Hugging Face Hub.

Such a kernel needs a GPU to load, and often a download. A script that cannot load it mostly goes on with
slower attention, so that its estimate would be that of another program. Other kernels of the Hub are asked
for as the script does it; the estimate names those that could not be loaded. It also names the functions that
transformers runs as plain torch code, because a package with kernels for them is not installed.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from types import ModuleType
from typing import Any, NamedTuple

from trimtab.trace.block_masks import find_recorder
from trimtab.trace.fake_cuda import MODULE_PATCHES
from trimtab.trace.flash_attn_package import FUNCTIONS, attend

PACKAGE = "kernels"
FLASH_NAME = re.compile(r"flash[-_]?att(n|ention)[-_]?(?P<version>\d)?", re.IGNORECASE)
NOTE = (
    "the kernel {name} of the Hugging Face Hub was not loaded: it is taken to need the memory and the time "
    "of torch's flash attention{faster}"
)
FASTER = " (on Hopper, FlashAttention 3 is faster)"
MISSING_NOTE = "the kernel {name} of the Hugging Face Hub could not be loaded here ({error})"


LOADING_MODULE = "transformers.integrations.hub_kernels"
"""It warns of functions that run as plain torch code."""
PLAIN_CODE = re.compile(r"`(?P<name>\w+)` is falling back .* because `(?P<package>[\w.-]+)` is not installed")
PLAIN_NOTE = (
    "transformers runs {name} as plain torch code, because {package} is not installed here; where it is, a "
    "step takes less time and memory"
)


def stand_in_for_hub_kernels() -> None:
    """Let code that asks the Hub for flash attention have it, if the package `kernels` is installed."""
    for name, patch in ((PACKAGE, _patch_package), (LOADING_MODULE, _note_plain_code)):
        MODULE_PATCHES[name] = patch
        if name in sys.modules:
            patch(sys.modules[name])


def _note_plain_code(module: Any) -> None:
    """Note what the module warns of: functions that run without the kernels of a package."""
    logger: Any = getattr(module, "logger", None)
    warn = getattr(logger, "warning_once", None)
    if warn is None:
        return

    @functools.wraps(warn)
    def warn_and_note(text: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := PLAIN_CODE.search(str(text))) is not None:
            _note(PLAIN_NOTE.format(**found.groupdict()))
        return warn(text, *args, **kwargs)

    logger.warning_once = warn_and_note


def _patch_package(package: Any) -> None:
    for name, stand_in in (("get_kernel", _make_get_kernel), ("has_kernel", _make_has_kernel)):
        original = getattr(package, name, None)
        if original is not None:
            setattr(package, name, stand_in(original))


def _make_get_kernel(original: Any) -> Any:
    @functools.wraps(original)
    def get_kernel(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        found = FLASH_NAME.search(repo_id.rpartition("/")[2])
        if found is None:
            try:
                return original(repo_id, *args, **kwargs)
            except Exception as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                _note(MISSING_NOTE.format(name=repo_id, error=reason))
                raise
        _check_version(kwargs)
        is_third = found["version"] == "3"
        _note(NOTE.format(name=repo_id, faster=FASTER if is_third else ""))
        return _build_kernel(repo_id, is_third=is_third)

    return get_kernel


def _make_has_kernel(original: Any) -> Any:
    @functools.wraps(original)
    def has_kernel(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        is_flash = FLASH_NAME.search(repo_id.rpartition("/")[2]) is not None
        return is_flash or original(repo_id, *args, **kwargs)

    return has_kernel


def _check_version(given: dict[str, Any]) -> None:
    """Raise what the package raises if it wants a version and none is given."""
    try:
        check: Any = importlib.import_module(f"{PACKAGE}._versions").revision_or_version
    except (ImportError, AttributeError):
        return  # a release that takes the newest
    check(revision=given.get("revision"), version=given.get("version"))


def _note(text: str) -> None:
    if (recorder := find_recorder()) is not None:
        recorder.kernels.assume(text)


def _build_kernel(name: str, *, is_third: bool) -> ModuleType:
    """Return the stand-in as the module that the package would have loaded."""
    module = ModuleType(re.sub(r"\W", "_", name))
    functions = {**FUNCTIONS, **(THIRD_FUNCTIONS if is_third else {})}
    vars(module).update(functions)
    interface = ModuleType("flash_attn_interface")
    vars(interface).update(functions)
    module.flash_attn_interface = interface  # type: ignore[attr-defined]
    return module


class _AttentionCall(NamedTuple):
    """Where documents end, and how long they can be."""

    ends: tuple[Any, Any]
    longest: tuple[int, int]


def _attend(parts: tuple[Any, Any, Any], call: _AttentionCall, options: dict[str, Any]) -> Any:
    chosen = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1)}
    chosen |= {name: options[name] for name in chosen if name in options}
    out, sums, _ = attend(*parts, *call, chosen, probabilities=True)
    asks = options.get("return_attn_probs") or options.get("return_softmax_lse")
    return (out, sums) if asks else out


def _flash_attn_3_func(
    q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Any:
    call = _AttentionCall((None, None), (q.shape[1], k.shape[1]))
    return _attend((q, k, v), call, {"softmax_scale": softmax_scale, "causal": causal, **options})


def _flash_attn_3_varlen_func(q: Any, k: Any, v: Any, *ends_and_lengths: Any, **options: Any) -> Any:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = dict(zip(names, ends_and_lengths, strict=False)) | options
    ends, longest = (given[names[0]], given[names[1]]), (int(given[names[2]]), int(given[names[3]]))
    return _attend((q, k, v), _AttentionCall(ends, longest), options)


THIRD_FUNCTIONS = {
    "flash_attn_func": _flash_attn_3_func,
    "flash_attn_varlen_func": _flash_attn_3_varlen_func,
}
"""Functions of FlashAttention 3, which has no dropout."""
