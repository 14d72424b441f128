"""Client of the worker process that traces: its messages, and the modules it imports early.

    with WorkerProcess() as worker:
        worker.ask_all(requests, timeout_s=600)
        worker.ask_all(others, timeout_s=600)    # starts at once: torch and the job are loaded

The user's code runs in child processes only. A request is a line of JSON on stdin; an answer or an error
is a line of JSON on stdout. `WorkerProcess` serves many trace requests for one job. `ask` starts a process
for one small question, such as the workload of a job.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol, Required, Self, TypedDict, Unpack

import msgspec

from trimtab.catalog.torch_release import require_supported_torch
from trimtab.errors import JobFailed, TrimtabError, error_from_dict
from trimtab.jobs.job import Job
from trimtab.jobs.registry import check_job_name, comes_with_trimtab
from trimtab.trace.child_process import (
    end_with_parent,
    exceeds_memory_limit,
    has_timed_out,
    memory_limit_error,
    parent_variable,
    read_waited_s,
)
from trimtab.trace.common_devices import common_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from trimtab.spec import Device, Setting
    from trimtab.trace.request import TraceRequests

    Answer = dict[str, Any] | TrimtabError

SendAnswer = Any
"""A function that takes the answer and ends the process."""
PAUSE_S = 0.05
REPEATABLE = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
"""No downloads while a job is traced, and the same order of sets every time."""


def worker_environment(scratch: str) -> dict[str, str]:
    """Return the environment of a worker process.

    It sees no GPU, and torch.compile writes into a scratch folder, where no real run finds it.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": scratch}
    return os.environ | REPEATABLE | parent_variable() | hidden


class JobRequest(Protocol):
    """A request to a child process about one job."""

    @property
    def job(self) -> str:
        """The name of the job, for messages."""
        ...

    def to_json(self, *, indent: int = 0) -> str:
        """Return the request as the child reads it."""
        ...


class ChildOptions(TypedDict, total=False):
    """How to run a child process, for `ask` and `ask_all`."""

    timeout_s: Required[float]
    """Time limit, without the time in which the process waits for a CPU."""
    watch: bool
    """Kill it when it takes more memory of this host than tracing may."""
    show: bool
    """Show its stderr to the user while it runs."""
    only_reads: bool
    """It takes no steps of the job: an error about the time limit says so."""


def ask(
    module: str, request: JobRequest, env: dict[str, str], **options: Unpack[ChildOptions]
) -> dict[str, Any]:
    """Run a module on a request and return its answer; raise its error, or JobFailed if it crashed."""
    (answer,) = ask_all(module, request, env, **options)
    if isinstance(answer, TrimtabError):
        raise answer
    return answer


def ask_all(
    module: str, request: JobRequest, env: dict[str, str], **options: Unpack[ChildOptions]
) -> list[dict[str, Any] | TrimtabError]:
    """Run a module on a request and return each line of its output as an answer or an error."""
    require_supported_torch()
    check_job_name(request.job)
    job = f"job {request.job}"
    # In a new session, so that all processes that it starts end with it.
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if options.get("show") else subprocess.PIPE,
        env=os.environ | REPEATABLE | parent_variable() | env,
        start_new_session=True,
    )
    try:
        out, err = _exchange(process, request, options)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    try:
        answers = [decode_answer(line) for line in out.splitlines()]
    except ValueError:
        answers = []
    if not answers:
        raise crash_error(job, process.returncode, (err or b"").decode(errors="replace"))
    return answers


def _exchange(
    process: subprocess.Popen[bytes], request: JobRequest, options: ChildOptions
) -> tuple[bytes, bytes]:
    """Send the request and return all output; raise if the process takes too much time or memory."""
    job, timeout_s = f"job {request.job}", options["timeout_s"]
    text: bytes | None = request.to_json().encode()
    begin = time.monotonic()
    while True:
        try:
            return process.communicate(text, timeout=PAUSE_S)
        except subprocess.TimeoutExpired as error:
            text = None
            if has_timed_out(time.monotonic() - begin, read_waited_s(process.pid), timeout_s):
                raise timeout_error(job, timeout_s, only_reads=options.get("only_reads", False)) from error
        if options.get("watch") and exceeds_memory_limit(process.pid):
            raise memory_limit_error(job)


