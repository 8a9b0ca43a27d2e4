"""The state of each open page, until it is closed, left alone for long, or crowded out; and its controls, checked."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock, Timer
from typing import Any, Self

from cbmir.demo.markup import escape
from cbmir.demo.uploads import Upload
from cbmir.errors import UserError
from cbmir.labels import LabelSet, readable
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.results import Analysis, Neighbour

#: Sessions kept at once (about 15 MB each at most), and seconds after which one that asked nothing is forgotten.
MOST = 64
LONGEST = 1800
_TOLD = 10  # reasons that are listed for what a study leaves out


@dataclass(frozen=True, eq=False)
class View:
    """The state of one page; an answer that succeeds puts another in its place.

    `about` is the number of the question that put the image there, `at` which of the study's `images` is asked about;
    `labels` are the findings that were asked for instead. The rest is the answer; `searched` is the search in words.
    """

    about: int
    images: tuple[Upload, ...] = ()
    at: int = 0
    left_out: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    analysis: Analysis | None = None
    neighbours: tuple[Neighbour, ...] = ()
    searched: str = ""

    @property
    def image(self) -> Upload | None:
        return self.images[self.at] if self.images else None


@dataclass(eq=False)
class Session:
    """`newest` is the number of the last question, `opened` of the last that put an image on the page, 0 before the
    first: questions may arrive in another order than they were asked in."""

    view: View | None = None
    newest: int = 0
    opened: int = 0


class Sessions:
    """Sessions by the random names that Gradio gives them. Safe from many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._sessions: OrderedDict[str, tuple[float, Session]] = OrderedDict()  # the longest unused first
        self._timer: Timer | None = None

    def get(self, name: str) -> Session:
        now = self._clock()
        with self._lock:
            self._forget(now)
            session = self._sessions.pop(name, (now, Session()))[1]
            self._sessions[name] = (now, session)
            while len(self._sessions) > MOST:
                self._sessions.popitem(last=False)
            if self._timer is None:
                self._wait()
            return session

    def end(self, name: str) -> None:
        """Forget a session; one that is not there is passed over."""
        with self._lock:
            self._sessions.pop(name, None)

    def _forget(self, now: float) -> None:
        while self._sessions and now - next(iter(self._sessions.values()))[0] > LONGEST:
            self._sessions.popitem(last=False)

    def _wait(self) -> None:
        """Look for sessions that are over as long as there are sessions, even without further questions."""
        self._timer = Timer(60.0, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._forget(self._clock())
            self._timer = None
            if self._sessions:
                self._wait()

    def __len__(self) -> int:
        return len(self._sessions)


def members_html(view: View) -> str:
    """The images of a study, and what was left out of it. Empty for a single image of which nothing was left out."""
    buttons = "".join(
        f'<button type="button" data-act="member" data-at="{at}" aria-pressed="{str(at == view.at).lower()}">'
        f"{at + 1}. {escape(image.caption)}</button>"
        for at, image in enumerate(view.images)
    )
    members = f'<p class="fine-print">{len(view.images)} images in this study</p><div class="members">{buttons}</div>'
    beyond = len(view.left_out) - _TOLD
    reasons = [*view.left_out[:_TOLD], *([f"and {beyond} more"] if beyond > 0 else [])]
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    left_out = f'<div class="note warn"><strong>Not all of it is shown.</strong><ul>{items}</ul></div>'
    return members * (len(view.images) > 1) + left_out * bool(reasons)


MOST_NEIGHBOURS = 40


@dataclass(frozen=True)
class Controls:
    """How to search. `having` and `without` are labels of the gallery or empty; an empty `view` is any."""

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
            if not isinstance(text, str) or len(text) > 200:
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
