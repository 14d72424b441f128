"""What there is to save of a training, by name: tensors that may be sharded, and plain values.

Every tensor goes by the name that its parameter has in the model, whatever wraps the model and however it is
spread over ranks, so that a checkpoint of one strategy and number of ranks is read by any other.
"""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and activation checkpointing put between those of the model."""
_FLAGS = ("fused", "foreach", "capturable", "differentiable")
"""How an optimizer runs: the plan's choice, never the checkpoint's."""


@dataclass
class Snapshot:
    """What one rank has to save: references, not copies."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that take no gradient: the same in every checkpoint."""
    values: dict[str, Any] = field(default_factory=dict)
    """All the rest, by object."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors, over all ranks."""
        held = (*self.tensors.values(), *self.frozen.values())
        return sum(one.numel() * one.element_size() for one in held)


def snapshot(objects: Mapping[str, Any], rank: int = 0, size: int = 1) -> Snapshot:
    """Gather the state of modules, optimizers, and whatever else has state_dict()."""
    taken = Snapshot()
    for label, one in objects.items():
        if isinstance(one, nn.Module):
            _take_module(taken, label, one)
        elif isinstance(one, torch.optim.Optimizer):
            _take_optimizer(taken, label, one, parameter_names(objects), (rank, size))
        else:
            taken.values[label] = one.state_dict()
    return taken


def bare(module: nn.Module) -> nn.Module:
    """The module without what compiling or DistributedDataParallel put around it."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers along the way.

    >>> plain_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(one for one in name.split(".") if one not in _WRAPPERS)


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of all modules, by identity; a tied one has its first."""
    names: dict[int, str] = {}
    for label, one in objects.items():
        if isinstance(one, nn.Module):
            for name, parameter in bare(one).named_parameters():
                names.setdefault(id(parameter), f"{label}:{plain_name(name)}")
    return names


def _entries(label: str, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Own name, name to save under and value of what a module keeps; a tied tensor comes once."""
    seen: set[int] = set()
    for name, value in bare(module).state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield name, f"{label}:{plain_name(name)}", value


def _take_module(taken: Snapshot, label: str, module: nn.Module) -> None:
    rest = {}
    for _, key, value in _entries(label, module):
        if not isinstance(value, torch.Tensor):
            rest[key] = value
        elif isinstance(value, nn.Parameter) and not value.requires_grad:
            taken.frozen[key] = value.detach()
        else:
            taken.tensors[key] = value.detach()
    taken.values[label] = rest


def _take_optimizer(
    taken: Snapshot,
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    place: tuple[int, int],
) -> None:
    groups, rest = [], {}
    for group in optimizer.param_groups:
        held = [_named(names, label, one) for one in group["params"]]
        options = {key: value for key, value in group.items() if key != "params" and key not in _FLAGS}
        groups.append({"params": held, "options": options})
        for name, parameter in zip(held, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    mark = _rank_mark(parameter, value, place)
                    taken.tensors[f"{label}:{name}:{key}{mark}"] = value.detach()
                else:
                    rest[f"{label}:{name}:{key}"] = value
    taken.values[label] = {"groups": groups, "rest": rest}


def _named(names: Mapping[int, str], label: str, parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise WrongUse(
            f"objects[{label!r}]",
            found=f"the optimizer has a parameter of shape {tuple(parameter.shape)} that no module here has",
            cure="Give the modules whose parameters it updates as well.",
        )
    return names[id(parameter)]


def _rank_mark(parameter: nn.Parameter, value: torch.Tensor, place: tuple[int, int]) -> str:
    """What the name of an optimizer's tensor ends in where it fits only the same rank of as many.

    That is what belongs to one rank's shard of a parameter, and does not say so by being a DTensor.
    """
    lone = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1
    return f"@{place[0]}/{place[1]}" if lone else ""


@dataclass
class Restoring:
    """Tensors to be filled from a checkpoint, and what to do with them then."""

    targets: dict[str, torch.Tensor]
    missing: list[str]
    """Parameters that the checkpoint does not have."""
    unlike: list[str]
    """A phrase for each tensor that has another shape."""


def wanted(objects: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Restoring:
    """The tensors of the modules, to be filled in place; what the checkpoint has no match for is named."""
    found = Restoring({}, [], [])
    for label, one in objects.items():
        if not isinstance(one, nn.Module):
            continue
        for _, key, value in _entries(label, one):
            if not isinstance(value, torch.Tensor):
                continue
            if key not in shapes:
                found.missing.append(key)
            elif tuple(value.shape) != shapes[key]:
                found.unlike.append(f"{key} is {list(shapes[key])} there and {list(value.shape)} here")
            else:
                found.targets[key] = value.detach()
    return found


def optimizer_targets(
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    place: tuple[int, int],
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """New tensors for the saved state of an optimizer, sharded as its parameters are.

    Second: parameters whose state was one rank's own among another number of ranks.
    """
    by_parameter: dict[str, list[str]] = {}
    for full in saved:
        name, _, _ = full.rpartition(":")
        by_parameter.setdefault(name, []).append(full)
    targets: dict[str, torch.Tensor] = {}
    lost = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            keys = by_parameter.get(f"{label}:{_named(names, label, parameter)}", [])
            lone = [key for key in keys if "@" in key.rpartition(":")[2]]
            here = [key for key in lone if key.endswith(f"@{place[0]}/{place[1]}")]
            if lone and not here:
                lost.append(_named(names, label, parameter))
                continue
            for key in [*here, *(one for one in keys if one not in lone)]:
                targets[key] = _like(parameter, key, *saved[key])
    return targets, lost


def _like(parameter: nn.Parameter, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Room for a tensor of an optimizer. A count of steps lies where load_state_dict() then wants it."""
    if tuple(parameter.shape) == shape and not key.endswith(":step"):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device="cpu")


