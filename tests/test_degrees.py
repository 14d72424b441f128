"""Degrees of parallelism against the sizes of a model and a cluster, before anything is traced."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import trimtab
from config_samples import SAMPLES
from trimtab.cli.main import main_code
from trimtab.configs import formats
from trimtab.configs.degrees import lint_config
from trimtab.configs.interpret import interpret_config
from trimtab.configs.plan_edits import draft_edits
from trimtab.configs.targets import builtin_targets, find_site
from trimtab.errors import WrongUse
from trimtab.jobs.model_sizes import ModelSizes, read_folder_sizes, read_job_sizes, read_model_sizes
from trimtab.planner.degrees import (
    DEGREES,
    ClusterShape,
    Degrees,
    FrameworkRules,
    describe_cluster,
    lint_degrees,
    split_layers,
)
from trimtab.planner.pins import check_degree_pins, read_pins
from trimtab.probe.detect import as_cluster
from trimtab.spec import (
    Band,
    Cluster,
    Estimate,
    Footprint,
    Mesh,
    Node,
    Plan,
    Precision,
    RankPlacement,
    Recompute,
    Setting,
    Strategy,
    Workload,
)
from trimtab.training.task import build_cpu_setting

if TYPE_CHECKING:
    from pathlib import Path

ESTIMATE = Estimate(
    allocated_bytes=1,
    reserved_bytes=1,
    process_bytes=1,
    parts=Footprint(),
    band=Band(low_bytes=1, high_bytes=1),
)
LLAMA_8B = ModelSizes(
    layers=32, heads=32, kv_heads=8, hidden=4096, intermediate=14336, vocab=128256, experts=0, seq=8192
)
LLAMA_70B = replace(LLAMA_8B, layers=80, heads=64, hidden=8192, intermediate=28672)
LLAMA_405B = replace(LLAMA_8B, layers=126, heads=128, hidden=16384, intermediate=53248)
MIXTRAL = replace(LLAMA_8B, vocab=32000, experts=8, experts_per_token=2)
EXACT = FrameworkRules()
MEGATRON = FrameworkRules(even_stages=True, copies_kv_heads=True)
ULYSSES = FrameworkRules(all_to_all=True)
EIGHT = ClusterShape(gpus=8, gpus_per_node=8, joined=8)
FOUR_NODES = ClusterShape(gpus=32, gpus_per_node=8, joined=8)


def find(
    degrees: Degrees,
    sizes: ModelSizes = LLAMA_70B,
    shape: ClusterShape = FOUR_NODES,
    rules: FrameworkRules = EXACT,
) -> list[tuple[str, str, str]]:
    """Return severity, rule and sentence of each finding."""
    return [
        (finding.severity.value, finding.rule, finding.sentence())
        for finding in lint_degrees(degrees, sizes, shape, rules)
    ]


@pytest.mark.parametrize(
    ("degrees", "sizes", "shape"),
    [
        (Degrees(tp=8), LLAMA_70B, FOUR_NODES),
        (Degrees(tp=8, pp=4, global_batch=64, micro_batch=1), LLAMA_70B, FOUR_NODES),
        (Degrees(tp=8, dp_replicate=1, dp_shard=16), LLAMA_405B, replace(FOUR_NODES, gpus=128)),
        (Degrees(ep=8, pp=4), MIXTRAL, FOUR_NODES),
        (Degrees(cp=4), replace(LLAMA_8B, seq=131072), EIGHT),
        (Degrees(), ModelSizes(), ClusterShape()),
        (Degrees(tp=7, pp=3, cp=5, ep=11), ModelSizes(), ClusterShape()),
    ],
)
def test_degrees_of_published_recipes_are_legal(
    degrees: Degrees, sizes: ModelSizes, shape: ClusterShape
) -> None:
    assert find(degrees, sizes, shape) == []


@pytest.mark.parametrize(
    ("degrees", "sizes", "shape", "rules", "severity", "rule", "said"),
    [
        (Degrees(tp=16), LLAMA_8B, EIGHT, EXACT, "error", "widths", r"8 KV heads evenly\. Use 8\."),
        (Degrees(tp=3), LLAMA_8B, EIGHT, EXACT, "error", "widths", r"32 attention heads, .*Use 2 or 4\."),
        (Degrees(tp=16), LLAMA_8B, FOUR_NODES, MEGATRON, "warning", "kv-heads", "copied to 2 ranks"),
        (Degrees(tp=8), replace(LLAMA_8B, vocab=50257), EIGHT, EXACT, "warning", "vocabulary", "50,264"),
        (Degrees(tp=16), LLAMA_70B, FOUR_NODES, MEGATRON, "warning", "tp-across-nodes", r"Use 8, and pp"),
        (
            Degrees(tp=4),
            LLAMA_8B,
            ClusterShape(gpus=4, gpus_per_node=4, joined=2),
            EXACT,
            "warning",
            "nvlink",
            r"only 2 GPUs .* Use 2\.",
        ),
        (
            Degrees(tp=2),
            LLAMA_8B,
            ClusterShape(gpus=4, gpus_per_node=4, joined=1),
            EXACT,
            "warning",
            "nvlink",
            "no GPUs of a node are joined by NVLink",
        ),
        (
            Degrees(tp=8),
            replace(LLAMA_8B, intermediate=512),
            EIGHT,
            EXACT,
            "warning",
            "narrow",
            r"64 columns .* Use 4\.",
        ),
        (Degrees(cp=3), LLAMA_8B, EIGHT, EXACT, "error", "sequence", r"2 x 3 pieces.*Use 2, or .* 8,196"),
        (
            Degrees(cp=2, tp=3),
            replace(LLAMA_8B, heads=None, kv_heads=None, hidden=None, intermediate=None, seq=8192),
            EIGHT,
            EXACT,
            "error",
            "sequence",
            "12 pieces",
        ),
        (Degrees(cp=5, tp=8), LLAMA_8B, EIGHT, ULYSSES, "error", "cp-heads", r"4 attention heads.*Use 4\."),
        (Degrees(cp=8), replace(LLAMA_8B, seq=4096), EIGHT, EXACT, "warning", "short-sequence", "512 tokens"),
        (Degrees(pp=6), LLAMA_8B, EIGHT, EXACT, "warning", "layers", "2 get 6 and 4 get 5. Use 4 or 8"),
        (Degrees(pp=6), LLAMA_8B, EIGHT, MEGATRON, "error", "layers", "32 layers do not divide"),
        (Degrees(pp=64), LLAMA_8B, ClusterShape(), EXACT, "error", "layers", "32 layers for 64 stages"),
        (Degrees(pp=4, virtual_stages=16), LLAMA_8B, ClusterShape(), EXACT, "error", "layers", "64 stages"),
        (Degrees(virtual_stages=2), LLAMA_8B, EIGHT, EXACT, "warning", "virtual-stages", "nothing is inter"),
        (Degrees(pp=4, accumulation=2), LLAMA_8B, EIGHT, EXACT, "warning", "bubble", "idle for 60%"),
        (
            Degrees(pp=4, virtual_stages=2, accumulation=6),
            LLAMA_8B,
            EIGHT,
            MEGATRON,
            "error",
            "bubble",
            "multiples of 4",
        ),
        (Degrees(ep=3), MIXTRAL, EIGHT, EXACT, "error", "experts", "8 experts a layer.*Use 2 or 4"),
        (Degrees(ep=8), LLAMA_8B, EIGHT, EXACT, "warning", "experts", "no experts"),
        (Degrees(ep=8, pp=4), MIXTRAL, EIGHT, EXACT, "error", "ep-ranks", r"2 ranks.*Use 2\."),
        (
            Degrees(ep=16),
            replace(MIXTRAL, experts=64),
            FOUR_NODES,
            EXACT,
            "warning",
            "ep-across-nodes",
            "cross the network",
        ),
        (Degrees(tp=8, pp=3), LLAMA_70B, FOUR_NODES, EXACT, "error", "product", "24 ranks, which do not"),
        (Degrees(tp=8, pp=8), LLAMA_70B, FOUR_NODES, EXACT, "error", "product", "64 ranks, and there are 32"),
        (
            Degrees(tp=8, dp_replicate=1, dp_shard=2),
            LLAMA_70B,
            FOUR_NODES,
            EXACT,
            "error",
            "product",
            r"Use dp_shard=4\.",
        ),
        (Degrees(tp=8, global_batch=6), LLAMA_70B, FOUR_NODES, EXACT, "error", "batch", "Use 4 or 8"),
        (Degrees(tp=8, global_batch=2), LLAMA_70B, FOUR_NODES, EXACT, "error", "batch", "needs a sample"),
        (
            Degrees(tp=8, global_batch=12, micro_batch=2),
            LLAMA_70B,
            FOUR_NODES,
            EXACT,
            "error",
            "batch",
            "x micro-batch 2 do not divide it. Use 8 or 16",
        ),
        (Degrees(tp=0), LLAMA_70B, FOUR_NODES, EXACT, "error", "minimum", "from 1 up"),
        (Degrees(dp_shard=-1), LLAMA_70B, FOUR_NODES, EXACT, "error", "minimum", "dp_shard=-1"),
    ],
)
def test_an_illegal_or_unwise_degree_is_named_with_the_nearest_legal_value(  # noqa: PLR0917
    degrees: Degrees,
    sizes: ModelSizes,
    shape: ClusterShape,
    rules: FrameworkRules,
    severity: str,
    rule: str,
    said: str,
) -> None:
    found = find(degrees, sizes, shape, rules)
    texts = [text for kind, name, text in found if (kind, name) == (severity, rule)]
    assert texts, found
    assert re.search(said, texts[0]), texts


def test_errors_come_before_warnings() -> None:
    found = find(Degrees(tp=16, pp=7), LLAMA_8B, EIGHT)
    assert [kind for kind, _, _ in found] == sorted(kind for kind, _, _ in found)
    assert {kind for kind, _, _ in found} == {"error", "warning"}


def test_tensor_parallelism_of_a_small_model_is_slower_than_its_products() -> None:
    """8B on H100: 4 * 4096 * 7 * (989e12 / 450e9) / 218e6 = 1.16; 70B is below 1."""
    shape = describe_cluster(as_cluster("8xH100"))
    assert (shape.gpus, shape.gpus_per_node, shape.joined) == (8, 8, 8)
    assert [rule for _, rule, _ in find(Degrees(tp=8), LLAMA_8B, shape)] == ["traffic"]
    assert find(Degrees(tp=8), LLAMA_70B, shape) == []
    assert find(Degrees(tp=4), LLAMA_8B, shape) == []


def test_a_ring_over_the_network_needs_longer_pieces() -> None:
    shape = describe_cluster(as_cluster("2x8xH100", network="400Gb/gpu"))
    inside, across = Degrees(cp=8), Degrees(cp=16)
    sizes = replace(LLAMA_8B, seq=65536)
    assert find(inside, sizes, shape) == []
    assert [rule for _, rule, _ in find(across, sizes, shape)] == ["short-sequence"]
    assert find(across, replace(sizes, seq=262144), shape) == []


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    heads=st.integers(1, 12),
    layers=st.integers(1, 20),
    nodes=st.integers(1, 8),
)
def test_degrees_that_divide_everything_have_no_errors(  # noqa: PLR0917
    tp: int, pp: int, cp: int, heads: int, layers: int, nodes: int
) -> None:
    sizes = ModelSizes(
        layers=layers * pp, heads=8 * heads, kv_heads=8, hidden=64 * 8 * heads, intermediate=4096, seq=4096
    )
    gpus = tp * pp * cp * nodes
    found = find(Degrees(tp=tp, pp=pp, cp=cp), sizes, ClusterShape(gpus=gpus))
    assert [text for kind, _, text in found if kind == "error"] == []


@given(tp=st.integers(2, 64), heads=st.integers(1, 128), layers=st.integers(1, 128), pp=st.integers(2, 64))
def test_the_suggested_degree_is_legal(tp: int, heads: int, layers: int, pp: int) -> None:
    sizes = ModelSizes(layers=layers, heads=heads, kv_heads=heads, hidden=64 * heads)
    for finding in lint_degrees(Degrees(tp=tp, pp=pp), sizes, ClusterShape(), EXACT):
        name = finding.given.partition("=")[0]
        numbers = [int(number) for number in re.findall(r"\d+", finding.cure)]
        for number in numbers:
            changed: dict[str, Any] = {name: number}
            again = lint_degrees(Degrees(**changed), sizes, ClusterShape(), EXACT)
            assert finding.rule not in {other.rule for other in again}, (finding, number)


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_layers_are_split_evenly(layers: int, stages: int) -> None:
    assume(layers >= stages)
    split = split_layers(layers, stages)
    assert (sum(split), len(split), max(split) - min(split) <= 1) == (layers, stages, True)


# --- sizes of a model


def test_sizes_are_read_from_a_config_without_building_the_model(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_folder_sizes(tmp_path) == replace(LLAMA_8B, seq=1024)
    assert read_job_sizes(f"hf:{tmp_path}", {"seq": "8192"}) == LLAMA_8B
    assert read_job_sizes("job.py:Job", {"layers": 4}) == ModelSizes(layers=4)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, ModelSizes()),
        ({"num_hidden_layers": "32", "num_attention_heads": -4, "hidden_size": True}, ModelSizes()),
        (
            {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257},
            ModelSizes(
                layers=12, heads=12, kv_heads=12, hidden=768, intermediate=3072, vocab=50257, experts=0
            ),
        ),
        (
            {"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4}, "num_hidden_layers": 9},
            ModelSizes(layers=2, heads=4, kv_heads=4, experts=0),
        ),
        (
            {"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8},
            ModelSizes(layers=61, experts=256, experts_per_token=8),
        ),
        ({"num_attention_heads": 71, "multi_query": True}, ModelSizes(heads=71, kv_heads=1)),
    ],
)
def test_sizes_of_other_models_and_of_wrong_ones(config: dict[str, Any], sizes: ModelSizes) -> None:
    assert read_model_sizes(config) == sizes


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_broken_config_says_nothing_here(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert not read_folder_sizes(tmp_path).is_known
    assert not read_folder_sizes(tmp_path / "missing").is_known


# --- pins


@pytest.mark.parametrize(
    ("texts", "pins"),
    [
        (["tp=8,pp=4"], {"tp": 8, "pp": 4}),
        (["tp=8 , pp = 4", "compile=false"], {"tp": 8, "pp": 4, "compile": False}),
        (["offload=params,optimizer,tp=2"], {"offload": "params,optimizer", "tp": 2}),
        (["dp-shard=4,virtual-stages=2"], {"dp_shard": 4, "virtual_stages": 2}),
    ],
)
def test_pins_may_share_a_flag(texts: list[str], pins: dict[str, Any]) -> None:
    assert read_pins(texts) == pins


@pytest.mark.parametrize("text", ["tp=0", "pp=-1", "cp=x", "ep=", "tp=2.5", "tp=8,pp=", "tp=8,pp"])
def test_a_degree_is_a_whole_number_from_1_up(text: str) -> None:
    with pytest.raises(WrongUse, match="from 1 up"):
        read_pins([text])


@pytest.mark.parametrize("name", DEGREES)
def test_a_degree_of_1_changes_nothing(name: str) -> None:
    assert check_degree_pins({name: 1}, LLAMA_70B, as_cluster("4x8xH100")) == []


def test_illegal_pins_are_refused_before_anything_is_traced(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 8}), encoding="utf-8")

    def refuse(text: str) -> None:
        raise AssertionError(text)

    with pytest.raises(WrongUse, match=r"16 ranks cannot share 8 KV heads evenly.*Use 8\."):
        trimtab.plan(f"hf:{tmp_path}", "2x8xH100", pins=["tp=16"], say=refuse)
    with pytest.raises(WrongUse, match=r"tp=16 x pp=2: they make 32 ranks.*tp=16: use 8"):
        trimtab.plan(f"hf:{tmp_path}", "2x8xH100", pins={"tp": 16, "pp": 2}, say=refuse)


def test_expert_degrees_that_no_plan_has_are_refused_before_tracing() -> None:
    cluster = as_cluster("2x8xH100")
    with pytest.raises(WrongUse, match="ep=2: the model has no experts"):
        check_degree_pins({"ep": 2}, LLAMA_70B, cluster)
    with pytest.raises(WrongUse, match=r"ep=3: the model has 8 experts a layer.*Use 2 or 4"):
        check_degree_pins({"ep": 3}, MIXTRAL, cluster)
    with pytest.raises(
        WrongUse, match=r"ep=8: experts share the 4 ranks of dp_shard x cp x tp, which 8.*Use 4"
    ):
        check_degree_pins({"ep": 8, "dp_shard": 4}, MIXTRAL, cluster)
    assert check_degree_pins({"ep": 8, "dp_shard": 4, "tp": 2, "gpus": 8}, MIXTRAL, cluster) == []
    assert check_degree_pins({"ep": 8}, MIXTRAL, cluster) == []


def test_warnings_about_pins_do_not_stop_a_plan() -> None:
    found = check_degree_pins({"pp": 3, "gpus": 6}, LLAMA_8B, as_cluster("8xH100"), 2)
    assert [finding.rule for finding in found] == ["layers", "bubble"]
    unused = check_degree_pins({"pp": 3}, replace(LLAMA_8B, layers=30), as_cluster("8xH100"))
    assert [finding.rule for finding in unused] == ["product"]
    assert {finding.severity.value for finding in (*found, *unused)} == {"warning"}


@pytest.mark.parametrize(
    ("pins", "found", "cure"),
    [
        ({"tp": 3}, "it makes 3 ranks, which do not divide 4 processes", "Use tp=2 or 4, or --procs 3."),
        (
            {"pp": 2, "tp": 3},
            "tp=3 x pp=2: they make 6 ranks, and there are 4 processes",
            "Use tp=2, or --procs 6.",
        ),
        ({"dp_shard": 8}, "it makes 8 ranks, and there are 4 processes", "Use dp_shard=4, or --procs 8."),
        (
            {"ep": 3},
            "experts share the 4 ranks of dp_shard x cp x tp, which 3 does not divide",
            "Use 2 or 4.",
        ),
    ],
)
def test_degrees_that_do_not_make_the_processes_say_what_would(
    pins: dict[str, int], found: str, cure: str
) -> None:
    workload = Workload(name="w", global_batch=8, samples=800)
    with pytest.raises(WrongUse) as caught:
        build_cpu_setting(workload, 4, pins)
    spelt = ",".join(f"{name}={value}" for name, value in pins.items())
    assert (caught.value.given, caught.value.found, caught.value.cure) == (
        f"--pin {spelt} with --procs 4",
        found,
        cure,
    )


def test_a_pinned_global_batch_names_an_option_that_commands_with_pins_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WrongUse, match=r"--set global_batch=8"):
        read_pins(["global_batch=8"])
    for command in ("plan", "train", "launch"):
        monkeypatch.setattr("sys.argv", ["trimtab", command, "--help"])
        assert main_code() == 0
        assert "--set NAME=VALUE" in capsys.readouterr().out


def test_a_cluster_without_devices_leaves_the_mesh_open() -> None:
    assert describe_cluster(Cluster(nodes=(Node(name="a"),))) == ClusterShape()


@pytest.mark.slow
def test_a_plan_has_the_pinned_stages() -> None:
    plan = trimtab.plan(
        "bridge:tiny",
        "4xA100-40GB",
        pins={"pp": 2, "gpus": 2, "schedule": "1f1b", "micro_batch": 1, "recompute": "none"},
    )
    assert (plan.choice.mesh.pp, plan.choice.strategy) == (2, "pipeline")
    with pytest.raises(WrongUse, match=r"dp_shard=3: it makes 3 ranks, which do not divide 4 GPUs"):
        trimtab.plan("bridge:tiny", "4xA100-40GB", pins={"dp_shard": 3, "gpus": 4})


# --- configs


def lint_text(text: str, file: str, *, on: str | None = None) -> list[tuple[str, str, str]]:
    """Return severity, rule and sentence of what `show` finds in a config."""
    document = formats.read_config(text, file)
    site = find_site(document, builtin_targets(), origin=file)
    shape = describe_cluster(as_cluster(on)) if on else ClusterShape()
    reading = interpret_config(site, document.entries(), gpus=shape.gpus)
    found = lint_config(site, document.entries(), reading, ModelSizes(), shape)
    return [(finding.severity.value, finding.rule, finding.sentence()) for finding in found]


@pytest.mark.parametrize(
    ("name", "changes", "rule", "said"),
    [
        ("megatron-bridge", {}, "", ""),
        ("nemo", {}, "", ""),
        ("megatron-lm", {}, "", ""),
        ("nanotron", {}, "", ""),
        (
            "megatron-bridge",
            {"tensor_model_parallel_size: 8": "tensor_model_parallel_size: 6"},
            "widths",
            r"model\.tensor_model_parallel_size=6: 6 ranks cannot share 64 attention heads.*Use 4 or 8\.",
        ),
        (
            "megatron-bridge",
            {"virtual_pipeline_model_parallel_size: 5": "virtual_pipeline_model_parallel_size: 3"},
            "layers",
            "80 layers do not divide by 12 stages",
        ),
        ("nemo", {"num_nodes: 2": "num_nodes: 3", "size: 2": "size: 16"}, "product", "do not divide 24 GPUs"),
        ("nemo", {"global_batch_size: 64": "global_batch_size: 30"}, "batch", "Use 32|Use 0 or 32"),
        (
            "megatron-lm",
            {"--expert-model-parallel-size 8": "--expert-model-parallel-size 3"},
            "experts",
            r"args\.expert-model-parallel-size=3: .*8 experts a layer.*Use 2 or 4\.",
        ),
        (
            "megatron-lm",
            {"--pipeline-model-parallel-size 4": "--pipeline-model-parallel-size 0"},
            "minimum",
            "pipeline-model-parallel-size=0: a degree is a whole number from 1 up",
        ),
        ("megatron-lm", {"SEQ_LENGTH=4096": "SEQ_LENGTH=4095", "size 1\n": "size 2\n"}, "sequence", "4,095"),
        ("nanotron", {"tp: 2": "tp: 4"}, "widths", r"2 KV heads evenly\. Use 2\."),
        ("nanotron", {"tp: 2": "tp: two"}, "minimum", r"parallelism\.tp=two"),
        ("nanotron", {"tp: 2": "tp: -2"}, "minimum", r"parallelism\.tp=-2"),
    ],
)
def test_show_names_illegal_degrees_of_a_config(
    name: str, changes: dict[str, str], rule: str, said: str
) -> None:
    file, text = SAMPLES[name][0]
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    found = lint_text(text, file)
    if not rule:
        assert found == []
        return
    texts = [sentence for _, name_of_rule, sentence in found if name_of_rule == rule]
    assert texts, found
    assert re.search(said, texts[0]), texts


TITAN = """\
[model]
name = "llama3"
flavor = "405B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 1
context_parallel_degree = 1
"""


def test_the_sizes_of_a_model_that_torchtitan_names_are_known() -> None:
    assert lint_text(TITAN, "a.toml", on="16x8xH100") == []
    wrong = TITAN.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 16")
    wrong = wrong.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 4")
    found = lint_text(wrong, "a.toml", on="16x8xH100")
    assert [rule for _, rule, _ in found] == ["widths", "tp-across-nodes", "layers", "bubble"]
    assert "126 layers do not divide by 4 stages: 2 get 32 and 2 get 31. Use 3 or 6." in found[2][2]
    looped = wrong.replace("[parallelism]", '[parallelism]\npipeline_parallel_schedule = "Interleaved1F1B"')
    assert "8 stages" in lint_text(looped, "a.toml", on="16x8xH100")[2][2]
    contradicting = TITAN.replace("shard_degree = -1", "shard_degree = 3")
    assert (
        "Use parallelism.data_parallel_shard_degree=16."
        in lint_text(contradicting, "a.toml", on="16x8xH100")[0][2]
    )
    unknown = TITAN.replace("405B", "unknown").replace("parallel_degree = 8", "parallel_degree = 3")
    assert [rule for _, rule, _ in lint_text(unknown, "a.toml")] == ["sequence"]


def test_degrees_of_accelerate_and_deepspeed() -> None:
    accelerate = "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n"
    accelerate += "  parallelism_config_dp_shard_size: 2\n  parallelism_config_{}_size: {}\n"
    assert lint_text(accelerate.format("tp", 4), "a.yaml") == []
    assert [rule for _, rule, _ in lint_text(accelerate.format("tp", 3), "a.yaml")][:1] == ["product"]
    assert [rule for _, rule, _ in lint_text(accelerate.format("sp", 3), "a.yaml")] == ["product"]
    text = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, '
    text += '"tensor_parallel": {"autotp_size": %s}}'
    assert lint_text(text % 8, "ds.json", on="8xH100") == []
    assert lint_text(text % 0, "ds.json", on="8xH100") == []
    assert [rule for _, rule, _ in lint_text(text % 3, "ds.json", on="8xH100")][:1] == ["product"]


def test_a_config_without_degrees_has_no_findings() -> None:
    assert lint_text("per_device_train_batch_size: 3\n", "args.yaml") == []


def test_show_prints_findings_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = TITAN.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 16")
    (tmp_path / "train.toml").write_text(wrong, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["trimtab", "show", "train.toml", "--on", "16x8xH100"])
    monkeypatch.setenv("COLUMNS", "200")
    assert main_code() == 2
    out = capsys.readouterr().out
    assert "error: parallelism.tensor_parallel_degree=16: 16 ranks cannot share 8 KV heads" in out
    display = trimtab.show("train.toml", "16x8xH100")
    assert [finding.rule for finding in display.degrees] == ["widths", "tp-across-nodes"]


# --- plans into configs


def apply_mesh(
    mesh: Mesh, text: str, file: str, nodes: int = 1, recompute: Recompute = Recompute.NONE
) -> tuple[str, list[str]]:
    """Return a config with a plan for a mesh, and what was said."""
    choice = Setting(
        strategy=Strategy.FSDP,
        mesh=mesh,
        micro_batch=2,
        accumulation=4,
        global_batch=8 * mesh.data_parallel,
        precision=Precision.BF16,
        recompute=recompute,
    )
    places = tuple(
        RankPlacement(node=rank * nodes // mesh.size, node_name="n", device=rank, name="H100")
        for rank in range(mesh.size)
    )
    plan = Plan(job="job.py:Mine", choice=choice, estimate=ESTIMATE, places=places)
    document = formats.read_config(text, file)
    site = find_site(document, builtin_targets(), origin=file)
    draft = draft_edits(site, document, plan, file=file)
    return document.edit({edit.path: edit.after for edit in draft.edits}, add=True), draft.texts()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("torchtitan", ["tensor_parallel_degree = 8"]),
        ("megatron-bridge", ["tensor_model_parallel_size: 8", "global_batch_size: 32"]),
        ("nemo", ["tensor_model_parallel_size: 8", "devices: 8", "num_nodes: 4"]),
        ("megatron-lm", ["--tensor-model-parallel-size 8", "NNODES=4", "--pipeline-model-parallel-size 1"]),
        ("nanotron", ["  tp: 8", "  dp: 4", "batch_accumulation_per_replica: 4"]),
        ("deepspeed", ['"autotp_size": 8']),
    ],
)
def test_the_degrees_of_a_plan_are_written(name: str, lines: list[str]) -> None:
    file, text = SAMPLES[name][0]
    after, _ = apply_mesh(Mesh(dp_shard=4, tp=8), text, file, nodes=4)
    for line in lines:
        assert line in after, after
    again, _ = apply_mesh(Mesh(dp_shard=4, tp=8), after, file, nodes=4)
    assert again == after


@pytest.mark.parametrize("name", ["megatron-bridge", "nemo", "megatron-lm"])
def test_megatron_gets_all_that_full_recomputing_needs(name: str) -> None:
    """Megatron refuses recompute_granularity full without a method and a number of layers."""
    file, text = SAMPLES[name][0]
    mesh = Mesh(dp_shard=4, tp=8)
    after, _ = apply_mesh(mesh, text, file, nodes=4, recompute=Recompute.FULL)
    keys = ["granularity", "method", "num_layers"]
    mark = " " if name == "megatron-lm" else ": "
    for key, value in zip(keys, ["full", "uniform", "1"], strict=True):
        line = f"recompute_{key}{mark}{value}"
        assert (line.replace("_", "-") if name == "megatron-lm" else line) in after
    assert apply_mesh(mesh, after, file, nodes=4, recompute=Recompute.FULL)[0] == after
    kept, texts = apply_mesh(mesh, after, file, nodes=4)
    assert kept == after
    assert any("stays full: the plan recomputes nothing" in line for line in texts), texts


def test_accelerate_gets_all_sizes_of_its_mesh() -> None:
    """Accelerate takes 1 for a size that is missing, and refuses a mesh that is not its processes."""
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
    after, _ = apply_mesh(Mesh(dp_shard=4, tp=2), text, "a.yaml")
    assert "parallelism_config_tp_size: 2" in after
    assert "parallelism_config_dp_shard_size: 4" in after


def test_a_target_without_a_key_for_a_degree_refuses_the_plan() -> None:
    with pytest.raises(WrongUse, match=r"splits layers over tp=8, and transformers has no key.*--pin tp=1"):
        apply_mesh(Mesh(dp_shard=4, tp=8), "per_device_train_batch_size: 3\n", "args.yaml", nodes=4)


def test_slurm_headers_keep_a_tensor_group_in_a_node() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\nsrun python train.py\n"
    after, _ = apply_mesh(Mesh(dp_shard=4, tp=8), text, "train.sbatch", nodes=4)
    assert "#SBATCH --nodes=4" in after
    assert "#SBATCH --gpus-per-node=8" in after
