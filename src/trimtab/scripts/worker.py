"""The process that follows a script: `python -m trimtab.scripts.worker REQUEST RESULT`.

It pretends that the target GPU is there, runs the script unchanged as its main program, and ends it when it
has taken three optimizer steps. The result is a file of JSON: the trace, and what was found out.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import CannotFollow, JobFailed, TrimtabError, WrongUse
from trimtab.scripts.inputs import InputRecord
from trimtab.scripts.launchers import launcher_environment
from trimtab.scripts.longest import find_longest
from trimtab.scripts.nvidia_smi import write_program
from trimtab.scripts.offline import REASON
from trimtab.scripts.overlay import put_files
from trimtab.scripts.result import ScriptRequest, ScriptResult
from trimtab.scripts.sandbox import install_sandbox
from trimtab.trace.child_process import end_with_parent
from trimtab.units import format_bytes

OFFLINE_WORDS = ("offline", "localentrynotfound", "connectionerror", "max retries exceeded")
"""Words in the errors of libraries that found nothing on disk and may not download."""

if TYPE_CHECKING:
    from trimtab.scripts.observer import Observer
    from trimtab.scripts.sandbox_record import SandboxRecord

OWN_FOLDER = str(Path(__file__).parent.parent)


def run_worker(request_file: str, result_file: str) -> None:
    """Follow the script of a request, and write the result."""
    end_with_parent()
    warnings.simplefilter("ignore")
    request = ScriptRequest.from_json(Path(request_file).read_bytes())
    command = request.command
    _set_environment(request)
    sandbox = install_sandbox(
        Path(request.scratch), script=command.target, writable=[Path(result_file).parent]
    )
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trimtab.scripts.observer import Observer
    from trimtab.scripts.recorder import ScriptRecorder
    from trimtab.scripts.torch_patches import install_patches
    from trimtab.trace.fake_cuda import install_fake_cuda
    from trimtab.trace.kernels import Kernels

    install_fake_cuda(request.device)
    os.environ.update(launcher_environment(command))
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = ScriptRecorder(Kernels(request.device), fake_mode)
    observer: Observer

    def finish() -> None:
        result = make_result(observer, sandbox)
        _write(result_file, result.replace(inputs=inputs.list_inputs()))
        _end_process()

    observer = Observer(recorder, finish)
    inputs = _record_inputs([request.scratch, str(Path(result_file).parent), OWN_FOLDER])
    install_patches(observer, world_size=command.world_size, devices=request.devices, device=request.device)
    recorder.mark_phase("build", "weights")
    torch._C._set_only_lift_cpu_tensors(True)
    with recorder:
        try:
            _run_to_its_end(request, observer)
        except SystemExit as end:
            if end.code not in (None, 0) and not observer.steps:
                _write(result_file, ScriptResult(error=_describe_exit(request, end).to_dict()))
                os._exit(0)
            if end.code not in (None, 0):
                note = f"after step {observer.steps} the script ended itself with exit code {end.code}"
                observer.notes[note] = None
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:  # noqa: BLE001 - whatever the script raises is the result
            if not isinstance(error, TrimtabError):
                _print_own_traceback(error)
            if not observer.is_over:
                _write(result_file, ScriptResult(error=describe_failure(error, sandbox).to_dict()))
                os._exit(0)
            _note_late_failure(observer, error)
    finish()


def _end_process() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A script may have put an object of its own there, which cannot be flushed.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _record_inputs(skipped: list[str]) -> InputRecord:
    """Record from now on which files the script reads."""
    inputs = InputRecord(skipped)
    inputs.install()
    return inputs


def _set_environment(request: ScriptRequest) -> None:
    command = request.command
    put_files(request.files, Path(request.scratch))
    os.environ.update(command.environment)
    # Fake tensors belong to one thread.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    device = request.device
    programs = Path(request.scratch) / "bin"
    write_program(programs, name=device.name, memory_bytes=device.memory_bytes, count=request.devices)
    os.environ["PATH"] = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(request.devices)))


def _run_to_its_end(request: ScriptRequest, observer: Observer) -> None:
    """Run the script, and the processes that Python waits for when it ends."""
    _run_script(request)
    if observer.run_waiting is not None:
        observer.run_waiting()


def _run_script(request: ScriptRequest) -> None:
    """Run the script as the main program, with its own arguments."""
    command = request.command
    warnings.simplefilter("default")
    sys.argv = [command.target, *command.added_arguments, *command.arguments]
    if command.is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(command.target).resolve().parent)
    runpy.run_path(command.target, run_name="__main__")


def make_result(observer: Observer, sandbox: SandboxRecord) -> ScriptResult:
    """Return what was found out about the script."""
    if not observer.steps:
        return ScriptResult(error=_describe_no_step(observer).to_dict())
    if not observer.uses_gpu():
        return ScriptResult(error=_describe_cpu(observer).to_dict())
    observer.note_optimizers()
    observer.recorder.paused = True
    if observer.windows:
        observer.windows[-1].end = len(observer.recorder.order)
    return ScriptResult(
        trace=observer.make_trace(),
        facts=tuple(observer.facts.values()),
        windows=tuple((window.name, window.begin, window.end) for window in observer.windows if window.name),
        steps=observer.steps,
        compiled_graphs=observer.compiled_graphs,
        accumulation=observer.accumulation,
        is_mean=observer.is_mean,
        passes=observer.passes,
        passes_of_step=observer.passes_of_step,
        fetched=tuple(observer.fetched.items()),
        micro_batches=tuple(observer.micro_batches.items()),
        lengths=tuple(observer.lengths.items()),
        longest=find_longest(observer.training_loader) if observer.lengths else None,
        loader_s=observer.loader_s / observer.loader_batches if observer.loader_batches else None,
        **_describe_sandbox(sandbox, observer.saved_sizes),
    )


def _describe_sandbox(sandbox: SandboxRecord, saved_sizes: dict[str, int]) -> dict[str, Any]:
    """Return what the script tried to write and to reach, for the result."""
    found = sandbox.to_builtins()
    for write in found["writes"]:
        write["bytes"] = saved_sizes.get(write["path"], write["bytes"])
    refused = [
        f"the script tried to reach {attempt['address']} at {attempt['where']}, and was kept off the network"
        for attempt in found["network"]
    ]
    return {"writes": tuple(list_writes(found["writes"])), "notes": (*found["notes"], *refused)}


def list_writes(writes: list[dict[str, Any]]) -> list[str]:
    """Return a line for each file, or for each folder with several files of the same line; largest first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for write in writes:
        if not write["is_removed"] and not write["path"].endswith(".lock"):
            groups.setdefault((str(Path(write["path"]).parent), write["where"]), []).append(write)
    sizes = {key: sum(write["bytes"] or 0 for write in group) for key, group in groups.items()}
    lines = []
    for (folder, where), size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        group = groups[folder, where]
        path = group[0]["path"] if len(group) == 1 else f"{folder}/"
        count = "" if len(group) == 1 else f"{len(group)} files, "
        lines.append(f"{_shorten_path(path)} ({count}{format_bytes(size)}), {where}")
    return lines


