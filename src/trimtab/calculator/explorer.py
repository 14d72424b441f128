"""Answers of the page: what a configuration needs, how fast it is, and what stops a larger one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.api.estimating import first_device, requested_setting
from trimtab.calculator.choices import ExploreChoice, JobChoices
from trimtab.calculator.owners import describe_owners
from trimtab.calculator.plans import ConfigQuestion, PlanStore
from trimtab.calculator.traces import TraceMissing, TraceStore, WorkQueue
from trimtab.errors import TrimtabError
from trimtab.jobs.load import find_job_name
from trimtab.pages.charts import LimitLine, draw_stack
from trimtab.pages.figures import list_memory_parts, list_time_parts
from trimtab.pages.svg import NARROW, WIDE, format_number
from trimtab.planner.estimates import estimate_settings, refuse_emulated
from trimtab.planner.explanations import add_run_totals
from trimtab.planner.largest import ValueSearch
from trimtab.probe.detect import as_cluster
from trimtab.render import describe_gradients, describe_setting
from trimtab.spec import Verdict
from trimtab.trace.number_options import read_number_options
from trimtab.units import format_bytes, format_duration, format_figure, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.pages.charts import BarPart
    from trimtab.predict.memory import MemoryPeaks
    from trimtab.spec import Cluster, Device, Estimate, Setting, Trace, Workload
    from trimtab.spec.requests import ExploreRequest
    from trimtab.training.job_queries import ParameterFacts

MOST_ANSWERS = 512
VERDICTS = {
    Verdict.FITS: "Fits",
    Verdict.FITS_TIGHT: "Fits tightly",
    Verdict.DOES_NOT_FIT: "Does not fit",
}


@dataclass(frozen=True)
class Question:
    """A choice with all that its estimate needs."""

    choice: ExploreChoice
    setting: Setting
    cluster: Cluster
    device: Device
    options: dict[str, Any]
    workload: Workload


@dataclass(frozen=True)
class ChoiceEstimate:
    """The estimate of a choice, and the memory at its peak."""

    estimate: Estimate
    peaks: MemoryPeaks


class Explorer:
    """Answers questions about the configurations of one job."""

    def __init__(self, request: ExploreRequest) -> None:
        name, changed = find_job_name(request.job)
        options = changed | (request.options or {})
        cluster = as_cluster(request.on, network=request.network, host_memory=request.host_memory)
        first_device(cluster)
        request.say("reading the job")
        numbers = read_number_options(name, options)
        self.traces = TraceStore(job=name, clip=request.clip)
        self.traces.read_workload(options)
        workload = self.traces.find_workload(options)
        assert workload is not None  # noqa: S101 - it was read
        self.choices = JobChoices(
            job=name, options=options, request=request, cluster=cluster, numbers=numbers, workload=workload
        )
        # A wrong word of the command is refused here, before the page is served.
        requested_setting(self.choices.make_request(self.choices.start()))
        self.queue = WorkQueue()
        self._answers: dict[ExploreChoice, ChoiceEstimate] = {}
        self._edges: dict[ExploreChoice, dict[str, Any]] = {}
        self.plans = PlanStore(self.choices, self.queue)

    def close(self) -> None:
        """End the background work and its process."""
        self.queue.close()
        self.traces.worker.close()

    def answer(self, choice: ExploreChoice) -> dict[str, Any]:
        """Return what a choice needs; or how far tracing it is; or why it is refused."""
        began = time.perf_counter()
        try:
            question = self._make_question(choice)
            described = self._describe(question, self._estimate(question))
        except TraceMissing as missing:
            return {"status": "tracing", **missing.progress}
        except TrimtabError as error:
            return {"status": "refused", "error": error.to_dict(), "command": self._try_command(choice)}
        return {"status": "ready", **described, "elapsed_ms": 1e3 * (time.perf_counter() - began)}

    def list_owners(self, choice: ExploreChoice) -> dict[str, Any]:
        """Return for each part of the memory what it is, and which modules own it."""
        try:
            question = self._make_question(choice)
            estimate, trace = self._estimate(question).estimate, self._find_trace(question)
            parameters = self._find_parameters(question.options)
        except TraceMissing as missing:
            return {"status": "tracing", **missing.progress}
        except TrimtabError as error:
            return {"status": "refused", "error": error.to_dict()}
        return {"status": "ready", "parts": describe_owners(estimate, question.setting, trace, parameters)}

    def _find_parameters(self, options: dict[str, Any]) -> dict[str, ParameterFacts]:
        parameters = self.traces.find_parameters(options)
        if parameters is None:
            raise TraceMissing(
                self.queue.ask(
                    f"parameters {options}",
                    "reading the parameters of the model",
                    lambda: self.traces.read_parameters(options),
                )
            )
        return parameters

    def open_plan(self, choice: ExploreChoice) -> dict[str, Any]:
        """Return where the page about the plan of a choice is, and the command that makes the plan."""
        try:
            setting = self._make_question(choice).setting
            name, plan = self.plans.find(choice, setting)
        except TraceMissing as missing:
            return {"status": "tracing", **missing.progress}
        except TrimtabError as error:
            return {"status": "refused", "error": error.to_dict()}
        return {
            "status": "ready",
            "page": f"plan/{name}",
            "setting": describe_setting(plan.choice),
            "command": self.plans.write_command(choice, setting),
        }

    def change_config(self, question: ConfigQuestion) -> dict[str, Any]:
        """Return the diff that writes a choice into a config file, or write it."""
        try:
            _, plan = self.plans.find(question.choice, self._make_question(question.choice).setting)
            return {"status": "ready", **self.plans.propose(plan, question)}
        except TraceMissing as missing:
            return {"status": "tracing", **missing.progress}
        except TrimtabError as error:
            return {"status": "refused", "error": error.to_dict()}

    def find_edge(self, choice: ExploreChoice) -> dict[str, Any]:
        """Return the largest micro-batch of a choice that fits, and what stops the next one."""
        alike = choice_without(choice, micro_batch=1, price=None)
        if alike not in self._edges:
            try:
                self._edges[alike] = self._search_edge(choice)
            except TraceMissing as missing:
                return {"status": "tracing", **missing.progress}
            except TrimtabError as error:
                return {"status": "refused", "error": error.to_dict()}
        return {"status": "ready", **self._edges[alike]}

    def _search_edge(self, choice: ExploreChoice) -> dict[str, Any]:
        def estimate(value: int) -> Estimate | TrimtabError:
            question = self._make_question(choice_without(choice, micro_batch=value))
            try:
                return self._compute(question, quick=True).estimate
            except TrimtabError as error:
                return error

        search = ValueSearch(estimate)
        largest = search.find(max(2, choice.micro_batch))
        following = min((value for value in search.answers if value > (largest or 0)), default=None)
        stops = "" if following is None else self._explain_next(choice, following)
        return {"largest": largest or 0, "next": following, "stops": stops}

    def _explain_next(self, choice: ExploreChoice, micro_batch: int) -> str:
        question = self._make_question(choice_without(choice, micro_batch=micro_batch))
        try:
            found = self._estimate(question)
        except TrimtabError as error:
            return f"{micro_batch:,} is refused: {error.found}."
        verdict = VERDICTS[found.estimate.verdict or Verdict.DOES_NOT_FIT].lower()
        name, share = find_largest_part(found.estimate)
        return f"{micro_batch:,} {verdict}: {share:.0%} of it is {name}."

    def _make_question(self, choice: ExploreChoice) -> Question:
        request = self.choices.make_request(choice)
        options = request.options or {}
        workload = self.traces.find_workload(options)
        if workload is None:
            progress = self.queue.ask(
                f"workload {options}", "reading the job", lambda: self.traces.read_workload(options)
            )
            raise TraceMissing(progress)
        cluster, setting = requested_setting(request)
        device = first_device(cluster)
        refuse_emulated(setting, device, cure="Choose precision fp16 or fp32, or another GPU.")
        return Question(choice, setting, cluster, device, options, workload)

    def _find_trace(self, question: Question) -> Trace:
        """Return the trace of a question; raise its error, or TraceMissing after queueing it."""
        asked = (question.setting, question.device, question.options)
        trace = self.traces.find(*asked)
        if trace is None:
            progress = self.queue.ask(
                self.traces.name(*asked),
                self.traces.describe(question.setting),
                lambda: self.traces.make(*asked),
            )
            raise TraceMissing(progress)
        if isinstance(trace, TrimtabError):
            raise trace
        return trace

    def _estimate(self, question: Question) -> ChoiceEstimate:
        key = choice_without(question.choice, price=None)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._compute(question)
            for oldest in list(self._answers)[:-MOST_ANSWERS]:
                self._answers.pop(oldest, None)
        return answer

    def _compute(self, question: Question, *, quick: bool = False) -> ChoiceEstimate:
        trace = self._find_trace(question)
        (result,) = estimate_settings(
            self.choices.job,
            [question.setting],
            question.device,
            cluster=question.cluster,
            overrides=question.options,
            clip=self.traces.clip,
            get=lambda *_, **__: [trace],
            quick=quick,
        )
        if isinstance(result, TrimtabError):
            raise result
        estimate, peaks, _ = result
        steps = question.workload.replace(global_batch=question.setting.global_batch)
        total = add_run_totals(estimate, question.setting, steps)
        warnings = self.traces.list_warnings(question.options, question.setting)
        return ChoiceEstimate(total.replace(assumptions=(*warnings, *total.assumptions)), peaks)

    def _try_command(self, choice: ExploreChoice) -> str:
        try:
            return self.choices.write_command(choice)
        except TrimtabError:
            return ""

    def _describe(self, question: Question, found: ChoiceEstimate) -> dict[str, Any]:
        estimate = found.estimate
        capacity = estimate.capacity_bytes or estimate.process_bytes
        verdict = estimate.verdict or Verdict.DOES_NOT_FIT
        share = estimate.process_bytes / capacity
        return {
            "verdict": verdict.value,
            "headline": f"{VERDICTS[verdict]}: {format_bytes(estimate.process_bytes)} of "
            f"{format_bytes(capacity)} ({share:.0%})",
            "reason": explain_verdict(found),
            "setting": f"{question.device.name}: {describe_setting(question.setting)}",
            "memory": describe_memory(estimate),
            "time": describe_time(estimate),
            "figures": list_figures(estimate, question),
            "step_note": describe_step(question),
            "assumptions": list(estimate.assumptions),
            "command": self.choices.write_command(question.choice),
        }


def choice_without(choice: ExploreChoice, **changes: Any) -> ExploreChoice:
    """Return a choice with some fields changed."""
    return msgspec.structs.replace(choice, **changes)


def explain_verdict(found: ChoiceEstimate) -> str:
    """Return what the peak is made of and when it is; before that, why it does not fit without more ado."""
    estimate = found.estimate
    reason = estimate.verdict_reason
    name, share = find_largest_part(estimate)
    most = f"Most of it, {share:.0%}, is {name}; the peak is in {_name_moment(found.peaks)}."
    return f"{reason[:1].upper()}{reason[1:]}. {most}" if reason else most


def find_largest_part(estimate: Estimate) -> tuple[str, float]:
    """Return the part that takes most of the memory, and its share."""
    largest = max(list_memory_parts(estimate), key=lambda part: part.value)
    return largest.name, largest.value / max(1, estimate.process_bytes)


def _name_moment(peaks: MemoryPeaks) -> str:
    number = peaks.phase.removeprefix("step")
    moment = f"step {int(number) + 1}" if peaks.phase.startswith("step") and number else peaks.phase
    return f"{moment or 'the step'}, at {peaks.operation}" if peaks.operation else moment


def describe_memory(estimate: Estimate) -> dict[str, Any]:
    """Return the memory bar as drawings, and its parts."""
    parts = list_memory_parts(estimate)
    total = sum(part.value for part in parts)
    capacity = estimate.capacity_bytes or 0
    high = estimate.band.high_bytes
    whole = max(capacity, high, total)
    limits = [LimitLine(high, f"at most {format_bytes(high)}", "band")]
    if capacity:
        limits.append(LimitLine(capacity, f"the GPU has {format_bytes(capacity)}"))
    return {
        "drawings": draw_bars("Memory of the fullest GPU by part", parts, limits, whole),
        "parts": list_parts(parts, total),
        "bytes": estimate.process_bytes,
        "whole": whole,
        "note": describe_gradients(estimate),
        "rank": estimate.fullest_rank,
    }


def describe_time(estimate: Estimate) -> dict[str, Any] | None:
    """Return the time of a step as drawings, and its parts; None if it is unknown."""
    step = estimate.step_time
    if step is None or not step.total_s:
        return None
    parts = list_time_parts(step)
    return {
        "drawings": draw_bars("Time of a step by part", parts, [], step.total_s),
        "parts": list_parts(parts, step.total_s),
        "seconds": step.total_s,
    }


def draw_bars(label: str, parts: list[BarPart], limits: list[LimitLine], whole: float) -> list[str]:
    """Draw a bar for a wide and for a narrow page."""
    return [
        str(draw_stack(label, parts, limits, whole=whole, width=width, has_rows=False))
        for width in (WIDE, NARROW)
    ]


def list_parts(parts: Sequence[BarPart], total: float) -> list[dict[str, Any]]:
    """Return the parts of a bar with their sizes and shares."""
    return [
        {"name": part.name, "value": part.value, "shown": part.shown, "share": part.value / (total or 1.0)}
        for part in parts
    ]


def describe_step(question: Question) -> str:
    """Say how many samples a step takes here, where the job's global batch is another number."""
    here, own = question.setting.global_batch, question.workload.global_batch
    if here == own:
        return ""
    return (
        f"A step here takes {here:,} samples, one micro-batch on each GPU. The job's global batch is "
        f"{own:,}, which trimtab plan keeps."
    )


def list_figures(estimate: Estimate, question: Question) -> list[dict[str, str]]:
    """Return the figures of a configuration by name; those that are unknown say why."""
    rate, length = estimate.samples_per_s, question.workload.sample_length
    hours, price = estimate.hours, question.choice.price
    no_time = "no speed data"
    figures = {
        "step": no_time if estimate.step_s is None else format_seconds(estimate.step_s),
        "tokens/s": no_time
        if rate is None
        else "tokens unknown"
        if length is None
        else format_number(rate * length),
        "samples/s": no_time if rate is None else format_number(rate),
        "MFU": "unknown" if estimate.mfu is None else f"{estimate.mfu:.1%}",
        "whole job": no_time
        if rate is None
        else "samples unknown"
        if hours is None
        else format_duration(3600 * hours),
        "GPU-hours": "unknown" if estimate.gpu_hours is None else format_figure(estimate.gpu_hours),
        "cost": "set a price"
        if price is None
        else "unknown"
        if estimate.gpu_hours is None
        else f"{estimate.gpu_hours * price:,.2f}",
    }
    return [{"name": name, "value": value} for name, value in figures.items()]
