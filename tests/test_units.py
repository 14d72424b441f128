from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab import errors, units
from trimtab.errors import WrongUse


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5TiB", 3 * 2**39),
        (".5MiB", 2**19),
        (" 7KiB ", 7168),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), (" 12\n", 12), ("", None), ("-1", None), ("1.0", None), ("\u00b2", None), ("9" * 19, None)],
)
def test_whole_numbers_are_plain_digits(text: str, number: int | None) -> None:
    assert units.parse_whole(text) == number


def test_a_gb_is_not_a_gib() -> None:
    assert units.parse_bytes("80GB") != units.parse_bytes("80GiB")
    assert units.format_bytes(units.parse_bytes("80GB")) == "74.5 GiB"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "not a size"),
        ("GB", "not a size"),
        ("-1GB", "not a size"),
        ("1e9", "not a size"),
        ("24X", "X is not a unit"),
        ("24G", "G may mean GB .* or GiB"),
        ("nan", "not a size"),
    ],
)
def test_a_size_that_is_none_is_refused_with_a_cure(text: str, found: str) -> None:
    with pytest.raises(WrongUse, match=found) as caught:
        units.parse_bytes(text)
    assert "Write" in caught.value.cure


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12h", 43200), ("90m", 5400), ("1d6h", 108000), ("45s", 45), ("1.5h", 5400), ("1D 6H", 108000)],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "not a duration"),
        ("12", "no unit"),
        ("h", "not a duration"),
        ("6h1d", "not a duration"),
        ("-1h", "not a duration"),
        ("0h", "no time at all"),
        ("soon", "not a duration"),
    ],
)
def test_a_duration_that_is_none_is_refused(text: str, found: str) -> None:
    with pytest.raises(WrongUse, match=found):
        units.parse_duration(text)


@given(st.integers(min_value=1, max_value=10**7))
def test_a_printed_duration_reads_back_within_what_it_shows(seconds: int) -> None:
    back = units.parse_duration(units.format_duration(seconds))
    assert abs(back - seconds) <= max(1, 0.05 * seconds)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_printed_size_reads_back_within_its_digits(count: int) -> None:
    back = units.parse_bytes(units.format_bytes(count, digits=3))
    assert back == pytest.approx(count, rel=1e-3, abs=1)


@given(st.integers(min_value=1, max_value=2**60))
def test_no_printed_size_reaches_1024_of_its_unit(count: int) -> None:
    number, unit = units.format_bytes(count).split()
    assert unit == "TiB" or float(number) < 1024


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_no_duration_is_printed_for_what_is_none(seconds: float) -> None:
    with pytest.raises(ValueError, match="from 0 up"):
        units.format_duration(seconds)


@pytest.mark.parametrize("module", [units, errors])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
