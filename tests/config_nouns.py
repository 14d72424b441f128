"""Strategies that build every noun of the config files, valid by construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from trimtab.configs.apply import StageConfig, StagePlan
from trimtab.configs.files import Backup, RevertResult, SavedFile, WriteResult
from trimtab.configs.interpret import ConfigWarning, FoundKey, Reading
from trimtab.configs.plan_edits import Edit
from trimtab.configs.show import Display, ShownStage
from trimtab.configs.targets import (
    COUNTS,
    WORDS,
    ConfigTarget,
    Knob,
    Requirement,
    StageFormat,
    Subject,
    TargetSite,
)
from trimtab.configs.text_edit import Entry

if TYPE_CHECKING:
    from trimtab import spec

names = st.text(min_size=1, max_size=8)
places = st.integers(1, 10**6)
plain = st.none() | st.booleans() | st.integers(-9, 10**9) | names | st.lists(st.integers(0, 9), max_size=2)
paths = st.lists(names | st.integers(0, 99), max_size=3).map(tuple)
texts = st.lists(names, max_size=2).map(tuple)
tables = st.dictionaries(names, names, max_size=2)
options = st.dictionaries(names, st.integers(0, 99) | names, max_size=2)
marks = st.lists(st.lists(names, min_size=1, max_size=2).map(tuple), min_size=1, max_size=2).map(tuple)
keys = st.lists(names, min_size=1, max_size=2).map(tuple)
facts = st.dictionaries(names, st.integers(0, 99) | names, max_size=3)


@st.composite
def word_knobs(draw: st.DrawFn) -> Knob:
    field = draw(st.sampled_from(sorted(WORDS)))
    ours = st.sampled_from(WORDS[field])
    return Knob(
        field=field,
        keys=draw(keys),
        words=draw(st.dictionaries(ours, st.booleans() | names, min_size=1, max_size=2)),
        reads=draw(st.dictionaries(names, ours, max_size=1)),
        near=draw(st.dictionaries(ours, ours, max_size=1)),
        lacks=draw(st.dictionaries(ours, names, max_size=1)),
        add=draw(st.booleans()),
        family=draw(st.booleans()),
    )


knobs = word_knobs() | st.builds(
    Knob,
    field=st.sampled_from(COUNTS),
    keys=keys,
    default=st.none() | st.integers(-1, 9),
    implied=st.just({}) | st.just({"-1": "rest"}),
    pattern=st.just("") | st.just(r"gpu:(?P<n>[0-9]+)"),
    listed=st.booleans(),
)
subjects = st.builds(Subject, name=names, folder=names, options=tables)
stages = st.builds(StageFormat, marks=marks, options=tables, micro_batch=names, accumulation=names)
targets = st.builds(
    ConfigTarget,
    name=st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True),
    title=names,
    marks=marks,
    knobs=st.lists(knobs, min_size=1, max_size=2).map(tuple),
    requires=st.lists(
        st.builds(Requirement, keys=keys, values=st.just((1, "all")), write=st.just(1), why=names), max_size=1
    ).map(tuple),
    lacks=st.dictionaries(st.sampled_from(COUNTS), names, max_size=1),
    subject=subjects,
    stage=st.none() | stages,
)
requirements = st.builds(
    Requirement, keys=keys, values=st.just((False, "none")), write=st.just("none"), why=names
)
warnings = st.builds(
    ConfigWarning, text=names, file=names, key=names, value=plain, field=names, planned=plain
)
found = st.builds(FoundKey, field=names, key=names, value=plain, line=st.none() | places, computed=names)
saved = st.builds(SavedFile, file=names, sha256=names, after_sha256=names)


def config_nouns(
    settings: st.SearchStrategy[spec.Setting], estimates: st.SearchStrategy[spec.Estimate]
) -> dict[type[spec.Noun], st.SearchStrategy[Any]]:
    """By class; some of them hold settings and estimates."""
    shown = st.builds(ShownStage, name=names, file=names, setting=settings, options=options, advice=texts)
    return {
        Knob: knobs,
        Requirement: requirements,
        ConfigWarning: warnings,
        Subject: subjects,
        StageFormat: stages,
        ConfigTarget: targets,
        TargetSite: st.builds(TargetSite, target=targets, root=paths),
        Entry: st.builds(Entry, path=paths, value=plain, line=places, column=places, computed=names),
        FoundKey: found,
        Reading: st.builds(Reading, target=names, found=st.lists(found, max_size=1).map(tuple), facts=facts),
        Edit: st.builds(Edit, file=names, key=names, before=plain, after=plain, path=paths),
        StageConfig: st.builds(StageConfig, name=names, file=names, root=paths, options=options),
        StagePlan: st.builds(StagePlan, name=names, file=names, setting=settings, estimate=estimates),
        ShownStage: shown,
        Display: st.builds(
            Display,
            file=names,
            target=names,
            title=names,
            found=st.lists(found, max_size=1).map(tuple),
            stages=st.lists(shown, max_size=1).map(tuple),
            said=texts,
        ),
        SavedFile: saved,
        Backup: st.builds(Backup, number=places, date=names, files=st.lists(saved, max_size=1).map(tuple)),
        WriteResult: st.builds(WriteResult, files=texts, unchanged=texts, backups=texts, said=texts),
        RevertResult: st.builds(RevertResult, file=names, number=places, backup=st.none() | names),
    }
