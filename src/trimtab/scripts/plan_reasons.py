"""Write the reasons, runners-up and rejections of the plan of a training command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import NothingFits
from trimtab.planner.explanations import compare_step
from trimtab.planner.plan_files import describe_places
from trimtab.scripts.command import format_command
from trimtab.scripts.script_search import describe_changes
from trimtab.spec import Candidate, Reason, Rejection
from trimtab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.planner.estimator_interface import Layout
    from trimtab.scripts.script_search import ScriptAttempt, ScriptSearch
    from trimtab.spec import Cluster, Setting

MOST_RUNNERS_UP = 5
BATCHES = ("micro_batch", "round_batch", "rank_batch", "global_batch", "accumulation", "total_accumulation")
FIELDS: dict[str, Callable[[Setting], Any]] = {
    "precision": lambda setting: setting.precision.value,
    "recompute": lambda setting: setting.recompute.value,
    "compile": lambda setting: "yes" if setting.compile else "no",
}


def list_reasons(search: ScriptSearch, best: ScriptAttempt, cluster: Cluster) -> tuple[Reason, ...]:
    """Return each choice of the plan with its reason."""
    setting = best.setting
    reasons = [
        ("gpus", f"{setting.gpus} of {len(cluster.devices)}", _explain_gpus(search, setting)),
        ("micro_batch", str(setting.micro_batch), _explain_micro_batch(search, best)),
        ("accumulation", str(setting.accumulation), _explain_accumulation(search, setting)),
    ]
    reasons += [(name, str(get(setting)), _explain_word(search, best, name)) for name, get in FIELDS.items()]
    reasons += [(name, value, "the fastest of the values that --vary lists") for name, value in best.values]
    return tuple(Reason(subject=subject, value=value, why=why) for subject, value, why in reasons)


def _explain_gpus(search: ScriptSearch, setting: Setting) -> str:
    if setting.gpus == search.command.world_size:
        return "as the command starts it"
    return f"all that the plan is for; the command starts {search.command.world_size} processes"


def _explain_micro_batch(search: ScriptSearch, best: ScriptAttempt) -> str:
    setting = best.setting
    if "micro_batch" in search.policy.pins:
        return "pinned"
    if not search.splits:
        knobs = search.knobs.of(*BATCHES)
        if not knobs:
            where = search.knobs.in_source.get("micro_batch")
            return f"no option of the script sets it; {where}" if where else "no option of the script sets it"
        if not search.knobs.has_accumulation:
            return (
                f"another {knobs[0].name} would change the global batch, since the script has no option for "
                f"gradient accumulation; --vary {knobs[0].name} allows it"
            )
        return "not to be varied"
    others = [attempt for attempt in search.attempts if _differs_only_in_batch(attempt, best)]
    larger = [attempt for attempt in others if attempt.setting.micro_batch > setting.micro_batch]
    texts = []
    failing = min(
        (attempt for attempt in larger if attempt.run is not None and not attempt.fits),
        key=lambda attempt: attempt.setting.micro_batch,
        default=None,
    )
    if failing is not None:
        texts.append(f"{failing.setting.micro_batch} does not fit ({_format_need(failing)})")
    elif setting.micro_batch == search.splits[-1]:
        texts.append("the largest that the global batch allows")
    else:
        texts += _explain_next(search, best)
    slower = [attempt for attempt in others if attempt.fits and attempt.sample_s is not None]
    slower.sort(key=lambda attempt: -attempt.setting.micro_batch)
    texts += [f"{attempt.setting.micro_batch} {_compare(attempt, best)}" for attempt in slower[:2]]
    return "; ".join(texts) or "the only one that was tried"


def _explain_next(search: ScriptSearch, best: ScriptAttempt) -> list[str]:
    """Say what the next larger micro-batch should need, if it was not run."""
    micro = min(micro for micro in search.splits if micro > best.setting.micro_batch)
    need = search.predict_need(best, micro)
    if need is None or need <= best.limit_bytes:
        return []
    return [f"{micro} should need {format_bytes(need)} of {format_bytes(best.limit_bytes)}"]


def _differs_only_in_batch(attempt: ScriptAttempt, best: ScriptAttempt) -> bool:
    return (
        attempt is not best
        and attempt.values == best.values
        and all(get(attempt.setting) == get(best.setting) for get in FIELDS.values())
    )


def _format_need(attempt: ScriptAttempt) -> str:
    return f"{format_bytes(attempt.need_bytes)} of {format_bytes(attempt.limit_bytes)}"


def _compare(attempt: ScriptAttempt, best: ScriptAttempt) -> str:
    """Return how long another attempt takes for the samples of a step of the choice."""
    if attempt.sample_s is None or best.sample_s is None:
        return "fits too"
    samples = best.setting.global_batch
    return compare_step(attempt.sample_s * samples, best.sample_s * samples)


def _explain_accumulation(search: ScriptSearch, setting: Setting) -> str:
    ranks = f" x {setting.data_parallel} processes" * (setting.data_parallel > 1)
    product = f"{setting.micro_batch} x {setting.accumulation}{ranks}"
    before = search.attempts[0].setting.global_batch
    if setting.global_batch == before:
        return f"{product} keeps the global batch of {before}"
    return f"{product} is a global batch of {setting.global_batch}, instead of {before}"


def _explain_word(search: ScriptSearch, best: ScriptAttempt, name: str) -> str:
    if name in search.policy.pins:
        return "pinned"
    get = FIELDS[name]
    others: dict[str, list[ScriptAttempt]] = {}
    for attempt in search.attempts:
        if get(attempt.setting) != get(best.setting):
            others.setdefault(str(get(attempt.setting)), []).append(attempt)
    texts = [_describe_others(value, attempts, best) for value, attempts in others.items()]
    if texts:
        return "; ".join(texts)
    knobs = search.knobs.of(name)
    if not knobs:
        return "as in the script, which has no option for it that is known"
    names = ", ".join(knob.name for knob in knobs)
    if not search.knobs.may_vary(name):
        return f"left alone; --vary {knobs[0].name} lets it change"
    skipped = [text.partition(": ")[2] for text in search.skipped if text.startswith(name)]
    return skipped[0] if skipped else f"as in the command; {names} sets it"


def _describe_others(value: str, attempts: list[ScriptAttempt], best: ScriptAttempt) -> str:
    fitting = [attempt for attempt in attempts if attempt.fits]
    if fitting:
        return f"{value} {_compare(min(fitting, key=lambda attempt: attempt.order), best)}"
    ran = [attempt for attempt in attempts if attempt.run is not None]
    if ran:
        return f"{value} does not fit ({_format_need(min(ran, key=lambda attempt: attempt.need_bytes))})"
    error = next(attempt.error for attempt in attempts if attempt.error is not None)
    return f"{value} fails: {error.found}"


def list_runners_up(search: ScriptSearch, best: ScriptAttempt) -> tuple[Candidate, ...]:
    """Return the other commands that fit, the fastest first; the command as given is always one of them."""
    others = sorted(
        (attempt for attempt in search.attempts if attempt.fits and attempt is not best),
        key=lambda attempt: attempt.order,
    )
    chosen = [attempt for attempt in others if attempt is search.attempts[0]]
    chosen = [
        *others[:MOST_RUNNERS_UP],
        *(attempt for attempt in chosen if attempt not in others[:MOST_RUNNERS_UP]),
    ]
    return tuple(
        Candidate(
            setting=attempt.setting,
            estimate=attempt.run.estimate,
            why="as given, " * (not attempt.changes) + _compare(attempt, best),
        )
        for attempt in chosen
        if attempt.run is not None
    )


def list_rejections(search: ScriptSearch) -> tuple[Rejection, ...]:
    """Return what was ruled out: what does not fit, what failed, and what was not tried."""
    rejections = [
        Rejection(
            why=f"{describe_changes(attempt.changes)}: "
            + (f"needs {_format_need(attempt)}" if attempt.error is None else attempt.error.found),
            example=attempt.setting,
        )
        for attempt in search.attempts
        if not attempt.fits
    ]
    return (*rejections, *(Rejection(why=text) for text in dict.fromkeys(search.skipped)))


def list_left_out(search: ScriptSearch) -> tuple[str, ...]:
    """Return what the search did not try, and why."""
    lines = []
    if search.knobs.varied is not None:
        names = [
            knob.name
            for knob in search.knobs.knobs
            if knob.field in (*FIELDS, *BATCHES) and knob.name not in search.knobs.varied
        ]
        if names:
            lines.append(f"options that --vary does not name: {', '.join(names)}")
    lines += [f"{name}: {where}, which no option changes" for name, where in search.knobs.in_source.items()]
    return tuple(lines)


def write_recommendation(search: ScriptSearch, best: ScriptAttempt) -> str:
    """Return the result in one sentence."""
    first = search.attempts[0]
    memory = f"{format_bytes(best.need_bytes)} of {format_bytes(best.limit_bytes)} that may be used"
    if not best.changes:
        return f"Keep the command as it is: {memory}, and nothing else that was tried is faster."
    what = "Type the command above"
    if any(change.form == "config" for change in best.command.changes):
        what = "Change the config as above, and start the command"
    if not first.fits and not first.changes:
        return f"{what}: {memory}. As given it does not fit ({_format_need(first)})."
    if not first.sample_s or not best.sample_s:
        return f"{what}: {memory}."
    step = format_seconds(best.sample_s * best.setting.global_batch)
    if first.changes:
        # The command as given has another number of processes, and was not run.
        return f"{what}: {step} a step, {memory}."
    gain = first.sample_s / best.sample_s
    return f"{what}: {gain:.2f} times as fast as given, {step} a step, {memory}."


def make_nothing_fits(search: ScriptSearch, layout: Layout) -> NothingFits:
    """Return the error for a command that fits in no way that was tried."""
    near = min(
        (attempt for attempt in search.attempts if attempt.run is not None),
        key=lambda attempt: attempt.need_bytes,
    )
    missing = near.need_bytes - near.limit_bytes
    hints = []
    varied = search.knobs.varied
    unnamed = [
        knob.name
        for knob in search.knobs.knobs
        if varied is not None and knob.name not in varied and knob.field in FIELDS
    ]
    if unnamed:
        hints.append(f"let more change: --vary {' --vary '.join(unnamed)}")
    batches = search.knobs.of(*BATCHES)
    if not search.splits and batches and not search.knobs.has_accumulation:
        hints.append(f"--vary {batches[0].name} allows another global batch")
    hints += [f"change {where}" for where in search.knobs.in_source.values()]
    hints.append(f"plan for GPUs with {format_bytes(missing)} more")
    return NothingFits(
        f"{format_command(search.command)} on {describe_places(layout.places)}",
        found=f"nothing fits: the nearest needs {_format_need(near)} that may be used, with "
        f"{describe_changes(near.changes)}",
        cure=f"You can {'; or '.join(hints)}.",
    )
