"""From a Trace to seconds: the device works through its operations while the host hands them out.

Two clocks run through the step in order. The host's moves by what it costs to hand an operation out; the
device's by how long the operation takes, and not before it was handed out. So a step of many small
operations is as slow as the host, one of few large ones as slow as the device, and one in between is both.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.predict.accumulate import gradients
from trimtab.predict.fusion import fused
from trimtab.spec import Recompute, Work
from trimtab.spec.precision import DTYPE_BYTES
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Traffic

if TYPE_CHECKING:
    from trimtab.predict import comms
    from trimtab.predict.pace import Pace
    from trimtab.spec import Setting, Trace

QUEUE = 1000
"""Launches that the host may be ahead of the device; then it waits."""
GAP_S = 2.4e-6
"""Between one kernel of a step and the next."""
START_S = 0.7e-3
"""From the beginning of a step to its first kernel: gradients are dropped, autocast begins."""
SELECTIVE_S = 190e-6
"""What selective recomputation costs the host for each operation it decides on, forward and again backward:
torch asks in Python. Compiled graphs decide beforehand."""
LAUNCHES = {
    "aten::index_put": 10,
    "aten::index_put_": 10,
    "aten::embedding_dense_backward": 8,
    "aten::_embedding_bag_backward": 8,
    "aten::sort": 8,
    "aten::topk": 3,
}
"""Operations that the host hands out in several pieces."""
PIECE_S = 12e-6
FRESH_S = 150e-6
"""What a matrix product of a shape not met before costs the host: cuBLAS weighs its kernels anew, and keeps
its choices by shape. Where rows follow from what the model computes, as of experts, every step brings others.
Beside an H200, 699 products of a mixture of experts, 576 of them such, took 169 us of the host each in a
profile, where 10 to 20 are usual; the profile's own cost is taken off."""
THROTTLED = 0.08
"""How much longer arithmetic takes when it fills a step: operations are calibrated one at a time, in bursts,
and in a step of little else the power limit lowers the clock. Seen on an H200 from 5 to 8 %."""
THROTTLES_FROM, THROTTLES_AT = 0.4, 0.6
"""Share of the device's time that is arithmetic: where that begins, and where it is in full."""
OVERLAPPED = 0.9
"""Share of the computing that collectives can hide behind: they take some of the device's own time."""


class Host(NamedTuple):
    """Seconds of the host for each thing that a step does."""

    forward_s: float
    """An operation of the forward pass, with its Python and its node for autograd."""
    backward_s: float
    plain_s: float
    """An operation without autograd, as optimizers that are written out make them."""
    view_s: float
    call_s: float
    """A module's call."""
    tensor_s: float
    """A tensor that the optimizer looks at."""
    wait_s: float
    compiled_s: float
    """A kernel of a compiled graph."""


MEASURED_FORWARD_S = 7.08e-6
"""`forward_s` of the calibration whose host the figures below are of."""
REFERENCE = Host(
    forward_s=38e-6,
    backward_s=30e-6,
    plain_s=15e-6,
    view_s=1.5e-6,
    call_s=0.6e-6,
    tensor_s=5e-6,
    wait_s=100e-6,
    compiled_s=12e-6,
)
"""The host beside an H200: what makes 54 measured steps come out right, median error 3 %. A bare operation
takes 7 us there; what modules, autocast and autograd add is in these."""


def host(calibration: dict[str, float]) -> Host:
    """The costs of a host, by how long a bare operation takes there."""
    slower = calibration.get("forward_s", MEASURED_FORWARD_S) / MEASURED_FORWARD_S
    return Host(*(one * slower for one in REFERENCE))


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
    host: Host,
    *,
    backward: range,
    compiled: bool = False,
    selective: bool = False,
) -> Clocks:
    """Let both clocks run through operations; `backward` says which of them autograd's engine hands out."""
    device_clock = busy = waited = 0.0
    host_clock = START_S
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
                handing += SELECTIVE_S
            cost = costs[id(work)] = handing, _taken(work, pace)
        handing, taken = cost
        host_clock += handing
        if taken is None:
            if work.kind == "wait":
                waited += max(0.0, device_clock - host_clock)
                host_clock = max(host_clock, device_clock)
            continue
        if len(ends) >= QUEUE:
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


def _taken(work: Work, pace: Pace) -> float | None:
    """Seconds of the device for an operation; None where it has nothing to do there."""
    if work.kind in ("wait", "collective") or not work.kernels:
        return None
    return pace.seconds(work) + GAP_S