def load_optimizer(
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    filled: Mapping[str, torch.Tensor],
    values: list[dict[str, Any]],
) -> None:
    """Give an optimizer its saved state; `values` are those of every rank that saved."""
    rest = {key: value for one in values for key, value in one["rest"].items()}
    options = {name: one["options"] for value in values for one in value["groups"] for name in one["params"]}
    by_parameter: dict[str, dict[str, Any]] = {}
    for full, value in (*rest.items(), *filled.items()):
        name, _, key = full.rpartition(":")
        by_parameter.setdefault(name, {})[key.partition("@")[0]] = value
    state: dict[int, Any] = {}
    groups = []
    count = 0
    for group in optimizer.param_groups:
        held = [_named(names, label, one) for one in group["params"]]
        for number, name in enumerate(held):
            if f"{label}:{name}" in by_parameter:
                state[count + number] = by_parameter[f"{label}:{name}"]
        own = {key: value for key, value in group.items() if key != "params"}
        saved = options.get(held[0], {}) if held else {}
        groups.append({**own, **saved, "params": list(range(count, count + len(held)))})
        count += len(held)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_module(label: str, module: nn.Module, values: list[dict[str, Any]]) -> None:
    """Give a module what is not a tensor, through its own load_state_dict(); tensors are filled by now."""
    rest = {key: value for one in values for key, value in one.items()}
    own: dict[str, Any] = OrderedDict(bare(module).state_dict(keep_vars=False))
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            own[name] = rest.get(f"{label}:{plain_name(name)}", value)
    bare(module).load_state_dict(own)


def random_states() -> dict[str, Any]:
    """Where the random number generators of this process stand."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - what datasets draw from
    name, words, place, has_gauss, gauss = numpy
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.astype(np.int64)), int(place), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put the random number generators where they stood."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, numbers, *rest = states["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def packed(values: dict[str, Any]) -> bytes:
    """Plain values as bytes that can be read without running anything.

    An error names those that cannot, among them each of `objects` by its own name.
    """
    plain = _without_numpy(values)
    data = _saved(plain)
    if _is_safe(data):
        return data
    each = {**{name: one for name, one in plain.items() if name != "objects"}, **plain.get("objects", {})}
    guilty = [name for name, one in each.items() if not _is_safe(_saved(one))]
    raise WrongUse(
        f"the state of {', '.join(guilty)}",
        found="it holds objects of classes of its own, which a checkpoint could not be read back safely with",
        cure="Let state_dict() return tensors, numbers, texts, and dicts, lists and tuples of them.",
    )


def unpacked(data: bytes) -> dict[str, Any]:
    """What `packed` packed."""
    value: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return value


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _is_safe(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - whatever it is, it could not be read back
        return False
    return True


def _without_numpy(value: Any) -> Any:
    """Numbers of numpy, which measurements are full of, as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if type(value) is dict:
        return {key: _without_numpy(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_numpy(one) for one in value)
    return value
