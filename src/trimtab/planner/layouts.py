"""Rank the layouts of a decoder on a cluster: every legal mesh, by formulas, the fastest first.

All combinations of tensor, context, expert and pipeline parallel degrees with the micro-batches and ways of
recomputing are looked at. A combination is left out by the first rule that forbids it, then by its memory.
Times of a block are shared by all meshes with the same share of a layer, so that 16,384 GPUs take seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from trimtab.planner.degrees import list_divisors
from trimtab.predict.decoder import BlockKernels
from trimtab.predict.layout import DecoderLayout, LayoutEstimator, LayoutMemory, LayoutTime, Sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trimtab.spec import DecoderShape

MOST_MICRO_BATCH = 64
MOST_VIRTUAL = 8
ENDS = 2
"""Stages that may have a layer less: the first and the last."""
ALIKE = 1.03
"""Step times within this factor count as equal: predictions are less exact."""
DEGREES = ("tp", "cp", "pp", "ep", "dp_shard", "dp_replicate", "virtual_stages", "micro_batch")
"""Degrees that can be pinned."""
TRAINERS = {
    "torchtitan": Sharding.WEIGHTS,
    "megatron": Sharding.OPTIMIZER,
    "trimtab": Sharding.WEIGHTS,
}
"""Whose way of sharding data-parallel ranks have."""
OWN = "trimtab"
EAGER_KERNELS = BlockKernels(fused=False, fused_loss=False, stops_early=True)
"""Of steps that trimtab does not compile: those of split layers, sequences, experts and stages."""
RING_KERNELS = replace(EAGER_KERNELS, attention="aten::_scaled_dot_product_flash_attention")
"""Parts of a ring are put together by the scales that this attention returns."""


class RankedLayout(NamedTuple):
    """A layout with its estimate."""

    layout: DecoderLayout
    time: LayoutTime
    memory: LayoutMemory


@dataclass(frozen=True, kw_only=True)
class LayoutQuestion:
    """What is asked for: a model, a batch, devices and limits."""

    shape: DecoderShape
    sequence: int
    global_batch: int
    gpus: int
    per_node: int
    trainer: str
    budget_bytes: int
    """Memory that tensors may take on each device."""
    pins: Mapping[str, int]
    refuse: Callable[[DecoderLayout], str] = lambda _: ""
    """Returns why the trainer does not run a layout; empty if it does."""
    count_nccl_bytes: Callable[[DecoderLayout], int] = lambda _: 0
    """Returns how much of the budget NCCL takes for a layout."""

    def allows(self, **degrees: int) -> bool:
        """Return whether the pins allow these degrees."""
        return all(self.pins.get(name, value) == value for name, value in degrees.items())


@dataclass(frozen=True, kw_only=True)
class StoredRanking:
    """What a search found, with only the fastest layout of each mesh."""

    found: list[RankedLayout]
    fitting: int
    least: RankedLayout | None
    ruled_out: dict[str, int]
    examined: int


@dataclass
class LayoutSearch:
    """A search and what it found."""

    question: LayoutQuestion
    estimator: LayoutEstimator
    examined: int = 0

    def __post_init__(self) -> None:
        """Begin with nothing found."""
        self.ruled_out: Counter[str] = Counter()
        self.found: list[RankedLayout] = []
        self.least: RankedLayout | None = None
        self.fitting = 0

    def run(self) -> LayoutSearch:
        """Estimate every legal layout that fits; sort the rest away by reason."""
        for layout in self._list_layouts():
            self.examined += 1
            if reason := self.question.refuse(layout):
                self.ruled_out[reason] += 1
                continue
            memory = self.estimator.estimate_memory(layout)
            if memory.total > self.question.budget_bytes - self.question.count_nccl_bytes(layout):
                self.ruled_out["does not fit in memory"] += 1
                if self.least is None or memory.total < self.least.memory.total:
                    self.least = RankedLayout(layout, self.estimator.estimate_time(layout), memory)
                continue
            self.found.append(RankedLayout(layout, self.estimator.estimate_time(layout), memory))
        self.found.sort(key=lambda each: (each.time.total_s, count_splits(each.layout)))
        self.fitting = len(self.found)
        return self

    def store(self) -> StoredRanking:
        """Return what was found, for a cache."""
        return StoredRanking(
            found=self._list_fastest("tp", "cp", "pp", "ep", "dp_shard", "dp_replicate"),
            fitting=self.fitting,
            least=self.least,
            ruled_out=dict(self.ruled_out),
            examined=self.examined,
        )

    def restore(self, stored: StoredRanking) -> LayoutSearch:
        """Take what an equal search has found."""
        self.found, self.least, self.fitting = stored.found, stored.least, stored.fitting
        self.ruled_out, self.examined = Counter(stored.ruled_out), stored.examined
        return self

    def best_by_mesh(self) -> list[RankedLayout]:
        """Return the fastest layout of each combination of tp, cp, pp and ep.

        First comes the one that splits the model in the fewest ways, of all that are as fast as predictions
        can tell. The others follow, the fastest first.
        """
        rows = self._list_fastest("tp", "cp", "pp", "ep")
        alike = [each for each in rows if each.time.total_s <= ALIKE * rows[0].time.total_s]
        chosen = min(alike, key=lambda each: (count_splits(each.layout), each.time.total_s))
        return [chosen, *(each for each in rows if each is not chosen)]

    def _list_fastest(self, *degrees: str) -> list[RankedLayout]:
        """Return the fastest layout of each combination of some degrees, the fastest first."""
        best: dict[tuple[int, ...], RankedLayout] = {}
        for each in self.found:
            best.setdefault(tuple(getattr(each.layout, name) for name in degrees), each)
        return list(best.values())

    def best_data_parallel(self) -> RankedLayout | None:
        """Return the fastest layout without tensor, context, pipeline and expert parallelism."""
        return next((each for each in self.found if count_splits(each.layout) == 0), None)

    def _list_layouts(self) -> Iterator[DecoderLayout]:
        question = self.question
        for tp, cp, pp in self._list_model_degrees():
            dp = question.gpus // (tp * cp * pp)
            if question.global_batch % dp:
                self._rule_out("the global batch does not divide by the data-parallel ranks")
                continue
            base = DecoderLayout(
                micro_batch=1,
                micro_batches=question.global_batch // dp,
                sequence=question.sequence,
                tp=tp,
                cp=cp,
                pp=pp,
                dp_shard=dp,
                sharding=TRAINERS[question.trainer],
            )
            for ep in self._list_expert_degrees(dp * cp):
                for shards in self._list_shards(dp, tp * cp, ep):
                    spread = replace(base, ep=ep, dp_shard=shards, dp_replicate=dp // shards)
                    if question.trainer == OWN and count_splits(spread):
                        kernels = RING_KERNELS if cp > 1 else EAGER_KERNELS
                        spread = replace(spread, relayed=pp > 1, kernels=kernels)
                    yield from self._list_batches(spread)

    def _list_model_degrees(self) -> Iterator[tuple[int, int, int]]:
        """Yield the legal degrees that split a model over ranks with the same samples."""
        question, shape = self.question, self.question.shape
        for tp in list_divisors(question.gpus):
            if tp > question.per_node:
                break
            if not question.allows(tp=tp):
                continue
            if reason := _why_not_tp(shape, question.sequence, tp):
                self._rule_out(reason)
                continue
            for cp in self._list_context_degrees(tp):
                for pp in list_divisors(question.gpus // (tp * cp)):
                    if pp > shape.layers:
                        self._rule_out("fewer layers than stages")
                    elif question.allows(pp=pp):
                        yield tp, cp, pp

    def _list_context_degrees(self, tp: int) -> Iterator[int]:
        question = self.question
        for cp in list_divisors(question.gpus // tp):
            if cp > 1 and question.sequence % (2 * cp * tp):
                self._rule_out("the sequence does not divide by 2 x cp x tp")
            elif question.allows(cp=cp):
                yield cp

    def _list_expert_degrees(self, ranks: int) -> Iterator[int]:
        experts = self.question.shape.experts
        for ep in list_divisors(ranks) if experts else [1]:
            if ep > experts > 0 or (ep > 1 and experts % ep):
                self._rule_out("the experts do not divide by ep")
            elif self.question.allows(ep=ep):
                yield ep

    def _list_shards(self, dp: int, inside: int, ep: int) -> Iterator[int]:
        """Yield over how many data-parallel ranks weights are sharded: all, or those of one or few nodes."""
        node = max(1, self.question.per_node // inside)
        sizes = {dp, *(size for size in (node, 2 * node, 4 * node, 8 * node) if size < dp and dp % size == 0)}
        for shards in sorted(sizes):
            if ep > 1 and (shards * inside) % ep:
                self._rule_out("ep does not divide the ranks that share weights")
            elif self.question.allows(dp_shard=shards, dp_replicate=dp // shards):
                yield shards

    def _list_batches(self, spread: DecoderLayout) -> Iterator[DecoderLayout]:
        own = spread.micro_batches
        micro_batch = 1
        while micro_batch <= min(own, MOST_MICRO_BATCH):
            if own % micro_batch == 0 and self.question.allows(micro_batch=micro_batch):
                batch = replace(spread, micro_batch=micro_batch, micro_batches=own // micro_batch)
                for virtual in self._list_virtual(batch):
                    for full in (False, True):
                        yield replace(batch, virtual_stages=virtual, full_recompute=full)
            micro_batch *= 2

    def _list_virtual(self, layout: DecoderLayout) -> Iterator[int]:
        """Yield into how many parts the layers of a stage may be cut.

        The first and the last stage may have a layer less than the others, for the embedding and the head.
        """
        layers, pp = self.question.shape.layers, layout.pp
        most = -(-layers // pp)
        is_even = pp > 1 and pp * most - layers <= ENDS and layout.micro_batches % pp == 0
        for virtual in range(1, MOST_VIRTUAL + 1):
            is_legal = virtual == 1 or (is_even and most % virtual == 0)
            if is_legal and self.question.allows(virtual_stages=virtual):
                yield virtual

    def _rule_out(self, reason: str) -> None:
        self.examined += 1
        self.ruled_out[reason] += 1


def _why_not_tp(shape: DecoderShape, sequence: int, tp: int) -> str:
    """Return why a model cannot be split over so many tensor-parallel ranks; empty where it can."""
    rules = {
        "the attention heads do not divide by tp": shape.heads,
        "the key/value heads do not divide by tp": shape.key_value_heads,
        "the feed-forward width does not divide by tp": shape.feed_forward,
        "the sequence does not divide by tp": sequence,
    }
    return next((reason for reason, size in rules.items() if size % tp), "")


def count_splits(layout: DecoderLayout) -> int:
    """Return how many kinds of parallelism a layout has beside that over data."""
    return sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp, layout.ep))
