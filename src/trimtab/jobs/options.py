"""List and set the options of a job: its attributes with plain values."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from trimtab.errors import UnknownName, WrongUse, find_nearest
from trimtab.jobs.job import Job

PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, type(None))
NOT_OPTIONS = frozenset(
    {"name", "branches", "additive", "tiny", "sizes", "needs", "assumptions", "remarks", "unfelt", "limits"}
)
"""Attributes that describe a job and are not options."""
BOOLEAN_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def list_options(job: Any) -> dict[str, Any]:
    """Return the options of a job with their current values."""
    names = {name for cls in type(job).__mro__ for name in vars(cls)} | set(vars(job))
    values = {
        name: getattr(job, name)
        for name in names
        if not name.startswith("_")
        and name not in NOT_OPTIONS
        and not isinstance(getattr(type(job), name, None), property)
    }
    return {name: values[name] for name in sorted(values) if isinstance(values[name], PLAIN_TYPES)}


def list_numbers(job: Any) -> dict[str, int | None]:
    """Return the whole-number options of a job with their values; None for one that is not set."""
    return {
        name: value
        for name, value in list_options(job).items()
        if type(value) is int or (value is None and _annotated_type(job, name) is int)
    }


def set_options(job: Any, given: dict[str, Any]) -> Any:
    """Set options on a job and return it; text is converted to the type of the current value."""
    for name, value in given.items():
        setattr(job, name, _convert_value(job, name, value))
    if isinstance(job, Job):
        job.settle(frozenset(given))
    return job


def _convert_value(job: Any, name: str, value: Any) -> Any:
    """Return the value in the type of this attribute; raise WrongUse if it does not fit."""
    if not hasattr(job, name) or callable(getattr(job, name)):
        names = list(list_options(job))
        close = find_nearest(name, names)
        meant = f"; did you mean {' or '.join(close[:2])}?" if close else ""
        raise UnknownName(
            f"option {name}={value}",
            found=f"the job has no option {name!r}{meant}",
            cure=f"It has {', '.join(names) or 'none'}.",
        )
    default = getattr(job, name)
    if (value is None or value == "none") and _may_be_none(job, name):
        return None
    kind = type(default) if default is not None else _annotated_type(job, name)
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
        return value
    parse = _PARSERS.get(kind, lambda text: text)
    try:
        return parse(value)
    except (ValueError, TypeError, KeyError):
        raise WrongUse(
            f"option {name}={value}",
            found=f"it is not {_KINDS[kind]}",
            cure=f"The job has {name}={default!r}: give another such value.",
        ) from None


def _annotated_type(job: Any, name: str) -> type:
    """Return the annotated type of an option whose value is None."""
    return next((kind for kind in _annotated_types(job, name) if kind in (bool, int, float, str)), type(None))


def _may_be_none(job: Any, name: str) -> bool:
    """Return whether an option's annotation allows None, as `int | None`."""
    return type(None) in _annotated_types(job, name)


def _annotated_types(job: Any, name: str) -> tuple[Any, ...]:
    try:
        return get_args(get_type_hints(type(job)).get(name))
    except (NameError, TypeError):
        return ()


def _parse_int(value: Any) -> int:
    if isinstance(value, str):
        # People write 30_000 and 30000, never 30000.0.
        return int(value)
    raise TypeError


def _parse_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, str):
        return BOOLEAN_WORDS[value.lower()]
    raise TypeError


def _refuse_text(_: Any) -> str:
    raise TypeError


def _parse_list(value: Any) -> list[Any]:
    items = json.loads(value) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise TypeError
    return list(items)


def _parse_dict(value: Any) -> dict[str, Any]:
    table = json.loads(value) if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise TypeError
    return table


def _parse_any(value: Any) -> Any:
    """Parse text as JSON if possible, for an option without a type."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


_PARSERS: dict[type, Any] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _refuse_text,
    list: _parse_list,
    tuple: lambda value: tuple(_parse_list(value)),
    dict: _parse_dict,
    type(None): _parse_any,
}
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list, as in [1,2]",
    tuple: "a list, as in [1,2]",
    dict: 'a table, as in {"a": 1}',
}
