"""What the demo adds to an answer: opening a file on its page, against `Finder.analyze` and against `cbmir query`.

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

from cbmir.demo.controls import Controls
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
        ask, outputs = question(client)
        for at in range(rounds + 1):
            for image in images:
                start = time.perf_counter()
                expected = [one.id for one in finder.analyze(image, K).neighbours]
                middle = time.perf_counter()
                cards = answered(client, ask, outputs, image)
                end = time.perf_counter()
                command = [sys.executable, "-m", "cbmir", "query", str(model), str(gallery), str(image), "-k", str(K)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                last = time.perf_counter()
                if cards != expected:
                    raise click.ClickException("expected the same similar images of both, found others")
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


def question(client: httpx.Client) -> tuple[dict[str, Any], list[int]]:
    """What the page does with files that were dropped on it, and which of its outputs are the similar images."""
    config = client.get("/config").raise_for_status().json()
    (ask,) = [one for one in config["dependencies"] if one["targets"][0][1] == "files"]
    (similar,) = [one["id"] for one in config["components"] if one["props"].get("elem_id") == "similar"]
    return ask, [at for at, output in enumerate(ask["outputs"]) if output == similar]


def answered(client: httpx.Client, ask: dict[str, Any], outputs: list[int], image: Path) -> list[str]:
    """Drop a file on a new page: the ids of the similar images."""
    session = uuid.uuid4().hex
    upload = {"files": (f"{session}~{image.name}", image.read_bytes())}
    paths = client.post("/gradio_api/upload", files=upload).raise_for_status().json()
    controls = Controls(k=K).values()
    joined = {"data": ["", *controls], "event_data": {"paths": paths}, "fn_index": ask["id"], "session_hash": session}
    client.post("/gradio_api/queue/join", json=joined).raise_for_status()
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as events:
        for line in events.iter_lines():
            if '"process_completed"' in line:
                answer = json.loads(line.removeprefix("data:"))["output"]["data"][outputs[0]]
                return [card["id"] for card in answer["value"]["cards"]]
    raise click.ClickException("expected an answer of the demo, found none")


if __name__ == "__main__":
    main()
