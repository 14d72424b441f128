"""Run the micro-batches of a window through the stages of a pipeline, by a schedule.

Stages send each other a header, which the host reads, and then the tensor. A rank gets the messages of
another one in the order in which they were sent, and stores those that it needs later. A rank that runs out
of memory frees its tensors and continues with headers that say so, so that every rank finishes the window and
learns of the failure from the step status. If ranks of a stage hold shards, it also joins the collectives of
all further passes, because the others of its stage run them. If they wait for each other inside of layers
(tensor, context and expert parallelism), it leaves the schedule instead, and all ranks start again. A rank
with another error sends its message to its neighbours and ends.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from trimtab.engine.gradients import StagePass
from trimtab.engine.pipeline_stage import StageLayout, StageSchedule, unwrap_output, wrap_input
from trimtab.engine.weight_gradients import WeightGradients, flush_weight_gradients
from trimtab.errors import NothingFits
from trimtab.spec import Schedule
from trimtab.strategies.schedules import Pass, PipelineShape, build_actions
from trimtab.training.oom_recovery import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.engine.gradients import Gradients
    from trimtab.engine.pipeline_stage import BlockRelay
    from trimtab.engine.weight_gradients import Products
    from trimtab.strategies.schedules import Action
    from trimtab.training.process_group import RankGroups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8
_HEADER_FIELDS = 9
_HEADER_LENGTH = _HEADER_FIELDS + _MAX_DIMS
_TENSOR, _FAILED, _FATAL = 0, 1, 2
"""State of the sender in a header: a tensor follows; this attempt failed; the rank ends with an error."""
_REPORT_S = 5.0
"""Seconds that a failing rank waits for its neighbours to receive the message."""
_MAX_REPORT_BYTES = 2000


class OtherStageFailed(Exception):  # noqa: N818 - it reads as a sentence in `raise`
    """Another stage failed in this attempt."""


class ScheduleLeft(Exception):  # noqa: N818 - as above
    """This rank ran out of memory while others wait for it inside of a layer: all ranks must start again."""


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


class PassKey(NamedTuple):
    """A micro-batch in a stage."""

    stage: int
    number: int


class StageMessage(NamedTuple):
    """What another rank has sent."""

    tensor: torch.Tensor | None = None
    """None if that rank failed."""
    needs_gradient: bool = False
    layout: StageLayout | None = None
    """How ranks that split layers hold it; None if none do."""


class PipelineRunner:
    """Runs the passes of the stages of one rank, and exchanges tensors with other ranks."""

    def __init__(
        self,
        groups: RankGroups,
        device: torch.device,
        schedule: Schedule = Schedule.ONE_F_ONE_B,
        virtual_stages: int = 1,
        *,
        restarts: bool = False,
    ) -> None:
        """Connect the stages of a rank; with `restarts`, all ranks start again if one is out of memory."""
        self.relay: BlockRelay
        """The relay of the stages of this rank; set when the stages are installed."""
        self.gradients: Gradients
        """The gradients of this rank; set before passes with gradients."""
        self.weight_gradients = WeightGradients() if schedule.splits_backward else None
        """Computes weight gradients later than those of activations; None if the schedule does not."""
        self._device = device
        # gloo sends from host memory only: processes that share a GPU copy there first.
        sends_from_host = device.type == "cuda" and "cuda:gloo" in dist.get_backend_config()
        self._message_device = torch.device("cpu") if sends_from_host else device
        self._groups = groups
        self._shape = PipelineShape(schedule, groups.stages, virtual_stages, 1)
        # Each direction has its own communicator: a shared one would run sends and receives in the order of
        # the calls, and neighbours call in different orders.
        self._back = dist.new_group() if device.type == "cuda" else None
        self._sent: list[tuple[Any, torch.Tensor]] = []
        """Sends in progress, with their tensors, which must stay alive until they arrive."""
        self._early: dict[tuple[bool, PassKey], StageMessage] = {}
        """Messages that arrived before they were needed, by kind and place."""
        self._outputs: dict[PassKey, torch.Tensor] = {}
        """Output of each forward pass: the loss, or the activations for the next stage."""
        self._inputs: dict[PassKey, torch.Tensor] = {}
        """Input of each pass for whose gradient the previous stage waits."""
        self._products: dict[PassKey, Products] = {}
        """Weight gradients that are not computed yet."""
        self._expected_gradients: set[PassKey] = set()
        """Passes whose gradient the next stage will send."""
        self._owed_gradients: set[PassKey] = set()
        """Passes whose gradient the previous stage waits for."""
        self._pass = PassKey(groups.stage, 0)
        """The current pass."""
        self._received = False
        """Whether the current forward pass has received its input from the previous stage."""
        self._failure: PipelineFailure | None = None
        self._restarts = restarts
        self._runs_pass = False
        """Whether this rank takes part in the collectives of the current pass by running it."""

    @property
    def schedule(self) -> StageSchedule:
        """What the stages of a rank depend on."""
        return StageSchedule(self._shape.virtual_stages, self._shape.schedule.splits_backward)

    def run(
        self,
        micro_batches: Sequence[P],
        forward: Callable[[P, int], torch.Tensor],
        backward: Callable[[P, torch.Tensor, torch.Tensor | None], None],
        *,
        completes: bool = True,
    ) -> PipelineFailure | None:
        """Run all micro-batches of a window, forward and backward; return None if this rank succeeded.

        `forward` takes a micro-batch and the index of a stage of this rank, and returns the output.
        `backward` takes that output, and its gradient unless it is the loss. Unless `completes`, ranks do not
        sum their gradients.
        """
        self._failure = None
        self._free_tensors()
        self._early.clear()
        self._expected_gradients.clear()
        self._owed_gradients.clear()
        shape = self._shape._replace(micro_batches=len(micro_batches))
        actions = build_actions(shape)[self._groups.stage]
        try:
            for action, stage_pass in zip(actions, self._list_passes(actions, completes), strict=True):
                micro_batch = micro_batches[action.micro_batch]
                key = PassKey(action.stage, micro_batch.number)
                self._enter_pass(stage_pass)
                if action.kind is Pass.FORWARD:
                    self._forward(micro_batch, key, forward)
                elif action.kind is Pass.WEIGHT:
                    self._compute_weight_gradients(micro_batch, key)
                else:
                    self._backward(micro_batch, key, backward)
                self._exit_pass(micro_batch, stage_pass)
            self._wait_for_sends()
        except ScheduleLeft:
            self._sent = []
        except Exception as error:
            self._report_failure(error)
            raise
        finally:
            self._free_tensors()
        return self._failure

    def _list_passes(self, actions: Sequence[Action], completes: bool) -> list[StagePass]:
        """Return for each action of this rank how its gradients depend on it."""
        last_of_stage = {
            action.stage: number for number, action in enumerate(actions) if action.kind is not Pass.FORWARD
        }
        last = max(last_of_stage.values())
        return [
            StagePass(
                action.kind,
                action.stage // self._shape.ranks,
                completes and last_of_stage[action.stage] == number,
                completes and last == number,
            )
            for number, action in enumerate(actions)
        ]

    def _enter_pass(self, stage_pass: StagePass) -> None:
        self._runs_pass = self._failure is None
        if self._runs_pass:
            self.gradients.start_pass(stage_pass)
        else:
            self.gradients.skip_pass(stage_pass)

    def _exit_pass(self, micro_batch: HasNumber, stage_pass: StagePass) -> None:
        if self._failure is not None:
            self._leave_pass()
            return
        try:
            self.gradients.finish_pass(stage_pass)
        except Exception as error:  # noqa: BLE001 - _fail() raises what it cannot handle
            self._fail(micro_batch, error)

    def _leave_pass(self) -> None:
        """Leave a failed pass: free its memory, and join the collectives that the ranks of the stage run."""
        if self._runs_pass:
            self._runs_pass = False
            self.gradients.abandon_pass()

    def evaluate(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one forward pass without gradients; return the loss in the last stage, zero in the others."""
        output = torch.zeros((), device=self._device)
        try:
            for place, stage in enumerate(self._shape.stages_of(self._groups.stage)):
                self._pass, self._received = PassKey(stage, 0), False
                output = self.relay.run(compute, place)
                if not self._is_last(stage):
                    self._send_tensor(False, PassKey(stage + 1, 0), *unwrap_output(output))
            self._wait_for_sends()
        except Exception as error:
            self._report_failure(error)
            raise
        return output if self._groups.is_last_stage else torch.zeros((), device=self._device)

    def forward_backward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Run one batch forward and backward outside of a step; return the loss in the last stage, else None.

        After an out-of-memory error it is None everywhere, and all stages finish together.
        """
        outputs: list[torch.Tensor] = []

        def forward(_: SingleMicroBatch, place: int) -> torch.Tensor:
            output = self.relay.run(compute, place)
            outputs.append(output.detach())
            return output

        def backward(_: SingleMicroBatch, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            output.backward(gradient)

        failure = self.run([SingleMicroBatch()], forward, backward, completes=False)
        if failure is not None and self._restarts:
            raise RuntimeError(f"{failure.why}; other ranks wait for this one inside of a layer")
        return outputs[-1] if failure is None and self._groups.is_last_stage else None

    def find_stage(self, module: str) -> tuple[int, int]:
        """Return the stage of a module of this rank, and the number of stages.

        Modules outside of the blocks belong to the first stage of the rank, and in the last rank to the last.
        """
        total, ranks = self._shape.stages, self._shape.ranks
        prefix = f"{self.relay.name}." if self.relay.name else ""
        number = module.removeprefix(prefix).partition(".")[0]
        if module.startswith(prefix) and number.isdecimal():
            for place, (first, stop) in enumerate(self.relay.stages):
                if first <= int(number) < stop:
                    return self._groups.stage + place * ranks, total
        return (total - 1 if self._groups.is_last_stage else self._groups.stage), total

    def receive(self, _: torch.Tensor) -> torch.Tensor:
        """Return the activations from the previous stage, as the leaf of a new graph."""
        self._received = True
        received, needs_gradient, layout = self._receive_tensor(False, self._pass)
        if received is None:
            raise OtherStageFailed
        if needs_gradient:
            self._owed_gradients.add(self._pass)
            self._inputs[self._pass] = received.requires_grad_()
        return wrap_input(received, layout, self.relay.tensor_mesh)

    def _is_last(self, stage: int) -> bool:
        return stage == self._shape.stages - 1

    def _forward(self, micro_batch: P, key: PassKey, forward: Callable[[P, int], torch.Tensor]) -> None:
        self._pass, self._received = key, False
        output, layout = None, None
        if self._failure is None:
            try:
                output, layout = unwrap_output(forward(micro_batch, key.stage // self._shape.ranks))
            except Exception as error:  # noqa: BLE001 - _fail() raises what it cannot handle
                self._fail(micro_batch, error)
        if self._failure is not None:
            # Tell the next stage of the failure, and still receive what the previous stage has sent.
            output = None
            if key.stage and not self._received:
                received, needs_gradient, _ = self._receive_tensor(False, key)
                if received is not None and needs_gradient:
                    self._owed_gradients.add(key)
        else:
            assert output is not None  # noqa: S101 - else it would have failed
            self._outputs[key] = output
        if self._is_last(key.stage):
            return
        self._send_tensor(False, key._replace(stage=key.stage + 1), output, layout)
        if output is not None and output.requires_grad:
            self._expected_gradients.add(key)

    def _backward(
        self,
        micro_batch: P,
        key: PassKey,
        backward: Callable[[P, torch.Tensor, torch.Tensor | None], None],
    ) -> None:
        gradient = None
        self._pass = key
        if key in self._expected_gradients:
            gradient = self._receive_tensor(True, key).tensor
            if gradient is None and self._failure is None:
                self._fail(micro_batch, OtherStageFailed())
        output, received = self._outputs.pop(key, None), self._inputs.pop(key, None)
        if self._failure is None and output is not None and output.requires_grad:
            try:
                with self._collect_products(key):
                    backward(micro_batch, output, gradient)
            except Exception as error:  # noqa: BLE001 - as above
                output = None
                self._fail(micro_batch, error)
        del output
        if key in self._owed_gradients:
            answer = None
            if self._failure is None and received is not None:
                answer = received.grad if received.grad is not None else torch.zeros_like(received)
            self._send_tensor(True, key._replace(stage=key.stage - 1), answer)

    @contextlib.contextmanager
    def _collect_products(self, key: PassKey) -> Iterator[None]:
        if self.weight_gradients is None:
            yield
            return
        with self.weight_gradients.collect() as products:
            yield
        self._products[key] = products

    def _compute_weight_gradients(self, micro_batch: P, key: PassKey) -> None:
        products = self._products.pop(key, None)
        if products is None or self._failure is not None:
            return
        try:
            flush_weight_gradients(products)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(micro_batch, error)

    def _fail(self, micro_batch: HasNumber, error: Exception) -> None:
        """Record a failure that the step recovers from, and free the memory; raise any other."""
        if not isinstance(error, OtherStageFailed) and not is_out_of_memory(error):
            raise error
        line = str(error).strip().partition("\n")[0][:200]
        if not self.gradients.is_rehearsed:
            raise NothingFits(
                "the first pass of this run",
                found=f"a single sample ran out of memory: {line}",
                cure="Use more recomputation, more devices, or devices with more memory.",
            ) from error
        self._failure = PipelineFailure(
            micro_batch.number, "" if isinstance(error, OtherStageFailed) else f"out of memory: {line}"
        )
        error.__traceback__ = None
        self._free_tensors()
        if self._restarts:
            raise ScheduleLeft from None
        self._leave_pass()

    def _free_tensors(self) -> None:
        self._outputs.clear()
        self._inputs.clear()
        self._products.clear()

    # messages

    def _find_rank(self, stage: int) -> int:
        """Return the rank that runs a stage for the same samples."""
        return self._groups.stage_rank(self._shape.rank_of(stage))

    def _choose_group(self, source: int, target: int) -> Any:
        return None if source < target else self._back

    def _send_tensor(
        self,
        is_gradient: bool,
        key: PassKey,
        tensor: torch.Tensor | None,
        layout: StageLayout | None = None,
    ) -> None:
        """Send a header and the tensor to the rank of a stage, without waiting; None: this rank failed."""
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        header[0] = _FAILED if tensor is None else _TENSOR
        header[1], header[2], header[3] = int(is_gradient), key.stage, key.number
        if tensor is not None:
            assert tensor.dim() <= _MAX_DIMS  # noqa: S101 - no activation has more
            header[4] = tensor.dim()
            header[5] = DTYPES.index(tensor.dtype)
            header[6] = int(tensor.requires_grad)
            header[7], header[8] = _encode_layout(layout)
            header[_HEADER_FIELDS : _HEADER_FIELDS + tensor.dim()] = torch.tensor(tensor.shape)
        to = self._find_rank(key.stage)
        self._send(header, to, None)
        if tensor is not None:
            message = tensor.detach().to(self._message_device).contiguous()
            self._send(message, to, self._choose_group(dist.get_rank(), to))

    def _send(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        self._sent.append((dist.isend(tensor, to, group=group), tensor))

    def _receive_tensor(self, is_gradient: bool, key: PassKey) -> StageMessage:
        """Return another rank's message about a pass."""
        wanted = (is_gradient, key)
        while wanted not in self._early:
            of = self._find_rank(key.stage + 1 if is_gradient else key.stage - 1)
            found, content = self._receive_next(of)
            self._early[found] = content
        return self._early.pop(wanted)

    def _receive_next(self, of: int) -> tuple[tuple[bool, PassKey], StageMessage]:
        """Receive the next message of a rank."""
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        dist.recv(header, of)
        state, is_gradient, stage, number, dims, dtype, needs_gradient, *rest = header.tolist()
        if state == _FATAL:
            message = torch.zeros(dims, dtype=torch.uint8)
            dist.recv(message, of)
            raise NeighbourFailed(dtype, bytes(message.tolist()).decode(errors="replace"))
        place = bool(is_gradient), PassKey(stage, number)
        if state == _FAILED:
            return place, StageMessage()
        kind, size, *shape = rest
        tensor = self._allocate(tuple(shape[:dims]), DTYPES[dtype])
        message = tensor.to(self._message_device)
        dist.recv(message, of, group=self._choose_group(of, dist.get_rank()))
        if message is not tensor:
            tensor.copy_(message)
        return place, StageMessage(tensor, bool(needs_gradient), _decode_layout(kind, size))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a receive buffer; free other tensors if needed: a tensor already sent must be received."""
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._free_tensors()
            self._failure = self._failure or PipelineFailure(self._pass.number, f"out of memory: {error}")
            if self._restarts:
                raise ScheduleLeft from None
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _wait_for_sends(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _list_neighbours(self) -> set[int]:
        """Return the ranks that this one exchanges tensors with."""
        own = self._shape.stages_of(self._groups.stage)
        stages = {stage + step for stage in own for step in (-1, 1)} & {*range(self._shape.stages)}
        return {self._find_rank(stage) for stage in stages}

    def _report_failure(self, error: Exception) -> None:
        """Send the neighbours the error that ends this rank."""
        if isinstance(error, NeighbourFailed):
            origin, text = error.rank, error.message
        else:
            origin, text = dist.get_rank(), f"{type(error).__name__}: {error}"
        message = text.encode()[:_MAX_REPORT_BYTES]
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        header[0], header[4], header[5] = _FATAL, len(message), origin
        for neighbour in sorted(self._list_neighbours() - {origin}):
            with contextlib.suppress(Exception):
                self._send(header, neighbour, None)
                self._send(torch.tensor(list(message), dtype=torch.uint8), neighbour, None)
        for work, _ in self._sent:
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=_REPORT_S))
        self._sent = []


def _encode_layout(layout: StageLayout | None) -> tuple[int, int]:
    """Return a layout as two numbers of a header: 0 without one, 1 for copies, 2 + dimension for parts."""
    if layout is None:
        return 0, 0
    return 1 if layout.dim is None else 2 + layout.dim, layout.size


def _decode_layout(kind: int, size: int) -> StageLayout | None:
    """Return the layout that a header has; None if there is none."""
    return StageLayout(kind - 2 if kind > 1 else None, size) if kind else None
