"""Uploads before they are read: their limits, and that none is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

from cbmir.demo import upload_store as module
from cbmir.demo.upload_store import UploadStore
from cbmir.runtime.serving.problems import Problem


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UploadStore:
    """A store for 500 bytes per visitor and 1,000 in all; an upload counts as 50 or more."""
    monkeypatch.setattr(module, "MOST_OF_FILE", 200)
    monkeypatch.setattr(module, "MOST_OF_VISITOR", 500)
    monkeypatch.setattr(module, "MOST_IN_ALL", 1000)
    monkeypatch.setattr(module, "_LEAST", 50)
    return UploadStore(tmp_path, set())


def form(*files: bytes, name: str = "chest.png", fields: int = 0, end: bytes = b"--x--\r\n") -> bytes:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="%s"\r\n\r\n%s\r\n' % (name.encode(), file)
        for file in files
    ]
    parts += [b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n1\r\n' % number for number in range(fields)]
    return b"".join(parts) + end


def send(
    store: UploadStore,
    body: bytes,
    visitor: str = "a",
    *,
    cut: bool = False,
    kind: str = "multipart/form-data; boundary=x",
) -> list[Path]:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": cut}, {"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind.encode())], "client": (visitor, 1)}

    async def receive() -> Message:
        return messages.pop(0)

    return [Path(path) for path in asyncio.run(store.take(Request(scope, receive)))]


def refused(status: int, act: Callable[[], object]) -> str:
    with pytest.raises(Problem) as problem:
        act()
    assert problem.value.status_code == status
    return str(problem.value.detail)


def test_the_path_of_an_upload_cannot_be_guessed(store: UploadStore, tmp_path: Path) -> None:
    first, second = send(store, form(b"same", b"same"))
    (third,) = send(store, form(b"same"))
    assert len({first, second, third}) == 3
    assert first.read_bytes() == b"same"
    assert first.name == "chest.png"
    assert len(first.parent.name) >= 32
    assert first.parent.parent == tmp_path
    assert store._registered == {str(first), str(second), str(third)}


@pytest.mark.parametrize("name", ["..", "../../evil.png", "/etc/passwd", ".", "", "a/b/c.png", "%2e%2e", "\0"])
def test_no_name_leads_out_of_the_folder(name: str, store: UploadStore, tmp_path: Path) -> None:
    (place,) = send(store, form(b"data", name=name))
    assert place.is_file()
    assert place.resolve().parent.parent == tmp_path.resolve()


def test_a_visitors_unopened_uploads_make_room_for_newer_ones(store: UploadStore) -> None:
    (others,) = send(store, form(bytes(100)), "b")
    places = [send(store, form(bytes(150)))[0] for _ in range(4)]  # each counts about 230 bytes with its form
    assert [place.exists() for place in places] == [False, False, True, True]
    assert others.exists()


def test_all_visitors_together_are_limited_too(store: UploadStore) -> None:
    places = [send(store, form(bytes(150)), visitor)[0] for visitor in "abcdef"]
    assert [place.exists() for place in places] == [False, False, True, True, True, True]


def test_uploads_that_were_read_no_longer_count(store: UploadStore) -> None:
    places = [send(store, form(bytes(150)))[0] for _ in range(2)]
    places[1].unlink()
    send(store, form(bytes(150)))
    assert places[0].exists()


def test_many_small_uploads_count_as_larger_ones(store: UploadStore) -> None:
    store._held.clear()
    places = [send(store, form(b"", name="a"), str(number))[0] for number in range(30)]
    assert sum(place.exists() for place in places) <= 1000 // 50


def test_uploads_count_while_they_arrive(store: UploadStore) -> None:
    """Two unfinished uploads leave no room for a third, and neither is cut short."""

    async def run() -> list[object]:
        go = asyncio.Event()

        async def take(body: bytes) -> list[str]:
            parts = [body[:200], body[200:]]

            async def receive() -> Message:
                if len(parts) == 1:
                    await go.wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            headers = [(b"content-type", b"multipart/form-data; boundary=x")]
            return await store.take(Request({"type": "http", "method": "POST", "headers": headers,
                                             "client": ("a", 1)}, receive))  # fmt: skip

        tasks = [asyncio.create_task(take(form(bytes(150)))) for _ in range(3)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        go.set()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    answers = asyncio.run(run())
    failed = [answer for answer in answers if isinstance(answer, Problem)]
    assert [problem.status_code for problem in failed] == [429]


def test_nothing_is_left_of_refused_uploads(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 2)
    monkeypatch.setattr(module, "_MOST_FIELDS", 2)
    too_large = refused(413, lambda: send(store, form(bytes(201))))
    assert "files of at most" in too_large
    assert "at most 500 bytes" in refused(413, lambda: send(store, form(bytes(501))))
    refused(400, lambda: send(store, form(bytes(100), end=b""), cut=True))
    assert "at most 2 files" in refused(400, lambda: send(store, form(b"", b"", b"")))
    refused(400, lambda: send(store, form(fields=3)))
    refused(415, lambda: send(store, b"{}", kind="application/json"))
    refused(400, lambda: send(store, b"x", kind="multipart/form-data"))
    assert send(store, form(fields=1)) == []
    assert list(tmp_path.iterdir()) == []
    assert store._held == []


def test_nothing_is_left_if_the_disk_is_full(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", fail)
    with pytest.raises(OSError, match="No space"):
        send(store, form(b"data"))
    assert list(tmp_path.iterdir()) == []
    assert store._held == []
