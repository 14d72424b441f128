"""What a prediction has to know about a training run of another framework."""

from __future__ import annotations

from typing import Any, NamedTuple


class RunFacts(NamedTuple):
    """How the framework will train, as far as a prediction depends on it."""

    micro_batch: int
    accumulation: int
    ranks: int = 1
    nodes: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    compile: bool = False
    optimizer: str = "fused"
    strategy: str = "single"
    clip: float | None = None
    samples: int | None = None
    epochs: int = 1

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def pins(self) -> dict[str, Any]:
        """What a plan must not change."""
        return {
            "gpus": self.ranks,
            "strategy": self.strategy,
            "precision": self.precision,
            "recompute": self.recompute,
            "compile": self.compile,
            "optimizer": self.optimizer,
        }
