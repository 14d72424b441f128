"""Starts the ranks of a run on this machine through torchrun, and waits for them.

`python -m trimtab.training.start ARGUMENTS` is torchrun with three habits more: it ends when its parent
does, it leaves SIGUSR1 to the ranks, and it does not print a traceback when it is asked to end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import EnvironmentFault, TrimtabError, WrongUse
from trimtab.spec.base import Noun, below
from trimtab.training.control import LEADER, LOST, Control, end_with_parent, given
from trimtab.training.meeting import Meeting
from trimtab.training.signals import HEARD, exit_code
from trimtab.training.signals import heard as hearing
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trimtab.training.control import Failure
    from trimtab.training.task import Ending, Task

RESTARTS = 10
POLL_S = 0.1
MONITOR_S = 0.5
"""How often torchrun looks whether its ranks are alive."""
LOGS = "logs"
"""Where in a run's folder the output of ranks is kept."""
NOTES = "control"
"""Where in a run's folder the ranks of several nodes leave notes."""
REPORTED = 12
"""Lines of a traceback that are shown."""
SHUTDOWN_S = 60
"""How long torchrun lets ranks save before it kills them."""
WORKER = "trimtab.training.worker"
LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK")
"""Variables of a launcher, which must not leak into what is launched from here."""


class Fleet(Noun, frozen=True, kw_only=True):
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
        return below(1, procs=self.procs) + below(0, restarts=self.restarts)


def node_range(text: str) -> tuple[int, int]:
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


def read_nodes(text: str, rendezvous: str | None) -> tuple[str, str]:
    """Nodes as torchrun takes them, checked: 2, or 1:4.

    >>> read_nodes("1:4", "head:29400")
    ('1:4', 'head:29400')
    """
    _, most = node_range(text)
    if most > 1 and not rendezvous:
        raise WrongUse(
            f"--nodes {text}",
            found="several nodes need a place to meet",
            cure="Give all of them the same --rendezvous HOST:PORT, where HOST is one of them.",
        )
    return text, rendezvous or ""


def arguments(fleet: Fleet, task_file: Path, run_id: str) -> list[str]:
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
        *_kept_apart(fleet),
        "-m",
        WORKER,
        str(task_file),
    ]


def _kept_apart(fleet: Fleet) -> list[str]:
    """Output of all ranks of a node but the first goes to files, so that lines of many do not mingle."""
    if not fleet.logs or fleet.procs == 1:
        return []
    others = ",".join(f"{rank}:3" for rank in range(1, fleet.procs))
    return [f"--log-dir={fleet.logs}", f"--redirects={others}"]


