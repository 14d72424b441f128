"""What one edit makes of one text, format by format, and what is refused."""

from __future__ import annotations

import doctest
from importlib import import_module
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from trimtab.configs import formats, text_edit
from trimtab.errors import BrokenFile, TrimtabError, UnknownName, WrongUse

if TYPE_CHECKING:
    from trimtab.configs.text_edit import KeyPath

MODULES = [
    "text_edit",
    "yaml_text",
    "json_text",
    "toml_text",
    "python_text",
    "shell_text",
    "formats",
]


def edited(file: str, text: str, changes: dict[KeyPath, Any], **options: bool) -> str:
    return formats.read_config(text, file).edit(changes, **options)


def values(file: str, text: str) -> dict[KeyPath, Any]:
    return {entry.path: entry.computed or entry.value for entry in formats.read_config(text, file).entries()}


def refused(file: str, text: str, changes: dict[KeyPath, Any], **options: bool) -> TrimtabError:
    with pytest.raises(TrimtabError) as caught:
        edited(file, text, changes, **options)
    assert caught.value.exit_code == 2, caught.value
    return caught.value


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_documentation_of_the_code_are_true(name: str) -> None:
    assert doctest.testmod(import_module(f"trimtab.configs.{name}")).failed == 0


# YAML


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("b: 4 # x\n", {("b",): 8}, "b: 8 # x\n"),
        ("b: 4", {("b",): 8}, "b: 8"),
        ("b:   4   # x\r\nc: 1\r\n", {("b",): 16}, "b:   16   # x\r\nc: 1\r\n"),
        ("a:\n  b:\t4\t# x\n", {("a", "b"): 8}, "a:\n  b:\t8\t# x\n"),
        ("\ufeffb: 4\n", {("b",): 8}, "\ufeffb: 8\n"),
        ("d: yes\n", {("d",): False}, "d: no\n"),
        ("d: On\n", {("d",): False}, "d: Off\n"),
        ("d: TRUE\n", {("d",): False}, "d: FALSE\n"),
        ("d: 1\n", {("d",): True}, "d: true\n"),
        ("lr: 2e-4\n", {("lr",): 1e-5}, "lr: 1.0e-5\n"),
        ("lr: 0.001\n", {("lr",): 1e-5}, "lr: 1.0e-5\n"),
        ("lr: 1E-3\n", {("lr",): 2.5e-4}, "lr: 2.5E-4\n"),
        ("lr: 2e-4\n", {("lr",): 2e-4}, "lr: 2e-4\n"),
        ("n: 017\n", {("n",): 8}, "n: 8\n"),
        ("p: 'fp16'\n", {("p",): "bf16"}, "p: 'bf16'\n"),
        ('p: "fp16"\n', {("p",): "bf16"}, 'p: "bf16"\n'),
        ("p: fp16\n", {("p",): "bf16-mixed"}, "p: bf16-mixed\n"),
        ("p: fp16\n", {("p",): "no"}, 'p: "no"\n'),
        ("p: fp16\n", {("p",): "1e3"}, 'p: "1e3"\n'),
        ("p: fp16\n", {("p",): "12:30:45"}, 'p: "12:30:45"\n'),
        ("p: fp16\n", {("p",): "a: b #c"}, 'p: "a: b #c"\n'),
        ("p: 'x'\n", {("p",): "it's"}, "p: 'it''s'\n"),
        ("p: 'x'# c\n", {("p",): 4}, "p: 4 # c\n"),
        ("p: 4\n", {("p",): None}, "p: null\n"),
        ("p: ~\n", {("p",): 4}, "p: 4\n"),
        ("p:\nq: 1\n", {("p",): 4}, "p: 4\nq: 1\n"),
        ("p: # why\n", {("p",): 4}, "p: 4 # why\n"),
        ("p: &a\nq: *a\n", {("q",): 4}, "p: &a\nq: 4\n"),
        ("- 1\n-\n- 3\n", {(1,): 2}, "- 1\n- 2\n- 3\n"),
        ("a: {b, c: 1}\n", {("a", "b"): 2}, "a: {b: 2, c: 1}\n"),
        ("a: {b: 1, c: {d: 2}}\n", {("a", "c", "d"): 3}, "a: {b: 1, c: {d: 3}}\n"),
        ("d: !!str 4 # x\n", {("d",): "5"}, 'd: !!str "5" # x\n'),
        ("d: !!str 4 # x\n", {("d",): 5}, "d: 5 # x\n"),
        ("a: |  # keep\n  x\n  y\n\nb: 2\n", {("a",): "z"}, "a: z  # keep\n\nb: 2\n"),
        ("a:\n|\n  x\nb: 2\n", {("a",): 4}, "a:\n  4\nb: 2\n"),
        ("a: >-\n  x\n  y\nb: 2\n", {("b",): 3}, "a: >-\n  x\n  y\nb: 3\n"),
        ("a: one\n  two\nb: 2\n", {("a",): "z"}, "a: z\nb: 2\n"),
        ("? a\n: 4\n", {("a",): 8}, "? a\n: 8\n"),
        ("a: é😀 # 😀\nb: 1\n", {("b",): 2}, "a: é😀 # 😀\nb: 2\n"),
        ("%YAML 1.1\n---\na: 1\n...\n", {("a",): 2}, "%YAML 1.1\n---\na: 2\n...\n"),
        ("a: 1\n---\nb: 2\n", {(1, "b"): 3}, "a: 1\n---\nb: 3\n"),
    ],
)
def test_a_yaml_value_is_replaced_in_its_own_style(
    text: str, changes: dict[KeyPath, Any], after: str
) -> None:
    assert edited("a.yaml", text, changes) == after


