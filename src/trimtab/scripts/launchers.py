"""Understand `torchrun` and `accelerate launch`: the processes they start, the variables they set."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trimtab.errors import EnvironmentFault, WrongUse, shorten
from trimtab.launching.launcher_options import ACCELERATE_FLAGS, ACCELERATE_VALUED, read_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.spec.script import ScriptCommand

PLACES = ("gpu", "auto")
"""Values of --nproc-per-node that mean the GPUs of the machine."""


@dataclass
class ProcessCount:
    """How many processes a launcher starts."""

    processes: int = 1
    nodes: int = 1
    follows_gpus: bool = False
    notes: list[str] = field(default_factory=list)


def _read_count(option: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise WrongUse(
            f"{option} {shorten(text, 40)}",
            found="it is no number of processes",
            cure=f"Give {option} 1 or more.",
        )
    return number


def count_torchrun_processes(
    options: Mapping[str, str], environment: Mapping[str, str], own: Mapping[str, str]
) -> ProcessCount:
    """Return how many processes torchrun starts, and on how many nodes.

    `environment` can hold PET_NNODES and PET_NPROC_PER_NODE, which torchrun reads in place of its options.
    `own` holds the variables that the command sets: CUDA_VISIBLE_DEVICES there decides what `gpu` means.
    """
    count = ProcessCount()
    nodes = options.get("--nnodes", environment.get("PET_NNODES", "1"))
    least, elastic, most = nodes.partition(":")
    count.nodes = _read_count("--nnodes", least)
    if elastic and _read_count("--nnodes", most) != count.nodes:
        count.notes.append(
            f"--nnodes {nodes}: taken as {count.nodes}, the fewest, where each GPU needs the most memory"
        )
    each = options.get("--nproc-per-node", environment.get("PET_NPROC_PER_NODE", "1"))
    if each in PLACES:
        _follow_gpus(count, own.get("CUDA_VISIBLE_DEVICES"))
    elif each in ("cpu", "xpu"):
        raise WrongUse(
            f"--nproc-per-node {each}",
            found="trimtab estimates training on NVIDIA and AMD GPUs",
            cure="Give a number, or gpu: --nproc-per-node gpu",
        )
    else:
        count.processes = _read_count("--nproc-per-node", each)
    return count


def _follow_gpus(count: ProcessCount, visible: str | None) -> None:
    """Take the number of processes from a list of visible GPUs, or leave it to the number of GPUs."""
    listed = [name for name in (visible or "").split(",") if name.strip()]
    if listed and "all" not in listed:
        count.processes = len(listed)
    else:
        count.follows_gpus = True


def read_accelerate_config(
    options: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the config file that `accelerate launch` reads, and its content; None without one."""
    given, default = options.get("--config-file"), _find_default_config(environment)
    if given is not None:
        file = Path(given)
        if not file.is_file():
            raise WrongUse(
                f"--config_file {given}",
                found="there is no such file",
                cure="Give the path of a file that `accelerate config` wrote, or leave the option out.",
            )
    elif default is None or "--cpu" in options:
        return None, {}
    else:
        file = default
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongUse(
            str(file), found=f"it cannot be read: {error}", cure="Write it again with `accelerate config`."
        ) from None
    if not isinstance(content, dict):
        raise WrongUse(
            str(file), found="it holds no settings", cure="Write it again with `accelerate config`."
        )
    return file, content


def _find_default_config(environment: Mapping[str, str]) -> Path | None:
    cache = Path(
        environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache"
    )
    folder = Path(environment.get("HF_HOME") or cache / "huggingface").expanduser() / "accelerate"
    names = ("default_config.yaml", "default_config.yml", "default_config.json")
    return next((folder / name for name in names if (folder / name).is_file()), None)


UNSUPPORTED = {
    "DEEPSPEED": (
        "--use-deepspeed",
        "DeepSpeed",
        "Try FSDP: accelerate launch --use_fsdp --fsdp_version 2 ...",
    ),
    "MEGATRON_LM": ("--use-megatron-lm", "Megatron-LM", "Try FSDP: accelerate launch --use_fsdp ..."),
    "XLA": ("--tpu", "TPUs", "Leave the option out to estimate for a GPU."),
    "MULTI_CPU": ("--cpu", "training on CPUs", "Leave the option out to estimate for a GPU."),
}


