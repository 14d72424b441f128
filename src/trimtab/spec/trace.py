"""Trace: every allocation and free of a job's first steps with its purpose, and every operation of a step."""

from __future__ import annotations

import msgspec

from trimtab.spec.base import Noun, check_minimum

PARTS = ("weights", "gradients", "optimizer", "activations", "inputs", "workspace", "communication")
"""Purposes of memory, in the order of Footprint. The CUDA context is not one: torch does not allocate it."""
KINDS = (
    "matrix",
    "attention",
    "convolution",
    "recurrent",
    "pointwise",
    "reduction",
    "gather",
    "optimizer",
    "collective",
    "transfer",
    "wait",
    "view",
    "call",
)
"""Kinds of operations for the time model. A transfer copies between device and host beside the computation.
In a wait, the host waits for a value; a view and the call of a module cost only host time."""
CACHED_ROW_BYTES = 2**16
"""Largest row in bytes that is still in a cache when a kernel reads it again."""
ENTER, LEAVE = "enter", "leave"
"""Names of the calls at the start and end of the model: torch.compile compiles what is between them."""
GRAPH_ENTER, GRAPH_LEAVE = "enter graph", "leave graph"
"""Names of the calls at the start and end of a compiled graph, in a trace of partly compiled code."""
SEARCH = "cudnn_search"
"""Name of the allocations in which cuDNN tries kernels (`torch.backends.cudnn.benchmark`)."""
EMPTY_CACHE = "empty_cache"
"""Name of the allocations of 0 bytes that mark when torch empties its allocator's cache."""
WRAPPED, SHARDED = "DTensor", "FSDP"
"""Names of calls whose first dimension is a number of tensors: the DTensors of an operation, and the
parameters that fully_shard gathers or whose gradients it reduces."""
UPDATE_CALL = "optimizer step"
"""Name of the calls of an optimizer in the backward pass, for one weight each."""
GRADIENT = "gradient"
"""Name of the allocations of 0 bytes that mark when a parameter's gradient is complete."""
STATISTICS = "sync_batchnorm"
"""Prefix of the names of collectives of synchronised BatchNorm layers."""
CONTEXT = "context_parallel"
"""Prefix of the names of collectives of attention over sequences that ranks split; the method follows."""
EXPERTS = "expert_parallel"
"""Prefix of the names of collectives between tokens and experts on other ranks; what they carry follows."""
TENSOR_PARALLEL_OPS = ("_c10d_functional::", "_dtensor::")
"""Prefixes of the names of collectives of layers that ranks split between them; those of FSDP have others."""
ZERO_GRADIENTS = "aten::_foreach_zero_"
"""Name of the operation that sets the buckets of gradients to zero, once before the first micro-batch."""
BATCH_NORMS = {
    f"aten::{library}_batch_norm{direction}"
    for library in ("native", "cudnn")
    for direction in ("", "_backward")
}
DRAWN_STEP = "drawn"
"""Begins the marks of more steps after the first, where sizes follow from random numbers."""
GROUP_NORM = "aten::native_group_norm"
LAYER_NORM_BACKWARD = "aten::native_layer_norm_backward"
INDEX_ADD = "aten::index_add"
CHANNELS_LAST = 1
"""Layout of a convolution, in its dims."""
UPSAMPLING = {f"aten::upsample_{form}" for form in ("bilinear2d", "bicubic2d", "linear1d")}
THREAD_UPSAMPLING_BACKWARD = {f"aten::upsample_{form}_backward" for form in ("bicubic2d", "linear1d")}
"""Gradients of upsampling in which a thread has all channels of a pixel, as in the forward pass."""
PERMUTED, BROADCAST, PROMOTED, SLICED = 1, 2, 4, 8
"""Bits for what keeps an operation from reading and writing memory sequentially."""


class Work(Noun, frozen=True, kw_only=True, cache_hash=True):
    """One operation on the device: FLOPs and bytes moved, independent of the device's speed."""

    op: str
    """torch's name, such as aten::mm; for a fused kernel, the fused operations."""
    kind: str
    """One of KINDS."""
    dtype: str
    """dtype of the computation, as torch names it: bfloat16, float32."""
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    dims: tuple[int, ...] = ()
    """matrix: batch, m, n, k, alignment in bytes; convolution: groups, spots, n, k, layout, kernel area;
    attention: batch, heads, queries, keys, head size, causal, masked, dropout; recurrent: layers, steps,
    batch, width; optimizer: tensors, numbers; others: obstacles, last dimension, and for some what they wait
    for: channels, groups, pixels, or numbers for one place and then pixels. See trimtab.trace.op_cost. A
    transfer has none: it reads bytes of the device on the way to the host, and writes them on the way in."""
    kernels: int = 1
    """Kernel launches; for a recurrent layer, its cells: steps x layers x directions."""
    fresh: bool = False
    """Whether its shape depends on computed values, and so differs in every step."""
    untracked: bool = False
    """Whether autograd records no node for it in the forward pass: no input needs a gradient."""
    additions: int = 0
    """Numbers that index_add or a compiled kernel adds to others in memory, one by one (atomic additions)."""
    waiting_additions: int = 0
    """Of a compiled kernel: additions to the same number, which wait for each other; a mean over numbers."""
    instructions: int = 0
    """Of a kernel that a compiler generates: instructions of single threads, without reads and writes."""

    def faults(self) -> list[str]:
        """Check that counts are not negative and the kind is known."""
        wrong: list[str] = []
        if min(self.flops, self.read_bytes, self.write_bytes, self.kernels) < 0:
            wrong = check_minimum(
                0,
                flops=self.flops,
                read_bytes=self.read_bytes,
                write_bytes=self.write_bytes,
                kernels=self.kernels,
            )
        return wrong if self.kind in KINDS else [*wrong, f"kind is {self.kind!r}, none of {', '.join(KINDS)}"]


