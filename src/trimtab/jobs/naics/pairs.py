"""Which codes are set against which: the rows of an epoch, by levels, relations, distances and margins."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.errors import UnknownName, WrongUse, nearest
from trimtab.jobs.naics.codes import LEVELS, RELATION_WORDS, codes
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from trimtab.jobs.naics.codes import Codes, Numbers

FURTHEST_APART = 2 * len(LEVELS)
"""Steps between two codes of six digits in different sectors."""
NEAR = ("child", "parent", "sibling")
"""What counts as a positive where nothing is said."""


class Pairs(Noun, frozen=True, kw_only=True):
    """What an anchor, its positive and its negatives have to be to each other; None is no condition.

    A margin of one number is the least by which a negative has to be further than the positive, in steps or
    in relations; of several numbers, one of them has to be the difference.
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
    """Conditions as people write them: one value or a list, relations by name or by number."""
    unknown = next((key for key in given if key not in Pairs.__struct_fields__), None)
    if unknown is not None:
        close = nearest(unknown, Pairs.__struct_fields__)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(
            f"pairs: {unknown}",
            found=f"there is no such condition{meant}",
            cure=f"There are {', '.join(Pairs.__struct_fields__)}.",
        )
    return Pairs(**{key: _condition(key, value) for key, value in given.items()})


def _condition(key: str, value: Any) -> Any:
    if value is None:
        return None
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not each:
        raise WrongUse(f"{key}: []", found="nothing is in the list, so nothing would be learnt", cure=_LEAVE)
    if key.endswith("_relation"):
        return tuple(_relation(key, one) for one in each)
    known = _allowed(key)
    for one in each:
        if isinstance(one, bool) or not isinstance(one, int | float) or one not in known:
            raise WrongUse(
                f"{key}: {one}",
                found=f"it is none of {known[0]} to {known[-1]}",
                cure="Give such a whole number, or a list of them.",
            )
    numbers = tuple(float(one) if "distance" in key else int(one) for one in each)
    return numbers if isinstance(value, list | tuple) or not key.endswith("_margin") else numbers[0]


_LEAVE = "Leave the key out for no condition."


def _allowed(key: str) -> range:
    if key.endswith("_level"):
        return range(LEVELS[0], LEVELS[-1] + 1)
    if key == "relation_margin":
        return range(len(RELATION_WORDS))
    return range(FURTHEST_APART + 1)


def _relation(key: str, given: Any) -> str:
    """A relation by its name, or by its number from 1."""
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= len(RELATION_WORDS):
        return RELATION_WORDS[given - 1]
    word = str(given).replace("_", "-").replace(" ", "-").lower()
    if word not in RELATION_WORDS:
        close = nearest(word, RELATION_WORDS)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(
            f"{key}: {given}",
            found=f"there is no such relation{meant}",
            cure=f"There are {', '.join(RELATION_WORDS)}, or their numbers from 1.",
        )
    return word


def rows(tree: Codes, pairs: Pairs, positives: int) -> tuple[Numbers, Numbers]:
    """Anchors and positives of an epoch: each anchor in so many rows, with another positive while they last.

    Anchors without a positive, and pairs without a negative, are left out.
    """
    anchors: list[int] = []
    others: list[int] = []
    meant = _is_in(tree.levels, pairs.anchor_level)
    for anchor in np.flatnonzero(meant):
        ranks, steps = _seen(tree, int(anchor))
        found = np.flatnonzero(
            (ranks > 0)
            & _is_in(tree.levels, pairs.positive_level)
            & _is_in(ranks, _ranks(pairs.positive_relation))
            & _is_in(steps, pairs.positive_distance)
        )
        usable = [one for one in found if _negatives(tree, pairs, ranks, steps, int(one)).any()]
        if usable:
            order = np.random.default_rng([int(anchor), len(usable)]).permutation(usable)
            anchors += [int(anchor)] * positives
            others += [int(order[row % len(order)]) for row in range(positives)]
    return np.array(anchors, dtype=np.int64), np.array(others, dtype=np.int64)


def negatives_of(tree: Codes, pairs: Pairs, anchor: int, positive: int) -> Numbers:
    """All codes that an anchor may be set against, beside that positive."""
    ranks, steps = _seen(tree, anchor)
    return np.flatnonzero(_negatives(tree, pairs, ranks, steps, positive))


def _negatives(tree: Codes, pairs: Pairs, ranks: Numbers, steps: Numbers, positive: int) -> Any:
    allowed = (
        (ranks > 0)
        & _is_in(tree.levels, pairs.negative_level)
        & _is_in(ranks, _ranks(pairs.negative_relation))
        & _is_in(steps, pairs.negative_distance)
        & _is_beyond(ranks - ranks[positive], pairs.relation_margin)
        & _is_beyond(steps - steps[positive], pairs.distance_margin)
    )
    allowed[positive] = False
    return allowed


def _seen(tree: Codes, anchor: int) -> tuple[Numbers, Numbers]:
    """Relations and distances of all codes, as one of them sees them."""
    return _seen_in(len(tree.names), anchor)


@lru_cache(maxsize=4096)
def _seen_in(total: int, anchor: int) -> tuple[Numbers, Numbers]:
    tree = codes(total)
    up, down = tree.apart(anchor)
    return tree.relations(anchor), up + down


def _ranks(names: tuple[str, ...] | None) -> tuple[int, ...] | None:
    return None if names is None else tuple(RELATION_WORDS.index(name) + 1 for name in names)


def _is_in(values: Numbers, allowed: tuple[float, ...] | None) -> Any:
    return np.ones(len(values), dtype=bool) if allowed is None else np.isin(values, allowed)


def _is_beyond(difference: Numbers, margin: float | tuple[float, ...] | None) -> Any:
    if margin is None:
        return np.ones(len(difference), dtype=bool)
    return np.isin(difference, margin) if isinstance(margin, tuple) else difference >= margin
