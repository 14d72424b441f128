"""Estimate the time of a step: simulate the host that launches operations and the device that runs them.

Two clocks run through the operations in order. The host's clock advances by the cost of each launch. The
device's clock advances by the time of each operation, which starts after its launch. So a step of many small
operations is as slow as the host, a step of few large ones as slow as the device.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trimtab.cache import MemoryCache, make_key
from trimtab.catalog.tables import collectives
from trimtab.predict.fusion import fuse_trace
from trimtab.predict.host_link import exposed_transfers_s
from trimtab.predict.host_memory import offloaded_state_s
from trimtab.predict.memory import gradient_sizes
from trimtab.spec import ContextMethod, Recompute, Work
from trimtab.spec.precision import DTYPE_BYTES
from trimtab.spec.trace import CONTEXT, GRAPH_ENTER, GRAPH_LEAVE, SHARDED, UPDATE_CALL, WRAPPED
from trimtab.strategies import strategy_of
from trimtab.strategies.base import PassTimes, Traffic
from trimtab.strategies.pipeline import find_shape, find_stage_work

if TYPE_CHECKING:
    from trimtab.catalog.facts import DeviceFacts, StepFacts
    from trimtab.predict import communication as communication_module
    from trimtab.predict.op_time import Pace
    from trimtab.spec import Setting, Trace


class HostCosts(NamedTuple):
    """Seconds of the host per event of a step; h200.toml explains each field."""

    forward_s: float
    backward_s: float
    plain_s: float
    view_s: float
    backward_view_s: float
    call_s: float
    tensor_s: float
    wait_s: float
    compiled_s: float
    piece_s: float
    step: StepFacts
    """Counts, and costs that do not depend on the host."""
    dtensor_op_s: float = 0.0
    dtensor_s: float = 0.0
    sharded_s: float = 0.0
    update_s: float = 0.0
    graph_s: float = 0.0


HOST_FIELDS = [name for name in HostCosts._fields if name not in {"step", "piece_s"}]


STEP_HOST_FIELDS = ("start_s", "saved_s", "restored_s", "watched_s", "block_s", "fresh_s")
"""Costs of the host among the facts of a step."""


def compare_host(calibration: dict[str, float], facts: DeviceFacts) -> float:
    """Return how long a calibrated host takes for single layers, over the host that the costs are for.

    It is the geometric mean of a bare operation and of a linear layer under autocast, which has what a step
    has: Python, autocast, dispatch, a library. Together they say more than each of them.
    """
    usual = {"forward_s": facts.host.bare_forward_s, "linear_s": facts.host.linear_s}
    ratios = [calibration[name] / usual[name] for name in usual if name in calibration]
    return math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0


def scale_host_costs(calibration: dict[str, float], facts: DeviceFacts) -> HostCosts:
    """Scale the measured costs of a host by how long the calibrated one takes for single layers."""
    return host_costs_at(compare_host(calibration, facts), facts)


def host_costs_at(layers: float, facts: DeviceFacts) -> HostCosts:
    """Return the costs of a host that takes this many times as long for single layers.

    Single layers in a loop stay in the processor's caches, so where they take twice as long, a step takes 2.5
    times as long (`power`).
    """
    measured, step = facts.host, facts.step
    slower = layers**measured.power
    costs = {name: getattr(measured, name) * slower for name in HOST_FIELDS}
    scaled = {name: getattr(step, name) * slower for name in STEP_HOST_FIELDS}
    return HostCosts(**costs, piece_s=step.piece_s * slower, step=msgspec.structs.replace(step, **scaled))


class Clocks(NamedTuple):
    """Times of a pass through some operations."""

    total_s: float
    device_s: float
    """Busy time of the device."""
    host_s: float
    """Busy time of the host."""


def run_clocks(  # noqa: PLR0913 - operations, speeds, and how the step runs
    works: list[Work],
    pace: Pace,
    host: HostCosts,
    *,
    backward: range,
    compiled: bool = False,
    selective: bool = False,
) -> Clocks:
    """Run both clocks through operations; `backward` is the range that autograd's engine launches."""
    device_clock = busy = waited = 0.0
    queue = host.step.queue
    host_clock = host.step.start_s
    ends: deque[float] = deque()
    for launch_s, device_s, is_wait, following_s in _list_costs(
        works, pace, host, backward, compiled=compiled, selective=selective
    ):
        host_clock += launch_s
        if device_s is None:
            if is_wait and device_clock > host_clock:
                waited += device_clock - host_clock
                host_clock = device_clock
            continue
        if len(ends) >= queue:
            free_at = ends.popleft()
            if free_at > host_clock:
                waited += free_at - host_clock
                host_clock = free_at
        busy += device_s
        device_clock = max(host_clock, device_clock) + device_s
        if following_s is not None:
            # The device runs the first time steps while the host launches the next ones.
            host_clock += following_s
            device_clock = max(device_clock, host_clock)
        ends.append(device_clock)
    return Clocks(max(host_clock, device_clock), busy, host_clock - waited)


