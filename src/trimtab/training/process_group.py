"""Find this process's rank, create the process group, and keep weights and buffers equal over ranks.

`read_world` is a pure function of the environment variables of plain python, torchrun, srun, or of RANK,
WORLD_SIZE and LOCAL_RANK set by hand. `connect` creates the process group. Missing or contradictory variables
and an address that does not answer raise an error that names the variable, instead of a 30-minute wait.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
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
"""Seconds that processes wait for each other before an error names the missing ranks."""
_FIRST_PORT, _PORTS = 20_000, 20_000
"""Range of the rendezvous port of srun's processes, chosen by job number unless MASTER_PORT is set."""
_RENDEZVOUS = itertools.count()
"""Number of the next rendezvous: a process may make several runs, and torchrun keeps the keys of old ones."""
SHARE_VARIABLE = "TRIMTAB_SHARE_GPU"
"""Environment variable: 1 lets several ranks share a GPU, through gloo, because NCCL refuses that."""
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
    """Host of rank 0; None for a single process."""
    port: int | None = None
    restarts: int = 0
    """How often torchrun has restarted the processes."""
    agent_listens: bool = False
    """Whether torchrun itself listens on the port, rather than rank 0."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and output."""
        return self.rank == 0

    def faults(self) -> list[str]:
        """Return what is wrong: ranks count from 0 to size - 1."""
        wrong = check_minimum(0, rank=self.rank, local_rank=self.local_rank, node=self.node) + check_minimum(
            1, size=self.size
        )
        if self.rank >= self.size:
            wrong.append(f"rank {self.rank} is not below size {self.size}")
        return wrong


class _VariableNames(NamedTuple):
    """Names of a launcher's environment variables; the first one that is set counts."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    node: tuple[str, ...]


_TORCH = _VariableNames(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("GROUP_RANK", "NODE_RANK"))
_SLURM = _VariableNames(
    ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ("SLURM_NODEID",)
)


def read_world(env: Mapping[str, str], gpus: int = 0) -> World:
    """Return the world that the environment variables describe; `gpus` are visible to this process.

    >>> read_world({}).size
    1
    >>> env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    >>> read_world(env).rank
    1
    """
    launcher = _detect_launcher(env)
    if launcher == ALONE:
        leftover = [name for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)]
        if leftover:
            raise _fault(
                " and ".join(f"{name}={env[name]}" for name in leftover),
                "a process group is announced, and neither RANK nor WORLD_SIZE is set",
            )
        return _assign_device(World(), gpus, env)
    names = _SLURM if launcher == SRUN else _TORCH
    size = _read_number(env, names.size, launcher, least=1)
    rank = _read_number(env, names.rank, launcher)
    # A single process needs no local rank.
    local = _read_number(env, names.local_rank, launcher, otherwise=0 if size == 1 else None)
    node = _read_number(env, names.node, launcher, otherwise=0)
    if rank >= size:
        given = f"{_show_variable(env, names.rank)} with {_show_variable(env, names.size)}"
        raise _fault(given, f"ranks count from 0, so that the highest of {size} is {size - 1}")
    world = World(rank=rank, size=size, local_rank=local, node=node, launcher=launcher)
    if size > 1:
        address, port = _slurm_address(env) if launcher == SRUN else _read_master(env)
        world = world.replace(address=address, port=port)
    if launcher == TORCHRUN:
        restarts = parse_whole(env.get("TORCHELASTIC_RESTART_COUNT", "")) or 0
        agent_listens = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        world = world.replace(restarts=restarts, agent_listens=agent_listens)
    return _assign_device(world, gpus, env)


def _detect_launcher(env: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in env:
        return TORCHRUN
    hand = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env]
    # A batch script has SLURM_PROCID too; only processes that srun started have a step as well.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return BY_HAND if hand else ALONE
    if {"RANK", "WORLD_SIZE"} <= set(hand):
        return BY_HAND
    theirs = {"RANK": _SLURM.rank, "WORLD_SIZE": _SLURM.size, "LOCAL_RANK": _SLURM.local_rank}
    for name in hand:
        slurm_value = next((env[their] for their in theirs[name] if their in env), None)
        if slurm_value is not None and slurm_value.strip() != env[name].strip():
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
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise _fault(
            f"WORLD_SIZE={env['WORLD_SIZE']}", f"{' and '.join(missing)} is missing, where rank 0 listens"
        )
    return env["MASTER_ADDR"], _parse_port(env["MASTER_PORT"])


def _parse_port(text: str) -> int:
    port = parse_whole(text)
    if port is None or not 0 < port < 2**16:
        raise _fault(f"MASTER_PORT={text}", "a port is a whole number from 1 to 65535")
    return port


def _slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the rendezvous of srun's processes: first host of the step, port from the job number."""
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
    """Return the world with the device of this process."""
    if not gpus:
        return world
    index = world.local_rank
    per_task = any("gpu" in env.get(name, "") for name in ("SLURM_TRES_PER_TASK",))
    if world.launcher == SRUN and gpus == 1 and (per_task or "SLURM_GPUS_PER_TASK" in env):
        # Slurm makes only its own GPU visible to each task.
        index = 0
    if env.get(SHARE_VARIABLE) == "1" and world.size > 1:
        return world.replace(device=f"cuda:{index % gpus}", backend="cpu:gloo,cuda:gloo")
    if index >= gpus:
        many = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        raise _fault(
            f"LOCAL_RANK={world.local_rank}",
            f"this process sees {many}, and local ranks count from 0",
            "Start as many processes a node as it has GPUs, or make more of them visible "
            f"(CUDA_VISIBLE_DEVICES). For a rehearsal, {SHARE_VARIABLE}=1 lets processes share GPUs.",
        )
    return world.replace(device=f"cuda:{index}", backend="cpu:gloo,cuda:nccl")


