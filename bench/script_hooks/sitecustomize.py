"""Hooks that bench/scripts.py puts on PYTHONPATH, so that a public script runs unmodified and is measured.

Environment variables say what to do; without them this module changes nothing:

TRIMTAB_SCRIPT_PACKAGES   a folder appended to sys.path, so that installed packages win over it
TRIMTAB_SCRIPT_STAND_IN   "cifar": accept generated CIFAR files, whose checksums are not the published ones
TRIMTAB_SCRIPT_RANKS      run as rank 0 of that many ranks, with collectives that move nothing
TRIMTAB_SCRIPT_MEASURE    a file for the measurements of the first steps; the process ends after them
TRIMTAB_SCRIPT_STEPS      how many steps to measure
TRIMTAB_SCRIPT_COUNT      "optimizer" or "backward": which call ends a step
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MEASURE_SETTING = "TRIMTAB_SCRIPT_MEASURE"
RANKS_SETTING = "TRIMTAB_SCRIPT_RANKS"


class AfterImport(importlib.abc.MetaPathFinder):
    """Call a function with a module when it has been imported."""

    def __init__(self, module: str, hook: Callable[[ModuleType], None]) -> None:
        self.module = module
        self.hook = hook
        self.is_searching = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module without this finder, and wrap its loader."""
        del path, target
        if fullname != self.module or self.is_searching:
            return None
        # Libraries also search for the module without importing it, so this finder stays.
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            self.hook(module)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


class StepRecorder:
    """Record memory and time of each step, and end the process after the last one."""

    def __init__(self, torch: Any, file: Path, steps: int) -> None:
        self.torch = torch
        self.file = file
        self.steps = steps
        self.rows: list[dict[str, float]] = []
        self.loader_s = 0.0
        self.began = time.perf_counter()
        self.first_optimizer: int | None = None

    def end_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        """Count a step whenever the optimizer that stepped first steps again."""
        if self.first_optimizer is None:
            self.first_optimizer = id(optimizer)
        if id(optimizer) == self.first_optimizer:
            self.end_step()

    def end_step(self) -> None:
        """Write a row; after the last one, the file."""
        cuda = self.torch.cuda
        if cuda.is_available():
            cuda.synchronize()
        now = time.perf_counter()
        row: dict[str, float] = {"wall_s": now - self.began, "loader_s": self.loader_s}
        if cuda.is_available():
            free, total = cuda.mem_get_info()
            row |= {
                "allocated_bytes": cuda.max_memory_allocated(),
                "reserved_bytes": cuda.max_memory_reserved(),
                "used_bytes": total - free,
            }
            cuda.reset_peak_memory_stats()
        self.rows.append(row)
        if len(self.rows) >= self.steps:
            self.write()
            sys.stdout.flush()
            # Nothing of the script runs on: no evaluation, no saving, no waiting for worker processes.
            os._exit(0)
        self.loader_s = 0.0
        self.began = time.perf_counter()

    def write(self) -> None:
        """Write what was measured."""
        cuda = self.torch.cuda
        found = {
            "steps": self.rows,
            "host_forward_s": time_bare_operation(self.torch) if cuda.is_available() else None,
            "device": cuda.get_device_name() if cuda.is_available() else "cpu",
            "torch": str(self.torch.__version__),
        }
        self.file.write_text(json.dumps(found), encoding="utf-8")

    def time_loader(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the DataLoader's fetch, with the wait for it counted apart from the work on the GPU."""

        def timed_fetch(iterator: Any) -> Any:
            if self.torch.cuda.is_available() and self.torch.cuda.is_initialized():
                self.torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                return fetch(iterator)
            finally:
                self.loader_s += time.perf_counter() - began

        return timed_fetch


def time_bare_operation(torch: Any, count: int = 400, rounds: int = 5) -> float:
    """Return the host's seconds for an operation, as `trimtab calibrate` measures them.

    Small models are as fast as the host, and hosts differ: the time of a step is to be seen beside this.
    """
    small = torch.ones(64, device="cuda")
    weight = torch.ones(64, device="cuda", requires_grad=True)
    times = []
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        for _ in range(rounds):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = weight
            for _ in range(count):
                out = out * small
            times.append((time.perf_counter() - began) / count)
    return sorted(times)[rounds // 2]


def measure_steps(torch: Any) -> None:
    """Record the first steps of this process."""
    file = Path(os.environ[MEASURE_SETTING])
    recorder = StepRecorder(torch, file, int(os.environ.get("TRIMTAB_SCRIPT_STEPS", "8")))
    import torch.utils.data.dataloader as loaders
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if os.environ.get("TRIMTAB_SCRIPT_COUNT") == "backward":
        backward = torch.Tensor.backward

        def counted_backward(tensor: Any, *given: Any, **named: Any) -> None:
            # The step of such a script is its work after the last backward pass and up to this one.
            recorder.end_step()
            backward(tensor, *given, **named)

        torch.Tensor.backward = counted_backward
    else:
        register_optimizer_step_post_hook(recorder.end_optimizer_step)
    iterator: Any = loaders._BaseDataLoaderIter  # noqa: SLF001 - the class that every DataLoader's iterator extends
    iterator.__next__ = recorder.time_loader(iterator.__next__)


def join_fake_group(torch: Any) -> None:
    """Make this process rank 0 of a group whose collectives move nothing."""
    ranks = int(os.environ[RANKS_SETTING])
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    join = dist.init_process_group

    def join_alone(*_: Any, **__: Any) -> None:
        join("fake", rank=0, world_size=ranks, store=FakeStore())

    dist.init_process_group = join_alone
    dist.distributed_c10d.init_process_group = join_alone
    if torch.cuda.is_available():
        # torch checks every device that it counts, once.
        torch.cuda.init()
    torch.cuda.device_count = lambda: ranks
    torch.accelerator.device_count = lambda: ranks


def change_torch(torch: Any) -> None:
    """Apply what the environment asks of torch."""
    if RANKS_SETTING in os.environ:
        join_fake_group(torch)
    if MEASURE_SETTING in os.environ:
        measure_steps(torch)


def accept_generated_images(cifar: Any) -> None:
    """Accept CIFAR files with any checksum."""
    for kind in (cifar.CIFAR10, cifar.CIFAR100):
        for listed in (kind.train_list, kind.test_list):
            listed[:] = [[name, None] for name, _ in listed]
        kind.meta = {**kind.meta, "md5": None}


def install() -> None:
    """Read the environment."""
    packages = os.environ.get("TRIMTAB_SCRIPT_PACKAGES")
    if packages:
        sys.path.append(packages)
    if MEASURE_SETTING in os.environ or RANKS_SETTING in os.environ:
        sys.meta_path.insert(0, AfterImport("torch", change_torch))
    if os.environ.get("TRIMTAB_SCRIPT_STAND_IN") == "cifar":
        sys.meta_path.insert(0, AfterImport("torchvision.datasets.cifar", accept_generated_images))


install()
