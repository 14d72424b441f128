"""Strategies that build every noun of texts and knobs, valid by construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from trimtab.configs.knobs import KnobSettings
from trimtab.jobs.text.blocks import Layout
from trimtab.jobs.text.corpus import Corpus, Document
from trimtab.jobs.text.tokens import Tokens

if TYPE_CHECKING:
    from trimtab import spec

names = st.text(min_size=1, max_size=8)
counts = st.integers(0, 2**50)
words = st.lists(names, max_size=3).map(tuple)
plain = st.integers(0, 10**9) | st.booleans() | names | st.lists(st.integers(0, 9), max_size=2)
tables = st.dictionaries(names, plain, max_size=3)
documents = st.builds(Document, path=names, size=counts, changed=counts)
corpora = st.builds(
    Corpus, origin=names, documents=st.lists(documents, max_size=3).map(tuple), left_out=words
)
tokens = st.builds(
    Tokens,
    folder=names,
    count=counts,
    kind=st.sampled_from(["uint16", "uint32"]),
    size_bytes=counts,
    origin=names,
    tokeniser=names,
)
layouts = st.builds(Layout, blocks=st.integers(1, 10**9), wanted=st.none() | st.integers(1, 10**9))
wired = st.builds(
    KnobSettings,
    options=tables,
    spare=words,
    pins=tables,
    train=tables,
    said=words,
    by=st.dictionaries(names, names, max_size=3),
)


def text_nouns() -> dict[type[spec.Noun], st.SearchStrategy[Any]]:
    """Each with what builds it."""
    return {Document: documents, Corpus: corpora, Tokens: tokens, Layout: layouts, KnobSettings: wired}
