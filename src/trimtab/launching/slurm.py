"""An sbatch script for a plan. Pure text: `launching/doing.py` asks the cluster and submits.

one task a node        srun starts `trimtab train` once on each, and that starts torchrun
where nodes meet       on the first node of the job's own list, at a port that follows from its number
before the time limit  Slurm sends SIGUSR1 to every process: they save, and the job is queued again
a lost node            Slurm queues the job again, and it goes on from its last checkpoint
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from trimtab.errors import EnvironmentFault, UnknownName, WrongUse
from trimtab.launching.errand import train_words, variables
from trimtab.launching.need import time_words, with_margin
from trimtab.launching.quoting import (
    Raw,
    assignment,
    batch_name,
    batch_option,
    batch_value,
    check_path,
    comment,
    label,
    pattern,
    shell_line,
    shell_word,
)
from trimtab.launching.site import slurm_time
from trimtab.spec import Launch, LaunchKind
from trimtab.units import MIB, format_bytes, format_duration, parse_duration, plural

if TYPE_CHECKING:
    from trimtab.launching.errand import Errand
    from trimtab.launching.habits import Habits
    from trimtab.launching.need import Need
    from trimtab.launching.site import Partition, Site, SiteNode

WARNING_S = 120
"""How long before the limit the run is told to save and end."""
STOPPED = 138
"""What `trimtab train` leaves with when SIGUSR1 ended it: 128 and the signal's number."""
ENDED = 143
"""The same after SIGTERM."""
REQUEUES = 100
"""After so many a run that is queued again at its limit is taken to have gone wrong."""
VENDORS = ("nvidia", "geforce", "tesla", "quadro", "amd", "instinct")
FIRST_PORT, PORTS = 12_000, 20_000
"""Below those that Linux hands out by itself, from 32768 up."""
PREFIX = "trimtab-"
"""What the names of our jobs begin with."""
COMMENT = "trimtab:"
"""What the comments of our jobs begin with; the run's folder follows."""
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

