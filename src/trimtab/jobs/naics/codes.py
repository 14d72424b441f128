"""A made-up classification of industries: codes of two to six digits, how they are related, and their texts.

It has the shape of the real one (20 sectors, 96 subsectors, 308 groups, 689 industries, 1,012 national
industries: 2,125 codes) and nothing of its content. A code shares words with all codes above it, so that what
is near in the tree is near in its words: that can be learnt. The same on every machine.
"""

from __future__ import annotations

import random
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trimtab.errors import WrongUse

if TYPE_CHECKING:
    Numbers = np.ndarray[Any, np.dtype[np.int64]]

LEVELS = (2, 3, 4, 5, 6)
"""Digits of a code."""
COUNTS = (20, 96, 308, 689, 1012)
"""Codes of so many digits."""
FEWEST, MOST = 10, 9000
"""Codes that a tree can be made of: beyond that, two digits are too few for the sectors."""

RELATIONS = {
    "child": (0, 1),
    "parent": (1, 0),
    "sibling": (1, 1),
    "grandchild": (0, 2),
    "grandparent": (2, 0),
    "nephew": (1, 2),
    "uncle": (2, 1),
    "great-grandchild": (0, 3),
    "great-grandparent": (3, 0),
    "cousin": (2, 2),
    "grand-nephew": (1, 3),
    "grand-uncle": (3, 1),
    "great-great-grandchild": (0, 4),
    "great-great-grandparent": (4, 0),
    "cousin-once-removed": (2, 3),
    "cousin-once-ascending": (3, 2),
    "great-grand-nephew": (1, 4),
    "great-grand-uncle": (4, 1),
    "second-cousin": (3, 3),
    "cousin-twice-removed": (2, 4),
    "cousin-twice-ascending": (4, 2),
    "second-cousin-once-removed": (3, 4),
    "second-cousin-once-ascending": (4, 3),
    "third-cousin": (4, 4),
}
"""Steps up from a code to the nearest code above both, and steps down from there to its relative; near ones
first. Codes of two sectors are `unrelated`."""
UNRELATED = "unrelated"
RELATION_WORDS = (*RELATIONS, UNRELATED)
"""Their number, from 1, is how far a relation is: what relation_margin counts in."""

SECTORS = (
    ("crop", "field", "harvest", "seed", "grain", "orchard", "soil", "farm"),
    ("livestock", "herd", "dairy", "poultry", "pasture", "breeding", "wool", "hatchery"),
    ("mine", "ore", "quarry", "drilling", "well", "coal", "gravel", "extraction"),
    ("power", "grid", "turbine", "water", "sewage", "pipeline", "steam", "utility"),
    ("building", "concrete", "roofing", "masonry", "excavation", "plumbing", "framing", "site"),
    ("food", "milling", "bakery", "canning", "beverage", "sugar", "meat", "brewery"),
    ("textile", "garment", "leather", "yarn", "knitting", "footwear", "dyeing", "weaving"),
    ("wood", "paper", "pulp", "sawmill", "printing", "veneer", "carton", "board"),
    ("chemical", "plastic", "rubber", "resin", "paint", "fertiliser", "soap", "refinery"),
    ("metal", "steel", "foundry", "forging", "casting", "stamping", "welding", "wire"),
    ("machinery", "engine", "pump", "electronics", "circuit", "sensor", "vehicle", "aircraft"),
    ("wholesale", "distributor", "warehouse", "broker", "import", "bulk", "pallet", "agent"),
    ("retail", "shop", "grocery", "fuel", "catalogue", "counter", "department", "dealer"),
    ("transport", "freight", "rail", "truck", "ferry", "airline", "courier", "terminal"),
    ("publishing", "software", "broadcast", "film", "telephone", "archive", "streaming", "network"),
    ("bank", "loan", "insurance", "fund", "pension", "mortgage", "exchange", "trust"),
    ("estate", "rental", "leasing", "property", "appraisal", "tenant", "equipment", "storage"),
    ("legal", "accounting", "design", "engineering", "research", "survey", "consulting", "laboratory"),
    ("school", "hospital", "clinic", "nursing", "training", "childcare", "therapy", "college"),
    ("hotel", "restaurant", "museum", "sport", "theatre", "laundry", "repair", "association"),
)
"""A theme a sector; those beyond the twentieth take them again with words of their own."""


