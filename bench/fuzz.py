"""Fuzz the readers of foreign bytes: damage real inputs, and count refusals, tracebacks and hangs by reader.

    python bench/fuzz.py                          1,000 inputs for each reader
    python bench/fuzz.py --inputs 100000 --readers yaml,plan --out fuzz.jsonl
    python bench/fuzz.py --show yaml:4711         one input again, with its traceback

An input depends only on the seed, the reader and its number. A reader may accept an input, or refuse it with
an error of trimtab. Anything else is a traceback. An input hangs that takes more than a second of CPU time,
or a second a megabyte if it is larger than one. Each reader runs in a child process with a limit on memory,
so that a crash of the interpreter is counted as well.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import mmap
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from trimtab.errors import TrimtabError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

Feed = dict[str, bytes]
"""Contents by file name: what a reader finds in its folder."""

HANG_S = 1.0
"""CPU seconds that any input may take, and each megabyte of a larger one."""
MEMORY_BYTES = 4 << 30
"""Address space that a reader may add to what its process has at the start."""
NOTED = 50
"""Inputs after which the tally is noted, in case that the process ends."""
LONGEST_MESSAGE = 20_000
"""Characters of an error; a longer one repeats the input."""
STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    -0.0,
    0.5,
    1e308,
    -1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    "",
    " ",
    "\x00",
    "\x1b[31m",
    "\ud800",
    "é" * 50,
    "\u2028",
    "x" * 5000,
    "9" * 5000,
    "1e999",
    "-1",
    "nan",
    "../../etc/passwd",
    [],
    {},
    [[]],
    {"": {}},
    [None],
)
NUMBERS = (
    b"0",
    b"-1",
    b"1e999",
    b"-1e999",
    b"9" * 400,
    b"9" * 5000,
    b"NaN",
    b"0x",
    b"1_0",
    b".",
    b"18446744073709551616",
)
NESTS = (
    b"[",
    b"{",
    b"(",
    b'{"a":',
    b"- ",
    b"!!python/object:a ",
    b"$(",
    b"`",
    b'"',
    b"a.",
    b"lambda: ",
    b"not ",
    b"&a [*a,",
    b"if x:\n",
    b"  ",
    b"# ",
    b"\\\n",
)
PIECES = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    "\u2028\u0085".encode(),
    b"\r",
    b"\x1b]0;",
    b"\x80\x04",
    b"<<: *x",
    b"${",
    b"<<EOF\n",
    b"%s%n",
    b"'''",
    b'"""',
    b"\t",
    b"---\n",
    b"...\n",
    b"=",
    b":",
    b"#SBATCH ",
    b"? ",
    b"| \n",
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-be", "utf-32", "latin-1", "cp1252", "shift-jis")


# ------------------------------------------------------------------------------------------ mutations


