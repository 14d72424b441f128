"""OptimizerRule: which optimizer updates the weights, if it is not the job's own.

Each optimizer is one row here. Other modules use the properties of the row, never its name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from trimtab.spec.base import Noun, check_minimum


class OptimizerStates(Noun, frozen=True, kw_only=True):
    """Where an optimizer comes from, and how it stores its states."""

    place: str = ""
    """Class, as module:NAME; empty: the job's own optimizer."""
    states: int = 2
    """Numbers that it stores for every weight."""
    bits: int = 0
    """Bits of such a number; 0: torch's own optimizers store what they store."""
    block: int = 0
    """Numbers that share a scale."""
    least: int = 4096
    """Tensors with fewer weights have states in full precision."""
    whole_blocks: bool = False
    """Whether tensors that are not made of whole blocks have states in full precision."""
    has_table: bool = True
    """Whether the bits are numbers of the entries of a table."""
    paged_from: int = 0
    """Weights from which the states of a tensor lie in memory that the driver moves between GPU and host;
    0: never."""
    waits: bool = False
    """Whether the host waits for the GPU after every tensor."""
    compiled: bool = False
    """Whether it compiles a kernel for every shape of weights."""
    options: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay")
    """Options that it takes over from the job's optimizer, if that has them."""
    matrices_only: bool = False
    """Whether it updates matrices only; other weights are updated by AdamW."""

    def faults(self) -> list[str]:
        """Check that numbers are not negative."""
        return check_minimum(0, states=self.states, bits=self.bits, block=self.block)

    @property
    def library(self) -> str:
        """Python package that it comes from; empty for the job's own."""
        return self.place.partition(".")[0].partition(":")[0]


_BITSANDBYTES = OptimizerStates(bits=8, block=256, waits=True)
_TORCHAO = OptimizerStates(bits=8, block=256, whole_blocks=True, compiled=True)


class OptimizerRule(StrEnum):
    """The optimizer of a step."""

    _value_: str
    stored: OptimizerStates

    def __new__(cls, name: str, stored: OptimizerStates | None = None) -> Self:
        """Make a member from its row; its value is the name alone, as in JSON and on the command line."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.stored = stored or OptimizerStates()
        return member

    JOB = "job", OptimizerStates()
    """The job's own."""
    ADAMW = "adamw", OptimizerStates(place="torch.optim:AdamW")
    ADAMW_BF16 = "adamw-bf16", OptimizerStates(place="trimtab.engine.bf16_adamw:Bf16AdamW")
    """AdamW with states in bfloat16."""
    ADAMW_8BIT = "adamw8bit", _BITSANDBYTES.replace(place="bitsandbytes.optim:AdamW8bit")
    """AdamW with states in 8 bits."""
    PAGED_ADAMW_8BIT = (
        "paged-adamw8bit",
        _BITSANDBYTES.replace(place="bitsandbytes.optim:PagedAdamW8bit", paged_from=100_000),
    )
    """AdamW with states in 8 bits that the driver moves to the host if the GPU is full."""
    PAGED_ADAMW = (
        "paged-adamw",
        _BITSANDBYTES.replace(place="bitsandbytes.optim:PagedAdamW32bit", bits=32, paged_from=100_000),
    )
    """AdamW with states in 32 bits that the driver moves to the host if the GPU is full."""
    LION_8BIT = (
        "lion8bit",
        _BITSANDBYTES.replace(place="bitsandbytes.optim:Lion8bit", states=1, options=("lr", "weight_decay")),
    )
    LION = (
        "lion",
        _BITSANDBYTES.replace(
            place="bitsandbytes.optim:Lion32bit", states=1, bits=32, options=("lr", "weight_decay")
        ),
    )
    """Updates by the sign of a momentum, one state per weight."""
    ADAMW_8BIT_AO = "adamw8bit-ao", _TORCHAO.replace(place="torchao.optim:AdamW8bit")
    """AdamW with states in 8 bits, by torchao."""
    ADAMW_4BIT = "adamw4bit", _TORCHAO.replace(place="torchao.optim:AdamW4bit", bits=4, block=128)
    """AdamW with states in 4 bits, by torchao."""
    ADAMW_FP8 = "adamw-fp8", _TORCHAO.replace(place="torchao.optim:AdamWFp8", has_table=False)
    """AdamW with states in fp8, by torchao."""
    ADAFACTOR = "adafactor", OptimizerStates(place="torch.optim:Adafactor", options=("lr", "weight_decay"))
    """Second moments of a matrix as one number per row and column."""
    MUON = (
        "muon",
        OptimizerStates(
            place="torch.optim:Muon", states=1, options=("lr", "weight_decay"), matrices_only=True
        ),
    )
    """Updates of matrices made orthogonal; other weights by AdamW."""
    SGD = "sgd", OptimizerStates(place="torch.optim:SGD", states=0, options=("lr", "weight_decay"))