class OperationCost(NamedTuple):
    """What an operation costs both clocks."""

    launch_s: float
    device_s: float | None
    """None: the device does not run it."""
    is_wait: bool
    following_s: float | None
    """Further launches of a recurrent layer."""


def _list_costs(  # noqa: PLR0913 - as run_clocks
    works: list[Work], pace: Pace, host: HostCosts, backward: range, *, compiled: bool, selective: bool
) -> list[OperationCost]:
    """Return the cost of each operation."""
    in_graphs = _list_compiled(works) if compiled else [False] * len(works)
    facts = host.step
    calls = _find_call_costs(works, backward, facts, selective=selective)
    begins = (0, backward.start, backward.stop, len(works)) if backward else (0, len(works))
    costs: list[OperationCost] = []
    for phase, (begin, end) in enumerate(pairwise(begins)):
        behind, after = phase == 1, phase > 1
        # A step has thousands of operations, but only about a hundred different ones.
        cached_costs: tuple[dict[int, OperationCost], ...] = {}, {}
        for work, in_graph in zip(works[begin:end], in_graphs[begin:end], strict=True):
            cost = cached_costs[in_graph].get(id(work))
            if cost is None:
                launch = _host_seconds(work, host, backward=behind, after=after, compiled=in_graph)
                if _is_module_call(work) and not in_graph and not after:
                    launch += calls.backward_s if behind else calls.forward_s
                elif behind and work.fresh and calls.backward_s and not in_graph:
                    # Products computed again have shapes of the forward pass, which are known by now.
                    launch -= calls.repeated * facts.fresh_s
                following = pace.recurrent_launch_s(work) if work.kind == "recurrent" else None
                device_s = _device_seconds(work, pace, facts.gap_s)
                cost = OperationCost(launch, device_s, work.kind == "wait", following)
                cached_costs[in_graph][id(work)] = cost
            costs.append(cost)
    return costs


class CallCosts(NamedTuple):
    """What recomputing adds to the host's cost of each module call."""

    forward_s: float
    backward_s: float
    repeated: float
    """Share of the fresh products of the backward pass that repeat one of the forward pass."""


def _is_module_call(work: Work) -> bool:
    return work.kind == "call" and work.op not in {UPDATE_CALL, GRAPH_ENTER, GRAPH_LEAVE}


def _find_call_costs(works: list[Work], backward: range, facts: StepFacts, *, selective: bool) -> CallCosts:
    """Return what the Python code of torch's checkpoint costs the host, for each call of a module.

    A trace does not mark which operations of the backward pass are computed again, but it has the calls of
    their modules. They run the mean number of operations of a call of the forward pass.
    """
    repeats = [place for place in backward if _is_module_call(works[place])]
    again = len(repeats)
    forward = works[: backward.start]
    calls = sum(map(_is_module_call, forward))
    if not again or not calls:
        return CallCosts(0.0, 0.0, 0.0)
    share = min(1.0, again / calls)
    saved = sum(map(_saves_tensor, forward)) / calls
    watched = sum(work.kind not in {"call", "wait"} for work in forward) / calls if selective else 0.0
    forward_s = share * (saved * facts.saved_s + watched * facts.watched_s)
    fresh = [sum(works[place].fresh for place in places) for places in (range(backward.start), backward)]
    return CallCosts(
        forward_s=forward_s,
        backward_s=saved * facts.restored_s
        + watched * facts.watched_s
        + _count_blocks(repeats) * facts.block_s / again,
        repeated=min(1.0, share * fresh[0] / fresh[1]) if fresh[1] else 0.0,
    )


