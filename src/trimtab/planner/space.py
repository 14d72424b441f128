"""List every legal setting of a job on a cluster, and why the others are refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from trimtab.catalog.devices import explain_no_products, has_products
from trimtab.engine.in_backward_rules import NOT_ACCUMULATED, NOT_COMPILED, find_in_backward_refusal
from trimtab.engine.offload_rules import find_refusal
from trimtab.errors import WrongUse
from trimtab.planner import batch_loss_rules
from trimtab.planner.batch_split import find_split, list_splits
from trimtab.planner.estimator_interface import Layout, available_bytes
from trimtab.planner.pins import (
    BUDGET_OF_ONE_DEVICE,
    CONTEXT_NOT_COMPILED,
    EXPERTS_NOT_COMPILED,
    IN_BACKWARD,
    NOT_COMPILED_OFFLOADED,
    NOT_COMPILED_SYNCHRONISED,
    TENSOR_NOT_COMPILED,
    find_contradictions,
    find_wrong_degree,
    has_budget,
    read_ways,
)
from trimtab.spec import (
    Allocator,
    Mesh,
    Offload,
    Precision,
    RankPlacement,
    Recompute,
    Rejection,
    Schedule,
    Setting,
    Strategy,
)
from trimtab.spec.setting import read_offload
from trimtab.strategies import STRATEGIES, strategy_by_speed
from trimtab.units import format_flops, format_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trimtab.spec import Cluster, Device, Link, Policy, Workload


MOST_MIXES = 64
"""If different devices can be mixed in more ways than this, only all of them together are tried."""

Picks = list[tuple[int, "Device"]]
"""Pairs of node number and device."""


def list_layouts(cluster: Cluster) -> list[Layout]:
    """Return every set of devices worth trying, the smallest first.

    Within a node, any number of devices; over several nodes, whole nodes only. Of equal devices, take those
    with the most free memory, and also those with the fastest link if they differ.
    """
    by_kind: dict[str, Picks] = {}
    for number, node in enumerate(cluster.nodes):
        for device in node.devices:
            by_kind.setdefault(device.kind, []).append((number, device))
    layouts: dict[tuple[RankPlacement, ...], Layout] = {}
    for picks_of_kind in by_kind.values():
        for picks in _pick_alike(cluster, picks_of_kind):
            candidate = make_layout(cluster, picks)
            layouts.setdefault(candidate.places, candidate)
    for picks in _pick_mixed(list(by_kind.values())):
        candidate = make_layout(cluster, picks)
        layouts.setdefault(candidate.places, candidate)
    return sorted(layouts.values(), key=lambda layout: layout.gpus)


def _pick_alike(cluster: Cluster, picks_of_kind: Picks) -> Iterator[Picks]:
    """Yield sets of devices of one kind."""
    nodes: dict[int, list[Device]] = {}
    for number, device in picks_of_kind:
        nodes.setdefault(number, []).append(device)
    # The node with the most devices and memory first: it serves all counts up to its size.
    order = sorted(nodes, key=lambda node: (-len(nodes[node]), -sum(map(available_bytes, nodes[node])), node))
    first = order[0]
    within = [link for link in cluster.links if link.node == first]
    for count in range(1, len(nodes[first]) + 1):
        for devices in _pick_in_node(nodes[first], within, count):
            yield [(first, device) for device in devices]
    for count in range(2, len(order) + 1):
        yield [(number, node) for number in order[:count] for node in nodes[number]]


def _pick_in_node(devices: list[Device], links: list[Link], count: int) -> list[list[Device]]:
    """Return the devices of a node with the most free memory, and those on the fastest link."""
    roomy = sorted(devices, key=lambda device: (-available_bytes(device), device.index))
    choices = [roomy[:count]]
    if 1 < count < len(devices):
        ends = {device.index for device in devices}
        fast = max(
            (link for link in links if len(ends & set(link.devices)) >= count),
            key=lambda link: link.bandwidth_bytes_per_s or 0.0,
            default=None,
        )
        if fast is not None:
            choices.append([device for device in roomy if device.index in fast.devices][:count])
    return [sorted(choice, key=lambda device: device.index) for choice in choices]


def _pick_mixed(kinds: list[Picks]) -> Iterator[Picks]:
    """Yield sets with devices of several kinds."""
    if len(kinds) < 2:  # noqa: PLR2004 - two kinds
        return
    ways = 1
    for picks_of_kind in kinds:
        ways *= len(picks_of_kind) + 1
    numbers: Iterable[tuple[int, ...]] = (
        product(*(range(len(picks_of_kind) + 1) for picks_of_kind in kinds))
        if ways <= MOST_MIXES
        else [tuple(len(picks_of_kind) for picks_of_kind in kinds)]
    )
    for counts in numbers:
        if sum(count > 0 for count in counts) > 1:
            yield [pick for picks, count in zip(kinds, counts, strict=True) for pick in picks[:count]]


def make_layout(cluster: Cluster, picks: Picks) -> Layout:
    """Return the layout of these devices, with the part of the cluster that holds them."""
    picks = sorted(picks, key=lambda pick: (pick[0], pick[1].index))
    used = sorted({number for number, _ in picks})
    chosen = {number: [device for node, device in picks if node == number] for number in used}
    links = []
    for link in cluster.links:
        if link.node is None:
            links += [link] if len(used) > 1 else []
        elif link.node in chosen:
            ends = tuple(device.index for device in chosen[link.node] if device.index in link.devices)
            if len(ends) > 1:
                links.append(link.replace(node=used.index(link.node), devices=ends))
    part = cluster.replace(
        nodes=tuple(cluster.nodes[number].replace(devices=tuple(chosen[number])) for number in used),
        links=tuple(links),
    )
    places = tuple(
        RankPlacement(
            node=number, node_name=cluster.nodes[number].name, device=device.index, name=device.kind
        )
        for number, device in picks
    )
    return Layout(places=places, cluster=part)


MOST_WORKERS = 8
"""Loader processes per rank: more rarely feed a device faster, and each holds batches in RAM."""
TRACED_RECOMPUTES = [Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE]
"""Ways of recomputing that a search traces."""
SEARCHED_RECOMPUTES = [*TRACED_RECOMPUTES, *(way for way in Recompute if way.way.is_partial)]
"""Ways of recomputing that a search tries. If some blocks are recomputed and others are not, their traces
follow from those with none and with all (`predict.mix_recompute`)."""
USUAL_WORKERS = 4
"""Loader processes per rank if the number of cores is unknown."""
WITHOUT_AUTOCAST = (Precision.TF32, Precision.FP32)
"""Precisions for a job that autocast breaks, the faster one first."""

SLICES_APART = (
    "several MIG slices: a process sees one of them, and NCCL does not join them; each can run a job "
    "of its own"
)
NOT_COMPILED_IN_BACKWARD = f"{IN_BACKWARD} compiled: {NOT_COMPILED}"
BatchSplit = tuple[int, int]
"""Micro-batch and accumulation."""


@dataclass(frozen=True)
class Family:
    """Settings that differ only in micro-batch, accumulation and allocator."""

    layout: Layout
    strategy: Strategy
    mesh: Mesh
    precision: Precision
    recompute: Recompute
    compile: bool
    workers: int
    global_batch: int
    sync_batchnorm: bool = field(default=False, kw_only=True)
    ways: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)
    """Fields of the setting that no search changes, each with its value."""
    splits: tuple[BatchSplit, ...] = field(compare=False)
    """The largest micro-batch first."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.strategy, self.mesh, self.recompute, self.compile, self.ways))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _settings(self) -> dict[tuple[BatchSplit, Allocator], Setting]:
        return {}

    def setting(self, split: BatchSplit, allocator: Allocator = Allocator.DEFAULT) -> Setting:
        """Return the setting with this split; a search asks for each of them many times."""
        setting = self._settings.get((split, allocator))
        if setting is None:
            setting = self._settings[split, allocator] = Setting(
                strategy=self.strategy,
                mesh=self.mesh,
                micro_batch=split[0],
                accumulation=split[1],
                global_batch=self.global_batch,
                precision=self.precision,
                recompute=self.recompute,
                compile=self.compile,
                allocator=allocator,
                workers=self.workers,
                sync_batchnorm=self.sync_batchnorm,
                **dict(self.ways),
            )
        return setting


