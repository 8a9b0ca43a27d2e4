from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.training.readers.covid import read_covid, read_ralo
from published_tables import copy_tables, draw_images


@pytest.fixture
def covid(shared: Path, tmp_path: Path) -> Path:
    folder = copy_tables(shared, "covid", tmp_path)
    draw_images(folder, [f"images/invented-{number}.jpg" for number in range(12)])
    return folder


def test_views_modalities_findings_and_dates(covid: Path) -> None:
    manifest = read_covid(covid)
    assert manifest.labels.names == ("Bacterial", "COVID-19", "Pneumonia", "Streptococcus", "Viral")
    assert [(row.image.name, row.patient_id, row.view, row.date) for row in manifest] == [
        ("invented-1.jpg", "900", "AP", ""), ("invented-2.jpg", "901", "AP", "2017-03-02"),
        ("invented-4.jpg", "902", "PA", "2020-01-01"), ("invented-6.jpg", "903", "AP", "2017-03-02"),
        ("invented-8.jpg", "904", "PA", "2020-01-01"), ("invented-9.jpg", "904", "AP", ""),
    ]  # fmt: skip
    assert [row.labels for row in manifest][:3] == [(0, 0, 0, 0, 0), (1, 0, 1, 1, 0), (0, 1, 1, 0, 1)]
    assert manifest.rows[0].report == "invented note"
    policies = manifest.about["policies"]
    assert policies["left_out_by_view"] == {"L": 3}
    assert policies["left_out_by_modality"] == {"CT": 3}
    assert policies["dates_not_read"] == 2, "a year is no day"


def test_unread_images_have_unknown_labels(covid: Path) -> None:
    manifest = read_covid(covid, frontal_only=False)
    lateral = [row for row in manifest if row.view == "LATERAL"]
    assert [row.labels for row in lateral] == [(None,) * 5] * 3


RALO = (
    ",,Reader 1,,Reader 2,\n"
    "Subject_ID,Exam_DateTime,Total GEOGRAPHIC,Total OPACITY,Total GEOGRAPHIC,Total OPACITY\n"
    "s1,20200401_120000,3,2,4,1.5\ns1,20200402_1,0,0,0,0\ns2,20200403_1,1,0,1,1\ns3,spring,1,3,1,1\n"
)


@pytest.fixture
def ralo(tmp_path: Path) -> Path:
    (tmp_path / "ralo-dataset-metadata.csv").write_text(RALO, "utf-8")
    draw_images(tmp_path, [f"CXR_images_scored/{number}.jpg" for number in range(4)])
    return tmp_path


def test_scores_of_two_readers(ralo: Path) -> None:
    manifest = read_ralo(ralo)
    assert [row.labels for row in manifest] == [(1,), (0,), (-1,), (1,)]
    assert [(row.image.name, row.patient_id, row.date) for row in manifest] == [
        ("0.jpg", "s1", "2020-04-01"), ("1.jpg", "s1", "2020-04-02"), ("2.jpg", "s2", "2020-04-03"),
        ("3.jpg", "s3", ""),
    ]  # fmt: skip
    assert manifest.about["policies"]["dates_not_read"] == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Total GEOGRAPHIC,Total OPACITY\n", "Total GEOGRAPHIC\n", "a second line with Subject_ID"),
        ("1.5", "high", "row 3: expected a number in column 'Total OPACITY', found 'high'"),
        ("s2,", ",", "row 5: expected a subject and two scores"),
    ],
)
def test_invalid_scores(ralo: Path, old: str, new: str, message: str) -> None:
    (ralo / "ralo-dataset-metadata.csv").write_text(RALO.replace(old, new), "utf-8")
    with pytest.raises(ManifestError, match=message):
        read_ralo(ralo)
