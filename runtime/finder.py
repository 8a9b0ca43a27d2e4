"""From an image to findings and neighbours: the runtime's front door."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import EngineError, ImageError, UserError
from cbmir.labels import canonical
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engine import Engine, EngineHealth, Mode
from cbmir.runtime.evidence import finding_vectors
from cbmir.runtime.gallery import Gallery, Hit
from cbmir.runtime.opening import open_engine
from cbmir.runtime.preprocess import preprocess
from cbmir.runtime.radiograph import Radiograph
from cbmir.runtime.reading import read_image
from cbmir.runtime.result import Analysis, Finding, Neighbour
from cbmir.runtime.store import Entry

Image = str | Path | bytes | NDArray[np.uint8] | NDArray[np.uint16]

_BATCH = 32  # images that `embed_many` gives to the engine at once


class Finder:
    """A model, and a gallery where neighbours are wanted. One finder serves any number of threads."""

    def __init__(self, engine: Engine, gallery: Gallery | None = None, *, reduced_jpeg2000: bool = False) -> None:
        """Takes both over: `close` closes them. Raises GalleryError for a gallery of another model.

        `reduced_jpeg2000` lets large JPEG 2000 images be decoded at a lower resolution: faster, and within one grey
        level of the model's input but for a few pixels (see `read_image`, `reduced_for`).
        """
        if gallery is not None:
            gallery.check_model(engine.card)
        self.engine = engine
        self.gallery = gallery
        self._reduced_for = engine.card.preprocess if reduced_jpeg2000 else None

    @classmethod
    def open(
        cls,
        model: str | Path,
        gallery: str | Path | None = None,
        *,
        engine: str = "auto",
        threads: int | None = None,
        mode: Mode = "auto",
        cache: str | Path | None = None,
        allow_fallback: bool = False,
        reduced_jpeg2000: bool = False,
    ) -> Self:
        """Open a model by `open_engine`, and a gallery's folder. Raises what `open_engine` raises, and GalleryError.

        `reduced_jpeg2000` is as `Finder` has it.
        """
        loaded = open_engine(
            model, engine=engine, threads=threads, mode=mode, cache=cache, allow_fallback=allow_fallback
        )
        opened = None
        try:
            opened = None if gallery is None else Gallery.open(gallery)
            return cls(loaded, opened, reduced_jpeg2000=reduced_jpeg2000)
        except BaseException:
            loaded.close()
            if opened is not None:
                opened.close()
            raise

    @property
    def card(self) -> ModelCard:
        return self.engine.card

    def analyze(
        self,
        image: Image | Radiograph,
        k: int = 10,
        *,
        patient_id: str | None = None,
        exclude_same_patient: bool = True,
    ) -> Analysis:
        """Findings and the k nearest neighbours of one image: a path, a file's bytes, a grey array [H, W], or
        what `read_image` made of one.

        The same patient's images are left out of the neighbours: those of `patient_id`, of the patients of the
        gallery's entries made from the same file, and of the DICOM file's patient. A warning says where none of these
        is known, or none is in the gallery. Raises ImageError for an image that cannot be analysed.
        """
        threads = self.engine.threads
        radiograph = image
        if not isinstance(radiograph, Radiograph):
            radiograph = read_image(radiograph, threads=threads, reduced_for=self._reduced_for)
        batch = preprocess(radiograph, self.card.preprocess, threads=threads)[None, None]
        outputs = self.engine.run(batch, feature_map=True)
        embedding, feature_map = outputs.embedding[0], outputs.feature_map
        if feature_map is None:
            raise EngineError("expected a feature map from the engine, found none")
        findings = self._findings(outputs.scores[0])
        warnings = list(radiograph.warnings)

        hits: list[Hit] = []
        known: list[Entry] = []
        if self.gallery is not None:
            known = self.gallery.find(radiograph.sha256)
            if known:
                ids = ", ".join(entry.id for entry in known)
                warnings.append(f"This image is in the gallery itself (id {ids}).")
            excluded: set[str] = set()
            if exclude_same_patient:
                excluded = {(patient_id or "").strip(), radiograph.patient_id.strip()}
                excluded |= {entry.patient_id for entry in known}
                excluded.discard("")
                warnings += _patient_warnings(self.gallery, excluded)
            hits = self.gallery.search(embedding, k, exclude_patients=excluded)
        query_labels = {f.label for f in findings if f.predicted}
        if known:
            query_labels = {name for entry in known for name in entry.positive}

        return Analysis(
            image=radiograph.name,
            findings=findings,
            neighbours=tuple(_neighbour(hit, query_labels) for hit in hits),
            warnings=tuple(warnings),
            embedding=embedding,
            feature_map=feature_map[0],
            finding_vectors=finding_vectors(self.card, self.engine.head, embedding),
            neighbour_vectors={hit.entry.id: self.gallery.vector(hit.entry.id) for hit in hits}
            if self.gallery is not None
            else {},
        )

    def embed(self, batch: Sequence[Image] | NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embeddings float32 [N, D], unit norm, of a list of images or of preprocessed uint8 [N, 1, S, S].

        Raises UserError for a single image that is not in a list.
        """
        if isinstance(batch, str | bytes | Path):
            raise UserError("expected a list of images, found a single one; put it into a list")
        if not isinstance(batch, np.ndarray):
            size = self.card.preprocess.crop
            images = [_read(self.card.preprocess, self._reduced_for, image) for image in batch]
            batch = np.array(images, np.uint8).reshape(-1, 1, size, size)
        return self.engine.run(batch).embedding

    def embed_many(
        self, images: Iterable[Image], *, workers: int | None = None
    ) -> Iterator[NDArray[np.float32] | ImageError]:
        """For each image, in order: its embedding float32 [D], unit norm, or the ImageError that reading it raised.

        For any number of images: they are taken from the iterable a bounded number ahead, and read by `workers`
        processes (see `cbmir.runtime.bulk.work_through`) while the engine runs. Raises UserError for a single image
        and for a negative number of workers, WorkerError where a worker dies.
        """
        from cbmir.runtime.bulk import work_through  # multiprocessing, which one answer has no use for

        if isinstance(images, str | bytes | Path):
            raise UserError("expected images to iterate over, found a single one; put it into a list")
        read = partial(_read, self.card.preprocess, self._reduced_for)
        return self._embedded(work_through(read, images, workers=workers))

    def _embedded(
        self, results: Generator[NDArray[np.uint8] | ImageError, None, None]
    ) -> Iterator[NDArray[np.float32] | ImageError]:
        with closing(results):
            while batch := list(islice(results, _BATCH)):
                crops = [crop for crop in batch if not isinstance(crop, ImageError)]
                embeddings = iter(self.engine.run(np.stack(crops)[:, None]).embedding if crops else ())
                yield from (result if isinstance(result, ImageError) else next(embeddings) for result in batch)

    def health(self) -> EngineHealth:
        return self.engine.health()

    def close(self) -> None:
        self.engine.close()
        if self.gallery is not None:
            self.gallery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _findings(self, scores: NDArray[np.float32]) -> tuple[Finding, ...]:
        card = self.card
        findings = []
        for label, score, threshold, calibration in zip(
            card.labels.names, scores.tolist(), card.thresholds, card.calibration, strict=True
        ):
            probability = None if calibration is None else calibration.probability(score)
            predicted = None if threshold is None else score > threshold
            findings.append(Finding(label, score, probability, predicted, threshold))
        return tuple(findings)


def _read(spec: PreprocessSpec, reduced_for: PreprocessSpec | None, image: Image) -> NDArray[np.uint8]:
    return preprocess(read_image(image, reduced_for=reduced_for), spec)


def _patient_warnings(gallery: Gallery, excluded: set[str]) -> list[str]:
    """What a reader must know of the patients to leave out. Their ids are not named."""
    if not excluded:
        return [
            "The patient of this image is not known, so neighbours may be images of the same patient; "
            "give the patient's id to leave them out."
        ]
    if not any(gallery.has_patient(patient) for patient in excluded):
        return ["No image of this patient id is in the gallery: nothing was left out."]
    return []


def _neighbour(hit: Hit, query_labels: set[str]) -> Neighbour:
    wanted = {canonical(name) for name in query_labels}
    entry = hit.entry
    return Neighbour(
        id=entry.id,
        image=entry.image,
        patient_id=entry.patient_id,
        distance=hit.distance,
        cosine=hit.cosine,
        labels=entry.positive,
        shared=tuple(name for name in entry.positive if canonical(name) in wanted),
        report=entry.report,
    )