@pytest.mark.parametrize(
    "text",
    ["no", "on", "1e3", "1.", "0x1F", "1_000", "null", "", "12:30", "2020-01-01", "=", "<<", "-", " x"],
)
def test_text_that_looks_like_something_else_reads_back_as_text(text: str) -> None:
    after = edited("a.yaml", "p: fp16\n", {("p",): text})
    assert yaml.safe_load(after) == {"p": text}


@pytest.mark.parametrize("value", [1e-5, 1e22, 5.0, 2.5e-300, -1e-7, 123456.789, float("inf")])
def test_floats_read_back_as_floats_where_2e4_would_be_text(value: float) -> None:
    after = edited("a.yaml", "p: 2e-4\n", {("p",): value})
    assert yaml.safe_load(after) == {"p": value}


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("a: [1, 2]\n", {("a",): [3, 2]}, "a: [3, 2]\n"),
        ("a: [1, 2]\n", {("a",): [1]}, "a: [1]\n"),
        ("a: [1, # one\n  2] # two\n", {("a",): [1]}, "a: [1 # one\n  ] # two\n"),
        ("a: [1, # one\n  2 # b\n ]\n", {("a",): [1, 2, 3]}, "a: [1, # one\n  2, # b\n  3\n ]\n"),
        ("a:\n- 1 # one\n- 2 # two\n- 3\nb: 1\n", {("a",): [1]}, "a:\n- 1 # one\n# two\nb: 1\n"),
        ("a:\n- 1 # one\n- 2\nb: 1\n", {("a",): []}, "a: []\n# one\nb: 1\n"),
        ("a: # list\n  - 1\n  - 2\nb: 1\n", {("a",): 4}, "a: 4 # list\nb: 1\n"),
        ("a: &x # list\n  - 1\nb: 1\n", {("a",): 4}, "a: &x 4 # list\nb: 1\n"),
        ("a:\n  - 1\nb: 1\n", {("a",): [1, "x: y"]}, 'a:\n  - 1\n  - "x: y"\nb: 1\n'),
        ("a: 4\n", {("a",): [1, "b"]}, "a: [1, b]\n"),
        ("a:\n|\nb: 1\n", {("a",): 4}, "a:\n  4\nb: 1\n"),
        ("a: |# text\n  x\nb: 1\n", {("a",): 4}, "a: 4 # text\nb: 1\n"),
        ("a:\n  - 1\n  - 2", {("a", 1): 3}, "a:\n  - 1\n  - 3"),
    ],
)
def test_a_yaml_list_changes_item_by_item(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("a.yaml", text, changes) == after


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        # An alias is replaced where it stands.
        ("a: &x 4\nb: *x\nc: *x\n", {("b",): 8}, "a: &x 4\nb: 8\nc: *x\n"),
        # The others keep what they read: the anchor moves to the first of them.
        ("a: &x 4 # four\nb: *x\nc: *x\n", {("a",): 8}, "a: 8 # four\nb: &x 4\nc: *x\n"),
        ("a: &x 4\nb: *x\n", {("a",): 8, ("b",): 8}, "a: &x 8\nb: 8\n"),
        ("a: &x 4\nb: *x\nc: [*x]\n", {("a",): 8, ("b",): 9}, "a: 8\nb: 9\nc: [&x 4]\n"),
        ("a: &x 4\nb: [*x]\n", {("a",): 8, ("b",): []}, "a: &x 8\nb: []\n"),
        # A list that holds the anchor and its alias changes as a whole, or loses the alias.
        ("a: [&x 4, 0, *x]\n", {("a",): [0, 0, 0]}, "a: [&x 0, 0, 0]\n"),
        ("a: [&x 4, 0, *x]\n", {("a",): [0, 0, 4]}, "a: [0, 0, &x 4]\n"),
        ("a: [&x 4, *x]\n", {("a",): [5]}, "a: [5]\n"),
        ("a:\n- &x 4\n- *x\n", {("a",): [5]}, "a:\n- &x 5\n"),
        ("a:\n- &x 4\n- *x\nb: *x\n", {("a",): [5]}, "a:\n- 5\nb: &x 4\n"),
        ("a: &x 4\nb: [*x, 5]\n", {("a",): 8, ("b",): [4, 6]}, "a: 8\nb: [&x 4, 6]\n"),
        ("a: [&x 4, 5]\nb: *x\n", {("a",): [5]}, "a: [5]\nb: &x 4\n"),
        ("a:\n- &x 4\n- 5\nb: *x\n", {("a",): 1}, "a: 1\nb: &x 4\n"),
        ("a:\n- 5\n- &x 4\nb: *x\n", {("a",): [5]}, "a:\n- 5\nb: &x 4\n"),
        # A merged key is overridden where it is merged.
        (
            "base: &b\n  n: 4\n  m: 5\ns:\n  <<: *b\nt: 1\n",
            {("s", "n"): 8},
            "base: &b\n  n: 4\n  m: 5\ns:\n  <<: *b\n  n: 8\nt: 1\n",
        ),
        ("base: &b {n: 4}\ns: *b\n", {("s", "n"): 8}, "base: &b {n: 4}\ns: {<<: *b, n: 8}\n"),
        ("base: &b {n: 4}\ns: {<<: *b}\n", {("s", "n"): 8}, "base: &b {n: 4}\ns: {<<: *b, n: 8}\n"),
        # One that nobody reads through the merge changes in its place.
        (
            "base: &b {n: 4}\ns: {<<: *b, n: 5}\n",
            {("base", "n"): 8},
            "base: &b {n: 8}\ns: {<<: *b, n: 5}\n",
        ),
    ],
)
def test_what_others_read_through_an_anchor_stays(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("a.yaml", text, changes) == after
    before, now = yaml.safe_load(text), yaml.safe_load(after)
    for path, value in changes.items():
        home = before
        for key in path[:-1]:
            home[key] = dict(home[key])  # what aliases share is one object in Python
            home = home[key]
        home[path[-1]] = value
    assert now == before


def test_a_value_that_others_merge_is_refused_and_they_are_named() -> None:
    problem = refused("a.yaml", "base: &b\n  n: 4\ns:\n  <<: *b\n", {("base", "n"): 8})
    assert "read by s.n (through *b)" in problem.found


def test_a_part_of_an_aliased_whole_is_refused() -> None:
    text = "base: &b\n  o: {n: 4, m: 1}\ns:\n  <<: *b\n"
    problem = refused("a.yaml", text, {("s", "o", "n"): 8})
    assert "as a part of a whole" in problem.found
    assert "part of a whole" in refused("a.yaml", "a: &x [1, 2]\nb: *x\n", {("b", 0): 8}).found


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("a:\r\n    b: 1\r\n", {("a", "c"): 8}, "a:\r\n    b: 1\r\n    c: 8\r\n"),
        ("a:\n    b: 1\nx: 1", {("y", "z", "w"): True}, "a:\n    b: 1\nx: 1\ny:\n    z:\n        w: true"),
        ("a: {b: 1}\n", {("a", "c"): 8}, "a: {b: 1, c: 8}\n"),
        ("a: {b: 1, }\n", {("a", "c"): 8}, "a: {b: 1, c: 8, }\n"),
        ('{"a": 1}\n', {("c",): 8}, '{"a": 1, "c": 8}\n'),
        ("a: {}\n", {("a", "c"): 8}, "a: {c: 8}\n"),
        ("a:\nb: 1\n", {("a", "c"): 8}, "a:\n  c: 8\nb: 1\n"),
        ("a: null # none\nb: 1\n", {("a", "c"): 8}, "a:  # none\n  c: 8\nb: 1\n"),
        ("", {("a",): 8}, "a: 8\n"),
        ("# only a comment", {("a",): 8}, "# only a comment\na: 8"),
        ("a: 1\n---\nb: 2\n", {(0, "c"): 3}, "a: 1\nc: 3\n---\nb: 2\n"),
        (
            "s:\n  - n: 1\n    m: 2\n  - n: 3\n",
            {("s", 0, "k"): 8},
            "s:\n  - n: 1\n    m: 2\n    k: 8\n  - n: 3\n",
        ),
        ("a: |+\n  x\n\n\nb: 1\n", {("c",): 1}, "a: |+\n  x\n\n\nb: 1\nc: 1\n"),
        ("a:\n  b: |\n    x\n\n\nc: 1\n", {("a", "d"): 1}, "a:\n  b: |\n    x\n  d: 1\n\n\nc: 1\n"),
        ("a:\n  b: |+\n    x\n\nc: 1\n", {("a", "d"): 1}, "a:\n  b: |+\n    x\n\n  d: 1\nc: 1\n"),
        ("a:\n- 1\n- 2\n", {("b",): 1}, "a:\n- 1\n- 2\nb: 1\n"),
    ],
)
def test_a_missing_yaml_key_is_added_in_the_indentation_of_the_file(
    text: str, changes: dict[KeyPath, Any], after: str
) -> None:
    assert edited("a.yaml", text, changes, add=True) == after


