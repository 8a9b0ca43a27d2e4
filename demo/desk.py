"""The actions of the page and its endpoints: open images, search, and add each answer to the session as a step."""

from __future__ import annotations

import io
import weakref
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import OF_PHANTOMS
from cbmir.demo.controls import Controls, ControlsError
from cbmir.demo.examples import Example
from cbmir.demo.feedback import Feedback
from cbmir.demo.page.alerts import NOT_A_PHANTOM
from cbmir.demo.page.viewer import about_image
from cbmir.demo.report import report_html
from cbmir.demo.sessions import Session, Step, Wish
from cbmir.demo.uploads import Upload, WholeImages, picture_of, read_uploads
from cbmir.errors import DicomImageError, GalleryError, ImageError, UserError
from cbmir.labels import spelled
from cbmir.runtime.dicom_output import make_results
from cbmir.runtime.evidence import Region
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.entry import Entry, Hit
from cbmir.runtime.gallery.filters import Filter, parse
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.results import Analysis, Neighbour

MOST_BESIDE = 3  # images beside the query
MOST_PRIORS = 6
_LOOKED_AT = 100  # images of one patient that are searched for priors
_IN_RESULTS = 10  # similar images in SR and SC
_AMONG = 200  # a search by findings sorts this many nearest images by the number of findings that match
FROM_THUMBNAIL = (
    "This image's file is gone, unreadable or changed since it was added to the gallery. It was analysed from its "
    "thumbnail, so its findings and similar images are approximate."
)


@dataclass(frozen=True, eq=False)
class Beside:
    """A gallery image that the viewer shows beside the query. `evidence` [h, w] is for the similarity; `whole` is
    True if the picture comes from the file, not from the thumbnail; the rest is as in `Upload`."""

    entry: Entry
    neighbour: Neighbour
    picture: NDArray[np.uint8]
    evidence: NDArray[np.float32] | None
    whole: bool
    key: str
    about: dict[str, Any]


