"""The jobs that come with trimtab, hf:FOLDER, and the options of any job."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import trimtab
from test_cli import trimtab_cli
from trimtab.engine.build import find_repeated_blocks
from trimtab.errors import EnvironmentFault, JobFailed, TrimtabError, UnknownName, WrongUse
from trimtab.exams.run import read_cases
from trimtab.jobs import load as load_module
from trimtab.jobs.head import IGNORE_INDEX, mean_token_loss, token_losses
from trimtab.jobs.job import samples_in
from trimtab.jobs.load import find_job_file, find_job_name
from trimtab.jobs.naics.job import lorentz_distance, on_hyperboloid
from trimtab.jobs.options import list_options
from trimtab.jobs.registry import BUILT_IN, JOBS, job_flags
from trimtab.trace.fake_cuda import expected_redraws

TINY = [f"{name}:tiny" for name in BUILT_IN]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("train.py", "it names a file and no class in it"),
        ("missing.py:Job", "there is no such file"),
        ("./notes.txt:Job", "it is no .py file"),
        ("slmm", "there is no built-in of that name; did you mean slm?"),
        ("hf:missing", "there is no such folder"),
    ],
)
@pytest.mark.parametrize("verb", [trimtab.estimate, trimtab.plan])
def test_a_name_that_no_job_has_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Any, name: str, found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(TrimtabError) as caught:
        verb(name, "H100")
    assert caught.value.found == found


def on_meta(job: Any) -> Any:
    with torch.device("meta"):
        return job.model()


def count(module: Any, *, learning: bool = False) -> int:
    return sum(
        parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not learning
    )


def shapes(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, dict):
        return {name: shapes(one) for name, one in batch.items()}
    return [shapes(one) for one in batch]


def trained(job: Any, steps: int = 40) -> list[float]:
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses: list[float] = []
    while len(losses) < steps:
        for batch in DataLoader(job.dataset(), batch_size=job.global_batch, shuffle=True):
            optimizer.zero_grad()
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses


def test_slm_has_the_parameters_on_record() -> None:
    model = on_meta(trimtab.load("slm"))
    assert count(model) == 108_780_288
    decayed, spared = trimtab.load("slm").optimizer(model.parameters()).param_groups
    assert sum(one.numel() for one in decayed["params"]) == 108_761_088
    assert len(decayed["params"]) == 50
    assert {one.dim() for one in spared["params"]} == {1}
    assert count(on_meta(trimtab.load("slm", layers=24, heads=16, width=1024))) == 333_808_640


def test_bridge_has_the_parameters_on_record() -> None:
    model = on_meta(trimtab.load("bridge"))
    assert count(model.llama) == 8_030_261_248
    assert count(model.qwen) == 7_615_616_512
    assert count(model.encoder) == 5_405_696
    assert len(list(model.encoder.parameters())) == 90
    assert count(model.adapters["llama"]) == 5_670_913
    assert len(list(model.adapters["llama"].parameters())) == 20
    assert count(model.adapters["qwen"]) == 5_012_481
    assert count(model, learning=True) == 16_089_090
    learning = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert (learning, frozen) == ({torch.float32}, {torch.bfloat16})


def test_naics_has_the_parameters_on_record() -> None:
    model = on_meta(trimtab.load("naics"))
    assert count(model) == 105_542_277
    assert count(model, learning=True) == 14_689_413
    title = model.encoders["title"]
    assert count(title, learning=True) == 337_920
    assert count(title) - count(title, learning=True) == 22_713_216
    assert count(model.mixture) == 12_599_300
    assert count(model.projection) == 590_208
    assert count(model.hyperbolic) == 148_225
    assert count(on_meta(trimtab.load("naics", expert_width=768)).mixture) == 9_452_548


def test_horizons_are_those_on_record() -> None:
    slm, bridge, naics = (trimtab.load(name) for name in ("slm", "bridge", "naics"))
    assert slm.samples * slm.epochs / slm.global_batch == 60_000
    assert (bridge.samples, bridge.epochs, bridge.global_batch) == (5000, 8, 64)
    assert len(naics.dataset()) == naics.codes * naics.positives == 2125 * 32


@pytest.mark.parametrize(("name", "share"), [("slm:tiny", 0.7), ("bridge:tiny", 0.85), ("naics:tiny", 0.6)])
@pytest.mark.slow
def test_a_tiny_job_trains_and_its_loss_falls(name: str, share: float) -> None:
    losses = trained(trimtab.load(name))
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) / 5 < share * losses[0]


@pytest.mark.parametrize("name", TINY)
def test_samples_collate_to_what_batch_returns_and_are_always_the_same(name: str) -> None:
    job = trimtab.load(name)
    first, again = job.dataset(), job.dataset()
    assert len(first) == job.samples
    collated = default_collate([first[index] for index in range(3)])
    assert shapes(collated) == shapes(job.batch(3))
    assert samples_in(collated) == 3
    torch.testing.assert_close(first[7], again[7], rtol=0, atol=0)
    assert str(first[7]) != str(first[8])
    with pytest.raises(IndexError):
        first[job.samples]


@pytest.mark.parametrize("name", TINY)
def test_halves_weighted_by_weight_make_the_gradient_of_the_whole(name: str) -> None:
    job = trimtab.load(name)
    torch.manual_seed(0)
    model = job.model()
    data = job.dataset()

    def gradient(*ranges: range) -> list[torch.Tensor]:
        model.zero_grad()
        batches = [default_collate([data[index] for index in some]) for some in ranges]
        total = sum(job.weight(batch) for batch in batches)
        for batch in batches:
            (job.loss(model, batch) * job.weight(batch) / total).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    whole, parts = gradient(range(6)), gradient(range(4), range(4, 6))
    # The frozen models of bridge work in bf16, and their rounding depends on the batch.
    most = 0.03 if name == "bridge:tiny" else 1e-4
    off = [float((one - other).norm() / (one.norm() + 1e-9)) for one, other in zip(whole, parts, strict=True)]
    assert max(off) < most


def test_the_loss_of_bridge_is_a_sum_over_models_and_a_model_may_be_away() -> None:
    job = trimtab.load("bridge:tiny")
    model, batch = job.model(), job.batch(2)
    losses = job.losses(model, batch)
    assert set(losses) == set(job.branches) == {"llama", "qwen"}
    assert job.loss(model, batch).item() == pytest.approx(sum(loss.item() for loss in losses.values()))
    assert all(model.get_submodule(prefix) is not None for prefix in job.branches.values())
    model.qwen = None
    (alone,) = job.losses(model, batch).values()
    assert alone.item() == pytest.approx(losses["llama"].item())


def test_bridge_can_look_ahead_and_learn_from_a_teacher() -> None:
    job = trimtab.load("bridge:tiny", ahead=2, teacher=True)
    model, batch = job.model(), job.batch(2)
    assert shapes(default_collate([job.dataset()[0], job.dataset()[1]])) == shapes(batch)
    more = job.loss(model, batch)
    more.backward()
    assert model.encoder.bytes.weight.grad.isfinite().all()
    job.ahead, job.teacher = 0, False
    assert more.item() > job.loss(model, batch).item()


@pytest.mark.parametrize("pieces", [2, 3, 7])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_by_pieces_are_those_of_the_whole(pieces: int, *, autocast: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (4, 16))
    targets[0, :5] = IGNORE_INDEX

    def answer(size: int) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses = token_losses(hidden, weight, targets, pieces=size)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), [hidden, weight])]

    assert answer(0)[0][0, :5].tolist() == [0.0] * 5
    for one, other in zip(answer(pieces), answer(1), strict=True):
        torch.testing.assert_close(
            one, other, rtol=0.02 if autocast else 1e-5, atol=0.03 if autocast else 1e-5
        )


@pytest.mark.parametrize("pieces", [1, 3, 64, 1000])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_loss_has_the_gradients_of_the_mean_of_losses(pieces: int, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.float64 if kind is torch.float64 else torch.float32
    hidden = torch.randn(4, 16, 8, dtype=exact, requires_grad=True)
    weight = torch.randn(50, 8, dtype=exact, requires_grad=True)
    targets = torch.randint(50, (4, 16))
    targets[0, :5] = IGNORE_INDEX
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is torch.bfloat16):
        loss = 3 * mean_token_loss(hidden, weight, targets, pieces=pieces)
    wanted = 3 * token_losses(hidden, weight, targets, pieces=1).sum() / (targets != IGNORE_INDEX).sum()
    near = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.03}[kind]
    torch.testing.assert_close(loss, wanted, rtol=near, atol=near)
    found, right = (torch.autograd.grad(one, [hidden, weight]) for one in (loss, wanted))
    torch.testing.assert_close(found, right, rtol=near, atol=near)


def test_a_mean_loss_of_nothing_is_nothing_and_a_frozen_head_takes_no_gradient() -> None:
    hidden, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(5, 8)
    ignored = torch.full((2, 3), IGNORE_INDEX)
    loss = mean_token_loss(hidden, weight, ignored, pieces=2)
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is None
    with torch.no_grad():
        assert not mean_token_loss(hidden, weight, torch.ones(2, 3, dtype=torch.long), pieces=2).requires_grad


def test_points_lie_on_the_hyperboloid_and_a_point_is_near_itself() -> None:
    points = on_hyperboloid(torch.randn(5, 1, 9))
    assert (points[..., 0] ** 2 - points[..., 1:].square().sum(-1)).flatten().tolist() == pytest.approx(
        [1.0] * 5, abs=0.05
    )
    away = lorentz_distance(points[:1], points.transpose(0, 1))[0]
    assert away[0] < 0.01 < min(away[1:])
    zero = torch.zeros(1, 1, 4, requires_grad=True)
    apart = lorentz_distance(on_hyperboloid(zero), on_hyperboloid(zero))
    assert torch.autograd.grad(apart.sum(), [zero])[0].isfinite().all()


@pytest.mark.parametrize("name", ["bridge", "naics"])
def test_a_built_in_job_is_a_guest_that_only_the_registry_names(name: str) -> None:
    package = Path(trimtab.__file__).parent
    own = package / "jobs" / name
    assert (own / "job.py").is_file()
    others = [file for file in package.rglob("*.py") if own not in file.parents]
    naming = [file.name for file in others if f"trimtab.jobs.{name}" in file.read_text(encoding="utf-8")]
    assert naming == ["registry.py"]


def test_every_flag_of_a_job_sets_an_attribute_that_the_job_has() -> None:
    for built_in in JOBS:
        job = getattr(importlib.import_module(built_in.module), built_in.class_name)
        assert all(hasattr(job, flag.attribute) for flag in built_in.flags)
    flags = {flag.name: flag for flag in job_flags(training=True)}
    assert flags["lora"].jobs == ("hf:", "bridge")
    assert flags["lora"].help.startswith("hf, bridge: ")
    assert "data" not in {flag.name for flag in job_flags()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_has_blocks_to_recompute(name: str) -> None:
    assert find_repeated_blocks(on_meta(trimtab.load(f"{name}:tiny")))


# Two models are traced for half a minute.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "bridge:tiny")) for name in TINY]
)
def test_tiny_jobs_are_estimated(name: str) -> None:
    job = trimtab.load(name)
    found = trimtab.estimate(name, "A100-40GB", micro_batch=4)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in on_meta(job).parameters())
    # Small tensors are rounded up to 512 bytes.
    assert weights < found.parts.weights < 1.2 * weights + 32 * 2**10
    if name == "slm:tiny":
        assert trimtab.estimate(job, "A100-40GB", micro_batch=4) == found


@pytest.mark.slow
def test_logits_by_pieces_need_less_memory() -> None:
    less, more = (
        trimtab.estimate("slm", "A100-40GB", micro_batch=20, options={"pieces": pieces, "layers": 1})
        for pieces in (8, 1)
    )
    # The logits exist once, in bf16: their gradients overwrite them. 8 pieces hold an eighth of them, and add
    # up their gradients of the head, which take 6 to 8 bytes for each of its weights.
    logits, head = 20 * 1024 * 30_000 * 2, 30_000 * 768
    saved = more.allocated_bytes - less.allocated_bytes
    assert logits * 7 / 8 - 8 * head < saved <= logits * 7 / 8 - 6 * head


# ---------------------------------------------------------------------------------------------- options


def test_options_are_the_plain_attributes() -> None:
    found = list_options(trimtab.load("slm:tiny"))
    assert found["layers"] == 2
    assert found["global_batch"] == 16
    assert not {"name", "tiny", "model", "branches", "assumptions"} & set(found)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("layers", "3", 3),
        ("layers", 3, 3),
        ("vocab", "30_000", 30_000),
        ("dropout", "0", 0.0),
        ("dropout", 1, 1.0),
        ("samples", "10", 10),
    ],
)
def test_an_option_is_read_as_what_is_there(name: str, given: Any, kept: Any) -> None:
    found = getattr(trimtab.load("slm", **{name: given}), name)
    assert found == kept
    assert type(found) is type(kept)


def test_switches_tables_and_lists_can_be_set() -> None:
    job = trimtab.load("bridge", teacher="yes", llama='{"hidden_size": 64}')
    assert job.teacher is True
    assert job.llama == {"hidden_size": 64}
    assert trimtab.load("trimtab.exams.jobs:ResNet50", depths="[1, 1]").depths == (1, 1)


@pytest.mark.parametrize(
    ("name", "given", "error", "found"),
    [
        ("slm", {"layer": 3}, UnknownName, "no option 'layer'; did you mean layers.*dropout, epochs"),
        ("slm", {"model": 3}, UnknownName, "no option 'model'"),
        ("slm", {"layers": "many"}, WrongUse, "not a whole number.*layers=12"),
        ("slm", {"layers": 2.5}, WrongUse, "not a whole number"),
        ("slm", {"layers": True}, WrongUse, "not a whole number"),
        ("slm", {"dropout": "none"}, WrongUse, "not a number"),
        ("bridge", {"teacher": "maybe"}, WrongUse, "not true or false"),
        ("bridge", {"llama": "8"}, WrongUse, "not a table"),
        ("bridge", {"llama": "{"}, WrongUse, "not a table"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    name: str, given: dict[str, Any], error: type[TrimtabError], found: str
) -> None:
    with pytest.raises(error, match=found):
        trimtab.load(name, **given)


def test_every_recorded_case_sets_options_that_its_job_has() -> None:
    for case in read_cases():
        trimtab.load(f"trimtab.exams.jobs:{case.job}", **case.overrides)


@pytest.mark.parametrize(
    ("name", "error", "found"),
    [
        ("slmm", UnknownName, "no built-in of that name; did you mean slm"),
        ("", UnknownName, "no built-in"),
        ("slm:big", UnknownName, "has no 'big'.*slm:tiny.*slm.py:NAME"),
        ("slm:", UnknownName, "has no ''"),
        ("train.py", WrongUse, "names a file and no class.*estimate --on GPU -- python train.py. "),
        ("./folder/train.py:", WrongUse, "names a file and no class.*-- python ./folder/train.py. "),
        ("./folder", WrongUse, "names a file and no class[^-]*Name a job"),
    ],
)
def test_a_name_that_is_no_job_says_what_would_be(name: str, error: type[TrimtabError], found: str) -> None:
    with pytest.raises(error, match=found):
        trimtab.load(name)


def test_the_name_of_a_job_leads_back_to_it(tmp_path: Path) -> None:
    assert find_job_name(trimtab.load("slm", layers=3)) == ("slm", {"layers": 3})
    name, changed = find_job_name(trimtab.load("naics:tiny"))
    assert list_options(trimtab.load(name, **changed)) == list_options(trimtab.load("naics:tiny"))
    folder = written(tmp_path, "GPT2Config", GPT2)
    job = trimtab.load(folder, lora=4)
    job.batch(1)
    assert find_job_name(job) == (folder, {"lora": 4})


# ---------------------------------------------------------------------------------------------- hf:FOLDER

DECODER = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENCODER = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 66,
}
GPT2 = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
T5 = {"vocab_size": 300, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "LlamaForCausalLM": ("LlamaConfig", DECODER | {"dtype": "bfloat16"}),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER),
    "MixtralForCausalLM": ("MixtralConfig", DECODER | {"num_local_experts": 4}),
    "BertForMaskedLM": ("BertConfig", ENCODER),
    "RobertaForMaskedLM": ("RobertaConfig", ENCODER),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "BertForSequenceClassification": ("BertConfig", ENCODER | {"num_labels": 3}),
    "LlamaForSequenceClassification": ("LlamaConfig", DECODER | {"num_labels": 3, "dtype": "bfloat16"}),
    "ViTForImageClassification": ("ViTConfig", VIT),
    "ResNetForImageClassification": ("ResNetConfig", RESNET),
}
NO_WORDS = ("ViTForImageClassification", "ResNetForImageClassification")


def written(folder: Path, kind: str, shape: dict[str, Any], architecture: str | None = None) -> str:
    """A folder with the config.json that transformers writes for such a model."""
    import transformers

    named = {"architectures": [architecture]} if architecture else {}
    # Tokens that mark the ends of a text are outside of a small vocabulary.
    ends = {} if "image_size" in shape or "depths" in shape else {"bos_token_id": 1, "eos_token_id": 2}
    getattr(transformers, kind)(**shape, **named, **ends).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("how", [{}, {"lora": 4}, {"frozen": True}], ids=["all", "lora", "frozen"])
def test_a_config_becomes_a_job_that_learns(tmp_path: Path, architecture: str, how: dict[str, Any]) -> None:
    if architecture.startswith("ResNet") and "lora" in how:
        pytest.skip("it has no linear layers")
    # One file of text: each test would tokenise the whole library again.
    seq = {} if architecture in NO_WORDS else {"seq": 16, "data": argparse.__file__}
    torch.manual_seed(0)
    job = trimtab.load(written(tmp_path, *FAMILIES[architecture], architecture), **how, **seq, rate=1e-2)
    model = job.model()
    assert type(model).__name__ == architecture
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {one.dtype for one in learning} == {torch.float32}
    assert (count(model) == count(model, learning=True)) is (how == {})
    batch = default_collate([job.dataset()[index] for index in range(4)])
    assert shapes(batch) == shapes(job.batch(4))
    assert job.weight(batch) > 0
    optimizer = job.optimizer(learning)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(one.grad is not None for one in learning)


ESTIMATED = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "LlamaForCausalLM"))
        for name in (*ESTIMATED, "ViTForImageClassification")
    ],
)
def test_a_config_is_estimated(tmp_path: Path, architecture: str) -> None:
    name = written(tmp_path, *FAMILIES[architecture], architecture)
    found = trimtab.estimate(name, "H200", micro_batch=2)
    assert found.fits is True
    assert any("(--seq)" in assumption for assumption in found.assumptions) is (architecture not in NO_WORDS)


TRUNCATED = """
import torch
from torch import nn


