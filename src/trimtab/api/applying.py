"""The functions `apply`, `show` and `revert` for config files, and knobs under other trainers' names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.estimating import first_device, look_closely
from trimtab.api.planning import plan, plan_from
from trimtab.spec.requests import ApplyRequest, ShowRequest, accepts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trimtab.configs.apply import Proposal
    from trimtab.configs.files import PreparedFile, WriteResult
    from trimtab.configs.knobs import KnobSettings
    from trimtab.configs.show import Display
    from trimtab.spec import Cluster, Estimate, Plan, Setting


def config_places(to: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Return the config files that `to` names, as a list."""
    from os import PathLike

    return [str(place) for place in ([to] if isinstance(to, str | PathLike) else to or ())]


def propose(request: ApplyRequest) -> tuple[Plan, Proposal]:
    """Return the plan, and what `apply` would change, before it changes anything."""
    from os import PathLike

    from trimtab.configs.apply import parse_aim, propose_edits
    from trimtab.configs.formats import read_config
    from trimtab.configs.targets import list_targets
    from trimtab.errors import WrongUse
    from trimtab.probe.detect import as_cluster

    found, unchecked = (
        plan_from(request.plan) if isinstance(request.plan, str | PathLike) else (request.plan, "")
    )
    if found.script is not None:
        from trimtab.scripts.apply import propose_command_edits

        return found, propose_command_edits(found, config_places(request.to), beside=request.beside)
    if not request.to:
        raise WrongUse(
            f"a plan of {found.job}",
            found="no config file is named",
            cure="Write it like: trimtab apply plan.json --to config.yaml",
        )
    on = request.on if request.network is None else as_cluster(request.on, network=request.network)
    aims = [parse_aim(place) for place in config_places(request.to)]

    def replan(options: dict[str, Any]) -> Plan:
        return _same_but(found, options, on, cache=request.cache, say=request.say)

    among = list_targets(aimed.file for aimed in aims)
    proposal = propose_edits(
        aims, found, among, opened=read_config, name=request.target, beside=request.beside, replan=replan
    )
    proposal.said += [unchecked] if unchecked else []
    return found, proposal


def _same_but(
    found: Plan, options: dict[str, Any], on: str | Cluster | None, *, cache: bool, say: Callable[[str], None]
) -> Plan:
    """Return the best plan for the job with some options changed; only the micro-batch may differ."""
    from trimtab.configs.apply import stage_pins
    from trimtab.planner.plan_files import rebuild_cluster

    return plan(
        found.job,
        on if on is not None else rebuild_cluster(found),
        global_batch=found.choice.global_batch,
        memory=found.policy.memory_share,
        pins=stage_pins(found.choice),
        options={**found.options, **options},
        cache=cache,
        say=say,
    )


@accepts(ApplyRequest)
def apply(request: ApplyRequest) -> dict[str, Any]:
    """Write a plan into config files: all of them, or none if one fails.

    trimtab.apply(trimtab.plan("slm", "2xA30"), "config.py:slm_config")["edits"]
    trimtab.apply("plan.json", ["conf/config.yaml", "train.sbatch"], dry=True)["diff"]
    trimtab.apply("plan.json", "run.sh")["edits"]  # the plan of a command that run.sh holds
    """
    plan, proposal = propose(request)
    ready = proposal.prepare(beside=request.beside)
    return applied(proposal, ready, None if request.dry else write_plan(ready, plan))


def write_plan(ready: Sequence[PreparedFile], plan: Plan) -> WriteResult:
    """Write the prepared files, with backups that name the plan."""
    from trimtab.configs.files import write_files
    from trimtab.render import describe_setting

    return write_files(
        ready, words=f"{plan.job}: {describe_setting(plan.choice)}", fingerprint=plan.fingerprint()
    )


def applied(proposal: Proposal, ready: Sequence[PreparedFile], written: WriteResult | None) -> dict[str, Any]:
    """Return the result of `apply`: the edits, the diff, and the backup once they are written."""
    from trimtab.configs.apply import AppliedEdit, ApplyOutput

    backups = list(written.backups) if written else []
    edits = (
        AppliedEdit(file=edit.file, key=edit.key, before=edit.before, after=edit.after, line=edit.line)
        for edit in proposal.edits
    )
    return ApplyOutput(
        edits=tuple(edits),
        command=getattr(proposal, "command", "") or None,
        backup=backups[0] if backups else None,
        backups=tuple(backups),
        written=tuple(written.files) if written else (),
        files=tuple(proposal.files),
        diff="".join(file.diff() for file in ready),
        stages=tuple(proposal.stages),
        warnings=tuple(proposal.warnings),
        said=(
            *proposal.said,
            *(warning.text for warning in proposal.warnings),
            *(written.said if written and written.files else ()),
        ),
    ).to_builtins()


