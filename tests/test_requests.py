"""Every option is defined once, and the command line, Python and JSON have it."""

from __future__ import annotations

import doctest
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import typer
from typer.testing import CliRunner

import trimtab
from trimtab import api
from trimtab.cli import options as cli_options
from trimtab.cli.main import app, load_command
from trimtab.errors import WrongUse
from trimtab.spec import requests
from trimtab.spec.requests import (
    ApplyRequest,
    CommandRequest,
    EstimateRequest,
    ExploreRequest,
    LaunchRequest,
    MaxRequest,
    PlanRequest,
    PlanStagesRequest,
    ProfileRequest,
    ShowRequest,
    TrainRequest,
    TrainStagesRequest,
    list_options,
)

COMMANDS: dict[str, type[CommandRequest]] = {
    "apply": ApplyRequest,
    "estimate": EstimateRequest,
    "explore": ExploreRequest,
    "launch": LaunchRequest,
    "max": MaxRequest,
    "plan": PlanRequest,
    "show": ShowRequest,
    "train": TrainRequest,
}
FUNCTIONS = COMMANDS | {"plan_stages": PlanStagesRequest, "train_stages": TrainStagesRequest}
HOOKS = {"say", "say_best", "partial"}
"""Arguments for Python callers that are no options."""


def flags(command: str) -> dict[str, Any]:
    return {name: param for param in load_command(command).params for name in (*param.opts, param.name)}


def test_the_examples_are_true() -> None:
    for module in (requests, cli_options):
        done = doctest.testmod(module)
        assert done.attempted
        assert not done.failed


@pytest.mark.parametrize("command", [*COMMANDS, "profile"])
def test_every_option_of_a_request_is_a_flag_with_its_help(command: str) -> None:
    request: type[CommandRequest] = (COMMANDS | {"profile": ProfileRequest})[command]
    known = flags(command)
    for name, option in list_options(request).items():
        if option.switches:
            for value, text in option.switches.items():
                assert known[f"--{value}"].help == text
        elif option.flag is not None:
            assert known[name if option.argument else option.flag].help == option.help
        for flag in cli_options.flags_of(option):
            assert known[f"--{flag.name}"].help == flag.help


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_field_of_a_request_is_an_argument(name: str) -> None:
    request = FUNCTIONS[name]
    parameters = inspect.signature(getattr(trimtab, name)).parameters
    assert tuple(parameters) == request.__struct_fields__
    assert set(parameters) - set(list_options(request)) <= HOOKS
    defaults = {name: option.default for name, option in list_options(request).items()}
    assert defaults == {name: parameters[name].default for name in defaults}


@pytest.mark.parametrize("request_class", [*FUNCTIONS.values(), ProfileRequest])
def test_every_option_of_a_request_is_in_its_json(request_class: type[CommandRequest]) -> None:
    schema = request_class.schema()
    fields = schema["$defs"][request_class.__name__]["properties"]
    assert set(fields) == set(list_options(request_class))
    for name, option in list_options(request_class).items():
        assert fields[name]["description"] == option.help


def test_help_texts_are_sentences_that_stand_alone() -> None:
    for request in (*FUNCTIONS.values(), ProfileRequest):
        for option in list_options(request).values():
            for text in (
                option.help,
                *option.switches.values(),
                *(flag.help for flag in cli_options.flags_of(option)),
            ):
                assert text.endswith("."), text
                assert text.split()[0] not in {"Of", "That", "For", "Which", "Where"}, text


def test_a_request_is_the_same_after_json() -> None:
    request = PlanRequest("slm", "2xH100", compare=(1, 2), pins=("gpus=2",), options={"layers": 2})
    assert PlanRequest.from_json(request.to_json()) == request
    run = TrainRequest("slm", out=Path("runs/first"), faults=Path("faults.json"))
    assert json.loads(run.to_json())["out"] == "runs/first"
    where = trimtab.cluster("2xH100")
    assert PlanRequest.from_json(PlanRequest("slm", where).to_json()).on == where
    with pytest.raises(msgspec.ValidationError, match="say"):
        PlanRequest.from_json('{"job": "slm", "say": "hello"}')
    with pytest.raises(TypeError, match="by name"):
        PlanRequest(object()).to_json()


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("plan", "globl_batch", "global_batch"),
        ("estimate", "microbatch", "micro_batch"),
        ("train", "checkpoint_step", "checkpoint_steps"),
        ("launch", "partitoin", "partition"),
    ],
)
def test_a_wrong_argument_gets_a_suggestion_on_both_faces(name: str, given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.. has no argument {given!r}; did you mean {meant!r}?"):
        getattr(trimtab, name)("slm:tiny", **{given: 3})
    flag = list_options(COMMANDS[name])[meant].flag
    done = CliRunner().invoke(app, [name, "slm:tiny", f"{flag}z", "3"])
    assert done.exit_code == 2
    assert flag is not None
    assert flag in done.stderr


def test_a_missing_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="job"):
        trimtab.plan()


make_request = cli_options.make_request


def typed(command: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the request that a command line makes; the command itself does not run."""
    made: list[Any] = []

    def stop(*args: Any) -> NoReturn:
        made.append(make_request(*args))
        raise SystemExit

    monkeypatch.setattr(cli_options, "make_request", stop)
    done = CliRunner().invoke(load_typer(command), list(words))
    assert made, done.output
    return made[0]


def load_typer(command: str) -> Any:
    single = typer.Typer()
    single.command()(getattr(import_module(f"trimtab.cli.{command}"), command))
    return single


def test_what_is_typed_becomes_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = typed(
        *("plan", "slm", "--on", "4xH100", "--compare", "1,2", "--pin", "gpus=2", "--pin", "compile=false"),
        *("--set", "layers=3", "--no-cache", "--memory", "0.8"),
        monkeypatch=monkeypatch,
    )
    assert plan == PlanRequest(
        "slm",
        "4xH100",
        compare=(1, 2),
        pins=("gpus=2", "compile=false"),
        options={"layers": "3"},
        cache=False,
        memory=0.8,
    )
    train = typed(
        *("train", "hf:models/x", "--checkpoint-minutes", "2", "--evaluate-every", "5", "--lora", "8"),
        *("--plan", "plan.json", "--data", "words.txt"),
        monkeypatch=monkeypatch,
    )
    data = str(Path("words.txt").absolute())
    assert train == TrainRequest(
        "hf:models/x",
        Path("plan.json"),
        checkpoint_s=120.0,
        evaluate_steps=5,
        options={"lora": 8, "data": data},
    )
    launch = typed(
        *("launch", "plan.json", "--slurm", "-y", "--account", "vision", "--", "--seed", "3"),
        monkeypatch=monkeypatch,
    )
    assert launch == LaunchRequest(
        "plan.json", kind="slurm", yes=True, account="vision", extra=("--seed", "3"), options={}
    )


def test_a_launch_is_of_one_kind() -> None:
    with pytest.raises(WrongUse, match="--slurm --sky"):
        cli_options.make_request(
            LaunchRequest, dict.fromkeys(flags("launch")) | {"slurm": True, "sky": True, "plan_or_job": "x"}
        )


def test_a_function_takes_its_request() -> None:
    request = EstimateRequest("slm:tiny", "H200", micro_batch=2)
    where, setting = api.requested_setting(request)
    assert (len(where.devices), setting.micro_batch) == (1, 2)
    with pytest.raises(WrongUse, match="--precision fp64"):
        trimtab.estimate(request.replace(precision="fp64"))
