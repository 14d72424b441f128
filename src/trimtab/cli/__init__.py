"""The command line: one command a verb, thin over `trimtab.api`.

`run` is what the program `trimtab` starts. It loads nothing before it can answer to Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

INTERRUPTED = 130
"""What shells give a program that Ctrl-C ended."""


def run() -> NoReturn:
    """Run the program and leave with the exit code that says how it went."""
    try:
        from trimtab.cli.main import main_code

        code = main_code()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        # A second Ctrl-C has nothing left to interrupt.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
