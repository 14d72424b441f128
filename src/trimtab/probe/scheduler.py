"""Read scheduler and launcher variables: Slurm, Kubernetes, torchrun, or RANK and the like set by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trimtab.spec import Finding, Scheduler, Severity
from trimtab.units import MIB, parse_whole

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
"""Variable by which each scheduler is recognised, in this order."""
TEXT_FIELDS = ("job_id", "partition")
RANKS = ("rank", "world_size", "local_rank", "local_world_size")
FROM_ONE = ("num_nodes", "world_size", "local_world_size")
"""Counts that cannot be 0."""
MOST_NODES = 65536
"""A node list with more nodes than this is a mistake."""


def read_scheduler(env: Mapping[str, str]) -> tuple[Scheduler, list[Finding]]:
    """Return what the variables say, and findings about invalid ones."""
    name, launcher = _detect_scheduler(env), _detect_launcher(env)
    tables = [table for table in (TABLES.get(name or ""), TABLES.get(launcher or "")) if table]
    values, sources, findings = _read_values(env, tables)
    findings += _check_process_group(env, launcher)
    if name:
        values["name"], sources["name"] = name, f"detected: {SIGNS[name]}"
    if launcher:
        values["launcher"], sources["launcher"] = launcher, "detected: environment variables"
    if name == "slurm":
        findings += _slurm_memory_and_names(env, values, sources)
    try:
        return Scheduler(**values, sources=sources), findings
    except ValueError as error:
        findings.append(_contradiction_finding(str(error)))
        valid = {field: value for field, value in values.items() if field not in RANKS}
        return Scheduler(**valid, sources={f: s for f, s in sources.items() if f in valid}), findings


def _detect_scheduler(env: Mapping[str, str]) -> str | None:
    return next((name for name, sign in SIGNS.items() if sign in env), None)


def _detect_launcher(env: Mapping[str, str]) -> str | None:
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    if "RANK" in env or "WORLD_SIZE" in env:
        return "by hand"
    # A batch script has SLURM_PROCID too; only a step has both.
    return "srun" if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env else None


def _read_values(
    env: Mapping[str, str], tables: list[dict[str, str]]
) -> tuple[dict[str, Any], dict[str, str], list[Finding]]:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    findings = []
    for field, variable in ((f, v) for table in tables for f, v in table.items()):
        text = env.get(variable)
        if text is None:
            continue
        value = text if field in TEXT_FIELDS else _parse_count(field, text)
        if value is None:
            findings.append(_not_a_number_finding(variable, text, at_least=int(field in FROM_ONE)))
            continue
        values[field], sources[field] = value, f"detected: {variable}"
    return values, sources, findings


def _parse_count(field: str, text: str) -> int | None:
    """Return the count in a variable; None if it is not a count."""
    if field == "num_nodes":
        # An elastic range such as 1:4 counts as its maximum.
        text = re.sub(r"^[0-9]+:", "", text.strip())
    number = parse_whole(text)
    return None if number == 0 and field in FROM_ONE else number


def _slurm_memory_and_names(
    env: Mapping[str, str], values: dict[str, Any], sources: dict[str, str]
) -> list[Finding]:
    """Add memory and node names; Slurm grants memory per node, CPU or GPU, in MiB, and 0 means all."""
    per = {
        "SLURM_MEM_PER_NODE": 1,
        "SLURM_MEM_PER_CPU": values.get("cpus_on_node"),
        "SLURM_MEM_PER_GPU": values.get("gpus_on_node"),
    }
    for variable, count in per.items():
        amount = parse_whole(env.get(variable, ""))
        if amount and count:
            values["memory_bytes"] = amount * MIB * count
            sources["memory_bytes"] = f"detected: {variable}"
    listed = env.get("SLURM_JOB_NODELIST")
    if not listed:
        return []
    try:
        values["node_names"] = tuple(parse_node_list(listed))
    except ValueError as error:
        return [_bad_node_list_finding(listed, str(error))]
    sources["node_names"] = "detected: SLURM_JOB_NODELIST"
    return []


def parse_node_list(listed: str) -> list[str]:
    """Return the hosts of a Slurm node list; raise ValueError if it is invalid.

    >>> parse_node_list("n[1-2],gpu[08-09,12]-ib,login")
    ['n1', 'n2', 'gpu08-ib', 'gpu09-ib', 'gpu12-ib', 'login']
    """
    if re.search(r"[\[\]]", re.sub(r"\[[0-9,-]*\]", "", listed)):
        raise ValueError("a bracket has something other than numbers, or does not close")
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        head, bracket, rest = part.partition("[")
        inside, _, tail = rest.partition("]")
        if not bracket:
            names.append(head)
            continue
        for word in inside.split(","):
            first, _, last = word.partition("-")
            start, stop = parse_whole(first), parse_whole(last or first)
            if start is None or stop is None or stop < start:
                raise ValueError(f"{word!r} is not a range of numbers")
            for number in range(start, stop + 1):
                # A second pair of brackets, as in rack[1-2]n[1-4], is expanded recursively.
                names += parse_node_list(f"{head}{number:0{len(first)}d}{tail}")
                if len(names) > MOST_NODES:
                    raise ValueError(f"it lists more than {MOST_NODES} nodes")
    return names


def _not_a_number_finding(variable: str, text: str, *, at_least: int = 0) -> Finding:
    kind = "a count" if parse_whole(text) == 0 else "a number"
    return Finding(
        severity=Severity.ERROR,
        what=f"{variable} is {text!r}, which is not {kind}.",
        evidence=f"{variable}={text}",
        cause="A launcher or a script set it wrongly.",
        cure=f"Unset {variable}, or set it to a whole number from {at_least} up.",
    )


def _bad_node_list_finding(listed: str, wrong: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"SLURM_JOB_NODELIST cannot be read: {wrong}.",
        evidence=f"SLURM_JOB_NODELIST={listed[:200]}",
        cause="Slurm writes host[1-4,7]; a script may have changed it.",
        cure="Unset SLURM_JOB_NODELIST, or start the job again; `scontrol show hostnames` must be able to "
        "read it.",
    )


def _check_process_group(env: Mapping[str, str], launcher: str | None) -> list[Finding]:
    """Return a finding for RANK without WORLD_SIZE or the reverse: a process group would wait forever."""
    if launcher != "by hand":
        return []
    needed = ("RANK", "WORLD_SIZE")
    missing = [name for name in needed if name not in env]
    if not missing:
        return []
    present = next(name for name in needed if name in env)
    return [
        Finding(
            severity=Severity.ERROR,
            what=f"{present} is set, but {' and '.join(missing)} is not.",
            evidence=f"{present}={env[present]}",
            cause="The variables of a process group were set by hand, and not all of them.",
            cure="Start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; "
            f"or unset {present}.",
        )
    ]


def _contradiction_finding(text: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what="The variables of the process group contradict each other.",
        evidence=text,
        cause="They were set by hand, or left over from another job.",
        cure="Start with torchrun, or unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.",
    )
