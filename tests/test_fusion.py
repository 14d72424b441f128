"""What torch.compile would fuse, guessed from an eager trace: who reads what, and what reaches memory."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from test_time import H200, matrix
from trimtab.predict import communication, step_time
from trimtab.predict.calibration import find_speed
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.fusion import (
    choose_operands,
    find_compiled,
    fuse_trace,
    infer_flow,
    pad_product,
    uses_channels_last,
)
from trimtab.predict.memory import add_accumulation
from trimtab.spec import PARTS, Precision, Recompute, Setting, Trace, Work
from trimtab.spec.trace import ENTER, LEAVE
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("fusion")  # its fixture is made once
PLAIN = Setting(micro_batch=1, global_batch=1, precision=Precision.FP32, compile=True)
KNOWN = find_speed(H200) or pytest.fail("the H200 has a speed")
PACE = KNOWN.pace
MIB = 2**20


def work(op: str, kind: str, read: int, write: int, *dims: int, dtype: str = "float32") -> Work:
    return Work(
        op=f"aten::{op}",
        kind=kind,
        dtype=dtype,
        read_bytes=read * MIB,
        write_bytes=write * MIB,
        dims=dims or (0, 1024),
    )


def product(read: int, write: int) -> Work:
    return work("mm", "matrix", read, write, 1, 4096, 4096, 1024, 16)


class Script:
    """A step written down: operations with the sizes of their results in MiB, and what is given back."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.order: list[int] = []
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.ops: list[str] = []
        self.backward: int | None = None

    def run(self, done: Work, *results: int, part: str = "activations") -> list[int]:
        """An operation; gives the numbers of what it made."""
        self.works.append(done)
        made = []
        for size in results:
            made.append(len(self.sizes))
            self.order.append(made[-1])
            self.sizes.append(size * MIB)
            self.parts.append(PARTS.index(part))
            self.ops.append(done.op)
        return made

    def free(self, *numbers: int) -> None:
        self.order += [~number for number in numbers]

    def trace(self) -> Trace:
        names = tuple(dict.fromkeys(self.ops))
        count = len(self.sizes)
        backward = len(self.works) if self.backward is None else self.backward
        return Trace(
            order=tuple(self.order),
            sizes=tuple(self.sizes),
            streams=(0,) * count,
            parts=tuple(self.parts),
            modules=(0,) * count,
            ops=tuple(names.index(op) for op in self.ops),
            module_names=("",),
            op_names=names,
            marks={},
            works=tuple(dict.fromkeys(self.works)),
            sequence=tuple(list(dict.fromkeys(self.works)).index(work) for work in self.works),
            phases={"forward": 0, "backward": backward, "optimizer": len(self.works)},
        )


def moved(trace: Trace) -> list[tuple[str, int, int]]:
    """Kind, MiB read and MiB written of every kernel that inductor would write."""
    found = [trace.works[number] for number in trace.sequence]
    return [
        (one.kind, round(one.read_bytes / MIB), round(one.write_bytes / MIB))
        for one in found
        if one.op == "fused"
    ]


def test_operands_are_the_tensors_that_add_up() -> None:
    assert choose_operands(100, (60, 40, 30)) == (((0, 60), (1, 40)), 0)
    # The latest is preferred, a pair before three of one size.
    assert choose_operands(75, (25, 25, 25, 50)) == (((0, 25), (3, 50)), 0)
    # Of something larger a part is read; and what cannot be told is left over.
    assert choose_operands(10, (40,)) == (((0, 10),), 0)
    assert choose_operands(100, (60,)) == (((0, 60),), 40)
    assert choose_operands(100, ()) == ((), 100)
    assert choose_operands(0, (1, 2)) == ((), 0)


def between_products() -> Script:
    """A product, a chain of three, and a product that reads the end of it."""
    script = Script()
    (logits,) = script.run(product(64, 100), 100)
    (first,) = script.run(work("mul", "pointwise", 100, 100), 100)
    (second,) = script.run(work("add", "pointwise", 200, 100), 100)
    script.free(first, logits)
    (third,) = script.run(work("gelu", "pointwise", 100, 100), 100)
    script.free(second)
    (end,) = script.run(product(100, 40), 40)
    script.free(third, end)
    return script


