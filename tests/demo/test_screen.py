"""The page after an action, successful or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gradio as gr
import pytest

from cbmir.demo.controls import Controls
from cbmir.demo.desk import Desk
from cbmir.demo.examples import find_examples
from cbmir.demo.page.layout import Layout, add_map
from cbmir.demo.page.screen import Screen
from cbmir.demo.sessions import Session
from cbmir.runtime import Finder
from cbmir.runtime.gallery.projection import GalleryProjection

FEW = Controls(k=4)


@pytest.fixture
def desk(tiny_model: Path, wall_gallery: Path, tmp_path: Path) -> Iterator[Desk]:
    with Finder.open(tiny_model, wall_gallery, threads=1) as finder:
        yield Desk(finder, find_examples(finder), lambda: tmp_path)


@pytest.fixture
def layout(desk: Desk) -> Layout:
    async def make() -> Layout:
        with gr.Blocks(analytics_enabled=False):
            return Layout(desk, None)

    return asyncio.run(make())  # in a running loop, or Gradio would open its own


@pytest.fixture
def screen(desk: Desk, layout: Layout) -> Screen:
    return Screen(desk, layout)


def test_a_step_that_cannot_be_shown_is_removed(
    desk: Desk, layout: Layout, screen: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = Session()
    first = desk.example(session, FEW, 0)
    chosen, entry = first.neighbours[0].id, desk.gallery.entry
    monkeypatch.setattr(desk.gallery, "entry", lambda id: replace(entry(id), image=str(tmp_path / "gone.png")))
    monkeypatch.setattr(desk.gallery, "thumbnail", lambda id: None)
    with pytest.warns(UserWarning, match="its file is gone"):
        made = screen.answer(session, lambda: desk.compare(session, [chosen]), opening=False)
    assert list(made) == [layout.alerts] and "value" not in made[layout.alerts]  # the image's own warnings stay
    assert session.step is first and list(session.steps) == [first.number]


def test_a_picture_that_the_page_has_is_not_sent_again(desk: Desk, layout: Layout, screen: Screen) -> None:
    session = Session()

    def sources(act: Callable[[], object]) -> list[str | None]:
        made = screen.answer(session, act, opening=False)
        return [pane["src"] for pane in json.loads(made[layout.viewer])["panes"]]

    (whole,) = sources(lambda: desk.example(session, FEW, 0))
    assert whole is not None and whole.startswith("data:image/bmp")
    assert sources(lambda: desk.search(session, Controls(k=2))) == [None]
    chosen = [neighbour.id for neighbour in session.trail()[-1].neighbours]
    first, second = sources(lambda: desk.compare(session, chosen[:1]))
    assert first is None and second is not None
    (again,) = sources(lambda: setattr(session, "pictures", ()) or desk.compare(session, ()))  # as after a reload
    assert again == whole


def test_the_image_keeps_its_name_and_sliders_show_the_weights(desk: Desk, layout: Layout, screen: Screen) -> None:
    session = Session()
    desk.like(session, FEW, desk.gallery.ids()[3])
    name = json.loads(screen.show(session)[layout.viewer])["panes"][0]["name"]
    assert name == f"Gallery image {desk.gallery.ids()[3]}"
    shown = screen.answer(session, lambda: desk.weigh(session, FEW, (0, -0.4, 0)), opening=False)
    assert [shown[slider] for slider in layout.weights] == [0, -0.4, 0]
    assert session.step is not None
    chosen = session.step.neighbours[0].id
    shown = screen.answer(session, lambda: desk.compare(session, [chosen]), opening=False)
    assert json.loads(shown[layout.viewer])["panes"][0]["name"] == name
    shown = screen.answer(session, lambda: desk.example(session, FEW, 0), opening=True)
    assert [shown[slider] for slider in layout.weights] == [0, 0, 0]


def test_filters_that_cannot_be_read_leave_the_image_on_the_page(desk: Desk, layout: Layout, screen: Screen) -> None:
    session = Session()
    first = desk.example(session, FEW, 0)
    wrong = replace(FEW, where="Mass and")
    with pytest.warns(UserWarning, match="expected"):
        made = screen.answer(session, lambda: desk.example(session, wrong, 1), opening=True)
    assert session.step is first and layout.viewer not in made
    made = screen.answer(session, lambda: desk.example(session, FEW, 99), opening=True)
    assert session.step is None and made[layout.viewer] == ""


def test_the_map_names_its_method_as_text(desk: Desk, wall_gallery: Path) -> None:
    chart = GalleryProjection.load(wall_gallery)
    assert chart is not None

    async def make() -> str:
        with gr.Blocks(analytics_enabled=False) as blocks:
            add_map(desk.gallery, replace(chart, method="<img src=x onerror=alert(1)>"))
        return str([getattr(block, "value", "") for block in blocks.blocks.values()])

    assert "40 images by &lt;img src=x" in asyncio.run(make())
