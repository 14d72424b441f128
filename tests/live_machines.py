"""Machines at work: a machine's record with what its GPUs do at this moment."""

from __future__ import annotations

from typing import Any

import machines as m
from trimtab.probe.machine import Machine, replay_machine


def at_work(record: dict[str, Any], index: int = 0, **readings: Any) -> dict[str, Any]:
    """The record with readings of one GPU: busy and memory_busy in percent, watts, degrees, MHz, reasons."""
    key = f"gpu{index}"
    facts = {
        "busy": 98,
        "memory_busy": 40,
        "draw_w": 600,
        "degrees": 60,
        "mhz": 1980,
        "reasons": 0,
    } | readings
    answers = {
        f"nvmlDeviceGetUtilizationRates {key}": {"gpu": facts["busy"], "memory": facts["memory_busy"]},
        f"nvmlDeviceGetPowerUsage {key}": facts["draw_w"] * 1000,
        f"nvmlDeviceGetTemperature {key} 0": facts["degrees"],
        f"nvmlDeviceGetClockInfo {key} 1": facts["mhz"],
        f"nvmlDeviceGetCurrentClocksEventReasons {key}": facts["reasons"],
    }
    nvml = record["nvml"] | {question: {"answer": answer} for question, answer in answers.items()}
    return record | {"nvml": nvml}


def world(
    *readings: dict[str, Any], pids: tuple[int, ...] = (), used_mib: tuple[int, ...] = (), alive: bool = True
) -> Machine:
    """A machine of H100s at work, with a process on each."""
    count = max(len(readings), 1)
    held = used_mib or (40_000,) * count
    gpus = [
        m.h100(used_mib=held[index], processes=[(pids[index], held[index] * m.MIB)] if pids else [])
        for index in range(count)
    ]
    names = {f"process:{pid}": "python" for pid in pids} if alive else {}
    record = m.machine(gpus, host=names)
    for index, reading in enumerate(readings):
        record = at_work(record, index, **reading)
    return replay_machine(record)