def count_accelerate_processes(
    options: Mapping[str, str], environment: Mapping[str, str], own: Mapping[str, str]
) -> ProcessCount:
    """Return how many processes `accelerate launch` starts, from its options and its config file."""
    file, config = read_accelerate_config(options, environment)
    kind = str(config.get("distributed_type", "NO")).upper()
    count = ProcessCount()
    for name, (flag, meaning, cure) in UNSUPPORTED.items():
        if flag in options or (kind == name and not {"--multi-gpu", "--use-fsdp"} & options.keys()):
            given = flag if flag in options else f"distributed_type: {kind} in {file}"
            raise WrongUse(f"accelerate launch, {given}", found=f"trimtab cannot follow {meaning}", cure=cure)
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise WrongUse(
            str(file),
            found="it starts a job on Amazon SageMaker",
            cure="Give a config for this machine: accelerate launch --config_file FILE ...",
        )
    if file is not None and "--config-file" not in options:
        count.notes.append(f"accelerate launch reads {file}, which `accelerate config` wrote")
    machines = options.get("--num-machines", str(config.get("num_machines") or 1))
    count.nodes = _read_count("--num_machines", machines)
    total = options.get("--num-processes", config.get("num_processes"))
    is_spread = kind not in ("NO", "") or bool({"--multi-gpu", "--use-fsdp"} & options.keys())
    if total is None and file is None:
        _follow_gpus(count, options.get("--gpu-ids") or own.get("CUDA_VISIBLE_DEVICES"))
    elif is_spread or file is None:
        processes = _read_count("--num_processes", str(total))
        if processes % count.nodes:
            above = -(-processes // count.nodes) * count.nodes
            raise WrongUse(
                f"--num_processes {processes} --num_machines {count.nodes}",
                found="num_processes counts the processes on all machines, and does not divide by them",
                cure=f"Give a multiple of {count.nodes}: --num_processes {above}",
            )
        count.processes = processes // count.nodes
    return count


def launcher_environment(command: ScriptCommand) -> dict[str, str]:
    """Return the variables that the command's launcher sets for the process with rank 0.

    For accelerate this imports accelerate, and must be called where torch sees a GPU: accelerate's own code
    turns options and config file into variables. `processes` must be final (see `set_processes`).
    """
    if command.launcher == "torchrun":
        return torchrun_variables(command)
    if command.launcher == "accelerate":
        return accelerate_variables(command)
    return {}


def torchrun_variables(command: ScriptCommand) -> dict[str, str]:
    """Return the variables that torchrun sets for the process with rank 0."""
    world, local = str(command.world_size), str(command.processes)
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(command.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if command.processes > 1 and "OMP_NUM_THREADS" not in {**os.environ, **command.environment}:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def accelerate_variables(command: ScriptCommand) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for the process with rank 0."""
    try:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
    except ImportError as error:
        raise EnvironmentFault(
            "accelerate launch",
            found=f"accelerate cannot be imported: {error}",
            cure="Install it in the environment of the command: pip install accelerate",
        ) from None
    before = dict(os.environ)
    try:
        options = launch_command_parser().parse_args(_complete_accelerate_words(command))
        # Everything stays on this machine, whatever address the command names.
        options.main_process_ip, options.main_process_port, options.machine_rank = "127.0.0.1", 0, 0
        options.rdzv_backend = "static"
        options, _, _ = _validate_launch_command(options)
        options.main_process_port = 0
        is_spread = options.use_fsdp or options.multi_gpu
        after = prepare_multi_gpu_env(options) if is_spread else prepare_simple_launcher_cmd_env(options)[1]
    except (ValueError, OSError, RuntimeError, AssertionError, SystemExit) as error:
        raise WrongUse(
            f"accelerate launch {' '.join(command.launcher_arguments)}",
            found=f"accelerate refuses it: {error}",
            cure="Correct the option, or the config file that accelerate names.",
        ) from error
    variables = {name: str(value) for name, value in after.items() if before.get(name) != value}
    return variables | (torchrun_variables(command) if is_spread else {})


def _complete_accelerate_words(command: ScriptCommand) -> list[str]:
    """Return accelerate's options with the number of processes stated, so that it does not count GPUs."""
    words = list(command.launcher_arguments)
    options = read_options(words, ACCELERATE_FLAGS, ACCELERATE_VALUED, "accelerate launch")
    file, _ = read_accelerate_config(options.values, {**os.environ, **command.environment})
    if file is None:
        if "--num-processes" not in options.values:
            words += ["--num_processes", str(command.world_size)]
        if command.world_size > 1 and not options.has_flag("--multi-gpu", "--use-fsdp"):
            words.append("--multi_gpu")
    return [*words, command.target, *command.arguments]
