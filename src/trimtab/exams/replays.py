"""Replay rows of fine-tuning on one GPU or few as jobs: trace, replay the allocator, time the operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import TrimtabError
from trimtab.exams.outside_facts import JobPrediction, read_facts
from trimtab.predict.capacity import find_least_capacity, training_steps
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.memory import add_accumulation
from trimtab.spec import Setting, Strategy
from trimtab.strategies import STRATEGIES, strategy_of
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_settings

if TYPE_CHECKING:
    from trimtab.exams.outside_facts import OutsideRow
    from trimtab.trace.server import WorkerProcess

JOB = "trimtab.exams.finetuning:FineTuning"
LOGIT_BYTES = 2
ADAPTER_OPTIONS = ("dropout", "wide_adapters", "half")
"""Options of a recipe that concern adapters only."""


def make_request(row: OutsideRow) -> tuple[TraceRequest, dict[str, Any]]:
    """Return the trace of a row that is needed, and the facts of its recipe that no trace has."""
    facts = read_facts()
    recipe = dict(facts["recipe"][row.trainer])
    sizes = dict(facts["decoder"][row.model])
    if not recipe.pop("ties", True):
        sizes.pop("tied", None)
    beside = {
        name: recipe.pop(name, False) for name in ("keeps_logits", "flat", "steps_micro_batch", "compile")
    }
    quantised = recipe.pop("quantised", {})
    fields = recipe.pop("setting", {})
    options = sizes | recipe | {"seq": row.sequence}
    if row.lora:
        options |= {"lora": row.lora, "targets": row.targets}
    else:
        options = {name: value for name, value in options.items() if name not in ADAPTER_OPTIONS}
    if row.base:
        options |= quantised
    if row.gpus > 1:
        mesh = STRATEGIES[Strategy(row.strategy)].mesh(row.gpus)
        fields = fields | {"strategy": row.strategy, "mesh": mesh.to_builtins()}
    setting = Setting.from_builtins(
        {
            "micro_batch": row.micro_batch,
            "global_batch": row.global_batch,
            "accumulation": row.global_batch // (row.micro_batch * row.gpus),
            # The job builds weights in two precisions.
            "precision": "fp32" if options.get("half") else row.precision,
            "recompute": row.recompute,
            "base": row.base or "none",
            "offload": row.offload.split(",") if row.offload else [],
            **({"optimizer_rule": row.optimizer} if row.optimizer else {}),
            **fields,
        }
    )
    device = parse_cluster(f"{row.gpus}x{row.gpu}").devices[0]
    return TraceRequest(job=JOB, overrides=options, setting=setting, device=device), beside


def replay_row(row: OutsideRow, *, cached: bool = True, worker: WorkerProcess | None = None) -> JobPrediction:
    """Predict a row from a trace of its job."""
    request, beside = make_request(row)
    setting, device = request.setting, request.device
    cluster = parse_cluster(f"{row.gpus}x{row.gpu}")
    (trace,) = trace_settings(
        request.job, [setting], device, overrides=request.overrides, cache=cached, worker=worker
    )
    if isinstance(trace, TrimtabError):
        raise trace
    fusing = bool(beside["compile"]) and not request.overrides.get("compiled_blocks")
    alone = estimate_trace(trace, setting, device, cluster=cluster, fusing=fusing)[0]
    estimate = add_accumulation(alone, trace, setting)
    extra = 0
    if beside["keeps_logits"]:
        # The logits of the step before live until the next ones replace them.
        extra += row.micro_batch * row.sequence * request.overrides["vocabulary"] * LOGIT_BYTES
    if beside["flat"] and strategy_of(setting).is_sharded and setting.accumulation > 1:
        # Without a reduction after each micro-batch, a rank keeps the gradients of all weights that share a
        # flat parameter with a trained one.
        whole = estimate.parts.weights * row.gpus
        extra += whole if row.lora else whole - estimate.parts.weights
    step_s = estimate.step_s
    if step_s is not None and beside["steps_micro_batch"]:
        step_s /= setting.accumulation
    outside_segments = estimate.process_bytes - estimate.reserved_bytes + extra
    room = device.memory_bytes - outside_segments
    reserved = estimate.reserved_bytes
    if reserved > room:
        # Before it runs out of memory, the allocator releases the segments that hold no tensor.
        least = max(find_least_capacity(training_steps(rank)) for rank in trace.ranks)
        reserved = max(room, least + estimate.reserved_bytes - alone.reserved_bytes)
    return JobPrediction(
        allocated_bytes=estimate.allocated_bytes + extra,
        reserved_bytes=reserved + extra,
        process_bytes=reserved + outside_segments,
        capacity_bytes=device.memory_bytes,
        step_s=step_s,
    )
