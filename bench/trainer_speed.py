"""`hf:` GPT-2 (124 million parameters) by `trimtab train`, beside the Trainer of transformers, both compiled.

    python bench/trainer_speed.py plan                     the plan of trimtab's run; needs no GPU
    python bench/trainer_speed.py run [--trainer 32,64]    prints one line of JSON a run

Both train the same model (the usual config, dropout included) from the same seed on synthetic tokens, 64
samples of 1,024 tokens a step, in bf16 autocast with a fused AdamW and clipping. The Trainer runs with the
micro-batches given, and its fastest counts. Results: trainer_speed.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import trimtab
from trimtab.spec import Plan
from trimtab.training.loop import train
from trimtab.training.task import TrainTask

HERE = Path(__file__).parent
PLAN, RESULTS = HERE / "trainer_speed_plan.json", HERE / "trainer_speed.json"
SEQ, SAMPLES = 1024, 64
WARM, TIMED = 10, 30
PINS = ("compile=true", "loss=chunked", "precision=bf16", "recompute=none")


def write_config(folder: str) -> str:
    """Write the config of GPT-2; return the job of it."""
    transformers.GPT2Config().save_pretrained(folder)
    return f"hf:{folder}"


def make_plan() -> None:
    """What trimtab chooses for the run."""
    with tempfile.TemporaryDirectory() as folder:
        made = trimtab.plan(write_config(folder), "H200", global_batch=SAMPLES, pins=list(PINS))
    # The folder in which it was made says nothing to others.
    PLAN.write_text(json.dumps(made.replace(folder="").to_builtins(), indent=1) + "\n", encoding="utf-8")
    print(made.choice)


def run_trimtab() -> dict[str, Any]:
    """Steps of `trimtab train`, in this process."""
    plan = Plan.from_builtins(json.loads(PLAN.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
        task = TrainTask(
            job=write_config(folder), options={}, plan=plan, out=out, steps=WARM + TIMED, every=100, keep=1
        )
        train(task)
        lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    # The last step writes the checkpoint.
    return {
        "name": "trimtab",
        "micro_batch": lines[-1]["micro_batch"],
        "step_s": statistics.median(line["time_s"] for line in lines[WARM:-1]),
        "reserved_bytes": lines[-1]["reserved_bytes"],
        "losses": [round(line["loss"], 4) for line in lines[::13]],
    }


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, drawn beforehand: reading them costs nothing."""

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(vocabulary, (SAMPLES * (WARM + TIMED), SEQ), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stopwatch(transformers.TrainerCallback):
    """Time between the ends of optimizer steps."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time once the GPU has finished."""
        torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


def run_trainer(micro_batch: int) -> dict[str, Any]:
    """The same steps by the Trainer."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    build: Any = transformers.GPT2LMHeadModel
    model = build(transformers.GPT2Config())
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as out:
        options = transformers.TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=SAMPLES // micro_batch,
            max_steps=WARM + TIMED,
            bf16=True,
            torch_compile=True,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            learning_rate=3e-4,
            dataloader_num_workers=4,
            save_strategy="no",
            logging_steps=13,
            report_to=[],
            disable_tqdm=True,
        )
        trainer: Any = transformers.Trainer(
            model=model, args=options, train_dataset=Tokens(model.config.vocab_size), callbacks=[watch]
        )
        trainer.train()
    pairs = zip(watch.marks[WARM:], watch.marks[WARM - 1 :], strict=False)
    return {
        "name": "Trainer",
        "micro_batch": micro_batch,
        "step_s": statistics.median(late - early for late, early in pairs),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def run(micro_batches: list[int]) -> None:
    """Run both, and write what was measured."""
    runs = []
    for measure in [run_trimtab, *((lambda size=size: run_trainer(size)) for size in micro_batches)]:
        runs.append(measure())
        runs[-1]["tokens_per_s"] = SAMPLES * SEQ / runs[-1]["step_s"]
        print(json.dumps(runs[-1]), flush=True)
    best = max(line["tokens_per_s"] for line in runs[1:])
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "arch": platform.machine(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "runs": runs,
        "ratio": runs[0]["tokens_per_s"] / best,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"trimtab {record['ratio']:.2f} times the Trainer")


def main() -> None:
    """Plan or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=("plan", "run"))
    parser.add_argument("--trainer", default="32,64", metavar="SIZES")
    given = parser.parse_args()
    if given.verb == "plan":
        make_plan()
    else:
        run([int(size) for size in given.trainer.split(",")])


if __name__ == "__main__":
    main()
