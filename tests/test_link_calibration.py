"""Links: measured between real processes, stored, loaded, and followed by predictions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.api import estimating
from trimtab.calibration.links import fit_line, list_groups
from trimtab.errors import WrongUse
from trimtab.predict import communication
from trimtab.predict.calibration import find_speed
from trimtab.spec import Calibration, CollectiveTimes

H100 = trimtab.cluster("8xH100")


def run_calibrate(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "TRIMTAB_CALIBRATIONS": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-m", "trimtab", "calibrate", "--links", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def make_times(collective: str, ranks: int, nodes: int = 1, latency_s: float = 1e-3) -> CollectiveTimes:
    return CollectiveTimes(
        collective=collective, ranks=ranks, nodes=nodes, backend="gloo", latency_s=latency_s, bytes_per_s=1e9
    )


@pytest.mark.slow
def test_two_real_processes_measure_their_links_and_a_plan_can_use_them(tmp_path: Path) -> None:
    done = run_calibrate(tmp_path, "--procs", "2", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["device"] == "CPU"
    file = Path(printed["file"])
    stored = Calibration.from_file(file)
    assert stored is not None
    assert {times.collective for times in stored.collectives} == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    }
    assert all(times.backend == "gloo" and times.ranks == 2 for times in stored.collectives)
    assert all(len(times.sizes) == len(times.seconds) == 6 for times in stored.collectives)
    assert printed["collectives"] == [times.to_builtins() for times in stored.collectives]
    # The file states the network of another machine.
    cluster = trimtab.cluster("8xH100", network=str(file))
    assert "measured on CPU with gloo" in cluster.notes[-1]
    links = communication.find_links(cluster, 2)
    reduced = next(times for times in stored.collectives if times.collective == "all_reduce")
    assert links.all_reduce_s(2**20, 2) == pytest.approx(reduced.latency_s + 2**20 / reduced.bytes_per_s)


@pytest.mark.slow
def test_processes_of_a_launcher_measure_together_and_the_first_stores(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    other = subprocess.Popen(
        [sys.executable, "-m", "trimtab", "calibrate", "--links"],
        env={**os.environ, **shared, "RANK": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | {"TRIMTAB_CALIBRATIONS": str(tmp_path / "other")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    done = run_calibrate(tmp_path, **shared, RANK="0")
    out, errors = other.communicate(timeout=60)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + errors.decode()
    assert "all-to-all" in done.stdout
    assert out == b""
    assert not (tmp_path / "other").exists()
    # Two nodes of one process each: as the launcher says.
    stored = Calibration.from_file(tmp_path / "cpu.json")
    assert stored is not None
    assert {times.nodes for times in stored.collectives} == {2}


def test_without_several_gpus_there_is_nothing_to_measure(tmp_path: Path) -> None:
    done = run_calibrate(tmp_path)
    assert done.returncode == 5
    assert "no GPU" in done.stderr
    assert "--procs 2" in done.stderr
    done = run_calibrate(tmp_path, "--procs", "1")
    assert done.returncode == 2
    assert "at least two processes" in done.stderr


def test_one_gpu_has_no_link() -> None:
    with pytest.raises(trimtab.errors.EnvironmentFault, match="one GPU, so there is no link to measure"):
        estimating.count_link_ends(1, None)
    assert estimating.count_link_ends(4, None) == 4
    assert estimating.count_link_ends(4, 2) == 2
    with pytest.raises(WrongUse, match="there are 4 GPUs"):
        estimating.count_link_ends(4, 8)


def test_groups_are_those_that_training_uses() -> None:
    assert list_groups(2, 2) == [(2, 1)]
    assert list_groups(3, 3) == [(3, 1)]
    assert list_groups(4, 1) == [(4, 1)]
    assert list_groups(16, 8) == [(2, 1), (4, 1), (8, 1), (16, 1), (2, 8)]


def test_a_line_through_noise_is_possible() -> None:
    latency, rate = fit_line([2**12, 2**20], [5e-3, 1e-3])
    assert latency > 0
    assert rate > 0


def test_own_links_are_used_where_the_device_has_them() -> None:
    own = Calibration(
        device="H100 SXM5 80GB", collectives=(make_times("all_reduce", 4), make_times("send", 2))
    )
    plain = communication.find_links(H100, 8)
    links = communication.find_links(H100, 8, own)
    assert links.all_reduce_s(10**6, 4) == pytest.approx(2e-3)
    assert links.send_s(10**6, 1) == pytest.approx(2e-3)
    assert links.all_gather_s(10**6, 4) == plain.all_gather_s(10**6, 4)
    # Other numbers of ranks: the model, scaled by measured over modelled time of the nearest number.
    ratio = 2e-3 / plain.all_reduce_s(10**6, 4)
    assert links.all_reduce_s(10**6, 8) == pytest.approx(ratio * plain.all_reduce_s(10**6, 8))
    # Measured in one node says nothing of several.
    several = trimtab.cluster("2x8xH100")
    assert communication.find_links(several, 16, own).all_reduce_s(2**20, 16) == (
        communication.find_links(several, 16).all_reduce_s(2**20, 16)
    )
    # It measured no operation, so those that come with trimtab stay.
    speed, shipped = find_speed(H100.devices[0], own), find_speed(H100.devices[0])
    assert speed is not None
    assert shipped is not None
    assert speed.source == shipped.source
    assert "measured by `calibrate --links` between up to 4 ranks" in communication.describe_collectives(
        H100, own
    )
    assert "not measured" in communication.describe_collectives(H100, None)


def test_a_file_without_links_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.json"
    file.write_text(Calibration(device="CPU").to_json(), encoding="utf-8")
    with pytest.raises(WrongUse, match="holds no measured collectives"):
        trimtab.cluster("8xH100", network=str(file))
    with pytest.raises(WrongUse, match="it is no calibration file"):
        trimtab.cluster("8xH100", network=str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ranks": 1}, "ranks"),
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"sizes": (1,)}, "1 sizes have 0 times"),
    ],
)
def test_impossible_times_are_refused(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        make_times("all_reduce", 2).replace(**change)
