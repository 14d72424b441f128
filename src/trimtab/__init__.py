"""Fits any PyTorch training job to whatever GPUs there are.

    >>> import trimtab
    >>> cluster = trimtab.cluster("4xA100-40GB")
    >>> cluster.nodes[0].devices[0].memory_bytes
    42402064630

Every name here is loaded when it is first used, so that importing trimtab costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from trimtab.api import (
        apply,
        calibrate,
        cancel,
        cluster,
        detect,
        doctor,
        estimate,
        exam,
        explain,
        explore,
        launch,
        list_jobs,
        load,
        plan,
        plan_stages,
        profile,
        read_plan,
        report,
        revert,
        schema,
        show,
        train,
        train_stages,
        watch,
    )
    from trimtab.api import max as max  # noqa: A004
    from trimtab.errors import TrimtabError
    from trimtab.jobs.job import Job
    from trimtab.jobs.optimizers import OptimizerPart
    from trimtab.spec import Cluster, Device, Finding, Link, Node, Stage
    from trimtab.training.run import Run

__all__ = [
    "Cluster",
    "Device",
    "Finding",
    "Job",
    "Link",
    "Node",
    "OptimizerPart",
    "Run",
    "Stage",
    "TrimtabError",
    "__version__",
    "apply",
    "calibrate",
    "cancel",
    "cluster",
    "detect",
    "doctor",
    "estimate",
    "exam",
    "explain",
    "explore",
    "launch",
    "layouts",
    "list_jobs",
    "load",
    "plan",
    "plan_layout",
    "plan_stages",
    "profile",
    "read_plan",
    "report",
    "revert",
    "schema",
    "show",
    "train",
    "train_stages",
    "watch",
]

# `trimtab.max` is public too. It is not listed, so that `from trimtab import *` leaves Python's max alone.
_UNLISTED = ("max",)
_MODULES = dict.fromkeys((*__all__, *_UNLISTED), "trimtab.api") | {
    **dict.fromkeys(("Cluster", "Device", "Finding", "Link", "Node", "Stage"), "trimtab.spec"),
    "Job": "trimtab.jobs.job",
    "OptimizerPart": "trimtab.jobs.optimizers",
    "Run": "trimtab.training.run",
    "TrimtabError": "trimtab.errors",
}
"""For each name the module that defines it."""


def __getattr__(name: str) -> Any:
    """Load a public name from the module that holds it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted((*__all__, *_UNLISTED))
