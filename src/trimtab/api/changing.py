"""Plans in the config files of others, and settings under the names of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.planning import plan, plan_from
from trimtab.api.predicting import first_device, look_closely

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trimtab.configs.applying import Proposal
    from trimtab.configs.files import Prepared, Written
    from trimtab.configs.knobs import Wired
    from trimtab.configs.showing import Display
    from trimtab.spec import (
        Cluster,
        Estimate,
        Plan,
        Setting,
    )


def propose(  # noqa: PLR0913 - each is an option of the command
    plan: Plan,
    to: Sequence[str],
    *,
    target: str | None = None,
    on: str | Cluster | None = None,
    beside: bool = False,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Proposal:
    """What `apply` would change, before it changes anything."""
    from trimtab.configs.applying import aim, proposed
    from trimtab.configs.documents import read
    from trimtab.configs.mapping import known

    aims = [aim(str(one)) for one in to]

    def replan(options: dict[str, Any]) -> Plan:
        return _same_but(plan, options, on, cache=cache, say=say)

    among = known(one.file for one in aims)
    return proposed(aims, plan, among, opened=read, name=target, beside=beside, replan=replan)


def _same_but(
    found: Plan, options: dict[str, Any], on: str | Cluster | None, *, cache: bool, say: Callable[[str], None]
) -> Plan:
    """The best plan for the job with some options changed, all but the cut of the batch as it was."""
    from trimtab.configs.stages import pins_of
    from trimtab.planner.stale import devices_of

    return plan(
        found.job,
        on if on is not None else devices_of(found),
        global_batch=found.choice.global_batch,
        memory=found.policy.memory_share,
        pins=pins_of(found.choice),
        options={**found.options, **options},
        cache=cache,
        say=say,
    )


def apply(  # noqa: PLR0913 - each is an option of the command
    plan: Plan | Path | str,
    to: str | Path | Sequence[str | Path],
    *,
    target: str | None = None,
    on: str | Cluster | None = None,
    beside: bool = False,
    dry: bool = False,
    cache: bool = True,
) -> dict[str, Any]:
    """Write a plan into config files: all of them, or none where one of them fails.

    trimtab.apply(trimtab.plan("slm", "2xA30"), "config.py:slm_config")["edits"]
    trimtab.apply("plan.json", ["conf/config.yaml", "train.sbatch"], dry=True)["diff"]
    """
    from os import PathLike

    found = plan_from(plan)[0] if isinstance(plan, str | PathLike) else plan
    places = [to] if isinstance(to, str | PathLike) else list(to)
    proposal = propose(found, [str(one) for one in places], target=target, on=on, beside=beside, cache=cache)
    ready = proposal.prepared(beside=beside)
    return applied(proposal, ready, None if dry else write_plan(ready, found))


def write_plan(ready: Sequence[Prepared], plan: Plan) -> Written:
    """Write files that are ready, with backups that say what for."""
    from trimtab.configs.files import write
    from trimtab.render import setting_words

    return write(ready, words=f"{plan.job}: {setting_words(plan.choice)}", fingerprint=plan.fingerprint())


def applied(proposal: Proposal, ready: Sequence[Prepared], written: Written | None) -> dict[str, Any]:
    """What `apply` answers: the edits and the diff, and where the backup is once they are written."""
    backups = list(written.backups) if written else []
    return {
        "edits": [
            {"file": one.file, "key": one.key, "before": one.before, "after": one.after, "line": one.line}
            for one in proposal.edits
        ],
        "backup": backups[0] if backups else None,
        "backups": backups,
        "written": list(written.files) if written else [],
        "files": proposal.files,
        "diff": "".join(one.diff() for one in ready),
        "stages": [one.to_builtins() for one in proposal.stages],
        "warnings": [one.to_builtins() for one in proposal.warnings],
        "said": [
            *proposal.said,
            *(one.text for one in proposal.warnings),
            *(written.said if written and written.files else ()),
        ],
    }


def revert(
    file: str | Path, *, backup: int | None = None, force: bool = False, write: bool = True
) -> dict[str, Any]:
    """Put back a config that `apply` wrote; what is there now becomes a backup too.

    With `write=False` nothing is written: the answer has the diff.
    """
    from trimtab.configs.files import revert as put_back

    done = put_back(str(file), number=backup, force=force, write=write)
    return {
        "restored": done.file if done.backup else None,
        "file": done.file,
        "number": done.number,
        "backup": done.backup,
        "diff": done.diff,
    }


def show(  # noqa: PLR0913 - each is an option of the command
    file: str | Path,
    on: str | Cluster | None = None,
    *,
    job: Any = None,
    target: str | None = None,
    options: dict[str, Any] | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Display:
    """What a config would use, stage by stage, and what would be better.

    trimtab.show("conf", "RTX 6000").stages[0].advice
    """
    from trimtab.configs.applying import aim, laid_out
    from trimtab.configs.documents import read
    from trimtab.configs.mapping import known
    from trimtab.configs.showing import display, find_job
    from trimtab.configs.targets import named
    from trimtab.probe.detect import as_cluster

    one = aim(str(file))
    among = known([one.file])
    layout = laid_out(one, among, opened=read, name=target)
    meant = layout.main.site.target if layout.main else None
    if meant is None:
        meant = (
            named(target, among) if target else next(known for known in among if known.stage is layout.stage)
        )
    asked, sought = (job, "") if job is not None else find_job(meant, layout.main)
    where = as_cluster(on)
    if not where.devices:
        return display(
            layout, meant, job=asked, gpus=None, device=None, seer=None, no_device=True, sought=sought
        )
    seer = _Seer(asked, where, options or {}, cache=cache, say=say) if asked is not None else None
    return display(
        layout,
        meant,
        job=asked if isinstance(asked, str) or asked is None else _name(asked),
        gpus=len(where.devices),
        device=first_device(where).name,
        seer=seer,
        sought=sought,
    )


def _name(job: Any) -> str:
    from trimtab.jobs.load import name_of

    return name_of(job)[0]


class _Seer:
    """Answers what `show` asks about a job on some devices."""

    def __init__(
        self, job: Any, where: Cluster, options: dict[str, Any], *, cache: bool, say: Callable[[str], None]
    ) -> None:
        self.job, self.where, self.options, self.cache, self.say = job, where, options, cache, say

    def estimate(self, options: dict[str, Any], setting: Setting) -> Estimate:
        """What a setting needs, and how fast it is."""
        from trimtab.errors import WrongUse
        from trimtab.planner.estimates import refuse_emulated

        if setting.compile and setting.gpus > 1:
            raise WrongUse(
                "compiled code on several GPUs",
                found="compiled code is estimated on one device only",
                cure="Look at --on one of them.",
            )
        device = first_device(self.where)
        refuse_emulated(setting, device, cure="Write fp16 or fp32 into the config, or look at another GPU.")
        self.say("estimating")
        both = {**options, **self.options}
        return look_closely(self.job, setting, device, where=self.where, options=both, cache=self.cache)[0]

    def better(self, options: dict[str, Any], setting: Setting) -> Plan:
        """The fastest way to run the same global batch on as many GPUs in the same precision.

        Without recomputing where the config has none and something fits so: that takes few traces.
        """
        from trimtab.errors import NothingFits
        from trimtab.spec import Recompute

        pins: dict[str, Any] = {
            "gpus": setting.gpus,
            "precision": setting.precision,
            "compile": setting.compile,
        }
        if setting.sync_batchnorm:
            pins["sync_batchnorm"] = True
        if setting.gpus > 1:
            pins["strategy"] = setting.strategy
        if setting.recompute is Recompute.NONE:
            try:
                return self._planned(options, setting, {**pins, "recompute": setting.recompute})
            except NothingFits:
                pass
        return self._planned(options, setting, pins)

    def _planned(self, options: dict[str, Any], setting: Setting, pins: dict[str, Any]) -> Plan:
        return plan(
            self.job,
            self.where,
            global_batch=setting.global_batch,
            pins=pins,
            options={**options, **self.options},
            cache=self.cache,
            say=self.say,
        )


def turn_knobs(  # noqa: PLR0913 - what knobs may meet
    job: Any,
    given: dict[str, Any] | Sequence[str] = (),
    *,
    config: str | Path | None = None,
    where: Cluster | None = None,
    ranks: int | None = None,
    options: Mapping[str, Any] | None = None,
    pins: Sequence[str] = (),
) -> Wired:
    """What knobs such as batch_size set here, with those of a config file; `given` counts before the file.

    `ranks` is how many processes will train, where that is settled; else as many as there are GPUs. What is
    also in `options` or `pins` is refused, so that nothing is said twice.
    """
    from trimtab.configs import knobs
    from trimtab.configs.applying import aim
    from trimtab.configs.documents import read
    from trimtab.errors import WrongUse
    from trimtab.jobs.load import load as find
    from trimtab.jobs.load import name_of
    from trimtab.planner.pins import read as read_pins

    asked: dict[str, Any] = {}
    if config is not None:
        place = aim(str(config))
        asked |= knobs.read(read(place.file), str(config), place.below)
    asked |= given if isinstance(given, dict) else knobs.split(tuple(given))
    if not asked:
        return knobs.Wired()
    fixed, chosen = read_pins(pins), dict(options or {})
    devices = () if where is None else where.devices
    found = knobs.wire(
        asked,
        ranks=int(fixed.get("gpus") or ranks or len(devices) or 1),
        bf16=all(one.bf16 is not False for one in devices),
        joint="global_batch" not in chosen,
    )
    for key in (*found.options, *found.pins):
        if key in (chosen if key in found.options else fixed):
            flag = "--set" if key in found.options else "--pin"
            raise WrongUse(
                f"knob {found.by[key]}", found=f"{flag} {key} is given too", cure="Leave one of them out."
            )
    name, changed = name_of(job)
    subject = find(name, changed | chosen)
    kept = {}
    for key, value in found.options.items():
        if hasattr(subject, key):
            kept[key] = value
        elif key not in found.spare:
            raise WrongUse(
                f"knob {found.by[key]}",
                found=f"it sets the option {key!r}, which the job {name} does not have",
                cure="Leave it out, or give the job such an attribute.",
            )
    return found.replace(options=kept)
