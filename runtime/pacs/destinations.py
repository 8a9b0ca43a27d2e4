"""Destinations for results: a DICOM node (C-STORE) or a folder; `dicomweb.DicomWeb` is a destination too.

UIDs are stable, so results may be sent again, and a duplicate counts as accepted.
"""

from __future__ import annotations

import io
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from cbmir.errors import DeliveryAwayError, DeliveryError, PacsError, require
from cbmir.files import replacing, sync
from cbmir.runtime.imaging.dicom_header import pydicom_unlogged
from cbmir.runtime.imaging.radiograph import collected_warnings
from cbmir.runtime.pacs.dicomweb import OUT_OF_RESOURCES
from cbmir.runtime.pacs.jobs import ResultObject

#: Seconds: to connect, to negotiate, and for an answer to each object.
CONNECT_TIMEOUT, ACSE_TIMEOUT, DIMSE_TIMEOUT = 10.0, 15.0, 60.0
#: Seconds for all results of an image, from connecting to the last answer.
DELIVERY_TIMEOUT = 300.0
#: Success; stored with a change (PS3.4 table B.2-1); already stored (PS3.7 C.5.7).
_STORED = (0x0000, 0xB000, 0xB006, 0xB007, 0x0111)


class Destination(Protocol):
    """A receiver of the results of one image. Many threads may use it."""

    def send(self, results: Sequence[ResultObject]) -> None:
        """Send results, and return when all were accepted. Raises DeliveryAwayError if nothing is accepted at the
        moment, and DeliveryError for refused objects, after the others were sent."""


@dataclass(frozen=True)
class Address:
    """A DICOM application entity: `AET@HOST:PORT`."""

    ae_title: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `AET@HOST:PORT`, with IPv6 addresses in brackets. Raises PacsError."""
        match = re.fullmatch(r"(?P<title>[^@]+)@(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})", text)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise PacsError(f"expected an address AET@HOST:PORT, found {text!r}")
        return cls(checked_ae_title(match["title"]), match["host"].strip("[]"), int(match["port"]))

    def __str__(self) -> str:
        return f"{self.ae_title}@{self.host}:{self.port}"


def checked_ae_title(text: str) -> str:
    """Check an AE title (PS3.5 table 6.2-1): 1 to 16 printable ASCII characters, no backslash. Raises PacsError."""
    title = text.strip(" ")
    if not 1 <= len(title) <= 16 or not title.isascii() or not title.isprintable() or "\\" in title:
        raise PacsError(f"expected an AE title of 1 to 16 characters of ASCII without a backslash, found {text!r}")
    return title


@dataclass(frozen=True)
class Tls:
    """Mutual TLS for DICOM (PS3.15 annex B.12), from PEM files. Raises PacsError if these are not valid."""

    certificate: Path
    key: Path
    authorities: Path

    def server(self) -> ssl.SSLContext:
        """Make a context for incoming connections. A client without a certificate from the authorities is refused."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """Make a context for outgoing connections. The other side's certificate must name its host."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.verify_mode, context.minimum_version = ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password="")
            context.load_verify_locations(self.authorities)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise PacsError(
                f"expected PEM files of a certificate, its key without a password, and the trusted authorities; found "
                f"{self.certificate}, {self.key}, {self.authorities}: {error}"
            ) from error
        return context


class Folder:
    """A folder of results as files `<SOP Instance UID>.dcm`. A second run replaces them."""

    def __init__(self, path: Path) -> None:
        """Make the folder, which only one process may use at a time. Raises PacsError if that fails."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for half in path.glob(".*.part"):  # left by a process that was killed
                half.unlink()
        except OSError as error:
            raise PacsError(f"{path}: cannot make the folder of results ({error.strerror})") from error

    def send(self, results: Sequence[ResultObject]) -> None:
        try:
            for each in results:
                with replacing(self.path / f"{each.uid}.dcm") as temporary:
                    temporary.write_bytes(each.data)
                    sync(temporary)
            sync(self.path)
        except OSError as error:
            raise DeliveryAwayError(f"{self.path}: cannot write results there ({error.strerror})") from error


class StoreScu:
    """A DICOM node that accepts C-STORE. Each image's results have one association."""

    def __init__(self, to: Address, *, calling: str = "CBMIR", tls: ssl.SSLContext | None = None) -> None:
        """`calling` is our own AE title. Raises MissingDependencyError."""
        require("pynetdicom", "dicom")
        self.to, self._calling, self._tls = to, calling, tls

    def send(self, results: Sequence[ResultObject]) -> None:
        from pydicom import dcmread

        with collected_warnings(), pydicom_unlogged():
            datasets = [dcmread(io.BytesIO(each.data)) for each in results]
        if not datasets:
            return
        association = self._associate(sorted({dataset.SOPClassUID for dataset in datasets}))
        try:
            refusals = [refusal for dataset in datasets if (refusal := self._store(association, dataset))]
        finally:
            association.release() if association.is_established else association.abort()
        if refusals:
            raise DeliveryError(f"{self.to}: {refusals[0]}")

    def _associate(self, classes: list[Any]) -> Any:
        from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian
        from pynetdicom import AE, evt

        ae = AE(ae_title=self._calling)
        ae.connection_timeout, ae.acse_timeout = CONNECT_TIMEOUT, ACSE_TIMEOUT
        ae.dimse_timeout = ae.network_timeout = DIMSE_TIMEOUT
        for sop_class in classes:
            ae.add_requested_context(sop_class, [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
        tls = None if self._tls is None else (self._tls, self.to.host)
        association = ae.associate(self.to.host, self.to.port, ae_title=self.to.ae_title, tls_args=tls,
                                   evt_handlers=[(evt.EVT_CONN_OPEN, _bound)])  # fmt: skip
        if not association.is_established:
            if association.rejected_contexts:  # it answered, but accepted no class, so pynetdicom aborted
                raise DeliveryError(f"{self.to}: does not accept {classes[0].name}")
            why = "refused the association" if association.is_rejected else "cannot be reached"
            raise DeliveryAwayError(f"{self.to}: {why}; check its address and that it knows the AE title "
                                    f"{self._calling}")  # fmt: skip
        return association

    def _store(self, association: Any, dataset: Any) -> str:
        """Send an object. Returns why it was refused; empty if it was accepted. Raises DeliveryAwayError."""
        try:
            status = association.send_c_store(dataset).get("Status")
        except ValueError:  # no presentation context for it
            return f"does not accept {dataset.SOPClassUID.name}"
        except (RuntimeError, AttributeError) as error:  # the connection is gone
            raise DeliveryAwayError(f"{self.to}: ended the association ({type(error).__name__})") from None
        if status is None:
            raise DeliveryAwayError(f"{self.to}: did not answer a C-STORE")
        if status in _STORED:
            return ""
        refusal = f"refused {dataset.SOPClassUID.name} with status 0x{status:04X}"
        if status in OUT_OF_RESOURCES:
            raise DeliveryAwayError(f"{self.to}: {refusal}")
        return refusal


def _bound(event: Any) -> None:
    """Limit a delivery's time: pynetdicom would wait forever for an archive that stops in the middle of a unit."""
    from cbmir.runtime.pacs.bounded_socket import BoundedSocket

    BoundedSocket.of(event.assoc.dul.socket, until=time.monotonic() + DELIVERY_TIMEOUT)
