"""Options of a finder's answer: the thresholds, and the order of the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import cbmir
from cbmir.card import OperatingPoint
from cbmir.choices import Rank
from cbmir.errors import UserError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, read_manifest, write_manifest
from cbmir.runtime import Finder, build_gallery, open_engine
from cbmir.runtime.dicom_output import make_results
from cbmir.runtime.dicom_output.identifiers import answers_fingerprint
from dicom_files import make_dicom

POINTS = {
    "sensitive": (OperatingPoint(0.01, 0.95, 0.4, 0.5, 0.9), OperatingPoint(0.02, 1.0, 0.0, 0.2, None), None),
    "balanced": (OperatingPoint(0.5, 0.8, 0.8, 0.7, 0.8), OperatingPoint(0.9, 0.7, 0.7, 0.5, 0.9), None),
    "specific": (OperatingPoint(0.98, 0.3, 0.95, 0.9, 0.6), OperatingPoint(0.99, 0.0, 1.0, None, 0.8), None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "points.onnx", operating_points=POINTS)


@pytest.fixture
def finder(model: Path, tiny_gallery: Path) -> Iterator[Finder]:
    with cbmir.load(model, gallery=tiny_gallery, threads=1) as opened:
        yield opened


def test_results_state_the_operating_point_of_the_analysis(finder: Finder) -> None:
    pytest.importorskip("highdicom")
    data = make_dicom(SeriesInstanceUID="1.2.5")
    balanced = finder.analyze(data, 2)
    first, second = (
        make_results(data, one, finder, kinds=("sr",)).sr for one in (balanced, balanced.at(finder.card, "sensitive"))
    )
    assert first and second and first.SOPInstanceUID != second.SOPInstanceUID
    said = ["\n".join(str(one.value) for one in made.iterall()) for made in (first, second)]
    assert "operating point: balanced" in said[0] and "operating point: sensitive" in said[1]


@pytest.mark.parametrize("name", POINTS)
def test_the_chosen_thresholds_decide(model: Path, tiny_gallery: Path, make_xray: Any, name: str) -> None:
    thresholds = [None if point is None else point.threshold for point in POINTS[name]]
    with cbmir.load(model, gallery=tiny_gallery, threads=1, operating_point=name) as finder:
        analysis = finder.analyze(make_xray(99), 5)
        assert list(finder.card.thresholds) == thresholds
        assert (finder.operating_point, finder.engine.card.thresholds) == (name, (0.5, 0.9, None))
    assert [f.threshold for f in analysis.findings] == thresholds
    assert [f.predicted for f in analysis.findings] == [
        None if threshold is None else f.score > threshold
        for f, threshold in zip(analysis.findings, thresholds, strict=True)
    ]
    assert analysis.operating_point == analysis.to_json()["operating_point"] == name


def test_another_operating_point_changes_the_fingerprint(finder: Finder, model: Path) -> None:
    with Finder.open(model, threads=1, operating_point="specific") as other:
        assert answers_fingerprint(other.card) != answers_fingerprint(finder.card)


def test_an_unknown_operating_point_is_refused(model: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"this model \(balanced, sensitive, specific\), found 'keen'"):
        Finder.open(model, threads=1, operating_point="keen")
    with pytest.raises(UserError, match=r"this model \(balanced\), found 'sensitive'"):
        Finder.open(tiny_model, threads=1, operating_point="sensitive")


def test_findings_rank_the_whole_gallery(finder: Finder, tiny_manifest: Path, make_xray: Any) -> None:
    """Compare with plain Python. Effusion and Mass are calibrated, and known for all images; Nodule is neither."""
    analysis = finder.analyze(make_xray(99), 50, rank="findings")
    assert finder.gallery is not None
    p = {f.label: f.probability for f in analysis.findings if f.probability is not None}
    assert list(p) == ["Effusion", "Mass"]
    none = float(np.prod([1 - one for one in p.values()]))

    def value(name: str) -> float:
        entry = finder.gallery.entry(name) if finder.gallery else None
        assert entry is not None and finder.gallery is not None
        has = {label: int((entry.labels or {})[label] in (1, -1)) for label in p}
        no_finding = int(not any(has.values()))
        both = sum(p[label] * has[label] for label in p) + none * no_finding
        union = sum(p.values()) + none + sum(has.values()) + no_finding - both
        return both / union + 0.1 * float(finder.gallery.vector(name).astype(np.float64) @ analysis.embedding)

    assert [n.id for n in analysis.neighbours] == sorted(finder.gallery.ids(), key=value, reverse=True)
    assert analysis.rank == analysis.to_json()["rank"] == "findings"
    nearest = finder.analyze(make_xray(99), 50)
    assert (nearest.rank, nearest.novelty) == ("nearness", analysis.novelty)
    assert {n.id: n for n in nearest.neighbours} == {n.id: n for n in analysis.neighbours}
    assert nearest.neighbours != analysis.neighbours
    one = analysis.neighbours[3]
    assert analysis.evidence_for_neighbour(one.id).sum() == pytest.approx(one.cosine, abs=1e-5)


def test_the_same_patient_is_left_out_in_both_orders(finder: Finder, tiny_manifest: Path) -> None:
    own = tiny_manifest.parent / "image_06.png"
    assert "patient_03" not in {n.patient_id for n in finder.analyze(own, 50, rank="findings").neighbours}
    everyone = finder.analyze(own, 50, rank="findings", exclude_same_patient=False).neighbours
    assert len(everyone) == 20
    assert len(finder.analyze(own, 3, rank="findings").neighbours) == 3


def test_requirements_of_ranking_by_findings(
    tmp_path: Path, finder: Finder, tiny_manifest: Path, tiny_gallery: Path, make_tiny_model: Callable[..., Path],
    make_xray: Any,
) -> None:  # fmt: skip
    with pytest.raises(UserError, match="expected a rank among nearness, findings; found 'beauty'"):
        finder.analyze(make_xray(99), rank=cast(Rank, "beauty"))
    uncalibrated = make_tiny_model(tmp_path / "plain.onnx", calibration=(None, None, None))
    with Finder.open(uncalibrated, tiny_gallery, threads=1) as plain:
        assert plain.analyze(make_xray(99)).rank == "nearness"
        with pytest.raises(UserError, match="expected a calibrated probability for a label of the gallery"):
            plain.analyze(make_xray(99), rank="findings")
    with Finder.open(uncalibrated, threads=1) as alone:
        assert alone.analyze(make_xray(99), rank="findings").neighbours == ()


def test_labels_are_matched_by_their_aliases(tmp_path: Path, model: Path, tiny_manifest: Path) -> None:
    table = read_manifest(tiny_manifest)
    labels = LabelSet(("Fracture", "Pleural Effusion"))
    rows = tuple(replace(row, labels=(1 - (row.labels[0] or 0), row.labels[0])) for row in table)
    write_manifest(Manifest(labels, rows), tmp_path / "other.csv")
    with open_engine(model, threads=1) as engine:
        build_gallery(engine, read_manifest(tmp_path / "other.csv"), tmp_path / "gallery")
    with Finder.open(model, tmp_path / "gallery", threads=1) as finder:
        analysis = finder.analyze(tiny_manifest.parent / "image_20.png", 10, rank="findings")
        probability = analysis.findings[0].probability
    assert probability is not None
    first = "Pleural Effusion" if probability > 0.5 else "Fracture"  # without an effusion all have a fracture
    assert all(n.labels == (first,) for n in analysis.neighbours)
