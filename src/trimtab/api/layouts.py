"""Rank layouts of a decoder on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import NothingFits, WrongUse, find_nearest
from trimtab.spec import LayoutRanking, LayoutRow
from trimtab.spec.requests import LayoutsRequest, accepts
from trimtab.units import format_bytes, parse_whole, plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.planner.layouts import LayoutSearch, RankedLayout
    from trimtab.spec import Cluster, DecoderShape, Device

TOKENS = 4_194_304
"""Tokens of a step where no global batch is named."""
SEQUENCE = 4096
FILLED = 0.9
"""Share of a device's memory that a layout may take, as in a plan."""
ROOM = 1.05
"""Reserved memory over allocated memory: the caching allocator leaves gaps."""
NCCL_BYTES = 1 << 30
"""What NCCL takes for its buffers; by GPUs and topology it is 0.2 to 2 GiB."""


@accepts(LayoutsRequest)
def layouts(request: LayoutsRequest) -> LayoutRanking:
    """Rank tensor, context, expert, pipeline and data parallel degrees of a decoder, without a GPU.

    trimtab.layouts("hf:./llama-70b", "32x8xH100", seq=8192).rows[0].tp
    """
    from trimtab.api.detecting import cluster
    from trimtab.catalog.facts import facts_of
    from trimtab.jobs.decoder_shape import read_decoder_shape
    from trimtab.planner.layouts import TRAINERS, LayoutQuestion, LayoutSearch
    from trimtab.predict.calibration import find_speed
    from trimtab.predict.communication import find_links
    from trimtab.predict.layout import LayoutEstimator

    shape, longest = read_decoder_shape(request.job)
    devices = (
        request.on if request.on is not None and not isinstance(request.on, str) else cluster(request.on)
    )
    device = _find_device(devices)
    sequence = request.seq or min(SEQUENCE, longest or SEQUENCE)
    gpus = len(devices.devices)
    global_batch = request.global_batch or max(1, TOKENS // sequence)
    if request.trainer not in TRAINERS:
        raise WrongUse(
            f"--trainer {request.trainer}",
            found=f"it is none of {', '.join(TRAINERS)}",
            cure="Name one of them.",
        )
    speed = find_speed(device, None)
    if speed is None:
        raise WrongUse(
            str(request.on),
            found=f"the catalogue has no speed of {device.name}",
            cure="Run `trimtab calibrate`.",
        )
    context = facts_of(device).memory.sharded_context_bytes + NCCL_BYTES
    question = LayoutQuestion(
        shape=shape,
        sequence=sequence,
        global_batch=global_batch,
        gpus=gpus,
        per_node=max(len(node.devices) for node in devices.nodes),
        sharding=TRAINERS[request.trainer],
        budget_bytes=int((device.memory_bytes * FILLED - context) / ROOM),
        pins=read_degrees(request.pins),
    )
    estimator = LayoutEstimator(shape, speed.pace, speed.host, find_links(devices, gpus))
    search = LayoutSearch(question, estimator).run()
    if not search.found:
        raise _make_refusal(request, search, device)
    describe = _Describer(shape, device, question.sequence, global_batch, context)
    best = search.best_data_parallel()
    return LayoutRanking(
        job=str(request.job),
        on=_name_devices(devices),
        gpus=gpus,
        sequence=sequence,
        global_batch=global_batch,
        is_pinned=bool(question.pins),
        trainer=request.trainer,
        parameters=shape.parameters,
        rows=tuple(describe.row(each) for each in search.best_by_mesh()[: request.top]),
        data_parallel=None if best is None else describe.row(best),
        examined=search.examined,
        ruled_out=dict(search.ruled_out),
        assumptions=tuple(_list_assumptions(request.trainer, shape, devices, gpus, own=speed.own)),
    )


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


def _find_device(devices: Cluster) -> Device:
    """Return the device of a cluster whose devices are all the same."""
    names = {device.model or device.name for device in devices.devices}
    if len(names) != 1:
        found = f"it has {' and '.join(sorted(names))}" if names else "it has no GPU"
        raise WrongUse("--on", found=found, cure="Name devices of one kind, as in --on 32x8xH100.")
    return devices.devices[0]


def _name_devices(devices: Cluster) -> str:
    per_node = len(devices.nodes[0].devices)
    name = devices.devices[0].name
    return f"{len(devices.nodes)}x{per_node}x{name}" if len(devices.nodes) > 1 else f"{per_node}x{name}"


class _Describer:
    """Turns layouts into rows."""

    def __init__(
        self, shape: DecoderShape, device: Device, sequence: int, global_batch: int, context: int
    ) -> None:
        self.device, self.context = device, context
        self.tokens = sequence * global_batch
        attention = 6 * shape.layers * shape.heads * shape.head_size * sequence
        self.flops = self.tokens * (6 * shape.active_parameters + attention)

    def row(self, ranked: RankedLayout) -> LayoutRow:
        """Return a layout as a row."""
        layout, time, memory = ranked
        seconds = time.total_s
        peak = self.device.peaks.bf16
        parts = {name.removesuffix("_s"): getattr(time, name) for name in time._fields}
        kinds = {name: getattr(memory, name) for name in memory._fields if name != "stage"}
        return LayoutRow(
            dp_replicate=layout.dp_replicate,
            dp_shard=layout.dp_shard,
            cp=layout.cp,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            virtual_stages=layout.virtual_stages,
            micro_batch=layout.micro_batch,
            accumulation=layout.micro_batches,
            recompute="full" if layout.full_recompute else "none",
            step_s=seconds,
            times=parts,
            tokens_per_s_per_gpu=self.tokens / seconds / layout.gpus,
            mfu=self.flops / (seconds * layout.gpus * peak) if peak else None,
            memory_bytes=round(memory.total * ROOM) + self.context,
            memory=kinds,
            fullest_stage=memory.stage,
        )


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


def _list_assumptions(
    trainer: str, shape: DecoderShape, devices: Cluster, gpus: int, *, own: bool
) -> Iterable[str]:
    """Yield what the figures take for granted."""
    from trimtab.predict.communication import describe_network

    yield "bf16 with weights, gradients and AdamW in float32; attention by a flash kernel; norms are fused"
    if trainer == "torchtitan":
        yield "data-parallel ranks share weights, gradients and states (FSDP2)"
        yield "with pipeline stages, weights stay gathered between micro-batches"
    else:
        yield "data-parallel ranks share the states of the optimizer (Megatron-LM's distributed optimizer)"
    yield "by formulas, not by a trace: docs/layouts.md states how far off they are"
    if shape.experts:
        yield "experts get equal numbers of tokens; no capacity limit drops any"
    if not own:
        name = devices.devices[0].name
        yield f"time: {name} was not calibrated; its datasheet with the efficiencies of an H200"
    if (network := describe_network(devices, gpus)) is not None:
        yield network
