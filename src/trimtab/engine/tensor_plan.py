"""Decide how the ranks of a tensor-parallel group split each layer of a model.

Every linear layer and embedding gets a role. A column layer computes a part of its outputs on each rank, a
row layer takes these parts as its inputs and sums over ranks. Models of transformers come with such a plan.
For other models it is derived: the loss runs once on the meta device, and every tensor is labelled with the
layers that it comes from. A layer whose input comes only from layers that no other layer reads is a row
layer, and those are column layers.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trimtab.errors import TrimtabError, WrongUse
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    RunLoss = Callable[[nn.Module], Any]
    """Computes the loss of a batch on the meta device."""


META = "meta"


class Role(StrEnum):
    """How a layer is split."""

    COLUMN = "column"
    """Each rank computes a part of the outputs, from all inputs."""
    GATHERED = "gathered"
    """The same, and ranks then gather all outputs: a layer that computes several things at once."""
    ROW = "row"
    """Each rank takes a part of the inputs, and ranks sum the outputs."""
    EMBEDDING = "embedding"
    """Each rank has a part of the vocabulary, and ranks sum the outputs."""
    HEAD = "head"
    """Each rank computes the logits of a part of the vocabulary, and its part of the loss."""
    REPLICATED = "replicated"
    """Each rank has all of it."""


@dataclass(kw_only=True)
class TensorPlan:
    """The role of each layer, by its name in the model."""

    tp: int
    roles: dict[str, Role]
    origin: str
    """Where the plan comes from."""
    notes: list[str] = field(default_factory=list)
    """What is not split, and why."""

    def describe(self) -> str:
        """Return in few words which layers are split.

        >>> TensorPlan(tp=2, roles={"a": Role.COLUMN, "b": Role.ROW}, origin="the model").describe()
        'the model: 1 column, 1 row'
        """
        words = [
            f"{count} {role}"
            for role in Role
            if role is not Role.REPLICATED and (count := list(self.roles.values()).count(role))
        ]
        return f"{self.origin}: {', '.join(words)}"


WORDS = {
    "colwise": Role.COLUMN,
    "rowwise": Role.ROW,
    "rowwise_split_input": Role.ROW,
    "colwise_gather_output": Role.GATHERED,
    "colwise_rep": Role.GATHERED,
    "embedding_rowwise": Role.EMBEDDING,
}
"""Words of a plan of transformers for linear layers and embeddings."""
WHOLE = {"replicated_with_grad_allreduce", "sequence_parallel", "replicated", "replicate"}
"""Words of such a plan for layers that each rank has all of."""


def find_tensor_plan(
    model: nn.Module, tp: int, run_loss: RunLoss | None = None, experts: Sequence[str] = ()
) -> TensorPlan:
    """Return the role of each linear layer and embedding of a model; raise WrongUse if it cannot be split.

    `run_loss` computes the loss of a batch on the meta device; without it, only a plan of transformers is
    used, and its head is not split. `experts` are the names of modules of experts, which have no roles: each
    rank runs them with its part of the tokens.
    """
    layers = _list_layers(model, experts)
    flow, failure = _follow_data(model, layers, run_loss, experts)
    stated = getattr(model, "_tp_plan", None) or {}
    if stated:
        inside = {id(module) for name in experts for module in model.get_submodule(name).modules()}
        roles, origin = _read_stated_plan(stated, model, layers, tp, inside), "the plan of transformers"
        _check_config(model, tp)
    elif flow is not None:
        roles, origin = _derive_roles(flow, layers), "derived from the model's layers"
    else:
        raise _refuse(
            tp,
            f"the model has no plan of its own, and its data could not be followed: {failure}",
            "Use tp 1.",
        )
    plan = TensorPlan(tp=tp, roles=dict.fromkeys(layers, Role.REPLICATED) | roles, origin=origin)
    if not {Role.ROW, Role.COLUMN} <= set(plan.roles.values()) and Role.GATHERED not in roles.values():
        raise _refuse(
            tp,
            "no layer can be split: there is no linear layer whose input comes from other linear layers only "
            f"through elementwise operations or attention{_describe_other_layers(model)}",
            "Use tp 1 with fsdp, which splits any model.",
        )
    _check_widths(plan, layers, {} if flow is None else flow.heads)
    _place_vocabulary(plan, layers, flow, failure)
    return plan


def _describe_other_layers(model: nn.Module) -> str:
    """Return a clause on layers that multiply by a weight and are no nn.Linear, as Conv1D of GPT-2; or ''."""
    kinds = Counter(
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, nn.Linear | nn.Embedding)
        for name, weight in module.named_parameters(recurse=False)
        if name == "weight" and weight.dim() > 1
    )
    if not kinds:
        return ""
    kind, count = kinds.most_common(1)[0]
    return f"; trimtab splits nn.Linear layers only, and the model has {plural(count, f'{kind} layer')}"


def _refuse(tp: int, found: str, cure: str) -> WrongUse:
    return WrongUse(f"tp {tp}", found=found, cure=cure)


def _list_layers(model: nn.Module, experts: Sequence[str] = ()) -> dict[str, Any]:
    inside = tuple(f"{name}." for name in experts)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not name.startswith(inside)
    }


def _read_stated_plan(
    stated: dict[str, str], model: nn.Module, layers: dict[str, Any], tp: int, experts: set[int]
) -> dict[str, Role]:
    """Return the roles of a plan of transformers; `*` in it stands for the number of a block.

    `experts` are the ids of modules of experts with all modules inside of them, whose roles are left out.
    """
    owners = {name: module for name, module in model.named_modules() if id(module) not in experts}
    owned = {
        f"{name}.{own}".removeprefix(".") for name, module in owners.items() for own in module._parameters
    }
    roles: dict[str, Role] = {}
    for pattern, word in stated.items():
        if word in WHOLE:
            continue
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name in layers if matcher.fullmatch(name)]
        if not names and not any(map(matcher.fullmatch, owned | owners.keys())):
            # Layers of experts, or of blocks that this model has none of.
            continue
        if word not in WORDS or not names:
            raise _refuse(
                tp,
                f"the model's own plan splits {pattern} as {word}, which trimtab does not do",
                "Use tp 1, or a model whose blocks are linear layers.",
            )
        roles |= dict.fromkeys(names, WORDS[word])
    return roles


def _check_config(model: nn.Module, tp: int) -> None:
    """Raise WrongUse if heads of attention do not divide by the ranks; transformers' configs say how many."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key, noun in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key and value heads"),
    ):
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % tp:
            raise _refuse(
                tp, f"the model has {heads} {noun}, which do not divide by {tp}", _name_divisors(heads)
            )


