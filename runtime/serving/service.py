"""Answers to requests: analyse, search, embed. Each comes from one finder, even during a reload.

Other patients' images appear under case ids, and `Settings.share` says what else is shown of them.
"""

from __future__ import annotations

import math
import threading
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbmir import __version__
from cbmir.errors import GalleryError, ImageError, MissingDependencyError, UserError
from cbmir.labels import canonical
from cbmir.runtime import dicom_output
from cbmir.runtime.dicom_output import Results
from cbmir.runtime.evidence import combination_vector, parse_region
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.filters import Filter, parse
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.imaging.dicom_reader import is_dicom
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.neighbours import PATIENT_NOT_FOUND, PATIENT_UNKNOWN, neighbour_of
from cbmir.runtime.results import Analysis, Neighbour, Refinement
from cbmir.runtime.serving import schemas
from cbmir.runtime.serving.problems import Problem
from cbmir.runtime.serving.settings import Settings

if TYPE_CHECKING:
    from pydicom import Dataset

Facts = dict[str, Any]


def gallery_state(gallery: SearchableGallery) -> dict[str, int | None]:
    """Return a gallery's `images` and `generation` (None on Milvus), which are cheap to read. Raises GalleryError."""
    if not isinstance(gallery, Gallery):
        return {"images": len(gallery), "generation": None}
    with gallery.reading() as reader:
        return {"images": reader.count, "generation": reader.generation}


