"""Run torch.compile on the fake CUDA device, and record the code that inductor generates.

Dynamo, AOTAutograd, the partitioner, inductor's passes, its scheduler and its memory planning are torch's
own, unchanged. So graph breaks, fusion, reuse of buffers and activations saved for the backward pass are
those of the installed torch. Only the generated kernels are replaced by stubs (`FusedKernelStub`). The code
around them, which allocates buffers and calls libraries, runs on fake tensors under the recorder. Neither
Triton nor a C++ compiler is needed. Covers inductor in its default mode; not CUDA graphs or `max-autotune`.

Only for a child process that traces and then exits: the patches are never undone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pkgutil
import re
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

import trimtab.trace
from trimtab.engine.precision import dtype_name
from trimtab.spec import Work
from trimtab.spec.precision import BFLOAT16, FLOAT16, FLOAT32, TF32
from trimtab.spec.trace import GRADIENT, GRAPH_ENTER, GRAPH_LEAVE, PERMUTED
from trimtab.trace.fake_cuda import FakeProperties
from trimtab.trace.followed_functions import normalize_rows
from trimtab.trace.kernels import MATRIX_OPS
from trimtab.trace.workspaces import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.spec import Device
    from trimtab.trace.recorder import Recorder


# Inductor benchmarks two things in the first step: whether a matrix product is faster with padded sides, and
# which configuration of a fused kernel is fastest. Both allocate memory, and the first changes the program.
# The benchmark code runs on fake tensors, so that its allocations are recorded. Times come from a roofline
# model (`CostClock`), and configurations are counted by torch's own heuristics.


MILLISECONDS, GIGA, TERA = 1e3, 1e9, 1e12
VECTOR_BYTES = 16
"""Fast tensor core kernels need matrix rows that start at multiples of this."""
UNALIGNED_RATE = 1 / 3
"""Share of the rate without that alignment. Hopper falls back to kernels made for Ampere; a coarse figure."""
UNKNOWN_BANDWIDTH = 1e12
UNKNOWN_RATE = 1e14


class CostClock(TorchDispatchMode):
    """Adds up roofline times of operations: the longer of matrix arithmetic and memory traffic."""

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
        arithmetic = self._product_seconds(args, out) if name in MATRIX_OPS else 0.0
        self.seconds += max(traffic, arithmetic)
        return out

    def _product_seconds(self, args: tuple[Any, ...], out: torch.Tensor) -> float:
        left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
        rate = self.rate(left.dtype)
        if not all(map(_is_aligned, (left, right, out))):
            rate *= UNALIGNED_RATE
        return 2 * out.numel() * left.shape[-1] / rate

    def rate(self, dtype: torch.dtype) -> float:
        """Return the flops per second of a matrix product in this dtype."""
        peaks = self.peaks
        name = dtype_name(dtype)
        if name not in (FLOAT16, BFLOAT16):
            name = TF32 if torch.backends.cuda.matmul.allow_tf32 else FLOAT32
        return peaks.get_rate(name) or peaks.fp32 or UNKNOWN_RATE


def _is_aligned(matrix: torch.Tensor) -> bool:
    rows = max(matrix.stride()[-2:])
    return rows * matrix.element_size() % VECTOR_BYTES == 0


def patch_autotune(recorder: Recorder) -> None:
    """Run inductor's padding benchmarks on the fake device, with times from `CostClock`."""
    import torch._inductor.utils as inductor_utils
    from torch._inductor.fx_passes import pad_mm

    target = recorder.kernels.target
    clock = CostClock(target)

    def benchmark(run: Callable[[], Any], **_: Any) -> float:
        """Return milliseconds, as torch's own benchmark does, and record the memory that it takes."""
        run()
        clock.seconds = 0.0
        with recorder.hold_memory(l2_cache_bytes(), "trial"), clock:
            run()
        return clock.seconds * MILLISECONDS

    @contextlib.contextmanager
    def resume() -> Iterator[None]:
        with resume_recording(recorder):
            yield

    cache = PaddingCache()
    set_attributes(pad_mm, no_dispatch=resume, get_do_bench=lambda: benchmark, get_pad_cache=lambda: cache)
    set_attributes(
        inductor_utils,
        get_device_tflops=lambda dtype: clock.rate(dtype) / TERA,
        get_gpu_dram_gbps=lambda: int(clock.bandwidth / GIGA),
    )


