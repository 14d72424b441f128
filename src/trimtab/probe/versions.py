"""Driver, CUDA, torch and NCCL versions, read without importing torch, and whether they fit together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trimtab.catalog.devices import capability
from trimtab.catalog.tables import drivers, torch_builds, torch_releases
from trimtab.catalog.torch_release import is_supported, requirement
from trimtab.spec import Device, Finding, Severity, Versions
from trimtab.version import VERSION

if TYPE_CHECKING:
    from trimtab.probe.machine import Machine


def read_versions(
    world: Machine, driver: str | None, driver_cuda: str | None, driver_source: str
) -> Versions:
    """All versions; the CUDA release of torch comes from the text of torch/version.py."""
    text = world.host("torch_version_file") or ""
    package = _nccl_package(_assigned(text, "cuda"))
    nccl = world.host(f"package:{package}") if package else None
    known = {
        "trimtab": (VERSION, "detected: this program"),
        "python": (world.host("python"), "detected: this interpreter"),
        "torch": (world.host("package:torch"), "detected: package metadata"),
        "torch_cuda": (_assigned(text, "cuda"), "detected: torch/version.py"),
        "torch_hip": (_assigned(text, "hip"), "detected: torch/version.py"),
        "nccl": (nccl, f"detected: metadata of {package}"),
        "driver": (driver, f"detected: {driver_source}"),
        "driver_cuda": (driver_cuda, f"detected: {driver_source}"),
        "system": (world.host("system"), "detected: the operating system"),
    }
    told = {field: fact for field, fact in known.items() if fact[0]}
    return Versions(
        **{field: value for field, (value, _) in told.items()},
        sources={field: source for field, (_, source) in told.items()},
    )


def _nccl_package(cuda: str | None) -> str | None:
    """The package with the NCCL that a torch for this CUDA release loads.

    >>> _nccl_package("12.8"), _nccl_package(None)
    ('nvidia-nccl-cu12', None)
    """
    return f"nvidia-nccl-cu{cuda.partition('.')[0]}" if cuda else None


def _assigned(text: str, name: str) -> str | None:
    """The string that torch/version.py gives a name.

    >>> _assigned("cuda: Optional[str] = '13.0'", "cuda"), _assigned("hip = None", "hip")
    ('13.0', None)
    """
    match = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def misfits(versions: Versions, devices: tuple[Device, ...]) -> list[Finding]:
    """What does not fit together; nothing to say where there is no torch."""
    nvidia = [device for device in devices if device.vendor.value == "nvidia"]
    if versions.torch is None:
        return []
    found = [_other_release(versions.torch)]
    if nvidia and versions.torch_cuda is None and not versions.torch_hip:
        found.append(_cpu_build(versions))
    elif nvidia and versions.torch_cuda is not None:
        found += [_old_driver(versions), *(_unreached(versions, one) for one in nvidia)]
        found += [_no_nccl(versions, len(nvidia))]
    unique = {one.what: one for one in found if one is not None}
    return list(unique.values())


def _other_release(torch: str) -> Finding | None:
    """A torch that trimtab is not made for."""
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


def _no_nccl(versions: Versions, num_devices: int) -> Finding | None:
    """Several GPUs, and nothing for them to talk with."""
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


def _cpu_build(versions: Versions) -> Finding:
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


def _old_driver(versions: Versions) -> Finding | None:
    assert versions.torch_cuda is not None  # noqa: S101 - the caller asked
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


def _unreached(versions: Versions, device: Device) -> Finding | None:
    """A device that torch's own build carries no code for."""
    row = torch_builds().get(versions.torch_cuda or "")
    have = capability(device.compute_capability or "")
    if row is None or have is None or "x86_64" not in (versions.system or ""):
        return None
    built = [one for one in map(capability, row.capabilities) if one]
    if any(one[0] == have[0] and one[1] <= have[1] for one in built):
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
