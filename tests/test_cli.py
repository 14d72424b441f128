from __future__ import annotations

import ast
import doctest
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import machines as m
import trimtab
from trimtab import api, render
from trimtab.cli.main import COMMANDS, load_command
from trimtab.probe.detect import detect
from trimtab.probe.machine import replay_machine
from trimtab.spec import Cluster, Node

Done = subprocess.CompletedProcess[str]


def trimtab_cli(*args: str, env: dict[str, str] | None = None, columns: int = 80) -> Done:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUDA_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC"))
    }
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
        env=clean | {"COLUMNS": str(columns)} | (env or {}),
    )


def test_help_lists_the_verbs_that_work_and_no_others() -> None:
    done = trimtab_cli("--help")
    assert done.returncode == 0
    commands = done.stdout.partition("Commands:")[2].split("\n")
    assert tuple(line.split()[0] for line in commands if line.strip()) == (*api.VERBS, "help")
    assert tuple(COMMANDS) == (*api.VERBS, "help")
    # Help does not load the commands, so what it says of them must not drift from what they say.
    for name, (_, summary) in COMMANDS.items():
        assert load_command(name).help.split("\n\n")[0].replace("\n", " ") == summary


def test_each_verb_is_a_function_of_the_package() -> None:
    for verb in api.VERBS:
        assert callable(getattr(trimtab, api.FUNCTIONS.get(verb, verb)))


def test_the_version_is_printed() -> None:
    assert trimtab_cli("--version").stdout == f"trimtab {trimtab.__version__}\n"


def test_detect_works_on_this_machine_and_its_json_is_a_cluster() -> None:
    done = trimtab_cli("detect", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for key in ("nodes", "links", "cpu_cores", "ram_bytes", "scheduler", "versions"):
        assert key in found
    assert Cluster.from_json(done.stdout).nodes[0].cpu_cores == found["cpu_cores"]


def test_a_stated_cluster_has_every_key_of_the_contract() -> None:
    (node,) = json.loads(trimtab_cli("detect", "--on", "4xA100-40GB", "--json").stdout)["nodes"]
    assert len(node["devices"]) == 4
    for key in ("name", "memory_bytes", "free_bytes", "compute_capability", "bf16", "sources"):
        assert key in node["devices"][0]


def test_what_detect_writes_on_can_read(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    wrote = trimtab_cli("detect", "--on", "2x8xH100", "--json").stdout
    file.write_text(wrote, encoding="utf-8")
    assert trimtab_cli("detect", "--on", str(file), "--json").stdout == wrote


@pytest.mark.parametrize(
    ("args", "env", "code", "said"),
    [
        (["detect", "--on", "0xH100"], {}, 2, "the count is 0"),
        (["detect", "--on", "4xH1000"], {}, 2, "no device is called 'H1000'; the nearest are H100"),
        (["detect", "--on", ""], {}, 2, "it is empty"),
        (["detect", "--on", "missing.json"], {}, 2, "there is no such file"),
        (["detect"], {"CUDA_VISIBLE_DEVICES": "banana"}, 5, "'banana' is"),
        (["detect"], {"CUDA_VISIBLE_DEVICES": "97"}, 5, "there is no GPU"),
        (["detect"], {"RANK": "0"}, 5, "RANK is set, but WORLD_SIZE is not."),
        (["explain", "bf61"], {}, 2, "no such word"),
        (["detect", "--colour"], {}, 2, "No such option"),
        (["dtect"], {}, 2, "No such command"),
        (["detect", "--record", "/nonexistent/x.json"], {}, 2, "it cannot be written"),
        (["detect", "--on", "H100", "--record", "x.json"], {}, 2, "--on with --record"),
        (["detect", "--on", "H100", "--list"], {}, 2, "--on with --list"),
        (["detect", "--list", "--record", "x.json"], {}, 2, "--list with --record"),
        (["detect", "--on", "9" * 5000 + "xH100"], {}, 2, "a count has 5000 digits"),
        (["detect", "--on", "x" * 100_000], {}, 2, "no device is called"),
        (["detect", "--on", "x" * 5000 + ".json"], {}, 2, "it cannot be read (File name too long)"),
        (["detect"], {"CUDA_VISIBLE_DEVICES": "\u00b2"}, 5, "neither"),
        (["detect"], {"RANK": "\u00b2", "WORLD_SIZE": "2"}, 5, "is not a number"),
        (["detect"], {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "0"}, 5, "which is not a count"),
        (["detect"], {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "c[a-b]"}, 5, "cannot be read"),
    ],
)
def test_a_mistake_gets_a_message_the_right_exit_code_and_no_traceback(
    args: list[str], env: dict[str, str], code: int, said: str
) -> None:
    done = trimtab_cli(*args, env=env)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_an_error_with_json_is_one_json_object_on_stdout() -> None:
    done = trimtab_cli("detect", "--on", "4xH1000", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == done.returncode == 2
    assert set(error) == {"given", "found", "cure", "exit_code"}


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["detect", "--colour", "--json"], "No such option: --colour"),
        (["dtect", "--json"], "No such command 'dtect'"),
        (["detect", "--json", "--on"], "Option '--on' requires an argument"),
        (["exam", "a", "--json"], "unexpected extra argument"),
    ],
)
def test_wrong_options_with_json_are_one_json_object_too(args: list[str], found: str) -> None:
    done = trimtab_cli(*args)
    error = json.loads(done.stdout)["error"]
    assert found in error["found"]
    assert error["exit_code"] == done.returncode == 2
    assert "--help" in error["cure"]
    assert "Error:" in done.stderr


