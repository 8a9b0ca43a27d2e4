"""The parts of answers: escaped, sorted, and told in words and signs, never by colour alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cbmir.card import NOT_A_DEVICE, ModelCard, OperatingPoint
from cbmir.demo.examples import Example
from cbmir.demo.markup import alerts_html, error_html, escape, findings_html, novelty_html, thumbnail_url
from cbmir.demo.mentions import mark_mentions, sentences, speaks_of
from cbmir.demo.page import card_html, examples_html, page_html
from cbmir.demo.sessions import View, members_html
from cbmir.demo.similar_images import Likeness, agreement_html, label_marks, wall_html
from cbmir.manifest import Box
from cbmir.runtime import Entry, Finder, Finding, LabelAgreement, Neighbour
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.neighbours import NOTHING_ALIKE
from cbmir.runtime.novelty import Novelty

NASTY = '<script>alert("x")</script>\'"><img src=x onerror=alert(1)> {{constructor}} ${1+1} `'
LIKENESS = Likeness(np.linspace(-1, 0.9, 1000).astype(np.float32))


class _Page(HTMLParser):
    """Tags with their attributes, and the text, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def neighbour(**changes: object) -> Neighbour:
    values = {
        "id": "a1", "image": "/secret/place/a1.png", "patient_id": "p1", "distance": 0.25, "cosine": 0.96875,
        "labels": ("Effusion", "Mass"), "shared": ("Effusion",), "report": "Small effusion. No mass.",
    } | changes  # fmt: skip
    return Neighbour(**values)  # type: ignore[arg-type]


def entry(**labels: int | None) -> Entry:
    return Entry(
        "a1", "/secret/place/a1.png", "p1", view="PA", labels=labels or {"Effusion": 1, "Mass": -1, "Nodule": 0}
    )


def nasty_wall() -> str:
    boxes = (Box(NASTY, 0, 0, 1, 1),)
    one = neighbour(id=NASTY, patient_id=NASTY, labels=(NASTY,), shared=(NASTY,), report=NASTY, boxes=boxes)
    return wall_html([one], [Entry(NASTY, "", NASTY, view=NASTY, labels={NASTY: 1})], [NASTY], LIKENESS)


def test_escape_leaves_no_markup_and_no_template() -> None:
    assert not set("<>\"'{}$`") & set(escape(NASTY))
    assert _Page(escape(NASTY)).text == NASTY


@pytest.mark.parametrize(
    "html",
    [
        nasty_wall(),
        agreement_html([LabelAgreement(NASTY, 1, 0, 0, 0, 1.0)]),
        alerts_html([NASTY]),
        error_html(NASTY),
        examples_html([Example(Path("x.png"), b"jpeg", NASTY)]),
        mark_mentions(NASTY, [NASTY]),
    ],
)
def test_nothing_of_the_data_becomes_markup(html: str) -> None:
    page = _Page(html)
    assert "script" not in dict(page.tags)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "{{" not in html
    assert "${" not in html
    assert "<script>" in page.text + "".join(v or "" for _, attributes in page.tags for v in attributes.values())


def test_findings_are_sorted_and_say_what_is_known(tiny_card: ModelCard) -> None:
    findings = [
        Finding("Nodule", 0.95, None, None, None),
        Finding("Mass", 0.3, 0.2, False, 0.9),
        Finding("Effusion", 0.6, 0.8125, True, 0.5),
    ]
    html = findings_html(tiny_card, findings)
    rows = [_Page(row).text for row in re.findall(r"<li>.*?</li>", html)]
    assert rows == [
        "Effusion● predicted81%from 50%",  # Platt: 4 * 0.5 - 2 = 0
        "Massnot predicted20%from 77%",
        "Noduleno thresholdscore 0.95not calibrated",
    ]
    assert 'style="width:81.2%"' in html
    assert 'style="left:50.0%"' in html
    assert re.findall(r'data-evidence="(.*?)"', html) == ["finding:Effusion", "finding:Mass", "finding:Nodule"]


