"""Launch the plan of a training command: here, or as an sbatch script with the right resources.

The script does not know trimtab: it does not save at a signal, and it resumes only if its own options say so.
So a job is queued again at its time limit only if the command resumes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import WrongUse, shorten
from trimtab.launching.job_spec import build_environment
from trimtab.launching.launcher_options import (
    ACCELERATE_FLAGS,
    ACCELERATE_MODULES,
    ACCELERATE_VALUED,
    TORCHRUN_FLAGS,
    TORCHRUN_MODULES,
    TORCHRUN_VALUED,
    read_options,
)
from trimtab.launching.quoting import Raw, format_comment, shell_line, shell_word
from trimtab.launching.slurm import HEAD, REQUEUES, WARNING_S, SbatchBody, build_sbatch_launch
from trimtab.spec import Launch, LaunchKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.launching.defaults import LaunchDefaults
    from trimtab.launching.job_spec import JobSpec
    from trimtab.launching.slurm import SlurmCluster
    from trimtab.spec import ScriptPlan

KINDS = (LaunchKind.TORCHRUN, LaunchKind.SLURM)
KILLED = 128 + 9
"""Exit code of a command of which a process got SIGKILL."""
LOADER_CORES = 3
"""Cores for the data loaders of each process, whose number is the script's own."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_RESUMES = re.compile(r"-{0,2}(?:auto[-_]?)?(?:resume|restart)\w*|-{0,2}init_from=resume", re.IGNORECASE)
_MEETING = ("--standalone", "--rdzv", "--master", "--node-rank", "--nnodes")
"""Options of torchrun for where nodes meet, and how many there are."""
_ACCELERATE_MEETING = frozenset(
    {
        *("--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port"),
        *("--num-processes", "--rdzv-backend"),
    }
)
_ACCELERATE_KINDS = ("--multi-gpu", "--use-fsdp", "--use-deepspeed", "--use-megatron-lm", "--cpu", "--tpu")
"""Options of accelerate of which only one may be given."""
NOT_RESTARTED = (
    "trimtab starts the command and does not restart it; if it fails, give its output to `trimtab doctor LOG`"
)
SRUN = ("srun", "--ntasks-per-node=1", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=1")


def script_of(job_spec: JobSpec) -> ScriptPlan:
    """Return the training command of a plan."""
    script = job_spec.plan.script
    assert script is not None  # noqa: S101 - callers check it
    return script


def refuse_kind(kind: LaunchKind, extra: Sequence[str]) -> None:
    """Raise for a launch that a training command does not have."""
    if kind not in KINDS:
        raise WrongUse(
            f"--{kind} with the plan of a training command",
            found="such a command runs here, or in Slurm with --slurm",
            cure="Leave the option out, or put the plan's command into your own manifest.",
        )
    if extra:
        raise WrongUse(
            f"-- {' '.join(extra)}",
            found="the plan is for a training command, which has its own words",
            cure="Plan again with them in the command.",
        )


def resumes_itself(words: Sequence[str]) -> bool:
    """Return whether a command goes on from its last checkpoint when it starts again.

    >>> resumes_itself(["python", "train.py", "--resume_from_checkpoint", "last"])
    True
    >>> resumes_itself(["python", "train.py", "--output_dir", "out"])
    False
    """
    return any(_RESUMES.fullmatch(word.partition("=")[0]) or _RESUMES.fullmatch(word) for word in words)


def split_environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables in front of a command, and the command.

    >>> split_environment(["BATCH=8", "python", "train.py", "x=1"])
    ({'BATCH': '8'}, ['python', 'train.py', 'x=1'])
    """
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        variables[match[1]] = match[2]
        rest.pop(0)
    return variables, rest


def build_command_launch(
    job_spec: JobSpec, defaults: LaunchDefaults, *, cores: int | None, here: Mapping[str, str]
) -> Launch:
    """Build the launch that runs a training command on this machine."""
    if job_spec.resources.nodes > 1:
        raise WrongUse(
            f"a plan for {job_spec.resources.nodes} nodes",
            found="trimtab starts a training command on this machine only",
            cure="Give --slurm, or type the command on each node with your launcher's own options.",
        )
    own, words = split_environment(script_of(job_spec).words)
    given = build_environment(job_spec, cores=cores, offline=defaults.offline, here=here)
    given |= {name: (value, "trimtab.toml says so") for name, value in defaults.environment.items()}
    given = {name: pair for name, pair in given.items() if name == "CUDA_VISIBLE_DEVICES" or name not in here}
    given |= {name: (value, "the command sets it") for name, value in own.items()}
    return Launch(
        kind=LaunchKind.TORCHRUN,
        command=tuple(words),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        notes=(NOT_RESTARTED,),
    )


def build_command_sbatch(  # noqa: PLR0913 - as for a job
    job_spec: JobSpec,
    defaults: LaunchDefaults,
    site: SlurmCluster | None,
    *,
    script_file: str,
    time: str | None = None,
    silence: str = "",
) -> Launch:
    """Build the sbatch script of a training command: its resources, the command, and doctor at the end."""
    words = script_of(job_spec).words
    is_resuming = resumes_itself(words)
    resources = job_spec.resources
    job_spec = job_spec.replace(
        resources=resources.replace(cpus=max(resources.cpus, resources.procs * (1 + LOADER_CORES)))
    )
    body = SbatchBody(
        lines=(
            *_meeting_lines(job_spec),
            *_requeue_lines(is_resuming=is_resuming),
            f"{_srun_line(job_spec)} &",
            "wait $!",
            "code=$?",
            "",
            *_killed_lines(is_resuming=is_resuming),
            *_doctor_lines(job_spec),
            'exit "$code"',
        ),
        signal=f"B:USR1@{WARNING_S}" if is_resuming else "",
    )
    launch = build_sbatch_launch(
        job_spec, defaults, site, script_file=script_file, time=time, silence=silence, body=body
    )
    return launch.replace(notes=(*launch.notes, *_command_notes(is_resuming=is_resuming)))


def _command_notes(*, is_resuming: bool) -> list[str]:
    each = 1 + LOADER_CORES
    cores = f"{each} cores a process are asked for: the number of data loaders is the script's own"
    again = (
        "the command resumes by its own options: at the time limit the job is queued again"
        if is_resuming
        else "no option of the command resumes a run: the job is not queued again at its time limit, and "
        "after a lost node it starts from the beginning, unless the script looks for its checkpoints itself"
    )
    return [cores, again]


def _requeue_lines(*, is_resuming: bool) -> list[str]:
    if not is_resuming:
        return []
    return [
        format_comment(f"Slurm signals this shell {WARNING_S} s before the time limit; the command resumes."),
        "requeue() {",
        f'  [ "${{SLURM_RESTART_COUNT:-0}}" -ge {REQUEUES} ] || scontrol requeue "$SLURM_JOB_ID"',
        "}",
        "trap requeue USR1",
        "",
    ]


def _killed_lines(*, is_resuming: bool) -> list[str]:
    """Build the lines that queue a job again whose processes were killed, unless its owner cancelled it."""
    if not is_resuming:
        return []
    return [
        format_comment("A process was killed from outside, maybe with its node. The command resumes."),
        'state=$(scontrol --oneliner show job "$SLURM_JOB_ID")',
        f'if [ "$code" -eq {KILLED} ] && [[ "$state" == *" JobState=RUNNING "* ]]; then requeue; fi',
        "",
    ]


def _doctor_lines(job_spec: JobSpec) -> list[str]:
    log = shell_word(f"{job_spec.out}/slurm-")
    program = " ".join(shell_word(word) for word in job_spec.program)
    return [
        format_comment("What went wrong, from the log of this job."),
        'if [ "$code" -ne 0 ]; then',
        f'  {program} doctor {log}"$SLURM_JOB_ID".log || true',
        "fi",
    ]


def _srun_line(job_spec: JobSpec) -> str:
    """Build the srun command, once on every node; the variables of the command come first."""
    variables, words = split_environment(script_of(job_spec).words)
    sets = [f"{name}={shell_word(value)}" for name, value in variables.items()]
    launcher = _find_launcher(words) if job_spec.resources.nodes > 1 else None
    if launcher is None:
        text = shell_line(words)
    elif launcher.is_accelerate:
        # Each node has its own number, so a shell there completes the command.
        line = shell_line(_spread_accelerate(words, launcher.start, job_spec))
        text = f"bash -c {shell_word('exec ' + line)}"
    else:
        text = shell_line(_spread_torchrun(words, launcher.start, job_spec))
    return " ".join([*sets, *SRUN]) + f" \\\n  {text}"


class _FoundLauncher(NamedTuple):
    """The launcher in a command."""

    start: int
    """Where its options begin."""
    is_accelerate: bool


def _find_launcher(words: Sequence[str]) -> _FoundLauncher:
    """Return torchrun or `accelerate launch` in a command; raise if there is neither."""
    for number, word in enumerate(words):
        program, after = word.rpartition("/")[2], words[number + 1 : number + 2]
        if program == "torchrun" or word in TORCHRUN_MODULES:
            return _FoundLauncher(number + 1, is_accelerate=False)
        if program == "accelerate" and list(after) == ["launch"]:
            return _FoundLauncher(number + 2, is_accelerate=True)
        if program == "accelerate-launch" or word in ACCELERATE_MODULES:
            return _FoundLauncher(number + 1, is_accelerate=True)
    raise WrongUse(
        f"a plan for several nodes of {shorten(' '.join(words), 60)}",
        found="the command has no torchrun and no accelerate launch, and trimtab does not know how its "
        "processes would meet",
        cure="Start it with torchrun, or write the sbatch script by hand.",
    )


def _spread_torchrun(words: list[str], start: int, job_spec: JobSpec) -> list[str]:
    """Return the command of each of several nodes: torchrun meets at the first of them."""
    meeting = [
        f"--nnodes={job_spec.resources.nodes}",
        "--rdzv-backend=c10d",
        Raw('--rdzv-endpoint="$address:$port"'),
        Raw('--rdzv-id="$SLURM_JOB_ID"'),
    ]
    options = read_options(words[start:], TORCHRUN_FLAGS, TORCHRUN_VALUED, "torchrun")
    kept = [word for name, typed in options.typed if not name.startswith(_MEETING) for word in typed]
    return [*words[:start], *meeting, *kept, *options.rest]


def _spread_accelerate(words: list[str], start: int, job_spec: JobSpec) -> list[str]:
    """Return the command of each of several nodes for accelerate; its config file keeps the other settings.

    Without a config file, accelerate looks at the GPUs of one machine to tell whether there are several.
    """
    resources = job_spec.resources
    options = read_options(words[start:], ACCELERATE_FLAGS, ACCELERATE_VALUED, "accelerate launch")
    kept = [word for name, typed in options.typed if name not in _ACCELERATE_MEETING for word in typed]
    spread = [] if options.has_flag("--config-file", *_ACCELERATE_KINDS) else [Raw("$multi_gpu")]
    return [
        *words[:start],
        f"--num_machines={resources.nodes}",
        Raw('--machine_rank="$SLURM_NODEID"'),
        Raw('--main_process_ip="$address"'),
        Raw('--main_process_port="$port"'),
        f"--num_processes={resources.nodes * resources.procs}",
        *spread,
        *kept,
        *options.rest,
    ]


def _meeting_lines(job_spec: JobSpec) -> list[str]:
    """Build the lines that say where several nodes meet."""
    if job_spec.resources.nodes == 1:
        return []
    _, words = split_environment(script_of(job_spec).words)
    lines = HEAD.split("\n")
    if _find_launcher(words).is_accelerate:
        lines += [
            format_comment("A config file of accelerate says by itself that there are several GPUs."),
            'configs="${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}/accelerate"',
            'multi_gpu=$(ls "$configs"/default_config.* > /dev/null 2>&1 || echo --multi_gpu)',
            "export address port multi_gpu",
        ]
    return lines