@dataclass(frozen=True)
class FailedPrecision:
    """A precision that no setting of a job runs in."""

    precision: Precision
    why: str
    count: int
    """How many settings were tried or would have been."""


@dataclass(frozen=True)
class Space:
    """The legal settings of a job on a cluster."""

    families: tuple[Family, ...]
    mixed: tuple[Layout, ...]
    """Layouts of different devices: their micro-batches follow from their speeds."""
    allocators: tuple[Allocator, ...]
    """The preferred one first."""
    refused: tuple[Rejection, ...]
    policy: Policy
    workload: Workload
    failed_precisions: tuple[FailedPrecision, ...] = ()
    """Precisions in which every setting failed, so that the next one was tried."""
    tight: bool = False
    """Whether to accept settings that fit only because torch releases cached blocks."""

    def only(self, gpus: int) -> Space:
        """Return the part of the space with this number of GPUs."""
        return replace(
            self,
            families=tuple(family for family in self.families if family.layout.gpus == gpus),
            mixed=tuple(layout for layout in self.mixed if layout.gpus == gpus),
            refused=(),
        )

    def precision(self, devices: tuple[Device, ...]) -> Precision:
        """Return the precision of all settings on these devices."""
        return pick_precision(devices, self.policy, self.failed_precisions)


def build_space(
    workload: Workload, cluster: Cluster, policy: Policy, failed: tuple[FailedPrecision, ...] = ()
) -> Space:
    """Return all legal settings; raise if pins contradict each other or the hardware.

    `failed` are precisions that the job cannot run in.
    """
    _check_policy(workload, cluster, policy)
    pins = policy.pins
    every = [layout for layout in list_layouts(cluster) if pins.get("gpus") in (None, layout.gpus)]
    refusals = _Refusals()
    families: list[Family] = []
    mixed: list[Layout] = []
    by_speed = strategy_by_speed().word
    for layout in every:
        if layout.gpus > 1 and any(device.slice for device in layout.cluster.devices):
            refusals.add(SLICES_APART, 1)
        elif layout.gpus > 1 and len(layout.kinds) > 1 and workload.is_indivisible:
            refusals.add(batch_loss_rules.explain_single_rank(workload), 1)
        elif len(layout.kinds) == 1:
            families += _list_families(layout, workload, policy, failed, refusals)
        elif pins.get("strategy") in {None, by_speed} and not find_wrong_degree(
            pins, Mesh(dp_replicate=layout.gpus)
        ):
            mixed.append(layout)
            refusals.add(
                f"any strategy but {by_speed} on different GPUs: all ranks would wait for the slowest; "
                f"only {by_speed} divides the batch by GPU speed",
                1,
            )
    if not families and not mixed:
        raise _make_empty_error(policy, workload, refusals.to_rejections())
    # Each fixed rule removes as many settings as remain.
    left = sum(len(family.splits) for family in families) or 1
    for why in _list_rules(cluster.devices, policy, failed):
        refusals.add(why, left)
    pinned = pins.get("allocator")
    return Space(
        families=tuple(families),
        mixed=tuple(mixed),
        allocators=(Allocator(str(pinned)),) if pinned else (Allocator.DEFAULT, Allocator.EXPANDABLE),
        refused=refusals.to_rejections(),
        policy=policy,
        workload=workload,
        failed_precisions=failed,
    )


