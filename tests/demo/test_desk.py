"""Actions on a session: each adds a step, or raises an error in plain words and adds none."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.controls import Controls, ControlsError
from cbmir.demo.desk import FROM_THUMBNAIL, Desk, labels_of
from cbmir.demo.examples import find_examples
from cbmir.demo.page.alerts import NOT_A_PHANTOM, is_grave
from cbmir.demo.sessions import Session, Wish
from cbmir.demo.uploads import PICTURE_SIDE
from cbmir.errors import DicomImageError, NotAnImageError, UserError
from cbmir.manifest import Manifest, Row
from cbmir.runtime import Analysis, Finder, build_gallery
from cbmir.training.phantom import generate
from dicom_files import make_dicom

FEW = Controls(k=4)


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    (tmp_path / "uploads").mkdir()
    return tmp_path / "uploads"


@pytest.fixture
def desk(tiny_model: Path, wall_gallery: Path, uploads: Path) -> Iterator[Desk]:
    with Finder.open(tiny_model, wall_gallery, threads=1) as finder:
        yield Desk(finder, find_examples(finder), lambda: uploads)


@pytest.fixture
def put(uploads: Path, make_xray: Callable[..., NDArray[np.uint8]]) -> Callable[..., str]:
    """Write an X-ray into the uploads, and return its path."""

    def put(name: str = "chest.png", side: int = 64) -> str:
        (uploads / "abc").mkdir(exist_ok=True)
        Image.fromarray(make_xray(7, side)).save(uploads / "abc" / name)
        return str(uploads / "abc" / name)

    return put


def test_a_finder_without_a_gallery_is_refused(tiny_model: Path) -> None:
    with Finder.open(tiny_model) as finder, pytest.raises(UserError, match="with a gallery"):
        Desk(finder, (), Path)


def test_an_upload_is_analysed_and_deleted(desk: Desk, put: Callable[..., str], uploads: Path) -> None:
    session = Session()
    step = desk.open(session, FEW, [put()])
    assert step.title == "chest.png" and len(step.neighbours) == 4
    assert step.analysis is not None and len(step.analysis.findings) == 3
    assert list(uploads.iterdir()) == []
    assert session.step is step


@pytest.mark.parametrize("paths", [None, "x", [1], ["/etc/passwd"], []])
def test_a_file_that_was_not_uploaded_is_refused(desk: Desk, paths: object) -> None:
    session = Session()
    with pytest.raises((UserError, NotAnImageError)):
        desk.open(session, FEW, paths)
    assert session.step is None


def test_large_images_are_kept_whole_for_zooming(desk: Desk, put: Callable[..., str]) -> None:
    step = desk.open(Session(), FEW, [put(side=PICTURE_SIDE + 200)])
    assert step.image is not None and step.image.picture.shape == (PICTURE_SIDE, PICTURE_SIDE)
    whole = desk.whole.show(step.image.key)
    assert whole is not None and whole["src"].startswith("data:image/bmp;base64,")
    assert desk.whole.show("guessed") is None and desk.whole.show(None) is None
    assert desk.open(Session(), FEW, [put()]).image.key == ""  # type: ignore[union-attr]


def test_images_of_a_study(desk: Desk, put: Callable[..., str]) -> None:
    session = Session()
    desk.open(session, FEW, [put("a.png"), put("b.png")])
    assert desk.member(session, FEW, 1).title == "b.png"
    with pytest.raises(UserError, match="this study"):
        desk.member(session, FEW, 2)


def test_a_typed_patient_applies_to_one_image(desk: Desk, put: Callable[..., str]) -> None:
    session = Session()
    typed = desk.open(session, FEW, [put()])
    typed = desk.search(session, replace(FEW, patient="p1")) or typed
    assert typed.controls.patient == "p1"
    for act in (
        lambda: desk.open(session, typed.controls, [put()]),
        lambda: desk.example(session, typed.controls, 0),
        lambda: desk.like(session, typed.controls, "image_03"),
    ):
        assert act().controls == FEW


def test_filters_that_cannot_be_read_leave_the_upload(desk: Desk, put: Callable[..., str]) -> None:
    path = put()
    for controls in (replace(FEW, where="Mass and"), replace(FEW, since="2020-")):
        with pytest.raises(ControlsError):
            desk.open(Session(), controls, [path])
    assert Path(path).exists()


def test_values_that_no_control_of_the_page_has_are_refused(desk: Desk) -> None:
    session = Session()
    for act in (
        lambda: desk.example(session, FEW, "0"),  # type: ignore[arg-type]
        lambda: desk.by_findings(session, FEW, 7),  # type: ignore[arg-type]
        lambda: desk.weigh(session, FEW, ("much", 0, 0)),  # type: ignore[arg-type]
        lambda: Controls.of((4, 7, *Controls().values()[2:])),
    ):
        with pytest.raises(UserError):
            act()


def test_an_example_whose_file_is_gone(desk: Desk, tmp_path: Path) -> None:
    assert desk.example(Session(), FEW, 0).title.startswith("Example ")
    desk.examples = [replace(desk.examples[0], path=tmp_path / "gone.png")]
    for at, message in ((0, "gone or has changed"), (5, "one of the examples")):
        with pytest.raises(UserError, match=message) as error:
            desk.example(Session(), FEW, at)
        assert str(tmp_path) not in str(error.value)


def test_more_like_a_similar_image_and_back(desk: Desk) -> None:
    session = Session()
    first = desk.example(session, FEW, 0)
    chosen = first.neighbours[2]
    like = desk.like(session, FEW, chosen.id)
    assert (like.title, like.link) == ("Similar image 3", (("image", chosen.id),))
    assert like.analysis is not None and like.analysis.known == (chosen.id,)
    assert chosen.id not in [one.id for one in like.neighbours]
    assert [one.title for one in session.trail()] == [first.title, "Similar image 3"]
    assert session.go(first.number) is first
    with pytest.raises(UserError, match="no longer has this image"):
        desk.like(session, FEW, "nothing")


def test_an_image_of_the_gallery_whose_file_is_gone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = desk.gallery.entry
    monkeypatch.setattr(desk.gallery, "entry", lambda id: replace(entry(id), image=str(tmp_path / "gone.png")))
    step = desk.like(Session(), FEW, "image_03")
    assert step.analysis is not None and FROM_THUMBNAIL in step.analysis.warnings


def test_a_lateral_view_of_the_gallery_is_refused_like_an_upload(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    """A gallery built with --allow-lateral has some. Beside the query, they are only shown."""
    (tmp_path / "lateral.dcm").write_bytes(make_dicom(make_xray(3).astype(np.uint16), ViewPosition="LL"))
    entry = desk.gallery.entry
    monkeypatch.setattr(desk.gallery, "entry", lambda id: replace(entry(id), image=str(tmp_path / "lateral.dcm")))
    with pytest.raises(DicomImageError, match="ViewPosition"):
        desk.like(Session(), FEW, "image_03")


def test_findings_without_an_image_are_ordered_by_matches(desk: Desk) -> None:
    session = Session()
    step = desk.by_findings(session, Controls(k=40), ["Effusion", "Mass", "Effusion"])
    shared = [len(one.shared) for one in step.neighbours]
    assert shared == sorted(shared, reverse=True) and len(set(shared)) > 1
    for count in set(shared):
        distances = [one.distance for one in step.neighbours if len(one.shared) == count]
        assert distances == sorted(distances)
    assert step.link == (("finding", "Effusion"), ("finding", "Mass")) and labels_of(step) == ("Effusion", "Mass")
    for labels in ([], ["Hernia"]):
        with pytest.raises(UserError, match="findings"):
            desk.by_findings(session, FEW, labels)
    for act in (lambda: desk.region(session, FEW, (0, 0, 1, 1)), lambda: desk.report(session)):
        with pytest.raises(UserError, match="Open an image first"):
            act()


def test_filters_are_those_of_the_command_line(desk: Desk) -> None:
    session = Session()
    desk.example(session, FEW, 0)
    step = desk.search(session, Controls(k=40, where="Mass and not Effusion", view="pa"))
    assert step is not None and step.neighbours
    for one in step.neighbours:
        entry = desk.gallery.entry(one.id)
        assert "Mass" in entry.positive and "Effusion" not in entry.positive and entry.view == "PA"
    with pytest.raises(UserError, match="Did you mean 'Effusion'"):
        desk.search(session, Controls(where="Efusion"))
    assert session.step is step  # an error keeps the step
    assert desk.search(Session(), FEW) is None


def test_a_region_is_searched_and_removed(desk: Desk) -> None:
    session = Session()
    whole = desk.example(session, FEW, 0)
    part = desk.region(session, FEW, (0.2, 0.2, 0.6, 0.6))
    assert part.region == (0.2, 0.2, 0.6, 0.6) and part.analysis is not None and whole.analysis is not None
    assert not np.allclose(part.analysis.query, whole.analysis.query)
    assert part.analysis.findings == whole.analysis.findings
    other = desk.region(session, FEW, (0.5, 0.5, 0.9, 0.9))
    assert other.above == whole.number
    assert desk.region(session, FEW, None) is whole
    with pytest.raises(UserError):
        desk.region(session, FEW, (0.5, 0.5, 0.5, 0.5))
    assert session.step is whole


def test_a_search_is_refined_and_undone(desk: Desk) -> None:
    session = Session()
    first = desk.example(session, FEW, 0)
    last = first.neighbours[-1].id
    step = desk.refine(session, FEW, Wish((last,), (first.neighbours[0].id,), (("Mass", 0.5),)))
    assert step is not None and step.title == "Refined: 1 alike, 1 not alike, towards Mass"
    assert step.analysis is not None and step.analysis.refinement is not None
    assert step.above == first.number
    assert session.go(step.above) is first
    with pytest.raises(UserError, match="Mark similar images"):
        desk.refine(session, FEW, Wish())
    desk.refine(session, FEW, Wish((last,)))
    weighed = desk.weigh(session, FEW, (0, 0.5, -1))
    assert weighed is not None and weighed.wish == Wish((last,), findings=(("Mass", 0.5), ("Nodule", -1)))
    desk.weigh(session, FEW, (0, 0, 1))
    assert session.step is not None and session.step.wish == Wish((last,), findings=(("Nodule", 1),))
    desk.refine(session, FEW, Wish())  # removes the whole refinement
    assert session.step is first


def test_an_unknown_operating_point_is_refused(desk: Desk) -> None:
    session = Session()
    step = desk.example(session, FEW, 0)
    assert step.analysis is not None and step.analysis.operating_point == "balanced"
    with pytest.raises(UserError, match="operating point"):
        desk.search(session, replace(FEW, point="wild"))


def test_a_model_of_phantoms_doubts_images_that_may_be_real(
    desk: Desk, put: Callable[..., str], uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = desk.finder.card
    monkeypatch.setattr(desk.finder, "card", card.with_(training={**card.training, "source": "phantom"}))
    step = desk.example(Session(), FEW, 0)  # an image of the gallery
    assert step.analysis is not None and NOT_A_PHANTOM not in step.analysis.warnings
    step = desk.open(Session(), FEW, [put()])
    assert step.analysis is not None and NOT_A_PHANTOM in step.analysis.warnings
    assert is_grave(NOT_A_PHANTOM)
    generate(uploads / "drawn", count=9, size=64, progress=False)
    step = desk.open(Session(), FEW, [str(uploads / "drawn" / "images" / "phantom-00000-0.png")])
    assert step.analysis is not None and NOT_A_PHANTOM not in step.analysis.warnings


def test_an_image_shown_side_by_side_again_is_kept_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    step = desk.compare(session, [desk.example(session, FEW, 0).neighbours[0].id])
    assert step is not None
    monkeypatch.setattr("cbmir.demo.uploads.PICTURE_SIDE", 16)  # so that it is worth keeping
    (first,), (second,) = desk.beside(step), desk.beside(step)
    assert first.key and first.key == second.key and desk.whole.show(first.key) is not None


def test_images_side_by_side(desk: Desk) -> None:
    session = Session()
    first = desk.example(session, FEW, 0)
    ids = [one.id for one in first.neighbours]
    step = desk.compare(session, ids[1:3])
    assert step.title == "Beside 2, 3"
    beside = desk.beside(step)
    assert [one.entry.id for one in beside] == ids[1:3] and all(one.whole for one in beside)
    for one, neighbour in zip(beside, first.neighbours[1:3], strict=True):
        assert one.evidence is not None and one.evidence.sum() == pytest.approx(neighbour.cosine, abs=1e-3)
    assert desk.compare(session, ids[:1]).above == first.number
    assert desk.compare(session, ()) is first
    desk.compare(session, ids[:1])
    other = desk.search(session, Controls(k=4, where="not Mass"))  # has other similar images
    assert other is not None and (other.title, other.compare) == (first.title, ())
    with pytest.raises(UserError, match="on the page"):
        desk.compare(session, ["nothing"])


def test_a_report_and_a_page_without_an_image(desk: Desk) -> None:
    session = Session()
    with pytest.raises(UserError, match="Open an image first"):
        desk.report(session)
    first = desk.example(session, FEW, 0)
    assert "Evidence for Mass" in desk.report(session, "Mass") and "by a region" not in desk.report(session)
    desk.region(session, FEW, (0.2, 0.2, 0.6, 0.6))
    desk.refine(session, FEW, Wish((first.neighbours[1].id,), findings=(("Mass", 0.5),)))
    where = "by a region: 20% to 60% from the left, 20% to 60% from the top"
    assert f"same patient left out; {where}; refined: 1 alike, towards Mass." in desk.report(session)


def test_a_new_region_starts_from_the_whole_image(desk: Desk) -> None:
    session = Session()
    first = desk.example(session, FEW, 0)
    desk.region(session, FEW, (0.2, 0.2, 0.6, 0.6))
    desk.refine(session, FEW, Wish((first.neighbours[1].id,)))
    desk.region(session, FEW, (0.1, 0.1, 0.5, 0.5))
    assert [one.title for one in session.trail()] == [first.title, "Region"]
    assert desk.region(session, FEW, None) is first


def test_dicom_results_are_of_the_patient_on_the_page(
    desk: Desk, uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Analysis] = []

    class Results:
        def named(self) -> list[tuple[str, Any]]:
            return []

    def make(file: bytes, analysis: Analysis, *_: object, **__: object) -> Results:
        given.append(analysis)
        return Results()

    monkeypatch.setattr("cbmir.demo.desk.make_results", make)
    session = Session()
    (uploads / "chest.dcm").write_bytes(make_dicom())
    desk.open(session, FEW, [str(uploads / "chest.dcm")])
    desk.search(session, replace(FEW, patient="patient_00"))
    desk.dicom_results(session)
    assert "patient_00" in given[0].patients


def test_dicom_results_of_a_dicom_file(desk: Desk, uploads: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    pytest.importorskip("highdicom")
    session = Session()
    (uploads / "chest.dcm").write_bytes(make_dicom(PatientID="p7", StudyDate="20200101"))
    step = desk.open(session, FEW, [str(uploads / "chest.dcm")])
    desk.region(session, FEW, (0.2, 0.2, 0.6, 0.6))  # the results are of the whole image
    with zipfile.ZipFile(io.BytesIO(desk.dicom_results(session))) as archive:
        made = {name: pydicom.dcmread(io.BytesIO(archive.read(name))) for name in archive.namelist()}
    assert sorted(made) == ["sc.dcm", "sr.dcm"]
    assert {one.PatientID for one in made.values()} == {"p7"}
    assert step.image is not None and desk.whole.dicom(step.image.key)
    key = step.image.key
    desk.example(session, FEW, 0)
    with pytest.raises(UserError, match="Open the DICOM file again"):
        desk.dicom_results(session)
    session.steps.clear()
    del step
    assert not desk.whole.dicom(key)  # it ends with the session


def test_a_report_lists_the_patients_own_images_by_date(
    tiny_model: Path, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    rows = []
    for number, (patient, day) in enumerate([("p", "2020-03-01"), ("p", "2019-01-01"), ("p", ""), ("q", "2018-01-01")]):
        Image.fromarray(make_xray(number)).save(tmp_path / f"{number}.png")
        rows.append(Row(tmp_path / f"{number}.png", patient, (1, 0, 0), split="train", date=day))
    with Finder.open(tiny_model, threads=1) as plain:
        build_gallery(plain.engine, Manifest(plain.card.labels, tuple(rows)), tmp_path / "gallery", workers=0)
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1) as finder:
        desk, session = Desk(finder, (), lambda: tmp_path), Session()
        desk.like(session, FEW, "0")
        report = desk.report(session)
        assert re.findall(r"<b>(\d{4}-\d\d-\d\d)</b>", report) == ["2019-01-01"]
        assert desk.gallery.case_id("1") in report and report.count("<img") == 3
        Image.fromarray(make_xray(9)).save(tmp_path / "new.png")
        desk.open(session, replace(FEW, patient="p"), [str(tmp_path / "new.png")])
        assert "patient id" not in desk.report(session)  # it was typed for the previous image
        desk.search(session, replace(FEW, patient="p"))
        assert re.findall(r"<b>(\d{4}-\d\d-\d\d)</b>", desk.report(session)) == ["2019-01-01", "2020-03-01"]
