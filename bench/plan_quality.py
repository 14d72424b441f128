"""How good a plan is: every candidate measured on the GPU, beside the plan's choice and batch-size finders.

    python bench/plan_quality.py plan             plans of the jobs below for an H200; needs no GPU
    python bench/plan_quality.py measure [JOB..]  every candidate that fits, the plans' choices, the finders
    python bench/plan_quality.py table            what was measured, as Markdown
    python bench/plan_quality.py choose [JOB..]   plans of eleven jobs at full depth; needs no GPU
    python bench/plan_quality.py shares           their share of the best of `quality-*` in gpu_results.jsonl

The jobs are unlike on purpose, and of few layers, so that two dozen candidates of each can be compiled within
minutes. A candidate is a micro-batch, a precision, a way of recomputing, and compiled or not; its throughput
is that of whole optimizer steps over the same global batch. Results: plan_quality.json.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.gpu_queue import DEVICE, QUALITY, read_results
from bench.gpu_queue import RESULTS as GPU_RESULTS

from trimtab.spec import OptimizerImplementation, Precision, Recompute, Setting

HERE = Path(__file__).parent
FULL_PLANS = HERE / "full_depth_plans.json"
PLANS, RESULTS = HERE / "plan_quality_plans.json", HERE / "plan_quality.json"
JOBS: dict[str, dict[str, Any]] = {
    "gpt2": {"job": "HFGPT2", "options": {"layers": 2}, "batch": 64, "micro": [32, 64], "finder": 512},
    "resnet": {
        "job": "ResNet50",
        "options": {"depths": "[2,1,2,1]"},
        "batch": 512,
        "micro": [256, 512],
        "finder": 4096,
    },
    "vit": {"job": "ViT", "options": {"layers": 2}, "batch": 512, "micro": [256, 512], "finder": 4096},
    "dlrm": {
        "job": "DLRM",
        "options": {},
        "batch": 65536,
        "micro": [16384, 65536],
        "finder": 1048576,
        "precisions": ["bf16", "fp16", "tf32", "fp32"],
    },
    "conformer": {
        "job": "Conformer",
        "options": {"layers": 2},
        "batch": 64,
        "micro": [32, 64],
        "finder": 512,
    },
}
PRECISIONS = ("bf16", "tf32")
AT_ONCE = 14
"""Processes that compile at the same time."""


def name_of(mapping: dict[str, Any]) -> str:
    """The job as trimtab names it."""
    return f"trimtab.exams.jobs:{mapping['job']}"


def candidates(mapping: dict[str, Any]) -> list[dict[str, Any]]:
    """Every micro-batch, precision, way of recomputing, compiled or not."""
    ways = itertools.product(
        mapping["micro"], mapping.get("precisions", PRECISIONS), ("none", "full", "selective"), (False, True)
    )
    return [
        {"micro_batch": micro, "precision": precision, "recompute": recompute, "compile": compiled}
        for micro, precision, recompute, compiled in ways
    ]


def setting_of(mapping: dict[str, Any], candidate: dict[str, Any]) -> Setting:
    """A candidate as a setting over the whole global batch."""
    micro = candidate["micro_batch"]
    return Setting(
        micro_batch=micro,
        accumulation=-(-mapping["batch"] // micro),
        global_batch=mapping["batch"],
        precision=Precision(candidate["precision"]),
        recompute=Recompute(candidate["recompute"]),
        compile=candidate["compile"],
        optimizer=OptimizerImplementation.FUSED,
    )


def measured(
    mapping: dict[str, Any], candidate: dict[str, Any], *, warm: int = 2, timed: int = 4
) -> dict[str, Any]:
    """Samples a second of whole optimizer steps, or why there are none."""
    import torch

    from trimtab.engine import step as steps
    from trimtab.errors import TrimtabError
    from trimtab.jobs.load import load_job

    torch.compiler.reset()
    state = batches = None
    try:
        torch.manual_seed(0)
        setting = setting_of(mapping, candidate)
        job = load_job(name_of(mapping), mapping["options"])
        state = steps.prepare_job(job, setting)
        batches = [steps.make_batch(job, setting, "cuda")] * setting.accumulation
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        times = []
        for _ in range(warm + timed):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            steps.run_step(state, batches)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return {
            **candidate,
            "samples_per_s": mapping["batch"] / statistics.median(times[warm:]),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "took_s": round(time.perf_counter() - start, 1),
        }
    except torch.OutOfMemoryError:
        return {**candidate, "why": "out of memory"}
    except TrimtabError as error:
        return {**candidate, "why": error.found}
    except Exception as error:  # noqa: BLE001 - a candidate that torch cannot run is an answer
        return {**candidate, "why": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        del state, batches
        gc.collect()
        torch.cuda.empty_cache()


def warm(key: str, number: int) -> None:
    """Compile one candidate, so that the measuring process finds it in the compiler's cache."""
    job = JOBS[key]
    every = [c for c in candidates(job) + choices(key) if c["compile"]]
    found = measured({**job, "batch": every[number]["micro_batch"]}, every[number], warm=1, timed=1)
    print(json.dumps(found))


