"""Setting: the configuration that a plan chooses, such as strategy, mesh, batch split and precision."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Self

from trimtab.spec.base import Noun, check_minimum
from trimtab.spec.base_format import BaseFormat
from trimtab.spec.optimizer_rule import OptimizerRule
from trimtab.spec.precision import Dtypes, Precision
from trimtab.spec.schedule import Schedule


class RecomputeWay(Noun, frozen=True, kw_only=True):
    """Which blocks are recomputed, and what of them is stored."""

    every: int = 0
    """Of so many neighbouring blocks, the first is recomputed; 1: all of them; 0: none."""
    but: int = 0
    """Of so many neighbouring blocks, the last is not recomputed; 0: none is left out."""
    keeps_products: bool = False
    """Whether results of matrix products and of attention are stored."""
    budget: float | None = None
    """Share of the activations that the compiler may store, between those of full recomputation (0) and of
    none (1); None: the compiler is not asked. Only compiled code has a budget."""

    def faults(self) -> list[str]:
        """Check that the number of blocks is not negative and the budget is a share."""
        wrong = check_minimum(0, every=self.every, but=self.but)
        if self.budget is not None and not 0 < self.budget < 1:
            wrong.append(f"budget is {self.budget}, which is not between 0 and 1")
        return wrong

    @property
    def is_partial(self) -> bool:
        """Whether some blocks are recomputed and others are not."""
        return self.every > 1 or self.but > 0

    @property
    def share(self) -> float:
        """Share of the blocks that is recomputed.

        >>> RecomputeWay(every=4).share, RecomputeWay(every=1, but=4).share
        (0.25, 0.75)
        """
        return (1 / self.every if self.every else 0.0) - (1 / self.but if self.but else 0.0)

    def has_block(self, number: int) -> bool:
        """Whether a block is recomputed, by its number from 0.

        >>> [RecomputeWay(every=1, but=3).has_block(number) for number in range(6)]
        [True, True, False, True, True, False]
        """
        if not self.every or number % self.every:
            return False
        return not self.but or number % self.but != self.but - 1


class Recompute(StrEnum):
    """Which activations are recomputed in the backward pass instead of stored. Each word is one row."""

    _value_: str
    way: RecomputeWay

    def __new__(cls, name: str, way: RecomputeWay | None = None) -> Self:
        """Make a member from its row; its value is the name alone, as in JSON and on the command line."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.way = way or RecomputeWay()
        return member

    NONE = "none", RecomputeWay()
    FULL = "full", RecomputeWay(every=1)
    """Every repeated block stores only its input."""
    SELECTIVE = "selective", RecomputeWay(every=1, keeps_products=True)
    """Every repeated block stores its matrix products and attention too."""
    EVERY_4 = "every-4", RecomputeWay(every=4)
    """The first of every four blocks stores only its input."""
    EVERY_3 = "every-3", RecomputeWay(every=3)
    EVERY_2 = "every-2", RecomputeWay(every=2)
    ALL_BUT_3 = "all-but-3", RecomputeWay(every=1, but=3)
    """All but the last of every three blocks store only their input."""
    ALL_BUT_4 = "all-but-4", RecomputeWay(every=1, but=4)
    BUDGET_9 = "budget-0.9", RecomputeWay(budget=0.9)
    """The compiler stores 0.9 of the activations that it would store, and recomputes what is cheapest."""
    BUDGET_8 = "budget-0.8", RecomputeWay(budget=0.8)
    BUDGET_7 = "budget-0.7", RecomputeWay(budget=0.7)
    BUDGET_6 = "budget-0.6", RecomputeWay(budget=0.6)
    BUDGET_5 = "budget-0.5", RecomputeWay(budget=0.5)
    BUDGET_4 = "budget-0.4", RecomputeWay(budget=0.4)
    BUDGET_3 = "budget-0.3", RecomputeWay(budget=0.3)
    BUDGET_2 = "budget-0.2", RecomputeWay(budget=0.2)
    BUDGET_1 = "budget-0.1", RecomputeWay(budget=0.1)


class Strategy(StrEnum):
    """How the job is distributed over devices."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"
    BRANCH = "branch"
    HYBRID = "hybrid"
    PIPELINE = "pipeline"


class OptimizerImplementation(StrEnum):
    """How the optimizer step runs over the parameters."""

    FUSED = "fused"
    FOREACH = "foreach"
    PLAIN = "plain"


def read_optimizer(text: str) -> dict[str, str]:
    """Return the fields of a Setting for an implementation or an optimizer by name; {} if it is neither.

    >>> read_optimizer("foreach")
    {'optimizer': <OptimizerImplementation.FOREACH: 'foreach'>}
    >>> read_optimizer("sgd"), read_optimizer("best")
    ({'optimizer_rule': <OptimizerRule.SGD: 'sgd'>}, {})
    """
    if text in {word.value for word in OptimizerImplementation}:
        return {"optimizer": OptimizerImplementation(text)}
    if text in {word.value for word in OptimizerRule}:
        return {"optimizer_rule": OptimizerRule(text)}
    return {}


class Allocator(StrEnum):
    """Mode of PyTorch's caching allocator."""

    DEFAULT = "default"
    EXPANDABLE = "expandable"
    """expandable_segments:True."""


