"""Search settings for different kinds of GPUs together: under ddp, the batch is divided by GPU speed.

The gradient stays exact: every rank weights its own by its samples over the global batch. The shares come
from the speed of each kind of device alone; the step takes as long as the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.engine.in_backward_rules import NOT_SPREAD
from trimtab.errors import TrimtabError
from trimtab.planner.batch_split import divide_evenly, divide_in_proportion, list_splits, make_share
from trimtab.planner.estimator_interface import Layout, available_bytes
from trimtab.planner.pins import IN_BACKWARD, NOT_COMPILED_SYNCHRONISED, has_budget, read_ways
from trimtab.planner.search import Evaluation
from trimtab.planner.space import TRACED_RECOMPUTES, can_run, count_workers
from trimtab.spec import Allocator, Offload, Precision, Recompute, Rejection, Setting
from trimtab.strategies import strategy_by_speed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.planner.estimator_interface import Estimator
    from trimtab.planner.space import Space
    from trimtab.spec import Device, Estimate, Share

MOST_TRIED = 12
"""Micro-batches tried for each kind of device."""


@dataclass(frozen=True)
class _Rate:
    """Speed of one kind of device at its fastest micro-batch."""

    micro_batch: int
    samples_per_s: float


def search_mixed(space: Space, estimator: Estimator) -> tuple[list[Evaluation], list[Rejection]]:
    """Return the best setting of every layout with different devices, and rejections of the others."""
    seen: list[Evaluation] = []
    refused: list[Rejection] = []
    for layout in space.mixed:
        why = _explain_unfit(space, layout)
        found = [] if why else list(_search_layout(space, estimator, layout))
        seen += found
        if not found:
            names = " and ".join(layout.kinds)
            refused.append(
                Rejection(why=why or f"{names} together: some rank does not fit, or no speed is known")
            )
    return seen, refused


def _explain_unfit(space: Space, layout: Layout) -> str:  # noqa: PLR0911 - one way out for each reason
    """Return why a layout cannot divide the batch by speed; an empty string if it can."""
    if layout.gpus > space.workload.global_batch:
        return f"more GPUs than the global batch of {space.workload.global_batch} has samples"
    precision = space.policy.pins.get("precision")
    if precision and not all(can_run(device, Precision(str(precision))) for device in layout.cluster.devices):
        return f"{precision} is only emulated by some of {' and '.join(layout.kinds)}"
    if space.policy.pins.get("sync_batchnorm") and space.policy.pins.get("compile"):
        return NOT_COMPILED_SYNCHRONISED
    if has_budget(space.policy.pins):
        return "recompute by a budget: every micro-batch would have to be compiled to be estimated"
    if read_ways(space.policy.pins).get(IN_BACKWARD):
        return f"{IN_BACKWARD}: {NOT_SPREAD}"
    fixed = [key for key in ("micro_batch", "accumulation") if key in space.policy.pins]
    if fixed:
        return f"different GPUs take different micro-batches, and {fixed[0]} is pinned"
    return ""


def _search_layout(space: Space, estimator: Estimator, layout: Layout) -> Iterator[Evaluation]:
    pins = space.policy.pins
    recomputes = [Recompute(str(pins["recompute"]))] if "recompute" in pins else TRACED_RECOMPUTES
    stored = Offload.ACTIVATIONS in read_ways(pins).get("offload", ())
    for recompute in recomputes:
        compiles = [bool(pins["compile"])] if "compile" in pins else [False, True]
        for compiled in [False] if pins.get("sync_batchnorm") or stored else compiles:
            for allocator in space.allocators:
                shares = _ShareSearch(space, estimator, layout, recompute, compiled, allocator)
                try:
                    evaluation = shares.find_best()
                except TrimtabError:
                    evaluation = None
                if evaluation is not None:
                    yield evaluation
                    break


@dataclass(frozen=True)
class _ShareSearch:
    """Search for the shares of one layout, with recompute, compile and allocator fixed."""

    space: Space
    estimator: Estimator
    layout: Layout
    recompute: Recompute
    compiled: bool
    allocator: Allocator

    def find_best(self) -> Evaluation | None:
        """Return the faster of shares by speed and even shares; None if neither fits."""
        kinds = {
            device.kind: device
            for device in sorted(self.layout.cluster.devices, key=available_bytes, reverse=True)
        }
        rates = {name: self._find_rate(device) for name, device in kinds.items()}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        if len(known) < len(kinds):
            return None
        names = [place.name for place in self.layout.places]
        global_batch = self.space.workload.global_batch
        samples = divide_in_proportion(
            global_batch, [known[name].samples_per_s for name in names], [global_batch] * len(names)
        )
        ways = [way for way in (samples, divide_evenly(global_batch, len(names))) if way is not None]
        evaluations = [
            self._evaluate_shares(
                [make_share(count, known[name].micro_batch) for count, name in zip(way, names, strict=True)],
                kinds,
            )
            for way in ways
        ]
        fitting = [evaluation for evaluation in evaluations if evaluation is not None and evaluation.fits]
        return min(fitting, key=lambda evaluation: evaluation.estimate.step_s or 0.0, default=None)

    def _find_rate(self, device: Device) -> _Rate | None:
        """Return the best rate over the micro-batches that fit; None if nothing fits or no speed is known."""
        ladder = list_splits(self.space.workload.global_batch, 1)
        tried = ladder[:: max(1, len(ladder) // MOST_TRIED)]
        measured: list[_Rate] = []
        for micro, _ in [*tried, ladder[-1]]:
            once, twice = (self._estimate_alone(device, micro, rounds) for rounds in (1, 2))
            if not self._fits(once, device) or once.step_s is None or twice.step_s is None:
                continue
            measured.append(_Rate(micro, micro / max(twice.step_s - once.step_s, 1e-9)))
        return max(measured, key=lambda rate: rate.samples_per_s, default=None)

    def _fits(self, estimate: Estimate, device: Device) -> bool:
        return estimate.band.high_bytes <= self.space.policy.memory_share * available_bytes(device)

    def _estimate_alone(self, device: Device, micro: int, rounds: int) -> Estimate:
        """Return the estimate of a rank as if all devices were of its kind."""
        nodes = tuple(
            node.replace(devices=tuple(device.replace(index=other.index) for other in node.devices))
            for node in self.layout.cluster.nodes
        )
        alike = Layout(
            places=tuple(place.replace(name=device.kind) for place in self.layout.places),
            cluster=self.layout.cluster.replace(nodes=nodes),
        )
        ranks = self.layout.gpus
        return self.estimator.estimate(self._make_setting(micro, rounds, micro * rounds * ranks), alike)

    def _make_setting(
        self, micro: int, rounds: int, global_batch: int, shares: tuple[Share, ...] = ()
    ) -> Setting:
        pins = self.space.policy.pins
        precision = self.space.precision(self.layout.cluster.devices)
        strategy = strategy_by_speed()
        return Setting(
            strategy=strategy.word,
            mesh=strategy.mesh(self.layout.gpus),
            micro_batch=micro,
            accumulation=rounds,
            global_batch=global_batch,
            precision=precision,
            recompute=self.recompute,
            compile=self.compiled,
            **read_ways(pins),
            allocator=self.allocator,
            workers=count_workers(self.layout, self.space.policy),
            sync_batchnorm=bool(pins.get("sync_batchnorm")),
            shares=shares,
        )

    def _evaluate_shares(self, shares: list[Share], kinds: dict[str, Device]) -> Evaluation | None:
        """Return the setting of all ranks: the slowest gives the step time, the fullest the memory."""
        ranks: dict[tuple[str, int, int], Share] = {}
        for place, share in zip(self.layout.places, shares, strict=True):
            ranks.setdefault((place.name, share.micro_batch, share.accumulation), share)
        estimates = [
            (self._estimate_alone(kinds[name], micro, rounds), kinds[name]) for name, micro, rounds in ranks
        ]
        times = [estimate.step_s for estimate, _ in estimates if estimate.step_s is not None]
        if len(times) < len(estimates):
            return None
        fullest, device = max(estimates, key=lambda pair: pair[0].band.high_bytes / available_bytes(pair[1]))
        global_batch = self.space.workload.global_batch
        slowest = max(times)
        estimate = fullest.replace(
            step_s=slowest, samples_per_s=global_batch / slowest, mfu=None, step_time=None
        )
        micro, rounds = (
            max(share.micro_batch for share in shares),
            max(share.accumulation for share in shares),
        )
        return Evaluation(
            setting=self._make_setting(micro, rounds, global_batch, tuple(shares)),
            layout=self.layout,
            estimate=estimate,
            allowed_bytes=int(self.space.policy.memory_share * available_bytes(device)),
        )
