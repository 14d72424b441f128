"""`trimtab max`: the largest value that fits, exactly, with few estimates."""

from __future__ import annotations

import builtins
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trimtab
from shared_jobs import shared_job
from test_cli import trimtab_cli
from trimtab import api, render
from trimtab.api.largest import explain_shortage, list_changes
from trimtab.errors import EnvironmentFault, JobFailed, NothingFits, TrimtabError, UnknownName, WrongUse
from trimtab.jobs.huggingface import _set_layers
from trimtab.jobs.load import load_job
from trimtab.planner.largest import ValueSearch
from trimtab.spec import Band, Estimate, Footprint, LargestValue, ValueLimit, Verdict
from trimtab.spec.requests import EstimateRequest
from trimtab.trace.number_options import describe_numbers
from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("max")  # its fixture is made once

CAPACITY = 10**9


def estimate_of(size: int, least: int | None = None) -> Estimate:
    least = size if least is None else least
    verdict = (
        Verdict.FITS
        if size <= CAPACITY
        else Verdict.FITS_TIGHT
        if least <= CAPACITY
        else Verdict.DOES_NOT_FIT
    )
    return Estimate(
        allocated_bytes=least,
        reserved_bytes=size,
        process_bytes=size,
        capacity_bytes=CAPACITY,
        fits=verdict is not Verdict.DOES_NOT_FIT,
        verdict=verdict,
        least_bytes=least,
        parts=Footprint(),
        band=Band(low_bytes=size, high_bytes=size),
    )


def search_of(law: Callable[[int], int], breaks: int | None = None, **more: Any) -> ValueSearch:
    def answer(value: int) -> Estimate | TrimtabError:
        if breaks is not None and value >= breaks:
            return JobFailed("job", found=f"no {value}", cure="-")
        return estimate_of(law(value))

    return ValueSearch(answer, **more)


@given(
    base=st.integers(0, 9 * 10**8),
    slope=st.integers(100, 10**7),
    curve=st.integers(0, 10**4),
    step=st.sampled_from([1, 7, 64]),
    start=st.integers(1, 5000),
)
def test_the_search_is_exact_for_any_law_that_grows(
    base: int, slope: int, curve: int, step: int, start: int
) -> None:
    def law(value: int) -> int:
        return base + slope * value + curve * value * value

    search = search_of(law, step=step)
    largest = search.find(start)
    smallest = min(step, start)
    if largest is None:
        assert law(smallest) > CAPACITY
        return
    assert law(largest) <= CAPACITY
    # The next value that may be chosen does not fit, and was estimated.
    above = builtins.min(value for value in search.answers if value > largest)
    assert law(above) > CAPACITY
    assert (largest // step + 1) * step >= above or above == start
    assert len(search.answers) < 40


def test_a_line_takes_four_estimates_and_a_parabola_few() -> None:
    line = search_of(lambda value: 10**8 + 20_011 * value)
    assert line.find(1) == 44975
    assert len(line.answers) <= 8
    parabola = search_of(lambda value: 10**8 + 50 * value * value, step=64)
    assert parabola.find(1024) == 4224
    assert len(parabola.answers) <= 10


@given(breaks=st.integers(2, 400), start=st.integers(1, 400), step=st.sampled_from([1, 64]))
def test_where_the_job_refuses_the_limit_is_found_to_the_last_one(breaks: int, start: int, step: int) -> None:
    search = search_of(lambda value: 10 * value, breaks=breaks, step=step)
    if min(step, start) >= breaks:
        with pytest.raises(JobFailed):
            search.find(start)
    else:
        assert search.find(start) == breaks - 1
        assert search.refuses(breaks)


def test_the_stated_limit_is_a_value_even_if_it_is_no_multiple_of_the_step() -> None:
    search = search_of(lambda value: value, step=64, limit=1000)
    assert search.find(128) == 1000
    assert all(value <= 1000 for value in search.answers)


def test_a_start_above_the_limit_is_not_tried() -> None:
    assert search_of(lambda value: value, limit=8).find(64) == 8


def test_a_value_that_fits_tightly_counts_only_if_asked() -> None:
    def answer(value: int) -> Estimate:
        return estimate_of(10**8 * value, least=5 * 10**7 * value)

    assert ValueSearch(answer).find(1) == 10
    assert ValueSearch(answer, tight=True).find(1) == 20


def test_an_error_that_is_not_about_the_value_ends_the_search() -> None:
    def answer(value: int) -> Estimate | TrimtabError:
        return estimate_of(1) if value < 4 else EnvironmentFault("torch", found="it is gone", cure="-")

    with pytest.raises(EnvironmentFault):
        ValueSearch(answer).find(1)


def test_memory_that_does_not_grow_is_noticed() -> None:
    search = search_of(lambda _: 7, limit=10_000)
    assert search.find(1) == 10_000
    assert not search.grows()


JOB = """
import torch


class Wide:
    name = "wide"
    global_batch, samples = 64, 640
    seq = 64
    width: int | None = None
    ratio = 0.5
    limits = {"width": (4096, "the table has 4,096 columns")}

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(self.width or 64, 64), torch.nn.Linear(64, 1))

    def batch(self, size):
        # 0.4 GiB a sample at seq 64.
        return torch.randn(size, self.seq * 25_600, self.width or 64)

    def loss(self, model, batch):
        return model(batch).mean()
"""


@pytest.fixture(scope="module")
def job() -> str:
    return shared_job(JOB, "Wide")


@pytest.fixture(scope="module")
def result(job: str) -> LargestValue:
    done = trimtab_cli("max", job, "--on", "RTX4090", "--json")
    assert done.returncode == 0, done.stderr
    assert {"of", "largest", "estimate", "next"} <= set(json.loads(done.stdout))
    return LargestValue.from_json(done.stdout)


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_the_next_does_not(job: str, result: LargestValue) -> None:
    assert result.of == "micro_batch"
    assert result.limit is ValueLimit.MEMORY
    fitting = trimtab.estimate(job, "RTX4090", micro_batch=result.largest)
    assert fitting.verdict is Verdict.FITS
    assert fitting.process_bytes == result.estimate.process_bytes
    assert trimtab.estimate(job, "RTX4090", micro_batch=result.largest + 1).verdict is not Verdict.FITS
    assert f"{result.largest + 1:,} needs" in result.limit_reason
    assert result.setting.micro_batch == result.largest


def test_twice_as_much_names_the_cheapest_change_that_fits(result: LargestValue) -> None:
    assert result.next.value == 2 * result.largest
    assert [tried.what for tried in result.next.tried][:2] == ["--recompute full", "--precision bf16-true"]
    # Sharding two small layers cannot help, and is ruled out without a trace.
    sharded = [tried for tried in result.next.tried if "fsdp" in tried.what]
    assert all(tried.verdict is Verdict.DOES_NOT_FIT and not tried.process_bytes for tried in sharded)
    change = result.next.change
    assert change is not None
    assert change.what == result.next.tried[-1].what
    assert change.estimate.fits
    assert change.setting.micro_batch == result.next.value


def test_the_table_says_the_value_its_limit_and_what_twice_needs(result: LargestValue) -> None:
    text = rendered(result)
    assert f"is {result.largest:,}: fits" in text
    assert result.limit_reason in text
    assert result.next.change is not None
    assert f"micro_batch {result.next.value:,} fits" in text
    refused = result.replace(next=result.next.replace(change=None, why_not="there is no room"))
    assert "is not possible: there is no room" in rendered(refused)


def rendered(result: LargestValue) -> str:
    import io

    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=300).print(render.render_largest(result))
    return file.getvalue()


