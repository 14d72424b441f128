"""Calibrates the GPU of this machine in a child process: runs the menu under the stopwatch."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

from trimtab.errors import EnvironmentFault
from trimtab.spec import Calibration, Noun
from trimtab.trace.server import SendAnswer, ask, serve

BUDGET_S = 50.0
"""For the menu; starting up and the host's costs come on top."""
TIMEOUT_S = 600


class CalibrationRequest(Noun, frozen=True, kw_only=True):
    """What to measure."""

    job: str = "calibrate"
    device: str = ""
    """The catalogue's name of the GPU, to write on the result."""
    budget_s: float = BUDGET_S


def calibrate_in_child(device: str, *, budget_s: float = BUDGET_S) -> Calibration:
    """Measure in a child process."""
    order = CalibrationRequest(device=device, budget_s=budget_s)
    answer = ask("trimtab.calibration.measure", order, {}, timeout_s=TIMEOUT_S, show=True)
    return Calibration.from_builtins(answer["calibration"])


def calibrate_here(order: CalibrationRequest) -> Calibration:
    """Measure here. Only in a process of its own."""
    import torch

    from trimtab.calibration.host import measure_copy_rates, measure_host_costs, measure_peer_rates
    from trimtab.calibration.programs import list_programs
    from trimtab.calibration.stopwatch import Stopwatch

    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "calibrate",
            found="torch finds no GPU here",
            cure="Run it on the machine with the GPU; elsewhere the catalogue's figures are used.",
        )
    begin = time.monotonic()
    left_out = []
    host = measure_host_costs()
    copies = measure_copy_rates()
    stopwatch = Stopwatch(until=begin + order.budget_s)
    for dish in list_programs():
        if time.monotonic() > begin + order.budget_s:
            left_out.append(f"{dish.name}: no time")
            continue
        if dish.need_bytes > 0.8 * torch.cuda.mem_get_info()[0]:
            left_out.append(f"{dish.name}: not enough memory")
            continue
        torch.manual_seed(0)
        try:
            with stopwatch:
                dish.run()
        except RuntimeError as error:
            # Out of memory, or an operation that this device does not have.
            left_out.append(f"{dish.name}: {str(error).splitlines()[0][:120]}")
        torch.cuda.empty_cache()
        if sys.stderr.isatty():
            print(f"\r{dish.name:70.70}", end="", file=sys.stderr)  # noqa: T201 - progress
    if sys.stderr.isatty():
        print(f"\r{'':70}\r", end="", file=sys.stderr)  # noqa: T201
    return Calibration(
        device=order.device or torch.cuda.get_device_name(),
        versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        taken_on=datetime.now(UTC).date().isoformat(),
        works=tuple(stopwatch.times),
        seconds=tuple(stopwatch.times.values()),
        host=host,
        copy_bytes_per_s=copies,
        link_bytes_per_s=measure_peer_rates(),
        left_out=tuple(left_out),
    )


def _serve_request(text: str, say: SendAnswer) -> None:
    say({"calibration": calibrate_here(CalibrationRequest.from_json(text)).to_builtins()})


if __name__ == "__main__":
    serve(_serve_request)
