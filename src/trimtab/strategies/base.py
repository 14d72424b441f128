"""What every strategy answers: its meshes, its traces, what it sends, how it is wrapped and explained.

A strategy is one object in one file of this package. It gives plain values and descriptions: the engine, the
tracer, the predictor, the planner and the config writer act on them, and none of them knows its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from trimtab.errors import WrongUse
from trimtab.spec import Mesh, Schedule, Strategy
from trimtab.spec.trace import CONTEXT, EXPERTS, STATISTICS, TENSOR_PARALLEL_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from trimtab.spec import Setting, Trace, Work


class Wrapping(Enum):
    """What the engine leaves of a model on one device."""

    WHOLE = auto()
    """All of it."""
    SHARDS = auto()
    """A share of every parameter (FSDP2)."""
    BRANCH = auto()
    """What one branch of the loss needs."""
    STAGE = auto()
    """Some of the layers."""
    STAGE_SHARDS = auto()
    """A share of every parameter of some of the layers (FSDP2)."""


class Derivation(Enum):
    """How the trace of a setting follows from those of its `trace_parts`."""

    AS_TRACED = auto()
    """It is the trace of the first part."""
    BUCKETS = auto()
    """The same with gradients in buckets, which ranks sum."""
    SHARD_LINE = auto()
    """Two parts with different numbers of shards; sizes are affine in 1 / shards."""


class Refusal(NamedTuple):
    """Why a strategy cannot be used, and what to do."""

    found: str
    cure: str


class RankKind(NamedTuple):
    """A kind of ranks, where not all of a setting hold the same."""

    branch: str = ""
    stage: int | None = None
    number: int = 0
    """Of the branch or the stage."""
    words: str = ""


STRATEGIES_WITH_EXPERTS = frozenset({Strategy.FSDP, Strategy.HSDP})
"""Strategies whose ranks can hold different experts."""
ALIKE = RankKind()
"""Where all ranks hold the same."""


class Call(NamedTuple):
    """Communication that runs at the same time as other communication."""

    collective: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or send."""
    size: int
    ranks: int
    apart: int = 1
    repeats: int = 1
    """How many of them follow each other."""


class LinkCosts(Protocol):
    """What sending costs on the links of a cluster."""

    def all_gather_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds until each rank has the `size` bytes that all of them hold a share of."""

    def reduce_scatter_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds until each rank has the sum of its share."""

    def all_reduce_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds until each rank has the sum of `size` bytes."""

    def all_to_all_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds until each rank has a share of every rank's `size` bytes, its own share too."""

    def send_s(self, size: int, apart: int) -> float:
        """Return the seconds until a rank has `size` bytes of the rank `apart` numbers away."""

    def together_s(self, streams: Sequence[Sequence[Call]]) -> float:
        """Return the seconds of streams that run at once and share links; calls of a stream run in turn."""


class PassTimes(NamedTuple):
    """Seconds of one micro-batch on one kind of rank."""

    trace: Trace
    forward_s: float
    input_s: float
    """Of the backward pass, or of its part before weight gradients, where a schedule computes them later."""
    weight_s: float = 0.0
    """Weight gradients that are computed after the rest of the backward pass."""


