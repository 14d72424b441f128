"""Where calibrations of this machine's devices are kept, and how they are found again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import EnvironmentFault, TrimtabError
from trimtab.spec import Calibration

if TYPE_CHECKING:
    from trimtab.spec import Device


def folder() -> Path:
    """The user's calibrations; TRIMTAB_CALIBRATIONS names another place."""
    named = os.environ.get("TRIMTAB_CALIBRATIONS")
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("trimtab") / "calibrations"


def file_of(device: str) -> Path:
    """The file for a device, by its name."""
    return folder() / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def remember(calibration: Calibration) -> Path:
    """Write a calibration where `recall` finds it."""
    file = file_of(calibration.device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(calibration.to_json(), encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        raise EnvironmentFault(
            f"the folder {file.parent}",
            found=f"it cannot be written: {error.strerror}",
            cure="Name another in TRIMTAB_CALIBRATIONS.",
        ) from error
    return file


def recall(device: Device) -> Calibration | None:
    """The user's own calibration of a device; None where there is none that can be read."""
    for name in (device.kind,) if device.slice else (device.model, device.name):
        file = file_of(name) if name else None
        if file is not None and file.is_file():
            try:
                return Calibration.from_json(file.read_text(encoding="utf-8"), origin=str(file))
            except (TrimtabError, OSError):
                return None
    return None
