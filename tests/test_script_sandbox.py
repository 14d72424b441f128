"""A script in the sandbox can do what it likes: the user's files and the network stay untouched."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scripts.kernel_guard import landlock_version
from trimtab.scripts.offline import is_local, sandbox_environment
from trimtab.scripts.overlay import MOST_COPIED_BYTES, Overlay
from trimtab.scripts.sandbox import RedirectedFunctions
from trimtab.scripts.sandbox_record import SandboxRecord

needs_landlock = pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")

START = """
import json, sys
from pathlib import Path
{before}
from trimtab.scripts.sandbox import install_sandbox
record = install_sandbox(Path({scratch!r}), script=__file__)
results = {{}}
"""
END = """
import os
results["record"] = record.to_builtins()
print(json.dumps(results, default=str))
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's folder with data, a log and links."""
    folder = tmp_path / "user"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("A", encoding="utf-8")
    (folder / "data" / "deep" / "b.txt").write_text("B", encoding="utf-8")
    (folder / "log.txt").write_text("old\n", encoding="utf-8")
    (folder / "link").symlink_to("data")
    (folder / "run.sh").write_text("echo\n", encoding="utf-8")
    return folder


def describe_tree(folder: Path) -> str:
    """Return a checksum of every name, kind, permission, time and content in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        digest.update(repr((path, status.st_mode, status.st_mtime_ns, content)).encode())
    return digest.hexdigest()


def run_script(user: Path, body: str, *, before: str = "", expect: int = 0, **more: str) -> dict[str, Any]:
    """Run a script of the user in the sandbox, check that the folder is unchanged, and return its results."""
    scratch = user.parent / "scratch"
    script = user / "train.py"
    script.write_text(START.format(scratch=str(scratch), before=before) + body + END, encoding="utf-8")
    checksum = describe_tree(user)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=user,
        env={**os.environ, "HF_HOME": str(user / "hf"), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == expect, done.stderr
    assert describe_tree(user) == checksum
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_python_files_of_every_kind_go_to_the_scratch_folder(user: Path) -> None:
    body = """
import bz2, csv, glob, gzip, logging, os, pathlib, shutil, sqlite3, tempfile, zipfile
Path("out/ckpt").mkdir(parents=True)
Path("out/new.txt").write_text("new")
with open("log.txt", "a") as log:
    log.write("more\\n")
results["log"] = Path("log.txt").read_text()
with open("data/a.txt", "r+") as file:
    file.write("Z")
results["changed"] = [Path("data/a.txt").read_text(), Path("link/a.txt").read_text()]
results["walk"] = sorted(os.path.join(top, name) for top, _, names in os.walk(".") for name in names)
results["through a link"] = sorted(entry.path for entry in os.scandir("link/deep"))
shutil.copytree("data", "copy")
os.rename("out/new.txt", "log.txt")
results["replaced"] = [open("log.txt").read(), os.path.exists("out/new.txt")]
shutil.rmtree("data")
results["gone"] = [os.path.exists("data"), os.path.lexists("link"), os.path.exists("link")]
results["left"] = sorted(os.listdir("."))
os.mkdir("data")
results["empty"] = [os.listdir("data"), [entry.name for entry in os.scandir("data")]]
os.replace("copy", "data")
results["moved"] = sorted(glob.glob("data/**/*.txt", recursive=True))
os.symlink("data", "second")
results["second"] = [Path("second/deep/b.txt").read_text(), os.path.islink("second"), os.readlink("second")]
os.link("run.sh", "hard.sh")
results["hard"] = Path("hard.sh").read_text()
os.chmod("run.sh", 0o700)
results["mode"] = oct(os.stat("run.sh").st_mode)
os.truncate("run.sh", 2)
os.utime("run.sh", (1, 1))
results["utime"] = [os.path.getsize("run.sh"), os.path.getmtime("run.sh")]
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(Path("thread.txt").write_text, "x").result()
handler = logging.FileHandler("train.log")
handler.emit(logging.makeLogRecord({"msg": "hello"}))
with open("table.csv", "w", newline="") as table:
    csv.writer(table).writerow([1, 2])
