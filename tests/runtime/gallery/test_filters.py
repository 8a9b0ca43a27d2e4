"""Filters against the values of entries, and label expressions against three-valued logic."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.columns import Columns, Selection
from cbmir.runtime.gallery.filters import AllOf, AnyOf, Filter, HasLabel, parse
from cbmir.runtime.gallery.schema import Meta

LABELS = LabelSet(("Effusion", "Mass", "Lung Opacity", "Pleural_Thickening"))
EFFUSION, MASS, OPACITY = HasLabel(0), HasLabel(1), HasLabel(2)
UNKNOWN = -2


class FakeMeta:
    """Metadata with patients p1, p2, … and studies s1, s2, …, whose numbers are in their names."""

    labels = LABELS

    def patient_numbers(self, keys: frozenset[str]) -> set[int]:
        return {int(key[1:]) for key in keys if key.startswith("p")}

    def study_numbers(self, keys: frozenset[str]) -> set[int]:
        return {int(key[1:]) for key in keys if key.startswith("s")}


def rows(count: int = 400, seed: int = 0) -> Columns:
    rng = np.random.default_rng(seed)
    return Columns(
        np.arange(1, count + 1), rng.integers(0, 20, count), rng.integers(0, 100, count),
        rng.integers(0, 3, count).astype(np.int32), rng.integers(3, 6, count).astype(np.int32),
        (rng.integers(0, 5, count) * 10000 + 20190615).astype(np.int32) * (rng.random(count) > 0.2),
        rng.choice([1, 0, -1, UNKNOWN], (len(LABELS), count)).astype(np.int8),
        np.zeros((count, 2), np.float32), ("", "AP", "PA", "Klinik Süd", "NIH", "nih"),
    )  # fmt: skip


def passing(own: Columns, wanted: Filter) -> list[int]:
    selection = Selection(wanted, cast(Meta, FakeMeta()))
    mask = selection.passes(own, slice(None))
    at = np.arange(0, len(own), 3)
    np.testing.assert_array_equal(selection.passes(own, at), mask[at])
    return own.numbers[mask].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Effusion", EFFUSION),
        (" effusion ", EFFUSION),
        ("'Pleural Effusion'", EFFUSION),  # CheXpert's name
        ('"Lung Opacity"', OPACITY),
        ("lung opacity", OPACITY),
        ("pleural thickening", HasLabel(3)),
        ("not Mass", HasLabel(1, present=False)),
        ("not not Mass", MASS),
        ("Effusion and Mass or lung opacity", AnyOf((AllOf((EFFUSION, MASS)), OPACITY))),
        ("Effusion and (Mass OR lung opacity)", AllOf((EFFUSION, AnyOf((MASS, OPACITY))))),
        ("(((Effusion)))", EFFUSION),
        ("Effusion AND Mass and 'Lung Opacity'", AllOf((EFFUSION, MASS, OPACITY))),
        ("not (Effusion and Mass)", AnyOf((HasLabel(0, False), HasLabel(1, False)))),
        ("not (Effusion or not Mass)", AllOf((HasLabel(0, False), MASS))),
        ("not Effusion and Mass", AllOf((HasLabel(0, False), MASS))),
    ],
)
def test_expressions(text: str, expected: object) -> None:
    assert parse(text, LABELS) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Efusion", "expected labels among Effusion, Mass, Lung Opacity, Pleural_Thickening; found 'Efusion'"),
        ("Mass and Efusion", r"found 'Efusion' in 'Mass and Efusion'\. Did you mean 'Effusion'\?"),
        ("pleural thickning", r"Did you mean 'Pleural_Thickening'\?"),
        ("Effusion Mass", "found 'Effusion Mass'"),
        ("Effusion and", "expected a label, .* after 'Effusion and' in .*, found 'the end'"),
        ("", "after 'the beginning' in '', found 'the end'"),
        ("and Mass", "found 'and'"),
        ("(Effusion", "closing parenthesis after"),
        ("Effusion)", "expected and, or, or the end after 'Effusion'"),
        ("()", "expected a label"),
        ('"Lung Opacity', "closing quote"),
        ("Effusion not Mass", "found 'not'"),
        ("1 = 1; DROP TABLE entry", "found '1 = 1; DROP TABLE entry'"),
        ("(" * 51 + "Mass" + ")" * 51, "at most 50 nested parentheses"),
    ],
)
def test_invalid_expressions_are_refused(text: str, found: str) -> None:
    with pytest.raises(GalleryError, match=found):
        parse(text, LABELS)


def test_a_label_named_like_a_keyword_is_quoted() -> None:
    labels = LabelSet(("Not", "Mass"))
    assert parse("not 'not' and Mass", labels) == AllOf((HasLabel(0, False), HasLabel(1)))


def test_many_nots_are_accepted() -> None:
    assert parse("not " * 5001 + "Mass", LABELS) == HasLabel(1, False)


def random_expression(rng: np.random.Generator, depth: int) -> tuple[str, Any]:
    """A text, and its value in Kleene's logic: a function from labels to True, False or None (unknown)."""
    kind = rng.integers(4) if depth else 0
    if kind == 0:
        at = int(rng.integers(len(LABELS)))
        return f'"{LABELS.names[at]}"', lambda values: {1: True, -1: True, 0: False, UNKNOWN: None}[values[at]]
    left, of_left = random_expression(rng, depth - 1)
    if kind == 1:
        return f"not ({left})", lambda values: None if of_left(values) is None else not of_left(values)
    right, of_right = random_expression(rng, depth - 1)
    decisive = kind == 3  # True decides "or", False decides "and"

    def joint(values: Any) -> bool | None:
        both = {of_left(values), of_right(values)}
        return decisive if decisive in both else None if None in both else not decisive

    return f"({left}) {'or' if kind == 3 else 'and'} ({right})", joint


