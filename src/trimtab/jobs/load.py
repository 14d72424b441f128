"""Finds a job by name, and names a job so that another process finds it.

FILE.py:NAME, package.module:NAME, a built-in, or hf:FOLDER. A file is run only because the user named it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from trimtab.errors import CannotFollow, JobFailed, TrimtabError, UnknownName, WrongUse, nearest
from trimtab.jobs.job import Job, is_cached
from trimtab.jobs.options import change, options
from trimtab.jobs.registry import BUILT_IN, FOLDER, FOLDER_JOB, BuiltInJob, base_name

REQUIRED = ("model", "batch", "loss")
_FORMS = (
    f"Name a job as FILE.py:NAME, package.module:NAME, {', '.join(BUILT_IN)} (or {next(iter(BUILT_IN))}:tiny "
    "...), or hf:FOLDER."
)


def load(name: str, given: dict[str, Any] | None = None) -> Any:
    """The job of that name, built, with options set; raises what is wrong with it."""
    return change(_found(name), given or {})


def expanded(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """What was given, with what `stage` stands for written out, so that caches and plans see it."""
    if "stage" not in given:
        return given
    plain, chosen = (
        load(name, {key: text for key, text in given.items() if key != "stage"}),
        load(name, given),
    )
    felt = {key: var for key, var in vars(chosen).items() if key not in given and getattr(plain, key) != var}
    return given | felt


def _found(name: str) -> Any:
    if name.startswith(FOLDER):
        return _class(FOLDER_JOB)(name.removeprefix(FOLDER))
    if base_name(name) in BUILT_IN:
        return _built_in(name)
    place, colon, attribute = name.rpartition(":")
    if (not colon or not attribute) and (name.endswith(".py") or "/" in name):
        raise WrongUse(f"job {name!r}", found="it names a file and no class in it", cure=_FORMS)
    if not colon or not place or not attribute:
        close = nearest(name, BUILT_IN)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(f"job {name!r}", found=f"there is no built-in of that name{meant}", cure=_FORMS)
    module = _module(place)
    found = getattr(module, attribute, None)
    if found is None:
        known = [key for key, value in vars(module).items() if _is_job(value)]
        close = nearest(attribute, known) or known
        listed = f"; it has {', '.join(close)}" if close else ""
        raise UnknownName(f"job {name!r}", found=f"{place} has no {attribute}{listed}", cure=_FORMS)
    return checked(_built(found, name), name)


def _class(job: BuiltInJob) -> Any:
    return getattr(importlib.import_module(job.module), job.class_name)


def _built_in(name: str) -> Any:
    """A job of ours, or another size of it."""
    base, _, size = name.partition(":")
    job = _class(BUILT_IN[base])()
    sizes = {"tiny": job.tiny} | getattr(job, "sizes", {})
    if size in sizes:
        change(job, sizes[size])
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


def name_of(job: Any) -> tuple[str, dict[str, Any]]:
    """What load() finds a job by in another process: its name, and what was changed on the instance."""
    if isinstance(job, str):
        return job, {}
    cls = job if isinstance(job, type) else type(job)
    state = {} if isinstance(job, type) else dict(vars(job))
    home = (cls.__module__, cls.__qualname__)
    if home == FOLDER_JOB[1:3]:
        return f"{FOLDER}{cls.folder if job is cls else state['folder']}", _options_of(job, state)
    for name, built_in in BUILT_IN.items():
        if home == built_in[1:3]:
            return name, _options_of(job, state)
    try:
        file = inspect.getfile(cls)
    except (TypeError, OSError):
        file = ""
    if not file.endswith(".py") or "<locals>" in cls.__qualname__:
        raise WrongUse(
            f"job {cls.__qualname__}",
            found="it is not defined at the top of a file, where another process could find it",
            cure="Put the class into a .py file of its own.",
        )
    return f"{file}:{cls.__qualname__}", state


def file_of(name: str) -> Path | None:
    """The file that a job which load() found is written in; None for one that comes with trimtab.

    >>> file_of("slm:tiny") is None, file_of("hf:models/bert").name
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


def _options_of(job: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Of what an instance of ours holds, what a user may have set."""
    known = options(job)
    return {name: value for name, value in state.items() if name in known and name != "folder"}


def _built(found: Any, name: str) -> Any:
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as error:
        raise failed(f"job {name!r}", error, "Let the class be built without arguments.") from error


def checked(job: Any, name: str) -> Any:
    """The job, if it has the members that a job needs and a batch that can be."""
    # embed() and loss_of() together take the place of loss().
    required = [one for one in REQUIRED if one != "loss" or not is_cached(job)]
    lacking = [one for one in required if not callable(getattr(job, one, None))]
    lacking += [one for one in required if getattr(type(job), one, None) is getattr(Job, one)]
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
            found=f"it lacks {', '.join(f'{one}()' for one in lacking)}",
            cure="A job has model(), batch(size) and loss(model, batch).",
        )
    return job


def _is_job(value: Any) -> bool:
    needed = ("model", "batch") if is_cached(value) else REQUIRED
    return isinstance(value, type) and all(callable(getattr(value, one, None)) for one in needed)


def _module(place: str) -> Any:
    path = Path(place)
    if path.suffix != ".py" and "/" not in place:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise _missing(place, error) from error
        except Exception as error:
            raise failed(f"job {place}", error, "Mend the module, or run it alone to see more.") from error
    if not path.is_file():
        raise WrongUse(f"job {place}", found="there is no such file", cure=_FORMS)
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
        raise _missing(place, error) from error
    except Exception as error:
        raise failed(f"job {place}", error, "Mend the file, or run it alone to see more.") from error
    return module


def _missing(place: str, error: ModuleNotFoundError) -> JobFailed:
    return JobFailed(
        f"job {place}",
        found=f"it needs the package {error.name!r}, which is not installed here{_where(error, place)}",
        cure=f"Install it: pip install {error.name}",
    )


def failed(given: str, error: Exception, cure: str) -> TrimtabError:
    """An error of the user's own code, with the line it came from."""
    if isinstance(error, TrimtabError):
        return error
    text = str(error).strip().split("\n")[0][:300] or "no message"
    return JobFailed(given, found=f"{type(error).__name__}: {text}{_where(error)}", cure=cure)


OPERATION = "_trimtab_operation"
"""The attribute of an error that was raised while an operation was traced: the operation's name."""


def cannot_follow(member: str, error: Exception, cure: str) -> TrimtabError:
    """An error of tracing, with the operation that it came from and the line of the job."""
    if isinstance(error, TrimtabError):
        return error
    text = str(error).strip().split("\n")[0][:200] or "no message"
    found = f"trimtab cannot follow {_operation(error)} here{_where(error)}; {type(error).__name__}: {text}"
    return CannotFollow(member, found=found, cure=cure)


def _operation(error: Exception) -> str:
    """The operation that tracing failed at, as well as it is known."""
    known = getattr(error, OPERATION, None)
    named = re.search(r"\b(?:aten|prims|torchvision|transformers)::\w+(?:\.\w+)?", str(error))
    if known or named:
        return str(known or (named and named[0]))
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name}()" if frames else "an operation"


def _where(error: BaseException, place: str = "") -> str:
    """The user's line nearest to where it went wrong: the last one outside of installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    mine = str(Path(__file__).parent.parent)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((mine, "<")) and "site-packages" not in frame.filename
        and "importlib" not in frame.filename
    ]  # fmt: skip
    if not own:
        return f" ({place})" if place else ""
    return f" ({own[-1].filename}, line {own[-1].lineno})"