base = sqlite3.connect("runs.sqlite")
base.execute("create table runs (name)")
base.commit()
with gzip.open("a.gz", "wt") as packed, bz2.open("a.bz2", "wt") as other:
    print(packed.write("x"), other.write("x"), file=sys.stderr)
with zipfile.ZipFile("a.zip", "w") as archive:
    archive.writestr("x", "y")
with tempfile.NamedTemporaryFile(dir=".") as near, tempfile.TemporaryDirectory() as far:
    results["temporary"] = [os.path.exists(near.name), far.startswith(record.scratch)]
os.makedirs("work/here")
os.chdir("work/here")
Path("inside.txt").touch()
results["folder"] = [os.getcwd(), os.path.abspath("inside.txt"), os.listdir(".")]
os.chdir("../..")
results["sizes"] = {name: os.path.getsize(name) for name in ("train.log", "table.csv", "runs.sqlite")}
results["name"] = open("table.csv").name
open("closed.txt", "w").write("x")
results["closed"] = Path("closed.txt").read_text()
os.remove("table.csv")
errors = {}
for name, call in {
    "missing": lambda: open("nowhere/x", "w"),
    "exists": lambda: open("log.txt", "x"),
    "folder": lambda: open("out", "w"),
    "full": lambda: os.rmdir("data"),
    "again": lambda: os.mkdir("out"),
    "absent": lambda: os.remove("table.csv"),
    "read": lambda: open("table.csv"),
}.items():
    try:
        call()
    except OSError as error:
        errors[name] = [error.errno, str(error.filename)]
results["errors"] = errors
"""
    found = run_script(user, body)
    assert found["log"] == "old\nmore\n"
    assert found["changed"] == ["Z", "Z"]
    assert found["through a link"] == ["link/deep/b.txt"]
    assert {"./out/new.txt", "./log.txt", "./data/deep/b.txt"} <= set(found["walk"])
    assert found["replaced"] == ["new", False]
    assert found["gone"] == [False, True, False]
    assert found["left"] == ["copy", "link", "log.txt", "out", "run.sh", "train.py"]
    assert found["empty"] == [[], []]
    assert found["moved"] == ["data/a.txt", "data/deep/b.txt"]
    assert found["second"] == ["B", True, "data"]
    assert found["hard"] == "echo\n"
    assert found["mode"].endswith("700")
    assert found["utime"] == [2, 1.0]
    assert found["temporary"] == [True, True]
    assert found["folder"] == [
        str(user / "work" / "here"),
        str(user / "work" / "here" / "inside.txt"),
        ["inside.txt"],
    ]
    assert found["sizes"]["train.log"] == 6
    assert found["sizes"]["runs.sqlite"] > 1000
    assert found["name"] == "table.csv"
    assert found["closed"] == "x"
    assert found["errors"] == {
        "missing": [errno.ENOENT, "nowhere/x"],
        "exists": [errno.EEXIST, "log.txt"],
        "folder": [errno.EISDIR, "out"],
        "full": [errno.ENOTEMPTY, "data"],
        "again": [errno.EEXIST, "out"],
        "absent": [errno.ENOENT, "table.csv"],
        "read": [errno.ENOENT, "table.csv"],
    }
    writes = {Path(write["path"]).name: write for write in found["record"]["writes"]}
    lines = (user / "train.py").read_text(encoding="utf-8").splitlines()
    number = int(writes["train.log"]["where"].removeprefix("train.py:"))
    assert "FileHandler" in lines[number - 1]
    assert writes["train.log"]["bytes"] == 6
    number = int(writes["thread.txt"]["where"].removeprefix("train.py:"))
    assert "thread.txt" in lines[number - 1]
    assert (writes["table.csv"]["is_removed"], writes["table.csv"]["bytes"]) == (True, 5)


def test_a_script_imports_the_modules_that_it_writes(user: Path) -> None:
    package = user / "plugins"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "old.py").write_text("value = 'old'", encoding="utf-8")
    (package / "kept.py").write_text("value = 'kept'", encoding="utf-8")
    body = """