class Waits(NamedTuple):
    """Seconds of a step for which a rank waits for others."""

    bubble_s: float = 0.0
    """They compute."""
    sends_s: float = 0.0
    """Their tensors are on the way."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the communication time of one optimizer step depends on."""

    trace: Trace
    setting: Setting
    links: LinkCosts
    gradient_bytes: int
    """Of all trainable parameters of the traced rank."""
    hidden_forward_s: float
    """Seconds of one forward pass that collectives can hide behind."""
    hidden_backward_s: float

    def collectives(self, *, statistics: bool = False) -> list[Work]:
        """List the traced collectives: those of synchronised BatchNorm, or all others but those in layers."""
        return self._list_works(_is_statistics if statistics else _is_plain_collective)

    def _list_works(self, is_chosen: Callable[[Work], bool]) -> list[Work]:
        """List the traced operations that are chosen, in order; each different one is judged once."""
        works = self.trace.works
        chosen = [is_chosen(work) for work in works]
        return [works[number] for number in self.trace.sequence if chosen[number]]

    def within_layers_s(self) -> float:
        """Return the seconds for which ranks that split layers between them wait for each other.

        Every layer needs the result before it goes on, so that no computing hides it.
        """
        ranks = self.setting.mesh.tp
        if ranks == 1:
            return 0.0
        works = self._list_works(lambda work: work.op.startswith(TENSOR_PARALLEL_OPS))
        once = sum(self._within_layer_s(work, ranks) for work in works)
        return self.setting.accumulation * once

    def _within_layer_s(self, work: Work, ranks: int) -> float:
        if "wait" in work.op:
            return 0.0
        for word, cost in (
            ("all_gather", self.links.all_gather_s),
            ("reduce_scatter", self.links.reduce_scatter_s),
            ("all_reduce", self.links.all_reduce_s),
        ):
            if word in work.op:
                return cost(work.read_bytes, ranks)
        return self.links.all_to_all_s(work.read_bytes, ranks)

    def experts_s(self) -> float:
        """Return the seconds for which tokens travel to experts on other ranks and back; nothing hides them.

        Ranks with different experts are neighbours.
        """
        works = self._list_works(lambda work: work.op.startswith(EXPERTS))
        once = sum(self.links.all_to_all_s(work.read_bytes, self.setting.mesh.ep) for work in works)
        return self.setting.accumulation * once

    def statistics_s(self) -> float:
        """Return the seconds of synchronised BatchNorm: each layer waits for the ranks, both ways."""
        ranks = self.setting.gpus
        once = sum(
            # A trace on fewer ranks knows the gathered bytes of one rank.
            self.links.all_gather_s(work.write_bytes * ranks, ranks)
            if "gather" in work.op
            else self.links.all_reduce_s(work.read_bytes, ranks)
            for work in self.collectives(statistics=True)
        )
        return self.setting.accumulation * once


def _is_statistics(work: Work) -> bool:
    return work.op.startswith(STATISTICS)


def _is_plain_collective(work: Work) -> bool:
    inside = (STATISTICS, CONTEXT, EXPERTS, *TENSOR_PARALLEL_OPS)
    return work.kind == "collective" and not work.op.startswith(inside)


