"""A launch on this machine, or of this machine's part in a run over several: `trimtab train` and torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.launching.errand import build_environment, build_train_command
from trimtab.spec import Launch, LaunchKind
from trimtab.training.start import LOGS, RESTARTS, Fleet, arguments, run_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.launching.errand import JobSpec
    from trimtab.launching.habits import LaunchDefaults


def build_local_launch(
    errand: JobSpec,
    habits: LaunchDefaults,
    *,
    cores: int | None,
    here: Mapping[str, str],
    rendezvous: str | None = None,
) -> Launch:
    """The command to run here; over several nodes, the same one on each."""
    need = errand.need
    given = build_environment(errand, cores=cores, offline=habits.offline, here=here)
    given |= {name: (value, "trimtab.toml says so") for name, value in habits.environment.items()}
    # What the user has set stays, but for the devices, which follow from it.
    kept = {
        name
        for name in given
        if name in here and name != "CUDA_VISIBLE_DEVICES" and name not in habits.environment
    }
    given = {name: variable for name, variable in given.items() if name not in kept}
    fleet = Fleet(
        procs=need.procs,
        nodes=need.nodes_text,
        rendezvous=rendezvous or "",
        logs=f"{errand.out}/{LOGS}",
        restarts=RESTARTS if errand.restarts is None else errand.restarts,
    )
    several = need.nodes > 1
    torchrun = need.procs > 1 or rendezvous is not None
    notes = [f"run it on each of the {need.nodes} nodes, {rendezvous} included"] if several else []
    notes += [f"{name} stays {here[name]}, as it is set" for name in sorted(kept)]
    return Launch(
        kind=LaunchKind.TORCHRUN,
        command=tuple(build_train_command(errand, rendezvous=rendezvous)),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        starts=("torchrun", *arguments(fleet, Path("TASK"), run_id(errand.out))) if torchrun else (),
        out=errand.out,
        notes=tuple(notes),
    )