def test_an_empty_document_takes_keys_and_no_value() -> None:
    text = "---\n# nothing\n---\na: 1\n"
    assert "this document is empty" in refused("a.yaml", text, {(0,): 4}).found
    assert edited("a.yaml", text, {(0, "b"): 4}, add=True) == "---\n# nothing\nb: 4\n---\na: 1\n"


def test_a_key_without_a_colon_is_refused() -> None:
    assert "begins with ?" in refused("a.yaml", "? a\n", {("a",): 4}).found


def test_interpolations_are_computed() -> None:
    text = "a: ${oc.env:N,4} # c\n"
    assert "computed: ${oc.env:N,4}" in refused("a.yaml", text, {("a",): 4}).found
    assert edited("a.yaml", text, {("a",): 4}, beside=True) == "a: 4 # c  # was: ${oc.env:N,4}\n"
    text = "a: !include b.yaml\n"
    assert "computed: !include b.yaml" in refused("a.yaml", text, {("a",): 4}).found
    assert edited("a.yaml", text, {("a",): 4}, beside=True) == "a: 4  # was: !include b.yaml\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: [1\nb: 2\n", r"a.yaml:2:2: .*did not find expected ',' or '\]'"),
        ("a: 1\n b: 2\n", r"a.yaml:2:3: .*mapping values"),
        ("a:\n\tb: 1\n", r"a.yaml:2:1: .*tab|a.yaml:2:1: .*cannot start any token"),
        ("a: 'x\n", r"a.yaml:2:1: .*quoted scalar"),
        ("a: &x:0\n", "a.yaml:1:4: the anchor &x and what follows it have no blank between them"),
        ("a: *x\n", r"a.yaml:1:4: \*x is read here, and no anchor &x"),
        ("a: 1\nb: 2\na: 3\n", r"a.yaml:3:1: the key a is there twice, in lines 1 and 3"),
        ("s:\n  - n: 1\n    n: 2\n", r"a.yaml:3:5: the key n is there twice, in lines 2 and 3"),
        ("a: \x07\n", r"a.yaml:1:4: a character that YAML does not allow"),
        ("[" * 300 + "]" * 300, "more than 200 levels"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(text: str, found: str) -> None:
    with pytest.raises(BrokenFile, match=found):
        formats.read_config(text, "a.yaml")


def test_aliases_that_multiply_without_end_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    with pytest.raises(BrokenFile, match="more than 200000 values, aliases counted"):
        formats.read_config("\n".join(lines), "a.yaml")


def test_an_alias_of_itself_is_no_loop() -> None:
    assert values("a.yaml", "a: &x\n  b: *x\n  c: 1\n") == {("a", "b"): "*x", ("a", "c"): 1}


def test_custom_tags_and_odd_keys_are_left_alone() -> None:
    text = "!job\n? [a, b]\n: 1\n1: x\ntrue: y\nc: !!float 3\n"
    found = values("a.yaml", text)
    assert (found[("1",)], found[("true",)], found[("c",)]) == ("x", "y", 3.0)
    assert edited("a.yaml", text, {("1",): "z"}) == text.replace("1: x", "1: z")


def test_entries_know_their_lines() -> None:
    (first, second) = formats.read_config("# c\na:\n  b: 1\n  c: x\n", "a.yaml").entries()
    assert (first.path, first.value, first.line, first.column) == (("a", "b"), 1, 3, 6)
    assert (second.line, second.column, second.computed) == (4, 6, "")


# JSON


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ('{"a": 1, "b": "auto"}', {("a",): 2}, '{"a": 2, "b": "auto"}'),
        ('{"a":1e-4}', {("a",): 5e-5}, '{"a":5.0e-5}'),
        ('{"a": [1, 2], // c\n}', {("a",): [3, 4, 5]}, '{"a": [3, 4, 5], // c\n}'),
        ('{"a": [1, // c\n2,]}', {("a",): [1]}, '{"a": [1 // c\n]}'),
        ('{"a": [1, // c\n2]}', {("a",): 4}, '{"a": 4  // c\n}'),
        ('{"a": "\\u00e9"}', {("a",): "\u00fc"}, '{"a": "\\u00fc"}'),
        ('{"a": "\u00e9"}', {("a",): "\u00fc"}, '{"a": "\u00fc"}'),
        ("[1, {}]", {(0,): None}, "[null, {}]"),
        ('{"a": {"b": true}}\r\n', {("a", "b"): False}, '{"a": {"b": false}}\r\n'),
    ],
)
def test_a_json_value_is_replaced(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("a.json", text, changes) == after


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ('{"a": 1}', {("b",): 2}, '{"a": 1, "b": 2}'),
        ("{}", {("b", "c"): 2}, '{"b": {"c": 2}}'),
        ('{\n    "a": 1\n}\n', {("b", "c"): 2}, '{\n    "a": 1,\n    "b": {\n        "c": 2\n    }\n}\n'),
        ('{\n  "a": 1, // one\n}\n', {("b",): 2}, '{\n  "a": 1, // one\n  "b": 2,\n}\n'),
        ('{\n  "a": 1 // one\n}\n', {("b",): 2}, '{\n  "a": 1, // one\n  "b": 2\n}\n'),
        ('{\n  "a": {}\n}\n', {("a", "b"): 2}, '{\n  "a": {\n    "b": 2\n  }\n}\n'),
    ],
)
def test_a_missing_json_key_is_added(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("a.json", text, changes, add=True) == after


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "1:1: the file is empty"),
        ("// c\n", "2:1: there is no value"),
        ('{"a": 1 "b": 2}', "1:9: a comma or } should be here"),
        ('{"a" 1}', "1:6: a colon should follow"),
        ("{a: 1}", "1:2: a key in double quotes"),
        ('{"a": 1', "1:8: a comma or } should be here; the file ends"),
        ('{"a": "x\n"}', "1:7: text in quotes"),
        ('{"a": 01}', "1:7: a value cannot begin with '0'"),
        ('{"a": tru}', "1:7: a value cannot begin with 'tru'"),
        ('{"a": 1} x', "1:10: the value ends before 'x'"),
        ('{"a": 1 /* }', "1:9: a comment begins here and never ends"),
        ('{\n"a": 1,\n"a": 2}', "3:1: the key a is there twice, in lines 2 and 3"),
        ("[" * 100_000, "more than 200 levels"),
        ("9" * 5000, "a number of 5000 digits"),
    ],
)
def test_broken_json_is_refused_with_its_place(text: str, found: str) -> None:
    with pytest.raises(BrokenFile, match=f"a.json:.*{found}"):
        formats.read_config(text, "a.json")


