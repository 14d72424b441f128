"""What a config says, by its framework's own meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.configs import words
from trimtab.configs.targets import WORDS, parts
from trimtab.configs.texts import dotted
from trimtab.spec import Mesh, Noun, Precision, Recompute, Setting, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.targets import Knob, Path, Site
    from trimtab.configs.texts import Entry

PRODUCTS = (
    ("rank_batch", "micro_batch", "accumulation"),
    ("round_batch", "micro_batch", "data_parallel"),
    ("global_batch", "rank_batch", "data_parallel"),
    ("global_batch", "round_batch", "accumulation"),
    ("data_parallel", "dp_replicate", "dp_shard"),
    ("gpus", "gpus_per_node", "nodes"),
    ("split", "tensor", "context"),
    ("model", "split", "pp"),
    ("gpus", "data_parallel", "model"),
)
"""Of each three the first is the product of the others."""


class Found(Noun, frozen=True, kw_only=True):
    """One key of a config that holds something of ours."""

    field: str
    key: str
    value: Any = None
    """As the config has it."""
    line: int | None = None
    """None where the framework's own default counts."""
    computed: str = ""
    """The source of a value that is no literal."""


class Reading(Noun, frozen=True, kw_only=True):
    """A config in our words."""

    target: str
    root: str = ""
    found: tuple[Found, ...] = ()
    facts: dict[str, int | str] = {}
    """Numbers and words by field, with what follows from them. What is not here is not known."""
    said: tuple[str, ...] = ()
    """What is open, contradicts itself, or is not understood."""

    def number(self, field: str) -> int | None:
        """A number, where it is known."""
        value = self.facts.get(field)
        return value if isinstance(value, int) else None

    def word(self, field: str) -> str | None:
        """One of our words, where it is known."""
        value = self.facts.get(field)
        return value if isinstance(value, str) else None


def held(knob: Knob, root: Path, values: Mapping[Path, Entry]) -> tuple[Path, Entry | None]:
    """The path at which a knob is, or the one at which it would be added."""
    for key in knob.keys:
        path = root + parts(key)
        if path in values:
            return path, values[path]
    return root + parts(knob.keys[0]), None


def table(knob: Knob, root: Path, values: Mapping[Path, Entry]) -> Path | None:
    """The key of a knob that holds a whole table where a value was expected: strategy: {class_path: ...}."""
    for key in knob.keys:
        path = root + parts(key)
        if any(len(one) > len(path) and one[: len(path)] == path for one in values):
            return path
    return None


def read(
    site: Site, entries: Sequence[Entry], *, gpus: int | None = None, nodes: int | None = None
) -> Reading:
    """What the entries say, by the meaning of the target; `gpus` and `nodes` are what the launcher gives."""
    values = {one.path: one for one in entries}
    heard = Heard()
    # What counts only under some strategy is read when the strategy is known.
    for knob in sorted(site.target.knobs, key=lambda one: bool(one.only)):
        if all(heard.likely().get(field) in among for field, among in knob.only.items()):
            path, entry = held(knob, site.root, values)
            if entry is None and (whole := table(knob, site.root, values)):
                heard.left_open.add(knob.field)
                heard.said.append(f"{dotted(whole)} holds a table, and is not known")
            else:
                heard.listen(knob, path, entry, root=site.root)
    numbers = dict(heard.numbers)
    if gpus is not None and "gpus" not in solved(numbers, heard.implied, []):
        # The config leaves it to the launcher.
        numbers["gpus"] = gpus
        if "gpus_per_node" not in numbers:
            numbers["nodes"] = nodes or 1
    facts: dict[str, int | str] = {**heard.likely(), **solved(numbers, heard.implied, heard.said)}
    if "strategy" not in site.target.fields() and "dp_shard" in site.target.fields():
        facts |= _strategy(facts)
    return Reading(
        target=site.target.name,
        root=dotted(site.root) if site.root else "",
        found=tuple(heard.found),
        facts=facts,
        said=tuple(heard.said),
    )