def _words(page: str) -> tuple[str, ...]:
    return tuple(page.split())


STEMS = _words(
    "alder amber anchor apron arch barrel basin beacon bell birch blade bolt brass brick bridge buckle cable "
    "candle canvas cedar chain chalk clay cloth cobalt coil copper cork cotton crane crystal dome drum elm "
    "enamel fabric fern fibre filter flax flint foam frame gauge gear glass granite hemp hinge hull iron "
    "ivory jade kiln lace lamp lantern latch lens lever lime linen loom maple marble mesh mica mill mirror "
    "mortar needle nickel oak oil opal panel paste pearl pewter pine pipe pivot plaster pottery quartz quill "
    "rack reed ribbon rivet rope saddle salt sand satin scale shaft shell silk silver slate socket spindle "
    "spring stone tar thread tile timber tin tub tube twine valve varnish velvet wax wheel wicker willow zinc"
)
TRADES = _words(
    "assembly blending bonding bottling cleaning coating cutting drying fitting grading grinding hauling "
    "inspection installing labelling mending mixing moulding packing polishing pressing processing rolling "
    "sorting spinning stitching supply testing trading treating"
)
COMMON = _words(
    "and of the for in to with by or on from this industry establishments primarily engaged except such as "
    "other services products goods their own account including made used under contract"
)
WORDS_EACH = 4
"""Words that a code adds to those of the codes above it."""
LENGTHS = {
    "title": (3, 12, 0.0),
    "description": (40, 640, 0.0),
    "excluded": (20, 560, 0.25),
    "examples": (20, 400, 0.0),
}
"""Of each channel: words of its shortest and longest text, and the share of codes that have none."""


class Codes(NamedTuple):
    """A tree of codes, in the order of their levels."""

    names: tuple[str, ...]
    """As in 11, 111, 1111."""
    depths: Numbers
    """From 1, of the sectors, to 5."""
    lines: Numbers
    """[codes, 5]: the number of the code above each at every depth, itself included; -1 below itself."""

    @property
    def levels(self) -> Numbers:
        """Digits."""
        found: Numbers = self.depths + 1
        return found

    def apart(self, code: int) -> tuple[Numbers, Numbers]:
        """Of all codes, the steps up and down to them from one; over the root where sectors differ."""
        shared = ((self.lines == self.lines[code]) & (self.lines >= 0)).sum(axis=1)
        return self.depths[code] - shared, self.depths - shared

    def relations(self, code: int) -> Numbers:
        """Of all codes, the number of their relation to one of them, from 1; 0 for itself."""
        up, down = self.apart(code)
        found: Numbers = _RANKS[up, down].copy()
        found[(up == self.depths[code]) & (up + down > 0)] = len(RELATION_WORDS)
        return found


_RANKS = np.zeros((len(LEVELS) + 1, len(LEVELS) + 1), dtype=np.int64)
for _rank, _steps in enumerate(RELATIONS.values(), start=1):
    _RANKS[_steps] = _rank


