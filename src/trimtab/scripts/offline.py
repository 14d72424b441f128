"""Keep a script off the network, and switch the services that it reports to into their offline modes."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.scripts.sandbox_record import SandboxRecord

REASON = "trimtab keeps scripts off the network"

DEAD_PROXY = "http://127.0.0.1:9"

OFFLINE_SWITCHES = {
    # Hugging Face: cached models and data sets are found, nothing is downloaded.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
    "DISABLE_TELEMETRY": "1",
    # Trackers of experiments: accept every call, and do nothing.
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "COMET_LOGGING_CONSOLE": "error",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "AIM_TRACKING_DISABLED": "1",
    # Others that send statistics or look for updates.
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "YOLO_OFFLINE": "true",
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "PIP_NO_INDEX": "1",
    # A fork after threads of the tokenizer started prints a warning for each worker.
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "PYTHONDONTWRITEBYTECODE": "1",
}

SCRATCH_FOLDERS = {
    "TMPDIR": "tmp",
    "TMP": "tmp",
    "TEMP": "tmp",
    "WANDB_DIR": "wandb",
    "WANDB_CACHE_DIR": "wandb/cache",
    "WANDB_DATA_DIR": "wandb/data",
    "WANDB_CONFIG_DIR": "wandb/config",
    "COMET_OFFLINE_DIRECTORY": "comet",
    "CLEARML_CACHE_DIR": "clearml",
    "TRACKIO_DIR": "trackio",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "RAY_TMPDIR": "tmp",
}
"""Folders that native code writes to, which cannot be redirected file by file."""


def sandbox_environment(scratch: Path) -> dict[str, str]:
    """Return the variables for a script in a sandbox; make the folders that they name.

    `install_sandbox` sets them; set them when the process starts as well, for what Python and its libraries
    read as they are loaded.
    """
    folders = {name: str(scratch / folder) for name, folder in SCRATCH_FOLDERS.items()}
    for folder in set(folders.values()):
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    return {**OFFLINE_SWITCHES, **folders, "MLFLOW_TRACKING_URI": f"file:{scratch}/mlruns"}


def is_local(host: Any) -> bool:
    """Return whether a host is this machine.

    >>> is_local("127.0.0.1"), is_local("::1"), is_local("huggingface.co"), is_local("8.8.8.8")
    (True, True, False, False)
    """
    text = host.decode(errors="replace") if isinstance(host, bytes | bytearray) else str(host or "")
    text = text.partition("%")[0]
    if text.lower() in ("", "localhost", "localhost.localdomain", socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _is_number(host: Any) -> bool:
    try:
        ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return True


def cut_network(record: SandboxRecord) -> dict[int, Any]:
    """Refuse connections to other machines; return the new functions by the ids of the old ones."""

    def check(address: Any) -> None:
        # A text is the path of a unix socket; other families than IP stay on this machine.
        if isinstance(address, tuple) and address and not is_local(address[0]):
            where = ":".join(str(part) for part in address[:2])
            record.add_network(where)
            raise OSError(errno.ENETUNREACH, f"{REASON}: {where}")

    def guard_method(name: str, position: int) -> None:
        original = getattr(socket.socket, name)

        def method(self: socket.socket, *arguments: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and len(arguments) > position:
                check(arguments[position])
            return original(self, *arguments)

        setattr(socket.socket, name, method)

    for name in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy"):
        # For native libraries and programs: os.environ keeps its values, so that Python's own attempts fail
        # with the reason. The port is the one that discards everything; hardly any machine has it open.
        os.putenv(name, DEAD_PROXY)
        os.putenv(name.upper(), DEAD_PROXY)
    os.putenv("no_proxy", "localhost,127.0.0.1,::1")
    guard_method("connect", 0)
    guard_method("connect_ex", 0)
    guard_method("sendmsg", 3)
    _guard_sendto(check)
    return _guard_names(record)


def _guard_sendto(check: Any) -> None:
    """Check the address of sendto, which is its last argument."""
    original = socket.socket.sendto

    def sendto(self: socket.socket, *arguments: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            check(arguments[-1])
        return original(self, *arguments)

    socket.socket.sendto = sendto  # type: ignore[method-assign, assignment]


def _guard_names(record: SandboxRecord) -> dict[int, Any]:
    """Refuse to look up the addresses of other machines."""
    replaced: dict[int, Any] = {}

    def guard_function(name: str) -> None:
        original = getattr(socket, name)

        def function(host: Any, *arguments: Any, **options: Any) -> Any:
            if not is_local(host) and not _is_number(host):
                text = host.decode(errors="replace") if isinstance(host, bytes | bytearray) else str(host)
                record.add_network(text)
                raise socket.gaierror(socket.EAI_NONAME, f"{REASON}: {text}")
            return original(host, *arguments, **options)

        setattr(socket, name, function)
        replaced[id(original)] = function

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        guard_function(name)
    return replaced
