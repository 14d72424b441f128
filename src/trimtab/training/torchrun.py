"""Starts the ranks of a run on this machine through torchrun, and waits for them.

`python -m trimtab.training.torchrun ARGUMENTS` is torchrun with three habits more: it ends when its parent
does, it leaves SIGUSR1 to the ranks, and it does not print a traceback when it is asked to end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from trimtab.errors import EnvironmentFault, TrimtabError, WrongUse
from trimtab.spec.base import Noun, check_minimum
from trimtab.training.rank_files import (
    LAUNCHER_VARIABLES,
    LEADER_VARIABLE,
    LOST_PEER_CODE,
    RankFiles,
    end_with_parent,
    find_rank_files,
)
from trimtab.training.signals import STOP_SIGNALS, exit_code, handled_signals
from trimtab.units import parse_whole, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trimtab.training.rank_files import RankFailure
    from trimtab.training.task import RunEnding, TrainTask


# Where the nodes of a run meet, and by which of its addresses this one takes part.
#
# torchrun hands out a node's host name, and gloo takes the interface that this name leads to. Either may be
# one that the other nodes cannot reach: a container's, a loopback. So the way to the meeting place decides:
# what leads there leads to the others.


JOIN_TIMEOUT_S = 120.0
"""How long the host where nodes meet may be silent: it may start last."""
ANSWER_TIMEOUT_S = 5.0
"""How long a program that listens there may take to show that it is torchrun."""
WAIT_NOTICE_S = 2.0
"""After this the wait is told."""
_PLACE = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]\s]+)):(?P<port>[0-9]+)")


class Rendezvous(NamedTuple):
    """A host and a port of it."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From HOST:PORT.

        >>> Meeting.read("head:29400"), Meeting.read("[::1]:29400").host
        (Meeting(host='head', port=29400), '::1')
        """
        match = _PLACE.fullmatch(text)
        port = parse_whole(match["port"]) if match else None
        if match is None or port is None or not 0 < port < 2**16:
            raise WrongUse(
                f"--rendezvous {text}",
                found="it is no HOST:PORT with a port from 1 to 65535",
                cure="Write it like --rendezvous node1:29400, where node1 is one of the nodes.",
            )
        return cls(match["six"] or match["host"], port)

    def find_route(self) -> tuple[str, str]:
        """This machine's address on the way there, and the interface that has it."""
        # In Kubernetes a name comes with its pod; anywhere else it is there or will never be.
        found = self._addresses(JOIN_TIMEOUT_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0)
        family, kind, _, _, place = found[0]
        with contextlib.closing(socket.socket(family, kind)) as probe:
            try:
                # Nothing is sent: the kernel chooses the way.
                probe.connect(place)
            except OSError as error:
                raise self._fault(
                    f"no way leads there: {error.strerror or error}", "Look at the network of this node."
                ) from error
            address = str(probe.getsockname()[0])
        return address, _find_interface(address)

    def _addresses(self, patience_s: float) -> list[Any]:
        until = time.monotonic() + patience_s
        while True:
            try:
                return list(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM))
            except OSError as error:
                if time.monotonic() >= until:
                    raise self._fault(
                        f"there is no such host: {error.strerror or error}",
                        "Give the name or the address of a node as the others know it.",
                    ) from error
                time.sleep(1.0)

    def check(self, address: str) -> bool:
        """Whether this node has to be told that it is the host; raises where nobody can meet there."""
        there = {str(one[4][0]) for one in socket.getaddrinfo(self.host, self.port)}
        if address not in there and not any(one.startswith("127.") for one in there):
            self._wait_for_answer()
            return False
        if _is_free(address, self.port):
            return not _is_own_address(address)
        # Another node on this machine, or an agent that was faster; or something else.
        self._check_answers_as_torchrun()
        return False

    def _check_answers_as_torchrun(self) -> None:
        """A store answers at once; torch itself would wait for ever for a program that says nothing."""
        from torch._C._distributed_c10d import TCPStore

        answered = threading.Event()
        threading.Thread(target=self._greet, args=(TCPStore, answered), daemon=True).start()
        if not answered.wait(ANSWER_TIMEOUT_S):
            raise self._fault(
                "another program listens on that port, and it is not torchrun",
                f"Give another port to all nodes, or end what has {self.port}.",
            )

    def _greet(self, store: Any, answered: threading.Event) -> None:
        wait = timedelta(seconds=ANSWER_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):
            store(self.host, self.port, None, is_master=False, timeout=wait, wait_for_workers=False)
            answered.set()

    def _wait_for_answer(self) -> None:
        """The host may be starting still."""
        began, told = time.monotonic(), False
        while True:
            try:
                socket.create_connection(self, timeout=ANSWER_TIMEOUT_S).close()
            except OSError as error:
                waited = time.monotonic() - began
                if waited > JOIN_TIMEOUT_S:
                    raise self._fault(
                        f"it did not answer within {JOIN_TIMEOUT_S:.0f} s: {error.strerror or error}",
                        "Start the run there too; every node must reach it by that name and port.",
                    ) from error
                if waited > WAIT_NOTICE_S and not told:
                    told = True
                    sys.stderr.write(
                        f"trimtab: waiting for {self.host}:{self.port}, up to {JOIN_TIMEOUT_S:.0f} s\n"
                    )
                time.sleep(0.2)
            else:
                return

    def _fault(self, found: str, cure: str) -> EnvironmentFault:
        return EnvironmentFault(f"--rendezvous {self.host}:{self.port}", found=found, cure=cure)


