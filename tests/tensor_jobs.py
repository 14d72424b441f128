"""Small jobs for tests of tensor parallelism, in double precision, and runs of them on several processes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.spec import Mesh, Setting, Strategy
from trimtab.training.run import Run

WIDTH, TOKENS, WORDS, SAMPLES, STEPS = 16, 8, 32, 4, 3


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        query, key, value = (
            layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / (WIDTH / self.heads) ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(heads)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.first(x))
        inner = self.second(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Writer(nn.Module):
    """A plain language model: embeddings of words and places, blocks, a head."""

    def __init__(self, heads: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH, padding_idx=words // 2 + 1)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(heads) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PlainJob(trimtab.Job):
    """A language model without a plan of its own."""

    additive = True

    def __init__(self, heads: int = 4, words: int = WORDS, *, tied: bool = False) -> None:
        self.heads, self.words, self.tied = heads, words, tied

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = Writer(self.heads, self.words).double()
        if self.tied:
            model.head.weight = model.words.weight
        return model

    def batch(self, n: int) -> Any:
        return torch.randint(0, self.words, (n, TOKENS))

    def loss(self, model: Any, batch: Any) -> Any:
        logits = model(batch)[:, :-1].reshape(-1, self.words)
        return functional.cross_entropy(logits, batch[:, 1:].reshape(-1))

    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-3)


class LlamaJob(PlainJob):
    """A Llama of transformers, which has a plan."""

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2 if self.heads == 8 else self.heads,
            vocab_size=self.words,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=self.tied,
        )
        model: nn.Module = LlamaForCausalLM(config).double()  # type: ignore[no-untyped-call]
        for owner in list(model.modules()):
            for name, norm in list(owner.named_children()):
                if type(norm).__name__ == "LlamaRMSNorm":
                    # Theirs computes in fp32, whatever the model's dtype is.
                    setattr(owner, name, nn.RMSNorm(WIDTH, eps=1e-6, dtype=torch.float64))
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].reshape(-1, self.words)
        return functional.cross_entropy(logits, batch[:, 1:].reshape(-1))


class ChainJob(PlainJob):
    """Linear layers one after the other, and a mean of squares as the loss."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        wide = 2 * WIDTH
        layers = [
            nn.Linear(WIDTH, wide),
            nn.ReLU(),
            nn.Linear(wide, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, wide),
        ]
        return nn.Sequential(*layers, nn.GELU(), nn.Linear(wide, 3)).double()

    def batch(self, n: int) -> Any:
        return torch.randn(n, WIDTH, dtype=torch.float64)

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch) - batch[:, :3]).square().mean()


JOBS = {"plain": PlainJob, "llama": LlamaJob, "chain": ChainJob}


def make_setting(micro_batch: int | None = None, **mesh: int) -> Setting:
    """Return a setting whose ranks take all samples of a step in one or more micro-batches."""
    axes = Mesh(**mesh)  # type: ignore[arg-type]  # names of axes
    own = SAMPLES // axes.data_parallel
    micro_batch = micro_batch or own
    strategy = Strategy.HSDP if axes.dp_replicate > 1 else Strategy.FSDP
    return Setting(
        strategy=strategy,
        mesh=axes,
        micro_batch=micro_batch,
        accumulation=own // micro_batch,
        global_batch=SAMPLES,
    )


def make_batches(job: Any) -> list[Any]:
    torch.manual_seed(1)
    return [job.batch(SAMPLES) for _ in range(STEPS)]


def train_alone(job: Any, clip: float | None = None) -> dict[str, Any]:
    """Return losses, norms, first gradients and last weights of one process, without trimtab."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(make_batches(job)):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        if not step:
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train_together(runs: list[tuple[str, dict[str, Any], dict[str, int], float | None]]) -> list[Any]:
    """Run each job on the mesh of its setting on these processes; return what `train_alone` returns."""
    torch.set_default_dtype(torch.float64)
    return [run_job(JOBS[name](**options), make_setting(**mesh), clip) for name, options, mesh, clip in runs]


def run_job(job: Any, setting: Setting, clip: float | None = None) -> dict[str, Any]:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    gradients: dict[str, Any] = {}
    with Run(setting, job=job, join_s=60) as run:
        run.prepare(clip=clip)
        start, stop = (SAMPLES // setting.data_parallel * (run.groups.data_rank + end) for end in (0, 1))
        losses, norms = [], []
        for step, batch in enumerate(make_batches(job)):
            outcome = run.step(batch[start:stop])
            losses.append(outcome.loss)
            norms.append(outcome.grad_norm)
            if not step:
                gradients = {
                    name: parameter.grad.full_tensor() for name, parameter in run.model.named_parameters()
                }
        weights = {name: parameter.full_tensor().detach() for name, parameter in run.model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}
