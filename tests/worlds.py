"""Real processes for tests: a function run by every rank of a small world over gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import tempfile
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.spawn import start_processes

if TYPE_CHECKING:
    from collections.abc import Callable


class Drill:
    """Faults that happen once each, at a point of a step on a rank."""

    def __init__(self, *due: tuple[str, int, int]) -> None:
        self.due = list(due)

    def at(self, point: str, step: int, rank: int) -> Any:
        if (point, step, rank) not in self.due:
            return None
        self.due.remove((point, step, rank))
        if point == "gradient":
            return "nan"
        raise torch.OutOfMemoryError("a drill")


def free_port() -> int:
    """One with free ones after it for further meetings: below those that the kernel gives to connections."""
    while True:
        port = 12_000 + secrets.randbelow(18_000)
        with closing(socket.socket()) as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def everywhere(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """What a function returns on every rank; the function is one of a module. An error there is one here."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _one, (size, port, folder, (function, args)), nprocs=size, join=False, start_method="spawn"
        )
        until = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=1):
                if time.monotonic() > until:
                    raise TimeoutError(f"{function.__name__} hangs on {size} processes")
        finally:
            for process in context.processes:
                process.kill()
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]  # noqa: S301


def _one(rank: int, size: int, port: int, folder: str, told: tuple[Callable[..., Any], Any]) -> None:
    import torch

    function, args = told

    torch.set_num_threads(1)
    os.environ.update(variables(rank, size, port))
    try:
        found = function(*args)
    except BaseException:
        traceback.print_exc()
        raise
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
