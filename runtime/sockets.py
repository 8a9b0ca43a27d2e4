"""Sockets that reserve their port before a slow startup, and the host names of a server."""

from __future__ import annotations

import ipaddress
import socket

from cbmir.errors import UserError

#: Names with which a machine reaches itself.
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to a port (0: any free one) without listening yet. Raises UserError."""
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
    """Return a host as it appears in URLs and in the header Host."""
    return f"[{host}]" if ":" in host else host.lower()


def allowed_hosts(host: str) -> tuple[str, ...]:
    """Return the names to accept in the header Host: this machine's on loopback (DNS rebinding); empty means any."""
    return (*LOCAL_NAMES, name_of(host)) if is_loopback(host) else ()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
