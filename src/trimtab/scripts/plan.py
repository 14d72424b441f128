"""Plan a training command: find the command line to type instead, with the reasons.

The global batch stays: micro-batch x accumulation x processes. Each setting that matters is run once on the
pretended GPU.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cache import fingerprint
from trimtab.errors import TrimtabError, WrongUse
from trimtab.planner.explanations import compute_cost
from trimtab.planner.plan_files import FILE_PREFIX, describe_places, read_versions
from trimtab.planner.search import memory_limit
from trimtab.planner.space import list_layouts
from trimtab.scripts.apply import edit_text
from trimtab.scripts.command import format_command, set_processes
from trimtab.scripts.knob_values import mark_tokens, observe, read_split, write_setting, write_values
from trimtab.scripts.plan_reasons import (
    list_left_out,
    list_reasons,
    list_rejections,
    list_runners_up,
    make_nothing_fits,
    write_recommendation,
)
from trimtab.scripts.script_search import ScriptAttempt, ScriptSearch
from trimtab.spec import EstimatedSetting, Plan, ScriptPlan, Setting
from trimtab.strategies import usual_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.planner.estimator_interface import Layout
    from trimtab.scripts.knob_values import BatchSplit
    from trimtab.scripts.knobs import KnobSet
    from trimtab.scripts.script_search import RunScript, ScriptRun
    from trimtab.spec import Cluster, Estimate, Policy, ScriptCommand

PINS = ("gpus", "micro_batch", "accumulation", "precision", "recompute", "compile")
"""Pins that a script's options can follow."""
PROCESSES = ("processes", "total_processes")