class FinderService:
    """The service. Each method answers one request and adds `facts` for the audit trail. Raises Problem, CbmirError."""

    def __init__(self, live: ReloadableFinder, settings: Settings) -> None:
        self.live, self._settings = live, settings
        self._reloading = threading.Lock()

    def analyze(
        self, data: bytes, patient_id: str, options: schemas.AnalyzeOptions, facts: Facts
    ) -> schemas.AnalyzeAnswer:
        kinds = [kind for kind in options.results.replace(" ", "").split(",") if kind]
        _check_kinds(kinds, data)
        with self.live.use() as finder:
            _tell(facts, finder)
            wanted = Filter() if finder.gallery is None else _filter(options, finder.gallery)
            if kinds and (options.rank != "nearness" or options.region or wanted != Filter()):
                raise Problem(422, "results", "Expected rank=nearness, no region and no filter with results, which "
                                              "show the images that are most similar.")  # fmt: skip
            _check_patient(finder.gallery, patient_id)
            image = finder.read(data)
            facts["sha256"] = image.sha256
            analysis = finder.analyze(
                image, options.k, patient_id=patient_id, filter=wanted, exact=options.exact or None,
                exclude_same_patient=not options.include_same_patient, rank=options.rank,
                region=parse_region(options.region) if options.region else None,
            )  # fmt: skip
            made = _results(data, analysis, finder, kinds, image) if kinds else None
            known = [] if finder.gallery is None else [finder.gallery.case_id(one) for one in analysis.known]
            neighbours = self._cases(finder.gallery, analysis.neighbours)
            facts["cases"] = known + [case.id for case in neighbours]
            return schemas.AnalyzeAnswer(
                model=model_of(finder), known=known, operating_point=analysis.operating_point,
                findings=list(analysis.findings), rank=analysis.rank, region=analysis.region,
                neighbours=neighbours,
                agreement=list(analysis.agreement), novelty=analysis.novelty,
                warnings=list(analysis.warnings if made is None else made.warnings),
                results=None if made is None else _encoded(made, kinds),
            )  # fmt: skip

    def embed(self, data: bytes, options: schemas.EmbedOptions, facts: Facts) -> schemas.EmbedAnswer:
        with self.live.use() as finder:
            _tell(facts, finder)
            region = parse_region(options.region) if options.region else None
            vector = finder.embed([data])[0] if region is None else finder.embed_region(data, region)
            return schemas.EmbedAnswer(model=model_of(finder), embedding=vector.tolist())

    def search(self, search: schemas.Search, facts: Facts) -> schemas.SearchAnswer:
        """Find the neighbours of an embedding, or of a case without itself; with a `Refine`, refine the search."""
        with self.live.use() as finder:
            _tell(facts, finder)
            gallery = _gallery(finder)
            _check_patient(gallery, search.patient_id)
            wanted = _filter(search, gallery)
            excluded, itself, warnings = {search.patient_id.strip()}, None, [*finder.card.notes]
            if search.case is not None:
                itself = _entry(gallery, search.case)
                vector = gallery.vector(itself.id)
                excluded.add(itself.patient_id)
            else:
                vector = _vector(search.embedding or [], finder.card.embedding_dim)
            if isinstance(search, schemas.Refine):
                vector = _refined(finder, gallery, search, vector)
            if not search.include_same_patient:
                patients = frozenset(excluded - {""})
                wanted = replace(wanted, exclude_patients=patients)
                if not patients:
                    warnings.append(PATIENT_UNKNOWN)
                elif not any(gallery.has_patient(patient) for patient in patients):
                    warnings.append(PATIENT_NOT_FOUND)
            found = gallery.search(vector, search.k + (itself is not None), filter=wanted, exact=search.exact or None)
            hits = [hit for hit in found.hits if itself is None or hit.entry.id != itself.id][: search.k]
            labels = set() if itself is None else {canonical(name) for name in itself.positive}
            neighbours = self._cases(gallery, [neighbour_of(hit, labels) for hit in hits])
            facts["cases"] = [case.id for case in neighbours]
            return schemas.SearchAnswer(model=model_of(finder), neighbours=neighbours, warnings=warnings)

    def thumbnail(self, case: str, facts: Facts) -> bytes:
        if "thumbnails" not in self._settings.share:
            raise Problem(403, "not-shared", "This service does not show images of its gallery; its owner may allow it "
                                             "with: --share thumbnails")  # fmt: skip
        with self.live.use() as finder:
            _tell(facts, finder)
            gallery = _gallery(finder)
            image = gallery.thumbnail(_entry(gallery, case).id)
            facts["cases"] = [case]
        if image is None:
            raise Problem(404, "no-thumbnail", "The gallery keeps no thumbnail of this case.")
        return image

    def about(self) -> schemas.About:
        with self.live.use() as finder:
            card = finder.card
            return schemas.About(
                model=model_of(finder), labels=list(card.labels.names), operating_point=finder.operating_point,
                thresholds=list(card.thresholds), embedding_dim=card.embedding_dim,
                gallery=None if finder.gallery is None else gallery_state(finder.gallery),
                shared=sorted(self._settings.share), max_upload_bytes=self._settings.max_upload_bytes,
            )  # fmt: skip

    def check_ready(self) -> None:
        """Raise CbmirError if a request could not be answered."""
        with self.live.use() as finder:
            if finder.gallery is not None:
                gallery_state(finder.gallery)

    def reload(self) -> schemas.Reloaded:
        """Open model and gallery again. Raises Problem 409 if that fails (the old ones stay) or is in progress."""
        if not self._reloading.acquire(blocking=False):
            raise Problem(409, "reloading", "A reload is in progress; try again when it has finished.", retry_after=5)
        try:
            self.live.reload()
        except (UserError, OSError) as error:
            raise Problem(409, "reload", f"Reloading failed; the old model and gallery stay in use. {error}") from error
        finally:
            self._reloading.release()
        with self.live.use() as finder:
            return schemas.Reloaded(model=model_of(finder), generation=self.live.generation)

    def _cases(self, gallery: SearchableGallery | None, neighbours: Sequence[Neighbour]) -> list[schemas.Case]:
        return [] if gallery is None else [
            schemas.Case(
                id=gallery.case_id(one.id), distance=one.distance, cosine=one.cosine, labels=list(one.labels),
                shared=list(one.shared), uncertain=list(one.uncertain),
                report=one.report if "reports" in self._settings.share else None,
                place=one.place, boxes=list(one.boxes) if "thumbnails" in self._settings.share else None,
            )
            for one in neighbours
        ]  # fmt: skip


def _entry(gallery: SearchableGallery, case: str) -> Entry:
    found = gallery.find_case(case)
    if found is None:
        raise Problem(404, "no-case", "The gallery does not have this case, or no longer has it; search again.")
    return found


def model_of(finder: Finder) -> schemas.Model:
    card, health = finder.card, finder.health()
    return schemas.Model(
        fingerprint=card.fingerprint, weights=card.weights, encoder=card.encoder, engine=health.engine,
        device=health.device, precision=health.precision, version=__version__,
    )  # fmt: skip