class PaddingCache:
    """Results of padding benchmarks, in place of inductor's file: another trace must not change this one."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def lookup(self, key: str) -> Any:
        """Return a result; None before its benchmark."""
        return self.values.get(key)

    def set_value(self, key: str, *, value: Any) -> None:
        """Store a result."""
        self.values[key] = value


def set_attributes(owner: Any, **attributes: Any) -> None:
    """Set attributes of a torch module or class."""
    for name, value in attributes.items():
        setattr(owner, name, value)


@contextlib.contextmanager
def resume_recording(recorder: Recorder) -> Iterator[None]:
    """Run operations on the fake device and record them again, inside torch's compiler."""
    before, recorder.paused = recorder.paused, False
    with _disable_current_modes(), recorder.fake_mode:
        _push_mode(recorder)
        try:
            yield
        finally:
            _pop_mode()
            recorder.paused = before


@contextlib.contextmanager
def pause_recording(recorder: Recorder) -> Iterator[None]:
    """Record nothing while torch's compiler runs: its own tensors take no device memory."""
    before, recorder.paused = recorder.paused, True
    try:
        with _disable_current_modes():
            yield
    finally:
        recorder.paused = before


def l2_cache_bytes() -> int:
    """Return the size of the buffer that a benchmark overwrites between two runs to flush the L2 cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


DECORATOR = re.compile(r"^@(triton_heuristics\.\w+\(.*?^\))$", re.MULTILINE | re.DOTALL)


class KernelTuning:
    """Configurations that inductor tries for a fused kernel, and arguments that each trial copies."""

    def __init__(self, source: str) -> None:
        self.configurations = 1
        self.mutated: tuple[str, ...] = ()
        self.copies_on_host = True
        """Whether a copy that would raise the peak is made on the host instead."""
        decorator = DECORATOR.search(source)
        if decorator is not None:
            self._read_configurations(decorator[1])

    def _read_configurations(self, decorator: str) -> None:
        """Let torch's heuristics choose configurations, and intercept them before Triton gets them."""
        from torch._inductor.runtime import hints, triton_heuristics

        def intercept(_: Any, configs: Any, *__: Any, inductor_meta: Any = None, **___: Any) -> None:
            meta = inductor_meta or {}
            self.configurations = len(triton_heuristics.unique_configs(configs))
            self.mutated = tuple(meta.get("mutated_arg_names", ()))
            self.copies_on_host = bool(meta.get("optimize_mem", True))

        names = {name: getattr(hints, name) for name in dir(hints) if not name.startswith("__")}
        names |= {"triton_heuristics": triton_heuristics, "__file__": "kernel.py"}
        names["AttrsDescriptor"] = lambda **_: None
        module: Any = triton_heuristics
        autotune, config = module.cached_autotune, module.Config
        stub = TritonConfigStub if config is object else config
        set_attributes(module, cached_autotune=intercept, Config=stub)
        try:
            eval(decorator, names)  # noqa: S307 - text that torch has just generated
        except Exception:  # noqa: BLE001 - assume one configuration, which needs no trial
            self.configurations = 1
        finally:
            set_attributes(module, cached_autotune=autotune, Config=config)


