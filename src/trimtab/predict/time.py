"""From a Trace to seconds: the device works through its operations while the host hands them out.

Two clocks run through the step in order. The host's moves by what it costs to hand an operation out; the
device's by how long the operation takes, and not before it was handed out. So a step of many small
operations is as slow as the host, one of few large ones as slow as the device, and one in between is both.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from trimtab.predict import comms
from trimtab.spec import Precision, Recompute, Strategy

if TYPE_CHECKING:
    from trimtab.predict.pace import Pace
    from trimtab.spec import Setting, Trace, Work

QUEUE = 1000
"""Launches that the host may be ahead of the device; then it waits."""
BUCKET_BYTES = 25 * 2**20
"""DDP reduces gradients in buckets of this size while the backward pass goes on."""
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


FUSED = 0.57
"""What is left, after the compiler has fused them, of the time that operations without arithmetic take one by
one: 0.56 for a GPT and 0.58 for a ResNet-50, eager and compiled on an H200."""
FUSED_KINDS = ("pointwise", "reduction")
FUSED_TOGETHER = 3
"""Operations that one fused kernel stands for."""


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
    fusing: bool = False,
) -> Clocks:
    """Let both clocks run through operations; `backward` says which of them autograd's engine hands out.

    With `fusing`, the operations are those of the eager step, and the compiler is taken to fuse them.
    """
    device_clock = busy = waited = 0.0
    host_clock = START_S
    ends: deque[float] = deque()
    for place, work in enumerate(works):
        behind = place in backward
        together = FUSED_TOGETHER if fusing and work.kind in FUSED_KINDS else 1
        after = bool(backward) and place >= backward.stop
        host_clock += _handing_out(work, host, backward=behind, after=after, compiled=compiled) / together
        if selective and not behind and not compiled and work.kernels:
            host_clock += SELECTIVE_S
        if work.kind == "wait":
            waited += max(0.0, device_clock - host_clock)
            host_clock = max(host_clock, device_clock)
            continue
        if not work.kernels or work.kind == "collective":
            continue
        if len(ends) >= QUEUE:
            free_at = ends.popleft()
            waited += max(0.0, free_at - host_clock)
            host_clock = max(host_clock, free_at)
        share = FUSED if together > 1 else 1.0
        taken = share * pace.seconds(work) + GAP_S / together
        busy += taken
        device_clock = max(device_clock, host_clock) + taken
        if work.kind == "recurrent":
            # The device works off the first steps while the host hands out the next.
            host_clock += pace.handing_out(work)
            device_clock = max(device_clock, host_clock)
        ends.append(device_clock)
    return Clocks(max(host_clock, device_clock), busy, host_clock - waited)


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

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.memory_s + self.launch_s + self.communication_s


ARITHMETIC = {"matrix", "attention", "convolution", "recurrent"}


def step(  # noqa: PLR0913 - what runs, how fast, and where
    trace: Trace, setting: Setting, pace: Pace, host: Host, among: comms.Links, *, fusing: bool = False
) -> Step:
    """Seconds of an optimizer step: `accumulation` passes forward and backward, and the optimizer.

    With `fusing`, a compiled step is guessed from the trace of the eager one. A trace through the compiler
    itself says it better, and takes a minute where this takes none.
    """
    works = [trace.works[number] for number in trace.sequence]
    begin = trace.phases.get("backward", len(works))
    end = trace.phases.get("optimizer", len(works))
    how: dict[str, bool] = {
        "compiled": setting.compile,
        "selective": setting.recompute is Recompute.SELECTIVE,
        "fusing": fusing,
    }
    whole = run(works, pace, host, backward=range(begin, end), **how)
    extra = setting.accumulation - 1
    passes = run(works[:end], pace, host, backward=range(begin, end), **how) if extra else None
    total = whole.total_s + (extra * passes.total_s if passes else 0.0)
    busy = whole.device_s + (extra * passes.device_s if passes else 0.0)
    forward = sum(pace.seconds(one) for one in works[:begin] if one.kernels and one.kind != "collective")
    back = sum(pace.seconds(one) for one in works[begin:end] if one.kernels and one.kind != "collective")
    exposed = communication(trace, setting, among, forward_s=forward, backward_s=back)
    arithmetic = sum(pace.seconds(one) for one in works if one.kind in ARITHMETIC)
    if passes:
        arithmetic += extra * sum(pace.seconds(one) for one in works[:end] if one.kind in ARITHMETIC)
    share = arithmetic / busy if busy else 0.0
    filled = min(1.0, max(0.0, (share - THROTTLES_FROM) / (THROTTLES_AT - THROTTLES_FROM)))
    slowed = arithmetic * THROTTLED * filled
    return Step(
        compute_s=arithmetic + slowed,
        memory_s=busy - arithmetic,
        launch_s=max(0.0, total - busy - slowed),
        communication_s=exposed,
    )


def model_flops(trace: Trace) -> int:
    """Operations of one forward and backward pass on one rank, what is computed again left out."""
    return sum(trace.works[number].flops for number in trace.sequence) - trace.recomputed_flops


def gradient_bytes(trace: Trace, setting: Setting) -> int:
    """What a replica has to tell the others."""
    return trace.trainable * (2 if setting.precision is Precision.BF16_TRUE else 4)


def communication(
    trace: Trace, setting: Setting, among: comms.Links, *, forward_s: float, backward_s: float
) -> float:
    """Seconds of collectives that computing does not hide."""
    ranks = setting.gpus
    gradients = gradient_bytes(trace, setting)
    if setting.strategy in (Strategy.DDP, Strategy.BRANCH, Strategy.HYBRID):
        whole = comms.all_reduce_s(gradients, ranks, among)
        buckets = -(-gradients // BUCKET_BYTES)
        whole += max(0, buckets - 1) * comms.all_reduce_s(0, ranks, among)
        # The last bucket is only full when the backward pass is over.
        last = comms.all_reduce_s(min(gradients, BUCKET_BYTES), ranks, among)
        return max(last, whole - OVERLAPPED * backward_s)
    if setting.strategy in (Strategy.FSDP, Strategy.HSDP):
        return _sharded(trace, setting, among, forward_s=forward_s, backward_s=backward_s)
    return 0.0


def _sharded(
    trace: Trace, setting: Setting, among: comms.Links, *, forward_s: float, backward_s: float
) -> float:
    """Weights are gathered before each use, gradients scattered after; each while the last block computes."""
    shards = setting.mesh.dp_shard
    gathers = [one for one in _collectives(trace) if "gather" in one.op]
    scatters = [one for one in _collectives(trace) if "scatter" in one.op]
    gathered = sum(comms.all_gather_s(one.read_bytes, shards, among) for one in gathers)
    scattered = sum(comms.reduce_scatter_s(one.read_bytes, shards, among) for one in scatters)
    first = comms.all_gather_s(max((one.read_bytes for one in gathers), default=0), shards, among)
    passes = setting.accumulation
    forward = max(first, gathered / 2 - OVERLAPPED * forward_s)
    backward = max(0.0, gathered / 2 + scattered - OVERLAPPED * backward_s)
    replicas = setting.mesh.dp_replicate
    across = (
        comms.all_reduce_s(gradient_bytes(trace, setting) // shards, replicas, among) if replicas > 1 else 0.0
    )
    return passes * (forward + backward) + max(0.0, across - OVERLAPPED * backward_s)


def _collectives(trace: Trace) -> list[Work]:
    return [trace.works[number] for number in trace.sequence if trace.works[number].kind == "collective"]
