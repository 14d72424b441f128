"""The Python half of a CUDA device that is not there: `torch.cuda` answers as the target would.

Jobs and libraries ask for names, capabilities, streams and free memory, and choose kernels and dtypes by the
answer. Only for a child process that traces and ends.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from trimtab.catalog.describe import capability, has_bf16
from trimtab.trace.imports import turn_off_at_import
from trimtab.trace.pretend import pretend_cuda, show_cuda
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Device

WARP = 32
CACHE_MIB = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126}
"""L2 by compute capability, as the best-known chip of each has it."""
H200_CACHE_MIB = 60
"""Seen on one."""
H100_SHARED = {"block": 49152, "optin": 232448, "multiprocessor": 233472}


@dataclass(frozen=True)
class Properties:
    """What torch.cuda.get_device_properties gives."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: str = "00000000-0000-0000-0000-000000000000"
    gcnArchName: str = ""  # noqa: N815 - torch's spelling
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    warp_size: int = WARP
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = H100_SHARED["block"]
    shared_memory_per_block_optin: int = H100_SHARED["optin"]
    shared_memory_per_multiprocessor: int = H100_SHARED["multiprocessor"]
    L2_cache_size: int = 50 * 2**20
    clock_rate: int = 1_830_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120


class Stream:
    """A stream on which nothing ever waits. It has a number, because the allocator keeps a pool for each."""

    device_index = 0
    device_type = 1
    made = 0
    current = 0
    """The number of the stream that work goes to now; 0 is the default one."""

    def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)
        if number is None:
            Stream.made += 1
            number = Stream.made
        self.stream_id = self.cuda_stream = number
        self._outside = 0

    def __enter__(self) -> Self:
        self._outside, Stream.current = Stream.current, self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._outside

    def is_capturing(self) -> bool:
        """No graph is being captured."""
        return False

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def wait_stream(self, *_: object) -> None:
        """Nothing to wait for."""

    wait_event = synchronize = wait_stream


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, _: Event) -> float:
        """Some milliseconds."""
        return 1.0

    def record(self, *_: object) -> None:
        """Nothing to do."""

    wait = synchronize = record


def _on_stream(stream: Stream | None) -> Any:
    """`with torch.cuda.stream(s):`, which takes None as well."""
    return contextlib.nullcontext() if stream is None else stream


def imitate(target: Device) -> None:
    """Replace torch.cuda's answers by the target's, and make torch believe in CUDA."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from trimtab.trace.redraw import bound_redraws
    from trimtab.trace.scripts import follow_scripts

    config = torch._C._show_config()
    pretend_cuda()
    # torch would ask its CUDA half to describe itself.
    torch._C._show_config = _constant(config)
    bound_redraws()
    follow_scripts()
    numbers = capability(target.compute_capability or "9.0") or (9, 0)
    free = target.free_bytes if target.free_bytes is not None else target.memory_bytes
    properties = Properties(
        name=target.name,
        major=numbers[0],
        minor=numbers[1],
        total_memory=target.memory_bytes,
        multi_processor_count=target.multiprocessors or 1,
        L2_cache_size=_cache_bytes(target, numbers),
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": target.name,
        "get_device_capability": numbers,
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{numbers[0]}{numbers[1]}"],
        "is_bf16_supported": has_bf16(target.compute_capability or "9.0"),
        "is_current_stream_capturing": False,
        "mem_get_info": (free, target.memory_bytes),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "can_device_access_peer": True,
        "utilization": 0,
        "_get_device_index": 0,
    }
    silent = (
        "_lazy_init init set_device synchronize empty_cache reset_peak_memory_stats ipc_collect manual_seed "
        "manual_seed_all seed seed_all reset_max_memory_allocated set_per_process_memory_fraction"
    )
    for name, value in (answers | dict.fromkeys(silent.split())).items():
        setattr(torch.cuda, name, _while_seen(value, getattr(torch.cuda, name)))
    raw = {"getDeviceCount": 1, "getDevice": 0, "isCurrentStreamCapturing": False, "getCurrentRawStream": 0}
    quiet = "setDevice exchangeDevice maybeExchangeDevice"
    for name, value in (raw | dict.fromkeys(quiet.split(), 0)).items():
        # A build without CUDA has no such function, and no device.
        real = getattr(torch._C, f"_cuda_{name}", _constant(0))
        setattr(torch._C, f"_cuda_{name}", _while_seen(value, real))
    for place in (torch.cuda, torch.accelerator):
        for name in ("current_stream", "default_stream"):
            setattr(place, name, lambda *_, **__: Stream(number=Stream.current))
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = Event  # type: ignore[assignment,misc]
    torch.cuda.stream = _on_stream  # type: ignore[assignment]
    torch.cuda.set_stream = _constant(None)
    torch.cuda.amp.common.amp_definitely_not_available = _constant(value=False)
    torch.backends.cuda.is_built = _constant(value=True)
    real_version = torch.version.cuda
    torch.version.cuda = torch.version.cuda or "13.0"
    seen_version = torch.version.cuda

    def turn(seen: bool) -> bool:
        before, Seen.now = Seen.now, seen
        if seen != before:
            show_cuda(seen)
            torch.version.cuda = seen_version if seen else real_version
        return before

    turn_off_at_import(turn)
    # It would start CUDA for real, on builds that have it, before the first fake tensor.
    torch._subclasses.fake_tensor.init_gpu_context = _constant(None)  # type: ignore[assignment]
    # Recurrent layers lay their weights out for cuDNN by asking cuDNN itself.
    torch.nn.RNNBase.flatten_parameters = _constant(None)  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    # A tensor's deep copy copied its mode with it, and with that torch's weak references to storages, which
    # were then given back twice and corrupted the heap. One mode for all copies.
    FakeTensorMode.__deepcopy__ = lambda mode, _: mode  # type: ignore[attr-defined]


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy as of a real tensor; torch's own way sets storages, which fake ones do not take."""
    import torch

    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that were made explicitly by the user can be copied deeply")
    copied: Any = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def _cache_bytes(target: Device, numbers: tuple[int, int]) -> int:
    size = H200_CACHE_MIB if "H200" in target.name else CACHE_MIB.get(numbers, CACHE_MIB[9, 0])
    return size * MIB


class Seen:
    """Whether code that runs now sees the pretended device: packages that are being imported do not."""

    now = True


def _while_seen(value: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives the target's answer; and the real one to packages that are being imported."""
    return lambda *args, **kwargs: value if Seen.now else real(*args, **kwargs)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def hide_tracing() -> None:
    """Libraries that look for fake tensors go another way through their models: tell them there are none."""
    import sys

    library = sys.modules.get("transformers.utils.import_utils")
    if library is not None:
        library.is_fake_tensor = _constant(value=False)  # type: ignore[attr-defined]


def _apply(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module.to`, `.half` and the like for fake parameters: new memory under the old parameter.

    torch swaps fake parameters as whole objects, which fails as soon as anything refers to one weakly; on a
    GPU it puts new memory under the old one, and so does this.
    """
    import torch

    if recurse:
        for child in module.children():
            child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
        if changed is parameter:
            continue
        if changed.device == parameter.device:
            parameter.data = changed
        else:
            module._parameters[name] = torch.nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module