def _find_interface(address: str) -> str:
    """The network interface that has an address; empty where none is found."""
    import psutil

    there = psutil.net_if_addrs().items()
    found = next((name for name, held in there if any(one.address == address for one in held)), "")
    return found or ("lo" if address.startswith("127.") else "")


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise EnvironmentFault(
                f"--rendezvous port {port}",
                found=f"this machine cannot listen on it: {error.strerror}",
                cure="Give a port from 1024 up that nothing else has.",
            ) from error
    return True


def _is_own_address(address: str) -> bool:
    """Whether torchrun knows an address for this machine's own: a loopback, or what its name leads to."""
    if address.startswith("127.") or address == "::1":
        return True
    with contextlib.suppress(OSError):
        return address in {str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None)}
    return False


RESTARTS = 10
POLL_S = 0.1
MONITOR_S = 0.5
"""How often torchrun looks whether its ranks are alive."""
LOGS_FOLDER = "logs"
"""Where in a run's folder the output of ranks is kept."""
NOTES_FOLDER = "control"
"""Where in a run's folder the ranks of several nodes leave notes."""
TRACEBACK_LINES = 12
"""Lines of a traceback that are shown."""
SHUTDOWN_S = 60
"""How long torchrun lets ranks save before it kills them."""
WORKER_MODULE = "trimtab.training.worker"


class TorchrunOptions(Noun, frozen=True, kw_only=True):
    """How many ranks to start here, and which other nodes take part."""

    procs: int
    nodes: str = "1"
    """As torchrun takes them: 2, or 1:4 for as many as there are."""
    rendezvous: str = ""
    """host:port where nodes meet; empty on one node."""
    restarts: int = RESTARTS
    logs: str = ""
    """The folder for what ranks print, but for the first of each node, which prints here; empty: all do."""
    address: str = ""
    """The address of this node that the others reach it by; empty where there are no others."""
    hosts: bool | None = None
    """Whether this node is where they meet; None where torchrun finds out by the address itself."""

    def faults(self) -> list[str]:
        """At least one process."""
        return check_minimum(1, procs=self.procs) + check_minimum(0, restarts=self.restarts)


def parse_node_range(text: str) -> tuple[int, int]:
    """The least and the most nodes of what torchrun takes.

    >>> node_range("2"), node_range("1:4")
    ((2, 2), (1, 4))
    """
    least, colon, most = text.partition(":")
    numbers = [one for one in (least, most if colon else least) if one.isascii() and one.isdigit()]
    if len(numbers) != 2 or not 1 <= int(numbers[0]) <= int(numbers[1]):  # noqa: PLR2004 - least and most
        raise WrongUse(
            f"--nodes {text}",
            found="it is neither a number of nodes nor MIN:MAX",
            cure="Write --nodes 2, or --nodes 1:4 for a run that goes on with what is left.",
        )
    return int(numbers[0]), int(numbers[1])


def check_nodes(text: str, rendezvous: str | None) -> tuple[str, str]:
    """Nodes as torchrun takes them, checked: 2, or 1:4.

    >>> read_nodes("1:4", "head:29400")
    ('1:4', 'head:29400')
    """
    _, most = parse_node_range(text)
    if most > 1 and not rendezvous:
        raise WrongUse(
            f"--nodes {text}",
            found="several nodes need a place to meet",
            cure="Give all of them the same --rendezvous HOST:PORT, where HOST is one of them.",
        )
    return text, rendezvous or ""


