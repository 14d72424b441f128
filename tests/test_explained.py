"""`trimtab explain` has an entry for whatever a person can turn, choose, be told or run into."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import trimtab
from trimtab import api, errors, spec
from trimtab.configs.knobs import load_knobs
from trimtab.diagnosis.fault_kinds import load_kinds
from trimtab.errors import TrimtabError
from trimtab.planner import pins
from trimtab.predict import estimate
from trimtab.watching import advice

if TYPE_CHECKING:
    from collections.abc import Iterator


def classes(base: type[TrimtabError]) -> Iterator[type[TrimtabError]]:
    yield base
    for one in base.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from classes(one)


def advised() -> set[str]:
    """The kinds of advice that `trimtab watch` gives, as its source has them."""
    tree = ast.parse(Path(advice.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Advice"]
    values = [part.value for one in made for part in one.keywords if part.arg == "kind"]
    return {
        value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


ENUMERATED = {
    "a choice of a plan": [*pins.KEYS, *spec.Setting.__struct_fields__],
    "a knob of --knob": [*load_knobs()],
    "a strategy": [*spec.Strategy],
    "a precision": [*spec.Precision],
    "a way to recompute": [*spec.Recompute],
    "an optimizer implementation": [*spec.OptimizerImplementation],
    "an allocator": [*spec.Allocator],
    "an objective": [*spec.Objective],
    "an axis": [*spec.Mesh.__struct_fields__],
    "a part of memory": [*spec.Footprint.__struct_fields__],
    "a rating": [*estimate.RATINGS],
    "an error": [class_name.__name__ for class_name in classes(TrimtabError)],
    "an event of a run": [*spec.IncidentKind],
    "a severity": [*spec.Severity],
    "advice": sorted(advised()),
    "a finding": [*load_kinds()],
    "a launcher": [*spec.LaunchKind],
    "a verb": [*api.VERBS],
}


@pytest.mark.parametrize("group", ENUMERATED)
def test_each_is_explained(group: str) -> None:
    assert ENUMERATED[group]
    missing = []
    for name in ENUMERATED[group]:
        try:
            entry = trimtab.explain(str(name))
        except TrimtabError:
            missing.append(str(name))
        else:
            assert entry.what
    assert not missing, f"words.toml has no entry for {group}: {', '.join(missing)}"


def test_the_lists_are_not_empty_by_accident() -> None:
    assert advised() >= {"data-bound", "launch-bound", "throttled", "slow"}
    assert {"WrongUse", "NothingFits", "JobFailed"} <= set(ENUMERATED["an error"])
    assert len(ENUMERATED["a finding"]) > 100


@pytest.mark.parametrize("cls", list(classes(TrimtabError)), ids=lambda cls: cls.__name__)
def test_an_error_is_explained_under_its_own_name_with_its_exit_code(cls: type[TrimtabError]) -> None:
    entry = trimtab.explain(cls.__name__)
    assert (entry.name, entry.kind) == (cls.__name__, "error")
    assert f"xit code {cls.exit_code}." in entry.what


@pytest.mark.parametrize("verb", api.VERBS)
def test_the_entry_of_a_verb_names_its_command(verb: str) -> None:
    assert f"trimtab {verb}" in trimtab.explain(verb).text


@pytest.mark.parametrize("word", estimate.RATINGS)
def test_a_rating_is_named_in_its_entry(word: str) -> None:
    assert word in trimtab.explain(word).what


def test_every_knob_says_what_it_costs_and_when_to_change_it() -> None:
    found = {name: trimtab.explain(name) for name in [*load_knobs(), *pins.KEYS]}
    # A choice that always has to be made has no moment at which to change it.
    bare = [name for name, entry in found.items() if not (entry.cost and (entry.change or entry.use))]
    assert bare == []


def test_the_list_has_words_and_findings_and_no_word_twice() -> None:
    known = api.all_words()
    assert {"bf16", "WrongUse", "driver-too-old"} <= set(known)
    assert known["out-of-memory"].kind != "fault"
    for name in known:
        assert trimtab.explain(name) == known[name]
