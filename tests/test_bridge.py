"""The job bridge: its losses beside the plain way to them, its options, folders, texts and bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from bench.bridge import plain_losses
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

import trimtab
from trimtab.errors import WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.bridge.data import load_passages, make_hash_tokenizer
from trimtab.jobs.head import TeacherTargets, weighted_token_loss
from trimtab.spec import Mesh, Setting, Strategy
from worlds import everywhere

if TYPE_CHECKING:
    from collections.abc import Callable

library: Any = transformers
"""Without its types, which are few."""
UNKNOWN = "<unk>"
EVERYTHING: dict[str, Any] = {"first_weight": 0.5, "ahead": 4, "teacher": True}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact(job: Any) -> Any:
    """The model in float64 throughout: transformers' norms go through float32 whatever they are given."""
    torch.manual_seed(0)
    model = job.model()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(child.weight.numel(), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    model = model.double()
    for one in learning(model).values():
        # What starts at zero would hide the gradients of what is behind it.
        nn.init.normal_(one, std=0.2)
    return model


def learning(model: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model: Any, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    # Unequal weights, so that a term that takes another's place is seen.
    total: Any = sum((number + 1) * loss for number, loss in enumerate(losses.values()))
    total.backward()
    return {name: one.grad.clone() for name, one in learning(model).items() if one.grad is not None}


def furthest(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert some.keys() == others.keys()
    return max(float((text - others[name]).norm() / text.norm()) for name, text in some.items())


# ---------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**EVERYTHING, "refiner": 1},
        {"forced_weight": 0.0, "ahead": 3, "ahead_weight": 0.0, "teacher": True, "temperature": 3.0},
        {**EVERYTHING, "ahead": 12},
    ],
)
def test_one_pass_has_the_losses_and_gradients_of_one_pass_a_token(options: dict[str, Any]) -> None:
    job = trimtab.load("bridge:tiny", **options)
    model = exact(job)
    batch = job.batch(5)
    batch["answers"]["qwen"]["length"][0] = 2
    ours, plain = job.losses(model, batch), plain_losses(model, batch)
    for name, our in ours.items():
        assert our.item() == pytest.approx(plain[name].item(), rel=1e-12)
    assert furthest(gradients(model, ours), gradients(model, plain)) < 1e-10


@pytest.mark.parametrize("options", [{}, {**EVERYTHING, "lora": 2, "deep_prefix": True, "refiner": 1}])
def test_one_model_at_a_time_is_exact(options: dict[str, Any]) -> None:
    job = trimtab.load("bridge:tiny", **options)
    model, batch = exact(job), job.batch(3)
    together = job.losses(model, batch)
    found = gradients(model, together)
    assert found.keys() == learning(model).keys()
    job.sequential = True
    apart = job.losses(model, batch)
    assert {name: one.item() for name, one in apart.items()} == {n: one.item() for n, one in together.items()}
    assert furthest(found, gradients(model, apart)) < 1e-12
    with torch.no_grad():
        assert job.loss(model, batch).item() == pytest.approx(sum(one.item() for one in apart.values()))


@pytest.mark.parametrize(
    ("bf16", "gpu", "dtype"),
    [
        (False, False, torch.float32),
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
    ],
)
def test_frozen_models_have_a_dtype_that_the_device_has(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, gpu: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(synthetic, "has_bf16", lambda: bf16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    job = trimtab.load("bridge:tiny")
    assert {parameter.dtype for parameter in job.model().parameters() if not parameter.requires_grad} == {
        dtype
    }
    changed = dtype is not torch.bfloat16
    assert ["no bf16 matrix products" in remark and "fp32" in remark for remark in job.remarks] == [
        True
    ] * changed
    # What would need a GPU is planned as the GPU has it.
    with torch.device("meta"):
        planned = job.model()
    assert {parameter.dtype for parameter in planned.parameters() if not parameter.requires_grad} == {
        torch.bfloat16
    }


def test_one_model_at_a_time_keeps_nothing_of_the_first_model() -> None:
    # What is held when the second model comes to its last layer, with and without the first one's share.
    assert numbers_held(sequential=True) < 0.75 * numbers_held(sequential=False)


def numbers_held(*, sequential: bool) -> int:
    """How many numbers autograd has kept for backward when the last layer of the second model has run."""
    job = trimtab.load("bridge:tiny", answer=64, sequential=sequential)
    torch.manual_seed(0)
    model, batch = job.model(), job.batch(4)
    alive: list[torch.Tensor] = []
    seen = []

    def pack(tensor: torch.Tensor) -> Any:
        alive.append(tensor)
        return Held(tensor, alive)

    layers = model.qwen.model.layers
    layers[-1].register_forward_hook(lambda *_: seen.append(sum(tensor.numel() for tensor in alive)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        job.loss(model, batch).backward()
    return seen[0]


class Held:
    """A saved tensor that says when it is let go."""

    def __init__(self, tensor: torch.Tensor, alive: list[torch.Tensor]) -> None:
        self.tensor = tensor
        self.alive = alive

    def __del__(self) -> None:
        self.alive[:] = [one for one in self.alive if one is not self.tensor]


def test_sequential_refuses_what_it_would_get_wrong() -> None:
    job = trimtab.load("bridge:tiny", sequential=True)
    model, batch = job.model(), job.batch(2)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(WrongUse, match=r"fp16.*bf16"):
        job.loss(model, batch)


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize("autocast", [False, True])
def test_weighted_losses_with_a_lesson_are_those_of_torch(pieces: int, *, autocast: bool) -> None:
    torch.manual_seed(0)
    kind = torch.float32 if autocast else torch.float64
    hidden, weight, taught = (torch.randn(*shape, dtype=kind) for shape in ((3, 5, 8), (40, 8), (3, 5, 8)))
    targets = torch.randint(40, (3, 5))
    shares, taught_shares = torch.rand(3, 5, dtype=kind), torch.rand(3, 5, dtype=kind)
    shares[0, 2:] = 0
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = weighted_token_loss(
            hidden, weight, targets, shares, pieces=pieces, teacher=TeacherTargets(taught, taught_shares, 2.0)
        )
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    logits = (hidden @ weight.t()).flatten(0, 1)
    each = functional.cross_entropy(logits, targets.flatten(), reduction="none")
    right = functional.log_softmax((taught @ weight.detach().t()).flatten(0, 1) / 2, dim=-1)
    far = functional.kl_div(functional.log_softmax(logits / 2, -1), right, reduction="none", log_target=True)
    total = (each * shares.flatten()).sum() + 4 * (far.sum(-1) * taught_shares.flatten()).sum()
    wanted = torch.autograd.grad(3 * total, (hidden, weight))
    most = 0.02 if autocast else 1e-12
    assert loss.item() == pytest.approx(total.item(), rel=most)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < most


def test_a_loss_of_which_nothing_counts_is_nothing() -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    loss = weighted_token_loss(
        hidden, torch.randn(9, 4), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3), pieces=2
    )
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.filterwarnings("ignore")  # torch's own, from inside dynamo
def test_equal_layers_compile_once_and_nothing_breaks_the_graph() -> None:
    job = trimtab.load("bridge:tiny", llama_layers=5, qwen_layers=4, **EVERYTHING)
    torch.manual_seed(0)
    model, batch = job.model(), job.batch(2)
    plain = job.loss(model, batch).item()
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    for name in job.branches:
        for layer in getattr(model, name).get_decoder().layers:
            layer.compile(backend=counter, dynamic=False, fullgraph=True)
    assert job.loss(model, batch).item() == pytest.approx(plain, rel=1e-3)
    # For each model once with gradients, and once as the teacher.
    assert counter.frame_count == 4
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("options", [{}, {**EVERYTHING, "lora": 2, "deep_prefix": True, "refiner": 1}])
def test_the_whole_job_is_one_graph(options: dict[str, Any]) -> None:
    job = trimtab.load("bridge:tiny", **options)
    model, batch = job.model(), job.batch(2)
    plain = job.loss(model, batch).item()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    loss = job.loss(compiled, batch)
    loss.backward()
    assert loss.item() == pytest.approx(plain, rel=1e-3)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # as above
def test_layers_compiled_by_themselves_have_the_gradients_of_plain_ones() -> None:
    from torch._dynamo.utils import counters

    found = []
    for compiled in (False, True):
        job = trimtab.load("bridge:tiny", compile_layers=compiled, **EVERYTHING)
        torch.manual_seed(0)
        model, batch = job.model(), job.batch(2)
        counters.clear()
        job.losses(model, batch)["llama"].backward()
        found.append(model.encoder.bytes.weight.grad)
        # A program of each model with gradients, and one as the teacher.
        assert counters["stats"]["unique_graphs"] == (4 if compiled else 0)
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.05
    torch.compiler.reset()


@pytest.mark.slow
def test_an_estimate_sees_that_one_model_at_a_time_takes_less() -> None:
    wide = {"answer": 200, "llama_layers": 4, "qwen_layers": 4}
    found = [
        trimtab.estimate("bridge:tiny", "H200", micro_batch=64, options={**wide, "sequential": sequential})
        for sequential in (False, True)
    ]
    assert found[1].parts.activations < 0.8 * found[0].parts.activations


# --------------------------------------------------------------------------------------------------- options


def count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def test_what_can_be_added_has_the_parameters_on_record() -> None:
    job = trimtab.load("bridge", lora=8, deep_prefix=True)
    with torch.device("meta"):
        model = job.model()
    adapters = {
        name: parameter for name, parameter in model.llama.named_parameters() if parameter.requires_grad
    }
    assert count(adapters.values()) == 20_971_520
    assert count(adapter for name, adapter in adapters.items() if ".self_attn." in name) == 6_815_744
    assert len(adapters) == 32 * 7 * 2
    assert {name: count(one.parameters()) for name, one in model.deep.items()} == {
        "llama": 285_212_672,
        "qwen": 115_605_504,
    }
    added = count(learning(model).values()) - 16_089_090
    assert added == 20_971_520 + 20_185_088 + 285_212_672 + 115_605_504
    # Frozen weights have no gradients, and nothing that learns is kept in bf16.
    assert {one.dtype for one in learning(model).values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {
        torch.bfloat16
    }


def test_attention_alone_can_have_adapters() -> None:
    model = trimtab.load("bridge:tiny", lora=2, lora_on="attention").model()
    named = {name.split(".")[-3] for name in learning(model) if name.startswith(("llama.", "qwen."))}
    assert named == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_teacher_is_the_model_without_adapters() -> None:
    job = trimtab.load("bridge:tiny", lora=2, forced_weight=0.0, ahead_weight=0.0, ahead=4, teacher=True)
    torch.manual_seed(0)
    model, batch = job.model(), job.batch(2)
    for name, one in learning(model).items():
        if name.endswith("up.weight"):
            nn.init.normal_(one, std=0.5)
    before = job.loss(model, batch).item()
    words = model.llama.get_input_embeddings()
    ask = model._teacher_hidden  # noqa: SLF001 - what it says shows in no other way
    taught = ask(model.llama, words, batch["answers"]["llama"])
    for name, one in learning(model).items():
        if name.endswith("up.weight"):
            nn.init.zeros_(one)
    assert torch.equal(taught, ask(model.llama, words, batch["answers"]["llama"]))
    assert job.loss(model, batch).item() != pytest.approx(before, rel=1e-3)


def test_a_deep_prefix_reaches_every_layer_and_no_token_looks_ahead() -> None:
    job = trimtab.load("bridge:tiny", deep_prefix=True)
    model, batch = exact(job), job.batch(2)
    found = gradients(model, job.losses(model, batch))
    made = found["deep.qwen.spread.weight"].view(job.qwen_layers, 2, -1)
    assert (made.norm(dim=-1) > 0).all()
    # The last token of an answer changes nothing but its own loss.
    answer = batch["answers"]["llama"]
    answer["length"][:] = job.answer - 1
    before = job.losses(model, batch)["llama"].item()
    answer["ids"][:, -1] = 0
    assert job.losses(model, batch)["llama"].item() == before


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"ahead": 13}, r"ahead=13: an answer has 12 tokens"),
        ({"ahead": -1}, r"ahead=-1: it is below 0"),
        ({"forced_weight": -0.5}, r"forced_weight=-0.5: it is below 0"),
        ({"teacher_weight": -1.0}, "it is below 0"),
        ({"lora": -8}, "it is below 0"),
        ({"refiner": -1}, "it is below 0"),
        ({"lora_on": "mlp"}, "Give all or attention"),
        ({"teacher": True}, "ahead is 0"),
        ({"ahead": 2, "temperature": 0.0}, "it is not above 0"),
        ({"forced_weight": 0.0}, "all of them are 0"),
        ({"forced_weight": 0.0, "ahead": 2, "ahead_weight": 0.0}, "all of them are 0"),
        ({"llama_folder": "/no/such/folder"}, r"--llama /no/such/folder: there is no such folder"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_built(
    options: dict[str, Any], found: str
) -> None:
    job = trimtab.load("bridge:tiny", **options)
    for ask in (job.model, job.dataset, lambda: job.batch(2)):
        with pytest.raises(WrongUse) as error:
            ask()
        assert re.search(found, str(error.value))


# ------------------------------------------------------------------------------------------------------ text


def test_samples_are_passages_with_their_topic() -> None:
    job = trimtab.load("bridge", ahead=4, teacher=True, samples=20_000)
    data = job.dataset()
    texts = load_passages()
    assert len(texts) > 1000
    assert sorted(texts) != list(texts)
    say = make_hash_tokenizer(job.vocab_of("qwen"))
    sample = data[3]
    length = int(sample["source_length"])
    assert bytes(sample["source"][:length].tolist()) == texts[3].text.encode()[: job.source]
    answer = sample["answers"]["qwen"]
    wanted = say(f"{texts[3].topic}: {texts[3].text}")[: job.answer]
    assert answer["ids"][: int(answer["length"])].tolist() == wanted
    assert not answer["ids"][int(answer["length"]) :].any()
    # The teacher's text ends with the passage.
    last = say(texts[3].text.encode()[: job.source].decode(errors="ignore"))
    assert answer["prompt"].tolist()[-len(last) :] == last[-job.prompt :]
    # Used again, a passage begins later.
    again = data[3 + len(texts)]["source"]
    assert not torch.equal(again, sample["source"])
    assert default_collate([data[0], data[len(data) - 1]])["answers"]["llama"]["ids"].shape == (2, 224)


def test_tokens_are_within_the_vocabulary_and_depend_on_the_text_alone() -> None:
    for vocab in (256, 4095, 4096, 151_936):
        found = make_hash_tokenizer(vocab)("Words, words: naïve words.")
        assert max(found) < vocab
        assert found == make_hash_tokenizer(vocab)("Words, words: naïve words.")
    assert len(make_hash_tokenizer(300)("abc d")) == 5
    assert len(make_hash_tokenizer(30_000)("abc d")) == 2


# --------------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small models as they are downloaded: a config, weights in two files, a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("models")
    shared = {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 600,
    }  # fmt: skip
    kinds = {"llama": library.LlamaConfig, "qwen": library.Qwen2Config}
    for name, kind in kinds.items():
        config = kind(**shared, tie_word_embeddings=name == "qwen", initializer_range=0.1)
        library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            place / name, max_shard_size="60KB"
        )
        words = {UNKNOWN: 0} | {chr(number): number for number in range(33, 127)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        fast = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN)
        fast.save_pretrained(place / name)
    return {name: place / name for name in kinds}


def from_folders(folders: dict[str, Path], **options: Any) -> Any:
    return trimtab.load(
        "bridge:tiny", llama_folder=str(folders["llama"]), qwen_folder=str(folders["qwen"]), **options
    )


def mapped_files(tensor: torch.Tensor) -> list[str]:
    """The file whose mapping in this process holds a tensor, by what the kernel says."""
    address = tensor.data_ptr()
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        start, stop = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= address < stop and "/" in line:
            found.append(line[line.index("/") :])
    return found


def test_weights_of_a_folder_lie_in_its_mapped_files(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(list(folders["llama"].glob("*.safetensors"))) > 1
    job = from_folders(folders)
    model = job.model()
    assert "random weights" not in capsys.readouterr().err
    for name, folder in folders.items():
        decoder: Any = getattr(model, name)
        whole = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        ours, theirs = decoder.state_dict(), whole.state_dict()
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key])
            assert any(str(folder) in file for file in mapped_files(value)), key
        ids = torch.randint(600, (2, 7))
        assert torch.equal(decoder(ids).logits, whole(ids).logits)
        size = whole.get_input_embeddings().weight.float().square().mean().sqrt().item()
        assert model.adapters[name].scale.item() == pytest.approx(size, rel=1e-5)
    batch = default_collate([job.dataset()[number] for number in range(2)])
    job.loss(model, batch).backward()
    assert all(parameter.grad is None for parameter in model.llama.parameters())
    assert model.encoder.bytes.weight.grad.abs().sum() > 0


def test_the_tokenizer_of_a_folder_makes_the_answers(folders: dict[str, Path]) -> None:
    sample = from_folders(folders).dataset()[0]
    topic = load_passages()[0].topic
    assert sample["answers"]["llama"]["ids"][: len(topic)].tolist() == [ord(one) for one in topic][:12]


def test_planning_reads_the_config_of_a_folder_and_no_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    bare = {}
    for name, folder in folders.items():
        bare[name] = tmp_path / name
        bare[name].mkdir()
        shutil.copy(folder / "config.json", bare[name])
    job = from_folders(bare)
    with torch.device("meta"):
        assert job.model().llama.config.hidden_size == 32
    assert job.batch(2)["answers"]["qwen"]["ids"].max() < 600
    assert any("random weights for llama" in assumption for assumption in job.assumptions)
    assert job.model().adapters["llama"].scale.item() == pytest.approx(0.1)


def test_random_weights_are_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trimtab.load("bridge:tiny")
    job.model()
    assert capsys.readouterr().err == (
        "bridge:tiny: random weights for llama and qwen; --llama FOLDER and --qwen FOLDER would load some\n"
    )
    monkeypatch.setenv("RANK", "1")
    job.model()
    with torch.device("meta"):
        job.model()
    assert not capsys.readouterr().err


def damaged(folder: Path, into: Path, how: str) -> Path:
    """A copy of a folder with something wrong."""
    place = into / "damaged"
    shutil.copytree(folder, place)
    files = sorted(place.glob("*.safetensors"))
    index, tokens = place / "model.safetensors.index.json", place / "tokenizer.json"
    config = json.loads((place / "config.json").read_text())
    other = {
        "another shape": config | {"intermediate_size": 48},
        "more layers": config | {"num_hidden_layers": 3},
        "unknown": config | {"model_type": "lama"},
        "no decoder": library.BertConfig(hidden_size=32).to_dict(),
    }
    (place / "config.json").write_text(json.dumps(other.get(how, config)))
    pickled = (*files, index) if how == "pickled" else ()
    for file in pickled:
        file.rename(place / "pytorch_model.bin")
    spoil: dict[str, Callable[[], Any]] = {
        "no tokenizer": tokens.unlink,
        "bad tokenizer": lambda: tokens.write_text("{}"),
        "a file is missing": files[-1].unlink,
        "a file is cut": lambda: files[0].write_bytes(files[0].read_bytes()[:100]),
        "bad index": lambda: index.write_text("[]"),
    }
    spoil.get(how, lambda: None)()
    return place


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("no tokenizer", "no tokenizer.json"),
        ("bad tokenizer", "its tokenizer cannot be read"),
        ("a file is missing", "files of weights are missing"),
        ("a file is cut", "cannot be read"),
        ("another shape", "has the shape"),
        ("more layers", "the files have no model.layers.2."),
        ("no decoder", "is not a causal decoder"),
        ("pickled", "runs whatever code"),
        ("bad index", "cannot be read"),
        ("unknown", "no model_type 'lama'"),
    ],
)
def test_a_folder_that_is_not_whole_says_what_is_wrong(
    folders: dict[str, Path], tmp_path: Path, how: str, found: str
) -> None:
    place = damaged(folders["llama"], tmp_path, how)
    job = from_folders({**folders, "llama": place})
    ask = job.dataset if "tokenizer" in how else job.model
    with pytest.raises(WrongUse) as error:
        ask()
    assert f"--llama {place}" in str(error.value)
    assert found in str(error.value)


