"""Public training scripts, unmodified: run for real on a GPU, and beside it predicted by trimtab.

    python bench/scripts.py list
    python bench/scripts.py prepare --repos DIR --work DIR [--only PATTERN] [--workers N]
    python bench/scripts.py predict --repos DIR --work DIR [--out FILE] [--only PATTERN]     needs no GPU
    python bench/scripts.py measure --repos DIR --work DIR [--out FILE] [--only PATTERN]     needs a GPU
    python bench/scripts.py compare [--results FILE] [--predictions FILE] [--only PATTERN]

DIR of --repos holds checked-out repositories under the names that `list` shows. --work gets one folder a
case: a copy of the script's repository with generated data in it. Each command is run there as its owner
would type it. `predict` gives it to `trimtab estimate`; `measure` runs it with hooks on PYTHONPATH
(bench/script_hooks) that record each of the first steps and end the process after them. Packages that a
script needs and that are not installed go into a folder named with --packages. Cases of several ranks are
measured as rank 0 of a fake process group: collectives move nothing, all else is what a rank does.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

from bench import script_data as data  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = HERE / "script_results.jsonl"
PREDICTIONS = HERE / "script_predictions.jsonl"
HOOKS = HERE / "script_hooks"
DEVICE = "H200"
STEPS = 8
"""Steps that are measured."""
WARM_STEPS = 3
"""Steps that are left out of the step time."""
BARE_FORWARD_S = 7.08e-6
"""Time of a bare operation on the calibrated host (h200.toml); `host` in the table is a multiple of it."""
PREPARED = ".prepared"
LONG_NAME = 34


@dataclass(frozen=True)
class ScriptCase:
    """A public script with the command that runs it."""

    id: str
    repository: str
    """Its folder among the checked-out repositories; `list` shows where it comes from."""
    folder: str
    """Where the command is run, inside the repository."""
    command: str
    """As its owner would type it."""
    prepare: tuple[Callable[[Path], None], ...] = ()
    """What writes the data, given the folder of the command."""
    copy: str = "."
    """The part of the repository that is copied for the case."""
    packages: tuple[str, ...] = ()
    """Packages that it needs beside torch, transformers, accelerate and their own."""
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    count: str = "optimizer"
    """What ends a step: optimizer, or backward where the script has no optimizer."""
    seconds: float = 240.0
    """Time limit of a measurement or a prediction."""
    steps: int = STEPS


ORIGINS = {
    "nanoGPT": "karpathy/nanoGPT",
    "minGPT": "karpathy/minGPT",
    "examples": "pytorch/examples",
    "examples-2024": "pytorch/examples at cd29c12 (the last commit with vision_transformer)",
    "transformers": "huggingface/transformers (examples/pytorch)",
    "accelerate": "huggingface/accelerate (examples)",
    "trl": "huggingface/trl",
    "diffusers": "huggingface/diffusers (examples)",
    "timm": "huggingface/pytorch-image-models",
    "vision": "pytorch/vision (references)",
    "pytorch-lightning": "Lightning-AI/pytorch-lightning (examples)",
    "PyTorch-GAN": "eriklindernoren/PyTorch-GAN",
    "cleanrl": "vwxyzjn/cleanrl",
    "SimCLR": "sthalles/SimCLR",
}
TENSORBOARD = ("tensorboard", "google", "absl")
DATASETS = ("datasets", "evaluate", "pyarrow", "pandas", "dill", "multiprocess", "xxhash")


def write_glue(folder: Path) -> None:
    """Write what the MRPC examples load by name."""
    data.write_bert(folder)
    data.write_pairs(folder)
    data.write_metric(folder, "glue")
    data.write_metric(folder, "accuracy")


def write_mnist_of_gans(folder: Path) -> None:
    """Write the digits where the scripts of PyTorch-GAN look for them."""
    data.write_digits(folder, "../../data/mnist")


def write_cifar_sets(folder: Path) -> None:
    """Write the images where SimCLR looks for them."""
    data.write_cifar(folder, "datasets")


def write_accuracy(folder: Path) -> None:
    """Write the metric that run_clm.py loads by name."""
    data.write_metric(folder, "accuracy")


def write_bleu(folder: Path) -> None:
    """Write the metric that run_translation.py loads by name."""
    data.write_metric(folder, "sacrebleu")


def write_seqeval(folder: Path) -> None:
    """Write the metric that run_ner.py loads by name."""
    data.write_metric(folder, "seqeval")


def _plain_cases() -> list[ScriptCase]:
    """Scripts with a loop of their own."""
    examples = "examples"
    return [
        ScriptCase(
            "nanogpt",
            "nanoGPT",
            ".",
            "python train.py --batch_size=12 --gradient_accumulation_steps=5 --eval_iters=4 --compile=False",
            (data.write_tokens,),
        ),
        ScriptCase(
            "nanogpt-compile",
            "nanoGPT",
            ".",
            "python train.py --batch_size=16 --gradient_accumulation_steps=4 --eval_iters=4",
            (data.write_tokens,),
            seconds=400,
        ),
        ScriptCase(
            "nanogpt-torchrun",
            "nanoGPT",
            ".",
            "torchrun --standalone --nproc_per_node=1 train.py --batch_size=24"
            " --gradient_accumulation_steps=2 --eval_iters=2 --compile=False --dtype=float16",
            (data.write_tokens,),
        ),
        ScriptCase(
            "mingpt-chargpt",
            "minGPT",
            ".",
            "python projects/chargpt/chargpt.py --data.block_size=256 --trainer.batch_size=128",
            (data.write_characters,),
            environment={"PYTHONPATH": "."},
            # It writes 500 characters with the model after its first step.
            seconds=400,
        ),
        ScriptCase(
            "imagenet-resnet50",
            examples,
            "imagenet",
            "python main.py -a resnet50 --dummy -b 128",
            copy="imagenet",
        ),
        ScriptCase(
            "word-lstm",
            examples,
            "word_language_model",
            "python main.py --accel --use-optimizer --emsize 650 --nhid 650 --dropout 0.5 --tied",
            (data.write_word_corpus,),
            copy="word_language_model",
        ),
        ScriptCase(
            "word-transformer",
            examples,
            "word_language_model",
            "python main.py --accel --use-optimizer --model Transformer --lr 5 --emsize 512 --nhid 2048"
            " --nhead 8 --nlayers 6 --batch_size 64 --bptt 128",
            (data.write_word_corpus,),
            copy="word_language_model",
        ),
        ScriptCase(
            "word-gru-no-optimizer",
            examples,
            "word_language_model",
            "python main.py --accel --model GRU --emsize 650 --nhid 650 --batch_size 40",
            (data.write_word_corpus,),
            copy="word_language_model",
            count="backward",
        ),
        ScriptCase(
            "vision-transformer",
            "examples-2024",
            "vision_transformer",
            "python main.py --batch-size 64",
            (data.write_cifar,),
            copy="vision_transformer",
            environment={"TRIMTAB_SCRIPT_STAND_IN": "cifar"},
        ),
        ScriptCase(
            "dcgan",
            examples,
            "dcgan",
            "python main.py --dataset fake --accel --batchSize 128",
            copy="dcgan",
        ),
        ScriptCase(
            "mnist", examples, "mnist", "python main.py --batch-size 512", (data.write_digits,), copy="mnist"
        ),
        ScriptCase(
            "vae",
            examples,
            "vae",
            "python main.py --batch-size 1024",
            (data.write_digits,),
            copy="vae",
        ),
        ScriptCase(
            "timm-vit",
            "timm",
            ".",
            "python train.py images --model vit_base_patch16_224 --batch-size 64 --amp --opt adamw --lr 1e-3"
            " --num-classes 10 --workers 4 --output output",
            (data.write_images,),
        ),
        ScriptCase(
            "timm-convnext-ema",
            "timm",
            ".",
            "python train.py images --model convnext_tiny --batch-size 64 --amp --amp-dtype bfloat16"
            " --opt lamb --model-ema --num-classes 10 --grad-accum-steps 2 --channels-last --workers 4",
            (data.write_images,),
        ),
        ScriptCase(
            "torchvision-resnet50",
            "vision",
            "references/classification",
            "torchrun --standalone --nproc_per_node=1 train.py --data-path images --model resnet50"
            " --batch-size 64 --workers 4 --amp --model-ema",
            (data.write_images,),
            copy="references",
        ),
    ]


def _research_cases() -> list[ScriptCase]:
    """Scripts of papers: several models, several optimizers, graphs, games, old calls."""
    gans = "implementations"
    return [
        ScriptCase("gat", "examples", "gat", "python main.py", (data.write_citations,), copy="gat"),
        ScriptCase(
            "siamese",
            "examples",
            "siamese_network",
            "python main.py --batch-size 128",
            (data.write_digits,),
            copy="siamese_network",
        ),
        ScriptCase(
            "cyclegan",
            "PyTorch-GAN",
            f"{gans}/cyclegan",
            "python cyclegan.py --n_epochs 2 --decay_epoch 1 --batch_size 2 --n_cpu 2",
            (data.write_two_styles,),
            copy=f"{gans}/cyclegan",
        ),
        ScriptCase(
            "wgan-gp",
            "PyTorch-GAN",
            f"{gans}/wgan_gp",
            "python wgan_gp.py --batch_size 512 --n_cpu 2",
            (write_mnist_of_gans,),
            copy=f"{gans}/wgan_gp",
        ),
        ScriptCase(
            "cleanrl-ppo",
            "cleanrl",
            ".",
            "python cleanrl/ppo.py --num-envs 64 --num-steps 32",
            copy="cleanrl",
            packages=("gymnasium", "tyro", *TENSORBOARD),
        ),
        ScriptCase(
            "simclr-fp16",
            "SimCLR",
            ".",
            "python run.py -data datasets -dataset-name cifar10 -b 256 -j 2 --fp16-precision",
            (write_cifar_sets,),
            packages=TENSORBOARD,
            environment={"TRIMTAB_SCRIPT_STAND_IN": "cifar"},
        ),
    ]


def _distributed_cases() -> list[ScriptCase]:
    """Scripts that torchrun or Accelerate starts.

    DistributedDataParallel and Accelerate on several ranks are not here: the reducer of DDP refuses the fake
    group on a GPU, so that a rank of several cannot be measured alone.
    """
    series = "distributed/ddp-tutorial-series"
    return [
        ScriptCase(
            "ddp-tutorial",
            "examples",
            series,
            "torchrun --standalone --nproc_per_node=1 multigpu_torchrun.py 50 10",
            copy=series,
        ),
        ScriptCase(
            "fsdp2",
            "examples",
            "distributed/FSDP2",
            "torchrun --standalone --nproc_per_node=2 example.py --mixed-precision",
            copy="distributed/FSDP2",
            ranks=2,
        ),
        ScriptCase(
            "accelerate-nlp",
            "accelerate",
            "examples",
            "accelerate launch nlp_example.py --mixed_precision bf16",
            (write_glue,),
            packages=DATASETS,
        ),
        ScriptCase(
            "accelerate-accumulation",
            "accelerate",
            "examples/by_feature",
            "accelerate launch gradient_accumulation.py --mixed_precision fp16"
            " --gradient_accumulation_steps 4",
            (write_glue,),
            packages=DATASETS,
        ),
    ]


def _framework_cases() -> list[ScriptCase]:
    """Scripts of transformers, TRL and Lightning."""
    root = "examples/pytorch"
    lightning = ("lightning",)
    return [
        ScriptCase(
            "transformers-clm",
            "transformers",
            f"{root}/language-modeling",
            "python run_clm.py --model_name_or_path gpt2 --train_file train.txt --validation_file"
            " validation.txt --per_device_train_batch_size 8 --do_train --do_eval --bf16"
            " --block_size 1024 --output_dir out",
            (data.write_gpt2, data.write_corpus, write_accuracy),
            copy=f"{root}/language-modeling",
            packages=DATASETS,
        ),
        ScriptCase(
            "transformers-glue",
            "transformers",
            f"{root}/text-classification",
            "python run_glue.py --model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval"
            " --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5"
            " --num_train_epochs 3 --output_dir out",
            (write_glue,),
            copy=f"{root}/text-classification",
            packages=DATASETS,
        ),
        ScriptCase(
            "trl-sft-lora",
            "trl",
            ".",
            "python trl/scripts/sft.py --model_name_or_path llama-1b --dtype bfloat16 --dataset_name chats"
            " --learning_rate 2.0e-4 --packing --max_length 1024 --per_device_train_batch_size 2"
            " --gradient_accumulation_steps 2 --gradient_checkpointing --use_peft --lora_r 32"
            " --lora_alpha 16 --output_dir out",
            (data.write_llama, data.write_chats),
            copy="trl",
            packages=(*DATASETS, "trl", "peft"),
        ),
        ScriptCase(
            "lightning-transformer",
            "pytorch-lightning",
            "examples/pytorch/basics",
            "python transformer.py",
            (data.write_wikitext_file,),
            copy="examples/pytorch/basics",
            packages=lightning,
        ),
        ScriptCase(
            "fabric-language-model",
            "pytorch-lightning",
            "examples/fabric/language_model",
            "python train.py",
            (data.write_wikitext_file,),
            copy="examples/fabric/language_model",
            packages=lightning,
        ),
    ]


def _hugging_face_cases() -> list[ScriptCase]:
    """More scripts of transformers, TRL and diffusers."""
    root = "examples/pytorch"
    images = "examples/text_to_image"
    diffusion = (data.write_diffusion, data.write_pictures)
    return [
        ScriptCase(
            "transformers-mlm",
            "transformers",
            f"{root}/language-modeling",
            "python run_mlm.py --model_name_or_path bert-base-cased --train_file train.txt"
            " --validation_file validation.txt --max_seq_length 256 --per_device_train_batch_size 16"
            " --gradient_accumulation_steps 4 --fp16 --do_train --output_dir out",
            (data.write_bert, data.write_corpus, write_accuracy),
            copy=f"{root}/language-modeling",
            packages=DATASETS,
        ),
        ScriptCase(
            "transformers-translation",
            "transformers",
            f"{root}/translation",
            "python run_translation.py --model_name_or_path t5-base --train_file train.json"
            " --validation_file validation.json --source_lang en --target_lang ro --source_prefix 'to ro: '"
            " --per_device_train_batch_size 16 --pad_to_max_length --max_source_length 128"
            " --max_target_length 128 --bf16 --gradient_checkpointing --predict_with_generate --do_train"
            " --output_dir out",
            (data.write_t5, data.write_translations, write_bleu),
            copy=f"{root}/translation",
            packages=DATASETS,
        ),
        ScriptCase(
            "transformers-ner-adafactor",
            "transformers",
            root,
            "python token-classification/run_ner.py --model_name_or_path ./bert-base-cased"
            " --train_file ./train.json --validation_file ./validation.json --optim adafactor"
            " --per_device_train_batch_size 32 --max_seq_length 128 --pad_to_max_length --do_train"
            " --output_dir out",
            (data.write_bert, data.write_tags, write_seqeval),
            copy=f"{root}/token-classification",
            packages=DATASETS,
        ),
        ScriptCase(
            "trl-dpo",
            "trl",
            ".",
            "python trl/scripts/dpo.py --model_name_or_path qwen-half-b --dataset_name preferences"
            " --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_length 512"
            " --learning_rate 5e-7 --output_dir out",
            (data.write_qwen, data.write_preferences),
            copy="trl",
            packages=(*DATASETS, "trl", "peft"),
        ),
        ScriptCase(
            "trl-grpo-lora",
            "trl",
            ".",
            "python trl/scripts/grpo.py --model_name_or_path qwen-half-b --dataset_name questions"
            " --reward_funcs think_format_reward --per_device_train_batch_size 8 --num_generations 8"
            " --max_completion_length 64 --use_peft --lora_r 16 --output_dir out",
            (data.write_qwen, data.write_questions),
            copy="trl",
            packages=(*DATASETS, "trl", "peft"),
            seconds=600,
        ),
        ScriptCase(
            "diffusers-lora",
            "diffusers",
            images,
            "accelerate launch train_text_to_image_lora.py --mixed_precision=fp16"
            " --pretrained_model_name_or_path=diffusion --train_data_dir=pictures --resolution=512"
            " --train_batch_size=4 --gradient_accumulation_steps=2 --max_train_steps=40 --output_dir=out",
            diffusion,
            copy=images,
            packages=(*DATASETS, "diffusers", "peft", "torchvision"),
        ),
        ScriptCase(
            "diffusers-ema",
            "diffusers",
            images,
            "accelerate launch train_text_to_image.py --pretrained_model_name_or_path=diffusion"
            " --train_data_dir=pictures --use_ema --resolution=256 --train_batch_size=8"
            " --gradient_checkpointing --max_train_steps=40 --output_dir=out",
            diffusion,
            copy=images,
            packages=(*DATASETS, "diffusers", "torchvision"),
        ),
    ]


def cases() -> list[ScriptCase]:
    """Return every case."""
    return [
        *_plain_cases(),
        *_research_cases(),
        *_distributed_cases(),
        *_framework_cases(),
        *_hugging_face_cases(),
    ]


def prepare(case: ScriptCase, repos: Path, work: Path) -> Path:
    """Copy the script's repository and write its data, unless that was done; return where to run it."""
    root = work / case.id
    folder = root / case.repository / case.folder
    if (root / PREPARED).exists():
        return folder
    shutil.rmtree(root, ignore_errors=True)
    source = repos / case.repository / case.copy
    if not source.is_dir():
        raise SystemExit(f"no {source}: check out {ORIGINS[case.repository]} there")
    shutil.copytree(source, root / case.repository / case.copy, ignore=shutil.ignore_patterns(".git"))
    for write in case.prepare:
        write(folder)
    (root / PREPARED).touch()
    return folder


