"""Follow training that a script starts in processes of its own, with torch.multiprocessing."""

from __future__ import annotations

import inspect
import multiprocessing.process
import sys
from typing import Any

import torch

from trimtab.scripts.observer import Observer, find_script_line, put

GPU_WORDS = ("init_distributed", "CUDA_VISIBLE_DEVICES", "cuda.set_device")
"""A function with one of these runs in processes that have a GPU each."""
BaseProcess = multiprocessing.process.BaseProcess


def patch_processes(observer: Observer) -> None:
    """Run the first training process of a script in this one, and take the others to do the same.

    Processes that load data or run environments are started for real.
    """
    waiting: list[Any] = []
    done: set[int] = set()
    start, join, is_alive = BaseProcess.start, BaseProcess.join, BaseProcess.is_alive

    def start_process(process: Any) -> None:
        if not trains(process):
            start(process)
            return
        process._trimtab_line = find_script_line()
        waiting.append(process)

    def run_first() -> None:
        """Run the first process once the script waits: all of them have been started then."""
        if done or not waiting:
            return
        done.update(id(process) for process in waiting)
        first = waiting[0]
        if len(waiting) > 1:
            observer.notes[
                f"the script starts {len(waiting)} training processes ({first._trimtab_line}): the first one "
                "was followed; on one GPU, each of the others takes as much memory again"
            ] = None
        first.run()

    def join_process(process: Any, timeout: float | None = None) -> None:
        if not _is_waiting(process, waiting):
            join(process, timeout)
            return
        run_first()

    def is_process_alive(process: Any) -> bool:
        if not _is_waiting(process, waiting):
            return is_alive(process)
        run_first()
        return False

    observer.run_waiting = run_first
    put(BaseProcess, "start", start_process)
    put(BaseProcess, "join", join_process)
    put(BaseProcess, "is_alive", is_process_alive)


def _is_waiting(process: Any, waiting: list[Any]) -> bool:
    return any(process is other for other in waiting)


def trains(process: Any) -> bool:
    """Return whether a process trains: it gets a model, starts a process group, or takes a GPU."""
    target = getattr(process, "_target", None)
    given = [*getattr(process, "_args", ()), *getattr(process, "_kwargs", {}).values()]
    if any(isinstance(value, torch.nn.Module) and has_any_parameter(value) for value in given):
        return True
    if target is None or any(_is_channel(value) for value in given):
        return False
    if type(process).__module__.startswith("torch.utils.data"):
        return False
    module = sys.modules.get(getattr(target, "__module__", ""), None)
    if "init_process_group" in _read_source(module):
        return True
    text = _read_source(target)
    return any(word in text for word in GPU_WORDS)


def _read_source(owner: Any) -> str:
    """Return the source text of a module or function; empty if there is none."""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def has_any_parameter(module: torch.nn.Module) -> bool:
    """Return whether a module has a parameter."""
    return next(module.parameters(), None) is not None


def _is_channel(value: Any) -> bool:
    """Return whether a value connects two processes, so that both must run."""
    return type(value).__module__.startswith("multiprocessing.") and any(
        hasattr(value, name) for name in ("put", "recv", "send", "get")
    )
