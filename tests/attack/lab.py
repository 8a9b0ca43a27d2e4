"""Shared by attacks: their list, and a small model with a gallery, which they must not change."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conftest import TINY_CARD, tiny_xray, write_tiny_model
from PIL import Image

from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.runtime import build_gallery, open_engine


@dataclass(frozen=True)
class Lab:
    """A working folder with `model`, `manifest` and `gallery`; attacks change copies of these."""

    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def made_in(cls, folder: Path) -> Lab:
        lab = cls(folder)
        write_tiny_model(lab.model)
        rows = []
        for number in range(24):
            image = folder / f"{number:02}.png"
            image.write_bytes(png(number))
            rows.append(Row(image, f"p{number // 2}", (number % 2, 0, None), split="train"))
        write_manifest(Manifest(TINY_CARD.labels, tuple(rows)), lab.manifest)
        with open_engine(lab.model, threads=1) as engine:
            build_gallery(engine, read_manifest(lab.manifest), lab.gallery)
        return lab

    @property
    def model(self) -> Path:
        return self.folder / "tiny.onnx"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.csv"

    @property
    def gallery(self) -> Path:
        return self.folder / "gallery"

    def new(self) -> Path:
        """A new empty folder."""
        made = self.folder / f"work-{next(self._numbers)}"
        made.mkdir()
        return made


def png(number: int) -> bytes:
    """The PNG file of an X-ray."""
    stream = io.BytesIO()
    Image.fromarray(tiny_xray(number)).save(stream, "PNG")
    return stream.getvalue()


#: Yields for each attempt "" if the promise was kept, or the reason why not.
Run = Callable[[Lab, int], Iterator[str]]


@dataclass(frozen=True)
class Attack:
    """An attack of `count` attempts; its promise is the function's docstring. If `whole`, it always runs to its end."""

    run: Run
    count: int
    whole: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")

    @property
    def promise(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


ATTACKS: list[Attack] = []


def attack(count: int, whole: bool = False) -> Callable[[Run], Run]:
    """Add a function to the list, with this number of attempts."""

    def add(run: Run) -> Run:
        ATTACKS.append(Attack(run, count, whole))
        return run

    return add


def unless(condition: object, reason: object) -> str:
    """ "" if the condition holds, else the reason."""
    return "" if condition else str(reason)


def told(name: str, reason: str) -> str:
    """`NAME: REASON`, or "" without a reason."""
    return f"{name}: {reason}" if reason else ""
