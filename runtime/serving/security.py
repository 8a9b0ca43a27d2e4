"""Access control and security headers: ASGI middleware for the service and the demo.

They shut out web pages in a user's browser that reach this machine under their own host name (DNS rebinding) or send
cross-site requests. There is no CORS.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbmir.runtime.serving.problems import Problem, Trace, refuse

MOST_OF_HEADERS = 32 * 2**10  # bytes of a request's line and headers
_HEADERS = {
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # against clickjacking
}


class SecurityHeaders:
    """ASGI middleware that gives every answer security headers, with `policy` as Content-Security-Policy. Browsers do
    not store answers whose media type begins with one of `private`."""

    def __init__(self, app: ASGIApp, policy: str, private: tuple[str, ...] = ("",)) -> None:
        self._app, self._private = app, private
        self._headers = {**_HEADERS, "Content-Security-Policy": policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(self._headers)
                if headers.get("content-type", "").startswith(self._private):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, send_with_headers)


@dataclass(frozen=True)
class Credential:
    """The scheme and secret that the header Authorization must contain. `wanted` describes it in a refusal."""

    scheme: str
    secret: bytes = field(repr=False)
    wanted: str

    def admits(self, header: str) -> bool:
        """Check a header. Digests are compared in constant time, which reveals neither the secret nor its length."""
        scheme, _, given = header.partition(" ")
        digests = (hashlib.sha256(one).digest() for one in (given.strip().encode("utf-8", "replace"), self.secret))
        return hmac.compare_digest(*digests) and scheme.lower() == self.scheme.lower()


class Guard:
    """ASGI middleware that checks a request's headers. `hosts` are the accepted host names, empty for any. All paths
    except `open_paths` need the `credential`, if there is one."""

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] = (), credential: Credential | None = None,
        open_paths: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._app, self._hosts, self._credential, self._open = app, hosts, credential, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope, Headers(scope=scope))
            except Problem as problem:
                await refuse(problem, scope, receive, send)
                return
            Trace.of(scope).admitted = True
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        # h11 only limits incomplete input: a request that arrives whole may be twice as long.
        line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if line + sum(len(name) + len(value) for name, value in headers.raw) > MOST_OF_HEADERS:
            raise Problem(431, "headers", f"Expected at most {MOST_OF_HEADERS:,} bytes of URL and headers, found more.")
        if self._hosts and _name(headers.get("host", "")) not in self._hosts:
            raise Problem(421, "host", f"Expected a request for {', '.join(sorted(self._hosts))}, found one for "
                                       f"another name.")  # fmt: skip
        if _is_foreign(scope.get("method", "websocket"), headers):
            raise Problem(403, "origin", "Expected no request from another site's page, found one, by its header "
                                         "Sec-Fetch-Site or Origin.")  # fmt: skip
        if self._credential is None or scope["path"] in self._open:
            return
        if not self._credential.admits(headers.get("authorization", "")):
            raise Problem(401, "token", f"Expected {self._credential.wanted}, found none or another.",
                          headers={"WWW-Authenticate": f'{self._credential.scheme} realm="cbmir"'})  # fmt: skip


def _is_foreign(method: str, headers: Headers) -> bool:
    """Return whether another site's page sends this. Browsers say so themselves if the address is HTTPS or this
    machine's; else the page's origin is compared with the host's name."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is None and method in ("GET", "HEAD"):  # a link: it changes nothing, and no page reads the answer
        return False
    if site is not None:
        return site not in ("same-origin", "none")
    host = headers.get("host", "")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")


def _name(host: str) -> str:
    """Return the host in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
