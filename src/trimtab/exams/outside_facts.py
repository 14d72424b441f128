"""Rows that others measured, with their sources, trainers, devices and models."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from trimtab.spec import Noun

JOB_FIELDS = (
    *("trainer", "gpu", "gpus", "model", "sequence", "micro_batch", "global_batch", "strategy", "recompute"),
    *("precision", "lora", "targets", "base", "optimizer", "offload"),
)
"""Columns that the prediction of a replayed job depends on."""


@cache
def read_facts() -> dict[str, Any]:
    """Return outside.toml."""
    return tomllib.loads(files("trimtab.exams").joinpath("outside.toml").read_text(encoding="utf-8"))


class OutsideRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of outside.csv; empty cells are left out."""

    source: str
    path: str
    gpu: str
    gpus: int
    model: str
    layers: int = 0
    """Of a model that was cut; 0: all."""
    sequence: int = 0
    micro_batch: int = 0
    global_batch: int = 0
    tp: int = 1
    cp: int = 1
    pp: int = 1
    virtual: int = 1
    """Parts of the model on each pipeline stage."""
    ep: int = 1
    dp: int = 1
    shards: int = 0
    """Data-parallel ranks that share weights or states; 0: all."""
    recompute: str = "none"
    precision: str = ""
    trainer: str = ""
    """Key of a trainer, or of a recipe for rows that are replayed as jobs."""
    strategy: str = "single"
    lora: int = 0
    """Rank of the adapters; 0: all weights were trained."""
    targets: str = ""
    """Layers with adapters."""
    base: str = ""
    """Storage of the frozen layers."""
    optimizer: str = ""
    """Optimizer rule; empty: AdamW."""
    offload: str = ""
    step_s: float | None = None
    allocated_gib: float | None = None
    active_gib: float | None = None
    reserved_gib: float | None = None
    process_gib: float | None = None
    unstated_gib: float | None = None
    out_of_memory: bool = False
    rival_step_s: float | None = None
    rival_allocated_gib: float | None = None
    check: bool = False
    """Whether the row was compared with no prediction while the rules of its replay were made."""
    reason: str = ""
    """Key of the reason for which the row is not replayed; empty: it is."""

    @property
    def is_job(self) -> bool:
        """Whether the row is replayed as a job."""
        return self.trainer in read_facts()["recipe"]

    @property
    def key(self) -> str:
        """What the prediction of a job depends on, in words."""
        values = (getattr(self, name) for name in JOB_FIELDS)
        return " ".join(str(value).replace(" ", "") or "-" for value in values)


class JobPrediction(Noun, frozen=True, kw_only=True):
    """What a replayed job was predicted to need."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    """Of the whole process on the GPU, with the CUDA context."""
    capacity_bytes: int
    """Memory of the GPU."""
    step_s: float | None = None
