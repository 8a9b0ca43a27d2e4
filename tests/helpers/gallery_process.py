"""A process that writes and reads a gallery until it is killed: `python gallery_process.py`, controlled by lines
(`serve`).

An entry's content follows from its id and report, so that `test_faults.py` knows every correct answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.gallery import search
from cbmir.runtime.gallery.build import add_to_gallery, build_gallery, work
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import merge, verify

DIM, PATIENTS = 8, 9
CARD = ModelCard(
    labels=LabelSet(("Effusion", "Mass")), preprocess=PreprocessSpec.for_image_size(32), encoder="none",
    embedding_dim=DIM, head="linear", sigma=1.0, proxies_per_class=(), negative_proxies=False, thresholds=(None, None),
    calibration=(None, None), fingerprint="none",
)  # fmt: skip


def drawn(name: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))


def vector_of(name: str) -> NDArray[np.float32]:
    vector = drawn(name).normal(size=DIM)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def patient_of(name: str) -> str:
    return f"patient{int(drawn(name).integers(PATIENTS))}"


def entry_of(name: str, report: str) -> Entry:
    """An entry whose fields follow from its id and report."""
    number = int(drawn(name).integers(1000))
    return Entry(
        id=name, image=f"/{name}.png", patient_id=patient_of(name), study_id=f"study {name}", view="PA",
        date=f"2020-01-{1 + number % 28:02}", split="train", report=report,
        labels={"Effusion": number % 2, "Mass": None}, sha256=hashlib.sha256(name.encode()).hexdigest(),
    )  # fmt: skip


def jpeg_of(name: str) -> bytes:
    return f"jpeg of {name}".encode() * 5


def contents(names: list[str]) -> tuple[list[Entry], NDArray[np.float32], list[bytes]]:
    return [entry_of(n, "") for n in names], np.array([vector_of(n) for n in names]), [jpeg_of(n) for n in names]


def tell(what: object) -> None:
    """Send a line to the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# -- tasks that are killed


def write(folder: Path, seed: int) -> None:
    """Change the gallery for ever; announce each task, and report when it is done."""
    rng = random.Random(seed)
    with Gallery.open(folder) as gallery:
        for step in range(10_000):
            ids = gallery.ids()
            new = [f"{seed}-{step}-{n}" for n in range(rng.randint(1, 9))]
            kind = rng.choice(["add", "add", "merge", "remove", "patient", "update", "compact", "rebuild", "index"])
            kind = kind if ids else "add"
            some = rng.sample(ids, min(len(ids), rng.randint(1, 4)))
            task: dict[str, Any] = {"kind": kind}
            if kind in ("add", "merge"):
                task["ids"] = new
            elif kind in ("remove", "update"):
                task["ids"] = some
            if kind == "patient":
                task["patient"] = patient_of(some[0])
            if kind == "update":
                task["report"] = f"report {seed} {step}"
            tell({"begun": task})
            perform(gallery, task, rng)
            tell({"done": task})