def encode_error(error: TrimtabError) -> bytes:
    """Return an error as a line that `decode_answer` reads."""
    return msgspec.json.encode({"error": error.to_dict()})


def decode_answer(line: bytes) -> dict[str, Any] | TrimtabError:
    """Return the answer or the error in a line."""
    answer: dict[str, Any] = msgspec.json.decode(line)
    if not isinstance(answer, dict):
        raise ValueError(line)  # noqa: TRY004 - the same as a line that is no JSON
    return error_from_dict(answer["error"]) if "error" in answer else answer


def crash_error(job: str, status: int, stderr: str) -> JobFailed:
    """Return the error of a process that ended without an answer."""
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "it said nothing")
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return JobFailed(
        job,
        found=f"the process that ran it ended with {how}: {last.strip()[:300]}",
        cure="If the job runs on a GPU, this is a bug in trimtab: please report it with the job.",
    )


def timeout_error(job: str, timeout_s: float, *, only_reads: bool = False) -> JobFailed:
    """Return the error of a job whose first steps, or reading it, exceed the time limit."""
    what, cure = "its first steps", "Try a smaller --micro-batch, or look for loops over data in loss()."
    if only_reads:
        what = "importing its file and counting the samples of dataset()"
        cure = "Give the job `samples`, so that dataset() is not called, and load no data at import."
    return JobFailed(
        job,
        found=f"{what} took more than {timeout_s:.0f} s",
        cure=f"{cure} If this machine is busy with other work, try again later.",
    )


def answer_with(work: Callable[[SendAnswer], None], answer: IO[bytes]) -> None:
    """Let `work` write its answer into a file; an error of ours that it raises is an answer too."""

    def say(what: dict[str, Any] | bytes) -> NoReturn:
        answer.write(what if isinstance(what, bytes) else msgspec.json.encode(what))
        answer.close()
        # No destructors: patches of torch must outlive all objects.
        os._exit(0)

    try:
        work(say)
    except TrimtabError as error:
        say(encode_error(error))


def serve(work: Callable[[str, SendAnswer], None]) -> None:
    """Run as a child process: call `work` with the text of the request and a function to answer with."""
    end_with_parent()
    answer = redirect_stdout()
    answer_with(lambda say: work(sys.stdin.read(), say), answer)


