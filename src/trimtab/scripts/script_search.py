"""Search the settings of a training command with few runs: each takes the script 10 to 60 seconds.

Memory is linear in the micro-batch, and the time of a step is linear in its inverse while the global batch
stays. Two runs give both lines; the setting that they point to is run to make sure.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.errors import TrimtabError, WrongUse
from trimtab.planner.search import predict_on_line
from trimtab.planner.space import can_run, default_precision
from trimtab.scripts.knob_values import list_precisions, write_setting, write_values
from trimtab.scripts.knobs import VALUES
from trimtab.spec import Precision, Recompute
from trimtab.units import format_bytes, format_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.scripts.knobs import KnobSet
    from trimtab.spec import Cluster, Estimate, PhasePeak, Policy, ScriptCommand, ScriptReport, Setting

MOST_RUNS = 16
"""Runs of the script in one search."""
MOST_COMBINATIONS = 8
"""Combinations of the values that --vary lists."""
MOST_CHECKS = 4
"""Runs to find the micro-batch that the lines of two runs point to."""
TIE = 0.01
"""A larger micro-batch must save more than this share of the time."""
RECOMPUTE_COST = 1.25
"""Recomputing all blocks takes about this much more computation: 4 passes of the model instead of 3."""


LONGEST = "longest batch"
"""The phase of a step with the longest batch that the data set can give."""


def need_with_longest(estimate: Estimate, phases: Sequence[PhasePeak]) -> int:
    """Return the free memory that a script needs, with the longest batch of its data set."""
    longest = next((phase for phase in phases if phase.name == LONGEST), None)
    if longest is None:
        return estimate.need_bytes
    process = estimate.process_bytes - estimate.reserved_bytes + longest.reserved_bytes
    return max(estimate.need_bytes, estimate.with_band(process))


class ScriptRun(Protocol):
    """What a run of a command on the pretended GPU showed."""

    @property
    def estimate(self) -> Estimate:
        """Memory and speed."""

    @property
    def setting(self) -> Setting:
        """What it trained with."""

    @property
    def script(self) -> ScriptReport:
        """What was found out."""

    @property
    def phases(self) -> tuple[PhasePeak, ...]:
        """Peaks of its phases."""


class RunScript(Protocol):
    """Runs a command on the pretended GPU of a cluster; `say` gets what the script prints, line by line."""

    def __call__(
        self, command: ScriptCommand, cluster: Cluster, /, *, say: Callable[[str], None]
    ) -> ScriptRun:
        """Return what the run showed."""


if TYPE_CHECKING:
    Values = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class ScriptAttempt:
    """A setting that was run, or the reason why it could not be."""

    setting: Setting
    command: ScriptCommand
    changes: tuple[str, ...]
    values: Values = ()
    """Values of options that only --vary knows."""
    limit_bytes: int
    run: ScriptRun | None = None
    error: TrimtabError | None = None

    @property
    def need_bytes(self) -> int:
        """Memory that it needs, with the longest batch; 0 if it failed."""
        return 0 if self.run is None else need_with_longest(self.run.estimate, self.run.phases)

    @property
    def fits(self) -> bool:
        """Whether it runs in the memory that the policy allows."""
        return self.run is not None and self.need_bytes <= self.limit_bytes

    @property
    def sample_s(self) -> float | None:
        """Seconds per sample of all GPUs; None if unknown."""
        step_s = None if self.run is None else self.run.estimate.step_s
        return None if step_s is None else step_s / self.setting.global_batch

    @property
    def order(self) -> tuple[float, int]:
        """Sort key: the fastest first; without times, the largest micro-batch."""
        return (self.sample_s or 0.0, -self.setting.micro_batch if self.sample_s is None else 0)


@dataclass
class ScriptSearch:
    """The search: what was run, and what was ruled out without a run."""

    command: ScriptCommand
    knobs: KnobSet
    now: Setting
    """What the command trains with as it was given, on the processes of the plan."""
    cluster: Cluster
    policy: Policy
    limit_bytes: int
    run_script: RunScript
    say: Callable[[str], None] = lambda _: None
    say_best: Callable[[str], None] = lambda _: None
    attempts: list[ScriptAttempt] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why something was not tried."""
    complete: bool = True
    splits: tuple[int, ...] = ()
    """Micro-batches to choose from, ascending."""

    def find_best(self) -> ScriptAttempt | None:
        """Return the fastest setting that fits; None if none does. Ctrl-C ends it with the best so far."""
        self.splits = list_micro_batches(self.knobs, self.now, self.policy)
        try:
            self._search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.complete = False
        return self.best

    @property
    def best(self) -> ScriptAttempt | None:
        """The fastest attempt that fits."""
        return min(
            (attempt for attempt in self.attempts if attempt.fits), key=lambda item: item.order, default=None
        )

    def _search(self) -> None:
        recomputes = self._list_recomputes()
        compiles = self._list_compiles()
        for values, precision in itertools.product(list_combinations(self.knobs), self._list_precisions()):
            for number, recompute in enumerate(recomputes):
                base = self.now.replace(precision=precision, recompute=recompute, compile=compiles[0])
                if not number or self._may_gain(recompute):
                    self._search_micro_batches(base, values)
            best = self.best
            for compiled in compiles[1:]:
                if best is not None:
                    self.attempt(best.setting.replace(compile=compiled), best.values)
        if self.best is None and all(attempt.run is None for attempt in self.attempts[1:]):
            # The script may fail in the other precision.
            self._search_micro_batches(self.now, ())

    def _list_precisions(self) -> list[Precision]:
        """Return the precisions to try: those that --vary lists, or the narrow one of the device."""
        now = self.now.precision
        if "precision" in self.policy.pins:
            return [Precision(str(self.policy.pins["precision"]))]
        if not self.knobs.may_vary("precision"):
            return [now]
        sayable = [
            precision
            for precision in list_precisions(self.knobs)
            if all(can_run(device, precision) for device in self.cluster.devices)
        ]
        if any(knob.values for knob in self.knobs.of("precision")):
            words = self._allowed_words("precision", [precision.value for precision in sayable])
            return [Precision(word) for word in words] or [now]
        best = default_precision(self.cluster.devices)
        return [best] if best in sayable and not now.dtypes.is_narrow else [now]

    def _allowed_words(self, field_name: str, words: Sequence[str]) -> list[str]:
        """Return the words of a field that --vary allows."""
        listed = [(knob, knob.values) for knob in self.knobs.of(field_name) if knob.values]
        if not listed:
            return list(words)
        return [word for word in words if any(knob.words.get(word) in values for knob, values in listed)]

    def _list_recomputes(self) -> list[Recompute]:
        """Return the ways of recomputing to try, the fastest first."""
        if "recompute" in self.policy.pins:
            return [Recompute(str(self.policy.pins["recompute"]))]
        if not self.knobs.may_vary("recompute"):
            return [self.now.recompute]
        words = {word for knob in self.knobs.of("recompute") for word in knob.words} | {
            self.now.recompute.value
        }
        order = [word for word in ("none", "selective", "full") if word in words]
        return [
            Recompute(word) for word in self._allowed_words("recompute", order) or [self.now.recompute.value]
        ]

    def _list_compiles(self) -> list[bool]:
        if "compile" in self.policy.pins:
            return [bool(self.policy.pins["compile"])]
        now = self.now.compile
        if not self.knobs.may_vary("compile"):
            return [now]
        words = self._allowed_words("compile", ["false", "true"])
        return [now, *(other for other in (True, False) if other is not now and str(other).lower() in words)]

    def _may_gain(self, recompute: Recompute) -> bool:
        """Return whether recomputing can beat the best so far, which is true if nothing fits."""
        best = self.best
        if best is None or best.sample_s is None:
            return best is None
        if self.now.recompute is recompute and best.setting.recompute is not recompute:
            return False
        largest = self.splits[-1] if self.splits else best.setting.micro_batch
        least = self._predict_sample_s(best, largest)
        if least is not None and least * RECOMPUTE_COST >= best.sample_s:
            self.skipped.append(
                f"recompute {recompute.value}: it computes more, and a larger micro-batch would not make "
                "up for that"
            )
            return False
        return True

    def _search_micro_batches(self, base: Setting, values: Values) -> None:
        """Run some micro-batches of a way to compute: two that give the lines, and the one that they give."""
        if not self.splits:
            self.attempt(base, values)
            return
        start = min(self.splits, key=lambda micro: abs(micro - base.micro_batch))
        first = self.attempt(self.split(base, start), values)
        if first.run is None or (first.fits and start == self.splits[-1]):
            # A smaller micro-batch has more forward passes, and is no faster.
            return
        if len(self.splits) == 1:
            return
        self.attempt(self.split(base, self._second(start, fits=first.fits)), values)
        for _ in range(MOST_CHECKS):
            micro = self._predict_best(base, values)
            if micro is None or any(
                attempt.setting.micro_batch == micro for attempt in self._alike(base, values)
            ):
                return
            self.attempt(self.split(base, micro), values)

    def _second(self, start: int, *, fits: bool) -> int:
        """Return the second micro-batch to run: about twice or half of the first."""
        aim = start * 2 if fits else start / 2
        others = [micro for micro in self.splits if micro != start]
        same_side = [micro for micro in others if (micro > start) == fits] or others
        return min(same_side, key=lambda micro: abs(micro - aim))

    def _alike(self, base: Setting, values: Values) -> list[ScriptAttempt]:
        """Return the attempts that differ from a setting in the batch only."""
        return [
            attempt
            for attempt in self.attempts
            if attempt.run is not None
            and attempt.values == values
            and self.split(attempt.setting, 1) == self.split(base, 1)
        ]

    def _predict_best(self, base: Setting, values: Values) -> int | None:
        """Return the fastest micro-batch of those that should fit; the smallest if none should."""
        points = self._alike(base, values)
        needs = {attempt.setting.micro_batch: attempt.need_bytes for attempt in points}
        if len(needs) < 2:  # noqa: PLR2004 - a line
            return None
        too_large = {attempt.setting.micro_batch for attempt in points if not attempt.fits}
        fitting = [
            micro
            for micro in self.splits
            if (predict_on_line(needs, micro) or 0) <= self.limit_bytes and micro not in too_large
        ]
        if not fitting:
            return None if self.splits[0] in needs else self.splits[0]
        known = next(iter(points))
        times = {micro: self._predict_sample_s(known, micro) for micro in fitting}
        if any(seconds is None for seconds in times.values()):
            return fitting[-1]
        least = min(seconds for seconds in times.values() if seconds is not None)
        return next(micro for micro in fitting if (times[micro] or 0) <= least * (1 + TIE))

    def _predict_sample_s(self, like: ScriptAttempt, micro: int) -> float | None:
        """Return the seconds per sample at a micro-batch, by the line in its inverse through two runs."""
        points = {
            attempt.setting.micro_batch: attempt.sample_s
            for attempt in self._alike(like.setting, like.values)
            if attempt.sample_s is not None
        }
        if micro in points:
            return points[micro]
        if len(points) < 2:  # noqa: PLR2004 - a line
            return None
        first, second = sorted(points, key=lambda point: abs(1 / point - 1 / micro))[:2]
        slope = (points[second] - points[first]) / (1 / second - 1 / first)
        return max(0.0, points[first] + slope * (1 / micro - 1 / first))

    def predict_need(self, like: ScriptAttempt, micro: int) -> int | None:
        """Return the bytes that a micro-batch should need, by the line through other runs."""
        plain = like.setting.replace(compile=self.now.compile)
        needs = {
            attempt.setting.micro_batch: attempt.need_bytes for attempt in self._alike(plain, like.values)
        }
        predicted = predict_on_line(needs, micro)
        return None if predicted is None else int(predicted)

    def split(self, base: Setting, micro: int) -> Setting:
        """Return a setting with another micro-batch; accumulation keeps the global batch."""
        per_rank = base.global_batch // base.data_parallel
        if self.knobs.has_accumulation and per_rank % micro == 0:
            return base.replace(micro_batch=micro, accumulation=per_rank // micro)
        # The script cannot accumulate more or less: the global batch changes with the micro-batch.
        return base.replace(
            micro_batch=micro,
            accumulation=self.now.accumulation,
            global_batch=micro * self.now.accumulation * base.data_parallel,
        )

    def attempt(self, setting: Setting, values: Values) -> ScriptAttempt:
        """Run a setting, or return what is known of it."""
        for known in self.attempts:
            if known.setting == setting and known.values == values:
                return known
        made = self._make_attempt(setting, values)
        self.attempts.append(made)
        if made is self.best:
            self.say_best(describe_attempt(made))
        return made

    def _make_attempt(self, setting: Setting, values: Values) -> ScriptAttempt:
        command = self.command
        changes: tuple[str, ...] = ()
        outcome: dict[str, Any] = {}
        try:
            command, changes = write_setting(self.command, self.knobs, setting, now=self.now)
            if values:
                command, more = write_values(command, self.knobs, dict(values))
                changes = (*changes, *more)
            if len(self.attempts) >= MOST_RUNS:
                raise WrongUse(
                    f"{MOST_RUNS} runs of the script",
                    found="the search has had as many",
                    cure="Give fewer values with --vary.",
                )
            run = self.run(command, changes)
            self._refuse_no_effect(setting, run, changes)
            outcome["run"] = run
        except TrimtabError as error:
            outcome["error"] = error
        return ScriptAttempt(
            setting=setting,
            values=values,
            command=command,
            changes=changes,
            limit_bytes=self.limit_bytes,
            **outcome,
        )

    def run(self, command: ScriptCommand, changes: Sequence[str]) -> ScriptRun:
        """Run a command, and show which run it is and what its script prints."""
        doing = f"run {len(self.attempts) + 1}: {describe_changes(changes)}"
        self.say(doing)
        return self.run_script(command, self.cluster, say=lambda line: self.say(f"{doing}, printing: {line}"))

    def _refuse_no_effect(self, setting: Setting, run: ScriptRun, changes: tuple[str, ...]) -> None:
        """Raise if the script did the same as without the change of the batch: it reads it from elsewhere."""
        first = self.attempts[0].run if self.attempts else None
        if first is None or setting.micro_batch == self.attempts[0].setting.micro_batch:
            return
        seen, before = run.setting, first.setting
        is_same = (seen.micro_batch, seen.accumulation) == (before.micro_batch, before.accumulation)
        if is_same and run.estimate.allocated_bytes == first.estimate.allocated_bytes:
            raise WrongUse(
                ", ".join(changes),
                found=f"it changes nothing: the model still gets {seen.micro_batch} samples",
                cure="Name the option that sets the batch size with --vary.",
            )


def describe_changes(changes: Sequence[str]) -> str:
    """Return what a run changes in the command, in words."""
    return ", ".join(changes) or "the command as it is"


def describe_attempt(attempt: ScriptAttempt) -> str:
    """Return an attempt in a few words."""
    speed = "" if not attempt.sample_s else f", {format_figure(1 / attempt.sample_s)} samples/s"
    return f"{describe_changes(attempt.changes)}: {format_bytes(attempt.need_bytes)}{speed}"


def list_combinations(knobs: KnobSet) -> Iterator[Values]:
    """Yield the combinations of values that --vary lists for options of unknown meaning.

    >>> from trimtab.scripts.knobs import KnobSet
    >>> list(list_combinations(KnobSet()))
    [()]
    """
    listed = [[(knob.name, value) for value in knob.values] for knob in knobs.of(VALUES)]
    count = 1
    for values in listed:
        count *= len(values)
    if count > MOST_COMBINATIONS:
        raise WrongUse(
            f"--vary with {count} combinations of values",
            found=f"each needs several runs of the script, and at most {MOST_COMBINATIONS} are tried",
            cure="Give fewer values.",
        )
    yield from itertools.product(*listed)


def list_micro_batches(knobs: KnobSet, now: Setting, policy: Policy) -> tuple[int, ...]:
    """Return the micro-batches to choose from, ascending; empty if the micro-batch is fixed."""
    fields = (
        "micro_batch",
        "round_batch",
        "rank_batch",
        "global_batch",
        "accumulation",
        "total_accumulation",
    )
    counts = [knob for knob in knobs.of(*fields[:3]) if knob.values]
    per_rank = now.global_batch // now.data_parallel
    scale = now.data_parallel if counts and counts[0].field == "round_batch" else 1
    values = sorted(int(value) // scale for value in counts[0].values) if counts else None
    pin = policy.pins.get("micro_batch")
    is_named = knobs.varied is not None and any(knob.name in knobs.varied for knob in knobs.of(*fields))
    if not knobs.may_vary(*fields) and pin is None:
        return ()
    if knobs.has_accumulation:
        micros = [micro for micro in range(1, per_rank + 1) if per_rank % micro == 0]
    elif is_named or pin is not None:
        micros = _powers_around(now.micro_batch)
    else:
        # Another micro-batch would be another global batch, which nobody asked for.
        return ()
    if values is not None:
        micros = [
            micro for micro in values if micro > 0 and (not knobs.has_accumulation or per_rank % micro == 0)
        ]
        if not micros:
            raise WrongUse(
                f"--vary {counts[0].name}={','.join(counts[0].values)}",
                found=f"none of them divides the {per_rank} samples of a process in a step",
                cure="Give values that do, so that the global batch stays.",
            )
    if pin is not None:
        if values is not None or (knobs.has_accumulation and int(pin) not in micros):
            raise WrongUse(
                f"--pin micro_batch={pin}",
                found=f"it does not divide the {per_rank} samples of a process in a step"
                if values is None
                else "--vary lists values for it",
                cure="Give one that does, or leave it out.",
            )
        micros = [int(pin)]
    rounds = policy.pins.get("accumulation")
    if rounds is not None:
        micros = [micro for micro in micros if per_rank == micro * int(rounds)]
        if not micros:
            raise WrongUse(
                f"--pin accumulation={rounds}",
                found=f"no micro-batch makes {per_rank} samples of a process in {rounds} passes",
                cure="Give a number that divides them.",
            )
    return tuple(micros)


def _powers_around(micro: int) -> list[int]:
    """Return micro-batches that are halves and doubles of one.

    >>> _powers_around(12)
    [1, 3, 6, 12, 24, 48, 96, 192, 384, 768]
    """
    smaller = []
    part = micro
    while part > 1:
        part //= 2
        smaller.append(part)
    return [*reversed(smaller), *(micro * 2**power for power in range(7))]
