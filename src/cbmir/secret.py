"""Reading a secret from where only its owner can read it."""

from __future__ import annotations

import os
from pathlib import Path

from cbmir.errors import UserError

_MOST_BYTES = 4096


def read_secret(place: str, what: str, advice: str, error: type[UserError] = UserError) -> bytes:
    """The bytes of a file, or of an environment variable as `env:NAME`, without the white space around them.

    `what` names the secret in messages and `advice` says how to get one; a message quotes nothing of it. Raises `error`
    where there is none, where the file is open to others than its owner (POSIX), and for more than 4,096 bytes.
    """
    if place.startswith("env:"):
        name = place.removeprefix("env:")
        text = os.environ.get(name)
        if text is None:
            raise error(f"expected {what} in the environment variable {name}, found it not set; {advice}")
        data = os.fsencode(text)
    else:
        try:
            with Path(place).open("rb") as file:
                # Of the file that is read, whatever its name leads to a moment later.
                if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
                    raise error(f"{place}: expected {what} in a file that only its owner may read, found one open to "
                                f"others; run: chmod 600 {place}")  # fmt: skip
                data = file.read(_MOST_BYTES + 1)
        except OSError as failure:
            raise error(f"{place}: cannot read {what} ({failure.strerror}); {advice}") from failure
    if len(data) > _MOST_BYTES:
        raise error(f"{place}: expected {what} of {_MOST_BYTES} bytes at most, found more; {advice}")
    return data.strip()