def _saves_tensor(work: Work) -> bool:
    """Return whether an operation is taken to save a tensor for the backward pass: any float but a cast."""
    is_float = work.dtype.startswith(("float", "bfloat", "tf32"))
    return work.kernels > 0 and is_float and work.op not in CASTS


def _count_blocks(calls: list[int]) -> int:
    """Return how many blocks are computed again, by the places of their calls in the backward pass.

    Between two blocks is the backward pass of the first one: the longest stretch without a call.
    """
    gaps = [later - earlier for earlier, later in pairwise(calls)]
    return 1 + sum(2 * gap > max(gaps) for gap in gaps)


CASTS = {"aten::_to_copy", "aten::copy_"}


def _list_compiled(works: list[Work]) -> list[bool]:
    """Return for each operation of a compiled step whether compiled code launches it.

    A trace of a script marks where its graphs begin and end; without marks, everything is compiled.
    """
    if not any(work.op == GRAPH_ENTER for work in works):
        return [True] * len(works)
    inside, found = False, []
    for work in works:
        inside = work.op == GRAPH_ENTER or (inside and work.op != GRAPH_LEAVE)
        found.append(inside)
    return found


def _device_seconds(work: Work, pace: Pace, gap_s: float) -> float | None:
    """Return the seconds of the device for an operation; None if it does not run on the device."""
    if work.kind in ("wait", "collective") or not work.kernels:
        return None
    return pace.seconds(work) + gap_s


def _host_seconds(  # noqa: C901, PLR0911 - one way out for each kind
    work: Work, host: HostCosts, *, backward: bool, after: bool, compiled: bool
) -> float:
    if work.kind == "view":
        return 0.0 if compiled else host.backward_view_s if backward else host.view_s
    if work.op == WRAPPED:
        return host.dtensor_op_s + work.dims[0] * host.dtensor_s
    if work.op == SHARDED:
        return work.dims[0] * host.sharded_s
    if work.op == UPDATE_CALL:
        return host.update_s
    if work.op == GRAPH_ENTER:
        return host.graph_s
    if work.kind == "call":
        return 0.0 if compiled or work.op == GRAPH_LEAVE else host.call_s
    if work.kind == "wait":
        # Waiting alone copies no number to the host.
        return host.plain_s if work.op == WAIT_ONLY else host.wait_s
    pieces = (host.step.pieces_of(work.op) - 1) * host.piece_s
    if work.kind == "optimizer":
        return host.forward_s + pieces + (work.dims[0] * host.tensor_s if work.dims else 0.0)
    if after:
        return host.plain_s
    weighing = host.step.fresh_s if work.fresh else 0.0
    if compiled:
        return host.compiled_s + pieces + weighing
    return _operation_s(work, host, backward=backward) + pieces + weighing


def _operation_s(work: Work, host: HostCosts, *, backward: bool) -> float:
    if backward:
        return host.backward_s
    return host.plain_s if work.untracked else host.forward_s


class Step(NamedTuple):
    """One optimizer step of one rank."""

    compute_s: float
    """Matrix products, attention, convolutions and recurrent layers."""
    memory_s: float
    """All other operations, bound by memory bandwidth."""
    launch_s: float
    """The device waiting for the host."""
    communication_s: float
    """Collectives that do not overlap with computation."""
    bubble_s: float = 0.0
    """A pipeline stage waiting for other stages, at the beginning and at the end."""
    offload_s: float = 0.0
    """Copies between device and host that do not overlap with computation, and an optimizer on the CPU."""

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return sum(self)


