"""The DICOM node in this process: answers, access, and slow or silent peers."""

from __future__ import annotations

import io
import socket
import struct
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pynetdicom
import pytest
from pydicom import dcmread
from pydicom.uid import MPEG2MPML, ImplicitVRLittleEndian
from pynetdicom import AE, _config
from pynetdicom.dimse_primitives import C_STORE
from pynetdicom.dsutils import encode
from pynetdicom.sop_class import (
    ComputedRadiographyImageStorage,
    CTImageStorage,
    DigitalXRayImageStorageForProcessing,
    Verification,
)
from pynetdicom.transport import AssociationSocket, RequestHandler, ThreadedAssociationServer

from cbmir.errors import PacsError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.imaging.dicom_header import IMAGE_CLASSES
from cbmir.runtime.imaging.dicom_pixels import COMPRESSED, NATIVE
from cbmir.runtime.imaging.radiograph import ImageLimits
from cbmir.runtime.pacs import storage_scp as node_module
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.storage_scp import MAX_PDU, StorageScp
from pacs_rig import PLANTED, send_all, wait_for

SR = "1.2.840.10008.5.1.4.1.1.88.34"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DurableQueue]:
    with DurableQueue(tmp_path / "queue", 3, quiet=0) as opened:
        yield opened


@pytest.fixture
def listen(queue: DurableQueue, live: ReloadableFinder) -> Callable[..., Any]:
    """Start nodes, as context managers."""

    @contextmanager
    def start(limits: ImageLimits | None = None, **options: Any) -> Iterator[StorageScp]:
        node = StorageScp(Intake(queue, live, limits), port=0, **options)
        node.start()
        try:
            yield node
        finally:
            node.stop(grace=0)

    return start


@pytest.fixture
def node(listen: Callable[..., Any]) -> Iterator[StorageScp]:
    with listen() as started:
        yield started


def associate(port: int, *, calling: str = "SENDER", called: str = "CBMIR", **options: Any) -> Any:
    ae = AE(ae_title=calling)
    ae.add_requested_context(Verification)
    ae.add_requested_context(ComputedRadiographyImageStorage, ImplicitVRLittleEndian)
    return ae.associate("127.0.0.1", port, ae_title=called, **options)


def store(association: Any, data_set: bytes, *, sop_class: str = "", instance: str = "") -> int:
    """C-STORE bytes under the given UIDs, and return the status."""
    request = C_STORE()
    request.MessageID, request.Priority = 7, 2
    request.AffectedSOPClassUID = sop_class or ComputedRadiographyImageStorage
    request.AffectedSOPInstanceUID = instance or "1.2.3"
    request.DataSet = io.BytesIO(data_set)
    context = next(c for c in association.accepted_contexts if c.abstract_syntax == request.AffectedSOPClassUID)
    association._reactor_checkpoint.clear()
    wait_for(lambda: association._is_paused, "the reactor pauses")
    association.dimse.send_msg(request, context.context_id)
    _, answer = association.dimse.get_msg(block=True)
    association._reactor_checkpoint.set()
    wait_for(lambda: not association._is_paused, "the reactor goes on")
    return int(answer.Status)


# -- answers


def test_echo(node: StorageScp) -> None:
    association = associate(node.port)
    assert association.send_c_echo().Status == 0x0000
    association.release()


def test_stored_images_are_in_the_queue(
    node: StorageScp, queue: DurableQueue, radiograph: Callable[..., bytes], log: Callable[[], str]
) -> None:
    assert send_all(node.port, [radiograph(1), radiograph(2), radiograph(1)]) == [0, 0, 0]
    assert len(queue) == 2
    job = queue.claim()
    assert job is not None
    assert job.source == "SENDER"
    assert dcmread(io.BytesIO(queue.file(job))).PatientID == PLANTED[1]
    assert '"message": "queued", "source": "SENDER"' in log()
    assert '"message": "known"' in log()


