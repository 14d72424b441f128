"""Registry of built-in jobs: names, classes and command-line flags.

To add a job, add a package next to this file and a row in `JOBS`.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import NamedTuple

from trimtab.errors import JobFailed, UnknownName, WrongUse, find_nearest

FOLDER = "hf:"
"""Prefix of a job that is a Hugging Face folder."""
FOLDER_SAMPLES = 10_000
"""Samples per epoch of such a job, unless it says otherwise."""


class JobFlag(NamedTuple):
    """A flag of the command line that sets an attribute of a job: a short form of `--set`."""

    name: str
    attribute: str
    type: type
    help: str
    metavar: str | None = None
    training: bool = False
    """Whether only training commands have it."""
    may_be_file: bool = False
    """Whether a text is taken as a file if there is one of that name."""
    jobs: tuple[str, ...] = ()
    """The jobs that have it, by name; `job_flags` fills it in."""


class BuiltInJob(NamedTuple):
    """A job that comes with trimtab."""

    name: str
    """As on the command line; `hf:` is followed by a folder."""
    module: str
    class_name: str
    flags: tuple[JobFlag, ...] = ()


DATA = JobFlag(
    "data",
    "data",
    Path,
    "text to train on; default: the source code of Python's standard library.",
    "FILE_OR_FOLDER",
    training=True,
)
LORA = JobFlag(
    "lora",
    "lora",
    int,
    "add LoRA adapters of this rank to every linear layer except the head, and freeze the rest.",
    "RANK",
)
JOBS = (
    BuiltInJob("slm", "trimtab.jobs.slm", "Slm", (DATA,)),
    BuiltInJob(
        FOLDER,
        "trimtab.jobs.huggingface",
        "HuggingFace",
        (
            DATA,
            JobFlag("seq", "seq", int, "tokens per sample; default: the model's own limit, at most 1024."),
            LORA,
            JobFlag(
                "packed",
                "packed",
                str,
                "pack documents into rows of --seq tokens: tokens of each document, or a file with one "
                "length a line.",
                "TOKENS_OR_FILE",
                may_be_file=True,
            ),
            JobFlag(
                "lengths",
                "lengths",
                str,
                "tokens of samples that differ, one length a line; samples are padded to the longest.",
                "FILE",
                may_be_file=True,
            ),
            JobFlag(
                "attention",
                "attention",
                str,
                "sdpa, flash_attention_2, flex_attention or eager; default: sdpa.",
                "NAME",
            ),
            JobFlag("frozen", "frozen", bool, "freeze the model except its head."),
        ),
    ),
    BuiltInJob(
        "bridge",
        "trimtab.jobs.bridge.job",
        "Bridge",
        (
            LORA,
            JobFlag(
                "llama", "llama_folder", Path, "Hugging Face folder of the first frozen model.", "FOLDER"
            ),
            JobFlag("qwen", "qwen_folder", Path, "Hugging Face folder of the second frozen model.", "FOLDER"),
            JobFlag(
                "sequential", "sequential", bool, "run one frozen model at a time, which takes less memory."
            ),
        ),
    ),
    BuiltInJob("naics", "trimtab.jobs.naics.job", "Naics"),
)
FOLDER_JOB = next(job for job in JOBS if job.name == FOLDER)
BUILT_IN = {job.name: job for job in JOBS if job is not FOLDER_JOB}
"""Built-in jobs by name, without hf:."""
JOB_FORMS = (
    f"Name a job as FILE.py:NAME, package.module:NAME, {', '.join(BUILT_IN)} (or {next(iter(BUILT_IN))}:tiny "
    "...), or hf:FOLDER."
)
"""What to do about a name that is none of a job."""


def base_name(job: str) -> str:
    """Return the registered name of a built-in job, or the first part of another name.

    >>> base_name("slm:tiny"), base_name("hf:models/bert"), base_name("job.py:MyJob")
    ('slm', 'hf:', 'job.py')
    """
    return FOLDER if job.startswith(FOLDER) else job.partition(":")[0]


def check_job_name(name: str) -> None:
    """Raise if no job can have that name, or its file has a syntax error: that is known without torch."""
    if name.startswith(FOLDER):
        cure = "Name a folder with a Hugging Face config.json, as in hf:./my-model."
        require_folder(name.removeprefix(FOLDER), f"job {name}", cure)
        return
    if base_name(name) in BUILT_IN:
        return
    place, colon, attribute = name.rpartition(":")
    if (not colon or not attribute) and (name.endswith(".py") or "/" in name):
        file = name.rstrip(":")
        script = f"If it is a training script: trimtab estimate --on GPU -- python {file}. Otherwise: "
        cure = script * file.endswith(".py") + JOB_FORMS
        raise WrongUse(f"job {name!r}", found="it names a file and no class in it", cure=cure)
    if not colon or not place or not attribute:
        close = find_nearest(name, BUILT_IN)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(f"job {name!r}", found=f"there is no built-in of that name{meant}", cure=JOB_FORMS)
    if place.endswith(".py") or "/" in place:
        if not Path(place).is_file():
            raise WrongUse(f"job {place}", found="there is no such file", cure=JOB_FORMS)
        if not place.endswith(".py"):
            raise WrongUse(f"job {place}", found="it is no .py file", cure=JOB_FORMS)
        _check_syntax(Path(place))


def _check_syntax(file: Path) -> None:
    """Raise JobFailed if Python cannot parse a file."""
    try:
        with warnings.catch_warnings():
            # Python shows them when the file is imported.
            warnings.simplefilter("ignore")
            ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        where = f"{file.absolute()}, line {error.lineno}"
        raise JobFailed(
            f"job {file}", found=f"SyntaxError: {error.msg} ({where})", cure="Fix the file."
        ) from error
    except (OSError, ValueError, RecursionError, MemoryError):
        # Importing the file gives the better message.
        return


def require_folder(folder: str, given: str, cure: str) -> None:
    """Raise WrongUse if there is no such folder."""
    if not folder or not Path(folder).is_dir():
        raise WrongUse(given, found="there is no such folder", cure=cure)


def comes_with_trimtab(job: str) -> bool:
    """Return whether the code of a job is trimtab's own.

    >>> comes_with_trimtab("slm:tiny"), comes_with_trimtab("job.py:MyJob")
    (True, False)
    """
    return job.startswith(FOLDER) or base_name(job) in BUILT_IN


def job_flags(*, training: bool = False) -> tuple[JobFlag, ...]:
    """Return every job flag once, with the jobs that have it.

    >>> [flag.help for flag in job_flags() if flag.name == "frozen"]
    ['hf: freeze the model except its head.']
    """
    rows = {flag.name: flag for job in JOBS for flag in job.flags if training or not flag.training}
    merged = []
    for flag in rows.values():
        jobs = tuple(job.name for job in JOBS if any(own.name == flag.name for own in job.flags))
        listed = ", ".join(name.rstrip(":") for name in jobs)
        merged.append(flag._replace(help=f"{listed}: {flag.help}", jobs=jobs))
    return tuple(merged)
