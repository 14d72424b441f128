"""Workload: what a job says of itself, with no thought of hardware."""

from __future__ import annotations

from trimtab.spec.base import Noun, below


class BatchLoss(Noun, frozen=True, kw_only=True):
    """Whether the loss of a batch is the weighted mean of those of its parts, so that it can be cut."""

    additive: bool | None = None
    """None where it is not known."""
    stated: bool = False
    """Whether the job says so itself; else it was found out on a small batch."""
    gap: float | None = None
    """Difference between the loss of a small batch and the mean over its halves, as a share of the loss."""
    gradient_gap: float | None = None
    """The same of the gradients."""
    is_near: bool = False
    """Whether the loss is additive but for a small difference that is no rounding."""
    is_sum: bool = False
    """Whether the loss is a sum over samples where a mean is asked for."""
    batch_norms: int = 0
    """Normalisations in the model that compute statistics of the batch."""
    global_batch: int | None = None
    """Of the job, when its loss was looked at."""
    why: str = ""

    def faults(self) -> list[str]:
        """Shares and counts are not negative."""
        return below(1, global_batch=self.global_batch) + below(
            0, gap=self.gap, gradient_gap=self.gradient_gap, batch_norms=self.batch_norms
        )


class Workload(Noun, frozen=True, kw_only=True):
    """The batch, the horizon and the branches of a job."""

    name: str
    global_batch: int
    """Samples per optimizer step."""
    samples: int | None = None
    """In one epoch; None where the job does not say."""
    epochs: int = 1
    branches: tuple[str, ...] = ()
    """Names of the independent terms of the loss."""
    seq: int | None = None
    """Length of a sample, where the job has one that can be shortened."""
    batch_loss: BatchLoss | None = None
    """Whether the batch can be cut; None where nobody has looked."""
    cached: bool = False
    """Whether the job gives embed() and loss_of(), so that gradient caching cuts its batch exactly."""
    sample_length: int | None = None
    """Tokens of one sample as the job is planned, chosen or assumed; None where it has none."""
    files: dict[str, str] = {}
    """Fingerprints of the job's own source files, by name."""

    def faults(self) -> list[str]:
        """Counts are at least one."""
        return below(
            1,
            global_batch=self.global_batch,
            samples=self.samples,
            epochs=self.epochs,
            seq=self.seq,
            sample_length=self.sample_length,
        )

    @property
    def is_indivisible(self) -> bool:
        """Whether the batch has to stay in one piece, on one rank."""
        return not self.cached and self.batch_loss is not None and self.batch_loss.additive is False

    @property
    def steps(self) -> int | None:
        """Optimizer steps to the horizon; the last one of an epoch may be smaller."""
        return None if self.samples is None else -(-self.samples // self.global_batch) * self.epochs
