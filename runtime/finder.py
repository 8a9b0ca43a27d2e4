"""The runtime's main entry point, from an image to findings and neighbours."""

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

from cbmir.card import BALANCED, ModelCard
from cbmir.choices import RANKS, Mode, Rank
from cbmir.errors import EngineError, ImageError, UserError
from cbmir.labels import canonical
from cbmir.preprocessing import PreprocessSpec
from cbmir.process import Closing
from cbmir.runtime.engines.base import Engine, EngineHealth, Outputs
from cbmir.runtime.engines.registry import open_engine
from cbmir.runtime.evidence import Region, RegionCells, combination_vector, evidence_map, finding_vectors
from cbmir.runtime.gallery.entry import SearchResult
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.protocol import SearchableGallery, open_gallery
from cbmir.runtime.imaging.image_warning import ImageWarning
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.radiograph import ImageLimits, Radiograph
from cbmir.runtime.imaging.reader import read_image
from cbmir.runtime.neighbours import NOTHING_ALIKE, Query, expected_labels, known_of, neighbour_of
from cbmir.runtime.results import Analysis, Finding, Neighbour, Refinement, agreement

if TYPE_CHECKING:
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms

Image = str | Path | bytes | NDArray[np.uint8] | NDArray[np.uint16]
ReadImage = Callable[..., Radiograph]  # with the parameters of `read_image`
_Read = tuple[NDArray[np.uint8], tuple[ImageWarning, ...]]  # the model's input, and the image's warnings

_BATCH = 32  # images per batch in `embed_many`


