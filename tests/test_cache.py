"""The cache: keys with new fields in them by default, a limit per kind, entries that are whole or missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trimtab import cache
from trimtab.cache import PLANS, TRACES, CacheKind, MemoryCache, code_fingerprint, fingerprint, make_key
from trimtab.catalog.clusters import parse_cluster
from trimtab.planner import estimator
from trimtab.planner.layout_plans import NOT_ESTIMATING
from trimtab.predict import step_time
from trimtab.spec import Allocator, Link, Mesh, Setting, Strategy, Trace
from trimtab.spec.setting import Share
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import NOT_TRACED, NOT_TRACING, family_key, trace_key

pytestmark = pytest.mark.usefixtures("own_cache")

SETTING = Setting(micro_batch=4, global_batch=8, accumulation=2)


class WiderSetting(Setting, frozen=True, kw_only=True):
    """A Setting with a field that nobody has thought of yet."""

    novelty: str = "none"


def wider(**changes: Any) -> WiderSetting:
    fields = {name: getattr(SETTING, name) for name in SETTING.__struct_fields__}
    return WiderSetting(**fields, **changes)


def request(setting: Setting, **changes: Any) -> TraceRequest:
    return TraceRequest(job="slm:tiny", setting=setting, device=parse_cluster("H100").devices[0], **changes)


KEYS = {
    "trace": lambda setting: trace_key(request(setting)),
    "estimate": estimator.setting_key,
    "fusion": lambda setting: make_key(setting, step_time.NOT_FUSED),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_new_field_of_setting_is_in_every_key(key: Any) -> None:
    assert key(wider()) != key(wider(novelty="new"))
    assert key(wider()) == key(wider())


CHANGES: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "ddp", "mesh": Mesh(dp_replicate=2), "accumulation": 1},
    "mesh": {"strategy": "fsdp", "mesh": Mesh(dp_shard=2), "accumulation": 1},
    "micro_batch": {"micro_batch": 8, "accumulation": 1},
    "accumulation": {"accumulation": 3, "global_batch": 12},
    "global_batch": {"global_batch": 7},
    "precision": {"precision": "bf16"},
    "base": {"base": "nf4"},
    "recompute": {"recompute": "full"},
    "compile": {"compile": True},
    "loss": {"loss": "chunked"},
    "cp_method": {"cp_method": "all-to-all"},
    "offload": {"offload": ("activations",)},
    "optimizer_rule": {"optimizer_rule": "sgd"},
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "optimizer": {"optimizer": "plain"},
    "allocator": {"allocator": Allocator.EXPANDABLE},
    "workers": {"workers": 3},
    "sync_batchnorm": {
        "sync_batchnorm": True,
        "strategy": "ddp",
        "mesh": Mesh(dp_replicate=2),
        "accumulation": 1,
    },
    "schedule": {"schedule": "zero-bubble"},
    "virtual_stages": {"schedule": "interleaved-1f1b", "virtual_stages": 2},
    "stage_layers": {"stage_layers": (3, 1)},
    "expert_imbalance": {"expert_imbalance": 2.0},
    "shares": {"shares": (Share(samples=8, micro_batch=4, accumulation=2),)},
}


def changed(field: str) -> Setting:
    return Setting.from_builtins(msgspec.to_builtins(SETTING) | msgspec.to_builtins(CHANGES[field]))


@pytest.mark.parametrize("field", Setting.__struct_fields__)
def test_every_field_of_setting_is_in_a_key_or_left_out_by_name(field: str) -> None:
    assert field in CHANGES, "say here how this field is changed"
    other = changed(field)
    same_trace = family_key(request(SETTING)) == family_key(request(other))
    assert same_trace == (field in NOT_TRACED)
    same_estimate = estimator.setting_key(SETTING) == estimator.setting_key(other)
    assert same_estimate == (field in estimator.UNUSED_WITH_BATCH)


def test_where_branches_have_different_numbers_of_ranks_the_whole_batch_is_in_the_key() -> None:
    mesh = Mesh(branch=2, copies=(2, 1))
    uneven = [
        Setting(strategy=Strategy.HYBRID, mesh=mesh, micro_batch=8, global_batch=batch) for batch in (7, 8)
    ]
    first, second = map(estimator.setting_key, uneven)
    assert first != second


def test_a_trace_key_changes_with_the_request_and_the_code_of_the_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("class Mine: ...\n", encoding="utf-8")
    asked = request(SETTING).replace(job=f"{job}:Mine")
    keys = [
        trace_key(asked),
        trace_key(asked.replace(clip=1.0)),
        trace_key(asked.replace(overrides={"seq": 8})),
        trace_key(asked.replace(device=parse_cluster("T4").devices[0])),
    ]
    (tmp_path / "parts.py").write_text("WIDTH = 1\n", encoding="utf-8")
    keys.append(trace_key(asked))
    assert len(set(keys)) == len(keys)
    assert all(key.endswith("-4") for key in keys)


def test_a_field_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="Setting has no field worker"):
        make_key(SETTING, frozenset({"worker"}))
    assert set(Link.__struct_fields__) >= estimator.LINK_WITHIN_UNUSED


def test_code_is_in_the_key_unless_it_is_left_out_by_name() -> None:
    every = code_fingerprint(frozenset())
    assert every != code_fingerprint(frozenset({"cli"}))
    rooms = {path.stem for path in Path(cache.__file__).parent.iterdir()}
    assert rooms >= NOT_TRACING, "each of them exists"
    assert NOT_ESTIMATING < NOT_TRACING


def test_a_fingerprint_takes_whatever_a_job_may_have_as_option(tmp_path: Path) -> None:
    assert fingerprint({"path": tmp_path}) != fingerprint({"path": tmp_path / "x"})


def stored(kind: CacheKind, keys: list[str], data: str = "{}") -> None:
    for age, key in enumerate(keys):
        kind.store(key, data)
        # Written in this order, whatever the clock's resolution is.
        os.utime(kind.file(key), ns=(age * 10**9, age * 10**9))


def test_each_kind_is_evicted_by_its_own_limit() -> None:
    few, large, free = CacheKind("few", 3), CacheKind("large", None, 250), CacheKind("free", None)
    names = [f"{number:02}" for number in range(6)]
    for kind in (few, large, free):
        stored(kind, names, "x" * 100)
    assert few.keys("") == names[3:]
    assert large.keys("") == names[4:]
    assert free.keys("") == names
    few.store("new", "y")
    assert (large.keys(""), free.keys("")) == (names[4:], names)


def test_an_entry_larger_than_the_limit_stays_until_the_next() -> None:
    kind = CacheKind("large", None, 10)
    kind.store("huge", "x" * 100)
    assert kind.keys("") == ["huge"]
    kind.store("small", "x")
    assert kind.keys("") == ["small"]


def test_a_damaged_entry_is_a_miss_and_is_removed() -> None:
    key = "0" * 32 + "-4"
    for damaged in (b"", b"{", b'{"order": 7}', b"\xff\xfe", b"[" * 100_000, b"null"):
        TRACES.store(key, damaged)
        assert TRACES.load(key, Trace.from_json) is None
        assert not TRACES.has(key)
    assert TRACES.load("nobody wrote it", Trace.from_json) is None


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    PLANS.store("plan", "{}")
    assert PLANS.load("plan", json.loads) is None
    assert (tmp_path / "file").read_text(encoding="utf-8") == ""


def test_entries_of_the_layout_before_subfolders_are_removed_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    old = [f"{'a' * 32}-8", f"plan-{'b' * 32}", f"outlook-{'c' * 32}-{'d' * 12}", f"summary-{'e' * 32}"]
    for name in (*old, "notes", "plan-of-mine", "plan"):
        (tmp_path / f"{name}.json").write_text("not JSON", encoding="utf-8")
    assert PLANS.load("b" * 32, json.loads) is None
    PLANS.store("new", "{}")
    assert {file.name for file in tmp_path.iterdir()} == {
        "notes.json", "plan-of-mine.json", "plan.json", "plans"
    }  # fmt: skip


def test_what_killed_processes_left_is_removed() -> None:
    PLANS.store("plan", "{}")
    left, fresh = PLANS.folder / ".plan.json.1-2.tmp", PLANS.folder / ".plan.json.3-4.tmp"
    for file in (left, fresh):
        file.write_text("{", encoding="utf-8")
    os.utime(left, (0, 0))
    PLANS.store("other", "{}")
    assert (left.exists(), fresh.exists()) == (False, True)


WRITER = """
import json, sys
from trimtab.cache import PLANS
letter = sys.argv[1]
for size in range(300):
    PLANS.store("same", json.dumps(letter * (10_000 + size)))
