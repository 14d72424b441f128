"""Job: what to train, said once, with no thought of hardware."""

from __future__ import annotations

from typing import Any, ClassVar


class Job:
    """The base class that fills in what a job may leave out.

    class MyJob(trimtab.Job):
        global_batch = 64

        def model(self): return nn.Linear(8, 1)
        def batch(self, size): return torch.randn(size, 8)
        def loss(self, model, batch): return model(batch).square().mean()

    A class that has model(), batch() and loss() and does not inherit from this one is a job too.
    """

    name: str = ""
    global_batch: int = 1
    """Samples per optimizer step: kept exactly, on any hardware."""
    samples: int | None = None
    epochs: int = 1
    branches: ClassVar[dict[str, str]] = {}

    def model(self) -> Any:
        """Build the nn.Module on the current default device and dtype."""
        raise NotImplementedError

    def batch(self, size: int) -> Any:
        """One micro-batch of `size` samples, on the current default device."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> Any:
        """A scalar tensor: the mean over what weight() counts."""
        raise NotImplementedError
