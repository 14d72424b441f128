"""The commands of trimtab as functions: `trimtab.detect()` does what `trimtab detect` does."""

from __future__ import annotations

from trimtab.api.applying import applied, apply, config_places, propose, revert, show, turn_knobs, write_plan
from trimtab.api.calibrating import (
    describe_calibration,
    import_calibration,
    list_calibrations,
    remove_calibration,
)
from trimtab.api.detecting import (
    FUNCTIONS,
    VERBS,
    all_words,
    cluster,
    detect,
    doctor,
    explain,
    load,
    stated_network,
)
from trimtab.api.estimating import (
    batch_warnings,
    begin_batch_warnings,
    calibrate,
    calibrate_links,
    estimate,
    estimate_command,
    exam,
    first_device,
    gpu_here,
    is_known,
    look_at_all,
    look_closely,
    make_request,
    make_setting,
    module_classes,
    profile,
    requested_setting,
)
from trimtab.api.exploring import explore
from trimtab.api.launching import cancel, find_jobs, launch, list_jobs, prepare_launch, start_launch
from trimtab.api.layouts import describe_study, layouts, plan_layout, plan_study, study_request
from trimtab.api.maximizing import max as max  # noqa: A004 - a verb
from trimtab.api.planning import make_policy, plan, plan_from, read_plan
from trimtab.api.reporting import report, watch
from trimtab.api.schemas import schema
from trimtab.api.training import plan_stages, prepare_training, run_training, train, train_stages

__all__ = [
    "FUNCTIONS",
    "VERBS",
    "all_words",
    "applied",
    "apply",
    "batch_warnings",
    "begin_batch_warnings",
    "calibrate",
    "calibrate_links",
    "cancel",
    "cluster",
    "config_places",
    "describe_calibration",
    "describe_study",
    "detect",
    "doctor",
    "estimate",
    "estimate_command",
    "exam",
    "explain",
    "explore",
    "find_jobs",
    "first_device",
    "gpu_here",
    "import_calibration",
    "is_known",
    "launch",
    "layouts",
    "list_calibrations",
    "list_jobs",
    "load",
    "look_at_all",
    "look_closely",
    "make_policy",
    "make_request",
    "make_setting",
    "module_classes",
    "plan",
    "plan_from",
    "plan_layout",
    "plan_stages",
    "plan_study",
    "prepare_launch",
    "prepare_training",
    "profile",
    "propose",
    "read_plan",
    "remove_calibration",
    "report",
    "requested_setting",
    "revert",
    "run_training",
    "schema",
    "show",
    "start_launch",
    "stated_network",
    "study_request",
    "train",
    "train_stages",
    "turn_knobs",
    "watch",
    "write_plan",
]
