"""The content of a DICOM object by class, modality, body part and view: codes, words, and contradictions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import Dataset
from pydicom.uid import (
    CTImageStorage,
    DigitalXRayImageStorageForPresentation,
    DigitalXRayImageStorageForProcessing,
    MRImageStorage,
    SecondaryCaptureImageStorage,
    UltrasoundImageStorage,
)

from cbmir.cli import cli
from cbmir.errors import DicomImageError
from cbmir.runtime import Finder
from cbmir.runtime.imaging.dicom_header import LATERAL_VIEWS, OTHER_VIEWS
from cbmir.runtime.imaging.reader import read_image
from dicom_files import make_dicom

PA, AP, LEFT_LATERAL, FRONTAL, OBLIQUE = "272479007", "399348003", "399173006", "399033003", "399182000"
CHEST, KNEE = "51185008", "72696002"


def coded(value: str | None, scheme: str | None = "SCT") -> list[Dataset]:
    item = Dataset()
    item.CodeMeaning = "SECRET^MEANING"
    if scheme is not None:
        item.CodingSchemeDesignator = scheme
    if value is not None:
        item.CodeValue = value
    return [item]


@pytest.mark.parametrize("uid", [DigitalXRayImageStorageForPresentation, SecondaryCaptureImageStorage, None])
def test_classes_that_are_read(uid: str | None) -> None:
    radiograph = read_image(make_dicom(SOPClassUID=uid, PresentationIntentType="FOR PRESENTATION"))
    assert radiograph.warnings == ()


@pytest.mark.parametrize(
    ("uid", "name"),
    [(CTImageStorage, "CT Image"), (MRImageStorage, "MR Image"), (UltrasoundImageStorage, "Ultrasound Image")],
)
def test_a_class_that_contradicts_the_modality(uid: str, name: str) -> None:
    with pytest.raises(DicomImageError, match=rf"SOPClassUID \(0008,0016\).*as Modality says, found '{name} Storage'"):
        read_image(make_dicom(SOPClassUID=uid))


@pytest.mark.parametrize("modality", ["CT", "MR", "US", "XA"])
def test_other_modalities(modality: str) -> None:
    with pytest.raises(DicomImageError, match=rf"Modality \(0008,0060\).*found '{modality}'"):
        read_image(make_dicom(Modality=modality))


def test_a_private_class_is_a_warning() -> None:
    (warning,) = read_image(make_dicom(SOPClassUID="1.2.40.0.13.1.99")).warnings
    assert "SOPClassUID (0008,0016) is not a standard class" in warning


def test_raw_detector_values_are_refused() -> None:
    with pytest.raises(DicomImageError, match=r"PresentationIntentType \(0008,0068\).*found 'FOR PROCESSING'"):
        read_image(make_dicom(PresentationIntentType="FOR PROCESSING"))
    with pytest.raises(DicomImageError, match=r"SOPClassUID \(0008,0016\).*found 'FOR PROCESSING'"):
        read_image(
            make_dicom(SOPClassUID=DigitalXRayImageStorageForProcessing, PresentationIntentType="FOR PRESENTATION")
        )


@pytest.mark.parametrize(
    ("photometric", "shape", "warnings"),
    [
        ("MONOCHROME1", "INVERSE", 0),
        ("MONOCHROME2", "IDENTITY", 0),
        ("MONOCHROME1", "IDENTITY", 1),
        ("MONOCHROME2", "INVERSE", 1),
    ],
)
def test_presentation_lut_shape_only_warns(photometric: str, shape: str, warnings: int) -> None:
    plain = read_image(make_dicom(PhotometricInterpretation=photometric))
    radiograph = read_image(make_dicom(PhotometricInterpretation=photometric, PresentationLUTShape=shape))
    assert (radiograph.pixels == plain.pixels).all()
    assert [w.split()[0] for w in radiograph.warnings] == ["PresentationLUTShape"] * warnings


@pytest.mark.parametrize("code", [CHEST, "816094009", "T-D3000", "39607008", "43799004", "113197003"])
def test_the_region_of_a_dx_image(code: str) -> None:
    assert read_image(make_dicom(BodyPartExamined=None, AnatomicRegionSequence=coded(code))).warnings == ()


@pytest.mark.parametrize("scheme", ["99ACME", "L", "", None])
@pytest.mark.parametrize("code", ["4711", CHEST, KNEE])
def test_a_region_with_a_private_code_is_a_warning(code: str, scheme: str | None) -> None:
    """It may be any number, even one from another scheme, so the words decide."""
    region = coded(code, scheme)
    (warning,) = read_image(make_dicom(AnatomicRegionSequence=region)).warnings
    assert "AnatomicRegionSequence (0008,2218) holds a code of an unknown scheme" in warning
    with pytest.raises(DicomImageError, match="BodyPartExamined"):
        read_image(make_dicom(BodyPartExamined="KNEE", AnatomicRegionSequence=region))
    assert len(read_image(make_dicom(BodyPartExamined=None, AnatomicRegionSequence=region)).warnings) == 2


@pytest.mark.parametrize("part", ["CHEST", None])
def test_another_region_is_refused(part: str | None) -> None:
    with pytest.raises(DicomImageError, match=rf"AnatomicRegionSequence \(0008,2218\).*found '{KNEE}'") as caught:
        read_image(make_dicom(BodyPartExamined=part, AnatomicRegionSequence=coded(KNEE)))
    assert ("as BodyPartExamined says" in str(caught.value)) == (part is not None)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("code", [None, "", "SECRET^NAME^OF^SOMEONE"])
def test_a_region_without_a_code(code: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from pydicom, about values made here
        data = make_dicom(AnatomicRegionSequence=coded(code))
    with pytest.raises(DicomImageError, match=r"AnatomicRegionSequence.*CodeValue") as caught:
        read_image(data)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code", "view"),
    [
        (None, PA, "PA"),
        (None, AP, "AP"),
        ("PA", PA, "PA"),
        ("AP", None, "AP"),
        ("", "R-10206", "AP"),
        ("PA", FRONTAL, "PA"),
    ],
)
def test_views_by_word_and_code(text: str | None, code: str | None, view: str) -> None:
    sequence = None if code is None else coded(code)
    radiograph = read_image(make_dicom(ViewPosition=text, ViewCodeSequence=sequence))
    assert (radiograph.view, radiograph.warnings) == (view, ())


@pytest.mark.parametrize(("text", "view", "count"), [("PA", "PA", 1), ("AP", "AP", 1), (None, "", 2)])
def test_a_view_with_a_private_code_is_a_warning(text: str | None, view: str, count: int) -> None:
    radiograph = read_image(make_dicom(ViewPosition=text, ViewCodeSequence=coded("1001", "99FUJI")))
    assert (radiograph.view, len(radiograph.warnings)) == (view, count)
    assert "ViewCodeSequence (0054,0220) holds a code of an unknown scheme" in radiograph.warnings[0]


def test_a_frontal_view_of_unknown_direction_is_a_warning() -> None:
    radiograph = read_image(make_dicom(ViewPosition=None, ViewCodeSequence=coded(FRONTAL)))
    assert radiograph.view == ""
    assert "ViewCodeSequence (0054,0220) is neither PA nor AP" in radiograph.warnings[0]


@pytest.mark.parametrize(
    ("text", "code", "keyword"),
    [
        (None, LEFT_LATERAL, "ViewCodeSequence"),
        (None, OBLIQUE, "ViewCodeSequence"),
        ("PA", OBLIQUE, "ViewCodeSequence"),
        ("PA", LEFT_LATERAL, "ViewCodeSequence"),
        ("PA", AP, "ViewPosition"),
        ("LL", PA, "ViewPosition"),
    ],
)
def test_views_that_are_refused(text: str | None, code: str, keyword: str) -> None:
    with pytest.raises(DicomImageError, match=keyword):
        read_image(make_dicom(ViewPosition=text, ViewCodeSequence=coded(code)))


@pytest.mark.parametrize("view", LATERAL_VIEWS)
def test_a_lateral_view_on_request(view: str) -> None:
    with pytest.raises(DicomImageError, match=rf"ViewPosition.*frontal view \(PA or AP\), found '{view}'"):
        read_image(make_dicom(ViewPosition=view))
    radiograph = read_image(make_dicom(ViewPosition=view, PatientOrientation=["A", "F"]), allow_lateral=True)
    assert radiograph.view == "LATERAL"
    assert radiograph.warnings == ("lateral view: the model's findings are those of frontal radiographs",)


@pytest.mark.parametrize("view", OTHER_VIEWS)
def test_other_views_are_always_refused(view: str) -> None:
    with pytest.raises(DicomImageError, match="ViewPosition"):
        read_image(make_dicom(ViewPosition=view), allow_lateral=True)


@pytest.mark.parametrize(("text", "code"), [("PA", LEFT_LATERAL), ("LL", PA), ("LATERAL", FRONTAL)])
def test_frontal_and_lateral_together_are_refused(text: str, code: str) -> None:
    with pytest.raises(DicomImageError, match=r"ViewPosition \(0018,5101\): expected the view that ViewCodeSequence"):
        read_image(make_dicom(ViewPosition=text, ViewCodeSequence=coded(code)), allow_lateral=True)


@pytest.mark.parametrize("tags", [{"PatientOrientation": ["A", "F"]}, {"PatientOrientation": ["P", "F"]}])
def test_rows_from_front_to_back_are_a_warning(tags: dict[str, Any]) -> None:
    (warning,) = read_image(make_dicom(**tags)).warnings
    assert "PatientOrientation (0020,0020)" in warning
    assert read_image(make_dicom(PatientOrientation=["L", "F"])).warnings == ()


@pytest.mark.parametrize(
    ("rows", "sides"), [("L", "RL"), ("R", "LR"), ("LF", "RL"), ("F", ""), (None, "")]
)  # fmt: skip
def test_the_sides_of_the_patient_come_from_the_direction_of_rows(rows: str | None, sides: str) -> None:
    """PS3.3 C.7.6.1.1.1: the first value of PatientOrientation is the direction towards the right edge."""
    tags = {} if rows is None else {"PatientOrientation": [rows, "F"]}
    assert read_image(make_dicom(**tags)).sides == sides


def test_a_series_description_is_used_if_the_image_states_nothing() -> None:
    assert read_image(make_dicom(SeriesDescription="CHEST PA AND LAT")).warnings == ()
    missing, doubt = read_image(make_dicom(SeriesDescription="CHEST LAT", ViewPosition=None)).warnings
    assert "ViewPosition" in missing
    assert "SeriesDescription (0008,103E) says LAT" in doubt


def test_a_finder_accepts_lateral_views_on_request(tiny_model: Path) -> None:
    data = make_dicom(ViewPosition="LL")
    with Finder.open(tiny_model, threads=1) as finder, pytest.raises(DicomImageError, match="ViewPosition"):
        finder.analyze(data)
    with Finder.open(tiny_model, threads=1, allow_lateral=True) as finder:
        assert "lateral view" in finder.analyze(data).warnings[0]
        assert finder.embed([data]).shape == (1, 8)
        assert finder.read(data).view == "LATERAL"


def test_the_query_command_accepts_lateral_views_on_request(
    tiny_model: Path, tiny_gallery: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "side.dcm").write_bytes(make_dicom(ViewPosition="LL"))
    query = ["query", str(tiny_model), str(tiny_gallery), str(tmp_path / "side.dcm")]
    with pytest.raises(SystemExit, match="2"):
        cli.main(query, standalone_mode=False)
    assert not cli.main([*query, "--allow-lateral"], standalone_mode=False)
    assert "Warning: lateral view" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["CANINE", "Felis catus", "EQUINE", "Hund"])
def test_an_animal_is_a_warning(text: str) -> None:
    (warning,) = read_image(make_dicom(PatientSpeciesDescription=text)).warnings
    assert "PatientSpeciesDescription (0010,2201) is not that of a human" in warning
    assert warning.kind == "animal"


@pytest.mark.parametrize("text", ["HUMAN", "Homo sapiens", "Human being", "", None])
def test_a_human_gives_no_warning(text: str | None) -> None:
    assert read_image(make_dicom(PatientSpeciesDescription=text)).warnings == ()


@pytest.mark.parametrize(("code", "count"), [("337915000", 0), ("L-85B00", 0), ("448771007", 1)])
def test_an_animal_by_its_code(code: str, count: int) -> None:
    assert len(read_image(make_dicom(PatientSpeciesCodeSequence=coded(code))).warnings) == count
