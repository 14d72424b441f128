"""Remember which tensors operations return, so that a repeated operation skips torch's fake kernels.

The shapes, strides, dtypes and devices of results follow from those of the arguments. A training step repeats
few distinct operations many times, and working out their results takes most of the time of a trace. Only
operations are remembered whose schema says that they return new tensors, views of their first argument, or
that argument itself; all others run as usual.

Forks of one worker process trace the same model on the same device, so they share what they remember: a fork
packs its new results, and its parent gives them to the next forks.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch._subclasses.fake_tensor import FakeTensorMode

    from trimtab.spec import Work

TENSOR_TYPES = ("Tensor", "List[Tensor]")
UNCACHED_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
META = torch.device("meta")
PLAIN_TYPES = {
    *(bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
}


class ResultKind(Enum):
    """What an operation returns."""

    TENSORS = "new tensors, or views of its first argument"
    FIRST = "its first argument, changed in place"
    NOTHING = "nothing: it changes its arguments"


class TensorLayout(NamedTuple):
    """Everything about a result but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool
    """Whether it has the memory of the first tensor among the arguments."""


class CachedResult(NamedTuple):
    """The results of an operation."""

    layouts: tuple[TensorLayout, ...]
    container: type | None
    """tuple or list; None for a single tensor."""


class CannotCache(Exception):  # noqa: N818 - not an error: the operation runs as usual
    """An argument or a result of an operation has more than a layout."""


Results = dict[Any, dict[Any, CachedResult]]
"""Results by operation, then by the layouts of its arguments."""
SHARED: Results = {}
"""Results that forks of this process have packed."""


class AlikeCalls:
    """All calls of an operation with arguments of the same layouts."""

    __slots__ = ("is_known", "result", "state", "works")

    def __init__(self, result: CachedResult | None) -> None:
        self.result = result
        """None if it is not known, or cannot be cached."""
        self.is_known = result is not None
        """Whether `result` is known, even if it cannot be cached."""
        self.works: tuple[list[Work], list[Work]] | None = None
        """What the calls do on the device, if that was described: tracked by autograd, and untracked."""
        self.state: Hashable = None
        """What else `works` depends on."""


class Operation:
    """An operation, and its calls by the layouts of their arguments."""

    __slots__ = ("calls", "func", "kind", "shared")

    def __init__(self, func: Any, shared: dict[Any, CachedResult]) -> None:
        self.func = func
        self.kind = find_result_kind(func)
        self.shared = shared
        """Results that other processes have found."""
        self.calls: dict[Hashable, AlikeCalls] = {}

    def find_call(self, key: Hashable) -> AlikeCalls:
        """Return the calls with arguments of these layouts."""
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = AlikeCalls(self.shared.get(key))
        return call


class ResultCache:
    """Results of operations by the layouts of their arguments."""

    def __init__(self) -> None:
        self.hits = 0
        self.current: AlikeCalls | None = None
        """The last call, if its result follows from the layouts of its arguments alone."""
        self._shared: Results = {func: dict(results) for func, results in SHARED.items()}
        self._operations: dict[int, Operation] = {}
        """By the id of torch's operation: its own hash is slow."""

    def pack_results(self) -> bytes:
        """Return the results that this process does not share yet, for `share_results` in another process."""
        new: Results = {}
        for operation in self._operations.values():
            shared = SHARED.get(operation.func, {})
            results = {
                key: call.result
                for key, call in operation.calls.items()
                if call.result is not None and key not in shared
            }
            if results:
                new[operation.func] = results
        return pack_results(new)

    def add_results(self, packed: bytes) -> None:
        """Add what a fork of this process has packed."""
        if packed:
            _merge_results(self._shared, unpack_results(packed))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or make its results from those of an equal call."""
        operation = self._operations.get(id(func))
        if operation is None:
            operation = Operation(func, self._shared.setdefault(func, {}))
            self._operations[id(func)] = operation
        kind = operation.kind
        if kind is None or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        tensors: list[FakeTensor] = []
        try:
            named = describe_value(tuple(kwargs.items()), tensors) if kwargs else ()
            key = torch.get_default_dtype(), describe_value(args, tensors), named
        except CannotCache:
            return func(*args, **kwargs)
        if not tensors or tensors[0].fake_mode.in_kernel_invocation:
            return func(*args, **kwargs)
        call = operation.find_call(key)
        if call.result is not None:
            self.hits += 1
            out = _make_results(call.result, kind, tensors[0])
        else:
            out = func(*args, **kwargs)
            if not call.is_known:
                call.is_known, call.result = True, _describe_results(out, kind, tensors)
        if call.result is not None and _shows_works(kind, tensors):
            self.current = call
        return out


def _shows_works(kind: ResultKind, tensors: list[FakeTensor]) -> bool:
    """Whether the works of a call follow from the layouts: a tensor may be given twice, and changed."""
    if kind is ResultKind.FIRST:
        first = tensors[0]
        return all(tensor is not first for tensor in tensors[1:])
    return kind is ResultKind.TENSORS


def _merge_results(results: Results, more: Results) -> None:
    for func, added in more.items():
        results.setdefault(func, {}).update(added)


def pack_results(results: Results) -> bytes:
    """Return results as bytes; empty if one of them is bound to this process."""
    packed = io.BytesIO()
    pickler = pickle.Pickler(packed)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[OpOverload] = _reduce_operation
    try:
        pickler.dump(results)
    except (pickle.PicklingError, TypeError, AttributeError):
        return b""
    return packed.getvalue()


def unpack_results(packed: bytes) -> Results:
    """Return the results that a fork of this process has packed."""
    results: Results = pickle.loads(packed)  # noqa: S301 - a fork wrote it
    return results


def share_results(packed: bytes) -> None:
    """Give the results of a fork to the next forks of this process."""
    if packed:
        _merge_results(SHARED, unpack_results(packed))


def _reduce_operation(operation: OpOverload) -> tuple[Any, ...]:
    return _find_operation, (operation.namespace, operation._opname, operation._overloadname)


def _find_operation(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def find_result_kind(func: Any) -> ResultKind | None:
    """Return what an operation returns by its schema; None if it is not remembered."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace != "aten" or UNCACHED_TAGS.intersection(func.tags):
        return None
    returned = [str(value.type) for value in schema.returns]
    if any(kind not in TENSOR_TYPES for kind in returned):
        return None
    written = [number for number, arg in enumerate(schema.arguments) if arg.is_write]
    aliased = [number for number, arg in enumerate(schema.arguments) if arg.alias_info is not None]
    if not returned:
        return ResultKind.NOTHING if written else None
    if not aliased or (aliased == [0] and not written):
        return ResultKind.TENSORS
    return ResultKind.FIRST if aliased == [0] and returned == ["Tensor"] else None


