"""Workload: what a job says of itself, with no thought of hardware."""

from __future__ import annotations

from trimtab.spec.base import Noun, below


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
    def steps(self) -> int | None:
        """Optimizer steps to the horizon; the last one of an epoch may be smaller."""
        return None if self.samples is None else -(-self.samples // self.global_batch) * self.epochs
