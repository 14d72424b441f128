"""The cache of followed commands: when a result is reused, and when the script is run again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.scripts import follow
from trimtab.scripts.cache import load_followed, make_followed_key, store_followed
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.scripts.inputs import InputRecord, ScriptInput, find_changed_input, read_state
from trimtab.scripts.result import ScriptRequest, ScriptResult

SCRIPT = """
import json, os, torch
import helper
size = json.load(open("conf.json"))["size"]
rows = open("data.bin", "rb").read()
names = os.listdir("images")
try:
    open("resume.pt")
except FileNotFoundError:
    pass
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(size, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
open("out.txt", "w").write("done")
"""


def write_project() -> None:
    Path("images").mkdir()
    for name, text in {
        "train.py": SCRIPT,
        "helper.py": "WIDTH = 8\n",
        "conf.json": '{"size": 4}',
        "data.bin": "0123",
        "images/a.png": "x",
    }.items():
        Path(name).write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("own_cache")
def test_the_same_command_with_the_same_files_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project()
    command = parse_command([sys.executable, "train.py"], environment={})
    cluster = parse_cluster("H100")
    first = estimate_script(command, cluster)
    assert not first.script.is_cached

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was followed again")

    monkeypatch.setattr(follow, "_follow", refuse)
    monkeypatch.setenv("COLUMNS", "77")
    again = estimate_script(command, cluster)
    assert again.script.is_cached
    assert again.estimate == first.estimate
    assert again.script.replace(is_cached=False) == first.script
    more = parse_command([sys.executable, "train.py", "--more"], environment={})
    for other, place, cache in (
        (command, cluster, False),
        (command, parse_cluster("A100-40GB"), True),
        (more, cluster, True),
    ):
        with pytest.raises(AssertionError, match="followed again"):
            estimate_script(other, place, cache=cache)
    monkeypatch.setenv("MY_BATCH", "3")
    with pytest.raises(AssertionError, match="followed again"):
        estimate_script(command, cluster)
    monkeypatch.delenv("MY_BATCH")
    request = ScriptRequest(command=command, device=cluster.devices[0], scratch="-")
    inputs = {Path(item.path).name: item for item in load_inputs(request)}
    assert inputs.keys() >= {"train.py", "helper.py", "conf.json", "data.bin", "images", "resume.pt"}
    assert "out.txt" not in inputs
    check_changes(inputs)


def load_inputs(request: ScriptRequest) -> tuple[ScriptInput, ...]:
    result = load_followed(make_followed_key(request))
    assert result is not None
    assert result.inputs is not None
    return result.inputs


def check_changes(inputs: dict[str, ScriptInput]) -> None:
    """Change one file after the other: each is noticed."""
    assert find_changed_input(inputs.values()) is None
    for name in ("helper.py", "conf.json", "data.bin", "images", "resume.pt"):
        assert find_changed_input([inputs[name]]) is None
        change_file(name)
        assert find_changed_input([inputs[name]]) == inputs[name].path


def change_file(name: str) -> None:
    if name == "images":
        Path("images/b.png").touch()
    elif name == "data.bin":
        os.utime(name, ns=(1, 1))
    else:
        Path(name).write_text("x", encoding="utf-8")


@pytest.mark.usefixtures("own_cache")
def test_a_result_without_known_inputs_and_a_failure_are_not_stored(tmp_path: Path) -> None:
    store_followed("a", ScriptResult(inputs=None))
    store_followed("b", ScriptResult(error={"given": "x"}, inputs=()))
    assert load_followed("a") is None
    assert load_followed("b") is None
    store_followed("c", ScriptResult(inputs=()))
    assert load_followed("c") == ScriptResult(inputs=(), is_cached=True)
    for file in tmp_path.rglob("c.json"):
        file.write_text("{", encoding="utf-8")
    assert load_followed("c") is None


def test_libraries_are_no_inputs_and_text_counts_by_its_content(tmp_path: Path) -> None:
    record = InputRecord([str(tmp_path / "scratch")])
    file = tmp_path / "a.py"
    file.write_text("a", encoding="utf-8")
    for name in (
        os.__file__,
        pytest.__file__,
        str(tmp_path / "scratch" / "x"),
        "/proc/self/status",
        str(file),
    ):
        record.add(name)
    assert list(record.paths) == [str(file)]
    before = read_state(str(file))
    os.utime(file, ns=(1, 1))
    assert read_state(str(file)) == before
