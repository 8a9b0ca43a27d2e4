"""The settings of a search, validated from the page's controls, and their description in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from cbmir.card import BALANCED
from cbmir.errors import UserError
from cbmir.labels import spelled
from cbmir.runtime.gallery.filters import TEXTS, Filter

MOST_NEIGHBOURS = 40
_LONGEST = 1000
_BEFORE = {"where": "", "since": "from "}  # prefix of a filter's text, if it is not the filter's name


class ControlsError(UserError):
    """The controls describe an impossible search. The image that is being opened is not the cause."""


@dataclass(frozen=True)
class Controls:
    """`having` and `without` are labels of the gallery; `where` is an expression of labels, as on the command line;
    `since` and `until` are days, YYYY-MM-DD; an empty text does not filter. `point` is the operating point."""

    k: int = 20
    having: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    where: str = ""
    view: str = ""
    source: str = ""
    since: str = ""
    until: str = ""
    exclude: bool = True
    patient: str = ""
    point: str = BALANCED

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Self:
        """Validate the values of the page's controls, in the order of the fields. Raises ControlsError."""
        given = dict(zip((one.name for one in fields(cls)), values, strict=True))
        k = given["k"]
        if isinstance(k, bool) or not isinstance(k, int | float) or not 1 <= k <= MOST_NEIGHBOURS:
            raise ControlsError(f"Ask for 1 to {MOST_NEIGHBOURS} similar images, not {k!r:.40}.")
        for name in ("having", "without"):
            if not isinstance(given[name] or [], list | tuple):
                raise ControlsError("Choose labels that are on the page.")
            given[name] = tuple(str(one)[:_LONGEST] for one in given[name] or ())
        for name in (*TEXTS, "patient", "point"):
            given[name] = str(given[name] or "").strip()[:_LONGEST]
        return cls(**{**given, "k": int(k), "exclude": given["exclude"] is not False})

    def of_another(self) -> Self:
        """Return the controls for another image, which may be of another patient."""
        return replace(self, patient="")

    def values(self) -> tuple[Any, ...]:
        """Return the values for the page's controls, in the order of the fields."""
        values = (getattr(self, one.name) for one in fields(self))
        return tuple(list(value) if isinstance(value, tuple) else value for value in values)

    @property
    def filter(self) -> Filter:
        parts = [_quoted(name) for name in self.having]
        parts += [f"not {_quoted(name)}" for name in self.without]
        parts += [f"({self.where})"] if self.where else []
        where = " and ".join(parts)
        return Filter(where=where, view=self.view, source=self.source, since=self.since, until=self.until)

    def chips(self) -> list[dict[str, str]]:
        """Return the active filters, each with the name that `dropped` takes."""
        chips = [(f"having:{name}", f"with {spelled(name)}") for name in self.having]
        chips += [(f"without:{name}", f"without {spelled(name)}") for name in self.without]
        chips += [(name, _BEFORE.get(name, f"{name} ") + text) for name in TEXTS if (text := getattr(self, name))]
        return [{"name": name, "text": text} for name, text in chips]

    def link(self) -> list[tuple[str, str]]:
        """Return the active filters as URL parameters, which `of_link` reads."""
        several = [(name, one) for name in ("having", "without") for one in getattr(self, name)]
        return several + [(name, getattr(self, name)) for name in TEXTS if getattr(self, name)]

    def of_link(self, query: Mapping[str, Sequence[str]]) -> Self:
        """Return a copy with the filters of a URL's parameters."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        given |= {name: query[name] for name in ("having", "without") if name in query}
        given |= {name: query[name][0] for name in TEXTS if name in query}
        return self.of(tuple(given.values()))

    def dropped(self, name: str) -> Self:
        """Return a copy without one filter, or without all of them if the name is empty. Raises UserError."""
        if not name:
            return type(self)(k=self.k, exclude=self.exclude, patient=self.patient, point=self.point)
        kind, _, label = name.partition(":")
        changes: dict[str, Any] = {kind: ""}
        if kind in ("having", "without"):
            changes = {kind: tuple(one for one in getattr(self, kind) if one != label)}
        elif kind not in TEXTS:
            raise UserError("Choose a filter that is on the page.")
        return replace(self, **changes)

    def text(self, *, known: bool | None) -> str:
        """Describe the search. `known`: whether the image's patient is known; None if there is no image."""
        parts = [f"{self.k} images"]
        if known is not None:
            out = "left out" if self.exclude and known else "not left out"
            parts.append(f"same patient {out}{' (patient unknown)' if self.exclude and not known else ''}")
        return "; ".join([*parts, *(chip["text"] for chip in self.chips())])


def _quoted(label: str) -> str:
    return f"'{label}'" if '"' in label else f'"{label}"'
