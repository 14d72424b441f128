"""Traces of few equal blocks give the trace of many: the pure part, and the same job traced both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trimtab.catalog.clusters import parse_cluster
from trimtab.predict.derive import has_same_program
from trimtab.predict.memory import estimate_memory
from trimtab.spec import Mesh, Precision, Recompute, Schedule, Setting, Strategy, Trace, Work
from trimtab.trace.extend_blocks import extend_blocks, match_blocks
from trimtab.trace.repeated_blocks import EAGER, are_blocks_equal, cut_blocks, find_cuttable_lists
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.trace.workspace_formulas import count_launches

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


class Writer:
    """Writes a trace down by hand."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.sizes: list[int] = []
        self.modules: list[str] = []
        self.works: list[Work] = []
        self.marks: dict[str, int] = {}

    def alloc(self, size: int, module: str = "") -> int:
        self.order.append(len(self.sizes))
        self.sizes.append(size)
        self.modules.append(module)
        return len(self.sizes) - 1

    def free(self, number: int) -> None:
        self.order.append(~number)

    def work(self, op: str, *dims: int, kind: str = "pointwise") -> None:
        kernels = count_launches(*dims) if kind == "optimizer" else 1
        made = Work(op=op, kind=kind, dtype="float32", read_bytes=sum(dims), dims=dims, kernels=kernels)
        self.works.append(made)

    def trace(self, phases: dict[str, int], parameters: int) -> Trace:
        count = len(self.sizes)
        names = list(dict.fromkeys(self.modules))
        works = list(dict.fromkeys(self.works))
        return Trace(
            order=tuple(self.order),
            sizes=tuple(self.sizes),
            streams=(0,) * count,
            parts=(3,) * count,
            modules=tuple(names.index(module) for module in self.modules),
            ops=(0,) * count,
            module_names=tuple(names),
            op_names=("aten::mm",),
            marks=self.marks,
            works=tuple(works),
            sequence=tuple(works.index(work) for work in self.works),
            phases=phases,
            parameters=parameters,
            trainable=parameters,
            recomputed=(f"layers ({parameters // 10} blocks)",),
        )


def model(count: int, *, strange: int | None = None, frees_inputs: bool = False) -> Trace:
    """Blocks that keep two tensors each until their backward pass, gradients until the next step.

    With `frees_inputs`, a block keeps a copy of its input, which the next block frees, and not the first one.
    """
    writer = Writer()
    writer.marks["build"] = 0
    for _ in range(count):
        writer.alloc(10 * MIB)
    left: list[int] = []
    phases: dict[str, int] = {}
    for number in range(2):
        writer.marks[f"step{number}"] = len(writer.order)
        writer.works.clear()
        for one in left:
            writer.free(one)
        left = []
        phases["forward"] = 0
        before = writer.alloc(3 * MIB, "embed")
        kept: list[tuple[int, int]] = []
        inputs: list[int] = []
        for block in range(count):
            if frees_inputs and block > 1:
                writer.free(inputs[-1])
            inputs.append(before)
            wide = writer.alloc((5 if block == strange else 4) * MIB, f"layers.{block}.mlp")
            copy = writer.alloc(MIB, f"layers.{block}.copy") if frees_inputs else before
            after = writer.alloc(3 * MIB, f"layers.{block}")
            kept.append((copy, wide))
            writer.work("aten::mm", 4, 4)
            before = after
        logits = writer.alloc(50 * MIB, "head")
        phases["backward"] = len(writer.works)
        writer.free(logits)
        writer.free(before)
        for source, wide in reversed(kept):
            left.append(writer.alloc(10 * MIB))
            writer.work("aten::mm_backward", 4, 4)
            writer.free(wide)
            writer.free(source)
        phases["optimizer"] = len(writer.works)
        norms = writer.alloc(512 * count)
        writer.work("aten::_fused_adamw_", 9 * count, 10 * count, kind="optimizer")
        writer.free(norms)
    writer.marks["end"] = len(writer.order)
    return writer.trace(phases, 10 * count)


