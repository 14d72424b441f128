"""naics: the network against a naive one, the codes and their relations, what is learnt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bench.naics_naive import Naive
from torch.utils.data import default_collate

import trimtab
from trimtab.errors import UnknownName, WrongUse
from trimtab.jobs.naics.codes import (
    BEGIN,
    COUNTS,
    END,
    LENGTHS,
    LEVELS,
    RELATION_NAMES,
    UNRELATED,
    build_codes,
    code_words,
    make_text,
    make_tokens,
)
from trimtab.jobs.naics.pairs import Pairs, allowed_negatives, read_pairs, select_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def some_rows(job: Any, count: int = 5) -> Any:
    data = job.dataset()
    return default_collate([data[index] for index in range(0, 7 * count, 7)])


@pytest.mark.parametrize("curvature", [1.0, 0.4])
def test_loss_and_gradients_are_those_of_a_naive_step(curvature: float) -> None:
    job = trimtab.load("naics:tiny", curvature=curvature, balance=0.5)
    torch.manual_seed(0)
    ours = job.model().double()
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if name.endswith(".up"):
                # They start at zero, where an adapter that is left out would not be missed.
                weight.normal_(std=0.1)
    naive: Any = Naive(ours)
    batch = some_rows(job)
    loss, slow = job.loss(ours, batch), naive(batch)
    assert loss.item() == pytest.approx(slow.item(), rel=1e-12)
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in ours.named_parameters()
        if parameter.grad is not None
    }
    ours.zero_grad()
    slow.backward()
    for channel, encoder in naive.encoders.items():
        for number, layer in enumerate(encoder.layers):
            here = f"encoders.{channel}.layers.{number}"
            inward = (layer.query, layer.key, layer.value)
            close(gradients[f"{here}.inward.down"], torch.cat([one.a.weight.grad for one in inward]))
            close(gradients[f"{here}.inward.up"], torch.stack([one.b.weight.grad for one in inward]))
            for mine, its in (("outward", "output"), ("wide", "wide"), ("narrow", "narrow")):
                close(gradients[f"{here}.{mine}.down"], getattr(layer, its).a.weight.grad)
                close(gradients[f"{here}.{mine}.up"][0], getattr(layer, its).b.weight.grad)
    favourites = [number for number, expert in enumerate(naive.experts) if expert[0].weight.grad is not None]
    assert len(favourites) > 1
    for number, expert in enumerate(naive.experts):
        if number in favourites:
            close(gradients["mixture.inward"][number], expert[0].weight.grad.T)
            close(gradients["mixture.outward_bias"][number, 0], expert[3].bias.grad)
        else:
            assert not gradients["mixture.inward"][number].any()
    for name in ("projection.weight", "hyperbolic.weight"):
        close(gradients[name], dict(ours.named_parameters())[name].grad)
    close(gradients["mixture.gate.weight"], ours.mixture.gate.weight.grad)
    # All that learns but the poolers', which the mean of the tokens passes by.
    assert len(gradients) == sum(
        parameter.requires_grad and "pooler" not in name for name, parameter in ours.named_parameters()
    )


def close(mine: torch.Tensor, its: torch.Tensor) -> None:
    torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


def test_padding_changes_nothing() -> None:
    job = trimtab.load("naics:tiny", text=12)
    torch.manual_seed(0)
    model = job.model().double()
    batch = some_rows(job, 2)
    longer = {name: torch.nn.functional.pad(ids, (0, 3)) for name, ids in batch.items()}
    assert job.loss(model, longer).item() == pytest.approx(job.loss(model, batch).item(), rel=1e-12)


@pytest.mark.slow
def test_a_step_compiles_as_one_graph() -> None:
    job = trimtab.load("naics:tiny")
    model, batch = job.model(), some_rows(job, 2)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(batch).item() == pytest.approx(model(batch).item(), rel=1e-5)


# codes, relations, texts


def test_the_tree_has_the_shape_of_the_real_one() -> None:
    tree = build_codes()
    assert len(tree.names) == len({*tree.names}) == 2125
    assert tuple(int((tree.levels == level).sum()) for level in LEVELS) == COUNTS
    for name, level, line in zip(tree.names, tree.levels, tree.lines, strict=True):
        assert len(name) == level
        above = [tree.names[one] for one in line if one >= 0]
        assert above == [name[:digits] for digits in range(2, level + 1)]
        assert "0" not in name[2:]


@pytest.mark.parametrize("total", [10, 11, 17, 120, 9000])
def test_trees_of_other_sizes_have_that_many_codes_and_every_level(total: int) -> None:
    tree = build_codes(total)
    assert len({*tree.names}) == total
    assert {*tree.levels.tolist()} == {*LEVELS}
    parents = {name[:-1] for name in tree.names if len(name) > 2}
    assert parents == {name for name in tree.names if len(name) < 6}


@pytest.mark.parametrize("total", [0, 9, 9001])
def test_a_tree_that_cannot_be_is_refused(total: int) -> None:
    with pytest.raises(WrongUse, match="takes 10 to 9,000 codes"):
        trimtab.load("naics", codes=total).dataset()


def relation(text: str, other: str) -> str:
    tree = build_codes()
    number = tree.relations_to(tree.names.index(text))[tree.names.index(other)]
    return RELATION_NAMES[number - 1] if number else ""


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("11111", "11111", ""),
        ("11111", "111111", "child"),
        ("11111", "1111", "parent"),
        ("11111", "11112", "sibling"),
        ("11111", "11121", "cousin"),
        ("111111", "11112", "uncle"),
        ("11112", "111111", "nephew"),
        ("11", "1111", "grandchild"),
        ("111111", "11", "great-great-grandparent"),
        ("111111", "112111", "third-cousin"),
        ("111111", "121111", UNRELATED),
        ("11", "12", UNRELATED),
    ],
)
def test_relations_are_named_as_in_a_family(text: str, other: str, expected: str) -> None:
    assert relation(text, other) == expected


def test_relations_are_the_same_seen_from_either_end() -> None:
    tree = build_codes(60)
    for index in range(60):
        up, down = tree.steps_from(index)
        for other in range(60):
            back_up, back_down = tree.steps_from(other)
            assert (up[other], down[other]) == (back_down[index], back_up[index])


def test_texts_are_always_the_same_and_near_codes_share_words() -> None:
    tree = build_codes()
    assert make_text(tree, 5, "description") == make_text(tree, 5, "description")
    own = {name: {*code_words(tree, tree.names.index(name))} for name in ("11111", "11112", "11211", "12111")}
    near, far, other = (len(own["11111"] & own[name]) for name in ("11112", "11211", "12111"))
    assert near > far > other
    empty = [code for code in range(400) if not make_text(tree, code, "excluded")]
    assert 50 < len(empty) < 150


def test_tokens_begin_and_end_fit_their_length_and_stay_in_the_vocabulary() -> None:
    for channel in LENGTHS:
        found = make_tokens(120, channel, 16, 300)
        assert found.shape == (120, 16)
        assert found.max() < 300
        assert (found[:, 0] == BEGIN).all()
        assert ((found == END).sum(axis=1) == 1).all()
        # Nothing but padding after the end.
        assert (np.diff((found > 0).astype(int), axis=1) <= 0).all()


# which are set against which


def test_rows_keep_to_levels_relations_distances_and_margins() -> None:
    tree = build_codes(200)
    pairs = read_pairs(
        {
            "anchor_level": 5,
            "positive_relation": ["sibling", "child"],
            "negative_level": [4, 5, 6],
            "negative_relation": ["cousin", "second_cousin", "unrelated"],
            "distance_margin": 2,
            "relation_margin": [7, 16, 22, 24],
        }
    )
    anchors, positives = select_rows(tree, pairs, 3)
    assert len(anchors)
    assert {*tree.levels[anchors].tolist()} == {5}
    for anchor, positive in zip(anchors.tolist(), positives.tolist(), strict=True):
        ranks = tree.relations_to(anchor)
        up, down = tree.steps_from(anchor)
        steps = up + down
        assert RELATION_NAMES[ranks[positive] - 1] in ("sibling", "child")
        for negative in allowed_negatives(tree, pairs, anchor, positive).tolist():
            assert RELATION_NAMES[ranks[negative] - 1] in ("cousin", "second-cousin", "unrelated")
            assert tree.levels[negative] >= 4
            assert steps[negative] - steps[positive] >= 2
            assert ranks[negative] - ranks[positive] in (7, 16, 22, 24)


def test_an_anchor_has_as_many_rows_as_positives_are_asked_for_and_unlike_ones_first() -> None:
    tree = build_codes(200)
    anchors, positives = select_rows(tree, Pairs(), 4)
    assert len(anchors) == 200 * 4
    ranks = tree.relations_to(int(anchors[0]))
    near = int(np.isin(ranks, [1, 2, 3]).sum())
    assert len({*positives[:4].tolist()}) == min(4, near)
    job = trimtab.load("naics", codes=200, positives=4)
    assert len(job.dataset()) == 800
    assert len(trimtab.load("naics", codes=200, positives=4, samples=10).dataset()) == 10


def test_a_row_is_an_anchor_a_positive_and_unlike_negatives() -> None:
    data = trimtab.load("naics:tiny", negatives=9).dataset()
    for index in range(0, 320, 40):
        anchor, positive, *negatives = data.row_codes(index).tolist()
        assert len({anchor, positive, *negatives}) == 11
    with pytest.raises(IndexError):
        data.row_codes(320)


def test_too_few_negatives_are_repeated_and_none_at_all_is_an_error() -> None:
    pairs = {"anchor_level": 2, "positive_relation": "child", "negative_level": 2}
    anchor, _, *negatives = trimtab.load("naics", codes=10, pairs=pairs, negatives=5).dataset().row_codes(0)
    # There is one other sector.
    assert len(negatives) == 5
    assert len({*negatives}) == 1
    assert anchor not in negatives
    none = {"anchor_level": 6, "positive_relation": "child"}
    with pytest.raises(WrongUse, match=r"none of .* codes is an anchor with a positive and a negative"):
        trimtab.load("naics", codes=40, pairs=none).dataset()


@pytest.mark.parametrize(
    ("given", "error", "found"),
    [
        ({"anchor_levels": 5}, UnknownName, "did you mean anchor_level"),
        ({"anchor_level": 1}, WrongUse, "it is not one of 2 to 6"),
        ({"anchor_level": True}, WrongUse, "it is not one of 2 to 6"),
        ({"positive_relation": "aunt"}, UnknownName, "no such relation"),
        ({"relation_margin": 2.5}, WrongUse, "it is not one of 0 to 24"),
    ],
)
def test_conditions_that_cannot_be_are_refused(
    given: dict[str, Any], error: type[WrongUse], found: str
) -> None:
    with pytest.raises(error, match=found):
        read_pairs(given)


def test_texts_longer_than_the_positions_are_refused() -> None:
    with pytest.raises(WrongUse, match="texts of 513 tokens: the encoders have 512 positions"):
        trimtab.load("naics", text=513)


def test_the_rate_rises_and_stays() -> None:
    job = trimtab.load("naics:tiny", warmup=4)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = job.optimizer([weight])
    schedule = job.schedule(optimizer)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"] / (job.rate * job.pace))
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_distances_of_points_far_out_are_exact_in_fp32() -> None:
    from trimtab.jobs.naics.job import lorentz_distance, on_hyperboloid

    torch.manual_seed(0)
    tangent = torch.randn(64, 1, 17, dtype=torch.float64)
    tangent = 5.0 * tangent / tangent[..., 1:].norm(dim=-1, keepdim=True)
    near = tangent + 1e-3 * torch.randn_like(tangent)
    exact = lorentz_distance(on_hyperboloid(tangent), on_hyperboloid(near))
    single = lorentz_distance(on_hyperboloid(tangent.float()), on_hyperboloid(near.float()))
    assert (single.double() / exact - 1).abs().max() < 0.01
