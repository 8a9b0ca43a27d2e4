"""Attacks with hostile files (images, manifests, cards), and the protection of files that cbmir writes."""

from __future__ import annotations

import csv
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from conftest import TINY_CARD, tiny_xray, write_tiny_model
from hostile import BOMBS, deep_json, gzip_bomb
from lab import Lab, attack, png, told, unless
from pyarrow import parquet
from watch import cbmir, limited

from cbmir.card import CARD_KEY
from pacs_rig import make_radiograph

_PATIENCE = 120.0  # seconds for a command on a shared machine, with loading its libraries


@attack(7)
def bombs_by_command(lab: Lab, count: int) -> Iterator[str]:
    """Small images that are expensive to decode, given to `cbmir index build`: a typed error or an answer, within two
    minutes and 3 GiB."""
    for name, data in islice(BOMBS.items(), count):
        folder = lab.new()
        (folder / "bomb").write_bytes(data())
        manifest(folder, "bomb")
        yield told(name, cbmir("index", "build", lab.model, folder / "manifest.csv", "-o", folder / "g",
                               seconds=_PATIENCE, mebibytes=3072))  # fmt: skip


def manifest(folder: Path, *images: object) -> Path:
    """Write a manifest of these images and a good one."""
    (folder / "good.png").write_bytes(png(1))
    header, row = "image,patient_id,split,Effusion,Mass,Nodule\n", "{},p,train,1,0,0\n"
    path = folder / "manifest.csv"
    path.write_text(header + "".join(row.format(image) for image in ("good.png", *images)))
    return path


def _bomb(folder: Path) -> Path:
    """A manifest followed by 1.5 GB of zeros, gzipped."""
    (folder / "manifest.csv.gz").write_bytes(gzip_bomb(manifest(folder).read_bytes(), 1500))
    return folder / "manifest.csv.gz"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.png")
    return manifest(folder, "pipe.png")


def _fifo_as_manifest(folder: Path) -> Path:
    os.mkfifo(folder / "manifest.csv")
    return folder / "manifest.csv"


def _brackets_beside(folder: Path) -> Path:
    (folder / "manifest.about.json").write_bytes(deep_json())
    return manifest(folder)


def _parquet_bomb(folder: Path) -> Path:
    """Two columns of 40 million equal values, in a few kilobytes."""
    columns = {name: pyarrow.array(["x" * 50]).dictionary_encode() for name in ("image", "patient_id")}
    table = pyarrow.table(columns)
    with parquet.ParquetWriter(folder / "manifest.parquet", table.schema, use_dictionary=True) as writer:
        rows = pyarrow.table({n: pyarrow.DictionaryArray.from_arrays([0] * 2_000_000, ["x" * 50]) for n in columns})
        for _ in range(20):
            writer.write_table(rows.cast(table.schema))
    return folder / "manifest.parquet"


def _endless_line(folder: Path) -> Path:
    path = manifest(folder)
    with path.open("ab") as stream:
        stream.write(b'"' + b"x" * 300_000_000)
    return path


MANIFESTS: dict[str, Callable[[Path], Path]] = {
    "gzip bomb": _bomb,
    "/dev/zero as image": lambda folder: manifest(folder, "/dev/zero"),
    "FIFO as image": _fifo,
    "FIFO as manifest": _fifo_as_manifest,
    "/dev/zero as manifest": lambda folder: Path("/dev/zero"),
    "200,000 brackets beside it": _brackets_beside,
    "Parquet bomb": _parquet_bomb,
    "a line of 300 MB": _endless_line,
    "a folder as image": lambda folder: manifest(folder, "."),
}


@attack(len(MANIFESTS))
def manifests(lab: Lab, count: int) -> Iterator[str]:
    """Bombs, devices, pipes and deeply nested JSON as a manifest or in it: a typed error, or a whole gallery of what
    can be read, within two minutes and 2 GiB."""
    for name, make in islice(MANIFESTS.items(), count):
        folder = lab.new()
        yield told(name, cbmir("index", "build", lab.model, make(folder), "-o", folder / "g", seconds=_PATIENCE))


