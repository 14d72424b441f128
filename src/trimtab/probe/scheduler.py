"""Who started this process and what it was given: Slurm, Kubernetes, torchrun, or variables set by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trimtab.spec import Finding, Scheduler, Severity
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

SLURM = {
    "job_id": "SLURM_JOB_ID",
    "num_nodes": "SLURM_JOB_NUM_NODES",
    "partition": "SLURM_JOB_PARTITION",
    "gpus_on_node": "SLURM_GPUS_ON_NODE",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "cpus_on_node": "SLURM_CPUS_ON_NODE",
    "ends_at_s": "SLURM_JOB_END_TIME",
    "restarts": "SLURM_RESTART_COUNT",
}
SRUN = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
}
TORCHRUN = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "num_nodes": "GROUP_WORLD_SIZE",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
}
KUBERNETES = {"num_nodes": "PET_NNODES"}
"""Variables by field of Scheduler."""

TABLES = {"slurm": SLURM, "kubernetes": KUBERNETES, "torchrun": TORCHRUN, "by hand": TORCHRUN, "srun": SRUN}
SIGNS = {"slurm": "SLURM_JOB_ID", "kubernetes": "KUBERNETES_SERVICE_HOST"}
"""The variable that gives a scheduler away, the first one that is set."""
TEXT_FIELDS = ("job_id", "partition")
RANKS = ("rank", "world_size", "local_rank", "local_world_size")


def read(env: Mapping[str, str]) -> tuple[Scheduler, list[Finding]]:
    """What the variables say, and which of them cannot be."""
    name, launcher = _name(env), _launcher(env)
    tables = [table for table in (TABLES.get(name or ""), TABLES.get(launcher or "")) if table]
    values, sources, findings = _values(env, tables)
    findings += _half_set(env, launcher)
    if name:
        values["name"], sources["name"] = name, f"detected: {SIGNS[name]}"
    if launcher:
        values["launcher"], sources["launcher"] = launcher, "detected: environment variables"
    if name == "slurm":
        _slurm_memory_and_names(env, values, sources)
    try:
        return Scheduler(**values, sources=sources), findings
    except ValueError as error:
        findings.append(_contradiction(str(error)))
        kept = {field: value for field, value in values.items() if field not in RANKS}
        return Scheduler(**kept, sources={f: s for f, s in sources.items() if f in kept}), findings


def _name(env: Mapping[str, str]) -> str | None:
    return next((name for name, sign in SIGNS.items() if sign in env), None)


def _launcher(env: Mapping[str, str]) -> str | None:
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    if "RANK" in env or "WORLD_SIZE" in env:
        return "by hand"
    # A batch script has SLURM_PROCID too; only a step has both.
    return "srun" if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env else None


def _values(
    env: Mapping[str, str], tables: list[dict[str, str]]
) -> tuple[dict[str, Any], dict[str, str], list[Finding]]:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    findings = []
    for field, variable in ((f, v) for table in tables for f, v in table.items()):
        text = env.get(variable)
        if text is None:
            continue
        if field in TEXT_FIELDS:
            values[field] = text
        elif text.strip().isdigit():
            values[field] = int(text)
        elif field == "num_nodes" and re.fullmatch(r"\d+:\d+", text):
            # An elastic range: the largest that may come.
            values[field] = int(text.partition(":")[2])
        else:
            findings.append(_not_a_number(variable, text))
            continue
        sources[field] = f"detected: {variable}"
    return values, sources, findings


def _slurm_memory_and_names(env: Mapping[str, str], values: dict[str, Any], sources: dict[str, str]) -> None:
    """Slurm grants memory per node, per CPU or per GPU, in MiB; 0 means all of it."""
    per = {
        "SLURM_MEM_PER_NODE": 1,
        "SLURM_MEM_PER_CPU": values.get("cpus_on_node"),
        "SLURM_MEM_PER_GPU": values.get("gpus_on_node"),
    }
    for variable, count in per.items():
        text = env.get(variable, "")
        if text.isdigit() and int(text) and count:
            values["memory_bytes"] = int(text) * MIB * count
            sources["memory_bytes"] = f"detected: {variable}"
    listed = env.get("SLURM_JOB_NODELIST")
    if listed:
        values["node_names"] = tuple(node_names(listed))
        sources["node_names"] = "detected: SLURM_JOB_NODELIST"


def node_names(listed: str) -> list[str]:
    """The hosts of a Slurm node list.

    >>> node_names("n[1-2],gpu[08-09,12]-ib,login")
    ['n1', 'n2', 'gpu08-ib', 'gpu09-ib', 'gpu12-ib', 'login']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        head, bracket, rest = part.partition("[")
        inside, _, tail = rest.partition("]")
        if not bracket:
            names.append(head)
            continue
        for one in inside.split(","):
            first, _, last = one.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            # A second pair of brackets, as in rack[1-2]n[1-4], is expanded in turn.
            names += [
                full for number in numbers for full in node_names(f"{head}{number:0{len(first)}d}{tail}")
            ]
    return names


def _not_a_number(variable: str, text: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{variable} is {text!r}, which is not a number.",
        evidence=f"{variable}={text}",
        cause="A launcher or a script set it wrongly.",
        cure=f"Unset {variable}, or set it to a whole number.",
    )


def _half_set(env: Mapping[str, str], launcher: str | None) -> list[Finding]:
    """RANK without WORLD_SIZE and the like: a process group would wait for ever."""
    if launcher != "by hand":
        return []
    needed = ("RANK", "WORLD_SIZE")
    missing = [name for name in needed if name not in env]
    if not missing:
        return []
    there = next(name for name in needed if name in env)
    return [
        Finding(
            severity=Severity.ERROR,
            what=f"{there} is set, but {' and '.join(missing)} is not.",
            evidence=f"{there}={env[there]}",
            cause="The variables of a process group were set by hand, and not all of them.",
            cure="Start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; "
            f"or unset {there}.",
        )
    ]


def _contradiction(text: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what="The variables of the process group contradict each other.",
        evidence=text,
        cause="They were set by hand, or left over from another job.",
        cure="Start with torchrun, or unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.",
    )
