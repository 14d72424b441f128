"""Fixtures that several files of tests share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The same cases in every run, so that a change is told from chance. To draw others:
# pytest --hypothesis-profile default
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# Lines about progress depend on how fast this machine is.
os.environ["TRIMTAB_PROGRESS"] = "0"


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
