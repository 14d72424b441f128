"""Finds the first module that makes a number that is not finite, and keeps a module in fp32.

Runs only after a step has gone wrong twice, so it may be slow: every module is asked, forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trimtab.engine.precision import HALF
from trimtab.engine.stages import StandIn
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

FORWARD, BACKWARD, BATCH, LOSS = "forward", "backward", "batch", "loss"
_EARLIER = (BATCH, FORWARD, LOSS, BACKWARD)
"""In the order in which they come in a step."""
_MOST_MODULES = 10**6
"""More than a stage of a pipeline asks."""


class Suspect(Noun, frozen=True, kw_only=True):
    """The first place where a step went wrong."""

    module: str = ""
    """Its name in the model; empty where it is no module."""
    kind: str = ""
    """Its class."""
    phase: str
    """forward, backward, the batch itself, or the loss."""
    order: int = 0
    """How many modules had been asked before."""

    @property
    def words(self) -> str:
        """As a sentence's end."""
        if self.phase == BATCH:
            return "the batch itself holds a value that is not finite"
        if self.phase == LOSS:
            return "every module's output is finite, and the loss is not"
        return f"{self.module or 'the model'} ({self.kind}) is the first whose {self.phase} is not finite"


def first_bad(
    model: nn.Module, passes: Iterable[Callable[[], torch.Tensor | None]], batches: Iterable[Any] = ()
) -> Suspect | None:
    """The first module that makes a bad number in the given passes, forward and then backward.

    A pass returns its loss, or None where another rank has that. Every one is run to its end, whatever was
    found before, since ranks that compute together must all run the same number. Gradients are left behind:
    the caller clears them.
    """
    found = None if all(_finite(one) for one in batches) else Suspect(phase=BATCH)
    for run in passes:
        with _watched(model) as seen:
            is_bad = not _finite(run())
        found = found or _forward(seen) or (Suspect(phase=LOSS) if is_bad else _backward(seen, model))
    return found


def in_stage(found: Suspect | None, stage: int, stages: int) -> Suspect | None:
    """What a stage of a pipeline found, counted behind all that the stages before it in the pass had asked.

    >>> in_stage(Suspect(phase=BACKWARD, order=3), 0, 2).order, in_stage(Suspect(phase=BACKWARD), 1, 2).order
    (1000003, 0)
    """
    if found is None:
        return None
    before = stages - 1 - stage if found.phase == BACKWARD else stage
    return found.replace(order=found.order + before * _MOST_MODULES)


def earliest(found: Iterable[Suspect | None]) -> Suspect | None:
    """What ranks agree on: the earliest in the step."""
    known = [one for one in found if one is not None]
    return min(known, key=lambda one: (_EARLIER.index(one.phase), one.order), default=None)


class _Seen:
    """What the hooks of one pass saw, in the order of time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, nn.Module, bool, bool]] = []
        """Module, whether its inputs were finite, whether its outputs were."""
        self.gradients: list[tuple[str, str, bool]] = []
        """Module, the side of it ("in" or "out"), whether the gradient there was finite."""


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()
    handles: list[Any] = []

    def watch(name: str, side: str, values: Any) -> None:
        handles.extend(
            one.register_hook(lambda grad: seen.gradients.append((name, side, _finite(grad))))
            for one in tree_leaves(values)
            if isinstance(one, torch.Tensor) and one.requires_grad
        )

    def before(name: str, _: nn.Module, values: Any, named: Any) -> None:
        watch(name, "in", (values, named))

    def after(name: str, module: nn.Module, values: Any, named: Any, output: Any) -> None:
        seen.calls.append((name, module, _finite((values, named)), _finite(output)))
        watch(name, "out", output)

    for name, module in model.named_modules():
        if isinstance(module, StandIn):
            # What it is given and gives is on another rank.
            continue
        handles.extend(
            (
                module.register_forward_pre_hook(functools.partial(before, name), with_kwargs=True),
                module.register_forward_hook(functools.partial(after, name), with_kwargs=True),
            )
        )
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _forward(seen: _Seen) -> Suspect | None:
    """The innermost comes first: a module is done after those inside it."""
    for order, (name, module, fine_in, fine_out) in enumerate(seen.calls):
        if fine_in and not fine_out:
            return Suspect(module=name, kind=type(module).__name__, phase=FORWARD, order=order)
    return None


def _backward(seen: _Seen, model: nn.Module) -> Suspect | None:
    """The first whose gradient is good where it comes in and bad where it goes out, or on its weights."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    bad_out = {name for name, side, fine in seen.gradients if side == "out" and not fine}
    for order, (name, side, fine) in enumerate(seen.gradients):
        if side == "in" and not fine and name not in bad_out:
            return Suspect(module=name, kind=kinds.get(name, ""), phase=BACKWARD, order=order)
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _finite(weight.grad):
            owner = name.rpartition(".")[0]
            return Suspect(module=owner, kind=kinds.get(owner, ""), phase=BACKWARD, order=len(seen.gradients))
    return None


def _finite(values: Any) -> bool:
    return all(
        bool(torch.isfinite(one.detach()).all())
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()
    )


def keep_fp32(model: nn.Module, name: str) -> bool:
    """Let one module compute in fp32 from now on; False where this rank has no such module.

    Its weights stay in the dtype they have, for the optimizer's sake: they are cast on the way in. What
    comes out is fp32 under autocast, where whatever follows casts for itself; elsewhere it is cast back.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    if isinstance(module, StandIn):
        return False
    if getattr(module, "_trimtab_fp32", False):
        return True
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = _device_type(module, args)
        autocast = torch.is_autocast_enabled(kind)
        before = _half_of((args, kwargs), module)
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, _wide, (args, kwargs))
        with torch.autocast(kind, enabled=False), _wide_weights(module):
            output = inner(*wide_args, **wide_kwargs)
        if autocast or before is None:
            return output
        return tree_map_only(torch.Tensor, lambda one: _narrow(one, before), output)

    # As plain attributes: what torch makes of an assignment to a module is of no use here.
    module.__dict__.update(forward=forward, _trimtab_fp32=True)
    return True


def _device_type(module: nn.Module, args: Any) -> str:
    tensors = [one for one in (*module.parameters(), *tree_leaves(args)) if isinstance(one, torch.Tensor)]
    return tensors[0].device.type if tensors else "cpu"


def _half_of(values: Any, module: nn.Module) -> torch.dtype | None:
    """The 16-bit dtype that a module works in, if it does."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    return next((one.dtype for one in (*tensors, *module.parameters()) if one.dtype in HALF), None)


def _wide(one: torch.Tensor) -> torch.Tensor:
    return one.float() if one.dtype in HALF else one


def _narrow(one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return one.to(dtype) if one.dtype is torch.float32 else one


@contextlib.contextmanager
def _wide_weights(module: nn.Module) -> Iterator[None]:
    """The module's 16-bit weights in fp32 for a while; gradients flow back through the cast."""
    taken = [
        (part, name, weight)
        for part in module.modules()
        for name, weight in part._parameters.items()  # noqa: SLF001 - the only way in that is undone without a trace
        if weight is not None and weight.dtype in HALF
    ]
    try:
        for part, name, weight in taken:
            part._parameters[name] = weight.float()  # type: ignore[assignment]  # noqa: SLF001
        yield
    finally:
        for part, name, weight in taken:
            part._parameters[name] = weight  # noqa: SLF001
