"""The steps of each visitor, kept in memory until the page is closed, unused for long, or replaced by newer ones."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock, Timer

from cbmir.demo.controls import Controls
from cbmir.demo.uploads import Upload
from cbmir.errors import UserError
from cbmir.labels import spelled
from cbmir.runtime.evidence import Region
from cbmir.runtime.results import Analysis, Neighbour

#: Maximum number of sessions, seconds until an unused one is forgotten, and seconds until a closed one is.
MOST = 64
LONGEST = 1800
RELOAD = 60
MOST_STEPS = 40  # per session; the oldest are forgotten first
_KEY = 22  # minimum length of a session's name, which is a secret between browser and server


@dataclass(frozen=True)
class Wish:
    """A refinement: ids of images marked alike and not alike, and findings to move towards (above 0) or away from."""

    alike: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    findings: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.alike or self.unlike or self.findings)

    def text(self) -> str:
        parts = [f"{len(self.alike)} alike"] if self.alike else []
        parts += [f"{len(self.unlike)} not alike"] if self.unlike else []
        parts += [f"{'towards' if weight > 0 else 'away from'} {spelled(name)}" for name, weight in self.findings]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Step:
    """One state of the page, to which Back returns.

    `images` are those of a study, and `at` is the position of the query; otherwise `labels` are the findings searched
    for. `link` has the URL parameters that show this step to anyone with the same gallery; `above` is the number of the
    step before it in the breadcrumbs. `compare` has the ids of the images beside the query.
    """

    title: str
    controls: Controls
    images: tuple[Upload, ...] = ()
    at: int = 0
    left_out: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    analysis: Analysis | None = None
    neighbours: tuple[Neighbour, ...] = ()
    searched: str = ""
    link: tuple[tuple[str, str], ...] = ()
    above: int = 0
    region: Region | None = None
    wish: Wish = Wish()
    compare: tuple[str, ...] = ()
    number: int = 0

    @property
    def image(self) -> Upload | None:
        return self.images[self.at] if self.images else None


@dataclass(eq=False)
class Session:
    """`steps` by number, from 1. `shown` is the number of the current step, 0 for the empty page; `pictures` are the
    names of the pictures that the page has."""

    steps: OrderedDict[int, Step] = field(default_factory=OrderedDict)
    shown: int = 0
    pinned: tuple[str, ...] = ()
    newest: int = 0  # number of the last step
    pictures: tuple[str, ...] = ()

    def copy(self) -> Session:
        return replace(self, steps=self.steps.copy())

    def add(self, step: Step) -> Step:
        """Add a step and make it the current one."""
        self.newest += 1
        self.shown = self.newest
        self.steps[self.newest] = step = replace(step, number=self.newest)
        while len(self.steps) > MOST_STEPS:
            self.steps.popitem(last=False)
        return step

    @property
    def step(self) -> Step | None:
        return self.steps.get(self.shown)

    def cases(self) -> dict[object, Step]:
        """Return the latest step of each study, image or set of findings that was opened, oldest first."""
        return {step.images or step.labels: step for step in self.steps.values() if not step.above}

    def trail(self) -> list[Step]:
        """Return the breadcrumbs: the steps that lead to the current one, and that step."""
        trail: list[Step] = []
        number = self.shown
        while number in self.steps:
            trail.insert(0, self.steps[number])
            number = self.steps[number].above
        return trail

    def go(self, number: int) -> Step | None:
        """Return to a step, or, with 0, to the empty page. Raises UserError if the step was forgotten."""
        if number and number not in self.steps:
            raise UserError("This step is no longer available. Open the image again.")
        self.shown = number
        return self.step


class Sessions:
    """Sessions by the secrets that browsers hold for them. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._sessions: OrderedDict[str, tuple[float, Session]] = OrderedDict()  # least recently used first
        self._pages: dict[str, str] = {}  # Gradio's name of an open page -> the name of its session
        self._timer: Timer | None = None

    def arrive(self, page: str, secret: object) -> str:
        """Return the session's name for a page that was opened or reloaded: the secret that the browser stores.

        A duplicated tab sends the secret of an open page, and gets a copy of that session under a new name.
        """
        with self._lock:
            self._forget()
            name = secrets.token_urlsafe(24)
            if isinstance(secret, str) and _KEY <= len(secret) <= 64:
                if secret not in self._pages.values():
                    name = secret
                elif secret in self._sessions:
                    self._keep(name, self._sessions[secret][1].copy())
            self._pages[page] = name
        return name

    def get(self, name: str) -> Session:
        with self._lock:
            self._forget()
            return self._keep(name, self._sessions.pop(name, (0.0, Session()))[1])

    def leave(self, page: str) -> None:
        """Forget the session of a closed page, unless the browser opens it again soon."""
        with self._lock:
            name = self._pages.pop(page, page)
            if name in self._sessions:
                self._sessions[name] = (self._clock() + RELOAD, self._sessions[name][1])
                self._sessions.move_to_end(name, last=False)

    def _keep(self, name: str, session: Session) -> Session:
        self._sessions[name] = (self._clock() + LONGEST, session)
        while len(self._sessions) > MOST:
            self._sessions.popitem(last=False)
        if self._timer is None:
            self._wait()
        return session

    def _forget(self) -> None:
        now = self._clock()
        for name in [name for name, (until, _) in self._sessions.items() if until < now]:
            del self._sessions[name]

    def _wait(self) -> None:
        """Check for expired sessions from time to time, even if no requests arrive."""
        self._timer = Timer(60.0, self._look) if self._sessions else None
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._forget()
            self._wait()
