"""Hold activations in the memory of the host between the forward and the backward pass.

Autograd calls `pack` for every tensor that it saves, and `unpack` when the backward pass needs it. Copies run
on a stream of their own beside the computation. So that the device's memory does not depend on timing, a
fixed number of tensors is on its way: the newest ones are not copied yet (the backward pass needs them
first), some are being copied, and older ones are freed. In the backward pass, as many tensors that were used
stay a while, so that the next copy need not wait for the last computation.

A tensor that is saved several times, or several views of it, is copied once. Parameters, buffers, inputs of
the model and small tensors stay on the device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.engine.build import EntryPoints

SMALLEST = 1024
"""Tensors with fewer elements stay on the device."""
NOT_STARTED = 2
"""The newest tensors, whose copy has not begun: the backward pass soon needs them."""
IN_FLIGHT = 5
"""Tensors on the device that were saved and not yet freed, those above included."""
RETIRED = 2
"""Tensors that were copied back and used, and are not yet freed."""
UNSHARED_USE_COUNT = 2
"""Use count of a storage that belongs to one tensor: that tensor, and the Python object that reads it."""
DENSE_SHARE = 4
"""A view of less than a quarter of its memory is copied alone."""

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: it was "
    "saved at version {} and is at version {}"
)


class HostCopy:
    """The memory of a tensor, on the host while the device does not need it."""

    def __init__(self, offload: ActivationOffload, flat: torch.Tensor) -> None:
        self._offload = offload
        self.size = flat.numel() * flat.element_size()
        self.device: torch.Tensor | None = flat
        """All of the memory, in one dimension; None while it is on the host only."""
        self.host: torch.Tensor | None = None
        self._version = flat._version
        self._event: Any = None
        self._restored = False

    def start(self) -> None:
        """Begin to copy to the host."""
        assert self.device is not None  # noqa: S101 - the newest are on the device
        self._check_version()
        self.host, self._event = self._offload.copy_to_host(self.device)

    def leave_device(self) -> None:
        """Free the memory of the device, once it is copied."""
        self._wait_for_copy()
        self.device = None

    def load(self) -> torch.Tensor:
        """Return the memory on the device; copy it back if it is not there."""
        if self.device is None:
            assert self.host is not None  # noqa: S101 - it left the device after a copy
            self.device = self._offload.copy_to_device(self.host)
            self._restored = True
        elif self.host is None:
            self._check_version()
        return self.device

    def _check_version(self) -> None:
        """Raise as autograd does if the tensor was changed after it was saved."""
        if self.device is not None and self.device._version != self._version:
            raise RuntimeError(CHANGED.format(self._version, self.device._version))

    def _wait_for_copy(self) -> None:
        """Let the computation wait for the copy to the host, so that it may write to the memory again."""
        if self._event is not None:
            self._offload.wait_for(self._event)
            self._event = None

    def __del__(self) -> None:
        """Keep memory of the copy stream until the computation that uses it is over."""
        if self._restored and self.device is not None:
            self._offload.retire(self.device)
        else:
            self._wait_for_copy()
        if self.host is not None:
            self._offload.forget_host(self)


class SavedView(NamedTuple):
    """A saved tensor: a view of memory that may be on the host."""

    memory: HostCopy
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _SeenMemory(NamedTuple):
    """Memory that was saved before, as long as it is alive."""

    storage: weakref.ref[Any]
    version: int
    memory: weakref.ref[HostCopy]


class ActivationOffload:
    """Hooks of autograd that move what it saves to the host, for one model on one device."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model = model
        self._type = torch.device(device).type
        self._stream: Any = None
        self._depth = 0
        self._staying: set[int] = set()
        """Memory that stays on the device, by its address in torch."""
        self._seen: dict[int, _SeenMemory] = {}
        self._waiting: deque[HostCopy] = deque()
        self._retired: deque[tuple[torch.Tensor, Any]] = deque()
        self._lent: dict[int, weakref.ref[Any]] = {}
        """Memory of the copy stream that others still use."""
        self._is_backward = False
        self._held: dict[int, int] = {}
        """Bytes of every copy on the host, by id, in the order of copying."""
        self.held_bytes = 0
        """Bytes on the host now."""
        self.peak_bytes = 0
        """Most bytes on the host at a time."""
        self.peak_sizes: tuple[int, ...] = ()
        """Bytes of each copy on the host at that time."""

    @contextlib.contextmanager
    def saving(self, *inputs: Any) -> Iterator[None]:
        """Offload what autograd saves in the `with` block; `inputs` stay on the device."""
        # Blocks that are computed again in the backward pass have hooks of their own.
        if self._depth or not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            yield
            return
        self._depth += 1
        if self._is_backward:
            # The last backward pass has failed, and did not end.
            self._finish_backward()
        given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        data = [tensor for tensor in given if tensor.is_leaf and not tensor.requires_grad]
        staying = (*self._model.buffers(), *data)
        self._staying = {_address(tensor) for tensor in staying if _is_plain(tensor)}
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._depth -= 1

    # What autograd calls.

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView:
        """Return what autograd stores for a tensor: a view of memory on the host, or the tensor."""
        if not self._is_moved(tensor):
            return tensor
        with torch.no_grad():
            detached = tensor.detach()
            storage = tensor.untyped_storage()
            if detached.numel() * detached.element_size() * DENSE_SHARE < storage.nbytes():
                # The rest of the memory may be in nobody's use: copy only the view.
                detached = detached.contiguous()
                storage = detached.untyped_storage()
            memory = self._find_memory(detached, storage)
        return SavedView(
            memory,
            detached.dtype,
            tuple(detached.shape),
            tuple(detached.stride()),
            int(detached.storage_offset()),
        )

    def unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        """Return the tensor, on the device."""
        if isinstance(saved, torch.Tensor):
            return saved
        with torch.no_grad():
            self._begin_backward()
            flat = saved.memory.load()
            flat = flat if flat.dtype == saved.dtype else flat.view(saved.dtype)
            return flat.as_strided(saved.size, saved.stride, saved.offset)

    def _is_moved(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._type or tensor.numel() < SMALLEST:
            return False
        if not _is_plain(tensor) or _address(tensor) in self._staying:
            return False
        return not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter)

    def _find_memory(self, tensor: torch.Tensor, storage: Any) -> HostCopy:
        """Return the copy of a tensor's memory; a new one if it was not saved before, or has changed."""
        version = tensor._version
        seen = self._seen.get(id(storage))
        if seen is not None and seen.storage() is storage and seen.version == version:
            known = seen.memory()
            if known is not None:
                return known
        count = storage.nbytes() // tensor.element_size()
        memory = HostCopy(self, tensor.as_strided((count,), (1,), 0))
        key = id(storage)
        self._seen[key] = _SeenMemory(
            weakref.ref(storage, lambda _: self._seen.pop(key, None)), version, weakref.ref(memory)
        )
        self._waiting.append(memory)
        if len(self._waiting) > NOT_STARTED:
            self._waiting[-NOT_STARTED - 1].start()
        if len(self._waiting) > IN_FLIGHT:
            self._waiting.popleft().leave_device()
        return memory

    # Phases.

    def _begin_backward(self) -> None:
        """At the first tensor of a backward pass: leave the newest tensors on the device."""
        if self._is_backward or torch._C._current_graph_task_id() < 0:
            return
        self._is_backward = True
        # What is here is freed with autograd's graph.
        self._waiting.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._is_backward = False
        self._waiting.clear()
        while self._retired:
            self._release_oldest()

    # Copies. On the CPU they are plain copies.

    def copy_to_host(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to copy memory to the host; return the copy and the event of its end."""
        is_device = self._type == "cuda"
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=is_device)
        self._count_host(host)
        if not is_device:
            return host.copy_(flat), None
        stream = self._copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
        return host, stream.record_event()

    def copy_to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy memory back; later computation waits for it, and earlier computation does not hold it up."""
        if self._type != "cuda":
            return host.clone()
        stream = self._copy_stream()
        with torch.cuda.stream(stream):
            flat = torch.empty(host.shape, dtype=host.dtype, device=self._type)
            flat.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_event(stream.record_event())
        return flat

    def wait_for(self, event: Any) -> None:
        """Let the computation wait for an event of the copy stream."""
        torch.cuda.current_stream().wait_event(event)

    def retire(self, flat: torch.Tensor) -> None:
        """Free memory of the copy stream, not before the computation that was launched until now is over."""
        if self._type != "cuda":
            return
        self._retired.append((flat, torch.cuda.current_stream().record_event()))
        if len(self._retired) > RETIRED:
            self._release_oldest()

    def _release_oldest(self) -> None:
        flat, event = self._retired.popleft()
        stream = self._copy_stream()
        stream.wait_event(event)
        storage = flat.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) <= UNSHARED_USE_COUNT:
            return
        # Blocks that are computed again use it longer: the copy stream must not write to it before.
        key = id(storage)

        def wait_for_users(_: Any) -> None:
            stream.wait_event(torch.cuda.current_stream().record_event())
            self._lent.pop(key, None)

        self._lent[key] = weakref.ref(storage, wait_for_users)

    def _copy_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            # A trace counts its memory as activations.
            self._stream.part = "activations"
        return self._stream

    # Memory of the host.

    def _count_host(self, host: torch.Tensor) -> None:
        size = host.numel() * host.element_size()
        self._held[id(host)] = size
        self.held_bytes += size
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_sizes = self.held_bytes, tuple(self._held.values())

    def forget_host(self, memory: HostCopy) -> None:
        """Count a copy on the host no longer."""
        self.held_bytes -= self._held.pop(id(memory.host), 0)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one memory of its own."""
    return (
        tensor.layout is torch.strided
        and not hasattr(type(tensor), "__tensor_flatten__")
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def enable_activation_offload(
    model: nn.Module, entries: EntryPoints, device: str, *, compiled: bool
) -> ActivationOffload:
    """Offload what autograd saves while the model, or a method or part that loss() calls, runs."""
    if compiled:
        raise WrongUse(
            "offload of activations with compile",
            found="compiled code decides itself which activations it stores, and calls no hook for them",
            cure="Leave one of the two out.",
        )
    offload = ActivationOffload(model, device)
    for module in (model, *_list_parts(model)):
        module.forward = _offload_within(offload, module.forward)
    for name in entries.methods:
        model.__dict__[name] = _offload_within(offload, getattr(model, name))
    return offload


def _list_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the direct parts of a model, which loss() may call by themselves."""
    for part in model.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _list_parts(part)
        elif not _has_own_hooks(part) and not isinstance(part, torch.jit.ScriptModule):
            yield part


def _has_own_hooks(module: nn.Module) -> bool:
    """Whether a module computes itself again from outside of forward(), as blocks of transformers do."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _offload_within(offload: ActivationOffload, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with offload.saving(args, kwargs):
            return function(*args, **kwargs)

    return run
