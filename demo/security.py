"""An optional login: one name and password for everything that the server gives (HTTP Basic).

It keeps others on a network out. The password crosses the network in clear unless HTTPS is in front of the demo.

What the server says to browsers, so that no other site's page reaches in through one.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbmir.errors import UserError
from cbmir.files import read_secret

#: Gradio's own scripts need what is inline and `eval`; nothing may come from, or go to, another machine.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",  # no other page may show this one, where a visitor would click without knowing it
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",  # no other page may show a thumbnail
    "Referrer-Policy": "no-referrer",
}
#: The page has examples in it, and answers are of images: no browser keeps them once the page is closed.
_OF_PATIENTS = ("text/html", "application/json", "text/event-stream", "image/jpeg")


class OwnPages:
    """ASGI middleware: browsers are told to keep this page to itself, and what other sites' pages send is refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if headers.get("content-type", "").startswith(_OF_PATIENTS):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        if scope["type"] == "http" and _is_foreign(scope["method"], Headers(scope=scope)):
            await PlainTextResponse("Sent by another site's page", 403)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _is_foreign(method: str, headers: Headers) -> bool:
    """Whether another site's page sends this. A browser says so itself where the address is HTTPS or this machine's,
    and whatever a proxy in between makes of the host's name; else the page's origin is compared with that."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if method in ("GET", "HEAD"):  # changes nothing, and no other page can read the answer
        return False
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")


_SHORTEST = 8
_ADVICE = "write it with: (umask 077; echo NAME:PASSWORD > LOGINFILE)"


@dataclass(frozen=True)
class Login:
    """`secret` is NAME:PASSWORD as bytes, never shown."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        name, _, password = self.secret.partition(b":")
        if not name or len(password) < _SHORTEST:
            raise UserError(f"expected NAME:PASSWORD, the password of at least {_SHORTEST} characters, found less")

    @classmethod
    def load(cls, place: str) -> Self:
        """From a file that only its owner can read, or an environment variable as `env:NAME`. Raises UserError."""
        return cls(read_secret(place, "a login as NAME:PASSWORD", _ADVICE))

    def admits(self, header: str) -> bool:
        """Whether an Authorization header is of this login; takes as long for any wrong one."""
        expected = b"Basic " + base64.b64encode(self.secret)
        return hmac.compare_digest(header.encode("utf-8", "replace"), expected)


class LoginRequired:
    """ASGI middleware: nothing is answered without the login."""

    def __init__(self, app: ASGIApp, login: Login) -> None:
        self._app, self._login = app, login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._login.admits(
            Headers(scope=scope).get("authorization", "")
        ):
            refusal = PlainTextResponse("Login required", 401, {"WWW-Authenticate": 'Basic realm="cbmir"'})
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)
