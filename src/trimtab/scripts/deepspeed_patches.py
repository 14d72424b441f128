"""Refuse DeepSpeed with what to use in its place: it has an engine, optimizers and kernels of its own."""

from __future__ import annotations

from typing import Any

from trimtab.errors import CannotFollow
from trimtab.scripts.observer import find_script_line
from trimtab.trace.fake_cuda import MODULE_PATCHES

PACKAGE = "deepspeed"


def patch_deepspeed() -> None:
    """Refuse DeepSpeed where a script uses it; a script may import it without using it."""
    MODULE_PATCHES[PACKAGE] = patch_calls


def patch_calls(module: Any) -> None:
    """Let the package's functions that make an engine or a model raise the refusal."""
    module.initialize = _refuse_call
    if hasattr(module, "zero"):
        # Trainers build their model under it before they make the engine.
        module.zero.Init = _refuse_call


def _refuse_call(*_: Any, **__: Any) -> Any:
    raise refuse_deepspeed(f" ({find_script_line()})")


def refuse_deepspeed(where: str) -> CannotFollow:
    """Return the error for a script that uses DeepSpeed."""
    return CannotFollow(
        f"DeepSpeed{where}",
        found="trimtab cannot follow DeepSpeed",
        cure="Leave DeepSpeed out to see what one GPU needs. To shard over several GPUs, use FSDP: "
        "--fsdp full_shard in place of --deepspeed for a Trainer of transformers, or accelerate launch "
        "--use_fsdp. A GPU then holds about what it holds with ZeRO-3.",
    )


def lacks_deepspeed(error: Exception) -> bool:
    """Return whether a library needs DeepSpeed, which is not installed; a bare import is not meant."""
    return isinstance(error, ImportError) and PACKAGE in str(error).lower() and error.name != PACKAGE
