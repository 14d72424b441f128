"""Generated config files: an edit changes the named values alone, comments survive, and back is back.

Each format is judged by a reader that is not ours. `make soak` tries 10,000 documents of each.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import config_texts as c
from trimtab.configs import files, formats
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.configs.text_edit import KeyPath


def so_many(count: int) -> settings:
    """That many documents, the same ones in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


MANY = int(os.environ.get("TRIMTAB_GENERATED", "1000"))
"""Documents of each format in `make soak`."""
FEW = 40


def by_yaml(text: str) -> Any:
    return yaml.safe_load(text)


def by_json(text: str) -> Any:
    """Without the comments and trailing commas, which a string may look like."""
    pattern = r'"(?:[^"\\]|\\.)*"|//[^\r\n]*|/\*.*?\*/|,(?=(?:\s|//[^\r\n]*)*[\]}])|.'
    kept = [
        match
        for match in re.findall(pattern, text.lstrip("\ufeff"), re.DOTALL)
        if match[:2] not in ("//", "/*")
    ]
    plain = "".join(one for one in kept)
    return json.loads(re.sub(r'("(?:[^"\\]|\\.)*")|,(?=\s*[\]}])', lambda match: match[1] or "", plain))


def by_toml(text: str) -> Any:
    return tomllib.loads(text.lstrip("\ufeff"))


def by_python(text: str) -> Any:
    """By running it: the samples do nothing but assign."""
    names: dict[str, Any] = {}
    exec(compile(text.lstrip("\ufeff"), "sample", "exec"), names)  # noqa: S102 - our own sample
    return {key: listed(name) for key, name in names.items() if not key.startswith("_")}


def listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: listed(one) for key, one in value.items()}
    return [listed(one) for one in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Kind:
    """A format, its samples, and a reader that is not ours."""

    file: str
    samples: st.SearchStrategy[c.Sample]
    judge: Callable[[str], Any]
    values: st.SearchStrategy[Any]


KINDS = {
    "yaml": Kind("a.yaml", c.samples(c.yaml_lines, c.leaves | st.none()), by_yaml, c.leaves | st.none()),
    "json": Kind(
        "a.json", c.samples(c.json_lines, c.leaves | st.none(), mark="//"), by_json, c.leaves | st.none()
    ),
    "toml": Kind("a.toml", c.samples(c.toml_lines, c.leaves), by_toml, c.leaves),
    "python": Kind("a.py", c.samples(c.python_lines, c.leaves | st.none()), by_python, c.leaves | st.none()),
}


def paths(tree: Any, path: KeyPath = ()) -> list[KeyPath]:
    if isinstance(tree, dict):
        return [one for key, value in tree.items() for one in paths(value, (*path, key))]
    inner = [(*path, number) for number in range(len(tree))] if isinstance(tree, list) else []
    return [path, *inner]


def with_changes(tree: Any, changes: dict[KeyPath, Any]) -> Any:
    copied = json.loads(json.dumps(tree))
    for path, value in changes.items():
        at = copied
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
    return copied


def strict(value: Any) -> Any:
    """For comparing: 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {key: strict(one) for key, one in value.items()}
    return [strict(one) for one in value] if isinstance(value, list) else (type(value).__name__, value)


@st.composite
def edits(draw: st.DrawFn, kind: Kind) -> tuple[c.Sample, dict[KeyPath, Any]]:
    sample = draw(kind.samples)
    chosen = draw(st.lists(st.sampled_from(paths(sample.tree)), min_size=1, max_size=3, unique=True))
    apart = [one for one in chosen if not any(one != two and one[: len(two)] == two for two in chosen)]
    return sample, {
        path: draw(c.scalars if path and isinstance(path[-1], int) else kind.values) for path in apart
    }


def survives(sample: c.Sample, after: str) -> None:
    at = 0
    for comment in sorted(sample.comments, key=sample.text.index):
        found = after.find(comment, at)
        assert found >= 0, f"{comment} is gone"
        at = found + len(comment)


def check_an_edit(kind: Kind, sample: c.Sample, changes: dict[KeyPath, Any]) -> None:
    assert strict(kind.judge(sample.text)) == strict(sample.tree), "the sample itself is wrong"
    page = formats.read_config(sample.text.encode(), kind.file)
    after = page.edit(changes)
    expected = with_changes(sample.tree, changes)
    found = kind.judge(after)
    # What is equal already is left as it is written: 4.0 stays where 4 is wanted.
    assert found == expected
    for path in paths(expected):
        if not any(path[: len(change)] == change or change[: len(path)] == path for change in changes):
            assert strict(at_path(found, path)) == strict(at_path(sample.tree, path))
    survives(sample, after)
    assert ("\r\n" in after) <= ("\r\n" in sample.text)
    assert after.startswith("\ufeff") == sample.text.startswith("\ufeff")
    again = formats.read_config(after, kind.file)
    assert again.edit(changes) == after, "applied twice is applied once"


def at_path(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def check_back(kind: Kind, sample: c.Sample, changes: dict[KeyPath, Any]) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / kind.file
        file.write_bytes(sample.text.encode())
        ready = files.prepare_files([files.FileChange(file=str(file), changes=changes)])
        done = files.write_files(ready)
        assert bool(done.files) == ready[0].changed
        if done.files:
            assert file.read_bytes() == ready[0].after
            files.revert_file(str(file))
        assert file.read_bytes() == sample.text.encode()


def tried(count: int, name: str) -> None:
    @so_many(count)
    @given(edits(KINDS[name]))
    def attempt(case: tuple[c.Sample, dict[KeyPath, Any]]) -> None:
        check_an_edit(KINDS[name], *case)
        if count > FEW:
            check_back(KINDS[name], *case)

    attempt()


@pytest.mark.parametrize("name", KINDS)
def test_only_the_named_values_change(name: str) -> None:
    tried(FEW, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_only_the_named_values_change_in_many_documents_and_back_is_back(name: str) -> None:
    tried(MANY, name)


@st.composite
def additions(draw: st.DrawFn, kind: Kind) -> tuple[c.Sample, dict[KeyPath, Any]]:
    """New keys in sections that are there, and in new ones."""
    sample = draw(kind.samples)
    changes: dict[KeyPath, Any] = {}
    for number in range(draw(st.integers(1, 3))):
        home = draw(st.sampled_from(sections(sample.tree)))
        inner = ("made",) * draw(st.integers(0, 2))
        changes[(*home, *inner, f"key{number}")] = draw(kind.values)
    return sample, changes


def sections(tree: Any, path: KeyPath = ()) -> list[KeyPath]:
    if not isinstance(tree, dict):
        return []
    return [path, *(section for key, value in tree.items() for section in sections(value, (*path, key)))]


def with_additions(tree: Any, changes: dict[KeyPath, Any]) -> Any:
    copied = json.loads(json.dumps(tree))
    for path, value in changes.items():
        at = copied
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return copied


def added(count: int, name: str) -> None:
    kind = KINDS[name]

    @so_many(count)
    @given(additions(kind))
    def attempt(case: tuple[c.Sample, dict[KeyPath, Any]]) -> None:
        sample, changes = case
        page = formats.read_config(sample.text.encode(), kind.file)
        after = page.edit(changes, add=True)
        assert strict(kind.judge(after)) == strict(with_additions(sample.tree, changes))
        survives(sample, after)
        assert formats.read_config(after, kind.file).edit(changes) == after

    attempt()


@pytest.mark.parametrize("name", KINDS)
def test_new_keys_are_added_and_nothing_else_changes(name: str) -> None:
    added(FEW, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_new_keys_are_added_to_many_documents(name: str) -> None:
    added(MANY // 5, name)


def returned(count: int, name: str) -> None:
    @so_many(count)
    @given(edits(KINDS[name]))
    def attempt(case: tuple[c.Sample, dict[KeyPath, Any]]) -> None:
        check_back(KINDS[name], *case)

    attempt()


@pytest.mark.parametrize("name", KINDS)
def test_apply_and_revert_give_back_every_byte(name: str) -> None:
    returned(FEW // 3, name)


# Scripts: everything is text there, so that they have their own judges.

shell_values = st.one_of(
    st.integers(0, 10**6),
    st.booleans(),
    c.words,
    st.sampled_from(["it's", "a b", "$HOME", "`x`", '"', "a\\\\b", "#no", "a#b", "", "*", "~", "x;y", "(1)"]),
)
shell_trees = st.dictionaries(c.keys.map(str.upper).map("X_{}".format), shell_values, min_size=1, max_size=5)


FLAGS = [("0", "1"), ("no", "yes"), ("off", "on"), ("false", "true")]


def by_shell(text: str) -> dict[str, str]:
    """By a shell that runs the script without its command."""
    script = text.lstrip("\ufeff").replace("\r\n", "\n").partition("python train.py")[0]
    done = subprocess.run(
        ["bash", "-c", f"set -a\n{script}\nenv -0"], capture_output=True, check=True, env={}
    )
    found = dict(word.split("=", 1) for word in done.stdout.decode().split("\0") if word)
    return {key: value for key, value in found.items() if key.startswith("X_")}


def in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def scripts(count: int) -> None:
    @so_many(count)
    @given(shell_trees, st.integers(0, 2**32), st.data())
    def attempt(tree: dict[str, Any], seed: int, data: st.DataObject) -> None:
        pen = c.Pen(Random(seed))  # noqa: S311 - a choice of style is no secret
        text = "\n".join(c.shell_lines(pen, tree))
        sample = c.Sample(text=text, tree=tree, comments=pen.comments)
        before = by_shell(text)
        assert before == {key: in_words(value) for key, value in tree.items()}, "the sample itself is wrong"
        chosen = data.draw(st.lists(st.sampled_from(sorted(tree)), min_size=1, max_size=3, unique=True))
        changes: dict[KeyPath, Any] = {(key,): data.draw(shell_values) for key in chosen}
        changes["X_NEW",] = data.draw(shell_values)
        after = formats.read_config(text, "run.sh").edit(changes, add=True)
        found = by_shell(after)
        for (key,), value in changes.items():
            # A flag keeps the words that it was written in.
            old = before.get(str(key), "").lower()
            pair = next(
                (flag for flag in FLAGS if isinstance(value, bool) and old in flag), ("false", "true")
            )
            word = found.pop(str(key))
            assert (word.lower() == pair[value]) if isinstance(value, bool) else (word == in_words(value))
        assert found == {key: value for key, value in before.items() if (key,) not in changes}
        survives(sample, after)

    attempt()


def test_the_variables_of_scripts_change_as_a_shell_sees_them() -> None:
    scripts(60)


@pytest.mark.slow
def test_the_variables_of_many_scripts_change_as_a_shell_sees_them() -> None:
    scripts(MANY)


OPTION = re.compile(r"^#SBATCH (?:-(\w) ?|--([\w-]+)[= ])(\S+)", re.MULTILINE)
LONG = {"N": "nodes", "n": "ntasks", "G": "gpus"}
options = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(1, 99),
        "ntasks": st.integers(1, 99),
        "gpus": st.integers(1, 99),
        "gres": st.sampled_from(["gpu:1", "gpu:a100:4", "gpu:8,tmp:5"]),
        "mem": st.sampled_from(["0", "64G"]),
        "time": st.sampled_from(["24:00:00", "1-0", "30"]),
        "cpus-per-task": st.integers(1, 99),
    },
).filter(bool)


def by_sbatch(text: str) -> dict[str, str]:
    header = text.partition("export ")[0]
    return {LONG.get(match[1]) or match[2]: match[3] for match in OPTION.finditer(header)}


def batches(count: int) -> None:
    @so_many(count)
    @given(options, st.integers(0, 2**32), options)
    def attempt(tree: dict[str, Any], seed: int, wanted: dict[str, Any]) -> None:
        pen = c.Pen(Random(seed))  # noqa: S311 - a choice of style is no secret
        text = "\n".join(c.sbatch_lines(pen, tree))
        before = {key: str(value) for key, value in tree.items()}
        assert by_sbatch(text) == before, "the sample itself is wrong"
        after = formats.read_config(text, "run.sbatch").edit(
            {(key,): text for key, text in wanted.items()}, add=True
        )
        assert by_sbatch(after) == before | {key: str(text) for key, text in wanted.items()}
        survives(c.Sample(text=text, tree=tree, comments=pen.comments), after)
        assert after.partition("export ")[2] == text.partition("export ")[2]

    attempt()


def test_the_options_of_batch_scripts_change_in_the_spelling_they_have() -> None:
    batches(200)


@pytest.mark.slow
def test_the_options_of_many_batch_scripts_change() -> None:
    batches(MANY)


# Damaged files

SCRAPS = [
    "'",
    '"',
    "#",
    ":",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "&a ",
    "*a",
    "|\n",
    "=",
    "\\",
    "(",
    ")",
]
SCRAPS += [
    "<<: *a0",
    "!x ",
    "? ",
    "---\n",
    '"""',
    "//",
    "/*",
    "\r",
    "\u2028",
    "\x85",
    "\x0c",
    "0",
    "lambda: ",
    "$(",
    "`",
]
NAMES = ["a.yaml", "a.json", "a.toml", "a.py", "a.sh", ".env", "a.sbatch"]


