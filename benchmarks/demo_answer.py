"""Measure the demo's overhead: opening a file on its page and searching by a region, compared with `Finder.analyze`.

    python benchmarks/demo_answer.py model.onnx gallery chest1.png chest2.dcm

Finder and demo are open and warm, and answer for each file in turn; the demo uses a new session every time. Its time is
that of the page's requests (upload, call, answer), without the rendering in the browser. The search by region is a
second search with the same image; the other clicks (`like`, `compare`, `refine`, `point`, `filter`, `back`) follow, and
are given as ratios to the finder's answer for a whole image. `query_ms` is the time of the command `cbmir query`, which
opens the model and the gallery for one answer. All times are medians over files and rounds.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx
import orjson

from cbmir.demo.controls import Controls
from cbmir.runtime import Finder

K = 20  # as the page requests
REGION = (0.1, 0.4, 0.5, 0.9)
CLICKS = ("like", "compare", "refine", "back", "point", "filter")
SPECIFIC = "specific"  # an operating point that is not the page's default


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("gallery", type=click.Path(exists=True, path_type=Path))
@click.argument("images", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("-n", "--rounds", default=10, show_default=True, help="Searches per image.")
def main(model: Path, gallery: Path, images: tuple[Path, ...], rounds: int) -> None:
    """Compare the times of the demo, `Finder.analyze` and `cbmir query`."""
    times: dict[str, list[float]] = defaultdict(list)
    with Finder.open(model, gallery) as finder, demo(model, gallery) as client:
        config = client.get("/config").raise_for_status().json()
        label = finder.gallery.labels.names[0] if finder.gallery else ""
        for at in range(rounds + 1):
            for image in images:
                page = Page(client, config)
                acts: dict[str, Callable[[], Any]] = {
                    "finder": partial(finder.analyze, image, K), "page": partial(page.open, image),
                    "finder_region": partial(finder.analyze, image, K, region=REGION),
                    "page_region": partial(page.region, REGION),
                    "like": page.like, "compare": page.compare, "refine": page.refine, "back": page.back,
                    "point": partial(page.search, "Operating point", "input", point=SPECIFIC),
                    "filter": partial(page.search, "Expression", "submit", where=f'not "{label}"'),
                    "query": partial(query, model, gallery, image),
                }  # fmt: skip
                answers = {}
                for name, act in acts.items():
                    start = time.perf_counter()
                    answers[name] = act()
                    if at:  # the first round is a warm-up
                        times[name].append(time.perf_counter() - start)
                for part in ("", "_region"):
                    expected = [one.id for one in answers[f"finder{part}"].neighbours]
                    if answers[f"page{part}"] != expected:
                        raise click.ClickException("expected the same similar images from both, found different ones")
    medians = {name: 1000 * statistics.median(of) for name, of in times.items()}
    figures = (
        {f"{name}_ms": found for name, found in medians.items()}
        | {
            "page_to_finder": medians["page"] / medians["finder"],
            "region_to_finder": medians["page_region"] / medians["finder_region"],
            "page_to_query": medians["page"] / medians["query"],
        }
        | {f"{name}_to_finder": medians[name] / medians["finder"] for name in CLICKS}
    )
    click.echo(json.dumps({name: round(value, 2) for name, value in figures.items()}))


def query(model: Path, gallery: Path, image: Path) -> None:
    command = [sys.executable, "-m", "cbmir", "query", str(model), str(gallery), str(image), "-k", str(K)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def demo(model: Path, gallery: Path) -> Iterator[httpx.Client]:
    """Run `cbmir demo` in its own process, and yield a client."""
    command = [sys.executable, "-m", "cbmir", "demo", str(model), str(gallery), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None:
                raise RuntimeError("expected the output of the demo, found none")
            url = server.stdout.readline().split()[0]
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                yield client
        finally:
            server.send_signal(signal.SIGINT)


class Page:
    """A new browser page, reduced to its requests."""

    def __init__(self, client: httpx.Client, config: dict[str, Any]) -> None:
        self._client, self._config, self._session = client, config, uuid.uuid4().hex
        self._ids: list[str] = []
        self._ask("load", ["", "", 0])  # as a browser does first
        (self._similar,) = [one["id"] for one in config["components"] if one["props"].get("elem_id") == "similar"]

    def open(self, image: Path) -> list[str]:
        """Open a file, and return the ids of its similar images."""
        files = {"files": (image.name, image.read_bytes())}
        paths = self._client.post("/gradio_api/upload", files=files).raise_for_status().json()
        given = [{"path": path, "meta": {"_type": "gradio.FileData"}} for path in paths]
        return self._answer("upload", given, event_data=None)

    def region(self, box: tuple[float, ...]) -> list[str]:
        """Search by a region of the opened image."""
        return self._answer("region", event_data={"box": box})

    def like(self) -> list[str]:
        return self._answer("like", event_data={"id": self._ids[0]})

    def compare(self) -> list[str]:
        return self._answer("compare", event_data={"ids": self._ids[:1]})

    def refine(self) -> list[str]:
        return self._answer("refine", event_data={"alike": self._ids[:1], "unlike": self._ids[-1:]})

    def back(self) -> list[str]:
        """Go back to the step of the opened file."""
        return self._answer("go", event_data={"step": 1})

    def search(self, label: str, event: str, **changed: str) -> list[str]:
        """Repeat the search with changed controls; `label` is the component that triggers it."""
        (at,) = [one["id"] for one in self._config["components"] if one["props"].get("label") == label]
        return self._answer(event, event_data=None, at=at, controls=Controls(k=K, **changed))  # type: ignore[arg-type]

    def _answer(
        self, event: str, *more: Any, event_data: Any, at: int | None = None, controls: Controls = Controls(k=K)  # noqa: B008
    ) -> list[str]:  # fmt: skip
        given, outputs = self._ask(event, ["", *controls.values(), *more], event_data, at)
        self._ids = [card["id"] for card in json.loads(given[outputs.index(self._similar)])["cards"]]
        return self._ids

    def _ask(self, event: str, data: list[Any], event_data: Any = None, at: int | None = None) -> tuple[Any, list[int]]:
        """Send an event; return the new values of components, and the components' ids."""
        (ask,) = [
            one for one in self._config["dependencies"]
            if any(name == event and at in (None, target) for target, name in one["targets"])
        ]  # fmt: skip
        joined = {"data": data, "event_data": event_data, "fn_index": ask["id"], "session_hash": self._session}
        self._client.post("/gradio_api/queue/join", json=joined).raise_for_status()
        with self._client.stream("GET", "/gradio_api/queue/data", params={"session_hash": self._session}) as events:
            lines = b"".join(events.iter_raw()).splitlines()
        for line in lines:
            if b'"process_completed"' in line:
                return orjson.loads(line.removeprefix(b"data:"))["output"]["data"], ask["outputs"]
        raise click.ClickException("expected an answer from the demo, found none")


if __name__ == "__main__":
    main()
