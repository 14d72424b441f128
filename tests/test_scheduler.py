from __future__ import annotations

import doctest

import pytest

import machines as m
from trimtab.probe import scheduler
from trimtab.probe.scheduler import parse_node_list

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_a_plain_shell_has_no_scheduler() -> None:
    found, findings = scheduler.read_scheduler({"PATH": "/bin"})
    assert (found.name, found.launcher, found.sources, findings) == (None, None, {}, [])


def test_slurm_is_read_with_its_units() -> None:
    found, findings = scheduler.read_scheduler(m.SLURM_TWO_NODES)
    assert findings == []
    assert (found.name, found.launcher, found.job_id) == ("slurm", "srun", "8812")
    assert found.node_names == ("gpu07", "gpu08")
    assert (found.rank, found.world_size, found.local_rank) == (3, 16, 3)
    assert found.memory_bytes == 409600 * 2**20
    assert found.ends_at_s == 1794700800
    assert found.sources["memory_bytes"] == "detected: SLURM_MEM_PER_NODE"


@pytest.mark.parametrize(
    ("env", "gib"),
    [
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "16"}, 32),
        ({"SLURM_MEM_PER_GPU": "65536", "SLURM_GPUS_ON_NODE": "4"}, 256),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
    ],
)
def test_slurm_grants_memory_in_three_ways(env: dict[str, str], gib: int | None) -> None:
    found, _ = scheduler.read_scheduler({"SLURM_JOB_ID": "1"} | env)
    assert found.memory_bytes == (None if gib is None else gib * 2**30)


def test_torchrun_inside_slurm_gives_the_ranks() -> None:
    found, findings = scheduler.read_scheduler(m.SLURM_TWO_NODES | TORCHRUN)
    assert findings == []
    assert (found.name, found.launcher) == ("slurm", "torchrun")
    assert (found.rank, found.world_size, found.local_world_size) == (5, 8, 4)
    assert found.restarts == 1


def test_an_elastic_kubernetes_job_counts_its_largest_size() -> None:
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "1:4"}
    assert scheduler.read_scheduler(env)[0].num_nodes == 4


def test_ranks_set_by_hand_are_taken() -> None:
    found, findings = scheduler.read_scheduler({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert (found.launcher, found.world_size, findings) == ("by hand", 4, [])


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not."),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not."),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "contradict each other"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK is 'one', which is not a number."),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1', which is not a number."),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "two"}, "SLURM_JOB_NUM_NODES is 'two'"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "0"},
            "SLURM_JOB_NUM_NODES is '0', which is not a count",
        ),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "0"}, "GROUP_WORLD_SIZE is '0', which is not a count"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', which is not a count"),
        ({"RANK": "\u00b2", "WORLD_SIZE": "4"}, "RANK is '\u00b2', which is not a number."),
        ({"RANK": "\u0663", "WORLD_SIZE": "4"}, "RANK is '\u0663', which is not a number."),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "4"}, "which is not a number."),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "cpu[a-b]"}, "SLURM_JOB_NODELIST cannot be read"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "cpu[1-2"}, "does not close"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "cpu[3-1]"}, "'3-1' is not a range"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "cpu[]"}, "is not a range"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "cpu[1-999999999]"}, "more than 65536 nodes"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "r[1-999]n[1-999]"}, "more than 65536 nodes"),
    ],
)
def test_a_half_set_or_wrong_environment_is_an_error_at_once(env: dict[str, str], what: str) -> None:
    _, findings = scheduler.read_scheduler(env)
    assert what in findings[0].what
    assert findings[0].severity.value == "error"


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("host1", ["host1"]),
        ("host[1-3]", ["host1", "host2", "host3"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("a[1,3-4],b7", ["a1", "a3", "a4", "b7"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
    ],
)
def test_node_lists_are_spelt_out(listed: str, names: list[str]) -> None:
    assert parse_node_list(listed) == names


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(scheduler).failed == 0
