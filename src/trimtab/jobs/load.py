"""Load a job by name, and find the name by which another process can load it.

Names: FILE.py:NAME, package.module:NAME, a built-in, or hf:FOLDER.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from trimtab.catalog.torch_release import find_torch_release, require_supported_torch
from trimtab.errors import CannotFollow, JobFailed, TrimtabError, UnknownName, WrongUse, find_nearest
from trimtab.jobs.job import Job, has_embeddings
from trimtab.jobs.library_files import is_library_file
from trimtab.jobs.optimizers import has_optimizers
from trimtab.jobs.options import list_options, set_options
from trimtab.jobs.registry import (
    BUILT_IN,
    FOLDER,
    FOLDER_JOB,
    JOB_FORMS,
    BuiltInJob,
    base_name,
    check_job_name,
)

REQUIRED = ("model", "batch", "loss")


def load_job(name: str, given: dict[str, Any] | None = None) -> Any:
    """Return the job of that name with options set; raise a TrimtabError if it cannot be loaded."""
    require_supported_torch()
    return set_options(_find_job(name), given or {})


def expand_stage(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with those of `stage` added, so that cache keys and plans include them."""
    if "stage" not in given:
        return given
    without_stage = load_job(name, {key: value for key, value in given.items() if key != "stage"})
    with_stage = vars(load_job(name, given))
    added = {
        key: value
        for key, value in with_stage.items()
        if key not in given and getattr(without_stage, key) != value
    }
    return given | added


def _find_job(name: str) -> Any:
    check_job_name(name)
    if name.startswith(FOLDER):
        return _import_class(FOLDER_JOB)(name.removeprefix(FOLDER))
    if base_name(name) in BUILT_IN:
        return _build_built_in(name)
    place, _, attribute = name.rpartition(":")
    module = _import_module(place)
    job = getattr(module, attribute, None)
    if job is None:
        jobs = [key for key, value in vars(module).items() if _is_job(value)]
        close = find_nearest(attribute, jobs) or jobs
        listed = f"; it has {', '.join(close)}" if close else ""
        raise UnknownName(f"job {name!r}", found=f"{place} has no {attribute}{listed}", cure=JOB_FORMS)
    return check_job(_build_job(job, name), name)


def _import_class(job: BuiltInJob) -> Any:
    return getattr(importlib.import_module(job.module), job.class_name)


def _build_built_in(name: str) -> Any:
    """Return a built-in job, or another size of it."""
    base, _, size = name.partition(":")
    job = _import_class(BUILT_IN[base])()
    sizes = {"tiny": job.tiny} | getattr(job, "sizes", {})
    if size in sizes:
        set_options(job, sizes[size])
        job.name = name
    elif size or name.endswith(":"):
        listed = ", ".join(f"{base}:{size}" for size in sizes)
        raise UnknownName(
            f"job {name!r}",
            found=f"{base} is built in, and has no {size!r}",
            cure=f"Use {base}, or another size of it: {listed}. For a module of your own of that name, "
            f"{base}.py:NAME.",
        )
    return job


def find_job_name(job: Any) -> tuple[str, dict[str, Any]]:
    """Return a job's name for load_job() in another process, and the options set on the instance."""
    if isinstance(job, str):
        return job, {}
    cls = job if isinstance(job, type) else type(job)
    state = {} if isinstance(job, type) else dict(vars(job))
    home = (cls.__module__, cls.__qualname__)
    if home == FOLDER_JOB[1:3]:
        return f"{FOLDER}{cls.folder if job is cls else state['folder']}", _select_options(job, state)
    for name, built_in in BUILT_IN.items():
        if home == built_in[1:3]:
            return name, _select_options(job, state)
    try:
        file = inspect.getfile(cls)
    except (TypeError, OSError):
        file = ""
    if not file.endswith(".py") or "<locals>" in cls.__qualname__:
        raise WrongUse(
            f"job {cls.__qualname__}",
            found="it is not defined at the top of a file, where another process could find it",
            cure="Put the class into a separate .py file.",
        )
    return f"{file}:{cls.__qualname__}", state


