"""Callbacks for other frameworks: predictions, logs, run folders, and recovery from out-of-memory errors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import framework_runs as runs
import trimtab.integrations
import worlds
from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import CannotFollow, NothingFits, WrongUse
from trimtab.integrations import prediction
from trimtab.integrations.batches import count_samples, find_split_rule, split_rows
from trimtab.integrations.live_model import LiveParts, is_importable_script, write_live_job
from trimtab.integrations.monitor import RunMonitor
from trimtab.integrations.prediction import check_given_plan, make_measured_plan, predict_or_measure
from trimtab.integrations.run_facts import RunFacts
from trimtab.integrations.transformers import TrimtabCallback
from trimtab.jobs.load import load_job
from trimtab.trace.server import WorkerProcess
from trimtab.training.run_folder import read_run
from trimtab.units import GIB

EXACT = 1e-6


def differ(run: dict[str, Any], plain: dict[str, Any]) -> float:
    """The largest difference between two loss curves."""
    assert len(run["losses"]) == len(plain["losses"]) > 1
    return max(abs(mine - its) for mine, its in zip(run["losses"], plain["losses"], strict=True))


def check_runs(answers: list[dict[str, Any]], folder: Path, *, failing: dict[str, str]) -> None:
    """Every run learns what the plain one learns, and its folder says what happened."""
    for answer in answers:
        for name, run in answer.items():
            plain = answer["plain mean" if "mean" in name else "plain"]
            assert differ(run, plain) <= EXACT, name
            for mine, its in zip(run["weights"], plain["weights"], strict=True):
                torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)
    for name, words in failing.items():
        record = read_run(folder / name)
        assert record.events, name
        assert all(event.kind == "out-of-memory" for event in record.events), name
        assert any(words in event.why for event in record.events), [event.why for event in record.events]
        assert all("the global batch stays" in event.done for event in record.events)
        assert record.notes == ()
        assert record.lines[-1].micro_batch is not None
        assert {line.samples for line in record.lines} == {record.lines[0].samples}


@pytest.mark.slow
def test_the_trainer_of_transformers_learns_the_same_whatever_fails(tmp_path: Path, one_thread: None) -> None:
    del one_thread
    answer = runs.all_transformers_runs(str(tmp_path))
    check_runs(
        [answer], tmp_path, failing={"forward": "4 samples", "backward": "backward", "mean": "2 samples"}
    )
    assert not read_run(tmp_path / "watched").events
    lines = read_run(tmp_path / "watched").lines
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert [line.loss for line in lines] == pytest.approx(answer["plain"]["losses"], abs=1e-3)
    assert answer["watched"]["logs"][0]["trimtab/step_s"] > 0
    attempt = read_run(tmp_path / "watched").attempt
    assert attempt is not None
    assert (attempt.state, attempt.steps) == ("ended", 4)
    assert "samples a step: micro-batch 4 x 2" in (tmp_path / "watched" / "summary.txt").read_text()


def two_frameworks(folder: str) -> dict[str, Any]:
    """Run a rank of all trainings, to start processes only once."""
    return {
        "transformers": runs.all_transformers_runs(f"{folder}/transformers"),
        "accelerate": runs.all_accelerate_runs(f"{folder}/accelerate"),
    }


@pytest.mark.slow
def test_two_ranks_agree_when_only_one_of_them_runs_out_of_memory(tmp_path: Path) -> None:
    for name in ("transformers", "accelerate"):
        (tmp_path / name).mkdir()
    answers = worlds.everywhere(2, two_frameworks, str(tmp_path))
    for name in ("transformers", "accelerate"):
        check_runs(
            [answer[name] for answer in answers],
            tmp_path / name,
            failing={"forward": "rank 1", "backward": "rank"},
        )
        first, second = (answer[name]["forward"]["weights"] for answer in answers)
        assert all(torch.equal(mine, its) for mine, its in zip(first, second, strict=True))


def end_together(folder: str) -> str:
    """Run a rank of a training in which a single sample does not fit on rank 0."""
    try:
        runs.train_accelerate(Path(folder), model=runs.TextModel(runs.Limit(0.5, rank=0)))  # type: ignore[arg-type]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return type(error).__name__
    return "done"


def test_all_ranks_end_if_a_rank_cannot_go_on(tmp_path: Path) -> None:
    assert worlds.everywhere(2, end_together, str(tmp_path)) == ["OutOfMemoryError", "RecoveryFailedError"]
    assert "a single sample does not fit" in read_run(tmp_path).events[-2].done


@pytest.mark.slow
def test_a_loop_of_accelerate_learns_the_same_whatever_fails(tmp_path: Path, one_thread: None) -> None:
    del one_thread
    answer = runs.all_accelerate_runs(str(tmp_path))
    check_runs([answer], tmp_path, failing={"forward": "4 samples", "backward": "2 samples"})
    assert answer["watched"]["figures"]["trimtab/samples_per_s"] > 0


@pytest.mark.slow
def test_lightning_learns_the_same_whatever_fails(tmp_path: Path, one_thread: None) -> None:
    del one_thread
    pytest.importorskip("lightning")
    import lightning_runs
    from trimtab.integrations.lightning import LightningCallback

    answer = lightning_runs.all_lightning_runs(str(tmp_path))
    check_runs([answer], tmp_path, failing={"forward": "4 samples", "backward": "2 samples"})
    assert answer["watched"]["logged"]["trimtab/step_s"] > 0
    manual = lightning_runs.ManualModule(runs.Limit(2))
    with pytest.raises(torch.OutOfMemoryError):
        lightning_runs.train_lightning(
            module=manual, callback=LightningCallback(out=tmp_path / "manual"), accumulation=1
        )
    assert "the run ends" in read_run(tmp_path / "manual").events[0].done


@pytest.mark.slow
def test_lightning_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    import lightning_runs

    answers = worlds.everywhere(2, lightning_runs.all_lightning_runs, str(tmp_path))
    check_runs(answers, tmp_path, failing={"forward": "rank 1", "backward": "rank"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (runs.TextModel(runs.Limit(2)), runs.contrastive_loss, "compares samples with each other"),
        (runs.TextModel(runs.Limit(2), norm=True), runs.mean_loss, "BatchNorm"),
    ],
    ids=["contrastive", "batch norm"],
)
def test_a_batch_that_cannot_be_split_exactly_ends_the_run(
    tmp_path: Path, model: Any, loss: Any, words: str
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        runs.train_accelerate(tmp_path, model=model, loss=loss)
    event = read_run(tmp_path).events[0]
    assert event.done.startswith("the run ends")
    assert words in event.done


def test_no_recovery_if_it_is_turned_off(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        runs.train_transformers(
            tmp_path, limit=runs.Limit(2), callback=TrimtabCallback(out=tmp_path / "run", recover=False)
        )
    assert read_run(tmp_path / "run").events[0].kind == "out-of-memory"


def test_the_loss_decides_how_a_batch_is_split() -> None:
    torch.manual_seed(0)
    model = runs.TextModel().double()
    batch = torch.utils.data.default_collate(runs.text_samples(6))
    rule, _ = find_split_rule(model, lambda part: runs.mean_loss(model, part), batch)
    assert rule is not None
    assert rule.name == "a mean over labelled tokens"
    parts = split_rows(batch, 4)
    assert [count_samples(part) for part in parts] == [4, 2]
    with torch.no_grad():
        whole = float(runs.mean_loss(model, batch))
        losses = [float(runs.mean_loss(model, part)) for part in parts]
    pairs = zip(rule.shares(parts), losses, strict=True)
    assert sum(share * loss for share, loss in pairs) == pytest.approx(whole)
    rule, _ = find_split_rule(model, lambda part: runs.mean_loss(model, part) * runs_labels(part), batch)
    assert rule is not None
    assert rule.name == "a sum"
    odd = batch | {"extra": torch.zeros(3, 2)}
    assert "3 rows" in find_split_rule(model, lambda _: None, odd)[1]


def runs_labels(batch: Any) -> float:
    """Return how many labels count."""
    return float((batch["labels"] != -100).sum())


def live_gpt2(folder: Path, *, micro_batch: int = 4, **options: Any) -> str:
    """Write a live job of a small model and return its name."""
    batch = {name: torch.zeros(micro_batch, runs.SEQ, dtype=torch.long) for name in ("input_ids", "labels")}
    parts = LiveParts(runs.make_gpt2(runs.Limit()), batch, micro_batch, **options)
    return write_live_job(folder, parts, global_batch=16, samples=64)[0]


def test_a_live_model_is_rebuilt_without_its_weights(tmp_path: Path) -> None:
    name = live_gpt2(tmp_path, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    job = load_job(name)
    with torch.device("meta"):
        model, batch = job.model(), job.batch(3)
        loss = job.loss(model, batch)
    assert loss.shape == ()
    assert batch["input_ids"].shape == (3, runs.SEQ)
    assert isinstance(job.optimizer(model.parameters()), torch.optim.SGD)
    same = runs.make_gpt2(runs.Limit())
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in same.state_dict().items()
    }
    # Tied weights stay tied.
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (tmp_path / "job" / "model.modules").stat().st_size < 50_000


OPTIMIZERS = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls not in (torch.optim.Optimizer, torch.optim.SparseAdam)
]


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_a_live_optimizer_is_built_again_from_its_defaults(tmp_path: Path, cls: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    live = cls(model.parameters(), lr=0.25)
    parts = LiveParts(model, torch.zeros(4, 2), 4, optimizer=(cls, dict(live.defaults)))
    built = load_job(write_live_job(tmp_path, parts, global_batch=4)[0]).optimizer(model.parameters())
    assert type(built) is cls
    assert built.defaults == live.defaults


def test_the_same_model_is_the_same_job_in_another_process(tmp_path: Path) -> None:
    def write(names: set[int], stamp: int, *, is_trained: bool = True) -> str:
        model: Any = nn.Linear(2, 2)
        model.names, model.stamp = names, stamp
        model.requires_grad_(is_trained)
        write_live_job(tmp_path, LiveParts(model, torch.zeros(4, 2), 4), global_batch=16)
        return (tmp_path / "job" / "model.py").read_text(encoding="utf-8")

    # Sets are pickled in any order, and hashes of strings differ between processes.
    first, other = {0, 8}, {8, 0}
    assert list(first) != list(other)
    assert write(first, hash("a") | 1 << 60) == write(other, hash("b") | 1 << 60)
    assert write(first, 1) != write(first, 2)
    assert write(first, 1) != write(first, 1, is_trained=False)


def test_what_cannot_be_rebuilt_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.extra = lambda: 1  # type: ignore[assignment]
    with pytest.raises(CannotFollow, match="cannot be rebuilt in another process"):
        write_live_job(tmp_path, LiveParts(model, torch.zeros(2, 2), 2), global_batch=2)
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    _, notes = write_live_job(tmp_path, LiveParts(hooked, torch.zeros(2, 2), 2), global_batch=2)
    assert notes == ["a hook on Linear is left out of the prediction"]
    assert is_importable_script('"""Doc."""\nclass A: pass\nif __name__ == "__main__":\n    train()\n')
    assert not is_importable_script("model = Model()\nmodel.fit()\n")


def predict_large(folder: Path, **options: Any) -> Any:
    """Predict a model whose micro-batch of 64 needs more than 30 % of an RTX 4090."""
    batch = {name: torch.zeros(64, 512, dtype=torch.long) for name in ("input_ids", "labels")}
    model = nn.Sequential(nn.Embedding(20_000, 32), nn.Linear(32, 20_000))
    parts = LiveParts(model, batch, 64, loss=runs.token_loss)
    facts = options.pop("facts", LARGE)
    asked = {"plan": None, "on": "RTX4090", "adapt": "if-needed", "memory": 0.3} | options
    return predict_or_measure(
        lambda: write_live_job(folder, parts, global_batch=64), facts, name="Sequential", **asked
    )


LARGE = RunFacts(micro_batch=64, accumulation=1, precision="bf16")


@pytest.mark.slow
def test_a_micro_batch_that_fits_takes_one_trace(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del own_cache
    traced: list[int] = []
    plain = WorkerProcess.ask_all

    def ask_all(worker: WorkerProcess, requests: Any, **options: Any) -> Any:
        traced.extend(setting.micro_batch for setting in requests.settings)
        return plain(worker, requests, **options)

    monkeypatch.setattr(WorkerProcess, "ask_all", ask_all)
    found = predict_large(tmp_path, memory=0.9)
    assert (found.plan.choice.micro_batch, found.notes, traced) == (64, (), [64])
    # The same run again needs no trace.
    assert predict_large(tmp_path, memory=0.9).plan == found.plan
    # A size that does not fit takes one more; the sizes between are derived, and the global batch stays.
    changed = predict_large(tmp_path, memory=0.3)
    assert traced == [64, 8]
    choice = changed.plan.choice
    assert choice.micro_batch < 64
    assert choice.micro_batch * choice.accumulation == choice.global_batch == 64
    assert "the global batch of 64 stays: up to" in changed.notes[0]
    assert {look.setting.micro_batch for look in changed.plan.looked_at} == {8, 32, 64}
    assert [look.fits for look in changed.plan.looked_at if look.setting == choice] == [True]
    assert changed.plan.places[0].name == "GeForce RTX 4090"
    # The plan can be given to the callback later; another training is refused.
    assert check_given_plan(changed.plan, LARGE).micro_batch == choice.micro_batch
    with pytest.raises(WrongUse, match="global_batch 64, not 128"):
        check_given_plan(changed.plan, LARGE._replace(accumulation=2))
    fastest = predict_large(tmp_path, adapt="fastest", memory=0.9).plan
    assert fastest.choice.global_batch == 64
    assert fastest.estimate.step_s <= found.plan.estimate.step_s
    assert traced == [64, 8]
    with pytest.raises(NothingFits, match="no smaller micro-batch fits either: with 1"):
        predict_large(tmp_path, memory=0.01)
    kept = predict_large(tmp_path, adapt="never", memory=0.01)
    assert kept.plan.choice.micro_batch == 64
    assert "the micro-batch may not fit: up to" in kept.notes[0]
    assert traced == [64, 8, 1]


def test_training_goes_on_if_a_prediction_takes_too_long_or_fails(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del own_cache
    late = predict_large(tmp_path, limit_s=0.2)
    assert not late.is_predicted
    assert late.notes == (
        "nothing is predicted: it took more than 0.2 s; training goes on (limit_s= gives it more time)",
    )
    assert late.plan.choice.micro_batch == 64
    assert predict_large(tmp_path, limit_s=0).notes == ("nothing is predicted: limit_s=0",)
    few = predict_large(tmp_path, facts=LARGE._replace(ranks=2, strategy="ddp"))
    assert "2 ranks train on 1 node" in few.notes[0]
    monkeypatch.setattr(prediction, "predict_run", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in predict_large(tmp_path).notes[0]


def test_memory_of_this_process_counts_as_free_and_its_limit_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = parse_cluster("2xRTX4090")
    (node,) = cluster.nodes
    free = [device.replace(free_bytes=10 * GIB) for device in node.devices]
    used = cluster.replace(nodes=(node.replace(devices=tuple(free)),))
    assert prediction.add_own_memory(used) == used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    assert [device.free_bytes for device in prediction.add_own_memory(used).devices] == [12 * GIB] * 2
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.25)
    limit = int(0.25 * free[0].memory_bytes)
    assert [device.free_bytes for device in prediction.add_own_memory(used).devices] == [limit] * 2
    # A single rank is predicted on its own device, whichever it is.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert prediction.choose_layout(used, LARGE, is_here=True).places[0].device == 1
    assert prediction.choose_layout(used, LARGE, is_here=False).places[0].device == 0


def test_the_trainer_uses_the_micro_batch_of_a_plan(tmp_path: Path) -> None:
    facts = RunFacts(micro_batch=2, accumulation=4, optimizer="fused")
    plan = make_measured_plan("GPT2LMHeadModel", facts, "it is a test")
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    run = runs.train_transformers(
        tmp_path, callback=TrimtabCallback(out=tmp_path / "run", plan=file), steps=2
    )
    assert (run["micro_batch"], run["accumulation"]) == (2, 4)
    plain = runs.train_transformers(tmp_path, steps=2)
    assert differ(run, plain) <= EXACT
    with pytest.raises(WrongUse, match="precision fp32, not bf16"):
        runs.train_transformers(tmp_path, callback=TrimtabCallback(out=tmp_path / "b", plan=file), bf16=True)


@pytest.mark.slow
def test_commands_read_the_run_folder(tmp_path: Path) -> None:
    runs.train_accelerate(tmp_path / "run", model=runs.TextModel(runs.Limit(2)))

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", *words], capture_output=True, text=True, check=True
        )
        return done.stdout

    findings = json.loads(command("doctor", str(tmp_path / "run"), "--json"))["findings"]
    assert any("ran out of memory once" in finding["what"] for finding in findings)
    sample = json.loads(command("watch", str(tmp_path / "run"), "--samples", "1", "--json"))
    assert (sample["runs"][0]["step"], sample["runs"][0]["state"]) == (4, "done")
    page = tmp_path / "run.html"
    command("report", str(tmp_path / "run"), "-o", str(page))
    assert "out-of-memory" in page.read_text(encoding="utf-8")


def test_wrong_options_are_refused() -> None:
    with pytest.raises(WrongUse, match="if-needed, fastest, never"):
        RunMonitor(adapt="always")
    with pytest.raises(WrongUse, match="no Trainer calls it"):
        TrimtabCallback().on_init_end(None, None, None)


@pytest.mark.parametrize(
    "file", sorted(Path(trimtab.integrations.__file__).parent.glob("*.py")), ids=lambda f: f.stem
)
def test_a_module_imports_only_its_own_framework(file: Path) -> None:
    frameworks = {"transformers", "lightning", "accelerate"}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {name.partition(".")[0] for name in names} & frameworks
    assert found <= {file.stem}
    siblings = {name.rpartition(".")[2] for name in names if name.startswith("trimtab.integrations.")}
    assert not siblings & frameworks
