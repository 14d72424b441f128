"""Kinds of models that once could not be traced, each in small, and the list of bench/zoo.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import zoo

from trimtab.catalog.facts import fallback_facts
from trimtab.errors import CannotFollow, JobFailed, WrongUse
from trimtab.jobs.library_files import is_library_file
from trimtab.predict.op_time import Rates, roofline_s
from trimtab.spec import Work
from trimtab.trace import cpu_check, data_dependent, fake_cuda, recurrent, worker

pytestmark = pytest.mark.xdist_group("zoo")  # its fixture is made once
KINDS = """
import probes_cuda
import torch
from torch import nn
from torch.nn.functional import cross_entropy, grouped_mm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SEEN = torch.cuda.is_available()  # the job's own code sees the device at import


@torch.jit.script
def scripted(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + bias)


class Base(nn.Module):
    global_batch = 4

    def model(self):
        return self

    def batch(self, size):
        return {"x": torch.randn(size, 12, 32), "lengths": torch.randint(3, 13, (size,))}

    def loss(self, model, batch):
        return model(**batch).float().square().mean()


def job(cls):
    class Job:
        global_batch = 4
        batch, loss = cls.batch, cls.loss

        def model(self):
            return cls()

    if "optimizer" in vars(cls):
        Job.optimizer = cls.optimizer
    return Job


@job
class Cells(Base):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm, self.plain = nn.GRUCell(32, 64), nn.LSTMCell(64, 64), nn.RNNCell(64, 16)

    def forward(self, x, lengths):
        state = x.new_zeros(len(x), 64)
        pair, last = (state, state), x.new_zeros(len(x), 16)
        for step in range(3):
            state = self.gru(x[:, step], state)
            pair = self.lstm(state, pair)
            last = self.plain(pair[0], last)
        return last


@job
class Packed(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([kind(32, 32, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)])

    def forward(self, x, lengths):
        total = 0
        for layer in self.layers:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            assert packed.data.shape[0] == int(lengths.sum())
            total = total + pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=12)[0]
        return total


@job
class Scripted(Base):
    def __init__(self):
        super().__init__()
        self.line, self.bias = nn.Linear(32, 32), nn.Parameter(torch.zeros(32))

    def forward(self, x, lengths):
        assert SEEN
        return scripted(self.line(x), self.bias)


@job
class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(32, 8)

    def forward(self, x, lengths):
        nodes, count = x.flatten(0, 1), x.shape[0] * x.shape[1]
        edges = torch.randint(count, (2, 200), device=x.device)
        near = torch.sparse_coo_tensor(edges, torch.ones(200, device=x.device), (count, count))
        seen = torch.sparse.mm(near.coalesce(), self.line(nodes).float())
        return near.to_sparse_csr() @ seen


@job
class SparseGradients(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 16, sparse=True)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def forward(self, x, lengths):
        return self.table(lengths)


