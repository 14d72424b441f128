"""Read the workload of a job (batch, horizon, branches) in a child process; cached."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec

from trimtab.cache import WORKLOADS, make_key
from trimtab.errors import WrongUse
from trimtab.jobs.job import has_embeddings, list_whole_model_members, stated_additive
from trimtab.jobs.load import load_job
from trimtab.spec import BatchLoss, Noun, Workload
from trimtab.trace.server import SendAnswer, ask, serve
from trimtab.trace.tracer import job_key, list_option_files

TIMEOUT_S = 120.0


class NamedJob(Noun, frozen=True, kw_only=True):
    """Name and options of a job, for another process to load."""

    job: str
    overrides: dict[str, Any] = {}


def summarize_job(job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True) -> Workload:
    """Return the workload of a job, from the cache if its source is unchanged."""
    named = NamedJob(job=job, overrides=overrides or {})
    key = named_job_key(named)
    cached = WORKLOADS.load(key, Workload.from_json) if cache else None
    if cached is not None:
        return cached
    answer = ask(
        "trimtab.trace.job_summary", named, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S, only_reads=True
    )
    workload = Workload.from_builtins(answer["workload"])
    WORKLOADS.store(key, workload.to_json())
    return workload


def has_summary(job: str, overrides: dict[str, Any] | None = None) -> bool:
    """Return whether the workload of a job is in the cache."""
    return WORKLOADS.has(named_job_key(NamedJob(job=job, overrides=overrides or {})))


def named_job_key(named: NamedJob) -> str:
    """Return the cache key of a job: its name, its options, its source, our code and the versions."""
    return job_key(named.job, make_key(named), files=list_option_files(named.job, named.overrides))


def describe_job(job: Any, name: str) -> Workload:
    """Return the workload that a job declares; raise for an invalid batch or horizon."""
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
        samples=_count_samples(job) if samples is None else samples,
        epochs=epochs,
        branches=tuple(map(str, branches)) if callable(getattr(job, "losses", None)) else (),
        seq=seq if isinstance(seq, int) and seq > 0 else None,
        batch_loss=_stated_batch_loss(job),
        cached=has_embeddings(job),
        whole_model=tuple(list_whole_model_members(job)),
        sample_length=_sample_length(job),
        files=_source_files(name, job),
    )


def _stated_batch_loss(job: Any) -> BatchLoss | None:
    """Return what a job declares about its loss by `additive`; None if it declares nothing."""
    stated = stated_additive(job)
    if stated is None:
        return None
    return BatchLoss(additive=stated, stated=True, why=f"the job says additive = {stated}")


def _sample_length(job: Any) -> int | None:
    """Return the tokens per sample: `sample_length` of the job, or its `seq`."""
    for member in ("sample_length", "seq"):
        value = getattr(job, member, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _count_samples(job: Any) -> int | None:
    """Return the length of the dataset; None if it cannot be counted here."""
    dataset = getattr(job, "dataset", None)
    if not callable(dataset):
        return None
    try:
        return len(dataset()) or None
    except Exception:  # noqa: BLE001 - planning needs no data, and the user's code may raise anything
        return None


def _source_files(name: str, job: Any) -> dict[str, str]:
    """Return hashes of the job's source files: its own, and those imported from the same folder."""
    place = Path(name.rpartition(":")[0])
    own = getattr(sys.modules.get(type(job).__module__), "__file__", None)
    home = place.resolve().parent if place.suffix == ".py" else Path(own).parent if own else None
    mine = Path(__file__).resolve().parent.parent
    if home is None or home.is_relative_to(mine):
        # A job of trimtab: its version identifies it.
        return {}
    hashes = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and Path(file).resolve().is_relative_to(home):
            path = Path(file).resolve()
            elsewhere = "site-packages" in path.relative_to(home).parts or path.is_relative_to(mine)
            # Some modules of torch name files that do not exist.
            if elsewhere or not path.is_file():
                continue
            hashes[str(path.relative_to(home))] = hash_source_file(path)
    return dict(sorted(hashes.items()))


def hash_source_file(file: Path) -> str:
    """Return the hash of a source file, as a plan's fingerprints have it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _answer_request(text: str, say: SendAnswer) -> None:
    warnings.simplefilter("ignore")
    named = NamedJob.from_json(text)
    workload = describe_job(load_job(named.job, named.overrides), named.job)
    say(msgspec.json.encode({"workload": workload.to_builtins()}))


if __name__ == "__main__":
    serve(_answer_request)