class Job:
    def model(self):
        net = nn.Linear(512, 512)
        nn.init.trunc_normal_(net.weight, std=1.0, a=-2.0, b=2.0)
        nn.init.trunc_normal_(net.bias, std=1.0, a=3.0, b=4.0)
        return net

    def batch(self, size):
        return torch.randn(size, 512)

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


def test_numbers_drawn_until_they_are_within_bounds_are_drawn_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "truncated.py").write_text(TRUNCATED, encoding="utf-8")
    found = trimtab.estimate(f"{tmp_path}/truncated.py:Job", "H200")
    assert found.parts.weights == pytest.approx(4 * 513 * 512, rel=0.01)
    # Four rounds leave less than one of 2.4 million numbers beyond two standard deviations.
    assert expected_redraws(2_400_000, 0.0455) == 4
    assert 2_400_000 * 0.0455**4 > 1 > 2_400_000 * 0.0455**5
    assert expected_redraws(1_000_000, 1e-9) == 0


@pytest.mark.slow
def test_frozen_weights_have_no_optimizer_state_and_keep_their_dtype(tmp_path: Path) -> None:
    wide = DECODER | {"hidden_size": 512, "intermediate_size": 1024, "dtype": "bfloat16"}
    name = written(tmp_path, "LlamaConfig", wide, "LlamaForCausalLM")
    whole = trimtab.estimate(name, "H200")
    lora = trimtab.estimate(name, "H200", options={"lora": 8})
    assert lora.parts.weights == pytest.approx(whole.parts.weights / 2, rel=0.1)
    assert lora.parts.optimizer < 0.1 * whole.parts.optimizer
    assert "frozen weights in bfloat16, as in config.json" in lora.assumptions


