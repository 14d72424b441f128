"""Build an sbatch script for a plan, checked against the partitions, nodes and GPUs of the cluster.

Pure: `QUESTIONS` are the commands, `parse_cluster` reads their output, `submit` runs them.

one task a node        srun starts `trimtab train` once on each, and that starts torchrun
rendezvous             the first node of the job's own list, at a port that follows from the job id
before the time limit  Slurm sends SIGUSR1 to every process: they save, and the job is queued again
a lost node            Slurm queues the job again, and it resumes from its last checkpoint
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from trimtab.errors import EnvironmentFault, UnknownName, WrongUse
from trimtab.launching.job_spec import build_environment, build_train_command
from trimtab.launching.jobs import JOB_COMMENT_PREFIX, JOB_NAME_PREFIX, parse_slurm_time
from trimtab.launching.quoting import (
    Raw,
    batch_name,
    batch_option,
    batch_value,
    check_path,
    escape_percent,
    format_comment,
    make_label,
    shell_assignment,
    shell_line,
    shell_word,
)
from trimtab.launching.resources import add_margin, explain_time
from trimtab.spec import Launch, LaunchKind
from trimtab.spec.base import Noun, check_minimum
from trimtab.units import MIB, format_bytes, format_duration, parse_duration, parse_whole, plural

if TYPE_CHECKING:
    from trimtab.launching.defaults import LaunchDefaults
    from trimtab.launching.job_spec import JobSpec
    from trimtab.launching.resources import Resources

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


class SlurmNode(Noun, frozen=True, kw_only=True):
    """A node as Slurm describes it."""

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
        return check_minimum(1, cpus=self.cpus) + check_minimum(
            0, **{f"gpus {name}": many for name, many in self.gpus.items()}
        )


class Partition(Noun, frozen=True, kw_only=True):
    """A partition of the cluster and its nodes."""

    name: str
    is_default: bool = False
    is_up: bool = True
    limit_s: float | None = None
    """The longest that a job may run; None where there is no limit."""
    nodes: tuple[SlurmNode, ...] = ()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU that its nodes have, in order."""
        return tuple(sorted({kind for node in self.nodes for kind in node.gpus}))

    def seats(self, kind: str, many: int) -> int:
        """Return how many nodes have at least `many` GPUs of a type."""
        return sum(1 for node in self.nodes if node.gpus.get(kind, 0) >= many)

    def words(self) -> str:
        """Describe the partition in a few words."""
        kinds = sorted({_describe_gpus(node) for node in self.nodes})
        return f"{self.name} ({plural(len(self.nodes), 'node')} with {' or '.join(kinds)})"


class SlurmCluster(Noun, frozen=True, kw_only=True):
    """A Slurm cluster."""

    partitions: tuple[Partition, ...]
    counts_gpus: bool = True
    """Whether it understands --gpus-per-node, which select/cons_tres does, and not --gres alone."""

    def faults(self) -> list[str]:
        """A cluster has a partition."""
        return [] if self.partitions else ["a cluster has a partition"]


def parse_cluster(answers: dict[str, str]) -> SlurmCluster:
    """Parse the cluster from the output of its commands."""
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
            limit_s=parse_slurm_time(limit.strip()),
        )
        slurm_node = SlurmNode(
            name=node,
            gpus=parse_gpus(gres),
            cpus=parse_whole(cpus.rstrip("+")) or None,
            memory_bytes=(parse_whole(memory.rstrip("+")) or 0) * MIB or None,
            state=state,
        )
        partitions[name] = seen.replace(nodes=(*seen.nodes, slurm_node))
    selects = re.search(r"^SelectType\s*=\s*(\S+)", answers.get("config", ""), re.MULTILINE)
    return SlurmCluster(
        partitions=tuple(partitions.values()),
        counts_gpus=selects is not None and selects.group(1) == "select/cons_tres",
    )


def parse_gpus(gres: str) -> dict[str, int]:
    """Parse GPUs by type from Slurm's generic resources.

    >>> parse_gpus("gpu:h100:4(S:0-1),lustre:1"), parse_gpus("gpu:2"), parse_gpus("(null)")
    ({'h100': 4}, {'': 2}, {})
    """
    counts: dict[str, int] = {}
    for match in _GPUS.finditer(gres):
        kind = match["type"] or ""
        counts[kind] = counts.get(kind, 0) + int(match["count"])
    return counts


