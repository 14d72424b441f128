"""Requests to the worker process: settings of one job to trace for one device."""

from __future__ import annotations

from typing import Any

from trimtab.spec import Device, Noun, Setting


class TraceRequest(Noun, frozen=True, kw_only=True):
    """One setting of a job to trace for a device."""

    job: str
    overrides: dict[str, Any] = {}
    """Options of the job, set before it is used; unknown ones are an error."""
    setting: Setting
    device: Device
    clip: float | None = None


class TraceRequests(Noun, frozen=True, kw_only=True):
    """Several settings of a job to trace for one device."""

    job: str
    overrides: dict[str, Any] = {}
    settings: tuple[Setting, ...]
    device: Device
    clip: float | None = None
    timeout_s: float = 600.0
    """Time limit per setting."""
    whole: bool = False
    """Whether to trace all blocks of a model, even if many are equal."""

    def each(self) -> list[TraceRequest]:
        """Return one request per setting."""
        return [
            TraceRequest(
                job=self.job, overrides=self.overrides, setting=setting, device=self.device, clip=self.clip
            )
            for setting in self.settings
        ]
