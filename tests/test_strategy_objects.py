"""Every strategy answers every question, no other module compares its word, and a new one can be added."""

from __future__ import annotations

import ast
import inspect
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import trimtab
from outlooks import Law, workload
from trimtab.catalog.clusters import parse_cluster
from trimtab.engine.step import ARRANGED
from trimtab.errors import WrongUse
from trimtab.planner import decision
from trimtab.planner.decision import PlanQuestion
from trimtab.planner.space import build_space
from trimtab.predict.communication import Links
from trimtab.spec import Mesh, Policy, Schedule, Setting, Strategy, Trace, Work
from trimtab.strategies import (
    STRATEGIES,
    find_training_refusal,
    make_mesh,
    one_micro_batch,
    one_replica,
    strategy_of,
    usual_strategy,
)
from trimtab.strategies.base import Derivation, ParallelStrategy, PassTimes, Refusal, Traffic, Wrapping
from trimtab.strategies.fsdp import FsdpStrategy
from trimtab.strategies.pipeline import MOST_STAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

PACKAGE = Path(trimtab.__file__).parent
WORDS = [strategy.word.value for strategy in STRATEGIES.values()]
PLACES = [
    (gpus, nodes, branches) for gpus in range(1, 17) for nodes in (1, 2, 4) for branches in (0, 1, 2, 3)
]
"""Devices, nodes, branches of the job."""
LINKS = Links(within=450e9, between=50e9, per_node=8, nodes=2)


def setting_of(strategy: ParallelStrategy, mesh: Mesh, **changes: Any) -> Setting:
    return Setting(
        strategy=strategy.word,
        mesh=mesh,
        micro_batch=4,
        accumulation=3,
        global_batch=12 * mesh.data_parallel,
        **changes,
    )


def legal_settings(strategy: ParallelStrategy) -> list[Setting]:
    """A setting for every mesh that the strategy offers."""
    meshes = {mesh for gpus, nodes, branches in PLACES for mesh in meshes_of(strategy, gpus, nodes, branches)}
    return [setting_of(strategy, mesh) for mesh in sorted(meshes, key=repr)]


def meshes_of(strategy: ParallelStrategy, gpus: int, nodes: int, branches: int) -> list[Mesh]:
    return list(strategy.meshes(gpus, nodes=nodes, branches=branches))


def traffic_of(setting: Setting, busy_s: float = 0.0) -> Traffic:
    gathered = Work(op="all_gather", kind="collective", dtype="float32", read_bytes=2**24, write_bytes=2**24)
    scattered = Work(op="reduce_scatter", kind="collective", dtype="float32", read_bytes=2**24)
    trace = Trace(
        order=(),
        sizes=(),
        streams=(),
        parts=(),
        modules=(),
        ops=(),
        module_names=(),
        op_names=(),
        marks={},
        trainable=2**22,
        shared=2**10,
        shared_stages=2,
        handed_bytes=2**20,
        works=(gathered, scattered),
        sequence=(0, 1, 0),
    )
    return Traffic(
        trace=trace,
        setting=setting,
        links=LINKS,
        gradient_bytes=4 * trace.trainable,
        hidden_forward_s=busy_s,
        hidden_backward_s=busy_s,
    )


# --- every question, asked of every strategy


def check_rules(strategy: ParallelStrategy) -> None:
    """Meshes cover the devices, and a refusal has a reason and a cure."""
    for gpus, nodes, branches in PLACES:
        place = {"nodes": nodes, "branches": branches}
        refusal = strategy.refusal(gpus, **place)
        meshes = meshes_of(strategy, gpus, nodes, branches)
        assert len(set(meshes)) == len(meshes)
        assert all(mesh.size == gpus for mesh in meshes)
        if refusal is None:
            assert strategy.mesh(gpus, **place) == strategy.usual_mesh(gpus, **place)
            assert strategy.mesh(gpus, **place).size == (gpus if strategy.needs_several_gpus else 1)
        else:
            assert refusal.found
            assert refusal.cure.endswith(".")
            assert not meshes
            with pytest.raises(WrongUse, match=f"--strategy {strategy.word}"):
                strategy.mesh(gpus, **place)
    for setting in legal_settings(strategy):
        assert strategy.explain_illegal(setting) == ""
        split = setting.replace(schedule=Schedule.ZERO_BUBBLE)
        assert (strategy.explain_illegal(split) == "") == strategy.has_schedule


