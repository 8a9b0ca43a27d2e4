"""What is kept of sessions, and what controls may say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cbmir.demo import sessions as module
from cbmir.demo.sessions import LONGEST, Controls, Sessions
from cbmir.errors import UserError
from cbmir.labels import LabelSet

LABELS = LabelSet(("Effusion", "Pleural_Thickening"))


def test_a_session_is_its_own_until_it_ends() -> None:
    sessions = Sessions()
    one = sessions.get("one")
    assert sessions.get("one") is one
    assert sessions.get("two") is not one
    sessions.end("one")
    sessions.end("nobody")
    assert sessions.get("one") is not one


def test_the_longest_unused_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    sessions = Sessions()
    first = sessions.get("first")
    second = sessions.get("second")
    sessions.get("first")
    sessions.get("third")
    assert sessions.get("first") is first
    assert sessions.get("second") is not second
    assert len(sessions) == 2


def test_one_left_alone_is_forgotten() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    sessions.get("old")
    now[0] = LONGEST + 1.0
    sessions.get("new")
    assert len(sessions) == 1


def test_one_that_is_over_is_not_woken_by_its_own_question() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    old = sessions.get("me")
    now[0] = LONGEST + 1.0
    assert sessions.get("me") is not old


def test_the_last_one_is_forgotten_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []

    class Timer:
        def __init__(self, seconds: float, look: Callable[[], None]) -> None:
            assert seconds <= LONGEST / 10
            self.look, self.daemon = look, False

        def start(self) -> None:
            assert self.daemon  # it keeps no server alive
            looks.append(self.look)

    monkeypatch.setattr(module, "Timer", Timer)
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    sessions.get("one")
    sessions.get("two")
    assert len(looks) == 1
    looks.pop()()
    assert len(sessions) == 2
    now[0] = LONGEST + 1.0
    looks.pop()()
    assert len(sessions) == 0
    assert looks == []  # nothing is left to look for
    sessions.get("three")
    assert len(looks) == 1


def test_controls() -> None:
    controls = Controls.of(
        {
            "k": 7,
            "exclude": False,
            "patient": " p ",
            "view": "PA",
            "having": "Effusion",
            "without": "Pleural_Thickening",
        },
        LABELS,
    )
    assert controls == Controls(7, False, "p", "PA", "Effusion", "Pleural_Thickening")
    assert controls.filter.where == '"Effusion" and not "Pleural_Thickening"'
    assert controls.filter.view == "PA"
    assert Controls.of(None, LABELS) == Controls()


@pytest.mark.parametrize(
    ("given", "known", "text"),
    [
        ({"k": 7}, True, "k = 7; same patient left out"),
        ({"k": 7}, False, "k = 7; same patient NOT left out, since it is not known"),
        ({"k": 7, "exclude": False}, False, "k = 7; same patient NOT left out"),
        ({"k": 7, "view": "PA", "having": "Effusion", "without": "Pleural_Thickening"}, None,
         "k = 7; view PA; with Effusion; known to be without Pleural Thickening"),
    ],
)  # fmt: skip
def test_what_was_searched_for(given: dict[str, Any], known: bool | None, text: str) -> None:
    assert Controls.of(given, LABELS).text(known=known) == text


@pytest.mark.parametrize(
    "given",
    [{"k": 0}, {"k": 41}, {"k": "7"}, {"k": True}, {"view": 3}, {"patient": "x" * 201}, {"having": "Knee"},
     {"without": '" or Effusion'}],
)  # fmt: skip
def test_what_no_control_can_say_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected"):
        Controls.of(given, LABELS)
