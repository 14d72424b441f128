"""Traces for the page: those already made answer at once, others are made in the background."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError
from trimtab.jobs.registry import comes_with_trimtab
from trimtab.planner.batch_loss_rules import list_warnings
from trimtab.planner.estimator import strip_device, summarize_setting, to_traced_setting
from trimtab.predict.derive import derive_trace
from trimtab.predict.traces import get_traces, interpolate_family
from trimtab.spec import Trace
from trimtab.strategies import strategy_of
from trimtab.trace.job_summary import summarize_job
from trimtab.trace.loss_check import check_batch_loss
from trimtab.trace.request import TraceRequest
from trimtab.trace.server import WorkerProcess
from trimtab.trace.tracer import cached_family, family_key
from trimtab.training.job_queries import list_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.predict.traces import Family
    from trimtab.spec import BatchLoss, Device, Setting, Workload
    from trimtab.training.job_queries import ParameterFacts

    Answer = Trace | TrimtabError


class TraceMissing(Exception):  # noqa: N818 - an answer, no error
    """Something has to be traced or planned first; `progress` says how far that is."""

    def __init__(self, progress: dict[str, Any]) -> None:
        super().__init__(progress["what"])
        self.progress = progress


class WorkQueue:
    """One thread that does the newest work first; what nobody waits for any more is dropped."""

    PATIENCE_S = 5.0
    """Work that was not asked for again for so long is dropped before it starts."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: dict[str, tuple[str, Callable[[], None], float]] = {}
        """By key: what it is, the work, and when it was last asked for."""
        self._running = ""
        self._what = ""
        self._began = 0.0
        self._failures: dict[str, TrimtabError] = {}
        self._last_s: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="explore-traces")
        self._thread.start()

    def ask(self, key: str, what: str, work: Callable[[], None]) -> dict[str, Any]:
        """Queue work unless it is queued already; return its progress, or raise the error it ended with."""
        with self._lock:
            if key in self._failures:
                raise self._failures.pop(key)
            now = time.monotonic()
            if key == self._running:
                return {"what": what, "elapsed_s": now - self._began, "usual_s": self._last_s}
            self._waiting[key] = (what, work, now)
            self._lock.notify()
            before = self._what if self._running else ""
            return {"what": what, "elapsed_s": 0.0, "usual_s": self._last_s, "after": before}

    def close(self) -> None:
        """Start no more work."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._lock.notify()

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        with self._lock:
            while True:
                if self._closed:
                    return None
                oldest = time.monotonic() - self.PATIENCE_S
                self._waiting = {key: item for key, item in self._waiting.items() if item[2] >= oldest}
                if self._waiting:
                    key = max(self._waiting, key=lambda name: self._waiting[name][2])
                    self._what, work, _ = self._waiting.pop(key)
                    self._running, self._began = key, time.monotonic()
                    return key, work
                self._lock.wait()

    def _run(self) -> None:
        while (item := self._take()) is not None:
            key, work = item
            failure: TrimtabError | None = None
            try:
                work()
            except TrimtabError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the page shows it; the thread must live on
                failure = TrimtabError(
                    self._what,
                    found=f"{type(error).__name__}: {error}",
                    cure="This is a bug in trimtab. Please report it.",
                )
            with self._lock:
                if failure is not None:
                    self._failures[key] = failure
                elif not self._closed:
                    self._last_s = time.monotonic() - self._began
                self._running = ""


@dataclass
class TraceStore:
    """Traces of one job, by everything that they depend on."""

    job: str
    clip: float | None = None
    families: dict[str, Family] = field(default_factory=dict)
    workloads: dict[str, Workload] = field(default_factory=dict)
    batch_losses: dict[str, BatchLoss] = field(default_factory=dict)
    parameters: dict[str, dict[str, ParameterFacts]] = field(default_factory=dict)
    underivable: set[str] = field(default_factory=set)
    """Families whose traces do not follow from others: they are traced as they are."""
    worker: WorkerProcess = field(default_factory=WorkerProcess)

    def find_workload(self, options: dict[str, Any]) -> Workload | None:
        """Return the workload of the job with these options, if it is known."""
        return self.workloads.get(repr(sorted(options.items())))

    def read_workload(self, options: dict[str, Any]) -> None:
        """Read the workload of the job with these options; runs the job's code in another process."""
        key = repr(sorted(options.items()))
        self.workloads[key] = summarize_job(self.job, options)
        if not comes_with_trimtab(self.job):
            self.batch_losses[key] = check_batch_loss(self.job, options)

    def find_parameters(self, options: dict[str, Any]) -> dict[str, ParameterFacts] | None:
        """Return the parameters of the job's model, if they are known."""
        return self.parameters.get(repr(sorted(options.items())))

    def read_parameters(self, options: dict[str, Any]) -> None:
        """Read the parameters of the job's model; runs the job's code in another process."""
        self.parameters[repr(sorted(options.items()))] = list_parameters(self.job, options)

    def list_warnings(self, options: dict[str, Any], setting: Setting) -> tuple[str, ...]:
        """Return warnings about a setting that splits the batch of the job."""
        loss = self.batch_losses.get(repr(sorted(options.items())))
        return () if loss is None else list_warnings(loss, setting)

    def find(self, setting: Setting, device: Device, options: dict[str, Any]) -> Answer | None:
        """Return the trace of a setting from traces already made; None if something has to be traced."""
        for place in (device, strip_device(device)):
            answer = self._interpolate(setting, place, options)
            if answer is not None:
                return answer
        traced, parts = self._list_parts(setting, device, options)
        answers = [self._interpolate(part, strip_device(device), options) for part in parts]
        wrong = next((answer for answer in answers if isinstance(answer, TrimtabError)), None)
        traces = [answer for answer in answers if isinstance(answer, Trace)]
        if wrong is not None or len(traces) < len(parts):
            return wrong
        derived = derive_trace(traced, traces)
        if derived is None:
            self.underivable.add(family_key(self._request(traced, strip_device(device), options)))
        return derived

    def make(self, setting: Setting, device: Device, options: dict[str, Any]) -> None:
        """Trace what a setting needs."""
        _, parts = self._list_parts(setting, device, options)
        get_traces(
            self.job,
            parts,
            strip_device(device),
            overrides=options,
            clip=self.clip,
            families=self.families,
            worker=self.worker,
        )

    def describe(self, setting: Setting) -> str:
        """Say what is traced for a setting."""
        return f"tracing {summarize_setting(setting)} on fake tensors"

    def name(self, setting: Setting, device: Device, options: dict[str, Any]) -> str:
        """Return a key of what has to be traced for a setting."""
        _, parts = self._list_parts(setting, device, options)
        keys = [family_key(self._request(part, strip_device(device), options)) for part in parts]
        return f"{keys} {setting.micro_batch}"

    def _list_parts(
        self, setting: Setting, device: Device, options: dict[str, Any]
    ) -> tuple[Setting, list[Setting]]:
        """Return the setting as it is traced, and the settings whose traces give its trace."""
        traced = to_traced_setting(setting)
        key = family_key(self._request(traced, strip_device(device), options))
        direct = {traced.mesh.dp_shard} if key in self.underivable else set[int]()
        return traced, strategy_of(traced).trace_parts(traced, direct)

    def _interpolate(self, setting: Setting, device: Device, options: dict[str, Any]) -> Answer | None:
        request = self._request(setting, device, options)
        key = family_key(request)
        if key not in self.families:
            self.families[key] = dict(cached_family(request))
        return interpolate_family(dict(self.families[key]), setting.micro_batch)

    def _request(self, setting: Setting, device: Device, options: dict[str, Any]) -> TraceRequest:
        return TraceRequest(job=self.job, overrides=options, setting=setting, device=device, clip=self.clip)
