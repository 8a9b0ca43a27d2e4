"""Which sentences of a report speak of a finding, so that a reader's eye lands on them.

This is reading aid, not language understanding: a sentence is marked where it names a finding and does not deny it,
before ("no effusion or pneumothorax") or behind ("the effusion has resolved"). Where in doubt it is not marked.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise

from cbmir.labels import canonical

#: How reports speak of a finding, beside its name: regular expressions for lower-case text.
_WAYS = {
    "Atelectasis": r"atelecta\w*|collapse\w*|volume loss",
    "Cardiomegaly": r"cardiomegal\w*|enlarged (?:heart|cardiac)|heart (?:is |size is )?(?:\w+ )?enlarged",
    "Consolidation": r"consolidat\w*",
    "Edema": r"o?edema\w*|vascular congestion",
    "Effusion": r"effusions?|pleural fluid",
    "Emphysema": r"emphysema\w*|hyperinflat\w*",
    "Fibrosis": r"fibro\w*|reticula\w*",
    "Hernia": r"hernia\w*",
    "Infiltration": r"infiltrat\w*",
    "Mass": r"mass(?:es)?",
    "Nodule": r"nod(?:ule|ul)\w*",
    "Pleural_Thickening": r"pleural thicken\w*|thicken\w* of the pleura",
    "Pneumonia": r"pneumonia\w*",
    "Pneumothorax": r"pneumothora\w*|pleural line",
}
#: A sentence's end. Reports are wrapped anywhere, so a line's end does not count, nor does a point between digits.
_END = re.compile(r"[.!?]+(?!\d)\s*|\n\s*\n\s*")
_HEADING = re.compile(r"^\s*[A-Z][A-Z /&(),-]*:", re.MULTILINE)  # "FINDINGS:"
#: Where another statement begins. A comma alone does not: it is that of a list, "no mass, nodule or effusion"; nor
#: does a colon, "pneumothorax: none".
_BETWEEN = re.compile(r";|\b(?:but|however|although|though|while|except)\b|, with\b|\bthere (?:is|are)\b")
#: Nothing after these is said to be there.
_DENIAL = re.compile(
    r"\b(?:no|not|nor|neither|never|without|free of|clear of|absence of|negative for|denies|resolution of|rather than|"
    r"rule out|evaluate|assess|indication|history|reason for)\b|\br/o\b|n['\u2019]t\b"
)
#: Nothing beside these is.
_DENIAL_BEHIND = re.compile(
    r"\b(?:not|no longer|none|resolved|cleared|disappeared|absent|excluded|ruled out|unlikely)\b|n['\u2019]t\b|"
    r": *(?:no|nil|negative)\b|[-\u2013] *(?:no|nil|negative)\W*$"
)
#: They look like denials; but what does not change is there, and what cannot be excluded may be.
_NO_DENIAL = re.compile(
    r"\b(?:no|not|without)(?: (?:a|any|significant|substantial|interval|appreciable|relevant|much))* "
    r"(?:changed?|increased?|decreased?|improvement|improved|progression) (?:in|of)\b|\bnot only\b|"
    r"\bnot (?:yet |been |fully |completely )*(?:resolved|cleared|disappeared)\b|"
    r"\b(?:cannot|can not|could not|not) (?:be )?(?:entirely |completely |fully )?(?:excluded|ruled out)\b"
)


def sentences(report: str) -> list[str]:
    """The report in pieces, which together are the report."""
    ends = [end.end() for end in _END.finditer(report)]
    return [report[start:end] for start, end in pairwise([0, *ends, len(report)]) if start < end]


def speaks_of(sentence: str, label: str) -> bool:
    """Whether a sentence says that a finding is there, as far as its words tell."""
    name = canonical(label)
    ways = re.compile(rf"\b(?:{_WAYS.get(name, re.escape(name.replace('_', ' ').lower()))})\b")
    text = _HEADING.sub(lambda heading: heading[0] if _DENIAL.search(heading[0].lower()) else ";", sentence)
    statements = _BETWEEN.split(_NO_DENIAL.sub("", " ".join(text.lower().split())))
    return any(ways.search(_DENIAL.split(one)[0]) for one in statements if not _DENIAL_BEHIND.search(one))


def mentions(report: str, labels: Collection[str]) -> list[tuple[str, bool]]:
    """The report's sentences, each with whether it speaks of one of the labels. Together they are the report."""
    return [(piece, any(speaks_of(piece, label) for label in labels)) for piece in sentences(report)]