@pytest.mark.parametrize("seed", range(20))
def test_an_expression_passes_rows_known_to_match(seed: int) -> None:
    text, holds = random_expression(np.random.default_rng(seed), 4)
    own = rows(seed=seed)
    expected = [int(number) for number, values in zip(own.numbers, own.labels.T.tolist(), strict=True) if holds(values)]
    assert passing(own, Filter(where=text)) == expected


def test_not_passes_only_rows_known_to_be_negative() -> None:
    own = rows()
    assert passing(own, Filter(where="not Mass")) == own.numbers[own.labels[1] == 0].tolist()
    assert passing(own, Filter(where="Mass")) == own.numbers[np.abs(own.labels[1]) == 1].tolist()


@pytest.mark.parametrize("few", [True, False])
def test_patients_and_studies(few: bool) -> None:
    own = rows()
    patients = {f"p{n}" for n in range(1, 4 if few else 15)}
    found = passing(own, Filter(exclude_patients=frozenset(patients), exclude_studies=frozenset({"s7"})))
    expected = [
        int(number)
        for number, patient, study in zip(own.numbers, own.patients, own.studies, strict=True)
        if f"p{patient}" not in patients and study != 7
    ]
    assert found == expected
    assert 0 in own.patients[np.isin(own.numbers, found)]  # entries without a patient stay


def test_only_these_patients() -> None:
    own = rows()
    expected = own.numbers[np.isin(own.patients, (3, 7))].tolist()
    assert passing(own, Filter(only_patients=frozenset({"p3", "p7", "p99"}))) == expected
    assert passing(own, Filter(only_patients=frozenset({"p99"}))) == []
    none_left = Filter(only_patients=frozenset({"p3"}), exclude_patients=frozenset({"p3"}))
    assert passing(own, none_left) == []


def test_views_and_sources_ignore_case() -> None:
    own = rows()
    assert passing(own, Filter(view="pa")) == own.numbers[own.views == 2].tolist()
    assert passing(own, Filter(source=" KLINIK SÜD ")) == own.numbers[own.sources == 3].tolist()
    assert passing(own, Filter(source="Nih")) == own.numbers[own.sources >= 4].tolist()
    for nothing in (Filter(view="LATERAL"), Filter(view="NIH"), Filter(source="PA"), Filter(source="Klinik")):
        assert passing(own, nothing) == []


@pytest.mark.parametrize(
    ("since", "until", "first", "last"),
    [
        ("2020-06-15", "", 20200615, 20999999),
        ("", "2021-06-14", 1, 20210614),
        ("2020-06-15", "2020-06-15", 20200615, 20200615),
    ],
)
def test_both_days_are_included_and_entries_without_a_date_are_not(
    since: str, until: str, first: int, last: int
) -> None:
    own = rows()
    expected = own.numbers[(own.dates >= first) & (own.dates <= last)].tolist()
    assert expected and passing(own, Filter(since=since, until=until)) == expected


def test_all_conditions_must_hold() -> None:
    own = rows()
    wanted = Filter(exclude_patients=frozenset({"p3"}), where="Effusion", view="PA", source="NIH",
                    since="2020-01-01")  # fmt: skip
    mask = (own.patients != 3) & (np.abs(own.labels[0]) == 1) & (own.views == 2) & (own.dates > 20200000)
    mask &= own.sources >= 4
    assert mask.any() and passing(own, wanted) == own.numbers[mask].tolist()


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"since": "2020-02-30"}, "YYYY-MM-DD, found '2020-02-30'"),
        ({"until": "20200101"}, "YYYY-MM-DD, found '20200101'"),
        ({"since": "yesterday"}, "found 'yesterday'"),
        ({"since": "2021-01-01", "until": "2020-01-01"}, "days in order"),
        ({"exclude_patients": "p1"}, "a set of ids for exclude_patients"),
        ({"exclude_studies": None}, "a set of ids for exclude_studies, found nothing"),
        ({"only_patients": "p1"}, "a set of ids for only_patients, found a single text"),
        ({"only_patients": {"p1", ""}}, "for only_patients, found an empty one"),
        ({"where": None}, "text for where"),
        ({"view": None}, "text for view"),
        ({"source": 7}, "text for source"),
        ({"since": 20200101}, "text for since"),
    ],
)
def test_an_invalid_filter_is_refused(values: dict[str, Any], found: str) -> None:
    with pytest.raises(GalleryError, match=found):
        Filter(**values)


def test_an_empty_filter_is_false() -> None:
    assert not Filter() and not Filter(where=" ", view=" ", source=" ")
    assert Filter(view=" PA", where="Mass ") == Filter(view="PA", where="Mass")
    assert Filter(view="PA") and Filter(exclude_studies=frozenset({"s"}))
    assert Filter(exclude_patients=cast(Any, {"p"})).exclude_patients == frozenset({"p"})  # any collection will do
