"""Label sets, names in other data sets, standard codes."""

from __future__ import annotations

import pytest

from cbmir.errors import ManifestError
from cbmir.labels import CHEXPERT_9, NIH_13, NIH_14, NO_FINDING, LabelSet, canonical, code_for, did_you_mean


def test_label_sets_of_the_paper() -> None:
    assert len(NIH_14) == len(set(NIH_14)) == 14
    assert set(NIH_14) - set(NIH_13) == {"Hernia"}
    assert len(CHEXPERT_9) == len(set(CHEXPERT_9)) == 9


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Pleural Effusion", "Effusion"),
        ("pleural_effusion", "Effusion"),
        ("Pleural Thickening", "Pleural_Thickening"),
        ("pleural  thicken", "Pleural_Thickening"),
        ("EDEMA", "Edema"),
        ("Hiatal Hernia", "Hernia"),
        ("lung_opacity", "Lung Opacity"),
        ("enlarged cardiomediastinum", "Enlarged Cardiomediastinum"),
        ("Scoliosis of our own", "Scoliosis of our own"),
    ],
)
def test_canonical(theirs: str, ours: str) -> None:
    assert canonical(theirs) == ours
    assert canonical(ours) == ours


def test_index_accepts_either_name() -> None:
    labels = LabelSet(("Pleural Effusion", "Mass"))
    assert (labels.index("Effusion"), labels.index("pleural effusion"), labels.index("Mass")) == (0, 0, 1)
    with pytest.raises(ManifestError, match="Pleural Effusion, Mass; found 'Nodule'"):
        labels.index("Nodule")


@pytest.mark.parametrize(
    ("typed", "meant"), [("Efusion", "Pleural Effusion"), ("mas", "Mass"), ("Nodule", ""), ("", "")]
)
def test_the_nearest_finding_is_suggested(typed: str, meant: str) -> None:
    names = ("Pleural Effusion", "Mass")
    assert did_you_mean(typed, names) == (f". Did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("Mass", "Nodule", "Mass"), "found Mass more than once"),
        (("Mass", NO_FINDING), "is the negative class"),
    ],
)
def test_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        LabelSet(names)


def test_json_round_trip() -> None:
    labels = LabelSet(NIH_14)
    assert LabelSet.from_json(labels.to_json()) == labels
    assert len(labels) == 14


def test_codes() -> None:
    assert code_for("Enlarged Cardiomediastinum") is None
    code = code_for("Pleural Effusion")
    assert code is not None and code == code_for("Effusion")
    assert (code.scheme, code.value) == ("SCT", "60046008")


def test_codes_agree_with_pydicoms_dictionary() -> None:
    """Our codes that are in DICOM's context groups have the same meaning there, and our meanings the same codes."""
    concepts = pytest.importorskip("pydicom.sr._concepts_dict").concepts
    entries = [*concepts["SCT"].values(), *concepts["DCM"].values()]
    by_code = {code: meaning for entry in entries for code, (meaning, _) in entry.items()}
    by_meaning = {meaning.lower(): code for code, meaning in by_code.items()}
    compared = 0
    codes = [code for code in map(code_for, (*NIH_14, "Lung Opacity")) if code]
    for code in codes:
        assert by_code.get(code.value, code.meaning).lower() == code.meaning.lower()
        assert by_meaning.get(code.meaning.lower(), code.value) == code.value
        compared += code.value in by_code
    assert compared >= 4
    assert len({code.value for code in codes}) == len(codes) == 14


@pytest.mark.parametrize(
    "name", ["No Finding", "no finding", "No_Finding", "No-Finding", "NORMAL", "normal", "Healthy"]
)
def test_variants_of_no_finding_are_refused_as_labels(name: str) -> None:
    with pytest.raises(ManifestError, match=f"{name!r} is not a label of its own: .*the negative class"):
        LabelSet(("Mass", name))


@pytest.mark.parametrize("name", ["None", "nan", "<NA>", "-"])
def test_words_for_a_missing_value_are_refused_as_labels(name: str) -> None:
    with pytest.raises(ManifestError, match=f"expected the names of findings, found {name!r}"):
        LabelSet(("Mass", name))


def test_labels_that_differ_only_in_case_or_separators_are_refused() -> None:
    with pytest.raises(ManifestError, match="found 'Pleural_Thickening' and 'pleural  thickening'"):
        LabelSet(("Pleural_Thickening", "Mass", "pleural  thickening"))
    with pytest.raises(ManifestError, match="found 'Air-trapping' and 'air trapping'"):
        LabelSet(("Air-trapping", "air trapping"))
    assert len(LabelSet(("Effusion", "Pleural Effusion"))) == 2


def test_an_exact_name_takes_precedence_over_an_alias() -> None:
    labels = LabelSet(("Effusion", "Pleural Effusion"))
    assert (labels.index("Pleural Effusion"), labels.index("Effusion"), labels.index("pleural_effusion")) == (1, 0, 0)
