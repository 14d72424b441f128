"""Train one branch of a job: remove the submodules that only other branches need.

A job whose loss is a sum over branches names in `branches` the submodule that only one branch needs. A rank
of the branch strategies keeps its own submodule and computes its own term. The other submodules become
placeholders: they are false, accept any call, and every result computed from them is a placeholder again. So
losses() runs unchanged; it may also test a submodule and skip the branch.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from trimtab.errors import JobFailed


class AbsentValue:
    """Result of a removed submodule: every operation on it returns another AbsentValue."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> AbsentValue:
        return AbsentValue()

    def __call__(self, *_: Any, **__: Any) -> AbsentValue:
        """Return another absent value."""
        return AbsentValue()

    def __getattr__(self, name: str) -> AbsentValue:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentValue()

    def __bool__(self) -> bool:
        return False

    def _same(self, *_: Any) -> AbsentValue:
        return AbsentValue()

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = __lt__ = __gt__ = _same
    __iter__ = None
    """Unpacking raises an error; without this, Python would iterate forever with __getitem__."""


class AbsentModule(nn.Module):
    """Placeholder for the submodule of another branch."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentValue()

    def __call__(self, *_: Any, **__: Any) -> AbsentValue:
        """Return an absent value."""
        return AbsentValue()

    def train(self, mode: bool = True) -> Self:
        """Do nothing: a placeholder has no mode."""
        del mode
        return self


def get_branches(job: Any) -> dict[str, str]:
    """Return the submodule of each branch of a job; raise JobFailed if it has fewer than two branches."""
    branches = getattr(job, "branches", None) or {}
    if not isinstance(branches, dict) or not callable(getattr(job, "losses", None)):
        branches = {}
    if len(branches) < 2:  # noqa: PLR2004 - several
        raise JobFailed(
            "--strategy branch",
            found=f"the job has {'one branch' if branches else 'no branches'}",
            cure=(
                "Give it losses(model, batch), which returns a loss for each branch, and branches = {name: "
                "the submodule that only this branch needs}; or use ddp or fsdp."
            ),
        )
    return dict(branches)


def keep_branch(model: nn.Module, branches: dict[str, str], own: str) -> list[nn.Module]:
    """Remove the submodules that only other branches need from a model, and return them."""
    removed = []
    for name, prefix in branches.items():
        if name == own or branches[own] == prefix:
            continue
        parent, _, last = prefix.rpartition(".")
        try:
            holder = model.get_submodule(parent)
            removed.append(model.get_submodule(prefix))
        except AttributeError as error:
            raise JobFailed(
                "branches",
                found=f"branch {name!r} names the submodule {prefix!r}, and the model has none of that name",
                cure=f"Name one of {', '.join(dict(model.named_children()))}, or one inside them.",
            ) from error
        setattr(holder, last, AbsentModule())
    return removed


def compute_branch_loss(job: Any, model: nn.Module, batch: Any, own: str) -> Any:
    """Compute the loss term of one branch."""
    try:
        terms = job.losses(model, batch)
    except (AttributeError, TypeError, ValueError) as error:
        if "Absent" not in str(error):
            raise
        raise JobFailed(
            "losses()",
            found=f"it needs the submodule of another branch than {own!r}: {error}",
            cure="Leave out the branches whose submodule is false, as in `if model.other:`.",
        ) from error
    if not isinstance(terms, dict) or own not in terms:
        found = (
            f"it returned {', '.join(map(repr, terms))}" if isinstance(terms, dict) else "it is not a dict"
        )
        raise JobFailed(
            "losses()",
            found=f"it has no term for branch {own!r}: {found}",
            cure="Return a dict with a loss for every branch.",
        )
    return terms[own]