@pytest.mark.slow
def test_a_changed_config_is_traced_again(tmp_path: Path) -> None:
    name = written(tmp_path, "GPT2Config", GPT2, "GPT2LMHeadModel")
    before = trimtab.estimate(name, "H200")
    written(tmp_path, "GPT2Config", GPT2 | {"n_embd": 512}, "GPT2LMHeadModel")
    assert trimtab.estimate(name, "H200").parts.weights > 10 * before.parts.weights


LLAMA_8B = DECODER | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("rank", "learning"), [(8, 20_971_520), (16, 41_943_040), (32, 83_886_080), (64, 167_772_160)]
)
def test_adapters_of_llama_have_the_parameters_on_record(tmp_path: Path, rank: int, learning: int) -> None:
    name = written(tmp_path, "LlamaConfig", LLAMA_8B, "LlamaForCausalLM")
    model = on_meta(trimtab.load(name, lora=rank))
    assert count(model, learning=True) == learning
    assert count(model) - learning == 8_030_261_248


def test_positions_are_counted_as_the_model_counts_them(tmp_path: Path) -> None:
    assert trimtab.load(written(tmp_path / "a", "BertConfig", ENCODER)).tokens == 66
    assert trimtab.load(written(tmp_path / "b", "RobertaConfig", ENCODER)).tokens == 64
    assert trimtab.load(written(tmp_path / "c", "T5Config", T5), seq=3000).tokens == 3000
    long = DECODER | {"max_position_embeddings": 131_072}
    assert trimtab.load(written(tmp_path / "d", "LlamaConfig", long)).tokens == 1024