def list_shard_counts(workload: Workload, cluster: Cluster, policy: Policy) -> set[int]:
    """Return every number of shards in the legal settings; empty if none is legal."""
    try:
        families = build_space(workload, cluster, policy).families
    except WrongUse:
        return set()
    return {family.mesh.dp_shard for family in families if family.mesh.dp_shard > 1}


class _Refusals:
    """Counts of refused settings by cause."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, why: str, count: int) -> None:
        self.counts[why] = self.counts.get(why, 0) + count

    def to_rejections(self) -> tuple[Rejection, ...]:
        return tuple(Rejection(why=why, count=count) for why, count in self.counts.items() if count)


def _check_policy(workload: Workload, cluster: Cluster, policy: Policy) -> None:
    """Raise if there is no GPU, or if the pins contradict each other or the hardware."""
    if not cluster.devices:
        raise WrongUse(
            "no --on", found="there is no GPU", cure="Name one, as in --on H200 or --on 4xA100-40GB."
        )
    wrong = find_contradictions(policy.pins, workload, len(cluster.devices))
    wrong += _check_precision(policy.pins.get("precision"), cluster.devices)
    wrong += _check_slices(policy.pins, cluster.devices)
    if wrong:
        pinned = format_pins(policy.pins)
        raise WrongUse(
            pinned,
            found="; ".join(what for what, _ in wrong),
            cure=make_sentence("; ".join(cure for _, cure in wrong)),
        )


def make_sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop.

    >>> make_sentence("use 4 GPUs")
    'Use 4 GPUs.'
    """
    return f"{text[:1].upper()}{text[1:]}."


