"""Pipeline schedules as data: the actions of each rank in order, and a simulation of their times.

A pipeline of p ranks with v virtual stages has p x v stages; rank r holds the stages r, r + p, r + 2p and so
on, as in torch.distributed.pipelining. The simulation starts an action as soon as its rank is free and its
input has arrived. Sends do not block the sender.

Sources: 1F1B and its bubble of (p - 1) / (m + p - 1) of a step, and the interleaved schedule: Narayanan et
al., Efficient Large-Scale Language Model Training on GPU Clusters (2021). Splitting the backward pass: Qi et
al., Zero Bubble Pipeline Parallelism (2023).
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Schedule


class Pass(StrEnum):
    """Kinds of actions, with torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the input and of the weights."""
    INPUT = "I"
    """Gradients of the input only: the previous stage waits for them."""
    WEIGHT = "W"
    """Gradients of the weights, some time after those of the input."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Pass
    stage: int
    """Index among the stages of all ranks."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


class PipelineShape(NamedTuple):
    """What the actions of a schedule follow from."""

    schedule: Schedule
    ranks: int
    virtual_stages: int
    """Stages of each rank."""
    micro_batches: int

    @property
    def stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.stages, self.ranks)


class DeadlockError(RuntimeError):
    """Ranks wait for each other."""


def explain_illegal(shape: PipelineShape) -> str:
    """Return why a schedule cannot have this shape; empty if it can.

    Looped schedules divide the micro-batches into rounds, as torch does: of m micro-batches on p ranks there
    are m // p rounds, and all must have as many micro-batches.

    >>> from trimtab.spec import Schedule
    >>> explain_illegal(PipelineShape(Schedule.INTERLEAVED, 4, 2, 9))
    'interleaved-1f1b on 4 ranks makes 2 rounds of 9 micro-batches, and 9 is no multiple of 2'
    """
    schedule, ranks, virtual_stages, micro_batches = shape
    if wrong := schedule.check_virtual_stages(virtual_stages):
        return wrong[0]
    rounds = max(1, micro_batches // ranks)
    if schedule.is_looped and micro_batches % rounds:
        return (
            f"{schedule} on {ranks} ranks makes {rounds} rounds of {micro_batches} micro-batches, and "
            f"{micro_batches} is no multiple of {rounds}"
        )
    return ""


@lru_cache(maxsize=64)
def build_actions(shape: PipelineShape) -> Actions:
    """Return the actions of every rank.

    Numbers of micro-batches that `explain_illegal` refuses work too, as after an out-of-memory error: rounds
    then differ by one micro-batch.

    >>> from trimtab.spec import Schedule
    >>> [" ".join(map(str, rank)) for rank in build_actions(PipelineShape(Schedule.ONE_F_ONE_B, 2, 1, 3))]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    if shape.schedule.splits_backward:
        return _fill_bubbles(shape)
    rows = []
    for rank in range(shape.ranks):
        forwards, backwards = _list_passes(shape, rank)
        ahead = min(_count_warm_up(shape, rank), len(forwards))
        row = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += [forward, backward]
        rows.append((*row, *backwards[len(forwards) - ahead :]))
    return tuple(rows)


