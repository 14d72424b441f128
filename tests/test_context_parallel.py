"""Context parallelism: sequences spread over ranks give the losses and gradients of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.engine import context_parallel as context
from trimtab.engine.chunked_loss import apply_loss_form
from trimtab.engine.sequence_split import SequencePart, check_heads, check_length, split_batch
from trimtab.errors import WrongUse
from trimtab.predict.step_time import exposed_context_s
from trimtab.spec import (
    ContextMethod,
    IncidentKind,
    LossForm,
    Mesh,
    Recompute,
    Setting,
    Strategy,
    Work,
    Workload,
)
from trimtab.spec.trace import CONTEXT
from trimtab.training.run import Run
from trimtab.training.task import build_cpu_setting, divide_setting
from worlds import Drill, everywhere, free_port, measure_gap, together, world_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("context parallel")  # its fixture is made once

TOLERANCE = 1e-10
LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


class Case(NamedTuple):
    """An attention call."""

    method: ContextMethod = context.RING
    causal: bool = True
    heads: int = 4
    keys: int = 2


CASES = [
    Case(method, causal, heads, keys)
    for method in (context.RING, context.ALL_TO_ALL)
    for causal in (True, False)
    for heads, keys in ((4, 4), (4, 2), (8, 2))
]


def make_tensors(heads: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(heads * keys)
    shapes = [(2, heads, 16, 8), (2, keys, 16, 8), (2, keys, 16, 8), (2, heads, 16, 8)]
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


def compare_attention(size: int, case: Case, dtype: torch.dtype = torch.float64) -> float:
    """Return the largest difference of outputs and gradients between a group and one process."""
    query, key, value, weights = make_tensors(case.heads, case.keys, dtype)
    whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    attend: Any = functional.scaled_dot_product_attention
    expected = attend(*whole, is_causal=case.causal, enable_gqa=True)
    torch.autograd.backward((expected * weights).sum())
    group = context.make_context_group(Mesh(cp=size), case.method)
    part = group.part
    own = [part.select(tensor, 2).requires_grad_() for tensor in (query, key, value)]
    context.split_attention(group)
    try:
        attend = functional.scaled_dot_product_attention
        found = attend(*own, is_causal=case.causal, enable_gqa=True)
        torch.autograd.backward((found * part.select(weights, 2)).sum())
    finally:
        context.split_attention(None)
    assert group.calls == 1
    gaps = [(found - part.select(expected, 2)).abs().max()]
    gaps += [
        (mine.grad - part.select(theirs.grad, 2)).abs().max()
        for mine, theirs in zip(own, whole, strict=True)
        if mine.grad is not None and theirs.grad is not None
    ]
    assert len(gaps) == 4
    return max(float(gap.detach()) for gap in gaps)


def compare_all(rank: int, _: int, folder: Path) -> list[float]:
    gaps = []
    for size in (2, 4):
        with world_of(size, rank, folder / f"store{size}") as inside:
            if inside:
                gaps += [compare_attention(size, case) for case in CASES]
                gaps.append(compare_attention(size, Case(), torch.float32) * 1e-5)
    return gaps


@pytest.fixture(scope="module")
def attention_gaps(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("attention")
    return together(4, compare_all, folder, folder=folder / "ranks")


@pytest.mark.slow
def test_split_attention_is_exact(attention_gaps: list[list[float]]) -> None:
    assert [len(gaps) for gaps in attention_gaps] == [26, 26, 13, 13]
    assert max(max(gaps) for gaps in attention_gaps) < TOLERANCE


def write_llama(folder: Path) -> str:
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    transformers.LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return f"hf:{folder}"


def make_job(name: str) -> Any:
    job = trimtab.load(name)
    if name.startswith("hf:"):
        job.seq = 32
    else:
        job.heads, job.seq = 4, 32
    return job


def run_whole(job: Any, batch: Any, dtype: torch.dtype) -> tuple[Any, float, list[torch.Tensor]]:
    """Return the model, and the loss and gradients of the whole batch on one process."""
    torch.manual_seed(0)
    model = job.model().to(dtype)
    if hasattr(model, "lm_head"):
        apply_loss_form(model, LossForm.CHUNKED)
    loss = job.loss(model, batch)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return model, float(loss.detach()), gradients


def compare_job(size: int, method: ContextMethod, name: str, dtype: torch.dtype) -> float:
    """Return the relative difference of loss and gradients between a group and one process."""
    job = make_job(name)
    torch.manual_seed(1)
    batch = job.batch(2)
    if name.startswith("hf:"):
        # Some ranks have no label at all.
        batch["labels"][:, 20:] = -100
    model, expected, gradients = run_whole(job, batch, dtype)
    group = context.make_context_group(Mesh(cp=size), method)
    context.prepare_model(model, group)
    context.split_attention(group)
    try:
        own = split_batch(job, batch, group.part)
        weight = torch.as_tensor(job.weight(own), dtype=torch.float64)
        total = weight.clone()
        dist.all_reduce(total)
        with context.check_calls(group):
            loss = job.loss(model, own) * (weight / total).to(dtype)
        loss.backward()
    finally:
        context.split_attention(None)
    found = loss.detach().clone()
    dist.all_reduce(found)
    gaps = [abs(float(found) - expected) / abs(expected)]
    for parameter, whole in zip(model.parameters(), gradients, strict=True):
        dist.all_reduce(parameter.grad)
        gaps.append(float((parameter.grad - whole).abs().max() / whole.abs().max()))
    return max(gaps)


def compare_jobs(rank: int, _: int, folder: Path, names: list[str]) -> list[float]:
    gaps = []
    for size in (2, 4):
        with world_of(size, rank, folder / f"store{size}") as inside:
            if inside:
                for name in names:
                    for method in (context.RING, context.ALL_TO_ALL):
                        gaps.append(compare_job(size, method, name, torch.float64))
                        gaps.append(compare_job(size, method, name, torch.float32) * 1e-5)
    return gaps


@pytest.mark.slow
def test_jobs_have_the_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    names = [write_llama(tmp_path / "llama"), "slm:tiny"]
    found = together(4, compare_jobs, tmp_path, names, folder=tmp_path / "ranks")
    assert [len(gaps) for gaps in found] == [16, 16, 8, 8]
    assert max(max(gaps) for gaps in found) < TOLERANCE


@pytest.mark.parametrize("balanced", [True, False])
def test_parts_cover_a_sequence_once(balanced: bool) -> None:
    parts = [SequencePart(rank=rank, size=4, balanced=balanced) for rank in range(4)]
    positions = torch.cat([part.positions(16) for part in parts])
    assert sorted(positions.tolist()) == list(range(16))
    values = torch.arange(16)[None, :, None]
    assert torch.equal(torch.cat([part.select(values) for part in parts], 1)[0, :, 0], positions)


def test_illegal_lengths_name_the_nearest_legal_ones() -> None:
    check_length(16, 4)
    with pytest.raises(WrongUse, match=r"cp=4") as caught:
        check_length(100, 4)
    assert "2 x cp = 8 chunks" in caught.value.found
    assert caught.value.cure == "Use --seq 96 or 104, or cp=2."
    with pytest.raises(WrongUse) as caught:
        check_length(3, 2)
    assert caught.value.cure == "Use --seq 4, or cp=1."
    check_length(6, 3, balanced=False)


def test_illegal_heads_name_the_nearest_legal_degrees() -> None:
    check_heads(32, 8, 8)
    check_heads(32, 8, 16)
    with pytest.raises(WrongUse) as caught:
        check_heads(12, 4, 8)
    assert caught.value.cure == "Use cp=4 or cp=12, or cp_method=ring."


class AloneGroup(context.ContextGroup):
    """A group without processes, for refusals."""

    def __init__(self, method: ContextMethod = context.RING) -> None:
        super().__init__(None, rank=0, size=2, method=method)


def test_calls_that_cannot_be_split_are_refused() -> None:
    query = torch.randn(1, 2, 8, 4)
    context.split_attention(AloneGroup())
    try:
        with pytest.raises(WrongUse, match="mask of shape"):
            functional.scaled_dot_product_attention(query, query, query, attn_mask=torch.ones(8, 8))
        with pytest.raises(WrongUse, match="dropout"):
            functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
        with pytest.raises(WrongUse, match="dimensions"):
            functional.scaled_dot_product_attention(query[0], query[0], query[0])
        with pytest.raises(WrongUse, match="different numbers"):
            functional.scaled_dot_product_attention(query, query[:, :, :4], query[:, :, :4], is_causal=True)
        with context.use_whole_sequences():
            assert functional.scaled_dot_product_attention(query, query, query).shape == query.shape
    finally:
        context.split_attention(None)


def test_models_that_mix_positions_are_refused() -> None:
    for layer in (nn.GRU(4, 4), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)):
        with pytest.raises(WrongUse, match="combines positions"):
            context.prepare_model(nn.Sequential(nn.Linear(4, 4), layer), AloneGroup())


@pytest.mark.parametrize(
    ("kind", "more", "found"),
    [
        ("MistralConfig", {"sliding_window": 4}, "window of 4"),
        ("Gemma2Config", {"head_dim": 8}, "sliding_attention"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_models_of_transformers_that_need_more_are_refused(
    kind: str, more: dict[str, Any], found: str
) -> None:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(getattr(transformers, kind)(**LLAMA | more))

    def run() -> None:
        context.prepare_model(model, AloneGroup())
        model(input_ids=torch.zeros(1, 8, dtype=torch.long))

    context.split_attention(AloneGroup())
    try:
        with pytest.raises(WrongUse) as caught:
            run()
    finally:
        context.split_attention(None)
    assert found in caught.value.found


def test_a_mask_for_transformers_is_not_ignored(tmp_path: Path) -> None:
    job = make_job(write_llama(tmp_path))
    model = job.model()
    context.prepare_model(model, AloneGroup())
    with pytest.raises(WrongUse, match="attention_mask"):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), attention_mask=torch.ones(1, 8))


def test_a_pass_without_split_attention_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"torch\.nn\.functional"), context.check_calls(AloneGroup()):
        pass


def test_jobs_have_to_say_how_their_batch_is_split(tmp_path: Path) -> None:
    part = SequencePart(rank=0, size=2)
    with pytest.raises(WrongUse, match=r"no split_sequence\(\)"):
        split_batch(trimtab.Job(), torch.zeros(2, 8), part)
    job = make_job(write_llama(tmp_path))
    job.packed = 8
    with pytest.raises(WrongUse, match="--packed"):
        split_batch(job, job.batch(2), part)
    job = make_job(write_llama(tmp_path))
    job.lengths = 8
    with pytest.raises(WrongUse, match="--lengths"):
        split_batch(job, job.batch(2), part)


# ------------------------------------------------------------------------ training


STEPS = 3
BATCH = 4


def make_setting(strategy: Strategy, **more: Any) -> Setting:
    axes = {name: more.pop(name) for name in ("dp_replicate", "dp_shard", "cp", "tp") if name in more}
    mesh = Mesh(**axes)
    micro = more.pop("micro_batch", 2)
    share = BATCH // mesh.data_parallel
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=min(micro, share),
        accumulation=-(-share // micro),
        global_batch=BATCH,
        **more,
    )


SETTINGS = [
    make_setting(Strategy.DDP, cp=2),
    make_setting(Strategy.DDP, cp=2, cp_method=ContextMethod.ALL_TO_ALL, recompute=Recompute.FULL),
    make_setting(Strategy.FSDP, cp=2),
    make_setting(Strategy.FSDP, cp=2, recompute=Recompute.SELECTIVE),
    make_setting(Strategy.DDP, cp=4),
    make_setting(Strategy.DDP, cp=2, dp_replicate=2),
    make_setting(Strategy.FSDP, cp=4, recompute=Recompute.FULL),
    make_setting(Strategy.FSDP, cp=2, dp_shard=2),
    make_setting(Strategy.HSDP, cp=2, dp_replicate=2),
    make_setting(Strategy.FSDP, cp=2, dp_shard=2, cp_method=ContextMethod.ALL_TO_ALL),
]


def list_samples(job: Any) -> list[Any]:
    """Return samples, of which some have labels at the beginning only."""
    torch.manual_seed(3)
    samples: list[Any] = []
    for number in range(BATCH * STEPS):
        batch = job.batch(1)
        if isinstance(batch, dict):
            batch["labels"][:, 20 - number :] = -100
            samples.append({name: tensor[0] for name, tensor in batch.items()})
        else:
            samples.append(tuple(tensor[0] for tensor in batch))
    return samples


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_steps(
    setting: Setting, name: str, faults: Any = None
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Return the losses, the weights after some steps, and the incidents."""
    torch.set_default_dtype(torch.float64)
    job = make_job(name)
    job.global_batch = BATCH
    if name.startswith("hf:") and setting.mesh.tp == 1:
        setting = setting.replace(loss=LossForm.CHUNKED)
    seen: list[Any] = []
    with Run(setting, job=job, faults=faults, listen=seen.append, join_s=60) as run:
        torch.manual_seed(0)
        run.prepare(job.model(), make_sgd, clip=1.0)
        loader = run.loader(list_samples(job), seed=5)
        outcomes = [run.step(window) for window in loader]
        weights = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in run.model.parameters()
        ]
        assert [outcome.samples for outcome in outcomes] == [BATCH] * STEPS
        return [outcome.loss for outcome in outcomes], [weight.detach().clone() for weight in weights], seen