def test_a_config_without_an_architecture_is_taken_for_what_it_is_mostly(tmp_path: Path) -> None:
    job = trimtab.load(written(tmp_path, "BertConfig", ENCODER))
    assert type(on_meta(job)).__name__ == "BertForMaskedLM"
    assert any("taken as masked LM" in assumption for assumption in job.assumptions)


def rewritten(folder: Path, **changes: Any) -> str:
    name = written(folder, "LlamaConfig", DECODER, "LlamaForCausalLM")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("changes", "how", "error", "found"),
    [
        ({"model_type": "lama"}, {}, UnknownName, "no model_type 'lama'.*llama"),
        ({"model_type": None}, {}, WrongUse, "has no model_type"),
        ({"auto_map": {"AutoModel": "code.Model"}}, {}, WrongUse, "auto_map: the model is code"),
        ({"quantization_config": {"bits": 4}}, {}, WrongUse, "neither load_in_4bit nor load_in_8bit"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, WrongUse, "method gptq: GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, WrongUse, "method awq: AWQ"),
        ({"quantization_config": {"load_in_4bit": True}}, {}, WrongUse, "stored as fp4.*--lora 16"),
        ({"architectures": ["LlamaModel"]}, {}, WrongUse, "LlamaModel, which cannot.*ForCausalLM"),
        ({"architectures": ["LlamaForMaskedLM"]}, {}, WrongUse, "LlamaForMaskedLM, which cannot"),
        ({"num_attention_heads": 0}, {}, TrimtabError, "cannot"),
        ({}, {"seq": 65}, WrongUse, "has 64 positions.*at most 64"),
        ({}, {"seq": 0}, WrongUse, "below 1"),
        ({}, {"lora": 0}, WrongUse, "below 1"),
        ({}, {"lora": -3}, WrongUse, "below 1"),
        ({}, {"lora": "many"}, WrongUse, "not a whole number"),
        ({}, {"rank": 3}, UnknownName, "no option 'rank'"),
    ],
)
def test_a_config_that_cannot_be_built_says_why(
    tmp_path: Path, changes: dict[str, Any], how: dict[str, Any], error: type[TrimtabError], found: str
) -> None:
    with pytest.raises(error, match=found) as caught:
        on_meta(trimtab.load(rewritten(tmp_path, **changes), **how))
    assert caught.value.exit_code in {2, 4}


