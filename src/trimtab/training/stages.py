"""Train in stages: one run after the other, each in its own folder and starting with the last one's weights.

OUT/stages.json        the stages and their options; only the same stages can resume
OUT/events.jsonl       one line for each stage that has ended
OUT/01_stage/          a run like any other
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.files import write_atomic
from trimtab.spec import Incident, IncidentKind, Stage
from trimtab.spec.base import Noun
from trimtab.training.run_folder import STAGES_FILE, RunFolder, make_folder_error
from trimtab.training.task import RunEnding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class StageChain(Noun, frozen=True, kw_only=True):
    """Identity of a training in stages: only an equal one can resume it."""

    job: str
    options: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies an empty dict given as a default
    """Job options that were set from outside, for all stages."""
    stages: tuple[Stage, ...]
    steps: int | None = None
    """Steps of each stage; None if not set."""
    seed: int = 0

    def faults(self) -> list[str]:
        """List what is wrong: no stages, or two with the same name."""
        names = [stage.name for stage in self.stages]
        return (
            []
            if names and len({*names}) == len(names)
            else ["stages need a name each, and there must be some"]
        )


def run_stages(
    chain: StageChain,
    root: Path,
    train: Callable[[Stage, Path, Path | None], RunEnding],
    say: Callable[[str], None],
) -> RunEnding:
    """Train the stages that are left; return how the last one ended.

    `train` takes a stage, its folder, and the folder of the stage before, whose weights it begins with.
    """
    folder = RunFolder(root=root.absolute())
    ended = _open_folder(folder, chain)
    before: Path | None = None
    ending = RunEnding(step=0, out=str(root))
    for number, stage in enumerate(chain.stages, start=1):
        place = folder.root / stage.name
        if stage.name in ended:
            say(f"stage {stage.name} ({number} of {len(chain.stages)}) has ended already")
            ending = RunEnding(step=ended[stage.name], out=str(place))
        else:
            say(f"stage {stage.name} ({number} of {len(chain.stages)})")
            ending = train(stage, place, before)
            if ending.asked:
                return ending
            folder.log_event(_make_stage_event(stage, ending, last=number == len(chain.stages)))
        before = place
    return ending


def _open_folder(folder: RunFolder, chain: StageChain) -> dict[str, int]:
    """Create or check the folder; return the steps of the stages that have ended, by name."""
    file = folder.root / STAGES_FILE
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        if file.exists():
            _refuse_others(StageChain.from_json(file.read_bytes(), origin=str(file)), chain, folder.root)
        elif (folder.root / "run.json").exists():
            raise WrongUse(
                f"--out {folder.root}",
                found="it is the folder of a run without stages",
                cure="Give another folder with --out.",
            )
        else:
            write_atomic(file, chain.to_json(indent=2).encode() + b"\n", sync=True)
    except OSError as error:
        raise make_folder_error(f"--out {folder.root}", error) from error
    names = {stage.name for stage in chain.stages}
    ended = [event for event in folder.read_events() if event.kind is IncidentKind.STAGE]
    return {name: event.step or 0 for event in ended if (name := event.why.split()[1]) in names}


def _refuse_others(before: StageChain, chain: StageChain, root: Path) -> None:
    """Raise if the folder belongs to other stages."""
    its, mine = before.to_builtins(), chain.to_builtins()
    differences = [key for key in its if key != "stages" and its[key] != mine[key]]
    names = ([stage["name"] for stage in both["stages"]] for both in (its, mine))
    differences += ["the stages"] * (len({tuple(name) for name in names}) > 1) or [
        f"stage {stage['name']}"
        for stage, other in zip(its["stages"], mine["stages"], strict=True)
        if stage != other
    ]
    if differences:
        raise WrongUse(
            f"--out {root}",
            found=f"it is another training's: of that one, {', '.join(differences)} differ",
            cure="Give another folder with --out, or resume with what that training has.",
        )


def _make_stage_event(stage: Stage, ending: RunEnding, *, last: bool) -> Incident:
    loss = "" if ending.loss is None else f" with loss {ending.loss:.4f}"
    return Incident(
        kind=IncidentKind.STAGE,
        at_s=time.time(),
        step=ending.step,
        rank=0,
        why=f"stage {stage.name} has taken its {ending.step} steps",
        done=f"it ended{loss}; " + ("it was the last" if last else "the next stage begins with its weights"),
    )
