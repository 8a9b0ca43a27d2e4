"""Shards: galleries that are parts of one build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cbmir.errors import GalleryError, UserError
from cbmir.fields import from_json
from cbmir.files import sync, write_json
from cbmir.input_file import read_json
from cbmir.runtime.gallery.database import live_folder

_FILE = "shard.json"


@dataclass(frozen=True)
class Shard:
    """Part `number` (from 1) of `of` of the build with this digest, described by a file in the gallery's folder."""

    number: int
    of: int
    build: str

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise UserError(f"expected a shard from 1/{self.of} to {self.of}/{self.of}, found {self.number}/{self.of}")

    def rows(self, count: int) -> slice:
        """Return the part's rows among `count`. They are consecutive, so all shards in order make up the whole."""
        return slice((self.number - 1) * count // self.of, self.number * count // self.of)

    def save(self, folder: Path) -> None:
        write_json(folder / _FILE, asdict(self))
        sync(folder / _FILE)

    @classmethod
    def load(cls, path: Path) -> Shard | None:
        """Load which shard the gallery at `path` is; None if it is not one. Raises GalleryError for an invalid file."""
        try:
            return from_json(cls, read_json(live_folder(path) / _FILE))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, UserError) as error:
            raise GalleryError(f"{path}: cannot read which build it is a shard of ({error}); build it again") from error


def in_order(galleries: Sequence[Path]) -> list[Path]:
    """Return the galleries to merge; if they are shards, sorted by number.

    Raises GalleryError if there are shards and some are missing, listed twice, or not of the same build.
    """
    found = [(Shard.load(path), path) for path in galleries]
    shards = {shard: path for shard, path in found if shard is not None}
    if not shards:
        return list(galleries)
    first = next(iter(shards))
    stray = [str(path) for shard, path in found if shard is None or (shard.of, shard.build) != (first.of, first.build)]
    if stray:
        raise GalleryError(f"expected shards of the same build as {shards[first]}, found others: {', '.join(stray)}")
    if len(shards) < len(found):
        raise GalleryError(f"expected each shard once, found {len(found)} galleries of {len(shards)} shards")
    missing = [str(number) for number in range(1, first.of + 1) if number not in {shard.number for shard in shards}]
    if missing:
        raise GalleryError(f"expected all {first.of} shards of the build, found {len(shards)}; missing: "
                           f"{', '.join(missing)}. Build them with --shard NUMBER/{first.of}")  # fmt: skip
    return [shards[shard] for shard in sorted(shards, key=lambda shard: shard.number)]
