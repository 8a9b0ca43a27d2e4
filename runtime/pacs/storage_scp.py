"""The DICOM node: C-ECHO, and C-STORE of radiographs into the queue (PS3.4 annexes A and B)."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from socketserver import BaseServer
from typing import Any

from pydicom.uid import Comprehensive3DSRStorage, KeyObjectSelectionDocumentStorage
from pynetdicom import AE, _config, evt
from pynetdicom.transport import RequestHandler, ThreadedAssociationServer

from cbmir.errors import DicomImageError, ImageError, PacsError
from cbmir.runtime.imaging.dicom_header import IMAGE_CLASSES
from cbmir.runtime.imaging.dicom_pixels import COMPRESSED, NATIVE
from cbmir.runtime.logs import fields, pacs_log, what_failed
from cbmir.runtime.pacs.bounded_socket import LONGEST_UNIT, MAX_PDU, BoundedSocket, receive
from cbmir.runtime.pacs.destinations import checked_ae_title
from cbmir.runtime.pacs.intake import Intake, IntakeStatus

SUCCESS = 0x0000  # in the queue, on disk, now or before; or cbmir's own result, which is ignored
OUT_OF_RESOURCES = 0xA700  # the queue or the disk is full or failed: the sender should try again later
MISMATCH = 0xA900  # another SOP class or instance than was announced, or one of the four UIDs is missing
CANNOT_UNDERSTAND = 0xC000  # no readable data set, or larger than any radiograph
NOT_SUPPORTED = 0x0122  # the SOP class is not that of a radiograph
ACSE_TIMEOUT, DIMSE_TIMEOUT, IDLE_TIMEOUT = 10.0, 60.0, 120.0  # seconds
#: Seconds from connecting to the last byte of the association request, including the TLS handshake.
ARRIVAL_TIMEOUT = 10.0
#: Connections without an association. One more closes the oldest from the address that has the most.
MOST_ARRIVING = 64
_REJECTED = bytes.fromhex("0300 00000004 00020302")  # A-ASSOCIATE-RJ, transient: limit exceeded (PS3.8 table 9-21)


class StorageScp:
    """A storage SCP on its own port, with one thread per association."""

    def __init__(
        self, intake: Intake, *, ae_title: str = "CBMIR", host: str = "127.0.0.1", port: int = 11112,
        allow_calling: Collection[str] = (), tls: ssl.SSLContext | None = None, max_associations: int = 16,
    ) -> None:  # fmt: skip
        """`allow_calling` are the AE titles that may send; if it is empty, all may. Raises PacsError."""
        self._intake, self._address, self._tls = intake, (host, port), tls
        self._ae = _Ae(ae_title=checked_ae_title(ae_title))
        self._ae.require_called_aet = True
        self._ae.require_calling_aet = [checked_ae_title(title) for title in allow_calling]
        self._ae.maximum_associations, self._ae.maximum_pdu_size = max_associations, MAX_PDU
        self._ae.acse_timeout, self._ae.dimse_timeout = ACSE_TIMEOUT, DIMSE_TIMEOUT
        self._ae.network_timeout = IDLE_TIMEOUT
        for sop_class in IMAGE_CLASSES:
            self._ae.add_supported_context(sop_class, [*NATIVE, *COMPRESSED])  # senders transcode other syntaxes
        # Verification, and results, because a PACS may send them back.
        for sop_class in ("1.2.840.10008.1.1", Comprehensive3DSRStorage, KeyObjectSelectionDocumentStorage):
            self._ae.add_supported_context(sop_class)
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Listen. Raises PacsError if the port is in use."""
        _config.LOG_HANDLER_LEVEL = "none"  # pynetdicom's own logs contain UIDs
        handlers: list[Any] = [(evt.EVT_C_STORE, self._store), (evt.EVT_REJECTED, self._rejected)]
        try:
            self._server = self._ae.make_server(
                self._address, ssl_context=self._tls, evt_handlers=handlers, server_class=_AssociationServer,
                request_handler=_Handler, max_message=self._intake.limits.max_inflated,
            )  # fmt: skip
        except OSError as error:
            host, port = self._address
            raise PacsError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="cbmir-node")
        self._thread.start()

    def stop(self, grace: float = 10.0) -> None:
        """Accept no new associations; existing ones are aborted after `grace` seconds."""
        if self._thread is None:
            return
        self._server.stop_listening()
        self._thread.join()
        until = time.monotonic() + grace
        for association in self._server.active_associations:
            association.join(max(0.0, until - time.monotonic()))
        for association in self._server.active_associations:
            if association.is_established:
                association.abort()
            else:  # not established: on an abort, pynetdicom's state machine would raise in its thread
                with suppress(OSError, AttributeError):  # closed meanwhile, and then it has no socket
                    association.dul.socket.socket.shutdown(socket.SHUT_RDWR)
                association.kill()
        self._thread = None

    def _store(self, event: Any) -> int:
        """Answer a C-STORE, always with a status, and without messages of libraries in the log."""
        began, source, data = time.monotonic(), event.assoc.requestor.ae_title.strip(), b""
        try:
            announced = str(event.request.AffectedSOPClassUID), str(event.request.AffectedSOPInstanceUID)
            data = event.encoded_dataset()
            outcome = self._intake.take(data, source, sop_class_uid=announced[0], sop_instance_uid=announced[1])
            status, what = NOT_SUPPORTED if outcome is IntakeStatus.NO_IMAGE else SUCCESS, outcome.value
        except ImageError as error:
            status = MISMATCH if isinstance(error, DicomImageError) else CANNOT_UNDERSTAND
            what = f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - the sender gets an answer, and sends again later
            status, what = OUT_OF_RESOURCES, what_failed(error)
        seconds = round(time.monotonic() - began, 3)
        about = fields(source=source, bytes=len(data), status=f"0x{status:04X}", seconds=seconds)
        (pacs_log.info if status == SUCCESS else pacs_log.warning)(what, extra=about)
        return status

    def _rejected(self, event: Any) -> None:
        pacs_log.warning("association rejected", extra=fields(source=event.assoc.requestor.ae_title.strip()))


