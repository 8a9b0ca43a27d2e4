"""What the demo adds to an answer: dropping a file on its page, against `Finder.analyze` and against `cbmir query`.

    python benchmarks/demo_answer.py model.onnx gallery chest1.png chest2.dcm

Finder and demo are open and warm, and are asked about each file in turn, the demo every time in a new session. Its time
is that of the page's requests (upload, question, answer) until the answer is there, without the browser's own time to
draw it. `query_ms` is the whole command, a process that opens the model and the gallery for one answer. All are medians
over files and rounds.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx

from cbmir.demo.markup import escape
from cbmir.runtime import Finder

K = 20  # what the page asks for


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("gallery", type=click.Path(exists=True, path_type=Path))
@click.argument("images", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("-n", "--rounds", default=10, show_default=True, help="How often each image is asked about.")
def main(model: Path, gallery: Path, images: tuple[Path, ...], rounds: int) -> None:
    """Time the demo's answers against a finder's and the command's."""
    direct: list[float] = []
    page: list[float] = []
    query: list[float] = []
    with Finder.open(model, gallery) as finder, demo(model, gallery) as client:
        ask = question(client)
        for at in range(rounds + 1):
            for image in images:
                start = time.perf_counter()
                expected = [one.id for one in finder.analyze(image, K).neighbours]
                middle = time.perf_counter()
                answer = answered(client, ask, image)
                end = time.perf_counter()
                command = [sys.executable, "-m", "cbmir", "query", str(model), str(gallery), str(image), "-k", str(K)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                last = time.perf_counter()
                if any(f'data-id="{escape(name)}"' not in answer["html"]["wall"] for name in expected):
                    raise click.ClickException("expected the same look-alikes of both, found others")
                if at:  # the first round warms both up
                    direct.append(middle - start)
                    page.append(end - middle)
                    query.append(last - end)
    finder_ms, demo_ms, query_ms = (1000 * statistics.median(of) for of in (direct, page, query))
    figures = {
        "finder_ms": finder_ms, "demo_ms": demo_ms, "query_ms": query_ms, "demo_to_finder": demo_ms / finder_ms,
        "demo_to_query": demo_ms / query_ms,
    }  # fmt: skip
    click.echo(json.dumps({name: round(value, 2) for name, value in figures.items()}))


@contextmanager
def demo(model: Path, gallery: Path) -> Iterator[httpx.Client]:
    """A client of `cbmir demo` in a process of its own."""
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


def question(client: httpx.Client) -> int:
    """The number of the page's channel."""
    (ask,) = [one for one in client.get("/config").json()["dependencies"] if one["targets"][0][1] == "ask"]
    return int(ask["id"])


def answered(client: httpx.Client, ask: int, image: Path) -> dict[str, Any]:
    """Drop a file on a new page: the answer."""
    session = uuid.uuid4().hex
    upload = {"files": (f"{session}~{image.name}", image.read_bytes())}
    paths = client.post("/gradio_api/upload", files=upload).raise_for_status().json()
    event = {"n": 1, "about": 0, "action": "open", "paths": paths, "controls": {"k": K}}
    joined = {"data": [], "event_data": {"question": event}, "fn_index": ask, "session_hash": session}
    client.post("/gradio_api/queue/join", json=joined).raise_for_status()
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as events:
        for line in events.iter_lines():
            if '"process_completed"' in line:
                answer: dict[str, Any] = json.loads(line.removeprefix("data:"))["output"]["data"][0]
                return answer
    raise click.ClickException("expected an answer of the demo, found none")


if __name__ == "__main__":
    main()
