"""An optional login: one name and password for everything that the server gives (HTTP Basic).

It keeps others on a network out. The password crosses the network in clear unless HTTPS is in front of the demo.
"""

from __future__ import annotations

import base64
from typing import Self

from cbmir.errors import UserError
from cbmir.files import read_secret
from cbmir.runtime.serving.security import Credential

_SHORTEST = 8
_ADVICE = "write it with: (umask 077; echo NAME:PASSWORD > LOGINFILE)"


class Login(Credential):
    """A name and a password, never shown."""

    def __init__(self, login: bytes) -> None:
        """`login` is NAME:PASSWORD. Raises UserError where the password is short."""
        name, _, password = login.partition(b":")
        if not name or len(password) < _SHORTEST:
            raise UserError(f"expected NAME:PASSWORD, the password of at least {_SHORTEST} characters, found less")
        super().__init__("Basic", base64.b64encode(login), "the demo's name and password")

    @classmethod
    def load(cls, place: str) -> Self:
        """From a file that only its owner can read, or an environment variable as `env:NAME`. Raises UserError."""
        return cls(read_secret(place, "a login as NAME:PASSWORD", _ADVICE))