def fill(folder: Path, steps: int) -> None:
    """`write` this many times; each time, files cannot grow beyond about the database's size, as on a full disk."""
    rng = random.Random(steps)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Gallery.open(folder) as gallery:
        for step in range(steps):
            ids = gallery.ids()
            kind = rng.choice(["add", "add", "add", "update", "remove", "compact"]) if ids else "add"
            some = rng.sample(ids, min(len(ids), 3))
            task = {"kind": kind, "ids": [f"{step}-{n}" for n in range(30)] if kind == "add" else some,
                    "report": f"report {step} " * 500}  # fmt: skip
            largest = max(path.stat().st_size for path in folder.glob("gallery.sqlite*"))
            limit = rng.randrange(largest // 2, largest + 40_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                perform(gallery, task, rng)
                outcome = "done"
            except GalleryError:
                outcome = "refused"
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            tell({outcome: task})


def perform(gallery: Gallery, task: dict[str, Any], rng: random.Random) -> None:
    match task["kind"]:
        case "add":
            gallery.add(*contents(task["ids"]))
        case "merge":
            other = gallery.path.with_name("other")
            shutil.rmtree(other, ignore_errors=True)
            with Gallery.create(other, CARD) as source:
                source.add(*contents(task["ids"]))
                merge(gallery, source)
        case "remove":
            gallery.remove(ids=task["ids"])
        case "patient":
            gallery.remove(patient_ids=[task["patient"]])
        case "update":
            gallery.update([entry_of(name, task["report"]) for name in task["ids"]])
        case "compact":
            gallery.compact()
        case "rebuild":
            gallery.rebuild()
        case "index":
            gallery.rebuild(rng.choice(["exact", "bf16", "int8", "auto"]))
            gallery.search(vector_of("query"), 5)


class _Engine:
    """A stand-in for a model, whose embedding follows from the image's bytes."""

    card = CARD
    threads, streams, max_batch = 1, False, 32

    def run(self, batch: NDArray[np.uint8], **_: object) -> Any:
        vectors = np.array([vector_of(hashlib.sha256(one.tobytes()).hexdigest()) for one in batch])
        return type("Outputs", (), {"embedding": vectors, "feature_map": None})()


ENGINE: Any = _Engine()


def let_the_index_propose_all() -> None:
    """Let the index propose and rank all entries, so that its answers are exact, even after rebuilds."""
    search._AND = search._AND_RANKED = 1000


def build(folder: Path, seed: int) -> None:
    """Build and extend a gallery of the images in the folder, again and again; each run continues the last."""
    work.BATCH = 4
    rng = random.Random(seed)
    images = sorted((folder / "images").glob("*.png"))
    rows = [Row(image, patient_of(image.name), (1, None)) for image in images]
    for _ in range(1000):
        half = rng.randint(1, len(rows) - 1)
        anew = partial(build_gallery, replace_others=True)
        for function, own in ((anew, rows[:half]), (add_to_gallery, rows)):
            tell({"begun": len(own)})
            manifest = Manifest(CARD.labels, tuple(own))
            function(ENGINE, manifest, folder / "built", splits=["all"], workers=0)
            tell({"done": len(own)})


# -- queries


def look(folder: Path) -> dict[str, Any]:
    """The answers to all kinds of queries of a gallery; "GalleryError: …" if one fails."""
    answers: dict[str, Any] = {}

    def ask(what: str, question: Callable[[], Any]) -> None:
        try:
            answers[what] = question()
        except GalleryError as error:
            answers[what] = f"GalleryError: {error}"

    try:
        gallery = Gallery.open(folder)
    except GalleryError as error:
        return {"open": f"GalleryError: {error}"}
    with gallery:
        for number in range(3):
            query = vector_of(f"query {number}")
            for exact in (None, True):
                for one in (Filter(), Filter(where="not Effusion", exclude_patients=frozenset({"patient3"}))):
                    ask(f"search {number} {exact} {one}", partial(found, gallery, query, exact, one))
        ask("ids", gallery.ids)
        ask("len", lambda: len(gallery))
        ask("info", partial(about, gallery))
        for name in [f"e{n}" for n in range(0, 60, 7)]:
            for question in (entry_in, vector_in, thumbnail_in, same_file):
                ask(f"{question.__name__} {name}", partial(question, gallery, name))
        for number in range(PATIENTS + 1):
            ask(f"patient {number}", partial(gallery.has_patient, f"patient{number}"))
    return answers


def found(gallery: Gallery, query: NDArray[np.float32], exact: bool | None, filter: Filter) -> Any:
    answer = gallery.search(query, 5, filter=filter, exact=exact)
    return [answer.generation, [[asdict(hit.entry), hit.distance] for hit in answer.hits]]


def about(gallery: Gallery) -> Any:
    changing = ("path", "bytes", "changed", "search")
    return {name: value for name, value in gallery.info().items() if name not in changing}


def entry_in(gallery: Gallery, name: str) -> Any:
    return asdict(gallery.entry(name))


def vector_in(gallery: Gallery, name: str) -> Any:
    return gallery.vector(name).tolist()


def thumbnail_in(gallery: Gallery, name: str) -> Any:
    return str(gallery.thumbnail(name))


def same_file(gallery: Gallery, name: str) -> Any:
    return [entry.id for entry in gallery.find(entry_of(name, "").sha256)]


# -- processes


def serve() -> None:
    """For each line [task, folder, seed], run the task in a fork, or `look` in this process; a line reports the end."""
    logging.disable()
    tell("ready")
    for line in sys.stdin:
        task, folder, seed = json.loads(line)
        if task == "look":
            try:
                answer: Any = look(Path(folder))
                answer = {"answers": answer, "problems": [asdict(problem) for problem in verify(folder)]}
            except Exception:  # noqa: BLE001 - told to the test, which fails
                answer = {"bug": traceback.format_exc()}
            tell(answer)
            continue
        child = os.fork()
        if child == 0:
            try:
                tell({"pid": os.getpid()})
                {"write": write, "build": build, "fill": fill}[task](Path(folder), seed)
            except BaseException:  # noqa: BLE001 - told to the test, which fails
                tell({"bug": traceback.format_exc()})
            os._exit(1)
        os.waitpid(child, 0)
        tell({"dead": True})


if __name__ == "__main__":
    let_the_index_propose_all()
    serve()