def test_a_folder_that_is_none_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no such folder"):
        trimtab.load(f"hf:{tmp_path}/absent")
    with pytest.raises(WrongUse, match="no such folder"):
        trimtab.load("hf:")
    with pytest.raises(WrongUse, match=r"has no config\.json"):
        trimtab.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(WrongUse, match="is not JSON"):
        trimtab.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WrongUse, match="is not JSON"):
        trimtab.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(WrongUse, match="has no model_type"):
        trimtab.load(f"hf:{tmp_path}")


def test_images_have_no_length_and_convolutions_no_adapters(tmp_path: Path) -> None:
    name = written(tmp_path, "ResNetConfig", RESNET, "ResNetForImageClassification")
    with pytest.raises(WrongUse, match="reads images"):
        trimtab.load(name, seq=8).model()
    with pytest.raises(WrongUse, match="no linear layer except its head"):
        trimtab.load(name, lora=8).model()


def test_a_package_that_a_package_lacks_is_named(tmp_path: Path) -> None:
    on_demand = """
try:
    import nobody_has_this
except ImportError as error:
    raise ModuleNotFoundError("Could not import module 'Model'") from error
"""
    file = tmp_path / "job.py"
    file.write_text(on_demand, encoding="utf-8")
    with pytest.raises(JobFailed, match="it needs the package 'nobody_has_this'"):
        trimtab.load(f"{file}:Job")