def check_resizing(strategy: ParallelStrategy) -> None:
    """Whatever the number of ranks, something legal takes over, with all of them."""
    for setting in legal_settings(strategy):
        for ranks, nodes, branches in PLACES:
            word, mesh = strategy.resized(setting.mesh, ranks, nodes=nodes, branches=branches)
            assert mesh.size == ranks
            assert mesh in meshes_of(STRATEGIES[word], ranks, nodes, branches)
    assert strategy.resized(Mesh(), 1) == (STRATEGIES["single"].word, Mesh())


def check_pins(strategy: ParallelStrategy) -> None:
    """A pin that contradicts the strategy is named, and so is what to do."""
    for gpus, available, branches in ((None, 8, 2), (1, 8, 2), (2, 8, 2), (3, 8, 2), (None, 1, 0)):
        pins = {"strategy": strategy.word.value, "gpus": gpus, "compile": True}
        conflicts = strategy.pin_conflicts(pins, available, branches)
        assert all(conflict.found and conflict.cure for conflict in conflicts)
        compiled = any("compile=true" in conflict.found for conflict in conflicts)
        assert compiled == bool(strategy.why_not_compiled)
    assert strategy.pinned_data_parallel(1) == 1
    assert strategy.pinned_data_parallel(8) in {None, 1, 8}


def check_traces(strategy: ParallelStrategy) -> None:
    """What is traced is traced as itself, and how the rest follows is one of the known ways."""
    for setting in legal_settings(strategy):
        assert strategy.on(setting.mesh) is strategy
        word, mesh = strategy.traced_as(setting.mesh)
        assert STRATEGIES[word].traced_as(mesh) == (word, mesh)
        traced = setting.replace(
            strategy=word, mesh=mesh, accumulation=1, global_batch=4 * mesh.data_parallel
        )
        for synchronised in (False, True):
            parts = strategy_of(traced).trace_parts(traced.replace(sync_batchnorm=synchronised), ())
            assert parts
            assert all(part.accumulation == 1 for part in parts)
            if not synchronised:
                assert all(strategy_of(part).trace_parts(part, ()) == [part] for part in parts)
            how = strategy.derivation(traced)
            assert isinstance(how, Derivation)
            assert len(parts) == 1 or how is Derivation.SHARD_LINE
    kinds = strategy.rank_kinds(Mesh(branch=2) if strategy.needs_branches else Mesh(pp=2), ["left", "right"])
    assert len(set(kinds)) == len(kinds) > 0
    assert all(kind.words for kind in kinds) or len(kinds) == 1
    schedules = list(strategy.list_schedules(Mesh(pp=4)))
    assert len(set(schedules)) == len(schedules) == (4 if strategy.has_schedule else 1)


