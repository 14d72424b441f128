"""After `apply`, `show` gives back the plan's setting and sequence length, or every difference was warned of."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest

import config_samples as samples
from config_plans import GRID, plan
from trimtab.configs import documents, reading
from trimtab.configs.edits import differences, drafted, exactly, nodes_of, seq_of
from trimtab.configs.targets import built_in, site

if TYPE_CHECKING:
    from trimtab.configs.edits import Draft
    from trimtab.configs.reading import Reading
    from trimtab.spec import Plan

FILES = {
    **{f"{name}, minimal": (name, *held) for name, held in samples.MINIMAL.items()},
    **{f"{name}, contradicting": (name, *held) for name, held in samples.CONTRADICTING.items()},
    **{
        f"{name}, {file}": (name, file, text) for name, all_ in samples.SAMPLES.items() for file, text in all_
    },
    **{
        f"{name}, empty {kind}": (name, f"empty.{kind}", "{}\n" if kind == "json" else "")
        for name, kind in (
            *(("transformers", "yaml"), ("transformers", "json"), ("accelerate", "yaml")),
            *(("deepspeed", "json"), ("lightning", "yaml"), ("torchtitan", "toml")),
            *(("axolotl", "yaml"), ("llama-factory", "yaml")),
        )
    },
}
PARTIAL = {"slurm", "environment"}
"""Targets that start a job, and are not its config."""
SAME_AS = {"mesh": "strategy", "global_batch": "micro_batch", "accumulation": "micro_batch"}
"""A warning about the one covers the other, which follows from it."""


def applied(name: str, file: str, text: str, one: Plan) -> tuple[str, Draft]:
    """The file's text after the plan is written into it."""
    document = documents.read(text, file)
    where = site(document, built_in(), origin=file, name=name)
    draft = drafted(where, document, one, file=file)
    return document.edited({edit.path: edit.after for edit in draft.edits}, add=True), draft


def shown(name: str, file: str, text: str, one: Plan) -> Reading:
    """What the file says to `show`, on the plan's GPUs."""
    document = documents.read(text, file)
    where = site(document, built_in(), origin=file, name=name)
    return reading.read(where, document.entries(), gpus=one.choice.gpus, nodes=nodes_of(one))


@pytest.mark.parametrize("label", FILES)
def test_a_file_reads_back_as_the_plan_or_every_difference_is_warned_of(label: str) -> None:
    name, file, text = FILES[label]
    for one in GRID:
        after, draft = applied(name, file, text, one)
        found = shown(name, file, after, one)
        choice, _ = exactly(one.choice, "plan")
        warned = {warning.field for warning in (*draft.warnings, *draft.missing.values())}
        left = differences(
            choice, reading.as_setting(found, gpus=choice.gpus), seq_of(one), found.number("seq")
        )
        if name in PARTIAL:
            left = [row for row in left if row[0] in {"gpus", "allocator"}]
        unsaid = [row for row in left if row[0] not in warned and SAME_AS.get(row[0]) not in warned]
        assert not unsaid, (label, choice, unsaid, sorted(warned), after)
        # What the file says that no plan has is warned of too, under the same key.
        keys = {warning.key for warning in draft.warnings}
        assert not [warning for warning in found.warnings if not any(warning.key in key for key in keys)]
        again, more = applied(name, file, after, one)
        assert (again, more.edits) == (after, [])


def test_the_grid_has_every_pair_of_choices() -> None:
    pairs = {
        (left, right)
        for one in GRID
        for left, right in product(
            (one.choice.strategy.value, one.choice.precision.value),
            (one.choice.recompute.value, one.choice.compile),
        )
    }
    assert len(pairs) == (4 + 5) * (3 + 2)