def _name_divisors(number: int) -> str:
    divisors = [each for each in range(2, min(number, 64) + 1) if number % each == 0]
    return f"Use a tp of {', '.join(map(str, divisors))}." if divisors else "Use tp 1."


def _check_widths(plan: TensorPlan, layers: dict[str, Any], heads: dict[str, int]) -> None:
    """Raise WrongUse if the width or the heads of a split layer do not divide by the ranks."""
    for name, role in plan.roles.items():
        if role not in {Role.COLUMN, Role.GATHERED, Role.ROW}:
            continue
        layer = layers[name]
        count = heads.get(name)
        if role is Role.COLUMN and count is not None and count % plan.tp:
            raise _refuse(
                plan.tp, f"{name} has {count} heads, which do not divide by {plan.tp}", _name_divisors(count)
            )
        width = layer.in_features if role is Role.ROW else layer.out_features
        if width % plan.tp:
            side = "inputs" if role is Role.ROW else "outputs"
            raise _refuse(
                plan.tp,
                f"{name} has {width} {side}, which do not divide by {plan.tp}",
                _name_divisors(width),
            )


def _place_vocabulary(plan: TensorPlan, layers: dict[str, Any], flow: DataFlow | None, failure: str) -> None:
    """Set the roles of the layer before the loss and of embeddings of as many entries."""
    heads = set() if flow is None else flow.heads_of_loss
    for name, role in list(plan.roles.items()):
        if role is Role.GATHERED and flow is not None and not flow.readers.get(name):
            # No layer reads it: it is the head, whose role follows from the loss.
            plan.roles[name] = Role.REPLICATED
    if failure:
        plan.notes.append(f"tp: the logits are computed whole on every rank: {failure}")
        plan.roles |= {
            name: Role.REPLICATED for name, role in plan.roles.items() if role in {Role.HEAD, Role.EMBEDDING}
        }
        return
    sizes = set()
    for name in heads:
        if plan.roles[name] is Role.REPLICATED:
            plan.roles[name] = Role.HEAD
            sizes.add(layers[name].out_features)
    for name, layer in layers.items():
        if isinstance(layer, nn.Embedding) and layer.num_embeddings in sizes:
            plan.roles[name] = Role.EMBEDDING
    _keep_ties(plan, layers)


