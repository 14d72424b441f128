"""Gradients of a loss overwrite its logits, and slm's products have the same gradients in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.jobs import head
from trimtab.jobs.head import IGNORE_INDEX, mean_token_loss
from trimtab.jobs.slm import Attention
from trimtab.trace.op_cost import describe_work


@pytest.mark.parametrize(
    ("kind", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_slopes_are_the_gradients_of_weighted_cross_entropy(kind: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    exact = (torch.randn(6, 40, dtype=torch.float64) * 5).to(kind).double().requires_grad_()
    labels = torch.tensor([0, 39, 7, IGNORE_INDEX, 3, 3])
    shares = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.0, 0.25], dtype=torch.float64)
    wanted = functional.cross_entropy(exact, labels.clamp(min=0), reduction="none") * shares
    (slopes,) = torch.autograd.grad(wanted.sum(), exact)
    logits = exact.detach().to(kind)
    place = logits.data_ptr()
    wide = torch.promote_types(kind, torch.float32)
    losses = torch.ops.trimtab.token_loss_slopes(logits, labels, shares.to(wide), 40)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=near, atol=near)
    torch.testing.assert_close(logits.double(), slopes, rtol=near, atol=near)
    assert logits.data_ptr() == place
    assert losses.dtype is wide
    assert not logits[3:5].any()


def test_columns_beyond_the_vocabulary_have_no_slope() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 48)
    before = logits.clone()
    labels, shares = torch.tensor([0, 39, 7, IGNORE_INDEX, 3, 3]), torch.tensor([1.0, 0.5, 1, 0, 0, 0.25])
    narrow = before[:, :40].contiguous()
    losses = torch.ops.trimtab.token_loss_slopes(logits, labels, shares, 40)
    torch.testing.assert_close(losses, torch.ops.trimtab.token_loss_slopes(narrow, labels, shares, 40))
    torch.testing.assert_close(logits[:, :40], narrow)
    assert not logits[:, 40:].any()


@pytest.mark.parametrize(("vocabulary", "rows"), [(100, 128), (128, 128), (104, 104)])
def test_the_head_of_an_odd_vocabulary_is_padded_on_a_gpu(
    vocabulary: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No GPU is at hand: the CPU takes its place, with the plain form of the kernel.
    torch.manual_seed(0)
    hidden = torch.randn(2, 8, 16, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, 16, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (2, 8))

    def run() -> list[torch.Tensor]:
        leaves = [given.clone().requires_grad_() for given in (hidden, weight)]
        loss = mean_token_loss(leaves[0], leaves[1], targets, pieces=4)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    plain = run()
    padded = functional.pad(weight, (0, 0, 0, rows - vocabulary))
    monkeypatch.setattr(head, "align_rows", lambda table: padded.to(table.dtype))
    for ours, theirs in zip(run(), plain, strict=True):
        assert torch.equal(ours, theirs)
    monkeypatch.undo()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        table = torch.empty(vocabulary, 16, dtype=torch.bfloat16, device="cuda")
        assert head.align_rows(table).shape == (rows, 16)
        assert head.align_rows(table.float()).shape == (vocabulary, 16)


def test_a_long_row_is_counted_twice_and_a_short_one_once() -> None:
    operation = torch.ops.trimtab.token_loss_slopes.default
    labels, shares = torch.zeros(4, dtype=torch.long), torch.ones(4)

    def reads(columns: int) -> float:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            args = tuple(
                torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda")
                for given in (torch.empty(4, columns, dtype=torch.bfloat16, device="meta"), labels, shares)
            )
            work = describe_work(operation, "trimtab::token_loss_slopes", (*args, columns), {}, args[2])
        assert work is not None
        assert work.kind == "reduction"
        return work.read_bytes / (4 * columns * 2)

    assert (reads(50_304), reads(256)) == (2, 1)


def run_attention(layer: Attention, rows: torch.Tensor, *, compiled: bool) -> list[torch.Tensor]:
    # Dynamo does not check hooks: it would take the code that it compiled for a layer without one.
    torch.compiler.reset()
    call: Any = torch.compile(layer, backend="aot_eager") if compiled else layer
    out = call(rows)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [rows, *layer.parameters()])]


def test_three_compiled_products_have_the_gradients_of_one() -> None:
    torch.manual_seed(0)
    layer = Attention(16, 2, 0.0).double()
    rows = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        run_attention(layer, rows, compiled=True), run_attention(layer, rows, compiled=False)
    )


def test_a_compiled_layer_with_a_hook_is_called_as_a_layer() -> None:
    torch.manual_seed(0)
    layer = Attention(16, 2, 0.0).double()
    layer.inward.register_forward_hook(lambda _, __, out: out * 2)
    rows = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    hooked = run_attention(layer, rows, compiled=True)
    torch.testing.assert_close(hooked, run_attention(layer, rows, compiled=False))
    plain = Attention(16, 2, 0.0).double()
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(hooked[0], run_attention(plain, rows, compiled=True)[0])


# Dynamo itself makes an object of an autograd function, to follow it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_slm_has_the_loss_and_gradients_of_the_plain_one() -> None:
    job = trimtab.load("slm:tiny", layers=1, global_batch=2)
    torch.manual_seed(0)
    model = job.model().double()
    batch = job.batch(2)

    def answer(call: nn.Module) -> list[torch.Tensor]:
        loss = job.loss(call, batch)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(answer(compiled), answer(model))
