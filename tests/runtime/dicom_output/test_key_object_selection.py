"""The selection of the patient's priors: which are marked, and the copies in their studies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydicom import Dataset

from cbmir.card import OF_PHANTOMS
from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.runtime import Finder, Pseudonyms, build_gallery, open_engine
from cbmir.runtime.dicom_output import make_results
from dicom_files import reread

pytest.importorskip("highdicom")
Make = Callable[..., bytes]
IMAGE = "1.2.826.0.1.1.11.3"
PRIORS = {f"1.2.826.0.1.1.{number}.3" for number in (1, 2, 3, 4)}  # not the one from 2022


def evidence(
    dataset: Dataset, sequence: str = "CurrentRequestedProcedureEvidenceSequence"
) -> dict[str, tuple[str, str]]:
    return {
        str(instance.ReferencedSOPInstanceUID): (str(study.StudyInstanceUID), str(series.SeriesInstanceUID))
        for study in dataset[sequence]
        for series in study.ReferencedSeriesSequence
        for instance in series.ReferencedSOPSequence
    }


def marked(dataset: Dataset) -> list[str]:
    return [
        str(item.ReferencedSOPSequence[0].ReferencedSOPInstanceUID)
        for item in dataset.ContentSequence if item.ValueType == "IMAGE"
    ]  # fmt: skip


def test_priors_of_the_patient_are_marked_most_similar_first(clinic: Any) -> None:
    kos = reread(clinic.results(kinds=["kos"]).kos)
    assert kos.Modality == "KO"
    assert kos.ConceptNameCodeSequence[0].CodeValue == "113009"
    first, *others = marked(kos)
    assert first == IMAGE and set(others) == PRIORS
    analysis = clinic.finder.analyze(clinic.image)
    distances = {
        f"1.2.826.0.1.1.{number}.3": float(
            ((clinic.finder.gallery.vector(str(number)) - analysis.embedding) ** 2).sum()
        )
        for number in (1, 2, 3, 4)
    }
    assert others == sorted(distances, key=lambda uid: distances[uid])
    assert evidence(kos) == {
        uid: (uid.removesuffix("3") + "1", uid.removesuffix("3") + "2") for uid in (IMAGE, *PRIORS)
    }
    texts = {one.ConceptNameCodeSequence[0].CodeValue: one for one in kos.ContentSequence if one.ValueType == "TEXT"}
    text = texts["113012"].TextValue
    assert "For research, not for diagnosis" in text and "study of 2013-03-04" in text and OF_PHANTOMS not in text


def test_a_model_trained_on_drawings_is_declared(clinic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clinic.finder, "card", clinic.finder.card.with_(training={"source": "phantom"}))
    texts = [one.TextValue for one in clinic.results(kinds=["kos"]).kos.ContentSequence if one.ValueType == "TEXT"]
    assert any(OF_PHANTOMS in text for text in texts)


def test_each_study_has_a_copy_that_refers_to_the_others(clinic: Any) -> None:
    results = clinic.results(kinds=["kos"])
    every = [reread(one) for one in results.datasets()]
    assert len(every) == 5
    assert {one.StudyInstanceUID for one in every} == {f"1.2.826.0.1.1.{number}.1" for number in (11, 1, 2, 3, 4)}
    for one in every:
        assert marked(one) == marked(every[0])
        assert evidence(one, "IdenticalDocumentsSequence") == {
            str(other.SOPInstanceUID): (str(other.StudyInstanceUID), str(other.SeriesInstanceUID))
            for other in every if other is not one
        }  # fmt: skip
    by_study = {str(one.StudyInstanceUID): one for one in every}
    assert by_study["1.2.826.0.1.1.2.1"].StudyDate == "20120304"
    assert by_study["1.2.826.0.1.1.2.1"].AccessionNumber == "A2"
    again = clinic.results(kinds=["kos"]).datasets()
    assert [one.SOPInstanceUID for one in again] == [one.SOPInstanceUID for one in every]


def test_a_selection_without_copies_is_valid(clinic: Any, errors_of: Callable[..., list[str]], tmp_path: Path) -> None:
    """It does not refer to copies that do not exist."""
    results = clinic.results(kinds=["kos"], copies=False)
    assert [name for name, _ in results.named()] == ["kos"]
    assert marked(results.kos) == marked(clinic.results(kinds=["kos"]).kos)
    assert "IdenticalDocumentsSequence" not in results.kos
    assert errors_of(results.kos, tmp_path / "kos") == []


def no_selection(results: Any) -> str:
    assert results.kos is None and results.datasets() == []
    warning: str = results.warnings[-1]
    return warning


def test_no_priors(clinic: Any, make_radiograph: Make, tiny_model: Path) -> None:
    results = clinic.results(make_radiograph(PatientID="NOBODY"), kinds=["kos"])
    assert results.kos is None and results.datasets() == []
    assert "not known" in no_selection(clinic.results(make_radiograph(PatientID=""), kinds=["kos"]))
    first = make_radiograph(StudyDate="20090101")  # older than all others
    assert clinic.results(first, kinds=["kos"]).kos is None
    with Finder.open(tiny_model, threads=1) as finder:
        results = make_results(clinic.image, finder.analyze(clinic.image), finder, kinds=["kos"])
        assert "No gallery" in no_selection(results)


def test_an_image_of_the_gallery_is_not_its_own_prior(clinic: Any) -> None:
    kos = clinic.results((clinic.folder / "own/3.dcm").read_bytes(), kinds=["kos"]).kos
    assert marked(kos)[0] == "1.2.826.0.1.1.3.3"
    assert set(marked(kos)[1:]) == {"1.2.826.0.1.1.1.3", "1.2.826.0.1.1.2.3"}


@pytest.mark.parametrize(
    "tags",
    [
        {"PatientBirthDate": "19510102"},
        {"PatientSex": "M"},
        {"PatientBirthDate": "", "PatientName": "Muster^Max"},
        {"PatientBirthDate": None, "PatientName": None},
        {"PatientName": "Muster^Max"},  # many share this id, and some the birth date
    ],
)
def test_another_patient_with_the_same_id_is_not_a_prior(
    clinic: Any, make_radiograph: Make, tags: dict[str, str]
) -> None:
    """An id alone does not identify a patient: it may be UNKNOWN."""
    warning = no_selection(clinic.results(make_radiograph(**tags), kinds=["kos"]))
    assert "5 image(s) of this patient" in warning and "do not name the same patient" in warning


@pytest.mark.parametrize(
    "tags",
    [
        {"IssuerOfPatientID": "ELSEWHERE"},  # the gallery's files have none
        {"PatientName": None},
        {"PatientBirthDate": "19000101"},  # is unknown
        {"PatientBirthDate": "", "PatientName": "MUSTER^ERIKA^^"},
    ],
)
def test_missing_attributes_do_not_exclude_priors(clinic: Any, make_radiograph: Make, tags: dict[str, str]) -> None:
    assert set(marked(clinic.results(make_radiograph(**tags), kinds=["kos"]).kos)[1:]) == PRIORS


def test_priors_that_cannot_be_read_are_counted(clinic: Any, tiny_model: Path, tmp_path: Path) -> None:
    """One file was deleted, one was replaced by another image, and one is not DICOM."""
    table = read_manifest(clinic.folder / "manifest.csv")
    rows = []
    for row in table.rows[:5]:
        path = tmp_path / row.image.name
        path.write_bytes(row.image.read_bytes())
        rows.append(replace(row, image=path))
    write_manifest(Manifest(table.labels, tuple(rows)), tmp_path / "m.csv")
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(tmp_path / "m.csv"), tmp_path / "gallery")
    (tmp_path / "1.dcm").unlink()
    (tmp_path / "2.dcm").write_bytes((tmp_path / "4.dcm").read_bytes())
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1) as finder:
        results = make_results(clinic.image, finder.analyze(clinic.image), finder, kinds=["kos"])
    assert results.kos is not None
    assert set(marked(results.kos)[1:]) == {"1.2.826.0.1.1.3.3", "1.2.826.0.1.1.4.3"}
    assert results.warnings[-1].startswith("2 image(s) of this patient")


def test_a_gallery_with_pseudonyms_needs_its_key(clinic: Any, tiny_model: Path, tmp_path: Path) -> None:
    key = Pseudonyms(bytes(range(32)))
    with open_engine(tiny_model, threads=1) as engine:
        table = read_manifest(clinic.folder / "manifest.csv")
        build_gallery(engine, table, tmp_path / "gallery", pseudonyms=key)
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1) as finder:
        results = make_results(clinic.image, finder.analyze(clinic.image), finder, kinds=["kos"])
        assert "without their key" in no_selection(results)
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1, pseudonyms=key) as finder:
        results = make_results(clinic.image, finder.analyze(clinic.image), finder, kinds=["kos"])
    assert results.kos is not None and set(marked(results.kos)[1:]) == PRIORS


def test_at_most_ten_priors(tiny_model: Path, tmp_path: Path, make_radiograph: Make, clinic: Any) -> None:
    rows = []
    for number in range(1, 13):
        (tmp_path / f"{number}.dcm").write_bytes(
            make_radiograph(seed=600 + number, number=number, StudyDate="20200101")
        )
        rows.append(Row(tmp_path / f"{number}.dcm", "CLINIC-0001", (1, 0, None), split="train"))
    write_manifest(Manifest(clinic.finder.card.labels, tuple(rows)), tmp_path / "m.csv")
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(tmp_path / "m.csv"), tmp_path / "gallery")
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1) as finder:
        results = make_results(clinic.image, finder.analyze(clinic.image), finder, kinds=["kos"])
    assert len(marked(results.kos)) == 11
