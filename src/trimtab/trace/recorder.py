"""Record every allocation, free and operation of a training step on the fake CUDA device.

The recorder is a TorchDispatchMode above FakeTensorMode. It sees each operation after autograd and autocast,
as the GPU would. New and freed storages show what the caching allocator would be asked for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from trimtab.jobs.load import OPERATION
from trimtab.spec import Work
from trimtab.spec.trace import EMPTY_CACHE, ENTER, GRADIENT, LEAVE, SEARCH, UPDATE_CALL, ZERO_GRADIENTS
from trimtab.trace.common_devices import note_special_fact
from trimtab.trace.fake_cuda import FakeStream
from trimtab.trace.fake_ops import PARTS_ATTRIBUTE, is_sparse, list_storage_tensors
from trimtab.trace.op_cost import FIND_POSITIONS, describe_work, needs_positions, read_work_state
from trimtab.trace.packed_attention import PACKED_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from trimtab.engine.build import EntryPoints
    from trimtab.spec import SizeCause
    from trimtab.trace.kernels import Kernels
    from trimtab.trace.workspaces import MemoryRequest


OWN_FOLDER = str(Path(__file__).parent.parent)
"""The folder of trimtab."""


def is_called_by_autograd() -> bool:
    """Whether autograd's engine called the operation directly. The engine runs on a separate thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDER):
        frame = frame.f_back
    # Then all callers of the recorder are frames of torch, which differ between its releases.
    while frame is not None:
        if "/torch/" not in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return True


DEVICE = torch.ops.prim.device.default
META = torch.device("meta")


class OpTraits(NamedTuple):
    """What the recorder has to know about an operation."""

    func: Any
    """The operation. It is kept alive, so that its id is not that of another one."""
    name: str
    """Its name, without its overload."""
    is_skipped: bool
    is_view: bool
    has_own_works: bool
    """Whether its works follow from the layouts of its arguments, and not from values."""


def find_op_name(func: Any) -> str:
    """Return the name of an operation, without its overload."""
    return str(func.name().partition(".")[0]) if hasattr(func, "name") else str(func)


def is_view_op(func: Any) -> bool:
    """Whether an operation only returns an input or a view of it, and so allocates nothing.

    The storage of its result may still be new to Python, as for parameters after a deep copy.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or any(argument.is_out for argument in schema.arguments):
        # A kernel that writes to an `out` argument may still request a workspace.
        return False
    return any(result.alias_info is not None for result in schema.returns)


TRAITS: dict[int, OpTraits] = {}
"""Traits of operations by their ids: their own hash is slow."""


def read_traits(func: Any) -> OpTraits:
    """Return what the recorder has to know about an operation."""
    traits = TRAITS.get(id(func))
    if traits is None:
        name = find_op_name(func)
        traits = TRAITS[id(func)] = OpTraits(
            func, name, name in SKIPPED_OPS, is_view_op(func), name not in PACKED_OPS
        )
    return traits


@functools.cache
def has_wrapper(types: tuple[type, ...]) -> bool:
    """Whether one of several types of tensors wraps others, such as DTensor."""
    return any(
        not issubclass(type_, PLAIN_TYPES) and is_traceable_wrapper_subclass_type(type_) for type_ in types
    )


CALL_WORK = Work(op="call", kind="call", dtype="", kernels=0)
ENTER_WORK, LEAVE_WORK = (Work(op=op, kind="call", dtype="", kernels=0) for op in (ENTER, LEAVE))
UPDATE_WORK = Work(op=UPDATE_CALL, kind="call", dtype="", kernels=0)
"""A call of an optimizer in the backward pass, for one weight."""
PLAIN_TYPES = (FakeTensor,)
UNSHARED_USE_COUNT = 2
"""Use count of a storage that belongs to one tensor: that tensor, and the Python object that reads it."""
SEARCH_SHARE = 0.85
"""Share of the device's memory up to which a search of cuDNN counts: torch leaves out what does not fit."""
SKIPPED_OPS = {"prim::device", "profiler::_record_function_enter_new", "profiler::_record_function_exit"}


def list_works(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Work]:
    """Return what an operation that returned `out` does on the device."""
    works = [FIND_POSITIONS] if needs_positions(name, args) else []
    work = describe_work(func, name, args, kwargs, out)
    return works if work is None else [*works, work]


