"""Pipelines whose stages split layers, sequences or experts learn what one process learns, on any mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from expert_jobs import StackedExperts
from test_sharded_pipelines import SCHEDULES
from test_ways import among
from trimtab.spec import ContextMethod, Mesh, Recompute, Setting, Strategy
from trimtab.training.checkpoints import CheckpointManager
from trimtab.training.evaluation import evaluate_run
from trimtab.training.run import Run
from worlds import everywhere

WIDTH, TOKENS, WORDS, HEADS, EXPERTS, SAMPLES, STEPS = 16, 8, 32, 4, 4, 8, 2
DOUBLE, SINGLE = torch.float64, torch.float32


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.down(functional.gelu(self.up(hidden)))


class ExpertFeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), StackedExperts(EXPERTS, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        tokens = hidden.flatten(0, 1)
        weights, index = torch.topk(torch.softmax(self.router(tokens), -1), 2)
        return self.experts(tokens, index, weights).view_as(hidden)


class Layer(nn.Module):
    def __init__(self, feed: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.first, self.second, self.feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), feed

    def forward(self, hidden: torch.Tensor) -> Any:
        inner = self.first(hidden)
        query, key, value = (
            layer(inner).view(*hidden.shape[:2], HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        return hidden + self.feed(self.second(hidden))


class Network(nn.Module):
    def __init__(self, depth: int, *, experts: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer(ExpertFeed() if experts else Feed()) for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> Any:
        hidden = self.words(ids) + self.places(places)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class DenseJob(trimtab.Job):
    """A decoder with a tied head, in any dtype; its last label does not count."""

    additive = True
    experts = False

    def __init__(self, dtype: torch.dtype = DOUBLE) -> None:
        self.dtype = dtype

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Network(4, experts=self.experts).to(self.dtype)

    def batch(self, n: int) -> Any:
        ids = torch.randint(0, WORDS, (n, TOKENS))
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        return {"ids": ids, "labels": labels, "places": torch.arange(TOKENS).repeat(n, 1)}

    def split_sequence(self, batch: Any, part: Any) -> Any:
        return {name: part.select(tensor) for name, tensor in batch.items()}

    def weight(self, batch: Any) -> Any:
        return (batch["labels"] >= 0).sum()

    def loss(self, model: Any, batch: Any) -> Any:
        logits = model(batch["ids"], batch["places"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class ExpertJob(DenseJob):
    expert_modules: ClassVar[tuple[str, ...]] = ("layers.*.feed.experts",)
    experts = True


JOBS: dict[str, Any] = {"dense": DenseJob, "experts": ExpertJob}
CP = {"cp_method": ContextMethod.ALL_TO_ALL}
FOUR_RANKS: list[tuple[str, torch.dtype, dict[str, int], dict[str, Any]]] = [
    ("dense", DOUBLE, {"tp": 2}, SCHEDULES["interleaved"]),
    ("dense", DOUBLE, {"tp": 2}, SCHEDULES["zero bubble"]),
    ("dense", SINGLE, {"tp": 2}, SCHEDULES["interleaved"]),
    ("dense", DOUBLE, {"cp": 2}, SCHEDULES["1f1b"]),
    ("dense", DOUBLE, {"cp": 2}, SCHEDULES["interleaved"] | CP),
    ("dense", SINGLE, {"cp": 2}, SCHEDULES["zero bubble"]),
    ("experts", DOUBLE, {"dp_shard": 2, "ep": 2}, {"recompute": Recompute.FULL}),
    ("experts", SINGLE, {"dp_shard": 2, "ep": 2}, SCHEDULES["zero bubble"]),
    ("experts", DOUBLE, {"cp": 2, "ep": 2}, SCHEDULES["zero bubble"]),
    ("dense", SINGLE, {"dp_shard": 2}, SCHEDULES["zero bubble"]),
]
EIGHT_RANKS: list[tuple[str, torch.dtype, dict[str, int], dict[str, Any]]] = [
    ("dense", DOUBLE, {"tp": 2, "dp_shard": 2}, SCHEDULES["zero bubble"]),
    ("dense", DOUBLE, {"tp": 2, "dp_replicate": 2}, SCHEDULES["1f1b"]),
    ("dense", DOUBLE, {"tp": 2, "cp": 2}, SCHEDULES["interleaved"]),
    ("experts", DOUBLE, {"dp_shard": 2, "dp_replicate": 2, "ep": 2}, SCHEDULES["1f1b"]),
]


def make_setting(mesh: dict[str, int], options: dict[str, Any]) -> Setting:
    """Return two stages of so many ranks, which take a step in four micro-batches or more."""
    axes = Mesh(pp=2, **mesh)  # type: ignore[arg-type]  # names of axes
    micro = 1 if axes.data_parallel > 1 else 2
    return Setting(
        strategy=Strategy.PIPELINE,
        mesh=axes,
        micro_batch=micro,
        accumulation=SAMPLES // (micro * axes.data_parallel),
        global_batch=SAMPLES,
        **options,
    )


def make_batches(job: Any, count: int) -> list[Any]:
    torch.manual_seed(1)
    return [job.batch(SAMPLES) for _ in range(count)]


def train_alone(job: Any, clip: float, steps: int = STEPS) -> dict[str, Any]:
    """Return losses, norms and last weights of one process, without trimtab."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    losses, norms = [], []
    for batch in make_batches(job, steps):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


