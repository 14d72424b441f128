"""Trainings with other frameworks and our callback on this GPU: predicted beside measured.

    python bench/framework_cases.py transformers|lightning|accelerate [--micro-batch N] [--out DIR]

Each trains a GPT-2 of 124 million weights on random tokens in bf16, and prints a line of JSON:
what the callback predicted, what torch measured, and the error. With `--oom SAMPLES` the process has a memory
limit at which batches of more than about SAMPLES samples do not fit. The run has to recover.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

import torch  # noqa: E402

from trimtab.training.run_folder import read_run  # noqa: E402

SEQ, VOCAB, STEPS, WARM_UP = 1024, 50257, 12, 4
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


def train_transformers(micro_batch: int, out: Path) -> None:
    """Train with the Trainer of transformers."""
    import transformers

    from trimtab.integrations.transformers import TrimtabCallback

    args = transformers.TrainingArguments(
        output_dir=str(out / "trainer"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        bf16=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=2,
    )
    data: Any = RandomTokens(2 * micro_batch * STEPS)
    callback = TrimtabCallback(out=out / "run")
    transformers.Trainer(make_model(), args, train_dataset=data, callbacks=[callback]).train()


def train_lightning(micro_batch: int, out: Path) -> None:
    """Train with the Trainer of Lightning."""
    import lightning.pytorch as pl
    from bench.framework_modules import LanguageModule

    from trimtab.integrations.lightning import TrimtabCallback

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[TrimtabCallback(out=out / "run")],
    )
    data = RandomTokens(2 * micro_batch * STEPS)
    loader = torch.utils.data.DataLoader(data, batch_size=micro_batch, num_workers=2)
    trainer.fit(LanguageModule(make_model()), loader)


def train_accelerate(micro_batch: int, out: Path) -> None:
    """Train with a loop of Accelerate."""
    import accelerate

    from trimtab.integrations.accelerate import TrimtabRun

    accelerator = accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = RandomTokens(2 * micro_batch * STEPS)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=micro_batch, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with TrimtabRun(accelerator, model, optimizer, model_loss, out=out / "run", steps=STEPS) as run:
        for batch in loader:
            with accelerator.accumulate(model):
                run.backward(batch)
                optimizer.step()
                optimizer.zero_grad()


TRAININGS = {"transformers": train_transformers, "lightning": train_lightning, "accelerate": train_accelerate}


def measure(framework: str, micro_batch: int, out: Path, oom: int | None = None) -> dict[str, Any]:
    """Train, and return predicted and measured figures with their relative errors."""
    if oom is not None:
        # About 1 GiB for weights and optimizer, and 0.85 GiB a sample.
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((4 + 0.9 * oom) * 2**30 / total)
    TRAININGS[framework](micro_batch, out)
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


def main() -> None:
    """Measure the framework that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=TRAININGS)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--oom", type=int)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp())
    print(json.dumps(measure(chosen.framework, chosen.micro_batch, out, chosen.oom)))


if __name__ == "__main__":
    main()