class Desk:
    def __init__(
        self, finder: Finder, examples: Sequence[Example], uploads: Callable[[], Path], feedback: Path | None = None
    ) -> None:
        """`uploads` returns the folder for uploads, which is only known once the server runs.

        Raises:
            UserError: The finder has no gallery, or the file for feedback cannot be used.
        """
        if finder.gallery is None:
            raise UserError("expected a finder with a gallery, found none: open it with one")
        self.finder, self.gallery = finder, finder.gallery
        self.whole = WholeImages()
        self.examples, self._uploads = examples, uploads
        self.feedback = None if feedback is None else Feedback(feedback)

    # Actions that open another image, or search by findings.

    def open(self, session: Session, controls: Controls, paths: object) -> Step:
        """Analyse uploaded files, and delete them once they are read."""
        self._check(controls)
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UserError("Choose or drop files to open.")
        images, left_out = read_uploads(paths, self._uploads(), self._upload)
        step = Step(images[0].caption, controls.of_another(), tuple(images), left_out=tuple(left_out))
        return self._show(session, step)

    def example(self, session: Session, controls: Controls, at: int) -> Step:
        if not isinstance(at, int) or not 0 <= at < len(self.examples):
            raise UserError("Choose one of the examples.")
        example = self.examples[at]
        try:
            radiograph = self.finder.read(example.path)
        except ImageError as error:  # its message contains the path on the server
            raise UserError(f"{example.caption}: this example's file is gone or has changed.") from error
        title = f"Example {example.caption}"
        upload = self._upload_of(radiograph, title)
        return self._show(session, Step(title, controls.of_another(), (upload,)))

    def member(self, session: Session, controls: Controls, at: int) -> Step:
        """Open another image of the study."""
        step = self._step(session)
        if not 0 <= at < len(step.images):
            raise UserError("Choose one of this study's images.")
        title = step.images[at].caption
        return self._show(session, Step(title, controls, step.images, at, step.left_out))

    def like(self, session: Session, controls: Controls, id: str) -> Step:
        """Use a gallery image as the query: its file, or its thumbnail with a warning."""
        try:
            entry = self.gallery.entry(id)
        except GalleryError as error:
            raise UserError("The gallery no longer has this image.") from error
        radiograph, whole = self._of_gallery(entry, analysed=True)
        known = replace(radiograph, sha256=entry.sha256, patient_id="", name=entry.id)  # the gallery knows the patient
        warnings = () if whole else (FROM_THUMBNAIL,)
        upload = self._upload_of(known, f"Gallery image {entry.id}", *warnings)
        before, title = session.step, f"Gallery image {entry.id}"
        for rank, neighbour in enumerate(before.neighbours if before else (), 1):
            title = f"Similar image {rank}" if neighbour.id == id else title
        step = Step(title, controls.of_another(), (upload,), link=(("image", id),), above=session.shown)
        return self._show(session, step)

    def by_findings(self, session: Session, controls: Controls, labels: Sequence[str]) -> Step:
        """Search for images with these findings, without a query image."""
        known = self.finder.card.labels.names
        if not isinstance(labels, list | tuple) or not labels or not all(label in known for label in labels):
            raise UserError("Choose one or several of the model's findings to search for.")
        chosen = tuple(dict.fromkeys(labels))
        title = " + ".join(spelled(label) for label in chosen)
        return self._show(session, Step(title, controls, labels=chosen, link=tuple(("finding", one) for one in chosen)))

    # Actions on the image or the findings that the page shows.

    def search(self, session: Session, controls: Controls) -> Step | None:
        """Repeat the search with other controls, without images beside the query; None if the page is still empty."""
        step = session.step
        if step is None:
            return None
        alone = session.steps.get(step.above, step) if step.compare else step
        return self._show(session, replace(alone, controls=controls, compare=()))

    def region(self, session: Session, controls: Controls, box: Region | None) -> Step | None:
        """Search by a part of the image, or, if `box` is None, by the whole image again."""
        step = self._image_step(session)
        whole = next((one for one in reversed(session.trail()) if one.region is None), step)
        if box is None:
            return session.go(whole.number)
        region = replace(step, controls=controls, wish=Wish(), above=whole.number, compare=(), link=())
        return self._show(session, replace(region, title="Region", region=box))

    def weigh(self, session: Session, controls: Controls, weights: Sequence[float]) -> Step | None:
        """Rank again by a weight for each of the model's findings and by the images that were marked before."""
        if not all(isinstance(weight, int | float) for weight in weights):
            raise UserError("Use the sliders on the page.")
        given = zip(self.finder.card.labels.names, weights, strict=True)
        wish = replace(self._step(session).wish, findings=tuple((name, weight) for name, weight in given if weight))
        return self.refine(session, controls, wish)

    def refine(self, session: Session, controls: Controls, wish: Wish) -> Step | None:
        """Rank again by the images marked as alike and not alike, and towards (above 0) or away from findings."""
        step = self._image_step(session)
        if not wish and step.wish:
            return session.go(step.above)
        if not wish:
            raise UserError("Mark similar images as alike or not alike first, or choose a finding.")
        above = step.above if step.wish else step.number
        title = f"Refined: {wish.text()}"
        return self._show(session, replace(
            step, controls=controls, title=title, wish=wish, above=above, compare=(), link=()))  # fmt: skip

    def compare(self, session: Session, ids: Sequence[str]) -> Step | None:
        """Show similar images beside the query, or, if `ids` is empty, the query alone again."""
        step = self._step(session)
        if not ids:
            return session.go(step.above) if step.compare else step
        ranks = {neighbour.id: rank for rank, neighbour in enumerate(step.neighbours, 1)}
        chosen = tuple(dict.fromkeys(ids))[:MOST_BESIDE]
        if not all(id in ranks for id in chosen):
            raise UserError("Choose similar images that are on the page.")
        above = step.above if step.compare else step.number
        title = f"Beside {', '.join(str(ranks[id]) for id in chosen)}"
        return session.add(replace(step, title=title, compare=chosen, above=above))

    def beside(self, step: Step) -> list[Beside]:
        """Load the similar images that a step shows beside the query."""
        by_id = {neighbour.id: neighbour for neighbour in step.neighbours}
        beside = []
        for neighbour in map(by_id.__getitem__, step.compare):
            entry = self.gallery.entry(neighbour.id)
            radiograph, whole = self._of_gallery(entry)
            query = None if step.analysis is None else step.analysis.query  # of the region or refined search, if any
            evidence = None if query is None else self.finder.evidence_towards(radiograph, query)
            key = self.whole.keep(radiograph, key=f"gallery {entry.id} {entry.sha256}")
            picture = picture_of(radiograph.pixels)
            beside.append(Beside(entry, neighbour, picture, evidence, whole, key, about_image(radiograph)))
        return beside

    def report(self, session: Session, label: str = "") -> str:
        """Make the report on the current image, as one HTML page."""
        step = self._image_step(session)
        assert step.analysis is not None and step.image is not None
        label = label if label in self.finder.card.labels.names else ""
        return report_html(
            self.finder.engine.card, self.gallery, step.image, step.analysis, step.searched, label=label,
            timeline=self._timeline(step),
        )  # fmt: skip

    def dicom_results(self, session: Session) -> bytes:
        """Make a zip file with a DICOM file's SR and SC, as `cbmir pacs analyze` does: for the whole image and without
        filters, but with the page's operating point and patient."""
        step = self._image_step(session)
        image, own = step.image, step.controls
        file = self.whole.dicom(image.key) if image else b""
        if not file:
            raise UserError("Open the DICOM file again. It is no longer kept here.")
        radiograph = self.finder.read(file)
        analysis = self._analyze(radiograph, replace(own.dropped(""), k=_IN_RESULTS), None)
        results = make_results(file, analysis, self.finder, kinds=("sr", "sc"), image=radiograph)
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, dataset in results.named():
                stream = io.BytesIO()  # pydicom needs to seek
                dataset.save_as(stream, enforce_file_format=True)
                archive.writestr(f"{name}.dcm", stream.getvalue())
        return made.getvalue()

    def say(self, session: Session, *, similar: str = "", label: str = "", value: object) -> None:
        """Store a reader's feedback: whether a similar image is alike, or whether the model is right about a finding.

        Args:
            similar: The id of the similar image.
            value: 1, 0, or None to withdraw it.

        Raises:
            UserError: The page does not show it, the finding has no threshold, or the demo collects no feedback.
        """
        step = self._image_step(session)
        assert step.analysis is not None and step.image is not None
        predicted = {one.label: one.predicted for one in step.analysis.findings}
        is_known = predicted.get(label) is not None if label else similar in {one.id for one in step.neighbours}
        if self.feedback is None or not is_known or value not in (0, 1, None):
            raise UserError("Choose a similar image or a finding that is on the page.")
        said = None if value is None else int(bool(value))
        if label and said is not None:  # stored: whether the finding is present
            said = int(bool(said) == bool(predicted[label]))
        known = step.analysis.known
        image = self.gallery.case_id(known[0]) if known else step.image.radiograph.sha256
        case = self.gallery.case_id(similar) if similar else ""
        self.feedback.add(self.finder.card.fingerprint, image, similar=case, label=label, value=said)

    # Internal steps.

    def _show(self, session: Session, step: Step) -> Step:
        self._check(step.controls)
        answered = self._by_findings(step) if step.image is None else self._by_image(step, step.image)
        return session.add(answered)

    def _check(self, controls: Controls) -> None:
        try:
            if where := controls.filter.where:
                parse(where, self.gallery.labels)
        except GalleryError as error:  # its message is about the filters
            raise ControlsError(str(error)) from error

    def _by_image(self, step: Step, image: Upload) -> Step:
        controls = step.controls
        analysis = self._analyze(image.radiograph, controls, step.region)
        if step.wish:
            analysis = self.finder.refine(
                analysis, alike=step.wish.alike, unlike=step.wish.unlike, findings=dict(step.wish.findings),
                k=controls.k, filter=controls.filter, exclude_same_patient=controls.exclude,
            )  # fmt: skip
        is_phantom = image.radiograph.is_phantom or analysis.known
        doubts = (NOT_A_PHANTOM,) if OF_PHANTOMS in self.finder.card.notes and not is_phantom else ()
        analysis = replace(analysis, warnings=(*analysis.warnings, *doubts, *image.warnings))
        known = bool(controls.patient or image.radiograph.patient_id.strip() or analysis.known)
        parts = [controls.text(known=known)]
        if step.region is not None:
            left, top, right, bottom = (f"{100 * edge:.0f}%" for edge in step.region)
            parts.append(f"by a region: {left} to {right} from the left, {top} to {bottom} from the top")
        parts += [f"refined: {step.wish.text()}"] if step.wish else []
        return replace(step, analysis=analysis, neighbours=analysis.neighbours, searched="; ".join(parts))

    def _analyze(self, radiograph: Radiograph, controls: Controls, region: Region | None) -> Analysis:
        analysis = self.finder.analyze(
            radiograph, controls.k, patient_id=controls.patient or None, exclude_same_patient=controls.exclude,
            filter=controls.filter, region=region,
        )  # fmt: skip
        if controls.point == analysis.operating_point:
            return analysis
        return analysis.at(self.finder.engine.card, controls.point)

    def _by_findings(self, step: Step) -> Step:
        """Sort the nearest images by the number of findings that match, then by distance."""
        found = self.finder.search_by_findings(step.labels, _AMONG, filter=step.controls.filter)
        first = sorted(found, key=lambda one: -len(one.shared))  # stable, so that ties stay in order of distance
        return replace(step, neighbours=tuple(first[: step.controls.k]), searched=step.controls.text(known=None))

    def _timeline(self, step: Step) -> list[Hit]:
        """Return the dated images of the patient that are most similar to this one, oldest first."""
        assert step.analysis is not None and step.image is not None
        radiograph, known = step.image.radiograph, step.analysis.known
        patient = step.controls.patient or radiograph.patient_id.strip()
        if known and not patient:
            patient = self.gallery.entry(known[0]).patient_id
        if not patient or not self.gallery.finds_patients:
            return []
        theirs = Filter(only_patients=frozenset({patient}))
        hits = self.gallery.search(step.analysis.embedding, _LOOKED_AT, filter=theirs).hits
        others = [hit for hit in hits if hit.entry.date and hit.entry.sha256 != radiograph.sha256][:MOST_PRIORS]
        return sorted(others, key=lambda hit: hit.entry.date)

    def _upload(self, data: bytes, name: str) -> Upload:
        radiograph = replace(self.finder.read(data), name=name)
        return self._upload_of(radiograph, name, dicom=data if radiograph.sop_instance_uid else b"")

    def _upload_of(self, radiograph: Radiograph, caption: str, *warnings: str, dicom: bytes = b"") -> Upload:
        key, threads = self.whole.keep(radiograph, dicom), self.finder.engine.threads
        upload = Upload.of(radiograph, self.finder.card.preprocess, caption, threads, warnings=warnings, key=key)
        weakref.finalize(upload, self.whole.forget, key)  # when the session ends
        return upload

    def _of_gallery(self, entry: Entry, *, analysed: bool = False) -> tuple[Radiograph, bool]:
        """Read a gallery image. Returns it, and whether it comes from its file, not from its thumbnail. If it is
        `analysed`, raises DicomImageError where an upload would, as for a lateral view."""
        try:
            image = self.finder.read(entry.image)
            if image.sha256 == entry.sha256 or not entry.sha256:
                return image, True
        except ImageError as error:  # the thumbnail is used instead, and the page says so
            if analysed and isinstance(error, DicomImageError):
                raise
        jpeg = self.gallery.thumbnail(entry.id)
        if jpeg is None:
            raise UserError(f"{entry.id}: its file is gone, and the gallery has no thumbnail of it.")
        return self.finder.read(jpeg), False

    def _step(self, session: Session) -> Step:
        if session.step is None:
            raise UserError("Open an image first. The page has none, or was idle for too long and has forgotten it.")
        return session.step

    def _image_step(self, session: Session) -> Step:
        step = self._step(session)
        if step.image is None or step.analysis is None:
            raise UserError("Open an image first: these similar images were searched by findings.")
        return step


def labels_of(step: Step) -> Sequence[str] | None:
    """Return the labels that similar images are compared with; None if nothing is known about the image."""
    if step.analysis is None:
        return step.labels
    return step.analysis.query_labels if step.analysis.labels_known else None