def _split_rounds(shape: PipelineShape) -> list[range]:
    """Return the micro-batches of each round: a rank runs a round through one stage, then the next."""
    count = max(1, shape.micro_batches // shape.ranks) if shape.virtual_stages > 1 else 1
    bounds = [number * shape.micro_batches // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _list_passes(shape: PipelineShape, rank: int) -> tuple[list[Action], list[Action]]:
    """Return the forward and the backward passes of a rank, each in order."""
    stages = shape.stages_of(rank)
    kind = Pass.INPUT if shape.schedule.splits_backward else Pass.BACKWARD
    forwards, backwards = [], []
    for round_ in _split_rounds(shape):
        forwards += [Action(Pass.FORWARD, stage, number) for stage in stages for number in round_]
        backwards += [Action(kind, stage, number) for stage in reversed(stages) for number in round_]
    return forwards, backwards


def _count_warm_up(shape: PipelineShape, rank: int) -> int:
    """Return the forward passes before the first backward pass, less the one just before it."""
    later = shape.ranks - 1 - rank
    if shape.virtual_stages == 1:
        return later
    # A micro-batch of a round passes the other ranks between two passes of this one.
    longest = max(map(len, _split_rounds(shape)))
    return (shape.virtual_stages - 1) * longest + 2 * later


def _fill_bubbles(shape: PipelineShape) -> Actions:
    """Return the actions of a schedule that computes weight gradients where a rank would wait.

    All passes are taken to last as long. At every moment, each rank takes the first that is possible: a
    backward pass, a forward pass, weight gradients. No rank holds more activations than the first rank of
    the schedule without split backward passes.
    """
    passes = [_list_passes(shape, rank) for rank in range(shape.ranks)]
    most = _count_warm_up(shape, 0) + 1
    rows: list[list[Action]] = [[] for _ in range(shape.ranks)]
    ends: dict[Action, int] = {}
    next_forward, next_backward, live = ([0] * shape.ranks for _ in range(3))
    waiting: list[list[Action]] = [[] for _ in range(shape.ranks)]
    total = 3 * shape.stages * shape.micro_batches
    now = 0
    while sum(map(len, rows)) < total:
        taken: list[Action] = []
        for rank, (forwards, backwards) in enumerate(passes):
            action = None
            if next_backward[rank] < len(backwards) and _is_ready(
                backwards[next_backward[rank]], shape, ends, now
            ):
                action = backwards[next_backward[rank]]
                next_backward[rank] += 1
                waiting[rank].append(Action(Pass.WEIGHT, action.stage, action.micro_batch))
            elif (
                next_forward[rank] < len(forwards)
                and live[rank] < most
                and _is_ready(forwards[next_forward[rank]], shape, ends, now)
            ):
                action = forwards[next_forward[rank]]
                next_forward[rank] += 1
                live[rank] += 1
            elif waiting[rank]:
                action = waiting[rank].pop(0)
                live[rank] -= 1
            if action is not None:
                rows[rank].append(action)
                taken.append(action)
        if not taken and now > max(ends.values(), default=0):
            raise DeadlockError(f"{shape} cannot go on after {sum(map(len, rows))} of {total} actions")
        now += 1
        ends.update(dict.fromkeys(taken, now))
    return tuple(map(tuple, rows))


def list_inputs(action: Action, shape: PipelineShape) -> list[Action]:
    """Return the actions that have to end before this one can start."""
    kind, stage, number = action
    if kind is Pass.FORWARD:
        return [Action(kind, stage - 1, number)] if stage else []
    if kind is Pass.WEIGHT:
        return [Action(Pass.INPUT, stage, number)]
    own = Action(Pass.FORWARD, stage, number)
    return [own] if stage == shape.stages - 1 else [own, Action(kind, stage + 1, number)]


def _is_ready(action: Action, shape: PipelineShape, ends: dict[Action, int], now: int) -> bool:
    return all(ends.get(needed, now + 1) <= now for needed in list_inputs(action, shape))


def count_held(actions: Sequence[Action]) -> int:
    """Return the most activations that a rank holds at a time: pairs of a stage and a micro-batch.

    >>> from trimtab.spec import Schedule
    >>> count_held(build_actions(PipelineShape(Schedule.ONE_F_ONE_B, 4, 1, 8))[0])
    4
    """
    live = most = 0
    for action in actions:
        if action.kind is Pass.FORWARD:
            live += 1
            most = max(most, live)
        elif action.kind is not Pass.INPUT:
            live -= 1
    return most


class StageTimes(NamedTuple):
    """Seconds of one micro-batch in one stage."""

    forward_s: float
    input_s: float
    """Gradients of the activations."""
    weight_s: float
    """Gradients of the weights."""

    def seconds(self, kind: Pass) -> float:
        """Return the seconds of a kind of pass."""
        if kind is Pass.FORWARD:
            return self.forward_s
        if kind is Pass.INPUT:
            return self.input_s
        return self.weight_s if kind is Pass.WEIGHT else self.input_s + self.weight_s


class SimulatedStep(NamedTuple):
    """Times of all passes of one optimizer step."""

    total_s: float
    busy_s: tuple[float, ...]
    """Seconds that each rank computes."""
    held: tuple[int, ...]
    """The most activations that each rank holds at a time: pairs of a stage and a micro-batch."""

    @property
    def bubble_share(self) -> float:
        """Share of the time of all ranks in which they wait."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s) if self.total_s else 0.0


def simulate_actions(
    shape: PipelineShape, times: Sequence[StageTimes], send_s: float = 0.0, rows: Actions | None = None
) -> SimulatedStep:
    """Return the times of all passes, with the times of each stage and the seconds from rank to rank.

    `rows` are the actions of each rank, if they are not those of the schedule.
    """
    rows = build_actions(shape) if rows is None else rows
    ends: dict[Action, float] = {}
    clocks = [0.0] * shape.ranks
    places = [0] * shape.ranks
    left = sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                start = clocks[rank]
                for needed in list_inputs(action, shape):
                    end = ends.get(needed)
                    if end is None:
                        break
                    is_sent = shape.rank_of(needed.stage) != rank
                    start = max(start, end + send_s * is_sent)
                else:
                    clocks[rank] = ends[action] = start + times[action.stage].seconds(action.kind)
                    places[rank] += 1
                    left -= 1
                    continue
                break
        if left == before:
            raise DeadlockError(f"{shape}: {left} actions wait for each other")
    busy = tuple(sum(times[action.stage].seconds(action.kind) for action in row) for row in rows)
    return SimulatedStep(max(clocks), busy, tuple(map(count_held, rows)))


SIMULATED_ROUNDS = 8
"""Rounds of as many micro-batches as there are ranks that are simulated; later ones take as long as the mean
of the last four."""


@lru_cache(maxsize=4096)
def simulate_step(shape: PipelineShape, times: tuple[StageTimes, ...], send_s: float = 0.0) -> SimulatedStep:
    """Return the same as `simulate_actions`, with a constant time for each round after the first ones."""
    ranks, micro_batches = shape.ranks, shape.micro_batches
    rounds = micro_batches // ranks - SIMULATED_ROUNDS
    if rounds < 1:
        return simulate_actions(shape, times, send_s)
    many = micro_batches - rounds * ranks
    between = SIMULATED_ROUNDS // 2
    long = simulate_actions(shape._replace(micro_batches=many), times, send_s)
    short = simulate_actions(shape._replace(micro_batches=many - between * ranks), times, send_s)
    factor = rounds / between
    return SimulatedStep(
        long.total_s + factor * (long.total_s - short.total_s),
        tuple(now + factor * (now - then) for now, then in zip(long.busy_s, short.busy_s, strict=True)),
        long.held,
    )