def prepare_all(given: argparse.Namespace) -> None:
    """Prepare every case, several at a time."""
    chosen = [case for case in cases() if fnmatch.fnmatch(case.id, given.only)]
    with ProcessPoolExecutor(given.workers) as pool:
        waiting = {case.id: pool.submit(prepare, case, given.repos, given.work) for case in chosen}
        for name, future in waiting.items():
            error = future.exception()
            print(f"{name}: {error!r}" if error else future.result(), flush=True)


def rank_words(case: ScriptCase) -> list[str]:
    """Return the words that start one rank: the command without its launcher."""
    words = shlex.split(case.command)
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return [sys.executable, *words[script:]]


def build_environment(case: ScriptCase, packages: Path | None) -> dict[str, str]:
    """Return the environment of a case: hooks on PYTHONPATH, this Python first on PATH, no network."""
    own = case.environment.get("PYTHONPATH", "")
    paths = [own, str(HOOKS), os.environ.get("PYTHONPATH", "")]
    return (
        os.environ
        | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "HF_HUB_DISABLE_TELEMETRY": "1"}
        | case.environment
        | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        | ({} if packages is None else {"TRIMTAB_SCRIPT_PACKAGES": str(packages.resolve())})
    )


def run_words(
    words: list[str], folder: Path, environment: dict[str, str], seconds: float
) -> tuple[int, str, str]:
    """Run a command; return exit code, stdout and stderr. Stop all of its processes at the time limit."""
    with subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nno answer in {seconds:.0f} s"
        return process.returncode, out, err