class TritonConfigStub:
    """Stub of triton.Config, for builds without Triton."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **more: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.__dict__.update(more)

    def all_kwargs(self) -> dict[str, Any]:
        """Return all settings of the configuration."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class MemoryBalance:
    """Bytes in use and their peak so far, as torch.cuda would report them to a benchmark."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.position = self.used = self.peak = 0

    def headroom(self) -> int:
        """Return how many bytes can be allocated without a new peak."""
        order, sizes = self.recorder.order, self.recorder.sizes
        for event in order[self.position :]:
            self.used += sizes[event] if event >= 0 else -sizes[~event]
            self.peak = max(self.peak, self.used)
        self.position = len(order)
        return self.peak - self.used


KERNEL_GIGABYTES = re.compile(r"'kernel_num_gb': ([\d.e+-]+)")
KERNEL_NAME = re.compile(r"^triton_\w{3}_|_\d+$")
"""Prefix and suffix that inductor adds to the names of fused operations."""
REDUCTIONS = ("triton_red", "triton_per", "triton_spl")
HOST = "cpp"
KERNEL_SIZES = re.compile(r"^\s+[xyzr]\w*numel = (\d+)$", re.MULTILINE)
SIGNATURE = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)


def count_additions(source: str) -> int:
    """Return how many numbers a generated kernel adds to others in memory, one by one.

    Inductor writes the gradient of an index and of upsampling so; `xnumel` and others are the kernel's sizes.
    """
    sizes = [int(size) for size in KERNEL_SIZES.findall(source)]
    return source.count("tl.atomic_add(") * prod(sizes) if sizes else 0


ADDED_TO = re.compile(r"tl\.atomic_add\((\w+) \+")


def count_waiting_additions(source: str, tensors: dict[str, torch.Tensor]) -> int:
    """Return the additions of a generated kernel to the same number, for the tensor that has most of them."""
    sizes = [int(size) for size in KERNEL_SIZES.findall(source)]
    calls = Counter(name for name in ADDED_TO.findall(source) if name in tensors)
    waiting = (count * prod(sizes) // max(1, tensors[name].numel()) for name, count in calls.items())
    return max(waiting, default=0) if sizes else 0


COSTLY_CALLS = {
    re.compile(r"\brand\w*\("): 100,
    re.compile(r"\berf\("): 35,
    re.compile(r"\btanh\("): 25,
    re.compile(r"\bonline_softmax_combine\("): 40,
    re.compile(r"\b(?:exp|exp2|log|log2|log1p)\("): 8,
    re.compile(r"\b(?:rsqrt|sqrt|sin|cos)\("): 6,
    re.compile(r" / |\btruediv\(|\bdiv_rn\("): 8,
}
"""Instructions of what is more than one: random numbers are ten rounds of Philox, erf is a polynomial."""
VALUE_LINE = re.compile(r"^\s+tmp\w* = (.*)$", re.MULTILINE)
FREE_WORDS = ("tl.load", "tl.full", ".to(", "broadcast_to")
REDUCTION_LOOP = re.compile(r"^\s+for r\w*offset in ", re.MULTILINE)
TILED = "YBLOCK"


def count_instructions(source: str) -> int:
    """Return the instructions of a generated kernel: a line is one for each number, costly calls are more.

    Index arithmetic is left out: neighbouring numbers share it. Ten compiled models on an H200 (813 kernels):
    gelu backward took 1.4 times as long as its bytes, dropout 2 to 3 times.
    """
    lines = VALUE_LINE.findall(source)
    each = sum(not any(word in line for word in FREE_WORDS) for line in lines)
    text = "\n".join(lines)
    each += sum(weight * len(pattern.findall(text)) for pattern, weight in COSTLY_CALLS.items())
    sizes = [int(size) for size in KERNEL_SIZES.findall(source)]
    return each * prod(sizes) if sizes else 0


GRAPH_WORKS = tuple(Work(op=op, kind="call", dtype="", kernels=0) for op in (GRAPH_ENTER, GRAPH_LEAVE))


class FusedKernelStub:
    """Stub of a generated kernel: records its tuning at the first run, and its work at each run."""

    def __init__(self, recorder: Recorder, balance: MemoryBalance, name: str, source: str) -> None:
        self.recorder, self.balance, self.name, self.source = recorder, balance, name, source
        gigabytes = KERNEL_GIGABYTES.search(source)
        self.moved_bytes = round(float(gigabytes[1]) * GIGA) if gigabytes else 0
        signature = SIGNATURE.search(source)
        self.additions, self.instructions = count_additions(source), count_instructions(source)
        self.passes = max(1, len(REDUCTION_LOOP.findall(source)))
        self.is_tiled = TILED in source
        self.arguments = [word.split(":")[0].strip() for word in signature[1].split(",")] if signature else []
        self._is_tuned = False

    def run(self, *args: Any, **_: Any) -> None:
        """Record a launch; the first one tries all configurations."""
        tensors = {
            name: value
            for name, value in zip(self.arguments, args, strict=False)
            if isinstance(value, torch.Tensor)
        }
        if not self._is_tuned:
            self._is_tuned = True
            self._tune(tensors)
        if self.recorder.records_work and self.name != HOST:
            self.recorder.add_work(self._describe_work(tensors))

    def _describe_work(self, tensors: dict[str, torch.Tensor]) -> Work:
        """Return what one launch computes and moves, by inductor's own count of bytes.

        It counts each tensor once; a kernel with several loops over its rows reads them in each.
        """
        written = [value for name, value in tensors.items() if "out_ptr" in name]
        write_bytes = sum(map(tensor_bytes, written))
        largest = max(written, key=tensor_bytes, default=None)
        last = largest.shape[-1] if largest is not None and largest.dim() else 1
        kind = "reduction" if self.name.startswith(REDUCTIONS) else "pointwise"
        return Work(
            op=KERNEL_NAME.sub("", self.name),
            kind=kind,
            dtype=dtype_name(largest.dtype) if largest is not None else "",
            read_bytes=self.passes * max(0, self.moved_bytes - write_bytes),
            write_bytes=write_bytes,
            dims=(PERMUTED * self.is_tiled, last),
            additions=self.additions,
            waiting_additions=count_waiting_additions(self.source, tensors) if self.additions else 0,
            instructions=self.instructions,
        )

    def _tune(self, tensors: dict[str, torch.Tensor]) -> None:
        tuning = KernelTuning(self.source)
        if tuning.configurations == 1:
            return
        headroom = self.balance.headroom()
        copied = []
        for name in tuning.mutated:
            if name not in tensors:
                continue
            if tuning.copies_on_host and tensor_bytes(tensors[name]) > headroom:
                continue
            headroom -= tensor_bytes(tensors[name])
            copied.append(tensor_bytes(tensors[name]))
        for _ in range(tuning.configurations):
            self.recorder.add_temporaries(copied, "tuning")
            with self.recorder.hold_memory(l2_cache_bytes(), "tuning"):
                self.recorder.add_temporaries(copied, "tuning")

    def __call__(self, *_: Any) -> None:
        """Do nothing: a kernel for the host touches no device memory."""


def patch_torch_compile(recorder: Recorder) -> None:
    """Prepare the compiler at the first call of torch.compile, by a setting or by the job's own code."""
    original = torch.compile
    prepare = functools.cache(prepare_compiler)

    @functools.wraps(original)
    def compile_default(*args: Any, mode: str | None = None, options: Any = None, **kwargs: Any) -> Any:
        recorder.uses_compile = True
        prepare(recorder)
        if mode not in (None, "default") or options:
            recorder.kernels.assume(f"torch.compile is taken in its default mode, not {mode or options}")
        return original(*args, **kwargs)

    set_attributes(torch, compile=compile_default)


