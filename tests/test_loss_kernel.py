"""Gradients of a loss overwrite its logits, and slm's products have the same gradients in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.jobs.head import IGNORE_INDEX
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
    losses = torch.ops.trimtab.token_loss_slopes(logits, labels, shares.to(wide))
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=near, atol=near)
    torch.testing.assert_close(logits.double(), slopes, rtol=near, atol=near)
    assert logits.data_ptr() == place
    assert losses.dtype is wide
    assert not logits[3:5].any()


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
            work = describe_work(operation, "trimtab::token_loss_slopes", args, {}, args[2])
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