class Finder(Closing):
    """A model, and a gallery if you want neighbours. One finder serves any number of threads.

    Attributes:
        card: The model's card, with the thresholds of `operating_point`.
    """

    card: ModelCard

    def __init__(
        self, engine: Engine, gallery: SearchableGallery | None = None, *, operating_point: str = BALANCED,
        reduced_jpeg2000: bool = False, allow_lateral: bool = False, read: ReadImage | None = None,
    ) -> None:  # fmt: skip
        """The finder owns the engine and the gallery: `close` closes both.

        Args:
            operating_point: The operating point in the model's card whose thresholds apply: `sensitive`, `balanced`,
                `specific`.
            reduced_jpeg2000: Decode large JPEG 2000 images at a lower resolution (`read_image`, `reduced_for`).
            allow_lateral: Accept DICOM files of lateral views, with a warning.
            read: The function that reads images, by default `read_image`; use `DecoderPool.read` for untrusted files.

        Raises:
            UserError: The card has no such operating point.
            GalleryError: The gallery belongs to another model.
        """
        self.card, self.operating_point = engine.card.at(operating_point), operating_point
        if gallery is not None:
            gallery.check_model(engine.card)
        self.engine = engine
        self.gallery = gallery
        self._read = partial(
            read or read_image, intensity=engine.card.preprocess.intensity, allow_lateral=allow_lateral,
            reduced_for=engine.card.preprocess if reduced_jpeg2000 else None,
        )  # fmt: skip

    @classmethod
    def open(
        cls, model: str | Path, gallery: str | Path | None = None, *, engine: str = "auto", threads: int | None = None,
        mode: Mode = "auto", cache: str | Path | None = None, allow_fallback: bool = False,
        operating_point: str = BALANCED, reduced_jpeg2000: bool = False, allow_lateral: bool = False,
        pseudonyms: Pseudonyms | None = None, read: ReadImage | None = None,
    ) -> Self:  # fmt: skip
        """Open a model and a gallery. The other arguments are those of `open_engine`, `Finder` and `Gallery.open`.

        Args:
            gallery: The gallery's folder, or a `milvus:` address (`open_gallery`).

        Raises:
            ModelError, EngineError: As `open_engine`.
            UserError: As `Finder`.
            GalleryError: The gallery cannot be opened, or belongs to another model.
        """
        loaded = open_engine(
            model, engine=engine, threads=threads, mode=mode, cache=cache, allow_fallback=allow_fallback
        )
        opened = None
        try:
            opened = None if gallery is None else open_gallery(gallery, pseudonyms=pseudonyms)
            return cls(
                loaded, opened, operating_point=operating_point, reduced_jpeg2000=reduced_jpeg2000,
                allow_lateral=allow_lateral, read=read,
            )  # fmt: skip
        except BaseException:
            loaded.close()
            if opened is not None:
                opened.close()
            raise

    def read(self, image: Image, *, limits: ImageLimits | None = None) -> Radiograph:
        """Read an image with the intensity policy of this finder's model. Arguments are as in `read_image`.

        Raises:
            ImageError: The image cannot be read within the limits.
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
        region: Region | None = None,
    ) -> Analysis:
        """Return the findings and the first k neighbours of one image.

        Images of the same patient are left out of the neighbours. The patient is known from `patient_id`, from gallery
        entries made from the same file, and from the DICOM file. A warning says if the patient is not known or not in
        the gallery, and if nothing in the gallery looks like the image.

        Args:
            patient_id: The id of the image's patient, as it was given to the gallery.
            filter: As in `Gallery.search`; so is `exact`.
            rank: `nearness`: the most similar entries come first. `findings`: the entries, out of all, whose known
                labels agree most with the image's probabilities come first (`Gallery.search_by_agreement`).
            region: Search with only this part of the image: (x0, y0, x1, y1) as fractions of its width and height,
                from the upper left corner. Neighbours are those nearest to the unit mean of its cells (`RegionCells`).
                Findings, novelty and warnings are still those of the whole image.

        Raises:
            ImageError: The image cannot be read.
            UserError: An unknown `rank`; `findings` with a region, or if no label of the gallery has a probability; a
                region that `RegionCells` refuses.
            GalleryError: As `Gallery.search` and `search_by_agreement`.
        """
        if rank not in RANKS:
            raise UserError(f"expected a rank among {', '.join(RANKS)}; found {rank!r}")
        if region is not None and rank == "findings":
            raise UserError("expected rank nearness with a region, found findings, which are those of the whole image")
        radiograph = image if isinstance(image, Radiograph) else self.read(image)
        outputs, feature_map = self._run(radiograph)
        embedding, findings = outputs.embedding[0], self._findings(outputs.scores[0])
        cells = None if region is None else RegionCells.of(region, feature_map.shape[1:], self.card.preprocess)
        vector = embedding if cells is None else cells.vector(feature_map)
        predicted = {finding.label for finding in findings if finding.predicted}
        warnings: list[str] = [*self.card.notes, *radiograph.warnings]
        analysis = Analysis(
            image=radiograph.name,
            findings=findings,
            neighbours=(),
            warnings=tuple(warnings),
            embedding=embedding,
            feature_map=feature_map,
            finding_vectors=finding_vectors(self.card, self.engine.head, embedding),
            neighbour_vectors={},
            query=vector,
            query_labels=tuple(sorted(predicted)),
            operating_point=self.operating_point,
            rank=rank,
            region=region,
        )
        if self.gallery is None:
            return analysis
        known, patients, notes = known_of(self.gallery, radiograph, patient_id or "", exclude_same_patient)
        if exclude_same_patient:
            filter = replace(filter, exclude_patients=filter.exclude_patients | patients)
        expected = expected_labels(self.gallery, findings) if rank == "findings" else None
        query = Query(vector, k, filter, exact, expected, cells)
        found, novelty = query.search_with_novelty(self.gallery, embedding, known, patients)
        warnings += notes
        if novelty is not None and novelty.flagged:
            first = (*self.card.notes, *SENTENCES.values())
            warnings.insert(sum(warning in first for warning in warnings), NOTHING_ALIKE)
        if known:
            analysis = replace(analysis, query_labels=tuple(sorted({name for one in known for name in one.positive})))
        analysis = replace(
            analysis, warnings=tuple(warnings), novelty=novelty, known=tuple(entry.id for entry in known),
            patients=patients,
        )  # fmt: skip
        return self._with_neighbours(analysis, self.gallery, found, by_labels=rank == "findings" or filter.where != "")

    def refine(
        self,
        analysis: Analysis,
        *,
        alike: Sequence[str] = (),
        unlike: Sequence[str] = (),
        findings: Mapping[str, float] = {},
        k: int = 10,
        filter: Filter = Filter(),  # noqa: B008
        exclude_same_patient: bool = True,
        exact: bool | None = None,
    ) -> Analysis:
        """Search again, nearer to images that a person marked as similar (`Refinement.vector`).

        It starts from the given analysis: to undo a step, continue from an earlier one.

        Args:
            alike: Ids of gallery images that are similar to the query. They need not be neighbours.
            unlike: Ids of gallery images that are not similar to it.
            findings: How far to move towards a finding, from -1 (away from it) to 1.
            k: How many neighbours; `filter`, `exclude_same_patient` and `exact` are as in `analyze`.

        Returns:
            A copy with `neighbours`, `agreement`, `query` and `refinement` replaced.

        Raises:
            UserError: No gallery, nothing to refine by, a weight outside [-1, 1], an id that is both alike and unlike,
                or a sum that cancels out.
            ManifestError: The model does not have one of the findings.
            GalleryError: An id is not in the gallery, or as `Gallery.search`.
        """
        gallery = self._searched()
        refinement = Refinement(tuple(alike), tuple(unlike), dict(findings))
        vector = refinement.vector(
            analysis.query,
            [gallery.vector(id) for id in alike],
            [gallery.vector(id) for id in unlike],
            {name: combination_vector(self.card, self.engine.head, [name]) for name in findings},
        )
        if exclude_same_patient:
            filter = replace(filter, exclude_patients=filter.exclude_patients | analysis.patients)
        steered = analysis.is_steered or bool(findings)
        refined = replace(analysis, query=vector, refinement=refinement, rank="nearness", is_steered=steered)
        cells, region = None, analysis.region
        if region is not None:
            cells = RegionCells.of(region, analysis.feature_map.shape[1:], self.card.preprocess)
        found = Query(vector, k, filter, exact, cells=cells).search(gallery)
        return self._with_neighbours(refined, gallery, found, by_labels=steered or bool(filter.where))

    def search_by_findings(
        self, labels: Sequence[str], k: int = 10, *, filter: Filter = Filter(),  # noqa: B008
    ) -> tuple[Neighbour, ...]:  # fmt: skip
        """Search without an image for the k entries nearest to a combination of findings (`combination_vector`).

        Returns:
            Neighbours, nearest first; a neighbour's `shared` are the `labels` that it has.

        Raises:
            UserError: No gallery, a model without findings, no label, a repeated label, or labels that cancel out.
            ManifestError: The model does not have one of the labels.
            GalleryError: As `Gallery.search`.
        """
        gallery = self._searched()
        vector = combination_vector(self.card, self.engine.head, labels)
        wanted = {canonical(label) for label in labels}
        return tuple(neighbour_of(hit, wanted) for hit in gallery.search(vector, k, filter=filter).hits)

    def evidence_towards(self, image: Image | Radiograph, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return each cell's share in the cosine between an image and a unit vector float32 [D], such as another
        image's embedding: float32 [h, w], which sums to the cosine. Raises ImageError if the image cannot be read."""
        return evidence_map(self._run(image if isinstance(image, Radiograph) else self.read(image))[1], vector)

    def embed_region(self, image: Image | Radiograph, region: Region) -> NDArray[np.float32]:
        """Return the unit vector float32 [D] that `analyze` searches for with this region. Raises ImageError, and
        UserError for a region that `RegionCells` refuses."""
        feature_map = self._run(image if isinstance(image, Radiograph) else self.read(image))[1]
        return RegionCells.of(region, feature_map.shape[1:], self.card.preprocess).vector(feature_map)

    def embed(self, batch: Sequence[Image] | NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embed a list of images, or preprocessed ones uint8 [N, 1, S, S]. Returns float32 [N, D], unit norm."""
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
        """Embed any number of images. A limited number is read ahead while the engine runs.

        Args:
            workers: Processes that read images; None means one per processor, or 0 for a few images.
            warned: Called with the position of each image that was read with warnings, and the warnings.

        Returns:
            For each image, in order, its embedding float32 [D], unit norm, or the ImageError raised when reading it.

        Raises:
            UserError: The number of workers is negative.
            WorkerError: A worker died.
        """
        from cbmir.runtime.imaging.workers import work_through  # imported here: it loads multiprocessing

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
        """Return the engine's state: library, device, precision, threads, and warnings since it was opened."""
        return self.engine.health()

    def close(self) -> None:
        self.engine.close()
        if self.gallery is not None:
            self.gallery.close()

    def _searched(self) -> SearchableGallery:
        if self.gallery is None:
            raise UserError("expected a gallery to search, found none: open the finder with one")
        return self.gallery

    def _with_neighbours(
        self, analysis: Analysis, gallery: SearchableGallery, found: SearchResult, *, by_labels: bool
    ) -> Analysis:
        names = {canonical(name) for name in analysis.query_labels}
        counted = () if by_labels else found.hits  # neighbours chosen by labels say nothing about labels
        return replace(
            analysis,
            neighbours=tuple(neighbour_of(hit, names) for hit in found.hits),
            neighbour_vectors={hit.entry.id: one for hit, one in zip(found.hits, found.vectors, strict=False)},
            agreement=agreement(counted, gallery.label_shares, self.card.sigma) if counted else (),
        )

    def _run(self, radiograph: Radiograph) -> tuple[Outputs, NDArray[np.float32]]:
        """Return the engine's outputs for one image, and its feature map [D, h, w]."""
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