def test_json_has_no_word_for_infinity() -> None:
    assert "no such number" in refused("a.json", '{"a": 1}', {("a",): float("inf")}).found


# TOML


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("a.b = 1 # c\n", {("a", "b"): 2}, "a.b = 2 # c\n"),
        ("[t]\nx = 'p'\n", {("t", "x"): "q"}, "[t]\nx = 'q'\n"),
        ("[t]\nx = 'p'\n", {("t", "x"): "it's"}, '[t]\nx = "it\'s"\n'),
        ("[[s]]\nn=1\n[[s]]\nn=2\n[s.o]\nk=3", {("s", 1, "o", "k"): 4}, "[[s]]\nn=1\n[[s]]\nn=2\n[s.o]\nk=4"),
        ("a = {b = 1, c.d = 2}\n", {("a", "c", "d"): 3}, "a = {b = 1, c.d = 3}\n"),
        ('s = """a\n\\"""b"""\nn = 1\n', {("n",): 2}, 's = """a\n\\"""b"""\nn = 2\n'),
        ("d = 1979-05-27 07:32:00 # x\nn = 1", {("n",): 2}, "d = 1979-05-27 07:32:00 # x\nn = 2"),
        ('"a.b" = 1\n', {("a.b",): 2}, '"a.b" = 2\n'),
        ("a = [ # x\n  1, # one\n  2,\n]\n", {("a",): [1, 2, 3]}, "a = [ # x\n  1, # one\n  2, 3,\n]\n"),
        ("lr = 8e-4\r\n", {("lr",): 3e-4}, "lr = 3.0e-4\r\n"),
        ("a = true\n", {("a",): False}, "a = false\n"),
    ],
)
def test_a_toml_value_is_replaced(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("a.toml", text, changes) == after


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("[t]\nx = 1 # c\n\n[u]\ny = 2\n", {("t", "z"): 3}, "[t]\nx = 1 # c\nz = 3\n\n[u]\ny = 2\n"),
        ("[t]\nx = 1\n", {("top",): 3}, "top = 3\n[t]\nx = 1\n"),
        ("# head\na = 1\n\n[t]\n", {("top",): 3}, "# head\na = 1\ntop = 3\n\n[t]\n"),
        ("[t]\n  x = 1", {("t", "y"): 3}, "[t]\n  x = 1\n  y = 3"),
        ("[t]\n", {("t", "y"): 3}, "[t]\ny = 3\n"),
        ("[t.u]\nx = 1\n", {("t", "y"): 3}, "[t.u]\nx = 1\n\n[t]\ny = 3\n"),
        ("a = 1\n", {("q", "r", "s"): 3}, "a = 1\n\n[q.r]\ns = 3\n"),
        ("a.b = 1\n", {("a", "c"): 3}, "a.b = 1\na.c = 3\n"),
        ("a = {}\n", {("a", "c"): 3}, "a = { c = 3 }\n"),
        ("", {("a",): 3}, "a = 3\n"),
        ("[[s]]\nn = 1\n[[s]]\nn = 2\n", {("s", 0, "m"): 3}, "[[s]]\nn = 1\nm = 3\n[[s]]\nn = 2\n"),
    ],
)
def test_a_missing_toml_key_is_added(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("a.toml", text, changes, add=True) == after


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a = \n", "a.toml:1:5: Invalid value"),
        ("a = 1\nb\n", "a.toml:2:2: Expected '='"),
        ("a = 1\na = 2\n", "the key a is there twice, in lines 1 and 2"),
        ("[a]\nb=1\n[a]\nc=1\n", "the key a is there twice, in lines 1 and 3"),
        ("a = [1", "ends too early"),
        ('a = "x', "a.toml:1:7"),
        ("a = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_broken_toml_is_refused_with_its_place(text: str, found: str) -> None:
    with pytest.raises(BrokenFile, match=found):
        formats.read_config(text, "a.toml")


def test_toml_has_no_word_for_nothing() -> None:
    assert "no word for nothing" in refused("a.toml", "a = 1\n", {("a",): None}).found


# Python

SLM = dedent("""\
    # Settings of the small model
    import os

    BATCH = 4  # per GPU

    slm_config = {
        "batch_size": 18,  # fits 24 GB
        'learning_rate': 3e-4,
        "eval_batch_size": BATCH * 2,
        "dims": (12, 12, 768),
        "nested": dict(amp_dtype="bfloat16", betas=[0.9, 0.95]),
    }


    @dataclass
    class Train:
        lr: float = 1e-4
        steps: int = field(default=60_000, metadata={})
        names: list = field(default_factory=lambda: ["a"])

        def go(self, workers=4): ...


    if __name__ == "__main__":
        args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True,
                                 optim='adamw_torch')
        Trainer(model, args=args).train()
    """)


def test_the_values_of_python_are_found_without_running_it() -> None:
    found = values("config.py", SLM)
    assert found[("BATCH",)] == 4
    assert found[("slm_config", "batch_size")] == 18
    assert found[("slm_config", "eval_batch_size")] == "BATCH * 2"
    assert found[("slm_config", "dims")] == [12, 12, 768]
    assert found[("slm_config", "nested", "amp_dtype")] == "bfloat16"
    assert found[("Train", "lr")] == 1e-4
    assert found[("Train", "steps")] == 60000
    assert found[("Train", "names")] == ["a"]
    assert found[("Train", "go", "workers")] == 4
    assert found[("TrainingArguments", "bf16")] is True
    assert values("a.py", "raise SystemExit\nA = open('/tmp/x', 'w')\n")[("A",)] == "open('/tmp/x', 'w')"


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        (("slm_config", "batch_size"), 20, '"batch_size": 18,', '"batch_size": 20,'),
        (("slm_config", "learning_rate"), 6e-5, "3e-4", "6e-5"),
        (("slm_config", "nested", "amp_dtype"), "float16", '"bfloat16"', '"float16"'),
        (("slm_config", "dims"), [24, 16, 1024], "(12, 12, 768)", "(24, 16, 1024)"),
        (("slm_config", "dims"), [24], "(12, 12, 768)", "(24,)"),
        (("slm_config", "nested", "betas"), [0.9], "[0.9, 0.95]", "[0.9]"),
        (("BATCH",), 8, "BATCH = 4 ", "BATCH = 8 "),
        (("Train", "lr"), 1.0, "= 1e-4", "= 1.0"),
        (("Train", "steps"), 10, "60_000", "10"),
        (("Train", "go", "workers"), 8, "workers=4", "workers=8"),
        (("TrainingArguments", "optim"), "it's", "'adamw_torch'", r"'it\'s'"),
        (("TrainingArguments", "bf16"), None, "bf16=True", "bf16=None"),
    ],
)
def test_a_python_value_is_replaced(path: KeyPath, value: Any, old: str, new: str) -> None:
    assert SLM.count(old) == 1
    assert edited("config.py", SLM, {path: value}) == SLM.replace(old, new)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (("slm_config", "compile"), "0.95]),\n}", '0.95]),\n    "compile": True,\n}'),
        (("slm_config", "nested", "compile"), "0.95])", "0.95], compile=True)"),
        (
            ("TrainingArguments", "compile"),
            "'adamw_torch')",
            "'adamw_torch',\n                             compile=True)",
        ),
        (("Train", "compile"), '["a"])\n', '["a"])\n    compile: bool = True\n'),
        (("COMPILE",), "args=args).train()\n", "args=args).train()\nCOMPILE = True\n"),
    ],
)
def test_a_missing_python_key_is_added(path: KeyPath, old: str, new: str) -> None:
    assert SLM.count(old) == 1
    assert edited("config.py", SLM, {path: True}, add=True) == SLM.replace(old, new)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("A = 2 * 8\n", "A = 16  # was: 2 * 8\n"),
        ("A = 2 * 8  # why\n", "A = 16  # why  # was: 2 * 8\n"),
        ("A = (2 *\n     8)\n", "A = (16)  # was: 2 * 8\n"),
        (
            "c = {'a': 1,\n     'A': os.cpu_count(), 'b': 2}",
            "c = {'a': 1,\n     'A': 16, 'b': 2}  # was: os.cpu_count()",
        ),
    ],
)
def test_a_computed_python_value_is_refused_or_kept_in_a_comment(text: str, after: str) -> None:
    path = ("c", "A") if text.startswith("c") else ("A",)
    problem = refused("a.py", text, {path: 16})
    assert "its value is computed: " in problem.found
    assert problem.given.startswith(f"a.py:{2 if path[0] == 'c' else 1}:")
    assert edited("a.py", text, {path: 16}, beside=True) == after


