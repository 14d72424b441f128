"""BaseFormat: how frozen linear layers are stored, such as in 4 bits with a scale per block of 64.

Each format is one row here. Other modules use the properties of the row, never its name. The arithmetic stays
in 16 or 32 bits: a layer restores its weights for every product (4 bits), or multiplies 8-bit integers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from trimtab.spec.base import Noun, check_minimum


class BaseStorage(Noun, frozen=True, kw_only=True):
    """Bytes and blocks of a format."""

    bits: int
    """Bits of a weight, without its scale."""
    block: int = 0
    """Weights that share a scale; 0: a row of the matrix shares it."""
    codebook: str = ""
    """Values that the bits stand for: nf4 or fp4; empty: whole numbers."""
    scale_block: int = 0
    """Scales that share a second scale, if the scales are stored in 8 bits too; 0: scales are float32."""
    outliers: float = 0.0
    """Activations from this size on are multiplied in 16 bits; 0: none are."""
    library: str = ""
    """Python package with the CUDA kernels, or whose plain torch code is followed."""
    is_plain: bool = False
    """Whether layers are stored and restored in plain torch, with a buffer for every step, on all devices.
    Scales then have the dtype of the weights."""

    def faults(self) -> list[str]:
        """Check that sizes are not negative."""
        return check_minimum(0, bits=self.bits, block=self.block, scale_block=self.scale_block)

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored in fewer bits than they are used in."""
        return bool(self.bits)

    def count_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a stored matrix with its scales in float32.

        >>> BaseFormat.NF4.storage.count_bytes(4096, 4096) / 4096**2 * 8
        4.5
        >>> round(BaseFormat.NF4_DOUBLE.storage.count_bytes(4096, 4096) / 4096**2 * 8, 3)
        4.127
        """
        count = rows * columns
        scales = -(-count // self.block) if self.block else rows
        size = -(-count * self.bits // 8)
        if not self.scale_block:
            return size + 4 * scales
        return size + scales + 4 * -(-scales // self.scale_block)


class BaseFormat(StrEnum):
    """Storage of the frozen linear layers of a model, which adapters are trained on."""

    _value_: str
    storage: BaseStorage

    def __new__(cls, name: str, storage: BaseStorage | None = None) -> Self:
        """Make a member from its row; its value is the name alone, as in JSON and on the command line."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.storage = storage or BaseStorage(bits=0)
        return member

    NONE = "none", BaseStorage(bits=0)
    """As the job builds them."""
    NF4 = "nf4", BaseStorage(bits=4, block=64, codebook="nf4", library="bitsandbytes")
    """4-bit values at equal shares of a normal distribution, as in QLoRA."""
    NF4_DOUBLE = (
        "nf4-double",
        BaseStorage(bits=4, block=64, codebook="nf4", scale_block=256, library="bitsandbytes"),
    )
    """nf4 with scales in 8 bits (double quantization)."""
    FP4 = "fp4", BaseStorage(bits=4, block=64, codebook="fp4", library="bitsandbytes")
    """4-bit floating point."""
    FP4_DOUBLE = (
        "fp4-double",
        BaseStorage(bits=4, block=64, codebook="fp4", scale_block=256, library="bitsandbytes"),
    )
    INT8 = "int8", BaseStorage(bits=8, outliers=6.0, library="bitsandbytes")
    """8-bit integers with a scale per row; large activations are multiplied in 16 bits (LLM.int8)."""
    NF4_AO = (
        "nf4-ao",
        BaseStorage(bits=4, block=64, codebook="nf4", scale_block=256, library="torchao", is_plain=True),
    )
    """nf4 with scales in 8 bits as torchao has it, for torchtune: the same size, and larger buffers."""
    INT8_AO = "int8-ao", BaseStorage(bits=8, library="torchao", is_plain=True)
    """8-bit integers with a scale per row; products in 16 bits, as in torchao's quantized training."""