def damage_bytes(data: bytes, others: list[bytes], random: Random) -> bytes:
    """Return an input with one to four kinds of damage."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        data = random.choice(DAMAGES)(data, others, random)
    return data


def _cut(data: bytes, _: list[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] if random.random() < 0.7 else data[at:]


def _flip_bits(data: bytes, _: list[bytes], random: Random) -> bytes:
    changed = bytearray(data)
    for _bit in range(random.choice((1, 1, 2, 8, 32))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _span(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + int(random.expovariate(1 / 30)) + 1)


def _splice(data: bytes, others: list[bytes], random: Random) -> bytes:
    other = random.choice(others)
    start, end = _span(data, random)
    first, last = _span(other, random)
    return data[:start] + other[first : last + random.choice((0, 200))] + data[end:]


def _repeat(data: bytes, _: list[bytes], random: Random) -> bytes:
    start, end = _span(data, random)
    times = random.choice((0, 0, 2, 5, 50))
    return data[:start] + data[start:end] * times + data[end:]


def _insert(data: bytes, _: list[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(PIECES) * random.choice((1, 1, 3, 70)) + data[at:]


def _nest(data: bytes, _: list[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(NESTS) * random.choice((2, 20, 200, 1200, 5000)) + data[at:]


def _change_number(data: bytes, _: list[bytes], random: Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", data))
    if not numbers:
        return data
    number = random.choice(numbers)
    return data[: number.start()] + random.choice(NUMBERS) + data[number.end() :]


def _change_word(data: bytes, others: list[bytes], random: Random) -> bytes:
    words = list(re.finditer(rb"[A-Za-z_]+", data))
    new: list[bytes] = re.findall(rb"[A-Za-z_]+", random.choice(others))
    if not words or not new:
        return data
    word = random.choice(words)
    return data[: word.start()] + random.choice(new) + data[word.end() :]


def _move_lines(data: bytes, _: list[bytes], random: Random) -> bytes:
    lines = data.split(b"\n")
    random.shuffle(lines)
    return b"\n".join(lines)


def _change_encoding(data: bytes, _: list[bytes], random: Random) -> bytes:
    return data.decode("utf-8", "replace").encode(random.choice(ENCODINGS), "replace")


def _lengthen_line(data: bytes, others: list[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    piece = random.choice((b"a", b" ", b"a ", b"0", b"\xc3\xa9", random.choice(others)[:40] or b"x"))
    # A megabyte rarely: it is the case for the time limit, and it takes that long.
    length = random.choices((2_000, 30_000, 1_000_000), (0.8, 0.194, 0.006))[0]
    return data[:at] + piece * (length // len(piece)) + data[at:]


DAMAGES: tuple[Callable[[bytes, list[bytes], Random], bytes], ...] = (
    *(_cut, _flip_bits, _flip_bits, _splice, _splice, _repeat, _insert, _insert),
    *(_change_number, _change_number, _change_word, _move_lines, _change_encoding),
    *(_nest, _lengthen_line),
)


def damage_value(value: Any, random: Random) -> Any:
    """Return a plain value with one to three of its parts replaced, removed, repeated or wrapped."""
    value = json.loads(json.dumps(value)) if not isinstance(value, bytes) else value
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _damage_part(value, random)
    return value


def _damage_part(value: Any, random: Random) -> Any:  # noqa: PLR0911 - one for each kind of damage
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        choice = random.random()
        if choice < 0.08:
            return {other: item for other, item in value.items() if other != key}
        if choice < 0.12:
            return value | {random.choice(("", "step", "devices", "x" * 300)): random.choice(STRANGE)}
        return value | {key: _damage_part(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        if random.random() < 0.08:
            return value * random.choice((0, 2, 30))
        return [*value[:at], _damage_part(value[at], random), *value[at + 1 :]]
    if random.random() < 0.04:
        for _ in range(random.choice((3, 60, 900))):
            value = [value] if random.random() < 0.5 else {"a": value}
        return value
    if isinstance(value, int | float) and random.random() < 0.5:
        return random.choice((-value, value * 10**9, 0.5, 1e300, 0, -1))
    return random.choice(STRANGE)


def encode_json(value: Any) -> bytes:
    """Encode a plain value as JSON, with what JSON does not have as Python writes it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    finally:
        sys.setrecursionlimit(limit)


