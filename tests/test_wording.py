"""Lint for words: pages, glossary, help text, docstrings and identifiers use plain, guessable English.

The documentation and the source code are checked as a whole. Unique class names: tests/test_structure.py.
"""

from __future__ import annotations

import ast
import doctest
import functools
import re
import tomllib
from pathlib import Path

import pytest
from bench import manual, prose

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trimtab"
WORDS = SOURCE / "catalog" / "words.toml"

JOBS_AS_USERS_WRITE_THEM = SOURCE / "exams" / "jobs.py"
"""Not checked: models for measuring, in their authors' style."""
STORED_FIELDS = {"held"}
"""Banned names that are keys of stored JSON: fields of a class keep them."""

BANNED = {
    r"nought": "zero, nothing",
    r"anew": "again",
    r"whoever": "name the user or the caller",
    r"whence": "from where",
    r"in vain": "say what failed",
    r"told": "say who prints, sends or states it",
    r"comes? to": "is, becomes, takes",
    r"of one's own|one's own": "your own, its own",
    r"learnt": "trained, learned, measured",
    r"mend(?:s|ed|ing)?": "fix",
    r"lies": "is",
    r"how-manieth": "which",
    r"hands": "name the module or function",
    r"unlike (?!(?:a|an|the|in|with|most|other)\b)\w+": "different, mixed, unequal",
}
"""Banned words and phrases, with what to write instead."""

BANNED_VARIABLES = frozenset({"one", "told", "held"})
BANNED_FUNCTIONS = frozenset({"read", "told", "held"})

PAGES = prose.pages()

LONGEST_SENTENCES = 18.0
"""Mean words of a sentence on any page."""
LEAST_YOU = 5.0
"""Uses of "you" per 1,000 words on any page of at least 300 words; and over all pages:"""
LEAST_YOU_OVERALL = 15.0


def banned_words(text: str) -> list[str]:
    """Return the banned words in a text, each with what to write instead."""
    return [
        f"{match[0]} (write: {instead})"
        for pattern, instead in BANNED.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    ]


def without_code(page: str) -> str:
    """Return a page without code and recorded output."""
    return prose.CODE.sub("", prose.INDENTED.sub("", prose.FENCED.sub("", page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_uses_a_banned_word(page: Path) -> None:
    if page.name == "reference.md":
        pytest.skip("made from help texts and docstrings, which are checked by package")
    assert banned_words(without_code(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short_and_speak_to_the_reader(page: Path) -> None:
    found = prose.measure(page.read_text(encoding="utf-8"))
    assert found.sentence <= LONGEST_SENTENCES
    assert found.you >= LEAST_YOU or found.words < 300


def test_the_documentation_speaks_to_the_reader() -> None:
    whole = "\n\n".join(page.read_text(encoding="utf-8") for page in prose.pages())
    assert prose.measure(whole).you >= LEAST_YOU_OVERALL


def test_no_entry_of_the_glossary_uses_a_banned_word() -> None:
    entries = tomllib.loads(WORDS.read_text(encoding="utf-8"))["word"]
    found = {
        entry["name"]: banned_words(
            " ".join([entry["what"], entry.get("cost", ""), entry.get("change", ""), *entry.get("use", [])])
        )
        for entry in entries
    }
    assert {name: words for name, words in found.items() if words} == {}


def test_no_finding_uses_a_banned_word() -> None:
    rows = tomllib.loads((SOURCE / "diagnosis" / "kinds.toml").read_text(encoding="utf-8"))["kind"]
    texts = {row["name"]: " ".join(row.get(part, "") for part in ("what", "cause", "cure")) for row in rows}
    assert {name: words for name, text in texts.items() if (words := banned_words(text))} == {}


def test_no_help_text_uses_a_banned_word() -> None:
    for name, command in manual.commands().items():
        texts = [command.help or "", *(parameter.help or "" for parameter in command.params)]
        assert banned_words(" ".join(texts)) == [], name


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """Return every module of the package, with its path below src/trimtab."""
    return [
        (str(file.relative_to(SOURCE)), ast.parse(file.read_text(encoding="utf-8")))
        for file in sorted(SOURCE.rglob("*.py"))
        if file != JOBS_AS_USERS_WRITE_THEM
    ]


def docstrings(module: ast.Module) -> list[str]:
    """Return the docstrings of a module, its classes and its functions, and of its constants and fields."""
    return [
        node.value.value
        for node in ast.walk(module)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def test_no_docstring_uses_a_banned_word() -> None:
    found = {
        name: words for name, module in modules() if (words := banned_words(" ".join(docstrings(module))))
    }
    assert found == {}


def banned_identifiers(module: ast.Module) -> list[str]:
    """Return the banned names that a module gives to variables, arguments and functions."""
    found = []
    fields = {
        id(field.target)
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and getattr(field.target, "id", "") in STORED_FIELDS
    }
    for node in ast.walk(module):
        if id(node) in fields:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED_VARIABLES:
            found.append(f"line {node.lineno}: variable {node.id}")
        elif isinstance(node, ast.arg) and node.arg in BANNED_VARIABLES:
            found.append(f"line {node.lineno}: argument {node.arg}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in BANNED_FUNCTIONS:
            found.append(f"line {node.lineno}: function {node.name}")
    return found


def test_no_identifier_is_banned() -> None:
    found = {name: words for name, module in modules() if (words := banned_identifiers(module))}
    assert found == {}


def test_banned_identifiers_would_be_noticed() -> None:
    module = ast.parse("def read(told):\n    return [one for one in told]\n\nclass Reader:\n    pass\n")
    assert banned_identifiers(module) == [
        "line 1: function read",
        "line 1: argument told",
        "line 2: variable one",
    ]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(prose).failed == 0
    assert banned_words("Mend the job, unlike ranks wait") == [
        "Mend (write: fix)",
        "unlike ranks (write: different, mixed, unequal)",
    ]
    assert banned_words("Unlike the others, this amendment is fine.") == []