def measure(case: ScriptCase, folder: Path, packages: Path | None) -> dict[str, Any]:
    """Run a case for real and return what its first steps needed."""
    file = folder / "measured.json"
    file.unlink(missing_ok=True)
    environment = build_environment(case, packages) | {
        "TRIMTAB_SCRIPT_MEASURE": str(file.resolve()),
        "TRIMTAB_SCRIPT_STEPS": str(case.steps),
        "TRIMTAB_SCRIPT_COUNT": case.count,
    }
    words = shlex.split(case.command)
    if case.ranks > 1:
        words = rank_words(case)
        environment |= {
            "TRIMTAB_SCRIPT_RANKS": str(case.ranks),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(case.ranks),
            "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
        }
    code, out, err = run_words(words, folder, environment, case.seconds)
    if not file.exists():
        return {"failed": (err or out).strip()[-1500:] or f"exit code {code}, and too few steps"}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return summarize(found) | {
        "machine": platform.machine(),
        "taken_on": datetime.now(UTC).date().isoformat(),
    }


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Add the peaks of all steps and the time of a warm step to what was measured."""
    steps = found["steps"]
    warm = steps[WARM_STEPS:] or steps
    peaks = {
        key: max(step[key] for step in steps)
        for key in ("allocated_bytes", "reserved_bytes", "used_bytes")
        if key in steps[0]
    }
    return {
        **peaks,
        "step_s": statistics.median(step["wall_s"] - step["loader_s"] for step in warm),
        "loader_s": statistics.median(step["loader_s"] for step in warm),
        **found,
    }


def predict(case: ScriptCase, folder: Path, packages: Path | None, device: str) -> dict[str, Any]:
    """Give the command of a case to `trimtab estimate` and return its answer."""
    on = device if case.ranks == 1 else f"{case.ranks}x{device}"
    words = [
        sys.executable,
        "-m",
        "trimtab",
        "estimate",
        "--json",
        "--on",
        on,
        "--",
        *shlex.split(case.command),
    ]
    environment = build_environment(case, packages)
    environment["PYTHONPATH"] += os.pathsep + str(HERE.parent / "src")
    code, out, err = run_words(words, folder, environment, case.seconds)
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        return {"failed": (err or out).strip()[-1500:] or f"exit code {code}"}
    if "allocated_bytes" not in found:
        return {"failed": json.dumps(found)[-1500:]}
    kept = ("allocated_bytes", "reserved_bytes", "process_bytes", "step_s", "phases", "assumptions")
    row = {key: found[key] for key in kept if key in found}
    # Without files and lines: their paths are those of one machine.
    return row | {"found": {fact["name"]: fact["value"] for fact in found["script"]["found"]}}


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by case; the last row of a case wins."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["id"]: row for row in rows}


def answer_all(given: argparse.Namespace) -> None:
    """Measure or predict every case that the file does not have yet, and append a row for each."""
    out: Path = given.out or (RESULTS if given.verb == "measure" else PREDICTIONS)
    done = {name for name, row in read_rows(out).items() if not row.get("failed")}
    began = time.monotonic()
    for case in cases():
        if case.id in done or not fnmatch.fnmatch(case.id, given.only):
            continue
        if time.monotonic() - began > given.seconds:
            print(f"time is over before {case.id}", flush=True)
            break
        started = time.monotonic()
        case = replace(case, seconds=min(case.seconds, given.limit))  # noqa: PLW2901
        folder = prepare(case, given.repos, given.work)
        prepared = time.monotonic()
        if given.verb == "measure":
            found = measure(case, folder, given.packages)
        else:
            found = predict(case, folder, given.packages, given.on)
        row = {"id": case.id, "command": case.command, "ranks": case.ranks, **found}
        row["took_s"] = round(time.monotonic() - prepared, 1)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {
            key: row[key]
            for key in ("allocated_bytes", "reserved_bytes", "step_s", "loader_s", "failed", "took_s")
            if key in row
        }
        print(f"{prepared - started:5.1f} s to prepare  {case.id}  {shown}", flush=True)


def of_training(guess: dict[str, Any], key: str) -> float | None:
    """Return a predicted figure of the training steps: those are measured, evaluation and saving are not."""
    peaks = [
        phase[key] for phase in guess.get("phases", ()) if phase["name"].endswith(" step") and key in phase
    ]
    return max(peaks) if peaks else guess.get(key)


def compare(results: Path, predictions: Path, only: str) -> None:
    """Print each prediction's error, and the medians and worsts."""
    measured, predicted = read_rows(results), read_rows(predictions)
    errors: dict[str, list[float]] = {}
    print(
        f"{'script':{LONG_NAME}} {'measured':>11} {'allocated':>10} {'reserved':>9} {'step time':>10}  host"
    )
    for case in cases():
        row, guess = measured.get(case.id), predicted.get(case.id)
        if row is None or guess is None or not fnmatch.fnmatch(case.id, only):
            continue
        failed = [
            f"not {verb}" for verb, line in (("measured", row), ("predicted", guess)) if "failed" in line
        ]
        if failed:
            print(f"{case.id:{LONG_NAME}} {', '.join(failed)}")
            continue
        words = [f"{row['allocated_bytes'] / 2**30:7.2f} GiB"]
        for key, width in (("allocated_bytes", 10), ("reserved_bytes", 9), ("step_s", 10)):
            expected = of_training(guess, key)
            if not row.get(key) or not expected:
                words.append(f"{'-':>{width}}")
                continue
            error = expected / row[key] - 1
            errors.setdefault(key, []).append(error)
            words.append(f"{error:>+{width}.1%}")
        if row.get("host_forward_s"):
            words.append(f"{row['host_forward_s'] / BARE_FORWARD_S:5.2f}")
        print(f"{case.id:{LONG_NAME}} {' '.join(words)}")
    for key, values in errors.items():
        sizes = [abs(value) for value in values]
        print(f"{key}: {len(values)} scripts, median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=["list", "prepare", "predict", "measure", "compare"])
    parser.add_argument("--repos", type=Path, default=Path("repos"))
    parser.add_argument("--work", type=Path, default=Path("script-work"))
    parser.add_argument("--packages", type=Path, help="folder of packages that are not installed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--on", default=DEVICE)
    parser.add_argument("--only", default="*")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case after so many seconds")
    parser.add_argument("--limit", type=float, default=3600.0, help="time limit of each case in seconds")
    parser.add_argument("--workers", type=int, default=1, help="cases to prepare at the same time")
    given = parser.parse_args()
    given.repos, given.work = given.repos.resolve(), given.work.resolve()
    if given.verb == "list":
        for case in cases():
            print(f"{case.id:{LONG_NAME}} {ORIGINS[case.repository]}\n    cd {case.folder} && {case.command}")
    elif given.verb == "prepare":
        prepare_all(given)
    elif given.verb == "compare":
        compare(given.results, given.predictions, given.only)
    else:
        answer_all(given)


if __name__ == "__main__":
    main()
