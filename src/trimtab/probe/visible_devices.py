"""Which devices CUDA_VISIBLE_DEVICES leaves to this process, by CUDA's own rules.

CUDA reads the list from the left and stops at the first entry it cannot resolve; an empty list hides
every GPU; a repeated entry hides them all. Numbers count in CUDA's order, which is fastest first unless
CUDA_DEVICE_ORDER=PCI_BUS_ID. Before driver R570 a process sees one MIG slice only, and no whole GPU
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.catalog.devices import reported
from trimtab.spec import Finding, Severity
from trimtab.units import parse_whole, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.probe.devices import SeenDevice

VARIABLE = "CUDA_VISIBLE_DEVICES"
FIRST_DRIVER_WITH_MANY_SLICES = 570
HIDES_ALL = ("", "-1", "NoDevFiles")
"""Empty, the customary -1, and what Slurm sets for a job without GPUs."""


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The devices left, in the order of cuda:0, cuda:1, ..."""

    devices: tuple[SeenDevice, ...]
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def visible(
    seen: tuple[SeenDevice, ...],
    env: Mapping[str, str],
    *,
    mig_parents: frozenset[str] = frozenset(),
    driver: str | None = None,
) -> Visible:
    """Apply CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER to what the driver showed."""
    whole, order_notes = _in_cuda_order(
        [seen_device for seen_device in seen if seen_device.slice is None], env
    )
    value = env.get(VARIABLE)
    if value is None:
        usable = _usable(whole, seen, mig_parents)
        return _as_old_drivers_show(Visible(devices=tuple(usable), notes=tuple(order_notes)), driver)
    if value.strip() in HIDES_ALL:
        hidden = f"{VARIABLE}={value.strip()!r} hides every GPU from this process."
        return Visible(devices=(), notes=(hidden,))
    chosen: list[SeenDevice] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("-") and parse_whole(entry[1:]) is not None:
            break
        found, wrong = _resolve(entry, whole, seen, mig_parents)
        if found is None:
            kept = Visible(
                devices=tuple(chosen),
                notes=tuple(order_notes),
                findings=(_bad_entry(value, entry, wrong, len(chosen), whole),),
            )
            return _as_old_drivers_show(kept, driver)
        if found in chosen:
            return Visible(devices=(), findings=(_repeated(value, entry),))
        chosen.append(found)
    return _as_old_drivers_show(Visible(devices=tuple(chosen), notes=tuple(order_notes)), driver)


def _as_old_drivers_show(shown: Visible, driver: str | None) -> Visible:
    """Before R570 a process sees one slice, and no whole GPU beside it."""
    release = parse_whole((driver or "").split(".")[0])
    slices = [device for device in shown.devices if device.slice is not None]
    if not slices or len(shown.devices) == 1:
        return shown
    if release is None or release >= FIRST_DRIVER_WITH_MANY_SLICES:
        return shown
    note = (
        f"Driver {driver} shows a process one MIG slice and nothing beside it: one of {len(shown.devices)} "
        f"devices is left. Drivers from {FIRST_DRIVER_WITH_MANY_SLICES} on show them all."
    )
    return replace(shown, devices=(slices[0],), notes=(*shown.notes, note))


def _in_cuda_order(whole: list[SeenDevice], env: Mapping[str, str]) -> tuple[list[SeenDevice], list[str]]:
    """GPUs as CUDA counts them. The driver lists them by PCI address; unlike cards are sorted by speed."""
    if env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({seen_device.name for seen_device in whole}) < 2:  # noqa: PLR2004
        return whole, []
    ordered = sorted(whole, key=_speed, reverse=True)
    if ordered == whole:
        return whole, []
    return ordered, [
        (
            "CUDA counts unlike GPUs fastest first, nvidia-smi counts them by PCI address; the order here is "
            "CUDA's, as far as it can be told. CUDA_DEVICE_ORDER=PCI_BUS_ID makes both the same."
        )
    ]


def _speed(seen_device: SeenDevice) -> float:
    row = reported(seen_device.name)
    if row is not None:
        return row.fp32
    return (seen_device.multiprocessors or 0) * (seen_device.clock_hz or 0) * 256 / 1e12


def _usable(
    whole: list[SeenDevice], seen: tuple[SeenDevice, ...], mig_parents: frozenset[str]
) -> list[SeenDevice]:
    """What CUDA enumerates when nothing is said: a GPU cut into slices stands for its slices."""
    slices = [seen_device for seen_device in seen if seen_device.slice is not None]
    enumerated: list[SeenDevice] = []
    for gpu in whole:
        own = [slice_ for slice_ in slices if slice_.key.startswith(f"{gpu.key}/")]
        enumerated += own if gpu.key in mig_parents else [gpu]
    return enumerated


def _resolve(
    entry: str,
    whole: list[SeenDevice],
    seen: tuple[SeenDevice, ...],
    mig_parents: frozenset[str],
) -> tuple[SeenDevice | None, str]:
    """The device that an entry names, or why it names none."""
    if entry.isascii() and entry.isdigit():
        number = parse_whole(entry)
        if number is None or number >= len(whole):
            return None, f"there is no GPU {entry[:20]}"
        gpu = whole[number]
        if gpu.key not in mig_parents:
            return gpu, ""
        own = [seen_device for seen_device in seen if seen_device.key.startswith(f"{gpu.key}/")]
        return (own[0], "") if own else (None, f"GPU {number} is in MIG mode and has no slices")
    if not entry.startswith(("GPU-", "MIG-")):
        return None, f"{entry!r} is neither a number nor a UUID"
    found = [
        seen_device
        for seen_device in seen
        if entry == seen_device.legacy_mig_name
        or (seen_device.uuid and seen_device.uuid.startswith(entry) and seen_device.key not in mig_parents)
    ]
    if len(found) == 1:
        return found[0], ""
    return None, f"{entry} matches {len(found)} GPUs here" if found else f"no GPU here is {entry}"


def _bad_entry(value: str, entry: str, wrong: str, kept: int, whole: list[SeenDevice]) -> Finding:
    known = f"0 to {len(whole) - 1}" if len(whole) > 1 else "0" if whole else ""
    cure = (
        f"Set {VARIABLE} to numbers from {known}, or to UUIDs from `nvidia-smi -L`; or unset it."
        if whole
        else f"Run `unset {VARIABLE}`: no GPU was found on this machine."
    )
    return Finding(
        severity=Severity.ERROR,
        what=f"{VARIABLE}={value} names a GPU that cannot be used: {wrong}.",
        evidence=f"entry {entry!r}",
        cause=f"CUDA stops reading the list there: {plural(kept, 'GPU')} stay visible.",
        cure=cure,
    )


def _repeated(value: str, entry: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{VARIABLE}={value} names a GPU twice.",
        evidence=f"entry {entry!r}",
        cause="PyTorch and CUDA then see no GPU at all.",
        cure=f"Name each GPU once in {VARIABLE}.",
    )
