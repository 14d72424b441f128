"""What a plan says and refuses where the loss of a batch is more than the mean over its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Reason
from trimtab.strategies import STRATEGIES, strategy_of
from trimtab.units import plural

if TYPE_CHECKING:
    from trimtab.spec import BatchLoss, Mesh, Setting, Strategy, Workload


def explain_refusal(workload: Workload, strategy: Strategy, mesh: Mesh) -> str:
    """Why a way to spread the job would change its training; empty where it would not."""
    if workload.cached and not STRATEGIES[strategy].runs_whole_model:
        return f"{strategy}: embed() and loss_of() need ranks that each run the whole model"
    if workload.is_indivisible and mesh.data_parallel > 1:
        return explain_single_rank(workload)
    return ""


def explain_single_rank(workload: Workload) -> str:
    """Why the batch is not shared out over ranks."""
    return f"several data-parallel GPUs: the batch cannot be cut, because {_indivisible_reason(workload)}"


def explain_uncut_batch(workload: Workload) -> str:
    """Why the batch is not cut into micro-batches."""
    return f"micro-batches below the global batch: the batch cannot be cut, because {_indivisible_reason(workload)}"


def _indivisible_reason(workload: Workload) -> str:
    return workload.batch_loss.why if workload.batch_loss is not None else "nobody knows"


def suggest_fix(workload: Workload) -> str:
    """What to do where the batch has to stay in one piece."""
    if workload.batch_loss is not None and workload.batch_loss.is_sum:
        return (
            "Return the mean over samples in loss(), or set additive = True on the job to accept the change."
        )
    return (
        "Give the job embed(model, batch) and loss_of(embeddings), which can be cut exactly; or leave out "
        "pins that cut the batch; or set additive = True on the job, to accept the change."
    )


def explain_batch_loss(workload: Workload, setting: Setting) -> tuple[Reason, ...]:
    """What a plan says of how the batch is cut, where there is something to say."""
    found = []
    is_cut = setting.accumulation > 1 or setting.data_parallel > 1
    known = workload.batch_loss
    if workload.cached:
        why = (
            "the job gives embed() and loss_of(): every micro-batch is embedded twice, and the loss is that "
            "of the whole global batch"
            if is_cut
            else "the job gives embed() and loss_of(), and the batch is in one piece: one pass is enough"
        )
        found.append(Reason(subject="loss", value="gradient caching" if is_cut else "whole batch", why=why))
    elif known is not None and known.additive is False:
        why = f"{known.why}. {suggest_fix(workload)}"
        found.append(Reason(subject="loss", value="whole batch", why=why))
    elif known is not None and not known.stated and is_cut and known.additive is None:
        why = f"not checked on a small batch: {known.why}" if known.why else "not checked on a small batch"
        found.append(Reason(subject="loss", value="assumed additive", why=why))
    elif known is not None and known.is_near and is_cut:
        found.append(Reason(subject="loss", value="nearly additive", why=known.why))
    return (*found, *_explain_batchnorm(workload, setting))


def _explain_batchnorm(workload: Workload, setting: Setting) -> tuple[Reason, ...]:
    """What BatchNorm sees of the global batch."""
    known = workload.batch_loss
    if setting.sync_batchnorm and (known is None or not known.batch_norms):
        value, why = "yes", "pinned; whether the model has BatchNorm layers was not looked up"
        if known is not None and known.additive is not None:
            value, why = "no effect", "pinned, and the model has no BatchNorm layer"
        return (Reason(subject="sync_batchnorm", value=value, why=why),)
    if known is None or not known.batch_norms:
        return ()
    layers, whole = _format_layers(known), setting.global_batch
    sees = count_batchnorm_samples(setting)
    ranks = setting.data_parallel
    if sees >= whole and not (setting.sync_batchnorm and ranks > 1):
        return ()
    over = f"the {sees} samples of a micro-batch"
    if setting.sync_batchnorm and ranks > 1:
        over = f"the {sees} samples of one micro-batch of all {ranks} ranks together (sync_batchnorm)"
    why = f"{layers} compute{'s' * (known.batch_norms == 1)} statistics over {over}"
    if sees >= whole:
        why += ": the whole global batch, as in one piece"
    else:
        why += (
            f", not over the global batch of {whole}: another training than in one piece. A larger "
            "micro-batch, GroupNorm or LayerNorm avoid it"
        )
    can_synchronise = not strategy_of(setting).why_not_synchronised
    if sees < whole and not setting.sync_batchnorm and ranks > 1 and can_synchronise:
        more = count_batchnorm_samples(setting.replace(sync_batchnorm=True))
        why += f"; --pin sync_batchnorm=true computes them over all {ranks} ranks together, {more} samples"
    return (Reason(subject="batchnorm", value=f"sees {sees} samples", why=why),)


def count_batchnorm_samples(setting: Setting) -> int:
    """How many samples BatchNorm computes its statistics over: of one rank, or of all where synchronised."""
    if not setting.sync_batchnorm:
        return setting.micro_batch
    every = sum(share.micro_batch for share in setting.shares) or setting.micro_batch * setting.data_parallel
    return min(every, setting.global_batch)


def _format_layers(known: BatchLoss) -> str:
    return plural(known.batch_norms, "BatchNorm layer")


def list_warnings(known: BatchLoss, setting: Setting) -> tuple[str, ...]:
    """What an estimate says of a micro-batch that is less than the job's global batch."""
    whole, micro_batch, gpus = known.global_batch or 0, setting.micro_batch, setting.gpus
    found = []
    if setting.sync_batchnorm and not known.batch_norms and known.additive is not None:
        found.append("sync_batchnorm has no effect: the model has no BatchNorm layer")
    if micro_batch >= whole and gpus == 1:
        return tuple(found)
    if known.additive is False:
        found.append(
            f"the global batch of {whole} cannot be cut: {known.why}; use micro-batch {whole} on one GPU"
        )
    elif known.is_near:
        found.append(known.why)
    if not known.batch_norms:
        return tuple(found)
    if setting.sync_batchnorm and gpus > 1:
        sees = min(micro_batch * setting.data_parallel, whole)
        among = f"the {sees} samples of one micro-batch of all {setting.data_parallel} GPUs together"
        rest = "" if sees >= whole else f", not the global batch of {whole}"
        found.append(f"{_format_layers(known)} see{'s' * (known.batch_norms == 1)} {among}{rest}")
        return tuple(found)
    said = f"{_format_layers(known)} see the {micro_batch} samples of a micro-batch, not the global batch of {whole}"
    if setting.data_parallel > 1 and not strategy_of(setting).why_not_synchronised:
        said += f"; --sync-batchnorm lets them see those of all {setting.data_parallel} GPUs"
    found.append(said)
    return tuple(found)