WAIT_ONLY = "trimtab::wait_for_device"
"""torch.cuda.synchronize, as updates of bitsandbytes call it."""
ARITHMETIC_KINDS = {"matrix", "attention", "convolution", "recurrent"}


def estimate_step(  # noqa: PLR0913 - trace, setting and speeds
    trace: Trace,
    setting: Setting,
    pace: Pace,
    host: HostCosts,
    links: communication_module.Links,
    *,
    fusing: bool = False,
    host_bytes_per_s: float | None = None,
) -> Step:
    """Return the time of an optimizer step: `accumulation` forward and backward passes, and the optimizer.

    If ranks differ, the slowest one determines the time. With `fusing`, a compiled step is guessed from the
    trace of the eager one (`predict.fusion`); a trace through the compiler itself is more accurate, but takes
    a minute. `host_bytes_per_s` is the bandwidth between device and host; None: copies take no time.
    """
    if fusing and trace.no_compile_gain:
        fusing, setting = False, setting.replace(compile=False)
    steps = []
    passes = []
    for rank in trace.ranks:
        if fusing:
            rank = _fuse_cached(rank, setting, pace)  # noqa: PLW2901 - the same rank, compiled
        rounds = count_rounds(rank, setting)
        how = (setting.compile, setting.recompute is Recompute.SELECTIVE)
        sums = tuple(gradient_sizes(rank)) if rounds > 1 or setting.mesh.pp > 1 else None
        single = _time_single_device(rank.works, rank.sequence, _find_bounds(rank), pace, host, how, sums)
        exposed = _exposed_s(rank, setting, links, single) + rounds * exposed_context_s(
            rank, setting, links, pace
        )
        step = _split_time(single, rounds, exposed, host.step)
        copied = exposed_transfers_s(
            rank, host_bytes_per_s, forward_s=single.forward_s, backward_s=single.backward_s
        )
        hidden = collectives().overlapped
        added = offloaded_state_s(
            rank,
            setting,
            host_bytes_per_s,
            links.host_memory,
            hidden_forward_s=hidden * single.forward_s,
            hidden_backward_s=hidden * single.backward_s,
        )
        steps.append(step._replace(offload_s=rounds * copied if added is None else added))
        passes.append(_split_pass(rank, single))
    slowest = max(range(len(steps)), key=lambda number: steps[number].total_s)
    step = steps[slowest]
    waits = strategy_of(setting).find_waits(setting, passes, slowest, links)
    return step._replace(bubble_s=waits.bubble_s, communication_s=step.communication_s + waits.sends_s)


def _split_pass(trace: Trace, single: SingleDeviceStep) -> PassTimes:
    """Divide the time of one more pass into its parts, by the time of the device."""
    busy = single.forward_s + single.backward_s
    each = single.again_s / busy if busy else 0.0
    input_s = single.backward_s - single.weight_s
    return PassTimes(trace, each * single.forward_s, each * input_s, each * single.weight_s)


