"""Context parallelism: exact attention over sequences whose positions are spread over ranks.

Every rank holds some positions of each sequence (`trimtab.engine.sequence_split`). Everything but attention
treats positions independently, so only attention communicates. There are two methods:

- ring: queries stay, keys and values go round the ranks. Each rank merges the results of blocks by their
  log-sum-exp. The next block is on its way while the current one is computed.
- all-to-all: ranks exchange positions for heads, compute whole sequences of some heads, and exchange back.

Both give the attention of the whole sequence, forward and backward, up to rounding. torch's own
`context_parallel` has a ring for three CUDA kernels only. This one runs torch's fused kernels on CPU and GPU
alike, so that tests on the CPU, traces and training run the same program.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.engine.sequence_split import SequencePart, check_heads, refuse_job_without_split
from trimtab.errors import WrongUse
from trimtab.jobs.job import has_embeddings
from trimtab.jobs.optimizers import has_optimizers
from trimtab.spec import ContextMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.spec import Mesh, Setting

RING, ALL_TO_ALL = ContextMethod.RING, ContextMethod.ALL_TO_ALL
LEAVE_OUT = "Leave cp out, or"
HALF = (torch.float16, torch.bfloat16)
HEAD_STEP = 8
"""Flash attention on a GPU needs head sizes that are multiples of this."""
SEQUENCE_DIM = 2
"""Fused kernels take batch x heads x length x head size."""


class ContextCollective(NamedTuple):
    """One collective of a context-parallel attention layer."""

    method: ContextMethod
    length: int
    """Elements that this rank sends for each sample."""
    dtype: torch.dtype
    group: ContextGroup

    def answer(self, device: torch.device) -> None:
        """Take part with zeros, after this rank has failed."""
        zeros = torch.zeros(self.length * self.group.samples, dtype=self.dtype, device=device)
        send = self.group.rotate if self.method is RING else self.group.exchange
        self.group.wait(send(zeros, answers=True))


class ContextGroup:
    """The ranks that share the sequences of a batch, and their collectives."""

    method_in_flight: ClassVar[ContextMethod | None] = None
    """Method of the collective that is being issued; a tracer reads it. None outside of collectives."""

    def __init__(
        self, group: Any, *, rank: int, size: int, method: ContextMethod = ContextMethod.RING
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.method = method
        self.is_counted = True
        """Set by gradient storage, as for synchronised BatchNorm; attention has no statistics."""
        self.record: Callable[[Any], None] | None = None
        """Called just before each collective."""
        self.calls = 0
        """Attention calls that have been split."""
        self._pass_samples: Sequence[int] = (1,)
        self._issued = 0
        self._issued_per_pass = 0

    def start_attempt(self, samples: Sequence[int]) -> None:
        """Begin an attempt at a step: `samples` is the number of samples in each of its passes."""
        self._pass_samples = samples or (1,)
        self._issued = 0

    def finish_rehearsal(self, passes: int) -> None:
        """Note the number of collectives in a pass: a rank that fails has to take part in the others."""
        self._issued_per_pass = self._issued // passes

    @property
    def samples(self) -> int:
        """Samples of the pass to which the next collective belongs."""
        number = self._issued // self._issued_per_pass if self._issued_per_pass else 0
        return self._pass_samples[min(number, len(self._pass_samples) - 1)]

    def check_called(self) -> None:
        """Raise if no attention was split since `calls` was set to 0: the result would be wrong."""
        if not self.calls:
            raise WrongUse(
                f"cp={self.size}",
                found="the model computes attention without "
                "torch.nn.functional.scaled_dot_product_attention, "
                "so that it cannot be spread over ranks",
                cure="Call it by that name, as in functional.scaled_dot_product_attention(...), or leave cp "
                "out.",
            )

    @property
    def part(self) -> SequencePart:
        """The positions of this rank."""
        return SequencePart(rank=self.rank, size=self.size, balanced=self.method is RING)

    def rotate(self, buffer: torch.Tensor, *, answers: bool = False) -> torch.Tensor:
        """Send a flat buffer to the next rank and start to receive that of the previous one."""
        sends, receives = [0] * self.size, [0] * self.size
        sends[(self.rank + 1) % self.size] = receives[(self.rank - 1) % self.size] = buffer.numel()
        return self._start(buffer, sends, receives, RING, answers=answers)

    def exchange(self, buffer: torch.Tensor, *, answers: bool = False) -> torch.Tensor:
        """Send an equal share of a flat buffer to every rank and start to receive theirs."""
        shares = [buffer.numel() // self.size] * self.size
        return self._start(buffer, shares, shares, ALL_TO_ALL, answers=answers)

    def _start(
        self,
        buffer: torch.Tensor,
        sends: list[int],
        receives: list[int],
        method: ContextMethod,
        *,
        answers: bool,
    ) -> torch.Tensor:
        if self.record is not None and not answers:
            self.record(ContextCollective(method, buffer.numel() // self.samples, buffer.dtype, self))
        self._issued += 1
        ContextGroup.method_in_flight = method
        try:
            started: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
                buffer, receives, sends, self.group.group_name
            )
        finally:
            ContextGroup.method_in_flight = None
        return started

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Return what a collective has received."""
        ContextGroup.method_in_flight = self.method
        try:
            received: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
        finally:
            ContextGroup.method_in_flight = None
        return received


