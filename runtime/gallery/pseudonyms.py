"""Keyed pseudonyms: a gallery may store the HMAC-SHA256 of patients' and studies' ids instead of the ids.

Only a holder of the key can find the patient of a pseudonym; a hash without a key could be reversed by trying all ids.
The key is stored separately from the gallery. Without it, a gallery with pseudonyms can be searched like any other, but
no patient can be looked up by id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Self

from cbmir.errors import GalleryError
from cbmir.files import read_secret

#: Minimum number of bytes in a key, and of different bytes among them.
LEAST_BYTES, LEAST_DIFFERENT = 32, 16
_PSEUDONYM = re.compile(r"(patient|study)-[0-9a-f]{32}")
_ADVICE = "make one with: python -c 'import secrets; print(secrets.token_hex(32))' > KEYFILE"


class Pseudonyms:
    """A key that turns ids into pseudonyms. A pseudonym stays as it is, so an entry that was read can be written."""

    def __init__(self, key: bytes) -> None:
        """A key of hexadecimal digits is as strong as the bytes that they encode, so 64 digits count as 32 bytes.

        Raises:
            GalleryError: The key is weak: it has fewer than 32 bytes, or fewer than 16 different ones.
        """
        try:
            strength = bytes.fromhex(key.decode("ascii"))
        except ValueError:
            strength = key
        if len(strength) < LEAST_BYTES or len(set(strength)) < LEAST_DIFFERENT:
            raise GalleryError(
                f"expected a key for pseudonyms of {LEAST_BYTES} random bytes or more, found {len(strength)} bytes of "
                f"which {len(set(strength))} differ; {_ADVICE}"
            )
        self._key = key

    @classmethod
    def load(cls, place: str) -> Self:
        """Load the key from a file, or from an environment variable as `env:NAME`, ignoring surrounding white space.

        Raises:
            GalleryError: The key is missing or weak, or other users can read the file.
        """
        return cls(read_secret(place, "the key for pseudonyms", _ADVICE, GalleryError))

    @classmethod
    def throw_away(cls) -> Self:
        """Create pseudonyms with a random key that is not stored."""
        return cls(secrets.token_bytes(64))

    @property
    def check(self) -> str:
        """A text that identifies the key without revealing it."""
        return self._hashed("check", "cbmir")

    def patient(self, id: str) -> str:
        """Return `patient-` and 32 hexadecimal digits; an empty (unknown) id stays empty."""
        return id if not id or is_pseudonym(id) else self._hashed("patient", id)

    def study(self, id: str) -> str:
        """Return `study-` and 32 hexadecimal digits; an empty (unknown) id stays empty."""
        return id if not id or is_pseudonym(id) else self._hashed("study", id)

    def _hashed(self, kind: str, text: str) -> str:
        message = f"{kind}\0{text}".encode("utf-8", "surrogatepass")
        return f"{kind}-{hmac.new(self._key, message, hashlib.sha256).hexdigest()[:32]}"


def case_id(key: str, entry_id: str) -> str:
    """Return `case-` and 16 hexadecimal digits for an entry: its HMAC-SHA256 under the gallery's secret key."""
    return f"case-{hmac.new(key.encode(), entry_id.encode(), hashlib.sha256).hexdigest()[:16]}"


def is_pseudonym(id: str) -> bool:
    """Return whether a text has the form of a pseudonym."""
    return _PSEUDONYM.fullmatch(id) is not None


class Keys:
    """The way a gallery stores ids: as pseudonyms under the key with this `check`, or unchanged if `check` is empty."""

    def __init__(self, path: Path, check: str, pseudonyms: Pseudonyms | None) -> None:
        """Raises GalleryError for a key that is not the gallery's; none at all is only needed for looking up ids."""
        self._path, self.check, self._given = path, check, pseudonyms
        if pseudonyms and pseudonyms.check != check:
            kept, found = ("pseudonyms: expected the", "another") if check else ("ids as they are: expected no", "one")
            raise GalleryError(f"{path}: this gallery keeps {kept} key for pseudonyms, found {found}")

    @property
    def fits(self) -> bool:
        """Whether ids can be looked up, because the key was given or none is needed."""
        return bool(self._given) == bool(self.check)

    def patient(self, id: str) -> str:
        """Return a patient's id as the gallery stores it. Raises GalleryError if the key is missing."""
        needed = self._needed(id)
        return needed.patient(id) if needed else id

    def study(self, id: str) -> str:
        """Return a study's id as the gallery stores it. Raises GalleryError as `patient` does."""
        needed = self._needed(id)
        return needed.study(id) if needed else id

    def _needed(self, id: str) -> Pseudonyms | None:
        if not id or (self.check and is_pseudonym(id)):
            return None
        if not self.fits:
            raise GalleryError(f"{self._path}: this gallery keeps pseudonyms: expected their key to look up or write "
                               "an id, found none")  # fmt: skip
        return self._given
