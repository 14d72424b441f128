"""Start the ranks of a run on this machine with torchrun, and wait for them.

`python -m trimtab.training.torchrun ARGUMENTS` is torchrun with three changes: it ends when its parent ends,
it ignores SIGUSR1 (which ranks handle), and it prints no traceback when a signal ends it.
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
from trimtab.spec import Allocator
from trimtab.spec.base import Noun, check_minimum
from trimtab.training.rank_messages import (
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

    from trimtab.spec import Setting
    from trimtab.training.rank_messages import RankFailure
    from trimtab.training.task import RunEnding, TrainTask


# torchrun announces a node by its host name, and gloo uses the interface of that name. Other nodes may not
# reach either: it may be a container's address or a loopback. So use the address and the interface by which
# this node reaches the rendezvous host.

JOIN_TIMEOUT_S = 120.0
"""How long to wait for the rendezvous host, which may start last."""
ANSWER_TIMEOUT_S = 5.0
"""How long the program on the rendezvous port may take to answer as torchrun."""
WAIT_NOTICE_S = 2.0
"""After this time, print that we are waiting."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_PLACE = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]\s]+)):(?P<port>[0-9]+)")


class Rendezvous(NamedTuple):
    """Host and port where the nodes of a run meet."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse HOST:PORT.

        >>> Rendezvous.parse("head:29400"), Rendezvous.parse("[::1]:29400").host
        (Rendezvous(host='head', port=29400), '::1')
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
        """Return this machine's address on the route to the host, and the interface with that address."""
        # In Kubernetes a name appears with its pod; elsewhere waiting for a name is useless.
        addresses = self._resolve(JOIN_TIMEOUT_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0)
        family, kind, _, _, place = addresses[0]
        with contextlib.closing(socket.socket(family, kind)) as probe:
            try:
                # UDP: nothing is sent, but the kernel chooses the route.
                probe.connect(place)
            except OSError as error:
                raise self._fault(
                    f"no way leads there: {error.strerror or error}", "Look at the network of this node."
                ) from error
            address = str(probe.getsockname()[0])
        return address, _find_interface(address)

    def _resolve(self, patience_s: float) -> list[Any]:
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

    def check_host(self, address: str) -> bool:
        """Return whether torchrun must be given is_host=true; raise if nodes cannot meet there."""
        hosts = {str(entry[4][0]) for entry in socket.getaddrinfo(self.host, self.port)}
        if address not in hosts and not any(host.startswith("127.") for host in hosts):
            self._wait_for_answer()
            return False
        if _is_free(address, self.port):
            return not _is_own_address(address)
        # The port is in use: by torchrun of another node on this machine, or by another program.
        self._check_answers_as_torchrun()
        return False

    def _check_answers_as_torchrun(self) -> None:
        """Raise if no torchrun store answers; torch itself would wait for a silent program for ever."""
        from torch._C._distributed_c10d import TCPStore

        answered = threading.Event()
        threading.Thread(target=self._connect_store, args=(TCPStore, answered), daemon=True).start()
        if not answered.wait(ANSWER_TIMEOUT_S):
            raise self._fault(
                "another program listens on that port, and it is not torchrun",
                f"Give another port to all nodes, or end what has {self.port}.",
            )

    def _connect_store(self, store: Any, answered: threading.Event) -> None:
        wait = timedelta(seconds=ANSWER_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):
            store(self.host, self.port, None, is_master=False, timeout=wait, wait_for_workers=False)
            answered.set()

    def _wait_for_answer(self) -> None:
        """Wait until the host answers; raise after JOIN_TIMEOUT_S."""
        began, is_announced = time.monotonic(), False
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
                if waited > WAIT_NOTICE_S and not is_announced:
                    is_announced = True
                    sys.stderr.write(
                        f"trimtab: waiting for {self.host}:{self.port}, up to {JOIN_TIMEOUT_S:.0f} s\n"
                    )
                time.sleep(0.2)
            else:
                return

    def _fault(self, found: str, cure: str) -> EnvironmentFault:
        return EnvironmentFault(f"--rendezvous {self.host}:{self.port}", found=found, cure=cure)