def _keep_ties(plan: TensorPlan, layers: dict[str, Any]) -> None:
    """Leave a vocabulary whole that cannot be split, with all layers that have the same weight."""
    why: dict[int, str] = {}
    for name, role in plan.roles.items():
        layer = layers[name]
        if role not in {Role.HEAD, Role.EMBEDDING}:
            # A tied weight has one split only.
            why.setdefault(
                id(layer.weight), "" if role is Role.REPLICATED else "its weight is split in another way"
            )
            continue
        entries = layer.weight.shape[0]
        if entries % plan.tp:
            why[id(layer.weight)] = f"{entries} entries do not divide by {plan.tp}"
    for name, role in plan.roles.items():
        if role in {Role.HEAD, Role.EMBEDDING} and (key := id(layers[name].weight)) in why:
            plan.roles[name] = Role.REPLICATED
            plan.notes.append(f"tp: {name} is whole on every rank: {why[key]}")


# Following data through a model.

OPAQUE = ""
"""Label of a tensor that mixes the outputs of a layer, so that it cannot be computed from a part of them."""
VIEWS = """
    view _unsafe_view reshape transpose permute t expand clone contiguous _to_copy slice select unsqueeze
    squeeze split split_with_sizes chunk cat stack unbind alias detach as_strided copy_ index_select narrow
    repeat lift_fresh constant_pad_nd native_dropout dropout _softmax where masked_fill fill_ zeros_like
    ones_like empty_like _safe_softmax
""".split()  # noqa: SIM905 - shorter than a list
"""Operations after which an output depends on the same part of a layer's outputs as before, by name."""
REDUCTIONS = ("mean", "sum", "var", "var_mean", "std", "amax", "amin", "norm", "linalg_vector_norm")
NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm", "native_group_norm")
PRODUCTS = ("bmm", "mm", "matmul", "baddbmm", "addmm")
LOSS, LOG_SOFTMAX = "nll_loss_forward", "_log_softmax"


@dataclass
class DataFlow:
    """Which layers read the outputs of which, in the loss of one batch."""

    inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    """For each linear layer, in the order of calls, the layers that its input comes from."""
    readers: dict[str, set[str]] = field(default_factory=dict)
    """For each layer, the linear layers that read its outputs."""
    heads: dict[str, int] = field(default_factory=dict)
    """Heads into which the outputs of a layer are cut."""
    heads_of_loss: set[str] = field(default_factory=set)
    """Layers whose outputs are the logits of a cross-entropy loss, and nothing else."""


def _follow_data(
    model: nn.Module, layers: dict[str, Any], run_loss: RunLoss | None, experts: Sequence[str]
) -> tuple[DataFlow | None, str]:
    """Run the loss on the meta device; return what was seen, or why it failed."""
    if run_loss is None:
        return None, "there is no job whose loss() could be followed"
    follower = _Follower(layers)
    handles = [
        handle
        for name, layer in layers.items()
        for handle in (
            layer.register_forward_pre_hook(follower.make_pre_hook(name)),
            layer.register_forward_hook(follower.make_hook(name)),
        )
    ]
    with _skip_experts(model, experts):
        failure = run_on_meta(model, run_loss, follower, handles)
    return (None, failure) if failure else (follower.finish(), "")


