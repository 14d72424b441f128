"""Carries a window through the stages of a pipeline: one forward, one backward, in turns.

Each hand-over is a header, which the host reads, and the tensor itself. A rank that runs out of memory lets
go of all it holds and goes on with headers that say so, so that every rank comes to the end of the window and
hears of it in the status; one that fails for good says why to its neighbours before it ends.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from trimtab.training.oom_recovery import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.engine.pipeline_stage import BlockRelay
    from trimtab.training.process_group import RankGroups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8
_HEADER_LENGTH = 4 + _MAX_DIMS
_WHOLE, _FAILED, _FATAL = 0, 1, 2
"""What a header says of its sender: a tensor follows; nothing does, in this attempt; nothing ever will."""
_REPORT_S = 5.0
"""How long a rank that fails waits for its neighbours to hear why."""
_MAX_REPORT_BYTES = 2000


class ScheduledPass(NamedTuple):
    """One entry of a schedule."""

    forward: bool
    number: int
    """Of the part."""


def build_schedule(stage: int, stages: int, parts: int) -> list[ScheduledPass]:
    """One forward, one backward: a stage begins with as many forwards as there are stages after it.

    >>> [f"{'F' if one.forward else 'B'}{one.number}" for one in schedule(0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    ahead = min(stages - 1 - stage, parts)
    turns = [ScheduledPass(True, number) for number in range(ahead)]
    for number in range(ahead, parts):
        turns += [ScheduledPass(True, number), ScheduledPass(False, number - ahead)]
    return turns + [ScheduledPass(False, number) for number in range(parts - ahead, parts)]


class OtherStageFailed(Exception):  # noqa: N818 - it reads as a sentence in `raise`
    """Another stage of the same samples has failed in this attempt."""


class NeighbourFailed(RuntimeError):  # noqa: N818 - as above
    """Another stage has failed for good; it says itself why, and this is what it told the others."""

    def __init__(self, rank: int, words: str) -> None:
        super().__init__(f"rank {rank} of this pipeline failed: {words}")
        self.rank = rank
        self.words = words


class HasNumber(Protocol):
    """What a pipe has to know of a part."""

    @property
    def number(self) -> int:
        """Its place in the window."""


P = TypeVar("P", bound=HasNumber)


class SingleMicroBatch(NamedTuple):
    """A part by itself."""

    number: int = 0


class PipelineFailure(NamedTuple):
    """Where and why an attempt came to nothing."""

    part: int
    why: str
    """Empty where another rank has failed."""


class PipelineRunner:
    """The way from the stage before this one to the one after it, and back."""

    def __init__(self, groups: RankGroups, device: torch.device) -> None:
        self.relay: BlockRelay
        """Of this stage; set by who installs it."""
        self._device = device
        stage, stages = groups.stage, groups.stages
        self._stage, self._stages = stage, stages
        self._before = groups.next_to(stage - 1) if stage else None
        self._after = groups.next_to(stage + 1) if stage < stages - 1 else None
        # Each way has a communicator of its own: a shared one would carry out sends and receives in the order
        # in which they were asked for, and neighbours ask in unlike orders.
        self._back = dist.new_group() if device.type == "cuda" else None
        self._sent: list[tuple[Any, torch.Tensor]] = []
        """What is under way, held until it has arrived."""
        self._live: dict[int, torch.Tensor] = {}
        """What a part's forward pass has come to: the loss, or what was handed over."""
        self._given: dict[int, torch.Tensor] = {}
        """What each part was handed, where the stage before waits for its gradient."""
        self._due: set[int] = set()
        """Parts whose gradient the stage after will send."""
        self._owed: set[int] = set()
        """Parts whose gradient the stage before waits for."""
        self._number = 0
        self._heard = False
        """Whether the part under way has read what the stage before sent."""
        self._failure: PipelineFailure | None = None

    def run(
        self,
        parts: Sequence[P],
        forward: Callable[[P], torch.Tensor],
        backward: Callable[[P, torch.Tensor, torch.Tensor | None], None],
    ) -> PipelineFailure | None:
        """All parts of a window, forward and backward; None where all went well on this rank.

        `forward` gives what a part comes to in this stage, `backward` takes that, with its gradient where
        it is not the loss.
        """
        self._failure = None
        self._let_go()
        self._due.clear()
        self._owed.clear()
        try:
            for turn in build_schedule(self._stage, self._stages, len(parts)):
                if turn.forward:
                    self._forward(parts[turn.number], forward)
                else:
                    self._backward(parts[turn.number], backward)
            self._settle()
        except Exception as error:
            self._say_why(error)
            raise
        finally:
            self._let_go()
        return self._failure

    def evaluated(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One forward pass without gradients: the loss in the last stage, nought in the others."""
        self._heard = False
        try:
            found = self.relay.run(compute)
            self._hand(self._after, _WHOLE, found, None)
            self._settle()
        except Exception as error:
            self._say_why(error)
            raise
        return found if self._after is None else torch.zeros((), device=self._device)

    def passed(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """One batch forward and backward, outside of a step: the loss in the last stage, None in the others.

        Where it runs out of memory there is no loss either, and the stages come to an end together.
        """
        found: list[torch.Tensor] = []

        def forward(_: SingleMicroBatch) -> torch.Tensor:
            output = self.relay.run(compute)
            found.append(output.detach())
            return output

        def backward(_: SingleMicroBatch, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            output.backward(gradient)

        failure = self.run([SingleMicroBatch()], forward, backward)
        return found[0] if failure is None and self._after is None else None

    def receive(self, _: torch.Tensor) -> torch.Tensor:
        """What the stage before hands over, as the leaf of a new graph."""
        self._heard = True
        assert self._before is not None  # noqa: S101 - only then is there a stand-in that asks
        found, learns = self._taken(self._before, None)
        if found is None:
            raise OtherStageFailed
        if learns:
            self._owed.add(self._number)
            self._given[self._number] = found.requires_grad_()
        return found

    def _forward(self, part: P, forward: Callable[[P], torch.Tensor]) -> None:
        self._number, self._heard = part.number, False
        output = None
        if self._failure is None:
            try:
                output = forward(part)
            except Exception as error:  # noqa: BLE001 - raised again where it is not ours to handle
                self._fail(part, error)
        if self._failure is not None:
            # What the others do not know yet, they are still to hear; what they sent is still to be read.
            output = None
            if self._before is not None and not self._heard:
                found, learns = self._taken(self._before, None)
                if found is not None and learns:
                    self._owed.add(part.number)
        else:
            assert output is not None  # noqa: S101 - else it would have failed
            self._live[part.number] = output
        self._hand(self._after, _FAILED if output is None else _WHOLE, output, None)
        if output is not None and output.requires_grad and self._after is not None:
            self._due.add(part.number)

    def _backward(self, part: P, backward: Callable[[P, torch.Tensor, torch.Tensor | None], None]) -> None:
        number = part.number
        gradient = None
        if number in self._due:
            assert self._after is not None  # noqa: S101 - it owes the gradient
            gradient, _ = self._taken(self._after, self._back)
            if gradient is None and self._failure is None:
                self._fail(part, OtherStageFailed())
        output, given = self._live.pop(number, None), self._given.pop(number, None)
        if self._failure is None and output is not None and output.requires_grad:
            try:
                backward(part, output, gradient)
            except Exception as error:  # noqa: BLE001 - as above
                output = None
                self._fail(part, error)
        del output
        if number in self._owed:
            answer = None
            if self._failure is None and given is not None:
                answer = given.grad if given.grad is not None else torch.zeros_like(given)
            self._hand(self._before, _FAILED if answer is None else _WHOLE, answer, self._back)

    def _fail(self, part: HasNumber, error: Exception) -> None:
        """Note a failure that the step recovers from, and let go of the memory; raise any other."""
        if not isinstance(error, OtherStageFailed) and not is_out_of_memory(error):
            raise error
        line = str(error).strip().partition("\n")[0][:200]
        self._failure = PipelineFailure(
            part.number, "" if isinstance(error, OtherStageFailed) else f"out of memory: {line}"
        )
        error.__traceback__ = None
        self._let_go()

    def _let_go(self) -> None:
        self._live.clear()
        self._given.clear()

    # messages

    def _hand(self, to: int | None, state: int, tensor: torch.Tensor | None, group: Any) -> None:
        """Send a header and, with it, a tensor; neither is waited for."""
        if to is None:
            return
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        header[0] = state
        if tensor is not None:
            assert tensor.dim() <= _MAX_DIMS  # noqa: S101 - no model has more
            header[1] = tensor.dim()
            header[2] = DTYPES.index(tensor.dtype)
            header[3] = int(tensor.requires_grad)
            header[4 : 4 + tensor.dim()] = torch.tensor(tensor.shape)
        self._send(header, to, None)
        if tensor is not None:
            self._send(tensor.detach().contiguous(), to, group)

    def _send(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        self._sent.append((dist.isend(tensor, to, group=group), tensor))

    def _taken(self, of: int, group: Any) -> tuple[torch.Tensor | None, bool]:
        """What a neighbour hands over, and whether it wants a gradient; None where it has failed."""
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        dist.recv(header, of)
        state, dims, dtype, learns, *shape = header.tolist()
        if state == _FATAL:
            words = torch.zeros(dims, dtype=torch.uint8)
            dist.recv(words, of)
            raise NeighbourFailed(dtype, bytes(words.tolist()).decode(errors="replace"))
        if state == _FAILED:
            return None, False
        found = self._room(tuple(shape[:dims]), DTYPES[dtype])
        dist.recv(found, of, group=group)
        return found, bool(learns)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for what a neighbour has sent already: it has to be taken, also where there is little."""
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._let_go()
            self._failure = self._failure or PipelineFailure(self._number, f"out of memory: {error}")
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _settle(self) -> None:
        """Wait until everything has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _say_why(self, error: Exception) -> None:
        """Tell the neighbours why nothing more will come from this rank."""
        if isinstance(error, NeighbourFailed):
            origin, text = error.rank, error.words
        else:
            origin, text = dist.get_rank(), f"{type(error).__name__}: {error}"
        words = text.encode()[:_MAX_REPORT_BYTES]
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        header[0], header[1], header[2] = _FATAL, len(words), origin
        for neighbour in (self._before, self._after):
            if neighbour is None or neighbour == origin:
                continue
            with contextlib.suppress(Exception):
                self._send(header, neighbour, None)
                self._send(torch.tensor(list(words), dtype=torch.uint8), neighbour, None)
        for work, _ in self._sent:
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=_REPORT_S))
        self._sent = []
