from __future__ import annotations

import doctest

import pytest

from trimtab.catalog import clusters, tables
from trimtab.catalog import devices as devices_module
from trimtab.catalog.devices import find_reported_device, find_typed_device, plain_name
from trimtab.catalog.tables import DeviceRow, devices
from trimtab.errors import UnknownName, WrongUse
from trimtab.spec import Peaks

ROWS = {row.name: row for row in devices()}
VERIFICATIONS = {"S", "S2", "M", "A", "b", "R"}


def test_every_row_says_where_it_comes_from_and_how_far_it_was_checked() -> None:
    checked = (*devices(), *tables.links().values(), *tables.fabrics(), *tables.drivers())
    for row in checked:
        assert row.source
        assert set(row.verification) <= VERIFICATIONS
        assert row.verification
    assert all(row.source.startswith("https://") for row in devices())
    assert len(devices()) == 69


def test_every_usable_memory_says_where_it_was_seen() -> None:
    for row in devices():
        assert bool(row.usable_source) == (row.usable_gib is not None), row.name
        assert not row.usable_source or "https://" in row.usable_source or len(row.usable_source) > 30


def test_the_links_of_a_row_are_those_of_the_link_table() -> None:
    rows = tables.links()
    for row in devices():
        if row.link in rows and row.link.startswith("PCIe"):
            assert row.link_gbs == rows[row.link].gbs, row.name
        assert (row.nvlinks is not None) == row.link.startswith("NVLink"), row.name
        assert row.board is None or rows[row.board].pair_gbs, row.name
        if row.nvlinks and row.compute_capability != "8.6":
            rate = rows[row.link[:7]].per_lane_gbs
            assert row.link_gbs / row.nvlinks == rate, row.name


def test_no_name_means_two_devices() -> None:
    owners: dict[str, set[str]] = {}
    for row in devices():
        for name in (*row.drivers, *row.typed):
            owners.setdefault(plain_name(name), set()).add(row.name)
    assert {name: rows for name, rows in owners.items() if len(rows) > 1} == {}
    for row in devices():
        for driver in row.drivers:
            assert find_typed_device(driver)[0] is row


@pytest.mark.parametrize("row", [row for row in devices() if "A" in row.verification], ids=lambda r: r.name)
def test_multiprocessors_times_clock_times_rate_gives_the_peak(row: DeviceRow) -> None:
    assert row.multiprocessors
    assert row.clock_ghz
    assert row.flop_per_clock
    rate = row.multiprocessors * row.clock_ghz * row.flop_per_clock / 1000
    assert rate == pytest.approx(row.fp16, rel=0.012)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM4"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("GeForce RTX 3090", "GeForce RTX 3090"),
        ("NVIDIA H200 NVL", "H200 NVL 141GB"),
        ("NVIDIA H200", "H200 SXM 141GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA B300 SXM6 AC", "B300 SXM"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"),
        ("AMD Instinct MI300X", "MI300X 192GB"),
    ],
)
def test_a_device_is_found_by_what_its_driver_reports(name: str, row: str) -> None:
    assert find_reported_device(name) is ROWS[row]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("a100-40", "A100 40GB SXM4"),
        ("A100-40GB", "A100 40GB SXM4"),
        ("a100 80g", "A100 80GB SXM4"),
        ("4090", "GeForce RTX 4090"),
        ("rtx4090", "GeForce RTX 4090"),
        ("H100", "H100 SXM5 80GB"),
        ("rtx 6000 ada", "RTX 6000 Ada"),
        ("RTX 6000", "Quadro RTX 6000 24GB (Turing)"),
        ("v100_32gb", "V100 SXM2 32GB"),
        ("mi250x", "MI250X (per GCD)"),
        ("RTX PRO 6000 Blackwell Workstation", "RTX PRO 6000 Blackwell WS"),
        ("GH200-144GB", "GH200 144GB"),
    ],
)
def test_a_device_is_found_by_what_people_type(name: str, row: str) -> None:
    assert find_typed_device(name)[0] is ROWS[row]