def test_little_is_not_shown_as_nothing(tiny_card: ModelCard) -> None:
    assert "<1%" in _Page(findings_html(tiny_card, [Finding("Mass", 0.1, 0.001, False, 0.9)])).text


def test_findings_keep_their_places_before_there_are_any(tiny_card: ModelCard) -> None:
    assert findings_html(tiny_card).count("<li>") == 3
    assert "button" not in findings_html(tiny_card)


def test_labels_are_marked_by_sign_and_words() -> None:
    marks = label_marks(("Effusion", "Nodule", "Hernia"), entry(), ("Effusion",))
    assert _Page(marks).text == (
        "= Effusion (on both)+ Mass (uncertain) (only on the look-alike)"
        "− Nodule (not on the look-alike)? Hernia (not known of it)"  # noqa: RUF001
    )
    assert "No finding" in label_marks((), Entry("a1", "", ""), ())


def test_card_of_the_wall() -> None:
    html = wall_html([neighbour(), neighbour(report=" ")], [entry(), entry()], ("Effusion",), LIKENESS)
    first, second = re.findall(r'<li class="card".*?</div></li>', html)
    for part in ("Nearly the same", "0.969", "patient p1 · PA", "= Effusion", "+ Mass"):
        assert part in _Page(first).text
    assert "<mark>Small effusion.</mark> No mass." in first
    assert f'src="{thumbnail_url("a1")}"' in first
    assert re.findall(r'data-act="(\w+)"', first) == ["compare", "compare", "like"]
    assert 'width="256" height="256"' in first  # its place is kept before it is there
    assert "No report" in second
    assert "/secret/place" not in html
    assert "No report" not in wall_html([neighbour(report="")], [entry()], (), LIKENESS)
    assert "passes these filters" in wall_html([], [], (), LIKENESS)


def test_an_id_is_no_path_in_an_address() -> None:
    assert thumbnail_url("../a b?c&d") == "thumbnail?id=..%2Fa%20b%3Fc%26d"


def test_alerts_have_the_flag_first() -> None:
    html = alerts_html(["one", NOTHING_ALIKE])
    assert [a["class"] for tag, a in _Page(html).tags if tag == "div"] == ["note bad", "note warn"]
    assert _Page(html).text == f"Caution. {NOTHING_ALIKE}Please noteone"
    both = _Page(alerts_html([SENTENCES["inverted"], NOTHING_ALIKE, "one"])).text
    assert both == f"Caution. {SENTENCES['inverted']}Caution. {NOTHING_ALIKE}Please noteone"
    assert "No warnings" in alerts_html([])


def test_novelty_is_told_in_a_line() -> None:
    text = _Page(novelty_html(Novelty(0.3, 98.94, False))).text
    assert text.startswith("This image is farther from the gallery than 98.9% of its own images; from 99% on")
    assert "Cannot tell" in novelty_html(None)


def test_agreement_has_the_most_agreed_on_first() -> None:
    html = agreement_html(
        [
            LabelAgreement("Mass", 1, 8, 1, 0, 0.21),
            LabelAgreement("Nodule", 0, 9, 0, 1, 0.0),
            LabelAgreement("Pleural_Thickening", 3, 0, 0, 7, 1.0),
        ]
    )
    assert "Pleural Thickening 100%, Mass 21%" in html
    assert [_Page(row).text for row in re.findall(r"<tr><th scope=.row.*?</tr>", html)] == [
        "Pleural Thickening100%3007", "Mass21%1810",
    ]  # fmt: skip
    assert agreement_html(()) == ""
    assert "None of the look-alikes" in agreement_html([LabelAgreement("Mass", 0, 3, 0, 0, 0.0)])


@pytest.mark.parametrize(
    ("cosine", "words"),
    [(1.0, "Nearly the same"), (0.895, "Very alike"), (0.85, "Alike"), (0.6, "Somewhat alike"), (0, "Little alike")],
)
def test_likeness_is_told_by_how_common_it_is(cosine: float, words: str) -> None:
    assert LIKENESS.words(cosine) == words


def test_likeness_without_a_pair_to_compare() -> None:
    assert Likeness(np.empty(0, np.float32)).words(0.9) == "Little alike"