def _find_interface(address: str) -> str:
    """Return the network interface with an address; '' if there is none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo" if address.startswith("127.") else ""


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
    """Return whether torchrun recognizes an address as this machine's: a loopback, or its host name's."""
    if address.startswith("127.") or address == "::1":
        return True
    with contextlib.suppress(OSError):
        return address in {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    return False


RESTARTS = 10
POLL_S = 0.1
MONITOR_S = 0.5
"""Seconds between torchrun's checks that its ranks are alive."""
LOGS_FOLDER = "logs"
"""Folder in the run folder for the output of ranks."""
NOTES_FOLDER = "control"
"""Folder in the run folder for the RankFiles of several nodes."""
TRACEBACK_LINES = 12
"""Lines of a traceback that are printed."""
SHUTDOWN_S = 60
"""How long torchrun waits for ranks to save before it kills them."""
WORKER_MODULE = "trimtab.training.worker"


class TorchrunOptions(Noun, frozen=True, kw_only=True):
    """How many ranks to start on this node, and how to join the other nodes."""

    procs: int
    nodes: str = "1"
    """Number of nodes as torchrun takes it: 2, or MIN:MAX as 1:4."""
    rendezvous: str = ""
    """HOST:PORT where nodes meet; empty on one node."""
    restarts: int = RESTARTS
    logs: str = ""
    """Folder for the output of all ranks but the first of each node; empty: all print to the terminal."""
    address: str = ""
    """Address by which other nodes reach this one; empty on one node."""
    hosts: bool | None = None
    """Whether this node is the rendezvous host; None if torchrun finds out by itself."""

    def faults(self) -> list[str]:
        """List what is wrong: fewer than 1 process, or negative restarts."""
        return check_minimum(1, procs=self.procs) + check_minimum(0, restarts=self.restarts)


def parse_node_range(text: str) -> tuple[int, int]:
    """Parse N or MIN:MAX into the least and the most nodes.

    >>> parse_node_range("2"), parse_node_range("1:4")
    ((2, 2), (1, 4))
    """
    least, colon, most = text.partition(":")
    numbers = [text for text in (least, most if colon else least) if text.isascii() and text.isdigit()]
    if len(numbers) != 2 or not 1 <= int(numbers[0]) <= int(numbers[1]):  # noqa: PLR2004 - least and most
        raise WrongUse(
            f"--nodes {text}",
            found="it is neither a number of nodes nor MIN:MAX",
            cure="Write --nodes 2, or --nodes 1:4 for a run that goes on with what is left.",
        )
    return int(numbers[0]), int(numbers[1])


def check_nodes(text: str, rendezvous: str | None) -> tuple[str, str]:
    """Check --nodes and --rendezvous together and return them; several nodes need a rendezvous.

    >>> check_nodes("1:4", "head:29400")
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


def build_arguments(options: TorchrunOptions, task_file: Path, run_id: str) -> list[str]:
    """Build the arguments of torchrun."""
    if options.rendezvous:
        place = [
            f"--nnodes={options.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={options.rendezvous}",
            f"--rdzv-id={run_id}",
            *([f"--local-addr={options.address}"] if options.address else []),
            *([] if options.hosts is None else [f"--rdzv-conf=is_host={str(options.hosts).lower()}"]),
        ]
    else:
        place = ["--standalone", "--nnodes=1"]
    return [
        *place,
        f"--nproc-per-node={options.procs}",
        f"--max-restarts={options.restarts}",
        f"--monitor-interval={MONITOR_S}",
        *_log_arguments(options),
        "-m",
        WORKER_MODULE,
        str(task_file),
    ]


def _log_arguments(options: TorchrunOptions) -> list[str]:
    """Return the arguments that send the output of all ranks of a node but the first to files."""
    if not options.logs or options.procs == 1:
        return []
    others = ",".join(f"{rank}:3" for rank in range(1, options.procs))
    return [f"--log-dir={options.logs}", f"--redirects={others}"]


def build_environment(
    before: Mapping[str, str], options: TorchrunOptions, control: RankFiles, cores: int
) -> dict[str, str]:
    """Build the ranks' environment: no launcher variables, cores divided, torchrun's logging reduced."""
    env = {name: value for name, value in before.items() if name not in LAUNCHER_VARIABLES}
    env |= control.variables()
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.procs)))
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    return env


def allocator_variables(setting: Setting, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the planned allocator; set them before CUDA starts.

    >>> from trimtab.spec import Setting
    >>> plan = Setting(micro_batch=1, global_batch=1, allocator=Allocator.EXPANDABLE)
    >>> allocator_variables(plan, {})["PYTORCH_CUDA_ALLOC_CONF"]
    'expandable_segments:True'
    """
    if setting.allocator is not Allocator.EXPANDABLE:
        return {}
    variables = {}
    for name in ALLOCATOR_VARIABLES:
        current = env.get(name, "")
        if "expandable_segments" not in current:
            variables[name] = f"{current},{_EXPANDABLE}" if current else _EXPANDABLE
    return variables