# -------------------------------------------------------------------------------------------- readers


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What reads a kind of foreign bytes, and sound inputs for it."""

    name: str
    samples: Callable[[], list[Feed]]
    """Sound inputs; each is a few files, of which one is damaged."""
    read: Callable[[Path, bool], None]
    """Read the files of a folder as the commands do; show the result if asked to."""
    encode: Callable[[Any], bytes] = encode_json
    """How a damaged value is written back, for files that hold plain values."""
    ways: int = 1
    """How often the input is read, each within the time limit."""
    sealed: Callable[[Path], None] | None = None
    """Run before reading: repairs the checksums, so that a reader behind them is reached."""


def print_away(renderable: Any) -> None:
    """Render for a terminal of 80 columns, and drop the text."""
    from rich.console import Console

    Console(file=io.StringIO(), width=80).print(renderable, crop=False)


def build_report(place: Path) -> None:
    """Build the page of `trimtab report`."""
    from trimtab.pages.page import build_page, draw_figures
    from trimtab.pages.report_data import read_report_data

    data = read_report_data(place)
    build_page(data, draw_figures(data))


def show_error(error: TrimtabError, deep: bool) -> None:
    """Render an error as the command line does, if `deep`; raise if it repeats the input at length."""
    from trimtab import render

    if len(str(error)) > LONGEST_MESSAGE:
        raise ValueError(f"an error of {len(str(error))} characters: {str(error)[:200]}")
    if deep:
        print_away(render.render_error(error))


def _log_samples() -> list[Feed]:
    import gzip

    logs = sorted((ROOT / "tests" / "logs").glob("*.log"))
    feeds: list[Feed] = [{"train.log": file.read_bytes()} for file in logs]
    return [*feeds, {"train.log": gzip.compress(logs[0].read_bytes())}]


def _read_diagnosis(folder: Path, deep: bool) -> None:
    from trimtab.cli.doctor import _shown
    from trimtab.diagnosis.diagnose import diagnose_logs

    files = [str(file) for file in sorted(folder.iterdir())]
    diagnosis = diagnose_logs(files)
    if deep:
        json.dumps(diagnosis.to_builtins())
        print_away(_shown(diagnosis, about_logs=True))


def _record_values() -> list[dict[str, Any]]:
    """Return a memory snapshot, a flight record and an error file as torch writes them."""
    frames = [{"filename": "/w/model.py", "line": 88, "name": "forward"}]
    blocks = [
        {
            "address": 0,
            "size": 4 << 30,
            "requested_size": 4 << 30,
            "state": "active_allocated",
            "frames": frames,
        },
        {"address": 1, "size": 8 << 30, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 12 << 30,
        "allocated_size": 4 << 30,
        "active_size": 4 << 30,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
    events = [{"action": "alloc", "addr": 1, "size": 5}, {"action": "oom", "size": 1 << 30, "device_free": 9}]
    snapshot = {"segments": [segment], "device_traces": [events], "allocator_settings": {}}
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[8]],
            "state": state,
            "timeout_ms": 600_000,
            "frames": frames,
        }
        for number, state in enumerate(("completed", "started"), 1)
    ]
    flight = {"version": "2.10", "entries": entries, "pg_config": {}, "rank": 0}
    stack = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nZeroDivisionError: zero\n'
    message = {"message": "zero", "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"}}
    return [snapshot, snapshot | {"device_traces": []}, flight, {"message": message}]


def _record_samples() -> list[Feed]:
    feeds: list[Feed] = [{"record_rank_0.json": json.dumps(value).encode()} for value in _record_values()]
    feeds += [{"record_rank_0.pickle": pickle.dumps(value)} for value in _record_values()]
    late = ROOT / "tests" / "logs" / "late-rank"
    return [*feeds, {file.name: file.read_bytes() for file in sorted(late.iterdir())}]


def _plan_samples() -> list[Feed]:
    import run_samples

    return [{"plan.json": run_samples.plan().to_json(indent=2).encode()}]


def _read_plan(folder: Path, deep: bool) -> None:
    from trimtab import render
    from trimtab.planner.plan_files import is_plan_file, read_checked_plan

    file = folder / "plan.json"
    is_plan_file(file)
    plan, _ = read_checked_plan(file)
    plan.to_json()
    if deep:
        print_away(render.render_plan(plan))
        build_report(file)


def _calibration_samples() -> list[Feed]:
    from trimtab.catalog.facts import calibration_file
    from trimtab.spec import Calibration

    whole = Calibration.from_json(calibration_file("h200.json").read_text(encoding="utf-8"))
    part = whole.replace(works=whole.works[::40], seconds=whole.seconds[::40])
    return [{"h200.json": part.to_json().encode()}]


def _read_calibration(folder: Path, deep: bool) -> None:
    from trimtab import render
    from trimtab.catalog.clusters import parse_cluster
    from trimtab.predict.calibration import find_speed, read_own_calibration
    from trimtab.spec import Calibration

    os.environ["TRIMTAB_CALIBRATIONS"] = str(folder)
    device = parse_cluster("H200").devices[0]
    own = read_own_calibration(device)
    speed = find_speed(device, own)
    if own is not None and speed is not None and own.works:
        speed.pace.seconds(own.works[0])
    calibration = Calibration.from_json((folder / "h200.json").read_bytes(), origin="h200.json")
    if deep:
        print_away(render.render_calibration(calibration, folder / "h200.json"))
        print_away(render.render_links(calibration, folder / "h200.json"))


def _run_samples() -> list[Feed]:
    import run_samples
    from trimtab.spec import Attempt
    from trimtab.training.run_folder import RunIdentity

    lines = b"".join(json.dumps(run_samples.line(step)).encode() + b"\n" for step in range(1, 4))
    events = (
        b'{"kind":"out-of-memory","at_s":1.0,"step":2,"rank":1,"why":"no room","done":"split"}\n'
        b'{"kind":"failed","at_s":2.0,"step":3,"rank":0,"why":"a: b","done":"this attempt ends"}\n'
    )
    attempt = Attempt(procs=2, nodes=1, began_s=1.0, at_s=2.0, steps=9, pid=1, host="n1")
    return [
        {
            "log.jsonl": lines,
            "events.jsonl": events,
            "plan.json": run_samples.plan().to_json().encode(),
            "run.json": RunIdentity(job="a.py:A", global_batch=8).to_json().encode(),
            "attempt.json": attempt.to_json().encode(),
            "run.lock": b"process 12 on n1",
        }
    ]


def _read_run(folder: Path, deep: bool) -> None:
    from trimtab.cli.doctor import _shown
    from trimtab.diagnosis.diagnose import diagnose_logs
    from trimtab.launching.jobs import read_progress
    from trimtab.probe.machine import this_machine
    from trimtab.watching.watch import RunFollower

    if deep:
        build_report(folder)
    RunFollower(folder).look(time.time(), this_machine(), ()).to_json()
    read_progress(folder)
    diagnosis = diagnose_logs([str(folder)])
    if deep:
        print_away(_shown(diagnosis, about_logs=True))


def _checkpoint_samples() -> list[Feed]:
    import torch

    from trimtab.training.checkpoints import CheckpointManager

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        saver = CheckpointManager(Path(folder))
        saver.save(3, {"model": model, "optimizer": optimizer}, extra={"step": 3})
        saver.finish()
        saved = next(Path(folder).glob("step-*"))
        files = {file.name: file.read_bytes() for file in saved.iterdir()}
    # The tensors themselves are behind checksums; what is parsed is the index, the values and the manifest.
    return [{name: data for name, data in files.items() if not name.endswith(".distcp")} | files]


def _seal_checkpoint(folder: Path) -> None:
    """Write the checksums of damaged files into the manifest, so that the files themselves are parsed."""
    from trimtab.training.checkpoint_format import MANIFEST, compute_checksum, read_manifest

    manifest = read_manifest(folder)
    if manifest is not None:
        names = [file.name for file in folder.iterdir() if file.name != MANIFEST]
        sums = {name: compute_checksum(folder / name) for name in names}
        (folder / MANIFEST).write_text(manifest.replace(files=sums).to_json(), encoding="utf-8")


def _read_checkpoint(folder: Path, deep: bool) -> None:
    import torch

    from trimtab.training.checkpoints import CheckpointManager

    model = torch.nn.Linear(2, 2)
    checkpoints = folder.parent / f"{folder.name}-checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    checkpoints.mkdir()
    shutil.copytree(folder, checkpoints / "step-00000003")
    optimizer = torch.optim.AdamW(model.parameters())
    CheckpointManager(checkpoints).load_latest({"model": model, "optimizer": optimizer})


CONFIG_NAMES = {
    "yaml": "config.yaml",
    "toml": "train.toml",
    "json": "ds_config.json",
    "python": "train.py",
    "shell": "run.sh",
    "sbatch": "job.sbatch",
    "config": "config",
}


def _config_samples(kind: str) -> list[Feed]:
    """Return the sample configs of a format, and what its format adds; for `config`, of every format."""
    import config_samples
    from trimtab.configs.formats import guess_format

    texts = [
        value
        for name, value in vars(config_samples).items()
        if name.isupper() and isinstance(value, str) and "{number" not in value
    ]
    texts += [EXTRA.get(kind, "")] if kind != "config" else list(EXTRA.values())
    chosen = []
    for text in filter(None, texts):
        try:
            guessed = guess_format(text, "")
        except TrimtabError:
            guessed = "python"
        if text.startswith(("from ", "import ", '"""', "#!/usr/bin/env python", "class ")):
            guessed = "python"
        if kind in ("config", guessed) or text == EXTRA.get(kind):
            chosen.append({CONFIG_NAMES[kind]: text.encode()})
    return chosen


