"""Interpret a config: what its keys say in trimtab's own fields and words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from trimtab.configs.targets import WORDS, conditions_hold, find_place, place_key, shorten_path
from trimtab.configs.text_edit import format_path
from trimtab.spec import (
    Allocator,
    BaseFormat,
    LossForm,
    Mesh,
    Noun,
    Offload,
    OptimizerImplementation,
    OptimizerRule,
    Precision,
    Recompute,
    Setting,
    Strategy,
)
from trimtab.strategies import STRATEGIES, strategy_by_degrees, usual_strategy
from trimtab.strategies.base import model_splitting_strategy
from trimtab.units import LARGEST_COUNT, parse_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.targets import Knob, Requirement, TargetSite
    from trimtab.configs.text_edit import Entry, KeyPath

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def format_value(value: Any) -> str:
    """Format a value as the tables of targets spell it.

    >>> format_value(True), format_value(16), format_value(None), format_value("bf16-mixed")
    ('true', '16', 'null', 'bf16-mixed')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def same_meaning(value: Any, other: Any) -> bool:
    """Return whether two values of a config mean the same, however they are written.

    >>> same_meaning("False", False), same_meaning("16", 16), same_meaning("no", "no")
    (True, True, True)
    >>> same_meaning(1, True), same_meaning(None, False)
    (False, False)
    """
    if isinstance(value, bool) or isinstance(other, bool):
        return _parse_truth(value) is not None and _parse_truth(value) == _parse_truth(other)
    return format_value(value).strip().lower() == format_value(other).strip().lower()


