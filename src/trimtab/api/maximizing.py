"""The function `max`, in a module of its own because its name is that of a builtin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec.requests import MaxRequest, accepts

if TYPE_CHECKING:
    from trimtab.spec import LargestValue


@accepts(MaxRequest)
def max(request: MaxRequest) -> LargestValue:  # noqa: A001 - each verb is a function of the same name
    """Find the largest micro-batch, sequence or other number of a job that fits, without a GPU.

    trimtab.max("job.py:MyJob", "RTX4090").largest
    trimtab.max("hf:./llama", "RTX4090", of="seq", options={"lora": 16}).next.change.what
    """
    from trimtab.api.largest import LargestQuestion
    from trimtab.trace.server import WorkerProcess

    with WorkerProcess() as worker:
        return LargestQuestion(request, worker).answer()
