"""The page as Gradio blocks: `build(finder).launch()` serves it, and `server.serve` serves it with protection.

`layout` places the components, `desk` holds the actions, `screen` renders a step; this module connects them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import gradio as gr

from cbmir.demo.controls import Controls
from cbmir.demo.desk import MOST_BESIDE, Desk
from cbmir.demo.endpoints import add_endpoints, told
from cbmir.demo.examples import RULE, find_examples
from cbmir.demo.page.layout import Layout, theme
from cbmir.demo.page.markup import data_uri, static
from cbmir.demo.page.screen import Screen, Updates
from cbmir.demo.sessions import MOST, Sessions, Wish
from cbmir.errors import UserError
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.projection import GalleryProjection

Act = Callable[..., object]  # takes a session, controls, the event's data, and values of further components

_CACHE = (300, 900)  # seconds: how often Gradio deletes unused uploads, and how old they must be
#: The tab stores its session's secret while it is open; the address may name the image or findings to start with.
_ARRIVE = "() => [sessionStorage.cbmir ?? '', location.search, Number(history.state?.step) || 0]"
_ARRIVED = "(secret) => { sessionStorage.cbmir = secret; }"
_CHOSEN = "(visit) => [visit, document.querySelector('#findings li > [aria-pressed=true]')?.dataset.finding]"
_DOWNLOAD = """async (uri) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await (await fetch(uri)).blob());
  link.download = uri.startsWith("data:text/html") ? "cbmir-report.html" : "cbmir-dicom.zip";
  link.click();
}"""


class Page(gr.Blocks):
    """Blocks that look the same no matter how they are served."""

    def launch(self, *args: Any, **options: Any) -> Any:
        """Launch like `gr.Blocks.launch`, with the page's own look unless the caller gives another."""
        own: dict[str, Any] = {
            "theme": theme(), "css": static("page.css"), "footer_links": [],
            "state_session_capacity": self.state_session_capacity,
        }  # fmt: skip
        return super().launch(*args, **(own | options))


def build(
    finder: Finder, examples: Path | None = None, chart: GalleryProjection | None = None, feedback: Path | None = None
) -> gr.Blocks:
    """Build the page and its endpoints for `gradio_client`.

    `build(finder).launch()` serves it from a script, a notebook, or a hosting service. `cbmir.demo.serve` adds a login,
    limits, and headers that keep everything on this machine.

    Args:
        finder: A finder with a gallery, shared by all visitors. Keep it open while the page is served.
        examples: A folder of example images; by default, some images of the gallery.
        chart: The gallery's map, if it has one.
        feedback: The file for readers' feedback (`Feedback`); by default readers are not asked.

    Raises:
        UserError: The finder has no gallery, the folder has no examples, or the file cannot be used.
    """
    offered = find_examples(finder, examples)  # before any blocks are created, since it may raise
    blocks = Page(title="cbmir", analytics_enabled=False, delete_cache=_CACHE, fill_width=True)
    blocks.state_session_capacity = MOST
    desk, sessions = Desk(finder, offered, lambda: Path(blocks.GRADIO_CACHE), feedback), Sessions()

    with blocks:
        layout = Layout(desk, chart, RULE if examples is None else "")
        _wire(blocks, layout, desk, sessions)
        add_endpoints(desk, sessions)
    blocks.queue(max_size=64, api_open=False)
    return blocks