def test_the_list_of_devices_is_json_where_that_is_asked_for() -> None:
    listed = json.loads(trimtab_cli("detect", "--list", "--json").stdout)["devices"]
    (h100,) = [one for one in listed if one["name"] == "H100"]
    assert len(listed) == 69
    assert h100["memory_bytes"] == trimtab.cluster("H100").devices[0].memory_bytes
    assert h100["peaks"]["bf16"] == pytest.approx(989.4e12)
    assert "NVIDIA H100 80GB HBM3" in h100["also"]


def shell(line: str, **env: str) -> Done:
    command = line.replace("trimtab", f"{sys.executable} -m trimtab", 1)
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
        env=os.environ | env,
    )


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("trimtab detect --on 2xH100 > /dev/full", 5, "No space left on device"),
        ("trimtab --help > /dev/full", 5, "No space left on device"),
        ("trimtab detect --on 0xH100 --json > /dev/full", 2, "the count is 0"),
        ("trimtab detect --on 2xH100 > /dev/full 2> /dev/full", 5, ""),
        ("trimtab detect --on 2xH100 >&-", 5, "it is closed"),
        ("trimtab detect --on 2xH100 --json >&-", 5, "it is closed"),
        ("trimtab detect --on 2xH100 2>&-", 0, ""),
        ("trimtab detect --on 0xH100 2>&-", 2, ""),
        ("trimtab --help | true; exit ${PIPESTATUS[0]}", 0, ""),
        ("trimtab detect --list --json | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}", 0, ""),
        ("trimtab explain 2>&1 | true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_an_answer_that_nobody_takes_ends_without_a_traceback(line: str, code: int, said: str) -> None:
    done = shell(line)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_letters_that_the_output_cannot_hold_are_spelt_out(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(Cluster(nodes=(Node(name="caf\u00e9", cpu_cores=4),)).to_json(), encoding="utf-8")
    done = shell(f"trimtab detect --on {file}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "caf\\xe9: 4 cores" in done.stdout


def test_ctrl_c_ends_with_130_and_nothing_else(tmp_path: Path) -> None:
    pipe = tmp_path / "never.json"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-m", "trimtab", "detect", "--on", str(pipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        # The program opens the pipe to read and waits there; only then can the other end be opened.
        writer = _open_when_read(pipe)
        for attempt in range(400):
            # A signal that comes between two system calls waits for the next one, so there are several.
            if attempt % 40 == 0:
                running.send_signal(signal.SIGINT)
            if running.poll() is not None:
                break
            time.sleep(0.05)
        running.kill()
        os.close(writer)
        out, err = running.communicate(timeout=240)
    assert (running.returncode, out, err) == (130, "", "")


def _open_when_read(pipe: Path) -> int:
    for _ in range(600):
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody reads the pipe")


def test_ctrl_c_while_the_program_still_loads_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n", encoding="utf-8")
    done = trimtab_cli("detect", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_finding_with_json_leaves_stdout_pure_json() -> None:
    done = trimtab_cli("detect", "--json", env={"CUDA_VISIBLE_DEVICES": "banana"})
    assert done.returncode == 5
    assert json.loads(done.stdout)["findings"][0]["severity"] == "error"
    assert "banana" in done.stderr


def test_explain_prints_the_entry_and_its_json_has_the_text() -> None:
    assert "16-bit floating point" in trimtab_cli("explain", "bf16").stdout
    entry = json.loads(trimtab_cli("explain", "bf16", "--json").stdout)
    assert entry["text"].startswith(entry["what"])


def test_explain_alone_lists_every_word() -> None:
    listed = trimtab_cli("explain").stdout
    for word in json.loads(trimtab_cli("explain", "--json").stdout)["words"]:
        assert word in listed


def test_a_recording_can_be_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    done = trimtab_cli("detect", "--json", "--record", str(file))
    again = detect(replay_machine(json.loads(file.read_text(encoding="utf-8"))))
    assert Cluster.from_json(done.stdout) == again


@pytest.mark.parametrize(
    "args",
    [
        ["detect"],
        ["detect", "--on", "2x8xH100", "--sources"],
        ["detect", "--list"],
        ["explain"],
        ["explain", "out-of-memory"],
    ],
)
def test_piped_output_keeps_to_its_width_without_colour_or_trailing_blanks(args: list[str]) -> None:
    done = trimtab_cli(*args)
    assert "\x1b" not in done.stdout
    for line in done.stdout.splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()


def test_no_color_is_respected_on_a_terminal() -> None:
    forced = {"FORCE_COLOR": "1"}
    assert "\x1b[" in trimtab_cli("explain", "bf16", env=forced).stdout
    plain = trimtab_cli("explain", "bf16", env=forced | {"NO_COLOR": "1"}).stdout
    assert "\x1b[3" not in plain


LOADED = "import sys; from trimtab.cli import run\ntry:\n    run()\nfinally:\n    print({0!r} in sys.modules)"


@pytest.mark.parametrize("args", [["--help"], ["explain", "bf16"], ["detect"], ["detect", "--on", "H200"]])
def test_torch_is_not_imported(args: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format("torch"), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_importing_trimtab_imports_nothing_heavy() -> None:
    code = (
        "import sys, trimtab; print([m for m in ('torch', 'rich', 'typer', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(trimtab).failed == 0
    assert doctest.testmod(api).failed == 0
    assert doctest.testmod(render).failed == 0
    assert doctest.testmod(trimtab).attempted == 3


def test_the_public_names_are_exactly_the_listed_ones() -> None:
    # Not listed, so that `from trimtab import *` leaves Python's max alone.
    assert dir(trimtab) == sorted([*trimtab.__all__, "max"])
    for name in trimtab.__all__:
        assert getattr(trimtab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trimtab.nonsense


def shown(record: dict[str, Any], width: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(render.render_cluster(detect(replay_machine(record)), heading="This machine"))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


@pytest.mark.parametrize("name", m.MACHINES)
def test_every_machine_is_readable_at_80_columns(name: str) -> None:
    text = shown(m.MACHINES[name]())
    assert max(len(line) for line in text.splitlines()) <= 80
    found = detect(replay_machine(m.MACHINES[name]()))
    for device in found.devices:
        assert device.name.split()[-1] in text


def test_each_group_of_nodes_shows_its_own_links() -> None:
    text = trimtab_cli("detect", "--on", "2x8xH100+1x4xA100-40GB", columns=200).stdout
    assert "node0, node1: any two of the 8 GPUs: NVLink4, 450 GB/s each way (in each node alike)" in text
    assert "node2: any two of the 4 GPUs: NVLink3, 300 GB/s each way\n" in text


def test_straight_links_show_the_pair_and_the_whole() -> None:
    text = trimtab_cli("detect", "--on", "8xMI300X", columns=200).stdout
    assert "Infinity Fabric, 64 GB/s each way, 448 GB/s from one to all others" in text


@pytest.mark.parametrize("name", m.MACHINES)
@pytest.mark.parametrize("width", [40, 55, 69, 120])
def test_a_narrow_terminal_loses_columns_but_no_letters(name: str, width: int) -> None:
    text = shown(m.MACHINES[name](), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\u2026" not in text
    found = detect(replay_machine(m.MACHINES[name]()))
    for device in found.devices:
        assert all(word in text for word in device.name.split())
        assert f"{device.memory_bytes / 2**30:.1f}" in text


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize(
    "args", [["detect", "--list"], ["detect", "--on", "8xMI300X", "--sources"], ["explain"]]
)
def test_other_tables_keep_to_a_narrow_terminal_too(args: list[str], width: int) -> None:
    text = trimtab_cli(*args, columns=width).stdout
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\u2026" not in text


def test_columns_go_from_the_right() -> None:
    heads = [shown(m.recorded("h200"), width).splitlines()[2].split() for width in (40, 60, 80)]
    assert heads[0] == ["GPU", "name", "GiB", "free", "sm"]
    assert heads[1][: len(heads[0])] == heads[0]
    assert heads[2][-1] == "power"


def test_control_characters_in_names_are_shown_inert() -> None:
    record = m.machine([m.h100(name="NVIDIA\x1b]0;owned\x07 X")], host={"name": "box\r\n\u202e"})
    text = shown(record, 120)
    assert "NVIDIA\\x1b]0;owned\\x07 X" in text
    assert "box\\r\\n\\u202e" in text
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}


def test_a_derived_peak_is_marked_on_the_terminal() -> None:
    unknown = m.rtx4090(name="NVIDIA GeForce RTX 4090 D")
    assert "~203 TFLOP/s" in shown(m.machine([unknown]))


def test_markup_in_a_name_is_shown_inert() -> None:
    record = m.machine([m.h100(name="[red]NVIDIA[/red]")], host={"name": "[bold]box"})
    text = shown(record)
    assert "[red]NVIDIA[/red]" in text
    assert "[bold]box" in text


def _options_in(file: Path) -> list[tuple[str, str]]:
    """The options that a module of commands writes out itself, each with its type and its help."""
    every = ast.walk(ast.parse(file.read_text("utf-8")))
    given = [arg for made in every if isinstance(made, ast.FunctionDef) for arg in made.args.args]
    written = [(one.arg, ast.unparse(one.annotation)) for one in given if one.annotation]
    return [(name, text) for name, text in written if text.startswith("Annotated")]


def test_an_option_of_several_commands_is_written_once() -> None:
    folder = Path(trimtab.__file__).parent / "cli"
    written = [one for file in sorted(folder.glob("*.py")) for one in _options_in(file)]
    assert len(written) > 20
    assert [key for key, count in Counter(written).items() if count > 1] == []
    # The same choices, whoever is told them.
    shared = ("restarts", "steps", "pin", "rendezvous", "micro_batch")
    assert [one for one, _ in written if one in shared] == []