#: Field of a card -> invalid values.
CARDS: dict[str, list[Any]] = {
    "thresholds": ["x", ["0.5", 0.9, None], [float("nan"), 0.9, None], [0.5, 0.9], {"a": 1}, [True, 0.9, None]],
    "sigma": ["0.7", float("nan"), float("inf"), -1, None, [0.7], True],
    "calibration": [[["4", -2.0]] * 3, [{"slope": "4"}] * 3, "x", [None], [[float("nan"), 0]] * 3],
    "embedding_dim": ["8", 8.5, -8, 0, 1e400, None, 10**30],
    "labels": [[1, 2, 3], "Effusion", [["Effusion"]] * 3, ["Effusion"] * 3, {"a": 1}, [""] * 3],
    "proxies_per_class": ["2222", [2, 2, "2", 2], [-1] * 4, [2.5] * 4],
    "preprocess": ["x", None, [], {"crop": "32"}, {"crop": -1}],
    "encoder": [7, None, ["x"], {}],
    "fingerprint": [7, None, ["x"]],
    "head": ["other", 7, None, []],
}


@attack(sum(map(len, CARDS.values())) + 2)
def cards(lab: Lab, count: int) -> Iterator[str]:
    """A model's card with a value of the wrong type, out of range, NaN or missing, or with deeply nested or broken
    JSON: a typed error that names the field, before the model runs."""
    card, folder = json.loads(TINY_CARD.dumps()), lab.new()
    texts = {"brackets": deep_json().decode(), "no JSON": "{"}
    texts |= {f"{name} = {value!r:.30}": json.dumps(card | {name: value}) for name, of in CARDS.items() for value in of}
    names = list(texts)[:count]
    for number, name in enumerate(names):
        write_tiny_model(folder / f"{number}.onnx", metadata={CARD_KEY: texts[name]})
    answers = folder / "answers.json"
    reason = limited([sys.executable, "-c", _OPEN, str(folder), str(len(names)), str(answers)], _PATIENCE, 1024)
    for name, answer in zip(names, json.loads(answers.read_text()) if not reason else [reason] * count, strict=True):
        yield told(name, answer)


_OPEN = """
import json, sys
from pathlib import Path
from cbmir.errors import CbmirError
from cbmir.runtime import open_engine
answers = []
for number in range(int(sys.argv[2])):
    try:
        open_engine(Path(sys.argv[1]) / f"{number}.onnx", threads=1).close()
        answers.append("was taken")
    except CbmirError:
        answers.append("")
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}"[:200])
Path(sys.argv[3]).write_text(json.dumps(answers))
"""


@attack(5)
def files_of_patients(lab: Lab, count: int) -> Iterator[str]:
    """Only their owner can read galleries, embeddings, results and manifests, with any umask. A CSV cell that a
    spreadsheet would run as a formula is escaped."""
    folder = lab.new()
    name = '=HYPERLINK("http:evil.example")&.png'
    shutil.copy(lab.folder / "00.png", folder / name)
    table = manifest(folder)
    with table.open("a", newline="") as stream:
        csv.writer(stream).writerow([name, "p", "train", 1, 0, 0])
    (folder / "x.dcm").write_bytes(make_radiograph(tiny_xray(5)))
    before = os.umask(0)
    try:
        cbmir("index", "build", lab.model, table, "-o", folder / "gallery")
        cbmir("data", "table", table, "--labels", "Effusion,Mass,Nodule", "--split-column", "split",
              "-o", folder / "again.csv")  # fmt: skip
        cbmir("embed", lab.model, table, "-o", folder / "embeddings.npy")
        cbmir("pacs", "analyze", folder / "x.dcm", "--model", lab.model, "-o", folder / "results")
    finally:
        os.umask(before)
    made = [folder / "gallery", folder / "embeddings.npy", folder / "again.csv", folder / "results"]
    made += sorted((folder / "results").iterdir())[:1] if (folder / "results").is_dir() else [folder / "no-result"]
    for path in made[:count]:
        yield unless(
            path.exists() and not stat.S_IMODE(path.stat().st_mode) & 0o077, f"{path.name} is readable by others"
        )
    again = folder / "again.csv"
    cells = [cell for row in csv.reader(again.open()) for cell in row] if again.exists() else []
    yield unless(
        any(name in cell for cell in cells) and not any(cell.startswith(("=", "+", "@", "\t")) for cell in cells),
        f"a formula in the manifest, or its image is not there ({len(cells)} cells)",
    )
