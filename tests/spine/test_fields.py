"""Values of annotated types from JSON: conversions, and messages that name the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest
from hypothesis import given

from cbmir.fields import Within, from_json
from json_values import PROPERTY, VALUES


class Facts(TypedDict, total=False):
    count: int


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Within(0, 1)]


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["one", "two"]
    inner: tuple[Inner | None, ...] = ()
    facts: Annotated[dict[str, Any], Facts] | None = None
    numbers: dict[str, int] | None = None
    on: bool = False


def test_every_kind_of_field() -> None:
    made = from_json(Outer, {
        "name": "a", "kind": "two", "inner": [{"share": 1}, None], "facts": {"count": 3, "more": [None]},
        "numbers": {"a": 1}, "on": True,
    })  # fmt: skip
    assert made == Outer("a", "two", (Inner(1.0), None), {"count": 3, "more": [None]}, {"a": 1}, True)
    assert from_json(Outer, {"name": "a", "kind": "one"}) == Outer("a", "one")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"name": 1}, "name: expected text, found 1"),
        ({"name": None}, "name: expected text, found None"),
        ({"kind": "three"}, "kind: expected one of one, two, found 'three'"),
        ({"kind": ["one"]}, "kind: expected one of one, two"),
        ({"inner": {}}, "inner: expected a list, found {}"),
        ({"inner": [None, {"share": 1.5}]}, r"inner\[1\].share: expected a number from 0 to 1, found 1.5"),
        ({"inner": [{"share": True}]}, r"inner\[0\].share: expected a finite number, found True"),
        ({"inner": [{}]}, r"inner\[0\].share: expected a value, found none"),
        ({"inner": [{"share": 1, "b": 1}]}, r"inner\[0\].b: expected no such field, found one"),
        ({"facts": {"count": 1.5}}, "facts.count: expected a whole number, found 1.5"),
        ({"facts": {"more": [float("nan")]}}, r"facts.more\[0\]: expected a finite number, found nan"),
        ({"numbers": {"a": "1"}}, "numbers.a: expected a whole number, found '1'"),
        ({"on": 1}, "on: expected true or false, found 1"),
    ],
)
def test_the_message_names_the_field(change: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        from_json(Outer, {"name": "a", "kind": "one"} | change)


@PROPERTY
@given(VALUES)
def test_any_value_fits_or_is_a_value_error(value: Any) -> None:
    for name in ("name", "kind", "inner", "facts", "numbers", "on"):
        try:
            from_json(Outer, {"name": "a", "kind": "one", name: value})
        except ValueError as error:
            assert str(error).startswith(name)
