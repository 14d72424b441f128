"""Copies between a device and the memory of its host: bandwidth, and time that computation cannot hide."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import host_copies, host_links, links

if TYPE_CHECKING:
    from trimtab.spec import Device, Trace

GIGA = 1e9


class HostLink(NamedTuple):
    """The link between a device and its host."""

    name: str
    bytes_per_s: float
    """What large copies of pinned memory reach, one way."""

    def describe(self) -> str:
        """Return where the bandwidth is from, for the assumptions of an estimate."""
        share = host_copies().usable_share
        return (
            f"time: copies between GPU and host at {self.bytes_per_s / GIGA:.0f} GB/s each way, "
            f"{share:.0%} of {self.name}; not measured"
        )


def find_host_link(device: Device) -> HostLink:
    """Return the link of a device to its host.

    >>> from trimtab.spec import Device
    >>> find_host_link(Device(index=0, name="GPU", memory_bytes=1, pcie_generation=4)).bytes_per_s / 1e9
    25.2032
    """
    facts = host_copies()
    row = next((row for row in host_links() if device.model in row.devices), None)
    if row is not None:
        return HostLink(row.name, row.gbs * GIGA * facts.usable_share)
    lanes = device.pcie_width or facts.lanes
    name = f"PCIe{device.pcie_generation} x16"
    lane_gbs = links()[name].per_lane_gbs if name in links() else None
    if lane_gbs is None:
        unknown = facts.unknown_bytes_per_s
        return HostLink("PCIe 3, as the GPU's generation is unknown", unknown)
    rate = lane_gbs * lanes * GIGA * facts.usable_share
    return HostLink(f"PCIe {device.pcie_generation} x{lanes}", rate)


class Transfers(NamedTuple):
    """Bytes copied between device and host."""

    outward: int
    """To the host."""
    back: int
    """To the device."""


def count_phase_transfers(trace: Trace) -> tuple[Transfers, Transfers, Transfers]:
    """Return what the forward pass, the backward pass and the optimizer copy."""
    length = len(trace.sequence)
    backward, optimizer = trace.phases.get("backward", length), trace.phases.get("optimizer", length)
    phases = (slice(backward), slice(backward, optimizer), slice(optimizer, None))
    forward, backward_pass, update = (_sum_transfers(trace, trace.sequence[phase]) for phase in phases)
    return forward, backward_pass, update


def _sum_transfers(trace: Trace, numbers: tuple[int, ...]) -> Transfers:
    transfers = [trace.works[number] for number in numbers if trace.works[number].kind == "transfer"]
    return Transfers(sum(work.read_bytes for work in transfers), sum(work.write_bytes for work in transfers))


def count_transfers(trace: Trace) -> tuple[int, int]:
    """Return the bytes that one micro-batch copies to the host, and those that it copies back."""
    return _sum_transfers(trace, trace.sequence)


def exposed_transfers_s(
    trace: Trace, host_bytes_per_s: float | None, *, forward_s: float, backward_s: float
) -> float:
    """Return the seconds of copies of one micro-batch that computation does not hide.

    Copies to the host run beside the forward pass, copies back beside the backward pass.
    """
    if host_bytes_per_s is None:
        return 0.0
    outward, back = count_transfers(trace)
    return max(0.0, outward / host_bytes_per_s - forward_s) + max(0.0, back / host_bytes_per_s - backward_s)
