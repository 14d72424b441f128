"""A training command is taken apart as its launcher would, put together again, or refused with advice."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import WrongUse
from trimtab.launching.launcher_options import (
    ACCELERATE_FLAGS,
    ACCELERATE_VALUED,
    TORCHRUN_FLAGS,
    TORCHRUN_VALUED,
    VALUED_FAMILIES,
)
from trimtab.scripts.command import (
    can_import_trimtab,
    format_command,
    launcher_environment,
    parse_command,
    set_processes,
    with_arguments,
    with_environment,
)
from trimtab.version import VERSION

if TYPE_CHECKING:
    from trimtab.spec.script import ScriptCommand

BIN = Path(sys.prefix) / "bin"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a few files; the working directory."""
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    for name in ("train.py", "pkg/__main__.py", "run.sh", "notes.ipynb"):
        (project / name).write_text("", encoding="utf-8")
    monkeypatch.chdir(project)
    return project


def environment(**more: str) -> dict[str, str]:
    return {"PATH": f"{BIN}:{os.defpath}", "HOME": os.devnull, **more}


def parse(line: str, **more: str) -> ScriptCommand:
    return parse_command(shlex.split(line), environment=environment(**more))


def add_program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("line", "options", "target", "arguments"),
    [
        ("python train.py", (), "train.py", ()),
        ("python3 train.py --lr 1e-3 -- x", (), "train.py", ("--lr", "1e-3", "--", "x")),
        (f"{BIN}/python3 -u train.py -u", ("-u",), "train.py", ("-u",)),
        (
            "python -uO -W ignore -X dev train.py -m",
            ("-uO", "-W", "ignore", "-X", "dev"),
            "train.py",
            ("-m",),
        ),
        ("python -Wignore -Xdev -OO train.py", ("-Wignore", "-Xdev", "-OO"), "train.py", ()),
        ("python -uW ignore train.py", ("-uW", "ignore"), "train.py", ()),
        (
            "python --check-hash-based-pycs never train.py",
            ("--check-hash-based-pycs", "never"),
            "train.py",
            (),
        ),
        ("time python ./train.py a=1", (), "./train.py", ("a=1",)),
    ],
)
def test_python_with_a_file(
    line: str, options: tuple[str, ...], target: str, arguments: tuple[str, ...]
) -> None:
    command = parse(line)
    assert (command.launcher, command.is_module, command.world_size) == ("python", False, 1)
    assert (command.interpreter_options, command.target, command.arguments) == (options, target, arguments)
    assert Path(command.interpreter).parent == BIN
    assert launcher_environment(command) == {}


@pytest.mark.parametrize(
    "line", ["python -m pkg.train --x 1", "python -mpkg.train --x 1", "python -um pkg.train --x 1"]
)
def test_python_with_a_module(line: str) -> None:
    command = parse(line)
    assert (command.launcher, command.target, command.is_module) == ("python", "pkg.train", True)
    assert command.arguments == ("--x", "1")
    assert command.interpreter_options == (("-u",) if "-um" in line else ())


def test_variables_before_the_command_and_env() -> None:
    command = parse("A=1 env B='x y' C= python train.py D=4")
    assert command.environment == {"A": "1", "B": "x y", "C": ""}
    assert command.arguments == ("D=4",)
    command = parse("/usr/bin/env -u HOME A=1 python train.py")
    assert command.environment == {"A": "1"}
    assert "HOME stays" in command.notes[0]