@pytest.mark.parametrize(
    ("sentence", "label", "speaks"),
    [
        ("There is a large left pneumothorax.", "Pneumothorax", True),
        ("No pneumothorax.", "Pneumothorax", False),
        ("No mass; small effusions on both sides.", "Effusion", True),
        ("The heart is enlarged.", "Cardiomegaly", True),
        ("Without signs of oedema.", "Edema", False),
        ("Massive collapse.", "Mass", False),
        ("Pleural fluid on the left.", "Pleural Effusion", True),
        ("A rib fracture.", "Fracture", True),
        ("No focal consolidation, pleural effusion, or pneumothorax.", "Consolidation", False),
        ("No focal consolidation, pleural effusion, or pneumothorax.", "Effusion", False),
        ("No focal consolidation, pleural effusion, or pneumothorax.", "Pneumothorax", False),
        ("The lungs are clear without effusion, edema or pneumothorax.", "Edema", False),
        ("Pneumothorax is not seen.", "Pneumothorax", False),
        ("Heart is not enlarged.", "Cardiomegaly", False),
        ("The right effusion has resolved.", "Effusion", False),
        ("Resolution of the left effusion.", "Effusion", False),
        ("Neither effusion nor pneumothorax.", "Effusion", False),
        ("There is no longer a pneumothorax.", "Pneumothorax", False),
        ("Pneumonia is unlikely.", "Pneumonia", False),
        ("Rule out pneumonia.", "Pneumonia", False),
        ("The lungs do not show consolidation, effusion or nodules.", "Nodule", False),
        ("No change in the large right effusion.", "Effusion", True),
        ("No significant interval change in bibasilar atelectasis.", "Atelectasis", True),
        ("Not only effusion but pneumothorax.", "Effusion", True),
        ("Not only effusion but pneumothorax.", "Pneumothorax", True),
        ("The effusion has not resolved.", "Effusion", True),
        ("Pneumonia cannot be excluded.", "Pneumonia", True),
        ("Large effusion, no pneumothorax.", "Effusion", True),
        ("Large effusion, no pneumothorax.", "Pneumothorax", False),
        ("No pneumothorax, but there is a small effusion.", "Effusion", True),
        ("Small effusion without pneumothorax.", "Effusion", True),
        ("IMPRESSION: no acute disease, with stable cardiomegaly.", "Cardiomegaly", True),
        ("FINDINGS: Pleural effusion on the left", "Effusion", True),
        ("TECHNIQUE: without contrast\nFINDINGS: Large effusion.", "Effusion", True),
        ("NO EVIDENCE OF: EFFUSION.", "Effusion", False),
        ("Pneumothorax: None.", "Pneumothorax", False),
        ("PNEUMOTHORAX: NONE.", "Pneumothorax", False),
        ("Pneumothorax:\nNone.", "Pneumothorax", False),
        ("Pleural effusion: no.", "Effusion", False),
        ("Cardiomegaly: absent.", "Cardiomegaly", False),
        ("Pneumothorax not identified.", "Pneumothorax", False),
        ("Effusions - none.", "Effusion", False),
        ("Effusions - no.", "Effusion", False),
        ("Effusions \u2013 no.", "Effusion", False),
        ("The lungs are free\nof effusion.", "Effusion", False),
        ("Right pleural\n  fluid.", "Effusion", True),
        ("Small effusion - no pneumothorax.", "Effusion", True),
        ("Lungs are clear of consolidation and effusion.", "Effusion", False),
        ("There isn't any effusion.", "Effusion", False),
        ("The lungs don\u2019t show an effusion.", "Effusion", False),
        ("INDICATION: Evaluate pneumothorax.", "Pneumothorax", False),
        ("HISTORY: Pneumonia.", "Pneumonia", False),
        ("REASON FOR EXAM: pneumonia?", "Pneumonia", False),
        ("Radiograph to evaluate pneumothorax.", "Pneumothorax", False),
        ("No increased opacity to suggest pneumonia.", "Pneumonia", False),
        ("No increased interstitial markings, effusion or pneumothorax.", "Effusion", False),
        ("No increased interstitial markings, effusion or pneumothorax.", "Pneumothorax", False),
        ("No increase in the right effusion.", "Effusion", True),
    ],
)
def test_sentences_that_speak_of_a_finding(sentence: str, label: str, speaks: bool) -> None:
    assert speaks_of(sentence, label) is speaks


