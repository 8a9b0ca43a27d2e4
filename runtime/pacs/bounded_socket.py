"""pynetdicom's connection with limits: it does not trust lengths, nor wait for units (PDUs) that are never finished."""

from __future__ import annotations

import math
import socket
import time
from contextlib import suppress
from typing import Any, Self

from pynetdicom.transport import AssociationSocket

from cbmir.runtime.logs import fields, pacs_log

MAX_PDU = 2**18  # bytes; a few large units are faster than many small ones
LONGEST_UNIT = MAX_PDU + 2**12
#: Seconds for the header of a unit, and again for the rest of it, in either direction.
STALL_TIMEOUT = 30.0


class BoundedSocket(AssociationSocket):
    """A connection that is closed if a unit is too long, takes more than `STALL_TIMEOUT`, or comes after `until`."""

    socket: Any
    until = math.inf  # by time.monotonic()

    @classmethod
    def of(cls, connection: Any, until: float = math.inf) -> Self:
        """Turn pynetdicom's connection into a bounded one, in place. Raises AttributeError if pynetdicom lacks a method
        that is replaced here, so that no connection is without bounds."""
        _ = AssociationSocket.recv, AssociationSocket.send, AssociationSocket.ready, AssociationSocket._shutdown_socket
        connection.__class__, connection.until = cls, until
        bounded: Self = connection
        return bounded

    def check_size(self, count: int) -> None:
        """Raise OSError if more bytes are announced than are allowed now."""
        if count > LONGEST_UNIT:
            pacs_log.warning("connection closed: the announced length is too large", extra=fields(bytes=count))
            raise OSError("too long")

    def recv(self, nr_bytes: int) -> bytearray:
        """Receive as `AssociationSocket.recv`, fewer bytes if the connection ends. An OSError ends the association."""
        try:
            self.check_size(nr_bytes)
            return receive(self.socket, nr_bytes, self._deadline())
        except OSError:
            self._shutdown_socket()  # pynetdicom assumes that the connection is gone, and would leave it open
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
        """Shut down and close the socket; pynetdicom forgets to close it if the other side has closed it already."""
        if self.socket is not None:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()


def receive(connection: Any, count: int, until: float) -> bytearray:
    """Receive `count` bytes, fewer if the connection has ended. Raises OSError if they do not arrive in time."""
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