@job
class Grouped(Base):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 64))

    def forward(self, x, lengths):
        flat = x.flatten(0, 1)
        chosen = self.gate(flat).argmax(-1)
        ends = torch.histc(chosen.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        return grouped_mm(flat[chosen.argsort()], self.experts, offs=ends)


class Routed(Base):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 8)
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])

    def forward(self, x, lengths):
        x = x.flatten(0, 1)
        chosen = self.gate(x).float().topk(2, -1)[1]
        order = chosen.flatten().argsort(stable=True)
        done = torch.cat(list(self.take(x[order // 2], chosen, order)))
        return torch.zeros_like(done[: len(x)]).index_add_(0, order // 2, done)


@job
class SplitByCounts(Routed):
    def take(self, rows, chosen, order):
        counts = torch.bincount(chosen.flatten(), minlength=8)
        assert int(counts.max()) == 12
        for expert, part in zip(self.experts, rows.split(counts.tolist())):
            yield expert(part)


@job
class SplitByArray(Routed):
    def take(self, rows, chosen, order):
        hot = chosen.new_zeros(len(chosen), 8).scatter_(1, chosen, 1)
        ends = hot.sum(0).cpu().numpy().cumsum()
        for expert, first, last in zip(self.experts, [0, *ends], ends):
            yield expert(rows[first:last])


@job
class SplitByUnique(Routed):
    def take(self, rows, chosen, order):
        numbers, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
        parts = rows.tensor_split(counts.cumsum(0)[:-1].cpu())
        for number, part in zip(numbers.tolist(), parts):
            yield self.experts[number](part)


@job
class SplitByMask(Base):
    def __init__(self):
        super().__init__()
        self.gate, self.line = nn.Linear(32, 1), nn.Linear(32, 32)

    def forward(self, x, lengths):
        kept = self.gate(x)[..., 0] > 0
        ends = nn.functional.pad(kept.sum(-1).cumsum(0), (1, 0)).tolist()
        place = kept.flatten().nonzero()[:, 0]
        rows = x.flatten(0, 1)[place]
        done = torch.cat([self.line(rows[first:last]) for first, last in zip(ends, ends[1:])])
        return torch.zeros_like(rows).index_copy(0, torch.arange(len(rows), device=x.device), done.float())


if not hasattr(torch.ops.torchvision, "nms"):
    detection = torch.library.Library("torchvision", "FRAGMENT")
    detection.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")

    @torch.library.register_fake("torchvision::nms")
    def nms(boxes, scores, threshold):
        return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


@job
class Chosen(Base):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(32, 8)

    def forward(self, x, lengths):
        scores = self.line(x)
        flat = scores.flatten(0, 1)
        found = [
            flat.max(1), flat.min(0), flat.max(1, keepdim=True), scores.max(2), scores.min(0), scores.max(-2),
            flat.topk(3, 0), scores.topk(2, 1), scores.sort(0), flat.sort(dim=1), flat.mode(1),
            flat.median(1), flat.kthvalue(2, 1), flat.cummax(0), flat.aminmax(dim=1),
            flat[:, 0].max(0), flat[0].topk(2),
        ]
        assert flat.argmax(1).shape == (len(flat),) and found[0][1].shape == (len(flat),)
        kept = torch.ops.torchvision.nms(flat[:, :4], flat[:, 4], 0.5)
        assert len(kept) == len(flat) // 2
        assert torch.allclose(flat, flat * 1.0) and not torch.equal(flat, flat * 1.0)
        assert torch.equal(flat, flat) and torch.equal(lengths.clone(), lengths)
        return sum(pair[0].float().mean() for pair in found) + flat[kept].mean()


@job
class Drawn(Base):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x, lengths):
        hidden = torch.rand(x.shape[:2], device=x.device) < torch.rand(len(x), 1, device=x.device)
        return self.line(x[hidden])


@job
class Straggler(Base):
    def __init__(self):
        super().__init__()
        self.mark, self.line = nn.Parameter(torch.Tensor(32).uniform_()), nn.Linear(32, 8)

    def forward(self, x, lengths):
        x = x.clone()
        x[:, 0] = self.mark
        return self.line(x)


@job
class Numbers(Base):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(32, 8)

    def forward(self, x, lengths):
        return self.line(x) * float(self.line.weight.detach().numpy().sum())


@job
class NamedExperts(Base):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleDict({f"expert_{number}": nn.Linear(32, 32) for number in range(4)})

    def forward(self, x, lengths):
        hits = self.gate(x).argmax(-1).flatten().bincount(minlength=4).nonzero()
        for hit in hits:
            x = self.experts[f"expert_{hit[0]}"](x)
        print(f"{x.float().mean():.3f}")
        return x


@job
class Wrong(Base):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(31, 8)

    def forward(self, x, lengths):
        return self.line(x)
"""
NAMES = (
    "Cells",
    "Packed",
    "Scripted",
    "Sparse",
    "SparseGradients",
    "Grouped",
    "SplitByCounts",
    "SplitByArray",
    "SplitByUnique",
    "SplitByMask",
    "Chosen",
    "Drawn",
    "Straggler",
    "Numbers",
    "NamedExperts",
    "Wrong",
)
PROBES = """
import torch
torch.__config__.show()
assert not torch.cuda.is_available(), "a package sees a device that is not there"
"""
PROGRAM = """
import json, sys
from bench import zoo
zoo.import_once()
for name in sys.argv[2].split(","):
    print(json.dumps(vars(zoo.in_copy(zoo.Entry(name, "test", 4, dict, sys.argv[1])))), flush=True)
"""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What comes of every small job; one process for all, of which each has a copy."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "kinds.py").write_text(KINDS)
    package = folder / "site-packages" / "probes_cuda"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PROBES)
    root = Path(zoo.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "kinds.py"), ",".join(NAMES)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(package.parent), str(root), str(root / "src")]),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Cells", "Packed", "Scripted", "Sparse", "SparseGradients", "Straggler"])
def test_it_is_followed(kinds: dict[str, dict[str, Any]], name: str) -> None:
    assert kinds[name]["words"] == ""
    assert kinds[name]["allocated_bytes"] > 0


def test_a_number_in_a_formatted_name_is_read_from_the_device(kinds: dict[str, dict[str, Any]]) -> None:
    assert kinds["NamedExperts"]["words"] == ""
    # The gate has no gradient, and the first of four experts none of its input.
    assert kinds["NamedExperts"]["flops"] == 2 * 48 * 32 * 4 + 11 * 2 * 48 * 32 * 32


@pytest.mark.parametrize("name", ["SplitByCounts", "SplitByArray", "SplitByUnique"])
def test_experts_get_slices_that_add_up_to_all_tokens(kinds: dict[str, dict[str, Any]], name: str) -> None:
    assert kinds[name]["words"] == ""
    assert kinds[name]["assumptions"] == [data_dependent.SPREAD_NOTE]
    tokens = 4 * 12
    # The gate picks by topk, which has no gradient here; inputs need none, so each expert runs twice.
    assert kinds[name]["flops"] == 2 * tokens * 32 * 8 + 2 * (2 * 2 * tokens * 32 * 32)


def test_lengths_of_a_mask_add_up_to_its_set_entries(kinds: dict[str, dict[str, Any]]) -> None:
    assert kinds["SplitByMask"]["words"] == ""
    assert kinds["SplitByMask"]["assumptions"] == [data_dependent.HALF_NOTE]
    tokens = 4 * 12
    assert kinds["SplitByMask"]["flops"] == 2 * tokens * 32 + 2 * (2 * tokens // 2 * 32 * 32)


def test_sizes_from_random_numbers_are_those_of_several_steps(kinds: dict[str, dict[str, Any]]) -> None:
    assert kinds["Drawn"]["words"] == ""
    assert kinds["Drawn"]["assumptions"] == [worker.DRAWN_NOTE]


def test_maxima_of_any_dimension_boxes_and_comparisons_are_followed(kinds: dict[str, dict[str, Any]]) -> None:
    assert kinds["Chosen"]["words"] == ""
    assert set(kinds["Chosen"]["assumptions"]) == {
        "half of the boxes are taken to be left by non-maximum suppression",
        "tensors that torch.allclose compares are taken to be close",
        "tensors that torch.equal compares are taken to differ",
    }


def test_scripted_functions_are_followed_and_named(kinds: dict[str, dict[str, Any]]) -> None:
    assert any("torch.jit.script (scripted)" in kind for kind in kinds["Scripted"]["assumptions"])


def test_compressed_layouts_are_an_assumption(kinds: dict[str, dict[str, Any]]) -> None:
    assert any("traced as coordinates" in kind for kind in kinds["Sparse"]["assumptions"])


def test_grouped_products_count_forward_and_backward(kinds: dict[str, dict[str, Any]]) -> None:
    tokens, gate = 4 * 12, 4
    # The argmax has no gradient, so the gate runs forward only; inputs need none, so the experts run twice.
    assert kinds["Grouped"]["flops"] == 2 * tokens * 32 * gate + 2 * (2 * tokens * 32 * 64)


def test_an_operation_that_cannot_be_followed_is_named_and_not_blamed_on_the_job(
    kinds: dict[str, dict[str, Any]],
) -> None:
    line = kinds["Numbers"]
    assert line["exit_code"] == 1
    assert "trimtab cannot follow" in line["words"]
    assert "kinds.py, line" in line["words"]
    assert "it runs on a small input on the CPU" in line["words"]
    assert "Fix loss()" not in line["words"]


def test_a_job_that_fails_by_itself_is_blamed(kinds: dict[str, dict[str, Any]]) -> None:
    line = kinds["Wrong"]
    assert line["exit_code"] == 4
    assert "it fails on the CPU too" in line["words"]
    assert "cannot follow" not in line["words"]


# ------------------------------------------------------------------------------------------ whose fault


JOB = """
import torch
class Job:
    width = 8
    def model(self): return torch.nn.Linear(self.width, 1)
    def batch(self, size): return torch.randn(size, 8)
    def loss(self, model, batch):
        if len(batch) < 3: raise ValueError("three at least")
        return model(batch).mean()
"""


def test_a_rehearsal_tries_the_micro_batch_where_a_small_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    asked = cpu_check.CpuCheck(job=f"{tmp_path}/job.py:Job", micro_batch=4)
    assert cpu_check.run_small_step(asked) == {}
    with pytest.raises(JobFailed, match=r"ValueError: three at least.*job\.py, line 8"):
        cpu_check.run_small_step(asked.replace(micro_batch=2))


def test_a_model_that_is_too_large_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    asked = cpu_check.CpuCheck(job=f"{tmp_path}/job.py:Job", overrides={"width": 2**30})
    assert cpu_check.run_small_step(asked) == {"untried": "its weights take 4.0 GiB"}
    error = CannotFollow("loss()", found="trimtab cannot follow aten::x here", cure="Go on.")
    told = cpu_check.blame_error(error, cpu_check.CpuCheckResult(untried="its weights take 4.0 GiB"))
    assert "was not tried: its weights take 4.0 GiB. Go on." in str(told)
    assert told.exit_code == 1


def test_a_failure_of_its_own_replaces_that_of_the_trace() -> None:
    error = CannotFollow("loss()", found="trimtab cannot follow aten::x here", cure="Go on.")
    own = JobFailed("loss()", found="ValueError: no", cure="Fix loss().")
    assert cpu_check.blame_error(error, cpu_check.CpuCheckResult(failure=own)) is own
    assert "The job itself is fine" in str(cpu_check.blame_error(error, cpu_check.CpuCheckResult()))


# ------------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        (torch.__file__, True),
        (json.__file__, True),
        (__file__, False),
        ("/home/me/site-packages/x/y.py", True),
        ("/home/me/models/site.py", False),
    ],
)
def test_what_belongs_to_a_package(file: str, installed: bool) -> None:
    assert is_library_file(file) is installed


def test_a_matching_without_values_has_as_many_pairs() -> None:
    module = SimpleNamespace(linear_sum_assignment=lambda cost: ("real", cost))
    fake_cuda.MODULE_PATCHES["scipy.optimize"](module)
    rows, columns = module.linear_sum_assignment(SimpleNamespace(fake_mode=1, shape=(100, 7)))
    assert list(rows) == list(columns) == list(range(7))
    assert module.linear_sum_assignment("cost") == ("real", "cost")


def test_a_packed_batch_has_fewer_inputs_than_samples_times_steps() -> None:
    assert recurrent.read_extent(torch.empty(9, 5), [4, 3, 2], batch_first=False) == (4, 3, 9)
    assert recurrent.read_extent(torch.empty(4, 3, 5), [], batch_first=True) == (4, 3, 12)


def test_cells_save_what_the_fused_kernels_save() -> None:
    gates, hidden = torch.empty(6, 3 * 8), torch.empty(6, 8)
    state, saved = recurrent.make_gru_cell_result((gates, gates, hidden))
    assert (state.shape, saved.shape) == ((6, 8), (6, 40))
    assert [tuple(one.shape) for one in recurrent.make_gru_cell_gradients((hidden, saved, True))] == [
        (6, 24), (6, 24), (6, 8), (24,), (24,),
    ]  # fmt: skip
    _, _, kept = recurrent.make_lstm_cell_result((torch.empty(6, 32), torch.empty(6, 32), hidden))
    gradients = recurrent.make_lstm_cell_gradients((None, None, hidden, hidden, kept, True))
    assert [tuple(gradient.shape) for gradient in gradients] == [(6, 32), (6, 8), (32,)]


def test_groups_that_run_one_after_another_take_longer_than_one_kernel() -> None:
    device = Rates(67e12, 495e12, 990e12, 990e12, 4.8e12, 132, fallback_facts().law)
    together = Work(
        op="aten::_grouped_mm",
        kind="matrix",
        dtype="float32",
        flops=2 * 8 * 64 * 512 * 512,
        dims=(8, 64, 512, 512, 16),
    )
    assert roofline_s(together.replace(kernels=8), device) > roofline_s(together, device)


# ------------------------------------------------------------------------------------------ the list


def test_the_zoo_has_every_family() -> None:
    counts = Counter(entry.family for entry in zoo.entries().values())
    assert set(counts) == set(zoo.FAMILIES)
    assert counts.pop("written") >= 20
    assert sum(counts.values()) >= 80
    assert min(counts.values()) >= 4


@pytest.mark.parametrize("name", ["gan", "nerf", "normalizing_flow", "point_cloud", "sparse_embeddings"])
def test_a_written_model_and_its_batch_are_built(name: str) -> None:
    job = getattr(zoo, name)
    with torch.device("meta"):
        model = job.model()
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000
    assert all(isinstance(one, torch.Tensor) for one in job.batch(2).values())


@pytest.mark.parametrize("name", ["distilbert", "mobilenet_v2", "marian"])
def test_a_model_of_transformers_and_its_batch_are_built(name: str) -> None:
    pytest.importorskip("transformers")
    job = getattr(zoo, name)
    with torch.device("meta"):
        model = job.model()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1_000_000
    assert "labels" in job.batch(2)


def test_a_name_that_is_not_in_the_zoo() -> None:
    with pytest.raises(AttributeError):
        _ = zoo.no_such_model
    assert issubclass(CannotFollow, Exception)
    assert not issubclass(CannotFollow, WrongUse)
