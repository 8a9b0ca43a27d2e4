"""The sessions of visitors' pages, and how long they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cbmir.demo import sessions as module
from cbmir.demo.controls import Controls
from cbmir.demo.sessions import LONGEST, MOST_STEPS, RELOAD, Session, Sessions, Step, Wish
from cbmir.errors import UserError

SECRET = "s" * 32


def step(title: str = "x", above: int = 0) -> Step:
    return Step(title, Controls(), above=above)


def test_sessions_are_separate() -> None:
    sessions = Sessions()
    one = sessions.get("one")
    assert sessions.get("one") is one
    assert sessions.get("two") is not one


def test_the_least_recently_used_session_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    sessions = Sessions()
    first, second = sessions.get("first"), sessions.get("second")
    sessions.get("first")
    sessions.get("third")
    assert sessions.get("first") is first
    assert sessions.get("second") is not second
    assert len(sessions._sessions) == 2


def test_an_idle_session_is_forgotten() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    old = sessions.get("me")
    now[0] = LONGEST + 1.0
    assert sessions.get("me") is not old
    assert len(sessions._sessions) == 1


def test_a_reload_keeps_a_session_and_a_closed_page_ends_it() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    name = sessions.arrive("page 1", SECRET)
    kept = sessions.get(name)
    sessions.leave("page 1")
    now[0] = RELOAD - 1.0
    assert sessions.get(sessions.arrive("page 2", SECRET)) is kept
    sessions.leave("page 2")
    now[0] += RELOAD + 1.0
    assert sessions.get(name) is not kept


def test_a_duplicated_tab_continues_by_itself() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    first = sessions.get(sessions.arrive("page 1", SECRET))
    case = first.add(step("A"))
    name = sessions.arrive("page 2", SECRET)
    second = sessions.get(name)
    assert name != SECRET and second.step is case
    second.add(step("B"))
    assert first.step is case and list(first.steps) == [1]
    sessions.leave("page 2")
    now[0] = RELOAD - 1.0
    assert sessions.get(sessions.arrive("page 3", name)) is second  # a reload keeps the tab's own case
    sessions.leave("page 1")
    now[0] += RELOAD + 1.0
    assert sessions.get(name) is second
    assert sessions.get(SECRET) is not first


def test_a_page_that_returns_before_it_has_left_keeps_its_case() -> None:
    sessions = Sessions()
    case = sessions.get(sessions.arrive("page 1", SECRET)).add(step())
    name = sessions.arrive("page 2", SECRET)
    sessions.leave("page 1")
    assert sessions.get(name).step is case


@pytest.mark.parametrize("secret", [None, 7, "short", "x" * 100])
def test_a_name_that_can_be_guessed_is_not_accepted(secret: object) -> None:
    names = {Sessions().arrive("page", secret) for _ in range(3)}
    assert len(names) == 3 and all(len(name) >= 32 for name in names)


def test_the_last_session_is_forgotten_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []

    class Timer:
        daemon = False

        def __init__(self, _: float, look: Callable[[], None], *__: Any) -> None:
            looks.append(look)

        def start(self) -> None: ...

    monkeypatch.setattr(module, "Timer", Timer)
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    sessions.get("me")
    looks.pop()()
    assert len(sessions._sessions) == len(looks) == 1
    now[0] = LONGEST + 1.0
    looks.pop()()
    assert len(sessions._sessions) == len(looks) == 0


def test_steps_are_a_history_with_a_trail() -> None:
    session = Session()
    root = session.add(step("chest.png"))
    child = session.add(step("Similar image 3", above=root.number))
    assert [one.title for one in session.trail()] == ["chest.png", "Similar image 3"]
    assert session.go(root.number) is root
    assert [one.title for one in session.trail()] == ["chest.png"]
    assert session.go(child.number) is child
    assert session.go(0) is None and session.step is None
    with pytest.raises(UserError, match="no longer available"):
        session.go(99)


def test_the_oldest_steps_are_forgotten() -> None:
    session = Session()
    for _ in range(MOST_STEPS + 3):
        session.add(step())
    assert len(session.steps) == MOST_STEPS
    assert session.shown == session.newest == MOST_STEPS + 3


def test_a_wish_in_words() -> None:
    wish = Wish(("a", "b"), ("c",), (("Pleural_Thickening", 0.5), ("Mass", -1)))
    assert wish.text() == "2 alike, 1 not alike, towards Pleural thickening, away from Mass"
    assert wish and not Wish()


def test_cases_are_the_opened_images() -> None:
    session = Session()
    first, second = (replace(step(title), labels=(title,)) for title in ("a", "b"))
    session.add(first)
    session.add(second)
    session.add(replace(step("more like b", above=session.shown), labels=("c",)))
    session.go(1)
    again = session.add(first)  # with another filter
    assert [one.title for one in session.cases().values()] == ["a", "b"]
    assert session.cases()[first.labels] is again
