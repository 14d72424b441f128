"""Finds a device by what drivers report and by what people type, and never guesses.

Names are compared whole, after case, vendor words and punctuation are dropped: an A10 is not the
beginning of an A100, and an RTX 4090 Laptop GPU is not an RTX 4090.
"""

from __future__ import annotations

import re
from functools import cache

from trimtab.catalog.tables import DeviceRow, ambiguous, devices
from trimtab.errors import UnknownName, WrongUse, nearest, shortened

_VENDOR_WORDS = re.compile(r"\b(nvidia|geforce|tesla|quadro|amd|instinct|radeon|generation)\b|\(tm\)|\(r\)")
_PUNCTUATION = re.compile(r"[^a-z0-9]")
# A size stands on its own: the G of "A100-40G" is a unit, the G of "A10G" is not.
_SIZE_SUFFIX = re.compile(r"(?<![a-z0-9])(\d+)\s*(gib|gb|g)(?![a-z0-9])")
# 1g.5gb, 3g.20gb, 1g.10gb+me: how NVIDIA names the parts of a GPU.
_SLICE = re.compile(r"(?<![a-z0-9])(mig(?![a-z0-9])|[1-7]g\.\d+gb)", re.IGNORECASE)
_COUNT_LAST = re.compile(r"(.+?)\s*[xX*]\s*(\d+)")


def plain_name(name: str) -> str:
    """What is left of a name when case, vendor and punctuation are dropped.

    >>> plain_name("NVIDIA A100-SXM4-40GB"), plain_name("a100 sxm4 40g"), plain_name("rtx-4090")
    ('a100sxm440', 'a100sxm440', 'rtx4090')
    """
    lower = name.lower().replace("_", "-")
    lower = _SIZE_SUFFIX.sub(r"\1", lower)
    return _PUNCTUATION.sub("", _VENDOR_WORDS.sub(" ", lower))


@cache
def _by_driver() -> dict[str, DeviceRow]:
    return {plain_name(driver): row for row in devices() for driver in row.drivers}


@cache
def _by_typed() -> dict[str, tuple[DeviceRow, str]]:
    """Plain name to the row and the note that goes with that spelling, driver names included."""
    found = {plain_name(typed): (row, row.taken.get(typed, "")) for row in devices() for typed in row.typed}
    for driver, row in _by_driver().items():
        # "Quadro RTX 6000" and "RTX 6000" have one plain name; the typed one carries the note.
        found.setdefault(driver, (row, ""))
    for row in devices():
        # What plans and tables call it can be typed too.
        found.setdefault(plain_name(row.name), (row, ""))
    return found


def reported(name: str) -> DeviceRow | None:
    """The row of a device by the name its driver reports; None for a device not in the catalogue."""
    return _by_driver().get(plain_name(name))


def typed(name: str, *, given: str = "") -> tuple[DeviceRow, str]:
    """The row of a device by what a person typed, and a note on what was taken where a choice was open.

    >>> typed("4090")[0].name
    'GeForce RTX 4090'
    >>> typed("RTX 6000")[1][:31]
    'RTX 6000 is the Turing card of '
    """
    plain = plain_name(name)
    if found := _by_typed().get(plain):
        row, note = found
        # The full driver name leaves no choice open.
        return row, "" if name in row.drivers else note
    given = given or f"device {name!r}"
    for one in ambiguous():
        if plain == plain_name(one.typed):
            raise WrongUse(
                given,
                found=f"{one.typed} comes in {len(one.choices)} sizes: {', '.join(one.choices)}",
                cure=f"Say which, as in {one.choices[0]}.",
            )
    backwards = _COUNT_LAST.fullmatch(name)
    if backwards and plain_name(backwards.group(1)) in _by_typed():
        raise WrongUse(
            given,
            found="the count stands after the name",
            cure=f"Write {backwards.group(2)}x{backwards.group(1)}.",
        )
    if _SLICE.search(name):
        raise WrongUse(
            given,
            found="a MIG slice has no name of its own here: what it gets depends on how its GPU was cut",
            cure="Ask the machine that has it: trimtab detect --json > FILE, then --on FILE.",
        )
    raise _unknown(name, given)


def _unknown(name: str, given: str) -> UnknownName:
    known = [row.typed[0] for row in devices()]
    close = nearest(name, known) or nearest(plain_name(name), known)
    listing = "`trimtab detect --list` shows every name."
    if not close:
        return UnknownName(given, found=f"no device is called {shortened(name)!r}", cure=listing)
    return UnknownName(
        given,
        found=f"no device is called {shortened(name)!r}; the nearest are {', '.join(close)}",
        cure=f"Use one of those; {listing}",
    )
