"""Pages that are made from the program are fresh, and every link in the documentation leads to a heading."""

from __future__ import annotations

import doctest
import re
from functools import cache
from pathlib import Path

import pytest
from bench import manual

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", manual.PAGES)
def test_the_page_is_what_the_program_says_of_itself(name: str) -> None:
    there = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert there == manual.PAGES[name](), f"docs/{name} is stale: run python bench/manual.py"


def test_the_reference_has_every_command_option_function_and_variable() -> None:
    text = manual.reference()
    for name, command in manual.commands().items():
        assert f"### trimtab {name}\n" in text
        for param in command.params:
            for flag in param.opts:
                assert param.param_type_name == "argument" or f"`{flag}" in text, flag
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r'"(TRIMTAB_[A-Z_]+)"', sources))
    assert len(read) > 3
    assert {one for one in read if f"`{one}`" not in text} == set()
    for name in ("estimate", "plan", "train", "read_plan", "Run", "Job", "TrimtabError"):
        assert f"`trimtab.{name}" in text


@cache
def slugs(page: Path) -> set[str]:
    """The anchors of a page, as Markdown viewers make them: a heading that comes again gets a number."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_in_the_documentation_leads_to_a_heading(page: Path) -> None:
    for file, place in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if not file.startswith("http"):
            assert place in slugs(page.parent / file if file else page), f"{file}#{place}"


def test_a_link_to_no_heading_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: `two` and (three)\n\n```\n# not this\n```\n", encoding="utf-8")
    assert slugs(page) == {"one-two-and-three"}
    assert LINK.findall("[a](other.md#one) [b](#two) [c](plain.md)") == [("other.md", "one"), ("", "two")]


PLACE = re.compile(r"`((?:\w+/)+[a-z_]+\.(?:py|toml|jsonl?|md))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_the_documentation_names_exists(page: Path) -> None:
    source = ROOT / "src" / "trimtab"
    for place in PLACE.findall(page.read_text(encoding="utf-8")):
        first = place.split("/")[0]
        if (source / first).is_dir():
            assert (source / place).exists(), place
        elif first in ("bench", "docs", "src", "tests"):
            assert (ROOT / place).exists(), place


def test_every_page_is_in_the_list_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in PAGES if page.parent == ROOT / "docs"]
    missing = [name for name in pages if f"(docs/{name}" not in text]
    assert missing == []


def first_job(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def test_the_job_that_newcomers_copy_is_one_and_can_be_trained(tmp_path: Path) -> None:
    import trimtab

    assert first_job("README.md") == first_job("docs/tutorial.md")
    file = tmp_path / "job.py"
    file.write_text(first_job("README.md"), encoding="utf-8")
    job = trimtab.load(f"{file}:Reader", width=128, layers=1, length=8, samples=6)
    assert job.loss(job.model(), job.batch(2)).isfinite()
    assert len(job.dataset()) == 6


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(manual).failed == 0
