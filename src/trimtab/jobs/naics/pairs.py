"""Select anchors, positives and negatives by level, relation, distance and margin."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.errors import UnknownName, WrongUse, find_nearest
from trimtab.jobs.naics.codes import LEVELS, RELATION_NAMES, build_codes
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from trimtab.jobs.naics.codes import Codes, Numbers

FURTHEST_APART = 2 * len(LEVELS)
"""Maximum steps: between two codes of six digits in different sectors."""
NEAR = ("child", "parent", "sibling")
"""Default relations of a positive."""


class Pairs(Noun, frozen=True, kw_only=True):
    """Conditions on anchors, positives and negatives; None is no condition.

    A margin of one number is the minimum by which a negative must be further than the positive, in steps or
    in relations; with several numbers, the difference must be one of them.
    """

    anchor_level: tuple[int, ...] | None = None
    relation_margin: int | tuple[int, ...] | None = 1
    distance_margin: float | tuple[float, ...] | None = None
    positive_level: tuple[int, ...] | None = None
    positive_relation: tuple[str, ...] | None = NEAR
    positive_distance: tuple[float, ...] | None = None
    negative_level: tuple[int, ...] | None = None
    negative_relation: tuple[str, ...] | None = None
    negative_distance: tuple[float, ...] | None = None


def read_pairs(given: dict[str, Any]) -> Pairs:
    """Parse conditions from options: a value or a list, relations by name or by number."""
    unknown = next((key for key in given if key not in Pairs.__struct_fields__), None)
    if unknown is not None:
        close = find_nearest(unknown, Pairs.__struct_fields__)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(
            f"pairs: {unknown}",
            found=f"there is no such condition{meant}",
            cure=f"There are {', '.join(Pairs.__struct_fields__)}.",
        )
    return Pairs(**{key: _parse_condition(key, value) for key, value in given.items()})


def _parse_condition(key: str, value: Any) -> Any:
    if value is None:
        return None
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not each:
        raise WrongUse(f"{key}: []", found="the list is empty, so nothing would be selected", cure=_LEAVE)
    if key.endswith("_relation"):
        return tuple(_parse_relation(key, item) for item in each)
    allowed = _allowed_range(key)
    for item in each:
        if isinstance(item, bool) or not isinstance(item, int | float) or item not in allowed:
            raise WrongUse(
                f"{key}: {item}",
                found=f"it is not one of {allowed[0]} to {allowed[-1]}",
                cure="Give such a whole number, or a list of them.",
            )
    numbers = tuple(float(item) if "distance" in key else int(item) for item in each)
    return numbers if isinstance(value, list | tuple) or not key.endswith("_margin") else numbers[0]


_LEAVE = "Leave the key out for no condition."


def _allowed_range(key: str) -> range:
    if key.endswith("_level"):
        return range(LEVELS[0], LEVELS[-1] + 1)
    if key == "relation_margin":
        return range(len(RELATION_NAMES))
    return range(FURTHEST_APART + 1)


def _parse_relation(key: str, given: Any) -> str:
    """Return the name of a relation given by name or by number from 1."""
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= len(RELATION_NAMES):
        return RELATION_NAMES[given - 1]
    word = str(given).replace("_", "-").replace(" ", "-").lower()
    if word not in RELATION_NAMES:
        close = find_nearest(word, RELATION_NAMES)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(
            f"{key}: {given}",
            found=f"there is no such relation{meant}",
            cure=f"There are {', '.join(RELATION_NAMES)}, or their numbers from 1.",
        )
    return word


def select_rows(tree: Codes, pairs: Pairs, positives: int) -> tuple[Numbers, Numbers]:
    """Return anchors and positives of an epoch: `positives` rows per anchor, with different positives first.

    Anchors without a positive, and pairs without a negative, are left out.
    """
    anchors: list[int] = []
    others: list[int] = []
    is_anchor = _is_in(tree.levels, pairs.anchor_level)
    for anchor in np.flatnonzero(is_anchor):
        ranks, steps = _relations_and_distances(tree, int(anchor))
        candidates = np.flatnonzero(
            (ranks > 0)
            & _is_in(tree.levels, pairs.positive_level)
            & _is_in(ranks, _relation_numbers(pairs.positive_relation))
            & _is_in(steps, pairs.positive_distance)
        )
        usable = [code for code in candidates if _negative_mask(tree, pairs, ranks, steps, int(code)).any()]
        if usable:
            order = np.random.default_rng([int(anchor), len(usable)]).permutation(usable)
            anchors += [int(anchor)] * positives
            others += [int(order[row % len(order)]) for row in range(positives)]
    return np.array(anchors, dtype=np.int64), np.array(others, dtype=np.int64)


def allowed_negatives(tree: Codes, pairs: Pairs, anchor: int, positive: int) -> Numbers:
    """Return all codes that may be negatives of an anchor and its positive."""
    ranks, steps = _relations_and_distances(tree, anchor)
    return np.flatnonzero(_negative_mask(tree, pairs, ranks, steps, positive))


def _negative_mask(tree: Codes, pairs: Pairs, ranks: Numbers, steps: Numbers, positive: int) -> Any:
    allowed = (
        (ranks > 0)
        & _is_in(tree.levels, pairs.negative_level)
        & _is_in(ranks, _relation_numbers(pairs.negative_relation))
        & _is_in(steps, pairs.negative_distance)
        & _is_beyond(ranks - ranks[positive], pairs.relation_margin)
        & _is_beyond(steps - steps[positive], pairs.distance_margin)
    )
    allowed[positive] = False
    return allowed


def _relations_and_distances(tree: Codes, anchor: int) -> tuple[Numbers, Numbers]:
    """Return the relations and distances of all codes to an anchor."""
    return _cached_relations(len(tree.names), anchor)


@lru_cache(maxsize=4096)
def _cached_relations(total: int, anchor: int) -> tuple[Numbers, Numbers]:
    tree = build_codes(total)
    up, down = tree.steps_from(anchor)
    return tree.relations_to(anchor), up + down


def _relation_numbers(names: tuple[str, ...] | None) -> tuple[int, ...] | None:
    return None if names is None else tuple(RELATION_NAMES.index(name) + 1 for name in names)


def _is_in(values: Numbers, allowed: tuple[float, ...] | None) -> Any:
    return np.ones(len(values), dtype=bool) if allowed is None else np.isin(values, allowed)


def _is_beyond(difference: Numbers, margin: float | tuple[float, ...] | None) -> Any:
    if margin is None:
        return np.ones(len(difference), dtype=bool)
    return np.isin(difference, margin) if isinstance(margin, tuple) else difference >= margin
