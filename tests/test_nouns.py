from __future__ import annotations

import doctest
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nouns import FIELDS, FITTED, NOUNS, all_nouns
from trimtab import spec
from trimtab.errors import BrokenFile
from trimtab.spec import Cluster, Device, Estimate, Footprint, Link, Mesh, Node, Setting, Strategy


def test_every_noun_has_a_strategy_here() -> None:
    # Benchmarks have nouns of their own, which nothing else reads.
    ours = {noun for noun in all_nouns() if noun.__module__.startswith("trimtab.")}
    assert ours == set(NOUNS)
    assert len(ours) > 100
    assert {*FIELDS, *FITTED} <= {cls.__name__ for cls in ours}


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_noun_survives_json_both_ways(noun: type[spec.Noun], data: st.DataObject) -> None:
    value = data.draw(NOUNS[noun])
    assert noun.from_json(value.to_json()) == value
    assert noun.from_json(value.to_json(indent=2)) == value
    assert set(json.loads(value.to_json())) == set(noun.json_fields())


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_noun_is_frozen_and_refuses_unknown_keys(noun: type[spec.Noun], data: st.DataObject) -> None:
    value = data.draw(NOUNS[noun])
    field = noun.__struct_fields__[0]
    with pytest.raises(AttributeError, match="immutable"):
        setattr(value, field, getattr(value, field))
    wrong = value.to_builtins() | {"surprise": 1}
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        noun.from_builtins(wrong)


def test_a_fingerprint_changes_with_any_field_and_with_nothing_else() -> None:
    mesh = Mesh(dp_replicate=2)
    assert mesh.fingerprint() == Mesh(dp_replicate=2).fingerprint()
    assert mesh.fingerprint() != Mesh(dp_shard=2).fingerprint()
    assert mesh.fingerprint() == mesh.replace(branch=1).fingerprint()


def test_what_is_derived_is_written_and_never_believed() -> None:
    node = Node(name="a", cpu_cores=4, ram_bytes=100)
    cluster = Cluster(nodes=(node, node.replace(name="b")))
    wrote = cluster.to_builtins()
    assert (wrote["cpu_cores"], wrote["ram_bytes"]) == (8, 200)
    assert Cluster.from_builtins(wrote | {"cpu_cores": 99}).cpu_cores == 8


def test_the_total_over_nodes_is_unknown_if_one_is() -> None:
    nodes = (Node(name="a", cpu_cores=4), Node(name="b"))
    assert Cluster(nodes=nodes).cpu_cores is None


def _device(**changes: Any) -> Device:
    plain: dict[str, Any] = {"index": 0, "name": "x", "memory_bytes": 10}
    return Device(**(plain | changes))


@pytest.mark.parametrize(
    ("build", "wrong"),
    [
        (lambda: _device(memory_bytes=0), "memory_bytes is 0"),
        (lambda: _device(free_bytes=11), "more than memory_bytes"),
        (lambda: _device(index=-1), "index is -1"),
        (lambda: _device(name=""), "name is empty"),
        (lambda: _device(clock_hz=float("nan")), "clock_hz is nan"),
        (lambda: _device(clock_hz=float("inf")), "clock_hz is inf"),
        (lambda: _device(power_limit_w=-1), "power_limit_w is -1"),
        (lambda: _device(power_limit_w=float("inf")), "power_limit_w is inf"),
        (lambda: _device(pcie_generation=0), "pcie_generation is 0, and must lie from 1 to 8"),
        (lambda: _device(pcie_width=64), "pcie_width is 64"),
        (lambda: _device(compute_capability="new"), "compute_capability is 'new', not like 9.0"),
        (lambda: _device(compute_capability="9.0\n"), "compute_capability is"),
        (lambda: _device(compute_capability="\u0669.0"), "compute_capability is"),
        (lambda: _device(sources={"colour": "stated: x"}), "'colour', which is no field"),
        (lambda: _device(sources={"name": "heard"}), "must begin with one of detected"),
        (lambda: Node(name="a", devices=(_device(), _device())), "same index"),
        (lambda: Cluster(nodes=()), "at least one node"),
        (
            lambda: Cluster(
                nodes=(Node(name="a"),),
                links=(Link(kind="PCIe", node=0, devices=(0, 1), source="stated: x"),),
            ),
            "names a device that is not there",
        ),
        (
            lambda: Cluster(
                nodes=(Node(name="a"),),
                links=(Link(kind="PCIe", node=1, devices=(0, 1), source="stated: x"),),
            ),
            "names node 1, and there are 1",
        ),
        (lambda: Link(kind="PCIe", node=0, source="stated: x"), "a node and devices, or neither"),
        (lambda: Link(kind="x", node=0, devices=(1, 1), source="stated: x"), "two devices or more"),
        (lambda: Mesh(pp=0), "pp is 0"),
        (lambda: Mesh(tp=0), "tp is 0"),
        (lambda: spec.Slice(profile="1g", parent="x", sm_share=0), "sm_share is 0"),
        (lambda: spec.Scheduler(rank=4, world_size=4), "rank is 4, and must be below"),
        (lambda: spec.Policy(memory_share=0), r"must lie in \(0, 1\]"),
        (lambda: spec.Reason(subject="x", value="y", why=" "), "reason for x is empty"),
        (lambda: spec.Band(low_bytes=2, high_bytes=1), "low_bytes 2 is above"),
        (lambda: Footprint(weights=-1), "weights is -1"),
        (
            lambda: Estimate(
                allocated_bytes=3,
                reserved_bytes=2,
                process_bytes=4,
                parts=Footprint(),
                band=spec.Band(low_bytes=0, high_bytes=1),
            ),
            "allocated 3 <= reserved 2",
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused(build: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        build()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"global_batch": 65}, "does not make global_batch 65"),
        ({"global_batch": 56}, "does not make global_batch 56"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"strategy": Strategy.SINGLE}, "single runs on one device, and the mesh has 2"),
    ],
)
def test_a_setting_keeps_the_global_batch(changes: dict[str, Any], wrong: str) -> None:
    good: dict[str, Any] = {
        "strategy": Strategy.DDP,
        "mesh": Mesh(dp_replicate=2),
        "micro_batch": 4,
        "accumulation": 8,
        "global_batch": 64,
    }
    assert Setting(**good).gpus == 2
    with pytest.raises(ValueError, match=wrong):
        Setting(**(good | changes))


def test_the_last_micro_batch_may_be_smaller() -> None:
    assert Setting(micro_batch=5, accumulation=3, global_batch=11).accumulation == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a Cluster"),
        ("\xff", "not JSON"),
        ('{"nodes": []}', "at least one node"),
        ('{"nodes": [{"name": 5}]}', r"Expected `str`, got `int` - at `\$.nodes\[0\].name`"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong_in_it(text: str, found: str) -> None:
    with pytest.raises(BrokenFile, match=found) as caught:
        Cluster.from_json(text, origin="--on m.json")
    assert caught.value.given == "--on m.json"
    assert caught.value.exit_code == 2


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(spec.base).failed == 0