def train_all(settings: list[Setting], names: list[str], port: int) -> list[Any]:
    """Train every job with every setting, one after the other."""
    found = []
    for number, (setting, name) in enumerate(product(settings, names)):
        os.environ["MASTER_PORT"] = str(port + number)
        found.append(train_steps(setting, name)[:2])
    return found


@pytest.fixture(scope="module")
def job_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [write_llama(tmp_path_factory.mktemp("llama")), "slm:tiny"]


@pytest.fixture(scope="module")
def trained_alone(job_names: list[str]) -> dict[str, Any]:
    alone = make_setting(Strategy.SINGLE)
    found = {}
    for name in job_names:
        ((losses, weights, _),) = everywhere(1, train_steps, alone, name)
        found[name] = losses, weights
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_on_split_sequences_is_that_of_one_process(
    ranks: int, job_names: list[str], trained_alone: dict[str, Any]
) -> None:
    settings = [setting for setting in SETTINGS if setting.gpus == ranks]
    found = everywhere(ranks, train_all, settings, job_names, free_port())
    pairs = list(product(settings, job_names))
    assert len(found[0]) == len(pairs)
    for (setting, name), ours in zip(pairs, found[0], strict=True):
        assert measure_gap(ours, trained_alone[name]) < TOLERANCE, (setting, name)