import importlib, importlib.util
sys.path.insert(0, str(Path.cwd()))
Path("plugins/metrics/accuracy").mkdir(parents=True)
Path("plugins/metrics/accuracy/share.py").write_text("from . import __name__ as value")
Path("plugins/metrics/accuracy/__init__.py").write_text("")
Path("plugins/old.py").write_text("value = 'new'")
Path("single.py").write_text("value = 'single'")
importlib.invalidate_caches()
names = ("plugins.metrics.accuracy.share", "plugins.old", "plugins.kept", "single")
results["values"] = [importlib.import_module(name).value for name in names]
spec = importlib.util.spec_from_file_location("by_path", Path("single.py").absolute())
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
results["by path"] = module.value
try:
    import plugins.nothing
except ModuleNotFoundError as error:
    results["missing"] = error.name
"""
    results = run_script(user, body)
    assert results["values"] == ["plugins.metrics.accuracy", "new", "kept", "single"]
    assert results["by path"] == "single"
    assert results["missing"] == "plugins.nothing"


def test_no_network_and_its_attempts_are_recorded(user: Path) -> None:
    body = """
import os, socket, urllib.request
texts = []
for call in (
    lambda: urllib.request.urlopen("https://example.org/x"),
    lambda: socket.create_connection(("example.org", 80)),
    lambda: socket.socket().connect(("192.0.2.1", 443)),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
    lambda: socket.gethostbyname("example.org"),
):
    try:
        call()
    except OSError as error:
        texts.append(str(error))
results["texts"] = texts
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.sendall(b"local")
results["local"] = server.accept()[0].recv(5).decode()
results["wandb"] = os.environ["WANDB_MODE"]
import subprocess
program = "import urllib.request; urllib.request.urlopen('https://example.org')"
done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
results["child"] = done.stderr
"""
    found = run_script(user, body)
    assert len(found["texts"]) == 5
    assert all("trimtab keeps scripts off the network" in text for text in found["texts"])
    assert found["local"] == "local"
    attempts = found["record"]["network"]
    assert {attempt["address"] for attempt in attempts} == {"example.org", "192.0.2.1:443", "192.0.2.1:53"}
    assert all(attempt["where"].startswith("train.py:") for attempt in attempts)
    assert found["wandb"] == "disabled"
    # A program that the script starts is sent to a proxy that does not answer.
    assert "Connection refused" in found["child"]


@needs_landlock
def test_the_kernel_stops_what_python_does_not_see(user: Path) -> None:
    body = """
import ctypes, os, subprocess
library = ctypes.CDLL(None, use_errno=True)
target = str(Path("native.bin").absolute()).encode()
results["open"] = [library.open(target, os.O_CREAT | os.O_WRONLY, 0o644), ctypes.get_errno()]
results["change"] = [library.open(target[:-10] + b"log.txt", os.O_WRONLY), ctypes.get_errno()]
results["unlink"] = [library.unlink(target[:-10] + b"log.txt"), ctypes.get_errno()]
Path("made.txt").write_text("made")
def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, **options)
results["child"] = run("sh", "-c", "echo x > child.txt; rm -rf data; mv log.txt other.txt").stderr
results["inner"] = run(sys.executable, "-c", "open('inner.txt', 'w').write(open('made.txt').read())").stderr
results["inner"] += Path("inner.txt").read_text()
results["isolated"] = run(sys.executable, "-I", "-c", "open('isolated.txt', 'w')").stderr
results["scratch"] = run("sh", "-c", "echo x > $TMPDIR/child.txt; cat $TMPDIR/child.txt").stdout
results["device"] = run("sh", "-c", "echo x > /dev/null").returncode
Path("made").mkdir()
results["cwd"] = run("pwd", cwd="made").returncode
"""
    found = run_script(user, body)
    assert found["record"]["guard"] == "landlock"
    for name in ("open", "change", "unlink"):
        assert found[name] == [-1, errno.EACCES]
    assert found["child"].lower().count("permission denied") >= 3
    # A Python that the script starts sees the same files; one that is isolated is only kept from writing.
    assert found["inner"] == "made"
    assert "Permission" in found["isolated"]
    assert (found["scratch"], found["device"], found["cwd"]) == ("x\n", 0, 0)


def test_without_landlock_an_audit_hook_stops_what_it_sees(user: Path) -> None:
    before = "import trimtab.scripts.kernel_guard as guard\nguard.landlock_version = lambda: 0"
    body = """
