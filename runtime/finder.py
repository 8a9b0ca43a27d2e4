"""From an image to findings and neighbours: the runtime's front door."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import BALANCED, WITHOUT_FINDINGS, ModelCard
from cbmir.choices import RANKS, Mode, Rank
from cbmir.errors import EngineError, ImageError, UserError
from cbmir.labels import canonical
from cbmir.preprocessing import PreprocessSpec
from cbmir.process import Closing
from cbmir.runtime.engines.base import Engine, EngineHealth, Outputs
from cbmir.runtime.engines.registry import open_engine
from cbmir.runtime.evidence import combination_vector, evidence_map, finding_vectors
from cbmir.runtime.gallery.entry import Entry, Hit, SearchResult
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.protocol import SearchableGallery, open_gallery
from cbmir.runtime.imaging.image_warning import ImageWarning
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.radiograph import ImageLimits, Radiograph
from cbmir.runtime.imaging.reader import read_image
from cbmir.runtime.novelty import NEAREST, Novelty, score_novelty
from cbmir.runtime.results import Analysis, Finding, Neighbour, agreement

if TYPE_CHECKING:
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms

Image = str | Path | bytes | NDArray[np.uint8] | NDArray[np.uint16]
_Read = tuple[NDArray[np.uint8], tuple[ImageWarning, ...]]  # the model's input, and the image's warnings

#: The warning where `Novelty.flagged` is true.
NOTHING_ALIKE = (
    "Nothing in the gallery looks like this image: it may be no chest X-ray, inverted or turned. Its findings and "
    "neighbours are not to be relied on."
)
#: The warning where `Analysis.known` has ids.
IN_GALLERY = "This image is in the gallery itself."
#: The warnings where the same patient's images are to be left out, and the patient is not known or has none.
PATIENT_UNKNOWN = (
    "The patient of this image is not known, so neighbours may be images of the same patient; give the patient's id to "
    "leave them out."
)
PATIENT_NOT_FOUND = "No image of this patient id is in the gallery: nothing was left out."
_BATCH = 32  # images that `embed_many` gives to the engine at once


class Finder(Closing):
    """A model, and a gallery where neighbours are wanted. One finder serves any number of threads.

    Attributes:
        card: The model's, with the thresholds of `operating_point`.
    """

    card: ModelCard

    def __init__(
        self,
        engine: Engine,
        gallery: SearchableGallery | None = None,
        *,
        operating_point: str = BALANCED,
        reduced_jpeg2000: bool = False,
        allow_lateral: bool = False,
    ) -> None:
        """Takes engine and gallery over: `close` closes both.

        Args:
            operating_point: Whose thresholds decide, of those in the model's card: `sensitive`, `balanced`,
                `specific`.
            reduced_jpeg2000: Decode large JPEG 2000 images at a lower resolution (`read_image`, `reduced_for`).
            allow_lateral: Accept DICOM files of lateral views, with a warning.

        Raises:
            UserError: The card has no such operating point.
            GalleryError: The gallery is of another model.
        """
        self.card, self.operating_point = engine.card.at(operating_point), operating_point
        if gallery is not None:
            gallery.check_model(engine.card)
        self.engine = engine
        self.gallery = gallery
        self._read = partial(
            read_image,
            intensity=engine.card.preprocess.intensity,
            allow_lateral=allow_lateral,
            reduced_for=engine.card.preprocess if reduced_jpeg2000 else None,
        )

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
        operating_point: str = BALANCED,
        reduced_jpeg2000: bool = False,
        allow_lateral: bool = False,
        pseudonyms: Pseudonyms | None = None,
    ) -> Self:
        """Open a model and a gallery. The other arguments are those of `open_engine`, `Finder` and `Gallery.open`.

        Args:
            gallery: Its folder, or a `milvus:` place (`open_gallery`).

        Raises:
            ModelError, EngineError: As `open_engine`.
            UserError: As `Finder`.
            GalleryError: The gallery cannot be opened, or is of another model.
        """
        loaded = open_engine(
            model, engine=engine, threads=threads, mode=mode, cache=cache, allow_fallback=allow_fallback
        )
        opened = None
        try:
            opened = None if gallery is None else open_gallery(gallery, pseudonyms=pseudonyms)
            return cls(
                loaded, opened, operating_point=operating_point, reduced_jpeg2000=reduced_jpeg2000,
                allow_lateral=allow_lateral,
            )  # fmt: skip
        except BaseException:
            loaded.close()
            if opened is not None:
                opened.close()
            raise

    def read(self, image: Image, *, limits: ImageLimits | None = None) -> Radiograph:
        """Read an image by the intensity policy of this finder's model (`read_image`).

        Raises:
            ImageError: It is no image that can be read within the limits.
        """
        return self._read(image, limits=limits, threads=self.engine.threads)

    def analyze(
        self,
        image: Image | Radiograph,
        k: int = 10,
        *,
        patient_id: str | None = None,
        exclude_same_patient: bool = True,
        filter: Filter = Filter(),  # noqa: B008 - it never changes
        exact: bool | None = None,
        rank: Rank = "nearness",
    ) -> Analysis:
        """Findings and the k first neighbours of one image.

        The same patient's images are left out of the neighbours: those of `patient_id`, of the patients of the
        gallery's entries made from the same file, and of the DICOM file's patient. A warning says where none of these
        is known, or none is in the gallery, and where nothing in the gallery looks like the image.

        Args:
            patient_id: The id of the image's patient, as it was given to the gallery.
            filter: As `Gallery.search` has it, and so `exact`.
            rank: `nearness`: what looks alike comes first. `findings` answers another question: first come those whose
                known labels agree most with the image's probabilities (`Gallery.search_by_agreement`), of all entries.

        Raises:
            ImageError: The image cannot be read.
            UserError: An unknown `rank`, or `findings` where no label of the gallery has a probability.
            GalleryError: As `Gallery.search` and `search_by_agreement`.
        """
        if rank not in RANKS:
            raise UserError(f"expected a rank among {', '.join(RANKS)}; found {rank!r}")
        radiograph = image if isinstance(image, Radiograph) else self.read(image)
        outputs, feature_map = self._run(radiograph)
        embedding, findings = outputs.embedding[0], self._findings(outputs.scores[0])
        warnings: list[str] = [*radiograph.warnings, *(() if self.card.has_findings else (WITHOUT_FINDINGS,))]
        known: tuple[Entry, ...] = ()
        hits: tuple[Hit, ...] = ()
        vectors: dict[str, NDArray[np.float32]] = {}
        novelty = None
        if self.gallery is not None:
            known, patients, notes = _known_of(self.gallery, radiograph, patient_id or "", exclude_same_patient)
            warnings += notes
            if exclude_same_patient:
                filter = replace(filter, exclude_patients=filter.exclude_patients | patients)
            expected = _expected(self.gallery, findings) if rank == "findings" else None
            found, novelty = _search(self.gallery, embedding, k, filter, exact, known, patients, expected)
            hits = found.hits
            vectors = {hit.entry.id: vector for hit, vector in zip(hits, found.vectors, strict=False)}
            if novelty is not None and novelty.flagged:
                warnings.insert(sum(warning in SENTENCES.values() for warning in warnings), NOTHING_ALIKE)
        predicted = {finding.label for finding in findings if finding.predicted}
        query_labels = {name for entry in known for name in entry.positive} if known else predicted
        names = {canonical(name) for name in query_labels}

        return Analysis(
            image=radiograph.name,
            findings=findings,
            neighbours=tuple(neighbour_of(hit, names) for hit in hits),
            warnings=tuple(warnings),
            embedding=embedding,
            feature_map=feature_map,
            finding_vectors=finding_vectors(self.card, self.engine.head, embedding),
            neighbour_vectors=vectors,
            # Neighbours that were chosen to agree with the findings say nothing about them.
            agreement=()
            if self.gallery is None or rank == "findings"
            else agreement(hits, self.gallery.labels.names, self.card.sigma),
            novelty=novelty,
            query_labels=tuple(sorted(query_labels)),
            known=tuple(entry.id for entry in known),
            operating_point=self.operating_point,
            rank=rank,
        )

    def search_by_findings(
        self, labels: Sequence[str], k: int = 10, *, filter: Filter = Filter(),  # noqa: B008
    ) -> tuple[Neighbour, ...]:  # fmt: skip
        """A query without an image: the k entries nearest to a combination of findings (`combination_vector`).

        Returns:
            Neighbours, nearest first; `shared` holds those of `labels` that each has.

        Raises:
            UserError: No gallery, a model without findings, no label, one given twice, or labels that cancel out.
            ManifestError: The model does not have a label.
            GalleryError: As `Gallery.search`.
        """
        if self.gallery is None:
            raise UserError("expected a gallery to search, found none: open the finder with one")
        vector = combination_vector(self.card, self.engine.head, labels)
        wanted = {canonical(label) for label in labels}
        return tuple(neighbour_of(hit, wanted) for hit in self.gallery.search(vector, k, filter=filter).hits)

    def evidence_towards(self, image: Image | Radiograph, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Each cell's share in the cosine between an image and a vector [D], as of another image: float32 [h, w]."""
        return evidence_map(self._run(image if isinstance(image, Radiograph) else self.read(image))[1], vector)

    def embed(self, batch: Sequence[Image] | NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embeddings float32 [N, D], unit norm, of a list of images or of preprocessed uint8 [N, 1, S, S]."""
        if isinstance(batch, str | bytes | Path):
            raise UserError("expected a list of images, found a single one; put it into a list")
        if not isinstance(batch, np.ndarray):
            spec = self.card.preprocess
            images = [preprocess(self._read(image), spec) for image in batch]
            batch = np.array(images, np.uint8).reshape(-1, 1, spec.crop, spec.crop)
        return self.engine.run(batch).embedding

    def embed_many(
        self, images: Iterable[Image], *, workers: int | None = None,
        warned: Callable[[int, tuple[ImageWarning, ...]], None] = lambda at, warnings: None,
    ) -> Iterator[NDArray[np.float32] | ImageError]:  # fmt: skip
        """Embed any number of images. A bounded number is taken ahead, and read while the engine runs.

        Args:
            workers: Processes that read images; None takes as many as there are processors, or 0 for a few images.
            warned: Is called with the place of each image that was read with warnings, and these.

        Returns:
            For each image, in order, its embedding float32 [D] of unit norm, or the ImageError that reading it raised.

        Raises:
            UserError: The number of workers is negative.
            WorkerError: A worker died.
        """
        from cbmir.runtime.imaging.workers import work_through  # multiprocessing, which one answer has no use for

        if isinstance(images, str | bytes | Path):
            raise UserError("expected images to iterate over, found a single one; put it into a list")
        read = partial(_preprocessed, self.card.preprocess, self._read)
        return self._embedded(_crops(work_through(read, images, workers=workers), warned))

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

    def _run(self, radiograph: Radiograph) -> tuple[Outputs, NDArray[np.float32]]:
        """The engine's outputs for one image, and its feature map [D, h, w]."""
        batch = preprocess(radiograph, self.card.preprocess, threads=self.engine.threads)[None, None]
        outputs = self.engine.run(batch, feature_map=True)
        if outputs.feature_map is None:
            raise EngineError("expected a feature map from the engine, found none")
        return outputs, outputs.feature_map[0]

    def _findings(self, scores: NDArray[np.float32]) -> tuple[Finding, ...]:
        card, findings = self.card, []
        columns = card.labels.names, scores.tolist(), card.thresholds, card.calibration
        for label, score, threshold, calibration in zip(*columns, strict=True):
            probability = None if calibration is None else calibration.probability(score)
            predicted = None if threshold is None else score > threshold
            findings.append(Finding(label, score, probability, predicted, threshold))
        return tuple(findings)


def _preprocessed(spec: PreprocessSpec, read: Callable[[Image], Radiograph], image: Image) -> _Read:
    radiograph = read(image)
    return preprocess(radiograph, spec), radiograph.warnings


def _crops(
    results: Generator[_Read | ImageError, None, None], warned: Callable[[int, tuple[ImageWarning, ...]], None]
) -> Generator[NDArray[np.uint8] | ImageError, None, None]:
    with closing(results):
        for at, result in enumerate(results):
            if not isinstance(result, ImageError) and result[1]:
                warned(at, result[1])
            yield result if isinstance(result, ImageError) else result[0]


def _known_of(
    gallery: SearchableGallery, image: Radiograph, patient_id: str, exclude: bool
) -> tuple[tuple[Entry, ...], frozenset[str], list[str]]:
    """The gallery's entries made from the same file, the patients that the image may be of, and warnings."""
    known = tuple(gallery.find(image.sha256))
    warnings = [IN_GALLERY] if known else []
    of_file = image.patient_id.strip()
    patients = {patient_id.strip(), *(entry.patient_id for entry in known)}
    patients = (patients | {of_file} if gallery.finds_patients else patients) - {""}
    if exclude and not patients and of_file:
        warnings.append("The gallery keeps pseudonyms of its patients and was opened without their key, so neighbours "
                        "may be images of this file's patient.")  # fmt: skip
    elif exclude and not patients:
        warnings.append(PATIENT_UNKNOWN)
    elif exclude and not any(gallery.has_patient(patient) for patient in patients):
        warnings.append(PATIENT_NOT_FOUND)
    return known, frozenset(patients), warnings


def _search(
    gallery: SearchableGallery,
    embedding: NDArray[np.float32],
    k: int,
    wanted: Filter,
    exact: bool | None,
    known: tuple[Entry, ...],
    patients: frozenset[str],
    expected: Mapping[str, float] | None,
) -> tuple[SearchResult, Novelty | None]:
    """The k neighbours, nearest first or by the `expected` probabilities, and how unusual the image is among the
    gallery's images but itself and its own patient's."""
    reference, others, found = gallery.reference_distances, Filter(exclude_patients=patients), None
    if expected is not None:
        found = gallery.search_by_agreement(embedding, expected, k, filter=wanted)
        wanted, k = others, 0  # what is searched below is for novelty alone
    if not len(reference):
        return found or gallery.search(embedding, k, filter=wanted, exact=exact), None
    filters = [wanted] if wanted == others else [wanted, others]
    itself = sum(not entry.patient_id for entry in known)  # no filter leaves these out; they are the nearest
    queries = np.stack([embedding] * len(filters))
    many = gallery.search_many(queries, k, filters=filters, exact=exact, vectors=NEAREST + itself)  # of one moment
    return found or many[0], score_novelty(embedding, many[-1].vectors[itself:], reference)


def _expected(gallery: SearchableGallery, findings: Iterable[Finding]) -> dict[str, float]:
    """Probabilities by the gallery's names of the labels, without those that the model or the gallery lacks."""
    known = {canonical(f.label): f.probability for f in findings if f.probability is not None}
    expected = {name: known[canonical(name)] for name in gallery.labels.names if canonical(name) in known}
    if not expected:
        raise UserError("expected a calibrated probability for a label of the gallery to rank by findings, found none; "
                        "rank by nearness")  # fmt: skip
    return expected


def neighbour_of(hit: Hit, wanted: set[str]) -> Neighbour:
    """A hit as an answer shows it. `wanted`: canonical names of the labels that the query has."""
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
        uncertain=tuple(name for name in entry.positive if (entry.labels or {})[name] == -1),
        boxes=entry.boxes,
    )