@pytest.mark.slow
def test_ranks_split_layers_and_sequences_together(trained_alone: dict[str, Any]) -> None:
    settings = [
        make_setting(Strategy.FSDP, cp=2, tp=2),
        make_setting(Strategy.FSDP, cp=2, tp=2, cp_method=ContextMethod.ALL_TO_ALL, recompute=Recompute.FULL),
    ]
    found = everywhere(4, train_all, settings, ["slm:tiny"], free_port())
    for ranks in found:
        for setting, ours in zip(settings, ranks, strict=True):
            assert measure_gap(ours, trained_alone["slm:tiny"]) < TOLERANCE, setting


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [make_setting(Strategy.DDP, cp=2), make_setting(Strategy.FSDP, cp=2, micro_batch=3)]
)
def test_a_rank_without_memory_does_not_stop_the_others(
    setting: Setting, job_names: list[str], trained_alone: dict[str, Any]
) -> None:
    drill = Drill(("forward", 1, 1), ("backward", 2, 0))
    name = job_names[0]
    found = everywhere(2, train_steps, setting, name, drill)
    for losses, weights, _ in found:
        assert measure_gap((losses, weights), trained_alone[name]) < TOLERANCE
    assert {incident.kind for _, _, seen in found for incident in seen} == {IncidentKind.OUT_OF_MEMORY}