def count_rounds(trace: Trace, setting: Setting) -> int:
    """Return the micro-batches per optimizer step of the traced kind of rank."""
    if not setting.mesh.copies:
        return setting.accumulation
    share = -(-setting.global_batch // setting.mesh.copies[trace.part])
    return -(-share // setting.micro_batch)


def _exposed_s(
    trace: Trace, setting: Setting, links: communication_module.Links, single: SingleDeviceStep
) -> float:
    return exposed_communication_s(
        trace, setting, links, forward_s=single.forward_s, backward_s=single.backward_s
    )


def _split_time(single: SingleDeviceStep, rounds: int, exposed: float, facts: StepFacts) -> Step:
    """Split the time of a rank with this many micro-batches into its parts."""
    extra = rounds - 1
    total = single.whole.total_s + extra * single.again_s
    busy = single.whole.device_s + extra * single.again_device_s
    arithmetic = single.arithmetic_s + extra * single.arithmetic_once_s
    share = arithmetic / busy if busy else 0.0
    begin, full = facts.throttles_from, facts.throttles_at
    filled = min(1.0, max(0.0, (share - begin) / (full - begin)))
    slowed = arithmetic * facts.throttled * filled
    return Step(
        compute_s=arithmetic + slowed,
        memory_s=busy - arithmetic,
        launch_s=max(0.0, total - busy - slowed),
        communication_s=exposed,
    )


class SingleDeviceStep(NamedTuple):
    """Times of a step on a single device, which depend neither on links nor on accumulation."""

    whole: Clocks
    again_s: float
    """One more forward and backward pass, whose gradients are added to the earlier ones."""
    again_device_s: float
    forward_s: float
    backward_s: float
    weight_s: float
    """Part of the backward pass: weight gradients that are computed after the rest of it."""
    arithmetic_once_s: float
    arithmetic_s: float


class PassBounds(NamedTuple):
    """Positions in the sequence of a trace between which the passes of a micro-batch are."""

    forward: int
    """Gradients are set to zero before it, once a step."""
    backward: int
    weights: int
    """Weight gradients that are computed after the rest of the backward pass."""
    end: int


def _find_bounds(trace: Trace) -> PassBounds:
    length, phases = len(trace.sequence), trace.phases
    end = phases.get("optimizer", length)
    return PassBounds(
        phases.get("forward", 0), phases.get("backward", length), phases.get("weights", end), end
    )


_FUSED: MemoryCache[Trace] = MemoryCache(max_entries=128)
NOT_FUSED = frozenset(
    {
        *("strategy", "mesh", "micro_batch", "accumulation", "global_batch", "shares", "sync_batchnorm"),
        *("compile", "optimizer", "allocator", "workers"),
    }
)
"""Fields of a Setting that do not affect the compiled operations of a trace."""


def _fuse_cached(trace: Trace, setting: Setting, pace: Pace) -> Trace:
    """Return the trace with compiled operations; cached, as a plan needs it for many layouts."""
    key = trace.works, trace.sequence, make_key(setting, NOT_FUSED), pace
    return _FUSED.get(key, lambda: fuse_trace(trace, setting, pace))


@lru_cache(maxsize=128)
def _time_single_device(  # noqa: PLR0913, PLR0917 - the cache key
    works: tuple[Work, ...],
    sequence: tuple[int, ...],
    bounds: PassBounds,
    pace: Pace,
    host: HostCosts,
    how: tuple[bool, bool],
    sums: tuple[int, ...] | None,
) -> SingleDeviceStep:
    """Time a step on a single device; cached, as a plan needs it for many layouts and accumulations.

    `sums` are the sizes of the gradients that a further pass adds to; None if there is no further pass.
    """
    first, begin, weights, end = bounds
    compiled, selective = how
    every = [works[number] for number in sequence]
    whole = run_clocks(every, pace, host, backward=range(begin, end), compiled=compiled, selective=selective)
    again_s = again_device_s = 0.0
    if sums is not None:
        passes = every[first:end]
        more = [*passes, *map(_gradient_add, sums)]
        backward = range(begin - first, end - first)
        again = run_clocks(more, pace, host, backward=backward, compiled=compiled, selective=selective)
        again_s, again_device_s = _steady_pass_s(again, passes, host.step.start_s), again.device_s
    device_s = [pace.seconds(work) if work.kernels and work.kind != "collective" else 0.0 for work in works]
    computed = [pace.seconds(work) if work.kind in ARITHMETIC_KINDS else 0.0 for work in works]
    arithmetic = sum(computed[number] for number in sequence[:end])
    return SingleDeviceStep(
        whole=whole,
        again_s=again_s,
        again_device_s=again_device_s,
        forward_s=sum(device_s[number] for number in sequence[first:begin]),
        backward_s=sum(device_s[number] for number in sequence[begin:end]),
        weight_s=sum(device_s[number] for number in sequence[weights:end]),
        arithmetic_once_s=arithmetic,
        arithmetic_s=arithmetic + sum(computed[number] for number in sequence[end:]),
    )


def _steady_pass_s(passes: Clocks, works: list[Work], start_s: float) -> float:
    """Return the seconds of one more pass: without waits, the host runs ahead into the next pass."""
    if any(work.kind == "wait" for work in works):
        return passes.total_s
    return max(passes.device_s, passes.host_s - start_s)


def _gradient_add(size: int) -> Work:
    """Return the operation that adds a gradient to the sum of earlier ones."""
    return Work(
        op="aten::add_", kind="pointwise", dtype="float32", read_bytes=2 * size, write_bytes=size, dims=(0, 1)
    )


def model_flops(trace: Trace) -> int:
    """Return the FLOPs of one forward and backward pass on one rank, without recomputation."""
    # Updates count instructions instead of FLOPs.
    counts = [0 if work.kind == "optimizer" else work.flops for work in trace.works]
    return sum(counts[number] for number in trace.sequence) - trace.recomputed_flops


def device_flops(trace: Trace, setting: Setting) -> float:
    """Return the mean FLOPs of an optimizer step per device."""
    mesh = setting.mesh
    if mesh.pp > 1:
        return _pipeline_flops(trace, setting) / mesh.pp * setting.accumulation
    if not trace.beside:
        return model_flops(trace) * setting.accumulation
    ranks = mesh.branch_ranks
    return sum(
        model_flops(rank) * count_rounds(rank, setting) * ranks[rank.part] for rank in trace.ranks
    ) / sum(ranks)


def _pipeline_flops(trace: Trace, setting: Setting) -> float:
    """Return the FLOPs of a micro-batch on all ranks of a pipeline; between first and last by blocks."""
    first, last = model_flops(trace.ranks[0]), model_flops(trace.ranks[-1])
    shape = find_shape(setting)
    work = find_stage_work(trace, shape, around=False)
    shares = [sum(work[stage] for stage in shape.stages_of(rank)) for rank in range(shape.ranks)]
    return first * sum(shares[:-1]) / shares[0] + last


def gradient_bytes(trace: Trace, setting: Setting) -> int:
    """Return the bytes of gradients that a replica exchanges with the others."""
    return trace.trainable * DTYPE_BYTES[setting.dtypes.gradients]


def exposed_communication_s(
    trace: Trace, setting: Setting, links: communication_module.Links, *, forward_s: float, backward_s: float
) -> float:
    """Return the seconds of collectives that do not overlap with computation."""
    return strategy_of(setting).exposed_s(
        Traffic(
            trace=trace,
            setting=setting,
            links=links,
            gradient_bytes=gradient_bytes(trace, setting),
            hidden_forward_s=collectives().overlapped * forward_s,
            hidden_backward_s=collectives().overlapped * backward_s,
        )
    )


def exposed_context_s(trace: Trace, setting: Setting, links: communication_module.Links, pace: Pace) -> float:
    """Return the seconds of a pass for which attention waits for other ranks that split sequences.

    What a ring sends next is on its way while the device computes the current block. Sends of a group follow
    one another: each starts when it is issued and the one before has arrived. A device that computes while
    it sends is assumed to lose nothing. Positions that are exchanged for heads are never hidden: the next
    operation needs them.
    """
    mesh = setting.mesh
    if mesh.cp == 1:
        return 0.0
    now = link_free = waited = 0.0
    arrivals: deque[float] = deque()
    for number in trace.sequence:
        work = trace.works[number]
        if not work.op.startswith(CONTEXT):
            now += pace.seconds(work) if work.kernels and work.kind != "collective" else 0.0
        elif "wait" in work.op:
            arrival = arrivals.popleft() if arrivals else now
            waited += max(0.0, arrival - now)
            now = max(now, arrival)
        else:
            is_ring = work.op.startswith(f"{CONTEXT} {ContextMethod.RING}")
            cost = (
                # All ranks wait for the slowest hop. It leaves a node if the other half of the ring is in
                # another one.
                max(links.send_s(work.read_bytes, apart) for apart in (mesh.tp, mesh.cp * mesh.tp // 2))
                if is_ring
                else links.all_to_all_s(work.read_bytes, mesh.cp, apart=mesh.tp)
            )
            link_free = max(now, link_free) + cost
            arrivals.append(link_free)
    return waited
