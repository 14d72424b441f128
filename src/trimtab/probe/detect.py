"""detect: the hardware this process may use, as scheduler, cgroups, CUDA_VISIBLE_DEVICES and MIG leave it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.catalog.clusters import network_link
from trimtab.probe import devices as devices_module
from trimtab.probe import host, nvml, scheduler, versions
from trimtab.probe.devices import SeenDevice, device
from trimtab.probe.links import device_links
from trimtab.probe.machine import Machine, this_machine
from trimtab.probe.visible_devices import HIDES_ALL, VARIABLE, Visible, visible
from trimtab.spec import Cluster, Device, Finding, Link, Node, Scheduler, Severity
from trimtab.units import MIB, format_bytes, plural

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.probe.nvml import NvmlReading

TENANT_BYTES = 256 * MIB
"""Another process below this holds little more than a context."""
CAPPED_SHARE = 0.95
"""A power limit below this share of the default slows the device."""


@dataclass(frozen=True, kw_only=True)
class FoundDevices:
    """The devices of this node, whoever reported them."""

    visible: Visible
    reading: NvmlReading
    driver: str | None = None
    driver_source: str = "NVML"
    hidden: int = 0
    """Devices that exist and are not visible to this process."""


def detect(world: Machine | None = None) -> Cluster:
    """What this process may use. Never raises for a machine in disorder: that is told in `findings`."""
    world = world or this_machine()
    schedule, schedule_findings = scheduler.read_scheduler(world.env)
    name = world.host("name") or "localhost"
    outside = _outside(name, world, schedule)
    # What was granted on other nodes binds nothing here.
    granted = Scheduler() if outside else schedule
    found = _devices(world)
    devices, device_findings = _described(found.visible.devices)
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
    software = versions.read_versions(world, found.driver, found.reading.driver_cuda, found.driver_source)
    known = {device.index for device in devices}
    links = tuple(
        link
        for link in device_links(list(found.visible.devices), found.reading)
        if set(link.devices) <= known
    )
    nodes, links, node_notes = _all_nodes(node, links, granted, world)
    return Cluster(
        nodes=nodes,
        links=links,
        scheduler=schedule,
        versions=software,
        notes=(*_notes(found), *node_notes),
        findings=(
            *found.reading.findings,
            *found.visible.findings,
            *_driverless(world, found),
            *versions.misfits(software, devices),
            *schedule_findings,
            *outside,
            *_fewer_than_granted(devices, granted),
            *device_findings,
        ),
    )


def as_cluster(on: str | Path | Cluster | None, *, network: str | None = None) -> Cluster:
    """Return the cluster that `on` is or names: a text such as 4xH100, a detect file; None is this machine.

    `network` states the bandwidth between nodes.
    """
    from os import PathLike, fspath
    from pathlib import Path

    from trimtab.catalog.clusters import from_file, stated, with_network
    from trimtab.errors import WrongUse

    if isinstance(on, Cluster):
        cluster = on
    elif on is None:
        cluster = detect()
    elif isinstance(on, PathLike):
        cluster = from_file(Path(fspath(on)))
    elif isinstance(on, str):
        cluster = stated(on)
    else:
        raise WrongUse(
            f"cluster({on!r})",
            found=f"it is of type {type(on).__name__}",
            cure="Give a string such as '4xA100-40GB', the path of a detect file, or None for this machine.",
        )
    return cluster if network is None else with_network(cluster, network)


def _devices_source(devices: tuple[Device, ...]) -> str:
    return devices[0].sources["name"] if devices else "detected: none found"


def _devices(world: Machine) -> FoundDevices:
    """Devices from the first of NVML, nvidia-smi and torch that answers."""
    reading = nvml.read_nvml(world)
    seen, driver, source = reading.devices, reading.driver, "NVML"
    if reading.absent and _looks_nvidia(world):
        seen, driver, silent = devices_module.from_nvidia_smi(world)
        reading = replace(reading, findings=(*reading.findings, *silent))
        source = "nvidia-smi"
    if not seen and _torch_may_know(world, reading):
        # torch has applied the variables itself.
        own = devices_module.from_torch(world)
        if own:
            return FoundDevices(visible=Visible(devices=own), reading=reading, driver_source="torch")
    shown = visible(seen, world.env, mig_parents=reading.mig_parents, driver=driver)
    usable = [one for one in seen if one.key not in reading.mig_parents]
    return FoundDevices(
        visible=shown,
        reading=reading,
        driver=driver,
        driver_source=source,
        hidden=len(usable) - len(shown.devices),
    )


def _looks_nvidia(world: Machine) -> bool:
    """Whether an NVIDIA driver is loaded: cheaper to ask than starting nvidia-smi in vain."""
    return bool(world.read("/proc/driver/nvidia/version")) or "nvidiactl" in world.names("/dev")


def _torch_may_know(world: Machine, reading: NvmlReading) -> bool:
    """Whether to start torch, which takes seconds: only where a device exists that nobody else described."""
    if world.env.get(VARIABLE, "0").strip() in HIDES_ALL:
        return False
    amd = "kfd" in world.names("/dev")
    return amd or (bool(reading.absent) and _looks_nvidia(world))


def _described(seen: tuple[SeenDevice, ...]) -> tuple[tuple[Device, ...], list[Finding]]:
    devices, findings = [], []
    for index, seen_device in enumerate(seen):
        try:
            described, odd = device(seen_device, index)
        except ValueError as error:
            findings.append(_impossible(seen_device, str(error)))
            continue
        devices.append(described)
        findings += [*odd, *_tenants(described), *_capped(described)]
    return tuple(devices), findings


def _impossible(seen_device: SeenDevice, wrong: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{seen_device.source} says something impossible of {seen_device.name or seen_device.key}.",
        evidence=wrong,
        cause="The driver answered with nonsense, as broken devices and some virtual ones do.",
        cure="Run `nvidia-smi -q`; if it is wrong there too, restart the driver or the node.",
    )


def _tenants(device: Device) -> list[Finding]:
    """Other processes that hold memory on a device."""
    heavy = [p for p in device.processes or () if p.used_bytes is None or p.used_bytes > TENANT_BYTES]
    if not heavy:
        return []
    held = [p.used_bytes for p in heavy if p.used_bytes is not None]
    amount = format_bytes(sum(held)) if held else "memory"
    listed = ", ".join(f"{p.name or 'process'} (pid {p.pid})" for p in heavy[:4])
    return [
        Finding(
            severity=Severity.WARNING,
            what=f"Another job holds {amount} of GPU {device.index}.",
            evidence=listed,
            cause="The GPU is shared, or an earlier run was not ended.",
            cure="Make do with what is free, or end the other process.",
        )
    ]


def _capped(device: Device) -> list[Finding]:
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


def _notes(found: FoundDevices) -> tuple[str, ...]:
    notes = list(found.visible.notes)
    if found.hidden > 0 and found.visible.devices and not found.visible.findings:
        notes.append(f"{found.hidden} more on this node, not visible to this process.")
    return tuple(notes)


def _driverless(world: Machine, found: FoundDevices) -> list[Finding]:
    """A GPU on the PCI bus that nobody could describe."""
    if found.visible.devices or found.hidden or found.reading.findings:
        return []
    if world.env.get(VARIABLE, "0").strip() in HIDES_ALL:
        return []
    on_bus = [
        pci_accelerator
        for pci_accelerator in host.pci_accelerators(world)
        if pci_accelerator.endswith("NVIDIA")
    ]
    if not on_bus:
        return []
    return [
        Finding(
            severity=Severity.ERROR,
            what=f"{plural(len(on_bus), 'NVIDIA GPU')} on the PCI bus, and no driver for it.",
            evidence=on_bus[0],
            cause=f"No NVIDIA driver is installed, or given to this container ({found.reading.absent}).",
            cure="Install the NVIDIA driver; in a container, start it with --gpus all.",
        )
    ]


def _fewer_than_granted(devices: tuple[Device, ...], schedule: Scheduler) -> list[Finding]:
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


def _outside(name: str, world: Machine, schedule: Scheduler) -> list[Finding]:
    """This host is none of the job's nodes: a login node under salloc."""
    listed = schedule.node_names
    if not listed or _own_name(name, world, schedule) is not None:
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


