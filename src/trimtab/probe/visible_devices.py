"""Apply CUDA_VISIBLE_DEVICES by CUDA's own rules.

CUDA reads the list from the left and stops at the first entry it cannot resolve; an empty list hides
every GPU; a repeated entry hides them all. Numbers count in CUDA's order, which is fastest first unless
CUDA_DEVICE_ORDER=PCI_BUS_ID. Before driver R570 a process sees one MIG slice only, and no full GPU
in addition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.catalog.devices import find_reported_device
from trimtab.spec import Finding, Severity
from trimtab.units import parse_whole, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.probe.devices import SeenDevice

VARIABLE = "CUDA_VISIBLE_DEVICES"
FIRST_DRIVER_WITH_MANY_SLICES = 570
HIDES_ALL = ("", "-1", "NoDevFiles")
"""Empty, the customary -1, and the value that Slurm sets for a job without GPUs."""


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """The visible devices, in the order of cuda:0, cuda:1, ..."""

    devices: tuple[SeenDevice, ...]
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def find_visible_devices(
    seen: tuple[SeenDevice, ...],
    env: Mapping[str, str],
    *,
    mig_parents: frozenset[str] = frozenset(),
    driver: str | None = None,
) -> VisibleDevices:
    """Apply CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER to the devices that the driver shows."""
    gpus, order_notes = _sort_as_cuda([seen_device for seen_device in seen if seen_device.slice is None], env)
    value = env.get(VARIABLE)
    if value is None:
        usable = _enumerate_devices(gpus, seen, mig_parents)
        return _apply_old_driver_limit(
            VisibleDevices(devices=tuple(usable), notes=tuple(order_notes)), driver
        )
    if value.strip() in HIDES_ALL:
        hidden = f"{VARIABLE}={value.strip()!r} hides every GPU from this process."
        return VisibleDevices(devices=(), notes=(hidden,))
    chosen: list[SeenDevice] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("-") and parse_whole(entry[1:]) is not None:
            break
        device, wrong = _resolve(entry, gpus, seen, mig_parents)
        if device is None:
            resolved = VisibleDevices(
                devices=tuple(chosen),
                notes=tuple(order_notes),
                findings=(_bad_entry_finding(value, entry, wrong, len(chosen), gpus),),
            )
            return _apply_old_driver_limit(resolved, driver)
        if device in chosen:
            return VisibleDevices(devices=(), findings=(_repeated_entry_finding(value, entry),))
        chosen.append(device)
    return _apply_old_driver_limit(VisibleDevices(devices=tuple(chosen), notes=tuple(order_notes)), driver)


def _apply_old_driver_limit(visible: VisibleDevices, driver: str | None) -> VisibleDevices:
    """Drop all but one slice for a driver before R570, which shows no other device with a slice."""
    release = parse_whole((driver or "").split(".")[0])
    slices = [device for device in visible.devices if device.slice is not None]
    if not slices or len(visible.devices) == 1:
        return visible
    if release is None or release >= FIRST_DRIVER_WITH_MANY_SLICES:
        return visible
    note = (
        f"Driver {driver} shows a process one MIG slice and nothing beside it: one of {len(visible.devices)} "
        f"devices is left. Drivers from {FIRST_DRIVER_WITH_MANY_SLICES} on show them all."
    )
    return replace(visible, devices=(slices[0],), notes=(*visible.notes, note))


def _sort_as_cuda(gpus: list[SeenDevice], env: Mapping[str, str]) -> tuple[list[SeenDevice], list[str]]:
    """Return GPUs in CUDA's order, with notes. The driver lists them by PCI address; CUDA sorts by speed."""
    if env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({seen_device.name for seen_device in gpus}) < 2:  # noqa: PLR2004
        return gpus, []
    ordered = sorted(gpus, key=_speed, reverse=True)
    if ordered == gpus:
        return gpus, []
    return ordered, [
        (
            "CUDA numbers different GPUs fastest first, nvidia-smi numbers them by PCI address; the order "
            "here is CUDA's, as far as it is known. CUDA_DEVICE_ORDER=PCI_BUS_ID makes both the same."
        )
    ]


def _speed(seen_device: SeenDevice) -> float:
    row = find_reported_device(seen_device.name)
    if row is not None:
        return row.fp32
    return (seen_device.multiprocessors or 0) * (seen_device.clock_hz or 0) * 256 / 1e12


def _enumerate_devices(
    gpus: list[SeenDevice], seen: tuple[SeenDevice, ...], mig_parents: frozenset[str]
) -> list[SeenDevice]:
    """Return what CUDA enumerates without the variable: a GPU in MIG mode is replaced by its slices."""
    slices = [seen_device for seen_device in seen if seen_device.slice is not None]
    enumerated: list[SeenDevice] = []
    for gpu in gpus:
        own = [slice_ for slice_ in slices if slice_.key.startswith(f"{gpu.key}/")]
        enumerated += own if gpu.key in mig_parents else [gpu]
    return enumerated


def _resolve(
    entry: str,
    gpus: list[SeenDevice],
    seen: tuple[SeenDevice, ...],
    mig_parents: frozenset[str],
) -> tuple[SeenDevice | None, str]:
    """Return the device that an entry names, or None and the reason."""
    if entry.isascii() and entry.isdigit():
        number = parse_whole(entry)
        if number is None or number >= len(gpus):
            return None, f"there is no GPU {entry[:20]}"
        gpu = gpus[number]
        if gpu.key not in mig_parents:
            return gpu, ""
        own = [seen_device for seen_device in seen if seen_device.key.startswith(f"{gpu.key}/")]
        return (own[0], "") if own else (None, f"GPU {number} is in MIG mode and has no slices")
    if not entry.startswith(("GPU-", "MIG-")):
        return None, f"{entry!r} is neither a number nor a UUID"
    matches = [
        seen_device
        for seen_device in seen
        if entry == seen_device.legacy_mig_name
        or (seen_device.uuid and seen_device.uuid.startswith(entry) and seen_device.key not in mig_parents)
    ]
    if len(matches) == 1:
        return matches[0], ""
    return None, f"{entry} matches {len(matches)} GPUs here" if matches else f"no GPU here is {entry}"


def _bad_entry_finding(value: str, entry: str, wrong: str, count: int, gpus: list[SeenDevice]) -> Finding:
    valid = f"0 to {len(gpus) - 1}" if len(gpus) > 1 else "0" if gpus else ""
    cure = (
        f"Set {VARIABLE} to numbers from {valid}, or to UUIDs from `nvidia-smi -L`; or unset it."
        if gpus
        else f"Run `unset {VARIABLE}`: no GPU was found on this machine."
    )
    return Finding(
        severity=Severity.ERROR,
        what=f"{VARIABLE}={value} names a GPU that cannot be used: {wrong}.",
        evidence=f"entry {entry!r}",
        cause=f"CUDA stops reading the list there: {plural(count, 'GPU')} stay visible.",
        cure=cure,
    )


def _repeated_entry_finding(value: str, entry: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{VARIABLE}={value} names a GPU twice.",
        evidence=f"entry {entry!r}",
        cause="PyTorch and CUDA then see no GPU at all.",
        cure=f"Name each GPU once in {VARIABLE}.",
    )
