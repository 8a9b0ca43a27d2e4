"""Removed data is gone from every file: the database, its log, and derived files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import Gallery, index_files
from cbmir.runtime.gallery.hnsw import PcaInt8Codec
from cbmir.runtime.gallery.maintenance import verify
from cbmir.runtime.gallery.schema import patient_number, study_number
from gallery_contents import stored_bytes

COUNT = 60
MakeVectors = Callable[..., NDArray[np.float32]]


def codes(vector: NDArray[np.float32], vectors: NDArray[np.float32]) -> dict[str, bytes]:
    """The ways in which files may contain an embedding, with an index of these vectors."""
    bits = vector.view(np.uint32)
    return {
        "float32": vector.tobytes(),
        "bf16": ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes(),  # rounded to even
        "int8": PcaInt8Codec.fitted(vectors, COUNT).codes(vector[None]).tobytes(),
    }


def texts(number: int) -> dict[str, bytes]:
    """The data of an entry besides its embedding."""
    patient, study = f"patient{number // 6:04}", f"study{number // 2:04}"
    return {
        "id": b"id%04d" % number, "path": b"/images/%04d.png" % number, "report": b"Bericht %04d" % number,
        "patient": patient.encode(), "study": study.encode(), "uid": b"1.2.%d" % number, "digest": b"%064x" % number,
        "thumbnail": b"jpeg%04d" % number, "patient's number": patient_number(patient).to_bytes(8, "little"),
        "study's number": study_number(study).to_bytes(8, "little"),
    }  # fmt: skip


@pytest.fixture
def path(store: Gallery) -> Path:
    store.close()
    return store.path


@pytest.mark.parametrize("setting", ["exact", "bf16", "int8"])
@pytest.mark.parametrize("by", ["ids", "patient_ids", "study_ids"])
def test_removed_entries_leave_no_trace(path: Path, make_vectors: MakeVectors, setting: str, by: str) -> None:
    vectors = make_vectors(COUNT)
    own = setting if setting != "exact" else "float32"
    with Gallery.open(path) as gallery:
        gallery.rebuild(setting)
        gallery.search(vectors[0], 5)
        before = stored_bytes(path)
        for number in (20, 30):  # check the search itself: all of it is there before
            for name, trace in texts(number).items() | {(own, codes(vectors[number], vectors)[own])}:
                assert trace in before, name
        gone = {"ids": ["id0020"], "patient_ids": ["patient0003"], "study_ids": ["study0010"]}[by]
        gallery.remove(**{by: gone})
        rest = np.stack([gallery.vector(name) for name in gallery.ids()])
        for again in range(2):
            after = stored_bytes(path)
            traces = [*texts(20).items(), *codes(vectors[20], vectors).items(), *codes(vectors[20], rest).items()]
            left = [name for name, trace in traces if trace in after]
            assert left == {
                "ids": ["patient", "study", "patient's number", "study's number"],
                "patient_ids": [],
                "study_ids": ["patient", "patient's number"],
            }[by]  # fmt: skip
            assert codes(vectors[30], rest)[own] in after
            if not again:
                gallery.compact()
        assert "id0020" not in {hit.entry.id for hit in gallery.search(vectors[20], COUNT).hits}
    assert verify(path) == []


def test_an_updated_report_leaves_no_trace(path: Path) -> None:
    with Gallery.open(path) as gallery:
        gallery.update([replace(gallery.entry("id0020"), report="nothing to see", patient_id="")])
        gallery.compact()
    assert b"Bericht 0020" not in stored_bytes(path)
    assert b"Bericht 0021" in stored_bytes(path)


@pytest.mark.parametrize("then", ["search", "compact", "rebuild", "remove another"])
def test_an_interrupted_removal_is_completed(
    path: Path, make_vectors: MakeVectors, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It stops after the database and before the derived files, which the next call removes."""
    vectors = make_vectors(COUNT)

    def stop(*_: object) -> bool:
        raise KeyboardInterrupt

    with Gallery.open(path) as gallery:
        gallery.write_index()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(index_files, "drop", stop)
            gallery.remove(patient_ids=["patient0003"])
    with Gallery.open(path) as gallery:
        match then:
            case "search":
                gallery.search(vectors[0], 3)
            case "compact":
                gallery.compact()
            case "rebuild":
                gallery.rebuild()
            case "remove another":
                gallery.remove(ids=["id0059"])
    assert vectors[20].tobytes() not in stored_bytes(path)
    assert patient_number("patient0003").to_bytes(8, "little") not in stored_bytes(path)


def test_no_name_is_in_an_error_or_a_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Gallery.open(path) as gallery:
        with caplog.at_level("DEBUG"):
            gallery.write_index()
            gallery.remove(patient_ids=["patient0003"])
            with gallery.writing() as writer:
                writer.database.execute("UPDATE entry SET patient_id = 'x' WHERE number = 8")
            with pytest.raises(GalleryError) as caught:
                gallery.entry("id0007")
        assert "patient0" not in caplog.text + str(caught.value)
        assert all("patient0" not in problem.what + problem.remedy for problem in verify(path))
