"""What a script computes without gradients counts in its step, and does not hold up the answer."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.scripts.inference_calls import (
    FOLLOWED_CALLS,
    FOLLOWED_SIZES,
    SIZES_NOTE,
    InferenceCalls,
    describe_call,
    list_leaves,
    replace_leaves,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.estimate import ScriptEstimate


@dataclass
class GrowingCache:
    keys: list[Any]
    length: int


class Pair(NamedTuple):
    left: Any
    right: Any


class StandInRecorder:
    """The part of a recorder that keeps the work of a step."""

    def __init__(self) -> None:
        self.records_work = True
        self.sequence: list[int] = []
        self.by_engine: list[bool] = []

    def work(self, number: int) -> None:
        if self.records_work:
            self.sequence.append(number)
            self.by_engine.append(False)


class CountedModel:
    """A model without gradients that counts how often it is run."""

    def __init__(self, recorder: StandInRecorder, forward: Callable[..., Any]) -> None:
        self.recorder, self.forward, self.runs = recorder, forward, 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        self.recorder.work(7)
        return self.forward(*args)


def make_calls(forward: Callable[..., Any]) -> tuple[Callable[..., Any], CountedModel, StandInRecorder, Any]:
    recorder: Any = StandInRecorder()
    notes: dict[str, None] = {}
    calls, model = InferenceCalls(recorder, notes), CountedModel(recorder, forward)

    def call(*args: Any, step: int | None = 0) -> Any:
        return calls.call(lambda: model(*args), model, (args, {}), step=step)

    return call, model, recorder, notes


def test_containers_and_dataclasses_are_copied_with_other_leaves() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    value = {"pair": Pair(first, [GrowingCache([second], 4)]), "none": None}

    leaves = list(list_leaves(value))
    copied = replace_leaves(value, iter(range(len(leaves))))

    assert leaves[0] is first
    assert leaves[1] is second
    assert leaves[2:] == [4, None]
    assert copied == {"pair": Pair(0, [GrowingCache([1], 2)]), "none": 3}
    assert value["pair"] is not copied["pair"]


def test_calls_that_differ_in_dtype_or_in_a_switch_are_of_different_kinds() -> None:
    number, index = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)

    kinds = [describe_call((tensor, switch), {})[0] for tensor in (number, index) for switch in (True, False)]

    assert len(set(kinds)) == 4
    assert describe_call((number,), {})[0] == describe_call((torch.ones(5, 8),), {})[0]


def test_the_work_of_a_repeated_call_counts_in_its_step_and_an_evaluation_does_not() -> None:
    call, model, recorder, _ = make_calls(lambda tensor: tensor * 2)
    tensor = torch.ones(4, 8)

    outputs = [call(tensor) for _ in range(10)]

    assert model.runs == FOLLOWED_CALLS
    assert len(recorder.sequence) == 10
    assert {tuple(out.shape) for out in outputs} == {(4, 8)}
    call(tensor, step=1)
    assert model.runs == FOLLOWED_CALLS + 1
    counted = len(recorder.sequence)
    call(tensor, step=None)
    call(torch.ones(4, 9), step=None)
    assert len(recorder.sequence) == counted


def test_outputs_of_growing_inputs_are_predicted() -> None:
    def forward(tokens: torch.Tensor, cache: GrowingCache) -> tuple[torch.Tensor, GrowingCache]:
        keys = [torch.cat([key, tokens[:, -1:]], dim=1) for key in cache.keys]
        return torch.ones(tokens.shape[0], 1, 50), GrowingCache(keys, cache.length + 1)

    call, model, recorder, notes = make_calls(forward)
    tokens, cache = torch.ones(2, 1), GrowingCache([torch.ones(2, 1)], 1)

    for length in range(2, 1002):
        logits, cache = call(tokens, cache)
        assert logits.shape == (2, 1, 50)
        assert cache.length == length
        assert cache.keys[0].shape == (2, length)
        tokens = torch.cat([tokens, tokens[:, -1:]], dim=1)

    assert FOLLOWED_SIZES < model.runs < 80
    assert len(recorder.sequence) == 1000
    assert SIZES_NOTE in notes


def test_outputs_that_do_not_follow_from_sizes_are_never_predicted() -> None:
    call, model, _, notes = make_calls(lambda tensor: torch.ones(tensor.shape[0] ** 2))

    shapes = [tuple(call(torch.ones(size)).shape) for size in range(1, 101)]

    assert model.runs == 100
    assert shapes == [(size**2,) for size in range(1, 101)]
    assert not notes


TEACHER = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.ones(1024)

def make(layers):
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)]).cuda()

student, teacher = make(2), make(TEACHER_LAYERS).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(Data(), batch_size=2048)
checks = torch.utils.data.DataLoader(Data(), batch_size=1024)
for epoch in range(4):
    for inputs in loader:
        inputs = inputs.cuda()
        with torch.no_grad():
            target = teacher(inputs)
        loss = (student(inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if EVALUATES:
            with torch.no_grad():
                for inputs in checks:
                    student(inputs.cuda())
"""

