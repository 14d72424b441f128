"""The commands in the documentation do what the documentation shows.

A ```console block holds one `$ command` and its output. Blocks marked `h200` show the recorded H200. To take
over new output, run: TRIMTAB_RECORD=1 .venv/bin/python -m pytest tests/test_docs.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import machines as m
from test_cli import shown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```console(?P<tag> h200)?\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)\)")


def real_output(command: str, *, h200: bool, cache: Path | None) -> str:
    if h200:
        return shown(m.recorded("h200")) + "\n"
    if re.fullmatch(r"trimtab [\w .,:/=-]*", command):
        # Nothing for a shell to do.
        start = [sys.executable, "-m", *command.split()]
    else:
        start = ["bash", "-c", command.replace("trimtab", f"{sys.executable} -m trimtab", 1)]
    done = subprocess.run(
        start,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"COLUMNS": "80"} | ({} if cache is None else {"TRIMTAB_CACHE": str(cache)}),
    )
    return done.stdout + done.stderr


HEAVY = re.compile(r"estimate (trimtab.exams.jobs:GPT|slm) |max slm |mixtral-small")
CASES = [
    # Models of a hundred million weights are traced for half a minute.
    pytest.param(
        page,
        match,
        id=f"{page.name}: {match['command']}",
        marks=[pytest.mark.slow] if HEAVY.search(match["command"]) else [],
    )
    for page in PAGES
    for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "match"), CASES)
def test_the_output_in_the_documentation_is_what_the_command_prints(
    page: Path, match: re.Match[str], tmp_path: Path
) -> None:
    if "CUDA_VISIBLE_DEVICES" in match["command"] and Path("/dev/nvidiactl").exists():
        pytest.skip("the page shows a machine without a GPU")
    # What full recomputation saves is not traced for a setting that another test has traced alone.
    cache = tmp_path if "\n help " in match["output"] else None
    real = real_output(match["command"], h200=bool(match["tag"]), cache=cache)
    if os.environ.get("TRIMTAB_RECORD"):
        tag = match["tag"] or ""
        block = f"```console{tag}\n$ {match['command']}\n{real}```"
        page.write_text(page.read_text(encoding="utf-8").replace(match[0], block), encoding="utf-8")
        return
    assert match["output"] == real, f"{page.name} is stale; see the head of {Path(__file__).name}"


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES[1:]], ids=lambda page: page.name)
def test_every_link_in_the_documentation_leads_to_a_file(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_names_every_verb() -> None:
    from trimtab import api

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for verb in api.VERBS:
        assert f"trimtab {verb}" in text


JOB_FILE = re.compile(r"```python\n# (?P<file>\w+\.py)\n(?P<source>.*?)```", re.DOTALL)
JOB_FILES = list(JOB_FILE.finditer((ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("match", JOB_FILES, ids=lambda match: match["file"])
def test_every_job_in_the_documentation_trains(match: re.Match[str], tmp_path: Path) -> None:
    for package in ("lightning", "torch_geometric"):
        if f"{package}" in match["source"]:
            pytest.importorskip(package)
    file = tmp_path / match["file"]
    file.write_text(match["source"], encoding="utf-8")
    name = re.findall(r"^class (\w+)\(trimtab.Job\)", match["source"], re.MULTILINE)[0]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", f"{file}:{name}", "--steps", "3", "--pin", "micro_batch=4",
         "--out", str(tmp_path / "run")],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iter ") == 3


def test_the_site_has_every_page_and_links_that_hold_there() -> None:
    """`make docs` fails at a broken link; this finds pages that the site's menu lacks without building it."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:]+: (\w+\.md)$", text, re.MULTILINE)
    pages = {page.name for page in PAGES[1:]} | {"index.md", "CHANGELOG.md", "SECURITY.md"}
    assert set(listed) == pages
    assert len(listed) == len(pages)
    for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            name = target.partition("#")[0].rpartition("/")[2]
            kept = name in pages | {"README.md", "CITATION.cff", "LICENSE", "candidates.svg", ""}
            is_schema = target.startswith("schemas/") and name.endswith(".json")
            assert target.startswith("http") or kept or is_schema, f"{page.name}: {target}"