def build_arguments(fleet: TorchrunOptions, task_file: Path, run_id: str) -> list[str]:
    """The command line of torchrun."""
    if fleet.rendezvous:
        place = [
            f"--nnodes={fleet.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={fleet.rendezvous}",
            f"--rdzv-id={run_id}",
            *([f"--local-addr={fleet.address}"] if fleet.address else []),
            *([] if fleet.hosts is None else [f"--rdzv-conf=is_host={str(fleet.hosts).lower()}"]),
        ]
    else:
        place = ["--standalone", "--nnodes=1"]
    return [
        *place,
        f"--nproc-per-node={fleet.procs}",
        f"--max-restarts={fleet.restarts}",
        f"--monitor-interval={MONITOR_S}",
        *_log_arguments(fleet),
        "-m",
        WORKER_MODULE,
        str(task_file),
    ]


def _log_arguments(fleet: TorchrunOptions) -> list[str]:
    """Output of all ranks of a node but the first goes to files, so that lines of many do not mingle."""
    if not fleet.logs or fleet.procs == 1:
        return []
    others = ",".join(f"{rank}:3" for rank in range(1, fleet.procs))
    return [f"--log-dir={fleet.logs}", f"--redirects={others}"]


def build_environment(
    before: Mapping[str, str], fleet: TorchrunOptions, control: RankFiles, cores: int
) -> dict[str, str]:
    """Variables of the ranks: no launcher's, cores shared out, and torchrun's own talk turned down."""
    found = {name: value for name, value in before.items() if name not in LAUNCHER_VARIABLES}
    found |= control.variables()
    found.setdefault("OMP_NUM_THREADS", str(max(1, cores // fleet.procs)))
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    found.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    return found


def locate_node(fleet: TorchrunOptions) -> tuple[TorchrunOptions, str]:
    """The fleet with this node's own address, and the network interface that leads to the others.

    Raises where nobody can meet: an address that is none, a port that another program has, a silent host.
    """
    if not fleet.rendezvous:
        return fleet, ""
    meeting = Rendezvous.parse(fleet.rendezvous)
    address, interface = meeting.find_route()
    hosts: bool | None = meeting.check(address) or None
    if os.environ.get("SLURM_NODEID", "0") != "0":
        # They meet on the first node of the job. Where nodes share a machine, another one that came first
        # would be the host, and would take the meeting place along when it is lost.
        hosts = False
    return fleet.replace(address=address, hosts=hosts), interface


def launch_ranks(task: TrainTask, fleet: TorchrunOptions) -> RunEnding:
    """Start the ranks and wait for the end; raises the error of a rank."""
    folder = Path(tempfile.mkdtemp(prefix="trimtab-run-"))
    try:
        fleet, interface = locate_node(fleet.replace(logs=str(Path(task.out) / LOGS_FOLDER)))
        control = _open_rank_files(fleet, Path(task.out), folder)
        task_file = folder / "task.json"
        task_file.write_text(task.to_json(), encoding="utf-8")
        words = build_arguments(fleet, task_file, make_run_id(task.out))
        command = [sys.executable, "-m", "trimtab.training.torchrun", *words]
        env = build_environment(os.environ, fleet, control, _count_cores()) | {
            LEADER_VARIABLE: str(os.getpid())
        }
        if interface:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        # A session of its own: Ctrl-C reaches the ranks once, through us.
        with _start_agent(command, env) as agent:
            code = _wait_for_agent(agent, control)
        try:
            return read_ending(task, _judge_end(code, control, fleet))
        except TrimtabError:
            sys.stderr.write(format_failure(control.first_failure(), fleet.logs))
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_rank_files(fleet: TorchrunOptions, out: Path, here: Path) -> RankFiles:
    """Where ranks leave notes: on one node in a folder of ours, over several in the run's own."""
    if not fleet.rendezvous:
        return RankFiles(here)
    folder = out / NOTES_FOLDER
    own = f"{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f"since-{own}"
        mark.write_text("", encoding="ascii")
        # By the clock of the file system, which all nodes share: notes of earlier attempts do not count.
        since_ns = mark.stat().st_mtime_ns
        mark.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"--out {out}",
            found=f"it cannot be written to ({error.strerror})",
            cure="Give a folder that all nodes share and that you may write to.",
        ) from error
    return RankFiles(folder, since_ns=since_ns, own=own)


def format_failure(failure: RankFailure | None, logs: str) -> str:
    """The rank that failed first and the end of its traceback; nothing where no rank left one.

    Short enough that it and the error below it stand in the last twenty lines.
    """
    if failure is None or not failure.trace:
        return ""
    lines = [line for line in failure.trace.splitlines() if line.strip(" ^~")][-TRACEBACK_LINES:]
    where = f"; output of ranks is in {logs}" if logs else ""
    return "\n".join([f"trimtab: rank {failure.rank} on {failure.host} failed first{where}", *lines]) + "\n"


def make_run_id(out: str) -> str:
    """What nodes of the same run call it, by its folder."""
    return "trimtab-" + "".join(one if one.isascii() and one.isalnum() else "-" for one in out)[-48:]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _start_agent(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, env=env, start_new_session=True) as agent:  # noqa: S603 - our own program
        try:
            yield agent
        finally:
            if agent.poll() is None:
                agent.terminate()


def _wait_for_agent(agent: subprocess.Popen[bytes], control: RankFiles) -> int:
    """Wait for torchrun, and pass on what we are asked."""
    heard: list[signal.Signals] = []

    def note(number: int, _: object) -> None:
        heard.append(signal.Signals(number))

    before = {one: signal.signal(one, note) for one in handled_signals()}
    told: set[tuple[int, int]] = set()
    try:
        while (code := agent.poll()) is None:
            if heard:
                control.request_stop(heard[0])
                if not _forward_signals(agent.pid, heard, told) and told:
                    # All ranks have ended as they were asked: there is nothing left to start again.
                    agent.terminate()
            time.sleep(POLL_S)
    finally:
        for key, handler in before.items():
            signal.signal(key, handler)
    return code


def _forward_signals(agent: int, heard: list[signal.Signals], told: set[tuple[int, int]]) -> bool:
    """Every signal to every rank, once, those included that torchrun has only just started.

    False where there is no rank left.
    """
    import psutil

    try:
        ranks = psutil.Process(agent).children()
    except psutil.NoSuchProcess:
        return False
    for rank in ranks:
        for number, signals in enumerate(heard):
            if (rank.pid, number) in told:
                continue
            told.add((rank.pid, number))
            with contextlib.suppress(psutil.NoSuchProcess):
                # Python that is still waking up dies of SIGINT with a traceback, and of SIGTERM without.
                rank.send_signal(signals if signals is signal.SIGUSR1 else signal.SIGTERM)
    return any(_is_alive(rank) for rank in ranks)


def _is_alive(rank: Any) -> bool:
    import psutil

    try:
        return bool(rank.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _judge_end(code: int, control: RankFiles, fleet: TorchrunOptions) -> str:
    """The signal that ended the run, if one did; raises what went wrong."""
    error = control.read_error()
    if error is not None:
        raise error
    asked = control.stop_signal()
    if control.is_done() or (code == 0 and asked is None):
        return ""
    if asked is not None:
        return asked.name
    signals = {-int(one): one.name for one in STOP_SIGNALS} | {
        exit_code(one): one.name for one in STOP_SIGNALS
    }
    if code in signals:
        return signals[code]
    last = control.last_crash() or control.lost_rank()
    raise EnvironmentFault(
        f"trimtab train with {fleet.procs} process{'es' * (fleet.procs > 1)}",
        found=(last or "a rank ended without a word") + f"; {plural(fleet.restarts, 'restart')} did not help",
        cure="Read the lines above; the same command resumes from the last checkpoint.",
    )


def read_ending(task: TrainTask, asked: str) -> RunEnding:
    """Where the run's folder says that it ended."""
    from trimtab.training.run_folder import RunFolder
    from trimtab.training.task import RunEnding

    lines = RunFolder(root=Path(task.out).absolute(), main=False).read_lines()
    last = lines[-1] if lines else {}
    return RunEnding(step=last.get("step", 0), loss=last.get("loss"), out=task.out, asked=asked)


def main() -> int:
    """Be torchrun."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "TORCHELASTIC_LOG" not in os.environ:
        # What it would say is said by the ranks and by their parent, in their words.
        logging.disable(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except SignalException as asked:
        # A scheduler asks every process, and our parent asks once more: torch's handler would raise again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return 128 + asked.sigval
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        control = find_rank_files()
        if control is not None and first.exitcode != LOST_PEER_CODE:
            control.note_lost_rank(rank, first.exitcode)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
