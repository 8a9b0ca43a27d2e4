"""A socket that holds its port before anything slow begins."""

from __future__ import annotations

import ipaddress
import socket

from cbmir.errors import UserError

#: Names by which a machine reaches itself.
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds the port (0: any free one) and does not listen yet. Raises UserError."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UserError(
            f"{host} port {port} is in use or not allowed ({error.strerror}); choose another with --port (0: any free "
            "one)"
        ) from error
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    return f"http://{name_of(host)}:{listener.getsockname()[1]}"


def name_of(host: str) -> str:
    """A host as it stands in a URL, and so in the header Host."""
    return f"[{host}]" if ":" in host else host.lower()


def allowed_hosts(host: str) -> tuple[str, ...]:
    """Names by which `host` may be asked for: on a loopback address this machine's (DNS rebinding), empty for any."""
    return (*LOCAL_NAMES, name_of(host)) if is_loopback(host) else ()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
