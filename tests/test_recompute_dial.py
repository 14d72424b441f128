"""Steps between no and full recomputation: traces of some recomputed blocks follow from none and all."""

from __future__ import annotations

import pytest

from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.planner.search import RECOMPUTES
from trimtab.planner.space import SEARCHED_RECOMPUTES
from trimtab.predict.mix_recompute import RecomputeMix, TracesDiffer
from trimtab.spec import Mesh, Precision, Recompute, Setting, Strategy, Trace
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.trace.tracer import trace_settings

pytestmark = pytest.mark.xdist_group("recompute dial")  # its fixture is made once

PARTIAL = [way for way in Recompute if way.way.is_partial]
JOB = """
import torch
from torch import nn
import trimtab

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(7)), nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Dial(trimtab.Job):
    name, global_batch, samples = "dial", 8, 64
    def model(self): return Net()
    def batch(self, size): return torch.randn(size, 32, 64)
    def loss(self, model, batch): return model(batch).square().mean()
"""

TEXT_JOBS = """
import torch
from torch import nn

class Text:
    global_batch, samples, epochs = 8, 64, 1
    def batch(self, size): return torch.randint(0, 100, (size, 32)), torch.randint(0, 100, (size, 32))
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(*batch[:self.inputs]).flatten(0, 1), batch[1].flatten())
    inputs = 1

class Encoder(Text):  # the blocks are in a list within a list: 1.layers.0
    def model(self):
        block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        return nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoder(block, 4), nn.Linear(64, 100))

class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(100, 64), body, nn.Linear(64, 100)
    def forward(self, x, y=None):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        padding, x = x == 0, self.embedding(x)
        if y is not None:
            x = self.body(x, self.embedding(y), tgt_mask=mask, tgt_is_causal=True)
        elif isinstance(self.body, nn.TransformerDecoder):
            x = self.body(x, x.mean(1, keepdim=True), tgt_mask=mask, tgt_is_causal=True)
        else:
            x = self.body(x, mask=mask, src_key_padding_mask=padding)
        return self.head(x)

class Masked(Text):
    def model(self):
        block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, activation="gelu")
        return Net(nn.TransformerEncoder(block, 5, norm=nn.LayerNorm(64)))

class Decoder(Text):
    def model(self):
        block = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
        return Net(nn.TransformerDecoder(block, 5))

class Translation(Text):  # two lists of blocks, of different lengths
    inputs = 2
    def model(self): return Net(nn.Transformer(64, 4, 4, 3, 128, batch_first=True))

class Bert(Text):  # has a switch of its own for recomputation
    def model(self):
        from transformers import BertConfig, BertForMaskedLM
        sizes = dict(vocab_size=100, hidden_size=64, num_attention_heads=4, intermediate_size=128)
        return BertForMaskedLM(BertConfig(num_hidden_layers=5, **sizes))
    def loss(self, model, batch): return model(input_ids=batch[0], labels=batch[1]).loss

class Gpt2(Bert):
    def model(self):
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=64, n_layer=5, n_head=4, use_cache=False))

class Vit(Bert):
    def model(self):
        from transformers import ViTConfig, ViTForImageClassification
        sizes = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128)
        config = ViTConfig(image_size=32, patch_size=8, num_hidden_layers=5, num_labels=10, **sizes)
        return ViTForImageClassification(config)
    def batch(self, size): return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))
    def loss(self, model, batch): return model(pixel_values=batch[0], labels=batch[1]).loss
"""
NESTED = ["Encoder", "Masked", "Decoder", "Translation", "Bert", "Gpt2", "Vit"]
"""Jobs of TEXT_JOBS: their blocks are in a list within other modules."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[Recompute, Trace]:
    """Traces of one job under every way of recomputing blocks."""
    job = tmp_path_factory.mktemp("dial") / "job.py"
    job.write_text(JOB, encoding="utf-8")
    ways = [Recompute.NONE, Recompute.FULL, *PARTIAL]
    settings = tuple(
        Setting(micro_batch=8, global_batch=8, precision=Precision.BF16, recompute=way) for way in ways
    )
    asked = TraceRequests(job=f"{job}:Dial", settings=settings, device=parse_cluster("H100").devices[0])
    with WorkerProcess() as worker:
        answers = worker.ask_all(asked, timeout_s=300)
    traced = [Trace.from_builtins(answer["trace"]) for answer in answers if isinstance(answer, dict)]
    return dict(zip(ways, traced, strict=True))


def live_bytes(trace: Trace) -> list[tuple[int, int]]:
    """Return for every allocation its size and all that is live after it."""
    live, curve = 0, []
    for number in trace.order:
        live += trace.sizes[number] if number >= 0 else -trace.sizes[~number]
        if number >= 0:
            curve.append((trace.sizes[number], live))
    return curve


def list_events(trace: Trace) -> list[tuple[object, ...]]:
    """Return what each allocation is, and which one each free frees; frees in a row are sorted."""
    formulas, places = dict(trace.caused), dict[int, int]()
    events: list[tuple[object, ...]] = []
    frees: list[int] = []
    begins = set(trace.marks.values())
    for at, number in enumerate((*trace.order, None)):
        if frees and (number is None or number >= 0 or at in begins):
            events += [("free", place) for place in sorted(frees)]
            frees = []
        if number is None:
            break
        if number < 0:
            frees.append(places[~number])
            continue
        places[number] = len(places)
        formula = trace.causes[formulas[number]] if number in formulas else None
        kind = trace.sizes[number], trace.streams[number], trace.parts[number]
        events.append((*kind, trace.op_names[trace.ops[number]], formula))
    return events


def assert_mixes_are_traced(job: str, settings: list[Setting]) -> None:
    """Check the mixed trace of each setting after the first two, which recompute nothing and all."""
    traces = trace_settings(job, settings, parse_cluster("RTX4090").devices[0])
    none, full, *rest = [trace for trace in traces if isinstance(trace, Trace)]
    mix = RecomputeMix(none, full)
    assert len(rest) == len(settings) - 2
    for setting, trace in zip(settings[2:], rest, strict=True):
        mixed = mix.mix(setting.recompute.way)
        assert list_events(mixed) == list_events(trace)
        assert mixed.marks == trace.marks


def list_settings(*ways: Recompute, shards: int = 1) -> list[Setting]:
    """Return settings that recompute nothing, all, and then `ways`."""
    return [
        Setting(
            micro_batch=8,
            global_batch=8 * shards,
            precision=Precision.BF16,
            recompute=way,
            strategy=Strategy.FSDP if shards > 1 else Strategy.SINGLE,
            mesh=Mesh(dp_shard=shards),
        )
        for way in (Recompute.NONE, Recompute.FULL, *ways)
    ]


def test_blocks_of_an_encoder_in_a_sequential_are_mixed() -> None:
    assert_mixes_are_traced(shared_job(TEXT_JOBS, "Encoder"), list_settings(Recompute.ALL_BUT_3))


@pytest.mark.slow
@pytest.mark.parametrize("job", NESTED)
def test_a_mixed_trace_is_the_traced_one_wherever_the_blocks_are(job: str) -> None:
    if job in {"Bert", "Gpt2", "Vit"}:
        pytest.importorskip("transformers")
    assert_mixes_are_traced(shared_job(TEXT_JOBS, job), list_settings(*PARTIAL))


@pytest.mark.slow
@pytest.mark.parametrize("job", ["Encoder", "Translation"])
def test_a_mixed_trace_of_shards_is_the_traced_one(job: str) -> None:
    assert_mixes_are_traced(shared_job(TEXT_JOBS, job), list_settings(*PARTIAL, shards=2))


@pytest.mark.slow
@pytest.mark.parametrize("way", PARTIAL)
def test_a_mixed_trace_is_the_traced_one(way: Recompute, traces: dict[Recompute, Trace]) -> None:
    mixed = RecomputeMix(traces[Recompute.NONE], traces[Recompute.FULL]).mix(way.way)
    assert live_bytes(mixed) == live_bytes(traces[way])
    assert mixed.marks == traces[way].marks


def test_memory_falls_as_more_blocks_are_recomputed(traces: dict[Recompute, Trace]) -> None:
    order = [way for way in RECOMPUTES if way in traces]
    peaks = [max(live for _, live in live_bytes(traces[way])) for way in order]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_traces_of_other_programs_are_not_mixed(traces: dict[Recompute, Trace]) -> None:
    none, full = traces[Recompute.NONE], traces[Recompute.FULL]
    with pytest.raises(TracesDiffer):
        RecomputeMix(none.replace(sizes=(*none.sizes[:-1], none.sizes[-1] + 512)), full)
    with pytest.raises(TracesDiffer):
        RecomputeMix(none, none)
    with pytest.raises(TracesDiffer):
        RecomputeMix(none.replace(beside=(none,)), full)


def test_the_shares_are_those_of_the_blocks() -> None:
    for way in PARTIAL:
        counted = [way.way.has_block(number) for number in range(12)]
        assert sum(counted) / 12 == pytest.approx(way.way.share)
        assert counted[0]


def test_every_way_is_searched_and_ordered() -> None:
    assert set(PARTIAL) < set(SEARCHED_RECOMPUTES)
    assert set(RECOMPUTES) >= set(SEARCHED_RECOMPUTES)
    blocks = [way for way in RECOMPUTES if way is not Recompute.SELECTIVE and way.way.budget is None]
    shares = [way.way.share for way in blocks]
    assert shares == sorted(shares)
