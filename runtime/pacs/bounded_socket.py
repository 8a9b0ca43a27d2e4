"""pynetdicom's connection with limits: it trusts no length, and does not wait for unfinished units (PDUs)."""

from __future__ import annotations

import math
import socket
import time
from contextlib import suppress
from typing import Any, Self

from pynetdicom.transport import AssociationSocket

from cbmir.runtime.logs import fields, pacs_log

MAX_PDU = 2**18  # bytes; few large units are quicker than many small ones
LONGEST_UNIT = MAX_PDU + 2**12
#: Seconds that a unit may take to its last byte, either way: its header, and the rest of it.
STALL_TIMEOUT = 30.0


class BoundedSocket(AssociationSocket):
    """A connection that ends where a unit is too long, takes more than `STALL_TIMEOUT`, or comes after `until`."""

    socket: Any
    until = math.inf  # by time.monotonic()

    @classmethod
    def of(cls, connection: Any, until: float = math.inf) -> Self:
        """Give a connection of pynetdicom's its bounds, in its place. Raises AttributeError if pynetdicom has none of
        what is replaced here: no connection without bounds."""
        _ = AssociationSocket.recv, AssociationSocket.send, AssociationSocket.ready, AssociationSocket._shutdown_socket
        connection.__class__, connection.until = cls, until
        bounded: Self = connection
        return bounded

    def check_size(self, count: int) -> None:
        """Raises OSError where so many bytes are more than may come now."""
        if count > LONGEST_UNIT:
            pacs_log.warning("connection closed: the announced length is too large", extra=fields(bytes=count))
            raise OSError("too long")

    def recv(self, nr_bytes: int) -> bytearray:
        """As `AssociationSocket.recv`: fewer bytes where the connection has ended. OSError ends the association."""
        try:
            self.check_size(nr_bytes)
            return receive(self.socket, nr_bytes, self._deadline())
        except OSError:
            self._shutdown_socket()  # pynetdicom takes the connection for gone already, and would leave it open
            raise

    def send(self, bytestream: bytes) -> None:
        until, left = self._deadline(), memoryview(bytestream)
        try:
            while left:
                _limit(self.socket, until)
                left = left[self.socket.send(left) :]
        except OSError:
            self._shutdown_socket()
            self.event_queue.put("Evt17")  # the connection is closed

    def _deadline(self) -> float:
        return min(self.until, time.monotonic() + STALL_TIMEOUT)

    def _shutdown_socket(self) -> None:
        """As `AssociationSocket._shutdown_socket`, which forgets to close what the other side has closed already."""
        if self.socket is not None:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()


def receive(connection: Any, count: int, until: float) -> bytearray:
    """So many bytes, fewer where the connection has ended. Raises OSError where they do not all come in time."""
    data, got = bytearray(count), 0
    with memoryview(data) as view:
        while got < count:
            _limit(connection, until)
            read = connection.recv_into(view[got:])
            if read == 0:
                break
            got += read
    return data[:got]


def _limit(connection: Any, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("too slow")
    connection.settimeout(left)
