"""Expert parallelism: every rank holds some of the experts, and tokens travel to the experts they chose.

A module of experts has stacked weights, one slice for each expert, and `forward(hidden, index, weights)`: the
tokens, the experts that each token chose, and their weights. Each rank keeps an equal share of the slices. A
pass sends every pair of a token and an expert to the rank of the expert (all-to-all), runs the module's own
forward pass there with the slices of that rank, sends the results back, and adds them up for each token. So
the products are those that the model computes on one device: grouped, batched or one expert after another.

The weights of experts become DTensors on the axis of these ranks, and FSDP shards them over the ranks that
hold the same experts. All other weights are sharded over all ranks, as without expert parallelism.
"""

from __future__ import annotations

import fnmatch
import inspect
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from trimtab.errors import WrongUse
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.spec import Setting

FORWARD_ARGUMENTS = 3
"""Arguments of a module of experts: tokens, chosen experts, weights of the choices."""
COUNT_NAME = "num_experts"
"""Attribute in which modules of transformers have the number of their experts."""


class ExpertStep(StrEnum):
    """What a collective of experts carries."""

    COUNTS = "counts"
    """How many tokens each rank sends to each expert."""
    SEND = "send"
    """Rows from the ranks of tokens to the ranks of experts."""
    RETURN = "return"
    """Rows from the ranks of experts to the ranks of tokens."""


class RowSplit(NamedTuple):
    """How many rows a rank exchanges with each rank of its group, for one layer of one pass."""

    counts: list[int]
    """Rows that this rank sends to each expert."""
    sent: list[int]
    """Rows that this rank sends to each rank."""
    received: list[int]
    """Rows that this rank receives from each rank."""

    def list_sizes(self, step: ExpertStep) -> tuple[list[int], list[int]]:
        """Return the rows to send to and to receive from each rank."""
        return (self.sent, self.received) if step is ExpertStep.SEND else (self.received, self.sent)


class ExpertCollective(NamedTuple):
    """One collective of a layer of experts."""

    step: ExpertStep
    layer: int
    length: int
    """Elements of a row; of the counts, the number of experts."""
    dtype: torch.dtype
    is_repeat: bool
    """Whether the layer has exchanged its counts in this pass before, as a recomputed one has."""
    group: ExpertGroup

    def answer(self, device: torch.device) -> None:
        """Take part with zeros, after this rank has failed."""
        self.group.answer(self, device)


