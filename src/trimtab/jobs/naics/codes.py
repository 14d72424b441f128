"""Generate a synthetic tree of industry codes: codes of two to six digits, their relations and their texts.

It has the shape of the real NAICS (20 sectors, 96 subsectors, 308 groups, 689 industries, 1,012 national
industries: 2,125 codes) and none of its content. A code shares words with all codes above it, so that codes
near in the tree have similar texts, which a model can learn. It is the same on every machine.
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
"""Numbers of digits of a code."""
COUNTS = (20, 96, 308, 689, 1012)
"""Number of codes per level."""
FEWEST, MOST = 10, 9000
"""Limits on the number of codes: with more, two digits are too few for the sectors."""

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
"""Steps up from a code to the nearest common ancestor, and steps down to its relative; nearest first.
Codes of different sectors are `unrelated`."""
UNRELATED = "unrelated"
RELATION_NAMES = (*RELATIONS, UNRELATED)
"""The number of a relation, from 1, is its distance, the unit of relation_margin."""

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
"""Words of each sector; more than twenty sectors reuse them, with additional words."""


def _split_words(page: str) -> tuple[str, ...]:
    return tuple(page.split())


STEMS = _split_words(
    "alder amber anchor apron arch barrel basin beacon bell birch blade bolt brass brick bridge buckle cable "
    "candle canvas cedar chain chalk clay cloth cobalt coil copper cork cotton crane crystal dome drum elm "
    "enamel fabric fern fibre filter flax flint foam frame gauge gear glass granite hemp hinge hull iron "
    "ivory jade kiln lace lamp lantern latch lens lever lime linen loom maple marble mesh mica mill mirror "
    "mortar needle nickel oak oil opal panel paste pearl pewter pine pipe pivot plaster pottery quartz quill "
    "rack reed ribbon rivet rope saddle salt sand satin scale shaft shell silk silver slate socket spindle "
    "spring stone tar thread tile timber tin tub tube twine valve varnish velvet wax wheel wicker willow zinc"
)
TRADES = _split_words(
    "assembly blending bonding bottling cleaning coating cutting drying fitting grading grinding hauling "
    "inspection installing labelling mending mixing moulding packing polishing pressing processing rolling "
    "sorting spinning stitching supply testing trading treating"
)
COMMON = _split_words(
    "and of the for in to with by or on from this industry establishments primarily engaged except such as "
    "other services products goods their own account including made used under contract"
)
WORDS_EACH = 4
"""Words that a code has in addition to those of the codes above it."""
LENGTHS = {
    "title": (3, 12, 0.0),
    "description": (40, 640, 0.0),
    "excluded": (20, 560, 0.25),
    "examples": (20, 400, 0.0),
}
"""Per channel: words of the shortest and the longest text, and the share of codes without text."""


class Codes(NamedTuple):
    """A tree of codes, ordered by level."""

    names: tuple[str, ...]
    """Such as 11, 111, 1111."""
    depths: Numbers
    """From 1 (sectors) to 5."""
    lines: Numbers
    """[codes, 5]: the index of each code's ancestor at every depth, itself included; -1 below itself."""

    @property
    def levels(self) -> Numbers:
        """Digits of each code."""
        digits: Numbers = self.depths + 1
        return digits

    def steps_from(self, code: int) -> tuple[Numbers, Numbers]:
        """Return the steps up and down from a code to all codes; via the root between sectors."""
        shared = ((self.lines == self.lines[code]) & (self.lines >= 0)).sum(axis=1)
        return self.depths[code] - shared, self.depths - shared

    def relations_to(self, code: int) -> Numbers:
        """Return the number of the relation of all codes to a code, from 1; 0 for itself."""
        up, down = self.steps_from(code)
        ranks: Numbers = _RANKS[up, down].copy()
        ranks[(up == self.depths[code]) & (up + down > 0)] = len(RELATION_NAMES)
        return ranks


_RANKS = np.zeros((len(LEVELS) + 1, len(LEVELS) + 1), dtype=np.int64)
for _rank, _steps in enumerate(RELATIONS.values(), start=1):
    _RANKS[_steps] = _rank


@cache
def build_codes(total: int = sum(COUNTS)) -> Codes:
    """Return a tree with this many codes.

    >>> build_codes(2125).names[0], build_codes(2125).names[-1], len(build_codes(40).names)
    ('11', '304321', 40)
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
    for depth, count in enumerate(_level_counts(total)):
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


def _level_counts(total: int) -> list[int]:
    """Return the number of codes per level, in the shares of the full tree."""
    # At least two sectors, for unrelated codes. Each level has at least as many codes as the one above.
    counts = [max(2, round(total * COUNTS[0] / sum(COUNTS)))]
    for above, count in enumerate(COUNTS[1:-1], start=1):
        left = (total - sum(counts)) // (len(COUNTS) - above)
        counts.append(max(counts[-1], min(left, round(total * count / sum(COUNTS)))))
    return [*counts, total - sum(counts)]


def code_words(tree: Codes, code: int) -> list[str]:
    """Return the words for a code's texts: its sector's, then those that each code above it adds."""
    sector, *below = [int(line) for line in tree.lines[code] if line >= 0]
    words = list(SECTORS[sector % len(SECTORS)])
    for ancestor in (sector, *below):
        draw = random.Random(f"words of {tree.names[ancestor]}")  # noqa: S311 - for data, not for secrets
        words += [f"{draw.choice(STEMS)} {draw.choice(TRADES)}" for _ in range(WORDS_EACH // 2)]
    return words


def make_text(tree: Codes, code: int, channel: str) -> str:
    """Return one of a code's four texts; empty if it has none.

    >>> make_text(build_codes(), 0, "title").split()[0] in " ".join(code_words(build_codes(), 0))
    True
    """
    draw = random.Random(f"{channel} of {tree.names[code]}")  # noqa: S311 - as above
    shortest, longest, without = LENGTHS[channel]
    if draw.random() < without:
        return ""
    # Short texts are more common, as in the real classification.
    count = shortest + int((longest - shortest) * draw.random() ** 2)
    own = code_words(tree, code)
    if channel == "excluded":
        # Text of a sibling code.
        own = code_words(tree, _draw_sibling(tree, code, draw)) + own[: len(own) // 2]
    if channel == "title":
        return " ".join(" ".join(draw.sample(own, min(count, len(own)))).split()[:count])
    drawn = draw.choices(own, k=count)
    linked = draw.choices(COMMON, k=count)
    return " ".join(word for pair in zip(linked, drawn, strict=True) for word in pair[draw.random() < 0.6 :])  # noqa: PLR2004


def _draw_sibling(tree: Codes, code: int, draw: random.Random) -> int:
    depth = int(tree.depths[code])
    above = tree.lines[code][depth - 2] if depth > 1 else -1
    same = tree.depths == depth
    siblings = np.flatnonzero(same & (tree.lines[:, depth - 2] == above) if depth > 1 else same)
    others = siblings[siblings != code]
    return int(draw.choice(list(others))) if len(others) else code


RESERVED = 100
"""Special tokens at the start of the vocabulary: 0 is padding, 1 starts a text, 2 ends it."""
BEGIN, END = 1, 2


@cache
def make_tokens(total: int, channel: str, length: int, vocab: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the texts of a channel as tokens [codes, length], truncated or padded.

    The token of a word is its hash, so no vocabulary file is needed.
    """
    tree = build_codes(total)
    number: dict[str, int] = {}
    table = np.zeros((total, length), dtype=np.int32)
    for code in range(total):
        words = make_text(tree, code, channel).split()[: length - 2]
        for word in set(words) - number.keys():
            number[word] = RESERVED + zlib.crc32(word.encode()) % (vocab - RESERVED)
        line = [BEGIN, *(number[word] for word in words), END]
        table[code, : len(line)] = line
    return table