def test_the_flow_says_who_made_what_is_read() -> None:
    found = infer_flow(between_products().trace())
    assert [[read.tensor for read in reads] for reads in found.reads] == [[], [0], [1, 0], [2], [3]]
    assert found.makes == [(0,), (1,), (2,), (3,), (4,)]
    assert found.unknown[0] == 64 * MIB


def test_a_workspace_is_no_result() -> None:
    script = Script()
    script.run(work("sum", "reduction", 100, 1), 1)
    script.order.append(len(script.sizes))
    script.sizes.append(50 * MIB)
    script.parts.append(PARTS.index("workspace"))
    script.ops.append("aten::sum")
    script.free(1)
    script.run(work("mul", "pointwise", 1, 1), 1)
    assert infer_flow(script.trace()).makes == [(0,), (2,)]


def test_neighbours_between_products_become_one_kernel_that_reads_and_writes_once() -> None:
    found = fuse_trace(between_products().trace(), PLAIN, PACE)
    assert moved(found) == [("pointwise", 100, 100)]
    assert [found.works[number].op for number in found.sequence] == ["aten::mm", "fused", "aten::mm"]
    assert not found.faults()


def cross_entropy(row: int) -> Script:
    """Logits of a product, cast, softmax and loss; what eager code keeps is read again behind."""
    script = Script()
    (logits,) = script.run(product(64, 100), 100)
    (cast,) = script.run(work("_to_copy", "pointwise", 100, 200, dtype="bfloat16"), 200)
    (chances,) = script.run(work("_log_softmax", "reduction", 200, 200, 0, row), 200)
    script.free(cast)
    (loss,) = script.run(work("nll_loss_forward", "reduction", 0, 0, 0, row), 0)
    script.backward = len(script.works)
    (picked,) = script.run(work("nll_loss_backward", "reduction", 0, 200, 0, row), 200)
    (slope,) = script.run(work("_log_softmax_backward_data", "reduction", 400, 200, 0, row), 200)
    script.free(picked, chances)
    (back,) = script.run(work("_to_copy", "pointwise", 200, 100), 100)
    script.free(slope)
    (end,) = script.run(product(100, 64), 64)
    script.free(back, end, logits, loss)
    return script


def test_what_eager_code_keeps_is_computed_again_and_long_rows_are_read_twice() -> None:
    large = [one for one in moved(fuse_trace(cross_entropy(50304).trace(), PLAIN, PACE)) if one[1]]
    # Forward the logits are read, and nothing is written; behind they are read twice, and a slope written.
    assert large == [("reduction", 100, 0), ("reduction", 100, 0), ("pointwise", 100, 100)]


def test_short_rows_stay_in_a_cache() -> None:
    large = [one for one in moved(fuse_trace(cross_entropy(1024).trace(), PLAIN, PACE)) if one[1]]
    assert large == [("reduction", 100, 0), ("reduction", 100, 100)]


def test_a_norm_over_the_batch_takes_two_passes() -> None:
    script = Script()
    script.run(product(64, 100), 100)
    script.run(work("native_batch_norm", "reduction", 100, 100, 0, 56), 100)
    script.run(work("relu", "pointwise", 100, 100), 100)
    script.run(product(100, 40), 40)
    assert moved(fuse_trace(script.trace(), PLAIN, PACE)) == [("reduction", 100, 0), ("pointwise", 100, 100)]


def test_the_gradient_of_a_bias_is_a_kernel_of_its_own() -> None:
    script = Script()
    script.backward = 0
    script.run(product(64, 100), 100)
    script.run(work("gelu_backward", "pointwise", 100, 100), 100)
    script.run(product(100, 40), 40)
    script.run(work("sum", "reduction", 100, 1), 1)
    assert ("reduction", 100, 1) in moved(fuse_trace(script.trace(), PLAIN, PACE))


