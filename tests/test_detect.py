from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import machines as m
from trimtab.probe.detect import detect
from trimtab.probe.machine import record_machine, replay_machine, this_machine
from trimtab.spec import Cluster, Severity

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 2**30


def look(record: dict[str, Any]) -> Cluster:
    return detect(replay_machine(record))


def errors(found: Cluster) -> list[str]:
    return [finding.what for finding in found.findings if finding.severity is Severity.ERROR]


@pytest.mark.parametrize("build", m.MACHINES.values(), ids=m.MACHINES)
def test_every_machine_is_described_without_error_and_survives_json(
    build: Callable[[], dict[str, Any]],
) -> None:
    found = look(build())
    assert errors(found) == []
    assert Cluster.from_json(found.to_json()) == found


@pytest.mark.parametrize("build", m.MACHINES.values(), ids=m.MACHINES)
def test_every_known_fact_of_a_device_and_node_has_a_source(
    build: Callable[[], dict[str, Any]],
) -> None:
    found = look(build())
    holders: list[Any] = [*found.nodes, *found.devices, found.versions, found.scheduler]
    for holder in holders:
        told = {
            field
            for field in holder.__struct_fields__
            if field != "sources" and getattr(holder, field) not in (None, (), {})
        }
        assert told <= set(holder.sources) | {"devices"}, type(holder).__name__


def test_a_laptop_without_a_gpu_is_a_cluster_of_one_node() -> None:
    found = look(m.laptop())
    assert [len(node.devices) for node in found.nodes] == [0]
    assert (found.cpu_cores, found.ram_bytes) == (8, 16 * GIB)
    assert found.links == ()


def test_the_real_h200_is_read_as_torch_reads_it() -> None:
    (device,) = look(m.recorded("h200")).devices
    assert (device.name, device.model) == ("NVIDIA H200", "H200 SXM 141GB")
    # torch.cuda.mem_get_info() on the same machine gave this total.
    assert device.memory_bytes == 150109880320
    assert device.free_bytes == 150109880320
    assert (device.compute_capability, device.bf16, device.multiprocessors) == ("9.0", True, 132)
    assert device.peaks.bf16 == pytest.approx(989.4e12)
    assert (device.power_limit_w, device.ecc, device.pcie_generation) == (700, True, 5)


def test_a_t4_has_no_bf16_and_less_than_its_label() -> None:
    (device,) = look(m.one_t4()).devices
    assert device.bf16 is False
    assert device.peaks.bf16 is None
    assert device.peaks.fp16 == 65e12
    assert device.memory_bytes == (15360 - 448) * 2**20


def test_eight_h100_are_joined_by_nvlink_and_bound_by_their_cgroup() -> None:
    found = look(m.eight_h100())
    (link,) = found.links
    assert (link.kind, link.devices) == ("NVLink4", tuple(range(8)))
    assert link.bandwidth_bytes_per_s == 450e9
    assert (found.cpu_cores, found.ram_bytes) == (32, 256 * GIB)
    assert found.nodes[0].sources["cpu_cores"] == "detected: cgroup /sys/fs/cgroup/kubepods/pod7"
    assert found.scheduler.name == "kubernetes"


def test_the_second_node_of_a_slurm_job_is_assumed_and_said_to_be() -> None:
    found = look(m.two_by_eight_a100())
    assert [(node.name, len(node.devices)) for node in found.nodes] == [("gpu07", 8), ("gpu08", 8)]
    other = found.nodes[1].devices[0]
    assert other.sources["memory_bytes"] == "assumed: like gpu07, by SLURM_JOB_NUM_NODES"
    assert (other.uuid, other.free_bytes) == (None, None)
    assert any("only gpu07 was looked at" in note for note in found.notes)
    assert found.nodes[0].cpu_cores == 48
    assert found.nodes[0].ram_bytes == 400 * GIB
    between = [link for link in found.links if link.node is None]
    assert between[0].bandwidth_bytes_per_s == 25e9
    assert (found.scheduler.launcher, found.scheduler.rank) == ("srun", 3)


def test_a_mig_slice_has_its_share_of_peak_and_bandwidth() -> None:
    (device,) = look(m.mig_slice()).devices
    assert device.slice is not None
    assert (device.slice.profile, device.multiprocessors) == ("1g.5gb", 14)
    assert device.peaks.bf16 == pytest.approx(312e12 * 14 / 108)
    assert device.bandwidth_bytes_per_s == pytest.approx(1555e9 / 8)
    assert device.memory_bytes == 4864 * 2**20


