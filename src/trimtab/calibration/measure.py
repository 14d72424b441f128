"""Calibrate the GPU of this machine in a child process: time the operations of the calibration programs."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

from trimtab.errors import EnvironmentFault
from trimtab.spec import Calibration, Noun
from trimtab.trace.server import SendAnswer, ask, serve
from trimtab.version import VERSION

BUDGET_S = 120.0
"""For the programs; start-up and host measurements take extra time."""
TIMEOUT_S = 600


class CalibrationRequest(Noun, frozen=True, kw_only=True):
    """What the child process is asked to measure."""

    job: str = "calibrate"
    device: str = ""
    """The catalogue's name of the GPU, for the result."""
    budget_s: float = BUDGET_S
    only: str = ""
    """Text in the names of the programs to run; empty: all."""


def calibrate_in_child(device: str, *, budget_s: float = BUDGET_S, only: str = "") -> Calibration:
    """Calibrate in a child process and return the result; `only` selects programs by their names."""
    request = CalibrationRequest(device=device, budget_s=budget_s, only=only)
    answer = ask("trimtab.calibration.measure", request, {}, timeout_s=TIMEOUT_S, show=True)
    return Calibration.from_builtins(answer["calibration"])


def calibrate_here(request: CalibrationRequest) -> Calibration:
    """Calibrate in this process. It must do nothing else."""
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
    stopwatch = Stopwatch(until=begin + request.budget_s)
    for program in list_programs():
        if request.only not in program.name:
            continue
        if time.monotonic() > begin + request.budget_s:
            left_out.append(f"{program.name}: no time")
            continue
        if program.need_bytes > 0.8 * torch.cuda.mem_get_info()[0]:
            left_out.append(f"{program.name}: not enough memory")
            continue
        torch.manual_seed(0)
        try:
            with stopwatch:
                program.run()
        except RuntimeError as error:
            # Out of memory, or an operation that this device does not have.
            left_out.append(f"{program.name}: {str(error).splitlines()[0][:120]}")
        torch.cuda.empty_cache()
        if sys.stderr.isatty():
            print(f"\r{program.name:70.70}", end="", file=sys.stderr)  # noqa: T201 - progress
    if sys.stderr.isatty():
        print(f"\r{'':70}\r", end="", file=sys.stderr)  # noqa: T201
    return Calibration(
        device=request.device or torch.cuda.get_device_name(),
        versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "trimtab": VERSION},
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
