"""hf:FOLDER trained for real: its weights, its tokenizer, text, and what a folder may lack."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import default_collate

import trimtab
from test_cli import trimtab_cli
from test_jobs import DECODER, ENCODER, written
from trimtab.errors import EnvironmentFault, JobFailed, TrimtabError, WrongUse
from trimtab.jobs import pretrained
from trimtab.jobs.head import IGNORE_INDEX
from trimtab.jobs.huggingface import MASK_BYTE
from trimtab.jobs.text.blocks import TokenBlocks
from trimtab.jobs.text.model_tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from pathlib import Path

TEXT = argparse.__file__
NEOX = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
DISTIL = {"vocab_size": 300, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}

pytestmark = pytest.mark.usefixtures("one_thread")


def llama(folder: Path, architecture: str = "LlamaForCausalLM", **more: Any) -> str:
    return written(folder, "LlamaConfig", DECODER | more, architecture)


def saved(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Weights in the folder, as transformers writes them."""
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    model.save_pretrained(folder, **more)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def learned(job: Any, steps: int) -> list[float]:
    torch.manual_seed(0)
    model, samples = job.model(), job.dataset()
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for step in range(steps):
        batch = default_collate([samples[8 * step + index] for index in range(8)])
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", [{}, {"lora": 4}, {"frozen": True}], ids=["all", "lora", "frozen"])
@pytest.mark.parametrize(
    ("architecture", "kind", "shape"),
    [
        ("MistralForCausalLM", "MistralConfig", DECODER),
        ("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX),
        ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL),
    ],
)
def test_the_loss_of_a_toy_falls_on_text(
    tmp_path: Path, architecture: str, kind: str, shape: dict[str, Any], how: dict[str, Any]
) -> None:
    name = written(tmp_path, kind, shape, architecture)
    job = trimtab.load(name, seq=32, rate=1e-2, data=TEXT, **how)
    losses = learned(job, 20)
    assert all(map(math.isfinite, losses))
    assert losses[0] > 4.5
    # Adapters before a random head that is frozen cannot do much, nor can a head on random features.
    share = {"lora": 0.99, "frozen": 0.95}[next(iter(how))] if how else 0.85
    assert sum(losses[-4:]) / 4 < share * losses[0]


# ---------------------------------------------------------------------------------------------- weights


def test_the_weights_of_the_folder_are_loaded_to_train_and_not_to_plan(tmp_path: Path) -> None:
    name = llama(tmp_path)
    weights = saved(tmp_path)
    job = trimtab.load(name, seq=16, data=TEXT)
    built = job.model()
    for key, tensor in built.state_dict().items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=0)
    assert built.training
    assert f"weights: from the safetensors in {tmp_path}" in job.remarks
    adapted = trimtab.load(name, lora=4).model()
    inner = adapted.model.layers[0].self_attn.q_proj.inner.weight
    torch.testing.assert_close(inner, weights["model.layers.0.self_attn.q_proj.weight"], rtol=0, atol=0)
    assert not inner.requires_grad
    narrow = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert trimtab.load(name).model().lm_head.weight.dtype is torch.bfloat16
    finally:
        torch.set_default_dtype(narrow)
    fresh = trimtab.load(name, pretrained=False, seq=16, data=TEXT)
    assert not torch.equal(fresh.model().lm_head.weight, weights["lm_head.weight"])
    assert "weights: random, as chosen" in fresh.remarks
    # Planning does not open them: they may be elsewhere, or not whole yet.
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with torch.device("meta"):
        assert job.model().lm_head.weight.is_meta
    with pytest.raises(JobFailed, match=r"cannot build it.*--set pretrained=false"):
        job.model()


