"""Print how each page of the documentation reads: words, uses of "you", and length of sentences.

    python bench/prose.py [PAGE...]

Code blocks, tables and comments are left out. Aim: "you" or "your" at least 15 times per 1,000 words, and
sentences of at most 18 words on average. `tests/test_wording.py` fails if a page is far from that.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!--.*?-->", re.DOTALL)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
TABLE = re.compile(r"^\|.*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"`[^`\n]*(?:\n[^`\n]*)?`")
END = re.compile(r"(?<=[.!?])[\"')*]*\s+")
LEAST = 3
"""Words that a sentence has; less is a label."""


class Prose(NamedTuple):
    """The measures of a page."""

    words: int
    you: float
    """"you", "your" and "yours" per 1,000 words."""
    sentence: float
    """Mean words of a sentence."""


def plain_text(page: str) -> str:
    r"""Return the prose of a Markdown page: no code blocks, tables, comments or link targets.

    >>> plain_text("# Title\n\nSee [the page](a.md#b) and `x y`.\n\n| a | b |\n")
    '# Title\n\nSee the page and CODE.\n\n\n'
    """
    for pattern, replacement in (
        (FENCED, ""),
        (GENERATED, ""),
        (TABLE, ""),
        (INDENTED, ""),
        (LINK, r"\1"),
        (CODE, "CODE"),
    ):
        page = pattern.sub(replacement, page)
    return page


def sentences(page: str) -> list[str]:
    r"""Return the sentences of a page, headings left out.

    A paragraph and an item of a list each end a sentence, whatever they end with.

    >>> sentences("# Title\n\nYou run it. It prints\na plan.\n\n- One more thing\n")
    ['You run it.', 'It prints a plan.', 'One more thing']
    """
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|(?<=\n)(?=#)", plain_text(page)):
        text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", paragraph.strip())
        if text.startswith("#"):
            continue
        found += [part for part in END.split(" ".join(text.split())) if len(part.split()) >= LEAST]
    return found


def measure(page: str) -> Prose:
    """Measure a page."""
    parts = sentences(page)
    words = re.findall(r"[A-Za-z][\w'-]*", " ".join(parts))
    you = sum(word.lower() in ("you", "your", "yours", "yourself") for word in words)
    return Prose(len(words), 1000 * you / max(1, len(words)), len(words) / max(1, len(parts)))


def pages() -> list[Path]:
    """Return the pages of the documentation."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Print the table."""
    chosen = [Path(name) for name in sys.argv[1:]] or pages()
    print(f"{'page':24}{'words':>8}{'you/1,000':>12}{'words/sentence':>16}")
    whole = ""
    for page in chosen:
        text = page.read_text(encoding="utf-8")
        whole += "\n\n" + text
        found = measure(text)
        print(f"{page.name:24}{found.words:8,}{found.you:12.1f}{found.sentence:16.1f}")
    total = measure(whole)
    print(f"{'all':24}{total.words:8,}{total.you:12.1f}{total.sentence:16.1f}")


if __name__ == "__main__":
    main()
