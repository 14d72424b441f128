"""Writes down every allocation, free and operation that a step makes on the pretended device.

A TorchDispatchMode above FakeTensorMode: it sees each operation after autograd and autocast, as the GPU
would, and knows from storages that appear and die what the caching allocator would be asked for.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from trimtab.jobs.load import OPERATION
from trimtab.spec import Work
from trimtab.spec.trace import ENTER, GRADIENT, LEAVE
from trimtab.trace.fake_cuda import FakeStream
from trimtab.trace.fake_ops import PARTS, is_sparse, parts
from trimtab.trace.op_cost import POSITIONS, finds_positions, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from trimtab.engine.build import Entries
    from trimtab.spec import Cause
    from trimtab.trace.kernels import Kernels


def _from_engine() -> bool:
    """Whether autograd's engine itself asks, with no Python between: it runs on a thread of its own."""
    # Below the recorder itself: nothing, or what torch puts between, which differs between its releases.
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        if "/torch/" not in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return True


DEVICE = torch.ops.prim.device.default
META = torch.device("meta")


@functools.cache
def _name(func: Any) -> str:
    return str(func.name().partition(".")[0]) if hasattr(func, "name") else str(func)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operation only returns what it was given, or a view of it: no memory is taken then.

    Its result may lie in a storage that Python has not seen before, as parameters do after a deep copy.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or any(argument.is_out for argument in schema.arguments):
        # A kernel that fills memory it was given may still ask for a workspace.
        return False
    return any(one.alias_info is not None for one in schema.returns)


CALL = Work(op="call", kind="call", dtype="", kernels=0)
ENTERED, LEFT = (Work(op=op, kind="call", dtype="", kernels=0) for op in (ENTER, LEAVE))
PLAIN = (FakeTensor,)
ONE_TENSOR = 2
"""How often a storage is referred to when one tensor has it: by that tensor, and by whoever asks."""
SKIPPED = {"prim::device", "profiler::_record_function_enter_new", "profiler::_record_function_exit"}


