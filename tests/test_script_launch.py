"""Launches of training commands: here, and as an sbatch script with the command of the plan."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

import launch_plans
from trimtab.cli import console as cli_console
from trimtab.cli.options import flags_of, make_request
from trimtab.errors import WrongUse
from trimtab.launching.defaults import LaunchDefaults
from trimtab.launching.request import LaunchOrder, build_launch
from trimtab.launching.submit import run_launch
from trimtab.spec import Launch, LaunchKind, Plan, ScriptPlan
from trimtab.spec.requests import LaunchRequest, list_options

if TYPE_CHECKING:
    from pathlib import Path


def command_plan(line: str, nodes: int = 1, gpus: int = 4, hours: float | None = None) -> Plan:
    script = ScriptPlan(command=line, words=tuple(line.split()), original=line)
    return launch_plans.plan(nodes=nodes, gpus=gpus, hours=hours, job=line).replace(script=script)


def launch(plan: Plan, kind: LaunchKind = LaunchKind.SLURM, **order: Any) -> Launch:
    return build_launch(
        LaunchOrder(kind=kind, folder="/work/project", python="/venv/bin/python", **order),
        plan,
        None,
        LaunchDefaults(),
        site=launch_plans.site() if kind is LaunchKind.SLURM else None,
        cores=16,
        here={},
    )


def script_text(made: Launch) -> str:
    assert made.script is not None
    return made.script


def test_a_batch_script_runs_the_command_and_doctor_at_the_end() -> None:
    made = launch(command_plan("BATCH=8 torchrun --nproc-per-node 4 src/train.py --lr 1e-4"), time="2h")
    text = script_text(made)
    assert "#SBATCH --gpus-per-node=h100:4" in text
    assert "#SBATCH --cpus-per-task=16" in text
    assert "#SBATCH --time=02:00:00" in text
    assert "#SBATCH --requeue" in text
    assert "#SBATCH --signal" not in text
    assert "  torchrun \\\n  --nproc-per-node 4 src/train.py \\\n  --lr 1e-4 &" in text
    assert "BATCH=8 srun" in text
    assert '/venv/bin/python -m trimtab doctor /work/project/runs/train/slurm-"$SLURM_JOB_ID".log' in text
    assert "trimtab train" not in text
    assert any("not queued again" in note for note in made.notes)
    assert "/work/project/runs/train/launch-plan.json" in made.files
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_command_that_resumes_is_queued_again_at_the_limit() -> None:
    made = launch(command_plan("torchrun --nproc-per-node 4 train.py --resume_from_checkpoint last"))
    text = script_text(made)
    assert "#SBATCH --signal=B:USR1@120" in text
    assert "trap requeue USR1" in text
    assert any("queued again" in note for note in made.notes)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_several_nodes_meet_at_the_first() -> None:
    line = "torchrun --standalone --nnodes 2 --rdzv_id x --nproc-per-node 8 -m pack.train --nnodes 7"
    text = script_text(launch(command_plan(line, nodes=2, gpus=8)))
    assert '--rdzv-endpoint="$address:$port"' in text
    assert "--nnodes=2" in text
    run = text[text.index("srun") :]
    assert "--standalone" not in run
    assert "--rdzv_id" not in run
    assert "#SBATCH --job-name=trimtab-train" in text
    assert "--nnodes 7" in text
    assert "head=$(scontrol show hostnames" in text
    assert "/runs/train/" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    with pytest.raises(WrongUse, match="no torchrun and no accelerate launch"):
        launch(command_plan("python train.py", nodes=2, gpus=8))


STAND_INS = {
    "scontrol": '[ "$2" = hostnames ] && printf "n1\\nn2\\n" || echo "NodeName=n1 NodeAddr=10.0.0.1 Port=1"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
    "accelerate": 'echo "$@"',
}
"""What the programs of a cluster of two nodes do, as far as a batch script needs them."""


def run_batch_script(text: str, folder: Path, **variables: str) -> list[str]:
    """Run a batch script with stand-ins for the programs that it calls; return the lines of its output."""
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), **slurm, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_accelerate_gets_the_number_of_each_node(tmp_path: Path) -> None:
    line = (
        "MODE=x accelerate launch --num_processes 4 --mixed-precision=bf16 --machine_rank 1"
        " --main-process-ip h train.py --num_machines 7 --name it's"
    )
    text = script_text(launch(command_plan(line, nodes=2, gpus=8), out=str(tmp_path / "run")))
    lines = run_batch_script(text, tmp_path)
    assert len(lines) == 2
    for number, words in enumerate(lines):
        head, _, port = words.partition(" --main_process_port=")
        assert head == f"launch --num_machines=2 --machine_rank={number} --main_process_ip=10.0.0.1"
        # The words of the script stay, whatever they are called.
        assert port.split(" ", 1)[1] == (
            "--num_processes=16 --multi_gpu --mixed-precision=bf16 train.py --num_machines 7 --name it's"
        )
    # A config file decides what kind of training it is, wherever it is.
    (tmp_path / "accelerate").unlink()
    configs = tmp_path / "hf" / "accelerate"
    configs.mkdir(parents=True)
    (configs / "default_config.yaml").write_text("distributed_type: FSDP\n", encoding="utf-8")
    assert "--multi_gpu" not in run_batch_script(text, tmp_path, HF_HOME=str(tmp_path / "hf"))[0]
    for given in ("--config_file=fsdp.yaml", "--use_fsdp"):
        line = f"python -m accelerate.commands.launch {given} -m pack.train"
        text = script_text(launch(command_plan(line, nodes=2, gpus=8)))
        assert "multi_gpu" not in text[text.index("srun") :]
        assert f"--num_processes=16 \\\n  {given} -m pack.train" in text


def test_doctor_runs_only_when_the_command_fails(tmp_path: Path) -> None:
    """The script itself, with stand-ins for the programs of Slurm and of trimtab."""
    for code, expected in ((0, ""), (3, "doctor")):
        plan = command_plan(f"bash {tmp_path}/train.sh")
        (tmp_path / "train.sh").write_text(f"exit {code}\n", encoding="utf-8")
        text = script_text(launch(plan, out=str(tmp_path / "run")))
        (tmp_path / "srun").write_text(
            '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n', encoding="utf-8"
        )
        (tmp_path / "srun").chmod(0o755)
        text = text.replace("/venv/bin/python -m trimtab", "echo")
        done = subprocess.run(
            ["bash", "-c", text],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.partition(" ")[0] == expected


@pytest.mark.parametrize(
    ("code", "state", "expected"), [(137, "RUNNING", True), (137, "CANCELLED", False), (1, "RUNNING", False)]
)
def test_a_killed_command_that_resumes_is_queued_again(
    tmp_path: Path, code: int, state: str, expected: bool
) -> None:
    (tmp_path / "train.sh").write_text(f"exit {code}\n", encoding="utf-8")
    plan = command_plan(f"bash {tmp_path}/train.sh --resume")
    text = script_text(launch(plan, out=str(tmp_path / "run"))).replace("/venv/bin/python -m trimtab", "echo")
    stand_ins = {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": f'[ "$1" = requeue ] && touch {tmp_path}/again; echo "JobId=7 JobState={state} X=1"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm}, check=False
    )
    assert done.returncode == code
    assert (tmp_path / "again").exists() is expected


def test_a_command_runs_here_with_its_variables(tmp_path: Path) -> None:
    plan = command_plan(f"WORD=hello bash -c echo>{tmp_path}/x", gpus=2)
    assert plan.script is not None
    words = ("WORD=hello", "bash", "-c", f"echo $WORD $CUDA_VISIBLE_DEVICES > {tmp_path}/out.txt")
    plan = plan.replace(script=plan.script.replace(words=words))
    made = launch(plan, LaunchKind.TORCHRUN)
    assert made.command[0] == "bash"
    assert made.environment["WORD"] == "hello"
    assert made.files == {}
    run_launch(made, {"PATH": "/usr/bin:/bin"})
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "hello 0,1\n"
    with pytest.raises(WrongUse, match="this machine only"):
        launch(command_plan("torchrun train.py", nodes=2), LaunchKind.TORCHRUN)


@pytest.mark.parametrize("kind", [LaunchKind.KUBERNETES, LaunchKind.SKY, LaunchKind.ACCELERATE])
def test_other_launchers_are_refused(kind: LaunchKind) -> None:
    with pytest.raises(WrongUse, match="--slurm"):
        launch(command_plan("python train.py"), kind)


def test_further_words_are_refused() -> None:
    with pytest.raises(WrongUse, match="its own words"):
        launch(command_plan("python train.py"), extra=("--steps", "3"))


def test_words_behind_the_dashes_are_a_command_or_options(monkeypatch: pytest.MonkeyPatch) -> None:
    values = (
        "plan_or_job vary extra on network nodes procs rendezvous restarts steps time partition account qos "
        "activate image script compare pins options out"
    )
    typed: dict[str, Any] = dict.fromkeys(values.split())
    kinds = ("slurm", "kubernetes", "kubeflow", "sky", "accelerate", "deepspeed", "yes", "cache")
    typed |= dict.fromkeys(kinds, False)
    typed |= {flag.name: None for option in list_options(LaunchRequest).values() for flag in flags_of(option)}
    monkeypatch.setattr(cli_console.ScriptWords, "typed", ("python", "train.py"))
    assert make_request(LaunchRequest, typed).command == ("python", "train.py")
    made = make_request(LaunchRequest, {**typed, "plan_or_job": "slm"})
    assert made.command == ()
    assert made.extra == ("python", "train.py")
    monkeypatch.setattr(cli_console.ScriptWords, "typed", None)
    with pytest.raises(WrongUse, match="neither a job nor a training command"):
        make_request(LaunchRequest, typed)
