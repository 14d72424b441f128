"""The nouns of trimtab: frozen, validated values that are JSON both ways."""

from trimtab.spec.base import Noun
from trimtab.spec.calibration import Calibration
from trimtab.spec.estimate import Band, Estimate, Footprint, MfuReference, StepTime, Verdict
from trimtab.spec.finding import Finding, Severity
from trimtab.spec.hardware import (
    Cluster,
    Device,
    DeviceProcess,
    Link,
    Node,
    Peaks,
    Scheduler,
    Slice,
    Vendor,
    Versions,
)
from trimtab.spec.launch import Launch, LaunchKind
from trimtab.spec.plan import (
    Candidate,
    Change,
    Comparison,
    Look,
    Objective,
    Place,
    Plan,
    Policy,
    Reason,
    Rejection,
    WhatIf,
)
from trimtab.spec.precision import Dtypes, Precision
from trimtab.spec.queue import Headway, JobView, QueuedJob
from trimtab.spec.run import Attempt, Check, Incident, IncidentKind, Measurement, Summary
from trimtab.spec.setting import (
    Allocator,
    Mesh,
    OptimizerImplementation,
    Recompute,
    Setting,
    Share,
    Strategy,
)
from trimtab.spec.stage import PlannedStage, Stage, StagedPlan
from trimtab.spec.trace import KINDS, PARTS, Cause, Trace, Work
from trimtab.spec.watch import Advice, Gauge, Sample, WatchedRun
from trimtab.spec.workload import BatchLoss, Workload

__all__ = [
    "KINDS",
    "PARTS",
    "Advice",
    "Allocator",
    "Attempt",
    "Band",
    "BatchLoss",
    "Calibration",
    "Candidate",
    "Cause",
    "Change",
    "Check",
    "Cluster",
    "Comparison",
    "Device",
    "DeviceProcess",
    "Dtypes",
    "Estimate",
    "Finding",
    "Footprint",
    "Gauge",
    "Headway",
    "Incident",
    "IncidentKind",
    "JobView",
    "Launch",
    "LaunchKind",
    "Link",
    "Look",
    "Measurement",
    "Mesh",
    "MfuReference",
    "Node",
    "Noun",
    "Objective",
    "OptimizerImplementation",
    "Peaks",
    "Place",
    "Plan",
    "PlannedStage",
    "Policy",
    "Precision",
    "QueuedJob",
    "Reason",
    "Recompute",
    "Rejection",
    "Sample",
    "Scheduler",
    "Setting",
    "Severity",
    "Share",
    "Slice",
    "Stage",
    "StagedPlan",
    "StepTime",
    "Strategy",
    "Summary",
    "Trace",
    "Vendor",
    "Verdict",
    "Versions",
    "WatchedRun",
    "WhatIf",
    "Work",
    "Workload",
]
