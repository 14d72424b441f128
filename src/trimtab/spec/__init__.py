"""The nouns of trimtab: frozen, validated values that are JSON both ways."""

from trimtab.spec.base import Noun
from trimtab.spec.calibration import Calibration
from trimtab.spec.estimate import Band, Estimate, Footprint, StepTime
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
from trimtab.spec.run import Incident, IncidentKind, Measurement
from trimtab.spec.setting import (
    Allocator,
    Mesh,
    OptimizerImplementation,
    Precision,
    Recompute,
    Setting,
    Share,
    Strategy,
)
from trimtab.spec.trace import KINDS, PARTS, Cause, Trace, Work
from trimtab.spec.watch import Advice, Gauge, RunView, Sample
from trimtab.spec.workload import Workload

__all__ = [
    "KINDS",
    "PARTS",
    "Advice",
    "Allocator",
    "Band",
    "Calibration",
    "Candidate",
    "Cause",
    "Change",
    "Cluster",
    "Comparison",
    "Device",
    "DeviceProcess",
    "Estimate",
    "Finding",
    "Footprint",
    "Gauge",
    "Incident",
    "IncidentKind",
    "Link",
    "Look",
    "Measurement",
    "Mesh",
    "Node",
    "Noun",
    "Objective",
    "OptimizerImplementation",
    "Peaks",
    "Place",
    "Plan",
    "Policy",
    "Precision",
    "Reason",
    "Recompute",
    "Rejection",
    "RunView",
    "Sample",
    "Scheduler",
    "Setting",
    "Severity",
    "Share",
    "Slice",
    "StepTime",
    "Strategy",
    "Trace",
    "Vendor",
    "Versions",
    "WhatIf",
    "Work",
    "Workload",
]
