"""From a trace and a device to an Estimate. Times are not predicted yet, and stay None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.predict.memory import Memory, memory
from trimtab.spec import Allocator, Estimate, Strategy

if TYPE_CHECKING:
    from trimtab.spec import Device, Setting, Trace

MEASURED_CONTEXT = "H200 SXM 141GB"


def estimate(trace: Trace, setting: Setting, device: Device) -> tuple[Estimate, Memory]:
    """What the setting would need on the device, and the details behind it."""
    found = memory(
        trace,
        expandable=setting.allocator is Allocator.EXPANDABLE,
        sharded=setting.strategy in (Strategy.FSDP, Strategy.HSDP),
    )
    capacity = device.free_bytes if device.free_bytes is not None else device.memory_bytes
    return (
        Estimate(
            allocated_bytes=found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            process_bytes=found.process_bytes,
            capacity_bytes=capacity,
            fits=found.band.high_bytes <= capacity,
            parts=found.parts,
            band=found.band,
            assumptions=(*trace.assumptions, *_assumed(setting, device)),
        ),
        found,
    )


def _assumed(setting: Setting, device: Device) -> list[str]:
    said = []
    if device.model != MEASURED_CONTEXT:
        said.append(
            "the CUDA context is taken to be as large as on an H200 (760 MiB); it was not measured here"
        )
    if setting.gpus > 1:
        said.append("NCCL's own buffers are not counted: they take 0.2 to 2 GiB, by GPUs and topology")
    return said
