from __future__ import annotations

import io
import tarfile
from pathlib import Path
from shutil import copytree

import pytest

from cbmir.errors import ManifestError
from cbmir.labels import NIH_14
from cbmir.training.readers import openi as module
from cbmir.training.readers.openi import MAPPED, read_openi
from published_tables import copy_tables, draw_images

IMAGES = [f"CXR900{n}_IM-900{n - 1}-{side}001.png" for n in range(1, 5) for side in (1, 2)]


@pytest.fixture
def openi(shared: Path, tmp_path: Path) -> Path:
    folder = copy_tables(shared, "openi", tmp_path)
    draw_images(folder / "images", IMAGES)
    return folder


def _caption(folder: Path, report: int, old: str, new: str) -> None:
    path = folder / "ecgen-radiology" / f"{report}.xml"
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")


def test_headings_views_and_reports(openi: Path) -> None:
    assert tuple(MAPPED) == NIH_14
    manifest = read_openi(openi)
    assert [(row.image.name, row.patient_id, row.view) for row in manifest] == [
        (f"CXR900{n}_IM-900{n - 1}-1001.png", f"CXR900{n}", "PA") for n in range(1, 5)
    ]
    shown = [
        None if None in row.labels else {name for name, value in zip(NIH_14, row.labels, strict=True) if value}
        for row in manifest
    ]
    assert shown == [set(), {"Effusion", "Cardiomegaly"}, {"Nodule"}, None]
    assert manifest.rows[1].report == (
        "FINDINGS: Small left pleural effusion. Mildly enlarged heart.\nIMPRESSION: Small left pleural effusion."
    )
    policies = manifest.about["policies"]
    assert policies["left_out_by_view"] == {"LATERAL": 4}
    assert policies["views_by"] == {"caption": 8}


def test_own_headings(openi: Path) -> None:
    manifest = read_openi(openi, labels="own", frontal_only=False)
    assert manifest.labels.names == ("cardiomegaly", "granulomatous disease", "nodule", "pleural effusion")
    assert [row.view for row in manifest] == ["PA", "LATERAL"] * 4
    assert manifest.rows[4].labels == (0, 1, 1, 0)


def test_thickening_is_pleural_only_if_the_heading_says_so(openi: Path) -> None:
    _caption(openi, 9002, "Cardiomegaly/mild", "Thickening/pleura/apex/bilateral")
    _caption(openi, 9003, "Granulomatous Disease", "Thickening/bronchi")
    manifest = read_openi(openi)
    place = NIH_14.index("Pleural_Thickening")
    assert [row.labels[place] for row in manifest] == [0, 1, 0, None]


def test_captions_that_name_both_views_are_ignored(openi: Path, caplog: pytest.LogCaptureFixture) -> None:
    _caption(openi, 9001, "Chest, PA", "PA and lateral views")
    _caption(openi, 9001, "Chest, lateral", "PA and lateral views")
    manifest = read_openi(openi)
    assert [(row.patient_id, row.view) for row in manifest] == [(f"CXR900{n}", "PA") for n in (2, 3, 4)]
    assert "1 reports have no image whose caption says that it is frontal" in caplog.text
    assert "--projections" in caplog.text
    policies = manifest.about["policies"]
    assert policies["views_by"] == {"not known": 2, "caption": 6}
    assert policies["left_out_by_view"] == {"not given": 2, "LATERAL": 3}
    _caption(openi, 9003, "Chest, PA", "Xray")  # the other one is lateral
    guessed = read_openi(openi, guess_frontal=True)
    assert [(row.image.name[-8:], row.view) for row in guessed] == [
        ("1001.png", ""), ("1001.png", "PA"), ("1001.png", ""), ("1001.png", "PA"),
    ]  # fmt: skip
    assert "its first image is taken as frontal, a guess" in caplog.text
    policies = guessed.about["policies"]
    assert policies["views_by"] == {"first of its report, guessed": 2, "not known": 1, "caption": 5}
    assert policies["left_out_by_view"] == {"LATERAL": 3, "not given": 1}


def test_hidden_folders_are_skipped(openi: Path) -> None:
    """A download that is killed while unpacking leaves one."""
    expected = read_openi(openi)
    for name in ("images", "ecgen-radiology"):
        copytree(openi / name, openi / ".NLMCXR.1234" / name)
    assert read_openi(openi) == expected


def test_a_caption_that_says_frontal_may_name_the_projection(openi: Path) -> None:
    _caption(openi, 9001, "Chest, PA", "Frontal AP view")
    assert [row.view for row in read_openi(openi)] == ["AP", "PA", "PA", "PA"]


def test_a_table_of_projections_takes_precedence_over_captions(openi: Path) -> None:
    path = openi / "projections.csv"
    path.write_text("uid,filename,projection\n9001,9001_IM-9000-1001.dcm.png,Lateral\n"
                    "9001,9001_IM-9000-2001.dcm.png,Frontal\n", "utf-8")  # fmt: skip
    manifest = read_openi(openi, projections=path)
    assert (manifest.rows[0].image.name, manifest.rows[0].view) == ("CXR9001_IM-9000-2001.png", "")
    assert manifest.about["policies"]["views_by"] == {"projections": 2, "caption": 6}
    path.write_text("filename,projection\nx,Oblique\n", "utf-8")
    with pytest.raises(ManifestError, match="row 2: expected Frontal or Lateral, found 'Oblique'"):
        read_openi(openi, projections=path)


def test_file_names_of_nlm_and_kaggle() -> None:
    assert module._key("CXR1_1_IM-0001-3001") == module._key("1_IM-0001-3001.dcm.png") == ("1", "IM-0001-3001")
    assert module._key("CXR10_IM-0002-1001") == ("10", "IM-0002-1001")
    assert module._key("CXR3102_IM-1454-4004-0001-0002") == ("3102", "IM-1454-4004-0001-0002")


@pytest.mark.parametrize(
    ("old", "new"), [("</eCitation>", ""), ('id="CXR9001"', ""), ('<parentImage id="', '<parentImage no="')]
)
def test_an_invalid_report_is_named(openi: Path, old: str, new: str) -> None:
    _caption(openi, 9001, old, new)
    with pytest.raises(ManifestError, match=r"9001\.xml: expected"):
        read_openi(openi)


def test_a_folder_without_reports(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="--download fetches them"):
        read_openi(tmp_path)


def test_the_archives_are_downloaded_and_unpacked(openi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`download` is tested with a server elsewhere; here the archives are local."""

    def fetch(url: str, path: Path) -> str:
        path.parent.mkdir(exist_ok=True)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            part = "ecgen-radiology" if "reports" in url else "images"
            for one in sorted((openi / part).iterdir()):
                archive.add(one, f"ecgen-radiology/{one.name}" if "reports" in url else one.name)
        path.write_bytes(stream.getvalue())
        return f"digest of {url}"

    monkeypatch.setattr(module, "download", fetch)
    manifest = read_openi(tmp_path / "fetched", fetch=True, archives="http://here/")
    assert [row.labels for row in manifest] == [row.labels for row in read_openi(openi)]
    assert manifest.about["policies"]["archives_sha256"] == {
        "NLMCXR_reports.tgz": "digest of http://here/NLMCXR_reports.tgz",
        "NLMCXR_png.tgz": "digest of http://here/NLMCXR_png.tgz",
    }