def choices(key: str) -> list[dict[str, Any]]:
    """The plan's choice, where it is none of the candidates."""
    plan = json.loads(PLANS.read_text(encoding="utf-8"))[key]["choice"]
    mine = {name: plan[name] for name in ("micro_batch", "precision", "recompute", "compile")}
    return [] if mine in candidates(JOBS[key]) else [mine]


def measure(keys: list[str]) -> None:
    """Compile beside one another, then measure one after the other; every job in its own process."""
    out = Path(os.environ.get("OUT", HERE)) / RESULTS.name
    found: dict[str, Any] = {}
    for key in keys:
        job = JOBS[key]
        begin = time.perf_counter()
        count = sum(c["compile"] for c in candidates(job) + choices(key))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(_child, ["warm"] * count, [key] * count, map(str, range(count))))
        print(f"{key}: compiled {count} in {time.perf_counter() - begin:.0f} s", flush=True)
        found[key] = json.loads(_child("all", key).splitlines()[-1])
        print(f"{key}: all in {time.perf_counter() - begin:.0f} s", flush=True)
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _child(*arguments: str) -> str:
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1" if arguments[0] == "warm" else "8"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, env=env, check=False
    )
    if done.returncode:
        print(arguments, done.stderr[-1500:], flush=True)
    return done.stdout


def measure_all(key: str) -> None:
    """All candidates of a job, the best ones once more, and the finders; as one line of JSON."""
    import torch

    job = JOBS[key]
    rows = [measured(job, c) for c in candidates(job) + choices(key)]
    best = sorted((r for r in rows if "samples_per_s" in r), key=lambda r: -r["samples_per_s"])[:2]
    again = [
        measured(job, {k: r[k] for k in ("micro_batch", "precision", "recompute", "compile")}) for r in best
    ]
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": str(torch.__version__),
                "candidates": rows,
                "best_again": again,
                "finders": finders(job),
            }
        )
    )


