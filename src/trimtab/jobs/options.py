"""The options of a job: its attributes that are plain values, read, checked and set by name."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from trimtab.errors import UnknownName, WrongUse, nearest
from trimtab.jobs.job import Job

PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
NOT_OPTIONS = frozenset(
    {"name", "branches", "additive", "tiny", "sizes", "needs", "assumptions", "remarks", "unfelt"}
)
"""What a job says about itself rather than lets be chosen."""
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def options(job: Any) -> dict[str, Any]:
    """What can be set on a job, with the value that each has now."""
    names = {name for cls in type(job).__mro__ for name in vars(cls)} | set(vars(job))
    found = {
        name: getattr(job, name)
        for name in names
        if not name.startswith("_")
        and name not in NOT_OPTIONS
        and not isinstance(getattr(type(job), name, None), property)
    }
    return {name: found[name] for name in sorted(found) if isinstance(found[name], PLAIN)}


def change(job: Any, given: dict[str, Any]) -> Any:
    """The job, with these attributes set; text is read as the kind of value that is there already."""
    for name, value in given.items():
        setattr(job, name, _fitting(job, name, value))
    if isinstance(job, Job):
        job.settle(frozenset(given))
    return job


def _fitting(job: Any, name: str, value: Any) -> Any:
    """The value as this attribute takes it."""
    if not hasattr(job, name) or callable(getattr(job, name)):
        known = list(options(job))
        close = nearest(name, known)
        meant = f"; did you mean {' or '.join(close[:2])}?" if close else ""
        raise UnknownName(
            f"option {name}={value}",
            found=f"the job has no option {name!r}{meant}",
            cure=f"It has {', '.join(known) or 'none'}.",
        )
    default = getattr(job, name)
    if (value is None or value == "none") and _may_be_none(job, name):
        return None
    kind = type(default) if default is not None else _announced(job, name)
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
        return value
    read = _READERS.get(kind, lambda given: given)
    try:
        return read(value)
    except (ValueError, TypeError, KeyError):
        raise WrongUse(
            f"option {name}={value}",
            found=f"it is not {_KINDS[kind]}",
            cure=f"The job has {name}={default!r}: give another such value.",
        ) from None


def _announced(job: Any, name: str) -> type:
    """The kind of value that an option without one is annotated for."""
    return next((kind for kind in _hinted(job, name) if kind in (bool, int, float, str)), type(None))


def _may_be_none(job: Any, name: str) -> bool:
    """Whether an option is annotated as one that can be left open, as `int | None` is."""
    return type(None) in _hinted(job, name)


def _hinted(job: Any, name: str) -> tuple[Any, ...]:
    try:
        return get_args(get_type_hints(type(job)).get(name))
    except (NameError, TypeError):
        return ()


def _whole(value: Any) -> int:
    if isinstance(value, str):
        # People write 30_000 and 30000, never 30000.0.
        return int(value)
    raise TypeError


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    if isinstance(value, str):
        return WORDS[value.lower()]
    raise TypeError


def _text(_: Any) -> str:
    raise TypeError


def _several(value: Any) -> list[Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list | tuple):
        raise TypeError
    return list(found)


def _table(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise TypeError
    return found


def _anything(value: Any) -> Any:
    """For an option that has no value yet: a number or a word, as it looks."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


_READERS: dict[type, Any] = {
    bool: _switch,
    int: _whole,
    float: _number,
    str: _text,
    list: _several,
    tuple: lambda value: tuple(_several(value)),
    dict: _table,
    type(None): _anything,
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
