"""Complete job names, device names and words in the shell; `trimtab --install-completion` turns it on."""

from __future__ import annotations

import re


def complete_devices(incomplete: str) -> list[str]:
    """Return clusters that begin with what was typed: 4xH1 becomes 4xH100 and so on.

    >>> complete_devices("2x8xMI325"), complete_devices("T4+2xMI300X-")
    (['2x8xMI325X', '2x8xMI325X-256GB'], ['T4+2xMI300X-192GB'])
    """
    from trimtab.catalog.tables import devices

    match = re.fullmatch(r"((?:.*\+)?(?:\d+x)*)(.*)", incomplete)
    before, typed = match.groups() if match else ("", incomplete)
    names = (name for row in devices() for name in row.typed if " " not in name)
    return [f"{before}{name}" for name in dict.fromkeys(names) if name.startswith(typed)]


def complete_jobs(incomplete: str) -> list[str]:
    """Return built-in jobs that begin with what was typed; the shell completes files if there is none.

    >>> complete_jobs("sl")
    ['slm', 'slm:tiny']
    """
    from trimtab.jobs.registry import BUILT_IN, FOLDER

    names = [FOLDER, *(name for base in BUILT_IN for name in (base, f"{base}:tiny"))]
    return [name for name in names if name.startswith(incomplete)]


def complete_words(incomplete: str) -> list[str]:
    """Return the words of `trimtab explain` that begin with what was typed.

    >>> complete_words("hsd")
    ['hsdp']
    """
    from trimtab import api

    return sorted(word for word in api.all_words() if word.startswith(incomplete))


def complete_commands(incomplete: str) -> list[str]:
    """Return the commands of trimtab that begin with what was typed.

    >>> complete_commands("la")
    ['layouts', 'launch']
    """
    from trimtab.cli.main import COMMANDS

    return [name for name in COMMANDS if name.startswith(incomplete)]


COMPLETIONS = {"DEVICES": complete_devices, "JOB": complete_jobs}
"""For each placeholder of an option or argument the function that completes it."""
