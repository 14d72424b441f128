"""`trimtab explore`: the server over real HTTP, and its page in a real Chromium."""

from __future__ import annotations

import doctest
import http.client
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import config_samples
import trimtab
from browser import CHROMIUM, WHY_NOT, Browser
from trimtab.api.exploring import open_explorer
from trimtab.calculator import owners, plans
from trimtab.calculator.choices import ExploreChoice
from trimtab.calculator.owners import share_parameters
from trimtab.calculator.traces import WorkQueue
from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.predict import memory
from trimtab.predict.memory import OTHERS, PartOwner, group_owners
from trimtab.spec import BaseFormat, Setting
from trimtab.spec.requests import ExploreRequest
from trimtab.training.job_queries import ParameterFacts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trimtab.calculator.server import ExploreServer

PATIENCE_S = 240.0


@contextmanager
def serve(request: ExploreRequest) -> Iterator[ExploreServer]:
    """Serve a page on a port of its own."""
    opened = open_explorer(request)
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield opened
    opened.shutdown()
    thread.join()
    opened.server_close()
    opened.explorer.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ExploreServer]:
    with serve(ExploreRequest("slm:tiny", "H100", price=2.0)) as opened:
        yield opened


def send(
    server: ExploreServer, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
        connection.request(
            method, path, body or None, {name.replace("_", "-"): headers[name] for name in headers}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def ask(server: ExploreServer, place: str, **choice: Any) -> dict[str, Any]:
    body = json.dumps({"device": "H100", "micro_batch": 8, **choice}).encode()
    status, _, answer = send(
        server, "POST", f"/{server.token}/{place}", body, Content_Type="application/json"
    )
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


def wait(server: ExploreServer, place: str = "estimate", **choice: Any) -> dict[str, Any]:
    """Ask until the traces are there."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := ask(server, place, **choice))["status"] == "tracing":
        assert answer["what"]
        assert answer["elapsed_s"] >= 0
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return answer


def figure(answer: dict[str, Any], name: str) -> str:
    return next(str(item["value"]) for item in answer["figures"] if item["name"] == name)


def test_only_the_address_with_its_token_is_answered(server: ExploreServer) -> None:
    good = f"/{server.token}/"
    assert send(server, "GET", good)[0] == 200
    wrong = [
        "/",
        f"/{server.token}",
        f"/{server.token[:-1]}/",
        f"/x{server.token}/",
        "/style.css",
        "/../",
        "//",
    ]
    for path in wrong:
        assert send(server, "GET", path)[0] == 403, path
        assert send(server, "POST", f"{path}estimate", b"{}", Content_Type="application/json")[0] == 403, path


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
def test_another_site_is_refused_even_with_the_token(server: ExploreServer, headers: dict[str, str]) -> None:
    assert send(server, "GET", f"/{server.token}/", b"", **headers)[0] == 403


def test_the_server_listens_on_this_machine_only(server: ExploreServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert len(server.token) >= 32


def test_each_answer_has_a_strict_policy_and_no_asset_names_another_place(server: ExploreServer) -> None:
    for name in ("", "explore.js", "view.js", "explore.css", "style.css", "script.js", "choices"):
        status, headers, body = send(server, "GET", f"/{server.token}/{name}")
        assert status == 200, name
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert not re.findall(rb"(?:https?:)?//[a-z0-9.]+\.[a-z]{2,}", body), name
    assert {"page.html", "explore.js", "explore.css"} <= {
        file.name for file in files("trimtab.calculator").iterdir()
    }


@pytest.mark.parametrize(
    ("path", "body", "kind", "status"),
    [
        ("estimate", b"{", "application/json", 400),
        ("estimate", b"[]", "application/json", 400),
        ("estimate", b'{"micro_batch": 0}', "application/json", 400),
        ("estimate", b'{"micro_batch": "8"}', "application/json", 400),
        ("estimate", b'{"gpus": 1e9}', "application/json", 400),
        ("estimate", b'{"price": -1}', "application/json", 400),
        ("estimate", b'{"command": "rm"}', "application/json", 400),
        ("estimate", b"{}", "text/plain", 415),
        ("estimate", b"{}" + b" " * 70_000, "application/json", 413),
        ("nothing", b"{}", "application/json", 404),
    ],
)
def test_bad_questions_are_refused(
    server: ExploreServer, path: str, body: bytes, kind: str, status: int
) -> None:
    found, _, answer = send(server, "POST", f"/{server.token}/{path}", body, Content_Type=kind)
    assert found == status, answer
    assert json.loads(answer)["error"]["found"]


def test_the_page_offers_what_the_job_has(server: ExploreServer) -> None:
    choices = json.loads(send(server, "GET", f"/{server.token}/choices")[2])
    assert choices["start"]["device"] == "H100"
    assert choices["start"]["price"] == 2.0
    assert {"A100-40GB", "RTX 4090"} <= {device["value"] for device in choices["devices"]}
    assert choices["seq"]["name"] == "seq"
    assert choices["lora"] is None
    assert {"value": "ddp", "several": True} in choices["strategies"]
    assert "branch" not in {rules["value"] for rules in choices["strategies"]}


def test_an_answer_is_the_estimate_of_its_command_and_others_follow_at_once(server: ExploreServer) -> None:
    answer = wait(server)
    command = shlex.split(answer["command"])
    assert command == ["trimtab", "estimate", "slm:tiny", "--on", "H100", "--micro-batch", "8"]
    same = trimtab.estimate("slm:tiny", "H100", micro_batch=8)
    assert answer["status"] == "ready"
    assert answer["verdict"] == "fits"
    assert answer["memory"]["bytes"] == same.process_bytes
    assert answer["time"]["seconds"] == pytest.approx(same.step_s)
    assert sum(part["value"] for part in answer["memory"]["parts"]) == same.process_bytes
    assert sum(part["share"] for part in answer["time"]["parts"]) == pytest.approx(1)
    assert all(drawing.startswith("<svg") for drawing in answer["memory"]["drawings"])
    # Another micro-batch, a GPU with the same kernels, and several GPUs with a copy of the model each need no
    # further trace.
    newer = ask(server, "estimate", device="H200")
    assert newer["status"] == "ready"
    assert newer["time"]["seconds"] < answer["time"]["seconds"], "its memory is faster"
    larger = ask(server, "estimate", micro_batch=11)
    assert larger["status"] == "ready"
    assert larger["memory"]["bytes"] >= answer["memory"]["bytes"]
    several = ask(server, "estimate", gpus=16, strategy="ddp")
    assert several["status"] == "ready"
    assert "--on 2x8xH100" in several["command"]
    assert {"compute", "communication"} <= {part["name"] for part in several["time"]["parts"]}


def test_each_part_says_what_it_is_and_names_the_modules_that_own_it(server: ExploreServer) -> None:
    answer = wait(server)
    described = wait(server, "owners")["parts"]
    parts = {part["name"]: part["value"] for part in answer["memory"]["parts"]}
    assert set(described) == set(parts)
    assert all(part["what"] for part in described.values())
    assert "cuBLAS" in described["workspace"]["what"]
    # Blocks of the same shape are one line.
    for name in ("weights", "optimizer", "activations"):
        assert "blocks.*.attention.inward (2 modules)" in [
            owner["name"] for owner in described[name]["owners"]
        ]
    assert [owner["name"] for owner in described["inputs"]["owners"]] == ["the batch"]
    assert described["context"]["owners"] == []
    assert "first used in blocks.0.attention.inward" in [
        owner["name"] for owner in described["workspace"]["owners"]
    ]
    refused = ask(server, "owners", strategy="ddp")
    assert refused["status"] == "refused"


def test_the_memory_of_nccl_is_named_as_such(server: ExploreServer) -> None:
    wait(server, gpus=8, strategy="ddp")
    described = wait(server, "owners", gpus=8, strategy="ddp")["parts"]
    (owner,) = described["communication"]["owners"]
    assert owner["name"] == "NCCL's kernels and buffers"
    assert owner["shown"].endswith("GiB")


def test_owners_of_weights_and_optimizer_state_follow_from_the_parameters() -> None:
    parameters = {
        "base.0.weight": ParameterFacts(1000, 2000, is_trained=False, is_matrix=True),
        "base.1.weight": ParameterFacts(1000, 2000, is_trained=False, is_matrix=True),
        "adapter.weight": ParameterFacts(100, 200, is_trained=True, is_matrix=True),
    }
    plain = Setting(micro_batch=1, global_batch=1)
    assert share_parameters("weights", 4200, plain, parameters) == [
        PartOwner("base.*", 2, 4000),
        PartOwner("adapter", 1, 200),
    ]
    # Frozen matrices in 4 bits take a quarter of their 16.
    stored = plain.replace(base=BaseFormat.NF4)
    assert share_parameters("weights", 1200, stored, parameters) == [
        PartOwner("base.*", 2, 1000),
        PartOwner("adapter", 1, 200),
    ]
    assert share_parameters("optimizer", 800, plain, parameters) == [PartOwner("adapter", 1, 800)]
    assert share_parameters("weights", 800, plain, {}) == []


def test_the_parts_of_a_trace_are_shared_out_without_a_rest() -> None:
    listed = group_owners([(f"layer.{number}.{name}", 10) for number in range(3) for name in "abcdefghij"])
    assert len(listed) == 9
    assert listed[-1] == PartOwner(OTHERS, 6, 60)
    assert sum(owner.size for owner in listed) == 300


def test_the_plan_of_a_configuration_is_opened_as_a_page(server: ExploreServer) -> None:
    opened = wait(server, "plan")
    assert opened["setting"] == "1 GPU, single, micro-batch 8 x 2, bf16"
    command = shlex.split(opened["command"])
    assert command[:5] == ["trimtab", "plan", "slm:tiny", "--on", "H100"]
    same = trimtab.plan("slm:tiny", "H100", memory=1.0, pins=[command[command.index("--pin") + 1]])
    assert same.choice.micro_batch == 8
    assert (same.choice.gpus, same.choice.compile) == (1, False)
    status, headers, page = send(server, "GET", f"/{server.token}/{opened['page']}")
    assert status == 200
    assert b"Memory by part" in page
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert send(server, "GET", f"/{server.token}/plan/0123")[0] == 404
    assert send(server, "GET", f"/x/{opened['page']}")[0] == 403
    # A plan keeps the job's global batch, so a larger micro-batch has no plan, and the page says why.
    refused = wait(server, "plan", micro_batch=64)
    assert "global batch 16" in refused["error"]["found"]


def change(server: ExploreServer, file: str, seen: str = "", **choice: Any) -> dict[str, Any]:
    """Ask for the diff of a config file, or with `seen` to write it."""
    question = {"choice": {"device": "H100", "micro_batch": 8, **choice}, "file": file, "seen": seen}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status, _, text = send(
            server,
            "POST",
            f"/{server.token}/config",
            json.dumps(question).encode(),
            Content_Type="application/json",
        )
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        if answer["status"] != "tracing":
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_config_is_written_after_its_diff_was_seen_and_can_be_reverted(
    server: ExploreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.explorer.plans, "root", tmp_path.resolve())
    config = tmp_path / "ds.json"
    config.write_text(config_samples.DEEPSPEED, encoding="utf-8")
    shown = change(server, "ds.json")
    assert '+  "train_micro_batch_size_per_gpu": 8,' in shown["diff"]
    assert shown["written"] == []
    assert any("sequence length" in note for note in shown["said"])
    assert config.read_text(encoding="utf-8") == config_samples.DEEPSPEED
    # What was seen is written, and nothing else: neither another file nor another configuration.
    assert "has changed since" in change(server, "ds.json", "0" * 64)["error"]["found"]
    assert "has changed since" in change(server, "ds.json", shown["seen"], micro_batch=4)["error"]["found"]
    config.write_text(config_samples.DEEPSPEED.replace("64", "32", 1), encoding="utf-8")
    assert "has changed since" in change(server, "ds.json", shown["seen"])["error"]["found"]
    config.write_text(config_samples.DEEPSPEED, encoding="utf-8")
    written = change(server, "ds.json", shown["seen"])
    assert written["written"] == ["ds.json"]
    assert json.loads(config.read_text(encoding="utf-8"))["train_micro_batch_size_per_gpu"] == 8
    assert change(server, "ds.json")["diff"] == ""
    trimtab.revert("ds.json")
    assert config.read_text(encoding="utf-8") == config_samples.DEEPSPEED


def test_no_file_outside_of_the_folder_of_the_command_is_read_or_written(
    server: ExploreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "ds.json").write_text(config_samples.DEEPSPEED, encoding="utf-8")
    (inside / "link.json").symlink_to(outside / "ds.json")
    (inside / "folder").symlink_to(outside)
    monkeypatch.chdir(inside)
    monkeypatch.setattr(server.explorer.plans, "root", inside.resolve())
    places = (
        "../outside/ds.json",
        str(outside / "ds.json"),
        "link.json",
        "folder/ds.json",
        "/etc/passwd",
        "~/x",
    )
    for place in places:
        error = change(server, place)["error"]
        assert "outside of" in error["found"] or "no such file" in error["found"], place
        assert error["cure"]
    assert "outside of" in change(server, "link.json")["error"]["found"]
    assert "no such file" in change(server, "nothing.yaml")["error"]["found"]
    assert "no such file" in change(server, ".")["error"]["found"]
    assert "zero byte" in change(server, "a\0b")["error"]["found"]
    assert "too long" in change(server, "x" * 4000)["error"]["found"]
    assert (outside / "ds.json").read_text(encoding="utf-8") == config_samples.DEEPSPEED
    assert not list(outside.glob(".trimtab"))


@pytest.mark.parametrize(
    "body", [b"{}", b'{"choice": {}}', b'{"choice": {}, "file": ""}', b'{"choice": {}, "file": 1}']
)
def test_a_config_question_without_a_file_is_refused(server: ExploreServer, body: bytes) -> None:
    path = f"/{server.token}/config"
    assert send(server, "POST", path, body, Content_Type="application/json")[0] == 400
    assert send(server, "POST", "/x/config", body, Content_Type="application/json")[0] == 403


def test_figures_count_the_whole_job_and_its_cost(server: ExploreServer) -> None:
    answer = wait(server)
    dear = ask(server, "estimate", price=1000.0)
    assert figure(answer, "cost") == "set a price"
    hours = float(figure(dear, "GPU-hours"))
    assert float(figure(dear, "cost")) == pytest.approx(1000 * hours, rel=0.01)
    assert figure(answer, "tokens/s").replace(",", "").isdecimal()
    assert "global batch" in ask(server, "estimate", micro_batch=12)["step_note"]


def test_the_edge_is_the_last_micro_batch_that_fits(server: ExploreServer) -> None:
    edge = wait(server, "edge")
    assert edge["next"] == edge["largest"] + 1
    assert wait(server, micro_batch=edge["largest"])["verdict"] == "fits"
    beyond = wait(server, micro_batch=edge["next"])
    assert beyond["verdict"] != "fits"
    assert "activations" in edge["stops"]
    assert "activations" in beyond["reason"]
    assert "GiB" in beyond["reason"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"gpus": 12, "strategy": "ddp"}, "nodes"),
        ({"device": "T4"}, "bf16"),
        ({"strategy": "ddp"}, "GPU"),
        ({"precision": "fp3"}, "fp3"),
        ({"device": "H1000"}, "H1000"),
        ({"device": "", "gpus": 3}, "3 GPUs"),
        ({"strategy": "everywhere", "gpus": 2}, "everywhere"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(
    server: ExploreServer, choice: dict[str, Any], says: str
) -> None:
    answer = wait(server, **choice)
    assert answer["status"] == "refused"
    assert says in " ".join(answer["error"].values())
    assert answer["error"]["cure"]


def test_the_command_repeats_every_choice(server: ExploreServer) -> None:
    choice = ExploreChoice(
        device="RTX 4090",
        gpus=2,
        micro_batch=4,
        precision="bf16-true",
        recompute="full",
        strategy="fsdp",
        seq=32,
        price=3.0,
    )
    command = server.explorer.choices.write_command(choice)
    assert command == (
        "trimtab estimate slm:tiny --on '2xRTX 4090' --micro-batch 4 --precision bf16-true --recompute full "
        "--strategy fsdp --set seq=32"
    )
    own = msgspec.structs.replace(choice, seq=server.explorer.choices.start().seq)
    assert "seq" not in server.explorer.choices.write_command(own)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert [doctest.testmod(module).failed for module in (memory, owners, plans)] == [0, 0, 0]


def test_a_port_in_use_is_an_error_with_the_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match="another program uses it") as caught:
            open_explorer(ExploreRequest("slm:tiny", "H100", port=port))
    assert f"--port {port}" in caught.value.given
    with pytest.raises(WrongUse, match="ports are 0 to 65535"):
        open_explorer(ExploreRequest("slm:tiny", "H100", port=70_000))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ExploreRequest("nothing.py:Job", "H100"), "nothing.py"),
        (ExploreRequest("slm:tiny", "H100", precision="fp3"), "fp3"),
        (ExploreRequest("slm:tiny", "4xH100", strategy="sideways"), "sideways"),
    ],
)
def test_a_wrong_command_fails_before_anything_is_served(request_: ExploreRequest, says: str) -> None:
    with pytest.raises(WrongUse, match=says):
        open_explorer(request_)


def test_several_gpus_start_with_copies_of_the_model() -> None:
    opened = open_explorer(ExploreRequest("slm:tiny", "4xH100"))
    start = opened.explorer.choices.start()
    opened.server_close()
    opened.explorer.close()
    assert (start.device, start.gpus, start.strategy) == ("H100", 4, "ddp")


def test_the_queue_does_the_newest_first_and_raises_errors_once() -> None:
    queue = WorkQueue()
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    done: list[str] = []

    def block() -> None:
        begun.set()
        go.wait(60)

    def fail() -> None:
        raise JobFailed("the job", found="it broke", cure="Repair it.")

    def end() -> None:
        done.append("old")
        ended.set()

    try:
        queue.ask("first", "first", block)
        assert begun.wait(60)
        assert "after" not in queue.ask("first", "first", block)
        assert queue.ask("old", "old", end)["after"] == "first"
        queue.ask("bad", "bad", fail)
        queue.ask("new", "new", lambda: done.append("new"))
        go.set()
        assert ended.wait(60)
        assert done == ["new", "old"]
        with pytest.raises(JobFailed, match="it broke"):
            queue.ask("bad", "bad", fail)
    finally:
        go.set()
        queue.close()


SMALL_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "vocab_size": 4096,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.slow
def test_adapters_on_a_quantised_base_and_a_job_file_can_be_explored(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA), encoding="utf-8")
    with serve(ExploreRequest(f"hf:{tmp_path}", "RTX 4090", options={"seq": 128})) as server:
        plain = wait(server, device="RTX 4090", micro_batch=4)
        assert plain["status"] == "ready"
        adapted = wait(server, device="RTX 4090", micro_batch=4, lora=8)
        assert adapted["command"].endswith("--seq 128 --lora 8")
        assert bytes_of(adapted, "optimizer") < bytes_of(plain, "optimizer") / 4
        stored = wait(server, device="RTX 4090", micro_batch=4, lora=8, base="nf4")
        assert "--base nf4" in stored["command"]
        assert bytes_of(stored, "weights") < bytes_of(adapted, "weights")
        # Weights that are trained cannot be stored in 4 bits: the page says what to do.
        refused = wait(server, device="RTX 4090", micro_batch=4, base="nf4")
        assert refused["status"] == "refused"
        assert "lora" in refused["error"]["cure"].lower()
    job = tmp_path / "mine.py"
    job.write_text(JOB_FILE, encoding="utf-8")
    with serve(ExploreRequest(f"{job}:Mine", "RTX 4090")) as server:
        answer = wait(server, device="RTX 4090", micro_batch=2)
        assert answer["status"] == "ready"
        assert answer["command"].startswith(f"trimtab estimate {job}:Mine")


def bytes_of(answer: dict[str, Any], name: str) -> float:
    return next((float(part["value"]) for part in answer["memory"]["parts"] if part["name"] == name), 0.0)


JOB_FILE = """
import torch
from torch import nn


class Mine:
    global_batch, samples = 16, 1000

    def model(self):
        net = nn.Module()
        net.layer = nn.Linear(64, 64)
        net.forward = lambda x: net.layer(x)
        return net

    def batch(self, size):
        return torch.randn(size, 64)

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


@pytest.mark.slow
def test_the_command_prints_its_address_once_and_ends_with_ctrl_c() -> None:
    argv = [sys.executable, "-m", "trimtab", "explore", "slm:tiny", "--on", "H100", "--no-browser"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", url).groups()  # type: ignore[union-attr]
        with closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)) as connection:
            connection.request("GET", f"/{token}/")
            assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in errors
    assert "Ctrl-C ends it" in errors


READY = "document.getElementById('results').dataset.status === 'ready'"
EDGE = "document.getElementById('edge').textContent.startsWith('Fits up to')"


def text(browser: Browser, name: str) -> str:
    return str(browser.asks(f"document.getElementById('{name}').textContent"))


def use_plan_and_config(browser: Browser, config: Path) -> None:
    """Open owners by click and by key, open the plan, and write a config after its diff."""
    row = "#memory-parts [data-part=weights] button"
    rows = "document.querySelectorAll('#memory-parts [data-part=weights] .owners li').length"
    browser.click(row)
    browser.wait_for(f"{rows} > 1")
    assert browser.asks(f"document.querySelector('{row}').ariaExpanded") == "true"
    browser.asks(f"document.querySelector('{row}').focus()")
    browser.key("Enter", 13, "\r")
    browser.wait_for(f"{rows} === 0")
    # The bar itself opens the same list, by a click and by a key.
    mark = "document.querySelector('#memory-bar .mark[aria-label^=activations]')"
    browser.asks(f"{mark}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))")
    browser.wait_for("document.querySelectorAll('[data-part=activations] .owners li').length > 1")
    browser.asks(f"{mark}.dispatchEvent(new KeyboardEvent('keydown', {{ key: ' ', bubbles: true }}))")
    browser.wait_for("document.querySelectorAll('[data-part=activations] .owners li').length === 0")
    assert browser.asks("document.activeElement.closest('li').dataset.part") == "activations"
    assert text(browser, "took").startswith("Answered in ")
    # A file outside is refused, one inside is shown first and then written.
    browser.asks("document.getElementById('config').focus()")
    browser.call("Input.insertText", text="../elsewhere.json")
    browser.key("Enter", 13, "\r")
    browser.wait_for("document.getElementById('config-done').textContent.includes('outside of')")
    browser.asks("document.getElementById('config').value = ''")
    browser.asks("document.getElementById('config').focus()")
    browser.call("Input.insertText", text=config.name)
    browser.click("#show-diff")
    browser.wait_for("!document.getElementById('diff').hidden")
    assert browser.asks("document.querySelectorAll('#diff .added').length") > 1
    assert config.read_text(encoding="utf-8") == config_samples.DEEPSPEED
    browser.click("#write")
    browser.wait_for("document.getElementById('config-done').textContent.startsWith('Written: ds.json')")
    assert "trimtab revert ds.json" in text(browser, "config-done")
    assert config.read_text(encoding="utf-8") != config_samples.DEEPSPEED
    browser.click("#open-plan")
    browser.wait_for("!document.getElementById('plan').hidden")
    assert browser.asks("document.getElementById('plan-page').getAttribute('href')").startswith("plan/")
    # The plan's own tab is in front now.
    browser.call("Page.bringToFront")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_page_in_chromium(server: ExploreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "configs" / "ds.json"
    config.parent.mkdir()
    config.write_text(config_samples.DEEPSPEED, encoding="utf-8")
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr(server.explorer.plans, "root", config.parent.resolve())
    with Browser(tmp_path / "profile") as browser:
        browser.call(
            "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
        )
        browser.size(1200)
        browser.open(server.url)
        browser.wait_for(READY)
        browser.wait_for(EDGE)
        assert text(browser, "headline").startswith("Fits: ")
        use_plan_and_config(browser, config)
        # The keyboard moves the slider by one, and the screen reader hears the verdict.
        browser.asks("document.getElementById('slider').focus()")
        browser.key("ArrowRight", 39)
        browser.wait_for("document.getElementById('micro_batch').value === '9'")
        browser.wait_for("document.getElementById('command').textContent.endsWith('--micro-batch 9')")
        browser.wait_for("document.getElementById('announce').textContent.startsWith('Fits')")
        assert text(browser, "took").endswith(" ms from traces already made.")
        assert "9 samples, Fits" in browser.asks(
            "document.getElementById('slider').getAttribute('aria-valuetext')"
        )
        browser.click("#keep")
        # Dragged beyond the edge, it does not fit, and the page says why.
        y = browser.centre("#slider")[1]
        left, width = browser.asks(
            "(() => { const box = document.getElementById('slider').getBoundingClientRect();"
            " return [box.left, box.width]; })()"
        )
        position = browser.asks(
            "document.getElementById('slider').value / document.getElementById('slider').max"
        )
        browser.drag((left + 8 + position * (width - 16), y), (left + width - 4, y))
        browser.wait_for("document.getElementById('verdict').classList.contains('does-not-fit')")
        assert "activations" in text(browser, "reason")
        browser.wait_for(READY)
        browser.click("#copy")
        browser.wait_for("document.getElementById('done').textContent === 'Copied.'")
        read = "navigator.clipboard.readText()"
        copied = browser.call("Runtime.evaluate", expression=read, awaitPromise=True, returnByValue=True)
        assert copied["result"]["value"] == text(browser, "command")
        assert "trimtab estimate slm:tiny --on H100 --micro-batch" in copied["result"]["value"]
        # Two configurations side by side.
        browser.click("#keep")
        assert browser.asks("document.querySelectorAll('#cards article').length") == 2
        assert browser.asks("document.querySelectorAll('#cards .differs').length") == 1
        browser.click("#cards article:first-child button:last-child")
        assert browser.asks("document.querySelectorAll('#cards article').length") == 1
        # Several GPUs change the strategy, and the page says so.
        browser.asks(
            "(() => { const gpus = document.getElementById('gpus'); gpus.value = '4';"
            " gpus.dispatchEvent(new Event('change')); })()"
        )
        browser.wait_for("document.getElementById('command').textContent.includes('--strategy ddp')")
        assert "ddp" in text(browser, "note")
        for wide in (390, 800, 1600):
            browser.size(wide)
            for scheme in ("light", "dark"):
                browser.media(scheme=scheme)
                assert browser.asks("document.documentElement.scrollWidth") <= wide
        unnamed = (
            "[...document.querySelectorAll('input, select, button')].filter((element) =>"
            " !element.labels?.length && !element.ariaLabel && !element.textContent.trim())"
            ".map(({ id }) => id)"
        )
        assert browser.asks(unnamed) == []
    assert browser.said == []
    assert [url for url in browser.asked if not url.startswith(server.url)] == []
