"""Find the largest value of an option that fits, with few estimates.

Memory grows with the value, so the search keeps a value that fits below one that does not, and narrows the
gap. The next value to try is where a line through the two reaches the capacity; if that does not halve the
gap twice in a row, it is the middle. The result is exact: the largest value was estimated and fits, and the
next multiple of the step was estimated and does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimtab.errors import CannotFollow, JobFailed, WrongUse
from trimtab.spec import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.errors import TrimtabError
    from trimtab.spec import Estimate

    Answer = Estimate | TrimtabError
    EstimateValue = Callable[[int], Answer]

MOST = 2**24
"""No larger value is tried."""
FASTEST_GROWTH = 16
"""The next value tried is at most this many times the largest that fits."""
BLIND_GROWTH = 8
"""Factor of the next value if memory did not grow between the last two."""
REFUSALS = (WrongUse, JobFailed, CannotFollow)
"""Errors that mean that the job does not run at a value; others end the search."""


@dataclass
class ValueSearch:
    """The search for the largest value; `answers` has every estimate or error so far, by value."""

    estimate: EstimateValue
    step: int = 1
    limit: int = MOST
    """The largest value that may be tried."""
    tight: bool = False
    """Whether a value fits if torch has to release cached blocks for it."""
    answers: dict[int, Answer] = field(default_factory=dict)

    def ask(self, value: int) -> Answer:
        """Return the estimate at a value, or why the job does not run there."""
        if value not in self.answers:
            self.answers[value] = self.estimate(value)
        return self.answers[value]

    def fits(self, value: int) -> bool:
        """Return whether a value fits; raise an error that is not about the value."""
        answer = self.ask(value)
        if isinstance(answer, Exception):
            if not isinstance(answer, REFUSALS):
                raise answer
            return False
        return bool(answer.fits) if self.tight else answer.verdict is Verdict.FITS

    def refuses(self, value: int) -> bool:
        """Return whether the job fails at a value."""
        return isinstance(self.ask(value), Exception)

    def find(self, start: int) -> int | None:
        """Return the largest value that fits, by a search from `start`; None if the smallest does not fit.

        An error at the smallest value is raised.
        """
        start = max(1, min(start, self.limit))
        smallest = min(self.step, start)
        if self.fits(start):
            low, high = self._grow(start)
        else:
            if not self.fits(smallest):
                answer = self.ask(smallest)
                if isinstance(answer, Exception):
                    raise answer
                return None
            low, high = smallest, start
        return low if high is None else self._narrow(low, high)

    def grows(self) -> bool:
        """Return whether more memory is needed at the largest value tried than at the smallest."""
        answers = [answer for _, answer in sorted(self.answers.items(), key=lambda pair: pair[0])]
        needs = [self._need_bytes(answer) for answer in answers if not isinstance(answer, Exception)]
        return len(needs) > 1 and needs[-1] > needs[0]

    def _grow(self, start: int) -> tuple[int, int | None]:
        """Return a value that fits and a larger one that does not; None for that if there is none."""
        low, value = start, start
        while value < self.limit:
            value = min(self.limit, max(self._guess_above(low), low + self.step))
            if not self.fits(value):
                return low, value
            low = value
        return low, None

    def _guess_above(self, low: int) -> int:
        """Return a value just above the point where memory should run out."""
        below = max((value for value in self.answers if value < low), default=None)
        if below is None:
            return self._round_up(2 * low)
        crossing = self._cross(below, low)
        if crossing is None:
            return self._round_up(BLIND_GROWTH * low)
        return min(self._round_up(crossing + self.step), FASTEST_GROWTH * low)

    def _narrow(self, low: int, high: int) -> int:
        """Return the largest multiple of the step between that fits; `low` fits and `high` does not."""
        slow = 0
        step = self.step
        while True:
            first, last = (low // step + 1) * step, (high - 1) // step * step
            if first > last:
                if not self.refuses(high) or step == 1:
                    return low
                # The limit of a job, such as a table of positions, is no multiple of the step.
                step = 1
                continue
            crossing = self._cross(low, high) if slow < 2 else None  # noqa: PLR2004 - see the module's text
            guess = (low + high) // 2 if crossing is None else crossing
            value = min(max(guess // step * step, first), last)
            gap = high - low
            if self.fits(value):
                low = value
            else:
                high = value
            slow = 0 if high - low <= gap / 2 or slow > 1 else slow + 1

    def _cross(self, left: int, right: int) -> int | None:
        """Return where a line through the memory at two values reaches the capacity; None if unknown."""
        first, second = self.answers[left], self.answers[right]
        if isinstance(first, Exception) or isinstance(second, Exception):
            return None
        needs = self._need_bytes(first), self._need_bytes(second)
        capacity = second.capacity_bytes
        if capacity is None or needs[1] <= needs[0]:
            return None
        return left + int((capacity - needs[0]) * (right - left) / (needs[1] - needs[0]))

    def _need_bytes(self, estimate: Estimate) -> int:
        """Return the memory to compare with the capacity, by the upper end of the band."""
        if not self.tight:
            return estimate.band.high_bytes
        least = estimate.least_possible_bytes if estimate.least_bytes is None else estimate.least_bytes
        return estimate.with_band(least)

    def _round_up(self, value: int) -> int:
        return -(-value // self.step) * self.step
