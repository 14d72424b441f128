from __future__ import annotations

import pickle

import pytest

from trimtab import errors
from trimtab.errors import (
    BrokenFile,
    CannotFollow,
    EnvironmentFault,
    JobFailed,
    NothingFits,
    TrimtabError,
    UnknownName,
    WrongUse,
    find_nearest,
)

CODES = {
    TrimtabError: 1,
    WrongUse: 2,
    UnknownName: 2,
    BrokenFile: 2,
    NothingFits: 3,
    JobFailed: 4,
    CannotFollow: 1,
    EnvironmentFault: 5,
}


def test_each_error_has_the_exit_code_of_the_contract() -> None:
    assert {cls: cls.exit_code for cls in CODES} == CODES


def test_no_error_class_is_missing_from_the_table_above() -> None:
    defined = {
        var for var in vars(errors).values() if isinstance(var, type) and issubclass(var, TrimtabError)
    }
    assert defined == set(CODES)


@pytest.mark.parametrize("cls", CODES)
def test_an_error_says_what_was_given_what_was_found_and_what_to_do(cls: type[TrimtabError]) -> None:
    error = cls("--on 0xH100", found="the count is 0", cure="Ask for one.")
    assert str(error) == "--on 0xH100: the count is 0. Ask for one."


@pytest.mark.parametrize("cls", CODES)
def test_an_error_crosses_a_process_boundary(cls: type[TrimtabError]) -> None:
    error = cls("given", found="found", cure="cure")
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(back), str(back)) == (cls, str(error))


def test_wrong_use_can_be_caught_as_a_value_error() -> None:
    with pytest.raises(ValueError, match="given: found"):
        raise WrongUse("given", found="found", cure="cure")


def test_nearest_names_come_best_first_in_their_own_spelling() -> None:
    assert find_nearest("h10", ["H100", "A10", "T4"])[0] == "H100"
    assert find_nearest("banana", ["H100", "A10"]) == []
