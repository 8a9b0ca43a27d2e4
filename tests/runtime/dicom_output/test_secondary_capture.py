"""The secondary capture: the content of its page, for few and many labels, and the DICOM object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from cbmir.labels import NIH_14, LabelSet
from cbmir.runtime import Finder, read_image
from cbmir.runtime.dicom_output import make_results

pytest.importorskip("highdicom")

from cbmir.runtime.dicom_output import secondary_capture
from cbmir.runtime.dicom_output.secondary_capture import HEIGHT, NOTICE, WIDTH
from dicom_files import reread

Make = Callable[..., bytes]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """The texts on a page, with their right and lower edges."""
    found: list[tuple[int, int, str]] = []
    draw = secondary_capture.ImageDraw.ImageDraw.text

    def record(self: Any, xy: tuple[int, int], text: str, **options: Any) -> None:
        box = self.textbbox(xy, text, font=options["font"], anchor=options.get("anchor"))
        found.append((int(box[2]), int(box[3]), text))
        draw(self, xy, text, **options)

    monkeypatch.setattr(secondary_capture.ImageDraw.ImageDraw, "text", record)
    return found


def test_the_object(clinic: Any) -> None:
    page = reread(clinic.results(kinds=["sc"]).sc)
    assert page.SOPClassUID.name == "Secondary Capture Image Storage"
    assert (page.StudyInstanceUID, page.PatientName) == ("1.2.826.0.1.1.11.1", "Muster^Erika")
    assert (page.PhotometricInterpretation, page.BitsStored, page.ConversionType) == ("RGB", 8, "WSD")
    assert "For research, not for diagnosis" in page.ImageComments
    (source,) = page.SourceImageSequence
    assert source.ReferencedSOPInstanceUID == "1.2.826.0.1.1.11.3"
    assert source.PurposeOfReferenceCodeSequence[0].CodeValue == "121322"
    assert page.pixel_array.shape == (HEIGHT, WIDTH, 3)
    assert page.SOPInstanceUID == clinic.results(kinds=["sc"]).sc.SOPInstanceUID


def test_it_shows_the_image_and_evidence(clinic: Any, make_radiograph: Make) -> None:
    pixels: NDArray[np.uint8] = clinic.results(kinds=["sc"]).sc.pixel_array
    image = read_image(clinic.image).pixels
    side, top, left = secondary_capture._PICTURE, secondary_capture._TOP + 40, secondary_capture._MARGIN
    plain = pixels[top : top + side, left : left + side][2:-2, 2:-2]
    assert (np.ptp(plain, axis=2) == 0).all()
    fitted = ImageOps.contain(Image.fromarray(image), (side, side), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(plain[..., 0], np.array(fitted)[2:-2, 2:-2])
    left += side + secondary_capture._GAP
    right = pixels[top : top + side, left : left + side].astype(int)
    assert (right[..., 0] - right[..., 2]).max() > 50 and (right[..., 2] - right[..., 0]).max() > 50  # orange, blue


def test_it_lists_the_findings(clinic: Any, texts: list[tuple[int, int, str]]) -> None:
    clinic.results(kinds=["sc"])
    said = [text for _, _, text in texts]
    analysis = clinic.finder.analyze(clinic.image)
    assert said.count(NOTICE) == 2 and NOTICE == "FOR RESEARCH, NOT FOR DIAGNOSIS"
    for finding in analysis.findings:
        assert finding.label in said and f"{finding.score:.2f}" in said
    assert sum(text.startswith("case-") for text in said) == 10
    assert sum(text.startswith("Effusion, Nodule (unc") for text in said) == 10  # cut to fit in two columns
    assert "nearest of 17 images in the gallery" in said
    assert not any("Muster" in text or "CLINIC" in text or "ROEBUCK" in text for text in said)


@pytest.mark.parametrize("burned_in", ["YES", "NO", None])
def test_burned_in_annotations_are_declared(
    clinic: Any, make_radiograph: Make, errors_of: Callable[..., list[str]], tmp_path: Path, burned_in: str | None
) -> None:
    """As on digitised films: the page shows them. If the image does not say, it may have them."""
    results = clinic.results(make_radiograph(BurnedInAnnotation=burned_in), kinds=["sc"])
    assert results.sc.BurnedInAnnotation == (burned_in or "YES")
    assert any("BurnedInAnnotation" in warning for warning in results.warnings) is (burned_in == "YES")
    assert errors_of(results.sc, tmp_path / "page") == []


def test_it_shows_warnings(clinic: Any, make_radiograph: Make, texts: list[tuple[int, int, str]]) -> None:
    clinic.results(make_radiograph(ViewPosition=None, BodyPartExamined=None), kinds=["sc"])
    said = " ".join(text for _, _, text in texts)
    assert "Please note" in said and "ViewPosition" in said and "BodyPartExamined" in said


@pytest.mark.parametrize("count", [1, 5, 14, 40])
@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (250, 70)])
def test_all_content_fits_on_the_page(
    clinic: Any, make_tiny_model: Callable[..., Path], tmp_path: Path, texts: list[tuple[int, int, str]], count: int,
    shape: tuple[int, int], make_radiograph: Make,
) -> None:  # fmt: skip
    names = (*NIH_14, *(f"A finding with quite a long name of its own {n}" for n in range(26)))[:count]
    model = make_tiny_model(
        tmp_path / "model.onnx", labels=LabelSet(names), thresholds=(0.01,) * count, calibration=(None,) * count,
        proxies_per_class=(2,) * (count + 1),
    )  # fmt: skip
    from dicom_files import make_dicom

    image = np.random.default_rng(0).integers(0, 4096, shape).astype(np.uint16)
    data = make_dicom(image, SeriesInstanceUID="1.2.5", ViewPosition=None, Modality=None, BodyPartExamined=None)
    with Finder.open(model, threads=1) as finder:
        make_results(data, finder.analyze(data), finder, kinds=["sc"])
    assert max(right for right, _, _ in texts) <= WIDTH - 8
    assert max(lower for _, lower, _ in texts) <= HEIGHT - 8
    shown = [text for _, _, text in texts if text.startswith(("A finding with", "Atelectasis"))]
    assert shown
