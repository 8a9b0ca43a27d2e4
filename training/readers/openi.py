"""Open-i, the chest X-rays of Indiana University (Demner-Fushman et al., JAMIA 2016): XML reports with MeSH terms."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from cbmir.errors import ManifestError
from cbmir.input_file import read_input
from cbmir.labels import LabelSet, means_no_finding
from cbmir.manifest import Manifest, Row
from cbmir.training.readers import common
from cbmir.training.readers.download import download, unpack

ARCHIVES = "https://openi.nlm.nih.gov/imgs/collections/"
_NAMES = ("NLMCXR_reports", "NLMCXR_png")
#: NIH's findings -> the MeSH headings for them, with a required qualifier after a slash.
MAPPED: dict[str, tuple[str, ...]] = {
    "Atelectasis": ("pulmonary atelectasis", "atelectasis"),
    "Cardiomegaly": ("cardiomegaly",),
    "Effusion": ("pleural effusion",),
    "Infiltration": ("infiltrate",),
    "Mass": ("mass",),
    "Nodule": ("nodule",),
    "Pneumonia": ("pneumonia",),
    "Pneumothorax": ("pneumothorax", "hydropneumothorax"),
    "Consolidation": ("consolidation",),
    "Edema": ("pulmonary edema",),
    "Emphysema": ("pulmonary emphysema", "emphysema"),
    "Fibrosis": ("pulmonary fibrosis",),
    "Pleural_Thickening": ("thickening/pleura",),
    "Hernia": ("hernia, hiatal",),
}
#: Headings of reports that are not indexed or whose images are insufficient.
_SILENT = {"no indexing", "technical quality of image unsatisfactory"}
_FRONTAL = {"pa": "PA", "ap": "AP", "frontal": ""}
_LATERAL = {"lateral", "lat"}
logger = logging.getLogger("cbmir")
_FILE = re.compile(r"(?:CXR)?(?P<report>\d+)_(?:.*_)?(?P<image>IM-\d+-\d+(?:-\d+)*)")


@dataclass(frozen=True)
class OpeniReport:
    """One report: its id, MeSH headings in lower case with their qualifiers, text, and images with captions."""

    uid: str
    headings: tuple[tuple[str, ...], ...]
    text: str
    images: tuple[tuple[str, str], ...]


def read_openi(
    folder: Path, *, fetch: bool = False, labels: Literal["mapped", "own"] = "mapped", frontal_only: bool = True,
    projections: Path | None = None, guess_frontal: bool = False, archives: str = ARCHIVES,
    missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """Read Open-i's chest X-rays into a manifest.

    "normal" makes every label 0. Without headings, or with "No Indexing", all are unknown. Frontal or lateral comes
    from `projections` or the caption; the sidecar counts unknown views. Each report counts as a patient.

    Args:
        folder: The folder with the reports (`ecgen-radiology/*.xml`) and the images, at any depth.
        fetch: Download the publisher's two archives into the folder first, and unpack them.
        labels: `mapped` to the 14 findings of NIH (`MAPPED`), or the headings' `own` names.
        frontal_only: Leave out lateral images, and those with an unknown view.
        projections: A CSV `filename,projection` (Frontal, Lateral), such as Kaggle's indiana_projections.csv.
        guess_frontal: If a report has no frontal image, treat its first image with an unknown view as frontal.
        archives: URL of the folder with the archives.
        missing: `error`, or `skip` to leave out images without a file.

    Raises:
        ManifestError: A report, the table or the folder is not as expected.
        DownloadError: The archives cannot be fetched.
    """
    digests = {}
    if fetch:
        for name in _NAMES:
            digests[f"{name}.tgz"] = download(f"{archives}{name}.tgz", folder / f"{name}.tgz")
            unpack(folder / f"{name}.tgz", folder / name)
    common.check_folder(folder, "the folder of Open-i's reports and images")
    paths = [path for path in sorted(folder.rglob("*.xml")) if not _hidden(path.relative_to(folder))]
    reports = [_report(path) for path in paths]
    if not reports:
        raise ManifestError(f"{folder}: expected reports (ecgen-radiology/*.xml), found none; --download fetches them")
    known = _projections(projections) if projections else {}
    choice, chosen = common.ViewChoice({v: v for v in ("PA", "AP", "FRONTAL", "LATERAL")}, frontal_only), Counter[str]()
    mapping = MAPPED if labels == "mapped" else {name: (name,) for name in _own_names(reports)}
    rows = []
    for report in reports:
        values = _labels(report, mapping)
        for image, name in zip(report.images, _views(report, known, chosen, guess_frontal), strict=True):
            if (view := choice.choose(name)) is not None:
                rows.append(Row(Path(image[0]), report.uid, values, report.uid, view, report=report.text))
    if silent := chosen.pop("reports without a frontal image", 0):
        logger.warning(
            "%s: %d reports have no image whose caption says that it is frontal: %s", folder, silent,
            "its first image is taken as frontal, a guess" if guess_frontal else
            "the views of their images are not known; give a table with --projections, or take the first image with "
            "--guess-frontal",
        )  # fmt: skip
    policies = choice.policies(rows, folder)
    index = common.index_images(folder)
    rows, located = common.locate(rows, lambda row: index.get(row.image.name), missing, folder)
    return common.finish(
        Manifest(LabelSet(tuple(mapping)), tuple(rows)), "openi", [folder, *([projections] if projections else [])],
        seed, policies=policies | {
            "labels": MAPPED if labels == "mapped" else "the headings' own", "views_by": dict(chosen),
            "each_report_its_own_patient": True, "archives_sha256": digests, **located,
        }
    )  # fmt: skip


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _report(path: Path) -> OpeniReport:
    try:
        root = ElementTree.fromstring(read_input(path, common.MOST_REPORT))
    except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:
        raise ManifestError(f"{path}: expected a report of Open-i in XML, found {error}") from error
    uid = root.find("uId")
    name = uid.get("id", "").strip() if uid is not None else ""
    images = tuple((one.get("id", "").strip(), one.findtext("caption") or "") for one in root.iter("parentImage"))
    if not name or not all(image for image, _ in images):
        raise ManifestError(f"{path}: expected a report's uId and ids of its images, found one without")
    headings = (tuple(part.strip().casefold() for part in (one.text or "").split("/")) for one in root.iter("major"))
    sections = ((one.get("Label", ""), (one.text or "").strip()) for one in root.iter("AbstractText"))
    text = "\n".join(f"{label}: {words}" for label, words in sections if label in ("FINDINGS", "IMPRESSION") and words)
    return OpeniReport(name, tuple(one for one in headings if one[0]), text, images)


def _own_names(reports: Sequence[OpeniReport]) -> list[str]:
    names = {heading[0] for report in reports for heading in report.headings} - _SILENT
    return sorted(name for name in names if not means_no_finding(name))


def _labels(report: OpeniReport, mapping: Mapping[str, tuple[str, ...]]) -> tuple[int | None, ...]:
    said = [heading for heading in report.headings if heading[0] not in _SILENT]
    if not said:
        return (None,) * len(mapping)
    wanted = {name for names in mapping.values() for name in names}
    found = {name for name in wanted for heading in said if _means(heading, name)}
    return common.mapped_labels(found, mapping)


def _means(heading: Sequence[str], name: str) -> bool:
    first, *qualifiers = name.split("/")
    return heading[0] == first and set(qualifiers) <= set(heading[1:])


def _views(report: OpeniReport, known: Mapping[tuple[str, str], str], chosen: Counter[str], guess: bool) -> list[str]:
    """Return the view of each image of a report, for `ViewChoice`; `chosen` counts how views were determined."""
    views = []
    for image, caption in report.images:
        words = set(re.findall(r"[a-z]+", caption.casefold()))
        frontal, lateral = sorted(words & set(_FRONTAL), key=_FRONTAL.__getitem__), bool(words & _LATERAL)
        if (key := _key(image)) in known:
            views.append(known[key])
            chosen["projections"] += 1
        elif bool(frontal) != lateral:
            views.append("LATERAL" if lateral else _FRONTAL[frontal[-1]] or "FRONTAL")
            chosen["caption"] += 1
        else:
            views.append("")
    if "" in views and not {"PA", "AP", "FRONTAL"} & set(views):
        chosen["reports without a frontal image"] += 1
        if guess:
            unknown = [place for place, view in enumerate(views) if not view]
            views[min(unknown, key=lambda place: report.images[place][0])] = "FRONTAL"
            chosen["first of its report, guessed"] += 1
    if views.count(""):
        chosen["not known"] += views.count("")
    return views


def _key(name: str) -> tuple[str, str]:
    """Return report and image from a file's name; NLM and Kaggle write the rest of it differently."""
    parts = _FILE.match(name)
    return (parts["report"], parts["image"]) if parts else ("", name)


def _projections(path: Path) -> dict[tuple[str, str], str]:
    views = {"Frontal": "FRONTAL", "Lateral": "LATERAL"}
    found = {}
    for where, record in common.read_source(path, ("filename", "projection"), "a table of projections").records():
        name, projection = common.cell(record, "filename", where), common.cell(record, "projection", where)
        if projection not in views:
            raise ManifestError(f"{where}: expected Frontal or Lateral, found {projection!r}")
        found[_key(name)] = views[projection]
    return found
