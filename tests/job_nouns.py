"""Strategies for the nouns of jobs and runs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trimtab import spec

_names = st.text(max_size=12)
_words = st.text(min_size=1, max_size=12)
_counts = st.integers(min_value=0, max_value=2**50)
_positive = st.integers(min_value=1, max_value=2**50)
_seconds = st.floats(min_value=0, max_value=1e9)
_numbers = st.floats(-1e9, 1e9)


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


attempts = st.builds(
    spec.Attempt,
    attempt=_positive,
    procs=_positive,
    nodes=_positive,
    state=st.sampled_from(["running", "ended"]),
    began_s=_seconds,
    at_s=_seconds,
    steps=_maybe(_positive),
    earlier_s=_seconds,
    earlier_proc_s=_seconds,
    job_id=_maybe(_words),
    restarts=_counts,
    host=_names,
    pid=_counts,
)
checks = st.builds(spec.Check, what=_words, predicted=_maybe(_numbers), real=_maybe(_numbers))
summaries = st.builds(
    spec.Summary,
    job=_names,
    device=_maybe(_words),
    gpus=_counts,
    processes=_positive,
    nodes=_positive,
    gpus_there=_maybe(_counts),
    strategy=_words,
    precision=_words,
    micro_batch=_positive,
    accumulation=_positive,
    global_batch=_positive,
    steps=_counts,
    samples=_counts,
    epochs=_seconds,
    loss=_maybe(_numbers),
    runtime_s=_seconds,
    steps_s=_seconds,
    gpu_hours=_seconds,
    attempts=_positive,
    allocated_bytes=_maybe(_counts),
    reserved_bytes=_maybe(_counts),
    checks=st.lists(checks, max_size=2).map(tuple),
    incidents=st.dictionaries(_words, _positive, max_size=2),
    ended_on=_names,
)
queued_jobs = st.builds(
    spec.QueuedJob,
    job_id=_words,
    name=_names,
    user=_names,
    partition=_names,
    state=_words,
    reason=_maybe(_words),
    num_nodes=_maybe(_counts),
    nodes=st.lists(_words, max_size=2).map(tuple),
    ran_s=_maybe(_seconds),
    limit_s=_maybe(_seconds),
    starts=_maybe(_words),
    comment=_names,
    script=_maybe(_words),
    work_dir=_maybe(_words),
    output=_maybe(_words),
    restarts=_maybe(_counts),
)


def job_nouns(incidents: st.SearchStrategy[Any]) -> dict[type[spec.Noun], st.SearchStrategy[Any]]:
    """Strategies by noun."""
    runs = st.builds(
        spec.Headway,
        folder=_words,
        job=_maybe(_words),
        step=_counts,
        steps=_maybe(_positive),
        loss=_maybe(_numbers),
        samples_per_s=_maybe(_seconds),
        left_s=_maybe(_seconds),
        processes=_maybe(_positive),
        attempt=_maybe(_positive),
        last_incident=_maybe(incidents),
    )
    views = st.builds(
        spec.JobView,
        id=_words,
        kind=st.sampled_from(["slurm", "local"]),
        state=_words,
        why=_names,
        queued=_maybe(queued_jobs),
        run=_maybe(runs),
        log=_maybe(_words),
        tail=st.lists(_names, max_size=2).map(tuple),
    )
    return {
        spec.Attempt: attempts,
        spec.Check: checks,
        spec.Summary: summaries,
        spec.QueuedJob: queued_jobs,
        spec.Headway: runs,
        spec.JobView: views,
    }