def test_mixed_cards_come_in_cudas_order_with_the_bridge_between_the_right_two() -> None:
    found = look(m.mixed())
    assert [device.model for device in found.devices] == [
        "GeForce RTX 4090",
        "GeForce RTX 3090",
        "GeForce RTX 3090",
    ]
    kinds = {link.devices: (link.kind, link.bandwidth_bytes_per_s) for link in found.links}
    bus = ("PCIe4 x16", 31e9)
    assert kinds == {(0, 1): bus, (0, 2): bus, (1, 2): ("NVLink3", 56.25e9)}
    assert any("CUDA_DEVICE_ORDER" in note for note in found.notes)


@pytest.mark.parametrize(
    ("gpu", "answer", "kind", "gbs"),
    [
        (m.h100, 6, "NVLink4", 450),
        # An H100 has been seen to answer with the enum of NVLink 5.
        (m.h100, 7, "NVLink4", 450),
        (m.a100_40, 4, "NVLink3", 300),
        (m.a100_40, 5, "NVLink3", 300),
    ],
)
def test_the_nvlink_version_is_an_enum_that_the_catalogue_corrects(
    gpu: Callable[..., m.Gpu], answer: int, kind: str, gbs: float
) -> None:
    (link,) = look(m.machine([gpu(nvlink_version=answer) for _ in range(2)])).links
    assert (link.kind, link.bandwidth_bytes_per_s) == (kind, gbs * 1e9)


@pytest.mark.parametrize(
    ("capability", "answer", "kind", "gbs"),
    [
        ((9, 0), 7, "NVLink4", 4 * 25),
        ((8, 6), 5, "NVLink3", 4 * 14.0625),
        ((8, 0), 5, "NVLink3", 4 * 25),
        ((7, 0), 3, "NVLink2", 4 * 25),
        ((10, 0), 7, "NVLink5", 4 * 50),
        ((13, 0), 8, "NVLink6", None),
        ((13, 0), 99, "NVLink", None),
    ],
)
def test_links_of_an_unknown_card_go_by_its_chip(
    capability: tuple[int, int], answer: int, kind: str, gbs: float | None
) -> None:
    pair = [
        m.h100(
            name="NVIDIA Something",
            capability=capability,
            nvlink_version=answer,
            switch_links=0,
            peer_links={1 - index: 4},
        )
        for index in range(2)
    ]
    (link,) = look(m.machine(pair)).links
    assert (link.kind, link.bandwidth_bytes_per_s) == (kind, None if gbs is None else gbs * 1e9)


def test_half_the_links_of_a_bridge_are_half_of_its_rate() -> None:
    pair = [m.rtx3090(nvlink_version=5, peer_links={1 - index: 2}) for index in range(2)]
    (link,) = look(m.machine(pair)).links
    assert link.bandwidth_bytes_per_s == pytest.approx(56.25e9 / 2)
    assert link.source == "detected: NVML: 2 links straight, each as in GeForce RTX 3090"


def test_straight_links_to_every_peer_add_up() -> None:
    def board(index: int) -> m.Gpu:
        peers = {other: 2 for other in range(4) if other != index}
        return m.h100(
            name="Tesla V100-SXM2-16GB",
            total_mib=16384,
            reserved_mib=256,
            capability=(7, 0),
            cores=5120,
            nvlink_version=3,
            switch_links=0,
            peer_links=peers,
        )

    (link,) = look(m.machine([board(index) for index in range(4)])).links
    assert (link.bandwidth_bytes_per_s, link.total_bytes_per_s) == (50e9, 150e9)


@pytest.mark.parametrize(("width", "gbs"), [(16, 31), (8, 15.5), (4, 7.75)])
def test_a_bus_is_as_fast_detected_as_stated(width: int, gbs: float) -> None:
    (link,) = look(m.machine([m.rtx4090(pcie=(4, width)) for _ in range(2)])).links
    assert link.bandwidth_bytes_per_s == gbs * 1e9


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_the_numa_node_is_that_of_the_pci_address(text: str | None, node: int | None) -> None:
    files = {} if text is None else {"/sys/bus/pci/devices/0000:01:00.0/numa_node": text}
    (device,) = look(m.machine([m.h100()], read=files)).devices
    assert device.numa_node == node
    assert device.sources.get("numa_node") == (None if node is None else "detected: /sys/bus/pci/devices")