GENERATION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
    def forward(self, tokens):
        return self.head(self.embed(tokens))

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
runs = []
model.embed.register_forward_hook(lambda *_: runs.append(1))
with torch.no_grad():
    text = torch.zeros(4, 1, dtype=torch.long, device="cuda")
    for _ in range(400):
        text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], dim=1)
assert text.shape == (4, 401)
assert 16 < len(runs) < 80, len(runs)
while True:
    tokens = torch.randint(0, 100, (8, 32)).cuda()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


INFERENCE = """
import torch
from torch import nn

model = nn.Conv2d(3, 8, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@CONTEXT
def evaluate():
    for options in ({"dtype": torch.float16}, {"memory_format": torch.channels_last}):
        images = torch.ones(64, 3, 32, 32).to(device="cuda", **options)
        model(images.float())

while True:
    model(torch.ones(2, 3, 32, 32).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    evaluate()
    torch.save(torch.zeros(1000, 1000).cuda(), "../saved.pt")
"""


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ScriptEstimate]:
    monkeypatch.chdir(tmp_path)

    def run(script: str) -> ScriptEstimate:
        Path("train.py").write_text(script, encoding="utf-8")
        command = parse_command([sys.executable, "train.py"], environment=os.environ)
        return estimate_script(command, as_cluster("H200"))

    return run


def make_teacher(layers: int, *, evaluates: bool = False) -> str:
    return TEACHER.replace("TEACHER_LAYERS", str(layers)).replace("EVALUATES", str(evaluates))


@pytest.mark.slow
def test_a_teacher_counts_in_the_step_and_an_evaluation_does_not(
    follow: Callable[[str], ScriptEstimate],
) -> None:
    small, large, checked = (
        follow(make_teacher(layers, evaluates=evaluates)).estimate.step_s or 0
        for layers, evaluates in ((1, False), (41, False), (1, True))
    )
    # 40 more layers of 2048 x 1024 x 1024 multiplications take at least their time at the H200's fp32 peak.
    assert large - small > 40 * 2 * 2048 * 1024 * 1024 / 67e12
    assert checked < 1.5 * small


@pytest.mark.slow
def test_a_text_that_a_script_generates_by_hand_is_followed_at_few_lengths(
    follow: Callable[[str], ScriptEstimate],
) -> None:
    found = follow(GENERATION)

    assert SIZES_NOTE in found.estimate.assumptions
    assert {fact.name: fact.value for fact in found.script.found}["micro_batch"] == "8"


@pytest.mark.slow
def test_inference_mode_needs_what_no_grad_needs(follow: Callable[[str], ScriptEstimate]) -> None:
    """In inference mode torch passes operations such as `to` without splitting them up."""
    modes = [
        follow(INFERENCE.replace("CONTEXT", context))
        for context in ("torch.inference_mode()", "torch.no_grad()")
    ]

    phases = [{phase.name: phase.allocated_bytes for phase in found.phases} for found in modes]
    assert phases[0] == phases[1]
    assert phases[0]["evaluation"] > 64 * 3 * 32 * 32 * 4


@pytest.mark.slow
def test_a_file_saved_beside_the_folder_has_its_full_size(follow: Callable[[str], ScriptEstimate]) -> None:
    writes = follow(INFERENCE.replace("CONTEXT", "torch.no_grad()")).script.writes

    assert any("saved.pt (3.8 MiB)" in line for line in writes)


SUMMED_LOSS = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    total = 0.0
    for _ in range(6):
        loss = model(torch.ones(ROWS, 64).cuda()).mean() / 6
        total += loss.detach()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "text"), [("8", "repeat the same work"), ("8 + _", "their sizes differ")])
def test_micro_batches_are_said_to_differ_only_if_their_inputs_do(
    follow: Callable[[str], ScriptEstimate], rows: str, text: str
) -> None:
    """A sum of losses starts as a number, so the first micro-batch adds it in another way."""
    facts = {fact.name: fact for fact in follow(SUMMED_LOSS.replace("ROWS", rows)).script.found}

    assert facts["accumulation"].value == "6"
    assert text in facts["accumulation"].where
