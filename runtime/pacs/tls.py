"""TLS for DICOM (PS3.15 annex B.12): both sides show a certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import PacsError


@dataclass(frozen=True)
class Tls:
    """PEM files: the own certificate (with its chain), its key, and the authorities whose certificates are trusted."""

    certificate: Path
    key: Path
    authorities: Path

    def server(self) -> ssl.SSLContext:
        """For connections that come in: a client without a certificate of the authorities is turned away.

        Raises PacsError where the files do not fit.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """For connections that go out: the other side's certificate must bear its host's name. Raises PacsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password="")
            context.load_verify_locations(self.authorities)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise PacsError(
                f"expected PEM files of a certificate, its key without a password, and the trusted authorities; found "
                f"{self.certificate}, {self.key}, {self.authorities}: {error}"
            ) from error
