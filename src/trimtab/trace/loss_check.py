"""Check on a small batch, in a child process, whether a job's loss is additive over samples.

The job's model is built on the CPU, in float64 if possible. A model that is too large keeps one block of each
list of repeated blocks. Sequences are shortened if the job has an option `seq`. If the model is still too
large, takes too long or fails, the result is "unknown", with the reason.
"""

from __future__ import annotations

import os
import signal
import warnings
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.cache import BATCH_LOSSES
from trimtab.errors import TrimtabError
from trimtab.jobs.job import has_embeddings, stated_additive
from trimtab.jobs.load import load_job
from trimtab.jobs.optimizers import collect_losses
from trimtab.spec import BatchLoss
from trimtab.spec.base import Noun
from trimtab.trace.job_summary import NamedJob, named_job_key
from trimtab.trace.server import SendAnswer, ask_all, serve

if TYPE_CHECKING:
    from torch import nn

CPU_LIMIT_S = 80.0
"""Processor time of the check. A busy machine takes longer, and gets the same answer."""
TIMEOUT_S = 240.0
"""Time of the check, for jobs that wait for something other than a CPU."""
NICENESS = 5
"""The check yields to tracing, which the user waits for first."""
MAX_PARAMETERS = 60_000_000
"""Largest model to run: with gradients, it needs 1 GiB in float64."""
SHORT_SEQ = 64
"""Sequence length of the check, for jobs that have an option `seq`."""
MAX_FILLED = 2**20
"""Tensors with more elements are not initialised while a large model is built: most are removed again."""


class LossQuery(Noun, frozen=True, kw_only=True):
    """A job to check, or whose BatchNorm layers to count."""

    job: str
    overrides: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    layers_only: bool = False


def check_batch_loss(job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True) -> BatchLoss:
    """Return whether the loss of a job is additive over samples, cached while its source is unchanged."""
    named = NamedJob(job=job, overrides=overrides or {})
    key = named_job_key(named)
    cached = BATCH_LOSSES.load(key, BatchLoss.from_json) if cache else None
    if cached is not None:
        return cached
    result = _ask_child(named)
    BATCH_LOSSES.store(key, result.to_json())
    return result


class CheckTooLong(BaseException):
    """The check has used up its processor time; handlers of ordinary errors let it pass."""


class LossCheck:
    """A check of a job's loss that runs beside other work, in a thread that waits for its process."""

    def __init__(self, job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True) -> None:
        self._results: list[BatchLoss | BaseException] = []

        def check() -> None:
            try:
                self._results.append(check_batch_loss(job, overrides, cache=cache))
            except BaseException as error:  # noqa: BLE001 - raised by result(), in the thread that waits
                self._results.append(error)

        # After Ctrl-C nobody waits for it: the check ends by itself.
        self._thread = Thread(target=check, daemon=True)
        self._thread.start()

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Return whether the check is over; wait for it at most this long."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> BatchLoss:
        """Wait for the check, and return what it found; raise its error."""
        self._thread.join()
        (result,) = self._results
        if isinstance(result, BaseException):
            raise result
        return result


def _ask_child(named: NamedJob) -> BatchLoss:
    query = LossQuery(job=named.job, overrides=named.overrides)
    answer = _ask_once(query)
    if not isinstance(answer, TrimtabError):
        return answer
    # The small batch took too long or failed; counting layers needs no memory.
    layers = _ask_once(query.replace(layers_only=True))
    counted = BatchLoss() if isinstance(layers, TrimtabError) else layers
    return counted.replace(why=_shorten_error(answer))


def _ask_once(query: LossQuery) -> BatchLoss | TrimtabError:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    try:
        (answer,) = ask_all("trimtab.trace.loss_check", query, env, timeout_s=TIMEOUT_S, watch=True)
    except TrimtabError as error:
        return error
    return answer if isinstance(answer, TrimtabError) else BatchLoss.from_builtins(answer)


def _shorten_error(error: TrimtabError) -> str:
    return error.found.replace("its first steps took", "the check took").replace("while it was traced", "")


def check_job(job: Any) -> BatchLoss:
    """Return whether the loss of a job is additive: as the job declares, or by a small batch."""
    if has_embeddings(job):
        return BatchLoss(additive=True, stated=True, why="embed() and loss_of() cut the batch exactly")
    stated = stated_additive(job)
    if stated is not None:
        return BatchLoss(additive=stated, stated=True, why=f"the job says additive = {stated}")
    return check_small_batch(job)


