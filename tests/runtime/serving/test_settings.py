"""Settings and the token file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import UserError
from cbmir.runtime.serving.settings import Settings, load_token

TOKEN = "0123456789abcdef-._~+/=="


def test_defaults_are_for_this_machine_only() -> None:
    settings = Settings()
    assert settings.token is None
    assert set(settings.hosts) == {"127.0.0.1", "localhost", "[::1]"}
    assert not settings.share


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(Settings(token=TOKEN))


@pytest.mark.parametrize(
    "wrong",
    [{"concurrency": 0}, {"queue": -1}, {"max_upload_bytes": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")},
     {"share": frozenset({"names"})}],
)  # fmt: skip
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def test_token(file: Path) -> None:
    assert load_token(file) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_token_that_others_may_read_is_refused(mode: int, file: Path) -> None:
    file.chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        load_token(file)


@pytest.mark.parametrize("text", ["", "short", "a" * 15, "two lines of\nsomething", "Ångström-Ångström", "a" * 5000])
def test_an_invalid_token_is_refused_and_not_quoted(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match="expected a token") as refused:
        load_token(file)
    assert not text or text not in str(refused.value)


def test_a_missing_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make one with"):
        load_token(tmp_path / "absent")
    with pytest.raises(UserError, match="make one with"):
        load_token(tmp_path)