class SizeCause(Noun, frozen=True, kw_only=True):
    """Formula for the size of a workspace that is not linear in the micro-batch."""

    rule: str
    """Name of a formula in trimtab.trace.workspace_formulas."""
    numbers: tuple[int, ...]
    """Arguments of the formula: shapes, which are linear in the micro-batch."""
    word: str = ""
    """Precision argument, if the formula needs one."""
    beside: int = 0
    """Bytes to add to the result."""


class Trace(Noun, frozen=True, kw_only=True):
    """Requests of a step to the caching allocator, in order. Columns have one entry per allocation."""

    order: tuple[int, ...]
    """An allocation is its number, from 0; a free is the bitwise inverse of the number (~number)."""
    sizes: tuple[int, ...]
    """Requested bytes."""
    streams: tuple[int, ...]
    parts: tuple[int, ...]
    """Index into PARTS."""
    modules: tuple[int, ...]
    """Index into module_names."""
    ops: tuple[int, ...]
    """Index into op_names."""
    module_names: tuple[str, ...]
    op_names: tuple[str, ...]
    marks: dict[str, int]
    """Position in `order` where a phase begins: build, batch, step0, step1, step2, end; between
    step0 and step1 those of DRAWN_STEP."""
    causes: tuple[SizeCause, ...] = ()
    """Distinct formulas of sizes, each once."""
    caused: tuple[tuple[int, int], ...] = ()
    """Allocations whose size has a formula, each with its index into `causes`."""
    parameters: int = 0
    """Number of parameters (elements)."""
    trainable: int = 0
    """Number of trainable parameters (elements)."""
    works: tuple[Work, ...] = ()
    """Distinct operations of a step, each once."""
    sequence: tuple[int, ...] = ()
    """Index into `works` of each operation of the last step, in order."""
    phases: dict[str, int] = {}
    """Position in `sequence` where forward, backward and optimizer begin; weights, where a schedule computes
    weight gradients after the rest of the backward pass."""
    recomputed_flops: int = 0
    """FLOPs added by recomputation."""
    recomputed: tuple[str, ...] = ()
    part: int = 0
    """Number of the branch or pipeline stage, if ranks differ."""
    rank: str = ""
    """The same in words: branch llama, or stage 1 of 4; empty if all ranks are equal."""
    beside: tuple[Trace, ...] = ()
    """Traces of the other kinds of ranks: every other branch; for a pipeline the second and the last rank,
    because those between follow from the second."""
    kept_bytes: int = 0
    """Bytes that a forward pass through all stages of a pipeline rank stores for its backward pass."""
    handed_bytes: int = 0
    """Bytes that a pipeline stage sends to the next one per micro-batch."""
    stage_layers: tuple[int, ...] = ()
    """Blocks of each stage of a pipeline, on all ranks; empty if it is no pipeline."""
    block_work: tuple[float, ...] = ()
    """Shares of the time of a micro-batch in a pipeline: before the blocks, of each block, and after them."""
    outside: int = 0
    """Parameters (elements) that a pipeline rank holds outside of the blocks, before they are sharded."""
    shared: int = 0
    """Trainable parameters (elements) of a pipeline rank that other stages hold too, as a tied embedding."""
    shared_stages: int = 0
    """Number of stages that hold these, at most."""
    pinned_sizes: tuple[int, ...] = ()
    """Bytes of each offloaded weight and gradient in pinned memory of the host, in the order of weights."""
    host_state_bytes: int = 0
    """Bytes of offloaded optimizer states, which are not pinned."""
    checkpoint_bytes: int = 0
    """Bytes of weights and optimizer states of this rank, which a checkpoint copies; 0 if nothing is
    offloaded."""
    host_sizes: tuple[int, ...] = ()
    """Bytes of each block of pinned memory on the host when most of it is in use, in order of request."""
    no_compile_gain: str = ""
    """For an eager trace: why torch.compile would not help, or fails; empty if it may help."""
    assumptions: tuple[str, ...] = ()

    def to_json(self, *, indent: int = 0) -> str:
        """Return the trace as JSON text; it has no derived properties, which would take longer."""
        text = msgspec.json.encode(self)
        return (msgspec.json.format(text, indent=indent) if indent else text).decode()

    @property
    def ranks(self) -> tuple[Trace, ...]:
        """Traces of all kinds of ranks, this one first."""
        return (self, *self.beside)

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory of offloaded weights and gradients, in blocks as `host_bytes` has them."""
        return _sum_blocks(self.pinned_sizes)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of the host, in blocks as torch's allocator requests them: powers of two.

        Without the setting pinned_max_round_threshold_mb, a block of 448 MiB takes 512 MiB.
        """
        return _sum_blocks(self.host_sizes)

    def faults(self) -> list[str]:
        """Check that columns have the same length and every number in `order` exists."""
        count = len(self.sizes)
        columns = ("streams", "parts", "modules", "ops")
        wrong = [
            f"{name} has another length than sizes" for name in columns if len(getattr(self, name)) != count
        ]
        if self.order and not -count <= min(self.order) <= max(self.order) < count:
            wrong.append("order names an allocation that is not there")
        if any(not 0 <= number < count or not 0 <= at < len(self.causes) for number, at in self.caused):
            wrong.append("caused names an allocation or a cause that is not there")
        if self.sequence and not 0 <= min(self.sequence) <= max(self.sequence) < len(self.works):
            wrong.append("sequence names an operation that is not there")
        return wrong


def _sum_blocks(sizes: tuple[int, ...]) -> int:
    """Return the sum of sizes, each rounded up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)