class Recorder(TorchDispatchMode):
    """Allocations as (id, bytes, part, module, op) and the order of allocs (id) and frees (~id)."""

    def __init__(self, kernels: Kernels, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.kernels = kernels
        self.fake_mode = fake_mode
        self.order: list[int] = []
        """An allocation is its id, a free the id inverted (~id)."""
        self.sizes: list[int] = []
        self.parts: list[str] = []
        self.modules: list[str] = []
        self.ops: list[str] = []
        self.streams: list[int] = []
        self.causes: dict[int, Cause] = {}
        """What the size of an allocation follows from, where it is no straight line in the micro-batch."""
        self.marks: dict[str, int] = {}
        """Position in `order` by name: where a phase begins."""
        self.part = "weights"
        self.module = ""
        self.paused = False
        self.working = False
        """Whether operations are noted as works too."""
        self.works: dict[Work, int] = {}
        self.sequence: list[int] = []
        self.by_engine: list[bool] = []
        """Of each entry of `sequence`, whether autograd's engine ran it."""
        self.recomputed_flops = 0
        self._host = threading.get_ident()
        self.compiles = False
        """Whether torch.compile takes part: its code knows no modules, and would compile our hooks too."""
        self._inside = 0
        """The id of what is being run that torch.compile would compile as a whole; 0 outside."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._numbers: dict[int, int | None] = {}
        """The allocation that a storage lies in, by the storage's id; None while it holds nothing."""

    def __enter__(self) -> Self:
        whole = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            out = whole(storage, size)
            self.resized(storage, before)
            return out

        self._whole_resize = whole
        self._silence_sharding()
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._whole_resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _silence_sharding(self) -> None:
        """DTensor tries operations on tensors of full size to learn shapes: those are nobody's memory."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
            whole = getattr(ShardingPropagator, name, None)
            if whole is not None:
                setattr(ShardingPropagator, name, self._silently(whole))

    def _silently(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def silent(*args: Any, **kwargs: Any) -> Any:
            before, self.paused = self.paused, True
            try:
                return whole(*args, **kwargs)
            finally:
                self.paused = before

        return silent

    def mark(self, name: str, part: str) -> None:
        """A phase begins; what is allocated from now on counts as `part` until something says otherwise."""
        self.marks[name] = len(self.order)
        self.part = part

    def live(self) -> int:
        """Bytes of what was allocated since the last mark and is still there."""
        begin = max(self.marks.values(), default=0)
        alive: set[int] = set()
        for one in self.order[begin:]:
            if one >= 0:
                alive.add(one)
            else:
                alive.discard(~one)
        return sum(self.sizes[number] for number in alive)

    def note(self, done: Work | None) -> None:
        """An operation of the step that is timed."""
        if done is None:
            return
        behind = threading.get_ident() != self._host
        self.sequence.append(self.works.setdefault(done, len(self.works)))
        self.by_engine.append(behind)
        if behind and torch.is_grad_enabled():
            # Autograd's engine builds a graph only where it runs a forward pass again.
            self.recomputed_flops += done.flops

    def phases(self) -> dict[str, int]:
        """Where forward, backward and optimizer begin: the backward pass runs on a thread of its own."""
        if True not in self.by_engine:
            return {"forward": 0}
        last = len(self.by_engine) - self.by_engine[::-1].index(True)
        return {"forward": 0, "backward": self.by_engine.index(True), "optimizer": last}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            # Two thirds of all that comes here: what fake tensors answer, without their detours.
            return META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        name = _name(func)
        if self.paused or name in SKIPPED:
            return func(*args, **kwargs)
        if any(not issubclass(type_, PLAIN) and is_traceable_wrapper_subclass_type(type_) for type_ in types):
            # A DTensor and its like stand for a local tensor: the operation comes back with that one.
            return NotImplemented
        try:
            out = self.kernels.run(func, name, args, kwargs)
        except Exception as error:
            if not hasattr(error, OPERATION):
                with contextlib.suppress(AttributeError):
                    setattr(error, OPERATION, name)
            raise
        if self.working:
            self.note(POSITIONS if finds_positions(name, args) else None)
            self.note(work(func, name, args, kwargs, out))
        if name == "aten::add" and _from_engine() and self._takes_over(args[0], out):
            return out
        if not _is_view(func) or is_sparse(out):
            self._take(name, args, out)
        return out

    def _take(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Write down what an operation asks for, in the order it does."""
        leaves = [part for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) for part in parts(leaf)]
        results = deque(self._unknown(leaves))
        held = []
        for take in self.kernels.takes(name, args, out):
            if take.kind == "result":
                self._meet(results.popleft() if results else None, name)
            elif take.kind == "last result":
                self._meet(results.pop() if results else None, name)
            elif take.size and take.kind == "hold":
                held.append(self._new(take.size, "workspace", name))
            elif take.size or take.cause:
                self.temporary(take.size, name, take.cause)
        for leaf in results:
            self._meet(leaf, name)
        kept = self.kernels.kept(name, args)
        if kept:
            self.keep(kept, "workspace", "cuDNN" if name == "aten::_cudnn_rnn" else "cuBLAS")
        self.order.extend(~number for number in held)

    def _unknown(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that lie in memory not met before."""
        return [tensor for tensor in tensors if self._storage(tensor) is not None]

    def _takes_over(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether a sum of gradients lies in the memory of its first term.

        Autograd adds a second gradient into the first one in place, where nobody else holds it; it does not
        for fake tensors. The sum then takes over the block, and no memory is asked for.
        """
        if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
            return False
        before, after = old.untyped_storage(), new.untyped_storage()
        number = self._numbers.get(id(before))
        if number is None or before.nbytes() != after.nbytes():
            return False
        if torch._C._storage_Use_Count(before._cdata) > ONE_TENSOR:
            return False
        self._numbers[id(before)] = None
        self._adopt(after, number)
        return True

    def _adopt(self, storage: Any, number: int) -> None:
        key = id(storage)
        self._numbers[key] = number
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key))

    def resized(self, storage: Any, before: int) -> None:
        """A storage was emptied or filled in place, as FSDP does with gathered parameters."""
        key = id(storage)
        if key not in self._numbers or before == storage.nbytes():
            return
        number = self._numbers[key]
        if number is not None:
            self.order.append(~number)
            self._numbers[key] = None
        if storage.nbytes():
            self._numbers[key] = self._new(storage.nbytes(), self.part, "resize")

    def temporary(self, size: int, op: str, cause: Cause | None = None) -> None:
        """Memory that lives within one operation."""
        (number,) = self.together([size], op)
        if cause is not None:
            self.causes[number] = cause

    def together(self, sizes: list[int], op: str) -> list[int]:
        """Pieces of memory that live within one operation, all at once."""
        numbers = [self._new(size, "workspace", op) for size in sizes]
        self.order.extend(~number for number in numbers)
        return numbers

    @contextlib.contextmanager
    def holding(self, size: int, op: str) -> Iterator[None]:
        """Memory that lives as long as the block of code."""
        number = self._new(size, "workspace", op)
        yield
        self.order.append(~number)

    def keep(self, size: int, part: str, op: str) -> int:
        """Memory that stays to the end, such as a library's workspace."""
        return self._new(size, part, op)

    def _new(self, size: int, part: str, op: str) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.parts.append("communication" if FakeStream.current or op == "resize" else part)
        self.modules.append(self.module)
        self.ops.append(op)
        self.streams.append(FakeStream.current)
        self.order.append(number)
        return number

    def _storage(self, tensor: torch.Tensor) -> Any:
        """The storage of a tensor on the device, where it is new; None where it is known or elsewhere."""
        if (
            not isinstance(tensor, FakeTensor)
            or tensor.fake_mode is not self.fake_mode
            or tensor.fake_device.type != "cuda"
        ):
            # On the host, or made by torch to think about shapes in a fake mode of its own.
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None
        known = self._alive.get(id(storage))
        return None if known is not None and known() is storage else storage

    def _meet(self, tensor: torch.Tensor | None, op: str) -> None:
        """A tensor that an operation returned: new memory, or memory already known."""
        storage = self._storage(tensor) if tensor is not None else None
        if storage is not None:
            self._adopt(storage, self._new(storage.nbytes(), self.part, op))

    def _gone(self, key: int) -> None:
        number = self._numbers.pop(key, None)
        self._alive.pop(key, None)
        if number is not None:
            self.order.append(~number)

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Run something after the end of a trace of which nothing is written down."""
        columns: list[list[Any]] = [self.order, self.sizes, self.parts, self.modules, self.ops, self.streams]
        lengths = [len(column) for column in columns]
        causes = dict(self.causes)
        try:
            yield
        finally:
            for column, length in zip(columns, lengths, strict=True):
                del column[length:]
            self.causes = causes

    def forget_works(self) -> None:
        """The operations noted so far were not those of the step that is timed."""
        self.works.clear()
        self.sequence.clear()
        self.by_engine.clear()
        self.recomputed_flops = 0

    def repeat(self, before: str, last: str, name: str) -> bool:
        """Write down the last step once more, as `name`, where it left behind what the one before it did.

        A step is settled when it ends as it began: what it freed of the step before it, its own end leaves in
        the same order, sizes and all, for the next one to free. That one then does the same again. False, and
        nothing is written, where it is not so.
        """
        begin, end = self.marks[last], len(self.order)
        own = [one for one in self.order[begin:end] if one >= 0]
        freed = {~one for one in self.order[begin:end] if one < 0}
        earlier = {one for one in self.order[self.marks[before] : begin] if one >= 0}
        left = sorted(set(own) - freed)
        found = sorted(freed - set(own))
        if not earlier.issuperset(found) or list(map(self._kind, left)) != list(map(self._kind, found)):
            return False
        self.mark(name, self.part)
        again = dict(zip(found, left, strict=True))
        for number in own:
            again[number] = len(self.sizes)
            self.sizes.append(self.sizes[number])
            self.streams.append(self.streams[number])
            for column in (self.parts, self.modules, self.ops):
                column.append(column[number])
            if number in self.causes:
                self.causes[again[number]] = self.causes[number]
        self.order += [again[one] if one >= 0 else ~again[~one] for one in self.order[begin:end]]
        return True

    def _kind(self, number: int) -> tuple[int, str, str, str, int]:
        words = self.parts[number], self.modules[number], self.ops[number]
        return self.sizes[number], *words, self.streams[number]

    def name_modules(self, model: Any, entries: Entries) -> None:
        """Note from now on in which module of the model memory is taken, and what would be compiled."""
        names = {id(module): name for name, module in model.named_modules()}
        stack = [""]
        children = dict(model.named_children())
        compiled = {id(model), *(id(children[name]) for name in entries.children)}

        def begins_compiled(module: Any) -> bool:
            # Modules inside a compiled one are compiled with it.
            return id(module) in compiled and self._inside in (0, id(module))

        def enter(module: Any, _: Any) -> None:
            stack.append(names.get(id(module), stack[-1]))
            self.module = stack[-1]
            if self.working:
                self.note(ENTERED if begins_compiled(module) else CALL)
            if begins_compiled(module):
                self._inside = id(module)

        def leave(module: Any, _: Any, __: Any) -> None:
            if len(stack) > 1:
                stack.pop()
            self.module = stack[-1]
            if self._inside == id(module):
                self._inside = 0
                if self.working:
                    self.note(LEFT)

        for name in entries.methods:
            model.__dict__[name] = self._noting_entry(getattr(model, name))
        torch.nn.modules.module.register_module_forward_pre_hook(enter)
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True)

    def _noting_entry(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the model that loss() calls: torch.compile would compile it as a whole."""

        @functools.wraps(whole)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return whole(*args, **kwargs)
            self._inside = id(called)
            try:
                if self.working:
                    self.note(ENTERED)
                return whole(*args, **kwargs)
            finally:
                self._inside = 0
                if self.working:
                    self.note(LEFT)

        return called

    def forget(self, modules: list[Any]) -> None:
        """Modules turn out not to be for this device: neither they nor what was given back since count."""
        tensors = [parameter for module in modules for parameter in (*module.parameters(), *module.buffers())]
        numbers = {self._numbers.pop(id(tensor.untyped_storage()), None) for tensor in tensors}
        numbers |= {~number for number in self.order if number < 0}
        self.order = [one for one in self.order if one not in numbers and ~one not in numbers]

    def relabel(self, tensor: torch.Tensor, part: str, module: str | None = None) -> None:
        """Say what a tensor's memory turned out to be for, and of which module or parameter it is."""
        if is_sparse(tensor):
            for held in getattr(tensor, PARTS, ()):
                self.relabel(held, part, module)
            return
        number = self._numbers.get(id(tensor.untyped_storage()))
        if number is not None:
            self.parts[number] = part
            if module is not None:
                self.modules[number] = module

    def watch_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Note when the gradient of a parameter is complete, as an allocation of no bytes.

        Where gradients are views of buckets, autograd's own is added to the view and freed at this point.
        """

        def arrived(_: torch.Tensor) -> None:
            number = self._new(0, "workspace", GRADIENT)
            self.modules[number] = name
            self.order.append(~number)

        parameter.register_post_accumulate_grad_hook(arrived)