def _tell(facts: Facts, finder: Finder) -> None:
    facts["model"] = finder.card.fingerprint
    if finder.gallery is not None:
        is_counted = isinstance(finder.gallery, Gallery)  # Milvus has none, and would need a request
        facts["gallery_generation"] = gallery_state(finder.gallery)["generation"] if is_counted else None


def _gallery(finder: Finder) -> SearchableGallery:
    if finder.gallery is None:
        raise Problem(404, "no-gallery", "This service has no gallery: only findings and embeddings can be requested.")
    return finder.gallery


def _filter(asked: schemas.Neighbours, gallery: SearchableGallery) -> Filter:
    """Make the filter. It is checked here, where an error is known to be the client's."""
    try:
        made = Filter(where=asked.where, view=asked.view, source=asked.source, since=asked.since, until=asked.until)
        if made.where:
            parse(made.where, gallery.labels)
    except GalleryError as error:
        raise Problem(422, "filter", str(error)) from error
    return made


def _check_patient(gallery: SearchableGallery | None, patient_id: str) -> None:
    if patient_id.strip() and gallery is not None and not gallery.finds_patients:
        raise Problem(422, "pseudonyms", "Expected no patient id, found one: the gallery keeps pseudonyms, and this "
                                         "service was started without their key.")  # fmt: skip


def _vector(embedding: list[float], dim: int) -> NDArray[np.float32]:
    norm = math.hypot(*embedding)  # NumPy's norm overflows
    if len(embedding) != dim or not abs(norm - 1) <= 1e-3:  # it may have been rounded as text
        raise Problem(422, "embedding", f"Expected {dim} numbers of norm 1, found {len(embedding)} of norm {norm:.4g}; "
                                        f"/v1/embed makes them.")  # fmt: skip
    return (np.array(embedding) / norm).astype(np.float32)


def _refined(
    finder: Finder, gallery: SearchableGallery, search: schemas.Refine, vector: NDArray[np.float32]
) -> NDArray[np.float32]:
    refinement = Refinement(tuple(search.alike), tuple(search.unlike), search.findings)
    alike, unlike = ([gallery.vector(_entry(gallery, one).id) for one in of] for of in (search.alike, search.unlike))
    directions = {name: combination_vector(finder.card, finder.engine.head, [name]) for name in search.findings}
    return refinement.vector(vector, alike, unlike, directions)


def _check_kinds(kinds: list[str], data: bytes) -> None:
    if unknown := sorted(set(kinds) - set(dicom_output.KINDS)):
        wanted = ", ".join(dicom_output.KINDS)
        raise Problem(422, "results", f"Expected results among {wanted}; found {', '.join(unknown)}")
    if kinds and not is_dicom(data):
        raise Problem(422, "results", "Expected a DICOM file to make results from, found another image.")


def _results(data: bytes, analysis: Analysis, finder: Finder, kinds: list[str], image: Radiograph) -> Results:
    try:
        return dicom_output.make_results(data, analysis, finder, kinds=kinds, image=image)
    except ImageError as error:  # the image itself could be analysed
        raise Problem(422, "results", str(error)) from error
    except MissingDependencyError as error:
        raise Problem(501, "no-results", str(error)) from error
    except ImportError as error:
        raise Problem(501, "no-results", "Expected the extra dicom, which makes results; found that it cannot be "
                                         "loaded: reinstall it.") from error  # fmt: skip


def _encoded(results: Results, kinds: list[str]) -> dict[str, Any]:
    """Encode results by kind for JSON: DICOM objects as files in base64; null for a missing one (no priors, no KOS)."""
    encoded = {kind: getattr(results, kind) for kind in kinds}
    for kind in encoded.keys() - {"fhir"}:
        encoded[kind] = None if encoded[kind] is None else _file(encoded[kind])
    if "kos" in encoded:
        encoded["kos_copies"] = [_file(one) for one in results.kos_copies]
    return encoded


def _file(made: Dataset) -> str:
    stream = BytesIO()
    made.save_as(stream, enforce_file_format=True)
    return b64encode(stream.getvalue()).decode("ascii")