def format_pins(pins: Mapping[str, Any]) -> str:
    """Return pins as users type them, as in `--pin compile=false`."""
    return " ".join(f"--pin {key}={format_value(value)}" for key, value in pins.items())


def _check_precision(precision: Any, devices: tuple[Device, ...]) -> list[tuple[str, str]]:
    """Return the contradiction of a pinned precision that no device supports."""
    if precision is None or any(can_run(device, Precision(precision)) for device in devices):
        return []
    names = ", ".join(dict.fromkeys(device.kind for device in devices))
    form = Precision(precision).dtypes.products_format
    if not any(has_products(device, form) for device in devices):
        return [(f"precision={precision}: {explain_no_products(devices[0], form)}", "pin precision=bf16")]
    if Precision(precision).dtypes.tf32_products:
        return [(f"precision={precision}, and {names} has no TF32", "pin precision=fp16 or fp32")]
    return [
        (
            f"precision={precision}, and {names} only emulates bf16",
            "pin precision=fp16, or name GPUs of compute capability 8.0 or newer",
        )
    ]


def _check_slices(pins: dict[str, Any], devices: tuple[Device, ...]) -> list[tuple[str, str]]:
    """Return the contradiction of pins that need several GPUs where some are MIG slices."""
    slices = [device for device in devices if device.slice]
    asked = max(int(pins.get(key) or 1) for key in ("gpus", "data_parallel"))
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    if strategy is not None and strategy.needs_several_gpus:
        asked = max(asked, 2)
    whole = len(devices) - len(slices)
    # If the devices are too few anyway, another message says so.
    if not slices or not max(1, whole) < asked <= len(devices):
        return []
    profiles = ", ".join(dict.fromkeys(slice_.slice.profile for slice_ in slices if slice_.slice))
    found = (
        f"MIG slices ({profiles}) cannot work on one job together: a process sees one of them, and NCCL does "
        "not join slices"
    )
    cure = (
        "leave the pin out for a plan of one slice, run a job of its own on each, or have MIG mode turned "
        "off (nvidia-smi -i GPU -mig 0) and plan on the whole GPU"
    )
    return [(found, cure)]