def warm_compiler(recorder: Recorder) -> None:
    """Compile a small function, so that forks of this process share imports and tables of the compiler.

    The function has no matrix product: the recorder counts the memory of libraries at their first use. It has
    no backward pass: threads of autograd do not survive a fork.
    """
    paused, recorder.paused = recorder.paused, True
    try:
        torch.compile(normalize_rows, dynamic=False)(torch.empty(4, 8, device="cuda"))
    finally:
        recorder.paused, recorder.uses_compile = paused, False


def allocate_separately() -> None:
    """Let compiled code free each buffer after its last use, instead of giving it to a later one.

    Inductor gives a freed buffer to a later one of the same size only where this does not raise the peak of
    the graph. So the peak is the same without, and every block of a model allocates and frees alike. With
    it, the blocks far from the peak take buffers of their neighbours, and their number decides which do.
    Versions of torch that do not compare with the peak keep their rule.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.codegen.wrapper import AllocateLine

    if hasattr(AllocateLine, "should_reuse_buffer"):
        set_attributes(inductor_config, allow_buffer_reuse=False)


FOLLOWED_MODULES = {
    "trimtab.trace.flash_attn_package",
    "trimtab.trace.flex_attention",
    "trimtab.trace.followed_functions",
    "trimtab.trace.hub_kernels",
}
"""Modules of this package whose Python code the compiler follows."""


def prepare_compiler(recorder: Recorder) -> None:
    """Prepare torch's compiler for the fake device."""
    _enable_dynamo(recorder)
    _patch_cuda()
    _fold_constants_on_host()
    _patch_inductor(recorder)
    _mark_graphs(recorder)
    patch_autotune(recorder)