@pytest.mark.slow
def test_nothing_fits_is_exit_code_3_with_the_nearest_change(job: str) -> None:
    with pytest.raises(NothingFits) as caught:
        trimtab.max(job, "T4", options={"seq": 64 * 50}, precision="fp16")
    error = caught.value
    assert error.exit_code == 3
    assert "even micro_batch 1 needs" in error.found
    (change,) = error.nearest
    assert change.what in error.cure
    assert change.estimate.fits


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"of": "depth"}, "has no whole-number option 'depth'"),
        ({"of": "ratio"}, "has no whole-number option 'ratio'"),
        ({"of": "seq", "options": {"seq": 128}}, "also fixed to 128"),
        ({"of": "micro_batch", "micro_batch": 4}, "also fixed to 4"),
        ({"of": "micro-batch", "micro_batch": 4}, "also fixed to 4"),
        ({"of": "seq", "step": 0}, "below 1"),
    ],
)
def test_a_wrong_question_is_refused(job: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongUse) as caught:
        trimtab.max(job, "RTX4090", **more)
    assert words in caught.value.found
    if isinstance(caught.value, UnknownName):
        assert "micro_batch, global_batch, samples, seq, width" in caught.value.cure


def test_the_limits_of_a_job_are_read_with_their_reasons(job: str) -> None:
    numbers = describe_numbers(load_job(job), job)
    assert numbers.values["width"] is None
    assert "ratio" not in numbers.values
    assert numbers.limits == {"width": 4096}
    assert numbers.reasons == {"width": "the table has 4,096 columns"}


@pytest.mark.parametrize("limits", [{"seq": 0}, {"seq": "many"}, 12, {"seq": True}])
def test_limits_that_are_none_are_the_jobs_fault(limits: Any) -> None:
    with pytest.raises(JobFailed):
        describe_numbers(SimpleNamespace(limits=limits), "job")


@pytest.mark.slow
def test_an_option_of_a_users_job_is_searched_in_steps(job: str) -> None:
    answer = trimtab.max(job, "RTX4090", of="seq")
    assert answer.largest % 64 == 0
    shown = trimtab.estimate(job, "RTX4090", options={"seq": answer.largest})
    assert shown.verdict is Verdict.FITS
    more = trimtab.estimate(job, "RTX4090", options={"seq": answer.largest + 64})
    assert more.verdict is not Verdict.FITS