"""


@pytest.mark.slow
def test_two_processes_write_the_same_key_and_no_reader_sees_half_of_it() -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, letter]) for letter in "ab"]
    seen = set()
    ends_at = time.monotonic() + 120
    while any(writer.poll() is None for writer in writers):
        assert time.monotonic() < ends_at
        try:
            data = PLANS.file("same").read_bytes()
        except FileNotFoundError:
            continue
        text = json.loads(data)
        assert set(text) in ({"a"}, {"b"})
        seen.add(text[0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert PLANS.load("same", json.loads) is not None
    assert seen
    assert [file.name for file in PLANS.folder.iterdir()] == ["same.json"]


def test_memory_is_bounded_and_computes_once() -> None:
    computed: list[int] = []

    def compute(number: int) -> str:
        computed.append(number)
        return str(number)

    memory: MemoryCache[str] = MemoryCache(max_entries=2)
    for number in (1, 2, 1, 3, 2, 1):
        assert memory.get(number, lambda number=number: compute(number)) == str(number)  # type: ignore[misc]
    assert computed == [1, 2, 3, 1]


def test_the_folder_is_the_users_unless_the_variable_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", "/somewhere")
    assert Path("/somewhere/traces") == TRACES.folder
    monkeypatch.delenv("TRIMTAB_CACHE")
    assert cache.cache_folder().name == "trimtab"