def _enable_dynamo(recorder: Recorder) -> None:
    """Let dynamo compile code under the recorder; by default it skips code under a dispatch mode."""
    import torch._dynamo.convert_frame as frames
    import torch._inductor.compile_fx as inductor
    from torch._dynamo import guards, symbolic_convert, utils
    from torch._dynamo.variables import torch as torch_variables
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    # Answers of torch.cuda are constants of a graph, also where dynamo was imported before the fake device.
    utils.common_constant_types.add(FakeProperties)
    foldable = [*torch_variables.constant_fold_functions, torch.cuda.get_device_properties]
    set_attributes(torch_variables, constant_fold_functions=dict.fromkeys(foldable))
    rules = torch._dynamo.trace_rules
    for module in pkgutil.iter_modules(trimtab.trace.__path__, "trimtab.trace."):
        # Stand-ins for torch's C++ code must not be compiled; the engine, which wraps the job's blocks, must.
        if module.name not in FOLLOWED_MODULES:
            rules.add(module.name)
    # dynamo knows torch's functions by identity. For it, torch.compile within compiled code does nothing.
    for table in (rules.get_torch_obj_rule_map, TorchInGraphFunctionVariable._get_handlers):
        table.cache_clear()
    set_attributes(type(recorder), ignore_compile_internals=classmethod(lambda _: True))
    rerun = getattr(torch._prims.rng_prims, "graphsafe_run_with_rng_state", None)
    if rerun is not None:
        rerun.py_impl(type(recorder))(_rerun_random_op)
    # Names of functions for its log: it reads and splits every source file of the model to find them.
    set_attributes(symbolic_convert, get_funcname=lambda *_: None)
    # Measuring how long guards take flushes the caches of the CPU.
    set_attributes(guards, profile_guard_manager=lambda *_: 0.0)
    set_attributes(frames, _compile=_wrap_paused(recorder, frames._compile))
    # The backward pass is compiled when it first runs, outside of dynamo.
    compile_graph = _wrap_paused(recorder, inductor.fx_codegen_and_compile, collects=True)
    set_attributes(inductor, fx_codegen_and_compile=compile_graph)


def _wrap_paused(
    recorder: Recorder, function: Callable[..., Any], *, collects: bool = False
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run_paused(*args: Any, **kwargs: Any) -> Any:
        with pause_recording(recorder), _pause_garbage_collection(collects=collects):
            return function(*args, **kwargs)

    return run_paused


@contextlib.contextmanager
def _pause_garbage_collection(*, collects: bool) -> Iterator[None]:
    """Leave garbage to the end of the `with` block, and collect it there with `collects`.

    The compiler creates so many objects that Python would collect dozens of times, which takes a tenth of the
    time. Tensors in reference cycles would be freed at moments that differ from run to run.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if collects:
            gc.collect()


class _FakeGenerator(torch.Generator):
    """Random number generator of the fake device. No numbers are drawn, so all states are the same."""

    device = torch.device("cuda", 0)

    def clone_state(self) -> Self:
        """Return the generator itself."""
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, _: torch.Generator) -> Self:
        """Do nothing and return the generator."""
        return self


def _rerun_random_op(recorder: Recorder, op: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    """Run a random operation again in the backward pass; without its random state, which is not needed."""
    del rng_state
    return recorder.__torch_dispatch__(op, (), args, kwargs)


def _patch_cuda() -> None:
    """Answer the CUDA calls that only the compiler makes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Each needs its own function object, because dynamo identifies functions by identity.
    set_attributes(
        torch.cuda,
        get_rng_state=lambda *_: torch.empty(16, dtype=torch.uint8),
        set_rng_state=lambda *_: None,
        _exchange_device=lambda *_: 0,
        _maybe_exchange_device=lambda *_: 0,
        default_generators=(_FakeGenerator(),),
    )
    # Constants stay on the host, and the installed device guard stays.
    set_attributes(FakeTensorMode, avoid_device_init=True)
    set_attributes(torch._C, _ensureCUDADeviceGuardSet=lambda: None)


def _fold_constants_on_host() -> None:
    """Compute constants that the compiler folds on the host, because they need real numbers."""
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental import proxy_tensor

    @contextlib.contextmanager
    def compute_on_host() -> Iterator[None]:
        # Numbers that the code makes tensors of are real ones until they are copied to the device.
        with unset_fake_temporarily(), _HostDeviceMode():
            yield

    set_attributes(proxy_tensor, unset_fake_temporarily=compute_on_host)
    folder = joint_graph.UniformValueConstantFolder
    original = folder.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _HostDeviceMode():
            return original(self, *args, **kwargs)

    set_attributes(folder, run=run)


class _HostDeviceMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        host = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: host, (args, kwargs or {}))
        return func(*args, **kwargs)


