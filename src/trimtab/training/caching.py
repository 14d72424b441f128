"""The steps of a job that gives embed() and loss_of(): exact, however the batch is cut (engine/cached.py).

Ranks meet twice in a step: when all have embedded their samples, and at the end. A rank that runs out of
memory while it embeds says so at the first meeting; all ranks then begin the step again, in smaller parts.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from trimtab.engine import cached
from trimtab.engine.step import check_loss
from trimtab.errors import WrongUse
from trimtab.jobs.embeddings import Embeddings, check_samples, comparable, direct_loss, embed
from trimtab.strategies import STRATEGIES

if TYPE_CHECKING:
    from trimtab.engine.cached import WholeLoss
    from trimtab.training import preparing
    from trimtab.training.parts import Part, StepRunner

LOSS_TRIES = 2
"""How often the loss of the global batch is tried before its memory is found too small."""


class RandomState(NamedTuple):
    """Where the random numbers of this process stand."""

    host: torch.Tensor
    device: torch.Tensor | None


class Caching:
    """Computes the parts of an attempt in two passes over them."""

    def __init__(self, stepper: StepRunner, job: Any) -> None:
        whole = [strategy.word for strategy in STRATEGIES.values() if strategy.runs_whole_model]
        if stepper.setting.strategy not in whole:
            raise WrongUse(
                f"strategy {stepper.setting.strategy} for a job with embed() and loss_of()",
                found="gradient caching needs ranks that each hold the whole model or shards of it",
                cure=f"Use one of the strategies {', '.join(whole)}.",
            )
        self._stepper = stepper
        self._job = job
        self._loss_failures = 0

    def run(self, ready: preparing.Prepared, parts: list[Part]) -> int | None:
        """Forward and backward over all parts; the number of the part that failed, if one did."""
        groups = self._stepper.groups
        if groups.data_alone and len(parts) == 1:
            return self._uncut(ready, parts[0])
        states, kept, failed_at = self._embedded(ready, parts)
        finish = getattr(ready.wiring, "finish_forwards", None)
        if finish is not None:
            finish(failed_at, len(parts))
        counts, failed = self._meet(sum(part.samples for part in parts), failed=failed_at is not None)
        if failed:
            return failed_at
        whole, begin = self._whole(ready, parts, kept, counts)
        if whole is None:
            return 0
        kept.clear()
        ready.buffers.back()
        return self._second_pass(ready, parts, states, whole, begin)

    def rehearse(self, ready: preparing.Prepared, part: Part) -> None:
        """Both passes of a part that counts for nothing: they show what ranks say to each other in them."""
        self._embed_part(ready, part)
        with part:
            embeddings = embed(self._job, ready.model, part.batch)
            part.backward_from(cached.surrogate(embeddings, cached.no_gradients(embeddings)))

    def _uncut(self, ready: preparing.Prepared, part: Part) -> int | None:
        """One part is the whole global batch: one pass is enough."""
        with part:
            part.backward(direct_loss(self._job, ready.model, part.batch))
        return None if part.error is None else part.number

    def _embedded(
        self, ready: preparing.Prepared, parts: list[Part]
    ) -> tuple[list[RandomState], list[Embeddings], int | None]:
        """The embeddings of all parts, with the random state before each; and the part that failed."""
        states: list[RandomState] = []
        kept: list[Embeddings] = []
        for part in parts:
            states.append(self._random_state())
            found = self._embed_part(ready, part)
            if found is None:
                kept.clear()
                return states, kept, part.number
            if part.samples:
                check_samples(found, part.samples)
                kept.append(found)
            elif not kept and part.number == len(parts) - 1:
                # A rank without samples: it still has to know the shapes.
                kept.append(Embeddings([tensor[:0] for tensor in found.tensors], found.structure))
        return states, kept, None

    def _embed_part(self, ready: preparing.Prepared, part: Part) -> Embeddings | None:
        """The embeddings of one part, without gradients; None where it failed, which part.error explains."""
        before = getattr(ready.wiring, "before_forward", None)
        if before is not None:
            before()
        self._stepper.count_statistics(ready, part)
        if ready.compiling is not None and ready.compiling.on:
            ready.compiling.use(part.samples, ready.regular)
        try:
            with torch.no_grad(), part.computing():
                found = embed(self._job, ready.model, part.batch)
                # Float32 from here on, and no view that holds a larger tensor.
                kept = Embeddings([comparable(tensor).clone() for tensor in found.tensors], found.structure)
        except Exception as error:
            part.error = self._stepper.swallows(error)
            if part.error is None:
                raise
            traceback.clear_frames(error.__traceback__)
            return None
        if before is not None:
            ready.wiring.after_forward()  # type: ignore[attr-defined]  # comes with before_forward
        return kept

    def _meet(self, samples: int, *, failed: bool) -> tuple[list[int], bool]:
        """How many samples each rank has, and whether a rank has failed. All ranks call it."""
        groups, device = self._stepper.groups, self._stepper.device
        mine = torch.tensor([samples, int(failed)], dtype=torch.int64, device=device)
        if groups.data_alone:
            return [samples], failed
        heard = [torch.empty_like(mine) for _ in range(groups.data_parallel)]
        dist.all_gather(heard, mine, group=groups.data_group)
        told = torch.stack(heard).tolist()
        return [count for count, _ in told], any(flag for _, flag in told)

    def _whole(
        self, ready: preparing.Prepared, parts: list[Part], kept: list[Embeddings], counts: list[int]
    ) -> tuple[WholeLoss | None, int]:
        """The loss of the global batch; and where in it the samples of this rank begin."""
        groups = self._stepper.groups
        begin = sum(counts[: groups.data_rank])
        structure = kept[0].structure if kept else None
        try:
            mine = cached.joined(kept) if kept else Embeddings([], structure)
            whole = mine if groups.data_alone else gather(mine, counts, groups, self._stepper.device)
            found = cached.whole_loss(self._job, ready.model, whole, check_loss)
        except Exception as error:
            why = self._stepper.swallows(error)
            if why is None or not parts:
                raise
            traceback.clear_frames(error.__traceback__)
            parts[0].error = why
            self._loss_failed(why, sum(counts))
            return None, begin
        self._loss_failures = 0
        first = groups.data_rank == 0
        self._stepper.counts(found.loss if first else torch.zeros_like(found.loss))
        return found, begin

    def _loss_failed(self, why: str, samples: int) -> None:
        self._loss_failures += 1
        if self._loss_failures >= LOSS_TRIES:
            self._stepper.gives_up(
                f"loss_of() cannot be cut, and the {samples} samples of the global batch are too many: {why}"
            )

    def _second_pass(
        self,
        ready: preparing.Prepared,
        parts: list[Part],
        states: list[RandomState],
        whole: WholeLoss,
        begin: int,
    ) -> int | None:
        """Every part once more, with gradients."""
        stepper = self._stepper
        sharded = hasattr(ready.wiring, "before_forward")
        if not sharded and stepper.groups.data_rank == 0:
            # Ranks add their gradients up: one of them brings in those of loss_of() itself.
            cached.add_gradients(whole.parameters, stepper.scale.value)
        for part, state in zip(parts, states, strict=True):
            self._set_random_state(state)
            gradients = cached.rows(whole.gradients, begin, begin + part.samples)
            begin += part.samples
            with part:
                embeddings = embed(self._job, ready.model, part.batch)
                if not part.samples:
                    gradients = cached.no_gradients(embeddings, whole.gradients)
                part.backward_from(cached.surrogate(embeddings, gradients))
            if part.error is not None:
                return part.number
        if sharded:
            # Sharded gradients are sums already, and every rank has its rows of these.
            cached.add_gradients(whole.parameters, stepper.scale.value)
        return None

    def _random_state(self) -> RandomState:
        device = self._stepper.device
        return RandomState(
            torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        )

    def _set_random_state(self, state: RandomState) -> None:
        torch.set_rng_state(state.host)
        if state.device is not None:
            torch.cuda.set_rng_state(state.device, self._stepper.device)


def gather(mine: Embeddings, counts: list[int], groups: Any, device: torch.device) -> Embeddings:
    """The embeddings of all ranks, in the order of ranks; each rank may have another number of samples.

    A rank that has embedded nothing learns shapes and structure from one that has.
    """
    mine = _described(mine, counts, groups)
    most = max(counts)
    found = []
    for tensor in mine.tensors:
        sent = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
        padded = torch.zeros((most, *sent.shape[1:]), dtype=sent.dtype, device=device)
        padded[: sent.shape[0]] = sent
        heard = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(heard, padded, group=groups.data_group)
        rows = torch.cat([one[:count] for one, count in zip(heard, counts, strict=True)])
        found.append(rows.to(tensor.dtype))
    return Embeddings(found, mine.structure)


def _described(mine: Embeddings, counts: list[int], groups: Any) -> Embeddings:
    """This rank's embeddings; empty ones of the right shapes where it has no samples."""
    if min(counts):
        return mine
    source = next(rank for rank, count in enumerate(counts) if count)
    shapes = [(tuple(tensor.shape[1:]), tensor.dtype, tensor.device.type) for tensor in mine.tensors]
    told: list[Any] = [shapes, mine.structure]
    dist.broadcast_object_list(told, src=groups.first + source, group=groups.data_group)
    if mine.tensors:
        return mine
    return Embeddings(
        [torch.zeros((0, *shape), dtype=dtype, device=device) for shape, dtype, device in told[0]], told[1]
    )