EXTRA = {
    "yaml": "base: &base {lr: 2e-4, on: yes}\nt:\n  <<: *base\n  text: |\n    a\n  list: [1]\n? a\n: !!int 3",
    "toml": "a.b = 1\n[[c]]\nd = '''x'''\ne = 1979-05-27T07:32:00Z\n[f]\ng = {h = [1, 2,]}\n",
    "json": '// c\n{"a": [1, {"b": "\\u00e9"}], "zero_optimization": {"stage": 2,}, "bf16": {"a": true}}',
    "python": "import os\nbatch_size = 8 * int(os.environ.get('N', 1))\nargs = dict(lr=1e-4, **{'a': [1]})\n"
    "class A:\n    micro: int = 4\n    def f(self):\n        return f'{self.micro:>{3}}'\n",
    "shell": "#!/bin/bash\nexport N=4 # gpus\nfor i in 1 2; do\n  torchrun --nproc_per_node=$N train.py \\\n"
    '    --lr 2e-4 "$@"\ndone\ncat <<EOF\n$N\nEOF\n'
    'if [ "$N" -gt 2 ]; then accelerate launch x.py --bf16; fi\n',
    "sbatch": "#!/bin/bash\n#SBATCH --nodes=2 --gres=gpu:4\n#SBATCH -t 1-00:00:00\n"
    "srun torchrun --nnodes=$SLURM_NNODES t.py\n",
}


