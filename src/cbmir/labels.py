"""The findings of a model or a manifest, in order, and their names in data sets and standards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from cbmir.errors import ManifestError
from cbmir.text_table import MISSING_WORDS

#: The name of the negative class ("negative proxies" in the paper); never a column of a manifest.
NO_FINDING = "No Finding"


@dataclass(frozen=True)
class Code:
    """A standard code for DICOM output: coding scheme designator, value and meaning (DICOM PS3.3, 8.8)."""

    scheme: str
    value: str
    meaning: str


# SNOMED CT, or DICOM's own code if there is one for radiographs (PS3.16 CID 6104). Only concepts that mean exactly the
# label are listed, never a similar one: a widened mediastinum is not an enlarged cardiomediastinum.
_CODES = {
    "Atelectasis": Code("SCT", "46621007", "Atelectasis"),
    "Cardiomegaly": Code("SCT", "8186001", "Cardiomegaly"),
    "Consolidation": Code("SCT", "95436008", "Lung consolidation"),
    "Edema": Code("SCT", "19242006", "Pulmonary edema"),
    "Effusion": Code("SCT", "60046008", "Pleural effusion"),
    "Emphysema": Code("SCT", "87433001", "Pulmonary emphysema"),
    "Fibrosis": Code("SCT", "51615001", "Fibrosis of lung"),
    "Hernia": Code("SCT", "84089009", "Hiatal hernia"),
    "Infiltration": Code("SCT", "409609008", "Radiologic infiltrate of lung"),
    "Lung Opacity": Code("DCM", "112001", "Opacity"),
    "Mass": Code("SCT", "309529002", "Lung mass"),
    "Nodule": Code("SCT", "786838002", "Nodule of lung"),
    "Pneumonia": Code("SCT", "233604007", "Pneumonia"),
    "Pneumothorax": Code("SCT", "36118008", "Pneumothorax"),
}

#: NIH ChestX-ray14 in the order of its paper. NIH_13, the most common ones, leaves out Hernia.
NIH_14 = (
    "Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax",
    "Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia",
)  # fmt: skip
NIH_13 = NIH_14[:-1]

#: CheXpert's nine most common pathologies, named as in its CSV; EC, CM, LO, ED, CS, PNA, AT, PTX, PE in the paper.
CHEXPERT_9 = (
    "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Edema", "Consolidation", "Pneumonia",
    "Atelectasis", "Pneumothorax", "Pleural Effusion",
)  # fmt: skip

# Other names for it, as returned by `label_key`.
_NO_FINDING_KEYS = {"no finding", "no findings", "nofinding", "normal", "healthy"}

# Other spellings, as returned by `label_key`.
_ALIASES = {
    "pleural effusion": "Effusion",
    "pulmonary edema": "Edema",
    "pleural thicken": "Pleural_Thickening",
    "hiatal hernia": "Hernia",
}


def label_key(name: str) -> str:
    """Return the key by which labels are compared: lower case, with one space for hyphens, underscores and spaces."""
    return " ".join(name.replace("_", " ").replace("-", " ").split()).casefold()


def means_no_finding(name: str) -> bool:
    """Return whether a label is "No Finding" in any spelling ("no_finding"), or another word for it ("normal")."""
    return label_key(name) in _NO_FINDING_KEYS


def resembles_no_finding(name: str) -> bool:
    """Return whether a label begins with "no" or "normal" ("Normal study"), and so may mean "No Finding"."""
    return f"{label_key(name)} ".startswith(("normal", "no "))


_CANONICAL = {label_key(name): name for name in (*NIH_14, *CHEXPERT_9)} | _ALIASES


@lru_cache(maxsize=1024)  # called for each label of each similar image
def canonical(name: str) -> str:
    """Return the name that cbmir uses for a finding that data sets spell differently; unknown names stay unchanged."""
    return _CANONICAL.get(label_key(name), name)


def spelled(label: str) -> str:
    """Return a label as written in running text: `Pleural thickening`."""
    first, *rest = label.replace("_", " ").split(" ")
    return " ".join([first, *(word.lower() if word.istitle() else word for word in rest)])


def code_for(name: str) -> Code | None:
    """Return the standard code of a finding, or None if no concept means exactly this finding."""
    return _CODES.get(canonical(name))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown finding: the closest of `names`, or "" if none is close."""
    spellings = {canonical(one).casefold(): one for one in names}
    near = get_close_matches(canonical(name).casefold(), spellings, n=1)
    return f". Did you mean {spellings[near[0]]!r}?" if near else ""


@dataclass(frozen=True)
class LabelSet:
    """The findings of a model or a manifest, in a fixed order. It is empty only for embedding models."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        repeated = sorted(name for name, count in Counter(self.names).items() if count > 1)
        if repeated:
            raise ManifestError(f"expected each label once, found {', '.join(repeated)} more than once")
        first: dict[str, str] = {}
        for name in self.names:
            if name.lower() in MISSING_WORDS:
                raise ManifestError(f"expected the names of findings, found {name!r}, a word for a missing value")
            if means_no_finding(name):
                raise ManifestError(
                    f"{name!r} is not a label of its own: an image whose labels are all 0 is the negative class "
                    f"({NO_FINDING}); leave the column out"
                )
            if (other := first.setdefault(label_key(name), name)) != name:
                raise ManifestError(
                    f"expected labels that differ in more than case, blanks, hyphens and underscores, found "
                    f"{other!r} and {name!r}; spell them the same, or leave one out"
                )

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """Return the position of a label, by its name here or in another data set. Raises ManifestError if unknown."""
        if name in self.names:
            return self.names.index(name)
        wanted = canonical(name)
        for position, own in enumerate(self.names):
            if canonical(own) == wanted:
                return position
        raise ManifestError(f"expected one of {', '.join(self.names)}; found {name!r}{did_you_mean(name, self.names)}")

    def to_json(self) -> list[str]:
        return list(self.names)

    @classmethod
    def from_json(cls, names: Iterable[Any]) -> LabelSet:
        return cls(tuple(str(name) for name in names))