def test_mixed_cards_keep_the_pci_order_where_it_is_asked_for() -> None:
    record = m.mixed()
    record["env"] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [device.compute_capability for device in look(record).devices] == ["8.6", "8.9", "8.6"]


def test_an_unknown_card_is_described_from_its_own_properties_and_marked() -> None:
    laptop_4090 = m.rtx4090(name="NVIDIA GeForce RTX 4090 Laptop GPU", total_mib=16376, cores=9728)
    (device,) = look(m.machine([laptop_4090])).devices
    assert device.model is None
    assert device.multiprocessors == 76
    # 76 SMs x 512 per clock (half rate: GeForce) x 3.105 GHz
    assert device.peaks.bf16 == pytest.approx(76 * 512 * 3.105e9)
    assert device.sources["peaks"].startswith("derived: 76 multiprocessors at 3.10 GHz")
    assert device.bandwidth_bytes_per_s == pytest.approx(1008e9, rel=1e-3)


def test_a_card_that_shares_a_name_but_not_a_chip_is_not_taken_for_it() -> None:
    twelve = m.rtx3090(name="NVIDIA GeForce RTX 3080", total_mib=12288, cores=8960)
    found = look(m.machine([twelve]))
    assert found.devices[0].model is None
    assert "70 multiprocessors, and GeForce RTX 3080 10GB has 68" in found.findings[0].evidence


def test_a_lost_gpu_is_an_error_with_a_cure_and_the_others_are_still_listed() -> None:
    lost = m.h100(faults={"nvmlDeviceGetName": (15, "GPU is lost")})
    found = look(m.machine([m.h100(), lost, m.h100()]))
    assert len(found.devices) == 2
    assert errors(found) == ["GPU 1 does not answer."]
    assert "Reboot the node" in found.findings[0].cure


def test_a_gpu_that_is_lost_half_way_does_not_end_detection() -> None:
    dying = m.h100(faults={"nvmlDeviceGetPowerManagementLimit": (15, "GPU is lost")})
    found = look(m.machine([m.h100(), dying]))
    assert len(found.devices) == 1
    assert errors(found) == ["GPU 1 does not answer."]


def test_a_gpu_that_is_lost_while_links_are_read_is_reported() -> None:
    record = m.machine([m.h100(), m.h100()])
    record["nvml"]["nvmlDeviceGetTopologyCommonAncestor gpu0 gpu1"] = {"fault": [15, "GPU is lost"]}
    found = look(record)
    assert errors(found) == ["A GPU does not answer."]
    assert len(found.devices) == 2


def test_a_fact_the_driver_will_not_tell_stays_unknown() -> None:
    shy = m.h100(faults={"nvmlDeviceGetPowerManagementLimit": (999, "Unknown Error")})
    (device,) = look(m.machine([shy])).devices
    assert device.power_limit_w is None
    assert "power_limit_w" not in device.sources


def test_gpus_of_other_jobs_behind_a_cgroup_are_passed_over() -> None:
    theirs = m.h100(faults={"nvmlDeviceGetName": (4, "Insufficient Permissions")})
    found = look(m.machine([m.h100(), theirs]))
    assert len(found.devices) == 1
    assert errors(found) == []


@pytest.mark.parametrize(
    ("fault", "cure"),
    [
        ((18, "Driver/library version mismatch"), "Reboot"),
        ((9, "Driver Not Loaded"), "modprobe"),
        ((999, "Unknown Error"), "nvidia-smi"),
    ],
)
def test_a_driver_that_refuses_is_an_error_with_a_cure(fault: tuple[int, str], cure: str) -> None:
    names, files = m.on_bus("0000:01:00.0")
    found = look(m.machine(nvml_fault=fault, names=names, read=files))
    assert errors(found) == ["NVML does not answer."]
    assert cure in found.findings[0].cure


def test_a_library_without_driver_and_without_gpu_is_nothing_to_report() -> None:
    found = look(m.machine(nvml_fault=(9, "Driver Not Loaded")))
    assert (found.devices, found.findings) == ((), ())


