"""Check the degrees of parallelism in a config against the model and the GPUs that it names."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from trimtab.configs.interpret import format_value, is_auto, parse_count
from trimtab.configs.targets import conditions_hold, find_place
from trimtab.jobs.model_sizes import ModelSizes
from trimtab.planner.degrees import ClusterShape, DegreeFinding, Degrees, FrameworkRules, lint_degrees
from trimtab.spec.finding import Severity
from trimtab.units import LARGEST_COUNT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.interpret import Reading
    from trimtab.configs.targets import ConfigTarget, TargetSite
    from trimtab.configs.text_edit import Entry, KeyPath

DEGREE_OF = {
    "tensor": "tp",
    "context": "cp",
    "pp": "pp",
    "expert": "ep",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "virtual_stages": "virtual_stages",
}
NUMBERS = (*DEGREE_OF, "data_parallel")
"""The degree that each field of a config is."""
LOOPED_STAGES = 2
"""Virtual stages of a rank that torchtitan makes for a schedule with several, unless a key says how many
layers each has (torchtitan/distributed/pipeline_parallel.py)."""


def lint_config(
    site: TargetSite, entries: Sequence[Entry], reading: Reading, job: ModelSizes, shape: ClusterShape
) -> list[DegreeFinding]:
    """Return what is illegal or unwise about the degrees in a config; [] if it has none.

    `job` has the sizes of the model where the config names a folder; `shape` is what --on states.
    """
    used = {found.field for found in reading.found} & {"tensor", "context", "pp", "expert", "virtual_stages"}
    if not used:
        return []
    values = {entry.path: entry for entry in entries}
    wrong = find_wrong_values(site, reading)
    sizes = read_config_sizes(site, values, reading, job)
    rules = read_rules(site.target, site.root, values)
    degrees = _read_degrees(site, values, reading, sizes)
    # Where no key says how many GPUs there are, their number follows from the degrees themselves.
    states_gpus = {"gpus", "gpus_per_node"} & {found.field for found in reading.found}
    stated = reading.number("gpus") if states_gpus or shape.gpus is None else shape.gpus
    per_node = reading.number("gpus_per_node") if reading.number("nodes") else None
    shape = replace(shape, gpus=stated, gpus_per_node=shape.gpus_per_node or per_node)
    return [*wrong, *lint_degrees(degrees, sizes, shape, rules)]


def find_wrong_values(site: TargetSite, reading: Reading) -> list[DegreeFinding]:
    """Return an error for each key of a degree that is no whole number from 1 up."""
    knobs = {key.lstrip("/"): knob for knob in site.target.knobs for key in knob.keys}
    wrong = []
    for found in reading.found:
        knob = knobs.get(found.key)
        if found.field not in NUMBERS or knob is None or found.computed or found.value is None:
            continue
        if is_auto(knob, found.value) or format_value(found.value) in knob.implied:
            continue
        count = parse_count(knob, found.value)
        if count is None or count < 1:
            wrong.append(
                DegreeFinding(
                    severity=Severity.ERROR,
                    rule="minimum",
                    given=f"{found.key}={format_value(found.value)}",
                    found="a degree is a whole number from 1 up",
                    cure=f"Use {' or '.join(knob.implied)}, or 1 or more."
                    if knob.implied
                    else "Use 1 or more.",
                )
            )
    return wrong


def read_config_sizes(
    site: TargetSite, values: Mapping[KeyPath, Entry], reading: Reading, job: ModelSizes
) -> ModelSizes:
    """Return the sizes of the model: as the config states them, else as its name or its folder says."""
    named = next(
        (flavor for flavor in site.target.flavors if conditions_hold(flavor.when, site.root, values)), None
    )
    sizes = replace(job, **(named.sizes if named else {}))
    known = {field.name for field in fields(ModelSizes)}
    stated: dict[str, Any] = {
        name: count
        for name in site.target.model
        if name in known and (count := _read_size(site, values, name)) is not None
    }
    if "heads" in stated and "kv_heads" not in stated:
        stated["kv_heads"] = stated["heads"]
    if "layers" in stated and "experts" in site.target.model and "experts" not in stated:
        stated["experts"] = 0
    return replace(sizes, **stated, seq=reading.number("seq") or sizes.seq)


def _read_size(site: TargetSite, values: Mapping[KeyPath, Entry], name: str) -> int | None:
    for key in site.target.model.get(name, ()):
        entry = values.get(find_place(site.root, key, values))
        value = None if entry is None or entry.computed else entry.value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST_COUNT:
            return value
    return None


def read_rules(target: ConfigTarget, root: KeyPath, values: Mapping[KeyPath, Entry]) -> FrameworkRules:
    """Return what the framework requires of degrees, by the keys of the file."""
    known = {field.name for field in fields(FrameworkRules)}
    holds = {rule: conditions_hold(when, root, values) for rule, when in target.rules.items()}
    return FrameworkRules(**{rule: value for rule, value in holds.items() if rule in known})


def _read_degrees(
    site: TargetSite, values: Mapping[KeyPath, Entry], reading: Reading, sizes: ModelSizes
) -> Degrees:
    """Return the degrees that a config states, in the spelling of its keys."""
    names = {
        DEGREE_OF[found.field]: found.key for found in reversed(reading.found) if found.field in DEGREE_OF
    }
    stated: dict[str, Any] = {
        degree: count
        for field, degree in DEGREE_OF.items()
        if degree in names and (count := reading.number(field)) is not None
    }
    copies = next((found.key for found in reading.found if found.field == "data_parallel"), "")
    if copies and (ranks := reading.number("data_parallel")) is not None:
        stated |= {"dp_replicate": ranks, "dp_shard": 1}
        names |= {"dp_replicate": copies}
    pp = stated.get("pp", 1)
    if pp > 1 and "virtual_stages" not in stated:
        stated["virtual_stages"] = _count_virtual_stages(site, values, sizes.layers, pp)
    micro, rounds = reading.number("micro_batch"), reading.number("accumulation")
    if pp > 1 and "stage_micro_batch" in site.target.model and micro:
        # torchtitan cuts the batch of a rank into the micro-batches of its pipeline.
        stage = _read_size(site, values, "stage_micro_batch") or 1
        rounds = max(1, micro // stage)
    return Degrees(
        **stated,
        micro_batch=micro,
        accumulation=rounds if "accumulation" in reading.facts or pp > 1 else None,
        global_batch=reading.number("global_batch"),
        names=names,
    )


def _count_virtual_stages(
    site: TargetSite, values: Mapping[KeyPath, Entry], layers: int | None, pp: int
) -> int:
    each = _read_size(site, values, "layers_per_stage")
    if each and layers:
        return max(1, layers // (pp * each))
    looped = site.target.rules.get("looped")
    return LOOPED_STAGES if looped and conditions_hold(looped, site.root, values) else 1