def test_no_comment_is_put_into_a_text_that_runs_over_lines() -> None:
    problem = refused("a.py", 'f(a=2 * 8, b="""x\ny""")\n', {("f", "a"): 16}, beside=True)
    assert "no comment can stand there" in problem.found


@pytest.mark.parametrize(
    ("text", "path", "lines"),
    [
        ("c = {'b': 1,\n 'b': 2}\n", ("c", "b"), "lines 1 and 2"),
        ("A = 1\nA = 2\n", ("A",), "lines 1 and 2"),
        ("c = {'b': 1}\nc['b'] = 2\n", ("c", "b"), "lines 1 and 2"),
        ("if x:\n    A = 1\nelse:\n    A = 2\n", ("A",), "lines 2 and 4"),
        ("A = 1\nA += 2\n", ("A",), "lines 1 and 2"),
        ("class C:\n    pass\nc = C()\nc.b = 1\nc.b = 2\n", ("c", "b"), "lines 4 and 5"),
    ],
)
def test_what_python_sets_twice_is_read_but_not_changed(text: str, path: KeyPath, lines: str) -> None:
    formats.read_config(text, "a.py").entries()
    assert lines in refused("a.py", text, {path: 4}).found


def test_names_that_one_assignment_sets_are_not_changed_apart() -> None:
    problem = refused("a.py", "a = b = {'n': 4}\n", {("a", "n"): 8})
    assert "read by b.n (through the same assignment)" in problem.found
    assert edited("a.py", "a = b = 4\n", {("a",): 8, ("b",): 8}) == "a = b = 8\n"


