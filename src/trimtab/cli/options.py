"""Build the flags of a command from its request, and the request from what was typed."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer

from trimtab.cli.completion import COMPLETIONS
from trimtab.cli.console import ScriptWords, say
from trimtab.errors import WrongUse
from trimtab.jobs.load import expand_stage
from trimtab.jobs.registry import FOLDER, JobFlag, base_name, job_flags
from trimtab.spec.requests import CommandOption, CommandRequest, list_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trimtab.configs.knobs import KnobSettings
    from trimtab.spec import Cluster

RequestType = TypeVar("RequestType", bound=CommandRequest)
JOB_FIELDS = ("job", "plan_or_job")
"""Fields that name the job whose attributes --set sets."""

# Options of the command line alone.
Stages = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Plan or train every stage of the job's curriculum: the stages in a folder, or `default` for "
        "the job's own.",
    ),
]
Knobs = Annotated[
    list[str] | None,
    typer.Option(
        "--knob",
        metavar="NAME=VALUE",
        help="Setting under the name that other trainers use: batch_size=12, max_length=1024. Can be "
        "repeated.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE[:PATH]", help="Config file with settings under such names: config.py:slm_config."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")]


def command(request: type[RequestType]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of its request; its own keyword parameters come after them.

    The decorated function gets the request as its first argument.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @functools.wraps(function)
        def run(**typed: Any) -> None:
            rest = {parameter.name: typed.pop(parameter.name) for parameter in own}
            function(make_request(request, typed), **rest)

        flags = [flag for name, option in list_options(request).items() for flag in _parameters(name, option)]
        # Typer must not look at the annotations of the wrapped function.
        del run.__wrapped__
        vars(run)["__signature__"] = inspect.Signature([*flags, *own])
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*flags, *own)}
        return run

    return decorate


def _parameters(name: str, option: CommandOption) -> Iterator[inspect.Parameter]:
    """Yield the parameters of the command line that give a field its value."""
    kind = _kind(option)
    default = False if kind is bool else option.default
    if option.many or default is inspect.Parameter.empty or default == ():
        default = None
    if option.switches:
        yield from (_flag(value, bool, False, help=text) for value, text in option.switches.items())
    elif option.argument:
        required = option.required and option.default is inspect.Parameter.empty
        default = inspect.Parameter.empty if required else None
        complete = COMPLETIONS.get(option.metavar or "")
        info = typer.Argument(metavar=option.metavar, help=option.help, autocompletion=complete)
        yield _parameter(name, kind, default, info)
    elif option.flag is not None:
        names = (option.flag, option.short) if option.short else (option.flag,)
        limits = {"metavar": option.metavar, "min": option.minimum, "help": option.help}
        complete = COMPLETIONS.get(option.metavar or "")
        yield _flag(name, kind, default, *names, **limits, autocompletion=complete)
    for flag in flags_of(option):
        off = False if flag.type is bool else None
        yield _flag(flag.name, flag.type, off, metavar=flag.metavar, help=flag.help)


def flags_of(option: CommandOption) -> tuple[JobFlag, ...]:
    """Return the flags of jobs that come with an option."""
    return job_flags(training=option.job_flags == "train") if option.job_flags else ()


def _flag(name: str, kind: Any, default: Any, *names: str, **info: Any) -> inspect.Parameter:
    # A flag that is spelled out keeps typer from adding --no-FLAG to a boolean.
    return _parameter(name, kind, default, typer.Option(*(names or (f"--{name}",)), **info))


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    kind = kind | None if default is None else kind
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _kind(option: CommandOption) -> Any:
    """Return the type that the command line reads: a list of texts, or the simplest type of the field."""
    if option.many:
        return list[str]
    hint = get_args(option.type)[0]
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return next((kind for kind in (str, bool, int, float) if kind in kinds), str)


def make_request(request: type[RequestType], typed: Mapping[str, Any]) -> RequestType:
    """Return the request for what was typed."""
    values: dict[str, Any] = {}
    job = next((typed[name] for name in JOB_FIELDS if typed.get(name)), "")
    for name, option in list_options(request).items():
        if option.switches:
            values[name] = _switched(typed, option.switches) or option.default
        elif name == "command":
            # After a plan or a job, the words behind -- are further options of its training.
            values[name] = () if job and "extra" in typed else _script_words(job)
        elif option.flag is None:
            continue
        elif name == "options":
            flags = {flag: typed[flag.name] for flag in flags_of(option)}
            values[name] = job_options(job, typed[name], flags)
        elif option.flag.startswith("--no-"):
            values[name] = not typed[name]
        elif typed[name] is None or typed[name] == []:
            values[name] = None if option.default is inspect.Parameter.empty else option.default
        else:
            value = option.parse(typed[name]) if option.parse else typed[name]
            values[name] = tuple(value) if option.many else value
    if job and "extra" in values:
        values["extra"] = (*(values["extra"] or ()), *(ScriptWords.typed or ()))
    return request(**values)


def _script_words(job: str) -> tuple[str, ...]:
    """Return the training command that was typed; raise if there is neither a job nor a command, or both."""
    words = ScriptWords.typed
    if words is None:
        if not job:
            raise WrongUse(
                "the command line",
                found="it names neither a job nor a training command",
                cure="Name a job, as FILE.py:NAME, or give a command after --, as in -- python train.py.",
            )
        return ()
    if job:
        raise WrongUse(
            f"{job} and the command {' '.join(words)}",
            found="a job and a training command were given",
            cure="Give one of them.",
        )
    if not words:
        raise WrongUse(
            "--", found="no command follows it", cure="Write it as you type it: -- python train.py --lr 1e-4."
        )
    return words


def _switched(typed: Mapping[str, Any], switches: Mapping[str, str]) -> str:
    chosen = [value for value in switches if typed[value]]
    if len(chosen) > 1:
        raise WrongUse(
            " ".join(f"--{value}" for value in chosen),
            found="a launch is for one of them",
            cure="Give one; without any, torchrun starts it on this machine.",
        )
    return chosen[0] if chosen else ""


def job_options(
    job: str, settings: list[str] | None, flags: Mapping[JobFlag, Any] | None = None
) -> dict[str, Any]:
    """Return what --set and a job's own flags set on it, by attribute.

    >>> job_options("slm", ["layers=24"])
    {'layers': '24'}
    >>> (DATA,) = (flag for flag in job_flags(training=True) if flag.name == "data")
    >>> job_options("slm:tiny", None, {DATA: "/tmp/words.txt"})
    {'data': '/tmp/words.txt'}
    """
    options: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise WrongUse(
                f"--set {setting}", found="it is not NAME=VALUE", cure="Write it as --set layers=24."
            )
        if name in options:
            raise WrongUse(f"--set {setting}", found=f"{name} is also {options[name]}", cure="Give it once.")
        options[name] = value
    for flag, value in (flags or {}).items():
        if value is None or value is False:
            continue
        text = f"--{flag.name}" if value is True else f"--{flag.name} {value}"
        if base_name(job) not in flag.jobs:
            jobs = " and ".join(f"{name}FOLDER" if name == FOLDER else name for name in flag.jobs)
            raise WrongUse(
                text,
                found=f"it shapes {jobs}, and the job is {job}",
                cure="Set an attribute that the job has with --set NAME=VALUE, or leave it out.",
            )
        if flag.attribute in options:
            raise WrongUse(text, found=f"--set {flag.attribute} is given too", cure="Give one of them.")
        # A run may be started from another folder than the one where it was planned.
        absolute = isinstance(value, Path) or (flag.may_be_file and Path(value).expanduser().is_file())
        options[flag.attribute] = str(Path(value).expanduser().absolute()) if absolute else value
    return expand_stage(job, options)


def state_devices(request: RequestType) -> RequestType:
    """Return the request with --on and --network as one cluster; without --network, as it is."""
    asked: Any = request
    if asked.network is None:
        return request
    from trimtab import api

    cluster = api.cluster(asked.on, network=asked.network)
    if len(cluster.nodes) == 1:
        say(cluster.notes[-1])
    return request.replace(on=cluster, network=None)


def stage_folder(stages: str) -> str | None:
    """Return the folder of the stages; None for the job's own.

    >>> stage_folder("default"), stage_folder("conf")
    (None, 'conf')
    """
    return None if stages == "default" else stages


def add_knobs(
    request: RequestType,
    knobs: list[str] | None,
    config: str | None,
    *,
    where: Cluster | None,
    ranks: int | None = None,
) -> tuple[RequestType, KnobSettings]:
    """Return the request with what --knob and --config set, and all that they set.

    Says on stderr what they meant. What the request has already is refused, so that nothing is set twice.
    """
    from trimtab import api
    from trimtab.planner.pins import split_pins

    asked: Any = request
    wired = api.turn_knobs(
        asked.job,
        knobs or [],
        config=config,
        options=asked.options,
        pins=asked.pins,
        where=where,
        ranks=ranks,
    )
    options = list_options(type(request))
    fields = {name: value for name, value in wired.train.items() if name in options}
    for name in fields:
        if getattr(request, name) is not None:
            raise WrongUse(
                f"knob {wired.by[name]}",
                found=f"{options[name].flag} {getattr(request, name)} is given too",
                cure="Leave one out.",
            )
    for line in wired.said:
        say(line)
    pins = dict(pin.partition("=")[::2] for pin in split_pins(asked.pins))
    pins = {key.strip(): value.strip() for key, value in pins.items()} | wired.pins
    return request.replace(options=asked.options | wired.options, pins=pins, **fields), wired
