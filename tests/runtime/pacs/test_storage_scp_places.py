"""The node's places: connections without an association do not block them, regardless of number and origin."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pynetdicom import AE
from pynetdicom.sop_class import Verification

from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs import storage_scp
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.storage_scp import MOST_ARRIVING, StorageScp
from pacs_rig import send_all, wait_for

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"  # Linux allows connections from both
FLOOD = 3 * MOST_ARRIVING


@pytest.fixture(params=[2])
def node(live: ReloadableFinder, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StorageScp]:
    """A node with two places, unless a test requests more."""
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        started = StorageScp(Intake(queue, live), port=0, max_associations=request.param)
        started.start()
        try:
            yield started
        finally:
            started.stop(grace=0)


@pytest.fixture
def flood(node: StorageScp) -> Iterator[Callable[..., list[socket.socket]]]:
    """Open connections from an address; each sends `first` and stays open."""
    with ExitStack() as stack:

        def start(address: str, count: int = FLOOD, first: bytes = b"") -> list[socket.socket]:
            opened = []
            for _ in range(count):
                connection = socket.create_connection((HERE, node.port), 30, source_address=(address, 0))
                stack.enter_context(connection)
                connection.sendall(first)
                opened.append(connection)
            return opened

        yield start


def request(called: str) -> bytes:
    """An A-ASSOCIATE-RQ for Verification, made by pynetdicom."""
    with socket.create_server((HERE, 0)) as server:
        ae = AE()
        ae.acse_timeout = 0.01
        ae.add_requested_context(Verification)
        ae.associate(*server.getsockname(), ae_title=called)
        connection, _ = server.accept()
        with connection:
            return connection.recv(10_000)


@pytest.mark.parametrize("first", [b"", b"\1", b"\1\0\0\0\1\0begun"], ids=["silent", "a byte", "begun"])
@pytest.mark.parametrize("address", [ELSEWHERE, HERE])
def test_idle_connections_block_no_others(
    node: StorageScp, flood: Callable[..., list[socket.socket]], radiograph: Callable[..., bytes],
    address: str, first: bytes,
) -> None:  # fmt: skip
    flood(address, first=first)
    assert send_all(node.port, [radiograph(1), radiograph(2)]) == [0, 0]
    assert len(node._server.arriving) <= MOST_ARRIVING
    assert not node._ae.active_associations or wait_for(lambda: not node._ae.active_associations, "it has ended")


def test_storescu_gets_in(
    node: StorageScp, flood: Callable[..., list[socket.socket]], radiograph: Callable[..., bytes], tmp_path: Path,
    require_pacs: Callable[..., None],
) -> None:  # fmt: skip
    require_pacs("storescu")
    (tmp_path / "chest.dcm").write_bytes(radiograph())
    flood(ELSEWHERE)
    command = ["storescu", "-aec", "CBMIR", HERE, str(node.port), str(tmp_path / "chest.dcm")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_address_with_the_most_connections_makes_room(
    node: StorageScp, flood: Callable[..., list[socket.socket]]
) -> None:
    """A slow sender at another address stays, although its connection is older."""
    flood(HERE, 1)
    wait_for(lambda: HERE in node._server.arriving.values(), "it is there")
    flood(ELSEWHERE)
    wait_for(lambda: len(node._server.arriving) == MOST_ARRIVING, "the rest has made way")
    assert list(node._server.arriving.values()).count(HERE) == 1


def test_refused_peers_that_stay_take_no_slot(
    node: StorageScp, flood: Callable[..., list[socket.socket]], radiograph: Callable[..., bytes]
) -> None:
    """pynetdicom waits for the rest of the unit that the peer began to send."""
    for count in range(1, 9):  # one by one, or those not yet refused would fill the address's share
        flood(ELSEWHERE, 1, request("NOBODY") + b"\4\0\0")
        wait_for(
            lambda count=count: len(node._server.active_associations) >= count and not node._ae.active_associations,
            "it is turned away, and stays",
        )
    assert send_all(node.port, [radiograph()]) == [0]


def test_closed_connections_are_forgotten_immediately(
    node: StorageScp, flood: Callable[..., list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_scp, "ARRIVAL_TIMEOUT", 3600)
    opened = flood(ELSEWHERE, 10)
    wait_for(lambda: len(node._server.arriving) == 10, "all are there")
    for connection in opened:
        connection.close()
    wait_for(lambda: not node._server.arriving, "none is there")


def test_slots_are_limited(node: StorageScp) -> None:
    ae = AE()
    ae.add_requested_context(Verification)
    opened = [ae.associate(HERE, node.port, ae_title="CBMIR") for _ in range(3)]
    assert [each.is_established for each in opened] == [True, True, False]
    for each in opened[:2]:
        each.release()


@pytest.mark.parametrize("node", [4], indirect=True)
def test_a_quarter_of_the_slots_is_for_other_addresses(node: StorageScp) -> None:
    ae = AE()
    ae.add_requested_context(Verification)

    def ask(address: str) -> Any:
        return ae.associate(HERE, node.port, ae_title="CBMIR", bind_address=(address, 0))

    opened = [ask(HERE) for _ in range(4)]
    assert [each.is_established for each in opened] == [True, True, True, False]
    assert opened[3].is_rejected
    opened.append(ask(ELSEWHERE))
    assert opened[4].is_established
    for each in (*opened[:3], opened[4]):
        each.release()
    wait_for(lambda: not node._ae.active_associations, "all have ended")
    again = ask(HERE)
    assert again.is_established
    again.release()