def test_calls_of_one_name_are_numbered() -> None:
    text = "a = AdamW(p, lr=1e-4)\nb = AdamW(q, lr=1e-5)\n"
    assert edited("a.py", text, {("AdamW", 1, "lr"): 2e-5}) == text.replace("1e-5", "2e-5")


def test_places_behind_letters_of_many_bytes_are_found() -> None:
    text = "x = '\U0001f600\u00e9'; y = {'\u00fc': 1, 'b': 2}  # \u00e9\r\n"
    assert edited("a.py", text, {("y", "b"): 3}) == text.replace("2}", "3}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("c = {'b': 1,\n", r"a.py:1:5: Python cannot read it: '\{' was never closed"),
        ("x = = 2\n", r"a.py:1:5: Python cannot read it: invalid syntax"),
        ("if x:\ny = 1\n", r"a.py:2:1: Python cannot read it: expected an indented block"),
        ("x = " + "(" * 500 + ")" * 500, "Python cannot read it|nested too deeply"),
        ("x = " + "-" * 100_000 + "1", "nested too deeply"),
    ],
)
def test_broken_python_is_refused_with_its_place(text: str, found: str) -> None:
    with pytest.raises(BrokenFile, match=found):
        formats.read_config(text, "a.py")


# Shell and Slurm


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("export A=1 B='x y' # c\n", {("A",): 2, ("B",): "z"}, "export A=2 B='z' # c\n"),
        ('A="1"\n', {("A",): 2}, 'A="2"\n'),
        ("A=1 python t.py\n", {("A",): "0,1"}, "A=0,1 python t.py\n"),
        ("A=1;B=2\n", {("B",): 3}, "A=1;B=3\n"),
        ("A=x\n", {("A",): "it's $5"}, 'A="it\'s \\$5"\n'),
        ("A=\n", {("A",): 4}, "A=4\n"),
        ("A=1\n", {("A",): True}, "A=1\n"),
        ("A=1\n", {("A",): False}, "A=0\n"),
        ("A=0\n", {("A",): "FALSE"}, "A=FALSE\n"),
        ("A=Yes\n", {("A",): False}, "A=No\n"),
        ("cat <<EOF\nA=5\nEOF\nA=1\n", {("A",): 2}, "cat <<EOF\nA=5\nEOF\nA=2\n"),
        ("x 'A=5\nA=6'\nA=1\n", {("A",): 2}, "x 'A=5\nA=6'\nA=2\n"),
        ("if true; then\n  A=1\nfi\n", {("A",): 2}, "if true; then\n  A=2\nfi\n"),
    ],
)
def test_a_variable_of_a_script_is_replaced(text: str, changes: dict[KeyPath, Any], after: str) -> None:
    assert edited("run.sh", text, changes) == after


