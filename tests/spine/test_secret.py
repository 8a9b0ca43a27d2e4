"""Secrets: from a private file or the environment, and never quoted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbmir.errors import GalleryError, UserError
from cbmir.files import read_secret


def test_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b" horse\n")
    file.chmod(0o600)
    monkeypatch.setenv("CBMIR_TEST_SECRET", "horse\n")
    assert read_secret(str(file), "a key", "make one") == read_secret("env:CBMIR_TEST_SECRET", "a key", "") == b"horse"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("horse")
    file.chmod(mode)
    with pytest.raises(GalleryError, match="chmod 600") as raised:
        read_secret(str(file), "a key", "make one", GalleryError)
    assert "horse" not in str(raised.value)


def test_a_missing_or_oversized_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a key in the environment variable CBMIR_NO_SUCH"):
        read_secret("env:CBMIR_NO_SUCH", "a key", "make one")
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"cannot read a key .*; make one"):
            read_secret(str(place), "a key", "make one")
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 5000)
    file.chmod(0o600)
    with pytest.raises(UserError, match="4096 bytes at most"):
        read_secret(str(file), "a key", "make one")
