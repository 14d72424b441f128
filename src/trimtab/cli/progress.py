"""Show on stderr how far a long command is: a status line on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from trimtab.cli.console import show_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "TRIMTAB_PROGRESS"
"""Environment variable: 0 shows no progress."""
FIRST_S = 2.0
"""What takes less time shows no lines in a log."""
EVERY_S = 5.0


class ProgressState:
    """What a command is doing, and the best that it has found."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.doing = ""
        self.best = ""
        self.began = time.monotonic()
        self.changed: Callable[[], None] = lambda: None
        """Called after each change."""

    def say(self, what: str) -> None:
        """Note what is being done now."""
        self.doing = what
        self.changed()

    def found(self, what: str) -> None:
        """Note the best so far."""
        self.best = what
        self.changed()

    def words(self, separator: str = "; ") -> str:
        """Return the state in words."""
        doing = f": {self.doing}" if self.doing else ""
        best = f"{separator}best so far: {self.best}" if self.best else ""
        return f"{self.title}{doing}{best}"

    def line(self) -> str:
        """Return the state as a line of a log."""
        return f"trimtab: {time.monotonic() - self.began:.0f} s, {self.words()}\n"


@contextlib.contextmanager
def progress(title: str) -> Iterator[ProgressState]:
    """Show the progress of what runs inside."""
    state = ProgressState(title)
    if os.environ.get(VARIABLE) == "0" or sys.stderr is None:
        yield state
    elif sys.stderr.isatty():
        with show_status(title) as show:
            state.changed = lambda: show(state.words("\n  "))
            yield state
    else:
        with _lines(state):
            yield state


@contextlib.contextmanager
def _lines(state: ProgressState) -> Iterator[None]:
    """Write a line after two seconds, one every five from then on, and one as soon as there is a best."""
    is_done, wakes = False, threading.Event()

    def write() -> None:
        wakes.wait(FIRST_S)
        while not is_done:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(state.line())
                sys.stderr.flush()
            if state.best:
                state.changed = lambda: None
            wakes.clear()
            # The end may have come just before the flag was cleared.
            wakes.wait(0 if is_done else EVERY_S)

    def wake() -> None:
        if state.best and time.monotonic() > state.began + FIRST_S:
            wakes.set()

    state.changed = wake
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        is_done = True
        wakes.set()
        writer.join()