def environment(before: Mapping[str, str], fleet: Fleet, control: Control, cores: int) -> dict[str, str]:
    """Variables of the ranks: no launcher's, cores shared out, and torchrun's own talk turned down."""
    found = {name: value for name, value in before.items() if name not in LAUNCHED}
    found |= control.variables()
    found.setdefault("OMP_NUM_THREADS", str(max(1, cores // fleet.procs)))
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    found.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    return found


def placed(fleet: Fleet) -> tuple[Fleet, str]:
    """The fleet with this node's own address, and the network interface that leads to the others.

    Raises where nobody can meet: an address that is none, a port that another program has, a silent host.
    """
    if not fleet.rendezvous:
        return fleet, ""
    meeting = Meeting.read(fleet.rendezvous)
    address, interface = meeting.route()
    hosts: bool | None = meeting.check(address) or None
    if os.environ.get("SLURM_NODEID", "0") != "0":
        # They meet on the first node of the job. Where nodes share a machine, another one that came first
        # would be the host, and would take the meeting place along when it is lost.
        hosts = False
    return fleet.replace(address=address, hosts=hosts), interface


def launch(task: Task, fleet: Fleet) -> Ending:
    """Start the ranks and wait for the end; raises the error of a rank."""
    folder = Path(tempfile.mkdtemp(prefix="trimtab-run-"))
    try:
        fleet, interface = placed(fleet.replace(logs=str(Path(task.out) / LOGS)))
        control = _notes(fleet, Path(task.out), folder)
        task_file = folder / "task.json"
        task_file.write_text(task.to_json(), encoding="utf-8")
        words = arguments(fleet, task_file, run_id(task.out))
        command = [sys.executable, "-m", "trimtab.training.start", *words]
        env = environment(os.environ, fleet, control, _cores()) | {LEADER: str(os.getpid())}
        if interface:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        # A session of its own: Ctrl-C reaches the ranks once, through us.
        with _agent(command, env) as agent:
            code = _wait(agent, control)
        try:
            return ending(task, _judged(code, control, fleet))
        except TrimtabError:
            sys.stderr.write(report(control.failure(), fleet.logs))
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _notes(fleet: Fleet, out: Path, here: Path) -> Control:
    """Where ranks leave notes: on one node in a folder of ours, over several in the run's own."""
    if not fleet.rendezvous:
        return Control(here)
    folder = out / NOTES
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
    return Control(folder, since_ns=since_ns, own=own)


def report(failure: Failure | None, logs: str) -> str:
    """The rank that failed first and the end of its traceback; nothing where no rank left one.

    Short enough that it and the error below it stand in the last twenty lines.
    """
    if failure is None or not failure.trace:
        return ""
    lines = [line for line in failure.trace.splitlines() if line.strip(" ^~")][-REPORTED:]
    where = f"; output of ranks is in {logs}" if logs else ""
    return "\n".join([f"trimtab: rank {failure.rank} on {failure.host} failed first{where}", *lines]) + "\n"


def run_id(out: str) -> str:
    """What nodes of the same run call it, by its folder."""
    return "trimtab-" + "".join(one if one.isascii() and one.isalnum() else "-" for one in out)[-48:]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _agent(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, env=env, start_new_session=True) as agent:  # noqa: S603 - our own program
        try:
            yield agent
        finally:
            if agent.poll() is None:
                agent.terminate()


def _wait(agent: subprocess.Popen[bytes], control: Control) -> int:
    """Wait for torchrun, and pass on what we are asked."""
    heard: list[signal.Signals] = []

    def note(number: int, _: object) -> None:
        heard.append(signal.Signals(number))

    before = {one: signal.signal(one, note) for one in hearing()}
    told: set[tuple[int, int]] = set()
    try:
        while (code := agent.poll()) is None:
            if heard:
                control.stop(heard[0])
                if not _pass_on(agent.pid, heard, told) and told:
                    # All ranks have ended as they were asked: there is nothing left to start again.
                    agent.terminate()
            time.sleep(POLL_S)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return code


def _pass_on(agent: int, heard: list[signal.Signals], told: set[tuple[int, int]]) -> bool:
    """Every signal to every rank, once, those included that torchrun has only just started.

    False where there is no rank left.
    """
    import psutil

    try:
        ranks = psutil.Process(agent).children()
    except psutil.NoSuchProcess:
        return False
    for rank in ranks:
        for number, one in enumerate(heard):
            if (rank.pid, number) in told:
                continue
            told.add((rank.pid, number))
            with contextlib.suppress(psutil.NoSuchProcess):
                # Python that is still waking up dies of SIGINT with a traceback, and of SIGTERM without.
                rank.send_signal(one if one is signal.SIGUSR1 else signal.SIGTERM)
    return any(_is_alive(rank) for rank in ranks)


def _is_alive(rank: Any) -> bool:
    import psutil

    try:
        return bool(rank.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _judged(code: int, control: Control, fleet: Fleet) -> str:
    """The signal that ended the run, if one did; raises what went wrong."""
    error = control.error()
    if error is not None:
        raise error
    asked = control.stopping()
    if control.is_done() or (code == 0 and asked is None):
        return ""
    if asked is not None:
        return asked.name
    signals = {-int(one): one.name for one in HEARD} | {exit_code(one): one.name for one in HEARD}
    if code in signals:
        return signals[code]
    last = control.last_crash() or control.lost()
    raise EnvironmentFault(
        f"trimtab train with {fleet.procs} process{'es' * (fleet.procs > 1)}",
        found=(last or "a rank ended without a word") + f"; {plural(fleet.restarts, 'restart')} did not help",
        cure="Read the lines above; the same command resumes from the last checkpoint.",
    )


def ending(task: Task, asked: str) -> Ending:
    """Where the run's folder says that it ended."""
    from trimtab.training.folder import RunFolder
    from trimtab.training.task import Ending

    lines = RunFolder(root=Path(task.out).absolute(), main=False).lines()
    last = lines[-1] if lines else {}
    return Ending(step=last.get("step", 0), loss=last.get("loss"), out=task.out, asked=asked)


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
        control = given()
        if control is not None and first.exitcode != LOST:
            control.lose(rank, first.exitcode)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
