"""Text to train on: finding it, cutting it into tokens, keeping those, and making samples of them."""

from __future__ import annotations

import doctest
import os
import pickle
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.jobs.slm import learning_rate_share
from trimtab.jobs.text import corpus as texts
from trimtab.jobs.text import tokens as kept
from trimtab.jobs.text.blocks import BlockLayout
from trimtab.jobs.text.byte_pairs import WORD, BytePairs, count_words, train_byte_pairs
from trimtab.jobs.text.corpus import find_text, standard_library
from trimtab.jobs.text.tokens import ABOUT, TOKENS, BytePairTokenizer, Tokens, tokenize

PROSE = "\n".join(f"the cat {n} sat on the mat and the dog sat on cat {n % 7}" for n in range(400)) + "\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "text"


@pytest.mark.parametrize("name", ["jobs.text.corpus", "jobs.text.byte_pairs", "jobs.text.blocks", "jobs.slm"])
def test_the_examples_are_true(name: str) -> None:
    assert doctest.testmod(import_module(f"trimtab.{name}")).failed == 0


# ---------------------------------------------------------------------------------------------- corpus


def test_without_a_name_the_text_is_the_standard_library() -> None:
    found = find_text()
    names = [Path(document.path) for document in found.documents]
    assert found.size_bytes > 5_000_000
    assert "standard library" in found.origin
    assert any(name.name == "argparse.py" for name in names)
    skipped = {"test", "tests", "site-packages", "__pycache__"}
    assert not [name for name in names if skipped & set(name.parts[-3:-1])]
    assert names == sorted(names, key=lambda name: name.parts)
    assert standard_library() == found


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for name in ("b.txt", "a/z.md", "a.txt", ".hidden/no.txt", ".no"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name, encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "empty.txt").touch()
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder)
    found = find_text(str(folder))
    assert [Path(document.path).relative_to(folder).as_posix() for document in found.documents] == [
        "a/z.md",
        "a.txt",
        "b.txt",
    ]
    assert sorted(Path(one).name for one in found.left_out) == ["latin.txt", "picture.png"]
    assert b"".join(found.chunks()) == b"a/z.md\0a.txt\0b.txt\0"
    assert found.size_bytes == len(b"".join(found.chunks()))


def made(file: Path, *, content: bytes | None = None, inside: bytes | None = None) -> None:
    """A file with that in it, or a folder with a file that has it."""
    if inside is not None:
        file.mkdir()
        (file / "a").write_bytes(inside)
    elif content is not None:
        file.write_bytes(content)


