"""Read driver, CUDA, torch and NCCL versions without importing torch, and find mismatches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trimtab.catalog.devices import parse_capability
from trimtab.catalog.tables import drivers, torch_builds, torch_releases
from trimtab.catalog.torch_release import is_supported, requirement
from trimtab.spec import Device, Finding, Severity, Versions
from trimtab.version import VERSION

if TYPE_CHECKING:
    from trimtab.probe.machine import Machine


def read_versions(
    world: Machine, driver: str | None, driver_cuda: str | None, driver_source: str
) -> Versions:
    """Return all versions; torch's CUDA release comes from the text of torch/version.py."""
    text = world.host("torch_version_file") or ""
    package = _nccl_package(_parse_assignment(text, "cuda"))
    nccl = world.host(f"package:{package}") if package else None
    facts = {
        "trimtab": (VERSION, "detected: this program"),
        "python": (world.host("python"), "detected: this interpreter"),
        "torch": (world.host("package:torch"), "detected: package metadata"),
        "torch_cuda": (_parse_assignment(text, "cuda"), "detected: torch/version.py"),
        "torch_hip": (_parse_assignment(text, "hip"), "detected: torch/version.py"),
        "nccl": (nccl, f"detected: metadata of {package}"),
        "driver": (driver, f"detected: {driver_source}"),
        "driver_cuda": (driver_cuda, f"detected: {driver_source}"),
        "system": (world.host("system"), "detected: the operating system"),
    }
    present = {field: fact for field, fact in facts.items() if fact[0]}
    return Versions(
        **{field: value for field, (value, _) in present.items()},
        sources={field: source for field, (_, source) in present.items()},
    )


def _nccl_package(cuda: str | None) -> str | None:
    """Return the package with the NCCL that torch loads for this CUDA release.

    >>> _nccl_package("12.8"), _nccl_package(None)
    ('nvidia-nccl-cu12', None)
    """
    return f"nvidia-nccl-cu{cuda.partition('.')[0]}" if cuda else None


def _parse_assignment(text: str, name: str) -> str | None:
    """Return the string assigned to a name in torch/version.py.

    >>> _parse_assignment("cuda: Optional[str] = '13.0'", "cuda"), _parse_assignment("hip = None", "hip")
    ('13.0', None)
    """
    match = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def find_mismatches(versions: Versions, devices: tuple[Device, ...]) -> list[Finding]:
    """Return findings about versions that do not fit together; none without torch."""
    nvidia = [device for device in devices if device.vendor.value == "nvidia"]
    if versions.torch is None:
        return []
    findings = [_check_torch_release(versions.torch)]
    if nvidia and versions.torch_cuda is None and not versions.torch_hip:
        findings.append(_cpu_build_finding(versions))
    elif nvidia and versions.torch_cuda is not None:
        findings += [_check_driver_age(versions), *(_check_capability(versions, gpu) for gpu in nvidia)]
        findings += [_check_nccl(versions, len(nvidia))]
    unique = {finding.what: finding for finding in findings if finding is not None}
    return list(unique.values())


def _check_torch_release(torch: str) -> Finding | None:
    """Return a finding if trimtab does not support this torch release."""
    if is_supported(torch):
        return None
    row = torch_releases()
    return Finding(
        severity=Severity.WARNING,
        what=f"torch {torch} is none of the releases that trimtab is made for: {row.oldest} to {row.newest}.",
        evidence=f"package metadata: torch {torch}",
        cause="Another release may lack what trimtab calls, or take other memory than it was measured with: "
        "commands that run a job refuse it.",
        cure=f"Install one of those: pip install '{requirement()}'.",
    )


def _check_nccl(versions: Versions, num_devices: int) -> Finding | None:
    """Return a finding if there are several GPUs and no NCCL."""
    if num_devices == 1 or versions.nccl is not None:
        return None
    package = _nccl_package(versions.torch_cuda)
    return Finding(
        severity=Severity.WARNING,
        what=f"{num_devices} GPUs, and no NCCL for torch's CUDA {versions.torch_cuda} to join them with.",
        evidence=f"no package {package}",
        cause="pip installs it with torch. Builds by conda, vendors or hand may carry their own, which only "
        "torch.cuda.nccl.version() shows.",
        cure=f"Run `pip install {package}`, unless that shows one.",
    )


def _cpu_build_finding(versions: Versions) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        what="torch is a CPU build: it cannot use the GPU here.",
        evidence=f"torch {versions.torch}, with no CUDA release in torch/version.py",
        cause="pip installed the build for machines without a GPU.",
        cure="Install the CUDA build: pip install --force-reinstall torch, from the index that PyTorch names "
        "for your CUDA release.",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _check_driver_age(versions: Versions) -> Finding | None:
    assert versions.torch_cuda is not None  # noqa: S101 - the caller checked
    major = _numbers(versions.torch_cuda)[0]
    row = next((driver for driver in drivers() if driver.cuda_major == major), None)
    if row is None or versions.driver is None:
        return None
    if _numbers(versions.driver) >= _numbers(row.oldest_driver):
        return None
    older = next(
        (
            driver.cuda_major
            for driver in reversed(drivers())
            if _numbers(versions.driver) >= _numbers(driver.oldest_driver)
        ),
        None,
    )
    other = f", or install a torch built for CUDA {older}" if older else ""
    return Finding(
        severity=Severity.ERROR,
        what=f"The NVIDIA driver is too old for this torch: {versions.driver}, and CUDA "
        f"{versions.torch_cuda} needs {row.oldest_driver} or newer.",
        evidence=f"driver {versions.driver}, torch {versions.torch} built for CUDA {versions.torch_cuda}",
        cause="torch stops with 'The NVIDIA driver on your system is too old'.",
        cure=f"Update the driver to {row.oldest_driver} or newer{other}.",
    )


def _check_capability(versions: Versions, device: Device) -> Finding | None:
    """Return a finding if torch's build has no code for a device."""
    row = torch_builds().get(versions.torch_cuda or "")
    have = parse_capability(device.compute_capability or "")
    if row is None or have is None or "x86_64" not in (versions.system or ""):
        return None
    built = [pair for pair in map(parse_capability, row.capabilities) if pair]
    if any(major == have[0] and minor <= have[1] for major, minor in built):
        return None
    if row.ptx and have > max(built):
        return None
    listed = ", ".join(row.capabilities)
    return Finding(
        severity=Severity.ERROR,
        what=f"This torch carries no code for the {device.name} (compute capability "
        f"{device.compute_capability}).",
        evidence=f"torch's build for CUDA {versions.torch_cuda} carries {listed}",
        cause="Builds drop old devices, and older builds do not know new ones.",
        cure="Install the build of torch for CUDA " + ("12.6." if have < min(built) else "13.0 or newer."),
    )
