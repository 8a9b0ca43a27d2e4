"""Readers' feedback, stored as CSV."""

from __future__ import annotations

import csv
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbmir.demo import feedback as module
from cbmir.demo.controls import Controls
from cbmir.demo.desk import Desk
from cbmir.demo.examples import find_examples
from cbmir.demo.feedback import Feedback
from cbmir.demo.sessions import Session
from cbmir.errors import UserError
from cbmir.runtime import Finder

FEW = Controls(k=4)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "feedback.csv"


@pytest.fixture
def desk(tiny_model: Path, wall_gallery: Path, table: Path, tmp_path: Path) -> Iterator[Desk]:
    with Finder.open(tiny_model, wall_gallery, threads=1) as finder:
        yield Desk(finder, find_examples(finder), lambda: tmp_path, table)


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_it_has_cases_and_labels_but_no_patients(desk: Desk, table: Path) -> None:
    session = Session()
    step = desk.example(session, FEW, 0)
    assert step.analysis is not None
    image, similar = desk.gallery.case_id(step.analysis.known[0]), step.neighbours[0].id
    desk.say(session, similar=similar, value=1)
    desk.say(session, similar=similar, value=None)
    decided = [finding for finding in step.analysis.findings if finding.predicted is not None]
    for finding in decided:
        desk.say(session, label=finding.label, value=0)
    said = rows(table)
    assert {(one["model"], one["image"]) for one in said} == {(desk.finder.card.fingerprint, image)}
    assert [(one["similar"], one["value"]) for one in said[:2]] == [(desk.gallery.case_id(similar), given)
                                                                    for given in ("1", "")]  # fmt: skip
    assert {one["label"]: one["value"] for one in said[2:]} == {
        one.label: "0" if one.predicted else "1" for one in decided
    }
    assert similar not in table.read_text("utf-8") and table.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "said",
    [
        {"similar": "nothing"}, {"label": "Nothing"}, {}, {"label": "Mass", "value": "1"},
        {"label": "Nodule"},  # it has no threshold, so the model made no decision to agree with
    ],
)  # fmt: skip
def test_feedback_on_things_not_on_the_page_is_refused(desk: Desk, table: Path, said: dict[str, object]) -> None:
    session = Session()
    desk.example(session, FEW, 0)
    with pytest.raises(UserError, match="on the page"):
        desk.say(session, **({"value": 1} | said))  # type: ignore[arg-type]
    assert rows(table) == []


def test_a_table_is_continued_and_another_file_is_left_alone(tmp_path: Path, table: Path) -> None:
    for value in (1, 0):
        Feedback(table).add("model", "image", label="Mass", value=value)
    assert [one["value"] for one in rows(table)] == ["1", "0"]
    (tmp_path / "other.csv").write_text("image,label\n")
    with pytest.raises(UserError, match="found another file"):
        Feedback(tmp_path / "other.csv")
    with pytest.raises(UserError, match="can be written"):
        Feedback(tmp_path / "missing" / "feedback.csv")


def test_it_does_not_fill_the_disk(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Feedback(table)
    monkeypatch.setattr(module, "_MOST_BYTES", 10)
    with pytest.raises(UserError, match="is full"):
        kept.add("model", "image", label="Mass", value=1)


def test_a_line_cut_short_by_a_full_disk_is_removed(table: Path) -> None:
    kept = Feedback(table)
    kept.add("model", "image", label="Mass", value=1)
    before, limits = table.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            kept.add("model", "image", label="Mass", value=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert table.read_bytes() == before