def linked(file: Path, *, within: bool = False) -> None:
    """A file that nobody can read, root included."""
    if within:
        file.mkdir()
    (file / "a" if within else file).symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (made, "no such file or folder"),
        (partial(made, content=b""), "the file is empty"),
        (partial(made, content=b"PK\3\4\0\0"), "binary: byte 5 is zero"),
        (partial(made, content="a".encode("utf-16")), "binary: byte 4 is zero"),
        (partial(made, content=b"caf\xe9"), "not UTF-8: byte 4 is 0xe9"),
        (partial(made, content=b"half \xc3"), "not UTF-8: byte 6 is 0xc3"),
        (os.mkfifo, "neither a file nor a folder"),
        (Path.mkdir, "no files with text"),
        (partial(made, inside=b""), "no files with text"),
        (partial(made, inside=b"\0"), "1 file, which is not text"),
        (linked, "cannot be read"),
        (partial(linked, within=True), "cannot be read"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(tmp_path: Path, make: Any, found: str) -> None:
    file = tmp_path / "given"
    make(file)
    with pytest.raises(WrongUse, match=found) as caught:
        find_text(str(file))
    assert str(file) in caught.value.given
    assert caught.value.exit_code == 2
    with pytest.raises(WrongUse, match=found):
        trimtab.load("slm:tiny", data=str(file)).dataset()
    with pytest.raises(WrongUse, match="cannot be read"):
        find_text(f"{__file__}/under")


def test_what_is_binary_further_on_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "late.txt"
    file.write_bytes(b"text\n" * (texts.CHUNK // 5 + 10) + b"\0")
    with pytest.raises(WrongUse, match="bytes that are zero"):
        tokenize(find_text(str(file)), BytePairTokenizer(256))
    assert not [path for path in (tmp_path / "cache" / "text").iterdir() if path.is_dir()]


@pytest.mark.parametrize("ending", [b"\n", b"", b"\n\n"])
def test_a_long_file_comes_whole_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    monkeypatch.setattr(texts, "CHUNK", 100)
    file = tmp_path / "long.txt"
    file.write_bytes(b"x" * 350 + b"\n" + PROSE.encode() + b"y" * 250 + ending)
    pieces = list(find_text(str(file)).chunks())
    assert b"".join(pieces) == file.read_bytes() + b"\0"
    assert len(pieces) > 100


# ---------------------------------------------------------------------------------------------- pieces


@given(st.binary(max_size=400))
def test_every_byte_is_in_one_word(text: bytes) -> None:
    assert b"".join(WORD.findall(text)) == text


LEARNT = train_byte_pairs(count_words([PROSE.encode(), b"aaaaaaa aaa aa aaaa aaaaaaaaaa" * 9]), 400)


@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text("the caton 7\na", max_size=200).map(str.encode))
def test_any_text_comes_back_whole(text: bytes) -> None:
    found = LEARNT.encode(text)
    assert LEARNT.decode(found) == text
    assert len(found) <= len(text)
    assert found.max(initial=0) < LEARNT.size


def test_pieces_are_learnt_from_what_comes_again() -> None:
    assert LEARNT.size > 270
    assert [LEARNT.decode([one]) for one in LEARNT.encode(b"the cat sat on the mat")] == [
        b"the",
        b" cat",
        b" sat",
        b" on",
        b" the",
        b" mat",
    ]
    # Words that are new fall apart into bytes, and no further.
    assert LEARNT.encode("żółw".encode()).tolist() == list("żółw".encode())
    assert BytePairs().encode(b"abc").tolist() == list(b"abc")
    assert train_byte_pairs(Counter(), 999).size == 256
    assert train_byte_pairs(count_words([PROSE.encode()]), 256).size == 256
    assert train_byte_pairs(count_words([PROSE.encode()]), 261).size == 261


def by_hand(rounds: list[Any], word: bytes) -> list[int]:
    """The pieces of a word, joined one pair after the other from the left."""
    found, start = list(word), 256
    for pairs in rounds:
        made = {tuple(pair): start + number for number, pair in enumerate(pairs.tolist())}
        joined, place = [], 0
        while place < len(found):
            one = made.get(tuple(found[place : place + 2]))
            joined.append(found[place] if one is None else one)
            place += 1 if one is None else 2
        found, start = joined, start + len(pairs)
    return found


@given(st.text("aaat hecnosm", max_size=30).map(str.encode))
def test_a_round_done_at_once_is_the_round_done_by_hand(text: bytes) -> None:
    expected = [one for word in WORD.findall(text) for one in by_hand(LEARNT.rounds, word)]
    assert LEARNT.encode(text).tolist() == expected


def test_the_same_words_in_any_order_give_the_same_pieces() -> None:
    words = reversed(count_words([PROSE.encode()]).items())
    again = train_byte_pairs(Counter(dict(words)), 400)
    straight = train_byte_pairs(count_words([PROSE.encode()]), 400)
    assert [one.tolist() for one in again.rounds] == [one.tolist() for one in straight.rounds]
    # Written down once: another machine or version has to come to the same.
    assert [straight.decode([index]) for index in range(256, 264)] == [
        *(b"at", b"he", b"the", b" c", b" o", b" s", b" the", b" cat"),
    ]


# ---------------------------------------------------------------------------------------------- tokens


def written(tmp_path: Path, text: str = PROSE) -> str:
    file = tmp_path / "prose.txt"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(("size", "kind"), [(256, "uint16"), (300, "uint16"), (70_000, "uint32")])
def test_a_text_is_tokenised_once_and_comes_back(
    tmp_path: Path, own_cache: Path, size: int, kind: str
) -> None:
    text = find_text(written(tmp_path))
    first = tokenize(text, BytePairTokenizer(size))
    stamp = (own_cache / Path(first.folder).name / TOKENS).stat().st_mtime_ns
    again = tokenize(text, BytePairTokenizer(size))
    assert again == first
    assert (own_cache / Path(first.folder).name / TOKENS).stat().st_mtime_ns == stamp
    assert first.kind == kind
    assert len(first.array()) == first.count
    assert first.byte_pairs().decode(first.array()) == PROSE.encode() + b"\0"
    assert int(first.array().max()) < first.byte_pairs().size <= size


def test_another_text_vocabulary_or_a_damaged_file_is_tokenised_again(tmp_path: Path) -> None:
    name = written(tmp_path)
    first = tokenize(find_text(name), BytePairTokenizer(300))
    assert tokenize(find_text(name), BytePairTokenizer(301)).folder != first.folder
    with (Path(first.folder) / TOKENS).open("ab") as file:
        file.write(b"x")
    again = tokenize(find_text(name), BytePairTokenizer(300))
    assert again == first
    assert len(again.array()) == first.count
    (Path(first.folder) / ABOUT).write_text("{", encoding="utf-8")
    (Path(first.folder).parent / f".{Path(first.folder).name}.77").mkdir()
    assert tokenize(find_text(name), BytePairTokenizer(300)) == first
    assert not list(Path(first.folder).parent.glob(".*"))
    written(tmp_path, PROSE.replace("dog", "hen"))
    os.utime(name, ns=(1, 1))
    assert tokenize(find_text(name), BytePairTokenizer(300)).folder != first.folder


TOGETHER = """
import sys
from trimtab.jobs.text.corpus import find_text
from trimtab.jobs.text import tokens
made = tokens._write_tokens
tokens._write_tokens = lambda *given: print("made", flush=True) or made(*given)
print(tokens.tokenize(find_text(sys.argv[1]), tokens.BytePairTokenizer(300)).count, flush=True)
"""


def test_of_several_processes_one_tokenises(tmp_path: Path) -> None:
    name = written(tmp_path, PROSE * 50)
    started = [
        subprocess.Popen([sys.executable, "-c", TOGETHER, name], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = "".join(one.communicate(timeout=300)[0] for one in started).split()
    assert said.count("made") == 1
    assert len(set(said)) == 2


def test_a_cache_that_cannot_be_written_says_which_variable_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match=r"cannot be written.*TRIMTAB_CACHE"):
        tokenize(find_text(written(tmp_path)), BytePairTokenizer(256))


def test_a_full_disk_is_seen_before_it_is_full(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"are free, and the tokens take up to.*TRIMTAB_CACHE"):
        kept._check_room(tmp_path, 10**18)  # noqa: SLF001


def test_a_vocabulary_of_a_long_text_is_learnt_from_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "CHUNK", 2000)
    monkeypatch.setattr(kept, "TRAINING_BYTES", 4000)
    found = tokenize(find_text(written(tmp_path)), BytePairTokenizer(400))
    assert found.byte_pairs().decode(found.array()) == PROSE.encode() + b"\0"
    assert 256 < found.byte_pairs().size <= 400


def test_long_work_says_so_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept.TokenProgress, "QUICK_S", 0.0)
    monkeypatch.setattr(kept.TokenProgress, "APART_S", 0.0)
    tell = kept.TokenProgress("tokenising")
    assert list(tell.track([b"ab", b"c"], 3, "writing")) == [b"ab", b"c"]
    tell.finish("3 tokens")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "trimtab: tokenising"
    assert err.splitlines()[1].startswith("trimtab: 3 tokens, in ")


# ---------------------------------------------------------------------------------------------- samples


@given(st.integers(1, 500), st.none() | st.integers(1, 1500))
def test_no_sample_is_held_out_and_blocks_are_shared_fairly(blocks: int, wanted: int | None) -> None:
    layout = BlockLayout(blocks=blocks, epoch_samples=wanted)
    taken = Counter(layout.block(index) for index in range(layout.samples))
    held = {layout.held_out_block(index, layout.held_out) for index in range(layout.held_out)}
    assert len(held) == layout.held_out
    assert not held & set(taken)
    assert layout.training_blocks + layout.held_out == blocks
    assert all(0 <= one < blocks for one in held | set(taken))
    assert max(taken.values()) - min(taken.values()) <= 1
    assert len(taken) == min(layout.samples, layout.training_blocks)


@pytest.mark.parametrize(
    ("blocks", "wanted", "words"),
    [
        (45, None, "43 blocks to learn from (2 more are held out), each once an epoch"),
        (45, 10, "of which an epoch takes 10, evenly spaced (samples=10)"),
        (45, 86, "an epoch of 86 samples has each 2 times (samples=86)"),
        (45, 100, "has each 2 or 3 times"),
        (1, None, "1 block to learn from (too few to hold any out), each once"),
    ],
)
def test_what_becomes_of_the_text_is_said(blocks: int, wanted: int | None, words: str) -> None:
    assert words in BlockLayout(blocks=blocks, epoch_samples=wanted).description


def test_slm_learns_from_a_text_of_the_users(tmp_path: Path) -> None:
    job = trimtab.load("slm:tiny", data=written(tmp_path), samples="none")
    samples = job.dataset()
    whole = PROSE.encode() + b"\0"
    assert len(samples) == (len(whole) // 65) - len(whole) // 65 // 20
    seen, following = samples[1]
    assert bytes(seen.tolist()) == whole[65:129]
    assert bytes(following.tolist()) == whole[66:130]
    held = job.validation()
    assert bytes(held[0][0].tolist()) == whole[19 * 65 : 19 * 65 + 64]
    assert len(held) == len(whole) // 65 // 20
    # Worker processes get the name of the file, not what it holds.
    samples[0]
    assert len(pickle.dumps(samples)) < 2000
    assert any(str(tmp_path) in remark for remark in job.remarks)


def test_a_text_shorter_than_a_block_names_both_lengths(tmp_path: Path) -> None:
    name = written(tmp_path, "too short")
    with pytest.raises(WrongUse, match=r"has 10 tokens \(10 bytes\), and one block takes 65.*most 9 tok"):
        trimtab.load("slm:tiny", data=name).dataset()
    short = trimtab.load("slm:tiny", data=name, seq=9)
    assert short.validation() is None
    assert len(short.dataset()) == short.samples


@pytest.mark.parametrize("vocab", [30_000, 30_016, 50_304])
def test_the_vocabularies_of_the_gpts_are_learnt_from_what_is_here(tmp_path: Path, vocab: int) -> None:
    name = written(tmp_path)
    job = trimtab.load("slm", vocab=vocab, data=name, seq=32)
    tokens = torch.stack([job.dataset()[index][0] for index in range(20)])
    assert int(tokens.max()) < vocab
    with pytest.raises(WrongUse, match="256 kinds of bytes"):
        trimtab.load("slm", vocab=255, data=name).dataset()


@pytest.mark.slow
def test_the_standard_library_becomes_thirty_thousand_pieces_and_comes_back(tmp_path: Path) -> None:
    job = trimtab.load("slm")
    assert len(job.dataset()) == 2_400_000
    (folder,) = (path for path in (tmp_path / "cache" / "text").iterdir() if path.is_dir())
    found = Tokens.from_json((folder / ABOUT).read_bytes(), origin="")
    assert found.byte_pairs().size == 30_000
    assert found.byte_pairs().decode(found.array()) == b"".join(find_text().chunks())
    assert found.size_bytes / found.count > 3.5
    assert np.bincount(found.array()).max() < found.count / 5


# ---------------------------------------------------------------------------------------------- schedule


def test_the_rate_rises_over_the_warm_up_and_falls_to_a_tenth_in_optimizer_steps() -> None:
    job = trimtab.load("slm:tiny", warmup=5, horizon=30)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    schedule = job.schedule(optimizer)
    rates = []
    for _ in range(33):
        rates.append(optimizer.param_groups[1]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(job.rate / 6)
    assert rates[5] == job.rate == max(rates)
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[30] == rates[32] == pytest.approx(job.rate / 10)
    # Without a horizon of its own, that of the job: 4800 samples in steps of 16, twice.
    whole = trimtab.load("slm:tiny", epochs=2).schedule(optimizer).lr_lambdas[0]
    assert whole(599) > whole(600) == pytest.approx(0.1) == learning_rate_share(600, warmup=10, horizon=600)


@pytest.mark.parametrize("betas", ["[0.9]", "[0.9, 1.0]", "[0.9, -0.1]", "[0.9, 0.95, 0.99]", '["a", "b"]'])
def test_betas_that_cannot_be_are_refused(betas: str) -> None:
    job = trimtab.load("slm:tiny", betas=betas)
    with pytest.raises(WrongUse, match="two, each from 0 to below 1"):
        job.optimizer(job.model().parameters())
