"""Measure collectives between the processes that there are: NCCL between GPUs, gloo between CPU processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.spec.calibration import CollectiveTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TIMEOUT_S = 300.0
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SIZES = {"nccl": tuple(4**power for power in range(6, 15)), "gloo": tuple(4**power for power in range(6, 12))}
"""Bytes: 4 KiB to 256 MiB between GPUs, to 4 MiB between CPU processes."""
REPEATS = 5
MOST_PROCS = 64


class LinkGroup(NamedTuple):
    """Ranks that communicate: `ranks` of them, whose numbers differ by `apart`."""

    ranks: int
    apart: int


def list_groups(world: int, per_node: int) -> list[LinkGroup]:
    """List the groups to measure: of 2, 4, ... ranks of a node, all ranks, and one rank of each node.

    >>> list_groups(16, 8)
    [LinkGroup(ranks=2, apart=1), LinkGroup(ranks=4, apart=1), LinkGroup(ranks=8, apart=1), \
LinkGroup(ranks=16, apart=1), LinkGroup(ranks=2, apart=8)]
    """
    local = min(world, per_node)
    sizes = {2**power for power in range(1, 8) if 2**power < local and world % 2**power == 0}
    groups = [LinkGroup(size, 1) for size in sorted((sizes | {local, world}) - {1})]
    if world > local > 1:
        groups.append(LinkGroup(world // local, local))
    return groups


def measure_local_links(procs: int, backend: str) -> list[CollectiveTimes]:
    """Start processes on this machine, which measure the links between them; return what they found."""
    if not 2 <= procs <= MOST_PROCS:  # noqa: PLR2004 - several
        raise WrongUse(
            f"--procs {procs}",
            found="links join at least two processes, and one machine takes at most 64",
            cure="Name 2 to 64, as in --procs 2.",
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "trimtab.calibration.links", backend],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for rank in range(procs)
    ]
    return _collect(ranks)


def _collect(ranks: list[subprocess.Popen[bytes]]) -> list[CollectiveTimes]:
    """Return what rank 0 printed; end all ranks when one fails or all take too long."""
    ends_at = time.monotonic() + TIMEOUT_S
    try:
        outputs = [rank.communicate(timeout=max(1.0, ends_at - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            "calibrate --links",
            found=f"the processes did not end within {TIMEOUT_S:.0f} s",
            cure="Look for a process that holds a GPU, or measure fewer: --procs 2.",
        ) from None
    finally:
        for rank in ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.communicate()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise EnvironmentFault(
                "calibrate --links",
                found=f"rank {ranks.index(rank)} failed: {last[:300]}",
                cure="Run `trimtab doctor` on this machine.",
            )
    return msgspec.json.decode(outputs[0][0].splitlines()[-1], type=list[CollectiveTimes])


def measure_links_here(backend: str) -> list[CollectiveTimes]:
    """Measure as one rank of a group that RANK, WORLD_SIZE and MASTER_ADDR describe; all ranks return it."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        return [
            times
            for place, group in enumerate(list_groups(world, per_node))
            for times in _measure_group(
                group, backend, device, per_node, sending=place == 0 or group.apart > 1
            )
        ]
    finally:
        dist.destroy_process_group()


def _measure_group(
    group: LinkGroup, backend: str, device: Any, per_node: int, *, sending: bool
) -> Iterator[CollectiveTimes]:
    """Measure each collective in all groups of a kind at the same time, as training runs them.

    With `sending`, messages between two ranks too: they are the same in groups of any size.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    span = group.ranks * group.apart
    members = [
        [base + offset + place * group.apart for place in range(group.ranks)]
        for base in range(0, world, span)
        for offset in range(group.apart)
    ]
    own = next(ranks for ranks in members if dist.get_rank() in ranks)
    handles = {tuple(ranks): dist.new_group(ranks) for ranks in members}
    handle = handles[tuple(own)]
    local = max(1, min(group.ranks, per_node // group.apart))
    for collective in COLLECTIVES:
        if collective == "send" and not sending:
            continue
        sizes = SIZES[backend]
        seconds = [_time_call(_make_call(collective, size, own, handle, device), device) for size in sizes]
        latency, rate = fit_line(sizes, seconds)
        yield CollectiveTimes(
            collective=collective,
            ranks=2 if collective == "send" else group.ranks,
            nodes=min(2, -(-group.ranks // local)) if collective == "send" else -(-group.ranks // local),
            backend=backend,
            sizes=sizes,
            seconds=tuple(seconds),
            latency_s=latency,
            bytes_per_s=rate,
        )


def _make_call(collective: str, size: int, own: list[int], handle: Any, device: Any) -> Callable[[], Any]:
    """Return a function that runs the collective once."""
    import torch
    import torch.distributed as dist

    ranks = len(own)
    count = max(1, size // 4 // ranks) * ranks
    whole = torch.ones(count, device=device)
    share = torch.ones(count // ranks, device=device)
    other = torch.empty_like(whole)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=handle)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, share, group=handle)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(share, whole, group=handle)
    if collective == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=handle)
    place = own.index(dist.get_rank())
    if ranks % 2 and place == ranks - 1:
        return lambda: None
    peer = own[place ^ 1]
    send = place % 2 == 0
    return lambda: dist.send(whole, peer, group=handle) if send else dist.recv(other, peer, group=handle)


def _time_call(call: Callable[[], Any], device: Any) -> float:
    """Return the seconds of a call: the median of several, of the slowest rank."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        call()
    times = []
    for _ in range(REPEATS):
        wait()
        dist.barrier()
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    found = torch.tensor(sorted(times)[REPEATS // 2], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency and bytes per second of the line nearest to the times, by relative error.

    >>> fit_line([1000, 2000, 4000], [2e-6, 3e-6, 5e-6])
    (1e-06, 1000000000.0)
    """
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    size = sum(weight * value for weight, value in zip(weights, sizes, strict=True)) / total
    time_s = sum(weight * value for weight, value in zip(weights, seconds, strict=True)) / total
    spread = sum(weight * (value - size) ** 2 for weight, value in zip(weights, sizes, strict=True))
    slope = sum(
        weight * (value - size) * (second - time_s)
        for weight, value, second in zip(weights, sizes, seconds, strict=True)
    )
    # Noise may hide the bandwidth, or put the line below zero: then the largest or smallest time decides.
    each = slope / spread if slope > 0 else seconds[-1] / sizes[-1]
    latency = time_s - each * size
    latency = latency if latency > 0 else min(seconds)
    return round(latency, 12), round(1 / each, 3)


if __name__ == "__main__":
    result = measure_links_here(sys.argv[1])
    if os.environ["RANK"] == "0":
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