class _Ae(AE):
    @property
    def active_associations(self) -> list[Any]:
        """The associations that count towards the maximum, without rejected ones, which may take a while to end."""
        return [each for each in super().active_associations if not (each.is_rejected or each.is_aborted)]


class _AssociationServer(ThreadedAssociationServer):
    """pynetdicom's server, changed so that no connection holds up another: it does not wait for handshakes in its loop,
    gives up on unfinished units, and trusts no length. A connection gets an association once it has requested one.
    """

    daemon_threads = False  # so that `server_close` waits for them
    request_queue_size = 128

    def __init__(self, *args: Any, max_message: int, **more: Any) -> None:
        self.max_message = max_message
        self.arriving: dict[Any, str] = {}  # addresses of connections without an accepted association, oldest first
        self._lock = threading.Lock()
        self.placing = threading.Lock()  # held while an association is counted and started
        super().__init__(*args, **more)

    def get_request(self) -> tuple[Any, Any]:
        listening: Any = self.socket
        client, address = listening.accept()
        client.settimeout(ARRIVAL_TIMEOUT)
        if self.ssl_context:
            client = self.ssl_context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept every connection. Each has `ARRIVAL_TIMEOUT` to request an association."""
        with self._lock:
            if len(self.arriving) >= MOST_ARRIVING:
                ((heaviest, _),) = Counter(self.arriving.values()).most_common(1)
                oldest = next(each for each, address in self.arriving.items() if address == heaviest)
                del self.arriving[oldest]
                _shut_down(oldest)
            self.arriving[request] = client_address[0]
        super().process_request(request, client_address)

    def arrived(self, request: Any) -> None:
        """Note that a connection has an association, or has ended."""
        with self._lock:
            self.arriving.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.arrived(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, OSError):  # ssl.SSLError and TimeoutError are
            reason = f"no TLS handshake, no request for an association, or cut off ({type(error).__name__})"
            pacs_log.warning("connection failed", extra=fields(reason=reason))
        elif error is not None:
            pacs_log.error("connection failed", extra=fields(reason=what_failed(error)))

    def stop_listening(self) -> None:
        """Stop accepting connections. Returns when none of them is in its TLS handshake any more."""
        BaseServer.shutdown(self)
        with self._lock:
            for request in self.arriving:
                _shut_down(request)
        self.server_close()


def _shut_down(connection: Any) -> None:
    """End a connection that another thread waits for. TLS is not shut down, because it may be in its handshake."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Handler(RequestHandler):
    def handle(self) -> None:
        """Handle a connection as pynetdicom does, but wait for the association request before taking a place. If an
        address has three quarters of the places, it gets no more."""
        server: Any = self.server
        until = time.monotonic() + ARRIVAL_TIMEOUT
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        first = receive(self.request, 6, until)
        length = int.from_bytes(first[2:], "big")
        if first and (first[0] != 1 or length > LONGEST_UNIT):
            raise ConnectionError("no request for an association")
        first += receive(self.request, length, until)
        if len(first) < 6 + length:  # the sender has left, or had to make way for another
            server.shutdown_request(self.request)
            return
        with server.placing:
            own = [each for each in server.ae.active_associations if each.requestor.address == self.remote.address]
            if len(own) < server.ae.maximum_associations - server.ae.maximum_associations // 4:
                association = self._create_association()
                _SenderSocket.of(association.dul.socket).begin(association, server, first)
                association.start()
                return
        pacs_log.warning("association rejected: its address has too many", extra=fields(address=self.remote.address))
        self.request.sendall(_REJECTED)
        server.shutdown_request(self.request)


class _SenderSocket(BoundedSocket):
    """A connection that replays its first unit, and refuses messages that are longer than any image."""

    def begin(self, association: Any, server: _AssociationServer, first: bytearray) -> None:
        self._server, self._first, self._size = server, first, 0
        connection = self.socket
        association.bind(evt.EVT_ESTABLISHED, lambda event: server.arrived(connection))
        association.bind(evt.EVT_DIMSE_RECV, self._begin_message)

    def _begin_message(self, event: Any) -> None:
        self._size = 0

    @property
    def ready(self) -> bool:
        return bool(self._first) or super().ready

    def recv(self, nr_bytes: int) -> bytearray:
        if self._first:
            data, self._first = self._first[:nr_bytes], self._first[nr_bytes:]
            return data
        return super().recv(nr_bytes)

    def check_size(self, count: int) -> None:
        super().check_size(count)
        self._size += count
        if self._size > self._server.max_message:
            pacs_log.warning("connection closed: more data than any image has", extra=fields(bytes=self._size))
            raise OSError("too long")

    def _shutdown_socket(self) -> None:
        self._server.arrived(self.socket)
        super()._shutdown_socket()
