"""Estimate the host's part in a job that offloads: its memory, copies over PCIe, the optimizer on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.predict.host_link import count_phase_transfers
from trimtab.spec import HostMemory, Offload
from trimtab.spec.precision import DTYPE_BYTES
from trimtab.strategies import strategy_of
from trimtab.units import GIB, format_bytes

if TYPE_CHECKING:
    from trimtab.predict.communication import Links
    from trimtab.spec import Cluster, Setting, Trace

PROCESS_BYTES = 2 * GIB
"""Memory of a process without its tensors: Python, torch and the host part of CUDA. Assumed, not measured."""


def has_state_on_host(setting: Setting) -> bool:
    """Whether optimizer states, and perhaps weights, are in host memory."""
    return Offload.PARAMS in setting.offload or Offload.OPTIMIZER in setting.offload


def estimate_host(trace: Trace, setting: Setting, cluster: Cluster | None) -> HostMemory | None:
    """Return the host memory of a setting; None if it offloads nothing.

    In the steps a node holds its processes, their shards of weights and gradients, and optimizer states. From
    the first checkpoint on, each process also has the copy that is written while training goes on.
    Before the steps it holds the model as it is built: one copy, because other ranks get their values from
    rank 0 where the host is small. It needs the larger of the two.
    """
    if not setting.offload:
        return None
    nodes = cluster.nodes if cluster is not None else ()
    per_node = min(setting.gpus, max((len(node.devices) for node in nodes), default=setting.gpus) or 1)
    count_micro_batches = strategy_of(setting).held_micro_batches
    blocks = [
        rank.pinned_bytes + round(count_micro_batches(setting, rank.part) * rank.host_bytes)
        for rank in trace.ranks
    ]
    pinned = max(blocks)
    checkpoint = max(_count_checkpoint_bytes(rank, setting) for rank in trace.ranks)
    state = max(size + rank.host_state_bytes for rank, size in zip(trace.ranks, blocks, strict=True))
    is_built_on_host = strategy_of(setting).is_built_on_host or setting.base.storage.is_quantized
    built = trace.parameters * DTYPE_BYTES[setting.dtypes.weights] if is_built_on_host else 0
    node_bytes = per_node * PROCESS_BYTES + max(per_node * (state + checkpoint), built)
    sizes = [node.ram_bytes for node in nodes]
    known = [size for size in sizes if size is not None]
    capacity = min(known) if known and len(known) == len(sizes) else None
    return HostMemory(
        rank_bytes=PROCESS_BYTES + state,
        pinned_bytes=pinned,
        node_bytes=node_bytes,
        checkpoint_bytes=checkpoint,
        capacity_bytes=capacity,
        fits=None if capacity is None else node_bytes <= capacity,
    )


def _count_checkpoint_bytes(rank: Trace, setting: Setting) -> int:
    """Return the bytes of a rank's copy of its weights and optimizer states.

    Copies of tensors on the device are pinned. Those of weights whose optimizer is on the host take blocks
    like the copies that it updates. Of other weights the sizes are not known one by one.
    """
    if strategy_of(setting).is_sharded or not rank.pinned_sizes:
        return rank.checkpoint_bytes
    weights = rank.checkpoint_bytes - rank.host_state_bytes
    return round(weights * rank.pinned_bytes / sum(rank.pinned_sizes)) + rank.host_state_bytes


def list_host_assumptions(setting: Setting, host: HostMemory | None, links: Links | None) -> list[str]:
    """Return what the figures of the host take for granted."""
    if host is None:
        return []
    process = (
        f"host memory: {format_bytes(PROCESS_BYTES)} for each process itself (Python, torch, CUDA), not "
        "measured; data loader processes are not counted"
    )
    notes = [process]
    if host.capacity_bytes is None:
        notes.append("host memory: that of the nodes is unknown; state it with --host-memory 512GiB")
    if links is not None and has_state_on_host(setting):
        copied = (
            "weights and gradients are copied beside the computation"
            if strategy_of(setting).is_sharded
            else "the computation waits for copies of gradients and updated weights"
        )
        notes.append(
            f"offload: {copied}; the optimizer on the CPU uses {links.host_memory / 1e9:.3g} GB/s of host "
            "memory a process, which was not measured"
        )
    return notes


def offloaded_state_s(  # noqa: PLR0913 - two of these are named
    trace: Trace,
    setting: Setting,
    host_bytes_per_s: float | None,
    update_bytes_per_s: float,
    *,
    hidden_forward_s: float,
    hidden_backward_s: float,
) -> float | None:
    """Return the seconds of all copies and of the optimizer on the CPU; None if it runs on the device.

    Shards are copied to the device before every gather, and gradients to the host after every reduction, on
    streams of their own. Offloaded activations use the same link. So the copies of a pass in one direction
    add up, those in the other run beside them, and what is longer than the computation counts. On a single
    device gradients are copied in the backward pass and weights after the update, both on the stream of the
    computation; activations move beside it. The optimizer reads and writes weights and states once and reads
    gradients once: 28 bytes a weight for AdamW in fp32.
    """
    if not has_state_on_host(setting) or host_bytes_per_s is None:
        return None
    forward, backward, update = count_phase_transfers(trace)
    if strategy_of(setting).is_sharded:
        beside, waited = (max(forward), max(backward)), 0
    else:
        beside, waited = (forward.outward, backward.back), backward.outward
    hidden = (hidden_forward_s, hidden_backward_s)
    exposed = sum(max(0.0, size / host_bytes_per_s - most) for size, most in zip(beside, hidden, strict=True))
    copies = setting.accumulation * (exposed + waited / host_bytes_per_s) + sum(update) / host_bytes_per_s
    # Gradients are as large as the weights that they update.
    return copies + (3 * backward.outward + 2 * trace.host_state_bytes) / update_bytes_per_s