def describe_value(value: Any, tensors: list[FakeTensor]) -> Hashable:
    """Return a key of an argument; add its tensors to `tensors`."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
            raise CannotCache
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if kind in PLAIN_TYPES:
        # 1, 1.0 and True are equal, and give other dtypes.
        return kind, value
    if kind is tuple or kind is list:
        return kind, tuple(
            [
                (type(item), item) if type(item) in PLAIN_TYPES else describe_value(item, tensors)
                for item in value
            ]
        )
    raise CannotCache


def _describe_results(out: Any, kind: ResultKind, tensors: list[FakeTensor]) -> CachedResult | None:
    """Return results to remember; None if they are not what the schema says."""
    if kind is ResultKind.NOTHING:
        return CachedResult((), None) if out is None else None
    if kind is ResultKind.FIRST:
        return CachedResult((), None) if out is tensors[0] else None
    container = type(out) if isinstance(out, tuple | list) else None
    results = list(out) if isinstance(out, tuple | list) else [out]
    if container not in (None, tuple, list) or any(type(result) is not FakeTensor for result in results):
        return None
    if any(result.constant is not None or result.layout is not torch.strided for result in results):
        return None
    storages = [result.untyped_storage()._cdata for result in results]
    given = [tensor.untyped_storage()._cdata for tensor in tensors]
    are_views = [storage == given[0] for storage in storages]
    new = [result for result, is_view in zip(results, are_views, strict=True) if not is_view]
    fresh = {storage for storage in storages if storage not in given}
    if len(fresh) < len(new) or not all(map(_fills_storage, new)) or any(out is tensor for tensor in tensors):
        return None
    return CachedResult(
        tuple(
            TensorLayout(
                tuple(result.shape),
                result.stride(),
                result.storage_offset(),
                result.dtype,
                result.fake_device,
                is_view,
            )
            for result, is_view in zip(results, are_views, strict=True)
        ),
        container,
    )


def _fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has exactly the storage that a new tensor of its layout gets."""
    last = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = 0 if tensor.numel() == 0 else last * tensor.element_size()
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == needed


def _make_results(result: CachedResult, kind: ResultKind, first: FakeTensor) -> Any:
    if kind is ResultKind.NOTHING:
        return None
    if kind is ResultKind.FIRST:
        return first
    made = []
    mode = first.fake_mode
    with torch._C._DisableTorchDispatch():
        for shape, stride, offset, dtype, device, is_view in result.layouts:
            if is_view:
                meta = torch.empty((0,), dtype=dtype, device=META)
                meta.set_(first.untyped_storage(), offset, shape, stride)
            else:
                meta = torch.empty_strided(shape, stride, dtype=dtype, device=META)
            made.append(_make_fake(mode, meta, device))
    return made[0] if result.container is None else result.container(made)


_BLANKS: dict[torch.device, tuple[FakeTensorMode, dict[str, Any]]] = {}
"""The attributes of a new fake tensor on a device, and its mode."""


def _make_fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """Return a new fake tensor, as its class makes it, without the checks of arguments after the first."""
    blank_mode, blank = _BLANKS.get(device, (None, {}))
    if blank_mode is not mode:
        made = FakeTensor(mode, meta, device)
        _BLANKS[device] = mode, dict(made.__dict__)
        return made
    tensor: Any = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    else:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.__dict__.update(blank)
    return tensor