@pytest.mark.parametrize("frees_inputs", [False, True])
@pytest.mark.parametrize("count", [4, 5, 6, 16, 80])
def test_few_blocks_give_many_exactly(count: int, *, frees_inputs: bool) -> None:
    few, more, true = (model(each, frees_inputs=frees_inputs) for each in (3, 4, count))
    found = extend_blocks(few, more, blocks="layers", traced=4, total=count)
    assert found is not None
    # Frees in a row may come in any order.
    assert has_same_program(found, true)
    assert found.replace(order=()) == true.replace(order=())


def sharded_model(count: int, *, buffers: int = 1) -> Trace:
    """Blocks whose backward pass allocates buffers of no module; the next block frees them, as FSDP does."""
    writer = Writer()
    writer.marks["build"] = 0
    phases = {"forward": 0}
    writer.marks["step0"] = 0
    kept = []
    for block in range(count):
        kept.append(writer.alloc(4 * MIB, f"layers.{block}"))
        writer.work("aten::mm", 4, 4)
    phases["backward"] = count
    before: list[int] = []
    for block in reversed(range(count)):
        # The last one has no weights to gather for the next.
        ahead = writer.alloc(MIB) if block else 0
        gradient = writer.alloc(3 * MIB, f"layers.{block}")
        writer.free(kept.pop())
        after = [writer.alloc(2 * MIB) for _ in range(buffers)]
        for buffer in before:
            writer.free(buffer)
        before = after
        writer.free(gradient)
        if block:
            writer.free(ahead)
        writer.work("aten::mm_backward", 4, 4)
    for buffer in before:
        writer.free(buffer)
    phases["optimizer"] = len(writer.works)
    writer.marks["end"] = len(writer.order)
    return writer.trace(phases, 10 * count)


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("count", [5, 28])
def test_buffers_between_blocks_are_freed_by_the_next_block(count: int, buffers: int) -> None:
    few, more, true = (sharded_model(each, buffers=buffers) for each in (3, 4, count))
    extended = extend_blocks(few, more, blocks="layers", traced=4, total=count)
    assert extended is not None
    assert has_same_program(extended, true)
    assert extended.replace(order=()) == true.replace(order=())


@given(st.integers(3, 8), st.integers(1, 40))
def test_any_two_give_the_same(few: int, more: int) -> None:
    found = extend_blocks(model(few), model(few + 1), blocks="layers", traced=few + 1, total=few + 1 + more)
    assert found is not None
    assert estimate_memory(found) == estimate_memory(model(few + 1 + more))


def test_a_block_that_is_larger_gives_no_answer() -> None:
    assert extend_blocks(model(3), model(4, strange=2), blocks="layers", traced=4, total=9) is None


def test_traces_of_other_jobs_give_no_answer() -> None:
    other = model(4).replace(op_names=("aten::bmm",))
    assert extend_blocks(model(3), other, blocks="layers", traced=4, total=9) is None


def test_two_more_blocks_at_once_are_no_single_one() -> None:
    found = extend_blocks(model(3), model(5), blocks="layers", traced=4, total=9)
    assert found is None or found.parameters != model(9).parameters


def test_what_is_put_in_is_found_wherever_it_repeats() -> None:
    (zone,) = match_blocks("abcabcx", "abcabcabcx", "abcabcx", "abcabcabcx")
    assert (zone.length, zone.start, zone.end) == (3, 0, 9)


@pytest.mark.parametrize("end", ["", "x"])
def test_a_loop_over_parameters_is_matched_by_their_sizes(end: str) -> None:
    """All kinds are equal, and the sizes of a block repeat within it."""
    few, more = 3 * "abaabc" + end, 4 * "abaabc" + end
    (zone,) = match_blocks(few, more, "p" * len(few), "p" * len(more))
    assert (zone.length, zone.end) == (6, 24)


