"""Activations in the memory of the host between the forward and the backward pass."""

from __future__ import annotations

import pytest

import trimtab
from trimtab.errors import WrongUse
from trimtab.planner.pins import read_pins, read_ways

# Words.


def test_words_of_offload_are_sorted_and_checked() -> None:
    pins = read_pins(["offload=Activations, params"])
    assert pins == {"offload": "params,activations"}
    assert read_ways(pins) == {"offload": ("params", "activations")}
    assert read_ways(read_pins(["offload=none"])) == {"offload": ()}
    with pytest.raises(WrongUse, match=r"nvme is none of none, params, optimizer, activations"):
        read_pins(["offload=activations,nvme"])
    with pytest.raises(WrongUse, match=r"--offload disk"):
        trimtab.estimate("slm:tiny", "H200", offload="disk")
