"""What a job says of itself: batch, horizon, branches. A child process asks it, and the answer is cached."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec

from trimtab.cache import WORKLOADS, key_of
from trimtab.errors import WrongUse
from trimtab.jobs.job import is_cached, stated_additive
from trimtab.jobs.load import load
from trimtab.spec import BatchLoss, Noun, Workload
from trimtab.trace.server import Say, ask, serve
from trimtab.trace.tracer import job_key

TIMEOUT_S = 120.0


class Named(Noun, frozen=True, kw_only=True):
    """A job as another process finds it."""

    job: str
    overrides: dict[str, Any] = {}


def summary(job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True) -> Workload:
    """Return the workload of a job, from the cache if its source is unchanged."""
    named = Named(job=job, overrides=overrides or {})
    key = named_key(named)
    cached = WORKLOADS.load(key, Workload.from_json) if cache else None
    if cached is not None:
        return cached
    answer = ask("trimtab.trace.job_summary", named, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S)
    found = Workload.from_builtins(answer["workload"])
    WORKLOADS.store(key, found.to_json())
    return found


def is_known(job: str, overrides: dict[str, Any] | None = None) -> bool:
    """Whether the workload of a job is in the cache."""
    return WORKLOADS.has(named_key(Named(job=job, overrides=overrides or {})))


def named_key(named: Named) -> str:
    """Return the cache key of a job: its name, its options, its source, our code and the versions."""
    return job_key(named.job, key_of(named))


def described(job: Any, name: str) -> Workload:
    """What a job says of itself; raises for a batch or a horizon that cannot be."""
    batch = getattr(job, "global_batch", 1)
    samples = getattr(job, "samples", None)
    epochs = getattr(job, "epochs", 1)
    for member, value in (("global_batch", batch), ("samples", samples), ("epochs", epochs)):
        if value is None and member == "samples":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WrongUse(
                f"{member} of job {name}",
                found=f"it is {value!r}",
                cure=f"Give the job a whole {member} from 1 up, or use --{member.replace('_', '-')}.",
            )
    branches = getattr(job, "branches", None) or {}
    seq = getattr(job, "seq", None)
    return Workload(
        name=str(getattr(job, "name", "") or name.rpartition(":")[2]),
        global_batch=batch,
        samples=_counted(job) if samples is None else samples,
        epochs=epochs,
        branches=tuple(map(str, branches)) if callable(getattr(job, "losses", None)) else (),
        seq=seq if isinstance(seq, int) and seq > 0 else None,
        batch_loss=_stated(job),
        cached=is_cached(job),
        sample_length=_length(job),
        files=_files(name, job),
    )


def _stated(job: Any) -> BatchLoss | None:
    """What a job says of its loss by `additive`."""
    stated = stated_additive(job)
    if stated is None:
        return None
    return BatchLoss(additive=stated, stated=True, why=f"the job says additive = {stated}")


def _length(job: Any) -> int | None:
    """Tokens of one sample: what the job says, or its `seq`."""
    for member in ("sample_length", "seq"):
        value = getattr(job, member, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _counted(job: Any) -> int | None:
    """The length of the dataset, where there is one that can be counted here."""
    dataset = getattr(job, "dataset", None)
    if not callable(dataset):
        return None
    try:
        return len(dataset()) or None
    except Exception:  # noqa: BLE001 - planning needs no data, and the user's code may raise anything
        return None


def _files(name: str, job: Any) -> dict[str, str]:
    """The source files that the job was made of: its own, and those it took from the same folder."""
    place = Path(name.rpartition(":")[0])
    own = getattr(sys.modules.get(type(job).__module__), "__file__", None)
    home = place.resolve().parent if place.suffix == ".py" else Path(own).parent if own else None
    mine = Path(__file__).resolve().parent.parent
    if home is None or home.is_relative_to(mine):
        # Ours: the version says it all.
        return {}
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and Path(file).resolve().is_relative_to(home):
            path = Path(file).resolve()
            elsewhere = "site-packages" in path.relative_to(home).parts or path.is_relative_to(mine)
            # Some modules of torch claim files that are not there.
            if elsewhere or not path.is_file():
                continue
            found[str(path.relative_to(home))] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return dict(sorted(found.items()))


def _work(text: str, say: Say) -> None:
    warnings.simplefilter("ignore")
    named = Named.from_json(text)
    found = described(load(named.job, named.overrides), named.job)
    say(msgspec.json.encode({"workload": found.to_builtins()}))


if __name__ == "__main__":
    serve(_work)