def can_run(device: Device, precision: Precision) -> bool:
    """Whether the device runs the precision in hardware; unknown counts as yes."""
    if not has_products(device, precision.dtypes.products_format):
        return False
    if precision.dtypes.is_bf16:
        return device.bf16 is not False
    if precision.dtypes.tf32_products:
        known = any(getattr(device.peaks, name) for name in device.peaks.__struct_fields__)
        return device.peaks.tf32 is not None or not known
    return True


def default_precision(devices: tuple[Device, ...]) -> Precision:
    """Return bf16 if all devices run it, fp16 if one does not, fp32 if that is unknown."""
    if all(device.bf16 for device in devices):
        return Precision.BF16
    if any(device.bf16 is False for device in devices):
        return Precision.FP16
    return Precision.FP32


def pick_precision(
    devices: tuple[Device, ...], policy: Policy, failed: tuple[FailedPrecision, ...] = ()
) -> Precision:
    """Return the pinned precision, else the best one in which the job has not failed."""
    if "precision" in policy.pins:
        return Precision(str(policy.pins["precision"]))
    unusable = {failed_precision.precision for failed_precision in failed}
    order = [default_precision(devices), *WITHOUT_AUTOCAST]
    return next(
        (precision for precision in order if precision not in unusable and _can_all_run(devices, precision)),
        order[0],
    )


def _can_all_run(devices: tuple[Device, ...], precision: Precision) -> bool:
    return all(can_run(device, precision) for device in devices)


def _list_families(
    layout: Layout,
    workload: Workload,
    policy: Policy,
    failed: tuple[FailedPrecision, ...],
    refusals: _Refusals,
) -> Iterator[Family]:
    pins = policy.pins
    precision = pick_precision(layout.cluster.devices, policy, failed)
    recomputes = [Recompute(str(pins["recompute"]))] if "recompute" in pins else SEARCHED_RECOMPUTES
    compiles = _list_compiles(pins)
    pinned = "recompute" in pins
    ways = len(recomputes) * len(compiles)
    synchronised = bool(pins.get("sync_batchnorm"))
    ways_of_pins = read_ways(pins)
    if not _can_all_run(layout.cluster.devices, precision):
        refusals.add(f"{precision} is only emulated by {layout.kinds[0]}", ways)
        return
    for strategy, mesh in _list_meshes(layout, len(workload.branches), pins):
        if wrong_pin := _find_wrong_pin(pins, strategy, mesh):
            refusals.add(f"the pin {wrong_pin}={pins[wrong_pin]}", ways)
            continue
        if mesh.data_parallel > workload.global_batch:
            refusals.add(
                f"more data-parallel GPUs than the global batch of {workload.global_batch} has samples", ways
            )
            continue
        refused = batch_loss_rules.explain_refusal(workload, strategy, mesh)
        rules = STRATEGIES[strategy]
        refused = refused or (rules.why_not_synchronised if synchronised else "")
        refused = refused or _refuse_budget(pins, strategy, mesh)
        in_backward = bool(ways_of_pins.get(IN_BACKWARD))
        refused = refused or _explain_in_backward(strategy, mesh, precision, in_backward=in_backward)
        refused = refused or _explain_offload(strategy, layout.gpus, pins)
        refused = refused or _explain_pinned_schedule(strategy, ways_of_pins)
        if refused:
            refusals.add(refused, ways)
            continue
        members = _list_family_splits(workload, mesh, policy, refusals, ways)
        scheduled = list(_list_scheduled(workload, strategy, mesh, members, ways_of_pins, refusals))
        if not scheduled:
            refusals.add(
                f"no micro-batch makes the global batch of {workload.global_batch} with these pins", ways
            )
            continue
        why_not_compiled = _explain_not_compiled(strategy, mesh)
        tied = synchronised and layout.gpus > 1
        refusals.add(why_not_compiled, len(recomputes) * (bool(why_not_compiled) and True in compiles))
        refusals.add(NOT_COMPILED_SYNCHRONISED, len(recomputes) * (tied and True in compiles))
        stored = Offload.ACTIVATIONS in ways_of_pins.get("offload", ())
        refusals.add(NOT_COMPILED_OFFLOADED, len(recomputes) * (stored and True in compiles))
        refusals.add(NOT_COMPILED_IN_BACKWARD, len(recomputes) * (in_backward and True in compiles))
        only_eager = bool(why_not_compiled) or stored or in_backward
        usable = [False] if only_eager else [compiled for compiled in compiles if not (compiled and tied)]
        tried = [
            way
            for way in recomputes
            if pinned or not way.way.is_partial or (rules.runs_whole_model and not stored)
        ]
        refusals.add(
            f"recomputing some blocks under {strategy}{' with offloaded activations' * stored}: only by pin",
            (len(recomputes) - len(tried)) * len(usable),
        )
        for recompute, compiled, (fields, splits) in product(tried, usable, scheduled):
            yield Family(
                layout=layout,
                strategy=strategy,
                mesh=mesh,
                precision=precision,
                recompute=recompute,
                compile=compiled,
                ways=tuple((ways_of_pins | fields).items()),
                workers=count_workers(layout, policy),
                global_batch=workload.global_batch,
                sync_batchnorm=synchronised,
                splits=tuple(splits),
            )