def _handing_out(  # noqa: PLR0911 - one way out for each kind
    work: Work, host: Host, *, backward: bool, after: bool, compiled: bool
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
    weighing = FRESH_S if work.fresh else 0.0
    if compiled:
        return host.compiled_s + weighing
    pieces = (LAUNCHES.get(work.op, 1) - 1) * PIECE_S
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
    trace: Trace, setting: Setting, pace: Pace, host: Host, among: comms.Links, *, fusing: bool = False
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
    for one in trace.ranks:
        if fusing:
            one = _fused(one, setting, pace)  # noqa: PLW2901 - the same rank, compiled
        rounds = rounds_of(one, setting)
        how = (setting.compile, setting.recompute is Recompute.SELECTIVE)
        sums = tuple(gradients(one)) if rounds > 1 or setting.mesh.pp > 1 else None
        alone = _alone(one.works, one.sequence, _bounds(one), pace, host, how, sums)
        found.append(_spent(alone, rounds, _exposed(one, setting, among, alone)))
        passes.append(alone.again_s)
    slowest = max(range(len(found)), key=lambda number: found[number].total_s)
    return found[slowest]._replace(bubble_s=strategy_of(setting).idle_s(setting, passes, slowest))


def rounds_of(trace: Trace, setting: Setting) -> int:
    """Micro-batches of an optimizer step on ranks of the kind that was traced."""
    if not setting.mesh.copies:
        return setting.accumulation
    share = -(-setting.global_batch // setting.mesh.copies[trace.part])
    return -(-share // setting.micro_batch)


def _exposed(trace: Trace, setting: Setting, among: comms.Links, alone: Alone) -> float:
    return communication(trace, setting, among, forward_s=alone.forward_s, backward_s=alone.backward_s)


def _spent(alone: Alone, rounds: int, exposed: float) -> Step:
    """What a rank spends the time of so many micro-batches on."""
    extra = rounds - 1
    total = alone.whole.total_s + extra * alone.again_s
    busy = alone.whole.device_s + extra * alone.again_device_s
    arithmetic = alone.arithmetic_s + extra * alone.arithmetic_once_s
    share = arithmetic / busy if busy else 0.0
    filled = min(1.0, max(0.0, (share - THROTTLES_FROM) / (THROTTLES_AT - THROTTLES_FROM)))
    slowed = arithmetic * THROTTLED * filled
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


_FUSED: OrderedDict[Any, Trace] = OrderedDict()
_FUSED_KEPT = 64


def _fused(trace: Trace, setting: Setting, pace: Pace) -> Trace:
    """What the compiler would make of a trace; remembered, as a plan asks for it with many layouts."""
    key = trace.works, trace.sequence, setting.precision, setting.recompute, pace
    found = _FUSED.get(key)
    if found is None:
        found = _FUSED[key] = fused(trace, setting, pace)
        if len(_FUSED) > _FUSED_KEPT:
            _FUSED.popitem(last=False)
    return found


@lru_cache(maxsize=128)
def _alone(  # noqa: PLR0913, PLR0917 - all that it depends on, to be remembered by
    works: tuple[Work, ...],
    sequence: tuple[int, ...],
    bounds: tuple[int, int],
    pace: Pace,
    host: Host,
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
        again_s, again_device_s = _steady(again, every[:end]), again.device_s
    taken = [pace.seconds(one) if one.kernels and one.kind != "collective" else 0.0 for one in works]
    computed = [pace.seconds(one) if one.kind in ARITHMETIC else 0.0 for one in works]
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


def _steady(passes: Clocks, works: list[Work]) -> float:
    """Seconds of one more pass: the host runs ahead into the next one, where it waits for nothing."""
    if any(one.kind == "wait" for one in works):
        return passes.total_s
    return max(passes.device_s, passes.host_s - START_S)


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
    return sum(model_flops(one) * rounds_of(one, setting) * ranks[one.part] for one in trace.ranks) / sum(
        ranks
    )


def gradient_bytes(trace: Trace, setting: Setting) -> int:
    """What a replica has to tell the others."""
    return trace.trainable * DTYPE_BYTES[setting.dtypes.gradients]


def communication(
    trace: Trace, setting: Setting, among: comms.Links, *, forward_s: float, backward_s: float
) -> float:
    """Seconds of collectives that computing does not hide."""
    return strategy_of(setting).exposed_s(
        Traffic(
            trace=trace,
            setting=setting,
            links=among,
            gradient_bytes=gradient_bytes(trace, setting),
            hidden_forward_s=OVERLAPPED * forward_s,
            hidden_backward_s=OVERLAPPED * backward_s,
        )
    )