def _parse_truth(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return _TRUTHS.get(value.strip().lower()) if isinstance(value, str) else None


def is_auto(knob: Knob, value: Any) -> bool:
    """Return whether the framework decides this value itself."""
    return any(type(value) is type(word) and same_meaning(value, word) for word in knob.auto)


def parse_count(knob: Knob, value: Any) -> int | None:
    """Return the whole number that a value is, in any notation of configs; None if it is none."""
    if isinstance(value, str):
        return _count_in_text(knob, value.strip())
    if isinstance(value, list):
        return len(value) if knob.listed else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_COUNT:
        return None
    return int(value) if float(value).is_integer() else None


def _count_in_text(knob: Knob, value: str) -> int | None:
    if knob.pattern:
        match = re.fullmatch(knob.pattern, value)
        return parse_whole(match["n"]) if match else None
    if knob.listed and "," in value:
        return len([part for part in value.split(",") if part.strip()])
    return int(value) if re.fullmatch(r"[+-]?[0-9][0-9_]{0,17}", value) else None


def is_blank(knob: Knob, entry: Entry) -> bool:
    """Return whether a key is there without a value, which is as if it were missing."""
    means_something = "null" in knob.implied or bool(words_of_value(knob, None))
    return entry.value is None and not entry.computed and knob.default is not None and not means_something


def format_count(knob: Knob, before: Any, wanted: int) -> Any:
    """Return what to write for a number, in place of what is there."""
    if knob.pattern and isinstance(before, str) and (found := re.fullmatch(knob.pattern, before.strip())):
        return f"{before.strip()[: found.start('n')]}{wanted}{before.strip()[found.end('n') :]}"
    return wanted


AS_JOB = (OptimizerRule.JOB, OptimizerRule.ADAMW)
"""A config that names torch's AdamW names the optimizer of a job that names none."""


def words_of_value(knob: Knob, value: Any) -> list[str]:
    """Return our words that a value means; none if it is unknown here."""
    words = [word for word, written in knob.words.items() if same_meaning(written, value)]
    words += [
        word for spelling, word in knob.reads.items() if same_meaning(spelling, value) and word not in words
    ]
    both = [word.value for word in AS_JOB]
    return list(dict.fromkeys(words + both)) if knob.field == "optimizer_rule" and both[0] in words else words


def unspoken_words(knob: Knob) -> list[str]:
    """Return our words that the key cannot express: it does not contradict them."""
    return [word for word in WORDS[knob.field] if knob.nearest(word) not in knob.words]


def word_to_write(knob: Knob, word: str) -> tuple[Any, bool]:
    """Return what to write for one of our words, and whether there is anything to write."""
    word = knob.nearest(word)
    return knob.words.get(word), word in knob.words


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


class FoundKey(Noun, frozen=True, kw_only=True):
    """A key of a config that holds one of our fields."""

    field: str
    key: str
    value: Any = None
    """As the config has it."""
    line: int | None = None
    """None where the framework's own default counts."""
    computed: str = ""
    """The source of a value that is no literal."""


class ConfigWarning(Noun, frozen=True, kw_only=True):
    """A difference between a config and a plan, or something an estimate leaves out."""

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
    """A config in trimtab's own fields and words."""

    target: str
    root: str = ""
    found: tuple[FoundKey, ...] = ()
    facts: dict[str, int | str] = {}
    """Numbers and words by field, with what follows from them. What is not here is not known."""
    said: tuple[str, ...] = ()
    """What is open, contradicts itself, or is not understood."""
    warnings: tuple[ConfigWarning, ...] = ()
    """What the facts leave out: values that no plan has, such as an offloaded optimizer."""

    def number(self, field: str) -> int | None:
        """Return a number if it is known."""
        value = self.facts.get(field)
        return value if isinstance(value, int) else None

    def word(self, field: str) -> str | None:
        """Return one of our words if it is known."""
        value = self.facts.get(field)
        return value if isinstance(value, str) else None


def find_entry(knob: Knob, root: KeyPath, values: Mapping[KeyPath, Entry]) -> tuple[KeyPath, Entry | None]:
    """Return the path of a knob and its entry, or the path where it would be added."""
    for key in knob.keys:
        path = find_place(root, key, values)
        if path in values:
            return path, values[path]
    return place_key(root, knob.keys[0]), None


def find_table(knob: Knob, root: KeyPath, values: Mapping[KeyPath, Entry]) -> KeyPath | None:
    """Return the key of a knob that holds a table where a value was expected, as in {class_path: ...}."""
    for key in knob.keys:
        path = place_key(root, key)
        if any(len(other) > len(path) and other[: len(path)] == path for other in values):
            return path
    return None


def interpret_config(
    site: TargetSite, entries: Sequence[Entry], *, gpus: int | None = None, nodes: int | None = None
) -> Reading:
    """Interpret the entries by the target; `gpus` and `nodes` are what the launcher gives."""
    values = {entry.path: entry for entry in entries}
    knobs = tuple(enumerate(site.target.knobs))
    order = {key.lstrip("/"): place for place, knob in reversed(knobs) for key in knob.keys}
    heard = FactCollector()
    # What counts only under some strategy is read once that is known, and preferences after all the rest.
    for knob in sorted(site.target.knobs, key=lambda key: (bool(key.only), bool(key.soft))):
        if site.applies(knob) and _applies(knob, heard.likely(), site.root, values):
            path, entry = find_entry(knob, site.root, values)
            if entry is None and (table_path := find_table(knob, site.root, values)):
                heard.left_open.add(knob.field)
                heard.said.append(f"{format_path(table_path)} holds a table, and is not known")
            else:
                heard.listen(knob, path, entry, root=site.root)
    numbers = dict(heard.numbers)
    if gpus is not None and "gpus" not in solve_products(numbers, heard.implied, []):
        # The config leaves it to the launcher.
        numbers["gpus"] = gpus
        if "gpus_per_node" not in numbers:
            numbers["nodes"] = nodes or 1
    facts: dict[str, int | str] = {**heard.likely(), **solve_products(numbers, heard.implied, heard.said)}
    if "strategy" not in site.target.fields() and "dp_shard" in site.target.fields():
        facts |= _strategy_from_degrees(facts)
    strategy = STRATEGIES.get(str(facts.get("strategy")))
    if strategy is not None and strategy.degrees == (False, True) and _is_several(facts.get("dp_replicate")):
        facts["strategy"] = strategy_by_degrees(replicated=True, sharded=True).value
    broken = [
        (requirement, place)
        for requirement in site.target.requires
        for place in find_violations(requirement, site.root, values, facts)
    ]
    return Reading(
        target=site.target.name,
        root=format_path(site.root) if site.root else "",
        found=tuple(sorted(heard.found, key=lambda key: order.get(key.key, len(order)))),
        facts=facts,
        said=tuple(heard.said),
        warnings=(
            *heard.warnings,
            *(_requirement_warning(requirement, *place, site.root) for requirement, place in broken),
        ),
    )


def _is_several(count: int | str | None) -> bool:
    return isinstance(count, int) and count > 1


def _applies(
    rule: Knob | Requirement, facts: Mapping[str, int | str], root: KeyPath, values: Mapping[KeyPath, Entry]
) -> bool:
    """Return whether a knob or a requirement counts, given these facts and this file."""
    return all(facts.get(field) in among for field, among in rule.only.items()) and conditions_hold(
        rule.when, root, values
    )


def find_violations(
    requirement: Requirement, root: KeyPath, values: Mapping[KeyPath, Entry], facts: Mapping[str, int | str]
) -> list[tuple[KeyPath, Any, Entry | None]]:
    """Return the keys of a requirement with another value: path, value, and the entry if any."""
    if not _applies(requirement, facts, root, values):
        return []
    violations: list[tuple[KeyPath, Any, Entry | None]] = []
    seen = False
    for key in requirement.keys:
        path = find_place(root, key, values)
        entry = values.get(path)
        if entry is None and any(len(other) > len(path) and other[: len(path)] == path for other in values):
            seen = True
            if "table" not in requirement.values:
                violations.append((path, "a table", None))
        elif entry is not None:
            seen = True
            if entry.computed or not any(
                same_meaning(entry.value, value) for value in _plain_values(requirement)
            ):
                violations.append((path, entry.computed or entry.value, entry))
    if not seen and not any(same_meaning(requirement.default, value) for value in _plain_values(requirement)):
        violations.append((place_key(root, requirement.keys[0]), requirement.default, None))
    return violations


def _plain_values(requirement: Requirement) -> tuple[Any, ...]:
    """Return the values under which a plan holds; an empty table is no value."""
    return (*requirement.values, {}) if None in requirement.values else requirement.values


def _requirement_warning(
    requirement: Requirement, path: KeyPath, value: Any, entry: Entry | None, root: KeyPath
) -> ConfigWarning:
    key = format_path(shorten_path(path, root))
    by_default = "" if entry is not None or value == "a table" else " by default"
    text = f"{key} is {format_value(value)}{by_default}: {requirement.why}"
    return ConfigWarning(text=text, key=key, value=value, field=requirement.field)


@dataclass
class FactCollector:
    """Collects what the keys say."""

    found: list[FoundKey] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    votes: dict[str, dict[str, int]] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    warnings: list[ConfigWarning] = field(default_factory=list)
    left_open: set[str] = field(default_factory=set)
    """Fields of which one key at least leaves it open what they are."""

    def listen(self, knob: Knob, path: KeyPath, entry: Entry | None, *, root: KeyPath) -> None:
        """Add one key, or the framework's default if the key is missing."""
        if entry is None and knob.default is None:
            return
        value = knob.default if entry is None or is_blank(knob, entry) else entry.value
        held_key = FoundKey(
            field=knob.field,
            key=format_path(shorten_path(path, root)),
            value=value,
            line=None if entry is None else entry.line,
            computed="" if entry is None else entry.computed,
        )
        self.found.append(held_key)
        if held_key.computed:
            self.left_open.add(knob.field)
            self.said.append(
                f"{held_key.key} is computed in line {held_key.line} ({held_key.computed}), and is not known"
            )
        elif is_auto(knob, value):
            self.left_open.add(knob.field)
            self.said.append(f"{held_key.key} is {format_value(value)}: the framework decides")
        elif any(same_meaning(value, soft) for soft in knob.soft) and not words_of_value(knob, value):
            pass
        elif knob.field in WORDS:
            self._narrow(knob, held_key)
        elif format_value(value) in knob.implied:
            self.implied[knob.field] = knob.implied[format_value(value)]
        elif value is not None:
            self._count(knob, held_key)

    def _count(self, knob: Knob, held_key: FoundKey) -> None:
        number = parse_count(knob, held_key.value)
        if number is None or number < (0 if knob.field == "workers" else 1):
            self.said.append(
                f"{held_key.key} is {format_value(held_key.value)!r}, which is no number of anything"
            )
        elif self.numbers.setdefault(knob.field, number) != number:
            self.said.append(f"{held_key.key} is {number}, and another key says {self.numbers[knob.field]}")

    def _narrow(self, knob: Knob, held_key: FoundKey) -> None:
        """Let a key rule out words and vote for those that it means."""
        spelt = words_of_value(knob, held_key.value)
        if not spelt and (
            rough := next((w for v, w in knob.rough.items() if same_meaning(v, held_key.value)), "")
        ):
            # What is moved elsewhere may be moved alone or with others: as for the value that it is read as.
            spelt = words_of_value(knob, knob.words[rough]) if knob.field == "offload" else [rough]
            value = format_value(held_key.value)
            text = f"{held_key.key} is {value}, which is read as {rough}: {knob.rough_why}"
            self.warnings.append(
                ConfigWarning(text=text, key=held_key.key, value=held_key.value, field=held_key.field)
            )
        if not spelt:
            self.said.append(
                f"{held_key.key} is {format_value(held_key.value)!r}, which is not one of the words "
                "known here"
            )
            return
        possible = {*spelt, *unspoken_words(knob)}
        before = self.votes.setdefault(knob.field, dict.fromkeys(WORDS[knob.field], 0))
        left = {word: votes + (word in spelt) for word, votes in before.items() if word in possible}
        if any(left.values()):
            self.votes[knob.field] = left
        elif not any(same_meaning(held_key.value, soft) for soft in knob.soft):
            self.said.append(
                f"{held_key.key} is {format_value(held_key.value)}, which contradicts another key"
            )

    def likely(self) -> dict[str, str]:
        """Return the word with most votes for each field; the first of ours among equals."""
        return {
            field: max(votes, key=lambda word: votes[word])
            for field, votes in self.votes.items()
            if field not in self.left_open
        }


def _strategy_from_degrees(facts: Mapping[str, int | str]) -> dict[str, str]:
    """Return the strategy that the degrees of data parallelism make."""
    degrees = [facts.get("dp_replicate"), facts.get("dp_shard")]
    if not all(isinstance(degree, int) for degree in degrees):
        return {}
    replicated, sharded = (degree != 1 for degree in degrees)
    return {"strategy": strategy_by_degrees(replicated=replicated, sharded=sharded).value}


def solve_products(numbers: dict[str, int], implied: Mapping[str, str], notes: list[str]) -> dict[str, int]:
    """Return the numbers with everything that follows from them.

    >>> known = {"micro_batch": 4, "accumulation": 2, "gpus": 8, "tensor": 1, "pp": 1}
    >>> solve_products(known, {}, [])["global_batch"]
    64
    """
    known = {"tensor": 1, "context": 1, "pp": 1, **numbers}
    for _ in range(len(PRODUCTS)):
        for product, *factors in PRODUCTS:
            _solve_product(known, product, factors[0], factors[1])
        if "rest" in implied.values() and {"gpus", "model", "dp_replicate"} <= known.keys():
            rest, over = divmod(known["gpus"], known["model"] * known["dp_replicate"])
            if not over:
                known.update({field: rest for field, what in implied.items() if what == "rest" and rest})
        if "round_batch" in known:
            known.update(
                {field: known["round_batch"] for field, what in implied.items() if what == "round_batch"}
            )
    for product, factor, other in PRODUCTS:
        if {product, factor, other} <= known.keys() and known[factor] * known[other] != known[product]:
            notes.append(
                f"{_plain_name(factor)} {known[factor]} x {_plain_name(other)} {known[other]} "
                f"does not make {_plain_name(product)} {known[product]}"
            )
    return {field: value for field, value in known.items() if field not in {"model", "split"}}


def _solve_product(numbers: dict[str, int], product: str, first: str, other: str) -> None:
    if first in numbers and other in numbers:
        numbers.setdefault(product, numbers[first] * numbers[other])
    for factor, rest in ((first, other), (other, first)):
        if (
            product in numbers
            and factor in numbers
            and rest not in numbers
            and numbers[product] % numbers[factor] == 0
        ):
            numbers[rest] = numbers[product] // numbers[factor]


def _plain_name(field: str) -> str:
    return field.replace("_", " ")


SPLITS = {"tensor": "tp", "context": "cp", "pp": "pp"}
"""Fields that split the model, by the axis of the mesh that they are."""


def read_split(reading: Reading, gpus: int) -> dict[str, int]:
    """Return the axes of the mesh that split the model; {} if they do not divide the GPUs."""
    split = {
        axis: degree
        for field, axis in SPLITS.items()
        if (degree := reading.number(field) or 1) > 1 and axis in Mesh.__struct_fields__
    }
    return {} if gpus % prod(split.values()) else split


def read_expert_degree(reading: Reading, strategy: Strategy, mesh: Mesh) -> int:
    """Return the ranks of a config that hold different experts; 1 if trimtab has no such mesh."""
    ep = reading.number("expert") or 1
    is_known = STRATEGIES[strategy].expert_refusal(ep) is None and mesh.shards % ep == 0
    return ep if is_known else 1


def make_setting(reading: Reading, *, gpus: int = 1) -> Setting:
    """Return how the config would run; what it leaves open is as in a plain run on `gpus` devices."""
    facts = reading.facts
    count = reading.number("gpus") or gpus
    split = read_split(reading, count)
    copies = count // prod(split.values())
    usual, _ = usual_strategy(copies)
    strategy = Strategy(str(facts.get("strategy", usual)))
    if copies == 1 or not STRATEGIES[strategy].needs_several_gpus:
        strategy = usual
    micro = reading.number("micro_batch") or 1
    accumulation = reading.number("accumulation") or 1
    shards = reading.number("dp_shard") or reading.number("gpus_per_node")
    if copies == 1 and split:
        strategy = model_splitting_strategy(split)
    mesh = STRATEGIES[strategy].config_mesh(copies, shards).replace(**split)
    mesh = mesh.replace(ep=read_expert_degree(reading, strategy, mesh))
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
        base=BaseFormat(str(facts.get("base", BaseFormat.NONE))),
        loss=LossForm(str(facts.get("loss", LossForm.WHOLE))),
        offload=_list_offloads(facts),
        optimizer=OptimizerImplementation(str(facts.get("optimizer", OptimizerImplementation.FUSED))),
        # On several GPUs it is not estimated, and a warning says so.
        optimizer_in_backward=count == 1 and facts.get("optimizer_in_backward") == "true",
        optimizer_rule=OptimizerRule(str(facts.get("optimizer_rule", OptimizerRule.JOB))),
        allocator=Allocator(str(facts.get("allocator", Allocator.DEFAULT))),
        workers=reading.number("workers") or 0,
    )


def _list_offloads(facts: Mapping[str, int | str]) -> tuple[Offload, ...]:
    """Return what a config moves to the host, in the order of Offload."""
    named = str(facts.get("offload", "none")).split(",")
    if facts.get("offload_activations") == "true":
        named.append(Offload.ACTIVATIONS)
    return tuple(member for member in Offload if member.value in named)