def run_steps(run: Run, batches: list[Any]) -> dict[str, Any]:
    """Run steps of whole batches; return what `train_alone` returns, of the weights of this rank's stages."""
    share = SAMPLES // run.groups.data_parallel
    start = share * run.groups.data_rank
    mine = [{name: value[start : start + share] for name, value in batch.items()} for batch in batches]
    outcomes = [run.step(batch) for batch in mine]
    weights = {
        name: parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in run.model.named_parameters()
    }
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "weights": weights,
    }


def train_together(cases: list[tuple[Any, torch.dtype, Setting]], clip: float) -> list[Any]:
    """Train each case on these processes."""
    found = []
    for make_job, dtype, setting in cases:
        torch.set_default_dtype(dtype)
        job = make_job(dtype)
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        with Run(setting, job=job, join_s=60) as run:
            run.prepare(clip=clip)
            found.append(run_steps(run, make_batches(job, STEPS)))
    return found


def check(found: dict[str, Any], truth: dict[str, Any], within: float) -> None:
    assert found["losses"] == pytest.approx(truth["losses"], rel=within)
    assert found["norms"] == pytest.approx(truth["norms"], rel=within)
    for name, value in found["weights"].items():
        assert (value - truth["weights"][name]).abs().max() < within, name


def check_together(cases: list[tuple[Any, torch.dtype, Setting]]) -> None:
    """Check that each case, with as many ranks as the first one has, learns what one process learns."""
    clip = 0.5
    reports = everywhere(cases[0][2].gpus, train_together, cases, clip, timeout_s=600)
    for number, (make_job, dtype, _) in enumerate(cases):
        torch.set_default_dtype(dtype)
        truth = train_alone(make_job(dtype), clip)
        torch.set_default_dtype(SINGLE)
        for found in reports:
            check(found[number], truth, 1e-10 if dtype == DOUBLE else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FOUR_RANKS, EIGHT_RANKS], ids=["4 ranks", "8 ranks"])
def test_stages_that_are_split_learn_what_one_process_learns(cases: list[Any]) -> None:
    check_together([(JOBS[name], dtype, make_setting(mesh, options)) for name, dtype, mesh, options in cases])


ALONE = Setting(micro_batch=4, accumulation=2, global_batch=SAMPLES)
CHAINS: dict[str, list[Setting]] = {
    "dense": [
        ALONE,
        make_setting({"tp": 2}, SCHEDULES["interleaved"]),
        make_setting({"cp": 2}, SCHEDULES["1f1b"]),
        ALONE,
    ],
    "experts": [
        make_setting({"dp_shard": 2}, SCHEDULES["1f1b"]),
        make_setting({"dp_shard": 2, "ep": 2}, SCHEDULES["zero bubble"]),
        ALONE,
    ],
}


def resume_chains(folder: str) -> dict[str, Any]:
    """Run a step under each setting of a chain, from the checkpoint of the one before; evaluate each."""
    torch.set_default_dtype(DOUBLE)
    found: dict[str, Any] = {}
    for name, settings in CHAINS.items():
        job = JOBS[name]()
        batches = make_batches(job, len(settings))
        held_out = job.batch(SAMPLES)
        dataset = [{key: value[number] for key, value in held_out.items()} for number in range(SAMPLES)]
        for number, setting in enumerate(settings):
            with among(setting.gpus) as here:
                if not here:
                    continue
                with Run(setting, job=job, join_s=60) as run:
                    model, optimizer = run.prepare()
                    keeper = CheckpointManager(Path(folder) / name)
                    objects = {"model": model, "optimizer": optimizer}
                    assert (keeper.load_latest(objects) is None) == (number == 0)
                    trained = run_steps(run, batches[number : number + 1])
                    trained["evaluated"] = evaluate_run(run, dataset)["loss"]
                    keeper.save(number + 1, objects, wait=True)
                    found[f"{name} {number}"] = trained
    return found


@pytest.mark.slow
def test_checkpoints_resume_on_meshes_that_split_a_stage_in_other_ways(tmp_path: Path) -> None:
    reports = everywhere(4, resume_chains, str(tmp_path), timeout_s=300)
    torch.set_default_dtype(DOUBLE)
    try:
        for name, settings in CHAINS.items():
            job = JOBS[name]()
            make_batches(job, len(settings))
            held_out = job.batch(SAMPLES)
            for number, setting in enumerate(settings):
                truth = train_alone(job, float("inf"), number + 1)
                last = {key: truth[key][-1:] for key in ("losses", "norms")} | {"weights": truth["weights"]}
                model = job.model()
                model.load_state_dict(truth["weights"], strict=False)
                with torch.no_grad():
                    loss = job.loss(model, held_out).item()
                for found in reports[: setting.gpus]:
                    check(found[f"{name} {number}"], last, 1e-10)
                    assert found[f"{name} {number}"]["evaluated"] == pytest.approx(loss, rel=1e-10)
    finally:
        torch.set_default_dtype(SINGLE)
