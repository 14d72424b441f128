"""Ways to use less memory that change more than the plan's own choices, and what each would buy.

A loss in pieces computes the same numbers, so a plan uses it where nothing else fits. The others change
results, or take memory of the host and time: a plan uses them if the policy allows them, and otherwise only
says what they would buy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from trimtab.engine.in_backward_rules import find_in_backward_refusal
from trimtab.engine.offload_rules import find_refusal
from trimtab.errors import WrongUse
from trimtab.planner.pins import IN_BACKWARD, read_ways
from trimtab.spec import PARTS, Recompute
from trimtab.strategies import strategy_of
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trimtab.spec import Estimate, Footprint, Policy, Setting, Trace

LARGE = 0.1
"""Share of the memory from which a part is worth a row."""
FULL = 0.5
"""Share of the allowed memory from which memory matters."""


@dataclass(frozen=True)
class WayToFit:
    """A change of the setting that saves memory."""

    name: str
    """As in a table: nf4 base."""
    pins: Mapping[str, str] = field(hash=False)
    allow: str
    """Word of --allow; empty if a plan may always use it."""
    is_large: Callable[[Footprint], bool] = field(hash=False)
    """Whether the part that it shrinks is large."""
    compiles: bool = True
    """Whether it works with torch.compile."""
    is_slow_to_trace: bool = False
    """Whether every block of a model has to be traced, which can take longer than the plan itself."""
    can_change: Callable[[Trace], bool] = field(default=lambda _: True, hash=False)
    """Whether it may change the step of a trace without it: otherwise its trace is the same."""

    def is_free(self, pins: Mapping[str, object]) -> bool:
        """Whether the user has not decided this already, and nothing that excludes it."""
        return not self.pins.keys() & pins.keys() and (self.compiles or not pins.get("compile"))

    @property
    def typed(self) -> str:
        """The pins as users type them."""
        return " ".join(f"--pin {key}={value}" for key, value in self.pins.items())


HEAD = "lm_head"
"""Name of the layer that computes the logits in the models whose loss can be computed in pieces."""


def may_use_head(trace: Trace) -> bool:
    """Whether a step runs `lm_head`, as far as the trace shows. A loss in pieces changes nothing else.

    Compiled code has no names of modules, so every such trace counts as one that runs it.
    """
    activations = PARTS.index("activations")
    return any(
        any(HEAD in name.split(".") for name in rank.module_names)
        or not any(
            part == activations and rank.module_names[module]
            for part, module in zip(rank.parts, rank.modules, strict=True)
        )
        for rank in trace.ranks
    )


def _total(parts: Footprint) -> int:
    return parts.weights + parts.gradients + parts.optimizer + parts.activations


WAYS = (
    WayToFit(
        name="loss in pieces",
        pins={"loss": "chunked"},
        allow="",
        is_large=lambda parts: parts.activations > LARGE * _total(parts),
        can_change=may_use_head,
    ),
    WayToFit(
        name="8-bit AdamW",
        pins={"optimizer": "adamw8bit"},
        allow="optimizer",
        is_large=lambda parts: parts.optimizer > LARGE * _total(parts),
    ),
    WayToFit(
        name="optimizer in backward",
        pins={IN_BACKWARD: "true"},
        allow="optimizer",
        is_large=lambda parts: parts.gradients > LARGE * _total(parts),
        compiles=False,
    ),
    WayToFit(
        name="nf4 base",
        pins={"base": "nf4"},
        allow="quantised",
        # Only frozen weights are stored in 4 bits; those have no optimizer state.
        is_large=lambda parts: parts.weights > LARGE * _total(parts) and parts.optimizer < parts.weights,
    ),
    WayToFit(
        name="optimizer on the CPU",
        pins={"offload": "optimizer"},
        allow="offload",
        is_large=lambda parts: parts.optimizer + parts.gradients > LARGE * _total(parts),
    ),
    WayToFit(
        name="weights and optimizer on the CPU",
        pins={"offload": "params,optimizer"},
        allow="offload",
        is_large=lambda parts: parts.optimizer + parts.weights > LARGE * _total(parts),
    ),
    WayToFit(
        name="activations on the host",
        pins={"offload": "activations"},
        allow="offload",
        is_large=lambda parts: parts.activations > LARGE * _total(parts),
        compiles=False,
        is_slow_to_trace=True,
    ),
)
ALLOWED = tuple(dict.fromkeys(way.allow for way in WAYS if way.allow))


def check_allowed(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of --allow; raise if one is unknown.

    >>> check_allowed(["quantised"])
    ('quantised',)
    """
    known = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    wrong = [word for word in known if word not in ALLOWED]
    if wrong:
        raise WrongUse(
            f"--allow {','.join(known)}",
            found=f"{wrong[0]} is none of {', '.join(ALLOWED)}",
            cure="Use those, separated by commas.",
        )
    return known


def list_variants(policy: Policy, *, allowed: bool) -> Iterator[tuple[WayToFit, ...]]:
    """Yield the sets of ways that a plan may use, or with `allowed` false all that exist, smallest first."""
    usable = [
        way
        for way in WAYS
        if way.is_free(policy.pins) and (not allowed or not way.allow or way.allow in policy.allow)
    ]
    for count in range(1, len(usable) + 1):
        for ways in combinations(usable, count):
            if len(join_pins(ways)) == sum(len(way.pins) for way in ways) and not _are_at_odds(ways):
                yield ways


def _are_at_odds(ways: Iterable[WayToFit]) -> bool:
    """Whether an optimizer would be on the CPU that runs on a GPU only, or in the backward pass."""
    pins = join_pins(ways)
    return "offload" in pins and (
        "optimizer" in pins or (IN_BACKWARD in pins and "optimizer" in pins["offload"])
    )


def join_pins(ways: Iterable[WayToFit]) -> dict[str, str]:
    """Return the pins of several ways."""
    return {key: value for way in ways for key, value in way.pins.items()}


def list_relevant(setting: Setting, estimate: Estimate, allowed_bytes: int, policy: Policy) -> list[WayToFit]:
    """Return the ways that would shrink a large part of a plan in which memory matters."""
    matters = setting.recompute is not Recompute.NONE or estimate.process_bytes > FULL * allowed_bytes
    if not matters:
        return []
    return [way for way in WAYS if way.is_free(policy.pins) and way.is_large(estimate.parts)]


def list_changed(
    setting: Setting, estimate: Estimate, allowed_bytes: int, policy: Policy, trace: Trace | None = None
) -> Iterator[tuple[WayToFit, Setting]]:
    """Yield the plan's setting with each of the relevant ways that it can use.

    With the trace of the setting, ways that cannot change it are left out.
    """
    for way in list_relevant(setting, estimate, allowed_bytes, policy):
        if trace is not None and not way.can_change(trace):
            continue
        changed = change_setting(setting, way)
        refusals = (
            find_in_backward_refusal(changed),
            find_refusal(strategy_of(changed), changed.gpus, changed.offload),
        )
        if changed != setting and not any(refusals):
            yield way, changed


def change_setting(setting: Setting, way: WayToFit) -> Setting:
    """Return a setting with a way."""
    return setting.replace(compile=setting.compile and way.compiles, **read_ways(way.pins))


def compare_ways(before: Estimate, after: Estimate) -> str:
    """Return what a way buys, in words."""
    text = f"{format_bytes(after.process_bytes)} instead of {format_bytes(before.process_bytes)}"
    if not before.step_s or not after.step_s:
        return text
    ratio = after.step_s / before.step_s
    return f"{text}, {ratio:.2f}x the time" if ratio >= 1 else f"{text}, {1 / ratio:.2f}x as fast"
