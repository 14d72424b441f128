"""Setting: how to run a job on some devices, with no thought of what it will cost."""

from __future__ import annotations

from enum import StrEnum
from math import prod

from trimtab.spec.base import Noun, below


class Precision(StrEnum):
    """Which dtype computes and which one the weights are kept in."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    """bf16 autocast, fp32 weights."""
    FP16 = "fp16"
    """fp16 autocast with loss scaling, fp32 weights."""
    BF16_TRUE = "bf16-true"
    """bf16 weights."""


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

    @property
    def size(self) -> int:
        """Devices in all."""
        return prod((self.dp_replicate, self.dp_shard, self.branch, self.pp))

    @property
    def data_parallel(self) -> int:
        """Ways the global batch is split."""
        return self.dp_replicate * self.dp_shard

    def faults(self) -> list[str]:
        """Degrees start at one."""
        return below(
            1, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, branch=self.branch, pp=self.pp
        )


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

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.mesh.size

    @property
    def data_parallel(self) -> int:
        """Ways the global batch is split."""
        return self.mesh.data_parallel

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
        per_round = self.micro_batch * self.data_parallel
        if not per_round * (self.accumulation - 1) < self.global_batch <= per_round * self.accumulation:
            product = f"micro_batch {self.micro_batch} x accumulation {self.accumulation}"
            product += f" x data_parallel {self.data_parallel}"
            return [f"{product} does not make global_batch {self.global_batch}"]
        if self.strategy is Strategy.SINGLE and self.gpus != 1:
            return [f"strategy single runs on one device, and the mesh has {self.gpus}"]
        return []