class ContextMethod(StrEnum):
    """How ranks that split sequences compute attention."""

    RING = "ring"
    """Keys and values go round the ranks; queries stay."""
    ALL_TO_ALL = "all-to-all"
    """Ranks exchange positions for heads before attention, and back after it."""


class LossForm(StrEnum):
    """How the loss of a language model is computed from its last hidden states."""

    WHOLE = "whole"
    """As the job computes it."""
    CHUNKED = "chunked"
    """Logits of a part of the tokens at a time, so that all of them never exist together."""
    LIGER = "liger"
    """The same by the kernels of Liger: gradients take the memory of the logits."""


class Offload(StrEnum):
    """What is in the memory of the host instead of the device, while it is not used."""

    PARAMS = "params"
    """Weights and their gradients."""
    OPTIMIZER = "optimizer"
    """States of the optimizer, which then runs on the CPU."""
    ACTIVATIONS = "activations"
    """Activations between the forward and the backward pass."""


def read_offload(text: str) -> tuple[Offload, ...]:
    """Return the members of Offload in a comma-separated list, in their order; none is an empty list.

    >>> read_offload("activations, params")
    (<Offload.PARAMS: 'params'>, <Offload.ACTIVATIONS: 'activations'>)
    >>> read_offload("none")
    ()
    """
    words = {word for part in text.split(",") if (word := part.strip().lower()) not in {"", "none"}}
    known = {member.value for member in Offload}
    if words - known:
        raise ValueError(f"{min(words - known)} is none of none, {', '.join(Offload)}")
    return tuple(member for member in Offload if member.value in words)


class Mesh(Noun, frozen=True, kw_only=True, cache_hash=True):
    """Size of each axis of the device mesh; the product is the number of devices."""

    dp_replicate: int = 1
    """Replicas with all weights and different data."""
    dp_shard: int = 1
    """Ranks with different data, each with a shard of weights, gradients and optimizer state."""
    branch: int = 1
    """Groups that each compute one term of the loss on the same data."""
    cp: int = 1
    """Ranks that split every sequence between them (context parallelism); they see the same samples."""
    tp: int = 1
    """Ranks that split every layer between them (tensor parallelism); they see the same data."""
    ep: int = 1
    """Ranks of dp_shard x cp x tp that hold different experts (expert parallelism). They send each other
    tokens, and are no devices of their own."""
    pp: int = 1
    """Pipeline stages."""
    copies: tuple[int, ...] = ()
    """Ranks of each branch, in the order of the job's branches, if some have more than others: 2 and 1.
    dp_replicate is then the smallest. Empty if all branches have dp_replicate ranks."""

    @property
    def size(self) -> int:
        """Total number of devices."""
        ranks = sum(self.copies) if self.copies else self.dp_replicate * self.branch
        return prod((ranks, self.dp_shard, self.cp, self.tp, self.pp))

    @property
    def data_parallel(self) -> int:
        """Number of ranks that split the global batch; if branches differ in ranks, the smallest number."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Number of shards of every weight under fsdp: ranks that split sequences hold different shards."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share the experts of a layer: each has some of them, or shards of them."""
        return self.shards * self.tp

    @property
    def branch_ranks(self) -> tuple[int, ...]:
        """Number of ranks of each branch, in the order of the job's branches."""
        return self.copies or (self.dp_replicate,) * self.branch

    def faults(self) -> list[str]:
        """Check that sizes are at least 1, and that copies name every branch and differ."""
        sizes = {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "branch": self.branch,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
            "pp": self.pp,
        }
        wrong = check_minimum(1, **sizes) if min(sizes.values()) < 1 else []
        if not wrong and self.expert_ranks % self.ep:
            wrong.append(f"ep {self.ep} does not divide dp_shard x cp x tp, which is {self.expert_ranks}")
        if wrong or not self.copies:
            return wrong
        copies = " + ".join(map(str, self.copies))
        if len(self.copies) != self.branch:
            wrong.append(f"copies are {copies}, and branch is {self.branch}")
        elif min(self.copies) != self.dp_replicate:
            wrong.append(f"the fewest of copies {copies} are not dp_replicate {self.dp_replicate}")
        elif len(set(self.copies)) == 1:
            wrong.append(f"copies {copies} are all alike: leave them empty")
        return wrong


class Share(Noun, frozen=True, kw_only=True):
    """Part of the global batch that one rank takes, if ranks differ."""

    samples: int
    """Samples of every global batch; the weight of the rank's gradient is this over the global batch."""
    micro_batch: int
    accumulation: int
    """Micro-batches per step; the last may be smaller."""

    def faults(self) -> list[str]:
        """Check that the micro-batches cover the samples, with none to spare."""
        wrong = check_minimum(
            1, samples=self.samples, micro_batch=self.micro_batch, accumulation=self.accumulation
        )
        if wrong:
            return wrong
        capacity = self.micro_batch * self.accumulation
        if not capacity - self.micro_batch < self.samples <= capacity:
            product = f"micro_batch {self.micro_batch} x accumulation {self.accumulation}"
            return [f"{product} does not make {self.samples} samples"]
        return []


