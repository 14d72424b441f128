"""Ranks that split layers and hold different experts learn what one process learns, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from test_split_pipelines import (
    ALONE,
    DOUBLE,
    EXPERTS,
    JOBS,
    SAMPLES,
    SINGLE,
    TOKENS,
    WORDS,
    ExpertJob,
    Feed,
    check,
    check_together,
    make_batches,
    run_steps,
    train_alone,
)
from test_ways import among
from trimtab.errors import WrongUse
from trimtab.spec import Mesh, Recompute, Setting, Strategy
from trimtab.strategies import STRATEGIES
from trimtab.training.checkpoints import CheckpointManager
from trimtab.training.run import Run
from worlds import everywhere


class TransformersJob(trimtab.Job):
    """A model of transformers with experts; its tensor-parallel plan is its own."""

    additive = True
    kind: ClassVar[str]
    width: ClassVar = 32
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, dtype: torch.dtype = DOUBLE) -> None:
        self.dtype = dtype

    def model(self) -> Any:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=self.width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
            **self.options,
        )
        model = getattr(transformers, f"{self.kind}ForCausalLM")(config).to(self.dtype)
        model.set_experts_implementation("eager")
        return model

    def batch(self, n: int) -> Any:
        return {"ids": torch.randint(0, WORDS, (n, TOKENS))}

    def loss(self, model: Any, batch: Any) -> Any:
        logits = model(batch["ids"]).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class ListedExperts(nn.Module):
    """Experts in a list, each of which gets the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Feed() for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            if token.numel() == 0:
                continue
            output.index_add_(0, token, expert(hidden[token]) * weights[token, choice, None])
        return output


class ListedJob(ExpertJob):
    def model(self) -> nn.Module:
        model = super().model()
        torch.manual_seed(2)
        for layer in model.get_submodule("layers").children():
            layer.feed.experts = ListedExperts().to(self.dtype)  # type: ignore[union-attr]
        return model


class MixtralJob(TransformersJob):
    kind = "Mixtral"
    options: ClassVar[dict[str, Any]] = {"num_local_experts": 4}


class WideMixtralJob(MixtralJob):
    """Its experts are so large that they decide how much memory the step needs."""

    width = 4096


class SharedJob(TransformersJob):
    """Beside the chosen experts every token has shared ones, and some blocks have no experts."""

    kind = "Qwen2Moe"
    options: ClassVar[dict[str, Any]] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
    }


