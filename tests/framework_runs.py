"""Small trainings with transformers and Accelerate, with and without our callback and injected failures."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

SEQ, VOCAB = 12, 50


class FailingBackward(torch.autograd.Function):
    """Identity that runs out of memory in the backward pass."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        raise torch.OutOfMemoryError("injected: CUDA out of memory in backward")


class Limit(nn.Module):
    """Runs out of memory if a batch has more than `rows` rows in training, on one rank or on all."""

    def __init__(
        self, rows: int = 0, *, rank: int | None = None, backward: bool = False, from_call: int = 0
    ) -> None:
        super().__init__()
        self.rows, self.rank, self.is_backward, self.from_call = rows, rank, backward, from_call
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        here = self.rank is None or int(os.environ.get("RANK", "0")) == self.rank
        self.calls += self.training
        if not (self.rows and self.training and here and x.shape[0] > self.rows):
            return x
        if self.calls <= self.from_call:
            return x
        if self.is_backward:
            return FailingBackward.apply(x)
        raise torch.OutOfMemoryError("injected: CUDA out of memory")


class TextModel(nn.Module):
    """A language model that takes and returns what the Trainer expects; its loss is a mean over labels."""

    def __init__(self, limit: Limit | None = None, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.limit = limit or Limit()
        self.middle = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.limit(self.embed(input_ids))
        hidden = torch.tanh(self.middle(hidden))
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def text_samples(count: int = 48) -> list[dict[str, torch.Tensor]]:
    """Samples in which different numbers of labels count."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(count):
        ids = torch.randint(VOCAB, (SEQ,), generator=generator)
        labels = ids.clone()
        labels[int(torch.randint(3, SEQ + 1, (1,), generator=generator)) :] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def make_gpt2(limit: Limit) -> Any:
    """A causal model of transformers, whose loss the Trainer divides by the tokens of the global batch."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=16,
        n_head=2,
        vocab_size=VOCAB,
        n_positions=SEQ,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.transformer.drop = limit
    return model


def train_transformers(
    folder: Path,
    *,
    limit: Limit | None = None,
    model: Any = None,
    callback: Any = None,
    micro_batch: int = 4,
    accumulation: int = 2,
    steps: int = 4,
    **args: Any,
) -> dict[str, Any]:
    """Train with the Trainer; return losses, weights, logs and arguments."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="torch|transformers|accelerate")
    model = model if model is not None else make_gpt2(limit or Limit())
    options: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**(options | args)),
        train_dataset=text_samples(),
        callbacks=[callback] if callback else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    history = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in history],
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "logs": history,
        "micro_batch": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
    }


def all_transformers_runs(folder: str) -> dict[str, Any]:
    """Run a rank of several trainings: plain, watched, and with failures on some ranks."""
    from trimtab.integrations.transformers import TrimtabCallback

    place = Path(folder)
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1

    def run(name: str, limit: Limit | None = None, **options: Any) -> dict[str, Any]:
        return train_transformers(place, limit=limit, callback=TrimtabCallback(out=place / name), **options)

    return {
        "plain": train_transformers(place),
        "watched": run("watched"),
        "forward": run("forward", Limit(2, rank=last)),
        "backward": run("backward", Limit(2, backward=True, from_call=1)),
        "plain mean": train_transformers(place, model=TextModel()),
        "mean": run("mean", model=TextModel(Limit(1, rank=0, backward=True))),
    }


def mean_loss(model: Any, batch: Any) -> Any:
    """Return the loss of the text model."""
    return model(**batch)["loss"]


def token_loss(model: Any, batch: Any) -> Any:
    """Return the loss of a model that returns logits."""
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def contrastive_loss(model: Any, batch: Any) -> Any:
    """Return a loss that compares the samples of a batch with each other."""
    inner = getattr(model, "module", model)
    vectors = nn.functional.normalize(inner.limit(inner.embed(batch["input_ids"])).mean(1), dim=1)
    return nn.functional.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(vectors)))


def train_accelerate(
    folder: Path | None, *, model: Any = None, loss: Any = mean_loss, steps: int = 4, **options: Any
) -> dict[str, Any]:
    """Train with a loop of Accelerate; return losses and weights."""
    import accelerate

    from trimtab.integrations.accelerate import TrimtabRun

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)  # noqa: SLF001
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model if model is not None else TextModel()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(text_samples(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = None
    if folder is not None:
        run = TrimtabRun(accelerator, model, optimizer, loss, out=folder, steps=steps, **options)
    losses, done = [], 0
    try:
        for batch in loader:
            with accelerator.accumulate(model):
                if run is None:
                    value = loss(model, batch)
                    accelerator.backward(value)
                else:
                    value = run.backward(batch)
                losses.append(float(value.detach()))
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == steps:
                break
    except BaseException as error:
        if run is not None:
            run.end(error)
        raise
    if run is not None:
        run.end()
    inner = accelerator.unwrap_model(model)
    weights = [parameter.detach().clone() for parameter in inner.parameters()]
    return {"losses": losses, "weights": weights, "figures": run.figures if run else {}}


def all_accelerate_runs(folder: str) -> dict[str, Any]:
    """Run a rank of several loops: plain, watched, and with failures on some ranks."""
    warnings.filterwarnings("ignore", module="torch|accelerate")
    place = Path(folder)
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    return {
        "plain": train_accelerate(None),
        "watched": train_accelerate(place / "watched"),
        "forward": train_accelerate(place / "forward", model=TextModel(Limit(2, rank=last))),
        "backward": train_accelerate(
            place / "backward", model=TextModel(Limit(1, backward=True, from_call=1))
        ),
    }
