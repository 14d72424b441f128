"""Find the largest value of an option of a job that fits, and what twice as much would need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.api.estimating import first_device, requested_setting
from trimtab.errors import NothingFits, TrimtabError, UnknownName, WrongUse, find_nearest
from trimtab.spec.requests import EstimateRequest
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trimtab.planner.largest import ValueSearch
    from trimtab.predict.traces import Family
    from trimtab.spec import (
        Cluster,
        Device,
        Estimate,
        LargestValue,
        Setting,
        Trace,
        TwiceAsMuch,
    )
    from trimtab.spec.requests import MaxRequest
    from trimtab.trace.number_options import NumberOptions
    from trimtab.trace.server import WorkerProcess

MICRO_BATCH = "micro_batch"
SEQUENCE_STEP = 64
SEQUENCE_NAMES = frozenset(
    (
        *("seq", "seq_len", "seq_length", "sequence_length", "max_length", "max_len", "max_seq_length"),
        *("max_seq_len", "block_size", "context", "context_length", "length", "tokens", "n_positions"),
    )
)
"""Options that are a sequence length: only multiples of 64 are tried, unless --step says otherwise."""
USUAL_STARTS = {"lora": 8}
"""Where the search starts if the job has no value."""
SHARD_COUNTS = (2, 4, 8)
CARDS_TRIED = 3
NARROWER = {
    "fp32": ("bf16", "bf16-true"),
    "tf32": ("bf16", "bf16-true"),
    "bf16": ("bf16-true",),
    "fp16": (),
    "bf16-true": (),
}
"""Precisions that may need less memory, for a device that computes in bf16."""
CONFIRMATIONS = 3
"""How often a result from interpolated traces is confirmed by real ones before the search gives up."""


@dataclass
class LargestQuestion:
    """One question for the largest value, with the traces made for it."""

    request: MaxRequest
    worker: WorkerProcess
    families: dict[str, Family] = field(default_factory=dict)
    """Traces by micro-batch."""
    lines: dict[str, Family] = field(default_factory=dict)
    """Traces by the value that is searched for."""
    real: bool = False
    """Whether nothing is interpolated any more."""

    def __post_init__(self) -> None:
        self.of = self.request.of.strip().replace("-", "_").lower()
        if self.of not in (name := self.request.of, MICRO_BATCH) and name.isidentifier():
            self.of = name
        step = self.request.step
        if step is not None and step < 1:
            raise WrongUse(f"--step {step}", found="it is below 1", cure="Give at least 1.")
        self.step = step or (SEQUENCE_STEP if self.of in SEQUENCE_NAMES else 1)
        self._refuse_fixed()
        fields = {
            name: value
            for name, value in self.request.arguments().items()
            if name not in ("of", "step", "say", MICRO_BATCH)
        }
        self.base = EstimateRequest(**fields, micro_batch=self.request.micro_batch or 1)

    def _refuse_fixed(self) -> None:
        """Refuse to search for what is also given."""
        options = self.request.options or {}
        given = self.request.micro_batch if self.of == MICRO_BATCH else options.get(self.of)
        if given is not None:
            raise WrongUse(
                f"--of {self.of}",
                found=f"{self.of} is also fixed to {given}",
                cure="Leave one of the two out.",
            )

    def answer(self) -> LargestValue:
        """Return the largest value, or raise NothingFits."""
        from trimtab.planner.largest import MOST, ValueSearch

        self.request.say("reading the job")
        self.where, _ = requested_setting(self.base, any_batch=True)
        self.numbers = self._read_numbers()
        self.limit = self.numbers.limits.get(self.of, MOST)
        start = self._start()
        # A value at which torch must release cached blocks counts only if none fits without that.
        for self.tight in (False, True):
            search = ValueSearch(
                self.estimate_value, step=self.step, limit=min(self.limit, MOST), tight=self.tight
            )
            largest = search.find(start)
            if largest is not None:
                largest = self._confirm(search, largest)
            if largest is not None:
                return self._result(search, largest)
        raise self._nothing_fits(min(self.step, start))

    def _read_numbers(self) -> NumberOptions:
        """Return the whole-number options of the job; raise if the one asked for is not among them."""
        from trimtab.jobs.load import find_job_name
        from trimtab.trace.number_options import read_number_options

        name, changed = find_job_name(self.base.job)
        numbers = read_number_options(name, changed | (self.base.options or {}), cache=self.base.cache)
        if self.of != MICRO_BATCH and self.of not in numbers.values:
            known = [MICRO_BATCH, *sorted(numbers.values)]
            close = find_nearest(self.of, known)
            meant = f"; did you mean {' or '.join(close[:2])}?" if close else ""
            raise UnknownName(
                f"--of {self.request.of}",
                found=f"job {name} has no whole-number option {self.of!r}{meant}",
                cure=f"It can be {', '.join(known)}.",
            )
        return numbers

    def _start(self) -> int:
        value = 1 if self.of == MICRO_BATCH else self.numbers.values[self.of]
        if value is None and self.of in SEQUENCE_NAMES:
            value = self.numbers.sample_length
        return value if value is not None and value > 0 else USUAL_STARTS.get(self.of, 1)

    def with_value(self, value: int, **changes: Any) -> EstimateRequest:
        """Return the request for an estimate at a value."""
        if self.of == MICRO_BATCH:
            return self.base.replace(micro_batch=value, **changes)
        return self.base.replace(options={**(self.base.options or {}), self.of: value}, **changes)

    def estimate_value(self, value: int) -> Estimate | TrimtabError:
        """Return the estimate at a value, or the error."""
        self.request.say(f"{self.of} {value:,}")
        return self.estimate(self.with_value(value), quick=not self.tight)[1]

    def estimate(
        self, request: EstimateRequest, *, real: bool = False, quick: bool = False
    ) -> tuple[Setting | None, Estimate | TrimtabError]:
        """Return the setting and the estimate of a request, or the error.

        With `real` nothing is interpolated. With `quick` there is no difference between fitting tightly and
        not fitting.
        """
        from trimtab.jobs.load import find_job_name
        from trimtab.planner.estimates import estimate_settings

        setting = None
        try:
            where, setting = requested_setting(request, any_batch=True)
            name, changed = find_job_name(request.job)
            (answer,) = estimate_settings(
                name,
                [setting],
                first_device(where),
                cluster=where,
                overrides=changed | (request.options or {}),
                clip=request.clip,
                cache=request.cache,
                get=self._get_real_traces if real else self._get_traces,
                quick=quick,
            )
        except TrimtabError as error:
            return setting, error
        return setting, answer if isinstance(answer, TrimtabError) else answer[0]

    def _get_traces(
        self, job: str, settings: Sequence[Setting], device: Device, **more: Any
    ) -> list[Trace | TrimtabError]:
        """Return eager traces, interpolated if there are two others on whose line a value may be."""
        from trimtab.predict.traces import get_traces, interpolate_family

        if self.real:
            return self._get_real_traces(job, settings, device, **more)
        eager = [setting.replace(compile=False) for setting in settings]
        if self.of == MICRO_BATCH:
            return get_traces(job, eager, device, **more, families=self.families, worker=self.worker)
        line = self.lines.get(self._line_key(job, eager[0], device, **more), {})
        guess = interpolate_family(line, more["overrides"][self.of])
        if guess is not None and not isinstance(guess, TrimtabError):
            return [guess]
        return self._get_real_traces(job, settings, device, **more)

    def _get_real_traces(
        self, job: str, settings: Sequence[Setting], device: Device, **more: Any
    ) -> list[Trace | TrimtabError]:
        """Trace a setting itself, and use the trace for all that is interpolated later."""
        from trimtab.trace.tracer import trace_settings

        eager = [setting.replace(compile=False) for setting in settings]
        traces = trace_settings(job, eager, device, **more, worker=self.worker)
        for setting, trace in zip(eager, traces, strict=True):
            key = self._line_key(job, setting, device, **more)
            if self.of == MICRO_BATCH:
                self.families.setdefault(key, {})[setting.micro_batch] = trace
            else:
                self.lines.setdefault(key, {})[more["overrides"][self.of]] = trace
        return traces

    def _line_key(self, job: str, setting: Setting, device: Device, **more: Any) -> str:
        """Return a key of all that a trace depends on, except the value that is searched for."""
        from trimtab.trace.request import TraceRequest
        from trimtab.trace.tracer import family_key

        options = {name: value for name, value in more["overrides"].items() if name != self.of}
        request = TraceRequest(job=job, overrides=options, setting=setting, device=device, clip=more["clip"])
        # The family of a micro-batch; other options are searched for at one micro-batch.
        return family_key(request)

    def _confirm(self, search: ValueSearch, largest: int) -> int | None:
        """Return the largest value after real traces at it and at the next one agree."""
        for _ in range(CONFIRMATIONS):
            self.request.say(f"confirming {self.of} {largest:,}")
            above = min((value for value in search.answers if value > largest), default=None)
            confirmed = {}
            for value in (largest, above):
                if value is not None:
                    request = self.with_value(value)
                    confirmed[value] = self.estimate(request, real=True, quick=not self.tight)[1]
            search.answers |= confirmed
            if search.fits(largest) and (above is None or not search.fits(above)):
                return largest
            # The other answers were interpolated without these traces.
            search.answers = confirmed
            found = search.find(largest)
            if found is None:
                return None
            largest = found
        self.real, search.answers = True, {}
        return search.find(largest)

    def _result(self, search: ValueSearch, largest: int) -> LargestValue:
        from trimtab.jobs.load import find_job_name
        from trimtab.planner.suggestions import format_devices
        from trimtab.spec import LargestValue, TriedValue, ValueLimit

        limit, reason = self._explain_limit(search, largest)
        if limit is ValueLimit.SEARCH and not search.grows():
            raise WrongUse(
                f"--of {self.of}",
                found=f"the memory of a step does not grow with {self.of}: it was tried up to {largest:,}",
                cure=f"Choose another of {', '.join([MICRO_BATCH, *sorted(self.numbers.values)])}.",
            )
        setting, estimate = self.estimate(self.with_value(largest))
        if isinstance(estimate, TrimtabError) or setting is None:
            raise estimate if isinstance(estimate, TrimtabError) else AssertionError
        return LargestValue(
            job=find_job_name(self.base.job)[0],
            of=self.of,
            largest=largest,
            step=self.step,
            limit=limit,
            limit_reason=reason,
            on=format_devices(self.where),
            setting=setting,
            estimate=estimate,
            next=self._double(search, largest, limit, reason),
            tried=tuple(
                TriedValue(value=value, verdict=None, error=answer.found)
                if isinstance(answer, TrimtabError)
                else TriedValue(value=value, verdict=answer.verdict, process_bytes=answer.process_bytes)
                for value, answer in sorted(search.answers.items(), key=lambda pair: pair[0])
            ),
            notes=tuple(self._list_notes(largest, estimate)),
        )

    def _explain_limit(self, search: ValueSearch, largest: int) -> tuple[Any, str]:
        """Return what keeps the value from being larger, and why in words."""
        from trimtab.spec import ValueLimit, Verdict

        if largest == self.limit and self.of in self.numbers.limits:
            return ValueLimit.JOB, self.numbers.reasons[self.of]
        above = min((value for value in search.answers if value > largest), default=None)
        if above is None:
            return ValueLimit.SEARCH, f"larger values than {largest:,} were not tried"
        answer = search.answers[above]
        if not isinstance(answer, TrimtabError):
            # The search does not tell fitting tightly from not fitting.
            answer = search.answers[above] = self.estimate(self.with_value(above))[1]
        if isinstance(answer, TrimtabError):
            return ValueLimit.JOB, f"at {self.of} {above:,} the job fails: {answer.found}"
        capacity = format_bytes(answer.capacity_bytes or 0)
        need = f"{self.of} {above:,} needs {format_bytes(answer.band.high_bytes)} of {capacity} (upper band)"
        if answer.verdict is Verdict.FITS_TIGHT:
            need += "; it runs only if torch releases cached blocks, which may be slow"
        return ValueLimit.MEMORY, need

    def _list_notes(self, largest: int, estimate: Estimate) -> Iterator[str]:
        from trimtab.spec import Verdict

        if self.step > 1:
            yield f"only multiples of {self.step} were tried (--step), and the job's own limit"
        if estimate.verdict is Verdict.FITS_TIGHT:
            yield f"even at {largest:,} torch has to release cached blocks, which may be slow"
        if self.of == MICRO_BATCH:
            yield (
                "a larger batch per optimizer step needs no more than this: use gradient accumulation, as "
                "`trimtab plan` does"
            )

    def _double(self, search: ValueSearch, largest: int, limit: Any, reason: str) -> TwiceAsMuch:
        """Return what twice the largest value would need."""
        from trimtab.spec import TwiceAsMuch, ValueLimit

        twice = 2 * largest
        if twice > self.limit or limit is ValueLimit.SEARCH:
            return TwiceAsMuch(value=twice, why_not=reason)
        answer = search.ask(twice)
        if isinstance(answer, TrimtabError):
            return TwiceAsMuch(value=twice, why_not=f"at {self.of} {twice:,} the job fails: {answer.found}")
        return self._try_changes(twice, answer)

    def _try_changes(self, value: int, estimate: Estimate) -> TwiceAsMuch:
        """Try changes at a value, the cheapest first, up to the first that fits."""
        from trimtab.spec import SuggestedChange, TriedChange, TwiceAsMuch, Verdict

        tried: list[TriedChange] = []
        known = {"": estimate}
        for flags, changes in list_changes(self.base, self.where, estimate.band.high_bytes):
            plain = known.get("full" if changes.get("recompute") else "", estimate)
            if why := explain_shortage(plain, changes):
                tried.append(TriedChange(what=flags, verdict=Verdict.DOES_NOT_FIT, error=why))
                continue
            self.request.say(f"{self.of} {value:,} with {flags}")
            setting, answer = self.estimate(self.with_value(value, **changes))
            if isinstance(answer, TrimtabError) or setting is None:
                found = answer.found if isinstance(answer, TrimtabError) else ""
                tried.append(TriedChange(what=flags, verdict=None, error=found))
                continue
            if answer.verdict is Verdict.FITS_TIGHT and self.base.allocator != "expandable":
                what, setting, answer = self._expand(value, flags, changes) or (flags, setting, answer)
            else:
                what = flags
            if changes == {"recompute": "full"}:
                known["full"] = answer
            tried.append(TriedChange(what=what, verdict=answer.verdict, process_bytes=answer.process_bytes))
            if answer.fits:
                change = SuggestedChange(what=what, setting=setting, estimate=answer)
                return TwiceAsMuch(value=value, change=change, tried=tuple(tried))
        why = f"none of the {len(tried)} changes tried makes it fit"
        return TwiceAsMuch(value=value, why_not=why, tried=tuple(tried))

    def _expand(
        self, value: int, flags: str, changes: dict[str, Any]
    ) -> tuple[str, Setting, Estimate] | None:
        """Return what fits tightly with expandable segments, if it then fits; it needs no other trace."""
        from trimtab.spec import Verdict

        request = self.with_value(value, **changes, allocator="expandable")
        setting, answer = self.estimate(request)
        if setting is None or isinstance(answer, TrimtabError) or answer.verdict is not Verdict.FITS:
            return None
        return f"{flags} --allocator expandable", setting, answer

    def _nothing_fits(self, smallest: int) -> NothingFits:
        """Return the error if even the smallest value does not fit, with a change that would fit."""
        from trimtab.jobs.load import find_job_name
        from trimtab.planner.suggestions import format_devices

        estimate = self.estimate(self.with_value(smallest))[1]
        if isinstance(estimate, TrimtabError):
            raise estimate
        nearest = self._try_changes(smallest, estimate)
        change = nearest.change
        error = NothingFits(
            f"--of {self.of} for {find_job_name(self.base.job)[0]} on {format_devices(self.where)}",
            found=f"nothing fits: even {self.of} {smallest} needs {format_bytes(estimate.need_bytes)} "
            f"(upper band), and {format_bytes(estimate.capacity_bytes or 0)} are free",
            cure=f"This would fit: {change.what} ({format_bytes(change.estimate.process_bytes)})."
            if change
            else "Nothing near fits either: a smaller model, or larger GPUs with --on.",
        )
        error.nearest = (change,) if change else ()
        return error


def explain_shortage(estimate: Estimate, changes: dict[str, Any]) -> str:
    """Return why a change cannot make it fit, by a lower bound that needs no trace; empty if it may.

    fsdp shards weights, gradients and optimizer state, and leaves the rest. A narrower precision at best
    halves all tensors.
    """
    parts = estimate.parts
    sharded = parts.weights + parts.gradients + parts.optimizer
    least = estimate.allocated_bytes
    if "strategy" in changes:
        least -= sharded - sharded // len(changes["on"].devices)
    if "precision" in changes:
        least //= 2
    if least == estimate.allocated_bytes:
        return ""
    context = estimate.process_bytes - estimate.reserved_bytes
    least = estimate.with_band(least + context)
    if estimate.capacity_bytes is None or least <= estimate.capacity_bytes:
        return ""
    return f"it would still need {format_bytes(least)} or more"


def list_changes(
    request: EstimateRequest, where: Cluster, need_bytes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes that save memory, the cheapest first: as flags, and as fields of an EstimateRequest."""
    device = first_device(where)
    full = {} if request.recompute == "full" else {"recompute": "full"}
    if full:
        yield "--recompute full", full
    narrower = NARROWER.get(request.precision, ()) if device.bf16 is not False else ()
    for precision in narrower:
        yield f"--precision {precision}", {"precision": precision}
    if full and narrower:
        yield f"--recompute full --precision {narrower[-1]}", full | {"precision": narrower[-1]}
    if request.optimizer != "fused":
        yield "--optimizer fused", {"optimizer": "fused"}
    yield from _list_shardings(request, where, device, full)
    yield from _list_cards(where, device, need_bytes)