ALL_JOBS: dict[str, Any] = JOBS | {"listed": ListedJob, "mixtral": MixtralJob, "shared": SharedJob}
FOUR_RANKS: list[tuple[str, torch.dtype, dict[str, int], dict[str, Any]]] = [
    ("experts", DOUBLE, {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    ("experts", SINGLE, {"dp_shard": 2, "tp": 2, "ep": 2}, {"recompute": Recompute.FULL}),
    ("experts", DOUBLE, {"dp_shard": 2, "tp": 2}, {"recompute": Recompute.FULL}),
    ("experts", DOUBLE, {"cp": 2, "tp": 2, "ep": 4}, {}),
    ("experts", DOUBLE, {"dp_replicate": 2, "tp": 2, "ep": 2}, {}),
    ("experts", DOUBLE, {"pp": 2, "tp": 2, "ep": 2}, {}),
    ("listed", DOUBLE, {"dp_shard": 4, "ep": 2}, {"recompute": Recompute.FULL}),
    ("listed", DOUBLE, {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    ("mixtral", DOUBLE, {"dp_shard": 2, "tp": 2, "ep": 4}, {"recompute": Recompute.SELECTIVE}),
    ("shared", DOUBLE, {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
]


def make_setting(mesh: dict[str, int], options: dict[str, Any]) -> Setting:
    """Return a setting that takes its share of a step in two micro-batches."""
    axes = Mesh(**mesh)  # type: ignore[arg-type]  # names of axes
    strategy = Strategy.HSDP if axes.dp_replicate > 1 else Strategy.FSDP
    micro = SAMPLES // (2 * axes.data_parallel)
    return Setting(
        strategy=Strategy.PIPELINE if axes.pp > 1 else strategy,
        mesh=axes,
        micro_batch=micro,
        accumulation=2,
        global_batch=SAMPLES,
        **options,
    )


@pytest.mark.slow
def test_experts_on_ranks_that_split_layers_learn_what_one_process_learns() -> None:
    check_together(
        [(ALL_JOBS[name], dtype, make_setting(mesh, options)) for name, dtype, mesh, options in FOUR_RANKS]
    )


CHAINS: dict[str, list[Setting]] = {
    "experts": [
        ALONE,
        make_setting({"dp_shard": 2, "tp": 2, "ep": 4}, {}),
        make_setting({"tp": 2, "ep": 2}, {}),
        make_setting({"dp_shard": 2, "tp": 2}, {}),
        ALONE,
    ],
    "listed": [
        make_setting({"dp_shard": 2, "tp": 2, "ep": 4}, {}),
        make_setting({"dp_shard": 4, "ep": 2}, {}),
        ALONE,
    ],
}


def resume_chain(name: str, folder: str) -> dict[int, Any]:
    """Run a step under each setting of a chain, from the checkpoint of the one before."""
    torch.set_default_dtype(DOUBLE)
    job = ALL_JOBS[name]()
    batches = make_batches(job, len(CHAINS[name]))
    trained = {}
    for number, setting in enumerate(CHAINS[name]):
        with among(setting.gpus) as here:
            if not here:
                continue
            with Run(setting, job=job, join_s=60) as run:
                model, optimizer = run.prepare()
                keeper = CheckpointManager(Path(folder))
                objects = {"model": model, "optimizer": optimizer}
                assert (keeper.load_latest(objects) is None) == (number == 0)
                trained[number] = run_steps(run, batches[number : number + 1])
                keeper.save(number + 1, objects, wait=True)
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_checkpoints_resume_on_meshes_that_spread_experts_in_other_ways(name: str, tmp_path: Path) -> None:
    reports = everywhere(4, resume_chain, name, str(tmp_path), timeout_s=300)
    torch.set_default_dtype(DOUBLE)
    try:
        for number, setting in enumerate(CHAINS[name]):
            truth = train_alone(ALL_JOBS[name](), float("inf"), number + 1)
            last = {key: truth[key][-1:] for key in ("losses", "norms")} | {"weights": truth["weights"]}
            for report in reports[: setting.gpus]:
                check(report[number], last, 1e-10)
    finally:
        torch.set_default_dtype(SINGLE)


@pytest.mark.slow
def test_an_estimate_names_the_memory_of_a_rank_with_its_experts_and_its_part_of_layers() -> None:
    options: dict[str, Any] = {"micro_batch": 4, "strategy": "fsdp", "cache": False}
    job = f"{Path(__file__)}:WideMixtralJob"
    both = trimtab.estimate(job, "4xH100", tp=2, ep=4, **options)
    alone = trimtab.estimate(job, "4xH100", tp=2, **options)
    # Both spread all weights over all ranks, but one computes with one expert and the other with four.
    assert both.parts.weights <= alone.parts.weights * 1.05
    assert both.allocated_bytes < alone.allocated_bytes - both.parts.activations
    assert any("tp: 2 ranks split layers" in note for note in both.assumptions)
    assert any("ep: 4 ranks hold the experts of 2 layers" in note for note in both.assumptions)
    assert any("share the tokens of the experts of 2 layers" in note for note in alone.assumptions)


def test_degrees_that_ranks_of_tp_and_ep_cannot_have_are_refused() -> None:
    job = f"{Path(__file__)}:MixtralJob"
    with pytest.raises(
        WrongUse, match=r"experts share the 8 ranks of dp_shard x cp x tp, which 3.*1, 2, 4, 8"
    ):
        trimtab.estimate(job, "8xH100", strategy="fsdp", tp=2, ep=3)
    with pytest.raises(WrongUse, match="--ep 2 with --strategy ddp"):
        trimtab.estimate(job, "8xH100", strategy="ddp", ep=2)


def test_fewer_processes_keep_experts_apart_on_ranks_that_split_layers() -> None:
    mesh = Mesh(dp_shard=4, tp=2, ep=8)
    assert STRATEGIES[Strategy.FSDP].resized(mesh, 4) == (Strategy.FSDP, Mesh(dp_shard=2, tp=2))
    mesh = Mesh(dp_shard=4, tp=2, ep=2)
    assert STRATEGIES[Strategy.FSDP].resized(mesh, 2) == (Strategy.FSDP, Mesh(tp=2, ep=2))