def _shorten_path(path: str) -> str:
    """Return a path as seen from the working directory or from the home folder."""
    home = str(Path.home()) + "/"
    path = path.removeprefix(f"{Path.cwd()}/") or "./"
    return f"~/{path.removeprefix(home)}" if path.startswith(home) else path


def _describe_no_step(observer: Observer) -> TrimtabError:
    found = "it ran without an optimizer step on the GPU"
    if observer.recorder.order:
        found += ", although it used the GPU"
    elif not observer.roots:
        found += ", and no model was called"
    cure = "Give the command that trains; it must use torch.optim's optimizers."
    for loader, count in observer.empty_passes.items():
        times = "" if count == 1 else f" {count:,} times"
        found += f"; a data loader gave no batch{times}: {loader}"
        cure = "Give it more samples, or a smaller batch. drop_last=True leaves out a batch that is not full."
    return CannotFollow("the script", found=found, cure=cure)


def _describe_cpu(observer: Observer) -> TrimtabError:
    where = observer.facts["optimizer"].where if "optimizer" in observer.facts else ""
    at = f" ({where})" if where else ""
    return WrongUse(
        "the script",
        found=f"it trains on the CPU: its optimizer steps{at} use nothing on the GPU",
        cure="Add the option that puts the model on the GPU, such as --cuda or --device cuda. If there is "
        "none, move the model and its inputs in the script, as in model.to('cuda').",
    )


def _describe_exit(request: ScriptRequest, end: SystemExit) -> TrimtabError:
    code = end.code if isinstance(end.code, int) else 1
    found = f"it ended with exit code {code}" if isinstance(end.code, int) else str(end.code)
    return WrongUse(
        f"the command {' '.join(request.command.words)}", found=found, cure="See its output above."
    )