@pytest.mark.parametrize(
    ("line", "dropped"),
    [
        ("nohup python train.py", "nohup"),
        ("nice -n 10 python train.py", "nice -n 10"),
        ("nice -10 python train.py", "nice -10"),
        ("time -p nice python train.py", "time -p"),
        ("timeout -k 5 10m python train.py", "timeout -k 5 10m"),
        ("taskset -c 0-3 python train.py", "taskset -c 0-3"),
        ("stdbuf -oL python train.py", "stdbuf -oL"),
        ("numactl -N 0 --membind=0 python train.py", "numactl -N 0 --membind=0"),
        (
            "srun --gres=gpu:1 --mem 40G -t 1:00:00 --pty python train.py",
            "srun --gres=gpu:1 --mem 40G -t 1:00:00 --pty",
        ),
        ("uv run --with einops --no-sync python train.py", "uv run --with einops --no-sync"),
        ("uv --quiet run -- python train.py", "uv --quiet run --"),
        ("poetry run python train.py", "poetry run"),
        ("conda run -n torch --no-capture-output python train.py", "conda run -n torch --no-capture-output"),
    ],
)
def test_a_prefix_is_left_out_with_a_note(line: str, dropped: str) -> None:
    command = parse(line)
    assert (command.launcher, command.target, command.arguments) == ("python", "train.py", ())
    assert f"`{dropped}` is left out: trimtab starts the command itself" in command.notes
    assert format_command(command) == line


def test_uv_runs_the_python_of_the_project(folder: Path) -> None:
    own = folder / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    for line in ("uv run python train.py", "uv run train.py", "uv run torchrun train.py"):
        assert parse(line).interpreter == str(own)
    command = parse("uv run -m pkg.train --x")
    assert (command.target, command.is_module, command.arguments) == ("pkg.train", True, ("--x",))
    assert command.interpreter == str(own)


def test_conda_run_uses_the_python_of_the_named_environment(folder: Path) -> None:
    python = folder / "conda" / "envs" / "torch" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    command = parse("conda run -n torch python train.py", CONDA_EXE=str(folder / "conda" / "bin" / "conda"))
    assert command.interpreter == str(python)


@pytest.mark.parametrize(
    ("line", "processes", "nodes"),
    [
        ("torchrun train.py", 1, 1),
        ("torchrun --nproc-per-node 8 train.py", 8, 1),
        ("torchrun --nproc_per_node=4 --nnodes=2 --rdzv-backend c10d train.py", 4, 2),
        ("torchrun --standalone --nproc-per 2 train.py", 2, 1),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 train.py", 8, 1),
        ("torchrun -t 3 -r3 --nproc-per-node 2 train.py", 2, 1),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", 2, 1),
        ("srun -N 2 -n 2 torchrun --nnodes 2 --nproc-per-node 8 train.py", 8, 2),
        ("CUDA_VISIBLE_DEVICES=0,3 torchrun --nproc-per-node gpu train.py", 2, 1),
    ],
)
def test_torchrun(line: str, processes: int, nodes: int) -> None:
    command = parse(line + " --lr 1 --nproc-per-node 99")
    assert (command.launcher, command.target) == ("torchrun", "train.py")
    assert command.arguments == ("--lr", "1", "--nproc-per-node", "99")
    assert (command.processes, command.nodes, command.processes_follow_gpus) == (processes, nodes, False)
    variables = launcher_environment(command)
    assert variables["WORLD_SIZE"] == str(processes * nodes)
    assert (variables["RANK"], variables["LOCAL_RANK"]) == ("0", "0")
    assert any("1:4" in note for note in command.notes) == ("1:4" in line)


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("torchrun --nproc-per-node 8 -m pkg.train -- --x 1", ("--x", "1")),
        ("torchrun train.py -- --x -- y", ("--x", "--", "y")),
        ("torchrun -- train.py -- --x", ("--", "--x")),
        ("torchrun train.py --x -- y", ("--x", "--", "y")),
        ("accelerate launch train.py -- --x", ("--x",)),
        ("python train.py -- --x", ("--", "--x")),
    ],
)
def test_two_dashes_behind_the_script_are_the_launchers(line: str, arguments: tuple[str, ...]) -> None:
    command = parse(line)
    assert command.arguments == arguments
    # What the user types again keeps its two dashes.
    assert format_command(with_arguments(command, (*arguments, "--y"))) == f"{line} --y"


