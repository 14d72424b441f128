"""Knobs of training commands: which options set the batch size and the like, and how they are set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from script_commands import SCRIPTS, make_command
from trimtab.errors import UnknownName, WrongUse
from trimtab.scripts.knob_values import BatchSplit, read_split, read_word, write_setting, write_values
from trimtab.scripts.knobs import KnobSet, find_knobs, load_knob_table, select_knobs
from trimtab.scripts.sources import read_sources
from trimtab.spec import Mesh, Precision, Recompute, Setting, Strategy

if TYPE_CHECKING:
    from pathlib import Path


def knobs_of(script: str, text: str) -> KnobSet:
    return find_knobs(make_command(text), {"train.py": SCRIPTS[script]} if script else {})


def setting(micro: int, rounds: int = 1, ranks: int = 1, **fields: object) -> Setting:
    return Setting(
        strategy=Strategy.DDP if ranks > 1 else Strategy.SINGLE,
        mesh=Mesh(dp_replicate=ranks),
        micro_batch=micro,
        accumulation=rounds,
        global_batch=micro * rounds * ranks,
        **fields,  # type: ignore[arg-type]
    )


FOUND = [
    # script, command, micro-batch and accumulation, precision, recompute and compile
    ("imagenet", "python train.py --dummy", (256, 1), (None, None, None)),
    ("imagenet", "python train.py -b 64", (64, 1), (None, None, None)),
    ("imagenet", "python train.py -b64", (64, 1), (None, None, None)),
    ("imagenet", "torchrun --nproc-per-node 4 train.py --batch-size=64", (16, 1), (None, None, None)),
    ("words", "python train.py --batch_size 40 --eval_batch_size 7", (40, 1), (None, None, None)),
    ("nano", "python train.py", (12, 40), (None, None, "true")),
    (
        "nano",
        "torchrun --nproc_per_node=8 train.py --batch_size=4 --compile=False",
        (4, 5),
        (None, None, "false"),
    ),
    ("nano", "python train.py config/small.py --dtype=float16", (12, 40), ("fp16", None, "true")),
    ("trainer", "python train.py --bf16", (8, 1), ("bf16", "none", "false")),
    ("trainer", "python train.py --bf16 True --tf32 True", (8, 1), ("bf16", "none", "false")),
    ("trainer", "python train.py --tf32 true", (8, 1), ("tf32", "none", "false")),
    ("trainer", "python train.py --fp16 --gradient-checkpointing", (8, 1), ("fp16", "full", "false")),
    ("", "python train.py --per_device_train_batch_size 2", (2, 1), ("fp32", "none", "false")),
    ("accelerate", "accelerate launch train.py --mixed_precision bf16", (8, 1), ("bf16", "none", None)),
    (
        "accelerate",
        "accelerate launch --num_processes 4 --mixed_precision fp16 train.py --gradient_checkpointing",
        (8, 1),
        ("fp16", "full", None),
    ),
    (
        "lightning",
        "python train.py fit --data.batch_size 16 --trainer.precision bf16-mixed",
        (16, 1),
        ("bf16", None, None),
    ),
    (
        "lightning",
        "python train.py fit --data.batch_size=16 --trainer.accumulate_grad_batches=4",
        (16, 4),
        ("fp32", None, None),
    ),
    ("timm", "python train.py -b 32 --grad-accum-steps 4 --amp", (32, 4), ("fp16", "none", None)),
    (
        "timm",
        "python train.py --amp --amp-dtype bfloat16 --grad-checkpointing",
        (128, 1),
        ("bf16", "full", None),
    ),
    ("click", "python train.py --amp", (32, 1), ("bf16", None, "true")),
    ("click", "python train.py --no-amp --no-compile", (32, 1), ("fp32", None, "false")),
    ("typer", "python train.py data --accumulate 8", (16, 8), ("bf16", None, "false")),
    ("typer", "python train.py data --no-bf16 --compile", (16, 2), ("fp32", None, "true")),
    ("fire", "python train.py --micro_batch_size=2", (2, 64), (None, None, None)),
    ("fire", "torchrun --nproc-per-node 2 train.py --batch_size 64", (4, 8), (None, None, None)),
    ("tyro", "python train.py --batch-size 3", (3, 1), (None, None, "false")),
    ("boolean", "python train.py --bs 5 --accum-iter 2 --no-bf16", (5, 2), ("fp32", "none", None)),
    ("environment", "BATCH_SIZE=2 python train.py", (2, 4), (None, None, None)),
    ("environment", "python train.py", (8, 4), (None, None, None)),
    ("global", "torchrun --nproc-per-node 8 train.py --precision amp_bf16", (8, 8), ("bf16", "none", None)),
    ("mingpt", "python train.py --trainer.batch_size=16", (16, 1), (None, None, None)),
    (
        "",
        "python train.py train.batch_size=16 trainer.accumulate_grad_batches=2",
        (16, 2),
        (None, None, None),
    ),
    ("", "python train.py --batch-size 4 --lr 3e-4", (4, 1), (None, None, None)),
    ("", "BATCH=4 python train.py", (4, 1), (None, None, None)),
    ("constants", "python train.py", (None, 1), (None, None, None)),
    ("", "python train.py", (None, 1), (None, None, None)),
]


@pytest.mark.parametrize(("script", "text", "split", "words"), FOUND)
def test_the_values_of_a_command_are_read(
    script: str, text: str, split: tuple[int | None, int], words: tuple[str | None, ...]
) -> None:
    knobs = knobs_of(script, text)
    assert read_split(knobs) == split
    assert tuple(read_word(knobs, field) for field in ("precision", "recompute", "compile")) == words


SEEN = {"precision": "fp32", "recompute": "none", "compile": "false"}
"""What a run of a script shows that has no option for these."""

WRITTEN = [
    ("imagenet", "python train.py -b 256 --dummy", setting(64), "python train.py -b 64 --dummy"),
    ("imagenet", "python train.py --dummy", setting(64), "python train.py --dummy --batch-size 64"),
    ("imagenet", "python train.py -b256", setting(64), "python train.py -b64"),
    (
        "imagenet",
        "torchrun --nproc-per-node 4 train.py",
        setting(32, 1, 4),
        "torchrun --nproc-per-node 4 train.py --batch-size 128",
    ),
    (
        "nano",
        "torchrun --nproc_per_node=8 train.py --batch_size=12",
        setting(6, 10, 8, precision=Precision.FP16, compile=False),
        (
            "torchrun --nproc_per_node=8 train.py --batch_size=6 --gradient_accumulation_steps=80 "
            "--dtype=float16 --compile=False"
        ),
    ),
    (
        "nano",
        "torchrun --nproc_per_node=8 train.py",
        setting(12, 10, 4, precision=Precision.BF16, compile=True),
        "torchrun --nproc_per_node=4 train.py --dtype=bfloat16",
    ),
    (
        "trainer",
        "python train.py --fp16 --per_device_train_batch_size 8",
        setting(2, 4, precision=Precision.BF16, recompute=Recompute.FULL),
        (
            "python train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
            "--bf16 --gradient_checkpointing"
        ),
    ),
    (
        "trainer",
        "python train.py --bf16 True --torch_compile",
        setting(8, precision=Precision.TF32),
        "python train.py --tf32 true",
    ),
    (
        "accelerate",
        "accelerate launch --num_processes 8 --mixed_precision=no train.py",
        setting(4, 4, 4, precision=Precision.BF16),
        (
            "accelerate launch --num_processes 4 --mixed_precision=bf16 train.py "
            "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --mixed_precision bf16"
        ),
    ),
    (
        "lightning",
        "python train.py fit --data.batch_size 16",
        setting(8, 2, precision=Precision.BF16),
        (
            "python train.py fit --data.batch_size 8 --trainer.accumulate_grad_batches 2 "
            "--trainer.precision bf16-mixed"
        ),
    ),
    (
        "timm",
        "python train.py -b 128",
        setting(64, 2, precision=Precision.BF16, recompute=Recompute.FULL),
        "python train.py -b 64 --grad-accum-steps 2 --amp --amp-dtype bfloat16 --grad-checkpointing",
    ),
    ("timm", "python train.py --amp -b 128", setting(128), "python train.py -b 128"),
    (
        "click",
        "python train.py --no-amp",
        setting(16, precision=Precision.BF16),
        "python train.py --amp --batch-size 16 --no-compile",
    ),
    (
        "typer",
        "python train.py data",
        setting(4, 8, precision=Precision.FP32, compile=True),
        "python train.py data --batch-size 4 --accumulate 8 --no-bf16 --compile",
    ),
    ("fire", "python train.py", setting(2, 64), "python train.py --micro_batch_size=2"),
    (
        "boolean",
        "python train.py --use-checkpoint-activations=1",
        setting(64, precision=Precision.BF16),
        "python train.py --use-checkpoint-activations=0",
    ),
    (
        "boolean",
        "python train.py",
        setting(32, 2, precision=Precision.BF16, recompute=Recompute.FULL),
        "python train.py --bs 32 --accum-iter 2 --use-checkpoint-activations True",
    ),
    (
        "environment",
        "BATCH_SIZE=8 python train.py x",
        setting(4, 8),
        "GRAD_ACCUM=8 BATCH_SIZE=4 python train.py x",
    ),
    (
        "global",
        "python train.py --micro-batch-size 64",
        setting(16, 32, precision=Precision.BF16, recompute=Recompute.SELECTIVE),
        "python train.py --micro-batch-size 16 --precision amp_bf16 --recompute selective",
    ),
    ("mingpt", "python train.py", setting(8), "python train.py --trainer.batch_size=8"),
    ("", "python train.py train.batch_size=16 x=1", setting(8), "python train.py train.batch_size=8 x=1"),
    ("", "python train.py --bs 4 --bs 8", setting(2), "python train.py --bs 2"),
]


@pytest.mark.parametrize(("script", "text", "choice", "expected"), WRITTEN)
def test_a_setting_is_written_into_the_command(
    script: str, text: str, choice: Setting, expected: str
) -> None:
    command = make_command(text)
    knobs = knobs_of(script, text).replace(observed=SEEN)
    changed, notes = write_setting(command, knobs, choice)
    assert " ".join(changed.words) == expected
    assert changed.words[len(changed.words) - len(changed.arguments) :] == changed.arguments
    assert bool(notes) == (changed.words != command.words)
    again = find_knobs(make_command(" ".join(changed.words)), {"train.py": SCRIPTS[script]} if script else {})
    assert read_split(again) == BatchSplit(choice.micro_batch, choice.accumulation)


@pytest.mark.parametrize(
    ("script", "text"),
    [(script, text) for script, text, split, _ in FOUND if split[0]],
)
def test_the_setting_of_a_command_leaves_it_alone(script: str, text: str) -> None:
    command, knobs = make_command(text), knobs_of(script, text)
    split = read_split(knobs)
    assert split.micro_batch is not None
    assert split.accumulation is not None
    choice = setting(
        split.micro_batch,
        split.accumulation,
        command.world_size,
        precision=Precision(read_word(knobs, "precision") or "fp32"),
        recompute=Recompute(read_word(knobs, "recompute") or "none"),
        compile=read_word(knobs, "compile") == "true",
    )
    seen = {"precision": choice.precision.value, "recompute": "none", "compile": "false"}
    changed, notes = write_setting(command, knobs.replace(observed=seen), choice)
    assert changed == command
    assert notes == ()


@pytest.mark.parametrize(
    ("script", "text", "choice", "given", "found"),
    [
        (
            "imagenet",
            "python train.py",
            setting(64, 4),
            "accumulation 4",
            "no option for gradient accumulation",
        ),
        ("constants", "python train.py", setting(8), "micro-batch 8", "BATCH_SIZE = 64 in train.py:2"),
        ("imagenet", "python train.py", setting(64, precision=Precision.BF16), "precision bf16", "no option"),
        (
            "click",
            "python train.py",
            setting(32, precision=Precision.FP16),
            "precision fp16",
            "--amp cannot say",
        ),
        ("words", "python train.py", setting(20, recompute=Recompute.FULL), "recompute full", "no option"),
        ("words", "python train.py", setting(20, 1, 2), "2 processes", "starts 1"),
    ],
)
def test_what_no_option_can_say_is_refused(
    script: str, text: str, choice: Setting, given: str, found: str
) -> None:
    knobs = knobs_of(script, text)
    with pytest.raises(WrongUse) as raised:
        write_setting(make_command(text), knobs.replace(observed=SEEN), choice)
    assert raised.value.given == given
    assert found in raised.value.found


def test_a_setting_with_unequal_micro_batches_is_refused() -> None:
    uneven = setting(3, 3).replace(global_batch=8)
    with pytest.raises(WrongUse, match="equal micro-batches"):
        write_setting(make_command("python train.py"), knobs_of("timm", "python train.py"), uneven)


@pytest.mark.parametrize(
    ("script", "field", "note"),
    [
        ("imagenet", "round_batch", "by its help text ('total')"),
        ("nano", "total_accumulation", "train.py:9 divides it"),
        ("fire", "global_batch", "since the script has a micro-batch option too"),
    ],
)
def test_what_a_name_was_taken_for_is_said(script: str, field: str, note: str) -> None:
    knobs = knobs_of(script, "python train.py")
    assert knobs.of(field)
    assert any(note in text for text in knobs.notes)


def test_a_batch_that_the_source_divides_is_of_all_gpus() -> None:
    source = SCRIPTS["words"] + "per_gpu = args.batch_size // dist.get_world_size()\n"
    knobs = find_knobs(make_command("torchrun --nproc-per-node 4 train.py"), {"train.py": source})
    assert read_split(knobs) == BatchSplit(5, 1)
    source = SCRIPTS["words"] + "half = args.batch_size // 2\n"
    knobs = find_knobs(make_command("torchrun --nproc-per-node 4 train.py"), {"train.py": source})
    assert read_split(knobs) == BatchSplit(20, 1)


@pytest.mark.parametrize(
    ("script", "text", "vary", "varied", "values"),
    [
        (
            "trainer",
            "python train.py",
            ["--per_device_train_batch_size"],
            ["--per_device_train_batch_size"],
            [()],
        ),
        ("boolean", "python train.py", ["--bs=8,16"], ["--bs"], [("8", "16")]),
        ("boolean", "python train.py", ["--recompute-depth=0,2"], ["--recompute-depth"], [("0", "2")]),
        ("", "python train.py --foo 3", ["--foo=1,2"], ["--foo"], [("1", "2")]),
        ("", "N=3 python train.py", ["N=8,16,32"], ["N"], [("8", "16", "32")]),
        ("", "python train.py", ["SIZE=8"], ["SIZE"], [("8",)]),
        (
            "nano",
            "python train.py",
            ["dtype=float16", "--batch_size"],
            ["--batch_size", "--dtype"],
            [(), ("float16",)],
        ),
        ("imagenet", "python train.py", ["--dummy"], ["--dummy"], [("false", "true")]),
    ],
)
def test_vary_names_what_may_change(
    script: str, text: str, vary: list[str], varied: list[str], values: list[tuple[str, ...]]
) -> None:
    chosen = select_knobs(knobs_of(script, text), make_command(text), vary)
    assert list(chosen.varied or ()) == varied
    by_name = {knob.name: knob for knob in chosen.knobs}
    if script != "imagenet":
        assert [by_name[name].values for name in varied] == values


def test_an_option_that_vary_names_first_is_the_batch_size() -> None:
    text = "python train.py --n-rows 32"
    chosen = select_knobs(knobs_of("", text), make_command(text), ["--n-rows"])
    assert read_split(chosen) == BatchSplit(32, 1)
    assert any("taken as samples of one process" in note for note in chosen.notes)
    changed, _ = write_setting(
        make_command(text),
        chosen.replace(observed=SEEN),
        setting(8),
    )
    assert changed.arguments == ("--n-rows", "8")


@pytest.mark.parametrize(
    ("script", "text", "vary", "error", "found"),
    [
        ("imagenet", "python train.py", ["--batch-sise"], UnknownName, "the nearest are --batch-size"),
        ("imagenet", "python train.py", ["--batch-size=8,many"], WrongUse, "many is no whole number"),
        ("imagenet", "python train.py", ["--batch-size=0"], WrongUse, "0 is no whole number"),
        ("imagenet", "python train.py", ["--batch-size="], WrongUse, "no value follows"),
        ("imagenet", "python train.py", ["-b", "--batch-size=8"], WrongUse, "given twice"),
        ("imagenet", "python train.py", ["--world-size"], WrongUse, "not known what it sets"),
        ("imagenet", "python train.py", [""], UnknownName, "no such option"),
        ("global", "python train.py", ["--precision=fp8"], WrongUse, "fp8 is none of fp32, amp_fp16"),
        ("nano", "python train.py", ["--dtype=int8"], WrongUse, "does not take int8"),
        ("", "python train.py --name x", ["--name"], WrongUse, "not known what it sets"),
    ],
)
def test_what_vary_cannot_mean_is_refused(
    script: str, text: str, vary: list[str], error: type[Exception], found: str
) -> None:
    with pytest.raises(error) as raised:
        select_knobs(knobs_of(script, text), make_command(text), vary)
    assert found in str(raised.value)


def test_values_of_any_option_can_be_written() -> None:
    text = "python train.py --depth=3 --fast"
    command = make_command(text)
    chosen = select_knobs(find_knobs(command), command, ["--depth=4,5", "--fast"])
    changed, notes = write_values(command, chosen, {"--depth": "5", "--fast": "false"})
    assert changed.arguments == ("--depth=5",)
    assert notes == ("--depth=5 instead of --depth=3", "without --fast")


def test_a_script_that_is_not_python_has_the_options_of_its_command_line() -> None:
    knobs = find_knobs(make_command("python train.py --batch-size 4"), {"train.py": "def ("})
    assert read_split(knobs) == BatchSplit(4, 1)


def test_files_beside_the_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "train.py").write_text("from . import flags\nimport torch, helpers\n")
    (tmp_path / "pack" / "flags.py").write_text("p.add_argument('--batch-size', type=int, default=3)\n")
    (tmp_path / "helpers.py").write_text("x = 1\n")
    command = make_command("python train.py").replace(target="pack.train", is_module=True)
    sources = read_sources(command, tmp_path)
    assert next(iter(sources)) == "pack/train.py"
    assert set(sources) == {"pack/train.py", "pack/flags.py", "helpers.py"}
    assert read_split(find_knobs(command, sources)) == BatchSplit(3, 1)
    assert read_sources(command.replace(target="nothing.here"), tmp_path) == {}


def test_a_hydra_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "train.py").write_text(
        'import hydra\n@hydra.main(config_path="conf", config_name="base")\ndef main(cfg): ...\n'
    )
    (tmp_path / "conf" / "base.yaml").write_text("data:\n  batch_size: 24\ntrainer:\n  precision: 32-true\n")
    command = make_command("python train.py lr=1")
    knobs = find_knobs(command, read_sources(command, tmp_path))
    assert read_split(knobs) == BatchSplit(24, 1)
    changed, _ = write_setting(
        command,
        knobs.replace(observed=SEEN),
        setting(12, precision=Precision.BF16),
    )
    assert changed.arguments == ("lr=1", "data.batch_size=12", "trainer.precision=bf16-mixed")


def test_each_name_has_one_meaning() -> None:
    names = [name for row in load_knob_table().knob for name in row.names]
    assert sorted(names) == sorted(set(names))
