"""Outputs of `--json` that are more than one of the other types."""

from __future__ import annotations

from trimtab.spec.base import Noun
from trimtab.spec.calibration import CollectiveTimes
from trimtab.spec.estimate import Estimate
from trimtab.spec.hardware import Peaks
from trimtab.spec.plan import Launch
from trimtab.spec.run import JobView
from trimtab.spec.script import PhasePeak, ScriptReport
from trimtab.spec.setting import Setting
from trimtab.spec.trace import Work


class ErrorDetails(Noun, frozen=True, kw_only=True):
    """What went wrong, and what to do about it."""

    may_lack = ("nearest",)

    given: str
    """What was typed or asked for."""
    found: str
    """What is wrong with it."""
    cure: str
    """What to do."""
    nearest: tuple[Setting, ...] | None = None
    """If nothing fits: the settings that come nearest. Other errors do not have it."""
    exit_code: int


class ErrorOutput(Noun, frozen=True, kw_only=True):
    """Output of any command that fails."""

    error: ErrorDetails


class CatalogDevice(Noun, frozen=True, kw_only=True):
    """A device of the catalogue."""

    name: str
    """The name for --on."""
    model: str
    """The maker's name."""
    also: tuple[str, ...]
    """Other names that --on takes, and names that drivers report."""
    vendor: str
    compute_capability: str
    bf16: bool | None
    """Whether the device computes in bf16 by itself."""
    memory_bytes: int
    """Memory that processes can use."""
    bandwidth_bytes_per_s: float
    peaks: Peaks
    source: str
    memory_source: str | None
    """Where the memory was measured; null if it is derived from the label."""
    verification: tuple[str, ...]
    """Further sources that agree."""


class DevicesOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab detect --list --json`."""

    devices: tuple[CatalogDevice, ...]


class WordNames(Noun, frozen=True, kw_only=True):
    """Output of `trimtab explain --json` without a word."""

    words: tuple[str, ...]


class PeakModule(Noun, frozen=True, kw_only=True, rename={"class_name": "class"}):
    """A module and the bytes that it owns at the peak of memory."""

    name: str
    """Path of the module in the model."""
    class_name: str | None = None
    """Class of the module, if its path ends in a number; else null."""
    bytes: int


class PeakMoment(Noun, frozen=True, kw_only=True):
    """The moment of the step at which memory is at its peak."""

    operation: str
    """The operation at the peak, as torch names it."""
    phase: str
    modules: tuple[PeakModule, ...]
    """The modules with the most bytes at the peak, largest first."""


class EstimateOutput(Estimate, frozen=True, kw_only=True):
    """Output of `trimtab estimate --json`: the estimate, with its setting and its peak."""

    setting: Setting
    peak: PeakMoment
    script: ScriptReport | None = None
    """What was found out about a training command; null for a job."""
    phases: tuple[PhasePeak, ...] = ()
    """Peaks of the phases of a training command; empty for a job."""


class RevertOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab revert --json`."""

    restored: str | None
    """The file that was put back; null if nothing was written."""
    file: str
    number: int
    """Number of the backup."""
    backup: str | None
    """Backup of what the file held before; null if nothing was written."""
    diff: str


class ReportOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab report --json`."""

    file: str
    """The page."""
    figures: tuple[str, ...]
    """Files of the figures, with --figures."""
    shown: tuple[str, ...]
    """Names of the figures on the page."""
    missing: tuple[str, ...]
    """What is not on the page, and why."""
    notes: tuple[str, ...]


class ExploreOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab explore --json`, printed when the server is ready."""

    url: str
    """Address of the page, with its token."""
    port: int


class LaunchesOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab launch --compare --json`."""

    launches: tuple[Launch, ...]


class JobsOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab jobs --json`."""

    jobs: tuple[JobView, ...]
    notes: tuple[str, ...]
    """What could not be looked up, and why."""


class CancelOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab cancel --json`."""

    cancelled: JobView


class MeasuredWork(Work, frozen=True, kw_only=True):
    """An operation with its measured time."""

    seconds: float


class CalibrateOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab calibrate --json`."""

    device: str
    curves: tuple[MeasuredWork, ...]
    """The measured operations, over sizes and precisions."""
    file: str
    """File that stores the calibration."""
    host: dict[str, float]
    """Host seconds for each kind of work in a step."""
    copy_bytes_per_s: dict[str, float]
    """Copy bandwidth between host and device: to_device, to_host."""
    left_out: tuple[str, ...]
    """Measurements that were skipped for lack of time or memory."""


class LinksOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab calibrate --links --json`."""

    device: str
    file: str
    """File that stores the calibration."""
    collectives: tuple[CollectiveTimes, ...]


class StoredCalibration(Noun, frozen=True, kw_only=True, rename={"origin": "from"}):
    """A calibration that is stored on this machine. For a broken file, all but its name and use is null."""

    name: str
    """Name for `trimtab calibrate --remove`."""
    device: str | None = None
    operations: int | None = None
    """Number of measured operations."""
    collectives: int | None = None
    """Number of measured collectives."""
    taken_on: str | None = None
    """ISO date."""
    versions: dict[str, str] | None = None
    owner: str | None = None
    origin: str | None = None
    """Whose it is, in words."""
    use: str
    """What predictions use it for, or why they do not."""


class ImportOutput(StoredCalibration, frozen=True, kw_only=True, rename={"origin": "from"}):
    """Output of `trimtab calibrate --import --json`."""

    file: str
    """File that stores the calibration."""


class CalibrationsOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab calibrate --list --json`."""

    calibrations: tuple[StoredCalibration, ...]


class RemoveOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab calibrate --remove --json`."""

    removed: str
    """The file that was removed."""
