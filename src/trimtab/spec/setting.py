"""Setting: how to run a job on some devices, with no thought of what it will cost."""

from __future__ import annotations

from enum import StrEnum
from math import prod

from trimtab.spec.base import Noun, below
from trimtab.spec.precision import Dtypes, Precision


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of kept."""

    NONE = "none"
    FULL = "full"
    """Every repeated block keeps its input only."""
    SELECTIVE = "selective"


class Strategy(StrEnum):
    """How the job is spread over devices."""

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


class Allocator(StrEnum):
    """How the caching allocator takes memory from the device."""

    DEFAULT = "default"
    EXPANDABLE = "expandable"
    """expandable_segments:True."""


class Mesh(Noun, frozen=True, kw_only=True):
    """How many ways each axis splits the job; the product is the number of devices."""

    dp_replicate: int = 1
    """Replicas that hold everything and see different data."""
    dp_shard: int = 1
    """Ranks that see different data and each keep a share of weights, gradients and optimizer state."""
    branch: int = 1
    """Groups that each compute one term of the loss on the same data."""
    pp: int = 1
    """Pipeline stages."""
    copies: tuple[int, ...] = ()
    """Ranks of each branch, in the order of the job's branches, where some have more than others: 2 and 1.
    dp_replicate is then the fewest. Empty where all branches have dp_replicate of them."""

    @property
    def size(self) -> int:
        """Devices in all."""
        ranks = sum(self.copies) if self.copies else self.dp_replicate * self.branch
        return prod((ranks, self.dp_shard, self.pp))

    @property
    def data_parallel(self) -> int:
        """Ways the global batch is split; where branches have unlike numbers of ranks, the fewest."""
        return self.dp_replicate * self.dp_shard

    @property
    def branch_ranks(self) -> tuple[int, ...]:
        """Ranks of each branch, in the order of the job's branches."""
        return self.copies or (self.dp_replicate,) * self.branch

    def faults(self) -> list[str]:
        """Degrees start at one; copies are of the branches, and unlike."""
        wrong = below(
            1, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, branch=self.branch, pp=self.pp
        )
        if wrong or not self.copies:
            return wrong
        given = " + ".join(map(str, self.copies))
        if len(self.copies) != self.branch:
            wrong.append(f"copies are {given}, and branch is {self.branch}")
        elif min(self.copies) != self.dp_replicate:
            wrong.append(f"the fewest of copies {given} are not dp_replicate {self.dp_replicate}")
        elif len(set(self.copies)) == 1:
            wrong.append(f"copies {given} are all alike: leave them empty")
        return wrong


class Share(Noun, frozen=True, kw_only=True):
    """What one rank takes of the global batch, where ranks are unlike."""

    samples: int
    """Of every global batch; the rank's gradient counts by this over the global batch."""
    micro_batch: int
    accumulation: int
    """Micro-batches a step; the last may be smaller."""

    def faults(self) -> list[str]:
        """The samples are reached, and with no micro-batch to spare."""
        wrong = below(1, samples=self.samples, micro_batch=self.micro_batch, accumulation=self.accumulation)
        if wrong:
            return wrong
        most = self.micro_batch * self.accumulation
        if not most - self.micro_batch < self.samples <= most:
            product = f"micro_batch {self.micro_batch} x accumulation {self.accumulation}"
            return [f"{product} does not make {self.samples} samples"]
        return []


class Setting(Noun, frozen=True, kw_only=True):
    """Everything a plan decides.

    The global batch is kept exactly: every data-parallel rank runs `accumulation` micro-batches an
    optimizer step, and where the product is larger than the global batch the last ones are smaller.
    """

    derived = ("gpus", "data_parallel")

    strategy: Strategy = Strategy.SINGLE
    mesh: Mesh = Mesh()
    micro_batch: int
    """Samples per forward pass on one data-parallel rank."""
    accumulation: int = 1
    """Micro-batches per optimizer step and rank."""
    global_batch: int
    """Samples per optimizer step over the whole cluster."""
    precision: Precision = Precision.FP32
    recompute: Recompute = Recompute.NONE
    compile: bool = False
    optimizer: OptimizerImplementation = OptimizerImplementation.FUSED
    allocator: Allocator = Allocator.DEFAULT
    workers: int = 0
    """Data loader processes per rank."""
    sync_batchnorm: bool = False
    """Whether BatchNorm layers compute their statistics over a micro-batch of all ranks together."""
    shares: tuple[Share, ...] = ()
    """One a rank, in the order of ranks, where unlike devices take unlike shares; micro_batch and
    accumulation are then the largest among them. Empty where all ranks are alike."""

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.mesh.size

    @property
    def data_parallel(self) -> int:
        """Ways the global batch is split."""
        return self.mesh.data_parallel

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of a step."""
        return self.precision.dtypes

    def faults(self) -> list[str]:
        """The global batch is reached, and with no micro-batch to spare."""
        wrong = below(
            1,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            global_batch=self.global_batch,
        )
        wrong += below(0, workers=self.workers)
        if wrong:
            return wrong
        if self.shares:
            return self._unlike()
        per_round = self.micro_batch * self.data_parallel
        if not per_round * (self.accumulation - 1) < self.global_batch <= per_round * self.accumulation:
            product = f"micro_batch {self.micro_batch} x accumulation {self.accumulation}"
            product += f" x data_parallel {self.data_parallel}"
            return [f"{product} does not make global_batch {self.global_batch}"]
        if self.strategy is Strategy.SINGLE and self.gpus != 1:
            return [f"strategy single runs on one device, and the mesh has {self.gpus}"]
        return []

    def _unlike(self) -> list[str]:
        """Shares add up to the global batch, one for each data-parallel rank."""
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
