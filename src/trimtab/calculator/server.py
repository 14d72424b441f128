"""Serve the page on 127.0.0.1 until it is stopped, under an address with a random token."""

from __future__ import annotations

import errno
import hmac
import secrets
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.calculator.choices import ExploreChoice
from trimtab.calculator.plans import ConfigQuestion
from trimtab.errors import EnvironmentFault
from trimtab.pages.page import make_policy, read_asset
from trimtab.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.calculator.explorer import Explorer

HOST = "127.0.0.1"
LARGEST_BODY = 64 * 1024
HTML, CSS, SCRIPT, JSON = "text/html", "text/css", "text/javascript", "application/json"
OWN_PAGE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY = f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; {OWN_PAGE}"
PLAN_PAGES = "plan/"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
OWN_ASSETS = {
    "": ("page.html", HTML),
    "explore.css": ("explore.css", CSS),
    "explore.js": ("explore.js", SCRIPT),
    "view.js": ("view.js", SCRIPT),
}
REPORT_ASSETS = {"style.css": CSS, "script.js": SCRIPT}
"""Shared with `trimtab report`."""


@cache
def read_own_asset(name: str) -> str:
    """Read a file of the page."""
    return files("trimtab.calculator").joinpath(name).read_text(encoding="utf-8")


class ExploreServer(ThreadingHTTPServer):
    """The page of one explorer, on 127.0.0.1 only."""

    daemon_threads = True

    def __init__(self, explorer: Explorer, port: int = 0) -> None:
        self.explorer = explorer
        self.token = secrets.token_urlsafe(24)
        self.routes: dict[str, Callable[[Any], dict[str, Any]]] = {
            "estimate": lambda body: explorer.answer(msgspec.convert(body, ExploreChoice)),
            "owners": lambda body: explorer.list_owners(msgspec.convert(body, ExploreChoice)),
            "plan": lambda body: explorer.open_plan(msgspec.convert(body, ExploreChoice)),
            "config": lambda body: explorer.change_config(msgspec.convert(body, ConfigQuestion)),
            "edge": lambda body: explorer.find_edge(msgspec.convert(body, ExploreChoice)),
        }
        try:
            super().__init__((HOST, port), ExploreHandler)
        except (OSError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            found = "another program uses it" if in_use else f"it cannot be opened ({error})"
            raise EnvironmentFault(
                f"--port {port}", found=found, cure="Leave --port out for any free port, or give another."
            ) from error

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class ExploreHandler(BaseHTTPRequestHandler):
    """Answers requests that have the token, for 127.0.0.1, from the page itself."""

    server: ExploreServer
    server_version = f"trimtab/{VERSION}"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30
    # Headers and body are two packets: the second must not wait until the browser confirms the first.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Send the page, its style, its scripts, or what can be chosen."""
        place = self._check()
        if place is None:
            return
        if place in OWN_ASSETS:
            name, kind = OWN_ASSETS[place]
            self._send(HTTPStatus.OK, read_own_asset(name), kind)
        elif place in REPORT_ASSETS:
            self._send(HTTPStatus.OK, read_asset(place), REPORT_ASSETS[place])
        elif place == "choices":
            self._send_json(HTTPStatus.OK, self.server.explorer.choices.describe())
        elif place.startswith(PLAN_PAGES) and (
            page := self.server.explorer.plans.read_page(place.removeprefix(PLAN_PAGES))
        ):
            self._send(HTTPStatus.OK, page, HTML, policy=f"{make_policy()}; {OWN_PAGE}")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        """Answer a question of the page."""
        place = self._check()
        if place is None:
            return
        body = self._read_body()
        if body is None:
            return
        if place not in self.server.routes:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such question")
            return
        try:
            answer = self.server.routes[place](msgspec.json.decode(body))
        except msgspec.DecodeError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._send_json(HTTPStatus.OK, answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the base class
        """Print nothing: the terminal shows the address only."""

    def _check(self) -> str | None:
        """Return what is asked for; None if the request is refused.

        A page of another site can send requests here, under a name of its own that resolves to 127.0.0.1.
        So the Host and the Origin have to be ours.
        """
        port = self.server.server_port
        hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        origin = self.headers.get("Origin")
        _, token, *rest = [*self.path.partition("?")[0].split("/", 2), ""][:3]
        is_ours = (
            self.headers.get("Host") in hosts
            and (origin is None or origin in {f"http://{host}" for host in hosts})
            and hmac.compare_digest(token.encode(), self.server.token.encode())
            and self.path.count("/") > 1
        )
        if not is_ours:
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that trimtab explore printed")
            return None
        return rest[0] if rest else ""

    def _read_body(self) -> bytes | None:
        """Return the body of a request; None if it is refused."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != JSON or not length.isdecimal():
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON with its length")
            return None
        if int(length) > LARGEST_BODY:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {LARGEST_BODY} bytes")
            return None
        return self.rfile.read(int(length))

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        # The body of the request was not read, so the connection cannot be used again.
        self.close_connection = True
        self._send_json(status, {"status": "refused", "error": {"found": why}})

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, msgspec.json.encode(value), JSON)

    def _send(self, status: HTTPStatus, body: str | bytes, kind: str, policy: str = POLICY) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Security-Policy": policy}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