# ------------------------------------------------------------------------ plans and predictions


def make_work(op: str, kind: str = "matrix", size: int = 0) -> Work:
    return Work(op=op, kind=kind, dtype="bfloat16", read_bytes=size)


class OneSecond:
    """A pace at which every operation takes one second."""

    def seconds(self, _: Work) -> float:
        return 1.0


class SlowLinks:
    """Links over which a send takes as many seconds as it has bytes."""

    def send_s(self, size: int, apart: int) -> float:
        del apart
        return float(size)

    def all_to_all_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        del ranks, apart
        return float(size)


@pytest.mark.parametrize(
    ("size", "method", "computed", "waited"),
    [
        (1, "ring", 2, 0.0),
        (5, "ring", 2, 3.0),
        (5, "all-to-all", 0, 5.0),
    ],
)
def test_what_is_sent_while_a_block_is_computed_is_hidden(
    size: int, method: str, computed: int, waited: float
) -> None:
    send = make_work(f"{CONTEXT} {method} _c10d_functional::all_to_all_single", "collective", size)
    wait = make_work(f"{CONTEXT} {method} _c10d_functional::wait_tensor", "collective", size)
    block = make_work("aten::mm")
    works: Any = (send, *[block] * computed, wait)
    trace: Any = SimpleNamespace(works=works, sequence=range(len(works)))
    setting = make_setting(Strategy.FSDP, cp=2)
    fast: Any = OneSecond()
    slow: Any = SlowLinks()
    assert exposed_context_s(trace, setting, slow, fast) == waited
    assert not exposed_context_s(trace, make_setting(Strategy.FSDP, dp_shard=2), slow, fast)


