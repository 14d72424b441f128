"""Scripts with weights and optimizer states in few bits, by the real bitsandbytes if it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.errors import JobFailed
from trimtab.probe.detect import as_cluster
from trimtab.scripts.bitsandbytes_patches import patch_peft
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.scripts.moved_parameters import PARAMETER_CLASS
from trimtab.spec import BaseFormat

if TYPE_CHECKING:
    from trimtab.scripts.estimate import ScriptEstimate

SCRIPTS = Path(__file__).parent / "scripts"
WIDTH, LAYERS, RANK = 512, 3, 8
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def follow(script: str, *arguments: str) -> ScriptEstimate:
    words = [sys.executable, str(SCRIPTS / script), *arguments]
    return estimate_script(parse_command(words, environment=os.environ), as_cluster("H200"))


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("kind", "optimizer", "name"),
    [
        ("nf4", "AdamW8bit", "AdamW8bit (loop)"),
        ("nf4-double", "PagedAdamW8bit", "PagedAdamW8bit (loop)"),
        ("int8", "Lion32bit", "Lion32bit (loop)"),
    ],
)
def test_weights_and_states_have_the_bytes_of_the_engine(kind: str, optimizer: str, name: str) -> None:
    found = follow("low_bit.py", kind, optimizer)
    facts = {fact.name: fact for fact in found.script.found}
    assert facts["base"].value == kind
    assert facts["optimizer"].value == name
    assert facts["optimizer"].where.startswith("bitsandbytes")
    # Weights are counted as they were before they were packed.
    adapters = LAYERS * 2 * WIDTH * RANK
    assert found.trace.parameters == LAYERS * WIDTH**2 + adapters
    assert found.trace.trainable == adapters
    stored = LAYERS * BaseFormat(kind).storage.count_bytes(WIDTH, WIDTH) + 2 * adapters
    parts = found.estimate.parts
    # Besides, each layer has a table of 16 values (and, with double quantisation, one of 256 and a mean).
    assert stored <= parts.weights <= stored + LAYERS * 4096
    # Every adapter has at least the 4,096 weights from which states are in 8 bits, with a scale for 256.
    states = {"Lion32bit": 4.0}.get(optimizer, 2 + 2 * 4 / 256)
    assert parts.optimizer == pytest.approx(adapters * states, rel=0.15)


def test_peft_restores_weights_that_it_knows_by_the_name_of_their_class() -> None:
    with FakeTensorMode():
        weight: Any = torch.empty(8, 1, dtype=torch.uint8)
    vars(weight)[PARAMETER_CLASS] = type("Params4bit", (), {})
    weight.bnb_quantized, weight.quant_state = True, "scales"
    integrations: Any = SimpleNamespace(
        dequantize_module_weight=lambda module: module.weight,
        dequantize_bnb_weight=lambda held, state: (type(held).__name__, held.quant_state, state),
    )
    patch_peft(integrations)
    restore = integrations.dequantize_module_weight
    assert restore(SimpleNamespace(weight=weight)) == ("Params4bit", "scales", None)
    assert restore(SimpleNamespace(weight="plain")) == "plain"


def test_a_missing_package_is_named_with_the_interpreter() -> None:
    with pytest.raises(JobFailed, match="package_that_nobody_has") as caught:
        follow("no_package.py")
    assert sys.executable in caught.value.cure
    assert "Install" in caught.value.cure
