"""JSON schemas of what each command prints with `--json`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trimtab.errors import UnknownName, find_nearest

if TYPE_CHECKING:
    from trimtab.spec import Noun

SPEC = "trimtab.spec"
ERROR = f"{SPEC}:ErrorOutput"
OUTPUTS = {
    "detect": (f"{SPEC}:Cluster", f"{SPEC}:DevicesOutput"),
    "explain": (
        "trimtab.catalog.glossary:Word",
        "trimtab.catalog.glossary:ExplainedWords",
        f"{SPEC}:WordNames",
    ),
    "estimate": (f"{SPEC}:EstimateOutput",),
    "exam": ("trimtab.exams.run:ExamResult", "trimtab.exams.outside:OutsideResult"),
    "profile": ("trimtab.exams.measure:ProfileOutput",),
    "calibrate": (
        f"{SPEC}:CalibrateOutput",
        f"{SPEC}:LinksOutput",
        f"{SPEC}:ImportOutput",
        f"{SPEC}:CalibrationsOutput",
        f"{SPEC}:RemoveOutput",
    ),
    "plan": (f"{SPEC}:Plan", f"{SPEC}:StagedPlan"),
    "layouts": (f"{SPEC}:LayoutRanking",),
    "max": (f"{SPEC}:LargestValue",),
    "explore": (f"{SPEC}:ExploreOutput",),
    "apply": ("trimtab.configs.apply:ApplyOutput", "trimtab.configs.targets:TargetsOutput"),
    "show": ("trimtab.configs.show:Display",),
    "revert": (f"{SPEC}:RevertOutput",),
    "train": ("trimtab.training.step_log:StepLine", "trimtab.training.task:TrainOutput"),
    "launch": (f"{SPEC}:Launch", f"{SPEC}:LaunchesOutput"),
    "jobs": (f"{SPEC}:JobsOutput", f"{SPEC}:Summary"),
    "cancel": (f"{SPEC}:CancelOutput",),
    "doctor": ("trimtab.diagnosis.findings:Diagnosis",),
    "report": (f"{SPEC}:ReportOutput",),
    "watch": (f"{SPEC}:WatchSample",),
}
"""For each command the data types that it prints, one of them at a time; any command may print an error."""
LINES = ("train", "watch")
"""Commands that print a JSON object a line: the schema is that of a line."""


def list_outputs(verb: str) -> list[type[Noun]]:
    """Return the data types that a command prints with --json, its errors included."""
    if verb not in OUTPUTS:
        near = find_nearest(verb, OUTPUTS)
        raise UnknownName(
            f"the JSON schema of {verb}",
            found="there is no such command with --json",
            cure=f"Did you mean {near[0]}?" if near else f"Name one of {', '.join(OUTPUTS)}.",
        )
    places = (place.partition(":") for place in (*OUTPUTS[verb], ERROR))
    return [getattr(import_module(module), name) for module, _, name in places]


def schema(verb: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints with --json.

    >>> schema("revert")["title"]
    'Output of trimtab revert --json'
    """
    from trimtab.spec.schema import build_schema

    what = "A line" if verb in LINES else "Output"
    return build_schema(f"{what} of trimtab {verb} --json", list_outputs(verb))
