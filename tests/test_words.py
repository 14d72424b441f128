from __future__ import annotations

import doctest
import json
import re
import sys
from typing import Any

import pytest

import trimtab
from trimtab import api
from trimtab.catalog import glossary as module
from trimtab.catalog.glossary import KINDS, Word, find_word, words
from trimtab.cli.main import main_code
from trimtab.errors import UnknownName
from trimtab.spec import Precision, Strategy

ALL_VERBS = [
    "detect",
    "estimate",
    "plan",
    "max",
    "apply",
    "show",
    "revert",
    "launch",
    "train",
    "profile",
    "calibrate",
    "exam",
    "watch",
    "jobs",
    "cancel",
    "doctor",
    "report",
    "explain",
]
KNOWN = words(tuple(ALL_VERBS))

KNOBS = [
    "enable_tf32",
    "enable_amp",
    "amp_dtype",
    "enable_compile",
    "max_length",
    "batch_size",
    "eval_steps",
    "logging_steps",
    "eval_iters",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "expandable_segments",
]
TERMS = [
    "device",
    "link",
    "node",
    "cluster",
    "fact",
    "workload",
    "precision",
    "global-batch",
    "micro-batch",
    "accumulation",
    "axis",
    "mesh",
    "strategy",
    "footprint",
    "capacity",
    "headroom",
    "step-time",
    "bound",
    "throughput",
    "mfu",
    "rating",
    "data-bound",
    "launch-bound",
    "throttled",
    "band",
    "estimate",
    "policy",
    "pin",
    "candidate",
    "reason",
    "plan",
    "fingerprint",
    "target",
    "patch",
    "command",
    "job",
    "run",
    "attempt",
    "incident",
    "checkpoint",
    "measurement",
    "calibration",
    "finding",
    "report",
]


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_says_what_it_is_what_it_costs_and_when_to_change_it(name: str) -> None:
    entry = KNOWN[name]
    assert entry.kind == "knob"
    assert entry.what
    assert entry.cost
    assert entry.change


@pytest.mark.parametrize("name", TERMS)
def test_every_word_of_the_domain_is_explained(name: str) -> None:
    assert KNOWN[name].text


@pytest.mark.parametrize("name", [*Precision, *Strategy])
def test_every_precision_and_strategy_is_explained(name: str) -> None:
    assert KNOWN[name].what


def test_spellings_are_unique_and_references_lead_somewhere() -> None:
    spellings = [one for entry in KNOWN.values() for one in (entry.name, *entry.aliases)]
    assert len(set(spellings)) == len(spellings)
    for entry in KNOWN.values():
        assert entry.kind in KINDS
        assert set(entry.see) <= set(KNOWN)
        assert entry.text.isascii()


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("bf16", "bf16"),
        ("BF16", "bf16"),
        ("bfloat16", "bf16"),
        ("micro batch", "micro-batch"),
        ("micro_batch", "micro-batch"),
        ("oom", "out-of-memory"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"),
        ("gradient checkpointing", "recompute"),
        ("--on", "on"),
    ],
)
def test_a_word_is_found_as_people_type_it(typed: str, name: str) -> None:
    assert trimtab.explain(typed).name == name


def test_nan_is_not_cured_by_fp16() -> None:
    assert "backwards" in find_word("amp_dtype", ()).text
    assert "fp16" in find_word("nan", ()).text


def test_a_word_that_is_not_there_gives_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no such word; the nearest are .*bf16"):
        trimtab.explain("bf61")


@pytest.mark.parametrize("text", ["", " ", "xyzzyplugh", "\x00"])
def test_nonsense_is_refused_with_the_way_to_the_list(text: str) -> None:
    with pytest.raises(UnknownName) as caught:
        trimtab.explain(text)
    assert "trimtab explain" in caught.value.cure


def test_no_entry_speaks_of_a_verb_that_does_not_work_yet() -> None:
    for entry in words(api.VERBS).values():
        named = set(re.findall(r"`trimtab ([a-z]+)", entry.text))
        assert named <= set(api.VERBS), entry.name


# Wording that promises what a verb does without naming the verb.
PROMISES = [
    # "trimtab writes", "trimtab plans"; a noun after it is fine.
    r"\btrimtab (?!(?:detect|explain|precision|command)\b)[a-z]+",
    r"`--(?!on\b|json\b)[a-z-]+",
    r"\b(?:slm|naics|hf:|bridge:|`bridge`)",
    r"\b(?:plan\.json|log\.jsonl|events\.jsonl|checkpoints/)",
    r"\b(?:[Pp]lans?|[Ee]stimates?) (?:prefer|carry|count|list|propose|shrink|are judged|is computed|divide)",
    r"\b(?:losses|model|batch|weight|loss)\(\)",
]


def promised(text: str) -> list[str]:
    return [found.group(0) for pattern in PROMISES for found in re.finditer(pattern, text)]


def test_no_entry_promises_what_a_missing_verb_would_do() -> None:
    wrong = {entry.name: promised(entry.text) for entry in words(("detect", "explain")).values()}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    "text",
    [
        "trimtab writes them atomically.",
        "trimtab plans it.",
        "The trainer trimtab launches.",
        "Built-in: `slm`.",
        "Fix it with `--pin compile=true`.",
        "Plans prefer one node.",
        "events.jsonl says why.",
    ],
)
def test_such_promises_are_caught(text: str) -> None:
    assert promised(text)


def test_every_sentence_on_use_names_a_verb_of_trimtab() -> None:
    for entry in KNOWN.values():
        for sentence in entry.use:
            named = re.findall(r"`trimtab ([a-z]+)", sentence)
            assert named, f"{entry.name}: {sentence}"
            assert set(named) <= set(ALL_VERBS), f"{entry.name}: {sentence}"


def test_torchrun_restarts_only_where_it_is_told_to() -> None:
    assert "--max-restarts" in find_word("torchrun", ()).what


def test_a_sentence_about_a_verb_appears_when_the_verb_does() -> None:
    assert find_word("mesh", ()).use == ()
    assert find_word("mesh", ("plan",)).use == ("`trimtab plan` prints it.",)
    assert "doctor" not in words(())
    assert "doctor" in words(("doctor",))


def test_the_text_of_an_entry_is_derived_from_its_parts() -> None:
    entry = Word(name="x", kind="term", what="A.", change="B.", use=("C.",))
    assert entry.text == "A. B. C."


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["flash", "attention"], "flash-attention"),
        (["Mixture", "of", "experts"], "moe"),
        (["qlora"], "qlora"),
        (["4bit"], "quantisation"),
        (["quantization"], "quantisation"),
        (["cpu", "offload"], "offload"),
        (["moe"], "moe"),
        (["ema"], "ema"),
        (["gan"], "gan"),
        (["contrastive"], "contrastive"),
        (["gradient", "checkpointing"], "recompute"),
        (["network"], "network"),
    ],
)
def test_explain_takes_several_words_and_knows_those_people_ask_for(
    typed: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, "explain", *typed, "--json")["name"] == name
    entry = trimtab.explain(name)
    assert entry.what
    assert entry.cost
    assert entry.change
    assert entry.use, "what trimtab does about it today"


def test_explain_shows_each_of_several_words_that_are_no_term_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(capsys, "explain", "bf16", "fp16", "--json")
    assert [one["name"] for one in found["words"]] == ["bf16", "fp16"]
    assert found["text"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["trimtab", *arguments])
        main_code()
    return json.loads(capsys.readouterr().out)