def test_a_head_that_the_folder_has_not_is_new_and_said(tmp_path: Path) -> None:
    llama(tmp_path)
    weights = saved(tmp_path)
    job = trimtab.load(llama(tmp_path, "LlamaForSequenceClassification", num_labels=3), seq=16, data=TEXT)
    built = job.model()
    torch.testing.assert_close(built.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert any("not in them, so random: score.weight" in remark for remark in job.remarks)


def test_a_missing_shard_and_weights_of_another_size_are_errors(tmp_path: Path) -> None:
    name = llama(tmp_path / "shards")
    saved(tmp_path / "shards", max_shard_size="40KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 1
    trimtab.load(name).model()
    shards[0].unlink()
    with pytest.raises(TrimtabError, match="cannot build it"):
        trimtab.load(name).model()
    name = llama(tmp_path / "other")
    saved(tmp_path / "other")
    llama(tmp_path / "other", hidden_size=64)
    with pytest.raises(TrimtabError, match="cannot build it"):
        trimtab.load(name).model()


def test_pickled_weights_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    job = trimtab.load(llama(tmp_path), seq=16, data=TEXT)
    job.model()
    assert any("pickled weights are not read" in remark for remark in job.remarks)
    assert pretrained.list_weight_files(tmp_path) == []


# ---------------------------------------------------------------------------------------------- tokenizers


def tokenizer(folder: Path, words: list[str], **files: str) -> None:
    """A tokenizer.json that knows these words and nothing else."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))  # noqa: S106
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.enable_truncation(max_length=4)
    folder.mkdir(exist_ok=True)
    found.save(str(folder / "tokenizer.json"))
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def prose(tmp_path: Path, text: str = "the cat sat on the mat\n") -> str:
    (tmp_path / "prose.txt").write_text(text * 60, encoding="utf-8")
    return str(tmp_path / "prose.txt")


def test_the_tokenizer_of_the_folder_is_used_and_its_end_stands_after_a_document(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer(folder, ["?", "the", "end", "cat", "on", "mat"])
    job = trimtab.load(llama(folder), seq=6, data=prose(tmp_path), samples="none")
    samples = job.dataset()
    assert isinstance(samples, TokenBlocks)
    assert samples[0]["input_ids"].tolist() == [1, 3, 0, 4, 1, 5]
    tokens = job._text()[0].array()  # noqa: SLF001
    # The config says that 2 ends a text.
    assert tokens[-1] == 2
    assert len(tokens) == 60 * 6 + 1
    assert any("the tokenizer in" in remark for remark in job.remarks)
    assert not any("has no tokenizer" in remark for remark in job.remarks)
    own = trimtab.load(llama(tmp_path / "bare"), seq=6, data=prose(tmp_path))
    assert any("has no tokenizer: a tokenizer is trained on the text" in remark for remark in own.remarks)


def test_a_tokenizer_in_parts_is_read_by_transformers(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', encoding="utf-8")
    job = trimtab.load(written(folder, "BertConfig", ENCODER, "BertForMaskedLM"), seq=6, data=prose(tmp_path))
    torch.manual_seed(0)
    found = job.dataset()[0]
    hidden = found["labels"] != IGNORE_INDEX
    assert hidden.any()
    assert (found["input_ids"][hidden] == 4).all()
    assert set(found["labels"][hidden].tolist()) <= {5, 6, 7, 8, 9}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"tokenizer_config.json": "{}"},
            "there is tokenizer_config.json, and none of tokenizer.json",
        ),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be read"),
        ({"vocab.json": "{"}, "vocab.json cannot be read"),
    ],
)
def test_a_tokenizer_without_its_files_is_an_error_with_a_way_out(
    tmp_path: Path, files: dict[str, str], found: str
) -> None:
    name = llama(tmp_path)
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=found) as caught:
        trimtab.load(name, seq=16, data=TEXT).dataset()
    assert "a tokenizer is then trained on the text" in caught.value.cure


def test_a_tokenizer_of_another_model_and_a_vocabulary_below_bytes_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer(folder, ["?", *(f"w{number}" for number in range(400)), "cat"])
    with pytest.raises(WrongUse, match=r"gives token 401, and config\.json has vocab_size 300"):
        trimtab.load(llama(folder), seq=6, data=prose(tmp_path)).dataset()
    small = trimtab.load(llama(tmp_path / "small", vocab_size=200), seq=6, data=prose(tmp_path))
    with pytest.raises(WrongUse, match="vocab_size 200, and text is made of 256"):
        small.dataset()


def test_without_the_tokenizers_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    tokenizer(tmp_path, ["?"])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentFault, match=r"needs the package 'tokenizers'.*pip install"):
        ModelTokenizer(tmp_path, ("tokenizer.json",), 9, None).load()


# ---------------------------------------------------------------------------------------------- samples


def test_what_is_hidden_changes_while_training_and_stays_while_evaluating(tmp_path: Path) -> None:
    job = trimtab.load(written(tmp_path, "BertConfig", ENCODER, "BertForMaskedLM"), seq=40, data=TEXT)
    samples, held = job.dataset(), job.validation()
    assert not torch.equal(samples[0]["labels"], samples[0]["labels"])
    torch.testing.assert_close(held[0], held[0])
    one = held[0]
    hidden = one["labels"] != IGNORE_INDEX
    assert (one["input_ids"][hidden] == MASK_BYTE).all()
    short = trimtab.load(written(tmp_path, "BertConfig", ENCODER, "BertForMaskedLM"), seq=2, data=TEXT)
    assert all((short.dataset()[number]["labels"] != IGNORE_INDEX).any() for number in range(30))


def test_a_classifier_learns_which_part_of_the_text_it_reads(tmp_path: Path) -> None:
    shape = ENCODER | {"num_labels": 3}
    name = written(tmp_path / "three", "BertConfig", shape, "BertForSequenceClassification")
    job = trimtab.load(name, seq=16, data=TEXT, samples="none")
    samples = job.dataset()
    labels = [int(samples[number]["labels"]) for number in range(len(samples))]
    assert labels == sorted(labels)
    assert set(labels) == {0, 1, 2}
    shape |= {"num_labels": 1}
    name = written(tmp_path / "one", "BertConfig", shape, "BertForSequenceClassification")
    one = trimtab.load(name, seq=16, data=TEXT)
    assert one.dataset()[0]["labels"].dtype is one.batch(1)["labels"].dtype


def test_bad_text_is_refused_as_for_slm(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no such file or folder"):
        trimtab.load(llama(tmp_path), data=str(tmp_path / "absent")).dataset()
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    with pytest.raises(WrongUse, match=r"has 6 tokens \(6 bytes\), and one block takes 64"):
        trimtab.load(llama(tmp_path), data=str(tmp_path / "short.txt")).dataset()


def test_experts_compute_in_the_dtype_of_autocast(tmp_path: Path) -> None:
    name = written(tmp_path, "MixtralConfig", DECODER | {"num_local_experts": 4}, "MixtralForCausalLM")
    job = trimtab.load(name, seq=16, data=TEXT)
    torch.manual_seed(0)
    model = job.model()
    batch = job.batch(2)
    wide = job.loss(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = job.loss(model, batch)
    narrow.backward()
    assert narrow.item() == pytest.approx(wide.item(), abs=0.05)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad is not None
    assert experts.gate_up_proj.grad.dtype is torch.float32


@pytest.mark.slow
def test_a_mixture_of_experts_is_estimated_in_bf16(tmp_path: Path) -> None:
    name = written(tmp_path, "MixtralConfig", DECODER | {"num_local_experts": 4}, "MixtralForCausalLM")
    assert trimtab.estimate(name, "H200", micro_batch=2).fits is True


def test_a_folder_trains_from_its_weights_with_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer(folder, ["?", "the", "end", "cat", "sat", "on", "mat"])
    llama(folder)
    saved(folder)
    out = tmp_path / "run"
    done = trimtab_cli(
        *("train", f"hf:{folder}", "--seq", "8", "--data", prose(tmp_path)),
        *("--set", "rate=0.01", "--set", "global_batch=8", "--steps", "15", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["validation_loss"] < lines[0]["loss"]
    assert f"weights: from the safetensors in {folder}" in done.stderr
    assert f"the tokenizer in {folder}" in done.stderr