def plan_script(  # noqa: PLR0913 - what a plan depends on
    command: ScriptCommand,
    cluster: Cluster,
    policy: Policy,
    knobs: KnobSet,
    run_script: RunScript,
    *,
    given: Mapping[str, int | None] | None = None,
    sources: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    say_best: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return the best command line for a cluster, with reasons; raise NothingFits if none fits.

    `given` may hold samples, epochs and global_batch. `sources` are the script's files, so that a plan knows
    when they have changed.
    """
    _check_pins(policy)
    given = given or {}
    command = set_processes(command, max(len(node.devices) for node in cluster.nodes))
    knobs = knobs.replace(world_size=max(knobs.world_size, command.world_size))
    start, notes = choose_start(command, knobs, cluster, policy)
    layout = _find_layout(cluster, start.data_parallel)
    search = ScriptSearch(
        command=command,
        knobs=knobs,
        now=start,
        cluster=layout.cluster,
        policy=policy,
        limit_bytes=memory_limit(layout, policy),
        run_script=run_script,
        say=say,
        say_best=say_best,
    )
    notes += _run_first(search, given.get("global_batch"))
    best = search.find_best()
    if best is None or best.run is None:
        raise make_nothing_fits(search, layout)
    estimate = add_totals(best.run.estimate, best.setting, given)
    report = best.run.script
    applied = _apply_in_files(search, best)
    return Plan(
        job=format_command(command),
        choice=best.setting,
        estimate=estimate,
        policy=policy,
        reasons=list_reasons(search, best, cluster),
        runners_up=list_runners_up(search, best),
        looked_at=tuple(
            EstimatedSetting(
                setting=attempt.setting,
                process_bytes=attempt.run.estimate.process_bytes,
                high_bytes=attempt.run.estimate.band.high_bytes,
                samples_per_s=1 / attempt.sample_s if attempt.sample_s else None,
                fits=attempt.fits,
            )
            for attempt in search.attempts
            if attempt.run is not None
        ),
        rejected=list_rejections(search),
        places=layout.places,
        cost=compute_cost(estimate, policy),
        left_out=list_left_out(search),
        recommendation=write_recommendation(search, best),
        fingerprints={
            "cluster": describe_places(layout.places),
            **_fingerprint_files(sources or {}, applied),
            **read_versions(),
        },
        complete=search.complete,
        folder=str(Path.cwd()),
        script=ScriptPlan(
            command=format_command(best.command),
            words=best.command.words,
            original=format_command(command),
            changes=best.changes,
            found=report.found,
            writes=report.writes,
            notes=tuple(
                note
                for note in dict.fromkeys((*knobs.notes, *notes, *report.notes, *_describe_cached(search)))
                if note not in estimate.assumptions
            ),
            edits=applied.changes,
            command_after_apply=format_command(applied) if applied.words != best.command.words else "",
        ),
        phases=best.run.phases,
    )


def _describe_cached(search: ScriptSearch) -> list[str]:
    """Return a note if runs of the search came from the cache."""
    runs = [attempt.run for attempt in search.attempts if attempt.run is not None]
    cached = sum(run.script.is_cached for run in runs)
    if not cached:
        return []
    return [f"{cached} of {len(runs)} runs came from the cache; --no-cache follows the script again"]


def _fingerprint_files(sources: Mapping[str, str], applied: ScriptCommand) -> dict[str, str]:
    """Return the fingerprint of each source; a config file that the plan changes has a second one."""
    changed = {change.file for change in applied.changes if change.file}
    prints = {}
    for name, text in sources.items():
        after = []
        if name in changed:
            # A file that cannot be edited is not, and then has no second form.
            with contextlib.suppress(TrimtabError):
                after = [edit_text(text, name, applied.changes)]
        prints[f"{FILE_PREFIX}{name}"] = " ".join(map(fingerprint, (text, *after)))
    return prints


def _apply_in_files(search: ScriptSearch, best: ScriptAttempt) -> ScriptCommand:
    """Return the command with the changes where `trimtab apply` writes them: in files that hold them."""
    if not best.changes or not any(knob.option.file for knob in search.knobs.knobs):
        return best.command
    command, _ = write_setting(search.command, search.knobs, best.setting, now=search.now, in_files=True)
    return write_values(command, search.knobs, dict(best.values), in_files=True)[0]


def _check_pins(policy: Policy) -> None:
    for key, value in policy.pins.items():
        if key not in PINS:
            raise WrongUse(
                f"--pin {key}={value}",
                found="a training command makes this choice itself",
                cure=f"Change the command, or pin one of {', '.join(PINS)}.",
            )


def choose_start(
    command: ScriptCommand, knobs: KnobSet, cluster: Cluster, policy: Policy
) -> tuple[Setting, list[str]]:
    """Return the setting to start from, on as many GPUs as the plan is for, and notes on their number.

    A launcher's number of processes follows the cluster, and the global batch stays. Precision and the like
    are not known yet.
    """
    have, world = len(cluster.devices), knobs.world_size
    split = read_split(knobs)
    here = _make_setting(split.micro_batch or 1, split.accumulation or 1, world)
    can_change = bool(knobs.of(*PROCESSES)) and have % max(1, knobs.nodes) == 0
    pin = policy.pins.get("gpus")
    wanted = (
        int(pin) if pin is not None else have if can_change and knobs.varied is None else min(world, have)
    )
    if wanted == world:
        unused = f"the command starts {world} process{'es' * (world > 1)}, and {have} GPUs are there"
        how = "" if can_change else "; torchrun or accelerate launch before the script starts more"
        return here, [unused + how] if have > world else []
    if wanted > have:
        raise WrongUse(f"--pin gpus={pin}", found=f"there are {have} GPUs", cure="Give fewer.")
    adapted = _spread(here, wanted, knobs) if can_change and split.micro_batch is not None else None
    if adapted is not None:
        return adapted, [f"{wanted} processes instead of {world}: the GPUs that the plan is for"]
    why = (
        f"the global batch of {here.global_batch} does not divide over {wanted} GPUs"
        if can_change and split.micro_batch is not None
        else "no option of the command is known to set the number of processes and to keep the global batch"
    )
    if world <= have and pin is None:
        return here, [f"{world} of {have} GPUs are used: {why}"]
    raise WrongUse(
        format_command(command),
        found=f"it starts {world} processes, and the plan is for {wanted} GPUs; {why}",
        cure=f"Plan for {world} GPUs with --on, or start it with torchrun --nproc-per-node {wanted}.",
    )


def _make_setting(micro: int, rounds: int, ranks: int) -> Setting:
    """Return a setting of data-parallel processes."""
    strategy, mesh = usual_strategy(ranks)
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=rounds,
        global_batch=micro * rounds * ranks,
    )


def _spread(now: Setting, ranks: int, knobs: KnobSet) -> Setting | None:
    """Return the setting on another number of processes with the same global batch; None if none has it."""
    if not knobs.has_accumulation:
        micro, rest = divmod(now.global_batch, ranks * now.accumulation)
        return _make_setting(micro, now.accumulation, ranks) if micro and not rest else None
    for micro in range(now.micro_batch, 0, -1):
        if now.global_batch % (micro * ranks) == 0:
            return _make_setting(micro, now.global_batch // (micro * ranks), ranks)
    return None


def _find_layout(cluster: Cluster, ranks: int) -> Layout:
    """Return the devices of a number of processes."""
    layouts = [layout for layout in list_layouts(cluster) if layout.gpus == ranks]
    if not layouts:
        raise WrongUse(
            f"a command with {ranks} processes",
            found=f"there is no set of {ranks} GPUs among the {len(cluster.devices)} of the cluster",
            cure=f"Name the GPUs that it runs on, as in --on {ranks}xH100.",
        )
    return layouts[0]


def _run_first(search: ScriptSearch, global_batch: int | None) -> list[str]:
    """Run the command as it was given, on the plan's GPUs; the search then knows what it trains with."""
    knobs, start = search.knobs, search.now
    written, changes = (
        (search.command, ())
        if start.data_parallel == knobs.world_size
        else write_setting(search.command, knobs, start, now=start)
    )
    run = search.run(written, changes)
    seen = run.setting
    in_tokens = mark_tokens(knobs, seen, _read_sequence(run))
    counts_tokens, knobs = in_tokens != knobs, in_tokens
    split = read_split(knobs)
    notes = _compare_split(split, seen, knobs) if start.data_parallel == knobs.world_size else []
    notes += [f"{knob.name}: {knob.meaning}" for knob in knobs.knobs if knob.unit > 1]
    micro = start.micro_batch if split.micro_batch is not None else seen.micro_batch
    has_rounds = knobs.has_accumulation and split.accumulation and not counts_tokens
    rounds = start.accumulation if has_rounds else seen.accumulation
    now = seen.replace(
        micro_batch=micro, accumulation=rounds, global_batch=micro * rounds * seen.data_parallel
    )
    knobs = observe(knobs, seen)
    if seen.data_parallel != start.data_parallel:
        # The processes do not share a batch: each trains by itself.
        others = tuple(knob for knob in knobs.knobs if knob.field not in PROCESSES)
        knobs = knobs.replace(world_size=seen.data_parallel, knobs=others)
    search.knobs = knobs
    search.attempts.append(
        ScriptAttempt(setting=now, command=written, changes=changes, limit_bytes=search.limit_bytes, run=run)
    )
    search.now = now if global_batch is None else _change_batch(now, global_batch, knobs)
    return notes


def _read_sequence(run: ScriptRun) -> int:
    """Return the length of the sequences that a run trained with; 1 if it has none."""
    return next((int(fact.value) for fact in run.script.found if fact.name == "sequence"), 1)


def _compare_split(split: BatchSplit, seen: Setting, knobs: KnobSet) -> list[str]:
    """Return notes where the options say another batch than a run showed."""
    notes = []
    names = ", ".join(
        knob.name for knob in knobs.of("micro_batch", "round_batch", "rank_batch", "global_batch")
    )
    if split.micro_batch not in (None, seen.micro_batch):
        notes.append(
            f"{names}: the options give {split.micro_batch} samples in a forward pass, and the model got "
            f"{seen.micro_batch}; the plan counts as the options do"
        )
    if knobs.has_accumulation and split.accumulation not in (None, seen.accumulation):
        notes.append(
            f"the options give {split.accumulation} forward passes in a step, and {seen.accumulation} were "
            "seen; the plan counts as the options do"
        )
    return notes


def _change_batch(now: Setting, global_batch: int, knobs: KnobSet) -> Setting:
    """Return the setting with another global batch."""
    per_rank, rest = divmod(global_batch, now.data_parallel)
    if not knobs.has_accumulation or rest or per_rank < 1:
        raise WrongUse(
            f"--global-batch {global_batch}",
            found="the script has no option for gradient accumulation"
            if not knobs.has_accumulation
            else f"it does not divide over {now.data_parallel} processes",
            cure="Leave it out, or change the batch size in the command.",
        )
    micro = max(micro for micro in range(1, min(now.micro_batch, per_rank) + 1) if per_rank % micro == 0)
    return now.replace(micro_batch=micro, accumulation=per_rank // micro, global_batch=global_batch)


def add_totals(estimate: Estimate, setting: Setting, given: Mapping[str, int | None]) -> Estimate:
    """Return the estimate with samples per second, and with hours if the number of samples is given."""
    if not estimate.step_s:
        return estimate
    speed = setting.global_batch / estimate.step_s
    samples = given.get("samples")
    hours = None if samples is None else samples * (given.get("epochs") or 1) / speed / 3600
    return estimate.replace(
        samples_per_s=speed, hours=hours, gpu_hours=None if hours is None else hours * setting.gpus
    )
