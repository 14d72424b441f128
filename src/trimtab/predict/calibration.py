"""Choose the calibration for a prediction: the device's own, or else that of a measured device."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.clusters import device_from_row
from trimtab.catalog.devices import find_reported_device
from trimtab.catalog.facts import calibration_file, device_facts, facts_of
from trimtab.catalog.tables import devices
from trimtab.errors import EnvironmentFault
from trimtab.files import write_atomic
from trimtab.predict import op_time, step_time
from trimtab.spec import Calibration

if TYPE_CHECKING:
    from trimtab.spec import Device


class Speed(NamedTuple):
    """How fast a device and its host are."""

    pace: op_time.Pace
    host: step_time.HostCosts
    own: bool
    """Whether this device itself was calibrated."""
    source: str
    """The device that was calibrated."""
    imported: str = ""
    """Whose calibration it is and when it was taken, if it was imported."""
    host_measured: bool = False
    """Whether the host of this machine was measured."""


@cache
def shipped_calibrations() -> tuple[Calibration, ...]:
    """Return the calibrations that come with trimtab."""
    return tuple(
        merge_calibrations([read_calibration(name) for name in facts.operations]) for facts in device_facts()
    )


def read_calibration(name: str) -> Calibration:
    """Read a calibration file that comes with trimtab, such as h200.json."""
    return Calibration.from_json(calibration_file(name).read_text(encoding="utf-8"), origin=name)


def merge_calibrations(parts: list[Calibration]) -> Calibration:
    """Merge several calibrations of one device; all but the operations comes from the first."""
    return parts[0].replace(
        works=tuple(work for part in parts for work in part.works),
        seconds=tuple(second for part in parts for second in part.seconds),
    )


def find_speed(device: Device, own: Calibration | None = None) -> Speed | None:
    """Return the speed of a device, from its own calibration if there is one; None if rates are unknown."""
    target = op_time.device_rates(device)
    if target is None:
        return None
    # `calibrate --links` alone measures no operation.
    own = own if own is not None and own.works else None
    same_kind = next((entry for entry in shipped_calibrations() if entry.device == device.kind), None)
    chosen = own or same_kind or shipped_calibrations()[0]
    # A calibration of a whole GPU does not cover its slices: a slice runs at its own peaks, as efficiently.
    names = (device.kind,) if device.slice else (device.model, device.name)
    measured_on = target if chosen.device in names else find_rates(chosen.device)
    if measured_on is None:
        return None
    return Speed(
        pace=_shipped_pace(chosen.device, target, measured_on)
        if own is None
        else _build_pace(own, target, measured_on),
        # The host of a shipped calibration is that of one hour of one machine.
        host=step_time.host_costs_at(facts_of(device).host.usual, facts_of(device))
        if own is None
        else step_time.scale_host_costs(own.host, facts_of(device)),
        own=own is not None or same_kind is not None,
        source=chosen.device,
        imported=describe_import(own) if own is not None and own.imported_on else "",
        host_measured=own is not None and not own.imported_on and bool(own.host),
    )


@cache
def _shipped_pace(name: str, target: op_time.Rates, measured_on: op_time.Rates) -> op_time.Pace:
    """Return the pace from a shipped calibration; cached, as building it from many points takes time."""
    return _build_pace(
        next(entry for entry in shipped_calibrations() if entry.device == name), target, measured_on
    )


def _build_pace(calibration: Calibration, target: op_time.Rates, measured_on: op_time.Rates) -> op_time.Pace:
    return op_time.Pace(target, op_time.calibration_points(calibration, measured_on))


def find_catalogue_name(name: str) -> str | None:
    """Return the catalogue's name of a device, given that or the driver's; None if it has no such device."""
    row = next((device for device in devices() if device.name == name), None) or find_reported_device(name)
    return row.name if row is not None else None


def find_rates(name: str) -> op_time.Rates | None:
    """Return the rates of a device by its name in the catalogue, or as the driver reports it."""
    row = next((device for device in devices() if device.name == find_catalogue_name(name)), None)
    return op_time.device_rates(device_from_row(row, 0, "the calibration")) if row is not None else None


def own_folder() -> Path:
    """Return the folder of the user's own calibrations; TRIMTAB_CALIBRATIONS names another one."""
    named = os.environ.get("TRIMTAB_CALIBRATIONS")
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("trimtab") / "calibrations"


IMPORTED = "imported-"
"""Beginning of the names of files with other people's calibrations."""


def _own_file(device: str, *, imported: bool = False) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return own_folder() / f"{IMPORTED * imported}{name}.json"


def write_own_calibration(calibration: Calibration) -> Path:
    """Write a calibration where `read_own_calibration` finds it; return its file."""
    file = _own_file(calibration.device, imported=bool(calibration.imported_on))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, calibration.to_json())
    except OSError as error:
        raise EnvironmentFault(
            f"the folder {file.parent}",
            found=f"it cannot be written: {error.strerror}",
            cure="Name another in TRIMTAB_CALIBRATIONS.",
        ) from error
    return file


def read_own_calibration(device: Device, *, imported: bool = True) -> Calibration | None:
    """Return the user's own calibration of a device; None if there is none, or none that can be read.

    What was measured on this machine comes before what was imported.
    """
    names = [name for name in ((device.kind,) if device.slice else (device.model, device.name)) if name]
    files = [_own_file(name) for name in names]
    files += [_own_file(name, imported=True) for name in names if imported]
    return next((stored for file in files if (stored := Calibration.from_file(file)) is not None), None)


def list_own_calibrations() -> list[tuple[Path, Calibration | None]]:
    """Return the stored files with their calibrations; None for a file that cannot be read."""
    return [(file, Calibration.from_file(file)) for file in sorted(own_folder().glob("*.json"))]


def describe_import(calibration: Calibration) -> str:
    """Return who took an imported calibration and when."""
    owner = calibration.owner or "an owner who gave no name"
    return f"{owner}, taken on {calibration.taken_on}, imported on {calibration.imported_on}"
