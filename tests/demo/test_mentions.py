"""Which sentences of a report speak of a finding."""

from __future__ import annotations

import pytest

from cbmir.demo.page.mentions import mentions, sentences, speaks_of


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


def test_a_report_is_whole_after_it_is_cut_into_sentences() -> None:
    report = "FINDINGS: 6.4 cm mass. New!\n\nIMPRESSION: Mass? Yes\n"
    assert "".join(sentences(report)) == report
    assert mentions(report, ["Mass"]) == [
        ("FINDINGS: 6.4 cm mass. ", True), ("New!\n\n", False), ("IMPRESSION: Mass? ", True), ("Yes\n", False),
    ]  # fmt: skip


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
    pieces = mentions(report, ["Consolidation", "Effusion", "Pneumothorax"])
    assert [piece.strip() for piece, speaks in pieces if speaks] == marked
    assert "".join(sentences(report)) == report
