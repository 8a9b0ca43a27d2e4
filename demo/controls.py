"""How to search, as the page's controls say: checked here, since a page may send anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from cbmir.errors import UserError
from cbmir.labels import LabelSet, readable
from cbmir.runtime.gallery.filters import Filter

MOST_NEIGHBOURS = 40
_LONGEST = 200  # characters of a text


@dataclass(frozen=True)
class Controls:
    """`having` and `without` are labels of the gallery or empty; an empty `view` is any."""

    k: int = 20
    exclude: bool = True
    patient: str = ""
    view: str = ""
    having: str = ""
    without: str = ""

    @classmethod
    def of(cls, given: Any, labels: LabelSet) -> Self:
        """Raises UserError for what no control of the page can say."""
        values = given if isinstance(given, Mapping) else {}
        k = values.get("k", cls.k)
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MOST_NEIGHBOURS:
            raise UserError(f"expected 1 to {MOST_NEIGHBOURS} look-alikes, found {k!r:.40}")
        texts = {name: values.get(name, "") for name in ("patient", "view", "having", "without")}
        for name, text in texts.items():
            if not isinstance(text, str) or len(text) > _LONGEST:
                raise UserError(f"expected a short text for {name}, found another value")
        for name in ("having", "without"):
            if texts[name] and texts[name] not in labels.names:
                raise UserError(f"expected a finding of the gallery, found {texts[name]!r}")
        return cls(k, values.get("exclude") is not False, **{name: text.strip() for name, text in texts.items()})

    @property
    def filter(self) -> Filter:
        parts = [_quoted(self.having)] if self.having else []
        parts += [f"not {_quoted(self.without)}"] if self.without else []
        return Filter(where=" and ".join(parts), view=self.view)

    def text(self, *, known: bool | None) -> str:
        """The search in words. `known`: whether the image's patient is known; None without an image."""
        parts = [f"k = {self.k}"]
        if known is not None:
            out = "left out" if self.exclude and known else "NOT left out"
            parts.append(f"same patient {out}{', since it is not known' if self.exclude and not known else ''}")
        parts += [f"view {self.view}"] if self.view else []
        parts += [f"with {readable(self.having)}"] if self.having else []
        parts += [f"known to be without {readable(self.without)}"] if self.without else []
        return "; ".join(parts)


def _quoted(label: str) -> str:
    return f"'{label}'" if '"' in label else f'"{label}"'
