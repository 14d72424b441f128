"""Estimate time and memory of a decoder under any mesh from the operations of its blocks.

The ranks of a mesh are numbered as Megatron-LM numbers them: tensor-parallel ranks are neighbours, then
context-parallel ones, then data-parallel ones, then stages. Every micro-batch runs through the stages; a
stage waits for what it receives. The step ends with the sum of gradients and the update.

Known error: against 1,000 measured steps of GPT models on 2 to 512 A100 (VIA-Research/vTrain) and 26 of Llama
and DeepSeek shapes on 8 B200 (MooreThreads/SimuMax), see docs/layouts.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import collectives
from trimtab.predict.decoder import (
    FLASH,
    FUSED_KERNELS,
    BlockKernels,
    BlockPass,
    BlockRecompute,
    Float8,
    RankShare,
    count_stored,
    list_again,
    list_attention,
    list_block,
    list_embedding,
    list_head,
)
from trimtab.predict.step_time import ARITHMETIC_KINDS
from trimtab.spec import Work
from trimtab.spec.precision import DTYPE_BYTES
from trimtab.strategies.stage_split import BlockWork, balance_stages

if TYPE_CHECKING:
    from trimtab.predict.op_time import Pace
    from trimtab.predict.step_time import HostCosts
    from trimtab.spec import DecoderShape
    from trimtab.strategies.base import LinkCosts

STATE_BYTES = 8
"""Of AdamW in float32, for each weight."""
MASTER_BYTES = 4
"""Of the copy of each weight in float32."""
LOGIT_BYTES, EAGER_LOGIT_BYTES = 4, 12
"""Of each score of the vocabulary: with a fused loss, the score and its gradient in 16 bits; else its
log-probability, the gradient of that and the gradient of the score, all in float32."""
BLEND = 4
"""Power of the mean between device and host; a large one is their maximum."""
VIEWS_OF_PRODUCT = 3.5
"""Views of a matrix product or attention: 3 and 4 forward, 3.5 and 4 backward (bench/host_ops.py)."""
TENSORS_PER_BLOCK = 9
FLASH_RAMP = 400
"""Keys at which FlashAttention reaches half of its rate: the form of its authors' curves on an A100."""


