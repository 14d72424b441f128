"""Estimate micro-batches of a training run in limited time, with one worker process and few traces.

The script's own micro-batch takes one trace. A second trace is made only if another size is needed; the two
give all others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from trimtab.api.estimating import make_setting
from trimtab.errors import TrimtabError
from trimtab.planner.estimates import estimate_settings
from trimtab.planner.estimator import strip_device
from trimtab.predict.traces import get_traces
from trimtab.trace.server import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.integrations.run_facts import RunFacts
    from trimtab.planner.estimator_interface import Layout
    from trimtab.predict.traces import Family
    from trimtab.spec import Device, Estimate, Setting, Trace


class OutOfTimeError(Exception):
    """Raised if a prediction takes longer than it may."""


class RunEstimator:
    """Estimates of one training run at several micro-batches, until its time is over."""

    def __init__(self, job: str, facts: RunFacts, layout: Layout, *, ends_at: float) -> None:
        """`ends_at` is the time of `time.monotonic()` at which to give up."""
        self.job = job
        self.facts = facts
        self.layout = layout
        self.ends_at = ends_at
        self.estimates: dict[int, Estimate] = {}
        """What was estimated so far, by micro-batch."""
        self._families: dict[str, Family] = {}
        self._worker = WorkerProcess()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def make_setting(self, size: int) -> Setting:
        """Return the run's own setting with another split of the global batch."""
        facts = self.facts
        words: Any = facts.pins
        share = facts.micro_batch * facts.accumulation
        made = make_setting(micro_batch=size, allocator="default", nodes=facts.nodes, **words)
        return made.replace(accumulation=share // size, global_batch=facts.global_batch)

    def estimate(self, size: int) -> Estimate:
        """Return the estimate of a micro-batch; raise what fails, or OutOfTimeError."""
        if size not in self.estimates:
            device = self.layout.device
            try:
                (answer,) = estimate_settings(
                    self.job,
                    [self.make_setting(size)],
                    device,
                    cluster=self.layout.cluster,
                    clip=self.facts.clip,
                    get=self._get_traces,
                    quick=True,
                )
            except TrimtabError as error:
                answer = error
            if isinstance(answer, TrimtabError):
                if time.monotonic() >= self.ends_at:
                    raise OutOfTimeError from answer
                raise answer
            self.estimates[size] = answer[0].judge_quickly(device.free_bytes or device.memory_bytes)
        return self.estimates[size]

    def _get_traces(
        self, job: str, settings: Sequence[Setting], device: Device, **more: Any
    ) -> list[Trace | TrimtabError]:
        """Return eager traces, interpolated if two others are known."""
        left_s = self.ends_at - time.monotonic()
        if left_s <= 0:
            raise OutOfTimeError
        return get_traces(
            job,
            [setting.replace(compile=False) for setting in settings],
            strip_device(device),
            **more,
            families=self._families,
            worker=self._worker,
            partner=False,
            timeout_s=left_s,
        )
