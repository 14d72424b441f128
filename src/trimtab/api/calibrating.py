"""Share calibrations: import one that someone else measured, list and remove what is stored."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import EnvironmentFault, UnknownName, find_nearest

if TYPE_CHECKING:
    from trimtab.spec import Calibration


def import_calibration(file: Path | str, *, owner: str = "") -> tuple[Calibration, Path]:
    """Check a calibration that someone shared, and store it; return it and the file that stores it.

    Predictions for its device use it, unless this machine has measured that device itself. `owner` says whose
    it is, if the file does not.
    """
    from trimtab.calibration.sharing import read_shared_calibration
    from trimtab.predict.calibration import write_own_calibration

    shared = read_shared_calibration(Path(file))
    today = datetime.now(UTC).date().isoformat()
    found = shared.replace(owner=owner or shared.owner, imported_on=today)
    return found, write_own_calibration(found)


def list_calibrations() -> list[tuple[Path, Calibration | None]]:
    """Return the stored calibrations with their files; None for a file that cannot be read."""
    from trimtab.predict.calibration import list_own_calibrations

    return list_own_calibrations()


def remove_calibration(name: str) -> Path:
    """Remove a stored calibration by the name that `trimtab calibrate --list` shows; return its file."""
    names = {file.stem: file for file, _ in list_calibrations()}
    if name not in names:
        near = find_nearest(name, names) or sorted(names)
        raise UnknownName(
            f"--remove {name}",
            found=f"the stored calibrations are {', '.join(near)}" if near else "no calibration is stored",
            cure="`trimtab calibrate --list` shows all names.",
        )
    try:
        names[name].unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"--remove {name}",
            found=f"{names[name]} cannot be removed: {error.strerror}",
            cure="Remove it by hand.",
        ) from error
    return names[name]


def describe_calibration(file: Path, calibration: Calibration | None) -> dict[str, Any]:
    """Return a stored calibration in words: its name, whose it is, and what predictions use it for."""
    from trimtab.predict.calibration import describe_import
    from trimtab.spec import StoredCalibration

    if calibration is None:
        use = "not used: it is broken, or of another version of trimtab"
        return StoredCalibration(name=file.stem, use=use).to_builtins()
    measured = file.with_name(file.name.removeprefix("imported-"))
    hidden = bool(calibration.imported_on) and measured.is_file()
    use = f"predictions for {calibration.device} use it"
    return StoredCalibration(
        name=file.stem,
        device=calibration.device,
        operations=len(calibration.works),
        collectives=len(calibration.collectives),
        taken_on=calibration.taken_on,
        versions=calibration.versions,
        owner=calibration.owner,
        origin=describe_import(calibration) if calibration.imported_on else "this machine",
        use=f"not used: {measured.name}, measured on this machine, comes first" if hidden else use,
    ).to_builtins()