def is_tracked_by_autograd(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether autograd records a node for an operation of the forward pass."""
    if not torch.is_grad_enabled():
        return False
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and any(
            isinstance(part, torch.Tensor) and part.requires_grad for part in value
        ):
            return True
    return False


def mark_untracked(works: list[Work]) -> list[Work]:
    """Return the works of an operation for which autograd records no node."""
    return [
        work.replace(untracked=True) if work.kernels and work.kind != "optimizer" else work for work in works
    ]


def list_result_tensors(out: Any) -> list[torch.Tensor]:
    """Return the tensors that own the memory of the results of an operation."""
    return [
        part
        for leaf in ((out,) if type(out) is FakeTensor else tree_leaves(out))
        if isinstance(leaf, torch.Tensor)
        for part in list_storage_tensors(leaf)
    ]


class Recorder(TorchDispatchMode):
    """Records allocations as columns (bytes, part, module, op, stream), and the order of allocs and frees."""

    def __init__(self, kernels: Kernels, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.kernels = kernels
        self.fake_mode = fake_mode
        self.order: list[int] = []
        """Events: the id for an allocation, the inverted id (~id) for a free."""
        self.sizes: list[int] = []
        self.parts: list[str] = []
        self.modules: list[str] = []
        self.ops: list[str] = []
        self.streams: list[int] = []
        self.causes: dict[int, SizeCause] = {}
        """Formulas of sizes that do not grow linearly with the micro-batch, by id."""
        self.marks: dict[str, int] = {}
        """Position in `order` where a phase begins, by name."""
        self.part = "weights"
        self.module = ""
        self.paused = False
        self.records_work = False
        """Whether the work of operations is recorded too."""
        self.works: dict[Work, int] = {}
        self.sequence: list[int] = []
        self.by_engine: list[bool] = []
        self.noted_phases: dict[str, int] = {}
        """Position in `sequence` of phases that the step announces: weights, and optimizer after them."""
        """Whether autograd's engine ran it, for each entry of `sequence`."""
        self.recomputed_flops = 0
        self._main_thread = threading.get_ident()
        self.uses_compile = False
        """Whether torch.compile is used. Module hooks are left out then, as it would compile them too."""
        self._compiled_id = 0
        """Id of the running module or method that torch.compile would compile as a unit; 0 outside."""
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._allocation_ids: dict[int, int | None] = {}
        """Allocation of a storage, by the storage's id; None while it is empty."""
        self.emptied: set[int] = set()
        """Allocations whose storage was resized, as FSDP2 does with weights that it has gathered."""

    def __enter__(self) -> Self:
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            out = original(storage, size)
            self.record_resize(storage, before)
            return out

        self._original_resize = original
        self._pause_in_sharding()
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _pause_in_sharding(self) -> None:
        """Record nothing while DTensor runs operations on full-size tensors only to find shapes."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
            method = getattr(ShardingPropagator, name, None)
            if method is not None:
                setattr(ShardingPropagator, name, self._wrap_paused(method))

    def _wrap_paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_paused(*args: Any, **kwargs: Any) -> Any:
            before, self.paused = self.paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = before

        return run_paused

    def mark_phase(self, name: str, part: str) -> None:
        """Begin a phase. Later allocations count as `part` until they are relabelled."""
        self.marks[name] = len(self.order)
        self.part = part

    def live_bytes(self) -> int:
        """Return the bytes allocated since the last mark and not freed."""
        begin = max(self.marks.values(), default=0)
        alive: set[int] = set()
        for event in self.order[begin:]:
            if event >= 0:
                alive.add(event)
            else:
                alive.discard(~event)
        return sum(self.sizes[number] for number in alive)

    def _is_in_engine(self) -> bool:
        return threading.get_ident() != self._main_thread

    def add_work(self, work: Work) -> None:
        """Record an operation of the step that is timed."""
        in_engine = self._is_in_engine()
        self.sequence.append(self.works.setdefault(work, len(self.works)))
        self.by_engine.append(in_engine)
        if in_engine and torch.is_grad_enabled():
            # Autograd's engine builds a graph only when it recomputes a forward pass.
            self.recomputed_flops += work.flops

    def phases(self) -> dict[str, int]:
        """Return where forward, backward and optimizer begin. The backward pass runs on a separate thread."""
        works = list(self.works)
        zeroed = itertools.takewhile(lambda place: works[place].op == ZERO_GRADIENTS, self.sequence)
        forward = sum(1 for _ in zeroed)
        if True not in self.by_engine:
            return {"forward": forward}
        last = len(self.by_engine) - self.by_engine[::-1].index(True)
        return {
            "forward": forward,
            "backward": self.by_engine.index(True),
            "optimizer": last,
        } | self.noted_phases

    def note_phase(self, name: str) -> None:
        """Note that a phase of the step begins which the thread of an operation does not show."""
        if self.records_work:
            self.noted_phases[name] = len(self.sequence)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            # Two thirds of all calls: return the answer of fake tensors, without their overhead.
            return META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        return self.run_operation(func, types, args, kwargs or {})

    def run_operation(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors, and record it."""
        traits = read_traits(func)
        name = traits.name
        if self.paused or traits.is_skipped:
            return func(*args, **kwargs)
        if types != PLAIN_TYPES and has_wrapper(tuple(types)):
            # A wrapper such as DTensor: it calls the operation again with its local tensor.
            return NotImplemented
        try:
            out = self.kernels.run(func, name, args, kwargs)
        except Exception as error:
            if not hasattr(error, OPERATION):
                with contextlib.suppress(AttributeError):
                    setattr(error, OPERATION, name)
            raise
        if self.records_work:
            works, untracked = self._list_works(traits, args, kwargs, out)
            if works and not self._is_in_engine() and not is_tracked_by_autograd(args, kwargs):
                works = untracked
            for work in works:
                self.add_work(work)
        if name == "aten::add" and is_called_by_autograd() and self.reuse_memory(args[0], out):
            return out
        if not traits.is_view or is_sparse(out):
            self.record_op(name, args, out)
        return out

    def _list_works(
        self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[list[Work], list[Work]]:
        """Return what an operation does on the device, if autograd tracks it and if not.

        An operation that was described before with arguments of the same layouts is not described again.
        """
        values = self.kernels.values
        call = values.results.current
        if call is None or not traits.has_own_works or values.has_ragged:
            works = list_works(traits.func, traits.name, args, kwargs, out)
            return works, mark_untracked(works)
        state = read_work_state(traits.name)
        if call.works is None or call.state != state:
            works = list_works(traits.func, traits.name, args, kwargs, out)
            call.works, call.state = (works, mark_untracked(works)), state
        return call.works

    def record_op(
        self,
        name: str,
        args: tuple[Any, ...],
        out: Any,
        *,
        leaves: list[Any] | None = None,
        requests: Sequence[MemoryRequest] | None = None,
    ) -> None:
        """Record the allocations of an operation, in its order.

        `leaves` are its results and `requests` what it asks for, if they are known.
        """
        if leaves is None:
            leaves = list_result_tensors(out)
        if requests is None:
            requests = self.kernels.list_requests(name, args, out)
        # Without requests, each result is looked up only once.
        results = deque(self._select_new(leaves) if requests else leaves)
        workspaces = []
        for request in requests:
            if request.kind == "result":
                self._record_result(results.popleft() if results else None, name)
            elif request.kind == "last result":
                self._record_result(results.pop() if results else None, name)
            elif request.size and request.kind == "hold":
                workspaces.append(self._add_allocation(request.size, "workspace", name))
            elif request.kind == "search":
                self.record_search(request)
            elif request.size or request.cause:
                self.add_temporary(request.size, name, request.cause)
        for leaf in results:
            self._record_result(leaf, name)
        self._record_persistent(name, args)
        self.order.extend(~number for number in workspaces)

    def _record_persistent(self, name: str, args: tuple[Any, ...]) -> None:
        """Record what a library allocates at this operation and never frees."""
        persistent = self.kernels.persistent_bytes(name, args)
        if persistent:
            library = "cuDNN" if name == "aten::_cudnn_rnn" else "cuBLAS"
            self._add_allocation(persistent, "workspace", library)

    def record_search(self, request: MemoryRequest) -> None:
        """Record the largest trial of cuDNN that fits beside what is live; torch then empties its cache."""
        live = sum(self.sizes[event] if event >= 0 else -self.sizes[~event] for event in self.order)
        room = int(SEARCH_SHARE * self.kernels.target.memory_bytes) - live
        note_special_fact()
        if request.size <= room:
            self.add_temporary(request.size, SEARCH, request.cause)
        else:
            self.add_temporary(next((size for size in request.smaller if size <= room), 0), SEARCH)
        self.add_temporary(0, EMPTY_CACHE)

    def _select_new(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors whose storage is not recorded yet."""
        return [tensor for tensor in tensors if self._find_new_storage(tensor) is not None]

    def reuse_memory(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Give a sum of gradients the memory of its first term; return whether that was possible.

        Autograd adds a second gradient to the first one in place if nothing else refers to it. It does not do
        so for fake tensors, so here the sum takes over the block and nothing is allocated.
        """
        if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
            return False
        before, after = old.untyped_storage(), new.untyped_storage()
        number = self._allocation_ids.get(id(before))
        if number is None or before.nbytes() != after.nbytes():
            return False
        if torch._C._storage_Use_Count(before._cdata) > UNSHARED_USE_COUNT:
            return False
        self._allocation_ids[id(before)] = None
        self._track_storage(after, number)
        return True

    def _track_storage(self, storage: Any, number: int) -> None:
        key = id(storage)
        self._allocation_ids[key] = number
        self._storages[key] = weakref.ref(storage, lambda _: self._record_free(key))

    def record_resize(self, storage: Any, before: int) -> None:
        """Record that a storage was resized in place, as FSDP does with gathered parameters."""
        key = id(storage)
        if key not in self._allocation_ids or before == storage.nbytes():
            return
        number = self._allocation_ids[key]
        if number is not None:
            self.order.append(~number)
            self._allocation_ids[key] = None
            self.emptied.add(number)
        if storage.nbytes():
            self._allocation_ids[key] = self._add_allocation(storage.nbytes(), self.part, "resize")

    def add_temporary(self, size: int, op: str, cause: SizeCause | None = None) -> None:
        """Record memory that is allocated and freed within an operation."""
        (number,) = self.add_temporaries([size], op)
        if cause is not None:
            self.causes[number] = cause

    def add_temporaries(self, sizes: list[int], op: str) -> list[int]:
        """Record several blocks of memory that exist together within an operation; return their ids."""
        numbers = [self._add_allocation(size, "workspace", op) for size in sizes]
        self.order.extend(~number for number in numbers)
        return numbers

    @contextlib.contextmanager
    def hold_memory(self, size: int, op: str) -> Iterator[None]:
        """Record memory that is freed at the end of the `with` block."""
        number = self._add_allocation(size, "workspace", op)
        yield
        self.order.append(~number)

    def _add_allocation(self, size: int, part: str, op: str) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        communicates = (FakeStream.current and not FakeStream.current_part) or op == "resize"
        self.parts.append("communication" if communicates else part)
        self.modules.append(self.module)
        self.ops.append(op)
        self.streams.append(FakeStream.current)
        self.order.append(number)
        return number

    def _find_new_storage(self, tensor: torch.Tensor) -> Any:
        """Return the storage of a tensor if it is on the device and not recorded yet, else None."""
        if (
            not isinstance(tensor, FakeTensor)
            or tensor.fake_mode is not self.fake_mode
            or tensor.fake_device.type != "cuda"
        ):
            # On the host, or created by torch in another fake mode to compute shapes.
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None
        recorded = self._storages.get(id(storage))
        return None if recorded is not None and recorded() is storage else storage

    def _record_result(self, tensor: torch.Tensor | None, op: str) -> None:
        """Record the memory of a result of an operation, if it is new."""
        storage = self._find_new_storage(tensor) if tensor is not None else None
        if storage is not None:
            self._track_storage(storage, self._add_allocation(storage.nbytes(), self.part, op))

    def _record_free(self, key: int) -> None:
        number = self._allocation_ids.pop(key, None)
        self._storages.pop(key, None)
        if number is not None:
            self.order.append(~number)

    @contextlib.contextmanager
    def discard_changes(self) -> Iterator[None]:
        """Discard all that is recorded within the `with` block."""
        columns: list[list[Any]] = [self.order, self.sizes, self.parts, self.modules, self.ops, self.streams]
        lengths = [len(column) for column in columns]
        causes = dict(self.causes)
        try:
            yield
        finally:
            for column, length in zip(columns, lengths, strict=True):
                del column[length:]
            self.causes = causes

    def clear_works(self) -> None:
        """Remove all works: they were not those of the step that is timed."""
        self.works.clear()
        self.sequence.clear()
        self.by_engine.clear()
        self.recomputed_flops = 0

    def copy_work(self, work: Work, *, in_engine: bool) -> None:
        """Record an operation of an earlier step again."""
        self.sequence.append(self.works.setdefault(work, len(self.works)))
        self.by_engine.append(in_engine)

    def find_allocation(self, tensor: torch.Tensor) -> int | None:
        """Return the allocation that holds a tensor; None if none is known."""
        try:
            return self._allocation_ids.get(id(tensor.untyped_storage()))
        except NotImplementedError:
            return None

    def move_allocations(self, copies: dict[int, int]) -> None:
        """Let what is alive now belong to the copies of its allocations."""
        for key, live in self._allocation_ids.items():
            if live is not None:
                self._allocation_ids[key] = copies.get(live, live)

    def track_modules(self, model: Any, entries: EntryPoints) -> None:
        """Record from now on which module allocates memory, and where compiled modules begin and end."""
        from trimtab.engine.pipeline_stage import RemoteBlock

        # A pass ends in the middle of a placeholder; what follows belongs to no block.
        named = model.named_modules()
        names = {id(module): name for name, module in named if not isinstance(module, RemoteBlock)}
        stack = [""]
        children = dict(model.named_children())
        compiled = {id(model), *(id(children[name]) for name in entries.children)}

        def begins_compiled(module: Any) -> bool:
            # Modules inside a compiled one are compiled with it.
            return id(module) in compiled and self._compiled_id in (0, id(module))

        def enter(module: Any, _: Any) -> None:
            stack.append(names.get(id(module), stack[-1]))
            self.module = stack[-1]
            if self.records_work:
                self.add_work(ENTER_WORK if begins_compiled(module) else CALL_WORK)
            if begins_compiled(module):
                self._compiled_id = id(module)

        def leave(module: Any, _: Any, __: Any) -> None:
            if len(stack) > 1:
                stack.pop()
            self.module = stack[-1]
            if self._compiled_id == id(module):
                self._compiled_id = 0
                if self.records_work:
                    self.add_work(LEAVE_WORK)

        for name in entries.methods:
            model.__dict__[name] = self._wrap_entry(getattr(model, name))
        torch.nn.modules.module.register_module_forward_pre_hook(enter)
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True)

    def _wrap_entry(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the model that loss() calls, which torch.compile would compile as a unit."""

        @functools.wraps(method)
        def run_entry(*args: Any, **kwargs: Any) -> Any:
            if self._compiled_id:
                return method(*args, **kwargs)
            self._compiled_id = id(run_entry)
            try:
                if self.records_work:
                    self.add_work(ENTER_WORK)
                return method(*args, **kwargs)
            finally:
                self._compiled_id = 0
                if self.records_work:
                    self.add_work(LEAVE_WORK)

        return run_entry

    def forget_modules(self, modules: list[Any], parameters: Sequence[Any] = ()) -> None:
        """Remove what does not belong on this device, and all memory that has been freed."""
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        tensors += parameters
        numbers = {self._allocation_ids.pop(id(tensor.untyped_storage()), None) for tensor in tensors}
        numbers |= {~number for number in self.order if number < 0}
        self.order = [event for event in self.order if event not in numbers and ~event not in numbers]

    def relabel(self, tensor: torch.Tensor, part: str, module: str | None = None) -> None:
        """Set the part of a tensor's memory, and the module or parameter that it belongs to."""
        if is_sparse(tensor):
            for component in getattr(tensor, PARTS_ATTRIBUTE, ()):
                self.relabel(component, part, module)
            return
        number = self._allocation_ids.get(id(tensor.untyped_storage()))
        if number is not None:
            self.parts[number] = part
            if module is not None:
                self.modules[number] = module

    def watch_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Record when the gradient of a parameter is complete, as an allocation of 0 bytes.

        If gradients are views of buckets, autograd's own gradient is added to the view and freed then.
        """

        def record_gradient(_: torch.Tensor) -> None:
            number = self._add_allocation(0, "workspace", GRADIENT)
            self.modules[number] = name
            self.order.append(~number)

        parameter.register_post_accumulate_grad_hook(record_gradient)
