"""A real Slurm cluster of two nodes on this machine, in a folder of its own, for as long as a test needs it.

Two slurmd play the nodes n1 and n2, each with GPUs that are /dev/null under another name. Nothing outside the
folder is touched, and no daemon outlives the cluster: each runs in the foreground, as a child of the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "setpriv": "util-linux",
}
"""What has to be there, by the package of Debian that has it."""
NODES = ("n1", "n2")
GPUS = 4
READY_S = 240.0
CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=bf_interval=3,sched_interval=3,batch_sched_delay=0,default_queue_depth=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldTimeout=300
SlurmdTimeout={lost_s}
InactiveLimit=0
MinJobAge=300
KillWait=10
Waittime=0
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs={cores} \
RealMemory={memory} Gres=gpu:h100:{gpus} State=UNKNOWN
PartitionName=batch Nodes=n[1-2] Default=YES MaxTime=1:00:00 State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n[1-2] MaxTime=10:00 State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    if sys.platform != "linux":
        return "Slurm's daemons run on Linux"
    if os.geteuid() != 0:
        return "a Slurm cluster is started by root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = sorted({name for program, name in PROGRAMS.items() if not shutil.which(program, path=path)})
    return f"these packages are not installed: {', '.join(lacking)}" if lacking else ""


@dataclass
class Slurm:
    """A cluster that runs: `slurm.ask("squeue")`, `slurm.submit(script)`, `slurm.stop_node("n2")`."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which commands find this cluster, and no job around the tests."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        # As a login shell finds them: a test may run from the virtual environment's python alone.
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}:/usr/sbin:/usr/bin:/bin"
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def ask(self, *command: str, timeout_s: float = 30, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} left with {done.returncode}: {done.stderr}{self.logs()}")
        return done.stdout

    def submit(self, script: Path | str, *options: str) -> str:
        """The number of the job that a script has become."""
        return self.ask("sbatch", "--parsable", *options, str(script)).strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol says of a job; nothing where it is forgotten."""
        text = self.ask("scontrol", "--oneliner", "show", "job", job_id, check=False)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def state(self, job_id: str) -> str:
        """Its state in Slurm's word, such as RUNNING."""
        return self.job(job_id).get("JobState", "")

    def until(self, holds: Callable[[], object], why: str, *, seconds: float = 240) -> float:
        """Wait until something holds; how long it took."""
        since = time.monotonic()
        while not holds():
            passed = time.monotonic() - since
            if passed > seconds:
                raise TimeoutError(
                    f"after {passed:.0f} s still not: {why}\n{self.ask('squeue')}{self.logs()}"
                )
            time.sleep(0.1)
        return time.monotonic() - since

    def ended(self, job_id: str, *, seconds: float = 120) -> str:
        """Wait for the end of a job; its last state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
        self.until(lambda: self.state(job_id) in over, f"job {job_id} has ended", seconds=seconds)
        return self.state(job_id)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, as when the node comes up."""
        self._start(name, "slurmd", "-D", "-N", name)

    def stop_node(self, name: str) -> None:
        """A node goes down in an instant: its daemon, and all that runs on it."""
        daemon = self.daemons.pop(name)
        doomed = [daemon.pid, *self.processes_on(name)]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def processes_on(self, name: str) -> list[int]:
        """Processes of jobs on a node, the step daemons first."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                env = one.environ()
                if env.get("SLURM_CONF") == str(self.folder / "slurm.conf") and (
                    env.get("SLURMD_NODENAME") == name
                ):
                    found.append(one.pid)
        steps = [
            one.pid
            for one in psutil.process_iter(["name", "cmdline"])
            if (one.info["name"] or "").startswith("slurmstepd")
            and str(self.folder) in "".join(_opened(one))
            and f"spool-{name}" in "".join(_opened(one))
        ]
        return [*steps, *found]

    def idle(self, *names: str) -> bool:
        """Whether these nodes wait for work."""
        lines = self.ask("sinfo", "--noheader", "-N", "-o", "%N %t", check=False).splitlines()
        states = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
        return all(states.get(name) == "idle" for name in names)

    def logs(self) -> str:
        """The ends of the daemons' logs, for the message of a failure."""
        ends = [
            f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-8:])
            for file in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(ends)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                # It dies with the test, should that be killed before it can clear away.
                ("setpriv", "--pdeathsig", "KILL", *command),
                env=self.environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def start(self) -> None:
        """Start every daemon, and wait for the nodes."""
        folder = str(self.folder)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        )
        self.until((self.folder / "munge.socket").exists, "munged listens", seconds=READY_S)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for name in NODES:
            self.start_node(name)
        self.until(lambda: self.idle(*NODES), "both nodes are idle", seconds=READY_S)

    def stop(self) -> None:
        """End every job and every daemon."""
        with contextlib.suppress(subprocess.SubprocessError, RuntimeError, OSError):
            self.ask("scancel", "--quiet", "--signal=KILL", "--user=root", timeout_s=10, check=False)
        for name in NODES:
            if name in self.daemons:
                self.stop_node(name)
        for name in ("slurmctld", "munged"):
            daemon = self.daemons.pop(name, None)
            if daemon is not None:
                daemon.terminate()
                try:
                    daemon.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _opened(process: psutil.Process) -> list[str]:
    try:
        return [str(open_file.path) for open_file in process.open_files()] + list(process.environ().values())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody listens on."""
    for first in range(17_000, 32_000, 16):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    trial = stack.enter_context(socket.socket())
                    trial.bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def cluster(*, lost_s: int = 10) -> Iterator[Slurm]:
    """A cluster, while the block lasts. A node is given up `lost_s` after it was last heard of."""
    # Paths of sockets may not be longer than a hundred letters, so no folder of the test's own.
    folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    folder.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    for number in range(GPUS):
        # The device of /dev/null: Slurm asks only that there is one.
        os.mknod(folder / f"dev{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    port = _free_ports(3)
    text = CONF.format(
        folder=folder,
        host=socket.gethostname().split(".")[0],
        port=port,
        first=port + 1,
        second=port + 2,
        cores=os.cpu_count() or 1,
        memory=1000,
        gpus=GPUS,
        lost_s=lost_s,
    )
    (folder / "slurm.conf").write_text(text, encoding="ascii")
    (folder / "gres.conf").write_text(
        f"NodeName=n[1-2] Name=gpu Type=h100 File={folder}/dev[0-{GPUS - 1}]\n", encoding="ascii"
    )
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)


def settings(slurm: Slurm) -> Mapping[str, str]:
    """What a test puts into its environment, so that commands it calls in this process find the cluster."""
    return {"SLURM_CONF": slurm.environment["SLURM_CONF"], "PATH": slurm.environment["PATH"]}