# ------------------------------------------------------------------------ attention of one block


class BlockResult(NamedTuple):
    """Attention of some queries over some keys: to be merged with that of other keys."""

    output: torch.Tensor
    log_sums: torch.Tensor
    """Logarithm of the sum of exponentials of each query's scores."""


def attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> BlockResult:
    """Compute the attention of one block with a fused kernel that returns the log-sum-exp."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return BlockResult(
            *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        )
    if query.dtype in HALF:
        size = value.shape[-1]
        query, key, value = (_pad_head(tensor) for tensor in (query, key, value))
        flash = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return BlockResult(flash[0][..., :size], flash[1])
    key, value = (_repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    efficient = aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return BlockResult(efficient[0], efficient[1][..., : query.shape[SEQUENCE_DIM]])


def attend_block_backward(  # noqa: PLR0913 - what the forward pass has, and its results
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    whole: BlockResult,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a block's queries, keys and values.

    `whole` is the merged result over all keys: with its log-sum-exp, the weights of a block are those of the
    whole softmax.
    """
    aten = torch.ops.aten
    output, log_sums = whole
    if query.device.type == "cpu":
        for_query, for_key, for_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, log_sums, 0.0, causal, scale=scale
        )
        return for_query, for_key, for_value
    if query.dtype in HALF:
        sizes = [tensor.shape[-1] for tensor in (query, key, value)]
        gradient, query, key, value, output = (
            _pad_head(tensor) for tensor in (gradient, query, key, value, output)
        )
        lengths = query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM]
        unused = torch.empty(0, dtype=torch.int64, device=query.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            *(gradient, query, key, value, output, log_sums.contiguous(), None, None, *lengths),
            *(0.0, causal, unused, unused),
            scale=scale,
        )
        first, second, third = (tensor[..., :size] for tensor, size in zip(found, sizes, strict=True))
        return first, second, third
    heads = key.shape[1]
    key, value = (_repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    # The kernel wants rows of log-sum-exp that are padded as in its forward pass.
    padded = functional.pad(log_sums, (0, -log_sums.shape[-1] % 32), value=float("inf"))
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    for_query, for_key, for_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, query, key, value, None, output, padded, unused, unused, 0.0),
        *([True, True, True, False], causal),
        scale=scale,
    )
    return for_query, _sum_heads(for_key, heads), _sum_heads(for_value, heads)


