"""Start Python child processes from a process that has imported torch already.

Importing what a trace or a rank needs takes 5 s of a core, and the tests start hundreds of such processes. So
a server imports it once for each process of tests, and makes a copy of itself for every child that would
import it anyway. A copy has its own arguments, environment, folder, files and session, and becomes a child of
the process that asked (Linux calls that a subreaper), so it is waited for and ended like any other.

`TRIMTAB_COLD_START=1 make test` and the fixture `cold_start` start plain processes instead.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

COLD = "TRIMTAB_COLD_START"
"""Environment variable: start plain processes."""
IMPORTED = (
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.tensor._sharding_prop",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "trimtab.engine.step",
    "trimtab.trace.kernels",
    "trimtab.trace.recorder",
    "trimtab.training.worker",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.t5.modeling_t5",
)
VERBS = {"estimate", "plan", "train", "show", "launch", "exam", "profile"}
"""Commands that start processes that import torch."""
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux's prctl: orphans of this process become its children."""

_Popen = subprocess.Popen
_NAMES = tuple(inspect.signature(_Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
_PLAIN = {
    "executable": None,
    "preexec_fn": None,
    "pass_fds": (),
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
"""Arguments of a start that is like most."""
_servers: dict[int, socket.socket] = {}
"""Connections to servers, by the process that they serve: a copy inherits those of its original."""


_running: list[Any] = []
"""The servers themselves."""
_asking = threading.RLock()
"""A server answers the question of one thread at a time."""


class WarmPopen(_Popen):  # type: ignore[type-arg]
    """Like subprocess.Popen; the child is a copy of the server where that helps."""

    def _execute_child(self, *given: Any) -> None:
        start = dict(zip(_NAMES, given, strict=True))
        words, env = start["args"], start["env"]
        plain = not isinstance(words, str) and all(start[name] == usual for name, usual in _PLAIN.items())
        if not plain or not _gains([os.fsdecode(word) for word in words], env):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ends = [start[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        order = {
            "words": [os.fsdecode(word) for word in words],
            "env": dict(os.environ if env is None else env),
            "folder": os.fspath(start["cwd"] or Path.cwd()),
            "new_session": bool(start["start_new_session"]),
        }
        files = [own if end < 0 else end for own, end in enumerate((ends[0], ends[3], ends[5]))]
        self.pid = _ask(_server(), order, files)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def install() -> None:
    """Start child processes warm from now on, where the system allows it."""
    if sys.platform == "linux" and not os.environ.get(COLD):
        subprocess.Popen = WarmPopen  # type: ignore[misc]


def remove() -> None:
    """Start plain processes again."""
    subprocess.Popen = _Popen  # type: ignore[misc]


def _gains(words: list[str], env: Any) -> bool:
    """Whether a process would import torch in any case, and nobody looks at how it starts."""
    if words[0] != sys.executable or (env or os.environ).get(COLD):
        return False
    if words[1] == "-c":
        return "worlds.be_rank" in words[2]
    if words[1] != "-m":
        return False
    if words[2] == "trimtab":
        return bool(VERBS.intersection(words[3:4]))
    return words[2].startswith("trimtab.")


def _server() -> socket.socket:
    """Return the connection to this process's server, which starts when it is needed first."""
    with _asking:
        if os.getpid() not in _servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            env = os.environ | {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
            env.pop("PYTHONPATH", None)
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno())]
                _running.append(_Popen(command, pass_fds=[theirs.fileno()], env=env, cwd="/"))
            _servers[os.getpid()] = ours
        return _servers[os.getpid()]


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Be the new parent of orphans for a moment: any other orphan is no business of the tests."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def _ask(server: socket.socket, order: dict[str, Any], files: list[int]) -> int:
    """Have the server make a copy of itself; return the copy's process id."""
    reading, writing = os.pipe()
    with _asking, _adopting_orphans(), os.fdopen(reading, "rb") as text:
        with os.fdopen(writing, "wb") as out:
            fds = array.array("i", [*files, text.fileno()])
            server.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            out.write(json.dumps(order).encode())
        answer = server.recv(64)
    if not answer:
        raise RuntimeError("the server of warm processes has ended")
    return int(answer)


def serve(asked: socket.socket, base: list[str]) -> NoReturn:
    """Make copies of this process until nobody can ask any more."""
    # Ctrl-C reaches the whole group; the process that asks decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size = 4 * array.array("i").itemsize
    while True:
        message, extra, _, _ = asked.recvmsg(1, socket.CMSG_SPACE(size))
        if not message:
            os._exit(0)
        fds = array.array("i")
        fds.frombytes(extra[0][2])
        with os.fdopen(fds[3], "rb") as text:
            order = json.loads(text.read())
        pid = _copy(order, list(fds[:3]), base)
        for file in fds[:3]:
            os.close(file)
        asked.send(str(pid).encode())


def _copy(order: dict[str, Any], files: list[int], base: list[str]) -> int:  # noqa: RET503 - a copy never returns
    """Fork twice: the copy loses its parent and becomes a child of the process that asked."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        with os.fdopen(reading, "rb") as text:
            return int(text.read())
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    _be_started(order, files, base)


def _be_started(order: dict[str, Any], files: list[int], base: list[str]) -> NoReturn:
    """Be the process that was ordered."""
    code = 1
    try:
        if order["new_session"]:
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 4096)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        words = order["words"][1:]
        paths = [path for path in order["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = ["" if words[0] == "-c" else str(Path.cwd()), *paths, *base]
        sys.orig_argv[:] = order["words"]
        _renew_streams()
        _have_server(base)
        _renew_torch()
        code = _run(words)
    except BaseException:  # noqa: BLE001 - a copy must never go on with what its original was doing
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as Python does at its end
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _have_server(base: list[str]) -> None:
    """Make a copy of this process for its own children, before it has any thread or state."""
    _servers.clear()
    _running.clear()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _servers[os.getpid()] = ours
        install()
        return
    ours.close()
    for number in range(3):
        # A pipe ends when all who hold it have closed it.
        with Path(os.devnull).open("r+b", buffering=0) as nothing:
            os.dup2(nothing.fileno(), number)
    serve(theirs, base)


def _renew_streams() -> None:
    """Open stdin, stdout and stderr as a new process does."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 - stays open
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or os.isatty(number),
            write_through=name != "stdin" and bool(os.environ.get("PYTHONUNBUFFERED")),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renew_torch() -> None:
    """Use the threads that the environment asks for; it was read when torch was imported."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0)))


def bind_late() -> None:
    """Let torch's compiler look functions of torch.cuda up when it calls them.

    It takes them over when it is imported, and a process that traces replaces them before that.
    """
    import torch
    from torch._dynamo.device_interface import CudaInterface

    def late(name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            return getattr(torch.cuda, name)(*args, **kwargs)

        return staticmethod(called)

    for owner in (CudaInterface, CudaInterface.Worker):
        for name, value in list(vars(owner).items()):
            taken = getattr(getattr(value, "__func__", None), "__name__", "")
            if taken and getattr(torch.cuda, taken, None) is value.__func__:
                setattr(owner, name, late(taken))


def _run(words: list[str]) -> int:
    """Run a module or a text as the main program; return its exit code."""
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what -m does
        else:
            sys.argv[:] = ["-c", *words[2:]]
            main = sys.modules["__main__"].__dict__
            main.pop("__file__", None)
            exec(compile(words[1], "<string>", "exec"), main)  # noqa: S102 - what python -c does
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - what ends a process ends it here
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    connection, others = socket.socket(fileno=int(sys.argv[1])), sys.path[1:]
    # The main module of a copy is an empty one, as in a new process.
    sys.modules["warm_start"], sys.modules["__main__"] = sys.modules["__main__"], type(sys)("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = __builtins__
    for module in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    bind_late()
    gc.collect()
    # Copies share memory until one of them writes; collecting garbage would write everywhere.
    gc.freeze()
    serve(connection, others)
