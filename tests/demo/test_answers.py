"""The parts of an answer: escaping, order, warnings, and meaning in words, never by colour alone."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from urllib.parse import parse_qs, urlencode

import numpy as np
import pytest

from cbmir.card import Calibration, ModelCard, OperatingPoint
from cbmir.demo.controls import MOST_NEIGHBOURS, Controls
from cbmir.demo.page.alerts import alerts_html, error_html, is_grave
from cbmir.demo.page.findings import GATE, UNCOUNTED, findings_html, neighbours_say, novelty_html
from cbmir.demo.page.markup import escape, percent
from cbmir.demo.page.similar_images import card, label_marks, mentions
from cbmir.errors import UserError
from cbmir.labels import spelled
from cbmir.manifest import Box
from cbmir.runtime import Analysis, Entry, Finding, LabelAgreement, Neighbour
from cbmir.runtime.imaging.image_warning import ImageWarning
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.neighbours import IN_GALLERY, NOTHING_ALIKE, PATIENT_UNKNOWN
from cbmir.runtime.novelty import Novelty

NASTY = '<script>alert("x")</script>\'"><img src=x onerror=alert(1)> {{constructor}} ${1+1} `'


def text_of(page: str) -> str:
    return html.unescape(re.sub("<[^>]*>", " ", page))


def analysis(*findings: Finding, **changes: object) -> Analysis:
    empty = Analysis("x.png", findings, (), (), np.zeros(4), np.zeros((4, 2, 2)), {}, {}, query=np.zeros(4))
    return replace(empty, **changes)  # type: ignore[arg-type]


def entry(**labels: int | None) -> Entry:
    return Entry("a1", "/secret/a1.png", "p1", view="PA", labels=labels or {"Effusion": 1, "Mass": -1, "Nodule": 0})


@pytest.mark.parametrize("made", [escape(NASTY), alerts_html([NASTY], [NASTY]), error_html(NASTY)])
def test_no_data_becomes_markup(made: str) -> None:
    assert "<script" not in made and "<img" not in made
    assert "{{" not in made and "${" not in made and "`" not in made
    assert NASTY in text_of(made)


def test_findings_are_spelled_for_people() -> None:
    assert [spelled(one) for one in ("Pleural_Thickening", "Lung Opacity", "Mass")] == [
        "Pleural thickening", "Lung opacity", "Mass",
    ]  # fmt: skip
    assert [percent(share) for share in (0, 0.001, 0.996)] == ["0%", "<1%", "100%"]


def test_grave_warnings_come_first_and_routine_ones_last() -> None:
    said = [PATIENT_UNKNOWN, ImageWarning("little contrast", "Pale."), NOTHING_ALIKE, SENTENCES["inverted"]]
    made = alerts_html(said)
    assert re.findall('class="(note [a-z]+|routine)"', made) == ["note bad", "note bad", "note warn", "routine"]
    assert "Black and white look swapped" in made and "Patient unknown: their other images may appear." in made
    assert [is_grave(one) for one in said] == [False, False, True, True]
    assert alerts_html([]) == ""
    assert 'class="note' not in alerts_html([IN_GALLERY])


def test_only_the_first_files_left_out_are_named() -> None:
    text = text_of(alerts_html([], list("abcdefghijkl")))
    assert "12 of the files are not shown" in text and "and 2 more" in text


def test_findings_stand_above_and_below_their_thresholds(tiny_card: ModelCard) -> None:
    point = OperatingPoint(0.5, 0.81, 0.72, None, None)
    of_card = tiny_card.with_(operating_points={"balanced": (point, None, None)})
    made = findings_html(of_card, analysis(
        Finding("Mass", 0.2, 0.1, False, 0.9), Finding("Effusion", 0.7, 0.8, True, 0.5),
        Finding("Nodule", 0.3, None, None, None),
        agreement=(LabelAgreement("Effusion", 3, 16, 0, 1, 0.2, gallery=0.07, above_chance=True),),
    ))  # fmt: skip
    assert re.findall('data-finding="(.*?)"', made) == ["Effusion", "Mass", "Nodule"]
    assert [" ".join(text_of(one).split()) for one in re.findall("<h3>.*?</h3>", made)] == [
        "Above the threshold 1", "Below the threshold 1", "No threshold 1",
    ]  # fmt: skip
    assert "in 3 of 19 similar images, gallery 7%" in made
    assert "sensitivity 81% and specificity 72%" in made
    assert "not in the gallery" in made


def test_similar_images_found_by_labels_are_not_counted(tiny_card: ModelCard) -> None:
    one = Finding("Mass", 0.2, 0.1, False, 0.9)
    near = Neighbour("a1", "", "", 1, 0.5, ("Mass",), (), "")
    assert UNCOUNTED in findings_html(tiny_card, replace(analysis(one), neighbours=(near,)))
    assert UNCOUNTED not in findings_html(tiny_card, analysis(one))


def test_findings_behind_a_grave_warning_are_shown_on_request(tiny_card: ModelCard) -> None:
    one = analysis(Finding("Mass", 0.2, 0.1, False, 0.9))
    assert GATE in findings_html(tiny_card, one, gated="an image")
    assert GATE not in findings_html(tiny_card, one)


@pytest.mark.parametrize(
    ("predicted", "positive", "gallery", "above_chance", "differs"),  # .8^20 = .01, .9^20 = .12
    [(True, 0, 0.2, False, True), (True, 0, 0.1, False, False), (True, 1, 0.2, False, False),
     (False, 9, 0.1, True, True), (False, 1, 0.1, False, False), (None, 9, 0.1, True, False)],
)  # fmt: skip
def test_similar_images_may_disagree(
    predicted: bool | None, positive: int, gallery: float, above_chance: bool, differs: bool
) -> None:
    of = LabelAgreement("Mass", positive, 20 - positive, 0, 0, 0.1, gallery=gallery, above_chance=above_chance)
    assert neighbours_say(Finding("Mass", 0.5, 0.5, predicted, 0.4), of)[1] is differs


def test_similar_images_without_labels_say_nothing() -> None:
    finding = Finding("Mass", 0.5, 0.5, True, 0.4)
    assert neighbours_say(finding, LabelAgreement("Mass", 0, 0, 0, 5, None)) == (
        "not known for the similar images", False,
    )  # fmt: skip
    assert neighbours_say(finding, None)[1] is False


def test_novelty_is_a_line() -> None:
    assert "More unusual than 86% of the gallery's images (flagged above 99%)." in novelty_html(Novelty(0.3, 86, False))
    assert "too small" in novelty_html(None)


def test_labels_are_marked_by_words() -> None:
    one = Neighbour("a1", "", "", 1, 0.5, ("Effusion", "Mass"), ("Effusion",), "", uncertain=("Mass",))
    marks = label_marks(("Effusion", "Nodule", "Hernia"), entry(), one)
    assert [(mark["text"], mark["kind"]) for mark in marks] == [
        ("Effusion", "shared"), ("Mass (uncertain)", "theirs"), ("not: Nodule", "ours"), ("unknown: Hernia", "unknown"),
    ]  # fmt: skip
    assert {mark["kind"] for mark in label_marks(None, entry(), one)} == {"plain"}


@pytest.mark.parametrize(
    ("labels", "said"),
    [({"Mass": 0}, "no finding"), ({"Mass": None, "Edema": 0}, "no finding known"), (None, "no finding known")],
)
def test_an_image_without_a_label_may_have_findings(labels: dict[str, int | None] | None, said: str) -> None:
    one = Neighbour("a1", "", "", 1, 0.5, (), (), "")
    assert [mark["text"] for mark in label_marks((), replace(entry(), labels=labels), one)] == [said]


def test_a_card_has_no_path_and_no_patient() -> None:
    neighbour = Neighbour(
        "a1", "/secret/a1.png", "p1", 0.25, 0.96875, ("Effusion",), ("Effusion",), "Small effusion. No mass.",
        boxes=(Box("Effusion", 0.1, 0.2, 0.3, 0.4),),
    )  # fmt: skip
    made = card(1, neighbour, entry(), b"\xff\xd8", "Alike", ("Effusion",))
    assert made["report"] == [("Small ", False), ("effusion", True), (". No mass.", False)]
    assert made["boxes"] == [pytest.approx([0.1, 0.2, 0.4, 0.6])]
    assert (made["words"], made["facts"]) == ("Alike", "PA")
    assert "secret" not in json.dumps(made) and "p1" not in json.dumps(made)


def test_controls_are_a_filter_and_chips_that_can_be_removed() -> None:
    controls = Controls(
        having=("Mass",), without=("Pleural_Thickening",), where="Edema or Hernia", view="PA", source="B"
    )
    assert (controls.filter.view, controls.filter.source) == ("PA", "B")
    assert controls.filter.where == '"Mass" and not "Pleural_Thickening" and (Edema or Hernia)'
    assert [chip["text"] for chip in controls.chips()] == [
        "with Mass", "without Pleural thickening", "Edema or Hernia", "view PA", "source B",
    ]  # fmt: skip
    assert Controls().of_link(parse_qs(urlencode(controls.link()))) == controls
    for chip in controls.chips():
        controls = controls.dropped(chip["name"])
    assert controls == Controls()
    assert Controls(view="PA", k=7).dropped("") == Controls(k=7)
    assert Controls.of(controls.values()) == controls
    with pytest.raises(UserError, match="on the page"):
        controls.dropped("k")


@pytest.mark.parametrize("k", [0, MOST_NEIGHBOURS + 1, "5", None, True])
def test_controls_refuse_values_that_no_control_offers(k: object) -> None:
    with pytest.raises(UserError, match="similar images"):
        Controls.of((k, *Controls().values()[1:]))


def test_a_search_in_words() -> None:
    assert Controls().text(known=True) == "20 images; same patient left out"
    assert Controls(view="AP").text(known=False) == "20 images; same patient not left out (patient unknown); view AP"
    assert Controls().text(known=None) == "20 images"


def test_calibration_gives_the_tick(tiny_card: ModelCard) -> None:
    of_card = tiny_card.with_(calibration=(Calibration(4.0, -2.0), None, None))
    assert 'style="left:50.0%"' in findings_html(of_card, analysis(Finding("Effusion", 0.7, 0.6, True, 0.5)))


def test_labels_are_found_in_a_report() -> None:
    report = "Small pleural thickening. No mass, MASSIVE effusion."
    assert mentions(report, ("Pleural_Thickening", "Mass")) == [
        ("Small ", False), ("pleural thickening", True), (". No ", False), ("mass", True),
        (", MASSIVE effusion.", False),
    ]  # fmt: skip
    assert mentions(report, ()) == [(report, False)] and mentions("", ("Mass",)) == []
