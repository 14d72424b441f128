"""Build a job's model and its batches on a device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.engine.branches import branches_of, keep_branch
from trimtab.engine.precision import configure, torch_dtype
from trimtab.errors import JobFailed
from trimtab.spec.precision import FLOAT32
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.spec import Dtypes, Setting


@contextlib.contextmanager
def building(dtypes: Dtypes, device: str) -> Iterator[None]:
    """Default device and dtype, for the job's model() and batch() alone."""
    before = torch.get_default_dtype()
    if dtypes.weights != FLOAT32:
        torch.set_default_dtype(torch_dtype(dtypes.weights))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build_device(setting: Setting, device: str) -> str:
    """Return where the model is built: on the host where the device gets only a share of it."""
    return "cpu" if strategy_of(setting).is_built_on_host else device


def make_batch(job: Any, setting: Setting, device: str) -> Any:
    """Make one micro-batch, as the job makes it."""
    with building(setting.dtypes, device):
        return job.batch(setting.micro_batch)


def build(  # noqa: PLR0913 - what to build, and as which rank
    job: Any,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    dropped: list[nn.Module] | None = None,
    values: bool = True,
) -> nn.Module:
    """Build the job's model where the setting wants it built.

    With `branch`, as a rank of that branch has it; what only other branches need goes to `dropped`. Without
    `values`, a model that would be built on the host is built on the meta device.
    """
    configure(setting.dtypes)
    place = build_device(setting, device)
    with building(setting.dtypes, place if values or place == device else "meta"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    if branch:
        others = keep_branch(model, branches_of(job), branch)
        if dropped is not None:
            dropped += others
        del others
    return model
