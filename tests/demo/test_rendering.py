"""The demo's HTML: escaped, sorted, and told in words."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cbmir.card import NOT_A_DEVICE
from cbmir.demo.examples import Example
from cbmir.demo.rendering import (
    agreement_html,
    escape,
    evidence_html,
    examples_html,
    findings_html,
    header_html,
    message_html,
    neighbours_html,
    novelty_html,
    search_text,
)
from cbmir.runtime import Finding, LabelAgreement, Neighbour
from cbmir.runtime.finder import NOTHING_ALIKE
from cbmir.runtime.novelty import Novelty

NASTY = '<script>alert("x")</script>\'"><img src=x onerror=alert(1)> {{constructor}} ${1+1} `'
FINDINGS = (
    Finding("Mass", 0.9, None, None, None),
    Finding("Pleural_Thickening", 0.3, 0.2, False, 0.5),
    Finding("Effusion", 0.6, 0.8125, True, 0.5),
    Finding("Nodule", 0.95, None, True, 0.9),
)


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
        "labels": ("Effusion", "Mass"), "shared": ("Effusion",), "report": "Small effusion.",
    } | changes  # fmt: skip
    return Neighbour(**values)  # type: ignore[arg-type]


def rows(html: str) -> list[str]:
    return [_Page(row).text for row in re.findall(r"<tr class.*?</tr>", html)]


def test_escape_leaves_no_markup_and_no_template() -> None:
    assert not set("<>\"'{}$`") & set(escape(NASTY))
    assert _Page(escape(NASTY)).text == NASTY


@pytest.mark.parametrize(
    "html",
    [
        findings_html([Finding(NASTY, 0.5, 0.5, True, 0.5)]),
        neighbours_html(
            [neighbour(id=NASTY, patient_id=NASTY, labels=(NASTY, NASTY + "2"), shared=(NASTY,), report=NASTY)], {}
        ),
        agreement_html([LabelAgreement(NASTY, 1, 0, 0, 0, 1.0)]),
        message_html([NASTY]),
        message_html((), NASTY),
        examples_html([Example(Path("x.png"), b"jpeg", NASTY)]),
    ],
)
def test_nothing_of_the_data_becomes_markup(html: str) -> None:
    page = _Page(html)
    assert "script" not in dict(page.tags)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "{{" not in html
    assert "${" not in html
    assert any("<script>" in (value or "") for _, attributes in page.tags for value in attributes.values()) or (
        "<script>" in page.text
    )


def test_findings_are_sorted_by_probability_and_those_without_come_last() -> None:
    found = [re.match(r"[A-Z]\w+( [A-Z]\w+)?", row) for row in rows(findings_html(FINDINGS))]
    assert [match and match[0] for match in found] == ["Effusion", "Pleural Thickening", "Nodule", "Mass"]


def test_a_finding_says_in_words_what_is_known() -> None:
    effusion, thickening, nodule, mass = rows(findings_html(FINDINGS))
    assert re.fullmatch(r"Effusion predicted81%0\.6000\.500show", effusion)
    assert re.fullmatch(r"Pleural Thickening not predicted20%0\.3000\.500show", thickening)
    assert re.fullmatch(r"Nodule predictednot available0\.9500\.900show", nodule)
    assert re.fullmatch(r"Mass no verdictnot available0\.900not availableshow", mass)


def test_bar_is_as_long_as_the_probability() -> None:
    assert 'style="width:81.2%"' in findings_html(FINDINGS[2:3])
    assert "width" not in findings_html(FINDINGS[:1])


def test_neighbour_card() -> None:
    html = neighbours_html([neighbour(), neighbour(id="b2", labels=(), shared=(), report=" ")], {"a1": b"\xff\xd8"})
    first, second = re.findall(r'<li class="card">.*?</div></li>', html)
    text = _Page(first).text
    for part in ("1", "a1", "Patient p1", "distance 0.250", "cosine 0.969", "Small effusion."):
        assert part in text
    assert "✓ Effusion (shared)" in text
    assert "✓ Mass" not in text
    assert "Mass" in text
    assert 'src="data:image/jpeg;base64,/9g="' in first
    assert "no picture" in second
    assert "No finding marked" in second
    assert "No report" in second
    assert "/secret/place" not in html


def test_a_report_that_takes_the_focus_has_a_name() -> None:
    (report,) = [a for _, a in _Page(neighbours_html([neighbour(id=NASTY)], {})).tags if "tabindex" in a]
    assert (report["role"], report["aria-label"]) == ("region", f"Report of {NASTY}")


@pytest.mark.parametrize(
    ("excluded", "known", "text"),
    [
        (True, True, "k = 7; same patient left out"),
        (True, False, "k = 7; same patient NOT left out, since it is not known"),
        (False, True, "k = 7; same patient NOT left out"),
        (False, False, "k = 7; same patient NOT left out"),
    ],
)
def test_what_was_searched_for(excluded: bool, known: bool, text: str) -> None:
    search = search_text(7, excluded=excluded, known=known)
    assert search == text
    assert f"{text}. ✓" in _Page(neighbours_html([neighbour()], {}, search)).text


def test_buttons_carry_the_keys_of_the_evidence() -> None:
    keys = [a["data-key"] for tag, a in _Page(findings_html(FINDINGS)).tags if tag == "button"]
    assert keys == ["finding:Effusion", "finding:Pleural_Thickening", "finding:Nodule", "finding:Mass"]
    assert [a["data-key"] for tag, a in _Page(neighbours_html([neighbour()], {})).tags if tag == "button"] == [
        "neighbour:a1"
    ]


def test_messages() -> None:
    assert message_html(()) == ""
    assert _Page(message_html((), "bad")).text == "Not analysed. bad"
    # Their container is the live region: one that comes together with its words is not announced.
    assert "role=" not in message_html(["one"]) + message_html((), "bad")
    assert _Page(message_html(["one", "two"])).text == "Please noteonetwo"


def test_nothing_alike_stands_by_itself_before_the_other_warnings() -> None:
    html = message_html([NOTHING_ALIKE, "one"])
    assert [a["class"] for tag, a in _Page(html).tags if tag == "div"] == ["message error", "message warning"]
    assert _Page(html).text == f"Caution. {NOTHING_ALIKE}Please noteone"
    assert _Page(message_html([NOTHING_ALIKE])).text == f"Caution. {NOTHING_ALIKE}"


def test_agreement_lists_what_some_neighbour_has_the_most_agreed_on_first() -> None:
    html = agreement_html(
        [
            LabelAgreement("Mass", 1, 8, 1, 0, 0.21),
            LabelAgreement("Nodule", 0, 9, 0, 1, 0.0),
            LabelAgreement("Pleural_Thickening", 3, 0, 0, 7, 1.0),
        ]
    )
    assert [_Page(row).text for row in re.findall(r"<tr><th scope=.row.*?</tr>", html)] == [
        "Pleural Thickening100%3007",
        "Mass21%1810",
    ]
    assert 'style="width:21.0%"' in html


def test_agreement_says_where_there_is_none() -> None:
    assert agreement_html(()) == ""
    assert "None of the neighbours" in agreement_html([LabelAgreement("Mass", 0, 3, 0, 0, 0.0)])


def test_evidence_line_names_the_cosine() -> None:
    assert "0.123" in evidence_html(0.1234)
    assert "Choose" in evidence_html(None)


def test_header_says_what_it_is_not() -> None:
    assert NOT_A_DEVICE in _Page(header_html()).text


def test_novelty_is_told_in_a_line() -> None:
    text = _Page(novelty_html(Novelty(0.3, 98.94, False))).text
    assert text.startswith("This image is farther from the gallery than 98.9% of its own images; from 99% on")
    assert "Cannot tell" in _Page(novelty_html(None)).text
