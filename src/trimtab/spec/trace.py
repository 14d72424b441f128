"""Trace: every allocation and free of a job's first steps, with what each was for."""

from __future__ import annotations

from trimtab.spec.base import Noun, below

PARTS = ("weights", "gradients", "optimizer", "activations", "inputs", "workspace", "communication")
"""What memory is for, in the order of Footprint; the context is no allocation of torch's."""
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
    "wait",
    "view",
    "call",
)
"""What an operation is, for the time it takes. A wait is the host waiting for a value; a view and the call of
a module cost the host alone."""


ENTER, LEAVE = "enter", "leave"
"""Names of the calls that the whole model begins and ends with: what lies between, torch.compile compiles."""
GRADIENT = "gradient"
"""Name of the allocations of no bytes that say when a parameter's gradient is complete."""
STATISTICS = "sync_batchnorm"
"""What the names of collectives of synchronised BatchNorm layers begin with."""
PERMUTED, BROADCAST, PROMOTED = 1, 2, 4
"""What keeps an operation from reading and writing in straight lines, as bits."""


class Work(Noun, frozen=True, kw_only=True):
    """One operation on the device: what it computes and what it moves, with no thought of how fast."""

    op: str
    """As torch names it, such as aten::mm; for a fused kernel, what was fused."""
    kind: str
    """One of KINDS."""
    dtype: str
    """That it computes in, as torch names it: bfloat16, float32."""
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    dims: tuple[int, ...] = ()
    """matrix: batch, m, n, k, alignment in bytes; convolution: groups, spots, n, k, layout, kernel area;
    attention: batch, heads, queries, keys, head size, causal; recurrent: layers, steps, batch, width;
    optimizer: tensors, numbers; others: obstacles, last dimension. What they mean: trimtab.trace.op_cost."""
    kernels: int = 1
    """Launches that it makes; of a recurrent layer, the cells: steps times layers times directions."""
    fresh: bool = False
    """Whether its shape follows from what the model computes, and so is another in every step."""

    def faults(self) -> list[str]:
        """Counts are not negative, and the kind is known."""
        wrong = below(
            0,
            flops=self.flops,
            read_bytes=self.read_bytes,
            write_bytes=self.write_bytes,
            kernels=self.kernels,
        )
        return wrong if self.kind in KINDS else [*wrong, f"kind is {self.kind!r}, none of {', '.join(KINDS)}"]


class Cause(Noun, frozen=True, kw_only=True):
    """What the size of a workspace follows from, where it is no straight line in the micro-batch."""

    rule: str
    """A formula of trimtab.trace.workspace_formulas."""
    numbers: tuple[int, ...]
    """What the formula is given: shapes, which are straight lines."""
    word: str = ""
    """And the precision, where it asks for one."""
    beside: int = 0
    """Bytes on top."""


class Trace(Noun, frozen=True, kw_only=True):
    """What a step asks of the caching allocator, in order. Columns have one entry an allocation."""

    order: tuple[int, ...]
    """An allocation is its number, counted from 0; a free is the number inverted (~number)."""
    sizes: tuple[int, ...]
    """Bytes asked for."""
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
    """Position in `order` where a phase begins: build, batch, step0, step1, step2, end."""
    causes: tuple[Cause, ...] = ()
    """The different causes of sizes, each once."""
    caused: tuple[tuple[int, int], ...] = ()
    """Allocations whose size has a cause, each with its index into `causes`."""
    parameters: int = 0
    """Numbers that are weights."""
    trainable: int = 0
    """Numbers that take a gradient."""
    works: tuple[Work, ...] = ()
    """The different operations of a step, each once."""
    sequence: tuple[int, ...] = ()
    """Index into `works` of each operation of the last step, in order."""
    phases: dict[str, int] = {}
    """Position in `sequence` where forward, backward and optimizer begin."""
    recomputed_flops: int = 0
    """Of those, what recomputing added."""
    recomputed: tuple[str, ...] = ()
    part: int = 0
    """Which of unlike ranks this is one of: the number of its branch or of its pipeline stage."""
    rank: str = ""
    """The same in words: branch llama, or stage 1 of 4; empty where all ranks hold the same."""
    beside: tuple[Trace, ...] = ()
    """The other kinds of ranks: of every other branch; of a pipeline the last stage, beside the first, which
    those between are like."""
    kept_bytes: int = 0
    """What a forward pass of a pipeline stage leaves for its backward pass."""
    handed_bytes: int = 0
    """What a pipeline stage hands to the next one for a micro-batch."""
    shared: int = 0
    """Of the numbers that take a gradient, those that all stages of a pipeline hold."""
    no_compile_gain: str = ""
    """Of an eager trace: why torch.compile promises no gain, or fails; empty where it may help."""
    assumptions: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[Trace, ...]:
        """All kinds of ranks, this one first."""
        return (self, *self.beside)

    def faults(self) -> list[str]:
        """Columns are equally long, and every number in `order` exists."""
        count = len(self.sizes)
        columns = ("streams", "parts", "modules", "ops")
        wrong = [
            f"{name} has another length than sizes" for name in columns if len(getattr(self, name)) != count
        ]
        if self.order and not -count <= min(self.order) <= max(self.order) < count:
            wrong.append("order names an allocation that is not there")
        if any(not 0 <= one < count or not 0 <= at < len(self.causes) for one, at in self.caused):
            wrong.append("caused names an allocation or a cause that is not there")
        if self.sequence and not 0 <= min(self.sequence) <= max(self.sequence) < len(self.works):
            wrong.append("sequence names an operation that is not there")
        return wrong
