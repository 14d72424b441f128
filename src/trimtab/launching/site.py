"""What a Slurm cluster has, from the words of sinfo and scontrol: partitions, their nodes, GPUs and limits.

Pure: `QUESTIONS` are the commands, `read` makes nouns of their answers. `launching/doing.py` asks.
"""

from __future__ import annotations

import re

from trimtab.errors import EnvironmentFault
from trimtab.spec.base import Noun, below
from trimtab.units import MIB, parse_whole, plural

QUESTIONS: dict[str, tuple[str, ...]] = {
    "nodes": ("sinfo", "--noheader", "--Node", "--format=%P|%N|%G|%c|%m|%l|%T|%a"),
    "config": ("scontrol", "show", "config"),
}
"""Commands by what they answer. Source of the fields: https://slurm.schedmd.com/sinfo.html"""
_FIELDS = 8
_GONE = ("down", "drain", "fail", "maint", "power", "unknown", "reboot", "future", "planned_down")
"""States, or beginnings of them, in which a node takes no job."""
_GPUS = re.compile(
    r"gpu(?::(?P<type>[A-Za-z0-9_.+-]*[A-Za-z_][A-Za-z0-9_.+-]*))?:(?P<count>[0-9]+)(?=[(,]|$)"
)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


class SiteNode(Noun, frozen=True, kw_only=True):
    """A node as Slurm counts it."""

    name: str
    gpus: dict[str, int] = {}
    """How many, by the type that Slurm gives them; '' where it gives none."""
    cpus: int | None = None
    memory_bytes: int | None = None
    state: str = ""

    @property
    def is_up(self) -> bool:
        """Whether jobs can start on it, now or when others have ended."""
        return not self.state.lower().rstrip("*$~#!%@^-+").startswith(_GONE)

    def faults(self) -> list[str]:
        """Counts are possible."""
        return below(1, cpus=self.cpus) + below(
            0, **{f"gpus {name}": many for name, many in self.gpus.items()}
        )


class Partition(Noun, frozen=True, kw_only=True):
    """A queue and the nodes behind it."""

    name: str
    is_default: bool = False
    is_up: bool = True
    limit_s: float | None = None
    """The longest that a job may run; None where there is no limit."""
    nodes: tuple[SiteNode, ...] = ()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU that its nodes have, in order."""
        return tuple(sorted({kind for node in self.nodes for kind in node.gpus}))

    def seats(self, kind: str, many: int) -> int:
        """How many of its nodes have so many GPUs of a type."""
        return sum(1 for node in self.nodes if node.gpus.get(kind, 0) >= many)

    def words(self) -> str:
        """What it has, in a few words."""
        kinds = sorted({_held(node) for node in self.nodes})
        return f"{self.name} ({plural(len(self.nodes), 'node')} with {' or '.join(kinds)})"


class Site(Noun, frozen=True, kw_only=True):
    """A Slurm cluster."""

    partitions: tuple[Partition, ...]
    counts_gpus: bool = True
    """Whether it understands --gpus-per-node, which select/cons_tres does, and not --gres alone."""

    def faults(self) -> list[str]:
        """A cluster has a partition."""
        return [] if self.partitions else ["a cluster has a partition"]


def read(answers: dict[str, str]) -> Site:
    """The cluster from what its commands printed."""
    rows = [line.split("|") for line in answers["nodes"].splitlines() if line.strip()]
    wrong = next((row for row in rows if len(row) != _FIELDS), None)
    if wrong is not None or not rows:
        raise EnvironmentFault(
            " ".join(QUESTIONS["nodes"]),
            found=f"it printed {'|'.join(wrong)[:120]!r}"
            if wrong
            else "it printed nothing: there is no node",
            cure="Look at `sinfo` yourself; SLURM_CONF must name the cluster that you mean.",
        )
    partitions: dict[str, Partition] = {}
    for name, node, gres, cpus, memory, limit, state, available in rows:
        seen = partitions.get(name) or Partition(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            is_up=available.strip().lower() == "up",
            limit_s=limit_s(limit),
        )
        held = SiteNode(
            name=node,
            gpus=gpus(gres),
            cpus=parse_whole(cpus.rstrip("+")) or None,
            memory_bytes=(parse_whole(memory.rstrip("+")) or 0) * MIB or None,
            state=state,
        )
        partitions[name] = seen.replace(nodes=(*seen.nodes, held))
    selects = re.search(r"^SelectType\s*=\s*(\S+)", answers.get("config", ""), re.MULTILINE)
    return Site(
        partitions=tuple(partitions.values()),
        counts_gpus=selects is not None and selects.group(1) == "select/cons_tres",
    )


def gpus(gres: str) -> dict[str, int]:
    """GPUs by type, from what Slurm calls generic resources.

    >>> gpus("gpu:h100:4(S:0-1),lustre:1"), gpus("gpu:2"), gpus("(null)")
    ({'h100': 4}, {'': 2}, {})
    """
    found: dict[str, int] = {}
    for one in _GPUS.finditer(gres):
        kind = one["type"] or ""
        found[kind] = found.get(kind, 0) + int(one["count"])
    return found


def limit_s(text: str) -> float | None:
    """A time limit as Slurm writes it; None for none.

    >>> limit_s("1-02:00:00"), limit_s("30:00"), limit_s("infinite"), limit_s("12:00:00")
    (93600.0, 1800.0, None, 43200.0)
    """
    match = re.fullmatch(
        r"\s*(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)\s*", text
    )
    if match is None:
        return None
    return float(sum(int(match[unit] or 0) * each for unit, each in _SECONDS.items()))


def slurm_time(seconds: float) -> str:
    """A time limit as Slurm reads it, in whole minutes, at least one.

    >>> slurm_time(3600), slurm_time(93661)
    ('01:00:00', '1-02:02:00')
    """
    minutes = max(1, -int(-seconds // 60))
    days, rest = divmod(minutes, 1440)
    text = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{text}" if days else text


def _held(node: SiteNode) -> str:
    texts = [f"{many} x {kind or 'GPU'}" for kind, many in sorted(node.gpus.items())]
    return " + ".join(texts) or "no GPU"
