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
    additive: bool | None = None
    """Whether the loss of a batch is the weighted mean of those of its parts; None: trimtab finds out."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the job chose for the user; an estimate lists it."""
        return ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the job has to say about its data and weights; said once, when training begins."""
        return ()

    def model(self) -> Any:
        """Build the nn.Module on the current default device and dtype."""
        raise NotImplementedError

    def batch(self, size: int) -> Any:
        """One micro-batch of `size` samples, on the current default device."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> Any:
        """A scalar tensor: the mean over what weight() counts.

        A job that has embed(model, batch) and loss_of(embeddings) needs none: it is loss_of(embed(...)).
        """
        if not is_cached(self):
            raise NotImplementedError
        from trimtab.jobs.embeddings import direct_loss

        return direct_loss(self, model, batch)

    def import_ahead(self) -> None:
        """Import what the other members will, where that takes long: called once before many traces."""

    def settle(self, given: frozenset[str]) -> None:
        """Called with the names of options that were just set: one may stand for others, or not suit them."""

    def weight(self, batch: Any) -> Any:
        """What the loss is a mean over: samples, unless a job says otherwise."""
        return samples_in(batch)


def is_cached(job: Any) -> bool:
    """Whether a job gives embed() and loss_of(), so that its batch can be cut by gradient caching."""
    return callable(getattr(job, "embed", None)) and callable(getattr(job, "loss_of", None))


def stated_additive(job: Any) -> bool | None:
    """What a job says of its loss in `additive`; None where it says nothing.

    A class that has a loss of its own does not inherit what was said of another.
    """
    if isinstance(vars(job).get("additive"), bool):
        return bool(job.additive)
    for cls in type(job).__mro__:
        if isinstance(vars(cls).get("additive"), bool):
            return bool(vars(cls)["additive"])
        if {"loss", "losses", "loss_of"} & vars(cls).keys():
            return None
    return None


def loss_function(job: Any) -> Any:
    """The function (model, batch) -> loss of a job, for one that has loss() or embed() and loss_of()."""
    if callable(getattr(job, "loss", None)):
        return job.loss
    from functools import partial

    from trimtab.jobs.embeddings import direct_loss

    return partial(direct_loss, job)


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the first length of its first tensor.

    >>> import torch
    >>> samples_in({"ids": [torch.zeros(4, 7)]})
    4
    """
    if hasattr(batch, "shape"):
        return int(batch.shape[0])
    parts = batch.values() if isinstance(batch, dict) else batch
    return samples_in(next(iter(parts)))
