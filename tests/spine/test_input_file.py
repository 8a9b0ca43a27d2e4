"""Untrusted files: not regular files, too large ones, and JSON that is nested too deeply."""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbmir import input_file
from cbmir.input_file import input_digest, open_input, parse_json, read_input, read_json, read_unpacked

READERS: list[Callable[[Path], Any]] = [
    open_input, lambda path: read_input(path, 10), lambda path: input_digest(path, 10), read_unpacked, read_json,
]  # fmt: skip


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_a_device_a_socket_and_a_folder_are_refused(read: Callable[[Path], Any], tmp_path: Path) -> None:
    pipe, place = tmp_path / "pipe.gz", tmp_path / "socket"
    os.mkfifo(pipe)  # opening it would wait for a writer
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        for path in (pipe, Path("/dev/zero"), Path("/dev/tty"), place):
            with pytest.raises(OSError, match="a device or pipe"):
                read(path)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_a_file_that_is_replaced_by_a_pipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    of_file = file.stat()
    monkeypatch.setattr(Path, "stat", lambda path: of_file)  # it was a file until now
    with pytest.raises(OSError, match="a device or pipe"):
        open_input(pipe)


def test_no_more_bytes_are_read_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_input(path, 10) == b"0123456789"
    assert input_digest(path, 10) == hashlib.sha256(b"0123456789").hexdigest()
    with pytest.raises(OSError, match="at most 9 bytes, found more"):
        read_input(path, 9)
    with pytest.raises(OSError, match="at most 9 bytes, found more"):
        input_digest(path, 9)
    assert read_input("/proc/self/status", 2**20)  # its reported size is 0
    with pytest.raises(OSError, match="at most 9 bytes, found more"):
        read_input("/proc/self/status", 9)


def test_the_unpacked_size_of_a_gzip_file_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(b"a" * 3_000_000))
    assert read_unpacked(path, 3_000_000) == b"a" * 3_000_000
    with pytest.raises(OSError, match="at most 2,999,999 bytes, found more"):
        read_unpacked(path, 2_999_999)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged gzip file"):
        read_unpacked(path)


def test_the_depth_of_json_is_limited() -> None:
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('{"a": [1, "\\u00e9[[[", null]}') == {"a": [1, "é[[[", None]}
    for deep in ("[" * 66 + "]" * 66, "[" * 200_000, "[" * 200_000 + "]" * 200_000, '{"a":' * 80 + "1" + "}" * 80):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            parse_json(deep)


@pytest.mark.parametrize("text", ["", "{", "[1,]", '"\\ud800"', "9" * 5000])
def test_invalid_json_raises_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_read_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(b'{"name": "\xff"}')
    with pytest.raises(ValueError, match="utf-8"):
        read_json(path)
    path.write_text("[1, 2]")
    assert read_json(path) == [1, 2]
    monkeypatch.setattr(input_file, "MOST_JSON", 5)
    with pytest.raises(OSError, match="at most 5 bytes, found more"):
        read_json(path)
    with pytest.raises(ValueError, match="more than 5 characters"):
        parse_json("[1, 2]")


def test_surrogates_are_accepted_only_in_file_names() -> None:
    assert parse_json('"\\udce9.png"', "surrogateescape") == "\udce9.png"
    with pytest.raises(ValueError, match="surrogates not allowed"):
        parse_json('"\\ud800"', "surrogateescape")