def finders(mapping: dict[str, Any]) -> list[dict[str, Any]]:
    """What accelerate's and Lightning's searches for a batch size end at, and how fast that is."""
    found: list[dict[str, Any]] = []
    for name, search in (("accelerate", by_accelerate), ("lightning", by_lightning)):
        start = time.perf_counter()
        try:
            size = search(mapping)
        except Exception as error:  # noqa: BLE001 - a finder that fails is an answer
            found.append({"finder": name, "why": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        took = time.perf_counter() - start
        candidate = {"micro_batch": size, "precision": "bf16", "recompute": "none", "compile": False}
        row = measured({**mapping, "batch": size}, candidate)
        found.append({"finder": name, "search_s": round(took, 1), **row})
    return found


def _trial(mapping: dict[str, Any], size: int) -> None:
    """One step of the eager job at that batch; raises out of memory."""
    row = measured(
        {**mapping, "batch": size},
        {"micro_batch": size, "precision": "bf16", "recompute": "none", "compile": False},
        warm=0,
        timed=1,
    )
    if "samples_per_s" not in row:
        raise RuntimeError("CUDA out of memory." if row["why"] == "out of memory" else row["why"])


def by_accelerate(mapping: dict[str, Any]) -> int:
    """The search of accelerate: nine tenths of the batch until it fits."""
    from accelerate.utils import find_executable_batch_size

    def attempt(batch_size: int) -> int:
        _trial(mapping, batch_size)
        return batch_size

    return int(find_executable_batch_size(attempt, starting_batch_size=mapping["finder"])())


def by_lightning(mapping: dict[str, Any]) -> int:
    """Lightning's search: doubling, then halving the interval."""
    import lightning
    import torch
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, Dataset

    from trimtab.jobs.load import load_job

    job = load_job(name_of(mapping), mapping["options"])

    class Repeated(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return mapping["finder"] * 4

        def __getitem__(self, index: int) -> int:
            return index

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            with torch.device("cuda"):
                self.model = job.model()

        def training_step(self, batch: Any, _: int) -> Any:
            with torch.device("cuda"):
                return job.loss(self.model, job.batch(len(batch)))

        def configure_optimizers(self) -> Any:
            made = getattr(job, "optimizer", None)
            return made(self.parameters()) if made else torch.optim.AdamW(self.parameters(), fused=True)

        def train_dataloader(self) -> Any:
            return DataLoader(Repeated(), batch_size=self.batch_size, num_workers=0)

    trainer = lightning.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="gpu",
        devices=1,
    )
    module = Module()
    with torch.enable_grad():
        Tuner(trainer).scale_batch_size(
            module, mode="binsearch", steps_per_trial=2, init_val=mapping["micro"][0]
        )
    size = int(module.batch_size)
    del module, trainer
    gc.collect()
    torch.cuda.empty_cache()
    return size


def plan(keys: list[str]) -> None:
    """What trimtab picks without a GPU."""
    import trimtab

    found = json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else {}
    for key in keys:
        job = JOBS[key]
        start = time.perf_counter()
        made = trimtab.plan(name_of(job), "H200", global_batch=job["batch"], options=job["options"])
        print(
            key,
            made.choice,
            f"{made.estimate.samples_per_s:.0f} samples/s",
            f"{time.perf_counter() - start:.0f} s",
        )
        found[key] = {
            "choice": made.choice.to_builtins(),
            "samples_per_s": made.estimate.samples_per_s,
            "high_bytes": made.estimate.band.high_bytes,
        }
    PLANS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def table(_: list[str]) -> None:
    """Best measured, planned and found, as Markdown."""
    results, plans = (json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS, PLANS))
    print("| job | best measured | the plan | of the best | accelerate | Lightning |")
    print("|---|---|---|--:|--:|--:|")
    for key, result in results.items():
        fits = [r for r in result["candidates"] if "samples_per_s" in r]
        best = max(fits, key=lambda r: r["samples_per_s"])
        choice = plans[key]["choice"]
        mine = next(
            r
            for r in fits
            if all(r[k] == choice[k] for k in ("micro_batch", "precision", "recompute", "compile"))
        )
        by = {f["finder"]: f for f in result["finders"]}
        others = [
            f"{f['micro_batch']}: {f['samples_per_s'] / best['samples_per_s']:.0%}"
            if "samples_per_s" in f
            else f["why"]
            for f in (by["accelerate"], by["lightning"])
        ]
        share = mine["samples_per_s"] / best["samples_per_s"]
        print(f"| {key} | {words(best)} | {words(mine)} | {share:.1%} | {others[0]} | {others[1]} |")


def choose(keys: list[str]) -> None:
    """What trimtab picks for the jobs of `gpu_queue.QUALITY`, at full depth."""
    import trimtab

    plans = json.loads(FULL_PLANS.read_text(encoding="utf-8")) if FULL_PLANS.exists() else {}
    for key in keys:
        job, batch, options = QUALITY[key]
        start = time.perf_counter()
        name = job if ":" in job else name_of({"job": job})
        made = trimtab.plan(name, DEVICE, global_batch=batch, options=options)
        print(key, made.choice, f"{time.perf_counter() - start:.0f} s", flush=True)
        step_s = made.estimate.step_s
        plans[key] = {"choice": made.choice.to_builtins(), "step_s": step_s}
        FULL_PLANS.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


def shares(_: list[str]) -> None:
    """The measured throughput of each choice over that of the best measured setting, as Markdown."""
    plans = json.loads(FULL_PLANS.read_text(encoding="utf-8"))
    lines = [line for line in read_results(GPU_RESULTS) if line["id"].startswith("quality-")]
    print("| job, global batch | settings that ran | best measured | the plan | of the best |")
    print("|---|--:|---|---|--:|")
    for key, plan in plans.items():
        own = [line for line in lines if line["id"].split("-")[1] == key and line.get("step_s")]
        best = min(own, key=lambda line: line["step_s"])
        mine = next((line for line in own if is_choice(line["case"], plan["choice"])), None)
        choice = describe_case(plan["choice"])
        if mine is None:
            print(f"| {key}, {QUALITY[key][1]:,} | {len(own)} | {timed(best)} | {choice} | not measured |")
            continue
        share = best["step_s"] / mine["step_s"]
        chosen = "the same" if mine is best else timed(mine)
        print(f"| {key}, {QUALITY[key][1]:,} | {len(own)} | {timed(best)} | {chosen} | {share:.1%} |")


def is_choice(case: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Whether a measured case is the setting that a plan chose."""
    names = ("micro_batch", "precision", "recompute", "compile")
    return all(case[name] == choice[name] for name in names)


def describe_case(case: dict[str, Any]) -> str:
    """A setting in a few words."""
    again = "" if case["recompute"] == "none" else f", recompute {case['recompute']}"
    rounds = f" x {case['accumulation']}" if case["accumulation"] > 1 else ""
    return f"{case['micro_batch']:,}{rounds}{again}{', compiled' if case['compile'] else ''}"


def timed(line: dict[str, Any]) -> str:
    """A measured case in a few words."""
    return f"{describe_case(line['case'])}: {line['step_s'] * 1e3:,.1f} ms"


def words(row: dict[str, Any]) -> str:
    """A candidate in a few words."""
    again = "" if row["recompute"] == "none" else f", recompute {row['recompute']}"
    how = f"{row['micro_batch']}, {row['precision']}{again}{', compiled' if row['compile'] else ''}"
    return f"{how}: {row['samples_per_s']:,.0f}/s"


if __name__ == "__main__":
    verb, *rest = sys.argv[1:] or ["table"]
    if verb == "warm":
        warm(rest[0], int(rest[1]))
    elif verb == "all":
        measure_all(rest[0])
    elif verb in {"choose", "shares"}:
        {"choose": choose, "shares": shares}[verb](rest or list(QUALITY))
    else:
        {"plan": plan, "measure": measure, "table": table}[verb](rest or list(JOBS))