class Block(nn.Module):
    def __init__(self, width: int, number: int, act: str = "gelu") -> None:
        super().__init__()
        self.layer_idx, self.act = number, act
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 2)


def stack(**strange: Any) -> Stack:
    return Stack([Block(8, number, **(strange if number == 5 else {})) for number in range(EAGER.min_length)])


def test_the_list_of_equal_blocks_is_found_and_cut() -> None:
    made = stack()
    (found,) = find_cuttable_lists(made)
    assert (found.name, found.length) == ("blocks", EAGER.min_length)
    assert len(cut_blocks(found, 3)) == EAGER.min_length - 3
    assert len(made.blocks) == 3


def test_a_list_that_is_a_small_part_of_the_model_is_not_worth_it() -> None:
    made = stack()
    made.others = nn.Sequential(*(nn.Linear(8, 8) for _ in range(200)))
    assert find_cuttable_lists(made) == []


def test_two_lists_are_cut_where_both_are_long() -> None:
    made = stack()
    made.others = nn.ModuleList(Block(8, number) for number in range(2 * EAGER.min_length))
    assert [one.name for one in find_cuttable_lists(made)] == ["others", "blocks"]


def shared() -> Stack:
    made = stack()
    made.blocks[3].inner = made.blocks[7].inner
    return made


def tied() -> Stack:
    made = stack()
    made.other = made.blocks[3].inner
    return made


def frozen() -> Stack:
    made = stack()
    next(made.blocks[0].parameters()).requires_grad = False
    return made


@pytest.mark.parametrize("made", [stack(act="relu"), shared(), tied(), frozen()])
def test_blocks_that_differ_or_share_are_not_equal(made: Stack) -> None:
    assert not are_blocks_equal(made, made.blocks)
    assert find_cuttable_lists(made) == []


JOB = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Block() for _ in range(17))
        self.at = at

    def forward(self, x):
        x, extra = self.embed(x), 0.0
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.at:
                extra = extra + x.float().exp().mean()
        return self.head(x), extra


class Job:
    at = -1

    def model(self):
        return Net(self.at)

    def batch(self, size):
        return torch.randint(0, 100, (size, 32))

    def loss(self, model, batch):
        out, extra = model(batch)
        return nn.functional.cross_entropy(out.flatten(0, 1), batch.flatten()) + extra


class Strange(Job):
    at = 10


class Long(Job):
    def model(self):
        made = Net(-1)
        made.blocks.extend(Block() for _ in range(11))
        return made


class Two(Job):
    # Two lists of different lengths.
    def model(self):
        both = nn.ModuleDict({"a": Net(-1), "b": Net(-1)})
        both["a"].blocks.extend(Block() for _ in range(14))
        both["b"].blocks.extend(Block() for _ in range(12))
        return both

    def loss(self, model, batch):
        return super().loss(model["a"], batch) + super().loss(model["b"], batch)