@contextmanager
def _skip_experts(model: nn.Module, experts: Sequence[str]) -> Iterator[None]:
    """Let experts return what looks like their tokens: which tokens they get depends on values."""
    modules = [model.get_submodule(name) for name in experts]
    try:
        for module in modules:
            vars(module)["forward"] = _mix_tokens
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _mix_tokens(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # An operation after which no part of a layer's outputs is enough.
    return hidden.flip(-1)


READ_NUMBER = "_local_scalar_dense"
"""Operation that reads a number from a tensor."""


def assume_number(tensor: torch.Tensor) -> bool | int:
    """Return what code on the meta device reads from a tensor, where no value is known.

    Mostly code asks whether it can take a shorter way: it can.
    """
    return tensor.dtype is torch.bool or 1


def run_on_meta(model: nn.Module, run_loss: RunLoss, mode: TorchDispatchMode, handles: Sequence[Any]) -> str:
    """Run the loss on the meta device under a mode, then remove the hooks; return why it failed, or nothing.

    Parameters and buffers of the model have no values meanwhile, and get theirs back.
    """
    from torch.nn.utils.stateless import _reparametrize_module

    tensors = {
        name: torch.empty_like(tensor, device=META, requires_grad=False)
        for name, tensor in _iterate_tensors(model)
    }
    try:
        # The modes of a tracer would record this run.
        with (
            _disable_current_modes(),
            torch.no_grad(),
            _accept_meta_in_autocast(),
            _reparametrize_module(model, tensors),
            mode,
        ):
            run_loss(model)
    except TrimtabError as error:
        return error.found
    except Exception as error:  # noqa: BLE001 - any failure of the job's own code on the meta device
        return f"loss() fails on the meta device: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
    finally:
        for handle in handles:
            handle.remove()
    return ""


@contextmanager
def _accept_meta_in_autocast() -> Iterator[None]:
    """Let models ask for the autocast of the device of their tensors: torch refuses it for meta tensors."""
    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
    originals = {name: getattr(torch, name) for name in names}
    start = torch.autocast.__init__

    def as_cpu(device: Any) -> Any:
        return "cpu" if device == META else device

    def make_patched(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: original(*map(as_cpu, values))

    def start_patched(self: Any, device_type: str, *values: Any, **options: Any) -> None:
        start(self, as_cpu(device_type), *values, **options)

    try:
        for name, original in originals.items():
            setattr(torch, name, make_patched(original))
        torch.autocast.__init__ = start_patched  # type: ignore[method-assign]
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
        torch.autocast.__init__ = start  # type: ignore[method-assign]


def _iterate_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class _Follower(TorchDispatchMode):
    """Labels every tensor with the layers that it comes from."""

    def __init__(self, layers: dict[str, Any]) -> None:
        super().__init__()
        self._widths = {
            name: layer.out_features for name, layer in layers.items() if isinstance(layer, nn.Linear)
        }
        self._labels: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}
        """By id. The tensors are kept alive, so that no id is used twice; they have no memory."""
        self._log_softmax: dict[int, frozenset[str]] = {}
        self._not_only_loss: set[str] = set()
        self._flow = DataFlow()

    def labels(self, value: Any) -> frozenset[str]:
        """Return the labels of a tensor; none for other values."""
        return self._labels[id(value)][1] if id(value) in self._labels else frozenset()

    def make_pre_hook(self, name: str) -> Callable[[Any, Any], None]:
        """Return a hook that records the labels of a layer's input."""

        def record_input(_: Any, args: Any) -> None:
            if name in self._widths and args:
                labels = self.labels(args[0])
                before = self._flow.inputs.get(name, labels)
                self._flow.inputs[name] = labels if before == labels else labels | before | {OPAQUE}

        return record_input

    def make_hook(self, name: str) -> Callable[[Any, Any, Any], None]:
        """Return a hook that labels a layer's output with its name."""

        def label_output(_: Any, __: Any, output: Any) -> None:
            self._labels[id(output)] = (output, frozenset({name}))

        return label_output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == READ_NUMBER:
            return assume_number(args[0])
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        each = [self.labels(tensor) for tensor in inputs]
        labels = frozenset[str]().union(*each)
        self._watch_loss(name, args, out, labels)
        if not labels:
            return out
        self._watch_heads(labels, args, out)
        if self._mixes(func, name, inputs, each, labels):
            labels |= {OPAQUE}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._labels[id(leaf)] = (leaf, labels)
                if leaf._base is not None and leaf is inputs[0]:
                    # Changed in place, through a view.
                    self._labels[id(leaf._base)] = (leaf._base, labels | self.labels(leaf._base))
        return out

    def _mixes(
        self,
        func: Any,
        name: str,
        inputs: list[torch.Tensor],
        each: list[frozenset[str]],
        labels: frozenset[str],
    ) -> bool:
        """Return whether an operation needs all outputs of a layer, not the part of one rank."""
        if name in PRODUCTS:
            return not all(each[:2])
        if name in (*REDUCTIONS, *NORMS):
            return inputs[0].shape[-1] in {self._widths.get(label) for label in labels}
        return not (name in VIEWS or "attention" in name or torch.Tag.pointwise in func.tags)

    def _watch_heads(self, labels: frozenset[str], args: tuple[Any, ...], out: Any) -> None:
        """Record into how many heads the outputs of one layer are cut."""
        (label, *others) = labels
        source = args[0] if args else None
        if others or not isinstance(out, torch.Tensor) or not isinstance(source, torch.Tensor):
            return
        width = self._widths.get(label)
        if source.shape[-1:] == (width,) and out.dim() == source.dim() + 1:
            *_, heads, size = out.shape
            if heads * size == width:
                self._flow.heads.setdefault(label, heads)

    def _watch_loss(self, name: str, args: tuple[Any, ...], out: Any, labels: frozenset[str]) -> None:
        """Record the layer whose outputs are logits of a cross-entropy loss."""
        if name == LOG_SOFTMAX:
            self._log_softmax[id(out)] = labels if args[1] in {1, -1} and out.dim() == 2 else frozenset()  # noqa: PLR2004 - tokens, classes
        elif name == LOSS and id(args[0]) in self._log_softmax:
            found = self._log_softmax[id(args[0])]
            widths = {self._widths.get(label) for label in found}
            if len(found) == 1 and widths == {args[0].shape[1]}:
                self._flow.heads_of_loss |= found
                return
            self._not_only_loss |= found
        elif name not in {"detach", "alias"}:
            for leaf in tree_leaves(args):
                self._not_only_loss |= self._log_softmax.get(id(leaf), frozenset())

    def finish(self) -> DataFlow:
        """Return what was seen."""
        flow = self._flow
        flow.heads_of_loss -= self._not_only_loss
        for reader, labels in flow.inputs.items():
            for label in labels:
                flow.readers.setdefault(label, set()).add(reader)
        flow.heads_of_loss = {name for name in flow.heads_of_loss if not flow.readers.get(name)}
        return flow


def _derive_roles(flow: DataFlow, layers: dict[str, Any]) -> dict[str, Role]:
    """Pair column layers with the row layer that reads them, in the order in which layers run."""
    roles: dict[str, Role] = {}
    for name, labels in flow.inputs.items():
        if not _can_pair(name, labels, flow, roles, layers):
            continue
        widths = {label: layers[label].out_features for label in labels}
        width = layers[name].in_features
        if max(widths.values()) == width and all(width % each == 0 for each in widths.values()):
            roles |= dict.fromkeys(labels, Role.COLUMN)
        else:
            # Several things in one layer, such as query, key and value.
            roles |= dict.fromkeys(labels, Role.GATHERED)
        roles[name] = Role.ROW
    return roles


def _can_pair(
    name: str, labels: frozenset[str], flow: DataFlow, roles: dict[str, Role], layers: dict[str, Any]
) -> bool:
    """Return whether the layers with these labels can be column layers, and this one their row layer."""
    if not labels or OPAQUE in labels or name in roles:
        return False
    if not all(isinstance(layers.get(label), nn.Linear) for label in labels):
        return False
    if name in labels or any(label in roles for label in labels):
        return False
    # Whatever else reads one of them has to read all of them.
    return all(flow.inputs[reader] == labels for label in labels for reader in flow.readers[label])


def describe_split(plan: TensorPlan | None) -> list[str]:
    """Return notes for users: how many layers are split over how many ranks, and which are not.

    >>> describe_split(TensorPlan(tp=2, roles={"a": Role.COLUMN, "b": Role.ROW}, origin="the model"))
    ['tp: 2 ranks split layers (the model: 1 column, 1 row)']
    """
    if plan is None:
        return []
    return [f"tp: {plural(plan.tp, 'rank')} split layers ({plan.describe()})", *plan.notes]
