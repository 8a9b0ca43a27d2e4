"""The finder: from an image to findings, neighbours and warnings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import cbmir
from cbmir.errors import EngineError, GalleryError, ImageError, ModelError, UserError
from cbmir.manifest import read_manifest
from cbmir.runtime import Entry, Filter, Finder, Gallery, Pseudonyms, build_gallery, open_engine, read_image
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.neighbours import NOTHING_ALIKE

Make = Callable[..., Path]
MakeXray = Callable[..., NDArray[np.uint8]]


@pytest.fixture
def finder(tiny_model: Path, tiny_gallery: Path) -> Iterator[Finder]:
    with cbmir.load(tiny_model, gallery=tiny_gallery, threads=1) as opened:
        yield opened


def image(manifest: Path, number: int) -> Path:
    return manifest.parent / f"image_{number:02}.png"


def test_findings_follow_the_card(finder: Finder, make_xray: MakeXray) -> None:
    findings = finder.analyze(make_xray(99)).findings
    crop = preprocess(make_xray(99), finder.card.preprocess)
    scores = finder.engine.run(crop[None, None]).scores[0]
    assert [f.label for f in findings] == ["Effusion", "Mass", "Nodule"]
    assert [f.score for f in findings] == scores.tolist()
    assert findings[0].probability == pytest.approx(1 / (1 + np.exp(-(4 * scores[0] - 2))))
    assert [f.threshold for f in findings] == [0.5, 0.9, None]
    assert [f.predicted for f in findings] == [bool(scores[0] > 0.5), bool(scores[1] > 0.9), None]
    assert findings[2].probability is None


def test_neighbours_are_the_nearest_of_the_gallery(finder: Finder, tiny_manifest: Path, make_xray: MakeXray) -> None:
    analysis = finder.analyze(make_xray(99), k=20)
    gallery = finder.gallery
    assert gallery is not None
    distances = {name: float(np.linalg.norm(gallery.vector(name) - analysis.embedding)) for name in gallery.ids()}
    assert [n.id for n in analysis.neighbours] == sorted(distances, key=lambda name: distances[name])
    for n in analysis.neighbours:
        entry = gallery.entry(n.id)
        assert n.distance == pytest.approx(distances[n.id], abs=1e-6)
        assert n.cosine == pytest.approx(1 - n.distance**2 / 2, abs=1e-6)
        assert n.labels == tuple(name for name, value in (entry.labels or {}).items() if value in (1, -1))
        assert n.shared == tuple(
            name for name in n.labels if name in {f.label for f in analysis.findings if f.predicted}
        )
        assert (n.image, n.report, n.patient_id) == (entry.image, entry.report, entry.patient_id)


def test_evidence_sums_to_what_it_explains(finder: Finder, make_xray: MakeXray) -> None:
    analysis = finder.analyze(make_xray(99), k=3)
    for n in analysis.neighbours:
        cells = analysis.evidence_for_neighbour(n.id)
        assert cells.shape == (8, 8)
        assert cells.astype(np.float64).sum() == pytest.approx(n.cosine, abs=1e-5)
    # score = exp((cos - 1) / sigma^2)
    cosines = {f.label: 1 + finder.card.sigma**2 * np.log(f.score) for f in analysis.findings}
    for label, cosine in cosines.items():
        lead = cosine - np.mean([other for name, other in cosines.items() if name != label])
        length = np.linalg.norm(analysis.finding_vectors[label])
        assert length * analysis.evidence_for_finding(label).astype(np.float64).sum() == pytest.approx(lead, abs=1e-5)


def test_the_patient_of_an_image_in_the_gallery_is_left_out(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(image(tiny_manifest, 6), k=50)
    assert len(analysis.neighbours) == 18
    assert "patient_03" not in {n.patient_id for n in analysis.neighbours}
    assert (analysis.known, analysis.warnings) == (("image_06",), ("This image is in the gallery.",))
    own = finder.gallery.entry("image_06").positive if finder.gallery else ()
    assert all(n.shared == tuple(name for name in n.labels if name in own) for n in analysis.neighbours)


def test_the_same_patient_is_kept_on_request(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(image(tiny_manifest, 6), k=50, exclude_same_patient=False)
    assert len(analysis.neighbours) == 20
    assert (analysis.neighbours[0].id, analysis.neighbours[0].distance) == ("image_06", pytest.approx(0, abs=1e-6))


def test_a_given_patient_is_left_out(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(image(tiny_manifest, 20).read_bytes(), k=50, patient_id="patient_00")
    assert len(analysis.neighbours) == 18
    assert "patient_00" not in {n.patient_id for n in analysis.neighbours}
    assert analysis.warnings == ()


def test_an_unknown_patient_gives_a_warning(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(image(tiny_manifest, 20), k=50)
    assert len(analysis.neighbours) == 20
    assert ["patient of this image is not known" in warning for warning in analysis.warnings] == [True]
    assert finder.analyze(image(tiny_manifest, 20), exclude_same_patient=False).warnings == ()


NOBODY = "No image of this patient id is in the gallery: nothing was left out."


def test_a_given_patient_missing_from_the_gallery_gives_a_warning(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(image(tiny_manifest, 20), k=50, patient_id="patient_O0")
    assert len(analysis.neighbours) == 20
    assert analysis.warnings == (NOBODY,)
    included = finder.analyze(image(tiny_manifest, 20), patient_id="patient_O0", exclude_same_patient=False)
    assert included.warnings == ()


@pytest.mark.parametrize(("given", "left"), [("typo", 18), ("patient_00", 16)])
def test_a_given_patient_does_not_bring_back_the_known_one(
    finder: Finder, tiny_manifest: Path, given: str, left: int
) -> None:
    analysis = finder.analyze(image(tiny_manifest, 6), k=50, patient_id=given)
    assert not {"patient_03", given} & {n.patient_id for n in analysis.neighbours}
    assert len(analysis.neighbours) == left
    assert (analysis.known, analysis.warnings) == (("image_06",), ("This image is in the gallery.",))


def test_spaces_around_a_patient_id_are_ignored(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(image(tiny_manifest, 20), k=50, patient_id=" patient_00\n")
    assert "patient_00" not in {n.patient_id for n in analysis.neighbours}
    assert analysis.warnings == ()
    (blank,) = finder.analyze(image(tiny_manifest, 20), k=50, patient_id="  ").warnings
    assert "patient of this image is not known" in blank


def test_every_patient_of_the_same_file_is_left_out(
    finder: Finder, tiny_manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty data set has the same file under two patients and without a patient, in a gallery of an older cbmir."""
    gallery = finder.gallery
    assert gallery is not None
    labels: dict[str, int | None] = {"Effusion": 1}
    own = gallery.entry("image_06")
    copies = [Entry("copy", "/copy.png", "patient_09", labels=labels), Entry("nameless", "/copy.png", "")]
    monkeypatch.setattr(gallery, "find", lambda sha256: [own, *copies] if sha256 == own.sha256 else [])
    analysis = finder.analyze(image(tiny_manifest, 6), k=50)
    assert not {"patient_03", "patient_09"} & {n.patient_id for n in analysis.neighbours}
    assert len(analysis.neighbours) == 16
    assert analysis.known == ("image_06", "copy", "nameless")
    assert all(("Effusion" in n.labels) == ("Effusion" in n.shared) for n in analysis.neighbours)