"""
SETTINGS = [
    (Strategy.SINGLE, Recompute.NONE, Precision.BF16),
    (Strategy.SINGLE, Recompute.FULL, Precision.FP32),
    (Strategy.FSDP, Recompute.SELECTIVE, Precision.BF16),
]


def whole_and_few(folder: Path, name: str, setting: Setting, clip: float | None = 1.0) -> list[Trace]:
    job = folder / "job.py"
    job.write_text(JOB, encoding="utf-8")
    asked = TraceRequests(
        job=f"{job}:{name}", settings=(setting,), device=parse_cluster("H100").devices[0], clip=clip
    )
    found = []
    for whole in (True, False):
        with WorkerProcess() as worker:
            (answer,) = worker.ask_all(asked.replace(whole=whole), timeout_s=300)
        assert isinstance(answer, dict), answer
        # Ranks of a pipeline are traced apart, and do not say how.
        assert name == "Long" or (answer["how"] == "whole") == (whole or name == "Strange")
        found.append(Trace.from_builtins(answer["trace"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "recompute", "precision"),
    [
        pytest.param(*setting, marks=[pytest.mark.slow] * (setting[0] is Strategy.SINGLE))
        for setting in SETTINGS
    ],
)
def test_a_job_traced_by_few_blocks_is_the_job_traced_whole(
    strategy: Strategy,
    recompute: Recompute,
    precision: Precision,
    tmp_path: Path,
) -> None:
    mesh = Mesh(dp_shard=4) if strategy is Strategy.FSDP else Mesh()
    setting = Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=4,
        global_batch=4 * mesh.data_parallel,
        recompute=recompute,
        precision=precision,
    )
    whole, few = whole_and_few(tmp_path, "Job", setting)
    assert has_same_program(whole, few)
    assert few.sizes == whole.sizes
    assert [few.works[one] for one in few.sequence] == [whole.works[one] for one in whole.sequence]
    assert estimate_memory(few) == estimate_memory(whole)
    assert few.parameters == whole.parameters


@pytest.mark.slow
def test_two_lists_of_blocks_are_put_together(tmp_path: Path) -> None:
    setting = Setting(micro_batch=4, global_batch=4, recompute=Recompute.SELECTIVE)
    whole, few = whole_and_few(tmp_path, "Two", setting)
    assert has_same_program(whole, few)
    assert estimate_memory(few) == estimate_memory(whole)
    assert few.recomputed == whole.recomputed == ("a.blocks (31 blocks)", "b.blocks (29 blocks)")


@pytest.mark.slow
def test_what_happens_at_the_tenth_block_is_not_missed(tmp_path: Path) -> None:
    setting = Setting(micro_batch=4, global_batch=4)
    whole, few = whole_and_few(tmp_path, "Strange", setting)
    assert estimate_memory(few) == estimate_memory(whole)
    assert has_same_program(whole, few)


def list_sorted(trace: Trace) -> list[tuple[bool, int, str, str]]:
    """List allocations and frees without their numbers; frees in a row are sorted."""
    entries: list[tuple[bool, int, str, str]] = []
    frees: list[tuple[bool, int, str, str]] = []
    for entry in trace.order:
        number = entry if entry >= 0 else ~entry
        names = trace.op_names[trace.ops[number]], trace.module_names[trace.modules[number]]
        (entries if entry >= 0 else frees).append((entry >= 0, trace.sizes[number], *names))
        if entry >= 0:
            entries[-1:] = [*sorted(frees), entries[-1]]
            frees = []
    return [*entries, *sorted(frees)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "recompute", "schedule"),
    [
        (Mesh(pp=2, dp_shard=2), Recompute.FULL, Schedule.ONE_F_ONE_B),
        (Mesh(pp=2), Recompute.NONE, Schedule.ZERO_BUBBLE),
    ],
)
def test_a_stage_traced_by_few_blocks_is_the_stage_traced_whole(
    mesh: Mesh, recompute: Recompute, schedule: Schedule, tmp_path: Path
) -> None:
    setting = Setting(
        strategy=Strategy.PIPELINE,
        mesh=mesh,
        micro_batch=4,
        accumulation=4,
        global_batch=16 * mesh.data_parallel,
        recompute=recompute,
        schedule=schedule,
    )
    whole, few = whole_and_few(tmp_path, "Long", setting)
    assert list_sorted(few) == list_sorted(whole)
    assert [few.works[place] for place in few.sequence] == [whole.works[place] for place in whole.sequence]
    assert estimate_memory(few) == estimate_memory(whole)
    for field in ("kept_bytes", "handed_bytes", "shared", "stage_layers", "block_work", "parameters"):
        assert getattr(few, field) == getattr(whole, field)
    assert few.stage_layers == (14, 14)
    assert few.recomputed == whole.recomputed