def test_a_trace_that_says_nothing_of_memory_still_has_kernels() -> None:
    bare = between_products().trace().replace(order=(), sizes=(), streams=(), parts=(), modules=(), ops=())
    found = fuse_trace(bare, PLAIN, PACE)
    assert moved(found) == [("pointwise", 100, 100), ("pointwise", 200, 100), ("pointwise", 100, 100)]
    assert fuse_trace(bare.replace(works=(), sequence=(), phases={}), PLAIN, PACE).sequence == ()


def test_a_loss_outside_of_the_model_stays_eager_and_so_does_its_backward_pass() -> None:
    enter, leave = (Work(op=op, kind="call", dtype="", kernels=0) for op in (ENTER, LEAVE))
    one = work("mul", "pointwise", 1, 1)
    seed = work("ones_like", "pointwise", 0, 0)
    works = [one, enter, one, leave, one, seed, one, one, one, one]
    assert find_compiled(works, 6, 9) == [False, True, True, True, False, False, False, True, True, False]
    # A trace that does not say is taken for the model.
    assert find_compiled([one] * 4, 2, 3) == [True, True, True, False]


def convolution(groups: int, outer: int, inner: int, area: int) -> Work:
    dims = (groups, 10**6, outer // groups, inner * area, 0, area)
    return Work(op="aten::convolution", kind="convolution", dtype="bfloat16", flops=10**9, dims=dims)


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([convolution(1, 64, 3, 49), convolution(1, 256, 64, 9)], True),
        ([convolution(32, 256, 8, 9)], False),  # grouped
        ([convolution(256, 256, 1, 9)], True),  # one channel a group
        ([convolution(1, 64, 256, 9)], False),  # far fewer channels out than in
        ([convolution(1, 64, 64, 9)], False),  # all small
        ([convolution(1, 256, 256, 31)], False),  # over time, not over images
        ([convolution(1, 256, 256, 9), *[work("mul", "pointwise", 1, 1)] * 400], False),  # one among many
        ([], False),
    ],
)
def test_images_are_laid_out_as_inductor_would(works: list[Work], expected: bool) -> None:
    assert uses_channels_last(works) is expected


def test_awkward_sides_are_padded_where_that_is_faster() -> None:
    odd = matrix(65536, 50257, 768, 2)
    copy, even = pad_product(odd, PACE)
    assert even.dims == (1, 65536, 50264, 768, 16)
    assert copy.read_bytes == 2 * 50257 * 768
    assert PACE.seconds(copy) + PACE.seconds(even) < 0.5 * PACE.seconds(odd)
    assert pad_product(matrix(4096, 4096, 1024), PACE) == (matrix(4096, 4096, 1024),)
    # So small a product is bound by memory: inductor does not ask.
    thin = matrix(65536, 9, 13, 2)
    assert pad_product(thin, PACE) == (thin,)


def test_autocast_holds_in_a_compiled_backward_pass() -> None:
    script = Script()
    large = matrix(4096, 4096, 1024, dtype="float32")
    script.run(large, 32)
    script.backward = 1
    script.run(large, 32)
    by_autocast = fuse_trace(script.trace(), PLAIN.replace(precision=Precision.BF16), PACE)
    assert [by_autocast.works[one].dtype for one in by_autocast.sequence] == ["float32", "bfloat16"]
    assert len(set(fuse_trace(script.trace(), PLAIN, PACE).sequence)) == 1


JOB = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.body = nn.Sequential(
            nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)
        )
        self.head = nn.Linear(256, 5000)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.body(x))

class Words:
    name, global_batch, samples = "words", 8, 8
    def model(self): return Model()
    def batch(self, size): return torch.randint(0, 5000, (size, 512))
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())

