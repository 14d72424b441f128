"""Fixtures that several files of tests share."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

import warm_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The same cases in every run, so that a change is told from chance. To draw others:
# pytest --hypothesis-profile default
# No deadline: how long a case takes depends on what else the machine does.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
# Hypothesis also draws constants of the modules that are loaded, and these depend on the tests before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants  # noqa: SLF001 - no setting for it

# Lines about progress depend on how fast this machine is.
os.environ["TRIMTAB_PROGRESS"] = "0"
# Every core has a process of tests; small models on several threads spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell ignores Ctrl-C for what it starts in the background, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup for a closed terminal.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
warm_start.install()
OWN_CACHE = "TRIMTAB_CACHE" not in os.environ
if OWN_CACHE:
    # One for the session: xdist's workers inherit the variable. Name a folder to keep traces between runs.
    os.environ["TRIMTAB_CACHE"] = tempfile.mkdtemp(prefix="trimtab-tests-")


def pytest_unconfigure() -> None:
    """Remove the cache of the session, where this process has made it."""
    if OWN_CACHE:
        shutil.rmtree(os.environ["TRIMTAB_CACHE"], ignore_errors=True)


@pytest.fixture
def cold_start() -> Iterator[None]:
    """Start plain processes: how a process starts, or what it has imported, is the claim."""
    warm_start.remove()
    yield
    warm_start.install()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Undo what a test or a framework changes in the environment: Lightning sets LOCAL_RANK, for example."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def own_torch_flags() -> Iterator[None]:
    """Undo what a test changes in torch for the whole process: a step in fp32 turns TF32 off, for example.

    Undo before it, too, what a fixture of a module has changed, which runs before this one.
    """
    reset_torch_flags()
    yield
    reset_torch_flags()


TORCH_DEFAULTS = (False, True, False, False, False, "float32")


def reset_torch_flags() -> None:
    """Set the flags of `TORCH_DEFAULTS`, if torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is None or read_torch_flags() == TORCH_DEFAULTS:
        return
    flags: Any = TORCH_DEFAULTS
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags[:2]
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = flags[2:4]
    torch.use_deterministic_algorithms(flags[4])
    torch.set_default_dtype(getattr(torch, flags[5]))


def read_torch_flags() -> tuple[Any, ...] | None:
    """Return the flags of `TORCH_DEFAULTS` as they are; None if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_default_dtype()).removeprefix("torch."),
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that no other test has written to."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models on several threads spend their time waiting for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def doubles() -> Iterator[None]:
    """Compute in float64, where the order of a sum hardly matters."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
