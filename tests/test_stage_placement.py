"""A pipeline stage holds what it uses outside of the blocks, and as many bytes as are predicted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_jobs
from stage_jobs import DecoderJob
from trimtab.catalog.clusters import parse_cluster
from trimtab.engine.pipeline_stage import find_block_chain, keep_stage
from trimtab.engine.stage_placement import find_holders
from trimtab.engine.step import find_stage_split, make_meta_loss
from trimtab.errors import JobFailed
from trimtab.spec import Incident, Mesh, Recompute, Schedule, Setting, Strategy, Trace
from trimtab.spec.trace import PARTS
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.training.run import Run
from worlds import everywhere

SAMPLES = 8


def make_setting(mesh: Mesh, **options: Any) -> Setting:
    return Setting(
        strategy=Strategy.PIPELINE,
        mesh=mesh,
        micro_batch=2,
        accumulation=SAMPLES // (2 * mesh.data_parallel),
        global_batch=SAMPLES,
        **options,
    )


def place(how: str, stages: int = 4, **options: Any) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the ranks that hold each parameter outside of the blocks, and the note on them."""
    job = DecoderJob(how)
    model, setting = job.model(), make_setting(Mesh(pp=stages), **options)
    split = find_stage_split(model, setting, make_meta_loss(job, setting))
    blocks = list(find_block_chain(model).blocks.children())
    return find_holders(model, blocks, split.needs, split.layers, stages)[0].ranks, split.held_note


FIRST, LAST, EVERY = (0,), (3,), (0, 1, 2, 3)
USUAL = {"places": FIRST, "scale": EVERY, "words.weight": FIRST, "norm.weight": LAST, "norm.bias": LAST,
         "head.weight": LAST}  # fmt: skip


@pytest.mark.parametrize(
    ("how", "other"),
    [
        ("", {}),
        ("tied", {"words.weight": (0, 3)}),
        # Every block gets it, or the third one, or only what goes into the first.
        ("beside", {"scale": EVERY}),
        ("third", {"scale": (0, 2)}),
        ("written", {"scale": FIRST}),
        ("decides", {"scale": EVERY}),
    ],
)
def test_what_is_outside_of_the_blocks_is_where_it_is_used(how: str, other: dict[str, Any]) -> None:
    holders, note = place(how)
    expected = USUAL | other
    if how == "tied":
        del expected["head.weight"]
    assert holders == expected
    assert ("scale" in note) == (how in {"", "tied", "decides"}), note


def test_virtual_stages_of_a_rank_hold_what_any_of_them_uses() -> None:
    holders, _ = place("third", 2, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    assert holders["scale"] == holders["words.weight"] == (0,)
    assert holders["head.weight"] == (1,)


@pytest.mark.parametrize("how", ["", "tied", "beside", "third", "written"])
def test_stages_with_fewer_blocks_hold_what_the_whole_ones_do(how: str) -> None:
    job = DecoderJob(how)
    model, setting = job.model(), make_setting(Mesh(pp=2))
    split = find_stage_split(model, setting, make_meta_loss(job, setting))
    chain: Any = find_block_chain(model).blocks
    blocks = list(chain.children())
    short = split.shorten((1, 2))
    assert sum(split.layers) == len(blocks) > sum(short.layers)
    holders = find_holders(model, blocks, split.needs, split.layers, 2)
    del chain[3:]
    assert find_holders(model, blocks[:3], short.needs, short.layers, 2) == holders


@pytest.mark.parametrize(
    ("how", "why"), [("statistics", "changes buffers"), ("frozen", "stage 1 would have nothing to train")]
)
def test_a_model_whose_parts_cannot_be_apart_is_on_every_stage_and_says_why(how: str, why: str) -> None:
    holders, note = place(how, 2)
    assert set(holders.values()) == {(0, 1)}
    assert why in note


def test_weights_of_another_stage_cannot_be_used_unnoticed() -> None:
    job = DecoderJob()
    model, setting = job.model(), make_setting(Mesh(pp=2))
    split = find_stage_split(model, setting, make_meta_loss(job, setting))
    batch = job.batch(2)
    kept = keep_stage(model, 1, 2, lambda given: torch.randn(given.shape, requires_grad=True), split=split)
    assert "words.weight" not in dict(model.named_parameters())
    assert kept.relay.run(lambda: job.loss(model, batch)).item() > 0
    with pytest.raises(JobFailed, match="uses weights of another stage"):
        kept.relay.run(lambda: model(batch, again=True).mean())
    with pytest.raises(JobFailed, match="uses weights of another stage"):
        model.get_submodule("words")(batch)


def hold_state(cases: list[Setting]) -> list[tuple[dict[str, int], list[str]]]:
    """Take steps; return the bytes of weights, gradients and optimizer state, and what was reported."""
    found = []
    for setting in cases:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        job = DecoderJob("tied" if setting.recompute is Recompute.FULL else "")
        seen: list[Incident] = []
        with Run(setting, job=job, listen=seen.append, join_s=60) as run:
            run.prepare()
            torch.manual_seed(1)
            for _ in range(2):
                share = SAMPLES // run.groups.data_parallel
                run.step(job.batch(SAMPLES)[share * run.groups.data_rank :][:share])
            local = [getattr(p, "_local_tensor", p) for p in run.model.parameters()]
            kept = [
                getattr(value, "_local_tensor", value)
                for state in run.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ]
            grads = [p.grad for p in run.model.parameters()]
            sizes = {
                "weights": count_bytes(local),
                "gradients": count_bytes([getattr(grad, "_local_tensor", grad) for grad in grads]),
                "optimizer": count_bytes(kept),
            }
            found.append((sizes, [incident.text for incident in seen]))
    return found


def count_bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count_traced(trace: Trace) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state that are live after the last step."""
    live = {number for number in trace.order if number >= 0} - {~event for event in trace.order if event < 0}
    parts = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for number in live:
        if (part := PARTS[trace.parts[number]]) in parts:
            parts[part] += trace.sizes[number]
    return parts


@pytest.mark.slow
def test_a_process_of_each_stage_holds_the_bytes_that_are_predicted() -> None:
    cases = [
        make_setting(Mesh(pp=4)),
        make_setting(Mesh(pp=2, dp_shard=2), recompute=Recompute.FULL),
        make_setting(Mesh(pp=2, dp_replicate=2), schedule=Schedule.ZERO_BUBBLE),
    ]
    reports = everywhere(4, hold_state, cases, timeout_s=300)
    for number, setting in enumerate(cases):
        how = "tied" if setting.recompute is Recompute.FULL else ""
        asked = TraceRequests(
            job=f"{Path(stage_jobs.__file__)}:DecoderJob",
            settings=(setting,),
            device=parse_cluster("H100").devices[0],
            overrides={"how": how},
        )
        with WorkerProcess() as worker:
            (answer,) = worker.ask_all(asked, timeout_s=300)
        assert isinstance(answer, dict), answer
        for trace in Trace.from_builtins(answer["trace"]).ranks:
            rank = trace.part * (4 // setting.mesh.pp)
            predicted = count_traced(trace)
            for part, size in reports[rank][number][0].items():
                assert abs(predicted[part] - size) <= 512, (setting.mesh, trace.rank, part)
        # One rank says what all of them have found.
        notes = [report[number][1] for report in reports]
        assert notes[1:] == [[], [], []]
        assert len(notes[0]) == 1
        assert notes[0][0].startswith("pipeline at step 0: loss() reads their values")
        assert notes[0][0].endswith("every stage holds scale")
