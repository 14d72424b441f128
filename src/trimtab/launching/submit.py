"""Ask Slurm, write the files of a launch, submit it or run it. Only this module and `jobs` have effects."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trimtab.errors import EnvironmentFault, JobFailed, WrongUse, shorten
from trimtab.files import write_atomic
from trimtab.launching.job_spec import PROGRAM
from trimtab.launching.jobs import NOTE, SlurmClient
from trimtab.launching.slurm import QUESTIONS, SlurmCluster
from trimtab.launching.slurm import parse_cluster as read_site
from trimtab.spec import LaunchKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.spec import Launch

ASKED_S = 60
"""How long a scheduler may take to answer."""
RUNS = (LaunchKind.TORCHRUN, LaunchKind.SLURM)
"""What is started from here; the rest is text for others."""


def ask_slurm(command: Sequence[str]) -> str:
    """Run a command of Slurm; return its output, or raise with its own message."""
    shown = " ".join(command)
    try:
        done = subprocess.run(  # noqa: S603 - words of ours, no shell
            list(command), capture_output=True, text=True, timeout=ASKED_S, check=False, errors="replace"
        )
    except FileNotFoundError as error:
        raise no_slurm_error(command[0]) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            shown,
            found=f"it did not answer within {ASKED_S} s",
            cure="Is the cluster up? Try again.",
        ) from error
    except OSError as error:
        raise EnvironmentFault(shown, found=str(error.strerror), cure="Fix the installation.") from error
    if done.returncode:
        # Slurm's commands say last what it comes to; what they tried before fills a screen.
        last = (done.stderr or done.stdout).strip().splitlines()[-2:]
        words = shorten(" ".join(" ".join(last).split()), 400)
        raise EnvironmentFault(
            shorten(shown),
            found=words or f"it ended with {done.returncode}",
            cure=f"This is the message of {command[0]}. "
            + (
                "Nothing was submitted."
                if command[0] == "sbatch"
                else "Check that the cluster is up, and that SLURM_CONF names its configuration."
            ),
        )
    return done.stdout


def real_slurm() -> SlurmClient:
    """Return the Slurm of this machine."""
    return SlurmClient(ask_slurm, lambda program: shutil.which(program) is not None, getpass.getuser())


def no_slurm_error(program: str) -> EnvironmentFault:
    """Return the error that there is no Slurm here."""
    return EnvironmentFault(
        "trimtab launch --slurm",
        found=f"there is no {program} on this machine",
        cure="Run it on a login node of the cluster. Without --yes it writes the script unchecked, to be "
        "submitted there.",
    )


def read_slurm_cluster() -> tuple[SlurmCluster | None, str]:
    """Ask Slurm for the cluster of this machine; return None and the reason if none answers.

    sbatch will have the last word: what could not be asked is not checked, and that is said.
    """
    if shutil.which(QUESTIONS["nodes"][0]) is None:
        return None, f"there is no {QUESTIONS['nodes'][0]} here"
    try:
        return read_site({what: ask_slurm(command) for what, command in QUESTIONS.items()}), ""
    except EnvironmentFault as error:
        return None, error.found


def write_launch_files(launch: Launch) -> tuple[str, ...]:
    """Write the script and the files of a launch, with their folders; return the paths in order."""
    texts = dict(launch.files)
    if launch.script is not None and launch.script_file is not None:
        texts[launch.script_file] = launch.script
    for name, text in texts.items():
        file = Path(name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text)
        except OSError as error:
            raise WrongUse(
                shorten(str(file)),
                found=f"it cannot be written ({error.strerror})",
                cure="Give another --out, in a folder that you may write to; nothing was started.",
            ) from error
    return tuple(texts)


def submit_launch(launch: Launch) -> Launch:
    """Submit a script to Slurm; return the launch with its job id."""
    if shutil.which(launch.command[0]) is None:
        raise no_slurm_error(launch.command[0])
    write_launch_files(launch)
    output = ask_slurm(launch.command).strip()
    # --parsable prints NUMBER, or NUMBER;CLUSTER.
    number = output.splitlines()[-1].partition(";")[0] if output else ""
    if not number.isdigit():
        raise EnvironmentFault(
            " ".join(launch.command),
            found=f"it printed {shorten(output)!r}, which is no number of a job",
            cure="Look for the job with `squeue --me` before you submit it again.",
        )
    submitted = launch.replace(job_id=number)
    if submitted.out is not None:
        # `trimtab jobs` finds the run by it. It is submitted: what cannot be written is no reason to fail.
        with contextlib.suppress(OSError):
            Path(submitted.out, NOTE).write_text(submitted.to_json(indent=2) + "\n", encoding="utf-8")
    return submitted


def check_startable(launch: Launch) -> None:
    """Raise for a launch that trimtab does not start, or whose run is known to fail."""
    if launch.kind not in RUNS:
        raise WrongUse(
            "--yes",
            found=f"trimtab writes what {launch.kind} needs, and starts nothing there",
            cure=f"Leave --yes out, or give --write, and then run: {' '.join(launch.command)}",
        )
    if launch.fault:
        raise JobFailed(
            "--yes",
            found=f"the run would end at once: {launch.fault}",
            cure="Fix the job; nothing was started.",
        )


def exec_launch(launch: Launch, here: Mapping[str, str], *, quiet: bool) -> NoReturn:
    """Replace this process by the launch on this machine; it gets all signals and the terminal.

    The program is the one that runs now, whatever of its name comes first in PATH. `quiet`: what it would
    print on stdout goes to stderr.
    """
    write_launch_files(launch)
    sys.stdout.flush()
    sys.stderr.flush()
    if quiet:
        os.dup2(2, 1)
    words = _command_words(launch)
    os.execve(words[0], words, {**here, **launch.environment})  # noqa: S606 - words of ours, no shell


def run_launch(launch: Launch, here: Mapping[str, str]) -> Launch:
    """Run a launch on this machine and wait for its end; raise if it fails."""
    write_launch_files(launch)
    with subprocess.Popen(_command_words(launch), env={**here, **launch.environment}) as process:  # noqa: S603 - words of ours
        code = process.wait()
    if code:
        raise EnvironmentFault(
            " ".join(launch.command),
            found=f"it ended with {code}",
            cure="Read the lines above; the same launch resumes from the last checkpoint.",
        )
    return launch.replace(job_id=str(process.pid))


def _command_words(launch: Launch) -> list[str]:
    words = list(launch.command)
    if words[0] == PROGRAM:
        return [sys.executable, "-m", *words]
    program = shutil.which(words[0])
    if program is None:
        raise EnvironmentFault(
            words[0],
            found="there is no such program on PATH",
            cure="Activate the environment that has it; nothing was started.",
        )
    return [program, *words[1:]]
