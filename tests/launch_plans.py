"""Plans and clusters to launch, written down by hand."""

from __future__ import annotations

from typing import Any

from trimtab.launching.job_spec import JobSpec
from trimtab.launching.resources import compute_resources
from trimtab.launching.slurm import SlurmCluster, parse_cluster
from trimtab.spec import Band, Estimate, Footprint, Mesh, Plan, Precision, RankPlacement, Setting, Strategy

H100 = "H100 SXM5 80GB"
GIB = 2**30
SINFO = """\
gpu*|g1|gpu:h100:8(S:0-1)|128|1024000|1-00:00:00|idle|up
gpu*|g2|gpu:h100:8(S:0-1)|128|1024000|1-00:00:00|mixed|up
short|g1|gpu:h100:8(S:0-1)|128|1024000|30:00|idle|up
old|a1|gpu:a100:4,lustre:1|64|512000|infinite|drained|up
old|a2|gpu:a100:4,lustre:1|64|512000|infinite|down*|up
cpu|c1|(null)|32|64000|12:00:00|idle|up
broken|g2|gpu:h100:8|128|1024000|1-00:00:00|idle|down
"""
"""As `sinfo --Node` prints it."""
CONFIG = (
    "Configuration data as of 2026-01-01\nSelectType              = select/cons_tres\nSlurmctldPort = 6817\n"
)


def site(nodes: str = SINFO, config: str = CONFIG) -> SlurmCluster:
    return parse_cluster({"nodes": nodes, "config": config})


def plan(  # noqa: PLR0917 - a plan has many parts
    nodes: int = 1,
    gpus: int = 4,
    device: str = H100,
    hours: float | None = 2.0,
    job: str = "slm",
    options: dict[str, Any] | None = None,
    **choice: Any,
) -> Plan:
    ranks = nodes * gpus
    setting = {
        "strategy": Strategy.DDP if ranks > 1 else Strategy.SINGLE,
        "mesh": Mesh(dp_replicate=ranks),
        "micro_batch": 4,
        "accumulation": 1,
        "global_batch": 4 * ranks,
        "precision": Precision.BF16,
        "workers": 3,
    }
    return Plan(
        job=job,
        options=options or {},
        choice=Setting(**{**setting, **choice}),
        estimate=Estimate(
            allocated_bytes=10 * GIB,
            reserved_bytes=11 * GIB,
            process_bytes=12 * GIB,
            parts=Footprint(weights=2 * GIB, optimizer=4 * GIB, activations=4 * GIB),
            band=Band(low_bytes=10 * GIB, high_bytes=14 * GIB),
            step_s=0.5,
            hours=hours,
        ),
        places=tuple(
            RankPlacement(node=node, node_name=f"node{node}", device=index, name=device)
            for node in range(nodes)
            for index in range(gpus)
        ),
    )


def on_cpus(procs: int = 2, job: str = "slm:tiny") -> Plan:
    found = plan(gpus=procs, job=job, hours=None, precision=Precision.FP32, workers=0)
    return found.replace(places=(), estimate=found.estimate.replace(step_s=None))


def errand(what: Plan | None = None, **changes: Any) -> JobSpec:
    what = what or plan()
    nodes = changes.pop("nodes", None)
    return JobSpec(
        **{
            "plan": what,
            "plan_file": "/work/plan.json",
            "resources": compute_resources(what, nodes=nodes),
            "out": "/work/runs/slm",
            "folder": "/work",
            **changes,
        }
    )
