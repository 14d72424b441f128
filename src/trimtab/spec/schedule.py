"""Pipeline schedules by name, with the words that torch and torchtitan have for them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Schedule(StrEnum):
    """Order in which the ranks of a pipeline run forward and backward passes. Each word is one row."""

    _value_: str
    torch_word: str
    """Its name in torch.distributed.pipelining, and in torchtitan's `pipeline_parallel_schedule`."""
    splits_backward: bool
    """Whether weight gradients are computed later than gradients of activations."""
    is_looped: bool
    """Whether a rank may have several stages."""

    def __new__(cls, name: str, torch_word: str = "", rules: tuple[bool, bool] = (False, False)) -> Self:
        """Make a member from its row; its value is the name alone, as in JSON and on the command line."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.torch_word = torch_word
        member.splits_backward, member.is_looped = rules
        return member

    ONE_F_ONE_B = "1f1b", "1F1B"
    """One forward pass, one backward pass, in turns."""
    INTERLEAVED = "interleaved-1f1b", "Interleaved1F1B", (False, True)
    """The same, with several stages on every rank: shorter bubbles, more messages."""
    ZERO_BUBBLE = "zero-bubble", "InterleavedZeroBubble", (True, True)
    """Weight gradients are computed when a rank would wait for another."""

    def check_virtual_stages(self, virtual_stages: int) -> list[str]:
        """Return what is wrong with a number of stages on each rank.

        >>> Schedule.ONE_F_ONE_B.check_virtual_stages(2)
        ['schedule 1f1b has one stage a rank, and virtual_stages is 2']
        """
        if not self.is_looped and virtual_stages > 1:
            return [f"schedule {self} has one stage a rank, and virtual_stages is {virtual_stages}"]
        if self is Schedule.INTERLEAVED and virtual_stages == 1:
            return [f"schedule {self} needs virtual_stages of 2 or more: with 1 it is {Schedule.ONE_F_ONE_B}"]
        return []