def _show_config(file: Path) -> None:
    """Show a config as `show` does, without estimates."""
    from trimtab.cli.apply import show_display
    from trimtab.configs.apply import Aim, find_layout
    from trimtab.configs.formats import read_config
    from trimtab.configs.show import build_display, find_job
    from trimtab.configs.targets import list_targets

    among = list_targets([file])
    layout = find_layout(Aim(file), among, opened=read_config, name=None)
    if layout.main is not None:
        target = layout.main.site.target
        job, sought = find_job(target, layout.main)
        display = build_display(layout, target, job=job, gpus=8, device="H100", seer=None, sought=sought)
        print_away(show_display(display))
        json.dumps(display.to_builtins())


def _edit_config(file: Path) -> None:
    """Propose the edits of a plan and prepare the new text, as `apply --dry` does."""
    import run_samples
    from trimtab.api.applying import applied
    from trimtab.configs.apply import Aim, propose_edits
    from trimtab.configs.formats import read_config
    from trimtab.configs.targets import list_targets

    plan = run_samples.plan()
    among = list_targets([file])
    proposal = propose_edits([Aim(file)], plan, among, opened=read_config, replan=lambda _: plan)
    applied(proposal, proposal.prepare(), None)


def _read_knob_file(file: Path) -> None:
    from trimtab.configs.formats import read_config
    from trimtab.configs.knobs import apply_knobs, read_knobs

    apply_knobs(read_knobs(read_config(file), str(file)), ranks=1, bf16=True, joint=True)


CONFIG_WAYS = (_show_config, _edit_config, _read_knob_file)


def _read_config_file(folder: Path, deep: bool) -> None:
    """Read a config in one of the ways that commands do, in all of them if `deep`."""
    from trimtab.configs.formats import read_config

    (file,) = folder.iterdir()
    way = CONFIG_WAYS[file.stat().st_size % len(CONFIG_WAYS)]
    refusals = []
    for read in CONFIG_WAYS if deep else (way,):
        try:
            read(file)
        except TrimtabError as error:
            refusals.append(error)
    # Whether the format is sound: what a way refuses may be a sound config without its keys.
    if refusals:
        read_config(file).entries()


def _toml_samples(text: str, name: str) -> Callable[[], list[Feed]]:
    return lambda: [{name: text.encode()}]


def _read_launch_defaults(folder: Path, deep: bool) -> None:
    from trimtab.launching.defaults import read_defaults

    read_defaults(folder)


def _cluster_samples() -> list[Feed]:
    from trimtab.catalog.clusters import parse_cluster

    text = '[[nodes]]\nname = "a"\n[[nodes.devices]]\nname = "H100"\nindex = 0\n'
    return [
        {"cluster.json": parse_cluster("2xA100-40GB").to_json().encode()},
        {"cluster.toml": text.encode()},
    ]


def _read_cluster(folder: Path, deep: bool) -> None:
    from trimtab import render
    from trimtab.catalog.clusters import parse_cluster

    (file,) = folder.iterdir()
    cluster = parse_cluster(str(file))
    if deep:
        print_away(render.render_cluster(cluster, heading="x"))


def _drill_samples() -> list[Feed]:
    text = (
        b'[{"kind": "out-of-memory", "step": 3, "rank": 1, "point": "backward"}, {"kind": "kill", "step": 8}]'
    )
    return [{"faults.json": text}]