def _patch_inductor(recorder: Recorder) -> None:
    """Replace the device interface of inductor's code: kernels by stubs, buffers by fake tensors."""
    import torch._inductor.config as settings
    import torch._inductor.cpu_vec_isa as host_vectors
    import torch.utils._triton as triton_checks
    from torch._inductor import scheduler
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import pad_mm

    # Results must not be shared with real runs through inductor's caches, in either direction.
    set_attributes(settings, force_disable_caches=True, compile_threads=1)
    # With this setting, kernel sources contain the number of bytes that they move.
    set_attributes(settings, profile_bandwidth=True)
    for module in (scheduler, pad_mm):
        set_attributes(module, has_triton=lambda *_: True)
    set_attributes(triton_checks, triton_hash_with_backend=lambda: "none")
    set_attributes(host_vectors, valid_vec_isa_list=list)
    balance = MemoryBalance(recorder)

    def make_kernel(_: Any, name: str, source: str, *__: Any, **___: Any) -> FusedKernelStub:
        return FusedKernelStub(recorder, balance, name, source)

    def make_host_kernel(*_: Any) -> FusedKernelStub:
        return FusedKernelStub(recorder, balance, HOST, "")

    set_attributes(AsyncCompile, triton=make_kernel, cpp=make_host_kernel, cpp_pybinding=make_host_kernel)

    def write_header(self: Any) -> None:
        self.write_get_raw_stream_header()
        self.imports.splice("start_graph = end_graph = lambda *_: None")

    set_attributes(PythonWrapperCodegen, write_triton_header_once=write_header)
    set_attributes(
        torch._C._dynamo.guards,
        _empty_strided_cuda=functools.partial(_empty_strided, "cuda"),
        _empty_strided_cpu=functools.partial(_empty_strided, "cpu"),
        _reinterpret_tensor=_reinterpret_tensor,
        assert_size_stride=lambda *_: None,
        assert_alignment=lambda *_: None,
    )


def _mark_graphs(recorder: Recorder) -> None:
    """Record where compiled code begins and ends: it costs the host less than eager code."""
    from torch._inductor.output_code import CompiledFxGraph

    call: Any = CompiledFxGraph.__call__

    @functools.wraps(call)
    def run_marked(graph: Any, inputs: Any) -> Any:
        if not recorder.records_work:
            return call(graph, inputs)
        recorder.add_work(GRAPH_WORKS[0])
        try:
            return call(graph, inputs)
        finally:
            recorder.add_work(GRAPH_WORKS[1])

    set_attributes(CompiledFxGraph, __call__=run_marked)


def sort_gradient_marks(recorder: Recorder, names: Sequence[str]) -> None:
    """Give gradients that are complete at the same moment the order of an eager backward pass.

    Compiled code returns all gradients at once, and the order in which autograd then notes them is arbitrary.
    """
    places = {name: place for place, name in enumerate(names)}
    run: list[int] = []
    for event in (*recorder.order, None):
        if event is not None and recorder.ops[event if event >= 0 else ~event] == GRADIENT:
            run += [event] * (event >= 0)
        elif run:
            ordered = sorted((recorder.modules[number] for number in run), key=lambda name: -places[name])
            for number, name in zip(run, ordered, strict=True):
                recorder.modules[number] = name
            run = []


def _empty_strided(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