class ParallelStrategy(ABC):
    """One way to spread a job over devices.

    Subclasses are stateless. What a subclass leaves out has the answer of a strategy under which every rank
    runs the whole model on samples of its own.
    """

    word: ClassVar[Strategy]
    """Its name in JSON and on the command line."""
    wrapping: ClassVar[Wrapping]
    complexity: ClassVar[int]
    """Order by how much ranks exchange in the middle of a step: of two plans that predictions cannot tell
    apart, the lower one is taken."""
    probe_order: ClassVar[int]
    """Order in which the search looks at strategies before anything is known: first what tells most."""

    needs_several_gpus: ClassVar[bool] = True
    job_facts: ClassVar[tuple[str, ...]] = ()
    """What an estimate has to know of the job: `branches`, `global_batch`."""
    runs_whole_model: ClassVar[bool] = True
    """Whether every rank computes the whole model on samples of its own."""
    shares_by_speed: ClassVar[bool] = False
    """Whether devices of different kinds may take different shares of the batch."""
    is_bounded_by_one_device: ClassVar[bool] = False
    """Whether `least_step_s` follows from the time on one device. Mostly that bound is enough, and the
    strategy is traced only when its turn comes."""
    spans_shard_lines: ClassVar[bool] = False
    """Whether its traces at two numbers of shards give those at any other."""
    time_assumptions: ClassVar[tuple[str, ...]] = ()
    """What a predicted time takes for granted."""
    why_not_compiled: ClassVar[str] = ""
    """Why torch.compile does not go with it; empty where it does."""

    degrees: ClassVar[tuple[bool, bool] | None] = None
    """Whether a config that says it by degrees has several replicas, and several shards; None where
    frameworks do not have it."""
    needs_config_key: ClassVar[bool] = True
    """Whether a config has to say it: frameworks run the others by the number of processes alone."""
    also_spelt: ClassVar[tuple[Strategy, ...]] = ()
    """Other strategies whose words in a config mean the same run."""
    accelerate_flags: ClassVar[tuple[str, ...]] = ()
    """Flags of `accelerate launch` that turn it on."""

    # predicates

    @property
    def needs_branches(self) -> bool:
        """Whether the job has to have losses() and branches."""
        return "branches" in self.job_facts

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards parameters, gradients and optimizer state."""
        return self.wrapping in {Wrapping.SHARDS, Wrapping.STAGE_SHARDS}

    @property
    def has_schedule(self) -> bool:
        """Whether ranks run forward and backward passes by a schedule, in pipeline stages."""
        return self.wrapping in {Wrapping.STAGE, Wrapping.STAGE_SHARDS}

    @property
    def is_built_on_host(self) -> bool:
        """Whether a device holds a share of the model only, so that the model is built on the host."""
        return self.is_sharded or self.has_schedule

    @property
    def is_in_frameworks(self) -> bool:
        """Whether trainers other than trimtab's own can run it."""
        return self.degrees is not None

    @property
    def why_not_synchronised(self) -> str:
        """Why BatchNorm is not synchronised under it; empty where it is."""
        if self.runs_whole_model:
            return ""
        return (
            f"{self.word} with sync_batchnorm: its ranks run different layers, and all must run the same ones"
        )

    def on(self, mesh: Mesh) -> ParallelStrategy:
        """Return the strategy as it is on a mesh, where it depends on it."""
        return self

    # which meshes are legal, and why not

    def explain_illegal(self, setting: Setting) -> str:
        """Return why a setting with a mesh of its own is not legal; empty if it is."""
        if not setting.schedule.splits_backward and setting.virtual_stages == 1:
            return ""
        return f"schedule {setting.schedule} is for pipelines, and the strategy is {self.word}"

    def tensor_refusal(self, tp: int) -> Refusal | None:
        """Return why so many ranks cannot split layers between them under this strategy; None if they can."""
        if tp == 1 or self.is_sharded:
            return None
        allowed = f"{Strategy.FSDP} or {Strategy.HSDP}"
        return Refusal(
            f"only the ranks of {allowed} split layers between them", f"Use strategy {allowed}, or tp 1."
        )

    def expert_refusal(self, ep: int) -> Refusal | None:
        """Return why so many ranks cannot hold different experts under this strategy; None if they can."""
        if ep == 1 or self.word in STRATEGIES_WITH_EXPERTS:
            return None
        allowed = f"{Strategy.FSDP} or {Strategy.HSDP}"
        return Refusal(
            f"only the ranks of {allowed} hold different experts", f"Use strategy {allowed}, or ep 1."
        )

    def refusal(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Refusal | None:
        """Return why it cannot use so many GPUs in so many nodes of one size; None where it can."""
        if self.needs_several_gpus and gpus < 2:  # noqa: PLR2004 - several
            return Refusal("there is one GPU", "Name several, as in --on 8xH100.")
        return None

    @abstractmethod
    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return the mesh on all of these GPUs when the user names the strategy and nothing else."""

    def meshes(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Iterator[Mesh]:
        """Yield every mesh on all of these GPUs that a plan may choose."""
        if self.refusal(gpus, nodes=nodes, branches=branches) is None:
            yield self.usual_mesh(gpus, nodes=nodes, branches=branches)

    def mesh(  # noqa: PLR0913 - the degrees are named
        self, gpus: int, *, nodes: int = 1, branches: int = 0, tp: int = 1, cp: int = 1, ep: int = 1
    ) -> Mesh:
        """Return the usual mesh; raise WrongUse if it is refused.

        Each `tp` neighbours split layers, and each `cp` groups of them split sequences. Each `ep` neighbours
        hold different experts.
        """
        for flag, degree, refusal in (
            ("--tp", tp, self.tensor_refusal(tp)),
            ("--cp", cp, self.context_refusal(cp)),
            ("--ep", ep, self.expert_refusal(ep)),
        ):
            if refusal is not None:
                raise WrongUse(
                    f"{flag} {degree} with --strategy {self.word}", found=refusal.found, cure=refusal.cure
                )
        inner = tp * cp
        if gpus % inner:
            flags = " ".join(f"--{name} {degree}" for name, degree in (("cp", cp), ("tp", tp)) if degree > 1)
            divisors = [str(each) for each in range(1, gpus + 1) if gpus % each == 0]
            raise WrongUse(
                flags,
                found=f"there are {gpus} GPUs, which do not divide by {inner}",
                cure=f"Use a {'product' if ' --' in flags else 'degree'} of {', '.join(divisors[:8])}.",
            )
        groups = gpus // inner
        # A single group of ranks that split layers or sequences is several GPUs.
        refusal = self.refusal(max(groups, min(gpus, 2)), nodes=nodes, branches=branches)
        if refusal is not None:
            raise WrongUse(f"--strategy {self.word}", found=refusal.found, cure=refusal.cure)
        mesh = self.usual_mesh(groups, nodes=nodes, branches=branches).replace(tp=tp, cp=cp)
        if (ranks := mesh.expert_ranks) % ep:
            legal = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
            raise WrongUse(
                f"--ep {ep}",
                found=f"experts share the {ranks} ranks of dp_shard x cp x tp, which {ep} does not divide",
                cure=f"Use one of {', '.join(legal)}.",
            )
        return mesh.replace(ep=ep)

    def meshes_within(  # noqa: PLR0913 - the degrees are named
        self,
        gpus: int,
        *,
        nodes: int = 1,
        branches: int = 0,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int | None = None,
        dp_shard: int | None = None,
        dp_replicate: int | None = None,
    ) -> Iterator[Mesh]:
        """Yield every mesh on all of these GPUs with so many ranks along its inner axes.

        `pp`, `dp_shard` and `dp_replicate` are given if they are fixed. Stages are sharded or split only
        where that is asked for, because each such mesh is traced by itself.
        """
        if ep > 1:
            if self.expert_refusal(ep) is None:
                meshes = self.meshes_within(gpus, nodes=nodes, branches=branches, tp=tp, cp=cp)
                yield from (mesh.replace(ep=ep) for mesh in meshes if mesh.expert_ranks % ep == 0)
            return
        inner = tp * cp
        if inner == 1:
            yield from self.meshes(gpus, nodes=nodes, branches=branches)
            return
        if gpus % inner or self.tensor_refusal(tp) or self.context_refusal(cp):
            return
        groups = gpus // inner
        nodes = nodes if groups % nodes == 0 else 1
        meshes = iter(())
        if groups > 1:
            meshes = self.meshes(groups, nodes=nodes, branches=branches)
        elif self.refusal(gpus, nodes=nodes, branches=branches) is None:
            meshes = iter((self.usual_mesh(1, nodes=nodes, branches=branches),))
        for mesh in meshes:
            yield mesh.replace(tp=tp, cp=cp)

    def context_refusal(self, cp: int) -> Refusal | None:
        """Return why so many ranks cannot split sequences under it; None where they can."""
        if cp == 1 or (self.runs_whole_model and self.needs_several_gpus):
            return None
        return Refusal(
            "its ranks do not split sequences between them", "Use ddp, fsdp or hsdp, or leave cp out."
        )

    def pin_conflicts(self, pins: Mapping[str, Any], available: int, branches: int) -> list[Refusal]:
        """List the pins that cannot go with this strategy, which is pinned too."""
        conflicts = []
        if self.needs_several_gpus and (pins.get("gpus") == 1 or available == 1):
            conflicts.append(
                Refusal(
                    f"strategy={self.word} needs several GPUs, and there is one",
                    "pin strategy=single, or name more",
                )
            )
        if self.why_not_compiled and pins.get("compile"):
            conflicts.append(
                Refusal(
                    f"strategy={self.word} with compile=true: {self.why_not_compiled}",
                    "leave one of the two out",
                )
            )
        return conflicts

    def pinned_data_parallel(self, gpus: int | None) -> int | None:
        """Return the data-parallel ranks that follow from a pinned number of GPUs; None where none do."""
        return gpus if self.runs_whole_model or gpus == 1 else None

    def resized(self, mesh: Mesh, ranks: int, *, nodes: int = 1, branches: int = 0) -> tuple[Strategy, Mesh]:
        """Return the nearest strategy and mesh for another number of ranks; `mesh` is the one until now."""
        strategy, resized = self._resized(mesh, ranks, nodes=nodes, branches=branches)
        keeps_experts = resized.expert_ranks % mesh.ep == 0 and strategy in STRATEGIES_WITH_EXPERTS
        return strategy, resized.replace(ep=mesh.ep) if keeps_experts else resized

    def _resized(self, mesh: Mesh, ranks: int, *, nodes: int, branches: int) -> tuple[Strategy, Mesh]:
        tp = mesh.tp if ranks % mesh.tp == 0 else 1
        cp = mesh.cp if ranks % (tp * mesh.cp) == 0 else 1
        groups = ranks // (tp * cp)
        if tp * cp > 1 and (groups == 1 or self.refusal(groups, nodes=nodes, branches=branches) is not None):
            return Strategy.FSDP, Mesh(dp_shard=groups, tp=tp, cp=cp)
        if tp * cp > 1:
            usual = self.usual_mesh(groups, nodes=nodes, branches=branches)
            return self.word, usual.replace(tp=tp, cp=cp)
        if ranks == 1 or self.refusal(ranks, nodes=nodes, branches=branches) is None:
            return alone_or(self, ranks, nodes=nodes, branches=branches)
        return Strategy.FSDP, Mesh(dp_shard=ranks)

    def least_rounds(self, mesh: Mesh) -> int:
        """Return the number of micro-batches a step below which ranks would idle."""
        return 1

    def list_schedules(self, mesh: Mesh) -> Iterator[tuple[Schedule, int]]:
        """Yield each order of passes that a plan may choose, with its virtual stages."""
        yield Schedule.ONE_F_ONE_B, 1

    def uses_global_batch(self, mesh: Mesh) -> bool:
        """Whether an estimate needs the micro-batches of the whole global batch, not of one round."""
        return False

    # how it is traced, and what follows from which trace

    def rank_kinds(self, mesh: Mesh, branches: Sequence[str]) -> list[RankKind]:
        """List the kinds of ranks that hold different things: each is traced by itself."""
        return [ALIKE]

    @abstractmethod
    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return the strategy and mesh whose trace serves: numbers of no consequence put to one value."""

    @abstractmethod
    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """List the settings to trace for one that `traced_as` gave.

        Numbers of shards in `direct` are traced as they are.
        """

    def derivation(self, setting: Setting) -> Derivation:
        """Return how the trace of a setting follows from those of its parts."""
        return Derivation.AS_TRACED

    # what it costs

    @abstractmethod
    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return into how many parts weights and optimizer state are cut; None where nobody can say."""

    def least_step_s(self, setting: Setting, alone_s: Callable[[], float]) -> float | None:
        """Return a lower bound for a step from the time of the same samples on one device.

        Asked only where not every rank runs the whole model; None where that time says nothing.
        """
        return None

    def held_micro_batches(self, setting: Setting, part: int) -> float:
        """Return how many micro-batches have their activations on a rank of kind `part` at the same time.

        If a rank runs several parts of the model one after the other, a part of them counts as a fraction.
        """
        return 1

    def find_waits(
        self, setting: Setting, passes: Sequence[PassTimes], slowest: int, links: LinkCosts
    ) -> Waits:
        """Return the seconds of a step for which the slowest kind of rank waits for the others.

        `passes` has the time of one micro-batch on each kind of rank.
        """
        return Waits()

    @abstractmethod
    def exposed_s(self, traffic: Traffic) -> float:
        """Return the seconds of a step's communication that computing does not hide."""

    # how it is explained

    def describe(self, mesh: Mesh) -> str:
        """Return the strategy in few words: hybrid 2 + 1, or pipeline of 2 stages x 2."""
        return self.word.value

    @abstractmethod
    def explain(self, mesh: Mesh) -> str:
        """Return what each device holds, for the reasons of a plan."""

    # how it is written into configs

    def config_mesh(self, gpus: int, shards: int | None) -> Mesh:
        """Return the mesh of a config that names the strategy; `shards` where the config says how many."""
        return Mesh(dp_replicate=gpus)

    def config_form(self, setting: Setting) -> Setting:
        """Return the plainest setting that frameworks run in the same way."""
        return setting


def usual_strategy(ranks: int) -> tuple[Strategy, Mesh]:
    """Return what runs where nobody names a strategy: replicas, or one device."""
    return (Strategy.DDP if ranks > 1 else Strategy.SINGLE), Mesh(dp_replicate=ranks)


def model_splitting_strategy(axes: Collection[str]) -> Strategy:
    """Return what runs where ranks split a model along these axes of a mesh and all see the same samples."""
    return Strategy.PIPELINE if set(axes) == {"pp"} else Strategy.FSDP


def alone_or(
    strategy: ParallelStrategy, ranks: int, *, nodes: int = 1, branches: int = 0
) -> tuple[Strategy, Mesh]:
    """Return a strategy with its usual mesh; on one rank, what runs there."""
    if ranks == 1:
        return usual_strategy(ranks)
    return strategy.word, strategy.usual_mesh(ranks, nodes=nodes, branches=branches)


def on_mesh(setting: Setting, strategy: Strategy, mesh: Mesh) -> Setting:
    """Return one micro-batch of a setting under another strategy and mesh."""
    return setting.replace(
        strategy=strategy, mesh=mesh, accumulation=1, global_batch=setting.micro_batch * mesh.data_parallel
    )


def describe_degrees(word: Strategy, mesh: Mesh) -> str:
    """Return a strategy with the ranks that split sequences or layers: fsdp 8 x cp 2 x tp 8.

    >>> describe_degrees(Strategy.FSDP, Mesh(dp_shard=8)), describe_degrees(Strategy.DDP, Mesh(cp=4))
    ('fsdp', 'ddp 1 x cp 4')
    >>> describe_degrees(Strategy.FSDP, Mesh(dp_shard=8, ep=4))
    'fsdp 8 with ep 4'
    """
    inner = [f"{name} {degree}" for name, degree in (("cp", mesh.cp), ("tp", mesh.tp)) if degree > 1]
    if not inner and mesh.ep == 1:
        return word.value
    ranks = " x ".join([f"{word} {mesh.data_parallel}", *inner])
    return ranks if mesh.ep == 1 else f"{ranks} with ep {mesh.ep}"


def explain_context(mesh: Mesh) -> str:
    """Return what the ranks do that split sequences between them; empty where none do."""
    return "" if mesh.cp == 1 else f"; {mesh.cp} GPUs split every sequence between them"


def explain_experts(mesh: Mesh) -> str:
    """Return what the ranks do that hold different experts; empty where none do."""
    return "" if mesh.ep == 1 else f"; every {mesh.ep} neighbouring GPUs hold different experts"
