"""Everything outside this process that probing may ask, as one value that can be passed in.

`here()` is the real machine. `recorded(world)` notes every question with its answer, and `replayed(record)`
answers from such notes: a machine that is far away can be looked at again, exactly, by the same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""Questions and answers by kind, as JSON holds them."""

NVML_NOT_SUPPORTED = 3
NVML_LIBRARY_NOT_FOUND = 12
NVML_NO_DATA = 21
NVML_NO_PYTHON_PACKAGE = -1
"""Not a code of NVML: nvidia-ml-py itself is missing."""

_COMMAND_TIMEOUT_S = 60


class NvmlFault(Exception):  # noqa: N818 - a fault the caller decides about, not an error
    """NVML's refusal: its return code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What can be asked. Each callable answers None, or raises NvmlFault, where there is no answer."""

    env: Mapping[str, str]
    """Environment variables."""
    read: Callable[[str], str | None]
    """Text of a file; None where it cannot be read."""
    names: Callable[[str], list[str]]
    """Entries of a folder; empty where there is none."""
    run: Callable[[tuple[str, ...]], str | None]
    """Standard output of a command; None where it is missing or fails."""
    nvml: Callable[..., Any]
    """A function of NVML by name; a device is "gpu0", a MIG slice of it "gpu0/mig1"."""
    host: Callable[[str], Any]
    """A fact about the host or Python by name; see `_HOST`."""