def check_small_batch(job: Any) -> BatchLoss:
    """Return whether the loss is additive by a small batch, whatever the job declares."""
    from trimtab.engine.additive_loss import TEST_SAMPLES

    samples = min(TEST_SAMPLES, max(1, int(getattr(job, "global_batch", TEST_SAMPLES) or TEST_SAMPLES)))
    if samples == 1:
        return BatchLoss(additive=True, why="a step has one sample")
    if isinstance(getattr(job, "seq", None), int) and job.seq > SHORT_SEQ:
        job.seq = SHORT_SEQ
    model, why = _build_model(job)
    if model is None:
        return BatchLoss(why=why)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    results = [(name, _judge_loss(job, loss, model, samples)) for name, loss in collect_losses(job, named)]
    # One loss that cannot be split, or that was not checked, decides for all of them.
    name, result = next(
        (
            (name, result)
            for additive in (False, None, True)
            for name, result in results
            if result.additive is additive
        )
    )
    if len(results) == 1 or result.additive or not result.why:
        return result
    return result.replace(why=f"{name}: {result.why}")


def _judge_loss(job: Any, loss: Any, model: nn.Module, samples: int) -> BatchLoss:
    """Compare in float64; in float32 if the job does not support float64."""
    import torch

    from trimtab.engine.additive_loss import ROUNDING, LossUnderTest, check_additivity, convert_to_double
    from trimtab.jobs.job import Job

    own = getattr(type(job), "weight", None)
    question = LossUnderTest(
        model=model,
        loss=loss,
        weight=None if own in (None, Job.weight) else job.weight,
    )
    torch.manual_seed(0)
    batch = job.batch(samples)
    try:
        model.double()
        return check_additivity(
            question, convert_to_double(batch), samples, gradients=True, rounding=ROUNDING[torch.float64]
        )
    except Exception:  # noqa: BLE001 - a job may insist on float32
        model.float()
        return check_additivity(question, batch, samples, gradients=True, rounding=ROUNDING[torch.float32])


def _build_model(job: Any) -> tuple[nn.Module | None, str]:
    """Return the job's model on the CPU, or None and the reason; a large one has one block of each list."""
    import torch

    count = _count_parameters(job)
    torch.manual_seed(0)
    if count is not None and count > MAX_PARAMETERS:
        model = _build_cut_model(job)
        left = sum(parameter.numel() for parameter in model.parameters())
        if left > MAX_PARAMETERS:
            return None, f"the model has {count / 1e6:,.0f} million parameters, too many to run on the CPU"
        _fill_parameters(model)
    else:
        model = job.model()
    return model.train(), ""


def _count_parameters(job: Any) -> int | None:
    """Return the number of parameters; None if the model cannot be built on the meta device."""
    import torch

    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in job.model().parameters())
    except Exception:  # noqa: BLE001 - the real build reports the error
        return None


def _count_batch_norms(job: Any) -> int:
    """Return the number of BatchNorm layers; 0 if the model cannot be built on the meta device."""
    import torch

    from trimtab.engine.additive_loss import find_batch_norms

    try:
        with torch.device("meta"):
            return len(find_batch_norms(job.model()))
    except Exception:  # noqa: BLE001 - as above
        return 0


def _build_cut_model(job: Any) -> nn.Module:
    """Return the model with the first block of every list of repeated blocks; large tensors uninitialised."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from trimtab.engine.build import find_repeated_blocks

    class Unfilled(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name.endswith("_") and args and getattr(args[0], "numel", lambda: 0)() > MAX_FILLED:
                return args[0]
            return func(*args, **(kwargs or {}))

    with Unfilled():
        model: nn.Module = job.model()
    for _, blocks in find_repeated_blocks(model):
        del blocks[1:]  # type: ignore[operator]  # a ModuleList or a Sequential
    return model


def _fill_parameters(model: nn.Module) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > MAX_FILLED:
                parameter.normal_(0, 0.02)


def _check_in_time(job: Any) -> BatchLoss:
    """Return the result of the check; raise CheckTooLong if it takes too much processor time."""

    def stop(*_: object) -> None:
        raise CheckTooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        return check_job(job)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer_request(text: str, say: SendAnswer) -> None:
    warnings.simplefilter("ignore")
    os.nice(NICENESS)
    query = LossQuery.from_json(text)
    job = load_job(query.job, query.overrides)
    layers = _count_batch_norms(job)
    try:
        result = BatchLoss() if query.layers_only else _check_in_time(job)
    except CheckTooLong:
        result = BatchLoss(why=f"the check took more than {CPU_LIMIT_S:.0f} s of processor time")
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; tracing reports it
        line = (str(error).strip().split("\n") or [""])[0][:200]
        result = BatchLoss(why=f"on a small batch on the CPU the job raised {type(error).__name__}: {line}")
    global_batch = getattr(job, "global_batch", None)
    # Also for a job that declares its loss, and with the blocks that were removed.
    result = result.replace(
        global_batch=global_batch if isinstance(global_batch, int) and global_batch > 0 else None,
        batch_norms=max(result.batch_norms, layers),
    )
    say(msgspec.json.encode(result.to_builtins()))


if __name__ == "__main__":
    serve(_answer_request)
