"""What doctor makes of records, several ranks, arithmetic and bad input; the command itself."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trimtab
from test_cli import trimtab_cli
from trimtab.diagnosis import findings
from trimtab.diagnosis.diagnose import diagnose_logs
from trimtab.diagnosis.fault_kinds import load_kinds
from trimtab.diagnosis.findings import Diagnosed, Diagnosis
from trimtab.diagnosis.log_files import NotPlainPickle, load_plain_pickle
from trimtab.errors import UnknownName, WrongUse
from trimtab.units import GIB, MIB

LOGS = Path(__file__).parent / "logs"
PLANS = Path(__file__).parent.parent / "bench" / "training_plans.json"
NOISE = bytes(hashlib.sha256(bytes([index])).digest()[0] for index in range(256)) * 20
FAULT = b"step 1 loss 2\nOSError: [Errno 28] No space left on device\nstep 2 loss 2\n"


def read(tmp_path: Path, data: bytes, name: str = "a.log") -> Diagnosis:
    file = tmp_path / name
    file.write_bytes(data)
    return diagnose_logs([str(file)])


def only(found: Diagnosis) -> Diagnosed:
    (one,) = found.findings
    return one


def log(name: str) -> Diagnosis:
    return diagnose_logs([str(LOGS / name)])


# ---------------------------------------------------------------------------------------------- arithmetic


def test_an_out_of_memory_message_says_what_would_have_fitted() -> None:
    one = only(log("oom-transformers.log"))
    # 8 x (37.11 + 1.04) / (37.11 + 3.00) = 7.6; the batch of a rank, 16, is cut by 4.
    assert "At most micro-batch 7 in place of 8" in one.cure
    assert "4 with accumulation 4 (was 2) keeps the global batch" in one.cure
    assert "--pin micro_batch=4" in one.cure
    assert one.cause.startswith(
        "It was short of 2.0 GiB: 3.0 GiB asked for, 1.0 GiB free, 37.1 GiB allocated"
    )


def test_without_a_micro_batch_nothing_is_said_about_one() -> None:
    assert "place of" not in only(log("oom-old-torch.log")).cure


@pytest.mark.parametrize(
    ("micro", "fixed", "most"),
    [(8, 0, 7), (1, 0, 0), (8, 30 * GIB, 6), (8, 39 * GIB, 0), (8, 80 * GIB, 0)],
)
def test_what_does_not_grow_with_the_batch_leaves_less_room_for_it(micro: int, fixed: int, most: int) -> None:
    short = findings.Shortage(tried=3 * GIB, free=GIB, allocated=38 * GIB)
    assert findings.largest_fitting(short, micro, fixed) == most


def test_a_smaller_micro_batch_always_fits_by_the_same_sum() -> None:
    for micro in range(2, 40):
        short = findings.Shortage(tried=2 * GIB, free=GIB // 2, allocated=20 * GIB)
        most = findings.largest_fitting(short, micro)
        assert most is not None
        assert 22 * GIB * most / micro <= 20.5 * GIB


def test_a_message_without_numbers_gives_no_sum() -> None:
    assert findings.largest_fitting(findings.parse_shortage("CUDA error: out of memory", {}), 8) is None
    assert findings.out_of_memory_advice(findings.Shortage(), {"micro_batch": 8}) == ""


@pytest.mark.parametrize(
    ("text", "short"),
    [
        pytest.param(
            "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 2.00 GiB of which 0 bytes is free. "
            "Process 7 has 1.00 GiB memory in use. 512.00 MiB is allocated by PyTorch, and 100.00 MiB is "
            "reserved by PyTorch but unallocated.",
            findings.Shortage(
                tried=20 * MIB, total=2 * GIB, free=0, allocated=512 * MIB, idle=100 * MIB, others=GIB
            ),
        ),
        pytest.param(
            "Tried to allocate 2.00 GiB (GPU 0; 6.00 GiB total capacity; 1.00 GiB already allocated; "
            "3.00 GiB free; 1.50 GiB reserved in total by PyTorch)",
            findings.Shortage(tried=2 * GIB, total=6 * GIB, free=3 * GIB, allocated=GIB, idle=GIB // 2),
        ),
        ("Tried to allocate many things. 1e999 GiB is free", findings.Shortage()),
    ],
)
def test_numbers_are_read_from_messages_of_every_age(text: str, short: findings.Shortage) -> None:
    assert findings.parse_shortage(text, {}) == short


def test_a_run_folder_gives_the_micro_batch_and_what_does_not_grow(tmp_path: Path) -> None:
    plan = json.loads(PLANS.read_text(encoding="utf-8"))["eager"]
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (tmp_path / "stderr.log").write_bytes((LOGS / "oom-old-torch.log").read_bytes())
    found = diagnose_logs([str(tmp_path)])
    assert f"in place of {plan['choice']['micro_batch']}" in only(found).cure
    assert len(found.read) == 2


# ---------------------------------------------------------------------------------------------- ranks


def test_the_rank_that_failed_comes_first_and_the_others_below_it() -> None:
    one = only(log("one-rank-oom.log"))
    assert one.ranks == (3,)
    assert "(rank 3)" in one.what
    waited, *launcher = one.consequences
    assert waited.startswith(
        "Ranks waited in a collective until it timed out (ALLREDUCE, 600000 ms) (rank 0 first"
    )
    assert any("The launcher saw a process fail" in told for told in launcher)


def test_the_silent_rank_is_named_where_the_others_only_waited() -> None:
    one = only(log("nccl-timeout.log"))
    assert one.cure.startswith("Rank 2 of 4 did not report: begin there.")


def test_between_files_the_clock_tells_who_was_first(tmp_path: Path) -> None:
    early = "2026-11-15 10:00:01,000 INFO x\nOSError: [Errno 28] No space left on device\n"
    late = "2026-11-15 10:09:01,000 INFO x\nRuntimeError: DataLoader timed out after 5 seconds\n"
    for first, second in (("rank_0.log", "rank_1.log"), ("rank_1.log", "rank_0.log")):
        (tmp_path / first).write_text(early, encoding="utf-8")
        (tmp_path / second).write_text(late, encoding="utf-8")
        assert [finding.kind for finding in diagnose_logs([str(tmp_path)]).findings] == [
            "disk-full",
            "worker-timeout",
        ]


def test_an_error_nobody_knows_is_told_with_its_frame_and_explains_the_timeouts() -> None:
    one = only(log("python-error.log"))
    assert one.what == "The program raised KeyError: 'labels' (rank 2)."
    assert "/w/data.py:17, in collate" in one.evidence
    assert len(one.consequences) == 1


def test_an_error_nobody_knows_is_a_consequence_of_one_that_is_known(tmp_path: Path) -> None:
    text = "OSError: [Errno 28] No space left on device\n" * 20 + "\n" * 20
    text += 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x\nValueError: no state\n'
    one = only(read(tmp_path, text.encode()))
    assert one.kind == "disk-full"
    assert "ValueError: no state" in one.consequences[0]


def test_two_causes_are_both_told_in_order(tmp_path: Path) -> None:
    text = "ModuleNotFoundError: No module named 'a'\n\n"
    text += "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-11-15T1 DUE TO TIME LIMIT ***\n"
    assert [finding.kind for finding in read(tmp_path, text.encode()).findings] == [
        "module-not-found",
        "time-limit",
    ]


# ---------------------------------------------------------------------------------------------- records


def snapshot(*, oom: bool, idle: int = 0) -> dict[str, Any]:
    frames = [{"filename": "/w/model.py", "line": 88, "name": "forward"}]
    blocks = [{"address": 0, "size": 4 * GIB, "state": "active_allocated", "frames": frames}]
    blocks += [{"address": 1, "size": idle, "state": "inactive", "frames": []}] * bool(idle)
    segment = {"device": 0, "total_size": 4 * GIB + idle, "allocated_size": 4 * GIB, "blocks": blocks}
    events = [{"action": "alloc", "addr": 1, "size": 5}]
    events += [{"action": "oom", "size": GIB, "device_free": GIB // 4}] * oom
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}}


def test_a_snapshot_with_an_out_of_memory_event(tmp_path: Path) -> None:
    one = only(read(tmp_path, pickle.dumps(snapshot(oom=True)), "s.pickle"))
    assert one.kind == "out-of-memory"
    assert "/w/model.py:88 forward 4.0 GiB" in one.evidence
    assert "short of 768.0 MiB" in one.cause


def test_a_snapshot_in_which_most_lies_idle(tmp_path: Path) -> None:
    one = only(read(tmp_path, pickle.dumps(snapshot(oom=False, idle=8 * GIB)), "s.pickle"))
    assert (one.kind, one.severity.value) == ("idle-memory", "info")
    assert "8.0 GiB of the 12.0 GiB" in one.what
    fragmented = only(read(tmp_path, pickle.dumps(snapshot(oom=True, idle=2 * GIB)), "s.pickle"))
    assert fragmented.kind == "fragmented-memory"


def test_a_snapshot_of_a_healthy_run_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, pickle.dumps(snapshot(oom=False)), "s.pickle").findings == ()


def flight(rank: int, states: list[str], op: str = "nccl:all_reduce") -> dict[str, Any]:
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": op if number == len(states) else "nccl:all_reduce",
            "input_sizes": [[8]],
            "state": state,
            "frames": [{"filename": "/w/t.py", "line": number, "name": "step"}],
        }
        for number, state in enumerate(states, 1)
    ]
    return {"version": "2.10", "entries": entries, "pg_config": {}, "rank": rank}


@pytest.mark.parametrize(
    ("records", "kind", "said"),
    [
        ([["completed", "started"], ["completed"]], "late-rank", "Rank 1 is behind the others"),
        ([["completed", "started"], ["completed", "started"]], "stuck-collective", "all_reduce number 2"),
        ([["completed", "started"]], "nccl-timeout", "all_reduce"),
        ([["completed", "completed"], ["completed", "completed"]], None, ""),
    ],
)
def test_flight_records_tell_who_did_not_come(
    tmp_path: Path, records: list[list[str]], kind: str | None, said: str
) -> None:
    for rank, states in enumerate(records):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(flight(rank, states)))
    found = diagnose_logs([str(tmp_path)])
    assert [finding.kind for finding in found.findings] == ([kind] if kind else [])
    if kind:
        assert said in only(found).what


def test_flight_records_tell_which_ranks_did_different_things(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(flight(0, ["completed", "started"])))
    other = flight(1, ["completed", "started"], "nccl:broadcast")
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(other))
    one = only(diagnose_logs([str(tmp_path)]))
    assert one.kind == "mismatched-collectives"
    assert "rank 0 in all_reduce" in one.what
    assert "rank 1 in broadcast" in one.what
    assert "at /w/t.py:2 step" in one.evidence


def test_torchruns_error_file_is_read_as_the_log_it_holds(tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x()\n'
    stack += "ZeroDivisionError: division by zero\n"
    value = {"message": {"message": "x", "extraInfo": {"py_callstack": stack, "timestamp": "1794832378"}}}
    folder = tmp_path / "attempt_0" / "5"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(json.dumps(value), encoding="utf-8")
    one = only(diagnose_logs([str(tmp_path)]))
    assert one.what == "The program raised ZeroDivisionError: division by zero (rank 5)."


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch /tmp/trimtab-was-here",))


@pytest.mark.parametrize("value", [Harm(), {"segments": [Harm()]}, [print], Path("x"), Exception("x"), 1j])
def test_a_pickle_that_holds_more_than_plain_values_is_never_run(tmp_path: Path, value: object) -> None:
    mark = Path("/tmp/trimtab-was-here")  # noqa: S108 - where the pickle would leave its mark
    mark.unlink(missing_ok=True)
    found = read(tmp_path, pickle.dumps(value), "s.pickle")
    assert found.findings == ()
    assert "only plain values are read" in found.notes[0]
    assert not mark.exists()


def test_a_pickle_that_is_no_record_is_told_of(tmp_path: Path) -> None:
    assert "neither a memory snapshot" in read(tmp_path, pickle.dumps([1, 2]), "s.pickle").notes[0]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_a_damaged_pickle_is_refused_and_nothing_else(noise: bytes, at: int) -> None:
    whole = pickle.dumps(snapshot(oom=True))
    try:
        load_plain_pickle(io.BytesIO(whole[:at] + noise))
    except NotPlainPickle as error:
        assert str(error)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["segments", "device_traces", "entries", "version", "message"]), JSON_VALUES, JSON_VALUES
)
def test_a_record_with_nonsense_in_it_is_read_without_an_error(
    tmp_path: Path, key: str, item: object, two: object
) -> None:
    for base in (snapshot(oom=True), flight(0, ["started"]), {"message": {"message": "x"}}):
        value = base | {key: item}
        if isinstance(item, list) and key in ("segments", "entries"):
            value[key] = [*item, {"blocks": two, "state": two, "frames": two, "collective_seq_id": two}]
        assert isinstance(read(tmp_path, json.dumps(value).encode(), "r.json"), Diagnosis)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (FAULT.replace(b"\n", b"\r\n"), "windows"),
        (FAULT.replace(b"\n", b"\r", 1), "bar"),
        (gzip.compress(FAULT), "gzip without the ending"),
        (bz2.compress(FAULT), "bzip2"),
        (lzma.compress(FAULT), "xz"),
        (FAULT.decode().encode("utf-16"), "utf-16"),
        (FAULT.decode().encode("utf-16-le"), "utf-16 without a mark"),
        (FAULT.decode().encode("utf-16-be"), "utf-16-be"),
        (b"\xef\xbb\xbf" + FAULT, "utf-8 with a mark"),
        (b"caf\xe9 \xff\xfe latin-1\n" + FAULT, "latin-1"),
        (b"a\n" + b"\x00" * 70_000 + FAULT, "a block of zeros, as crashes leave"),
        (b"x" * 300_000 + b" " + FAULT, "a long line before"),
        (FAULT.rstrip(b"\n") + b" " + b"x" * 300_000, "a long line after"),
        (b"\x1b[31m" + FAULT.replace(b"\n", b"\x1b[0m\n"), "colours"),
    ],
    ids=lambda name: name if isinstance(name, str) else "",
)
def test_a_log_is_read_whatever_its_form(tmp_path: Path, data: bytes, name: str) -> None:
    found = read(tmp_path, data, name)
    assert [finding.kind for finding in found.findings] == ["disk-full"]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (NOISE, "not a log"),
        (b"\x00" * 5000, "not a log"),
        (b"PK\x03\x04" + NOISE, "torch.save"),
        (b"\x7fELF" + NOISE, "core dump"),
        (b"\x1f\x8b" + b"\x01" * 200, "it is broken"),
    ],
    ids=lambda name: name if isinstance(name, str) else "",
)
def test_what_is_no_log_is_said_to_be_none(tmp_path: Path, data: bytes, said: str) -> None:
    found = read(tmp_path, data)
    assert said in found.notes[0]
    assert "\n" not in found.notes[0]


def test_a_cut_off_archive_is_read_to_where_it_ends(tmp_path: Path) -> None:
    whole = FAULT + b"".join(
        f"step {index} loss {hash((index, 'x')) % 10**15}\n".encode() for index in range(9000)
    )
    found = read(tmp_path, gzip.compress(whole)[:-4000])
    assert only(found).kind == "disk-full"
    assert "ends too early" in found.notes[0]


def test_a_cut_off_log_is_read_to_where_it_ends(tmp_path: Path) -> None:
    whole = FAULT * 400
    for cut in (len(FAULT) - 5, 200, 3001):
        assert only(read(tmp_path, whole[:cut])).kind == "disk-full"


def test_evidence_has_no_power_over_a_terminal_or_a_page(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e<script>alert(1)</script>\x9b31m "
    evil += "OSError: [Errno 28] No space left on device\n"
    one = only(read(tmp_path, evil.encode()))
    assert one.evidence.isprintable()
    assert "<script>" in one.evidence  # shown as it is; whoever makes a page escapes it
    assert len(only(read(tmp_path, b"y" * 5000 + FAULT)).evidence) < 1000


def test_captured_text_is_cut_and_is_no_template(tmp_path: Path) -> None:
    text = "ModuleNotFoundError: No module named {cure}{0}{__class__}" + "x" * 5000 + "\n"
    one = only(read(tmp_path, text.encode()))
    assert "{cure}{0}{__class__}" in one.what
    assert len(one.what) < 300


def test_the_same_fault_in_every_line_is_counted_to_a_thousand(tmp_path: Path) -> None:
    one = only(read(tmp_path, b"OSError: [Errno 28] No space left on device\n" * 30_000))
    assert one.times == 1000
    assert one.line == 1


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000))
def test_no_bytes_at_all_make_it_fail(tmp_path: Path, data: bytes) -> None:
    assert isinstance(read(tmp_path, data), Diagnosis)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["/nonexistent/x.log"], "there is no such file"),
        (["a\x00b"], "no path|no such file"),
        (["x" * 5000], "no path|no such file"),
    ],
)
def test_a_log_that_is_not_there(names: list[str], said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        diagnose_logs(names)


def test_a_folder_is_walked_for_logs_only(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "a.log").write_bytes(FAULT)
    (tmp_path / "model.safetensors").write_bytes(FAULT)
    (tmp_path / ".hidden.log").write_bytes(FAULT)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "slurm-1.out").write_bytes(b"step 1 loss 2\n")
    (tmp_path / "job.e4711").write_bytes(b"step 1 loss 2\n")
    found = diagnose_logs([str(tmp_path)])
    assert found.findings == ()
    assert sorted(Path(one).name for one in found.read) == ["job.e4711", "slurm-1.out"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no logs in it" in diagnose_logs([str(empty)]).notes[0]


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_says_what_follows_from_what_and_leaves_with_the_code() -> None:
    done = trimtab_cli("doctor", str(LOGS / "one-rank-oom.log"))
    assert done.returncode == 4, done.stderr
    assert "error: The GPU ran out of memory: 3.00 GiB more were asked for (rank 3)." in done.stdout
    assert "then: Ranks waited" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if " " in line.strip())
    assert done.stderr == ""


def test_json_has_every_key_of_the_contract_and_the_environment_is_code_5() -> None:
    done = trimtab_cli("doctor", "--json", str(LOGS / "disk-full.log"))
    assert done.returncode == 5
    (one,) = json.loads(done.stdout)["findings"]
    assert {"severity", "what", "evidence", "cause", "cure", "kind", "file", "line"} <= set(one)
    assert Diagnosis.from_json(done.stdout).findings[0].kind == "disk-full"


def test_standard_input_and_a_healthy_log() -> None:
    for data, code, said in ((FAULT, 5, "stdin: 1 error"), (b"step 1 loss 2\n", 0, "nothing recognised")):
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", "doctor", "-"],
            input=gzip.compress(data),
            capture_output=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code
        assert said in done.stdout.decode()
    assert b"logs of all ranks" in done.stdout


def test_explain_knows_every_kind() -> None:
    for name in load_kinds():
        assert trimtab.explain(name).text
    assert trimtab.explain("disk-full").kind == "fault"
    assert trimtab.explain("out-of-memory").kind != "fault"  # a word of ours is more than its row
    with pytest.raises(UnknownName, match="disk-full"):
        trimtab.explain("disc-ful")


def test_the_function_takes_paths() -> None:
    assert trimtab.doctor(LOGS / "disk-full.log").findings[0].kind == "disk-full"