def _print_own_traceback(error: BaseException) -> None:
    """Print the traceback from the script's own first line on, without trimtab's part in its imports."""
    here = error.__traceback__
    while here is not None and (
        here.tb_frame.f_code.co_filename.startswith("<frozen")
        or "trimtab.scripts" in str(here.tb_frame.f_globals.get("__spec__"))
    ):
        here = here.tb_next
    printed = traceback.TracebackException(type(error), error, here or error.__traceback__)
    shown: traceback.TracebackException | None = printed
    while shown is not None:
        frames = [frame for frame in shown.stack if not _is_import_patch(frame)]
        shown.stack = traceback.StackSummary.from_list(frames)
        shown = shown.__cause__ or shown.__context__
    # The script may have put an object of its own in the place of sys.stderr.
    print(*printed.format(), sep="", end="", file=sys.__stderr__)


def _is_import_patch(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to a function of trimtab that replaces a part of Python's import."""
    return frame.name == "exec_module" and frame.filename.startswith(OWN_FOLDER)


def _note_late_failure(observer: Observer, error: BaseException) -> None:
    """Note that a script failed after its third step, unless it was because its loaders have ended."""
    from trimtab.jobs.load import describe_location
    from trimtab.scripts.torch_patches import was_loader_ended

    if not was_loader_ended(error):
        note = f"after its third step the script failed: {_shorten(error)}{describe_location(error)}"
        observer.notes[note] = None


def _shorten(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:200] or "no message"
    return f"{type(error).__name__}: {text}"


def describe_failure(error: BaseException, sandbox: SandboxRecord) -> TrimtabError:
    """Return the error of a script: its own, or something that trimtab cannot follow."""
    from trimtab.jobs.load import describe_location, job_error, tracing_error
    from trimtab.scripts.deepspeed_patches import lacks_deepspeed, refuse_deepspeed

    if isinstance(error, TrimtabError):
        return error
    plain = error if isinstance(error, Exception) else RuntimeError(str(error))
    plain.__traceback__ = error.__traceback__
    if _wants_network(error, sandbox):
        cure = (
            "trimtab keeps scripts off the network. Run the command once without trimtab until it trains, so "
            "that models and data are on this machine's disk; then ask again."
        )
        return job_error("the script", plain, cure)
    if lacks_deepspeed(plain):
        # If it were installed, it would be refused.
        return refuse_deepspeed(describe_location(plain))
    if isinstance(plain, ImportError):
        cure = (
            f"Install what is missing for {sys.executable}, which runs the script: packages run here too. "
            "bitsandbytes and others with GPU kernels need no GPU for this."
        )
        return job_error("the script", plain, cure)
    if _is_own_fault(plain):
        return job_error("the script", plain, "Run it without trimtab to see whether it works.")
    cure = (
        "If the script fails in the same way without trimtab, correct it there. If it works on a GPU, this "
        "is a bug in trimtab: please report it, with the operation. Until then, leave that part out."
    )
    return tracing_error("the script", plain, cure)


def _wants_network(error: BaseException, sandbox: SandboxRecord) -> bool:
    """Return whether a script failed because a download was refused, or not even tried."""
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type(cause).__name__}: {cause}".lower()
        if REASON in str(cause) or any(word in text for word in OFFLINE_WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return bool(sandbox.network) and isinstance(error, OSError)


def _is_own_fault(error: Exception) -> bool:
    """Return whether an error has nothing to do with fake tensors: a missing file, package or argument."""
    from trimtab.jobs.load import OPERATION

    if hasattr(error, OPERATION):
        return False
    if isinstance(error, OSError | ImportError | SyntaxError | JobFailed):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    # The script, or a library that it calls, raised it; not torch, and nothing that stands in for torch.
    last = Path(frames[-1].filename).parts if frames else ("torch",)
    # Loaders and samplers are no part of what is pretended.
    return not {"torch", "trimtab"}.intersection(last) or "/torch/utils/data/" in frames[-1].filename


def _write(file: str, result: ScriptResult) -> None:
    temporary = Path(f"{file}.part")
    temporary.write_text(result.to_json(), encoding="utf-8")
    temporary.replace(file)


if __name__ == "__main__":
    run_worker(*sys.argv[1:3])
