"""Pins: choices that the user has fixed, read and checked against each other before anything is searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import UnknownName, WrongUse, find_nearest
from trimtab.spec import Allocator, OptimizerImplementation, Precision, Recompute, Strategy
from trimtab.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trimtab.spec import Workload

CHOICES: dict[str, Any] = {
    "strategy": Strategy,
    "precision": Precision,
    "recompute": Recompute,
    "optimizer": OptimizerImplementation,
    "allocator": Allocator,
}
COUNTS = {"gpus": 1, "data_parallel": 1, "micro_batch": 1, "accumulation": 1, "workers": 0}
"""Whole numbers, with the least that each can be."""
SWITCHES = ("compile", "sync_batchnorm")
"""True or false."""
KEYS = (*CHOICES, *COUNTS, *SWITCHES)
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

Pins = dict[str, str | int | bool]


def _check_sync_batchnorm(pins: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pins under which BatchNorm is not synchronised, though that is pinned."""
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    is_spread = strategy is not None and strategy.needs_several_gpus
    if not pins.get("sync_batchnorm") or not ((pins.get("gpus") or 1) > 1 or is_spread):
        return []
    if strategy is not None and strategy.why_not_synchronised:
        return [(f"strategy={strategy.why_not_synchronised}", "leave one of the two out")]
    return [(NOT_COMPILED_SYNCHRONISED, "leave one of the two out")] if pins.get("compile") else []


def read_pins(texts: Iterable[str]) -> Pins:
    """Pins from what people type: micro-batch=8, compile=false.

    >>> read(["micro-batch=8", "compile=false"])
    {'micro_batch': 8, 'compile': False}
    """
    found: Pins = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise WrongUse(f"--pin {text}", found="it has no =", cure="Write it like --pin micro_batch=8.")
        name = key.strip().lower().replace("-", "_")
        meant = check_pin(name, value.strip(), f"--pin {text}")
        if name in found and found[name] != meant:
            raise WrongUse(
                f"--pin {name}={found[name]} --pin {text}",
                found=f"{name} is pinned to two values",
                cure="Leave one of them out.",
            )
        found[name] = meant
    return found


def check_pins(pins: Mapping[str, Any]) -> Pins:
    """Pins from Python: the same checks, whatever the types."""
    return {
        str(key).replace("-", "_"): check_pin(str(key).replace("-", "_"), str(value), f"pin {key}={value}")
        for key, value in pins.items()
    }


def check_pin(name: str, value: str, given: str) -> str | int | bool:
    """One pin's value, of the type that its key has."""
    if name in CHOICES:
        known = [word.value for word in CHOICES[name]]
        if value in known:
            return value
        raise WrongUse(given, found=f"{name} is none of {', '.join(known)}", cure="Use one of those.")
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
            cure="Use --global-batch N.",
        )
    close = find_nearest(name, KEYS) or list(KEYS)
    raise UnknownName(
        given, found=f"nothing is called {name}; the nearest are {', '.join(close)}", cure="Pin one of those."
    )


def find_contradictions(pins: Mapping[str, Any], workload: Workload, available: int) -> list[tuple[str, str]]:
    """What cannot be together: what is wrong, and what to do."""
    wrong: list[tuple[str, str]] = []
    gpus, strategy = pins.get("gpus"), STRATEGIES.get(str(pins.get("strategy")))
    if gpus is not None and gpus > available:
        wrong.append(
            (f"gpus={gpus}, and there are {available}", f"pin gpus={available} or fewer, or name more")
        )
    if strategy is not None:
        wrong += strategy.pin_conflicts(pins, available, len(workload.branches))
    return wrong + _check_sync_batchnorm(pins) + _check_batch(pins, workload.global_batch)


def _check_batch(pins: Mapping[str, Any], whole: int) -> list[tuple[str, str]]:
    """Pins that cannot make the global batch together."""
    gpus, ranks = pins.get("gpus"), pins.get("data_parallel")
    if ranks is not None and gpus is not None and gpus % ranks:
        return [(f"data_parallel={ranks} with gpus={gpus}", f"pin a divisor of {gpus}")]
    strategy = STRATEGIES.get(str(pins.get("strategy")))
    following = gpus if gpus == 1 else None
    if strategy is not None:
        following = strategy.pinned_data_parallel(gpus)
    ranks = 1 if following == 1 else ranks or following
    if ranks is not None and ranks > whole:
        return [
            (
                f"{ranks} data-parallel GPUs for a global batch of {whole}",
                f"use {whole} or fewer, or a larger batch",
            )
        ]
    micro, rounds = pins.get("micro_batch"), pins.get("accumulation")
    share = -(-whole // (ranks or 1))
    if micro is not None and micro > share:
        return [(f"micro_batch={micro}, and a rank's share of the global batch {whole} is {share}",
                 f"pin micro_batch={share} or less")]  # fmt: skip
    if rounds is not None and rounds > share:
        return [(f"accumulation={rounds}, and a rank's share of the global batch {whole} is {share}",
                 f"pin accumulation={share} or less")]  # fmt: skip
    if micro is not None and rounds is not None and ranks is not None:
        needed = -(-share // micro)
        if needed != rounds:
            product = f"micro_batch {micro} x accumulation {rounds} x {ranks} data-parallel"
            return [
                (f"{product} is not the global batch {whole}", f"pin accumulation={needed}, or leave it out")
            ]
    return []
