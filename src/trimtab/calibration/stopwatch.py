"""Time every different operation of a program on a GPU, under the same key as the tracer gives it.

Like the tracer's recorder, the stopwatch is a dispatch mode below autograd, so that calibrated operations
match predicted ones.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.trace.op_cost import describe_work, read_schema_traits

if TYPE_CHECKING:
    from trimtab.spec import Work

QUEUE_CYCLES = 1_500_000
"""The GPU sleeps for this many cycles, about a millisecond, while the host queues the repeats. Otherwise
short kernels would be timed at the host's speed."""
AIM_S = 1.5e-3
"""Each operation is repeated for about this many seconds."""
MOST_REPEATS = 40
LONG_S = 20e-3
"""Operations that take longer are timed only twice."""
UNTIMED = {"wait", "view", "call", "collective", "transfer"}


class Stopwatch(TorchDispatchMode):
    """Measures the seconds of each different operation when it first occurs."""

    def __init__(self, until: float = float("inf")) -> None:
        super().__init__()
        self.times: dict[Work, float] = {}
        self.until = until
        """Nothing new is timed after this time of time.monotonic()."""
        self.counts: dict[Work, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().partition(".")[0] if hasattr(func, "name") else str(func)
        done = describe_work(func, name, args, kwargs, out)
        if done is None or done.kind in UNTIMED or not done.kernels:
            return out
        self.counts[done] = self.counts.get(done, 0) + 1
        if done not in self.times and time.monotonic() < self.until and _is_repeatable(func, args):
            self.times[done] = _time_op(func, args, kwargs)
        return out


def _is_repeatable(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation can be repeated: indices changed in place would soon be out of range."""
    _, written = read_schema_traits(func)
    changed = [args[place] for place in written if place < len(args)]
    return all(not isinstance(value, torch.Tensor) or value.is_floating_point() for value in changed)


def _time_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    once = _time_repeats(func, args, kwargs, 2)
    if once > LONG_S:
        return once
    repeats = max(3, min(MOST_REPEATS, round(AIM_S / max(once, 1e-7))))
    return min(_time_repeats(func, args, kwargs, repeats), once)


def _time_repeats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(QUEUE_CYCLES)  # noqa: SLF001 - there is no public way to keep the GPU busy
    begin.record()
    for _ in range(count):
        func(*args, **kwargs)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count