def _find_wrong_pin(pins: Mapping[str, Any], strategy: Strategy, mesh: Mesh) -> str:
    """Return the first pin that a strategy and mesh do not agree with; empty if they agree with all."""
    if pins.get("strategy") not in (None, strategy):
        return "strategy"
    if pins.get("data_parallel") not in (None, mesh.data_parallel):
        return "data_parallel"
    return find_wrong_degree(pins, mesh)


def _explain_not_compiled(strategy: Strategy, mesh: Mesh) -> str:
    """Return why a strategy or its mesh is not compiled; empty if it is."""
    if why := STRATEGIES[strategy].why_not_compiled:
        return f"{strategy} compiled: {why}"
    if mesh.tp > 1:
        return f"tp={mesh.tp} compiled: {TENSOR_NOT_COMPILED}"
    if mesh.ep > 1:
        return f"ep={mesh.ep} compiled: {EXPERTS_NOT_COMPILED}"
    return f"cp={mesh.cp} compiled: {CONTEXT_NOT_COMPILED}" if mesh.cp > 1 else ""


def _explain_in_backward(strategy: Strategy, mesh: Mesh, precision: Precision, *, in_backward: bool) -> str:
    """Return why weights cannot be updated in the backward pass; empty if they can."""
    setting = Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=1,
        global_batch=mesh.data_parallel,
        precision=precision,
        optimizer_in_backward=in_backward,
    )
    refusal = find_in_backward_refusal(setting)
    return "" if refusal is None else f"{strategy} with {IN_BACKWARD}: {refusal.found}"


def _explain_offload(strategy: Strategy, gpus: int, pins: Mapping[str, Any]) -> str:
    """Return why a strategy cannot offload what is pinned; empty if it can."""
    refusal = find_refusal(STRATEGIES[strategy], gpus, read_offload(str(pins.get("offload") or "none")))
    return "" if refusal is None else f"{strategy} with offload={pins['offload']}: {refusal.found}"


def _explain_pinned_schedule(strategy: Strategy, ways: Mapping[str, Any]) -> str:
    """Return why a strategy cannot have a pinned schedule; empty if it can, or none is pinned."""
    schedule = ways.get("schedule", Schedule.ONE_F_ONE_B)
    if schedule is Schedule.ONE_F_ONE_B or STRATEGIES[strategy].has_schedule:
        return ""
    return f"the pin schedule={schedule}, which is for pipelines"


