"""Runs torch.compile itself on the pretended device, and then the code that inductor has written.

Dynamo, AOTAutograd, the partitioner, inductor's passes, its scheduler and its memory planning are torch's
own, unchanged: graph breaks, fusion, reuse of buffers and what is saved for the backward pass are those of
the installed version of torch. Only the end is replaced: fused kernels are not compiled (`Fused`), and the
code around them, which allocates buffers and calls libraries, runs on fake tensors under the recorder.
Neither Triton nor a compiler is needed. Covers inductor in its default mode; not CUDA graphs or
`max-autotune`.

Only for a child process that traces and ends: nothing is put back.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import re
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

import trimtab.trace
from trimtab.engine.precision import dtype_name
from trimtab.spec import Work
from trimtab.spec.precision import BFLOAT16, FLOAT16, FLOAT32, TF32
from trimtab.trace.kernels import MATRIX_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Device
    from trimtab.trace.recorder import Recorder


# What torch.compile tries out on the device before it decides, and what it would find.
#
# Inductor runs two kinds of trials in the first step: whether a matrix product is faster with its sides
# padded to a round number, and which of several configurations of a fused kernel is fastest. Both take
# memory, and the first changes the program. The trials' own code is run on fake tensors, so that what they
# allocate is written down; their times come from a roofline (`Clock`). Configurations are counted by
# torch's own heuristics.


MILLISECONDS, GIGA, TERA = 1e3, 1e9, 1e12
VECTOR_BYTES = 16
"""Rows that do not start at multiples of this keep a matrix product from the fast tensor core kernels."""
UNALIGNED_RATE = 1 / 3
"""What is left of the rate then. Hopper falls back to kernels made for Ampere; a coarse figure."""
UNKNOWN_BANDWIDTH = 1e12
UNKNOWN_RATE = 1e14


class CostClock(TorchDispatchMode):
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
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        if func.is_view or not tensors:
            return out
        traffic = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / self.bandwidth
        arithmetic = self._product(args, out) if name in MATRIX_OPS else 0.0
        self.seconds += max(traffic, arithmetic)
        return out

    def _product(self, args: tuple[Any, ...], out: torch.Tensor) -> float:
        left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
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


def install_autotune(recorder: Recorder) -> None:
    """Let trials of padding run on the pretended device."""
    import torch._inductor.utils as inductor_utils
    from torch._inductor.fx_passes import pad_mm

    target = recorder.kernels.target
    clock = CostClock(target)

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
        replace(place, cached_autotune=caught, Config=TritonConfig if config is object else config)
        try:
            eval(decorator, names)  # noqa: S307 - text that torch has just made
        except Exception:  # noqa: BLE001 - one configuration, then: no trial
            self.configurations = 1
        finally:
            replace(place, cached_autotune=whole, Config=config)


class TritonConfig:
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


BYTES_OF_KERNEL = re.compile(r"'kernel_num_gb': ([\d.e+-]+)")
KERNEL_NAME = re.compile(r"^triton_\w{3}_|_\d+$")
"""What inductor puts around the names of the operations that it has fused."""
REDUCTIONS = ("triton_red", "triton_per", "triton_spl")
HOST = "cpp"
SIGNATURE = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)


class Fused:
    """A kernel that inductor has written: it is tuned at its first run, and otherwise only counted."""

    def __init__(self, recorder: Recorder, balance: Balance, name: str, source: str) -> None:
        self.recorder, self.balance, self.name, self.source = recorder, balance, name, source
        moved = BYTES_OF_KERNEL.search(source)
        self.moved_bytes = round(float(moved[1]) * GIGA) if moved else 0
        signature = SIGNATURE.search(source)
        self.arguments = [word.split(":")[0].strip() for word in signature[1].split(",")] if signature else []
        self._ran = False

    def run(self, *args: Any, **_: Any) -> None:
        """What a launch would be; the first one tries all configurations."""
        tensors = {
            name: value
            for name, value in zip(self.arguments, args, strict=False)
            if isinstance(value, torch.Tensor)
        }
        if not self._ran:
            self._ran = True
            self._tune(tensors)
        if self.recorder.working and self.name != HOST:
            self.recorder.note(self._work(tensors))

    def _work(self, tensors: dict[str, torch.Tensor]) -> Work:
        """What one launch computes and moves, by inductor's own count of bytes."""
        written = [value for name, value in tensors.items() if "out_ptr" in name]
        write_bytes = sum(map(_bytes, written))
        first = max(written, key=_bytes, default=None)
        kind = "reduction" if self.name.startswith(REDUCTIONS) else "pointwise"
        return Work(
            op=KERNEL_NAME.sub("", self.name),
            kind=kind,
            dtype=dtype_name(first.dtype) if first is not None else "",
            read_bytes=max(0, self.moved_bytes - write_bytes),
            write_bytes=write_bytes,
            dims=(0, first.shape[-1] if first is not None and first.dim() else 1),
        )

    def _tune(self, tensors: dict[str, torch.Tensor]) -> None:
        tuning = Tuning(self.source)
        if tuning.configurations == 1:
            return
        spare = self.balance.spare()
        copied = []
        for name in tuning.mutated:
            if name not in tensors:
                continue
            if tuning.spares_memory and _bytes(tensors[name]) > spare:
                continue
            spare -= _bytes(tensors[name])
            copied.append(_bytes(tensors[name]))
        for _ in range(tuning.configurations):
            self.recorder.together(copied, "tuning")
            with self.recorder.holding(cache_bytes(), "tuning"):
                self.recorder.together(copied, "tuning")

    def __call__(self, *_: Any) -> None:
        """A kernel for the host: it touches no device memory."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def watch(recorder: Recorder) -> None:
    """Be ready for torch.compile, whoever calls it: a setting, or the job's own code."""
    whole = torch.compile

    @functools.wraps(whole)
    def compile_here(*args: Any, mode: str | None = None, options: Any = None, **kwargs: Any) -> Any:
        if not recorder.compiles:
            recorder.compiles = True
            install(recorder)
        if mode not in (None, "default") or options:
            recorder.kernels.assume(f"torch.compile is taken in its default mode, not {mode or options}")
        return whole(*args, **kwargs)

    replace(torch, compile=compile_here)