def _read_drill(folder: Path, deep: bool) -> None:
    from trimtab.training.fault_injection import read_faults

    read_faults(folder / "faults.json")


def _model_samples() -> list[Feed]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    return [{"config.json": json.dumps(config, indent=2).encode()}]


def _read_model_sizes(folder: Path, deep: bool) -> None:
    from trimtab.jobs.model_sizes import read_job_sizes

    read_job_sizes(f"hf:{folder}", {})


def _slurm_samples() -> list[Feed]:
    return [
        {file.name: file.read_bytes()} for file in sorted((ROOT / "tests" / "slurm_answers").glob("*.txt"))
    ]


def _read_slurm(folder: Path, deep: bool) -> None:
    from trimtab.launching.jobs import explain_state, read_sacct, read_scontrol, read_squeue

    (file,) = folder.iterdir()
    text = file.read_bytes().decode(errors="replace")
    jobs = [*read_squeue(text), *read_sacct(text), read_scontrol(text)]
    for job in filter(None, jobs):
        explain_state(job)
        job.to_json()


READERS = {
    reader.name: reader
    for reader in (
        Reader(name="logs", samples=_log_samples, read=_read_diagnosis),
        Reader(name="records", samples=_record_samples, read=_read_diagnosis),
        Reader(name="plan", samples=_plan_samples, read=_read_plan, ways=3),
        Reader(name="run", samples=_run_samples, read=_read_run, ways=4),
        Reader(
            name="checkpoint", samples=_checkpoint_samples, read=_read_checkpoint, sealed=_seal_checkpoint
        ),
        Reader(name="calibration", samples=_calibration_samples, read=_read_calibration),
        *(
            Reader(
                name=kind,
                samples=lambda kind=kind: _config_samples(kind),  # type: ignore[misc]
                read=_read_config_file,
                ways=4,
            )
            for kind in CONFIG_NAMES
        ),
        Reader(
            name="defaults",
            samples=_toml_samples('[launch]\npartition = "gpu"\ntime = "1-00:00:00"\n', "trimtab.toml"),
            read=_read_launch_defaults,
        ),
        Reader(name="cluster", samples=_cluster_samples, read=_read_cluster),
        Reader(name="drill", samples=_drill_samples, read=_read_drill),
        Reader(name="model", samples=_model_samples, read=_read_model_sizes),
        Reader(name="slurm", samples=_slurm_samples, read=_read_slurm),
    )
}


# ------------------------------------------------------------------------------------------------ run


class Hang(BaseException):
    """Raised inside a reader that takes too long."""


def make_feed(reader: Reader, samples: list[Feed], seed: int, number: int) -> tuple[Feed, bool, bool]:
    """Return an input, whether its checksums are repaired, and whether the result is shown."""
    random = Random(f"{seed}/{reader.name}/{number}")
    feed = dict(random.choice(samples))
    name = random.choice([name for name in feed if not name.endswith(".distcp")])
    others = [data for sample in samples for data in sample.values()]
    before = after = b""
    data = feed[name]
    if name.endswith(".jsonl"):
        # One line of several is damaged.
        lines = data.splitlines(keepends=True)
        at = random.randrange(len(lines))
        before, data, after = b"".join(lines[:at]), lines[at], b"".join([b"\n", *lines[at + 1 :]])
    value = _plain_value(data) if random.random() < 0.6 else None
    if value is not None:
        damaged = damage_value(value, random)
        is_pickle = data.startswith(b"\x80")
        feed[name] = before + (_encode_pickle(damaged) if is_pickle else encode_json(damaged)) + after
    else:
        feed[name] = damage_bytes(feed[name], others, random)
    return feed, random.random() < 0.8, random.random() < 0.1


def _plain_value(data: bytes) -> Any:
    """Return the plain value that an input is, as JSON or as a pickle; None if it is neither."""
    try:
        if data.startswith(b"\x80"):
            from trimtab.diagnosis.log_files import load_plain_pickle

            return json.loads(json.dumps(load_plain_pickle(io.BytesIO(data))))
        return json.loads(data)
    except ValueError:
        return None


def _encode_pickle(value: Any) -> bytes:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return pickle.dumps(value)
    finally:
        sys.setrecursionlimit(limit)


