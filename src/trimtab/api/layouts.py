"""Rank layouts of a decoder on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import NothingFits, WrongUse, find_nearest
from trimtab.spec import LayoutRanking
from trimtab.spec.requests import LayoutsRequest, accepts
from trimtab.units import format_bytes, parse_whole, plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.planner.layout_plans import LayoutStudy
    from trimtab.planner.layouts import LayoutSearch
    from trimtab.spec import Cluster, Device, Plan


@accepts(LayoutsRequest)
def layouts(request: LayoutsRequest) -> LayoutRanking:
    """Rank tensor, context, expert, pipeline and data parallel degrees of a decoder, without a GPU.

    trimtab.layouts("hf:./llama-70b", "32x8xH100", seq=8192).rows[0].tp
    """
    return describe_study(request, study_request(request))


def describe_study(request: LayoutsRequest, study: LayoutStudy) -> LayoutRanking:
    """Return the ranking of a study."""
    search, model = study.search, study.model
    best = search.best_data_parallel()
    return LayoutRanking(
        job=str(request.job),
        on=_name_devices(model.cluster),
        gpus=len(model.cluster.devices),
        sequence=model.sequence,
        global_batch=model.global_batch,
        is_pinned=bool(model.pins),
        trainer=request.trainer,
        parameters=model.shape.parameters,
        rows=tuple(study.describe(each) for each in search.best_by_mesh()[: request.top]),
        data_parallel=None if best is None else study.describe(best),
        examined=search.examined,
        ruled_out=dict(search.ruled_out),
        assumptions=tuple(study.list_assumptions()),
    )


@accepts(LayoutsRequest)
def plan_layout(request: LayoutsRequest) -> Plan:
    """Return the layout in a row of the ranking as a plan, which `apply` and `launch` take.

    trimtab.plan_layout("hf:./llama-70b", "32x8xH100", seq=8192).choice.mesh.tp
    """
    return plan_study(request, study_request(request))


def plan_study(request: LayoutsRequest, study: LayoutStudy) -> Plan:
    """Return the layout in a row of a study as a plan."""
    from pathlib import Path

    from trimtab.jobs.decoder_shape import describe_decoder_job
    from trimtab.planner.layout_plans import make_layout_plan
    from trimtab.planner.plan_files import collect_fingerprints, read_versions
    from trimtab.spec import Policy

    rows = study.search.best_by_mesh()
    if request.row > len(rows):
        raise WrongUse(
            f"--row {request.row}",
            found=f"there are {plural(len(rows), 'layout')} with different degrees",
            cure=f"Give a number from 1 to {len(rows)}.",
        )
    workload = describe_decoder_job(
        request.job, sequence=study.model.sequence, global_batch=study.model.global_batch
    )
    policy = Policy(pins=dict(study.model.pins))
    made = make_layout_plan(study, rows[request.row - 1], job=request.job, workload=workload, policy=policy)
    assumed = collect_fingerprints(request.job, workload, made.places, read_versions())
    return made.replace(fingerprints=assumed, folder=str(Path.cwd()))


def study_request(request: LayoutsRequest) -> LayoutStudy:
    """Estimate all layouts that a request asks about; raise if none fits or is legal."""
    from trimtab.jobs.decoder_shape import read_decoder_shape
    from trimtab.planner.layout_plans import LayoutModel, study_layouts
    from trimtab.planner.layouts import TRAINERS
    from trimtab.planner.usual_batch import SEQUENCE, find_usual_batch
    from trimtab.probe.detect import as_cluster

    shape, longest = read_decoder_shape(request.job)
    if request.trainer not in TRAINERS:
        raise WrongUse(
            f"--trainer {request.trainer}",
            found=f"it is none of {', '.join(TRAINERS)}",
            cure="Name one of them.",
        )
    sequence = request.seq or min(SEQUENCE, longest or SEQUENCE)
    cluster = as_cluster(request.on, network=request.network)
    model = LayoutModel(
        shape=shape,
        cluster=cluster,
        sequence=sequence,
        global_batch=request.global_batch or find_usual_batch(sequence, max(1, len(cluster.devices))),
        trainer=request.trainer,
        pins=read_degrees(request.pins),
    )
    study = study_layouts(model)
    if not study.search.found:
        raise _make_refusal(request, study.search, study.device)
    return study


def read_degrees(pins: Iterable[str]) -> dict[str, int]:
    """Return pinned degrees by name.

    >>> read_degrees(["tp=8,pp=4", "cp=1"])
    {'tp': 8, 'pp': 4, 'cp': 1}
    """
    from trimtab.planner.layouts import DEGREES

    degrees: dict[str, int] = {}
    for text in (part for pin in pins for part in pin.split(",")):
        name, _, value = text.partition("=")
        number = parse_whole(value)
        if name.strip() not in DEGREES:
            near = find_nearest(name.strip(), DEGREES)
            raise WrongUse(
                f"--pin {text}",
                found=f"{name.strip() or 'nothing'} is none of {', '.join(DEGREES)}",
                cure=f"Did you mean {near[0]}?" if near else "Write it like --pin tp=8,pp=4.",
            )
        if not number:
            raise WrongUse(
                f"--pin {text}",
                found="its value is no number from 1 up",
                cure="Write it like --pin tp=8,pp=4.",
            )
        degrees[name.strip()] = number
    return degrees


def _name_devices(devices: Cluster) -> str:
    per_node = len(devices.nodes[0].devices)
    name = devices.devices[0].name
    return f"{len(devices.nodes)}x{per_node}x{name}" if len(devices.nodes) > 1 else f"{per_node}x{name}"


def _make_refusal(request: LayoutsRequest, search: LayoutSearch, device: Device) -> Exception:
    """Return the error of a search without a result: nothing fits, or the pins forbid everything."""
    given = f"{request.job} --on {request.on}" + "".join(f" --pin {pin}" for pin in request.pins)
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in search.ruled_out.items())
    if search.least is None:
        return WrongUse(
            given,
            found=f"no layout is legal on {plural(search.question.gpus, 'GPU')}"
            + (f": {reasons}" if reasons else ": the pinned degrees do not divide their number"),
            cure="Change the pinned degrees, --global-batch or the number of GPUs.",
        )
    layout, need = search.least.layout, search.least.memory.total
    mesh = f"dp {layout.dp}, tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, ep {layout.ep}"
    return NothingFits(
        given,
        found=f"no layout fits in {format_bytes(device.memory_bytes)} ({reasons}); the least is "
        f"{format_bytes(need)} of tensors with {mesh}",
        cure="Name more GPUs, or a shorter --seq.",
    )
