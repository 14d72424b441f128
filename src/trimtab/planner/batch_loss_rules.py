"""Planning rules for jobs whose batch cannot be split freely.

A loss may not be the mean over its samples, and BatchNorm computes statistics over one micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Reason
from trimtab.strategies import STRATEGIES, strategy_of
from trimtab.units import plural

if TYPE_CHECKING:
    from trimtab.spec import BatchLoss, Mesh, Setting, Strategy, Workload


def explain_refusal(workload: Workload, strategy: Strategy, mesh: Mesh) -> str:
    """Return why a strategy and mesh would change the training; an empty string if they do not."""
    if workload.cached and not STRATEGIES[strategy].runs_whole_model:
        return f"{strategy}: embed() and loss_of() need ranks that each run the whole model"
    if workload.whole_model and not STRATEGIES[strategy].runs_whole_model:
        members = " and ".join(workload.whole_model)
        return f"{strategy}: a rank would hold only a part of the model, and the job has {members}"
    if workload.is_indivisible and mesh.data_parallel > 1:
        return explain_single_rank(workload)
    return ""


def explain_single_rank(workload: Workload) -> str:
    """Return why the batch is not divided over ranks."""
    return f"several data-parallel GPUs: the batch cannot be cut, because {_indivisible_reason(workload)}"


def explain_uncut_batch(workload: Workload) -> str:
    """Return why the batch is not split into micro-batches."""
    why = _indivisible_reason(workload)
    return f"micro-batches below the global batch: the batch cannot be cut, because {why}"


def _indivisible_reason(workload: Workload) -> str:
    return workload.batch_loss.why if workload.batch_loss is not None else "the reason is unknown"


def suggest_fix(workload: Workload) -> str:
    """Return what the user can do if the batch cannot be split."""
    if workload.batch_loss is not None and workload.batch_loss.is_sum:
        return (
            "Return the mean over samples in loss(), or set additive = True on the job to accept the change."
        )
    return (
        "Give the job embed(model, batch) and loss_of(embeddings), which can be cut exactly; or leave out "
        "pins that cut the batch; or set additive = True on the job, to accept the change."
    )


def explain_batch_loss(workload: Workload, setting: Setting) -> tuple[Reason, ...]:
    """Return the reasons of a plan about the loss and BatchNorm; empty if splitting changes nothing."""
    reasons = []
    is_split = setting.accumulation > 1 or setting.data_parallel > 1
    loss = workload.batch_loss
    if workload.cached:
        why = (
            "the job gives embed() and loss_of(): every micro-batch is embedded twice, and the loss is that "
            "of the whole global batch"
            if is_split
            else "the job gives embed() and loss_of(), and the batch is in one piece: one pass is enough"
        )
        reasons.append(
            Reason(subject="loss", value="gradient caching" if is_split else "whole batch", why=why)
        )
    elif loss is not None and loss.additive is False:
        why = f"{loss.why}. {suggest_fix(workload)}"
        reasons.append(Reason(subject="loss", value="whole batch", why=why))
    elif loss is not None and not loss.stated and is_split and loss.additive is None:
        why = f"not checked on a small batch: {loss.why}" if loss.why else "not checked on a small batch"
        reasons.append(Reason(subject="loss", value="assumed additive", why=why))
    elif loss is not None and loss.is_near and is_split:
        reasons.append(Reason(subject="loss", value="nearly additive", why=loss.why))
    return (*reasons, *_explain_batchnorm(workload, setting))


def _explain_batchnorm(workload: Workload, setting: Setting) -> tuple[Reason, ...]:
    """Return the reason about BatchNorm statistics; empty if they cover the global batch."""
    loss = workload.batch_loss
    if setting.sync_batchnorm and (loss is None or not loss.batch_norms):
        value, why = "yes", "pinned; whether the model has BatchNorm layers was not looked up"
        if loss is not None and loss.additive is not None:
            value, why = "no effect", "pinned, and the model has no BatchNorm layer"
        return (Reason(subject="sync_batchnorm", value=value, why=why),)
    if loss is None or not loss.batch_norms:
        return ()
    layers, global_batch = _format_layers(loss), setting.global_batch
    sees = count_batchnorm_samples(setting)
    ranks = setting.data_parallel
    if sees >= global_batch and not (setting.sync_batchnorm and ranks > 1):
        return ()
    over = f"the {sees} samples of a micro-batch"
    if setting.sync_batchnorm and ranks > 1:
        over = f"the {sees} samples of one micro-batch of all {ranks} ranks together (sync_batchnorm)"
    why = f"{layers} compute{'s' * (loss.batch_norms == 1)} statistics over {over}"
    if sees >= global_batch:
        why += ": the whole global batch, as in one piece"
    else:
        why += (
            f", not over the global batch of {global_batch}: another training than in one piece. A larger "
            "micro-batch, GroupNorm or LayerNorm avoid it"
        )
    can_synchronise = not strategy_of(setting).why_not_synchronised
    if sees < global_batch and not setting.sync_batchnorm and ranks > 1 and can_synchronise:
        more = count_batchnorm_samples(setting.replace(sync_batchnorm=True))
        why += f"; --pin sync_batchnorm=true computes them over all {ranks} ranks together, {more} samples"
    return (Reason(subject="batchnorm", value=f"sees {sees} samples", why=why),)


def count_batchnorm_samples(setting: Setting) -> int:
    """Return how many samples a BatchNorm statistic covers: of one rank, or of all if synchronised."""
    if not setting.sync_batchnorm:
        return setting.micro_batch
    every = sum(share.micro_batch for share in setting.shares) or setting.micro_batch * setting.data_parallel
    return min(every, setting.global_batch)


def _format_layers(loss: BatchLoss) -> str:
    return plural(loss.batch_norms, "BatchNorm layer")


def list_warnings(loss: BatchLoss, setting: Setting) -> tuple[str, ...]:
    """Return the warnings of an estimate whose micro-batch is smaller than the job's global batch."""
    global_batch, micro_batch, gpus = loss.global_batch or 0, setting.micro_batch, setting.gpus
    warnings = []
    if setting.sync_batchnorm and not loss.batch_norms and loss.additive is not None:
        warnings.append("sync_batchnorm has no effect: the model has no BatchNorm layer")
    if micro_batch >= global_batch and gpus == 1:
        return tuple(warnings)
    if loss.additive is False:
        warnings.append(
            f"the global batch of {global_batch} cannot be cut: {loss.why}; "
            f"use micro-batch {global_batch} on one GPU"
        )
    elif loss.is_near:
        warnings.append(loss.why)
    if not loss.batch_norms:
        return tuple(warnings)
    if setting.sync_batchnorm and gpus > 1:
        sees = min(micro_batch * setting.data_parallel, global_batch)
        among = f"the {sees} samples of one micro-batch of all {setting.data_parallel} GPUs together"
        rest = "" if sees >= global_batch else f", not the global batch of {global_batch}"
        warnings.append(f"{_format_layers(loss)} see{'s' * (loss.batch_norms == 1)} {among}{rest}")
        return tuple(warnings)
    layers = _format_layers(loss)
    warning = (
        f"{layers} see the {micro_batch} samples of a micro-batch, not the global batch of {global_batch}"
    )
    if setting.data_parallel > 1 and not strategy_of(setting).why_not_synchronised:
        warning += f"; --sync-batchnorm lets them see those of all {setting.data_parallel} GPUs"
    warnings.append(warning)
    return tuple(warnings)