class Sharding(StrEnum):
    """What data-parallel ranks share between them."""

    NONE = "none"
    """Nothing: every rank has all of its weights, gradients and states (DDP)."""
    OPTIMIZER = "optimizer"
    """The states of the optimizer and the update (ZeRO-1, the distributed optimizer of Megatron-LM)."""
    WEIGHTS = "weights"
    """Weights, gradients and states (FSDP2)."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayout:
    """How a decoder is spread over ranks, and how its step runs."""

    micro_batch: int
    micro_batches: int
    """Of one data-parallel rank in a step."""
    sequence: int
    tp: int = 1
    sequence_parallel: bool = True
    overlaps_tp: bool = False
    """Whether collectives of tensor parallelism run in parts, behind the products that need them."""
    cp: int = 1
    balanced: bool = True
    """Whether context-parallel ranks have equal parts of the attention scores."""
    pp: int = 1
    virtual_stages: int = 1
    """Parts of the model on each stage; more than 1: interleaved 1F1B."""
    ep: int = 1
    """Ranks that share the experts, among the data-parallel and context-parallel ones."""
    dp_shard: int = 1
    dp_replicate: int = 1
    sharding: Sharding = Sharding.WEIGHTS
    overlaps_data: bool = True
    """Whether gradients are summed while the backward pass runs."""
    overlaps_gather: bool = True
    """Whether weights that other ranks updated are gathered while the next forward pass runs."""
    full_recompute: bool = False
    """Whether each block stores only its input."""
    selective_recompute: bool = False
    """Whether each block stores attention and every second product (torchtitan's way by operation)."""
    keeps_gathered: bool = False
    """Whether gathered weights stay until the backward pass (ZeRO-2), instead of being gathered again."""
    copies_shards: bool = True
    """Whether gathered weights are copied out of a buffer, and gradients into one, as FSDP2 does; others
    gather into the weights themselves."""
    relayed: bool = False
    """Whether stages are trimtab's: they are balanced by time, and gather weights in every pass; else weights
    stay gathered between micro-batches."""
    kernels: BlockKernels = FUSED_KERNELS
    dtype: str = "bfloat16"
    gradients: str = "float32"

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.dp_shard * self.dp_replicate

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def share(self) -> RankShare:
        """Return what a rank has of each block."""
        return RankShare(
            micro_batch=self.micro_batch,
            sequence=self.sequence,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel and self.tp > 1,
            overlaps_tp=self.overlaps_tp,
            cp=self.cp,
            balanced=self.balanced,
            ep=self.ep,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    @property
    def recompute(self) -> BlockRecompute:
        """Return what blocks compute again."""
        if self.full_recompute:
            return BlockRecompute.FULL
        return BlockRecompute.SELECTIVE if self.selective_recompute else BlockRecompute.NONE

    @property
    def gathers_in_passes(self) -> bool:
        """Whether every pass of a micro-batch gathers weights and shares gradients."""
        return self.sharding is Sharding.WEIGHTS and (self.pp == 1 or self.relayed)

    @property
    def shards(self) -> int:
        """Ranks that share weights or states: those with the same part of the model in different data."""
        return self.dp_shard * self.cp if self.sharding is not Sharding.NONE else 1

    @property
    def expert_shards(self) -> int:
        """Ranks that share the weights or states of an expert.

        Ranks of an expert-parallel group have different experts. Those that split layers are among them, or
        hold shards of the same experts; without such groups, they split the experts too.
        """
        ranks = self.shards * self.tp if self.ep > 1 else self.shards
        return max(1, ranks // self.ep) if self.sharding is not Sharding.NONE else 1


class PassTime(NamedTuple):
    """Seconds of one micro-batch on one rank."""

    device_s: float
    host_s: float
    """What the host needs to launch it."""
    exchange_s: float
    """Collectives within layers, for which the rank waits."""

    @property
    def total_s(self) -> float:
        """Return the time of the pass: the device with its collectives, or the host if that is slower.

        Where both take as long, some operations wait for the host and others for the device: 19 % more.
        """
        device = self.device_s + self.exchange_s
        return float((device**BLEND + self.host_s**BLEND) ** (1 / BLEND))

    def plus(self, other: PassTime, count: int = 1) -> PassTime:
        """Return the time of this pass and of `count` equal others after it."""
        pairs = zip(self, other, strict=True)
        return PassTime(*(mine + count * theirs for mine, theirs in pairs))


class LayoutTime(NamedTuple):
    """Seconds of a step by what they are spent on."""

    compute_s: float
    launch_s: float
    """The device waits for the host."""
    within_layers_s: float
    """Collectives of tensor, context and expert parallelism."""
    bubble_s: float
    """Stages wait for each other."""
    send_s: float
    data_s: float
    """Gradients and weights between data-parallel ranks, where computing does not hide them."""
    update_s: float

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return sum(self)


class LayoutMemory(NamedTuple):
    """Bytes of the fullest rank by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int
    """Gathered weights and inputs of the block that runs."""
    stage: int = 0
    """Number of the fullest stage."""

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(self[:-1])


class LayoutEstimator:
    """Estimates layouts of one decoder on one kind of device."""

    def __init__(  # noqa: PLR0913 - what a prediction is made of
        self,
        shape: DecoderShape,
        pace: Pace,
        host: HostCosts,
        links: LinkCosts,
        *,
        product_rate: float = 1.0,
        slowdown: float = 1.0,
        flash_flops: float | None = None,
    ) -> None:
        """Estimate with the rate of products over the predicted one, and the rate of FlashAttention."""
        self.shape, self.pace, self.host, self.links = shape, pace, host, links
        self.product_rate, self.flash_flops, self.slowdown = product_rate, flash_flops, slowdown
        self._block_s = lru_cache(maxsize=None)(self._time_block)
        self._ends_s = lru_cache(maxsize=None)(self._time_ends)
        self._update_s = lru_cache(maxsize=None)(self._time_update)
        self._copy_s = lru_cache(maxsize=None)(self._time_copy)
        self._kinds = lru_cache(maxsize=None)(self._list_kinds)
        self._ends = lru_cache(maxsize=None)(self._weigh_ends)
        self._stored = lru_cache(maxsize=None)(partial(count_stored, shape))

    # memory

    def count_weights(self, layout: DecoderLayout, stage: int) -> tuple[int, int, int]:
        """Return the weights of a rank before data-parallel sharding: dense ones, experts, and tables."""
        shape = self.shape
        plain, blocks = self.count_kinds(layout, stage)
        shared = shape.shared_experts * shape.expert_weights if shape.experts else shape.expert_weights
        dense = (plain + blocks) * (shape.attention_weights // layout.tp + shape.compressing_weights)
        dense += (blocks * shared + plain * shape.dense_weights) // layout.tp
        experts = blocks * shape.experts * shape.expert_weights
        experts //= layout.ep if layout.ep > 1 else layout.tp
        ends = (stage == 0) + (stage == layout.pp - 1 and not (shape.tied and layout.pp == 1))
        return dense, experts, ends * shape.table_weights // layout.tp

    def count_kinds(self, layout: DecoderLayout, stage: int) -> tuple[int, int]:
        """Return the first blocks without experts of a stage, and its other blocks."""
        ends = self._ends(layout.share, layout.recompute) if layout.relayed and layout.pp > 1 else None
        return self._kinds(layout.pp, ends)[stage]

    def _weigh_ends(self, share: RankShare, recompute: BlockRecompute) -> tuple[float, float]:
        """Return how many blocks take as long as the embedding, and as the head with the loss."""
        block = self._block_s(share, recompute).device_s
        first, last = self._ends_s(share)
        return round(first.device_s / block, 1), round(last.device_s / block, 1)

    def _list_kinds(self, stages: int, ends: tuple[float, float] | None) -> list[tuple[int, int]]:
        kinds, before = [], 0
        layers = self.shape.layers
        each, more = divmod(layers, stages)
        counts = [
            each + (1 <= stage <= more if more < stages - 1 else stage < more) for stage in range(stages)
        ]
        if ends is not None:
            counts = [*balance_stages(BlockWork(ends[0], (1.0,) * layers, ends[1]), stages)]
        for own in counts:
            plain = min(own, max(0, self.shape.dense_layers - before))
            kinds.append((plain, own - plain))
            before += own
        return kinds

    def count_layers(self, layout: DecoderLayout, stage: int) -> int:
        """Return the layers of a stage.

        Where they do not divide, stages in the middle have one more, because the first has the embedding and
        the last the head: 126 layers on 16 stages are 7 on the first and the last, and 8 on the others. Those
        of trimtab follow from the time of embedding and head.
        """
        return sum(self.count_kinds(layout, stage))

    def estimate_memory(self, layout: DecoderLayout) -> LayoutMemory:
        """Return the memory of the fullest rank, as torch allocates it."""
        # The first holds most micro-batches, the second may have a layer more, the last has the head.
        stages = {0, min(1, layout.pp - 1), layout.pp - 1}
        return max((self._stage_memory(layout, stage) for stage in stages), key=lambda found: found.total)

    def _stage_memory(self, layout: DecoderLayout, stage: int) -> LayoutMemory:
        dense, experts, tables = self.count_weights(layout, stage)
        own = dense + tables
        width, sums = DTYPE_BYTES[layout.dtype], DTYPE_BYTES[layout.gradients]
        sharded = own // layout.shards + experts // layout.expert_shards
        share = layout.share
        hidden = share.tokens * self.shape.width * width
        ends = (stage == 0) + (stage == layout.pp - 1)
        # Backward, the gradients of both halves of the feed-forward part are there beside what was stored.
        wide = (2 if self.shape.gated else 1) * self.shape.feed_forward // layout.tp
        inner = share.tokens * wide * width if not self.shape.experts else 0
        block = (own - tables + experts) // max(1, self.count_layers(layout, stage))
        if layout.sharding is Sharding.WEIGHTS:
            weights, gradients = MASTER_BYTES * sharded, MASTER_BYTES * sharded
            optimizer = STATE_BYTES * sharded
            # The block that runs and the next one are gathered; one has its gradients whole.
            working = block * (2 * width + width + sums) + 2 * hidden + inner
            if layout.pp > 1 and not layout.relayed:
                # Gradients are summed before they are shared.
                working = (own + experts) * (width + sums) + 2 * hidden + inner
        else:
            weights, gradients = width * (own + experts), sums * (own + experts)
            optimizer = (MASTER_BYTES + STATE_BYTES) * sharded
            # The gradient of a table is made whole before it is added to those of earlier micro-batches.
            working = 2 * hidden + inner + tables // max(1, ends) * (width + sums)
        plain, blocks = self.count_kinds(layout, stage)
        stored = blocks * self._stored(share, recompute=layout.recompute)
        if plain:
            stored += plain * self._stored(share, recompute=layout.recompute, dense=True)
        again = self._stored(share) * width if layout.recompute is not BlockRecompute.NONE else 0
        in_flight = self.count_held(layout, stage)
        is_last = stage == layout.pp - 1
        scores = share.tokens * -(-self.shape.vocabulary // layout.tp) if is_last else 0
        return LayoutMemory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=int(in_flight * stored * width) + again,
            logits=(LOGIT_BYTES if share.kernels.fused_loss else EAGER_LOGIT_BYTES) * scores,
            working=working,
            stage=stage,
        )

    @staticmethod
    def count_held(layout: DecoderLayout, stage: int) -> float:
        """Return how many micro-batches a stage stores at the same time; interleaving adds a part of one."""
        rounds = min(layout.pp - stage, layout.micro_batches)
        if layout.virtual_stages > 1:
            more = (layout.pp - 1) / (layout.pp * layout.virtual_stages)
            return min(layout.micro_batches, rounds * (1 + more))
        return rounds

    # time

    def _device_s(self, works: tuple[Work, ...]) -> float:
        """Return the seconds of the device; products that fill it lower its clock (h200.toml, throttled)."""
        # A ring of context parallelism repeats the same operation, so each is timed once.
        facts, keys = self.host.step, list(map(id, works))
        unique, counts = dict(zip(keys, works, strict=True)), Counter(keys)
        seconds = {key: counts[key] * self._work_s(work) for key, work in unique.items()}
        busy = sum(seconds.values()) + facts.gap_s * len(works)
        products = sum(seconds[key] for key, work in unique.items() if work.kind in ARITHMETIC_KINDS)
        begin, full = facts.throttles_from, facts.throttles_at
        filled = min(1.0, max(0.0, (products / busy - begin) / (full - begin))) if busy else 0.0
        return busy + products * facts.throttled * filled

    def _work_s(self, work: Work) -> float:
        """Return the seconds of an operation; the rate of FlashAttention grows with the sequence."""
        if work.op.startswith(FLASH) and self.flash_flops is not None:
            keys = work.dims[3]
            return work.flops / self.flash_flops * (keys + FLASH_RAMP) / keys
        return self.pace.seconds(work) / (self.product_rate if work.kind == "matrix" else 1.0)

    def _pass_s(self, passed: BlockPass, again: tuple[Work, ...] = ()) -> tuple[float, float]:
        """Return the seconds of device and host for a forward and a backward pass."""
        device = sum(map(self._device_s, (passed.forward, again, passed.backward)))
        host = self.host
        forward = self._launch_s((*passed.forward, *again), host.forward_s, host.view_s)
        return device, forward + self._launch_s(passed.backward, host.backward_s, host.backward_view_s)

    def _launch_s(self, works: tuple[Work, ...], each_s: float, view_s: float) -> float:
        """Return the seconds of the host to launch operations; calls of libraries take several pieces.

        Products and attention come with views, which formulas do not list: those of their inputs and results.
        """
        facts = self.host.step
        pieces = sum((facts.pieces_of(op) - 1) * count for op, count in Counter(w.op for w in works).items())
        views = VIEWS_OF_PRODUCT * sum(work.kind in ARITHMETIC_KINDS for work in works)
        return each_s * len(works) + self.host.piece_s * pieces + view_s * views

    def _time_block(self, share: RankShare, recompute: BlockRecompute, *, dense: bool = False) -> PassTime:
        block = list_block(self.shape, share, dense=dense)
        device, host = self._pass_s(block, list_again(block, recompute, share.kernels))
        # A block that is recomputed in part has stored the results of its collectives.
        repeats = recompute is BlockRecompute.FULL
        calls = sum(_count_exchanges(share, recompute=repeats)) * self.host.forward_s
        return PassTime(device, host + calls, self._exchange_s(share, recompute=repeats, dense=dense))

    def _exchange_s(self, share: RankShare, *, recompute: bool, dense: bool = False) -> float:
        links, shape = self.links, self.shape
        width = DTYPE_BYTES[share.dtype]
        size = share.tokens * shape.width * width
        reduces, gathers, scatters = _count_exchanges(share, recompute=recompute)
        seconds = reduces * links.all_reduce_s(size, share.tp)
        # Inputs of products with one scale are cast before they are gathered.
        gathered = size // width if share.kernels.float8 is Float8.TENSOR else size
        seconds += gathers * links.all_gather_s(gathered, share.tp)
        seconds += scatters * links.reduce_scatter_s(size, share.tp)
        if share.overlaps_tp and share.kernels.float8 is not Float8.ROW:
            # Only the first part of each is waited for. Products with scales of rows are not split so.
            seconds /= share.tp
        passes = 2 + recompute
        if share.cp > 1:
            seconds += self._ring_s(share, forwards=1 + recompute)
        if shape.experts and share.ep > 1 and not dense:
            rows = share.own_tokens * shape.experts_per_token * shape.width * width
            seconds += 2 * passes * links.all_to_all_s(rows, share.ep, apart=share.tp)
        return seconds

    def _ring_s(self, share: RankShare, *, forwards: int) -> float:
        """Return what is not hidden of sending keys and values round the context-parallel ranks.

        Each part is sent while attention over the part before runs; backward, its gradients are sent too. A
        ring that leaves a node is as fast as its slowest hop.
        """
        shape = self.shape
        heads = max(1, shape.key_value_heads // share.tp)
        part = share.tokens * heads * (shape.head_size + shape.values) * DTYPE_BYTES[share.dtype]
        # Ranks of half the ring away are in another node where the ring leaves its node.
        farthest = share.tp * share.cp // 2
        attention = list_attention(shape, share)
        exposed = 0.0
        for works, times, size in ((attention.forward, forwards, part), (attention.backward, 1, 2 * part)):
            hidden = collectives().overlapped * self._device_s(works) / share.cp
            exposed += times * max(0.0, self.links.send_s(size, farthest) - hidden)
        return (share.cp - 1) * exposed

    def _time_ends(self, share: RankShare) -> tuple[PassTime, PassTime]:
        """Return the embedding, and the head with the loss."""
        links = self.links
        size = share.tokens * self.shape.width * DTYPE_BYTES[share.dtype]
        summed = links.all_reduce_s(size, share.tp)
        losses = 3 * links.all_reduce_s(share.tokens * DTYPE_BYTES["float32"], share.tp)
        first = self._pass_s(list_embedding(self.shape, share))
        last = self._pass_s(list_head(self.shape, share))
        return PassTime(*first, summed), PassTime(*last, summed + losses)

    def time_stages(self, layout: DecoderLayout) -> list[PassTime]:
        """Return the time of a micro-batch on each stage."""
        block = self._block_s(layout.share, layout.recompute)
        first, last = self._ends_s(layout.share)
        nothing = PassTime(0.0, 0.0, 0.0)
        passes = []
        for stage in range(layout.pp):
            plain, blocks = self.count_kinds(layout, stage)
            time = nothing.plus(block, blocks)
            if plain:
                time = time.plus(self._block_s(layout.share, layout.recompute, dense=True), plain)
            time = time.plus(first) if stage == 0 else time
            passes.append(time.plus(last) if stage == layout.pp - 1 else time)
        return passes

    def estimate_time(self, layout: DecoderLayout) -> LayoutTime:
        """Return the time of an optimizer step."""
        passes = self.time_stages(layout)
        rounds, stages = layout.micro_batches, layout.pp
        slowest = max(passes, key=lambda each: each.total_s)
        waiting = sum(each.total_s for each in passes) - slowest.total_s
        sent = 0.0
        if stages > 1:
            # Each tensor-parallel rank sends its part, also where all have the whole: Megatron-LM gathers it.
            size = layout.share.tokens // layout.tp * self.shape.width * DTYPE_BYTES[layout.dtype]
            crossings = 2 * layout.virtual_stages * (rounds + stages - 2)
            sent = crossings * self.links.send_s(size, layout.gpus // stages)
        device, exchange = rounds * slowest.device_s, rounds * slowest.exchange_s
        time = LayoutTime(
            compute_s=device + self._copies_s(layout),
            launch_s=max(0.0, rounds * slowest.total_s - device - exchange),
            within_layers_s=exchange,
            bubble_s=waiting / layout.virtual_stages,
            send_s=sent,
            data_s=self._data_s(layout, slowest) + self._tied_s(layout),
            update_s=self._update_s(self._count_updated(layout)),
        )
        return LayoutTime(*(part * self.slowdown for part in time))

    def _data_s(self, layout: DecoderLayout, slowest: PassTime) -> float:
        """Return what is not hidden of sharing weights and summing gradients over data-parallel ranks."""
        passes = layout.micro_batches
        parts = [self._exchange_weights_s(layout, *part) for part in self._list_parts(layout)]
        copies, gathers, scatters = (sum(part[place] for part in parts) for place in range(3))
        seconds, hidden, exposed = copies, slowest.total_s * 2 / 3, 0.0
        if layout.gathers_in_passes:
            seconds += passes * ((1 if layout.keeps_gathered else 2) * gathers + scatters)
            hidden = passes * slowest.total_s
        elif layout.sharding is not Sharding.NONE:
            exposed = 0.0 if layout.overlaps_gather else gathers
            seconds += gathers - exposed + scatters
            hidden = slowest.total_s
        if not layout.overlaps_data:
            return seconds + exposed
        # Blocks of NCCL take their share of the device from the computing that hides them.
        share = collectives().overlapped
        return exposed + max(seconds - hidden * share, seconds * (1 - share))

    def _list_parts(self, layout: DecoderLayout) -> list[tuple[int, int, int]]:
        """Return weights, the ranks that share them, and how far apart these are: experts have fewer."""
        dense, experts, tables = self.count_weights(layout, 0)
        ranks = layout.dp_shard * layout.cp
        if layout.ep == 1:
            return [(dense + experts + tables, ranks, layout.tp)]
        return [
            (dense + tables, ranks, layout.tp),
            (experts, max(1, ranks * layout.tp // layout.ep), layout.ep),
        ]

    def _exchange_weights_s(
        self, layout: DecoderLayout, numbers: int, ranks: int, apart: int
    ) -> tuple[float, float, float]:
        """Return the seconds of summing over copies, and of gathering and scattering weights once."""
        links = self.links
        sums = numbers * DTYPE_BYTES[layout.gradients]
        gathered = numbers * (1 if layout.kernels.float8 is Float8.TENSOR else DTYPE_BYTES[layout.dtype])
        if layout.sharding is Sharding.NONE:
            return links.all_reduce_s(sums, layout.dp_replicate * ranks, apart=apart), 0.0, 0.0
        return (
            links.all_reduce_s(sums // ranks, layout.dp_replicate, apart=layout.tp * layout.shards),
            links.all_gather_s(gathered, ranks, apart=apart),
            links.reduce_scatter_s(sums, ranks, apart=apart),
        )

    def _copies_s(self, layout: DecoderLayout) -> float:
        """Return the seconds of copying gathered weights out of FSDP2's buffers, and gradients into them."""
        if layout.sharding is not Sharding.WEIGHTS or layout.shards == 1 or not layout.copies_shards:
            return 0.0
        numbers = sum(self.count_weights(layout, 0))
        passes = layout.micro_batches if layout.gathers_in_passes else 1
        gathers = 2 if layout.gathers_in_passes and not layout.keeps_gathered else 1
        return passes * (
            gathers * self._copy_s(numbers, layout.dtype, layout.dtype)
            + self._copy_s(numbers, layout.dtype, layout.gradients)
        )

    def _time_copy(self, numbers: int, source: str, target: str) -> float:
        return self.pace.seconds(
            Work(
                op="fsdp::split_with_sizes_copy",
                kind="pointwise",
                dtype=source,
                read_bytes=numbers * DTYPE_BYTES[source],
                write_bytes=numbers * DTYPE_BYTES[target],
                dims=(0, numbers),
            )
        )

    def _tied_s(self, layout: DecoderLayout) -> float:
        """Return the seconds of summing the gradients of tables that several stages have."""
        if layout.pp == 1 or not self.shape.tied:
            return 0.0
        size = self.shape.table_weights // layout.tp * DTYPE_BYTES[layout.gradients]
        if layout.relayed:
            # They are shards by then.
            size //= layout.shards
        return self.links.all_reduce_s(size, 2, apart=layout.gpus // layout.pp * (layout.pp - 1))

    def _count_updated(self, layout: DecoderLayout) -> int:
        dense, experts, tables = self.count_weights(layout, 0)
        return (dense + tables) // layout.shards + experts // layout.expert_shards

    def _time_update(self, numbers: int) -> float:
        """Return the seconds of the norm, clipping, the update in float32 and the copies in 16 bits."""
        dims = (TENSORS_PER_BLOCK, numbers)
        moved = (
            ("aten::_foreach_norm", 4, 0),
            ("aten::_foreach_mul_", 4, 4),
            ("aten::_fused_adamw_", 16, 12),
            ("aten::_foreach_copy_", 6, 6),
        )
        works = [
            Work(
                op=op,
                kind="optimizer",
                dtype="float32",
                read_bytes=numbers * read,
                write_bytes=numbers * written,
                dims=dims,
            )
            for op, read, written in moved
        ]
        return sum(self.pace.seconds(work) for work in works)


def _count_exchanges(share: RankShare, *, recompute: bool) -> tuple[int, int, int]:
    """Return the all-reduces, all-gathers and reduce-scatters of tensor parallelism in a block."""
    if share.tp == 1:
        return 0, 0, 0
    forwards = 1 + recompute
    if not share.sequence_parallel:
        return 2 * forwards + 2, 0, 0
    # Backward, the inputs of the first products are gathered again for the gradients of their weights.
    return 0, 2 * forwards + 4, 2 * forwards + 2