def test_sends_of_a_group_follow_one_another() -> None:
    send = make_work(f"{CONTEXT} ring _c10d_functional::all_to_all_single", "collective", 2)
    wait = make_work(f"{CONTEXT} ring _c10d_functional::wait_tensor", "collective", 2)
    works: Any = (send, send, make_work("aten::mm"), wait, wait)
    trace: Any = SimpleNamespace(works=works, sequence=range(len(works)))
    links: Any = SlowLinks()
    pace: Any = OneSecond()
    assert exposed_context_s(trace, make_setting(Strategy.DDP, cp=2), links, pace) == 3.0


def test_pins_give_a_mesh_of_processes_that_split_sequences() -> None:
    workload = Workload(name="x", global_batch=8)
    setting = build_cpu_setting(workload, 4, {"cp": 2})
    assert (setting.strategy, setting.mesh) == (Strategy.DDP, Mesh(dp_replicate=2, cp=2))
    assert (setting.micro_batch, setting.data_parallel) == (4, 2)
    pins = {"cp": 4, "strategy": "fsdp", "cp_method": "all-to-all"}
    setting = build_cpu_setting(workload, 4, pins)
    assert setting.mesh == Mesh(cp=4)
    assert setting.mesh.shards == 4
    assert setting.cp_method is ContextMethod.ALL_TO_ALL
    with pytest.raises(WrongUse, match="which do not divide 4 processes"):
        build_cpu_setting(workload, 4, {"cp": 3})
    with pytest.raises(WrongUse, match="does not compile"):
        build_cpu_setting(workload, 4, {"cp": 2, "compile": True})
    with pytest.raises(WrongUse, match="how many stages"):
        build_cpu_setting(workload, 4, {"cp": 2, "strategy": "pipeline"})
    assert build_cpu_setting(workload, 4, {"cp": 2, "pp": 2}).mesh == Mesh(pp=2, cp=2)


def test_fewer_processes_keep_sequences_split_if_they_can() -> None:
    setting = make_setting(Strategy.FSDP, cp=2, dp_shard=2)
    assert divide_setting(setting, 2)[0].mesh == Mesh(cp=2)
    assert divide_setting(setting, 3)[0].mesh == Mesh(dp_shard=3)


@pytest.mark.slow
def test_a_run_resumes_with_whole_sequences_and_with_split_ones(tmp_path: Path) -> None:
    def train(folder: str, procs: int, steps: int, *pins: str) -> list[float]:
        command = ["train", "slm:tiny", "--procs", str(procs), "--steps", str(steps), "--json"]
        command += ["--out", str(tmp_path / folder)]
        for pin in pins:
            command += ["--pin", pin]
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return [line["loss"] for line in lines if "loss" in line and "step" in line]

    whole = train("whole", 1, 6)
    first = train("split", 2, 2, "cp=2", "strategy=fsdp")
    second = train("split", 2, 4, "strategy=ddp")
    third = train("split", 2, 6, "cp=2", "cp_method=all-to-all")
    assert [*first, *second, *third] == pytest.approx(whole, rel=1e-4)
