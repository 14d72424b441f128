"""Real processes for tests, with gloo between them: one function, run by every rank of a small world."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROGRAM = """
import sys
import worlds
worlds.be_rank(sys.argv[1])
"""


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
    """Return what `function(*args)` returns on every rank, with the variables that torchrun sets.

    The function is one of a module. An error on a rank is an error here.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = [variables(rank, size, port) for port in [free_port()] for rank in range(size)]
        return _run(function, [args] * size, Path(folder), timeout_s, env)


def together(
    ranks: int, work: Callable[..., Any], *args: Any, folder: Path, timeout_s: float = 120
) -> list[Any]:
    """Return what `work(rank, ranks, *args)` returns on every rank, where warnings are errors."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{work.__name__}-{ranks}-{len(list(folder.iterdir()))}"
    place.mkdir()
    return _run(work, [(rank, ranks, *args) for rank in range(ranks)], place, timeout_s, strict=True)


def _run(
    work: Callable[..., Any],
    args: list[Any],
    folder: Path,
    timeout_s: float,
    env: list[dict[str, str]] | None = None,
    *,
    strict: bool = False,
) -> list[Any]:
    """Call a function in a process for each list of arguments; raise with the output of those that failed.

    Nothing of the tests' own process is inherited.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    common = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started = []
    for rank, own in enumerate(args):
        order = folder / f"{rank}.order"
        order.write_bytes(pickle.dumps((work.__module__, work.__name__, own, strict)))
        with (folder / f"{rank}.out").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(order)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=common | (env[rank] if env else {}),
            )
        started.append(process)
    ends_at = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in started) and not any(
            process.returncode for process in started
        ):
            if time.monotonic() > ends_at:
                raise TimeoutError(f"{work.__name__} hangs on {len(args)} processes")
            time.sleep(0.02)
    finally:
        failed = [rank for rank, process in enumerate(started) if process.poll()]
        for process in started:
            process.kill()
            process.wait()
    said = [f"rank {rank}:\n{(folder / f'{rank}.out').read_text(errors='replace')}" for rank in failed]
    assert not failed, "\n".join(said)
    return [pickle.loads((folder / f"{rank}.answer").read_bytes()) for rank in range(len(args))]  # noqa: S301 - ours


def be_rank(order: str) -> None:
    module, name, args, strict = pickle.loads(Path(order).read_bytes())  # noqa: S301 - ours
    if strict:
        warnings.simplefilter("error")
    torch.set_num_threads(1)
    answer = getattr(importlib.import_module(module), name)(*args)
    Path(order).with_suffix(".answer").write_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def world_of(size: int, rank: int, store: Path) -> Iterator[bool]:
    """Ranks 0 to size - 1 in a process group; False on the others, which stay out of it.

    One start of processes, which takes seconds, serves for many worlds, one after the other.
    """
    import torch.distributed as dist

    if rank >= size:
        yield False
        return
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        yield True
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure_gap(found: Any, expected: Any) -> float:
    """Return the largest relative difference of losses and weights."""
    gaps = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found[0], expected[0], strict=True)]
    gaps += [
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found[1], expected[1], strict=True)
    ]
    return float(max(gaps))
