"""What torch.compile tries out on the device before it decides, and what it would find.

Inductor runs two kinds of trials in the first step: whether a matrix product is faster with its sides padded
to a round number, and which of several configurations of a fused kernel is fastest. Both take memory, and the
first changes the program. The trials' own code is run on fake tensors, so that what they allocate is written
down; their times come from a roofline (`Clock`). Configurations are counted by torch's own heuristics.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from trimtab.engine.precision import dtype_name
from trimtab.spec.precision import BFLOAT16, FLOAT16, FLOAT32, TF32
from trimtab.trace.kernels import MATRIX_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Device
    from trimtab.trace.recorder import Recorder

MILLISECONDS, GIGA, TERA = 1e3, 1e9, 1e12
VECTOR_BYTES = 16
"""Rows that do not start at multiples of this keep a matrix product from the fast tensor core kernels."""
UNALIGNED_RATE = 1 / 3
"""What is left of the rate then. Hopper falls back to kernels made for Ampere; a coarse figure."""
UNKNOWN_BANDWIDTH = 1e12
UNKNOWN_RATE = 1e14


class Clock(TorchDispatchMode):
    """Adds up how long operations would take: arithmetic of matrix products, memory traffic of the rest."""

    def __init__(self, target: Device) -> None:
        super().__init__()
        self.peaks = target.peaks
        self.bandwidth = target.bandwidth_bytes_per_s or UNKNOWN_BANDWIDTH
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        tensors = [one for one in tree_leaves((args, out)) if isinstance(one, torch.Tensor)]
        if func.is_view or not tensors:
            return out
        traffic = sum(one.numel() * one.element_size() for one in tensors) / self.bandwidth
        arithmetic = self._product(args, out) if name in MATRIX_OPS else 0.0
        self.seconds += max(traffic, arithmetic)
        return out

    def _product(self, args: tuple[Any, ...], out: torch.Tensor) -> float:
        left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
        rate = self.rate(left.dtype)
        if not all(map(_aligned, (left, right, out))):
            rate *= UNALIGNED_RATE
        return 2 * out.numel() * left.shape[-1] / rate

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a matrix product."""
        peaks = self.peaks
        name = dtype_name(dtype)
        if name not in (FLOAT16, BFLOAT16):
            name = TF32 if torch.backends.cuda.matmul.allow_tf32 else FLOAT32
        return peaks.of(name) or peaks.fp32 or UNKNOWN_RATE


def _aligned(matrix: torch.Tensor) -> bool:
    rows = max(matrix.stride()[-2:])
    return rows * matrix.element_size() % VECTOR_BYTES == 0


def install(recorder: Recorder) -> None:
    """Let trials of padding run on the pretended device."""
    import torch._inductor.utils as inductor_utils
    from torch._inductor.fx_passes import pad_mm

    target = recorder.kernels.target
    clock = Clock(target)

    def timed(run: Callable[[], Any], **_: Any) -> float:
        """Milliseconds, as torch's own benchmark gives them, with the memory that it takes."""
        run()
        clock.seconds = 0.0
        with recorder.holding(cache_bytes(), "trial"), clock:
            run()
        return clock.seconds * MILLISECONDS

    @contextlib.contextmanager
    def on_device() -> Iterator[None]:
        with aloud(recorder):
            yield

    replace(pad_mm, no_dispatch=on_device, get_do_bench=lambda: timed)
    replace(
        inductor_utils,
        get_device_tflops=lambda dtype: clock.rate(dtype) / TERA,
        get_gpu_dram_gbps=lambda: int(clock.bandwidth / GIGA),
    )


def replace(place: Any, **parts: Any) -> None:
    """Put other parts into a module or a class of torch."""
    for name, part in parts.items():
        setattr(place, name, part)


@contextlib.contextmanager
def aloud(recorder: Recorder) -> Iterator[None]:
    """Within torch's compiler: operations are on the pretended device again, and are written down."""
    before, recorder.paused = recorder.paused, False
    with _disable_current_modes(), recorder.fake_mode:
        _push_mode(recorder)
        try:
            yield
        finally:
            _pop_mode()
            recorder.paused = before


@contextlib.contextmanager
def aside(recorder: Recorder) -> Iterator[None]:
    """While torch's compiler thinks: what it does with tensors is nobody's memory."""
    before, recorder.paused = recorder.paused, True
    try:
        with _disable_current_modes():
            yield
    finally:
        recorder.paused = before


def cache_bytes() -> int:
    """What a benchmark overwrites between two runs, so that nothing is left in the cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


DECORATOR = re.compile(r"^@(triton_heuristics\.\w+\(.*?^\))$", re.MULTILINE | re.DOTALL)


class Tuning:
    """How many configurations of a fused kernel are tried, and which of its arguments each trial copies."""

    def __init__(self, source: str) -> None:
        self.configurations = 1
        self.mutated: tuple[str, ...] = ()
        self.spares_memory = True
        """Whether a copy that would raise the peak is made on the host instead."""
        found = DECORATOR.search(source)
        if found is not None:
            self._ask(found[1])

    def _ask(self, decorator: str) -> None:
        """Let torch's heuristics choose configurations, and catch them on their way to Triton."""
        from torch._inductor.runtime import hints, triton_heuristics

        def caught(_: Any, configs: Any, *__: Any, inductor_meta: Any = None, **___: Any) -> None:
            meta = inductor_meta or {}
            self.configurations = len(triton_heuristics.unique_configs(configs))
            self.mutated = tuple(meta.get("mutated_arg_names", ()))
            self.spares_memory = bool(meta.get("optimize_mem", True))

        names = {name: getattr(hints, name) for name in dir(hints) if not name.startswith("__")}
        names |= {"triton_heuristics": triton_heuristics, "__file__": "kernel.py"}
        names["AttrsDescriptor"] = lambda **_: None
        place: Any = triton_heuristics
        whole, config = place.cached_autotune, place.Config
        replace(place, cached_autotune=caught, Config=Config if config is object else config)
        try:
            eval(decorator, names)  # noqa: S307 - text that torch has just made
        except Exception:  # noqa: BLE001 - one configuration, then: no trial
            self.configurations = 1
        finally:
            replace(place, cached_autotune=whole, Config=config)


class Config:
    """Triton's noun, for builds without Triton."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **more: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.__dict__.update(more)

    def all_kwargs(self) -> dict[str, Any]:
        """Everything about it."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Balance:
    """Bytes in use and their peak so far, as torch.cuda would tell a benchmark."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.read = self.used = self.peak = 0

    def spare(self) -> int:
        """How much could be taken without a new peak."""
        order, sizes = self.recorder.order, self.recorder.sizes
        for event in order[self.read :]:
            self.used += sizes[event] if event >= 0 else -sizes[~event]
            self.peak = max(self.peak, self.used)
        self.read = len(order)
        return self.peak - self.used