@pytest.mark.slow
def test_the_limit_of_the_job_comes_before_memory_and_is_named(job: str) -> None:
    answer = trimtab.max(job, "H200", of="width", options={"seq": 1})
    assert answer.largest == 4096
    assert answer.limit is ValueLimit.JOB
    assert answer.next.why_not == answer.limit_reason == "the table has 4,096 columns"


@pytest.mark.slow
def test_layers_of_a_model_are_searched_by_real_traces() -> None:
    answer = trimtab.max("slm", "T4", of="layers", precision="fp16", micro_batch=8)
    options = {"layers": answer.largest}
    at: dict[str, Any] = {"micro_batch": 8, "precision": "fp16"}
    assert trimtab.estimate("slm", "T4", options=options, **at).verdict is Verdict.FITS
    options = {"layers": answer.largest + 1}
    assert trimtab.estimate("slm", "T4", options=options, **at).verdict is not Verdict.FITS


def test_changes_come_in_the_order_of_their_cost() -> None:
    where = trimtab.cluster("RTX4090")
    request = EstimateRequest("slm", "RTX4090", precision="fp32", optimizer="foreach")
    flags = [flags for flags, _ in list_changes(request, where, 40 * GIB)]
    assert flags[:5] == [
        "--recompute full",
        "--precision bf16",
        "--precision bf16-true",
        "--recompute full --precision bf16-true",
        "--optimizer fused",
    ]
    assert next(flag for flag in flags if "fsdp" in flag).startswith("--strategy fsdp --on 2x")
    assert all(flag.startswith("--on ") for flag in flags[-3:])
    for flag in flags[-3:]:
        device = trimtab.cluster(flag.removeprefix("--on ")).devices[0]
        assert device.memory_bytes >= 40 * GIB


def test_what_is_set_already_is_not_proposed_and_a_t4_gets_no_bf16() -> None:
    where = trimtab.cluster("4xT4")
    request = EstimateRequest("slm", "4xT4", precision="fp16", recompute="full", strategy="fsdp")
    flags = [flags for flags, _ in list_changes(request, where, 10 * GIB)]
    assert not any("precision" in flag or "recompute" in flag or "optimizer" in flag for flag in flags)
    assert [flag for flag in flags if "fsdp" in flag] == ["--strategy fsdp --on 8xT4"]


def test_sharding_is_ruled_out_only_if_the_rest_is_too_large() -> None:
    parts = Footprint(weights=4 * 10**8, optimizer=8 * 10**8, activations=4 * 10**8)
    whole = estimate_of(16 * 10**8).replace(parts=parts)
    two = {"strategy": "fsdp", "on": trimtab.cluster("2xT4")}
    assert explain_shortage(whole, two) == ""
    heavy = whole.replace(parts=Footprint(activations=15 * 10**8, weights=10**8))
    assert "would still need" in explain_shortage(heavy, two)
    assert explain_shortage(heavy, {"precision": "bf16-true"}) == ""
    assert explain_shortage(heavy, {"recompute": "full"}) == ""


def config_of(**fields: Any) -> Any:
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    return config


def test_another_number_of_layers_reaches_every_list_of_the_config() -> None:
    config = config_of(num_hidden_layers=3, layer_types=["a", "a", "b"], eos_token_id=[1, 2, 3])
    _set_layers(config, 5, "job hf:x")
    assert config.num_hidden_layers == 5
    assert config.layer_types == ["a", "a", "b", "a", "a"]
    assert config.eos_token_id == [1, 2, 3]
    both = config_of(num_hidden_layers=6, num_decoder_layers=6)
    _set_layers(both, 2, "job hf:x")
    assert (both.num_hidden_layers, both.num_decoder_layers) == (2, 2)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (config_of(depths=[2, 2]), 4),
        (config_of(num_hidden_layers=6, decoder_layers=3), 4),
        (config_of(num_hidden_layers=6), 0),
    ],
)
def test_layers_that_cannot_be_set_are_refused(config: Any, layers: int) -> None:
    with pytest.raises(WrongUse):
        _set_layers(config, layers, "job hf:x")


def test_a_model_folder_states_its_positions_and_width(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    name = f"hf:{tmp_path}"
    numbers = describe_numbers(load_job(name), name)
    assert numbers.limits == {"seq": 77, "lora": 32}
    assert {"seq", "lora", "layers"} <= set(numbers.values)
    model = load_job(name, {"layers": 3}).model()
    assert len(model.model.layers) == 3


def test_python_keeps_its_own_max() -> None:
    names: dict[str, Any] = {}
    exec("from trimtab import *", names)  # noqa: S102 - what a user types
    assert "max" not in names
    assert "estimate" in names
    assert trimtab.max is api.max
    assert trimtab.max.__name__ == "max"
    assert "max" in dir(trimtab)
    assert builtins.max(1, 2) == 2