def locate_node(options: TorchrunOptions) -> tuple[TorchrunOptions, str]:
    """Return the options with this node's address, and the network interface to the other nodes.

    Raises if the rendezvous cannot work: unknown host, port of another program, or no answer.
    """
    if not options.rendezvous:
        return options, ""
    rendezvous = Rendezvous.parse(options.rendezvous)
    address, interface = rendezvous.find_route()
    hosts: bool | None = rendezvous.check_host(address) or None
    if os.environ.get("SLURM_NODEID", "0") != "0":
        # The first node of the job is the host. If nodes share a machine, another node that starts first
        # would become the host, and losing it would end the rendezvous.
        hosts = False
    return options.replace(address=address, hosts=hosts), interface


def launch_ranks(task: TrainTask, options: TorchrunOptions) -> RunEnding:
    """Start the ranks and wait for them; raise the error of a rank."""
    folder = Path(tempfile.mkdtemp(prefix="trimtab-run-"))
    try:
        options, interface = locate_node(options.replace(logs=str(Path(task.out) / LOGS_FOLDER)))
        control = _open_rank_files(options, Path(task.out), folder)
        task_file = folder / "task.json"
        task_file.write_text(task.to_json(), encoding="utf-8")
        words = build_arguments(options, task_file, make_run_id(task.out))
        command = [sys.executable, "-m", "trimtab.training.torchrun", *words]
        env = build_environment(os.environ, options, control, _count_cores()) | {
            LEADER_VARIABLE: str(os.getpid())
        }
        if interface:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        code = _run_agent(command, env, control, options, Path(task.out))
        try:
            return read_ending(task, _judge_end(code, control, options))
        except TrimtabError:
            sys.stderr.write(format_failure(control.first_failure(), options.logs))
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_rank_files(options: TorchrunOptions, out: Path, here: Path) -> RankFiles:
    """Return the RankFiles: on one node in the temporary folder `here`, on several in the run folder."""
    if not options.rendezvous:
        return RankFiles(here)
    folder = out / NOTES_FOLDER
    own = f"{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f"since-{own}"
        mark.write_text("", encoding="ascii")
        # Use the clock of the shared file system: files of earlier attempts are ignored.
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
    """Return the rank that failed first and the end of its traceback; '' if there is no traceback.

    It is short, so that it and the error below it are in the last twenty lines of a log.
    """
    if failure is None or not failure.trace:
        return ""
    lines = [line for line in failure.trace.splitlines() if line.strip(" ^~")][-TRACEBACK_LINES:]
    where = f"; output of ranks is in {logs}" if logs else ""
    return "\n".join([f"trimtab: rank {failure.rank} on {failure.host} failed first{where}", *lines]) + "\n"


def make_run_id(out: str) -> str:
    """Return torchrun's id of a run, made from its folder: the same on all nodes."""
    letters = (letter if letter.isascii() and letter.isalnum() else "-" for letter in out)
    return "trimtab-" + "".join(letters)[-48:]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))


def _run_agent(
    command: list[str], env: dict[str, str], control: RankFiles, options: TorchrunOptions, out: Path
) -> int:
    """Run torchrun to its end; start it again if something else killed it. Return its exit code.

    Its ranks get SIGTERM when it dies, so they save a checkpoint and end; the next ranks resume from it.
    """
    restarts = 0
    while True:
        # The agent gets its own session, so that Ctrl-C reaches the ranks once, through this process.
        with _start_agent(command, env) as agent:
            code = _wait_for_agent(agent, control)
        if code >= 0 or -code in set(map(int, STOP_SIGNALS)):
            return code
        _end_ranks(control)
        is_given_up = control.is_over() or control.is_done() or restarts >= options.restarts
        killed = f"torchrun, process {agent.pid}, was killed by {signal.Signals(-code).name}"
        if is_given_up:
            control.note_lost(killed)
            return code
        restarts += 1
        done = f"it is started again ({restarts} of {options.restarts}), and resumes from the last checkpoint"
        sys.stderr.write(f"trimtab: {killed}; its ranks have ended; {done}\n")
        _log_lost_agent(out, killed, done)