def _fault(given: str, found: str, cure: str = _LAUNCH_FIX) -> EnvironmentFault:
    return EnvironmentFault(given, found=found, cure=cure)


def connect(world: World, *, timeout_min: float = 10, join_s: float = JOIN_S) -> None:
    """Create the process group; do nothing for a single process.

    `timeout_min` is the timeout of collectives, `join_s` the time that ranks have to join.
    """
    if world.size == 1:
        return
    from torch._C._distributed_c10d import PrefixStore

    if world.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(world.device))
    rendezvous = f"{world.restarts}.{next(_RENDEZVOUS)}"
    store = _open_store(world, join_s, rendezvous)
    options: dict[str, Any] = {}
    if "nccl" in world.backend:
        options["device_id"] = torch.device(world.device)
    dist.init_process_group(
        world.backend,
        store=PrefixStore(f"group{rendezvous}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(minutes=timeout_min),
        **options,
    )


def connect_single(world: World) -> None:
    """Create a process group of one process, for code that needs a group."""
    from torch._C._distributed_c10d import HashStore

    if not dist.is_initialized():
        dist.init_process_group(world.backend, store=HashStore(), rank=0, world_size=1)


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _open_store(world: World, join_s: float, rendezvous: str) -> Any:
    """Return a store that all processes have joined."""
    from torch._C._distributed_c10d import TCPStore

    assert world.address is not None  # noqa: S101 - read_world() sets both for several processes
    assert world.port is not None  # noqa: S101
    address = f"MASTER_ADDR={world.address}, MASTER_PORT={world.port}"
    is_listener = world.is_main and not world.agent_listens
    if is_listener:
        _check_free(world.port)
    else:
        _check_answers(world.address, world.port, join_s)
    wait = timedelta(seconds=join_s)
    try:
        store = TCPStore(
            world.address, world.port, None, is_master=is_listener, timeout=wait, wait_for_workers=False
        )
        if store.add(f"rank{world.rank}/{rendezvous}", 1) > 1:
            raise _fault(f"RANK={world.rank}", "another process of this run has the same rank")
    except dist.DistError as error:
        raise _fault(address, f"rank 0 does not answer as a store: {_first_line(error)}") from error
    keys = [f"rank{number}/{rendezvous}" for number in range(world.size)]
    try:
        store.wait(keys, wait)
    except (dist.DistError, RuntimeError) as error:
        missing = [number for number, key in enumerate(keys) if not _has_key(store, key)]
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")  # noqa: PLR2004
        raise _fault(
            f"{address}, WORLD_SIZE={world.size}",
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
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            used = error.errno == errno.EADDRINUSE
            raise _fault(
                f"MASTER_PORT={port}",
                "another program listens on it" if used else f"rank 0 cannot listen on it: {error.strerror}",
                "Choose another MASTER_PORT, or end the run that has it.",
            ) from error


def _check_answers(address: str, port: int, join_s: float) -> None:
    """Wait until rank 0 answers, which may still be starting; fail at once if the host name is unknown."""
    rank_zero = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    try:
        socket.getaddrinfo(address, port, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise _fault(rank_zero, f"there is no such host: {error.strerror or error}") from error
    until = time.monotonic() + join_s
    while True:
        try:
            socket.create_connection((address, port), timeout=min(5.0, join_s)).close()
        except OSError as error:
            if time.monotonic() > until:
                raise _fault(
                    rank_zero,
                    f"it did not answer within {join_s:.0f} s: {error.strerror or error}",
                    "Start rank 0 too, on that host; every node must reach it by that name and port.",
                ) from error
            time.sleep(0.1)
        else:
            return


class HoldingRanks(NamedTuple):
    """The ranks that hold the same parameter, and sum its gradient."""

    group: Any
    """Process group; None: all ranks, or this one alone."""
    ranks: int
    source: int
    """The rank whose values the others get."""


@dataclass(frozen=True)
class RankGroups:
    """The ranks with which this rank shares data and gradients.

    Ranks of the same branch, or of the same pipeline stage, have consecutive numbers, first branch or stage
    first. Inside, ranks that split layers between them (tensor parallelism) are neighbours, and ranks that
    split sequences (context parallelism) are those of one layer apart.
    """

    size: int = 1
    branch: int = 0
    """Index of the branch that this rank computes."""
    stage: int = 0
    """Index of the pipeline stage that this rank computes."""
    stages: int = 1
    data_rank: int = 0
    data_parallel: int = 1
    """Ranks, or groups of ranks that split sequences, with samples of their own."""
    data_group: Any = None
    """Process group of the same branch or stage, and the same part of every layer; None if that is all
    ranks, or this rank alone. Ranks that split sequences are in it: their losses and gradients add up."""
    first: int = 0
    """The first rank of that group."""
    tensor_rank: int = 0
    """Index of the part of every layer that this rank computes."""
    tensor_parallel: int = 1
    """Ranks that split every layer between them, and see the same data."""
    stage_group: Any = None
    """Process group of all ranks of the same stage; None without a pipeline."""
    context_rank: int = 0
    """Index of the part of every sequence that this rank computes."""
    context_parallel: int = 1
    """Ranks that split every sequence between them, and see the same samples."""

    @property
    def data_ranks(self) -> int:
        """Number of ranks in the data group."""
        return self.data_parallel * self.context_parallel

    @property
    def is_data_alone(self) -> bool:
        """Whether no other rank has the same branch, stage and part of every layer."""
        return self.data_ranks == 1

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts samples.

        Branches, stages and the parts of a layer or a sequence see the same samples, so only the first of
        them does.
        """
        return self.counts_weight and self.context_rank == 0

    @property
    def counts_weight(self) -> bool:
        """Whether this rank counts weight: each part of a sequence has its own, such as its tokens."""
        return self.branch == 0 and self.stage == 0 and self.tensor_rank == 0

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss is added up: ranks that split layers all have the same one."""
        return self.tensor_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.stages - 1

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of the same pipeline stage."""
        return self.data_ranks * self.tensor_parallel

    @property
    def stage_first(self) -> int:
        """The first rank of the same pipeline stage."""
        return self.stage * self.stage_ranks

    @property
    def buffer_source(self) -> int:
        """The rank that broadcasts shared buffers: the first of the last stage, which uses all of them."""
        return (self.stages - 1) * self.stage_ranks

    def find_holding(self, is_own: bool) -> HoldingRanks:
        """Return the ranks that hold what this branch or stage alone has, or what all ranks have."""
        if is_own:
            return HoldingRanks(self.data_group, self.data_ranks, self.first)
        return HoldingRanks(None, self.size, self.buffer_source)

    def make_stage_groups(self, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], HoldingRanks]:
        """Create the process groups of all ranks of some stages; every rank creates all of them, in order."""
        each = self.stage_ranks
        found = {}
        for stages in sets:
            ranks = [stage * each + place for stage in stages for place in range(each)]
            found[stages] = HoldingRanks(dist.new_group(ranks), len(ranks), ranks[0])
        return found

    def stage_rank(self, stage: int) -> int:
        """Return the rank that computes another stage of the same samples."""
        place = self.data_rank * self.context_parallel + self.context_rank
        return (stage * self.data_ranks + place) * self.tensor_parallel + self.tensor_rank


def make_groups(setting: Setting, world: World) -> RankGroups:
    """Create the process groups of a setting; every rank creates all of them, in the same order."""
    mesh = setting.mesh
    ranks = mesh.branch_ranks if mesh.branch > 1 else (mesh.data_parallel,) * mesh.pp
    if len(ranks) == 1 and mesh.tp == 1:
        return RankGroups(
            size=world.size,
            data_rank=world.rank // mesh.cp,
            data_parallel=world.size // mesh.cp,
            context_rank=world.rank % mesh.cp,
            context_parallel=mesh.cp,
        )
    own = RankGroups()
    first = 0
    for number, count in enumerate(ranks):
        count_all = count * mesh.cp
        stop = first + count_all * mesh.tp
        has_stages = mesh.pp > 1 and mesh.tp > 1
        stage_group = dist.new_group(list(range(first, stop))) if has_stages else None
        for tensor_rank in range(mesh.tp):
            members = range(first + tensor_rank, stop, mesh.tp)
            group = dist.new_group(list(members)) if count_all > 1 else None
            if world.rank in members:
                own = RankGroups(
                    size=world.size,
                    branch=number if mesh.branch > 1 else 0,
                    stage=number if mesh.pp > 1 else 0,
                    stages=mesh.pp,
                    data_rank=members.index(world.rank) // mesh.cp,
                    data_parallel=count,
                    data_group=group,
                    first=members[0],
                    tensor_rank=tensor_rank,
                    tensor_parallel=mesh.tp,
                    stage_group=stage_group or group,
                    context_rank=members.index(world.rank) % mesh.cp,
                    context_parallel=mesh.cp,
                )
        first = stop
    return own


class Buffers:
    """Buffers that a forward pass changes: restored before a retry, made equal on all ranks after a step."""

    def __init__(
        self, entries: Sequence[tuple[torch.Tensor, Any, int]], running: frozenset[int] = frozenset()
    ) -> None:
        """Take each buffer with its process group and the first rank in it; -1 if no other rank has it.

        `running` are the ids of running statistics of normalisation layers, which change without a
        new version.
        """
        self._entries = list(entries)
        self._running = [number for number, (buffer, *_) in enumerate(entries) if id(buffer) in running]
        self._changing: list[int] | None = None
        """Indices of the buffers that change; None before the first step."""
        self._versions: list[int] = []
        self.copies: dict[int, torch.Tensor] = {}

    def save(self) -> None:
        """Copy the buffers before a step."""
        if not self._entries:
            return
        watched = range(len(self._entries)) if self._changing is None else self._changing
        self.copies = {}
        by_kind: dict[Any, list[int]] = {}
        for number in watched:
            buffer = self._entries[number][0]
            by_kind.setdefault((buffer.dtype, buffer.device), []).append(number)
        for (kind, _), numbers in by_kind.items():
            buffers = [self._entries[number][0] for number in numbers]
            # A foreach operation needs few kernel launches for many small buffers.
            plain = kind in (torch.float32, torch.float16, torch.bfloat16, torch.int64)
            copied = torch._foreach_add(buffers, 0) if plain else [buffer.clone() for buffer in buffers]
            self.copies.update(zip(numbers, copied, strict=True))
        self._versions = [buffer._version for buffer, *_ in self._entries]

    def restore(self) -> None:
        """Restore the values from before the step."""
        for number, copy in self.copies.items():
            buffer = self._entries[number][0]
            buffer.copy_(copy)
            self._versions[number] = buffer._version

    def needs_no_broadcast(self, ranks: int) -> bool:
        """Return whether the changing buffers are known, and need no broadcast after a step."""
        return not self._entries or (self._changing is not None and (ranks == 1 or not self._changing))

    def count_unexpected(self) -> int:
        """Return how many buffers have changed that were not known to change."""
        return len(set(self._find_changed()).difference(self._changing or ()))

    def agree_on_changed(self, device: Any) -> None:
        """Agree over all ranks on which buffers change; all call it if the status has unexpected ones."""
        mine = {*self._find_changed(), *(self._changing or ())}
        # First the buffers that all ranks have, then those of this branch only: branches have different ones.
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
        self._changing = sorted(mine)

    def broadcast_changed(self) -> None:
        """After a step: give all ranks the source rank's values of the changing buffers."""
        if self._entries and self._changing is None:
            self._changing = []
        self.copies = {}
        for number in self._changing or ():
            buffer, group, source = self._entries[number]
            if source >= 0:
                dist.broadcast(buffer, source, group=group)

    def _find_changed(self) -> list[int]:
        if not self._versions:
            return []
        counted = [
            number
            for number, (buffer, *_) in enumerate(self._entries)
            if buffer._version != self._versions[number]
        ]
        return [*counted, *self._running]


def find_running_statistics(model: nn.Module) -> frozenset[int]:
    """Return the ids of the running statistics of normalisation layers."""
    return frozenset(
        id(buffer)
        for module in model.modules()
        if getattr(module, "track_running_stats", False)
        for buffer in module.buffers(recurse=False)
    )


def synchronize_tensors(tensors: Iterable[tuple[torch.Tensor, Any, int]], device: Any) -> int:
    """Give every rank the first rank's values of tensors that differ; return how many did.

    Checksums are compared first, so that a large model which all ranks read from one file is not sent.
    """
    by_group: dict[int, list[tuple[torch.Tensor, Any, int]]] = {}
    for tensor, group, source in tensors:
        if source >= 0:
            by_group.setdefault(id(group), []).append((tensor, group, source))
    different = 0
    for entries in by_group.values():
        group = entries[0][1]
        sums = torch.stack([_fingerprint(tensor) for tensor, *_ in entries]).to(device)
        most, least = sums.clone(), sums.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        differs = (most != least).any(dim=1).tolist()
        for (tensor, _, source), other in zip(entries, differs, strict=True):
            if other:
                different += 1
                broadcast_tensor(tensor, source, group)
    return different


def broadcast_tensor(tensor: torch.Tensor, source: int = 0, group: Any = None) -> None:
    """Copy a tensor from the source rank to all ranks of a group."""
    target = tensor.detach()
    sent = target.contiguous()
    dist.broadcast(sent, source, group=group)
    if sent is not target:
        target.copy_(sent)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros(2, dtype=torch.float64, device=tensor.device)
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.is_floating_point():
        values = values.to(torch.float64)
    total = torch.stack([values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)])
    # NaN is not equal to itself: equal ranks would seem different.
    return torch.nan_to_num(total)
