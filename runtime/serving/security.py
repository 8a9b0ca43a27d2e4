"""Who is let in, before anything else of a request is looked at.

With a token, every route but the health checks wants it. Without one (a service for this machine alone) two tricks by
which a web page that is open in a browser on this machine could reach in are shut out: a name of its own for this
machine (DNS rebinding), and requests across sites. Other origins are answered in no case: there is no CORS.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cbmir.runtime.serving.problems import Problem, response_of
from cbmir.runtime.serving.settings import Settings

#: Say nothing but whether the service is up: what starts and watches it has no token.
OPEN = ("/health", "/health/live", "/health/ready")


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = frozenset(settings.hosts) if settings.token is None else frozenset()
        self._token = None if settings.token is None else _digest(settings.token.encode("ascii"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope), scope["path"])
        except Problem as problem:
            scope["cbmir"].problem = problem.kind
            await response_of(problem, scope["cbmir"].id)(scope, receive, send)
            return
        scope["cbmir"].admitted = True
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        """Raise Problem for a request that is not let in."""
        host = headers.get("host", "")
        if self._hosts and _name(host) not in self._hosts:
            raise Problem(421, "host", f"Expected a request for {', '.join(sorted(self._hosts))}, found one for "
                                       f"another name.")  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise Problem(403, "origin", "Expected no request from another site's page, found an Origin header of one.")
        if self._token is None or path in OPEN:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests are compared: in a time that tells nothing, of the length neither.
        is_right = hmac.compare_digest(_digest(given.strip().encode("utf-8", "surrogateescape")), self._token)
        if scheme.lower() != "bearer" or not is_right:
            raise Problem(401, "token", "Expected the service's token as 'Authorization: Bearer TOKEN', found none or "
                                        "another.", headers={"WWW-Authenticate": 'Bearer realm="cbmir"'})  # fmt: skip


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _name(host: str) -> str:
    """Of a Host header: without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