class Inside(Words):
    def model(self):
        whole = Model()
        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.whole = whole
            def forward(self, ids):
                return nn.functional.cross_entropy(self.whole(ids).flatten(0, 1).float(), ids.flatten())
        return Both()
    def loss(self, model, batch): return model(batch)
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    file: Path = tmp_path_factory.mktemp("jobs") / "words.py"
    file.write_text(textwrap.dedent(JOB), encoding="utf-8")
    setting = Setting(micro_batch=8, global_batch=8)
    return {
        name: trace_setting(TraceRequest(job=f"{file}:{name}", setting=setting, device=H200), cache=False)
        for name in ("Words", "Inside")
    }


def traffic(trace: Trace) -> int:
    return sum(
        trace.works[one].read_bytes + trace.works[one].write_bytes
        for one in trace.sequence
        if trace.works[one].kind in ("pointwise", "reduction", "gather")
    )


def test_a_traced_job_moves_less_and_launches_less_when_compiled(words: dict[str, Trace]) -> None:
    setting = Setting(micro_batch=8, global_batch=8, compile=True)
    eager = words["Inside"]
    found = fuse_trace(eager, setting, PACE)
    assert not found.faults()
    assert traffic(found) < 0.7 * traffic(eager)
    launches = [sum(one.works[number].kernels > 0 for number in one.sequence) for one in (found, eager)]
    assert launches[0] < 0.8 * launches[1]
    # Products stay: as many as before, in the same phases.
    for name in ("backward", "optimizer"):
        before, after = eager.sequence[: eager.phases[name]], found.sequence[: found.phases[name]]
        assert sum(eager.works[one].kind == "matrix" for one in before) == sum(
            found.works[one].kind == "matrix" for one in after
        )
    # And what lies in memory is not fused's to say.
    assert found.order == eager.order


def test_a_loss_inside_of_the_model_is_fused_and_one_outside_is_not(words: dict[str, Trace]) -> None:
    setting = Setting(micro_batch=8, global_batch=8, compile=True)
    within, without = (fuse_trace(words[name], setting, PACE) for name in ("Inside", "Words"))
    eager = {work.op for work in without.works}
    assert "aten::_log_softmax" in eager
    assert "aten::_log_softmax_backward_data" in eager
    assert not any("softmax" in work.op for work in within.works)
    assert traffic(within) < 0.75 * traffic(without)
    alone = communication.Links(1.0, 1.0, 1, 1)
    seconds = [
        step_time.estimate_step(
            words["Inside"], setting.replace(compile=one), PACE, KNOWN.host, alone, fusing=one
        ).total_s
        for one in (True, False)
    ]
    assert seconds[0] < seconds[1]


def test_the_guess_of_memory_is_wider_where_blocks_are_recomputed(words: dict[str, Trace]) -> None:
    setting = Setting(micro_batch=8, global_batch=8, compile=True)
    plain = estimate_trace(words["Inside"], setting, H200, fusing=True)[0]
    again = estimate_trace(words["Inside"], setting.replace(recompute=Recompute.FULL), H200, fusing=True)[0]
    assert plain.band.high_bytes < again.band.high_bytes
    assert plain.process_bytes == again.process_bytes


@pytest.mark.parametrize(("first", "eager", "compiled"), [(500, 100, 100), (10, 60, 100)])
def test_sums_of_gradients_lie_beside_the_new_ones(first: int, eager: int, compiled: int) -> None:
    """Where the peak is forward they add themselves; at its end one new gradient, or all, compiled."""
    script = Script()
    script.free(*script.run(product(64, first), first))
    script.run(product(64, 40), 40, part="gradients")
    script.run(product(64, 60), 60, part="gradients")
    trace = script.trace().replace(marks={"step1": 0, "step2": len(script.order)})
    setting = Setting(micro_batch=1, global_batch=1)
    once = estimate_trace(trace, setting, H200)[0]
    assert add_accumulation(once, trace, setting) == once
    several = setting.replace(accumulation=4, global_batch=4)
    for compiles, expected in ((False, eager), (True, compiled)):
        found = add_accumulation(once, trace, several.replace(compile=compiles))
        assert found.process_bytes - once.process_bytes == expected * MIB
        assert found.band.high_bytes - once.band.high_bytes == expected * MIB