def test_torchrun_with_a_module_and_with_gpus_counted_later() -> None:
    command = parse("torchrun --nproc-per-node gpu -m pkg.train --x")
    assert (command.target, command.is_module, command.arguments) == ("pkg.train", True, ("--x",))
    assert command.processes_follow_gpus
    assert set_processes(command, 4).world_size == 4
    assert set_processes(parse("torchrun --nproc-per-node 2 train.py"), 4).world_size == 2
    assert parse("torchrun train.py", PET_NPROC_PER_NODE="3", PET_NNODES="2").world_size == 6
    command = parse("torchrun --nproc-per-node 2 --no-python python -u train.py --x")
    assert (command.launcher, command.target, command.arguments) == ("torchrun", "train.py", ("--x",))
    assert command.interpreter_options == ("-u",)


def test_the_old_launcher_adds_the_rank_to_the_arguments() -> None:
    assert parse("python -m torch.distributed.launch --nproc_per_node 2 train.py").added_arguments == (
        "--local-rank=0",
    )
    assert parse("python -m torch.distributed.launch --use_env train.py").added_arguments == ()
    assert parse("torchrun train.py").added_arguments == ()


def test_an_unknown_option_of_a_launcher_is_noted() -> None:
    command = parse("torchrun --brand-new train.py --x")
    assert (command.target, command.arguments) == ("train.py", ("--x",))
    assert "does not know" in command.notes[-1]


def test_the_tables_agree_with_the_launchers_own_parsers() -> None:
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.launch import parse_args  # noqa: F401 - --use-env is added in it
    from torch.distributed.run import get_args_parser

    for parser, flags, valued in (
        (get_args_parser(), TORCHRUN_FLAGS, TORCHRUN_VALUED),
        (launch_command_parser(), ACCELERATE_FLAGS, ACCELERATE_VALUED),
    ):
        for action in parser._actions:  # noqa: SLF001 - argparse has no public list
            for spelling in action.option_strings:
                name = spelling.replace("_", "-")
                if action.nargs == 0:
                    assert name in flags, name
                else:
                    assert name in valued or (name.startswith(VALUED_FAMILIES) and name not in flags), name


@pytest.mark.parametrize(
    ("line", "processes", "nodes"),
    [
        ("accelerate launch --num_processes 4 train.py", 4, 1),
        ("accelerate launch --num-processes=8 --num_machines 2 --multi_gpu train.py", 4, 2),
        ("accelerate-launch --use_fsdp --fsdp_version 2 --num_processes 2 train.py", 2, 1),
        ("python -m accelerate.commands.launch --num_processes 1 train.py", 1, 1),
        ("accelerate launch --gpu_ids 0,1 train.py", 2, 1),
    ],
)
def test_accelerate(line: str, processes: int, nodes: int) -> None:
    command = parse(line + " --lr 1")
    assert (command.launcher, command.target, command.arguments) == ("accelerate", "train.py", ("--lr", "1"))
    assert (command.processes, command.nodes, command.processes_follow_gpus) == (processes, nodes, False)


def write_config(folder: Path, **values: Any) -> Path:
    file = folder / "accelerate" / "default_config.yaml"
    file.parent.mkdir(exist_ok=True)
    content = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False, **values}
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_accelerate_without_numbers_takes_all_gpus_or_its_config(folder: Path) -> None:
    assert parse("accelerate launch train.py").processes_follow_gpus
    file = write_config(folder, distributed_type="FSDP", num_processes=8, num_machines=2)
    command = parse("accelerate launch train.py", HF_HOME=str(folder))
    assert (command.processes, command.nodes, command.processes_follow_gpus) == (4, 2, False)
    assert str(file) in command.notes[-1]
    assert parse(f"accelerate launch --config_file {file} --num_processes 4 train.py").processes == 2
    write_config(folder, distributed_type="NO", num_processes=8)
    assert parse("accelerate launch train.py", HF_HOME=str(folder)).processes == 1


