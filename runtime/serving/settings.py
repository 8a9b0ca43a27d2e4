"""How the service is set up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from cbmir.errors import UserError
from cbmir.files import read_secret
from cbmir.runtime.sockets import LOCAL_NAMES

#: Parts of other patients' entries that a gallery's owner may share, beside labels and distances.
SHAREABLE = ("reports", "thumbnails")
MOST_NEIGHBOURS = 1000  # of one answer

_LEAST = 16  # characters of a token
_ADVICE = "make one with: (umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' > TOKENFILE)"


@dataclass(frozen=True)
class Settings:
    """`token`: what a request must bear (`load_token`); None lets everyone in who asks for one of `hosts`, by any name
    where it is empty.

    At most `concurrency` requests are worked on at once and `queue` more wait or are being uploaded; each holds up to
    `max_upload_bytes`. `timeout_s` is for an upload, and again for its answer. `audit` is a file that gets a line of
    JSON for each request. `share` is of SHAREABLE. Raises UserError for other values.
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
            raise UserError(f"expected share to be of {', '.join(SHAREABLE)}; found {', '.join(unknown)}")


def load_token(path: Path) -> str:
    """The token in a file, as RFC 6750 has it. Raises UserError, which quotes nothing of it."""
    data = read_secret(str(path), "a token", _ADVICE)
    if not re.fullmatch(rb"[A-Za-z0-9._~+/-]+=*", data) or len(data) < _LEAST:
        raise UserError(f"{path}: expected a token of {_LEAST} to 4096 letters, digits and -._~+/ in one line, found "
                        f"{len(data)} bytes that are not; {_ADVICE}")  # fmt: skip
    return data.decode("ascii")
