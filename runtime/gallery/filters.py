"""Filters that limit which entries a search may return, and their small language for labels.

    Effusion and not (Pneumothorax or "Lung Opacity")

A name selects entries in which that finding is positive or uncertain, as everywhere in retrieval. `not` selects entries
in which it is *known* to be absent; an entry with an unknown label matches neither. `parse` moves every `not` down to
the names, so a condition consists only of `HasLabel`, `AllOf` and `AnyOf`, which any gallery can translate to its own
query language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import date

from cbmir.errors import GalleryError
from cbmir.labels import LabelSet, canonical, did_you_mean

_TOKEN = re.compile(r"""\s*(?:(?P<mark>[()])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s()"']+))""")
_DEEPEST = 50  # levels of parentheses, which are parsed recursively


@dataclass(frozen=True)
class HasLabel:
    """The condition that the label at `index` is positive or uncertain, or, if not `present`, known to be negative."""

    index: int
    present: bool = True


@dataclass(frozen=True)
class AllOf:
    """The condition that every part holds."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class AnyOf:
    """The condition that at least one part holds."""

    parts: tuple[Condition, ...]


Condition = HasLabel | AllOf | AnyOf
#: Fields of `Filter` that hold text.
TEXTS = ("where", "view", "source", "since", "until")


@dataclass(frozen=True)
class Filter:
    """The conditions that an entry must meet to be returned; an empty filter accepts all entries.

    Attributes:
        exclude_patients: Patient ids, as they were passed to `add`.
        exclude_studies: Study ids, likewise. If several patients have a study with this id, all are excluded.
        where: An expression of labels (see the module docstring). Spaces around this and other texts are ignored.
        view, source: A view such as PA, and a hospital or data set; not case-sensitive.
        since, until: The first and the last date, YYYY-MM-DD; entries without a date do not pass.
        only_patients: If not empty, only entries of these patients pass.

    Raises:
        GalleryError: A type is wrong, a date is invalid, `since` is after `until`, or `only_patients` has an empty id.
    """

    exclude_patients: frozenset[str] = field(default=frozenset())
    exclude_studies: frozenset[str] = field(default=frozenset())
    where: str = ""
    view: str = ""
    source: str = ""
    since: str = ""
    until: str = ""
    only_patients: frozenset[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        for name in ("exclude_patients", "exclude_studies", "only_patients"):
            given = getattr(self, name)
            if given is None or isinstance(given, str):
                found = "nothing" if given is None else "a single text"
                raise GalleryError(f"expected a set of ids for {name}, found {found}; put them into a set")
            object.__setattr__(self, name, frozenset(given))
        if "" in self.only_patients:
            raise GalleryError("expected patients' ids for only_patients, found an empty one")
        for name in TEXTS:
            given = getattr(self, name)
            if not isinstance(given, str):
                raise GalleryError(f"expected text for {name}, which may be empty, found {given!r}")
            object.__setattr__(self, name, given.strip())
        if self.first_day > self.last_day:
            raise GalleryError(f"expected days in order, found since {self.since} and until {self.until}")

    def __bool__(self) -> bool:
        """Whether the filter has any condition."""
        return any(getattr(self, one.name) for one in fields(self))

    @property
    def first_day(self) -> int:
        """`since` as YYYYMMDD, or 0."""
        return parse_day(self.since) if self.since else 0

    @property
    def last_day(self) -> int:
        """`until` as YYYYMMDD, or 99991231."""
        return parse_day(self.until) if self.until else 99991231


#: The filter that accepts all entries.
EVERY = Filter()


def parse_day(text: str, where: str = "") -> int:
    """Convert a date YYYY-MM-DD to the number YYYYMMDD. Raises GalleryError, which ends with `where`."""
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            raise ValueError
        date.fromisoformat(text)
        return int(text.replace("-", ""))
    except ValueError:
        raise GalleryError(f"expected a day as YYYY-MM-DD, found {text!r}{where}") from None


def parse(text: str, labels: LabelSet) -> Condition:
    """Parse an expression of labels.

    Names are not case-sensitive and may be those of other data sets; names of several words may be quoted. `and` binds
    more tightly than `or`, and `not` most tightly. Raises GalleryError for a syntax error and for an unknown label.
    """
    return _Parser(text, labels).whole()


class _Parser:
    """A recursive-descent parser over tokens (kind, text); kinds are "(", ")", "and", "or", "not", "name" and "end"."""

    def __init__(self, text: str, labels: LabelSet) -> None:
        self.text, self.labels = text, labels
        self.tokens = self._tokens()
        self.at = self.depth = 0

    def whole(self) -> Condition:
        condition = self._any(present=True)
        if self.tokens[self.at][0] != "end":
            raise self._wrong("and, or, or the end")
        return condition

    def _tokens(self) -> list[tuple[str, str]]:
        tokens: list[tuple[str, str]] = []
        position, text = 0, self.text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:  # an unclosed quote
                raise GalleryError(f"expected a closing quote in {self.text!r}, found none")
            position = match.end()
            mark, word = match["mark"], match["word"]
            if mark is not None:
                tokens.append((mark, mark))
            elif word is None:
                tokens.append(("name", match["double"] if match["single"] is None else match["single"]))
            elif word.lower() in ("and", "or", "not"):
                tokens.append((word.lower(), word))
            elif tokens and tokens[-1][0] == "name":  # consecutive words form one name
                tokens[-1] = ("name", f"{tokens[-1][1]} {word}")
            else:
                tokens.append(("name", word))
        return [*tokens, ("end", "the end")]

    # `present` is False inside an odd number of `not`. There `and` becomes `or`, and vice versa (De Morgan).

    def _any(self, present: bool) -> Condition:
        parts = [self._all(present)]
        while self._take("or"):
            parts.append(self._all(present))
        return _joined(parts, AnyOf if present else AllOf)

    def _all(self, present: bool) -> Condition:
        parts = [self._one(present)]
        while self._take("and"):
            parts.append(self._one(present))
        return _joined(parts, AllOf if present else AnyOf)

    def _one(self, present: bool) -> Condition:
        while self._take("not"):
            present = not present
        if self._take("("):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise GalleryError(f"expected at most {_DEEPEST} nested parentheses, found more in {self.text!r}")
            inner = self._any(present)
            self.depth -= 1
            if not self._take(")"):
                raise self._wrong("and, or, or a closing parenthesis")
            return inner
        kind, name = self.tokens[self.at]
        if kind != "name":
            raise self._wrong("a label, not, or an opening parenthesis")
        self.at += 1
        return HasLabel(self._index(name), present)

    def _take(self, kind: str) -> bool:
        found = self.tokens[self.at][0] == kind
        self.at += found
        return found

    def _index(self, name: str) -> int:
        names = self.labels.names
        for spelling in (str.casefold, lambda one: canonical(one).casefold()):
            for index, own in enumerate(names):
                if spelling(own) == spelling(name):
                    return index
        raise GalleryError(f"expected labels among {', '.join(names)}; found {name!r} in {self.text!r}"
                           f"{did_you_mean(name, names)}")  # fmt: skip

    def _wrong(self, expected: str) -> GalleryError:
        before = " ".join(text for _, text in self.tokens[: self.at]) or "the beginning"
        return GalleryError(f"expected {expected} after {before!r} in {self.text!r}, found {self.tokens[self.at][1]!r}")


def _joined(parts: Sequence[Condition], kind: type[AllOf] | type[AnyOf]) -> Condition:
    return parts[0] if len(parts) == 1 else kind(tuple(parts))
