from __future__ import annotations

import pytest

import machines as m
from trimtab.probe import nvml
from trimtab.probe.machine import replay_machine
from trimtab.probe.visible_devices import VisibleDevices, find_visible_devices

FOUR = m.machine([m.h100() for _ in range(4)])
CUT = m.machine([m.cut_a100(), m.a100_40()])


def see(record: dict[str, object], value: str | None, *, driver: str = "580.95.05") -> VisibleDevices:
    reading = nvml.read_nvml(replay_machine(record))
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return find_visible_devices(reading.devices, env, mig_parents=reading.mig_parents, driver=driver)


def keys(shown: VisibleDevices) -> list[str]:
    return [device.key for device in shown.devices]


UUIDS = [m.uuid_of(index, m.h100()) for index in range(4)]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, ["gpu0", "gpu1", "gpu2", "gpu3"]),
        ("0", ["gpu0"]),
        ("2,0", ["gpu2", "gpu0"]),
        (" 1 , 3 ", ["gpu1", "gpu3"]),
        (UUIDS[2], ["gpu2"]),
        (f"{UUIDS[3]},{UUIDS[1]}", ["gpu3", "gpu1"]),
        (UUIDS[2][:13], ["gpu2"]),
        ("0,2,-1,1", ["gpu0", "gpu2"]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str | None, chosen: list[str]) -> None:
    shown = see(FOUR, value)
    assert keys(shown) == chosen
    assert shown.findings == ()


def test_hiding_every_gpu_is_said() -> None:
    assert "hides every GPU" in see(FOUR, "").notes[0]


@pytest.mark.parametrize(
    ("value", "kept", "what"),
    [
        ("banana", 0, "'banana' is neither a number nor a UUID"),
        ("0,banana,1", 1, "'banana' is neither a number nor a UUID"),
        ("4", 0, "there is no GPU 4"),
        ("0,1,99", 2, "there is no GPU 99"),
        ("GPU-ffff", 0, "no GPU here is GPU-ffff"),
        ("GPU-", 0, "GPU- matches 4 GPUs here"),
        ("0,,1", 1, "'' is neither a number nor a UUID"),
        ("\u00b2", 0, "'\u00b2' is neither a number nor a UUID"),
        ("0,\u0663", 1, "'\u0663' is neither a number nor a UUID"),
        ("9" * 5000, 0, "there is no GPU 9999"),
        ("-\u00b2", 0, "'-\u00b2' is neither a number nor a UUID"),
    ],
)
def test_an_entry_that_names_nothing_is_an_error_and_ends_the_list(value: str, kept: int, what: str) -> None:
    shown = see(FOUR, value)
    assert len(shown.devices) == kept
    (finding,) = shown.findings
    assert what in finding.what
    assert f"{kept} GPU" in finding.cause
    assert "0 to 3" in finding.cure


def test_a_gpu_named_twice_hides_all_as_torch_does() -> None:
    shown = see(FOUR, "0,0")
    assert keys(shown) == []
    assert "twice" in shown.findings[0].what


def test_a_name_on_a_machine_without_gpus_is_an_error() -> None:
    shown = find_visible_devices((), {"CUDA_VISIBLE_DEVICES": "0"})
    assert "no GPU was found" in shown.findings[0].cure


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, ["gpu0/mig0", "gpu0/mig1", "gpu1"]),
        (m.MIG_TWO, ["gpu0/mig1"]),
        (m.MIG_ONE[:12], ["gpu0/mig0"]),
        (f"MIG-{m.uuid_of(0, m.cut_a100())}/9/0", ["gpu0/mig1"]),
        ("0", ["gpu0/mig0"]),
        ("1", ["gpu1"]),
    ],
)
def test_slices_are_chosen_by_uuid_and_by_the_old_form(value: str | None, chosen: list[str]) -> None:
    assert keys(see(CUT, value)) == chosen


def test_an_old_driver_shows_one_slice_and_no_whole_gpu_beside_it() -> None:
    assert keys(see(CUT, None, driver="550.54.15")) == ["gpu0/mig0"]


@pytest.mark.parametrize("value", [None, f"{m.MIG_ONE},{m.MIG_TWO}", f"{m.MIG_ONE},1"])
def test_an_old_driver_leaves_the_first_slice_and_says_so(value: str | None) -> None:
    shown = see(CUT, value, driver="550.54.15")
    assert keys(shown) == ["gpu0/mig0"]
    assert "Driver 550.54.15 shows a process one MIG slice" in shown.notes[-1]
    assert len(keys(see(CUT, value, driver="570.26"))) > 1


def test_a_driver_of_no_known_number_is_taken_for_a_new_one() -> None:
    assert len(keys(see(CUT, None, driver="R570-custom"))) == 3


def test_a_gpu_that_is_cut_cannot_be_named_whole() -> None:
    shown = see(CUT, m.uuid_of(0, m.cut_a100()))
    assert keys(shown) == []
    assert shown.findings