def check_costs(strategy: ParallelStrategy) -> None:
    """Only one device sends nothing; computing hides some of the rest; shares and bounds are positive."""
    for setting in legal_settings(strategy):
        bare, hidden = (strategy.exposed_s(traffic_of(setting, busy_s)) for busy_s in (0.0, 0.001))
        assert 0 <= hidden <= bare
        assert (bare > 0) == (setting.gpus > 1)
        shares = strategy.weight_shares(setting.mesh)
        assert shares is None or 1 <= shares <= setting.gpus
        assert strategy.least_rounds(setting.mesh) >= 1
        assert isinstance(strategy.uses_global_batch(setting.mesh), bool)
        passes = [PassTimes(trace, 1.0, 2.0) for trace in (traffic_of(setting, 0.0).trace,) * 2]
        for waits in (strategy.find_waits(setting, passes, slowest, LINKS) for slowest in (0, 1)):
            assert min(waits) >= 0
            assert (max(waits) > 0) == (setting.mesh.pp > 1)
        assert 1 <= strategy.held_micro_batches(setting, 0) <= setting.accumulation
        bound = strategy.least_step_s(setting, lambda: 1.0)
        assert (bound is not None) == strategy.is_bounded_by_one_device
        assert bound is None or 0 < bound <= 1.0


def check_words(strategy: ParallelStrategy) -> None:
    """A plan can say what it is and what a device holds."""
    for setting in legal_settings(strategy):
        assert strategy.describe(setting.mesh).startswith(strategy.word)
        assert strategy.explain(setting.mesh)
    assert (strategy.why_not_synchronised == "") == strategy.runs_whole_model


def check_configs(strategy: ParallelStrategy) -> None:
    """What frameworks have is written and read back as the same mesh."""
    assert strategy.is_in_frameworks == (strategy.degrees is not None)
    assert all(word in STRATEGIES for word in strategy.also_spelt)
    for setting in legal_settings(strategy):
        assert strategy.config_form(setting).mesh == setting.mesh
        if strategy.is_in_frameworks:
            assert strategy.config_form(setting) == setting
            assert strategy.config_mesh(setting.gpus, setting.mesh.dp_shard) == setting.mesh


QUESTIONS: dict[str, tuple[str, ...]] = {
    "check_rules": ("explain_illegal", "refusal", "usual_mesh", "meshes", "mesh", "needs_several_gpus", "on"),
    "check_inner_degrees": ("tensor_refusal", "context_refusal", "expert_refusal", "meshes_within"),
    "check_resizing": ("resized",),
    "check_pins": ("pin_conflicts", "pinned_data_parallel", "why_not_compiled"),
    "check_traces": (
        "traced_as",
        "trace_parts",
        "derivation",
        "rank_kinds",
        "needs_branches",
        "list_schedules",
    ),
    "check_costs": (
        *("exposed_s", "weight_shares", "least_rounds", "uses_global_batch", "least_step_s"),
        *("is_bounded_by_one_device", "find_waits", "held_micro_batches"),
    ),
    "check_words": ("word", "describe", "explain", "why_not_synchronised", "runs_whole_model"),
    "check_configs": ("degrees", "is_in_frameworks", "also_spelt", "config_mesh", "config_form"),
}
TYPES: dict[str, Any] = {
    "wrapping": Wrapping,
    "complexity": int,
    "probe_order": int,
    "job_facts": tuple,
    "shares_by_speed": bool,
    "spans_shard_lines": bool,
    "needs_config_key": bool,
    "accelerate_flags": tuple,
    "time_assumptions": tuple,
    "is_sharded": bool,
    "has_schedule": bool,
    "is_built_on_host": bool,
}
"""Plain facts: that there is one of the right type is all that can be asked."""


def check_inner_degrees(strategy: ParallelStrategy) -> None:
    """Ranks that split layers or sequences are neighbours in a mesh of all GPUs; experts need no more."""
    for tp, cp, ep in ((2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 4), (1, 2, 2)):
        meshes = list(strategy.meshes_within(16, nodes=2, tp=tp, cp=cp, ep=ep))
        refused = strategy.tensor_refusal(tp) or strategy.context_refusal(cp) or strategy.expert_refusal(ep)
        assert bool(meshes) is not bool(refused)
        assert all((mesh.size, mesh.tp, mesh.cp, mesh.ep) == (16, tp, cp, ep) for mesh in meshes)
        if refused:
            with pytest.raises(WrongUse):
                strategy.mesh(16, nodes=2, tp=tp, cp=cp, ep=ep)
    assert not list(strategy.meshes_within(6, cp=4))
    assert not list(strategy.meshes_within(6, ep=4))
    assert list(strategy.meshes_within(8, nodes=2)) == list(strategy.meshes(8, nodes=2))