def this_machine() -> Machine:
    """The real machine."""
    return Machine(
        env=os.environ,
        read=_read,
        names=_names,
        run=_run,
        nvml=_real_nvml(),
        host=_host,
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def _run(argv: tuple[str, ...]) -> str | None:
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603 - fixed commands of ours, no shell
            argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _host(question: str) -> Any:
    """Facts that Python's libraries give: name, system, python, cpus, affinity, ram, package:NAME, ..."""
    kind, _, detail = question.partition(":")
    return _HOST[kind](detail)


def _ram(_: str) -> dict[str, int]:
    import psutil

    memory = psutil.virtual_memory()
    return {"total": memory.total, "available": memory.available}


def _affinity(_: str) -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _package(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch_version_file(_: str) -> str | None:
    """The text of torch/version.py: it names the CUDA release without importing torch."""
    from importlib.util import find_spec

    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    return _read(str(Path(found.submodule_search_locations[0]) / "version.py"))


def _shm(_: str) -> int | None:
    try:
        stats = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size only
    except (OSError, AttributeError):
        return None
    return stats.f_blocks * stats.f_frsize


def _limit(name: str) -> list[int | None] | None:
    """The soft and the hard limit that `ulimit` sets; None in the place of one that is unlimited."""
    import resource

    try:
        both = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    except (AttributeError, OSError, ValueError):
        return None
    return [None if one == resource.RLIM_INFINITY else one for one in both]


def _disk(path: str) -> dict[str, int] | None:
    """Bytes and files that the disk of a folder has, and has left for us."""
    try:
        stats = os.statvfs(path)
    except (OSError, ValueError, AttributeError):
        return None
    return {
        "total": stats.f_blocks * stats.f_frsize,
        "free": stats.f_bavail * stats.f_frsize,
        "files": stats.f_files,
        "files_free": stats.f_favail,
    }


def _process_name(pid: str) -> str | None:
    import psutil

    try:
        return str(psutil.Process(int(pid)).name())
    except psutil.Error:
        return None


def _platform(_: str) -> str:
    import platform

    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _hostname(_: str) -> str:
    import socket

    return socket.gethostname()


def _python(_: str) -> str:
    import platform

    return platform.python_version()


def _executable(_: str) -> str:
    import sys

    return sys.executable


_HOST: dict[str, Callable[[str], Any]] = {
    "name": _hostname,
    "system": _platform,
    "python": _python,
    "executable": _executable,
    "pid": lambda _: os.getpid(),
    "cpus": lambda _: os.cpu_count(),
    "affinity": _affinity,
    "ram": _ram,
    "shm": _shm,
    "limit": _limit,
    "disk": _disk,
    "folder": lambda _: str(Path.cwd()),
    "home": lambda _: str(Path.home()),
    "package": _package,
    "torch_version_file": _torch_version_file,
    "process": _process_name,
}


def _real_nvml() -> Callable[..., Any]:
    """A caller of NVML that finds handles by our device keys and turns structs into plain values."""
    handles: dict[str, Any] = {}

    def handle(library: Any, key: str) -> Any:
        if key not in handles:
            gpu, _, mig = key.partition("/mig")
            if mig:
                parent = handle(library, gpu)
                handles[key] = library.nvmlDeviceGetMigDeviceHandleByIndex(parent, int(mig))
            else:
                number = int(gpu.removeprefix("gpu"))
                handles[key] = library.nvmlDeviceGetHandleByIndex(number)
        return handles[key]

    def call(function: str, *args: Any) -> Any:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlFault(NVML_NO_PYTHON_PACKAGE, str(error)) from error
        try:
            real = [handle(pynvml, arg) if isinstance(arg, str) else arg for arg in args]
            return plain(getattr(pynvml, function)(*real))
        except pynvml.NVMLError as error:
            raise NvmlFault(int(error.value), str(error)) from error
        except AttributeError as error:
            # An older nvidia-ml-py or driver lacks the function.
            raise NvmlFault(NVML_NOT_SUPPORTED, str(error)) from error
        except UnicodeDecodeError as error:
            raise NvmlFault(NVML_NO_DATA, f"{function} answered with no text: {error}") from error

    return call


def plain(value: Any) -> Any:
    """NVML's answer as JSON can hold it: structs as dicts, tuples as lists, bytes as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    fields = getattr(value, "_fields_", None)
    if fields is not None:
        return {field[0]: plain(getattr(value, field[0])) for field in fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # nvidia-ml-py's "friendly" objects carry their fields as attributes.
    return {key: plain(var) for key, var in vars(value).items()}


def recorded(world: Machine) -> tuple[Machine, Record]:
    """The same world, and a record that fills with every question and answer."""
    record: Record = {"env": {}, "read": {}, "names": {}, "run": {}, "nvml": {}, "host": {}}

    def noting(kind: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*question: Any) -> Any:
            answer = ask(*question)
            record[kind][_key(question)] = answer
            return answer

        return asked

    def nvml(*question: Any) -> Any:
        try:
            answer = world.nvml(*question)
        except NvmlFault as fault:
            record["nvml"][_key(question)] = {"fault": [fault.code, fault.text]}
            raise
        record["nvml"][_key(question)] = {"answer": answer}
        return answer

    noted = replace(
        world,
        env=_NotingEnv(world.env, record["env"]),
        read=noting("read", world.read),
        names=noting("names", world.names),
        run=noting("run", world.run),
        host=noting("host", world.host),
        nvml=nvml,
    )
    return noted, record


def replayed(record: Record) -> Machine:
    """A world that answers from a record; what was not asked then has no answer now."""

    def nvml(*question: Any) -> Any:
        answer = record.get("nvml", {}).get(_key(question))
        if answer is None:
            missing = NVML_NOT_SUPPORTED if record.get("nvml") else NVML_LIBRARY_NOT_FOUND
            raise NvmlFault(missing, "not in the record")
        if "fault" in answer:
            raise NvmlFault(*answer["fault"])
        return answer["answer"]

    def from_notes(kind: str, otherwise: Any) -> Callable[..., Any]:
        return lambda *question: record.get(kind, {}).get(_key(question), otherwise)

    return Machine(
        env=record.get("env", {}),
        read=from_notes("read", None),
        names=from_notes("names", []),
        run=from_notes("run", None),
        host=from_notes("host", None),
        nvml=nvml,
    )


def _key(question: tuple[Any, ...]) -> str:
    """A question as one line: the function and its arguments."""
    flat = (str(one) for part in question for one in (part if isinstance(part, tuple) else (part,)))
    return " ".join(flat)


class _NotingEnv(Mapping[str, str]):
    """An environment that notes which variables were read and were set."""

    def __init__(self, env: Mapping[str, str], notes: dict[str, str]) -> None:
        self._env = env
        self._notes = notes

    def __getitem__(self, name: str) -> str:
        value = self._env[name]
        self._notes[name] = value
        return value

    def __iter__(self) -> Any:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)
