"""From one gallery to another: a merge, a copy, and a copy without what names a patient."""

from __future__ import annotations

import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from cbmir.errors import GalleryError
from cbmir.runtime.gallery.connections import new_file, translated
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.gallery.store import Store
from cbmir.runtime.gallery.writer import Added

_BLOCK = 1024  # entries in memory at once, with their embeddings and thumbnails


def merge(target: Store, source: Store) -> Added:
    """Add all entries of `source` to `target`, in one transaction: what went in, and the duplicates that did not.

    An entry whose content is in `target` already is left out. One whose id another image has there gets a longer id,
    of more of its path, as an addition gives it. Ids of patients become pseudonyms where `target` keeps
    these and was opened with their key. Until the end all that is added stands in the log of `target`: it needs room
    twice. Raises GalleryError, and changes nothing, for galleries of different models, a label that `target` does not
    have, an id that is there where no longer one is free or a file's digest is missing, and pseudonyms that do not fit.
    """
    target.check_model(source.card)
    missing = [name for name in source.labels.names if name not in target.labels.names]
    if missing:
        raise GalleryError(f"{target.path}: expected entries with labels of {', '.join(target.labels.names)}; found "
                           f"{', '.join(missing)} in {source.path}")  # fmt: skip
    if source.pseudonym_check not in ("", target.pseudonym_check):
        raise GalleryError(f"{source.path} keeps pseudonyms, and {target.path} "
                           f"{'others' if target.pseudonym_check else 'none'}: one patient would pass for two; merge "
                           f"only galleries with pseudonyms of one key")  # fmt: skip
    ids: list[str] = []
    duplicates: list[tuple[str, str]] = []
    renamed: list[tuple[str, str]] = []
    with source.reading() as reader, target.writing() as writer:
        for block in reader.columns(size=_BLOCK):
            entries, thumbnails = reader.entries(block.numbers), reader.thumbnails(block.numbers)
            added = writer.add(entries, block.vectors, thumbnails, renaming=True)
            ids += added.ids
            duplicates += added.duplicates
            renamed += added.renamed
    return Added(tuple(ids), tuple(duplicates), tuple(renamed))


def export(source: Store, path: str | Path) -> None:
    """Copy a gallery, as it is at one moment, into a new or empty folder; others may go on writing to it.

    The copy is a gallery of its own, under a new uuid. Raises GalleryError if there is something at `path`, and where
    anything in the gallery is damaged.
    """
    with _folder(Path(path)) as part:
        place = new_file(part)
        with source.reading() as reader, translated(part, "write to"), closing(sqlite3.connect(place)) as copy:
            reader.copy(copy)
        with Store.open(part) as made, made.reading() as reader:  # opened, it gets its own uuid
            for _ in reader.columns():  # a copy that is needed must not turn out to be damaged then
                pass


def export_deidentified(source: Store, path: str | Path) -> int:
    """Copy what a search needs, and nothing that names a patient, into a new or empty folder: how many entries.

    Kept are embeddings, labels, views and splits. Entries get random ids and a random order; patients and studies get
    pseudonyms under a key that is thrown away, so that images of one patient still know each other. The copy says that
    it keeps pseudonyms: it is never merged with another, since one patient would pass for two. Paths, UIDs, dates,
    reports, thumbnails and files' digests are left out.

    **The embeddings themselves may still identify patients**: an image of the same patient lies near, and whoever has
    one can find the others (chest radiographs re-identify patients with an AUC of 0.99, PMC9434540). De-identified
    does not mean anonymous: do not make such a copy public.

    Raises GalleryError if there is something at `path`, and for damage.
    """
    key = Pseudonyms.throw_away()
    shuffle = np.random.default_rng(secrets.randbits(128)).permutation
    with _folder(Path(path)) as part, source.reading() as reader:
        numbers = np.concatenate([np.empty(0, np.int64), *(block.numbers for block in reader.columns(size=_BLOCK))])
        numbers = shuffle(numbers)
        with Store.create(part, source.card, source.labels, pseudonyms=key) as target, target.writing() as writer:
            for start in range(0, len(numbers), _BLOCK):
                chosen = numbers[start : start + _BLOCK]
                entries = [_deidentified(entry, key) for entry in reader.entries(chosen)]
                writer.add(entries, reader.vectors(chosen))
    return len(numbers)


def _deidentified(entry: Entry, key: Pseudonyms) -> Entry:
    return Entry(
        id=secrets.token_hex(8),
        image="",
        # What is a pseudonym already would stay as it is, so that the two galleries could be joined: hash it anew.
        patient_id=key.patient(f"{entry.patient_id} ") if entry.patient_id else "",
        # With the patient, since several may have a study of one id, which would tell studies of a kind.
        study_id=key.study(f"{entry.patient_id}\0{entry.study_id}") if entry.study_id else "",
        view=entry.view,
        split=entry.split,
        labels=entry.labels,
    )


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of `path`, a new or empty folder, when the block ends without an error."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise GalleryError(f"{path}: expected a new or empty folder for the copy, found something there")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        try:
            yield part
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise GalleryError(f"{path}: cannot write the copy there ({error}); choose another folder") from error
