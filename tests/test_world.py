"""Which process of how many: every launcher's variables, and every way in which they can be wrong."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from trimtab.errors import EnvironmentFault
from trimtab.training.process_group import World, _open_store, connect, disconnect, read_world
from worlds import free_port, variables

HAND = variables(1, 2, 29500)
TORCHRUN = HAND | {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_RANK": "0",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "gpus", "expected"),
    [
        ({}, 0, World()),
        ({}, 2, World(device="cuda:0", backend="cpu:gloo,cuda:nccl")),
        # A batch script is no step of srun: it runs once, however many tasks the job has.
        (without(SRUN, "SLURM_STEP_ID"), 0, World()),
        (
            HAND,
            0,
            World(rank=1, size=2, local_rank=1, launcher="by hand", address="127.0.0.1", port=29500),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, World(launcher="by hand")),
        (
            TORCHRUN,
            2,
            World(
                rank=1,
                size=2,
                local_rank=1,
                launcher="torchrun",
                device="cuda:1",
                backend="cpu:gloo,cuda:nccl",
                address="127.0.0.1",
                port=29500,
                restarts=2,
                agent_listens=True,
            ),
        ),
        # torchrun inside of srun: one task a node starts the processes of its node.
        (
            SRUN | TORCHRUN,
            0,
            World(
                rank=1,
                size=2,
                local_rank=1,
                launcher="torchrun",
                address="127.0.0.1",
                port=29500,
                restarts=2,
                agent_listens=True,
            ),
        ),
        (
            SRUN,
            0,
            World(
                rank=3,
                size=4,
                local_rank=1,
                node=1,
                launcher="srun",
                address="gpu07",
                port=20000 + 4711 * 7 % 20000,
            ),
        ),
        (
            SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234", "WORLD_SIZE": "4"},
            0,
            World(rank=3, size=4, local_rank=1, node=1, launcher="srun", address="head", port=1234),
        ),
        # Slurm shows each task its own GPU and no other.
        (
            SRUN | {"SLURM_GPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "one"},
            1,
            World(
                rank=3,
                size=4,
                local_rank=1,
                node=1,
                launcher="srun",
                address="127.0.0.1",
                port=20000 + 4711 * 7 % 20000,
                device="cuda:0",
                backend="cpu:gloo,cuda:nccl",
            ),
        ),
        # The tasks of the step count, not those of the whole job.
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 0,
         World(local_rank=1, node=1, launcher="srun")),
    ],
)  # fmt: skip
def test_every_launcher_is_understood(env: dict[str, str], gpus: int, expected: World) -> None:
    assert read_world(env, gpus) == expected


@pytest.mark.parametrize(
    ("env", "gpus", "text"),
    [
        ({"RANK": "0"}, 0, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, 0, "RANK is missing"),
        ({"LOCAL_RANK": "0"}, 0, "WORLD_SIZE is missing"),
        ({"MASTER_ADDR": "head"}, 0, "neither RANK nor WORLD_SIZE"),
        (without(HAND, "LOCAL_RANK"), 0, "LOCAL_RANK is missing"),
        (without(HAND, "MASTER_ADDR", "MASTER_PORT"), 0, "MASTER_ADDR and MASTER_PORT is missing"),
        (without(HAND, "MASTER_PORT"), 0, "MASTER_PORT is missing"),
        (without(TORCHRUN, "RANK"), 0, "RANK is missing"),
        (HAND | {"RANK": "2"}, 0, "RANK=2 with WORLD_SIZE=2: ranks count from 0"),
        (HAND | {"RANK": "one"}, 0, "RANK=one: it is no whole number"),
        (HAND | {"RANK": "-1"}, 0, "RANK=-1"),
        (HAND | {"WORLD_SIZE": "0"}, 0, "WORLD_SIZE=0"),
        (HAND | {"MASTER_PORT": "99999"}, 0, "MASTER_PORT=99999: a port"),
        (HAND, 1, "LOCAL_RANK=1: this process sees one GPU"),
        (HAND | {"LOCAL_RANK": "5"}, 4, "sees 4 GPUs"),
        (SRUN | {"WORLD_SIZE": "8"}, 0, "WORLD_SIZE=8: it contradicts SLURM_NTASKS=4"),
        (SRUN | {"SLURM_JOB_NODELIST": "gpu[07"}, 0, "cannot be read"),
        (without(SRUN, "SLURM_JOB_NODELIST"), 0, "SLURM_JOB_NODELIST is missing"),
        (without(SRUN, "SLURM_NTASKS"), 0, "SLURM_NTASKS is missing"),
    ],
)
def test_a_half_set_or_contradictory_environment_is_an_error(
    env: dict[str, str], gpus: int, text: str
) -> None:
    with pytest.raises(EnvironmentFault, match=text.replace("[", r"\[")):
        read_world(env, gpus)


def world(port: int, rank: int = 0, size: int = 2, address: str = "127.0.0.1") -> World:
    return World(rank=rank, size=size, local_rank=rank, launcher="by hand", address=address, port=port)


def test_a_port_that_is_in_use_is_an_error_at_once() -> None:
    with closing(socket.socket()) as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(EnvironmentFault, match="another program listens on it"):
            connect(world(other.getsockname()[1]), join_s=60)


def test_a_host_that_does_not_exist_is_an_error_at_once() -> None:
    with pytest.raises(EnvironmentFault, match="there is no such host"):
        connect(world(29511, rank=1, address="no-such-host.invalid"), join_s=60)


def test_a_rank_0_that_does_not_come_is_an_error_after_a_short_while() -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match="did not answer within 1 s"):
        connect(world(free_port(), rank=1), join_s=1)
    assert time.monotonic() - began < 50


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(EnvironmentFault, match="these ranks had not come: 1, 2"):
        connect(world(free_port(), size=3), join_s=1)
    disconnect()


@pytest.mark.slow
def test_two_processes_with_one_rank_are_an_error() -> None:
    port = free_port()
    errors: list[str] = []

    def joins(rank: int) -> None:
        try:
            _open_store(world(port, rank=rank, size=3), 2, "the same meeting")
        except EnvironmentFault as error:
            errors.append(str(error))

    threads = [threading.Thread(target=joins, args=(rank,)) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any("another process of this run has the same rank" in error for error in errors)


def test_a_single_process_needs_no_group() -> None:
    import torch.distributed as dist

    connect(World())
    assert not dist.is_initialized()