@pytest.mark.parametrize("code", [1, 15, 16, 999])
def test_a_driver_that_will_not_tell_its_version_does_not_end_detection(code: int) -> None:
    record = m.machine([m.h100()])
    for function in ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"):
        record["nvml"][function] = {"fault": [code, "no"]}
    found = look(record)
    assert len(found.devices) == 1
    assert (found.versions.driver, found.versions.driver_cuda) == (None, None)


def test_mig_mode_without_slices_leaves_nothing_to_use() -> None:
    found = look(m.machine([m.a100_40(mig_mode=True), m.a100_40()]))
    assert [device.bus_id for device in found.devices] == [m.bus_id(1)]
    assert errors(found) == ["GPU 0 is in MIG mode and has no slices: CUDA cannot use it."]
    assert "nvidia-smi -i 0 -mig 0" in found.findings[0].cure


def test_naming_a_gpu_in_mig_mode_without_slices_is_an_error() -> None:
    found = look(m.machine([m.a100_40(mig_mode=True)], env={"CUDA_VISIBLE_DEVICES": "0"}))
    assert found.devices == ()
    assert any("names a GPU that cannot be used: GPU 0 is in MIG mode" in what for what in errors(found))


NO_MEMORY = {
    f"nvmlDeviceGetMemoryInfo {m.MEMORY_V2}": (3, "Not Supported"),
    "nvmlDeviceGetMemoryInfo": (3, "Not Supported"),
}


def test_a_device_that_shares_the_hosts_memory_is_kept() -> None:
    gb10 = m.h100(name="NVIDIA GB10", capability=(12, 1), cores=6144, switch_links=0, faults=NO_MEMORY)
    found = look(m.machine([gb10]))
    (device,) = found.devices
    assert (device.memory_bytes, device.free_bytes) == (512 * GIB, 480 * GIB)
    assert device.sources["memory_bytes"] == "assumed: shared with the host"
    assert errors(found) == []


def test_a_device_whose_memory_nobody_knows_is_an_error() -> None:
    found = look(m.machine([m.h100(faults=NO_MEMORY)], host={"ram": None}))
    assert found.devices == ()
    assert errors(found) == ["GPU 0 does not answer."]


@pytest.mark.parametrize(
    "changes",
    [
        {"total_mib": 0, "reserved_mib": 0},
        {"total_mib": 10, "reserved_mib": 20},
        {"name": ""},
        {"power_w": 0.1},
    ],
)
def test_an_impossible_answer_is_a_finding_and_not_a_crash(changes: dict[str, Any]) -> None:
    found = look(m.machine([m.h100(), m.h100(**changes)]))
    assert [device.bus_id for device in found.devices] == [m.bus_id(0)]
    assert "impossible values" in errors(found)[0]


def test_a_pcie_generation_of_0_is_unknown() -> None:
    (device,) = look(m.machine([m.h100(pcie=(0, 0))])).devices
    assert (device.pcie_generation, device.pcie_width) == (None, None)


@pytest.mark.parametrize(
    ("host", "env", "outside"),
    [
        ("gpu07", {}, False),
        ("gpu08.cluster.example", {}, False),
        ("login1", {}, True),
        ("ip-10-0-0-7", {"SLURMD_NODENAME": "gpu07"}, False),
    ],
)
def test_a_host_outside_the_allocation_stands_for_no_node_of_it(
    host: str, env: dict[str, str], outside: bool
) -> None:
    gpus = [m.a100_40() for _ in range(8)]
    found = look(m.machine(gpus, env=m.SLURM_TWO_NODES | env, host={"name": host}))
    assert len(found.nodes) == (1 if outside else 2)
    said = [finding for finding in found.findings if f"This is {host}" in finding.what]
    assert len(said) == outside
    # The grant binds the nodes of the job only.
    assert found.nodes[0].cpu_cores == (64 if outside else 48)
    if outside:
        assert said[0].severity is Severity.WARNING
        assert "srun" in said[0].cure
        assert found.links[-1].node == 0


def test_another_process_on_the_gpu_is_named_with_what_it_holds() -> None:
    busy = m.h100(used_mib=20480, processes=[(4242, 100 * 2**20), (77, 20 * GIB)])
    record = m.machine([busy], host={"process:77": "python3"})
    found = look(record)
    (device,) = found.devices
    assert device.processes is not None
    assert [process.pid for process in device.processes] == [77]
    assert found.findings[0].what == "Another job holds 20.0 GiB of GPU 0."
    assert "python3 (pid 77)" in found.findings[0].evidence


