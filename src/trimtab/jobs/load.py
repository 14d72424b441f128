"""Finds a job by name: FILE.py:NAME or package.module:NAME. A file is run only because the user named it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from trimtab.errors import JobFailed, TrimtabError, UnknownName, WrongUse, nearest
from trimtab.jobs.job import Job

REQUIRED = ("model", "batch", "loss")
_FORMS = "Name a job as FILE.py:NAME or package.module:NAME."


def load(name: str) -> Any:
    """The job of that name, built; raises what is wrong with it."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise WrongUse(f"job {name!r}", found="it has no FILE.py:NAME form", cure=_FORMS)
    module = _module(place)
    found = getattr(module, attribute, None)
    if found is None:
        known = [one for one, value in vars(module).items() if _is_job(value)]
        close = nearest(attribute, known) or known
        listed = f"; it has {', '.join(close)}" if close else ""
        raise UnknownName(f"job {name!r}", found=f"{place} has no {attribute}{listed}", cure=_FORMS)
    return checked(_built(found, name), name)


def _built(found: Any, name: str) -> Any:
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as error:
        raise failed(f"job {name!r}", error, "Let the class be built without arguments.") from error


def checked(job: Any, name: str) -> Any:
    """The job, if it has the members that a job needs and a batch that can be."""
    lacking = [one for one in REQUIRED if not callable(getattr(job, one, None))]
    lacking += [one for one in REQUIRED if getattr(type(job), one, None) is getattr(Job, one)]
    if lacking:
        raise JobFailed(
            f"job {name!r}",
            found=f"it lacks {', '.join(f'{one}()' for one in lacking)}",
            cure="A job has model(), batch(size) and loss(model, batch).",
        )
    return job


def _is_job(value: Any) -> bool:
    return isinstance(value, type) and all(callable(getattr(value, one, None)) for one in REQUIRED)


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


def _where(error: BaseException, place: str = "") -> str:
    """The user's line nearest to where it went wrong: the last one outside of installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    mine = str(Path(__file__).parent.parent)
    own = [
        one
        for one in frames
        if not one.filename.startswith((mine, "<")) and "site-packages" not in one.filename
        and "importlib" not in one.filename
    ]  # fmt: skip
    if not own:
        return f" ({place})" if place else ""
    return f" ({own[-1].filename}, line {own[-1].lineno})"
