"""Cells that contain a list of labels."""

from __future__ import annotations

import ast

import pytest

from cbmir.training.readers.common import listed_labels


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", []), ("nan", []), ("['a', 'b ']", ["a", "b"]), ('["caf\\u00e9"]', ["café"]), ("7", None), ("[7]", None)],
)
def test_lists_of_labels(text: str, expected: list[str] | None) -> None:
    assert listed_labels(text) == expected


@pytest.mark.filterwarnings("ignore")  # as in use, where Python's parser only warns about an unknown escape
def test_escapes_of_json() -> None:
    assert listed_labels(r'["a\/b", "\ud83e\udec1"]') == ["a/b", "\N{LUNGS}"]


def test_a_list_that_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser needs hundreds of bytes of memory per character."""
    monkeypatch.setattr(ast, "literal_eval", None)
    assert listed_labels("[" + "'a'," * 100_000 + "]") is None