def _list_scheduled(  # noqa: PLR0913, PLR0917 - parts of a setting, and the refusals
    workload: Workload,
    strategy: Strategy,
    mesh: Mesh,
    splits: list[BatchSplit],
    ways: Mapping[str, Any],
    refusals: _Refusals,
) -> Iterator[tuple[dict[str, Any], list[BatchSplit]]]:
    """Yield the fields of each schedule with the splits that it can have; note the others with their reason.

    A pinned schedule is the only one.
    """
    rules = STRATEGIES[strategy]
    if not rules.has_schedule:
        if splits:
            yield {}, splits
        return
    pinned = [(ways["schedule"], ways["virtual_stages"])] if "schedule" in ways else None
    for schedule, virtual_stages in pinned or rules.list_schedules(mesh):
        fields: dict[str, Any] = {"schedule": schedule, "virtual_stages": virtual_stages}
        legal, illegal = [], []
        for split in splits:
            setting = Setting(
                strategy=strategy,
                mesh=mesh,
                micro_batch=split[0],
                accumulation=split[1],
                global_batch=workload.global_batch,
                **fields,
            )
            if why := rules.explain_illegal(setting):
                illegal.append(why)
            else:
                legal.append(split)
        if illegal:
            more = len(set(illegal)) - 1
            others = f"; the same for {more} other numbers of micro-batches" if more else ""
            refusals.add(f"{illegal[0]}{others}", len(illegal))
        if legal:
            yield ({} if virtual_stages == 1 and not schedule.splits_backward else fields), legal


def _list_compiles(pins: Mapping[str, Any]) -> list[bool]:
    """Return whether to try eager and compiled settings; only the compiler has a budget of activations."""
    if has_budget(pins):
        return [True]
    return [bool(pins["compile"])] if "compile" in pins else [False, True]


def _refuse_budget(pins: Mapping[str, Any], strategy: Strategy, mesh: Mesh) -> str:
    """Return why a pinned budget cannot be traced with a strategy; empty if it can, or none is pinned."""
    rules = STRATEGIES[strategy]
    is_compiled = not rules.why_not_compiled and rules.traced_as(mesh)[1].size == 1
    return BUDGET_OF_ONE_DEVICE if has_budget(pins) and not is_compiled else ""


def _list_meshes(layout: Layout, branches: int, pins: Mapping[str, Any]) -> Iterator[tuple[Strategy, Mesh]]:
    """Yield every strategy and mesh for the devices of a layout; inner axes have the degrees of the pins."""
    inner = {name: int(pins.get(name) or 1) for name in ("tp", "cp", "ep")}
    stages = {name: int(pins[name]) for name in ("pp", "dp_shard", "dp_replicate") if name in pins}
    per_node = {len(node.devices) for node in layout.cluster.nodes}
    # Nodes of different sizes count as one: no strategy can make groups of them.
    nodes = len(layout.cluster.nodes) if len(per_node) == 1 else 1
    for rules in STRATEGIES.values():
        for mesh in rules.meshes_within(layout.gpus, nodes=nodes, branches=branches, **inner, **stages):
            yield rules.word, mesh


