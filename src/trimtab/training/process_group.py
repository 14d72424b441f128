"""Which process of how many this is, and how they meet.

`read` is a pure function of the environment's variables: plain python, torchrun, srun, or RANK, WORLD_SIZE
and LOCAL_RANK set by hand. `connect` makes the process group. What is half-set, contradictory or does not
answer is an error at once, with the variable named; never a wait of half an hour.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from trimtab.errors import EnvironmentFault
from trimtab.probe.scheduler import parse_node_list
from trimtab.spec.base import Noun, check_minimum
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from trimtab.spec import Setting


ALONE, TORCHRUN, SRUN, BY_HAND = "alone", "torchrun", "srun", "by hand"
JOIN_S = 120.0
"""How long processes wait for each other to come, before the first one says who is missing."""
_FIRST_PORT, _PORTS = 20_000, 20_000
"""Where srun's processes meet, by the number of the job, unless MASTER_PORT says."""
_RENDEZVOUS = itertools.count()
"""Processes that make several runs meet as often, and torchrun remembers the meetings before."""
_LAUNCH_FIX = (
    "Start with torchrun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every "
    "process; for a single process unset them all."
)


class World(Noun, frozen=True, kw_only=True):
    """This process among the processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this process on its node."""
    node: int = 0
    launcher: str = ALONE
    device: str = "cpu"
    backend: str = "gloo"
    address: str | None = None
    """Host of rank 0; None where there is nobody to meet."""
    port: int | None = None
    restarts: int = 0
    """How often torchrun has started the processes again."""
    agent_listens: bool = False
    """Whether torchrun itself listens on the port, rather than rank 0."""

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def faults(self) -> list[str]:
        """A rank is one of the processes."""
        wrong = check_minimum(0, rank=self.rank, local_rank=self.local_rank, node=self.node) + check_minimum(
            1, size=self.size
        )
        if self.rank >= self.size:
            wrong.append(f"rank {self.rank} is not below size {self.size}")
        return wrong


