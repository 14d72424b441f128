from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trimtab
from trimtab.catalog.clusters import assume_network_link, parse_cluster
from trimtab.catalog.tables import devices, fabrics
from trimtab.errors import BrokenFile, TrimtabError, WrongUse

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("H200", [["H200 SXM 141GB"]]),
        ("4xA100-40GB", [["A100 40GB SXM4"] * 4]),
        ("4 x A100-40GB", [["A100 40GB SXM4"] * 4]),
        ("4*A100-40GB", [["A100 40GB SXM4"] * 4]),
        ("2x4090", [["GeForce RTX 4090"] * 2]),
        ("2x8xH100", [["H100 SXM5 80GB"] * 8] * 2),
        ("1x2xT4", [["Tesla T4"] * 2]),
        ("2xRTX3090+1xRTX4090", [["GeForce RTX 3090"] * 2 + ["GeForce RTX 4090"]]),
        ("1x8xH100+2x4xA100-80GB", [["H100 SXM5 80GB"] * 8, *[["A100 80GB SXM4"] * 4] * 2]),
    ],
)
def test_an_on_string_gives_its_nodes_and_devices(text: str, layout: list[list[str]]) -> None:
    cluster = trimtab.cluster(text)
    assert [[device.model for device in node.devices] for node in cluster.nodes] == layout
    assert [device.index for device in cluster.nodes[0].devices] == list(range(len(layout[0])))


def test_a_stated_device_has_its_facts_from_the_catalogue() -> None:
    (device,) = parse_cluster("A100-40GB").devices
    assert (device.name, device.bf16) == ("NVIDIA A100-SXM4-40GB", True)
    assert device.memory_bytes == round(39.49 * 2**30)
    assert device.free_bytes is None
    assert device.sources["memory_bytes"] == "catalogued: A100 40GB SXM4"
    assert device.sources["name"] == "stated: --on A100-40GB"


def test_usable_memory_that_nobody_read_is_marked_as_derived() -> None:
    (device,) = parse_cluster("A5000").devices
    assert device.sources["memory_bytes"] == "derived: 0.98 of 24 GiB as sold"


@pytest.mark.parametrize(
    ("text", "kind", "speed"),
    [
        ("8xH100", "NVLink4", 450e9),
        ("2xH800", "NVLink4 (cut)", 200e9),
        ("2xL40S", "PCIe4 x16", 31e9),
        ("2xA30", "PCIe4 x16", 31e9),
        ("2x2080Ti", "PCIe3 x16", 16e9),
        ("2xRTX3090+1xRTX4090", "PCIe4 x16", 31e9),
        ("1xT4+1xRTX5090", "PCIe3 x16", 16e9),
    ],
)
def test_devices_of_a_stated_node_are_joined_as_such_nodes_are(text: str, kind: str, speed: float) -> None:
    (link,) = parse_cluster(text).links
    assert (link.kind, link.bandwidth_bytes_per_s) == (kind, speed)


def test_a_bridge_that_was_not_named_is_not_assumed_and_that_is_said() -> None:
    (link,) = parse_cluster("2xA6000").links
    assert link.source == "assumed: no bridge, since none was named"
    assert parse_cluster("2xL40S").links[0].source == "assumed: a slot of PCIe4 x16 for each card"


@pytest.mark.parametrize(
    ("text", "pair", "total"),
    [
        ("8xMI300X", 64e9, 448e9),
        ("2xMI300X", 64e9, 64e9),
        ("8xMI325X", 64e9, 448e9),
        ("8xMI355X", 76.5e9, 535.5e9),
        ("8xMI250X", 50e9, 350e9),
        ("8xV100-32GB", 25e9, 150e9),
        ("2xV100-16GB", 25e9, 25e9),
        ("8xH100", 450e9, 450e9),
        ("2xMI210", 31e9, 31e9),
    ],
)
def test_a_pair_gets_its_own_links_and_a_device_all_of_them(text: str, pair: float, total: float) -> None:
    (link,) = parse_cluster(text).links
    assert (link.bandwidth_bytes_per_s, link.total_bytes_per_s) == (pair, total)


def test_what_is_assumed_of_a_v100_board_is_said() -> None:
    cluster = parse_cluster("8xV100-SXM2-32GB")
    assert cluster.links[0].source.startswith("assumed: one NVLink a pair")
    assert any("V100 boards have no switch" in note for note in cluster.notes)
    assert parse_cluster("V100-SXM2-32GB").notes == ()


def test_the_network_of_nodes_without_known_devices_has_no_known_speed() -> None:
    assert assume_network_link(set()).bandwidth_bytes_per_s is None


@pytest.mark.parametrize(
    ("text", "per_gpu"),
    [
        ("2x8xH100", 50e9),
        ("2x8xA100-80GB", 25e9),
        ("2x8xV100-SXM2-32GB", 6.25e9),
        ("2x4xV100-SXM2-32GB", 12.5e9),
        ("2x8xL40S", 6.25e9),
        ("2x4xRTX3090", 1.25e9 / 4),
        ("1x8xH100+1x8xA100-80GB", 25e9),
    ],
)
def test_the_network_between_nodes_is_assumed_by_device_and_says_so(text: str, per_gpu: float) -> None:
    link = parse_cluster(text).links[-1]
    assert (link.node, link.bandwidth_bytes_per_s) == (None, per_gpu)
    assert link.source.startswith("assumed: ")


