"""The lines of `accelerate launch` and `deepspeed` that run a user's own script by a plan.

What these launchers can say of a plan is said: processes, nodes, precision, compiling, sharding. The batch is
the script's own: `trimtab apply` writes it into the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.launching.errand import variables
from trimtab.launching.quoting import check_path
from trimtab.spec import Launch, LaunchKind
from trimtab.spec.precision import BFLOAT16, FLOAT16
from trimtab.strategies import strategy_of
from trimtab.training.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.launching.errand import Errand
    from trimtab.launching.habits import Habits

MIXED = {BFLOAT16: "bf16", FLOAT16: "fp16", None: "no"}
"""The dtypes of autocast in the words of accelerate."""
PORT = 29500


def line(  # noqa: PLR0913 - an errand, a script and where it runs
    kind: LaunchKind,
    errand: Errand,
    habits: Habits,
    *,
    script: str | None,
    rendezvous: str | None,
    cores: int | None,
    here: Mapping[str, str],
) -> Launch:
    """The line for a user's script."""
    if not script:
        raise WrongUse(
            f"--{kind}",
            found="no script is named",
            cure="Give your own with --script train.py, and its words after --.",
        )
    check_path("--script", script)
    strategy = strategy_of(errand.plan.choice)
    if not strategy.is_in_frameworks:
        raise WrongUse(
            f"--{kind} with a plan of strategy {strategy.word}",
            found=f"{kind} has nothing like it",
            cure="Plan again with --pin strategy=ddp or fsdp, or launch `trimtab train` without this option.",
        )
    words = (
        _accelerate(errand, rendezvous) if kind is LaunchKind.ACCELERATE else _deepspeed(errand, rendezvous)
    )
    given = variables(errand, cores=cores, offline=habits.offline, here=here)
    given |= {name: (value, "trimtab.toml says so") for name, value in habits.environment.items()}
    choice = errand.plan.choice
    batch = f"micro-batch {choice.micro_batch}, {choice.accumulation} accumulated"
    return Launch(
        kind=kind,
        command=(*words, script, *errand.extra),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        notes=(f"the batch is the script's own ({batch}): `trimtab apply PLAN --to CONFIG` writes it",),
    )


def _accelerate(errand: Errand, rendezvous: str | None) -> list[str]:
    """Source: `accelerate launch --help`."""
    need, choice = errand.need, errand.plan.choice
    ranks = need.nodes * need.procs
    words = ["accelerate", "launch", f"--num_processes={ranks}", f"--num_machines={need.nodes}"]
    words.append(f"--mixed_precision={MIXED[choice.dtypes.autocast]}")
    words.append(f"--dynamo_backend={'inductor' if choice.compile else 'no'}")
    if not need.gpus:
        words.append("--cpu")
    elif flags := strategy_of(choice).accelerate_flags:
        words += flags
    elif ranks > 1:
        words.append("--multi_gpu")
    if need.nodes > 1:
        place = _place(rendezvous, need.nodes)
        words += [f"--main_process_ip={place.host}", f"--main_process_port={place.port}"]
        words += ["--rdzv_backend=c10d"]
    return words


def _deepspeed(errand: Errand, rendezvous: str | None) -> list[str]:
    """Source: https://www.deepspeed.ai/getting-started; precision and sharding are in the script's config."""
    need = errand.need
    words = ["deepspeed", f"--num_gpus={need.procs}"]
    if need.nodes > 1:
        place = _place(rendezvous, need.nodes)
        words += [f"--num_nodes={need.nodes}", "--hostfile=hostfile"]
        words += [f"--master_addr={place.host}", f"--master_port={place.port}"]
    return words


def _place(rendezvous: str | None, nodes: int) -> Meeting:
    if rendezvous is None:
        raise WrongUse(
            f"a plan for {nodes} nodes",
            found="they need a place to meet",
            cure=f"Give --rendezvous HOST:{PORT}, where HOST is one of them.",
        )
    return Meeting.read(rendezvous)