# {STOPPED}: told by Slurm that time runs out, it has saved. {ENDED}: told to end, as a preempted job is;
# it leaves before its grace is over, and then Slurm does not queue it again by itself.
preempted() {{ [[ "$(scontrol --oneliner show job "$SLURM_JOB_ID")" == *" PreemptTime="[0-9]* ]]; }}
if [ "$code" -eq {STOPPED} ] || {{ [ "$code" -eq {ENDED} ] && preempted; }}; then
  [ "${{SLURM_RESTART_COUNT:-0}}" -ge {REQUEUES} ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"'''


def batch(  # noqa: PLR0913 - an errand and the world it is for
    errand: Errand,
    habits: Habits,
    site: Site | None,
    *,
    script_file: str,
    time: str | None = None,
    silence: str = "",
) -> Launch:
    """The script for an errand, checked against what the cluster has; `silence` is why it could not be."""
    check_path("script", script_file)
    need = errand.need
    partition = None if site is None else choose(site, habits.partition, need)
    node = None if partition is None else _seat(partition, need)
    cpus = _cpus(need, node)
    given = variables(errand, cores=cpus, offline=habits.offline)
    given["PYTHONUNBUFFERED"] = "1", "lines reach the log as they are printed"
    given |= {name: (value, "trimtab.toml says so") for name, value in habits.environment.items()}
    limit, limit_note = _limit(need, partition, time or habits.time)
    memory, memory_note = _memory(need, node, cpus)
    gpus, gpu_note = _gpus(need, site, partition)
    options = [
        batch_option("job-name", label(f"{PREFIX}{errand.plan.job}")),
        batch_option("comment", f"{COMMENT}{errand.out}"),
        *_named("partition", partition.name if partition else habits.partition),
        *_named("account", habits.account),
        *_named("qos", habits.qos),
        batch_option("nodes", _range(need)),
        # With a range Slurm gives the fewest nodes that the tasks fit on, where it is told of any.
        *([batch_option("ntasks-per-node", 1)] if need.least_nodes == need.nodes else []),
        *gpus,
        batch_option("cpus-per-task", cpus),
        *([] if memory is None else [batch_option("mem", f"{memory // MIB}M")]),
        *([] if limit is None else [batch_option("time", slurm_time(limit))]),
        batch_option("chdir", errand.folder),
        batch_option("output", f"{pattern(errand.out)}/slurm-%j.log"),
        batch_option("open-mode", "append"),
        batch_option("signal", f"USR1@{WARNING_S}"),
        "#SBATCH --requeue",
        *(f"#SBATCH {_own(one)}" for one in habits.sbatch),
    ]
    body = [
        "set -uo pipefail",
        *_prepared(habits),
        *(f"export {assignment(name, value)}  {comment(why)}" for name, (value, why) in given.items()),
        "",
        HEAD,
        "",
        _srun(errand),
        TAIL,
    ]
    about = [comment(errand.title), comment(f"Submit with: sbatch {shell_word(script_file)}")]
    notes = (limit_note, memory_note, gpu_note, _place_note(partition, silence))
    return Launch(
        kind=LaunchKind.SLURM,
        command=("sbatch", "--parsable", script_file),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        script="\n".join(["#!/bin/bash", *about, *options, "", *body]) + "\n",
        script_file=script_file,
        out=errand.out,
        notes=tuple(one for one in notes if one),
    )


def _srun(errand: Errand) -> str:
    """Once on every node that Slurm gave, which may be fewer than it was asked for at most."""
    words = train_words(errand, nodes=Raw('"$SLURM_JOB_NUM_NODES"'), rendezvous=Raw('"$address:$port"'))
    return " ".join(SRUN) + f" \\\n  {shell_line(words)}"


def _prepared(habits: Habits) -> list[str]:
    lines = [f"module load {shell_word(one)} || exit 5" for one in habits.modules]
    if habits.activate:
        script = habits.activate
        if not script.endswith("activate"):
            script = f"{script.rstrip('/')}/bin/activate"
        home, tilde, rest = script.partition("~/")
        word = f'"$HOME"/{shell_word(rest)}' if tilde and not home else shell_word(script)
        # Scripts of others may use variables that are not set.
        lines += ["set +u", f"source {word} || exit 5", "set -u"]
    return [*lines, *habits.lines]


def _named(option: str, name: str | None) -> list[str]:
    return [] if name is None else [f"#SBATCH --{option}={batch_name(option, name)}"]


def _own(option: str) -> str:
    """An option from trimtab.toml, as it is."""
    name, equals, value = option.partition("=")
    plain = batch_name("sbatch", name.removeprefix("--"))
    return f"--{plain}={batch_value(plain, value)}" if equals else f"--{plain}"


def _range(need: Need) -> str:
    return str(need.nodes) if need.least_nodes == need.nodes else f"{need.least_nodes}-{need.nodes}"


def choose(site: Site, wanted: str | None, need: Need) -> Partition:
    """The partition to submit to, which must have what is needed; never one that nobody named."""
    known = {one.name: one for one in site.partitions}
    listed = "; ".join(one.words() for one in site.partitions)
    if wanted is not None:
        if wanted not in known:
            raise UnknownName(
                f"--partition {wanted}",
                found=f"the cluster has no such partition; it has {listed}",
                cure="Give one of these, here or as partition in [launch] of trimtab.toml.",
            )
        chosen = known[wanted]
    else:
        default = next((one for one in site.partitions if one.is_default), None)
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
    if need.gpus and _kind(chosen, need) is None:
        others = [one.words() for one in site.partitions if _kind(one, need) is not None]
        raise EnvironmentFault(
            f"partition {chosen.name}",
            found=f"the plan needs {_wanted(need)}, and it is {chosen.words()}",
            cure=f"Use --partition {others[0].split()[0]}: {'; '.join(others)}."
            if others
            else "Plan for what is there: trimtab plan JOB --on ..., or --compare 1,2,4.",
        )
    if not need.gpus and len(chosen.nodes) < need.least_nodes:
        raise EnvironmentFault(
            f"partition {chosen.name}",
            found=f"{need.least_nodes} nodes are needed, and it is {chosen.words()}",
            cure="Give fewer --nodes, or another --partition.",
        )
    return chosen


def _wanted(need: Need) -> str:
    many = f"{plural(need.least_nodes, 'node')} with {need.gpus} x "
    return many + (need.devices[0] if len(need.devices) == 1 else "GPU")


def _kind(partition: Partition, need: Need) -> str | None:
    """The type of GPU that fits the plan, of which there are enough; None where there is none."""
    fitting = [kind for kind in partition.gpu_types if all(is_alike(kind, device) for device in need.devices)]
    enough = [kind for kind in fitting if partition.seats(kind, need.gpus) >= need.least_nodes]
    # A name that says more is the better match.
    return max(enough, key=len, default=None)


def is_alike(kind: str, device: str) -> bool:
    """Whether Slurm's type of GPU can be the catalogue's device; no type can be any.

    >>> is_alike("a100", "A100 SXM4 40GB"), is_alike("a10", "A100 SXM4 40GB"), is_alike("rtx3090", "RTX 3090")
    (True, False, True)
    """
    from trimtab.catalog.lookup import typed

    if not kind:
        return True
    try:
        if typed(kind)[0].name == device:
            return True
    except WrongUse:
        # Sites name types as they like: `a100` comes in two sizes, and `gold` is no name at all.
        pass
    ours = _words(device)
    pairs = {first + second for first, second in itertools.pairwise(ours)}
    return all(one in {*ours, *pairs} for one in _words(kind))


def _words(name: str) -> list[str]:
    """The parts of a device's name, without vendors and units."""
    found = re.findall(r"[a-z0-9]+", name.lower())
    return [re.sub(r"(?<=[0-9])(gib|gb|g)$", "", one) for one in found if one not in VENDORS]


def _seat(partition: Partition, need: Need) -> SiteNode | None:
    """The smallest node that the job may land on."""
    kind = _kind(partition, need) if need.gpus else None
    fitting = [node for node in partition.nodes if kind is None or node.gpus.get(kind, 0) >= need.gpus]
    return min(fitting, key=lambda one: (one.cpus or 0, one.memory_bytes or 0), default=None)


def _gpus(need: Need, site: Site | None, partition: Partition | None) -> tuple[list[str], str]:
    if not need.gpus:
        return [], ""
    if site is None or partition is None:
        return [batch_option("gres", f"gpu:{need.gpus}")], (
            f"GPUs of any type are asked for; the plan is for {', '.join(need.devices)}"
        )
    kind = _kind(partition, need) or ""
    value = f"{kind}:{need.gpus}" if kind else str(need.gpus)
    line = batch_option("gpus-per-node", value) if site.counts_gpus else batch_option("gres", f"gpu:{value}")
    if not kind:
        return [line], f"Slurm gives its GPUs no type; the plan is for {', '.join(need.devices)}"
    return [line], ""


def _cpus(need: Need, node: SiteNode | None) -> int:
    """Cores of a node, never more than it has."""
    return need.cpus if node is None or node.cpus is None else min(need.cpus, node.cpus)


def _memory(need: Need, node: SiteNode | None, cpus: int) -> tuple[int | None, str]:
    """Host memory of a node: the share that goes with its GPUs or its cores, and no less than is needed."""
    if node is None or node.memory_bytes is None:
        return None, "host memory is left to the cluster's default: what a node has is not known"
    held = sum(node.gpus.values())
    share = need.gpus / held if need.gpus and held else cpus / (node.cpus or cpus)
    asked = max(int(node.memory_bytes * share), need.memory_bytes)
    if asked > node.memory_bytes:
        raise EnvironmentFault(
            "trimtab launch --slurm",
            found=f"the plan's ranks keep {format_bytes(asked)} a node, and node {node.name} has "
            f"{format_bytes(node.memory_bytes)} of host memory",
            cure="Plan for more nodes, or for another partition.",
        )
    part = f"{need.gpus} of {held} GPUs" if need.gpus and held else f"{cpus} of {node.cpus} cores"
    return asked, f"host memory: {format_bytes(asked)} of {format_bytes(node.memory_bytes)}, for {part}"


def _limit(need: Need, partition: Partition | None, asked: str | None) -> tuple[float | None, str]:
    """The time limit, and a word on it."""
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
    if need.seconds is None:
        return None, "the time limit is the partition's default: nobody knows how long the run takes"
    wanted = with_margin(need.seconds)
    if most is not None and wanted > most:
        return most, (
            f"{time_words(need, wanted)}; the partition allows {format_duration(most)}: at the limit the run "
            "saves, is queued again, and goes on"
        )
    return wanted, time_words(need, wanted)


def _place_note(partition: Partition | None, silence: str) -> str:
    if partition is None:
        return f"nothing was checked against a cluster: {silence or 'none was asked'}"
    if not any(node.is_up for node in partition.nodes):
        return f"no node of partition {partition.name} is up: the job will wait"
    return ""