def format_slurm_time(seconds: float) -> str:
    """Format a time limit for Slurm, in whole minutes, at least one.

    >>> format_slurm_time(3600), format_slurm_time(93661)
    ('01:00:00', '1-02:02:00')
    """
    minutes = max(1, -int(-seconds // 60))
    days, rest = divmod(minutes, 1440)
    text = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{text}" if days else text


def _describe_gpus(node: SlurmNode) -> str:
    texts = [f"{many} x {kind or 'GPU'}" for kind, many in sorted(node.gpus.items())]
    return " + ".join(texts) or "no GPU"


WARNING_S = 120
"""How long before the limit Slurm signals the run to save and end."""
STOPPED = 138
"""What `trimtab train` leaves with when SIGUSR1 ended it: 128 and the signal's number."""
ENDED = 143
"""The same after SIGTERM."""
REQUEUES = 100
"""After so many a run that is queued again at its limit is taken to have gone wrong."""
VENDORS = ("nvidia", "geforce", "tesla", "quadro", "amd", "instinct")
FIRST_PORT, PORTS = 12_000, 20_000
"""Below the ports that Linux assigns itself, from 32768 up."""
SRUN = (
    "srun",
    "--ntasks-per-node=1",
    '--cpus-per-task="$SLURM_CPUS_PER_TASK"',
    "--kill-on-bad-exit=0",
    "--wait=60",
)
"""A node that has saved and ended must not have the others killed; who stays a minute longer is lost."""
HEAD = f"""\
# The nodes meet on the first of them, by the address that Slurm itself reaches it at.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$head" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"""
TAIL = f'''\
code=$?

# {STOPPED}: Slurm warned of the time limit, and the run has saved. {ENDED}: the job got SIGTERM, for example
# because it was preempted. It exits before its grace period ends, so Slurm does not requeue it by itself.
preempted() {{ [[ "$(scontrol --oneliner show job "$SLURM_JOB_ID")" == *" PreemptTime="[0-9]* ]]; }}
if [ "$code" -eq {STOPPED} ] || {{ [ "$code" -eq {ENDED} ] && preempted; }}; then
  [ "${{SLURM_RESTART_COUNT:-0}}" -ge {REQUEUES} ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"'''


class SbatchBody(Noun, frozen=True, kw_only=True):
    """What a batch script runs, and the signal that it gets before its time limit."""

    lines: tuple[str, ...]
    signal: str = ""
    """As sbatch takes it: USR1@120; empty for none."""


def build_sbatch_launch(  # noqa: PLR0913 - a job spec and the world it is for
    job_spec: JobSpec,
    defaults: LaunchDefaults,
    site: SlurmCluster | None,
    *,
    script_file: str,
    time: str | None = None,
    silence: str = "",
    body: SbatchBody | None = None,
) -> Launch:
    """Build the script of a job, checked against the cluster; `silence` is why it was not checked.

    Without a `body` it runs `trimtab train`, which saves at a signal and is queued again.
    """
    body = body or SbatchBody(lines=(HEAD, "", _srun_command(job_spec), TAIL), signal=f"USR1@{WARNING_S}")
    check_path("script", script_file)
    resources = job_spec.resources
    partition = None if site is None else choose_partition(site, defaults.partition, resources)
    node = None if partition is None else _smallest_node(partition, resources)
    cpus = _count_cpus(resources, node)
    given = build_environment(job_spec, cores=cpus, offline=defaults.offline)
    given["PYTHONUNBUFFERED"] = "1", "lines reach the log as they are printed"
    given |= {name: (value, "trimtab.toml says so") for name, value in defaults.environment.items()}
    limit, limit_note = _time_limit(resources, partition, time or defaults.time)
    memory, memory_note = _host_memory(resources, node, cpus)
    gpus, gpu_note = _gpu_options(resources, site, partition)
    options = [
        batch_option("job-name", make_label(f"{JOB_NAME_PREFIX}{job_spec.name}")),
        batch_option("comment", f"{JOB_COMMENT_PREFIX}{job_spec.out}"),
        *_name_option("partition", partition.name if partition else defaults.partition),
        *_name_option("account", defaults.account),
        *_name_option("qos", defaults.qos),
        batch_option("nodes", _node_range(resources)),
        # With a range Slurm gives the fewest nodes that the tasks fit on, where it is told of any.
        *([batch_option("ntasks-per-node", 1)] if resources.least_nodes == resources.nodes else []),
        *gpus,
        batch_option("cpus-per-task", cpus),
        *([] if memory is None else [batch_option("mem", f"{memory // MIB}M")]),
        *([] if limit is None else [batch_option("time", format_slurm_time(limit))]),
        batch_option("chdir", job_spec.folder),
        batch_option("output", f"{escape_percent(job_spec.out)}/slurm-%j.log"),
        batch_option("open-mode", "append"),
        *([batch_option("signal", body.signal)] if body.signal else []),
        "#SBATCH --requeue",
        *(f"#SBATCH {_own_option(option)}" for option in defaults.sbatch),
    ]
    lines = [
        "set -uo pipefail",
        *_setup_lines(defaults),
        *(
            f"export {shell_assignment(name, value)}  {format_comment(why)}"
            for name, (value, why) in given.items()
        ),
        "",
        *body.lines,
    ]
    about = [format_comment(job_spec.title), format_comment(f"Submit with: sbatch {shell_word(script_file)}")]
    notes = (limit_note, memory_note, gpu_note, _place_note(partition, silence))
    return Launch(
        kind=LaunchKind.SLURM,
        command=("sbatch", "--parsable", script_file),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        script="\n".join(["#!/bin/bash", *about, *options, "", *lines]) + "\n",
        script_file=script_file,
        out=job_spec.out,
        notes=tuple(note for note in notes if note),
    )


def _srun_command(job_spec: JobSpec) -> str:
    """Build the srun command: once on every node that Slurm gave, maybe fewer than asked for."""
    words = build_train_command(
        job_spec, nodes=Raw('"$SLURM_JOB_NUM_NODES"'), rendezvous=Raw('"$address:$port"')
    )
    return " ".join(SRUN) + f" \\\n  {shell_line(words)}"


def _setup_lines(defaults: LaunchDefaults) -> list[str]:
    lines = [f"module load {shell_word(module)} || exit 5" for module in defaults.modules]
    if defaults.activate:
        script = defaults.activate
        if not script.endswith("activate"):
            script = f"{script.rstrip('/')}/bin/activate"
        home, tilde, rest = script.partition("~/")
        word = f'"$HOME"/{shell_word(rest)}' if tilde and not home else shell_word(script)
        # Scripts of others may use variables that are not set.
        lines += ["set +u", f"source {word} || exit 5", "set -u"]
    return [*lines, *defaults.lines]


def _name_option(option: str, name: str | None) -> list[str]:
    return [] if name is None else [f"#SBATCH --{option}={batch_name(option, name)}"]


def _own_option(option: str) -> str:
    """Check an option from trimtab.toml."""
    name, equals, value = option.partition("=")
    plain = batch_name("sbatch", name.removeprefix("--"))
    return f"--{plain}={batch_value(plain, value)}" if equals else f"--{plain}"


def _node_range(resources: Resources) -> str:
    return (
        str(resources.nodes)
        if resources.least_nodes == resources.nodes
        else f"{resources.least_nodes}-{resources.nodes}"
    )


def choose_partition(site: SlurmCluster, name: str | None, resources: Resources) -> Partition:
    """Choose the partition named, or the default one; it must have what the plan needs."""
    by_name = {partition.name: partition for partition in site.partitions}
    listed = "; ".join(partition.words() for partition in site.partitions)
    if name is not None:
        if name not in by_name:
            raise UnknownName(
                f"--partition {name}",
                found=f"the cluster has no such partition; it has {listed}",
                cure="Give one of these, here or as partition in [launch] of trimtab.toml.",
            )
        chosen = by_name[name]
    else:
        default = next((partition for partition in site.partitions if partition.is_default), None)
        if default is None:
            raise WrongUse(
                "trimtab launch --slurm",
                found=f"the cluster has no default partition; it has {listed}",
                cure="Give --partition, or partition in [launch] of trimtab.toml.",
            )
        chosen = default
    if not chosen.is_up:
        raise EnvironmentFault(
            f"partition {chosen.name}",
            found="it is down, and takes no job",
            cure=f"Ask its administrators, or use another of {listed}.",
        )
    if resources.gpus and _fitting_type(chosen, resources) is None:
        others = [other.words() for other in site.partitions if _fitting_type(other, resources) is not None]
        raise EnvironmentFault(
            f"partition {chosen.name}",
            found=f"the plan needs {_describe_need(resources)}, and it is {chosen.words()}",
            cure=f"Use --partition {others[0].split()[0]}: {'; '.join(others)}."
            if others
            else "Plan for what is there: trimtab plan JOB --on ..., or --compare 1,2,4.",
        )
    if not resources.gpus and len(chosen.nodes) < resources.least_nodes:
        raise EnvironmentFault(
            f"partition {chosen.name}",
            found=f"{resources.least_nodes} nodes are needed, and it is {chosen.words()}",
            cure="Give fewer --nodes, or another --partition.",
        )
    return chosen


def _describe_need(resources: Resources) -> str:
    many = f"{plural(resources.least_nodes, 'node')} with {resources.gpus} x "
    return many + (resources.devices[0] if len(resources.devices) == 1 else "GPU")


def _fitting_type(partition: Partition, resources: Resources) -> str | None:
    """Return the type of GPU that fits the plan and of which there are enough, or None."""
    fitting = [
        kind for kind in partition.gpu_types if all(is_same_gpu(kind, device) for device in resources.devices)
    ]
    enough = [kind for kind in fitting if partition.seats(kind, resources.gpus) >= resources.least_nodes]
    # A name that says more is the better match.
    return max(enough, key=len, default=None)


def is_same_gpu(kind: str, device: str) -> bool:
    """Return whether Slurm's type of GPU can be the catalogue's device; no type fits any.

    >>> is_same_gpu("a100", "A100 SXM4 40GB"), is_same_gpu("a10", "A100 SXM4 40GB")
    (True, False)
    >>> is_same_gpu("rtx3090", "RTX 3090")
    True
    """
    from trimtab.catalog.devices import find_typed_device

    if not kind:
        return True
    try:
        if find_typed_device(kind)[0].name == device:
            return True
    except WrongUse:
        # Sites name types as they like: `a100` comes in two sizes, and `gold` is no name at all.
        pass
    ours = _name_words(device)
    pairs = {first + second for first, second in itertools.pairwise(ours)}
    return all(word in {*ours, *pairs} for word in _name_words(kind))


def _name_words(name: str) -> list[str]:
    """Return the words of a device's name, without vendors and units."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [re.sub(r"(?<=[0-9])(gib|gb|g)$", "", word) for word in words if word not in VENDORS]


def _smallest_node(partition: Partition, resources: Resources) -> SlurmNode | None:
    """Return the smallest node that the job may run on."""
    kind = _fitting_type(partition, resources) if resources.gpus else None
    fitting = [node for node in partition.nodes if kind is None or node.gpus.get(kind, 0) >= resources.gpus]
    return min(fitting, key=lambda node: (node.cpus or 0, node.memory_bytes or 0), default=None)


def _gpu_options(
    resources: Resources, site: SlurmCluster | None, partition: Partition | None
) -> tuple[list[str], str]:
    if not resources.gpus:
        return [], ""
    if site is None or partition is None:
        return [batch_option("gres", f"gpu:{resources.gpus}")], (
            f"GPUs of any type are asked for; the plan is for {', '.join(resources.devices)}"
        )
    kind = _fitting_type(partition, resources) or ""
    value = f"{kind}:{resources.gpus}" if kind else str(resources.gpus)
    line = batch_option("gpus-per-node", value) if site.counts_gpus else batch_option("gres", f"gpu:{value}")
    if not kind:
        return [line], f"Slurm gives its GPUs no type; the plan is for {', '.join(resources.devices)}"
    return [line], ""


def _count_cpus(resources: Resources, node: SlurmNode | None) -> int:
    """Return the cores to ask for, at most what the node has."""
    return resources.cpus if node is None or node.cpus is None else min(resources.cpus, node.cpus)


def _host_memory(resources: Resources, node: SlurmNode | None, cpus: int) -> tuple[int | None, str]:
    """Return the host memory to ask for: the share of the GPUs or cores, at least what is needed."""
    if node is None or node.memory_bytes is None:
        return None, "host memory is left to the cluster's default: what a node has is not known"
    node_gpus = sum(node.gpus.values())
    share = resources.gpus / node_gpus if resources.gpus and node_gpus else cpus / (node.cpus or cpus)
    asked = max(int(node.memory_bytes * share), resources.memory_bytes)
    if asked > node.memory_bytes:
        raise EnvironmentFault(
            "trimtab launch --slurm",
            found=f"the plan's ranks keep {format_bytes(asked)} a node, and node {node.name} has "
            f"{format_bytes(node.memory_bytes)} of host memory",
            cure="Plan for more nodes, or for another partition.",
        )
    part = (
        f"{resources.gpus} of {node_gpus} GPUs"
        if resources.gpus and node_gpus
        else f"{cpus} of {node.cpus} cores"
    )
    return asked, f"host memory: {format_bytes(asked)} of {format_bytes(node.memory_bytes)}, for {part}"


def _time_limit(
    resources: Resources, partition: Partition | None, asked: str | None
) -> tuple[float | None, str]:
    """Return the time limit and a note on it."""
    most = None if partition is None else partition.limit_s
    if asked is not None:
        seconds = parse_duration(asked, "--time")
        if most is not None and seconds > most and partition is not None:
            raise WrongUse(
                f"--time {asked}",
                found=f"jobs in partition {partition.name} may run for {format_duration(most)}",
                cure=f"Give --time {format_duration(most)}: at the limit the run saves, is queued again, and "
                "goes on.",
            )
        return seconds, ""
    if resources.seconds is None:
        return None, "the time limit is the partition's default: nobody knows how long the run takes"
    seconds = add_margin(resources.seconds)
    if most is not None and seconds > most:
        return most, (
            f"{explain_time(resources, seconds)}; the partition allows {format_duration(most)}: at the limit "
            "the run saves, is queued again, and goes on"
        )
    return seconds, explain_time(resources, seconds)


def _place_note(partition: Partition | None, silence: str) -> str:
    if partition is None:
        return f"nothing was checked against a cluster: {silence or 'none was asked'}"
    if not any(node.is_up for node in partition.nodes):
        return f"no node of partition {partition.name} is up: the job will wait"
    return ""
