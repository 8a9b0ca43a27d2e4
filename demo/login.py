"""An optional login: one name and password for everything that the server gives (HTTP Basic).

It keeps others on a network out. The password crosses the network in clear unless HTTPS is in front of the demo.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass, field
from typing import Self

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cbmir.errors import UserError
from cbmir.secret import read_secret

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