@dataclass
class Heard:
    """What the keys have said so far."""

    found: list[Found] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    votes: dict[str, dict[str, int]] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    left_open: set[str] = field(default_factory=set)
    """Fields of which one key at least leaves it open what they are."""

    def listen(self, knob: Knob, path: Path, entry: Entry | None, *, root: Path) -> None:
        """Take in one key, or the framework's default where it is not there."""
        if entry is None and knob.default is None:
            return
        value = knob.default if entry is None else entry.value
        one = Found(
            field=knob.field,
            key=dotted(path[len(root) :]),
            value=value,
            line=None if entry is None else entry.line,
            computed="" if entry is None else entry.computed,
        )
        self.found.append(one)
        if one.computed:
            self.left_open.add(knob.field)
            self.said.append(f"{one.key} is computed in line {one.line} ({one.computed}), and is not known")
        elif words.is_auto(knob, value):
            self.left_open.add(knob.field)
            self.said.append(f"{one.key} is {words.text(value)}: the framework decides")
        elif knob.field in WORDS:
            self._narrow(knob, one)
        elif words.text(value) in knob.implied:
            self.implied[knob.field] = knob.implied[words.text(value)]
        elif value is not None:
            self._count(knob, one)

    def _count(self, knob: Knob, one: Found) -> None:
        number = words.number(knob, one.value)
        if number is None or number < (0 if knob.field == "workers" else 1):
            self.said.append(f"{one.key} is {words.text(one.value)!r}, which is no number of anything")
        elif self.numbers.setdefault(knob.field, number) != number:
            self.said.append(f"{one.key} is {number}, and another key says {self.numbers[knob.field]}")

    def _narrow(self, knob: Knob, one: Found) -> None:
        """Each key rules words out, and speaks for those that it spells; what all of them leave is meant."""
        spelt = words.spelt(knob, one.value)
        if not spelt:
            self.said.append(
                f"{one.key} is {words.text(one.value)!r}, which is not one of the words known here"
            )
            return
        possible = {*spelt, *words.silent(knob)}
        before = self.votes.setdefault(knob.field, dict.fromkeys(WORDS[knob.field], 0))
        left = {word: votes + (word in spelt) for word, votes in before.items() if word in possible}
        if any(left.values()):
            self.votes[knob.field] = left
        else:
            self.said.append(f"{one.key} is {words.text(one.value)}, which contradicts another key")

    def likely(self) -> dict[str, str]:
        """The word that most keys spell; among equals the first of ours."""
        return {
            field: max(votes, key=lambda word: votes[word])
            for field, votes in self.votes.items()
            if field not in self.left_open
        }


def _strategy(facts: Mapping[str, int | str]) -> dict[str, str]:
    """The strategy that the degrees of data parallelism make."""
    degrees = [facts.get("dp_replicate"), facts.get("dp_shard")]
    if not all(isinstance(one, int) for one in degrees):
        return {}
    replicated, sharded = (one != 1 for one in degrees)
    if sharded:
        return {"strategy": (Strategy.HSDP if replicated else Strategy.FSDP).value}
    return {"strategy": (Strategy.DDP if replicated else Strategy.SINGLE).value}


def solved(numbers: dict[str, int], implied: Mapping[str, str], said: list[str]) -> dict[str, int]:
    """The numbers with everything that follows from them.

    >>> solved({"micro_batch": 4, "accumulation": 2, "gpus": 8, "tensor": 1, "pp": 1}, {}, [])["global_batch"]
    64
    """
    known = {"tensor": 1, "context": 1, "pp": 1, **numbers}
    for _ in range(len(PRODUCTS)):
        for product, *factors in PRODUCTS:
            _one_product(known, product, factors[0], factors[1])
        if "rest" in implied.values() and {"gpus", "model", "dp_replicate"} <= known.keys():
            rest, over = divmod(known["gpus"], known["model"] * known["dp_replicate"])
            if not over:
                known.update({field: rest for field, what in implied.items() if what == "rest" and rest})
        if "round_batch" in known:
            known.update(
                {field: known["round_batch"] for field, what in implied.items() if what == "round_batch"}
            )
    for product, one, other in PRODUCTS:
        if {product, one, other} <= known.keys() and known[one] * known[other] != known[product]:
            said.append(
                f"{_plain(one)} {known[one]} x {_plain(other)} {known[other]} "
                f"does not make {_plain(product)} {known[product]}"
            )
    return {field: value for field, value in known.items() if field not in {"model", "split"}}


def _one_product(known: dict[str, int], product: str, one: str, other: str) -> None:
    if one in known and other in known:
        known.setdefault(product, known[one] * known[other])
    for factor, rest in ((one, other), (other, one)):
        if product in known and factor in known and rest not in known and known[product] % known[factor] == 0:
            known[rest] = known[product] // known[factor]


def _plain(field: str) -> str:
    return field.replace("_", " ")


def as_setting(reading: Reading, *, gpus: int = 1) -> Setting:
    """How the config would run: what it leaves open is as in a plain run on `gpus` devices."""
    facts = reading.facts
    strategy = Strategy(str(facts.get("strategy", Strategy.DDP)))
    count = reading.number("gpus") or gpus
    if count == 1:
        strategy = Strategy.SINGLE
    elif strategy is Strategy.SINGLE:
        strategy = Strategy.DDP
    micro = reading.number("micro_batch") or 1
    accumulation = reading.number("accumulation") or 1
    mesh = _mesh(reading, strategy, count)
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=micro * accumulation * mesh.data_parallel,
        precision=Precision(str(facts.get("precision", Precision.FP32))),
        recompute=Recompute(str(facts.get("recompute", Recompute.NONE))),
        compile=facts.get("compile") == "true",
        workers=reading.number("workers") or 0,
    )


def _mesh(reading: Reading, strategy: Strategy, count: int) -> Mesh:
    if strategy is Strategy.FSDP:
        return Mesh(dp_shard=count)
    if strategy is Strategy.HSDP:
        shard = reading.number("dp_shard") or reading.number("gpus_per_node") or count
        return Mesh(dp_shard=shard, dp_replicate=max(1, count // shard))
    return Mesh(dp_replicate=count)
