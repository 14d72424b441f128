"""Real processes with gloo between them, for tests of training: one function, run on every rank."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROGRAM = """
import pickle, sys, warnings
warnings.simplefilter("error")
import training_worlds
training_worlds.be_rank(sys.argv[1])
"""


def together(
    ranks: int, work: Callable[..., Any], *args: Any, folder: Path, timeout_s: float = 120
) -> list[Any]:
    """What `work(rank, size, *args)` returned on each rank; raises with the output of the first that failed.

    A plain process for each rank: nothing of the tests' own process is inherited.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token = f"{work.__name__}-{ranks}-{len(list(folder.iterdir()))}"
    orders = []
    for rank in range(ranks):
        order = folder / f"{token}-{rank}.order"
        order.write_bytes(pickle.dumps((work.__module__, work.__name__, rank, ranks, args)))
        orders.append(order)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(order)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for order in orders
    ]
    try:
        outputs = [one.communicate(timeout=timeout_s)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    failed = [f"rank {rank}:\n{outputs[rank]}" for rank, one in enumerate(started) if one.returncode]
    assert not failed, "\n".join(failed)
    return [pickle.loads(order.with_suffix(".answer").read_bytes()) for order in orders]  # noqa: S301 - ours


def be_rank(order: str) -> None:
    import importlib

    import torch

    module, name, rank, size, args = pickle.loads(Path(order).read_bytes())  # noqa: S301 - ours
    torch.set_num_threads(1)
    answer = getattr(importlib.import_module(module), name)(rank, size, *args)
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