@pytest.mark.parametrize("name", ["bridge:tiny", "hf"])
def test_without_transformers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job = trimtab.load(rewritten(tmp_path) if name == "hf" else name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFault, match=r"needs the package 'transformers'.*pip install"):
        job.model()


def test_naics_and_slm_need_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert count(on_meta(trimtab.load("slm:tiny"))) > 0
    assert count(on_meta(trimtab.load("naics:tiny"))) > 0


# ---------------------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_the_command_line_shapes_a_job(tmp_path: Path) -> None:
    on = ("--on", "H200", "--json")
    small = trimtab_cli("estimate", "slm:tiny", *on)
    wide = trimtab_cli("estimate", "slm:tiny", "--set", "width=256", "--set", "layers=4", *on)
    assert (small.returncode, wide.returncode) == (0, 0)
    assert json.loads(wide.stdout)["parts"]["weights"] > 8 * json.loads(small.stdout)["parts"]["weights"]
    name = written(tmp_path, *FAMILIES["LlamaForCausalLM"], "LlamaForCausalLM")
    adapted = trimtab_cli("estimate", name, "--lora", "8", "--seq", "32", *on)
    assert adapted.returncode == 0
    frozen, host = json.loads(adapted.stdout)["assumptions"]
    assert frozen == "frozen weights in bfloat16, as in config.json"
    assert "the device waits for the host" in host