def redirect_stdout() -> IO[bytes]:
    """Return the real stdout for answers; from now on, what the user's code prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answer


END = b"\n\n"
"""Ends the answers to a request."""


class WorkerProcess:
    """A client of the process that traces; for another job it starts a new process.

    For another device it does so only if traces differ: mostly those of one GPU serve all of its compute
    capability.
    """

    def __init__(self, module: str = "trimtab.trace.worker") -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._job = ""
        """The job that the process has loaded, as JSON."""
        self._without_options = ""
        """The same without the options of the job."""
        self._device: Device | None = None
        """The device for which the process traces."""
        self._pending: deque[TraceRequests] = deque()
        """Requests without an answer so far, in the order in which they were sent."""
        self._prefetched: dict[tuple[float | None, Setting], Answer] = {}
        """Answers that were not requested yet, by gradient clipping and setting."""
        self._unread = bytearray()
        """Bytes after the last answer."""
        self._has_ended = False
        """Whether the process has closed its output."""
        self.last: TraceRequests | None = None
        """The last requests."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load_job(self, requests: TraceRequests) -> None:
        """Start loading the job of these requests, and return at once."""
        self._send(requests.replace(settings=()))

    def prefetch(self, requests: TraceRequests) -> None:
        """Start tracing what is likely to be asked for next, and return at once.

        Other requests wait until that is done, so prefetch little, and only what is likely. What was
        prefetched before is not traced again.
        """
        self._ensure_process(requests)
        coming = {(sent.clip, setting) for sent in self._pending for setting in sent.settings}
        known = coming | self._prefetched.keys()
        missing = tuple(setting for setting in requests.settings if (requests.clip, setting) not in known)
        if missing:
            self._send(requests.replace(settings=missing))

    def is_idle(self) -> bool:
        """Whether a process is running and has answered all requests; take the answers that have come."""
        if self._process is None:
            return False
        while self._pending:
            lines = self._take_lines()
            if lines is not None:
                self._keep_answers(self._pending.popleft(), lines)
            elif not self._receive(0.0):
                break
        return not self._pending

    def ask_all(self, requests: TraceRequests, *, timeout_s: float) -> list[Answer]:
        """Return the answer or the error to each request; only one error if the job cannot be loaded."""
        answers = self._ask_all(requests, timeout_s)
        if self._device != requests.device and not all(map(_serves_all_devices, answers)):
            self.close()
            answers = self._ask_all(requests, timeout_s)
        return answers

    def _ask_all(self, requests: TraceRequests, timeout_s: float) -> list[Answer]:
        self.last = requests
        keys = [(requests.clip, setting) for setting in requests.settings]
        try:
            self._ensure_process(requests)
            coming = {(sent.clip, setting) for sent in self._pending for setting in sent.settings}
            missing = [key for key in keys if key not in self._prefetched and key not in coming]
            if missing or not keys:
                self._send(requests.replace(settings=tuple(setting for _, setting in missing)))
            ends_at = time.monotonic() + timeout_s
            while self._pending and not (keys and all(key in self._prefetched for key in keys)):
                sent = self._pending.popleft()
                lines = self._wait_for_lines(requests, ends_at, timeout_s)
                if len(lines) < len(sent.settings):
                    # The job could not be loaded.
                    return [decode_answer(line) for line in lines]
                self._keep_answers(sent, lines)
            # An answer is used once; the same setting may come twice in the requests.
            taken = {key: self._prefetched.pop(key) for key in dict.fromkeys(keys)}
            return [taken[key] for key in keys]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and all that it has started."""
        process, self._process = self._process, None
        self._pending.clear()
        self._prefetched.clear()
        self._unread.clear()
        self._has_ended = False
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if self._errors is not None:
            self._errors.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _ensure_process(self, requests: TraceRequests) -> None:
        """Start a process unless there is one for this job.

        A process that has a job of trimtab can load it with other options. A user's file may not bear being
        run twice, so it gets a new process.
        """
        bare = requests.replace(settings=(), clip=None, timeout_s=1.0)
        is_running = self._process is not None and self._process.poll() is None
        if is_running and self._serves(requests):
            bare = bare.replace(device=self._device)
        job, without_options = bare.to_json(), bare.replace(overrides={}).to_json()
        if is_running and job == self._job:
            return
        can_reload = comes_with_trimtab(requests.job) and not self._pending
        if is_running and can_reload and without_options == self._without_options:
            self._prefetched.clear()
        else:
            check_job_name(requests.job)
            self.close()
            self._start()
            self._device = requests.device
        self._job, self._without_options = job, without_options

    def _serves(self, requests: TraceRequests) -> bool:
        """Whether the process may trace for the device of these requests: kernels are the same there."""
        if self._device is None or any(setting.compile for setting in requests.settings):
            return self._device == requests.device
        return common_facts(self._device) == common_facts(requests.device)

    def _send(self, requests: TraceRequests) -> None:
        self._ensure_process(requests)
        assert self._device is not None  # noqa: S101 - the process traces for one
        requests = requests.replace(device=self._device)
        self._pending.append(requests)
        assert self._process is not None  # noqa: S101 - it was started
        assert self._process.stdin is not None  # noqa: S101 - with a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(requests.to_json().encode() + b"\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        require_supported_torch()
        self._scratch = tempfile.TemporaryDirectory(prefix="trimtab-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=worker_environment(self._scratch.name),
            start_new_session=True,
        )

    def _keep_answers(self, sent: TraceRequests, lines: list[bytes]) -> None:
        # An error from `load_job` comes again with the next request, and is reported then.
        for setting, line in zip(sent.settings, lines, strict=False):
            self._prefetched[sent.clip, setting] = decode_answer(line)

    def _wait_for_lines(self, requests: TraceRequests, ends_at: float, timeout_s: float) -> list[bytes]:
        """Return the answers to one request; raise if the process takes too much time or memory."""
        process, given = self._process, f"job {requests.job}"
        assert process is not None  # noqa: S101 - a request was sent
        while (lines := self._take_lines()) is None:
            if self._receive(PAUSE_S):
                continue
            if self._has_ended:
                raise crash_error(given, process.wait(), self._read_stderr())
            if time.monotonic() > ends_at:
                raise timeout_error(given, timeout_s)
            if exceeds_memory_limit(process.pid):
                raise memory_limit_error(given)
        return lines

    def _receive(self, timeout_s: float) -> bool:
        """Read what the process has written; return whether there was anything."""
        assert self._process is not None  # noqa: S101 - a request was sent
        assert self._process.stdout is not None  # noqa: S101 - with a pipe
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return False
        more = os.read(self._process.stdout.fileno(), 2**20)
        self._has_ended = not more
        self._unread += more
        return bool(more)

    def _take_lines(self) -> list[bytes] | None:
        """Take the answers to one request from what was read; None if they have not all come."""
        # Answers are lines of JSON, so END cannot occur inside an answer.
        if (end := self._unread.find(END)) < 0:
            return None
        answer = bytes(self._unread[:end]).strip()
        del self._unread[: end + len(END)]
        return answer.splitlines()

    def _read_stderr(self) -> str:
        assert self._errors is not None  # noqa: S101 - the process has them
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")


def _serves_all_devices(answer: Answer) -> bool:
    """Whether an answer holds for all devices with the same kernels; an error may be of one device."""
    return not isinstance(answer, TrimtabError) and not answer.get("is_for_one_device", True)


EARLY_IMPORTS = (
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.tensor._sharding_prop",
    "trimtab.trace.kernels",
    "trimtab.trace.recorder",
    "trimtab.engine.step",
)
"""Modules that every trace needs: imported once, before traces are forked."""
MEMBERS = ("model", "batch", "loss", "losses", "optimizer")
"""Members of a job whose source is searched for imports: jobs import heavy libraries inside model()."""


def import_ahead(job: Any) -> None:
    """Import what tracing needs, and what members of the job import when they are called."""
    for name in EARLY_IMPORTS:
        importlib.import_module(name)
    if isinstance(job, Job):
        with contextlib.suppress(Exception):
            job.import_ahead()
    for member in MEMBERS:
        for module, names in imported_modules(getattr(type(job), member, None)):
            # If an import fails here, the job reports it when it runs.
            with contextlib.suppress(Exception):
                package = importlib.import_module(module)
                for name in names:
                    # Lazy packages import their parts on attribute access.
                    getattr(package, name, None)


def imported_modules(function: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules that the source of a function imports, with the names it takes from each."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names)


def imported_since(before: Collection[str]) -> list[str]:
    """Return the modules that were imported since, in order, without those of torch.

    The compiler of torch starts threads and processes when it is imported, and a process that will be forked
    must not have any.
    """
    return [name for name in sys.modules if name not in before and not name.startswith(("torch.", "__"))]


def import_modules(names: Iterable[str]) -> None:
    """Import modules that a fork of this process had to import, so that later forks have them."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
