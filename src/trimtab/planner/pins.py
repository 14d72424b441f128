"""Read the pins (choices fixed by the user) and check them against each other before the search."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from trimtab.engine import in_backward_rules
from trimtab.errors import UnknownName, WrongUse, find_nearest
from trimtab.jobs.model_sizes import ModelSizes
from trimtab.planner.degrees import (
    DEGREES,
    MESH_AXES,
    TRIMTAB_RULES,
    ClusterShape,
    describe_cluster,
    lint_degrees,
    read_degrees,
)
from trimtab.spec import (
    Allocator,
    BaseFormat,
    ContextMethod,
    LossForm,
    Mesh,
    Offload,
    OptimizerImplementation,
    OptimizerRule,
    Precision,
    Recompute,
    Schedule,
    Setting,
    Strategy,
)
from trimtab.spec.finding import Severity
from trimtab.spec.setting import read_offload, read_optimizer
from trimtab.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trimtab.planner.degrees import DegreeFinding
    from trimtab.spec import Cluster, Workload

CHOICES: dict[str, Any] = {
    "strategy": Strategy,
    "precision": Precision,
    "recompute": Recompute,
    "base": BaseFormat,
    "loss": LossForm,
    "cp_method": ContextMethod,
    "optimizer": (*OptimizerImplementation, *OptimizerRule),
    "allocator": Allocator,
    "schedule": Schedule,
}
COUNTS = {
    "gpus": 1,
    "data_parallel": 1,
    "micro_batch": 1,
    "accumulation": 1,
    "workers": 0,
    "virtual_stages": 1,
}
COUNTS |= dict.fromkeys(DEGREES, 1)
"""Whole numbers with their minimum."""
SWITCHES = ("compile", "sync_batchnorm", "optimizer_in_backward")
"""True or false."""
OFFLOAD = "offload"
"""Words separated by commas."""
IN_BACKWARD = "optimizer_in_backward"
KEYS = (*CHOICES, OFFLOAD, *COUNTS, *SWITCHES)
BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
NOT_COMPILED_SYNCHRONISED = (
    "sync_batchnorm with compile on several GPUs: every BatchNorm layer waits for the other ranks, which a "
    "compiled graph cannot do and survive an out-of-memory of one of them"
)
BUDGET_IS_COMPILED = "a budget of activations is the compiler's, and compile=false"
BUDGET_OF_ONE_DEVICE = (
    "recompute by a budget: compiled code is traced on one device, so only strategies whose ranks compute "
    "the whole model without shards"
)
EXPERTS_NOT_COMPILED = "trimtab does not compile experts on different ranks"
TENSOR_NOT_COMPILED = "trimtab does not compile layers that ranks split between them"
CONTEXT_NOT_COMPILED = "trimtab does not compile attention over split sequences"
NOT_COMPILED_OFFLOADED = (
    "compile with activations on the host: compiled code decides itself which activations it stores"
)

Pins = dict[str, str | int | bool]


def read_ways(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Setting that no search changes: they are pinned or as the job has them.

    >>> read_ways({"base": "nf4", "optimizer": "adamw8bit"})
    {'base': <BaseFormat.NF4: 'nf4'>, 'optimizer_rule': <OptimizerRule.ADAMW_8BIT: 'adamw8bit'>}
    """
    ways: dict[str, Any] = {}
    if "base" in pins:
        ways["base"] = BaseFormat(pins["base"])
    if "loss" in pins:
        ways["loss"] = LossForm(pins["loss"])
    if "cp_method" in pins:
        ways["cp_method"] = ContextMethod(pins["cp_method"])
    if OFFLOAD in pins:
        ways[OFFLOAD] = read_offload(str(pins[OFFLOAD]))
    if IN_BACKWARD in pins:
        ways[IN_BACKWARD] = BOOLEANS[str(pins[IN_BACKWARD]).lower()]
    return ways | read_optimizer(str(pins.get("optimizer") or "")) | read_schedule(pins)