def test_a_power_cap_is_a_warning() -> None:
    found = look(m.machine([m.h100(power_w=400)]))
    assert found.findings[0].what == "GPU 0 is capped at 400 W of 700 W."
    assert found.findings[0].severity is Severity.WARNING


def test_fewer_gpus_than_slurm_granted_is_a_warning() -> None:
    env = m.SLURM_TWO_NODES | {"CUDA_VISIBLE_DEVICES": "0,1"}
    found = look(m.machine([m.a100_40() for _ in range(8)], env=env, host={"name": "gpu07"}))
    assert any("Slurm granted 8 GPUs" in finding.what for finding in found.findings)


SMI_LINE = (
    "0, GPU-1234, NVIDIA A10, 23028, 22515, 480, 8.6, 150.00, 150.00, Enabled, "
    "00000000:00:1E.0, 4, 16, 1695, 550.54.15\n"
)
SMI_COMMAND = (
    "nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free,memory.reserved,compute_cap,power.limit,"
    "power.default_limit,ecc.mode.current,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,"
    "driver_version --format=csv,noheader,nounits"
)


def test_nvidia_smi_answers_where_nvml_is_missing() -> None:
    record = m.machine(
        None,
        read={"/proc/driver/nvidia/version": "NVRM version"},
        run={SMI_COMMAND: SMI_LINE},
        torch_cuda="12.8",
    )
    found = look(record)
    (device,) = found.devices
    assert (device.model, device.ecc, device.power_limit_w) == ("A10", True, 150)
    assert device.memory_bytes == (23028 - 480) * 2**20
    assert device.sources["memory_bytes"] == "detected: nvidia-smi"
    assert found.versions.driver == "550.54.15"


def test_a_link_names_who_told_of_it() -> None:
    lines = SMI_LINE + SMI_LINE.replace("0, GPU-1234", "1, GPU-5678").replace("1E.0", "1F.0")
    record = m.machine(
        None,
        read={"/proc/driver/nvidia/version": "NVRM version"},
        run={SMI_COMMAND: lines},
        torch_cuda="12.8",
    )
    (link,) = look(record).links
    assert (link.kind, link.source) == ("PCIe4 x16", "detected: nvidia-smi")


@pytest.mark.parametrize(
    ("memory", "kept"), [("[N/A], [N/A], [N/A]", True), ("[Unknown Error], [N/A], [N/A]", False)]
)
def test_nvidia_smi_without_memory_means_the_hosts_or_a_finding(memory: str, kept: bool) -> None:
    record = m.machine(
        None,
        read={"/proc/driver/nvidia/version": "NVRM version"},
        run={SMI_COMMAND: SMI_LINE.replace("23028, 22515, 480", memory).replace("A10", "GB10")},
        torch_cuda="12.8",
    )
    found = look(record)
    assert [device.memory_bytes for device in found.devices] == [512 * GIB] * kept
    assert errors(found) == ([] if kept else ["GPU 0 does not report how much memory it has."])


def test_torch_answers_where_neither_nvml_nor_nvidia_smi_does() -> None:
    from trimtab.probe.devices import _TORCH_SCRIPT

    answer = (
        '[{"name": "AMD Instinct MI300X", "total": 205822885888, "free": 205000000000,'
        ' "multiprocessors": 304, "capability": "gfx942", "hip": true, "uuid": null}]'
    )
    record = m.machine(None, names={"/dev": ["kfd"]}, run={f"python3 -c {_TORCH_SCRIPT}": answer})
    (device,) = look(record).devices
    assert (device.model, device.vendor, device.bf16) == ("MI300X 192GB", "amd", True)
    assert device.sources["memory_bytes"] == "detected: torch"


def test_a_gpu_on_the_bus_without_a_driver_is_an_error() -> None:
    record = m.machine(
        None,
        names={"/sys/bus/pci/devices": ["0000:01:00.0", "0000:02:00.0"]},
        read={
            "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "/sys/bus/pci/devices/0000:02:00.0/vendor": "0x8086\n",
        },
    )
    found = look(record)
    assert errors(found) == ["1 NVIDIA GPU on the PCI bus, and no driver for it."]


def test_a_recording_replays_to_the_same_cluster() -> None:
    world, record = record_machine(this_machine())
    seen = detect(world)
    again = look(record)
    assert again == seen