def _wire(blocks: gr.Blocks, at: Layout, desk: Desk, sessions: Sessions) -> None:
    screen, visit = Screen(desk, at), gr.State("")
    secret, address, before, chosen, sheet = (gr.Textbox(visible=False) for _ in range(5))
    outputs = [at.viewer, at.similar, at.findings, at.alerts, at.trail, at.tabs, *at.weights, *at.controls]
    #: A single queue without concurrency: answers arrive in the order of the questions.
    how: dict[str, Any] = {
        "api_visibility": "private", "concurrency_id": "page", "concurrency_limit": 1, "trigger_mode": "multiple",
        "show_progress": "minimal", "show_progress_on": at.viewer, "preprocess": False, "postprocess": False,
    }  # fmt: skip

    def on(event: Callable[..., Any], act: Act, *more: Any, opening: bool = False) -> None:
        def listen(request: gr.Request, said: gr.EventData, name: str, *given: Any) -> Updates:
            session = sessions.get(name or request.session_hash or "")
            own, rest = given[: len(at.controls)], given[len(at.controls) :]
            return screen.answer(session, lambda: act(session, Controls.of(own), said, *rest), opening=opening)

        event(listen, [visit, *at.controls, *more], outputs, **how)

    def arrive(request: gr.Request, held: str, where: str, before: str) -> Updates:
        name = sessions.arrive(request.session_hash or "", held)
        session, link = sessions.get(name), parse_qs(where.lstrip("?"))
        fresh = Controls(point=desk.finder.operating_point).of_link(link)
        session.pictures = ()

        def begin() -> None:
            step = int(before) if str(before).isdigit() else 0
            if step in session.steps:  # the page was reloaded
                session.go(step)
            elif "image" in link:
                desk.like(session, fresh, link["image"][0])
            elif "finding" in link:
                desk.by_findings(session, fresh, link["finding"])
            elif step:
                raise UserError("This page was idle for too long and has forgotten its image. Open it again.")
            else:
                session.shown = 0

        return {visit: name, secret: name, **screen.answer(session, begin, opening=True)}

    arrived = blocks.load(arrive, [secret, address, before], [visit, secret, *outputs], js=_ARRIVE, **how)
    arrived.then(None, secret, None, js=_ARRIVED, api_visibility="private")

    def leave(request: gr.Request) -> None:
        page = request.session_hash or ""
        sessions.leave(page)
        holder = blocks.state_holder  # Gradio's store of each page's last values
        holder.session_data.pop(page, None)
        holder.time_last_used.pop(page, None)

    blocks.unload(leave)

    on(at.files.upload, lambda s, c, _, given: desk.open(s, c, [one["path"] for one in given or ()]), at.files,
       opening=True)  # fmt: skip
    on(at.offers.click, lambda s, c, _, number: desk.example(s, c, number), at.offers, opening=True)
    on(at.trail.member, lambda s, c, said: desk.member(s, c, int(said.at)), opening=True)
    on(at.similar.like, lambda s, c, said: desk.like(s, c, str(said.id)), opening=True)
    on(at.find.click, lambda s, c, _, labels: desk.by_findings(s, c, labels), at.wanted)
    on(at.viewer.region, lambda s, c, said: desk.region(s, c, said.box))
    on(at.viewer.close, lambda s, c, _: desk.compare(s, ()))
    on(at.viewer.again, lambda s, c, _: setattr(s, "pictures", ()))
    on(at.similar.compare, lambda s, c, said: desk.compare(s, said.ids))
    on(at.similar.refine, lambda s, c, said: desk.refine(
        s, c, Wish(tuple(said.alike), tuple(said.unlike), s.step.wish.findings if s.step else ())))  # fmt: skip
    on(at.similar.unfilter, lambda s, c, said: desk.search(s, c.dropped(str(said.name))))
    on(at.trail.go, lambda s, _, said: s.go(int(said.step)))
    on(at.rank.click, lambda s, c, _, *weights: desk.weigh(s, c, weights), *at.weights)
    k, _, _, where, _, _, since, until, _, patient, _ = at.controls
    changes = [k.release, where.submit, since.submit, until.submit, patient.submit]
    changes += [one.input for one in at.controls if one not in (k, where, since, until, patient)]
    for change in changes:
        on(change, lambda s, c, _: desk.search(s, c))

    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}

    def pin(request: gr.Request, said: gr.EventData, name: str) -> None:
        sessions.get(name or request.session_hash or "").pinned = tuple(map(str, said.ids))[-MOST_BESIDE:]

    at.similar.pin(pin, visit, None, **quiet)

    def say(request: gr.Request, said: gr.EventData, name: str) -> None:
        session = sessions.get(name or request.session_hash or "")
        desk.say(session, similar=str(said.similar), label=str(said.label), value=said.value)

    for part in (at.similar, at.findings):
        part.say(told(say), visit, None, **quiet)

    def download(request: gr.Request, name: str, finding: str | None) -> str:
        return data_uri(
            desk.report(sessions.get(name or request.session_hash or ""), finding or "").encode(), "text/html"
        )

    def download_dicom(request: gr.Request, name: str, _: str | None) -> str:
        return data_uri(desk.dicom_results(sessions.get(name or request.session_hash or "")), "application/zip")

    for button, make in ((at.report, download), (at.dicom, download_dicom)):
        made = button.click(told(make), [visit, chosen], sheet, js=_CHOSEN, **quiet)
        made.success(None, sheet, None, js=_DOWNLOAD, **quiet)