class ExpertGroup:
    """The ranks that hold different experts, and their collectives."""

    step_in_flight: ClassVar[ExpertStep | None] = None
    """What the collective that is being issued carries; a tracer reads it. None outside of collectives."""

    def __init__(self, mesh: Any, shard_mesh: Any, *, imbalance: float = 1.0) -> None:
        """Take the mesh of the ranks with different experts, and that of the ranks with the same ones.

        `imbalance` counts only in a fake process group, where nothing is received: the rows that this rank
        gets over those that it would get if all experts were chosen equally often.
        """
        self.mesh = mesh
        self.shard_mesh = shard_mesh
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self.layers: list[str] = []
        """Names of the modules of experts."""
        self.record: Callable[[Any], None] | None = None
        """Called just before each collective."""
        self.tensor_mesh: Any = None
        """Mesh of the ranks that split layers, which have the same tokens; None without them."""
        self.input_dtype: torch.dtype | None = None
        """What FSDP casts the inputs of experts to."""
        self._group = mesh.get_group()
        self._imbalance = imbalance
        self._is_fake = dist.get_backend(self._group) == "fake"
        self._splits: dict[int, RowSplit] = {}
        """By layer: the last split of the current pass."""

    def start_pass(self) -> None:
        """Begin a forward pass: no layer has exchanged counts."""
        self._splits.clear()

    def split_rows(self, layer: int, counts: torch.Tensor, rows: int) -> tuple[RowSplit, torch.Tensor]:
        """Exchange how many of this rank's rows go to each expert.

        Also return how many rows come from each rank for each expert of this rank.
        """
        received = torch.empty_like(counts)
        entry = ExpertCollective(
            ExpertStep.COUNTS, layer, counts.numel(), counts.dtype, layer in self._splits, self
        )
        self._issue(entry, received, counts)
        if not self._is_fake:
            return self._read_split(layer, counts, received), received
        # The host waits for the counts, as it does with real ranks.
        torch.zeros((), device=counts.device).item()
        assumed = self._assume_counts(rows, counts.numel())
        split = RowSplit([], spread_evenly(rows, self.size), self._sum_ranks(assumed))
        return split, torch.tensor(assumed, device=counts.device)

    def exchange(self, rows: torch.Tensor, step: ExpertStep, layer: int, split: RowSplit) -> torch.Tensor:
        """Send rows to the ranks of their experts, or back; return the rows that this rank receives."""
        sent, received = split.list_sizes(step)
        output = rows.new_empty(sum(received), *rows.shape[1:])
        entry = ExpertCollective(step, layer, prod(rows.shape[1:]), rows.dtype, False, self)
        self._issue(entry, output, rows.contiguous(), sent, received)
        return output

    def answer(self, entry: ExpertCollective, device: torch.device) -> None:
        """Take part in a collective with zeros."""
        known = self._splits.get(entry.layer)
        if entry.step is ExpertStep.COUNTS:
            # Ranks that recompute a layer need the numbers that they had before.
            again = known.counts if known is not None and entry.is_repeat else [0] * entry.length
            counts = torch.tensor(again, dtype=entry.dtype, device=device)
            received = torch.empty_like(counts)
            self._issue(None, received, counts)
            self._read_split(entry.layer, counts, received)
            return
        assert known is not None  # noqa: S101 - the counts of a layer are exchanged before its rows
        sizes = known.list_sizes(entry.step)
        rows, output = (
            torch.zeros(sum(size), entry.length, dtype=entry.dtype, device=device) for size in sizes
        )
        self._issue(None, output, rows, *sizes)

    def _read_split(self, layer: int, counts: torch.Tensor, received: torch.Tensor) -> RowSplit:
        sent_rows, received_rows = torch.stack([counts, received]).tolist()
        split = RowSplit(sent_rows, self._sum_ranks(sent_rows), self._sum_ranks(received_rows))
        self._splits[layer] = split
        return split

    def _assume_counts(self, rows: int, experts: int) -> list[int]:
        """Return the rows of each rank and local expert where nothing is received.

        All ranks are assumed to send equally many rows to this rank, `imbalance` times their mean.
        """
        total = min(round(rows * self._imbalance), rows * self.size)
        return spread_evenly(total, experts)

    def _sum_ranks(self, counts: list[int]) -> list[int]:
        each = len(counts) // self.size
        return [sum(counts[start : start + each]) for start in range(0, len(counts), each)]

    def _issue(
        self,
        entry: ExpertCollective | None,
        output: torch.Tensor,
        rows: torch.Tensor,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> None:
        """Exchange rows. Their memory exists by now: a collective that is recorded is also issued."""
        if entry is not None and self.record is not None:
            self.record(entry)
        ExpertGroup.step_in_flight = ExpertStep.SEND if entry is None else entry.step
        try:
            dist.all_to_all_single(output, rows, received, sent, group=self._group)
        finally:
            ExpertGroup.step_in_flight = None


def spread_evenly(total: int, parts: int) -> list[int]:
    """Return whole numbers that have a sum and differ by 1 at most.

    >>> spread_evenly(7, 3)
    [3, 2, 2]
    """
    each, rest = divmod(total, parts)
    return [each + (number < rest) for number in range(parts)]


# ------------------------------------------------------------------------ one layer of experts


class Route(NamedTuple):
    """Where the rows of one pass through one layer go: a row is a token with one of its experts."""

    group: ExpertGroup
    layer: int
    split: RowSplit
    choices: int
    """Experts that each token chose."""

    def send(self, tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Send each token to the ranks of its experts; `order` has the row numbers by expert."""
        rows = tokens.index_select(0, order // self.choices)
        return self.group.exchange(rows, ExpertStep.SEND, self.layer, self.split)

    def collect(self, results: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Send results back, and add those of each token up."""
        rows = self.group.exchange(results, ExpertStep.RETURN, self.layer, self.split)
        return _restore(rows, order).unflatten(0, (-1, self.choices)).sum(1)


def _restore(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return rows in the order of tokens."""
    restored = torch.empty_like(rows)
    restored[order] = rows
    return restored


class SendTokens(torch.autograd.Function):
    """Send tokens to their experts; in the backward pass, collect their gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, route: Route) -> torch.Tensor:
        """Return the rows that the experts of this rank get."""
        ctx.route = route
        ctx.save_for_backward(order)
        return route.send(tokens, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Add the gradients of a token up."""
        return ctx.route.collect(gradient, *ctx.saved_tensors), None, None


class SendWeights(torch.autograd.Function):
    """Send the weight of each choice to its expert; in the backward pass, its gradient back.

    It saves a tensor on every rank, after all rows are sent. A recomputed block ends with its last saved
    tensor: otherwise, a rank whose experts nobody chose would not recompute as much as the others.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, order: torch.Tensor, route: Route) -> torch.Tensor:
        """Return the weights of the rows that the experts of this rank get."""
        ctx.route = route
        ctx.save_for_backward(order)
        rows = weights.reshape(-1, 1).index_select(0, order)
        return route.group.exchange(rows, ExpertStep.SEND, route.layer, route.split)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of each weight."""
        route = ctx.route
        # This may recompute the block, whose collectives come first on every rank.
        (order,) = ctx.saved_tensors
        rows = route.group.exchange(gradient, ExpertStep.RETURN, route.layer, route.split)
        return _restore(rows, order).view(-1, route.choices), None, None


class CollectResults(torch.autograd.Function):
    """Collect the results of a token's experts; in the backward pass, send their gradients.

    It saves no tensor, so that a recomputed block does not send its results again.
    """

    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, order: torch.Tensor, route: Route) -> torch.Tensor:
        """Return the sum of the results of each token."""
        ctx.route, ctx.order = route, order
        return route.collect(results, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Every result of a token has the gradient of their sum."""
        return ctx.route.send(gradient, ctx.order), None, None


def _gather(tensor: Any) -> torch.Tensor:
    """Return a tensor that all ranks which split layers have all of."""
    from torch.distributed.tensor import DTensor, Replicate

    whole: torch.Tensor = tensor
    return whole.redistribute(placements=[Replicate()]) if isinstance(whole, DTensor) else whole


def _take_part(rows: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return this rank's part of rows that all ranks of a mesh have."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(rows, DTensor):
        rows = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    return rows.redistribute(placements=[Shard(0)]).to_local()


def _join_parts(part: torch.Tensor, mesh: Any, shape: torch.Size) -> torch.Tensor:
    """Return a tensor that all ranks of a mesh have, from the rows of each of them."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows = torch.Size((shape[:-1].numel(), shape[-1]))
    joined = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=rows, stride=(rows[1], 1))
    joined = joined.redistribute(placements=[Replicate()])
    if rows == shape:
        return joined
    # FSDP warns of outputs that are views.
    return DTensor.from_local(joined.to_local().reshape(shape), mesh, [Replicate()], run_check=False)


class SplitExperts:
    """Forward pass of a module of experts whose weights are on several ranks."""

    def __init__(self, module: nn.Module, layer: int, experts: int, group: ExpertGroup) -> None:
        self._forward = module.forward
        self._layer = layer
        self._experts = experts
        self._group = group
        self._local = experts // group.size
        self._list = find_expert_list(module)
        is_stacked = self._list is None
        self._owners = [owner for owner in module.modules() if owner._parameters and is_stacked]
        for owner in module.modules():
            if vars(owner).get(COUNT_NAME) == experts and is_stacked:
                setattr(owner, COUNT_NAME, self._local)

    def __call__(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Send tokens to their experts, run the module's own forward pass, and collect the results.

        Ranks that split layers have the same tokens: each of them sends its part, and they gather the
        results.
        """
        mesh = self._group.tensor_mesh
        if mesh is None:
            return self._run_tokens(hidden, index, weights, *args, **kwargs)
        rows = hidden.shape[:-1].numel()
        parts = [_take_part(_gather(tensor).reshape(rows, -1), mesh) for tensor in (hidden, index, weights)]
        return _join_parts(self._run_tokens(*parts, *args, **kwargs), mesh, hidden.shape)

    def _run_tokens(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        if self._group.input_dtype is not None:
            # FSDP of torch 2.11 casts inputs in the forward pass, and not when a block is recomputed.
            tokens, weights = tokens.to(self._group.input_dtype), weights.to(self._group.input_dtype)
        if self._group.size == 1:
            return self._run(tokens, index, weights, *args, **kwargs).to(hidden.dtype)
        index = index.reshape(tokens.shape[0], -1)
        route, experts = self._plan_route(index)
        order = torch.argsort(index.reshape(-1), stable=True)
        received = SendTokens.apply(tokens, order, route)
        own_weights = SendWeights.apply(weights.reshape(index.shape), order, route)
        results = self._run(received, experts.unsqueeze(-1), own_weights, *args, **kwargs)
        collected: torch.Tensor = CollectResults.apply(results, order, route)
        collected = collected.to(hidden.dtype)
        # FSDP warns of outputs that are views.
        return collected if collected.shape == hidden.shape else collected.reshape(hidden.shape)

    def _plan_route(self, index: torch.Tensor) -> tuple[Route, torch.Tensor]:
        """Return where the rows of this rank go, and the local expert of each row that it gets."""
        chosen = index.reshape(-1)
        counts = torch.zeros(self._experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        split, received = self._group.split_rows(self._layer, counts, chosen.numel())
        experts = torch.arange(self._local, device=chosen.device).repeat(self._group.size)
        if self._list is not None:
            # A list has its places on every rank, but not all experts.
            experts = experts + self._local * self._group.rank
        experts = torch.repeat_interleave(experts, received, output_size=sum(split.received))
        return Route(self._group, self._layer, split, index.shape[-1]), experts

    def _run(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the module's own forward pass with the weights of this rank."""
        shadowed: list[tuple[dict[str, Any], str]] = []
        parameters: list[torch.Tensor] = [] if self._list is None else [*self._list.parameters()]
        try:
            for owner in self._owners:
                for name, parameter in owner._parameters.items():
                    if parameter is None:
                        continue
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    parameters.append(local)
                    # An attribute of the object is found before a parameter.
                    vars(owner)[name] = local
                    shadowed.append((vars(owner), name))
            if rows.shape[0]:
                results: torch.Tensor = self._forward(rows, *args, **kwargs)
                # Experts of a list that got no token have gradients of zeros: the other ranks wait for them.
                return results if self._list is None else results + _sum_nothing(parameters)
            # Nobody chose these experts. Their gradients are zeros, and the other ranks wait for them.
            weights = args[1]
            return rows + weights.sum() + _sum_nothing(parameters)
        finally:
            for attributes, name in shadowed:
                del attributes[name]


def _sum_nothing(parameters: Sequence[torch.Tensor]) -> Any:
    """Return a 0 to which all parameters contribute."""
    return sum(parameter.flatten()[:0].sum() for parameter in parameters)


class AbsentExpert(nn.Module):
    """Place of an expert that another rank has: it gets no rows, and returns them."""

    def forward(self, rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return no rows; raise if there are some."""
        if rows.shape[0]:
            raise WrongUse(
                "expert_modules",
                found="an expert of another rank got tokens that did not choose it",
                cure="Call each expert with the tokens that chose it: where index is its number in the list.",
            )
        return rows


# ------------------------------------------------------------------------ which modules


def find_experts(model: nn.Module, names: Sequence[str] = ()) -> dict[str, int]:
    """Return the modules of experts by name, with their number of experts.

    `names` are those that a job names, with `*` for any part of a name. Without them, a module of experts has
    `num_experts`, weights whose first dimension is that, and forward(hidden, index, weights).
    """
    if names:
        return _find_named(model, names)
    found = {}
    for name, module in model.named_modules():
        experts = getattr(module, COUNT_NAME, None)
        if isinstance(experts, int) and count_experts(module) == experts and _takes_choices(module):
            found[name] = experts
    return found


def _find_named(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    modules = dict(model.named_modules())
    found: dict[str, int] = {}
    for pattern in names:
        matching = fnmatch.filter(modules, pattern)
        given = f"expert_modules {pattern!r}"
        if not matching:
            raise WrongUse(
                given,
                found=f"the model has no such module; it has {', '.join(list(modules)[1:4])}",
                cure="Name modules as model.named_modules() does, as in layers.*.experts.",
            )
        for name in matching:
            experts = count_experts(modules[name])
            if experts is None or not _takes_choices(modules[name]):
                wants = "weights of one first dimension or one nn.ModuleList of equal experts, and "
                wants += "forward(hidden, index, weights)"
                raise WrongUse(
                    given,
                    found=f"{name} ({type(modules[name]).__name__}) is not a module with {wants}",
                    cure=LIST_CURE if isinstance(modules[name], nn.ModuleList) else STACK_CURE,
                )
            found[name] = experts
    return found


STACK_CURE = "Stack the weights of all experts, and choose among them by index."
LIST_CURE = (
    "Move the list and the loop over it into a module, and name that module. Its forward(hidden, index, "
    "weights) has, for each number and expert of the list: token, choice = torch.where(index == number); "
    "output = output.index_add(0, token, expert(hidden[token]) * weights[token, choice, None])."
)


def count_experts(module: nn.Module) -> int | None:
    """Return the number of experts of a module: stacked in its weights, or in a list; None if it has none."""
    experts = find_expert_list(module)
    return count_stacked(module) if experts is None else len(experts)


def find_expert_list(module: nn.Module) -> nn.ModuleList | None:
    """Return the list of equal experts that has all parameters of a module; None if there is none."""
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1 or isinstance(module, nn.ModuleList):
        return None
    forms = {
        tuple((name, parameter.shape) for name, parameter in expert.named_parameters())
        for expert in lists[0]
        if not isinstance(expert, AbsentExpert)
    }
    inside = {id(parameter) for parameter in lists[0].parameters()}
    is_all = inside == {id(parameter) for parameter in module.parameters()}
    return lists[0] if is_all and len(forms) == 1 and inside else None


def count_stacked(module: nn.Module) -> int | None:
    """Return the first dimension that all parameters of a module have; None if they have none in common."""
    sizes = {parameter.shape[0] if parameter.dim() > 1 else 0 for parameter in module.parameters()}
    return sizes.pop() or None if len(sizes) == 1 else None


def _takes_choices(module: nn.Module) -> bool:
    """Whether a module's forward pass takes tokens, the experts that they chose, and weights."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([each for each in parameters if each.kind in kinds]) == FORWARD_ARGUMENTS


def arrange_experts(
    model: nn.Module, setting: Setting, device: str, counts: dict[str, int]
) -> ExpertGroup | None:
    """Let the modules of experts send tokens to the ranks of their experts; None if the setting has none.

    Ranks that split layers between them share the tokens of experts, even if all have the same experts.
    `counts` are the modules of experts by name, with their number of experts.
    """
    mesh = setting.mesh
    if mesh.ep == 1 and (mesh.tp == 1 or not counts):
        return None
    check_experts(counts, mesh.ep)
    group = make_expert_group(setting, device)
    for layer, (name, experts) in enumerate(counts.items()):
        module = model.get_submodule(name)
        vars(module)["forward"] = SplitExperts(module, layer, experts, group)
        group.layers.append(name)
    return group


def check_experts(counts: dict[str, int], ep: int) -> None:
    """Raise if a model has no experts, or a number of them that ranks cannot share."""
    if not counts:
        raise WrongUse(
            f"ep={ep}",
            found="the model has no experts that trimtab can spread: modules with num_experts, stacked "
            "weights or a list of experts, and forward(hidden, index, weights)",
            cure="Leave ep out, or name them in `expert_modules` of the job; docs/jobs.md has both forms.",
        )
    for name, experts in counts.items():
        if experts % ep:
            legal = [str(number) for number in range(1, experts + 1) if experts % number == 0]
            raise WrongUse(
                f"ep={ep}",
                found=f"{name} has {experts} experts, which {ep} ranks cannot share evenly",
                cure=f"Use one of {', '.join(legal)}.",
            )


def describe_experts(group: ExpertGroup | None, imbalance: float) -> list[str]:
    """Return what an estimate assumes about experts on other ranks; empty without them."""
    if group is None:
        return []
    layers = plural(len(group.layers), "layer")
    if group.size == 1:
        return [f"tp: ranks that split layers share the tokens of the experts of {layers}, which are shards"]
    tokens = "every rank gets as many tokens as the others"
    if imbalance > 1:
        tokens = f"this rank gets {imbalance:g} times as many tokens as the mean rank"
    spread = f"{tokens} (--expert-imbalance), spread evenly over its experts; no token is dropped"
    return [f"ep: {group.size} ranks hold the experts of {layers}; {spread}"]


def make_expert_group(setting: Setting, device: str) -> ExpertGroup:
    """Create the meshes of experts: ranks with different experts are neighbours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    mesh = setting.mesh
    axes = {"dp_shard_mod_ep": mesh.expert_ranks // mesh.ep, "ep": mesh.ep}
    if mesh.dp_replicate > 1:
        axes = {"dp_replicate": mesh.dp_replicate, **axes}
    same_experts = tuple(axes)[:-1]
    if mesh.pp > 1:
        axes = {"pp": mesh.pp, **axes}
    with _disable_current_modes():
        every = init_device_mesh(torch.device(device).type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return ExpertGroup(every["ep"], every[same_experts], imbalance=setting.expert_imbalance)


def split_experts(module: nn.Module, group: ExpertGroup) -> None:
    """Leave this rank its share of the weights of a module of experts: DTensors, or members of a list."""
    from torch.distributed.tensor import DTensor, Shard

    experts = find_expert_list(module)
    if experts is not None:
        each = len(experts) // group.size
        for number in range(len(experts)):
            if number // each != group.rank:
                experts[number] = AbsentExpert()
        return
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            # A copy: a view would keep all of it in memory.
            local = parameter.detach().chunk(group.size)[group.rank].clone()
            whole = DTensor.from_local(
                local,
                group.mesh,
                [Shard(0)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            split = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            for key, value in vars(parameter).items():
                vars(split).setdefault(key, value)
            owner._parameters[name] = split