class _VariableNames(NamedTuple):
    """What a launcher calls things; the first variable that is set counts."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    node: tuple[str, ...]


_TORCH = _VariableNames(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("GROUP_RANK", "NODE_RANK"))
_SLURM = _VariableNames(
    ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ("SLURM_NODEID",)
)


def read_world(env: Mapping[str, str], gpus: int = 0) -> World:
    """The world that the variables describe, on a node where this process sees so many GPUs.

    >>> read({}).size
    1
    >>> read({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}).rank
    1
    """
    launcher = _detect_launcher(env)
    if launcher == ALONE:
        left = [name for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)]
        if left:
            raise _fault(
                " and ".join(f"{name}={env[name]}" for name in left),
                "a process group is announced, and neither RANK nor WORLD_SIZE is set",
            )
        return _assign_device(World(), gpus, env)
    names = _SLURM if launcher == SRUN else _TORCH
    size = _read_number(env, names.size, launcher, least=1)
    rank = _read_number(env, names.rank, launcher)
    # A single process needs no number on its node.
    local = _read_number(env, names.local_rank, launcher, otherwise=0 if size == 1 else None)
    node = _read_number(env, names.node, launcher, otherwise=0)
    if rank >= size:
        shown = f"{_show_variable(env, names.rank)} with {_show_variable(env, names.size)}"
        raise _fault(shown, f"ranks count from 0, so that the highest of {size} is {size - 1}")
    world = World(rank=rank, size=size, local_rank=local, node=node, launcher=launcher)
    if size > 1:
        address, port = _slurm_address(env) if launcher == SRUN else _read_master(env)
        world = world.replace(address=address, port=port)
    if launcher == TORCHRUN:
        restarts = parse_whole(env.get("TORCHELASTIC_RESTART_COUNT", "")) or 0
        listens = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        world = world.replace(restarts=restarts, agent_listens=listens)
    return _assign_device(world, gpus, env)


def _detect_launcher(env: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in env:
        return TORCHRUN
    hand = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env]
    # A batch script has SLURM_PROCID too; only what srun started has a step as well.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return BY_HAND if hand else ALONE
    if {"RANK", "WORLD_SIZE"} <= set(hand):
        return BY_HAND
    theirs = {"RANK": _SLURM.rank, "WORLD_SIZE": _SLURM.size, "LOCAL_RANK": _SLURM.local_rank}
    for name in hand:
        said = next((env[their] for their in theirs[name] if their in env), None)
        if said is not None and said.strip() != env[name].strip():
            raise _fault(
                f"{name}={env[name]}",
                f"it contradicts {_show_variable(env, theirs[name])}, which srun has set",
            )
    return SRUN


def _read_number(
    env: Mapping[str, str],
    names: tuple[str, ...],
    launcher: str,
    *,
    least: int = 0,
    otherwise: int | None = None,
) -> int:
    name = next((name for name in names if name in env), None)
    if name is None:
        if otherwise is not None:
            return otherwise
        others = [
            f"{name}={env[name]}"
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID")
            if name in env
        ]
        raise _fault(
            ", ".join(others) or launcher, f"the process group is half-set: {' or '.join(names)} is missing"
        )
    number = parse_whole(env[name])
    if number is None or number < least:
        raise _fault(f"{name}={env[name]}", f"it is no whole number from {least} up")
    return number


def _show_variable(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((f"{name}={env[name]}" for name in names if name in env), names[0])


def _read_master(env: Mapping[str, str]) -> tuple[str, int]:
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if lacking:
        raise _fault(
            f"WORLD_SIZE={env['WORLD_SIZE']}", f"{' and '.join(lacking)} is missing, where rank 0 listens"
        )
    return env["MASTER_ADDR"], _parse_port(env["MASTER_PORT"])


def _parse_port(text: str) -> int:
    port = parse_whole(text)
    if port is None or not 0 < port < 2**16:
        raise _fault(f"MASTER_PORT={text}", "a port is a whole number from 1 to 65535")
    return port


def _slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Where srun's processes meet: on the first host of the step, at a port that follows from the job."""
    address = env.get("MASTER_ADDR")
    if not address:
        listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
        try:
            hosts = parse_node_list(listed)
        except ValueError as error:
            raise _fault(f"SLURM_JOB_NODELIST={listed[:200]}", f"it cannot be read: {error}") from error
        if not hosts:
            raise _fault(f"SLURM_PROCID={env['SLURM_PROCID']}", "SLURM_JOB_NODELIST is missing")
        address = "127.0.0.1" if len(hosts) == 1 else hosts[0]
    if env.get("MASTER_PORT"):
        return address, _parse_port(env["MASTER_PORT"])
    job, step = (parse_whole(env.get(name, "")) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return address, _FIRST_PORT + (job * 7 + step) % _PORTS


def _assign_device(world: World, gpus: int, env: Mapping[str, str]) -> World:
    """The world with the device of this process."""
    if not gpus:
        return world
    index = world.local_rank
    per_task = any("gpu" in env.get(name, "") for name in ("SLURM_TRES_PER_TASK",))
    if world.launcher == SRUN and gpus == 1 and (per_task or "SLURM_GPUS_PER_TASK" in env):
        # Slurm shows every task its own GPU and no other.
        index = 0
    if index >= gpus:
        many = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        raise _fault(
            f"LOCAL_RANK={world.local_rank}",
            f"this process sees {many}, and local ranks count from 0",
            "Start as many processes a node as it has GPUs, or make more of them visible "
            "(CUDA_VISIBLE_DEVICES).",
        )
    return world.replace(device=f"cuda:{index}", backend="cpu:gloo,cuda:nccl")


def _fault(given: str, found: str, cure: str = _LAUNCH_FIX) -> EnvironmentFault:
    return EnvironmentFault(given, found=found, cure=cure)


def connect(world: World, *, timeout_min: float = 10, join_s: float = JOIN_S) -> None:
    """Make the process group; nothing for a single process.

    `timeout_min` is for collectives once all are there, `join_s` for coming together.
    """
    if world.size == 1:
        return
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if world.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(world.device))
    meeting = f"{world.restarts}.{next(_RENDEZVOUS)}"
    store = _open_store(world, join_s, meeting)
    options: dict[str, Any] = {}
    if world.device.startswith("cuda"):
        options["device_id"] = torch.device(world.device)
    dist.init_process_group(
        world.backend,
        store=PrefixStore(f"group{meeting}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(minutes=timeout_min),
        **options,
    )


def connect_single(world: World) -> None:
    """A process group of one, for what cannot do without."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if not dist.is_initialized():
        dist.init_process_group(world.backend, store=HashStore(), rank=0, world_size=1)


def disconnect() -> None:
    """Leave the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _open_store(world: World, join_s: float, meeting: str) -> Any:
    """A store in which all processes have said that they are there."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    assert world.address is not None  # noqa: S101 - read() gives both where there is more than one
    assert world.port is not None  # noqa: S101
    place = f"MASTER_ADDR={world.address}, MASTER_PORT={world.port}"
    listens = world.is_main and not world.agent_listens
    if listens:
        _check_free(world.port)
    else:
        _check_answers(world.address, world.port, join_s)
    wait = timedelta(seconds=join_s)
    try:
        store = TCPStore(
            world.address, world.port, None, is_master=listens, timeout=wait, wait_for_workers=False
        )
        if store.add(f"rank{world.rank}/{meeting}", 1) > 1:
            raise _fault(f"RANK={world.rank}", "another process of this run has the same rank")
    except dist.DistError as error:
        raise _fault(place, f"rank 0 does not answer as a store: {_first_line(error)}") from error
    keys = [f"rank{number}/{meeting}" for number in range(world.size)]
    try:
        store.wait(keys, wait)
    except (dist.DistError, RuntimeError) as error:
        missing = [number for number, key in enumerate(keys) if not _has_key(store, key)]
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")  # noqa: PLR2004
        raise _fault(
            f"{place}, WORLD_SIZE={world.size}",
            f"after {join_s:.0f} s these ranks had not come: {listed or 'unknown'}",
            "Look at their output; every node must reach rank 0 by that name and port.",
        ) from error
    return store


def _has_key(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def _check_free(port: int) -> None:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            used = error.errno == errno.EADDRINUSE
            raise _fault(
                f"MASTER_PORT={port}",
                "another program listens on it" if used else f"rank 0 cannot listen on it: {error.strerror}",
                "Choose another MASTER_PORT, or end the run that has it.",
            ) from error


def _check_answers(address: str, port: int, join_s: float) -> None:
    """Rank 0 may still be starting; a name that does not exist will not come to exist."""
    place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    try:
        socket.getaddrinfo(address, port, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise _fault(place, f"there is no such host: {error.strerror or error}") from error
    until = time.monotonic() + join_s
    while True:
        try:
            socket.create_connection((address, port), timeout=min(5.0, join_s)).close()
        except OSError as error:
            if time.monotonic() > until:
                raise _fault(
                    place,
                    f"it did not answer within {join_s:.0f} s: {error.strerror or error}",
                    "Start rank 0 too, on that host; every node must reach it by that name and port.",
                ) from error
            time.sleep(0.1)
        else:
            return


# Which ranks share data and gradients, and how weights and buffers become the same on all of them.


@dataclass(frozen=True)
class RankGroups:
    """Who this rank shares data and gradients with.

    Ranks that hold the same count one after the other: the ranks of the first branch, or of the first stage
    of a pipeline, come first.
    """

    size: int = 1
    branch: int = 0
    """Number of the branch that this rank computes."""
    stage: int = 0
    """Number of the pipeline stage that this rank computes."""
    stages: int = 1
    data_rank: int = 0
    data_parallel: int = 1
    data_group: Any = None
    """Ranks of the same branch or stage; None where these are all ranks, or this one alone."""
    first: int = 0
    """The first rank of the same branch or stage."""

    @property
    def data_alone(self) -> bool:
        """Whether no other rank has the same branch or stage."""
        return self.data_parallel == 1

    @property
    def counts(self) -> bool:
        """Whether samples are counted on this rank: all branches and all stages see the same ones."""
        return self.branch == 0 and self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the loss comes to be on this rank."""
        return self.stage == self.stages - 1

    @property
    def settles(self) -> int:
        """The rank whose buffers count for all: the last stage of a pipeline meets all that are shared."""
        return (self.stages - 1) * self.data_parallel

    def next_to(self, stage: int) -> int:
        """The rank that has another stage of the same samples."""
        return stage * self.data_parallel + self.data_rank


def make_groups(setting: Setting, world: World) -> RankGroups:
    """The groups of a setting; every rank makes all of them, in the same order."""
    mesh = setting.mesh
    ranks = mesh.branch_ranks if mesh.branch > 1 else (mesh.data_parallel,) * mesh.pp
    if len(ranks) == 1:
        return RankGroups(size=world.size, data_rank=world.rank, data_parallel=world.size)
    found = RankGroups()
    first = 0
    for number, count in enumerate(ranks):
        held = range(first, first + count)
        group = dist.new_group(list(held)) if count > 1 else None
        if world.rank in held:
            found = RankGroups(
                size=world.size,
                branch=number if mesh.branch > 1 else 0,
                stage=number if mesh.pp > 1 else 0,
                stages=mesh.pp,
                data_rank=world.rank - first,
                data_parallel=count,
                data_group=group,
                first=first,
            )
        first += count
    return found


class Buffers:
    """Buffers that a forward pass changes: put back when a step is repeated, alike on all ranks after it."""

    def __init__(
        self, entries: Sequence[tuple[torch.Tensor, Any, int]], running: frozenset[int] = frozenset()
    ) -> None:
        """`entries` come with the group that shares them and the first rank in it; -1: nobody else has it.

        `running` names by id the running statistics of normalisations, which change without counting it.
        """
        self._entries = list(entries)
        self._running = [number for number, (one, *_) in enumerate(entries) if id(one) in running]
        self._followed: list[int] | None = None
        """Which of them change; None before the first step has shown it."""
        self._versions: list[int] = []
        self.copies: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Remember what there is before a step."""
        if not self._entries:
            return
        watched = range(len(self._entries)) if self._followed is None else self._followed
        self.copies = {}
        by_kind: dict[Any, list[int]] = {}
        for number in watched:
            buffer = self._entries[number][0]
            by_kind.setdefault((buffer.dtype, buffer.device), []).append(number)
        for (kind, _), numbers in by_kind.items():
            buffers = [self._entries[number][0] for number in numbers]
            # Few launches for many small buffers.
            plain = kind in (torch.float32, torch.float16, torch.bfloat16, torch.int64)
            copied = torch._foreach_add(buffers, 0) if plain else [buffer.clone() for buffer in buffers]
            self.copies.update(zip(numbers, copied, strict=True))
        self._versions = [buffer._version for buffer, *_ in self._entries]

    def back(self) -> None:
        """As they were before the step."""
        for number, copy in self.copies.items():
            buffer = self._entries[number][0]
            buffer.copy_(copy)
            self._versions[number] = buffer._version

    def is_settled(self, ranks: int) -> bool:
        """Whether it is known which of them change, and no other rank has to hear of it after a step."""
        return not self._entries or (self._followed is not None and (ranks == 1 or not self._followed))

    def strays(self) -> int:
        """How many have changed that are not known to."""
        known = () if self._followed is None else self._followed
        return len(set(self._changed()).difference(known))

    def learn(self, device: Any) -> None:
        """All ranks agree on which buffers change; all call it when the status says that one has strays."""
        mine = {*self._changed(), *(self._followed or ())}
        # First what all ranks hold, then what only those of this branch hold: other branches have other ones.
        for shared in (True, False):
            numbers = [
                number
                for number, (_, group, source) in enumerate(self._entries)
                if source >= 0 and (group is None) is shared
            ]
            if numbers:
                flags = [int(number in mine) for number in numbers]
                mask = torch.tensor(flags, dtype=torch.int64, device=device)
                dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._entries[numbers[0]][1])
                mine |= {number for number, flag in zip(numbers, mask.tolist(), strict=True) if flag}
        self._followed = sorted(mine)

    def settle(self) -> None:
        """After a step: rank 0's values on all ranks."""
        if self._entries and self._followed is None:
            self._followed = []
        self.copies = {}
        for number in self._followed or ():
            buffer, group, source = self._entries[number]
            if source >= 0:
                dist.broadcast(buffer, source, group=group)

    def _changed(self) -> list[int]:
        if not self._versions:
            return []
        counted = [
            number
            for number, (buffer, *_) in enumerate(self._entries)
            if buffer._version != self._versions[number]
        ]
        return [*counted, *self._running]


def find_running_statistics(model: nn.Module) -> frozenset[int]:
    """Buffers of normalisations that follow the batches, by id."""
    return frozenset(
        id(buffer)
        for module in model.modules()
        if getattr(module, "track_running_stats", False)
        for buffer in module.buffers(recurse=False)
    )


def synchronize_tensors(tensors: Iterable[tuple[torch.Tensor, Any, int]], device: Any) -> int:
    """Give every rank the first rank's values where they differ; how many did.

    Sums tell whether ranks differ, so that large models that all have read from one file are not sent around.
    """
    by_group: dict[int, list[tuple[torch.Tensor, Any, int]]] = {}
    for tensor, group, source in tensors:
        if source >= 0:
            by_group.setdefault(id(group), []).append((tensor, group, source))
    unlike = 0
    for entries in by_group.values():
        group = entries[0][1]
        sums = torch.stack([_fingerprint(tensor) for tensor, *_ in entries]).to(device)
        most, least = sums.clone(), sums.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        differs = (most != least).any(dim=1).tolist()
        for (tensor, _, source), other in zip(entries, differs, strict=True):
            if other:
                unlike += 1
                broadcast_tensor(tensor, source, group)
    return unlike


def broadcast_tensor(tensor: torch.Tensor, source: int = 0, group: Any = None) -> None:
    """Give a tensor the values of one rank, on all ranks of a group."""
    whole = tensor.detach()
    sent = whole.contiguous()
    dist.broadcast(sent, source, group=group)
    if sent is not whole:
        whole.copy_(sent)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros(2, dtype=torch.float64, device=tensor.device)
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.is_floating_point():
        values = values.to(torch.float64)
    total = torch.stack([values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)])
    # Comparing with not-a-number would find ranks unlike that are alike.
    return torch.nan_to_num(total)
