"""One rank of a run: `python -m trimtab.training.worker TASK`, as torchrun starts it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trimtab.errors import TrimtabError
from trimtab.training.rank_files import (
    LOST_PEER_CODE,
    RankFiles,
    end_with_parent,
    find_rank_files,
    is_lost_peer,
)

if TYPE_CHECKING:
    from trimtab.training.task import RunEnding, TrainTask


def main(arguments: list[str]) -> int:
    """Run a task from its file; notes for the parent where there is one."""
    control = find_rank_files()
    if control is not None:
        if control.is_over():
            return 0
        end_with_parent()
        # Until the run listens, Ctrl-C ends this process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from trimtab.training.task import TrainTask

    file = Path(arguments[0])
    task = TrainTask.from_json(file.read_bytes(), origin=str(file))
    try:
        ending = run_task(task)
    except TrimtabError as error:
        if control is None:
            raise
        cause = error.__cause__
        control.fail(error, trace="".join(traceback.format_exception(cause)) if cause else "")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - every rank ends with a word on why
        return _report_crash(error, control)
    if control is not None and not ending.asked:
        control.done()
    return ending.exit_code


def run_task(task: TrainTask) -> RunEnding:
    """Train, in this process, as the rank that its variables make it."""
    from trimtab.training.optimizer_step import allocator_variables

    if task.plan is not None:
        # Before CUDA starts, or they are not heard.
        os.environ.update(allocator_variables(task.plan.choice, os.environ))
    from trimtab.training.loop import train

    return train(task)


def _report_crash(error: Exception, control: RankFiles | None) -> int:
    if is_lost_peer(error):
        _print_line(f"another rank is gone: {str(error).splitlines()[0][:200]}")
        return LOST_PEER_CODE
    traceback.print_exc()
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    trace = "".join(traceback.format_exception(error))
    if control is not None and control.crash(text, count_steps(), trace=trace):
        control.fail(
            TrimtabError(
                "trimtab train",
                found=f"it crashed again and again: {text}",
                cure="This is a bug in trimtab, or in a library under it: please report the traceback above.",
            ),
            trace=trace,
        )
    return 1


def count_steps() -> int:
    """How far this process had come; 0 where the loop was never reached."""
    loop = sys.modules.get("trimtab.training.loop")
    return int(loop.Progress.step) if loop else 0


def _print_line(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"trimtab: rank {rank}: {text}\n")


def exit_now(code: int) -> NoReturn:
    """End at once, without waiting for threads and groups whose peers may be gone."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
