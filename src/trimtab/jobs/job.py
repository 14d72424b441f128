"""Job: the base class of training jobs, independent of hardware."""

from __future__ import annotations

from typing import Any, ClassVar


class Job:
    """Base class with defaults for the optional members of a job.

    class MyJob(trimtab.Job):
        global_batch = 64

        def model(self): return nn.Linear(8, 1)
        def batch(self, size): return torch.randn(size, 8)
        def loss(self, model, batch): return model(batch).square().mean()

    Any class with model(), batch() and loss() is a job, even if it does not inherit from this class.
    """

    name: str = ""
    global_batch: int = 1
    """Samples per optimizer step, exactly the same on any hardware."""
    samples: int | None = None
    epochs: int = 1
    branches: ClassVar[dict[str, str]] = {}
    additive: bool | None = None
    """Whether the loss of a batch is the weighted mean of its parts' losses; None: trimtab finds out."""
    expert_modules: ClassVar[tuple[str, ...]] = ()
    """Names of modules whose experts may be on different ranks, with `*` for any part of a name. Each has
    stacked weights, one slice for each expert, and forward(hidden, index, weights). Without names, trimtab
    finds the experts of models of transformers."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Choices that the job made for the user, listed in an estimate."""
        return ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes about data and weights, printed once when training starts."""
        return ()

    def model(self) -> Any:
        """Build the nn.Module on the current default device and dtype."""
        raise NotImplementedError

    def batch(self, size: int) -> Any:
        """Return a micro-batch of `size` samples on the current default device."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> Any:
        """Return a scalar tensor: the mean over what weight() counts.

        A job with embed(model, batch) and loss_of(embeddings) does not need it.
        """
        if not has_embeddings(self):
            raise NotImplementedError
        from trimtab.jobs.embeddings import direct_loss

        return direct_loss(self, model, batch)

    def import_ahead(self) -> None:
        """Import slow modules that the other members need; called once before many traces."""

    def settle(self, given: frozenset[str]) -> None:
        """Adjust or check options after some were set; `given` has the names of those."""

    def weight(self, batch: Any) -> Any:
        """Return the number that the loss is a mean over: samples by default."""
        return samples_in(batch)


WHOLE_MODEL_MEMBERS = ("optimizers", "after_step", "evaluate")
"""Optional members that get the whole model, so that no rank may hold only a part of it."""


def list_whole_model_members(job: Any) -> list[str]:
    """Return the members of a job that need ranks with the whole model, as in `after_step()`."""
    return [f"{member}()" for member in WHOLE_MODEL_MEMBERS if callable(getattr(job, member, None))]


def list_expert_modules(job: Any) -> tuple[str, ...]:
    """Return the names of a job's modules of experts; empty if it names none."""
    names = getattr(job, "expert_modules", ())
    return (names,) if isinstance(names, str) else tuple(names)


def has_longest(job: Any) -> bool:
    """Return whether a job has longest(size), which gives the memory of its longest batch."""
    return callable(getattr(job, "longest", None))


def has_embeddings(job: Any) -> bool:
    """Return whether a job has embed() and loss_of(), so that gradient caching can split its batch."""
    return callable(getattr(job, "embed", None)) and callable(getattr(job, "loss_of", None))


def stated_additive(job: Any) -> bool | None:
    """Return a job's `additive`; None if it is not set.

    A class with its own loss does not inherit `additive` from a base class.
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
    """Return a job's function (model, batch) -> loss, from loss() or from embed() and loss_of()."""
    if callable(getattr(job, "loss", None)):
        return job.loss
    from functools import partial

    from trimtab.jobs.embeddings import direct_loss

    return partial(direct_loss, job)


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the first length of its first tensor.

    >>> import torch
    >>> samples_in({"ids": [torch.zeros(4, 7)]})
    4
    """
    if hasattr(batch, "shape"):
        return int(batch.shape[0])
    parts = batch.values() if isinstance(batch, dict) else batch
    return samples_in(next(iter(parts)))