def test_the_patient_of_a_dicom_file_is_left_out(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = finder._read

    def from_dicom(source: object, **options: object) -> object:
        return replace(real(source, **options), patient_id="patient_01 ", warnings=("Odd header.",))  # type: ignore[arg-type]

    monkeypatch.setattr(finder, "_read", from_dicom)
    pixels = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    analysis = finder.analyze(pixels, k=50)
    assert "patient_01" not in {n.patient_id for n in analysis.neighbours}
    assert len(analysis.neighbours) == 18
    assert analysis.warnings == ("Odd header.",)
    # The given patient is left out too.
    both = finder.analyze(pixels, k=50, patient_id="patient_02")
    assert not {"patient_01", "patient_02"} & {n.patient_id for n in both.neighbours}
    assert finder.analyze(pixels, k=50, patient_id="nobody").warnings == ("Odd header.",)


def test_path_bytes_and_array_give_the_same(finder: Finder, tiny_manifest: Path) -> None:
    path = image(tiny_manifest, 21)
    array = np.array(Image.open(path))
    results = [finder.analyze(source) for source in (path, str(path), path.read_bytes(), array)]
    for result in results[1:]:
        assert result.neighbours == results[0].neighbours
        assert result.findings == results[0].findings


def test_a_radiograph_keeps_its_patient(finder: Finder, tiny_manifest: Path) -> None:
    path = tiny_manifest.parent / "image_03.png"
    assert finder.analyze(read_image(path)).to_json() == finder.analyze(path).to_json()


def test_without_a_gallery_there_are_no_neighbours(tiny_model: Path, make_xray: MakeXray) -> None:
    with Finder.open(tiny_model, threads=1) as finder:
        analysis = finder.analyze(make_xray(1))
    assert (analysis.neighbours, analysis.warnings) == ((), ())
    assert analysis.evidence_for_finding("Mass").shape == (8, 8)  # still there after closing


def test_eight_threads_share_one_finder(finder: Finder, tiny_manifest: Path, make_xray: MakeXray) -> None:
    paths = [image(tiny_manifest, n) for n in range(24)]
    images = [*(make_xray(n) for n in range(100, 124)), *paths, *(path.read_bytes() for path in paths)]
    expected = [finder.analyze(xray).to_json() for xray in images]
    with ThreadPoolExecutor(8) as pool:
        assert [result.to_json() for result in pool.map(finder.analyze, images)] == expected


def test_embed(finder: Finder, tiny_manifest: Path, make_xray: MakeXray) -> None:
    paths = [image(tiny_manifest, n) for n in (3, 5, 20)]
    embeddings = finder.embed(paths)
    assert (embeddings.shape, embeddings.dtype) == ((3, 8), np.float32)
    gallery = finder.gallery
    assert gallery is not None
    np.testing.assert_allclose(embeddings[:2], [gallery.vector("image_03"), gallery.vector("image_05")], atol=1e-6)
    crops = np.stack([preprocess(make_xray(n), finder.card.preprocess) for n in (3, 5, 20)])[:, None]
    np.testing.assert_allclose(finder.embed(crops), embeddings, atol=1e-6)
    assert finder.embed([]).shape == (0, 8)
    with pytest.raises(EngineError, match="expected a batch"):
        finder.embed(make_xray(1))
    for single in (str(paths[0]), paths[0], paths[0].read_bytes()):
        with pytest.raises(UserError, match="expected a list of images"):
            finder.embed(single)  # type: ignore[arg-type]


def test_models_and_galleries_that_cannot_be_opened(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, make_tiny_model: Make
) -> None:
    with pytest.raises(ModelError):
        Finder.open(tmp_path / "missing.onnx", tiny_gallery)
    with pytest.raises(GalleryError):
        Finder.open(tiny_model, tmp_path / "missing")
    other = make_tiny_model(tmp_path / "other.onnx", fingerprint="tiny-1")
    with pytest.raises(GalleryError, match="gallery of this model"):
        Finder.open(other, tiny_gallery)
    half = make_tiny_model(tmp_path / "half.onnx", precision="float16")
    with Finder.open(half, tiny_gallery) as finder:
        assert finder.health().precision == "float16"


def test_an_image_that_cannot_be_read(finder: Finder, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(ImageError):
        finder.analyze(tmp_path / "text.png")


def test_closing_closes_the_gallery(tiny_model: Path, tiny_gallery: Path) -> None:
    gallery = Gallery.open(tiny_gallery)
    finder = Finder.open(tiny_model)
    Finder(finder.engine, gallery).close()
    with pytest.raises(GalleryError, match="closed"):
        len(gallery)


def test_agreement_matches_the_neighbours(finder: Finder, make_xray: MakeXray) -> None:
    analysis = finder.analyze(make_xray(99), k=7)
    gallery = finder.gallery
    assert gallery is not None
    assert [of.label for of in analysis.agreement] == ["Effusion", "Mass", "Nodule"]
    labels = [gallery.entry(n.id).labels or {} for n in analysis.neighbours]
    weights = np.exp(-np.square([n.distance for n in analysis.neighbours]) / (2 * finder.card.sigma**2))
    for of in analysis.agreement:
        values = [own[of.label] for own in labels]
        assert [of.positive, of.negative, of.uncertain, of.unknown] == [values.count(v) for v in (1, 0, -1, None)]
        known = np.array([value is not None for value in values])
        present = np.array([value in (1, -1) for value in values])
        assert of.share == pytest.approx(weights[present].sum() / weights[known].sum())


def test_neighbours_with_a_filter(finder: Finder, tiny_manifest: Path) -> None:
    asked = Filter(exclude_patients=frozenset({"patient_00"}), where="Effusion")
    analysis = finder.analyze(image(tiny_manifest, 6), k=50, filter=asked)
    assert len(analysis.neighbours) == 8 and all("Effusion" in one.labels for one in analysis.neighbours)
    assert analysis.agreement == ()  # filtered by label, so they say nothing about the image
    refined = finder.refine(finder.analyze(image(tiny_manifest, 6)), findings={"Effusion": 1})
    assert refined.neighbours and refined.agreement == ()
    again = finder.refine(refined, alike=[refined.neighbours[0].id])
    assert again.neighbours and again.agreement == (), "its query is still near the finding"
    assert not {"patient_00", "patient_03"} & {n.patient_id for n in analysis.neighbours}
    assert finder.analyze(image(tiny_manifest, 6), k=50, filter=Filter(view="AP")).neighbours == ()
    with pytest.raises(GalleryError, match="expected labels among"):
        finder.analyze(image(tiny_manifest, 6), filter=Filter(where="Hernia"))
    assert finder.analyze(image(tiny_manifest, 6), 3, exact=True).neighbours


def test_a_small_gallery_gives_no_novelty(finder: Finder, make_xray: MakeXray) -> None:
    assert finder.analyze(make_xray(99)).novelty is None


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_xray: MakeXray) -> Path:
    """A gallery of 130 similar images of 65 patients: bright at the top, dark at the bottom."""
    path = tmp_path_factory.mktemp("alike") / "gallery"
    ramp = np.linspace(230, 20, 64)[:, None] * np.ones((64, 64))
    crops = [np.clip(ramp + (make_xray(n) - 128.0) / 12, 0, 255).astype(np.uint8) for n in range(130)]
    with Finder.open(tiny_model, threads=1) as plain, Gallery.create(path, plain.card) as gallery:
        spec = plain.card.preprocess
        vectors = plain.embed(np.stack([preprocess(crop, spec) for crop in crops])[:, None])
        gallery.add([Entry(f"e{n:03}", "/x.png", f"p{n // 2}", view="PA") for n in range(130)], vectors)
    for n in (0, 1):
        Image.fromarray(crops[n]).save(path.parent / f"{n}.png")
    return path


def test_a_novel_image_gives_a_warning(tiny_model: Path, alike: Path, make_xray: MakeXray) -> None:
    ramp = np.linspace(20, 230, 64).astype(np.uint8)[:, None] * np.ones((1, 64), np.uint8)
    with Finder.open(tiny_model, alike, threads=1) as finder:
        turned = finder.analyze(ramp)
        assert turned.novelty is not None
        assert turned.novelty.flagged
        assert turned.novelty.percentile == 100
        assert turned.warnings[0] == NOTHING_ALIKE
        assert len(turned.neighbours) == 10
        upside_down = replace(finder.read(ramp), warnings=(SENTENCES["turned 2"], "Odd header."))  # type: ignore[arg-type]
        assert finder.analyze(upside_down).warnings[:3] == (SENTENCES["turned 2"], NOTHING_ALIKE, "Odd header.")
        usual = finder.analyze(alike.parent / "0.png", patient_id="p0")
        assert usual.novelty is not None
        assert not usual.novelty.flagged
        assert NOTHING_ALIKE not in usual.warnings


def test_novelty_does_not_depend_on_the_requested_neighbours(tiny_model: Path, alike: Path) -> None:
    """It depends on neither k, nor a filter, nor whether the patient's images are included."""
    with Finder.open(tiny_model, alike, threads=1) as finder:
        query = alike.parent / "0.png"
        first = finder.analyze(query, 10, patient_id="p0")
        assert first.novelty is not None
        for k, options in (
            (0, {}),
            (130, {}),
            (5, {"exclude_same_patient": False}),
            (5, {"filter": Filter(view="AP")}),
        ):
            again = finder.analyze(query, k, patient_id="p0", **options)  # type: ignore[arg-type]
            assert again.novelty == first.novelty
        own = {n.patient_id for n in finder.analyze(query, 130, patient_id="p0", exclude_same_patient=False).neighbours}
        assert "p0" in own
        assert set(first.to_json()["novelty"]) == {"distance", "percentile", "flagged"}


def test_an_image_of_the_gallery_is_not_its_own_neighbour_for_novelty(
    tiny_model: Path, alike: Path, tmp_path: Path
) -> None:
    """Its patient is unknown, so no neighbours are excluded."""
    shutil.copytree(alike, tmp_path / "gallery")
    query = alike.parent / "0.png"
    with Finder.open(tiny_model, alike, threads=1) as finder:
        before = finder.analyze(query, 60)
    with Gallery.open(tmp_path / "gallery") as gallery:
        gallery.add([Entry("own", "/x.png", "", sha256=read_image(query).sha256)], before.embedding[None])
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1) as finder:
        after = finder.analyze(query, 60)
    assert before.novelty is not None
    assert after.novelty is not None
    assert after.novelty.distance == pytest.approx(before.novelty.distance, abs=1e-6)
    assert {"own", "e000"} == {n.id for n in after.neighbours[:2]}
    assert len(after.neighbours) == 60


def test_without_the_key_of_pseudonyms_a_reader_is_warned(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cbmir.runtime.finder as module

    key = Pseudonyms(bytes(range(40)))
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(tiny_manifest), tmp_path / "g", pseudonyms=key)
    new = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    with Finder.open(tiny_model, tmp_path / "g", threads=1, pseudonyms=key) as finder:
        assert len(finder.analyze(new, 50, patient_id="patient_01").neighbours) == 18
    real = module.read_image
    monkeypatch.setattr(
        module, "read_image", lambda source, **options: replace(real(source, **options), patient_id="patient_01")
    )
    with Finder.open(tiny_model, tmp_path / "g", threads=1) as finder:
        analysis = finder.analyze(new, 50)
        assert len(analysis.neighbours) == 20
        assert ["opened without their key" in warning for warning in analysis.warnings] == [True]
        assert finder.analyze(new, 50, exclude_same_patient=False).warnings == ()
        in_it = finder.analyze(image(tiny_manifest, 6), 50)  # its entry has the patient's pseudonym
        assert len(in_it.neighbours) == 18
        with pytest.raises(GalleryError, match="pseudonyms"):
            finder.analyze(new, patient_id="patient_01")
