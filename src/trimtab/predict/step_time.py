"""From a Trace to seconds: the device works through its operations while the host hands them out.

Two clocks run through the step in order. The host's moves by what it costs to hand an operation out; the
device's by how long the operation takes, and not before it was handed out. So a step of many small
operations is as slow as the host, one of few large ones as slow as the device, and one in between is both.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trimtab.cache import MemoryCache, key_of
from trimtab.catalog.tables import collectives
from trimtab.predict.fusion import fused
from trimtab.predict.memory import gradients
from trimtab.spec import Recompute, Work
from trimtab.spec.precision import DTYPE_BYTES
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Traffic

if TYPE_CHECKING:
    from trimtab.catalog.facts import DeviceFacts, StepFacts
    from trimtab.predict import communication as communication_module
    from trimtab.predict.op_time import Pace
    from trimtab.spec import Setting, Trace


class HostCosts(NamedTuple):
    """Seconds of the host for each thing that a step does; h200.toml says what each is."""

    forward_s: float
    backward_s: float
    plain_s: float
    view_s: float
    call_s: float
    tensor_s: float
    wait_s: float
    compiled_s: float
    step: StepFacts
    """What a step costs whatever the host."""


def host(calibration: dict[str, float], facts: DeviceFacts) -> HostCosts:
    """Scale the measured costs of a host by the time of a bare operation on the calibrated one."""
    measured = facts.host
    slower = calibration.get("forward_s", measured.bare_forward_s) / measured.bare_forward_s
    costs = {name: getattr(measured, name) * slower for name in HostCosts._fields if name != "step"}
    return HostCosts(**costs, step=facts.step)


class Clocks(NamedTuple):
    """A pass through some operations."""

    total_s: float
    device_s: float
    """What the device was busy."""
    host_s: float
    """What the host was busy."""


def run(  # noqa: PLR0913 - who works, how fast, and how the step is run
    works: list[Work],
    pace: Pace,
    host: HostCosts,
    *,
    backward: range,
    compiled: bool = False,
    selective: bool = False,
) -> Clocks:
    """Let both clocks run through operations; `backward` says which of them autograd's engine hands out."""
    device_clock = busy = waited = 0.0
    facts = host.step
    host_clock = facts.start_s
    ends: deque[float] = deque()
    # A step has thousands of operations, and a hundred different ones.
    known: list[dict[int, tuple[float, float | None]]] = [{}, {}, {}]
    for place, work in enumerate(works):
        behind = place in backward
        after = bool(backward) and place >= backward.stop
        costs = known[2 if after else 1 if behind else 0]
        cost = costs.get(id(work))
        if cost is None:
            handing = _handing_out(work, host, backward=behind, after=after, compiled=compiled)
            if selective and not behind and not compiled and work.kernels:
                handing += facts.selective_s
            cost = costs[id(work)] = handing, _taken(work, pace, facts.gap_s)
        handing, taken = cost
        host_clock += handing
        if taken is None:
            if work.kind == "wait":
                waited += max(0.0, device_clock - host_clock)
                host_clock = max(host_clock, device_clock)
            continue
        if len(ends) >= facts.queue:
            free_at = ends.popleft()
            if free_at > host_clock:
                waited += free_at - host_clock
                host_clock = free_at
        busy += taken
        device_clock = max(host_clock, device_clock) + taken
        if work.kind == "recurrent":
            # The device works off the first steps while the host hands out the next.
            host_clock += pace.handing_out(work)
            device_clock = max(device_clock, host_clock)
        ends.append(device_clock)
    return Clocks(max(host_clock, device_clock), busy, host_clock - waited)


def _taken(work: Work, pace: Pace, gap_s: float) -> float | None:
    """Seconds of the device for an operation; None where it has nothing to do there."""
    if work.kind in ("wait", "collective") or not work.kernels:
        return None
    return pace.seconds(work) + gap_s