def test_every_device_of_a_network_row_is_in_the_catalogue_and_in_one_row_only() -> None:
    named = [device for row in fabrics() for device in row.devices]
    assert sorted(named) == sorted(set(named))
    assert set(named) - {"*"} <= {row.name for row in devices()}
    assert all((row.gbs is None) != (row.node_gbs is None) for row in fabrics())


@pytest.mark.parametrize(
    ("text", "per_gpu"),
    [
        ("400Gb/gpu", 50e9),
        ("400 Gb/s/gpu", 50e9),
        ("400Gbps/GPU", 50e9),
        ("50GB/s/gpu", 50e9),
        ("8x400Gb/node", 50e9),
        ("100Gb/node", 12.5e9 / 8),
        ("0.8Tb/gpu", 100e9),
        ("800Mbit/s per node", 1e8 / 8),
    ],
)
def test_a_stated_network_takes_the_place_of_the_assumed_one(text: str, per_gpu: float) -> None:
    cluster = trimtab.cluster("2x8xH100", network=text)
    (link,) = [link for link in cluster.links if link.node is None]
    assert link.bandwidth_bytes_per_s == pytest.approx(per_gpu)
    assert link.source == f"stated: --network {text}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it is empty"),
        ("400", "it has no unit"),
        ("400Gb", "whether each GPU or each node"),
        ("400gb/gpu", "gb may mean bits or bytes"),
        ("400GiB/gpu", "it is not a bandwidth"),
        ("400Gb/rack", "rack is neither gpu nor node"),
        ("0Gb/gpu", "it is not a bandwidth"),
        ("9999TB/gpu", "more than any network has"),
    ],
)
def test_a_network_that_cannot_be_meant_is_refused_in_three_parts(text: str, found: str) -> None:
    with pytest.raises(WrongUse) as caught:
        trimtab.cluster("2x8xH100", network=text)
    assert caught.value.given.startswith("--network")
    assert found in caught.value.found or found in str(caught.value)
    assert "400Gb/gpu" in caught.value.cure


def test_a_network_is_stated_with_latency_rails_and_oversubscription() -> None:
    text = "400Gb/gpu,latency=5us,rails=no,oversubscription=2:1,nvlink=16"
    (link,) = [link for link in trimtab.cluster("2x8xH100", network=text).links if link.node is None]
    assert (link.bandwidth_bytes_per_s, link.latency_s, link.rails) == (50e9, 5e-6, False)
    assert (link.oversubscription, link.nvlink_domain) == (2, 16)
    assert link.source == f"stated: --network {text}"
    # A stated bandwidth leaves what is known of NVLink.
    (link,) = [link for link in trimtab.cluster("36x4xGB200", network="400Gb/gpu").links if link.node is None]
    assert (link.nvlink_domain, link.latency_s, link.rails) == (72, None, None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("400Gb/gpu,latency=5", "latency=5 is not a time"),
        ("400Gb/gpu,latency=5s", "latency=5s is not a time"),
        ("400Gb/gpu,rails=maybe", "rails=maybe is neither yes nor no"),
        ("400Gb/gpu,oversubscription=0.5", "oversubscription=0.5 is not a number from 1 to 100"),
        ("400Gb/gpu,nvlink=1", "nvlink=1 is not a number of GPUs"),
        ("400Gb/gpu,delay=5us", "delay=5us is none of latency, rails, oversubscription, nvlink"),
        ("400Gb/gpu,", "an empty option is none of"),
        ("400Gb/gpu,rails=yes,rails=no", "it states rails twice"),
    ],
)
def test_a_wrong_option_of_a_network_is_refused_with_the_right_form(text: str, found: str) -> None:
    with pytest.raises(WrongUse) as caught:
        trimtab.cluster("2x8xH100", network=text)
    assert found in caught.value.found
    assert "latency=5us" in caught.value.cure


def test_one_node_has_no_use_for_a_network_and_says_so() -> None:
    cluster = trimtab.cluster("8xH100", network="400Gb/gpu")
    assert cluster.links == parse_cluster("8xH100").links
    assert cluster.notes[-1] == "--network 400Gb/gpu changes nothing: there is one node"


