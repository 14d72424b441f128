"""Finds out whether a job's loss is additive over samples: on a small real batch, in a child process.

The job's model is built on the CPU, in float64 where it can be. A model that is too large keeps one block of
each list of repeated blocks, and its sequences are cut short where the job has an option `seq`. What is still
too large, takes too long or fails is unknown, and says so.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.cache import BATCH_LOSSES
from trimtab.errors import TrimtabError
from trimtab.jobs.job import is_cached, loss_function, stated_additive
from trimtab.jobs.load import load
from trimtab.spec import BatchLoss
from trimtab.spec.base import Noun
from trimtab.trace.job_summary import Named, named_key
from trimtab.trace.server import Say, ask_all, serve

if TYPE_CHECKING:
    from torch import nn

TIMEOUT_S = 40.0
MOST_PARAMETERS = 60_000_000
"""Of the model that is really run: twice its size in float64 for gradients is 1 GiB."""
SHORT = 64
"""Positions of a sample, for jobs that have an option `seq`."""
UNTOUCHED = 2**20
"""Tensors with more elements are not filled while a large model is built: most of them are cut off again."""


class LossQuery(Noun, frozen=True, kw_only=True):
    """A job, and whether only its layers are looked at."""

    job: str
    overrides: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    layers_only: bool = False


def batch_loss(job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True) -> BatchLoss:
    """Return whether the loss of a job is additive over samples, cached while its source is unchanged."""
    named = Named(job=job, overrides=overrides or {})
    key = named_key(named)
    cached = BATCH_LOSSES.load(key, BatchLoss.from_json) if cache else None
    if cached is not None:
        return cached
    found = _asked(named)
    BATCH_LOSSES.store(key, found.to_json())
    return found


def _asked(named: Named) -> BatchLoss:
    look = LossQuery(job=named.job, overrides=named.overrides)
    found = _answer(look)
    if not isinstance(found, TrimtabError):
        return found
    # What took too long was the small batch; the layers are counted without memory.
    layers = _answer(look.replace(layers_only=True))
    known = BatchLoss() if isinstance(layers, TrimtabError) else layers
    return known.replace(why=_short(found))


def _answer(look: LossQuery) -> BatchLoss | TrimtabError:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    try:
        (answer,) = ask_all("trimtab.trace.loss_check", look, env, timeout_s=TIMEOUT_S, watch=True)
    except TrimtabError as error:
        return error
    return answer if isinstance(answer, TrimtabError) else BatchLoss.from_builtins(answer)


def _short(error: TrimtabError) -> str:
    return error.found.replace("its first steps took", "the check took").replace("while it was traced", "")


def looked_at(job: Any) -> BatchLoss:
    """The verdict on a job, in this process: what it says itself, or what a small batch shows."""
    if is_cached(job):
        return BatchLoss(additive=True, stated=True, why="embed() and loss_of() cut the batch exactly")
    stated = stated_additive(job)
    if stated is not None:
        return BatchLoss(additive=stated, stated=True, why=f"the job says additive = {stated}")
    return found_out(job)


def found_out(job: Any) -> BatchLoss:
    """The same by a small batch, whatever the job says."""
    from trimtab.engine.additive_loss import SAMPLES

    samples = min(SAMPLES, max(1, int(getattr(job, "global_batch", SAMPLES) or SAMPLES)))
    if samples == 1:
        return BatchLoss(additive=True, why="a step has one sample")
    if isinstance(getattr(job, "seq", None), int) and job.seq > SHORT:
        job.seq = SHORT
    model, why = _built(job)
    if model is None:
        return BatchLoss(why=why)
    return _judged(job, model, samples)


def _judged(job: Any, model: nn.Module, samples: int) -> BatchLoss:
    """By float64; by float32 where the job does not compute in float64."""
    import torch

    from trimtab.engine.additive_loss import ROUNDING, LossComparison, in_double, judge
    from trimtab.jobs.job import Job

    own = getattr(type(job), "weight", None)
    question = LossComparison(
        model=model,
        loss=loss_function(job),
        weight=None if own in (None, Job.weight) else job.weight,
    )
    torch.manual_seed(0)
    batch = job.batch(samples)
    try:
        model.double()
        return judge(question, in_double(batch), samples, gradients=True, rounding=ROUNDING[torch.float64])
    except Exception:  # noqa: BLE001 - a job may insist on float32
        model.float()
        return judge(question, batch, samples, gradients=True, rounding=ROUNDING[torch.float32])


def _built(job: Any) -> tuple[nn.Module | None, str]:
    """The job's model on the CPU, or why there is none; a large one with one block of each list."""
    import torch

    count = _counted(job)
    torch.manual_seed(0)
    if count is not None and count > MOST_PARAMETERS:
        model = _cut_down(job)
        left = sum(parameter.numel() for parameter in model.parameters())
        if left > MOST_PARAMETERS:
            return None, f"the model has {count / 1e6:,.0f} million parameters, too many to run on the CPU"
        _fill(model)
    else:
        model = job.model()
    return model.train(), ""


def _counted(job: Any) -> int | None:
    """Parameters of the model, counted without memory; None where it cannot be built so."""
    import torch

    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in job.model().parameters())
    except Exception:  # noqa: BLE001 - the real build will tell
        return None


def _layers(job: Any) -> int:
    """BatchNorm layers of the model, counted without memory; 0 where it cannot be built so."""
    import torch

    from trimtab.engine.additive_loss import batch_norms

    try:
        with torch.device("meta"):
            return len(batch_norms(job.model()))
    except Exception:  # noqa: BLE001 - as above
        return 0


def _cut_down(job: Any) -> nn.Module:
    """The model with the first block of every list of repeated blocks; large tensors are not filled."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from trimtab.engine.build import repeated_blocks

    class Unfilled(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name.endswith("_") and args and getattr(args[0], "numel", lambda: 0)() > UNTOUCHED:
                return args[0]
            return func(*args, **(kwargs or {}))

    with Unfilled():
        model: nn.Module = job.model()
    for _, blocks in repeated_blocks(model):
        del blocks[1:]  # type: ignore[operator]  # a ModuleList or a Sequential
    return model


def _fill(model: nn.Module) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > UNTOUCHED:
                parameter.normal_(0, 0.02)


def _work(text: str, say: Say) -> None:
    warnings.simplefilter("ignore")
    look = LossQuery.from_json(text)
    job = load(look.job, look.overrides)
    layers = _layers(job)
    try:
        found = BatchLoss() if look.layers_only else looked_at(job)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and tracing will tell
        line = (str(error).strip().split("\n") or [""])[0][:200]
        found = BatchLoss(why=f"on a small batch on the CPU the job raised {type(error).__name__}: {line}")
    whole = getattr(job, "global_batch", None)
    # Also of a job that says itself how its loss adds up, and of blocks that were cut off.
    found = found.replace(
        global_batch=whole if isinstance(whole, int) and whole > 0 else None,
        batch_norms=max(found.batch_norms, layers),
    )
    say(msgspec.json.encode(found.to_builtins()))


if __name__ == "__main__":
    serve(_work)