@pytest.mark.slow
def test_accelerate_turns_its_flags_into_variables(folder: Path) -> None:
    """In a process of its own: accelerate changes the environment as it is imported."""
    line = "accelerate launch --num_processes 4 --mixed_precision bf16 --dynamo_backend inductor train.py --x"
    file = write_config(
        folder / "..",
        distributed_type="FSDP",
        num_processes=2,
        num_machines=1,
        mixed_precision="bf16",
        fsdp_config={"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    )
    lines = (
        line,
        f"accelerate launch --config_file {file} train.py",
        "accelerate launch --num_processes 1 train.py",
    )
    program = (
        "import json, os, sys\n"
        "from trimtab.scripts.command import launcher_environment\n"
        "from trimtab.spec.script import ScriptCommand\n"
        "commands = [ScriptCommand.from_json(text) for text in json.load(sys.stdin)]\n"
        "print(json.dumps([launcher_environment(command) for command in commands]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([parse(line).to_json() for line in lines]),
        env=environment(HF_HOME=str(folder / "none"), PYTHONWARNINGS="error::UserWarning"),
        capture_output=True,
        text=True,
        check=True,
    )
    spread, config, single = json.loads(done.stdout.splitlines()[-1])
    assert (spread["WORLD_SIZE"], spread["RANK"], spread["MASTER_ADDR"]) == ("4", "0", "127.0.0.1")
    assert spread["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert spread["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert (config["ACCELERATE_USE_FSDP"], config["FSDP_VERSION"], config["WORLD_SIZE"]) == ("true", "2", "2")
    assert config["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert single["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "RANK" not in single


def test_a_slurm_step_with_several_tasks_counts_as_processes() -> None:
    command = parse("srun -N2 --ntasks-per-node=4 --gres gpu:4 python train.py")
    assert (command.processes, command.nodes) == (4, 2)
    assert (command.environment["SLURM_NTASKS"], command.environment["SLURM_PROCID"]) == ("8", "0")
    assert parse("srun -n 8 python train.py").processes == 8
    assert parse("srun --pty python train.py").environment == {}


def test_an_installed_program_and_a_script_that_runs_itself(folder: Path) -> None:
    tool = add_program(folder / "bin" / "litgpt", f"#!{sys.executable}\nprint(1)\n")
    path = f"{tool.parent}:{BIN}"
    command = parse("litgpt pretrain --x 1", PATH=path)
    assert (command.launcher, command.target) == ("console", str(tool))
    assert command.arguments == ("pretrain", "--x", "1")
    assert command.interpreter == sys.executable
    long = add_program(
        folder / "bin" / "tune", f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n"
    )
    assert parse("tune run x", PATH=path).target == str(long)
    own = add_program(folder / "fit.py", "#!/usr/bin/env python3\n")
    command = parse("./fit.py --x")
    assert (command.launcher, command.target, command.arguments) == ("python", "./fit.py", ("--x",))
    assert own.exists()


def test_torchrun_of_another_environment_names_its_python(folder: Path) -> None:
    other = add_program(folder / "other" / "bin" / "python", f'#!/bin/sh\nexec {BIN}/python -I "$@"\n')
    add_program(folder / "other" / "bin" / "torchrun", f"#!{other}\n")
    command = parse("torchrun train.py", PATH=str(folder / "other" / "bin"))
    assert command.interpreter == str(other)
    # It runs trimtab's Python in the end, so there is nothing to note.
    assert command.notes == ()
    assert can_import_trimtab(str(other)) is None


def test_another_python_is_noted_and_asked_for_trimtab(folder: Path) -> None:
    said = {"prefix": "/elsewhere", "version": [3, 12, 1], "torch": True, "trimtab": None, "missing": []}
    versions = {
        "bare": said,
        "old": said | {"version": [3, 9, 0]},
        "other": said | {"trimtab": "0.0.1"},
        "torchless": said | {"trimtab": VERSION, "torch": False},
        "good": said | {"trimtab": VERSION},
    }
    for name, answer in versions.items():
        add_program(folder / name / "bin" / "python", f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    command = parse("python train.py", PATH=str(folder / "bare" / "bin"))
    assert "another environment than trimtab" in command.notes[0]
    errors = {name: can_import_trimtab(str(folder / name / "bin" / "python")) for name in versions}
    assert "pip install trimtab" in (errors["bare"] or "")
    assert "Python 3.9.0" in (errors["old"] or "")
    assert "has trimtab 0.0.1" in (errors["other"] or "")
    assert "torch" in (errors["torchless"] or "")
    assert errors["good"] is None
    assert "does not run" in (can_import_trimtab(str(folder / "none" / "bin" / "python")) or "")
    assert can_import_trimtab(str(BIN / "python")) is None


def test_python_that_is_not_on_path_is_trimtabs_own() -> None:
    command = parse("python train.py", PATH="/nowhere")
    assert command.interpreter == sys.executable
    assert "not on PATH" in command.notes[0]


@pytest.mark.parametrize(
    ("line", "found", "cure"),
    [
        ("", "no training command", "python train.py"),
        ("A=1 nohup", "no training command", "python train.py"),
        ("python", "names no file", "python train.py"),
        ("python -", "names no file", "python train.py"),
        ("python -c 'import torch'", "needs a file", "python FILE.py"),
        ("python -V", "trains nothing", "python train.py"),
        ("python -m", "names no module", "python -m package.module"),
        ("python -m pkg/train.py", "not a file", "python -m pkg.train"),
        ("python trian.py", "no such file", "Did you mean train.py"),
        ("python /nowhere/x.py", "no such file", "Give the path"),
        ("python pkg", "a folder", "python pkg/__main__.py"),
        ("python .", "a folder", "train.py"),
        ("python run.sh", "a shell script", "the line of it that starts Python"),
        ("python notes.ipynb", "a notebook", "nbconvert"),
        ("bash run.sh", "a shell script can start anything", "fill"),
        ("sh -c 'python train.py'", "a shell script can start anything", "fill"),
        ("deepspeed --num_gpus 2 train.py", "DeepSpeed", "torchrun --nproc-per-node GPUS train.py"),
        ("python -m deepspeed.launcher.runner train.py", "DeepSpeed", "torchrun"),
        ("mpirun -np 2 python train.py", "MPI", "torchrun"),
        ("docker run image python train.py", "container", "docker ... trimtab estimate -- python train.py"),
        ("sbatch job.sh", "submits a job", "the job script"),
        ("trimtab estimate -- python train.py", "trimtab itself", "python train.py"),
        ("python -m trimtab estimate", "trimtab itself", "python train.py"),
        ("/bin/ls", "a binary", "python train.py"),
        ("nosuchprogram x", "no such program on PATH", "Install it"),
        ("./nosuchfile x", "no such file", "type how you start"),
        ("train.py --x", "not a program that a shell", "python train.py --x"),
        ("./run.sh", "not a program that a shell", "python"),
        ("pkg", "a folder", "python pkg/__main__.py"),
        ("/nowhere/python train.py", "no such program", "path of a Python"),
        ("torchrun", "gets no file", "torchrun ... train.py"),
        ("torchrun --nproc-per-node 2", "gets no file", "torchrun ... train.py"),
        ("torchrun --nproc-per-node many train.py", "no number", "1 or more"),
        ("torchrun --nproc-per-node 0 train.py", "no number", "1 or more"),
        ("torchrun --nnodes 2:x train.py", "no number", "1 or more"),
        ("torchrun --nproc-per-node cpu train.py", "GPUs", "gpu"),
        ("torchrun --help", "trains nothing", "python train.py"),
        ("torchrun trian.py", "no such file", "Did you mean train.py"),
        ("torchrun --no-python accelerate launch train.py", "a launcher inside torchrun", "Type one"),
        ("accelerate config", "only `accelerate launch` trains", "accelerate launch train.py"),
        ("accelerate launch", "gets no file", "train.py"),
        ("accelerate launch --use_deepspeed train.py", "DeepSpeed", "--use_fsdp"),
        ("accelerate launch --cpu train.py", "CPUs", "Leave the option out"),
        ("accelerate launch --config_file none.yaml train.py", "no such file", "accelerate config"),
        (
            "accelerate launch --num_processes 3 --num_machines 2 train.py",
            "does not divide",
            "--num_processes 4",
        ),
        ("env -C /tmp python train.py", "another folder", "cd FOLDER"),
        ("uv run --directory /tmp python train.py", "another folder", "cd FOLDER"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_what_to_type(line: str, found: str, cure: str) -> None:
    with pytest.raises(WrongUse) as caught:
        parse(line)
    assert found in caught.value.found
    assert cure in caught.value.cure
    assert caught.value.given.strip()


def test_a_deepspeed_config_of_accelerate_is_refused_by_name(folder: Path) -> None:
    file = write_config(folder, distributed_type="DEEPSPEED", num_processes=8)
    with pytest.raises(WrongUse, match="DEEPSPEED in"):
        parse(f"accelerate launch --config_file {file} train.py")
    file.write_text("- just\n- a list\n", encoding="utf-8")
    with pytest.raises(WrongUse, match="holds no settings"):
        parse(f"accelerate launch --config_file {file} train.py")
    file.write_text("a: [", encoding="utf-8")
    with pytest.raises(WrongUse, match="cannot be read"):
        parse(f"accelerate launch --config_file {file} train.py")


def test_a_command_between_quotes_is_split() -> None:
    command = parse_command(["python train.py --text 'a b'"], environment=environment())
    assert command.arguments == ("--text", "a b")
    assert "one word" in command.notes[0]
    with pytest.raises(WrongUse, match="quotes do not match"):
        parse_command(["python train.py 'a b"], environment=environment())


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --lr 1e-3",
        "A='b c' EMPTY= env X=y python -u train.py --text 'it is' \"it's\"",
        "srun -n 2 torchrun --nproc-per-node=2 train.py key=value '*.bin'",
    ],
)
def test_a_command_is_written_as_typed(line: str) -> None:
    written = format_command(parse(line))
    assert shlex.split(written) == shlex.split(line)
    ran = subprocess.run(
        ["sh", "-c", written.replace("python", "true", 1).replace("srun", "true", 1)], check=False
    )
    assert ran.returncode == 0


def test_arguments_and_variables_are_replaced() -> None:
    command = parse("A=1 torchrun --nproc-per-node 2 train.py --batch 8 --lr 1")
    changed = with_arguments(command, ["--batch", "4", "--name", "a b"])
    assert format_command(changed) == "A=1 torchrun --nproc-per-node 2 train.py --batch 4 --name 'a b'"
    assert changed.arguments == ("--batch", "4", "--name", "a b")
    assert with_arguments(parse("python train.py"), ["x"]).words == ("python", "train.py", "x")
    assert with_arguments(command, []).words[-1] == "train.py"
    both = with_environment(command, {"A": "2 3", "B": "4"})
    assert format_command(both) == "B=4 A='2 3' torchrun --nproc-per-node 2 train.py --batch 8 --lr 1"
    assert both.environment == {"A": "2 3", "B": "4"}


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=8).filter(lambda text: "\0" not in text), max_size=6))
def test_any_arguments_pass_through_unchanged(arguments: list[str]) -> None:
    command = parse("torchrun --nproc-per-node 2 train.py")
    changed = with_arguments(command, arguments)
    assert shlex.split(format_command(changed)) == [*command.words, *arguments]
    again = parse_command(changed.words, environment=environment())
    assert again.arguments == tuple(arguments)


@given(
    st.lists(
        st.sampled_from(
            shlex.split(
                "python train.py torchrun accelerate launch -m -u -W -c -- - --nproc-per-node 2 env A=1 srun "
                "-n uv run nice time --no-python --config_file --num_processes bash trimtab pkg . --x=1 ''"
            )
        ),
        max_size=7,
    )
)
def test_any_words_give_a_command_or_an_error_of_three_parts(words: list[str]) -> None:
    try:
        command = parse_command(words, environment=environment())
    except WrongUse as error:
        assert all(part.strip() for part in (error.given, error.found, error.cure))
    else:
        assert command.words == tuple(words)
        assert words[len(words) - len(command.arguments) :] == list(command.arguments)


def test_reading_a_command_does_not_import_torch() -> None:
    program = (
        "import os, sys\n"
        "from trimtab.scripts.command import parse_command\n"
        "parse_command(['torchrun', 'train.py'], environment=os.environ)\n"
        "assert 'torch' not in sys.modules and 'accelerate' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment())