def test_a_node_file_states_its_network(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    values = parse_cluster("2x8xH100").to_builtins()
    file.write_text(json.dumps({**values, "network": "100Gb/node"}), encoding="utf-8")
    (link,) = [link for link in trimtab.cluster(file).links if link.node is None]
    assert link.bandwidth_bytes_per_s == 12.5e9 / 8
    assert link.source.startswith("stated: ")
    file.write_text(json.dumps({**values, "network": 400}), encoding="utf-8")
    with pytest.raises(WrongUse, match="it has no unit"):
        trimtab.cluster(file)
    # What --network states wins over the file, and is itself written into one.
    file.write_text(trimtab.cluster("2x8xH100", network="200Gb/gpu").to_json(), encoding="utf-8")
    assert trimtab.cluster(file).links[-1].bandwidth_bytes_per_s == 25e9
    assert trimtab.cluster(file, network="8Gb/gpu").links[-1].bandwidth_bytes_per_s == 1e9


def test_a_path_is_a_detect_file_and_none_is_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "machine"
    file.write_text(parse_cluster("H200").to_json(), encoding="utf-8")
    assert trimtab.cluster(file) == parse_cluster("H200")
    assert trimtab.cluster(None).versions.python == trimtab.cluster().versions.python is not None
    with pytest.raises(WrongUse, match="it is of type int"):
        trimtab.cluster(4)  # type: ignore[arg-type]


def test_a_file_called_like_a_device_does_not_shadow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("H100", "A100", "mine"):
        (tmp_path / name).write_text(parse_cluster("T4").to_json(), encoding="utf-8")
    assert parse_cluster("H100").devices[0].model == "H100 SXM5 80GB"
    assert parse_cluster("mine").devices[0].model == "Tesla T4"
    assert parse_cluster("./H100").devices[0].model == "Tesla T4"
    with pytest.raises(WrongUse, match="comes in 2 sizes"):
        parse_cluster("A100")


def test_a_detect_file_gives_the_same_cluster_back(tmp_path: Path) -> None:
    cluster = parse_cluster("2x8xH100")
    file = tmp_path / "machine.json"
    file.write_text(cluster.to_json(indent=2), encoding="utf-8")
    assert parse_cluster(str(file)) == cluster


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it is empty"),
        ("   ", "it is empty"),
        ("0xH100", "the count is 0"),
        ("0x8xH100", "the count is 0"),
        ("2x0xH100", "the count is 0"),
        ("4xH1000", "no device is called 'H1000'; the nearest are H100"),
        ("4x", "no device is called '4x'"),
        ("+", "a part between plus signs is empty"),
        ("H100+", "a part between plus signs is empty"),
        ("1x2x3xH100", "more than two counts"),
        ("99999xH100", "99999 devices"),
        ("300x300xH100", "90000 devices"),
        ("H100x4", "the count is after the name"),
        ("-2xH100", "no device is called"),
        ("2,4xH100", "no device is called"),
        ("A100", "comes in 2 sizes"),
        ("A100-40GB-MIG-3g.20gb", "a MIG slice cannot be named"),
        ("7x1g.5gb", "a MIG slice cannot be named"),
        ("2xH100 MIG 1g.10gb", "a MIG slice cannot be named"),
    ],
)
def test_a_bad_on_string_is_refused_with_what_was_found(text: str, found: str) -> None:
    with pytest.raises(WrongUse, match=found) as caught:
        parse_cluster(text)
    assert caught.value.exit_code == 2
    assert caught.value.cure


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "no such file"),
        (b"", "not JSON"),
        (b"\x00\xff\xfe", "not JSON"),
        (b"{}", "missing required field `nodes`"),
        (b'{"nodes": [{"name": "a", "devices": [{"index": 0}]}]}', "missing required field `name`"),
        (b'{"nodes": [{"name": "a"}], "colour": 1}', "unknown field `colour`"),
        (b"[" * 100_000, "nested deeper than any Cluster"),
        (b'{"nodes": ' + b'[{"a":' * 50_000, "nested deeper than any Cluster"),
        (
            b'{"nodes":[{"name":"a","devices":[{"index":0,"name":"x","memory_bytes":1,"pcie_generation":99}]}]}',
            "pcie",
        ),
    ],
)
def test_a_broken_detect_file_is_refused_by_name(tmp_path: Path, content: bytes | None, found: str) -> None:
    file = tmp_path / "machine.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BrokenFile, match=found) as caught:
        parse_cluster(str(file))
    assert str(file) in caught.value.given


def test_a_file_of_another_version_says_so(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text('{"nodes": [{"name": "a", "flavour": "new"}]}', encoding="utf-8")
    with pytest.raises(BrokenFile, match="flavour") as caught:
        parse_cluster(str(file))
    assert "written by another version of trimtab" in caught.value.cure


@pytest.mark.parametrize("text", ["a/\x00", "\x00", "x" * 300, "y" * 10**6, "\ud800/"])
def test_a_text_that_can_be_no_file_is_refused(text: str) -> None:
    with pytest.raises(WrongUse) as caught:
        parse_cluster(text)
    assert len(str(caught.value)) < 500


def test_a_folder_is_not_a_detect_file(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="it is a folder"):
        parse_cluster(f"{tmp_path}/")


@given(st.text(max_size=20))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except TrimtabError as error:
        assert error.exit_code == 2
    else:
        assert cluster.devices


@given(
    st.integers(1, 4), st.integers(1, 16), st.sampled_from([name for row in devices() for name in row.typed])
)
def test_every_typed_name_works_in_every_form(nodes: int, count: int, name: str) -> None:
    cluster = parse_cluster(f"{nodes}x{count}x{name}")
    assert [len(node.devices) for node in cluster.nodes] == [count] * nodes