@dataclass
class Tally:
    """The result of a reader over many inputs."""

    reader: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    tracebacks: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the inputs, by the place that raised."""
    hangs: list[int] = field(default_factory=list)
    crashes: list[int] = field(default_factory=list)
    slowest_s: float = 0.0
    """CPU seconds; of an input above a megabyte, by the megabyte."""
    slowest: int = 0
    cpu_s: float = 0.0

    def to_line(self) -> dict[str, Any]:
        """Return the tally as a JSON line."""
        return vars(self)


def feed_reader(  # noqa: PLR0913, PLR0917 - an input is all of these
    reader: Reader, samples: list[Feed], folder: Path, seed: int, number: int, tally: Tally
) -> None:
    """Read one input, and count what came of it."""
    feed, is_sealed, deep = make_feed(reader, samples, seed, number)
    for file in folder.iterdir():
        file.unlink()
    for name, data in feed.items():
        (folder / name).write_bytes(data)
    if reader.sealed is not None and is_sealed:
        reader.sealed(folder)
    size = sum(map(len, feed.values()))
    limit = HANG_S * max(1.0, size / 1e6) * reader.ways
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        try:
            reader.read(folder, deep)
        except TrimtabError as error:
            show_error(error, deep)
            tally.refused += 1
        else:
            tally.accepted += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except Hang:
        tally.hangs.append(number)
    except Exception as error:  # noqa: BLE001 - it is what this program looks for
        place = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in place if "/trimtab/" in frame.filename] or place
        where = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
        tally.tracebacks.setdefault(where, []).append(number)
    took = time.process_time() - began
    tally.inputs += 1
    tally.cpu_s += took
    if took / (limit / HANG_S) > tally.slowest_s:
        tally.slowest_s, tally.slowest = took / (limit / HANG_S), number


def _raise_hang(*_: object) -> None:
    raise Hang


def _read_sound(reader: Reader, samples: list[Feed], folder: Path) -> None:
    """Read the inputs without damage first: what is loaded once is not counted as the time of an input."""
    for feed in samples:
        for file in folder.iterdir():
            file.unlink()
        for name, data in feed.items():
            (folder / name).write_bytes(data)
        with contextlib.suppress(TrimtabError):
            reader.read(folder, True)


def run_inputs(
    reader: Reader, seed: int, numbers: range, note: Callable[[int, Tally], None] | None = None
) -> Tally:
    """Feed a reader in this process; `note` is called with each number before it is read."""
    tally = Tally(reader.name)
    before = signal.signal(signal.SIGPROF, _raise_hang)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - memory, if there is any
    try:
        with tempfile.TemporaryDirectory(prefix="trimtab-fuzz-", dir=place) as home:
            folder = Path(home) / "input"
            folder.mkdir()
            samples = reader.samples()
            _read_sound(reader, samples, folder)
            for number in numbers:
                if note is not None:
                    note(number, tally)
                feed_reader(reader, samples, folder, seed, number, tally)
                if number % 500 == 0:
                    gc.collect()
    finally:
        signal.signal(signal.SIGPROF, before)
    return tally


def merge_tallies(first: Tally, second: Tally) -> Tally:
    """Add two tallies of a reader."""
    places = {*first.tracebacks, *second.tracebacks}
    slower = max(first, second, key=lambda tally: tally.slowest_s)
    return Tally(
        reader=first.reader,
        inputs=first.inputs + second.inputs,
        accepted=first.accepted + second.accepted,
        refused=first.refused + second.refused,
        tracebacks={
            place: [*first.tracebacks.get(place, ()), *second.tracebacks.get(place, ())] for place in places
        },
        hangs=first.hangs + second.hangs,
        crashes=first.crashes + second.crashes,
        slowest_s=slower.slowest_s,
        slowest=slower.slowest,
        cpu_s=first.cpu_s + second.cpu_s,
    )


def run_parallel(reader: Reader, seed: int, inputs: int, jobs: int) -> Tally:
    """Feed a reader in several processes, each with some of the inputs."""
    total = Tally(reader.name)
    starts = range(0, inputs, max(1, -(-inputs // (4 * jobs))) if jobs > 1 else inputs)
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(
            lambda start: run_guarded(reader, seed, start, min(inputs, start + starts.step)), starts
        )
        for part in parts:
            total = merge_tallies(total, part)
    return total


def run_guarded(reader: Reader, seed: int, start: int, inputs: int) -> Tally:
    """Feed a reader with inputs from `start` on in a child process; go on behind an input that ends it."""
    total = Tally(reader.name)
    shared = mmap.mmap(-1, 1 << 20)
    while start < inputs:
        shared[:12] = struct.pack("qi", -1, 0)
        pid = os.fork()
        if not pid:
            os._exit(_run_child(reader, seed, range(start, inputs), shared))
        _, status = os.waitpid(pid, 0)
        number, length = struct.unpack("qi", shared[:12])
        if number < 0:
            raise SystemExit(f"{reader.name}: the child ended before its first input")
        if length:
            total = merge_tallies(total, Tally(**json.loads(zlib.decompress(shared[12 : 12 + length]))))
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status):
            crash = Tally(reader.name, inputs=1, crashes=[number])
            total = merge_tallies(total, crash)
        start = number + 1
    return total


def _run_child(reader: Reader, seed: int, numbers: range, shared: mmap.mmap) -> int:
    reader.samples()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))

    def note(number: int, tally: Tally | None) -> None:
        # The tally before this input: if the input ends the process, it is what remains.
        if tally is not None and (not number % NOTED or tally.inputs < NOTED):
            packed = zlib.compress(json.dumps(tally.to_line()).encode(), 1)
            shared[12 : 12 + len(packed)] = packed
            shared[:12] = struct.pack("qi", number, len(packed))
        else:
            shared[:8] = struct.pack("q", number)

    tally = run_inputs(reader, seed, numbers, note)
    note_last = zlib.compress(json.dumps(tally.to_line()).encode(), 1)
    shared[12 : 12 + len(note_last)] = note_last
    shared[:12] = struct.pack("qi", numbers.stop - 1, len(note_last))
    return 0


def show_input(name: str, number: int, seed: int) -> None:
    """Read one input without a guard, and print it."""
    reader = READERS[name]
    samples = reader.samples()
    feed, is_sealed, _ = make_feed(reader, samples, seed, number)
    folder = Path(tempfile.mkdtemp(prefix="trimtab-fuzz-")) / "input"
    folder.mkdir()
    for file, data in feed.items():
        (folder / file).write_bytes(data)
        if data not in [sample.get(file) for sample in samples]:
            print(f"{folder / file}: {len(data)} bytes\n{data[:1500]!r}")
    if reader.sealed is not None and is_sealed:
        reader.sealed(folder)
    reader.read(folder, True)
    print("accepted")


def main() -> None:
    """Fuzz the readers and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--readers", default=",".join(READERS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append a JSON line for each reader")
    parser.add_argument("--show", metavar="READER:NUMBER")
    options = parser.parse_args()
    if options.show:
        name, _, number = options.show.partition(":")
        show_input(name, int(number), options.seed)
        return
    from machine import machine  # type: ignore[import-not-found] # beside this file

    print(f"{time.strftime('%Y-%m-%d', time.gmtime())}, {machine()}, seed {options.seed}")
    print(
        f"{'reader':<12}{'inputs':>8}{'refused':>9}{'accepted':>9}{'tracebacks':>11}{'hangs':>6}{'slowest':>9}{'mean':>9}"
    )
    for name in options.readers.split(","):
        tally = run_parallel(READERS[name], options.seed, options.inputs, options.jobs)
        bad = sum(map(len, tally.tracebacks.values())) + len(tally.crashes)
        mean_s = tally.cpu_s / max(1, tally.inputs)
        print(
            f"{name:<12}{tally.inputs:>8,}{tally.refused:>9,}{tally.accepted:>9,}{bad:>11,}"
            f"{len(tally.hangs):>6}{tally.slowest_s * 1e3:>6.0f} ms{mean_s * 1e3:>6.1f} ms",
            flush=True,
        )
        for place, numbers in tally.tracebacks.items():
            print(f"    {len(numbers)} x {place}: {numbers[:3]}", flush=True)
        for what, numbers in (("hang", tally.hangs), ("crash", tally.crashes)):
            if numbers:
                print(f"    {what}: {numbers[:5]}", flush=True)
        if options.out:
            line = tally.to_line() | {
                "machine": machine(),
                "date": time.strftime("%Y-%m-%d"),
                "seed": options.seed,
            }
            with options.out.open("a") as out:
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