def test_a_full_queue_answers_out_of_resources(
    node: StorageScp, queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    statuses = send_all(node.port, [radiograph(study) for study in range(1, 6)])
    assert statuses == [0, 0, 0, 0xA700, 0xA700]
    assert len(queue) == 3


def test_a_disk_that_fails_answers_out_of_resources(
    node: StorageScp, queue: DurableQueue, radiograph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, f"Input/output error {PLANTED[0]}")

    monkeypatch.setattr(queue.spool, "write", fail)
    assert send_all(node.port, [radiograph()]) == [0xA700]
    monkeypatch.undo()
    assert send_all(node.port, [radiograph()]) == [0]


def test_a_wrong_instance_uid_is_refused(
    node: StorageScp, queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    image = dcmread(io.BytesIO(radiograph()))
    data_set = encode(image, is_implicit_vr=True, is_little_endian=True)
    assert data_set is not None
    association = associate(node.port)
    assert store(association, data_set, instance="1.2.3") == 0xA900
    assert store(association, data_set, instance=image.SOPInstanceUID) == 0x0000
    association.release()
    assert len(queue) == 1


@pytest.mark.parametrize("data_set", [b"\xff" * 50, b"\x08\x00\x05\x00\xff\xff\xff\x7f" + b"x" * 30])
def test_garbage_is_refused(node: StorageScp, queue: DurableQueue, data_set: bytes) -> None:
    association = associate(node.port)
    assert store(association, data_set) in (0xA900, 0xC000)
    assert association.send_c_echo().Status == 0x0000
    association.release()
    assert len(queue) == 0


@pytest.mark.parametrize("keyword", ["StudyInstanceUID", "SeriesInstanceUID"])
def test_images_without_uids_are_refused(
    node: StorageScp, queue: DurableQueue, radiograph: Callable[..., bytes], keyword: str
) -> None:
    """No result could refer to their study, so the sender gets an error."""
    assert send_all(node.port, [radiograph(**{keyword: ""})]) == [0xA900]
    assert len(queue) == 0


def test_an_image_that_is_too_large_is_refused(listen: Callable[..., Any], radiograph: Callable[..., bytes]) -> None:
    with listen(ImageLimits(max_bytes=3000)) as node:
        assert send_all(node.port, [radiograph()]) == [0xC000]


def test_only_classes_that_the_reader_supports_are_negotiated(node: StorageScp) -> None:
    ae = AE(ae_title="SENDER")
    others = [CTImageStorage, DigitalXRayImageStorageForProcessing]
    taken = [Verification, *IMAGE_CLASSES]
    for sop_class in (*others, *taken):
        ae.add_requested_context(sop_class)
    association = ae.associate("127.0.0.1", node.port, ae_title="CBMIR")
    assert [c.abstract_syntax for c in association.rejected_contexts] == others
    assert [c.abstract_syntax for c in association.accepted_contexts] == taken
    association.release()


def test_reports_of_others_are_refused(node: StorageScp, queue: DurableQueue, radiograph: Callable[..., bytes]) -> None:
    report = radiograph(SOPClassUID=SR, Modality="SR")
    own = radiograph(SOPClassUID=SR, Modality="SR", Manufacturer="cbmir", ManufacturerModelName="cbmir")
    assert send_all(node.port, [report, own]) == [0x0122, 0x0000]
    assert len(queue) == 0


def test_transfer_syntaxes_of_the_reader_are_accepted(node: StorageScp) -> None:
    """This does not depend on pydicom's decoders: by default it has none for JPEG Lossless."""
    ae = AE(ae_title="SENDER")
    for syntax in (*NATIVE, *COMPRESSED, MPEG2MPML):
        ae.add_requested_context(ComputedRadiographyImageStorage, syntax)
    association = ae.associate("127.0.0.1", node.port, ae_title="CBMIR")
    assert {c.transfer_syntax[0] for c in association.accepted_contexts} == {*NATIVE, *COMPRESSED}
    association.release()


def test_several_concurrent_sources(live: ReloadableFinder, radiograph: Callable[..., bytes], tmp_path: Path) -> None:
    """Four senders and a feed have overlapping images: each image is in the queue once, with one of its sources."""
    with DurableQueue(tmp_path / "many", 100, quiet=0) as queue:
        intake = Intake(queue, live)
        node = StorageScp(intake, port=0)
        node.start()
        parts = [[radiograph(study) for study in range(first, first + 4)] for first in (1, 3, 5, 7, 9)]
        with ThreadPoolExecutor(5) as pool:
            sent = [pool.submit(send_all, node.port, part, calling=f"SENDER-{n}") for n, part in enumerate(parts[:4])]
            feed = pool.submit(lambda: [intake.take(data, "feed") for data in parts[4]])
            assert [future.result() for future in sent] == [[0] * 4] * 4
            feed.result()
        node.stop(grace=0)
        got: Counter[str] = Counter()
        while (job := queue.claim()) is not None:
            got[job.sop_instance_uid] += 1
        assert got == Counter(f"{PLANTED[2]}.{study}.1" for study in range(1, 13))


# -- access


def test_ae_titles_are_checked(listen: Callable[..., Any], log: Callable[[], str]) -> None:
    with listen(ae_title="CBMIR", allow_calling=["MODALITY", "PACS"]) as node:
        for calling, called, accepted in (
            ("PACS", "CBMIR", True), ("MODALITY", "CBMIR", True), ("SENDER", "CBMIR", False), ("PACS", "OTHER", False)
        ):  # fmt: skip
            association = associate(node.port, calling=calling, called=called)
            assert association.is_established is accepted
            assert association.is_rejected is not accepted
            if accepted:
                association.release()
    assert log().count("association rejected") == 2


def test_the_number_of_associations_is_limited(listen: Callable[..., Any]) -> None:
    with listen(max_associations=2) as node:
        associations = [associate(node.port) for _ in range(3)]
        assert [a.is_established for a in associations] == [True, True, False]
        associations[0].release()
        wait_for(lambda: _is_accepted(node), "a place is free again")
        associations[1].release()


def _is_accepted(node: StorageScp) -> bool:
    association = associate(node.port)
    if association.is_established:
        association.release()
        return True
    return False


@pytest.mark.parametrize("title", ["", "SEVENTEEN_LETTERS", "BACK\\SLASH", "ÄRZTE"])
def test_invalid_ae_titles_are_refused(queue: DurableQueue, live: ReloadableFinder, title: str) -> None:
    with pytest.raises(PacsError, match="expected an AE title"):
        StorageScp(Intake(queue, live), ae_title=title)
    with pytest.raises(PacsError, match="expected an AE title"):
        StorageScp(Intake(queue, live), allow_calling=[title])


def test_a_port_in_use_is_reported(node: StorageScp, queue: DurableQueue, live: ReloadableFinder) -> None:
    with pytest.raises(PacsError, match=r"cannot listen on 127\.0\.0\.1"):
        StorageScp(Intake(queue, live), port=node.port).start()


# -- peers that must not block it


@contextmanager
def connected(node: StorageScp) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", node.port), 30) as connection:
        connection.settimeout(30)
        yield connection


def listens(node: StorageScp) -> bool:
    try:
        with connected(node):
            return True
    except ConnectionError:
        return False


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_pdu_that_is_too_long_closes_the_connection(node: StorageScp) -> None:
    with connected(node) as connection:
        connection.sendall(bytes([1, 0]) + struct.pack(">I", 2**31))
        assert is_closed(connection)
    assert _is_accepted(node)


def test_a_message_that_is_too_long_closes_the_connection(
    listen: Callable[..., Any], queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    with listen(ImageLimits(max_pixels=0)) as node:  # at most 16 MiB
        files = [radiograph(1), radiograph(2, PixelData=bytes(17_000_000))]
        assert send_all(node.port, files) == [0, -1]
        assert send_all(node.port, [radiograph(3), radiograph(4)]) == [0, 0]


def test_many_messages_of_one_association_are_not_too_long(
    listen: Callable[..., Any], radiograph: Callable[..., bytes]
) -> None:
    with listen(ImageLimits(max_pixels=0)) as node:
        assert send_all(node.port, [radiograph(1, PixelData=bytes(7_000_000))] * 3) == [0, 0, 0]


def test_an_unfinished_pdu_times_out(listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "ARRIVAL_TIMEOUT", 0.2)
    with listen(max_associations=1) as node, connected(node) as connection:
        connection.sendall(bytes([1, 0]) + struct.pack(">I", 1000) + b"begun")
        assert is_closed(connection)
        wait_for(lambda: _is_accepted(node), "the place is free")


def test_a_trickling_pdu_times_out(listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives in time, but the unit does not."""
    monkeypatch.setattr(node_module, "ARRIVAL_TIMEOUT", 0.5)
    with listen(max_associations=1) as node, connected(node) as connection:
        connection.sendall(bytes([1, 0]) + struct.pack(">I", 1000))
        connection.settimeout(0.05)
        sent = 0
        while not _is_closed_now(connection):
            sent += 1
            assert sent < 1000
            with suppress(ConnectionError):
                connection.sendall(b"x")
        wait_for(lambda: _is_accepted(node), "the place is free")


def _is_closed_now(connection: socket.socket) -> bool:
    """Whether the peer closes a connection within its timeout."""
    try:
        return is_closed(connection)
    except TimeoutError:
        return False


def test_a_node_without_its_limits_accepts_nothing(
    node: StorageScp, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    """A later pynetdicom may rename the parts that the node replaces."""
    monkeypatch.delattr(AssociationSocket, "_shutdown_socket")
    monkeypatch.setattr(AssociationSocket, "close", lambda self: None)
    assert not associate(node.port).is_established
    assert "unexpected AttributeError" in log()


def test_the_pdu_length_is_negotiated(node: StorageScp) -> None:
    association = associate(node.port)
    assert association.acceptor.maximum_length == MAX_PDU
    association.release()


# -- stopping


def test_stopping_lets_an_association_end(
    listen: Callable[..., Any], queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    with listen() as node:
        association = associate(node.port)
        stopping = threading.Thread(target=node.stop, kwargs={"grace": 60})
        stopping.start()
        wait_for(lambda: not listens(node), "it listens no more")
        image = dcmread(io.BytesIO(radiograph()))
        assert association.send_c_store(image).Status == 0x0000
        association.release()
        stopping.join(60)
        assert not stopping.is_alive()
    assert len(queue) == 1


def test_stopping_ends_a_silent_connection(listen: Callable[..., Any]) -> None:
    """There is no association that could be aborted."""
    with listen() as node, connected(node) as silent:
        wait_for(lambda: node._server.arriving, "it is there")
        node.stop(grace=0)
        assert is_closed(silent)


def test_stopping_aborts_an_association_that_does_not_end(listen: Callable[..., Any]) -> None:
    with listen() as node:
        association = associate(node.port)
        node.stop(grace=0)
        wait_for(lambda: not association.is_established, "it is aborted")


# -- private parts of pynetdicom


def test_pynetdicom_has_the_private_parts_that_are_replaced() -> None:
    """They are why pyproject.toml sets an upper version of pynetdicom. Without them, connections have no limits."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    (declared,) = [text for text in project["optional-dependencies"]["dicom"] if text.startswith("pynetdicom")]
    assert "<" in declared
    needed = {
        _config: ["LOG_HANDLER_LEVEL"],
        AE: ["active_associations"],
        AssociationSocket: ["recv", "ready", "_shutdown_socket"],
        RequestHandler: ["_create_association"],
        ThreadedAssociationServer: ["active_associations", "get_request", "process_request", "shutdown_request"],
    }
    gone = [f"{owner.__name__}.{part}" for owner, parts in needed.items() for part in parts if not hasattr(owner, part)]
    version = pynetdicom.__version__
    assert not gone, f"pynetdicom {version} has no {', '.join(gone)} any more: see runtime/pacs/storage_scp.py"