import io, os, posix
texts = []
for call in (
    lambda: io.FileIO("x.bin", "w"),
    lambda: posix.open("x.bin", os.O_CREAT | os.O_WRONLY),
    lambda: posix.unlink("log.txt"),
    lambda: posix.rename("log.txt", "other.txt"),
    lambda: posix.mkdir("new"),
):
    try:
        call()
    except PermissionError as error:
        texts.append(error.strerror)
results["texts"] = texts
Path("fine.txt").write_text("x")
results["fine"] = Path("fine.txt").read_text() + io.FileIO("log.txt").read().decode()
"""
    found = run_script(user, body, before=before)
    assert found["texts"] == ["trimtab lets a script write to its scratch folder only"] * 5
    assert found["fine"] == "xold\n"
    assert found["record"]["guard"] == "audit hook"
    assert "no Landlock" in found["record"]["notes"][0]


@pytest.mark.slow
def test_torch_and_its_libraries(user: Path) -> None:
    body = """
import io, os
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.save({"a": torch.ones(3)}, "real.pt")
results["real"] = torch.load("real.pt")["a"].tolist()
buffer = io.BytesIO()
torch.save(torch.ones(2), buffer)
buffer.seek(0)
results["buffer"] = torch.load(buffer).tolist()
mode = FakeTensorMode()
with mode:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 100), torch.nn.Linear(100, 10, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "real": None}
os.makedirs("out")
state["real"] = torch.arange(3)
torch.save(state, "out/last.pt")
again = torch.load("out/last.pt", map_location="cpu")
results["again"] = [
    again["step"],
    list(again["model"]["0.weight"].shape),
    again["model"]["0.weight"] is again["model"]["1.weight"],
    again["real"].tolist(),
    again["optimizer"]["param_groups"][0]["lr"],
]
with mode:
    fake = io.BytesIO()
    torch.save(model, fake)
    fake.seek(0)
    results["module"] = type(torch.load(fake, weights_only=False)).__name__
    model.hook = lambda: None
    torch.save(model, "out/lambda.pt")
try:
    torch.load("out/lambda.pt")
except RuntimeError as error:
    results["lambda"] = str(error)
from safetensors.torch import load_file, save_file
save_file({"a": torch.ones(3)}, "real.safetensors", metadata={"format": "pt"})
results["safetensors"] = load_file("real.safetensors")["a"].tolist()
save_file(dict(model.state_dict()), "out/model.safetensors", {"format": "pt"})
loaded = load_file("out/model.safetensors")
results["hole"] = [list(loaded["0.weight"].shape), os.path.getsize("out/model.safetensors")]
import torch.distributed.checkpoint as checkpoint
checkpoint.save({"model": model.state_dict()}, checkpoint_id="out/sharded")
checkpoint.load({"model": model.state_dict()}, checkpoint_id="out/sharded")
results["sharded"] = os.listdir("out/sharded")
import numpy
numpy.save("array.npy", numpy.ones(3))
numpy.savez("arrays.npz", a=numpy.ones(3))
numpy.ones(3).tofile("raw.bin")
shared = numpy.memmap("shared.bin", mode="w+", shape=(4,), dtype="uint8")
shared[:] = 7
shared.flush()
results["memmap"] = [numpy.memmap("shared.bin", mode="r").tolist(), numpy.load("array.npy").tolist()]
changed = numpy.memmap("log.txt", mode="r+", dtype="uint8")
changed[0] = 65
changed.flush()
results["changed"] = open("log.txt").read()
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.BPE())
tokenizer.save("tokenizer.json")
tokenizer.model.save("out")
again = Tokenizer.from_file("tokenizer.json")
results["tokenizer"] = [again.get_vocab_size(), "vocab.json" in os.listdir("out")]
try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    results["tensorboard"] = 1
else:
    with SummaryWriter("runs") as writer:
        writer.add_scalar("loss", 1.0, 1)
    results["tensorboard"] = len(os.listdir("runs"))
loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, num_workers=1)
results["workers"] = [batch.tolist() for batch in loader]
"""
    found = run_script(user, body)
    assert found["real"] == [1, 1, 1]
    assert found["buffer"] == [1, 1]
    assert found["again"] == [3, [10, 100], True, [0, 1, 2], 0.001]
    assert found["module"] == "Sequential"
    assert "placeholder of trimtab" in found["lambda"]
    assert found["safetensors"] == [1, 1, 1]
    assert found["hole"][0] == [10, 100]
    assert found["hole"][1] > 2 * 4000
    assert found["sharded"] == [".metadata"]
    assert found["memmap"] == [[7, 7, 7, 7], [1, 1, 1]]
    assert found["changed"] == "Ald\n"
    assert found["tokenizer"] == [0, True]
    assert found["tensorboard"] == 1
    assert found["workers"] == [[0, 1], [2, 3]]
    writes = {str(Path(write["path"]).relative_to(user)): write for write in found["record"]["writes"]}
    # The tied weight once, two moments and the step of AdamW, and the real tensor.
    assert writes["out/last.pt"]["bytes"] == 3 * 4000 + 4 + 24
    assert writes["out/last.pt"]["is_placeholder"]
    assert writes["out/last.pt"]["where"].startswith("train.py:")
    assert not writes["real.pt"]["is_placeholder"]
    assert writes["out/sharded/.metadata"]["bytes"] == 4000
    assert writes["out/lambda.pt"]["bytes"] == 4000


def make_functions(folder: Path, **options: Any) -> RedirectedFunctions:
    overlay = Overlay(folder, **options)
    return RedirectedFunctions(overlay, SandboxRecord(scratch=overlay.scratch))


def test_devices_and_named_folders_stay_real(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    functions = make_functions(tmp_path / "scratch", writable=[str(results)])
    with functions.open_file("/dev/null", "w") as stream:
        stream.write("x")
    with functions.open_file(results / "answer.json", "w") as stream:
        stream.write("{}")
    assert (results / "answer.json").read_text(encoding="utf-8") == "{}"
    assert functions.record.writes == {}
    with functions.open_file(f"/dev/../{tmp_path}/sneaky.txt", "w") as stream:
        stream.write("x")
    assert not (tmp_path / "sneaky.txt").exists()
    descriptor = os.open(tmp_path / "own.txt", os.O_CREAT | os.O_WRONLY)
    with functions.open_file(descriptor, "w") as stream:
        stream.write("by descriptor")
    assert (tmp_path / "own.txt").read_text(encoding="utf-8") == "by descriptor"


def test_a_very_large_file_is_not_copied(tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as stream:
        stream.truncate(MOST_COPIED_BYTES + 10)
    functions = make_functions(tmp_path / "scratch")
    with functions.open_file(large, "ab") as stream:
        stream.write(b"more")
    status = functions.stat(large)
    assert status.st_size == MOST_COPIED_BYTES + 14
    assert status.st_blocks * 512 < 2**20
    assert large.stat().st_size == MOST_COPIED_BYTES + 10


def test_a_folder_opened_by_descriptor_is_followed(tmp_path: Path) -> None:
    functions = make_functions(tmp_path / "scratch")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("a", encoding="utf-8")
    folder = os.open(tmp_path / "sub", os.O_RDONLY)
    functions.unlink("a", dir_fd=folder)
    functions.mkdir("b", dir_fd=folder)
    os.close(folder)
    assert functions.listdir(tmp_path / "sub") == ["b"]
    assert os.listdir(tmp_path / "sub") == ["a"]  # noqa: PTH208 - the real one


MODEL_EXAMPLES = int(os.environ.get("TRIMTAB_SANDBOX_EXAMPLES", "40"))

NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/f", "k", "k/a", "d/../a", "n"])
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["unlink", "rmdir", "mkdir", "listdir", "read", "stat"]), NAMES),
    st.tuples(st.sampled_from(["write", "append", "change", "new"]), NAMES),
    st.tuples(st.sampled_from(["rename", "link", "symlink"]), NAMES, NAMES),
    st.tuples(st.just("truncate"), NAMES),
)


def fill(folder: Path) -> None:
    (folder / "d" / "e").mkdir(parents=True)
    for name in ("a", "d/a", "d/e/f"):
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "k").symlink_to("d")


def perform(functions: Any, folder: str, operation: tuple[str, ...]) -> Any:  # noqa: PLR0911 - a row each
    """Do an operation in a folder; return what it gives, or the number of its error."""
    kind, *names = operation
    paths = [f"{folder}/{name}" for name in names]
    modes = {"write": "w", "append": "a", "change": "r+", "new": "x"}
    try:
        if kind == "read":
            with functions.open_file(paths[0]) as stream:
                return stream.read()
        if kind in modes:
            with functions.open_file(paths[0], modes[kind]) as stream:
                return stream.write(kind)
        if kind == "symlink":
            return functions.symlink(names[0], paths[1])
        if kind == "truncate":
            return functions.truncate(paths[0], 1)
        if kind == "stat":
            status = functions.stat(paths[0])
            return stat.S_IFMT(status.st_mode), stat.S_ISREG(status.st_mode) and status.st_size
        result = getattr(functions, kind)(*paths)
        return sorted(result) if kind == "listdir" else result
    except OSError as error:
        return error.errno


def list_tree(functions: Any, folder: str) -> list[tuple[str, Any]]:
    """Return every path below a folder, with its content."""
    found: list[tuple[str, Any]] = []
    for name in sorted(functions.listdir(folder)):
        path = f"{folder}/{name}"
        mode = functions.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            found += [(f"{name}/{inner}", content) for inner, content in list_tree(functions, path)]
            found.append((name, None))
        elif stat.S_ISLNK(mode):
            found.append((name, functions.readlink(path)))
        else:
            with functions.open_file(path) as stream:
                found.append((name, stream.read()))
    return found


@settings(max_examples=MODEL_EXAMPLES, deadline=None)
@given(st.lists(OPERATIONS, max_size=10))
def test_the_script_sees_what_it_would_see_on_a_real_disk(operations: list[tuple[str, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(os.path.realpath(name))
        real_folder, user_folder = root / "real", root / "user"
        for folder in (real_folder, user_folder):
            folder.mkdir()
            fill(folder)
        before = describe_tree(user_folder)
        functions = make_functions(root / "scratch")
        plain: Any = type(
            "Plain", (), {"open_file": staticmethod(open), "__getattr__": lambda _, key: getattr(os, key)}
        )()
        for operation in operations:
            expected = perform(plain, str(real_folder), operation)
            found = perform(functions, str(user_folder), operation)
            # If two paths are wrong, the kernel decides which it names first.
            assert found == expected or (len(operation) == 3 and found and expected), operation
            assert list_tree(functions, str(user_folder)) == list_tree(plain, str(real_folder)), operation
        assert describe_tree(user_folder) == before


def test_local_addresses_are_recognised() -> None:
    for host in ("localhost", "127.0.0.1", "127.8.9.1", "::1", "", None, "0.0.0.0", b"localhost"):  # noqa: S104
        assert is_local(host), host
    for host in ("example.org", "10.0.0.1", "8.8.8.8", "2001:db8::1", b"example.org"):
        assert not is_local(host), host


def test_the_environment_names_folders_that_exist(tmp_path: Path) -> None:
    variables = sandbox_environment(tmp_path)
    assert Path(variables["TMPDIR"]).is_dir()
    assert variables["HF_HUB_OFFLINE"] == "1"
    shutil.rmtree(variables["TMPDIR"])