def _list_shardings(
    request: EstimateRequest, where: Cluster, device: Device, full: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield fsdp over more GPUs of the same kind."""
    from trimtab.planner.suggestions import imagine_cluster
    from trimtab.strategies import STRATEGIES

    if device.slice:
        # NCCL does not connect MIG slices.
        return
    strategy = STRATEGIES.get(request.strategy)
    gpus = len(where.devices) if request.gpus is None else request.gpus
    least = gpus + 1 if strategy is not None and strategy.is_sharded else gpus
    dropped = {"--compile": request.compile, "--optimizer-in-backward": request.optimizer_in_backward}
    flags_dropped = " and ".join(flag for flag, is_given in dropped.items() if is_given)
    kept = f" without {flags_dropped}" if flags_dropped else ""
    for count in SHARD_COUNTS:
        if count < least:
            continue
        cluster = imagine_cluster(where, device, count)
        changes: dict[str, Any] = {"strategy": "fsdp", "on": cluster, "network": None, "gpus": None}
        changes |= {"compile": False, "sync_batchnorm": False, "optimizer_in_backward": False}
        flags = f"--strategy fsdp --on {count}x{_typed_name(device)}{kept}"
        yield flags, changes
        if full:
            yield f"{flags} --recompute full", changes | full


def _list_cards(where: Cluster, device: Device, need_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the smallest GPUs of the catalogue that have enough memory, as many as there are now."""
    from trimtab.catalog.tables import devices
    from trimtab.planner.suggestions import imagine_cluster

    count = 1 if device.slice else len(where.devices)
    enough = [row for row in devices() if row.usable_bytes >= need_bytes and row.vendor == "nvidia"]
    for row in sorted(enough, key=lambda row: row.usable_bytes)[:CARDS_TRIED]:
        cluster = imagine_cluster(where, device.replace(model=row.name, slice=None), count)
        name = row.typed[0] if count == 1 else f"{count}x{row.typed[0]}"
        yield f"--on {name}", {"on": cluster, "network": None, "gpus": None}


def _typed_name(device: Device) -> str:
    """Return the name of a device as --on takes it."""
    from trimtab.catalog.tables import devices

    return next((row.typed[0] for row in devices() if row.name == device.model), device.name)
