"""Where nodes meet, what can be in the way, and what ranks of several nodes tell each other."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.training import rank_messages as control_module
from trimtab.training import torchrun
from trimtab.training.rank_messages import RankFailure, RankFiles
from trimtab.training.torchrun import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A program that listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize(
    "text", ["head", "head:", ":29400", "head:0", "head:65536", "a b:1", "head:x", "[::1]"]
)
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="no HOST:PORT"):
        Rendezvous.parse(text)


def test_a_host_that_does_not_exist_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match="there is no such host"):
        Rendezvous.parse("no-such-host.invalid:29400").find_route()
    assert time.monotonic() - began < 50


def test_in_kubernetes_a_name_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(torchrun, "JOIN_TIMEOUT_S", 1.5)
    asked = []

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        if len(asked) < 2:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 29400))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert Rendezvous.parse("pod-0.pods:29400").find_route() == ("127.0.0.1", "lo")


def test_the_way_to_the_meeting_place_gives_address_and_interface() -> None:
    assert Rendezvous.parse("127.0.0.1:29400").find_route() == ("127.0.0.1", "lo")


def test_a_port_that_another_program_has_is_refused(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "ANSWER_TIMEOUT_S", 1.0)
    port = listener.getsockname()[1]
    with pytest.raises(
        EnvironmentFault, match=f"127.0.0.1:{port}: another program listens .* it is not torchrun"
    ):
        Rendezvous.parse(f"127.0.0.1:{port}").check_host("127.0.0.1")


def test_a_port_where_torchrun_waits_already_is_the_right_one() -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    assert Rendezvous("127.0.0.1", store.port).check_host("127.0.0.1") is False


def test_a_free_port_of_this_machine_needs_no_word_where_torchrun_knows_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert Rendezvous("127.0.0.1", port).check_host("127.0.0.1") is False


def test_a_host_that_does_not_answer_is_said_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "JOIN_TIMEOUT_S", 0.6)
    monkeypatch.setattr(torchrun, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(torchrun, "WAIT_NOTICE_S", 0.1)
    # An address that is kept for documentation, and that nobody has.
    with pytest.raises(EnvironmentFault, match=r"192.0.2.1:29400: it did not answer within 1 s"):
        Rendezvous.parse("192.0.2.1:29400").check_host("10.9.9.9")
    assert "waiting for 192.0.2.1:29400" in capsys.readouterr().err


def test_a_fleet_alone_meets_nobody() -> None:
    fleet = torchrun.TorchrunOptions(procs=2)
    assert torchrun.locate_node(fleet) == (fleet, "")


# Notes


def test_notes_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    RankFiles(tmp_path).request_stop(signal.SIGTERM)
    RankFiles(tmp_path).mark_done()
    os.utime(tmp_path / "stopping", ns=(1, 1))
    os.utime(tmp_path / "done", ns=(1, 1))
    later = RankFiles(tmp_path, since_ns=2)
    assert later.stop_signal() is None
    assert not later.is_over()
    assert not later.is_done()
    later.request_stop(signal.SIGUSR1)
    assert later.stop_signal() is signal.SIGUSR1


def test_ranks_find_the_notes_by_their_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RankFiles(tmp_path, since_ns=7, own="-n1").variables().items():
        monkeypatch.setenv(name, value)
    found = control_module.find_rank_files()
    assert found is not None
    assert (found.folder, found.since_ns, found.own) == (tmp_path, 7, "-n1")


def test_an_error_on_one_node_ends_the_ranks_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    one, other = RankFiles(tmp_path, own="n1"), RankFiles(tmp_path, own="n2")
    one.write_error(
        JobFailed("loss()", found="ValueError: boom", cure="Fix it."), trace="Traceback\nValueError: boom\n"
    )
    assert other.is_over()
    assert isinstance(other.read_error(), JobFailed)
    assert other.first_failure() == RankFailure(3, socket.gethostname(), "Traceback\nValueError: boom\n")


def test_the_first_rank_to_crash_is_the_one_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = RankFiles(tmp_path)
    assert control.first_failure() is None
    for rank, text in (("2", "KeyError: a"), ("0", "KeyError: a"), ("1", "KeyError: a")):
        monkeypatch.setenv("RANK", rank)
        often = control.add_crash(text, 5, trace=f"trace of {rank}")
    assert often
    failure = control.first_failure()
    assert failure is not None
    assert (failure.rank, failure.trace) == (2, "trace of 2")


def test_a_rank_that_was_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    control = RankFiles(tmp_path)
    assert control.lost_rank() is None
    control.note_lost_rank(1, -9)
    assert control.lost_rank() == "rank 1 was killed by SIGKILL"
    control.note_lost_rank(0, 3)
    assert control.lost_rank() == "rank 0 ended with 3"
    with pytest.raises(EnvironmentFault, match="rank 0 ended with 3; 2 restarts did not help"):
        torchrun._judge_end(1, control, torchrun.TorchrunOptions(procs=2, restarts=2))  # noqa: SLF001


def test_the_failing_rank_and_its_cause_fit_into_twenty_lines() -> None:
    frames = "".join(f'  File "a.py", line {n}, in f\n    f({n})\n      ^^^^\n' for n in range(40))
    trace = f"Traceback (most recent call last):\n{frames}ValueError: boom\n"
    told = torchrun.format_failure(RankFailure(2, "n1", trace), "runs/a/logs")
    lines = told.splitlines()
    assert lines[0] == "trimtab: rank 2 on n1 failed first; output of ranks is in runs/a/logs"
    assert lines[-1] == "ValueError: boom"
    # The error itself takes three lines more, or a few where they are long.
    assert len(lines) <= 14
    assert not any(line.strip() == "^^^^" for line in lines)
    assert torchrun.format_failure(None, "logs") == ""
    assert torchrun.format_failure(RankFailure(0, "n1", ""), "logs") == ""


def test_notes_of_several_nodes_are_in_the_runs_folder(tmp_path: Path) -> None:
    several = torchrun.TorchrunOptions(procs=1, rendezvous="head:1")
    notes = torchrun._open_rank_files(several, tmp_path / "run", tmp_path / "own")  # noqa: SLF001
    assert notes.folder == tmp_path / "run" / "control"
    assert notes.since_ns > 0
    notes.request_stop(signal.SIGTERM)
    assert notes.is_over()
    own = torchrun._open_rank_files(torchrun.TorchrunOptions(procs=1), tmp_path / "run", tmp_path / "own")  # noqa: SLF001
    assert own.folder == tmp_path / "own"
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EnvironmentFault, match="cannot be written to"):
        torchrun._open_rank_files(several, tmp_path / "file", tmp_path)  # noqa: SLF001
