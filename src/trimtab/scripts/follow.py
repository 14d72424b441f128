"""Follow a training command: run it in a child process on the pretended GPU, and return what it did."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.diagnosis.log_scanner import strip_escapes
from trimtab.errors import EnvironmentFault, JobFailed, error_from_dict
from trimtab.scripts.apply import list_file_texts
from trimtab.scripts.cache import load_followed, make_followed_key, store_followed
from trimtab.scripts.command import format_command
from trimtab.scripts.interpreters import can_import_trimtab
from trimtab.scripts.offline import sandbox_environment
from trimtab.scripts.result import ScriptRequest, ScriptResult
from trimtab.trace.child_process import has_timed_out, parent_variable, read_waited_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.errors import TrimtabError
    from trimtab.spec import Device, ScriptCommand

TIMEOUT_S = 900.0
"""How long a script may take until its third step, without the time in which it waited for a CPU."""
POLL_S = 0.1
END_OF_INPUT = b"\x04"
TAIL_LINES = 12
PACKAGE_PARENT = Path(__file__).parent.parent.parent


def follow_script(  # noqa: PLR0913 - a command, where it runs, and how
    command: ScriptCommand,
    device: Device,
    *,
    devices: int | None = None,
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] | None = None,
    cache: bool = False,
) -> ScriptResult:
    """Return what a command did in its first three optimizer steps on a device; raise its error.

    `devices` is how many GPUs its node has; `say` gets the last line that the script printed. With `cache`,
    the result of the same command with the same files, versions and variables is taken from the cache.
    """
    asked = _make_request(command, device, devices)
    key = make_followed_key(asked)
    cached = load_followed(key) if cache else None
    if cached is not None:
        return cached
    result = _follow(asked, timeout_s=timeout_s, say=say)
    store_followed(key, result)
    return result


def find_followed(
    command: ScriptCommand, device: Device, *, devices: int | None = None
) -> ScriptResult | None:
    """Return the cached result of a command; None if it was not followed with these files."""
    return load_followed(make_followed_key(_make_request(command, device, devices)))


def _make_request(command: ScriptCommand, device: Device, devices: int | None) -> ScriptRequest:
    return ScriptRequest(
        command=command,
        device=device,
        devices=devices or command.processes,
        scratch="-",
        files=list_file_texts(command.changes),
    )


def _follow(asked: ScriptRequest, *, timeout_s: float, say: Callable[[str], None] | None) -> ScriptResult:
    """Run a command in a child process, and return what it did."""
    command = asked.command
    problem = can_import_trimtab(command.interpreter)
    if problem:
        raise EnvironmentFault(
            f"the interpreter {command.interpreter}",
            found=problem,
            cure="Install trimtab in the environment of the script, or name the Python that has both.",
        )
    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        scratch = Path(folder)
        request, answer, log = (scratch / name for name in ("request.json", "result.json", "output.txt"))
        (scratch / "files").mkdir()
        asked = asked.replace(scratch=str(scratch / "files"))
        request.write_text(asked.to_json(), encoding="utf-8")
        with log.open("wb") as output, _open_input() as source:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                [
                    *(command.interpreter, *command.interpreter_options),
                    *("-m", "trimtab.scripts.worker", str(request), str(answer)),
                ],
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(scratch / "files"),
                start_new_session=True,
            )
            try:
                _wait(process, command, log, timeout_s=timeout_s, say=say)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _read_result(command, answer, log, process.returncode)


@contextlib.contextmanager
def _open_input() -> Iterator[int]:
    """Open an input without text: a terminal where the user has one, as some scripts ask for its size."""
    if not sys.stdin or not sys.stdin.isatty():
        yield subprocess.DEVNULL
        return
    keyboard, terminal = os.openpty()
    try:
        size = os.get_terminal_size(sys.stdin.fileno())
        termios.tcsetwinsize(terminal, (size.lines, size.columns))
        # A script that asks a question gets the end of the input as an answer.
        os.write(keyboard, END_OF_INPUT * 8)
        yield terminal
    finally:
        os.close(terminal)
        os.close(keyboard)


def add_output(error: TrimtabError, log: Path) -> TrimtabError:
    """Add the last lines of a script's output to its error; the command line shows them above it."""
    error.add_note("\n".join(_read_tail(log)[-TAIL_LINES:]))
    return error


def _environment(scratch: Path) -> dict[str, str]:
    """Return the environment of the child; it imports this trimtab, wherever its Python comes from."""
    paths = [str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = sandbox_environment(scratch)
    return (
        os.environ
        | parent_variable()
        | offline
        | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    )


def _wait(
    process: subprocess.Popen[bytes],
    command: ScriptCommand,
    log: Path,
    *,
    timeout_s: float,
    say: Callable[[str], None] | None,
) -> None:
    begin = time.monotonic()
    shown = ""
    while process.poll() is None:
        time.sleep(POLL_S)
        if say is not None and (line := _last_line(log)) != shown:
            shown = line
            say(line)
        if has_timed_out(time.monotonic() - begin, read_waited_s(process.pid), timeout_s):
            line = _last_line(log)
            printed = f"its last line: {line}" if line else "it printed nothing"
            raise JobFailed(
                format_command(command),
                found=f"no third optimizer step within {timeout_s:g} s; {printed}",
                cure="Give it less to do before training: a smaller data set, no evaluation at the start.",
            )


def _last_line(log: Path) -> str:
    lines = _read_tail(log)
    return strip_escapes(lines[-1])[:100] if lines else ""


def _read_tail(log: Path, size: int = 8192) -> list[str]:
    """Return the last lines of the output; a progress bar writes many lines over each other."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        text = file.read().decode(errors="replace").replace("\r", "\n")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _read_result(command: ScriptCommand, answer: Path, log: Path, status: int) -> ScriptResult:
    if not answer.exists():
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        error: TrimtabError = JobFailed(
            format_command(command),
            found=f"the process ended with {how}",
            cure="Run the command without trimtab. If it works there, this is a bug in trimtab.",
        )
        raise add_output(error, log)
    result = ScriptResult.from_json(answer.read_bytes())
    if not result.error:
        return result
    error = error_from_dict(result.error)
    raise add_output(error, log)
