"""Every log of tests/logs gives exactly the findings that expected.toml lists, and so do variations."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.diagnosis import fault_kinds, findings, log_files, log_scanner
from trimtab.diagnosis.diagnose import diagnose_logs
from trimtab.diagnosis.fault_kinds import (
    DiagnosisKind,
    blank_captures,
    find_needle,
    load_kinds,
    load_patterns,
    load_table,
)
from trimtab.diagnosis.findings import BEFORE
from trimtab.diagnosis.log_scanner import SMALL_BYTES, LogScanner, NeedleSieve
from trimtab.diagnosis.step_times import BUCKET_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent / "logs"
EXPECTED: dict[str, list[str]] = tomllib.loads((FOLDER / "expected.toml").read_text(encoding="utf-8"))["logs"]
FILES = [name for name in EXPECTED if (FOLDER / name).is_file()]
MADE = {"idle-memory", "run-gone", "run-under-way", "run-stalled", "step-as-predicted", *BUCKET_KINDS}
"""Kinds that a pickle, the processes of this machine or a plan tell: test_doctor.py, test_doctor_runs.py and
test_step_times.py."""


def found(*names: str | Path) -> list[str | None]:
    return [finding.kind for finding in diagnose_logs([str(name) for name in names]).findings]


def test_there_are_enough_logs_of_enough_kinds() -> None:
    assert len(EXPECTED) >= 60
    assert sum(not told for told in EXPECTED.values()) >= 12
    assert len({kind for told in EXPECTED.values() for kind in told}) >= 40


def test_every_log_gives_exactly_its_findings() -> None:
    wrong = {name: told for name in EXPECTED if (told := found(FOLDER / name)) != EXPECTED[name]}
    assert wrong == {}


def test_every_log_is_listed_and_every_kind_has_one() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*EXPECTED, "expected.toml"}
    assert {kind for told in EXPECTED.values() for kind in told} | MADE == set(load_kinds())


@functools.cache
def healthy() -> str:
    step = "{{'loss': 2.{n:03d}, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.1}}\n"
    return "".join(step.format(n=n) for n in range(300))


# Changes that leave what a log says as it is: to each line, whether or not it is the one that counts.
CHANGES: dict[str, Callable[[str], str]] = {
    "windows line ends": lambda text: text.replace("\n", "\r\n"),
    "timestamps": lambda text: re.sub(r"(?m)^(?=.)", "2026-11-14 08:15:30,123 ", text),
    "srun --label": lambda text: re.sub(r"(?m)^(?!\d+: )(?=.)", "3: ", text),
    "torchrun --tee": lambda text: re.sub(r"(?m)^(?!\[)(?=.)", "[default3]:", text),
    "colours": lambda text: re.sub(r"(?m)^(.+)$", "\x1b[31m\\1\x1b[0m", text),
    "a healthy log before": lambda text: healthy() + text,
    "another user's paths": lambda text: text.replace("/w/", "/mnt/projects/x y/").replace("/opt/", "/usr/"),
    "other ranks": lambda text: re.sub(
        r"([Rr]ank ?)([0-7])\b", lambda match: f"{match[1]}{int(match[2]) + 24}", text
    ),
    "other sizes": lambda text: re.sub(
        r"(\d+)\.(\d\d) GiB", lambda match: f"{2 * int(match[1])}.{match[2]} GiB", text
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_variation_of_every_log_gives_the_same_findings(change: str, tmp_path: Path) -> None:
    wrong = {}
    for name in FILES:
        file = tmp_path / name
        text = (FOLDER / name).read_bytes().decode("utf-8")
        file.write_bytes(CHANGES[change](text).encode("utf-8"))
        if (told := found(file)) != EXPECTED[name]:
            wrong[name] = told
    assert wrong == {}


@pytest.mark.parametrize("order", [1, -1])
def test_healthy_logs_beside_it_change_nothing(order: int) -> None:
    healthy_logs = [FOLDER / name for name, told in EXPECTED.items() if not told][:6]
    assert found(*[*healthy_logs, FOLDER / "one-rank-oom.log"][::order]) == ["out-of-memory"]


def test_all_healthy_logs_together_say_nothing() -> None:
    assert found(*(FOLDER / name for name, told in EXPECTED.items() if not told)) == []


# ---------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("row", load_table().kind, ids=lambda row: row.name)
def test_a_row_is_whole(row: DiagnosisKind) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name)
    assert row.realm in (fault_kinds.JOB, fault_kinds.ENVIRONMENT)
    for text in (row.what, row.cause, row.cure, row.source):
        assert text.strip()
        assert text.isascii()
    assert row.what.endswith(".")
    assert {one.removeprefix(BEFORE) for one in row.after} <= {*load_kinds(), "*"}
    named = {place for text in (row.what, row.cause, row.cure) for place in re.findall(r"\{(\w+)\}", text)}
    for pattern in row.patterns:
        captured = set(re.compile(pattern).groupindex)
        assert named <= captured | set(row.defaults), pattern
        # A group that may be left out needs something in its place.
        for name in named:
            if re.search(rf"\(\?P<{name}>(?:[^()]|\([^()]*\))*\)\?", pattern):
                assert name in row.defaults, pattern


def test_no_name_is_used_twice() -> None:
    names = [row.name for row in load_table().kind]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("pattern", "promised"),
    [
        (r"CUDA out of memory\. Tried", b"CUDA out of memory. Tried"),
        (r"(?P<why>Header too large) in \S+", b"Header too large in "),
        (r"task [\d,]+: Out Of Memory", b": Out Of Memory"),
        (r"abcdefghij?klmnopqrstu", b"klmnopqrstu"),
        (r"abcdefghij+klm", b"abcdefghij"),
        (r"abcdefgh(?:x|y)ijk", b"abcdefgh"),
        (r"abcdefgh\x22ijk", b"abcdefgh"),
    ],
)
def test_what_a_pattern_promises(pattern: str, promised: bytes) -> None:
    assert find_needle(pattern) == promised


@pytest.mark.parametrize(
    "pattern", ["one or the other|nothing at all", "short", r"\w+ \w+ \d+", "(?:abcdefghi)?"]
)
def test_a_pattern_that_promises_too_little_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"alternatives at its top|bytes are needed"):
        find_needle(pattern)


def test_what_a_healthy_log_says_is_rarely_looked_into() -> None:
    """A needle that is in every line makes a large log slow."""
    text = b"".join((FOLDER / name).read_bytes() for name, told in EXPECTED.items() if not told)
    hits = {
        load_pattern.needle: text.count(load_pattern.needle)
        for load_pattern in load_patterns()
        if not load_pattern.is_fact
    }
    assert {key: count for key, count in hits.items() if count > 2} == {}


PAGE = FOLDER.parent.parent / "docs" / "doctor.md"
TABLE = re.compile(r"(?<=writes this table -->\n).*(?=<!-- end of kinds -->)", re.DOTALL)


def test_the_table_of_kinds_in_the_documentation_is_fresh() -> None:
    rows = [
        f"| `{row.name}` | {row.severity.value} | {row.realm} | {blank_captures(row.what)} |"
        for row in load_table().kind
    ]
    fresh = "\n".join(["", "| kind | severity | change | what |", "|---|---|---|---|", *rows, "", ""])
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("TRIMTAB_RECORD"):
        PAGE.write_text(TABLE.sub(lambda _: fresh, page), encoding="utf-8")
        return
    match = TABLE.search(page)
    assert match
    assert match[0] == fresh, "docs/doctor.md is stale: TRIMTAB_RECORD=1 pytest tests/test_doctor_logs.py"


# ---------------------------------------------------------------------------------------------- the sieve


ALL = NeedleSieve(load_pattern.needle for load_pattern in load_patterns())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=60) | st.sampled_from(ALL.needles), max_size=8))
def test_the_sieve_finds_every_needle_both_ways(parts: list[bytes]) -> None:
    sieve, data = ALL, b"".join(parts)
    few = sieve._few(data, 0, len(data))  # noqa: SLF001 - both ways, whatever the size
    many = sieve._many(data, 0, len(data))  # noqa: SLF001
    real = {
        (match.start(), needle) for needle in sieve.needles for match in re.finditer(re.escape(needle), data)
    }
    assert set(few) == set(many) == real


def test_a_needle_across_the_border_of_two_reads_is_found_once() -> None:
    fault = b"OSError: [Errno 28] No space left on device\n"
    for size in (SMALL_BYTES - 20, (1 << 18) - 20, (1 << 18) + 5):
        data = b"step 1 loss 2\n" * (size // 14) + fault + b"step 2 loss 2\n" * (SMALL_BYTES // 4)
        place = 0

        def read(count: int, data: bytes = data) -> bytes:
            nonlocal place
            place += count
            return data[place - count : place]

        told = list(LogScanner("x").scan(read, lambda _: None))
        assert [(one.of, one.line) for one in told] == [("disk-full", size // 14 + 1)]


def test_the_examples_in_the_docstrings_hold() -> None:
    import doctest

    for module in (fault_kinds, findings, log_files, log_scanner):
        assert doctest.testmod(module).failed == 0, module


@pytest.mark.parametrize(
    ("log", "told_below"),
    [
        ("hub-dns.log", ["A host name could not be resolved"]),
        ("web-dns.log", ["A host name could not be resolved"]),
        ("deepspeed-oom-then-timeout.log", ["Ranks waited in a collective", "The launcher saw"]),
        ("oom-then-watchdog.log", ["Ranks waited in a collective", "The launcher saw"]),
        (
            "killed-then-timeout.out",
            ["Ranks waited in a collective", "A process ended itself", "The job was"],
        ),
        ("disk-full-then-loader.log", ["A loader worker died"]),
        ("assert-then-loader.log", ["NCCL met an error", "A loader worker died"]),
        ("several-ranks.log", ["Ranks lost the connection", "InfiniBand failed", "The launcher saw"]),
    ],
)
def test_what_followed_from_a_cause_is_told_below_it(log: str, told_below: list[str]) -> None:
    first = diagnose_logs([str(FOLDER / log)]).findings[0]
    for words in told_below:
        assert any(consequence.startswith(words) for consequence in first.consequences), (
            words,
            first.consequences,
        )


def test_a_hub_that_is_not_reached_is_not_blamed_on_how_ranks_meet() -> None:
    for log in ("hub-dns.log", "hub-dns-httpx.log", "web-dns.log"):
        for finding in diagnose_logs([str(FOLDER / log)]).findings:
            assert "MASTER_ADDR" not in f"{finding.what} {finding.cause} {finding.cure}", log
    assert "MASTER_ADDR" in diagnose_logs([str(FOLDER / "master-misspelt.log")]).findings[0].cure


def test_of_several_causes_the_one_that_came_first_is_first(tmp_path: Path) -> None:
    lines = (FOLDER / "two-causes.log").read_text(encoding="utf-8").splitlines()
    file = tmp_path / "backwards.log"
    file.write_text("\n".join(reversed(lines)) + "\n", encoding="utf-8")
    kinds_found = [finding.kind for finding in diagnose_logs([str(file)]).findings]
    assert kinds_found == ["disk-full", "not-a-number"]


def test_infiniband_that_failed_first_is_the_cause(tmp_path: Path) -> None:
    lines = (FOLDER / "several-ranks.log").read_text(encoding="utf-8").splitlines()
    first = [line for line in lines if "NET/IB" in line]
    file = tmp_path / "ib.log"
    file.write_text("\n".join([*first, *(line for line in lines if "NET/IB" not in line)]), encoding="utf-8")
    assert diagnose_logs([str(file)]).findings[0].kind == "ib-port-down"
