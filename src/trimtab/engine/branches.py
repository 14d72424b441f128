"""One branch of a job alone: the model without the parts that only other branches need.

A job whose loss is a sum over branches says in `branches` which submodule only one of them needs. A rank of
the branch strategies keeps its own, computes its own term, and has a stand-in where the others were: it is
false, it takes any call, and whatever is computed from it comes to nothing. So losses() runs unchanged, and
one that looks may leave such a branch out.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from trimtab.errors import JobFailed


class Nothing:
    """What a stand-in gives: every operation on it gives it again."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Nothing:
        return Nothing()

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        """Nothing again."""
        return Nothing()

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __bool__(self) -> bool:
        return False

    def _same(self, *_: Any) -> Nothing:
        return Nothing()

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = __lt__ = __gt__ = _same
    __iter__ = None
    """What cannot be unpacked says so, instead of giving values without end."""


class Absent(nn.Module):
    """Stands where the submodule of another branch was."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        """Nothing comes of it."""
        return Nothing()

    def train(self, mode: bool = True) -> Self:
        """It has no mode."""
        del mode
        return self


def branches_of(job: Any) -> dict[str, str]:
    """The branches of a job with the submodule of each; an error where it has fewer than two."""
    found = getattr(job, "branches", None) or {}
    if not isinstance(found, dict) or not callable(getattr(job, "losses", None)):
        found = {}
    if len(found) < 2:  # noqa: PLR2004 - several
        raise JobFailed(
            "--strategy branch",
            found=f"the job has {'one branch' if found else 'no branches'}",
            cure=(
                "Give it losses(model, batch), which returns a loss for each branch, and branches = {name: "
                "the submodule that only this branch needs}; or use ddp or fsdp."
            ),
        )
    return dict(found)


def keep_branch(model: nn.Module, branches: dict[str, str], own: str) -> list[nn.Module]:
    """Take the submodules that only other branches need out of a model; they are returned."""
    taken = []
    for name, prefix in branches.items():
        if name == own or branches[own] == prefix:
            continue
        parent, _, last = prefix.rpartition(".")
        try:
            holder = model.get_submodule(parent)
            taken.append(model.get_submodule(prefix))
        except AttributeError as error:
            raise JobFailed(
                "branches",
                found=f"branch {name!r} names the submodule {prefix!r}, and the model has none of that name",
                cure=f"Name one of {', '.join(dict(model.named_children()))}, or one inside them.",
            ) from error
        setattr(holder, last, Absent())
    return taken


def branch_loss(job: Any, model: nn.Module, batch: Any, own: str) -> Any:
    """The term of one branch."""
    try:
        terms = job.losses(model, batch)
    except (AttributeError, TypeError, ValueError) as error:
        if "Nothing" not in str(error) and "Absent" not in str(error):
            raise
        raise JobFailed(
            "losses()",
            found=f"it needs the submodule of another branch than {own!r}: {error}",
            cure="Leave out the branches whose submodule is false, as in `if model.other:`.",
        ) from error
    if not isinstance(terms, dict) or own not in terms:
        found = f"it returned {', '.join(map(repr, terms))}" if isinstance(terms, dict) else "it is no dict"
        raise JobFailed(
            "losses()", found=f"it has no term for branch {own!r}: {found}", cure="Return them all."
        )
    return terms[own]
