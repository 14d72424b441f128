"""How a command names a job and shapes it: shared by every verb that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.errors import WrongUse
from trimtab.jobs.load import expanded
from trimtab.jobs.registry import FOLDER

if TYPE_CHECKING:
    from trimtab.configs.knobs import KnobSettings
    from trimtab.spec import Cluster

FLAGS = {"evaluate_steps": "evaluate-every", "checkpoint_steps": "checkpoint-every"}
"""Arguments of training whose flag has another name."""
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="FILE.py:NAME or package.module:NAME (its code is run), a built-in (slm, bridge, naics; "
        "slm:tiny and so on are small ones), or hf:FOLDER with a Hugging Face config.json.",
    ),
]
RunOut = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The run's folder: resumed where there is one. Default: runs/JOB."),
]
Steps = Annotated[
    int | None, typer.Option(help="Stop after so many optimizer steps; without, at the job's end.")
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Fix a choice of the plan: micro_batch=8, strategy=fsdp, compile=false. Can be repeated.",
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="How often lost processes are started again; default 10."),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Where several nodes meet."),
]
MicroBatch = Annotated[int, typer.Option(help="Samples per forward pass on one rank.")]
Precision = Annotated[str, typer.Option(help="fp32, tf32, bf16, fp16 or bf16-true.")]
Recompute = Annotated[str, typer.Option(help="none, full or selective.")]
Compile = Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")]
Optimizer = Annotated[str, typer.Option(help="fused, foreach or plain.")]
Allocator = Annotated[str, typer.Option(help="default or expandable.")]
SyncBatchNorm = Annotated[
    bool,
    typer.Option(
        "--sync-batchnorm", help="Compute BatchNorm statistics over a micro-batch of all GPUs together."
    ),
]
Clip = Annotated[float | None, typer.Option(min=0.0, help="Clip gradients to this norm.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Trace again, even if nothing changed.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set an attribute of the job, as in --set layers=24. Can be repeated.",
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(help="hf: tokens per sample; default: what the model takes, at most 1024."),
]
Lora = Annotated[
    int | None,
    typer.Option(
        metavar="RANK",
        help="hf, bridge: LoRA of this rank beside every linear layer but the head's; all else is frozen.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE_OR_FOLDER",
        help="slm, hf: text to train on; default: the sources of Python's standard library.",
    ),
]
Turned = Annotated[
    list[str] | None,
    typer.Option(
        "--knob",
        metavar="NAME=VALUE",
        help="A knob as other trainers call it: batch_size=12, max_length=1024. Can be repeated.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(metavar="FILE[:PATH]", help="A config with such knobs: config.py:slm_config."),
]
Frozen = Annotated[bool, typer.Option("--frozen", help="hf: freeze the model except its head.")]
Llama = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="bridge: a Hugging Face folder for the first frozen model."),
]
Qwen = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="bridge: a Hugging Face folder for the second frozen model."),
]
Sequential = Annotated[
    bool,
    typer.Option("--sequential", help="bridge: one frozen model at a time, which takes less memory."),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="BANDWIDTH",
        help="Bandwidth between nodes, one way: 400Gb/gpu, 8x400Gb/node, 50GB/s/gpu (Gb: bits, GB: bytes); "
        "default: what such nodes usually have.",
    ),
]
SHAPED = {
    "seq": ("seq", (FOLDER,)),
    "data": ("data", (FOLDER, "slm")),
    "lora": ("lora", (FOLDER, "bridge")),
    "frozen": ("frozen", (FOLDER,)),
    "llama": ("llama_folder", ("bridge",)),
    "qwen": ("qwen_folder", ("bridge",)),
    "sequential": ("sequential", ("bridge",)),
}
"""For each flag, the attribute that it sets, and the jobs that have one."""
Stages = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Every stage of the job's curriculum: those of a folder, or `default` for its own.",
    ),
]


def stated_devices(on: str | None, network: str | None) -> str | Cluster | None:
    """What --on and --network name together; without --network, --on as it was given."""
    import sys

    from trimtab import api

    if network is None:
        return on
    found = api.cluster(on, network=network)
    if len(found.nodes) == 1:
        sys.stderr.write(f"trimtab: {found.notes[-1]}\n")
    return found


def stage_folder(given: str) -> str | None:
    """Where the stages are; None where they are the job's own.

    >>> stage_folder("default"), stage_folder("conf")
    (None, 'conf')
    """
    return None if given == "default" else given


def job_options(job: str, given: list[str] | None, **flags: Any) -> dict[str, Any]:
    """What the command line sets on a job, by name.

    >>> job_options("slm", ["layers=24"])
    {'layers': '24'}
    >>> job_options("bridge:tiny", None, lora=8, sequential=False)
    {'lora': 8}
    """
    found: dict[str, Any] = {}
    for one in given or []:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise WrongUse(f"--set {one}", found="it is not NAME=VALUE", cure="Write it as --set layers=24.")
        if name in found:
            raise WrongUse(f"--set {one}", found=f"{name} is also {found[name]}", cure="Give it once.")
        found[name] = value
    base = FOLDER if job.startswith(FOLDER) else job.partition(":")[0]
    for flag, chosen in flags.items():
        if chosen is None or chosen is False:
            continue
        name, jobs = SHAPED[flag]
        text = f"--{flag}" if chosen is True else f"--{flag} {chosen}"
        if base not in jobs:
            shaped = " and ".join(f"{one}FOLDER" if one == FOLDER else one for one in jobs)
            raise WrongUse(
                text,
                found=f"it shapes {shaped}, and the job is {job}",
                cure="Set an attribute that the job has with --set NAME=VALUE, or leave it out.",
            )
        if name in found:
            raise WrongUse(text, found=f"--set {name} is given too", cure="Give one of them.")
        # A run may be started from another folder than the one where it was planned.
        found[name] = str(chosen.expanduser().absolute()) if isinstance(chosen, Path) else chosen
    return expanded(job, found)


def turned(  # noqa: PLR0913 - what knobs may meet
    job: str,
    knobs: list[str] | None,
    config: str | None,
    *,
    options: dict[str, Any],
    pins: list[str],
    flags: dict[str, Any],
    where: Cluster | None,
    ranks: int | None = None,
) -> KnobSettings:
    """What --knob and --config set, with what other flags have set already; says on stderr what it meant."""
    import sys

    from trimtab import api

    asked: dict[str, Any] = {"options": options, "pins": pins, "where": where, "ranks": ranks}
    found = api.turn_knobs(job, knobs or [], config=config, **asked)
    for name, value in found.train.items():
        if flags.get(name) is not None:
            flag = FLAGS.get(name, name)
            raise WrongUse(
                f"knob {found.by[name]}", found=f"--{flag} {flags[name]} is given too", cure="Leave one out."
            )
        flags[name] = value
    for line in found.said:
        sys.stderr.write(f"trimtab: {line}\n")
    return found.replace(
        options=options | found.options,
        train=flags,
        pins={one.partition("=")[0].strip(): one.partition("=")[2].strip() for one in pins} | found.pins,
    )