def find_job_file(name: str) -> Path | None:
    """Return the file of a loaded job; None for a built-in.

    >>> find_job_file("slm:tiny") is None, find_job_file("hf:models/bert").name
    (True, 'config.json')
    """
    if name.startswith(FOLDER):
        return Path(name.removeprefix(FOLDER)).absolute() / "config.json"
    place = name.rpartition(":")[0]
    if base_name(name) in BUILT_IN:
        return None
    if not place.endswith(".py") and "/" not in place:
        place = getattr(sys.modules.get(place), "__file__", None) or ""
    return Path(place).absolute() if place else None


def _select_options(job: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of an instance's state that are options."""
    names = list_options(job)
    return {name: value for name, value in state.items() if name in names and name != "folder"}


def _build_job(job: Any, name: str) -> Any:
    if not isinstance(job, type):
        return job
    try:
        return job()
    except Exception as error:
        cure = "Give every argument of __init__ a default; --set NAME=VALUE changes attributes of the job."
        raise job_error(f"job {name!r}", error, cure) from error


def check_job(job: Any, name: str) -> Any:
    """Return the job if it has the members that a job needs; raise JobFailed otherwise."""
    # embed() and loss_of() together take the place of loss(), and so do the losses of optimizers().
    is_optional = has_embeddings(job) or has_optimizers(job)
    required = [member for member in REQUIRED if member != "loss" or not is_optional]
    lacking = [member for member in required if not callable(getattr(job, member, None))]
    lacking += [member for member in required if getattr(type(job), member, None) is getattr(Job, member)]
    if "loss" in lacking:
        half = [name for name in ("embed", "loss_of") if callable(getattr(job, name, None))]
        if half:
            raise JobFailed(
                f"job {name!r}",
                found=f"it has {half[0]}() and lacks {'loss_of' if half == ['embed'] else 'embed'}()",
                cure="Give both embed(model, batch) and loss_of(embeddings), or loss(model, batch).",
            )
    if lacking:
        raise JobFailed(
            f"job {name!r}",
            found=f"it lacks {', '.join(f'{member}()' for member in lacking)}",
            cure="A job has model(), batch(size) and loss(model, batch).",
        )
    return job


def _is_job(value: Any) -> bool:
    needed = ("model", "batch") if has_embeddings(value) or has_optimizers(value) else REQUIRED
    return isinstance(value, type) and all(callable(getattr(value, member, None)) for member in needed)


def _import_module(place: str) -> Any:
    path = Path(place)
    if path.suffix != ".py" and "/" not in place:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise _missing_package_error(place, error) from error
        except Exception as error:
            raise job_error(f"job {place}", error, "Fix the module, or run it alone to see more.") from error
    spec = importlib.util.spec_from_file_location(f"trimtab_job_{path.stem}", path)
    assert spec is not None  # noqa: S101 - a .py file has a loader
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The file's own folder comes first, as when it is run as a script.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise _missing_package_error(place, error) from error
    except Exception as error:
        raise job_error(f"job {place}", error, "Fix the file, or run it alone to see more.") from error
    return module


def _missing_package_error(place: str, error: ModuleNotFoundError) -> TrimtabError:
    missing = getattr(_find_first_cause(error), "name", None)
    if missing is None:
        return job_error(f"job {place}", error, "Run the file alone to see more.")
    return JobFailed(
        f"job {place}",
        found=f"it needs the package {missing!r}, which is not installed here"
        f"{describe_location(error, place)}",
        cure=f"Install it: pip install {missing}",
    )


def job_error(given: str, error: Exception, cure: str) -> TrimtabError:
    """Return the error for a failure of the user's code, with its file and line."""
    if isinstance(error, TrimtabError):
        return error
    found = f"{_describe_error(error)}{describe_location(error)}"
    first = _find_first_cause(error)
    if first is not error:
        found += f", because of {_describe_error(first)}"
    return JobFailed(given, found=found, cure=_explain_wrong_build(error) or _explain_release(error) or cure)


def _find_first_cause(error: BaseException) -> BaseException:
    """Return the error that led to this one; packages that import parts on demand raise several in a row."""
    for _ in range(LONGEST_CHAIN):
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error


WRONG_BUILD = re.compile(
    r"operator (?P<operators>\w+)::\w+ does not exist"
    r"|(?P<library>\w+)[^/\s]*\.so: undefined symbol: \w*(?:c10|at\d|torch)"
)
"""Messages about a package whose compiled code does not match torch."""
LONGEST_CHAIN = 20
"""How many errors that caused one another are looked at."""


def _explain_wrong_build(error: BaseException | None) -> str:
    """Return what to do if a package was compiled for another torch; empty if that is not the cause."""
    for _ in range(LONGEST_CHAIN):
        if error is None:
            break
        found = WRONG_BUILD.search(str(error))
        frames = traceback.extract_tb(error.__traceback__)
        package = found and (found["library"] or found["operators"])
        # Operators that a job registers itself are missing for other reasons.
        if found and (found["library"] or any(package in Path(frame.filename).parts for frame in frames)):
            return (
                f"{package} was built for another torch than the installed {find_torch_release()}: install "
                f"the release that belongs to it. It fails without trimtab too: python -c 'import {package}'."
            )
        error = error.__cause__ or error.__context__
    return ""


MISSING_NAME = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")
"""The message about a name that a module does not have."""


def _explain_release(error: Exception) -> str:
    """Return what to do if an installed package lacks what is imported from it; empty if none is at fault."""
    if not isinstance(error, ImportError):
        return ""
    found = MISSING_NAME.search(str(error))
    module, missing = (found["module"], found["name"]) if found else (error.name or "", error.name)
    package = module.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(package)
    if missing == package or not names:
        return ""
    installed = importlib.metadata.distribution(names[0])
    # A file of the user may have the name of a package.
    if error.path and not Path(error.path).is_relative_to(str(installed.locate_file(""))):
        return ""
    where = f"{module} of {names[0]}" if found else names[0]
    return (
        f"{where} {installed.version}, which is installed, has no {missing}: install the release of "
        f"{names[0]} that this code was written for, or change the import. It fails without trimtab too."
    )


def _describe_error(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    # The message of a syntax error without its file and line: describe_location() gives them.
    message = (error.msg if isinstance(error, SyntaxError) else "") or str(error)
    text = message.strip().split("\n")[0][:300] or "no message"
    return f"{type(error).__name__}: {text}"


OPERATION = "_trimtab_operation"
"""Attribute of an error that was raised during tracing: the name of the operation."""


def tracing_error(member: str, error: Exception, cure: str) -> TrimtabError:
    """Return the error for a failure of tracing, with the operation and the line of the job."""
    if isinstance(error, TrimtabError):
        return error
    if _explain_wrong_build(error):
        return job_error(member, error, cure)
    text = str(error).strip().split("\n")[0][:200] or "no message"
    where = f"{_failed_operation(error)} here{describe_location(error)}"
    found = f"trimtab cannot follow {where}; {type(error).__name__}: {text}"
    return CannotFollow(member, found=found, cure=cure)


def _failed_operation(error: Exception) -> str:
    """Return the operation at which tracing failed, as far as it is known."""
    recorded = getattr(error, OPERATION, None)
    named = re.search(r"\b(?:aten|prims|torchvision|transformers)::\w+(?:\.\w+)?", str(error))
    if recorded or named:
        return str(recorded or (named and named[0]))
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name}()" if frames else "an operation"


def describe_location(error: BaseException, place: str = "") -> str:
    """Return the file and line of an error in parentheses: the last frame outside of Python and packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    mine = str(Path(__file__).parent.parent)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((mine, "<")) and not is_library_file(frame.filename)
    ]
    if not own:
        return f" ({place})" if place else ""
    return f" ({own[-1].filename}, line {own[-1].lineno})"