def _handing_out(  # noqa: PLR0911 - one way out for each kind
    work: Work, host: HostCosts, *, backward: bool, after: bool, compiled: bool
) -> float:
    if work.kind == "view":
        return 0.0 if compiled else host.view_s
    if work.kind == "call":
        return 0.0 if compiled else host.call_s
    if work.kind == "wait":
        return host.wait_s
    if work.kind == "optimizer":
        return host.forward_s + work.dims[0] * host.tensor_s if work.dims else host.forward_s
    if after:
        return host.plain_s
    weighing = host.step.fresh_s if work.fresh else 0.0
    if compiled:
        return host.compiled_s + weighing
    pieces = (host.step.pieces_of(work.op) - 1) * host.step.piece_s
    return (host.backward_s if backward else host.forward_s) + pieces + weighing


class Step(NamedTuple):
    """One optimizer step of one rank."""

    compute_s: float
    """The device at matrix products, attention, convolutions and recurrent layers."""
    memory_s: float
    """The device at everything else, bound by its memory."""
    launch_s: float
    """The device waiting for the host."""
    communication_s: float
    """Collectives, as far as they are not hidden."""
    bubble_s: float = 0.0
    """A stage of a pipeline waiting for the others, at the beginning and at the end."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.memory_s + self.launch_s + self.communication_s + self.bubble_s


ARITHMETIC = {"matrix", "attention", "convolution", "recurrent"}


def step(  # noqa: PLR0913 - what runs, how fast, and where
    trace: Trace,
    setting: Setting,
    pace: Pace,
    host: HostCosts,
    among: communication_module.Links,
    *,
    fusing: bool = False,
) -> Step:
    """Seconds of an optimizer step: `accumulation` passes forward and backward, and the optimizer.

    Of unlike ranks the slowest sets the pace. With `fusing`, a compiled step is guessed from the trace of the
    eager one (`predict.fusion`). A trace through the compiler itself says it better, and takes a minute where
    this takes none.
    """
    if fusing and trace.no_compile_gain:
        fusing, setting = False, setting.replace(compile=False)
    found = []
    passes = []
    for rank in trace.ranks:
        if fusing:
            rank = _fused(rank, setting, pace)  # noqa: PLW2901 - the same rank, compiled
        rounds = rounds_of(rank, setting)
        how = (setting.compile, setting.recompute is Recompute.SELECTIVE)
        sums = tuple(gradients(rank)) if rounds > 1 or setting.mesh.pp > 1 else None
        alone = _alone(rank.works, rank.sequence, _bounds(rank), pace, host, how, sums)
        found.append(_spent(alone, rounds, _exposed(rank, setting, among, alone), host.step))
        passes.append(alone.again_s)
    slowest = max(range(len(found)), key=lambda number: found[number].total_s)
    return found[slowest]._replace(bubble_s=strategy_of(setting).idle_s(setting, passes, slowest))


def rounds_of(trace: Trace, setting: Setting) -> int:
    """Micro-batches of an optimizer step on ranks of the kind that was traced."""
    if not setting.mesh.copies:
        return setting.accumulation
    share = -(-setting.global_batch // setting.mesh.copies[trace.part])
    return -(-share // setting.micro_batch)


def _exposed(trace: Trace, setting: Setting, among: communication_module.Links, alone: Alone) -> float:
    return exposed_communication_s(
        trace, setting, among, forward_s=alone.forward_s, backward_s=alone.backward_s
    )


def _spent(alone: Alone, rounds: int, exposed: float, facts: StepFacts) -> Step:
    """What a rank spends the time of so many micro-batches on."""
    extra = rounds - 1
    total = alone.whole.total_s + extra * alone.again_s
    busy = alone.whole.device_s + extra * alone.again_device_s
    arithmetic = alone.arithmetic_s + extra * alone.arithmetic_once_s
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


class Alone(NamedTuple):
    """A step of one device, as far as neither links nor accumulation have a say in it."""

    whole: Clocks
    again_s: float
    """One more pass forward and backward, whose gradients are added to those before."""
    again_device_s: float
    forward_s: float
    backward_s: float
    arithmetic_once_s: float
    arithmetic_s: float


def _bounds(trace: Trace) -> tuple[int, int]:
    """Where the backward pass begins and ends."""
    length = len(trace.sequence)
    return trace.phases.get("backward", length), trace.phases.get("optimizer", length)


_FUSED: MemoryCache[Trace] = MemoryCache(max_entries=64)
NOT_FUSED = frozenset(
    {
        *("strategy", "mesh", "micro_batch", "accumulation", "global_batch", "shares", "sync_batchnorm"),
        *("compile", "optimizer", "allocator", "workers"),
    }
)
"""Fields of a Setting that do not change what the compiler makes of a trace."""


def _fused(trace: Trace, setting: Setting, pace: Pace) -> Trace:
    """Return what the compiler would make of a trace; cached, as a plan asks for it with many layouts."""
    key = trace.works, trace.sequence, key_of(setting, NOT_FUSED), pace
    return _FUSED.get(key, lambda: fused(trace, setting, pace))


@lru_cache(maxsize=128)
def _alone(  # noqa: PLR0913, PLR0917 - all that it depends on, as cache key
    works: tuple[Work, ...],
    sequence: tuple[int, ...],
    bounds: tuple[int, int],
    pace: Pace,
    host: HostCosts,
    how: tuple[bool, bool],
    sums: tuple[int, ...] | None,
) -> Alone:
    """Work through a step; a plan asks for the same one with many layouts and numbers of micro-batches.

    `sums` are the gradients that a further pass adds to; None where there is no further pass.
    """
    begin, end = bounds
    compiled, selective = how
    every = [works[number] for number in sequence]
    backward = range(begin, end)
    whole = run(every, pace, host, backward=backward, compiled=compiled, selective=selective)
    again_s = again_device_s = 0.0
    if sums is not None:
        more = [*every[:end], *map(_added, sums)]
        again = run(more, pace, host, backward=backward, compiled=compiled, selective=selective)
        again_s, again_device_s = _steady(again, every[:end], host.step.start_s), again.device_s
    taken = [pace.seconds(work) if work.kernels and work.kind != "collective" else 0.0 for work in works]
    computed = [pace.seconds(work) if work.kind in ARITHMETIC else 0.0 for work in works]
    arithmetic = sum(computed[number] for number in sequence[:end])
    return Alone(
        whole=whole,
        again_s=again_s,
        again_device_s=again_device_s,
        forward_s=sum(taken[number] for number in sequence[:begin]),
        backward_s=sum(taken[number] for number in sequence[begin:end]),
        arithmetic_once_s=arithmetic,
        arithmetic_s=arithmetic + sum(computed[number] for number in sequence[end:]),
    )


def _steady(passes: Clocks, works: list[Work], start_s: float) -> float:
    """Seconds of one more pass: the host runs ahead into the next one, where it waits for nothing."""
    if any(work.kind == "wait" for work in works):
        return passes.total_s
    return max(passes.device_s, passes.host_s - start_s)


def _added(size: int) -> Work:
    """A gradient that is added to the sum of those before."""
    return Work(
        op="aten::add_", kind="pointwise", dtype="float32", read_bytes=2 * size, write_bytes=size, dims=(0, 1)
    )


def model_flops(trace: Trace) -> int:
    """Operations of one forward and backward pass on one rank, what is computed again left out."""
    return sum(trace.works[number].flops for number in trace.sequence) - trace.recomputed_flops


def device_flops(trace: Trace, setting: Setting) -> float:
    """Operations of an optimizer step on a device, the mean over all of them."""
    mesh = setting.mesh
    if mesh.pp > 1:
        first, last = (model_flops(one) for one in (trace.ranks[0], trace.ranks[-1]))
        return ((mesh.pp - 1) * first + last) / mesh.pp * setting.accumulation
    if not trace.beside:
        return model_flops(trace) * setting.accumulation
    ranks = mesh.branch_ranks
    return sum(model_flops(rank) * rounds_of(rank, setting) * ranks[rank.part] for rank in trace.ranks) / sum(
        ranks
    )


def gradient_bytes(trace: Trace, setting: Setting) -> int:
    """What a replica has to tell the others."""
    return trace.trainable * DTYPE_BYTES[setting.dtypes.gradients]


def exposed_communication_s(
    trace: Trace, setting: Setting, among: communication_module.Links, *, forward_s: float, backward_s: float
) -> float:
    """Seconds of collectives that computing does not hide."""
    return strategy_of(setting).exposed_s(
        Traffic(
            trace=trace,
            setting=setting,
            links=among,
            gradient_bytes=gradient_bytes(trace, setting),
            hidden_forward_s=collectives().overlapped * forward_s,
            hidden_backward_s=collectives().overlapped * backward_s,
        )
    )
