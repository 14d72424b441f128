"""Finding: one diagnosed fact, with its evidence, cause and cure."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun


class Severity(StrEnum):
    """How much a finding matters."""

    INFO = "info"
    """Worth knowing."""
    WARNING = "warning"
    """Works, but slower, tighter or less sure than it could."""
    ERROR = "error"
    """Will not work until it is cured."""


class Finding(Noun, frozen=True, kw_only=True):
    """What is wrong, how it is known, why it happens and what to do."""

    severity: Severity
    what: str
    """The finding in one sentence."""
    evidence: str
    """The line, value or answer it rests on."""
    cause: str
    cure: str
    """A command, an edit or a step, in the imperative."""

    def faults(self) -> list[str]:
        """No part is empty: a finding without a cure is a complaint."""
        parts = ("what", "evidence", "cause", "cure")
        return [f"{part} is empty" for part in parts if not getattr(self, part).strip()]