def _log_lost_agent(out: Path, why: str, done: str) -> None:
    """Write to the run's events that torchrun was killed; no rank is left that could do it."""
    from trimtab.spec import Incident, IncidentKind
    from trimtab.training.run_folder import RunFolder

    folder = RunFolder(root=out.absolute())
    if not folder.events_file.exists():
        return
    lines = folder.read_lines()
    step = lines[-1].get("step", 0) if lines else 0
    with contextlib.suppress(OSError):
        folder.log_event(
            Incident(kind=IncidentKind.LOST_RANK, at_s=time.time(), step=step, rank=0, why=why, done=done)
        )


def _end_ranks(control: RankFiles) -> None:
    """Wait until the ranks that a dead torchrun left behind have saved and ended; kill those that do not."""
    import psutil

    ranks = [process for pid, since_s in control.list_ranks() if (process := _find_process(pid, since_s))]
    _, alive = psutil.wait_procs(ranks, timeout=SHUTDOWN_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)


def _find_process(pid: int, since_s: float) -> Any:
    """Return the process with this id if it began before `since_s`; None if it is gone or another one."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        # The start of a process is known to a hundredth of a second.
        return process if process.create_time() <= since_s + 1.0 else None
    return None


@contextlib.contextmanager
def _start_agent(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, env=env, start_new_session=True) as agent:  # noqa: S603 - our own program
        try:
            yield agent
        finally:
            if agent.poll() is None:
                agent.terminate()


def _wait_for_agent(agent: subprocess.Popen[bytes], control: RankFiles) -> int:
    """Wait for torchrun, and forward signals to the ranks; return its exit code."""
    received: list[signal.Signals] = []

    def note(number: int, _: object) -> None:
        received.append(signal.Signals(number))

    before = {handled: signal.signal(handled, note) for handled in handled_signals()}
    sent: set[tuple[int, int]] = set()
    try:
        while (code := agent.poll()) is None:
            if received:
                control.request_stop(received[0])
                if not _forward_signals(agent.pid, received, sent) and sent:
                    # All ranks have ended because of the signal: torchrun must not restart them.
                    agent.terminate()
            time.sleep(POLL_S)
    finally:
        for key, handler in before.items():
            signal.signal(key, handler)
    return code


def _forward_signals(agent: int, received: list[signal.Signals], sent: set[tuple[int, int]]) -> bool:
    """Send each signal to each rank once, also to ranks that torchrun has just restarted.

    Returns False if no rank is left.
    """
    import psutil

    try:
        ranks = psutil.Process(agent).children()
    except psutil.NoSuchProcess:
        return False
    for rank in ranks:
        for index, number in enumerate(received):
            if (rank.pid, index) in sent:
                continue
            sent.add((rank.pid, index))
            with contextlib.suppress(psutil.NoSuchProcess):
                # While Python starts, SIGINT ends it with a traceback, and SIGTERM without one.
                rank.send_signal(number if number is signal.SIGUSR1 else signal.SIGTERM)
    return any(_is_alive(rank) for rank in ranks)


def _is_alive(rank: Any) -> bool:
    import psutil

    try:
        return bool(rank.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _judge_end(code: int, control: RankFiles, options: TorchrunOptions) -> str:
    """Return the name of the signal that ended the run, or ''; raise the error of a failed run."""
    error = control.read_error()
    if error is not None:
        raise error
    asked = control.stop_signal()
    if control.is_done() or (code == 0 and asked is None):
        return ""
    if asked is not None:
        return asked.name
    signals = {value: number.name for number in STOP_SIGNALS for value in (-int(number), exit_code(number))}
    if code in signals:
        return signals[code]
    last = control.last_crash() or control.lost_rank()
    raise EnvironmentFault(
        f"trimtab train with {options.procs} process{'es' * (options.procs > 1)}",
        found=(last or "a rank ended without a word")
        + f"; {plural(options.restarts, 'restart')} did not help",
        cure="Read the lines above; the same command resumes from the last checkpoint.",
    )


def read_ending(task: TrainTask, asked: str) -> RunEnding:
    """Return how far the run got, from its folder."""
    from trimtab.training.run_folder import RunFolder
    from trimtab.training.task import RunEnding

    lines = RunFolder(root=Path(task.out).absolute(), main=False).read_lines()
    last = lines[-1] if lines else {}
    return RunEnding(step=last.get("step", 0), loss=last.get("loss"), out=task.out, asked=asked)


def main() -> int:
    """Run torchrun with the changes that the module's docstring lists."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "TORCHELASTIC_LOG" not in os.environ:
        # The ranks and their parent print these errors themselves.
        logging.disable(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except SignalException as asked:
        # A scheduler signals every process, and our parent forwards it: torch's handler would raise again.
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