def test_a_variable_is_added_where_the_command_sees_it() -> None:
    text = "#!/bin/bash\nset -e\npython t.py\n"
    assert edited("run.sh", text, {("N",): 4}, add=True) == "#!/bin/bash\nexport N=4\nset -e\npython t.py\n"
    text = "export A=1\npython t.py\n"
    assert edited("run.sh", text, {("N",): 4}, add=True) == "export A=1\nexport N=4\npython t.py\n"


def test_env_files_hold_blanks_without_quotes() -> None:
    text = "A=hello world # c\nB = 'q'\nD=true\r\nE=$A"
    assert values(".env", text) == {("A",): "hello world", ("B",): "q", ("D",): True, ("E",): "$A"}
    after = edited(".env", text, {("A",): "bye now", ("D",): False, ("F",): 1}, add=True)
    assert after == "A='bye now' # c\nB = 'q'\nD=false\r\nE=$A\nF=1"


@pytest.mark.parametrize("value", ["$B", "${B:-4}", "$(nproc)", "`nproc`", '"$B"', '"${B}/x"'])
def test_what_the_shell_works_out_is_computed(value: str) -> None:
    assert "its value is computed" in refused("run.sh", f"A={value} # c\n", {("A",): 4}).found
    after = edited("run.sh", f"A={value} # c\n", {("A",): 4}, beside=True)
    assert after.startswith(("A=4 # c", 'A="4" # c'))
    assert after.endswith(f"# was: {value}\n")


@pytest.mark.parametrize(
    ("text", "changes", "after"),
    [
        ("#SBATCH -N 2\n", {("nodes",): 4}, "#SBATCH -N 4\n"),
        ("#SBATCH -N2\n", {("nodes",): 4}, "#SBATCH -N4\n"),
        ("#SBATCH --nodes=2 # c\n", {("nodes",): 4}, "#SBATCH --nodes=4 # c\n"),
        ("#SBATCH --nodes 2 -n 8\n", {("nodes",): 4, ("ntasks",): 9}, "#SBATCH --nodes 4 -n 9\n"),
        ("#SBATCH --gres=gpu:2\n", {("gres", "gpu"): 4}, "#SBATCH --gres=gpu:4\n"),
        ("#SBATCH --gres=gpu:a100:2,tmp:5\n", {("gres", "gpu"): 4}, "#SBATCH --gres=gpu:a100:4,tmp:5\n"),
        ("#SBATCH --gres gpu\n", {("gres", "gpu"): 4}, "#SBATCH --gres gpu:4\n"),
        (
            "#SBATCH --gpus-per-node=h100:8\n",
            {("gpus-per-node", "count"): 4},
            "#SBATCH --gpus-per-node=h100:4\n",
        ),
        ("#SBATCH -G 8\n", {("gpus",): 4}, "#SBATCH -G 4\n"),
        ('#SBATCH -J "my job"\n', {("job-name",): "other"}, '#SBATCH -J "other"\n'),
        ("#!/bin/sh\n\nexport A=1\n", {("nodes",): 2}, "#!/bin/sh\n#SBATCH --nodes=2\n\nexport A=1\n"),
        (
            "#!/bin/sh\n#SBATCH -p x\nsrun y\n",
            {("nodes",): 2, ("env", "A"): 1, ("exclusive",): True},
            "#!/bin/sh\n#SBATCH -p x\n#SBATCH --nodes=2\n#SBATCH --exclusive\nexport A=1\nsrun y\n",
        ),
    ],
)
def test_an_sbatch_option_changes_in_its_own_spelling(
    text: str, changes: dict[KeyPath, Any], after: str
) -> None:
    assert edited("run.sbatch", text, changes, add=True) == after


def test_only_the_head_of_a_batch_script_counts() -> None:
    text = "#!/bin/bash\n##SBATCH -N 3\n#SBATCH -N 2\nsrun x\n#SBATCH -N 5\n"
    assert values("run.sbatch", text) == {("nodes",): 2}


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("run.sbatch", "#SBATCH foo\n", "run.sbatch:1:9: foo is no option"),
        ("run.sbatch", "#SBATCH --nodes\n", "run.sbatch:1:9: --nodes has no value"),
        ("run.sbatch", "#SBATCH -J 'x\n", "run.sbatch:1:12: a quote that is never closed"),
        ("run.sh", "A='x\n", "run.sh:1:3: a ' that is never closed"),
        ("run.sh", "A=$(x\n", r"run.sh:1:3: a \$\( that is never closed"),
    ],
)
def test_broken_scripts_are_refused_with_their_place(file: str, text: str, found: str) -> None:
    with pytest.raises(BrokenFile, match=found):
        formats.read_config(text, file)


