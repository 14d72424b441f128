"""A compiled model of transformers uses causal attention without a mask exactly where nothing is masked."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from trimtab.engine.compile import CompileSwitch

if TYPE_CHECKING:
    from collections.abc import Callable

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = 16


class Packed(nn.Module):
    """A model of a user that packs two sequences into a sample."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> Any:
        positions = torch.arange(TOKENS)[None].expand(len(input_ids), -1) % (TOKENS // 2)
        return self.inner(input_ids=input_ids, position_ids=positions, use_cache=False)


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def run_noting(run: Callable[[Any], Any]) -> tuple[Any, list[tuple[bool, bool]]]:
    """Return the result of `run(compiler)`, and for each attention: has it a mask, is it causal."""
    calls: list[tuple[bool, bool]] = []

    def note(graph: Any, _: Any) -> Any:
        attentions = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        calls.extend((node.kwargs["attn_mask"] is not None, node.kwargs["is_causal"]) for node in attentions)
        return graph

    torch.compiler.reset()
    return run(functools.partial(torch.compile, backend=note)), calls


def record_masks(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, list[tuple[bool, bool]]]:
    """Return the logits of a call that trimtab compiled, and its attentions."""

    def run(compiler: Any) -> Any:
        switch = CompileSwitch(model, lambda *_: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", compiler)
            switch.prepare_for(2, 2)
        logits = model(**inputs).logits
        switch.disable()
        return logits

    return run_noting(run)


def tokens() -> torch.Tensor:
    return torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_call_without_mask_and_positions_is_causal(name: str, cache: bool) -> None:
    model = build(name)
    plain = model(input_ids=tokens(), use_cache=cache).logits
    logits, calls = record_masks(model, input_ids=tokens(), use_cache=cache)
    assert calls == [(False, True)]
    torch.testing.assert_close(logits, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["attention_mask", "position_ids"])
def test_masks_and_positions_of_the_caller_are_heeded(given: str) -> None:
    model = build("Llama")
    padding = torch.ones(2, TOKENS, dtype=torch.long)
    padding[1, 9:] = 0
    packed = torch.arange(TOKENS)[None].expand(2, -1) % 8
    inputs = {"input_ids": tokens(), "use_cache": False}
    inputs[given] = padding if given == "attention_mask" else packed
    plain = model(**inputs).logits
    logits, calls = record_masks(model, **inputs)
    assert calls == [(True, False)]
    torch.testing.assert_close(logits, plain, rtol=1e-12, atol=1e-12)


def test_positions_that_an_outer_model_computes_are_heeded() -> None:
    model = Packed(build("Llama"))
    plain = model(tokens()).logits
    logits, calls = record_masks(model, input_ids=tokens())
    assert calls == [(True, False)]
    torch.testing.assert_close(logits, plain, rtol=1e-12, atol=1e-12)


def test_a_window_keeps_its_mask() -> None:
    model = build("Mistral", sliding_window=8)
    plain = model(input_ids=tokens(), use_cache=False).logits
    logits, calls = record_masks(model, input_ids=tokens(), use_cache=False)
    assert calls == [(True, False)]
    torch.testing.assert_close(logits, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_other_programs_see_the_masks_of_transformers() -> None:
    record_masks(build("Llama"), input_ids=tokens())
    other = build("Llama")
    _, calls = run_noting(lambda compiler: compiler(other, dynamic=False)(input_ids=tokens()))
    assert calls == [(True, False)]
