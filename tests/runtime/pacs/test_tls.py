"""Mutual TLS: peers without a certificate of the authority are refused, and do not delay others."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from pynetdicom import AE
from pynetdicom.sop_class import Verification

from cbmir.errors import DeliveryError, PacsError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs.destinations import Address, StoreScu, Tls
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.jobs import ResultObject
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.storage_scp import MOST_ARRIVING, StorageScp
from pacs_rig import receiving, send_all, wait_for

#: pynetdicom does not close a socket whose connection failed; the garbage collector does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path

    def certify(self, name: str, host: str = "127.0.0.1") -> Tls:
        """Write a certificate and key for a host; returns them with the authority's certificate."""
        key, request, certificate = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:{host}\n")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.folder / "ca.pem", "-CAkey", self.folder / "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", certificate,
        )  # fmt: skip
        return Tls(certificate, key, self.folder / "ca.pem")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def new_authority(folder: Path) -> Authority:
    folder.mkdir()
    _openssl(
        "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={folder.name}",
        "-keyout", folder / "ca.key", "-out", folder / "ca.pem",
    )  # fmt: skip
    return Authority(folder)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, require_pacs: Callable[..., None]) -> Authority:
    require_pacs("openssl")
    return new_authority(tmp_path_factory.mktemp("tls") / "hospital")


@pytest.fixture(scope="module")
def node_files(authority: Authority) -> Tls:
    return authority.certify("node")


@pytest.fixture(scope="module")
def sender_files(authority: Authority) -> Tls:
    return authority.certify("sender")


@pytest.fixture
def node(tmp_path: Path, live: ReloadableFinder, node_files: Tls) -> Iterator[StorageScp]:
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        started = StorageScp(Intake(queue, live), port=0, tls=node_files.server())
        started.start()
        try:
            yield started
        finally:
            started.stop(grace=0)


def test_a_known_sender_is_accepted(node: StorageScp, sender_files: Tls, radiograph: Callable[..., bytes]) -> None:
    tls = (sender_files.client(), "127.0.0.1")
    assert send_all(node.port, [radiograph(study) for study in (1, 2, 3)], tls=tls) == [0, 0, 0]


def test_a_large_image_is_received(node: StorageScp, sender_files: Tls, radiograph: Callable[..., bytes]) -> None:
    tls = (sender_files.client(), "127.0.0.1")
    assert send_all(node.port, [radiograph(PixelData=bytes(4_000_000))], tls=tls) == [0]


def is_let_in(node: StorageScp, context: ssl.SSLContext) -> bool:
    """Whether a connection stays open after the handshake: TLS 1.3 refuses a client only after the client's part."""
    connection = socket.create_connection(("127.0.0.1", node.port), 30)
    connection.settimeout(0.5)
    try:
        connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
        connection.sendall(b"\1")
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        connection.close()


def test_a_peer_without_a_certificate_is_refused(
    node: StorageScp, authority: Authority, sender_files: Tls, tmp_path: Path
) -> None:
    assert is_let_in(node, sender_files.client())
    nameless = ssl.create_default_context(cafile=sender_files.authorities)
    assert not is_let_in(node, nameless)
    stranger = new_authority(tmp_path / "elsewhere").certify("sender")
    assert not is_let_in(node, Tls(stranger.certificate, stranger.key, sender_files.authorities).client())
    plain = AE()
    plain.add_requested_context(Verification)
    assert not plain.associate("127.0.0.1", node.port, ae_title="CBMIR").is_established


def test_a_stalled_handshake_delays_no_others(
    node: StorageScp, sender_files: Tls, radiograph: Callable[..., bytes]
) -> None:
    with socket.create_connection(("127.0.0.1", node.port), 30) as silent:
        assert send_all(node.port, [radiograph()], tls=(sender_files.client(), "127.0.0.1")) == [0]
        silent.close()


def test_concurrent_handshakes_are_limited(
    node: StorageScp, sender_files: Tls, radiograph: Callable[..., bytes]
) -> None:
    """Peers without a certificate cannot start unlimited threads, or keep a known sender out."""
    with ExitStack() as stack:
        for _ in range(MOST_ARRIVING + 20):
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port), 30))
        wait_for(lambda: len(node._server.arriving) == MOST_ARRIVING, "most of them are in their handshake")
        assert send_all(node.port, [radiograph()], tls=(sender_files.client(), "127.0.0.1")) == [0]
    wait_for(lambda: not node._server.arriving, "all places are free again")


def test_stopping_ends_a_handshake(node: StorageScp) -> None:
    with socket.create_connection(("127.0.0.1", node.port), 30):
        wait_for(lambda: len(node._server.arriving) == 1, "it is in its handshake")
        node.stop(grace=0)
        assert not node._server.arriving


def test_results_are_sent_over_tls(
    authority: Authority, node_files: Tls, sender_files: Tls, radiograph: Callable[..., bytes]
) -> None:
    result = [ResultObject("sr", "", radiograph())]
    with receiving(tls=sender_files.server()) as archive:
        address = Address("ARCHIVE", "127.0.0.1", archive.port)
        StoreScu(address, tls=node_files.client()).send(result)
        assert len(archive.objects) == 1
        with pytest.raises(DeliveryError, match="cannot be reached"):
            StoreScu(address).send(result)


def test_an_archive_of_another_name_is_not_trusted(
    authority: Authority, node_files: Tls, radiograph: Callable[..., bytes]
) -> None:
    with receiving(tls=authority.certify("other", host="127.0.0.9").server()) as archive:
        destination = StoreScu(Address("ARCHIVE", "127.0.0.1", archive.port), tls=node_files.client())
        with pytest.raises(DeliveryError, match="cannot be reached"):
            destination.send([ResultObject("sr", "", radiograph())])


def test_unusable_files_are_reported(node_files: Tls, sender_files: Tls, tmp_path: Path) -> None:
    with pytest.raises(PacsError, match="expected PEM files"):
        Tls(node_files.certificate, sender_files.key, node_files.authorities).server()
    with pytest.raises(PacsError, match="expected PEM files"):
        Tls(tmp_path / "none.pem", node_files.key, node_files.authorities).client()
    locked = tmp_path / "locked.key"
    _openssl("ec", "-aes256", "-passout", "pass:secret", "-in", node_files.key, "-out", locked)
    with pytest.raises(PacsError, match="without a password"):
        Tls(node_files.certificate, locked, node_files.authorities).server()