@pytest.mark.parametrize("check", QUESTIONS)
@pytest.mark.parametrize("word", WORDS)
def test_every_strategy_answers(word: str, check: str) -> None:
    ask: Callable[[ParallelStrategy], None] = globals()[check]
    ask(STRATEGIES[word])


@pytest.mark.parametrize("word", WORDS)
def test_every_strategy_has_every_fact(word: str) -> None:
    strategy = STRATEGIES[word]
    assert all(isinstance(getattr(strategy, name), kind) for name, kind in TYPES.items())
    assert set(strategy.job_facts) <= {"branches", "global_batch"}


def test_no_question_is_left_out() -> None:
    annotated = set(inspect.get_annotations(ParallelStrategy))
    public = {name for name in {*annotated, *vars(ParallelStrategy)} if not name.startswith("_")}
    asked = {name for names in QUESTIONS.values() for name in names} | set(TYPES)
    assert asked == public


def test_a_strategy_that_lacks_an_answer_cannot_be_made() -> None:
    class Silent(ParallelStrategy):
        word = Strategy.DDP

    with pytest.raises(TypeError, match="exposed_s"):
        Silent()  # type: ignore[abstract]


def test_every_word_has_one_object_and_orders_have_no_ties() -> None:
    assert [word.value for word in Strategy] == WORDS
    assert [strategy.word for strategy in STRATEGIES.values()] == list(STRATEGIES)
    for order in ("complexity", "probe_order"):
        assert len({getattr(strategy, order) for strategy in STRATEGIES.values()}) == len(STRATEGIES)
    known = [strategy.degrees for strategy in STRATEGIES.values() if strategy.degrees]
    assert sorted(known) == [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("word", WORDS)
def test_who_names_a_strategy_gets_a_mesh_that_a_plan_knows(word: str) -> None:
    """Up to MOST_STAGES devices: `estimate --strategy` and resizing follow the rules of the planner."""
    assert max(gpus for gpus, _, _ in PLACES) == MOST_STAGES
    for gpus, nodes, branches in PLACES:
        try:
            mesh = STRATEGIES[word].mesh(gpus, nodes=nodes, branches=branches)
        except WrongUse:
            continue
        planned = [
            one for other in STRATEGIES.values() for one in meshes_of(other, mesh.size, nodes, branches)
        ]
        assert mesh in planned


SHARDED_MESHES = [
    Mesh(pp=2, dp_shard=4),
    Mesh(pp=4, dp_shard=2, dp_replicate=2),
    Mesh(pp=2, dp_shard=2, dp_replicate=4),
]
SPLIT_MESHES = [
    Mesh(pp=2, tp=2),
    Mesh(pp=2, tp=2, cp=2, dp_replicate=2),
    Mesh(pp=2, cp=4),
    Mesh(pp=4, dp_shard=4, ep=4),
    Mesh(pp=2, cp=2, dp_shard=2, ep=4, dp_replicate=2),
]


@pytest.mark.parametrize("mesh", SHARDED_MESHES, ids=repr)
def test_sharded_stages_are_stages_and_shards(mesh: Mesh) -> None:
    stages = STRATEGIES["pipeline"]
    strategy = stages.on(mesh)
    setting = setting_of(strategy, mesh)
    assert strategy_of(setting) is strategy
    assert (strategy.is_sharded, strategy.has_schedule, stages.is_sharded) == (True, True, False)
    assert strategy.on(Mesh(pp=2)) is stages
    assert strategy.weight_shares(mesh) == mesh.pp * mesh.dp_shard
    assert find_training_refusal(setting) is None
    # Copies of a shard hold the same, and one of each kind is traced.
    word, traced = strategy.traced_as(mesh)
    assert (word, traced.dp_replicate) == ("pipeline", min(2, mesh.dp_replicate))
    assert [part.mesh for part in strategy.trace_parts(setting, ())] == [mesh.replace(dp_replicate=1)]
    bare, hidden = (strategy.exposed_s(traffic_of(setting, busy_s)) for busy_s in (0.0, 0.001))
    assert 0 < hidden <= bare
    assert f"{mesh.dp_shard} shards" in strategy.describe(mesh)
    assert f"cut in {mesh.dp_shard}" in strategy.explain(mesh)
    form = strategy.config_form(setting)
    assert (form.strategy, form.mesh) == ("hsdp" if mesh.dp_replicate > 1 else "fsdp", mesh)
    for ranks in (4, 8, 16):
        assert strategy.resized(mesh, ranks)[1].size == ranks
    assert strategy.resized(mesh, 2 * mesh.size)[1] == mesh.replace(dp_shard=2 * mesh.dp_shard)


@pytest.mark.parametrize("mesh", SPLIT_MESHES, ids=repr)
def test_ranks_of_a_stage_may_split_it_in_any_way(mesh: Mesh) -> None:
    stages = STRATEGIES["pipeline"]
    strategy = stages.on(mesh)
    setting = setting_of(strategy, mesh)
    assert find_training_refusal(setting) is None
    assert [part.mesh for part in strategy.trace_parts(setting, ())] == [mesh.replace(dp_replicate=1)]
    pins = {"tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep}
    assert mesh in list(stages.meshes_within(mesh.size, pp=mesh.pp, dp_shard=mesh.dp_shard, **pins))
    # The ranks that are left hold shards, unless copies of them are asked for.
    shards = mesh.dp_shard * mesh.dp_replicate
    degrees = pins | {"pp": mesh.pp}
    assert list(stages.meshes_within(mesh.size, **degrees)) == [mesh.replace(dp_shard=shards, dp_replicate=1)]
    twice = mesh.replace(dp_shard=shards, dp_replicate=2)
    assert list(stages.meshes_within(2 * mesh.size, **degrees, dp_replicate=2)) == [twice]
    for axis in ("cp", "tp", "ep"):
        named = f"{axis} {getattr(mesh, axis)}" in strategy.describe(mesh)
        assert named is (getattr(mesh, axis) > 1)
    # A stage keeps its inner degrees on other numbers of ranks, if it can.
    twice = strategy.resized(mesh, 2 * mesh.size)[1]
    assert twice == mesh.replace(dp_shard=2 * mesh.dp_shard)
    assert strategy.resized(mesh, mesh.pp)[1] == Mesh(pp=mesh.pp)
    assert strategy.exposed_s(traffic_of(setting, 0.0)) > 0


def test_only_pinned_degrees_give_sharded_stages() -> None:
    stages = STRATEGIES["pipeline"]
    assert all(mesh.dp_shard == 1 for mesh in stages.meshes_within(8))
    assert all(mesh.dp_shard == 1 for mesh in stages.meshes_within(8, pp=2))
    assert list(stages.meshes_within(8, pp=2, dp_shard=2)) == [Mesh(pp=2, dp_shard=2, dp_replicate=2)]
    assert not list(stages.meshes_within(8, pp=2, dp_shard=3))
    assert not list(stages.meshes_within(8, pp=2, dp_shard=2, ep=4))


@pytest.mark.parametrize(
    ("word", "mesh"),
    [
        ("fsdp", Mesh(pp=2, dp_shard=4)),
        ("ddp", Mesh(pp=2, dp_replicate=4)),
        ("pipeline", Mesh(pp=2, dp_replicate=4)),
        ("hsdp", Mesh(pp=2, dp_shard=2, dp_replicate=2)),
    ],
)
def test_the_strategy_says_what_the_gpus_of_a_stage_hold(word: str, mesh: Mesh) -> None:
    assert make_mesh(STRATEGIES[word], 8, pp=2, nodes=4) == (STRATEGIES["pipeline"].on(mesh), mesh)
    assert make_mesh(STRATEGIES[word], 8, pp=8)[1] == Mesh(pp=8)


def test_the_gpus_of_a_stage_split_layers_sequences_and_experts() -> None:
    stages, fsdp = STRATEGIES["pipeline"], STRATEGIES["fsdp"]
    assert make_mesh(fsdp, 8, pp=2, tp=2)[1] == Mesh(pp=2, tp=2, dp_shard=2)
    assert make_mesh(stages, 8, pp=2, tp=4)[1] == Mesh(pp=2, tp=4)
    assert make_mesh(stages, 8, pp=2, cp=2)[1] == Mesh(pp=2, cp=2, dp_replicate=2)
    assert make_mesh(stages, 8, pp=2, ep=2)[1] == Mesh(pp=2, ep=2, dp_shard=4)


def test_stages_that_cannot_be_are_refused() -> None:
    fsdp = STRATEGIES["fsdp"]
    with pytest.raises(WrongUse, match="do not divide by 3"):
        make_mesh(fsdp, 8, pp=3)
    with pytest.raises(WrongUse, match="shards or copies"):
        make_mesh(STRATEGIES["branch"], 8, pp=2)
    with pytest.raises(WrongUse, match="do not divide by 3"):
        make_mesh(fsdp, 8, pp=2, tp=3)
    with pytest.raises(WrongUse, match="which 3 does not divide"):
        make_mesh(fsdp, 8, pp=2, ep=3)
    for degrees in ({"tp": 2}, {"cp": 2}, {"ep": 2}):
        with pytest.raises(WrongUse, match="how many stages"):
            STRATEGIES["pipeline"].mesh(8, **degrees)


def test_on_one_device_there_is_one_micro_batch_or_those_of_a_replica() -> None:
    setting = setting_of(STRATEGIES["fsdp"], Mesh(dp_shard=8))
    alone, replica = one_micro_batch(setting), one_replica(setting)
    assert (alone.strategy, alone.gpus, alone.accumulation, alone.global_batch) == ("single", 1, 1, 4)
    assert (replica.strategy, replica.gpus, replica.accumulation, replica.global_batch) == (
        "single",
        1,
        3,
        12,
    )
    assert [usual_strategy(ranks)[0].value for ranks in (1, 2)] == ["single", "ddp"]


# --- no other module compares the word

MAY_NAME = {PACKAGE / "spec" / "setting.py"}
"""It defines the words, and checks that one device is one device."""


def named_words(source: str) -> list[str]:
    """Lines that name a member of Strategy, or compare something called strategy with a word."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Strategy" and node.attr.isupper():
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Compare) and "strategy" in ast.unparse(node).lower():
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            found += [f"line {node.lineno}: {ast.unparse(node)}"] * bool(constants & set(WORDS))
    return found


def test_no_other_module_compares_the_word_of_a_strategy() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if PACKAGE / "strategies" in file.parents or file in MAY_NAME or "strategy" not in source.lower():
            continue
        if lines := named_words(source):
            found[str(file.relative_to(PACKAGE))] = lines
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "if setting.strategy is Strategy.FSDP: pass",
        "KINDS = (Strategy.FSDP, Strategy.HSDP)",
        "TABLE = {Strategy.DDP: 1}",
        "if strategy == 'fsdp': pass",
        "if setting.strategy in ('fsdp', 'hsdp'): pass",
    ],
)
def test_a_compared_word_is_caught(source: str) -> None:
    assert named_words(source)


@pytest.mark.parametrize("name", ["SHARDED", "BUCKET_BYTES", "DATA_PARALLEL", "KEEPS_WHOLE", "MOST_STAGES"])
def test_a_constant_stands_once(name: str) -> None:
    line = re.compile(rf"^{name} = ", re.MULTILINE)
    files = [file.name for file in PACKAGE.rglob("*.py") if line.search(file.read_text(encoding="utf-8"))]
    assert len(files) <= 1, files


# --- the recipe of docs/architecture.md


class NewWord(StrEnum):
    """In the recipe this is a member of Strategy."""

    STRIPED = "striped"


class StripedStrategy(ParallelStrategy):
    """Made up: weights cut in stripes over an even number of devices, with the wrapping of fsdp."""

    word = cast("Strategy", NewWord.STRIPED)
    wrapping = Wrapping.SHARDS
    complexity = 7
    probe_order = 7

    def refusal(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Refusal | None:  # noqa: ARG002
        if gpus < 2 or gpus % 2:
            return Refusal(f"stripes come in pairs, and there are {gpus} GPUs", "Use an even number.")
        return None

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:  # noqa: ARG002
        return Mesh(dp_shard=gpus)

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        return self.word, mesh

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:  # noqa: ARG002
        return [setting]

    def weight_shares(self, mesh: Mesh) -> int | None:
        return mesh.dp_shard

    def exposed_s(self, traffic: Traffic) -> float:
        return FsdpStrategy().exposed_s(traffic)

    def explain(self, mesh: Mesh) -> str:
        return f"weights are cut in {mesh.dp_shard} stripes"


@pytest.fixture
def striped(monkeypatch: pytest.MonkeyPatch) -> ParallelStrategy:
    monkeypatch.setitem(STRATEGIES, "striped", StripedStrategy())
    return STRATEGIES["striped"]


@pytest.mark.parametrize("check", QUESTIONS)
def test_a_new_strategy_answers_as_the_others_do(striped: ParallelStrategy, check: str) -> None:
    ask: Callable[[ParallelStrategy], None] = globals()[check]
    ask(striped)


def test_a_new_strategy_is_planned_refused_and_explained(striped: ParallelStrategy) -> None:
    counts = {
        gpus: [
            family.strategy
            for family in build_space(workload(), parse_cluster(f"{gpus}xH100"), Policy()).families
        ]
        for gpus in (1, 2, 3)
    }
    assert [striped.word in words for words in counts.values()] == [False, True, True]
    only = {
        family.layout.gpus
        for family in build_space(
            workload(), parse_cluster("5xH100"), Policy(pins={"strategy": "striped"})
        ).families
    }
    assert only == {2, 4}
    with pytest.raises(WrongUse, match="stripes come in pairs"):
        striped.mesh(3)
    question = PlanQuestion(
        job="fake",
        workload=workload(),
        cluster=parse_cluster("4xH100"),
        policy=Policy(pins={"gpus": 4, "strategy": "striped"}),
        compare=(),
    )
    plan = decision.choose_plan(question, Law())
    assert (plan.choice.strategy, plan.choice.mesh) == ("striped", Mesh(dp_shard=4))
    assert striped.explain(plan.choice.mesh) == "weights are cut in 4 stripes"


def test_a_new_strategy_explains_itself_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("ddp", "fsdp", "hsdp", "pipeline"):
        monkeypatch.delitem(STRATEGIES, word)
    monkeypatch.setitem(STRATEGIES, "striped", StripedStrategy())
    monkeypatch.setattr(StripedStrategy, "shares_by_speed", True)
    question = PlanQuestion(
        job="fake",
        workload=workload(),
        cluster=parse_cluster("4xH100"),
        policy=Policy(pins={"gpus": 4}),
        compare=(),
    )
    reasons = {reason.subject: reason.why for reason in decision.choose_plan(question, Law()).reasons}
    assert reasons["strategy"].startswith("weights are cut in 4 stripes")


def test_the_engine_arranges_every_wrapping() -> None:
    """A new one without its code is an error, not a whole model on every rank."""
    assert set(Wrapping) == ARRANGED
