"""Jobs as a scheduler has them, runs as their folders have them, and both together."""

from __future__ import annotations

from trimtab.spec.base import Noun, below
from trimtab.spec.run import Incident


class QueuedJob(Noun, frozen=True, kw_only=True):
    """One job as Slurm tells of it. Unknown is None."""

    job_id: str
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str
    """Slurm's word, such as PENDING."""
    reason: str | None = None
    """Slurm's word for why it does not run, or why it ended."""
    num_nodes: int | None = None
    nodes: tuple[str, ...] = ()
    """Those it has; empty while it waits."""
    ran_s: float | None = None
    limit_s: float | None = None
    """None where there is no limit."""
    starts: str | None = None
    """When it started, or is expected to, as Slurm writes it."""
    comment: str = ""
    script: str | None = None
    work_dir: str | None = None
    output: str | None = None
    """The file that its output goes to."""
    restarts: int | None = None

    def faults(self) -> list[str]:
        """A job has a number and a state."""
        wrong = below(0, num_nodes=self.num_nodes, ran_s=self.ran_s, restarts=self.restarts)
        return wrong + [f"{name} is empty" for name in ("job_id", "state") if not getattr(self, name)]


class Headway(Noun, frozen=True, kw_only=True):
    """How far a run has come, by its folder."""

    folder: str
    job: str | None = None
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    """Over the last steps."""
    recent: int | None = None
    """How many steps those are."""
    left_s: float | None = None
    """At that speed."""
    processes: int | None = None
    attempt: int | None = None
    last_incident: Incident | None = None

    def faults(self) -> list[str]:
        """Counts do not go below nothing."""
        return below(0, step=self.step, left_s=self.left_s)


class JobView(Noun, frozen=True, kw_only=True):
    """One job of ours: where it stands, and how far its run has come."""

    id: str
    """The scheduler's number, or `local-PID` for a run on this machine."""
    kind: str
    """slurm or local."""
    state: str
    """pending, running, ended, or what the scheduler calls it."""
    why: str = ""
    """Plain words for the state, where there is more to say."""
    queued: QueuedJob | None = None
    """None for a run on this machine."""
    run: Headway | None = None
    """None until its folder is there."""
    log: str | None = None
    """The file that its output goes to, where it is known."""
    tail: tuple[str, ...] = ()
    """The last lines of that file."""
