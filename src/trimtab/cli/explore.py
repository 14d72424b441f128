"""The command `trimtab explore`."""

from __future__ import annotations

import signal
import sys
from typing import Any

from trimtab.api.exploring import can_show_browser, open_explorer, run_explorer
from trimtab.cli.console import Json, print_json, say
from trimtab.cli.options import command
from trimtab.cli.progress import progress
from trimtab.spec import ExploreOutput
from trimtab.spec.requests import ExploreRequest


@command(ExploreRequest)
def explore(request: ExploreRequest, *, json: Json = False) -> None:
    """Try configurations of a job on a page in your browser.

    The page is served on 127.0.0.1 until Ctrl-C, under an address with a token. It shows memory, step time,
    tokens/s, hours and cost of what you choose. Nothing is fetched from the network. The job's code takes a
    few steps on tensors without memory.
    """
    signal.signal(signal.SIGTERM, _stop)
    with progress("preparing the page") as shown:
        server = open_explorer(request.replace(say=shown.say))
    if json:
        print_json(ExploreOutput(url=server.url, port=server.server_port).to_builtins())
    else:
        print(server.url)  # noqa: T201 - one line that can be copied whole, however narrow the terminal is
    if request.browser and not can_show_browser():
        say("there is no screen here: open the address in a browser. From another machine, first run")
        say(f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} THIS_MACHINE")
    say("Ctrl-C ends it")
    sys.stdout.flush()
    run_explorer(server, browser=request.browser)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt
