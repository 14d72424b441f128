"""Follow scripts that use bitsandbytes: weights and optimizer states in 4 and 8 bits, without its kernels.

The package itself runs, but each of its operations calls our own of the same memory and cost
(`engine/low_bit.py`, `engine/low_bit_optimizer.py`). So a script and the same job with `--base nf4` get the
same estimate. The package needs no GPU here, but it must be installed, because the script imports it.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.engine import low_bit, low_bit_optimizer
from trimtab.scripts.moved_parameters import PARAMETER_CLASS
from trimtab.scripts.observer import put
from trimtab.trace.fake_cuda import MODULE_PATCHES

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.observer import Observer

PACKAGE = "bitsandbytes"
OWN_OPERATIONS = (low_bit.LIBRARY, low_bit_optimizer.LIBRARY)
"""Imported so that `torch.ops.trimtab` has the operations that stand in for those of bitsandbytes."""
FUSED_ROWS = 16
"""Rows up to which a product with 4-bit weights is taken to run in one kernel, without restored weights. The
package decides by GPU and shape; training passes have far more rows."""
PAGED_NOTE = (
    "paged optimizer states are taken to be in the memory of the host: they count as no GPU memory, and the "
    "time to move them is not included"
)
OUTLIER_NOTE = "no activation is taken to be large enough to be multiplied in 16 bits (LLM.int8)"


def patch_bitsandbytes(observer: Observer, fake_mode: Any) -> None:
    """Patch the package when the script imports it."""

    def patch(package: Any) -> None:
        _patch_parameters(package, observer, fake_mode)
        _patch_operations(observer)
        _patch_paged_memory(observer, fake_mode)

    MODULE_PATCHES["peft.utils.integrations"] = patch_peft
    MODULE_PATCHES[PACKAGE] = patch
    if PACKAGE in sys.modules:
        patch(sys.modules[PACKAGE])


# Parameters: subclasses of torch's that quantize themselves when they are moved to the GPU. A tensor without
# memory cannot be of another class, so that it has the attributes of the class and says that it is one.


class PlainHolder:
    """The data and the attributes of a parameter, on which methods of its class run."""

    def __init__(self, data: Any, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self.data = data


def _patch_parameters(package: Any, observer: Observer, fake_mode: Any) -> None:
    for name in ("Params4bit", "Int8Params"):
        kind = getattr(package.nn, name, None)
        if kind is not None:
            _patch_parameter_class(kind, observer, fake_mode)
    _patch_class_checks()
    _patch_casts()
    _patch_copies()
    for name in ("to", "cuda", "cpu"):
        _patch_move(name)


def _patch_class_checks() -> None:
    """Let isinstance() find the class of a parameter without memory."""
    metaclass: Any = type(torch.nn.Parameter)
    original = metaclass.__instancecheck__

    def is_instance(cls: Any, value: Any) -> bool:
        kind = vars(value).get(PARAMETER_CLASS) if type(value) is FakeTensor else None
        return (kind is not None and issubclass(kind, cls)) or original(cls, value)

    put(metaclass, "__instancecheck__", is_instance)


def _patch_casts() -> None:
    """Keep packed weights from being cast as if they were numbers.

    Libraries leave them out by the name of their class, which a tensor without memory does not have.
    """
    original: Any = vars(FakeTensor).get("data", torch.Tensor.data)

    def set_data(tensor: Any, value: Any) -> None:
        if not vars(tensor).get("bnb_quantized") or value.dtype is tensor.dtype:
            original.__set__(tensor, value)

    put(FakeTensor, "data", property(original.__get__, set_data))


def _patch_copies() -> None:
    """Let a copy of a parameter keep its class, its format and its scales, as the methods of its class do."""
    original = FakeTensor.__deepcopy__

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        made = original(tensor, memo)
        kind = vars(tensor).get(PARAMETER_CLASS)
        if kind is not None and PARAMETER_CLASS not in vars(made):
            attributes = _read_attributes(tensor)
            for name in ("quant_state", "CB", "SCB"):
                if name in attributes:
                    attributes[name] = copy.deepcopy(attributes[name], memo)
            vars(made).update(attributes)
            vars(made)[PARAMETER_CLASS] = kind
        return made

    put(FakeTensor, "__deepcopy__", deepcopy)


def _patch_parameter_class(kind: Any, observer: Observer, fake_mode: Any) -> None:
    create = kind.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = False, **options: Any) -> Any:
        if data is None or (data.device.type == "meta" and not isinstance(data, FakeTensor)):
            return create(cls, data, requires_grad, **options)
        attributes = vars(create(cls, torch.empty(0, device="meta"), False, **options))
        if not isinstance(data, FakeTensor):
            with _disable_current_modes():
                data = fake_mode.from_tensor(data.detach())
        return _make_parameter(data, attributes, cls, requires_grad=requires_grad)

    def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        is_moved = device is not None and device.type != "meta"
        if is_moved and not _is_quantized(tensor):
            return _quantize(kind, tensor, device, observer)
        plain = torch.Tensor.to(tensor, device=device, dtype=dtype, non_blocking=non_blocking)
        if plain is tensor:
            return tensor
        attributes = _read_attributes(tensor)
        if attributes.get("quant_state") is not None and device is not None:
            attributes["quant_state"].to(device)
        for name in ("CB", "SCB"):
            if attributes.get(name) is not None and device is not None:
                attributes[name] = attributes[name].to(device)
        return _make_parameter(plain, attributes, kind, requires_grad=tensor.requires_grad)

    put(kind, "__new__", staticmethod(new))
    put(kind, "_trimtab_move", staticmethod(move))


def _make_parameter(data: Any, attributes: dict[str, Any], kind: Any, *, requires_grad: bool) -> Any:
    made: Any = torch.nn.Parameter(data, requires_grad)
    vars(made).update(attributes)
    vars(made)[PARAMETER_CLASS] = kind
    return made


def _read_attributes(tensor: Any) -> dict[str, Any]:
    """Return the attributes that bitsandbytes gave a parameter, without those of fake tensors."""
    plain = vars(torch.nn.Parameter(tensor.detach(), requires_grad=False))
    return {name: value for name, value in vars(tensor).items() if name not in plain and name[0] != "_"}


def _is_quantized(tensor: Any) -> bool:
    state = vars(tensor)
    if "bnb_quantized" in state:
        return bool(state["bnb_quantized"])
    return tensor.dtype is torch.int8 or bool(state.get("has_fp16_weights"))


def _quantize(kind: Any, tensor: Any, device: torch.device, observer: Observer) -> Any:
    """Return a parameter in few bits on a device, made by the method of its class."""
    attributes = _read_attributes(tensor)
    holder = PlainHolder(tensor.detach(), attributes)
    count = tensor.numel()
    method = getattr(kind, "_quantize", None) or kind.cuda
    method(holder, device)
    attributes = vars(holder)
    data = attributes.pop("data")
    made = _make_parameter(data, attributes, kind, requires_grad=tensor.requires_grad)
    made.weights = count
    module = attributes.get("module")
    if module is not None:
        # The class registers itself there, so that FSDP finds the scales again.
        module.quant_state = attributes.get("quant_state")
    observer.learn("base", _name_format(attributes), "weights of linear layers, by bitsandbytes")
    return made


def _name_format(attributes: dict[str, Any]) -> str:
    if "quant_type" not in attributes:
        return "int8"
    return str(attributes["quant_type"]) + "-double" * bool(attributes.get("compress_statistics"))


def _patch_move(name: str) -> None:
    original = getattr(torch.Tensor, name)

    def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        kind = vars(tensor).get(PARAMETER_CLASS)
        if kind is None:
            return original(tensor, *args, **kwargs)
        if name != "to":
            device = kwargs.get("device", args[0] if args else None)
            args, kwargs = (device if device is not None and name == "cuda" else name,), {}
        return kind._trimtab_move(tensor, *args, **kwargs)

    put(FakeTensor, name, move)


def patch_peft(integrations: Any) -> None:
    """Let PEFT restore weights in few bits, as DoRA does: it finds them by the name of their class."""
    original = integrations.dequantize_module_weight

    def restore(module: Any) -> Any:
        weight: Any = getattr(module, "weight", None)
        kind = vars(weight).get(PARAMETER_CLASS) if type(weight) is FakeTensor else None
        if kind is None or not _is_quantized(weight):
            return original(module)
        holder = type(kind.__name__, (PlainHolder,), {})(weight.data, _read_attributes(weight))
        return integrations.dequantize_bnb_weight(holder, state=getattr(module, "state", None))

    put(integrations, "dequantize_module_weight", restore)


# Operations, each of which is called by its name or as its default overload


class StandIn:
    """Replacement of an operation: called as it is, as its default, or with a tensor for the result."""

    def __init__(self, run: Callable[..., Any], original: Any) -> None:
        self._run, self._original = run, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement if a tensor has no memory, else the operation itself."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._original(*args, **kwargs)
        return self._run(*args, **kwargs)

    @property
    def default(self) -> StandIn:
        """The operation itself."""
        return self

    def out(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the operation, with its result in memory that exists already."""
        if out is None:
            *args, out = args  # type: ignore[assignment]
        with torch.no_grad():
            out.copy_(self(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _patch_operations(observer: Observer) -> None:
    namespace = torch.ops.bitsandbytes
    stand_ins: dict[str, Callable[..., Any]] = {
        "quantize_4bit": _quantize_4bit,
        "dequantize_4bit": torch.ops.trimtab.dequantize_4bit,
        "gemm_4bit": _multiply_4bit,
        "dequantize_blockwise": _dequantize_blockwise,
        "int8_vectorwise_quant": _make_quantize_rows(observer),
        "int8_linear_matmul": _multiply_int8,
        "int8_mm_dequant": _scale_int8,
        "int8_scaled_mm": _multiply_scaled,
        "int8_mixed_scaled_mm": _multiply_mixed,
        "optimizer_update_8bit_blockwise": _update,
        "optimizer_update_32bit": _update,
    }
    for name, run in stand_ins.items():
        original = getattr(namespace, name, None)
        if original is not None and not isinstance(original, StandIn):
            put(namespace, name, StandIn(run, original))


def _quantize_4bit(weight: Any, block: int, codebook: str, storage: torch.dtype) -> Any:
    packed, scales = torch.ops.trimtab.quantize_4bit(weight, block, codebook)
    return (packed if storage is torch.uint8 else packed.view(-1).view(storage).view(-1, 1)), scales


def _multiply_4bit(  # noqa: PLR0913, PLR0917 - the operation's own arguments
    given: Any,
    packed: Any,
    shape: Any,
    scales: Any,
    block: int,
    codebook: str,
    bias: Any = None,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> Any:
    """Restore the weights and multiply, as bitsandbytes does for more than a few rows."""
    del absmax_code
    if absmax_8bit is not None:
        scales = torch.ops.trimtab.dequantize_scales(absmax_8bit, scales, absmax_offset, 256)
    if given.numel() // given.shape[-1] <= FUSED_ROWS:
        return given.new_empty((*given.shape[:-1], shape[0]))
    weight = torch.ops.trimtab.dequantize_4bit(packed, scales, block, codebook, list(shape), given.dtype)
    return functional.linear(given, weight, bias)


def _dequantize_blockwise(codes: Any, scales: Any, code: Any, block: int, dtype: torch.dtype) -> Any:
    restored = torch.ops.trimtab.dequantize_scales(codes, scales, code, block)
    return restored if dtype is torch.float32 else restored.to(dtype)


def _make_quantize_rows(observer: Observer) -> Callable[..., Any]:
    def quantize_rows(values: Any, threshold: float = 0.0) -> Any:
        numbers, scales, columns = torch.ops.trimtab.quantize_rows(values, float(threshold))
        if threshold:
            observer.notes[OUTLIER_NOTE] = None
        return numbers, scales, columns if threshold else None

    return quantize_rows


def _multiply_int8(left: Any, right: Any) -> Any:
    product = torch.ops.trimtab.product_int8(left.reshape(-1, left.shape[-1]), right)
    return product.view(*left.shape[:-1], right.shape[0])


def _scale_int8(
    product: Any, row_scales: Any, column_scales: Any, dtype: torch.dtype | None = None, bias: Any = None
) -> Any:
    out = torch.ops.trimtab.scale_product(product, row_scales, column_scales)
    # The kernel adds a bias in 16 bits itself.
    if bias is not None and bias.dtype is not torch.float16:
        out.add_(bias)
    return out.to(dtype or torch.float16)


def _multiply_scaled(  # noqa: PLR0913, PLR0917 - the operation's own arguments
    left: Any, right: Any, row_scales: Any, column_scales: Any, bias: Any = None, dtype: Any = None
) -> Any:
    return _scale_int8(_multiply_int8(left, right), row_scales, column_scales, dtype, bias)


def _multiply_mixed(  # noqa: PLR0913, PLR0917 - the operation's own arguments
    values: Any,
    left: Any,
    right: Any,
    row_scales: Any,
    column_scales: Any,
    columns: Any = None,
    bias: Any = None,
) -> Any:
    """Multiply as if no column had large activations: how many do depends on values."""
    del columns
    out = _multiply_scaled(left, right, row_scales, column_scales, bias, values.dtype)
    return out, values.new_empty(0)


def _update(name: str, gradient: Any, parameter: Any, *rest: Any, **options: Any) -> None:
    """Update a parameter: one kernel that reads and writes its states, then the host waits."""
    del name
    given = [value for value in (*rest, *options.values()) if isinstance(value, torch.Tensor)]
    states = [tensor for tensor in given if tensor.device.type == parameter.device.type]
    coded = [tensor for tensor in given if tensor.dtype is torch.uint8 and tensor.dim()]
    searched_bits = 8 * len(coded)
    torch.ops.trimtab.update_low_bit(parameter, gradient, states, searched_bits)
    torch.ops.trimtab.wait_for_device(parameter)


# Paged states


def _patch_paged_memory(observer: Observer, fake_mode: Any) -> None:
    module: Any = sys.modules[f"{PACKAGE}.functional"]

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
        observer.notes[PAGED_NOTE] = None
        with _disable_current_modes(), fake_mode:
            made: Any = torch.empty(shape, dtype=dtype, device="cpu")
        made.is_paged, made.page_deviceid = True, getattr(device, "index", 0)
        return made

    put(module, "get_paged", get_paged)
    for name in ("fill", "prefetch_tensor"):
        if hasattr(module, name):
            put(module, name, lambda *_, **__: None)
