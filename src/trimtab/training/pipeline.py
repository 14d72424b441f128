"""Run the micro-batches of a window through the stages of a pipeline (1F1B schedule).

Stages send each other a header, which the host reads, and then the tensor. A rank that runs out of memory
frees its tensors and continues with headers that say so, so that every rank finishes the window and learns of
the failure from the step status. A rank with another error sends its message to its neighbours and ends.
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
_TENSOR, _FAILED, _FATAL = 0, 1, 2
"""State of the sender in a header: a tensor follows; this attempt failed; the rank ends with an error."""
_REPORT_S = 5.0
"""Seconds that a failing rank waits for its neighbours to receive the message."""
_MAX_REPORT_BYTES = 2000


class ScheduledPass(NamedTuple):
    """One forward or backward pass of a schedule."""

    forward: bool
    number: int
    """Index of the micro-batch."""


def build_schedule(stage: int, stages: int, micro_batches: int) -> list[ScheduledPass]:
    """Return the 1F1B schedule of a stage: it starts with one forward pass for each later stage.

    >>> [f"{'F' if entry.forward else 'B'}{entry.number}" for entry in build_schedule(0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    ahead = min(stages - 1 - stage, micro_batches)
    passes = [ScheduledPass(True, number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        passes += [ScheduledPass(True, number), ScheduledPass(False, number - ahead)]
    return passes + [ScheduledPass(False, number) for number in range(micro_batches - ahead, micro_batches)]


class OtherStageFailed(Exception):  # noqa: N818 - it reads as a sentence in `raise`
    """Another stage failed in this attempt."""


class NeighbourFailed(RuntimeError):  # noqa: N818 - as above
    """Another stage ended with an error; this is the message that it sent."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} of this pipeline failed: {message}")
        self.rank = rank
        self.message = message


class HasNumber(Protocol):
    """The only thing that a pipeline needs of a micro-batch."""

    @property
    def number(self) -> int:
        """Index in the window."""


P = TypeVar("P", bound=HasNumber)


class SingleMicroBatch(NamedTuple):
    """The only micro-batch of a pass outside of a step."""

    number: int = 0


class PipelineFailure(NamedTuple):
    """Which micro-batch of an attempt failed, and why."""

    micro_batch: int
    why: str
    """Empty if another rank failed."""


class PipelineRunner:
    """Runs the passes of one stage, and exchanges tensors with the stages before and after it."""

    def __init__(self, groups: RankGroups, device: torch.device) -> None:
        self.relay: BlockRelay
        """The relay of this stage; set when the stage is installed."""
        self._device = device
        stage, stages = groups.stage, groups.stages
        self._stage, self._stages = stage, stages
        self._before = groups.stage_rank(stage - 1) if stage else None
        self._after = groups.stage_rank(stage + 1) if stage < stages - 1 else None
        # Each direction has its own communicator: a shared one would run sends and receives in the order of
        # the calls, and neighbours call in different orders.
        self._back = dist.new_group() if device.type == "cuda" else None
        self._sent: list[tuple[Any, torch.Tensor]] = []
        """Sends in progress, with their tensors, which must stay alive until they arrive."""
        self._outputs: dict[int, torch.Tensor] = {}
        """Output of each forward pass, by micro-batch: the loss, or the activations for the next stage."""
        self._inputs: dict[int, torch.Tensor] = {}
        """Input of each micro-batch for whose gradient the previous stage waits."""
        self._expected_gradients: set[int] = set()
        """Micro-batches whose gradient the next stage will send."""
        self._owed_gradients: set[int] = set()
        """Micro-batches whose gradient the previous stage waits for."""
        self._number = 0
        self._received = False
        """Whether the current forward pass has received its input from the previous stage."""
        self._failure: PipelineFailure | None = None

    def run(
        self,
        micro_batches: Sequence[P],
        forward: Callable[[P], torch.Tensor],
        backward: Callable[[P, torch.Tensor, torch.Tensor | None], None],
    ) -> PipelineFailure | None:
        """Run all micro-batches of a window, forward and backward; return None if this rank succeeded.

        `forward` returns the output of a micro-batch in this stage. `backward` takes that output, and its
        gradient unless it is the loss.
        """
        self._failure = None
        self._free_tensors()
        self._expected_gradients.clear()
        self._owed_gradients.clear()
        try:
            for scheduled in build_schedule(self._stage, self._stages, len(micro_batches)):
                if scheduled.forward:
                    self._forward(micro_batches[scheduled.number], forward)
                else:
                    self._backward(micro_batches[scheduled.number], backward)
            self._wait_for_sends()
        except Exception as error:
            self._report_failure(error)
            raise
        finally:
            self._free_tensors()
        return self._failure

    def evaluate(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one forward pass without gradients; return the loss in the last stage, zero in the others."""
        self._received = False
        try:
            output = self.relay.run(compute)
            self._send_tensor(self._after, _TENSOR, output, None)
            self._wait_for_sends()
        except Exception as error:
            self._report_failure(error)
            raise
        return output if self._after is None else torch.zeros((), device=self._device)

    def forward_backward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Run one batch forward and backward outside of a step; return the loss in the last stage, else None.

        After an out-of-memory error it is None everywhere, and all stages finish together.
        """
        outputs: list[torch.Tensor] = []

        def forward(_: SingleMicroBatch) -> torch.Tensor:
            output = self.relay.run(compute)
            outputs.append(output.detach())
            return output

        def backward(_: SingleMicroBatch, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            output.backward(gradient)

        failure = self.run([SingleMicroBatch()], forward, backward)
        return outputs[0] if failure is None and self._after is None else None

    def receive(self, _: torch.Tensor) -> torch.Tensor:
        """Return the activations from the previous stage, as the leaf of a new graph."""
        self._received = True
        assert self._before is not None  # noqa: S101 - only a later stage receives
        received, needs_gradient = self._receive_tensor(self._before, None)
        if received is None:
            raise OtherStageFailed
        if needs_gradient:
            self._owed_gradients.add(self._number)
            self._inputs[self._number] = received.requires_grad_()
        return received

    def _forward(self, micro_batch: P, forward: Callable[[P], torch.Tensor]) -> None:
        self._number, self._received = micro_batch.number, False
        output = None
        if self._failure is None:
            try:
                output = forward(micro_batch)
            except Exception as error:  # noqa: BLE001 - _fail() raises what it cannot handle
                self._fail(micro_batch, error)
        if self._failure is not None:
            # Tell the next stage of the failure, and still receive what the previous stage has sent.
            output = None
            if self._before is not None and not self._received:
                received, needs_gradient = self._receive_tensor(self._before, None)
                if received is not None and needs_gradient:
                    self._owed_gradients.add(micro_batch.number)
        else:
            assert output is not None  # noqa: S101 - else it would have failed
            self._outputs[micro_batch.number] = output
        self._send_tensor(self._after, _FAILED if output is None else _TENSOR, output, None)
        if output is not None and output.requires_grad and self._after is not None:
            self._expected_gradients.add(micro_batch.number)

    def _backward(
        self, micro_batch: P, backward: Callable[[P, torch.Tensor, torch.Tensor | None], None]
    ) -> None:
        number = micro_batch.number
        gradient = None
        if number in self._expected_gradients:
            assert self._after is not None  # noqa: S101 - it sends the gradient
            gradient, _ = self._receive_tensor(self._after, self._back)
            if gradient is None and self._failure is None:
                self._fail(micro_batch, OtherStageFailed())
        output, received = self._outputs.pop(number, None), self._inputs.pop(number, None)
        if self._failure is None and output is not None and output.requires_grad:
            try:
                backward(micro_batch, output, gradient)
            except Exception as error:  # noqa: BLE001 - as above
                output = None
                self._fail(micro_batch, error)
        del output
        if number in self._owed_gradients:
            answer = None
            if self._failure is None and received is not None:
                answer = received.grad if received.grad is not None else torch.zeros_like(received)
            self._send_tensor(self._before, _FAILED if answer is None else _TENSOR, answer, self._back)

    def _fail(self, micro_batch: HasNumber, error: Exception) -> None:
        """Record a failure that the step recovers from, and free the memory; raise any other."""
        if not isinstance(error, OtherStageFailed) and not is_out_of_memory(error):
            raise error
        line = str(error).strip().partition("\n")[0][:200]
        self._failure = PipelineFailure(
            micro_batch.number, "" if isinstance(error, OtherStageFailed) else f"out of memory: {line}"
        )
        error.__traceback__ = None
        self._free_tensors()

    def _free_tensors(self) -> None:
        self._outputs.clear()
        self._inputs.clear()

    # messages

    def _send_tensor(self, to: int | None, state: int, tensor: torch.Tensor | None, group: Any) -> None:
        """Send a header and then the tensor, if there is one, without waiting."""
        if to is None:
            return
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        header[0] = state
        if tensor is not None:
            assert tensor.dim() <= _MAX_DIMS  # noqa: S101 - no activation has more
            header[1] = tensor.dim()
            header[2] = DTYPES.index(tensor.dtype)
            header[3] = int(tensor.requires_grad)
            header[4 : 4 + tensor.dim()] = torch.tensor(tensor.shape)
        self._send(header, to, None)
        if tensor is not None:
            self._send(tensor.detach().contiguous(), to, group)

    def _send(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        self._sent.append((dist.isend(tensor, to, group=group), tensor))

    def _receive_tensor(self, of: int, group: Any) -> tuple[torch.Tensor | None, bool]:
        """Return a neighbour's tensor (None if it failed), and whether it needs a gradient."""
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        dist.recv(header, of)
        state, dims, dtype, needs_gradient, *shape = header.tolist()
        if state == _FATAL:
            message = torch.zeros(dims, dtype=torch.uint8)
            dist.recv(message, of)
            raise NeighbourFailed(dtype, bytes(message.tolist()).decode(errors="replace"))
        if state == _FAILED:
            return None, False
        tensor = self._allocate(tuple(shape[:dims]), DTYPES[dtype])
        dist.recv(tensor, of, group=group)
        return tensor, bool(needs_gradient)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a receive buffer; free other tensors if needed: a tensor already sent must be received."""
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._free_tensors()
            self._failure = self._failure or PipelineFailure(self._number, f"out of memory: {error}")
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _wait_for_sends(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _report_failure(self, error: Exception) -> None:
        """Send the neighbours the error that ends this rank."""
        if isinstance(error, NeighbourFailed):
            origin, text = error.rank, error.message
        else:
            origin, text = dist.get_rank(), f"{type(error).__name__}: {error}"
        message = text.encode()[:_MAX_REPORT_BYTES]
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        header[0], header[1], header[2] = _FATAL, len(message), origin
        for neighbour in (self._before, self._after):
            if neighbour is None or neighbour == origin:
                continue
            with contextlib.suppress(Exception):
                self._send(header, neighbour, None)
                self._send(torch.tensor(list(message), dtype=torch.uint8), neighbour, None)
        for work, _ in self._sent:
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=_REPORT_S))
        self._sent = []
