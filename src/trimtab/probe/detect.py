"""Detect the hardware this process may use, after scheduler, cgroups, CUDA_VISIBLE_DEVICES and MIG."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.catalog.clusters import assume_network_link
from trimtab.probe import devices as devices_module
from trimtab.probe import host, nvml, scheduler, versions
from trimtab.probe.devices import SeenDevice, build_device
from trimtab.probe.links import find_device_links
from trimtab.probe.machine import Machine, this_machine
from trimtab.probe.visible_devices import HIDES_ALL, VARIABLE, VisibleDevices, find_visible_devices
from trimtab.spec import Cluster, Device, Finding, Link, Node, Scheduler, Severity
from trimtab.units import MIB, format_bytes, plural

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.probe.nvml import NvmlReading

TENANT_BYTES = 256 * MIB
"""Another process with less memory than this has little more than a CUDA context."""
CAPPED_SHARE = 0.95
"""A power limit below this share of the default slows the device."""


@dataclass(frozen=True, kw_only=True)
class DetectedDevices:
    """The devices of this node, from NVML, nvidia-smi or torch."""

    visible: VisibleDevices
    reading: NvmlReading
    driver: str | None = None
    driver_source: str = "NVML"
    hidden: int = 0
    """Devices that exist and are not visible to this process."""


def detect(world: Machine | None = None) -> Cluster:
    """Return the hardware this process may use. Machine problems do not raise: they are in `findings`."""
    world = world or this_machine()
    schedule, schedule_findings = scheduler.read_scheduler(world.env)
    name = world.host("name") or "localhost"
    outside_findings = _check_host_in_allocation(name, world, schedule)
    # Limits granted on other nodes do not apply on this host.
    granted = Scheduler() if outside_findings else schedule
    detected = _detect_devices(world)
    devices, device_findings = _describe_devices(detected.visible.devices)
    limits = host.read_host(world, granted)
    node = Node(
        name=name,
        devices=devices,
        cpu_cores=limits.cpu_cores,
        cpu_cores_total=limits.cpu_cores_total,
        ram_bytes=limits.ram_bytes,
        ram_free_bytes=limits.ram_free_bytes,
        shm_bytes=limits.shm_bytes,
        sources=limits.sources | {"devices": _devices_source(devices)},
    )
    software = versions.read_versions(
        world, detected.driver, detected.reading.driver_cuda, detected.driver_source
    )
    indices = {device.index for device in devices}
    links = tuple(
        link
        for link in find_device_links(list(detected.visible.devices), detected.reading)
        if set(link.devices) <= indices
    )
    nodes, links, node_notes = _add_other_nodes(node, links, granted, world)
    return Cluster(
        nodes=nodes,
        links=links,
        scheduler=schedule,
        versions=software,
        notes=(*_build_notes(detected), *node_notes),
        findings=(
            *detected.reading.findings,
            *detected.visible.findings,
            *_check_driver(world, detected),
            *versions.find_mismatches(software, devices),
            *schedule_findings,
            *outside_findings,
            *_check_granted_gpus(devices, granted),
            *device_findings,
        ),
    )


def as_cluster(
    on: str | Path | Cluster | None, *, network: str | None = None, host_memory: str | None = None
) -> Cluster:
    """Return the cluster for `on`: a Cluster, a text such as 4xH100, a detect file; None is this machine.

    `network` states the bandwidth between nodes, and `host_memory` the memory of each node's host.
    """
    from os import PathLike, fspath
    from pathlib import Path

    from trimtab.catalog.clusters import parse_cluster, read_cluster_file, with_host_memory, with_network
    from trimtab.errors import WrongUse

    if isinstance(on, Cluster):
        cluster = on
    elif on is None:
        cluster = detect()
    elif isinstance(on, PathLike):
        cluster = read_cluster_file(Path(fspath(on)))
    elif isinstance(on, str):
        cluster = parse_cluster(on)
    else:
        raise WrongUse(
            f"cluster({on!r})",
            found=f"it is of type {type(on).__name__}",
            cure="Give a string such as '4xA100-40GB', the path of a detect file, or None for this machine.",
        )
    cluster = cluster if network is None else with_network(cluster, network)
    return cluster if host_memory is None else with_host_memory(cluster, host_memory)


def _devices_source(devices: tuple[Device, ...]) -> str:
    return devices[0].sources["name"] if devices else "detected: none found"


def _detect_devices(world: Machine) -> DetectedDevices:
    """Return the devices from the first of NVML, nvidia-smi and torch that answers."""
    reading = nvml.read_nvml(world)
    seen, driver, source = reading.devices, reading.driver, "NVML"
    if reading.absent and _has_nvidia_driver(world):
        seen, driver, smi_findings = devices_module.read_nvidia_smi(world)
        reading = replace(reading, findings=(*reading.findings, *smi_findings))
        source = "nvidia-smi"
    if not seen and _should_ask_torch(world, reading):
        # torch has already applied CUDA_VISIBLE_DEVICES.
        torch_devices = devices_module.read_torch_devices(world)
        if torch_devices:
            return DetectedDevices(
                visible=VisibleDevices(devices=torch_devices), reading=reading, driver_source="torch"
            )
    visible = find_visible_devices(seen, world.env, mig_parents=reading.mig_parents, driver=driver)
    usable = [seen_device for seen_device in seen if seen_device.key not in reading.mig_parents]
    return DetectedDevices(
        visible=visible,
        reading=reading,
        driver=driver,
        driver_source=source,
        hidden=len(usable) - len(visible.devices),
    )


def _has_nvidia_driver(world: Machine) -> bool:
    """Return whether an NVIDIA driver is loaded. This check is cheaper than starting nvidia-smi."""
    return bool(world.read("/proc/driver/nvidia/version")) or "nvidiactl" in world.names("/dev")


def _should_ask_torch(world: Machine, reading: NvmlReading) -> bool:
    """Return whether to ask torch. It takes seconds: only for a device that NVML did not describe."""
    if world.env.get(VARIABLE, "0").strip() in HIDES_ALL:
        return False
    amd = "kfd" in world.names("/dev")
    return amd or (bool(reading.absent) and _has_nvidia_driver(world))


def _describe_devices(seen: tuple[SeenDevice, ...]) -> tuple[tuple[Device, ...], list[Finding]]:
    devices, findings = [], []
    for index, seen_device in enumerate(seen):
        try:
            described, odd = build_device(seen_device, index)
        except ValueError as error:
            findings.append(_impossible_value_finding(seen_device, str(error)))
            continue
        devices.append(described)
        findings += [*odd, *_check_other_processes(described), *_check_power_limit(described)]
    return tuple(devices), findings


def _impossible_value_finding(seen_device: SeenDevice, wrong: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{seen_device.source} reports impossible values for {seen_device.name or seen_device.key}.",
        evidence=wrong,
        cause="The driver answered with nonsense, as broken devices and some virtual ones do.",
        cure="Run `nvidia-smi -q`; if it is wrong there too, restart the driver or the node.",
    )


def _check_other_processes(device: Device) -> list[Finding]:
    """Return a finding if other processes use memory of a device."""
    heavy = [p for p in device.processes or () if p.used_bytes is None or p.used_bytes > TENANT_BYTES]
    if not heavy:
        return []
    sizes = [p.used_bytes for p in heavy if p.used_bytes is not None]
    amount = format_bytes(sum(sizes)) if sizes else "memory"
    listed = ", ".join(f"{p.name or 'process'} (pid {p.pid})" for p in heavy[:4])
    return [
        Finding(
            severity=Severity.WARNING,
            what=f"Another job holds {amount} of GPU {device.index}.",
            evidence=listed,
            cause="The GPU is shared, or an earlier run was not ended.",
            cure="Use the memory that is free, or end the other process.",
        )
    ]


def _check_power_limit(device: Device) -> list[Finding]:
    limit, default = device.power_limit_w, device.power_default_w
    if not limit or not default or limit >= default * CAPPED_SHARE:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            what=f"GPU {device.index} is capped at {limit:.0f} W of {default:.0f} W.",
            evidence=f"power limit {limit:.0f} W, default {default:.0f} W",
            cause="Somebody set a power limit; peak rates are not reached under it.",
            cure=f"Leave it, or ask an administrator for `nvidia-smi -pl {default:.0f}`.",
        )
    ]


def _build_notes(detected: DetectedDevices) -> tuple[str, ...]:
    notes = list(detected.visible.notes)
    if detected.hidden > 0 and detected.visible.devices and not detected.visible.findings:
        notes.append(f"{detected.hidden} more on this node, not visible to this process.")
    return tuple(notes)


def _check_driver(world: Machine, detected: DetectedDevices) -> list[Finding]:
    """Return a finding if a GPU is on the PCI bus and no driver reports it."""
    if detected.visible.devices or detected.hidden or detected.reading.findings:
        return []
    if world.env.get(VARIABLE, "0").strip() in HIDES_ALL:
        return []
    on_bus = [
        pci_accelerator
        for pci_accelerator in host.list_pci_accelerators(world)
        if pci_accelerator.endswith("NVIDIA")
    ]
    if not on_bus:
        return []
    return [
        Finding(
            severity=Severity.ERROR,
            what=f"{plural(len(on_bus), 'NVIDIA GPU')} on the PCI bus, and no driver for it.",
            evidence=on_bus[0],
            cause=f"No NVIDIA driver is installed, or given to this container ({detected.reading.absent}).",
            cure="Install the NVIDIA driver; in a container, start it with --gpus all.",
        )
    ]


def _check_granted_gpus(devices: tuple[Device, ...], schedule: Scheduler) -> list[Finding]:
    granted = schedule.gpus_on_node
    if granted is None or len(devices) >= granted:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            what=f"Slurm granted {granted} GPUs on this node, and {len(devices)} can be used.",
            evidence=f"SLURM_GPUS_ON_NODE={granted}",
            cause="CUDA_VISIBLE_DEVICES hides some, this step asked for fewer, or a GPU is broken.",
            cure="Check CUDA_VISIBLE_DEVICES, and the --gpus options of srun.",
        )
    ]


def _check_host_in_allocation(name: str, world: Machine, schedule: Scheduler) -> list[Finding]:
    """Return a finding if this host is not a node of the Slurm job, as a login node under salloc."""
    listed = schedule.node_names
    if not listed or _find_own_name(name, world, schedule) is not None:
        return []
    more = ", ..." if len(listed) > 2 else ""  # noqa: PLR2004 - two are enough to recognise them
    return [
        Finding(
            severity=Severity.WARNING,
            what=f"This is {name}, which is not one of the {len(listed)} nodes of Slurm job "
            f"{schedule.job_id or '?'}: nothing is known of those.",
            evidence=f"SLURM_JOB_NODELIST names {', '.join(listed[:2])}{more}",
            cause="salloc leaves the shell on the host it was called on.",
            cure="Run `srun --ntasks=1 trimtab detect` to look at a node of the job.",
        )
    ]


def _find_own_name(name: str, world: Machine, schedule: Scheduler) -> str | None:
    """Return the name of this host in the node list, which may differ from its own; None if not listed."""
    own = {alias.partition(".")[0] for alias in (name, world.env.get("SLURMD_NODENAME", ""))}
    return next((node_name for node_name in schedule.node_names if node_name.partition(".")[0] in own), None)


def _add_other_nodes(
    node: Node, links: tuple[Link, ...], schedule: Scheduler, world: Machine
) -> tuple[tuple[Node, ...], tuple[Link, ...], tuple[str, ...]]:
    """Return all nodes of the allocation with their links and a note; other nodes are copies of this one."""
    count = schedule.num_nodes or 1
    if count == 1:
        return (node,), links, ()
    own = _find_own_name(node.name, world, schedule)
    others = [name for name in schedule.node_names if name != own]
    others += [f"{node.name}+{number}" for number in range(len(others) + 1, count)]
    assumption = f"assumed: like {node.name}, by {schedule.sources['num_nodes'].partition(': ')[2]}"
    other_nodes = [_copy_node(node, name, assumption) for name in others[: count - 1]]
    copies = [
        _copy_link(link, number + 1, assumption) for number in range(len(other_nodes)) for link in links
    ]
    models = {device.model or device.name for device in node.devices}
    note = (
        f"{count} nodes were granted; only {node.name} was looked at, and the others are taken to be like it."
    )
    return (node, *other_nodes), (*links, *copies, assume_network_link(models, len(node.devices))), (note,)


def _copy_node(node: Node, name: str, assumption: str) -> Node:
    devices = tuple(
        device.replace(
            uuid=None,
            bus_id=None,
            processes=None,
            free_bytes=None,
            sources={
                field: assumption
                for field in device.sources
                if field not in ("uuid", "bus_id", "processes", "free_bytes")
            },
        )
        for device in node.devices
    )
    sources = dict.fromkeys((key for key in node.sources if key != "ram_free_bytes"), assumption)
    return node.replace(name=name, devices=devices, ram_free_bytes=None, sources=sources)


def _copy_link(link: Link, node: int, assumption: str) -> Link:
    """Return the same link for another node."""
    return link.replace(node=node, source=assumption)
