"""Scripts that update their parameters without torch.optim, or wrap their model in nn.DataParallel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trimtab.errors import CannotFollow
from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script

if TYPE_CHECKING:
    from trimtab.scripts.estimate import ScriptEstimate

SCRIPTS = Path(__file__).parent / "scripts"


def follow(script: str, *arguments: str, on: str = "H200") -> ScriptEstimate:
    words = [sys.executable, str(SCRIPTS / script), *arguments]
    return estimate_script(parse_command(words, environment=os.environ), as_cluster(on))


@pytest.fixture(autouse=True)
def in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_without_an_optimizer_is_followed_by_its_backward_passes(tmp_path: Path) -> None:
    found = follow("by_hand.py", "--batch_size", "16")
    facts = {fact.name: fact for fact in found.script.found}
    assert facts["optimizer"].value == "none"
    assert "itself" in facts["optimizer"].where
    assert found.estimate.parts.optimizer == 0
    assert found.estimate.parts.gradients == found.estimate.parts.weights > 0
    assert list(tmp_path.iterdir()) == []


def test_data_parallel_on_one_gpu_passes_its_inputs_on() -> None:
    plain, wrapped = (follow("classifier.py", *flags) for flags in ((), ("--data-parallel",)))
    assert wrapped.estimate.allocated_bytes == plain.estimate.allocated_bytes


def test_data_parallel_on_two_gpus_is_refused() -> None:
    with pytest.raises(CannotFollow, match="DataParallel"):
        follow("classifier.py", "--data-parallel", on="2xH200")
