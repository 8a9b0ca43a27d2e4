"""Pseudonyms need a strong key, keep patients apart, and let the key's owner find patients."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import verify
from cbmir.runtime.gallery.pseudonyms import Pseudonyms, is_pseudonym

MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]
KEY = hashlib.sha512(b"a key").digest()


@pytest.fixture
def key() -> Pseudonyms:
    return Pseudonyms(KEY)


def test_pseudonyms_are_hmac_sha256(key: Pseudonyms) -> None:
    expected = hmac.new(KEY, "patient\0Jörg 7".encode(), hashlib.sha256).hexdigest()[:32]
    assert key.patient("Jörg 7") == f"patient-{expected}"
    assert key.study("Jörg 7").startswith("study-")
    assert key.study("Jörg 7")[6:] != expected
    assert key.patient("") == key.study("") == ""
    assert Pseudonyms(KEY).patient("7") == key.patient("7") != Pseudonyms(KEY[::-1]).patient("7")


def test_a_pseudonym_is_not_hashed_again(key: Pseudonyms) -> None:
    once = key.patient("7")
    assert is_pseudonym(once)
    assert key.patient(once) == once
    assert not is_pseudonym("patient-7")


@pytest.mark.parametrize(
    "weak", [b"", KEY[:31], b"hospital" * 16, b"\0" * 64, KEY[:31].hex().encode(), b"00" * 32, bytes(range(15)) * 9]
)
def test_a_weak_key_is_refused(weak: bytes) -> None:
    with pytest.raises(GalleryError, match=r"32 random bytes or more.*secrets\.token_hex"):
        Pseudonyms(weak)


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Pseudonyms
) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(KEY.hex().encode() + b"\n")
    monkeypatch.setenv("GALLERY_KEY", KEY.hex())
    assert Pseudonyms.load(str(file)).check == Pseudonyms.load("env:GALLERY_KEY").check != key.check
    assert KEY.hex()[:8] not in Pseudonyms.load(str(file)).check
    file.chmod(0o640)
    with pytest.raises(GalleryError, match="chmod 600"):
        Pseudonyms.load(str(file))
    for place, message in (("env:NO_KEY", "found none"), (str(tmp_path / "none"), "cannot read the key")):
        with pytest.raises(GalleryError, match=message):
            Pseudonyms.load(place)


@pytest.fixture
def filled(
    tmp_path: Path, tiny_card: ModelCard, key: Pseudonyms, make_entries: MakeEntries, make_vectors: MakeVectors
) -> Path:
    with Gallery.create(tmp_path / "g", tiny_card, pseudonyms=key) as store:
        store.add(make_entries(18), make_vectors(18))
    return tmp_path / "g"


def test_only_pseudonyms_are_stored(filled: Path) -> None:
    with Gallery.open(filled) as store:
        assert store.pseudonym_check
        entry = store.entry("id0007")
        assert is_pseudonym(entry.patient_id)
        assert is_pseudonym(entry.study_id)
        assert store.entry("id0008").patient_id == entry.patient_id != store.entry("id0000").patient_id
        store.compact()
    data = (filled / "gallery.sqlite").read_bytes()
    assert b"patient0001" not in data
    assert b"study0003" not in data
    assert KEY not in data
    assert entry.patient_id.encode() in data


def test_the_key_gives_access_to_the_patient(filled: Path, key: Pseudonyms, make_vectors: MakeVectors) -> None:
    with Gallery.open(filled, pseudonyms=key) as store:
        assert [store.has_patient(name) for name in ("patient0001", "patient0003")] == [True, False]
        with store.reading() as reader:
            known = reader.meta.patient_numbers({"patient0001", store.entry("id0000").patient_id})
            assert {int(n) for n in next(reader.columns()).patients} & known == known
        store.add([Entry("new", "", "patient0001")], make_vectors(1))
        assert store.entry("new").patient_id == store.entry("id0007").patient_id
        assert store.remove(study_ids=["study0000"]) == ("id0000", "id0001")
        of_the_patient = ("id0006", "id0007", "id0008", "id0009", "id0010", "id0011", "new")
        assert store.remove(patient_ids=["patient0001"]) == of_the_patient
    assert verify(filled) == []


def test_without_the_key_no_patient_can_be_looked_up(filled: Path, make_vectors: MakeVectors) -> None:
    with Gallery.open(filled) as store:
        entry = store.entry("id0007")
        for look_up in (
            lambda: store.has_patient("patient0001"),
            lambda: store.remove(study_ids=["study0001"]),
            lambda: store.add([Entry("new", "", "patient0001")], make_vectors(1)),
        ):
            with pytest.raises(GalleryError, match="expected their key to look up or write an id, found none"):
                look_up()
        # Calls without ids, or with pseudonyms that were read, need no key.
        assert store.has_patient(entry.patient_id)
        assert store.update([replace(entry, report="new")]) == 1
        assert store.entry("id0007").patient_id == entry.patient_id
        store.add([Entry("new", "", "")], make_vectors(1))
        assert len(store) == 19


def test_a_key_that_is_not_the_gallerys_is_an_error(filled: Path, tiny_card: ModelCard, key: Pseudonyms) -> None:
    """Otherwise it would find no patient, and a query's own patient would be among the neighbours."""
    with pytest.raises(GalleryError, match="keeps pseudonyms: expected the key for pseudonyms, found another"):
        Gallery.open(filled, pseudonyms=Pseudonyms(KEY[::-1]))
    Gallery.create(filled.with_name("plain"), tiny_card).close()
    with pytest.raises(GalleryError, match="keeps ids as they are: expected no key for pseudonyms, found one"):
        Gallery.open(filled.with_name("plain"), pseudonyms=key)
