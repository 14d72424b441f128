"""Choose the batch of a decoder if nobody named one: as many tokens a step as in published recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import WrongUse
from trimtab.jobs.decoder_shape import read_decoder_shape
from trimtab.jobs.registry import FOLDER
from trimtab.spec import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.spec import Cluster

TOKENS = 4_194_304
"""Tokens of a step, as in the recipes of Llama 3 70B (512 x 8,192) and Mixtral 8x7B (1,024 x 4,096)."""
TOKENS_PER_GPU = 16_384
"""Least tokens of a step for each GPU: more than 256 GPUs get more than `TOKENS`."""
MOST_TOKENS = 16_777_216
"""Tokens of a step of Llama 3 405B (2,048 x 8,192), on 16,384 GPUs."""
SEQUENCE = 4096
"""Tokens of a sequence, or the longest of the model."""
LARGE = 20e9
"""Weights of a model that nobody trains in steps of 64 short samples."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Endings of architectures that predict the next token."""


class AssumedBatch(NamedTuple):
    """Options and workload of a job with what was assumed."""

    options: dict[str, Any]
    given: dict[str, int | None]
    reasons: tuple[Reason, ...] = ()


def find_usual_batch(sequence: int, gpus: int) -> int:
    """Return the sequences of a step.

    They divide by the GPUs, or by half of them, a quarter and so on, so that data-parallel ranks get equally
    many.

    >>> find_usual_batch(8192, 256), find_usual_batch(8192, 2048), find_usual_batch(8192, 10240)
    (512, 2048, 2560)
    """
    tokens = min(MOST_TOKENS, max(TOKENS, TOKENS_PER_GPU * gpus))
    batch, unit = max(1, tokens // sequence), gpus
    while unit > batch and unit % 2 == 0:
        unit //= 2
    return max(1, round(batch / unit)) * unit if unit <= batch else batch


def assume_batch(
    job: str, options: dict[str, Any], given: Mapping[str, int | None], cluster: Cluster
) -> AssumedBatch:
    """Return sequence and global batch of a large decoder or of several nodes; what is named stays."""
    plain = AssumedBatch(options, dict(given))
    if given.get("global_batch") or not {"seq"}.issuperset(options) or not _is_causal(job):
        return plain
    try:
        shape, longest = read_decoder_shape(job)
    except WrongUse:
        return plain
    gpus = len(cluster.devices)
    if gpus == 1 or (len(cluster.nodes) == 1 and shape.parameters < LARGE):
        return plain
    sequence = options.get("seq") or min(SEQUENCE, longest or SEQUENCE)
    batch = find_usual_batch(sequence, gpus)
    millions = sequence * batch / 1e6
    yours = "--global-batch" if "seq" in options else "--seq and --global-batch"
    reason = Reason(
        subject="global_batch",
        value=str(batch),
        why=f"assumed: {batch:,} sequences of {sequence:,} tokens, {millions:.3g} million a step, as in "
        f"published recipes; state yours with {yours}",
    )
    return AssumedBatch({**options, "seq": sequence}, {**given, "global_batch": batch}, (reason,))


def _is_causal(job: str) -> bool:
    """Whether the folder of a job hf:FOLDER has a model that predicts the next token."""
    if not job.startswith(FOLDER):
        return False
    try:
        config = json.loads((Path(job.removeprefix(FOLDER)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    named = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(named, list) and bool(named) and str(named[0]).endswith(CAUSAL)