@cache
def codes(total: int = sum(COUNTS)) -> Codes:
    """A tree of so many codes.

    >>> codes(2125).names[0], codes(2125).names[-1], len(codes(40).names)
    ('11', '309423', 40)
    """
    if not FEWEST <= total <= MOST:
        raise WrongUse(
            f"codes={total}",
            found=f"a tree of five levels takes {FEWEST} to {MOST:,} codes",
            cure="Give such a number.",
        )
    names: list[str] = []
    lines: list[list[int]] = []
    above = range(0)
    for depth, count in enumerate(_counts(total)):
        start = len(names)
        for number in range(count):
            if depth == 0:
                name, line = str(11 + number), []
            else:
                parent = above[number * len(above) // count]
                first = -(-(parent - above.start) * count // len(above))
                name, line = f"{names[parent]}{number - first + 1}", lines[parent][:depth]
            names.append(name)
            lines.append([*line, start + number, *[-1] * (len(LEVELS) - depth - 1)])
        above = range(start, len(names))
    table = np.array(lines, dtype=np.int64)
    return Codes(tuple(names), (table >= 0).sum(axis=1), table)


def _counts(total: int) -> list[int]:
    """How many codes each level has: of a whole tree its own, of another the same shares."""
    # Two sectors at least: else no code is unrelated to another. Each level has as many as the one above it.
    found = [max(2, round(total * COUNTS[0] / sum(COUNTS)))]
    for above, count in enumerate(COUNTS[1:-1], start=1):
        left = (total - sum(found)) // (len(COUNTS) - above)
        found.append(max(found[-1], min(left, round(total * count / sum(COUNTS)))))
    return [*found, total - sum(found)]


def words(tree: Codes, code: int) -> list[str]:
    """The words that a code's texts are made of: its sector's, then those that each code above it adds."""
    sector, *below = [int(line) for line in tree.lines[code] if line >= 0]
    found = list(SECTORS[sector % len(SECTORS)])
    for one in (sector, *below):
        draw = random.Random(f"words of {tree.names[one]}")  # noqa: S311 - for data, not for secrets
        found += [f"{draw.choice(STEMS)} {draw.choice(TRADES)}" for _ in range(WORDS_EACH // 2)]
    return found


def text(tree: Codes, code: int, channel: str) -> str:
    """One of a code's four texts; empty where it has none.

    >>> text(codes(), 0, "title").split()[0] in " ".join(words(codes(), 0))
    True
    """
    draw = random.Random(f"{channel} of {tree.names[code]}")  # noqa: S311 - as above
    shortest, longest, without = LENGTHS[channel]
    if draw.random() < without:
        return ""
    # Short texts are the more common, as in any such book.
    count = shortest + int((longest - shortest) * draw.random() ** 2)
    own = words(tree, code)
    if channel == "excluded":
        # What belongs to a code beside it.
        own = words(tree, _beside(tree, code, draw)) + own[: len(own) // 2]
    if channel == "title":
        return " ".join(" ".join(draw.sample(own, min(count, len(own)))).split()[:count])
    drawn = draw.choices(own, k=count)
    linked = draw.choices(COMMON, k=count)
    return " ".join(one for pair in zip(linked, drawn, strict=True) for one in pair[draw.random() < 0.6 :])  # noqa: PLR2004


def _beside(tree: Codes, code: int, draw: random.Random) -> int:
    depth = int(tree.depths[code])
    above = tree.lines[code][depth - 2] if depth > 1 else -1
    same = tree.depths == depth
    siblings = np.flatnonzero(same & (tree.lines[:, depth - 2] == above) if depth > 1 else same)
    others = siblings[siblings != code]
    return int(draw.choice(list(others))) if len(others) else code


RESERVED = 100
"""Tokens at the start of the vocabulary that are no words: 0 fills a text up, 1 begins it, 2 ends it."""
BEGIN, END = 1, 2


@cache
def tokens(total: int, channel: str, length: int, vocab: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The texts of a channel as tokens, [codes, length]: cut off or filled up to one length.

    A word is the number that it hashes to: there is no list of words to be kept.
    """
    tree = codes(total)
    number: dict[str, int] = {}
    found = np.zeros((total, length), dtype=np.int32)
    for code in range(total):
        said = text(tree, code, channel).split()[: length - 2]
        for word in set(said) - number.keys():
            number[word] = RESERVED + zlib.crc32(word.encode()) % (vocab - RESERVED)
        line = [BEGIN, *(number[word] for word in said), END]
        found[code, : len(line)] = line
    return found
