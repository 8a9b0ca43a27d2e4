"""Phantoms: the same seed gives the same bytes, findings depend on each other and appear in the right places."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.errors import MissingDependencyError, SplitError, UserError
from cbmir.labels import NIH_14
from cbmir.manifest import read_manifest
from cbmir.runtime import read_image
from cbmir.training.phantom import PHANTOM_LABELS, Phantom, PhantomFinding, describe, draw, files, generate, report
from cbmir.training.phantom.anatomy import halves
from cbmir.training.phantom.patients import BOTH, CAUSES, LEFT, RIGHT

COUNT = 4000


@pytest.fixture(scope="module")
def phantoms() -> list[Phantom]:
    return list(describe(COUNT, seed=7))


def plain(phantom: Phantom, *findings: PhantomFinding) -> Phantom:
    """The same patient in a neutral pose and exposure, without noise."""
    return replace(
        phantom, findings=findings, view="PA", breath=0.5, rotation=0.0, shift=(0.0, 0.0), scale=1.0, gain=1.0,
        offset=0.0, gamma=1.0, noise=0.0, collimation=0.0, marker="",
    )  # fmt: skip


def labels(phantoms: list[Phantom]) -> dict[str, np.ndarray]:
    columns = np.array([phantom.labels for phantom in phantoms], bool).T
    return dict(zip(PHANTOM_LABELS, columns, strict=True))


# Descriptions


def test_findings_are_at_least_eight_and_in_the_order_of_nih() -> None:
    assert len(PHANTOM_LABELS) >= 8
    assert list(PHANTOM_LABELS) == [name for name in NIH_14 if name in PHANTOM_LABELS]


def test_parents_come_before_children_and_chronic_before_acute() -> None:
    seen: set[str] = set()
    for cause in CAUSES:
        assert set(cause.given) <= seen
        seen.add(cause.label)
    chronic = [cause.chronic for cause in CAUSES]
    assert chronic == sorted(chronic, reverse=True)


def test_prevalence(phantoms: list[Phantom]) -> None:
    columns = labels(phantoms)
    assert all(0.05 < column.mean() < 0.20 for column in columns.values())
    assert 0.43 < (~np.any(list(columns.values()), axis=0)).mean() < 0.52


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.given], ids=lambda cause: cause.label)
def test_a_finding_is_more_common_beside_its_parents(phantoms: list[Phantom], cause) -> None:
    columns = labels(phantoms)
    for parent, given in cause.given.items():
        beside = columns[cause.label][columns[parent]].mean()
        alone = columns[cause.label][~columns[parent]].mean()
        assert beside > alone + 0.4 * given


def test_later_studies_have_the_prevalence_of_first_ones(phantoms: list[Phantom]) -> None:
    first = np.array([p.labels for p in phantoms if p.study == 0]).mean(axis=0)
    later = np.array([p.labels for p in phantoms if p.study > 0]).mean(axis=0)
    assert np.abs(first - later).max() < 0.04


def test_the_nth_phantom_does_not_depend_on_the_count(phantoms: list[Phantom]) -> None:
    assert list(describe(50, seed=7)) == phantoms[:50]
    assert list(describe(50, seed=8)) != phantoms[:50]


def test_a_patient_keeps_anatomy_and_chronic_findings(phantoms: list[Phantom]) -> None:
    chronic = {cause.label for cause in CAUSES if cause.chronic}
    patients = defaultdict(list)
    for phantom in phantoms[:1000]:
        patients[phantom.patient_id].append(phantom)
    assert {len(studies) for studies in patients.values()} == {1, 2, 3, 4, 5}
    for studies in patients.values():
        assert len({study.anatomy for study in studies}) == 1
        assert [study.study for study in studies] == list(range(len(studies)))
        lasting = [[f for f in study.findings if f.label in chronic] for study in studies]
        kept = {frozenset((f.label, f.side, f.zone, f.seed) for f in findings) for findings in lasting}
        assert len(kept) == 1
        assert all(finding.change == "" for finding in studies[0].findings)
        assert all(finding.change for study in studies[1:] for finding in study.findings)


def test_acute_findings_come_and_go(phantoms: list[Phantom]) -> None:
    changes = {finding.change for phantom in phantoms for finding in phantom.findings}
    assert changes == {"", "new", "larger", "smaller", "unchanged"}


def test_sides_of_related_findings(phantoms: list[Phantom]) -> None:
    for phantom in phantoms:
        if phantom.study or not (effusion := phantom.finding("Effusion")) or effusion.side == BOTH:
            continue
        if atelectasis := phantom.finding("Atelectasis"):
            assert atelectasis.side == effusion.side
        if pneumothorax := phantom.finding("Pneumothorax"):
            assert pneumothorax.side != effusion.side


# Reports

_WORDS = {
    "Atelectasis": "atelectasis", "Cardiomegaly": "cardiomegaly", "Effusion": "effusion", "Mass": r"mass\b",
    "Nodule": "nodule", "Pneumothorax": "pneumothorax", "Consolidation": "consolidation", "Edema": "edema",
    "Emphysema": "emphysema", "Pleural_Thickening": "pleural thickening",
}  # fmt: skip


def test_a_report_names_each_finding_and_no_other(phantoms: list[Phantom]) -> None:
    for phantom in phantoms[:1500]:
        text = report(phantom)
        findings, impression = text.removeprefix("FINDINGS: ").split(" IMPRESSION: ")
        for part in (findings, impression):
            named = tuple(int(bool(re.search(_WORDS[name], part, re.IGNORECASE))) for name in PHANTOM_LABELS)
            assert named == phantom.labels, text
        assert (impression == "No acute cardiopulmonary abnormality.") == (not phantom.findings)
        assert "  " not in text and "{" not in text


def test_a_report_states_side_zone_and_size(phantoms: list[Phantom]) -> None:
    mass = PhantomFinding("Mass", LEFT, "upper", severity=0.5, seed=1)
    assert mass.diameter_cm == pytest.approx(5.3)
    text = report(plain(phantoms[0], mass))
    assert "5.3 cm" in text and "left upper zone" in text and "Left lung mass" in text and "right" not in text.lower()


def test_wording_varies_between_phantoms_and_is_reproducible(phantoms: list[Phantom]) -> None:
    texts = {report(phantom) for phantom in phantoms if not phantom.findings}
    assert len(texts) == 3
    assert report(phantoms[3]) == report(phantoms[3])


# Pictures: (label, side, zone, severity, sign of the change, box of its centre: x0, x1, y0, y1 in image widths)

_CASES = [
    ("Effusion", RIGHT, "", 0.1, 1, (0.12, 0.30, 0.68, 0.90)),
    ("Effusion", LEFT, "", 0.9, 1, (0.60, 0.85, 0.50, 0.85)),
    ("Pneumothorax", LEFT, "", 0.1, -1, (0.60, 0.90, 0.05, 0.60)),
    ("Pneumothorax", RIGHT, "", 0.9, -1, (0.10, 0.40, 0.05, 0.60)),
    ("Consolidation", RIGHT, "upper", 0.5, 1, (0.15, 0.45, 0.15, 0.40)),
    ("Consolidation", LEFT, "lower", 0.5, 1, (0.60, 0.90, 0.50, 0.80)),
    ("Atelectasis", LEFT, "lower", 0.5, 1, (0.55, 0.85, 0.60, 0.90)),
    ("Nodule", RIGHT, "middle", 0.5, 1, (0.15, 0.45, 0.30, 0.55)),
    ("Mass", LEFT, "upper", 0.5, 1, (0.55, 0.85, 0.12, 0.40)),
    ("Pleural_Thickening", RIGHT, "middle", 0.5, 1, (0.12, 0.25, 0.30, 0.65)),
    ("Pleural_Thickening", LEFT, "upper", 0.5, 1, (0.60, 0.85, 0.05, 0.35)),
    ("Edema", BOTH, "", 0.5, 1, (0.45, 0.55, 0.35, 0.60)),
    ("Emphysema", BOTH, "", 0.5, -1, (0.45, 0.55, 0.30, 0.75)),
    ("Cardiomegaly", BOTH, "", 0.5, 1, (0.50, 0.70, 0.55, 0.80)),
]


@pytest.mark.parametrize(("label", "side", "zone", "severity", "sign", "box"), _CASES)
def test_a_finding_is_visible_where_it_should_be(
    phantoms: list[Phantom], label, side, zone, severity, sign, box
) -> None:
    size = 192
    for phantom in phantoms[:6]:
        finding = PhantomFinding(label, side, zone, severity, seed=phantom.seed)
        change = draw(plain(phantom, finding), size).astype(int) - draw(plain(phantom), size)
        weight = np.clip(sign * change, 0, None)
        assert weight.max() > 20 and weight.sum() > 1.5 * np.clip(-sign * change, 0, None).sum()
        y, x = (float((grid * weight).sum() / weight.sum()) / size for grid in np.mgrid[:size, :size])
        x0, x1, y0, y1 = box
        assert x0 < x < x1 and y0 < y < y1, (x, y)
        middle = size // 2
        if side == RIGHT:
            assert not change[:, middle + 1 :].any()
        elif side == LEFT:
            assert not change[:, : middle - 1].any()


def test_severity_is_visible_as_size(phantoms: list[Phantom]) -> None:
    for label, side, zone, *_ in _CASES:
        normal = draw(plain(phantoms[0]), 128).astype(int)
        mild, severe = (
            np.abs(draw(plain(phantoms[0], PhantomFinding(label, side, zone, severity, seed=5)), 128) - normal).sum()
            for severity in (0.1, 0.9)
        )
        assert severe > mild, label


def _measured_ratio(phantom: Phantom, size: int = 384) -> float:
    """Cardiothoracic ratio measured on the image: widest heart over widest inner thorax."""
    anatomy = replace(phantom.anatomy, bone=0.0, breasts=0.0)
    domes = min(float(half.diaphragm.min()) for half in halves(plain(phantom, *phantom.findings)))
    dark = draw(replace(plain(phantom, *phantom.findings), anatomy=anatomy), size) < 85
    middle = size // 2
    heart = thorax = 0
    for row in dark[int(0.5 * size) : int(domes * size)]:
        outwards = [row[middle:], row[middle - 1 :: -1]]
        if not all(half.any() for half in outwards):
            continue
        inner = [int(np.argmax(half)) for half in outwards]
        outer = [start + int(np.argmin(half[start:])) for start, half in zip(inner, outwards, strict=True)]
        if min(end - start for start, end in zip(inner, outer, strict=True)) > 0.02 * size:
            heart, thorax = max(heart, sum(inner)), max(thorax, sum(outer))
    return heart / thorax


def test_cardiothoracic_ratio(phantoms: list[Phantom]) -> None:
    normal = [_measured_ratio(replace(phantom, findings=())) for phantom in phantoms[:12]]
    assert max(normal) < 0.48 and min(normal) > 0.36
    for severity in (0.0, 1.0):
        finding = PhantomFinding("Cardiomegaly", BOTH, "", severity, seed=1)
        wide = [_measured_ratio(replace(phantom, findings=(finding,))) for phantom in phantoms[:6]]
        assert min(wide) > 0.5 and max(wide) < 0.66


def test_cardiothoracic_ratio_of_the_silhouettes(phantoms: list[Phantom]) -> None:
    for phantom in phantoms[:400]:
        right, left = halves(phantom)
        ratio = (right.heart.max() + left.heart.max()) / (right.lateral.max() + left.lateral.max())
        assert ratio > 0.52 if phantom.finding("Cardiomegaly") else ratio < 0.48


def test_air_is_dark_and_bone_bright_and_the_heart_on_the_left(phantoms: list[Phantom]) -> None:
    image = draw(plain(phantoms[0]), 256).astype(float) / 255
    assert image[160:200, :4].mean() < 0.1  # air beside the trunk
    lung, abdomen, spine = image[70:130, 60:85].mean(), image[235:250, 60:100].mean(), image[235:250, 124:132].mean()
    assert lung < 0.35 < abdomen < spine
    assert image[165:185, 150:165].mean() > image[165:185, 91:106].mean() + 0.1


def test_the_right_diaphragm_is_higher(phantoms: list[Phantom]) -> None:
    for phantom in phantoms[:50]:
        right, left = halves(replace(phantom, findings=()))
        assert right.diaphragm.min() < left.diaphragm.min()


@pytest.mark.parametrize("size", [64, 100, 512])
def test_drawing_is_deterministic(phantoms: list[Phantom], size: int) -> None:
    first, again = draw(phantoms[0], size), draw(phantoms[0], size)
    assert first.shape == (size, size) and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, draw(phantoms[1], size))


# Files


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "images").iterdir()}


@pytest.mark.parametrize("image_format", ["png", "dicom"])
def test_the_same_arguments_write_the_same_bytes(tmp_path: Path, image_format: str) -> None:
    options = {"seed": 3, "size": 96, "image_format": image_format, "progress": False}
    generate(tmp_path / "a", count=9, **options)
    manifest = (tmp_path / "a" / "manifest.csv").read_bytes()
    few = _digests(tmp_path / "a")
    generate(tmp_path / "a", count=9, **options)
    assert _digests(tmp_path / "a") == few and (tmp_path / "a" / "manifest.csv").read_bytes() == manifest
    generate(tmp_path / "b", count=14, **options)
    many = _digests(tmp_path / "b")
    assert len(many) == 14 and few.items() <= many.items()
    generate(tmp_path / "c", count=9, **(options | {"seed": 4}))
    assert not set(_digests(tmp_path / "c").values()) & set(few.values())


def test_several_processes_write_the_same_files_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(tmp_path / "one", count=8, size=64, progress=False)
    monkeypatch.setattr(files, "_WORTH_A_PROCESS", 4)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    generate(tmp_path / "two", count=8, size=64, progress=False)
    assert _digests(tmp_path / "one") == _digests(tmp_path / "two")


def test_the_manifest_is_valid_and_keeps_patients_apart(tmp_path: Path) -> None:
    manifest = read_manifest(generate(tmp_path, count=40, size=64, progress=False))
    assert manifest.labels.names == PHANTOM_LABELS and len(manifest) == 40
    splits = defaultdict(set)
    for row, phantom in zip(manifest, describe(40), strict=True):
        splits[row.patient_id].add(row.split)
        assert row.labels == phantom.labels and row.view == phantom.view and row.report == report(phantom)
        with Image.open(row.image) as image:
            assert image.size == (64, 64) and image.mode == "L"
    for patient in splits:
        days = [row.date for row in manifest if row.patient_id == patient]
        assert sorted(set(days)) == days, "a patient's studies follow each other"
    assert all(len(names) == 1 for names in splits.values())
    assert set.union(*splits.values()) == {"train", "val", "test"}
    assert manifest.about["reader"] == "phantom" and manifest.about["seed"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "manifest.about.json", "manifest.csv"]
    assert len(list((tmp_path / "images").iterdir())) == 40


@pytest.mark.parametrize("image_format", ["png", "dicom"])
def test_files_say_that_they_are_phantoms(tmp_path: Path, image_format: str) -> None:
    manifest = read_manifest(generate(tmp_path, count=9, size=64, image_format=image_format, progress=False))
    drawn = [read_image(row.image) for row in manifest]
    assert all(one.is_phantom for one in drawn)
    Image.fromarray(drawn[0].pixels).save(tmp_path / "copy.png")
    assert not read_image(tmp_path / "copy.png").is_phantom


def test_dicom_reads_back(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.pixels import apply_voi_lut

    manifest = read_manifest(generate(tmp_path, count=6, size=128, image_format="dicom", progress=False))
    kinds, uids = set(), set()
    for row, phantom in zip(manifest, describe(6), strict=True):
        ds = pydicom.dcmread(row.image)
        kinds.add(ds.PhotometricInterpretation)
        assert f"{ds.StudyDate[:4]}-{ds.StudyDate[4:6]}-{ds.StudyDate[6:]}" == row.date
        uids |= {ds.StudyInstanceUID, ds.SeriesInstanceUID, ds.SOPInstanceUID}
        assert (ds.PatientID, ds.ViewPosition, ds.BodyPartExamined) == (row.patient_id, row.view, "CHEST")
        assert str(ds.PatientName).startswith("Phantom^") and ds.ImageComments == "synthetic phantom, not a patient"
        assert ds.StudyInstanceUID.startswith("2.25.") and ds.StudyInstanceUID.is_valid
        assert ds.pixel_array.max() < 4096
        shown = apply_voi_lut(ds.pixel_array, ds).astype(float) / 4095
        if ds.PhotometricInterpretation == "MONOCHROME1":
            shown = 1 - shown
        # The same picture, not inverted: 12 bits against 8.
        assert np.abs(shown * 255 - draw(phantom, 128)).max() < 0.6
    assert kinds == {"MONOCHROME1", "MONOCHROME2"} and len(uids) == 18


@pytest.mark.parametrize("wrong", [{"count": 0}, {"size": 32}, {"image_format": "bmp"}])
def test_arguments_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match="expected count"):
        generate(tmp_path / "new", **({"count": 10} | wrong))
    assert not (tmp_path / "new").exists()


def test_too_few_patients_for_three_splits(tmp_path: Path) -> None:
    with pytest.raises(SplitError):
        generate(tmp_path / "new", count=1)
    assert not (tmp_path / "new").exists()


def test_the_error_without_pydicom_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(MissingDependencyError, match=r"\.\[dicom\]"):
        generate(tmp_path, count=10, size=64, image_format="dicom", progress=False)
    assert not (tmp_path / "manifest.csv").exists() and not list((tmp_path / "images").iterdir())
