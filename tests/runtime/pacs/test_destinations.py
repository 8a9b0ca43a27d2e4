"""Destinations of results: a C-STORE receiver and a folder, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pynetdicom import AE
from pynetdicom.sop_class import CTImageStorage, SecondaryCaptureImageStorage

from cbmir.errors import DeliveryAwayError, DeliveryError, PacsError
from cbmir.runtime.pacs.destinations import Address, Folder, StoreScu
from cbmir.runtime.pacs.jobs import ResultObject
from pacs_rig import Receiver

#: pynetdicom does not close a socket whose connection failed; the garbage collector does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def results(radiograph: Callable[..., bytes]) -> list[ResultObject]:
    return [ResultObject("sr", "2.25.1", radiograph(1)), ResultObject("sc", "2.25.2", radiograph(2))]


def scu(receiver: Receiver, title: str = "ARCHIVE") -> StoreScu:
    return StoreScu(Address(title, "127.0.0.1", receiver.port))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PACS@10.0.0.1:104", Address("PACS", "10.0.0.1", 104)),
        ("MY PACS@pacs.example:11112", Address("MY PACS", "pacs.example", 11112)),
        ("A@[::1]:104", Address("A", "::1", 104)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "PACS", "PACS@host", "@host:104", "PACS@host:0", "PACS@host:65536", "PACS@:104", "A@b:c:104",
             "SEVENTEEN_LETTERS@host:104"],
)  # fmt: skip
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(PacsError, match=r"expected an (address|AE title)"):
        Address.parse(text)


def test_results_are_stored(receiver: Receiver, results: list[ResultObject]) -> None:
    scu(receiver).send(results)
    assert len(receiver.objects) == 2
    scu(receiver).send([])


@pytest.mark.parametrize("status", [0xB000, 0xB006, 0xB007])
def test_a_warning_is_not_a_failure(receiver: Receiver, results: list[ResultObject], status: int) -> None:
    receiver.statuses.append(status)
    scu(receiver).send(results)
    assert len(receiver.objects) == 1


def test_existing_results_count_as_stored(receiver: Receiver, results: list[ResultObject]) -> None:
    """Duplicate SOP Instance: a process that then ended has already sent it. The remaining results are sent."""
    receiver.statuses.append(0x0111)
    scu(receiver).send(results)
    assert len(receiver.objects) == 1


@pytest.mark.parametrize("status", [0xA900, 0xC000, 0x0122, 0x0124])
def test_a_refused_result_does_not_stop_the_rest(receiver: Receiver, results: list[ResultObject], status: int) -> None:
    receiver.statuses.append(status)
    with pytest.raises(DeliveryError, match=f":{receiver.port}: refused .* with status 0x{status:04X}") as raised:
        scu(receiver).send(results)
    assert not isinstance(raised.value, DeliveryAwayError)
    assert len(receiver.objects) == 1
    scu(receiver).send(results)  # sent again, all of them are accepted
    assert len(receiver.objects) == 3


def test_an_archive_without_space_is_retried_later(receiver: Receiver, results: list[ResultObject]) -> None:
    receiver.statuses.append(0xA700)
    with pytest.raises(DeliveryAwayError, match="with status 0xA700"):
        scu(receiver).send(results)
    assert receiver.objects == []


def test_a_wrong_called_ae_title_is_refused(receiver: Receiver, results: list[ResultObject]) -> None:
    with pytest.raises(DeliveryAwayError, match="refused the association"):
        scu(receiver, "OTHER").send(results)


def test_an_archive_that_is_down_cannot_be_reached(receiver: Receiver, results: list[ResultObject]) -> None:
    away = StoreScu(Address("ARCHIVE", "127.0.0.1", 1))
    with pytest.raises(DeliveryAwayError, match="cannot be reached"):
        away.send(results)


@pytest.mark.parametrize("supported", [CTImageStorage, SecondaryCaptureImageStorage])
def test_an_unsupported_class_is_named(radiograph: Callable[..., bytes], supported: str) -> None:
    """Also if the archive supports none of the classes: then pynetdicom aborts the association."""
    capture = radiograph(2, SOPClassUID=SecondaryCaptureImageStorage)
    ae = AE(ae_title="ARCHIVE")
    ae.add_supported_context(supported)
    server = ae.start_server(("127.0.0.1", 0), block=False)
    assert server is not None
    try:
        destination = StoreScu(Address("ARCHIVE", "127.0.0.1", server.server_address[1]))
        with pytest.raises(DeliveryError, match="does not accept Computed Radiography Image Storage") as raised:
            destination.send([ResultObject("sr", "2.25.1", radiograph(1)), ResultObject("sc", "2.25.2", capture)])
        assert not isinstance(raised.value, DeliveryAwayError), "or nothing else would be sent for a while"
    finally:
        server.shutdown()


def test_a_folder_keeps_one_file_per_result(tmp_path: Path, results: list[ResultObject]) -> None:
    folder = Folder(tmp_path / "results")
    folder.send(results)
    folder.send(results)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == {
        "2.25.1.dcm": results[0].data, "2.25.2.dcm": results[1].data
    }  # fmt: skip


def test_files_half_written_by_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".2.25.1.dcm.7.8.part").write_bytes(b"half")
    (tmp_path / "2.25.2.dcm").write_bytes(b"whole")
    assert [path.name for path in Folder(tmp_path).path.iterdir()] == ["2.25.2.dcm"]


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PacsError, match="cannot make the folder of results"):
        Folder(tmp_path / "file")


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, results: list[ResultObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path / "results")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(DeliveryAwayError, match="No space left"):
        folder.send(results)
    assert list(folder.path.iterdir()) == []