def revert(
    file: str | Path, *, backup: int | None = None, force: bool = False, write: bool = True
) -> dict[str, Any]:
    """Put back a config that `apply` wrote; what is there now becomes a backup too.

    With `write=False` nothing is written: the answer has the diff.
    """
    from trimtab.configs.files import revert_file as put_back
    from trimtab.spec import RevertOutput

    done = put_back(str(file), number=backup, force=force, write=write)
    return RevertOutput(
        restored=done.file if done.backup else None,
        file=done.file,
        number=done.number,
        backup=done.backup,
        diff=done.diff,
    ).to_builtins()


@accepts(ShowRequest)
def show(request: ShowRequest) -> Display:
    """Show what a config would use, stage by stage, and what would be better.

    trimtab.show("conf", "RTX 6000").stages[0].advice
    """
    from trimtab.configs.apply import find_layout, parse_aim
    from trimtab.configs.formats import read_config
    from trimtab.configs.show import build_display, find_job
    from trimtab.configs.targets import find_target, list_targets
    from trimtab.errors import WrongUse
    from trimtab.planner.degrees import describe_cluster
    from trimtab.planner.plan_files import is_plan_file
    from trimtab.probe.detect import as_cluster

    place = parse_aim(str(request.file))
    if is_plan_file(place.file):
        raise WrongUse(
            f"show {request.file}",
            found="it is a plan, and no config of a trainer",
            cure=f"To see the plan: trimtab report {request.file} -o plan.html. To write it into your files: "
            f"trimtab apply {request.file}",
        )
    among = list_targets([place.file])
    layout = find_layout(place, among, opened=read_config, name=request.target)
    target = layout.main.site.target if layout.main else None
    if target is None and request.target:
        target = find_target(request.target, among)
    elif target is None:
        target = next(known for known in among if known.stage is layout.stage)
    job, sought = (request.job, "") if request.job is not None else find_job(target, layout.main)
    where = as_cluster(request.on, network=request.network)
    if not where.devices:
        return build_display(
            layout, target, job=job, gpus=None, device=None, seer=None, no_device=True, sought=sought
        )
    options = request.options or {}
    seer = (
        None if job is None else _ConfigEstimator(job, where, options, cache=request.cache, say=request.say)
    )
    return build_display(
        layout,
        target,
        job=job if isinstance(job, str) or job is None else _name(job),
        gpus=len(where.devices),
        device=first_device(where).name,
        seer=seer,
        sought=sought,
        shape=None if request.on is None else describe_cluster(where),
    )


def _name(job: Any) -> str:
    from trimtab.jobs.load import find_job_name

    return find_job_name(job)[0]


class _ConfigEstimator:
    """Estimates and plans for `show`, for a job on some devices."""

    def __init__(
        self, job: Any, where: Cluster, options: dict[str, Any], *, cache: bool, say: Callable[[str], None]
    ) -> None:
        self.job, self.where, self.options, self.cache, self.say = job, where, options, cache, say

    def estimate(self, options: dict[str, Any], setting: Setting) -> Estimate:
        """Return what a setting needs, and how fast it is."""
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
        """Return the fastest plan for the same global batch on as many GPUs in the same precision.

        Without recomputing where the config has none and something fits so: that takes few traces.
        """
        from trimtab.configs.apply import way_pins
        from trimtab.errors import NothingFits
        from trimtab.spec import Recompute

        pins: dict[str, Any] = {
            "gpus": setting.gpus,
            "precision": setting.precision,
            "compile": setting.compile,
            **way_pins(setting),
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
) -> KnobSettings:
    """Return what knobs such as batch_size set, with those of a config file; `given` counts before the file.

    `ranks` is how many processes will train, where that is settled; else as many as there are GPUs. What is
    also in `options` or `pins` is refused, so that nothing is said twice.
    """
    from trimtab.configs import knobs
    from trimtab.configs.apply import parse_aim
    from trimtab.configs.formats import read_config
    from trimtab.errors import WrongUse
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.load import load_job as find
    from trimtab.planner.pins import read_pins

    asked: dict[str, Any] = {}
    if config is not None:
        place = parse_aim(str(config))
        asked |= knobs.read_knobs(read_config(place.file), str(config), place.below)
    asked |= given if isinstance(given, dict) else knobs.split_knobs(tuple(given))
    if not asked:
        return knobs.KnobSettings()
    fixed, chosen = read_pins(pins), dict(options or {})
    devices = () if where is None else where.devices
    found = knobs.apply_knobs(
        asked,
        ranks=int(fixed.get("gpus") or ranks or len(devices) or 1),
        bf16=all(device.bf16 is not False for device in devices),
        joint="global_batch" not in chosen,
    )
    for key in (*found.options, *found.pins):
        if key in (chosen if key in found.options else fixed):
            flag = "--set" if key in found.options else "--pin"
            raise WrongUse(
                f"knob {found.by[key]}", found=f"{flag} {key} is given too", cure="Leave one of them out."
            )
    name, changed = find_job_name(job)
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
