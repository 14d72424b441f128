"""Remembered results of operations: the same traces as without, and nothing remembered that has more."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.trace.result_cache import ResultCache, ResultKind, find_result_kind

if TYPE_CHECKING:
    from pathlib import Path

aten = torch.ops.aten

COMPARE = """
import json, sys
import msgspec
from trimtab import api
from trimtab.spec import Setting
from trimtab.trace.forks import run_forked
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.result_cache import ResultCache, share_results
from trimtab.trace import worker

job, overrides, setting = sys.argv[1], json.loads(sys.argv[2]), Setting.from_json(sys.argv[3])
requests = TraceRequests(
    job=job, overrides=overrides, settings=(setting,), device=api.first_device(api.cluster("H200"))
)
loaded = worker.prepare_job(requests)

def trace(say, remember):
    caches, init = [], ResultCache.__init__
    def keep(self):
        init(self)
        caches.append(self)
    ResultCache.__init__ = keep
    if not remember:
        ResultCache.run = lambda self, func, args, kwargs: func(*args, **kwargs)
    def deliver(made, how, results):
        hits = sum(cache.hits for cache in caches)
        say(msgspec.json.encode({"trace": made, "hits": hits, "results": results}))
    worker.trace_job(loaded, next(iter(requests.each())), deliver, how=worker.WHOLE)

tasks = [lambda say: trace(say, True), lambda say: trace(say, False)]
answers = dict(run_forked(tasks, job, timeout_s=300))
remembered, plain = (json.loads(answers[number]) for number in range(2))
share_results(msgspec.convert(remembered["results"], bytes))
shared = json.loads(dict(run_forked(tasks[:1], job, timeout_s=300))[0])
print(json.dumps({"hits": remembered["hits"], "shared_hits": shared["hits"],
                  "same": remembered["trace"] == plain["trace"] == shared["trace"]}))
"""

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": 500}
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 2, "d_model": 64,
    "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 500, "decoder_start_token_id": 0,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 500,
}  # fmt: skip
SHARDED = {"strategy": "fsdp", "mesh": {"dp_shard": 4}, "global_batch": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        pytest.param(GPT2, {}, marks=pytest.mark.slow),
        (GPT2, {**SHARDED, "recompute": "full", "precision": "bf16"}),
        pytest.param(T5, {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(BERT, {"precision": "fp16", "recompute": "selective"}, marks=pytest.mark.slow),
        (MIXTRAL, {"precision": "bf16"}),
    ],
    ids=["gpt2", "gpt2-fsdp-recompute", "t5", "bert", "mixtral"],
)
def test_a_trace_is_the_same_with_remembered_results(
    tmp_path: Path, config: dict[str, object], more: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    setting = {"micro_batch": 4, "global_batch": 4, **more}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE, f"hf:{tmp_path}", '{"seq": 32}', json.dumps(setting)],
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["same"]
    assert answer["hits"] > 200
    # Another fork knows the results that the first had to find out.
    assert answer["shared_hits"] > answer["hits"] + 50


def has_memory_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage() is other.untyped_storage()


def test_results_have_the_layout_and_the_memory_that_torch_gives_them() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        tensor = torch.empty(4, 6)
        for func, args, kwargs in (
            (aten.mul.Tensor, (tensor, tensor), {}),
            (aten.transpose.int, (tensor, 0, 1), {}),
            (aten.split.Tensor, (tensor, 4, 1), {}),
            (aten._unsafe_view.default, (tensor, [24]), {}),  # noqa: SLF001 - its name
            (aten.topk.default, (tensor, 2), {}),
            (aten.sum.dim_IntList, (tensor, [1]), {"dtype": torch.float64}),
        ):
            first, again = (cache.run(func, args, kwargs) for _ in range(2))
            assert type(first) is type(again)
            for left, right in zip(
                *(list(out) if isinstance(out, tuple | list) else [out] for out in (first, again)),
                strict=True,
            ):
                assert [left.shape, left.stride(), left.dtype, left.device] == [
                    *(right.shape, right.stride(), right.dtype, right.device)
                ]
                assert left.storage_offset() == right.storage_offset()
                assert has_memory_of(left, tensor) == has_memory_of(right, tensor)
                assert left is not right
    assert cache.hits == 6


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        tensor = torch.empty(3, dtype=torch.int64)
        dtypes = [cache.run(aten.mul.Tensor, (tensor, number), {}).dtype for number in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]
    assert cache.hits == 0


def test_an_operation_in_place_returns_its_first_argument() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        tensor, other = torch.empty(3), torch.empty(3)
        assert cache.run(aten.add_.Tensor, (tensor, other), {}) is tensor
        assert cache.run(aten.add_.Tensor, (other, tensor), {}) is other
    assert cache.hits == 1


def test_errors_are_raised_each_time() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="reduction dim"):
                cache.run(aten.mm.default, (torch.empty(2, 3), torch.empty(2, 3)), {})
    assert cache.hits == 0


def test_tensors_with_values_or_complex_numbers_are_not_remembered() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        for tensor in (torch.tensor(2), torch.empty(2, dtype=torch.complex64)):
            for _ in range(2):
                cache.run(aten.mul.Tensor, (tensor, tensor), {})
    assert cache.hits == 0


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (aten.mm.default, ResultKind.TENSORS),
        (aten.split.Tensor, ResultKind.TENSORS),
        (aten.add_.Tensor, ResultKind.FIRST),
        (aten._fused_adamw_.default, ResultKind.NOTHING),
        (aten.nonzero.default, None),
        (aten.item.default, None),
        (aten.resize_.default, None),
        (aten.transpose_.default, None),
        (aten.add.out, None),
        (aten.is_nonzero.default, None),
    ],
)
def test_the_schema_says_what_is_remembered(func: object, kind: ResultKind | None) -> None:
    assert find_result_kind(func) is kind
