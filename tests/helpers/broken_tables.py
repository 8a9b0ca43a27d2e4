"""Valid tables, and randomly broken ones, for tests of the readers of tables and manifests."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from cbmir.errors import ManifestError, SplitError
from cbmir.manifest import read_manifest, write_manifest
from cbmir.training.readers.common import listed_labels
from cbmir.training.readers.nih import read_entries
from cbmir.training.readers.siim import mask_box
from cbmir.training.readers.table import ColumnMapping, LabelCells, read_own_table

_NAMES = ("a.png", "b.png", "c.png", "d.png")
_OWN = "\n".join(
    ["image,patient_id,study,view,split,report,date,Mass,findings",
     'a.png,1.0,s1,PA,train,"Clear, ""both"" sides.\nNo effusion.",2019-05-31,1,Mass|Edema',
     "b.png,2.0,,AP,val,,20190531,yes,No Finding", "c.png,3.0,s3,,test,Müller,,-1,",
     "d.png,4.0,,LATERAL,train,,2019-05-31 00:00:00,,\"['Mass', 'Nodule']\""]
)  # fmt: skip
_MANIFEST = "\n".join(
    ["image,patient_id,study_id,view,split,report,source,date,boxes,Effusion,Mass",
     'a.png,p1,s1,PA,train,text,NIH,2020-01-31,"[[""Mass"", 0.25, 0.5, 0.125, 0.25]]",1,1', "b.png,p2,,,val,,,,,,-1"]
)  # fmt: skip
_NIH = "\n".join(
    ["Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,Size[Width,Height]",
     "00000001_000.png,Mass|Edema,0,1,57,M,PA,2682,2749", "00000002_000.png,No Finding,1,2,57,F,AP,1,1,"]
)  # fmt: skip


def whole_tables() -> dict[str, bytes]:
    """Name -> bytes of a table that at least one reader accepts."""
    return {
        "own.csv": _OWN.encode(), "semicolons.csv": _OWN.replace(",", ";").encode("cp1252"),
        "tabs.csv": _OWN.replace(",", "\t").encode("utf-16"), "manifest.csv": _MANIFEST.encode(),
        "nih.csv": b"\xef\xbb\xbf" + _NIH.encode(), "packed.csv.gz": gzip.compress(_MANIFEST.encode(), mtime=0),
        "mask": b"557374 2 1015 8 1009 14", "list": b"['kyphosis', 'pleural effusion']",
    }  # fmt: skip


def read_as_table(data: bytes, folder: Path) -> int:
    """Pass bytes to every reader of tables, and return how many accept them. Raises any error that is not typed.

    `folder` gets empty files with the image names of the tables.
    """
    for name in _NAMES:
        (folder / name).touch()
    path = folder / ("table.csv.gz" if data.startswith(b"\x1f\x8b") else "table.csv")
    path.write_bytes(data)
    taken = 0
    for reader in _readers(path, data):
        with suppress(ManifestError, SplitError):
            reader()
            taken += 1
    return taken


def _readers(path: Path, data: bytes) -> list[Callable[[], object]]:
    columns = ColumnMapping(study="study", view="view", split="split", report="report", date="date")
    text = data.decode("latin-1")

    def manifest() -> None:
        found = read_manifest(path)
        write_manifest(found, path.with_name("again.csv"))
        if read_manifest(path.with_name("again.csv")).rows != found.rows:
            raise RuntimeError("a manifest is not the same after it was written")

    return [
        manifest,
        lambda: read_own_table(path, columns=columns, labels=["Mass"]),
        lambda: read_own_table(path, columns=columns, cells=LabelCells("findings"), missing="skip"),
        lambda: read_own_table(path, cells=LabelCells("findings", format="list"), missing="skip"),
        lambda: read_own_table(path, columns=ColumnMapping(patient="image"), cells=LabelCells("findings", ";")),
        lambda: read_entries(path),
        lambda: mask_box(text, "here"),
        lambda: _listed(text),
    ]


def _listed(text: str) -> None:
    if listed_labels(text) is None:
        raise ManifestError("no list")


def broken_tables(count: int, seed: int) -> Iterator[bytes]:
    """Valid tables with a few bytes changed, cut, doubled or inserted, including ones with a meaning in tables."""
    chance = random.Random(seed)
    whole = list(whole_tables().values())
    marks = [
        b'"',
        b",",
        b";",
        b"\t",
        b"\n",
        b"\r",
        b"\0",
        b"[",
        b"]",
        b"'",
        b"nan",
        b"1e400",
        b"\xff",
        b"\xc3\xa4",
        b"-1",
    ]
    for _ in range(count):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 6)):
            place, length = chance.randrange(len(data) + 1), chance.randint(1, 12)
            kind = chance.randrange(4)
            if kind == 0:
                data[place : place + 1] = chance.choice(marks)
            elif kind == 1:
                del data[place : place + length]
            elif kind == 2:
                data[place:place] = data[place : place + length]
            else:
                data[place:place] = chance.choice(marks)
        yield bytes(data)