# ----------------------------------------------------------------------------------------- several processes


def two_ranks(llama: str, qwen: str) -> dict[str, Any]:
    """Three steps under ddp with LoRA and weights from folders, one model at a time."""
    from torch.distributed.fsdp import fully_shard

    folder = {"llama": Path(llama), "qwen": Path(qwen)}
    job = from_folders(folder, lora=2, sequential=True, global_batch=4)
    plan = Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=2), micro_batch=2, accumulation=1, global_batch=4
    )
    data = job.dataset()
    with trimtab.Run(plan, job=job, join_s=60) as run:
        model, optimizer = run.prepare()
        rank = run.groups.data_rank
        first = {name: one.detach().clone() for name, one in learning(model).items()}
        for step in range(3):
            items = [data[4 * step + 2 * rank + number] for number in range(2)]
            run.step(default_collate(items))
        sharded: Any = fully_shard(job.model())
        with pytest.raises(WrongUse, match=r"sharded over ranks.*ddp or branch"):
            job.loss(sharded, default_collate([data[0]]))
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return {
            "state": {name: one.detach().clone() for name, one in learning(model).items()},
            "moved": [name for name, one in learning(model).items() if not torch.equal(one, first[name])],
            "only": trained == {id(one) for one in learning(model).values()},
            "mapped": mapped_files(model.llama.get_input_embeddings().weight),
            "grads": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        }


@pytest.mark.slow
def test_two_processes_keep_lora_alike_and_share_the_frozen_weights(folders: dict[str, Path]) -> None:
    found = everywhere(2, two_ranks, str(folders["llama"]), str(folders["qwen"]))
    one, other = found
    assert one["state"].keys() == other["state"].keys()
    for name, value in one["state"].items():
        assert torch.equal(value, other["state"][name]), name
    lora = [name for name in one["state"] if name.endswith(("up.weight", "down.weight"))]
    assert len(lora) == 2 * 2 * 7 * 2
    assert set(lora) <= set(one["moved"])
    assert one["only"]
    # No frozen weight has a gradient, and both processes have them from the same file.
    assert set(one["grads"]) <= set(one["state"])
    assert one["mapped"] == other["mapped"] != []
