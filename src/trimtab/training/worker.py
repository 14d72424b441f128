"""Entry point of one rank: torchrun starts `python -m trimtab.training.worker TASK`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trimtab.errors import TrimtabError
from trimtab.training.rank_messages import (
    LOST_PEER_CODE,
    RankFiles,
    end_with_parent,
    find_rank_files,
    is_lost_peer,
)

if TYPE_CHECKING:
    from trimtab.training.task import RunEnding, TrainTask


def main(arguments: list[str]) -> int:
    """Run a task from its file; report the end to the parent process, if there is one."""
    rank_files = find_rank_files()
    if rank_files is not None:
        if rank_files.is_over():
            return 0
        end_with_parent()
        rank_files.add_rank()
        # Until the run handles signals, Ctrl-C ends this process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from trimtab.training.task import TrainTask

    file = Path(arguments[0])
    task = TrainTask.from_json(file.read_bytes(), origin=str(file))
    try:
        ending = run_task(task)
    except TrimtabError as error:
        if rank_files is None:
            raise
        cause = error.__cause__
        rank_files.write_error(error, trace="".join(traceback.format_exception(cause)) if cause else "")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - every rank reports why it ends
        return _report_crash(error, rank_files)
    if rank_files is not None and not ending.asked:
        rank_files.mark_done()
    return ending.exit_code


def run_task(task: TrainTask) -> RunEnding:
    """Train in this process, as the rank that its environment variables say."""
    from trimtab.training.torchrun import allocator_variables

    if task.plan is not None:
        # CUDA reads them only when it starts.
        os.environ.update(allocator_variables(task.plan.choice, os.environ))
    from trimtab.training.loop import train

    return train(task)


def _report_crash(error: Exception, rank_files: RankFiles | None) -> int:
    from trimtab.training.oom_recovery import RestartWithSmaller

    if isinstance(error, RestartWithSmaller):
        _print_line(str(error))
        return LOST_PEER_CODE
    if is_lost_peer(error):
        _print_line(f"another rank is gone: {str(error).splitlines()[0][:200]}")
        return LOST_PEER_CODE
    traceback.print_exc()
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    trace = "".join(traceback.format_exception(error))
    if rank_files is not None and rank_files.add_crash(text, count_steps(), trace=trace):
        rank_files.write_error(
            TrimtabError(
                "trimtab train",
                found=f"it crashed again and again: {text}",
                cure="This is a bug in trimtab, or in a library under it: please report the traceback above.",
            ),
            trace=trace,
        )
    return 1


def count_steps() -> int:
    """Return the steps that this process has finished; 0 if the loop never started."""
    loop = sys.modules.get("trimtab.training.loop")
    return int(loop.RunProgress.step) if loop else 0


def _print_line(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"trimtab: rank {rank}: {text}\n")


def exit_now(code: int) -> NoReturn:
    """Exit at once, without waiting for threads or process groups whose peers may be gone."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
