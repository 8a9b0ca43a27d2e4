"""Results of a model without findings: only similar images, and a sentence that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset

from cbmir.card import WITHOUT_FINDINGS
from cbmir.runtime import Finder
from cbmir.runtime.dicom_output import make_results
from cbmir.runtime.dicom_output.content import NOTHING_TO_REPORT
from cbmir.runtime.dicom_output.identifiers import SIMILAR_IMAGE


@pytest.mark.parametrize("with_gallery", [True, False])
def test_results(
    with_gallery: bool, embedding_model: Path, embedding_gallery: Path, tmp_path: Path,
    make_radiograph: Callable[..., bytes], errors_of: Callable[[Dataset, Path], list[str]],
) -> None:  # fmt: skip
    data = make_radiograph()
    with Finder.open(embedding_model, embedding_gallery if with_gallery else None, threads=1) as finder:
        made = make_results(data, finder.analyze(data, 3), finder, kinds=("sr", "sc", "fhir"))
    assert made.sc is not None and made.fhir is not None
    assert (made.sr is not None) is with_gallery
    assert (NOTHING_TO_REPORT not in made.warnings) is with_gallery
    reports = [] if made.sr is None else [made.sr]
    assert [error for one in (*reports, made.sc) for error in errors_of(one, tmp_path / "result.dcm")] == []
    for sr in reports:
        _check_report(sr)
    resources: list[dict[str, Any]] = [entry["resource"] for entry in made.fhir["entry"]]
    (report,) = [one for one in resources if one["resourceType"] == "DiagnosticReport"]
    assert WITHOUT_FINDINGS in report["conclusion"] and "thresholds" not in report["conclusion"]
    assert len([one for one in resources if one["resourceType"] == "Observation"]) == with_gallery
    assert "operating point" not in json.dumps(made.fhir)


def _check_report(sr: Dataset) -> None:
    texts = [str(element.value) for element in sr.iterall() if element.VR in ("UT", "LO")]
    assert WITHOUT_FINDINGS in texts and "Certainty of Finding" not in texts and SIMILAR_IMAGE.meaning in texts
    assert not any("operating point" in text for text in texts)


def test_the_page_shows_evidence_for_the_nearest_neighbour(
    embedding_model: Path, embedding_gallery: Path, make_radiograph: Callable[..., bytes]
) -> None:
    data = make_radiograph()
    pages: list[Dataset] = []
    for gallery in (embedding_gallery, None):
        with Finder.open(embedding_model, gallery, threads=1) as finder:
            made = make_results(data, finder.analyze(data, 3), finder, kinds=("sc",))
        assert made.sc is not None
        pages.append(made.sc)
    shown, empty = (page.pixel_array[144:612, 524:992] for page in pages)
    assert shown.any() and not empty.any()
    assert np.unique(shown.reshape(-1, 3), axis=0).shape[0] > 100