def test_rtx_6000_is_the_turing_card_and_that_is_said() -> None:
    row, note = find_typed_device("RTX 6000")
    assert row.bf16 is None
    assert "Turing" in note
    assert "RTX 6000 Ada" in note
    assert find_typed_device("Quadro RTX 6000") == (row, "")


# The traps, each found in a live system.


@pytest.mark.parametrize(
    ("short", "longer"),
    [
        ("NVIDIA A10", "NVIDIA A10G"),
        ("NVIDIA A10", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA H20", "NVIDIA H200"),
        ("NVIDIA B200", "NVIDIA GB200"),
        ("NVIDIA B300", "NVIDIA GB300"),
        ("NVIDIA L4", "NVIDIA L40"),
        ("NVIDIA L4", "NVIDIA L40S"),
        ("NVIDIA L40", "NVIDIA L40S"),
        ("NVIDIA H200", "NVIDIA H200 NVL"),
        ("NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4080 SUPER"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090 Ti"),
        ("NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"),
        ("Quadro RTX 6000", "NVIDIA RTX 6000 Ada Generation"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    ],
)
def test_trap_a_name_within_a_name_is_another_device(short: str, longer: str) -> None:
    assert find_reported_device(short) is not None
    assert find_reported_device(longer) is not None
    assert find_reported_device(short) is not find_reported_device(longer)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100",
        "NVIDIA A100",
        "NVIDIA L20",
        "Tesla K80",
        "",
    ],
)
def test_trap_a_device_nobody_described_is_unknown_not_a_neighbour(name: str) -> None:
    assert find_reported_device(name) is None


@pytest.mark.parametrize(
    ("row", "sparse"),
    [
        ("H100 SXM5 80GB", 1979),
        ("H200 SXM 141GB", 1979),
        ("A100 80GB SXM4", 624),
        ("L4", 242),
        ("L40S", 733),
        ("RTX A6000", 309.7),
        ("B200 SXM 180GB", 4500),
        ("B300 SXM", 3500),
        ("GeForce RTX 4090", 661),
    ],
)
def test_trap_peaks_are_dense_not_sparse(row: str, sparse: float) -> None:
    bf16 = ROWS[row].bf16
    assert bf16 is not None
    assert bf16 < sparse * 0.7


@pytest.mark.parametrize(
    ("row", "fp16"),
    [("GeForce RTX 4090", 165.2), ("GeForce RTX 3090", 71.2), ("L40", 181.05), ("A10G (AWS)", 70)],
)
def test_trap_geforce_l40_and_a10g_run_at_half_rate(row: str, fp16: float) -> None:
    assert ROWS[row].fp16 == fp16
    assert ROWS[row].flop_per_clock == devices_module.FLOP_PER_CLOCK[ROWS[row].compute_capability] / 2


def test_trap_every_geforce_in_the_catalogue_is_half_rate() -> None:
    for row in devices():
        if "GeForce" in row.name:
            assert row.flop_per_clock == devices_module.FLOP_PER_CLOCK[row.compute_capability] / 2
            assert row.tf32 in (None, row.fp32)


def test_trap_an_mi250x_is_counted_per_gcd() -> None:
    row, note = find_typed_device("MI250X")
    assert (row.fp16, row.memory_gb) == (191.5, 64)
    assert "one GCD" in note


@pytest.mark.parametrize("name", ["T4", "V100-32GB", "RTX 6000", "2080 Ti"])
def test_trap_bf16_is_only_emulated_on_volta_and_turing(name: str) -> None:
    row, _ = find_typed_device(name)
    assert (row.bf16, row.tf32, row.fp8) == (None, None, None)
    assert devices_module.has_bf16(row.compute_capability) is False


@pytest.mark.parametrize("row", devices(), ids=lambda row: row.name)
def test_trap_bf16_is_there_exactly_from_sm_80(row: DeviceRow) -> None:
    assert devices_module.has_bf16(row.compute_capability) == (row.bf16 is not None)


@pytest.mark.parametrize("row", devices(), ids=lambda row: row.name)
def test_trap_usable_memory_is_below_the_label(row: DeviceRow) -> None:
    label = row.memory_gb * 2**30
    assert 0.9 * label < row.usable_bytes < label


@pytest.mark.parametrize(
    ("name", "gib"),
    [("T4", 14.75), ("L40S", 44.39), ("4090", 23.52), ("5090", 31.36), ("A100-80GB", 79.25), ("H200", 139.8)],
)
def test_trap_usable_memory_is_what_was_read_on_such_a_card(name: str, gib: float) -> None:
    assert find_typed_device(name)[0].usable_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_trap_the_clock_a_driver_reports_is_not_the_specified_one() -> None:
    row = ROWS["H100 SXM5 80GB"]
    assert row.clock_ghz == 1.83
    too_high = devices_module.derive_peaks("NVIDIA H100", "9.0", 132, 1.98e9)
    assert too_high is not None
    assert too_high.bf16
    assert too_high.bf16 / 1e12 == pytest.approx(1070, rel=0.01)
    assert row.bf16 == 989.4


def test_trap_blackwell_geforce_is_not_blackwell_datacenter() -> None:
    assert devices_module.FLOP_PER_CLOCK["12.0"] * 8 == devices_module.FLOP_PER_CLOCK["10.0"]


def test_trap_links_are_counted_one_way() -> None:
    assert ROWS["H100 SXM5 80GB"].link_gbs == tables.links()["NVLink4"].gbs == 450
    assert ROWS["H800 SXM 80GB"].link_gbs == 200
    assert ROWS["GeForce RTX 4090"].link == "PCIe4 x16"


# Bad names.


@pytest.mark.parametrize(
    ("name", "close"),
    [("H1000", "H100"), ("RTX 4900", "RTX 4090"), ("MI300", "MI300X"), ("L4OS", "L40S")],
)
def test_an_unknown_name_lists_the_nearest(name: str, close: str) -> None:
    with pytest.raises(UnknownName) as caught:
        find_typed_device(name)
    assert close in caught.value.found
    assert "--list" in caught.value.cure


def test_a_name_like_nothing_known_lists_nothing() -> None:
    with pytest.raises(UnknownName, match="no device is called 'banana'") as caught:
        find_typed_device("banana")
    assert "nearest" not in caught.value.found


@pytest.mark.parametrize(("name", "choice"), [("A100", "A100-40GB"), ("v100", "V100-16GB")])
def test_a_name_that_leaves_the_memory_open_is_not_guessed(name: str, choice: str) -> None:
    with pytest.raises(WrongUse, match="comes in 2 sizes") as caught:
        find_typed_device(name)
    assert choice in caught.value.found


def test_a_device_of_an_unknown_generation_has_no_derived_peak() -> None:
    assert devices_module.derive_peaks("NVIDIA X", "13.0", 100, 2e9) is None


def test_a_derived_geforce_has_half_the_rate_and_no_bf16_before_ampere() -> None:
    full = devices_module.derive_peaks("NVIDIA RTX 5000", "7.5", 48, 1.8e9)
    half = devices_module.derive_peaks("NVIDIA GeForce RTX 2070", "7.5", 48, 1.8e9)
    assert full is not None
    assert half is not None
    assert full.fp16 == 2 * (half.fp16 or 0)
    assert half == Peaks(fp32=48 * 1.8e9 * 128, fp16=48 * 1.8e9 * 512)


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1660 Ti", "NVIDIA T1000", "NVIDIA GeForce MX450"])
def test_turing_without_tensor_cores_gets_no_tensor_peaks(name: str) -> None:
    assert devices_module.derive_peaks(name, "7.5", 24, 1.77e9) == Peaks(fp32=24 * 1.77e9 * 128)


@pytest.mark.parametrize("module", [clusters, devices_module, tables])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("row", devices(), ids=lambda row: row.name)
def test_the_name_that_plans_and_tables_show_can_be_typed(row: DeviceRow) -> None:
    assert find_typed_device(row.name)[0] is row
