"""Answer what scripts ask of the GPU beside computing: legacy tensor types, graphs, tools that measure it.

torch without CUDA has no such functions, or they fail. Here they do nothing, or give what a GPU would.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import worker as loader_workers

from trimtab.errors import CannotFollow
from trimtab.scripts.observer import find_script_line, put
from trimtab.trace.fake_cuda import MODULE_PATCHES, FakeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.scripts.observer import Observer
    from trimtab.spec import Device

LEGACY_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
IDLE = "idle"


def patch_cuda_tools(observer: Observer, device: Device) -> None:
    """Patch everything of this module."""
    _patch_legacy_types()
    _patch_measuring()
    _patch_contexts()
    _patch_graphs(observer)
    _patch_nvml(device)
    _patch_extensions(observer)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _make_constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# Tensor types from before torch 0.4, as in torch.cuda.FloatTensor(3, 4)


class LegacyType(type):
    """A type such as torch.cuda.FloatTensor: calling it makes a tensor on the GPU."""

    dtype: torch.dtype
    cpu_type: Any

    def __call__(cls, *args: Any, **_: Any) -> Any:
        """Return a tensor on the GPU: of this shape, or with these values."""
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].to("cuda", cls.dtype)
        if args and all(isinstance(side, int) for side in args):
            return torch.empty(args, dtype=cls.dtype, device="cuda")
        return cls.cpu_type(*args).to("cuda")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


def _patch_legacy_types() -> None:
    types = {
        name: LegacyType(
            name, (), {"dtype": dtype, "cpu_type": getattr(torch, name), "__module__": "torch.cuda"}
        )
        for name, dtype in LEGACY_DTYPES.items()
    }
    for name, made in types.items():
        put(torch.cuda, name, made)
    cast, set_default = torch.Tensor.type, torch.set_default_tensor_type
    make: Any = torch.Tensor.__new__

    def make_on_gpu(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor on the GPU: a default device is for functions such as torch.zeros only."""
        made = make(cls, *args, **kwargs)
        return made.to("cuda") if cls is torch.Tensor and "device" not in kwargs else made

    def change_type(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, LegacyType):
            return tensor.to("cuda", dtype.dtype)
        return cast(tensor, dtype, *args, **kwargs)

    def set_default_tensor_type(kind: Any) -> None:
        kind = types.get(kind.removeprefix("torch.cuda."), kind) if isinstance(kind, str) else kind
        if isinstance(kind, LegacyType):
            torch.set_default_dtype(kind.dtype)
            torch.set_default_device("cuda")
            put(torch.Tensor, "__new__", staticmethod(make_on_gpu))
            return
        put(torch.Tensor, "__new__", staticmethod(make))
        torch.set_default_device("cpu")
        set_default(kind)

    put(torch.Tensor, "type", change_type)
    put(torch, "set_default_tensor_type", set_default_tensor_type)


# Profilers, counters and sensors


class AnyCall:
    """An object whose methods all return 0."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_constant(0)


def _patch_measuring() -> None:
    cuda, accelerator = torch.cuda, torch.accelerator
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        put(cuda.nvtx, name, _make_constant(0))
    put(cuda, "cudart", AnyCall)
    for name in ("init", "start", "stop"):
        put(cuda.profiler, name, _do_nothing)
    for name in ("_record_memory_history", "_dump_snapshot", "reset_max_memory_cached"):
        put(cuda.memory, name, _do_nothing)
    put(cuda, "reset_max_memory_cached", _do_nothing)
    put(cuda, "set_sync_debug_mode", _do_nothing)
    counters = {
        "memory_snapshot": [],
        "get_sync_debug_mode": 0,
        "list_gpu_processes": "no processes are running",
        "memory_usage": 0,
        "temperature": 30,
        "power_draw": 0,
        "clock_rate": 0,
        "get_allocator_backend": "native",
        "current_blas_handle": 0,
        "initial_seed": 0,
    }
    for name, value in counters.items():
        put(cuda, name, _make_constant(value))
    put(cuda.memory, "_snapshot", _make_constant({"segments": [], "device_traces": []}))
    for place in (cuda, accelerator):
        put(place, "memory_stats", lambda *_, **__: defaultdict(int))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        put(accelerator, name, _make_constant(0))
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        put(accelerator, name, _do_nothing)
    put(accelerator, "get_memory_info", lambda *_, **__: torch.cuda.mem_get_info())


# Devices, streams and generators


def _patch_contexts() -> None:
    cuda = torch.cuda
    for name in ("_exchange_device", "_maybe_exchange_device"):
        put(cuda, name, _make_constant(0))
    put(cuda, "ExternalStream", FakeStream)
    put(FakeStream, "priority_range", staticmethod(_make_constant((0, -5))))
    put(torch.Tensor, "record_stream", _do_nothing)
    put(cuda, "default_generators", tuple(torch.Generator() for _ in range(cuda.device_count())))
    share, share_module = torch.Tensor.share_memory_, torch.nn.Module.share_memory

    def share_memory(tensor: Any) -> Any:
        return share(tensor) if type(tensor) is torch.Tensor else tensor

    put(torch.Tensor, "share_memory_", share_memory)
    put(
        torch.nn.Module,
        "share_memory",
        lambda module: module if next(module.parameters(), None) is not None else share_module(module),
    )


# CUDA graphs: what is captured runs once, and each replay repeats its work


class FakeGraph:
    """A CUDA graph: it remembers the work that was captured."""

    observer: Observer

    def __init__(self, *_: Any, **__: Any) -> None:
        self._begin = 0
        self._work: list[tuple[int, bool]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Note where the captured work begins."""
        _note_graphs(self.observer)
        self._begin = len(self.observer.recorder.sequence)

    def capture_end(self) -> None:
        """Keep the captured work."""
        recorder = self.observer.recorder
        works = zip(recorder.sequence, recorder.by_engine, strict=True)
        self._work = list(works)[self._begin :]

    def replay(self) -> None:
        """Do the captured work again: it needs time, and no new memory."""
        recorder = self.observer.recorder
        if recorder.records_work:
            recorder.sequence.extend(number for number, _ in self._work)
            recorder.by_engine.extend(in_engine for _, in_engine in self._work)

    def pool(self) -> tuple[int, int]:
        """Return the name of its memory pool."""
        return (0, 0)

    reset = enable_debug_mode = debug_dump = instantiate = _do_nothing


