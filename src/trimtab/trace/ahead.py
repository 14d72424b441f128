"""Imports that every trace of a job will make, made once before the traces are forked.

What trimtab and torch need is known. What the job needs is read off its source, because jobs import heavy
libraries inside model(); what that misses is learnt from the first trace.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from trimtab.jobs.job import Job

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

OURS = (
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.tensor._sharding_prop",
    "trimtab.trace.kernels",
    "trimtab.trace.recorder",
    "trimtab.engine.step",
)
MEMBERS = ("model", "batch", "loss", "losses", "optimizer")


def import_ahead(job: Any) -> None:
    """Import what tracing needs, and what the members of the job import when they are called."""
    for name in OURS:
        importlib.import_module(name)
    if isinstance(job, Job):
        with contextlib.suppress(Exception):
            job.import_ahead()
    for member in MEMBERS:
        for module, names in imports(getattr(type(job), member, None)):
            # What cannot be imported is the job's to complain about, when it gets there.
            with contextlib.suppress(Exception):
                found = importlib.import_module(module)
                for name in names:
                    # Packages that load their parts late do so when a name is asked for.
                    getattr(found, name, None)


def imports(function: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules that the source of a function imports, with the names it takes from each."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names)


def imported_since(before: Collection[str]) -> list[str]:
    """The modules that this process has imported on top of those, in the order in which they came.

    torch's own are left out: its compiler starts threads and processes when it is imported, and a process
    that is to be forked may have none.
    """
    return [name for name in sys.modules if name not in before and not name.startswith(("torch.", "__"))]


def import_as_well(names: Iterable[str]) -> None:
    """Import what a copy of this process had to."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