def test_what_a_study_leaves_out_is_told() -> None:
    assert members_html(View(1)) == ""
    page = _Page(members_html(View(1, left_out=(NASTY, *"abcdefghijk"))))
    assert page.text.startswith(f"Not all of it is shown.{NASTY}abc")
    assert page.text.endswith("iand 2 more")


def test_a_report_is_whole_after_it_is_cut_into_sentences() -> None:
    report = "FINDINGS: 6.4 cm mass. New!\n\nIMPRESSION: Mass? Yes\n"
    assert "".join(sentences(report)) == report
    assert mark_mentions(report, ["Mass"]) == (
        "<mark>FINDINGS: 6.4 cm mass.</mark> New!\n\n<mark>IMPRESSION: Mass?</mark> Yes\n"
    )


@pytest.mark.parametrize(
    ("report", "marked"),
    [
        ("no focal consolidation,\npleural effusion or pneumothorax.", []),
        ("No evidence of:\n- effusion\n- pneumothorax", []),
        ("No mass.\nLarge\neffusion.\n", ["Large\neffusion."]),
        ("No mass\n\nLarge effusion", ["Large effusion"]),
        ("No mass\r\n\r\nLarge effusion", ["Large effusion"]),
        ("FINDINGS:\nNo mass. A 1.5 cm\npleural effusion.", ["A 1.5 cm\npleural effusion."]),
    ],
)
def test_a_line_that_ends_does_not_end_a_sentence(report: str, marked: list[str]) -> None:
    html = mark_mentions(report, ["Consolidation", "Effusion", "Pneumothorax"])
    assert re.findall("<mark>(.*?)</mark>", html, re.DOTALL) == marked
    assert "".join(sentences(report)) == report


def test_card_page_has_intervals_and_leaves_out_what_is_not_known(tiny_card: ModelCard) -> None:
    card = tiny_card.with_(
        metrics={"val auc": {"value": 0.71, "low": 0.6, "high": 0.8}, "val all queries": {
            "queries": 3, "ndcg": {"value": 0.3, "low": 0.2, "high": 0.4},
            "corrected_ndcg": {"value": 0.1, "low": None, "high": None},
            "acg": {"value": None, "low": None, "high": None}}},
        training={"source": NASTY, "images": {"train": 1237}, "labels": {"Mass": {"positive": 5, "negative": 7}}},
    )  # fmt: skip
    text = _Page(card_html(card)).text
    for part in (NOT_A_DEVICE, "AUC, validation0.7100.600 to 0.800", "nDCG, validation, all queries0.300", NASTY,
                 "nDCG corrected for chance, validation, all queries0.100not available",
                 "train 1,237", "Mass57", "Limits"):  # fmt: skip
        assert part in text
    assert "Epochs" not in text and "ACG" not in text
    assert "no metrics" in card_html(tiny_card)


def test_card_page_lists_operating_points(tiny_card: ModelCard) -> None:
    assert "Operating pointsThe card has none." in _Page(card_html(tiny_card)).text
    points = {
        "sensitive": (OperatingPoint(0.25, 0.9, 0.4, 0.31, None), None, None),
        "specific": (OperatingPoint(0.75, 0.5, 0.92, 0.6, 0.8), None, None),
    }
    text = _Page(card_html(tiny_card.with_(operating_points=points))).text
    assert "Effusion, sensitive0.25090%40%31%not availableEffusion, specific0.75050%92%60%80%" in text
    assert "Mass, s" not in text


def test_page_says_what_it_is_not_and_names_no_other_place(tiny_model: Path, tiny_gallery: Path) -> None:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        html = page_html(finder, [], None)
    assert NOT_A_DEVICE in html
    assert "http" not in html
    assert "cbmir index map" in html
    assert "$" not in html