def damaged(count: int, name: str) -> None:
    """Whatever stands in a file: an edit, or a refusal that is the user's to act on, and no bug of ours."""
    kind = next((kind for kind in KINDS.values() if kind.file == name), KINDS["yaml"])

    @so_many(count)
    @given(
        kind.samples,
        st.lists(st.tuples(st.floats(0, 1), st.sampled_from(SCRAPS)), min_size=1, max_size=4),
        st.data(),
    )
    def attempt(sample: c.Sample, scraps: list[tuple[float, str]], data: st.DataObject) -> None:
        text = sample.text
        for share, scrap in scraps:
            at = int(share * len(text))
            text = text[:at] + scrap + text[at + (len(scrap) % 2) :]
        try:
            page = formats.read_config(text.encode(), name)
        except WrongUse:
            return
        entries = [entry for entry in page.entries() if entry.path]
        if not entries:
            return
        entry = data.draw(st.sampled_from(entries))
        changes: dict[KeyPath, Any] = {entry.path: data.draw(st.sampled_from([8, "bf16", True, [1, 2], 0.5]))}
        try:
            after = page.edit(changes, beside=True)
        except WrongUse:
            return
        assert formats.read_config(after, name).edit(changes, beside=True) == after

    attempt()


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_edited_or_refused(name: str) -> None:
    damaged(FEW, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_damaged_files_are_edited_or_refused(name: str) -> None:
    damaged(MANY // 10, name)