def _pad_head(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % HEAD_STEP
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    times = heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _sum_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum the gradients of repeated heads."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, -1)).sum(2)


# ------------------------------------------------------------------------ the ring


class RingStep(NamedTuple):
    """Which queries meet which of the keys that a rank holds in one step of the ring."""

    causal: bool
    all_queries: bool
    """Whether all local queries take part; else the later half."""
    all_keys: bool
    """Whether all keys in the buffer take part; else the earlier half."""


def plan_step(step: int, rank: int, *, causal: bool) -> RingStep:
    """Return what a rank computes in a step, in which it holds the keys of rank `rank - step`.

    Rank r has chunks r and 2 cp - 1 - r. Keys of a lower rank: their first chunk is before all queries, their
    second after all. Keys of a higher rank: both are after the first chunk of queries and before the second.

    >>> plan_step(1, 1, causal=True)
    RingStep(causal=False, all_queries=True, all_keys=False)
    >>> plan_step(2, 1, causal=True)
    RingStep(causal=False, all_queries=False, all_keys=True)
    """
    if not causal or step == 0:
        return RingStep(causal, all_queries=True, all_keys=True)
    return RingStep(causal=False, all_queries=step <= rank, all_keys=step > rank)


class RingAttention(torch.autograd.Function):
    """Attention of local queries over the keys and values of all ranks of a group."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - as torch's function has them
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: ContextGroup,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Merge the attention over the blocks of keys as they come round."""
        buffer = _pack(key, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        output = log_sums = torch.empty(0)
        for step in range(group.size):
            started = group.rotate(buffer) if step < group.size - 1 else None
            now = plan_step(step, group.rank, causal=causal)
            held_key, held_value = _unpack(buffer, key, value, everything=now.all_keys)
            block = attend_block(
                _later_half(query, everything=now.all_queries),
                held_key,
                held_value,
                causal=now.causal,
                scale=scale,
            )
            if step == 0:
                output, log_sums = block.output.to(wide), block.log_sums
            else:
                _merge_block(output, log_sums, block, everything=now.all_queries)
            if started is not None:
                buffer = group.wait(started)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Send keys and values round once more, and their gradients after them until they are home."""
        query, key, value, output, log_sums = ctx.saved_tensors
        group = ctx.group
        buffer = _pack(key, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        for_query = torch.zeros_like(query, dtype=wide)
        travelling: torch.Tensor | None = None
        for step in range(group.size):
            started = group.rotate(buffer) if step < group.size - 1 else None
            now = plan_step(step, group.rank, causal=ctx.causal)
            held_key, held_value = _unpack(buffer, key, value, everything=now.all_keys)
            queries, outputs, sums, gradients = (
                _later_half(tensor, everything=now.all_queries)
                for tensor in (query, output, log_sums, gradient)
            )
            block_query, block_key, block_value = attend_block_backward(
                *(gradients, queries, held_key, held_value, BlockResult(outputs, sums)),
                causal=now.causal,
                scale=ctx.scale,
            )
            _later_half(for_query, everything=now.all_queries).add_(block_query)
            del block_query
            received = torch.zeros_like(buffer, dtype=wide) if travelling is None else group.wait(travelling)
            for target, found in zip(
                _unpack(received, key, value, everything=now.all_keys), (block_key, block_value), strict=True
            ):
                target.add_(found)
            del block_key, block_value
            travelling = group.rotate(received)
            if started is not None:
                buffer = group.wait(started)
        assert travelling is not None  # noqa: S101 - there is at least one step
        for_key, for_value = _unpack(group.wait(travelling), key, value, everything=True)
        return (
            for_query.to(query.dtype),
            for_key.to(key.dtype),
            for_value.to(value.dtype),
            *(None, None, None),
        )


def _pack(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys and values in one flat buffer."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(
    buffer: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, everything: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and values in a buffer; without `everything`, the earlier half of each."""
    whole = (buffer[: key.numel()].view(key.shape), buffer[key.numel() :].view(value.shape))
    if everything:
        return whole
    first, second = (tensor.narrow(SEQUENCE_DIM, 0, tensor.shape[SEQUENCE_DIM] // 2) for tensor in whole)
    return first, second


def _later_half(tensor: torch.Tensor, *, everything: bool) -> torch.Tensor:
    if everything:
        return tensor
    half = tensor.shape[SEQUENCE_DIM] // 2
    return tensor.narrow(SEQUENCE_DIM, half, half)


def _merge_block(
    output: torch.Tensor, log_sums: torch.Tensor, block: BlockResult, *, everything: bool
) -> None:
    """Merge the attention over further keys into that so far, in place.

    The new result is the mean of both, weighted by their sums of exponentials.
    """
    output, log_sums = (_later_half(tensor, everything=everything) for tensor in (output, log_sums))
    share = torch.sigmoid(block.log_sums - log_sums).unsqueeze(-1)
    output.lerp_(block.output.to(output.dtype), share.to(output.dtype))
    log_sums.copy_(torch.logaddexp(log_sums, block.log_sums))


# ------------------------------------------------------------------------ all-to-all


class SwapHeads(torch.autograd.Function):
    """Exchange positions for heads: every rank gets all positions of its share of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ContextGroup, to_heads: bool) -> torch.Tensor:
        """Exchange a tensor of batch x heads x length x head size."""
        ctx.group, ctx.to_heads = group, to_heads
        return _swap(tensor, group, to_heads=to_heads)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Exchange the gradient back."""
        return _swap(gradient, ctx.group, to_heads=not ctx.to_heads), None, None


def _swap(tensor: torch.Tensor, group: ContextGroup, *, to_heads: bool) -> torch.Tensor:
    # The dimension of ranks goes first, is exchanged, and goes where it is the slowest of its new dimension.
    split, joined = (1, SEQUENCE_DIM) if to_heads else (SEQUENCE_DIM, 1)
    sent = tensor.unflatten(split, (group.size, -1)).movedim(split, 0).contiguous()
    received = group.wait(group.exchange(sent.view(-1))).view(sent.shape)
    return received.movedim(0, joined).flatten(joined, joined + 1)


# ------------------------------------------------------------------------ in place of torch's function


_torch_attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
_active: ContextGroup | None = None
"""Group over which attention of this process is computed; None: sequences are whole."""


def split_attention(group: ContextGroup | None) -> None:
    """Compute every attention of this process over the sequences of a group; None: over whole sequences."""
    global _active  # noqa: PLW0603 - torch's function is one for the process, and so is its replacement
    if group is None and _active is None:
        return
    _active = group
    functional.scaled_dot_product_attention = _torch_attention if group is None else attend


@contextlib.contextmanager
def use_whole_sequences() -> Iterator[None]:
    """Compute attention over whole sequences for a while, as on one device."""
    group = _active
    split_attention(None)
    try:
        yield
    finally:
        split_attention(group)


def attend(  # noqa: PLR0913, PLR0917 - torch's own signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention over the positions of all ranks of the group."""
    group = _active
    assert group is not None  # noqa: S101 - split_attention() sets both
    if isinstance(query, DTensor):
        return _attend_own_heads(
            (query, key, value),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    _refuse_call(group, query, key, attn_mask, dropout_p, is_causal=is_causal)
    group.calls += 1
    query, key, value = _autocast(query, key, value)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"{query.shape[1]} heads of queries and {key.shape[1]} of keys, without enable_gqa")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if group.method is RING:
        attended: torch.Tensor = RingAttention.apply(query, key, value, group, is_causal, scale)
        return attended
    check_heads(query.shape[1], key.shape[1], group.size)
    if key.shape[1] % group.size:
        key, value = (_repeat_heads(tensor, group.size) for tensor in (key, value))
    query, key, value = (SwapHeads.apply(tensor, group, True) for tensor in (query, key, value))
    whole = _torch_attention(
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    swapped: torch.Tensor = SwapHeads.apply(whole, group, False)
    return swapped


def _attend_own_heads(tensors: Sequence[Any], **options: Any) -> Any:
    """Attend with the heads of this rank, where ranks split layers as well.

    Queries, keys and values are split by heads, or all ranks have all of them.
    """
    mesh = tensors[0].device_mesh
    has_heads = all(placement.is_shard(1) or placement.is_replicate() for placement in tensors[0].placements)
    whole = [Replicate()] * mesh.ndim
    placements = tensors[0].placements if has_heads else whole
    query, key, value = (
        (tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, whole, run_check=False))
        .redistribute(placements=placements)
        .to_local()
        for tensor in tensors
    )
    output = attend(query, key, value, **options)
    return DTensor.from_local(output, mesh, placements, run_check=False)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for torch's own function."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _refuse_call(  # noqa: PLR0913 - the arguments that matter
    group: ContextGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
) -> None:
    """Raise if an attention call cannot be split, with the reason."""
    given, found, cure = f"cp={group.size}", "", ""
    if mask is not None:
        found = f"attention has a mask of shape {tuple(mask.shape)}, whose columns are on other ranks"
        cure = f"{LEAVE_OUT} use samples without padding and packed documents, so that is_causal is enough."
    elif dropout and group.method is RING:
        found = f"attention has a dropout of {dropout:g}, which blocks of a ring do not share"
        cure = "Set the dropout of attention to 0 (for slm: --set dropout=0), or use cp_method=all-to-all."
    elif query.dim() != SEQUENCE_DIM + 2 or key.dim() != SEQUENCE_DIM + 2:
        found = f"attention has {query.dim()} dimensions, not batch x heads x length x head size"
        cure = f"{LEAVE_OUT} call scaled_dot_product_attention with four dimensions."
    elif is_causal and query.shape[SEQUENCE_DIM] != key.shape[SEQUENCE_DIM]:
        found = "causal attention has different numbers of queries and keys"
        cure = f"{LEAVE_OUT} use the same sequence for both."
    if found:
        raise WrongUse(given, found=found, cure=cure)


@contextlib.contextmanager
def check_calls(group: ContextGroup | None) -> Iterator[None]:
    """Raise if a forward pass has called no attention that was split: its result would be wrong."""
    if group is not None:
        group.calls = 0
    yield
    if group is not None:
        group.check_called()


# ------------------------------------------------------------------------ which models


MIXING_LAYERS = (nn.RNNBase, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)
"""Layers that combine positions outside of attention."""
GROWING_ROPES = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the longest position of a batch, which ranks do not share."""
TRANSFORMERS_NAME = "trimtab_context_parallel"


def prepare_model(model: nn.Module, group: ContextGroup) -> None:
    """Refuse a model that mixes positions outside of attention; let transformers make no masks."""
    given = f"cp={group.size}"
    for name, module in model.named_modules():
        if isinstance(module, MIXING_LAYERS):
            raise WrongUse(
                given,
                found=f"{name} ({type(module).__name__}) combines positions that are on different ranks",
                cure=f"{LEAVE_OUT} use a model in which only attention combines positions.",
            )
        if is_transformers_model(module):
            _prepare_transformers(module, given)


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def _prepare_transformers(module: Any, given: str) -> None:
    """Let a model of transformers pass its causal attention on without a mask."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    rope: Any = getattr(config, "rope_parameters", None) or {}
    rope_kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    found = ""
    if not getattr(module, "_supports_attention_backend", False):
        found = f"{type(module).__name__} has no replaceable attention"
    elif getattr(module, "_is_stateful", False):
        found = f"{type(module).__name__} passes a state from one position to the next"
    elif kinds:
        found = f"{type(module).__name__} has layers of {', '.join(sorted(kinds))}, which need a mask"
    elif rope_kind in GROWING_ROPES:
        found = f"its positions ({rope_kind}) depend on the length of the sequence"
    elif getattr(config, "output_router_logits", False):
        found = "its loss balances experts over whole sequences (output_router_logits)"
    if found:
        raise WrongUse(given, found=found, cure="Leave cp out: fsdp and recomputation save memory too.")
    from transformers import AttentionInterface

    AttentionInterface.register(TRANSFORMERS_NAME, attend_without_mask)
    module.config._attn_implementation = TRANSFORMERS_NAME
    module.register_forward_pre_hook(_refuse_padding, with_kwargs=True)


def _refuse_padding(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
    """Raise if a model of transformers gets a mask: it would be ignored."""
    if options.get("attention_mask") is not None:
        raise WrongUse(
            "cp",
            found="the model gets an attention_mask, whose columns are on other ranks",
            cure="Leave cp out, or use samples of one length and leave attention_mask out.",
        )


def attend_without_mask(  # noqa: PLR0913, PLR0917 - the signature of transformers
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' `sdpa` does, without a mask: a causal order is that of the positions."""
    window = options.get("sliding_window")
    if window is not None or options.get("position_bias") is not None:
        raise WrongUse(
            "cp",
            found=f"attention has a window of {window} tokens" if window else "attention has a position bias",
            cure="Leave cp out.",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and query.shape[SEQUENCE_DIM] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def refuse_context(job: Any, setting: Setting) -> None:
    """Raise if a setting splits sequences, and the job or another part of the setting does not allow it."""
    size, found, cure = setting.mesh.cp, "", "Leave cp out."
    if size == 1:
        return
    if setting.mesh.branch > 1:
        found = f"trimtab splits sequences under ddp, fsdp, hsdp and pipeline, not under {setting.strategy}"
        cure = f"Use fsdp, or leave cp={size} out."
    elif setting.compile:
        found = "trimtab does not compile attention over split sequences"
        cure = "Leave compile or cp out."
    elif job is not None and has_embeddings(job):
        found = "gradient caching of embed() and loss_of() compares whole samples"
    elif callable(getattr(job, "evaluate", None)):
        found = "evaluate() of the job would get a part of every sequence"
    elif has_optimizers(job):
        found = "the job has optimizers() with losses of their own"
    elif not callable(getattr(job, "split_sequence", None)):
        refuse_job_without_split(size)
    if found:
        raise WrongUse(f"cp={size}", found=found, cure=cure)


def arrange_context(model: nn.Module, setting: Setting) -> ContextGroup | None:
    """Let a model compute attention over split sequences; return None if the setting does not split them."""
    if setting.mesh.cp == 1:
        split_attention(None)
        return None
    group = make_context_group(setting.mesh, setting.cp_method)
    prepare_model(model, group)
    split_attention(group)
    return group


def make_context_group(mesh: Mesh, method: ContextMethod) -> ContextGroup:
    """Create the groups of ranks that share sequences; return that of this rank.

    Ranks that split layers are neighbours; those that split sequences are a layer's ranks apart.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own: Any = None
    with _disable_current_modes():
        for first in range(0, ranks, mesh.cp * mesh.tp):
            for start in range(first, first + mesh.tp):
                members = list(range(start, first + mesh.cp * mesh.tp, mesh.tp))
                group = dist.new_group(members)
                if rank in members:
                    own = group
    return ContextGroup(own, rank=rank // mesh.tp % mesh.cp, size=mesh.cp, method=method)
