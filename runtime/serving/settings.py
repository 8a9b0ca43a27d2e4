"""The settings of the service."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from cbmir.errors import UserError
from cbmir.files import read_secret
from cbmir.runtime.sockets import LOCAL_NAMES

#: Parts of other patients' entries that a gallery's owner may share, besides labels and distances.
SHAREABLE = ("reports", "thumbnails")
MOST_NEIGHBOURS = 1000  # per answer

_LEAST = 16  # characters of a token
_ADVICE = "make one with: (umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' > TOKENFILE)"


@dataclass(frozen=True)
class Settings:
    """Settings of the service. `token` is what a request must contain (`load_token`); without one, everyone is admitted
    who uses one of the host names `hosts`, or any name if that is empty.

    At most `concurrency` requests run at the same time, and `queue` more wait or are being uploaded; each has up to
    `max_upload_bytes`. `timeout_s` is for an upload, and again for its answer. `audit` is a file that gets a line of
    JSON for each request. `share` is a subset of SHAREABLE. Raises UserError for invalid values.
    """

    token: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = LOCAL_NAMES
    max_upload_bytes: int = 64 * 2**20
    concurrency: int = 2
    queue: int = 32
    timeout_s: float = 30.0
    audit: Path | None = None
    share: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, least in (("max_upload_bytes", 1), ("concurrency", 1), ("queue", 0)):
            if getattr(self, name) < least:
                raise UserError(f"expected {name} of at least {least}, found {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise UserError(f"expected timeout_s above 0, found {self.timeout_s}")
        if unknown := sorted(self.share - set(SHAREABLE)):
            raise UserError(f"expected share to be among {', '.join(SHAREABLE)}; found {', '.join(unknown)}")


def load_token(path: Path) -> str:
    """Read the token in a file (RFC 6750). Raises UserError, which never quotes the token."""
    data = read_secret(str(path), "a token", _ADVICE)
    if not re.fullmatch(rb"[A-Za-z0-9._~+/-]+=*", data) or len(data) < _LEAST:
        raise UserError(f"{path}: expected a token of {_LEAST} to 4096 letters, digits and -._~+/ in one line, found "
                        f"{len(data)} bytes that are not; {_ADVICE}")  # fmt: skip
    return data.decode("ascii")
