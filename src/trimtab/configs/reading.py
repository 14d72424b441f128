"""What a config says, by its framework's own meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.configs import words
from trimtab.configs.targets import WORDS, counts, parts
from trimtab.configs.texts import dotted
from trimtab.spec import (
    Allocator,
    Noun,
    OptimizerImplementation,
    Precision,
    Recompute,
    Setting,
    Strategy,
)
from trimtab.strategies import STRATEGIES, strategy_by_degrees, usual_strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.targets import Knob, Path, Requirement, Site
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


class ConfigWarning(Noun, frozen=True, kw_only=True):
    """Where a config differs from a plan, or says what an estimate leaves out."""

    text: str
    """A sentence for the user."""
    file: str = ""
    key: str = ""
    """Empty where no key of the file holds it."""
    value: Any = None
    """As the config has it, or will have it."""
    field: str = ""
    """Which part of the setting it is about; `job` where it changes what is trained."""
    planned: Any = None
    """What the plan has instead, where there is a plan."""


class Reading(Noun, frozen=True, kw_only=True):
    """A config in our words."""

    target: str
    root: str = ""
    found: tuple[Found, ...] = ()
    facts: dict[str, int | str] = {}
    """Numbers and words by field, with what follows from them. What is not here is not known."""
    said: tuple[str, ...] = ()
    """What is open, contradicts itself, or is not understood."""
    warnings: tuple[ConfigWarning, ...] = ()
    """What the facts leave out: values that no plan has, such as an offloaded optimizer."""

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
    order = {key: place for place, knob in enumerate(site.target.knobs) for key in knob.keys}
    heard = Heard()
    # What counts only under some strategy is read once that is known, and preferences after all the rest.
    for knob in sorted(site.target.knobs, key=lambda one: (bool(one.only), bool(one.soft))):
        if _applies(knob, heard.likely(), site.root, values):
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
    strategy = STRATEGIES.get(str(facts.get("strategy")))
    if strategy is not None and strategy.degrees == (False, True) and _several(facts.get("dp_replicate")):
        facts["strategy"] = strategy_by_degrees(replicated=True, sharded=True).value
    broken = [
        (one, place) for one in site.target.requires for place in violated(one, site.root, values, facts)
    ]
    return Reading(
        target=site.target.name,
        root=dotted(site.root) if site.root else "",
        found=tuple(sorted(heard.found, key=lambda one: order[one.key])),
        facts=facts,
        said=tuple(heard.said),
        warnings=(*heard.warnings, *(_left_out(one, *place, site.root) for one, place in broken)),
    )


def _several(count: int | str | None) -> bool:
    return isinstance(count, int) and count > 1


def _applies(
    one: Knob | Requirement, facts: Mapping[str, int | str], root: Path, values: Mapping[Path, Entry]
) -> bool:
    """Whether a knob or a requirement counts beside these facts, in this file."""
    return all(facts.get(field) in among for field, among in one.only.items()) and counts(
        one.when, root, values
    )


def violated(
    one: Requirement, root: Path, values: Mapping[Path, Entry], facts: Mapping[str, int | str]
) -> list[tuple[Path, Any, Entry | None]]:
    """The keys of a requirement that have another value: path, value, and the entry where there is one."""
    if not _applies(one, facts, root, values):
        return []
    found: list[tuple[Path, Any, Entry | None]] = []
    seen = False
    for key in one.keys:
        path = root + parts(key)
        entry = values.get(path)
        if entry is None and any(len(other) > len(path) and other[: len(path)] == path for other in values):
            seen = True
            if "table" not in one.values:
                found.append((path, "a table", None))
        elif entry is not None:
            seen = True
            if entry.computed or not any(words.alike(entry.value, value) for value in _plain_values(one)):
                found.append((path, entry.computed or entry.value, entry))
    if not seen and not any(words.alike(one.default, value) for value in _plain_values(one)):
        found.append((root + parts(one.keys[0]), one.default, None))
    return found


def _plain_values(one: Requirement) -> tuple[Any, ...]:
    """The values under which a plan holds; an empty table is no value."""
    return (*one.values, {}) if None in one.values else one.values


def _left_out(one: Requirement, path: Path, value: Any, entry: Entry | None, root: Path) -> ConfigWarning:
    key = dotted(path[len(root) :])
    by_default = "" if entry is not None or value == "a table" else " by default"
    text = f"{key} is {words.text(value)}{by_default}: {one.why}"
    return ConfigWarning(text=text, key=key, value=value, field=one.field)


@dataclass
class Heard:
    """What the keys have said so far."""

    found: list[Found] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    votes: dict[str, dict[str, int]] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    warnings: list[ConfigWarning] = field(default_factory=list)
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
        elif any(words.alike(value, soft) for soft in knob.soft) and not words.spelt(knob, value):
            pass
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
        if not spelt and (rough := next((w for v, w in knob.rough.items() if words.alike(v, one.value)), "")):
            spelt = [rough]
            text = f"{one.key} is {words.text(one.value)}, which is read as {rough}: {knob.rough_why}"
            self.warnings.append(ConfigWarning(text=text, key=one.key, value=one.value, field=one.field))
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
        elif not any(words.alike(one.value, soft) for soft in knob.soft):
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
    return {"strategy": strategy_by_degrees(replicated=replicated, sharded=sharded).value}


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
    count = reading.number("gpus") or gpus
    usual, _ = usual_strategy(count)
    strategy = Strategy(str(facts.get("strategy", usual)))
    if count == 1 or not STRATEGIES[strategy].needs_several_gpus:
        strategy = usual
    micro = reading.number("micro_batch") or 1
    accumulation = reading.number("accumulation") or 1
    shards = reading.number("dp_shard") or reading.number("gpus_per_node")
    mesh = STRATEGIES[strategy].config_mesh(count, shards)
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=micro * accumulation * mesh.data_parallel,
        precision=Precision(str(facts.get("precision", Precision.FP32))),
        recompute=Recompute(str(facts.get("recompute", Recompute.NONE))),
        compile=facts.get("compile") == "true",
        sync_batchnorm=facts.get("sync_batchnorm") == "true",
        optimizer=OptimizerImplementation(str(facts.get("optimizer", OptimizerImplementation.FUSED))),
        allocator=Allocator(str(facts.get("allocator", Allocator.DEFAULT))),
        workers=reading.number("workers") or 0,
    )