@pytest.mark.parametrize(
    ("file", "text", "path"),
    [("run.sh", "A=1\nA=2\n", ("A",)), ("run.sbatch", "#SBATCH -N 2\n#SBATCH --nodes=3\n", ("nodes",))],
)
def test_what_a_script_sets_twice_is_not_changed(file: str, text: str, path: KeyPath) -> None:
    assert "lines 1 and 2" in refused(file, text, {path: 4}).found


def test_a_flag_has_no_value_to_change() -> None:
    assert "takes no value" in refused("a.sbatch", "#SBATCH --exclusive\n", {("exclusive",): False}).found


# All formats

SAME = [
    ("a.yaml", "train:\n  batch_size: 4\n"),
    ("a.json", '{"train": {"batch_size": 4}}'),
    ("a.toml", "[train]\nbatch_size = 4\n"),
    ("a.py", "train = {'batch_size': 4}\n"),
]


@pytest.mark.parametrize(("file", "text"), SAME)
def test_a_missing_key_is_an_error_that_names_the_nearest(file: str, text: str) -> None:
    with pytest.raises(UnknownName, match=r"no such key; the nearest are train.batch_size \(line \d\)"):
        edited(file, text, {("train", "batchsize"): 8})


@pytest.mark.parametrize(("file", "text"), SAME)
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({("train",): 4}, "it is a section, not a value"),
        ({("train", "batch_size", "x"): 4}, "nothing can be added inside"),
        ({("train", "batch_size"): {"a": 1}}, "only text, numbers"),
        ({("train", "batch_size"): "\ud800"}, "only text, numbers"),
        ({("train", "batch_size"): object()}, "only text, numbers"),
        ({("train",): 4, ("train", "batch_size"): 4}, "one is inside the other"),
        ({(): 4}, "no key was named"),
        ({("new", 0): 4}, "no place in a list"),
    ],
)
def test_what_cannot_be_meant_is_refused(file: str, text: str, changes: Any, found: str) -> None:
    assert found in refused(file, text, changes, add=True).found


@pytest.mark.parametrize(("file", "text"), SAME)
def test_a_list_has_only_the_places_that_it_has(file: str, text: str) -> None:
    text = text.replace("4", "[1, 2]")
    assert (
        "list of 2, with no such place"
        in refused(file, text, {("train", "batch_size", 5): 4}, add=True).found
    )


@pytest.mark.parametrize(("file", "text"), SAME)
def test_nothing_to_change_changes_nothing(file: str, text: str) -> None:
    assert edited(file, text, {("train", "batch_size"): 4}) == text
    assert edited(file, text, {}) == text


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.yml", "a: 1", "yaml"),
        ("a.JSON", "{}", "json"),
        (".env.local", "A=1", "shell"),
        ("run.sh", "#!/bin/sh\n#SBATCH -N 1\n", "sbatch"),
        ("run.sh", "A=1\n", "shell"),
        ("config", "a: 1\nb: 2\n", "yaml"),
        ("config", "[a]\nb = 2\n", "toml"),
        ("config", '{"a": 1}', "json"),
        ("config", "#!/bin/bash\n#SBATCH -N 1\n", "sbatch"),
        ("config", "export A=1\n", "shell"),
    ],
)
def test_the_format_is_known_by_name_and_by_content(name: str, text: str, kind: str) -> None:
    assert formats.read_config(text, name).kind == kind


def test_a_format_that_cannot_be_told_is_asked_for() -> None:
    with pytest.raises(WrongUse, match=r"neither its name nor its content.*Name one of yaml, toml"):
        formats.read_config("hello", "notes.txt")
    with pytest.raises(WrongUse, match="the format ini: it is not one that is known"):
        formats.read_config("a: 1", "a.yaml", kind="ini")
    assert formats.read_config("a: 1", "notes.txt", kind="yaml").kind == "yaml"


@pytest.mark.parametrize("path", [("a",), ("a", 0, "b"), ("a.b", "c d"), ('q"', 12, "x[0]")])
def test_paths_are_written_and_read_back(path: KeyPath) -> None:
    assert text_edit.parse_path(text_edit.format_path(path)) == path


@pytest.mark.parametrize("text", ["a..b", "a[", "a[x]", "[", 'a."b'])
def test_a_path_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="cannot be read from character"):
        text_edit.parse_path(text)


@pytest.mark.parametrize(
    ("old", "wanted", "new"),
    [
        ("0.", 0, "0"),
        ("8.0", 8, "8"),
        ("1.1", "1.10", "1.10"),
        ("0.0", "0.", "0."),
        ("True", "true", "true"),
        ("1e-4", 0.0001, "1e-4"),
        ("8", 8, "8"),
        ("8", "8", "8"),
        ("yes", True, "yes"),
        ("1", True, "1"),
    ],
)
def test_a_word_of_a_script_stays_only_where_a_program_reads_the_same(
    old: str, wanted: object, new: str
) -> None:
    for name, text in (("run.sh", "export A={}\n"), ("job.sbatch", "#!/bin/bash\n#SBATCH --comment={}\n")):
        key = ("A",) if name == "run.sh" else ("comment",)
        assert formats.read_config(text.format(old), name).edit({key: wanted}) == text.format(new), name
