"""Trainings with other frameworks and our callback on this GPU: predicted beside measured.

    python bench/framework_cases.py transformers|lightning|accelerate [--micro-batch N] [--out DIR]

Each trains a GPT-2 of 124 million weights on random tokens in bf16, and prints a line of JSON:
what the callback predicted, what torch measured, and the error. With `--oom` it trains in fp32, twice: first
without a callback, then with a memory limit at which a micro-batch does not fit. The second run has to
recover, and its losses have to be those of the first. `--cpu` tries that without a GPU and without a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

import torch  # noqa: E402

from trimtab.training.run_folder import read_run  # noqa: E402

SEQ, VOCAB, WARM_UP = 1024, 50257, 4
STEPS, OOM_STEPS = 12, 5
"""Optimizer steps of a case that is timed, and of one that recovers."""
MEMORY_SHARE = 0.7
"""Share of a run's memory that the same run gets when it has to recover."""
FIGURES = ("allocated_bytes", "reserved_bytes", "step_s")


def make_model() -> Any:
    """GPT-2 small without dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    cls: Any = transformers.GPT2LMHeadModel
    return cls(config)


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of random tokens, the same in every run."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (SEQ,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def model_loss(model: Any, batch: Any) -> Any:
    """Return the model's own loss."""
    return model(**batch).loss


class CaseRun(NamedTuple):
    """A training of a case."""

    micro_batch: int
    out: Path
    steps: int = STEPS
    mixed: bool = True
    """Whether to train in bf16; else in fp32."""
    callback: dict[str, Any] | None = None
    """Options of our callback; None: without it."""
    on_gpu: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the callback, with the run folder."""
        return {"out": self.out / "run"} | (self.callback or {})

    def make_data(self) -> Any:
        """Return as many samples as the steps take."""
        return RandomTokens(2 * self.micro_batch * self.steps)


def train_transformers(run: CaseRun) -> list[float]:
    """Train with the Trainer of transformers; return the loss of each step."""
    import transformers

    from trimtab.integrations.transformers import TrimtabCallback

    args = transformers.TrainingArguments(
        output_dir=str(run.out / "trainer"),
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=2,
        max_steps=run.steps,
        bf16=run.mixed,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=2,
        use_cpu=not run.on_gpu,
    )
    callbacks: Any = [] if run.callback is None else [TrimtabCallback(**run.options)]
    trainer = transformers.Trainer(make_model(), args, train_dataset=run.make_data(), callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train_lightning(run: CaseRun) -> list[float]:
    """Train with the Trainer of Lightning; return the loss of each batch.

    Gradients are not clipped: Lightning refuses that with a fused optimizer.
    """
    import lightning.pytorch as pl
    from bench.framework_modules import LanguageModule, LossRecorder

    from trimtab.integrations.lightning import TrimtabCallback

    recorder = LossRecorder()
    trainer = pl.Trainer(
        accelerator="gpu" if run.on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if run.mixed else "32-true",
        max_steps=run.steps,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder] if run.callback is None else [TrimtabCallback(**run.options), recorder],
    )
    loader = torch.utils.data.DataLoader(run.make_data(), batch_size=run.micro_batch, num_workers=2)
    trainer.fit(LanguageModule(make_model()), loader)
    return [float(loss) for loss in recorder.losses]


def train_accelerate(run: CaseRun) -> list[float]:
    """Train with a loop of Accelerate; return the loss of each batch."""
    import accelerate

    from trimtab.integrations.accelerate import TrimtabRun

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    accelerator = accelerate.Accelerator(
        mixed_precision="bf16" if run.mixed else "no", gradient_accumulation_steps=2, cpu=not run.on_gpu
    )
    model = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader: Any = torch.utils.data.DataLoader(run.make_data(), batch_size=run.micro_batch, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watched = None
    if run.callback is not None:
        watched = TrimtabRun(accelerator, model, optimizer, model_loss, steps=run.steps, **run.options)
    losses = []
    with watched or contextlib.nullcontext():
        for batch in loader:
            with accelerator.accumulate(model):
                if watched is None:
                    loss = model_loss(model, batch)
                    accelerator.backward(loss)
                else:
                    loss = watched.backward(batch)
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
    return [float(loss) for loss in losses]


TRAININGS = {"transformers": train_transformers, "lightning": train_lightning, "accelerate": train_accelerate}


def import_framework(framework: str) -> None:
    """Import what a training needs, and start CUDA: both take long, and nothing is timed."""
    from transformers.models.gpt2 import modeling_gpt2

    del modeling_gpt2
    importlib.import_module(f"trimtab.integrations.{framework}")
    torch.zeros(1, device="cuda")


def measure(framework: str, micro_batch: int, out: Path) -> dict[str, Any]:
    """Train, and return predicted and measured figures with their relative errors."""
    TRAININGS[framework](CaseRun(micro_batch, out, callback={}))
    record = read_run(out / "run")
    assert record.plan is not None  # noqa: S101 - the callback has written it
    lines = record.lines[WARM_UP:]
    measured: dict[str, Any] = {
        "allocated_bytes": max(line.allocated_bytes or 0 for line in lines),
        "reserved_bytes": max(line.reserved_bytes or 0 for line in lines),
        "step_s": median(line.time_s for line in lines),
    }
    predicted = {figure: getattr(record.plan.estimate, figure) for figure in FIGURES}
    error = {figure: predicted[figure] / measured[figure] - 1 for figure in FIGURES if predicted[figure]}
    return measured | {
        "predicted": predicted,
        "error": error,
        "mfu": lines[-1].mfu,
        "predicted_mfu": record.plan.estimate.mfu,
        "micro_batch": lines[-1].micro_batch,
        "events": [event.text for event in record.events],
        "losses": [line.loss for line in record.lines],
    }


def measure_recovery(framework: str, micro_batch: int, out: Path, *, on_gpu: bool = True) -> dict[str, Any]:
    """Train without a limit and then with one; return both losses, and what happened in the second run.

    Nothing is predicted, so that the micro-batch really runs out of memory.
    """
    steps = OOM_STEPS if on_gpu else 2
    plain = CaseRun(micro_batch, out, steps, mixed=False, on_gpu=on_gpu)
    losses = TRAININGS[framework](plain)
    limited = plain._replace(callback={"limit_s": 0.0})
    if on_gpu:
        peak = torch.cuda.max_memory_reserved()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE * peak / torch.cuda.mem_get_info()[1])
    recovered = TRAININGS[framework](limited)
    record = read_run(out / "run")
    pairs = zip(losses, recovered, strict=True)
    return {
        "losses": losses,
        "recovered_losses": recovered,
        "largest_difference": max(abs(mine - its) for mine, its in pairs),
        "micro_batch": record.lines[-1].micro_batch,
        "samples_per_step": sorted({line.samples for line in record.lines}),
        "events": [event.text for event in record.events],
        "step_s": median(line.time_s for line in record.lines[1:]),
        "reserved_bytes": max(line.reserved_bytes or 0 for line in record.lines),
    }


def main() -> None:
    """Measure the framework that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=TRAININGS)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--oom", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="with --oom: two steps without a GPU and a limit")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp())
    if chosen.oom:
        found = measure_recovery(chosen.framework, chosen.micro_batch, out, on_gpu=not chosen.cpu)
    else:
        found = measure(chosen.framework, chosen.micro_batch, out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
