"""Access to the operating system, commands and NVML behind one object that can be recorded and replayed.

`this_machine()` is the real machine. `record_machine(world)` records every query with its answer, and
`replay_machine(record)` answers from such a record, so that tests can repeat detection of another machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""Queries and answers by kind, as JSON values."""

NVML_NOT_SUPPORTED = 3
NVML_LIBRARY_NOT_FOUND = 12
NVML_NO_DATA = 21
NVML_NO_PYTHON_PACKAGE = -1
"""Not an NVML code: the Python package nvidia-ml-py is missing."""

_COMMAND_TIMEOUT_S = 60


class NvmlFault(Exception):  # noqa: N818 - callers decide whether it is an error
    """An NVML call that failed: its return code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Queries about a machine. A callable returns None, or raises NvmlFault, if there is no answer."""

    env: Mapping[str, str]
    """Environment variables."""
    read: Callable[[str], str | None]
    """Return the text of a file; None if it cannot be read."""
    names: Callable[[str], list[str]]
    """Return the entries of a folder; empty if there is none."""
    run: Callable[[tuple[str, ...]], str | None]
    """Return the standard output of a command; None if it is missing or fails."""
    nvml: Callable[..., Any]
    """Call an NVML function by name; a device is "gpu0", a MIG slice of it "gpu0/mig1"."""
    host: Callable[[str], Any]
    """Return a fact about the host or Python by name; see `_HOST`."""


def this_machine() -> Machine:
    """Return the real machine."""
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
        process = subprocess.run(  # noqa: S603 - fixed commands, no shell
            argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def _host(question: str) -> Any:
    """Return a fact from Python's libraries: name, system, python, cpus, affinity, ram, package:NAME, ..."""
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
    """Return the text of torch/version.py, which names the CUDA release without importing torch."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return _read(str(Path(spec.submodule_search_locations[0]) / "version.py"))


def _shm(_: str) -> int | None:
    try:
        stats = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size only
    except (OSError, AttributeError):
        return None
    return stats.f_blocks * stats.f_frsize


def _limit(name: str) -> list[int | None] | None:
    """Return the soft and the hard limit of `ulimit`, None for unlimited."""
    import resource

    try:
        limits = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    except (AttributeError, OSError, ValueError):
        return None
    return [None if limit == resource.RLIM_INFINITY else limit for limit in limits]


def _disk(path: str) -> dict[str, int] | None:
    """Return total and free bytes and files of the disk that holds a folder."""
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
    """Return a function that calls NVML with trimtab's device keys and converts structs to plain values."""
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
            return to_plain(getattr(pynvml, function)(*real))
        except pynvml.NVMLError as error:
            raise NvmlFault(int(error.value), str(error)) from error
        except AttributeError as error:
            # An older nvidia-ml-py or driver lacks the function.
            raise NvmlFault(NVML_NOT_SUPPORTED, str(error)) from error
        except UnicodeDecodeError as error:
            raise NvmlFault(NVML_NO_DATA, f"{function} answered with no text: {error}") from error

    return call


def to_plain(value: Any) -> Any:
    """Convert an NVML answer to JSON values: structs to dicts, tuples to lists, bytes to text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    fields = getattr(value, "_fields_", None)
    if fields is not None:
        return {field[0]: to_plain(getattr(value, field[0])) for field in fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # nvidia-ml-py's "friendly" objects carry their fields as attributes.
    return {key: to_plain(var) for key, var in vars(value).items()}


def record_machine(world: Machine) -> tuple[Machine, Record]:
    """Return the same machine, and a record that collects every query and answer."""
    record: Record = {"env": {}, "read": {}, "names": {}, "run": {}, "nvml": {}, "host": {}}

    def recording(kind: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def ask_and_record(*question: Any) -> Any:
            answer = ask(*question)
            record[kind][_key(question)] = answer
            return answer

        return ask_and_record

    def nvml(*question: Any) -> Any:
        try:
            answer = world.nvml(*question)
        except NvmlFault as fault:
            record["nvml"][_key(question)] = {"fault": [fault.code, fault.text]}
            raise
        record["nvml"][_key(question)] = {"answer": answer}
        return answer

    recorder = replace(
        world,
        env=_RecordingEnv(world.env, record["env"]),
        read=recording("read", world.read),
        names=recording("names", world.names),
        run=recording("run", world.run),
        host=recording("host", world.host),
        nvml=nvml,
    )
    return recorder, record


def replay_machine(record: Record) -> Machine:
    """Return a machine that answers from a record; other queries have no answer."""

    def nvml(*question: Any) -> Any:
        answer = record.get("nvml", {}).get(_key(question))
        if answer is None:
            missing = NVML_NOT_SUPPORTED if record.get("nvml") else NVML_LIBRARY_NOT_FOUND
            raise NvmlFault(missing, "not in the record")
        if "fault" in answer:
            raise NvmlFault(*answer["fault"])
        return answer["answer"]

    def from_record(kind: str, otherwise: Any) -> Callable[..., Any]:
        return lambda *question: record.get(kind, {}).get(_key(question), otherwise)

    return Machine(
        env=record.get("env", {}),
        read=from_record("read", None),
        names=from_record("names", []),
        run=from_record("run", None),
        host=from_record("host", None),
        nvml=nvml,
    )


def _key(question: tuple[Any, ...]) -> str:
    """Return a query as one line: the function and its arguments."""
    flat = (str(word) for part in question for word in (part if isinstance(part, tuple) else (part,)))
    return " ".join(flat)


class _RecordingEnv(Mapping[str, str]):
    """An environment that records the variables that are read and set."""

    def __init__(self, env: Mapping[str, str], record: dict[str, str]) -> None:
        self._env = env
        self._record = record

    def __getitem__(self, name: str) -> str:
        value = self._env[name]
        self._record[name] = value
        return value

    def __iter__(self) -> Any:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)
