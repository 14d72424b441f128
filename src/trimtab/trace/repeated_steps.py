"""Record a step without running it, from one that was run: most jobs do the same in every step.

`repeat_step` copies a whole step. `PassRepeater` copies the forward and the backward pass of the first step;
the optimizer runs, because its first step creates its state.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.engine.fsdp import SETUP_METHODS
from trimtab.engine.in_backward import InBackwardGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.spec.trace import Work
    from trimtab.trace.recorder import Recorder

    Described = tuple[int, str, str, str, int]
    """An allocation without its number."""


def describe_allocation(recorder: Recorder, number: int) -> Described:
    """Return all that is known of an allocation, without its number."""
    words = recorder.parts[number], recorder.modules[number], recorder.ops[number]
    return recorder.sizes[number], *words, recorder.streams[number]


def copy_allocation(recorder: Recorder, number: int) -> int:
    """Record an allocation equal to an earlier one; return its number."""
    copied = len(recorder.sizes)
    recorder.sizes.append(recorder.sizes[number])
    recorder.streams.append(recorder.streams[number])
    for column in (recorder.parts, recorder.modules, recorder.ops):
        column.append(column[number])
    if number in recorder.causes:
        recorder.causes[copied] = recorder.causes[number]
    return copied


def describe_next(recorder: Recorder, number: int) -> Described:
    """Return what is known of the same allocation in the next step: FSDP2 then fills its storage again."""
    size, part, module, op, stream = describe_allocation(recorder, number)
    return (
        (size, "communication", module, "resize", stream)
        if number in recorder.emptied
        else (size, part, module, op, stream)
    )


@contextlib.contextmanager
def leave_out_setup(recorder: Recorder) -> Iterator[None]:
    """Record no work of what FSDP2 does in the first step only."""

    def without_work(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, recorder.records_work = recorder.records_work, False
            try:
                return method(*args, **kwargs)
            finally:
                recorder.records_work = before

        return run

    methods = [(owner, name, getattr(owner, name)) for owner, name in SETUP_METHODS]
    for owner, name, method in methods:
        setattr(owner, name, without_work(method))
    try:
        yield
    finally:
        for owner, name, method in methods:
            setattr(owner, name, method)


def repeat_step(recorder: Recorder, before: str, last: str, name: str) -> bool:
    """Record a copy of the last step as `name`, if that step has reached a steady state.

    A step is steady if it leaves allocations equal to those it freed from the step before, in the same
    order. The next step then does the same. Otherwise return False and record nothing.
    """
    begin, end = recorder.marks[last], len(recorder.order)
    own = [event for event in recorder.order[begin:end] if event >= 0]
    freed = {~event for event in recorder.order[begin:end] if event < 0}
    earlier = {event for event in recorder.order[recorder.marks[before] : begin] if event >= 0}
    left = sorted(set(own) - freed)
    inherited = sorted(freed - set(own))
    left_kinds, inherited_kinds = (
        [describe_allocation(recorder, number) for number in numbers] for numbers in (left, inherited)
    )
    if not earlier.issuperset(inherited) or left_kinds != inherited_kinds:
        return False
    recorder.mark_phase(name, recorder.part)
    copies = dict(zip(inherited, left, strict=True))
    for number in own:
        copies[number] = copy_allocation(recorder, number)
    events = recorder.order[begin:end]
    recorder.order += [copies[event] if event >= 0 else ~copies[~event] for event in events]
    recorder.move_allocations(copies)
    return True


class _Passes(NamedTuple):
    """What the forward and the backward pass of a step recorded."""

    before: list[int]
    """Events of the step before them: old gradients are freed."""
    events: list[int]
    sequence: list[Work]
    by_engine: list[bool]
    recomputed_flops: int


class PassRepeater:
    """Copies the forward and the backward pass of the first step into the second.

    `is_repeated` says after two steps that ran whether a copy would have been the same. If it was for one
    trace of a job, the next ones copy.
    """

    def __init__(self, recorder: Recorder, state: Any) -> None:
        self._recorder = recorder
        self._state = state
        self._first: _Passes | None = None
        self._second: _Passes | None = None
        self._gradients: dict[int, list[Any]] | None = None
        """Parameters whose gradients the first step's passes allocated, by allocation, in the order in which
        they are dropped; None if not all of them are known."""
        self._last_frees: list[int] = []
        """Events at the end of the first step that free what its passes allocated."""
        self._held: list[tuple[Any, Any]] = []
        """Parameters with their gradients of the first step, while a copy is made."""
        self._copies: dict[int, int] = {}
        """Allocations of the copy by those of the first step."""
        self.is_possible = (
            not recorder.uses_compile
            and state.stage is None
            and state.offload is None
            and not state.setting.offload
            and len(state.phases) == 1
            and not isinstance(state.phases[0].gradients, InBackwardGradients)
        )

    def note_passes(self, state: Any, phase: Any, batches: Sequence[Any], between: Any) -> Any:
        """Compute gradients, and note what that records."""
        from trimtab.engine.step import compute_gradients

        recorder = self._recorder
        begin, began = len(recorder.order), len(recorder.sequence)
        flops = recorder.recomputed_flops
        with leave_out_setup(recorder) if self._first is None else contextlib.nullcontext():
            loss = compute_gradients(state, phase, batches, between)
        works = list(recorder.works)
        passes = _Passes(
            before=recorder.order[max(recorder.marks.values()) : begin],
            events=recorder.order[begin:],
            sequence=[works[place] for place in recorder.sequence[began:]],
            by_engine=recorder.by_engine[began:],
            recomputed_flops=recorder.recomputed_flops - flops,
        )
        self._first, self._second = self._first or passes, passes
        return loss

    def end_first_step(self) -> None:
        """Note what the first step leaves; forget its works, which are not those that are timed."""
        recorder = self._recorder
        recorder.clear_works()
        if self._first is None:
            return
        allocated = {event for event in self._first.events if event >= 0}
        place = len(recorder.order)
        while recorder.order[place - 1] < 0 and ~recorder.order[place - 1] in allocated:
            place -= 1
        self._last_frees = recorder.order[place:]
        self._gradients = self._find_gradients(allocated)

    def _find_gradients(self, allocated: set[int]) -> dict[int, list[Any]] | None:
        found: dict[int, list[Any]] = {}
        for parameter in self._state.parameters:
            if parameter.grad is None:
                continue
            number = self._recorder.find_allocation(getattr(parameter.grad, "_local_tensor", parameter.grad))
            if number is None:
                return None
            if number in allocated:
                # Shards share memory, which is freed with the last of them.
                found[number] = [*found.pop(number, []), parameter]
        return found

    def _list_copied(self) -> list[int] | None:
        """Return the events of the first step's passes that a second repeats; None if that is not clear.

        What they allocate and nothing frees stays for later steps, such as a table that is computed once.
        """
        if self._first is None or self._gradients is None:
            return None
        recorder = self._recorder
        own = {event for event in self._first.events if event >= 0}
        freed = {~event for event in self._first.events if event < 0}
        at_end = {~event for event in self._last_frees}
        events = recorder.order[recorder.marks["step0"] : recorder.marks.get("step1")]
        if not freed <= own or {~event for event in events if event < 0} & own != freed | at_end:
            return None
        stay = own - freed - at_end - self._gradients.keys()
        return [event for event in self._first.events if event not in stay]

    def is_repeated(self) -> bool:
        """Return whether the second step, which has just ended, did what a copy of the first would do."""
        copied, first, second = self._list_copied(), self._first, self._second
        if copied is None or self._gradients is None or first is None or second is None:
            return False
        recorder = self._recorder
        freed = [~number for number in self._gradients]
        numbers = {
            event: again for event, again in zip(copied, second.events, strict=False) if event >= 0 <= again
        }
        expected = [*copied, *self._last_frees]
        if not all(event in numbers or ~event in numbers for event in expected):
            return False
        count = len(self._last_frees)
        return (
            second.before[len(second.before) - len(freed) :] == freed
            and [numbers[event] if event >= 0 else ~numbers[~event] for event in expected]
            == [*second.events, *recorder.order[len(recorder.order) - count :]]
            and all(
                describe_next(recorder, number) == describe_allocation(recorder, again)
                for number, again in numbers.items()
            )
            and first[2:] == second[2:]
        )

    def can_copy(self) -> bool:
        """Return whether the first step is such that its passes can be copied."""
        return self._list_copied() is not None

    def hold_gradients(self) -> None:
        """Keep the gradients of the first step: the optimizer needs some after the copy."""
        shared = (self._gradients or {}).values()
        self._held = [(parameter, parameter.grad) for parameters in shared for parameter in parameters]

    def copy_passes(self, state: Any, phase: Any, batches: Sequence[Any], between: Any) -> Any:
        """Record what the passes of the first step recorded, instead of running them; there is no loss."""
        del state, phase, batches, between
        recorder, events, passes = self._recorder, self._list_copied(), self._first
        assert events is not None  # noqa: S101 - can_copy() was asked
        assert passes is not None  # noqa: S101 - then there are some
        recorder.order += [~number for number in self._gradients or {}]
        for event in events:
            if event >= 0:
                copied = self._copies[event] = copy_allocation(recorder, event)
                _, recorder.parts[copied], _, recorder.ops[copied], _ = describe_next(recorder, event)
            recorder.order.append(self._copies[event] if event >= 0 else ~self._copies[~event])
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []
        recorder.move_allocations(self._copies)
        for work, in_engine in zip(passes.sequence, passes.by_engine, strict=True):
            recorder.copy_work(work, in_engine=in_engine)
        recorder.recomputed_flops += passes.recomputed_flops

    def end_copied_step(self) -> None:
        """Record what is freed at the end of a step whose passes were copied."""
        self._recorder.order += [~self._copies[~event] for event in self._last_frees]