def _own_name(name: str, world: Machine, schedule: Scheduler) -> str | None:
    """What the node list calls this host, whose own name may be another; None where it is not in it."""
    own = {one.partition(".")[0] for one in (name, world.env.get("SLURMD_NODENAME", ""))}
    return next((node_name for node_name in schedule.node_names if node_name.partition(".")[0] in own), None)


def _all_nodes(
    node: Node, links: tuple[Link, ...], schedule: Scheduler, world: Machine
) -> tuple[tuple[Node, ...], tuple[Link, ...], tuple[str, ...]]:
    """This node, and its fellows in the allocation, which are taken to be like it."""
    count = schedule.num_nodes or 1
    if count == 1:
        return (node,), links, ()
    own = _own_name(node.name, world, schedule)
    others = [name for name in schedule.node_names if name != own]
    others += [f"{node.name}+{number}" for number in range(len(others) + 1, count)]
    ground = f"assumed: like {node.name}, by {schedule.sources['num_nodes'].partition(': ')[2]}"
    fellows = [_fellow(node, name, ground) for name in others[: count - 1]]
    copies = [_copied(link, number + 1, ground) for number in range(len(fellows)) for link in links]
    models = {device.model or device.name for device in node.devices}
    note = (
        f"{count} nodes were granted; only {node.name} was looked at, and the others are taken to be like it."
    )
    return (node, *fellows), (*links, *copies, network_link(models, len(node.devices))), (note,)


def _fellow(node: Node, name: str, ground: str) -> Node:
    devices = tuple(
        device.replace(
            uuid=None,
            bus_id=None,
            processes=None,
            free_bytes=None,
            sources={
                field: ground
                for field in device.sources
                if field not in ("uuid", "bus_id", "processes", "free_bytes")
            },
        )
        for device in node.devices
    )
    sources = dict.fromkeys((key for key in node.sources if key != "ram_free_bytes"), ground)
    return node.replace(name=name, devices=devices, ram_free_bytes=None, sources=sources)


def _copied(link: Link, node: int, ground: str) -> Link:
    """The same link in another node."""
    return link.replace(node=node, source=ground)
