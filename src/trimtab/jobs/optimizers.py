"""Several optimizers of a job: what optimizers(named_parameters) may return, checked and in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import JobFailed
from trimtab.jobs.job import has_embeddings, loss_function

MEMBER = "optimizers()"
_MOST_NAMES = 3
"""Parameter names that an error lists."""
_FORMS = (
    "Return a torch optimizer or a trimtab.OptimizerPart, or a dict or list of them; every trainable "
    "parameter belongs to exactly one optimizer."
)

NamedParameters = Sequence[tuple[str, Any]]
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer of a job with several, with its own loss and frequency.

    trimtab.OptimizerPart(torch.optim.Adam(params), loss=self.generator_loss, every=5)
    """

    optimizer: Any
    loss: Loss | None = None
    """Function of (model, batch) whose gradient goes only to this optimizer's parameters; None: loss()."""
    every: int = 1
    """Steps between two updates: 5 updates in steps 5, 10, 15 and so on."""
    schedule: Callable[[Any], Any] | None = None
    """Function of the optimizer that returns its LR scheduler; None: the job's schedule(), if it has one."""


def has_optimizers(job: Any) -> bool:
    """Return whether a job makes its optimizers by optimizers(named_parameters)."""
    return callable(getattr(job, "optimizers", None))


def read_optimizers(job: Any, named_parameters: NamedParameters) -> dict[str, OptimizerPart]:
    """Return the job's optimizers by name; raise JobFailed if they are not what a job may return."""
    named = list(named_parameters)
    parts = {name: _as_part(name, value) for name, value in _name_parts(job.optimizers(named)).items()}
    _check_parts(job, parts)
    _check_coverage(parts, named)
    return parts


def collect_losses(job: Any, named_parameters: NamedParameters) -> list[tuple[str, Loss]]:
    """Return the different losses of a job with the member or optimizer that each belongs to.

    A job without optimizers() has one, its loss().
    """
    if not has_optimizers(job):
        return [("loss()", loss_function(job))]
    losses: list[tuple[str, Loss]] = []
    for name, part in read_optimizers(job, named_parameters).items():
        loss = part.loss or loss_function(job)
        if all(loss != other for _, other in losses):
            losses.append(("loss()" if part.loss is None else f"the loss of {name}", loss))
    return losses


def _name_parts(returned: Any) -> dict[str, Any]:
    """Return optimizers by name: those of a dict, or the names of their classes, numbered if equal."""
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    values = list(returned) if isinstance(returned, list | tuple) else [returned]
    kinds = [type(getattr(value, "optimizer", value)).__name__.lower() for value in values]
    return {
        kind if kinds.count(kind) == 1 else f"{kind}{kinds[: place + 1].count(kind)}": value
        for place, (kind, value) in enumerate(zip(kinds, values, strict=True))
    }


def is_optimizer(value: Any) -> bool:
    """Return whether a value works as an optimizer, of torch's class or not."""
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _as_part(name: str, value: Any) -> OptimizerPart:
    part = value if isinstance(value, OptimizerPart) else OptimizerPart(value)
    optimizer = part.optimizer
    if not is_optimizer(optimizer):
        raise JobFailed(
            MEMBER, found=f"{name} is a {type(optimizer).__name__}, not an optimizer", cure=_FORMS
        )
    return part


def _check_parts(job: Any, parts: dict[str, OptimizerPart]) -> None:
    """Check losses and frequencies."""
    if not parts:
        raise JobFailed(MEMBER, found="it returned no optimizer", cure=_FORMS)
    for name, part in parts.items():
        if isinstance(part.every, bool) or not isinstance(part.every, int) or part.every < 1:
            raise JobFailed(
                MEMBER,
                found=f"every of {name} is {part.every!r}",
                cure="Give a whole number of steps from 1 up.",
            )
        if part.loss is not None and not callable(part.loss):
            raise JobFailed(
                MEMBER,
                found=f"the loss of {name} is a {type(part.loss).__name__}",
                cure="Give a function of (model, batch), as in loss=self.generator_loss.",
            )
    if all(part.every > 1 for part in parts.values()):
        raise JobFailed(
            MEMBER,
            found="no optimizer steps in every step",
            cure="Give at least one of them every=1, and use a larger global_batch for fewer updates.",
        )
    if has_embeddings(job) and any(part.loss is not None for part in parts.values()):
        raise JobFailed(
            MEMBER,
            found="an optimizer has its own loss, and the job has embed() and loss_of()",
            cure="Leave out the losses of the optimizers: loss_of() is the loss of all of them.",
        )


def _check_coverage(parts: dict[str, OptimizerPart], named: list[tuple[str, Any]]) -> None:
    """Check that every trainable parameter belongs to exactly one optimizer."""
    names = {id(parameter): name for name, parameter in named}
    owners: dict[int, str] = {}
    for part_name, part in parts.items():
        for parameter in (entry for group in part.optimizer.param_groups for entry in group["params"]):
            key = id(parameter)
            if key not in names:
                shape = tuple(parameter.shape)
                found = f"{part_name} has a parameter of shape {shape} that is not in named_parameters"
                raise JobFailed(MEMBER, found=found, cure=_FORMS)
            if owners.get(key, part_name) != part_name:
                raise JobFailed(
                    MEMBER, found=f"{names[key]} belongs to {owners[key]} and to {part_name}", cure=_FORMS
                )
            owners[key] = part_name
    left = [name for name, parameter in named if id(parameter) not in owners]
    if left:
        more = f" and {len(left) - _MOST_NAMES} more" if len(left) > _MOST_NAMES else ""
        raise JobFailed(
            MEMBER,
            found=f"no optimizer has {', '.join(left[:_MOST_NAMES])}{more}",
            cure="Give every trainable parameter to an optimizer, or freeze it in model() with "
            "requires_grad_(False).",
        )
