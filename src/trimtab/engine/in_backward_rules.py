"""With which settings each weight can be updated in the backward pass."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.jobs.job import has_embeddings
from trimtab.spec import Offload
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Refusal

if TYPE_CHECKING:
    from trimtab.spec import Setting

OPTION = "--optimizer-in-backward"
LEAVE_OUT = f"Leave {OPTION} out"
NOT_COMPILED = "compiled code returns the gradients of the whole graph at once, so that nothing is saved"
NOT_ACCUMULATED = (
    "gradients of several micro-batches are added up, so that all of them exist until the last one"
)
NOT_SCALED = "fp16 checks all gradients for overflow before any weight is updated"
NOT_SPREAD = "ranks exchange gradients in buckets or shards, which trimtab does not update one by one"
NOT_CLIPPED = "clipping needs the norm of all gradients before any weight is updated"
NOT_CACHED = "gradient caching of embed() and loss_of() adds up the gradients of several passes"
NOT_OFFLOADED = "the optimizer would run on the CPU, on copies of the weights"


def find_in_backward_refusal(setting: Setting) -> Refusal | None:
    """Return why a setting cannot update weights in the backward pass; None if it can or does not ask to."""
    if not setting.optimizer_in_backward:
        return None
    whole = f"a micro-batch as large as the global batch {setting.global_batch}"
    rules = (
        (setting.gpus > 1 or strategy_of(setting).is_sharded, NOT_SPREAD, "use one GPU"),
        (setting.accumulation > 1, NOT_ACCUMULATED, f"use {whole}"),
        (setting.dtypes.scales_loss, NOT_SCALED, "use precision bf16, bf16-true, tf32 or fp32"),
        (setting.compile, NOT_COMPILED, "do not compile"),
        ({Offload.PARAMS, Offload.OPTIMIZER} & {*setting.offload}, NOT_OFFLOADED, "offload activations only"),
    )
    return next((Refusal(why, f"{LEAVE_OUT}, or {cure}.") for is_so, why, cure in rules if is_so), None)


def refuse_in_backward(setting: Setting, job: Any = None, clip: float | None = None) -> None:
    """Raise if a setting asks for updates in the backward pass that its job or itself does not allow.

    `clip` is the norm to which gradients are clipped, beside that of the job's own attribute.
    """
    if not setting.optimizer_in_backward:
        return
    refusal = find_in_backward_refusal(setting)
    if refusal is not None:
        raise WrongUse(f"{OPTION} with {_describe(setting)}", found=refusal.found, cure=refusal.cure)
    own = getattr(job, "clip", None)
    norm, where, cure = own, "the job's clip", "use --set clip=inf"
    if clip is not None:
        norm, where, cure = clip, "--clip", "leave --clip out"
    # No norm is above infinity.
    if norm is not None and norm < inf:
        raise WrongUse(
            f"{OPTION} with gradients clipped to {norm:g} ({where})",
            found=NOT_CLIPPED,
            cure=f"{LEAVE_OUT}, or train without clipping: {cure}.",
        )
    if has_embeddings(job):
        given = f"{OPTION} for a job with embed() and loss_of()"
        raise WrongUse(given, found=NOT_CACHED, cure=f"{LEAVE_OUT}.")


def _describe(setting: Setting) -> str:
    """Return what of a setting may be in the way, in a few words."""
    words = [f"strategy {setting.strategy}", f"micro-batch {setting.micro_batch} x {setting.accumulation}"]
    words += [f"precision {setting.precision}", "compile" * setting.compile]
    words += [f"offload {','.join(setting.offload)}"] * bool(setting.offload)
    return ", ".join(word for word in words if word)
