"""The functions `detect`, `cluster`, `explain`, `doctor` and `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trimtab.catalog.glossary import Word
    from trimtab.diagnosis.findings import Diagnosis
    from trimtab.spec import Cluster

VERBS = (
    "detect",
    "explain",
    "estimate",
    "exam",
    "profile",
    "calibrate",
    "plan",
    "layouts",
    "max",
    "explore",
    "apply",
    "show",
    "revert",
    "train",
    "launch",
    "jobs",
    "cancel",
    "doctor",
    "report",
    "watch",
)
"""The commands, in the order of help."""
FUNCTIONS = {"jobs": "list_jobs"}
"""Commands whose function has another name, because a package has theirs."""


def detect() -> Cluster:
    """Return the hardware that this process may use.

    >>> trimtab.detect().nodes[0].devices  # doctest: +SKIP
    (Device(index=0, name='NVIDIA H200', ...),)
    """
    from trimtab.probe.detect import detect as look

    return look()


def cluster(on: str | Path | None = None, *, network: str | None = None) -> Cluster:
    """Return the cluster that a string or a detect file describes; None is this machine.

    `network` states the bandwidth between nodes: 400Gb/gpu, 100Gb/node, 50GB/s/gpu.

    >>> len(cluster("4xA100-40GB").nodes[0].devices)
    4
    >>> cluster("2x8xH100", network="100Gb/node").links[-1].bandwidth_bytes_per_s
    1562500000.0
    """
    from trimtab.probe.detect import as_cluster

    return as_cluster(on, network=network)


def stated_network(where: Cluster, network: str) -> Cluster:
    """Return the cluster with a stated bandwidth between its nodes."""
    from trimtab.catalog.clusters import with_network

    return with_network(where, network)


def explain(word: str) -> Word:
    """Explain a knob, strategy or term in plain English, or a finding of `trimtab doctor`.

    >>> explain("oom").name
    'out-of-memory'
    """
    from trimtab.catalog.glossary import find_word as look_up
    from trimtab.diagnosis.fault_kinds import kind_words

    return look_up(word, VERBS, more=kind_words())


def all_words() -> dict[str, Word]:
    """Return every entry that `explain` has, by name: trimtab's words, and the findings of `doctor`."""
    from trimtab.catalog.glossary import words
    from trimtab.diagnosis.fault_kinds import kind_words

    ours = words(VERBS)
    return ours | {name: word for name, word in kind_words().items() if name not in ours}


def doctor(
    *logs: str | Path, plan: str | Path | None = None, say: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Name what made a run fail or slow, from its logs, folders and records; without any, check this machine.

    `plan` is a file whose predicted step time the measured one is compared with; a run folder has its own.

    >>> trimtab.doctor("slurm-4711.out").findings[0].kind  # doctest: +SKIP
    'out-of-memory'
    """
    if logs:
        from os import fspath

        from trimtab.diagnosis.diagnose import diagnose_logs

        return diagnose_logs([fspath(log) for log in logs], say, plan=None if plan is None else fspath(plan))
    if plan is not None:
        from trimtab.errors import WrongUse

        raise WrongUse(
            f"--plan {plan}",
            found="no log is given whose step time could be compared with it",
            cure="Give the log or the run folder too.",
        )
    from trimtab.diagnosis.machine import examine_machine

    return examine_machine()


def load(name: str, **options: Any) -> Any:
    """Load the job of that name, with some of its attributes set.

    trimtab.load("train.py:MyJob")
    trimtab.load("slm", layers=24, vocab=50_304)
    trimtab.load("hf:./llama", lora=16)
    """
    from trimtab.jobs.load import load_job as find

    return find(name, options)
