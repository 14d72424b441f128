"""Workload: batch, length and loss of a job, independent of hardware."""

from __future__ import annotations

from trimtab.spec.base import Noun, check_minimum


class BatchLoss(Noun, frozen=True, kw_only=True):
    """Whether the loss is additive: a weighted mean over parts of a batch, which can then be split."""

    additive: bool | None = None
    """None if unknown."""
    stated: bool = False
    """Whether the job declares it; else it was measured on a small batch."""
    gap: float | None = None
    """Relative difference between the loss of a small batch and the mean of its halves."""
    gradient_gap: float | None = None
    """The same for the gradients."""
    is_near: bool = False
    """Whether the loss is additive except for a small difference above rounding."""
    is_sum: bool = False
    """Whether the loss is a sum over samples instead of a mean."""
    batch_norms: int = 0
    """Number of layers that compute statistics over the batch."""
    global_batch: int | None = None
    """Global batch of the job when its loss was checked."""
    why: str = ""

    def faults(self) -> list[str]:
        """Check that gaps and counts are not negative."""
        return check_minimum(1, global_batch=self.global_batch) + check_minimum(
            0, gap=self.gap, gradient_gap=self.gradient_gap, batch_norms=self.batch_norms
        )


class Workload(Noun, frozen=True, kw_only=True):
    """Global batch, epochs and branches of a job."""

    name: str
    global_batch: int
    """Samples per optimizer step."""
    samples: int | None = None
    """Samples per epoch; None if the job does not define it."""
    epochs: int = 1
    branches: tuple[str, ...] = ()
    """Names of the independent terms of the loss."""
    seq: int | None = None
    """Sequence length, if the job has one that can be shortened."""
    batch_loss: BatchLoss | None = None
    """Whether the batch can be split; None if not checked."""
    cached: bool = False
    """Whether the job has embed() and loss_of(), so that gradient caching can split its batch exactly."""
    whole_model: tuple[str, ...] = ()
    """Members of the job that need ranks with the whole model, such as after_step()."""
    sample_length: int | None = None
    """Tokens per sample in the plan, chosen or assumed; None if the job has no sequence length."""
    files: dict[str, str] = {}
    """Fingerprints of the job's own source files, by name."""

    def faults(self) -> list[str]:
        """Check that counts are at least 1."""
        return check_minimum(
            1,
            global_batch=self.global_batch,
            samples=self.samples,
            epochs=self.epochs,
            seq=self.seq,
            sample_length=self.sample_length,
        )

    @property
    def is_indivisible(self) -> bool:
        """Whether the batch must stay whole on one rank."""
        return not self.cached and self.batch_loss is not None and self.batch_loss.additive is False

    @property
    def steps(self) -> int | None:
        """Optimizer steps of all epochs; the last step of an epoch may be smaller."""
        return None if self.samples is None else -(-self.samples // self.global_batch) * self.epochs