def _note_graphs(observer: Observer) -> None:
    observer.notes[
        f"CUDA graphs ({find_script_line()}) are followed as ordinary calls: on a GPU their launches take "
        "less time, and their memory is kept apart"
    ] = None


@contextlib.contextmanager
def _capture(graph: Any, *_: Any, **__: Any) -> Iterator[None]:
    graph.capture_begin()
    yield
    graph.capture_end()


@contextlib.contextmanager
def _use_pool(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _patch_graphs(observer: Observer) -> None:
    FakeGraph.observer = observer

    def make_graphed_callables(callables: Any, *_: Any, **__: Any) -> Any:
        _note_graphs(observer)
        return callables

    for place in (torch.cuda, torch.cuda.graphs):
        put(place, "CUDAGraph", FakeGraph)
        put(place, "graph", _capture)
        put(place, "make_graphed_callables", make_graphed_callables)
        put(place, "graph_pool_handle", _make_constant((0, 0)))
    put(torch.cuda, "MemPool", AnyCall)
    put(torch.cuda, "use_mem_pool", _use_pool)


# NVML: Python's binding to what nvidia-smi shows


class NvmlRecord:
    """A result of NVML: fields by name, 0 for those without a value."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


def _patch_nvml(device: Device) -> None:
    total = device.memory_bytes
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlInitWithFlags": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetName": device.name,
        "nvmlDeviceGetMemoryInfo": NvmlRecord(total=total, used=0, free=total),
        "nvmlDeviceGetUtilizationRates": NvmlRecord(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": 30,
        "nvmlDeviceGetPowerUsage": 0,
        "nvmlDeviceGetPowerManagementLimit": 0,
        "nvmlDeviceGetEnforcedPowerLimit": 0,
        "nvmlDeviceGetTotalEnergyConsumption": 0,
        "nvmlDeviceGetUUID": "GPU-00000000-0000-0000-0000-000000000000",
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlSystemGetDriverVersion": "580.00",
        "nvmlDeviceGetHandleByIndex": IDLE,
        "nvmlDeviceGetHandleByUUID": IDLE,
        "nvmlDeviceGetCudaComputeCapability": torch.cuda.get_device_capability(),
    }

    def patch(module: Any) -> None:
        for name, value in answers.items():
            put(module, name, _make_constant(value))
        put(module, "nvmlDeviceGetCount", torch.cuda.device_count)

    MODULE_PATCHES["pynvml"] = patch
    if "pynvml" in sys.modules:  # torch imports it if it is installed
        patch(sys.modules["pynvml"])


# Extensions: a script may compile kernels of its own, and go on without them where that fails


def has_gpu_sources(sources: Any) -> bool:
    """Return whether source files of an extension are for a GPU.

    >>> has_gpu_sources(["blur.cpp", "blur.cu"]), has_gpu_sources("align.cpp")
    (True, False)
    """
    files = [sources] if isinstance(sources, str) else sources
    return any(str(file).endswith((".cu", ".cuh", ".hip")) for file in files)


def _patch_extensions(observer: Observer) -> None:
    """Refuse to compile kernels for a GPU: they cannot run on tensors without memory."""

    def refuse(name: str, line: str) -> None:
        observer.notes[
            f"the GPU kernels of {name}, which the script compiles ({line}), are not there: the estimate is "
            "of what it uses instead of them"
        ] = None
        raise CannotFollow(
            f"the extension {name} ({line})",
            found="it has kernels for a GPU, and they cannot run here",
            cure="If the script can go on without the extension, let it do so; the estimate is then of that.",
        )

    def patch(module: Any) -> None:
        load, load_inline = module.load, module.load_inline

        def load_sources(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
            if has_gpu_sources(sources):
                refuse(name, find_script_line())
            return load(name, sources, *args, **kwargs)

        def load_texts(
            name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if cuda_sources:
                refuse(name, find_script_line())
            return load_inline(name, cpp_sources, cuda_sources, *args, **kwargs)

        put(module, "load", load_sources)
        put(module, "load_inline", load_texts)

    MODULE_PATCHES["torch.utils.cpp_extension"] = patch
    if "torch.utils.cpp_extension" in sys.modules:
        patch(sys.modules["torch.utils.cpp_extension"])


# Worker processes of a loader: the loader runs in this process, and tells the data set that it is a worker


@contextlib.contextmanager
def act_as_worker(loader: Any, dataset: Any) -> Iterator[None]:
    """Let `get_worker_info` answer as in the first of a loader's worker processes, if it has any."""
    if not loader.num_workers:
        yield
        return
    before = loader_workers._worker_info
    loader_workers._worker_info = loader_workers.WorkerInfo(
        id=0, num_workers=loader.num_workers, seed=torch.initial_seed(), dataset=dataset, rng=None
    )
    try:
        yield
    finally:
        loader_workers._worker_info = before


def copy_for_worker(loader: Any) -> Any:
    """Return the data set as a worker process gets it: `worker_init_fn` may change it there."""
    if not loader.num_workers or loader.worker_init_fn is None:
        return loader.dataset
    return copy.copy(loader.dataset)
