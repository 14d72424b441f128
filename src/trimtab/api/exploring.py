"""The function `explore`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.spec.requests import ExploreRequest, accepts

if TYPE_CHECKING:
    from trimtab.calculator.server import ExploreServer

MAX_PORT = 65535


@accepts(ExploreRequest)
def explore(request: ExploreRequest) -> None:
    """Serve a page that estimates configurations of a job, until Ctrl-C; the address is printed.

    trimtab.explore("job.py:MyJob", "4xA100-40GB")
    """
    server = open_explorer(request)
    print(server.url)  # noqa: T201 - a person has to open it
    run_explorer(server, browser=request.browser)


def open_explorer(request: ExploreRequest) -> ExploreServer:
    """Read the job and open the port; raise if one of them cannot be."""
    from trimtab.calculator.explorer import Explorer
    from trimtab.calculator.server import ExploreServer

    if request.port > MAX_PORT:
        raise WrongUse(
            f"--port {request.port}",
            found=f"ports are 0 to {MAX_PORT}",
            cure="Leave --port out for any free port, or give another.",
        )
    explorer = Explorer(request)
    try:
        return ExploreServer(explorer, request.port)
    except BaseException:
        explorer.close()
        raise


def run_explorer(server: ExploreServer, *, browser: bool) -> None:
    """Serve until Ctrl-C; then end the background work and close the port."""
    if browser and can_show_browser():
        import threading
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        server.explorer.close()


def can_show_browser() -> bool:
    """Return whether a browser with windows can be opened here; one in the terminal would take it over."""
    import os
    import sys

    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform != "linux" or any(os.environ.get(name) for name in names)
