"""`trimtab watch`: what GPUs and runs do now, what is said about them, and how a watch ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import live_machines as live
import machines as m
import run_samples as samples
from trimtab.cli.main import main_code
from trimtab.cli.watch import Lines, picture
from trimtab.errors import WrongUse
from trimtab.probe.machine import Machine, replay_machine
from trimtab.probe.nvml import read_gauges
from trimtab.spec import Advice, DeviceProcess, GpuReading, Incident, IncidentKind, WatchedRun, WatchSample
from trimtab.units import GIB
from trimtab.watching.advice import advise
from trimtab.watching.watch import RunFollower, RunWatcher, find_runs, recent_runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOTHING = replay_machine(m.machine())


# GPUs


def test_a_gpu_at_work_is_read_in_full() -> None:
    found, why = read_gauges(live.world({"busy": 73, "reasons": 0x4 | 0x40, "mhz": 1500}, pids=(77,)))
    assert why == ""
    (one,) = found
    assert (one.busy, one.memory_busy, one.power_w, one.temperature_c) == (0.73, 0.4, 600.0, 60)
    assert one.clock_hz == 1500e6
    assert one.top_clock_hz == 1980e6
    assert one.throttles == ("power cap", "hardware thermal slowdown")
    assert one.used_bytes == 40_000 * 2**20
    assert one.processes == (DeviceProcess(pid=77, used_bytes=40_000 * 2**20, name="python"),)


def test_what_a_driver_does_not_tell_is_unknown() -> None:
    """The recorded H200 was never asked for its readings, and a driver may answer with all bits set."""
    (one,), _ = read_gauges(replay_machine(m.recorded("h200")))
    assert (one.busy, one.power_w, one.temperature_c, one.clock_hz, one.throttles) == (None,) * 4 + ((),)
    assert one.memory_bytes
    (odd,), _ = read_gauges(live.world({"busy": 2**32 - 1}))
    assert odd.busy is None


def test_older_drivers_know_the_reasons_by_another_name() -> None:
    record = m.machine([m.t4()])
    record["nvml"]["nvmlDeviceGetCurrentClocksThrottleReasons gpu0"] = {"answer": 0x8}
    assert read_gauges(replay_machine(record))[0][0].throttles == ("hardware slowdown",)


def test_a_lost_gpu_says_so_a_hidden_one_is_left_out_and_none_has_a_reason() -> None:
    lost = m.h100(faults={f"nvmlDeviceGetMemoryInfo {m.MEMORY_V2}": (15, "GPU is lost")})
    hidden = m.h100(
        faults={f"nvmlDeviceGetMemoryInfo {m.MEMORY_V2}": (4, "x"), "nvmlDeviceGetMemoryInfo": (4, "x")}
    )
    found, _ = read_gauges(replay_machine(m.machine([m.h100(), lost, hidden])))
    assert [(one.key, one.fault) for one in found] == [("gpu0", ""), ("gpu1", "GPU is lost")]
    assert read_gauges(NOTHING)[0] == ()
    assert read_gauges(NOTHING)[1]
    assert read_gauges(replay_machine(m.machine([])))[1] == "the driver shows none"


def test_a_gpu_in_slices_is_read_as_its_slices() -> None:
    mig = m.Mig(uuid="MIG-1", profile="3g.40gb", multiprocessors=60, memory_mib=40_000, instance=1)
    found, _ = read_gauges(replay_machine(m.machine([m.h100(migs=[mig])])))
    assert [(one.key, one.uuid) for one in found] == [("gpu0/mig0", "MIG-1")]


# Advice


def run_view(**changes: Any) -> WatchedRun:
    facts: dict[str, Any] = {
        "folder": "runs/a",
        "state": "running",
        "step": 100,
        "step_s": 0.5,
        "samples_per_s": 40.0,
        "recent": 50,
        "planned_samples_per_s": 64.0,
        "mfu": 0.1,
        "mfu_rating": "poor",
        "data_wait": 0.0,
        "devices": ("gpu0",),
    }
    return WatchedRun(**(facts | changes))


def gauge(index: int = 0, **changes: Any) -> GpuReading:
    facts: dict[str, Any] = {
        "key": f"gpu{index}",
        "index": index,
        "memory_bytes": 80 * GIB,
        "used_bytes": 60 * GIB,
        "busy": 0.99,
        "memory_busy": 0.3,
        "clock_hz": 1980e6,
        "top_clock_hz": 1980e6,
    }
    return GpuReading(**(facts | changes))


def kinds(run: WatchedRun, *gauges_now: GpuReading, looks: int = 5) -> list[tuple[str, str]]:
    told = advise(run, samples.plan(), {one.key: [one] * looks for one in gauges_now}, steps=50)
    assert all(one.what and one.cure for one in told)
    return [(one.kind, one.where) for one in told]


def test_a_run_that_waits_for_data_is_data_bound_with_its_numbers() -> None:
    (one,) = advise(run_view(data_wait=0.34), samples.plan(), {"gpu0": [gauge(busy=0.5)] * 5}, steps=50)
    assert one.kind == "data-bound"
    assert "34% of a step of 0.500s" in one.what
    assert "workers (now 0 a process)" in one.cure


def test_a_gpu_that_idles_without_waiting_for_data_is_launch_bound() -> None:
    assert kinds(run_view(), gauge(busy=0.4)) == [("launch-bound", "GPU 0")]
    (one,) = advise(run_view(), None, {"gpu0": [gauge(busy=0.4, used_bytes=20 * GIB)] * 5}, steps=50)
    assert "40% of the time" in one.what
    assert "the fullest GPU is 25% full" in one.cure


def test_a_gpu_that_moves_bytes_all_the_time_is_memory_bound_and_a_full_one_is_not() -> None:
    assert kinds(run_view(), gauge(memory_busy=0.8)) == [("memory-bound", "GPU 0")]
    # The monitors of old called this one memory-bound, because its memory is full.
    assert kinds(run_view(), gauge(busy=0.4, used_bytes=70 * GIB)) == [("launch-bound", "GPU 0")]


def test_one_full_gpu_among_roomy_ones_is_named_and_no_room_is_promised() -> None:
    """A sum over devices once said of such a run: low peak memory (56 %), use a batch of 76."""
    run = run_view(devices=tuple(f"gpu{index}" for index in range(4)))
    now = [gauge(index, busy=0.5, used_bytes=(78 if index == 0 else 35) * GIB) for index in range(4)]
    told = advise(run, None, {one.key: [one] * 5 for one in now}, steps=50)
    assert ("full", "GPU 0") in [(one.kind, one.where) for one in told]
    assert not any("larger micro-batch" in one.cure for one in told)


def test_each_gpu_is_judged_by_its_own_looks() -> None:
    """A counter that all GPUs share once raised the alarm for two that were idle in turn."""
    run = run_view(devices=("gpu0", "gpu1"))
    turns = {
        "gpu0": [gauge(0, busy=0.99 if look % 2 else 0.6) for look in range(10)],
        "gpu1": [gauge(1, busy=0.6 if look % 2 else 0.99) for look in range(10)],
    }
    assert [one.kind for one in advise(run, None, turns, steps=50)] == ["slow"]
    idle = turns | {"gpu1": [gauge(1, busy=0.5)] * 10}
    told = advise(run, None, idle, steps=50)
    assert [(one.kind, one.where) for one in told] == [("launch-bound", "GPU 1"), ("uneven", "GPU 1")]


def test_throttling_is_named_where_it_lasts_and_costs_something() -> None:
    hot = gauge(throttles=("hardware thermal slowdown",), temperature_c=94.0, clock_hz=1200e6)
    good = run_view(mfu_rating="good", samples_per_s=64.0)
    assert kinds(good, hot) == [("throttled", "GPU 0")]
    (one,) = advise(good, None, {"gpu0": [hot] * 5}, steps=50)
    assert "1200 of 1980 MHz, 94 C" in one.what
    # A cap on power at nearly the full clock is how large GPUs run, and one look is not lasting.
    assert kinds(good, gauge(throttles=("power cap",), clock_hz=1900e6)) == []
    assert kinds(good, gauge(throttles=("power cap",), clock_hz=1500e6)) == [("throttled", "GPU 0")]
    assert advise(good, None, {"gpu0": [gauge()] * 4 + [hot]}, steps=50) == ()


def test_others_on_the_gpu_of_a_run_are_named() -> None:
    two = (DeviceProcess(pid=1, name="python"), DeviceProcess(pid=2, used_bytes=GIB))
    assert kinds(run_view(mfu_rating="good", samples_per_s=64.0), gauge(processes=two)) == [
        ("shared", "GPU 0")
    ]


def test_a_slow_run_that_nothing_explains_is_only_called_slow() -> None:
    assert kinds(run_view(), gauge()) == [("slow", "")]
    assert kinds(run_view(devices=())) == [("slow", "")]


@pytest.mark.parametrize(
    "run",
    [
        run_view(mfu_rating="good", samples_per_s=64.0, data_wait=0.3),
        run_view(state="done"),
        run_view(state="stalled"),
        run_view(mfu_rating=None, planned_samples_per_s=None),
    ],
    ids=["fast enough", "over", "stalled", "nothing to compare with"],
)
def test_there_is_no_advice_for(run: WatchedRun) -> None:
    assert kinds(run, gauge()) == []


def test_too_few_looks_or_steps_say_nothing() -> None:
    assert kinds(run_view(), gauge(busy=0.1), looks=2) == [("slow", "")]
    assert advise(run_view(data_wait=0.9), None, {}, steps=2) == ()


# Runs


def followed(folder: Path, now: float, world: Machine = NOTHING) -> WatchedRun:
    return RunFollower(folder).look(now, world, read_gauges(world)[0])


def under_way(root: Path, *, pid: int = 0, host: str = "box", steps: int = 30) -> Path:
    place = samples.run(root, steps=steps, state="running")
    if pid:
        (place / "run.lock").write_text(f"process {pid} on {host}")
    return place


def written(place: Path) -> float:
    return (place / "log.jsonl").stat().st_mtime


def test_a_run_under_way_in_figures(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run")
    one = followed(place, written(place) + 1)
    assert (one.state, one.step, one.steps) == ("running", 30, 10_000)
    assert one.samples_per_s == pytest.approx(61.5, rel=0.03)
    assert one.recent == 30
    assert one.left_s == pytest.approx(9970 * 0.52, rel=0.03)
    assert (one.planned_samples_per_s, one.mfu, one.mfu_rating) == (64.0, 0.39, "good")
    assert one.data_wait == pytest.approx(0.002 / 0.52, rel=0.03)
    assert one.silent_s == pytest.approx(1)
    assert [event.step for event in one.events] == [70, 180]


def test_a_run_that_says_nothing_for_long_against_its_own_steps_has_stalled(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run")
    assert followed(place, written(place) + 59).state == "running"
    late = followed(place, written(place) + 300)
    assert late.state == "stalled"
    assert re.fullmatch(r"no step for 5m, they took 0\.52\ds each", late.why)
    # Of steps that take a minute, twenty may be missing.
    slow = [json.dumps(samples.line(step, time_s=60.0)) for step in range(1, 9)]
    (place / "log.jsonl").write_text("\n".join(slow) + "\n")
    assert followed(place, written(place) + 300).state == "running"
    assert followed(place, written(place) + 1300).state == "stalled"


def test_a_run_that_is_over_has_not_stalled(tmp_path: Path) -> None:
    place = samples.run(tmp_path / "run", steps=30)
    later = followed(place, written(place) + 1e6)
    assert (later.state, later.left_s) == ("ended", None)
    assert later.why == "at step 30 of 10,000: the same command resumes it"
    (place / "attempt.json").write_text(json.dumps({"state": "ended", "steps": 30, "mood": "new"}))
    assert followed(place, written(place) + 1e6).state == "done"


def test_a_run_whose_process_is_no_more_is_gone_on_this_machine_only(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run", pid=77)
    now = written(place) + 1
    assert followed(place, now, live.world({}, pids=(77,), alive=False)).state == "gone"
    assert followed(place, now, live.world({}, pids=(77,))).state == "running"
    (place / "run.lock").write_text("process 77 on elsewhere")
    assert followed(place, now, live.world({}, pids=(77,), alive=False)).state == "running"


@pytest.mark.parametrize("lock", ["", "process", "process x on box", "\xff\x00" * 99, "process 77 on"])
def test_a_lock_that_says_nothing_is_no_process(tmp_path: Path, lock: str) -> None:
    place = under_way(tmp_path / "run")
    (place / "run.lock").write_text(lock)
    assert followed(place, written(place) + 1).state == "running"


def test_a_run_without_a_step_is_starting(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run", steps=0)
    assert followed(place, time.time()).state == "starting"


def test_lines_that_come_are_read_and_a_log_that_is_written_anew_too(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run", steps=5)
    follower = RunFollower(place)
    log = place / "log.jsonl"

    def step() -> int | None:
        return follower.look(time.time(), NOTHING, ()).step

    assert step() == 5
    whole = json.dumps(samples.line(6)) + "\n"
    with log.open("a") as stream:
        stream.write(whole[:30])
    assert step() == 5
    with log.open("a") as stream:
        stream.write(whole[30:] + "not json\n{}\n")
    assert step() == 6
    # A run that goes on from a checkpoint drops the lines of steps that it takes again.
    log.write_text("".join(json.dumps(samples.line(number)) + "\n" for number in (1, 2)))
    assert step() == 2
    assert len(follower.lines) == 2
    log.unlink()
    (place / "plan.json").write_text("{")
    assert follower.look(time.time(), NOTHING, ()).job == ""


def test_a_long_log_is_read_from_near_its_end(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run", steps=10)
    with (place / "log.jsonl").open("a") as stream:
        stream.writelines(json.dumps(samples.line(step)) + "\n" for step in range(11, 6001))
    follower = RunFollower(place)
    assert follower.look(time.time(), NOTHING, ()).step == 6000
    assert follower.seen < 3000


def test_the_gpus_of_a_run_are_those_of_its_process_and_of_its_plan(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run", pid=77)
    now = written(place) + 1
    assert followed(place, now, live.world({}, {}, pids=(77, 5))).devices == ("gpu0",)
    # The plan says GPU 0 and the process is on GPU 1: the plan counts otherwise.
    assert followed(place, now, live.world({}, {}, pids=(5, 77))).devices == ("gpu1",)
    # Nothing is known of the run on another machine, or where two GPUs could be it.
    assert followed(place, now, live.world({}, {}, pids=(77, 5), alive=False)).devices == ()
    record = live.at_work(m.machine([m.h100()], host={"process:77": "python"}))
    assert followed(place, now, replay_machine(record)).devices == ("gpu0",)


def test_runs_are_found_in_and_below_folders_and_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    for name in ("runs/a", "runs/b/c", ".hidden/d", "runs/a/checkpoints/e", "deep/er/than/that/f"):
        under_way(tmp_path / name)
    assert find_runs([tmp_path]) == [tmp_path / "runs/a", tmp_path / "runs/b/c"]
    assert find_runs([tmp_path / "runs/a", tmp_path / "runs"]) == [tmp_path / "runs/a", tmp_path / "runs/b/c"]
    assert find_runs([tmp_path / "deep/er/than/that/f"]) != []
    with pytest.raises(WrongUse, match="no such folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(WrongUse, match="it is a file"):
        find_runs([tmp_path / "runs/a/log.jsonl"])


def test_runs_that_nobody_named_are_shown_for_a_day_and_not_too_many(tmp_path: Path) -> None:
    places = [under_way(tmp_path / f"{number:02}", steps=1) for number in range(15)]
    now = 1e9
    for age, place in enumerate(places):
        os.utime(place / "log.jsonl", (now - age, now - age))
    old = under_way(tmp_path / "old", steps=1)
    os.utime(old / "log.jsonl", (now - 90_000, now - 90_000))
    assert recent_runs([*places, old], now) == places[:12]
    (places[0] / "log.jsonl").unlink()
    assert places[0] not in recent_runs(places, now)


# The watch itself


class Clock:
    """A time that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds


def watcher(world: Machine, *places: Path) -> tuple[RunWatcher, Clock]:
    clock = Clock()
    return RunWatcher(world=world, places=places, now=clock, wait=clock.wait), clock


def test_samples_come_by_the_clock_however_long_one_takes(tmp_path: Path) -> None:
    one, clock = watcher(NOTHING, under_way(tmp_path / "run"))
    found: list[WatchSample] = []
    for sample in one.samples(2.0, most=4):
        found.append(sample)
        clock.now_s += 0.5
    assert len(found) == 4
    assert clock.waits == [1.5] * 3
    assert [round(sample.at_s - found[0].at_s, 6) for sample in found] == [0, 2, 4, 6]


def test_a_watch_of_runs_that_were_named_ends_with_them(tmp_path: Path) -> None:
    first, second = under_way(tmp_path / "a"), samples.run(tmp_path / "b", steps=3)
    one, clock = watcher(NOTHING, first, second)
    states = []
    for sample in one.samples(2.0):
        states.append([run.state for run in sample.runs])
        if len(states) == 3:
            (first / "attempt.json").write_text('{"state": "ended", "steps": 30}')
        assert len(states) < 9
    assert states[0] == ["running", "ended"]
    assert states[-1] == ["done", "ended"]
    assert len(clock.waits) == len(states) - 1