def read_schedule(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Setting for the pins of a pipeline; empty if none is pinned.

    Several virtual stages without a schedule are interleaved-1f1b; interleaved-1f1b without a number of them
    has two.

    >>> read_schedule({"virtual_stages": 3})
    {'schedule': <Schedule.INTERLEAVED: 'interleaved-1f1b'>, 'virtual_stages': 3}
    """
    stages = pins.get("virtual_stages")
    if "schedule" in pins:
        schedule = Schedule(pins["schedule"])
    elif stages is not None and stages > 1:
        schedule = Schedule.INTERLEAVED
    else:
        return {}
    fewest = 2 if schedule is Schedule.INTERLEAVED else 1
    return {"schedule": schedule, "virtual_stages": int(stages or fewest)}


def _check_schedule(pins: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pins that contradict a pinned schedule."""
    ways = read_schedule(pins)
    if not ways:
        return []
    schedule, stages = ways["schedule"], ways["virtual_stages"]
    wrong = [(why, "pin another schedule") for why in schedule.check_virtual_stages(stages)]
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    if strategy is not None and not strategy.has_schedule and schedule is not Schedule.ONE_F_ONE_B:
        wrong.append((f"schedule={schedule} with strategy={strategy.word}", "pin strategy=pipeline"))
    return wrong


def has_budget(pins: Mapping[str, Any]) -> bool:
    """Whether the pins leave it to the compiler what is recomputed.

    >>> has_budget({"recompute": "budget-0.5"}), has_budget({"recompute": "full"})
    (True, False)
    """
    return Recompute(str(pins.get("recompute", Recompute.NONE))).way.budget is not None


def _check_sync_batchnorm(pins: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pins that contradict a pinned sync_batchnorm."""
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    is_spread = strategy is not None and strategy.needs_several_gpus
    if not pins.get("sync_batchnorm") or not ((pins.get("gpus") or 1) > 1 or is_spread):
        return []
    if strategy is not None and strategy.why_not_synchronised:
        return [(f"strategy={strategy.why_not_synchronised}", "leave one of the two out")]
    return [(NOT_COMPILED_SYNCHRONISED, "leave one of the two out")] if pins.get("compile") else []


def read_pins(texts: Iterable[str]) -> Pins:
    """Return the pins in texts such as micro-batch=8 and compile=false.

    >>> read_pins(["micro-batch=8", "compile=false"]), read_pins(["tp=8,pp=4"])
    ({'micro_batch': 8, 'compile': False}, {'tp': 8, 'pp': 4})
    """
    pins: Pins = {}
    for text in split_pins(texts):
        key, equals, value = text.partition("=")
        if not equals:
            raise WrongUse(f"--pin {text}", found="it has no =", cure="Write it like --pin micro_batch=8.")
        name = key.strip().lower().replace("-", "_")
        pin = check_pin(name, value.strip(), f"--pin {text}")
        if name in pins and pins[name] != pin:
            raise WrongUse(
                f"--pin {name}={pins[name]} --pin {text}",
                found=f"{name} is pinned to two values",
                cure="Leave one of them out.",
            )
        pins[name] = pin
    return pins


def split_pins(texts: Iterable[str]) -> Iterator[str]:
    """Yield each pin of texts with several; a comma ends a pin if a name and = follow.

    >>> list(split_pins(["tp=8,pp=4", "offload=params,optimizer"]))
    ['tp=8', 'pp=4', 'offload=params,optimizer']
    """
    for text in texts:
        yield from re.split(r"\s*,\s*(?=[A-Za-z_-]+\s*=)", text)


def check_pins(pins: Mapping[str, Any]) -> Pins:
    """Return pins given in Python, checked like those on the command line."""
    return {
        str(key).replace("-", "_"): check_pin(str(key).replace("-", "_"), str(value), f"pin {key}={value}")
        for key, value in pins.items()
    }


def check_pin(name: str, value: str, given: str) -> str | int | bool:
    """Return the value of a pin in the type of its key; raise if it is not legal."""
    if name in CHOICES:
        choices = [word.value for word in CHOICES[name]]
        if value in choices:
            return value
        raise WrongUse(given, found=f"{name} is none of {', '.join(choices)}", cure="Use one of those.")
    if name == OFFLOAD:
        try:
            return ",".join(read_offload(value)) or "none"
        except ValueError as error:
            raise WrongUse(given, found=str(error), cure="Use those, separated by commas.") from None
    if name in COUNTS:
        least = COUNTS[name]
        if value.isascii() and value.isdigit() and int(value) >= least:
            return int(value)
        raise WrongUse(given, found=f"{name} is no whole number from {least} up", cure=f"Write {name}=8.")
    if name in SWITCHES:
        if value.lower() in BOOLEANS:
            return BOOLEANS[value.lower()]
        raise WrongUse(given, found=f"{name} is neither true nor false", cure=f"Write {name}=true or =false.")
    if name == "global_batch":
        raise WrongUse(
            given,
            found="the global batch is the job's own, not a choice of the plan",
            cure=f"Use --set global_batch={value}.",
        )
    close = find_nearest(name, KEYS) or list(KEYS)
    raise UnknownName(
        given, found=f"nothing is called {name}; the nearest are {', '.join(close)}", cure="Pin one of those."
    )


def check_degree_pins(
    pins: Mapping[str, Any], sizes: ModelSizes, cluster: Cluster, global_batch: int | None = None
) -> list[DegreeFinding]:
    """Return warnings about pinned degrees; raise if one is illegal.

    Nothing is traced: the sizes of the model and of the cluster decide.
    """
    pinned = {name: int(pins[name]) for name in DEGREES if name in pins}
    if not pinned:
        return []
    shape = describe_cluster(cluster, pins.get("gpus"))
    rules = replace(TRIMTAB_RULES, uses_all_gpus="gpus" in pins)
    findings = lint_degrees(read_degrees(pins, global_batch=global_batch), sizes, shape, rules)
    _refuse_degrees(pinned, findings)
    return findings


def refuse_unused_processes(pins: Mapping[str, Any], processes: int) -> None:
    """Raise if pinned degrees do not make the number of processes, with what they make and what is legal."""
    pinned = {name: int(pins[name]) for name in pins if name in DEGREES}
    degrees, rules = read_degrees(pinned), replace(TRIMTAB_RULES, uses_all_gpus=True)
    errors = _list_errors(lint_degrees(degrees, ModelSizes(), ClusterShape(gpus=processes), rules))
    if not errors:
        return
    found = _join_found(pinned, errors).replace("GPUs", "processes").replace("GPU", "process")
    cure = _join_cures(errors)
    ranks = prod(pinned.get(axis, 1) for axis in MESH_AXES)
    if ranks != processes and all(error.rule == "product" for error in errors):
        cure = f"{cure.removesuffix('.')}, or --procs {ranks}."
    raise WrongUse(f"{_spell_pins(pinned)} with --procs {processes}", found=found, cure=cure)


def _refuse_degrees(pinned: Mapping[str, int], findings: list[DegreeFinding]) -> None:
    """Raise if a finding is an error."""
    if errors := _list_errors(findings):
        raise WrongUse(_spell_pins(pinned), found=_join_found(pinned, errors), cure=_join_cures(errors))


def _list_errors(findings: list[DegreeFinding]) -> list[DegreeFinding]:
    """Return the findings that cannot run."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def _spell_pins(pinned: Mapping[str, int]) -> str:
    """Return pinned degrees as a user writes them."""
    return "--pin " + ",".join(f"{name}={value}" for name, value in pinned.items())


def _join_found(pinned: Mapping[str, int], errors: list[DegreeFinding]) -> str:
    """Return what was found, each with its degrees if several are pinned."""
    return "; ".join(error.found if len(pinned) == 1 else f"{error.given}: {error.found}" for error in errors)


def _join_cures(findings: list[DegreeFinding]) -> str:
    """Return the cures of findings, each with its degree if they are about several."""
    if len({finding.given for finding in findings}) == 1:
        return " ".join(dict.fromkeys(finding.cure for finding in findings))
    cures = (f"{finding.given}: {finding.cure[:1].lower()}{finding.cure[1:]}" for finding in findings)
    return " ".join(dict.fromkeys(cures))


def find_wrong_degree(pins: Mapping[str, Any], mesh: Mesh) -> str:
    """Return the first pinned degree that a mesh does not have; empty if it has them all.

    >>> find_wrong_degree({"pp": 4}, Mesh(pp=2)), find_wrong_degree({"pp": 4}, Mesh(pp=4))
    ('pp', '')
    """
    axes = [name for name in DEGREES if name in pins and name not in Setting.__struct_fields__]
    wrong = (name for name in axes if getattr(mesh, name, 1) != pins[name])
    return next(wrong, "")


def find_contradictions(pins: Mapping[str, Any], workload: Workload, available: int) -> list[tuple[str, str]]:
    """Return each contradiction of the pins with its fix."""
    wrong: list[tuple[str, str]] = []
    gpus, strategy = pins.get("gpus"), STRATEGIES.get(str(pins.get("strategy")))
    if gpus is not None and gpus > available:
        wrong.append(
            (f"gpus={gpus}, and there are {available}", f"pin gpus={available} or fewer, or name more")
        )
    if strategy is not None:
        wrong += strategy.pin_conflicts(pins, available, len(workload.branches))
    if (pins.get("compile") or has_budget(pins)) and Offload.ACTIVATIONS in read_ways(pins).get(OFFLOAD, ()):
        wrong.append((NOT_COMPILED_OFFLOADED, "leave one of the two out"))
    if has_budget(pins) and pins.get("compile") is False:
        wrong.append(
            (BUDGET_IS_COMPILED, "pin compile=true, or recompute=selective or another way without a budget")
        )
    if pins.get("compile") and (pins.get("tp") or 1) > 1:
        wrong.append(
            (f"tp={pins['tp']} with compile=true: {TENSOR_NOT_COMPILED}", "leave one of the two out")
        )
    if pins.get("compile") and (pins.get("cp") or 1) > 1:
        wrong.append(
            (f"cp={pins['cp']} with compile=true: {CONTEXT_NOT_COMPILED}", "leave one of the two out")
        )
    if pins.get("compile") and (pins.get("ep") or 1) > 1:
        wrong.append(
            (f"ep={pins['ep']} with compile=true: {EXPERTS_NOT_COMPILED}", "leave one of the two out")
        )
    wrong += _check_in_backward(pins, workload) + _check_schedule(pins)
    return wrong + _check_sync_batchnorm(pins) + _check_batch(pins, workload.global_batch)


def _check_in_backward(pins: Mapping[str, Any], workload: Workload) -> list[tuple[str, str]]:
    """Return the pins that contradict updates in the backward pass."""
    ways = read_ways(pins)
    if not ways.get(IN_BACKWARD):
        return []
    splits = (pins.get("accumulation") or 1) > 1
    splits = splits or (pins.get("micro_batch") or workload.global_batch) < workload.global_batch
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    spread = (pins.get("gpus") or 1) > 1 or (strategy is not None and strategy.needs_several_gpus)
    narrow = "precision" in pins and Precision(pins["precision"]).dtypes.scales_loss
    offloaded = {Offload.PARAMS, Offload.OPTIMIZER} & {*ways.get(OFFLOAD, ())}
    rules = (
        (spread, in_backward_rules.NOT_SPREAD, "use one GPU"),
        (splits, in_backward_rules.NOT_ACCUMULATED, f"pin micro_batch={workload.global_batch}"),
        (narrow, in_backward_rules.NOT_SCALED, "pin another precision"),
        (pins.get("compile"), in_backward_rules.NOT_COMPILED, "pin compile=false"),
        (offloaded, in_backward_rules.NOT_OFFLOADED, "pin offload=activations"),
        (workload.cached, in_backward_rules.NOT_CACHED, "use another job"),
    )
    return [
        (f"{IN_BACKWARD}=true: {why}", f"leave {IN_BACKWARD} out, or {cure}")
        for is_given, why, cure in rules
        if is_given
    ]


def _check_batch(pins: Mapping[str, Any], global_batch: int) -> list[tuple[str, str]]:
    """Return the pins that cannot give the global batch together, with the fix."""
    gpus, ranks = pins.get("gpus"), pins.get("data_parallel")
    if ranks is not None and gpus is not None and gpus % ranks:
        return [(f"data_parallel={ranks} with gpus={gpus}", f"pin a divisor of {gpus}")]
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    following = gpus if gpus == 1 else None
    if strategy is not None:
        following = strategy.pinned_data_parallel(gpus)
    if following is not None:
        # Ranks that split layers or sequences see the same samples.
        following = max(1, following // (int(pins.get("tp") or 1) * int(pins.get("cp") or 1)))
    ranks = 1 if following == 1 else ranks or following
    if ranks is not None and ranks > global_batch:
        return [
            (
                f"{ranks} data-parallel GPUs for a global batch of {global_batch}",
                f"use {global_batch} or fewer, or a larger batch",
            )
        ]
    micro, rounds = pins.get("micro_batch"), pins.get("accumulation")
    share = -(-global_batch // (ranks or 1))
    if micro is not None and micro > share:
        return [(f"micro_batch={micro}, and a rank's share of the global batch {global_batch} is {share}",
                 f"pin micro_batch={share} or less")]  # fmt: skip
    if rounds is not None and rounds > share:
        return [(f"accumulation={rounds}, and a rank's share of the global batch {global_batch} is {share}",
                 f"pin accumulation={share} or less")]  # fmt: skip
    if micro is not None and rounds is not None and ranks is not None:
        needed = -(-share // micro)
        if needed != rounds:
            product = f"micro_batch {micro} x accumulation {rounds} x {ranks} data-parallel"
            return [
                (
                    f"{product} is not the global batch {global_batch}",
                    f"pin accumulation={needed}, or leave it out",
                )
            ]
    return []
