"""Strategies that build every noun of the package, derived from the types of its fields.

What the types do not say is given here: rules of a field in FIELDS, rules between fields in FITTED.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import reject
from hypothesis import strategies as st

import trimtab
from trimtab import spec

Values = st.SearchStrategy[Any]

names = st.text(min_size=1, max_size=12)
sentences = st.text(min_size=1, max_size=30).filter(lambda text: bool(text.strip()))
one_line = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1, max_size=12)
counts = st.integers(1, 2**50)
few = st.integers(1, 64)
rates = st.floats(1, 1e18)
seconds = st.floats(0, 1e9)
shares = st.floats(0.01, 1)
scalars = st.booleans() | st.integers(0, 2**50) | names
plain = st.none() | scalars | st.lists(st.integers(0, 9), max_size=2)
source = st.builds(lambda kind, text: f"{kind}: {text}", st.sampled_from(spec.base.SOURCE_KINDS), names)


def all_nouns(base: type[spec.Noun] = spec.Noun) -> set[type[spec.Noun]]:
    """Return the classes below one, as far as their modules are loaded."""
    found = set(base.__subclasses__())
    return found | {deeper for cls in found for deeper in all_nouns(cls)}


def load_package() -> None:
    """Import every module, so that every noun is there."""
    for module in pkgutil.walk_packages(trimtab.__path__, "trimtab."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # A callback of a framework that is not installed here.
            if not module.name.startswith("trimtab.integrations.") or str(error.name).startswith("trimtab"):
                raise


def tuples(values: Values, at_least: int = 0, at_most: int = 2) -> Values:
    return st.lists(values, min_size=at_least, max_size=at_most).map(tuple)


def maybe(values: Values) -> Values:
    return st.none() | values


SIMPLE: dict[Any, Values] = {
    str: names,
    int: counts,
    bool: st.booleans(),
    float: shares,
    type(None): st.none(),
    Any: plain,
    object: plain,
}


def of_type(hint: Any, field: str = "") -> Values:  # noqa: PLR0911 - one for each kind of type
    """Return a strategy for a type, by the name of the field where that says more."""
    hint = getattr(hint, "__value__", hint)
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float and field.endswith(("_s", "_hz", "_w", "_hours")):
        return seconds
    if hint in SIMPLE:
        return SIMPLE[hint]
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of([of_type(member, field) for member in inner])
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*(of_type(member, field) for member in inner))
    if origin in (tuple, list):
        values = of_type(inner[0], field)
        is_large = isinstance(inner[0], type) and issubclass(inner[0], spec.Noun)
        return tuples(values, 0, 1 if is_large else 2) if origin is tuple else st.lists(values, max_size=2)
    if origin is dict:
        return st.dictionaries(of_type(inner[0]), of_type(inner[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, spec.Noun):
        return st.deferred(lambda: NOUNS[hint])
    raise TypeError(f"no strategy for {hint!r}, the type of {field}")


def build(cls: type[spec.Noun]) -> Values:
    """Return a strategy for a noun; a field with a default is left out at times."""
    hints = get_type_hints(cls)
    given = FIELDS.get(cls.__name__, {})
    if "sources" in hints:
        given = {"sources": st.dictionaries(st.sampled_from(cls.json_fields()), source, max_size=4), **given}
    by_field = {
        field.name: given[field.name] if field.name in given else of_type(hints[field.name], field.name)
        for field in msgspec.structs.fields(cls)
    }
    needed = {field.name for field in msgspec.structs.fields(cls) if field.required} | given.keys()
    fit = FITTED.get(cls.__name__, lambda values: values)

    def made(values: dict[str, Any]) -> spec.Noun:
        try:
            return cls(**fit(values))
        except ValueError:
            reject()

    required = {name: values for name, values in by_field.items() if name in needed}
    optional = {name: values for name, values in by_field.items() if name not in needed}
    return st.fixed_dictionaries(required, optional=optional).map(made)


load_package()
from trimtab.catalog.glossary import KINDS  # noqa: E402 - after the check that everything can be loaded
from trimtab.configs.targets import COUNTS, WORDS, Knob  # noqa: E402
from trimtab.spec.precision import DTYPE_BYTES, FLOAT8, FLOAT32  # noqa: E402
from trimtab.training.bad_steps import BACKWARD, BATCH, FORWARD  # noqa: E402
from trimtab.training.fault_injection import POINTS_BY_KIND, FaultKind  # noqa: E402
from trimtab.training.job_queries import ANSWERS  # noqa: E402

SAID = dict.fromkeys(("what", "evidence", "cause", "cure"), sentences)
marks = tuples(tuples(names, 1), 1)
FIELDS: dict[str, dict[str, Values]] = {
    "Calibration": {"works": st.deferred(lambda: tuples(NOUNS[spec.Work]))},
    "Cluster": {"nodes": st.deferred(lambda: tuples(NOUNS[spec.Node], 1))},
    "Device": {
        "compute_capability": maybe(st.sampled_from(["7.5", "9.0", "12.0", "gfx90a", "gfx942"])),
        "pcie_generation": maybe(st.integers(1, 8)),
        "pcie_width": maybe(st.integers(1, 32)),
        "clock_hz": maybe(rates),
        "power_limit_w": maybe(st.floats(1, 2000)),
        "bandwidth_bytes_per_s": maybe(rates),
    },
    "Dtypes": {
        "autocast": maybe(st.sampled_from([name for name in DTYPE_BYTES if name != FLOAT32])),
        **dict.fromkeys(("weights", "frozen_weights", "reductions"), st.sampled_from([*DTYPE_BYTES])),
    },
    "Fault": {"kind": st.sampled_from(FaultKind), "step": few},
    "Knob": {
        "field": st.sampled_from([*sorted(WORDS), *COUNTS]),
        "keys": tuples(names, 1),
        "rough_why": names,
        "implied": st.sampled_from([{}, {"-1": "rest"}]),
        "pattern": st.sampled_from(["", r"gpu:(?P<n>[0-9]+)"]),
    },
    "Launch": {"command": tuples(names, 1)},
    "Link": {"source": source},
    "ProductsFormat": dict.fromkeys(("values", "gradients"), st.sampled_from(FLOAT8)),
    "Resources": dict.fromkeys(("nodes", "procs", "least_nodes", "gpus"), few),
    "Node": {"devices": st.deferred(lambda: tuples(NOUNS[spec.Device], 0, 3))},
    "Setting": {
        **dict.fromkeys(("micro_batch", "accumulation", "global_batch"), few),
        "strategy": st.sampled_from(spec.Strategy),
        "mesh": st.deferred(lambda: NOUNS[spec.Mesh]),
        "shares": st.just(()) | st.deferred(lambda: tuples(NOUNS[spec.Share], 2, 3)),
    },
    "Share": dict.fromkeys(("samples", "micro_batch", "accumulation"), few),
    "MicroBatchSizes": {"failed": st.dictionaries(few.map(str), st.tuples(few, few), max_size=2)},
    "Timeline": {"moments": tuples(counts, 1, 3), "peak": few},
    "Trace": {"sizes": tuples(counts, 0, 4), "beside": st.just(())},
    "World": {"rank": st.just(0)},
    "Advice": {"kind": sentences, "what": sentences, "cure": sentences},
    "Attempt": {"state": st.sampled_from(["running", "ended"])},
    "StageChain": {"stages": st.deferred(lambda: tuples(NOUNS[spec.Stage], 1, 1))},
    "Diagnosed": {**SAID, "realm": st.sampled_from(["job", "environment"])},
    "RunEnding": {"asked": st.sampled_from(["", "SIGTERM", "SIGUSR1"])},
    "Finding": SAID,
    "FileChecksum": {"sha256": st.text("0123456789abcdef", min_size=64, max_size=64)},
    "LaunchDefaults": {
        "sbatch": tuples(one_line.map(lambda text: f"--{text}")),
        "environment": st.dictionaries(one_line, one_line, max_size=2),
        **dict.fromkeys(("modules", "lines"), tuples(one_line)),
        **dict.fromkeys(("activate", "mount", "runtime"), one_line),
        **dict.fromkeys(("partition", "account", "qos", "time"), maybe(one_line)),
        **dict.fromkeys(("image", "namespace", "claim"), maybe(one_line)),
    },
    "JobView": {"kind": st.sampled_from(["slurm", "local"])},
    "Mesh": {
        **dict.fromkeys(("dp_replicate", "dp_shard", "branch", "cp", "tp", "pp"), st.integers(1, 8)),
        "copies": st.just(()),
    },
    "Pairs": {
        "anchor_level": maybe(st.just((6,))),
        "relation_margin": st.sampled_from([None, 2, (1, 3)]),
        "distance_margin": st.sampled_from([None, 2.0, (1.0, 3.0)]),
    },
    "Peaks": dict.fromkeys(spec.Peaks.__struct_fields__, maybe(rates)),
    "JobQuery": {"what": st.sampled_from(sorted(ANSWERS))},
    "Reason": {"why": sentences},
    "Requirement": {"keys": tuples(names, 1), "values": st.just((1, "all")), "write": st.just(1)},
    "Stage": {"name": st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)},
    "StageFormat": {"marks": marks},
    "StagedPlan": {"stages": st.deferred(lambda: tuples(NOUNS[spec.PlannedStage], 1, 1))},
    "BadModule": {"phase": st.sampled_from([BATCH, FORWARD, BACKWARD])},
    "ConfigTarget": {
        "knobs": st.deferred(lambda: tuples(NOUNS[Knob], 1)),
        "name": st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True),
        "marks": marks,
        "lacks": st.dictionaries(st.sampled_from(COUNTS), names, max_size=1),
    },
    "Tokens": {"kind": st.sampled_from(["uint16", "uint32"])},
    "Word": {"kind": st.sampled_from(KINDS)},
    "MeasuredWork": {"kind": st.sampled_from(spec.KINDS)},
    "Work": {"kind": st.sampled_from(spec.KINDS)},
}


# Rules between fields: what was drawn, made to fit.


def ordered(*fields: str) -> Any:
    """Return a function that sorts the values of some fields."""

    def fit(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, **dict(zip(fields, sorted(values[name] for name in fields), strict=True))}

    return fit


def fit_cluster(values: dict[str, Any]) -> dict[str, Any]:
    is_pair = len(values["nodes"][0].devices) > 1
    links = tuple(link for link in values.get("links", ()) if link.node is None or is_pair)
    return {**values, "links": links}


def fit_estimate(values: dict[str, Any]) -> dict[str, Any]:
    values = ordered("allocated_bytes", "reserved_bytes", "process_bytes")(values)
    verdict = values.get("verdict")
    if verdict is not None:
        values["fits"] = verdict is not spec.Verdict.DOES_NOT_FIT
    return values | {"least_bytes": values["reserved_bytes"]}


def fit_fault(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "point": ["", *POINTS_BY_KIND[values["kind"]]][values["step"] % 2]}


def fit_host_memory(values: dict[str, Any]) -> dict[str, Any]:
    values = ordered("pinned_bytes", "rank_bytes", "node_bytes")(values)
    capacity = values.get("capacity_bytes")
    return {**values, "fits": None if capacity is None else values["node_bytes"] <= capacity}


def fit_knob(values: dict[str, Any]) -> dict[str, Any]:
    words = WORDS.get(values["field"])
    if words is None:
        return {name: value for name, value in values.items() if name not in WORDED}
    ours, text = words[0], values["rough_why"]
    tables = {"words": {ours: text}, "reads": {text: ours}, "near": {ours: words[-1]}, "lacks": {ours: text}}
    return {**values, **tables, "rough": {text: ours}}


def fit_launch(values: dict[str, Any]) -> dict[str, Any]:
    has_script = values.get("script") is not None
    return {
        **values,
        "why": dict.fromkeys(values.get("environment", {}), "why"),
        "script_file": "file" if has_script else None,
    }


def fit_link(values: dict[str, Any]) -> dict[str, Any]:
    is_inside = values.get("node") is not None
    return {**values, "node": 0 if is_inside else None, "devices": (0, 1) if is_inside else ()}


def fit_resources(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "gpus": values["procs"] * (values["nodes"] % 2), "least_nodes": 1}


def fit_node(values: dict[str, Any]) -> dict[str, Any]:
    devices = [device.replace(index=index) for index, device in enumerate(values.get("devices", ()))]
    return {**values, "devices": tuple(devices)}


def fit_scheduler(values: dict[str, Any]) -> dict[str, Any]:
    size, rank = values.get("world_size"), values.get("rank")
    return {**values, "rank": None if size is None or rank is None else rank % size}


def fit_setting(values: dict[str, Any]) -> dict[str, Any]:
    shares = values["shares"]
    if shares:
        batch = {
            "micro_batch": max(share.micro_batch for share in shares),
            "accumulation": max(share.accumulation for share in shares),
            "global_batch": sum(share.samples for share in shares),
        }
        plain = {"schedule": spec.Schedule.ONE_F_ONE_B, "virtual_stages": 1}
        mesh = spec.Mesh(dp_replicate=len(shares))
        return {**values, **batch, **plain, "strategy": spec.Strategy.DDP, "mesh": mesh}
    mesh = spec.Mesh() if values["strategy"] is spec.Strategy.SINGLE else values["mesh"]
    looped = values.get("schedule") is spec.Schedule.INTERLEAVED
    values = {**values, "virtual_stages": 2 if looped else 1}
    whole = values["micro_batch"] * values["accumulation"] * mesh.data_parallel
    # The last micro-batch may be smaller.
    less = values["global_batch"] % (values["micro_batch"] * mesh.data_parallel)
    return {**values, "mesh": mesh, "global_batch": whole - less}


def fit_share(values: dict[str, Any]) -> dict[str, Any]:
    micro_batch = values["micro_batch"]
    return {**values, "samples": micro_batch * values["accumulation"] - values["samples"] % micro_batch}


def fit_timeline(values: dict[str, Any]) -> dict[str, Any]:
    moments = len(values["moments"])
    return {**values, "held": (values["moments"],) * len(spec.PARTS), "peak": values["peak"] % moments}


def fit_trace(values: dict[str, Any]) -> dict[str, Any]:
    count = len(values["sizes"])
    columns = dict.fromkeys(("streams", "parts", "modules", "ops"), (0,) * count)
    order = (*range(count), *(~number for number in range(count)))
    sequence = (0,) * len(values.get("works", ()))
    return {**values, **columns, "order": order, "sequence": sequence, "caused": ()}


WORDED = ("words", "reads", "near", "lacks", "rough")
"""Tables of a knob whose field has words."""


def fit_decoder(values: dict[str, Any]) -> dict[str, Any]:
    """Let heads be a multiple of key/value heads, and tokens choose among the experts that there are."""
    chosen = min(values.get("experts", 0), max(1, values.get("experts_per_token", 0)))
    return {**values, "heads": values["key_value_heads"] * 4, "experts_per_token": chosen}


FITTED: dict[str, Any] = {
    "Band": ordered("low_bytes", "high_bytes"),
    "Calibration": lambda values: {**values, "seconds": (1e-6,) * len(values["works"])},
    "Cluster": fit_cluster,
    "DecoderShape": fit_decoder,
    "Device": lambda values: {**values, "free_bytes": values["memory_bytes"] // 2},
    **dict.fromkeys(("Estimate", "EstimateOutput"), fit_estimate),
    "Fault": fit_fault,
    "HostMemory": fit_host_memory,
    "Knob": fit_knob,
    "Launch": fit_launch,
    "Link": fit_link,
    "Measurement": ordered("allocated_bytes", "reserved_bytes"),
    "MfuReference": ordered("low", "high"),
    "PipelineEstimate": lambda values: {**values, "layers": (2,) * 4, "held_micro_batches": (2.0, 1.0)},
    "Resources": fit_resources,
    "Node": fit_node,
    "Scheduler": fit_scheduler,
    "Setting": fit_setting,
    "Share": fit_share,
    "Timeline": fit_timeline,
    "Trace": fit_trace,
}
NOUNS: dict[type[spec.Noun], Values] = {
    cls: build(cls)
    for cls in sorted(all_nouns(), key=lambda cls: (cls.__module__, cls.__name__))
    if cls.__module__.startswith("trimtab.")
}
plans = NOUNS[spec.Plan]