class Setting(Noun, frozen=True, kw_only=True, cache_hash=True):
    """Everything that a plan decides.

    The global batch is exact: every data-parallel rank runs `accumulation` micro-batches per optimizer step,
    and if the product is larger than the global batch, the last micro-batches are smaller.
    """

    derived = ("gpus", "data_parallel")

    strategy: Strategy = Strategy.SINGLE
    mesh: Mesh = Mesh()
    micro_batch: int
    """Samples per forward pass on one data-parallel rank."""
    accumulation: int = 1
    """Gradient accumulation: micro-batches per optimizer step and rank."""
    global_batch: int
    """Samples per optimizer step over the whole cluster."""
    precision: Precision = Precision.FP32
    base: BaseFormat = BaseFormat.NONE
    """Storage of frozen linear layers."""
    recompute: Recompute = Recompute.NONE
    compile: bool = False
    loss: LossForm = LossForm.WHOLE
    offload: tuple[Offload, ...] = ()
    """What is in the memory of the host, in the order of Offload."""
    optimizer: OptimizerImplementation = OptimizerImplementation.FUSED
    optimizer_rule: OptimizerRule = OptimizerRule.JOB
    """Which optimizer, if not the job's own."""
    optimizer_in_backward: bool = False
    """Whether each weight is updated in the backward pass, as soon as its gradient is complete."""
    allocator: Allocator = Allocator.DEFAULT
    workers: int = 0
    """Data loader processes per rank."""
    cp_method: ContextMethod = ContextMethod.RING
    """How ranks that split sequences compute attention; it matters only with a `cp` above 1."""
    expert_imbalance: float = 1.0
    """Tokens of the rank with the most over those of the mean rank, with an `ep` above 1. Estimates assume
    it; training has no use for it."""
    sync_batchnorm: bool = False
    """Whether BatchNorm layers compute statistics over a micro-batch of all ranks together."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Order of forward and backward passes in a pipeline; without a pipeline it has no effect."""
    virtual_stages: int = 1
    """Pipeline stages on each rank of a pipeline."""
    stage_layers: tuple[int, ...] = ()
    """Blocks of each pipeline stage, in order; empty: balanced by the time that the blocks take."""
    shares: tuple[Share, ...] = ()
    """Share of each rank, in the order of ranks, if devices differ; micro_batch and accumulation are then the
    largest of them. Empty if all ranks are equal."""

    @property
    def gpus(self) -> int:
        """Total number of devices."""
        return self.mesh.size

    @property
    def data_parallel(self) -> int:
        """Number of ranks that split the global batch."""
        return self.mesh.data_parallel

    @property
    def dtypes(self) -> Dtypes:
        """Return the dtypes of a step."""
        return self.precision.dtypes

    def faults(self) -> list[str]:
        """Check that the micro-batches cover the global batch, with none to spare."""
        least = min(self.micro_batch, self.accumulation, self.global_batch, self.virtual_stages)
        wrong = self._check_counts() if least < 1 or self.workers < 0 else []
        wrong += self.schedule.check_virtual_stages(self.virtual_stages)
        if self.expert_imbalance < 1:
            wrong.append(f"expert_imbalance is {self.expert_imbalance:g}, which is below 1")
        if wrong:
            return wrong
        if self.shares:
            return self._check_shares()
        per_round = self.micro_batch * self.data_parallel
        if not per_round * (self.accumulation - 1) < self.global_batch <= per_round * self.accumulation:
            product = f"micro_batch {self.micro_batch} x accumulation {self.accumulation}"
            product += f" x data_parallel {self.data_parallel}"
            return [f"{product} does not make global_batch {self.global_batch}"]
        if self.strategy is Strategy.SINGLE and self.gpus != 1:
            return [f"strategy single runs on one device, and the mesh has {self.gpus}"]
        return []

    def _check_counts(self) -> list[str]:
        """Return a sentence for each count that is too small."""
        wrong = check_minimum(
            1,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            global_batch=self.global_batch,
        )
        return (
            wrong
            + check_minimum(0, workers=self.workers)
            + check_minimum(1, virtual_stages=self.virtual_stages)
        )

    def _check_shares(self) -> list[str]:
        """Check that there is a share for each data-parallel rank and that shares sum to the global batch."""
        wrong = []
        if len(self.shares) != self.data_parallel:
            wrong.append(f"there are {len(self.shares)} shares for {self.data_parallel} data-parallel ranks")
        total = sum(share.samples for share in self.shares)
        if total != self.global_batch:
            wrong.append(f"the shares add up to {total}, and global_batch is {self.global_batch}")
        largest = (
            max(share.micro_batch for share in self.shares),
            max(share.accumulation for share in self.shares),
        )
        if largest != (self.micro_batch, self.accumulation):
            wrong.append("micro_batch and accumulation are not the largest of the shares")
        return wrong
