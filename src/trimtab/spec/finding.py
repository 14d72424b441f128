"""Finding: one diagnosed problem, with its evidence, cause and fix."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun


class Severity(StrEnum):
    """Severity of a finding."""

    INFO = "info"
    """Worth knowing."""
    WARNING = "warning"
    """Works, but slower, with less headroom or less reliably than possible."""
    ERROR = "error"
    """Does not work until it is fixed."""


class Finding(Noun, frozen=True, kw_only=True):
    """A problem: what is wrong, the evidence, the cause and the fix."""

    severity: Severity
    what: str
    """The finding in one sentence."""
    evidence: str
    """The log line, value or answer that shows it."""
    cause: str
    cure: str
    """A command, an edit or a step, in the imperative."""

    def faults(self) -> list[str]:
        """Check that no part is empty."""
        parts = ("what", "evidence", "cause", "cure")
        return [f"{part} is empty" for part in parts if not getattr(self, part).strip()]