def test_advice_appears_after_a_few_looks_at_the_gpu_of_a_run(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run", pid=77)
    slow = [json.dumps(samples.line(step, samples_per_s=20.0, mfu=0.01)) for step in range(1, 30)]
    (place / "log.jsonl").write_text("\n".join(slow) + "\n")
    one, clock = watcher(live.world({"busy": 30}, pids=(77,)), place)
    os.utime(place / "log.jsonl", (clock.now_s, clock.now_s))
    told = [[advice.kind for advice in sample.runs[0].advice] for sample in one.samples(1.0, most=4)]
    assert told == [["slow"], ["slow"], ["launch-bound"], ["launch-bound"]]


def test_new_runs_are_found_while_watching(tmp_path: Path) -> None:
    one, _ = watcher(NOTHING, tmp_path)
    counts = []
    for sample in one.samples(5.0, most=5):
        counts.append(len(sample.runs))
        if len(counts) == 2:
            under_way(tmp_path / "new")
    assert counts[0] == 0
    assert counts[-1] == 1


# What people see


BAD = "\x1b[31mred\x1b[0m\n<b>[bold]x[/bold]"


def a_sample(words: str = "words", state: str = "running") -> WatchSample:
    event = Incident(kind=IncidentKind.RESUME, at_s=1.0, step=3, why=words, done=words)
    advice = Advice(kind="slow", where="", what=words, cure=words)
    run = run_view(folder=words, why=words, state=state, events=(event,), advice=(advice,), left_s=5000.0)
    held = (DeviceProcess(pid=7, used_bytes=GIB, name=words),)
    return WatchSample(
        at_s=0.0,
        gpus=(
            gauge(
                name=words,
                throttles=("power cap",),
                power_w=600.0,
                power_limit_w=700.0,
                temperature_c=60.0,
                processes=held,
            ),
            GpuReading(key="gpu1", index=1, fault=words),
        ),
        runs=(run,),
    )


def drawn(sample: WatchSample, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(picture(sample))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_picture_fits_its_terminal_and_text_in_it_is_inert(width: int) -> None:
    text = drawn(a_sample(BAD), width)
    assert all(len(line) <= width for line in text.split("\n"))
    assert "\x1b" not in text
    flat = re.sub(r"\s+", "", text)
    assert "[bold]x[/bold]" in flat
    assert "75%" in flat
    assert "noanswer:GPU1" in flat
    assert "helddown:GPU0bypowercap" in flat
    for line in Lines().of(a_sample(BAD)):
        assert "\x1b" in line  # made inert where it is written, below


def test_a_picture_has_the_figures_of_gpus_and_runs() -> None:
    text = drawn(a_sample(), 120)
    for shown in (
        "60.0/80.0",
        "99%",
        "600/700 W",
        "60 C",
        "1980",
        "40 samples/s (last 50 steps, plan 64)",
        "MFU 10.0% (poor)",
    ):
        assert shown in text
    assert "1h23m left" in text
    empty = drawn(WatchSample(at_s=0.0, no_gpus="no driver"), 80)
    assert "no GPUs: no driver" in empty
    assert "no runs here" in empty


def test_lines_repeat_figures_and_say_events_advice_and_ends_once() -> None:
    lines = Lines()
    first, second = list(lines.of(a_sample())), list(lines.of(a_sample()))
    assert sum("resume at step 3" in line for line in first) == 1
    assert sum("slow:" in line for line in first) == 1
    assert not any("resume" in line or "slow:" in line for line in second)
    assert any("running, step 100" in line for line in second)
    over = [list(lines.of(a_sample(state="done"))) for _ in range(3)]
    assert [sum("done" in line for line in one) for one in over] == [1, 0, 0]


def command(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["trimtab", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main_code(), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before


def test_json_is_one_sample_a_line(tmp_path: Path) -> None:
    place = under_way(tmp_path / "run")
    code, out, _ = command("watch", str(place), "--json", "--interval", "0.1", "--samples", "2")
    assert code == 0
    found = [WatchSample.from_json(line) for line in out.splitlines()]
    assert [one.runs[0].step for one in found] == [30, 30]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--interval", "0"), "below 0.1 s"),
        (("--interval", "nan"), "below 0.1 s"),
        (("--samples", "0"), "below 1"),
        (("nowhere",), "no such folder"),
    ],
)
def test_wrong_use_is_said(args: tuple[str, ...], words: str) -> None:
    code, _, err = command("watch", *args)
    assert code == 2
    assert words in err


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    under_way(tmp_path / "run\x1b[31m")
    popen = subprocess.Popen(
        [sys.executable, "-m", "trimtab", "watch", "--interval", "0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield popen
    popen.kill()
    popen.communicate()


def test_ctrl_c_ends_a_watch_in_order(started: subprocess.Popen[str]) -> None:
    """The lines are there at once, inert, and the end is exit code 0 without a word."""
    assert started.stdout is not None
    seen = ""
    while "step 30 of 10,000" not in seen:
        line = started.stdout.readline()
        assert line, "it ended by itself"
        seen += line
    assert "\x1b" not in seen
    assert "run\\x1b[31m: running" in seen
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=240)
    assert started.returncode == 0
    assert errors == ""
