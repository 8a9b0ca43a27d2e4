"""Archives that stop in the middle of a unit, announce too much, never end or read nothing: sending fails in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from pynetdicom import AE, AllStoragePresentationContexts, evt
from pynetdicom.pdu import P_DATA_TF

from cbmir.errors import DeliveryAwayError
from cbmir.runtime.pacs import bounded_socket, destinations
from cbmir.runtime.pacs.destinations import Address, StoreScu
from cbmir.runtime.pacs.jobs import ResultObject
from pacs_rig import make_radiograph

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_socket, "STALL_TIMEOUT", 0.5)
    monkeypatch.setattr(destinations, "DIMSE_TIMEOUT", 1.0)
    monkeypatch.setattr(destinations, "ACSE_TIMEOUT", 1.0)


@contextmanager
def archive(*handlers: Any) -> Iterator[StoreScu]:
    """Run an archive with these handlers, and yield a sender to it."""
    ae = AE(ae_title="ARCHIVE")
    ae.supported_contexts = AllStoragePresentationContexts
    server = ae.start_server(("127.0.0.1", 0), block=False, evt_handlers=list(handlers))
    assert server is not None
    try:
        yield StoreScu(Address("ARCHIVE", "127.0.0.1", server.server_address[1]))
    finally:
        server.shutdown()


def gives_up(sender: StoreScu, data: bytes) -> str:
    """The error of the sender, run in a thread that may stay behind: without limits it would hang."""
    said: list[str] = []

    def send() -> None:
        try:
            sender.send([ResultObject("sr", "2.25.1", data)])
        except DeliveryAwayError as error:
            said.append(str(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return said[0]


@pytest.mark.parametrize("answer", [b"\4", b"\4\0\0\0\1\0\0", b"\4\0\xff\xff\xff\xff", b"\5\0\0\0\0\4"])
def test_an_incomplete_answer(short_timeouts: None, radiograph: Callable[..., bytes], answer: bytes) -> None:
    done = threading.Event()

    def store(event: Any) -> int:
        event.assoc.dul.socket.socket.sendall(answer)
        done.wait()
        return 0

    with archive((evt.EVT_C_STORE, store)) as sender:
        try:
            assert "127.0.0.1" in gives_up(sender, radiograph())
        finally:
            done.set()


def test_an_answer_without_an_end(
    short_timeouts: None, radiograph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends complete units, each in time, but no last one."""
    monkeypatch.setattr(destinations, "DELIVERY_TIMEOUT", 2.0)
    monkeypatch.setattr(destinations, "DIMSE_TIMEOUT", 3600.0)
    fragment = b"\0\0\0\x06\1\1" + bytes(4)  # of a command, not the last one

    def store(event: Any) -> int:
        try:
            while True:
                event.assoc.dul.socket.socket.sendall(b"\4\0" + len(fragment).to_bytes(4, "big") + fragment)
        except OSError:
            return 0

    with archive((evt.EVT_C_STORE, store)) as sender:
        assert "127.0.0.1" in gives_up(sender, radiograph())


def test_an_archive_that_reads_nothing(short_timeouts: None) -> None:
    done = threading.Event()

    def received(event: Any) -> None:
        if isinstance(event.pdu, P_DATA_TF):
            done.wait()

    data = make_radiograph(np.zeros((4096, 4096), np.uint8))
    with archive((evt.EVT_PDU_RECV, received)) as sender:
        try:
            assert "127.0.0.1" in gives_up(sender, data)
        finally:
            done.set()