def _list_family_splits(
    workload: Workload, mesh: Mesh, policy: Policy, refusals: _Refusals, ways: int
) -> list[BatchSplit]:
    """Return the splits that give the global batch on a mesh; one micro-batch if it cannot be split."""
    # The branch with the most ranks has the smallest share, which limits the micro-batch of all.
    most = -(-workload.global_batch // max(mesh.copies, default=1))
    splits = [
        split
        for split in _list_legal_splits(workload.global_batch, mesh.data_parallel, policy)
        if split[0] <= most
    ]
    in_backward = bool(read_ways(policy.pins).get(IN_BACKWARD))
    if not workload.is_indivisible and not in_backward:
        return splits
    smaller = [split for split in splits if split[1] > 1]
    why = f"{IN_BACKWARD}: {NOT_ACCUMULATED}"
    if workload.is_indivisible:
        why = batch_loss_rules.explain_uncut_batch(workload)
    refusals.add(why, len(smaller) * ways)
    return [split for split in splits if split[1] == 1]


def _list_legal_splits(global_batch: int, ranks: int, policy: Policy) -> list[BatchSplit]:
    micro, rounds = policy.pins.get("micro_batch"), policy.pins.get("accumulation")
    if micro is not None:
        pinned = find_split(global_batch, ranks, micro_batch=int(micro))
        return [pinned] if pinned and rounds in (None, pinned[1]) else []
    return [split for split in list_splits(global_batch, ranks) if rounds in (None, split[1])]


def count_workers(layout: Layout, policy: Policy) -> int:
    """Return the loader processes per rank: its share of the cores, less one for the rank itself."""
    if "workers" in policy.pins:
        return int(policy.pins["workers"])
    cores = [node.cpu_cores // len(node.devices) for node in layout.cluster.nodes if node.cpu_cores]
    if len(cores) < len(layout.cluster.nodes):
        return USUAL_WORKERS
    return max(0, min(MOST_WORKERS, min(cores) - 1))


def _list_rules(
    devices: tuple[Device, ...], policy: Policy, failed: tuple[FailedPrecision, ...]
) -> Iterator[str]:
    """Yield the refusals that hold for the whole space."""
    if "precision" in policy.pins:
        yield f"another precision than the pin {policy.pins['precision']}"
    else:
        chosen = pick_precision(devices, policy, failed)
        unusable = {failed_precision.precision for failed_precision in failed}
        others = [other for other in Precision if other is not chosen and other not in unusable]
        yield from _join_reasons({other: _explain_precision(other, chosen, devices) for other in others})
    if "optimizer" in policy.pins:
        yield f"another optimizer implementation than the pin {policy.pins['optimizer']}"
    else:
        yield "foreach and plain optimizers: fused does the same in fewer passes over memory"


def _join_reasons(reasons: Mapping[Precision, str]) -> Iterator[str]:
    """Yield a sentence for each precision; those with the same reason share it, with all their names."""
    alike: dict[str, list[str]] = {}
    for precision, reason in reasons.items():
        alike.setdefault(reason.removeprefix(precision.value), []).append(precision.value)
    for reason, names in alike.items():
        yield from [f"{', '.join(names)}{reason}"] * len(names)


def _explain_precision(  # noqa: PLR0911 - one way out for each reason
    precision: Precision, chosen: Precision, devices: tuple[Device, ...]
) -> str:
    """Return why a precision is not tried, with its peak rate."""
    dtypes, other = precision.dtypes, chosen.dtypes
    if not dtypes.keeps_float32:
        form = dtypes.products_format
        lacking = [device for device in devices if not has_products(device, form)]
        if lacking:
            return f"{precision}: {explain_no_products(lacking[0], form).partition(' (')[0]}"
        return f"{precision}: training gets other numerics, so only by pin"
    if dtypes.is_bf16:
        emulated = f"{precision} is only emulated here"
        return emulated if other.scales_loss else f"{precision}: hardware support is unknown here"
    if dtypes.scales_loss and not other.is_narrow:
        return f"{precision} runs under autocast as well, and needs loss scaling: only by pin"
    if dtypes.scales_loss:
        return f"{precision} needs loss scaling, and runs no faster than {chosen}"
    peaks = devices[0].peaks
    slow, fast = peaks.get_rate(dtypes.products), peaks.get_rate(other.products)
    if slow is None or fast is None:
        return f"{precision} is slower than {chosen} on tensor cores, and keeps larger activations"
    return f"{precision} has a peak of {format_flops(slow)}, {chosen} of {format_flops(fast)}: only by pin"


def _make_empty_error(policy: Policy, workload: Workload, refused: tuple[Rejection, ...]) -> WrongUse:
    """Return the error for a space without settings."""
    pinned = format_pins(policy.pins)
    return WrongUse(
        pinned or f"global batch {workload.global_batch}",
        found="no setting agrees with that: " + "; ".join(rejection.why for rejection in refused),
        cure=batch_loss_rules.suggest_fix(workload) if workload.is_indivisible else "Leave a pin out.",
    )