def install(recorder: Recorder) -> None:
    """Prepare torch's compiler for the pretended device."""
    _let_dynamo_look(recorder)
    _answer_for_cuda()
    _fold_on_host()
    _replace_ends(recorder)
    install_autotune(recorder)


def _let_dynamo_look(recorder: Recorder) -> None:
    """Dynamo passes over code under a dispatch mode, unless the mode says that it may not."""
    import torch._dynamo.convert_frame as frames
    import torch._inductor.compile_fx as inductor

    for module in pkgutil.iter_modules(trimtab.trace.__path__, "trimtab.trace."):
        # What stands in for torch's C++ is not to be compiled; the engine, which wraps the job's blocks, is.
        torch._dynamo.trace_rules.add(module.name)
    replace(type(recorder), ignore_compile_internals=classmethod(lambda _: True))
    again = getattr(torch._prims.rng_prims, "graphsafe_run_with_rng_state", None)
    if again is not None:
        again.py_impl(type(recorder))(_run_again)
    replace(frames, _compile=_aside(recorder, frames._compile))
    # The backward pass is compiled when it first runs, outside of dynamo.
    replace(inductor, fx_codegen_and_compile=_aside(recorder, inductor.fx_codegen_and_compile))


def _aside(recorder: Recorder, whole: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(whole)
    def silent(*args: Any, **kwargs: Any) -> Any:
        with aside(recorder):
            return whole(*args, **kwargs)

    return silent


class _Generator(torch.Generator):
    """Random numbers of the pretended device: nobody draws any, and all states are one."""

    device = torch.device("cuda", 0)

    def clone_state(self) -> Self:
        """The same."""
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, _: torch.Generator) -> Self:
        """Nothing to do."""
        return self


def _run_again(recorder: Recorder, op: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    """An operation that draws, when what it drew forward is drawn again backward: the operation as it is."""
    del rng_state
    return recorder.__torch_dispatch__(op, (), args, kwargs)


def _answer_for_cuda() -> None:
    """What the compiler asks of CUDA that nothing else does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # One function each: dynamo knows them by identity.
    replace(
        torch.cuda,
        get_rng_state=lambda *_: torch.empty(16, dtype=torch.uint8),
        set_rng_state=lambda *_: None,
        _exchange_device=lambda *_: 0,
        _maybe_exchange_device=lambda *_: 0,
        default_generators=(_Generator(),),
    )
    # Constants stay on the host, and the guard that is there already stays.
    replace(FakeTensorMode, avoid_device_init=True)
    replace(torch._C, _ensureCUDADeviceGuardSet=lambda: None)


def _fold_on_host() -> None:
    """Constants that the compiler works out while it compiles are real numbers: on the host, here."""
    from torch._inductor.fx_passes import joint_graph

    folder = joint_graph.UniformValueConstantFolder
    whole = folder.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return whole(self, *args, **kwargs)

    replace(folder, run=run)


class _OnHost(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        host = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: host, (args, kwargs or {}))
        return func(*args, **kwargs)


def _replace_ends(recorder: Recorder) -> None:
    """Where inductor's code meets the device: kernels are stood in for, buffers are fake tensors."""
    import torch._inductor.config as settings
    import torch._inductor.cpu_vec_isa as host_vectors
    import torch.utils._triton as triton_questions
    from torch._inductor import scheduler
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import pad_mm

    # Nothing that was guessed here may be found by a real run later, nor the other way round.
    replace(settings, force_disable_caches=True, compile_threads=1)
    # Kernels then say how many bytes they move.
    replace(settings, profile_bandwidth=True)
    for module in (scheduler, pad_mm):
        replace(module, has_triton=lambda *_: True)
    replace(triton_questions, triton_hash_with_backend=lambda: "none")
    replace(host_vectors, valid_vec_isa_list=list)
    balance = Balance(recorder)

    def kernel(_: Any, name: str, source: str, *__: Any, **___: Any) -> Fused:
        return Fused(recorder, balance, name, source)

    def host_kernel(*_: Any) -> Fused:
        return Fused(recorder, balance, HOST, "")

    replace(AsyncCompile, triton=kernel, cpp=host_kernel, cpp_pybinding=host_kernel)

    def header(self: Any) -> None:
        self.write_get_raw_stream_header()
        self.imports.splice("start_graph = end_graph = lambda *_: None")

    replace(PythonWrapperCodegen, write_triton_header_once=header)
    replace(
        torch._C._dynamo.guards,
        _empty_strided_cuda=functools.partial(_empty_strided, "cuda"),
        _empty_strided_cpu=functools.partial(_empty_strided, "cpu"),
        _reinterpret_tensor=_reinterpret,
        assert_size_stride=lambda *_: None,
        assert_alignment=lambda *_: None,
    )


def _empty_strided(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
