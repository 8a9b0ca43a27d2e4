"""Untrusted JSON for property-based tests: replace any value by any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import settings, strategies

_LEAVES = (
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text()
    | strategies.sampled_from(["", "\ud800", "nan", "1e999", 1e308, -1, 10**400, 0, 1.5, [[[[]]]]])
)  # fmt: skip
VALUES = strategies.recursive(
    _LEAVES,
    lambda inner: strategies.lists(inner, max_size=4) | strategies.dictionaries(strategies.text(), inner, max_size=4),
    max_leaves=12,
)
#: The same examples in each run, and no files on disk.
PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=150)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of keys to each value, starting with () for the whole."""
    yield above
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*above, key))


def with_value(whole: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path."""
    if not place:
        return value
    changed = copy.deepcopy(whole)
    inside = changed
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return changed