@pytest.mark.parametrize(
    ("words", "code", "found"),
    [
        (("train.py:Job", "--lora", "8"), 2, "it shapes hf:FOLDER and bridge, and the job is train.py:Job"),
        (("slm", "--seq", "8"), 2, "it shapes hf:FOLDER"),
        (("slm", "--frozen"), 2, "it shapes hf:FOLDER"),
        (("slm", "--set", "layers"), 2, "it is not NAME=VALUE"),
        (("slm", "--set", "=3"), 2, "it is not NAME=VALUE"),
        (("slm", "--set", "layers=3", "--set", "layers=4"), 2, "layers is also 3"),
        (("hf:x", "--set", "seq=3", "--seq", "4"), 2, "--set seq is given too"),
        (("slm:tiny", "--set", "layer=3"), 2, "did you mean layers"),
        (("hf:/nowhere",), 2, "there is no such folder"),
        (("slm:tiny", "--set", "heads=3"), 4, "error"),
    ],
)
def test_the_command_line_refuses_what_cannot_be(words: tuple[str, ...], code: int, found: str) -> None:
    done = trimtab_cli("estimate", *words, "--on", "H200")
    assert done.returncode == code
    assert found in " ".join(done.stderr.split())


@pytest.mark.parametrize("verb", ["estimate", "profile"])
def test_help_names_every_form_of_a_job(verb: str) -> None:
    text = " ".join(trimtab_cli(verb, "--help").stdout.split())
    for form in ("FILE.py:NAME", "package.module:NAME", "slm", "bridge", "naics", "hf:FOLDER", "--set"):
        assert form in text


def test_the_file_that_a_job_is_written_in(tmp_path: Path) -> None:
    assert [find_job_file(name) for name in ("slm", "bridge:tiny", "no.such.module:Job")] == [None] * 3
    assert find_job_file("hf:models/bert") == Path.cwd() / "models" / "bert" / "config.json"
    assert find_job_file(f"{tmp_path}/a.b/job.py:Mine") == tmp_path / "a.b" / "job.py"
    assert find_job_file("trimtab.jobs.load:Job") == Path(load_module.__file__ or "")
